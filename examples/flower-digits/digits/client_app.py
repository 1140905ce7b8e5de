"""The client app, which runs on every device."""

from flwr.app import Context
from torch import Tensor

from digits.task import model, part
from latecomer import client_app


def load_data(context: Context) -> tuple[Tensor, Tensor]:
    config = context.node_config
    return part(int(config["partition-id"]), int(config["num-partitions"]))


app = client_app(model, load_data)
