from __future__ import annotations

from typing import TYPE_CHECKING, Any

import httpx
import pytest
from support.service import AppTransport, report, rows, spec

from dear_service.bodies import MAX_BODY_BYTES
from dear_tune.contract import Problem

if TYPE_CHECKING:
    from fastapi import FastAPI

    from dear_service.database import Database
    from dear_tune import Client

TRIAL = "/v1/studies/digits/trials"
REPORT = '{"worker_id": "a", "sequence": 0, "iteration_times_s": [0.1, %s]}'
STUDY = spec(name="other").model_dump(mode="json")


def refused(answer: httpx.Response) -> Problem:
    """The problem document of an answer that must be one."""
    assert 400 <= answer.status_code < 500
    assert answer.headers["content-type"] == "application/problem+json"
    problem = Problem.model_validate_json(answer.content)
    assert problem.status == answer.status_code
    return problem


@pytest.fixture(autouse=True)
def _trial(client: Client) -> None:
    client.create_study(spec())
    client.suggest("digits", "a")


@pytest.mark.parametrize(
    "value",
    [
        "NaN",
        "Infinity",
        "-Infinity",
        "1e999",
        "-0.1",
        "0",
        "1e-300",
        "true",
        '"0.1"',
        "null",
        "[0.1]",
        "{}",
        "9" * 400,
        "9" * 2_000_000,
    ],
    ids=lambda value: value[:12],
)
def test_a_time_that_is_none_is_refused_by_its_place(
    http: httpx.Client, client: Client, database: Database, value: str
) -> None:
    """What is no number of seconds from 1e-9 to 86,400 gets 422 naming it, changes no row, and stops nothing."""
    before = rows(database)
    answer = http.post(f"{TRIAL}/0:report", content=REPORT % value, headers={"Content-Type": "application/json"})
    problem = refused(answer)
    assert problem.status == 422
    assert "iteration_times_s[1]" in [error.field for error in problem.errors]
    assert len(answer.content) < 1000
    assert rows(database) == before
    assert client.report("digits", 0, report()).trial is not None


