"""Ranks that are out of step raise: they neither wait for each other nor take each other's data for their own."""

import pytest
from support.out_of_step import AFTER_STEP, BEFORE_STEP, ON_ALL, text_of


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("case", [*BEFORE_STEP, *AFTER_STEP, *ON_ALL])
def test_all_ranks_raise(ranks, case, world_size):
    """Those whose neighbour is elsewhere say where; the others, that another has raised."""
    texts = ranks(world_size).run(text_of, case)
    assert any(text.startswith("The ranks are out of step: rank ") for text in texts)
    assert all("out of step" in text or "another rank has probably stopped or raised" in text for text in texts)
