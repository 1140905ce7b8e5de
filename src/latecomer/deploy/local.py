"""A whole federation on this machine, on loopback, to try an app before it is deployed."""

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from pathlib import Path
from typing import Self

from latecomer.deploy.certificates import make_node_key
from latecomer.deploy.flower_app import app_config
from latecomer.deploy.flower_server import FlowerServer
from latecomer.deploy.folders import MARKER, PIDS
from latecomer.deploy.guard import FOLDER_VARIABLE, federation_processes, start_guard
from latecomer.deploy.node import (
    Node,
    NodeOptions,
    Value,
    config_text,
    free_ports,
    warm_if_tested,
)
from latecomer.deploy.pids import PidFile
from latecomer.deploy.processes import Process, end
from latecomer.deploy.runs import Runs
from latecomer.deploy.supervised import Supervised
from latecomer.errors import BadInput, RunFailed
from latecomer.study.files import RUN_FOLDER_VARIABLE
from latecomer.study.signals import signals_handled

SLOWEST = 2.0


class LocalFederation:
    """A SuperLink, an executor and supervised nodes for one Flower app, until `stop`.

    app: folder of the Flower app.
    devices: number of nodes. Device i is called device-i and has data partition i.
    dir: folder of all files. An existing database, keys, device states and checkpoint are used.
    tls: TLS, and nodes authenticated by keys.
    warm: nodes with a permanent client process, see `deploy.warm`.
    slowest: seconds by which the last device delays its replies to tasks; the others proportionally
        less, the first by 0. Stock nodes do so only if the app has Latecomer's `client_app`.
    node_config, environment: added to those of every node.

    The constructor writes and starts nothing: `start` does. Use it in a `with`.
    """

    def __init__(
        self,
        app: str | Path,
        devices: int,
        dir: str | Path,
        tls: bool = False,
        warm: bool = True,
        slowest: float = SLOWEST,
        node_config: Mapping[str, Value] | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        if devices < 1:
            raise BadInput(f"--devices {devices}: must be at least 1")
        self.app, self.dir = Path(app).resolve(), Path(dir).resolve()
        self.devices, self.tls, self.slowest = devices, tls, slowest
        self.node_config, self.node_environment = dict(node_config or {}), dict(environment or {})
        self._wants_warm = warm
        self.pids = PidFile(self.dir / PIDS)
        self._guard: subprocess.Popen[bytes] | None = None

    @cached_property
    def warm(self) -> bool:
        """Whether nodes are warm: requested, and tested with the installed Flower."""
        return warm_if_tested(self._wants_warm)

    @cached_property
    def server(self) -> FlowerServer:
        """The SuperLink and its executor."""
        own = {**self._environment, RUN_FOLDER_VARIABLE: str(self.run_folder)}
        return FlowerServer(self.dir, self._ports[0], self.tls, own, self._write_pids)

    @cached_property
    def nodes(self) -> list[Node]:
        """The nodes, device by device."""
        return [self._node(number) for number in range(self.devices)]

    @cached_property
    def runs(self) -> Runs:
        """The runs on this federation."""
        return Runs(self.dir, self.server.environment)

    @property
    def run_folder(self) -> Path:
        """Where Latecomer's part of the server app writes its log, checkpoints and model."""
        return self.dir / "run"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def prepare(self) -> None:
        """Claim the folder and write the files that the processes need; starts nothing.

        Existing certificates, keys and secrets are kept.
        """
        # BadInput, if the app or a command of Flower is missing, before anything is written.
        app_config(self.app)
        self._parts()
        self.dir.mkdir(parents=True, exist_ok=True)
        self.pids.claim()
        settings = {"app": str(self.app), "devices": self.devices, "tls": self.tls}
        (self.dir / MARKER).write_text(json.dumps(settings) + "\n", encoding="utf-8")
        self.server.prepare()
        if self.tls:
            for node in self.nodes:
                make_node_key(self._keys, node.name)

    def start(self, timeout: float = 120.0) -> None:
        """Start everything; returns when every node has joined.

        RunFailed after `timeout` seconds without a step forward; everything is stopped then.
        """
        server = self.server
        try:
            self.prepare()
            has_runs = server.has_runs
            self._guard = start_guard(self.dir, server.environment)
            server.superlink.start()
            _wait("the SuperLink to answer", server.is_healthy, timeout, server.superlink)
            if has_runs:
                self.runs.cancel_unfinished()
            server.superexec.start()
            if self.tls:
                self.runs.register_nodes(self._keys, [node.name for node in self.nodes])
            for node in self.nodes:
                node.start()
            for node in self.nodes:
                _wait(f"{node.name} to join", node.has_joined, timeout, node.supernode)
        except BaseException:
            self.stop()
            raise

    def run(self, config: Mapping[str, Value] | None = None) -> int:
        """Start the app with these changes to its settings; returns the run id.

        An app with a setting `folder` writes to `run_folder`, and resumes from a checkpoint there.
        """
        changes: dict[str, Value] = dict(config or {})
        if "folder" in app_config(self.app):
            changes.setdefault("folder", str(self.run_folder))
        return self.runs.start(self.app, changes)

    def stop(self) -> None:
        """End all processes that were started here, and their children."""
        if not self.pids.is_claimed:
            return
        # A second Ctrl-C would leave half of the processes running.
        with signals_handled(signal.SIG_IGN, signal.SIGINT, signal.SIGTERM):
            with ThreadPoolExecutor(max(1, min(32, len(self.nodes)))) as pool:
                list(pool.map(Node.stop, self.nodes))
            self.server.superexec.stop()
            self.server.superlink.stop()
            end(self.processes(), timeout=2.0)
            if self._guard is not None:
                self._guard.kill()
                self._guard.wait()
            self.pids.release()

    def processes(self) -> list[Process]:
        """All living processes of this federation."""
        known = [one for part in self._parts() if (one := part.process) is not None]
        return list({one.pid: one for one in [*known, *federation_processes(self.dir)]}.values())

    @property
    def _keys(self) -> Path:
        return self.dir / "keys"

    @cached_property
    def _ports(self) -> list[int]:
        return free_ports(1 + self.devices)

    @property
    def _environment(self) -> dict[str, str]:
        threads = os.environ.get("OMP_NUM_THREADS", "1")
        return {FOLDER_VARIABLE: str(self.dir), "OMP_NUM_THREADS": threads}

    def _parts(self) -> list[Supervised]:
        nodes = [part for node in self.nodes for part in node.parts]
        return [self.server.superlink, self.server.superexec, *nodes]

    def _write_pids(self) -> None:
        self.pids.write(
            {part.name: one for part in self._parts() if (one := part.process) is not None}
        )

    def _node(self, number: int) -> Node:
        name = f"device-{number}"
        config: dict[str, Value] = {
            "device-id": name,
            "partition-id": number,
            "num-partitions": self.devices,
            "delay": round(self.slowest * number / max(1, self.devices - 1), 3),
            **self.node_config,
        }
        certificates = self.server.certificates
        options = NodeOptions(
            self.server.address,
            self._ports[1 + number],
            config_text(config),
            None if certificates is None else certificates.authority,
            self._keys / name if self.tls else None,
            self.warm,
            insecure=not self.tls,
        )
        folder, log_file = self.dir / "devices" / name, self.dir / "logs" / f"{name}.log"
        environment = {**self._environment, **self.node_environment}
        return Node(name, options, folder, log_file, environment, self._write_pids)


def _wait(what: str, done: Callable[[], bool], timeout: float, part: Supervised) -> None:
    until = time.monotonic() + timeout
    while not done():
        if time.monotonic() > until:
            last = part.text().strip().splitlines()[-1:] or ["it wrote nothing"]
            raise RunFailed(f"waited {timeout:g} s for {what}; {last[0]} (more in {part.log_file})")
        time.sleep(0.1)
