"""What every optimizer keeps to, whichever method it uses."""

from __future__ import annotations

import json
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.landscapes import completed, space_of, transformer, tune

from dear_tune.contract import LONGEST_ITERATION_S, SHORTEST_ITERATION_S, StudyState, TrialState
from dear_tune.fusion import PlanSpace
from dear_tune.tuning.gp import GaussianProcessOptimizer
from dear_tune.tuning.history import Observation, Optimizer
from dear_tune.tuning.summary import summarize

MakeOptimizer = Callable[..., Optimizer]

MIB = 2**20
SIX_LAYERS = (1 * MIB, 2 * MIB, 4 * MIB, 8 * MIB, 2 * MIB, 1 * MIB)


@pytest.fixture(params=[GaussianProcessOptimizer])
def make(request: pytest.FixtureRequest) -> MakeOptimizer:
    """One optimizer after the other."""
    return request.param


def running(threshold_bytes: int) -> Observation:
    """A trial that some worker holds."""
    return Observation(threshold_bytes=threshold_bytes, state=TrialState.RUNNING)


def ask_all(optimizer: Optimizer, history: list[Observation], *, most: int) -> list[Observation]:
    """The trials that workers asking one after the other are given, before any of them reports."""
    asked: list[Observation] = []
    for _ in range(most):
        proposal = optimizer.suggest([*history, *asked])
        if proposal.threshold_bytes is None:
            break
        asked.append(running(proposal.threshold_bytes))
    return asked


def plans(space: PlanSpace, history: list[Observation]) -> list[int]:
    """The plan of each trial."""
    return [space.index(observation.threshold_bytes) for observation in history]


def valley(threshold_bytes: int) -> tuple[float, ...]:
    """Twenty times around 100 ms, fastest at 4 MiB."""
    octaves = abs(np.log2(threshold_bytes) - np.log2(4 * MIB))
    return tuple((0.1 * (1 + 0.03 * octaves)) * (1 + 0.001 * (index % 5)) for index in range(20))


def test_trial_0_is_the_default(make: MakeOptimizer) -> None:
    """The first trial measures the default threshold itself, not another one of its plan."""
    space = space_of(*SIX_LAYERS, default=3 * MIB + 17)
    assert make(space, seed=0, max_trials=10).suggest([]).threshold_bytes == 3 * MIB + 17


def test_proposals_stay_within_the_bounds(make: MakeOptimizer) -> None:
    """No threshold outside the study's bounds is ever proposed."""
    space = space_of(*SIX_LAYERS, default=4 * MIB, minimum_threshold_bytes=2 * MIB, maximum_threshold_bytes=9 * MIB)
    history = tune(make(space, seed=0, max_trials=30), valley)
    assert all(2 * MIB <= observation.threshold_bytes <= 9 * MIB for observation in history)


def test_same_seed_and_history_give_the_same_trials(make: MakeOptimizer) -> None:
    """Two optimizers with one seed run through the same study."""
    space = transformer(5e-4, 1e-9).space
    first, second = (tune(make(space, seed=7, max_trials=15), valley) for _ in range(2))
    assert first == second


def test_another_seed_gives_another_spread(make: MakeOptimizer) -> None:
    """The seed decides which thresholds the warm-up measures."""
    space = transformer(5e-4, 1e-9).space
    spreads = {tuple(plans(space, ask_all(make(space, seed=seed, max_trials=30), [], most=5))) for seed in range(5)}
    assert len(spreads) == 5


def test_suggest_changes_no_state(make: MakeOptimizer) -> None:
    """Asking for other histories in between changes no answer."""
    space = transformer(5e-4, 1e-9).space
    optimizer = make(space, seed=3, max_trials=20)
    history = tune(optimizer, valley)
    backwards = [optimizer.suggest(history[:count]) for count in reversed(range(len(history)))]
    assert [proposal.threshold_bytes for proposal in reversed(backwards)] == [
        observation.threshold_bytes for observation in history
    ]


