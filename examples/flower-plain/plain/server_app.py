"""The server app: `serve` in place of `strategy.start(...)`."""

from pathlib import Path

import torch
from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from latecomer import Server, build_strategy
from latecomer.core.messages import TrainSpec
from latecomer.device.flat import FlatModel
from latecomer.device.networks import Networks
from latecomer.engines.flower import GridTransport
from latecomer.engines.plain import PlainFlowerCodec
from latecomer.engines.virtual import Bounds
from latecomer.study.deployed import serve
from plain.task import Net, test_data

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    config = context.run_config
    network = FlatModel(Net, input_shape=(64,), num_classes=10)
    spec = TrainSpec(int(config["local-epochs"]), lr=float(config["learning-rate"]))
    server = Server(network.init(1), build_strategy(str(config["strategy"])), spec)
    reason = serve(
        GridTransport(grid),
        server,
        Path(str(config["folder"])),
        Bounds(updates=int(config["updates"])),
        Networks(network),
        codec=PlainFlowerCodec(network.layout),
    )
    x, y = test_data()
    with torch.no_grad():
        right = network.logits(server.store.head_params(), x).argmax(1) == y
    print(f"ended by {reason}: {server.accepted} updates, {server.store.commits} versions")
    print(f"accuracy {right.float().mean().item():.3f}")
