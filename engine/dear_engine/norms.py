"""The norm of the mean gradients, of which each rank holds a shard."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dear_engine.collectives import Collectives

__all__ = ["total_norm"]


def total_norm(shards: Sequence[torch.Tensor], norm_type: float, collectives: Collectives) -> torch.Tensor:
    """The p-norm over all elements of all ranks' shards, the same on all ranks: ().

    Args:
        shards: this rank's, each 1-D and perhaps empty; elsewhere others are empty.
        norm_type: p; infinity for the largest absolute value.
        collectives: combine one number of each rank.
    """
    if not shards:
        return torch.zeros(())
    dtype = max((shard.dtype for shard in shards), key=lambda dtype: dtype.itemsize)
    # Squares of half precision, and sums over many, want more digits than the gradients have.
    norms = [torch.linalg.vector_norm(s, norm_type, dtype=torch.float64) for s in shards if s.numel()]
    own = torch.stack(norms) if norms else shards[0].new_zeros(1, dtype=torch.float64)
    if math.isinf(norm_type):
        total = own.max()
        collectives.all_reduce(total, dist.ReduceOp.MAX).wait()
    else:
        total = own.pow(norm_type).sum()
        collectives.all_reduce(total, dist.ReduceOp.SUM).wait()
        total = total.pow(1 / norm_type)
    return total.to(dtype)
