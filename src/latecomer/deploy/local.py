"""A whole federation on this machine, on loopback: what is deployed, before it is deployed."""

import contextlib
import json
import logging
import os
import signal
import socket
import ssl
import subprocess
import sys
import time
import tomllib
import urllib.request
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from latecomer.deploy.certificates import make_certificates, make_node_key, write_secret
from latecomer.deploy.environment import flower_command, flower_environment, flower_version
from latecomer.deploy.folders import MARKER, PIDS
from latecomer.deploy.guard import MARK, belonging_to
from latecomer.deploy.node import Node, NodeOptions, Value, config_text
from latecomer.deploy.pids import PidFile
from latecomer.deploy.processes import Process, command_of, end, with_variable
from latecomer.deploy.supervised import BackOff, Supervised
from latecomer.deploy.warm import is_known
from latecomer.errors import BadInput, RunFailed

log = logging.getLogger(__name__)

NAME = "local"  # of the SuperLink, for `flwr`
SLOWEST = 2.0
DATABASE = "superlink.db"


class LocalFederation:
    """A SuperLink with a database, an executor for the server's app, and supervised nodes.

    Everything lies in `dir`; what is there already (database, keys, devices, checkpoint) is taken
    up again. Every process is started again when it dies, until `stop`. Use it in a `with`.

    Device i is called device-i and has partition i. Each answers later than the one before, the
    last by `slowest` seconds.
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
        """`node_config` and `environment` are added to those of every node."""
        self.app, self.dir, self.tls = Path(app).resolve(), Path(dir).resolve(), tls
        self.config = app_config(self.app)
        if devices < 1:
            raise BadInput(f"--devices {devices}: must be at least 1")
        self.warm = warm and is_known(flower_version())
        if warm and not self.warm:
            log.warning("%s", warm_warning())
        self.dir.mkdir(parents=True, exist_ok=True)
        self.pids = PidFile(self.dir / PIDS)
        self.pids.claim()  # before anything is written that another one may be using
        told = {"app": str(self.app), "devices": devices, "tls": tls}
        (self.dir / MARKER).write_text(json.dumps(told) + "\n", encoding="utf-8")
        self.ports = free_ports(1 + devices)
        self.address = f"127.0.0.1:{self.ports[0]}"
        self.certificates = make_certificates(self.dir / "certificates") if tls else None
        own = {MARK: str(self.dir), "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
        self._home = self.dir / "flower"
        self.environment = flower_environment({**own, "FLWR_HOME": str(self._home)})
        self._write_connection()
        self.superlink = self._service("superlink", self._superlink_command())
        self.superexec = self._service("superexec", self._superexec_command())
        own |= dict(environment or {})
        self.nodes = [
            self._node(i, devices, slowest, dict(node_config or {}), own) for i in range(devices)
        ]
        self.runs: list[int] = []
        self._guard: subprocess.Popen[bytes] | None = None

    @property
    def run_folder(self) -> Path:
        """Where the server's app keeps its log, checkpoints and model."""
        return self.dir / "run"

    # Its life

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    def start(self, timeout: float = 120.0) -> None:
        """Start everything; returns when every node has joined."""
        self.pids.claim()
        is_old = (self.dir / DATABASE).exists()
        try:
            self._start_guard()
            self.superlink.start()
            self._wait("the SuperLink to answer", self.is_healthy, timeout, self.superlink)
            if is_old:
                self._end_old_runs()
            self.superexec.start()
            if self.tls:
                self._register_nodes()
            for node in self.nodes:
                node.start()
            for node in self.nodes:
                self._wait(f"{node.name} to join", node.has_joined, timeout, node.supernode)
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """End every process that was started here, and whatever these have started."""
        if not self.pids.is_ours:
            return
        with _undisturbed():
            services = [node.stop for node in self.nodes]
            with ThreadPoolExecutor(max(1, min(32, len(services)))) as pool:
                list(pool.map(lambda stop: stop(), services))
            self.superexec.stop()
            self.superlink.stop()
            end(self.processes(), timeout=2.0)
            if self._guard is not None:
                self._guard.kill()
                self._guard.wait()
            self.pids.release()

    def processes(self) -> list[Process]:
        """Every process of this federation that is alive."""
        known = [one for part in self._parts() if (one := part.process) is not None]
        return list({one.pid: one for one in [*known, *belonging_to(self.dir)]}.values())

    def is_healthy(self) -> bool:
        """Whether the SuperLink answers."""
        context = None
        if self.certificates is not None:
            context = ssl.create_default_context(cafile=str(self.certificates.authority))
        url = f"{'https' if self.tls else 'http'}://{self.address}/health"
        # A proxy of the environment has no business on loopback.
        opener = urllib.request.build_opener(
            urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=context)
        )
        try:
            with opener.open(url, timeout=2.0) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False

    # Its runs

    def run(self, config: Mapping[str, Value] | None = None) -> int:
        """Start the app; the number of the run. With the same folder it goes on from there."""
        told: dict[str, Value] = dict(config or {})
        if "folder" in self.config:
            told.setdefault("folder", str(self.run_folder))
        arguments = ["run", str(self.app), NAME, "--format", "json"]
        if told:
            arguments += ["--run-config", config_text(told)]
        answer = self.flwr(*arguments)
        if "run-id" not in answer:
            raise RunFailed(f"the app could not be started: {answer.get('error-message', answer)}")
        self.runs.append(int(answer["run-id"]))
        return self.runs[-1]

    def status(self, run: int | None = None) -> str:
        """Of a run, the last by default: pending, starting, running, finished:completed, ..."""
        answer = self.flwr("list", NAME, "--run-id", str(self._run(run)), "--format", "json")
        found = answer.get("runs") or [{}]
        return str(found[0].get("status", "unknown"))

    def wait(self, run: int | None = None, timeout: float | None = None) -> str:
        """Until the run has finished; says how. TimeoutError if it has not by then."""
        watch = RunWatch(self, self._run(run))
        until = None if timeout is None else time.monotonic() + timeout
        while not (status := watch.ended()):
            if until is not None and time.monotonic() > until:
                raise TimeoutError(f"run {self._run(run)} has not finished in {timeout:g} s")
            time.sleep(0.25)
        return status

    def log(self, run: int | None = None) -> str:
        """What the server's app has said in a run."""
        return self._call("log", str(self._run(run)), NAME, "--show").stdout

    def cancel(self, run: int | None = None) -> None:
        """Stop a run; the federation stays."""
        self._call("stop", str(self._run(run)), NAME)

    def serverapps(self) -> list[Process]:
        """The processes of the server's app that are alive, where /proc tells."""
        return [
            one
            for one in with_variable(MARK, str(self.dir))
            if any(Path(word).name == "flwr-serverapp" for word in command_of(one)[:2])
        ]

    def flwr(self, *arguments: str) -> dict[str, Any]:
        """What a command of `flwr` answers in JSON."""
        done = self._call(*arguments)
        start = done.stdout.find("{")
        try:
            return dict(json.loads(done.stdout[start:])) if start >= 0 else {}
        except ValueError:
            return {"error-message": (done.stdout + done.stderr).strip()[-500:]}

    # How it is made

    def _parts(self) -> list[Supervised]:
        return [
            self.superlink,
            self.superexec,
            *(part for node in self.nodes for part in node.parts),
        ]

    def _changed(self) -> None:
        self.pids.write(
            {part.name: one for part in self._parts() if (one := part.process) is not None}
        )

    def _service(self, name: str, command: list[str]) -> Supervised:
        return Supervised(
            name,
            command,
            self.dir / "logs" / f"{name}.log",
            self.environment,
            self.dir,
            BackOff(first=1.0, longest=10.0),
            lambda: self._changed(),
        )

    def _secret(self) -> Path:
        """Whoever knows it may run the apps of the SuperLink."""
        path = self.dir / "executor-secret"
        if not path.exists():
            write_secret(path, os.urandom(32))
        return path

    def _superlink_command(self) -> list[str]:
        host, _, port = self.address.partition(":")
        command = [flower_command("flower-superlink"), "--host", host, "--port", port]
        command += ["--database", str(self.dir / DATABASE), "--isolation", "process"]
        command += ["--superexec-auth-secret-file", str(self._secret())]
        if self.certificates is None:
            return [*command, "--insecure"]
        command += ["--ssl-ca-certfile", str(self.certificates.authority)]
        command += ["--ssl-certfile", str(self.certificates.certificate)]
        return [*command, "--ssl-keyfile", str(self.certificates.key), "--enable-supernode-auth"]

    def _superexec_command(self) -> list[str]:
        command = [flower_command("flower-superexec"), "--runtime-api-address", self.address]
        command += ["--superexec-auth-secret-file", str(self._secret())]
        command += ["--parent-pid", str(os.getpid())]
        if self.certificates is None:
            return [*command, "--insecure"]
        return [*command, "--root-certificates", str(self.certificates.authority)]

    def _node(
        self,
        number: int,
        devices: int,
        slowest: float,
        config: dict[str, Value],
        environment: Mapping[str, str],
    ) -> Node:
        name = f"device-{number}"
        delay = round(slowest * number / max(1, devices - 1), 3)
        config = {
            "device-id": name,
            "partition-id": number,
            "num-partitions": devices,
            "delay": delay,
            **config,
        }
        options = NodeOptions(
            self.address,
            self.ports[1 + number],
            config_text(config),
            self.certificates.authority if self.certificates is not None else None,
            make_node_key(self.dir / "keys", name)[0] if self.tls else None,
            self.warm,
            insecure=not self.tls,
        )
        folder, log_file = self.dir / "devices" / name, self.dir / "logs" / f"{name}.log"
        return Node(name, options, folder, log_file, environment, lambda: self._changed())

    def _start_guard(self) -> None:
        """Even if this process is killed, nothing stays behind. It ends with all the others."""
        command = [sys.executable, "-m", "latecomer.deploy.guard", str(os.getpid()), str(self.dir)]
        self._guard = subprocess.Popen(
            command,
            env=self.environment,
            cwd=self.dir,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    def _end_old_runs(self) -> None:
        """One that was waiting when the last life ended would write into the folder of ours."""
        for run in self.flwr("list", NAME, "--format", "json").get("runs", []):
            if not str(run.get("status", "")).startswith("finished"):
                self.cancel(int(run["run-id"]))

    def _register_nodes(self) -> None:
        """Tell the SuperLink the public keys, once for its database."""
        done = self.dir / "keys" / "registered"
        known = set(done.read_text().split()) if done.exists() else set()
        new = [node.name for node in self.nodes if node.name not in known]

        def register(name: str) -> None:
            public = str(self.dir / "keys" / f"{name}.pub")
            answer = self.flwr("supernode", "register", public, NAME, "--format", "json")
            if not answer.get("success") and "already" not in str(answer):
                raise RunFailed(f"{name} could not be registered: {answer}")

        with ThreadPoolExecutor(min(4, max(1, len(new)))) as pool:
            list(pool.map(register, new))
        done.write_text("\n".join(sorted(known | set(new))) + "\n")

    def _write_connection(self) -> None:
        """The SuperLink under its name, where `flwr` looks for it."""
        lines = ["[superlink]", f'default = "{NAME}"', f"[superlink.{NAME}]"]
        lines += [f"address = {json.dumps(self.address)}"]
        if self.certificates is None:
            lines += ["insecure = true"]
        else:
            lines += [f"root-certificates = {json.dumps(str(self.certificates.authority))}"]
        self._home.mkdir(exist_ok=True)
        (self._home / "config.toml").write_text("\n".join(lines) + "\n", encoding="utf-8")

    def _call(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [flower_command("flwr"), *arguments],
            env=self.environment,
            cwd=self.dir,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
            start_new_session=True,
        )

    def _run(self, run: int | None) -> int:
        if run is None and not self.runs:
            raise BadInput("no run has been started")
        return self.runs[-1] if run is None else run

    def _wait(self, what: str, done: Any, timeout: float, part: Supervised) -> None:
        until = time.monotonic() + timeout
        while not done():
            if time.monotonic() > until:
                said = part.text().strip().splitlines()[-1:] or ["it said nothing"]
                raise RunFailed(
                    f"waited {timeout:g} s for {what}; {said[0]} (more in {part.log_file})"
                )
            time.sleep(0.1)


class RunWatch:
    """Whether a run has finished, without asking `flwr` all the time: that takes it a second."""

    def __init__(self, federation: LocalFederation, run: int) -> None:
        self.federation, self.run = federation, run
        self._asked = time.monotonic()

    def ended(self) -> str:
        """How it has finished; empty while it goes on."""
        often = 10.0 if self.federation.serverapps() else 2.0
        if time.monotonic() - self._asked < often:
            return ""
        with contextlib.suppress(subprocess.TimeoutExpired):
            status = self.federation.status(self.run)
            self._asked = time.monotonic()
            if status.startswith("finished"):
                return status
        return ""


def app_config(app: Path) -> dict[str, Any]:
    """The settings of a Flower app's folder; BadInput if it is none."""
    try:
        document = tomllib.loads((app / "pyproject.toml").read_text(encoding="utf-8"))
        flower = document["tool"]["flwr"]["app"]
        flower["components"]["serverapp"], flower["components"]["clientapp"]
    except FileNotFoundError:
        raise BadInput(
            f"{app}: not a Flower app, there is no pyproject.toml "
            "(`latecomer deploy new DIR` makes one)"
        ) from None
    except (NotADirectoryError, tomllib.TOMLDecodeError) as error:
        raise BadInput(f"{app}: not a Flower app: {error}") from None
    except (KeyError, TypeError):
        raise BadInput(
            f"{app}: not a Flower app: its pyproject.toml names no serverapp and clientapp "
            "in [tool.flwr.app.components]"
        ) from None
    return dict(flower.get("config", {}))


def warm_warning() -> str:
    return (
        f"warm nodes are not tested with flwr {flower_version()}: stock nodes are used, "
        "which take some seconds more for every task"
    )


def free_ports(count: int) -> list[int]:
    """Ports of loopback that nobody listens on, all different."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [int(one.getsockname()[1]) for one in sockets]


@contextlib.contextmanager
def _undisturbed() -> Any:
    """A second Ctrl-C must not leave half of the processes behind."""
    signals = (signal.SIGINT, signal.SIGTERM)
    try:
        old = [signal.signal(one, signal.SIG_IGN) for one in signals]
    except ValueError:  # not in the main thread, which is the one that signals disturb
        yield
        return
    try:
        yield
    finally:
        for one, handler in zip(signals, old, strict=True):
            signal.signal(one, handler)
