"""A study's trials, pooled by plan: thresholds that fuse alike are one candidate and share their data."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dear_tune.contract import Estimate, TrialState
from dear_tune.tuning.noise import estimate, gain

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from dear_tune.fusion import PlanSpace
    from dear_tune.tuning.history import Observation

__all__ = ["Pool", "TimesOfTrials"]

TimesOfTrials = tuple[tuple[float, ...], ...]
"""Iteration times in seconds, trial by trial."""

_HOLDING = frozenset({TrialState.QUEUED, TrialState.RUNNING})
_MEASURED = frozenset({TrialState.COMPLETED, TrialState.PRUNED})
_SILENCES_TOLERATED = 1


@dataclass(frozen=True, kw_only=True)
class Pool:
    """What the trials say about each plan, by its index in the space.

    Attributes:
        default: the default threshold's plan.
        times_s: the iteration times of all completed and pruned trials of a plan; never empty.
        completed: the iteration times of a plan's completed trials, estimated.
        confirmed: the same without the plan's first trial, by which it may have been picked.
        trials: how many trials of a plan were completed.
        held: the plans that some worker measures, or will.
        failures: how many trials of a plan failed.
        silent: the plans, but for the default, whose workers fell silent again and again.
    """

    default: int
    times_s: Mapping[int, TimesOfTrials]
    completed: Mapping[int, Estimate]
    confirmed: Mapping[int, Estimate]
    trials: Mapping[int, int]
    held: frozenset[int]
    failures: Mapping[int, int]
    silent: frozenset[int]

    @classmethod
    def of(cls, space: PlanSpace, history: Sequence[Observation]) -> Pool:
        """Pool the trials so far. One that is stale leaves no trace: its plan is free again."""
        plans = [(space.index(observation.threshold_bytes), observation) for observation in history]
        default = space.index(space.default_threshold_bytes)
        completed = _times(plans, frozenset({TrialState.COMPLETED}))
        stale = _count(plans, TrialState.STALE)
        return cls(
            default=default,
            times_s=_times(plans, _MEASURED),
            completed={plan: estimate(*trials_s) for plan, trials_s in completed.items()},
            confirmed={plan: estimate(*trials_s[1:]) for plan, trials_s in completed.items() if trials_s[1:]},
            trials=_count(plans, TrialState.COMPLETED),
            held=frozenset(plan for plan, observation in plans if observation.state in _HOLDING),
            failures=_count(plans, TrialState.FAILED),
            silent=frozenset(plan for plan in stale if stale[plan] > _SILENCES_TOLERATED and plan != default),
        )

    @property
    def taken(self) -> frozenset[int]:
        """The plans that exploration does not propose: measured, held, failed or silent."""
        return self.held.union(self.times_s, self.trials, self.failures, self.silent)

    @property
    def best(self) -> int | None:
        """The fastest of the plans completed."""
        return self.fastest(self.completed)

    @property
    def proven(self) -> frozenset[int]:
        """The plans that are faster than the default by the trials made after either's first.

        A plan's first trial says nothing here: among equal plans it is the luckiest one that looks best.
        """
        default = self.confirmed.get(self.default)
        if default is None:
            return frozenset()
        sound = self.confirmed.keys() - self.failures.keys() - {self.default}
        return frozenset(plan for plan in sound if gain(default, self.confirmed[plan]).low > 0)

    def fastest(self, plans: Iterable[int]) -> int | None:
        """Of plans completed, the one whose iteration time's upper bound is lowest.

        The bound, not the median: of many noisy medians the lowest is lucky more often than fast, and a plan that was
        measured twice deserves more trust than one measured once. Plans that ever failed are out, but for the default.
        """
        sound = (plan for plan in plans if plan not in self.failures or plan == self.default)
        return min(sound, key=lambda plan: self.completed[plan].high_s, default=None)


def _times(plans: Sequence[tuple[int, Observation]], states: frozenset[TrialState]) -> dict[int, TimesOfTrials]:
    pooled: defaultdict[int, TimesOfTrials] = defaultdict(tuple)
    for plan, observation in plans:
        if observation.state in states and observation.iteration_times_s:
            pooled[plan] += (observation.iteration_times_s,)
    return dict(pooled)


def _count(plans: Sequence[tuple[int, Observation]], state: TrialState) -> Counter[int]:
    return Counter(plan for plan, observation in plans if observation.state is state)
