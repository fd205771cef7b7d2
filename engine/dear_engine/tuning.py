"""How a run is tuned while it trains.

All ranks count steps alike. When a window of steps is full, one small MAX all-reduce, queued behind the step's
all-gathers, carries both what was measured and what to do:

    [ seconds of each step of the window | threshold to run with | length of the next window | measuring: 1 or 0 ]
      all ranks; infinity if no iteration  rank 0; the others send 0 three times

so one step later every rank holds the slowest rank's times and rank 0's decision, and all switch at that step.
Rank 0 hands the times to a thread that speaks HTTP; training never waits for it. Without an answer the decision is
to stay; without a service it is to run with the best known threshold, which is the default if none is known.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from dear_engine.collectives import Channel, Work
    from dear_engine.conversation import ServiceThread
    from dear_engine.timing import IterationTimer
    from dear_engine.tuner import Tuner

__all__ = ["TuningLoop"]

_MAX_IDLE_WINDOW = 640  # steps, once the study has converged
_MAX_LOST_WINDOW = 80  # steps, while the service is away
_LONGEST_ITERATION_S = 3600.0


class TuningLoop:
    """One rank's part in tuning: measures windows and learns, at the same step as all others, what to run with.

    Args:
        channel: carries the windows.
        timer: this rank's iteration times.
        tuner: rank 0's settings.
        service: the conversation with the service, on rank 0; None on the others.
    """

    def __init__(self, channel: Channel, timer: IterationTimer, tuner: Tuner, service: ServiceThread | None) -> None:
        self.measuring = True
        """Whether a trial waits for measurements; the same on all ranks at the same step."""
        self._channel = channel
        self._timer = timer
        self._settle = tuner.settle
        self._measuring_window = tuner.window
        self._window = tuner.window
        self._service = service
        self._message = torch.empty(0)
        self._exchange: Work | None = None
        self._start_afresh(tuner.start_up)

    def after_step(self, threshold_bytes: int) -> int:
        """To be called at the end of each step.

        Args:
            threshold_bytes: what this step ran with.

        Returns:
            What the next step runs with, in bytes: the same on all ranks.
        """
        self._timer.tick()
        self._steps += 1
        if self._exchange is not None:
            return self._conclude(threshold_bytes)
        if self._steps >= self._window:
            self._begin()
        return threshold_bytes

    def close(self) -> None:
        """End the conversation with the service."""
        if self._service is not None:
            self._service.close()

    def _begin(self) -> None:
        decision = [0.0, 0.0, 0.0]
        if (service := self._service) is not None:
            longest = _MAX_LOST_WINDOW if service.lost else _MAX_IDLE_WINDOW
            idle_window = max(min(2 * self._window, longest), self._measuring_window)
            window = self._measuring_window if service.measuring else idle_window
            decision = [float(service.threshold_bytes), float(window), float(service.measuring)]
        self._message = torch.tensor(self._timer.take() + decision, dtype=torch.float64)
        site = f"the tuner's exchange of {len(self._message)} numbers"
        self._exchange = self._channel.all_reduce(self._message, dist.ReduceOp.MAX, site)
        self._steps = 0

    def _conclude(self, threshold_bytes: int) -> int:
        assert self._exchange is not None  # after_step has looked
        self._exchange.wait()
        self._exchange = None
        *times_s, decided_bytes, window, measuring = self._message.tolist()
        self._window, self.measuring = int(window), bool(measuring)
        if self._service is not None:
            self._service.submit(threshold_bytes, [seconds for seconds in times_s if _is_iteration(seconds)])
        if int(decided_bytes) != threshold_bytes:
            self._start_afresh(self._settle)
        return int(decided_bytes)

    def _start_afresh(self, unmeasured: int) -> None:
        self._timer.take()  # the step that has just ended belongs to the old threshold
        self._timer.settle(unmeasured)
        self._steps = -unmeasured


def _is_iteration(seconds: float) -> bool:
    """Also a step during which the machine slept for a day is none."""
    return 0 < seconds <= _LONGEST_ITERATION_S