@pytest.mark.parametrize(
    ("path", "content", "status"),
    [
        (f"{TRIAL}/0:report", "[" * 100_000, 400),
        (f"{TRIAL}/0:report", '{"a":' * 100_000, 400),
        (f"{TRIAL}/0:report", "not json", 400),
        (f"{TRIAL}/0:report", b"\xff\xfe\xfd", 400),
        (f"{TRIAL}/0:report", "", 422),
        (f"{TRIAL}/0:report", "null", 422),
        (f"{TRIAL}/0:report", "[]", 422),
        (f"{TRIAL}/0:report", '{"\\ud800": 1}', 422),
        (f"{TRIAL}/0:report", '{"worker_id": "a", "sequence": -1, "iteration_times_s": [0.1]}', 422),
        (f"{TRIAL}/0:report", '{"worker_id": "a", "sequence": 2147483648, "iteration_times_s": [0.1]}', 422),
        (f"{TRIAL}/0:report", '{"worker_id": "a", "sequence": 0, "iteration_times_s": []}', 422),
        (f"{TRIAL}/0:report", '{"worker_id": "a", "sequence": 0, "iteration_times_s": [0.1], "unit": "ms"}', 422),
        (f"{TRIAL}/0:report", " " * (MAX_BODY_BYTES + 1), 413),
        (f"{TRIAL}/{'9' * 5000}:report", REPORT % "0.1", 422),
        (f"{TRIAL}/9223372036854775808:report", REPORT % "0.1", 422),
        (f"{TRIAL}/-1:report", REPORT % "0.1", 422),
        (f"{TRIAL}/0:fail", '{"worker_id": "a", "reason": ""}', 422),
        (f"{TRIAL}/0:fail", '{"worker_id": "a", "reason": "\\u0000"}', 422),
        (f"{TRIAL}:suggest", '{"worker_id": ""}', 422),
        (f"{TRIAL}:suggest", '{"worker_id": "a\\u0000b"}', 422),
        (f"{TRIAL}:suggest", '{"worker_id": "\\ud800"}', 422),
        (f"{TRIAL}:suggest", '{"worker_id": 1}', 422),
        ("/v1/studies/a%00b/trials:suggest", '{"worker_id": "a"}', 422),
        ("/v1/studies/a%2Fb/trials:suggest", '{"worker_id": "a"}', 404),
        (f"/v1/studies/{'a' * 129}/trials:suggest", '{"worker_id": "a"}', 422),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_malformed_request_changes_nothing(
    http: httpx.Client, database: Database, path: str, content: str | bytes, status: int
) -> None:
    """What is no valid request gets 4xx with a problem document, and changes no row."""
    before = rows(database)
    answer = http.post(path, content=content, headers={"Content-Type": "application/json"})
    assert refused(answer).status == status
    assert rows(database) == before


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"name": "a/b"}, "name"),
        ({"name": "a:pin"}, "name"),
        ({"name": "a\0b"}, "name"),
        ({"name": ""}, "name"),
        ({"name": "a" * 129}, "name"),
        ({"layers": []}, "layers"),
        ({"layers": [{"name": "a", "bytes": 0}]}, "layers[0].bytes"),
        ({"layers": [{"name": "a", "bytes": 1.5}]}, "layers[0].bytes"),
        ({"layers": [{"name": "a", "bytes": True}]}, "layers[0].bytes"),
        ({"layers": [{"name": "a", "bytes": 10**30}]}, "layers[0].bytes"),
        ({"fingerprint": None}, "fingerprint"),
        ({"layers": [{"name": "a", "bytes": 1, "dtpye": "float16"}]}, "layers[0].dtpye"),
        ({"fingerprint": STUDY["fingerprint"] | {"world_size": 0}}, "fingerprint.world_size"),
        ({"fingerprint": STUDY["fingerprint"] | {"wordl_size": 2}}, "fingerprint.wordl_size"),
        ({"max_trials": 10**9}, "max_trials"),
        ({"seed": "1"}, "seed"),
        ({"treshold": 1}, "treshold"),
    ],
    ids=str,
)
def test_a_malformed_study_is_not_created(
    http: httpx.Client, database: Database, changes: dict[str, Any], field: str
) -> None:
    """A study that makes no sense gets 422 naming the field, and is not kept."""
    before = rows(database)
    problem = refused(http.post("/v1/studies", json=STUDY | changes))
    assert field in [error.field for error in problem.errors]
    assert rows(database) == before


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data", "nonsense"])
def test_a_body_of_another_type_is_refused(http: httpx.Client, kind: str) -> None:
    """Only JSON is read."""
    refused(http.post(f"{TRIAL}:suggest", content='{"worker_id": "a"}', headers={"Content-Type": kind}))


@pytest.mark.parametrize(
    "query", ["page_size=0", "page_size=1001", "page_token=x", f"page_token={'9' * 5000}", "state=x"]
)
def test_a_malformed_query_is_refused(http: httpx.Client, query: str) -> None:
    """A page that cannot be meant gets 422."""
    assert refused(http.get(f"{TRIAL}?{query}")).status == 422


def test_an_unknown_path_is_not_found(http: httpx.Client) -> None:
    """A path that the contract does not know gets 404, as a problem document."""
    assert refused(http.get("/v2/studies")).status == 404


def test_another_method_is_not_allowed(http: httpx.Client) -> None:
    """A method that a path does not know gets 405 and the ones it does."""
    answer = http.put("/v1/studies")
    assert refused(answer).status == 405
    assert answer.headers["allow"]


def test_an_unexpected_error_tells_nothing(app: FastAPI, monkeypatch: pytest.MonkeyPatch) -> None:
    """A defect of the service is answered with 500, without its stack."""
    monkeypatch.setattr("dear_service.studies.page", lambda *_, **__: 1 // 0)
    with httpx.Client(transport=AppTransport(app, raise_errors=False), base_url="http://service") as http:
        answer = http.get("/v1/studies")
    assert answer.status_code == 500
    assert answer.headers["content-type"] == "application/problem+json"
    assert "ZeroDivisionError" not in answer.text


def test_operations_have_stable_names(http: httpx.Client) -> None:
    """The OpenAPI document names each operation after what it does."""
    paths = http.get("/openapi.json").json()["paths"]
    assert sorted(operation["operationId"] for path in paths.values() for operation in path.values()) == [
        "create_study",
        "fail_trial",
        "get_liveness",
        "get_readiness",
        "get_recommendation",
        "get_study",
        "get_trial",
        "list_studies",
        "list_trials",
        "report_trial",
        "suggest_trial",
    ]
