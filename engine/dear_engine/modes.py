"""Where an update happens: wherever something reads a parameter, and yet always as if the user had called `step()`."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from dear_engine.barrier import plainly

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = ["in_plain_mode"]

_Result = TypeVar("_Result")


def in_plain_mode(
    work: Callable[[], _Result], device: torch.device, stream: torch.cuda.Stream | None = None
) -> _Result:
    """Do it without gradients, and outside of whatever mode the caller is in.

    Autocast and inference mode can be left for a while. Tracing, dispatch modes (such as those that count operations,
    or run them on fake tensors) and the transforms of `torch.func` cannot, but are this thread's own.

    Args:
        work: what to do.
        device: where.
        stream: the work goes there, and the caller's stream waits for it; None: to the caller's.
    """
    reader = None if stream is None else torch.cuda.current_stream(device)
    if _inside_something():
        with ThreadPoolExecutor(1) as thread:
            result = thread.submit(_do, work, device, stream).result()
    else:
        result = _do(work, device, stream)
    if reader is not None and stream is not None and reader != stream:
        reader.wait_stream(stream)
    return result


def _inside_something() -> bool:
    return (
        torch._C._get_tracing_state() is not None
        or torch._C._len_torch_dispatch_stack() > 0
        or torch._C._functorch.peek_interpreter_stack() is not None
    )


def _do(work: Callable[[], _Result], device: torch.device, stream: torch.cuda.Stream | None) -> _Result:
    there = nullcontext() if stream is None else torch.cuda.stream(stream)
    plain = torch.inference_mode(False), torch.no_grad(), torch.autocast(device.type, enabled=False), plainly()
    with ExitStack() as modes:
        for mode in (*plain, _not_compiling(), there):
            modes.enter_context(mode)
        return work()


@contextmanager
def _not_compiling() -> Iterator[None]:
    """While torch.compile looks at a parameter all of Python is told so, and optimizers then reckon in float32."""
    compiler: Any = torch.compiler
    before = compiler._is_compiling_flag
    compiler._is_compiling_flag = False
    try:
        yield
    finally:
        compiler._is_compiling_flag = before
