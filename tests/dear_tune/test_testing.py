from __future__ import annotations

import subprocess
import sys

import pytest
from landscapes import spec_of

from dear_tune.client import Client
from dear_tune.contract import Action, Failure, Report, StudyState, TrialState
from dear_tune.errors import NotFoundError, ServiceUnavailableError
from dear_tune.testing import FakeService

SPEC = spec_of(4, 4, 8, default=16, iterations_per_trial=2)


def started(*thresholds: int) -> tuple[FakeService, Client]:
    """A service with its study created."""
    service = FakeService(thresholds)
    client = Client("http://fake", attempts=1, transport=service)
    client.create_study(SPEC)
    return service, client


def report(sequence: int, *times_s: float) -> Report:
    """A window of one worker."""
    return Report(worker_id="w", sequence=sequence, iteration_times_s=times_s)


def test_the_script_is_followed() -> None:
    """The thresholds are proposed in turn, each until it is measured, and then the service is done."""
    _, client = started(4, 8)
    first = client.suggest("study", "w").trial
    again = client.report("study", 0, report(0, 0.1)).trial
    second = client.report("study", 0, report(1, 0.1)).trial
    done = client.report("study", 1, report(0, 0.1, 0.1))
    assert [trial and trial.parameters.threshold_bytes for trial in (first, again, second, done.trial)] == [
        4,
        4,
        8,
        None,
    ]
    assert done.action is Action.DONE
    assert done.recommendation.study.state is StudyState.CONVERGED


def test_the_recommendation_is_the_tests() -> None:
    """The recommended threshold is the one the test gives, or else the default."""
    _, client = started()
    assert client.recommendation("study").parameters.threshold_bytes == 16
    other = Client("http://fake", transport=FakeService(recommend=8))
    other.create_study(SPEC)
    assert other.recommendation("study").buckets == 2


def test_reports_are_recorded() -> None:
    """Every report is kept for the test, and a repeated one counts once."""
    service, client = started(4)
    client.suggest("study", "w")
    client.report("study", 0, report(0, 0.1))
    client.report("study", 0, report(0, 0.1))
    assert len(service.reports) == 2
    assert client.trial("study", 0).iteration_times_s == (0.1,)


def test_failures_are_recorded() -> None:
    """A trial given up is failed, with its reason, and the next one follows."""
    service, client = started(4, 8)
    client.suggest("study", "w")
    client.fail("study", 0, Failure(worker_id="w", reason="out of memory"))
    assert service.failures[0].reason == "out of memory"
    assert [trial.state for trial in client.trials("study")] == [TrialState.FAILED]
    assert client.suggest("study", "w").trial is not None


def test_lists_agree_with_the_study() -> None:
    """The study is found by name and in the list of studies."""
    _, client = started(4)
    assert [study.name for study in client.studies()] == [client.study("study").name]


@pytest.mark.parametrize(("fault", "value"), [("down", True), ("status", 503), ("garbage", True)])
def test_faults_and_recovery(fault: str, value: object) -> None:
    """While a fault is set no call succeeds; afterwards all is as before."""
    service, client = started(4)
    setattr(service, fault, value)
    with pytest.raises(ServiceUnavailableError):
        client.suggest("study", "w")
    setattr(service, fault, None)
    assert client.suggest("study", "w").action is Action.MEASURE


@pytest.mark.parametrize("study", ["other", "stud", "study2"])
def test_unknown_studies(study: str) -> None:
    """A study that was not created is not found."""
    _, client = started()
    with pytest.raises(NotFoundError):
        client.study(study)


def test_no_extra_is_imported() -> None:
    """The fake service works where only the base of dear-tune is installed."""
    script = "import sys, dear_tune.testing; print({'torch', 'numpy', 'fastapi', 'sqlalchemy'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", script], capture_output=True, text=True).stdout == "set()\n"
