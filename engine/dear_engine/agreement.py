"""How the ranks begin alike: the same model and optimizer, rank 0's settings, rank 0's values."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.distributed as dist

from dear_tune.errors import UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from torch import nn

    from dear_engine.collectives import Channel
    from dear_engine.tuner import Tuner

__all__ = ["Settings", "agree", "start_equal"]


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What a run was asked to do; rank 0's is what counts."""

    threshold_bytes: int
    tuner: Tuner | None
    update: Literal["replicated", "sharded"]
    communication_dtype: torch.dtype | None


def agree(channel: Channel, model: nn.Module, optimizer: torch.optim.Optimizer, own: Settings) -> Settings:
    """Rank 0's settings, once all ranks are known to train the same in the same way.

    Raises:
        UnsupportedError: on all ranks, if they differ in parameters, buffers, parameter groups or optimizer state.
    """
    mine = (_digest(_shapes(model)), _digest(_groups(model, optimizer)), own)
    everyone = channel.all_gather_object(mine, "the comparison of models and optimizers")
    for index, what in enumerate(("parameters or buffers", "parameter groups or optimizer state")):
        different = [rank for rank, theirs in enumerate(everyone) if theirs[index] != everyone[0][index]]
        if different:
            raise UnsupportedError(
                f"Ranks {different} have other {what} than rank 0; all must build the same model and optimizer, and "
                "load the same state."
            )
    settings: Settings = everyone[0][-1]
    return settings


def start_equal(tensors: Iterable[torch.Tensor], group: dist.ProcessGroup) -> None:
    """Rank 0's values, everywhere, byte for byte: backends do not know every dtype."""
    source = dist.get_global_rank(group, 0)
    for tensor in tensors:
        # An expanded dimension is the same memory again and again: once is enough, and all that may be written.
        own = tensor.detach()[tuple(slice(0, 1 if stride == 0 else None) for stride in tensor.stride())]
        if own.numel():
            # A copy, as what has a single element counts as contiguous whatever its strides.
            values = own.clone(memory_format=torch.contiguous_format)
            dist.broadcast(values.view(-1).view(torch.uint8), source, group=group)
            own.copy_(values)


def _digest(items: Iterator[Any]) -> str:
    return hashlib.sha256(repr(list(items)).encode()).hexdigest()


def _shapes(model: nn.Module) -> Iterator[Any]:
    yield from ((name, tuple(p.shape), p.dtype, p.requires_grad) for name, p in model.named_parameters())
    yield from ((name, tuple(buffer.shape), buffer.dtype) for name, buffer in model.named_buffers())


def _groups(model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[Any]:
    names = {parameter: name for name, parameter in model.named_parameters()}
    for group in optimizer.param_groups:
        yield [names.get(parameter) for parameter in group["params"]]
        yield [(name, _summary(value)) for name, value in group.items() if name != "params"]
        for parameter in group["params"]:
            yield [(name, _summary(value)) for name, value in sorted(optimizer.state.get(parameter, {}).items())]


def _summary(value: Any) -> Any:
    """What can be compared between processes: not what prints its address."""
    if isinstance(value, torch.Tensor):
        return tuple(value.shape), value.dtype, value.double().sum().item()
    if isinstance(value, (list, tuple)):
        return [_summary(each) for each in value]
    return value if isinstance(value, (bool, int, float, str, type(None))) else type(value).__name__
