"""The read barrier: a parameter's pending update is applied just before anything reads the parameter.

While an engine is attached, the class of every module of the model is a subclass of its own class that intercepts

    reads of one parameter    attribute access (`self.weight`, `self.head.weight`), which functional use, tied
                              weights, parameter lists, multi-head attention and other methods than `forward` all
                              come through: its bucket is updated, just in time
    reads of everything       parameters(), state_dict(), load_state_dict(), eval(), to(), deepcopy, pickling, and
                              calls of modules that keep their parameters in a plain attribute: all is updated

`zero_grad()` is let through: it goes by the parameters, but reads none. What escapes (a parameter the user keeps in
a list of their own) and is used in forward is noticed in backward, when a gradient arrives for a parameter whose
update is still pending: see `schedule.py`.

Copies and pickles of an attached model are of the original classes and know no engine.
"""

from __future__ import annotations

import types
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import torch
from torch import nn

from dear_tune.errors import UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = ["Gate", "attach", "detach"]


class Gate(Protocol):
    """What a barrier asks before it lets a read through."""

    def holds(self, parameter: torch.Tensor) -> bool:
        """Whether this engine updates the parameter."""
        ...

    def read(self, parameter: torch.Tensor) -> None:
        """Bring one parameter up to date; other tensors are none of its business."""
        ...

    def read_all(self, *, interrupts: bool) -> None:
        """Bring all parameters up to date.

        Args:
            interrupts: whether training stands still for it, so that the step's duration says nothing.
        """
        ...


class _Barrier(nn.Module):
    """What an attached module's class adds to the original one. It has no state: copies need none."""

    _dear_gates: ClassVar[tuple[Gate, ...]] = ()
    _dear_original: ClassVar[type[nn.Module]]
    _dear_reads_at_call: ClassVar[bool] = False

    def __getattr__(self, name: str) -> Any:
        value = super().__getattr__(name)
        if isinstance(value, torch.Tensor):
            for gate in type(self)._dear_gates:
                gate.read(value)
        return value

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if type(self)._dear_reads_at_call:
            for parameter in _kept_in_plain_attributes(self):
                for gate in type(self)._dear_gates:
                    gate.read(parameter)
        return super().__call__(*args, **kwargs)

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        _read_all(self, interrupts=False)
        return super().named_parameters(*args, **kwargs)

    def zero_grad(self, set_to_none: bool = True) -> None:
        _plain(self).zero_grad(set_to_none)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        _read_all(self, interrupts=True)
        return super().state_dict(*args, **kwargs)

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        _read_all(self, interrupts=True)
        super()._load_from_state_dict(*args, **kwargs)

    def train(self, mode: bool = True) -> Any:
        if not mode:
            _read_all(self, interrupts=True)
        return super().train(mode)

    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        _read_all(self, interrupts=True)
        return super()._apply(*args, **kwargs)  # type: ignore[no-untyped-call] # not annotated in torch

    def __reduce_ex__(self, protocol: Any) -> Any:
        _read_all(self, interrupts=True)
        # From protocol 2 on pickle insists on the class that the object itself has.
        return _plain(self).__reduce_ex__(min(protocol, 1))


def attach(model: nn.Module, gate: Gate) -> None:
    """Put the barrier before every module's parameters; a second engine on the same model joins the first.

    Raises:
        UnsupportedError: a parameter that another engine updates already, or a module whose class cannot be
            extended. Nothing has been changed then.
    """
    others = {other for module in model.modules() for other in _gates(type(module))}
    for name, parameter in nn.Module.named_parameters(model):
        if gate.holds(parameter) and any(other.holds(parameter) for other in others):
            raise UnsupportedError(f"{name} belongs to another DistributedOptimizer; close() that one first.")
    for name, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):  # it reads its parameters in C++
            raise UnsupportedError(f"{name or 'The model'} is a ScriptModule; dear_engine needs the original module.")
    _swap(model, lambda gates: (*gates, gate))


def detach(model: nn.Module, gate: Gate) -> None:
    """Take this engine's barrier away; modules that no engine is attached to get their own class back."""
    _swap(model, lambda gates: tuple(other for other in gates if other is not gate))


def _swap(model: nn.Module, changed: Callable[[tuple[Gate, ...]], tuple[Gate, ...]]) -> None:
    classes: dict[tuple[Any, ...], type[nn.Module]] = {}
    before = [(module, type(module)) for module in model.modules()]
    for name, module in model.named_modules():
        if issubclass(type(module), _Barrier) and "_dear_gates" not in vars(type(module)):
            continue  # someone has extended our class since, as parametrizations do: it stays as it is
        kind = (_original(type(module)), bool(_kept_in_plain_attributes(module)), changed(_gates(type(module))))
        try:
            if kind not in classes:
                classes[kind] = _extended(*kind) if kind[-1] else kind[0]
            module.__class__ = classes[kind]
        except Exception as error:  # a class may do as it likes when it is extended
            for earlier, own in before:
                earlier.__class__ = own
            raise UnsupportedError(
                f"{name or 'The model'} is a {type(module).__name__}, whose class cannot be extended ({error}); "
                "dear_engine needs a plain nn.Module there."
            ) from error


def _original(attached: type[nn.Module]) -> type[nn.Module]:
    return attached._dear_original if issubclass(attached, _Barrier) else attached


def _gates(attached: type[nn.Module]) -> tuple[Gate, ...]:
    return attached._dear_gates if issubclass(attached, _Barrier) else ()


def _extended(original: type[nn.Module], reads_at_call: bool, gates: tuple[Gate, ...]) -> type[nn.Module]:
    members = {
        "_dear_gates": gates,
        "_dear_original": original,
        "_dear_reads_at_call": reads_at_call,
        # Code and messages that go by a class's name go on as before.
        "__module__": original.__module__,
        "__qualname__": original.__qualname__,
        "__doc__": original.__doc__,
    }
    return types.new_class(original.__name__, (_Barrier, original), exec_body=lambda body: body.update(members))


def _kept_in_plain_attributes(module: nn.Module) -> list[nn.Parameter]:
    """Parameters that the module reads past attribute access: the recurrent layers keep theirs in a list."""
    kept: list[Any] = []
    for value in vars(module).values():
        if isinstance(value, (list, tuple)):
            kept.extend(value)
    return [item for item in kept if isinstance(item, nn.Parameter)]


def _read_all(module: _Barrier, *, interrupts: bool) -> None:
    for gate in type(module)._dear_gates:
        gate.read_all(interrupts=interrupts)


def _plain(module: _Barrier) -> nn.Module:
    """The same module, attributes and all, in its original class: what goes through it passes no barrier."""
    plain: nn.Module = object.__new__(type(module)._dear_original)
    plain.__dict__ = module.__dict__
    return plain
