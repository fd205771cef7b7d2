"""D: what a plain optimizer promises, and what training scripts therefore do with one."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from support.models import MODELS
from support.scenarios.core import (
    STEPS,
    Loud,
    Setting,
    Side,
    adamw,
    always,
    beside,
    built,
    follow,
    scenario,
    sgd,
    twins,
    wrapped,
)
from torch import nn
from torch.optim import lr_scheduler

from dear_tune.errors import UnsupportedError


def _pointwise() -> dict[str, Callable[[Any], torch.optim.Optimizer]]:
    o = torch.optim
    kinds: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
        "SGD": partial(o.SGD, lr=0.05),
        "SGD, momentum": partial(o.SGD, lr=0.05, momentum=0.9, dampening=0.1),
        "SGD, Nesterov": partial(o.SGD, lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.01),
        "SGD, maximize": partial(o.SGD, lr=0.05, momentum=0.9, maximize=True, foreach=False),
        "SGD, fused": partial(o.SGD, lr=0.05, momentum=0.9, fused=True),
        "SGD, tensor rate": lambda p: o.SGD(p, lr=torch.tensor(0.05), momentum=0.9),
        "Adam": partial(o.Adam, lr=0.01, weight_decay=0.01),
        "Adam, amsgrad": partial(o.Adam, lr=0.01, amsgrad=True, maximize=True),
        "Adam, decoupled": partial(o.Adam, lr=0.01, weight_decay=0.1, decoupled_weight_decay=True),
        "AdamW": partial(o.AdamW, lr=0.01),
        "AdamW, amsgrad": partial(o.AdamW, lr=0.01, amsgrad=True, foreach=False),
        "AdamW, foreach": partial(o.AdamW, lr=0.01, foreach=True),
        "AdamW, fused": partial(o.AdamW, lr=0.01, fused=True, amsgrad=True),
        "AdamW, tensor rate": lambda p: o.AdamW(p, lr=torch.tensor(0.01), foreach=False),
        "AdamW, fused, tensor rate": lambda p: o.AdamW(p, lr=torch.tensor(0.01), fused=True),
        "NAdam": partial(o.NAdam, lr=0.01),
        "NAdam, decoupled": partial(o.NAdam, lr=0.01, weight_decay=0.1, decoupled_weight_decay=True, foreach=True),
        "RAdam": partial(o.RAdam, lr=0.01),
        "RAdam, decoupled": partial(o.RAdam, lr=0.01, weight_decay=0.1, decoupled_weight_decay=True),
        "Adamax": partial(o.Adamax, lr=0.01, weight_decay=0.01),
        "Adadelta": partial(o.Adadelta, lr=0.5, weight_decay=0.01),
        "Adagrad": partial(o.Adagrad, lr=0.05, lr_decay=0.1, initial_accumulator_value=0.1),
        "Adagrad, fused": partial(o.Adagrad, lr=0.05, fused=True),
        "ASGD": partial(o.ASGD, lr=0.05, t0=2, weight_decay=0.01),
        "Rprop": partial(o.Rprop, lr=0.01),
        "RMSprop": partial(o.RMSprop, lr=0.01),
        "RMSprop, centered": partial(o.RMSprop, lr=0.01, centered=True, momentum=0.5, weight_decay=0.01),
    }
    return kinds


POINTWISE = _pointwise()


@scenario("D1", "every optimizer of `torch.optim` whose update is pointwise", kinds=POINTWISE)
def pointwise(setting: Setting, make: Any) -> None:
    follow(setting, MODELS["Perceptron"], make, steps=7)  # RAdam rectifies from the sixth on


class _Lamb(torch.optim.Optimizer):
    """A user's own: the step's length is that of the parameter."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.05})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # noqa: ARG002 # an optimizer's signature
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    average = self.state[p].setdefault("average", torch.zeros_like(p)).lerp_(p.grad, 0.5)
                    p.add_(average, alpha=-group["lr"] * float(p.norm() / (average.norm() + 1e-8)))


