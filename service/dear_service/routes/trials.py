"""Trials: `/v1/studies/{study}/trials`."""

from __future__ import annotations

from fastapi import APIRouter

from dear_service import trials
from dear_service.bodies import JsonRoute
from dear_service.routes.dependencies import (
    AfterNumber,
    ContextOf,
    DatabaseThere,
    PageSize,
    StudyPath,
    TrialNumber,
    operation_id,
)
from dear_service.suggesting import suggest
from dear_tune.contract import Failure, Instruction, Report, SuggestRequest, Trial, TrialDetail, TrialPage, TrialState

__all__ = ["router"]

router = APIRouter(
    prefix="/v1/studies/{study}",
    tags=["trials"],
    route_class=JsonRoute,
    generate_unique_id_function=operation_id,
    dependencies=[DatabaseThere],
)


@router.post("/trials:suggest")
def suggest_trial(context: ContextOf, study: StudyPath, request: SuggestRequest) -> Instruction:
    """What a worker measures now: its open trial, else a queued one, else a new one."""
    return suggest(context, study, request.worker_id)


@router.get("/trials")
def list_trials(
    context: ContextOf,
    study: StudyPath,
    page_size: PageSize = 100,
    page_token: AfterNumber = None,
    state: TrialState | None = None,
) -> TrialPage:
    """A study's trials by number, in pages."""
    return trials.page(context, study, after=page_token, size=page_size, state=state)


@router.get("/trials/{number}")
def get_trial(context: ContextOf, study: StudyPath, number: TrialNumber) -> TrialDetail:
    """One trial with its raw measurements."""
    return trials.show(context, study, number)


@router.post("/trials/{number}:report")
def report_trial(context: ContextOf, study: StudyPath, number: TrialNumber, report: Report) -> Instruction:
    """Add measurements to a trial, and learn what to do next."""
    return trials.report(context, study, number, report)


@router.post("/trials/{number}:fail")
def fail_trial(context: ContextOf, study: StudyPath, number: TrialNumber, failure: Failure) -> Trial:
    """Give a trial up, with the reason."""
    return trials.fail(context, study, number, failure)
