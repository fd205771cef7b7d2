"""The DeAR schedule: both phases of a bucket's all-reduce, each behind computation it does not depend on.

    backward    gradient_ready   BackPipe: a bucket's reduce-scatter starts when its last gradient has come
    step()      step             what never came is reduced as well; all-gathers are queued, in forward order
    forward     read             FeedPipe: the first read of a bucket's parameter waits for its all-gather and
                                 applies its update; later buckets still travel

Every rank queues the same collectives in the same order: reduce-scatters from the last bucket to the first, then
all-gathers from the first to the last. A bucket whose gradients are complete waits until those behind it started.

A bucket is PENDING from `step` until its update is applied. Reads through the model apply it (barrier.py) and mark
the parameter as current. A gradient for a parameter that was not read through the model since the last step, nor
brought up to date by `synchronize`, may come from an old value: it raises `StaleParameterError`.
"""

from __future__ import annotations

import threading
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING

import torch

from dear_engine.bucket import Bucket, BucketState, Slot
from dear_engine.update import Hyperparameters, apply_update, hyperparameters
from dear_tune.errors import GradientError, StaleParameterError
from dear_tune.fusion import FusionPlan, fuse

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch.utils.hooks import RemovableHandle

    from dear_engine.collectives import Collectives
    from dear_engine.layers import ModelLayer

__all__ = ["Schedule"]


class Schedule:
    """The buckets of one engine, and the phases they go through together.

    Args:
        layers: in the order of forward, as far as it is known.
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
        self._buckets: list[Bucket] = []  # in the layers' order
        self._reduced = 0  # of this step's buckets, from the last on
        self._stream: torch.cuda.Stream | None = None
        self._applying = threading.RLock()  # a checkpoint's thread may read while the training's does
        self._hooks: list[RemovableHandle] = []
        self.fuse(threshold_bytes)

    @property
    def buckets(self) -> Sequence[Bucket]:
        """In the layers' order."""
        return self._buckets

    def fuse(self, threshold_bytes: int) -> None:
        """Build the buckets anew, between a step and the next backward; pending updates are applied first.

        Raises:
            GradientError: gradients are there that no step has used yet.
        """
        if any(bucket.in_use for bucket in self._buckets):
            raise GradientError("The threshold can be changed after step() and before backward(), not in between.")
        self.synchronize()
        self.plan: FusionPlan = fuse([layer.layer for layer in self._layers], threshold_bytes)
        self._places: dict[torch.Tensor, tuple[Bucket, Slot]] = {}
        self._buckets = []  # the old buffers go before the new ones come
        for indices in self.plan.buckets:
            members = {name: p for index in indices for name, p in self._layers[index].parameters.items()}
            self._buckets.append(Bucket(members, self._collectives.world_size))
        self._places = {slot.parameter: (bucket, slot) for bucket in self._buckets for slot in bucket.slots}

    def start(self) -> None:
        """From now on backward brings gradients."""
        # Each hook knows its parameter: what it is called with may be what another hook of the user's returned.
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(partial(self.gradient_ready, parameter))
            for parameter in self._places
        ]

    def gradient_ready(self, parameter: torch.Tensor, _: object = None) -> None:
        """Called in backward, when a parameter's gradient has been accumulated."""
        bucket, slot = self._places[parameter]
        if not slot.current:
            raise StaleParameterError(
                f"{slot.name} was used in forward, perhaps before its update was applied: it was read through a "
                "reference that is not the model's own attribute. Call optimizer.synchronize() before such a forward."
            )
        if not self.reducing:
            return
        if bucket.state is BucketState.REDUCING:
            raise GradientError(
                f"A second backward() without a step() in between brought a gradient for {slot.name}, whose first one "
                "has been communicated already. Run all backward passes of a step but the last under "
                "optimizer.no_sync(); to leave out a step, decide so before backward()."
            )
        bucket.fill(slot)
        self._reduce_complete()

    def step(self) -> None:
        """Reduce what is left and queue all all-gathers; the updates follow at the first reads."""
        for bucket in reversed(self._buckets[: len(self._buckets) - self._reduced]):
            self._reduce(bucket)
        self._reduced = 0
        self._settings = hyperparameters(self._optimizer)
        self._stream = _current_stream(self._buckets[0].flat.device)
        for bucket in self._buckets:
            bucket.release()
        for bucket in self._buckets:
            bucket.work = self._collectives.all_gather(bucket.flat)
            bucket.state = BucketState.PENDING
            bucket.outdate()

    def holds(self, parameter: torch.Tensor) -> bool:
        """Whether the parameter is in one of the buckets."""
        return parameter in self._places

    def read(self, parameter: torch.Tensor) -> None:
        """Apply the pending update of the parameter's bucket, if there is one."""
        place = self._places.get(parameter)
        if place is not None:
            bucket, slot = place
            self._apply(bucket)
            slot.current = True

    def synchronize(self) -> None:
        """Apply all pending updates."""
        for bucket in self._buckets:
            self._apply(bucket)
            bucket.set_current()

    def close(self) -> None:
        """Apply what is pending and let go of the parameters; gradients that no step has used stay in `.grad`."""
        try:
            self.synchronize()
        finally:
            for hook in self._hooks:
                hook.remove()

    def _reduce_complete(self) -> None:
        while self._reduced < len(self._buckets):
            bucket = self._buckets[-1 - self._reduced]
            if not bucket.complete:
                return
            self._reduce(bucket)
            self._reduced += 1

    def _reduce(self, bucket: Bucket) -> None:
        self._apply(bucket)  # where nothing has read it since the last step
        bucket.close()
        bucket.work = self._collectives.reduce_scatter(bucket.flat)

    def _apply(self, bucket: Bucket) -> None:
        if bucket.state in (BucketState.ACCUMULATING, BucketState.REDUCING):
            return
        with self._applying:
            if bucket.state is BucketState.BROKEN:
                raise StaleParameterError(
                    f"The update of {bucket.slots[0].name} and those fused with it failed before (see the first "
                    "error); their values are of no step. Restore a checkpoint."
                )
            if bucket.state is BucketState.PENDING:
                self._update(bucket)

    def _update(self, bucket: Bucket) -> None:
        assert bucket.work is not None  # a pending bucket's all-gather is queued
        parameters = [slot.parameter for slot in bucket.slots]
        with _on_stream(self._stream):
            bucket.work.wait()
            bucket.state = BucketState.BROKEN  # until the update has succeeded
            bucket.check_unwritten()
            apply_update(self._optimizer, self._settings, parameters, bucket.averaged())
        bucket.state = BucketState.ACCUMULATING


def _current_stream(device: torch.device) -> torch.cuda.Stream | None:
    return torch.cuda.current_stream(device) if device.type == "cuda" else None


@contextmanager
def _on_stream(stream: torch.cuda.Stream | None) -> Iterator[None]:
    """Work inside goes to the stream that `step` was called on, whoever reads first; the reader's waits for it."""
    if stream is None:
        yield
        return
    reader = torch.cuda.current_stream(stream.device)
    with torch.cuda.stream(stream):
        yield
    if reader != stream:
        reader.wait_stream(stream)
