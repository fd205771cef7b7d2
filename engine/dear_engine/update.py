"""The replicated update: every rank steps all parameters of a bucket with the gathered gradients.

Any `torch.optim` optimizer steps one bucket when it is shown that bucket's parameters only. So a bucket's update is
the `step` of a shallow copy that shares the optimizer's `state`, holds the bucket's share of its parameter groups,
and has the hyper-parameters as they were when the user called `step()`: a scheduler may have moved them since.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import torch

from dear_tune.errors import UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import nn

__all__ = ["Hyperparameters", "apply_update", "check_hooks", "check_supported", "hyperparameters"]

Hyperparameters = dict["nn.Parameter", dict[str, Any]]
"""For each parameter its group's settings, shared within a group."""


def check_supported(optimizer: torch.optim.Optimizer) -> None:
    """Raise `UnsupportedError` for an optimizer that cannot step one bucket at a time."""
    check_hooks(optimizer)
    if isinstance(optimizer, torch.optim.LBFGS):
        raise UnsupportedError(
            "LBFGS evaluates the model inside step() and steps all parameters as one vector; "
            "its update cannot be applied bucket by bucket."
        )
    if isinstance(optimizer, torch.optim.SparseAdam):
        raise UnsupportedError("SparseAdam needs sparse gradients, which are not supported; use Adam.")


def check_hooks(optimizer: torch.optim.Optimizer) -> None:
    """Raise `UnsupportedError` if the user's step hooks would run once for each bucket."""
    if optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks:
        raise UnsupportedError(
            "The optimizer has step hooks. Its step() runs once for each bucket, so register them on the "
            "DistributedOptimizer instead: there they run once a step."
        )


def hyperparameters(optimizer: torch.optim.Optimizer) -> Hyperparameters:
    """The settings of every parameter, as they are now."""
    snapshot: Hyperparameters = {}
    for group in optimizer.param_groups:
        settings = {name: _frozen(value) for name, value in group.items() if name != "params"}
        snapshot.update((parameter, settings) for parameter in group["params"])
    return snapshot


def apply_update(
    optimizer: torch.optim.Optimizer,
    settings: Hyperparameters,
    parameters: Sequence[nn.Parameter],
    gradients: Sequence[torch.Tensor | None],
) -> None:
    """Step these parameters with these gradients; what the user has in `.grad` stays as it is."""
    groups: dict[int, dict[str, Any]] = {}
    for parameter in parameters:
        group = settings[parameter]
        groups.setdefault(id(group), {**group, "params": []})["params"].append(parameter)
    twin = _restricted(optimizer, [dict(group) for group in groups.values()])
    users = [parameter.grad for parameter in parameters]
    _set_gradients(parameters, gradients)
    try:
        with _plain_mode(parameters[0].device.type):
            twin.step()
    finally:
        _set_gradients(parameters, users)
    _check_unchanged(optimizer, twin, list(groups.values()))


def _check_unchanged(
    optimizer: torch.optim.Optimizer, twin: torch.optim.Optimizer, groups: Sequence[dict[str, Any]]
) -> None:
    """What an optimizer keeps outside its state, such as a step count, would be lost, or be counted per bucket."""
    pairs = [(vars(optimizer), vars(twin)), *zip(groups, twin.param_groups, strict=True)]
    changed = {name for before, after in pairs for name in after if after[name] is not before.get(name)}
    changed = {name for name in changed if name != "param_groups" and not name.startswith("_warned_")}
    if changed:
        raise UnsupportedError(
            f"{type(optimizer).__name__}.step() changes {', '.join(sorted(changed))} outside its state, which cannot "
            "be done bucket by bucket; keep such values in the state of each parameter."
        )


def _restricted(optimizer: torch.optim.Optimizer, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    # Not copy.copy: an optimizer's own way to be copied leaves out attributes, and walks through all its state.
    twin = object.__new__(type(optimizer))
    twin.__dict__.update(vars(optimizer))
    twin.param_groups = groups
    twin.__dict__.pop("step", None)  # a scheduler that was built on the optimizer has hung one on it that binds it
    return twin


def _plain_mode(device_type: str) -> ExitStack:
    """Updates happen wherever forward first reads a parameter: under the user's autocast or inference mode too."""
    modes = ExitStack()
    modes.enter_context(torch.inference_mode(False))
    modes.enter_context(torch.no_grad())
    modes.enter_context(torch.autocast(device_type, enabled=False))
    return modes


def _set_gradients(parameters: Sequence[nn.Parameter], gradients: Sequence[torch.Tensor | None]) -> None:
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient


def _frozen(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else value
