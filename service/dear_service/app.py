"""The application: settings in, an ASGI application out."""

from __future__ import annotations

from contextlib import asynccontextmanager
from datetime import timedelta
from typing import TYPE_CHECKING

from fastapi import FastAPI

from dear_service import problems, schema
from dear_service.context import Clock, Context, OptimizerFactory, gaussian_process, utc_now
from dear_service.database import Database
from dear_service.routes import health, studies, trials
from dear_tune import __version__

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from dear_service.settings import Settings

__all__ = ["create_app"]


def create_app(
    settings: Settings, *, clock: Clock = utc_now, new_optimizer: OptimizerFactory = gaussian_process
) -> FastAPI:
    """The service, over a database whose schema this call brings to the newest revision.

    Args:
        settings: where the studies are kept, and how long a lease lasts.
        clock: tells the time, in UTC.
        new_optimizer: the tuning method of a study.

    Raises:
        ConfigurationError: the database cannot be used.
    """
    database = Database(settings.database_url)
    schema.upgrade(database)
    app = FastAPI(
        title="dear-tune",
        version=__version__,
        lifespan=_lifespan,
        redirect_slashes=False,
        # The routers' own routes: included ones would be built anew by the first requests, in the midst of threads.
        routes=[route for module in (studies, trials, health) for route in module.router.routes],
    )
    app.state.context = Context(
        database=database, clock=clock, lease=timedelta(seconds=settings.lease_s), new_optimizer=new_optimizer
    )
    problems.install(app)
    return app


@asynccontextmanager
async def _lifespan(app: FastAPI) -> AsyncIterator[None]:
    yield
    app.state.context.database.close()
