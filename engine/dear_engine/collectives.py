"""The collectives that the schedule is made of, in place on a bucket's flat buffer.

A flat buffer of `world_size * n` elements is `world_size` shards of n. Rank r owns shard r.

    reduce_scatter   shard r of rank r becomes the mean over ranks; its other shards become scratch
    all_gather       every rank's shard r becomes rank r's

One after the other they are an all-reduce, and send the same bytes: each rank 2 (N - 1) / N of the buffer.

Gloo: its own reduce-scatter sends an all-reduce's bytes, so shards go around a ring of neighbours instead
(at two ranks: one pairwise exchange), which measured fastest at four ranks too (docs/engine.md). Gloo's calls
block their caller, so one thread makes them all, first in first out: every rank queues in the same order, and
no other agreement is needed. NCCL: its own collectives, whose stream is that queue.

Every collective has a site in the program, in words, the same on all ranks. On Gloo data is tagged with it, and
neighbours tell it each other where a new one begins: ranks that are out of step raise there, and never take one
collective's data for another's. Who raises leaves the group, so that its neighbours do not wait for it.
"""

from __future__ import annotations

import traceback
import zlib
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.distributed as dist
from typing_extensions import override

from dear_tune.errors import CommunicationError, UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from datetime import timedelta

__all__ = [
    "Channel",
    "Collectives",
    "NativeCollectives",
    "RingCollectives",
    "Traffic",
    "Work",
    "check_backend",
    "collectives_for",
]


class Work(Protocol):
    """A collective on its way."""

    def wait(self) -> object:
        """Return when its result may be used; raise `CommunicationError` if it failed."""
        ...


@dataclass
class Traffic:
    """What this rank has sent so far, without greetings: the counts that the tests hold the engine to."""

    reduce_scatters: int = 0
    all_gathers: int = 0
    sent_bytes: int = 0


_GREETING_BYTES = 128
_GREETING_TAG = 0  # that of data is odd


class Collectives(Protocol):
    """Both phases of an all-reduce, asynchronously, in the order they are asked for.

    A site says, in words, where in the program a collective is: the same on all ranks. Those that follow each other
    by themselves, such as all reduce-scatters of a step, are at one site, and numbered.
    """

    rank: int
    world_size: int
    traffic: Traffic

    def reduce_scatter(self, flat: torch.Tensor, site: str, number: int) -> Work:
        """Average the buffer's shards over the ranks; own shard of `flat`: (world_size * n,)."""
        ...

    def all_gather(self, flat: torch.Tensor, site: str, number: int) -> Work:
        """Fill all shards of `flat` (world_size * n,) from their owners; follows a `reduce_scatter` unawaited."""
        ...

    def all_reduce(self, values: torch.Tensor, operation: dist.ReduceOp.RedOpType, site: str) -> Work:
        """Combine a few numbers over the ranks, element by element, in place."""
        ...


