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
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, islice, pairwise
from typing import TYPE_CHECKING

from dear_tune.errors import InvalidSpaceError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from dear_tune.contract import Layer, StudySpec

__all__ = ["MAX_PLANS", "FusionPlan", "PlanSpace", "distinct_plans", "fuse"]

MAX_PLANS = 1000
"""A search space with more distinct plans than this keeps only plans whose thresholds lie apart."""

_MAX_LAYERS_EXACT = 500  # with more, already finding out how many plans there are takes too long

_THINNING_RATIO = 2 ** (1 / 24)

_Sums = tuple[int, ...]  # of one dtype's layers: the layers from a to b have sums[b] - sums[a] bytes


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
    if threshold_bytes < 1:
        raise InvalidSpaceError(f"A threshold is at least 1 byte; got {threshold_bytes}.")
    buckets = [
        tuple(indices[start:end])
        for indices in _indices_by_dtype(layers)
        for start, end in pairwise(_cuts(_sums(layers, indices), threshold_bytes))
    ]
    return FusionPlan(threshold_bytes=threshold_bytes, buckets=tuple(sorted(buckets)))


def distinct_plans(layers: Sequence[Layer]) -> Iterator[FusionPlan]:
    """Every plan that some threshold gives, each with the smallest such threshold, ascending.

    The first fuses nothing, and carries the smallest layer's size as its threshold; the last has one bucket a dtype.

    Args:
        layers: in forward order; at least one.

    Raises:
        InvalidSpaceError: no layers.
    """
    sums = _sums_by_dtype(layers)
    smallest = min(layer.bytes for layer in layers)
    return (fuse(layers, threshold) for threshold in _changes(sums, smallest, sum(each[-1] for each in sums)))


@dataclass(frozen=True, kw_only=True)
class PlanSpace:
    """The distinct plans between two bounds: the candidates of a search. `fuse` gives a candidate's buckets.

    Attributes:
        thresholds: a threshold in bytes for each plan, ascending, within the bounds.
        default_threshold_bytes: the threshold that trial 0 measures, within the bounds.
        sums: for each dtype the running sums of its layers' bytes, from 0.
    """

    thresholds: tuple[int, ...]
    default_threshold_bytes: int
    sums: tuple[tuple[int, ...], ...]

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
        sums = _sums_by_dtype(spec.layers)
        thresholds = _thresholds_within(sums, low, high)
        return cls(thresholds=thresholds, default_threshold_bytes=spec.default_threshold_bytes, sums=sums)

    def index(self, threshold_bytes: int) -> int:
        """Which plan a threshold stands for: thresholds that fuse alike give the same index."""
        return max(bisect_right(self.thresholds, threshold_bytes) - 1, 0)

    def buckets(self, threshold_bytes: int) -> int:
        """How many buckets a threshold gives."""
        return sum(len(_cuts(each, threshold_bytes)) - 1 for each in self.sums)


@lru_cache(maxsize=128)  # some megabytes at most: every request asks for its study's plans
def _thresholds_within(sums: tuple[_Sums, ...], low: int, high: int) -> tuple[int, ...]:
    start = min(max(low, min(_smallest(each) for each in sums)), high)
    if sum(len(each) - 1 for each in sums) <= _MAX_LAYERS_EXACT:
        exact = tuple(islice(_changes(sums, start, high), MAX_PLANS + 1))
        if len(exact) <= MAX_PLANS:
            return exact
    return tuple(_changes(sums, start, high, ratio=_THINNING_RATIO))


def _changes(sums: Sequence[_Sums], low: int, high: int, *, ratio: float = 1.0) -> Iterator[int]:
    """The lower bound, and above it, up to the upper one, each threshold at which the plan changes.

    Changes less than a factor `ratio` above the threshold before count as one.
    """
    threshold = low
    while True:
        yield threshold
        change = min(filter(None, (_next_change(each, threshold) for each in sums)), default=None)
        if change is None or change > high:
            return
        threshold = max(change, min(int(threshold * ratio), high))


def _next_change(sums: _Sums, threshold_bytes: int) -> int | None:
    """The smallest threshold at which some bucket takes in the layer that follows it (None: it has all)."""
    buckets = pairwise(_cuts(sums, threshold_bytes))
    return min((sums[end + 1] - sums[start] for start, end in buckets if end + 1 < len(sums)), default=None)


def _cuts(sums: _Sums, threshold_bytes: int) -> list[int]:
    """Where one dtype's layers are cut into buckets: 0, the first layer of each further one, the number of layers."""
    cuts = [0]
    while (start := cuts[-1]) < len(sums) - 1:
        fits = bisect_right(sums, sums[start] + threshold_bytes, start) - 1
        cuts.append(max(fits, start + 1))
    return cuts


def _smallest(sums: _Sums) -> int:
    return min(after - before for before, after in pairwise(sums))


def _sums_by_dtype(layers: Sequence[Layer]) -> tuple[_Sums, ...]:
    return tuple(_sums(layers, indices) for indices in _indices_by_dtype(layers))


def _sums(layers: Sequence[Layer], indices: Sequence[int]) -> _Sums:
    return tuple(accumulate((layers[index].bytes for index in indices), initial=0))


def _indices_by_dtype(layers: Sequence[Layer]) -> list[list[int]]:
    if not layers:
        raise InvalidSpaceError("A model without trainable parameters has nothing to fuse.")
    by_dtype: dict[str, list[int]] = {}
    for index, layer in enumerate(layers):
        by_dtype.setdefault(layer.dtype, []).append(index)
    return list(by_dtype.values())
