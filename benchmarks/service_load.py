"""The service under load: 200 requests a second for 15 s on loopback, beside a bare FastAPI route in the same run.

    python benchmarks/service_load.py [--rate 200] [--seconds 15] [--chunks 14] [--json]

Open loop: requests start when they are due, whether or not former ones have been answered, and a latency counts from
when the request was due, so that waiting in line is not left out. Each server is a process of its own (uvicorn, as
`ragbuild serve` runs it); the bare route returns a constant of the same size. Questions are those of data/findoc, all
kinds; every response is compared with what the lab answers when it is asked alone.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import socket
from collections import deque
from typing import Any

import numpy as np

from ragbuild.apps.extractive import Ask, Lab
from ragbuild.core.store import read_json, repository

FINDOC = repository() / "data" / "findoc"


def lab_of(chunks: int) -> Lab:
    return Lab(Lab.load(FINDOC).passages[:chunks])


def run_service(chunks: int, pipe: Any) -> None:
    from ragbuild.apps.service import serve

    serve(port=0, lab=lab_of(chunks), on_ready=pipe.send)


def run_bare(constant: bytes, pipe: Any) -> None:
    import uvicorn
    from fastapi import FastAPI, Response

    app = FastAPI()

    @app.post("/api/labs/findoc-rag")
    async def bare() -> Response:
        return Response(constant, media_type="application/json")

    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # as uvicorn has it when it opens the port
        pipe.send(f"http://127.0.0.1:{listener.getsockname()[1]}")
        uvicorn.Server(uvicorn.Config(app, access_log=False, log_level="warning")).run(sockets=[listener])


class Connections:
    """Kept-alive connections that speak the little HTTP that is needed: a client library would cost more than the
    service and be measured in its place."""

    def __init__(self, address: str) -> None:
        self._host, self._port = address.removeprefix("http://").split(":")
        self._idle: deque[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = (
            deque()
        )  # in turn: none idles until closed

    def request(self, query: str) -> bytes:
        body = json.dumps({"query": query}).encode()
        head = f"POST /api/labs/findoc-rag HTTP/1.1\r\nHost: {self._host}\r\nContent-Type: application/json\r\n"
        return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body

    async def send(self, request: bytes) -> tuple[int, bytes]:
        """Status and body."""
        reader, writer = self._idle.popleft() if self._idle else await asyncio.open_connection(self._host, self._port)
        writer.write(request)
        head = await reader.readuntil(b"\r\n\r\n")
        body = await reader.readexactly(int(head.lower().partition(b"content-length:")[2].split(b"\r\n")[0]))
        self._idle.append((reader, writer))
        return int(head.split(b" ", 2)[1]), body


async def load(address: str, queries: list[str], expected: dict[str, Any] | None, rate: float, seconds: float) -> Any:
    """Latencies, errors (no or another answer), and the achieved rate."""
    pool, loop, total = Connections(address), asyncio.get_running_loop(), int(rate * seconds)
    requests = [pool.request(query) for query in queries]
    await asyncio.gather(*(pool.send(requests[n]) for n in range(8)))
    answers: list[tuple[int, int, bytes]] = []
    latencies: list[float] = []
    begin = loop.time() + 0.1

    async def one(number: int) -> None:
        status, body = await pool.send(requests[number % len(requests)])
        latencies.append(loop.time() - begin - number / rate)
        answers.append((number, status, body))

    tasks = []
    for number in range(total):
        await asyncio.sleep(max(0.0, begin + number / rate - loop.time()))
        tasks.append(asyncio.create_task(one(number)))
    failed = sum(isinstance(r, BaseException) for r in await asyncio.gather(*tasks, return_exceptions=True))
    took = loop.time() - begin
    for number, status, body in answers:  # compared afterwards: it would take the time of the load
        given = json.loads(body)
        given.pop("stages", None)
        failed += status != 200 or (expected is not None and given != expected[queries[number % len(queries)]])
    at = {f"p{q}_ms": round(1000 * float(np.percentile(latencies, q)), 2) for q in (50, 99)}
    return {"requests": total, "rate": round(len(latencies) / took, 1), **at, "errors": failed}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate", type=float, default=200)
    parser.add_argument("--seconds", type=float, default=15)
    parser.add_argument("--chunks", type=int, default=14)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    lab = lab_of(args.chunks)
    queries = [q["query"] for q in read_json(FINDOC / "questions.json")]
    expected = {q: json.loads(lab.ask(Ask(query=q)).model_dump_json(exclude={"stages"})) for q in queries}
    constant = lab.ask(Ask(query=queries[0])).model_dump_json().encode()
    context, out = multiprocessing.get_context("spawn"), {}
    for name, target, given, told in (
        ("bare route", run_bare, constant, None), ("service", run_service, args.chunks, expected),
    ):  # fmt: skip
        here, there = context.Pipe()
        process = context.Process(target=target, args=(given, there), daemon=True)
        process.start()
        try:
            out[name] = asyncio.run(load(here.recv(), queries, told, args.rate, args.seconds))
        finally:
            process.terminate()
            process.join(10)
    out["p99 ratio"] = round(out["service"]["p99_ms"] / out["bare route"]["p99_ms"], 2)
    if args.json:
        print(json.dumps(out, indent=1))
        return
    print(f"{args.rate:g} requests a second for {args.seconds:g} s, {args.chunks} chunks, {len(queries)} questions")
    for name in ("bare route", "service"):
        row = out[name]
        print(
            f"{name:12} {row['rate']:7.1f}/s   p50 {row['p50_ms']:7.2f} ms   p99 {row['p99_ms']:7.2f} ms   "
            f"errors {row['errors']}"
        )
    print(f"p99 is {out['p99 ratio']} times that of the bare route; target: p99 under 50 ms, no error")


if __name__ == "__main__":
    main()