def _matrices() -> nn.Module:
    layers = (nn.Linear(12, 16, bias=False), nn.Tanh(), nn.Linear(16, 8, bias=False), nn.Linear(8, 4, bias=False))
    return nn.Sequential(*layers)


@scenario(
    "D1b",
    "optimizers whose update of a parameter takes all of it: Adafactor, Muon, one of the user's own",
    kinds={
        "Adafactor": partial(torch.optim.Adafactor, lr=0.05),
        "_Lamb": _Lamb,
        **({"Muon": partial(torch.optim.Muon, lr=0.02)} if hasattr(torch.optim, "Muon") else {}),  # from torch 2.9 on
    },
    loud={"sharded": Loud(UnsupportedError, "{kind}")},
)
def not_pointwise(setting: Setting, make: Any) -> None:
    follow(setting, _matrices, make)


@scenario(
    "D1c",
    "optimizers that cannot be stepped bucket by bucket: LBFGS, SparseAdam",
    kinds={"LBFGS": torch.optim.LBFGS, "SparseAdam": torch.optim.SparseAdam},
    loud=always(Loud(UnsupportedError, "{kind}")),
)
def not_supported(setting: Setting, make: Any) -> None:
    model = built(_matrices)
    with wrapped(setting, make(list(model.parameters())), model):
        pass


def _half_each_step(optimizer: torch.optim.Optimizer) -> Any:
    return lr_scheduler.StepLR(optimizer, 1, 0.5)


def _one_cycle(optimizer: torch.optim.Optimizer) -> Any:
    return lr_scheduler.OneCycleLR(optimizer, max_lr=0.05, total_steps=12)


def _warm_up(optimizer: torch.optim.Optimizer) -> Any:
    parts = [lr_scheduler.LinearLR(optimizer, 0.1, total_iters=4), lr_scheduler.CosineAnnealingLR(optimizer, 6)]
    return lr_scheduler.SequentialLR(optimizer, parts, [4])


SCHEDULERS = {"StepLR": _half_each_step, "OneCycleLR": _one_cycle, "SequentialLR": _warm_up}


@scenario("D4", "a learning-rate scheduler that steps right after `step()`", kinds=SCHEDULERS)
def scheduled(setting: Setting, make: Any) -> None:
    _check_scheduled(setting, adamw, make)


@scenario("D4b", "a scheduler on the wrapped optimizer; a rate that is a tensor, which schedulers change in place")
def scheduled_inside(setting: Setting) -> None:
    def tensor_rate(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters, lr=torch.tensor(0.02), foreach=False)

    for make in (adamw, tensor_rate):
        _check_scheduled(setting, make, _half_each_step, on_wrapped=True)
    _check_scheduled(setting, tensor_rate, _half_each_step)


