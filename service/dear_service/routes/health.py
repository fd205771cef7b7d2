"""Liveness and readiness, for whatever restarts the service or sends it requests."""

from __future__ import annotations

from fastapi import APIRouter, HTTPException

from dear_service.routes.dependencies import ContextOf, DatabaseThere, operation_id
from dear_service.schema import current_revision, head_revision
from dear_tune import __version__
from dear_tune.contract import Health

__all__ = ["router"]

router = APIRouter(tags=["health"], generate_unique_id_function=operation_id)


@router.get("/livez")
async def get_liveness(context: ContextOf) -> Health:
    """The process answers, whatever becomes of the database."""
    return Health(status="ok", version=__version__, time=context.clock())


@router.get("/readyz", dependencies=[DatabaseThere])
def get_readiness(context: ContextOf) -> Health:
    """The database answers too, with the schema that this version works with."""
    with context.database.read() as session:
        revision = current_revision(session.connection())
    if revision != head_revision():
        raise HTTPException(503, f"The schema is at revision {revision}, not at {head_revision()}.")
    return Health(status="ok", version=__version__, time=context.clock())
