"""A fusion in force: which parameters take part, by which plan, and the buckets that carry them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

from dear_engine.bucket import Bucket, Slot
from dear_engine.layers import layers_of
from dear_tune.errors import UnsupportedError
from dear_tune.fusion import FusionPlan, fuse

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch
    from torch import nn

    from dear_engine.collectives import Channel
    from dear_engine.layers import ModelLayer, Owned
    from dear_engine.update import Update

__all__ = ["Fusion", "agreed", "planned"]


@dataclass(frozen=True, kw_only=True, eq=False)
class Fusion:
    """The buckets of one fusion plan.

    Attributes:
        plan: which of `layers` share a bucket.
        layers: those that take part, in the order in which they are fused.
        wire_dtype: what gradients are communicated in; None for each parameter's own.
        outside: the parameters that take no part, those without elements left out.
        buckets: in the layers' order; none before `with_buckets`.
    """

    plan: FusionPlan
    layers: Sequence[ModelLayer]
    wire_dtype: torch.dtype | None
    outside: Sequence[nn.Parameter]
    buckets: Sequence[Bucket] = ()

    @cached_property
    def slots(self) -> dict[int, tuple[Bucket, Slot]]:
        """Where each parameter is, by its id."""
        return {id(slot.parameter): (bucket, slot) for bucket in self.buckets for slot in bucket.slots}

    def with_buckets(self, update: Update) -> Fusion:
        """The same with its buckets, which take as much memory as the gradients."""
        buckets = []
        for indices in self.plan.buckets:
            members = {name: p for index in indices for name, p in self.layers[index].parameters.items()}
            dtype = self.wire_dtype or next(iter(members.values())).dtype
            buckets.append(Bucket(members, update.layout(list(members.values())), dtype))
        return replace(self, buckets=buckets)


def agreed(owned: Owned, threshold_bytes: int, channel: Channel, site: str) -> Owned:
    """Those that need a gradient on some rank, or have one; all ranks call it together.

    Args:
        owned: all parameters.
        threshold_bytes: by which they are to be fused.
        channel: to the other ranks.
        site: of the collective; see collectives.py.

    Raises:
        UnsupportedError: on all ranks, if they are to be fused by different thresholds.
    """
    parameters = [parameter for named in owned.values() for parameter in named.values()]
    here = [parameter.requires_grad or parameter.grad is not None for parameter in parameters]
    thresholds, everyone = zip(*channel.all_gather_object((threshold_bytes, here), site), strict=True)
    if len(set(thresholds)) > 1:
        raise UnsupportedError(f"The ranks set different thresholds: {list(thresholds)} bytes. Set the same on all.")
    anywhere = map(any, zip(*everyone, strict=True))
    members = {id(parameter) for parameter, member in zip(parameters, anywhere, strict=True) if member}
    return {module: {name: p for name, p in named.items() if id(p) in members} for module, named in owned.items()}


def planned(owned: Owned, members: Owned, threshold_bytes: int, wire_dtype: torch.dtype | None) -> Fusion:
    """The fusion of the members among the parameters, without buckets yet.

    Raises:
        UnsupportedError: a member that the engine cannot handle.
    """
    layers = layers_of(members, wire_dtype)
    plan = (
        fuse([layer.layer for layer in layers], threshold_bytes)
        if layers
        else FusionPlan(threshold_bytes=threshold_bytes, buckets=())  # all are frozen
    )
    inside = {id(parameter) for layer in layers for parameter in layer.parameters.values()}
    everyone = (parameter for named in owned.values() for parameter in named.values())
    outside = [parameter for parameter in everyone if id(parameter) not in inside and parameter.numel()]
    return Fusion(plan=plan, layers=layers, wire_dtype=wire_dtype, outside=outside)
