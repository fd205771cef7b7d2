"""Uses that would give wrong numbers, or that the engine cannot serve."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import torch
import torch.distributed as dist
from support.training import WHOLE_MODEL, batches, build, loss_of, pending_model
from torch import nn
from torch.nn import functional as F

import dear_engine as dear
from dear_tune.errors import DearTuneError


def raised(case: str) -> str:
    """The type and text of what a forbidden use raises."""
    try:
        CASES[case]()
    except DearTuneError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


CASES: dict[str, Callable[[], None]] = {}
"""Uses that would give wrong numbers, or that the engine cannot serve."""


def _case(function: Callable[[], None]) -> Callable[[], None]:
    CASES[function.__name__] = function
    return function


@_case
def stale_read() -> None:
    model, _, _ = pending_model(WHOLE_MODEL)
    kept = model[0]._parameters["weight"]
    F.linear(batches(1)[0], kept).sum().backward()


@_case
def clipped_after_backward() -> None:
    model = build("Perceptron")
    optimizer = dear.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model, tuner=None)
    loss_of(model, batches(0)[0]).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
    optimizer.step()


@_case
def second_backward() -> None:
    model = build("Perceptron")
    dear.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model, tuner=None)
    loss_of(model, batches(0)[0]).backward()
    loss_of(model, batches(1)[0]).backward()


@_case
def sparse_gradient() -> None:
    model = nn.Embedding(4, 4, sparse=True)
    dear.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model, tuner=None)
    model(torch.tensor([1])).sum().backward()


@_case
def lbfgs() -> None:
    model = build("Perceptron")
    dear.DistributedOptimizer(torch.optim.LBFGS(model.parameters()), model, tuner=None)


@_case
def foreign_parameter() -> None:
    model = build("Perceptron")
    other = nn.Parameter(torch.zeros(3))
    dear.DistributedOptimizer(torch.optim.SGD([*model.parameters(), other], lr=0.1), model, tuner=None)


@_case
def nothing_to_train() -> None:
    model = build("Perceptron").requires_grad_(False)
    dear.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model, tuner=None)


@_case
def different_models() -> None:
    model = nn.Linear(2 + dist.get_rank(), 2)
    dear.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model, tuner=None)


@_case
def thawed() -> None:
    model = build("Backwards")
    optimizer = dear.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model, tuner=None)
    model.frozen.requires_grad_(True)
    loss_of(model, batches(0)[0]).backward()
    optimizer.step()


@_case
def scripted() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch.jit is deprecated, and still in use
        model = torch.jit.script(nn.Linear(2, 2))
    dear.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model, tuner=None)


@_case
def second_engine() -> None:
    model = build("Perceptron")
    for _ in range(2):
        dear.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model, tuner=None)


@_case
def hooked_optimizer() -> None:
    model = build("Perceptron")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.register_step_post_hook(lambda *_: None)
    dear.DistributedOptimizer(optimizer, model, tuner=None)
