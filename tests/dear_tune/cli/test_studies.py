from __future__ import annotations

import json
from functools import partial

import pytest
from support.landscapes import spec_of

from dear_tune.cli import main
from dear_tune.cli import studies as studies_module
from dear_tune.client import Client
from dear_tune.contract import Failure, Report
from dear_tune.testing import FakeService

MIB = 2**20


@pytest.fixture
def service(monkeypatch: pytest.MonkeyPatch) -> FakeService:
    """A service with one study: a trial measured, a trial failed, a trial running."""
    service = FakeService([25 * MIB, 4 * MIB, MIB])
    monkeypatch.setattr(studies_module, "Client", partial(Client, transport=service, attempts=1))
    client = Client("http://fake", transport=service)
    client.create_study(spec_of(MIB, 2 * MIB, 4 * MIB, iterations_per_trial=3))
    client.suggest("study", "node-a")
    client.report("study", 0, Report(worker_id="node-a", sequence=0, iteration_times_s=(0.012, 0.0123, 0.0126)))
    client.fail("study", 1, Failure(worker_id="node-a", reason="out of [red]memory\x1b[2J"))
    client.suggest("study", "node-a")
    return service


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    """Run the command; the exit code."""
    monkeypatch.setattr("sys.argv", ["dear-tune", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    return int(ended.value.code or 0)


@pytest.mark.usefixtures("service")
def test_studies_lists_names_and_states(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The list shows each study with its state and its trials."""
    assert run(monkeypatch, "studies") == 0
    assert "exploring" in capsys.readouterr().out


@pytest.mark.usefixtures("service")
def test_trials_are_for_people(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The table shows sizes in MiB and times in milliseconds, with their spread."""
    monkeypatch.setenv("COLUMNS", "200")
    assert run(monkeypatch, "trials", "study") == 0
    shown = capsys.readouterr().out
    assert "25 MiB" in shown
    assert "12.3 ms (12 ms to 12.6 ms)" in shown


@pytest.mark.usefixtures("service")
def test_failures_are_shown_whole(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """A failure's reason is shown as it is, and cannot steer the terminal (deepspeed 4759)."""
    run(monkeypatch, "trials", "study")
    assert "Trial 1 failed: out of [red]memory\ufffd[2J" in capsys.readouterr().out


@pytest.mark.usefixtures("service")
def test_show_recommends(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """A study is shown with what a job should run with, and why."""
    monkeypatch.setenv("COLUMNS", "200")
    assert run(monkeypatch, "show", "study") == 0
    assert "25 MiB, 1 bucket: as the test wants it" in capsys.readouterr().out


@pytest.mark.usefixtures("service")
@pytest.mark.parametrize("arguments", [("studies",), ("trials", "study"), ("show", "study")])
def test_json_is_for_programs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...]
) -> None:
    """With --json, what is printed is JSON and nothing else."""
    assert run(monkeypatch, *arguments, "--json") == 0
    json.loads(capsys.readouterr().out)


@pytest.mark.usefixtures("service")
def test_json_has_the_contracts_units(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """JSON has bytes and seconds, under the contract's names."""
    run(monkeypatch, "trials", "study", "--json")
    first = json.loads(capsys.readouterr().out)[0]
    assert first["parameters"]["threshold_bytes"] == 25 * MIB
    assert first["iteration_time"]["median_s"] == 0.0123


def test_the_environment_names_the_service(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], service: FakeService
) -> None:
    """Without --url, DEAR_TUNE_URL says where the service is."""
    monkeypatch.setenv("DEAR_TUNE_URL", "http://elsewhere:9")
    service.down = True
    assert run(monkeypatch, "studies") == 1
    assert "http://elsewhere:9" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [("show", "other"), ("studies", "--url", "not a url")])
@pytest.mark.usefixtures("service")
def test_errors_are_one_message(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...]
) -> None:
    """What the service refuses, or what is no address, is one line on stderr and exit code 1."""
    assert run(monkeypatch, *arguments) == 1
    assert len(capsys.readouterr().err.splitlines()) == 1
