"""Where the gradients of a bucket lie in its flat buffer: (world_size * n,), of which rank r owns shard r.

    in sequence     [ gradients, one parameter after the other | presence flags | padding ]
    interleaved     world_size times [ one part of each parameter's gradient | presence flags ]

In sequence a parameter's gradient is one view, which an optimizer can step with as it is: the replicated update's.
Interleaved, each parameter is cut into world_size equal parts (the last ones may be shorter), and shard r holds the
r-th of each: who owns which elements does not depend on what a parameter is fused with, so a sharded optimizer state
outlives every change of the threshold.

A presence flag, one element a parameter, is 1 on the ranks that have a gradient for it. It travels with the
gradients, so that every rank that needs to know learns, with no extra message, which parameters had a gradient
anywhere: plain torch skips those that had none, and so do we.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Protocol

import torch
from typing_extensions import override

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import nn

__all__ = ["InSequence", "Interleaved", "Layout", "Place", "part_of"]


class Layout(Protocol):
    """Where everything lies in a flat buffer.

    Attributes:
        length: of the flat buffer, in elements.
    """

    length: int

    def places(self, flat: torch.Tensor) -> list[Place]:
        """Each parameter's gradient."""
        ...

    def own_gradients(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """The gradients in this rank's shard, without flags and padding: 1-D views, none of them empty."""
        ...

    def flags(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """The presence flags, once or several times; the one that this rank reads comes first."""
        ...


class Place(Protocol):
    """One parameter's place in a flat buffer."""

    def put(self, values: torch.Tensor) -> None:
        """Copy values of the parameter's shape in."""
        ...

    def get(self, parameter: torch.Tensor) -> None:
        """Copy what is there to a tensor of the parameter's shape."""
        ...

    def values(self) -> torch.Tensor:
        """What is there, of the parameter's shape: a view, where it can be one."""
        ...


class InSequence(Layout):
    """One parameter after the other. See the module's text."""

    def __init__(self, parameters: Sequence[nn.Parameter], rank: int, world_size: int) -> None:
        self._shapes = [parameter.shape for parameter in parameters]
        self._starts = [0, *accumulate(parameter.numel() for parameter in parameters)]
        self._shard = -(-(self._starts[-1] + len(parameters)) // world_size)
        self._rank = rank
        self.length = self._shard * world_size

    @override
    def places(self, flat: torch.Tensor) -> list[Place]:
        spans = pairwise(self._starts)
        return [_Whole(flat[a:b].view(shape)) for (a, b), shape in zip(spans, self._shapes, strict=True)]

    @override
    def own_gradients(self, flat: torch.Tensor) -> list[torch.Tensor]:
        own = flat[self._rank * self._shard : min((self._rank + 1) * self._shard, self._starts[-1])]
        return [own] if own.numel() else []

    @override
    def flags(self, flat: torch.Tensor) -> list[torch.Tensor]:
        return [flat[self._starts[-1] :][: len(self._shapes)]]


class Interleaved(Layout):
    """A part of every parameter in every shard. See the module's text."""

    def __init__(self, parameters: Sequence[nn.Parameter], rank: int, world_size: int) -> None:
        self._shapes = [parameter.shape for parameter in parameters]
        self._starts = [0, *accumulate(-(-shape.numel() // world_size) for shape in self._shapes)]
        self._rank, self._world_size = rank, world_size
        self._shard = self._starts[-1] + len(parameters)
        self.length = self._shard * world_size

    @override
    def places(self, flat: torch.Tensor) -> list[Place]:
        shards = flat.view(self._world_size, self._shard)
        return [
            _Block(shards[:, a:b], shape) for (a, b), shape in zip(pairwise(self._starts), self._shapes, strict=True)
        ]

    @override
    def own_gradients(self, flat: torch.Tensor) -> list[torch.Tensor]:
        return [part for part in self.own_parts(flat) if part.numel()]

    def own_parts(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """What of each parameter lies in this rank's shard: 1-D, perhaps empty."""
        own = flat[self._rank * self._shard :][: self._shard]
        spans = [part_of(shape.numel(), self._rank, self._world_size) for shape in self._shapes]
        return [own[at : at + stop - start] for at, (start, stop) in zip(self._starts[:-1], spans, strict=True)]

    @override
    def flags(self, flat: torch.Tensor) -> list[torch.Tensor]:
        shards = [flat[i * self._shard : (i + 1) * self._shard] for i in range(self._world_size)]
        everyones = [shard[self._starts[-1] :] for shard in shards]
        return [everyones.pop(self._rank), *everyones]


def part_of(size: int, rank: int, world_size: int) -> tuple[int, int]:
    """From where to where, of a parameter's elements in order, a rank owns it under the sharded update."""
    length = -(-size // world_size)
    return min(rank * length, size), min((rank + 1) * length, size)


@dataclass(frozen=True)
class _Whole(Place):
    view: torch.Tensor  # of the parameter's shape

    @override
    def put(self, values: torch.Tensor) -> None:
        self.view.copy_(values)

    @override
    def get(self, parameter: torch.Tensor) -> None:
        parameter.copy_(self.view)

    @override
    def values(self) -> torch.Tensor:
        return self.view


@dataclass(frozen=True)
class _Block(Place):
    block: torch.Tensor  # (world_size, length of a part)
    shape: torch.Size

    @override
    def put(self, values: torch.Tensor) -> None:
        for here, there in self._aligned(values.reshape(-1)):
            here.copy_(there)

    @override
    def get(self, parameter: torch.Tensor) -> None:
        contiguous = parameter.is_contiguous()
        elements = parameter.view(-1) if contiguous else self.block.new_empty(self.shape.numel())
        for here, there in self._aligned(elements):
            there.copy_(here)
        if not contiguous:
            parameter.copy_(elements.view(self.shape))

    @override
    def values(self) -> torch.Tensor:
        values = self.block.new_empty(self.shape)
        self.get(values)
        return values

    def _aligned(self, elements: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """The full parts, then what is left over, each in the buffer and in the parameter's elements: two copies."""
        length = self.block.shape[1]
        full, rest = divmod(self.shape.numel(), max(length, 1))
        pairs = [(self.block[:full], elements[: full * length].view(full, length))]
        return [*pairs, (self.block[full, :rest], elements[full * length :])] if rest else pairs
