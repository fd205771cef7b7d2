"""What each rank of the demo runs: a real network on real data, once with DDP, then with dear-tune.

Both see the same batches from the same start, so their losses can be compared one by one.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import dear_engine as dear
from dear_engine.demo.processes import die_with_parent

__all__ = ["main"]

_DDP_STEPS = 60
_MAX_STEPS = 2_000
_ITERATIONS_PER_TRIAL = 12
_WINDOW = 6
_BATCH = 256
_TEST_IMAGES = 360
_WIDTHS = (512, 448, 416, 384, 352, 320, 288, 256, 192, 128)
_SEED = 0


@dataclass(frozen=True)
class _Digits:
    """Handwritten digits: images (n, 64) between 0 and 1, labels (n,)."""

    images: torch.Tensor
    labels: torch.Tensor


def main() -> None:
    """Train, and write what came out as JSON."""
    die_with_parent()  # torchrun puts its ranks into sessions of their own, where a signal to its group does not come
    parser = argparse.ArgumentParser()
    parser.add_argument("--url", required=True)
    parser.add_argument("--study", required=True)
    parser.add_argument("--max-trials", type=int, required=True)
    parser.add_argument("--result", type=Path, required=True)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    train, test = _data()
    ddp_losses = _train_with_ddp(train)
    losses, model = _train_with_dear(
        train,
        dear.Tuner(
            url=arguments.url,
            study=arguments.study,
            window=_WINDOW,
            iterations_per_trial=_ITERATIONS_PER_TRIAL,
            max_trials=arguments.max_trials,
            seed=_SEED,
        ),
    )
    if dist.get_rank() == 0:
        arguments.result.write_text(
            json.dumps(
                {
                    "steps": len(losses),
                    "compared_steps": len(ddp_losses),
                    "largest_loss_difference": max(abs(a - b) for a, b in zip(losses, ddp_losses, strict=False)),
                    "test_accuracy": _accuracy(model, test),
                }
            )
        )
    dist.barrier()
    dist.destroy_process_group()


def _data() -> tuple[_Digits, _Digits]:
    images, labels = load_digits(return_X_y=True)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(_SEED))
    x, y = torch.tensor(images, dtype=torch.float32)[order] / 16, torch.tensor(labels)[order]
    return _Digits(x[_TEST_IMAGES:], y[_TEST_IMAGES:]), _Digits(x[:_TEST_IMAGES], y[:_TEST_IMAGES])


def _batches(data: _Digits) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """This rank's part of an endless, seeded sequence of batches."""
    generator = torch.Generator().manual_seed(_SEED)
    while True:
        chosen = torch.randint(len(data.labels), (dist.get_world_size(), _BATCH), generator=generator)
        mine = chosen[dist.get_rank()]
        yield data.images[mine], data.labels[mine]


def _network() -> nn.Module:
    torch.manual_seed(_SEED)
    layers: list[nn.Module] = []
    for inputs, outputs in zip((64, *_WIDTHS), _WIDTHS, strict=False):
        layers += [nn.Linear(inputs, outputs), nn.LayerNorm(outputs), nn.GELU()]
    return nn.Sequential(*layers, nn.Linear(_WIDTHS[-1], 10))


def _train_with_ddp(data: _Digits) -> list[float]:
    model = DistributedDataParallel(_network())
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    losses = []
    for _, (x, y) in zip(range(_DDP_STEPS), _batches(data), strict=False):
        losses.append(_step(model, optimizer, x, y))
    return losses


def _train_with_dear(data: _Digits, tuner: dear.Tuner) -> tuple[list[float], nn.Module]:
    model = _network()
    optimizer = dear.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=3e-4), model, tuner=tuner)
    losses: list[float] = []
    for x, y in _batches(data):
        losses.append(_step(model, optimizer, x, y))
        if len(losses) >= _MAX_STEPS or (len(losses) >= _DDP_STEPS and not optimizer.tuning):
            break
    optimizer.close()
    return losses, model


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor, y: torch.Tensor) -> float:
    optimizer.zero_grad()
    loss = cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    return loss.item()


@torch.no_grad()
def _accuracy(model: nn.Module, data: _Digits) -> float:
    model.eval()
    right = model(data.images).argmax(dim=1) == data.labels
    return float(right.float().mean())


if __name__ == "__main__":
    main()
