"""Tensor fusion: from layers and a threshold to a plan, and all plans that any threshold can give.

This is the one definition: the engine builds its buckets by it, the service and the simulator search over it.

Fusion is greedy in forward order: a layer joins the open bucket of its dtype while the sum stays within the
threshold; otherwise it opens the next one. A layer larger than the threshold has a bucket to itself.

The plan is therefore a step function of the threshold. It changes exactly where some bucket could take in the layer
that follows it, so the next change above a threshold is known, and walking from change to change lists all plans.
No plan comes back at a larger threshold: at each change the first bucket concerned grows, and those before it stay.

    layers    A=4  B=4  C=8  (bytes)
    1..7      [A] [B] [C]
    8..11     [A B] [C]            A + B = 8 fits
    12..15    [A B] [C]            B + C = 12 would fit, but B is taken: no change, so no plan of its own
    16..      [A B C]
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import islice
from typing import TYPE_CHECKING

from dear_tune.errors import InvalidSpaceError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from dear_tune.contract import Layer, StudySpec

__all__ = ["MAX_PLANS", "FusionPlan", "PlanSpace", "distinct_plans", "fuse"]

MAX_PLANS = 1000
"""A search space with more distinct plans than this keeps only plans whose thresholds lie apart."""

_THINNING_RATIO = 2 ** (1 / 24)


@dataclass(frozen=True, kw_only=True)
class FusionPlan:
    """A partition of layers into buckets.

    Attributes:
        threshold_bytes: a threshold that gives this plan, in bytes.
        buckets: for each bucket the indices of its layers, ascending; buckets are ordered by their first layer.
    """

    threshold_bytes: int
    buckets: tuple[tuple[int, ...], ...]


def fuse(layers: Sequence[Layer], threshold_bytes: int) -> FusionPlan:
    """The plan that a threshold gives.

    Args:
        layers: in forward order; at least one.
        threshold_bytes: the largest sum of layers, in bytes, that shares a bucket.

    Raises:
        InvalidSpaceError: no layers, or a threshold under one byte.
    """
    return _fuse(layers, threshold_bytes)[0]


def distinct_plans(layers: Sequence[Layer], *, ratio: float = 1.0) -> Iterator[FusionPlan]:
    """Every plan that some threshold gives, each with the smallest such threshold, ascending.

    The first fuses nothing, and carries the smallest layer's size as its threshold; the last has one bucket a dtype.

    Args:
        layers: in forward order; at least one.
        ratio: skip plans whose threshold is less than this factor above the one before; 1 skips none.

    Raises:
        InvalidSpaceError: no layers.
    """
    threshold = min((layer.bytes for layer in layers), default=0)
    while True:
        plan, next_change = _fuse(layers, threshold)
        yield plan
        if next_change is None:
            return
        threshold = max(next_change, int(threshold * ratio))


@dataclass(frozen=True, kw_only=True)
class PlanSpace:
    """The distinct plans between two bounds: the candidates of a search.

    Attributes:
        plans: by ascending threshold; each threshold lies within the bounds.
        default_threshold_bytes: the threshold that trial 0 measures, within the bounds.
    """

    plans: tuple[FusionPlan, ...]
    default_threshold_bytes: int

    @classmethod
    def of(cls, spec: StudySpec) -> PlanSpace:
        """The search space of a study.

        Raises:
            InvalidSpaceError: bounds that exclude each other or the default.
        """
        low, high = spec.minimum_threshold_bytes, spec.maximum_threshold_bytes
        if not low <= spec.default_threshold_bytes <= high:
            raise InvalidSpaceError(
                f"default_threshold_bytes = {spec.default_threshold_bytes} must lie between "
                f"minimum_threshold_bytes = {low} and maximum_threshold_bytes = {high}."
            )
        plans = _plans_within(spec.layers, low, high)
        return cls(plans=plans, default_threshold_bytes=spec.default_threshold_bytes)

    def index(self, threshold_bytes: int) -> int:
        """Which of `plans` a threshold stands for: thresholds that fuse alike give the same index."""
        return max(bisect_right(self._thresholds, threshold_bytes) - 1, 0)

    @cached_property
    def _thresholds(self) -> tuple[int, ...]:
        return tuple(plan.threshold_bytes for plan in self.plans)


@lru_cache(maxsize=256)
def _plans_within(layers: tuple[Layer, ...], low: int, high: int) -> tuple[FusionPlan, ...]:
    plans = tuple(islice(distinct_plans(layers), MAX_PLANS + 1))
    if len(plans) > MAX_PLANS:
        plans = tuple(distinct_plans(layers, ratio=_THINNING_RATIO))
    first = replace(fuse(layers, low), threshold_bytes=min(max(low, plans[0].threshold_bytes), high))
    above = (plan for plan in plans if first.threshold_bytes < plan.threshold_bytes <= high)
    return (first, *(plan for plan in above if plan.buckets != first.buckets))


def _fuse(layers: Sequence[Layer], threshold_bytes: int) -> tuple[FusionPlan, int | None]:
    """The plan, and the next larger threshold at which it changes (None: it never does)."""
    if not layers:
        raise InvalidSpaceError("A model without trainable parameters has nothing to fuse.")
    if threshold_bytes < 1:
        raise InvalidSpaceError(f"A threshold is at least 1 byte; got {threshold_bytes}.")
    buckets: list[list[int]] = []
    open_buckets: dict[str, tuple[int, list[int]]] = {}  # by dtype: the sum so far, and the layers
    next_change: int | None = None
    for index, layer in enumerate(layers):
        total, bucket = open_buckets.get(layer.dtype, (0, []))
        grown = total + layer.bytes
        if bucket and grown > threshold_bytes:
            next_change = grown if next_change is None else min(next_change, grown)
        if bucket and grown <= threshold_bytes:
            bucket.append(index)
        else:
            grown, bucket = layer.bytes, [index]
            buckets.append(bucket)
        open_buckets[layer.dtype] = (grown, bucket)
    plan = FusionPlan(threshold_bytes=threshold_bytes, buckets=tuple(tuple(bucket) for bucket in buckets))
    return plan, next_change
