"""`ragbuild serve`: extractive QA with its page, and the main pipeline of a workspace, over HTTP on this machine.

``POST /api/labs/findoc-rag`` needs nothing; ``POST /api/ask`` and ``/api/retrieve`` need a workspace. Loopback by
default, no CORS, no outside resource; limits and errors are in `service_limits.py`, the workspace in
`service_pipeline.py`.
"""

from __future__ import annotations

import ipaddress
import logging
import socket
import threading
from collections.abc import AsyncIterator, Callable, Collection
from contextlib import asynccontextmanager, suppress
from http import HTTPStatus
from importlib import resources
from pathlib import Path
from typing import Any

import uvicorn
from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.middleware import Middleware
from pydantic import BaseModel
from pydantic_core import to_json
from starlette.exceptions import HTTPException

from ragbuild.apps.extractive import Ask, Lab, Outcome
from ragbuild.apps.service_limits import LOOPBACK, Guard, Lane, busy, problem
from ragbuild.apps.service_pipeline import Latest, Question, Search
from ragbuild.core.errors import RagbuildError, UsageError
from ragbuild.online.pipeline import Pipeline, trace

LAB = "/api/labs/findoc-rag"
PAGE = {
    "/": ("index.html", "text/html"), "/style.css": ("style.css", "text/css"), "/app.js": ("app.js", "text/javascript"),
    "/icon.svg": ("icon.svg", "image/svg+xml"),
}  # fmt: skip
_log = logging.getLogger("ragbuild.service")


class Problem(BaseModel):
    """Every error: a code, and a sentence that says what to do."""

    error: str
    message: str
    fields: list[str] | None = None


def create_app(
    workspace: Path | Latest | None, lab: Lab, *, hosts: Collection[str] | None = LOOPBACK, most_at_once: int = 256,
    lab_timeout_s: float = 10, timeout_s: float = 60, max_bytes: int = 64 * 1024,
) -> FastAPI:  # fmt: skip
    """The service. `hosts`: the names it answers to, None for any; `most_at_once`: requests that run or wait, for the
    lab and for the workspace each."""
    latest = workspace if isinstance(workspace, Latest | None) else Latest(workspace)
    quick = Lane("lab", 1, most_at_once, lab_timeout_s)  # one thread: the work is short and all Python
    slow = Lane("workspace", latest.threads if latest else 1, most_at_once, timeout_s)

    lab.ask(Ask(query="warm 1"))  # what is made on first use is made now

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        if latest is not None:
            threading.Thread(target=_warm, args=(latest,), daemon=True).start()
        yield

    app = FastAPI(
        title="ragbuild", summary="Quotes from financial disclosures, and questions to a workspace", docs_url=None,
        redoc_url=None, lifespan=lifespan, middleware=[Middleware(Guard, hosts=hosts, max_bytes=max_bytes)],
        responses={
            code: {"model": Problem, "description": f"refused: {HTTPStatus(code).phrase}"}
            for code in (400, 408, 413, 415, 421, 422, 503)
        },
    )  # fmt: skip
    for kind in (RequestValidationError, HTTPException, UsageError, RagbuildError, Exception):
        app.add_exception_handler(kind, _told)

    @app.post(LAB, response_model=Outcome)
    async def ask_lab(asked: Ask) -> Response:
        """The best chunk word for word, or none."""
        return _json(await quick(lambda: to_json(lab.ask(asked))))

    about = {
        "name": "findoc-rag", "indexVersion": lab.index_version, "chunks": len(lab.passages),
        "minimumConfidence": Ask.model_fields["minimumConfidence"].default, "minimumMargin": lab.minimum_margin,
        **lab.components(),
    }  # fmt: skip
    schema = {"request": Ask.model_json_schema(), "response": Outcome.model_json_schema(mode="serialization")}
    lists = {"": about, "/schema": schema, "/presets": lab.presets()}
    for path, data in lists.items():
        app.get(LAB + path, response_model=type(data), name=f"lab{path}")(_constant(to_json(data), "application/json"))

    def on_workspace(work: Callable[[Pipeline], Any]) -> Callable[[], bytes]:
        if latest is None:
            raise HTTPException(503, {
                "error": "NO_WORKSPACE",
                "message": "this service has no workspace to search; start it with ragbuild serve --workspace DIR",
            })  # fmt: skip
        return lambda: to_json(work(latest()), inf_nan_mode="null")

    @app.post("/api/ask", response_model=dict[str, Any])
    async def ask(asked: Question) -> Response:
        """An answer with citations, or that the documents don't answer it."""

        def work(pipeline: Pipeline) -> Any:
            return pipeline.ask(asked.query, asked.where).model_dump(mode="json", exclude={"parents"})

        return _json(await slow(on_workspace(work)))

    @app.post("/api/retrieve", response_model=dict[str, Any])
    async def retrieve(asked: Search) -> Response:
        """The chunks that are found, with their ranks."""

        def work(pipeline: Pipeline) -> Any:
            found = pipeline.retrieve(asked.query, asked.where)
            hits = [
                {**c.hit.model_dump(), "rerank_score": c.score, "chunk": c.chunk.model_dump(mode="json")}
                for c in found.ranked[: asked.top]
            ]
            return {
                "query": asked.query, "hits": hits, "warnings": found.warnings, "trace": trace(found, pipeline),
            }  # fmt: skip

        return _json(await slow(on_workspace(work)))

    @app.get("/healthz")
    async def healthz() -> dict[str, str]:
        """The service runs."""
        return {"status": "ok"}

    @app.get("/readyz")
    async def readyz() -> dict[str, str | None]:
        """The service can answer: with a workspace, once its index and model are loaded."""
        if latest is not None and latest.name is None:
            raise busy("NOT_READY", "the workspace is being opened; where it stays so, the service's log says why")
        return {"status": "ready", "lab": lab.index_version, "workspace": latest.name if latest else None}

    for path, (name, media) in PAGE.items():
        content = (resources.files("ragbuild") / "apps" / "page" / name).read_bytes()
        app.get(path, include_in_schema=False)(_constant(content, media))
    return app


