"""What the ranks run when a real service tunes them."""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from support.ranks import RankPool
from support.training import OPTIMIZERS, batches, build, digest, engine, loss_of

import dear_engine as dear

DEFAULT_BYTES = 2**20


@dataclass(frozen=True)
class TunedRun:
    """A run's losses, the threshold of each step, whether tuning was over, a digest of the parameters, the warnings."""

    losses: list[float]
    thresholds: list[int]
    converged: bool
    digest: str
    warnings: list[str]


def train(tuner: dear.Tuner | None, steps: int, stop: Path | None = None, update: str = "replicated") -> TunedRun:
    """Train for some steps.

    Args:
        tuner: how thresholds are tuned; None: not at all.
        steps: how many steps at the most.
        stop: a file; once it is there and tuning is over, training ends. Steps then take 5 ms at least, so that the
            service can follow. Beside it `warned` appears with the first warning.
        update: the engine's.
    """
    model = build("Attention")
    inner = OPTIMIZERS["SGD"](model.parameters())
    settings = {"tuner": tuner, "threshold_bytes": DEFAULT_BYTES, "update": update}
    with _warnings(stop) as warnings, engine(model, inner, **settings) as optimizer:
        run = TunedRun([], [], False, "", warnings)
        for step in range(steps):
            optimizer.zero_grad()
            loss = loss_of(model, batches(step)[dist.get_rank()])
            loss.backward()
            optimizer.step()
            run.losses.append(loss.item())
            run.thresholds.append(optimizer.threshold_bytes)
            if stop is not None:
                time.sleep(0.005)
                if step % 10 == 0 and _agreed(stop) and not optimizer.tuning:
                    break
        return dataclasses.replace(run, converged=tuner is not None and not optimizer.tuning, digest=digest(model))


@contextmanager
def _warnings(stop: Path | None) -> Iterator[list[str]]:
    """What the engine warns of meanwhile."""
    warnings: list[str] = []
    handler = logging.Handler(logging.WARNING)

    def emit(record: logging.LogRecord) -> None:
        warnings.append(record.getMessage())
        if stop is not None:
            stop.with_name("warned").touch()

    handler.emit = emit  # type: ignore[method-assign]
    logger = logging.getLogger("dear_engine")
    logger.addHandler(handler)
    try:
        yield warnings
    finally:
        logger.removeHandler(handler)


def check_untouched(pool: RankPool, runs: list[TunedRun], update: str = "replicated") -> None:
    """All ranks switched at the same steps, and their numbers are those of a run without a tuner."""
    untuned = pool.run(train, None, len(runs[0].losses), None, update)
    assert all(run.thresholds == runs[0].thresholds for run in runs)
    assert [run.losses for run in runs] == [run.losses for run in untuned]
    assert {run.digest for run in runs} == {run.digest for run in untuned}


def wait_for(condition: Callable[[], bool]) -> None:
    """Return once it holds; fail if it does not come to."""
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def _agreed(file: Path) -> bool:
    there = torch.tensor(float(file.exists()))
    dist.broadcast(there, 0)
    return bool(there)
