"""Applying an update: the wrapped optimizer's own arithmetic, one bucket at a time.

Any `torch.optim` optimizer steps one bucket when it is shown that bucket's parameters only. So a bucket's update is
the `step` of a shallow copy that shares the optimizer's `state`, holds the bucket's share of its parameter groups,
and has the hyper-parameters as they were when the user called `step()`: a scheduler may have moved them since.

    replicated   every rank steps all parameters with the gathered gradients, when one of them is first read
    sharded      see sharded.py
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch
from typing_extensions import override

from dear_engine.layout import InSequence
from dear_tune.errors import UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import nn
    from torch.utils.hooks import RemovableHandle

    from dear_engine.bucket import Bucket
    from dear_engine.layout import Layout

__all__ = ["Hyperparameters", "Replicated", "Stepped", "Update", "apply_update", "check_hooks", "hyperparameters"]

Hyperparameters = dict[int, dict[str, Any]]
"""For each parameter, by its id, its group's settings, shared within a group."""


class Update(Protocol):
    """Who steps which parameters, and when.

    Attributes:
        steps_before_gather: whether `before_gather` needs the reduce-scatter's result.
    """

    steps_before_gather: bool

    def layout(self, parameters: Sequence[nn.Parameter]) -> Layout:
        """Where a bucket's gradients lie, for this rank."""
        ...

    def before_gather(self, bucket: Bucket, settings: Hyperparameters) -> torch.Tensor:
        """At `step()`: what is to be all-gathered, (world_size * n,)."""
        ...

    def after_gather(self, bucket: Bucket, settings: Hyperparameters) -> None:
        """Once the all-gather has ended: leave the bucket's parameters updated."""
        ...


@dataclass(frozen=True)
class Stepped:
    """What is stepped for a parameter.

    Attributes:
        parameter: whose group's settings count.
        tensor: the parameter itself, or this rank's part of it; its state is kept under this object.
        gradient: of the tensor's shape; None where no rank had one.
    """

    parameter: nn.Parameter
    tensor: torch.Tensor
    gradient: torch.Tensor | None


class Replicated(Update):
    """Every rank steps all parameters of a bucket with the gathered mean gradients."""

    steps_before_gather = False

    def __init__(self, optimizer: torch.optim.Optimizer, rank: int, world_size: int) -> None:
        self._optimizer = optimizer
        self._rank, self._world_size = rank, world_size

    @override
    def layout(self, parameters: Sequence[nn.Parameter]) -> Layout:
        return InSequence(parameters, self._rank, self._world_size)

    @override
    def before_gather(self, bucket: Bucket, settings: Hyperparameters) -> torch.Tensor:
        return bucket.flat

    @override
    def after_gather(self, bucket: Bucket, settings: Hyperparameters) -> None:
        stepped = [
            Stepped(slot.parameter, slot.parameter, slot.place.values().to(slot.parameter.dtype) if there else None)
            for slot, there in zip(bucket.slots, bucket.present(), strict=True)
        ]
        apply_update(self._optimizer, self._optimizer.state, settings, stepped)


def check_hooks(optimizer: torch.optim.Optimizer, ours: RemovableHandle | None = None) -> None:
    """Raise `UnsupportedError` if the user's step hooks would run once for each bucket."""
    before = [hook for hook in optimizer._optimizer_step_pre_hooks if ours is None or hook != ours.id]
    if before or optimizer._optimizer_step_post_hooks:
        raise UnsupportedError(
            "The optimizer has step hooks. Its step() runs once for each bucket, so register them on the "
            "DistributedOptimizer instead: there they run once a step."
        )


def hyperparameters(optimizer: torch.optim.Optimizer) -> Hyperparameters:
    """The settings of every parameter, as they are now."""
    snapshot: Hyperparameters = {}
    for group in optimizer.param_groups:
        settings = {name: _frozen(value) for name, value in group.items() if name != "params"}
        snapshot.update((id(parameter), settings) for parameter in group["params"])
    return snapshot


def apply_update(
    optimizer: torch.optim.Optimizer,
    state: Mapping[torch.Tensor, Any],
    settings: Hyperparameters,
    stepped: Sequence[Stepped],
) -> None:
    """Step these tensors with these gradients; what the user has in `.grad` stays as it is."""
    groups: dict[int, dict[str, Any]] = {}
    for each in stepped:
        group = settings[id(each.parameter)]
        groups.setdefault(id(group), {**group, "params": []})["params"].append(each.tensor)
    twin = _restricted(optimizer, state, [dict(group) for group in groups.values()])
    before = dict(vars(twin))
    users = [each.tensor.grad for each in stepped]
    try:
        for each in stepped:
            each.tensor.grad = each.gradient
        twin.step()
    finally:
        for each, gradient in zip(stepped, users, strict=True):
            each.tensor.grad = gradient
    _check_unchanged(optimizer, [(before, vars(twin)), *zip(groups.values(), twin.param_groups, strict=True)])


def _check_unchanged(
    optimizer: torch.optim.Optimizer, pairs: Sequence[tuple[Mapping[str, Any], Mapping[str, Any]]]
) -> None:
    """What an optimizer keeps outside its state, such as a step count, would be lost, or be counted per bucket."""
    changed = {name for before, after in pairs for name in after if after[name] is not before.get(name)}
    changed = {name for name in changed if not name.startswith(("_warned_", "_need_"))}  # what torch has checked once
    if changed:
        raise UnsupportedError(
            f"{type(optimizer).__name__}.step() changes {', '.join(sorted(changed))} outside its state, which cannot "
            "be done bucket by bucket; keep such values in the state of each parameter."
        )


def _restricted(
    optimizer: torch.optim.Optimizer, state: Mapping[torch.Tensor, Any], groups: list[dict[str, Any]]
) -> torch.optim.Optimizer:
    # Not copy.copy: an optimizer's own way to be copied leaves out attributes, and walks through all its state.
    twin = object.__new__(type(optimizer))
    twin.__dict__.update(vars(optimizer), state=state, param_groups=groups)
    twin._optimizer_step_pre_hooks = type(optimizer._optimizer_step_pre_hooks)()  # ours is for the user's own calls
    twin.__dict__.pop("step", None)  # a scheduler that was built on the optimizer has hung one on it that binds it
    return twin


def _frozen(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else value
