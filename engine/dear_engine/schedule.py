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

from functools import partial
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from dear_engine.barrier import plainly
from dear_engine.bucket import Bucket, BucketState, Slot
from dear_engine.feedpipe import FeedPipe
from dear_engine.fusion import Fusion, agreed, planned
from dear_engine.norms import total_norm
from dear_engine.scaling import noticing
from dear_tune.errors import GradientError, UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from torch import nn
    from torch.utils.hooks import RemovableHandle

    from dear_engine.collectives import Channel, Collectives
    from dear_engine.layers import Owned
    from dear_engine.update import Update

__all__ = ["Schedule", "belongs_to_a_schedule"]


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
        self.fusion: Fusion
        """The one in force."""
        self.reducing = True
        """Whether backward starts reduce-scatters; not so while gradients accumulate locally."""
        self._collectives = collectives
        self._update = update
        self._channel = channel
        self._wire_dtype = wire_dtype
        self._pipe = FeedPipe(optimizer, update, collectives)
        self._gradient_class = noticing(self.unscale)
        self._hooks: list[RemovableHandle] = []
        self._round = 0  # of reduce-scatters, since the beginning
        self._begun = False  # whether a gradient has come since the last step
        self._reduced = 0  # of this round's buckets, from the last on
        self._found_inf: torch.Tensor | None = None  # once GradScaler has unscaled this round's gradients
        self._clipped = False  # whether the mean gradients are no longer the mean of those sent
        self._fuse(owned, threshold_bytes)

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
            for named in self._owned.values()
            for parameter in named.values()
            if parameter.is_floating_point()
        ]

    def record(self) -> None:
        """Note in which order parameters are read from now on, until the next gradient: that of forward."""
        self._pipe.record()

    def recorded(self) -> list[str]:
        """All modules: first those whose parameters were read, in that order, then the others."""
        module_of = {p: module for module, parameters in self._owned.items() for p in parameters.values()}
        return list(dict.fromkeys([*(module_of[parameter] for parameter in self._pipe.reads), *self._owned]))

    def reorder(self, modules: Sequence[str]) -> None:
        """Fuse in this order of modules from now on."""
        if modules != list(self._owned):
            self._abandon()
            self._fuse({module: self._owned[module] for module in modules})

    # A training step may be compiled as a whole, backward and all.
    @torch.compiler.disable  # type: ignore[untyped-decorator] # not annotated in torch
    def gradient_ready(self, parameter: nn.Parameter, _: object = None) -> None:
        """Called in backward, when a parameter's gradient has been accumulated."""
        if not self._begun or id(parameter) not in self.fusion.slots:
            self._begin()
        if id(parameter) not in self.fusion.slots:
            if parameter.numel():
                raise GradientError("The buckets could not be built anew (see the first error): build a new engine.")
            return
        bucket, slot = self.fusion.slots[id(parameter)]
        gradient = parameter.grad
        if gradient is None:  # a hook of the user's has taken it away
            return
        self._pipe.check_gradient(slot, gradient)
        self._pipe.apply(bucket)  # of a graph that was built before the step, and has not saved the parameter
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
            self._check_range()
            self.reduce()
            self._clipped = True
            for bucket in self._buckets:
                if own := bucket.own_gradients:
                    torch._amp_foreach_non_finite_check_and_unscale_(own, found_inf, factor)
            self._collectives.all_reduce(found_inf, dist.ReduceOp.MAX, self._site("unscale_()")).wait()
            self._found_inf = found_inf
        found_inf.copy_(self._found_inf)

    def clip(self, max_norm: float, norm_type: float, error_if_nonfinite: bool) -> torch.Tensor:
        """Clip the mean gradients by their norm; see `DistributedOptimizer.clip_grad_norm_`."""
        if not self._buckets:  # all is frozen
            return torch.zeros(())
        self.reduce()
        self._clipped = True
        dtypes = {slot.parameter.dtype for bucket in self._buckets for slot in bucket.slots}
        own = [own for bucket in self._buckets if (own := bucket.own_gradients)]
        combine = partial(self._collectives.all_reduce, site=self._site("clip_grad_norm_()"))
        norm = total_norm(own, norm_type, combine, self._buckets[0].flat.device)
        norm = norm.to(max(dtypes, key=lambda dtype: dtype.itemsize))
        if error_if_nonfinite and not norm.isfinite():
            raise RuntimeError(f"The gradients' total norm is non-finite ({norm.item()}), so they cannot be clipped.")
        factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)  # as torch.nn.utils.clip_grads_with_norm_
        for gradients in own:
            torch._foreach_mul_(gradients, factor)
        return norm

    def read(self, parameters: Iterable[nn.Parameter]) -> None:
        """Bring parameters up to date, as if they were read; others than this schedule's are left alone."""
        self._pipe.read(parameters)

    def step(self) -> None:
        """Reduce what is left and queue all all-gathers; the updates follow at the first reads."""
        for bucket in self._buckets:
            self._pipe.check_whole(bucket)
        self._settle()
        self._reduce_rest()
        for bucket in self._buckets:
            bucket.release(clipped=self._clipped)
        site = self._phase("step()'s all-gathers")
        self._next_round()
        self._begun = False
        self._pipe.hand_over(site)

    def synchronize(self) -> None:
        """Apply all pending updates."""
        self._pipe.apply_all()

    def close(self) -> None:
        """Apply what is pending and let go of the parameters; gradients that no step has used stay in `.grad`."""
        try:
            self.synchronize()
            self._pipe.carry(())  # after a failure its parameters go on to raise
        finally:
            for hook in self._hooks:
                hook.remove()

    @property
    def _buckets(self) -> Sequence[Bucket]:
        return self.fusion.buckets

    def _fuse(self, owned: Owned, threshold_bytes: int | None = None) -> None:
        """Build the buckets for these parameters; refusals come before anything has changed.

        Args:
            owned: as for the schedule.
            threshold_bytes: by which threshold; None for the one in force.
        """
        threshold_bytes = threshold_bytes or self.fusion.plan.threshold_bytes
        self._pipe.apply_all()
        for name, parameter in (item for named in owned.values() for item in named.items()):
            self._pipe.check(name, parameter)
        number = sum(map(len, owned.values()))
        site = self._site(f"a fusion of {number} parameters (set_threshold(), unfreezing)")
        members = agreed(owned, threshold_bytes, self._channel, site)
        fusion = planned(owned, members, threshold_bytes, self._wire_dtype)
        self._owned = owned
        self._carry(fusion)  # the old buffers go before the new ones come
        self._carry(fusion.with_buckets(self._update))

    def _carry(self, fusion: Fusion) -> None:
        self.fusion = fusion
        self._pipe.carry(fusion.buckets)

    def _begin(self) -> None:
        """With a step's first gradient: parameters may have been thawed, or cast, since the last step."""
        self._begun = True
        self._pipe.end_recording()
        slots = (slot for bucket in self._buckets for slot in bucket.slots)
        thawed = any(parameter.requires_grad for parameter in self.fusion.outside)
        if thawed or any(slot.parameter.dtype is not slot.dtype for slot in slots):
            self._abandon()
            self._fuse(self._owned)

    def _settle(self) -> None:
        """See to it that what was sent is what is there; `GradientError` if it was changed in between."""
        if not self._begun:  # no gradient has come here: on another rank one has, and all begin a step alike
            self._begin()
        for slot in (
            slot for bucket in self._buckets if bucket.state is not BucketState.REDUCING for slot in bucket.slots
        ):
            if slot.left_since_clipped:
                raise GradientError(
                    f"{slot.name} still carries the gradient of an earlier step, which clip_grad_norm_() or "
                    "GradScaler.unscale_() changed then, and would be used as it was before. Call zero_grad() after "
                    "every step()."
                )
        outside = any(parameter.grad is not None for parameter in self.fusion.outside)
        outlived = [slot for bucket in self._buckets for slot in self._sent(bucket) if slot.outlived]
        if outside or outlived:
            self._check_unclipped()
            self._abandon()
        if outside:
            self._fuse(self._owned)

    def _check_range(self) -> None:
        """What GradScaler unscales has to fit in what it travels in to the other ranks."""
        for bucket in self._buckets:
            if bucket.flat.dtype is torch.float16 and bucket.slots[0].dtype is not torch.float16:
                raise UnsupportedError(
                    "GradScaler scales gradients because float16 holds none below 6e-8, and with "
                    "communication_dtype=torch.float16 they would travel unscaled: use torch.bfloat16, or None."
                )

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
            self._pipe.check_whole(bucket)
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
        for slot in bucket.slots:
            if not slot.filled and slot.parameter.grad is not None:  # it was set by hand
                self._pipe.check_gradient(slot, slot.parameter.grad)
        self._pipe.apply(bucket)
        bucket.close()
        bucket.work = self._collectives.reduce_scatter(bucket.flat, self._phase("backward()'s reduce-scatters"), number)
        self._reduced += 1

    def _site(self, what: str) -> str:
        return f"{what}, round {self._round}"

    def _phase(self, collectives: str) -> str:
        return self._site(f"{collectives} of {len(self._buckets)} bucket(s)")


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
