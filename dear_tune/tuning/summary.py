"""What a study knows so far: default, incumbent, gain, and what a job should run with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from dear_tune.contract import Estimate, Gain, TrialState
from dear_tune.tuning.noise import gain
from dear_tune.tuning.pool import Pool
from dear_tune.units import format_share

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dear_tune.fusion import PlanSpace
    from dear_tune.tuning.history import Observation

__all__ = ["Summary", "summarize"]

_SAME_PLAN = Gain(fraction=0.0, low=0.0, high=0.0)


@dataclass(frozen=True, kw_only=True)
class Summary:
    """Where a study stands.

    Attributes:
        default: the iteration time with the default's plan, over all of its completed trials.
        incumbent_index: where the history holds the first completed trial of the best plan; None without one.
        incumbent: the iteration time with the best plan, over all of its completed trials.
        gain: of the incumbent over the default; None as long as one of them is not measured.
        threshold_bytes: what a job should run with now: the incumbent's threshold if it is faster than the default
            beyond doubt (the gain's lower bound is above zero), the default otherwise.
        reason: why, for people.
    """

    default: Estimate | None
    incumbent_index: int | None
    incumbent: Estimate | None
    gain: Gain | None
    threshold_bytes: int
    reason: str


def summarize(space: PlanSpace, history: Sequence[Observation]) -> Summary:
    """Weigh the completed trials of a study.

    Args:
        space: the candidates.
        history: the trials so far by number.
    """
    pool = Pool.of(space, history)
    best_plan = pool.best
    default = pool.completed.get(pool.default)
    if best_plan is None:
        return Summary(
            default=default,
            incumbent_index=None,
            incumbent=None,
            gain=None,
            threshold_bytes=space.default_threshold_bytes,
            reason=_nothing_measured(history),
        )
    incumbent_index = _first_completed(space, history, best_plan)
    incumbent = pool.completed[best_plan]
    saved = _SAME_PLAN if best_plan == pool.default else gain(default, incumbent) if default else None
    better = saved is not None and saved.low > 0
    return Summary(
        default=default,
        incumbent_index=incumbent_index,
        incumbent=incumbent,
        gain=saved,
        threshold_bytes=history[incumbent_index].threshold_bytes if better else space.default_threshold_bytes,
        reason=_reason(saved),
    )


def _first_completed(space: PlanSpace, history: Sequence[Observation], plan: int) -> int:
    return next(
        index
        for index, observation in enumerate(history)
        if observation.state is TrialState.COMPLETED
        and observation.iteration_times_s
        and space.index(observation.threshold_bytes) == plan
    )


def _nothing_measured(history: Sequence[Observation]) -> str:
    failed = sum(observation.state is TrialState.FAILED for observation in history)
    if failed and failed == len(history):
        return f"the default: all {failed} trials failed"
    return "the default: no trial is completed yet"


def _reason(saved: Gain | None) -> str:
    if saved is None:
        return "the default: it has not been measured yet, so nothing can be said to be faster"
    if saved is _SAME_PLAN:
        return "the default: no other plan measured so far is faster"
    fraction, low = format_share(saved.fraction), format_share(saved.low)
    if saved.low > 0:
        return f"the incumbent: it saves {fraction} of the default's iteration time (at least {low})"
    return f"the default: the incumbent's gain of {fraction} is within the noise (its lower bound is {low})"
