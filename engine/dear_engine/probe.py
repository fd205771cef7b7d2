"""What an optimizer does is tried out on small matrices when the engine is built: its name tells too little.

separately     two parameters stepped together are what they are when each is stepped alone: all that the engine
does needs this, for it steps one bucket at a time
elementwise    a parameter stepped in two parts is what it is when it is stepped whole: the sharded update
"""

from __future__ import annotations

import copy
from collections import defaultdict
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from dear_engine.update import Snapshot, Stepped, apply_update
from dear_tune.errors import UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

__all__ = ["check_separate", "elementwise_state"]

_STEPS = 3
_RATE = 0.1  # whatever the optimizer's own is: a warm-up begins at zero, where nothing can be seen
_TOLERANCE = 1e-9  # of how far the parameters move, in double precision

_State = defaultdict[torch.Tensor, dict[str, Any]]


def check_separate(optimizer: torch.optim.Optimizer) -> None:
    """Raise `UnsupportedError` if what becomes of a parameter depends on the others, or on random numbers."""
    for group in _groups(optimizer):
        first, second = _matrix(group, 3, 4), _matrix(group, 4, 3) * 5
        with _objections():  # one that steps no small matrix cannot be tried out; it may work all the same
            random = torch.get_rng_state()
            together, _ = _stepped(optimizer, group, [first, second])
            alone = [_stepped(optimizer, group, [each])[0][0] for each in (first, second)]
            separate = all(_same(*each) for each in zip((first, second), together, alone, strict=True))
            if not separate or not torch.equal(random, torch.get_rng_state()):
                break
    else:
        return
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
    for group in _groups(optimizer):
        # Of different magnitudes, so that a norm over the whole is not that of a part.
        start = _matrix(group, 3, 4)
        elementwise = False
        with _objections():  # whatever an optimizer objects to in a part: it cannot be stepped in parts
            (whole,), (state,) = _stepped(optimizer, group, [start])
            parts = [_stepped(optimizer, group, [start], part)[0][0] for part in (slice(6), slice(6, None))]
            elementwise = _same(start, whole, torch.cat(parts).view_as(whole))
        if not elementwise:
            raise UnsupportedError(
                f"{type(optimizer).__name__} does not treat every element of a parameter on its own, so a rank cannot "
                'step a part of it; use update="replicated".'
            )
        names |= {name for name, value in state.items() if _is_shaped(value, start)}
    return names


@contextmanager
def _objections() -> Iterator[None]:
    """Pass over what the optimizer raises by itself."""
    try:
        yield
    except UnsupportedError:  # it is ours, and says what the optimizer does that it must not
        raise
    except Exception:  # whatever it is, it is about our small matrices, not about the user's parameters
        return


def _groups(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    return [group for group in optimizer.param_groups if group["params"]]


def _matrix(group: dict[str, Any], *shape: int) -> torch.Tensor:
    device = group["params"][0].device
    return torch.linspace(-1, 1, 12, dtype=torch.float64, device=device).pow(3).view(shape)


def _stepped(
    optimizer: torch.optim.Optimizer, group: dict[str, Any], starts: Sequence[torch.Tensor], part: slice = slice(None)
) -> tuple[list[torch.Tensor], list[dict[str, Any]]]:
    """What becomes of parameters, or of a part of their elements, after a few steps; and their state."""
    gradients = [torch.linspace(1, 3, 12, dtype=torch.float64, device=start.device).sin() for start in starts]
    whole = part == slice(None)
    parameters = [nn.Parameter((start if whole else start.reshape(-1)[part]).clone()) for start in starts]
    settings = {name: _adapted(name, value) for name, value in group.items() if name not in ("params", "param_names")}
    snapshot = Snapshot(dict(vars(optimizer)), {id(each): (settings, 0) for each in parameters})
    state: _State = defaultdict(dict)
    state.update((p, like) for p in parameters if (like := _state_like(optimizer, group, p)))
    for step in range(1, _STEPS + 1):
        stepped = [
            Stepped(p, p, (gradient * step)[part].clone().view_as(p))
            for p, gradient in zip(parameters, gradients, strict=True)
        ]
        with torch.no_grad():
            apply_update(optimizer, state, snapshot, stepped)
    return [p.detach() for p in parameters], [state.get(p, {}) for p in parameters]


def _adapted(name: str, value: Any) -> Any:
    if name == "lr":
        return torch.full_like(value, _RATE) if isinstance(value, torch.Tensor) else _RATE
    return copy.deepcopy(value)


def _same(start: torch.Tensor, one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether both have moved, and to the same place."""
    moved = (one - start).abs().max()
    return bool(moved > 0 and (one - other).abs().max() <= _TOLERANCE * moved)


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
