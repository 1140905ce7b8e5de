"""Every kind of model, training, objective and data: one table, three questions.

Does a run improve the model? Does a killed run resume to the same model? Do devices behind the
fake transport, with wire format and disk, end with the same model as the simulation?
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

import own_training
from dying import DieAfter, Killed
from fake_grid import FakeTransport
from kinds_of_networks import KINDS as NETWORKS
from latecomer.core.params import digest
from latecomer.data import given as given_data
from latecomer.device.client import Client
from latecomer.engines.agent import Agent
from latecomer.engines.deployment_loop import DeploymentLoop
from latecomer.engines.wire import InvalidPayload
from latecomer.study.config import Config, merged, parse
from latecomer.study.experiment import Experiment
from latecomer.study.given import Given
from latecomer.study.runner import resume_run, start_run
from problems import huber, inputs

DEVICES, UPDATES = 4, 24
TREE: dict[str, Any] = {
    "data": {"partition": "iid"},
    "fleet": {"devices": DEVICES, "profile": "tiers"},
    "model": {"hidden": [8]},
    "training": {"local_epochs": 1, "batch_size": 8, "lr": 0.1},
    "strategy": {"name": "fedbuff", "size": 2},
    "stop": {"updates": UPDATES},
    "checkpoint": {"every": 6},
    "evaluate": {"every": 12},
    "engine": {"kernel": "plain"},  # the program of devices; others differ in the last bits
}
RNG = np.random.default_rng(0)
NAMES = np.array(["sit", "walk", "run"])


def clustered(rows: int, features: int, classes: int) -> tuple[np.ndarray, np.ndarray]:
    """Points around one random centre per class, and their classes."""
    y = np.arange(rows) % classes
    centres = RNG.normal(size=(classes, features))
    return (centres[y] + 0.5 * RNG.normal(size=(rows, features))).astype(np.float32), y


DIGITS = clustered(160, 64, 10)  # for the networks of kinds_of_networks
X, Y = clustered(120, 6, 3)
WHO = np.arange(120) // 30


@dataclass(frozen=True)
class Kind:
    """Changes of the config and objects of Python; both may need a folder with files."""

    change: Mapping[str, Any] = field(default_factory=dict)
    given: Given = field(default_factory=Given)
    files: Callable[[Path], Mapping[str, Any]] | None = None  # writes them, gives `[data]`
    slow: bool = False
    refused: str = ""  # by devices, in these words


def table() -> pd.DataFrame:
    columns = pd.DataFrame(X, columns=[f"f{i}" for i in range(6)])
    return columns.assign(activity=NAMES[Y], who=WHO, colour=np.where(Y > 0, "red", "blue"))


COLUMNS = {"target": "activity", "subject": "who"}


def csv(folder: Path) -> Mapping[str, Any]:
    table().to_csv(folder / "t.csv", index=False)
    path = str(folder / "t.csv")
    return {"source": "csv", "path": path, "partition": "by-subject", **COLUMNS}


def csv_of_numbers(folder: Path) -> Mapping[str, Any]:
    table().assign(size=X.sum(axis=1)).to_csv(folder / "t.csv", index=False)
    columns = {"target": "size", "ignore": ["activity", "who"]}
    return {"source": "csv", "path": str(folder / "t.csv"), **columns}


def parquet(folder: Path) -> Mapping[str, Any]:
    pytest.importorskip("pyarrow")
    table().to_parquet(folder / "t.parquet")
    return {"source": "parquet", "path": str(folder / "t.parquet"), **COLUMNS}


def npy(folder: Path) -> Mapping[str, Any]:
    for name, array in {"x": X, "y": NAMES[Y]}.items():
        np.save(folder / f"{name}.npy", array)
    return {"source": "npz", "path": str(folder), "partition": "dirichlet", "alpha": 5.0}


def images(folder: Path) -> Mapping[str, Any]:
    image = pytest.importorskip("PIL.Image")
    for row, label in enumerate(Y):
        path = folder / "images" / f"d{row // 30}" / NAMES[label] / f"{row}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        noise = RNG.integers(0, 99, (4, 4))
        image.fromarray((noise + 70 * label).astype(np.uint8)).save(path)
    return {"source": "folder", "path": str(folder / "images"), "partition": "by-subject"}


def devices(seed: int) -> dict[str, Any]:
    """The user's function of `data.source`: one dataset per device, and a test set."""
    rows = np.random.default_rng(seed).permutation(120)
    x, y = X[rows], Y[rows] + 5
    return {"train": [(x[i::5], y[i::5]) for i in range(4)], "test": (x[4::5], y[4::5])}


