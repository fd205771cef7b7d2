"""The norm of the mean gradients, of which each rank holds a shard."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from dear_engine.collectives import Work

__all__ = ["total_norm"]


def total_norm(
    shards: Sequence[list[torch.Tensor]],
    norm_type: float,
    all_reduce: Callable[[torch.Tensor, dist.ReduceOp.RedOpType], Work],
    device: torch.device,
) -> torch.Tensor:
    """The p-norm over all elements of all ranks' shards, the same on all ranks: (), in double precision.

    Args:
        shards: this rank's, in lists of one dtype, none of them empty; a rank may have no list.
        norm_type: p; infinity for the largest absolute value.
        all_reduce: combines a few numbers of each rank, in place.
        device: of the shards of all ranks.
    """
    # Squares of half precision, and sums over many, want more digits than the gradients have.
    norms = [norm for shard in shards for norm in torch._foreach_norm(shard, norm_type, dtype=torch.float64)]
    own = torch.stack(norms) if norms else torch.zeros(1, dtype=torch.float64, device=device)
    if math.isinf(norm_type):
        largest = own.max()
        # Backends differ in what is the larger of a number and NaN.
        both = torch.stack([largest.nan_to_num(nan=0.0, posinf=math.inf), largest.isnan().to(largest.dtype)])
        all_reduce(both, dist.ReduceOp.MAX).wait()
        return torch.where(both[1] > 0, math.nan, both[0])
    total = own.pow(norm_type).sum()
    all_reduce(total, dist.ReduceOp.SUM).wait()
    return total.pow(1 / norm_type)
