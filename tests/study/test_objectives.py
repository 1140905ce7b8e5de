"""Runs with several labels, numbers, tokens and losses of the user's own, from data to report."""

import json
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import tomli_w
import torch
from sklearn.metrics import (
    average_precision_score,
    balanced_accuracy_score,
    f1_score,
    mean_absolute_error,
    r2_score,
    root_mean_squared_error,
)
from typer.testing import CliRunner

import latecomer
from dying import DieAfter, Killed
from latecomer.cli import app, main
from latecomer.device.objective import make_objective
from latecomer.errors import BadInput
from latecomer.study.compare import compare
from latecomer.study.config import Config, parse
from latecomer.study.early_stopping import EarlyStopping
from latecomer.study.experiment import Experiment
from latecomer.study.har.plan import make_plan
from latecomer.study.metric_names import SHARES, label_of
from latecomer.study.metrics import Scores, over_devices, token_scores
from latecomer.study.report import write_report
from latecomer.study.results import Result
from latecomer.study.runner import resume_run, start_run
from latecomer.study.scoring import Scoring
from latecomer.study.view.history import History
from latecomer.study.view.run_document import run_document
from problems import KINDS, a_problem, huber, largest_error

NAN = float("nan")
LOSSES = {
    "number": "mse",
    "numbers": "mae",
    "multi-label": "binary-cross-entropy",
    "tokens": "cross-entropy",
    "own": "problems:huber",
}
METRICS = {
    "number": ["loss", "mae", "rmse", "r2"],
    "numbers": ["loss", "mae", "rmse", "r2"],
    "multi-label": ["loss", "macro_f1", "mean_average_precision", "balanced_accuracy"],
    "tokens": ["loss", "perplexity", "token_accuracy"],
    "own": ["loss"],
}
MAIN = {
    "number": "rmse",
    "numbers": "mae",
    "multi-label": "macro_f1",
    "tokens": "perplexity",
    "own": "loss",
}
every_kind = pytest.mark.parametrize("kind", LOSSES)
Make = Callable[..., dict[str, Any]]


@pytest.fixture(scope="module")
def make(tmp_path_factory: pytest.TempPathFactory) -> Make:
    """The config of a small run with targets of this kind, and changes to it."""

    def tree(kind: str, **changes: Any) -> dict[str, Any]:
        path = tmp_path_factory.mktemp("data") / f"{kind}.npz"
        _, x, y = a_problem(kind)
        np.savez(path, x=np.tile(x.numpy(), (4, 1)), y=np.concatenate([y.numpy()] * 4))
        found: dict[str, Any] = {
            "data": {"source": "npz", "path": str(path), "partition": "iid", "scale": "none"},
            "fleet": {"devices": 5},
            "objective": {"loss": LOSSES[kind]},
            "model": {"name": "problems:Tokens"} if kind == "tokens" else {"hidden": [8]},
            "training": {"lr": 0.1, "batch_size": 8},
            "strategy": {"name": "fedasync"},
            "stop": {"updates": 40},
            "evaluate": {"every": 20},
        }
        for key, value in changes.items():
            found[key] = {**found.get(key, {}), **value}
        return found

    return tree


@pytest.mark.parametrize("kind", ["number", "multi-label"])
def test_files_and_the_best_model_of_a_resumed_run_are_the_same(
    kind: str, make: Make, tmp_path: Path
) -> None:
    config = parse(make(kind, checkpoint={"every": 10}, stop={"updates": 40, "patience": 9}))
    whole = start_run(config, tmp_path / "whole")
    table = pd.read_csv(tmp_path / "whole" / "metrics.csv")
    assert table["loss"].iloc[-1] < 0.9 * table["loss"].iloc[0]
    with pytest.raises(Killed):
        start_run(config, tmp_path / "cut", DieAfter(25))
    resumed = resume_run(tmp_path / "cut")
    assert resumed["model_hash"] == whole["model_hash"]
    again = pd.read_csv(tmp_path / "cut" / "metrics.csv")
    pd.testing.assert_frame_equal(
        again.drop(columns="wall_seconds"), table.drop(columns="wall_seconds")
    )
    assert resumed["best"] == whole["best"]
    assert f"validation_{MAIN[kind]}" in whole["best"]


