"""Random small models, described so that a failing one can be read, and their training against the oracle.

A model is a sequence of nodes. Value 0 is the batch; node i reads value `source` and makes value i + 1, all of shape
(batch, WIDTH). The output is the last node's; what no node on the way to it reads has no gradient.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from typing import Any, Literal

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

Between = Literal["nothing", "lr", "project", "evaluate", "copy", "fuse", "hold"]
"""What goes on after a step: a scheduler, writing to parameters, reading them, another threshold, a kept graph."""


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
        zero_at_end: whether gradients are dropped after the step, and not before the backward passes.
        penalty: whether the loss has a term that reads the parameters themselves.
        scaled: whether a GradScaler steps.
        between: what goes on after each step.
    """

    world_size: int
    threshold_bytes: int
    update: Literal["replicated", "sharded"]
    optimizer: str
    micro_batches: int
    no_sync: bool
    max_norm: float | None
    set_to_none: bool
    zero_at_end: bool
    penalty: bool
    scaled: bool
    between: Between


@dataclass(frozen=True)
class Outcome:
    """Distance of parameters, of what was read, and of clipping's norms from the oracle's, the digest, and a refusal.

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


class _Side:
    """One who trains: the engine on this rank's batches, or the oracle on everyone's."""

    def __init__(self, model: RandomModel, optimizer: Any, training: Training, ranks: Sequence[int]) -> None:
        self.model = model
        self._optimizer = optimizer
        self._training = training
        self._ranks = ranks
        self._scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=2, enabled=training.scaled)
        self._kept: list[torch.Tensor] = []

    def step(self, step: int) -> float:
        """The norm, if gradients are clipped."""
        training = self._training
        if step == THAW_STEP:
            self.model.freeze(step)
        if not training.zero_at_end:
            self._optimizer.zero_grad(set_to_none=training.set_to_none)
        for micro in range(training.micro_batches):
            local = training.no_sync and micro < training.micro_batches - 1
            with self._no_sync() if local else nullcontext():
                for rank in self._ranks:
                    self._scaler.scale(self._loss(step, micro, rank) / len(self._ranks)).backward()
        norm = 0.0
        if training.max_norm is not None:
            self._scaler.unscale_(self._optimizer)
            norm = float(self._clip(training.max_norm))
        kept = self._loss(step, 0, self._ranks[0]) if training.between == "hold" else None
        self._scaler.step(self._optimizer)
        self._scaler.update()
        if training.zero_at_end:
            self._optimizer.zero_grad(set_to_none=training.set_to_none)
        self._after(step, kept)
        return norm

    def _after(self, step: int, kept: torch.Tensor | None) -> None:
        match self._training.between:
            case "lr":
                for group in self._optimizer.param_groups:
                    group["lr"] *= 0.5
            case "project":
                with torch.no_grad():
                    for parameter in self.model.parameters():
                        parameter.clamp_(-0.6, 0.6)
            case "evaluate":
                with torch.no_grad():
                    self._kept.append(self.model(torch.ones(4, WIDTH, dtype=torch.double)))
            case "copy":
                self._kept.append(torch.stack([p.sum() for p in copy.deepcopy(self.model).state_dict().values()]))
            case "fuse" if isinstance(self._optimizer, dear.DistributedOptimizer):
                self._optimizer.set_threshold((1, 700, self._training.threshold_bytes)[step % 3])
            case "hold" if kept is not None:
                self._kept = [kept]

    @property
    def read(self) -> list[torch.Tensor]:
        """What was read after steps."""
        return [] if self._training.between == "hold" else self._kept

    def _loss(self, step: int, micro: int, rank: int) -> torch.Tensor:
        loss = _loss(self.model, step, micro, rank)
        if self._training.penalty:
            loss = loss + 0.01 * sum(p.pow(2).sum() for p in self.model.parameters() if p.requires_grad)
        return loss

    def _no_sync(self) -> Any:
        return self._optimizer.no_sync() if isinstance(self._optimizer, dear.DistributedOptimizer) else nullcontext()

    def _clip(self, max_norm: float) -> torch.Tensor:
        if isinstance(self._optimizer, dear.DistributedOptimizer):
            return self._optimizer.clip_grad_norm_(max_norm)
        return nn.utils.clip_grad_norm_(self.model.parameters(), max_norm)


def train(nodes: tuple[Node, ...], training: Training) -> Outcome:
    """Train from different seeds on each rank; the oracle starts as rank 0 does."""
    model, reference = _build(nodes, dist.get_rank()), _build(nodes, 0)
    make = OPTIMIZERS[training.optimizer]
    settings = {"threshold_bytes": training.threshold_bytes, "update": training.update, "process_group": _group()}
    try:
        with engine(model, make(model), **settings) as optimizer:
            side = _Side(model, optimizer, training, [dist.get_rank()])
            oracle = _Side(reference, make(reference), training, range(dist.get_world_size()))
            norms = max(abs(side.step(step) - oracle.step(step)) for step in range(STEPS))
            read = max((float((a - b).abs().max()) for a, b in zip(side.read, oracle.read, strict=True)), default=0.0)
            return Outcome(max(read, distance(model, reference)), norms, digest(model), "")
    except DearTuneError as error:
        return Outcome(0.0, 0.0, "", f"{type(error).__name__}: {error}")


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
