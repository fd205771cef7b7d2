"""Applying an update: the wrapped optimizer's own arithmetic, one bucket at a time.

Any `torch.optim` optimizer steps one bucket when it is shown that bucket's parameters only. So a bucket's update is
the `step` of a shallow copy that has the bucket's share of the optimizer's state and parameter groups, with everything
as it was when the user called `step()`: a scheduler may have moved the hyper-parameters since. What it steps are
stand-ins for the parameters, which nobody else sees before they are done.

    replicated   every rank steps all parameters with the gathered gradients, when one of them is first read
    sharded      see sharded.py
"""

from __future__ import annotations

import logging
from collections import defaultdict, deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import nn
from typing_extensions import override

from dear_engine.layout import InSequence
from dear_tune.errors import UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Mapping, MutableMapping, Sequence

    from torch.utils.hooks import RemovableHandle

    from dear_engine.bucket import Bucket
    from dear_engine.layout import Layout

__all__ = ["Replicated", "Snapshot", "StandIns", "Stepped", "Update", "apply_update", "check_hooks", "snapshot_of"]

_BY_PARAMETER = ("params", "state", "param_groups")  # of which each bucket has its share
# What an optimizer may refer to, and what changes in them is not what it keeps.
_OTHERS = (nn.Module, torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler, logging.Logger, type)


@dataclass(frozen=True)
class Snapshot:
    """An optimizer's own attributes and hyper-parameters, as they were at `step()`.

    Attributes:
        attributes: of the optimizer, without its state and groups.
        groups: for each parameter, by its id, its group and its place among that group's parameters.
    """

    attributes: dict[str, Any]
    groups: dict[int, tuple[dict[str, Any], int]]


class Update(Protocol):
    """Who steps which parameters, and when.

    Attributes:
        steps_before_gather: whether `before_gather` needs the reduce-scatter's result.
    """

    steps_before_gather: bool

    def layout(self, parameters: Sequence[nn.Parameter]) -> Layout:
        """Where a bucket's gradients lie, for this rank."""
        ...

    def before_gather(self, bucket: Bucket, snapshot: Snapshot, values: Sequence[torch.Tensor]) -> torch.Tensor:
        """At `step()`: what is to be all-gathered, (world_size * n,).

        Args:
            bucket: whose reduce-scatter is on its way, or has ended.
            snapshot: of the optimizer, now.
            values: of the bucket's parameters, in the order of its slots; may be written to.
        """
        ...

    def after_gather(
        self, bucket: Bucket, snapshot: Snapshot, values: Sequence[torch.Tensor]
    ) -> Sequence[torch.Tensor]:
        """Once the all-gather has ended: the updated values.

        Args:
            bucket: whose all-gather has ended.
            snapshot: of the optimizer, at `step()`.
            values: of the bucket's parameters, in the order of its slots; may be written to.
        """
        ...


@dataclass(frozen=True)
class Stepped:
    """What is stepped for a parameter.

    Attributes:
        parameter: whose state and group's settings count.
        stand_in: what the optimizer sees in its place: all of its values, or this rank's part of them.
        gradient: of the stand-in's shape; None where no rank had one.
    """

    parameter: nn.Parameter
    stand_in: nn.Parameter
    gradient: torch.Tensor | None


class StandIns:
    """What an optimizer sees in the place of parameters that others may look at while it steps."""

    def __init__(self) -> None:
        self._by_id: dict[int, nn.Parameter] = {}

    def showing(self, parameter: nn.Parameter, values: torch.Tensor) -> nn.Parameter:
        """A plain parameter with these values, in the same memory, until `release`."""
        stand_in = self._by_id.get(id(parameter))
        if stand_in is None or (stand_in.dtype, stand_in.device) != (values.dtype, values.device):
            stand_in = self._by_id[id(parameter)] = nn.Parameter(values.new_empty(0))
        stand_in.data = values
        vars(stand_in).update(vars(parameter))  # optimizers go by marks on parameters
        return stand_in

    def release(self, stand_in: nn.Parameter) -> None:
        """Hold no memory any more."""
        stand_in.data = stand_in.new_empty(0)


