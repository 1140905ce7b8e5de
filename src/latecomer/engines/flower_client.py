"""A Flower `ClientApp` for devices of a deployment. Needs the extra `flower`."""

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor

from latecomer.device.flat import FlatModel
from latecomer.device.networks import Networks
from latecomer.device.privacy import Privacy
from latecomer.engines.agent import Agent
from latecomer.engines.flower import from_records, to_records
from latecomer.engines.wire import NAME
from latecomer.errors import BadInput

if TYPE_CHECKING:
    from flwr.app import Context, Message
    from flwr.clientapp import ClientApp

STATE_VARIABLE = "LATECOMER_STATE"


def client_app(
    model: Callable[[], FlatModel | Networks],
    load_data: Callable[["Context"], tuple[Tensor, Tensor]],
    privacy: Privacy | None = None,
    state: Path | None = None,
) -> "ClientApp":
    """What runs on every device: `load_data` gives its examples and labels.

    The device is called `device-id` in its node-config; a simulation's partition will do. What it
    keeps lies in a folder of that name under `state` (else $LATECOMER_STATE, else
    ~/.latecomer/devices). `width` in the node-config is what it can carry of the model, and `delay`
    the seconds by which it answers later than it could, to try out a slow one.

    Where the process stays (a warm node), the data are loaded once for a run.
    """
    from flwr.app import Message
    from flwr.clientapp import ClientApp

    app = ClientApp()
    loaded: dict[tuple[int, str], tuple[Tensor, Tensor]] = {}

    def data(context: "Context", name: str) -> tuple[Tensor, Tensor]:
        key = (context.run_id, name)
        found = loaded.get(key)
        if found is None:
            found = load_data(context)
            loaded.clear()  # a process of a simulation plays many devices, one after another
            loaded[key] = found
        return found

    def agent(context: "Context") -> Agent:
        name = device_name(context)
        width = float(context.node_config.get("width", 1.0))
        folder = state_folder(state) / name
        return Agent(name, model(), lambda: data(context, name), folder, privacy, width)

    @app.query()  # type: ignore[untyped-decorator, unused-ignore]
    def hello(message: "Message", context: "Context") -> "Message":
        return Message(to_records(agent(context).introduce()), reply_to=message)

    @app.train()  # type: ignore[untyped-decorator, unused-ignore]
    def train(message: "Message", context: "Context") -> "Message":
        answer = agent(context).answer(from_records(message.content))
        time.sleep(float(context.node_config.get("delay", 0.0)))
        return Message(to_records(answer), reply_to=message)

    return app


def device_name(context: "Context") -> str:
    """The stable name of the device behind this node."""
    config = context.node_config
    if "device-id" in config:
        name = str(config["device-id"])
    elif "partition-id" in config:
        name = f"partition-{config['partition-id']}"
    else:
        raise BadInput('the node has no name: start it with --node-config "device-id=NAME"')
    if not NAME.fullmatch(name):
        raise BadInput(f"device-id = {name!r}: allowed are up to 100 letters, digits, . _ and -")
    return name


def state_folder(given: Path | None) -> Path:
    """Where devices keep what outlives them."""
    if given is not None:
        return given
    named = os.environ.get(STATE_VARIABLE)
    return Path(named) if named else Path.home() / ".latecomer" / "devices"
