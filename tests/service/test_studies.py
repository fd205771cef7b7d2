from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from support.service import report, spec

from dear_tune.contract import Fingerprint, Layer, StudyState
from dear_tune.errors import ConflictError, NotFoundError, RequestRefusedError

if TYPE_CHECKING:
    import httpx
    from support.service import SetClock

    from dear_tune import Client


def test_a_new_study_is_created(http: httpx.Client) -> None:
    """The first request for a name answers 201, and the study as it was asked for."""
    answer = http.post("/v1/studies", json=spec().model_dump(mode="json"))
    assert answer.status_code == 201
    assert answer.json() == spec().model_dump(mode="json") | {
        "state": "warming_up",
        "state_reason": "no trial has been asked for yet",
        "trials": {"queued": 0, "running": 0, "completed": 0, "pruned": 0, "failed": 0, "stale": 0},
        "distinct_plans": answer.json()["distinct_plans"],
        "default": None,
        "incumbent": None,
        "gain": None,
        "created_at": "2030-01-01T00:00:00Z",
        "last_heard_at": None,
    }


def test_the_same_study_is_found_again(http: httpx.Client) -> None:
    """The second request for a name answers 200, and the same study."""
    first = http.post("/v1/studies", json=spec().model_dump(mode="json"))
    second = http.post("/v1/studies", json=spec().model_dump(mode="json"))
    assert (second.status_code, second.json()) == (200, first.json())


def test_the_first_jobs_search_settings_stay(client: Client) -> None:
    """A later job's seed and budget do not change the study."""
    client.create_study(spec(seed=3, max_trials=12))
    assert client.create_study(spec(seed=4, max_trials=99)).max_trials == 12
    assert client.study("digits").seed == 3


@pytest.mark.parametrize(
    ("changes", "field", "message"),
    [
        (
            {"fingerprint": Fingerprint(world_size=8, backend="gloo", device="cpu", dtype="float32")},
            "fingerprint.world_size",
            "2 in the study, 8 in the request",
        ),
        ({"layers": [Layer(name="one", bytes=4)]}, "layers", "16 in the study, 1 in the request"),
        ({"default_threshold_bytes": 9}, "default_threshold_bytes", "20000 in the study, 9 in the request"),
        ({"minimum_threshold_bytes": 2}, "minimum_threshold_bytes", "1 in the study, 2 in the request"),
        (
            {"maximum_threshold_bytes": 30_000},
            "maximum_threshold_bytes",
            "1125899906842624 in the study, 30000 in the request",
        ),
    ],
)
def test_another_jobs_study_is_refused(client: Client, changes: dict[str, Any], field: str, message: str) -> None:
    """A job that differs in what makes measurements comparable gets 409, naming what differs."""
    client.create_study(spec())
    with pytest.raises(ConflictError) as refused:
        client.create_study(spec(**changes))
    assert [(error.field, error.message) for error in refused.value.problem.errors] == [(field, message)]


def test_the_first_differing_layer_is_named(client: Client) -> None:
    """Of layers that differ, the answer names the first."""
    client.create_study(spec(layers=[Layer(name="a", bytes=4), Layer(name="b", bytes=4)]))
    with pytest.raises(ConflictError, match="layer 1: name='b' bytes=4"):
        client.create_study(spec(layers=[Layer(name="a", bytes=4), Layer(name="c", bytes=4)]))


def test_a_default_outside_of_the_bounds_is_refused(client: Client) -> None:
    """A default that the search may not measure gets 422, and no study."""
    with pytest.raises(RequestRefusedError, match="must lie between") as refused:
        client.create_study(spec(maximum_threshold_bytes=100))
    assert refused.value.problem.status == 422
    assert list(client.studies()) == []


def test_an_unknown_study_is_not_found(client: Client) -> None:
    """Every endpoint of a study answers 404 for a name that nobody created."""
    for ask in (
        lambda: client.study("none"),
        lambda: client.suggest("none", "a"),
        lambda: client.report("none", 0, report()),
        lambda: client.trial("none", 0),
        lambda: list(client.trials("none")),
        lambda: client.recommendation("none"),
    ):
        with pytest.raises(NotFoundError):
            ask()


def test_studies_are_listed_newest_first(http: httpx.Client, client: Client) -> None:
    """Pages of two list five studies once each, from the newest to the oldest."""
    for name in "abcde":
        client.create_study(spec(name=name))
    pages = [http.get("/v1/studies", params={"page_size": 2}).json()]
    while token := pages[-1]["next_page_token"]:
        pages.append(http.get("/v1/studies", params={"page_size": 2, "page_token": token}).json())
    assert [[study["name"] for study in page["studies"]] for page in pages] == [["e", "d"], ["c", "b"], ["a"]]


def test_a_study_says_when_it_was_last_heard_of(client: Client, clock: SetClock) -> None:
    """A worker's request is noted, in UTC with its offset."""
    client.create_study(spec())
    clock.advance(5)
    client.suggest("digits", "a")
    study = client.study("digits")
    assert study.last_heard_at == clock.now
    assert study.created_at < clock.now


def test_a_study_without_measurements_recommends_the_default(client: Client) -> None:
    """Before anything is measured, a job runs with the default."""
    client.create_study(spec())
    recommendation = client.recommendation("digits")
    assert recommendation.parameters.threshold_bytes == 20_000
    assert recommendation.study.state is StudyState.WARMING_UP