def test_restart_in_the_middle_changes_nothing(make: MakeOptimizer) -> None:
    """A new optimizer, given the history as the database keeps it, goes on as the old one would have."""
    space = transformer(5e-4, 1e-9).space
    optimizer = make(space, seed=3, max_trials=20)
    history = tune(optimizer, valley)[:7]
    stored = json.loads(json.dumps([[each.threshold_bytes, each.state, each.iteration_times_s] for each in history]))
    reread = [
        Observation(threshold_bytes=threshold, state=TrialState(state), iteration_times_s=tuple(times))
        for threshold, state, times in stored
    ]
    assert make(space, seed=3, max_trials=20).suggest(reread) == optimizer.suggest(history)


def test_20_asks_before_any_result_give_20_plans(make: MakeOptimizer) -> None:
    """Workers that ask before anything is measured get different plans (optuna 1547)."""
    space = transformer(5e-4, 1e-9).space
    asked = ask_all(make(space, seed=0, max_trials=30), [], most=20)
    assert len(set(plans(space, asked))) == 20


def test_20_asks_give_as_many_plans_as_there_are(make: MakeOptimizer) -> None:
    """When the plans run out before the workers, each plan is handed out once."""
    space = space_of(1, 1, 1, default=3)
    asked = ask_all(make(space, seed=0, max_trials=30), [], most=20)
    assert sorted(plans(space, asked)) == list(range(len(space.thresholds)))


def test_asks_during_exploration_give_different_plans(make: MakeOptimizer) -> None:
    """Workers that ask while others measure get plans that nobody has or had."""
    space = transformer(5e-4, 1e-9).space
    optimizer = make(space, seed=0, max_trials=40)
    history = tune(optimizer, valley)[:5]
    asked = ask_all(optimizer, history, most=8)
    assert len(set(plans(space, history + asked))) == len(history + asked)


def test_nothing_left_while_others_run(make: MakeOptimizer) -> None:
    """A worker for whom no plan is left learns that others still run; the study does not converge over it."""
    space = space_of(1, 1, default=2)
    proposal = make(space, seed=0, max_trials=30).suggest([running(2), running(1)])
    assert proposal.threshold_bytes is None
    assert proposal.state is StudyState.WARMING_UP
    assert "waiting for 2 trials" in proposal.reason


def test_failed_trials_forbid_their_plan(make: MakeOptimizer) -> None:
    """A plan whose trial failed is not proposed again."""
    space = space_of(*SIX_LAYERS, default=25 * MIB)
    failed = Observation(threshold_bytes=2 * MIB, state=TrialState.FAILED)
    history = tune(make(space, seed=0, max_trials=30), valley, start=[failed])
    assert plans(space, history).count(space.index(2 * MIB)) == 1


def test_pruned_trials_are_not_repeated(make: MakeOptimizer) -> None:
    """A plan whose trial was cut short is known to be slow, and not proposed again."""
    space = space_of(*SIX_LAYERS, default=25 * MIB)
    pruned = Observation(threshold_bytes=2 * MIB, state=TrialState.PRUNED, iteration_times_s=(0.9, 0.9, 0.9))
    history = tune(make(space, seed=0, max_trials=30), valley, start=[pruned])
    assert plans(space, history).count(space.index(2 * MIB)) == 1


def test_queued_trials_hold_their_plan(make: MakeOptimizer) -> None:
    """A threshold that a person queued is not proposed beside it."""
    space = space_of(1, 1, default=2)
    queued = Observation(threshold_bytes=2, state=TrialState.QUEUED)
    assert make(space, seed=0, max_trials=30).suggest([queued]).threshold_bytes == 1


def test_stale_trials_free_their_plan(make: MakeOptimizer) -> None:
    """A plan whose worker fell silent is proposed again."""
    space = space_of(*SIX_LAYERS, default=25 * MIB)
    stale = Observation(threshold_bytes=25 * MIB, state=TrialState.STALE, iteration_times_s=(0.1,))
    assert make(space, seed=0, max_trials=30).suggest([stale]).threshold_bytes == 25 * MIB


