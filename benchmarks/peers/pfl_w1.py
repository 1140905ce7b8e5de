"""W1 in Apple's pfl: synchronous FedAvg in the simulated backend."""

import logging
from importlib.metadata import version

import numpy as np
import torch
from pfl.aggregate.simulate import SimulatedBackend
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.callback.base import TrainingProcessCallback
from pfl.data.federated_dataset import FederatedDataset
from pfl.data.pytorch import PyTorchTensorDataset
from pfl.data.sampling import get_user_sampler
from pfl.hyperparam import NNEvalHyperParams, NNTrainHyperParams
from pfl.metrics import Metrics, Weighted
from pfl.model.pytorch import PyTorchModel
from torch import nn
from w1 import BATCH, DEVICES, EPOCHS, LR, MOMENTUM, Meter, accuracy, make_w1, mlp

NOTE = "synchronous FedAvg, cohort 100; tensors in memory, batches cached and not shuffled; "


class Model(nn.Module):
    """The W1 network with the two methods pfl asks for."""

    def __init__(self):
        super().__init__()
        self.net = mlp()
        self.loss_fn = nn.CrossEntropyLoss()

    def forward(self, x):
        return self.net(x)

    def loss(self, x, y):
        return self.loss_fn(self.net(x), y)

    def metrics(self, x, y):
        with torch.no_grad():
            return {"loss": Weighted(self.loss(x, y).item() * len(y), len(y))}


class Count(TrainingProcessCallback):
    def __init__(self, meter):
        self.meter = meter

    def after_central_iteration(self, aggregate_metrics, model, *, central_iteration):
        self.meter.add(DEVICES)
        return self.meter.done, Metrics()


def main() -> None:
    logging.disable(logging.CRITICAL)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    np.random.seed(0)
    data = make_w1(0)
    users = {str(i): PyTorchTensorDataset(xy, user_id=str(i)) for i, xy in enumerate(data)}
    dataset = FederatedDataset(users.get, get_user_sampler("minimize_reuse", list(users)))
    net = Model()
    model = PyTorchModel(
        net,
        lambda parameters, lr: torch.optim.SGD(parameters, lr=lr, momentum=MOMENTUM),
        torch.optim.SGD(net.parameters(), lr=1.0),
    )
    meter = Meter(warmup=DEVICES, updates=10 * DEVICES)
    FederatedAveraging().run(
        algorithm_params=NNAlgorithmParams(
            central_num_iterations=10**6,
            evaluation_frequency=10**6,  # only the first round, which is warm-up
            train_cohort_size=DEVICES,
            val_cohort_size=None,
        ),
        backend=SimulatedBackend(training_data=dataset, val_data=dataset),
        model=model,
        model_train_params=NNTrainHyperParams(
            local_num_epochs=EPOCHS, local_learning_rate=LR, local_batch_size=BATCH
        ),
        model_eval_params=NNEvalHyperParams(local_batch_size=None),
        callbacks=[Count(meter)],
        send_metrics_to_platform=False,
    )
    meter.report(
        "pfl", version("pfl"), NOTE + f"evaluation off; accuracy {accuracy(net, data):.2f}"
    )


if __name__ == "__main__":
    main()
