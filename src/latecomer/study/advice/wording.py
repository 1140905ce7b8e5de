"""Advice as terminal text: findings, suggestions, and the rungs and result of a race."""

from collections.abc import Iterator
from math import isfinite, isnan

from rich.table import Table

from latecomer.study.advice.advice import Advice
from latecomer.study.advice.facts import ComparisonOutcome, Facts
from latecomer.study.advice.race import (
    COLUMNS,
    CONFIGURED,
    FINALISTS,
    Candidate,
    Entry,
    RacePlan,
    RaceResult,
    Rung,
)
from latecomer.study.advice.subject import typed

TITLES = {
    "divergence": "divergence",
    "budget": "privacy budget",
    "late-classes": "lateness correlated with data",
    "concept-shift": "concept shift between devices",
    "availability": "unavailable devices",
    "local-accuracy": "low local test accuracy of some devices",
    "staleness": "staleness",
    "oscillation": "learning rate too high",
    "idle": "idle devices",
    "speed": "unequal device speeds",
    "heterogeneity": "heterogeneous data",
    "bandwidth": "communication cost",
    "server": "server load",
    "sub-models": "sub-models",
    "lost": "lost work",
    "compensation": "staleness compensation",
    "clusters": "clusters",
    "unfinished": "run too short",
    "nothing": "none",
}
MEASURES = {
    "all": "accuracy",
    "devices": "local test accuracy",
    "late": "late-class accuracy",
}


def lines(advice: Advice) -> Iterator[str]:
    """Findings and suggestions, without a race."""
    comparison, first = advice.subject.facts.comparison, advice.findings[0]
    for note in advice.subject.notes:
        yield f"note: {note}"
    if comparison is not None:
        yield _won(comparison)
    yield from _measured(advice.subject.facts)
    yield f"Main problem: {TITLES[first.kind]}"
    yield ""
    for number, finding in enumerate(advice.findings, 1):
        yield f"{number}. {finding.text}"
        yield f"   [{finding.see}]"
    yield ""
    yield "Strategies to try:"
    for suggestion in advice.suggestions:
        configured = " (configured)" if suggestion.name == advice.subject.facts.strategy else ""
        yield f"  {suggestion.name}{configured}: {suggestion.reason} [{suggestion.see}]"
        yield f"    {typed(advice.subject.run, suggestion.settings)}"
    if advice.changes:
        yield "Settings to try with any strategy:"
    for change in advice.changes:
        yield f"  {typed('', change.settings).strip()}"
        yield f"    {change.reason} [{change.see}]"


def _won(comparison: ComparisonOutcome) -> str:
    spread = (
        "one seed: spread unknown"
        if comparison.spread is None
        else f"± {comparison.spread:.3f} over {comparison.seeds} seeds"
    )
    ahead = f", accuracy {comparison.margin:+.3f} relative to {comparison.second} ({spread})"
    return (
        f"Best of the comparison: {comparison.winner}{ahead if comparison.second else ''}."
        " The following is about its first run."
    )


def _measured(facts: Facts) -> Iterator[str]:
    """The main numbers of the scenario and the run."""
    s, run = facts.scenario, facts.run
    if s is not None:
        yield (
            f"Scenario: {s.devices} devices ({s.late} late) with {s.examples:.0f} examples each"
            f" (median), offline {s.offline:.0%} of the time; about {s.epochs:.0f} epochs; updates"
            f" of {s.update_bytes / 1e3:.0f} kB, {s.age:.1f} epochs old on average."
        )
    if run is not None:
        late = "" if run.local_late is None else f" ({run.local_late:.2f} on late devices)"
        mean = run.local_mean
        local = "" if mean is None else f", local test accuracy {mean:.2f}{late}"
        yield (
            f"Run: {run.strategy} at lr {run.lr:g}, accuracy {run.accuracy:.3f}{local}; staleness"
            f" {run.staleness_mean:.1f} (mean), {run.staleness_p90} (90th percentile),"
            f" {run.staleness_max} (max); devices idle {run.idle:.0%} of the time;"
            f" {run.refused:.1%} of updates refused, {run.dropped:.1%} dropped;"
            f" {run.megabytes_up:.0f} MB up."
        )


