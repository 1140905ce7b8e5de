"""`latecomer deploy up`, `status` and `down`: run, inspect and end a local federation."""

import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from latecomer.deploy.environment import flower_environment
from latecomer.deploy.flower_app import app_config, parse_settings
from latecomer.deploy.flower_log import FlowerProgress
from latecomer.deploy.flower_server import SUPERLINK
from latecomer.deploy.folders import PIDS, RUNS, check_folder, find_folder
from latecomer.deploy.guard import federation_processes
from latecomer.deploy.local import LocalFederation
from latecomer.deploy.pids import SUPERVISOR, PidFile
from latecomer.deploy.processes import end
from latecomer.deploy.progress import RunProgress
from latecomer.deploy.runs import Runs
from latecomer.errors import RunFailed
from latecomer.study.files import numbered_folder
from latecomer.study.signals import signals_handled

LINE_SECONDS = 2.0
LOG_SECONDS = 5.0  # between two readings of Flower's log, each of which takes a second
DOWN_TIMEOUT = 30.0

Echo = Callable[[str], None]  # prints one line


def up(
    app: Path,
    devices: int,
    folder: Path | None,
    tls: bool,
    warm: bool,
    slowest: float,
    settings: list[str],
    echo: Echo,
) -> None:
    """Start a federation, run the app on it, print its progress, and end everything."""
    config = parse_settings(settings, app_config(app.resolve()))
    folder = folder or numbered_folder(RUNS, f"deploy-{app.resolve().name}")
    check_folder(folder)
    began = time.monotonic()

    def report(text: str) -> None:
        echo(f"{time.monotonic() - began:6.1f} s  {text}")

    with (
        # SIGTERM and a closed terminal (SIGHUP) are treated like Ctrl-C.
        signals_handled(_interrupt, signal.SIGTERM, signal.SIGHUP),
        LocalFederation(app, devices, folder, tls, warm, slowest) as fed,
    ):
        how = ("TLS and node keys" if tls else "no TLS") + (", warm nodes" if fed.warm else "")
        report(f"starting a SuperLink and {_nodes(devices)} on loopback ({how}); files in {folder}")
        fed.start()
        report(f"the SuperLink at {fed.server.address} has {_nodes(devices)}")
        if slowest and not fed.warm:
            report("stock nodes: --slowest has an effect only in apps with Latecomer's client_app")
        run = fed.run(config)
        report(f"run {run} started")
        status, last = _follow(fed, run, report)
        if status != "finished:completed":
            raise RunFailed(f"{_why(fed, status)}; logs in {folder / 'logs'}")
        for line in summary(last, time.monotonic() - began):
            echo(line)
    echo(f"results: {folder / 'run'}" if last.has_log else f"files:   {folder}")


def _follow(fed: LocalFederation, run: int, report: Echo) -> tuple[str, RunProgress]:
    """Print a line whenever the progress changes, until the run has finished."""
    progress = RunProgress(fed.run_folder)
    printed, due, reason, look = "", 0.0, "", time.monotonic() + LOG_SECONDS
    while True:
        status = fed.runs.ended(run)
        present = sum(node.is_present() for node in fed.nodes)
        progress.read()
        if not progress.has_log and (status or time.monotonic() >= look):
            progress.flower = FlowerProgress.of(fed.runs.log())
            look = time.monotonic() + LOG_SECONDS
        line = f"{progress.line()}, {present}/{len(fed.nodes)} nodes"
        if line != printed and (status or time.monotonic() >= due):
            report(line)
            printed, due = line, time.monotonic() + LINE_SECONDS
        if progress.history.failure not in ("", reason):
            reason = progress.history.failure
            report(f"lost: {reason}")
        if status:
            return status, progress
        time.sleep(0.25)


# Texts in the last line of an app that has failed.
ERRORS = ("Error", "error:", "BadInput:", "RunFailed:", "Exception:")


def _nodes(count: int) -> str:
    return f"{count} node{'s' if count != 1 else ''}"


def _why(fed: LocalFederation, status: str) -> str:
    """How a run has failed, with the last error in its log."""
    lines = [line.strip() for line in fed.runs.log().splitlines()]
    errors = [line for line in lines if any(text in line for text in ERRORS)]
    how = status.removeprefix("finished:")
    return f"the run has ended as {how}" + (f": {errors[-1]}" if errors else "")


def summary(progress: RunProgress, seconds: float) -> Iterator[str]:
    """The lines printed after a finished run."""
    if not progress.updates:
        return
    yield f"finished in {seconds:.0f} s: {progress.line()}"
    if not progress.has_log:
        yield "the app's strategy is one of Flower's: no log, metrics and report of Latecomer"
        return
    history = progress.history
    mean = sum(k * n for k, n in history.staleness.items()) / max(1, progress.updates)
    yield f"staleness: mean {mean:.1f}, at most {max(history.staleness, default=0)}"
    named = {str(history.names.get(d, d)): n for d, n in history.updates.items()}
    shares = ", ".join(f"{name} {n}" for name, n in sorted(named.items()))
    yield f"updates:   {shares}"


def status(folder: Path | None, echo: Echo) -> None:
    """Print the state of a federation's processes, the nodes heard from, and the run's progress."""
    found = find_folder(folder)
    pids = PidFile(found / PIDS)
    alive = pids.alive()
    echo(f"{found}: {'up' if alive else 'down'}")
    for name, one in pids.read().items():
        echo(f"  {name:<20} {one.pid:>8}  {one.state()}")
    if any(one.state() == "alive" for name, one in alive.items() if name == SUPERLINK):
        home = flower_environment({"FLWR_HOME": str(found.resolve() / "flower")})
        heard = Runs(found, home).online()
        text = (
            "does not answer" if heard is None else f"hears from {heard[0]} of {_nodes(heard[1])}"
        )
        echo(f"  the SuperLink {text}")
    progress = RunProgress(found / "run")
    progress.read()
    if progress.updates:
        echo(f"  {progress.line()}")


def down(folder: Path | None, echo: Echo) -> None:
    """End a federation from another terminal, or the processes that a killed one has left."""
    found = find_folder(folder)
    pids = PidFile(found / PIDS)
    alive = pids.alive()
    supervisor = alive.get(SUPERVISOR)
    if supervisor is not None:
        supervisor.send(signal.SIGTERM)
        until = time.monotonic() + DOWN_TIMEOUT
        while supervisor.is_alive() and time.monotonic() < until:
            time.sleep(0.1)
    rest = {one.pid: one for one in federation_processes(found.resolve())}
    rest |= {one.pid: one for one in alive.values() if one.is_alive()}
    end(rest.values())
    pids.path.unlink(missing_ok=True)
    ended = len(rest.keys() | {one.pid for one in alive.values()})
    echo(f"{found}: {f'{ended} processes ended' if ended else 'nothing was running'}")


def _interrupt(number: int, frame: object) -> None:
    raise KeyboardInterrupt
