"""What would give wrong numbers is refused, on every rank, by an error that names the cause."""

import pytest
from support.refusals import CASES, raised

EXPECTED = {
    "stale_read": ("StaleParameterError", "0.weight"),
    "clipped_after_backward": ("GradientError", "0.weight"),
    "second_backward": ("GradientError", "no_sync"),
    "sparse_gradient": ("UnsupportedError", "sparse=False"),
    "lbfgs": ("UnsupportedError", "LBFGS"),
    "foreign_parameter": ("UnsupportedError", "(3,)"),
    "nothing_to_train": ("UnsupportedError", "nothing to train"),
    "different_models": ("UnsupportedError", "[1]"),
    "thawed": ("UnsupportedError", "frozen"),
    "second_engine": ("UnsupportedError", "0.weight belongs to another"),
    "hooked_optimizer": ("UnsupportedError", "step hooks"),
    "scripted": ("UnsupportedError", "ScriptModule"),
}


@pytest.mark.parametrize("case", CASES)
def test_refused(ranks, case):
    """The use raises its error on both ranks."""
    kind, cause = EXPECTED[case]
    for text in ranks(2).run(raised, case):
        assert text.startswith(kind + ":")
        assert cause in text
