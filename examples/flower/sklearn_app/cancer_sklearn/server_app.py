"""The server app: synchronous rounds of Flower's FedAvg."""

from flwr.app import ArrayRecord, Context
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg

from cancer_sklearn.task import get_params, new_model

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    model = new_model(str(context.run_config["penalty"]))
    strategy = FedAvg(fraction_train=1.0, fraction_evaluate=1.0)
    result = strategy.start(
        grid=grid,
        initial_arrays=ArrayRecord(get_params(model)),
        num_rounds=int(context.run_config["num-server-rounds"]),
    )
    print(result.evaluate_metrics_clientapp)
