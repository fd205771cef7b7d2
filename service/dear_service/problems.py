"""Every error leaves the service as `application/problem+json` (RFC 9457), and never echoes what was sent."""

from __future__ import annotations

import logging
from http import HTTPStatus
from typing import TYPE_CHECKING

from fastapi import Response
from fastapi.exceptions import RequestValidationError
from sqlalchemy.exc import DBAPIError, InterfaceError, OperationalError
from sqlalchemy.exc import TimeoutError as PoolTimeoutError
from starlette.exceptions import HTTPException

from dear_tune.contract import FieldError, Problem
from dear_tune.errors import ConflictError, InvalidSpaceError, NotFoundError, RequestRefusedError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from fastapi import FastAPI, Request

__all__ = ["conflict", "install", "not_found", "problem_response"]

_log = logging.getLogger(__name__)

_MAX_FIELD_ERRORS = 20
_MAX_PATH_LENGTH = 200
_RETRY_AFTER_S = 1


def not_found(detail: str) -> NotFoundError:
    """The refusal of a request about what is not there."""
    return NotFoundError(_problem(404, detail))


def conflict(detail: str, errors: Sequence[FieldError] = ()) -> ConflictError:
    """The refusal of a request that contradicts what is there."""
    return ConflictError(_problem(409, detail, errors))


def problem_response(
    status: int, detail: str, errors: Sequence[FieldError] = (), headers: Mapping[str, str] | None = None
) -> Response:
    """A problem document as an answer."""
    return _respond(_problem(status, detail, errors), headers)


def install(app: FastAPI) -> None:
    """Let an application answer every error with a problem document."""

    @app.exception_handler(RequestRefusedError)
    def refused(_: Request, error: RequestRefusedError) -> Response:
        return _respond(error.problem)

    @app.exception_handler(HTTPException)
    def raised(_: Request, error: HTTPException) -> Response:
        return problem_response(error.status_code, str(error.detail), headers=error.headers)

    @app.exception_handler(RequestValidationError)
    def invalid(_: Request, error: RequestValidationError) -> Response:
        return problem_response(422, "The request is not valid.", _field_errors(error))

    @app.exception_handler(InvalidSpaceError)
    def senseless(_: Request, error: InvalidSpaceError) -> Response:
        return problem_response(422, str(error))

    @app.exception_handler(PoolTimeoutError)
    @app.exception_handler(DBAPIError)
    def database(_: Request, error: PoolTimeoutError | DBAPIError) -> Response:
        if not _is_away(error):
            raise error
        _log.warning("The database is away: %s", error)
        headers = {"Retry-After": str(_RETRY_AFTER_S)}
        return problem_response(503, "The database cannot be reached or used right now.", headers=headers)

    @app.exception_handler(Exception)  # the server logs these, with their stack
    def unexpected(_: Request, error: Exception) -> Response:  # noqa: ARG001
        return problem_response(500, "The service failed to answer this request; its log says why.")


def _problem(status: int, detail: str, errors: Sequence[FieldError] = ()) -> Problem:
    return Problem(title=HTTPStatus(status).phrase, status=status, detail=detail, errors=tuple(errors))


def _respond(problem: Problem, headers: Mapping[str, str] | None = None) -> Response:
    return Response(problem.model_dump_json(), problem.status, headers, media_type="application/problem+json")


def _is_away(error: PoolTimeoutError | DBAPIError) -> bool:
    if isinstance(error, PoolTimeoutError | OperationalError | InterfaceError):
        return True
    return error.connection_invalidated


def _field_errors(error: RequestValidationError) -> list[FieldError]:
    return [FieldError(field=_path(each["loc"]), message=each["msg"]) for each in error.errors()[:_MAX_FIELD_ERRORS]]


def _path(location: Sequence[str | int]) -> str:
    """`("body", "iteration_times_s", 3)` as `iteration_times_s[3]`; a name from the request may be any text."""
    parts = location[1:] or location
    path = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in parts).removeprefix(".")
    return path[:_MAX_PATH_LENGTH].encode("utf-8", "replace").decode()
