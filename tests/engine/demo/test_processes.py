"""Signals end the demo, wherever they come."""

import contextlib
import os
import signal

import pytest

from dear_engine.demo.processes import ended_by_signals


@pytest.mark.parametrize(
    ("number", "error"), [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, SystemExit), (signal.SIGHUP, SystemExit)]
)
def test_a_signal_whose_exception_was_lost_is_raised_again(number, error):
    """An exception that a signal raised where exceptions are ignored comes again at the next check; others wait."""
    with pytest.raises(error), ended_by_signals() as check:
        with contextlib.suppress(BaseException):
            os.kill(os.getpid(), number)
        os.kill(os.getpid(), signal.SIGTERM)  # while it ends already
        check()
