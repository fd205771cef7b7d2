"""What is done with trials: report on, fail, look at, list. Which one comes next is in `suggesting`."""

from __future__ import annotations

from dataclasses import replace
from enum import Enum
from typing import TYPE_CHECKING

from dear_service import answers, store, studies
from dear_service.problems import conflict, not_found
from dear_service.suggesting import suggest
from dear_tune.contract import Failure, Instruction, Report, Trial, TrialDetail, TrialPage, TrialState

if TYPE_CHECKING:
    from datetime import datetime

    from sqlalchemy.orm import Session

    from dear_service.context import Context
    from dear_service.records import StudyRecord, TrialRecord

__all__ = ["fail", "page", "report", "show"]


class _Verdict(Enum):
    """What to do with a report."""

    APPEND = "append"
    REPEATED = "repeated"  # the same report came before: nothing to do
    TOO_LATE = "too late"  # the trial had all that it needs: welcome, but not counted


def report(context: Context, name: str, number: int, report: Report) -> Instruction:
    """Add measurements to a trial; what the worker does next.

    The trial's row stays locked from the decision to the commit, so reports on one trial follow one another.

    Raises:
        NotFoundError: there is no such study or trial.
        ConflictError: another worker holds the trial, it failed, or the sequence carried other measurements before.
    """
    now = context.clock()
    with context.database.write() as session:
        study, trial = _require(session, name, number, for_update=True)
        verdict = _judge(trial, report)
        if verdict is _Verdict.APPEND:
            store.add_report(session, trial.id, report, now)
            trial = replace(trial, windows_s={**trial.windows_s, report.sequence: report.iteration_times_s})
        unfinished = _renew_or_complete(context, session, study, trial, now)
        store.hear(session, study.id, now)
    if not unfinished:
        return suggest(context, name, report.worker_id)
    snapshot = studies.snapshot(context, name)
    return answers.instruction(snapshot, snapshot.trials[number])


def fail(context: Context, name: str, number: int, failure: Failure) -> Trial:
    """Give a trial up. Failing it again changes nothing: the first reason stays.

    Raises:
        NotFoundError: there is no such study or trial.
        ConflictError: another worker holds the trial, or it ended otherwise.
    """
    now = context.clock()
    with context.database.write() as session:
        study, trial = _require(session, name, number, for_update=True)
        _check_holder(trial, failure.worker_id)
        if trial.state is TrialState.RUNNING:
            store.finish_trial(session, trial.id, TrialState.FAILED, now=now, failure_reason=failure.reason)
        elif trial.state is not TrialState.FAILED:
            raise conflict(f"Trial {number} is {trial.state.value}.")
        store.hear(session, study.id, now)
        _, trial = _require(session, name, number)
    return answers.trial(study, trial, now)


def show(context: Context, name: str, number: int) -> TrialDetail:
    """One trial with its raw measurements."""
    with context.database.read() as session:
        study, trial = _require(session, name, number)
    return answers.trial_detail(study, trial, context.clock())


def page(context: Context, name: str, *, after: int | None, size: int, state: TrialState | None) -> TrialPage:
    """Trials by number, or those in one state; the page token is the last one's number."""
    now = context.clock()
    with context.database.read() as session:
        study = studies.require(session, name)
        trials = store.trial_page(session, study.id, after=after, size=size + 1, state=state, now=now)
    return TrialPage(
        trials=tuple(answers.trial(study, trial, now) for trial in trials[:size]),
        next_page_token=str(trials[size - 1].number) if len(trials) > size else None,
    )


def _require(session: Session, name: str, number: int, *, for_update: bool = False) -> tuple[StudyRecord, TrialRecord]:
    study = studies.require(session, name)
    trial = store.find_trial(session, study.id, number, for_update=for_update)
    if trial is None:
        raise not_found(f"The study {name} has no trial {number}.")
    return study, trial


def _check_holder(trial: TrialRecord, worker_id: str) -> None:
    if trial.worker_id != worker_id:
        raise conflict(f"Trial {trial.number} is held by {trial.worker_id or 'nobody'}, not by {worker_id}.")


def _judge(trial: TrialRecord, report: Report) -> _Verdict:
    _check_holder(trial, report.worker_id)
    known = trial.windows_s.get(report.sequence)
    if known == report.iteration_times_s:
        return _Verdict.REPEATED
    if known is not None:
        raise conflict(f"Trial {trial.number} has a report {report.sequence} already, with other measurements.")
    if trial.state is TrialState.FAILED:
        raise conflict(f"Trial {trial.number} failed: {trial.failure_reason}")
    return _Verdict.APPEND if trial.state is TrialState.RUNNING else _Verdict.TOO_LATE


def _renew_or_complete(
    context: Context, session: Session, study: StudyRecord, trial: TrialRecord, now: datetime
) -> bool:
    """Whether the trial goes on. Also a stale one does: its worker was heard."""
    if trial.state is not TrialState.RUNNING:
        return False
    if len(trial.iteration_times_s) >= study.spec.iterations_per_trial:
        store.finish_trial(session, trial.id, TrialState.COMPLETED, now=now)
        return False
    assert trial.worker_id is not None  # a running trial has one
    return store.lease_trial(session, trial.id, worker_id=trial.worker_id, until=now + context.lease)
