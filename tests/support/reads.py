"""Ways to look at a model while an update is pending."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
import torch.distributed as dist
from support.training import OPTIMIZERS, batches, build, distance, loss_of, oracle_step, pending_model
from torch import nn

import dear_engine as dear
from dear_engine.bucket import BucketState

READS: dict[str, Callable[[nn.Module, dear.DistributedOptimizer], nn.Module | dict[str, torch.Tensor]]] = {}
"""Ways to look at a model while an update is pending; each gives a model or a state dict to compare."""


def _read(function: Callable[..., Any]) -> Callable[..., Any]:
    READS[function.__name__] = function
    return function


@_read
def state_dict(model: nn.Module, _: dear.DistributedOptimizer) -> Any:
    return model.state_dict()


@_read
def submodule_state_dict(model: nn.Module, _: dear.DistributedOptimizer) -> Any:
    return {f"{name}.{key}": t for name, child in model.named_children() for key, t in child.state_dict().items()}


@_read
def parameters(model: nn.Module, _: dear.DistributedOptimizer) -> Any:
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


@_read
def submodule_parameters(model: nn.Module, _: dear.DistributedOptimizer) -> Any:
    return {f"{name}.{key}": p for name, child in model.named_children() for key, p in child.named_parameters()}


@_read
def attributes(model: nn.Module, _: dear.DistributedOptimizer) -> Any:
    return {name: getattr(model.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2]) for name in _names()}


@_read
def deep_copy(model: nn.Module, _: dear.DistributedOptimizer) -> Any:
    return copy.deepcopy(model)


@_read
def pickled(model: nn.Module, _: dear.DistributedOptimizer) -> Any:
    return pickle.loads(pickle.dumps(model))


@_read
def saved(model: nn.Module, _: dear.DistributedOptimizer) -> Any:
    file = io.BytesIO()
    torch.save(model, file)
    return torch.load(io.BytesIO(file.getvalue()), weights_only=False)


@_read
def evaluation_mode(model: nn.Module, _: dear.DistributedOptimizer) -> Any:
    kept = [list(child._parameters.values()) for child in model.modules()]
    model.eval()
    return dict(zip(_names(), [p for child in kept for p in child if p is not None], strict=True))


@_read
def synchronized(model: nn.Module, optimizer: dear.DistributedOptimizer) -> Any:
    kept = [p for child in model.modules() for p in child._parameters.values() if p is not None]
    optimizer.synchronize()
    return dict(zip(_names(), kept, strict=True))


@_read
def optimizer_state_dict(model: nn.Module, optimizer: dear.DistributedOptimizer) -> Any:
    optimizer.state_dict()
    return {
        f"{name}.{key}": p
        for name, child in model.named_modules()
        for key, p in child._parameters.items()
        if p is not None
    }


@_read
def moved(model: nn.Module, _: dear.DistributedOptimizer) -> Any:
    return model.to("cpu")


def _names() -> list[str]:
    return [name for name, _ in build("Perceptron").named_parameters()]


def read_distance(kind: str) -> tuple[float, bool]:
    """How far what a read shows is from the updated parameters; and whether a copy is of the original classes."""
    model, optimizer, expected = pending_model()
    try:
        seen = READS[kind](model, optimizer)
        tensors = dict(seen.named_parameters()) if isinstance(seen, nn.Module) else seen
        differences = [(tensors[name] - p).abs().max().item() for name, p in expected.named_parameters()]
        plain = not isinstance(seen, nn.Module) or seen is model or type(seen[0]) is nn.Linear
        return max(differences), plain
    finally:
        optimizer.close()


def no_grad_forward() -> float:
    """How far the output of a no-grad forward is from the updated model's, while an update is pending."""
    model, optimizer, expected = pending_model()
    x = batches(0)[0]
    with torch.no_grad():
        difference = (model(x) - expected(x)).abs().max().item()
    optimizer.close()
    return difference


def inference_under_autocast() -> float:
    """The same, when the first read is under inference mode and autocast; then training goes on."""
    model, optimizer, expected = pending_model()
    with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16):
        assert model[0].weight.dtype == torch.double  # the read
    difference = distance(model, expected)
    optimizer.zero_grad()
    loss_of(model, batches(1)[dist.get_rank()]).backward()
    optimizer.step()
    optimizer.close()
    return difference


def pending_after_zero_grad(set_to_none: bool) -> tuple[int, int]:
    """How many buckets are pending before and after `model.zero_grad()`."""
    model, optimizer, _ = pending_model()
    before = _pending(optimizer)
    model.zero_grad(set_to_none)
    after = _pending(optimizer)
    assert all(p.grad is None or not p.grad.any() for p in model.parameters())
    optimizer.close()
    return before, after


def buckets_applied_by_first_layer() -> tuple[int, int]:
    """Buckets in all, and those still pending when the first layer has run."""
    model, optimizer, _ = pending_model(threshold_bytes=1)
    model[0](batches(0)[0])
    still = _pending(optimizer)
    buckets = len(optimizer.plan.buckets)
    optimizer.close()
    return buckets, still


def _pending(optimizer: dear.DistributedOptimizer) -> int:
    return sum(bucket.state is BucketState.PENDING for bucket in optimizer._schedule.buckets)


def read_in_threads() -> float:
    """How far the parameters are from the oracle's when other threads look at them while the training's does."""
    model, reference = build("Perceptron"), build("Perceptron")
    optimizer = dear.DistributedOptimizer(OPTIMIZERS["SGD"](model.parameters()), model, threshold_bytes=1, tuner=None)
    oracle = OPTIMIZERS["SGD"](reference.parameters())
    with ThreadPoolExecutor(4) as threads:
        for step in range(15):
            optimizer.zero_grad()
            loss_of(model, batches(step)[dist.get_rank()]).backward()
            optimizer.step()
            oracle_step(reference, oracle, step)
            seen = [threads.submit(model.state_dict) for _ in range(4)]
            with torch.no_grad():
                model(batches(step)[0])
            for each in seen:
                each.result()
    optimizer.close()
    return distance(model, reference)


def wrapped_state() -> tuple[int, int]:
    """Entries of the state that the wrapped optimizer itself saves while its first update is pending; parameters."""
    model, optimizer, _ = pending_model()
    entries = len(optimizer._optimizer.state_dict()["state"])
    optimizer.close()
    return entries, len(list(model.parameters()))


def load_while_pending() -> float:
    """How far the parameters are from a state dict that was loaded while an update was pending."""
    model, optimizer, _ = pending_model()
    restored = build("Perceptron", seed=7)
    model.load_state_dict(restored.state_dict())
    optimizer.synchronize()
    difference = distance(model, restored)
    optimizer.close()
    return difference
