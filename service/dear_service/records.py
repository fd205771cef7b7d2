"""Studies and trials as plain, frozen values: what the store returns and everything above it works with."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain
from typing import TYPE_CHECKING

from dear_tune.contract import StudySpec, StudyState, TrialState
from dear_tune.fusion import PlanSpace
from dear_tune.tuning.history import Observation

if TYPE_CHECKING:
    from collections.abc import Mapping
    from datetime import datetime

    from typing_extensions import Self

__all__ = ["Snapshot", "StudyRecord", "TrialRecord"]


@dataclass(frozen=True, kw_only=True)
class StudyRecord:
    """A study without its trials."""

    id: int
    spec: StudySpec
    state: StudyState
    state_reason: str
    created_at: datetime
    last_heard_at: datetime | None

    @cached_property
    def space(self) -> PlanSpace:
        """The candidates of the search."""
        return PlanSpace.of(self.spec)


@dataclass(frozen=True, kw_only=True)
class TrialRecord:
    """A trial with its measurements.

    Attributes:
        state: as stored: a trial whose lease has run out is still running here, see `state_at`.
        windows_s: the reported iteration times in seconds, by the report's sequence, ascending.
    """

    id: int
    number: int
    threshold_bytes: int
    state: TrialState
    worker_id: str | None
    lease_expires_at: datetime | None
    failure_reason: str | None
    created_at: datetime
    finished_at: datetime | None
    windows_s: Mapping[int, tuple[float, ...]] = field(default_factory=dict)

    @property
    def iteration_times_s(self) -> tuple[float, ...]:
        """All measurements, in the order of the reports' sequence."""
        return tuple(chain.from_iterable(self.windows_s.values()))

    @property
    def next_sequence(self) -> int:
        """The first sequence after those reported."""
        return max(self.windows_s, default=-1) + 1

    def state_at(self, now: datetime) -> TrialState:
        """Running turns into stale by the mere passing of time, and back when the worker is heard again."""
        expired = self.lease_expires_at is not None and self.lease_expires_at <= now
        return TrialState.STALE if self.state is TrialState.RUNNING and expired else self.state


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """A study and all its trials by number, at one moment."""

    study: StudyRecord
    trials: tuple[TrialRecord, ...]
    taken_at: datetime

    @cached_property
    def history(self) -> tuple[Observation, ...]:
        """The trials as the tuning method sees them."""
        return tuple(
            Observation(
                threshold_bytes=trial.threshold_bytes,
                state=trial.state_at(self.taken_at),
                iteration_times_s=trial.iteration_times_s,
            )
            for trial in self.trials
        )

    def next_for(self, worker_id: str) -> TrialRecord | None:
        """The trial to hand to a worker: its own open one, running or stale, else the first in the queue."""
        own = (trial for trial in self.trials if trial.state is TrialState.RUNNING and trial.worker_id == worker_id)
        queued = (trial for trial in self.trials if trial.state is TrialState.QUEUED)
        return next(chain(own, queued), None)

    def with_trial(self, trial: TrialRecord) -> Self:
        """The same moment with one trial changed, or with the next one added."""
        return replace(self, trials=(*self.trials[: trial.number], trial, *self.trials[trial.number + 1 :]))
