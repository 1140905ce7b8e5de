"""`latecomer deploy up`, `status` and `down`."""

import contextlib
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from latecomer.deploy.folders import PIDS, check_folder, find_folder, new_folder
from latecomer.deploy.guard import belonging_to
from latecomer.deploy.local import LocalFederation, RunWatch, app_config
from latecomer.deploy.node import Value
from latecomer.deploy.pids import SUPERVISOR, PidFile
from latecomer.deploy.processes import end
from latecomer.deploy.progress import Progress, RunReader
from latecomer.errors import BadInput, RunFailed, did_you_mean

LINE_EVERY_SECONDS = 2.0
DOWN_TIMEOUT = 30.0

Say = Callable[[str], None]


def up(
    app: Path,
    devices: int,
    folder: Path | None,
    tls: bool,
    warm: bool,
    slowest: float,
    settings: list[str],
    say: Say,
) -> None:
    """Make a federation, run the app on it, show how it goes, and end everything."""
    config = parse_settings(settings, app_config(app.resolve()))
    folder = new_folder(app.resolve().name) if folder is None else folder
    check_folder(folder)
    began = time.monotonic()

    def told(text: str) -> None:
        say(f"{time.monotonic() - began:6.1f} s  {text}")

    with _signals_interrupt(), LocalFederation(app, devices, folder, tls, warm, slowest) as fed:
        how = ("TLS and node keys" if tls else "no TLS") + (", warm nodes" if fed.warm else "")
        told(f"starting a SuperLink and {_nodes(devices)} on loopback ({how}); files in {folder}")
        fed.start()
        told(f"the SuperLink at {fed.address} has {_nodes(devices)}")
        run = fed.run(config)
        told(f"run {run} started")
        status, last = _follow(fed, run, told)
        if status != "finished:completed":
            raise RunFailed(f"{_why(fed, status)}; logs in {folder / 'logs'}")
        for line in summary(last, time.monotonic() - began):
            say(line)
    say(f"results: {folder / 'run'}" if last.updates else f"files:   {folder}")


def _follow(fed: LocalFederation, run: int, told: Say) -> tuple[str, Progress]:
    """Show a line whenever something has changed, until the run has finished."""
    watch, reader = RunWatch(fed, run), RunReader(fed.run_folder)
    said, due, reason = "", 0.0, ""
    while True:
        status = watch.ended()
        there = sum(node.has_joined() for node in fed.nodes)
        progress = reader.read()
        line = f"{progress.line()}, {there}/{len(fed.nodes)} nodes"
        if line != said and (status or time.monotonic() >= due):
            told(line)
            said, due = line, time.monotonic() + LINE_EVERY_SECONDS
        if progress.reason != reason:
            if progress.reason:
                told(f"lost: {progress.reason}")
            reason = progress.reason
        if status:
            return status, progress
        time.sleep(0.25)


# How the last line of an app that has failed may begin.
TROUBLE = ("Error", "error:", "BadInput:", "RunFailed:", "Exception:")


def _nodes(count: int) -> str:
    return f"{count} node{'s' if count != 1 else ''}"


def _why(fed: LocalFederation, status: str) -> str:
    """How a run has failed, with the last thing that its app said of it."""
    said = [line.strip() for line in fed.log().splitlines() if any(w in line for w in TROUBLE)]
    how = status.removeprefix("finished:")
    return f"the run has ended as {how}" + (f": {said[-1]}" if said else "")


def summary(progress: Progress, seconds: float) -> Iterator[str]:
    """What a finished run has come to."""
    if not progress.updates:
        return
    yield f"finished in {seconds:.0f} s: {progress.line()}"
    stale = max(progress.staleness, default=0)
    yield f"staleness: mean {progress.mean_staleness():.1f}, at most {stale}"
    shares = ", ".join(f"{name} {n}" for name, n in sorted(progress.by_device.items()))
    yield f"updates:   {shares}"


def status(folder: Path | None, say: Say) -> None:
    """Which processes of a federation are alive, and how far its run is."""
    found = find_folder(folder)
    pids = PidFile(found / PIDS)
    alive = pids.alive()
    say(f"{found}: {'up' if alive else 'down'}")
    for name, one in pids.read().items():
        say(f"  {name:<20} {one.pid:>8}  {'alive' if name in alive else 'gone'}")
    progress = RunReader(found / "run").read()
    if progress.updates:
        say(f"  {progress.line()}")


def down(folder: Path | None, say: Say) -> None:
    """End a federation from another terminal, or what a killed one has left behind."""
    found = find_folder(folder)
    pids = PidFile(found / PIDS)
    alive = pids.alive()
    supervisor = alive.get(SUPERVISOR)
    if supervisor is not None:
        supervisor.send(signal.SIGTERM)
        until = time.monotonic() + DOWN_TIMEOUT
        while supervisor.is_alive() and time.monotonic() < until:
            time.sleep(0.1)
    rest = {one.pid: one for one in belonging_to(found.resolve())}
    rest |= {one.pid: one for one in alive.values() if one.is_alive()}
    end(rest.values())
    pids.path.unlink(missing_ok=True)
    ended = len(rest.keys() | {one.pid for one in alive.values()})
    say(f"{found}: {f'{ended} processes ended' if ended else 'nothing was running'}")


def parse_settings(settings: list[str], known: Mapping[str, Any]) -> dict[str, Value]:
    """`key=value` for the app's own config; a bare word is a text."""
    import tomllib

    found: dict[str, Value] = {}
    for text in settings:
        key, equals, value = text.partition("=")
        if not equals:
            raise BadInput(f"--set {text!r}: write it as key=value")
        if key not in known:
            raise BadInput(
                f"--set {key}: the app has no such setting{did_you_mean(key, known)} "
                f"(it has: {', '.join(known) or 'none'})"
            )
        try:
            parsed = tomllib.loads(f"value = {value}")["value"]
        except tomllib.TOMLDecodeError:
            parsed = value
        if not isinstance(parsed, str | int | float | bool):
            raise BadInput(f"--set {text!r}: must be a text, a number, true or false")
        found[key] = parsed
    return found


@contextlib.contextmanager
def _signals_interrupt() -> Iterator[None]:
    """A SIGTERM or a closed terminal ends things as Ctrl-C does."""

    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    numbers = (signal.SIGTERM, signal.SIGHUP)
    old = [signal.signal(number, interrupt) for number in numbers]
    try:
        yield
    finally:
        for number, handler in zip(numbers, old, strict=True):
            signal.signal(number, handler)
