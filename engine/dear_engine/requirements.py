"""What the engine requires of its arguments, each refused by name before anything is changed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from dear_engine.probe import check_separate
from dear_engine.schedule import belongs_to_a_schedule
from dear_engine.tuner import Tuner
from dear_engine.update import check_hooks
from dear_tune.errors import UnsupportedError

if TYPE_CHECKING:
    from dear_engine.layers import Owned

__all__ = [
    "check_arguments", "check_free", "check_optimizer", "check_threshold", "check_trainable", "refuse_to_step",
]  # fmt: skip


def check_arguments(
    optimizer: Any, model: Any, threshold_bytes: Any, tuner: Any, update: Any, communication_dtype: Any
) -> None:
    """Raise `UnsupportedError` for what is no such argument; each text begins with which one it is."""
    if not isinstance(optimizer, torch.optim.Optimizer) or not isinstance(model, nn.Module):
        raise UnsupportedError(
            "DistributedOptimizer(optimizer, model): the optimizer comes first, then the model itself; got "
            f"{type(optimizer).__name__} and {type(model).__name__}."
        )
    if update not in ("replicated", "sharded"):
        raise UnsupportedError(f'update={update!r}: it is "replicated" or "sharded".')
    dtype = communication_dtype
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise UnsupportedError(
            f"communication_dtype={dtype!r}: it is a real floating point dtype, such as torch.bfloat16, or None."
        )
    check_threshold(threshold_bytes)
    if tuner not in ("environment", None) and not isinstance(tuner, Tuner):
        raise UnsupportedError(f'tuner={tuner!r}: it is a dear.Tuner(url=...), "environment", or None.')


def check_threshold(threshold_bytes: Any) -> None:
    """Raise `UnsupportedError` for what is no number of bytes."""
    if isinstance(threshold_bytes, bool) or not isinstance(threshold_bytes, int) or threshold_bytes < 1:
        raise UnsupportedError(f"threshold_bytes is a whole number of bytes, at least 1; got {threshold_bytes!r}.")


def check_optimizer(optimizer: torch.optim.Optimizer) -> None:
    """Raise `UnsupportedError` for an optimizer that cannot step one bucket at a time."""
    if refuse_to_step in optimizer._optimizer_step_pre_hooks.values():
        raise UnsupportedError(
            "The optimizer is wrapped in a DistributedOptimizer already; close() that one first (a sharded one after "
            "consolidate_state_dict())."
        )
    check_hooks(optimizer)
    if isinstance(optimizer, torch.optim.LBFGS):
        raise UnsupportedError(
            "LBFGS evaluates the model inside step() and steps all parameters as one vector; "
            "its update cannot be applied bucket by bucket. Use another optimizer, such as AdamW."
        )
    if isinstance(optimizer, torch.optim.SparseAdam):
        raise UnsupportedError("SparseAdam needs sparse gradients, which dear_engine makes dense; use Adam.")
    kind = type(optimizer).__name__
    if any(isinstance(value, torch.optim.Optimizer) for value in vars(optimizer).values()):
        raise UnsupportedError(f"{kind} holds another optimizer; wrap that one in DistributedOptimizer instead.")
    if others := [key for key in optimizer.state if not isinstance(key, torch.Tensor)]:
        raise UnsupportedError(f"{kind} keeps state under {others[0]!r}, which is no parameter; dear_engine cannot.")
    check_separate(optimizer)


def check_trainable(owned: Owned) -> torch.device:
    """The device of what is to be trained."""
    parameters = {name: parameter for module in owned.values() for name, parameter in module.items()}
    check_free(parameters)
    devices = [parameter.device for parameter in parameters.values() if parameter.requires_grad and parameter.numel()]
    if not devices:
        raise UnsupportedError("No parameter of the optimizer requires a gradient: there is nothing to train.")
    return devices[0]


def check_free(parameters: dict[str, nn.Parameter]) -> None:
    """Raise `UnsupportedError` if another engine updates one of these, by name."""
    for name, parameter in parameters.items():
        if belongs_to_a_schedule(parameter):
            raise UnsupportedError(f"{name} belongs to another DistributedOptimizer; close() that one first.")


def refuse_to_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """Raise `UnsupportedError`: the hook before the wrapped optimizer's own steps."""
    raise UnsupportedError(
        f"This {type(optimizer).__name__} is wrapped, and a step of its own would let the ranks drift apart: call "
        "step() of the DistributedOptimizer. (After close() of a sharded one: load a state first, or call "
        "consolidate_state_dict() before close().)"
    )
