"""The command line: exit codes, one-line errors, nothing written when the input is bad."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

import latecomer
from latecomer import cli

TINY = """
[fleet]
devices = 10
[model]
hidden = [8]
[training]
local_epochs = 1
[strategy]
name = "fedasync"
[stop]
updates = 20
"""


@dataclass(frozen=True)
class Outcome:
    code: int
    out: str
    err: str


Call = Callable[..., Outcome]


@pytest.fixture
def call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Call:
    """`latecomer ARGS` in this process and in an empty folder with tiny.toml beside it."""
    work = tmp_path / "work"
    work.mkdir()
    (tmp_path / "tiny.toml").write_text(TINY)
    monkeypatch.chdir(work)

    def go(*args: str) -> Outcome:
        monkeypatch.setattr(sys, "argv", ["latecomer", *args])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        out, err = capsys.readouterr()
        return Outcome(int(ended.value.code or 0), out, err)

    return go


def refused(outcome: Outcome, *words: str) -> None:
    assert outcome.code == 2, outcome
    assert outcome.err.count("\n") == 1, outcome.err
    assert outcome.err.startswith("error: ")
    assert "Traceback" not in outcome.err
    assert outcome.out == ""
    for word in words:
        assert word in outcome.err


# What is set -> what the line must name: the key, the value, what is allowed.
BAD_SETTINGS: list[tuple[str, list[str]]] = [
    ("seeed=3", ["'seeed'", "did you mean 'seed'?"]),
    ("data.souce=digits", ["'data.souce'", "did you mean 'source'?", "partition"]),
    ("fleet.late.dely=3", ["'fleet.late.dely'", "did you mean 'delay'?"]),
    ("nosuchsection.x=3", ["'nosuchsection'", "training"]),
    ("trainin.lr=0.1", ["'trainin'", "did you mean 'training'?"]),
    ("seed=abc", ["seed", "'abc'", "integer"]),
    ("seed=-1", ["seed", "-1", "greater than or equal to 0"]),
    ("seed=1.5", ["seed", "1.5", "integer"]),
    ("fleet.devices=true", ["fleet.devices", "True", "integer"]),
    ('fleet.devices="10"', ["fleet.devices", "'10'", "integer"]),
    ("fleet.devices=0", ["fleet.devices", "0", "greater than or equal to 1"]),
    ("fleet.devices=[1]", ["fleet.devices", "integer"]),
    ("fleet.crash=2", ["fleet.crash", "2", "less than or equal to 1"]),
    ("fleet.up=0", ["fleet.up", "greater than 0"]),
    ("fleet.late.delay=-1", ["fleet.late.delay", "-1", "0 or more"]),
    ("fleet.late.delay=inf", ["fleet.late.delay", "inf", "0 or more"]),
    ("fleet.late.delay=long", ["fleet.late.delay", "'long'", "gamma"]),
    ("fleet.late.delay={gamma = 0}", ["fleet.late.delay", "gamma"]),
    ("fleet.late.delay={gama = 10}", ["fleet.late.delay", "'gama'", "{gamma = 10}"]),
    ("fleet.late.kind=slow", ["fleet.late.kind", "'slow'", "'in-flight' or 'busy'"]),
    ("fleet.late.classes=[10]", ["fleet.late.classes", "10", "0 to 9"]),
    ("fleet.late.classes=[-1]", ["fleet.late.classes", "-1", "0 to 9"]),
    ("fleet.late.classes=5", ["fleet.late.classes", "5"]),
    ("fleet.late=5", ["fleet.late", "5"]),
    ("model.hidden=64", ["model.hidden", "64"]),
    ("model.hidden=[8,0]", ["model.hidden", "1 or more"]),
    ("model.name=mpl", ["'mpl'", "did you mean 'mlp'?", "module:callable"]),
    ("model.name=nosuchmodule:Net", ["nosuchmodule"]),
    ("training.lr=-0.1", ["training.lr", "-0.1", "greater than 0"]),
    ("training.lr=0", ["training.lr", "greater than 0"]),
    ("training.lr=inf", ["training.lr", "inf", "finite"]),
    ("training.lr=nan", ["training.lr", "nan"]),
    ("training.momentum=1", ["training.momentum", "less than 1"]),
    ("training.batch_size=0", ["training.batch_size", "greater than or equal to 1"]),
    ("training.optimizer=sgdm", ["training.optimizer", "'sgdm'", "sgd, adam, adamw"]),
    ("strategy=5", ["strategy = 5", "table", "strategy.name"]),
    ("strategy.name=fedasyn", ["'fedasyn'", "did you mean 'fedasync'?", "fedbuff"]),
    ("strategy.name=nosuchmodule:build", ["strategy", "nosuchmodule"]),
    ("strategy.alpa=0.5", ["strategy.alpa", "did you mean 'alpha'?", "concurrency"]),
    ("strategy.alpha=3", ["strategy.alpha", "3", "less than or equal to 1"]),
    ("strategy.decay=cubic", ["strategy.decay", "'cubic'", "'polynomial'"]),
    ("privacy.epsilon=-1", ["privacy.epsilon", "-1", "greater than or equal to 0"]),
    ("privacy.epsilon=inf", ["privacy.epsilon", "inf", "finite"]),
    ("privacy.epsilon=[1]", ["privacy.epsilon", "[1]", "number"]),
    ("privacy.delta=0", ["privacy.delta", "0", "greater than 0"]),
    ("privacy.delta=1", ["privacy.delta", "1", "less than 1"]),
    ("privacy.clip=0", ["privacy.clip", "0", "greater than 0"]),
    ("privacy.mode=per-run", ["privacy.mode", "'per-run'", "'per-step' or 'whole-run'"]),
    ("privacy.where=server", ["privacy.where", "'server'", "'step' or 'update'"]),
    ("privacy.noise=uniform", ["privacy.noise", "'uniform'", "'gaussian' or 'laplace'"]),
    ("privacy.sampling=all", ["privacy.sampling", "'all'", "'shuffle' or 'poisson'"]),
    ("privacy.accountant=gdp", ["privacy.accountant", "'gdp'", "'pld' or 'rdp'"]),
    ("privacy.denominator=n", ["privacy.denominator", "'n'", "'batch' or 'dataset'"]),
    ("privacy.budget=-1", ["privacy.budget", "-1", "greater than or equal to 0"]),
    ("privacy.tasks=1.5", ["privacy.tasks", "1.5", "integer"]),
    ("privacy.epsillon=1", ["'privacy.epsillon'", "did you mean 'epsilon'?", "budget"]),
    ("submodels.level=half", ["submodels.level", "'half'", "'declared'", "'measured'"]),
    ("submodels.widths=0.5", ["submodels.widths", "0.5"]),
    ('submodels.widths=["half"]', ["submodels.widths", "'half'", "number"]),
    ("submodels.slack=0", ["submodels.slack", "0", "greater than 0"]),
    ("submodels.width=[1.0]", ["'submodels.width'", "did you mean 'widths'?"]),
    ("strategy.decay=reciprocl", ["strategy.decay", "'reciprocl'", "'reciprocal'"]),
    ("data.source=mars", ["'mars'", "digits", "npz"]),
    ("data.partition=random", ["data.partition", "'random'", "'dirichlet'"]),
    ("data.partition=by-subject", ["by-subject", "subject"]),
    ("data.alpha=0", ["data.alpha", "greater than 0"]),
    ("data.test=official", ["official", "fair"]),
    ("data.path=x.npz", ["digits", "x.npz"]),
    ("fleet.profile=moon", ["fleet.profile", "'moon'", "uniform", "tiers"]),
    ("fleet.profile=trace", ["fleet.path", "trace"]),
    ("stop.updates=-1", ["stop.updates", "-1", "greater than or equal to 0"]),
    ("evaluate.every=0.5", ["evaluate.every", "0.5", "integer"]),
    ("checkpoint.seconds=0", ["checkpoint.seconds", "greater than 0"]),
    ("nonsense", ["--set", "'nonsense'", "a.b=value"]),
    ("a..b=1", ["--set", "'a..b=1'", "a.b=value"]),
    ("=1", ["--set", "a.b=value"]),
    ("seed.x=1", ["--set", "'seed.x=1'", "not a table"]),
]


@pytest.mark.parametrize(("setting", "words"), BAD_SETTINGS, ids=[s for s, _ in BAD_SETTINGS])
def test_a_bad_setting_is_one_line(
    call: Call, tmp_path: Path, setting: str, words: list[str]
) -> None:
    settings = ["--set", "seed=1", "--set", setting]
    refused(call("run", "../tiny.toml", *settings, "--out", "../out"), *words)
    assert not (tmp_path / "out").exists()
    assert list((tmp_path / "work").iterdir()) == []


DECLARED, MEASURED = "submodels.level=declared", "submodels.level=measured"
PRIVATE = "privacy.epsilon=1.0"
PRIVAASYNCFED = "strategy.name=privaasyncfed"

# Each right by itself, wrong together.
BAD_TOGETHER: list[tuple[list[str], list[str]]] = [
    ([DECLARED, "submodels.widths=[0.5, 0.5]"], ["submodels.widths", "[0.5, 0.5]", "twice"]),
    ([MEASURED, "submodels.widths=[0.5, 0.5]"], ["submodels.widths", "[0.5, 0.5]", "twice"]),
    ([DECLARED, "submodels.widths=[2.0]"], ["submodels.widths", "[2.0]", "at most 1"]),
    ([DECLARED, "submodels.widths=[1, 0]"], ["submodels.widths", "above 0"]),
    ([MEASURED, "submodels.widths=[-0.5]"], ["submodels.widths", "[-0.5]", "above 0"]),
    ([MEASURED, "submodels.widths=[]"], ["submodels.widths", "[]", "one or more"]),
    ([DECLARED, "submodels.shares=[1, 1]"], ["submodels.shares", "2 shares for 4 widths"]),
    (
        [DECLARED, "submodels.widths=[1.0]", "submodels.shares=[1, 1, 1, 1]"],
        ["submodels.shares", "4 shares for 1 width"],
    ),
    ([DECLARED, "submodels.shares=[0, 0, 0, 0]"], ["submodels.shares", "one of them above 0"]),
    ([DECLARED, "submodels.shares=[1, 1, 1, -1]"], ["submodels.shares", "-1", "0 or more"]),
    ([PRIVAASYNCFED, "submodels.widths=[2.0]"], ["submodels.widths", "[2.0]"]),
    ([PRIVAASYNCFED, "model.hidden=[]"], ["submodels.widths", "nothing is pruned"]),
    ([PRIVATE, "strategy.name=ifca"], ["'ifca'", "privacy.epsilon = 0"]),
    ([PRIVATE, "strategy.name=centralised"], ["'centralised'", "privacy.epsilon = 0"]),
    ([PRIVATE, "training.clip=2.0"], ["training.clip = 2", "privacy.clip"]),
    ([PRIVATE, "engine.kernel=compiled"], ["engine.kernel", "needs the plain kernel"]),
    (
        [PRIVATE, "privacy.where=update", "privacy.sampling=poisson", "engine.kernel=plain"],
        ["privacy.sampling", "'poisson'", "privacy.where"],
    ),
    (
        [PRIVATE, "privacy.where=update", "privacy.denominator=dataset", "engine.kernel=plain"],
        ["privacy.denominator", "'dataset'"],
    ),
    *(
        (
            [
                PRIVATE,
                mode,
                "privacy.noise=laplace",
                "privacy.sampling=poisson",
                "privacy.accountant=rdp",
                "engine.kernel=plain",
            ],
            ["privacy.accountant", "'rdp'", "use pld"],
        )
        for mode in ("privacy.mode=whole-run", "privacy.mode=per-step")
    ),
]


@pytest.mark.parametrize(("settings", "words"), BAD_TOGETHER, ids=[str(s) for s, _ in BAD_TOGETHER])
def test_settings_that_do_not_go_together_are_one_line(
    call: Call, tmp_path: Path, settings: list[str], words: list[str]
) -> None:
    options = [option for setting in settings for option in ("--set", setting)]
    for command in (["run", "--out", "../out"], ["check"]):
        refused(call(command[0], "../tiny.toml", *options, *command[1:]), *words)
    assert not (tmp_path / "out").exists()


def test_a_private_run_tells_what_was_spent(call: Call, tmp_path: Path) -> None:
    settings = ["--set", PRIVATE, "--set", PRIVAASYNCFED]
    outcome = call("run", "../tiny.toml", *settings, "--out", "../out")
    assert (outcome.code, outcome.err) == (0, "")
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert summary["epsilon"]["max"] > 1
    checked = call("check", "../tiny.toml", *settings).out
    assert 'level = "declared"' in checked
    assert "epsilon = 1.0" in checked


def test_check_refuses_the_same_as_run(call: Call) -> None:
    refused(call("check", "../tiny.toml", "--set", "fleet.devices=0"), "fleet.devices")
    refused(call("check", "../tiny.toml", "--set", "strategy.alpa=0"), "did you mean 'alpha'?")


def test_the_line_names_the_config_file(call: Call, tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text("[training]\nlr = -1\n")
    refused(call("run", "../mine.toml", "--out", "../out"), "../mine.toml", "training.lr")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, ["no such config file"]),
        (b"a = [", ["not valid TOML"]),
        (b"seed = 1\nseed = 2\n", ["not valid TOML"]),
        (b"\xff\xfe\x00", ["cannot be read"]),
        (b"a = " + b"[" * 50_000, ["not valid TOML"]),
    ],
)
def test_a_bad_config_file(
    call: Call, tmp_path: Path, content: bytes | None, words: list[str]
) -> None:
    path = tmp_path / "bad.toml"
    if content is not None:
        path.write_bytes(content)
    for command in (["run", str(path), "--out", "../out"], ["check", str(path)]):
        refused(call(*command), "bad.toml", *words)
    assert not (tmp_path / "out").exists()


def test_a_folder_is_no_config(call: Call, tmp_path: Path) -> None:
    refused(call("run", str(tmp_path), "--out", "../out"), str(tmp_path))


def npz(path: Path, x: object = None, y: object = None, **more: object) -> Path:
    """40 examples of 2 classes unless told otherwise."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(40, 3)) if x is None else x
    y = np.arange(40) % 2 if y is None else y
    np.savez(path, x=np.asarray(x), y=np.asarray(y), **{k: np.asarray(v) for k, v in more.items()})
    return path


