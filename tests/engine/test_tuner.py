"""A run is tuned while it trains: what the ranks agree on, and what they do without a service."""

import logging
import time
from dataclasses import dataclass, field

import pytest
import torch

from dear_engine.conversation import ServiceThread
from dear_engine.timing import HostClock, IterationTimer
from dear_engine.tuner import Tuner, study_name
from dear_engine.tuning import TuningLoop
from dear_tune.client import Client
from dear_tune.contract import Fingerprint, Layer
from dear_tune.errors import DearTuneError
from dear_tune.testing import FakeService

DEFAULT = 25 * 2**20
LAYERS = [Layer(name="a", bytes=4000), Layer(name="b", bytes=8000)]
FINGERPRINT = Fingerprint(world_size=2, backend="gloo", device="cpu", dtype="float32", model="Net")
WINDOW, SETTLE = 4, 2


@dataclass
class Alone:
    """A channel whose only rank is this one."""

    messages: list[list[float]] = field(default_factory=list)

    def all_reduce(self, values: torch.Tensor, _operation: object, _label: str) -> "Alone":
        self.messages.append(values.tolist())
        return self

    def wait(self) -> None:
        pass


class Run:
    """A training run of one rank, tuned by a fake service."""

    def __init__(self, service: FakeService) -> None:
        self.service = service
        tuner = Tuner(
            url="http://fake",
            study="net",
            worker_id="job",
            window=WINDOW,
            settle=SETTLE,
            start_up=SETTLE,
            iterations_per_trial=6,
        )
        spec = tuner.spec(LAYERS, FINGERPRINT, DEFAULT)
        self.thread = ServiceThread(Client("http://fake", transport=service, attempts=1), spec, tuner.worker_id)
        self.channel = Alone()
        self.loop = TuningLoop(self.channel, IterationTimer(HostClock()), tuner, self.thread)
        self.thresholds = [DEFAULT]

    def steps(self, count: int) -> None:
        """Train, letting the service's thread finish what it has to say after each step."""
        for _ in range(count):
            self.thresholds.append(self.loop.after_step(self.thresholds[-1]))
            self.settle()

    def settle(self) -> None:
        """Wait for the thread, as a slow iteration would."""
        deadline = time.monotonic() + 10
        while self.thread._windows.unfinished_tasks and time.monotonic() < deadline:
            time.sleep(0.001)


@pytest.fixture
def run():
    runs = []

    def start(service: FakeService) -> Run:
        runs.append(Run(service))
        runs[-1].settle()
        return runs[-1]

    yield start
    for started in runs:
        started.loop.close()


def test_every_trial_is_measured_in_full(run):
    """Each threshold of the service is run and reported until it has its iterations; then the recommendation is run."""
    service = FakeService(thresholds=[DEFAULT, 4000, 12000], recommend=4000)
    tuned = run(service)
    tuned.steps(80)
    assert [len(trial.iteration_times_s) >= 6 for trial in service.trials] == [True, True, True]
    assert list(dict.fromkeys(tuned.thresholds)) == [DEFAULT, 4000, 12000]
    assert tuned.thresholds[-1] == 4000
    assert not tuned.loop.measuring


def test_steps_after_a_switch_are_not_measured(run):
    """The window after a switch starts with its settling steps, which read infinity and are not reported."""
    service = FakeService(thresholds=[4000])
    tuned = run(service)
    tuned.steps(20)
    switch = tuned.thresholds.index(4000)
    first_after = next(message for message in tuned.channel.messages[1:] if message[-3] == 4000)
    assert first_after[:SETTLE] == [float("inf")] * SETTLE
    assert len(service.reports[0].iteration_times_s) == WINDOW
    assert switch == SETTLE + WINDOW + 1


def test_windows_grow_when_nothing_is_measured(run):
    """Once the study is done the exchanges become rarer, and the service is asked at each."""
    service = FakeService(thresholds=[])
    tuned = run(service)
    tuned.steps(100)
    lengths = [len(message) - 3 for message in tuned.channel.messages]
    assert lengths == [SETTLE + WINDOW, 2 * WINDOW, 4 * WINDOW, 8 * WINDOW]


@pytest.mark.parametrize("fault", [{"down": True}, {"status": 500}, {"garbage": True}])
def test_without_a_service_nothing_changes(run, caplog, fault):
    """A service that is down, broken or something else leaves the run at its default, with one warning."""
    service = FakeService(thresholds=[4000])
    for name, value in fault.items():
        setattr(service, name, value)
    with caplog.at_level(logging.WARNING):
        tuned = run(service)
        tuned.steps(60)
    assert set(tuned.thresholds) == {DEFAULT}
    assert len(caplog.records) == 1


def test_tuning_resumes(run):
    """When the service is lost the best known threshold is run; when it is back the open trial goes on."""
    service = FakeService(thresholds=[4000, 12000], recommend=8000)
    tuned = run(service)
    tuned.steps(8)
    assert tuned.thresholds[-1] == 4000
    service.down = True
    tuned.steps(16)
    assert tuned.thresholds[-1] == 8000
    service.down = False
    tuned.steps(120)
    assert all(len(trial.iteration_times_s) >= 6 for trial in service.trials)
    assert tuned.thresholds[-1] == 8000


def test_a_name_for_the_same_job():
    """The same model on the same cluster gets the same name, another cluster another one."""
    other = FINGERPRINT.model_copy(update={"world_size": 4})
    assert study_name(LAYERS, FINGERPRINT) == study_name(list(LAYERS), FINGERPRINT)
    assert study_name(LAYERS, FINGERPRINT).startswith("net-2x-")
    assert study_name(LAYERS, FINGERPRINT) != study_name(LAYERS, other)


def test_environment(monkeypatch):
    """`DEAR_TUNE_URL` turns tuning on, `DEAR_TUNE_STUDY` names the study."""
    monkeypatch.delenv("DEAR_TUNE_URL", raising=False)
    assert Tuner.from_environment() is None
    monkeypatch.setenv("DEAR_TUNE_URL", "http://tuner:8000")
    monkeypatch.setenv("DEAR_TUNE_STUDY", "gpt")
    assert Tuner.from_environment() == Tuner(url="http://tuner:8000", study="gpt")


@pytest.mark.parametrize(
    "wrong",
    [
        {"url": "not a url"},
        {"study": "two words"},
        {"worker_id": "x" * 200},
        {"window": 0},
        {"settle": -1},
        {"max_trials": 0},
        {"seed": -1},
    ],
)
def test_wrong_settings(wrong):
    """What the service would refuse is refused where it is written, by an error of our tree."""
    with pytest.raises(DearTuneError):
        Tuner(**{"url": "http://tuner:8000", **wrong})


def test_a_bug_in_the_tuner(run, caplog, monkeypatch):
    """Should the conversation itself fail, training goes on with what is known, and can end."""
    service = FakeService(thresholds=[4000])
    tuned = run(service)
    monkeypatch.setattr(tuned.thread, "_speak", lambda *_: 1 / 0)
    tuned.steps(60)
    assert tuned.thresholds[-1] == DEFAULT
    assert [record.levelname for record in caplog.records].count("ERROR") == 1
