"""Bayesian optimization over the distinct plans: Gaussian process, expected improvement, and an honest ending.

A study goes through three phases. `suggest` finds the phase from the history alone, so it may be called anywhere, any
number of times, and after any restart.

    warm-up        the default, then a few thresholds spread over the octaves
    exploration    the untried plan of largest expected improvement, while that is worth a trial
    confirmation   default and winner again, up to three times each, until the winner is proven faster: the lowest of
                   many noisy times is lucky, so what the two take from here on is what decides

The last trials of the budget are kept for the confirmation. Plans that a worker holds are not proposed again, except
for confirmation; plans that failed, or whose workers fell silent twice, are not proposed again at all, except the
default, which may fail once: without it there is nothing to compare with.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from dear_tune.contract import StudyState
from dear_tune.tuning.history import Proposal
from dear_tune.tuning.pool import Pool
from dear_tune.tuning.surrogate import Surrogate
from dear_tune.tuning.warmup import spread
from dear_tune.units import format_bytes, format_share

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dear_tune.fusion import PlanSpace
    from dear_tune.tuning.history import Observation

__all__ = ["GaussianProcessOptimizer"]

_WARM_UP_PLANS = 5  # the default among them
_WORTH_A_TRIAL = 0.005  # expected improvement, as a share of the iteration time
_MOST_TRIALS_OF_A_PLAN = 4  # the first, and three to confirm it
_FAILURES_TOLERATED = 2
_SMALLEST_CONFIRMED_BUDGET = 4  # trials; fewer are all spent on exploring


class GaussianProcessOptimizer:
    """Finds a fast plan in few trials.

    Args:
        space: the candidates.
        seed: of the warm-up's spread; the same seed and history give the same proposal.
        max_trials: the most trials ever proposed, whatever becomes of them.
    """

    def __init__(self, space: PlanSpace, *, seed: int, max_trials: int) -> None:
        self._space = space
        self._seed = seed
        self._max_trials = max_trials

    def suggest(self, history: Sequence[Observation]) -> Proposal:
        """The next step, from the trials so far by number."""
        pool = Pool.of(self._space, history)
        remaining = self._max_trials - len(history)
        state = StudyState.WARMING_UP if self._warm_up_left(pool) else StudyState.EXPLORING
        plan, reason = self._explore(pool, remaining)
        if plan is None and remaining > 0 and (plan := self._to_confirm(pool)) is not None:
            reason = f"confirming the {'default' if plan == pool.default else 'winner'}: {reason}"
        if plan is not None:
            return Proposal(threshold_bytes=self._threshold(plan), state=state, reason=reason)
        if pool.held:
            trials = "1 trial" if len(pool.held) == 1 else f"{len(pool.held)} trials"
            return Proposal(threshold_bytes=None, state=state, reason=f"waiting for {trials} that others measure")
        return Proposal(threshold_bytes=None, state=StudyState.CONVERGED, reason=reason)

    def _explore(self, pool: Pool, remaining: int) -> tuple[int | None, str]:
        """A plan to try for the first time, or None, and why."""
        failed = sum(pool.failures.values())
        if failed > _FAILURES_TOLERATED and not pool.times_s:
            return None, f"all {failed} trials failed; the default stays"
        if remaining <= self._reserve(pool):
            return None, self._spent(remaining)
        taken = pool.taken
        untried = [plan for plan in range(len(self._space.thresholds)) if plan not in taken]
        if not untried:
            return None, "every plan has been tried"
        if left := self._warm_up_left(pool):
            plan = next(plan for plan in spread(self._space, seed=self._seed) if plan not in taken)
            return plan, f"{left} of {self._warm_up_size(pool)} warm-up trials to go"
        return self._improve(pool, untried)

    def _spent(self, remaining: int) -> str:
        if remaining <= 0:
            return f"the {self._max_trials} trials of the budget are used up"
        used = self._max_trials - remaining
        return f"{used} of {self._max_trials} trials are used, the rest is kept to confirm a winner"

    def _improve(self, pool: Pool, untried: Sequence[int]) -> tuple[int | None, str]:
        surrogate = Surrogate(self._space, pool.times_s, pending=sorted(pool.held))
        improvement = surrogate.expected_improvement(untried)
        best = int(np.argmax(improvement))
        if improvement[best] < _WORTH_A_TRIAL:
            return None, f"no untried plan promises more than {format_share(_WORTH_A_TRIAL)}"
        threshold = format_bytes(self._threshold(untried[best]))
        return untried[best], f"expected improvement {format_share(improvement[best])} at {threshold}"

    def _to_confirm(self, pool: Pool) -> int | None:
        """The default or the winner, whichever was measured less often, as long as it is open which one is faster."""
        winner = pool.best
        if winner is None or winner == pool.default or winner in pool.proven:
            return None
        if pool.held.difference(pool.completed):
            return None  # a first measurement is on its way: the winner may change
        if not (_may_repeat(pool, pool.default) and _may_repeat(pool, winner)):
            return None
        plan = min((pool.default, winner), key=lambda plan: _measured(pool, plan))
        return plan if plan not in pool.held and _measured(pool, plan) < _MOST_TRIALS_OF_A_PLAN else None

    def _reserve(self, pool: Pool) -> int:
        """Trials to keep for the confirmation: one for whatever wins, one for the default."""
        if self._max_trials < _SMALLEST_CONFIRMED_BUDGET:
            return 0
        return 1 + (_measured(pool, pool.default) < 2)

    def _warm_up_size(self, pool: Pool) -> int:
        return min(_WARM_UP_PLANS, self._max_trials, len(self._space.thresholds) - len(pool.failures))

    def _warm_up_left(self, pool: Pool) -> int:
        return max(self._warm_up_size(pool) - len(pool.times_s), 0)

    def _threshold(self, plan: int) -> int:
        if plan == self._space.index(self._space.default_threshold_bytes):
            return self._space.default_threshold_bytes
        return self._space.thresholds[plan]


def _may_repeat(pool: Pool, plan: int) -> bool:
    return plan not in pool.silent and pool.failures.get(plan, 0) <= (plan == pool.default)


def _measured(pool: Pool, plan: int) -> int:
    """How many trials of a plan there are, those that run among them."""
    return pool.trials.get(plan, 0) + (plan in pool.held)
