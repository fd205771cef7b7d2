"""D: what is done to gradients between `backward()` and `step()`: clipped, unscaled, changed, dropped."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from support.models import MODELS
from support.scenarios.core import (
    STEPS,
    Batch,
    Loud,
    Setting,
    Side,
    Twins,
    adamw,
    always,
    check_equal,
    check_same_everywhere,
    inputs,
    plain_loss,
    scenario,
    sgd,
    twins,
)
from support.training import digest
from torch import nn

from dear_tune.errors import GradientError


def _train_clipped(pair: Twins, step: int, *, micro_batches: int = 1, loss: Any = plain_loss, **settings: Any) -> None:
    norms = []
    for side in pair:
        side.optimizer.zero_grad()
        for micro in range(1, micro_batches):
            with side.no_sync():
                side.backward(100 * micro + step, loss)
        side.backward(step, loss)
        norms.append(side.clip_grad_norm_(**settings))
        side.optimizer.step()
    check_equal(*norms)
    check_same_everywhere(norms[:1])


def _on_some_ranks(model: nn.Module, batch: Batch) -> torch.Tensor:
    used = (batch.rank + batch.step) % 2 == 0
    return plain_loss(model, batch) if used else model[0](batch.x).square().mean()


@scenario(
    "D2",
    "the engine's `clip_grad_norm_` between `backward()` and `step()`: the norm of the mean gradient, on all ranks",
    kinds={
        "0.1": {"max_norm": 0.1},
        "largest": {"max_norm": 0.1, "norm_type": float("inf")},
        "sum": {"max_norm": 0.1, "norm_type": 1.0},
        "nothing to clip": {"max_norm": 1e3},
        "accumulated": {"max_norm": 0.1, "micro_batches": 3},
        "unused on some ranks": {"max_norm": 0.1, "loss": _on_some_ranks},
        "an expected error": {"max_norm": 0.1, "error_if_nonfinite": True},
    },
    world_sizes=(2, 3),
)
def clipping(setting: Setting, settings: Any) -> None:
    with twins(setting, MODELS["Perceptron"], adamw) as pair:
        for step in range(STEPS):
            _train_clipped(pair, step, **settings)
        pair.check()


@scenario("D2b", "clipping with parameters unused, frozen, and with the threshold changed in between")
def clipping_beside_the_rest(setting: Setting) -> None:
    with twins(setting, MODELS["Backwards"], adamw) as pair:
        for step in range(STEPS):
            _train_clipped(pair, step, max_norm=0.1)
            pair.engine.optimizer.set_threshold([1, 1500, 2**30][step % 3])
        pair.check()


def _infinite(model: nn.Module, batch: Batch) -> torch.Tensor:
    return plain_loss(model, batch) * (float("inf") if batch.rank == 1 else 1)


@scenario("D2c", "an infinite gradient on one rank, and `error_if_nonfinite`: every rank raises, and can go on")
def clipping_infinity(setting: Setting) -> None:
    with twins(setting, MODELS["Perceptron"], adamw) as pair:
        for step in range(STEPS):
            if step == 2:
                for side in pair:
                    side.optimizer.zero_grad()
                    side.backward(step, _infinite)
                    try:
                        side.clip_grad_norm_(0.1, error_if_nonfinite=True)
                    except RuntimeError as error:
                        assert "non-finite" in str(error)  # noqa: PT017 # there is no pytest among the ranks
                    else:
                        raise AssertionError("the norm was taken for finite")
            _train_clipped(pair, step, max_norm=0.1)
        pair.check()


def _replace_gradient(parameter: nn.Parameter) -> None:
    assert parameter.grad is not None
    parameter.grad = parameter.grad.clamp(-0.1, 0.1)


def _make_infinite_zero(parameter: nn.Parameter) -> None:
    assert parameter.grad is not None
    torch.nan_to_num(parameter.grad, out=parameter.grad)


BY_HAND: dict[str, Callable[[nn.Parameter], object]] = {
    "clip_grad_norm_": lambda p: nn.utils.clip_grad_norm_([p], 1e-3),
    "clip_grad_value_": lambda p: nn.utils.clip_grad_value_([p], 1e-3),
    "clamp_": lambda p: p.grad.clamp_(-1e-3, 1e-3),
    "mul_": lambda p: p.grad.mul_(0.5),
    "_foreach_mul_": lambda p: torch._foreach_mul_([p.grad], 0.5),
    "nan_to_num": _make_infinite_zero,
    "another tensor": _replace_gradient,
}


@scenario(
    "D2d",
    "a gradient that is changed by other means after `backward()`",
    kinds=BY_HAND,
    loud=always(Loud(GradientError, "0.weight")),
)
def clipped_by_hand(setting: Setting, change: Any) -> None:
    with twins(setting, MODELS["Perceptron"], adamw) as pair:
        pair.train(range(2))
        pair.engine.optimizer.zero_grad()
        pair.engine.backward(2)
        change(pair.engine.model[0].weight)
        pair.engine.optimizer.step()


@scenario("D2e", "gradients that are changed under `no_sync()`, before the last backward of a step")
def changed_before_the_last(setting: Setting) -> None:
    with twins(setting, MODELS["Perceptron"], adamw) as pair:
        for step in range(STEPS):
            _halve_before_the_last(pair, step)
        pair.check()


def _halve_before_the_last(pair: Twins, step: int) -> None:
    for side in pair:
        side.optimizer.zero_grad()
        with side.no_sync():
            side.backward(step)
        for parameter in side.model.parameters():
            parameter.grad.mul_(0.5)
        side.backward(step + 100)
        side.optimizer.step()


@scenario("D2f", "one parameter's gradient is dropped between `backward()` and `step()`, on all ranks")
def dropped(setting: Setting) -> None:
    with twins(setting, MODELS["Perceptron"], sgd) as pair:
        for step in range(STEPS):
            for side in pair:
                side.optimizer.zero_grad()
                side.backward(step)
                side.model[step % 2 * 3].weight.grad = None
                side.optimizer.step()
        pair.check()


def _scaled(scaler: torch.amp.GradScaler, infinite: int | None) -> Callable[[nn.Module, Batch], torch.Tensor]:
    """A scaled loss, which one rank has infinite in one step."""

    def loss(model: nn.Module, batch: Batch) -> torch.Tensor:
        factor = float("inf") if batch.step == infinite and batch.rank == 1 else 1.0
        return scaler.scale(plain_loss(model, batch) * factor)

    return loss


@scenario(
    "D3",
    "`GradScaler` with an infinite gradient on one rank: every rank skips, and halves the scale",
    kinds={"step": False, "unscale_ and clip_grad_norm_": True},
    world_sizes=(2, 3),
)
def scaler(setting: Setting, clip: bool) -> None:
    with twins(setting, MODELS["Perceptron"], adamw) as pair:
        scalers = [torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=3) for _ in pair]
        for step in range(6):
            before = digest(pair.engine.model)
            for side, each in zip(pair, scalers, strict=True):
                _scaled_step(side, each, step, clip)
            assert scalers[0].get_scale() == scalers[1].get_scale()
            assert (digest(pair.engine.model) == before) == (step == 2)
        pair.check()


@scenario(
    "D3b",
    "`GradScaler` with gradients that have not been sent yet when it looks: all under `no_sync()`, or some set by hand",
    kinds={"under no_sync": None, "by hand": 0},
)
def scaler_of_unsent(setting: Setting, by_hand: int | None) -> None:
    with twins(setting, MODELS["Perceptron"], adamw) as pair:
        scalers = [torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=3) for _ in pair]
        for step in range(STEPS):
            for side, each in zip(pair, scalers, strict=True):
                side.optimizer.zero_grad()
                with side.no_sync():
                    side.backward(step, _scaled(each, infinite=None))
                if by_hand is not None:
                    parameters = list(side.model[by_hand].parameters())
                    mine = [torch.zeros_like(parameter) for parameter in parameters]
                    for rank in side.ranks:
                        loss = each.scale(plain_loss(side.model, Batch(inputs(step + 50)[rank], rank, step)))
                        for sum_, gradient in zip(mine, torch.autograd.grad(loss, parameters), strict=True):
                            sum_.add_(gradient, alpha=1 / len(side.ranks))
                    for parameter, gradient in zip(parameters, mine, strict=True):
                        parameter.grad = gradient
                each.unscale_(side.optimizer)
                side.clip_grad_norm_(0.1)
                each.step(side.optimizer)
                each.update()
        pair.check()


def _comes_later(side: Side) -> None:
    for rank in side.ranks:
        side.model[3](torch.ones(1, 16, dtype=torch.double) * (1 + rank)).sum().backward()


def _is_dropped(side: Side) -> None:
    side.model[0].bias.grad = None


def _is_set(side: Side) -> None:
    side.model[3].bias.grad = torch.ones_like(side.model[3].bias)


@scenario(
    "D2g",
    "after `clip_grad_norm_` a gradient comes, is dropped or is set by hand, while others stay",
    kinds={"comes": _comes_later, "is dropped": _is_dropped, "is set": _is_set},
    loud=always(Loud(GradientError, "Clip and unscale last")),
)
def changed_after_clipping(setting: Setting, change: Any) -> None:
    with twins(setting, MODELS["Perceptron"], sgd) as pair:
        side = pair.engine
        side.model[0](inputs(0)[side.ranks[0]]).square().mean().backward()
        side.clip_grad_norm_(0.01)
        change(side)
        side.optimizer.step()


def _not_a_number(model: nn.Module, batch: Batch) -> torch.Tensor:
    return model[3](torch.full((1, 16), torch.nan if batch.rank == 0 else 1.0, dtype=torch.double)).sum()


@scenario("D2h", "NaN on one rank, and the largest element as the norm: every rank learns of it")
def largest_of_nan(setting: Setting) -> None:
    with twins(setting, MODELS["Perceptron"], sgd) as pair:
        pair.train(range(2))
        for side in pair:
            side.optimizer.zero_grad()
            side.backward(2, _not_a_number)
            assert side.clip_grad_norm_(0.1, norm_type=float("inf")).isnan()
            side.optimizer.zero_grad()
        pair.train(range(3, 5))
        pair.check()


def _scaled_step(side: Side, scaler: torch.amp.GradScaler, step: int, clip: bool) -> None:
    side.optimizer.zero_grad()
    side.backward(step, _scaled(scaler, infinite=2))
    if clip:
        scaler.unscale_(side.optimizer)
        side.clip_grad_norm_(0.1)
    scaler.step(side.optimizer)
    scaler.update()
