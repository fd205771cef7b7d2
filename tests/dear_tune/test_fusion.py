from __future__ import annotations

import itertools
import time
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.landscapes import space_of, spec_of

from dear_tune.contract import Layer
from dear_tune.errors import InvalidSpaceError
from dear_tune.fusion import MAX_PLANS, PlanSpace, distinct_plans, fuse

layer_lists = st.lists(
    st.builds(Layer, name=st.just("layer"), bytes=st.integers(1, 100), dtype=st.sampled_from(("float32", "bfloat16"))),
    min_size=1,
    max_size=12,
)
thresholds = st.integers(1, 1300)


def size(layers: Sequence[Layer], bucket: Sequence[int]) -> int:
    """A bucket's bytes."""
    return sum(layers[index].bytes for index in bucket)


@given(layer_lists, thresholds)
def test_every_layer_is_in_exactly_one_bucket(layers: list[Layer], threshold: int) -> None:
    """The buckets partition the layers."""
    buckets = fuse(layers, threshold).buckets
    assert sorted(index for bucket in buckets for index in bucket) == list(range(len(layers)))


@given(layer_lists, thresholds)
def test_fused_buckets_stay_within_the_threshold(layers: list[Layer], threshold: int) -> None:
    """A bucket of more than one layer is at most as large as the threshold."""
    fused = [bucket for bucket in fuse(layers, threshold).buckets if len(bucket) > 1]
    assert all(size(layers, bucket) <= threshold for bucket in fused)


@given(layer_lists, thresholds)
def test_buckets_are_maximal(layers: list[Layer], threshold: int) -> None:
    """The layer that opens a bucket would not have fitted into the one before of its dtype."""
    buckets = fuse(layers, threshold).buckets
    for dtype in ("float32", "bfloat16"):
        alike = [bucket for bucket in buckets if layers[bucket[0]].dtype == dtype]
        for bucket, following in itertools.pairwise(alike):
            assert size(layers, (*bucket, following[0])) > threshold


@given(layer_lists, thresholds)
def test_buckets_keep_the_order_and_the_dtype(layers: list[Layer], threshold: int) -> None:
    """Within a dtype the buckets, read one after the other, are the layers in forward order."""
    buckets = fuse(layers, threshold).buckets
    for dtype in ("float32", "bfloat16"):
        alike = [index for bucket in buckets if layers[bucket[0]].dtype == dtype for index in bucket]
        assert alike == [index for index, layer in enumerate(layers) if layer.dtype == dtype]


@given(layer_lists)
def test_distinct_plans_are_distinct_and_ascending(layers: list[Layer]) -> None:
    """No plan is listed twice, and the thresholds grow."""
    plans = list(distinct_plans(layers))
    assert len({plan.buckets for plan in plans}) == len(plans)
    assert all(one.threshold_bytes < next_.threshold_bytes for one, next_ in itertools.pairwise(plans))


@given(layer_lists, thresholds)
def test_distinct_plans_are_complete(layers: list[Layer], threshold: int) -> None:
    """The plan of any threshold is in the list."""
    assert fuse(layers, threshold).buckets in {plan.buckets for plan in distinct_plans(layers)}


@given(layer_lists, thresholds)
def test_index_agrees_with_fusion(layers: list[Layer], threshold: int) -> None:
    """A threshold's index is that of the plan it gives."""
    spec = spec_of(1).model_copy(update={"layers": tuple(layers)})
    space = PlanSpace.of(spec)
    assert fuse(layers, space.thresholds[space.index(threshold)]).buckets == fuse(layers, threshold).buckets


@given(layer_lists, thresholds, thresholds, thresholds)
def test_the_space_keeps_to_its_bounds(layers: list[Layer], one: int, two: int, three: int) -> None:
    """Within any bounds the thresholds are those of all plans that there are, once each."""
    low, default, high = sorted((one, two, three))
    bounds = {"minimum_threshold_bytes": low, "default_threshold_bytes": default, "maximum_threshold_bytes": high}
    space = PlanSpace.of(spec_of(1).model_copy(update={"layers": tuple(layers), **bounds}))
    assert low <= space.thresholds[0] <= space.thresholds[-1] <= high
    plans = [fuse(layers, threshold).buckets for threshold in space.thresholds]
    assert plans == list(dict.fromkeys(fuse(layers, threshold).buckets for threshold in range(low, high + 1)))


@given(layer_lists, thresholds)
def test_buckets_are_counted_without_fusing(layers: list[Layer], threshold: int) -> None:
    """A space knows how many buckets any threshold gives."""
    space = PlanSpace.of(spec_of(1).model_copy(update={"layers": tuple(layers)}))
    assert space.buckets(threshold) == len(fuse(layers, threshold).buckets)


def test_the_example_of_the_documentation() -> None:
    """Layers of 4, 4 and 8 bytes have three plans, from 4, 8 and 16 bytes on."""
    plans = list(distinct_plans(spec_of(4, 4, 8).layers))
    assert [plan.threshold_bytes for plan in plans] == [4, 8, 16]
    assert [plan.buckets for plan in plans] == [((0,), (1,), (2,)), ((0, 1), (2,)), ((0, 1, 2),)]


@pytest.mark.parametrize("count", [900, 3000])
def test_large_spaces_are_thinned(count: int) -> None:
    """A model with too many plans or layers keeps some in every octave, the first and the last among them."""
    space = space_of(*(1 + 7919 * index % 100_003 for index in range(count)), default=10**6)
    assert 100 < len(space.thresholds) <= MAX_PLANS
    assert space.buckets(space.thresholds[0]) == count
    assert space.buckets(space.thresholds[-1]) == 1
    assert all(after <= 1.03 * before + 1 for before, after in itertools.pairwise(space.thresholds) if before > 10**5)


def test_the_largest_study_is_enumerated_soon() -> None:
    """The plans of the most layers that a study may have take seconds of one processor, not minutes."""
    start = time.process_time()
    space_of(*(1 + 7919 * index % 4_000_037 for index in range(20_000)))
    assert time.process_time() - start < 10


def test_no_layers() -> None:
    """A model without layers is refused."""
    with pytest.raises(InvalidSpaceError, match="nothing to fuse"):
        fuse([], 1)


def test_no_threshold() -> None:
    """A threshold under one byte is refused."""
    with pytest.raises(InvalidSpaceError, match="at least 1 byte"):
        fuse(spec_of(1).layers, 0)


def test_default_outside_the_bounds() -> None:
    """A default that the bounds exclude is refused, by name (horovod 2468)."""
    with pytest.raises(InvalidSpaceError, match="default_threshold_bytes = 10 must lie between"):
        space_of(1, 2, default=10, maximum_threshold_bytes=9)
