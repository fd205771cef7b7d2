from __future__ import annotations

import pytest
from support.landscapes import completed, space_of

from dear_tune.contract import TrialState
from dear_tune.tuning.history import Observation
from dear_tune.tuning.summary import summarize

SPACE = space_of(1, 1, 1, 1, default=4)  # plans at 1, 2, 3 and 4 bytes


def test_nothing_measured() -> None:
    """A study without a completed trial recommends the default and knows no incumbent."""
    summary = summarize(SPACE, [Observation(threshold_bytes=4, state=TrialState.RUNNING, iteration_times_s=(0.1,))])
    assert summary.threshold_bytes == 4
    assert summary.incumbent is None
    assert "no trial is completed" in summary.reason


def test_only_failures() -> None:
    """A study whose trials all failed says so, and recommends the default (deepspeed 3475)."""
    summary = summarize(SPACE, [Observation(threshold_bytes=size, state=TrialState.FAILED) for size in (4, 2, 1)])
    assert summary.threshold_bytes == 4
    assert "all 3 trials failed" in summary.reason


def test_a_clear_winner_is_recommended() -> None:
    """A plan that is faster beyond doubt, also when measured again, is the incumbent and the recommendation."""
    summary = summarize(SPACE, [completed(4, *[0.1] * 20), completed(2, *[0.08] * 20)] * 2)
    assert (summary.incumbent_index, summary.threshold_bytes) == (1, 2)
    assert summary.gain is not None
    assert summary.gain.fraction == pytest.approx(0.2)
    assert summary.reason == "the incumbent: of the default's iteration time it saves 20.0 % (17.5 % to 22.4 %)"


def test_an_unconfirmed_winner_is_not_recommended() -> None:
    """However fast a plan was once, jobs keep the default until it has been as fast again."""
    summary = summarize(SPACE, [completed(4, *[0.1] * 20), completed(2, *[0.05] * 20), completed(4, *[0.1] * 20)])
    assert (summary.incumbent_index, summary.threshold_bytes) == (1, 4)
    assert summary.reason == "the default: the incumbent's gain of 50.0 % is not confirmed by second trials"


def test_only_later_trials_prove_a_gain() -> None:
    """The trial by which a winner was found does not count: its luck would decide."""
    found = [completed(4, *[0.12] * 20), completed(2, *[0.06] * 20)]
    summary = summarize(SPACE, [*found, completed(4, *[0.1] * 20), completed(2, *[0.1] * 20)])
    assert summary.gain is not None
    assert (summary.gain.fraction, summary.threshold_bytes) == (0, 4)


def test_a_proven_winner_stays_until_another_is_proven() -> None:
    """A plan that looks even faster does not take the recommendation back to the default."""
    proven = [completed(4, *[0.1] * 20), completed(2, *[0.08] * 20)] * 2
    summary = summarize(SPACE, [*proven, completed(1, *[0.05] * 20)])
    assert (summary.incumbent_index, summary.threshold_bytes) == (1, 2)
    both = summarize(SPACE, [*proven, *[completed(1, *[0.05] * 20)] * 2])
    assert (both.incumbent_index, both.threshold_bytes) == (4, 1)


def test_a_doubtful_winner_is_not_recommended() -> None:
    """A plan faster by less than the noise is the incumbent, but jobs keep the default (byteps 339, 241)."""
    summary = summarize(SPACE, [completed(4, 0.10, 0.12, 0.11), completed(2, 0.09, 0.12, 0.10)] * 2)
    assert (summary.incumbent_index, summary.threshold_bytes) == (1, 4)
    assert "within the noise" in summary.reason


def test_the_default_may_win() -> None:
    """When no plan is faster, the default is the incumbent, with a gain of exactly zero."""
    summary = summarize(SPACE, [completed(4, *[0.1] * 20), completed(2, *[0.2] * 20)])
    assert (summary.incumbent_index, summary.threshold_bytes) == (0, 4)
    assert summary.gain is not None
    assert (summary.gain.low, summary.gain.fraction, summary.gain.high) == (0, 0, 0)


def test_without_a_default_nothing_is_recommended() -> None:
    """As long as the default is not measured, no plan is said to be faster."""
    summary = summarize(SPACE, [completed(2, *[0.1] * 20)])
    assert summary.gain is None
    assert summary.threshold_bytes == 4


def test_trials_of_one_plan_are_pooled() -> None:
    """Thresholds that fuse alike share their measurements, and the first trial stands for them."""
    space = space_of(10, 10, 10, default=30)
    default = completed(30, *[0.2] * 5)
    summary = summarize(space, [default, completed(12, *[0.1] * 5), completed(17, *[0.1] * 5), default])
    assert summary.incumbent is not None
    assert summary.incumbent.iterations == 10
    assert (summary.incumbent_index, summary.threshold_bytes) == (1, 12)


def test_one_lucky_iteration_does_not_win() -> None:
    """A plan measured once loses to one measured well, though its median is lower."""
    summary = summarize(SPACE, [completed(4, *[0.2] * 20), completed(2, *[0.1] * 20), completed(1, 0.099)])
    assert summary.incumbent_index == 1


def test_a_plan_that_failed_is_no_incumbent() -> None:
    """A plan that is fast but once brought a job down is not recommended."""
    failed = Observation(threshold_bytes=2, state=TrialState.FAILED)
    summary = summarize(SPACE, [completed(4, *[0.1] * 20), completed(2, *[0.05] * 20), failed])
    assert (summary.incumbent_index, summary.threshold_bytes) == (0, 4)


def test_pruned_trials_are_no_incumbent() -> None:
    """A trial cut short does not become the best plan."""
    pruned = Observation(threshold_bytes=2, state=TrialState.PRUNED, iteration_times_s=(0.01,) * 20)
    assert summarize(SPACE, [completed(4, *[0.1] * 20), pruned]).incumbent_index == 0
