"""Data given in Python, and what a resumed run takes; test_every_kind.py trains all kinds."""

import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from torch.utils.data import TensorDataset

import latecomer
from dying import DieAfter, Killed
from latecomer.errors import BadInput
from latecomer.study.config import merged, parse
from latecomer.study.experiment import Experiment
from latecomer.study.given import Given
from latecomer.study.runner import resume_run, start_run

RNG = np.random.default_rng(0)
Y = RNG.integers(0, 3, 240)
X = (RNG.normal(size=(240, 6)) + 4 * Y[:, None]).astype(np.float32)
WHO = np.repeat(np.arange(8), 30)
NAMES = np.array(["sit", "walk", "run"])
TREE: dict[str, Any] = {
    "data": {"partition": "iid"},
    "fleet": {"devices": 8},
    "model": {"hidden": [8]},
    "training": {"lr": 0.2, "batch_size": 8},
    "strategy": {"name": "fedasync"},
    "stop": {"updates": 40},
    "checkpoint": {"every": 8},
}


def frame() -> pd.DataFrame:
    table = pd.DataFrame(X, columns=[f"f{i}" for i in range(6)])
    return table.assign(activity=NAMES[Y], who=WHO, sum=X.sum(axis=1))


OBJECTS: dict[str, Any] = {
    "arrays": (X, Y + 1),
    "tensors": TensorDataset(torch.from_numpy(X), torch.from_numpy(Y + 1)),
    "per device": [(X[d::8], NAMES[Y[d::8]]) for d in range(8)],
    "test set": {"train": (X[:200], NAMES[Y[:200]]), "test": (X[200:], NAMES[Y[200:]])},
    "frame": frame(),
}


@pytest.mark.parametrize("kind", OBJECTS)
def test_names_and_config_of_python_objects(kind: str) -> None:
    columns = {"target": "activity", "ignore": ["sum"]} if kind == "frame" else {}
    config = parse(merged(TREE, {"data": columns}))
    experiment = Experiment(config, given=Given(data=OBJECTS[kind]))
    numbers = kind in ("arrays", "tensors")
    assert set(experiment.label_names) == ({"1", "2", "3"} if numbers else set(NAMES))
    data = experiment.config.data
    assert data.source == "given:data"
    assert data.partition == ("by-subject" if kind == "per device" else "iid")
    assert data.test == ("official" if kind == "test set" else "fair")


def test_given_arrays_are_trained_as_those_of_a_file(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", x=X, y=Y)
    source = {"data": {"source": "npz", "path": str(tmp_path / "a.npz")}}
    hashes = [
        latecomer.run(merged(TREE, source), out=tmp_path / "file").summary["model_hash"],
        latecomer.run(TREE, out=tmp_path / "objects", data=(X, Y)).summary["model_hash"],
    ]
    assert hashes[0] == hashes[1]


def test_only_the_same_objects_resume_a_run(tmp_path: Path) -> None:
    folder = tmp_path / "cut"
    with pytest.raises(Killed):
        start_run(parse(TREE), folder, DieAfter(20), given=Given(data=(X, Y)))
    with pytest.raises(BadInput, match=r"data.source = 'given:data': it was given in Python"):
        resume_run(folder)
    with pytest.raises(BadInput, match="not those with which the run began; give the same"):
        latecomer.run(resume=folder, data=(X + 1, Y))
    with pytest.raises(BadInput, match="resume= takes no config"):
        latecomer.run(TREE, resume=folder, data=(X, Y))
    assert latecomer.run(resume=folder, data=(X, Y)).summary["updates"] == 40


def test_a_run_that_reads_its_data_takes_no_objects_on_resume(tmp_path: Path) -> None:
    with pytest.raises(Killed):
        start_run(parse(merged(TREE, {"data": {"source": "digits"}})), tmp_path / "a", DieAfter(20))
    with pytest.raises(BadInput, match=r"reads its data from data.source; resume it without data"):
        latecomer.run(resume=tmp_path / "a", data=(X, Y))


def test_settings_that_need_classes_are_refused_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"data.partition = 'dirichlet' needs class labels"):
        latecomer.run(
            merged(TREE, {"data": {"partition": "dirichlet"}, "objective": {"loss": "mse"}}),
            out=tmp_path / "run",
            data=(X, X.sum(axis=1)),
        )


def test_the_example_of_speakers_makes_one_device_each(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    speech = "To be, or not to be, that is the question"
    blocks = [f"{name}:\n{speech} {i}!" for i in range(20) for name in ("ANN", "BOB")]
    (tmp_path / "play.txt").write_text("\n\n".join([*blocks, "EVE:\nOnly once."]))
    folder = Path(__file__).parents[2] / "examples" / "shakespeare"
    monkeypatch.chdir(folder)
    tree = tomllib.loads((folder / "shakespeare.toml").read_text())
    change = {"data": {"path": str(tmp_path / "play.txt")}, "stop": {"updates": 8}}
    result = latecomer.run(merged(tree, change), out=tmp_path / "run")
    assert result.summary["devices"] == 2
    assert result.metrics.loss.iloc[-1] < result.metrics.loss.iloc[0]
    import speakers  # type: ignore[import-not-found]

    (x, y), _ = speakers.devices(str(tmp_path / "play.txt"))
    assert x.shape == y.shape == (len(x), speakers.LENGTH)
    np.testing.assert_array_equal(x.reshape(-1)[1:], y.reshape(-1)[:-1])
    assert "".join(speakers.CHARACTERS[code] for code in x[0]).startswith("To be, or not")


def test_a_subject_column_that_no_partition_uses_is_noted(tmp_path: Path) -> None:
    pd.DataFrame({"a": X[:, 0], "label": Y, "person": WHO}).to_csv(tmp_path / "t.csv", index=False)
    table = {"source": "csv", "path": str(tmp_path / "t.csv"), "target": "label"}
    notes = {}
    for partition in ("iid", "by-subject"):
        change = {"data": {**table, "subject": "person", "partition": partition}}
        summary = start_run(parse(merged(TREE, change)), tmp_path / partition)
        notes[partition] = [note for note in summary["notes"] if "data.subject" in note]
    assert "data.partition = 'by-subject'" in notes["iid"][0]
    assert not notes["by-subject"]
