"""Training on the engine gives the numbers of plain PyTorch for public architectures too.

Their libraries come by `make test-architectures`. Without them these tests are skipped, so that `make test` needs no
more than the engine does.
"""

from importlib.util import find_spec

import pytest
from support.architectures import ARCHITECTURES, LIBRARIES, train

MISSING = [library for library in LIBRARIES if find_spec(library) is None]
if MISSING:
    pytest.skip(f"{', '.join(MISSING)}: not installed; run make test-architectures", allow_module_level=True)

STEPS = 20
THRESHOLD_BYTES = 8192  # a few layers a bucket, and many buckets
DROPPING = ["switch", "wav2vec2", "memory_tokens"]


@pytest.mark.parametrize("update", ["replicated", "sharded"])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_equals_a_single_process(ranks, name, update):
    """Two ranks end, bit-identical, where one process with both batches ends, each with its own buffers."""
    outcomes = ranks(2).run(train, name, update, THRESHOLD_BYTES, STEPS)
    # The last bit of the parameters, changed at the start, has moved them by 1e-14 at most when these steps are over.
    assert max(outcome.distance for outcome in outcomes) < 1e-12
    assert max(outcome.buffers for outcome in outcomes) < 1e-12
    assert len({outcome.digest for outcome in outcomes}) == 1


@pytest.mark.parametrize("name", DROPPING)
def test_ranks_drop_different_parameters(ranks, name):
    """Experts and layers that are left out are so on one rank only, which is what the test above is for."""
    one, other = ranks(2).run(train, name, "replicated", THRESHOLD_BYTES, 3)
    assert one.absent != other.absent
