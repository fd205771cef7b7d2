"""The schema's revisions: brought to the newest at start, and asked for by readiness."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from alembic import command
from alembic.config import Config
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from alembic.script.revision import ResolutionError
from alembic.util import CommandError
from sqlalchemy import text
from sqlalchemy.exc import DBAPIError

from dear_tune.errors import ConfigurationError

if TYPE_CHECKING:
    from sqlalchemy import Connection

    from dear_service.database import Database

__all__ = ["VERSION_TABLE", "configuration", "current_revision", "head_revision", "upgrade"]

VERSION_TABLE = "dear_tune_alembic_version"
"""Our own name: another tool's `alembic_version` may live in the same database."""

_ADVISORY_LOCK = 0x64656172  # "dear"


def upgrade(database: Database) -> None:
    """Bring the schema to the newest revision, whatever it is now.

    The whole upgrade is one transaction under a lock, so that services that start at once wait for the first.

    Raises:
        ConfigurationError: the database cannot be reached or written, or a newer dear-tune has upgraded it.
    """
    try:
        with database.write() as session:
            if not database.is_sqlite:  # SQLite's write transaction is such a lock already
                session.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": _ADVISORY_LOCK})
            command.upgrade(configuration(session.connection()), "head")
    except DBAPIError as error:
        raise ConfigurationError(f"The database {database} cannot be used: {_first_line(error)}") from error
    except CommandError as error:
        if not isinstance(error.__cause__, ResolutionError):
            raise
        raise ConfigurationError(f"The database {database} was last used by a newer dear-tune: {error}") from error


def configuration(connection: Connection) -> Config:
    """Alembic's configuration, to run its commands in a connection's transaction."""
    config = Config()
    config.set_main_option("script_location", str(_folder()).replace("%", "%%"))
    config.attributes["connection"] = connection
    return config


def current_revision(connection: Connection) -> str | None:
    """The revision that the database is at; None for an empty one."""
    return MigrationContext.configure(connection, opts={"version_table": VERSION_TABLE}).get_current_revision()


@cache
def head_revision() -> str | None:
    """The newest revision, which this version of the service works with."""
    return ScriptDirectory(str(_folder())).get_current_head()


def _folder() -> Path:
    """The migrations lie inside the installed package; in an editable installation, at the repository's root."""
    package = Path(__file__).parent
    shipped = package / "migrations"
    return shipped if shipped.exists() else package.parents[1] / "migrations"


def _first_line(error: DBAPIError) -> str:
    return str(error.orig).strip().partition("\n")[0]
