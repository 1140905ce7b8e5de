"""The client app: Flower's template, without Latecomer."""

from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from plain.task import Net, load_data
from plain.task import train as train_fn

app = ClientApp()


@app.train()
def train(msg: Message, context: Context) -> Message:
    net = Net()
    net.load_state_dict(msg.content["arrays"].to_torch_state_dict())
    config = context.node_config
    loader = load_data(int(config["partition-id"]), int(config["num-partitions"]))
    epochs = int(context.run_config["local-epochs"])
    loss = train_fn(net, loader, epochs, float(msg.content["config"]["lr"]))
    content = RecordDict(
        {
            "arrays": ArrayRecord(net.state_dict()),
            "metrics": MetricRecord({"train_loss": loss, "num-examples": len(loader.dataset)}),
        }
    )
    return Message(content=content, reply_to=msg)