class Replicated(Update):
    """Every rank steps all parameters of a bucket with the gathered mean gradients."""

    steps_before_gather = False

    def __init__(self, optimizer: torch.optim.Optimizer, rank: int, world_size: int) -> None:
        self._optimizer = optimizer
        self._rank, self._world_size = rank, world_size
        self._stand_ins = StandIns()

    @override
    def layout(self, parameters: Sequence[nn.Parameter]) -> Layout:
        return InSequence(parameters, self._rank, self._world_size)

    @override
    def before_gather(self, bucket: Bucket, snapshot: Snapshot, values: Sequence[torch.Tensor]) -> torch.Tensor:
        return bucket.flat

    @override
    def after_gather(
        self, bucket: Bucket, snapshot: Snapshot, values: Sequence[torch.Tensor]
    ) -> Sequence[torch.Tensor]:
        stepped = [
            Stepped(
                slot.parameter,
                self._stand_ins.showing(slot.parameter, own),
                slot.place.values().to(own.dtype) if there else None,
            )
            for slot, own, there in zip(bucket.slots, values, bucket.present(), strict=True)
        ]
        apply_update(self._optimizer, self._optimizer.state, snapshot, stepped)
        updated = [each.stand_in.data for each in stepped]
        for each in stepped:
            self._stand_ins.release(each.stand_in)
        return updated


def check_hooks(optimizer: torch.optim.Optimizer, ours: RemovableHandle | None = None) -> None:
    """Raise `UnsupportedError` if the user's step hooks would run once for each bucket."""
    before = [hook for hook in optimizer._optimizer_step_pre_hooks if ours is None or hook != ours.id]
    if before or optimizer._optimizer_step_post_hooks:
        raise UnsupportedError(
            "The optimizer has step hooks. Its step() runs once for each bucket, so register them on the "
            "DistributedOptimizer instead: there they run once a step."
        )


def snapshot_of(optimizer: torch.optim.Optimizer) -> Snapshot:
    """Everything that `step` goes by besides state and gradients, as it is now."""
    groups: dict[int, tuple[dict[str, Any], int]] = {}
    for group in optimizer.param_groups:
        settings = {name: _frozen(value) for name, value in group.items() if name != "params"}
        groups.update((id(parameter), (settings, place)) for place, parameter in enumerate(group["params"]))
    attributes = {name: _frozen(value) for name, value in vars(optimizer).items() if name not in _BY_PARAMETER}
    return Snapshot(attributes, groups)


def apply_update(
    optimizer: torch.optim.Optimizer,
    state: MutableMapping[torch.Tensor, Any],
    snapshot: Snapshot,
    stepped: Sequence[Stepped],
) -> None:
    """Step the stand-ins with their gradients, and keep what becomes of the state under the parameters."""
    groups = _groups(snapshot, stepped)
    own_state: defaultdict[Any, Any] = defaultdict(dict)
    own_state.update((each.stand_in, state[each.parameter]) for each in stepped if each.parameter in state)
    twin = _twin(optimizer, snapshot, own_state, groups)
    before = _all_noted(twin, groups, stepped)
    for each in stepped:
        each.stand_in.grad = each.gradient
    try:
        _unhooked_step(twin)
    except Exception as error:
        if hasattr(error, "add_note"):  # since Python 3.11
            error.add_note(
                "It was raised when dear_engine applied an update. What an optimizer steps then are stand-ins for some "
                "of its parameters, with their values, attributes and state; it cannot go by id(parameter)."
            )
        raise
    finally:
        for each in stepped:
            each.stand_in.grad = None
    for each in stepped:
        if each.stand_in in own_state:
            state[each.parameter] = own_state.pop(each.stand_in)
    _check_unchanged(optimizer, before, _all_noted(twin, twin.param_groups, stepped), own_state)


