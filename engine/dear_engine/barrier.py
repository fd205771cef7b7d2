"""The read barrier: a parameter's pending update is applied just before anything reads the parameter.

While its update is pending, the class of a parameter is a subclass of its own class, whose `__torch_function__` is
called before any torch function that is given the parameter: `F.linear`, `detach()`, `.data`, `state_dict()`,
indexing, in-place writes, a list of parameters handed to a `_foreach` function. It brings the parameter up to date,
gives it its own class back, and lets the call go on. However the parameter was got hold of (a module's attribute, a
tied name, a list of the user's, `param_groups`) makes no difference, and once it is up to date a read costs nothing.

What is known to look at no value (`.grad`, `.shape`, `requires_grad_()`) is let through; whatever is not known counts
as a read. What does not come here cannot read an old value either, because it is not there: behind the barrier the
parameter's data is NaN (one number, expanded to its shape), and its memory is kept aside. Whoever reaches the values in
another way, through a kept `.data` or a traced module, is what `Holders` looks for, before the barrier closes.
"""

from __future__ import annotations

import copy
import types
from collections import Counter
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import nn

from dear_tune.errors import UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

__all__ = ["Holders", "ReadBarrier", "check_countable", "plainly"]

plainly = torch._C.DisableTorchFunctionSubclass
"""A context in which no barrier is noticed, for this thread: that of the update itself."""

_GETTERS = (
    "_backward_hooks", "_grad", "_post_accumulate_grad_hooks", "device", "dtype", "grad", "grad_fn",
    "is_cpu", "is_cuda", "is_leaf", "is_meta", "is_quantized", "is_sparse", "itemsize", "layout", "name", "names",
    "ndim", "output_nr", "requires_grad", "retains_grad", "shape",
)  # fmt: skip
_METHODS = (
    "__len__", "dim", "element_size", "get_device", "is_floating_point", "ndimension", "nelement", "numel",
    "register_hook", "register_post_accumulate_grad_hook", "requires_grad_", "retain_grad", "size",
)  # fmt: skip
_LOOKS_AT_NO_VALUE = frozenset(
    # A version of torch that lacks one has no need of it.
    [getattr(torch.Tensor, name).__get__ for name in _GETTERS if hasattr(torch.Tensor, name)]
    + [getattr(torch.Tensor, name) for name in _METHODS if hasattr(torch.Tensor, name)]
    + [getattr(torch.Tensor, name).__set__ for name in ("grad", "requires_grad")]
)


