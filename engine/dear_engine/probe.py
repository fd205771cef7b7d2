"""What an optimizer does is tried out on small matrices when the engine is built: its name tells too little.

separately     parameters stepped together are what they are when each is stepped alone: all that the engine does needs
               this, for it steps one bucket at a time
elementwise    a parameter stepped in two parts is what it is when it is stepped whole, and no operation on the way has
               made few numbers of many, such as a norm, by which it might decide otherwise later: the sharded update
"""

from __future__ import annotations

import copy
from collections import defaultdict
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from typing_extensions import override

from dear_engine.update import Snapshot, Stepped, apply_update, snapshot_of
from dear_tune.errors import UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

__all__ = ["check_separate", "elementwise_state"]

# Of the gradients, at one step after another: what clips by a norm does so at one of them.
_SCALES = (1e-3, 1e-2, 1e-1, 1.0, 1e1, 1e2, 1e3, 1.0, 1e-1)
_SHAPE = (3, 4)
_ELEMENTS = 12
_RATE = 0.1  # whatever the optimizer's own is: a warm-up begins at zero, where nothing can be seen
_TOLERANCE = 1e-9  # of how far a parameter has moved in a step, in double precision
_ROUNDING = 1e-13  # of the parameter itself
_MOST = 3  # numbers of one kind that a group has for all of its parameters: some optimizers have three betas

_State = defaultdict[torch.Tensor, dict[str, Any]]


@dataclass(frozen=True)
class _Trial:
    """A parameter to try an optimizer out on.

    Attributes:
        group: the optimizer's own, whose settings count.
        settings: the group's, at another rate than any other group's, one of which an optimizer may take for all.
        start: its values, of any shape.
        gradients: of all steps: (steps, *shape).
    """

    group: dict[str, Any]
    settings: dict[str, Any]
    start: torch.Tensor
    gradients: torch.Tensor

    def part(self, elements: slice) -> _Trial:
        """Some of its elements, in one dimension."""
        gradients = self.gradients.flatten(1)[:, elements]
        return _Trial(self.group, self.settings, self.start.flatten()[elements], gradients)


def check_separate(optimizer: torch.optim.Optimizer) -> None:
    """Raise `UnsupportedError` if what becomes of a parameter depends on the others, or on random numbers."""
    _check_lists(optimizer)
    separate = True
    trials = _trials(optimizer, 2)
    with _objections():  # one that steps no small matrix cannot be tried out; it may work all the same
        random = torch.get_rng_state()
        together, _ = _stepped(optimizer, trials)
        alone = [_stepped(optimizer, [trial])[0][0] for trial in trials]
        separate = all(map(_same, together, alone)) and torch.equal(random, torch.get_rng_state())
    if not separate:
        raise UnsupportedError(
            f"{type(optimizer).__name__}.step() does to a parameter what depends on other parameters, or on random "
            "numbers; dear_engine steps them bucket by bucket. To clip by the total norm use "
            "DistributedOptimizer.clip_grad_norm_()."
        )


def elementwise_state(optimizer: torch.optim.Optimizer) -> set[str]:
    """The names of the state that has an entry for each element.

    Raises:
        UnsupportedError: the optimizer does not treat every element on its own.
    """
    names: set[str] = set()
    for trial in _trials(optimizer, 1):
        elementwise = False
        reductions = _Reductions()
        with _objections():  # whatever an optimizer objects to in a part: it cannot be stepped in parts
            with reductions:
                (whole,), (state,) = _stepped(optimizer, [trial])
            parts = [_stepped(optimizer, [trial.part(half)])[0][0] for half in (slice(6), slice(6, None))]
            elementwise = _same(whole, torch.cat(parts, dim=1))
        if not elementwise or reductions.seen:
            by = f" (it calls {', '.join(sorted(reductions.seen))})" if reductions.seen else ""
            raise UnsupportedError(
                f"{type(optimizer).__name__} does not treat every element of a parameter on its own{by}, so a rank "
                'cannot step a part of it; use update="replicated".'
            )
        names |= {name for name, value in state.items() if _is_shaped(value, trial.start)}
    return names


