"""The server app."""

from pathlib import Path

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from digits.task import accuracy, model
from latecomer import (
    Bounds,
    GridTransport,
    Networks,
    Server,
    TrainSpec,
    build_strategy,
    load,
    serve,
)

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    config, networks = context.run_config, Networks(model())
    seed, folder = int(config["seed"]), Path(str(config["folder"]))
    strategy = build_strategy(str(config["strategy"]), {})
    spec = TrainSpec(local_epochs=2, batch_size=16, lr=0.1)
    server = Server(networks.whole.init(seed), strategy, spec, seed=seed, networks=networks)
    bounds = Bounds(updates=int(config["updates"]))
    reason = serve(
        GridTransport(grid),
        server,
        folder,
        bounds,
        networks,
        evaluate=lambda params: {"accuracy": accuracy(networks.whole, params)},
    )
    print(f"ended by {reason}: {server.accepted} updates, {server.store.commits} versions")
    print(f"accuracy {load(folder).metrics['accuracy'].iloc[-1]:.3f}")