def _constant(content: bytes, media: str) -> Callable[[], Any]:
    async def give() -> Response:
        return Response(content, media_type=media)

    return give


def _json(content: bytes) -> Response:
    return Response(content, media_type="application/json")


def _warm(latest: Latest) -> None:
    try:
        latest()
    except Exception as error:
        _log.warning("the workspace can't be opened: %s", error)


async def _told(request: Request, error: Exception) -> Response:
    """Any error as JSON. What is not the request's fault is told to the log and not to the client."""
    if isinstance(error, RequestValidationError):
        return _invalid(error)
    if isinstance(error, HTTPException):
        told = error.detail
        if not isinstance(told, dict):
            code = "MALFORMED_JSON" if error.status_code == 400 else HTTPStatus(error.status_code).name
            told = {"error": code, "message": str(told)}
        return problem(error.status_code, told["error"], told["message"], headers=error.headers)
    if isinstance(error, UsageError):
        return problem(422, "INVALID", str(error))
    if isinstance(error, RagbuildError):
        _log.warning("%s: %s", request.url.path, error)
        return problem(503, "UNAVAILABLE", "the workspace can't answer now; the service's log says why")
    return problem(500, "INTERNAL", "the service failed; its log says why")


def _invalid(error: RequestValidationError) -> Response:
    """What is wrong with a body, with the names of the fields. Names are shortened, and may hold no half of a pair."""
    first, told, fields = error.errors()[0], [], []
    if first["type"] == "json_invalid":
        return problem(400, "MALFORMED_JSON", f"the body is not valid JSON: {first['ctx']['error']}")
    for each in error.errors()[:20]:
        name = ".".join(map(str, each["loc"][1:]))[:100].encode("utf-8", "replace").decode() or "body"
        unknown = each["type"] == "extra_forbidden"
        told.append(f"unknown field '{name}'" if unknown else f"{name}: {each['msg']}")
        fields.append(name)
    code = "UNKNOWN_FIELD" if any(e["type"] == "extra_forbidden" for e in error.errors()) else "INVALID"
    return problem(422, code, "; ".join(told), fields=fields)


def is_loopback(host: str) -> bool:
    """Does this address reach this machine only?"""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def prepared(
    host: str, port: int, *, lab: Lab, workspace: Path | Latest | None = None, allow_remote: bool = False
) -> tuple[uvicorn.Server, socket.socket, str]:
    """The server, the socket it will listen on, and its address. `port` 0: any free one.

    Raises UsageError for an address that is not loopback without `allow_remote`, or that can't be used.
    """
    local = is_loopback(host)
    if not local and not allow_remote:
        raise UsageError(
            f"{host} can be reached from other machines, and the service asks nobody who they are; "
            "use 127.0.0.1, or say --allow-remote"
        )
    app = create_app(workspace, lab, hosts=LOOPBACK | {_shown(host)} if local else None)
    try:
        listener = socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except OSError as error:
        raise UsageError(f"{host} port {port} can't be used ({error.strerror}); give another with --port") from None
    # asyncio does so only for sockets that name their protocol; else head and body wait 40 ms for each other
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    config = uvicorn.Config(
        app, access_log=False, server_header=False, ws="none", limit_concurrency=1000, timeout_graceful_shutdown=5,
        log_level="warning",
    )  # fmt: skip
    return uvicorn.Server(config), listener, f"http://{_shown(host)}:{listener.getsockname()[1]}"


def serve(host: str = "127.0.0.1", port: int = 8000, *, on_ready: Callable[[str], None] = print, **how: Any) -> None:
    """Serve until Ctrl-C or SIGTERM; `on_ready` is given the address; for `how` and what is raised see `prepared`."""
    server, listener, address = prepared(host, port, **how)
    with listener, suppress(KeyboardInterrupt):  # uvicorn hands on the signal that ended it
        on_ready(address)
        server.run(sockets=[listener])


def _shown(host: str) -> str:
    return f"[{host}]" if ":" in host else host
