"""What docs/migration.md promises to those who come from another engine."""

import ast
import re
from pathlib import Path

import pytest
from support.migration import (
    accumulated_without_no_sync,
    checkpoint_of_ddp,
    different_states,
    distributed_checkpoint,
    dtensor,
    large_gradients_in_half_precision,
    own_gradients,
    running_mean,
    sharded_state,
    sharded_state_dict,
    step_left_out,
    stepped_by_itself,
)

ROOT = Path(__file__).parents[2]
UPDATES = ["replicated", "sharded"]


def test_every_statement_names_a_test():
    """Each statement of the page ends with tests that there are."""
    functions = {
        node.name
        for file in (ROOT / "tests").rglob("*.py")
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.FunctionDef)
    }
    scenarios = set(re.findall(r"^\| ([A-F]\d+)", (ROOT / "docs/engine.md").read_text(), flags=re.MULTILINE))
    statements = re.findall(r"^\* (.*?)(?=^\*|^#|\Z|^$)", (ROOT / "docs/migration.md").read_text(), re.DOTALL | re.M)
    assert len(statements) > 20
    for statement in statements:
        named = re.search(r"\(`?(\w+)`?\)\s*\Z", statement)
        assert named, statement
        assert named[1] in functions | scenarios, statement


def test_a_checkpoint_of_ddp_loads(ranks):
    """What `ddp.module.state_dict()` saved is the model."""
    assert max(ranks(2).run(checkpoint_of_ddp)) == 0


@pytest.mark.parametrize("update", UPDATES)
def test_gradients_are_the_rank_s_own(ranks, update):
    """After backward and after the step `.grad` holds this rank's gradient."""
    assert all(ranks(2).run(own_gradients, update))


@pytest.mark.parametrize("update", UPDATES)
def test_accumulation_without_no_sync(ranks, update):
    """Backward passes that are not told apart add up, and each of them communicates."""
    for distance, rounds in ranks(2).run(accumulated_without_no_sync, update):
        assert distance < 1e-12
        assert rounds == 3


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("update", UPDATES)
def test_a_step_left_out(ranks, update, set_to_none):
    """Gradients that are dropped before the step leave nothing behind."""
    assert max(ranks(2).run(step_left_out, update, set_to_none)) < 1e-12


def test_buffers_are_the_rank_s_own(ranks):
    """Running statistics differ after a step on different batches."""
    one, other = ranks(2).run(running_mean)
    assert one != other


def test_the_wrapped_optimizer_does_not_step(ranks):
    """A step that would not communicate raises."""
    assert all("step() of the DistributedOptimizer" in text for text in ranks(2).run(stepped_by_itself))


def test_different_states_are_refused(ranks):
    """Ranks that begin with different optimizer states are told so."""
    assert all("[1] have other parameter groups or optimizer state" in t for t in ranks(2).run(different_states))


def test_half_precision_does_not_overflow(ranks):
    """The mean of gradients that float16 can hold is right, though their sum is beyond it."""
    assert ranks(2).run(large_gradients_in_half_precision) == [-60_000] * 2


@pytest.mark.parametrize("world_size", [2, 3])
def test_the_state_is_sharded(ranks, world_size):
    """The ranks' states have as many elements together as the parameters, and none has more than its share."""
    held, parameters = zip(*ranks(world_size).run(sharded_state, "sharded"), strict=True)
    assert sum(held) == parameters[0]
    assert max(held) <= parameters[0] / world_size + 8 * world_size  # each tensor's last part is the shorter one
    assert ranks(world_size).run(sharded_state, "replicated") == [(parameters[0], parameters[0])] * world_size


def test_dtensors_are_refused(ranks):
    """A parameter that another engine distributes is named."""
    assert all("weight is a DTensor" in text for text in ranks(2).run(dtensor))


def test_a_sharded_state_is_consolidated(ranks):
    """`state_dict()` raises before `consolidate_state_dict()`, gives whole tensors after it, and raises anew later."""
    for before, entries, later in ranks(2).run(sharded_state_dict):
        assert "consolidate_state_dict()" in before
        assert entries == [192, 16, 16, 16, 16, 1, 4, 4]
        assert "consolidate_state_dict()" in later


@pytest.mark.parametrize("update", UPDATES)
def test_distributed_checkpoint(ranks, tmp_path, update):
    """What torch.distributed.checkpoint saved resumes to the last bit."""
    for uninterrupted, again in ranks(2).run(distributed_checkpoint, update, str(tmp_path / "checkpoint")):
        assert uninterrupted == again