@every_kind
def test_files_have_the_metrics_of_the_objective(kind: str, make: Make, tmp_path: Path) -> None:
    changes = {"evaluate": {"every": 20, "clients": True}}
    summary = start_run(parse(make(kind, **changes)), tmp_path / "run")
    main = MAIN[kind]
    table = pd.read_csv(tmp_path / "run" / "metrics.csv")
    labels = [f"f1_{j}" for j in range(3)] if kind == "multi-label" else []
    local = [f"client_{main}", f"client_{main}_worst"]
    assert list(table)[4:] == [*METRICS[kind], *labels, *local]
    assert "accuracy" not in json.dumps(summary) or kind in ("multi-label", "tokens")
    assert summary["metrics"] == METRICS[kind]
    assert summary["objective"]["metric"] == main
    assert summary[main] == pytest.approx(table[main].iloc[-1])
    devices = pd.read_csv(tmp_path / "run" / "devices.csv")
    assert summary[f"client_{main}"]["mean"] == pytest.approx(devices[main].mean())
    lower = summary["objective"]["lower_is_better"]
    assert lower == (main != "macro_f1")
    worst = devices[main].max() if lower else devices[main].min()
    assert summary[f"client_{main}"]["worst"] == pytest.approx(worst)
    assert summary["worst_client"] == int((devices[main] == worst).idxmax())
    page = write_report(tmp_path / "run").read_text()
    assert "late-class" not in page.split("plotly")[0]
    document = run_document(Result(tmp_path / "run"), History())
    titles = {view.y_title for panel in document.panels for view in panel.views}
    charted = [name for name in METRICS[kind] if name not in ("loss", *SHARES)]
    assert {label_of(name) for name in charted} <= titles
    assert LOSSES[kind] in titles
    assert label_of(main) in document.facts
    assert f"local test {label_of(main)}" in document.facts
    assert "accuracy" not in document.facts
    assert latecomer.load(tmp_path / "run").metrics["loss"].iloc[-1] > 0  # type: ignore[union-attr]


def test_a_comparison_with_a_measure_of_which_less_is_better(make: Make, tmp_path: Path) -> None:
    tree = make("number")
    table = compare(tree, ["fedasync", "fedbuff"], [1], tmp_path / "all", target=0.4)
    for name, reached in zip(table["strategy"], table["seconds_to_target"], strict=True):
        rows = pd.read_csv(tmp_path / "all" / f"{name}-seed1" / "metrics.csv")
        below = rows[rows["rmse"] <= 0.4]["virtual_seconds"]
        assert (None if pd.isna(reached) else reached) == (below.iloc[0] if len(below) else None)
    assert table["seconds_to_target"].notna().any()
    assert rows["rmse"].iloc[0] > 0.4  # it is not reached from the start
    document = json.loads((tmp_path / "all" / "compare.json").read_text())
    assert document["target_rmse"] == 0.4
    assert "RMSE" in write_report(tmp_path / "all").read_text()
    assert {"rmse_mean", "client_rmse_mean_mean"} <= set(document["table"]["fedasync"])
    defaults = compare(tree, ["fedasync"], [1], tmp_path / "one")
    best = defaults["rmse"].min()
    assert defaults.attrs["target"] == pytest.approx(1.05 * best, rel=1e-3)


def test_the_command_line_shows_the_metrics(make: Make, tmp_path: Path) -> None:
    path = tmp_path / "number.toml"
    path.write_text(tomli_w.dumps(make("number")))
    done = CliRunner().invoke(app, ["run", str(path), "--out", str(tmp_path / "run")])
    assert done.exit_code == 0, done.output
    for text in ("RMSE", "MAE", "R2", "local test RMSE, mean"):
        assert text in done.output
    assert "accuracy" not in done.output
    args = ["compare", str(path), "--strategies", "fedasync", "--seeds", "1", "--target", "2.5"]
    done = CliRunner().invoke(app, [*args, "--out", str(tmp_path / "all")])
    assert done.exit_code == 0, done.output
    assert "fedasync, seed 1: RMSE 0." in done.output
    assert "target: RMSE 2.5 or less" in done.output


