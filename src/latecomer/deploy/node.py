"""A supervised Flower SuperNode: a stock one, or a warm one with a permanent client process."""

import contextlib
import logging
import os
import socket
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from latecomer.deploy.certificates import write_secret
from latecomer.deploy.environment import flower_command, flower_environment, flower_version
from latecomer.deploy.supervised import BackOff, Supervised
from latecomer.deploy.warm import is_known
from latecomer.errors import BadInput

log = logging.getLogger(__name__)

# A SuperLink refuses a restarted node until the old connection times out, after up to a minute.
NODE_BACK_OFF = BackOff(first=1.0, longest=8.0, healthy=60.0)
JOINED = "SuperNode ID:"

Value = str | int | float | bool


@dataclass(frozen=True, slots=True)
class NodeOptions:
    """Command-line options of a SuperNode; `port` is its own, on loopback.

    config: the node-config, as `config_text` writes it.
    key: the node's private key, for a SuperLink that authenticates nodes.
    insecure: no TLS.
    trusted_entities: YAML file of the public keys whose apps the node runs; None: any app.
    """

    superlink: str
    port: int
    config: str = ""
    root_certificates: Path | None = None
    key: Path | None = None
    warm: bool = False
    insecure: bool = False
    trusted_entities: Path | None = None


class Node:
    """One SuperNode of a federation, kept running until `stop`.

    `folder` holds Flower's files of this node, the state of its device, and its secret. Without a
    log file the node writes to the output of its supervisor. `on_change` is called whenever one of
    its processes starts or ends.
    """

    def __init__(
        self,
        name: str,
        options: NodeOptions,
        folder: Path,
        log_file: Path | None,
        environment: Mapping[str, str],
        on_change: Callable[[], None] = lambda: None,
    ) -> None:
        self.name, self.options, self.folder = name, options, folder
        self._home, self._secret = folder / "flower", folder / "executor-secret"
        own = {"FLWR_HOME": str(self._home), "LATECOMER_STATE": str(folder / "state")}
        environment = flower_environment({**own, **environment})

        def part(called: str, command: list[str], file: Path | None) -> Supervised:
            return Supervised(called, command, file, environment, folder, NODE_BACK_OFF, on_change)

        self.supernode = part(name, supernode_command(options, self._secret), log_file)
        self.client: Supervised | None = None
        if options.warm:
            client = [sys.executable, "-m", "latecomer.deploy.warm", "client"]
            client += [f"127.0.0.1:{options.port}", "--secret-file", str(self._secret)]
            client += ["--parent-pid", str(os.getpid())]
            beside = log_file and log_file.with_name(f"{log_file.stem}-client{log_file.suffix}")
            self.client = part(f"{name}-client", client, beside)

    @property
    def parts(self) -> list[Supervised]:
        return [self.supernode, *([self.client] if self.client is not None else [])]

    @property
    def pid(self) -> int | None:
        return self.supernode.pid

    def has_joined(self) -> bool:
        """Whether the SuperLink has accepted the node since its last start."""
        return self.pid is not None and JOINED in self.supernode.text(since_start=True)

    def is_present(self) -> bool:
        """Whether the node has joined and none of its processes is stopped."""
        found = (part.process for part in self.parts)
        return self.has_joined() and all(one and one.state() == "alive" for one in found)

    def prepare(self) -> None:
        """Make the folder, and a new secret between the SuperNode and its client."""
        self._home.mkdir(parents=True, exist_ok=True)
        if self.options.warm:
            write_secret(self._secret, os.urandom(32))

    def start(self) -> None:
        self.prepare()
        for part in self.parts:
            part.start()

    def stop(self) -> None:
        for part in reversed(self.parts):
            part.stop()


def supernode_command(options: NodeOptions, secret: Path) -> list[str]:
    """The command line of a SuperNode; `secret` authenticates the client of a warm one."""
    if options.warm:
        command = [sys.executable, "-m", "latecomer.deploy.warm", "supernode"]
        command += ["--parent-pid", str(os.getpid())]
        command += ["--isolation", "process", "--superexec-auth-secret-file", str(secret)]
    else:
        command = [flower_command("flower-supernode")]
    command += ["--superlink", options.superlink]
    command += ["--host", "127.0.0.1", "--port", str(options.port)]
    if options.insecure:
        command += ["--insecure"]
    if options.root_certificates is not None:
        command += ["--root-certificates", str(options.root_certificates)]
    if options.key is not None:
        command += ["--auth-supernode-private-key", str(options.key)]
    if options.trusted_entities is not None:
        command += ["--trusted-entities", str(options.trusted_entities)]
    if options.config:
        command += ["--node-config", options.config]
    return command


def config_text(values: Mapping[str, Value]) -> str:
    """Values in the form of Flower's command line: key=value pairs, texts in quotes."""

    def shown(value: Value) -> str:
        if isinstance(value, bool):
            return str(value).lower()
        if isinstance(value, str) and ('"' in value or "\n" in value):
            raise BadInput(f"{value!r}: a text with quotes or line breaks cannot be passed on")
        return f'"{value}"' if isinstance(value, str) else repr(value)

    return " ".join(f"{key}={shown(value)}" for key, value in values.items())


def warm_if_tested(requested: bool) -> bool:
    """Whether nodes are warm: requested, and tested with the installed Flower (else a warning)."""
    version = flower_version()
    if requested and not is_known(version):
        log.warning(
            "warm nodes are not tested with flwr %s: stock nodes are used, "
            "which take some seconds more for every task",
            version,
        )
    return requested and is_known(version)


def free_ports(count: int) -> list[int]:
    """Different ports of loopback on which no process listens."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [int(one.getsockname()[1]) for one in sockets]
