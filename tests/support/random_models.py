"""Random small models, described so that a failing one can be read, and their training against the oracle.

A model is a sequence of nodes. Value 0 is the batch; node i reads value `source` and makes value i + 1, all of shape
(batch, WIDTH). The output is the last node's; what no node on the way to it reads has no gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from typing import Literal

import torch
import torch.distributed as dist
from support.training import digest, distance, engine
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import dear_engine as dear
from dear_tune.errors import DearTuneError

WIDTH = 6
STEPS = 5
THAW_STEP = 2

Frozen = Literal["never", "always", "before", "after"]
"""When a node's own parameters are frozen: before or after step THAW_STEP, too."""


@dataclass(frozen=True)
class Node:
    """One operation.

    Attributes:
        kind: a key of BORROWING, OWNING or PLAIN.
        source: the value that it reads.
        of: the node whose module or weight it borrows, the second value that "add" reads; None for other kinds.
        frozen: when its own parameters are.
        checkpoint: whether, and how, it is computed anew in backward.
    """

    kind: str
    source: int
    of: int | None = None
    frozen: Frozen = "never"
    checkpoint: Literal["no", "reentrant", "non-reentrant"] = "no"


@dataclass(frozen=True, kw_only=True)
class Training:
    """How a model is trained.

    Attributes:
        micro_batches: backward passes a step.
        no_sync: whether all but the last of these are under `no_sync`.
        max_norm: what gradients are clipped to; None: not at all.
    """

    world_size: int
    threshold_bytes: int
    update: Literal["replicated", "sharded"]
    optimizer: str
    micro_batches: int
    no_sync: bool
    max_norm: float | None
    set_to_none: bool


@dataclass(frozen=True)
class Outcome:
    """Distance of parameters and of clipping's norms from the oracle's, the digest, and what was refused.

    A refusal is an outcome, not an exception: the rank pool, which takes seconds to start, lives on while hypothesis
    looks for a smaller model.
    """

    distance: float
    norms: float
    digest: str
    refusal: str


OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "SGD": lambda model: torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=0.01),
    # A gradient that is zero but for rounding, as the key bias of attention has, is not to become a step of full size.
    "AdamW": lambda model: torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-3),
}


class _Scalar(nn.Module):
    """A parameter with fewer elements than there are ranks."""

    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.rand(shape) + 0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale


class _Listed(nn.Module):
    """Matrices in a list that is never called."""

    def __init__(self) -> None:
        super().__init__()
        self.matrices = nn.ParameterList(torch.randn(WIDTH, WIDTH) / WIDTH for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for matrix in self.matrices:
            x = torch.tanh(x @ matrix)
        return x


class _Branch(nn.Module):
    """One of two layers, by what the batch is: another one on each rank."""

    def __init__(self) -> None:
        super().__init__()
        self.positive = nn.Linear(WIDTH, WIDTH)
        self.negative = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.positive(x) if x[0, 0] > 0 else self.negative(x)


class _Attention(nn.Module):
    """The batch as one sequence; `out_proj.weight` is read past the module that owns it."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.attention(x, x, x, need_weights=False)[0]


class _Unused(nn.Linear):
    """Takes no part."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


class _Borrower(nn.Module):
    """Knows another node's module without being its parent."""

    def __init__(self, lender: nn.Module) -> None:
        super().__init__()
        self.lend = lambda: lender


class _Reuse(_Borrower):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.lend()(x)


class _Functional(_Borrower):
    """Does not call the module whose parameters it uses."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.lend().weight, self.lend().bias)


class _Tied(nn.Linear):
    """Has another layer's weight, and a bias of its own."""

    def __init__(self, lender: nn.Module) -> None:
        super().__init__(WIDTH, WIDTH)
        self.weight = lender.weight


class _Transposed(nn.Module):
    """Has another layer's weight, and uses it the other way around."""

    def __init__(self, lender: nn.Module) -> None:
        super().__init__()
        self.matrix = lender.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.matrix


class _Kept(nn.Module):
    """Keeps another layer's weight in a list."""

    def __init__(self, lender: nn.Module) -> None:
        super().__init__()
        self.kept = [lender.weight]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x @ self.kept[0])


