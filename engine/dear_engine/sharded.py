"""The sharded update: each rank steps its own part of every parameter, and keeps the state of that part only.

    step()     wait for the reduce-scatters; step the own parts with their mean gradients; all-gather the parameters
    a read     wait for the all-gather; copy the parameters out of the flat buffer

The bytes on the wire are those of the replicated update, the arithmetic and the state one world_size-th of it (ZeRO,
arXiv 1910.02054, stage 1). It is right for optimizers that treat every element on its own, which is tried out on a
small matrix when the engine is built: whole, and in two parts.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Any

import torch
from typing_extensions import override

from dear_engine.layout import Interleaved, part_of
from dear_engine.probe import elementwise_state
from dear_engine.update import Snapshot, StandIns, Stepped, Update, apply_update

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import nn

    from dear_engine.bucket import Bucket
    from dear_engine.collectives import Channel
    from dear_engine.layout import Layout

__all__ = ["FullState", "Sharded"]

FullState = defaultdict[torch.Tensor, dict[str, Any]]
"""The whole state of an optimizer, by parameter."""


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
        self._elementwise: set[str] = set()
        self.check()
        self._stand_ins = StandIns()
        self.state: defaultdict[torch.Tensor, dict[str, Any]] = defaultdict(dict)
        """The state of this rank's parts, by parameter."""

    def check(self) -> None:
        """Raise `UnsupportedError` if some parameter group's settings need more than one element at a time."""
        self._elementwise |= elementwise_state(self._optimizer)  # other settings may make other state

    def take_over(self) -> None:
        """Keep this rank's part of the wrapped optimizer's state, and let the rest go."""
        self.check()
        full = self._optimizer.state
        self.state.clear()
        for parameter, state in full.items():
            start, stop = self._span(parameter)
            if self._holds(parameter):
                self.state[parameter] = {
                    name: value.reshape(-1)[start:stop].clone() if self._is_elementwise(name, value) else value
                    for name, value in state.items()
                }
        self._optimizer.state = defaultdict(dict)

    def gather(self, to: int | None) -> FullState | None:
        """All parts' state, by parameter, on the CPU; all ranks call it together.

        Args:
            to: the rank that gets it; None for all. The others get None.
        """
        self.check()
        full: FullState = defaultdict(dict)
        for number, parameter in enumerate(self._all_parameters()):
            own, site = self._portable(parameter), f"consolidate_state_dict(to={to}), parameter {number}"
            parts = (
                self._channel.all_gather_object(own, site) if to is None else self._channel.gather_object(own, to, site)
            )
            if parts and any(parts):
                full[parameter] = self._joined(parameter, [part for part in parts if part])
        return full if to in (None, self._channel.rank) else None

    def state_dict(self, full: FullState) -> dict[str, Any]:
        """A plain optimizer's state dict of this state and the parameter groups as they are now."""
        kept, self._optimizer.state = self._optimizer.state, full
        try:
            return self._optimizer.state_dict()
        finally:
            self._optimizer.state = kept

    @override
    def layout(self, parameters: Sequence[nn.Parameter]) -> Layout:
        return Interleaved(parameters, self._channel.rank, self._channel.world_size)

    @override
    def before_gather(self, bucket: Bucket, snapshot: Snapshot, values: Sequence[torch.Tensor]) -> torch.Tensor:
        layout = bucket.layout
        assert isinstance(layout, Interleaved)  # as `layout` has made it
        gathered = self._gathered(bucket)
        parts = [self._part(slot.parameter, own) for slot, own in zip(bucket.slots, values, strict=True)]
        stepped = [
            Stepped(slot.parameter, part, gradient.to(part.dtype))
            for slot, part, gradient, there in zip(
                bucket.slots, parts, layout.own_parts(bucket.flat), bucket.present(), strict=True
            )
            if there and self._holds(slot.parameter)
        ]
        apply_update(self._optimizer, self.state, snapshot, stepped)
        for part, place in zip(parts, layout.own_parts(gathered), strict=True):
            place.copy_(part)
            self._stand_ins.release(part)
        return gathered

    @override
    def after_gather(
        self, bucket: Bucket, snapshot: Snapshot, values: Sequence[torch.Tensor]
    ) -> Sequence[torch.Tensor]:
        places = bucket.layout.places(self._gathered(bucket))
        for own, place, there in zip(values, places, bucket.present(), strict=True):
            if there:  # otherwise it is as it was, also to graphs that have saved it
                place.get(own)
        return values

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

    def _part(self, parameter: nn.Parameter, values: torch.Tensor) -> nn.Parameter:
        """This rank's part of the values, in their own memory if that is contiguous."""
        start, stop = self._span(parameter)
        return self._stand_ins.showing(parameter, values.reshape(-1)[start:stop])

    def _portable(self, parameter: nn.Parameter) -> dict[str, Any]:
        state = self.state.get(parameter, {})
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
