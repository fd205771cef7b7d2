"""Bytes, seconds and shares as people read them; payloads keep plain numbers."""

from __future__ import annotations

from math import floor, log10
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dear_tune.contract import Estimate, Gain

__all__ = ["format_bytes", "format_estimate", "format_gain", "format_seconds", "format_share", "printable"]

_BINARY_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def format_bytes(size_bytes: int) -> str:
    """A size in binary units, to three digits: 26214400 is "25 MiB"."""
    power = min((max(size_bytes, 1).bit_length() - 1) // 10, len(_BINARY_UNITS) - 1)
    return f"{_three_digits(size_bytes / 1024**power)} {_BINARY_UNITS[power]}"


def format_seconds(time_s: float) -> str:
    """A time in µs, ms or s, to three digits: 0.0123 is "12.3 ms"."""
    if time_s < 1e-3:
        return f"{_three_digits(time_s * 1e6)} µs"
    if time_s < 1:
        return f"{_three_digits(time_s * 1e3)} ms"
    return f"{_three_digits(time_s)} s"


def format_share(fraction: float) -> str:
    """A share in percent, to a tenth: 0.0213 is "2.1 %"."""
    return f"{fraction * 100:.1f} %"


def format_estimate(estimate: Estimate) -> str:
    """An iteration time with its 95 % interval: "12.3 ms (12 ms to 12.6 ms)"."""
    interval = f"{format_seconds(estimate.low_s)} to {format_seconds(estimate.high_s)}"
    return f"{format_seconds(estimate.median_s)} ({interval})"


def format_gain(gain: Gain) -> str:
    """A gain with its 95 % interval: "12.3 % (10.1 % to 14.5 %)"."""
    return f"{format_share(gain.fraction)} ({format_share(gain.low)} to {format_share(gain.high)})"


def printable(text: str) -> str:
    """Text from elsewhere, safe for a terminal: control characters, but line ends, become U+FFFD."""
    return "".join(char if char.isprintable() or char == "\n" else "\ufffd" for char in text)


def _three_digits(value: float) -> str:
    decimals = 2 if value <= 0 else max(2 - floor(log10(value)), 0)
    rounded = f"{value:.{decimals}f}"
    return rounded.rstrip("0").rstrip(".") if "." in rounded else rounded