# Losses and metrics of the user's own.


def test_a_loss_given_in_python(make: Make, tmp_path: Path) -> None:
    tree = make("number")
    named = latecomer.run(tree | {"objective": {"loss": "problems:one_huber"}}, out=tmp_path / "a")

    def local_huber(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        from problems import one_huber

        return one_huber(outputs, targets)

    metrics = {"largest": lambda out, y: (out.reshape(y.shape) - y).abs().max()}
    given = latecomer.run(tree, out=tmp_path / "b", loss=local_huber, metrics=metrics)
    assert given.summary["model_hash"] == named.summary["model_hash"]
    assert list(given.metrics)[4:] == ["loss", "largest"]
    assert given.summary["largest"] > 0
    config = (tmp_path / "b" / "config.toml").read_text()
    assert '"given:' in config
    with pytest.raises(BadInput, match="given in Python and cannot be imported; give it again"):
        Experiment(parse(tomllib.loads(config)))


def test_a_loss_that_imports_find_again_is_named_in_the_config(make: Make, tmp_path: Path) -> None:
    found = latecomer.run(
        make("own"), out=tmp_path, loss=huber, metrics={"largest_error": largest_error}
    )
    assert 'loss = "problems:huber"' in found.config
    assert '"problems:largest_error"' in found.config
    again = Experiment(parse(tomllib.loads(found.config)))
    assert again.scoring.columns == ("loss", "largest_error")


def test_metrics_by_name(make: Make) -> None:
    tree = make("own", objective={"loss": "problems:huber", "metrics": ["rmse", "r2"]})
    assert Experiment(parse(tree)).scoring.columns == ("loss", "rmse", "r2")


def test_a_mean_is_trained_one_by_one_to_the_same_model(make: Make, tmp_path: Path) -> None:
    both = []
    for loss in ("problems:huber", "problems:mean_huber"):
        tree = make("own", objective={"loss": loss}, engine={"kernel": "auto"})
        config = parse(tree)
        experiment = Experiment(config)
        both.append(experiment.config.engine.kernel)
        start_run(config, tmp_path / loss[9:])
    assert both == ["batched", "plain"]
    assert any("trained one by one" in note for note in experiment.notes)
    tables = [pd.read_csv(tmp_path / f / "metrics.csv")["loss"] for f in ("huber", "mean_huber")]
    pd.testing.assert_series_equal(*tables, rtol=1e-4)


def test_an_own_loss_on_class_labels_is_a_classification(tiny: Callable[..., Config]) -> None:
    loss = "torch.nn.functional:cross_entropy"
    experiment = Experiment(tiny(f"objective.loss={loss}"))
    assert experiment.scoring.main == "accuracy"
    assert not experiment.scoring.objective.per_example
    own = Experiment(tiny(f"objective.loss={loss}", "objective.kind=own"))
    assert own.scoring.columns == ("loss",)


def test_integer_targets_can_be_numbers(make: Make, tmp_path: Path) -> None:
    _, x, y = a_problem("number")
    ages = (10 * y.numpy()).astype(np.int64)
    np.savez(tmp_path / "ages.npz", x=x.numpy(), y=ages)
    tree = make("number", data={"path": str(tmp_path / "ages.npz")})
    found = Experiment(parse(tree)).federation
    assert set(found.test.y.tolist()) <= set(ages.tolist())


def test_several_labels_may_be_integers(make: Make, tmp_path: Path) -> None:
    _, x, y = a_problem("multi-label")
    np.savez(tmp_path / "bits.npz", x=x.numpy(), y=np.nan_to_num(y.numpy()).astype(np.int64))
    tree = make("multi-label", data={"path": str(tmp_path / "bits.npz")})
    assert Experiment(parse(tree)).federation.test.y.dtype == torch.float32


# Parts that need classes.


@pytest.mark.parametrize(
    ("kind", "settings", "note"),
    [
        ("number", {"strategy": {"name": "feddc"}}, "feddc: late updates are not compensated"),
        ("number", {"strategy": {"name": "latecomer"}}, "latecomer: late updates are not comp"),
        ("tokens", {"strategy": {"name": "echopfl"}}, "echopfl: clusters form by distances and"),
        ("number", {"personalise": {"prior": True}}, "personalise.prior has no effect"),
    ],
)
def test_parts_that_need_classes_step_aside(
    kind: str, settings: dict[str, Any], note: str, make: Make, tmp_path: Path
) -> None:
    settings = {"stop": {"updates": 15}, **settings}
    summary = start_run(parse(make(kind, **settings)), tmp_path / "run")
    assert pd.Series(summary["notes"]).str.contains(note).any()
    assert np.isfinite(summary["loss"])


def test_several_labels_can_be_inverted(make: Make) -> None:
    experiment = Experiment(parse(make("multi-label", strategy={"name": "feddc"})))
    assert not [note for note in experiment.notes if "compensated" in note]


def test_large_targets_are_noted(make: Make, tmp_path: Path) -> None:
    _, x, y = a_problem("number")
    np.savez(tmp_path / "large.npz", x=x.numpy(), y=1e4 * y.numpy())
    tree = make("number", data={"path": str(tmp_path / "large.npz")})
    assert any("standard deviation of" in note for note in Experiment(parse(tree)).notes)


# What is refused, in one line.


def text_labels(folder: Path) -> dict[str, Any]:
    x = np.random.default_rng(1).normal(size=(20, 5))
    np.savez(folder / "text.npz", x=x, y=np.array(["sit", "walk"] * 10))
    return {"data": {"path": str(folder / "text.npz")}}


WRONG: dict[str, tuple[str, dict[str, Any], str]] = {
    "unknown loss": ("number", {"loss": "msee"}, "'msee' is unknown; did you mean 'mse'?"),
    "unknown metric": ("number", {"metrics": ["r3"]}, "'r3' is unknown; did you mean 'r2'?"),
    "metric of another kind": ("number", {"metrics": ["accuracy"]}, "not for regression targets"),
    "metric that fails": (
        "number",
        {"metrics": ["problems:broken_metric"]},
        "'broken_metric': calling it failed: ZeroDivisionError",
    ),
    "taken name": ("own", {"metrics": ["problems:loss"]}, "'loss' is a column already"),
    "NaN loss": ("number", {"loss": "problems:nan_loss"}, "gives NaN for the initial model"),
    "numbers for classes": ("number", {"loss": "cross-entropy"}, "needs class labels or tokens"),
    "numbers for labels": ("number", {"loss": "binary-cross-entropy"}, "with 0, 1 and NaN for unk"),
    "tokens for a regression": ("tokens", {"loss": "mse"}, r"forward must give numbers of shape"),
    "wrong kind": ("number", {"kind": "classes"}, "needed are (n,) integers"),
    "kind of another loss": ("multi-label", {"kind": "own"}, "is for multi-label"),
    "no module": ("number", {"loss": "nowhere:loss"}, "cannot import 'nowhere'"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_objectives(case: str, make: Make, tmp_path: Path) -> None:
    kind, changes, message = WRONG[case]
    tree = make(kind)
    tree["objective"] = {**tree["objective"], **changes}
    with pytest.raises(BadInput) as caught:
        Experiment(parse(tree))
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"strategy": {"name": "clusterfl"}}, "'clusterfl' compares class probabilities"),
        ({"fleet": {"late": {"classes": [1]}}}, "fleet.late.classes needs class labels"),
        ({"engine": {"kernel": "compiled"}}, "computes cross-entropy over classes only"),
    ],
)
def test_settings_that_need_classes(changes: dict[str, Any], message: str, make: Make) -> None:
    with pytest.raises(BadInput, match=message):
        Experiment(parse(make("number", **changes)))


