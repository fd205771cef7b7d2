"""How a run begins, is interrupted and ends."""

import pytest
from support.ranks import RankError, RankPool
from support.training import group_destroyed_at_once, one_rank_dies, opened_and_closed, resumed


def test_resuming(ranks):
    """State dicts that were saved in the middle resume to the last bit, at another threshold too."""
    for uninterrupted, again in ranks(2).run(resumed):
        assert uninterrupted == again


@pytest.fixture
def doomed():
    """Two ranks that nobody needs afterwards."""
    pool = RankPool(2)
    yield pool
    pool.close()


def test_a_rank_dies(doomed):
    """When a rank is gone the others raise an error that says so."""
    with pytest.raises(RankError, match=r"rank 0: (.|\n)*CommunicationError: (.|\n)*rank 1: the process has ended"):
        doomed.run(one_rank_dies)


def test_a_group_that_is_destroyed_at_once(doomed):
    """A rank that leaves right after its last step takes nothing away from the others."""
    assert max(doomed.run(group_destroyed_at_once)) < 1e-12


def test_closing_leaves_nothing(ranks):
    """Engines that are closed keep no connection open."""
    assert max(ranks(2).run(opened_and_closed, 10)) <= 0
