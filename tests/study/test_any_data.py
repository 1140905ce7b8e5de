"""Data of every kind: they load, train, and a resumed run ends with the same model."""

import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import latecomer
from latecomer.errors import BadInput
from latecomer.study.config import merged, parse
from latecomer.study.given import Given
from latecomer.study.runner import Silent, resume_run, start_run

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


class Killed(BaseException):
    pass


class DiesAt20(Silent):
    def advanced(self, share: float, updates: int, virtual_seconds: float) -> None:
        if updates >= 20:
            raise Killed


def run_and_resume(folder: Path, change: dict[str, Any], data: Any = None) -> dict[str, Any]:
    """The summary of a run that is killed and resumed, equal to that of an undisturbed run."""
    config, given = parse(merged(TREE, change)), Given(data=data)
    whole = start_run(config, folder / "whole", given=given)
    with pytest.raises(Killed):
        start_run(config, folder / "cut", DiesAt20(), given=given)
    resumed = resume_run(folder / "cut", given=given)
    assert resumed["model_hash"] == whole["model_hash"]
    return whole


def frame() -> pd.DataFrame:
    table = pd.DataFrame(X, columns=[f"f{i}" for i in range(6)])
    return table.assign(activity=NAMES[Y], who=WHO, sum=X.sum(axis=1))


def csv(folder: Path) -> dict[str, Any]:
    frame().to_csv(folder / "t.csv", index=False)
    columns = {"target": "activity", "subject": "who", "ignore": ["sum"]}
    return {"source": "csv", "path": str(folder / "t.csv"), "partition": "by-subject", **columns}


def parquet(folder: Path) -> dict[str, Any]:
    pytest.importorskip("pyarrow")
    frame().to_parquet(folder / "t.parquet")
    columns = {"target": "activity", "subject": "who", "ignore": ["sum"]}
    return {"source": "parquet", "path": str(folder / "t.parquet"), **columns}


def folder_of_npy(folder: Path) -> dict[str, Any]:
    for name, array in {"x": X, "y": NAMES[Y]}.items():
        np.save(folder / f"{name}.npy", array)
    return {"source": "npz", "path": str(folder), "partition": "dirichlet"}


def images(folder: Path) -> dict[str, Any]:
    image = pytest.importorskip("PIL.Image")
    for row, label in enumerate(Y[:120]):
        path = folder / "images" / f"d{row % 8}" / NAMES[label] / f"{row}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        noise = RNG.integers(0, 99, (4, 4))
        image.fromarray((noise + 70 * label).astype(np.uint8)).save(path)
    return {"source": "folder", "path": str(folder / "images"), "partition": "by-subject"}


def module(folder: Path) -> dict[str, Any]:
    (folder / "mine_any_data.py").write_text(
        "import numpy as np\n"
        "def devices(seed):\n"
        "    rng = np.random.default_rng(seed)\n"
        "    y = rng.integers(5, 8, 240)\n"
        "    x = rng.normal(size=(240, 6)) + 2 * y[:, None]\n"
        "    parts = [(x[i::8], y[i::8]) for i in range(7)]\n"
        "    return {'train': parts, 'test': (x[7::8], y[7::8])}\n"
    )
    return {"source": "mine_any_data:devices"}


SOURCES = [csv, parquet, folder_of_npy, images, module]


@pytest.mark.parametrize("source", SOURCES)
def test_classes_of_every_source(
    source: Callable[[Path], dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    summary = run_and_resume(tmp_path, {"data": source(tmp_path)})
    assert summary["accuracy"] > 0.5
    assert set(summary["f1"]) == ({"5", "6", "7"} if source is module else set(NAMES))


OBJECTS: dict[str, Any] = {
    "arrays": (X, Y + 1),
    "tensors": TensorDataset(torch.from_numpy(X), torch.from_numpy(Y + 1)),
    "per device": [(X[d::8], NAMES[Y[d::8]]) for d in range(8)],
    "test set": {"train": (X[:200], NAMES[Y[:200]]), "test": (X[200:], NAMES[Y[200:]])},
    "frame": frame(),
}


@pytest.mark.parametrize("kind", OBJECTS)
def test_python_objects_of_every_kind(kind: str, tmp_path: Path) -> None:
    columns = {"target": "activity", "ignore": ["sum"]} if kind == "frame" else {}
    summary = run_and_resume(tmp_path, {"data": columns}, OBJECTS[kind])
    assert summary["accuracy"] > 0.5
    assert set(summary["f1"]) == ({"1", "2", "3"} if kind in ("arrays", "tensors") else set(NAMES))
    config = tomllib.loads((tmp_path / "whole" / "config.toml").read_text())
    assert config["data"]["source"] == "given:data"
    assert config["data"]["partition"] == ("by-subject" if kind == "per device" else "iid")
    assert config["data"]["test"] == ("official" if kind == "test set" else "fair")


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
        start_run(parse(TREE), folder, DiesAt20(), given=Given(data=(X, Y)))
    with pytest.raises(BadInput, match=r"data.source = 'given:data': it was given in Python"):
        resume_run(folder)
    with pytest.raises(BadInput, match="not those with which the run began; give the same"):
        latecomer.run(resume=folder, data=(X + 1, Y))
    with pytest.raises(BadInput, match="resume= takes no config"):
        latecomer.run(TREE, resume=folder, data=(X, Y))
    assert latecomer.run(resume=folder, data=(X, Y)).summary["updates"] == 40


def test_a_run_that_reads_its_data_takes_no_objects_on_resume(tmp_path: Path) -> None:
    with pytest.raises(Killed):
        start_run(parse(merged(TREE, {"data": {"source": "digits"}})), tmp_path / "a", DiesAt20())
    with pytest.raises(BadInput, match=r"reads its data from data.source; resume it without data"):
        latecomer.run(resume=tmp_path / "a", data=(X, Y))


class NextToken(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(12, 8)
        self.out = nn.Linear(8, 12)

    def forward(self, x: Tensor) -> Tensor:
        outputs: Tensor = self.out(self.table(x.long()))
        return outputs


TOKENS = (np.arange(9) + RNG.integers(0, 12, (240, 1))) % 12  # the next token is one more
SEVERAL = np.where(RNG.random((240, 2)) < 0.1, np.nan, np.stack([Y > 0, Y > 1], axis=1))
TASKS: dict[str, tuple[Any, str, str]] = {
    "numbers": ((X, X.sum(axis=1)), "mse", "mlp"),
    "integers": ((X, Y + 10), "mae", "mlp"),
    "labels": ((X, SEVERAL), "binary-cross-entropy", "mlp"),
    "integer table": ((X.astype(np.int64), Y), "cross-entropy", "mlp"),
    "tokens": ((TOKENS[:, :-1], TOKENS[:, 1:]), "cross-entropy", f"{__name__}:NextToken"),
}


@pytest.mark.parametrize("kind", TASKS)
def test_targets_of_every_kind_train(kind: str, tmp_path: Path) -> None:
    data, loss, model = TASKS[kind]
    change = {
        "objective": {"loss": loss},
        "model": {"name": model},
        "training": {"lr": 0.01 if loss == "mse" else 0.5},
        "evaluate": {"every": 20},
    }
    summary = run_and_resume(tmp_path, change, data)
    losses = pd.read_csv(tmp_path / "whole" / "metrics.csv").loss
    assert losses.iloc[-1] < losses.iloc[0]
    assert np.isfinite(summary["loss"])


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
