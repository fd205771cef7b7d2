"""Rank processes that serve a whole test run: starting torch for every test would take longer than the tests."""

from __future__ import annotations

import multiprocessing
import os
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from tempfile import TemporaryDirectory
from typing import Any

TIMEOUT_S = 120
AFTER_A_FAILURE_S = 20  # for the other ranks, which may wait for the one that failed


class RankError(Exception):
    """What the ranks raised: their tracebacks, by rank."""

    def __init__(self, traces: dict[int, str]) -> None:
        self.traces = traces
        super().__init__("\n".join(f"rank {rank}: {trace}" for rank, trace in traces.items()))


@dataclass(frozen=True)
class _Failure:
    trace: str


class RankPool:
    """`world_size` processes in one Gloo process group, which run functions together.

    A function must be importable (from `support`), and its arguments and results picklable.
    """

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self._processes: list[multiprocessing.process.BaseProcess] = []
        self._pipes: list[Connection] = []
        self._folder: TemporaryDirectory[str] | None = None

    def run(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """Call the function on every rank; its results by rank."""
        if not self._processes:
            self._start()
        for pipe in self._pipes:
            pipe.send((function, arguments))
        answers = self._answers()
        failures = {rank: answer.trace for rank, answer in enumerate(answers) if isinstance(answer, _Failure)}
        if failures:
            self.close()  # the ranks may be in the middle of different collectives
            raise RankError(failures)
        return answers

    def close(self) -> None:
        """End the processes; the next `run` starts new ones."""
        for process in self._processes:
            process.kill()
            process.join()
        for pipe in self._pipes:
            pipe.close()
        self._processes, self._pipes = [], []
        if self._folder is not None:
            self._folder.cleanup()

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._folder = TemporaryDirectory(prefix="dear-ranks-")
        store = os.path.join(self._folder.name, "store")
        for rank in range(self.world_size):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(rank, self.world_size, store, theirs), daemon=True)
            process.start()
            theirs.close()
            self._processes.append(process)
            self._pipes.append(ours)

    def _answers(self) -> list[Any]:
        answers: dict[int, Any] = {}
        deadline = time.monotonic() + TIMEOUT_S
        while len(answers) < self.world_size:
            waiting = {pipe: rank for rank, pipe in enumerate(self._pipes) if rank not in answers}
            ready = wait(list(waiting), deadline - time.monotonic())
            if not ready:
                return [answers.get(rank, _Failure("no answer in time")) for rank in range(self.world_size)]
            for pipe in ready:
                answers[waiting[pipe]] = _received(pipe)
            if any(isinstance(answer, _Failure) for answer in answers.values()):
                deadline = min(deadline, time.monotonic() + AFTER_A_FAILURE_S)
        return [answers[rank] for rank in range(self.world_size)]


def _received(pipe: Connection) -> Any:
    try:
        return pipe.recv()
    except EOFError:
        return _Failure("the process has ended")


def _serve(rank: int, world_size: int, store: str, pipe: Connection) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world_size)
    while True:
        try:
            function, arguments = pipe.recv()
        except EOFError:
            return
        try:
            pipe.send(function(*arguments))
        except Exception:  # the test that asked is told, and the rank serves on
            pipe.send(_Failure(traceback.format_exc()))
