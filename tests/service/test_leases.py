from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from support.service import LEASE_S, report, spec

from dear_tune.contract import TrialState

if TYPE_CHECKING:
    from support.service import SetClock

    from dear_tune import Client


@pytest.fixture(autouse=True)
def _trial(client: Client) -> None:
    client.create_study(spec())
    client.suggest("digits", "a")


def test_a_silent_workers_trial_turns_stale(client: Client, clock: SetClock) -> None:
    """Past its lease a trial shows as stale, not failed, without anybody asking for another."""
    clock.advance(LEASE_S - 1)
    assert client.trial("digits", 0).state is TrialState.RUNNING
    clock.advance(1)
    assert client.trial("digits", 0).state is TrialState.STALE
    assert client.study("digits").trials.stale == 1


def test_a_stale_trials_plan_is_measured_by_another_worker(client: Client, clock: SetClock) -> None:
    """What a dead worker held is free again: the next worker measures the default."""
    clock.advance(LEASE_S)
    trial = client.suggest("digits", "b").trial
    assert trial is not None
    assert (trial.number, trial.parameters.threshold_bytes) == (1, 20_000)


def test_asking_keeps_a_trial_from_turning_stale(client: Client, clock: SetClock) -> None:
    """A worker that only asks, without reporting, holds its trial."""
    for _ in range(3):
        clock.advance(LEASE_S - 1)
        client.suggest("digits", "a")
    assert client.trial("digits", 0).state is TrialState.RUNNING


def test_reporting_keeps_a_trial_from_turning_stale(client: Client, clock: SetClock) -> None:
    """A report renews the lease, and so does the same report again."""
    for _ in range(3):
        clock.advance(LEASE_S - 1)
        client.report("digits", 0, report(0))
    assert client.trial("digits", 0).state is TrialState.RUNNING


def test_a_late_report_revives_its_trial(client: Client, clock: SetClock) -> None:
    """A worker that was stopped past its lease goes on where it was; its measurements are kept."""
    clock.advance(10 * LEASE_S)
    client.suggest("digits", "b")
    answer = client.report("digits", 0, report(0))
    assert answer.trial is not None
    assert (answer.trial.number, answer.trial.state) == (0, TrialState.RUNNING)
    client.report("digits", 0, report(1))
    assert client.trial("digits", 0).state is TrialState.COMPLETED


def test_a_restarted_worker_gets_its_stale_trial_back(client: Client, clock: SetClock) -> None:
    """A job that restarts under the same worker id after the lease goes on with its own trial."""
    client.report("digits", 0, report(0))
    clock.advance(LEASE_S)
    trial = client.suggest("digits", "a").trial
    assert trial is not None
    assert (trial.number, trial.state, trial.next_sequence) == (0, TrialState.RUNNING, 1)
