"""The live page: a handful of addresses, and a stream of documents that grow."""

import asyncio
import html
import json
import socket
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import uvicorn
from fastapi import FastAPI, Query, Request, Response
from fastapi.responses import HTMLResponse, JSONResponse, StreamingResponse

from latecomer.errors import BadInput
from latecomer.study.view.page import SCRIPTS, asset
from latecomer.study.watch.gathering import Gatherer
from latecomer.study.watch.guarding import App, Guard, is_loopback, new_token
from latecomer.study.watch.starting import Starter

POLL_SECONDS = 0.5
PING_SECONDS = 15.0
ASSETS = {"page.css": "text/css", **dict.fromkeys((*SCRIPTS, "live.js"), "text/javascript")}
MOST_LOOKED_AT = 8


def live_app(
    root: Path,
    starter: Starter | None = None,
    token: str | None = None,
    ended: Callable[[], bool] = lambda: False,
) -> App:
    """The page of all runs in `root`; streams end when `ended` says so."""
    starter = starter or Starter()
    gatherer = Gatherer(root, starter.state)

    @asynccontextmanager
    async def life(app: FastAPI) -> AsyncIterator[None]:
        gatherer.start()
        yield
        gatherer.stop()

    app = FastAPI(lifespan=life, docs_url=None, redoc_url=None, openapi_url=None)

    def page() -> Response:
        return HTMLResponse(_page(root))

    def file(name: str) -> Response:
        if name not in ASSETS:
            return Response("not here", status_code=404)
        return Response(asset(name), media_type=ASSETS[name])

    def runs() -> Response:
        return JSONResponse(_listed(gatherer, starter))

    async def stream(run: list[str] = Query(default=[])) -> Response:  # noqa: B008
        known = [name for name in run if gatherer.folder(name)][:MOST_LOOKED_AT]
        return StreamingResponse(
            _events(gatherer, starter, known, ended), media_type="text/event-stream"
        )

    async def act(request: Request) -> Response:
        try:
            asked = json.loads(await request.body())
            folder, wish = gatherer.folder(str(asked["run"])), str(asked["wish"])
        except (ValueError, KeyError, TypeError):
            return JSONResponse({"done": False}, status_code=400)
        acts = {"pause": starter.pause, "continue": starter.go_on, "stop": starter.stop}
        if folder is None or wish not in acts:
            return JSONResponse({"done": False}, status_code=404)
        return JSONResponse({"done": acts[wish](folder)})

    app.add_api_route("/", page, response_model=None)
    app.add_api_route("/assets/{name}", file, response_model=None)
    app.add_api_route("/api/runs", runs, response_model=None)
    app.add_api_route("/api/stream", stream, response_model=None)
    app.add_api_route("/api/act", act, methods=["POST"], response_model=None)
    return Guard(app, token)


async def _events(
    gatherer: Gatherer, starter: Starter, names: Sequence[str], ended: Callable[[], bool]
) -> AsyncIterator[str]:
    """Server-sent events: the list of runs when it changes, a document when there is a new one."""
    gatherer.want(names)
    try:
        told, seen, quiet = "", dict.fromkeys(names, 0), 0.0
        while not ended():
            listed = json.dumps(await asyncio.to_thread(_listed, gatherer, starter))
            if listed != told:
                told = listed
                yield f"event: runs\ndata: {listed}\n\n"
            for name in names:
                version, document = gatherer.document(name)
                if version > seen[name]:
                    seen[name], quiet = version, 0.0
                    named = f'{{"name":{json.dumps(name)},"document":{document}}}'
                    yield f"event: run\ndata: {named}\n\n"
            quiet += POLL_SECONDS
            if quiet >= PING_SECONDS:
                quiet = 0.0
                yield ": still here\n\n"
            await asyncio.sleep(POLL_SECONDS)
    finally:
        gatherer.want(names, -1)


def _listed(gatherer: Gatherer, starter: Starter) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for run in gatherer.states():
        folder = gatherer.folder(run["name"])
        ours = starter.state(folder) if folder else None
        wishes = {
            "running": ["pause", "stop"],
            "paused": ["continue", "stop"],
        }.get(ours or "", [])
        reason = starter.reason(folder) if folder and ours == "failed" else ""
        found.append({**run, "wishes": wishes, "reason": reason})
    return found


def _page(root: Path) -> str:
    scripts = "\n".join(f'<script src="/assets/{name}"></script>' for name in (*SCRIPTS, "live.js"))
    title = html.escape(f"{root.resolve().name} - Latecomer")
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<link rel="icon" href="data:,">
<link rel="stylesheet" href="/assets/page.css"></head><body>
<div id="app" data-title="{html.escape(root.resolve().name)}"><h1>{title}</h1></div>
<noscript><p>The live page needs JavaScript.</p></noscript>
{scripts}
</body></html>
"""


def listening(host: str, port: int | None) -> socket.socket:
    """A socket on this address; without a port the usual one, or any if that is taken."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    for number in (port,) if port is not None else (8787, 0):
        found = socket.socket(family)
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            found.bind((host, number))
            found.listen(64)  # whoever comes before the server is up waits
        except (OSError, OverflowError) as error:
            found.close()
            problem = error
            continue
        return found
    raise BadInput(f"--host {host} --port {port}: cannot listen there: {problem}")


def serve(
    root: Path, starter: Starter, host: str, port: int | None
) -> tuple[Callable[[], None], str]:
    """A server that is ready to run, and the address to open."""
    token = None if is_loopback(host) else new_token()
    place = listening(host, port)
    number = place.getsockname()[1]
    shown = f"[{host}]" if ":" in host else host
    address = f"http://{shown}:{number}/" + (f"?token={token}" if token else "")
    server: uvicorn.Server
    app = live_app(root, starter, token, ended=lambda: server.should_exit)
    config = uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=5, lifespan="on")
    server = uvicorn.Server(config)

    def run() -> None:
        server.run(sockets=[place])

    return run, address
