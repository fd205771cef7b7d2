"""How request bodies are read: bounded in size, and in what a JSON parser can be made to do.

Python's parser refuses integers of more than 4,300 digits, and does not say where they stand. Here an integer too
large for any field becomes a float, which is infinite if need be, and the field it stands in refuses it by name.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from fastapi import HTTPException, Request
from fastapi.routing import APIRoute

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Coroutine

    from fastapi import Response

__all__ = ["MAX_BODY_BYTES", "JsonRoute"]

MAX_BODY_BYTES = 4 * 2**20

_MAX_INTEGER_DIGITS = 18


class JsonRoute(APIRoute):
    """A route whose request body is read as said above."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """The handler that the route would have, given our kind of request."""
        handle = super().get_route_handler()

        async def handle_json(request: Request) -> Response:
            return await handle(_JsonRequest(request.scope, request.receive))

        return handle_json


class _JsonRequest(Request):
    async def stream(self) -> AsyncGenerator[bytes, None]:
        received = 0
        async for chunk in super().stream():
            received += len(chunk)
            if received > MAX_BODY_BYTES:
                raise HTTPException(413, f"A request body has at most {MAX_BODY_BYTES} bytes.")
            yield chunk

    async def json(self) -> Any:
        body = await self.body()
        try:
            return json.loads(body, parse_int=_integer)
        except (ValueError, RecursionError) as error:
            raise HTTPException(400, "The body is not JSON, or nested too deeply.") from error


def _integer(digits: str) -> int | float:
    return int(digits) if len(digits) <= _MAX_INTEGER_DIGITS else float(digits)
