"""How a run begins, is interrupted and ends."""

import pytest
from support.ranks import RankPool
from support.training import group_destroyed_at_once, opened_and_closed, outlives_its_closing


@pytest.fixture
def doomed():
    """Two ranks that nobody needs afterwards."""
    pool = RankPool(2)
    yield pool
    pool.close()


def test_a_group_that_is_destroyed_at_once(doomed):
    """A rank that leaves right after its last step takes nothing away from the others."""
    assert max(doomed.run(group_destroyed_at_once)) < 1e-12


def test_closing_leaves_nothing(ranks):
    """Engines that are closed keep no connection open."""
    assert max(ranks(2).run(opened_and_closed, 10)) <= 0


def test_nothing_keeps_a_closed_engine(ranks):
    """An engine that is closed, and that nobody refers to, is freed with its buffers."""
    assert ranks(2).run(outlives_its_closing) == [False, False]
