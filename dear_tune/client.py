"""Ask and tell over HTTP: a thin, typed client of the tuning service.

Every call is safe to send twice (creation is get-or-create, suggest and report are idempotent), so every call is
retried, a bounded number of times, when no usable answer came. Library errors become ours in one place, `_send`.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, TypeVar
from urllib.parse import quote

import httpx
from pydantic import BaseModel, ValidationError

from dear_tune.contract import (
    Failure,
    Instruction,
    Problem,
    Recommendation,
    Report,
    Study,
    StudyPage,
    StudySpec,
    StudyStatus,
    SuggestRequest,
    Trial,
    TrialDetail,
    TrialPage,
    TrialState,
)
from dear_tune.errors import (
    ConflictError,
    InvalidUrlError,
    NotFoundError,
    RequestRefusedError,
    ServiceUnavailableError,
)

if TYPE_CHECKING:
    from types import TracebackType

    from typing_extensions import Self

__all__ = ["Client"]

AnswerT = TypeVar("AnswerT", bound=BaseModel)

_REFUSALS = {404: NotFoundError, 409: ConflictError}
_FIRST_PAUSE_S = 0.1


class Client:
    """A connection to a tuning service.

    Args:
        url: where the service listens, such as "http://tuner:8000".
        timeout_s: seconds to wait for a connection, and for each answer.
        attempts: how often a call is tried in all; between tries it waits 0.1 s, 0.2 s, 0.4 s, ..., each shortened
            by a random share so that many clients do not return at the same moment.
        transport: another way to send requests, for tests.

    Every method raises `ServiceUnavailableError` when no usable answer came, and `RequestRefusedError` (or its
    `NotFoundError`, `ConflictError`) when the service refused.

    Raises:
        InvalidUrlError: `url` is no HTTP address.
    """

    def __init__(
        self,
        url: str,
        *,
        timeout_s: float = 5.0,
        attempts: int = 3,
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        self.url = _checked(url)
        self._attempts = max(attempts, 1)
        # A proxy in the environment cannot reach this machine's own loopback.
        direct = {f"all://{host}": None for host in ("127.0.0.1", "localhost", "[::1]")}
        self._http = httpx.Client(timeout=timeout_s, transport=transport, mounts=direct)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def create_study(self, spec: StudySpec) -> Study:
        """Get the study of that name, or create it; `ConflictError` if it has other layers or another cluster."""
        return self._send(Study, "POST", "/v1/studies", spec)

    def study(self, name: str) -> Study:
        """One study."""
        return self._send(Study, "GET", _path(name))

    def studies(self) -> Iterator[StudyStatus]:
        """All studies, newest first."""
        token: str | None = None
        while True:
            page = self._send(StudyPage, "GET", "/v1/studies", query={"page_token": token})
            yield from page.studies
            token = page.next_page_token
            if token is None:
                return

    def suggest(self, study: str, worker_id: str) -> Instruction:
        """What this worker should measure now: its open trial if it has one."""
        return self._send(Instruction, "POST", _path(study) + "/trials:suggest", SuggestRequest(worker_id=worker_id))

    def report(self, study: str, number: int, report: Report) -> Instruction:
        """Add measurements to a trial, and learn what to do next."""
        return self._send(Instruction, "POST", f"{_path(study)}/trials/{number}:report", report)

    def fail(self, study: str, number: int, failure: Failure) -> Trial:
        """Give a trial up, with the reason."""
        return self._send(Trial, "POST", f"{_path(study)}/trials/{number}:fail", failure)

    def trial(self, study: str, number: int) -> TrialDetail:
        """One trial with its raw measurements."""
        return self._send(TrialDetail, "GET", f"{_path(study)}/trials/{number}")

    def trials(self, study: str, *, state: TrialState | None = None) -> Iterator[Trial]:
        """All trials of a study by number, or those in one state."""
        token: str | None = None
        while True:
            query = {"page_token": token, "state": state.value if state else None}
            page = self._send(TrialPage, "GET", _path(study) + "/trials", query=query)
            yield from page.trials
            token = page.next_page_token
            if token is None:
                return

    def recommendation(self, study: str) -> Recommendation:
        """What a job should run with now."""
        return self._send(Recommendation, "GET", _path(study) + "/recommendation")

    def _send(
        self,
        answer: type[AnswerT],
        method: str,
        path: str,
        payload: BaseModel | None = None,
        query: dict[str, str | None] | None = None,
    ) -> AnswerT:
        request = self._http.build_request(
            method,
            self.url + path,
            params={name: value for name, value in (query or {}).items() if value is not None},
            content=payload.model_dump_json() if payload else None,
            headers={"Content-Type": "application/json"} if payload else None,
        )
        for attempt in range(self._attempts):
            if attempt:
                time.sleep(_FIRST_PAUSE_S * 2 ** (attempt - 1) * random.uniform(0.5, 1.0))
            try:
                return _read(answer, self._http.send(request))
            except (httpx.HTTPError, ServiceUnavailableError) as error:
                failure = error
        reason = str(failure) or type(failure).__name__
        raise ServiceUnavailableError(
            f"No usable answer from {self.url} after {self._attempts} attempts ({reason}). "
            "Is `dear-tune serve` running there?"
        ) from failure


def _checked(url: str) -> str:
    try:
        parsed = httpx.URL(url)
        parsed.host.encode("idna")  # as the socket will, whose UnicodeError httpx lets pass
    except (httpx.InvalidURL, UnicodeError) as error:
        raise InvalidUrlError(f"{url!r} is no address of a service: {error}.") from error
    if parsed.scheme not in {"http", "https"} or not parsed.host:
        raise InvalidUrlError(f"{url!r} is no address of a service; it should look like http://tuner:8000.")
    return url.rstrip("/")


def _path(study: str) -> str:
    return "/v1/studies/" + quote(study, safe="")


def _read(answer: type[AnswerT], response: httpx.Response) -> AnswerT:
    kind = response.headers.get("content-type", "").partition(";")[0]
    try:
        if response.is_success:
            return answer.model_validate_json(response.content)
        if response.is_client_error and response.status_code != 429 and kind == "application/problem+json":
            problem = Problem.model_validate_json(response.content)
            raise _REFUSALS.get(response.status_code, RequestRefusedError)(problem)
    except ValidationError as error:
        raise ServiceUnavailableError("the answer is not a dear-tune service's") from error
    raise ServiceUnavailableError(f"HTTP status {response.status_code}")
