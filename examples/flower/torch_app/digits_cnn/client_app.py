"""The client app: trains and tests the network on the data of one node."""

import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from digits_cnn.data import load_data
from digits_cnn.model import Net
from digits_cnn.train import test as test_fn
from digits_cnn.train import train as train_fn

DEVICE = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")

app = ClientApp()


def node_data(context: Context):
    return load_data(
        int(context.node_config["partition-id"]),
        int(context.node_config["num-partitions"]),
        int(context.run_config["batch-size"]),
        float(context.run_config["alpha"]),
    )


def network(msg: Message, context: Context) -> Net:
    net = Net(float(context.run_config["dropout"]))
    net.load_state_dict(msg.content["arrays"].to_torch_state_dict())
    return net


@app.train()
def train(msg: Message, context: Context) -> Message:
    """Train the received model; the number of tasks done is kept in the state of the node."""
    net = network(msg, context)
    loader, _ = node_data(context)
    history = context.state.setdefault("history", ConfigRecord({"tasks": 0}))
    # The learning rate falls with the tasks that this node has done.
    lr = float(msg.content["config"]["lr"]) * 0.98 ** int(history["tasks"])
    loss = train_fn(net, loader, int(context.run_config["local-epochs"]), lr, DEVICE)
    history["tasks"] = int(history["tasks"]) + 1
    metrics = {"train_loss": loss, "num-examples": len(loader.dataset)}
    content = RecordDict(
        {"arrays": ArrayRecord(net.state_dict()), "metrics": MetricRecord(metrics)}
    )
    return Message(content=content, reply_to=msg)


@app.evaluate()
def evaluate(msg: Message, context: Context) -> Message:
    net = network(msg, context)
    _, loader = node_data(context)
    loss, accuracy = test_fn(net, loader, DEVICE)
    metrics = {"eval_loss": loss, "eval_acc": accuracy, "num-examples": len(loader.dataset)}
    return Message(content=RecordDict({"metrics": MetricRecord(metrics)}), reply_to=msg)
