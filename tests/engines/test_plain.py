"""Flower apps that know nothing of Latecomer take part; what they send is checked like all else."""

import re
from dataclasses import dataclass, replace
from io import BytesIO

import numpy as np
import pytest
import torch

from fake_grid import ToyFederation, ToyNode
from latecomer.core.arrays import ArrayLayout
from latecomer.core.messages import MAIN, Task, TrainSpec
from latecomer.engines.plain import NEAREST, PlainFlowerCodec, needs_of
from latecomer.engines.transport import Delivery
from latecomer.engines.wire import Packed, Payload, pack_one, unpack_one
from latecomer.errors import BadInput
from latecomer.strategies.recipe import recipes
from toy import NETWORK, SIZE, ToyRun, toy_fleet, toy_server

BAD = 2
LAYOUT = NETWORK.layout  # weight (2, 2) and bias (2,)
ARRAYS = ArrayLayout.of({"weight": np.zeros((2, 2), "float32"), "bias": np.zeros(2, "float32")})
PLAIN = [name for name in recipes() if not needs_of(toy_server(name))]


@dataclass
class PlainNode(ToyNode):
    """A client of Flower's template: arrays and num-examples, no name and no key."""

    device: int = 0
    falsify: object = None

    def __call__(self, kind, payload):
        if kind != "train":
            return "the client raised an error: No `query` function registered"
        number = len(self.asked)
        self.asked.append(str(number))
        tensors = {n: unpack_one(p, tuple(p.shape)) for n, p in payload.named.items()}
        task = Task(0, self.device, number, MAIN, 0, TrainSpec(), LAYOUT.flatten(tensors))
        update = self.trainer.update(task)
        trained = LAYOUT.unflatten(task.params + update.delta)
        answer = Payload(
            {},
            {"train_loss": 0.5, "num-examples": update.num_examples},
            named={name: pack_one(tensor) for name, tensor in trained.items()},
        )
        return self.falsify(answer) if self.falsify else answer


def federation(strategy="fedasync", falsify=None, **more):
    nodes = {i: PlainNode(f"toy-{i}", device=i) for i in range(5)}
    nodes[BAD].falsify = falsify
    return ToyFederation(strategy, nodes, codec=PlainFlowerCodec(ARRAYS), **more)


@pytest.mark.parametrize("name", PLAIN)
def test_the_models_are_those_of_the_simulation(name):
    virtual = ToyRun(toy_server(name), toy_fleet())
    virtual.until(60)
    real = federation(name)
    assert real.until(60) == "updates"
    for lineage, head in virtual.heads().items():
        assert real.heads()[lineage] == pytest.approx(head, rel=1e-4, abs=1e-5)
    assert [t for t, kind, _ in real.log if kind == "commit"] == [
        t for t, kind, _ in virtual.log if kind == "commit"
    ]


def test_most_strategies_need_nothing_more():
    assert {"fedasync", "fedbuff", "fedavg", "fedprox", "semi-async", "fadas"} <= set(PLAIN)


@pytest.mark.parametrize("name", sorted(set(recipes()) - set(PLAIN)))
def test_a_strategy_that_needs_more_is_refused_in_one_line(name):
    with pytest.raises(BadInput, match=r"needs .* which a Flower app") as refused:
        federation(name)
    assert "\n" not in str(refused.value)
    assert f"the nearest that does not is {NEAREST[name]};" in str(refused.value)


def test_a_model_of_another_size_is_refused():
    with pytest.raises(BadInput, match="6 values, the layout 3"):
        ToyFederation(codec=PlainFlowerCodec(ArrayLayout.of({"w": np.zeros(3)})))


def test_nodes_are_not_queried():
    run = federation()
    run.until(20)
    assert {kind for _, _, kind in run.transport.sent} == {"train"}
    assert run.lines("introduction")[0] == {"device": 0, "name": "node-0", "width": 1.0}


def test_the_message_has_the_form_of_flowers_strategies():
    spec = TrainSpec(local_epochs=3, batch_size=8, lr=0.2, lr_scale=0.5, prox=0.1)
    codec = PlainFlowerCodec(ARRAYS, {"lr": 0.7, "local-epochs": 1, "mine": "x"}, lambda: 5)
    sent = codec.encode(Task(7, 3, 2, MAIN, 4, spec, torch.arange(6.0)), "k", "r")
    assert sent.fields == {"server-round": 5, "lr": 0.7, "local-epochs": 3, "mine": "x",
                           "proximal-mu": 0.1}  # fmt: skip
    assert {name: p.shape for name, p in sent.named.items()} == {"weight": (2, 2), "bias": (2,)}


