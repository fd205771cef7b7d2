"""Real ranks, tuned by a real server process: from the first trial to the recommendation, and through its death."""

import time
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timezone

import httpx
from support.server import Server
from support.tuned import DEFAULT_BYTES, check_untouched, train, wait_for

from dear_engine import Tuner
from dear_tune import Client
from dear_tune.contract import StudyState, TrialState
from dear_tune.errors import NotFoundError

ITERATIONS, MAX_TRIALS, MAX_STEPS = 5, 6, 5000


def tuner(url: str) -> Tuner:
    return Tuner(
        url=url,
        study="attention",
        window=4,
        settle=1,
        start_up=2,
        iterations_per_trial=ITERATIONS,
        max_trials=MAX_TRIALS,
    )


def completed(client: Client) -> int:
    """How many trials are; none before the study is there."""
    try:
        return client.study("attention").trials.completed
    except NotFoundError:
        return 0


def converged(client: Client) -> bool:
    return completed(client) > 0 and client.study("attention").state is StudyState.CONVERGED


def test_a_run_is_tuned_to_the_end(ranks, database_url, tmp_path):
    """The ranks try each of the service's thresholds, in full, and end with its recommendation."""
    with Server(database_url) as server, Client(server.url) as client, ThreadPoolExecutor() as threads:
        training = threads.submit(ranks(2).run, train, tuner(server.url), MAX_STEPS, tmp_path / "stop")
        wait_for(lambda: converged(client))
        (tmp_path / "stop").touch()
        runs = training.result()
        trials, recommendation = list(client.trials("attention")), client.recommendation("attention")
    check_untouched(ranks(2), runs)
    assert all(run.converged for run in runs)
    assert trials[0].parameters.threshold_bytes == DEFAULT_BYTES
    assert {trial.parameters.threshold_bytes for trial in trials} <= set(runs[0].thresholds)
    assert all(trial.state is TrialState.COMPLETED for trial in trials)
    assert all(trial.iteration_time.iterations >= ITERATIONS for trial in trials)
    assert runs[0].thresholds[-1] == recommendation.parameters.threshold_bytes


def test_the_server_is_killed_and_comes_back(ranks, database_url, tmp_path):
    """A server that is killed in the middle changes no number; when it is back the same study is tuned to its end."""
    with Server(database_url) as server, Client(server.url) as client, ThreadPoolExecutor() as threads:
        training = threads.submit(ranks(2).run, train, tuner(server.url), MAX_STEPS, tmp_path / "stop")
        wait_for(lambda: completed(client) > 0)
        server.kill()
        time.sleep(0.5)  # the ranks train on, without a service
        started_again = datetime.now(timezone.utc)
        server.start()
        wait_for(lambda: converged(client))
        (tmp_path / "stop").touch()
        runs = training.result()
        trials = list(client.trials("attention"))
    check_untouched(ranks(2), runs)
    assert [trial.number for trial in trials] == list(range(len(trials)))
    assert trials[0].created_at < started_again < trials[-1].created_at


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
