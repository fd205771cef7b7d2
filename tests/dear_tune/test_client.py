from __future__ import annotations

from collections.abc import Callable

import httpx
import pytest
from support.landscapes import spec_of

from dear_tune import client as client_module
from dear_tune.client import Client
from dear_tune.errors import (
    ConflictError,
    InvalidUrlError,
    NotFoundError,
    RequestRefusedError,
    ServiceUnavailableError,
)
from dear_tune.testing import FakeService


@pytest.fixture(autouse=True)
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The pauses between attempts, in seconds, not waited for."""
    waited: list[float] = []
    monkeypatch.setattr(client_module.time, "sleep", waited.append)
    return waited


def answering(answer: Callable[[httpx.Request], httpx.Response], **settings: int) -> Client:
    """A client of a service that always does this."""
    return Client("http://fake", transport=httpx.MockTransport(answer), **settings)


def problem(status: int, **fields: object) -> httpx.Response:
    """A problem document."""
    document = {"title": "No", "status": status, "detail": "because", **fields}
    return httpx.Response(status, json=document, headers={"content-type": "application/problem+json; charset=utf-8"})


@pytest.mark.parametrize(
    "url", ["not a url", "", "tuner:8000", "ftp://tuner", "http://", "http://tuner:port", "http://a..b"]
)
def test_an_address_that_is_none_is_refused(url: str) -> None:
    """A client of something that is no HTTP address cannot be made, and the message repeats it."""
    with pytest.raises(InvalidUrlError) as caught:
        Client(url)
    assert repr(url) in str(caught.value)


def test_the_timeout_bounds_every_wait() -> None:
    """Connecting, sending and each answer wait at most as long as the client was told."""
    seen: list[dict[str, float]] = []

    def answer(request: httpx.Request) -> httpx.Response:
        seen.append(request.extensions["timeout"])
        raise httpx.ReadTimeout("", request=request)

    with pytest.raises(ServiceUnavailableError, match="ReadTimeout"):
        Client("http://fake", timeout_s=0.5, attempts=1, transport=httpx.MockTransport(answer)).study("a")
    assert seen == [{"connect": 0.5, "read": 0.5, "write": 0.5, "pool": 0.5}]


def test_attempts_are_bounded() -> None:
    """A service that is down is asked as often as the client was told, and no more."""
    service = FakeService()
    service.down = True
    with pytest.raises(ServiceUnavailableError, match="after 4 attempts"):
        Client("http://fake", attempts=4, transport=service).study("a")
    assert len(service.requests) == 4


def test_pauses_grow_and_vary(pauses: list[float]) -> None:
    """Between attempts the client waits half to whole of 0.1, 0.2, 0.4 seconds."""
    service = FakeService()
    service.down = True
    with pytest.raises(ServiceUnavailableError):
        Client("http://fake", attempts=4, transport=service).study("a")
    assert [longest / 2 <= pause <= longest for pause, longest in zip(pauses, (0.1, 0.2, 0.4), strict=True)] == [
        True
    ] * 3


def test_a_second_attempt_may_succeed() -> None:
    """A call that fails once and then succeeds is a success."""
    service = FakeService()
    answers = iter([httpx.Response(503)])
    client = answering(lambda request: next(answers, None) or service.handle_request(request))
    assert client.create_study(spec_of(1)).name == "study"


@pytest.mark.parametrize("status", [204, 302, 404, 429, 500, 503])
def test_an_answer_without_a_document_is_no_answer(status: int) -> None:
    """A bare status, as proxies send it, means that the service is not there."""
    with pytest.raises(ServiceUnavailableError):
        answering(lambda _: httpx.Response(status)).study("a")


@pytest.mark.parametrize("body", [b"", b"<html>", b"[]", b"{}", b"\xff\xfe", b"[" * 100_000, b"9" * 10_000])
def test_garbage_is_no_answer(body: bytes) -> None:
    """A success whose body is not what was asked for means that this is not a dear-tune service."""
    with pytest.raises(ServiceUnavailableError, match="not a dear-tune service"):
        answering(lambda _: httpx.Response(200, content=body)).study("a")


@pytest.mark.parametrize(("status", "error"), [(404, NotFoundError), (409, ConflictError), (422, RequestRefusedError)])
def test_problems_become_errors(status: int, error: type[Exception]) -> None:
    """A problem document becomes the error of its status, with its detail."""
    with pytest.raises(error, match="because"):
        answering(lambda _: problem(status)).study("a")


def test_refusals_are_not_repeated() -> None:
    """A request that the service refused is sent once."""
    requests: list[httpx.Request] = []

    def answer(request: httpx.Request) -> httpx.Response:
        requests.append(request)
        return problem(422)

    with pytest.raises(RequestRefusedError):
        answering(answer).study("a")
    assert len(requests) == 1


def test_refusals_name_the_fields() -> None:
    """The message says which field is wrong, and how."""
    wrong = [{"field": "iteration_times_s[3]", "message": "must be finite"}]
    with pytest.raises(RequestRefusedError, match=r"iteration_times_s\[3\]: must be finite"):
        answering(lambda _: problem(422, errors=wrong)).study("a")


def test_pages_are_followed() -> None:
    """All pages of a list are fetched, each with the token of the one before."""
    tokens: list[str | None] = []

    def answer(request: httpx.Request) -> httpx.Response:
        tokens.append(request.url.params.get("page_token"))
        return httpx.Response(200, json={"trials": [], "next_page_token": "two" if len(tokens) == 1 else None})

    assert list(answering(answer).trials("a")) == []
    assert tokens == [None, "two"]


def test_names_are_quoted() -> None:
    """A study's name cannot leave its place in the path."""
    paths: list[bytes] = []

    def answer(request: httpx.Request) -> httpx.Response:
        paths.append(request.url.raw_path)
        return problem(404)

    with pytest.raises(NotFoundError):
        answering(answer).study("../a?b")
    assert paths == [b"/v1/studies/..%2Fa%3Fb"]


def test_loopback_goes_past_a_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    """A proxy that the environment names is not asked for a service on this machine."""
    monkeypatch.setenv("http_proxy", "http://192.0.2.1:3128")
    service = FakeService()
    with Client("http://127.0.0.1:8000", transport=service, attempts=1) as client:
        assert list(client.studies()) == []
    assert service.requests == [("GET", "/v1/studies")]
