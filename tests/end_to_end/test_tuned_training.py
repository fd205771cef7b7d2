"""Real ranks, tuned by a real server process: from the first trial to the recommendation, and through its death."""

import logging
import threading
import time

import httpx
import pytest
from support.server import Server
from support.tuned import DEFAULT_BYTES, train

from dear_engine import Tuner
from dear_tune import Client
from dear_tune.contract import StudyState, TrialState

ITERATIONS, MAX_TRIALS, STEPS = 5, 6, 400


def tuner(url: str) -> Tuner:
    return Tuner(url=url, study="attention", window=4, settle=1, iterations_per_trial=ITERATIONS, max_trials=MAX_TRIALS)


@pytest.fixture(scope="module")
def untuned(ranks):
    """The same training without a tuner."""
    return ranks(2).run(train, None, STEPS)


def test_a_run_is_tuned_to_the_end(ranks, untuned, database_url):
    """Both ranks try the service's thresholds at the same steps, end with its recommendation, and no loss differs."""
    with Server(database_url) as server:
        runs = ranks(2).run(train, tuner(server.url), STEPS, 0.005)
        with Client(server.url) as client:
            study, trials = client.study("attention"), list(client.trials("attention"))
            recommendation = client.recommendation("attention")
    assert runs[0].thresholds == runs[1].thresholds
    assert [run.losses for run in runs] == [run.losses for run in untuned]
    assert {run.digest for run in runs} == {run.digest for run in untuned}
    assert all(run.converged for run in runs)
    assert study.state is StudyState.CONVERGED
    assert trials[0].parameters.threshold_bytes == DEFAULT_BYTES
    assert {trial.parameters.threshold_bytes for trial in trials} <= set(runs[0].thresholds)
    assert all(trial.state is TrialState.COMPLETED for trial in trials)
    assert all(trial.iteration_time.iterations >= ITERATIONS for trial in trials)
    assert runs[0].thresholds[-1] == recommendation.parameters.threshold_bytes


def test_the_server_is_killed_and_comes_back(ranks, untuned, database_url, tmp_path):
    """A server that is killed in the middle changes no loss; when it is back the same study is tuned to its end."""
    signal = tmp_path / "a-third-is-done"
    with Server(database_url) as server:
        restart = threading.Thread(target=_kill_and_restart, args=(server, signal))
        restart.start()
        runs = ranks(2).run(train, tuner(server.url), STEPS, 0.005, signal)
        restart.join()
        with Client(server.url) as client:
            trials = list(client.trials("attention"))
    assert [run.losses for run in runs] == [run.losses for run in untuned]
    assert runs[0].thresholds == runs[1].thresholds
    numbers = [trial.number for trial in trials]
    assert numbers == list(range(len(numbers)))
    assert sum(trial.state is TrialState.COMPLETED for trial in trials) > 1


def _kill_and_restart(server: Server, signal) -> None:
    while not signal.exists():
        time.sleep(0.01)
    server.kill()
    signal.unlink()  # the ranks train on, without a service
    time.sleep(0.5)
    server.start()


def test_curl(database_url):
    """What a person gets from a running server: units in the names, and problem documents for nonsense."""
    with Server(database_url) as server:
        study = {
            "name": "by-hand",
            "layers": [{"name": "a", "bytes": 4000}, {"name": "b", "bytes": 8000}],
            "fingerprint": {"world_size": 2, "backend": "gloo", "device": "cpu", "dtype": "float32"},
        }
        created = httpx.post(f"{server.url}/v1/studies", json=study)
        assert created.status_code == 201
        assert created.json()["default_threshold_bytes"] == 25 * 2**20
        refused = httpx.post(f"{server.url}/v1/studies", content=b'{"name": NaN}')
        assert 400 <= refused.status_code < 500
        assert refused.headers["content-type"] == "application/problem+json"
        assert len(httpx.get(f"{server.url}/v1/studies").json()["studies"]) == 1


def test_nobody_listens(ranks, untuned, caplog):
    """A tuner whose service never answers leaves a run as it would be without one."""
    with caplog.at_level(logging.WARNING):
        runs = ranks(2).run(train, tuner("http://127.0.0.1:9"), STEPS)
    assert [run.losses for run in runs] == [run.losses for run in untuned]
    assert {threshold for run in runs for threshold in run.thresholds} == {DEFAULT_BYTES}
