"""What endpoints take from the request, each named once; and what the endpoints themselves are named."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from fastapi import Depends, HTTPException, Path, Query, Request

from dear_service.context import Context

if TYPE_CHECKING:
    from fastapi.routing import APIRoute

__all__ = [
    "AfterNumber",
    "BeforeId",
    "ContextOf",
    "DatabaseThere",
    "PageSize",
    "StudyPath",
    "TrialNumber",
    "operation_id",
]

_MAX_ID = 2**63 - 1
_MAX_NUMBER = 2**31 - 1


def operation_id(route: APIRoute) -> str:
    """An endpoint's name in the OpenAPI document: stable, whatever becomes of its path."""
    return route.name


def _context(request: Request) -> Context:
    context: Context = request.app.state.context
    return context


ContextOf = Annotated[Context, Depends(_context)]


async def _require_database(context: ContextOf) -> None:
    if context.database.is_lost:  # its open connections would take reports that nobody ever finds again
        raise HTTPException(503, "The database's file is gone. Restore it, or start the service anew.")


DatabaseThere = Depends(_require_database)
StudyPath = Annotated[str, Path(max_length=128, pattern=r"^[^\x00]+$", description="The study's name.")]
TrialNumber = Annotated[int, Path(ge=0, le=_MAX_NUMBER, description="The trial's number.")]
PageSize = Annotated[int, Query(ge=1, le=1000, description="How many to answer at most.")]
BeforeId = Annotated[
    int | None, Query(alias="page_token", ge=0, le=_MAX_ID, description="`next_page_token` of the page before.")
]
AfterNumber = Annotated[
    int | None, Query(alias="page_token", ge=0, le=_MAX_NUMBER, description="`next_page_token` of the page before.")
]
