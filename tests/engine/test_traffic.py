"""What a step sends: two collectives a bucket, and no more bytes than all-reduce."""

import pytest
from support.training import WHOLE_MODEL, traffic

STEPS = 3
ELEMENT_BYTES = 8


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("threshold_bytes", [1, 1500, WHOLE_MODEL])
def test_bytes_and_collectives(ranks, world_size, threshold_bytes):
    """Each bucket is reduce-scattered and all-gathered once; both send (N - 1) / N of gradients, flags and padding."""
    for sent in ranks(world_size).run(traffic, threshold_bytes, STEPS):
        assert sent["reduce_scatters"] == sent["all_gathers"] == STEPS * sent["buckets"]
        # On top of the gradients: one flag a parameter, and under world_size elements of padding a bucket.
        payload = sent["gradient_bytes"] + ELEMENT_BYTES * sent["parameters"]
        padding = ELEMENT_BYTES * (world_size - 1) * sent["buckets"]
        all_reduce = 2 * STEPS * payload * (world_size - 1) / world_size
        assert all_reduce <= sent["sent_bytes"] <= all_reduce + 2 * STEPS * padding * (world_size - 1) / world_size
