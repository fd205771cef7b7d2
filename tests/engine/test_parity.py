"""Training on the engine gives the numbers of plain PyTorch."""

import pytest
from support.models import MODELS
from support.training import (
    OPTIMIZERS,
    WHOLE_MODEL,
    accumulate,
    ddp_losses,
    frozen_and_thawed,
    in_a_group_of_its_own,
    mixed_dtypes,
    parity,
    start_of,
    switch_often,
    with_a_closure,
)

STEPS = 5
THRESHOLDS = [1, 1500, WHOLE_MODEL]


@pytest.mark.parametrize("threshold_bytes", THRESHOLDS)
@pytest.mark.parametrize("model", MODELS)
def test_equals_a_single_process(ranks, model, threshold_bytes):
    """Two ranks, whatever the model does, end where one process with both batches ends, bit-identical to each other."""
    outcomes = ranks(2).run(parity, model, "AdamW", threshold_bytes, STEPS)
    assert max(outcome.distance for outcome in outcomes) < 1e-12
    assert len({outcome.digest for outcome in outcomes}) == 1


@pytest.mark.parametrize("threshold_bytes", THRESHOLDS)
@pytest.mark.parametrize("model", ["Attention", "Sometimes"])
def test_three_ranks_equal_a_single_process(ranks, model, threshold_bytes):
    """Three ranks exchange around a ring, and agree as well."""
    # Not Adam: the key bias of attention has no gradient but rounding, which Adam would blow up to full size.
    outcomes = ranks(3).run(parity, model, "SGD", threshold_bytes, STEPS)
    assert max(outcome.distance for outcome in outcomes) < 1e-12
    assert len({outcome.digest for outcome in outcomes}) == 1


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_any_optimizer(ranks, optimizer):
    """The wrapped optimizer's own arithmetic is what runs, bucket by bucket."""
    outcomes = ranks(2).run(parity, "Perceptron", optimizer, 1500, STEPS)
    assert max(outcome.distance for outcome in outcomes) < 1e-12


@pytest.mark.parametrize("model", ["Perceptron", "Functional"])
def test_one_rank_is_the_plain_optimizer(ranks, model):
    """At world size 1 the same path gives the plain optimizer's numbers to the last bit."""
    (outcome,) = ranks(1).run(parity, model, "AdamW", 1500, STEPS)
    assert outcome.distance == 0


@pytest.mark.parametrize("world_size", [2, 3])
def test_losses_equal_ddp(ranks, world_size):
    """Step by step the losses are DistributedDataParallel's."""
    expected = ranks(world_size).run(ddp_losses, "Perceptron", "AdamW", STEPS)
    outcomes = ranks(world_size).run(parity, "Perceptron", "AdamW", 1500, STEPS)
    for losses, outcome in zip(expected, outcomes, strict=True):
        assert outcome.losses == pytest.approx(losses, rel=1e-12)


@pytest.mark.parametrize("threshold_bytes", THRESHOLDS)
def test_accumulation(ranks, threshold_bytes):
    """Under no_sync gradients add up locally, and each bucket is reduced once a step."""
    for outcome, reduce_scatters, buckets in ranks(2).run(accumulate, threshold_bytes):
        assert outcome.distance < 1e-12
        assert reduce_scatters == 4 * buckets


def test_a_switch_at_every_step(ranks):
    """Twenty thresholds in twenty steps change no number."""
    outcomes = ranks(2).run(switch_often, 20)
    assert max(outcome.distance for outcome in outcomes) < 1e-12
    assert len({outcome.digest for outcome in outcomes}) == 1


def test_freezing_and_thawing(ranks):
    """A layer may be frozen and thawed while training."""
    assert max(ranks(2).run(frozen_and_thawed)) < 1e-12


def test_a_group_of_ones_own(ranks):
    """Some of the ranks may train together, apart from the others."""
    first, other, last = ranks(3).run(in_a_group_of_its_own)
    assert other is None
    assert max(first, last) < 1e-12


def test_closure(ranks):
    """`step` takes a closure and returns its loss."""
    for distance, loss in ranks(2).run(with_a_closure):
        assert distance < 1e-12
        assert loss > 0


@pytest.mark.parametrize("model", ["Convolutional", "Hoarder"])
def test_replicas_start_equal(ranks, model):
    """Parameters and buffers start as rank 0's, whatever their dtype."""
    (digest, buffers), (other_digest, other_buffers) = ranks(2).run(start_of, model)
    assert digest == other_digest
    assert buffers == other_buffers


def test_mixed_dtypes(ranks):
    """Each dtype has buckets of its own."""
    for distance, dtypes in ranks(2).run(mixed_dtypes):
        assert distance < 1e-6
        assert dtypes == {"torch.float32", "torch.float64"}
