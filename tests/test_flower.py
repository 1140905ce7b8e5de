"""`AsyncStrategy`: the place of Flower's strategies in any Flower app."""

import inspect
import json
import time
from dataclasses import dataclass, field

import numpy as np
import pytest

pytest.importorskip("flwr", reason="needs the extra 'flower'")

from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import FedAvg, Result

import latecomer
from book import ROOT
from fake_grid import FakeTransport
from flower_apps import PAGE, changed_lines, migrated, migration
from flower_grid import ThreadGrid
from latecomer.engines.flower import GridTransport
from latecomer.engines.plain import NEAREST, needs_of
from latecomer.engines.wire import Payload, pack_array, unpack_array
from latecomer.errors import BadInput, RunFailed
from latecomer.flower import AsyncStrategy, FlowerRun
from latecomer.strategies.recipe import recipes
from toy import toy_fleet, toy_server

NODES = 4
MODEL = {
    "coef": np.zeros((2, 2)),
    "bn.running_var": np.ones(2, dtype="float32"),
    "bn.num_batches_tracked": np.array(0),
}
CONFIG = ConfigRecord({"lr": 0.1, "name": "a", "sizes": [1, 2], "raw": b"\x00"})


def records(arrays=MODEL):
    return ArrayRecord({name: Array(value) for name, value in arrays.items()})


def trained(arrays, number):
    """A device pulls the floats half-way towards its number, and counts in the integer array."""
    return {
        name: np.asarray(value + 1 + number if value.dtype.kind == "i" else (value + number) / 2)
        for name, value in arrays.items()
    }


@dataclass
class Node:
    """A client of Flower's template behind a fake transport."""

    number: int
    evaluates: bool = True
    asked: list = field(default_factory=list)

    def __call__(self, kind, payload):
        arrays = {n: unpack_array(p, p.shape, (p.dtype,)) for n, p in payload.named.items()}
        self.asked.append((kind, dict(payload.fields), arrays))
        if kind == "evaluate" and not self.evaluates:
            return "the client raised an error: No `evaluate` function registered"
        examples = 10 * (self.number + 1)
        if kind == "evaluate":
            return Payload(
                {}, {"acc": float(arrays["coef"][0, 0]), "num-examples": float(examples)}
            )
        made = {n: pack_array(v) for n, v in trained(arrays, self.number).items()}
        return Payload({}, {"train_loss": self.number, "num-examples": examples}, named=made)


class Federation:
    """`AsyncStrategy` over four nodes in virtual time; node i needs i + 1 seconds."""

    def __init__(self, folder, *given, nodes=None, timeout=3600.0, **options):
        self.folder = folder
        self.nodes = nodes or {i: Node(i) for i in range(NODES)}
        self.transport = FakeTransport(toy_fleet(NODES), self.nodes)
        self.strategy = AsyncStrategy(*(given or ("fedasync",)), folder=folder, **options)
        self.timeout, self.evaluated = timeout, []

    def start(self, rounds=3, evaluate=True, config=CONFIG):
        self.run = FlowerRun(self.strategy, self.transport, records(), config, self.timeout)
        return self.run.start(rounds, ConfigRecord({"k": 7}), self.evaluate if evaluate else None)

    def evaluate(self, number, arrays):
        self.evaluated.append(number)
        return MetricRecord({"loss": float(arrays["coef"].numpy().mean()), "all": [1.0, 2.0]})

    def table(self):
        return latecomer.load(self.folder).metrics

    def asked(self, kind):
        return [
            (i, *each[1:]) for i, n in self.nodes.items() for each in n.asked if each[0] == kind
        ]


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    federation = Federation(tmp_path_factory.mktemp("run"))
    return federation, federation.start()


def test_the_result_is_flowers_with_metrics_of_every_round(done):
    federation, result = done
    assert isinstance(result, Result)
    assert list(result.evaluate_metrics_serverapp) == federation.evaluated == [0, 1, 2, 3]
    assert result.evaluate_metrics_serverapp[3]["all"] == [1.0, 2.0]
    assert list(result.train_metrics_clientapp) == [1, 2, 3]
    assert list(result.evaluate_metrics_clientapp) == [1, 2, 3]
    assert federation.run.server.accepted == 3 * NODES
    np.testing.assert_array_equal(
        result.arrays["coef"].numpy().mean(), result.evaluate_metrics_serverapp[3]["loss"]
    )


