"""What a scenario is, and how an engine's training is held to its oracle.

The oracle is one process that starts from the same weights, runs forward and backward once per rank's batch, averages
the gradients over ranks and takes one plain `torch.optim` step. A scenario is written once, for a side: a model, an
optimizer and the ranks whose batches it sees. It runs on two of them: the engine with this rank's batch, and the oracle
with everyone's.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
import torch.distributed as dist
from support.training import WHOLE_MODEL, digest_of, loss_of
from support.training import batches as inputs
from torch import nn
from torch.testing import assert_close

import dear_engine as dear
from dear_tune.errors import DearTuneError

RIGHT = "right"
UPDATES = ("replicated", "sharded")
THRESHOLDS = (1, 1500, WHOLE_MODEL)
TOLERANCES = {torch.double: 1e-12, torch.float: 1e-6, torch.bfloat16: 2**-7}
STEPS = 5

Update = Literal["replicated", "sharded"]
Optimizers = Callable[[Any], torch.optim.Optimizer]


@dataclass(frozen=True)
class Setting:
    """What a scenario is run with."""

    update: Update
    threshold_bytes: int


@dataclass(frozen=True)
class Loud:
    """The error that every rank raises.

    Attributes:
        error: its class.
        cause: what its text contains: the parameter's name, or what to do; `{kind}` is the scenario's kind.
    """

    error: type[DearTuneError]
    cause: str


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """One row of the table.

    Attributes:
        identifier: as in the table.
        title: says what is the case.
        run: what every rank does; it asserts that all is right, or lets an error through. None: it needs more than one
            set of processes and has a test of its own.
        loud: the error expected, by update; where there is none the numbers are right.
        kinds: variants that must all come out alike, by name; `run` is called with each.
        world_sizes: on how many ranks it is tried.
        thresholds: the fusion thresholds it is tried at, in bytes.
    """

    identifier: str
    title: str
    run: Callable[..., None] | None = None
    loud: Mapping[str, Loud] = field(default_factory=dict)
    kinds: Mapping[str, Any] = field(default_factory=dict)
    world_sizes: tuple[int, ...] = (2,)
    thresholds: tuple[int, ...] = THRESHOLDS

    def thresholds_on(self, world_size: int) -> tuple[int, ...]:
        """All of them on the first world size, the middle one on others."""
        middle = self.thresholds[len(self.thresholds) // 2]
        return self.thresholds if world_size == self.world_sizes[0] else (middle,)


SCENARIOS: dict[str, Scenario] = {}


def register(identifier: str, title: str, **details: Any) -> Scenario:
    """Add a row to the table."""
    assert identifier not in SCENARIOS
    SCENARIOS[identifier] = Scenario(identifier=identifier, title=title, **details)
    return SCENARIOS[identifier]


def scenario(identifier: str, title: str, **details: Any) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Make a function the scenario of that name; the details are those of `Scenario`."""

    def registered(function: Callable[..., None]) -> Callable[..., None]:
        register(identifier, title, run=function, **details)
        return function

    return registered


def always(loud: Loud) -> dict[str, Loud]:
    """The error is expected in every update mode."""
    return dict.fromkeys(UPDATES, loud)


def outcome(identifier: str, kind: str | None, setting: Setting) -> str:
    """Run a scenario on this rank: "right", or the class and text of the error that came through."""
    chosen = SCENARIOS[identifier]
    assert chosen.run is not None
    arguments = () if kind is None else (chosen.kinds[kind],)
    try:
        chosen.run(setting, *arguments)
    except DearTuneError as error:
        result = f"{type(error).__name__}: {error}"
    else:
        result = RIGHT
    dist.barrier()  # the process group is usable afterwards
    return result


@dataclass(frozen=True)
class Batch:
    """One rank's batch of one step; x: (6, 12)."""

    x: torch.Tensor
    rank: int
    step: int


Loss = Callable[[nn.Module, Batch], torch.Tensor | Iterable[torch.Tensor]]
"""What is run backward: one loss, or several, one after another, on graphs that they may share."""


def plain_loss(model: nn.Module, batch: Batch) -> torch.Tensor:
    """Some scalar that depends on all outputs; runs the model twice."""
    return loss_of(model, batch.x)


