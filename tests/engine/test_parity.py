"""Training on the engine gives the numbers of plain PyTorch."""

import pytest
from support.training import ddp_losses, in_a_group_of_its_own, parity

STEPS = 5


@pytest.mark.parametrize("world_size", [2, 3])
def test_losses_equal_ddp(ranks, world_size):
    """Step by step the losses are DistributedDataParallel's."""
    expected = ranks(world_size).run(ddp_losses, "Perceptron", "AdamW", STEPS)
    outcomes = ranks(world_size).run(parity, "Perceptron", "AdamW", 1500, STEPS)
    for losses, outcome in zip(expected, outcomes, strict=True):
        assert outcome.losses == pytest.approx(losses, rel=1e-12)


def test_a_group_of_ones_own(ranks):
    """Some of the ranks may train together, apart from the others."""
    first, other, last = ranks(3).run(in_a_group_of_its_own)
    assert other is None
    assert max(first, last) < 1e-12
