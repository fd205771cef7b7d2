"""Whoever looks at the model sees the latest update; training is not slowed down by those who do not look."""

import pytest
from support.reads import buckets_applied_by_first_layer, pending_after_zero_grad, wrapped_state


@pytest.mark.parametrize("set_to_none", [True, False])
def test_zero_grad_reads_nothing(ranks, set_to_none):
    """`model.zero_grad()` does not wait for pending updates."""
    for before, after in ranks(2).run(pending_after_zero_grad, set_to_none):
        assert before == after > 0


def test_updates_are_just_in_time(ranks):
    """Running the first layer applies the first bucket only."""
    for buckets, pending in ranks(2).run(buckets_applied_by_first_layer):
        assert pending == buckets - 1


def test_the_wrapped_optimizer_saves_the_latest_state(ranks):
    """A state dict from the wrapped optimizer holds the pending update too."""
    for entries, parameters in ranks(2).run(wrapped_state):
        assert entries == parameters
