"""What the ranks run when a real service tunes them."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

import torch
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


def train(tuner: dear.Tuner | None, steps: int, stop: Path | None = None) -> TunedRun:
    """Train for some steps.

    Args:
        tuner: how thresholds are tuned; None: not at all.
        steps: how many steps at the most.
        stop: a file; once it is there and tuning is over, training ends. Steps then take 5 ms at least, so that the
            service can follow.
    """
    model = build("Attention")
    run = TunedRun([], [], False, "")
    with engine(model, OPTIMIZERS["SGD"](model.parameters()), tuner=tuner, threshold_bytes=DEFAULT_BYTES) as optimizer:
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
        return TunedRun(run.losses, run.thresholds, tuner is not None and not optimizer.tuning, digest(model))


def _agreed(file: Path) -> bool:
    there = torch.tensor(float(file.exists()))
    dist.broadcast(there, 0)
    return bool(there)
