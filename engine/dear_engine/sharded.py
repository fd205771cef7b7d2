"""The sharded update: each rank steps its own part of every parameter, and keeps the state of that part only.

    step()     wait for the reduce-scatters; step the own parts with their mean gradients; all-gather the parameters
    a read     wait for the all-gather; copy the parameters out of the flat buffer

The bytes on the wire are those of the replicated update, the arithmetic and the state one world_size-th of it (ZeRO,
arXiv 1910.02054, stage 1). It is right for optimizers that treat every element on its own, which is tried out on a
small matrix when the engine is built: whole, and in two parts.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import torch
from typing_extensions import override

from dear_engine.layout import Interleaved, part_of
from dear_engine.update import Hyperparameters, Stepped, Update, apply_update
from dear_tune.errors import UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import nn

    from dear_engine.bucket import Bucket
    from dear_engine.collectives import Channel
    from dear_engine.layout import Layout

__all__ = ["Sharded"]

_PROBE_STEPS = 3


class Sharded(Update):
    """Each rank steps its own part of every parameter. See the module's text.

    Args:
        optimizer: the state that it has is taken over.
        channel: tells this rank's number, and gathers the state.

    Raises:
        UnsupportedError: the optimizer does not treat every element on its own.
    """

    steps_before_gather = True

    def __init__(self, optimizer: torch.optim.Optimizer, channel: Channel) -> None:
        self._optimizer = optimizer
        self._channel = channel
        self.check()
        self._parts: dict[torch.Tensor, torch.Tensor] = {}  # each holds memory only while it is stepped
        self._state: defaultdict[torch.Tensor, dict[str, Any]] = defaultdict(dict)

    @property
    def state(self) -> defaultdict[torch.Tensor, dict[str, Any]]:
        """The state of this rank's parts, by parameter."""
        held = {parameter: self._state[part] for parameter, part in self._parts.items() if part in self._state}
        return defaultdict(dict, held)

    def check(self) -> None:
        """Raise `UnsupportedError` if some parameter group's settings need more than one element at a time."""
        self._elementwise = _elementwise_state(self._optimizer)

    def take_over(self) -> None:
        """Keep this rank's part of the wrapped optimizer's state, and let the rest go."""
        full = self._optimizer.state
        self._state.clear()
        for parameter, state in full.items():
            start, stop = self._span(parameter)
            if self._holds(parameter):
                self._state[self._part(parameter)] = {
                    name: value.reshape(-1)[start:stop].clone() if self._is_elementwise(name, value) else value
                    for name, value in state.items()
                }
        self._optimizer.state = defaultdict(dict)

    def gather(self, to: int | None) -> dict[str, Any] | None:
        """All parts' state as a plain optimizer's state dict, on the CPU; all ranks call it together.

        Args:
            to: the rank that gets it; None for all. The others get None.
        """
        full: defaultdict[torch.Tensor, dict[str, Any]] = defaultdict(dict)
        wanted = to is None or to == self._channel.rank
        for parameter in self._all_parameters():
            parts = self._channel.all_gather_object(self._portable(parameter))
            if wanted and any(parts):
                full[parameter] = self._joined(parameter, [part for part in parts if part])
        if not wanted:
            return None
        own, self._optimizer.state = self._optimizer.state, full
        try:
            return self._optimizer.state_dict()
        finally:
            self._optimizer.state = own

    @override
    def layout(self, parameters: Sequence[nn.Parameter]) -> Layout:
        return Interleaved(parameters, self._channel.rank, self._channel.world_size)

    @override
    def before_gather(self, bucket: Bucket, settings: Hyperparameters) -> torch.Tensor:
        layout = bucket.layout
        assert isinstance(layout, Interleaved)  # as `layout` has made it
        gathered = self._gathered(bucket)
        parts = [self._filled(slot.parameter) for slot in bucket.slots]
        stepped = [
            Stepped(slot.parameter, part, gradient.to(part.dtype))
            for slot, part, gradient, there in zip(
                bucket.slots, parts, layout.own_parts(bucket.flat), bucket.present(), strict=True
            )
            if there and self._holds(slot.parameter)
        ]
        apply_update(self._optimizer, self._state, settings, stepped)
        for part, place in zip(parts, layout.own_parts(gathered), strict=True):
            place.copy_(part)
            part.data = part.new_empty(0)  # otherwise it would share the parameter's memory
        return gathered

    @override
    def after_gather(self, bucket: Bucket, settings: Hyperparameters) -> None:
        places = bucket.layout.places(self._gathered(bucket))
        for slot, place, there in zip(bucket.slots, places, bucket.present(), strict=True):
            if there:  # otherwise it is as it was, also to graphs that have saved it
                place.get(slot.parameter)

    def _gathered(self, bucket: Bucket) -> torch.Tensor:
        """Where the parameters travel: the gradients' buffer, unless those have another dtype on the wire."""
        dtype = bucket.slots[0].parameter.dtype
        if bucket.flat.dtype == dtype:
            return bucket.flat
        if bucket.gathered is None:
            bucket.gathered = torch.zeros_like(bucket.flat, dtype=dtype)
        return bucket.gathered

    def _all_parameters(self) -> Iterator[nn.Parameter]:
        for group in self._optimizer.param_groups:
            yield from group["params"]

    def _span(self, parameter: torch.Tensor) -> tuple[int, int]:
        return part_of(parameter.numel(), self._channel.rank, self._channel.world_size)

    def _holds(self, parameter: torch.Tensor) -> bool:
        """Whether this rank keeps some of the parameter's state; rank 0 does for those without elements."""
        start, stop = self._span(parameter)
        return start < stop or (parameter.numel() == 0 and self._channel.rank == 0)

    def _part(self, parameter: torch.Tensor) -> torch.Tensor:
        """The object under which the state of this rank's part is kept."""
        if parameter not in self._parts:
            self._parts[parameter] = torch.empty(0, dtype=parameter.dtype, device=parameter.device)
        return self._parts[parameter]

    def _filled(self, parameter: nn.Parameter) -> torch.Tensor:
        """This rank's part, sharing the parameter's memory if that is contiguous."""
        start, stop = self._span(parameter)
        part = self._part(parameter)
        part.data = parameter.detach().reshape(-1)[start:stop]
        return part

    def _portable(self, parameter: nn.Parameter) -> dict[str, Any]:
        state = self._state.get(self._part(parameter), {})
        return {name: value.cpu() if isinstance(value, torch.Tensor) else value for name, value in state.items()}

    def _joined(self, parameter: nn.Parameter, parts: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            name: torch.cat([part[name] for part in parts]).view(parameter.shape)
            if self._is_elementwise(name, value)
            else value
            for name, value in parts[0].items()
        }

    def _is_elementwise(self, name: str, value: Any) -> bool:
        return name in self._elementwise and isinstance(value, torch.Tensor)


