"""Which steps are iterations."""

import math
from itertools import pairwise

from typing_extensions import override

from dear_engine.timing import Clock, IterationTimer


class ScriptedClock(Clock):
    """Marks at given times."""

    def __init__(self, *times_s):
        self._times_s = list(times_s)
        self._marks = []

    @override
    def mark(self):
        self._marks.append(self._times_s.pop(0))

    @override
    def durations_s(self):
        marks, self._marks = self._marks, self._marks[-1:]
        return [later - earlier for earlier, later in pairwise(marks)]


def test_step_to_step():
    """A step's time runs from the end of the step before; windows join without a gap."""
    timer = IterationTimer(ScriptedClock(0.0, 1.0, 3.0, 6.0))
    timer.tick()
    timer.tick()
    assert timer.take() == [1.0, 2.0]
    timer.tick()
    assert timer.take() == [3.0]


def test_interrupted():
    """Only the step during which something interrupted is no iteration."""
    timer = IterationTimer(ScriptedClock(0.0, 1.0, 2.0, 3.0))
    timer.tick()
    timer.interrupt()
    timer.interrupt()
    timer.tick()
    timer.tick()
    assert timer.take() == [1.0, math.inf, 1.0]


def test_settling():
    """The first steps on a new plan are not measured."""
    timer = IterationTimer(ScriptedClock(0.0, 1.0, 2.0, 3.0))
    timer.settle(2)
    for _ in range(3):
        timer.tick()
    assert timer.take() == [math.inf, math.inf, 1.0]