@pytest.mark.parametrize("changes", [{"privacy": {"epsilon": 2.0}}, {"training": {"clip": 1.0}}])
def test_a_mean_cannot_be_clipped(changes: dict[str, Any], make: Make) -> None:
    tree = make("own", objective={"loss": "problems:mean_huber"}, **changes)
    with pytest.raises(BadInput, match="gives a mean over the batch, but the gradient of each"):
        Experiment(parse(tree))


def test_one_value_per_example_can_be_private(make: Make, tmp_path: Path) -> None:
    tree = make("own", privacy={"epsilon": 2.0}, stop={"updates": 5})
    assert start_run(parse(tree), tmp_path / "run")["epsilon"]["max"] > 0


def test_text_for_numbers_is_one_line_with_exit_code_2(
    make: Make,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = tmp_path / "text.toml"
    path.write_text(tomli_w.dumps(make("number", **text_labels(tmp_path))))
    monkeypatch.setattr("sys.argv", ["latecomer", "run", str(path), "--out", str(tmp_path / "run")])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert "needs numbers as targets, but they are text, such as 'sit'" in said
    assert said.count("\n") == 1
    assert not (tmp_path / "run").exists()


def test_advice_and_the_activity_study_need_accuracies(make: Make, tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"latecomer advise reads accuracies, which objective\.loss"):
        latecomer.advise(make("number"))
    with pytest.raises(BadInput, match="latecomer study har reads accuracies"):
        make_plan(make("number"))
    start_run(parse(make("number", stop={"updates": 5})), tmp_path / "run")
    with pytest.raises(BadInput, match="latecomer advise reads accuracies"):
        latecomer.advise(tmp_path / "run")


def test_targets_out_of_range(make: Make, tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"--target 1.5: macro-F1 is between 0 and 1"):
        compare(make("multi-label"), ["fedasync"], [1], tmp_path / "all", target=1.5)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"loss": 3}, "loss: a int; allowed are a name or a function"),
        ({"metrics": {"a": 3}}, "metrics: 'a' is a int; it must be callable"),
        ({"metrics": 3}, "metrics: a int; allowed are names in a list"),
    ],
)
def test_wrong_python_arguments(
    given: dict[str, Any], message: str, tmp_path: Path, make: Make
) -> None:
    with pytest.raises(BadInput, match=message):
        latecomer.run(make("number"), out=tmp_path / "run", **given)


