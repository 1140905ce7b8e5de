"""Strategies to compare and settings to change, for each kind of finding."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import tomli_w

from latecomer.strategies.recipe import recipes
from latecomer.study.advice.facts import Facts
from latecomer.study.advice.findings import LEARNING_RATE, WEAK_EPSILON, Finding

MAX_SUGGESTIONS = 5
# Always compared: a common baseline and the default of a config.
ALWAYS = ("fedbuff", "latecomer")
# Strategies whose mechanism addresses the finding, in alphabetical order.
MECHANISMS: Mapping[str, tuple[str, ...]] = {
    "communication": ("paflm", "semi-async"),
    "concept shift": ("echopfl", "ifca"),
    "heterogeneous data": ("ca2fl", "semi-async"),
    "idle devices": ("asyncfeded", "fedasync"),
    "late classes": ("ca2fl", "feddc"),
    "low local accuracy": ("aso-fed", "feddc-fedbuff"),
    "oscillation": ("asyncfeded", "fadas"),
    "privacy budget": ("dp-fedasync", "privaasyncfed"),
    "server load": ("fedavg", "semi-async"),
    "staleness": ("fadas", "semi-async"),
    "unavailable devices": ("ca2fl", "fedasync"),
    "unequal speeds": ("fedasync", "semi-async"),
}
# Strategies for private runs: they use the noised updates only.
PRIVATE = frozenset(("dp-fedasync", "privaasyncfed", "semi-async", "feddc", "echopfl", *ALWAYS))


@dataclass(frozen=True)
class Suggestion:
    """A strategy to try, what it does, and its accuracy if a comparison has measured it."""

    name: str
    reason: str
    options: Mapping[str, Any] = field(default_factory=dict)
    accuracy: float | None = None

    @property
    def table(self) -> dict[str, Any]:
        """The config's `[strategy]`."""
        return {"name": self.name, **self.options}

    @property
    def settings(self) -> list[str]:
        """For `--set`: the whole strategy table, which replaces options of another strategy."""
        return [f"strategy={inline(self.table)}"]


@dataclass(frozen=True)
class Change:
    """Settings to try with any strategy, and why."""

    settings: tuple[str, ...]
    reason: str


def inline(table: Mapping[str, Any]) -> str:
    """A table as TOML on one line."""
    return "{" + tomli_w.dumps(table).strip().replace("\n", ", ") + "}"


def suggest(findings: Sequence[Finding], facts: Facts) -> list[Suggestion]:
    """The strategies of ALWAYS and those for the findings, MAX_SUGGESTIONS in all.

    Those that a comparison has measured come first, the best before the others; the rest is in
    alphabetical order.
    """
    known = recipes()
    private = facts.scenario is not None and facts.scenario.budget is not None
    names = [*ALWAYS, *(name for each in findings for name in MECHANISMS.get(each.kind, ()))]
    allowed = dict.fromkeys(n for n in names if n in known and (n in PRIVATE or not private))
    measured = {each.strategy: each.accuracy for each in facts.comparison}
    found = [
        Suggestion(name, known[name].summary, _options(name, facts), measured.get(name))
        for name in list(allowed)[:MAX_SUGGESTIONS]
    ]
    return sorted(found, key=lambda each: (-(each.accuracy or 0.0), each.name))


def _options(name: str, facts: Facts) -> dict[str, Any]:
    """Options that depend on the scenario: a buffer must not exceed the fleet."""
    s = facts.scenario
    devices = s.devices if s else 20
    size = min(10, max(2, devices // 2))
    if name == "ca2fl":  # docs/strategies.md: `server_lr` about `size` / devices
        return {"size": size, "server_lr": float(f"{size / max(size, devices):.2g}")}
    if name == "fedbuff" and size != 10:
        return {"size": size}
    if name == "feddc" and s and s.busy:
        return {"surrogates": True}
    return {"clusters": 4} if name == "ifca" else {}


def changes_for(findings: Sequence[Finding], facts: Facts) -> list[Change]:
    """Settings for the findings, in their order."""
    return [found for each in findings if (found := _change(each.kind, facts))]


def _change(kind: str, facts: Facts) -> Change | None:
    budget = facts.scenario.budget if facts.scenario else None
    if kind == LEARNING_RATE and facts.run and facts.run.rate:
        lr = f"training.lr={facts.run.rate.lr:g}"
        return Change((lr,), "or find it in short runs: `latecomer tune`")
    if kind == "oscillation" and facts.run:
        return Change((f"training.lr={facts.run.lr / 3:.2g}",), "a third of the learning rate")
    if kind == "server load":
        epochs = f"training.local_epochs={2 * facts.local_epochs}"
        return Change((epochs,), "tasks with twice the work: fewer updates to merge per second")
    if kind != "privacy budget" or budget is None:
        return None
    if budget.spent_max <= (budget.limit or WEAK_EPSILON):
        return None
    tasks = f"privacy.tasks={round(budget.tasks_max)}"
    if budget.whole_run:
        return Change((tasks,), "calibrates the noise to the tasks of the busiest device")
    total = ('privacy.mode="whole-run"', f"privacy.epsilon={WEAK_EPSILON}", tasks)
    return Change(total, "one epsilon for the whole run, not per release")
