"""Programs that do something on one rank only, which all ranks must do."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from support.training import batches, build, loss_of
from torch import nn

import dear_engine as dear
from dear_tune.errors import CommunicationError


def _once_more_backward(model: nn.Module, _: dear.DistributedOptimizer) -> None:
    loss_of(model, batches(1)[dist.get_rank()]).backward()


def _freeze_and_fuse_anew(model: nn.Module, optimizer: dear.DistributedOptimizer) -> None:
    model[0].requires_grad_(False)
    optimizer.set_threshold(1)


BEFORE_STEP: dict[str, Callable[[nn.Module, dear.DistributedOptimizer], object]] = {
    "backward without no_sync": _once_more_backward,
    "clip": lambda _, optimizer: optimizer.clip_grad_norm_(0.1),
}
AFTER_STEP: dict[str, Callable[[nn.Module, dear.DistributedOptimizer], object]] = {
    "threshold": lambda _, optimizer: optimizer.set_threshold(1),
    "fusion": _freeze_and_fuse_anew,
    "consolidate": lambda _, optimizer: optimizer.consolidate_state_dict(),
}


ON_ALL: dict[str, Callable[[dear.DistributedOptimizer], object]] = {
    "consolidate for others": lambda optimizer: optimizer.consolidate_state_dict(None if dist.get_rank() else 0)
}


def text_of(case: str) -> str:
    """What a rank's run raises when rank 0 does what the case names otherwise than the rest, at its second step."""
    model = build("Perceptron")
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = dear.DistributedOptimizer(inner, model, tuner=None, threshold_bytes=1500, update="sharded")
    try:
        for step in range(4):
            apart = step == 1 and dist.get_rank() == 0
            optimizer.zero_grad()
            loss_of(model, batches(step)[dist.get_rank()]).backward()
            if apart and case in BEFORE_STEP:
                BEFORE_STEP[case](model, optimizer)
            optimizer.step()
            if apart and case in AFTER_STEP:
                AFTER_STEP[case](model, optimizer)
            if step == 1 and case in ON_ALL:
                ON_ALL[case](optimizer)
        optimizer.synchronize()
    except CommunicationError as error:
        return str(error)
    return "nothing"