def _elementwise_state(optimizer: torch.optim.Optimizer) -> set[str]:
    """The names of the state that has an entry for each element.

    Raises:
        UnsupportedError: a matrix stepped in two parts is not what it is when it is stepped whole.
    """
    names: set[str] = set()
    for group in optimizer.param_groups:
        # Of different magnitudes, so that a norm over the whole is not that of a part.
        start = torch.linspace(-1, 1, 12, device=group["params"][0].device).pow(3).view(3, 4)
        whole, parts = [start.clone()], [part.clone() for part in start.view(-1).split(6)]
        separate = False
        with suppress(Exception):  # whatever an optimizer objects to in a part: it cannot be stepped in parts
            state = _probe(optimizer, group, whole)
            _probe(optimizer, group, parts)
            separate = torch.allclose(whole[0].view(-1), torch.cat(parts), rtol=1e-4, atol=1e-6)
        if not separate:
            raise UnsupportedError(
                f"{type(optimizer).__name__} does not treat every element of a parameter on its own, so a rank cannot "
                'step a part of it; use update="replicated".'
            )
        names |= {name for name, value in state[whole[0]].items() if _is_shaped(value, start)}
    return names


def _probe(
    optimizer: torch.optim.Optimizer, group: dict[str, Any], tensors: list[torch.Tensor]
) -> defaultdict[torch.Tensor, dict[str, Any]]:
    """Step the tensors a few times with a group's settings; the state that this leaves."""
    settings = {name: value for name, value in group.items() if name != "params"}
    snapshot = {id(tensor): settings for tensor in tensors}  # shared on purpose, as in a group
    state: defaultdict[torch.Tensor, dict[str, Any]] = defaultdict(dict)
    state.update((tensor, _state_like(optimizer, group, tensor)) for tensor in tensors)
    for step in range(1, _PROBE_STEPS + 1):
        gradients = (torch.linspace(1, 3, 12, device=tensors[0].device) * step).sin().split(tensors[0].numel())
        stepped = [
            Stepped(tensor, tensor, gradient.view_as(tensor).clone())  # type: ignore[arg-type] # stands for one
            for tensor, gradient in zip(tensors, gradients, strict=True)
        ]
        apply_update(optimizer, state, snapshot, stepped)
    return state


def _state_like(optimizer: torch.optim.Optimizer, group: dict[str, Any], tensor: torch.Tensor) -> dict[str, Any]:
    """A state for the tensor as the group's parameters have one already: some optimizers begin with it."""
    for parameter in group["params"]:
        if parameter.numel() > 1 and optimizer.state.get(parameter):
            return {
                name: torch.full_like(tensor, float(value.flatten()[0]))
                if _is_shaped(value, parameter)
                else copy.deepcopy(value)
                for name, value in optimizer.state[parameter].items()
            }
    return {}


def _is_shaped(value: Any, like: torch.Tensor) -> bool:
    return isinstance(value, torch.Tensor) and value.shape == like.shape
