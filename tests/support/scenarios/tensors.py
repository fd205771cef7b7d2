"""E: dtypes, layouts and sizes of parameters and gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from support.models import MODELS
from support.scenarios.core import (
    STEPS,
    Batch,
    Setting,
    adamw,
    built,
    check_same_everywhere,
    follow,
    scenario,
    sgd,
    twins,
)
from torch import nn


def _in_bfloat16() -> nn.Module:
    """Linear layers in bfloat16, norms in single precision."""
    layers = [nn.Linear(12, 16), nn.LayerNorm(16), nn.Linear(16, 16), nn.LayerNorm(16), nn.Linear(16, 4)]
    return nn.Sequential(*(layer.float() if isinstance(layer, nn.LayerNorm) else layer.bfloat16() for layer in layers))


def _cast_between(model: nn.Module, batch: Batch) -> torch.Tensor:
    x = batch.x
    for layer in model:
        x = layer(x.to(layer.weight.dtype))
    return x.float().square().mean()


def _in_single_precision() -> nn.Module:
    return MODELS["Perceptron"]().float()


def _under_autocast(model: nn.Module, batch: Batch) -> torch.Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return model(batch.x.float()).float().square().mean()


def _plain(model: nn.Module, batch: Batch) -> torch.Tensor:
    return model(batch.x.float()).square().mean()


@scenario("E1", "bfloat16 linear layers with single-precision norms: a bucket has one dtype, and no bits are lost")
def mixed_dtypes(setting: Setting) -> None:
    with twins(setting, _in_bfloat16, sgd) as pair:
        assert len(pair.engine.optimizer.plan.buckets) >= 2  # also where the whole model would fit into one
        pair.train(range(STEPS), _cast_between)
        pair.check()  # single-precision parameters within 1e-6: a detour through bfloat16 costs 1e-3


@scenario(
    "E1b",
    "single precision, alone and under autocast",
    kinds={"plain": _plain, "autocast": _under_autocast},  # not on three ranks: a third is inexact in bfloat16
)
def single_precision(setting: Setting, loss: Any) -> None:
    follow(setting, _in_single_precision, sgd, loss=loss)


def _channels_last() -> nn.Module:
    return MODELS["Convolutional"]()


class _Transposed(nn.Module):
    """A weight that lies transposed in memory, and a bias whose gradient is one expanded number."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter((torch.randn(4, 12) / 4).T)
        self.bias = nn.Parameter(torch.randn(4))
        self.bulk = nn.Parameter(torch.randn(2, 3, 5).permute(2, 0, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight + self.bias.sum() + self.bulk.mean()


class _Columns(nn.Module):
    """Two weights that are each other's neighbours in every row of one matrix."""

    def __init__(self) -> None:
        super().__init__()
        matrix = torch.randn(12, 5) / 4
        self.left, self.right = nn.Parameter(matrix[:, :3]), nn.Parameter(matrix[:, 3:])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([x @ self.left, (x @ self.right).tanh()], dim=1)


@scenario(
    "E2",
    "channels-last weights, transposed parameters, columns of one matrix, gradients that are not contiguous",
    kinds={"channels-last": _channels_last, "transposed": _Transposed, "columns": _Columns},
    world_sizes=(2, 3),
)
def layouts(setting: Setting, build: Any) -> None:
    follow(setting, build, sgd)


@scenario("E2b", "a model becomes channels-last after it was wrapped, while an update is pending")
def channels_last_later(setting: Setting) -> None:
    def contiguous() -> nn.Module:
        return MODELS["Convolutional"]().to(memory_format=torch.contiguous_format)

    with twins(setting, contiguous, sgd) as pair:
        pair.train(range(2))
        for side in pair:
            side.model.to(memory_format=torch.channels_last)
        pair.train(range(2, STEPS))
        pair.check()


class _Embedded(nn.Module):
    """An embedding with sparse gradients in the engine's model, with dense ones in the oracle's."""

    def __init__(self, sparse: bool, kind: Callable[..., nn.Module]) -> None:
        super().__init__()
        self.embedding = kind(20, 12, sparse=sparse)
        self.head = nn.Linear(12, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = (x.abs() * 7).long() % 20
        h = self.embedding(tokens)
        return self.head(h.mean(1) if h.ndim == 3 else h)


def _called_twice(model: nn.Module, batch: Batch) -> torch.Tensor:
    return (model(batch.x) * model(batch.x.flip(1) + 0.1)).mean()


def _dense_as_well(model: nn.Module, batch: Batch) -> torch.Tensor:
    return model(batch.x).square().mean() + model.embedding.weight[:3].square().mean()


def _on_one_rank(model: nn.Module, batch: Batch) -> torch.Tensor:
    return model(batch.x).mean() if batch.rank == 0 else model.head(batch.x).mean()


@scenario(
    "E3",
    "sparse gradients of embeddings are made dense",
    kinds={
        "Embedding": (nn.Embedding, _called_twice),
        "EmbeddingBag": (nn.EmbeddingBag, _called_twice),
        "used densely as well": (nn.Embedding, _dense_as_well),
        "on one rank": (nn.Embedding, _on_one_rank),
    },
)
def sparse(setting: Setting, kind: Any) -> None:
    embedding, loss = kind
    sides = iter((True, False))  # the engine's model is built first
    follow(setting, lambda: _Embedded(next(sides), embedding), adamw, loss=loss)


class _Tiny(nn.Module):
    """Parameters of one element, of none, and without dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(0.5))
        self.shift = nn.Parameter(torch.zeros(1))
        self.empty = nn.Parameter(torch.zeros(0, 3))
        self.head = nn.Linear(1, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(x[:, :1] * self.scale + self.shift) + self.empty.sum()


@scenario(
    "E4",
    "fewer elements than ranks, or none",
    kinds={"a tiny model": _Tiny, "a tiny layer": MODELS["Perceptron"], "one element": lambda: nn.Linear(12, 1)},
    world_sizes=(2, 3, 4),
)
def fewer_elements_than_ranks(setting: Setting, build: Any) -> None:
    follow(setting, build, adamw)


@scenario(
    "E5",
    "replicas from different seeds start with rank 0's parameters and buffers, whatever their dtype and layout",
    kinds={name: MODELS[name] for name in ("Convolutional", "Hoarder", "Attention")},
    world_sizes=(2, 3),
)
def different_seeds(setting: Setting, build: Any) -> None:
    with twins(setting, build, sgd) as pair:
        model, reference = pair.engine.model, built(build, 0)
        for mine, first in zip(model.state_dict().values(), reference.state_dict().values(), strict=True):
            assert torch.equal(mine, first)
        check_same_everywhere(model.parameters())
        check_same_everywhere(torch.view_as_real(buffer + 0j) for buffer in model.buffers())
        assert dist.get_rank() == 0 or not torch.equal(next(model.parameters()), next(built(build, 9).parameters()))
        pair.train(range(STEPS))
        pair.check()
