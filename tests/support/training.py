"""What the ranks run: training on the engine, and the oracle it must equal.

The oracle is one process that runs forward and backward once per rank's batch from the same weights, averages the
gradients over ranks and takes one plain `torch.optim` step.
"""

from __future__ import annotations

import copy
import gc
import hashlib
import os
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from support.models import MODELS
from torch import nn

import dear_engine as dear

WHOLE_MODEL = 2**30

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, weight_decay=0.01),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.01),
    "Adam": lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.5),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.05),
    "NAdam": lambda p: torch.optim.NAdam(p, lr=0.01),
    "Nesterov": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, nesterov=True),
    "RAdam": lambda p: torch.optim.RAdam(p, lr=0.01),
    "Adamax": lambda p: torch.optim.Adamax(p, lr=0.01),
    "Adadelta": lambda p: torch.optim.Adadelta(p),
    "ASGD": lambda p: torch.optim.ASGD(p, lr=0.05),
    "Rprop": lambda p: torch.optim.Rprop(p, lr=0.01),
    "AdamW, fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "AdamW, foreach": lambda p: torch.optim.AdamW(p, lr=0.01, foreach=True),
    "AdamW, tensor rate": lambda p: torch.optim.AdamW(p, lr=torch.tensor(0.01), foreach=False),
    "AdamW, two groups": lambda p: _two_groups(list(p)),
    "Adafactor": lambda p: torch.optim.Adafactor(p, lr=0.05),
}


