"""The client app."""

from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from sklearn.metrics import log_loss

from cancer_sklearn.task import CLASSES, get_params, load_data, new_model, set_params

app = ClientApp()


def data_of(context: Context):
    node = context.node_config
    return load_data(int(node["partition-id"]), int(node["num-partitions"]))


def model_of(msg: Message, context: Context):
    model = new_model(str(context.run_config["penalty"]))
    return set_params(model, msg.content["arrays"].to_numpy_ndarrays())


@app.train()
def train(msg: Message, context: Context) -> Message:
    (x, y), _ = data_of(context)
    model = model_of(msg, context)
    for _ in range(int(context.run_config["local-epochs"])):
        model.partial_fit(x, y, classes=CLASSES)
    loss = log_loss(y, model.predict_proba(x), labels=CLASSES)
    content = RecordDict(
        {
            "arrays": ArrayRecord(get_params(model)),
            "metrics": MetricRecord({"train_loss": float(loss), "num-examples": len(y)}),
        }
    )
    return Message(content=content, reply_to=msg)


@app.evaluate()
def evaluate(msg: Message, context: Context) -> Message:
    _, (x, y) = data_of(context)
    model = model_of(msg, context)
    metrics = {
        "test_logloss": float(log_loss(y, model.predict_proba(x), labels=CLASSES)),
        "accuracy": float(model.score(x, y)),
        "num-examples": len(y),
    }
    return Message(content=RecordDict({"metrics": MetricRecord(metrics)}), reply_to=msg)
