"""What someone meets who comes from another data-parallel engine."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from support.training import OPTIMIZERS, batches, build, digest, distance, engine, loss_of
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import distribute_tensor

from dear_tune.errors import DearTuneError


def _train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        optimizer.zero_grad()
        loss_of(model, batches(step)[dist.get_rank()]).backward()
        optimizer.step()


def _raised(use: Any) -> str:
    try:
        use()
    except DearTuneError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def checkpoint_of_ddp() -> float:
    """How far a model is from the DDP model whose checkpoint it has loaded."""
    ddp = nn.parallel.DistributedDataParallel(build("Perceptron"))
    _train(ddp, OPTIMIZERS["SGD"](ddp.parameters()), range(2))
    model = build("Perceptron", seed=3)
    with engine(model, OPTIMIZERS["SGD"](model.parameters())):
        model.load_state_dict(ddp.module.state_dict())
        return distance(model, ddp.module)


def own_gradients(update: str) -> bool:
    """Whether `.grad` is the local gradient, to the last bit, after backward and after the step."""
    model, alone = build("Perceptron"), build("Perceptron")
    x = batches(0)[dist.get_rank()]
    loss_of(alone, x).backward()
    with engine(model, OPTIMIZERS["SGD"](model.parameters()), update=update) as optimizer:
        loss_of(model, x).backward()
        same = [torch.equal(p.grad, q.grad) for p, q in zip(model.parameters(), alone.parameters(), strict=True)]
        optimizer.step()
        same += [torch.equal(p.grad, q.grad) for p, q in zip(model.parameters(), alone.parameters(), strict=True)]
    return all(same)


def accumulated_without_no_sync(update: str) -> tuple[float, int]:
    """The distance from the oracle of three backward passes a step, and the reduce-scatters of a step and bucket."""
    model, reference = build("Perceptron"), build("Perceptron")
    oracle = OPTIMIZERS["AdamW"](reference.parameters())
    with engine(model, OPTIMIZERS["AdamW"](model.parameters()), threshold_bytes=1500, update=update) as optimizer:
        buckets = len(optimizer.plan.buckets)
        for step in range(4):
            for each in (optimizer, oracle):
                each.zero_grad()
            for micro in range(3):
                everyone = batches(10 * step + micro)
                loss_of(model, everyone[dist.get_rank()]).backward()
                for x in everyone:
                    (loss_of(reference, x) / dist.get_world_size()).backward()
            for each in (optimizer, oracle):
                each.step()
        return distance(model, reference), optimizer.traffic.reduce_scatters // (4 * buckets)


def step_left_out(update: str, set_to_none: bool) -> float:
    """The distance from the oracle when every other step's gradients are dropped."""
    model, reference = build("Perceptron"), build("Perceptron")
    oracle = OPTIMIZERS["AdamW"](reference.parameters())
    with engine(model, OPTIMIZERS["AdamW"](model.parameters()), threshold_bytes=1500, update=update) as optimizer:
        for step in range(6):
            everyone = batches(step)
            loss_of(model, everyone[dist.get_rank()]).backward()
            for x in everyone:
                (loss_of(reference, x) / dist.get_world_size()).backward()
            if step % 2:
                for each in (optimizer, oracle):
                    each.step()
            for each in (optimizer, oracle):
                each.zero_grad(set_to_none=set_to_none)
        return distance(model, reference)


def running_mean() -> list[float]:
    """A batch normalization's running mean after one step."""
    model = build("Convolutional")
    with engine(model, OPTIMIZERS["SGD"](model.parameters())) as optimizer:
        _train(model, optimizer, range(1))
    return model[2].running_mean.tolist()


def stepped_by_itself() -> str:
    """What the wrapped optimizer's own step raises."""
    model = build("Perceptron")
    inner = OPTIMIZERS["SGD"](model.parameters())
    with engine(model, inner):
        return _raised(inner.step)


def different_states() -> str:
    """What is raised when only rank 0 has loaded the optimizer's state."""
    model = build("Perceptron")
    inner = OPTIMIZERS["AdamW"](model.parameters())
    if dist.get_rank() == 0:
        loss_of(model, batches(0)[0]).backward()
        inner.step()
    return _raised(lambda: engine(model, inner).__enter__())


def large_gradients_in_half_precision() -> float:
    """A parameter after a step against gradients whose sum float16 cannot hold."""
    model = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(model.weight)
    with engine(model, torch.optim.SGD(model.parameters(), lr=1.0), communication_dtype=torch.float16) as optimizer:
        (model(torch.ones(1, 1)) * 60_000).sum().backward()
        optimizer.step()
        return model.weight.item()


def sharded_state(update: str) -> tuple[int, int]:
    """How many elements the first moments have on this rank, and how many the parameters have."""
    model = build("Perceptron")
    with engine(model, OPTIMIZERS["AdamW"](model.parameters()), update=update) as optimizer:
        _train(model, optimizer, range(1))
        held = sum(state["exp_avg"].numel() for state in optimizer.state.values())
    return held, sum(p.numel() for p in model.parameters())


def dtensor() -> str:
    """What is raised for a parameter that another engine distributes."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = nn.Linear(4, 4)
    model.weight = nn.Parameter(distribute_tensor(model.weight.detach(), mesh))
    return _raised(lambda: engine(model, torch.optim.SGD(model.parameters(), lr=0.1)).__enter__())


def sharded_state_dict() -> tuple[str, list[int], str]:
    """What `state_dict()` raises at first, the entries it has once consolidated, and what it raises a step later."""
    model = build("Perceptron")
    with engine(model, OPTIMIZERS["AdamW"](model.parameters()), update="sharded") as optimizer:
        _train(model, optimizer, range(1))
        before = _raised(optimizer.state_dict)
        optimizer.consolidate_state_dict()
        entries = [state["exp_avg"].numel() for state in optimizer.state_dict()["state"].values()]
        _train(model, optimizer, range(1, 2))
        return before, entries, _raised(optimizer.state_dict)


def distributed_checkpoint(update: str, folder: str) -> tuple[str, str]:
    """Digests after four steps: uninterrupted, and saved after two by torch.distributed.checkpoint and resumed."""
    model = build("Attention")
    with engine(model, OPTIMIZERS["SGD"](model.parameters()), threshold_bytes=1500, update=update) as optimizer:
        _train(model, optimizer, range(2))
        optimizer.consolidate_state_dict()
        states = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
        dcp.save(copy.deepcopy(states), checkpoint_id=folder)
        _train(model, optimizer, range(2, 4))
        uninterrupted = digest(model)
    other = build("Attention", seed=5)
    with engine(other, OPTIMIZERS["SGD"](other.parameters()), threshold_bytes=1500, update=update) as optimizer:
        optimizer.consolidate_state_dict()
        states = dict(zip(("model", "optimizer"), get_state_dict(other, optimizer), strict=True))
        dcp.load(states, checkpoint_id=folder)
        set_state_dict(other, optimizer, model_state_dict=states["model"], optim_state_dict=states["optimizer"])
        _train(other, optimizer, range(2, 4))
        return uninterrupted, digest(other)
