from collections.abc import Callable, Iterator

import pytest
from support.ranks import RankPool


@pytest.fixture(scope="session")
def ranks() -> Iterator[Callable[[int], RankPool]]:
    """The pool of a world size, started when it is first asked for."""
    pools: dict[int, RankPool] = {}

    def pool(world_size: int) -> RankPool:
        return pools.setdefault(world_size, RankPool(world_size))

    yield pool
    for started in pools.values():
        started.close()