def _groups(snapshot: Snapshot, stepped: Sequence[Stepped]) -> list[dict[str, Any]]:
    """The bucket's share of the parameter groups; of lists beside the parameters, such as their names, too."""
    groups: dict[int, dict[str, Any]] = {}
    places: dict[int, list[int]] = {}
    for each in stepped:
        group, place = snapshot.groups[id(each.parameter)]
        groups.setdefault(id(group), {**group, "params": []})["params"].append(each.stand_in)
        places.setdefault(id(group), []).append(place)
    for key, group in groups.items():
        if "param_names" in group:
            group["param_names"] = [group["param_names"][place] for place in places[key]]
    return list(groups.values())


def _all_noted(
    twin: torch.optim.Optimizer, groups: Sequence[Mapping[str, Any]], stepped: Sequence[Stepped]
) -> list[dict[str, Any]]:
    """What the optimizer could keep anything in, besides its state."""
    return [_noted(vars(twin)), *map(_noted, groups), *(_noted(vars(each.stand_in)) for each in stepped)]


def _noted(values: Mapping[str, Any]) -> dict[str, Any]:
    """What tells whether any of these has been replaced, or changed in place."""
    return {name: _note(value) for name, value in values.items() if name not in _BY_PARAMETER}


def _note(value: Any, *, look_inside: bool = True) -> Any:
    if isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, torch.Tensor):
        return id(value), value._version
    if isinstance(value, (list, tuple, deque)):
        return [_note(each, look_inside=look_inside) for each in value]
    if isinstance(value, dict):
        return {key: _note(each, look_inside=look_inside) for key, each in value.items()}
    if isinstance(value, set):
        return set(value)
    # Such as a counter or a schedule of the optimizer's own; what it holds in turn is not looked at.
    inside = look_inside and hasattr(value, "__dict__") and not isinstance(value, _OTHERS)
    return id(value), {name: _note(each, look_inside=False) for name, each in vars(value).items()} if inside else None


def _check_unchanged(
    optimizer: torch.optim.Optimizer,
    before: Sequence[Mapping[str, Any]],
    after: Sequence[Mapping[str, Any]],
    left_over: Mapping[Any, Any],
) -> None:
    """What an optimizer keeps outside its parameters' state would be lost, or be counted once for each bucket."""
    changed = {
        name
        for earlier, later in zip(before, after, strict=True)
        for name in later
        if later[name] != earlier.get(name) and not name.startswith(("_warned_", "_need_"))  # what torch checks once
    } | {f"state[{key!r}]" for key in left_over}
    if changed:
        raise UnsupportedError(
            f"{type(optimizer).__name__}.step() changes {', '.join(sorted(changed))} outside the state of its "
            "parameters, which cannot be done bucket by bucket; keep such values in the state of each parameter."
        )


def _twin(
    optimizer: torch.optim.Optimizer, snapshot: Snapshot, state: Mapping[Any, Any], groups: list[dict[str, Any]]
) -> torch.optim.Optimizer:
    # Not copy.copy: an optimizer's own way to be copied leaves out attributes, and walks through all its state.
    twin = object.__new__(type(optimizer))
    twin.__dict__.update(snapshot.attributes, state=state, param_groups=groups)
    twin._optimizer_step_pre_hooks = type(optimizer._optimizer_step_pre_hooks)()  # ours is for the user's own calls
    twin.__dict__.pop("step", None)  # a scheduler that was built on the optimizer has hung one on it that binds it
    return twin


def _unhooked_step(twin: torch.optim.Optimizer) -> None:
    """Without the hooks that torch has for all optimizers' steps: the engine's own step runs them, once."""
    step: Any = type(twin).step
    (step.__wrapped__ if getattr(step, "hooked", False) else step)(twin)


def _frozen(value: Any) -> Any:
    """A copy of what hyper-parameters are made of, which no change in place reaches."""
    if isinstance(value, torch.Tensor):
        return value.clone()
    if isinstance(value, dict):
        return {key: _frozen(each) for key, each in value.items()}
    if type(value) in (list, tuple):
        return type(value)(map(_frozen, value))
    return value