# Metrics, against scikit-learn and by hand.


def scores(loss: str, outputs: torch.Tensor, targets: torch.Tensor) -> Scores:
    objective = make_objective(loss, 3, tuple(targets.shape[1:]))
    return Scoring(objective).scores([(outputs[:7], targets[:7]), (outputs[7:], targets[7:])])


def test_scores_of_labels() -> None:
    rng = torch.Generator().manual_seed(1)
    outputs = torch.randn(30, 3, generator=rng).round(decimals=1)  # with ties
    targets = (torch.rand(30, 3, generator=rng) > 0.6).float()
    targets[::4, 1] = NAN
    found = scores("binary-cross-entropy", outputs, targets)
    each: dict[str, list[float]] = {"f1": [], "ap": [], "balanced": []}
    for j in range(3):
        known = ~targets[:, j].isnan()
        y, out = targets[known, j].numpy(), outputs[known, j].numpy()
        each["f1"].append(f1_score(y, out > 0))
        each["ap"].append(average_precision_score(y, out))
        each["balanced"].append(balanced_accuracy_score(y, out > 0))
    assert found.f1 == pytest.approx(tuple(each["f1"]))
    assert found["macro_f1"] == pytest.approx(np.mean(each["f1"]))
    assert found["mean_average_precision"] == pytest.approx(np.mean(each["ap"]))
    assert found["balanced_accuracy"] == pytest.approx(np.mean(each["balanced"]))


