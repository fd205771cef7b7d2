"""B: in what order, and how often, modules run forward and backward."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from support.models import MODELS
from support.scenarios.core import STEPS, Batch, Setting, adamw, follow, inputs, plain_loss, scenario, sgd, twins
from torch import nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential


@scenario("B1", "forward runs modules in another order than they are registered in", world_sizes=(2, 3))
def backwards(setting: Setting) -> None:
    follow(setting, MODELS["Backwards"], adamw)


def _squares() -> nn.Module:
    return nn.ModuleList([*(nn.Linear(12, 12) for _ in range(4)), nn.Linear(12, 4)])


def _in_order(model: nn.Module, batch: Batch, turn: int) -> torch.Tensor:
    x = batch.x
    for index in range(4):
        x = torch.tanh(model[(index * 3 + turn) % 4](x))
    return model[4](x).square().mean()


@scenario(
    "B1b",
    "the order of forward changes from step to step, or differs between ranks",
    kinds={
        "by step": lambda model, batch: _in_order(model, batch, batch.step),
        "by rank": lambda model, batch: _in_order(model, batch, batch.step + batch.rank),
    },
    world_sizes=(2, 3),
)
def changing_order(setting: Setting, loss: Any) -> None:
    follow(setting, _squares, adamw, loss=loss)


@scenario("B2", "one module is called three times in one forward; Adam counts steps, not calls")
def three_calls(setting: Setting) -> None:
    def loss(model: nn.Module, batch: Batch) -> torch.Tensor:
        x = batch.x
        for _ in range(3):
            x = torch.tanh(model[0](x))
        return model[4](x).square().mean()

    with twins(setting, _squares, adamw) as pair:
        pair.train(range(STEPS), loss)
        pair.check()  # the count of steps too, against the oracle
        assert {float(state["step"]) for state in pair.oracle.optimizer.state.values()} == {STEPS}


@scenario("B2b", "recurrent layers, which keep their weights in a list, are called twice")
def recurrent(setting: Setting) -> None:
    follow(setting, MODELS["Recurrent"], adamw)


class _Checkpointed(nn.Module):
    """Recomputes a part of forward inside backward; the part may hold another such part."""

    def __init__(self, reentrant: bool, nested: bool) -> None:
        super().__init__()
        self.reentrant = reentrant
        self.stem = nn.Linear(12, 12)
        self.middle = nn.Sequential(nn.Linear(12, 12), nn.Tanh(), nn.Linear(12, 12))
        self.inner = _Checkpointed(reentrant, nested=False) if nested else nn.Linear(12, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = checkpoint(self.middle, self.stem(x), use_reentrant=self.reentrant)
        return checkpoint(self.inner, h, use_reentrant=self.reentrant)


def _whole_model(model: nn.Module, batch: Batch) -> torch.Tensor:
    return checkpoint(model, batch.x.clone().requires_grad_(), use_reentrant=False).square().mean()


def _segments(model: nn.Module, batch: Batch) -> torch.Tensor:
    x = batch.x.clone().requires_grad_()
    return checkpoint_sequential([model.stem, model.middle], 2, x, use_reentrant=False).square().mean()


CHECKPOINTS = {"one": (False, plain_loss), "nested": (True, plain_loss)}


@scenario(
    "B3",
    "activation checkpointing, non-reentrant: forward runs again in backward",
    kinds={**CHECKPOINTS, "the whole model": (True, _whole_model), "segments": (False, _segments)},
)
def checkpointing(setting: Setting, kind: Any) -> None:
    nested, loss = kind
    follow(setting, lambda: _Checkpointed(False, nested), adamw, loss=loss)


@scenario(
    "B4",
    "activation checkpointing, reentrant: a no-grad forward, then another one and a backward inside backward",
    kinds=CHECKPOINTS,
)
def reentrant_checkpointing(setting: Setting, kind: Any) -> None:
    nested, loss = kind
    follow(setting, lambda: _Checkpointed(True, nested), adamw, loss=loss)


def _normalized() -> nn.Module:
    return nn.Sequential(nn.Linear(12, 12), nn.BatchNorm1d(12), nn.ReLU(), nn.Linear(12, 4))


def _two_forwards(model: nn.Module, batch: Batch) -> torch.Tensor:
    first, second = model(batch.x), model(batch.x.square())
    return (first * second).mean() + first.square().mean()


def _contrast(model: nn.Module, batch: Batch) -> torch.Tensor:
    with torch.no_grad():
        target = model(batch.x.flip(1))
    return (model(batch.x) - target).square().mean()


# Not Adam: a bias before batch normalization has no gradient but rounding.
@scenario(
    "B5",
    "two forwards, then one backward, with batch normalization",
    kinds={"both with gradients": _two_forwards, "one without": _contrast},
)
def two_forwards(setting: Setting, loss: Any) -> None:
    follow(setting, _normalized, sgd, loss=loss)


def _retained(model: nn.Module, batch: Batch) -> list[torch.Tensor]:
    loss = plain_loss(model, batch)
    return [loss, loss]


def _two_losses(model: nn.Module, batch: Batch) -> list[torch.Tensor]:
    output = model(batch.x)
    return [output[:, 0].square().mean(), output[:, 1:].mean()]


def _two_heads(model: nn.Module, batch: Batch) -> list[torch.Tensor]:
    h = model[0](batch.x)
    return [h.square().mean(), model[4](model[3](model[2](h))).mean()]


@scenario(
    "B6",
    "one forward, two backward passes with `retain_graph`",
    kinds={"the same loss": _retained, "two losses": _two_losses, "losses of different depth": _two_heads},
)
def two_backwards(setting: Setting, loss: Any) -> None:
    follow(setting, MODELS["Perceptron"], adamw, loss=loss)


class _Looked(nn.Module):
    """Embeddings under a frozen head: a graph of it has saved no parameter that is trained."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(12, 12)
        self.head = nn.Linear(12, 4).requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.embedding(x.abs().mul(10).long() % 12).mean(1))


