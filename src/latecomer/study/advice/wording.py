"""Advice in words: what dominates, what to try, how the race went."""

from collections.abc import Iterator
from math import isfinite, isnan

from rich.table import Table

from latecomer.study.advice.advice import Advice
from latecomer.study.advice.facts import Contest, Facts
from latecomer.study.advice.race import (
    COLUMNS,
    FINALISTS,
    YOURS,
    Candidate,
    Entry,
    Plan,
    Rung,
    Verdict,
)
from latecomer.study.advice.subject import typed

CALLED = {
    "divergence": "learning has failed",
    "budget": "the privacy budget",
    "late-data": "lateness tied to data",
    "worlds": "devices that contradict each other",
    "availability": "devices that are away",
    "served-worse": "devices that are served worse",
    "staleness": "staleness",
    "swings": "a learning rate that is too high",
    "waiting": "time lost by waiting",
    "speed": "unequal speed",
    "heterogeneity": "unequal data",
    "links": "the cost of bytes",
    "server": "a busy server",
    "narrow": "narrow models",
    "lost": "lost work",
    "repair": "repair",
    "clusters": "clusters",
    "unfinished": "a run that is too short",
    "nothing": "nothing",
}
MEASURES = {
    "all": "accuracy",
    "devices": "accuracy on the devices' own data",
    "late": "accuracy on the affected classes",
}


def lines(advice: Advice) -> Iterator[str]:
    """Findings and suggestions, without a race."""
    contest, first = advice.subject.facts.contest, advice.findings[0]
    for note in advice.subject.notes:
        yield f"note: {note}"
    if contest is not None:
        yield _won(contest)
    yield from _measured(advice.subject.facts)
    yield f"What dominates: {CALLED[first.kind]}"
    yield ""
    for number, finding in enumerate(advice.findings, 1):
        yield f"{number}. {finding.text}"
        yield f"   [{finding.see}]"
    yield ""
    yield "Strategies to try:"
    for suggestion in advice.suggestions:
        yours = " (what you have)" if suggestion.name == advice.subject.facts.strategy else ""
        yield f"  {suggestion.name}{yours}: {suggestion.reason} [{suggestion.see}]"
        yield f"    {typed(advice.subject.run, suggestion.settings)}"
    if advice.changes:
        yield "Settings to try with any of them:"
    for change in advice.changes:
        yield f"  {typed('', change.settings).strip()}"
        yield f"    {change.reason} [{change.see}]"


def _won(contest: Contest) -> str:
    spread = (
        "one seed: the spread is not known"
        if contest.spread is None
        else f"± {contest.spread:.3f} over {contest.seeds} seeds"
    )
    ahead = f", {contest.margin:+.3f} in accuracy on {contest.second} ({spread})"
    return (
        f"Winner of the comparison: {contest.winner}{ahead if contest.second else ''}."
        " The rest is about its first run."
    )


def _measured(facts: Facts) -> Iterator[str]:
    """The main numbers, whatever they say."""
    s, run = facts.scenario, facts.run
    if s is not None:
        yield (
            f"Scenario: {s.devices} devices with {s.examples:.0f} examples (median), {s.late} of"
            f" them late; about {s.epochs:.0f} epochs; updates {s.age:.1f} epochs old on average,"
            f" of {s.update_bytes / 1e3:.0f} kB; {s.away:.0%} of the time out of reach."
        )
    if run is not None:
        late = "" if run.own_late is None else f", {run.own_late:.2f} on late devices"
        own = "" if run.own_mean is None else f", {run.own_mean:.2f} on devices' own data"
        yield (
            f"Run: {run.strategy} at lr {run.lr:g}, accuracy {run.accuracy:.3f}{own}{late};"
            f" staleness {run.staleness_mean:.1f}, {run.staleness_most} for nine tenths,"
            f" {run.staleness_max} at most; {run.waiting:.0%} of the time waiting;"
            f" {run.refused:.1%} refused, {run.dropped:.1%} dropped; {run.megabytes_up:.0f} MB up."
        )


