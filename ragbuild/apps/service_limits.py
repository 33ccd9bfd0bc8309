"""What every request to the service meets before and after its work: checks, limits, one form of error, headers.

Errors are ``{"error": CODE, "message": ...}`` with a 4xx or 503; no trace of the program ever leaves it.
"""

from __future__ import annotations

import asyncio
import re
import threading
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

T = TypeVar("T")
LOOPBACK = frozenset({"localhost", "127.0.0.1", "[::1]"})
HEADERS = {
    "content-security-policy": "default-src 'self'; object-src 'none'; base-uri 'none'; form-action 'self'; "
    "frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-store",
}


def problem(status: int, error: str, message: str, **more: Any) -> JSONResponse:
    """An error as JSON; `more` holds further fields, and ``headers``."""
    headers = HEADERS | (more.pop("headers", None) or {})
    return JSONResponse({"error": error, "message": message, **more}, status, headers)


def busy(error: str, message: str) -> HTTPException:
    """Raised where a request can't be served now and may be tried again."""
    return HTTPException(503, {"error": error, "message": message}, {"Retry-After": "1"})


class Lane:
    """Threads for one kind of work: so many at once, so many more may wait, each so long. Raises 503 beyond."""

    def __init__(self, name: str, threads: int, most: int, timeout_s: float) -> None:
        self._pool, self._timeout = ThreadPoolExecutor(threads, name), timeout_s
        self._places = threading.BoundedSemaphore(most)  # a place is taken until its thread is done, also after a 503

    async def __call__(self, work: Callable[[], T]) -> T:
        if not self._places.acquire(blocking=False):
            raise busy("BUSY", "too many requests at once; try again in a second")
        future = self._pool.submit(work)
        future.add_done_callback(lambda _: self._places.release())
        try:
            return await asyncio.wait_for(asyncio.wrap_future(future), self._timeout)
        except TimeoutError:
            raise busy("TIMEOUT", f"no answer within {self._timeout:g} s") from None


class Guard:
    """ASGI middleware: the Host header, the kind, size and encoding of a body, the time it may take; headers.

    A page elsewhere that makes its own name point here (DNS rebinding) sends that name as Host and is refused; one that
    posts a form can't send JSON without asking first, and no CORS header ever allows it.
    """

    def __init__(
        self, app: ASGIApp, hosts: Collection[str] | None, max_bytes: int = 64 * 1024, body_timeout_s: float = 10
    ) -> None:
        self.app, self.hosts, self.max_bytes, self.timeout = app, hosts, max_bytes, body_timeout_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    headers.setdefault(name, value)
            await send(message)

        refused, body = await self._checked(scope, receive)
        if refused:
            return await refused(scope, receive, send)
        given = iter([{"type": "http.request", "body": body, "more_body": False}])

        async def receive_again() -> Message:
            return next(given, None) or await receive()

        await self.app(scope, receive_again, send_with_headers)

    async def _checked(self, scope: Scope, receive: Receive) -> tuple[JSONResponse | None, bytes]:
        """Why a request is refused, or None; and its body, read once."""
        headers = Headers(scope=scope)
        if self.hosts is not None and _host(headers.get("host", "")) not in self.hosts:
            names = ", ".join(sorted(self.hosts))
            return problem(421, "WRONG_HOST", f"this service answers to {names}, not to that Host header"), b""
        close = {"Connection": "close"}  # what was not read is not taken for the next request
        large = problem(413, "TOO_LARGE", f"a body may have {self.max_bytes:,} bytes at most", headers=close)
        if (length := headers.get("content-length", "0")).isdecimal() and int(length[:20]) > self.max_bytes:
            return large, b""
        kind = headers.get("content-type", "").partition(";")[0].strip().lower()
        if scope["method"] == "POST" and kind != "application/json":
            text = "send the body as Content-Type: application/json"
            return problem(415, "UNSUPPORTED_MEDIA_TYPE", text, headers=close), b""
        body, more = bytearray(), True
        try:
            async with asyncio.timeout(self.timeout):
                while more:
                    message = await receive()
                    body += message.get("body", b"")
                    if len(body) > self.max_bytes:
                        return large, b""
                    more = message.get("more_body", False)
        except TimeoutError:
            return problem(408, "TIMEOUT", "the body did not arrive in time", headers=close), b""
        try:
            body.decode("utf-8")
        except UnicodeDecodeError as error:
            return problem(400, "MALFORMED_JSON", f"the body is not UTF-8 (byte {error.start})"), b""
        if 0 in body:
            return problem(400, "MALFORMED_JSON", f"the body holds a NUL byte (byte {body.index(0)})"), b""
        return None, bytes(body)


def _host(header: str) -> str:
    """The name in a Host header, without its port; empty where it is none."""
    match = re.fullmatch(r"(\[[^\]]*\]|[^:\[\]]*)(?::\d*)?", header)
    return match[1].lower().removesuffix(".") if match else ""
