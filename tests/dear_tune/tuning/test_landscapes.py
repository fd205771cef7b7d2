"""The tuner on simulated clusters, with the noise of real ones."""

from __future__ import annotations

import numpy as np
import pytest
from landscapes import Landscape, transformer, tune

from dear_tune.tuning.gp import GaussianProcessOptimizer
from dear_tune.tuning.summary import Summary, summarize

ETHERNET = (2e-3, 1e-9)  # the all-reduce's start-up time in seconds, and its seconds a byte
SLOW_LINK = (5e-4, 8e-9)
WIDE_AREA = (2e-2, 8e-9)

SEEDS = range(6)


def run(landscape: Landscape, seed: int) -> Summary:
    """Tune with one worker to the end."""
    rng = np.random.default_rng(seed)
    optimizer = GaussianProcessOptimizer(landscape.space, seed=seed, max_trials=30)
    history = tune(optimizer, lambda threshold_bytes: landscape.measure(threshold_bytes, rng))
    return summarize(landscape.space, history)


@pytest.mark.parametrize("network", [ETHERNET, SLOW_LINK, WIDE_AREA])
def test_never_slower_than_the_default(network: tuple[float, float]) -> None:
    """No recommendation is more than half a percent slower than the default."""
    landscape = transformer(*network)
    default = landscape.slowdown(landscape.space.default_threshold_bytes)
    for seed in SEEDS:
        assert landscape.slowdown(run(landscape, seed).threshold_bytes) <= default + 0.005


@pytest.mark.parametrize("network", [ETHERNET, SLOW_LINK, WIDE_AREA])
def test_close_to_the_best_plan(network: tuple[float, float]) -> None:
    """In all of the runs the recommendation is at most 5 % slower than the best of all plans."""
    landscape = transformer(*network)
    assert max(landscape.slowdown(run(landscape, seed).threshold_bytes) for seed in SEEDS) <= 0.05


def test_flat_landscape_keeps_the_default() -> None:
    """Where fusion changes nothing, the study ends soon, and no seed's luck replaces the default (bagua 311)."""
    space = transformer(*ETHERNET).space
    flat = Landscape(space=space, times_s=(0.1,) * len(space.plans))
    for seed in SEEDS:
        assert run(flat, seed).threshold_bytes == space.default_threshold_bytes
