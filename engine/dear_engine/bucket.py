"""A bucket: the fused flat buffer of some layers' gradients, and where it stands in the iteration."""

from __future__ import annotations

import weakref
from enum import Enum
from typing import TYPE_CHECKING

import torch

from dear_tune.errors import GradientError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import nn

    from dear_engine.collectives import Work
    from dear_engine.layout import Layout, Place

__all__ = ["Bucket", "BucketState", "Slot"]


class BucketState(Enum):
    """What a bucket waits for."""

    ACCUMULATING = "accumulating"  # for the gradients of this step
    REDUCING = "reducing"  # for step(); its reduce-scatter is queued, its gradients are closed
    PENDING = "pending"  # for the first read of one of its parameters; its all-gather is queued
    BROKEN = "broken"  # for nothing: its update failed half-way, and its parameters are of no step


class Slot:
    """One parameter's place in a bucket."""

    def __init__(self, name: str, parameter: nn.Parameter, place: Place) -> None:
        self.name = name
        self.parameter = parameter
        self.place = place
        self.dtype = parameter.dtype
        self._sent: torch.Tensor | None = None
        self._version = 0
        # Weakly: the user's zero_grad() is to free it.
        self._clipped: tuple[weakref.ref[torch.Tensor] | None, int] = (None, 0)

    @property
    def filled(self) -> bool:
        """Whether this step's gradient is in the flat buffer."""
        return self._sent is not None

    def fill(self) -> bool:
        """Copy the parameter's gradient, if it has one, into the flat buffer; say whether it had."""
        gradient = self.parameter.grad
        if gradient is None:
            self.place.put(_zeros_like(self.parameter))
            return False
        self.place.put(gradient.detach())
        self._sent, self._version = gradient, gradient._version
        return True

    def forget(self, *, clipped: bool = False) -> None:
        """What was sent is of no use any more; `clipped`: what the step used was no longer the mean of it."""
        self._clipped = (weakref.ref(self._sent), self._version) if clipped and self._sent is not None else (None, 0)
        self._sent = None

    @property
    def kept(self) -> bool:
        """Whether what was sent is what the parameter still carries, untouched."""
        return self._sent is not None and self.parameter.grad is self._sent and self._sent._version == self._version

    @property
    def grown(self) -> bool:
        """Whether a backward pass has added to exactly what was sent."""
        return _has_grown(self.parameter.grad, self._sent, self._version)

    @property
    def grown_since_clipped(self) -> bool:
        """Whether a backward pass has added to what the last step used clipped."""
        clipped, version = self._clipped
        return clipped is not None and _has_grown(self.parameter.grad, clipped(), version)

    @property
    def left_since_clipped(self) -> bool:
        """Whether the parameter still carries what the last step used clipped, and nothing has come since."""
        clipped, version = self._clipped
        gradient = None if clipped is None or self.filled else self.parameter.grad
        return gradient is not None and clipped is not None and gradient is clipped() and gradient._version == version

    @property
    def outlived(self) -> bool:
        """Whether what was sent is no longer what the parameter carries: it has been dropped, or is new.

        Raises:
            GradientError: it has been changed by other means than by dropping it.
        """
        gradient, sent = self.parameter.grad, self._sent
        if gradient is sent and (sent is None or sent._version == self._version):
            return False
        dropped = gradient is None or (gradient is sent and not gradient.any())
        if sent is not None and not dropped:
            raise GradientError(
                f"The gradient of {self.name} was changed between backward() and step(), when it had already been "
                "communicated, so the change would be lost. To clip by the norm use optimizer.clip_grad_norm_(); for "
                "other changes use hooks (Tensor.register_hook), which run before. Gradients that are views of one "
                "buffer look like this too: let backward make each its own, by zero_grad(set_to_none=True)."
            )
        return True


