"""The Flower `ClientApp` of devices that run Latecomer. Needs the extra `flower`."""

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor

from latecomer.device.flat import FlatModel
from latecomer.device.limits import Limits
from latecomer.device.networks import Networks
from latecomer.device.own_training import TrainFunction
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
    train: TrainFunction | None = None,
) -> "ClientApp":
    """A ClientApp that performs Latecomer's tasks on one device.

    model: makes the network, or the networks of all sub-model widths.
    load_data: gives the device's examples and labels; called once per run in a permanent process.
    privacy: noise and budget of the device; None: none.
    state: folder of the device states; None: $LATECOMER_STATE, else ~/.latecomer/devices.
    train: your own local training, train(model, dataset, context); its `context.config` is the
        run-config of the Flower app.

    Read from the node-config: `device-id`, the name of the device and of its state folder (in
    Flower's simulation `partition-id` instead); `width`, its sub-model width (default 1);
    `delay`, seconds added to every reply, to imitate a slow device (default 0); `max-epochs`,
    `max-steps`, `max-bytes`, `max-tasks-per-day`: tasks beyond them are refused (`Limits`).
    """
    from flwr.app import Message
    from flwr.clientapp import ClientApp

    app, own_training = ClientApp(), train
    vars(app)["follows_delay"] = True  # warm nodes delay the replies of other apps
    loaded: dict[tuple[int, str], tuple[Tensor, Tensor]] = {}

    def data(context: "Context", name: str) -> tuple[Tensor, Tensor]:
        key = (context.run_id, name)
        found = loaded.get(key)
        if found is None:
            found = load_data(context)
            loaded.clear()  # a process of Flower's simulation runs many devices, one after another
            loaded[key] = found
        return found

    def agent(context: "Context") -> Agent:
        name = device_name(context)
        width = float(context.node_config.get("width", 1.0))
        folder = state_folder(state) / name
        return Agent(
            name, model(), lambda: data(context, name), folder, privacy, width, own_training,
            dict(context.run_config), Limits.of(context.node_config),
        )  # fmt: skip

    @app.query()  # type: ignore[untyped-decorator, unused-ignore]
    def introduce(message: "Message", context: "Context") -> "Message":
        return Message(to_records(agent(context).introduce()), reply_to=message)

    @app.train()  # type: ignore[untyped-decorator, unused-ignore]
    def perform(message: "Message", context: "Context") -> "Message":
        reply = agent(context).answer(from_records(message.content))
        time.sleep(float(context.node_config.get("delay", 0.0)))
        return Message(to_records(reply), reply_to=message)

    return app


def device_name(context: "Context") -> str:
    """The name of the device, from its node-config; the same after a restart."""
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
    """The folder of the device states."""
    if given is not None:
        return given
    named = os.environ.get(STATE_VARIABLE)
    return Path(named) if named else Path.home() / ".latecomer" / "devices"
