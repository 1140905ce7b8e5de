"""A deployment leaves a folder from which the next life goes on."""

import json
from dataclasses import dataclass, field, replace

import pytest

from fake_grid import FakeTransport, ToyNode
from latecomer.engines.virtual import Bounds
from latecomer.errors import BadInput
from latecomer.study.deployed import Deployment, serve
from toy import toy_fleet, toy_server


class Killed(BaseException):
    """As if by kill -9: nothing is tidied up."""


@dataclass
class Keeper(ToyNode):
    """A device as it should be: a task that comes again is answered again, not done again."""

    kept: dict = field(default_factory=dict)

    def __call__(self, kind, payload):
        key = payload.fields.get("task")
        if kind == "train" and key in self.kept:
            self.asked.append(key)
            return self.kept[key]
        answer = super().__call__(kind, payload)
        if kind == "train" and "passes" not in answer.fields:  # it is the last word on a task
            self.kept[answer.fields["task"]] = answer
        return answer


def nodes():
    return {i: Keeper(f"toy-{i}") for i in range(5)}


def lines(folder):
    return [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]


def one_life(folder, devices, updates, dies_after=None, strategy="fedasync", every=1):
    server = toy_server(strategy)
    life = Deployment(server, FakeTransport(toy_fleet(), devices), folder, every=every)
    if dies_after is not None:
        steps = iter(range(dies_after))
        carry_out = life.loop._carry_out

        def until_killed(command):
            if next(steps, None) is None:
                raise Killed
            carry_out(command)

        life.loop._carry_out = until_killed
    return life, (lambda: life.run(Bounds(updates)))


def test_a_run_leaves_its_log_and_a_checkpoint(tmp_path):
    server = toy_server("fedasync")
    reason = serve(FakeTransport(toy_fleet(), nodes()), server, tmp_path / "run", Bounds(20))
    assert reason == "updates"
    log = lines(tmp_path / "run")
    assert sum(line["event"] == "arrival" for line in log) == 20
    assert (tmp_path / "run" / "checkpoint" / "latest").exists()


@pytest.mark.parametrize("strategy", ["fedasync", "fedbuff", "feddc", "echopfl", "fedavg"])
@pytest.mark.parametrize("every", [1, 4])
def test_killed_again_and_again_it_loses_no_saved_commit_and_uses_no_update_twice(
    tmp_path, strategy, every
):
    devices, saved = nodes(), 0
    for dies_after in (1, 17, 3, 60, 26, 41):
        life, run = one_life(tmp_path, devices, 60, dies_after, strategy, every)
        assert life.server.store.commits >= saved
        try:
            run()
        except Killed:
            saved = life.saved
    life, run = one_life(tmp_path, devices, 60, None, strategy, every)
    assert life.server.store.commits == saved
    run()
    assert life.server.accepted == 60
    log = lines(tmp_path)
    tasks = [line["task"] for line in log if line["event"] == "arrival"]
    assert len(tasks) == len(set(tasks)) == 60
    versions = [line["version"] for line in log if line["event"] == "commit"]
    assert versions == list(range(1, len(versions) + 1))
    assert any(line["event"] == "resume" for line in log) == (saved > 0)


def test_a_finished_run_stays_finished(tmp_path):
    devices = nodes()
    one_life(tmp_path, devices, 20)[1]()
    asked = sum(len(node.asked) for node in devices.values())
    life, run = one_life(tmp_path, devices, 20)
    assert run() == "updates"
    assert sum(len(node.asked) for node in devices.values()) == asked
    assert life.server.accepted == 20


def test_a_checkpoint_of_something_else_is_refused(tmp_path):
    one_life(tmp_path, nodes(), 20)[1]()
    server = toy_server("fedasync")
    server.store._held[0].params = server.store._held[0].params[:3]
    with pytest.raises(BadInput, match="does not fit"):
        Deployment(server, FakeTransport(toy_fleet(), nodes()), tmp_path)
    another_seed = toy_server("fedasync")
    another_seed.seed = 9
    for other, words in {
        toy_server("fedavg"): "strategy.name = fedasync, now fedavg",
        another_seed: "seed = 7, now 9; resume",
    }.items():
        with pytest.raises(BadInput, match=words):
            Deployment(other, FakeTransport(toy_fleet(), nodes()), tmp_path)


def test_another_learning_rate_is_accepted_and_logged(tmp_path):
    one_life(tmp_path, nodes(), 20)[1]()
    server = toy_server("fedasync")
    server.spec = replace(server.spec, lr=0.125)
    Deployment(server, FakeTransport(toy_fleet(), nodes()), tmp_path).run(Bounds(25))
    resumed = [line for line in lines(tmp_path) if line["event"] == "resume"]
    assert "now 0.125" in resumed[0]["changed"]
