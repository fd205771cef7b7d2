"""From a model and its optimizer to the layers that fusion works on."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

from torch import nn

from dear_tune.contract import Layer
from dear_tune.errors import UnsupportedError

if TYPE_CHECKING:
    import torch

__all__ = ["ModelLayer", "dtype_name", "layers_of"]

_LONGEST_NAME = 512  # characters that the wire contract allows; the end tells more than the beginning


@dataclass(frozen=True, kw_only=True)
class ModelLayer:
    """A module's directly owned parameters of one dtype.

    Attributes:
        layer: name, bytes and dtype, as fusion and the wire contract know it.
        parameters: by their full names in the model.
    """

    layer: Layer
    parameters: dict[str, nn.Parameter]


def layers_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[ModelLayer]:
    """The layers of the parameters that the optimizer trains, in registration order.

    A tied parameter belongs to the module that is registered first. Frozen parameters and those without elements
    are left out: they have no gradient to communicate.

    Raises:
        UnsupportedError: the optimizer holds a parameter that is not the model's, or one that the engine cannot
            handle.
    """
    for name, module in model.named_modules():
        if isinstance(module, nn.parallel.DistributedDataParallel):
            raise UnsupportedError(
                f"{name or 'The model'} is a DistributedDataParallel, which reduces gradients itself; "
                "DistributedOptimizer takes its place: pass the module inside."
            )
    wanted = {parameter for group in optimizer.param_groups for parameter in group["params"]}
    layers: list[ModelLayer] = []
    for prefix, module in model.named_modules():
        owned: dict[str, dict[str, nn.Parameter]] = {}
        for name, parameter in module.named_parameters(prefix, recurse=False):
            if parameter in wanted:
                wanted.remove(parameter)
                if parameter.requires_grad and parameter.numel():
                    owned.setdefault(dtype_name(parameter.dtype), {})[name] = parameter
        layers.extend(_layer(prefix or "(root)", dtype, owned[dtype]) for dtype in owned)
    if wanted:
        shapes = ", ".join(str(tuple(parameter.shape)) for parameter in wanted)
        raise UnsupportedError(
            f"The optimizer holds {len(wanted)} parameters that the model does not (shapes {shapes}). "
            "Pass the module that owns all of them."
        )
    _check(layers)
    return layers


def dtype_name(dtype: torch.dtype) -> str:
    """A dtype's name without its module: "float32"."""
    return str(dtype).removeprefix("torch.")


def _layer(name: str, dtype: str, parameters: dict[str, nn.Parameter]) -> ModelLayer:
    size = sum(parameter.nbytes for parameter in parameters.values())
    return ModelLayer(layer=Layer(name=name[-_LONGEST_NAME:], bytes=size, dtype=dtype), parameters=parameters)


def _check(layers: list[ModelLayer]) -> None:
    if not layers:
        raise UnsupportedError("No parameter of the optimizer requires a gradient: there is nothing to train.")
    named = [item for layer in layers for item in layer.parameters.items()]
    devices = {parameter.device for _, parameter in named}
    if len(devices) > 1:
        raise UnsupportedError(f"The model's parameters lie on several devices ({devices}); one is supported.")
    for name, parameter in named:
        if hasattr(parameter, "device_mesh"):
            raise UnsupportedError(f"{name} is a DTensor; it is sharded or replicated by another engine already.")
        if not parameter.is_floating_point():
            raise UnsupportedError(f"{name} is {dtype_name(parameter.dtype)}; only real floating point is supported.")
    _check_apart(named)


def _check_apart(named: list[tuple[str, nn.Parameter]]) -> None:
    """Two parameters in the same memory would be updated at different moments."""
    places = sorted((parameter.data_ptr(), name, parameter) for name, parameter in named)
    for (start, name, parameter), (next_start, next_name, _) in pairwise(places):
        if start + parameter.nbytes > next_start > 0:
            raise UnsupportedError(
                f"{name} and {next_name} share memory without being the same parameter; tie them by assigning one "
                "module's parameter to the other's attribute."
            )
