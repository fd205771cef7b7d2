"""What would give wrong numbers is refused, on every rank, by an error that names the cause."""

import pytest
from support.refusals import CASES, raised

EXPECTED = {
    "foreign_parameter": ("UnsupportedError", "(3,)"),
    "nothing_to_train": ("UnsupportedError", "nothing to train"),
    "different_models": ("UnsupportedError", "[1]"),
    "second_engine": ("UnsupportedError", "0.weight belongs to another"),
    "hooked_optimizer": ("UnsupportedError", "step hooks"),
    "wrapped_in_ddp": ("UnsupportedError", "pass the module inside"),
    "two_devices": ("UnsupportedError", "several devices"),
    "swapped_arguments": ("UnsupportedError", "the optimizer comes first"),
    "threshold_in_the_middle_of_a_step": ("GradientError", "before backward()"),
    "counter_in_a_group": ("UnsupportedError", "_CountsInItsGroup.step() changes steps"),
    "counter_that_comes_later": ("UnsupportedError", "_CountsLater.step() changes late"),
    "counter_in_the_optimizer": ("UnsupportedError", "_CountsInItself.step() changes steps"),
    "read_after_a_failed_update": ("StaleParameterError", "failed before"),
    "step_after_a_failed_update": ("StaleParameterError", "failed before"),
    "hook_added_later": ("UnsupportedError", "step hooks"),
    "no_such_study": ("ConfigurationError", "name"),
    "shared_memory": ("UnsupportedError", "share memory"),
    "shared_column": ("UnsupportedError", "share memory"),
    "shared_column_further_on": ("UnsupportedError", "share memory"),
    "gradients_in_one_buffer": ("GradientError", "views of one buffer"),
    "wrapped_twice": ("UnsupportedError", "wrapped in a DistributedOptimizer already"),
    "parameters_for_a_model": ("UnsupportedError", "then the model itself"),
    "url_for_a_tuner": ("UnsupportedError", "dear.Tuner(url=...)"),
    "name_of_a_dtype": ("UnsupportedError", "torch.bfloat16"),
    "clipping_given_parameters": ("UnsupportedError", "pass the norm"),
    "norm_of_nothing": ("UnsupportedError", "norm_type=0"),
    "made_in_inference_mode": ("UnsupportedError", "torch.inference_mode()"),
    "gradients_of_another_dtype": ("UnsupportedError", "grad_dtype"),
    "gradients_of_a_function_that_reads_past_us": ("StaleParameterError", "synchronize()"),
    "stepped_after_close": ("UnsupportedError", "closed"),
    "copied_optimizer": ("UnsupportedError", "state_dict"),
    "no_number_of_bytes": ("UnsupportedError", "threshold_bytes"),
    "different_buffers": ("UnsupportedError", "[1]"),
    "scripted": ("UnsupportedError", "ScriptModule"),
    "class_that_cannot_be_extended": ("UnsupportedError", "_Slotted"),
    "counter_in_a_tensor": ("UnsupportedError", "_CountsInATensor.step() changes steps"),
    "counter_under_a_name": ("UnsupportedError", "_CountsUnderAName.step() changes state['all']"),
    "optimizer_that_clips": ("UnsupportedError", "clip_grad_norm_()"),
    "optimizer_with_noise": ("UnsupportedError", "random numbers"),
    "optimizer_around_another": ("UnsupportedError", "holds another optimizer"),
    "other_parameters_in_a_group": ("UnsupportedError", "other parameters"),
    "backward_on_what_was_clipped": ("GradientError", "zero_grad() before the next step"),
    "lazy": ("UnsupportedError", "run a forward pass"),
    "group_of_a_stranger": ("UnsupportedError", "(3,)"),
    "parameters_added_behind_its_back": ("UnsupportedError", "add_param_group() of the DistributedOptimizer"),
    "backward_after_clipping": ("GradientError", "after clip_grad_norm_()"),
    "integers_on_the_wire": ("UnsupportedError", "communication_dtype"),
    "other_hyperparameters": ("UnsupportedError", "[1] have other parameter groups"),
    "c_code_with_a_pending_parameter": ("StaleParameterError", "0.weight"),
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
