"""The web server of the live page: HTML, assets, list of runs, document stream, run control."""

import asyncio
import html
import json
import secrets
import socket
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import uvicorn
from fastapi import FastAPI, Query, Request, Response
from fastapi.responses import HTMLResponse, JSONResponse, StreamingResponse
from starlette.types import ASGIApp

from latecomer.errors import BadInput
from latecomer.study.view.page import SCRIPTS, asset
from latecomer.study.watch.access import AccessControl, is_loopback
from latecomer.study.watch.run_documents import RunDocuments
from latecomer.study.watch.run_processes import RunProcesses

POLL_SECONDS = 0.5
PING_SECONDS = 15.0
ASSETS = {"page.css": "text/css", **dict.fromkeys((*SCRIPTS, "live.js"), "text/javascript")}
MAX_STREAMED_RUNS = 8
MAX_BODY = 10_000  # bytes of a request


def live_app(
    root: Path,
    processes: RunProcesses | None = None,
    token: str | None = None,
    ended: Callable[[], bool] = lambda: False,
) -> ASGIApp:
    """The live page of all runs in `root`; streams end when `ended()` is true."""
    processes = processes or RunProcesses()
    documents = RunDocuments(root)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        documents.start()
        yield
        documents.stop()

    app = FastAPI(lifespan=lifespan, docs_url=None, redoc_url=None, openapi_url=None)

    def page() -> Response:
        return HTMLResponse(_page(root))

    def file(name: str) -> Response:
        if name not in ASSETS:
            return Response("not found", status_code=404)
        return Response(asset(name), media_type=ASSETS[name])

    def runs() -> Response:
        return JSONResponse(_listed(documents, processes))

    async def stream(run: list[str] = Query(default=[])) -> Response:  # noqa: B008
        known = [name for name in run if documents.folder(name)][:MAX_STREAMED_RUNS]
        return StreamingResponse(
            events(documents, processes, known, ended), media_type="text/event-stream"
        )

    async def act(request: Request) -> Response:
        text = b""
        async for part in request.stream():
            text += part
            if len(text) > MAX_BODY:
                return JSONResponse({"done": False}, status_code=413)
        try:
            body = json.loads(text)
            folder, action = documents.folder(str(body["run"])), str(body["action"])
        except (ValueError, KeyError, TypeError, RecursionError):
            return JSONResponse({"done": False}, status_code=400)
        actions = {"pause": processes.pause, "continue": processes.resume, "stop": processes.stop}
        if folder is None or action not in actions:
            return JSONResponse({"done": False}, status_code=404)
        return JSONResponse({"done": actions[action](folder)})

    app.add_api_route("/", page, response_model=None)
    app.add_api_route("/assets/{name}", file, response_model=None)
    app.add_api_route("/api/runs", runs, response_model=None)
    app.add_api_route("/api/stream", stream, response_model=None)
    app.add_api_route("/api/act", act, methods=["POST"], response_model=None)
    return AccessControl(app, token)


async def events(
    documents: RunDocuments,
    processes: RunProcesses,
    names: Sequence[str],
    ended: Callable[[], bool],
) -> AsyncIterator[str]:
    """Server-sent events: the list of runs when it changes, each new document of `names`."""
    documents.add_viewers(names)
    try:
        last_listed, seen, silent = "", dict.fromkeys(names, 0), 0.0
        while not ended():
            listed = json.dumps(await asyncio.to_thread(_listed, documents, processes))
            if listed != last_listed:
                last_listed = listed
                yield f"event: runs\ndata: {listed}\n\n"
            for name in names:
                version, document = documents.document(name)
                if version > seen[name]:
                    seen[name], silent = version, 0.0
                    named = f'{{"name":{json.dumps(name)},"document":{document}}}'
                    yield f"event: run\ndata: {named}\n\n"
            silent += POLL_SECONDS
            if silent >= PING_SECONDS:
                silent = 0.0
                yield ": ping\n\n"
            await asyncio.sleep(POLL_SECONDS)
    finally:
        documents.add_viewers(names, -1)


def _listed(documents: RunDocuments, processes: RunProcesses) -> list[dict[str, Any]]:
    """Name and state of every run; of runs started here also the possible actions."""
    found: list[dict[str, Any]] = []
    for run in documents.runs():
        state = processes.state(run.folder)
        actions = {"running": ["pause", "stop"], "paused": ["continue", "stop"]}.get(state or "")
        reason = processes.reason(run.folder) if state == "failed" else ""
        shown = {"name": run.name, "state": state or run.state()}
        found.append({**shown, "actions": actions or [], "reason": reason})
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
    """A socket on this address; without a port 8787, or a free one if that is taken."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    for number in (port,) if port is not None else (8787, 0):
        found = socket.socket(family)
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            found.bind((host, number))
            found.listen(64)  # connections wait until the server runs
        except (OSError, OverflowError) as error:
            found.close()
            problem = error
            continue
        return found
    raise BadInput(f"--host {host} --port {port}: cannot listen: {problem}")


def serve(
    root: Path, processes: RunProcesses, host: str, port: int | None
) -> tuple[Callable[[], None], str]:
    """A function that runs the server, and the address to open in a browser."""
    token = None if is_loopback(host) else secrets.token_urlsafe(24)
    place = listening(host, port)
    number = place.getsockname()[1]
    shown = f"[{host}]" if ":" in host else host
    address = f"http://{shown}:{number}/" + (f"?token={token}" if token else "")
    server: uvicorn.Server
    app = live_app(root, processes, token, ended=lambda: server.should_exit)
    config = uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=5, lifespan="on")
    server = uvicorn.Server(config)

    def run() -> None:
        server.run(sockets=[place])

    return run, address
