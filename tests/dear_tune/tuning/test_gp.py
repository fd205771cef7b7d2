"""What is particular to the Gaussian process: phases, reasons, and the confirmation."""

from __future__ import annotations

import numpy as np
import pytest
from support.landscapes import completed, space_of, transformer, tune

from dear_tune.contract import StudyState, TrialState
from dear_tune.tuning.gp import GaussianProcessOptimizer
from dear_tune.tuning.history import Observation
from dear_tune.tuning.surrogate import Surrogate
from dear_tune.tuning.warmup import spread

MIB = 2**20
SPACE = transformer(5e-4, 1e-9).space
DEFAULT = SPACE.default_threshold_bytes


def valley(threshold_bytes: int) -> list[float]:
    """Constant times, fastest at 2 MiB."""
    return [0.1 * (1 + 0.05 * abs(np.log2(threshold_bytes / (2 * MIB))))] * 20


def optimizer(max_trials: int = 30) -> GaussianProcessOptimizer:
    """One of any seed."""
    return GaussianProcessOptimizer(SPACE, seed=1, max_trials=max_trials)


def test_warm_up_counts_down() -> None:
    """While the warm-up lasts, the state and the reason say how much of it is left."""
    proposal = optimizer().suggest([completed(DEFAULT, 0.1), completed(1, 0.2)])
    assert proposal.state is StudyState.WARMING_UP
    assert proposal.reason == "3 of 5 warm-up trials to go"


def test_exploration_names_its_hope() -> None:
    """A trial's reason is the improvement expected of it, and where."""
    history = tune(optimizer(), valley)[:5]
    proposal = optimizer().suggest(history)
    assert proposal.state is StudyState.EXPLORING
    assert proposal.reason.startswith("expected improvement ")


def test_the_end_names_its_reason() -> None:
    """A converged study says why nothing is worth another trial."""
    proposal = optimizer().suggest(tune(optimizer(), valley))
    assert proposal.state is StudyState.CONVERGED
    assert proposal.reason == "no untried plan promises more than 0.5 %"


def test_default_and_winner_are_measured_again() -> None:
    """Before a study converges, its default and its winner have two trials each (byteps 339, 241)."""
    thresholds = [observation.threshold_bytes for observation in tune(optimizer(), valley)]
    winner = min(thresholds, key=lambda size: valley(size)[0])
    assert thresholds.count(DEFAULT) == 2
    assert thresholds.count(winner) == 2


def test_a_doubtful_winner_is_measured_four_times() -> None:
    """Default and winner are measured in turn, up to four times each, while it is open which one is faster."""
    winner = SPACE.thresholds[SPACE.index(2 * MIB)]
    times_s = {size: [0.2] * 20 for size in SPACE.thresholds} | {winner: [0.0985] * 20, DEFAULT: [0.1] * 20}
    others = [size for size in SPACE.thresholds if SPACE.index(size) not in {SPACE.index(DEFAULT), SPACE.index(winner)}]
    start = [completed(size, *times_s[size]) for size in (DEFAULT, winner, *others)]
    history = tune(optimizer(max_trials=200), lambda size: times_s[size], start=start)
    assert [each.threshold_bytes for each in history[len(start) :]] == [DEFAULT, winner] * 3


def test_a_winning_default_needs_no_confirmation() -> None:
    """When the default wins, nothing is measured twice."""
    thresholds = [
        each.threshold_bytes for each in tune(optimizer(), lambda size: [0.1 if size >= 20 * MIB else 0.2] * 9)
    ]
    assert len(set(thresholds)) == len(thresholds)


def test_the_confirmation_fits_into_the_budget() -> None:
    """The last two of six trials confirm, although exploring would still pay."""
    thresholds = [each.threshold_bytes for each in tune(optimizer(max_trials=6), valley)]
    assert len(thresholds) == 6
    assert thresholds[4] == DEFAULT
    assert thresholds[5] in thresholds[:4]


