"""FeedPipe: from `step()` to the first read of a bucket's parameters.

    hand_over   the all-gathers are queued, in forward order; every bucket is PENDING, its parameters behind the barrier
    a read      waits for the all-gather of the parameter's bucket and applies its update; later buckets still travel

Reads come from whichever thread, at whatever moment; all of it happens under one lock.
"""

from __future__ import annotations

import logging
import threading
from functools import partial
from typing import TYPE_CHECKING

import torch

from dear_engine.barrier import Holders, ReadBarrier
from dear_engine.bucket import Bucket, BucketState, Slot
from dear_engine.modes import in_plain_mode
from dear_engine.update import snapshot_of
from dear_tune.errors import StaleParameterError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from torch import nn

    from dear_engine.collectives import Collectives
    from dear_engine.update import Update

__all__ = ["FeedPipe"]

logger = logging.getLogger("dear_engine")


class FeedPipe:
    """The updates that wait for a read.

    Args:
        optimizer: steps the parameters.
        update: who steps what.
        collectives: carry the all-gathers.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, update: Update, collectives: Collectives) -> None:
        self._optimizer = optimizer
        self._update = update
        self._collectives = collectives
        self._barrier = ReadBarrier(self._bring_up_to_date, self.apply_all)
        self._buckets: Sequence[Bucket] = ()
        self._bucket_of: dict[int, Bucket] = {}  # by the parameter's id
        self._holders = Holders([])
        self._snapshot = snapshot_of(optimizer)
        self._stream: torch.cuda.Stream | None = None
        self._applying = threading.RLock()  # a checkpoint's thread may read while the training's does
        self._recording = False
        self._reads: dict[nn.Parameter, None] = {}  # those recorded, in order
        self._noted = False

    @property
    def reads(self) -> Iterable[nn.Parameter]:
        """The parameters that were read since `record`, in that order."""
        return self._reads

    def check(self, name: str, parameter: nn.Parameter) -> None:
        """Raise `UnsupportedError` for a parameter that cannot be put behind the barrier."""
        self._barrier.check(name, parameter)

    def carry(self, buckets: Sequence[Bucket]) -> None:
        """These from now on, or none; nothing is pending."""
        self._buckets = buckets
        self._bucket_of = {id(slot.parameter): bucket for bucket in buckets for slot in bucket.slots}
        # Not of all parameters: a frozen one that lies in a trained one's memory is to be noticed.
        self._holders = Holders([slot.parameter for bucket in buckets for slot in bucket.slots])

    def hand_over(self, site: str) -> None:
        """Queue the all-gathers; the updates follow at the first reads.

        Args:
            site: of the collectives; see collectives.py.
        """
        self._snapshot = snapshot_of(self._optimizer)
        self._stream = _current_stream(self._buckets)
        if self._update.steps_before_gather:
            for bucket in self._buckets:
                bucket.wait()
        shared = self._shared()
        for number, bucket in enumerate(self._buckets):
            self._gather(bucket, site, number)
        for slot in shared:
            self._note_shared(slot)
            self._barrier.read(slot.parameter)

    def read(self, parameters: Iterable[nn.Parameter]) -> None:
        """Bring parameters up to date, as if they were read; others than these buckets' are left alone."""
        for parameter in parameters:
            if id(parameter) in self._bucket_of:
                self._barrier.read(parameter)

    def apply(self, bucket: Bucket) -> None:
        """Apply its update, if it is pending."""
        if bucket.state in (BucketState.ACCUMULATING, BucketState.REDUCING):
            return
        with self._applying:
            self.check_whole(bucket)
            if bucket.state is BucketState.PENDING:
                in_plain_mode(partial(self._finish, bucket), bucket.flat.device, self._stream)

    def apply_all(self) -> None:
        """Apply all pending updates."""
        for bucket in self._buckets:
            self.apply(bucket)
            for slot in bucket.slots:
                self._barrier.open(slot.parameter)

    def check_whole(self, bucket: Bucket) -> None:
        """Raise `StaleParameterError` if its parameters are of no step."""
        if bucket.state is BucketState.BROKEN:
            raise StaleParameterError(
                f"The update of {bucket.slots[0].name} and those fused with it failed before (see the first error); "
                "their values are of no step. Restore a checkpoint in a new process."
            )

    def check_gradient(self, slot: Slot, gradient: torch.Tensor) -> None:
        """Raise `StaleParameterError` if it comes from a read past the barrier."""
        if self._barrier.closed(slot.parameter) and gradient.isnan().any():
            raise StaleParameterError(
                f"The gradient of {slot.name} is NaN, and nothing is known to have read it since its last update: it "
                "was used in forward in a way that dear_engine cannot see, and so found NaN in its place. Call "
                "optimizer.synchronize() before such a forward. (Or the loss itself is NaN, and its backward came "
                "after a step().)"
            )

    def record(self) -> None:
        """Note in which order parameters are read from now on, until `end_recording`: that of forward."""
        self._recording, self._reads = True, {}

    def end_recording(self) -> None:
        """The order is known."""
        self._recording = False

    def _gather(self, bucket: Bucket, site: str, number: int) -> None:
        with self._applying:  # who reads meanwhile waits for it
            bucket.state = BucketState.BROKEN  # until this rank has done its part
            for slot in bucket.slots:
                self._barrier.close(slot.parameter)
            values = [self._barrier.aside(slot.parameter) for slot in bucket.slots]
            prepare = partial(self._update.before_gather, bucket, self._snapshot, values)
            gathered = in_plain_mode(prepare, bucket.flat.device, self._stream)
            bucket.work = self._collectives.all_gather(gathered, site, number)
            bucket.state = BucketState.PENDING

    def _finish(self, bucket: Bucket) -> None:
        bucket.wait()
        if bucket.state is not BucketState.PENDING:  # a signal's handler, which ran in the wait, has read it
            return
        bucket.state = BucketState.BROKEN  # until the update has succeeded
        values = [self._barrier.aside(slot.parameter) for slot in bucket.slots]
        updated = self._update.after_gather(bucket, self._snapshot, values)
        for slot, new, there in zip(bucket.slots, updated, bucket.present(), strict=True):
            # Its own first read opens it: until then, what has read NaN in its place can be told by its gradient.
            self._barrier.unveil(slot.parameter, new, changed=there)
        bucket.state = BucketState.ACCUMULATING

    def _bring_up_to_date(self, parameter: nn.Parameter) -> None:
        if self._recording:
            self._reads.setdefault(parameter)
        bucket = self._bucket_of.get(id(parameter))
        if bucket is not None:
            self.apply(bucket)

    def _shared(self) -> list[Slot]:
        """Those whose values can be read past the barrier."""
        others = self._holders.others()
        return [slot for bucket in self._buckets for slot in bucket.slots if id(slot.parameter) in others]

    def _note_shared(self, slot: Slot) -> None:
        if not self._noted:
            logger.info(
                "%s can be read past the engine (a kept .data or view, a graph whose backward is still to come, a "
                "traced module), so it is updated at once, and its all-gather hides behind nothing.",
                slot.name,
            )
        self._noted = True


def _current_stream(buckets: Sequence[Bucket]) -> torch.cuda.Stream | None:
    device = buckets[0].flat.device if buckets else torch.device("cpu")
    return torch.cuda.current_stream(device) if device.type == "cuda" else None
