"""Whoever looks at the model sees the latest update; training is not slowed down by those who do not look."""

import pytest
from support.reads import (
    READS,
    buckets_applied_by_first_layer,
    inference_under_autocast,
    load_while_pending,
    no_grad_forward,
    pending_after_zero_grad,
    read_distance,
    read_in_threads,
    wrapped_state,
)
from support.training import scheduled, two_engines


@pytest.mark.parametrize("kind", READS)
def test_a_pending_update_is_seen(ranks, kind):
    """Every way to read the parameters shows them updated, and copies know no engine."""
    for distance, plain in ranks(2).run(read_distance, kind):
        assert distance < 1e-12
        assert plain


def test_no_grad_forward(ranks):
    """A no-grad forward computes with the updated parameters."""
    assert max(ranks(2).run(no_grad_forward)) < 1e-12


def test_modes_of_the_first_reader(ranks):
    """An update that happens under inference mode and autocast is the same, and training can go on."""
    assert max(ranks(2).run(inference_under_autocast)) < 1e-12


@pytest.mark.parametrize("set_to_none", [True, False])
def test_zero_grad_reads_nothing(ranks, set_to_none):
    """`model.zero_grad()` does not wait for pending updates."""
    for before, after in ranks(2).run(pending_after_zero_grad, set_to_none):
        assert before == after > 0


def test_updates_are_just_in_time(ranks):
    """Running the first layer applies the first bucket only."""
    for buckets, pending in ranks(2).run(buckets_applied_by_first_layer):
        assert pending == buckets - 1


def test_restored_weights_stay(ranks):
    """Weights that are loaded while an update is pending are not touched by it."""
    assert max(ranks(2).run(load_while_pending)) == 0


def test_two_engines_on_one_model(ranks):
    """Two optimizers may share a model, each with parameters of its own."""
    assert max(ranks(2).run(two_engines)) < 1e-12


def test_the_rate_in_force_at_step(ranks):
    """A scheduler that moves the rate right after step() does not reach the pending update, nor warns."""
    assert max(ranks(2).run(scheduled, 6)) < 1e-12


def test_readers_in_threads(ranks):
    """Threads that read at the same moment see one update, applied once."""
    assert max(ranks(2).run(read_in_threads)) < 1e-12


def test_the_wrapped_optimizer_saves_the_latest_state(ranks):
    """A state dict from the wrapped optimizer holds the pending update too."""
    for entries, parameters in ranks(2).run(wrapped_state):
        assert entries == parameters
