"""What the ranks run when a real service tunes them."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist
from support.training import OPTIMIZERS, batches, build, digest, engine, loss_of

import dear_engine as dear

DEFAULT_BYTES = 2**20


@dataclass(frozen=True)
class TunedRun:
    """A run's losses, the threshold of each step, whether tuning was over, and a digest of the parameters."""

    losses: list[float]
    thresholds: list[int]
    converged: bool
    digest: str


def train(tuner: dear.Tuner | None, steps: int, pace_s: float = 0.0, signal: Path | None = None) -> TunedRun:
    """Train for some steps.

    Args:
        tuner: how thresholds are tuned; None: not at all.
        steps: how many steps.
        pace_s: seconds that each step takes at least, so that the service can follow.
        signal: a file that is written when a third of the steps is done; ranks wait until it is gone again.
    """
    model = build("Attention")
    run = TunedRun([], [], False, "")
    with engine(model, OPTIMIZERS["SGD"](model.parameters()), tuner=tuner, threshold_bytes=DEFAULT_BYTES) as optimizer:
        for step in range(steps):
            if signal and step == steps // 3:
                _meet(signal)
            optimizer.zero_grad()
            loss = loss_of(model, batches(step)[dist.get_rank()])
            loss.backward()
            optimizer.step()
            run.losses.append(loss.item())
            run.thresholds.append(optimizer.threshold_bytes)
            time.sleep(pace_s)
        return TunedRun(run.losses, run.thresholds, tuner is not None and not optimizer.tuning, digest(model))


def _meet(signal: Path) -> None:
    if dist.get_rank() == 0:
        signal.touch()
        while signal.exists():
            time.sleep(0.01)
    dist.barrier()
