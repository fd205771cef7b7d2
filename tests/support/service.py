"""The service in this process, a clock to set, and small literal studies."""

from __future__ import annotations

import asyncio
from datetime import datetime, timedelta, timezone
from typing import TYPE_CHECKING, Any

import httpx

from dear_service.models import Base
from dear_tune.contract import Fingerprint, Layer, Report, StudySpec, StudyState, TrialState
from dear_tune.tuning.history import Proposal

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from fastapi import FastAPI

    from dear_service.database import Database
    from dear_service.records import StudyRecord
    from dear_tune.tuning.history import Observation

LEASE_S = 60.0


class AppTransport(httpx.BaseTransport):
    """Sends requests to an application in this process, from any number of threads.

    An unexpected error in the application is raised here, unless its answer is wanted.
    """

    def __init__(self, app: FastAPI, *, raise_errors: bool = True) -> None:
        self._app = httpx.ASGITransport(app, raise_app_exceptions=raise_errors)

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        """The application's answer."""
        return asyncio.run(self._answer(request))

    async def _answer(self, request: httpx.Request) -> httpx.Response:
        response = await self._app.handle_async_request(request)
        return httpx.Response(response.status_code, headers=response.headers, content=await response.aread())


class SetClock:
    """A clock that stands still until it is told to go on."""

    def __init__(self) -> None:
        self.now = datetime(2030, 1, 1, tzinfo=timezone.utc)

    def __call__(self) -> datetime:
        """The moment that was set."""
        return self.now

    def advance(self, seconds: float) -> None:
        """Let seconds pass."""
        self.now += timedelta(seconds=seconds)


class Sweep:
    """A tuning method that takes the plans one after another, and all of its budget."""

    def __init__(self, study: StudyRecord) -> None:
        self._study = study

    def suggest(self, history: Sequence[Observation]) -> Proposal:
        """The plan of the trial's number."""
        if len(history) >= self._study.spec.max_trials:
            running = any(observation.state is TrialState.RUNNING for observation in history)
            state = StudyState.EXPLORING if running else StudyState.CONVERGED
            return Proposal(threshold_bytes=None, state=state, reason="the budget is used up")
        thresholds = self._study.space.thresholds
        threshold = thresholds[len(history) % len(thresholds)]
        return Proposal(threshold_bytes=threshold, state=StudyState.EXPLORING, reason="one after another")


class Scripted:
    """A tuning method that proposes what it is told to, one after another, and lets something happen meanwhile.

    Args:
        steps: what happens while it thinks, and what it then proposes.
    """

    def __init__(self, *steps: tuple[Callable[[], object], Proposal]) -> None:
        self._steps = iter(steps)

    def suggest(self, _: Sequence[Observation]) -> Proposal:
        """The next proposal."""
        happen, proposal = next(self._steps)
        happen()
        return proposal


def spec(**changes: Any) -> StudySpec:
    """A study of sixteen layers, with thirty-odd plans."""
    values: dict[str, Any] = {
        "name": "digits",
        "layers": [Layer(name=f"layer{index}", bytes=1000 * (index % 5 + 1)) for index in range(16)],
        "fingerprint": Fingerprint(world_size=2, backend="gloo", device="cpu", dtype="float32"),
        "default_threshold_bytes": 20_000,
        "max_trials": 12,
        "iterations_per_trial": 4,
    }
    return StudySpec(**values | changes)


def report(sequence: int = 0, *, worker_id: str = "a", times_s: tuple[float, ...] = (0.1, 0.2)) -> Report:
    """Two measurements: half of what a trial of `spec` wants."""
    return Report(worker_id=worker_id, sequence=sequence, iteration_times_s=times_s)


def rows(database: Database) -> dict[str, list[tuple[Any, ...]]]:
    """Everything the database holds."""
    with database.read() as session:
        return {
            table.name: [tuple(row) for row in session.execute(table.select())] for table in Base.metadata.sorted_tables
        }
