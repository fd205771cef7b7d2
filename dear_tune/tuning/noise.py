"""Iteration times, robustly: how fast a plan is, how sure that is, and what it gains over the default.

Iteration times are positive, skewed and heavy-tailed (one straggler holds up every rank), so all of this works on
their logarithms, with the median for location and the median absolute deviation for spread: a tenth of stragglers
moves neither. A spread from few values is itself uncertain; as in moderated t-statistics (Smyth 2004, doi
10.2202/1544-6115.1027, eq. 3) it is therefore averaged with a prior of its own, worth one further observation. That
makes the interval wide for one or two values, and never quite empty for constant ones.

Iterations of one trial share the network's mood: two trials of one plan differ by more than their iterations tell.
That part no number of iterations averages out, only further trials do. It cannot be estimated from the one or two
trials that a plan gets, and is taken to be 1 %.

    n      iterations, of k trials
    s      1.4826 median |log t - median log t|              Rousseeuw and Croux 1993, doi 10.2307/2291267
    v      (1 · 0.05² + (n - 1) s²) / n                      moderated variance, n degrees of freedom
    V      pi/2 · v / n + 0.01² / k                          pi/2: the median's asymptotic variance, Kenney and Keeping
    h      t(0.975; n) · sqrt(V)
    low    median · exp(-h),   high    median · exp(h)

What the interval of one trial covers, by simulation (lognormal iterations, one in fifty half as slow again, 1 % between
trials; the share of 20,000 intervals that hold the plan's true median):

    spread of the iterations     n = 2     n = 3     n = 5     n = 20     n = 50
    1 %                          100 %     100 %     100 %     97 %       96 %
    5 %                          100 %      98 %      96 %     96 %       95 %
    20 %                          93 %      80 %      85 %     93 %       94 %

Few iterations of a large spread are the weak point: three or five values often look more alike than they are.
"""

from __future__ import annotations

from itertools import chain
from math import exp, expm1, hypot, log
from typing import TYPE_CHECKING

import numpy as np
from scipy.special import stdtrit

from dear_tune.contract import LONGEST_ITERATION_S, SHORTEST_ITERATION_S, Estimate, Gain

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["BETWEEN_TRIALS", "estimate", "gain", "log_variance"]

BETWEEN_TRIALS = 0.01
"""The standard deviation of one plan's trials beyond their iterations' scatter, as a share of the iteration time."""

_PRIOR_SPREAD = 0.05  # an iteration's typical standard deviation, as a share of its time
_NORMAL_SPREAD_PER_MAD = 1.4826
_MEDIAN_VARIANCE = np.pi / 2  # of a normal sample's median, in units of the mean's variance
_WIDEST = log(LONGEST_ITERATION_S / SHORTEST_ITERATION_S)  # further from the median nothing can be reported


def estimate(*trials_s: Sequence[float]) -> Estimate:
    """The median of a plan's iteration times, with a 95 % confidence interval.

    Args:
        trials_s: the iteration times of one trial or several, in seconds, such as the contract admits; none empty.
    """
    times_s = list(chain.from_iterable(trials_s))
    median = float(np.median(times_s))
    half_width = min(float(stdtrit(len(times_s), 0.975) * np.sqrt(log_variance(*trials_s))), _WIDEST)
    return Estimate(
        median_s=median,
        low_s=median * exp(-half_width),
        high_s=median * exp(half_width),
        iterations=len(times_s),
    )


def log_variance(*trials_s: Sequence[float]) -> float:
    """The variance of the logarithm of the median over a plan's iteration times.

    Args:
        trials_s: the iteration times of one trial or several, in seconds, such as the contract admits; none empty.
    """
    logs = np.log(np.concatenate(trials_s))
    count = len(logs)
    spread = _NORMAL_SPREAD_PER_MAD * float(np.median(np.abs(logs - np.median(logs))))
    moderated = (_PRIOR_SPREAD**2 + (count - 1) * spread**2) / count
    return float(_MEDIAN_VARIANCE * moderated / count + BETWEEN_TRIALS**2 / len(trials_s))


def gain(default: Estimate, incumbent: Estimate) -> Gain:
    """The share of the default's iteration time that the incumbent saves: 1 - t_incumbent / t_default.

    The interval of the log-ratio comes from the two estimates' own intervals, their distances added in quadrature
    (the method of variance estimates recovery, Zou and Donner 2008, doi 10.1002/sim.3095, eq. 6). It covers 95 % if
    neither plan was picked for these very measurements.

    Args:
        default: of the default's plan.
        incumbent: of another plan; the two are taken as independent.
    """
    ratio = log(incumbent.median_s / default.median_s)
    above = hypot(_distance(incumbent.high_s, incumbent.median_s), _distance(default.median_s, default.low_s))
    below = hypot(_distance(incumbent.median_s, incumbent.low_s), _distance(default.high_s, default.median_s))
    return Gain(fraction=_saved(ratio), low=_saved(ratio + above), high=_saved(ratio - below))


def _distance(larger: float, smaller: float) -> float:
    return log(larger / smaller)


def _saved(log_ratio: float) -> float:
    return -expm1(log_ratio)
