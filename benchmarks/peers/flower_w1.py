"""W1 in Flower's Ray simulation: 100 nodes, push/pull messages, FedAsync merge."""

import collections
import functools
import logging
import os
import time
from importlib.metadata import version

os.environ.setdefault("FLWR_TELEMETRY_ENABLED", "0")
os.environ.setdefault("RAY_DEDUP_LOGS", "0")

import psutil
import torch
import w1  # sets one thread in the environment, which Ray's worker inherits
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.simulation import run_simulation

ALPHA = 0.6
IN_FLIGHT = 20  # Flower scans all open messages for every node, so more of them cost more
client_app = ClientApp()
server_app = ServerApp()
result = {}


@functools.cache
def device_data():
    """The data of all devices and one model, made once per Ray worker."""
    torch.set_num_threads(1)
    return w1.make_w1(0), w1.mlp()


@client_app.train()
def train(message: Message, context: Context) -> Message:
    data, model = device_data()
    x, y = data[int(context.node_config["partition-id"])]
    model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    w1.train(model, x, y)
    content = {
        "arrays": ArrayRecord(model.state_dict()),
        "metrics": MetricRecord({"num-examples": len(y)}),
    }
    return Message(RecordDict(content), reply_to=message)


def tree_cpu_seconds() -> float:
    """CPU time of this process and of all that Ray started: store, scheduler, workers."""
    total = 0.0
    me = psutil.Process()
    for process in [me, *me.children(recursive=True)]:
        try:
            used = process.cpu_times()
        except psutil.NoSuchProcess:
            continue
        total += used.user + used.system
    return total


@server_app.main()
def main(grid: Grid, context: Context) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = w1.mlp()
    state = model.state_dict()
    meter = w1.Meter(warmup=2 * w1.DEVICES, updates=600, cpu=tree_cpu_seconds)

    def send(nodes) -> None:
        record = RecordDict({"arrays": ArrayRecord(state)})
        waiting.update(grid.push_messages([Message(record, node, "train") for node in nodes]))

    waiting: set[str] = set()
    while len(list(grid.get_node_ids())) < w1.DEVICES:
        time.sleep(0.1)
    idle = collections.deque(grid.get_node_ids())
    send([idle.popleft() for _ in range(IN_FLIGHT)])
    while not meter.done:
        replies = list(grid.pull_messages(waiting))
        for reply in replies:
            waiting.discard(reply.metadata.reply_to_message_id)
            local = reply.content["arrays"].to_torch_state_dict()
            for name, value in state.items():
                value.lerp_(local[name], ALPHA)
            idle.append(reply.metadata.src_node_id)
            send([idle.popleft()])
            meter.add()
        if not replies:
            time.sleep(0.05)
    result["meter"] = meter
    result["accuracy"] = w1.accuracy(model, w1.make_w1(0))


def run() -> None:
    logging.getLogger("flwr").setLevel(logging.ERROR)
    run_simulation(
        server_app,
        client_app,
        num_supernodes=w1.DEVICES,
        backend_config={
            "init_args": {"num_cpus": 1, "log_to_driver": False, "logging_level": "error"},
            "client_resources": {"num_cpus": 1, "num_gpus": 0},
        },
    )
    result["meter"].report(
        "Flower Ray",
        version("flwr"),
        f"push/pull with FedAsync merge, {IN_FLIGHT} of 100 nodes in flight, one Ray worker; "
        "CPU time of the whole process tree; data cached in the worker, eager loop; "
        f"accuracy {result['accuracy']:.2f}",
    )


if __name__ == "__main__":
    # Run as an imported module, so that Ray's worker loads the app by name, once.
    import flower_w1

    flower_w1.run()
