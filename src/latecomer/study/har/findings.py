"""findings.md: what the study says, in words and tables."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import pandas as pd

from latecomer.study.har.effects import SMALLEST, by_seed, effect
from latecomer.study.har.plan import ASYNCHRONOUS, BASE, BUSY, PARADIGMS, SYNCHRONOUS
from latecomer.study.har.scores import LAST
from latecomer.study.har.takeaways import Evidence, verdicts
from latecomer.study.terminal import span

METRICS = {"macro_f1": "m-F1", "balanced_accuracy": "BA", "f1_rarest": "F1 rarest"}
DECISIONS = {
    "lr": "learning rate",
    "batch_size": "batch size",
    "augment": "augmentation",
    "scale": "scaling",
    "optimizer": "optimiser",
    "mixing": "mixing ratio",
    "server_delay": "server delay (s)",
    "strategy": "asynchronous strategy",
    BUSY: "server delay (s)",
    "test": "test set",
}
# As in the paper: tuning first, then data and optimiser, then the server's side.
TABLES = (
    ("lr", "batch_size"),
    ("augment", "scale", "optimizer"),
    ("mixing", "server_delay", "strategy", "test"),
)


@dataclass(frozen=True)
class Facts:
    """What the study was made on."""

    title: str
    devices: int
    rounds: int
    seeds: Sequence[int]
    notes: Sequence[str]
    equal: pd.DataFrame  # base runs at equal updates


def findings(facts: Facts, found: Evidence) -> str:
    """The whole page."""
    parts = [
        f"# {facts.title}",
        f"{facts.devices} devices, {facts.rounds} rounds' worth of client updates,"
        f" seeds {', '.join(map(str, facts.seeds))}. Scores are means of the last {LAST}"
        " evaluations on the central test set; ± is the standard deviation over seeds.",
        "\n".join(f"- {note}" for note in facts.notes),
        "## The price of each step",
        *steps(facts, found),
        "## Which decisions mattered",
        *decisions(found),
        "## Against the paper",
        *against(found),
        "## Tables",
        *(table(found, factors) for factors in TABLES),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def steps(facts: Facts, found: Evidence) -> Iterable[str]:
    """Centralised, synchronous, asynchronous at equal numbers of client updates."""
    own = found.table[found.table["factor"] == BASE]
    columns = [
        "way of learning",
        "macro-F1",
        "balanced accuracy",
        f"F1 of {found.rarest}",
        "macro-F1 on devices",
        "worst device (accuracy)",
        "virtual time",
    ]
    rows = []
    for paradigm in PARADIGMS:
        at = facts.equal[facts.equal["paradigm"] == paradigm]
        mine = own[own["paradigm"] == paradigm]
        rows.append(
            [
                paradigm,
                _cell(at["macro_f1"]),
                _cell(at["balanced_accuracy"]),
                _cell(mine["f1_rarest"]),
                _cell(mine["client_macro_f1_mean"]),
                _cell(mine["client_accuracy_worst"]),
                span(float(at["virtual_seconds"].mean())),
            ]
        )
    yield markdown(columns, rows)
    share, faster = sync_and_async(facts.equal)
    yield (
        f"At equal client updates asynchronous learning reaches {share.mean:.1%}"
        f" ± {share.std:.1%} of the synchronous macro-F1, in 1/{faster:.1f} of the virtual time."
        if share.seeds > 1
        else f"At equal client updates asynchronous learning reaches {share.mean:.1%} of the"
        f" synchronous macro-F1, in 1/{faster:.1f} of the virtual time."
    )


def sync_and_async(equal: pd.DataFrame) -> tuple["Share", float]:
    """Asynchronous over synchronous macro-F1 by seed; synchronous over asynchronous time."""
    by = equal.set_index("seed").groupby("paradigm")
    sync, other = by.get_group(SYNCHRONOUS), by.get_group(ASYNCHRONOUS)
    ratio = other["macro_f1"] / sync["macro_f1"]
    times = sync["virtual_seconds"] / other["virtual_seconds"]
    return Share(float(ratio.mean()), float(ratio.std()), len(ratio)), float(times.mean())


@dataclass(frozen=True)
class Share:
    mean: float
    std: float
    seeds: int


def decisions(found: Evidence) -> Iterable[str]:
    """Every decision with its largest effect first."""
    rows = []
    for factor in found.plan.factors:
        for paradigm in PARADIGMS:
            for value in found.plan.values(factor)[1:]:
                against = ("strategy", value) if factor == BUSY else (BASE, "")
                change, rare = (
                    effect(found.table, paradigm, factor, value, column, against)
                    for column in ("macro_f1", "f1_rarest")
                )
                if change is None or rare is None:
                    continue
                matters = "yes" if change.sign else "no" if change.small else "cannot tell"
                rows.append(
                    (
                        abs(change.mean),
                        [
                            DECISIONS[factor],
                            paradigm,
                            _change(found, factor, value),
                            str(change),
                            str(rare),
                            matters,
                        ],
                    )
                )
    rows.sort(key=lambda row: -row[0])
    head = ["decision", "in", "change", "macro-F1", f"F1 of {found.rarest}", "matters"]
    yield markdown(head, [cells for _, cells in rows])
    yield (
        "Differences to the run of the same seed with nothing changed, mean ± standard deviation."
        f' "yes": the 95% interval (Student) excludes 0 and the mean is at least {SMALLEST};'
        f' "no": the interval lies within ±{SMALLEST}.'
    )


def _change(found: Evidence, factor: str, value: str) -> str:
    if factor != BUSY:
        return f"{found.plan.base[factor]} -> {value}"
    delays = found.plan.values("server_delay")
    return f"{delays[0]} -> {max(delays, key=float)} with {value}"


def against(found: Evidence) -> Iterable[str]:
    yield markdown(
        ["no.", "takeaway of the paper", "here", "numbers (macro-F1 unless said)"],
        [[str(v.number), v.claim, f"**{v.verdict}**", v.numbers] for v in verdicts(found)],
    )


def table(found: Evidence, factors: Sequence[str]) -> str:
    """A table like the paper's: decisions and values across, ways of learning and metrics down."""
    present = [factor for factor in factors if found.plan.values(factor)]
    if not present:
        return ""
    columns = [
        (factor, value)
        for factor in present
        for value in sorted(found.plan.values(factor), key=_order)
    ]
    rows = []
    for paradigm in PARADIGMS:
        for metric, name in METRICS.items():
            cells = [_value(found, paradigm, factor, value, metric) for factor, value in columns]
            if any(cells):
                rows.append([paradigm, name, *(cell or "-" for cell in cells)])
    head = [f"{DECISIONS[f]} {v}{'*' if found.plan.base[f] == v else ''}" for f, v in columns]
    return markdown(["way of learning", "metric", *head], rows) + "\n\n\\* the base"


def _value(found: Evidence, paradigm: str, factor: str, value: str, metric: str) -> str:
    if found.plan.find(paradigm, factor, value) is None:
        return ""
    if not any(v.factor == factor and v.paradigm == paradigm for v in found.plan.variants):
        return ""
    if found.plan.base[factor] == value:
        factor, value = BASE, ""
    return _cell(by_seed(found.table, paradigm, factor, value, metric))


def _order(value: str) -> tuple[int, float, str]:
    try:
        return (0, float(value), "")
    except ValueError:
        return (1, 0.0, value)


def _cell(values: "pd.Series[float]") -> str:
    known = values.dropna()
    if known.empty:
        return "-"
    spread = f" ± {known.std():.3f}" if len(known) > 1 else ""
    return f"{known.mean():.3f}{spread}"


def markdown(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    lines += ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join(lines)
