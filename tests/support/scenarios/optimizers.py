"""D: what a plain optimizer promises, and what training scripts therefore do with one."""

from __future__ import annotations

import copy
import io
import pickle
import warnings
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from support.models import MODELS
from support.scenarios.core import (
    STEPS,
    UPDATES,
    Batch,
    Loud,
    Setting,
    Side,
    Twins,
    adamw,
    always,
    beside,
    built,
    check_equal,
    check_same_everywhere,
    follow,
    plain_loss,
    register,
    scenario,
    sgd,
    twins,
    wrapped,
)
from support.training import batches, digest
from torch import nn
from torch.optim import lr_scheduler
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from dear_tune.errors import GradientError, UnsupportedError


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
        "Muon": partial(torch.optim.Muon, lr=0.02),
        "_Lamb": _Lamb,
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


def _scaled_step(side: Side, scaler: torch.amp.GradScaler, step: int, clip: bool) -> None:
    side.optimizer.zero_grad()
    side.backward(step, _scaled(scaler, infinite=2))
    if clip:
        scaler.unscale_(side.optimizer)
        side.clip_grad_norm_(0.1)
    scaler.step(side.optimizer)
    scaler.update()


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
        warnings.simplefilter("error")
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


register("D7", "saved in the middle, resumed in fresh processes: equal to the last bit, at another world size too")


def save_in_the_middle(setting: Setting, folder: Path) -> str:
    """Train ten steps, saved by rank 0 after five; the digest of the end."""
    with twins(setting, MODELS["Functional"], adamw) as pair:
        pair.train(range(STEPS))
        saved = _saved(pair.engine)
        if dist.get_rank() == 0:
            torch.save(saved, folder / "saved.pt")
        pair.train(range(STEPS, 2 * STEPS))
        pair.check()
        return digest(pair.engine.model)


def resume(setting: Setting, folder: Path) -> str:
    """Go on from what was saved, beside a plain optimizer that does so too; the digest of the end."""
    with twins(setting, MODELS["Functional"], adamw) as pair:
        for side in pair:
            _restore(side, torch.load(folder / "saved.pt"))
        pair.train(range(STEPS, 2 * STEPS))
        pair.check()
        return digest(pair.engine.model)


def _saved(side: Side) -> dict[str, Any]:
    if side.is_engine:
        side.optimizer.consolidate_state_dict()
        if dist.get_rank() != 0:
            return {}
    return {"model": side.model.state_dict(), "optimizer": side.optimizer.state_dict()}


def _restore(side: Side, saved: Mapping[str, Any]) -> None:
    side.model.load_state_dict(saved["model"])
    side.optimizer.load_state_dict(saved["optimizer"])