def test_all_keys_reach_the_clients_with_the_round(done):
    federation, _ = done
    tasks = [fields for _, fields, _ in federation.asked("train")]
    assert all({**CONFIG, "server-round": f["server-round"]} == f for f in tasks)
    assert {f["server-round"] for f in tasks} == {1, 2, 3}
    evaluations = [fields for _, fields, _ in federation.asked("evaluate")]
    assert all(f["k"] == 7 for f in evaluations)
    assert {f["server-round"] for f in evaluations} == {1, 2, 3}


def test_integers_are_those_of_the_newest_update_and_no_variance_is_negative(done):
    federation, result = done
    assert result.arrays["bn.num_batches_tracked"].numpy().dtype == np.int64
    sent = {int(arrays["bn.num_batches_tracked"]) for _, _, arrays in federation.asked("train")}
    # Every task starts from an integer that some device has returned, never from a mean.
    assert {0, 1} < sent
    last = [e for e in events(federation) if e["event"] == "arrival"][-1]["device"]
    before = federation.nodes[last].asked
    counted = [a for kind, _, a in before if kind == "train"][-2 if last == 0 else -1]
    assert result.arrays["bn.num_batches_tracked"].numpy() in (
        counted["bn.num_batches_tracked"] + 1 + last,
        before[-1][2]["bn.num_batches_tracked"],
    )
    assert result.arrays["coef"].numpy().dtype == np.float64


