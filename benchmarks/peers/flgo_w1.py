"""W1 in FLGo: its FedAsync in its virtual-time simulator.

FLGo's FedAsync client adds a proximal term to the loss; `plain` as the only
argument takes FLGo's basic client instead, which trains exactly as W1 says.
"""

import os
import sys
import tempfile
import warnings
from importlib.metadata import version
from pathlib import Path

warnings.filterwarnings("ignore")

import flgo  # noqa: E402
import flgo.algorithm.fedasync as fedasync  # noqa: E402
import torch  # noqa: E402
from flgo.algorithm.fedbase import BasicClient  # noqa: E402
from w1 import BATCH, DEVICES, EPOCHS, LR, MOMENTUM, Meter, accuracy, make_w1  # noqa: E402


class FedAsyncPlain:
    class Server(fedasync.Server):
        pass

    class Client(BasicClient):
        pass


def main() -> None:
    plain = sys.argv[1:] == ["plain"]
    sys.argv = sys.argv[:1]  # FLGo reads the command line too
    torch.set_num_threads(1)
    config = Path(__file__).with_name("flgo_task.py")
    meter = Meter(warmup=2 * DEVICES, updates=600)
    with tempfile.TemporaryDirectory() as folder:
        home = os.getcwd()
        os.chdir(folder)  # FLGo imports the task relative to the working folder
        sys.path.insert(0, folder)
        flgo.gen_direct_task_from_file("task", str(config))
        server = flgo.init(
            "task",
            FedAsyncPlain if plain else fedasync,
            {
                "num_epochs": EPOCHS,
                "batch_size": BATCH,
                "learning_rate": LR,
                "momentum": MOMENTUM,
                "proportion": 1.0,
                "sample": "full_available",
                "responsiveness": "UNI-50-150",
                "train_holdout": 0.0,
                "eval_interval": -1,
                "log_level": "ERROR",
                "no_log_console": True,
                "no_tqdm": True,
                "torch_num_threads": 1,
                "num_parallels": 1,
            },
        )
        handle = server.package_handler

        def counted(packages):
            updated = handle(packages)
            meter.add(len(packages["__cid"]))
            return updated

        server.package_handler = counted
        server.register_exit_condition(lambda _: meter.done)
        server.run()
        os.chdir(home)
    client = "basic client" if plain else "its client with the proximal term"
    meter.report(
        "FLGo FedAsync" + (" (basic client)" if plain else ""),
        version("flgo"),
        f"asynchronous, 100 in flight, latency 50-150 ticks, {client}; tensor loader instead of "
        f"DataLoader, evaluation and log off; accuracy {accuracy(server.model, make_w1(0)):.2f}",
    )


if __name__ == "__main__":
    main()
