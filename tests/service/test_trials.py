from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from sqlalchemy import insert
from support.service import LEASE_S, report, rows, spec

from dear_service.models import TrialRow
from dear_tune.contract import (
    LONGEST_ITERATION_S,
    SHORTEST_ITERATION_S,
    Action,
    Failure,
    Instruction,
    StudyState,
    Trial,
    TrialState,
)
from dear_tune.errors import ConflictError, NotFoundError

if TYPE_CHECKING:
    import httpx
    from support.service import SetClock

    from dear_service.database import Database
    from dear_tune import Client


@pytest.fixture(autouse=True)
def _study(client: Client) -> None:
    client.create_study(spec())


def start(client: Client, worker_id: str = "a") -> Trial:
    """The trial that a worker is told to measure."""
    trial = client.suggest("digits", worker_id).trial
    assert trial is not None
    return trial


def test_the_first_trial_measures_the_default(client: Client, clock: SetClock) -> None:
    """Trial 0 has the default threshold; its worker holds it for a lease."""
    trial = start(client)
    assert (trial.number, trial.parameters.threshold_bytes, trial.state) == (0, 20_000, TrialState.RUNNING)
    assert (trial.worker_id, trial.next_sequence, trial.iterations_wanted) == ("a", 0, 4)
    assert trial.lease_expires_at is not None
    assert (trial.lease_expires_at - clock.now).total_seconds() == LEASE_S


def test_asking_again_gives_the_same_trial_and_renews_its_lease(client: Client, clock: SetClock) -> None:
    """A worker that asks while it holds a trial is given that trial, for another lease."""
    first = start(client)
    clock.advance(LEASE_S / 2)
    again = start(client)
    assert again.number == first.number
    assert again.lease_expires_at is not None
    assert (again.lease_expires_at - clock.now).total_seconds() == LEASE_S


def test_workers_measure_different_plans(client: Client) -> None:
    """Eight workers that ask before any result hold eight numbers and eight plans."""
    trials = [start(client, f"worker{index}") for index in range(8)]
    assert [trial.number for trial in trials] == list(range(8))
    assert len({trial.parameters.threshold_bytes for trial in trials}) == 8


def test_a_queued_trial_goes_before_a_new_one(client: Client, database: Database, clock: SetClock) -> None:
    """A trial in the queue is handed out once, to the first worker that asks."""
    with database.write() as session:
        queued = {"study_id": 1, "number": 0, "threshold_bytes": 777, "state": TrialState.QUEUED}
        session.execute(insert(TrialRow).values(**queued, created_at=clock.now))
    assert start(client, "a").parameters.threshold_bytes == 777
    assert start(client, "b").number == 1


def test_measurements_complete_a_trial_and_the_answer_carries_the_next(client: Client) -> None:
    """One round trip a window: half of the measurements go on with the trial, all of them start another."""
    trial = start(client)
    half = client.report("digits", trial.number, report(0))
    assert half.trial is not None
    assert (half.action, half.trial.number, half.trial.next_sequence) == (Action.MEASURE, 0, 1)
    whole = client.report("digits", trial.number, report(1))
    assert whole.trial is not None
    assert (whole.action, whole.trial.number, whole.trial.next_sequence) == (Action.MEASURE, 1, 0)
    detail = client.trial("digits", 0)
    assert (detail.state, detail.iteration_times_s) == (TrialState.COMPLETED, (0.1, 0.2, 0.1, 0.2))
    assert detail.iteration_time is not None
    assert detail.iteration_time.iterations == 4


def test_a_study_is_tuned_until_it_converges(client: Client) -> None:
    """A worker that measures what it is told ends with a faster plan than the default, and with nothing to do."""
    instruction = client.suggest("digits", "a")
    while instruction.trial is not None:
        instruction = measure(client, instruction.trial)
    status = instruction.recommendation.study
    assert status.state is StudyState.CONVERGED
    assert status.gain is not None
    assert status.gain.low > 0
    assert instruction.recommendation.parameters.threshold_bytes < 20_000
    assert client.suggest("digits", "b").action is Action.DONE
    assert status.trials.completed <= 12


def measure(client: Client, trial: Trial, worker_id: str = "a") -> Instruction:
    """Report a trial whole; small thresholds are fast."""
    second = trial.parameters.threshold_bytes / 1e5
    times_s = (second, second * 1.01, second * 0.99, second)
    return client.report("digits", trial.number, report(worker_id=worker_id, times_s=times_s))


def test_the_same_report_twice_counts_once(client: Client, database: Database) -> None:
    """A repeated report gets the first one's answer, and adds no row."""
    start(client)
    first = client.report("digits", 0, report(0))
    before = rows(database)
    assert client.report("digits", 0, report(0)) == first
    assert rows(database) == before


def test_the_last_report_twice_gives_the_same_next_trial(client: Client) -> None:
    """Also a report that completed its trial is answered twice alike."""
    start(client)
    client.report("digits", 0, report(0))
    first = client.report("digits", 0, report(1))
    assert client.report("digits", 0, report(1)) == first
    assert [trial.number for trial in client.trials("digits")] == [0, 1]


