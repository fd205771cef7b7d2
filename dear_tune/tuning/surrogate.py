"""A Gaussian process over the plans: what an iteration would take at a threshold never tried.

    x    (n, 1)   log2 of a plan's threshold in bytes: a factor of two is one octave
    y    (n,)     log of the plan's median iteration time, less their median, in units of their spread
    a    (n,)     variance of y, each plan's own, in that unit: a plan measured twice is known better

Differences of log times are relative differences, so that expected improvement is a share of the iteration time.

The kernel is fixed: Matern 5/2 over three octaves, amplitude one. From the five to fifteen plans that a study measures
its length is not identifiable, and the most likely one is often so long that the search stops too early.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from skopt.acquisition import gaussian_ei
from skopt.learning import GaussianProcessRegressor
from skopt.learning.gaussian_process.kernels import Matern

from dear_tune.tuning.noise import BETWEEN_TRIALS, log_variance

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import numpy.typing as npt

    from dear_tune.fusion import PlanSpace
    from dear_tune.tuning.pool import TimesOfTrials

__all__ = ["Surrogate"]

_LENGTH_OCTAVES = 3.0
_SMALLEST_SPREAD = 0.01


class Surrogate:
    """A Gaussian process fitted to the plans measured so far.

    Args:
        space: the candidates.
        times_s: iteration times by plan; at least one plan.
        pending: plans being measured now. Each is taken to turn out as predicted, so that the workers which ask
            meanwhile look elsewhere (the kriging believer, Ginsbourger et al. 2010, doi 10.1007/978-3-642-10701-6_6).
    """

    def __init__(self, space: PlanSpace, times_s: Mapping[int, TimesOfTrials], *, pending: Sequence[int] = ()) -> None:
        self._space = space
        medians = np.log([float(np.median(np.concatenate(trials_s))) for trials_s in times_s.values()])
        self._scale = max(float(np.std(medians)), _SMALLEST_SPREAD)
        x = self._octaves(list(times_s))
        y = (medians - np.median(medians)) / self._scale
        variances = np.array([log_variance(*trials_s) for trials_s in times_s.values()]) / self._scale**2
        self._model = _fit(x, y, variances)
        self._lowest = float(np.min(self._model.predict(x)))
        if pending:
            x_pending = self._octaves(pending)
            y_pending = self._model.predict(x_pending)
            variances = np.append(variances, np.full(len(pending), (BETWEEN_TRIALS / self._scale) ** 2))
            self._model = _fit(np.concatenate([x, x_pending]), np.concatenate([y, y_pending]), variances)

    def expected_improvement(self, plans: Sequence[int]) -> npt.NDArray[np.float64]:
        """By how much each plan promises to undercut the best one, as a share of the iteration time; shape (n,).

        The best is what the model thinks of the plans measured, not the luckiest measurement (Picheny et al. 2013,
        doi 10.1007/s00158-013-0919-4, section 3).
        """
        improvement = gaussian_ei(self._octaves(plans), self._model, y_opt=self._lowest, xi=0.0)
        return np.asarray(improvement * self._scale, dtype=np.float64)

    def _octaves(self, plans: Sequence[int]) -> npt.NDArray[np.float64]:
        return np.log2([[float(self._space.thresholds[plan])] for plan in plans])


def _fit(
    x: npt.NDArray[np.float64], y: npt.NDArray[np.float64], variances: npt.NDArray[np.float64]
) -> GaussianProcessRegressor:
    kernel = Matern(_LENGTH_OCTAVES, length_scale_bounds="fixed", nu=2.5)
    return GaussianProcessRegressor(kernel, alpha=variances, optimizer=None).fit(x, y)
