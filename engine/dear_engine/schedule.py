"""The DeAR schedule: both phases of a bucket's all-reduce, each behind computation it does not depend on.

    backward    gradient_ready   BackPipe: a bucket's reduce-scatter starts when its last gradient has come
    step()      step             what never came is reduced as well; all-gathers are queued, in forward order
    forward     a read           FeedPipe: the first read of a bucket's parameter waits for its all-gather and
                                 leaves its parameters updated; later buckets still travel

Every rank queues the same collectives in the same order: a round of reduce-scatters from the last bucket to the first,
then all-gathers from the first to the last. A bucket whose gradients are complete waits until those behind it started.

A gradient that grows after it was sent (a second backward without a step between), or is dropped (`zero_grad()` to
leave out a step), opens the round again: what is left of it is sent, so that all ranks end it alike, its result is
abandoned, and the next round sends the gradients as they are then.

A bucket is PENDING from `step` until its update is applied, and its parameters are behind the read barrier
(barrier.py).
"""

from __future__ import annotations

import logging
import threading
from functools import partial
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from dear_engine.barrier import Holders, ReadBarrier, plainly
from dear_engine.bucket import Bucket, BucketState, Slot
from dear_engine.layers import layers_of
from dear_engine.modes import in_plain_mode
from dear_engine.norms import total_norm
from dear_engine.scaling import noticing
from dear_engine.update import snapshot_of
from dear_tune.errors import GradientError, StaleParameterError, UnsupportedError
from dear_tune.fusion import FusionPlan, fuse

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from torch import nn
    from torch.utils.hooks import RemovableHandle

    from dear_engine.collectives import Channel, Collectives
    from dear_engine.layers import ModelLayer, Owned
    from dear_engine.update import Update

__all__ = ["Schedule", "belongs_to_a_schedule"]

logger = logging.getLogger("dear_engine")


