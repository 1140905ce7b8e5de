from typing import Any

import pytest

from latecomer.errors import BadInput
from latecomer.study.config import Tree, merged
from latecomer.study.har.plan import make_plan


def test_one_decision_is_changed_at_a_time(scenario: Tree) -> None:
    plan = make_plan(scenario)
    assert [v.label for v in plan.variants] == [
        "centralised",
        "synchronous",
        "asynchronous",
        "centralised-augment-balanced",
        "synchronous-augment-balanced",
        "asynchronous-augment-balanced",
        "synchronous-scale-local",
        "asynchronous-scale-local",
        "synchronous-optimizer-adam",
        "asynchronous-optimizer-adam",
        "asynchronous-mixing-0.2",
        "asynchronous-server_delay-5",
        "asynchronous-strategy-fedasync",
        "asynchronous-busy-fedasync",
        "synchronous-test-held-out-clients",
        "asynchronous-test-held-out-clients",
    ]
    assert plan.base["mixing"] == "0.8"
    assert plan.values("augment") == ["none", "balanced"]
    found = plan.find("asynchronous", "augment", "none")
    assert found is not None
    assert found.label == "asynchronous"
    assert plan.find("centralised", "mixing", "0.2") is None


def test_all_paradigms_do_the_same_work(scenario: Tree) -> None:
    plan = make_plan(scenario)
    assert (plan.rounds, plan.devices) == (6, 6)
    stops = {v.label: (v.tree["stop"]["updates"], v.devices) for v in plan.variants}
    assert stops["asynchronous"] == stops["synchronous"] == (36, 6)
    assert stops["centralised"] == (6, 6)  # each passes over the data of six devices
    assert stops["asynchronous-test-held-out-clients"] == (30, 5)
    every = {v.tree["evaluate"]["every"] for v in plan.variants if v.paradigm != "centralised"}
    assert every == {6, 5}


def test_a_busy_server_evaluates_slowly_too(scenario: Tree) -> None:
    busy = make_plan(scenario).find("asynchronous", "server_delay", "5")
    assert busy is not None
    assert busy.tree["server"] == {"merge_seconds": 5.0, "evaluate_seconds": 50.0}


def test_a_quick_study(scenario: Tree) -> None:
    rich = merged(scenario, {"study": {"har": {"lr": [0.01, 0.1, 1.0]}}, "stop": {"updates": 60}})
    plan = make_plan(rich, quick=True)
    assert plan.rounds == 2
    assert plan.values("lr") == ["0.1", "1"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"study": {"har": {"lrs": [1.0]}}}, "unknown key 'study.har.lrs'; did you mean 'lr'"),
        ({"study": {"har": {"lr": [0.0]}}}, r"study\.har\.lr\.0 = 0\.0"),
        ({"study": {"har": {"scale": ["all"]}}}, r"study\.har\.scale"),
        ({"study": {"hair": {}}}, "unknown key 'study.hair'; did you mean 'har'"),
        ({"stop": {"epochs": 3}}, r"only stop\.updates may be set"),
        ({"strategy": {"name": "fedavg"}}, "needs an asynchronous strategy"),
        ({"strategy": {"name": "centralised"}}, "needs an asynchronous strategy"),
        ({"study": {"har": {"synchronous": "fedasync"}}}, "must be a strategy with rounds"),
        ({"study": {"har": {"strategies": ["fedasink"]}}}, "did you mean 'fedasync'"),
    ],
)
def test_bad_requests(scenario: Tree, change: dict[str, Any], message: str) -> None:
    with pytest.raises(BadInput, match=message):
        make_plan(merged(scenario, change))
