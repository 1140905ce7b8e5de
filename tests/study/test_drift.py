"""Runs whose data change: in every form of training, resumed, and measured on what is there."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from dying import DieAfter, Killed
from latecomer.errors import BadInput
from latecomer.study.config import Config
from latecomer.study.evaluate import Evaluator
from latecomer.study.experiment import Experiment
from latecomer.study.runner import resume_run, start_run

MakeConfig = Callable[..., Config]
Start = Callable[..., tuple[Path, dict[str, Any]]]

KINDS = ("grow", "replace", "transition", "shift")


@pytest.mark.parametrize("kind", KINDS)
def test_the_form_of_training_does_not_matter(start: Start, kind: str) -> None:
    runs = [
        start(f"data.drift.kind={kind}", f"engine.kernel={kernel}")[0]
        for kernel in ("plain", "batched")
    ]
    plain, batched = (pd.read_csv(run / "metrics.csv") for run in runs)
    assert plain["virtual_seconds"].tolist() == batched["virtual_seconds"].tolist()
    assert plain["loss"].tolist() == pytest.approx(batched["loss"].tolist(), rel=1e-4)


def test_the_compiled_kernel_sees_the_same(start: Start) -> None:
    pytest.importorskip("numba")
    runs = [
        start("data.drift.kind=replace", "data.drift.rate=5", f"engine.kernel={kernel}")[0]
        for kernel in ("plain", "compiled")
    ]
    plain, compiled = (pd.read_csv(run / "metrics.csv") for run in runs)
    assert plain["loss"].tolist() == pytest.approx(compiled["loss"].tolist(), rel=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_a_resumed_run_is_the_same(tiny: MakeConfig, tmp_path: Path, kind: str) -> None:
    config = tiny(f"data.drift.kind={kind}", "checkpoint.every=10", "stop.patience=50")
    whole = start_run(config, tmp_path / "whole")
    with pytest.raises(Killed):
        start_run(config, tmp_path / "cut", DieAfter(30))
    assert resume_run(tmp_path / "cut")["model_hash"] == whole["model_hash"]
    cut = json.loads((tmp_path / "cut" / "summary.json").read_text())
    assert cut["best"] == whole["best"]


@pytest.mark.parametrize("name", ["fedavg", "fedbuff", "semi-async", "centralised", "standalone"])
def test_every_kind_of_strategy_takes_it(start: Start, name: str) -> None:
    _, summary = start("data.drift.kind=grow", f"strategy.name={name}", "stop.updates=20")
    assert summary["updates"] >= 20


def test_growing_devices_take_longer_and_longer(start: Start) -> None:
    folder, _ = start(
        "data.drift.kind=grow", "fleet.seconds_per_task=0", "fleet.seconds_per_example=1"
    )
    lines = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    sent: dict[int, float] = {}
    takes = []
    for line in lines:
        if line["event"] == "dispatch":
            sent[line["task"]] = line["time"]
        elif line["event"] == "arrival" and line["device"] == 0:
            takes.append(line["time"] - sent[line["task"]])
    assert takes == sorted(takes)
    assert takes[-1] > 1.5 * takes[0]


def test_a_shift_is_measured_on_shifted_labels(tiny: MakeConfig) -> None:
    experiment = Experiment(tiny("data.drift.kind=shift", "data.drift.share=1.0"))
    begin = experiment.config.data.drift.begin * experiment.epoch_seconds
    assert experiment.config.data.drift.begin == 3  # half of the 6 epochs of 60 updates
    server, evaluator = experiment.server(), Evaluator(experiment)
    before, after = (evaluator.local_test(server, t) for t in (0.0, begin))
    assert before.mean != after.mean
    renamed = (experiment.data.test_of(0, 0.0).y + 1) % 10
    assert experiment.data.test_of(0, begin).y.tolist() == renamed.tolist()
    y = experiment.data.central_test(begin).y
    assert y.tolist() == ((experiment.federation.test.y + 1) % 10).tolist()


def test_accuracy_falls_at_a_shift_and_recovers(start: Start) -> None:
    folder, _ = start(
        "data.drift.kind=shift",
        "data.drift.share=1.0",
        "data.drift.begin=40",
        "data.partition=iid",
        "stop.updates=800",
        "training.lr=0.5",
        "evaluate.every=10",
    )
    accuracy = pd.read_csv(folder / "metrics.csv").set_index("updates")["accuracy"]
    assert accuracy.loc[390] > 0.7
    assert accuracy.loc[410:440].min() < 0.3
    assert accuracy.iloc[-1] > 0.6


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["data.drift.kind=swap"], r"data\.drift\.kind"),
        (
            ["data.drift.kind=replace", "data.drift.second=source"],
            r"name it with data\.drift\.sour",
        ),
        (["data.drift.source=digits"], "are for kind = 'replace'"),
        (
            ["data.drift.kind=grow", "fleet.seconds_per_example=0", "fleet.seconds_per_task=0"],
            "epochs take no time",
        ),
    ],
)
def test_bad_requests(tiny: MakeConfig, settings: list[str], message: str) -> None:
    free = ["fleet.latency=0", "fleet.up=inf", "fleet.down=inf"] if len(settings) == 3 else []
    with pytest.raises(BadInput, match=message):
        Experiment(tiny(*settings, *free))


def test_official_rows_stay(tmp_path: Path, tiny: MakeConfig) -> None:
    import numpy as np

    rng = np.random.default_rng(0)
    np.savez(
        tmp_path / "a.npz",
        x=rng.normal(size=(200, 3)).astype("float32"),
        y=np.arange(200) % 2,
        test=np.arange(200) % 4 == 0,
    )
    experiment = Experiment(
        tiny(
            "data.source=npz",
            f"data.path={tmp_path / 'a.npz'}",
            "data.test=official",
            "data.drift.kind=shift",
        )
    )
    assert "data.drift: the official test rows belong to no device" in experiment.notes[-1]
    assert experiment.data.central_test(1e9) is experiment.federation.test
