"""A supervised SuperNode: the stock one, or a warm one with its client beside it."""

import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from latecomer.deploy.certificates import write_secret
from latecomer.deploy.environment import flower_command, flower_environment
from latecomer.deploy.processes import Process
from latecomer.deploy.supervised import BackOff, Supervised
from latecomer.errors import BadInput

# The SuperLink refuses a node that died until it has missed it for a while, up to a minute: try on.
NODE_BACK_OFF = BackOff(first=1.0, longest=8.0, healthy=60.0)
JOINED = "SuperNode ID:"

Value = str | int | float | bool


@dataclass(frozen=True, slots=True)
class NodeOptions:
    """What a node is told: where its SuperLink is, who it is, and what its app should know."""

    superlink: str
    port: int
    config: str = ""  # pairs, as in `config_text`
    root_certificates: Path | None = None
    key: Path | None = None
    warm: bool = False
    insecure: bool = False


class Node:
    """One device of a federation, kept running."""

    def __init__(
        self,
        name: str,
        options: NodeOptions,
        folder: Path,
        log_file: Path | None,
        environment: Mapping[str, str],
        changed: Callable[[], None] = lambda: None,
    ) -> None:
        """`folder` is its own: Flower's files of this node, what its device keeps, its secret.

        Without a log file it writes where its supervisor does.
        """
        self.name, self.options = name, options
        folder.mkdir(parents=True, exist_ok=True)
        own = {"FLWR_HOME": str(folder / "flower"), "LATECOMER_STATE": str(folder / "state")}
        (folder / "flower").mkdir(exist_ok=True)
        environment = flower_environment({**own, **environment})
        secret = folder / "executor-secret"
        if options.warm:
            write_secret(secret, os.urandom(32))

        def part(called: str, command: list[str], file: Path | None) -> Supervised:
            return Supervised(called, command, file, environment, folder, NODE_BACK_OFF, changed)

        self.supernode = part(name, supernode_command(options, secret), log_file)
        self.client: Supervised | None = None
        if options.warm:
            client = [sys.executable, "-m", "latecomer.deploy.warm", "client"]
            client += [f"127.0.0.1:{options.port}", "--secret-file", str(secret)]
            client += ["--parent-pid", str(os.getpid())]
            beside = log_file and log_file.with_name(f"{log_file.stem}-client{log_file.suffix}")
            self.client = part(f"{name}-client", client, beside)

    @property
    def parts(self) -> list[Supervised]:
        return [self.supernode, *([self.client] if self.client is not None else [])]

    @property
    def pid(self) -> int | None:
        return self.supernode.pid

    @property
    def processes(self) -> list[Process]:
        return [part.process for part in self.parts if part.process is not None]

    def has_joined(self) -> bool:
        """Whether the SuperLink has taken it in since its last start."""
        return self.pid is not None and JOINED in self.supernode.text(since_start=True)

    def start(self) -> None:
        for part in self.parts:
            part.start()

    def kill(self) -> int:
        """`kill -9` of the SuperNode; it will be started again."""
        return self.supernode.kill()

    def stop(self) -> None:
        for part in reversed(self.parts):
            part.stop()

    def log(self) -> str:
        return "".join(part.text() for part in self.parts)


def supernode_command(options: NodeOptions, secret: Path) -> list[str]:
    """How the SuperNode is started; the executor of a warm one knows the secret."""
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
    if options.config:
        command += ["--node-config", options.config]
    return command


def config_text(values: Mapping[str, Value]) -> str:
    """Values as Flower's command line takes them: key=value, texts in quotes."""

    def shown(value: Value) -> str:
        if isinstance(value, bool):
            return str(value).lower()
        if isinstance(value, str) and ('"' in value or "\n" in value):
            raise BadInput(f"{value!r}: a text with quotes or line breaks cannot be passed on")
        return f'"{value}"' if isinstance(value, str) else repr(value)

    return " ".join(f"{key}={shown(value)}" for key, value in values.items())
