"""Over Flower's own messages: the same models, and nothing that a node does stops the loop."""

import threading
import time

import pytest
import torch

pytest.importorskip("flwr", reason="needs the extra 'flower'")

from flwr.app import (
    Array,
    ArrayRecord,
    ConfigRecord,
    Context,
    Error,
    Message,
    MetricRecord,
    RecordDict,
)

from flower_grid import ThreadGrid
from latecomer.core.messages import TrainSpec
from latecomer.core.server import Server
from latecomer.device.flat import flat_model
from latecomer.engines.deployment_loop import DeploymentLoop, Timeouts
from latecomer.engines.flower import (
    MAX_POLL_RATE,
    GridTransport,
    from_records,
    to_records,
)
from latecomer.engines.flower_client import client_app, device_name
from latecomer.engines.virtual import Bounds
from latecomer.engines.wire import Packed, Payload, pack, unpack
from latecomer.errors import BadInput
from latecomer.strategies.recipe import build_strategy

MODEL = flat_model("mlp", (4,), 3, (5,))
SOON = Timeouts(poll=0.05, node_poll=0.05, back_off=0.1)


def load_data(context):
    rng = torch.Generator().manual_seed(context.node_id)
    return torch.randn(12, 4, generator=rng), torch.arange(12) % 3


def an_app(folder):
    return client_app(lambda: flat_model("mlp", (4,), 3, (5,)), load_data, state=folder)


def a_loop(grid, log):
    spec = TrainSpec(local_epochs=1, batch_size=4, lr=0.1)
    server = Server(MODEL.init(1), build_strategy("fedasync", {}), spec, seed=1)
    note = lambda time, note: log.append((note.kind, dict(note.fields)))  # noqa: E731
    return DeploymentLoop(server, GridTransport(grid, poll=0.01), SOON, on_note=note)


NODES = {100 + i: {"device-id": f"d{i}"} for i in range(3)}
TIME = Bounds(updates=12, virtual_seconds=60.0)


def test_a_parcel_comes_out_of_records_as_it_went_in():
    sent = Payload({"a": 1, "b": "x", "c": True, "d": 0.5}, {"m": 2.0}, pack(torch.randn(3)))
    got = from_records(to_records(sent))
    assert dict(got.fields) == sent.fields
    assert [type(v) for v in got.fields.values()] == [int, str, bool, float]
    assert got.metrics == sent.metrics
    assert torch.equal(unpack(got.array, 1, 3), unpack(sent.array, 1, 3))


def test_the_array_is_one_that_any_flower_app_can_read():
    vector = torch.randn(3)
    records = to_records(Payload({}, array=pack(vector)))
    assert records["arrays"]["model"].numpy().tolist() == [vector.tolist()]


@pytest.mark.parametrize(
    "records",
    [
        RecordDict(),
        RecordDict({"latecomer": MetricRecord({"task": 1})}),
        RecordDict({"arrays": ConfigRecord({"model": 1})}),
        RecordDict({"arrays": ArrayRecord({"other": Array(torch.zeros(2).numpy())})}),
        RecordDict({"arrays": ArrayRecord({"model": Array("float32", (2,), "pickle", b"x")})}),
    ],
)
def test_records_of_another_kind_leave_gaps(records):
    payload = from_records(records)
    assert payload.fields == {}
    assert payload.array is None


def test_devices_train_over_flowers_messages(tmp_path):
    log = []
    loop = a_loop(ThreadGrid(an_app(tmp_path), NODES), log)
    before = loop.server.store.head_params().clone()
    assert loop.run(TIME) == "updates"
    assert {f["device"] for kind, f in log if kind == "arrival"} == {0, 1, 2}
    assert not [f for kind, f in log if kind in ("refusal", "drop")]
    assert not torch.equal(loop.server.store.head_params(), before)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["d0", "d1", "d2"]


def test_a_client_that_raises_is_named_and_the_others_go_on(tmp_path):
    honest, log = an_app(tmp_path), []

    def app(message, context):
        if context.node_id == 101 and message.metadata.message_type == "train":
            raise RuntimeError("out of memory")
        return honest(message, context)

    assert a_loop(ThreadGrid(app, NODES), log).run(TIME) == "updates"
    reasons = {f["reason"] for kind, f in log if kind == "drop"}
    assert reasons == {"the client raised an error: out of memory"}