@scenario(
    "B6f",
    "one forward, with a backward before `step()` and another one after it: the graph has saved no parameter",
    kinds={"linear": partial(nn.Linear, 12, 4), "embedding": _Looked},
)
def backward_after_the_step(setting: Setting, build: Any) -> None:
    with twins(setting, build, sgd) as pair:
        for step in range(STEPS):
            for side in pair:
                outputs = [side.model(inputs(step)[rank]) for rank in side.ranks]
                for power in (2, 3):
                    side.optimizer.zero_grad()
                    for output in outputs:
                        (output.pow(power).sum() / len(outputs)).backward(retain_graph=True)
                    side.optimizer.step()
        pair.check()


def _one_after_another(model: nn.Module, batch: Batch) -> Iterator[torch.Tensor]:
    for micro in range(3):
        yield plain_loss(model, Batch(batch.x * (1 + micro), batch.rank, batch.step))


def _expert_first(model: nn.Module, batch: Batch) -> Iterator[torch.Tensor]:
    yield plain_loss(model, batch)
    yield model[0](batch.x).square().mean()


@scenario(
    "B6b",
    "accumulation of several forward and backward passes without `no_sync`",
    kinds={"all parameters": _one_after_another, "fewer in the last": _expert_first},
    world_sizes=(2, 3),
)
def accumulation_without_no_sync(setting: Setting, loss: Any) -> None:
    follow(setting, MODELS["Perceptron"], adamw, loss=loss)


@scenario("B6c", "a backward whose gradients are thrown away by `zero_grad()`, and another one, before `step()`")
def skipped(setting: Setting) -> None:
    with twins(setting, MODELS["Perceptron"], adamw) as pair:
        for step in range(STEPS):
            for side in pair:
                side.optimizer.zero_grad(set_to_none=step % 2 == 0)
                side.backward(100 + step)
                side.train(step)
        pair.check()


def _penalty(model: nn.Module, batch: Batch) -> torch.Tensor:
    x = batch.x.clone().requires_grad_()
    (slope,) = torch.autograd.grad(model(x).square().mean(), x, create_graph=True)
    return slope.square().sum() + plain_loss(model, batch)


def _adapted(model: nn.Module, batch: Batch) -> torch.Tensor:
    names, parameters = zip(*model.named_parameters(), strict=True)
    slopes = torch.autograd.grad(plain_loss(model, batch), parameters, create_graph=True)
    inner = {name: p - 0.1 * slope for name, p, slope in zip(names, parameters, slopes, strict=True)}
    return torch.func.functional_call(model, inner, (batch.x,)).square().mean()


@scenario(
    "B6d",
    "gradients of gradients",
    kinds={"gradient penalty": _penalty, "an inner step": _adapted},
)
def double_backward(setting: Setting, loss: Any) -> None:
    follow(setting, MODELS["Perceptron"], adamw, loss=loss)


@scenario("B6e", "a backward for some of the parameters only, by `backward(inputs=...)`")
def some_inputs(setting: Setting) -> None:
    with twins(setting, MODELS["Perceptron"], adamw) as pair:
        for step in range(STEPS):
            for side in pair:
                side.optimizer.zero_grad()
                wanted = list(side.model[step % 2 * 3].parameters())

                def some(model: nn.Module, batch: Batch, wanted: Any = wanted, side: Any = side) -> list[torch.Tensor]:
                    (plain_loss(model, batch) / len(side.ranks)).backward(inputs=wanted)
                    return []

                side.backward(step, some)
                side.optimizer.step()
        pair.check()


def _buckets_reduced_once(pair: Any, steps: int) -> None:
    optimizer = pair.engine.optimizer
    assert optimizer.traffic.reduce_scatters == steps * len(optimizer.plan.buckets)


@scenario("B7", "four micro-batches a step under `no_sync()`: each bucket is reduced once", world_sizes=(2, 3))
def accumulation(setting: Setting) -> None:
    with twins(setting, MODELS["Perceptron"], adamw) as pair:
        for step in range(STEPS):
            for side in pair:
                side.optimizer.zero_grad()
                with side.no_sync():
                    for micro in range(3):
                        side.backward(10 * step + micro)
                side.backward(10 * step + 3)
                side.optimizer.step()
        _buckets_reduced_once(pair, STEPS)
        pair.check()


@scenario("B7b", "all micro-batches, the last one too, under `no_sync()`, and `step()` outside")
def all_under_no_sync(setting: Setting) -> None:
    with twins(setting, MODELS["Perceptron"], adamw) as pair:
        for step in range(STEPS):
            for side in pair:
                side.optimizer.zero_grad()
                with side.no_sync():
                    for micro in range(2):
                        side.backward(10 * step + micro)
                side.optimizer.step()
        _buckets_reduced_once(pair, STEPS)
        pair.check()


def _without_expert(model: nn.Module, batch: Batch) -> torch.Tensor:
    return model.head(torch.tanh(model.base(batch.x))).square().mean()


@scenario("B7c", "a parameter is used only in a micro-batch under `no_sync()`, not in the last one")
def early_only(setting: Setting) -> None:
    with twins(setting, MODELS["Sometimes"], adamw) as pair:
        for step in range(STEPS):
            for side in pair:
                side.optimizer.zero_grad()
                with side.no_sync():
                    side.backward(10 * step)
                side.backward(10 * step + 1, _without_expert)
                side.optimizer.step()
        pair.check()
