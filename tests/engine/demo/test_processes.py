"""Signals end the demo, and leave nothing half done."""

import os
import signal

import pytest

from dear_engine.demo.processes import ended_by_signals


@pytest.mark.parametrize(
    ("number", "error"), [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, SystemExit), (signal.SIGHUP, SystemExit)]
)
def test_a_signal_ends_at_the_next_check(number, error):
    """A signal disturbs nothing where it comes; the next check raises what the first one stands for."""
    with ended_by_signals() as check:
        check()
        os.kill(os.getpid(), number)
        os.kill(os.getpid(), signal.SIGTERM)
        with pytest.raises(error):
            check()
