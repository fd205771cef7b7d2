"""The DeAR schedule: both phases of a bucket's all-reduce, each behind computation it does not depend on.

    backward    gradient_ready   BackPipe: a bucket's reduce-scatter starts when its last gradient has come
    step()      step             what never came is reduced as well; all-gathers are queued, in forward order
    forward     read             FeedPipe: the first read of a bucket's parameter waits for its all-gather and
                                 applies its update; later buckets still travel

Every rank queues the same collectives in the same order: reduce-scatters from the last bucket to the first, then
all-gathers from the first to the last. A bucket whose gradients are complete waits until those behind it started.

Why no number can be silently wrong: a bucket is PENDING from `step` until its update is applied. Reads through
the model apply it (barrier.py). A read that escaped used old values; then backward brings a gradient for a
parameter of a PENDING bucket, and that raises `StaleParameterError`. If backward brings none, the old values
influenced no gradient.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dear_engine.bucket import Bucket, BucketState, Slot
from dear_engine.update import Hyperparameters, apply_update, hyperparameters
from dear_tune.errors import GradientError, StaleParameterError
from dear_tune.fusion import FusionPlan, fuse

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch
    from torch.utils.hooks import RemovableHandle

    from dear_engine.collectives import Collectives
    from dear_engine.layers import ModelLayer

__all__ = ["Schedule"]


class Schedule:
    """The buckets of one engine, and the phases they go through together.

    Args:
        layers: in forward order.
        optimizer: steps the parameters of these layers.
        collectives: carry the buckets.
        threshold_bytes: the fusion threshold to begin with.
    """

    def __init__(
        self,
        layers: Sequence[ModelLayer],
        optimizer: torch.optim.Optimizer,
        collectives: Collectives,
        threshold_bytes: int,
    ) -> None:
        self.reducing = True
        """Whether backward starts reduce-scatters; not so while gradients accumulate locally."""
        self._layers = layers
        self._optimizer = optimizer
        self._collectives = collectives
        self._settings: Hyperparameters = {}
        self._buckets: list[Bucket] = []  # in forward order
        self._reduced = 0  # of this step's buckets, from the last on
        self.fuse(threshold_bytes)
        self._hooks = self._hook_gradients()

    @property
    def buckets(self) -> Sequence[Bucket]:
        """In forward order."""
        return self._buckets

    def fuse(self, threshold_bytes: int) -> None:
        """Build the buckets anew, between two steps; pending updates are applied first."""
        self.synchronize()
        self.plan: FusionPlan = fuse([layer.layer for layer in self._layers], threshold_bytes)
        self._places: dict[torch.Tensor, tuple[Bucket, Slot]] = {}
        self._buckets = []  # the old buffers go before the new ones come
        for indices in self.plan.buckets:
            members = {name: p for index in indices for name, p in self._layers[index].parameters.items()}
            self._buckets.append(Bucket(members, self._collectives.world_size))
        self._places = {slot.parameter: (bucket, slot) for bucket in self._buckets for slot in bucket.slots}

    def gradient_ready(self, parameter: torch.Tensor) -> None:
        """Called in backward, when a parameter's gradient has been accumulated."""
        bucket, slot = self._places[parameter]
        if bucket.state is BucketState.PENDING:
            raise StaleParameterError(
                f"{slot.name} was used in forward before its update was applied: it was read through a reference that "
                "is not the model's own attribute. Call optimizer.synchronize() before such a forward."
            )
        if not self.reducing:
            return
        if bucket.state is BucketState.REDUCING:
            raise GradientError(
                f"A second backward() brought a gradient for {slot.name}, which has already been communicated. Run "
                "all backward passes of a step but the last under optimizer.no_sync()."
            )
        bucket.fill(slot)
        self._reduce_complete()

    def step(self) -> None:
        """Reduce what is left and queue all all-gathers; the updates follow at the first reads."""
        for bucket in reversed(self._buckets[: len(self._buckets) - self._reduced]):
            self._apply(bucket)  # nothing read it since the last step
            self._reduce(bucket)
        self._reduced = 0
        self._settings = hyperparameters(self._optimizer)
        for bucket in self._buckets:
            bucket.release()
        for bucket in self._buckets:
            bucket.work = self._collectives.all_gather(bucket.flat)
            bucket.state = BucketState.PENDING

    def holds(self, parameter: torch.Tensor) -> bool:
        """Whether the parameter is in one of the buckets."""
        return parameter in self._places

    def read(self, parameter: torch.Tensor) -> None:
        """Apply the pending update of the parameter's bucket, if there is one."""
        place = self._places.get(parameter)
        if place is not None:
            self._apply(place[0])

    def synchronize(self) -> None:
        """Apply all pending updates."""
        for bucket in self._buckets:
            self._apply(bucket)

    def close(self) -> None:
        """Apply what is pending and let go of the parameters."""
        self.synchronize()
        for hook in self._hooks:
            hook.remove()

    def _hook_gradients(self) -> list[RemovableHandle]:
        return [parameter.register_post_accumulate_grad_hook(self.gradient_ready) for parameter in self._places]

    def _reduce_complete(self) -> None:
        while self._reduced < len(self._buckets):
            bucket = self._buckets[-1 - self._reduced]
            if not bucket.complete:
                return
            self._reduce(bucket)
            self._reduced += 1

    def _reduce(self, bucket: Bucket) -> None:
        bucket.close()
        bucket.work = self._collectives.reduce_scatter(bucket.flat)

    def _apply(self, bucket: Bucket) -> None:
        if bucket.state is not BucketState.PENDING:
            return
        assert bucket.work is not None  # a pending bucket's all-gather is queued
        bucket.work.wait()
        bucket.state = BucketState.ACCUMULATING
        parameters = [slot.parameter for slot in bucket.slots]
        apply_update(self._optimizer, self._settings, parameters, bucket.averaged())