def race_opening(plan: Plan) -> str:
    """What is about to be run, and how long that is."""
    labels = len({c.label for c in plan.candidates})
    measure = MEASURES[plan.audience]
    what = (
        f"{measure}, mean of the last fifth"
        if plan.target is None
        else f"seconds to {plan.target:g} in {measure}"
    )
    left_out = "".join(f"left out: {reason}\n" for reason in plan.refused)
    return (
        f"{left_out}Race: {labels} strategies at {len(plan.candidates) // labels} learning rates"
        f" each, by {what}. It takes at most as long as {plan.cost():.0f} whole runs."
    )


def rung_table(number: int, rung: Rung, plan: Plan) -> Table:
    """A rung, the best first; who goes on has a mark."""
    seeds = ", ".join(map(str, rung.seeds))
    title = (
        f"rung {number}: {rung.length:.0%} of the run, seed{'s' * (len(rung.seeds) > 1)} {seeds}"
    )
    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    table.add_column("strategy", no_wrap=True)
    table.add_column("lr", justify="right")
    table.add_column(COLUMNS[plan.audience] if plan.target is None else "s to target", no_wrap=True)
    table.add_column("")
    for entry in rung.entries:
        mark = "" if not entry.kept else "best" if number == len(plan.lengths) else "goes on"
        table.add_row(shown(entry.candidate), f"{entry.candidate.lr:g}", _score(entry, plan), mark)
    return table


def shown(candidate: Candidate) -> str:
    own = candidate.label != candidate.name
    return f"{candidate.name} ({candidate.label})" if own else candidate.name


def _score(entry: Entry, plan: Plan) -> str:
    if not isfinite(entry.mean):
        return "failed" if plan.target is None else "not reached"
    digits = 3 if plan.target is None else 1
    text = f"{abs(entry.mean):.{digits}f}"
    return text if isnan(entry.spread) else f"{text} ± {entry.spread:.{digits}f}"


def verdict_line(verdict: Verdict, plan: Plan) -> str:
    """Who won and by how much, or that nobody did."""
    best, second = shown(verdict.best), verdict.second
    at = f"{best} at lr {verdict.best.lr:g}"
    if second is None:
        return f"Winner: {at}; there was nobody else."
    unit = "" if plan.target is None else " s"
    digits = 3 if plan.target is None else 1
    if isnan(verdict.margin):
        if verdict.decided:
            return f"Winner: {at}; {shown(second)} did not get there on every seed."
        return "No winner: nobody got there on every seed."
    margin = f"{verdict.margin:.{digits}f}{unit}"
    if isnan(verdict.spread):
        return (
            f"No winner: {at} is {margin} ahead of {shown(second)}, on one seed. Give more --seeds."
        )
    spread = f"{verdict.spread:.{digits}f} over {len(plan.seeds)} seeds"
    if verdict.decided:
        return f"Winner: {at}, {margin} ± {spread} ahead of {shown(second)}."
    return (
        f"No winner: {at} is {margin} ahead of {shown(second)}, within the spread of ± {spread}."
        f" Take the simplest: {shown(verdict.chosen)} at lr {verdict.chosen.lr:g}."
    )


def yours_line(final: Rung, plan: Plan) -> str | None:
    """How what is configured did in the end; nothing if it is a reference, or among the best."""
    for entry in final.entries[FINALISTS:]:
        if entry.candidate.label == YOURS:
            name, lr = entry.candidate.name, entry.candidate.lr
            return f"What you have, {name} at lr {lr:g}: {_score(entry, plan)}."
    return None


def edge_line(verdict: Verdict, plan: Plan) -> str | None:
    """A warning if the best learning rate may lie beyond those that were tried."""
    chosen = verdict.chosen
    tried = [c.lr for c in plan.candidates if c.label == chosen.label]
    side = {min(tried): "smallest", max(tried): "largest"}.get(chosen.lr)
    if side is None or len(tried) < 2:
        return None
    return f"Its learning rate is the {side} one tried: look beyond it."
