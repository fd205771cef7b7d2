"""The scenarios that need processes of their own, or a service: they are rows of the same table."""

import re
from concurrent.futures import ThreadPoolExecutor

import pytest
from support.faulty import FaultyServer
from support.ranks import RankError, RankPool
from support.scenarios import SCENARIOS, UPDATES, Setting
from support.scenarios.running import FAULTS, faulty
from support.scenarios.states import resume, save_in_the_middle
from support.training import WHOLE_MODEL
from support.tuned import DEFAULT_BYTES, check_untouched, train, wait_for

from dear_engine import Tuner
from dear_tune.contract import TrialState
from dear_tune.testing import FakeService

SETTINGS = {
    update: [
        pytest.param(Setting(update, threshold_bytes), id=f"{update}-{threshold_bytes}")
        for threshold_bytes in SCENARIOS["D7"].thresholds
    ]
    for update in UPDATES
}
MAX_STEPS = 5000


@pytest.fixture(scope="module")
def fresh():
    """Processes that have not trained before this module."""
    pools = {world_size: RankPool(world_size) for world_size in (2, 3)}
    yield pools
    for pool in pools.values():
        pool.close()


@pytest.mark.parametrize("setting", [*SETTINGS["replicated"], *SETTINGS["sharded"]])
def test_d7(ranks, fresh, verdicts, tmp_path, setting):
    """D7: other processes resume to the last bit; at another world size and in the other mode as the oracle does."""
    uninterrupted = ranks(2).run(save_in_the_middle, setting, tmp_path)
    resumed = fresh[2].run(resume, setting, tmp_path)
    assert len({*uninterrupted, *resumed}) == 1
    (other,) = set(UPDATES) - {setting.update}
    fresh[3].run(resume, Setting(other, WHOLE_MODEL), tmp_path)
    verdicts.observe("D7", setting.update, ["right"])


@pytest.fixture
def doomed():
    """Three ranks that nobody needs afterwards."""
    pool = RankPool(3)
    yield pool
    pool.close()


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("update", UPDATES)
def test_f3(doomed, verdicts, update, fault):
    """F3: the ranks that are left raise an error that says that another one is gone."""
    loud = SCENARIOS["F3"].loud[update]
    with pytest.raises(RankError) as raised:
        doomed.run(faulty, Setting(update, 1500), fault)
    *survivors, gone = raised.value.traces.values()
    assert loud.error.__name__ not in gone
    assert len(survivors) == 2
    errors = [re.findall(rf"^[\w.]*{loud.error.__name__}: .*{loud.cause}.*", text, re.MULTILINE) for text in survivors]
    assert all(errors)
    verdicts.observe("F3", update, [found[-1] for found in errors])


def tuner(server: FaultyServer) -> Tuner:
    return Tuner(url=server.url, study="attention", window=4, settle=1, start_up=2, iterations_per_trial=5)


@pytest.fixture
def server():
    """A service with three thresholds to try; nobody listens yet."""
    return FaultyServer(FakeService(thresholds=[4000, 12000, 30000], recommend=12000))


def done(service: FakeService) -> bool:
    return [trial.state for trial in service.trials] == [TrialState.COMPLETED] * 3


def check_resumed(pool, runs, update) -> None:
    """One warning told of the fault, one that it was over, and tuning came to its end."""
    check_untouched(pool, runs, update)
    trouble, relief = runs[0].warnings
    assert "Training goes on" in trouble
    assert "is back" in relief
    assert all(run.converged for run in runs)
    assert runs[0].thresholds[-1] == 12000


def begin(threads, pool, server, folder, update):
    """Let the ranks train until there is a file."""
    return threads.submit(pool.run, train, tuner(server), MAX_STEPS, folder / "stop", update)


@pytest.mark.parametrize("update", UPDATES)
def test_f7_unreachable(ranks, verdicts, server, tmp_path, update):
    """F7: a server that is unreachable at the start is found when it comes, and changes no number."""
    with ThreadPoolExecutor() as threads:
        training = begin(threads, ranks(2), server, tmp_path, update)
        wait_for((tmp_path / "warned").exists)
        with server.listening():
            wait_for(lambda: done(server.service))
            (tmp_path / "stop").touch()
            runs = training.result()
    check_resumed(ranks(2), runs, update)
    verdicts.observe("F7", update, ["right"])


@pytest.mark.parametrize("update", UPDATES)
def test_f7_dies(ranks, verdicts, server, tmp_path, update):
    """F7: a server that dies in the middle and comes back changes no number; tuning goes on."""
    with ThreadPoolExecutor() as threads:
        with server.listening():
            training = begin(threads, ranks(2), server, tmp_path, update)
            wait_for(lambda: len(server.service.trials) > 0)
        wait_for((tmp_path / "warned").exists)
        with server.listening():
            wait_for(lambda: done(server.service))
            (tmp_path / "stop").touch()
            runs = training.result()
    check_resumed(ranks(2), runs, update)
    verdicts.observe("F7", update, ["right"])


@pytest.mark.parametrize(("name", "value", "well"), [("status", 500, None), ("garbage", True, False)])
@pytest.mark.parametrize("update", UPDATES)
def test_f7_broken(ranks, verdicts, server, tmp_path, update, name, value, well):
    """F7: a server that answers 500, or garbage, changes no number; once it is well again tuning goes on."""
    setattr(server.service, name, value)
    with ThreadPoolExecutor() as threads, server.listening():
        training = begin(threads, ranks(2), server, tmp_path, update)
        wait_for((tmp_path / "warned").exists)
        setattr(server.service, name, well)
        wait_for(lambda: done(server.service))
        (tmp_path / "stop").touch()
        runs = training.result()
    check_resumed(ranks(2), runs, update)
    verdicts.observe("F7", update, ["right"])


@pytest.mark.parametrize("update", UPDATES)
def test_f7_late(ranks, verdicts, server, update):
    """F7: training is over before a server that takes 60 s has answered once; no number changes."""
    with server.listening(), server.late():
        runs = ranks(2).run(train, tuner(server), 60, None, update)
        assert server.waiting > 0
        assert server.service.requests == []
    check_untouched(ranks(2), runs, update)
    assert len(runs[0].warnings) <= 1
    assert {threshold for run in runs for threshold in run.thresholds} == {DEFAULT_BYTES}
    verdicts.observe("F7", update, ["right"])