class Items(Dataset):  # type: ignore[type-arg]
    """Examples one by one, changed at random when they are read."""

    def __len__(self) -> int:
        return len(Y)

    def __getitem__(self, row: int) -> tuple[Tensor, str]:
        return torch.from_numpy(X[row]) + 0.01 * torch.randn(6), str(NAMES[Y[row]])


class Stored(Items):
    """As `Items`; more than fits into memory, see `one_byte_of_memory`."""


def mapped(folder: Path) -> Given:
    np.save(folder / "x.npy", X)
    return Given(data=(np.load(folder / "x.npy", mmap_mode="r"), Y))


class NextToken(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(14, 8)  # a vocabulary larger than the data
        self.out = nn.Linear(8, 14)

    def forward(self, x: Tensor) -> Tensor:
        outputs: Tensor = self.out(self.table(x))
        return outputs


TOKENS = (np.arange(9) + RNG.integers(0, 12, (120, 1))) % 12  # the next token is one more
POINTS, MATRIX = (tensor.numpy() for tensor in inputs(120))
SEVERAL = (POINTS @ MATRIX > 0).astype(np.float32)
SEVERAL[::7, 1] = np.nan


def network(name: str, buffers: str = "average", slow: bool = False, **keys: Any) -> Kind:
    model = {"name": f"kinds_of_networks:{name}", "buffers": buffers}
    return Kind({"model": model, "training": keys}, Given(data=DIGITS), slow=slow)


def training(**keys: Any) -> Kind:
    return Kind({"training": keys}, Given(data=(X, Y)))


def objective(x: Any, y: Any, lr: float = 0.1, **keys: Any) -> Kind:
    return Kind({"objective": keys, "training": {"lr": lr}}, Given(data=(x, y)))


def python(data: Any, **keys: Any) -> Kind:
    return Kind({"data": keys}, Given(data=data))


def source(files: Callable[[Path], Mapping[str, Any]]) -> Kind:
    return Kind(files=files)


KINDS: dict[str, Kind] = {
    **{name: network(name) for name in NETWORKS},
    "Recurrent": network("Recurrent", optimizer="adam", lr=0.03),
    "statistics on the device": network("both", "local"),
    "peft": network("peft_lora", slow=True),
    "adamw": training(optimizer="adamw", lr=0.02, weight_decay=0.1),
    "rmsprop": training(optimizer="rmsprop", lr=0.005),
    "adagrad": training(optimizer="adagrad", lr=0.05),
    "own optimiser": Kind(
        {"training": {"optimizer": "own_training:lion"}},
        Given(data=(X, Y)),
        refused="devices take no module:callable from a server",
    ),
    "cosine": training(schedule="cosine"),
    "step": training(schedule="step", schedule_versions=4),
    "own schedule": training(schedule="own_training:halved"),
    "local steps": training(local_steps=2),
    "own training": Kind(given=Given(data=(X, Y), train=own_training.train)),
    "number": objective(X, X.sum(1), 0.02, loss="mse"),
    "integers as numbers": objective(X, Y + 10, 0.2, loss="mae"),
    "numbers": objective(POINTS, POINTS @ MATRIX, loss="mse"),
    "several labels": objective(POINTS, SEVERAL, 0.5, loss="binary-cross-entropy"),
    "tokens": Kind(
        {"objective": {"loss": "cross-entropy"}, "training": {"lr": 0.5}},
        Given(data=(TOKENS[:, :-1], TOKENS[:, 1:]), model=NextToken),
    ),
    "own loss": Kind(
        {"training": {"lr": 0.2}},
        Given(loss=huber, data=(POINTS, POINTS @ MATRIX), metrics={"mean": lambda o, y: o.mean()}),
    ),
    "csv": source(csv),
    "csv of numbers": Kind(
        {"objective": {"loss": "mse"}, "training": {"lr": 0.02}}, files=csv_of_numbers
    ),
    "parquet": source(parquet),
    "npy": source(npy),
    "images": source(images),
    "own source": Kind({"data": {"source": f"{__name__}:devices"}}),
    "labels of text": python((X, NAMES[Y])),
    "tensors": python(TensorDataset(torch.from_numpy(X), torch.from_numpy(Y + 1))),
    "integer table": python(((10 * X).astype(np.int64), Y)),
    "items": python(Items()),
    "stored items": python(Stored()),
    "mapped": Kind(),
    "one per device": python([(X[i::4], NAMES[Y[i::4]]) for i in range(DEVICES)]),
    "test set": python({"train": (X[:90], Y[:90]), "test": (X[90:], Y[90:])}),
    "frame": python(table(), partition="by-subject", **COLUMNS),
}


def prepared(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Config, Given]:
    """The config and the objects of a kind, whose files are in the folder."""
    kind, given = KINDS[name], KINDS[name].given
    if name == "mapped":
        given = mapped(folder)
    if name == "stored items":
        monkeypatch.setattr(given_data, "IN_MEMORY_BYTES", 1)
    data = {} if kind.files is None else {"data": kind.files(folder)}
    return parse(merged(merged(TREE, kind.change), data)), given


class DeviceOfExperiment(Agent):
    """A device with the client of a simulation: its data and random streams."""

    def __init__(self, client: Client, folder: Path) -> None:
        name = f"device-{client.device}"
        super().__init__(name, client.networks, lambda: (client.x, client.y), folder)
        self.client = client

    def _client(self) -> Client:
        return self.client

    def __call__(self, kind: str, payload: Any) -> Any:
        return self.introduce() if kind == "query" else self.answer(payload)


def on_fake_transport(experiment: Experiment, folder: Path) -> str:
    """The hash of the model after the same updates by devices behind the fake transport."""
    clients, spec = experiment.clients, experiment.spec
    nodes = {i: DeviceOfExperiment(client, folder / str(i)) for i, client in clients.items()}
    examples = {
        i: spec.epoch_examples(client.num_examples) * spec.local_epochs
        for i, client in clients.items()
    }
    server = experiment.server()
    transport = FakeTransport(experiment.fleet, nodes, examples)
    assert DeploymentLoop(server, transport).run(experiment.bounds(server.strategy)) == "updates"
    return digest([server.model()])


CASES = [
    pytest.param(name, id=name, marks=pytest.mark.slow if kind.slow else ())
    for name, kind in KINDS.items()
]


@pytest.mark.parametrize("name", CASES)
def test_it_learns_resumes_and_agrees_with_devices(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if name == "peft":
        pytest.importorskip("peft")
    config, given = prepared(name, tmp_path, monkeypatch)
    whole = start_run(config, tmp_path / "whole", given=given)
    losses = pd.read_csv(tmp_path / "whole/metrics.csv")["loss"]
    assert losses.iloc[-1] < 0.9 * losses.iloc[0]
    with pytest.raises(Killed):
        start_run(config, tmp_path / "killed", DieAfter(13), given=given)
    resumed = resume_run(tmp_path / "killed", given=given)
    assert {**resumed, "wall_seconds": 0} == {**whole, "wall_seconds": 0}
    experiment = Experiment(config, given=given)
    if refused := KINDS[name].refused:
        with pytest.raises(InvalidPayload, match=refused):
            on_fake_transport(experiment, tmp_path)
    else:
        assert on_fake_transport(experiment, tmp_path) == whole["model_hash"]
    # What is sent is what is trained, and what is saved is the whole module.
    model = experiment.model
    assert whole["bytes"]["up"] == 4 * model.layout.size * whole["updates"]
    model.module.load_state_dict(load_file(tmp_path / "whole/model.safetensors"))
    if not model.keeps_buffers:
        test = experiment.data.central_test(0.0)
        with torch.no_grad():
            outputs = model.module.eval()(test.x)
        loss = float(model.objective.mean(outputs, test.y))
        assert loss == pytest.approx(losses.iloc[-1], rel=1e-4)