def test_labels_that_never_occur_are_left_out() -> None:
    targets = torch.tensor([[1.0, 0.0, NAN], [0.0, 0.0, NAN]] * 5)
    outputs = torch.tensor([[1.0, -1.0, 1.0], [-1.0, -1.0, 1.0]] * 5)
    found = scores("binary-cross-entropy", outputs, targets)
    assert found.f1 == (1.0, None, None)
    assert (found["macro_f1"], found["mean_average_precision"]) == (1.0, 1.0)
    assert found["balanced_accuracy"] == 1.0


def test_scores_of_numbers() -> None:
    rng = torch.Generator().manual_seed(1)
    outputs, targets = torch.randn(20, 3, generator=rng), torch.randn(20, 3, generator=rng)
    found = scores("mse", outputs, targets)
    y, out = targets.numpy(), outputs.numpy()
    assert found["mae"] == pytest.approx(mean_absolute_error(y, out), rel=1e-5)
    assert found["rmse"] == pytest.approx(root_mean_squared_error(y.ravel(), out.ravel()), rel=1e-5)
    assert found["r2"] == pytest.approx(r2_score(y, out), rel=1e-5)
    assert found["loss"] == pytest.approx(found["rmse"] ** 2, rel=1e-5)  # type: ignore[operator]
    targets[::2] = NAN  # half of the examples: the others count
    half = scores("mse", outputs, targets)
    assert half["loss"] == pytest.approx(np.square(out - y)[1::2].mean(), rel=1e-5)
    assert scores("mse", outputs, torch.ones(20, 3))["r2"] is None
    one = scores("mae", outputs[:, :1], targets.nan_to_num()[:, 0])
    assert one["mae"] == pytest.approx(one["loss"])


def test_scores_of_tokens() -> None:
    logits = torch.tensor([[[0.0, 2.0], [1.0, 0.0]], [[3.0, 0.0], [0.0, 1.0]]]).repeat(5, 1, 1)
    targets = torch.tensor([[1, 1], [0, -1]]).repeat(5, 1)
    found = Scoring(make_objective("cross-entropy", 2, (2,))).scores([(logits, targets)])
    assert found["token_accuracy"] == pytest.approx(2 / 3)
    each = torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), targets.flatten(), ignore_index=-1
    )
    assert found["perplexity"] == pytest.approx(each.exp().item())
    assert token_scores([(logits[:2], torch.full((2, 2), -1))])["perplexity"] is None


@pytest.mark.parametrize(("lower", "best"), [(True, 0.5), (False, 3.0)])
def test_early_stopping_knows_which_way_is_better(lower: bool, best: float) -> None:
    stopping = EarlyStopping(2, ("updates",), "rmse", lower)
    for updates, value in enumerate((2.0, 0.5, 3.0, None)):
        stopping.record({"updates": updates}, Scores({"loss": 0.0, "rmse": value}))
    assert stopping.best is not None
    assert stopping.best["validation_rmse"] == best
    assert stopping.is_over == lower


def test_the_worst_device_has_the_largest_error() -> None:
    each = {1: Scores({"rmse": 0.5}), 2: Scores({"rmse": 2.0}), 3: Scores({"rmse": None})}
    found = over_devices(each, (3,), "rmse", lower_is_better=True)
    assert (found.mean, found.worst, found.worst_device, found.late_mean) == (1.25, 2.0, 2, None)


def test_models_of_several_clusters_are_averaged() -> None:
    scoring = Scoring(make_objective("mse", 1))
    two = [
        (Scores({"loss": 1.0, "mae": 1.0, "rmse": 1.0, "r2": 0.5}), 3.0),
        (Scores({"loss": 5.0, "mae": 2.0, "rmse": 2.0, "r2": None}), 1.0),
    ]
    assert scoring.average(two).values == {"loss": 2.0, "mae": 1.25, "rmse": 1.25, "r2": None}


def test_every_kind_is_covered() -> None:
    assert {*LOSSES} == {*KINDS} - {"classes"}
