"""A Gaussian process over the plans: what an iteration would take at a threshold never tried.

    x    (n, 1)   log2 of a plan's threshold in bytes: a factor of two is one octave
    y    (n,)     log of the plan's median iteration time, less their median, in units of their spread
    a    (n,)     variance of y, each plan's own: a plan measured twice is known better

Differences of log times are relative differences, so that expected improvement is a share of the iteration time.
"""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING

import numpy as np
from sklearn.exceptions import ConvergenceWarning
from skopt.acquisition import gaussian_ei
from skopt.learning import GaussianProcessRegressor
from skopt.learning.gaussian_process.kernels import ConstantKernel, Matern

from dear_tune.tuning.noise import log_variance

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import numpy.typing as npt

    from dear_tune.fusion import PlanSpace

__all__ = ["Surrogate"]

_LENGTH_OCTAVES = (1.0, 16.0)
_AMPLITUDES = (0.1, 10.0)
_ROUGHNESS = 0.005  # neighbouring plans, and two trials of one plan, differ by this share in no smooth way
_SMALLEST_SPREAD = 0.01


class Surrogate:
    """A Gaussian process fitted to the plans measured so far.

    Args:
        space: the candidates.
        times_s: iteration times in seconds by plan; at least one plan.
        pending: plans being measured now. Each is taken to turn out as predicted, so that the workers which ask
            meanwhile look elsewhere (the kriging believer, Ginsbourger et al. 2010, doi 10.1007/978-3-642-10701-6_6).
        seed: of the restarts in the search for the kernel's length and amplitude.
    """

    def __init__(
        self, space: PlanSpace, times_s: Mapping[int, Sequence[float]], *, pending: Sequence[int] = (), seed: int
    ) -> None:
        self._space = space
        medians = np.log([float(np.median(times)) for times in times_s.values()])
        self._scale = max(float(np.std(medians)), _SMALLEST_SPREAD)
        variances = np.array([log_variance(times) for times in times_s.values()]) + _ROUGHNESS**2
        x, y = self._octaves(list(times_s)), (medians - np.median(medians)) / self._scale
        self._model = _fit(x, y, variances / self._scale**2, seed)
        self._lowest = float(np.min(self._model.predict(x)))
        if pending:
            believed = self._octaves(pending)
            self._model = _refit(self._model, believed, self._model.predict(believed), _ROUGHNESS**2 / self._scale**2)

    def expected_improvement(self, plans: Sequence[int]) -> npt.NDArray[np.float64]:
        """By how much each plan promises to undercut the best one, as a share of the iteration time; shape (n,).

        The best is what the model thinks of the plans measured, not the luckiest measurement (Picheny et al. 2013,
        doi 10.1007/s00158-013-0919-4, section 3).
        """
        improvement = gaussian_ei(self._octaves(plans), self._model, y_opt=self._lowest, xi=0.0)
        return np.asarray(improvement * self._scale, dtype=np.float64)

    def _octaves(self, plans: Sequence[int]) -> npt.NDArray[np.float64]:
        return np.log2([[float(self._space.plans[plan].threshold_bytes)] for plan in plans])


def _fit(
    x: npt.NDArray[np.float64], y: npt.NDArray[np.float64], variances: npt.NDArray[np.float64], seed: int
) -> GaussianProcessRegressor:
    kernel = ConstantKernel(1.0, _AMPLITUDES) * Matern(4.0, _LENGTH_OCTAVES, nu=2.5)
    model = GaussianProcessRegressor(kernel, alpha=variances, n_restarts_optimizer=2, random_state=seed)
    with warnings.catch_warnings():
        # A length or amplitude at its bound is what few or flat data ask for; the bounds are there to catch it.
        warnings.simplefilter("ignore", ConvergenceWarning)
        return model.fit(x, y)


def _refit(
    model: GaussianProcessRegressor, x: npt.NDArray[np.float64], y: npt.NDArray[np.float64], variance: float
) -> GaussianProcessRegressor:
    """The same kernel with further data."""
    variances = np.concatenate([model.alpha, np.full(len(y), variance)])
    refitted = GaussianProcessRegressor(model.kernel_, alpha=variances, optimizer=None)
    return refitted.fit(np.concatenate([model.X_train_, x]), np.concatenate([model.y_train_, y]))