class _Reductions(TorchDispatchMode):
    """Notes the operations that make fewer numbers than a parameter has of at least as many.

    What mixes the elements otherwise does so at every step, and shows in what becomes of them.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call] # not annotated in torch
        self.seen: set[str] = set()

    @override
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        taken = max(_sizes((args, kwargs)), default=0)
        made = max(_sizes(result), default=_ELEMENTS if func._schema.is_mutable else 0)
        name = func.overloadpacket.__name__
        if taken >= _ELEMENTS > made and not func.is_view and not name.startswith("new_"):
            self.seen.add(name)
        return result


def _sizes(nested: Any) -> list[int]:
    return [leaf.numel() for leaf in tree_leaves(nested) if isinstance(leaf, torch.Tensor)]


@contextmanager
def _objections() -> Iterator[None]:
    """Pass over what the optimizer raises by itself."""
    try:
        yield
    except UnsupportedError:  # it is ours, and says what the optimizer does that it must not
        raise
    except Exception:  # whatever it is, it is about our small matrices, not about the user's parameters
        return


def _check_lists(optimizer: torch.optim.Optimizer) -> None:
    for group in optimizer.param_groups:
        for name, value in group.items():
            if name in ("params", "param_names") or not isinstance(value, (list, tuple)):
                continue
            if len(value) == len(group["params"]) > _MOST:
                raise UnsupportedError(
                    f"The parameter group's {name!r} seems to have an entry for each parameter, and a bucket has some "
                    "parameters only; give those that differ groups of their own, or keep it in the optimizer's state."
                )


def _trials(optimizer: torch.optim.Optimizer, each: int) -> list[_Trial]:
    """So many matrices for each parameter group."""
    trials: list[_Trial] = []
    for number, group in enumerate(group for group in optimizer.param_groups if group["params"]):
        rate = _RATE * (1 + number / 7)
        settings = {
            name: _at(rate, value) if name == "lr" else copy.deepcopy(value)
            for name, value in group.items()
            if name not in ("params", "param_names")
        }
        for _ in range(each):
            random = torch.Generator().manual_seed(len(trials))  # ours: the user's random numbers go on as they were
            start = torch.randn(_SHAPE, generator=random, dtype=torch.float64)
            gradients = torch.randn((len(_SCALES), *_SHAPE), generator=random, dtype=torch.float64)
            gradients *= torch.tensor(_SCALES, dtype=torch.float64).view(-1, 1, 1)
            device = group["params"][0].device
            trials.append(_Trial(group, settings, start.to(device), gradients.to(device)))
    return trials


def _at(rate: float, value: Any) -> Any:
    return torch.full_like(value, rate) if isinstance(value, torch.Tensor) else rate


def _stepped(
    optimizer: torch.optim.Optimizer, trials: Sequence[_Trial]
) -> tuple[list[torch.Tensor], list[dict[str, Any]]]:
    """What becomes of parameters that are stepped together.

    Returns:
        For each its values at first and after every step, (1 + steps, elements), and its state.
    """
    parameters = [nn.Parameter(trial.start.clone()) for trial in trials]
    groups = {id(parameter): (trial.settings, 0) for parameter, trial in zip(parameters, trials, strict=True)}
    snapshot = Snapshot(snapshot_of(optimizer).attributes, copy.deepcopy(groups))
    state: _State = defaultdict(dict)
    for parameter, trial in zip(parameters, trials, strict=True):
        if like := _state_like(optimizer, trial.group, parameter):
            state[parameter] = like
    paths = [[parameter.detach().flatten().clone()] for parameter in parameters]
    for step in range(len(_SCALES)):
        stepped = [
            Stepped(parameter, parameter, trial.gradients[step].clone())
            for parameter, trial in zip(parameters, trials, strict=True)
        ]
        with torch.no_grad():
            apply_update(optimizer, state, snapshot, stepped)
        for parameter, path in zip(parameters, paths, strict=True):
            path.append(parameter.detach().flatten().clone())
    return [torch.stack(path) for path in paths], [state.get(parameter, {}) for parameter in parameters]


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether both paths, (1 + steps, elements), lead somewhere, and to the same places."""
    one, other = one.nan_to_num(), other.nan_to_num()  # where both come to no number they agree
    moved = one.diff(dim=0).abs().amax(1).cummax(0).values
    allowed = _TOLERANCE * moved + _ROUNDING * one[1:].abs().amax(1)
    return bool(moved[-1] > 0 and ((one - other)[1:].abs().amax(1) <= allowed).all())


def _state_like(optimizer: torch.optim.Optimizer, group: dict[str, Any], parameter: nn.Parameter) -> dict[str, Any]:
    """A state as the group's parameters have one already: some optimizers begin with it."""
    for known in group["params"]:
        if known.numel() > 1 and optimizer.state.get(known):
            return {
                name: torch.full_like(parameter.detach(), float(value.flatten()[0]))
                if _is_shaped(value, known)
                else copy.deepcopy(value)
                for name, value in optimizer.state[known].items()
            }
    return {}


def _is_shaped(value: Any, like: torch.Tensor) -> bool:
    return isinstance(value, torch.Tensor) and value.shape == like.shape
