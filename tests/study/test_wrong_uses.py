"""Wrong uses of the Python interface and of the command line: one clear line, nothing written."""

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import latecomer
from latecomer import cli
from latecomer.errors import BadInput, RunFailed
from latecomer.study.config import Config, merged
from latecomer.study.key_hints import OTHER_NAMES

N = 60
X = np.random.default_rng(0).normal(size=(N, 4)).astype(np.float32)
Y = np.arange(N) % 2
NUMBERS = X.sum(1)
TOKENS = np.arange(N * 3).reshape(N, 3) % 9
DATA = (X, Y)

SMALL: dict[str, Any] = {
    "fleet": {"devices": 3},
    "model": {"hidden": [4]},
    "training": {"local_epochs": 1},
    "strategy": {"name": "fedasync"},
    "stop": {"updates": 9},
    "data": {"partition": "iid"},
    "engine": {"kernel": "plain"},
}


class Embedded(nn.Module):
    """A classifier of tokens 0 to 4."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.out = nn.Embedding(5, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.embedding(x).mean(1))


class WithSize(nn.Module):
    """A class that needs a number which nobody gives."""

    def __init__(self, size: int) -> None:
        super().__init__()


class Broken(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return N

    def __getitem__(self, row: int) -> tuple[Any, int]:
        if row == 7:
            raise KeyError("gone")
        return X[row], int(Y[row])


def frozen() -> nn.Module:
    return nn.Linear(4, 2).requires_grad_(False)


def normalised() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))


def replaces_a_layer(model: Any, dataset: Any, context: Any) -> None:
    model.weight = nn.Parameter(torch.zeros(7, 7))


def raises(*_: object) -> Any:
    raise KeyError("boom")


def gives(value: object) -> Callable[..., Any]:
    """A training function that returns `value`."""
    return lambda model, dataset, context: value


@dataclass(frozen=True)
class Wrong:
    """A call of `latecomer.run` and the words of the line that refuses it."""

    words: tuple[str, ...]
    given: Mapping[str, Any] = field(default_factory=dict)
    config: Mapping[str, Any] = field(default_factory=dict)


def wrong(*words: str, config: Mapping[str, Any] | None = None, **given: Any) -> Wrong:
    return Wrong(words, given, config or {})


def training(**settings: Any) -> dict[str, Any]:
    return {"training": settings}


RETURNED = ("training.function", "num_examples", "in place")

WRONG: dict[str, Wrong] = {
    # Objectives.
    "text as numbers": wrong("'mse' needs numbers", "'a'", "cross-entropy",
                             data=(X, np.array(["a", "b"])[Y]), loss="mse"),
    "numbers as classes": wrong("'cross-entropy' needs class labels", "mse", data=(X, NUMBERS)),
    "loss gives NaN": wrong("objective.loss", "gives NaN", "finite", "division by 0",
                            data=DATA, loss=lambda o, t: F.cross_entropy(o, t) * float("nan")),
    "loss of the wrong shape": wrong("objective.loss", "(8, 2)", "() or (8,)",
                                     data=DATA, loss=lambda o, t: o),
    "loss gives a float": wrong("objective.loss", "a float", "tensor",
                                data=DATA, loss=lambda o, t: 1.0),
    "loss without gradient": wrong("objective.loss", "does not depend", "detach()",
                                   data=DATA, loss=lambda o, t: F.cross_entropy(o, t).detach()),
    "loss raises": wrong("objective.loss", "outputs (8, 2)", "KeyError: 'boom'",
                         data=DATA, loss=raises),
    "class of a loss": wrong("CrossEntropyLoss", "is a class", "an instance",
                             data=DATA, loss=nn.CrossEntropyLoss),
    "unknown loss": wrong("objective.loss 'cross_entropy'", "did you mean 'cross-entropy'?",
                          data=DATA, loss="cross_entropy"),
    "metric raises": wrong("objective.metrics 'mine'", "KeyError: 'boom'",
                           data=DATA, metrics={"mine": raises}),
    "metric gives text": wrong("objective.metrics 'mine'", "could not convert",
                               data=DATA, metrics={"mine": lambda o, t: "good"}),
    "metrics in a list": wrong("metrics", "{name: function}", data=DATA, metrics=[raises]),
    "unknown metric": wrong("'acuracy'", "did you mean 'accuracy'?", data=DATA,
                            metrics=["acuracy"]),
    # Models.
    "class of torch": wrong("'Linear'", "is a class", "instance", data=DATA, model=nn.Linear),
    "class that needs more": wrong("'WithSize'", "needs size", "a module that is made",
                                   data=DATA, model=WithSize),
    "other inputs": wrong("'Linear'", "batch of shape (2, 4)", "3x2", data=DATA,
                          model=nn.Linear(3, 2)),
    "other outputs": wrong("'Linear'", "shape (n, 2)", "(2, 3)", data=DATA, model=nn.Linear(4, 3)),
    "no module": wrong("model", "OrderedDict", "nn.Module",
                       data=DATA, model=nn.Linear(4, 2).state_dict()),
    "nothing to train": wrong("all parameters are frozen", "requires_grad=True",
                              data=DATA, model=frozen()),
    "tokens out of vocabulary": wrong("model.name = 'given:Embedded'", "0 to 8", "nn.Embedding",
                                      data=(TOKENS, Y), model=Embedded()),
    "negative tokens": wrong("from -1 to 7", "allowed are 0 to", data=(TOKENS - 1, Y),
                             model=Embedded()),
    "buffers": wrong("model.buffers = 'mean'", "'average' or 'local'",
                     config={"model": {"buffers": "mean"}}),
    "clipping with BatchNorm": wrong("privacy.where", "BatchNorm1d at '1'", "nn.GroupNorm",
                                     data=DATA, model=normalised(),
                                     config={"privacy": {"epsilon": 1.0}}),
    # Training.
    "train returns text": wrong(*RETURNED, "a str", data=DATA, train=gives("done")),
    "train returns a model": wrong(*RETURNED, "a Linear", data=DATA, train=gives(nn.Linear(4, 2))),
    "train returns a loss": wrong(*RETURNED, "a float", data=DATA, train=gives(0.25)),
    "train used no example": wrong("training.function", "num_examples = 0", "1 or more",
                                   data=DATA, train=gives(0)),
    "train metric is NaN": wrong("training.function", "'l' is nan", "finite", data=DATA,
                                 train=gives({"num_examples": 3, "l": float("nan")})),
    "train raises": wrong("training.function", "KeyError: 'boom'", "test_wrong_uses.py:",
                          data=DATA, train=raises),
    "train takes two": wrong("training.function", "model, dataset and context",
                             data=DATA, train=lambda model, dataset: 3),
    "train replaces a layer": wrong("training.function", "'weight'", "(2, 4)", "(7, 7)",
                                    "in place", data=DATA, model=nn.Linear(4, 2),
                                    train=replaces_a_layer),
    "train with privacy": wrong("training.function", "privacy.epsilon", "differential privacy",
                                data=DATA, train=gives(3), config={"privacy": {"epsilon": 1.0}}),
    "optimiser": wrong("training.optimizer = 'adm'", "did you mean 'adam'?", "sgd",
                       config=training(optimizer="adm")),
    "schedule": wrong("training.schedule = 'cosin'", "did you mean 'cosine'?",
                      config=training(schedule="cosin")),
    "learning rate": wrong("training.lr = 1e+30", "1000000", config=training(lr=1e30)),
    "name of the learning rate": wrong("'training.learning_rate'", "did you mean 'training.lr'?",
                                       config=training(learning_rate=0.1)),
    # Data.
    "unequal lengths": wrong("60 rows", "50", "equal", data=(X, Y[:50])),
    "no examples": wrong("data", "no examples", data=(X[:0], Y[:0])),
    "three arrays": wrong("data", "a tuple", "(x, y)", data=(X, Y, Y)),
    "one array in a list": wrong("device 1", "(x, y)", data=[DATA, X]),
    "name of a dataset": wrong("'mnist'", "data.source", data="mnist"),
    "a loader": wrong("DataLoader", "map-style torch Dataset",
                      data=torch.utils.data.DataLoader([])),
    "dataset raises": wrong("example 7", "KeyError: 'gone'", data=Broken()),
    "missing number": wrong("row 3 is missing", "remove the row", loss="mse",
                            data=(X, np.where(np.arange(N) == 3, np.nan, NUMBERS))),
    "infinite input": wrong("row 0, column 3", "finite",
                            data=(np.where(np.arange(4 * N).reshape(N, 4) == 3, np.inf, X), Y)),
    "column of targets": wrong("no column 'label' for data.target", "did you mean 'lable'?",
                               data=pd.DataFrame(X).assign(lable=Y)),
    # Strategies and the call itself.
    "unknown strategy": wrong("'fedbuf'", "did you mean 'fedbuff'?", strategy="fedbuf"),
    "no strategy": wrong("strategy: a int", "a Strategy", strategy=5),
    "strategy is no table": wrong("strategy = 'fedbuff'", "strategy.name",
                                  config={"strategy": "fedbuff"}),
}  # fmt: skip


@pytest.mark.parametrize("kind", WRONG)
def test_a_wrong_call_is_one_line(kind: str, tmp_path: Path) -> None:
    case, out = WRONG[kind], tmp_path / "out"
    with pytest.raises(BadInput) as caught:
        latecomer.run(merged(SMALL, case.config), out=out, **case.given)
    line = str(caught.value)
    assert "\n" not in line
    for word in case.words:
        assert word in line
    assert not out.exists()


def test_a_config_of_no_kind() -> None:
    with pytest.raises(BadInput, match="config: a int; allowed are a TOML file"):
        latecomer.run(5)  # type: ignore[arg-type]


def test_a_dataset_that_cannot_be_pickled_needs_one_process(tmp_path: Path) -> None:
    class Local(Broken):
        def __getitem__(self, row: int) -> tuple[Any, int]:
            return X[row], int(Y[row])

    assert latecomer.run(SMALL, tmp_path / "out", data=Local()).summary["updates"] == 9
    with pytest.raises(BadInput, match=r"jobs.*data.*Local") as caught:
        latecomer.compare(SMALL, ["fedasync"], [1], tmp_path / "both", jobs=2, data=Local())
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "both").exists()


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"strategies": "fedavg"}, r"strategies: 'fedavg' is no list.*\['fedavg'\]"),
        ({"seeds": 3}, r"seeds: 3 is no list.*\[3\]"),
        ({"strategies": [5]}, r"strategy"),
        ({"seeds": ["x"]}, r"seed = 'x': must be an integer"),
        ({"strategies": {"mine": 5}}, r"strategy: a int; allowed are a name, a Strategy"),
    ],
)
def test_a_wrong_comparison_is_one_line(given: dict[str, Any], words: str, tmp_path: Path) -> None:
    call: dict[str, Any] = {"strategies": ["fedavg"], "seeds": [1], "data": DATA, **given}
    with pytest.raises(BadInput, match=words) as caught:
        latecomer.compare(SMALL, out=tmp_path / "out", **call)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "out").exists()


def test_what_goes_wrong_after_updates_can_be_resumed(tmp_path: Path) -> None:
    out, is_fixed = tmp_path / "out", False

    def train(model: nn.Module, dataset: Any, context: Any) -> Any:
        with torch.no_grad():
            next(model.parameters()).add_(0.1)
        return 3 if is_fixed or not context.number else "done"

    given = {"data": DATA, "train": train}
    with pytest.raises(RunFailed, match=r"returned a str.*latecomer\.run\(resume=.*same objects"):
        latecomer.run(SMALL, out, **given)
    is_fixed = True
    resumed = latecomer.run(resume=out, **given).summary
    assert (
        resumed["model_hash"] == latecomer.run(SMALL, tmp_path / "b", **given).summary["model_hash"]
    )
    assert resumed["warnings"] == []


def test_a_model_that_never_changes_is_a_warning(tmp_path: Path) -> None:
    found = latecomer.run(SMALL, tmp_path / "out", data=DATA, train=gives(None)).summary
    assert "does your training.function change the model in place?" in found["warnings"][0]


@pytest.mark.parametrize("strategy", ["fedasync", "fedavg", "latecomer"])
def test_updates_that_are_not_finite_name_the_suspects(tmp_path: Path, strategy: str) -> None:
    def diverges(model: nn.Module, dataset: Any, context: Any) -> None:
        with torch.no_grad():
            next(model.parameters()).fill_(float("nan"))

    words = r"no update could be used.*training\.lr = 0\.01 too large.*your training\.function"
    with pytest.raises(RunFailed, match=words):
        latecomer.run(SMALL, tmp_path / "out", strategy, data=DATA, train=diverges)


def test_a_strategy_object_must_be_given_again(tmp_path: Path) -> None:
    out, mine = tmp_path / "out", latecomer.build_strategy("fedbuff", {"size": 2})
    calls = []

    def metric(outputs: Tensor, targets: Tensor) -> float:
        calls.append(1)
        return 1.0 if len(calls) != 4 else raises()

    given = {"data": DATA, "metrics": {"mine": metric}}
    with pytest.raises(RunFailed, match="boom"):
        latecomer.run(SMALL, out, mine, **given)
    with pytest.raises(BadInput, match=r"strategy\.name = 'given:fedbuff': it was given in Python"):
        latecomer.run(resume=out, **given)
    assert latecomer.run(resume=out, strategy=mine, **given).summary["strategy"] == "fedbuff"


# The command line, where it differs.

ROWS = "\n".join(f"{i},{i % 7},{i % 2}" for i in range(N))
FILES = {
    "tiny.toml": "data = {source = 'csv', path = 'good.csv', partition = 'iid'}\n"
    "fleet.devices = 3\nmodel.hidden = [4]\nstop.updates = 9\n"
    "training.local_epochs = 1\nstrategy.name = 'fedasync'\nengine.kernel = 'plain'\n",
    "empty.csv": "",
    "header.csv": "a,b,label\n",
    "slip.csv": f"a,b,lable\n{ROWS}\n",
    "words.csv": "a,label\n" + "\n".join(f"{i},{'xy'[i % 2]}" for i in range(N)) + "\n",
    "texts.csv": "a,label\n" + "\n".join(f"name{i},{i % 2}" for i in range(N)) + "\n",
    "good.csv": f"a,b,label\n{ROWS}\n",
    "pictures/cats/note.txt": "no image",
    "own_code.py": "def raises(model, dataset, context): raise KeyError('boom')\n"
    "def no_optimizer(parameters, lr): return None\ndef no_factor(version): return 'a'\n"
    "def no_data(): raise OSError('no disk')\nnumber = 5\n",
}
RUN = ("run", "tiny.toml", "--out", "out", "--quiet")


def table(path: str, *settings: str) -> tuple[str, ...]:
    return setting("data.source=csv", f"data.path={path}", *settings)


def setting(*settings: str) -> tuple[str, ...]:
    return (*RUN, *(part for each in settings for part in ("--set", each)))


WRONG_COMMANDS: list[tuple[tuple[str, ...], tuple[str, ...]]] = [
    (table("empty.csv"), ("empty.csv", "is empty", "one example per row")),
    (table("header.csv"), ("header.csv", "no rows")),
    (table("slip.csv"), ("no column 'label' for data.target", "did you mean 'lable'?")),
    (table("words.csv", "objective.loss=mse"), ("'mse' needs numbers", "'x'")),
    (table("texts.csv"), ("column 'a'", "60 different texts", "data.ignore")),
    (table("good.csv", "data.partition=by-subject"), ("by-subject", "data.subject")),
    (setting("data.path=''"), ("'csv' needs a path", "data.path")),
    (setting("data.source=good.csv"), ("'good.csv' is a file", "data.path", "csv, parquet")),
    (setting("data.source=folder", "data.path=pictures"), ("pictures", "no image")),
    (
        setting("data.source=digits", "data.path=''", "data.target=y"),
        ("'digits' has no option data.target", "csv, parquet"),
    ),
    (
        setting("data.source=own_code:no_data", "data.path=''"),
        ("own_code:no_data", "OSError: no disk"),
    ),
    (setting("training.function=own_code:raises"), ("KeyError: 'boom'", "own_code.py:1")),
    (setting("training.function=own_code:number"), ("own_code:number", "non-callable")),
    (setting("training.optimizer=own_code:no_optimizer"), ("NoneType", "torch.optim.Optimizer")),
    (setting("training.schedule=own_code:no_factor"), ("training.schedule", "version 0")),
    (setting("model.name=torch.nn:Linear"), ("torch.nn:Linear", "is a class", "instance")),
    (setting("objective.loss=mes"), ("'mes'", "did you mean 'mse'?")),
    (setting("fleet=5"), ("fleet = 5", "table", "fleet.devices")),
    (setting("data.dataset=mnist"), ("did you mean 'data.source'?",)),
    (setting("rounds=3"), ("did you mean 'stop.epochs' or 'stop.updates'?",)),
    (setting("epochs=3"), ("did you mean 'training.local_epochs' or 'stop.epochs'?",)),
    (setting("fleet.clients=3"), ("did you mean 'fleet.devices'?",)),
    (setting("training.batch=3"), ("did you mean 'training.batch_size'?",)),
    (setting("model.optimizer=adam"), ("did you mean 'training.optimizer'?",)),
    (setting("MODEL.name=MLP"), ("'MODEL'", "did you mean 'model'?")),
    (("run", "tiny.tml"), ("no such config file", "did you mean 'tiny.toml'?")),
    (("advise", "nosuch"), ("nosuch: no such config file or folder\n",)),
    (("advise", "tiny.tml"), ("did you mean 'tiny.toml'?",)),
    ((*RUN, "--strategy", "fedbuf"), ("'fedbuf'", "did you mean 'fedbuff'?")),
    ((*RUN, "--seed", "x"), ("--seed", "'x'")),
    (("run", "--resume", "out", "--seed", "3"), ("--resume", "--set")),
    (("compare", "tiny.toml", "--strategies", "fedavg", "--seeds", "3-1"), ("'3-1'", "1-3")),
    (("compare", "tiny.toml", "--strategies", "fedavg", "--seeds", "1-x"), ("'1-x'", "1-3")),
    (("rnu",), ("No such command 'rnu'. Did you mean 'run'?\n",)),
]


@pytest.fixture
def command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, str, str]]:
    """`latecomer ARGS` in a folder with FILES; returns exit code, stdout and stderr."""
    for name, content in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(content)
    monkeypatch.chdir(tmp_path)

    def go(*args: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["latecomer", *args])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        return int(ended.value.code or 0), *capsys.readouterr()

    return go


@pytest.mark.parametrize(
    ("args", "words"), WRONG_COMMANDS, ids=[" ".join(a) for a, _ in WRONG_COMMANDS]
)
def test_a_wrong_command_is_one_line(
    command: Callable[..., tuple[int, str, str]],
    args: tuple[str, ...],
    words: tuple[str, ...],
    tmp_path: Path,
) -> None:
    before = {path.name for path in tmp_path.iterdir()}
    code, out, err = command(*args)
    assert (code, out, err.count("\n")) == (2, "", 1), err
    for word in words:
        assert word in err
    assert {path.name for path in tmp_path.iterdir()} - {"__pycache__"} == before


def test_short_forms_and_ranges(command: Callable[..., tuple[int, str, str]]) -> None:
    code, out, _ = command(*RUN, "--strategy", "fedbuff", "--seed", "7")
    summary = latecomer.load("out").summary
    assert (code, summary["strategy"], summary["seed"]) == (0, "fedbuff", 7)
    assert cli._seeds("1-3, 7,9-9") == [1, 2, 3, 7, 9]
    assert command("check", "tiny.toml", "--set", "strategy=fedavg")[1].count('"fedavg"') == 1
    for args in ((), ("run",), ("deploy", "up"), ("study", "har")):
        code, out, err = command(*args, "-h")
        assert (code, err) == (0, "")
        assert "--help" in out


def test_every_hint_names_a_key_that_exists() -> None:
    for keys in OTHER_NAMES.values():
        for key in keys:
            section: Any = Config
            for part in key.split("."):
                section = getattr(section, "model_fields", {})[part].annotation
