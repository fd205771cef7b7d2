"""The tables. Whatever they imply (counts, estimates, the incumbent, a stale trial) is computed, not stored."""

from __future__ import annotations

from datetime import datetime, timezone
from enum import Enum
from typing import TYPE_CHECKING, Any

from sqlalchemy import JSON, BigInteger, DateTime, ForeignKey, Index, Integer, String, Text, UniqueConstraint, text
from sqlalchemy import Enum as EnumType
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column
from sqlalchemy.types import TypeDecorator

from dear_tune.contract import StudyState, TrialState

if TYPE_CHECKING:
    from sqlalchemy import Dialect

__all__ = ["Base", "ReportRow", "StudyRow", "TrialRow", "UtcDateTime"]


class UtcDateTime(TypeDecorator[datetime]):
    """A moment in UTC with its offset, also on SQLite, which drops time zones."""

    impl = DateTime(timezone=True)
    cache_ok = True

    def process_bind_param(self, value: datetime | None, dialect: Dialect) -> datetime | None:  # noqa: ARG002 - SQLAlchemy passes it
        """To UTC, so that SQLite's texts compare as moments do."""
        return value.astimezone(timezone.utc) if value else None

    def process_result_value(self, value: datetime | None, dialect: Dialect) -> datetime | None:  # noqa: ARG002 - SQLAlchemy passes it
        """From UTC, whether or not the database says so."""
        if value is None:
            return None
        return value.replace(tzinfo=timezone.utc) if value.tzinfo is None else value.astimezone(timezone.utc)


def _named(states: type[Enum]) -> EnumType:
    """States as the texts that the wire carries; a later state then needs no migration."""
    return EnumType(
        states, native_enum=False, length=16, values_callable=lambda states: [state.value for state in states]
    )


_Id = BigInteger().with_variant(Integer, "sqlite")  # SQLite numbers rows by itself only in a column of this type


class Base(DeclarativeBase):
    """The schema."""

    type_annotation_map = {datetime: UtcDateTime}  # noqa: RUF012 - SQLAlchemy reads it as it is


class StudyRow(Base):
    """A study as it was asked for, and where the search stands."""

    __tablename__ = "studies"

    id: Mapped[int] = mapped_column(_Id, primary_key=True)
    name: Mapped[str] = mapped_column(String(128), unique=True)
    layers: Mapped[list[dict[str, Any]]] = mapped_column(JSON)
    fingerprint: Mapped[dict[str, Any]] = mapped_column(JSON)
    default_threshold_bytes: Mapped[int] = mapped_column(BigInteger)
    minimum_threshold_bytes: Mapped[int] = mapped_column(BigInteger)
    maximum_threshold_bytes: Mapped[int] = mapped_column(BigInteger)
    seed: Mapped[int]
    max_trials: Mapped[int]
    iterations_per_trial: Mapped[int]
    state: Mapped[StudyState] = mapped_column(_named(StudyState))
    state_reason: Mapped[str] = mapped_column(Text)
    created_at: Mapped[datetime]
    last_heard_at: Mapped[datetime | None]


class TrialRow(Base):
    """A trial. Its number is unique in the study; a worker runs at most one trial of a study at a time."""

    __tablename__ = "trials"
    __table_args__ = (
        UniqueConstraint("study_id", "number", name="uq_trials_study_number"),
        Index(
            "uq_trials_study_running_worker",
            "study_id",
            "worker_id",
            unique=True,
            sqlite_where=text("state = 'running'"),
            postgresql_where=text("state = 'running'"),
        ),
        Index("ix_trials_study_state_number", "study_id", "state", "number"),
    )

    id: Mapped[int] = mapped_column(_Id, primary_key=True)
    study_id: Mapped[int] = mapped_column(ForeignKey("studies.id", ondelete="CASCADE"))
    number: Mapped[int]
    threshold_bytes: Mapped[int] = mapped_column(BigInteger)
    state: Mapped[TrialState] = mapped_column(_named(TrialState))
    worker_id: Mapped[str | None] = mapped_column(String(128))
    lease_expires_at: Mapped[datetime | None]
    failure_reason: Mapped[str | None] = mapped_column(Text)
    created_at: Mapped[datetime]
    finished_at: Mapped[datetime | None]


class ReportRow(Base):
    """One window of measurements of a trial, in seconds; its sequence is unique in the trial."""

    __tablename__ = "reports"
    __table_args__ = (UniqueConstraint("trial_id", "sequence", name="uq_reports_trial_sequence"),)

    id: Mapped[int] = mapped_column(_Id, primary_key=True)
    trial_id: Mapped[int] = mapped_column(ForeignKey("trials.id", ondelete="CASCADE"))
    sequence: Mapped[int]
    worker_id: Mapped[str] = mapped_column(String(128))
    iteration_times_s: Mapped[list[float]] = mapped_column(JSON)
    received_at: Mapped[datetime]
