"""D: who looks at parameters, or writes to them, while their update is pending."""

from __future__ import annotations

import copy
import io
import os
import pickle
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import torch
from support.models import MODELS
from support.scenarios.core import (
    STEPS,
    Batch,
    Setting,
    Side,
    Twins,
    adamw,
    check_equal,
    plain_loss,
    scenario,
    twins,
)
from support.training import batches
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

Read = Callable[[Side, list[nn.Parameter]], Any]
"""A way to look at parameters: a side, and its parameters in a list made before. Gives tensors, or a whole model."""


def _pickled(model: nn.Module) -> nn.Module:
    return pickle.loads(pickle.dumps(model))


def _saved_and_loaded(thing: Any) -> Any:
    file = io.BytesIO()
    torch.save(thing, file)
    return torch.load(io.BytesIO(file.getvalue()), weights_only=False)


def _evaluated(model: nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model(batches(0)[0])


def _inferred_under_autocast(model: nn.Module) -> list[torch.Tensor]:
    with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16):
        return [model[0].weight.clone()]


def _in_evaluation_mode(side: Side, kept: list[nn.Parameter]) -> list[torch.Tensor]:
    side.model.eval()
    seen = [p.detach() for p in kept]
    side.model.train()
    return seen


def _averaged(side: Side, _: list[nn.Parameter]) -> nn.Module:
    average = AveragedModel(side.model, multi_avg_fn=get_ema_multi_avg_fn(0.5))
    average.update_parameters(side.model)
    return average.module


def _moving_average(_: Side, kept: list[nn.Parameter]) -> list[torch.Tensor]:
    averages = [torch.zeros_like(p, requires_grad=False) for p in kept]
    with torch.no_grad():
        torch._foreach_lerp_(averages, kept, 0.5)
    return averages


def _moving_average_of_data(_: Side, kept: list[nn.Parameter]) -> list[torch.Tensor]:
    averages = [torch.ones_like(p.data) for p in kept]
    for average, parameter in zip(averages, kept, strict=True):
        average.mul_(0.5).add_(parameter.data, alpha=0.5)
    return averages


def _copied(_: Side, kept: list[nn.Parameter]) -> list[torch.Tensor]:
    copies = [torch.empty_like(p, requires_grad=False) for p in kept]
    for each, parameter in zip(copies, kept, strict=True):
        each.copy_(parameter.detach())
    return copies


def _without_a_forward(read: Callable[[nn.Module], Any]) -> Read:
    return lambda side, _: read(side.model)


def _of_each(read: Callable[[nn.Parameter], Any]) -> Read:
    return lambda _, kept: [read(p) for p in kept]


OF_THE_MODEL: dict[str, Callable[[nn.Module], Any]] = {
    "state_dict": lambda model: model.state_dict(),
    "state_dict, keep_vars": lambda model: model.state_dict(keep_vars=True),
    "submodule's state_dict": lambda model: [child.state_dict() for child in model],
    "parameters": lambda model: [p.detach() for p in model.parameters()],
    "submodule's parameters": lambda model: [p.detach() for child in model for p in child.parameters()],
    "get_parameter": lambda model: [model.get_parameter("0.weight").detach()],
    "attribute": lambda model: [model[0].weight.detach(), model[4].bias.detach()],
    "parameters_to_vector": lambda model: [nn.utils.parameters_to_vector(model.parameters()).detach()],
    "deepcopy": copy.deepcopy,
    "deepcopy of a submodule": lambda model: copy.deepcopy(model[0]),
    "pickle": _pickled,
    "torch.save": _saved_and_loaded,
    "to": lambda model: model.to("cpu"),
    "share_memory": lambda model: model.share_memory(),
    "no-grad forward": _evaluated,
    "inference mode under autocast": _inferred_under_autocast,
    "torch.func.functional_call": lambda model: torch.func.functional_call(model, {}, (batches(0)[0],)).detach(),
}

OF_A_PARAMETER: dict[str, Callable[[nn.Parameter], Any]] = {
    "detach": lambda p: p.detach(),
    ".data": lambda p: p.data,
    "clone": lambda p: p.detach().clone(),
    "view": lambda p: p.view(-1).detach(),
    "item": lambda p: p.flatten()[0].item(),
    "tolist": lambda p: p.tolist(),
    "numpy": lambda p: p.detach().numpy().tolist(),
    "norm": lambda p: p.norm().detach(),
    "deepcopy": copy.deepcopy,
    "torch.save": lambda p: _saved_and_loaded(p).detach(),
    "repr": repr,
    "equal": lambda p: bool(torch.equal(p, torch.zeros_like(p))),
    "isnan": lambda p: p.isnan().any().item(),
    "bytes": lambda p: bytes(p.detach().flatten().view(torch.uint8).tolist()),
    "untyped_storage": lambda p: bytes(p.untyped_storage().tolist()),
    "dlpack": lambda p: torch.from_dlpack(p.detach()),
}

