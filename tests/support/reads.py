"""Ways to look at a model while an update is pending."""

from __future__ import annotations

from support.training import batches, pending_model

import dear_engine as dear
from dear_engine.bucket import BucketState


def pending_after_zero_grad(set_to_none: bool) -> tuple[int, int]:
    """How many buckets are pending before and after `model.zero_grad()`."""
    model, optimizer, _ = pending_model()
    before = _pending(optimizer)
    model.zero_grad(set_to_none)
    after = _pending(optimizer)
    assert all(p.grad is None or not p.grad.any() for p in model.parameters())
    optimizer.close()
    return before, after


def buckets_applied_by_first_layer() -> tuple[int, int]:
    """Buckets in all, and those still pending when the first layer has run."""
    model, optimizer, _ = pending_model(threshold_bytes=1)
    model[0](batches(0)[0])
    still = _pending(optimizer)
    buckets = len(optimizer.plan.buckets)
    optimizer.close()
    return buckets, still


def _pending(optimizer: dear.DistributedOptimizer) -> int:
    return sum(bucket.state is BucketState.PENDING for bucket in optimizer._schedule.fusion.buckets)


def wrapped_state() -> tuple[int, int]:
    """Entries of the state that the wrapped optimizer itself saves while its first update is pending; parameters."""
    model, optimizer, _ = pending_model()
    entries = len(optimizer._optimizer.state_dict()["state"])
    optimizer.close()
    return entries, len(list(model.parameters()))