class Bucket:
    """A fused flat buffer.

    Args:
        parameters: of one dtype and device, by name.
        layout: where their gradients lie.
        dtype: of the gradients on the wire.

    Attributes:
        flat: the gradients, and after the reduce-scatter this rank's shard of their mean: (layout.length,).
        gathered: a second buffer, for what has another dtype on the wire than the gradients.
        work: the collective that was started last, until someone has waited for it.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], layout: Layout, dtype: torch.dtype) -> None:
        members = list(parameters.values())
        self.layout = layout
        self.flat = torch.zeros(layout.length, dtype=dtype, device=members[0].device)
        self._flags = self.layout.flags(self.flat)
        places = self.layout.places(self.flat)
        self.slots = [Slot(*each) for each in zip(parameters, members, places, strict=True)]
        self.state = BucketState.ACCUMULATING
        self.gathered: torch.Tensor | None = None
        self.work: Work | None = None
        self._marked: nn.Parameter | None = None
        self._all_local = False
        self._missing: int | None = None  # gradients of this step; counted when the first one comes

    @property
    def own_gradients(self) -> list[torch.Tensor]:
        """After the reduce-scatter: the mean gradients in this rank's shard, 1-D views, none of them empty."""
        return self.layout.own_gradients(self.flat)

    @property
    def complete(self) -> bool:
        """Whether every gradient of this step has come that can."""
        return self._trainable() == 0 if self._missing is None else self._missing == 0

    def mark(self, parameter: nn.Parameter, gradient_class: type[torch.Tensor]) -> None:
        """See to it that one of its gradients is of this class; the parameter has one."""
        if self._marked is None or not isinstance(self._marked.grad, gradient_class):
            self._marked = parameter
            gradient = parameter.grad
            assert gradient is not None
            # `as_subclass` keeps the graph of a gradient that has one, but is a view, which `detach_()` refuses.
            parameter.grad = (
                gradient.as_subclass(gradient_class)
                if gradient.requires_grad
                else torch.Tensor._make_subclass(gradient_class, gradient)
            )

    def fill(self, slot: Slot) -> None:
        """Take in a gradient that has come."""
        if self._missing is None:
            self.wait()
            self._missing = self._trainable()
        self._missing -= 1
        slot.fill()

    def close(self) -> None:
        """Write what has not come yet, and the flags; nothing can be added until the next round."""
        self.wait()
        present = [slot.filled or slot.fill() for slot in self.slots]
        self._all_local = all(present)
        for flags in self._flags:
            if self._all_local:
                flags.fill_(1)
            else:
                flags.copy_(torch.tensor(present, dtype=flags.dtype))
        self.state = BucketState.REDUCING

    def wait(self) -> None:
        """For its collective, if one is on its way: an abandoned one may still write to the flat buffer."""
        if self.work is not None:
            self.work.wait()
            self.work = None

    def reopen(self) -> None:
        """Abandon what was sent: the gradients of this step are still to come, or to grow."""
        self.state = BucketState.ACCUMULATING
        self.release()

    def release(self, *, clipped: bool = False) -> None:
        """Let the sent gradients go; see `Slot.forget`."""
        self._missing = None
        for slot in self.slots:
            slot.forget(clipped=clipped)

    @property
    def in_use(self) -> bool:
        """Whether it holds gradients of a step that has not been taken."""
        return self.state is BucketState.REDUCING or any(slot.filled for slot in self.slots)

    def present(self) -> list[bool]:
        """Once the flags have come: for each slot whether any rank had a gradient."""
        # What is present here is present somewhere; only otherwise must the host read the flags.
        return [True] * len(self.slots) if self._all_local else self._flags[0].gt(0).tolist()

    def _trainable(self) -> int:
        """How many parameters gradients can come for: some may have been frozen since the bucket was built."""
        return sum(slot.parameter.requires_grad for slot in self.slots)


def _has_grown(gradient: torch.Tensor | None, earlier: torch.Tensor | None, version: int) -> bool:
    return gradient is not None and gradient is earlier and gradient._version == version + 1


def _zeros_like(parameter: nn.Parameter) -> torch.Tensor:
    return torch.zeros((), dtype=parameter.dtype, device=parameter.device).expand(parameter.shape)
