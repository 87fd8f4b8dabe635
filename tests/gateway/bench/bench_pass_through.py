"""A tiny gateway for tests, run as a program: it sends on what it gets, or breaks in the way it is told to."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

import aiohttp
from aiohttp import web

parser = argparse.ArgumentParser()
parser.add_argument("--port", type=int, required=True)
parser.add_argument("--upstream", required=True)
parser.add_argument("--pid", type=Path, help="file for its process id")
parser.add_argument("--never-ready", action="store_true")
parser.add_argument("--fails", action="store_true", help="ends at once, with a word on why")
parser.add_argument("--refuses-from", type=int, default=10**9, help="HTTP 500 from the n-th request on")
parser.add_argument("--refuses-streams", action="store_true")
parser.add_argument("--drops-word", action="store_true", help="leaves one word of each stream out")
parser.add_argument("--cuts-streams", action="store_true", help="leaves out [DONE]")
parser.add_argument("--ends-at", type=int, default=10**9, help="ends without a word at the n-th request")
parser.add_argument("--own", action="store_true", help="counts and records as this project's gateway does")
parser.add_argument("--miscounts", action="store_true")
options = parser.parse_args()
state = {"seen": 0, "answered": 0}


async def chat(request: web.Request) -> web.StreamResponse:
    state["seen"] += 1
    body = await request.read()
    is_stream = b'"stream":true' in body
    if state["seen"] >= options.ends_at:
        os._exit(3)
    if state["seen"] >= options.refuses_from or (is_stream and options.refuses_streams):
        return web.json_response({"error": {"message": "out of order"}}, status=500)
    async with (
        aiohttp.ClientSession() as session,
        session.post(f"{options.upstream}/v1/chat/completions", data=body) as answer,
    ):
        content = await answer.read()
    if is_stream and options.drops_word:
        content = content.replace(b"word ", b"", 1)
    if is_stream and options.cuts_streams:
        content = content.replace(b"data: [DONE]\n\n", b"")
    state["answered"] += 1
    kind = "text/event-stream" if is_stream else "application/json"
    return web.Response(body=content, content_type=kind, headers={"X-Request-Id": "req-1"})


async def health(_: web.Request) -> web.Response:
    return web.Response(status=503 if options.never_ready else 200)


async def metrics(_: web.Request) -> web.Response:
    counted = state["answered"] // 2 if options.miscounts else state["answered"]
    bucket = 'kvgate_event_loop_lag_seconds_bucket{le="%s"} %d\n'
    lag = bucket % ("0.01", counted * 100) + bucket % ("+Inf", counted * 100)
    return web.Response(text=f'kvgate_requests_total{{outcome="ok"}} {counted}.0\n{lag}')


async def record(request: web.Request) -> web.Response:
    return web.json_response({"id": request.match_info["id"]}, status=200 if options.own else 404)


if options.fails:
    sys.exit("no upstream for me")
if options.pid:
    options.pid.write_text(str(os.getpid()))
app = web.Application()
app.add_routes(
    [
        web.post("/v1/chat/completions", chat),
        web.get("/health", health),
        web.get("/metrics", metrics),
        web.get("/v1/requests/{id}", record),
    ]
)
web.run_app(app, host="127.0.0.1", port=options.port, print=None, access_log=None)
