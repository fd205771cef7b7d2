from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import TYPE_CHECKING

import pytest
from sqlalchemy import update
from support.service import LEASE_S, AppTransport, Scripted, Sweep, report, rows, spec

from dear_service import store
from dear_service.models import StudyRow
from dear_tune import Client
from dear_tune.contract import Action, StudyState
from dear_tune.tuning.history import Proposal

if TYPE_CHECKING:
    from collections.abc import Callable

    from fastapi import FastAPI
    from support.service import SetClock

    from dear_service.database import Database

WORKERS = [f"worker{index}" for index in range(8)]


@pytest.fixture
def replicas(start: Callable[..., FastAPI]) -> list[Client]:
    """Two services on one database."""
    return [Client("http://service", attempts=1, transport=AppTransport(start())) for _ in range(2)]


@pytest.fixture
def sweeping_replicas(start: Callable[..., FastAPI]) -> list[Client]:
    """Two services on one database, whose tuning method stops at the budget and not before."""
    apps = [start(new_optimizer=Sweep) for _ in range(2)]
    return [Client("http://service", attempts=1, transport=AppTransport(app)) for app in apps]


def each_worker(replicas: list[Client], act: Callable[[Client, str], object]) -> list[object]:
    """What all workers get, acting at once, half of them with either replica."""
    with ThreadPoolExecutor(len(WORKERS)) as pool:
        clients = replicas * len(WORKERS)
        return list(pool.map(act, clients, WORKERS))


def test_asking_at_once_starts_one_trial_each(replicas: list[Client]) -> None:
    """Eight workers on two replicas start trials 0 to 7, of eight different plans."""
    replicas[0].create_study(spec())
    each_worker(replicas, lambda client, worker: client.suggest("digits", worker))
    trials = list(replicas[0].trials("digits"))
    assert [trial.number for trial in trials] == list(range(8))
    assert {trial.worker_id for trial in trials} == set(WORKERS)
    assert len({trial.parameters.threshold_bytes for trial in trials}) == 8


def waiting(state: StudyState) -> Proposal:
    """A proposal of nothing to measure."""
    return Proposal(threshold_bytes=None, state=state, reason="nothing now")


def test_an_old_proposal_does_not_end_a_study(
    start: Callable[..., FastAPI], client: Client, database: Database, clock: SetClock
) -> None:
    """When a trial was started while a worker's request found nothing left to try, the request starts over."""
    client.create_study(spec())

    def start_another() -> None:
        with database.write() as session:
            running = {"number": 0, "threshold_bytes": 20_000, "worker_id": "quick"}
            store.add_trial(session, 1, **running, until=clock.now + timedelta(seconds=LEASE_S), now=clock.now)

    method = Scripted(
        (start_another, waiting(StudyState.CONVERGED)),
        (lambda: None, waiting(StudyState.EXPLORING)),
    )
    slow = Client("http://service", attempts=1, transport=AppTransport(start(new_optimizer=lambda _: method)))
    assert slow.suggest("digits", "slow").recommendation.study.state is StudyState.EXPLORING
    study = client.study("digits")
    assert (study.state, study.trials.running) == (StudyState.EXPLORING, 1)


@pytest.mark.parametrize("threshold_bytes", [None, 5_000])
def test_an_old_proposal_does_not_reopen_a_study(
    start: Callable[..., FastAPI], client: Client, database: Database, threshold_bytes: int | None
) -> None:
    """When a study has converged while a worker's request went on with it, the worker is told that it is done."""
    client.create_study(spec())

    def converge() -> None:
        with database.write() as session:
            session.execute(update(StudyRow).values(state=StudyState.CONVERGED))

    old = Proposal(threshold_bytes=threshold_bytes, state=StudyState.EXPLORING, reason="one more")
    method = Scripted((converge, old))
    slow = Client("http://service", attempts=1, transport=AppTransport(start(new_optimizer=lambda _: method)))
    assert slow.suggest("digits", "slow").action is Action.DONE
    assert client.study("digits").state is StudyState.CONVERGED
    assert list(client.trials("digits")) == []


def test_one_worker_asking_many_times_at_once_starts_one_trial(replicas: list[Client]) -> None:
    """A worker whose requests were repeated before the first answer holds one trial."""
    replicas[0].create_study(spec())
    each_worker(replicas, lambda client, _: client.suggest("digits", "impatient"))
    assert [trial.worker_id for trial in replicas[0].trials("digits")] == ["impatient"]


def test_a_study_created_many_times_at_once_exists_once(replicas: list[Client]) -> None:
    """Jobs that start together share one study."""
    each_worker(replicas, lambda client, _: client.create_study(spec()))
    assert [study.name for study in replicas[0].studies()] == ["digits"]


def test_the_budget_holds_exactly(sweeping_replicas: list[Client], database: Database) -> None:
    """Eight workers that measure until nothing is left take `max_trials` trials, and lose or double no report."""
    client = sweeping_replicas[0]
    client.create_study(spec(max_trials=20))
    each_worker(sweeping_replicas, measure_all)
    assert client.study("digits").trials.completed == 20
    assert [trial.number for trial in client.trials("digits")] == list(range(20))
    assert len(rows(database)["reports"]) == 40


def measure_all(client: Client, worker: str) -> None:
    """Measure in two windows whatever the service says, until it says that there is nothing."""
    instruction = client.suggest("digits", worker)
    while instruction.action is Action.MEASURE:
        trial = instruction.trial
        assert trial is not None
        window = report(trial.next_sequence, worker_id=worker)
        instruction = client.report("digits", trial.number, window)


def test_the_same_report_many_times_at_once_counts_once(replicas: list[Client], database: Database) -> None:
    """Copies of one report that arrive together are one report, and none is refused."""
    replicas[0].create_study(spec())
    replicas[0].suggest("digits", "a")
    each_worker(replicas, lambda client, _: client.report("digits", 0, report(0)))
    assert len(rows(database)["reports"]) == 1