def test_any_measurements_leave_every_answer_standing(client: Client) -> None:
    """Times as far apart as a report admits, on the default and on the incumbent, break no answer about the study."""
    extreme = (SHORTEST_ITERATION_S, LONGEST_ITERATION_S) * 2
    for _ in range(4):
        client.report("digits", start(client).number, report(times_s=extreme))
    assert [study.trials.completed for study in client.studies()] == [4]
    assert client.study("digits").gain is not None
    assert client.recommendation("digits").parameters.threshold_bytes == 20_000
    assert all(trial.iteration_time for trial in client.trials("digits", state=TrialState.COMPLETED))


def test_other_measurements_under_a_known_sequence_are_refused(client: Client, database: Database) -> None:
    """A sequence stands for one report: another content gets 409 and changes nothing."""
    start(client)
    client.report("digits", 0, report(0))
    before = rows(database)
    with pytest.raises(ConflictError, match="other measurements"):
        client.report("digits", 0, report(0, times_s=(0.3,)))
    assert rows(database) == before


def test_another_workers_trial_takes_no_report(client: Client, database: Database) -> None:
    """Only the worker that holds a trial may report on it or fail it."""
    start(client, "a")
    before = rows(database)
    with pytest.raises(ConflictError, match="held by a, not by b"):
        client.report("digits", 0, report(worker_id="b"))
    with pytest.raises(ConflictError, match="held by a, not by b"):
        client.fail("digits", 0, Failure(worker_id="b", reason="not mine"))
    assert rows(database) == before


def test_a_completed_trial_counts_no_more_measurements(client: Client) -> None:
    """A late window for a completed trial is answered with what comes next, and is not counted."""
    start(client)
    client.report("digits", 0, report(0, times_s=(0.1,) * 4))
    late = client.report("digits", 0, report(1, times_s=(9.0,)))
    assert late.trial is not None
    assert late.trial.number == 1
    assert client.trial("digits", 0).iteration_times_s == (0.1,) * 4


def test_a_trial_that_was_never_started_is_not_found(client: Client) -> None:
    """A number beyond the last trial answers 404."""
    with pytest.raises(NotFoundError, match="no trial 7"):
        client.report("digits", 7, report())


def test_a_failures_reason_is_kept_whole(client: Client) -> None:
    """A reason of many lines and any script is stored and shown as it was given."""
    start(client)
    reason = "CUDA out of memory\n" * 1000 + "Ende: 終"
    failed = client.fail("digits", 0, Failure(worker_id="a", reason=reason))
    assert (failed.state, failed.failure_reason, failed.lease_expires_at) == (TrialState.FAILED, reason, None)
    assert client.trial("digits", 0).failure_reason == reason


def test_failing_a_trial_again_keeps_the_first_reason(client: Client) -> None:
    """A failure sent twice changes nothing the second time."""
    start(client)
    first = client.fail("digits", 0, Failure(worker_id="a", reason="first"))
    assert client.fail("digits", 0, Failure(worker_id="a", reason="second")) == first


def test_a_failed_trial_takes_no_report(client: Client) -> None:
    """A report for a trial that its worker gave up gets 409."""
    start(client)
    client.fail("digits", 0, Failure(worker_id="a", reason="broken"))
    with pytest.raises(ConflictError, match="failed: broken"):
        client.report("digits", 0, report())


def test_a_completed_trial_cannot_fail(client: Client) -> None:
    """A failure for a trial that has all measurements gets 409."""
    start(client)
    client.report("digits", 0, report(0, times_s=(0.1,) * 4))
    with pytest.raises(ConflictError, match="completed"):
        client.fail("digits", 0, Failure(worker_id="a", reason="too late"))


def test_a_study_whose_trials_all_fail_recommends_the_default(client: Client) -> None:
    """When nothing can be measured, the study ends, says so, and stays with the default."""
    while (trial := client.suggest("digits", "a").trial) is not None:
        client.fail("digits", trial.number, Failure(worker_id="a", reason="no memory"))
    recommendation = client.recommendation("digits")
    assert recommendation.parameters.threshold_bytes == 20_000
    assert recommendation.study.state is StudyState.CONVERGED
    assert "failed" in recommendation.reason


def test_trials_are_listed_by_number(http: httpx.Client, client: Client) -> None:
    """Pages of two list five trials once each, in order."""
    for index in range(5):
        start(client, f"worker{index}")
    pages = [http.get("/v1/studies/digits/trials", params={"page_size": 2}).json()]
    while token := pages[-1]["next_page_token"]:
        query = {"page_size": 2, "page_token": token}
        pages.append(http.get("/v1/studies/digits/trials", params=query).json())
    assert [[trial["number"] for trial in page["trials"]] for page in pages] == [[0, 1], [2, 3], [4]]


def test_trials_are_listed_by_state(client: Client, clock: SetClock) -> None:
    """Each state lists its own trials; a stale one is no longer listed as running."""
    start(client, "stale")
    clock.advance(LEASE_S)
    start(client, "running")
    failed = start(client, "failed").number
    client.fail("digits", failed, Failure(worker_id="failed", reason="broken"))
    measure(client, start(client, "done"), "done")
    numbers = {state.value: [trial.number for trial in client.trials("digits", state=state)] for state in TrialState}
    assert numbers["stale"] == [0]
    assert numbers["failed"] == [2]
    assert numbers["completed"] == [3]
    assert numbers["running"] == [1, 4]
    assert client.study("digits").trials.model_dump() == {state: len(found) for state, found in numbers.items()}
