"""What a communication dtype costs in accuracy: the mean gradient of a small transformer, against double precision.

    python engine/benchmarks/wire_dtype.py            (on loopback, with 2, 4 and 8 processes)

For each world size and dtype on the wire: the relative error of the mean gradient, |mean - exact| / |exact| in the
2-norm over the whole model, on one batch a rank; and, to compare with, the error of computing in float32 at all.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from rich.console import Console
from rich.table import Table
from torch import nn

import dear_engine as dear

WORLD_SIZES = (2, 4, 8)
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
BATCH, SEQUENCE, WIDTH, LAYERS = 4, 32, 64, 4
RATE = 2.0**20
"""A learning rate so large that the difference of two parameters has as many digits as the gradient."""


def main() -> None:
    """Measure, and print a table."""
    table = Table("ranks", *(str(dtype).removeprefix("torch.") for dtype in DTYPES))
    context = mp.get_context("spawn")
    for world_size in WORLD_SIZES:
        errors = context.SimpleQueue()
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        mp.spawn(measure, (world_size, port, errors), nprocs=world_size)
        table.add_row(str(world_size), *(f"{error:.1e}" for error in errors.get()))
    Console().print(table)


def measure(rank: int, world_size: int, port: int, errors: Any) -> None:
    """One rank's part; rank 0 puts an error for each dtype."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world_size)
    exact = mean_gradient(network().double(), world_size)
    found = [error(communicated(dtype, rank), exact) for dtype in DTYPES]
    if rank == 0:
        errors.put(found)
    dist.destroy_process_group()


def network() -> nn.Module:
    """The same on every rank."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True)
    body = nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), body, nn.Linear(WIDTH, WIDTH))


def loss(model: nn.Module, rank: int) -> torch.Tensor:
    """Of one rank's batch."""
    generator = torch.Generator().manual_seed(rank)
    dtype = next(model.parameters()).dtype
    x, y = torch.randn(2, BATCH, SEQUENCE, WIDTH, generator=generator).to(dtype)
    return nn.functional.mse_loss(model(x), y)


def mean_gradient(model: nn.Module, world_size: int) -> torch.Tensor:
    """Over all ranks' batches, in one process."""
    for rank in range(world_size):
        (loss(model, rank) / world_size).backward()
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def communicated(dtype: torch.dtype, rank: int) -> torch.Tensor:
    """The mean gradient that a plain SGD step on the engine subtracts."""
    model = network()
    with engine(model, dtype) as optimizer:
        before = [parameter.detach().double() for parameter in model.parameters()]
        loss(model, rank).backward()
        optimizer.step()
        after = [parameter.detach().double() for parameter in model.parameters()]
    return torch.cat([(b - a).flatten() / RATE for b, a in zip(before, after, strict=True)])


@contextmanager
def engine(model: nn.Module, dtype: torch.dtype) -> Iterator[dear.DistributedOptimizer]:
    """An engine that communicates in a dtype."""
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    distributed = dear.DistributedOptimizer(optimizer, model, tuner=None, communication_dtype=dtype)
    try:
        yield distributed
    finally:
        distributed.close()


def error(mean: torch.Tensor, exact: torch.Tensor) -> float:
    """Relative, in the 2-norm."""
    return ((mean - exact).norm() / exact.norm()).item()


if __name__ == "__main__":
    main()
