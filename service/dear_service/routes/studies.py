"""Studies: `/v1/studies`."""

from __future__ import annotations

from fastapi import APIRouter, Response, status

from dear_service import studies
from dear_service.bodies import JsonRoute
from dear_service.routes.dependencies import BeforeId, ContextOf, DatabaseThere, PageSize, StudyPath, operation_id
from dear_tune.contract import Recommendation, Study, StudyPage, StudySpec

__all__ = ["router"]

router = APIRouter(
    prefix="/v1/studies",
    tags=["studies"],
    route_class=JsonRoute,
    generate_unique_id_function=operation_id,
    dependencies=[DatabaseThere],
)


@router.post("", status_code=status.HTTP_201_CREATED, responses={200: {"description": "The study existed."}})
def create_study(context: ContextOf, spec: StudySpec, response: Response) -> Study:
    """Get the study of that name, or create it."""
    study, created = studies.get_or_create(context, spec)
    if not created:
        response.status_code = status.HTTP_200_OK
    return study


@router.get("")
def list_studies(context: ContextOf, page_size: PageSize = 50, page_token: BeforeId = None) -> StudyPage:
    """All studies, newest first, in pages."""
    return studies.page(context, before_id=page_token, size=page_size)


@router.get("/{study}")
def get_study(context: ContextOf, study: StudyPath) -> Study:
    """One study, whole."""
    return studies.show(context, study)


@router.get("/{study}/recommendation")
def get_recommendation(context: ContextOf, study: StudyPath) -> Recommendation:
    """What a job should run with now, and why."""
    return studies.recommend(context, study)