@scenario("D7b", "a state dict goes from one update mode and threshold to the other, and to a plain optimizer and back")
def exchanged(setting: Setting) -> None:
    update = UPDATES[1 - UPDATES.index(setting.update)]
    with twins(setting, MODELS["Perceptron"], adamw) as pair:
        pair.train(range(3))
        pair.engine.optimizer.consolidate_state_dict(to=0)
        saved: list[Any] = [_with_state(pair.engine) if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(saved)
    with twins(Setting(update, 700), MODELS["Perceptron"], adamw) as other:
        for side in other:
            _restore(side, copy.deepcopy(saved[0]))
        other.train(range(3, 6))
        pair.oracle.train(3)
        pair.oracle.train(4)
        pair.oracle.train(5)
        other.check()
        check_equal(other.oracle.model.state_dict(), pair.oracle.model.state_dict())
        check_equal(other.oracle.optimizer.state_dict(), pair.oracle.optimizer.state_dict())


def _with_state(side: Side) -> dict[str, Any]:
    return {"model": side.model.state_dict(), "optimizer": side.optimizer.state_dict()}


@scenario("D7c", "`load_state_dict` goes back to an earlier step while an update is pending")
def gone_back(setting: Setting) -> None:
    with twins(setting, MODELS["Perceptron"], adamw) as pair:
        pair.train(range(2))
        pair.engine.optimizer.consolidate_state_dict()
        rank_zeros: list[Any] = [_with_state(pair.engine) if dist.get_rank() == 0 else None]
        dist.broadcast_object_list(rank_zeros)
        saved = copy.deepcopy((rank_zeros[0], _with_state(pair.oracle)))
        pair.train(range(2, 4))
        for side, state in zip(pair, saved, strict=True):
            side.optimizer.load_state_dict(state["optimizer"])
            side.model.load_state_dict(state["model"])
        pair.train(range(4, 6))
        pair.check()


@scenario(
    "D7d",
    "`state_dict()` of a sharded optimizer without `consolidate_state_dict()` before",
    loud={"sharded": Loud(UnsupportedError, "consolidate_state_dict")},
)
def not_consolidated(setting: Setting) -> None:
    with twins(setting, MODELS["Perceptron"], adamw) as pair:
        pair.train(range(2))
        check_equal(pair.engine.optimizer.state_dict(), pair.oracle.optimizer.state_dict())


Read = Callable[[Side, list[nn.Parameter]], Any]
"""A way to look at parameters: a side, and its parameters in a list made before. Gives tensors, or a whole model."""


def _pickled(model: nn.Module) -> nn.Module:
    return pickle.loads(pickle.dumps(model))


def _saved_and_loaded(thing: Any) -> Any:
    file = io.BytesIO()
    torch.save(thing, file)
    return torch.load(io.BytesIO(file.getvalue()), weights_only=False)


def _evaluated(model: nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model(batches(0)[0])


def _inferred_under_autocast(model: nn.Module) -> list[torch.Tensor]:
    with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16):
        return [model[0].weight.clone()]


def _in_evaluation_mode(side: Side, kept: list[nn.Parameter]) -> list[torch.Tensor]:
    side.model.eval()
    seen = [p.detach() for p in kept]
    side.model.train()
    return seen


def _averaged(side: Side, _: list[nn.Parameter]) -> nn.Module:
    average = AveragedModel(side.model, multi_avg_fn=get_ema_multi_avg_fn(0.5))
    average.update_parameters(side.model)
    return average.module


def _moving_average(_: Side, kept: list[nn.Parameter]) -> list[torch.Tensor]:
    averages = [torch.zeros_like(p, requires_grad=False) for p in kept]
    with torch.no_grad():
        torch._foreach_lerp_(averages, kept, 0.5)
    return averages


def _moving_average_of_data(_: Side, kept: list[nn.Parameter]) -> list[torch.Tensor]:
    averages = [torch.ones_like(p.data) for p in kept]
    for average, parameter in zip(averages, kept, strict=True):
        average.mul_(0.5).add_(parameter.data, alpha=0.5)
    return averages


def _copied(_: Side, kept: list[nn.Parameter]) -> list[torch.Tensor]:
    copies = [torch.empty_like(p, requires_grad=False) for p in kept]
    for each, parameter in zip(copies, kept, strict=True):
        each.copy_(parameter.detach())
    return copies


def _without_a_forward(read: Callable[[nn.Module], Any]) -> Read:
    return lambda side, _: read(side.model)


def _of_each(read: Callable[[nn.Parameter], Any]) -> Read:
    return lambda _, kept: [read(p) for p in kept]


OF_THE_MODEL: dict[str, Callable[[nn.Module], Any]] = {
    "state_dict": lambda model: model.state_dict(),
    "state_dict, keep_vars": lambda model: model.state_dict(keep_vars=True),
    "submodule's state_dict": lambda model: [child.state_dict() for child in model],
    "parameters": lambda model: [p.detach() for p in model.parameters()],
    "submodule's parameters": lambda model: [p.detach() for child in model for p in child.parameters()],
    "get_parameter": lambda model: [model.get_parameter("0.weight").detach()],
    "attribute": lambda model: [model[0].weight.detach(), model[4].bias.detach()],
    "parameters_to_vector": lambda model: [nn.utils.parameters_to_vector(model.parameters()).detach()],
    "deepcopy": copy.deepcopy,
    "deepcopy of a submodule": lambda model: copy.deepcopy(model[0]),
    "pickle": _pickled,
    "torch.save": _saved_and_loaded,
    "to": lambda model: model.to("cpu"),
    "share_memory": lambda model: model.share_memory(),
    "no-grad forward": _evaluated,
    "inference mode under autocast": _inferred_under_autocast,
    "torch.func.functional_call": lambda model: torch.func.functional_call(model, {}, (batches(0)[0],)).detach(),
}

OF_A_PARAMETER: dict[str, Callable[[nn.Parameter], Any]] = {
    "kept: detach": lambda p: p.detach(),
    "kept: .data": lambda p: p.data,
    "kept: clone": lambda p: p.detach().clone(),
    "kept: view": lambda p: p.view(-1).detach(),
    "kept: item": lambda p: p.flatten()[0].item(),
    "kept: tolist": lambda p: p.tolist(),
    "kept: numpy": lambda p: p.detach().numpy().tolist(),
    "kept: norm": lambda p: p.norm().detach(),
    "kept: deepcopy": copy.deepcopy,
    "kept: torch.save": lambda p: _saved_and_loaded(p).detach(),
    "kept: repr": repr,
    "kept: equal": lambda p: bool(torch.equal(p, torch.zeros_like(p))),
    "kept: isnan": lambda p: p.isnan().any().item(),
    "kept: bytes": lambda p: bytes(p.detach().flatten().view(torch.uint8).tolist()),
    "kept: untyped_storage": lambda p: bytes(p.untyped_storage().tolist()),
    "kept: dlpack": lambda p: torch.from_dlpack(p.detach()),
}

READS: dict[str, Read] = {
    **{name: _without_a_forward(read) for name, read in OF_THE_MODEL.items()},
    **{name: _of_each(read) for name, read in OF_A_PARAMETER.items()},
    "kept: eval()": _in_evaluation_mode,
    "kept: stack": lambda _, kept: torch.cat([p.flatten() for p in kept]).detach(),
    "kept: _foreach_norm": lambda _, kept: [norm.detach() for norm in torch._foreach_norm(kept)],
    "moving average by AveragedModel": _averaged,
    "moving average by _foreach_lerp_": _moving_average,
    "moving average of .data": _moving_average_of_data,
    "copy_": _copied,
    "param_groups": lambda side, _: [p.detach() for p in side.optimizer.param_groups[0]["params"]],
}


@scenario("D8", "whoever looks, in whatever way, while an update is pending sees the latest step", kinds=READS)
def pending_update(setting: Setting, read: Any) -> None:
    def make(parameters: Any) -> torch.optim.Optimizer:  # without state, which a rank has only a part of when sharded
        return torch.optim.SGD(parameters, lr=0.1)

    with twins(setting, MODELS["Perceptron"], make) as pair:
        kept = [list(side.model.parameters()) for side in pair]
        for step in range(3):
            for side in pair:
                side.train(step)
            seen = [read(side, references) for side, references in zip(pair, kept, strict=True)]
            check_equal(*(_plain(each) for each in seen))
        pair.check()


def _plain(seen: Any) -> Any:
    """Tensors and numbers, however nested; of a copied model its parameters, and that it is of plain classes."""
    if isinstance(seen, nn.Module):
        return {name: p.detach() for name, p in seen.named_parameters()}
    if isinstance(seen, nn.Parameter):
        return seen.detach()
    if isinstance(seen, Mapping):
        return {name: _plain(value) for name, value in seen.items()}
    return {str(index): _plain(value) for index, value in enumerate(seen)} if isinstance(seen, list) else seen


@scenario("D8b", "copies and pickles of a model are of its own classes, train by themselves and know no engine")
def independent_copies(setting: Setting) -> None:
    with twins(setting, MODELS["Perceptron"], adamw) as pair:
        pair.train(range(2))
        for copied in (copy.deepcopy(pair.engine.model), _pickled(pair.engine.model)):
            alone = torch.optim.SGD(copied.parameters(), lr=0.1)
            plain_loss(copied, Batch(batches(9)[0], 0, 9)).backward()
            alone.step()
            assert type(copied) is type(pair.oracle.model)
            assert {type(p) for p in copied.parameters()} == {nn.Parameter}
        pair.train(range(2, STEPS))
        pair.check()


@scenario("D8c", "threads that look at the model while training goes on see a step's values, and change nothing")
def threads(setting: Setting) -> None:
    with twins(setting, MODELS["Perceptron"], adamw) as pair, ThreadPoolExecutor(4) as readers:
        for step in range(10):
            pair.train([step])
            seen = [readers.submit(pair.engine.model.state_dict) for _ in range(4)]
            with torch.no_grad():
                pair.engine.model(batches(step)[0])
            for each in seen:
                check_equal(dict(each.result()), dict(pair.oracle.model.state_dict()))
        pair.check()


@scenario("D8d", "the last step is not lost when the engine is closed, or dropped with the process group, right after")
def last_step(setting: Setting) -> None:
    with twins(setting, MODELS["Perceptron"], adamw) as pair:
        kept = list(pair.engine.model.parameters())
        pair.train(range(STEPS))
    check_equal(dict(enumerate(p.detach() for p in kept)), dict(enumerate(pair.oracle.model.parameters())))


def _clamp_all(model: nn.Module, _: list[nn.Parameter]) -> None:
    for parameter in model.parameters():
        parameter.clamp_(-0.2, 0.2)


def _clamp_kept(_: nn.Module, kept: list[nn.Parameter]) -> None:
    for parameter in kept:
        parameter.clamp_(-0.2, 0.2)


def _clamp_data(_: nn.Module, kept: list[nn.Parameter]) -> None:
    for parameter in kept:
        parameter.data.clamp_(-0.2, 0.2)


def _set_data(_: nn.Module, kept: list[nn.Parameter]) -> None:
    for parameter in kept:
        parameter.data = parameter.data.clamp(-0.2, 0.2)


def _clamp_together(_: nn.Module, kept: list[nn.Parameter]) -> None:
    torch._foreach_clamp_max_(kept, 0.2)


def _renormalize(model: nn.Module, _: list[nn.Parameter]) -> None:
    model[0].weight.copy_(model[0].weight / model[0].weight.norm(dim=1, keepdim=True))


def _reset(model: nn.Module, _: list[nn.Parameter]) -> None:
    nn.init.ones_(model[2].weight)
    nn.init.zeros_(model[3].bias)


def _mask(_: nn.Module, kept: list[nn.Parameter]) -> None:
    kept[0][kept[0].abs() < 0.1] = 0
    kept[1][:2] = 0


def _overwrite(_: nn.Module, kept: list[nn.Parameter]) -> None:
    kept[0].copy_(torch.full_like(kept[0], 0.25))
    kept[1].fill_(0.5)


def _write_out(_: nn.Module, kept: list[nn.Parameter]) -> None:
    torch.mul(kept[0], 0.5, out=kept[0])


WRITES = {
    "parameters().clamp_": _clamp_all,
    "kept.clamp_": _clamp_kept,
    "kept.data.clamp_": _clamp_data,
    "kept.data =": _set_data,
    "_foreach_clamp_max_": _clamp_together,
    "renormalized": _renormalize,
    "nn.init": _reset,
    "masked": _mask,
    "overwritten": _overwrite,
    "out=": _write_out,
}


@scenario("D9b", "weights that are clamped, masked, reset or overwritten right after `step()`", kinds=WRITES)
def written(setting: Setting, write: Any) -> None:
    with twins(setting, MODELS["Perceptron"], adamw) as pair:
        kept = [list(side.model.parameters()) for side in pair]
        for step in range(STEPS):
            for side, references in zip(pair, kept, strict=True):
                side.train(step)
                with torch.no_grad():
                    write(side.model, references)
        pair.check()


@scenario(
    "D9",
    "`model.load_state_dict()` while an update is pending: the update does not hit the restored weights",
    kinds={"the model's": False, "a submodule's": True},
)
def restored(setting: Setting, submodule: bool) -> None:
    other = built(MODELS["Perceptron"], seed=7)
    with twins(setting, MODELS["Perceptron"], adamw) as pair:
        pair.train(range(2))
        for side in pair:
            if submodule:
                side.model[0].load_state_dict(other[0].state_dict())
            else:
                side.model.load_state_dict(other.state_dict())
        pair.engine.optimizer.synchronize()
        assert torch.equal(pair.engine.model[0].weight, other[0].weight)
        pair.train(range(2, STEPS))
        pair.check()


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


@scenario("D11", "wrapping an optimizer that has a state keeps it, and the identity of its groups")
def wrapped_with_state(setting: Setting) -> None:
    model, reference = (built(MODELS["Perceptron"]) for _ in range(2))
    inner, oracle = adamw(model.parameters()), adamw(reference.parameters())
    everyone = tuple(range(dist.get_world_size()))
    schedulers = [_half_each_step(inner), _half_each_step(oracle)]
    for side in (Side(model, inner, everyone), Side(reference, oracle, everyone)):
        side.train(0)
    groups = inner.param_groups
    first, parameters = groups[0], groups[0]["params"]
    with wrapped(setting, inner, model) as optimizer:
        pair = beside(model, optimizer, reference, oracle)
        assert optimizer.param_groups is groups
        for step in range(1, STEPS):
            pair.train([step])
            for scheduler in schedulers:
                scheduler.step()
        pair.check()
        assert optimizer.param_groups[0] is first
        assert first["params"] is parameters


@scenario("D11b", "an engine is closed, its optimizer steps alone, and is wrapped anew")
def wrapped_again(setting: Setting) -> None:
    model, reference = (built(MODELS["Perceptron"]) for _ in range(2))
    inner, oracle = adamw(model.parameters()), adamw(reference.parameters())
    everyone = tuple(range(dist.get_world_size()))
    for first in (0, 10):
        with wrapped(setting, inner, model) as optimizer:
            pair = beside(model, optimizer, reference, oracle)
            pair.train(range(first, first + 3))
            pair.check()
        for side in (Side(model, inner, everyone), pair.oracle):
            side.train(first + 5)
        check_equal(inner.state_dict()["state"], oracle.state_dict()["state"])
        check_equal(dict(model.state_dict()), dict(reference.state_dict()))
