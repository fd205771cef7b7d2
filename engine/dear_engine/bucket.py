"""A bucket: the fused flat buffer of some layers' gradients, and where it stands in the iteration.

    flat    [ gradients, one parameter after the other | presence flags | padding ]     (world_size * n,)
    shard r                flat[r * n : (r + 1) * n], n the same for all ranks

A presence flag, one element a parameter, is 1 on the ranks that have a gradient for it. It travels with the
gradients, so that after the all-gather every rank knows, with no extra message, which parameters had a gradient
anywhere: plain torch skips those that had none, and so do we.
"""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING

import torch

from dear_tune.errors import GradientError, StaleParameterError, UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import nn

    from dear_engine.collectives import Work

__all__ = ["Bucket", "BucketState", "Slot"]


class BucketState(Enum):
    """What a bucket waits for."""

    ACCUMULATING = "accumulating"  # for the gradients of this step
    REDUCING = "reducing"  # for step(); its reduce-scatter is queued, its gradients are closed
    PENDING = "pending"  # for the first read of one of its parameters; its all-gather is queued
    BROKEN = "broken"  # for nothing: its update failed half-way, and its parameters are of no step


class Slot:
    """One parameter's place in a bucket.

    Attributes:
        view: the parameter's gradient inside the flat buffer, of the parameter's shape.
        current: whether the parameter was read through the model, or brought up to date, since the last step: only
            then can a use of it in forward have seen its latest value.
    """

    def __init__(self, name: str, parameter: nn.Parameter, view: torch.Tensor) -> None:
        self.name = name
        self.parameter = parameter
        self.view = view
        self.current = True
        self._sent: torch.Tensor | None = None
        self._version = 0
        self._pending_version = 0

    @property
    def filled(self) -> bool:
        """Whether this step's gradient is in the flat buffer."""
        return self._sent is not None

    def fill(self) -> bool:
        """Copy the parameter's gradient, if it has one, into the flat buffer; say whether it had."""
        gradient = self.parameter.grad
        if gradient is None:
            self.view.zero_()
            return False
        if gradient.layout is not torch.strided:
            raise UnsupportedError(
                f"{self.name} has a {gradient.layout} gradient; build its module with sparse=False to use dear_engine."
            )
        self.view.copy_(gradient.detach())
        self._sent, self._version = gradient, gradient._version
        return True

    def outdate(self) -> None:
        """An update of the parameter is pending from now on."""
        self.current = False
        self._pending_version = self.parameter._version

    def check_unwritten(self) -> None:
        """Raise if the parameter was written since `outdate`: the update would go on top of it, or undo it."""
        if self.parameter._version != self._pending_version:
            raise StaleParameterError(
                f"{self.name} was written after step() through a reference that is not the model's own attribute, when "
                "its update was still pending. Call optimizer.synchronize() before you write."
            )

    def release(self) -> None:
        """Forget what was sent; raise if it is no longer what the parameter carries."""
        sent, self._sent = self._sent, None
        if self.parameter.grad is not sent or (sent is not None and sent._version != self._version):
            raise GradientError(
                f"The gradient of {self.name} was changed between backward() and step(), when it had already been "
                "communicated, so the change would be lost. Gradient clipping and other changes of gradients are not "
                "supported yet: leave the gradients as they are until step()."
            )


class Bucket:
    """A fused flat buffer. See the module's text.

    Args:
        parameters: of one dtype and device, by name.
        world_size: the number of shards.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], world_size: int) -> None:
        sizes = [parameter.numel() for parameter in parameters.values()]
        length = sum(sizes) + len(sizes)
        like = next(iter(parameters.values()))
        self.flat = torch.zeros(-(-length // world_size) * world_size, dtype=like.dtype, device=like.device)
        *views, self._flags, _ = self.flat.split([*sizes, len(sizes), self.flat.numel() - length])
        self.slots = [
            Slot(name, parameter, view.view(parameter.shape))
            for (name, parameter), view in zip(parameters.items(), views, strict=True)
        ]
        self.state = BucketState.ACCUMULATING
        self.work: Work | None = None
        self._all_local = False
        self._missing: int | None = None  # gradients of this step; counted when the first one comes

    @property
    def complete(self) -> bool:
        """Whether every gradient of this step has come that can."""
        return self._trainable() == 0 if self._missing is None else self._missing == 0

    def fill(self, slot: Slot) -> None:
        """Take in a gradient that has come; once more if it has grown since."""
        if self._missing is None:
            self._missing = self._trainable()
        self._missing -= not slot.filled
        slot.fill()

    def close(self) -> None:
        """Write what has not come yet, and the flags; nothing can be added until the next step."""
        present = [slot.filled or slot.fill() for slot in self.slots]
        self._all_local = all(present)
        if self._all_local:
            self._flags.fill_(1)
        else:
            self._flags.copy_(torch.tensor(present, dtype=self.flat.dtype))
        self.state = BucketState.REDUCING

    def release(self) -> None:
        """Let the sent gradients go, at step(); `GradientError` if one was changed after it was sent."""
        self._missing = None
        for slot in self.slots:
            slot.release()

    @property
    def in_use(self) -> bool:
        """Whether it holds gradients of a step that has not been taken."""
        return self.state is BucketState.REDUCING or any(slot.filled for slot in self.slots)

    def set_current(self) -> None:
        """Note for all its parameters that whatever anyone reads now is their latest value."""
        for slot in self.slots:
            slot.current = True

    def outdate(self) -> None:
        """Its update is pending from now on."""
        for slot in self.slots:
            slot.outdate()

    def check_unwritten(self) -> None:
        """Raise `StaleParameterError` if one of its parameters was written since `outdate`."""
        for slot in self.slots:
            slot.check_unwritten()

    def _trainable(self) -> int:
        """How many parameters gradients can come for: some may have been frozen since the bucket was built."""
        return sum(slot.parameter.requires_grad for slot in self.slots)

    def averaged(self) -> Sequence[torch.Tensor | None]:
        """After the all-gather: each slot's mean gradient over ranks, None where no rank had one."""
        # What is present here is present somewhere; only otherwise must the host read the flags.
        present = [True] * len(self.slots) if self._all_local else self._flags.gt(0).tolist()
        return [slot.view if there else None for slot, there in zip(self.slots, present, strict=True)]