def renamed(answer):
    return replace(answer, named={f"module.{n}": p for n, p in answer.named.items()})


def with_arrays(**arrays):
    return lambda answer: replace(answer, named={**answer.named, **arrays})


def with_metrics(**metrics):
    names = {name.replace("_", "-"): value for name, value in metrics.items()}
    return lambda answer: replace(answer, metrics={**answer.metrics, **names})


FAULTS = {
    "other names": (renamed, "'module.bias' is unknown"),
    "one more": (with_arrays(extra=pack_one(torch.ones(2))), "'extra' is unknown"),
    "one less": (lambda a: replace(a, named={"bias": a.named["bias"]}), "'weight' is missing"),
    "nothing": (lambda a: Payload({}), "is missing"),
    "another shape": (with_arrays(weight=pack_one(torch.ones(4))), "'weight': .*shape"),
    "integers": (with_arrays(bias=pack_one(torch.ones(2).long())), "'bias': .*int64"),
    "no bytes": (with_arrays(bias=Packed("float32", (2,), b"")), "do not match its dtype"),
    "too many bytes": (with_arrays(bias=Packed("float32", (2,), b"0" * 5000)), "more bytes"),
    "a pickle": (
        with_arrays(bias=Packed("float32", (2,), b"\x80\x04." * 30)),
        "do not match its dtype",
    ),
    "nan": (with_arrays(bias=pack_one(torch.full((2,), float("nan")))), "not finite"),
    "huge": (with_arrays(bias=pack_one(torch.full((2,), 3e38))), "not finite|norm"),
    "no examples": (lambda a: replace(a, metrics={"train_loss": 0.1}), "num-examples"),
    "negative examples": (with_metrics(num_examples=-3), "num_examples"),
    "half an example": (with_metrics(num_examples=0.5), "num_examples"),
    "a million million examples": (with_metrics(num_examples=10**12), "num_examples"),
    "a metric that is a text": (with_metrics(loss="low"), "metric"),
    "a metric that is nan": (with_metrics(loss=float("nan")), "metric"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_an_invalid_reply_is_refused_with_a_reason_and_others_continue(name):
    falsify, reason = FAULTS[name]
    run = federation(falsify=falsify)
    assert run.until(40) == "updates"
    refused = [f for kind in ("refusal", "drop") for f in run.lines(kind)]
    assert refused
    assert all(f["device"] == BAD and re.search(reason, f["reason"]) for f in refused)
    assert {f["device"] for f in run.lines("arrival")} == {0, 1, 3, 4}
    assert all(np.isfinite(head).all() for head in run.heads().values())


def test_series_of_numbers_are_nobodys_business():
    run = federation(falsify=with_metrics(losses=[1.0, 0.5]))
    run.until(40)
    assert BAD in {f["device"] for f in run.lines("arrival")}


def test_another_float_type_is_taken():
    run = federation(falsify=with_arrays(bias=pack_one(torch.ones(2).double())))
    run.until(40)
    assert BAD in {f["device"] for f in run.lines("arrival")}


def test_arrays_by_column_are_read_as_such():
    values = np.asfortranarray(np.arange(6, dtype="float32").reshape(2, 3))
    file = BytesIO()
    np.save(file, values)
    packed = Packed("float32", (2, 3), file.getvalue())
    assert unpack_one(packed, (2, 3)).tolist() == values.tolist()


def test_an_answer_counts_once_and_staleness_is_the_servers_own():
    run = federation()
    run.until(12)
    answer = run.transport.answers[0]("train", PlainFlowerCodec(ARRAYS).encode(
        Task(0, 0, 0, MAIN, 99, TrainSpec(), torch.zeros(SIZE)), "k", "r"))  # fmt: skip
    run.transport.again(Delivery("m0", answer))
    run.until(20)
    assert [f["reason"] for f in run.lines("refusal")] == ["the reply answers no open message"]
    tasks = [f["task"] for f in run.lines("arrival")]
    assert len(tasks) == len(set(tasks)) == 20