def test_every_trial_failing_ends_the_study(make: MakeOptimizer) -> None:
    """After three failures and no success the study stops and says so (deepspeed 3475)."""
    space = space_of(*SIX_LAYERS, default=25 * MIB)
    failed = [Observation(threshold_bytes=size * MIB, state=TrialState.FAILED) for size in (25, 1, 4)]
    proposal = make(space, seed=0, max_trials=30).suggest(failed)
    assert proposal.state is StudyState.CONVERGED
    assert "all 3 trials failed" in proposal.reason


def test_one_plan_only(make: MakeOptimizer) -> None:
    """A model of one layer has nothing to search: the default is measured, and that is all."""
    space = space_of(1000, default=25 * MIB)
    assert [each.threshold_bytes for each in tune(make(space, seed=0, max_trials=30), valley)] == [25 * MIB]


def test_two_plans(make: MakeOptimizer) -> None:
    """With two plans both are measured, and confirmed if the other one wins."""
    space = space_of(MIB, MIB, default=2 * MIB)
    history = tune(make(space, seed=0, max_trials=30), lambda size: [0.1 if size < 2 * MIB else 0.2] * 20)
    assert plans(space, history) == [1, 0, 1, 0]


def test_1000_plans(make: MakeOptimizer) -> None:
    """A large space is searched as a small one is: in far fewer trials than it has plans."""
    space = space_of(*(1 + 37 * index % 1009 for index in range(1000)), default=10_000)
    assert len(space.thresholds) > 300
    history = tune(make(space, seed=0, max_trials=30), lambda size: [0.1 + 0.001 * abs(np.log2(size / 5000))] * 20)
    assert len(history) <= 30


@pytest.mark.parametrize("max_trials", [1, 2, 3, 4, 6, 20])
def test_max_trials_is_never_exceeded(make: MakeOptimizer, max_trials: int) -> None:
    """Also with eight workers, the trials are at most as many as the study may have (optuna 3518)."""
    space = transformer(5e-4, 1e-9).space
    optimizer = make(space, seed=0, max_trials=max_trials)
    history: list[Observation] = []
    while asked := ask_all(optimizer, history, most=8):
        history += [completed(each.threshold_bytes, *valley(each.threshold_bytes)) for each in asked]
    assert len(history) <= max_trials


def test_constant_times_end_the_study(make: MakeOptimizer) -> None:
    """A perfectly flat objective ends after a few trials."""
    space = transformer(5e-4, 1e-9).space
    assert len(tune(make(space, seed=0, max_trials=30), lambda _: [0.1] * 20)) <= 8


@settings(max_examples=20, deadline=None)
@given(
    trials_s=st.lists(
        st.lists(st.floats(SHORTEST_ITERATION_S, LONGEST_ITERATION_S), min_size=1, max_size=4), min_size=1, max_size=12
    ),
    sizes=st.lists(st.integers(1, 18 * MIB), min_size=12, max_size=12),
    states=st.lists(st.sampled_from(TrialState), min_size=1, max_size=12),
)
def test_any_history_gives_an_answer(trials_s: list[list[float]], sizes: list[int], states: list[TrialState]) -> None:
    """Whatever the trials' states and times, the proposal is a free plan or a reason to have none."""
    space = space_of(*SIX_LAYERS, default=4 * MIB)
    history = [
        Observation(threshold_bytes=size, state=state, iteration_times_s=tuple(times_s))
        for size, times_s, state in zip(sizes, trials_s, states, strict=False)
    ]
    proposal = GaussianProcessOptimizer(space, seed=0, max_trials=30).suggest(history)
    assert proposal.reason
    assert summarize(space, history).reason
    assert proposal.threshold_bytes is None or 1 <= proposal.threshold_bytes <= 18 * MIB
