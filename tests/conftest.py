from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from support.postgres import Postgres, running_postgres
from support.ranks import RankPool

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path


@pytest.fixture(scope="session")
def ranks() -> Iterator[Callable[[int], RankPool]]:
    """The pool of a world size, started when it is first asked for."""
    pools: dict[int, RankPool] = {}

    def pool(world_size: int) -> RankPool:
        return pools.setdefault(world_size, RankPool(world_size))

    yield pool
    for started in pools.values():
        started.close()


@pytest.fixture(scope="session")
def postgres() -> Iterator[Postgres]:
    """A real PostgreSQL server."""
    with running_postgres() as server:
        yield server


@pytest.fixture(params=["sqlite", "postgresql"])
def database_url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """An empty database of each kind."""
    if request.param == "sqlite":
        yield f"sqlite:///{tmp_path}/studies.db"
        return
    server: Postgres = request.getfixturevalue("postgres")
    name = server.create()
    yield server.url(name)
    server.drop(name)
