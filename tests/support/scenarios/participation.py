"""C: which parameters, and which ranks, take part in a step."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from support.models import MODELS
from support.scenarios.core import (
    STEPS,
    Batch,
    Loud,
    Setting,
    Twins,
    adamw,
    always,
    follow,
    plain_loss,
    scenario,
    sgd,
    twins,
)
from torch import nn

from dear_tune.errors import CommunicationError


@scenario("C1", "a parameter that no rank uses stays as it is, under momentum and weight decay", world_sizes=(2, 3))
def unused(setting: Setting) -> None:
    with twins(setting, MODELS["Backwards"], sgd) as pair:
        before = pair.engine.model.unused.weight.detach().clone()
        pair.train(range(STEPS))
        pair.check()
        assert torch.equal(pair.engine.model.unused.weight, before)


@scenario(
    "C1b",
    "a parameter that every rank stops using: `zero_grad(set_to_none)` decides whether momentum goes on",
    kinds={"set_to_none=True": True, "set_to_none=False": False},
)
def unused_later(setting: Setting, set_to_none: bool) -> None:
    with twins(setting, _experts, sgd) as pair:
        for step in range(6):
            for side in pair:
                side.optimizer.zero_grad(set_to_none=set_to_none)
                side.backward(step, lambda model, batch: _chosen(model, batch, 0 if batch.step < 3 else 1))
                side.optimizer.step()
        pair.check()


def _experts() -> nn.Module:
    model = nn.Module()
    model.base = nn.Linear(12, 12)
    model.experts = nn.ModuleList(nn.Linear(12, 12) for _ in range(4))
    model.head = nn.Linear(12, 4)
    return model


def _chosen(model: nn.Module, batch: Batch, *experts: int) -> torch.Tensor:
    h = model.base(batch.x)
    for expert in experts:
        h = h + model.experts[expert](h)
    return model.head(torch.tanh(h)).square().mean()


def _fixed_rank(model: nn.Module, batch: Batch) -> torch.Tensor:
    return _chosen(model, batch, *([0] if batch.rank == 1 else []))


def _rank_by_step(model: nn.Module, batch: Batch) -> torch.Tensor:
    used = (batch.rank + batch.step) % dist.get_world_size() == 0
    return _chosen(model, batch, *([0, 3] if used else [1]))


def _rank_without_a_loss(model: nn.Module, batch: Batch) -> list[torch.Tensor]:
    return [] if (batch.rank + batch.step) % dist.get_world_size() == 0 else [plain_loss(model, batch)]


@scenario(
    "C2",
    "a parameter that some ranks use: a missing gradient counts as zero",
    kinds={"always the same rank": _fixed_rank, "another rank each step": _rank_by_step},
    world_sizes=(2, 3),
)
def some_ranks(setting: Setting, loss: Any) -> None:
    follow(setting, _experts, adamw, loss=loss, steps=6)


@scenario("C2b", "a rank that runs no backward in a step, another one each time", world_sizes=(2, 3))
def rank_without_backward(setting: Setting) -> None:
    follow(setting, MODELS["Perceptron"], adamw, loss=_rank_without_a_loss)


@scenario("C2c", "a step without a gradient on any rank changes nothing")
def no_gradient_anywhere(setting: Setting) -> None:
    with twins(setting, MODELS["Perceptron"], sgd) as pair:
        for step in range(STEPS):
            for side in pair:
                side.train(step, plain_loss if step % 2 else lambda *_: [])
        pair.check()


def _routed(model: nn.Module, batch: Batch) -> torch.Tensor:
    expert = (batch.x.sum(1).abs() * 7 + batch.rank + batch.step).long() % 4
    h = model.base(batch.x)
    outputs = torch.zeros_like(h)
    for index in expert.unique().tolist():
        if (index + batch.rank + batch.step) % 3:  # the others are over capacity
            outputs[expert == index] = model.experts[index](h[expert == index])
    return model.head(torch.tanh(h + outputs)).square().mean()


def _layer_drop(model: nn.Module, batch: Batch) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * batch.step + batch.rank)
    kept = torch.rand(4, generator=generator) > 0.5
    return _chosen(model, batch, *kept.nonzero().flatten().tolist())


@scenario(
    "C3",
    "mixture of experts with experts that get no tokens; layers dropped on each rank for itself",
    kinds={"experts": _routed, "dropped layers": _layer_drop},
    world_sizes=(2, 3),
)
def mixture(setting: Setting, loss: Any) -> None:
    follow(setting, _experts, adamw, loss=loss, steps=8)


def _freeze(pair: Twins, frozen: bool, child: int = 3) -> None:
    for side in pair:
        side.model[child].requires_grad_(not frozen)


@scenario(
    "C4",
    "a layer is frozen in the middle of a run, and stays as it is",
    kinds={"set_to_none=True": True, "set_to_none=False": False},
    world_sizes=(2, 3),
)
def freezing(setting: Setting, set_to_none: bool) -> None:
    with twins(setting, MODELS["Perceptron"], adamw) as pair:
        pair.train(range(STEPS))
        _freeze(pair, True)
        for side in pair:
            side.optimizer.zero_grad()  # what is left in .grad would go on being applied, in plain torch as well
        before = pair.engine.model[3].weight.detach().clone()
        for step in range(STEPS, 2 * STEPS):
            for side in pair:
                side.optimizer.zero_grad(set_to_none=set_to_none)
                side.backward(step)
                side.optimizer.step()
        pair.check()
        assert torch.equal(pair.engine.model[3].weight, before)


@scenario("C4b", "a layer is frozen between `backward()` and `step()`: its last gradient still counts")
def frozen_before_step(setting: Setting) -> None:
    with twins(setting, MODELS["Perceptron"], adamw) as pair:
        for step in range(STEPS):
            for side in pair:
                side.optimizer.zero_grad()
                side.backward(step)
            _freeze(pair, step >= 2)
            for side in pair:
                side.optimizer.step()
        pair.check()


@scenario("C4c", "the whole model is frozen for some steps of another loss, and unfrozen again")
def all_frozen(setting: Setting) -> None:
    with twins(setting, MODELS["Perceptron"], adamw) as pair:
        for step in range(6):
            for side in pair:
                side.model.requires_grad_(step not in (2, 3))
                side.train(step, plain_loss if step not in (2, 3) else lambda *_: [])
        pair.check()


@scenario("C4d", "a layer is frozen on one rank only: its gradient there counts as zero")
def frozen_on_one_rank(setting: Setting) -> None:
    def loss(model: nn.Module, batch: Batch) -> torch.Tensor:
        model[3].requires_grad_(batch.rank != 1 or batch.step < 2)
        return plain_loss(model, batch)

    follow(setting, MODELS["Perceptron"], adamw, loss=loss)


@scenario("C4e", "frozen again and again, another layer at each step")
def frozen_by_turns(setting: Setting) -> None:
    with twins(setting, MODELS["Perceptron"], adamw) as pair:
        for step in range(8):
            for child in (0, 2, 3):
                _freeze(pair, step % 3 == child % 3, child)
            pair.train([step])
        pair.check()


def _frozen_at_first() -> nn.Module:
    model = MODELS["Perceptron"]()
    model[0].requires_grad_(False)
    model[3].requires_grad_(False)
    return model


@scenario("C5", "layers that were frozen when the engine was built are unfrozen, one after another", world_sizes=(2, 3))
def unfreezing(setting: Setting) -> None:
    with twins(setting, _frozen_at_first, adamw) as pair:
        for child in (2, 3, 0):
            _freeze(pair, False, child)
            pair.train(range(child * 10, child * 10 + STEPS))
        pair.check()


def _head_only(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(list(parameters)[-2:], lr=0.01)


@scenario("C5b", "`add_param_group` for layers that the optimizer did not hold, while an update is pending")
def group_added(setting: Setting) -> None:
    with twins(setting, MODELS["Perceptron"], _head_only) as pair:
        for number, child in enumerate((3, 2, 0)):
            pair.train(range(number * 10, number * 10 + STEPS))
            for side in pair:
                side.optimizer.add_param_group({"params": list(side.model[child].parameters()), "lr": 0.003})
        pair.train(range(50, 50 + STEPS))
        pair.check()


@scenario("C5c", "`add_param_group` for a module that joined the model later, from another seed on every rank")
def module_added(setting: Setting) -> None:
    with twins(setting, MODELS["Perceptron"], adamw) as pair:
        pair.train(range(STEPS))
        for side in pair:
            torch.manual_seed(100 + side.ranks[0])
            side.model.append(nn.Linear(4, 4, dtype=torch.double))
            side.optimizer.add_param_group({"params": side.model[-1].parameters()})
        pair.train(range(STEPS, 2 * STEPS))
        pair.check()


# A rank that waits for its peers learns of their end by the group's timeout only.
@scenario(
    "C6",
    "uneven numbers of batches: the rank that goes on alone raises",
    loud=always(Loud(CommunicationError, "another rank")),
    thresholds=(1500,),
)
def uneven(setting: Setting) -> None:
    group = dist.new_group(timeout=timedelta(seconds=3))
    error: CommunicationError | None = None
    with twins(setting, MODELS["Perceptron"], adamw, process_group=group) as pair:
        pair.train(range(3))
        pair.check()
        try:
            if dist.get_rank() == 0:
                pair.engine.train(3)
                pair.engine.model.state_dict()
        except CommunicationError as raised:
            error = raised
        errors: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(errors, error)
        assert errors[1:] == [None]
    assert errors[0] is not None
    raise errors[0]