class Channel:
    """The engine's own Gloo group, and the one thread that speaks on it.

    A group of its own keeps the engine's traffic apart from the user's collectives, and alive when the user calls
    `destroy_process_group` while a peer still waits for the last all-gather. The interpreter joins the thread at
    exit, after what is queued has been sent.

    Args:
        process_group: whose ranks take part; all of them construct the channel together.
    """

    def __init__(self, process_group: dist.ProcessGroup) -> None:
        ranks = dist.get_process_group_ranks(process_group)
        self._group: dist.ProcessGroup = dist.new_group(
            ranks,
            timeout=_timeout_of(process_group),
            backend="gloo",
            use_local_synchronization=len(ranks) < dist.get_world_size(),
        )
        self.rank = dist.get_rank(process_group)
        self.world_size = len(ranks)
        self._left, self._right = (self.rank - 1) % self.world_size, (self.rank + 1) % self.world_size
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="dear-communication")
        self._site = ""  # where the last collective was
        self._broken: Exception | None = None

    def submit(self, job: Callable[[], None]) -> Work:
        """Run a job after all those submitted before it. It greets before it communicates."""
        return _QueuedWork(self._thread.submit(self._run, job))

    def all_reduce(self, values: torch.Tensor, operation: dist.ReduceOp.RedOpType, site: str) -> Work:
        """Combine a tensor on the CPU over the ranks, element by element, in place."""

        def job() -> None:
            self.greet(site)
            self._group.allreduce([values], operation).wait()

        return self.submit(job)

    def all_gather_object(self, value: Any, site: str) -> list[Any]:
        """Every rank's picklable object, by rank, on every rank; waits for it."""
        everyone: list[Any] = [None] * self.world_size

        def job() -> None:
            self.greet(site)
            dist.all_gather_object(everyone, value, group=self._group)

        self.submit(job).wait()
        return everyone

    def gather_object(self, value: Any, to: int, site: str) -> list[Any] | None:
        """Every rank's picklable object, by rank, on one rank; the others get None. Waits for it."""
        everyone: list[Any] | None = [None] * self.world_size if self.rank == to else None

        def job() -> None:
            self.greet(site)
            dist.gather_object(value, everyone, group=self._group, group_dst=to)

        self.submit(job).wait()
        return everyone

    def greet(self, site: str) -> None:
        """Tell the right neighbour the site that a collective is at, and hear it from the left one.

        Raises:
            CommunicationError: the left neighbour is at another one.
        """
        self._site = site
        if self.world_size == 1:
            return
        own = site.encode()[:_GREETING_BYTES].ljust(_GREETING_BYTES)
        theirs = bytearray(_GREETING_BYTES)
        self._swap(_bytes(bytearray(own)), _bytes(theirs), _GREETING_TAG)
        if theirs != own:
            raise CommunicationError(
                f"The ranks are out of step: rank {self._left} is at {theirs.decode(errors='replace').rstrip()}, "
                f"rank {self.rank} at {site}. All ranks must make the same calls in the same order (backward(), "
                "step(), clip_grad_norm_(), set_threshold(), consolidate_state_dict() and the like); all backward "
                "passes of a step but the last belong under no_sync()."
            )

    def pass_on(self, outgoing: torch.Tensor, incoming: torch.Tensor, site: str, number: int) -> None:
        """Within a job, send a tensor to the right neighbour and receive the left one's of the same size.

        A greeting travels along where the site is new.
        """
        tag = zlib.crc32(f"{site} {number} {outgoing.numel()}".encode()) >> 1 | 1
        self._swap(outgoing, incoming, tag, None if site == self._site else partial(self.greet, site))

    def close(self) -> None:
        """Finish what is queued, end the thread and leave the group."""
        self._thread.shutdown()
        if self._broken is None:
            self._leave()

    def _swap(
        self, outgoing: torch.Tensor, incoming: torch.Tensor, tag: int, meanwhile: Callable[[], None] | None = None
    ) -> None:
        # Receiving is posted first, so that Gloo writes what arrives straight to its place.
        receipt = self._group.recv([incoming], self._left, tag)
        sending = self._group.send([outgoing], self._right, tag)
        if meanwhile is not None:
            meanwhile()
        receipt.wait()
        sending.wait()

    def _run(self, job: Callable[[], None]) -> None:
        if self._broken is not None:  # a partner is lost: later jobs would wait for it in vain
            raise self._broken
        try:
            job()
        except Exception as error:  # whatever it was: the ranks are no longer at the same collective
            self._broken = error
            traceback.clear_frames(error.__traceback__)  # what is on its way there holds connections
            self._leave()
            raise

    def _leave(self) -> None:
        with suppress(ValueError):  # the user has destroyed all groups already
            dist.destroy_process_group(self._group)
        del self._group  # it holds connections as long as anything refers to it


def _bytes(buffer: bytearray) -> torch.Tensor:
    return torch.frombuffer(buffer, dtype=torch.uint8)


class _QueuedWork(Work):
    def __init__(self, future: Future[None]) -> None:
        self._future = future

    @override
    def wait(self) -> None:
        with _as_ours():
            self._future.result()


class _NativeWork(Work):
    def __init__(self, work: dist.Work) -> None:
        self._work = work

    @override
    def wait(self) -> None:
        with _as_ours():
            self._work.wait()


@contextmanager
def _as_ours() -> Iterator[None]:
    try:
        yield
    except CommunicationError as error:  # it waits in a queue, perhaps for several
        raise CommunicationError(str(error)) from error
    except Exception as error:  # backends raise what they like; this is the one place that maps it
        raise CommunicationError(
            f"A collective failed: another rank has probably stopped or raised (its log says why), or has not made the "
            f"same call (step(), consolidate_state_dict() and the like belong on all ranks). ({error})"
        ) from error


def _timeout_of(process_group: dist.ProcessGroup) -> timedelta | None:
    """How long the user lets a collective take; None, for the default, where torch does not tell."""
    for device in ("cpu", "cuda"):
        try:
            options = process_group._get_backend(torch.device(device)).options
        except RuntimeError:  # the group has no backend for that device
            continue
        timeout: timedelta | None = getattr(options, "_timeout", None)
        return timeout
    return None


