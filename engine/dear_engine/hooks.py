"""What an engine hangs on the model itself: two hooks that are noticed by nothing, and gone in copies of the model.

before forward      evaluation makes the step no iteration; code that is traced or compiled, whose reads are fixed
                    once and for all, finds its parameters up to date
before state_dict   a checkpoint makes the step no iteration
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn
    from torch.utils.hooks import RemovableHandle

__all__ = ["hang_on"]


def hang_on(
    model: nn.Module, *, update: Callable[[nn.Module], None], interrupt: Callable[[], None]
) -> list[RemovableHandle]:
    """Hang the hooks on.

    Args:
        model: the root, and whatever inside is compiled already.
        update: brings a module's parameters up to date.
        interrupt: what goes on now is no iteration.
    """
    compiled = [module for module in model.modules() if module is model or _is_compiled(module)]
    before_forward = [module.register_forward_pre_hook(_BeforeForward(update, interrupt)) for module in compiled]
    return [*before_forward, model.register_state_dict_pre_hook(_BeforeStateDict(interrupt))]


class _Hook:
    """In a copy or a pickle of the model it does nothing, and a pickle loads where there is no dear_engine."""

    def __deepcopy__(self, _: Any) -> Callable[..., None]:
        return nullcontext().__exit__  # the standard library's function that does nothing with any arguments

    def __reduce__(self) -> Any:
        return getattr, (nullcontext(), "__exit__")


class _BeforeForward(_Hook):
    def __init__(self, update: Callable[[nn.Module], None], interrupt: Callable[[], None]) -> None:
        # The update itself is none of a compiler's business.
        self._update = torch.compiler.disable(update)
        self._interrupt = interrupt

    def __call__(self, module: nn.Module, _: Any) -> None:
        if torch.compiler.is_compiling() or torch._C._get_tracing_state() is not None or _is_compiled(module):
            self._update(module)
        elif not module.training:
            self._interrupt()


class _BeforeStateDict(_Hook):
    def __init__(self, interrupt: Callable[[], None]) -> None:
        self._interrupt = interrupt

    def __call__(self, *_: Any) -> None:
        self._interrupt()


def _is_compiled(module: nn.Module) -> bool:
    """Whether `torch.compile(module)` gave it, or `module.compile()` was called on it."""
    return hasattr(module, "_orig_mod") or module._compiled_call_impl is not None
