"""What runs on the server."""

from pathlib import Path

import torch
from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from digits.task import model, test_data
from latecomer import Server, build_strategy
from latecomer.core.messages import TrainSpec
from latecomer.device.networks import Networks
from latecomer.engines.flower import GridPost
from latecomer.engines.virtual import Bounds
from latecomer.study.deployed import serve

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    config, network = context.run_config, model()
    seed, folder = int(config["seed"]), Path(str(config["folder"]))
    strategy = build_strategy(str(config["strategy"]), {})
    spec = TrainSpec(local_epochs=2, batch_size=16, lr=0.1)
    server = Server(network.init(seed), strategy, spec, seed=seed)
    bounds = Bounds(updates=int(config["updates"]))
    reason = serve(GridPost(grid), server, folder, bounds, Networks(network))
    x, y = test_data()
    with torch.no_grad():
        right = network.logits(server.store.head_params(), x).argmax(1) == y
    print(f"ended by {reason}: {server.accepted} updates, {server.store.commits} versions")
    print(f"accuracy {right.float().mean().item():.3f}")
