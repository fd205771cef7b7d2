"""A slow network on one machine: two network namespaces joined by a shaped link (Linux, root, iproute2)."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

__all__ = ["Host", "loopback", "shaped_link"]


@dataclass(frozen=True, kw_only=True)
class Host:
    """Where a rank runs.

    Attributes:
        address: the other rank reaches it there.
        interface: the network interface with that address.
        prefix: what a command line begins with to run there.
    """

    address: str
    interface: str
    prefix: tuple[str, ...] = ()


def loopback() -> tuple[Host, Host]:
    """Both ranks on this machine's loopback interface, as fast as it is."""
    host = Host(address="127.0.0.1", interface="lo")
    return host, host


@contextmanager
def shaped_link(rate_mbit: int) -> Iterator[tuple[Host, Host] | None]:
    """Two hosts with a link of that rate each way: this machine's own network namespace, and a new one.

    Yields:
        The hosts, or None where the system does not allow it. Nothing stays behind.
    """
    if os.geteuid() != 0 or not (shutil.which("ip") and shutil.which("tc")):
        yield None
        return
    namespace = f"dear-demo-{os.getpid()}"
    ends = (f"dear{os.getpid()}a", f"dear{os.getpid()}b")
    try:
        yield _link(namespace, ends, _addresses(os.getpid()), rate_mbit)
    finally:
        # The link goes with the namespace; if that could not be made, the link may stand alone.
        _ip("netns", "delete", namespace)
        _ip("link", "delete", ends[0])


def _addresses(seed: int) -> tuple[str, str]:
    # Of RFC 2544's range for benchmarks, which nobody routes; a pair of its own for each demo that runs.
    third, fourth = divmod(seed % 2**14, 64)
    return f"198.18.{third}.{4 * fourth + 1}", f"198.18.{third}.{4 * fourth + 2}"


def _link(
    namespace: str, ends: tuple[str, str], addresses: tuple[str, str], rate_mbit: int
) -> tuple[Host, Host] | None:
    inside = ("-n", namespace)
    worked = (
        _ip("netns", "add", namespace)
        and _ip("link", "add", ends[0], "type", "veth", "peer", "name", ends[1], "netns", namespace)
        and _ip("address", "add", f"{addresses[0]}/30", "dev", ends[0])
        and _ip(*inside, "address", "add", f"{addresses[1]}/30", "dev", ends[1])
        and _ip("link", "set", ends[0], "up")
        and _ip(*inside, "link", "set", ends[1], "up")
        and _ip(*inside, "link", "set", "lo", "up")
        and _shape((), ends[0], rate_mbit)
        and _shape(inside, ends[1], rate_mbit)
    )
    if not worked:
        return None
    return (
        Host(address=addresses[0], interface=ends[0]),
        Host(address=addresses[1], interface=ends[1], prefix=("ip", "netns", "exec", namespace)),
    )


def _shape(where: tuple[str, ...], interface: str, rate_mbit: int) -> bool:
    shaping = ("tbf", "rate", f"{rate_mbit}mbit", "burst", "128kb", "latency", "100ms")
    return _run("tc", *where, "qdisc", "add", "dev", interface, "root", *shaping)


def _ip(*arguments: str) -> bool:
    return _run("ip", *arguments)


def _run(*command: str) -> bool:
    return subprocess.run(command, capture_output=True, check=False).returncode == 0
