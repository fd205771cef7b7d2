from __future__ import annotations

from typing import TYPE_CHECKING, Any

import httpx
import pytest
from support.postgres import Postgres, running_postgres
from support.service import LEASE_S, AppTransport, SetClock

from dear_service import Settings, create_app
from dear_service.database import Database
from dear_tune import Client

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from fastapi import FastAPI


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


@pytest.fixture
def clock() -> SetClock:
    """The service's clock."""
    return SetClock()


@pytest.fixture
def start(database_url: str, clock: SetClock) -> Iterator[Callable[..., FastAPI]]:
    """Starts a service, or one more, on the test's database."""
    apps: list[FastAPI] = []

    def start_app(**methods: Any) -> FastAPI:
        app = create_app(Settings(database_url=database_url, lease_s=LEASE_S), clock=clock, **methods)
        apps.append(app)
        return app

    yield start_app
    for app in apps:
        app.state.context.database.close()


@pytest.fixture
def app(start: Callable[..., FastAPI]) -> FastAPI:
    """A service."""
    return start()


@pytest.fixture
def database(app: FastAPI) -> Database:
    """The service's database."""
    database: Database = app.state.context.database
    return database


@pytest.fixture
def http(app: FastAPI) -> Iterator[httpx.Client]:
    """Plain HTTP to the service."""
    with httpx.Client(transport=AppTransport(app), base_url="http://service") as client:
        yield client


@pytest.fixture
def client(app: FastAPI) -> Iterator[Client]:
    """The library's own client of the service."""
    with Client("http://service", attempts=1, transport=AppTransport(app)) as client:
        yield client