class _Behind:
    """What a parameter's class adds to its own one while the parameter is behind a barrier."""

    __slots__ = ()

    _dear_barrier: ClassVar[ReadBarrier]
    _dear_own_class: ClassVar[type[nn.Parameter]]

    # A compiled function is to read anew at each call, and not as it did when it was compiled.
    @classmethod
    @torch.compiler.disable  # type: ignore[untyped-decorator] # not annotated in torch
    def __torch_function__(
        cls, func: Any, kinds: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _LOOKS_AT_NO_VALUE:
            return super().__torch_function__(func, kinds, args, kwargs)  # type: ignore[misc] # the parameter's own
        waiting = [*_behind_in(args), *_behind_in(kwargs.values())]
        for parameter, behind in waiting:
            behind._dear_barrier.read(parameter)
        if not waiting:  # it came inside something that cannot be looked into, or another thread was faster
            cls._dear_barrier.read_all()
        return func(*args, **kwargs)

    # In Python these begin with the object's class.
    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        type(self)._dear_barrier.read(self)
        return copy.deepcopy(self, memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        type(self)._dear_barrier.read(self)
        return self.__reduce_ex__(protocol)


def _behind_in(arguments: Iterable[Any]) -> Iterator[tuple[nn.Parameter, type[_Behind]]]:
    """The parameters behind a barrier, also those in lists and dictionaries, each with the class that it has now."""
    for each in arguments:
        kind = type(each)
        if issubclass(kind, _Behind):
            yield each, kind
        elif issubclass(kind, dict):
            yield from _behind_in(each.values())
        elif issubclass(kind, (list, tuple)):
            yield from _behind_in(each)


class ReadBarrier:
    """The read barrier of one engine.

        close     step() leaves an update pending: the values go aside, NaN takes their place
        unveil    the update has been computed: its values come to their place
        open      the parameter is as any other

    Args:
        update: brings a parameter up to date; called before a read, from whichever thread reads.
        update_all: brings all parameters up to date, and opens the barrier.
    """

    def __init__(self, update: Callable[[nn.Parameter], None], update_all: Callable[[], None]) -> None:
        self._update = update
        self.read_all = update_all
        self._classes: dict[type[nn.Parameter], type[nn.Parameter]] = {}
        # By id: a tensor's own hash is Python, and these are asked for at every step.
        self._aside: dict[int, torch.Tensor] = {}  # the values of those behind the barrier
        self._nothing: dict[int, torch.Tensor] = {}  # what is there in their place

    def close(self, parameter: nn.Parameter) -> None:
        """From now on the parameter is brought up to date before it is read, and what cannot see to that reads NaN."""
        own = type(parameter)
        if not issubclass(own, _Behind):
            parameter.__class__ = self._behind(own)
        with plainly():
            self._aside[id(parameter)] = parameter.data
            parameter.data = self._nan(parameter)

    def aside(self, parameter: nn.Parameter) -> torch.Tensor:
        """The values that were there when the barrier closed."""
        return self._aside[id(parameter)]

    def unveil(self, parameter: nn.Parameter, values: torch.Tensor, *, changed: bool) -> None:
        """Let these be the parameter's values; others still wait for `open`."""
        del self._aside[id(parameter)]
        with plainly():
            parameter.data = values
            if changed:  # graphs that have saved it are to notice, as when it is written to
                torch.autograd.graph.increment_version(parameter)

    def read(self, parameter: Any) -> None:
        """Bring the parameter up to date; from now on it is read as any other."""
        self._update(parameter)
        self.open(parameter)

    def open(self, parameter: nn.Parameter) -> None:
        """From now on the parameter is read as any other."""
        attached = type(parameter)
        if issubclass(attached, _Behind):
            parameter.__class__ = attached._dear_own_class

    def closed(self, parameter: torch.Tensor) -> bool:
        """Whether nothing has read the parameter since it was closed."""
        return isinstance(parameter, _Behind)

    def check(self, name: str, parameter: nn.Parameter) -> None:
        """Raise `UnsupportedError` for a parameter whose class cannot be extended."""
        if self.closed(parameter):
            return
        try:
            parameter.__class__ = self._behind(type(parameter))
        except TypeError as error:
            raise UnsupportedError(
                f"{name} is a {type(parameter).__name__}, whose class cannot be extended ({error}); dear_engine needs "
                "a plain torch.nn.Parameter there."
            ) from error
        self.open(parameter)

    def _nan(self, parameter: nn.Parameter) -> torch.Tensor:
        nothing = self._nothing.get(id(parameter))
        if nothing is None or nothing.dtype != parameter.dtype or nothing.device != parameter.device:
            nan = torch.full((), torch.nan, dtype=parameter.dtype, device=parameter.device)
            nothing = self._nothing[id(parameter)] = nan.expand(parameter.shape)
        return nothing

    def _behind(self, own: type[nn.Parameter]) -> type[nn.Parameter]:
        if own not in self._classes:
            members = {
                "_dear_barrier": self,
                "_dear_own_class": own,
                # Code and messages that go by a class's name go on as before.
                "__module__": own.__module__,
                "__qualname__": own.__qualname__,
                "__doc__": own.__doc__,
            }
            self._classes[own] = types.new_class(
                own.__name__, (_Behind, own), exec_body=lambda body: body.update(members)
            )
        return self._classes[own]


class Holders:
    """Who reaches parameters' values past the barrier: other tensors in the same memory, or C++ that keeps a parameter.

    Kept `.data`, `.detach()`, views and numpy arrays are the former; the latter are graphs that have saved a parameter
    for a backward that is still to come, and traced modules.

    Args:
        parameters: those that are known, and may lie in one storage: a recurrent layer's do, on a GPU.
    """

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self._parameters = parameters
        # Kept, so that how often a parameter is referred to does not depend on whether some graph is still there.
        self._accumulators = {id(p): _accumulator(p) for p in parameters if p.requires_grad}

    def others(self) -> set[int]:
        """The ids of the parameters that are reached by anyone else, now."""
        with plainly():
            storages = [parameter.untyped_storage() for parameter in self._parameters]
            known = Counter(storage._cdata for storage in storages)
            return {
                id(parameter)
                for parameter, storage in zip(self._parameters, storages, strict=True)
                if _references(parameter) > 1 + (id(parameter) in self._accumulators)
                # Each known one refers to it twice: the parameter itself, and `storages` here.
                or torch._C._storage_Use_Count(storage._cdata) > 2 * known[storage._cdata]
            }


def check_countable() -> None:
    """Raise `UnsupportedError` if this version of torch counts in another way than `Holders` takes it to."""
    with torch.inference_mode(False):
        alone, shared, saved = _counted()
    if alone or not shared or not saved:
        raise UnsupportedError(
            f"torch {torch.__version__} does not tell who else holds a parameter's memory, which dear_engine must "
            "know; torch 2.8 and 2.13 do."
        )


def _counted() -> tuple[set[int], set[int], set[int]]:
    """Who holds a parameter: when nobody else does, when its data are kept, and when a graph has saved it."""
    parameter, other = nn.Parameter(torch.ones(1)), torch.ones(1, requires_grad=True)
    holders = Holders([parameter])
    try:
        alone = holders.others()
        kept = parameter.data
        shared = holders.others()
        del kept
        graph = other * parameter
        saved = holders.others()
        del graph
    except AttributeError:  # a version that does not count at all
        return set(), set(), set()
    return alone, shared, saved


def _references(parameter: Any) -> int:
    """In C++; Python's own count as one."""
    count: int = parameter._use_count()
    return count


def _accumulator(parameter: nn.Parameter) -> Any:
    """The graph node that accumulates the parameter's gradient: there is at most one at a time."""
    with torch.inference_mode(False), torch.enable_grad(), plainly():
        node = parameter.view_as(parameter).grad_fn
        assert node is not None  # it requires a gradient
        return node.next_functions[0][0]
