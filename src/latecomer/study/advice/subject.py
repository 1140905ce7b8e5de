"""The subject of advice: a config, a finished run, or a finished comparison."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from latecomer.errors import BadInput, did_you_mean
from latecomer.strategies.recipe import find_recipe
from latecomer.study.advice.facts import Facts
from latecomer.study.advice.measured import comparison_outcome, measured
from latecomer.study.advice.scenario import profile
from latecomer.study.config import Tree, parse, quickstart, read_toml, with_settings
from latecomer.study.experiment import Experiment
from latecomer.study.results import Result, load

REPLACEMENT = "fedasync"  # profiled in place of a reference, in which no device is late


@dataclass(frozen=True)
class Subject:
    """A config tree and the facts about it; `run` is the command that runs it."""

    tree: Tree
    run: str
    facts: Facts
    notes: tuple[str, ...] = ()


def subject(path: Path | None, settings: Sequence[str] = ()) -> Subject:
    """From a TOML file, from the folder of a run or comparison, or (None) from the quickstart."""
    if path is None:
        return scenario(quickstart(), "quickstart", "latecomer run", settings)
    if path.is_dir():
        return _folder(path, settings)
    if not path.exists():
        near = [each.name for each in path.parent.iterdir()] if path.parent.is_dir() else []
        raise BadInput(f"{path}: no such config file or folder{did_you_mean(path.name, near)}")
    return scenario(read_toml(path), str(path), f"latecomer run {path}", settings)


def scenario(
    tree: Mapping[str, Any], where: str, command: str, settings: Sequence[str] = ()
) -> Subject:
    """From a config; `command` is the command that runs it without `settings`."""
    tree = with_settings(tree, settings)
    facts, notes = _facts(tree, where)
    return Subject(tree, typed(command, settings), facts, notes)


def _folder(folder: Path, settings: Sequence[str]) -> Subject:
    found, won = load(folder), None
    if not isinstance(found, Result):
        won, found = comparison_outcome(found)
    # The kernel is not part of the scenario and may not support another strategy.
    settings = ["engine.kernel=auto", *settings]
    tree = with_settings(read_toml(found.folder / "config.toml"), settings)
    command = typed(f"latecomer run {found.folder / 'config.toml'}", settings)
    run, config = measured(found), parse(tree, str(found.folder / "config.toml"))
    try:
        facts, notes = _facts(tree, str(found.folder))
    except BadInput as error:
        facts = Facts(strategy=config.strategy.name, lr=config.training.lr)
        notes = (f"advice from the run's files only; its scenario cannot be built: {error}",)
    return Subject(tree, command, replace(facts, run=run, comparison=won), notes)


def typed(command: str, settings: Sequence[str]) -> str:
    """The command line with these settings."""
    return " ".join([command, *(f"--set '{each}'" for each in settings)])


def _facts(tree: Mapping[str, Any], where: str) -> tuple[Facts, tuple[str, ...]]:
    """Facts about the scenario, and the notes from setting it up."""
    config, notes = parse(tree, where), tuple[str, ...]()
    recipe = find_recipe(config.strategy.name)
    if recipe.pooled or recipe.punctual:
        notes = (f"{recipe.name} is a reference, not deployable: analysed as {REPLACEMENT}",)
        config = parse({**tree, "strategy": {"name": REPLACEMENT}})
    experiment = Experiment(config)
    devices = sum(len(client.train.y) > 0 for client in experiment.federation.clients)
    facts = Facts(
        scenario=profile(experiment),
        strategy=config.strategy.name,
        lr=config.training.lr,
        devices=devices,
        tuned=_tuned(config.compare),
    )
    return facts, (*notes, *experiment.notes)


def _tuned(overrides: Mapping[str, Mapping[str, Any]]) -> dict[str, float]:
    """Strategy -> learning rate in `[compare.NAME]`."""
    found = {}
    for name, changes in overrides.items():
        training = changes.get("training")
        lr = training.get("lr") if isinstance(training, Mapping) else None
        if isinstance(lr, int | float) and lr > 0:
            found[name] = float(lr)
    return found