@dataclass(frozen=True, eq=False)
class Side:
    """The engine or the oracle: a model, its optimizer, and the ranks whose batches they see."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    ranks: tuple[int, ...]

    def backward(self, step: int, loss: Loss = plain_loss) -> None:
        """Forward and backward of a step, averaged over these ranks."""
        for rank in self.ranks:
            losses = loss(self.model, Batch(inputs(step)[rank], rank, step))
            if isinstance(losses, torch.Tensor):
                (losses / len(self.ranks)).backward()
            else:
                for each in losses:
                    (each / len(self.ranks)).backward(retain_graph=True)

    def train(self, step: int, loss: Loss = plain_loss) -> None:
        """One ordinary step."""
        self.optimizer.zero_grad()
        self.backward(step, loss)
        self.optimizer.step()

    def no_sync(self) -> AbstractContextManager[None]:
        """Where gradients are only accumulated."""
        return self.optimizer.no_sync() if self.is_engine else contextlib.nullcontext()

    def clip_grad_norm_(self, max_norm: float, **settings: Any) -> torch.Tensor:
        """Clip the mean gradient; its norm before."""
        if self.is_engine:
            return self.optimizer.clip_grad_norm_(max_norm, **settings)
        return nn.utils.clip_grad_norm_(self.model.parameters(), max_norm, **settings)

    @property
    def is_engine(self) -> bool:
        """Whether this is the engine."""
        return isinstance(self.optimizer, dear.DistributedOptimizer)


@dataclass(frozen=True, eq=False)
class Twins:
    """The engine and its oracle, to be trained alike."""

    engine: Side
    oracle: Side

    def __iter__(self) -> Iterator[Side]:
        """First the engine, then the oracle."""
        return iter((self.engine, self.oracle))

    def train(self, steps: Iterable[int], loss: Loss = plain_loss) -> None:
        """Ordinary steps on both sides."""
        for step in steps:
            for side in self:
                side.train(step, loss)

    def check(self) -> None:
        """Parameters and optimizer state equal the oracle's, and are the same on all ranks to the last bit."""
        optimizer = self.engine.optimizer
        optimizer.synchronize()
        check_equal(_values(self.engine.model), _values(self.oracle.model))
        optimizer.consolidate_state_dict()
        state, expected = optimizer.state_dict(), self.oracle.optimizer.state_dict()
        check_equal(state["state"], expected["state"])
        assert state["param_groups"] == expected["param_groups"]
        check_same_everywhere([*_values(self.engine.model).values(), *_tensors(state["state"])])


@contextmanager
def twins(setting: Setting, build: Callable[[], nn.Module], make: Optimizers, **options: Any) -> Iterator[Twins]:
    """An engine, from another seed on every rank, and an oracle that starts as rank 0 does.

    Args:
        setting: of the engine.
        build: makes a model, in double precision where it says nothing else.
        make: makes an optimizer of parameters.
        options: further ones of the engine.
    """
    model, reference = built(build, dist.get_rank()), built(build, 0)
    inner, oracle = make(model.parameters()), make(reference.parameters())
    with wrapped(setting, inner, model, **options) as optimizer:
        yield beside(model, optimizer, reference, oracle)


def beside(
    model: nn.Module, optimizer: torch.optim.Optimizer, reference: nn.Module, oracle: torch.optim.Optimizer
) -> Twins:
    """An engine that is there already, and its oracle."""
    everyone = tuple(range(dist.get_world_size()))
    return Twins(Side(model, optimizer, (dist.get_rank(),)), Side(reference, oracle, everyone))


@contextmanager
def wrapped(
    setting: Setting, optimizer: torch.optim.Optimizer, model: nn.Module, **options: Any
) -> Iterator[dear.DistributedOptimizer]:
    """An engine that gives the model back at the end."""
    distributed = dear.DistributedOptimizer(
        optimizer, model, threshold_bytes=setting.threshold_bytes, update=setting.update, tuner=None, **options
    )
    try:
        yield distributed
    except BaseException:
        with contextlib.suppress(DearTuneError):  # the first error tells more
            distributed.close()
        raise
    distributed.close()


def built(build: Callable[[], nn.Module], seed: int = 0) -> nn.Module:
    """A model from a seed, in double precision where it says nothing else."""
    torch.manual_seed(seed)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.double)
    try:
        return build()
    finally:
        torch.set_default_dtype(before)


def follow(
    setting: Setting,
    build: Callable[[], nn.Module],
    make: Optimizers,
    *,
    loss: Loss = plain_loss,
    steps: int = STEPS,
    **options: Any,
) -> None:
    """Train in the ordinary way, and check."""
    with twins(setting, build, make, **options) as pair:
        pair.train(range(steps), loss)
        pair.check()


def sgd(parameters: Any) -> torch.optim.Optimizer:
    """With momentum and weight decay: what should have been left alone moves. Linear in small gradients."""
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9, weight_decay=0.01)


def adamw(parameters: Any) -> torch.optim.Optimizer:
    """Two moments, and a step count for every parameter."""
    return torch.optim.AdamW(parameters, lr=0.01)


def check_equal(actual: Any, expected: Any) -> None:
    """Tensors, however nested, are equal within their dtype's tolerance."""
    if isinstance(expected, torch.Tensor):
        tolerance = TOLERANCES.get(expected.dtype, 0.0)
        assert_close(actual, expected, rtol=tolerance, atol=tolerance)
    elif isinstance(expected, Mapping):
        assert actual.keys() == expected.keys()
        for key, value in expected.items():
            check_equal(actual[key], value)
    else:
        assert actual == expected


def check_same_everywhere(tensors: Iterable[torch.Tensor]) -> None:
    """Every rank has the same, to the last bit."""
    digests: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(digests, digest_of(tensors))
    assert len(set(digests)) == 1


def _values(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def _tensors(nested: Any) -> Iterator[torch.Tensor]:
    if isinstance(nested, torch.Tensor):
        yield nested
    elif isinstance(nested, Mapping):
        for key in sorted(nested):  # ranks may have come to their states in different orders
            yield from _tensors(nested[key])
