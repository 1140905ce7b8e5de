"""What advice is about (a config, a finished run or comparison), and the advice on it."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from latecomer.errors import BadInput
from latecomer.strategies.recipe import find_recipe
from latecomer.study.advice.facts import Facts, Measured
from latecomer.study.advice.findings import Finding, findings_of
from latecomer.study.advice.measured import comparison_results, measured
from latecomer.study.advice.scenario import profile
from latecomer.study.advice.suggestions import Change, Suggestion, changes_for, suggest
from latecomer.study.config import Config, Tree, nearby, parse, quickstart, read_toml, with_settings
from latecomer.study.experiment import Experiment
from latecomer.study.files import write_atomically
from latecomer.study.given import check_reference
from latecomer.study.metric_names import need_accuracy
from latecomer.study.results import Result, load, without_nan
from latecomer.study.summary import objective_summary

REPLACEMENT = "fedasync"  # profiled in place of a reference, in which no device is late


@dataclass(frozen=True)
class Subject:
    """A config tree and the facts about it; `run` is the command that runs it."""

    tree: Tree
    run: str
    facts: Facts
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Advice:
    """Findings about a subject, the largest measured effect first, and what to try."""

    subject: Subject
    findings: list[Finding]
    suggestions: list[Suggestion]
    changes: list[Change]

    def document(self) -> dict[str, Any]:
        """The content of advice.json."""
        first = self.findings[0]
        return {
            "dominates": first.kind if first.is_ranked else None,
            "notes": list(self.subject.notes),
            "findings": [asdict(each) for each in self.findings],
            "suggestions": [{**asdict(s), "settings": s.settings} for s in self.suggestions],
            "changes": [asdict(each) for each in self.changes],
            "facts": asdict(self.subject.facts),
        }


def advise(subject: Subject) -> Advice:
    """Findings from the facts, and suggestions for the findings."""
    facts, found = subject.facts, findings_of(subject.facts)
    return Advice(subject, found, suggest(found, facts), changes_for(found, facts))


def write_document(path: Path, document: dict[str, Any]) -> None:
    """Writes a JSON file; null for nan and infinity."""
    write_atomically(path, json.dumps(without_nan(document), indent=2, allow_nan=False) + "\n")


def subject(path: Path | None, settings: Sequence[str] = ()) -> Subject:
    """From a TOML file, from the folder of a run or comparison, or (None) from the quickstart."""
    if path is None:
        return scenario(quickstart(), "quickstart", "latecomer run", settings)
    if path.is_dir():
        return _folder(path, settings)
    if not path.exists():
        raise BadInput(f"{path}: no such config file or folder{nearby(path)}")
    return scenario(read_toml(path), str(path), f"latecomer run {path}", settings)


def scenario(
    tree: Mapping[str, Any], where: str, command: str, settings: Sequence[str] = ()
) -> Subject:
    """From a config; `command` is the command that runs it without `settings`."""
    tree = with_settings(tree, settings)
    facts, notes = _facts(parse(tree, where))
    return Subject(tree, typed(command, settings), facts, notes)


def _folder(folder: Path, settings: Sequence[str]) -> Subject:
    found, compared = load(folder), tuple[Measured, ...]()
    if not isinstance(found, Result):
        compared, found = comparison_results(found)
    # The kernel is not part of the scenario and may not support another strategy.
    settings = ["engine.kernel=auto", *settings]
    path = found.folder / "config.toml"
    tree = with_settings(read_toml(path), settings)
    run, config = measured(found), parse(tree, str(path))
    try:
        facts, notes = _facts(config)
    except BadInput as error:
        facts = _configured(config)
        notes = (f"advice from the run's files only; its scenario cannot be built: {error}",)
    facts = replace(facts, run=run, comparison=compared)
    return Subject(tree, typed(f"latecomer run {path}", settings), facts, notes)


def typed(command: str, settings: Sequence[str]) -> str:
    """The command line with these settings."""
    return " ".join([command, *(f"--set '{each}'" for each in settings)])


def _configured(config: Config) -> Facts:
    training = config.training
    return Facts(None, None, (), config.strategy.name, training.lr, training.local_epochs)


def _facts(config: Config) -> tuple[Facts, tuple[str, ...]]:
    """Facts about the scenario, and the notes from setting it up."""
    check_reference("strategy.name", config.strategy.name)
    recipe, notes = find_recipe(config.strategy.name), tuple[str, ...]()
    if recipe.pooled or recipe.punctual:
        notes = (f"{recipe.name} is a reference, not deployable: analysed as {REPLACEMENT}",)
        config = parse({**config.model_dump(mode="json"), "strategy": {"name": REPLACEMENT}})
    if config.app.path:
        raise BadInput(
            f"app.path = {config.app.path!r}: advice reads the data of devices, which a Flower app"
            " has itself; compare strategies with `latecomer compare`"
        )
    experiment = Experiment(config)
    need_accuracy(objective_summary(experiment), "latecomer advise")
    facts = replace(_configured(config), scenario=profile(experiment))
    return facts, (*notes, *experiment.notes)
