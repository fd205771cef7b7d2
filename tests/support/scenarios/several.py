"""D: several models and several engines in one process."""

from __future__ import annotations

from typing import Any

import torch
from support.models import MODELS
from support.scenarios.core import (
    STEPS,
    Batch,
    Loud,
    Setting,
    Side,
    adamw,
    always,
    beside,
    built,
    scenario,
    sgd,
    twins,
    wrapped,
)
from torch import nn

from dear_tune.errors import UnsupportedError


def _generator() -> nn.Module:
    return nn.Sequential(nn.Linear(12, 12), nn.Tanh(), nn.Linear(12, 12))


def _critic() -> nn.Module:
    return nn.Sequential(nn.Linear(12, 8), nn.Tanh(), nn.Linear(8, 1))


def _critic_step(generator: Side, critic: Side, step: int, detach: bool) -> None:
    def loss(_: nn.Module, batch: Batch) -> torch.Tensor:
        fake = generator.model(batch.x)
        return critic.model(fake.detach() if detach else fake).mean() - critic.model(batch.x.flip(1)).mean()

    critic.optimizer.zero_grad()
    critic.backward(step, loss)
    critic.optimizer.step()


def _generator_step(generator: Side, critic: Side, step: int) -> None:
    def loss(_: nn.Module, batch: Batch) -> torch.Tensor:
        return -critic.model(generator.model(batch.x)).mean()

    generator.optimizer.zero_grad()
    generator.backward(step, loss)
    generator.optimizer.step()


@scenario(
    "D10",
    "two models and two engines that train against each other: one's backward reaches the other's parameters",
    kinds={"fakes detached": (True, False), "not detached": (False, False), "critic frozen": (True, True)},
    world_sizes=(2, 3),
)
def adversaries(setting: Setting, kind: Any) -> None:
    detach, freeze = kind
    with twins(setting, _generator, adamw) as generators, twins(setting, _critic, adamw) as critics:
        for step in range(STEPS):
            for generator, critic in zip(generators, critics, strict=True):
                _critic_step(generator, critic, step, detach)
                critic.model.requires_grad_(not freeze)
                _generator_step(generator, critic, step)
                critic.model.requires_grad_(True)
        generators.check()
        critics.check()


@scenario("D10b", "two models that share a weight, which one of their two engines steps")
def shared_weight(setting: Setting) -> None:
    with twins(setting, _generator, adamw) as owners:
        weights = iter([side.model[0].weight for side in owners])

        def user() -> nn.Module:
            model = _critic()
            model.shared = next(weights)
            return model

        def own_only(parameters: Any) -> torch.optim.Optimizer:
            shared = [side.model[0].weight for side in owners]
            return adamw([p for p in parameters if not any(p is each for each in shared)])

        def loss(model: nn.Module, batch: Batch) -> torch.Tensor:
            return model(batch.x @ model.shared).square().mean()

        with twins(setting, user, own_only) as users:
            for step in range(STEPS):
                for owner, side in zip(owners, users, strict=True):
                    owner.optimizer.zero_grad()
                    side.optimizer.zero_grad()
                    owner.backward(step)
                    side.backward(step, loss)
                    side.optimizer.step()
                    owner.optimizer.step()
            owners.check()
            users.check()


@scenario(
    "D10c",
    "two models that share a weight, which both engines would step",
    loud=always(Loud(UnsupportedError, "shared")),
)
def stepped_twice(setting: Setting) -> None:
    def user() -> nn.Module:
        model = _critic()
        model.shared = owners.engine.model[0].weight
        return model

    with twins(setting, _generator, adamw) as owners, twins(setting, user, adamw):
        pass


@scenario("D10d", "two engines on one model, each with parameters of its own")
def two_engines(setting: Setting) -> None:
    model, reference = (built(MODELS["Perceptron"]) for _ in range(2))

    def matrices(m: nn.Module, wanted: bool) -> list[nn.Parameter]:
        return [p for p in m.parameters() if (p.ndim == 2) == wanted]

    with (
        wrapped(setting, sgd(matrices(model, True)), model) as first,
        wrapped(setting, adamw(matrices(model, False)), model) as second,
    ):
        oracles = sgd(matrices(reference, True)), adamw(matrices(reference, False))
        pairs = [beside(model, mine, reference, theirs) for mine, theirs in zip((first, second), oracles, strict=True)]
        for step in range(STEPS):
            for sides in zip(*pairs, strict=True):  # the engine's two, then the oracle's
                for side in sides:
                    side.optimizer.zero_grad()
                sides[0].backward(step)
                for side in sides:
                    side.optimizer.step()
        for pair in pairs:
            pair.check()
    assert type(model[0]) is nn.Linear
