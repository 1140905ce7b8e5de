"""Findings and suggestions for a subject, and advice.json and advice.toml."""

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import tomli_w

from latecomer.errors import BadInput
from latecomer.strategies.recipe import recipes
from latecomer.study.advice.race import OnScore, RacePlan, RaceResult, Rung, race, race_result
from latecomer.study.advice.remedies import Change, Suggestion, change, suggest
from latecomer.study.advice.rules import Finding, diagnose
from latecomer.study.advice.subject import Subject
from latecomer.study.files import write_atomically
from latecomer.study.results import read_json, without_nan
from latecomer.study.runner import new_folder


@dataclass(frozen=True)
class Advice:
    """Findings about a subject, the most costly first, and strategies and settings to try."""

    subject: Subject
    findings: list[Finding]
    suggestions: list[Suggestion]
    changes: list[Change]

    def document(self) -> dict[str, Any]:
        """The content of advice.json."""
        found: dict[str, Any] = {
            "notes": list(self.subject.notes),
            "dominates": self.findings[0].kind,
            "findings": [asdict(each) for each in self.findings],
            "suggestions": [{**asdict(s), "settings": s.settings} for s in self.suggestions],
            "changes": [asdict(each) for each in self.changes],
            "facts": asdict(self.subject.facts),
        }
        return dict(without_nan(found))


def advise(subject: Subject) -> Advice:
    """Findings from the facts, and suggestions for the findings."""
    findings = diagnose(subject.facts)
    return Advice(
        subject,
        findings,
        suggest(findings, subject.facts, recipes()),
        change(findings, subject.facts),
    )


def write_advice(folder: Path, document: dict[str, Any]) -> None:
    text = json.dumps(document, indent=2, allow_nan=False)
    write_atomically(folder / "advice.json", text + "\n")


class Race:
    """A race in a folder; a folder with the same plan is resumed. Each rung updates advice.json."""

    def __init__(self, advice: Advice, plan: RacePlan, folder: Path) -> None:
        self.advice, self.plan, self.folder = advice, plan, folder
        self.rungs: list[Rung] = []
        self.result: RaceResult | None = None
        document = json.loads(json.dumps({"race": plan.document()}))
        if not (folder / "plan.json").is_file():
            new_folder(folder)
            write_atomically(folder / "plan.json", json.dumps(document, indent=2) + "\n")
        elif read_json(folder / "plan.json") != document:
            raise BadInput(f"{folder}: holds another race or comparison; choose another --out")

    def run(self, jobs: int, on_score: OnScore) -> Iterator[Rung]:
        """Yields each rung when its runs have finished."""
        for rung in race(self.plan, self.folder, jobs, on_score):
            self.rungs.append(rung)
            write_advice(self.folder, self.document())
            yield rung

    def finish(self) -> RaceResult:
        """Writes advice.json with the result, and advice.toml for `latecomer run`."""
        self.result = found = race_result(self.rungs[-1])
        tree = found.chosen.tree(self.advice.subject.tree)
        for key in ("compare", "study"):
            tree.pop(key, None)
        write_atomically(self.folder / "advice.toml", tomli_w.dumps(tree))
        write_advice(self.folder, self.document())
        return found

    def document(self) -> dict[str, Any]:
        race = {
            "measure": {"for": self.plan.score_on, "target": self.plan.target},
            "rungs": [asdict(rung) for rung in self.rungs],
            "result": asdict(self.result) if self.result else None,
        }
        return {**self.advice.document(), **dict(without_nan(race))}
