"""Rank 0's conversation with the tuning service: what it says, and what follows from the answers."""

from __future__ import annotations

import logging
import os
import queue
import socket
import threading
from contextlib import suppress
from typing import TYPE_CHECKING

from dear_tune.contract import Action, Report
from dear_tune.errors import RequestRefusedError, ServiceError
from dear_tune.units import format_bytes

if TYPE_CHECKING:
    from dear_tune.client import Client
    from dear_tune.contract import Instruction, StudySpec, Trial

__all__ = ["ServiceThread"]

logger = logging.getLogger("dear_engine")

_QUEUED_WINDOWS = 16
_CLOSE_S = 2.0


class ServiceThread:
    """Rank 0's conversation with the service, in a thread of its own. No method of it raises or waits.

    Attributes:
        threshold_bytes: what to run with, as far as is known.
        measuring: whether a trial waits for measurements.
        lost: whether the service did not answer when it was last spoken to.
    """

    def __init__(self, client: Client, spec: StudySpec, worker_id: str | None) -> None:
        self.threshold_bytes = spec.default_threshold_bytes
        self.measuring = True
        self._best_threshold_bytes = spec.default_threshold_bytes
        self._client = client
        self._spec = spec
        self._worker_id = worker_id or f"{socket.gethostname()}-{os.getpid()}"
        self._place = {"study": spec.name, "url": client.url}
        self._trial: Trial | None = None
        self._joined = False
        self._given_up = False
        self._closing = False
        self.lost = False
        self._windows: queue.Queue[tuple[int, list[float]] | None] = queue.Queue(_QUEUED_WINDOWS)
        # A daemon: an answer that is still awaited must not hold up the end of training.
        self._thread = threading.Thread(target=self._run, name="dear-tuner", daemon=True)
        self.submit(spec.default_threshold_bytes, [])
        _make_heard()
        self._thread.start()

    def submit(self, threshold_bytes: int, times_s: list[float]) -> None:
        """Hand over a window that ran with a threshold; dropped when too many wait already."""
        try:
            self._windows.put_nowait((threshold_bytes, times_s))
        except queue.Full:
            logger.debug("The tuning service is slow; a window of measurements was dropped.")

    def close(self) -> None:
        """End the thread; an answer that takes longer than 2 s is not waited for."""
        self._closing = True
        with suppress(queue.Full):  # then it wakes up without being told
            self._windows.put_nowait(None)
        self._thread.join(_CLOSE_S)

    def _run(self) -> None:
        while (window := self._windows.get()) is not None and not self._closing:
            if not self._given_up:
                self._converse(*window)
            self._windows.task_done()
        self._client.close()

    def _converse(self, threshold_bytes: int, times_s: list[float]) -> None:
        try:
            instruction = self._speak(threshold_bytes, times_s)
        except RequestRefusedError as error:
            self._refused(error)
        except ServiceError as error:
            self._unreachable(error)
        except Exception:  # a bug of ours is not the training's problem
            logger.exception("Training goes on untuned: the tuner failed.")
            self._give_up()
        else:
            self._reached()
            if instruction is not None:
                self._follow(instruction)

    def _speak(self, threshold_bytes: int, times_s: list[float]) -> Instruction | None:
        if not self._joined:
            self._client.create_study(self._spec)
            self._joined = True
            logger.info("Tuning study %(study)s at %(url)s: see `dear-tune show %(study)s`", self._place)
        if self._trial is None:
            return self._client.suggest(self._spec.name, self._worker_id)
        if threshold_bytes != self._trial.parameters.threshold_bytes or not times_s:
            return None  # the ranks have not switched yet, or the window held no iteration
        report = Report(worker_id=self._worker_id, sequence=self._trial.next_sequence, iteration_times_s=tuple(times_s))
        return self._client.report(self._spec.name, self._trial.number, report)

    def _follow(self, instruction: Instruction) -> None:
        self._best_threshold_bytes = instruction.recommendation.parameters.threshold_bytes
        was_measuring = self.measuring
        self._run_with(instruction.trial)
        if was_measuring and instruction.action is Action.DONE:
            reason = instruction.recommendation.reason
            logger.info("Tuning is done; training goes on with %s: %s", format_bytes(self.threshold_bytes), reason)

    def _run_with(self, trial: Trial | None) -> None:
        self._trial = trial
        self.measuring = trial is not None
        self.threshold_bytes = trial.parameters.threshold_bytes if trial else self._best_threshold_bytes

    def _reached(self) -> None:
        if self.lost:
            logger.warning("The tuning service at %s is back; tuning goes on.", self._client.url)
        self.lost = False

    def _unreachable(self, error: ServiceError) -> None:
        first = not self.lost
        self.lost = True
        self._rejoin()
        if first:
            logger.warning(
                "The tuning service is away. Training goes on with %s, and looks for it now and then. %s",
                format_bytes(self.threshold_bytes),
                error,
            )

    def _refused(self, error: RequestRefusedError) -> None:
        if not self._joined:
            self._give_up()
            logger.warning(
                "Training goes on untuned: the tuning service refused the study %s. %s", self._spec.name, error
            )
        else:
            logger.info("The tuning service refused a report; asking anew. %s", error)
        self._rejoin()

    def _give_up(self) -> None:
        self._given_up = True
        self._rejoin()

    def _rejoin(self) -> None:
        self._joined = False
        self._run_with(None)


def _make_heard() -> None:
    """Where the program has set up no logging, the few lines about tuning go to standard error."""
    if not logger.hasHandlers():
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("dear-tune: %(message)s"))
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)