def events(federation):
    lines = (federation.folder / "events.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def test_the_folder_has_log_metrics_model_and_report(done):
    federation, result = done
    table = federation.table()
    assert (table["updates"] // NODES).tolist() == [0, 1, 2, 3]  # several may arrive at once
    assert table["client_nodes"].iloc[-1] == NODES
    for number in (1, 2, 3):
        row = table.iloc[number]
        assert row["loss"] == pytest.approx(result.evaluate_metrics_serverapp[number]["loss"])
        found = result.evaluate_metrics_clientapp[number]["acc"]
        assert row["client_acc"] == pytest.approx(found)
        assert row["train_loss"] == pytest.approx(
            result.train_metrics_clientapp[number]["train_loss"]
        )
    assert {e["event"] for e in events(federation)} >= {"arrival", "commit", "evaluation"}
    page = (federation.folder / "report.html").read_text()
    assert "client_acc" in page
    assert "not finished" not in page
    summary = latecomer.load(federation.folder).summary
    assert summary["updates"] == 12
    assert summary["client_acc"]["mean"] == pytest.approx(table["client_acc"].iloc[-1])
    from safetensors.numpy import load_file

    saved = load_file(federation.folder / "model.safetensors")
    assert {n: v.dtype for n, v in saved.items()} == {n: v.dtype for n, v in MODEL.items()}
    np.testing.assert_array_equal(saved["coef"], result.arrays["coef"].numpy())


def test_evaluation_on_nodes_does_not_stop_training(done):
    """A node evaluates between two of its tasks, and others train meanwhile."""
    federation, _ = done
    alone = Federation(federation.folder / "alone", fraction_evaluate=0.0)
    alone.start()
    assert not alone.asked("evaluate")

    def arrivals(run):
        return [e["time"] for e in events(run) if e["event"] == "arrival"]

    # An evaluation of node i takes i + 1 seconds: only its own next task is later.
    assert len(arrivals(federation)) == len(arrivals(alone)) == 3 * NODES
    assert arrivals(federation)[:NODES] == arrivals(alone)[:NODES]
    assert arrivals(federation)[-1] < 2.1 * arrivals(alone)[-1]
    sent = sorted(federation.transport.sent)
    busy = {}
    for moment, node, _ in sent:
        assert busy.get(node, 0) <= moment
        busy[node] = moment + node + 1


@pytest.mark.parametrize(
    ("fraction", "every", "rounds", "asked"), [(0.5, 1, [1, 2, 3, 4], 2), (1.0, 2, [2, 4], 4)]
)
def test_a_fraction_of_nodes_evaluates_at_intervals(tmp_path, fraction, every, rounds, asked):
    run = Federation(tmp_path, fraction_evaluate=fraction, evaluate_every=every)
    result = run.start(4)
    assert run.evaluated == [0, *rounds]
    assert list(result.evaluate_metrics_clientapp) == rounds
    assert run.table()["client_nodes"].max() == asked


def test_nodes_without_an_evaluate_function_only_train(tmp_path):
    run = Federation(tmp_path, nodes={i: Node(i, evaluates=False) for i in range(NODES)})
    result = run.start(8)
    assert run.run.server.accepted == 8 * NODES
    assert result.evaluate_metrics_clientapp == {}
    # Of 8 requests; each node is asked until it has failed three times.
    assert len(run.asked("evaluate")) <= 4 * NODES
    first = next(e for e in events(run) if e["event"] == "evaluation")
    assert first["reason"].endswith("registered")


def test_a_run_ends_when_the_clients_of_all_nodes_raise_again_and_again(tmp_path):
    class Broken(Node):
        def __call__(self, kind, payload):
            return "the client raised an error: no such key 'lr'"

    run = Federation(tmp_path, nodes={0: Broken(0), 1: Broken(1)})
    with pytest.raises(RunFailed, match=r"all nodes have failed 5 times in a row: .*no such key"):
        run.start()


def test_an_evaluation_that_is_not_answered_is_given_up_after_the_timeout(tmp_path):
    class Silent(Node):
        def __call__(self, kind, payload):
            return None if kind == "evaluate" else super().__call__(kind, payload)

    run = Federation(tmp_path, nodes={0: Silent(0), 1: Node(1), 2: Node(2)}, timeout=5.0)
    result = run.start(3)
    assert run.run.server.accepted == 9
    assert result.evaluate_metrics_clientapp[3]["acc"]


def test_updates_and_seconds_bound_the_run_too(tmp_path):
    run = Federation(tmp_path / "a", updates=6)
    run.start(100)
    assert run.run.server.accepted == 6
    assert run.evaluated == [0, 1, 2]
    timed = Federation(tmp_path / "b", seconds=5.0)
    timed.start(100)
    assert 5 <= timed.run.loop.now < 20


def test_a_killed_run_resumes_with_its_rounds_and_metrics(tmp_path):
    whole = Federation(tmp_path / "whole")
    expected = whole.start(3)
    first = Federation(tmp_path / "cut")

    def killed(*_):
        raise KeyboardInterrupt  # as hard as it gets in one process: nothing more is saved

    def evaluate(number, arrays):
        return killed() if number == 2 else first.__class__.evaluate(first, number, arrays)

    first.evaluate = evaluate
    with pytest.raises(KeyboardInterrupt):
        first.start(3)
    second = Federation(tmp_path / "cut")
    result = second.start(3)
    assert second.evaluated == [2, 3]
    assert list(result.evaluate_metrics_serverapp) == [0, 1, 2, 3]
    assert result.train_metrics_clientapp.keys() == expected.train_metrics_clientapp.keys()
    assert (second.table()["updates"] // NODES).tolist() == [0, 1, 2, 3]
    tasks = [e["task"] for e in events(second) if e["event"] == "arrival"]
    assert len(tasks) == len(set(tasks)) == 12
    # Resumed once more it is complete already: the same result, and nothing is trained.
    third = Federation(tmp_path / "cut")
    again = third.start(3)
    assert not third.asked("train")
    np.testing.assert_array_equal(again.arrays["coef"].numpy(), result.arrays["coef"].numpy())


def test_what_the_start_does_not_get_is_one_clear_line(tmp_path):
    for wrong, message in (
        (lambda: AsyncStrategy(FedAvg()), "a FedAvg: allowed is a name"),
        (lambda: AsyncStrategy("fedbuf"), "fedbuff"),
        (lambda: AsyncStrategy("fedbuff", sizes=3), "strategy.sizes"),
        (lambda: AsyncStrategy(latecomer.build_strategy("fedavg"), size=3), "size: a Strategy"),
        (lambda: AsyncStrategy(fraction_evaluate=2.0), "fraction_evaluate = 2.0: must be"),
        (lambda: AsyncStrategy(updates=-1), "updates = -1: must be at least 0"),
        (lambda: AsyncStrategy(seconds=-0.5), "seconds = -0.5: must be at least 0"),
        (lambda: Federation(tmp_path, "feddc-fedbuff").start(), "nearest .* is fedbuff"),
    ):
        with pytest.raises(BadInput, match=message) as refused:
            wrong()
        assert "\n" not in str(refused.value)


def test_no_option_of_a_strategy_has_the_name_of_a_setting():
    own = set(inspect.signature(AsyncStrategy).parameters) - {"options"}
    assert not own & {name for found in recipes().values() for name in found.options}


def test_every_refused_strategy_has_a_nearest_one_that_works():
    needs = {name: needs_of(toy_server(name)) for name in recipes()}
    refused = {name for name, what in needs.items() if what}
    assert refused == set(NEAREST) - {"asyncfeded"}  # only where its epochs vary
    for nearest in {each.partition(" ")[0] for each in NEAREST.values()}:
        strategy = AsyncStrategy(nearest).strategy
        assert not needs_of(
            latecomer.Server(toy_server("fedavg").model(), strategy, latecomer.TrainSpec())
        )


def test_a_strategy_that_varies_epochs_works_if_clients_are_sent_them(tmp_path):
    with pytest.raises(BadInput, match="devices that read 'local-epochs' from train_config"):
        Federation(tmp_path, "asyncfeded", kappa=50.0).start()
    run = Federation(tmp_path, "asyncfeded", kappa=50.0)
    run.start(config=ConfigRecord({"local-epochs": 2}))
    assert {fields["local-epochs"] for _, fields, _ in run.asked("train")} > {2}


def test_fedprox_sends_the_proximal_term(tmp_path):
    run = Federation(tmp_path, "fedprox", mu=0.3)
    run.start(1)
    assert {fields["proximal-mu"] for _, fields, _ in run.asked("train")} == {0.3}


def test_the_folder_comes_from_the_environment_or_is_new(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LATECOMER_RUN_FOLDER", str(tmp_path / "given"))
    first = Federation(None)
    first.start(1)
    assert (tmp_path / "given" / "metrics.csv").is_file()
    monkeypatch.delenv("LATECOMER_RUN_FOLDER")
    for number in (1, 2):
        Federation(None).start(1)
        assert (tmp_path / "runs" / f"flower-fedasync-{number}" / "metrics.csv").is_file()


app = ClientApp()


@app.train()
def train(message, context):
    arrays = {name: array.numpy() for name, array in message.content["arrays"].items()}
    number = context.node_config["partition-id"]
    content = {
        "arrays": records(trained(arrays, number)),
        "metrics": MetricRecord({"loss": float(number), "num-examples": number + 1}),
    }
    return Message(content=RecordDict(content), reply_to=message)


@app.evaluate()
def evaluate(message, context):
    value = float(message.content["arrays"]["coef"].numpy().mean())
    metrics = MetricRecord({"value": value, "num-examples": 3})
    return Message(content=RecordDict({"metrics": metrics}), reply_to=message)


class RoundGrid(ThreadGrid):
    """With the blocking call of Flower's strategies."""

    def send_and_receive(self, messages, *, timeout=None):
        open_ids, found = set(self.push_messages(list(messages))), []
        while open_ids:
            new = self.pull_messages(list(open_ids))
            open_ids -= {m.metadata.reply_to_message_id for m in new}
            found += new
            time.sleep(0.002)
        return found


def test_fedavg_over_flowers_messages_equals_flowers_own(tmp_path, monkeypatch):
    monkeypatch.setattr("latecomer.flower.GridTransport", lambda g: GridTransport(g, poll=0.01))
    nodes = {100 + i: {"partition-id": i} for i in range(3)}
    given = {"initial_arrays": records(), "num_rounds": 3}
    theirs = FedAvg().start(grid=RoundGrid(app, nodes), **given)
    ours = AsyncStrategy("fedavg", folder=tmp_path).start(grid=RoundGrid(app, nodes), **given)
    for name in ("coef", "bn.running_var"):
        np.testing.assert_allclose(
            ours.arrays[name].numpy(), theirs.arrays[name].numpy(), rtol=1e-6
        )
    assert ours.train_metrics_clientapp[3]["loss"] == pytest.approx(
        theirs.train_metrics_clientapp[3]["loss"]
    )
    for number in (1, 2, 3):
        assert ours.evaluate_metrics_clientapp[number]["value"] == pytest.approx(
            theirs.evaluate_metrics_clientapp[number]["value"], rel=1e-6
        )


# docs/flower.md


def test_the_migration_changes_two_lines(tmp_path):
    changed = changed_lines(migrated(tmp_path))
    assert len([line for line in changed if line.startswith("-")]) == 2
    assert len([line for line in changed if line.startswith("+")]) == 2
    assert changed == [
        line for line in migration().splitlines()
        if line[:1] in "+-" and line[:3] not in ("+++", "---")
    ]  # fmt: skip


def test_the_table_of_strategies_is_generated(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    import flower_strategies

    text = PAGE.read_text()
    assert flower_strategies.page(text) == text


def test_the_simulation_ranks_strategies_as_the_deployment_did(monkeypatch):
    """The stored results of benchmarks/flower_stragglers.py, and the table made of them."""
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    import flower_stragglers

    results = json.loads(flower_stragglers.RESULTS.read_text())
    for each in results.values():
        assert flower_stragglers.order(each, "virtual") == flower_stragglers.order(each, "deployed")
        assert set(each["virtual"]) == set(flower_stragglers.STRATEGIES)
    text = PAGE.read_text()
    assert flower_stragglers.page(text, results) == text
