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
import time
from typing import Any

import httpx
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
        pipe.send(f"http://127.0.0.1:{listener.getsockname()[1]}")
        uvicorn.Server(uvicorn.Config(app, access_log=False, log_level="warning")).run(sockets=[listener])


async def load(address: str, queries: list[str], expected: dict[str, Any] | None, rate: float, seconds: float) -> Any:
    """Latencies in seconds, errors, and the achieved rate."""
    latencies, errors, total = [], 0, int(rate * seconds)
    limits = httpx.Limits(max_connections=256, max_keepalive_connections=256)
    async with httpx.AsyncClient(base_url=address, limits=limits, timeout=10) as client:
        for _ in range(50):
            try:
                await client.post("/api/labs/findoc-rag", json={"query": "warm up"})
            except httpx.HTTPError:  # not up yet
                await asyncio.sleep(0.1)
        begin = time.perf_counter() + 0.1

        async def one(number: int) -> None:
            nonlocal errors
            query = queries[number % len(queries)]
            try:
                response = await client.post("/api/labs/findoc-rag", json={"query": query})
                latencies.append(time.perf_counter() - begin - number / rate)
                given = response.json()
                given.pop("stages", None)
                errors += response.status_code != 200 or (expected is not None and given != expected[query])
            except httpx.HTTPError:
                errors += 1

        tasks = []
        for number in range(total):
            await asyncio.sleep(max(0.0, begin + number / rate - time.perf_counter()))
            tasks.append(asyncio.create_task(one(number)))
        await asyncio.gather(*tasks)
        took = time.perf_counter() - begin
    at = {f"p{q}_ms": round(1000 * float(np.percentile(latencies, q)), 2) for q in (50, 99)}
    return {"requests": total, "rate": round(len(latencies) / took, 1), **at, "errors": errors}


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