class RingCollectives(Collectives):
    """Both phases around a ring of neighbours, by Gloo's point-to-point calls. See the module's text."""

    def __init__(self, channel: Channel) -> None:
        self.rank, self.world_size = channel.rank, channel.world_size
        self.traffic = Traffic()
        self._channel = channel

    @override
    def reduce_scatter(self, flat: torch.Tensor, site: str, number: int) -> Work:
        self.traffic.reduce_scatters += 1
        return self._channel.submit(lambda: self._reduce_scatter(flat.chunk(self.world_size), site, number))

    @override
    def all_gather(self, flat: torch.Tensor, site: str, number: int) -> Work:
        self.traffic.all_gathers += 1
        return self._channel.submit(lambda: self._all_gather(flat.chunk(self.world_size), site, number))

    @override
    def all_reduce(self, values: torch.Tensor, operation: dist.ReduceOp.RedOpType, site: str) -> Work:
        return self._channel.all_reduce(values, operation, site)

    def _reduce_scatter(self, shards: tuple[torch.Tensor, ...], site: str, number: int) -> None:
        received = torch.empty_like(shards[0])
        early = received.dtype is torch.float16  # whose sums would overflow; for others one shard is less work than all
        for shard in shards if early else ():
            shard.div_(self.world_size)
        for hop in range(1, self.world_size):
            # The partial sum that arrives in the last hop is that of the own shard.
            self._pass_on(shards[(self.rank - hop) % self.world_size], received, site, number)
            shards[(self.rank - hop - 1) % self.world_size].add_(received)
        if self.world_size > 1 and not early:
            shards[self.rank].div_(self.world_size)

    def _all_gather(self, shards: tuple[torch.Tensor, ...], site: str, number: int) -> None:
        for hop in range(1, self.world_size):
            outgoing = shards[(self.rank - hop + 1) % self.world_size]
            self._pass_on(outgoing, shards[(self.rank - hop) % self.world_size], site, number)

    def _pass_on(self, outgoing: torch.Tensor, incoming: torch.Tensor, site: str, number: int) -> None:
        self._channel.pass_on(outgoing, incoming, site, number)
        self.traffic.sent_bytes += outgoing.nbytes


class NativeCollectives(Collectives):
    """The backend's own collectives, asynchronous on its stream (NCCL).

    `wait` makes the current stream wait, not the host. The all-gather follows its reduce-scatter on one stream.
    """

    def __init__(self, process_group: dist.ProcessGroup) -> None:
        self.rank, self.world_size = dist.get_rank(process_group), dist.get_world_size(process_group)
        self.traffic = Traffic()
        self._group = process_group

    @override
    def reduce_scatter(self, flat: torch.Tensor, site: str, number: int) -> Work:
        self.traffic.reduce_scatters += 1
        self._count(flat)
        return _started(dist.reduce_scatter_tensor(self._own(flat), flat, dist.ReduceOp.AVG, self._group, True))

    @override
    def all_gather(self, flat: torch.Tensor, site: str, number: int) -> Work:
        self.traffic.all_gathers += 1
        self._count(flat)
        return _started(dist.all_gather_into_tensor(flat, self._own(flat), self._group, async_op=True))

    @override
    def all_reduce(self, values: torch.Tensor, operation: dist.ReduceOp.RedOpType, site: str) -> Work:
        return _started(dist.all_reduce(values, operation, self._group, async_op=True))

    def _own(self, flat: torch.Tensor) -> torch.Tensor:
        return flat.chunk(self.world_size)[self.rank]

    def _count(self, flat: torch.Tensor) -> None:
        self.traffic.sent_bytes += flat.nbytes // self.world_size * (self.world_size - 1)


def _started(work: dist.Work | None) -> Work:
    if work is None:
        raise CommunicationError("This process is not part of the optimizer's process group.")
    return _NativeWork(work)


def check_backend(process_group: dist.ProcessGroup, device: torch.device) -> None:
    """Raise `UnsupportedError` if no backend of the group that the engine knows serves the device."""
    backends = dist.get_backend_config(process_group)
    if not (device.type == "cpu" and "gloo" in backends) and not (device.type == "cuda" and "nccl" in backends):
        raise UnsupportedError(
            f"Parameters on {device} with the process group's backends {backends}: dear_engine needs "
            'init_process_group("nccl") for parameters on CUDA devices and init_process_group("gloo") for the CPU.'
        )


def collectives_for(process_group: dist.ProcessGroup, device: torch.device, channel: Channel) -> Collectives:
    """The collectives for tensors on a device that `check_backend` lets pass."""
    return NativeCollectives(process_group) if device.type == "cuda" else RingCollectives(channel)