def _check_scheduled(setting: Setting, make: Any, scheduler: Any, on_wrapped: bool = False) -> None:
    model, reference = (built(MODELS["Perceptron"]) for _ in range(2))
    inner, oracle = make(model.parameters()), make(reference.parameters())
    with wrapped(setting, inner, model) as optimizer, warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*before `optimizer.step")  # older ones warn of their own calls
        pair = beside(model, optimizer, reference, oracle)
        schedulers = [scheduler(inner if on_wrapped else optimizer), scheduler(oracle)]
        for step in range(10):
            pair.train([step])
            for each in schedulers:
                each.step()
        pair.check()


@scenario("D4c", "hyper-parameters that are changed by hand right after `step()`")
def changed_by_hand(setting: Setting) -> None:
    with twins(setting, MODELS["Perceptron"], adamw) as pair:
        for step in range(STEPS):
            for side in pair:
                side.train(step)
                for group in side.optimizer.param_groups:
                    group.update(lr=0.01 / (1 + step), betas=(0.5, 0.9 + step / 100), weight_decay=step / 10)
        for side in pair:
            side.optimizer.param_groups[0]["betas"] = [0.5, 0.9]
        for step in range(STEPS, 2 * STEPS):
            for side in pair:
                side.train(step)
                side.optimizer.param_groups[0]["betas"][0] = step / 20  # in place
        pair.check()


def _three_groups(parameters: Any) -> torch.optim.Optimizer:
    kept = list(parameters)
    groups = [
        {"params": kept[0::3], "weight_decay": 0.1},
        {"params": kept[1::3], "lr": 0.003, "betas": (0.5, 0.9)},
        {"params": kept[2::3], "maximize": True, "amsgrad": True},
    ]
    return torch.optim.AdamW(groups, lr=0.01)


def _named_groups(parameters: Any) -> torch.optim.Optimizer:
    kept = [(f"parameter {index}", p) for index, p in enumerate(parameters)]
    groups = [{"params": kept[::2], "weight_decay": 0.0}, {"params": kept[1::2]}]
    return torch.optim.SGD(groups, lr=0.05, momentum=0.9)


def _decay_for_matrices(parameters: Any) -> torch.optim.Optimizer:
    kept = list(parameters)
    groups = [{"params": [p for p in kept if p.ndim >= 2]}, {"params": [p for p in kept if p.ndim < 2], "lr": 0.3}]
    return torch.optim.SGD(groups, lr=0.05, weight_decay=0.1)


@scenario(
    "D5",
    "parameter groups with different settings, across buckets",
    kinds={"three": _three_groups, "with names": _named_groups, "by dimension": _decay_for_matrices},
)
def groups(setting: Setting, make: Any) -> None:
    follow(setting, MODELS["Perceptron"], make)


def _zero_gradients(side: Side, how: str, set_to_none: bool) -> None:
    if how == "optimizer":
        side.optimizer.zero_grad(set_to_none=set_to_none)
    elif how == "model":
        side.model.zero_grad(set_to_none=set_to_none)
    else:
        for group in side.optimizer.param_groups:
            for parameter in group["params"]:
                _zero_by_hand(parameter, set_to_none)


def _zero_by_hand(parameter: nn.Parameter, set_to_none: bool) -> None:
    if set_to_none:
        parameter.grad = None
    elif parameter.grad is not None:
        parameter.grad.detach_()
        parameter.grad.zero_()


@scenario(
    "D6",
    "`zero_grad()` of the optimizer, of the model or by hand, `set_to_none` both ways, at the loop's start or end",
    kinds={
        f"{how}, {set_to_none}, {where}": (how, set_to_none, where)
        for how in ("optimizer", "model", "by hand")
        for set_to_none in (True, False)
        for where in ("start", "end")
    },
)
def zero_grad(setting: Setting, kind: Any) -> None:
    how, set_to_none, where = kind
    with twins(setting, MODELS["Sometimes"], sgd) as pair:  # some steps use a parameter nowhere
        for step in range(8):
            for side in pair:
                if where == "start":
                    _zero_gradients(side, how, set_to_none)
                side.backward(step)
                side.optimizer.step()
                if where == "end":
                    _zero_gradients(side, how, set_to_none)
        pair.check()


@scenario("D6b", "gradients are never zeroed, or only those of one layer")
def never_zeroed(setting: Setting) -> None:
    with twins(setting, MODELS["Perceptron"], sgd) as pair:
        for step in range(STEPS):
            for side in pair:
                side.backward(step)
                side.optimizer.step()
                side.model[3].zero_grad()
        pair.check()


@scenario("D6c", "`step(closure)`, which evaluates the model and returns its loss")
def closure(setting: Setting) -> None:
    with twins(setting, MODELS["Perceptron"], adamw) as pair:
        for step in range(STEPS):
            for side in pair:

                def evaluate(side: Side = side, step: int = step) -> float:
                    side.optimizer.zero_grad()
                    side.backward(step)
                    return 0.5

                assert side.optimizer.step(evaluate) == 0.5
        pair.check()
