"""Options of recipes: old names, typos, and the way of an option through a run."""

import json
import sys
import tomllib
from pathlib import Path

import pytest

from dying import DieAfter, Killed
from latecomer import cli
from latecomer.core.strategy import Strategy
from latecomer.errors import BadInput
from latecomer.strategies.recipe import (
    REMOVED,
    RENAMED,
    Recipe,
    build_strategy,
    find_recipe,
    recipes,
    resolve_options,
)
from latecomer.study.config import Tree, parse, with_settings
from latecomer.study.runner import start_run

OLD_OPTIONS = [(name, old, new) for name, of in RENAMED.items() for old, new in of.items()]
TINY: Tree = {
    "data": {"alpha": 0.5},
    "fleet": {"devices": 5},
    "model": {"hidden": [8]},
    "training": {"local_epochs": 1, "lr": 0.1},
    "strategy": {"name": "latecomer"},
    "stop": {"updates": 40},
    "checkpoint": {"every": 9},
}


EPOCHS = """centralised fedadagrad fedadam fedavg fedavgm feddc fedprox fedsea fedyogi first-order
heterofl oort robust-quorum safa semi-async unstale w-pred weighted"""


def test_strategies_with_epochs_and_with_a_model_per_cluster() -> None:
    built = {name: build_strategy(name) for name in recipes()}
    assert {name for name, s in built.items() if s.has_epochs} == set(EPOCHS.split())
    clustered = {"clusterfl", "echopfl", "ifca"}
    assert {name for name, s in built.items() if s.personal} == clustered


def test_a_factory_that_fails_or_gives_no_strategy_is_refused_in_one_line() -> None:
    def fails() -> Strategy:
        raise RuntimeError("no such file\nand more")

    with pytest.raises(BadInput, match=r"^strategy 'mine': calling it failed: .*no such file$"):
        Recipe("mine", "", "", fails).make({})
    with pytest.raises(BadInput, match=r"^strategy 'mine': gave a int, must give a Strategy"):
        Recipe("mine", "", "", lambda: 3).make({})
    assert Recipe("mine", "", "", Strategy).make({"name": "other"}).name == "other"


def line(strategy: str, options: dict[str, object]) -> str:
    with pytest.raises(BadInput) as refused:
        build_strategy(strategy, options)
    assert "\n" not in str(refused.value)
    return str(refused.value)


@pytest.mark.parametrize(("strategy", "old", "new"), OLD_OPTIONS)
def test_an_old_option_is_refused_with_its_new_name(strategy: str, old: str, new: str) -> None:
    """And the new name is an option, or with a dot a key of the config."""
    place = new if "." in new else f"strategy.{new}"
    said = line(strategy, {old: 1})
    assert f"strategy.{old}: {strategy} has no such option; it is now {place} (options: " in said
    if "." in new:
        section, key = new.split(".")
        assert key in type(getattr(parse(TINY), section)).model_fields
    else:
        assert new in resolve_options(find_recipe(strategy), {})


@pytest.mark.parametrize(
    "removed",
    ["advanced", "push", "wait", "trust_region", "averaging", "interpolation", "age_discount"],
)
def test_a_removed_option_is_refused_with_those_that_exist(removed: str) -> None:
    said = line("latecomer", {removed: 1})
    assert said.startswith(f"strategy.{removed}: latecomer has no such option")
    assert "it is now" not in said
    assert "(options: share, compensate, " in said


@pytest.mark.parametrize(
    ("removed", "instead"), [(o, i) for of in REMOVED.values() for o, i in of.items()]
)
def test_a_removed_option_is_refused_with_what_replaces_it(removed: str, instead: str) -> None:
    said = line("latecomer", {removed: 1})
    start = f"strategy.{removed}: latecomer has no such option; it was removed: {instead}"
    assert said.startswith(start)
    assert "(options: share, compensate, " in said


def test_what_replaces_removed_options_exists() -> None:
    assert set(REMOVED["latecomer"]) == {"clusters", "calibrate"}
    assert {"echopfl", "ifca", "clusterfl"} <= set(recipes())
    assert "prior" in type(parse(TINY).personalise).model_fields


def test_a_misspelt_option_is_refused_with_a_hint() -> None:
    said = line("latecomer", {"shrae": 0.1})
    assert said.startswith("strategy.shrae: latecomer has no such option; did you mean 'share'?")


@pytest.mark.parametrize("value", [-0.1, "far", True, float("inf")])
def test_a_bad_value_is_named(value) -> None:
    said = line("latecomer", {"share": value})
    assert said.startswith(f"strategy.share: {value!r}: Input should be")


def command(monkeypatch: pytest.MonkeyPatch, *args: str) -> int:
    monkeypatch.setattr(sys, "argv", ["latecomer", *args])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    return int(ended.value.code or 0)


def share(folder: Path) -> float:
    config = tomllib.loads((folder / "config.toml").read_text())
    return float(config["strategy"]["share"])


def model_hash(folder: Path) -> str:
    return str(json.loads((folder / "summary.json").read_text())["model_hash"])


def test_an_option_is_set_on_the_command_line_and_survives_resume(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, whole, cut = (tmp_path / name for name in ("plain", "whole", "cut"))
    setting = "strategy.share=0.9"
    start_run(parse(TINY), plain)
    config = str(plain / "config.toml")
    assert command(monkeypatch, "run", config, "--set", setting, "--out", str(whole)) == 0
    with pytest.raises(Killed):
        start_run(parse(with_settings(TINY, [setting])), cut, DieAfter(20))
    assert command(monkeypatch, "run", "--resume", str(cut)) == 0
    assert [share(folder) for folder in (plain, whole, cut)] == [0.1, 0.9, 0.9]
    assert model_hash(plain) != model_hash(whole) == model_hash(cut)
