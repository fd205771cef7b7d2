"""Who reaches a parameter's values past the read barrier is known, or the engine refuses to run."""

import pytest
import torch
from torch import nn

from dear_engine import barrier
from dear_engine.barrier import Holders, check_countable
from dear_tune.errors import UnsupportedError


@pytest.mark.parametrize(
    "hold",
    [
        lambda parameter: parameter.data,
        lambda parameter: parameter.t(),
        lambda parameter: parameter.detach().numpy(),
        lambda parameter: torch.ones(2, 2, requires_grad=True) * parameter,
    ],
    ids=["data", "view", "numpy", "graph"],
)
def test_who_holds_it(hold):
    """Whatever shows or has saved the parameter is noticed as long as it lives, and nothing else is."""
    parameter, other = nn.Parameter(torch.ones(2, 2)), nn.Parameter(torch.ones(2))
    holders = Holders([parameter, other])
    assert holders.others() == set()
    held = hold(parameter)
    assert holders.others() == {id(parameter)}
    del held
    assert holders.others() == set()


@pytest.mark.parametrize("count", [0, 9])
def test_a_torch_that_counts_in_another_way(monkeypatch, count):
    """A version of torch whose counts mean something else is refused, and not misread."""
    monkeypatch.setattr(barrier, "_references", lambda _: count)
    with pytest.raises(UnsupportedError, match="does not tell"):
        check_countable()
