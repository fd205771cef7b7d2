"""All SQL. Each function is a few statements in the caller's transaction, and gives and takes plain values.

What may be written is decided here by conditions and UNIQUE constraints, never by what a process remembers, so any
number of threads and services may share one database. Locks are taken in the order trial, study.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

from sqlalchemy import and_, func, or_, select, update

from dear_service.models import ReportRow, StudyRow, TrialRow
from dear_service.records import Snapshot, StudyRecord, TrialRecord
from dear_tune.contract import Report, StudySpec, StudyState, TrialState

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from datetime import datetime

    from sqlalchemy import ColumnElement
    from sqlalchemy.orm import Session

    from dear_tune.tuning.history import Proposal

__all__ = [
    "add_report",
    "add_study",
    "add_trial",
    "find_study",
    "find_trial",
    "finish_trial",
    "hear",
    "lease_trial",
    "settle",
    "snapshots",
    "study_page",
    "trial_page",
]

_SPEC_COLUMNS = StudySpec.model_fields.keys()


def find_study(session: Session, name: str) -> StudyRecord | None:
    """The study of that name."""
    row = session.scalar(select(StudyRow).where(StudyRow.name == name))
    return _study(row) if row else None


def study_page(session: Session, *, before_id: int | None, size: int) -> list[StudyRecord]:
    """Studies, newest first, from just before an id."""
    query = select(StudyRow).order_by(StudyRow.id.desc()).limit(size)
    if before_id is not None:
        query = query.where(StudyRow.id < before_id)
    return [_study(row) for row in session.scalars(query)]


def add_study(session: Session, spec: StudySpec, *, reason: str, now: datetime) -> StudyRecord:
    """Create a study; IntegrityError if the name is taken."""
    row = StudyRow(
        **spec.model_dump(mode="json"),
        state=StudyState.WARMING_UP,
        state_reason=reason,
        created_at=now,
    )
    session.add(row)
    session.flush()
    return _study(row)


def hear(session: Session, study_id: int, now: datetime) -> None:
    """Note that a worker of the study was heard."""
    session.execute(update(StudyRow).where(StudyRow.id == study_id).values(last_heard_at=now))


def settle(session: Session, seen: Snapshot, proposal: Proposal, now: datetime) -> bool:
    """Note where a proposal says that the study stands; False if the study is no longer as the proposal saw it.

    What it saw are the study's state and trials, and the trial that this transaction has started upon it, if any.
    """
    row = StudyRow.id == seen.study.id
    # PostgreSQL counts what was committed before a statement began: whoever holds the row must be done by then.
    session.execute(select(StudyRow.id).where(row).with_for_update(key_share=True))
    trials = select(func.count()).where(TrialRow.study_id == seen.study.id).scalar_subquery()
    changed = session.scalar(
        update(StudyRow)
        .where(row, StudyRow.state == seen.study.state, trials == len(seen.trials))
        .values(state=proposal.state, state_reason=proposal.reason, last_heard_at=now)
        .returning(StudyRow.id)
    )
    return changed is not None


def snapshots(session: Session, studies: Sequence[StudyRecord], now: datetime) -> list[Snapshot]:
    """Studies with all their trials, in two statements however many there are."""
    ids = [study.id for study in studies]
    rows = session.scalars(select(TrialRow).where(TrialRow.study_id.in_(ids)).order_by(TrialRow.number)).all()
    records = zip(rows, _with_windows(session, rows, TrialRow.study_id.in_(ids)), strict=True)
    trials = defaultdict(list)
    for row, record in records:
        trials[row.study_id].append(record)
    return [Snapshot(study=study, trials=tuple(trials[study.id]), taken_at=now) for study in studies]


def find_trial(session: Session, study_id: int, number: int, *, for_update: bool = False) -> TrialRecord | None:
    """One trial with its measurements; `for_update` keeps others from changing it until the transaction ends."""
    query = select(TrialRow).where(TrialRow.study_id == study_id, TrialRow.number == number)
    row = session.scalar(query.with_for_update() if for_update else query)
    return _with_windows(session, [row], TrialRow.id == row.id)[0] if row else None


def trial_page(
    session: Session, study_id: int, *, after: int | None, size: int, state: TrialState | None, now: datetime
) -> list[TrialRecord]:
    """Trials by number, from just after one."""
    query = select(TrialRow).where(TrialRow.study_id == study_id).order_by(TrialRow.number).limit(size)
    if after is not None:
        query = query.where(TrialRow.number > after)
    if state is not None:
        query = query.where(_in_state(state, now))
    rows = session.scalars(query).all()
    return _with_windows(session, rows, TrialRow.id.in_([row.id for row in rows]))


def add_trial(
    session: Session,
    study_id: int,
    *,
    number: int,
    threshold_bytes: int,
    worker_id: str,
    until: datetime,
    now: datetime,
) -> TrialRecord:
    """Start a trial; IntegrityError if the number is taken, or if the worker has a running trial already."""
    row = TrialRow(
        study_id=study_id,
        number=number,
        threshold_bytes=threshold_bytes,
        state=TrialState.RUNNING,
        worker_id=worker_id,
        lease_expires_at=until,
        created_at=now,
    )
    session.add(row)
    session.flush()
    return _trial(row, {})


def lease_trial(session: Session, trial_id: int, *, worker_id: str, until: datetime) -> bool:
    """Give a worker a queued trial, or more time for its own; False if neither holds any more.

    IntegrityError if the trial was queued and the worker has a running trial already.
    """
    own = and_(TrialRow.state == TrialState.RUNNING, TrialRow.worker_id == worker_id)
    changed = session.scalar(
        update(TrialRow)
        .where(TrialRow.id == trial_id, or_(TrialRow.state == TrialState.QUEUED, own))
        .values(state=TrialState.RUNNING, worker_id=worker_id, lease_expires_at=until)
        .returning(TrialRow.id)
    )
    return changed is not None


def finish_trial(
    session: Session, trial_id: int, state: TrialState, *, now: datetime, failure_reason: str | None = None
) -> None:
    """End a trial that `find_trial` has locked."""
    values = {"state": state, "lease_expires_at": None, "finished_at": now, "failure_reason": failure_reason}
    session.execute(update(TrialRow).where(TrialRow.id == trial_id).values(values))


def add_report(session: Session, trial_id: int, report: Report, now: datetime) -> None:
    """Append a window of measurements; IntegrityError if the sequence is taken."""
    session.add(
        ReportRow(
            trial_id=trial_id,
            sequence=report.sequence,
            worker_id=report.worker_id,
            iteration_times_s=list(report.iteration_times_s),
            received_at=now,
        )
    )
    session.flush()


def _in_state(state: TrialState, now: datetime) -> ColumnElement[bool]:
    """The condition that `TrialRecord.state_at` says this state."""
    running = TrialRow.state == TrialState.RUNNING
    if state is TrialState.RUNNING:
        return and_(running, TrialRow.lease_expires_at > now)
    if state is TrialState.STALE:
        return and_(running, TrialRow.lease_expires_at <= now)
    return TrialRow.state == state


def _with_windows(session: Session, rows: Iterable[TrialRow], which: ColumnElement[bool]) -> list[TrialRecord]:
    """Rows with their measurements; `which` is the condition by which the rows were found."""
    reports = session.execute(
        select(ReportRow.trial_id, ReportRow.sequence, ReportRow.iteration_times_s)
        .join(TrialRow, TrialRow.id == ReportRow.trial_id)
        .where(which)
        .order_by(ReportRow.trial_id, ReportRow.sequence)
    )
    windows: defaultdict[int, dict[int, tuple[float, ...]]] = defaultdict(dict)
    for trial_id, sequence, times_s in reports:
        windows[trial_id][sequence] = tuple(times_s)
    return [_trial(row, windows[row.id]) for row in rows]


def _study(row: StudyRow) -> StudyRecord:
    return StudyRecord(
        id=row.id,
        spec=StudySpec.model_validate({name: getattr(row, name) for name in _SPEC_COLUMNS}),
        state=row.state,
        state_reason=row.state_reason,
        created_at=row.created_at,
        last_heard_at=row.last_heard_at,
    )


def _trial(row: TrialRow, windows_s: dict[int, tuple[float, ...]]) -> TrialRecord:
    return TrialRecord(
        id=row.id,
        number=row.number,
        threshold_bytes=row.threshold_bytes,
        state=row.state,
        worker_id=row.worker_id,
        lease_expires_at=row.lease_expires_at,
        failure_reason=row.failure_reason,
        created_at=row.created_at,
        finished_at=row.finished_at,
        windows_s=windows_s,
    )
