"""A real `dear-tune serve` process."""

from __future__ import annotations

import subprocess
import sys
from types import TracebackType


class Server:
    """A server on a free loopback port; started again it listens on the same one."""

    def __init__(self, database_url: str) -> None:
        self._database_url = database_url
        self._port = 0
        self._process: subprocess.Popen[str] | None = None

    @property
    def url(self) -> str:
        """Where it listens."""
        return f"http://127.0.0.1:{self._port}"

    def __enter__(self) -> Server:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()

    def start(self) -> None:
        """Start it, and wait until it answers."""
        self._process = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "dear_tune",
                "serve",
                "--port",
                str(self._port),
                "--database-url",
                self._database_url,
            ],
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._process.stdout is not None
        ready = self._process.stdout.readline()
        assert "service ready at" in ready, ready
        self._port = int(ready.rpartition(":")[2])

    def kill(self) -> None:
        """End it as a crash would."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            assert self._process.stdout is not None
            self._process.stdout.close()
            self._process = None
