"""The server app; it runs until there is a file `stop` in its folder."""

from pathlib import Path

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from latecomer import Server, build_strategy
from latecomer.core.checks import Checks
from latecomer.core.messages import TrainSpec
from latecomer.device.networks import Networks
from latecomer.engines.flower import GridTransport
from latecomer.engines.transport import Timeouts
from latecomer.engines.virtual import Bounds
from latecomer.study.deployed import Deployment
from light.task import model

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    config = context.run_config
    network, seed = model(int(config["hidden"])), int(config["seed"])
    folder = Path(str(config["folder"]))
    spec = TrainSpec(local_epochs=1, batch_size=8, lr=0.01)
    checks = Checks(max_examples=int(config["most-examples"]))
    server = Server(network.init(seed), build_strategy("fedasync", {}), spec, checks, seed=seed)
    transport = GridTransport(grid)

    def after(server: Server) -> None:
        if (folder / "stop").exists():
            server.stopped = "asked to"

    # A node with a key can reconnect unnoticed: it is probed sooner than by default.
    timeouts = Timeouts(probe=float(config["probe"]))
    run = Deployment(server, transport, folder, Networks(network), timeouts, on_commit=after)
    try:
        reason = run.run(Bounds())
    finally:
        transport.close()
    print(f"ended by {reason}: {server.accepted} updates, {server.store.commits} versions")