def test_two_workers_share_the_confirmation() -> None:
    """While one worker measures the default again, the next one gets the winner, and the third waits."""
    history = tune(optimizer(max_trials=6), valley)[:4]
    asked = []
    for _ in range(3):
        asked.append(optimizer(max_trials=6).suggest(history).threshold_bytes)
        history += [Observation(threshold_bytes=size, state=TrialState.RUNNING) for size in asked[-1:] if size]
    assert asked[0] == DEFAULT
    assert asked[1] not in {None, DEFAULT}
    assert asked[2] is None


def test_the_rest_of_the_budget_is_named() -> None:
    """A study that keeps its last trials for the confirmation says so, and not that they are used up."""
    history = tune(optimizer(max_trials=6), valley)
    reasons = [optimizer(max_trials=6).suggest(history[:count]).reason for count in (4, 6)]
    assert reasons[0] == "confirming the default: 4 of 6 trials are used, the rest is kept to confirm a winner"
    assert reasons[1] == "the 6 trials of the budget are used up"


def test_a_plan_that_silences_workers_is_left_alone() -> None:
    """A plan whose workers fell silent twice is not proposed a third time."""
    start = [completed(DEFAULT, *valley(DEFAULT))]
    plan = optimizer().suggest(start).threshold_bytes
    assert plan is not None
    stale = Observation(threshold_bytes=plan, state=TrialState.STALE)
    assert optimizer().suggest([*start, stale]).threshold_bytes == plan
    assert optimizer().suggest([*start, stale, stale]).threshold_bytes not in {None, plan}


def test_the_default_is_tried_again_and_again() -> None:
    """However many workers fell silent over the default, the next one measures it: jobs die at their start."""
    stale = Observation(threshold_bytes=DEFAULT, state=TrialState.STALE)
    assert optimizer().suggest([stale] * 5).threshold_bytes == DEFAULT


def test_a_failed_default_gets_a_second_chance() -> None:
    """A default whose first trial failed is measured before the study ends: without it nothing can be compared."""
    failed = Observation(threshold_bytes=DEFAULT, state=TrialState.FAILED)
    history = tune(optimizer(), valley, start=[failed])
    assert DEFAULT in [each.threshold_bytes for each in history if each.state is TrialState.COMPLETED]


def test_a_winner_that_fails_is_replaced() -> None:
    """When the winner's second trial fails, the study ends with another winner."""
    history = tune(optimizer(), valley)
    winner = min((each.threshold_bytes for each in history), key=lambda size: valley(size)[0])
    failed = Observation(threshold_bytes=winner, state=TrialState.FAILED)
    start = [each for each in history[:-1] if each.threshold_bytes != DEFAULT or each is history[0]] + [failed]
    again = tune(optimizer(), valley, start=start)
    assert [each.threshold_bytes for each in again].count(winner) == 2
    assert again[-1].threshold_bytes != winner


def test_the_spread_lists_every_plan_once() -> None:
    """The warm-up's order begins with the default and leaves no plan out."""
    order = list(spread(SPACE, seed=5))
    assert order[0] == SPACE.index(DEFAULT)
    assert sorted(order) == list(range(len(SPACE.thresholds)))


@pytest.mark.parametrize("seed", range(5))
def test_the_spread_is_even(seed: int) -> None:
    """Four points of the spread leave no gap of half the octaves between them."""
    octaves = np.log2(SPACE.thresholds)
    points = sorted(octaves[plan] for plan in list(spread(SPACE, seed=seed))[1:5])
    assert max(np.diff(points)) < 0.55 * (octaves[-1] - octaves[0])


def test_pending_plans_push_others_away() -> None:
    """A plan next to one that is being measured promises less than it would alone."""
    space = space_of(*[MIB] * 64, default=8 * MIB)
    times = {space.index(size * MIB): (tuple(valley(size * MIB)),) for size in (1, 8, 64)}
    alone = Surrogate(space, times).expected_improvement([space.index(3 * MIB)])
    beside = Surrogate(space, times, pending=[space.index(2 * MIB)]).expected_improvement([space.index(3 * MIB)])
    assert beside < alone
