from __future__ import annotations

import signal
import socket
import subprocess
import sys
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING

import pytest

from dear_service import Settings, create_app
from dear_service.cli import _Server
from dear_tune import Client

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from fastapi import FastAPI

COMMAND = [sys.executable, "-m", "dear_tune", "serve"]


def serve(folder: Path, *arguments: str) -> subprocess.Popen[str]:
    """A service as a process of its own, whose database lies in a folder."""
    return subprocess.Popen(
        [*COMMAND, *arguments], cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def ready(service: subprocess.Popen[str]) -> str:
    """The URL that a service prints once it listens."""
    assert service.stdout is not None
    return service.stdout.readline().rpartition(" ")[2].strip()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_service_answers_where_it_says_and_ends_in_peace(tmp_path: Path, number: signal.Signals) -> None:
    """The URL on the first line answers; Ctrl-C or a termination ends with 0 and no word on standard error."""
    with serve(tmp_path, "--port", "0") as service:
        with Client(ready(service)) as client:
            assert list(client.studies()) == []
        service.send_signal(number)
        _, errors = service.communicate()
    assert (service.returncode, errors) == (0, "")
    assert (tmp_path / "dear-tune.db").exists()


def test_a_service_that_cannot_start_is_not_ready(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """A service whose application fails at its start says nothing of being ready."""
    app = create_app(Settings(database_url=f"sqlite:///{tmp_path}/studies.db"))

    @asynccontextmanager
    async def fail(_: FastAPI) -> AsyncIterator[None]:
        raise RuntimeError("no start")
        yield

    app.router.lifespan_context = fail
    with socket.create_server(("127.0.0.1", 0)) as listener, suppress(SystemExit):
        _Server(app, listener).run(sockets=[listener])
    app.state.context.database.close()
    assert "ready" not in capfd.readouterr().out


def test_a_busy_port_is_named(tmp_path: Path) -> None:
    """A service whose port is taken says so in one line and exits with 1."""
    with serve(tmp_path, "--port", "0") as first:
        port = ready(first).rpartition(":")[2]
        with serve(tmp_path, "--port", port) as second:
            _, errors = second.communicate()
        first.terminate()
    assert second.returncode == 1
    assert errors == f"Error: Cannot listen at 127.0.0.1, port {port}: Address already in use.\n"


def test_an_open_address_needs_consent(tmp_path: Path) -> None:
    """Without authentication the service listens beyond this machine only when told that this is wanted."""
    with serve(tmp_path, "--host", "0.0.0.0", "--port", "0") as service:
        _, errors = service.communicate()
    assert service.returncode == 1
    assert "--insecure" in errors
