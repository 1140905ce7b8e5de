"""Advice as terminal text: findings, suggestions, and the stages and result of a race."""

from collections.abc import Iterator
from math import isfinite, isnan

from rich.table import Table

from latecomer.study.advice.advice import Advice, typed
from latecomer.study.advice.facts import Facts
from latecomer.study.advice.race import Entry, RacePlan, RaceResult, Stage


def lines(advice: Advice) -> Iterator[str]:
    """What was measured, findings and suggestions, without a race."""
    yield from (f"note: {note}" for note in advice.subject.notes)
    yield from _measured(advice.subject.facts)
    yield ""
    ranked = sum(each.is_ranked for each in advice.findings)
    for number, each in enumerate(advice.findings):
        if number == 0 and ranked:
            yield "Measured problems, the largest share first:"
        if number == ranked:
            yield "Without a measured effect, in alphabetical order:"
        effect = "" if each.effect is None else f" ({each.effect:.0%} {each.unit})"
        yield f"{number + 1}. {each.kind}{effect}: {each.text}"
    yield ""
    by = "by measured accuracy, then " if advice.subject.facts.comparison else ""
    yield f"Strategies to compare, {by}in alphabetical order:"
    for one in advice.suggestions:
        configured = " (configured)" if one.name == advice.subject.facts.strategy else ""
        accuracy = "" if one.accuracy is None else f" [accuracy {one.accuracy:.3f}]"
        yield f"  {one.name}{configured}: {one.reason}{accuracy}"
        yield f"    {typed(advice.subject.run, one.settings)}"
    if advice.changes:
        yield "Settings to try with any strategy:"
    for change in advice.changes:
        yield f"  {typed('', change.settings).strip()}  ({change.reason})"


def _measured(facts: Facts) -> Iterator[str]:
    """What was measured, and its main numbers."""
    s, run = facts.scenario, facts.run
    if s is not None:
        yield f"Measured: labels of {s.devices} devices, {s.examples:.0f} examples each (median)."
        yield (
            f"Measured: a dry run of the fleet ({s.dry_updates:,} updates, nothing trained):"
            f" {s.epochs:.0f} epochs in all, updates {s.age:.1f} epochs old on average."
        )
    if facts.comparison:
        found = (
            f"{each.strategy} {each.accuracy:.3f} ± {each.spread:.3f} ({each.seeds} seeds)"
            for each in facts.comparison
        )
        yield f"Measured: a comparison. Accuracy: {', '.join(found)}."
    if run is not None:
        local = "" if run.local is None else f", local test accuracy {run.local:.3f}"
        yield (
            f"Measured: a run of {run.strategy} at lr {run.lr:g}: accuracy {run.accuracy:.3f}"
            f"{local}, mean staleness {run.staleness:.1f}, {run.megabytes_up:.0f} MB up."
        )


def race_opening(plan: RacePlan) -> str:
    """Size, score and cost of a race."""
    rates = len(plan.candidates) // plan.strategies
    left_out = "".join(f"left out: {reason}\n" for reason in plan.refused)
    return (
        f"{left_out}Race: {plan.strategies} strategies at the same {rates} learning rates; score:"
        f" {score_text(plan)}. Cost: {plan.cost():.0f} whole runs."
    )


def score_text(plan: RacePlan) -> str:
    if plan.target is None:
        return f"mean {plan.column} over the last fifth of a run"
    return f"seconds to {plan.column} {plan.target:g}"


def stage_table(stage: Stage, plan: RacePlan) -> Table:
    """The entries of a stage from best to worst."""
    seeds = f"seed{'s' * (len(stage.seeds) > 1)} {', '.join(map(str, stage.seeds))}"
    title = f"{stage.name}: {stage.length:.0%} of the run, {seeds}"
    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    table.add_column("strategy", no_wrap=True)
    table.add_column("lr", justify="right")
    table.add_column(plan.column if plan.target is None else "s to target", no_wrap=True)
    table.add_column("CPU s", justify="right")
    for entry in stage.entries:
        lr, seconds = f"{entry.candidate.lr:g}", f"{entry.cpu_seconds:.1f}"
        table.add_row(_name(entry), lr, _score(entry, plan), seconds)
    return table


def _name(entry: Entry) -> str:
    return f"{entry.candidate.name}{' (configured)' if entry.candidate.configured else ''}"


def _score(entry: Entry, plan: RacePlan) -> str:
    if not isfinite(entry.mean):
        return "failed" if plan.target is None else "not reached"
    return _number(abs(entry.mean), entry.spread, plan)


def _number(value: float, spread: float, plan: RacePlan) -> str:
    digits, unit = (3, "") if plan.target is None else (1, " s")
    return f"{value:.{digits}f}{unit}" + ("" if isnan(spread) else f" ± {spread:.{digits}f}")


def result_line(result: RaceResult, plan: RacePlan) -> str:
    """The best of a race and its margin, or which strategies are within the spread."""
    best, second = result.best, result.second
    at = f"{_name(best)} at lr {best.candidate.lr:g}"
    if not isfinite(best.mean):
        return "No winner: every candidate failed or missed the target on some seed."
    if second is None:
        return f"Only {at} was run."
    if not result.tied:
        if isnan(result.margin):
            return f"Best: {at}; {_name(second)} failed or missed the target on some seed."
        margin = _number(result.margin, result.spread, plan)
        return f"Best: {at}, {margin} ahead of {_name(second)} over {len(plan.seeds)} seeds."
    chosen = result.chosen
    why = (
        "it is configured"
        if chosen.candidate.configured
        else f"it took the least CPU time, {chosen.cpu_seconds:.1f} s per run"
    )
    tied = ", ".join(_name(entry) for entry in result.tied)
    few = " (one seed shows no spread: give more --seeds)" if len(plan.seeds) == 1 else ""
    return (
        f"No winner: the differences of {at} to {tied} are within the spread over seeds{few}. Take"
        f" {_name(chosen)} at lr {chosen.candidate.lr:g}: {why}."
    )


def edge_line(chosen: Entry, tuning: Stage) -> str | None:
    """A warning if the learning rate is the smallest or largest of those tried."""
    entries = (entry.candidate for entry in tuning.entries)
    tried = [c.lr for c in entries if c.name == chosen.candidate.name]
    side = {min(tried): "smallest", max(tried): "largest"}.get(chosen.candidate.lr)
    if side is None or len(tried) < 2:
        return None
    return f"This learning rate is the {side} one tried: try rates beyond it."
