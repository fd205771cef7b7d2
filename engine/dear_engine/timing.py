"""Iteration times, from the end of one step to the end of the next, and which of them mean nothing.

A step that was interrupted (an evaluation, a checkpoint) is no iteration, nor are the first ones on a new plan.
"""

from __future__ import annotations

import math
import time
from itertools import pairwise
from typing import Protocol

import torch
from typing_extensions import override

__all__ = ["Clock", "CudaClock", "HostClock", "IterationTimer", "clock_for"]


class Clock(Protocol):
    """Takes marks, cheaply, and says later how far apart they are."""

    def mark(self) -> None:
        """Take a mark now."""
        ...

    def durations_s(self) -> list[float]:
        """Seconds between the marks taken since the last call; may wait for the newest."""
        ...


class HostClock(Clock):
    """Marks in the host's time."""

    def __init__(self) -> None:
        self._marks: list[float] = []

    @override
    def mark(self) -> None:
        self._marks.append(time.perf_counter())

    @override
    def durations_s(self) -> list[float]:
        marks, self._marks = self._marks, self._marks[-1:]
        return [later - earlier for earlier, later in pairwise(marks)]


class CudaClock(Clock):
    """Marks in the order of the device's work: the host runs ahead of it."""

    def __init__(self) -> None:
        self._marks: list[torch.cuda.Event] = []

    @override
    def mark(self) -> None:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        self._marks.append(event)

    @override
    def durations_s(self) -> list[float]:
        marks, self._marks = self._marks, self._marks[-1:]
        if marks:
            marks[-1].synchronize()
        return [earlier.elapsed_time(later) / 1e3 for earlier, later in pairwise(marks)]


def clock_for(device: torch.device) -> Clock:
    """The clock that sees the work on a device."""
    return CudaClock() if device.type == "cuda" else HostClock()


class IterationTimer:
    """Step-to-step times, of which those that are no iterations read infinity.

    Args:
        clock: takes a mark at each step's end.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._valid: list[bool] = []
        self._skip = 0
        clock.mark()

    def tick(self) -> None:
        """A step has ended."""
        self._clock.mark()
        self._valid.append(self._skip == 0)
        self._skip = max(self._skip - 1, 0)

    def interrupt(self) -> None:
        """The step that is going on is no iteration."""
        self._skip = max(self._skip, 1)

    def settle(self, steps: int) -> None:
        """The next steps are not measured."""
        self._skip = max(self._skip, steps)

    def take(self) -> list[float]:
        """Seconds of each step since the last call, infinity where it was no iteration."""
        valid, self._valid = self._valid, []
        return [s if ok else math.inf for s, ok in zip(self._clock.durations_s(), valid, strict=True)]
