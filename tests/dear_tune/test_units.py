from __future__ import annotations

import pytest

from dear_tune.contract import Estimate, Gain
from dear_tune.units import format_bytes, format_estimate, format_gain, format_seconds, format_share, printable


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (1, "1 B"),
        (1023, "1023 B"),
        (1024, "1 KiB"),
        (1500, "1.46 KiB"),
        (25 * 2**20, "25 MiB"),
        (2**30 - 1, "1024 MiB"),
        (2**50, "1024 TiB"),
    ],
)
def test_bytes(size: int, text: str) -> None:
    """Sizes have three digits and binary units."""
    assert format_bytes(size) == text


@pytest.mark.parametrize(("time", "text"), [(0.00012, "120 µs"), (0.0123, "12.3 ms"), (1.5, "1.5 s"), (300.0, "300 s")])
def test_seconds(time: float, text: str) -> None:
    """Times have three digits, in µs, ms or s."""
    assert format_seconds(time) == text


def test_share() -> None:
    """Shares are in percent, to a tenth."""
    assert format_share(0.0213) == "2.1 %"


def test_estimate() -> None:
    """An iteration time comes with its interval."""
    assert format_estimate(Estimate(median_s=0.0123, low_s=0.012, high_s=0.0126, iterations=9)) == (
        "12.3 ms (12 ms to 12.6 ms)"
    )


def test_gain() -> None:
    """A gain comes with its interval."""
    assert format_gain(Gain(fraction=0.123, low=-0.01, high=0.2)) == "12.3 % (-1.0 % to 20.0 %)"


def test_control_characters_are_replaced() -> None:
    """Text from elsewhere cannot steer the terminal."""
    assert printable("a\x1b[2Jb\nc") == "a\ufffd[2Jb\nc"
