"""Iteration times, robustly: how fast a plan is, how sure that is, and what it gains over the default.

Iteration times are positive, skewed and heavy-tailed (one straggler holds up every rank), so all of this works on
their logarithms, with the median for location and the median absolute deviation for spread: a tenth of stragglers
moves neither. A spread from few values is itself uncertain; as in moderated t-statistics (Smyth 2004, doi
10.2202/1544-6115.1027, eq. 3) it is therefore averaged with a prior of its own, worth one further observation. That
makes the interval wide for one or two values, and never quite empty for constant ones.

    s      1.4826 median |log t - median log t|              Rousseeuw and Croux 1993, doi 10.2307/2291267
    v      (1 · 0.05² + (n - 1) s²) / n                      moderated variance, n degrees of freedom
    h      t(0.975; n) · sqrt(pi/2 · v / n)                  pi/2: the median's asymptotic variance, Kenney and Keeping
    low    median · exp(-h),   high    median · exp(h)

What the intervals cover: the scatter of independent iterations. On simulated times (lognormal, 5 %, and one iteration
in fifty half as slow again) they hold the true median in 94 % of the cases for 5 to 50 values, 98 % or more for 2 or 3.
What they do not cover: iterations of one trial share the network's mood, and two trials of one plan differ by more
than their iterations tell. That is why the default and the winner are measured again, at another time, before a study
converges.
"""

from __future__ import annotations

from math import exp, expm1, hypot, log
from typing import TYPE_CHECKING

import numpy as np
from scipy.special import stdtrit

from dear_tune.contract import Estimate, Gain

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["estimate", "gain", "log_variance"]

_PRIOR_SPREAD = 0.05  # an iteration's typical standard deviation, as a share of its time
_NORMAL_SPREAD_PER_MAD = 1.4826
_MEDIAN_VARIANCE = np.pi / 2  # of a normal sample's median, in units of the mean's variance


def estimate(times_s: Sequence[float]) -> Estimate:
    """The median of iteration times, with a 95 % confidence interval.

    Args:
        times_s: positive and finite, in seconds; at least one.
    """
    median = float(np.median(times_s))
    half_width = float(stdtrit(len(times_s), 0.975) * np.sqrt(log_variance(times_s)))
    return Estimate(
        median_s=median,
        low_s=median * exp(-half_width),
        high_s=median * exp(half_width),
        iterations=len(times_s),
    )


def log_variance(times_s: Sequence[float]) -> float:
    """The variance of the logarithm of the iteration times' median.

    Args:
        times_s: positive and finite, in seconds; at least one.
    """
    count = len(times_s)
    logs = np.log(times_s)
    spread = _NORMAL_SPREAD_PER_MAD * float(np.median(np.abs(logs - np.median(logs))))
    moderated = (_PRIOR_SPREAD**2 + (count - 1) * spread**2) / count
    return float(_MEDIAN_VARIANCE * moderated / count)


def gain(default: Estimate, incumbent: Estimate) -> Gain:
    """The share of the default's iteration time that the incumbent saves: 1 - t_incumbent / t_default.

    The interval of the log-ratio comes from the two estimates' own intervals, their distances added in quadrature
    (the method of variance estimates recovery, Zou and Donner 2008, doi 10.1002/sim.3095, eq. 6).

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
