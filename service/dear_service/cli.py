"""`dear-tune serve`: the service as one process."""

from __future__ import annotations

import ipaddress
import signal
import socket
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer
import uvicorn
from pydantic import ValidationError

from dear_service.app import create_app
from dear_service.settings import Settings
from dear_tune.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import FrameType

    from fastapi import FastAPI

__all__ = ["serve"]

_END = (signal.SIGINT, signal.SIGTERM)
_SHUTDOWN_S = 5
_BACKLOG = 2048


def serve(
    host: Annotated[str | None, typer.Option(help="Address to listen at.", show_default="127.0.0.1")] = None,
    port: Annotated[int | None, typer.Option(help="Port to listen at; 0: a free one.", show_default="8000")] = None,
    database_url: Annotated[
        str | None,
        typer.Option(
            help="Where to keep studies: sqlite:///file.db, or postgresql://user:password@host/name.",
            show_default="sqlite:///dear-tune.db",
        ),
    ] = None,
    insecure: Annotated[
        bool, typer.Option("--insecure", help="Listen also where other machines can reach it.")
    ] = False,
) -> None:
    """Run the tuning service until Ctrl-C. Options not given come from DEAR_TUNE_SERVICE_* variables."""
    for number in _END:
        signal.signal(number, _exit)
    settings = _settings(host=host, port=port, database_url=database_url)
    _check_exposure(settings.host, insecure=insecure)
    listener = _listen(settings.host, settings.port)
    app = create_app(settings)
    server = _Server(app, listener)
    server.run(sockets=[listener])
    if not server.started:
        raise typer.Exit(1)


class _Server(uvicorn.Server):
    """A server that says so once it answers."""

    def __init__(self, app: FastAPI, listener: socket.socket) -> None:
        super().__init__(
            uvicorn.Config(app, log_level="warning", access_log=False, timeout_graceful_shutdown=_SHUTDOWN_S)
        )
        self._url = _url(listener)
        self._database = app.state.context.database

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Signals shut the server down, and end there: passed on, they would make a wanted end look like a crash."""
        for number in _END:
            signal.signal(number, self.handle_exit)
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if not self.started:
            return
        print(f"dear-tune service ready at {self._url}", flush=True)
        print(f"  studies and trials are kept in {self._database}")
        print(f"  look:   curl {self._url}/v1/studies")
        print(f"  train:  DEAR_TUNE_URL={self._url}, and dear_engine.DistributedOptimizer in your script", flush=True)


def _exit(_number: int, _frame: FrameType | None) -> NoReturn:
    """Until the server runs there is nothing to close."""
    raise SystemExit(0)


def _settings(**given: Any) -> Settings:
    try:
        return Settings(**{name: value for name, value in given.items() if value is not None})
    except ValidationError as error:
        wrong = "; ".join(
            ": ".join([*map(str, each["loc"]), each["msg"].removeprefix("Value error, ")]) for each in error.errors()
        )
        raise ConfigurationError(wrong) from error


def _check_exposure(host: str, *, insecure: bool) -> None:
    if not insecure and not _is_loopback(host):
        raise ConfigurationError(
            f"{host} can be reached by other machines, and the service asks nobody who they are. "
            "If your network is trusted, add --insecure."
        )


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _listen(host: str, port: int) -> socket.socket:
    """A listening socket, opened here so that a busy port is found before anything is printed or migrated."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        return socket.create_server(address, family=family, backlog=_BACKLOG)
    except OSError as error:
        reason = str(error.strerror).partition(" (")[0]  # the rest repeats the address
        raise ConfigurationError(f"Cannot listen at {host}, port {port}: {reason}.") from error


def _url(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
