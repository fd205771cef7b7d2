"""Where studies are kept: SQLite in a file, or PostgreSQL, behind one way to read and one way to write.

A write transaction holds SQLite's write lock from its first statement (`BEGIN IMMEDIATE`): one that started as a
reader could not be upgraded once another had written, and would fail with "database is locked" however long it waits.
A read transaction sees one state of the database from its first statement to its last, on both databases.
"""

from __future__ import annotations

import sqlite3
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sqlalchemy import URL, create_engine, event, make_url
from sqlalchemy.exc import ArgumentError
from sqlalchemy.orm import Session

from dear_tune.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from sqlalchemy import Connection

__all__ = ["Database"]

_BUSY_TIMEOUT_S = 30
_SWITCH_PAUSE_S = 0.01
_CONNECT_TIMEOUT_S = 5
_WRITES = "dear_tune_writes"


class Database:
    """A database that may not be reachable yet: nothing is opened before the first transaction.

    Args:
        url: `sqlite:///file.db` or `postgresql://user:password@host/name`.

    Raises:
        ConfigurationError: the URL is not of a database that the service can use.
    """

    def __init__(self, url: str) -> None:
        self.url = _understood(url)
        pool: dict[str, Any] = {"pool_size": 5, "max_overflow": 15, "pool_timeout": 10}
        if self.is_sqlite:
            self.engine = create_engine(self.url, connect_args={"timeout": _BUSY_TIMEOUT_S}, **pool)
            event.listen(self.engine, "connect", _prepare_sqlite)
            event.listen(self.engine, "begin", _begin_sqlite)
            self._reader = self.engine
        else:
            connect_args = {"connect_timeout": _CONNECT_TIMEOUT_S}
            self.engine = create_engine(self.url, pool_pre_ping=True, connect_args=connect_args, **pool)
            self._reader = self.engine.execution_options(isolation_level="REPEATABLE READ", postgresql_readonly=True)
        self._writer = self.engine.execution_options(**{_WRITES: True})

    def __str__(self) -> str:
        return self.url.render_as_string(hide_password=True)

    @property
    def is_sqlite(self) -> bool:
        """Whether it is a file of this machine."""
        return self.url.get_backend_name() == "sqlite"

    @property
    def is_lost(self) -> bool:
        """Whether its file was removed: SQLite's open connections would go on with a file that nobody finds again."""
        return self.is_sqlite and not Path(str(self.url.database)).exists()

    @contextmanager
    def read(self) -> Iterator[Session]:
        """A transaction that only reads."""
        with Session(self._reader, expire_on_commit=False) as session, session.begin():
            yield session

    @contextmanager
    def write(self) -> Iterator[Session]:
        """A transaction that may write: committed at the end of the block, undone by an exception."""
        with Session(self._writer, expire_on_commit=False) as session, session.begin():
            yield session

    def close(self) -> None:
        """Close all connections."""
        self.engine.dispose()


def _understood(text: str) -> URL:
    try:
        url = make_url(text)
    except (ArgumentError, ValueError) as error:  # the latter for a port that is no number
        raise ConfigurationError(
            "The database URL is not understood. It looks like sqlite:///file.db, "
            "or like postgresql://user:password@host/name."
        ) from error
    if url.drivername in {"postgresql", "postgres", "postgresql+psycopg"}:
        return url.set(drivername="postgresql+psycopg")
    if url.drivername != "sqlite":
        raise ConfigurationError(f"The service keeps its studies in sqlite or postgresql, not in {url.drivername}.")
    if url.database in {None, "", ":memory:"}:
        raise ConfigurationError("SQLite needs a file, such as sqlite:///dear-tune.db: memory would forget the trials.")
    if url.host or url.query:
        raise ConfigurationError(
            "SQLite takes a file and nothing else: sqlite:///file.db, or sqlite:////a/whole/path.db."
        )
    return url


def _prepare_sqlite(connection: sqlite3.Connection, _: object) -> None:
    connection.isolation_level = None  # the driver would begin transactions by itself, and only before some statements
    _switch_to_wal(connection)
    connection.execute("PRAGMA foreign_keys = ON")


def _switch_to_wal(connection: sqlite3.Connection) -> None:
    """Let readers and a writer work side by side; the file keeps that once one connection has asked for it.

    Of connections that ask at once SQLite turns one away without its busy timeout, which it keeps to everywhere else.
    """
    deadline = time.monotonic() + _BUSY_TIMEOUT_S
    while True:
        try:
            connection.execute("PRAGMA journal_mode = WAL")
        except sqlite3.OperationalError as error:  # noqa: PERF203 # once a connection
            if "locked" not in str(error) or time.monotonic() > deadline:
                raise
            time.sleep(_SWITCH_PAUSE_S)
        else:
            return


def _begin_sqlite(connection: Connection) -> None:
    writes = connection.get_execution_options().get(_WRITES, False)
    connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")
