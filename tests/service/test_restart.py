from __future__ import annotations

from typing import TYPE_CHECKING

from support.service import AppTransport, report, spec

from dear_tune import Client

if TYPE_CHECKING:
    from collections.abc import Callable

    from fastapi import FastAPI


def tune(clients: Callable[[], Client], name: str) -> list[int]:
    """The thresholds of a whole study, each request sent through the next client."""
    instruction = clients().suggest(name, "a")
    thresholds = []
    while (trial := instruction.trial) is not None:
        thresholds.append(trial.parameters.threshold_bytes)
        second = trial.parameters.threshold_bytes / 1e5
        instruction = clients().report(name, trial.number, report(times_s=(second,) * 4))
    return thresholds


def test_a_restart_repeats_and_forgets_nothing(start: Callable[..., FastAPI]) -> None:
    """A study whose service restarts between any two requests takes the same trials as one whose service stays."""
    with Client("http://service", transport=AppTransport(start())) as client:
        client.create_study(spec(name="steady"))
        client.create_study(spec(name="restarted"))
        steady = tune(lambda: client, "steady")
    restarted = tune(lambda: Client("http://service", transport=AppTransport(start())), "restarted")
    assert restarted == steady
    assert len(steady) > 5


def test_one_replica_answers_what_another_was_told(start: Callable[..., FastAPI]) -> None:
    """A trial that one replica handed out is reported to another."""
    one, other = (Client("http://service", transport=AppTransport(start())) for _ in range(2))
    one.create_study(spec())
    trial = one.suggest("digits", "a").trial
    assert trial is not None
    other.report("digits", trial.number, report())
    assert one.trial("digits", trial.number).iteration_times_s == (0.1, 0.2)
