"""What a study knows so far: default, incumbent, gain, and what a job should run with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from dear_tune.contract import Estimate, Gain, TrialState
from dear_tune.tuning.noise import gain
from dear_tune.tuning.pool import Pool
from dear_tune.units import format_gain, format_share

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
        gain: of the incumbent over the default, from the trials that confirm both; from all as long as there are none;
            None as long as one of them is not measured.
        threshold_bytes: what a job should run with now: the incumbent's threshold if trials made after it was found
            show that it is faster than the default (the gain's lower bound is above zero), the default otherwise.
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
    plan = pool.fastest(pool.proven or pool.completed)
    default = pool.completed.get(pool.default)
    if plan is None:
        return Summary(
            default=default,
            incumbent_index=None,
            incumbent=None,
            gain=None,
            threshold_bytes=space.default_threshold_bytes,
            reason=_nothing_measured(history),
        )
    index = _first_completed(space, history, plan)
    return Summary(
        default=default,
        incumbent_index=index,
        incumbent=pool.completed[plan],
        gain=_gain(pool, plan),
        threshold_bytes=history[index].threshold_bytes if plan in pool.proven else space.default_threshold_bytes,
        reason=_reason(pool, plan),
    )


def _gain(pool: Pool, plan: int) -> Gain | None:
    if plan == pool.default:
        return _SAME_PLAN
    estimates = pool.confirmed if _is_confirmed(pool, plan) else pool.completed
    default = estimates.get(pool.default)
    return gain(default, estimates[plan]) if default else None


def _is_confirmed(pool: Pool, plan: int) -> bool:
    return {plan, pool.default} <= pool.confirmed.keys()


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


def _reason(pool: Pool, plan: int) -> str:
    saved = _gain(pool, plan)
    if saved is None:
        return "the default: it has not been measured yet, so nothing can be said to be faster"
    if plan == pool.default:
        return "the default: no other plan measured so far is faster"
    if not _is_confirmed(pool, plan):
        return f"the default: the incumbent's gain of {format_share(saved.fraction)} is not confirmed by second trials"
    if saved.low > 0:
        return f"the incumbent: of the default's iteration time it saves {format_gain(saved)}"
    return f"the default: the incumbent's gain of {format_gain(saved)} is within the noise"
