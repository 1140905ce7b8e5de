"""Runs and node registrations of a local federation, through Flower's `flwr` command."""

import contextlib
import json
import subprocess
import time
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from latecomer.deploy.environment import flower_command
from latecomer.deploy.flower_server import NAME
from latecomer.deploy.guard import FOLDER_VARIABLE
from latecomer.deploy.node import Value, config_text
from latecomer.deploy.processes import Process, command_of, with_variable
from latecomer.errors import BadInput, RunFailed


class Runs:
    """Starts, observes and stops the runs of one SuperLink; without a run id, the last one."""

    def __init__(self, folder: Path, environment: Mapping[str, str]) -> None:
        self.folder, self.environment = folder, environment
        self.ids: list[int] = []  # of the runs that were started here
        self._asked = time.monotonic()  # for the status of a run

    def start(self, app: Path, config: Mapping[str, Value]) -> int:
        """Start the app with these changes to its settings; returns the run id."""
        arguments = ["run", str(app), NAME, "--format", "json"]
        if config:
            arguments += ["--run-config", config_text(config)]
        answer = self._json(*arguments)
        if "run-id" not in answer:
            raise RunFailed(f"the app could not be started: {answer.get('error-message', answer)}")
        self.ids.append(int(answer["run-id"]))
        return self.ids[-1]

    def status(self, run: int | None = None) -> str:
        """pending, starting, running, finished:completed, finished:failed, ..."""
        answer = self._json("list", NAME, "--run-id", str(self._id(run)), "--format", "json")
        found = answer.get("runs") or [{}]
        return str(found[0].get("status", "unknown"))

    def ended(self, run: int | None = None) -> str:
        """The final status of the run, empty while it goes on; asked for every 2 or 10 seconds.

        The question takes a second.
        """
        interval = 10.0 if self.serverapps() else 2.0
        if time.monotonic() - self._asked >= interval:
            with contextlib.suppress(subprocess.TimeoutExpired):
                status = self.status(run)
                self._asked = time.monotonic()
                return status if status.startswith("finished") else ""
        return ""

    def wait(self, run: int | None = None, timeout: float | None = None) -> str:
        """Wait until the run has finished; its status. TimeoutError after `timeout` seconds."""
        until = None if timeout is None else time.monotonic() + timeout
        while not (status := self.ended(run)):
            if until is not None and time.monotonic() > until:
                raise TimeoutError(f"run {self._id(run)} has not finished in {timeout:g} s")
            time.sleep(0.25)
        return status

    def log(self, run: int | None = None) -> str:
        """The output of the server app."""
        return self._call("log", str(self._id(run)), NAME, "--show").stdout

    def cancel(self, run: int | None = None) -> None:
        """Stop the run; the federation keeps running."""
        self._call("stop", str(self._id(run)), NAME)

    def cancel_unfinished(self) -> None:
        """Stop runs in the database of an earlier federation: they would use the same folder."""
        for run in self._json("list", NAME, "--format", "json").get("runs", []):
            if not str(run.get("status", "")).startswith("finished"):
                self.cancel(int(run["run-id"]))

    def serverapps(self) -> list[Process]:
        """The living processes of server apps; empty where there is no /proc."""
        return [
            one
            for one in with_variable(FOLDER_VARIABLE, str(self.folder))
            if any(Path(argument).name == "flwr-serverapp" for argument in command_of(one)[:2])
        ]

    def online(self) -> tuple[int, int] | None:
        """Nodes that the SuperLink has heard from recently, by their heartbeats, and all of them.

        A node that has ended or is frozen counts as online for up to a minute. None if the
        SuperLink does not answer.
        """
        try:
            found = self._json("supernode", "list", NAME, "--format", "json").get("nodes")
        except subprocess.TimeoutExpired:
            return None
        if found is None:
            return None
        states = [each.get("status") for each in found]
        return states.count("online"), len(states) - states.count("unregistered")

    def register_nodes(self, keys: Path, names: Iterable[str]) -> None:
        """Register the public keys of nodes in `keys` that are not registered yet."""
        done = keys / "registered"
        known = set(done.read_text().split()) if done.exists() else set()
        new = [name for name in names if name not in known]

        def register(name: str) -> None:
            public = str(keys / f"{name}.pub")
            answer = self._json("supernode", "register", public, NAME, "--format", "json")
            if not answer.get("success") and "already" not in str(answer):
                raise RunFailed(f"{name} could not be registered: {answer}")

        with ThreadPoolExecutor(min(4, max(1, len(new)))) as pool:
            list(pool.map(register, new))
        done.write_text("\n".join(sorted(known | set(new))) + "\n")

    def _id(self, run: int | None) -> int:
        if run is None and not self.ids:
            raise BadInput("no run has been started")
        return self.ids[-1] if run is None else run

    def _json(self, *arguments: str) -> dict[str, Any]:
        """The JSON output of a `flwr` command."""
        done = self._call(*arguments)
        start = done.stdout.find("{")
        try:
            return dict(json.loads(done.stdout[start:])) if start >= 0 else {}
        except ValueError:
            return {"error-message": (done.stdout + done.stderr).strip()[-500:]}

    def _call(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [flower_command("flwr"), *arguments],
            env=self.environment,
            cwd=self.folder,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
            start_new_session=True,
        )
