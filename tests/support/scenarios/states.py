"""D: state that is saved, restored, taken over and given back."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from support.models import MODELS
from support.scenarios.core import (
    STEPS,
    UPDATES,
    Loud,
    Setting,
    Side,
    adamw,
    beside,
    built,
    check_equal,
    register,
    scenario,
    twins,
    wrapped,
)
from support.training import digest
from torch.optim import lr_scheduler

from dear_tune.errors import UnsupportedError

register("D7", "saved in the middle, resumed in fresh processes: equal to the last bit, at another world size too")


def save_in_the_middle(setting: Setting, folder: Path) -> str:
    """Train ten steps, saved by rank 0 after five; the digest of the end."""
    with twins(setting, MODELS["Functional"], adamw) as pair:
        pair.train(range(STEPS))
        saved = _saved(pair.engine)
        if dist.get_rank() == 0:
            torch.save(saved, folder / "saved.pt")
        pair.train(range(STEPS, 2 * STEPS))
        pair.check()
        return digest(pair.engine.model)


def resume(setting: Setting, folder: Path) -> str:
    """Go on from what was saved, beside a plain optimizer that does so too; the digest of the end."""
    with twins(setting, MODELS["Functional"], adamw) as pair:
        for side in pair:
            _restore(side, torch.load(folder / "saved.pt"))
        pair.train(range(STEPS, 2 * STEPS))
        pair.check()
        return digest(pair.engine.model)


def _saved(side: Side) -> dict[str, Any]:
    if side.is_engine:
        side.optimizer.consolidate_state_dict()
        if dist.get_rank() != 0:
            return {}
    return {"model": side.model.state_dict(), "optimizer": side.optimizer.state_dict()}


def _restore(side: Side, saved: Mapping[str, Any]) -> None:
    side.model.load_state_dict(saved["model"])
    side.optimizer.load_state_dict(saved["optimizer"])


@scenario("D7b", "a state dict goes from one update mode and threshold to the other, and to a plain optimizer and back")
def exchanged(setting: Setting) -> None:
    update = UPDATES[1 - UPDATES.index(setting.update)]
    with twins(setting, MODELS["Perceptron"], adamw) as pair:
        pair.train(range(3))
        pair.engine.optimizer.consolidate_state_dict(to=0)
        saved: list[Any] = [_with_state(pair.engine) if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(saved)
    with twins(Setting(update, 700), MODELS["Perceptron"], adamw) as other:
        for side in other:
            _restore(side, copy.deepcopy(saved[0]))
        other.train(range(3, 6))
        pair.oracle.train(3)
        pair.oracle.train(4)
        pair.oracle.train(5)
        other.check()
        check_equal(other.oracle.model.state_dict(), pair.oracle.model.state_dict())
        check_equal(other.oracle.optimizer.state_dict(), pair.oracle.optimizer.state_dict())


def _with_state(side: Side) -> dict[str, Any]:
    return {"model": side.model.state_dict(), "optimizer": side.optimizer.state_dict()}


@scenario("D7e", "momentum that is switched on in the middle of a run, and a scheduler that steps after consolidation")
def later_state(setting: Setting) -> None:
    def plain(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=0.1)

    with twins(setting, MODELS["Perceptron"], plain) as pair:
        pair.train(range(2))
        for side in pair:
            side.optimizer.param_groups[0]["momentum"] = 0.9
        pair.train(range(2, 4))
        pair.engine.optimizer.consolidate_state_dict()
        for side in pair:
            torch.optim.lr_scheduler.LambdaLR(side.optimizer, lambda _: 0.5)
        saved = [copy.deepcopy(side.optimizer.state_dict()) for side in pair]
        check_equal(*saved)
        for side, state in zip(pair, saved, strict=True):
            side.optimizer.param_groups[0]["momentum"] = 0.0
            side.optimizer.load_state_dict(state)
        pair.train(range(4, 6))
        pair.check()


@scenario("D7c", "`load_state_dict` goes back to an earlier step while an update is pending")
def gone_back(setting: Setting) -> None:
    with twins(setting, MODELS["Perceptron"], adamw) as pair:
        pair.train(range(2))
        pair.engine.optimizer.consolidate_state_dict()
        rank_zeros: list[Any] = [_with_state(pair.engine) if dist.get_rank() == 0 else None]
        dist.broadcast_object_list(rank_zeros)
        saved = copy.deepcopy((rank_zeros[0], _with_state(pair.oracle)))
        pair.train(range(2, 4))
        for side, state in zip(pair, saved, strict=True):
            side.optimizer.load_state_dict(state["optimizer"])
            side.model.load_state_dict(state["model"])
        pair.train(range(4, 6))
        pair.check()


@scenario(
    "D7d",
    "`state_dict()` of a sharded optimizer without `consolidate_state_dict()` before",
    loud={"sharded": Loud(UnsupportedError, "consolidate_state_dict")},
)
def not_consolidated(setting: Setting) -> None:
    with twins(setting, MODELS["Perceptron"], adamw) as pair:
        pair.train(range(2))
        check_equal(pair.engine.optimizer.state_dict(), pair.oracle.optimizer.state_dict())


@scenario(
    "D9",
    "`model.load_state_dict()` while an update is pending: the update does not hit the restored weights",
    kinds={"the model's": False, "a submodule's": True},
)
def restored(setting: Setting, submodule: bool) -> None:
    other = built(MODELS["Perceptron"], seed=7)
    with twins(setting, MODELS["Perceptron"], adamw) as pair:
        pair.train(range(2))
        for side in pair:
            if submodule:
                side.model[0].load_state_dict(other[0].state_dict())
            else:
                side.model.load_state_dict(other.state_dict())
        pair.engine.optimizer.synchronize()
        assert torch.equal(pair.engine.model[0].weight, other[0].weight)
        pair.train(range(2, STEPS))
        pair.check()


@scenario("D11", "wrapping an optimizer that has a state keeps it, and the identity of its groups")
def wrapped_with_state(setting: Setting) -> None:
    model, reference = (built(MODELS["Perceptron"]) for _ in range(2))
    inner, oracle = adamw(model.parameters()), adamw(reference.parameters())
    everyone = tuple(range(dist.get_world_size()))
    schedulers = [lr_scheduler.StepLR(each, 1, 0.5) for each in (inner, oracle)]
    for side in (Side(model, inner, everyone), Side(reference, oracle, everyone)):
        side.train(0)
    groups = inner.param_groups
    first, parameters = groups[0], groups[0]["params"]
    with wrapped(setting, inner, model) as optimizer:
        pair = beside(model, optimizer, reference, oracle)
        assert optimizer.param_groups is groups
        for step in range(1, STEPS):
            pair.train([step])
            for scheduler in schedulers:
                scheduler.step()
        pair.check()
        assert optimizer.param_groups[0] is first
        assert first["params"] is parameters


@scenario("D11b", "an engine is closed, its optimizer steps alone, and is wrapped anew")
def wrapped_again(setting: Setting) -> None:
    model, reference = (built(MODELS["Perceptron"]) for _ in range(2))
    inner, oracle = adamw(model.parameters()), adamw(reference.parameters())
    everyone = tuple(range(dist.get_world_size()))
    for first in (0, 10):
        with wrapped(setting, inner, model) as optimizer:
            pair = beside(model, optimizer, reference, oracle)
            pair.train(range(first, first + 3))
            pair.check()
        for side in (Side(model, inner, everyone), pair.oracle):
            side.train(first + 5)
        check_equal(inner.state_dict()["state"], oracle.state_dict()["state"])
        check_equal(dict(model.state_dict()), dict(reference.state_dict()))