def _two_groups(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """As in most scripts: weight decay for matrices only, and here another rate too."""
    matrices = [p for p in parameters if p.ndim >= 2]
    others = [p for p in parameters if p.ndim < 2]
    return torch.optim.AdamW([{"params": matrices, "weight_decay": 0.1}, {"params": others, "lr": 0.003}], lr=0.01)


@dataclass(frozen=True)
class Outcome:
    """How far parameters are from the oracle's, a digest of them, and the losses."""

    distance: float
    digest: str
    losses: list[float]


@contextmanager
def engine(model: nn.Module, optimizer: torch.optim.Optimizer, **settings: Any) -> Iterator[dear.DistributedOptimizer]:
    """An engine that gives the model back at the end."""
    distributed = dear.DistributedOptimizer(optimizer, model, **{"tuner": None, **settings})
    try:
        yield distributed
    finally:
        distributed.close()


def build(name: str, seed: int = 0) -> nn.Module:
    """One of the models, in double precision."""
    torch.manual_seed(seed)
    return MODELS[name]().double()


def batches(step: int) -> list[torch.Tensor]:
    """Every rank's batch of a step: world_size times (6, 12)."""
    generator = torch.Generator().manual_seed(1000 + step)
    return [torch.randn(6, 12, generator=generator, dtype=torch.double) for _ in range(dist.get_world_size())]


def loss_of(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Some scalar that depends on all outputs."""
    return model(x).square().mean() + model(x.flip(0))[:, 0].sum() / 50


def oracle_step(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    """One step of the oracle."""
    optimizer.zero_grad()
    for x in batches(step):
        (loss_of(model, x) / dist.get_world_size()).backward()
    optimizer.step()


def distance(model: nn.Module, reference: nn.Module) -> float:
    """The largest difference of any parameter."""
    pairs = zip(model.parameters(), reference.parameters(), strict=True)
    return max((a - b).abs().max().item() for a, b in pairs)


def digest(model: nn.Module) -> str:
    """Equal for bit-identical parameters."""
    return digest_of(model.parameters())


def digest_of(tensors: Iterable[torch.Tensor]) -> str:
    """Equal for bit-identical tensors, of whatever dtype."""
    content = (t.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() for t in tensors)
    return hashlib.sha256(b"".join(content)).hexdigest()


def parity(model_name: str, optimizer_name: str, threshold_bytes: int, steps: int) -> Outcome:
    """Train from different seeds on each rank; the oracle starts as rank 0 does."""
    model, reference = build(model_name, seed=dist.get_rank()), build(model_name, seed=0)
    make = OPTIMIZERS[optimizer_name]
    oracle, losses = make(reference.parameters()), []
    with engine(model, make(model.parameters()), threshold_bytes=threshold_bytes) as optimizer:
        for step in range(steps):
            optimizer.zero_grad()
            loss = loss_of(model, batches(step)[dist.get_rank()])
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
            oracle_step(reference, oracle, step)
        return Outcome(distance(model, reference), digest(model), losses)


def ddp_losses(model_name: str, optimizer_name: str, steps: int) -> list[float]:
    """The losses of the same training on DistributedDataParallel."""
    model = nn.parallel.DistributedDataParallel(build(model_name, seed=0))
    return _train(model, OPTIMIZERS[optimizer_name](model.parameters()), range(steps))


def traffic(threshold_bytes: int, steps: int) -> dict[str, int]:
    """What a rank sends in some steps, and what all-reduces of the same buffers would have sent."""
    model = build("Perceptron")
    with engine(model, OPTIMIZERS["SGD"](model.parameters()), threshold_bytes=threshold_bytes) as optimizer:
        for step in range(steps):
            optimizer.zero_grad()
            loss_of(model, batches(step)[dist.get_rank()]).backward()
            optimizer.step()
        optimizer.synchronize()
        sent = optimizer.traffic
        return {
            "buckets": len(optimizer.plan.buckets),
            "reduce_scatters": sent.reduce_scatters,
            "all_gathers": sent.all_gathers,
            "sent_bytes": sent.sent_bytes,
            "gradient_bytes": sum(p.nbytes for p in model.parameters()),
            "parameters": len(list(model.parameters())),
        }


def pending_model(threshold_bytes: int = 1500) -> tuple[nn.Module, dear.DistributedOptimizer, nn.Module]:
    """A model with an update pending, its optimizer, and how the model must look once the update is applied."""
    model, reference = build("Perceptron"), build("Perceptron")
    optimizer = dear.DistributedOptimizer(
        OPTIMIZERS["SGD"](model.parameters()), model, threshold_bytes=threshold_bytes, tuner=None
    )
    loss_of(model, batches(0)[dist.get_rank()]).backward()
    optimizer.step()
    oracle_step(reference, OPTIMIZERS["SGD"](reference.parameters()), 0)
    return model, optimizer, copy.deepcopy(reference)


def _train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> list[float]:
    losses = []
    for step in steps:
        optimizer.zero_grad()
        loss = loss_of(model, batches(step)[dist.get_rank()])
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def group_destroyed_at_once() -> float:
    """Parameters after the process group is destroyed right after the last step, against the oracle's."""
    model, reference = build("Perceptron"), build("Perceptron")
    optimizer = dear.DistributedOptimizer(OPTIMIZERS["SGD"](model.parameters()), model, tuner=None)
    oracle = OPTIMIZERS["SGD"](reference.parameters())
    for step in range(3):
        _train(model, optimizer, range(step, step + 1))
        oracle_step(reference, oracle, step)
    time.sleep(0.3 * dist.get_rank())  # the others leave first
    dist.destroy_process_group()
    return distance(model, reference)


def in_a_group_of_its_own() -> float | None:
    """The first and the last rank train together; the distance from the oracle of those two."""
    members = [0, dist.get_world_size() - 1]
    group = dist.new_group(members)
    if dist.get_rank() not in members:
        return None
    model, reference = build("Perceptron", seed=dist.get_rank()), build("Perceptron")
    oracle = OPTIMIZERS["AdamW"](reference.parameters())
    with engine(model, OPTIMIZERS["AdamW"](model.parameters()), process_group=group) as optimizer:
        for step in range(4):
            _train(model, optimizer, range(step, step + 1))
            oracle.zero_grad()
            for rank in members:
                (loss_of(reference, batches(step)[rank]) / len(members)).backward()
            oracle.step()
        return distance(model, reference)


def outlives_its_closing() -> bool:
    """Whether something keeps an engine that is closed, though nobody refers to it any more."""
    model, optimizer, _ = pending_model()
    reference = weakref.ref(optimizer)
    optimizer.close()
    del model, optimizer
    gc.collect()
    return reference() is not None


def opened_and_closed(times: int) -> int:
    """How many more file descriptors are open after engines were built and closed many times."""
    model = build("Perceptron")
    counts = []
    for _ in range(times):
        with engine(model, OPTIMIZERS["SGD"](model.parameters())) as optimizer:
            _train(model, optimizer, range(1))
        counts.append(len(os.listdir("/proc/self/fd")))
    return counts[-1] - counts[len(counts) // 2]