OF_SEVERAL: dict[str, Read] = {
    "eval()": _in_evaluation_mode,
    "stack": lambda _, kept: torch.cat([p.flatten() for p in kept]).detach(),
    "_foreach_norm": lambda _, kept: [norm.detach() for norm in torch._foreach_norm(kept)],
    "moving average by AveragedModel": _averaged,
    "moving average by _foreach_lerp_": _moving_average,
    "moving average of .data": _moving_average_of_data,
    "copy_": _copied,
    "param_groups": lambda side, _: [p.detach() for p in side.optimizer.param_groups[0]["params"]],
}


@scenario(
    "D8",
    "whoever looks, in whatever way, while an update is pending sees the latest step",
    kinds={
        "the model": {name: _without_a_forward(read) for name, read in OF_THE_MODEL.items()},
        "kept parameters": {name: _of_each(read) for name, read in OF_A_PARAMETER.items()},
        "several at once": OF_SEVERAL,
    },
)
def pending_update(setting: Setting, ways: Any) -> None:
    def make(parameters: Any) -> torch.optim.Optimizer:  # without state, which a rank has only a part of when sharded
        return torch.optim.SGD(parameters, lr=0.1)

    with twins(setting, MODELS["Perceptron"], make) as pair:
        kept = [list(side.model.parameters()) for side in pair]
        for step, (name, read) in enumerate(ways.items()):
            pair.train([step])
            assert all(type(p) is not nn.Parameter for p in kept[0]), f"nothing is pending before {name}"
            _look(pair, kept, name, read)
        pair.check()


def _look(pair: Twins, kept: list[list[nn.Parameter]], name: str, read: Read) -> None:
    """What is seen is let go before the next step: whoever keeps it would have that one's updates applied at once."""
    mine, theirs = (_plain(read(side, references)) for side, references in zip(pair, kept, strict=True))
    try:
        check_equal(mine, theirs)
    except AssertionError as error:
        raise AssertionError(f"read by {name}: {error}") from error


def _plain(seen: Any) -> Any:
    """Tensors and numbers, however nested; of a copied model its parameters, and that it is of plain classes."""
    if isinstance(seen, nn.Module):
        return {name: p.detach() for name, p in seen.named_parameters()}
    if isinstance(seen, nn.Parameter):
        return seen.detach()
    if isinstance(seen, Mapping):
        return {name: _plain(value) for name, value in seen.items()}
    return {str(index): _plain(value) for index, value in enumerate(seen)} if isinstance(seen, list) else seen


@scenario("D8b", "copies and pickles of a model are of its own classes, train by themselves and know no engine")
def independent_copies(setting: Setting) -> None:
    with twins(setting, MODELS["Perceptron"], adamw) as pair:
        pair.train(range(2))
        for copied in (copy.deepcopy(pair.engine.model), _pickled(pair.engine.model)):
            alone = torch.optim.SGD(copied.parameters(), lr=0.1)
            plain_loss(copied, Batch(batches(9)[0], 0, 9)).backward()
            alone.step()
            assert type(copied) is type(pair.oracle.model)
            assert {type(p) for p in copied.parameters()} == {nn.Parameter}
        pair.train(range(2, STEPS))
        pair.check()


@scenario("D8c", "threads that look at the model while training goes on see a step's values, and change nothing")
def threads(setting: Setting) -> None:
    with twins(setting, MODELS["Perceptron"], adamw) as pair, ThreadPoolExecutor(4) as readers:
        for step in range(10):
            pair.train([step])
            seen = [readers.submit(pair.engine.model.state_dict) for _ in range(4)]
            with torch.no_grad():
                pair.engine.model(batches(step)[0])
            for each in seen:
                check_equal(dict(each.result()), dict(pair.oracle.model.state_dict()))
        pair.check()


