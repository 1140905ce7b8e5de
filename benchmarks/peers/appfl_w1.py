"""W1 in APPFL: FedAsync in its virtual-time simulator (appfl.vsim)."""

import logging
import sys
import types
from importlib.metadata import version
from pathlib import Path

import numpy as np
import torch
import w1

try:
    import piq  # noqa: F401
except ImportError:
    # Image quality scores, unused here; the package needs torchvision.
    sys.modules["piq"] = types.ModuleType("piq")

from appfl.agent import SimClientAgent, SimServerAgent
from appfl.vsim import AsyncSimDriver, ClientProfile

HERE = Path(__file__).resolve()
MODEL = {"model_path": w1.__file__, "model_name": "mlp"}
TRAIN = {
    "trainer": "VanillaTrainer",
    "mode": "epoch",
    "num_local_epochs": w1.EPOCHS,
    "optim": "SGD",
    "optim_args": {"lr": w1.LR, "momentum": w1.MOMENTUM},
    "loss_fn": "CrossEntropyLoss",
    "metric_path": str(HERE),
    "metric_name": "hits",
    "train_batch_size": w1.BATCH,
    "do_validation": False,
    "device": "cpu",
    "logging_output_filename": "",
    # Otherwise a full garbage collection runs several times per update.
    "optimize_memory": False,
    # Said in full: OmegaConf is slow on keys that are not there.
    "clip_grad": False,
    "use_dp": False,
    "send_gradient": False,
    "do_pre_validation": False,
}


def hits(y_true, y_pred):
    """The metric APPFL's trainer insists on."""
    return float((y_pred.argmax(1) == y_true).mean())


class Driver(AsyncSimDriver):
    """Counts finished updates; the loop ends when the meter is done."""

    def _training_finished(self):
        return self.meter.done

    def _handle_train_complete(self, cid, completion_time):
        super()._handle_train_complete(cid, completion_time)
        self.meter.add()


def main() -> None:
    logging.disable(logging.CRITICAL)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    data = w1.make_w1(0)
    server = SimServerAgent(
        {
            "client_configs": {"model_configs": MODEL, "train_configs": TRAIN},
            "server_configs": {
                "device": "cpu",
                "logging_output_dirname": "",
                "logging_output_filename": "",
                "num_clients": w1.DEVICES,
                "num_global_epochs": 10**6,
                "scheduler": "AsyncScheduler",
                "scheduler_kwargs": {"same_init_model": True, "optimize_memory": False},
                "aggregator": "FedAsyncAggregator",
                "aggregator_kwargs": {
                    "alpha": 0.6 * w1.DEVICES,  # APPFL divides it by the number of clients
                    "staleness_fn": "polynomial",
                    "staleness_fn_kwargs": {"a": 0.5},
                    "gradient_based": False,
                    "optimize_memory": False,
                },
                "optimize_memory": False,
            },
        }
    )
    clients = [
        SimClientAgent(
            {
                "model_configs": MODEL,
                "train_configs": {**TRAIN, "use_secure_agg": False},
                "optimize_memory": False,
            },
            client_id=f"c{i}",
            client_dataset=torch.utils.data.TensorDataset(x, y),
        )
        for i, (x, y) in enumerate(data)
    ]
    rng = np.random.default_rng(0)
    profiles = {c.get_id(): ClientProfile(float(rng.uniform(0.5, 5.0))) for c in clients}
    log = logging.getLogger("w1")
    driver = Driver(server, clients, profiles, w1.DEVICES, log, seed=0, base_step_time=0.01)
    driver.meter = meter = w1.Meter(warmup=100, updates=600)
    driver.run()
    accuracy = w1.accuracy(server.model, data)
    meter.report(
        "APPFL FedAsync",
        version("appfl"),
        "asynchronous, 100 in flight, speeds 0.5-5; its trainer with DataLoader, no workers, "
        f"optimize_memory off, all keys set, validation and log off; accuracy {accuracy:.2f}",
    )


if __name__ == "__main__":
    main()