class Schedule:
    """The buckets of one engine, and the phases they go through together.

    Args:
        owned: the optimizer's parameters by module, from `parameters_of`, in the order of forward if that is known.
        optimizer: steps these parameters.
        collectives: carry the buckets.
        update: who steps what.
        channel: for what the ranks must agree on before buckets are built.
        threshold_bytes: the fusion threshold to begin with.
        wire_dtype: what gradients are communicated in; None for each parameter's own.
    """

    def __init__(
        self,
        owned: Owned,
        optimizer: torch.optim.Optimizer,
        collectives: Collectives,
        update: Update,
        channel: Channel,
        *,
        threshold_bytes: int,
        wire_dtype: torch.dtype | None,
    ) -> None:
        self.threshold_bytes: int
        """The fusion threshold in force."""
        self.reducing = True
        """Whether backward starts reduce-scatters; not so while gradients accumulate locally."""
        self._optimizer = optimizer
        self._collectives = collectives
        self._update = update
        self._channel = channel
        self._wire_dtype = wire_dtype
        self._snapshot = snapshot_of(optimizer)
        self._buckets: list[Bucket] = []  # in the layers' order
        self._slots_by_id: dict[int, tuple[Bucket, Slot]] = {}  # by the parameter's id
        self._barrier = ReadBarrier(self._bring_up_to_date, self.synchronize)
        self._gradient_class = noticing(self.unscale)
        self._stream: torch.cuda.Stream | None = None
        self._applying = threading.RLock()  # a checkpoint's thread may read while the training's does
        self._hooks: list[RemovableHandle] = []
        self._round = 0  # of reduce-scatters, since the beginning
        self._begun = False  # whether a gradient has come since the last step
        self._reduced = 0  # of this round's buckets, from the last on
        self._found_inf: torch.Tensor | None = None  # once GradScaler has unscaled this round's gradients
        self._clipped = False  # whether the mean gradients are no longer the mean of those sent
        self._recording = False
        self._reads: dict[nn.Parameter, None] = {}  # those recorded, in order
        self._noted = False
        self._fuse(owned, threshold_bytes)

    @property
    def buckets(self) -> Sequence[Bucket]:
        """In the layers' order."""
        return self._buckets

    @property
    def plan(self) -> FusionPlan:
        """Which of `layers` share a bucket."""
        return self._plan

    @property
    def layers(self) -> Sequence[ModelLayer]:
        """Those that take part, in the order in which they are fused."""
        return self._layers

    def fuse(self, threshold_bytes: int) -> None:
        """Build the buckets anew by a threshold, between a step and the next backward.

        Raises:
            GradientError: gradients are there that no step has used yet.
        """
        if any(bucket.in_use for bucket in self._buckets):
            raise GradientError("The threshold can be changed after step() and before backward(), not in between.")
        self._fuse(self._owned, threshold_bytes)

    def own(self, owned: Owned) -> None:
        """Train these parameters from now on: a parameter group has joined."""
        self._abandon()
        self._fuse(owned)
        self.start()

    def start(self) -> None:
        """From now on backward brings gradients."""
        for hook in self._hooks:
            hook.remove()
        # Each hook knows its parameter: what it is called with may be what another hook of the user's returned.
        self._hooks = [
            _hooked(parameter, _GradientHook(self.gradient_ready, parameter))
            for parameter in self._parameters
            if parameter.is_floating_point()
        ]

    def record(self) -> None:
        """Note in which order parameters are read from now on, until the next gradient: that of forward."""
        self._recording, self._reads = True, {}

    def recorded(self) -> list[str]:
        """All modules: first those whose parameters were read, in that order, then the others."""
        module_of = {p: module for module, parameters in self._owned.items() for p in parameters.values()}
        return list(dict.fromkeys([*(module_of[parameter] for parameter in self._reads), *self._owned]))

    def reorder(self, modules: Sequence[str]) -> None:
        """Fuse in this order of modules from now on."""
        if modules != list(self._owned):
            self._abandon()
            self._fuse({module: self._owned[module] for module in modules})

    def gradient_ready(self, parameter: nn.Parameter, _: object = None) -> None:
        """Called in backward, when a parameter's gradient has been accumulated."""
        if not self._begun or id(parameter) not in self._slots_by_id:
            self._begin()
        if id(parameter) not in self._slots_by_id:
            if parameter.numel():
                raise GradientError("The buckets could not be built anew (see the first error): build a new engine.")
            return
        bucket, slot = self._slots_by_id[id(parameter)]
        gradient = parameter.grad
        if gradient is None:  # a hook of the user's has taken it away
            return
        self._check_not_stale(slot, gradient)
        self._apply(bucket)  # of a graph that was built before the step, and has not saved the parameter
        if gradient.layout is not torch.strided:
            parameter.grad = gradient.to_dense()
        bucket.mark(parameter, self._gradient_class)
        # With create_graph=True gradients grow out of place.
        if slot.grown_since_clipped or (self._clipped and (slot.grown or (slot.filled and gradient.requires_grad))):
            raise GradientError(
                f"A backward pass added to the gradient of {slot.name} after clip_grad_norm_() or "
                "GradScaler.unscale_(), which would be undone. Clip and unscale after a step's last backward pass, and "
                "call zero_grad() before the next step's first."
            )
        if slot.filled or bucket.state is BucketState.REDUCING:
            self._check_unclipped()
            self._abandon()
        if self.reducing:
            bucket.fill(slot)
            self._reduce_complete()

    def reduce(self) -> None:
        """Start what has not started of this round, and wait until this rank holds its shard of the mean gradients."""
        self._settle()
        self._reduce_rest()
        for bucket in self._buckets:
            bucket.wait()

    def finish_round(self) -> None:
        """Start what has not started of a round that has begun: other messages do not come between, then."""
        if any(bucket.in_use for bucket in self._buckets):
            self._reduce_rest()

    def unscale(self, found_inf: torch.Tensor, factor: torch.Tensor) -> None:
        """Multiply the mean gradients, and set `found_inf` on all ranks to whether any of them is not finite."""
        if self._found_inf is None:  # otherwise GradScaler comes once more, for gradients of another dtype
            self.reduce()
            self._clipped = True
            for bucket in self._buckets:
                if own := bucket.own_gradients:
                    torch._amp_foreach_non_finite_check_and_unscale_(own, found_inf, factor)
            self._collectives.all_reduce(found_inf, dist.ReduceOp.MAX, self._place("unscale_()")).wait()
            self._found_inf = found_inf
        found_inf.copy_(self._found_inf)

    def clip(self, max_norm: float, norm_type: float, error_if_nonfinite: bool) -> torch.Tensor:
        """Clip the mean gradients by their norm; see `DistributedOptimizer.clip_grad_norm_`."""
        if not self._buckets:  # all is frozen
            return torch.zeros(())
        self.reduce()
        self._clipped = True
        dtype = max((bucket.flat.dtype for bucket in self._buckets), key=lambda dtype: dtype.itemsize)
        own = [own for bucket in self._buckets if (own := bucket.own_gradients)]
        combine = partial(self._collectives.all_reduce, place=self._place("clip_grad_norm_()"))
        norm = total_norm(own, norm_type, combine, self._buckets[0].flat.device).to(dtype)
        if error_if_nonfinite and not norm.isfinite():
            raise RuntimeError(f"The gradients' total norm is non-finite ({norm.item()}), so they cannot be clipped.")
        factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)  # as torch.nn.utils.clip_grads_with_norm_
        for gradients in own:
            torch._foreach_mul_(gradients, factor.to(gradients[0].dtype))
        return norm

    def read(self, parameters: Iterable[nn.Parameter]) -> None:
        """Bring parameters up to date, as if they were read; others than this schedule's are left alone."""
        for parameter in parameters:
            if id(parameter) in self._slots_by_id:
                self._barrier.read(parameter)

    def step(self) -> None:
        """Reduce what is left and queue all all-gathers; the updates follow at the first reads."""
        for bucket in self._buckets:
            self._check_whole(bucket)
        self._settle()
        self._reduce_rest()
        self._snapshot = snapshot_of(self._optimizer)
        self._stream = _current_stream(self._buckets)
        for bucket in self._buckets:
            bucket.release(clipped=self._clipped)
            if self._update.steps_before_gather:
                bucket.wait()
        shared = self._shared()
        for number, bucket in enumerate(self._buckets):
            self._gather(number, bucket)
        self._next_round()
        self._begun = False
        for slot in shared:
            self._note_shared(slot)
            self._barrier.read(slot.parameter)

    def synchronize(self) -> None:
        """Apply all pending updates."""
        for bucket in self._buckets:
            self._apply(bucket)
            self._open(bucket)

    def close(self) -> None:
        """Apply what is pending and let go of the parameters; gradients that no step has used stay in `.grad`."""
        try:
            self.synchronize()
        finally:
            for hook in self._hooks:
                hook.remove()

    def _fuse(self, owned: Owned, threshold_bytes: int | None = None) -> None:
        """Build the buckets for these parameters; refusals come before anything has changed.

        Args:
            owned: as for the schedule.
            threshold_bytes: by which threshold; None for the one in force.
        """
        threshold_bytes = threshold_bytes or self.threshold_bytes
        self.synchronize()
        named = [item for module in owned.values() for item in module.items()]
        parameters = [parameter for _, parameter in named]
        for name, parameter in named:
            self._barrier.check(name, parameter)
        layers = layers_of(self._taking_part(owned, parameters, threshold_bytes), self._wire_dtype)
        plan = (
            fuse([layer.layer for layer in layers], threshold_bytes)
            if layers
            else FusionPlan(threshold_bytes=threshold_bytes, buckets=())  # all are frozen
        )
        self.threshold_bytes, self._plan = threshold_bytes, plan
        self._owned, self._parameters, self._layers = owned, parameters, layers
        self._buckets, self._slots_by_id = [], {}  # the old buffers go before the new ones come
        buckets = []
        for indices in plan.buckets:
            members = {name: p for index in indices for name, p in layers[index].parameters.items()}
            layout = self._update.layout(list(members.values()))
            dtype = self._wire_dtype or next(iter(members.values())).dtype
            buckets.append(Bucket(members, layout, dtype))
        self._buckets = buckets
        self._slots_by_id = {id(slot.parameter): (bucket, slot) for bucket in self._buckets for slot in bucket.slots}
        # Not of all: a frozen one that lies in a trained one's memory is to be noticed.
        self._holders = Holders([slot.parameter for bucket in buckets for slot in bucket.slots])
        self._outside = [p for p in self._parameters if id(p) not in self._slots_by_id and p.numel()]

    def _taking_part(self, owned: Owned, parameters: Sequence[nn.Parameter], threshold_bytes: int) -> Owned:
        """Those that need a gradient on some rank, or have one.

        Raises:
            UnsupportedError: on all ranks, if they are to be fused by different thresholds.
        """
        here = [parameter.requires_grad or parameter.grad is not None for parameter in parameters]
        place = self._place(f"a fusion of {len(here)} parameters (set_threshold(), unfreezing)")
        thresholds, everyone = zip(*self._channel.all_gather_object((threshold_bytes, here), place), strict=True)
        if len(set(thresholds)) > 1:
            raise UnsupportedError(
                f"The ranks set different thresholds: {list(thresholds)} bytes. Set the same on all."
            )
        anywhere = map(any, zip(*everyone, strict=True))
        members = {id(parameter) for parameter, member in zip(parameters, anywhere, strict=True) if member}
        return {module: {name: p for name, p in named.items() if id(p) in members} for module, named in owned.items()}

    def _begin(self) -> None:
        """With a step's first gradient: parameters may have been thawed, or cast, since the last step."""
        self._begun = True
        if self._recording:
            self._recording = False
            for bucket in self._buckets:
                if bucket.state is not BucketState.PENDING:
                    self._open(bucket)
        slots = (slot for bucket in self._buckets for slot in bucket.slots)
        thawed = any(parameter.requires_grad for parameter in self._outside)
        if thawed or any(slot.parameter.dtype is not slot.dtype for slot in slots):
            self._abandon()
            self._fuse(self._owned)

    def _settle(self) -> None:
        """See to it that what was sent is what is there; `GradientError` if it was changed in between."""
        if not self._begun:  # no gradient has come here: on another rank one has, and all begin a step alike
            self._begin()
        outside = any(parameter.grad is not None for parameter in self._outside)
        outlived = [slot for bucket in self._buckets for slot in self._sent(bucket) if slot.outlived]
        if outside or outlived:
            self._check_unclipped()
            self._abandon()
        if outside:
            self._fuse(self._owned)

    def _check_unclipped(self) -> None:
        """What is sent anew would not be clipped; unless all of it has been dropped, to begin anew."""
        if self._clipped and any(slot.kept for bucket in self._buckets for slot in bucket.slots):
            raise GradientError(
                "After clip_grad_norm_() or GradScaler.unscale_() some gradients came or were dropped, and others are "
                "still there: what was done to them would be lost. Clip and unscale last, after all backward passes of "
                "a step and all changes of gradients."
            )

    def _sent(self, bucket: Bucket) -> Sequence[Slot]:
        return bucket.slots if bucket.state is BucketState.REDUCING else [s for s in bucket.slots if s.filled]

    def _abandon(self) -> None:
        """End a round that has begun on some rank, so that it has on all, and begin the next one."""
        if not any(bucket.in_use for bucket in self._buckets):
            return
        self._reduce_rest()
        for bucket in self._buckets:
            self._check_whole(bucket)
            bucket.reopen()
        self._next_round()

    def _next_round(self) -> None:
        self._round += 1
        self._reduced = 0
        self._clipped, self._found_inf = False, None

    def _reduce_complete(self) -> None:
        while self._reduced < len(self._buckets) and self._buckets[-1 - self._reduced].complete:
            self._reduce_next()

    def _reduce_rest(self) -> None:
        while self._reduced < len(self._buckets):
            self._reduce_next()

    def _reduce_next(self) -> None:
        number = len(self._buckets) - self._reduced - 1
        bucket = self._buckets[number]
        for slot in bucket.slots if bucket.state is BucketState.PENDING else ():  # nothing has read it since the step
            if slot.parameter.grad is not None:
                self._check_not_stale(slot, slot.parameter.grad)
        self._apply(bucket)
        bucket.close()
        bucket.work = self._collectives.reduce_scatter(bucket.flat, self._phase("backward()'s reduce-scatters"), number)
        self._reduced += 1

    def _check_not_stale(self, slot: Slot, gradient: torch.Tensor) -> None:
        if self._barrier.closed(slot.parameter) and gradient.isnan().any():
            raise StaleParameterError(
                f"The gradient of {slot.name} is NaN, and its last update is still pending: it was used in forward in "
                "a way that dear_engine cannot see, and so found NaN in its place. Call optimizer.synchronize() before "
                "such a forward. (Or the loss itself is NaN, and its backward came after a step().)"
            )

    def _phase(self, collectives: str) -> str:
        return self._place(f"{collectives} of {len(self._buckets)} bucket(s)")

    def _place(self, what: str) -> str:
        return f"{what}, round {self._round}"

    def _gather(self, number: int, bucket: Bucket) -> None:
        with self._applying:  # who reads meanwhile waits for it
            bucket.state = BucketState.BROKEN  # until this rank has done its part
            for slot in bucket.slots:
                self._barrier.close(slot.parameter)
            values = [self._barrier.aside(slot.parameter) for slot in bucket.slots]
            prepare = partial(self._update.before_gather, bucket, self._snapshot, values)
            gathered = in_plain_mode(prepare, bucket.flat.device, self._stream)
            bucket.work = self._collectives.all_gather(gathered, self._phase("step()'s all-gathers"), number)
            bucket.state = BucketState.PENDING

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

    def _bring_up_to_date(self, parameter: nn.Parameter) -> None:
        if self._recording:
            self._reads.setdefault(parameter)
        place = self._slots_by_id.get(id(parameter))
        if place is not None:
            self._apply(place[0])

    def _open(self, bucket: Bucket) -> None:
        for slot in bucket.slots:
            self._barrier.open(slot.parameter)

    def _apply(self, bucket: Bucket) -> None:
        if bucket.state in (BucketState.ACCUMULATING, BucketState.REDUCING):
            return
        with self._applying:
            self._check_whole(bucket)
            if bucket.state is BucketState.PENDING:
                in_plain_mode(partial(self._finish, bucket), bucket.flat.device, self._stream)

    def _check_whole(self, bucket: Bucket) -> None:
        if bucket.state is BucketState.BROKEN:
            raise StaleParameterError(
                f"The update of {bucket.slots[0].name} and those fused with it failed before (see the first error); "
                "their values are of no step. Restore a checkpoint in a new process."
            )

    def _finish(self, bucket: Bucket) -> None:
        bucket.wait()
        bucket.state = BucketState.BROKEN  # until the update has succeeded
        values = [self._barrier.aside(slot.parameter) for slot in bucket.slots]
        updated = self._update.after_gather(bucket, self._snapshot, values)
        for slot, new, there in zip(bucket.slots, updated, bucket.present(), strict=True):
            self._barrier.unveil(slot.parameter, new, changed=there)
        bucket.state = BucketState.ACCUMULATING
        if not self._recording:  # otherwise each one's first read is of interest
            self._open(bucket)


def belongs_to_a_schedule(parameter: nn.Parameter) -> bool:
    """Whether some engine updates the parameter already."""
    with plainly():
        hooks = parameter._post_accumulate_grad_hooks or {}
    return any(isinstance(hook, _GradientHook) for hook in hooks.values())


class _GradientHook(partial[None]):
    """Tells our hooks from the user's."""


def _hooked(parameter: nn.Parameter, hook: _GradientHook) -> RemovableHandle:
    """Also on a frozen parameter, which torch would refuse: it may be thawed."""
    trainable = parameter.requires_grad
    parameter.requires_grad_(True)
    try:
        handle: RemovableHandle = parameter.register_post_accumulate_grad_hook(hook)
        return handle
    finally:
        parameter.requires_grad_(trainable)


def _current_stream(buckets: Sequence[Bucket]) -> torch.cuda.Stream | None:
    device = buckets[0].flat.device if buckets else torch.device("cpu")
    return torch.cuda.current_stream(device) if device.type == "cuda" else None
