from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dear_tune.contract import LONGEST_ITERATION_S, SHORTEST_ITERATION_S, Estimate
from dear_tune.tuning.noise import estimate, gain

times = st.lists(st.floats(SHORTEST_ITERATION_S, LONGEST_ITERATION_S), min_size=1, max_size=50)


def test_the_median_is_the_middle() -> None:
    """One straggler does not move the estimate."""
    assert estimate([0.1, 0.2, 0.3, 0.2, 60.0]).median_s == 0.2


@given(times)
def test_the_interval_holds_the_median(values: list[float]) -> None:
    """Low, median and high are finite, positive and in this order for any times."""
    found = estimate(values)
    assert 0 < found.low_s < found.median_s < found.high_s < float("inf")


@given(st.lists(times, min_size=1, max_size=4), st.lists(times, min_size=1, max_size=4))
def test_gain_is_finite(default: list[list[float]], incumbent: list[list[float]]) -> None:
    """Low, gain and high are finite and in this order for any times that the contract admits."""
    found = gain(estimate(*default), estimate(*incumbent))
    assert -float("inf") < found.low < found.fraction < found.high < 1 or found.high == 1


@given(times, st.floats(0.01, 100))
def test_the_unit_does_not_matter(values: list[float], factor: float) -> None:
    """Times in another unit give the same estimate in that unit."""
    scaled = estimate([factor * value for value in values])
    assert scaled.high_s == pytest.approx(factor * estimate(values).high_s, rel=1e-6)


@pytest.mark.parametrize(("count", "widest"), [(1, 2.0), (2, 0.5), (3, 0.2), (20, 0.06), (200, 0.05)])
def test_more_iterations_tell_more(count: int, widest: float) -> None:
    """The interval of equal times is wide for one, and narrows towards the 4 % that one trial cannot undercut."""
    found = estimate([1.0] * count)
    assert widest / 2 < found.high_s - found.low_s < widest


def test_more_trials_tell_more_than_iterations() -> None:
    """Four trials of 50 iterations are twice as sure as one trial of many more."""
    one, four = estimate([1.0] * 10_000), estimate(*[[1.0] * 50] * 4)
    assert four.high_s - four.low_s == pytest.approx((one.high_s - one.low_s) / 2, rel=0.15)


def test_a_tenth_of_stragglers_changes_little() -> None:
    """Iterations ten times as long, one in ten, widen the interval by less than half."""
    quiet = np.exp(np.random.default_rng(0).normal(0, 0.05, 100))
    stormy = np.where(np.arange(100) % 10 == 0, 10 * quiet, quiet)
    width = [found.high_s - found.low_s for found in (estimate(list(quiet)), estimate(list(stormy)))]
    assert width[1] < 1.5 * width[0]


@pytest.mark.parametrize(
    ("spread", "count", "least"), [(0.05, 5, 0.93), (0.05, 20, 0.93), (0.05, 50, 0.93), (0.2, 5, 0.81), (0.2, 20, 0.9)]
)
def test_the_interval_covers_the_plans_true_median(spread: float, count: int, least: float) -> None:
    """Of 1,000 simulated trials, 1 % between them, as many have the true median in their interval as noise.py says."""
    rng = np.random.default_rng(count)
    found = [estimate(np.exp(rng.normal(0, 0.01) + rng.normal(0, spread, count)).tolist()) for _ in range(1000)]
    assert np.mean([each.low_s <= 1 <= each.high_s for each in found]) >= least


def test_gain_is_the_share_saved() -> None:
    """From 100 ms to 80 ms is a gain of 20 %, with an interval around it."""
    found = gain(estimate([0.1] * 20), estimate([0.08] * 20))
    assert found.fraction == pytest.approx(0.2)
    assert 0.16 < found.low < 0.2 < found.high < 0.24


def test_gain_of_a_slower_plan_is_negative() -> None:
    """A plan that takes longer than the default has a gain below zero."""
    assert gain(estimate([0.1] * 20), estimate([0.2] * 20)).fraction == pytest.approx(-1.0)


def test_gain_adds_the_uncertainties_in_quadrature() -> None:
    """Two intervals of a factor e^0.03 and e^0.04 make one of e^0.05."""
    default = Estimate(median_s=1.0, low_s=np.exp(-0.03), high_s=np.exp(0.03), iterations=20)
    incumbent = Estimate(median_s=1.0, low_s=np.exp(-0.04), high_s=np.exp(0.04), iterations=20)
    found = gain(default, incumbent)
    assert (found.low, found.high) == (pytest.approx(1 - np.exp(0.05)), pytest.approx(1 - np.exp(-0.05)))