def race_opening(plan: RacePlan) -> str:
    """Size, score and cost of a race."""
    labels = len({c.label for c in plan.candidates})
    measure = MEASURES[plan.score_on]
    what = (
        f"mean {measure} over the last fifth of a run"
        if plan.target is None
        else f"seconds to {plan.target:g} {measure}"
    )
    left_out = "".join(f"left out: {reason}\n" for reason in plan.refused)
    return (
        f"{left_out}Race: {labels} strategies at {len(plan.candidates) // labels} learning rates"
        f" each; score: {what}. Cost: at most {plan.cost():.0f} whole runs."
    )


def rung_table(number: int, rung: Rung, plan: RacePlan) -> Table:
    """The entries of a rung from best to worst; those in the next rung are marked."""
    seeds = ", ".join(map(str, rung.seeds))
    title = (
        f"rung {number}: {rung.length:.0%} of the run, seed{'s' * (len(rung.seeds) > 1)} {seeds}"
    )
    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    table.add_column("strategy", no_wrap=True)
    table.add_column("lr", justify="right")
    table.add_column(COLUMNS[plan.score_on] if plan.target is None else "s to target", no_wrap=True)
    table.add_column("")
    for entry in rung.entries:
        mark = "" if not entry.kept else "best" if number == len(plan.lengths) else "kept"
        table.add_row(_name(entry.candidate), f"{entry.candidate.lr:g}", _score(entry, plan), mark)
    return table


def _name(candidate: Candidate) -> str:
    labelled = candidate.label != candidate.name
    return f"{candidate.name} ({candidate.label})" if labelled else candidate.name


def _score(entry: Entry, plan: RacePlan) -> str:
    if not isfinite(entry.mean):
        return "failed" if plan.target is None else "not reached"
    digits = 3 if plan.target is None else 1
    text = f"{abs(entry.mean):.{digits}f}"
    return text if isnan(entry.spread) else f"{text} ± {entry.spread:.{digits}f}"


def result_line(result: RaceResult, plan: RacePlan) -> str:
    """The winner of a race and its margin, or that the margin is within the spread."""
    best, second = _name(result.best), result.second
    at = f"{best} at lr {result.best.lr:g}"
    if second is None:
        return f"Winner: {at}, the only candidate."
    unit = "" if plan.target is None else " s"
    digits = 3 if plan.target is None else 1
    if isnan(result.margin):
        if result.decided:
            return f"Winner: {at}; {_name(second)} failed or missed the target on some seed."
        return "No winner: every candidate failed or missed the target on some seed."
    margin = f"{result.margin:.{digits}f}{unit}"
    if isnan(result.spread):
        return (
            f"No winner: {at} is {margin} ahead of {_name(second)}, on one seed. Give more --seeds."
        )
    spread = f"{result.spread:.{digits}f} over {len(plan.seeds)} seeds"
    if result.decided:
        return f"Winner: {at}, {margin} ± {spread} ahead of {_name(second)}."
    return (
        f"No winner: {at} is {margin} ahead of {_name(second)}, within the spread of ± {spread}."
        f" Take the simplest: {_name(result.chosen)} at lr {result.chosen.lr:g}."
    )


def configured_line(final: Rung, plan: RacePlan) -> str | None:
    """The score of the configured strategy if it is not one of the finalists; else None."""
    for entry in final.entries[FINALISTS:]:
        if entry.candidate.label == CONFIGURED:
            name, lr = entry.candidate.name, entry.candidate.lr
            return f"As configured, {name} at lr {lr:g}: {_score(entry, plan)}."
    return None


def edge_line(result: RaceResult, plan: RacePlan) -> str | None:
    """A warning if the chosen learning rate is the smallest or largest of those tried."""
    chosen = result.chosen
    tried = [c.lr for c in plan.candidates if c.label == chosen.label]
    side = {min(tried): "smallest", max(tried): "largest"}.get(chosen.lr)
    if side is None or len(tried) < 2:
        return None
    return f"Its learning rate is the {side} one tried: try rates beyond it."
