"""Alembic's environment: runs the revisions in the transaction that the service opened, never in one of its own."""

from __future__ import annotations

from alembic import context

from dear_service.models import Base
from dear_service.schema import VERSION_TABLE


def _run() -> None:
    connection = context.config.attributes["connection"]
    context.configure(
        connection=connection,
        target_metadata=Base.metadata,
        version_table=VERSION_TABLE,
        render_as_batch=connection.dialect.name == "sqlite",  # SQLite alters a table by copying it
    )
    with context.begin_transaction():
        context.run_migrations()


_run()
