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
    "stale_read_beside_a_proper_one": ("StaleParameterError", "0.weight"),
    "scaled_gradients": ("UnsupportedError", "GradScaler"),
    "wrapped_in_ddp": ("UnsupportedError", "pass the module inside"),
    "two_devices": ("UnsupportedError", "several devices"),
    "swapped_arguments": ("UnsupportedError", "the optimizer comes first"),
    "group_added": ("UnsupportedError", "add_param_group"),
    "threshold_in_the_middle_of_a_step": ("GradientError", "before backward()"),
    "counter_in_a_group": ("UnsupportedError", "_CountsInItsGroup.step() changes steps"),
    "counter_in_the_optimizer": ("UnsupportedError", "_CountsInItself.step() changes steps"),
    "read_after_a_failed_update": ("StaleParameterError", "failed before"),
    "hook_added_later": ("UnsupportedError", "step hooks"),
    "no_such_study": ("ConfigurationError", "name"),
    "written_while_pending": ("StaleParameterError", "0.weight was written"),
    "shared_memory": ("UnsupportedError", "share memory"),
    "gradient_by_hand": ("GradientError", "4.weight"),
    "stepped_after_close": ("UnsupportedError", "closed"),
    "copied_optimizer": ("UnsupportedError", "state_dict"),
    "no_number_of_bytes": ("UnsupportedError", "threshold_bytes"),
    "different_buffers": ("UnsupportedError", "[1]"),
    "class_that_cannot_be_extended": ("UnsupportedError", "_Registered"),
    "scripted": ("UnsupportedError", "ScriptModule"),
}


def test_the_table_is_complete():
    """Every case has an expected error."""
    assert EXPECTED.keys() == CASES.keys()


@pytest.mark.parametrize("case", CASES)
def test_refused(ranks, case):
    """The use raises its error on both ranks."""
    kind, cause = EXPECTED[case]
    for text in ranks(2).run(raised, case):
        assert text.startswith(kind + ":")
        assert cause in text