class _Slow(torch.optim.SGD):
    """Takes its time between one parameter and the next, as large models do."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # noqa: ARG002 # an optimizer's signature
        for parameter in self.param_groups[0]["params"]:
            if parameter.grad is not None:
                parameter.sub_(parameter.grad, alpha=self.param_groups[0]["lr"] / 2)
                time.sleep(0.002)  # long enough for a reader to come in between
                parameter.sub_(parameter.grad, alpha=self.param_groups[0]["lr"] / 2)


@scenario("D8e", "threads that read parameters while `step()` runs raise nothing and change nothing")
def threads_across_the_step(setting: Setting) -> None:
    with twins(setting, MODELS["Perceptron"], partial(_Slow, lr=0.1)) as pair, ThreadPoolExecutor(2) as readers:
        for step in range(4):
            ended = threading.Event()
            reading = [readers.submit(_read_until, ended, pair.engine.model) for _ in range(2)]
            try:
                pair.train([step])
            finally:
                ended.set()
            assert all(each.result() > 0 for each in reading)
        pair.check()


def _read_until(ended: threading.Event, model: nn.Module) -> int:
    """How often all parameters were read."""
    times = 0
    while not ended.is_set() or times == 0:
        time.sleep(0.001)  # so that the training thread gets on
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.clone()
        times += 1
    return times


@scenario("D8f", "a process that forks while an update is pending: the child sees the latest step")
def forked(setting: Setting) -> None:
    with twins(setting, MODELS["Perceptron"], adamw) as pair:
        for step in range(3):
            pair.train([step])
            reading, writing = os.pipe()
            child = os.fork()
            if child == 0:
                os.write(writing, pickle.dumps([p.detach().tolist() for p in pair.engine.model.parameters()]))
                os._exit(0)
            os.close(writing)
            with os.fdopen(reading, "rb") as pipe:
                seen = pickle.load(pipe)
            os.waitpid(child, 0)
            latest = [p.detach() for p in pair.oracle.model.parameters()]
            check_equal(dict(enumerate(map(torch.tensor, seen))), dict(enumerate(each.float() for each in latest)))
        pair.check()


@scenario("D8d", "the last step is not lost when the engine is closed, or dropped with the process group, right after")
def last_step(setting: Setting) -> None:
    with twins(setting, MODELS["Perceptron"], adamw) as pair:
        kept = list(pair.engine.model.parameters())
        pair.train(range(STEPS))
    check_equal(dict(enumerate(p.detach() for p in kept)), dict(enumerate(pair.oracle.model.parameters())))


def _clamp_all(model: nn.Module, _: list[nn.Parameter]) -> None:
    for parameter in model.parameters():
        parameter.clamp_(-0.2, 0.2)


def _clamp_kept(_: nn.Module, kept: list[nn.Parameter]) -> None:
    for parameter in kept:
        parameter.clamp_(-0.2, 0.2)


def _clamp_data(_: nn.Module, kept: list[nn.Parameter]) -> None:
    for parameter in kept:
        parameter.data.clamp_(-0.2, 0.2)


def _set_data(_: nn.Module, kept: list[nn.Parameter]) -> None:
    for parameter in kept:
        parameter.data = parameter.data.clamp(-0.2, 0.2)


def _clamp_together(_: nn.Module, kept: list[nn.Parameter]) -> None:
    torch._foreach_clamp_max_(kept, 0.2)


def _renormalize(model: nn.Module, _: list[nn.Parameter]) -> None:
    model[0].weight.copy_(model[0].weight / model[0].weight.norm(dim=1, keepdim=True))


def _reset(model: nn.Module, _: list[nn.Parameter]) -> None:
    nn.init.ones_(model[2].weight)
    nn.init.zeros_(model[3].bias)


def _mask(_: nn.Module, kept: list[nn.Parameter]) -> None:
    kept[0][kept[0].abs() < 0.1] = 0
    kept[1][:2] = 0


def _overwrite(_: nn.Module, kept: list[nn.Parameter]) -> None:
    kept[0].copy_(torch.full_like(kept[0], 0.25))
    kept[1].fill_(0.5)


def _write_out(_: nn.Module, kept: list[nn.Parameter]) -> None:
    torch.mul(kept[0], 0.5, out=kept[0])


WRITES = {
    "parameters().clamp_": _clamp_all,
    "kept.clamp_": _clamp_kept,
    "kept.data.clamp_": _clamp_data,
    "kept.data =": _set_data,
    "_foreach_clamp_max_": _clamp_together,
    "renormalized": _renormalize,
    "nn.init": _reset,
    "masked": _mask,
    "overwritten": _overwrite,
    "out=": _write_out,
}


@scenario("D9b", "weights that are clamped, masked, reset or overwritten right after `step()`", kinds=WRITES)
def written(setting: Setting, write: Any) -> None:
    with twins(setting, MODELS["Perceptron"], adamw) as pair:
        kept = [list(side.model.parameters()) for side in pair]
        for step in range(STEPS):
            for side, references in zip(pair, kept, strict=True):
                side.train(step)
                with torch.no_grad():
                    write(side.model, references)
        pair.check()
