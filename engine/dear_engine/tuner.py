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

import hashlib
import logging
import os
import queue
import socket
import threading
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from pydantic import ValidationError

from dear_tune.client import Client
from dear_tune.contract import (
    DEFAULT_THRESHOLD_BYTES,
    MAX_ITERATIONS_PER_REPORT,
    Action,
    Fingerprint,
    Instruction,
    Layer,
    Report,
    StudySpec,
    SuggestRequest,
)
from dear_tune.errors import ConfigurationError, RequestRefusedError, ServiceError
from dear_tune.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dear_engine.collectives import Channel, Work
    from dear_engine.timing import IterationTimer
    from dear_tune.contract import Trial

__all__ = ["ServiceThread", "Tuner", "TuningLoop", "study_name"]

logger = logging.getLogger("dear_engine")

_MAX_IDLE_WINDOW = 640  # steps, once the study has converged
_MAX_LOST_WINDOW = 80  # steps, while the service is away
_QUEUED_WINDOWS = 16
_CLOSE_S = 2.0
_LONGEST_ITERATION_S = 3600.0


@dataclass(frozen=True, kw_only=True)
class Tuner:
    """How this job is tuned. The same on all ranks; rank 0's is what counts.

    Attributes:
        url: the tuning service, such as "http://tuner:8000".
        study: the study's name; None names it after the model and the cluster.
        worker_id: this job's name towards the service; None makes one of host and process. A job that restarts
            under the same name gets its open trial back.
        window: how many steps are measured between two exchanges among the ranks.
        settle: how many steps after a switch are not measured.
        start_up: how many steps at the beginning are not measured: caches, allocators and clocks are cold.
        iterations_per_trial: how many measured iterations make a trial, if this job creates the study.
        max_trials: after how many trials the search ends at the latest, if this job creates the study.
        seed: of the search, if this job creates the study.
    """

    url: str
    study: str | None = None
    worker_id: str | None = None
    window: int = 10
    settle: int = 3
    start_up: int = 10
    iterations_per_trial: int = 20
    max_trials: int = 30
    seed: int = 0

    def __post_init__(self) -> None:
        if not 1 <= self.window <= MAX_ITERATIONS_PER_REPORT or self.settle < 0 or self.start_up < 0:
            raise ConfigurationError(
                f"Tuner(...): window lies between 1 and {MAX_ITERATIONS_PER_REPORT}; "
                "settle and start_up are not negative."
            )
        Client(self.url).close()
        try:
            SuggestRequest(worker_id=self.worker_id or "worker")
            self.spec(_ANY_LAYERS, _ANY_CLUSTER, DEFAULT_THRESHOLD_BYTES)
        except ValidationError as error:
            raise ConfigurationError(f"Tuner(...): {_described(error)}") from error

    @classmethod
    def from_environment(cls) -> Tuner | None:
        """The tuner that `DEAR_TUNE_URL` and `DEAR_TUNE_STUDY` ask for; None if the first is not set."""
        url = os.environ.get("DEAR_TUNE_URL")
        return cls(url=url, study=os.environ.get("DEAR_TUNE_STUDY")) if url else None

    def spec(self, layers: Sequence[Layer], fingerprint: Fingerprint, default_threshold_bytes: int) -> StudySpec:
        """The study this job asks for."""
        return StudySpec(
            name=self.study or study_name(layers, fingerprint),
            layers=tuple(layers),
            fingerprint=fingerprint,
            default_threshold_bytes=default_threshold_bytes,
            iterations_per_trial=self.iterations_per_trial,
            max_trials=self.max_trials,
            seed=self.seed,
        )


_ANY_LAYERS = (Layer(name="any", bytes=1),)
_ANY_CLUSTER = Fingerprint(world_size=1, backend="any", device="any", dtype="any")


def _described(error: ValidationError) -> str:
    return "; ".join(f"{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in error.errors())


def study_name(layers: Sequence[Layer], fingerprint: Fingerprint) -> str:
    """A name that the same model on the same cluster gets again: "gpt-4x-1f3a9c20"."""
    content = "".join(layer.model_dump_json() for layer in layers) + fingerprint.model_dump_json()
    digest = hashlib.sha256(content.encode()).hexdigest()[:8]
    model = "".join(c for c in (fingerprint.model or "") if c.isascii() and c.isalnum()).lower() or "model"
    return f"{model[:64]}-{fingerprint.world_size}x-{digest}"


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
        place = f"the tuner's exchange of {len(self._message)} numbers"
        self._exchange = self._channel.all_reduce(self._message, dist.ReduceOp.MAX, place)
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
