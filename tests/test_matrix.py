"""Parts of different papers combine: every pair runs, conforms and resumes."""

from itertools import combinations, product

import pytest
import torch

from dying import DieAfter, Killed
from fake_grid import ToyFederation, ToyNode
from latecomer.core.submodel import Submodel
from latecomer.errors import BadInput
from latecomer.study.config import merged, parse
from latecomer.study.experiment import Experiment
from latecomer.study.runner import resume_run, start_run
from test_conformance import changing_run, resumes_to_the_same
from toy import ToyRun, toy_fleet, toy_server

PACES = {
    "gather": {"share": 0.4},
    "at-once": {"share": 0.0},
    "majority": {"share": 0.7},
}
SLOTS = {
    f"{pace}-{'compensated' if compensate else 'plain'}": {**PACES[pace], "compensate": compensate}
    for pace, compensate in product(PACES, (True, False))
}
slots = pytest.mark.parametrize("options", SLOTS.values(), ids=SLOTS)


def virtual_run(options, fleet=None):
    return ToyRun(toy_server("latecomer", options), fleet or toy_fleet())


def deployed_run(options):
    nodes = {i: ToyNode(f"toy-{i}") for i in range(5)}
    return ToyFederation("latecomer", nodes=nodes, options=options)


@slots
def test_both_engines_give_the_same_models(options):
    virtual, real = virtual_run(options), deployed_run(options)
    virtual.until(60)
    real.until(60)
    assert real.heads() == virtual.heads()


@slots
def test_it_resumes_bit_for_bit(options):
    resumes_to_the_same(lambda: virtual_run(options))


@slots
def test_sub_models_come_and_go(options):
    parts = (None, Submodel("even", torch.tensor([0, 2, 4])), Submodel("one", torch.tensor([2])))
    run = changing_run("latecomer", parts, options=options)
    run.until(100)
    assert not run.lines("refusal")
    assert all(torch.isfinite(torch.tensor(head)).all() for head in run.heads().values())


@slots
def test_lost_devices_are_tolerated(options):
    fleet = toy_fleet(5, crash=0.2, restart_seconds=3, detect_seconds=1)
    run = virtual_run(options, fleet)
    run.until(100)
    assert run.server.accepted == 100


# Real training on real data, with sub-models, privacy and drift.

TINY = {
    "data": {"source": "digits", "alpha": 0.5},
    "fleet": {
        "devices": 8,
        "profile": "tiers",
        "late": {"classes": [5], "devices": 2, "delay": 3},
    },
    "model": {"hidden": [8]},
    "training": {"local_epochs": 2, "lr": 0.1},
    "stop": {"updates": 40},
    "checkpoint": {"every": 9},
}
FACTORS = {
    "pace": {
        "gather": {},
        "at-once": {"strategy": {"share": 0.0}},
        "majority": {"strategy": {"share": 0.7}},
    },
    "compensate": {"on": {}, "off": {"strategy": {"compensate": False}}},
    "surrogates": {"on": {}, "off": {"strategy": {"surrogates": False}}},
    "personalise": {"off": {}, "on": {"personalise": {"prior": True, "finetune_epochs": 1}}},
    "submodels": {
        "none": {},
        "declared": {"submodels": {"level": "declared", "widths": [1.0, 0.5]}},
        "measured": {"submodels": {"level": "measured", "widths": [1.0, 0.5]}},
    },
    "privacy": {"off": {}, "on": {"privacy": {"epsilon": 5.0, "budget": 40.0}}},
    "drift": {"none": {}, "shift": {"data": {"drift": {"kind": "shift"}}}},
}


def pairs_of(choice):
    return set(combinations(sorted(choice.items()), 2))


def covering():
    """A few choices in which every two values of different factors meet."""
    everything = [dict(zip(FACTORS, values, strict=True)) for values in product(*FACTORS.values())]
    missing, chosen = set().union(*map(pairs_of, everything)), []
    while missing:
        best = max(everything, key=lambda choice: len(pairs_of(choice) & missing))
        chosen.append(best)
        missing -= pairs_of(best)
    return chosen


def config_of(choice):
    tree = merged(TINY, {"strategy": {"name": "latecomer", "samples": 4, "iterations": 3}})
    for factor, value in choice.items():
        tree = merged(tree, FACTORS[factor][value])
    return parse(tree)


@pytest.mark.parametrize("choice", covering(), ids=lambda choice: "-".join(choice.values()))
def test_every_pair_runs_and_resumes_to_the_same_model(choice, tmp_path):
    config = config_of(choice)
    whole = start_run(config, tmp_path / "whole")
    assert whole["updates"] == 40
    assert 0 <= whole["accuracy"] <= 1
    with pytest.raises(Killed):
        start_run(config, tmp_path / "cut", DieAfter(25))
    assert resume_run(tmp_path / "cut")["model_hash"] == whole["model_hash"]


@pytest.mark.parametrize("name", ["ifca", "centralised"])
def test_a_pair_without_meaning_is_refused_with_its_reason(name):
    tree = merged(TINY, {"strategy": {"name": name}, "privacy": {"epsilon": 1.0}})
    with pytest.raises(BadInput, match=r"privacy.*no meaning|no privacy ledger covers"):
        Experiment(parse(tree))