def with_column(value: float) -> np.ndarray:
    x = np.ones((40, 3))
    x[:, 1] = value
    return x


def with_one(value: float) -> np.ndarray:
    x = np.random.default_rng(0).normal(size=(40, 3))
    x[4, 1] = value
    return x


def truncated(path: Path) -> None:
    whole = npz(path).read_bytes()
    path.write_bytes(whole[: len(whole) // 2])


BAD_DATA: dict[str, tuple[Callable[[Path], object], list[str]]] = {
    "missing": (lambda path: None, ["no such file"]),
    "truncated": (truncated, ["intact"]),
    "text": (lambda path: path.write_text("a,b\n1,2\n"), ["npz"]),
    "label out of range": (
        lambda path: npz(path, y=np.arange(40) % 3, class_names=["a", "b"]),
        ["label 2", "row 2", "0 to 1"],
    ),
    "infinite": (lambda path: npz(path, x=with_one(np.inf)), ["row 4", "column 1", "finite"]),
    "all-NaN column": (lambda path: npz(path, x=with_column(np.nan)), ["column 1", "missing"]),
    "no y": (lambda path: np.savez(path, x=np.ones((4, 2))), ["'y'"]),
    "fewer labels": (lambda path: npz(path, y=np.arange(39) % 2), ["40", "39"]),
    "pickled": (lambda path: npz(path, y=np.array([{}] * 40)), ["'y'", "pickled"]),
}


@pytest.mark.parametrize("kind", BAD_DATA)
def test_bad_data_is_one_line(call: Call, tmp_path: Path, kind: str) -> None:
    write, words = BAD_DATA[kind]
    path = tmp_path / "data.npz"
    write(path)
    settings = ["--set", "data.source=npz", "--set", f'data.path="{path}"']
    refused(call("run", "../tiny.toml", *settings, "--out", "../out"), "data.npz", *words)
    assert not (tmp_path / "out").exists()


BAD_TABLES: dict[str, tuple[str, list[str], list[str]]] = {
    "missing file": ("", [], ["no such file"]),
    "ragged": ("a,label\n1,2,3,4\n1,2\n1,2,3,4,5\n", [], ["cannot be read", "Expected"]),
    "wrong column": ("a,lable\n1,2\n2,3\n", [], ["no column 'label'", "did you mean 'lable'"]),
    "wrong subject": ("a,label,who\n1,2,x\n2,3,y\n", ["data.subject=woh"], ["'who'"]),
    "no subject": ("a,label\n1,2\n2,3\n", ["data.partition=by-subject"], ["by-subject needs"]),
    "no labels": ("a,label\n1,\n2,\n", [], ["missing in every row"]),
    "numbers as classes": ("a,label\n1,2.5\n2,3.5\n", [], ["cross-entropy", "needs class labels"]),
    "other option": (
        "a,label\n1,2\n2,3\n",
        ["data.size=3"],
        ["no option data.size", "data.target"],
    ),
}


@pytest.mark.parametrize("kind", BAD_TABLES)
def test_a_bad_table_is_one_line(call: Call, tmp_path: Path, kind: str) -> None:
    content, changes, words = BAD_TABLES[kind]
    path = tmp_path / "t.csv"
    if content:
        path.write_text(content)
    settings = ["--set", "data.source=csv", "--set", f'data.path="{path}"']
    settings += [part for change in changes for part in ("--set", change)]
    for command in (["run", "--out", "../out"], ["data"]):
        refused(call(command[0], "../tiny.toml", *command[1:], *settings), *words)
    assert not (tmp_path / "out").exists()


def test_data_are_shown(call: Call, tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text("a,label\n" + "".join(f"{i},{'xy'[i % 2]}\n" for i in range(40)))
    settings = ["--set", "data.source=csv", "--set", f'data.path="{path}"']
    settings += ["--set", "data.partition=iid", "--set", "fleet.devices=4"]
    outcome = call("data", "../tiny.toml", *settings)
    assert (outcome.code, outcome.err) == (0, "")
    for part in ("examples   40", "targets    2 classes", "min 10, median 10, max 10", "█ 20"):
        assert part in outcome.out


def test_missing_values_are_allowed_and_told(call: Call, tmp_path: Path) -> None:
    path = npz(tmp_path / "data.npz", x=with_one(np.nan))
    settings = ["--set", "data.source=npz", "--set", f'data.path="{path}"']
    settings += ["--set", "fleet.devices=2", "--set", "data.partition=iid"]
    outcome = call("run", "../tiny.toml", *settings, "--out", "../out")
    assert (outcome.code, outcome.err) == (0, "")
    assert "1 missing values" in outcome.out
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert np.isfinite(summary["loss"])


@pytest.mark.parametrize("target", ["../tiny.toml/sub", "../" + "x" * 300, "/proc/nothing/here"])
@pytest.mark.parametrize("command", [["run"], ["compare", "--strategies", "fedavg"]])
def test_an_output_folder_that_cannot_be_made(call: Call, command: list[str], target: str) -> None:
    outcome = call(command[0], "../tiny.toml", *command[1:], "--out", target)
    refused(outcome, target, "cannot be written")


@pytest.mark.skipif(os.geteuid() == 0, reason="permissions do not bind root")
def test_a_read_only_output_folder(call: Call, tmp_path: Path) -> None:
    locked = tmp_path / "locked"
    locked.mkdir(mode=0o500)
    refused(call("run", "../tiny.toml", "--out", str(locked)), "locked", "cannot be written")
    refused(call("run", "../tiny.toml", "--out", str(locked / "sub")), "cannot be written")


@pytest.mark.parametrize("command", [["run"], ["compare", "--strategies", "fedavg"]])
def test_an_output_folder_that_is_in_use(call: Call, tmp_path: Path, command: list[str]) -> None:
    used = tmp_path / "used"
    used.mkdir()
    (used / "thesis.tex").write_text("precious")
    for target in (used, used / "thesis.tex"):
        outcome = call(command[0], "../tiny.toml", *command[1:], "--out", str(target))
        refused(outcome, str(target), "exists already")
    assert [f.name for f in used.iterdir()] == ["thesis.tex"]
    assert (used / "thesis.tex").read_text() == "precious"


def test_an_empty_output_folder_is_fine(call: Call, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    outcome = call("run", "../tiny.toml", "--out", "../out", "--quiet")
    assert outcome == Outcome(0, "../out\n", "")
    assert (tmp_path / "out" / "report.html").is_file()


def test_resume_of_what_is_no_run(call: Call, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    refused(call("run", "--resume", "../empty"), "../empty", "no run to resume")
    refused(call("run", "--resume", "../nothing"), "../nothing", "no run to resume")
    refused(call("run", "--resume", "../tiny.toml"), "../tiny.toml", "no run to resume")
    assert list((tmp_path / "empty").iterdir()) == []


def test_a_slip_in_the_name_of_the_strategy_key(call: Call) -> None:
    found = call("run", "../tiny.toml", "--set", "strategy.nme=fedavg", "--out", "../out")
    refused(found, "strategy.nme", "did you mean 'name'?")


@pytest.mark.parametrize("more", [["../tiny.toml"], ["--out", "../out"]])
def test_resume_stands_alone(call: Call, more: list[str]) -> None:
    refused(call("run", "--resume", "../run", *more), "--resume", "CONFIG or --out")


def test_a_resume_can_change_a_few_settings_only(call: Call) -> None:
    found = call("run", "--resume", "../run", "--set", "training.lr=0.1", "--set", "seed=2")
    refused(found, "--set 'seed=2'", "cannot change", "training.lr", "stop.updates")


def test_a_comparison_is_no_run_to_resume(call: Call, tmp_path: Path) -> None:
    options = ["--strategies", "fedavg", "--seeds", "1", "--out", "../both", "--quiet"]
    assert call("compare", "../tiny.toml", *options).code == 0
    before = sorted((tmp_path / "both").iterdir())
    refused(call("run", "--resume", "../both"), "no run to resume")
    assert sorted((tmp_path / "both").iterdir()) == before


BAD_COMPARISONS: list[tuple[str, list[str], list[str]]] = [
    ("", ["--strategies", "fedavg,fedasyn"], ["'fedasyn'", "did you mean 'fedasync'?"]),
    ("", ["--strategies", "fedavg,fedavg"], ["--strategies", "twice"]),
    ("", ["--strategies", "fedavg", "--seeds", "1,1"], ["--seeds", "twice"]),
    ("", ["--strategies", "fedavg", "--seeds", "1,x"], ["--seeds", "'1,x'", "whole numbers"]),
    ("", ["--strategies", "fedavg", "--seeds", "1.5"], ["--seeds", "'1.5'", "whole numbers"]),
    ("", ["--strategies", "fedavg", "--seeds=-1"], ["seed", "-1"]),
    ("", ["--strategies", "fedavg", "--seeds", ","], ["--seeds", "at least one"]),
    ("", ["--strategies", " , "], ["--strategies", "at least one"]),
    ("", ["--strategies", "fedavg", "--jobs", "0"], ["--jobs"]),
    ("", ["--strategies", "fedavg", "--set", "fleet.devices=0"], ["fleet.devices"]),
    ("", [], ["--strategies"]),
    ("strategy = 'fedavg'", ["--strategies", "fedavg"], ["strategy", "'fedavg'"]),
    ("compare = 5", ["--strategies", "fedavg"], ["compare", "5"]),
    ("[compare]\nfedavg = 5", ["--strategies", "fedavg"], ["compare", "5"]),
    ("[compare.fedavg]\nstrategy = 5", ["--strategies", "fedavg"], ["strategy", "5"]),
    ("[compare.mine]\nlr = 5", ["--strategies", "mine"], ["mine", "'lr'"]),
    ("[compare.fedavg.training]\nlr = 0", ["--strategies", "fedavg"], ["fedavg", "training.lr"]),
    ("[strategy]\nname = 'fedavg'\nalpha = 0.5", ["--strategies", "fedavg"], ["strategy.alpha"]),
]


@pytest.mark.parametrize(("config", "options", "words"), BAD_COMPARISONS)
def test_a_bad_comparison_is_one_line(
    call: Call, tmp_path: Path, config: str, options: list[str], words: list[str]
) -> None:
    (tmp_path / "mine.toml").write_text(config)
    refused(call("compare", "../mine.toml", *options, "--out", "../out"), *words)
    assert not (tmp_path / "out").exists()


def test_report_of_what_is_no_run(call: Call, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    refused(call("report", "../empty"), "../empty", "metrics.csv", "compare.json")
    refused(call("report", "../nothing"), "../nothing")
    refused(call("report", "../empty", "--format", "gif"), "gif", "'html', 'png', 'svg', 'pdf'")
    assert list((tmp_path / "empty").iterdir()) == []


def test_watch_of_what_is_not_there(call: Call) -> None:
    refused(call("watch", "../nothing"), "../nothing", "no such folder")
    refused(call("watch", ".", "--port", "70000"), "port")


def test_log_is_short_for_its_setting(call: Call) -> None:
    refused(call("run", "../tiny.toml", "--log", "tensorbord"), "log.sinks", "'tensorboard'")
    refused(call("run", "--resume", "x", "--log", "mlflow"), "no run to resume")


@pytest.mark.parametrize(
    ("args", "word"),
    [
        (["nonsense"], "'nonsense'"),
        (["run", "--nonsense"], "--nonsense"),
        (["run", "--out"], "--out"),
        (["run", "a.toml", "b.toml"], "b.toml"),
        (["check"], "config"),
        (["list"], "strategies"),
        (["list", "nonsense"], "'strategies', 'datasets', 'models', 'fleets'"),
        (["report"], "DIR"),
    ],
)
def test_bad_usage_is_one_line(call: Call, args: list[str], word: str) -> None:
    outcome = call(*args)
    refused(outcome)
    assert word.lower() in outcome.err.lower()


@pytest.mark.parametrize(
    ("what", "names"),
    [
        ("strategies", ["fedasync", "fedavg", "fedbuff", "semi-async", "standalone"]),
        ("datasets", ["digits", "npz"]),
        ("models", ["mlp", "cnn1d", "lenet", "resnet18"]),
        ("fleets", ["uniform", "tiers", "gamma", "phones", "trace"]),
    ],
)
def test_list_has_one_line_for_each(call: Call, what: str, names: list[str]) -> None:
    outcome = call("list", what)
    assert (outcome.code, outcome.err) == (0, "")
    first_words = [line.split()[0] for line in outcome.out.splitlines()]
    assert len(first_words) == len(set(first_words))
    assert set(names) <= set(first_words)


def test_list_names_the_paper(call: Call) -> None:
    lines = call("list", "strategies").out.splitlines()
    assert "[Xie et al. 2019]" in next(line for line in lines if line.startswith("fedasync"))


def test_without_a_command_it_helps(call: Call) -> None:
    outcome = call()
    assert outcome.code == 0
    for command in ("run", "compare", "list", "report", "watch", "check"):
        assert command in outcome.out


def test_a_run_without_out_finds_a_free_folder(call: Call, tmp_path: Path) -> None:
    first, second = (call("run", "../tiny.toml", "--quiet").out for _ in range(2))
    assert first == "runs/digits-fedasync-1\n"
    assert second == "runs/digits-fedasync-2\n"


def test_an_interrupt_is_one_line(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "_config", interrupted)
    assert call("check", "../tiny.toml") == Outcome(1, "", "error: interrupted\n")


def test_a_run_that_gets_nowhere_fails(call: Call, tmp_path: Path) -> None:
    settings = ["training.lr=1e6", "training.weight_decay=1e6", "fleet.devices=2"]
    settings = [part for each in settings for part in ("--set", each)]
    outcome = call("run", "../tiny.toml", *settings, "--out", "../out")
    assert outcome.code == 1
    assert outcome.err.count("\n") == 1
    assert outcome.err.startswith("error: ../out: no update could be used: ")
    assert not (tmp_path / "out" / "summary.json").exists()


# The same in processes of their own, as a user starts it.


def process(*args: str, cwd: Path) -> Outcome:
    done = subprocess.run(
        [sys.executable, "-m", "latecomer", *args], cwd=cwd, capture_output=True, text=True
    )
    return Outcome(done.returncode, done.stdout, done.stderr)


def test_a_process_refuses_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text("[fleet]\ndevice = 3\n")
    outcome = process("run", "mine.toml", "--out", "out", cwd=tmp_path)
    refused(outcome, "mine.toml", "'fleet.device'", "did you mean 'devices'?")
    assert not (tmp_path / "out").exists()


def test_a_process_runs(tmp_path: Path) -> None:
    (tmp_path / "tiny.toml").write_text(TINY)
    outcome = process("run", "tiny.toml", "--out", "out", cwd=tmp_path)
    assert (outcome.code, outcome.err) == (0, "")
    assert "client updates" in outcome.out
    assert "report:  out/report.html" in outcome.out


HEAVY = ("torch", "numpy", "pandas", "sklearn", "matplotlib", "fastapi", "pydantic")
PROBE = """
import sys
{body}
print([name for name in {heavy} if name in sys.modules])
"""


@pytest.mark.parametrize(
    "body",
    [
        "import latecomer",
        "import latecomer.cli",
        "sys.argv = ['latecomer', '--help']\n"
        "try: from latecomer.cli import main; main()\n"
        "except SystemExit as end: assert not end.code",
    ],
)
def test_what_is_heavy_is_imported_late(body: str) -> None:
    code = PROBE.format(body=body, heavy=HEAVY)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


def test_the_version_is_told() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "latecomer", "--version"], capture_output=True, text=True
    )
    assert (done.returncode, done.stdout) == (0, f"latecomer {latecomer.__version__}\n")
