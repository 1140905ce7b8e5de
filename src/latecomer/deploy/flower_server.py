"""The server side of a local federation: a SuperLink and the executor of server apps."""

import json
import os
import ssl
import urllib.request
from collections.abc import Callable, Mapping
from pathlib import Path

from latecomer.deploy.certificates import certificate_files, make_certificates, write_secret
from latecomer.deploy.environment import flower_command, flower_environment
from latecomer.deploy.supervised import BackOff, Supervised

NAME = "local"  # of the SuperLink in the configuration of `flwr`
SUPERLINK = "superlink"  # its process


class FlowerServer:
    """A SuperLink on loopback with a database, and a SuperExec for its apps; both supervised.

    `prepare` writes the files that the two processes need; the constructor writes nothing.
    `on_change` is called whenever one of the processes starts or ends.
    """

    def __init__(
        self,
        folder: Path,
        port: int,
        tls: bool,
        environment: Mapping[str, str],
        on_change: Callable[[], None] = lambda: None,
    ) -> None:
        self.folder, self.address = folder, f"127.0.0.1:{port}"
        self.certificates = certificate_files(folder / "certificates") if tls else None
        self.database = folder / "superlink.db"
        self._home, self._secret = folder / "flower", folder / "executor-secret"
        self.environment = flower_environment({**environment, "FLWR_HOME": str(self._home)})

        def service(name: str, command: list[str]) -> Supervised:
            log_file, back_off = folder / "logs" / f"{name}.log", BackOff(first=1.0, longest=10.0)
            return Supervised(
                name, command, log_file, self.environment, folder, back_off, on_change
            )

        self.superlink = service(SUPERLINK, self._superlink_command())
        self.superexec = service("superexec", self._superexec_command())

    def prepare(self) -> None:
        """Write certificates, the executor's secret and the configuration of `flwr`.

        Existing certificates and secrets are kept. The database, which has tokens and the content
        of messages, is created here for its owner only; SQLite's other files get its mode.
        """
        self.database.touch(mode=0o600)
        self.database.chmod(0o600)
        if self.certificates is not None:
            make_certificates(self.certificates.authority.parent)
        if not self._secret.exists():
            write_secret(self._secret, os.urandom(32))
        lines = ["[superlink]", f'default = "{NAME}"', f"[superlink.{NAME}]"]
        lines += [f"address = {json.dumps(self.address)}"]
        if self.certificates is None:
            lines += ["insecure = true"]
        else:
            lines += [f"root-certificates = {json.dumps(str(self.certificates.authority))}"]
        self._home.mkdir(exist_ok=True)
        (self._home / "config.toml").write_text("\n".join(lines) + "\n", encoding="utf-8")

    @property
    def has_runs(self) -> bool:
        """Whether the database is that of an earlier federation."""
        return self.database.exists() and self.database.stat().st_size > 0

    def is_healthy(self) -> bool:
        """Whether the SuperLink answers."""
        context = None
        if self.certificates is not None:
            context = ssl.create_default_context(cafile=str(self.certificates.authority))
        url = f"{'http' if self.certificates is None else 'https'}://{self.address}/health"
        # Without the proxies of the environment, which do not reach loopback.
        opener = urllib.request.build_opener(
            urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=context)
        )
        try:
            with opener.open(url, timeout=2.0) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False

    def _superlink_command(self) -> list[str]:
        host, _, port = self.address.partition(":")
        command = [flower_command("flower-superlink"), "--host", host, "--port", port]
        command += ["--database", str(self.database), "--isolation", "process"]
        command += ["--superexec-auth-secret-file", str(self._secret)]
        if self.certificates is None:
            return [*command, "--insecure"]
        command += ["--ssl-ca-certfile", str(self.certificates.authority)]
        command += ["--ssl-certfile", str(self.certificates.certificate)]
        return [*command, "--ssl-keyfile", str(self.certificates.key), "--enable-supernode-auth"]

    def _superexec_command(self) -> list[str]:
        command = [flower_command("flower-superexec"), "--runtime-api-address", self.address]
        command += ["--superexec-auth-secret-file", str(self._secret)]
        command += ["--parent-pid", str(os.getpid())]
        if self.certificates is None:
            return [*command, "--insecure"]
        return [*command, "--root-certificates", str(self.certificates.authority)]