def test_limits_in_the_node_config_hold_and_the_server_logs_why(tmp_path):
    log, nodes = [], {**NODES, 101: {**NODES[101], "max-bytes": 8}}
    assert a_loop(ThreadGrid(an_app(tmp_path), nodes), log).run(TIME) == "updates"
    reasons = [f["reason"] for kind, f in log if kind == "drop"]
    assert reasons
    assert all("this device takes at most 8 (max-bytes)" in reason for reason in reasons)


def test_a_stalled_reply_delays_no_other(tmp_path):
    honest, log = an_app(tmp_path), []
    grid = ThreadGrid(honest, NODES)
    pull = grid.pull_messages

    def stalls(numbers):
        found = pull(numbers)
        if any(m.metadata.src_node_id == 101 and "arrays" in m.content for m in found):
            time.sleep(30)
        return found

    grid.pull_messages = stalls
    began = time.monotonic()
    assert a_loop(grid, log).run(TIME) == "updates"
    assert time.monotonic() - began < 20


def test_a_superlink_that_is_away_for_a_while_is_survived(tmp_path):
    log = []
    grid = ThreadGrid(an_app(tmp_path), NODES)
    loop = a_loop(grid, log)
    loop.run(Bounds(updates=4, virtual_seconds=60.0))
    grid.down = True
    threading.Timer(0.5, lambda: setattr(grid, "down", False)).start()
    assert loop.run(TIME) == "updates"


def test_a_hostile_reply_is_refused(tmp_path):
    honest, log = an_app(tmp_path), []
    huge = Packed("float32", (1, MODEL.layout.size), b"\x93NUMPY" + b"0" * 10_000)

    def app(message, context):
        reply = honest(message, context)
        if context.node_id == 101 and message.metadata.message_type == "train":
            reply_payload = from_records(reply.content)
            return Message(
                to_records(Payload(reply_payload.fields, reply_payload.metrics, huge)),
                reply_to=message,
            )
        return reply

    assert a_loop(ThreadGrid(app, NODES), log).run(TIME) == "updates"
    assert all("more bytes" in f["reason"] for kind, f in log if kind == "drop")
    assert any(kind == "drop" for kind, _ in log)


def test_a_node_cannot_answer_for_another(tmp_path):
    honest, log = an_app(tmp_path), []

    def app(message, context):
        reply = honest(message, context)
        if context.node_id == 101 and message.metadata.message_type == "train":
            reply.metadata.__dict__["_src_node_id"] = 100
        return reply

    assert a_loop(ThreadGrid(app, NODES), log).run(TIME) == "updates"
    assert {f["reason"] for kind, f in log if kind == "drop"} == {"the reply is from another node"}


@pytest.mark.parametrize(
    ("config", "name"),
    [({"device-id": "a"}, "a"), ({"device-id": 7}, "7"), ({"partition-id": 3}, "partition-3")],
)
def test_a_device_is_named_by_its_node_config(config, name):
    assert device_name(Context(1, 5, config, RecordDict(), {})) == name


@pytest.mark.parametrize("config", [{}, {"device-id": "../../etc"}, {"device-id": "a b"}])
def test_a_device_without_a_valid_name_is_an_error(config):
    with pytest.raises(BadInput):
        device_name(Context(1, 5, config, RecordDict(), {}))


@pytest.mark.parametrize(("code", "lost"), [(2, False), (3, True), (5, True), (8, False)])
def test_what_went_astray_is_not_the_devices_fault(code, lost):
    grid = ThreadGrid(lambda message, context: Message(Error(code, "why"), reply_to=message), NODES)
    transport = GridTransport(grid, poll=0.01)
    transport.send(100, "train", Payload({}))
    (found,) = transport.collect(transport.now() + 10.0)
    assert found.lost == lost
    assert found.payload is None
    assert found.error.endswith("why")


def test_many_open_messages_take_turns():
    """A SuperLink answers some 90 questions a second, those of its nodes included."""

    class Silent(ThreadGrid):
        asked = 0

        def pull_messages(self, numbers):
            self.asked += 1
            return []

    grid = Silent(lambda message, context: None, {i: {} for i in range(100)})
    transport = GridTransport(grid, poll=0.01)
    for node in grid.nodes:
        transport.send(node, "query", Payload({}))
    time.sleep(0.5)
    grid.asked = 0
    time.sleep(1.0)
    transport.close()
    assert grid.asked < 2 * MAX_POLL_RATE
