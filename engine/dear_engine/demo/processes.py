"""Child processes that are gone when their parent is done with them, however it ends."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import IO

__all__ = ["child", "die_with_parent", "ended_by_signals"]

_GRACE_S = 5.0
_PR_SET_PDEATHSIG = 1
_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextmanager
def child(
    command: Sequence[str], *, environment: Mapping[str, str] | None = None, output: IO[bytes] | int
) -> Iterator[subprocess.Popen[bytes]]:
    """Run a command with its descendants in a session of its own, so that Ctrl-C is the parent's alone to handle.

    Args:
        command: the program and its arguments.
        environment: variables on top of the parent's.
        output: where its standard output and errors go, as for `subprocess.Popen`.
    """
    process = subprocess.Popen(
        command,
        env={**os.environ, **(environment or {})},
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT,
        start_new_session=True,
        preexec_fn=die_with_parent,
    )
    try:
        yield process
    finally:
        _end(process)


def die_with_parent() -> None:
    """From now on this process is killed when its parent ends, whatever ends that (on Linux only)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _end(process: subprocess.Popen[bytes]) -> None:
    _signal(process, signal.SIGTERM)
    try:
        with suppress(subprocess.TimeoutExpired):
            process.wait(_GRACE_S)
    finally:
        _signal(process, signal.SIGKILL)  # also what its leader has left behind
        process.wait()
        if process.stdout is not None:
            process.stdout.close()


def _signal(process: subprocess.Popen[bytes], number: int) -> None:
    with suppress(ProcessLookupError):  # the whole group has ended
        os.killpg(process.pid, number)


@contextmanager
def ended_by_signals() -> Iterator[Callable[[], None]]:
    """Inside, SIGINT, SIGTERM and SIGHUP do nothing but take note; clean-up and the start of processes go undisturbed.

    Yields:
        A function that raises what the first of them stands for, KeyboardInterrupt or SystemExit. Whoever waits calls
        it now and then: raised at any moment, it could come between a process's start and the note of its being there.
    """
    received: list[int] = []

    def check() -> None:
        if received:
            raise KeyboardInterrupt if received[0] == signal.SIGINT else SystemExit(128 + received[0])

    before = {number: signal.signal(number, lambda number, _: received.append(number)) for number in _ENDING}
    try:
        yield check
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
