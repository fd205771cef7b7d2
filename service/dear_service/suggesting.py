"""Which trial a worker measures next: read, decide, write on condition, and if somebody was quicker, again.

    read     one snapshot of the study and all its trials
    decide   the worker's own open trial, else a queued one, else what the tuning method proposes from the snapshot
    write    the lease, if the trial is still the worker's or still queued; or a trial whose number is the count of
             trials in the snapshot, and the study's new state, if it has the snapshot's state and trials still

UNIQUE(study, number) makes a new trial fail when another one was started since the snapshot, so every proposal
rests on all trials before it, and `max_trials` holds exactly. UNIQUE(study, worker) over the running trials makes
it fail when the same worker asked twice at once. A proposal without a trial has no number that could be taken: the
condition on the state's write keeps an old one from going over a newer. Each failure is another request's success, so
trying again ends. The tuning method runs outside of any transaction: it may take its time while others report.
"""

from __future__ import annotations

import threading
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING

from fastapi import HTTPException
from sqlalchemy.exc import IntegrityError

from dear_service import answers, store, studies
from dear_tune.contract import Instruction, StudyState, TrialState

if TYPE_CHECKING:
    from sqlalchemy.orm import Session

    from dear_service.context import Context
    from dear_service.records import Snapshot, TrialRecord
    from dear_tune.tuning.history import Proposal

__all__ = ["suggest"]

_ATTEMPTS = 100

# scikit-learn and scikit-optimize silence warnings while they fit, by filters that belong to the whole process: two
# threads doing so at once undo each other's. Fits hold the interpreter most of the time anyway.
_one_at_a_time = threading.Lock()


def suggest(context: Context, name: str, worker_id: str) -> Instruction:
    """What the worker does next; asking again gives the same trial until it ends, and renews its lease.

    Raises:
        NotFoundError: there is no such study.
    """
    with context.suggesting.hold(name):
        for _ in range(_ATTEMPTS):
            with suppress(IntegrityError, _OutdatedError):
                return _attempt(context, studies.snapshot(context, name), worker_id)
    raise HTTPException(503, "Too many workers ask for trials of this study at once.")


class _OutdatedError(Exception):
    """Something was written since the snapshot that the decision rests on."""


def _attempt(context: Context, snapshot: Snapshot, worker_id: str) -> Instruction:
    trial = snapshot.next_for(worker_id)
    if trial is not None:
        return _lease(context, snapshot, trial, worker_id)
    if snapshot.study.state is StudyState.CONVERGED:
        return answers.instruction(snapshot, None)
    with _one_at_a_time:
        proposal = context.new_optimizer(snapshot.study).suggest(snapshot.history)
    return _follow(context, snapshot, proposal, worker_id)


def _lease(context: Context, snapshot: Snapshot, trial: TrialRecord, worker_id: str) -> Instruction:
    until = snapshot.taken_at + context.lease
    with context.database.write() as session:
        if not store.lease_trial(session, trial.id, worker_id=worker_id, until=until):
            raise _OutdatedError
        store.hear(session, snapshot.study.id, snapshot.taken_at)
    leased = replace(trial, state=TrialState.RUNNING, worker_id=worker_id, lease_expires_at=until)
    return answers.instruction(snapshot.with_trial(leased), leased)


def _follow(context: Context, snapshot: Snapshot, proposal: Proposal, worker_id: str) -> Instruction:
    now = context.clock()  # the tuning method took its time: the lease begins here
    snapshot = replace(snapshot, taken_at=now)
    with context.database.write() as session:
        trial = _start(context, session, snapshot, proposal.threshold_bytes, worker_id)
        snapshot = snapshot.with_trial(trial) if trial else snapshot
        if not store.settle(session, snapshot, proposal, now):
            raise _OutdatedError
    settled = replace(snapshot.study, state=proposal.state, state_reason=proposal.reason)
    return answers.instruction(replace(snapshot, study=settled), trial)


def _start(
    context: Context, session: Session, snapshot: Snapshot, threshold_bytes: int | None, worker_id: str
) -> TrialRecord | None:
    if threshold_bytes is None:
        return None
    return store.add_trial(
        session,
        snapshot.study.id,
        number=len(snapshot.trials),
        threshold_bytes=threshold_bytes,
        worker_id=worker_id,
        until=snapshot.taken_at + context.lease,
        now=snapshot.taken_at,
    )
