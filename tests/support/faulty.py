"""A tuning service on a real socket that can be away, broken, something else, or late."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import httpx

from dear_tune.testing import FakeService

LATE_S = 60.0


class FaultyServer:
    """`FakeService`, served on a loopback port that stays the same.

    Attributes:
        service: what answers; its `status` and `garbage` are faults too.
        waiting: how many requests wait for an answer.
    """

    def __init__(self, service: FakeService) -> None:
        self.service = service
        self.waiting = 0
        self._lock = threading.Lock()
        self._prompt = threading.Event()
        self._prompt.set()
        with ThreadingHTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler) as probe:
            self._address = ("127.0.0.1", probe.server_address[1])

    @property
    def url(self) -> str:
        """Where it listens when it does."""
        return f"http://127.0.0.1:{self._address[1]}"

    @contextmanager
    def listening(self) -> Iterator[None]:
        """It can be reached inside; outside connections are refused."""
        with ThreadingHTTPServer(self._address, self._handler()) as server:
            thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
            thread.start()
            try:
                yield
            finally:
                server.shutdown()
                thread.join()

    @contextmanager
    def late(self) -> Iterator[None]:
        """Answers take 60 s inside, or until it ends."""
        self._prompt.clear()
        try:
            yield
        finally:
            self._prompt.set()

    def _answer(self, request: httpx.Request) -> httpx.Response:
        with self._lock:
            self.waiting += 1
        self._prompt.wait(LATE_S)
        with self._lock:
            self.waiting -= 1
            return self.service.handle_request(request)

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        faulty = self

        class Handler(BaseHTTPRequestHandler):
            def _do(self) -> None:
                body = self.rfile.read(int(self.headers.get("content-length", 0)))
                response = faulty._answer(httpx.Request(self.command, faulty.url + self.path, content=body))
                self.send_response(response.status_code)
                for name, value in response.headers.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(response.content)

            do_GET = do_POST = _do  # noqa: N815 # the names that http.server looks for

            def log_message(self, *_: object) -> None:
                """Say nothing."""

        return Handler
