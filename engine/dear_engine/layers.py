"""From a model and its optimizer to the layers that fusion works on."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from dear_tune.contract import Layer
from dear_tune.errors import UnsupportedError

__all__ = ["ModelLayer", "Owned", "dtype_name", "layers_of", "parameters_of"]

Owned = dict[str, dict[str, nn.Parameter]]
"""Parameters by their full names, by the name of the module that owns them."""

_LONGEST_NAME = 512  # characters that the wire contract allows; the end tells more than the beginning


@dataclass(frozen=True, kw_only=True)
class ModelLayer:
    """A module's directly owned parameters of one dtype.

    Attributes:
        layer: name, bytes on the wire and dtype, as fusion and the wire contract know it.
        parameters: by their full names in the model.
    """

    layer: Layer
    parameters: dict[str, nn.Parameter]


def parameters_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> Owned:
    """The optimizer's parameters by the module that owns them, in registration order, and by their full names.

    A tied parameter belongs to the module that is registered first.

    Raises:
        UnsupportedError: the optimizer holds a parameter that is not the model's.
    """
    for name, module in model.named_modules():
        if isinstance(module, nn.parallel.DistributedDataParallel):
            raise UnsupportedError(
                f"{name or 'The model'} is a DistributedDataParallel, which reduces gradients itself; "
                "DistributedOptimizer takes its place: pass the module inside."
            )
        if isinstance(module, torch.jit.ScriptModule):
            raise UnsupportedError(
                f"{name or 'The model'} is a ScriptModule, which reads its parameters where Python cannot see it; "
                "dear_engine needs the original module."
            )
    wanted = {parameter for group in optimizer.param_groups for parameter in group["params"]}
    owned: Owned = {}
    for prefix, module in model.named_modules():
        mine = {n: p for n, p in module.named_parameters(prefix, recurse=False) if p in wanted}
        if lazy := [name for name, parameter in mine.items() if nn.parameter.is_lazy(parameter)]:
            raise UnsupportedError(f"{lazy[0]} has no shape yet: run a forward pass before DistributedOptimizer(...).")
        wanted.difference_update(mine.values())
        owned[prefix or "(root)"] = mine
    if wanted:
        shapes = ", ".join(str(tuple(parameter.shape)) for parameter in wanted)
        raise UnsupportedError(
            f"The optimizer holds {len(wanted)} parameters that the model does not (shapes {shapes}). "
            "Pass the module that owns all of them."
        )
    return {name: parameters for name, parameters in owned.items() if parameters}


def layers_of(owned: Owned, wire_dtype: torch.dtype | None = None) -> list[ModelLayer]:
    """The layers of parameters that take part in training.

    Args:
        owned: as from `parameters_of`, in the order of forward.
        wire_dtype: what gradients are communicated in; None for each parameter's own.

    Raises:
        UnsupportedError: a parameter that the engine cannot handle.
    """
    layers: list[ModelLayer] = []
    empty: dict[str, nn.Parameter] = {}
    for name, parameters in owned.items():
        by_dtype: dict[torch.dtype, dict[str, nn.Parameter]] = {}
        for full_name, parameter in parameters.items():
            members = by_dtype.setdefault(parameter.dtype, {}) if parameter.numel() else empty
            members[full_name] = parameter
        layers.extend(_layer(name, members, dtype, wire_dtype or dtype) for dtype, members in by_dtype.items())
    for name, parameter in empty.items():  # no layer of their own: any will do, for the optimizer to have seen them
        for layer in [layer for layer in layers if layer.layer.dtype == dtype_name(parameter.dtype)][:1]:
            layer.parameters[name] = parameter
    _check([item for layer in layers for item in layer.parameters.items()])
    return layers


def dtype_name(dtype: torch.dtype) -> str:
    """A dtype's name without its module: "float32"."""
    return str(dtype).removeprefix("torch.")


def _layer(name: str, parameters: dict[str, nn.Parameter], dtype: torch.dtype, wire_dtype: torch.dtype) -> ModelLayer:
    size = wire_dtype.itemsize * sum(parameter.numel() for parameter in parameters.values())
    return ModelLayer(
        layer=Layer(name=name[-_LONGEST_NAME:], bytes=size, dtype=dtype_name(dtype)), parameters=parameters
    )


def _check(named: list[tuple[str, nn.Parameter]]) -> None:
    devices = {parameter.device for _, parameter in named}
    if len(devices) > 1:
        raise UnsupportedError(f"The model's parameters lie on several devices ({devices}); one is supported.")
    for name, parameter in named:
        if hasattr(parameter, "device_mesh"):
            raise UnsupportedError(f"{name} is a DTensor; it is sharded or replicated by another engine already.")
        if is_traceable_wrapper_subclass(parameter):
            raise UnsupportedError(f"{name} is a wrapper around other tensors, which have no single memory to fuse.")
        if parameter.is_inference():
            raise UnsupportedError(f"{name} was made in torch.inference_mode(); build the model outside of it.")
        if getattr(parameter, "grad_dtype", None) not in (None, parameter.dtype):
            raise UnsupportedError(f"{name} has grad_dtype {parameter.grad_dtype}; only its own dtype is supported.")
        if not parameter.is_floating_point():
            raise UnsupportedError(f"{name} is {dtype_name(parameter.dtype)}; only real floating point is supported.")
    _check_apart(named)


def _check_apart(named: list[tuple[str, nn.Parameter]]) -> None:
    """Two parameters in the same memory would be updated at different moments."""
    near: list[list[tuple[int, str, nn.Parameter]]] = []  # each with those that begin before the ones before them end
    end = 0
    for start, name, parameter in sorted((p.data_ptr(), name, p) for name, p in named if p.numel()):
        if start >= end:
            near.append([])
        near[-1].append((start, name, parameter))
        end = max(end, start + _extent(parameter))
    for places in near:
        if len(places) > 1:
            _check_bytes(places)


def _check_bytes(places: list[tuple[int, str, nn.Parameter]]) -> None:
    """Those that lie close together may be strided, and then need not have a byte in common."""
    first = places[0][0]
    memory = torch.zeros(max(start + _extent(p) for start, _, p in places) - first, dtype=torch.int32)
    for number, (start, name, parameter) in enumerate(places, 1):
        size = parameter.element_size()
        strides = [stride * size for stride in parameter.stride()]
        own = memory.as_strided([*parameter.shape, size], [*strides, 1], start - first)
        if other := int(own.max()):
            raise UnsupportedError(
                f"{places[other - 1][1]} and {name} share memory without being the same parameter; tie them by "
                "assigning one module's parameter to the other's attribute."
            )
        own.fill_(number)


def _extent(parameter: nn.Parameter) -> int:
    """Bytes from its first element to its last; it may leave out some in between."""
    steps = sum((size - 1) * stride for size, stride in zip(parameter.shape, parameter.stride(), strict=True))
    return (steps + 1) * parameter.element_size()
