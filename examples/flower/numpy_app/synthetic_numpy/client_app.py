"""The client app: arrays in, arrays out, no framework."""

from flwr.app import Array, ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from synthetic_numpy.task import loss_and_accuracy, node_data
from synthetic_numpy.task import train as train_fn

app = ClientApp()


def data_of(context: Context):
    config = context.run_config
    partition = int(context.node_config["partition-id"])
    return node_data(partition, float(config["alpha"]), float(config["beta"]))


def model_of(msg: Message):
    return {name: array.numpy() for name, array in msg.content["arrays"].items()}


@app.train()
def train(msg: Message, context: Context) -> Message:
    (x, y), _ = data_of(context)
    epochs = int(context.run_config["local-epochs"])
    model = train_fn(model_of(msg), x, y, epochs, float(msg.content["config"]["lr"]))
    metrics = {"train_loss": loss_and_accuracy(model, x, y)[0], "num-examples": len(y)}
    arrays = ArrayRecord({name: Array(value) for name, value in model.items()})
    content = RecordDict({"arrays": arrays, "metrics": MetricRecord(metrics)})
    return Message(content=content, reply_to=msg)


@app.evaluate()
def evaluate(msg: Message, context: Context) -> Message:
    _, (x, y) = data_of(context)
    loss, accuracy = loss_and_accuracy(model_of(msg), x, y)
    metrics = {"loss": loss, "accuracy": accuracy, "num-examples": len(y)}
    return Message(content=RecordDict({"metrics": MetricRecord(metrics)}), reply_to=msg)
