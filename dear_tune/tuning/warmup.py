"""The order in which plans are measured before there is anything to learn from: the default, then a spread."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dear_tune.fusion import PlanSpace

__all__ = ["spread"]

_GOLDEN = (np.sqrt(5) - 1) / 2


def spread(space: PlanSpace, *, seed: int) -> Iterator[int]:
    """Every plan once, as an index: the default's, then those nearest to points spread evenly over log2(threshold).

    The points are the golden-ratio sequence: however many of them are used, they lie well apart (the additive
    recurrence of Kronecker; Roberts 2018, "The unreasonable effectiveness of quasirandom sequences").

    Args:
        space: the candidates.
        seed: of the sequence's first point.
    """
    octaves = np.log2(space.thresholds)
    left = np.ones(len(octaves), dtype=bool)
    point = float(np.random.default_rng(seed).random())
    plan = space.index(space.default_threshold_bytes)
    while True:
        yield plan
        left[plan] = False
        if not left.any():
            return
        point = (point + _GOLDEN) % 1.0
        target = octaves[0] + point * (octaves[-1] - octaves[0])
        plan = int(np.argmin(np.where(left, np.abs(octaves - target), np.inf)))