class _Captured(nn.Module):
    """Has another layer's weight in a closure, where no engine can see it."""

    def __init__(self, lender: nn.Module) -> None:
        super().__init__()
        weight = lender.weight
        self.apply_weight = lambda x: torch.tanh(x @ weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.apply_weight(x)


PLAIN: dict[str, Callable[[], nn.Module]] = {"tanh": nn.Tanh, "gelu": nn.GELU, "add": nn.Identity}
OWNING: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Linear(WIDTH, WIDTH),
    "norm": lambda: nn.LayerNorm(WIDTH),
    "block": lambda: nn.Sequential(nn.Linear(WIDTH, 9), nn.Tanh(), nn.Linear(9, WIDTH)),
    "scalar": _Scalar,
    "single": lambda: _Scalar(1),
    "listed": _Listed,
    "branch": _Branch,
    "attention": _Attention,
    "unused": lambda: _Unused(WIDTH, WIDTH),
}
BORROWING: dict[str, Callable[[nn.Module], nn.Module]] = {
    "reuse": _Reuse,  # of any node with parameters; the others, of a linear one
    "functional": _Functional,
    "tied": _Tied,
    "transposed": _Transposed,
    "kept": _Kept,
    "captured": _Captured,
}


class RandomModel(nn.Module):
    """The model that the nodes describe."""

    def __init__(self, nodes: tuple[Node, ...]) -> None:
        super().__init__()
        self.nodes = nodes
        owners = [OWNING[node.kind]() if node.kind in OWNING else nn.Identity() for node in nodes]
        self.parts = nn.ModuleList(
            BORROWING[node.kind](owners[node.of])
            if node.kind in BORROWING
            else PLAIN.get(node.kind, lambda owner=owner: owner)()
            for node, owner in zip(nodes, owners, strict=True)
        )
        self.freeze(0)

    def freeze(self, step: int) -> None:
        """Freeze and thaw what is to be so in this step."""
        for node, part in zip(self.nodes, self.parts, strict=True):
            if node.frozen != "never":
                frozen = node.frozen == "always" or (step < THAW_STEP) == (node.frozen == "before")
                part.requires_grad_(not frozen)

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        values = [batch]
        for node, part in zip(self.nodes, self.parts, strict=True):
            x = values[node.source]
            if node.kind == "add":
                x = x + values[node.of]
            if node.checkpoint != "no":
                values.append(checkpoint(part, x, use_reentrant=node.checkpoint == "reentrant"))
            else:
                values.append(part(x))
        return values[-1]


def train(nodes: tuple[Node, ...], training: Training) -> Outcome:
    """Train from different seeds on each rank; the oracle starts as rank 0 does."""
    model, reference = _build(nodes, dist.get_rank()), _build(nodes, 0)
    make = OPTIMIZERS[training.optimizer]
    oracle, norms = make(reference), 0.0
    settings = {"threshold_bytes": training.threshold_bytes, "update": training.update, "process_group": _group()}
    try:
        with engine(model, make(model), **settings) as optimizer:
            for step in range(STEPS):
                norm = _step(model, optimizer, training, step)
                norms = max(norms, abs(norm - _oracle_step(reference, oracle, training, step)))
            return Outcome(distance(model, reference), norms, digest(model), "")
    except DearTuneError as error:
        return Outcome(0.0, 0.0, "", f"{type(error).__name__}: {error}")


def _step(model: RandomModel, optimizer: dear.DistributedOptimizer, training: Training, step: int) -> float:
    """This rank's part of a step; the norm if gradients are clipped."""
    _begin(model, optimizer, training, step)
    for micro in range(training.micro_batches):
        local = training.no_sync and micro < training.micro_batches - 1
        with optimizer.no_sync() if local else nullcontext():
            _loss(model, step, micro, dist.get_rank()).backward()
    norm = 0.0 if training.max_norm is None else float(optimizer.clip_grad_norm_(training.max_norm))
    optimizer.step()
    return norm


def _oracle_step(model: RandomModel, optimizer: torch.optim.Optimizer, training: Training, step: int) -> float:
    """The same step in one process."""
    _begin(model, optimizer, training, step)
    for micro in range(training.micro_batches):
        for rank in range(dist.get_world_size()):
            (_loss(model, step, micro, rank) / dist.get_world_size()).backward()
    norm = 0.0
    if training.max_norm is not None:
        norm = float(nn.utils.clip_grad_norm_(model.parameters(), training.max_norm))
    optimizer.step()
    return norm


def _begin(model: RandomModel, optimizer: torch.optim.Optimizer, training: Training, step: int) -> None:
    if step == THAW_STEP:
        model.freeze(step)
    optimizer.zero_grad(set_to_none=training.set_to_none)


def _loss(model: nn.Module, step: int, micro: int, rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * step + 10 * micro + rank)
    batch = torch.randn(4, WIDTH, generator=generator, dtype=torch.double)
    # Reentrant checkpoints give no gradients to parameters when their input needs none.
    return model(batch.requires_grad_()).tanh().sum() / 10


def _build(nodes: tuple[Node, ...], seed: int) -> RandomModel:
    torch.manual_seed(seed)
    return RandomModel(nodes).double()


@cache
def _group() -> dist.ProcessGroup:
    """All ranks; they do not wait long for one that has failed."""
    return dist.new_group(timeout=timedelta(seconds=10))
