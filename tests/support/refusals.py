"""Uses that would give wrong numbers, or that the engine cannot serve."""

from __future__ import annotations

import contextlib
import copy
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from support.training import WHOLE_MODEL, batches, build, loss_of, pending_model
from torch import nn
from torch.nn import functional as F

import dear_engine as dear
from dear_tune.errors import DearTuneError, UnsupportedError


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


@_case
def wrapped_in_ddp() -> None:
    model = nn.parallel.DistributedDataParallel(build("Perceptron"))
    dear.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model, tuner=None)


@_case
def two_devices() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, device="meta"))
    dear.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model, tuner=None)


@_case
def swapped_arguments() -> None:
    model = build("Perceptron")
    dear.DistributedOptimizer(model, torch.optim.SGD(model.parameters(), lr=0.1), tuner=None)


@_case
def threshold_in_the_middle_of_a_step() -> None:
    model = build("Perceptron")
    optimizer = dear.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model, tuner=None)
    loss_of(model, batches(0)[0]).backward()
    optimizer.set_threshold(1)


class _CountsInItsGroup(torch.optim.SGD):
    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["steps"] = group.get("steps", 0) + 1
        return super().step(closure)


class _CountsLater(torch.optim.SGD):
    """Not yet when it is tried out."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        group = self.param_groups[0]
        state = self.state[group["params"][0]]
        state["steps"] = state.get("steps", 0) + 1
        if state["steps"] > 3:
            group["late"] = True
        return super().step(closure)


class _CountsInItself(torch.optim.SGD):
    steps = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        self.steps += 1
        return super().step(closure)


class _ClipsByItself(torch.optim.SGD):
    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        nn.utils.clip_grad_norm_([p for group in self.param_groups for p in group["params"]], 0.1)
        return super().step(closure)


class _AddsNoise(torch.optim.SGD):
    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for parameter in self.param_groups[0]["params"]:
            parameter.add_(torch.randn_like(parameter), alpha=1e-3)
        return super().step(closure)


class _CountsUnderAName(torch.optim.SGD):
    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        self.state["all"]["steps"] = self.state["all"].get("steps", 0) + 1
        return super().step(closure)


class _CountsInATensor(torch.optim.SGD):
    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self.steps = torch.zeros(())

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        self.steps += 1
        return super().step(closure)


class _Around(torch.optim.SGD):
    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, lr)
        self.base = torch.optim.SGD(self.param_groups, lr)


class _FailsOnce(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        raise MemoryError(closure)


def _step_with(kind: type[torch.optim.SGD]) -> nn.Module:
    model = build("Perceptron")
    optimizer = dear.DistributedOptimizer(kind(model.parameters(), lr=0.1), model, tuner=None)
    loss_of(model, batches(0)[0]).backward()
    optimizer.step()
    return model


@_case
def counter_in_a_group() -> None:
    _step_with(_CountsInItsGroup).state_dict()


@_case
def counter_that_comes_later() -> None:
    model = build("Perceptron")
    optimizer = dear.DistributedOptimizer(_CountsLater(model.parameters(), lr=0.1), model, tuner=None)
    for step in range(4):
        optimizer.zero_grad()
        loss_of(model, batches(step)[0]).backward()
        optimizer.step()
    model.state_dict()


@_case
def counter_in_the_optimizer() -> None:
    _step_with(_CountsInItself).state_dict()


@_case
def counter_in_a_tensor() -> None:
    _step_with(_CountsInATensor).state_dict()


@_case
def counter_under_a_name() -> None:
    _step_with(_CountsUnderAName).state_dict()


@_case
def optimizer_that_clips() -> None:
    _step_with(_ClipsByItself)


@_case
def optimizer_with_noise() -> None:
    _step_with(_AddsNoise)


@_case
def optimizer_around_another() -> None:
    _step_with(_Around)


@_case
def other_parameters_in_a_group() -> None:
    model = build("Perceptron")
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = dear.DistributedOptimizer(inner, model, tuner=None)
    inner.param_groups[0]["params"][0] = nn.Parameter(torch.zeros(16, 12))
    loss_of(model, batches(0)[0]).backward()
    optimizer.step()


@_case
def backward_on_what_was_clipped() -> None:
    model = build("Perceptron")
    optimizer = dear.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model, tuner=None)
    loss_of(model, batches(0)[0]).backward()
    optimizer.clip_grad_norm_(0.1)
    optimizer.step()
    loss_of(model, batches(1)[0]).backward()


@_case
def read_after_a_failed_update() -> None:
    model = _step_with(_FailsOnce)
    with contextlib.suppress(MemoryError):
        model.state_dict()
    model(batches(1)[0])


@_case
def step_after_a_failed_update() -> None:
    model = build("Perceptron")
    optimizer = dear.DistributedOptimizer(_FailsOnce(model.parameters(), lr=0.1), model, tuner=None)
    loss_of(model, batches(0)[0]).backward()
    optimizer.step()
    for _ in range(2):
        with contextlib.suppress(MemoryError, DearTuneError):
            optimizer.step()
    model.state_dict()


@_case
def hook_added_later() -> None:
    model = build("Perceptron")
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = dear.DistributedOptimizer(inner, model, tuner=None)
    inner.register_step_pre_hook(lambda *_: None)
    loss_of(model, batches(0)[0]).backward()
    optimizer.step()


@_case
def no_such_study() -> None:
    model = build("Perceptron")
    tuner = dear.Tuner(url="http://127.0.0.1:9", study="not a name")
    dear.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model, tuner=tuner)


@_case
def shared_memory() -> None:
    model = build("Perceptron")
    model[3].weight = nn.Parameter(model[0].weight.data.view(-1)[:16].view(1, 16))
    dear.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model, tuner=None)


@_case
def shared_column() -> None:
    model, matrix = build("Perceptron"), torch.randn(32, 12)
    model[0].weight = nn.Parameter(matrix[:16])
    model.rest = nn.Parameter(matrix[:, :1])  # among which are the other's first elements of each row
    dear.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model, tuner=None)


@_case
def shared_column_further_on() -> None:
    model, matrix = build("Perceptron"), torch.randn(32, 12)
    model[0].weight = nn.Parameter(matrix[16:])
    model.first = nn.Parameter(matrix[:, :1])
    dear.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model, tuner=None)


@_case
def gradients_in_one_buffer() -> None:
    model = build("Perceptron")
    optimizer = dear.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model, tuner=None)
    parameters = list(model.parameters())
    parts = model[0].weight.new_zeros(sum(p.numel() for p in parameters)).split([p.numel() for p in parameters])
    for parameter, part in zip(parameters, parts, strict=True):
        parameter.grad = part.view(parameter.shape)
    loss_of(model, batches(0)[0]).backward()
    optimizer.step()


@_case
def wrapped_twice() -> None:
    model = build("Perceptron")
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        dear.DistributedOptimizer(inner, model, tuner=None)


@_case
def parameters_for_a_model() -> None:
    model = build("Perceptron")
    dear.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.parameters(), tuner=None)


@_case
def url_for_a_tuner() -> None:
    model = build("Perceptron")
    dear.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model, tuner="http://127.0.0.1:9")


@_case
def name_of_a_dtype() -> None:
    model = build("Perceptron")
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    dear.DistributedOptimizer(inner, model, tuner=None, communication_dtype="bfloat16")


@_case
def clipping_given_parameters() -> None:
    model = build("Perceptron")
    optimizer = dear.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model, tuner=None)
    optimizer.clip_grad_norm_(model.parameters(), 1.0)


@_case
def norm_of_nothing() -> None:
    _, optimizer, _ = pending_model()
    optimizer.clip_grad_norm_(1.0, norm_type=0)


@_case
def made_in_inference_mode() -> None:
    with torch.inference_mode():
        model = nn.Linear(2, 2)
    dear.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model, tuner=None)


@_case
def gradients_of_another_dtype() -> None:
    model = nn.Linear(2, 2)
    if not hasattr(model.weight, "grad_dtype"):  # before torch 2.10
        raise UnsupportedError("grad_dtype")
    model.weight.grad_dtype = torch.double
    dear.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model, tuner=None)


@_case
def gradients_of_a_function_that_reads_past_us() -> None:
    model, optimizer, _ = pending_model(1)
    x = batches(1)[0]

    def loss(parameters: dict[str, torch.Tensor]) -> torch.Tensor:
        return torch.func.functional_call(model, parameters, (x,)).square().mean()

    optimizer.zero_grad()
    parameters = dict(model.named_parameters())
    for name, gradient in torch.func.grad(loss)(parameters).items():
        parameters[name].grad = gradient
    optimizer.step()


@_case
def stepped_after_close() -> None:
    _, optimizer, _ = pending_model()
    optimizer.close()
    optimizer.step()


@_case
def copied_optimizer() -> None:
    _, optimizer, _ = pending_model()
    copy.deepcopy(optimizer)


@_case
def no_number_of_bytes() -> None:
    model = build("Perceptron")
    dear.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model, tuner=None, threshold_bytes=1.5)


@_case
def different_buffers() -> None:
    model = build("Perceptron")
    model.register_buffer("extra", torch.zeros(1 + dist.get_rank()))
    dear.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model, tuner=None)


class _Slotted(nn.Parameter):
    __slots__ = ("scale",)

    def __init_subclass__(cls, *, key: str) -> None:
        cls.key = key


@_case
def class_that_cannot_be_extended() -> None:
    model = nn.Linear(2, 2)
    model.weight = _Slotted(model.weight.detach())
    dear.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model, tuner=None)


@_case
def lazy() -> None:
    model = nn.LazyLinear(2)
    dear.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model, tuner=None)


@_case
def group_of_a_stranger() -> None:
    model = build("Perceptron")
    optimizer = dear.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model, tuner=None)
    try:
        optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(3))]})
    finally:
        assert len(optimizer.param_groups) == 1


@_case
def parameters_added_behind_its_back() -> None:
    model = build("Perceptron")
    inner = torch.optim.SGD(model[0].parameters(), lr=0.1)
    optimizer = dear.DistributedOptimizer(inner, model, tuner=None)
    inner.add_param_group({"params": list(model[3].parameters())})
    loss_of(model, batches(0)[0]).backward()
    optimizer.step()


@_case
def backward_after_clipping() -> None:
    model = build("Perceptron")
    optimizer = dear.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model, tuner=None)
    loss_of(model, batches(0)[0]).backward()
    optimizer.clip_grad_norm_(0.1)
    loss_of(model, batches(1)[0]).backward()


@_case
def integers_on_the_wire() -> None:
    model = build("Perceptron")
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    dear.DistributedOptimizer(inner, model, tuner=None, communication_dtype=torch.int8)


@_case
def other_hyperparameters() -> None:
    model = build("Perceptron")
    inner = torch.optim.SGD(model.parameters(), lr=0.1 * (1 + dist.get_rank()))
    dear.DistributedOptimizer(inner, model, tuner=None)


@_case
def c_code_with_a_pending_parameter() -> None:
    model, _, _ = pending_model(WHOLE_MODEL)
    weight = model[0]._parameters["weight"]
    assert torch.func.vmap(lambda row: row + 1)(weight).isnan().all()  # its values are not there to be read
    with torch._C.DisableTorchFunctionSubclass():
        F.linear(batches(1)[0], weight).square().sum().backward()
