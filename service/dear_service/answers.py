"""From records to the wire contract's answers: pure, and the only place that computes what a study has come to."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from dear_tune.contract import (
    Action,
    Incumbent,
    Instruction,
    Parameters,
    Recommendation,
    Study,
    StudyStatus,
    Trial,
    TrialCounts,
    TrialDetail,
)
from dear_tune.tuning.noise import estimate
from dear_tune.tuning.summary import Summary, summarize

if TYPE_CHECKING:
    from datetime import datetime
    from typing import Any

    from dear_service.records import Snapshot, StudyRecord, TrialRecord

__all__ = ["instruction", "recommendation", "status", "study", "trial", "trial_detail"]


def status(snapshot: Snapshot) -> StudyStatus:
    """What every answer about a study says."""
    return StudyStatus(**_status(snapshot, _summary(snapshot)))


def study(snapshot: Snapshot) -> Study:
    """A study, whole."""
    spec = snapshot.study.spec
    return Study(
        **_status(snapshot, _summary(snapshot)),
        layers=spec.layers,
        fingerprint=spec.fingerprint,
        default_threshold_bytes=spec.default_threshold_bytes,
        minimum_threshold_bytes=spec.minimum_threshold_bytes,
        maximum_threshold_bytes=spec.maximum_threshold_bytes,
        seed=spec.seed,
        iterations_per_trial=spec.iterations_per_trial,
        created_at=snapshot.study.created_at,
        last_heard_at=snapshot.study.last_heard_at,
    )


def recommendation(snapshot: Snapshot) -> Recommendation:
    """What a job should run with now."""
    summary = _summary(snapshot)
    return Recommendation(
        parameters=Parameters(threshold_bytes=summary.threshold_bytes),
        buckets=snapshot.study.space.buckets(summary.threshold_bytes),
        reason=summary.reason,
        study=StudyStatus(**_status(snapshot, summary)),
    )


def instruction(snapshot: Snapshot, to_measure: TrialRecord | None) -> Instruction:
    """What a worker does next: measure a trial, or nothing more."""
    return Instruction(
        action=Action.MEASURE if to_measure else Action.DONE,
        trial=trial(snapshot.study, to_measure, snapshot.taken_at) if to_measure else None,
        recommendation=recommendation(snapshot),
    )


def trial(study: StudyRecord, record: TrialRecord, now: datetime) -> Trial:
    """One trial."""
    return Trial(**_trial(study, record, now))


def trial_detail(study: StudyRecord, record: TrialRecord, now: datetime) -> TrialDetail:
    """One trial with its raw measurements."""
    return TrialDetail(**_trial(study, record, now), iteration_times_s=record.iteration_times_s)


def _trial(study: StudyRecord, record: TrialRecord, now: datetime) -> dict[str, Any]:
    times_s = record.iteration_times_s
    return {
        "study": study.spec.name,
        "number": record.number,
        "state": record.state_at(now),
        "parameters": Parameters(threshold_bytes=record.threshold_bytes),
        "buckets": study.space.buckets(record.threshold_bytes),
        "worker_id": record.worker_id,
        "lease_expires_at": record.lease_expires_at,
        "next_sequence": record.next_sequence,
        "iterations_wanted": study.spec.iterations_per_trial,
        "iteration_time": estimate(times_s) if times_s else None,
        "failure_reason": record.failure_reason,
        "created_at": record.created_at,
        "finished_at": record.finished_at,
    }


def _status(snapshot: Snapshot, summary: Summary) -> dict[str, Any]:
    study = snapshot.study
    return {
        "name": study.spec.name,
        "state": study.state,
        "state_reason": study.state_reason,
        "trials": TrialCounts(**Counter(observation.state.value for observation in snapshot.history)),
        "max_trials": study.spec.max_trials,
        "distinct_plans": len(study.space.thresholds),
        "default": summary.default,
        "incumbent": _incumbent(snapshot, summary),
        "gain": summary.gain,
    }


def _incumbent(snapshot: Snapshot, summary: Summary) -> Incumbent | None:
    if summary.incumbent_index is None or summary.incumbent is None:
        return None
    best = snapshot.trials[summary.incumbent_index]
    return Incumbent(
        trial_number=best.number,
        parameters=Parameters(threshold_bytes=best.threshold_bytes),
        buckets=snapshot.study.space.buckets(best.threshold_bytes),
        iteration_time=summary.incumbent,
    )


def _summary(snapshot: Snapshot) -> Summary:
    return summarize(snapshot.study.space, snapshot.history)
