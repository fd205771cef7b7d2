"""How the stock `torch.amp.GradScaler` comes to look at the mean gradients.

It looks for infinities in `.grad`, which here is this rank's own, and unscales what it finds there, when the gradients
have been sent. One gradient of each bucket is therefore of a class that notices the one function by which GradScaler
does so, and has the same done to the shards of the mean, with the answer reduced over the ranks: all of them skip the
step, or none, and all scales stay equal. In everything else it is a plain tensor.
"""

from __future__ import annotations

import types
import weakref
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from dear_engine.barrier import plainly

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["noticing"]


class _Noticing(torch.Tensor):
    _dear_unscale: ClassVar[Callable[[torch.Tensor, torch.Tensor], None]]

    @classmethod
    def __torch_function__(
        cls, func: Any, kinds: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch._amp_foreach_non_finite_check_and_unscale_:
            gradients, found_inf, factor = args
            cls._dear_unscale(found_inf, factor)  # first: it sends what has not been sent yet
            with plainly():
                return func(gradients, torch.zeros_like(found_inf), factor)
        with plainly():
            return func(*args, **(kwargs or {}))

    # Copies and pickles are plain tensors.
    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        copy = self.as_subclass(torch.Tensor).clone()
        memo[id(self)] = copy
        return copy

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.as_subclass(torch.Tensor).__reduce_ex__(protocol)


def noticing(unscale: Callable[[torch.Tensor, torch.Tensor], None]) -> type[torch.Tensor]:
    """A class of gradients that calls this with GradScaler's `found_inf`, to be set, and factor when it unscales.

    It does not keep the method's object alive: the collector does not see that a gradient keeps its class.
    """
    reference = weakref.WeakMethod(unscale)

    def call(found_inf: torch.Tensor, factor: torch.Tensor) -> None:
        alive = reference()
        if alive is not None:
            alive(found_inf, factor)

    return types.new_class("Tensor", (_Noticing,), exec_body=lambda body: body.update(_dear_unscale=staticmethod(call)))
