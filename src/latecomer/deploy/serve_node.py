"""`latecomer deploy node`: one supervised node in the foreground, to be run as a service."""

import os
import re
import signal
import threading
from pathlib import Path

from latecomer.deploy.node import Node, NodeOptions, free_ports, warm_if_tested
from latecomer.device.limits import Limits
from latecomer.errors import BadInput

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
    trusted_entities: Path | None = None,
) -> None:
    """Run a node until SIGINT or SIGTERM, then disconnect it from the SuperLink."""
    config = read_config(node_config)
    Limits.of(config)
    host, colon, number = superlink.rpartition(":")
    has_port = bool(colon) and number.isdigit() and 0 < int(number) < 65536
    if not host or "/" in host or not has_port:
        raise BadInput(f"--superlink {superlink!r}: write it as HOST:PORT, without https://")
    for option, path in (
        ("--root-certificates", root_certificates),
        ("--key", key),
        ("--trusted-entities", trusted_entities),
    ):
        if path is not None and not path.is_file():
            raise BadInput(f"{option} {path}: no such file")
    if insecure and (key is not None or root_certificates is not None):
        raise BadInput("--insecure is without TLS: it takes no --key and no --root-certificates")
    name = config.get("device-id", f"port-{port}" if port else "node")
    folder = folder or Path.home() / ".latecomer" / "nodes" / re.sub(r"[^\w.-]", "_", name)
    options = NodeOptions(
        superlink,
        port or free_ports(1)[0],
        node_config.strip(),
        root_certificates.resolve() if root_certificates else None,
        key.resolve() if key else None,
        warm_if_tested(warm),
        insecure,
        trusted_entities.resolve() if trusted_entities else None,
    )
    # The device state, with the privacy ledger, is found in the same place however a node is run.
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
    """The key=value pairs of a node-config, as texts; BadInput if Flower cannot parse it."""
    if PAIR.sub("", text).strip():
        raise BadInput(
            f"--node-config {text!r}: write pairs with blanks between them, texts in quotes: "
            "'device-id=\"kitchen\" partition-id=0'"
        )
    return {key: value.strip("\"'") for key, value in PAIR.findall(text)}
