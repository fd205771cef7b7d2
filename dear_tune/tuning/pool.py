"""A study's trials, pooled by plan: thresholds that fuse alike are one candidate and share their data."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dear_tune.contract import Estimate, TrialState
from dear_tune.tuning.noise import estimate

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from dear_tune.fusion import PlanSpace
    from dear_tune.tuning.history import Observation

__all__ = ["Pool"]

_HOLDING = frozenset({TrialState.QUEUED, TrialState.RUNNING})
_MEASURED = frozenset({TrialState.COMPLETED, TrialState.PRUNED})


@dataclass(frozen=True, kw_only=True)
class Pool:
    """What the trials say about each plan, by its index in the space.

    Attributes:
        default: the default threshold's plan.
        times_s: the iteration times of all completed and pruned trials of a plan, in seconds; never empty.
        completed: the iteration times of a plan's completed trials, estimated.
        trials: how many trials of a plan were completed.
        held: the plans that some worker measures, or will.
        failures: how many trials of a plan failed.
    """

    default: int
    times_s: Mapping[int, tuple[float, ...]]
    completed: Mapping[int, Estimate]
    trials: Mapping[int, int]
    held: frozenset[int]
    failures: Mapping[int, int]

    @classmethod
    def of(cls, space: PlanSpace, history: Sequence[Observation]) -> Pool:
        """Pool the trials so far. Stale ones leave no trace: their plan is free again."""
        plans = [(space.index(observation.threshold_bytes), observation) for observation in history]
        completed = _times(plans, frozenset({TrialState.COMPLETED}))
        return cls(
            default=space.index(space.default_threshold_bytes),
            times_s=_times(plans, _MEASURED),
            completed={plan: estimate(times_s) for plan, times_s in completed.items()},
            trials=Counter(plan for plan, observation in plans if observation.state is TrialState.COMPLETED),
            held=frozenset(plan for plan, observation in plans if observation.state in _HOLDING),
            failures=Counter(plan for plan, observation in plans if observation.state is TrialState.FAILED),
        )

    @property
    def taken(self) -> frozenset[int]:
        """The plans that exploration does not propose: measured, held or failed."""
        return self.held.union(self.times_s, self.trials, self.failures)

    @property
    def best(self) -> int | None:
        """The fastest plan: the one whose iteration time's upper bound is lowest.

        The bound, not the median: of many noisy medians the lowest is lucky more often than fast, and a plan that was
        measured twice deserves more trust than one measured once. Plans that ever failed are out, but for the default.
        """
        sound = (plan for plan in self.completed if plan not in self.failures or plan == self.default)
        return min(sound, key=lambda plan: self.completed[plan].high_s, default=None)


def _times(plans: Sequence[tuple[int, Observation]], states: frozenset[TrialState]) -> dict[int, tuple[float, ...]]:
    pooled: defaultdict[int, tuple[float, ...]] = defaultdict(tuple)
    for plan, observation in plans:
        if observation.state in states and observation.iteration_times_s:
            pooled[plan] += observation.iteration_times_s
    return dict(pooled)
