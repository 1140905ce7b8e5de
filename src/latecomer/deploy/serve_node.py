"""`latecomer deploy node`: one supervised node in the foreground, as a service runs it."""

import logging
import os
import re
import signal
import threading
from pathlib import Path

from latecomer.deploy.environment import flower_version
from latecomer.deploy.local import free_ports, warm_warning
from latecomer.deploy.node import Node, NodeOptions
from latecomer.deploy.warm import is_known
from latecomer.errors import BadInput

log = logging.getLogger(__name__)

PAIR = re.compile(r"""([A-Za-z][\w-]*)=("[^"]*"|'[^']*'|[^\s"']+)""")


def serve_node(
    superlink: str,
    root_certificates: Path | None,
    key: Path | None,
    node_config: str,
    warm: bool,
    insecure: bool,
    port: int,
    folder: Path | None,
) -> None:
    """Keep a node running until a signal ends it; then it leaves the federation in good order."""
    config = read_config(node_config)
    host, colon, number = superlink.rpartition(":")
    has_port = bool(colon) and number.isdigit() and 0 < int(number) < 65536
    if not host or "/" in host or not has_port:
        raise BadInput(f"--superlink {superlink!r}: write it as HOST:PORT, without https://")
    for option, path in (("--root-certificates", root_certificates), ("--key", key)):
        if path is not None and not path.is_file():
            raise BadInput(f"{option} {path}: no such file")
    if insecure and (key is not None or root_certificates is not None):
        raise BadInput("--insecure is without TLS: it takes no --key and no --root-certificates")
    known = is_known(flower_version())
    if warm and not known:
        log.warning("%s", warm_warning())
    name = config.get("device-id", f"port-{port}" if port else "node")
    folder = folder or Path.home() / ".latecomer" / "nodes" / re.sub(r"[^\w.-]", "_", name)
    options = NodeOptions(
        superlink,
        port or free_ports(1)[0],
        node_config.strip(),
        root_certificates.resolve() if root_certificates else None,
        key.resolve() if key else None,
        warm and known,
        insecure,
    )
    # What a device keeps, its privacy ledger among it, does not depend on how its node is run.
    state = os.environ.get("LATECOMER_STATE", str(Path.home() / ".latecomer" / "devices"))
    home = os.environ.get("FLWR_HOME", str(folder.resolve() / "flower"))
    node = Node(
        name, options, folder.resolve(), None, {"LATECOMER_STATE": state, "FLWR_HOME": home}
    )
    done = threading.Event()
    for one in (signal.SIGINT, signal.SIGTERM):
        signal.signal(one, lambda number, frame: done.set())
    node.start()
    try:
        done.wait()
    finally:
        node.stop()


def read_config(text: str) -> dict[str, str]:
    """The pairs of a node-config, as texts; BadInput if Flower would not understand it."""
    if PAIR.sub("", text).strip():
        raise BadInput(
            f"--node-config {text!r}: write pairs with blanks between them, texts in quotes: "
            "'device-id=\"kitchen\" partition-id=0'"
        )
    return {key: value.strip("\"'") for key, value in PAIR.findall(text)}
