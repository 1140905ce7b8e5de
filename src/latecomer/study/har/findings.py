"""The text of findings.md: paradigms at equal updates, effects, the paper's takeaways, tables."""

from collections.abc import Iterable, Sequence

import pandas as pd

from latecomer.study.har.effects import MIN_EFFECT, effect, scores_by_seed
from latecomer.study.har.plan import ASYNCHRONOUS, BASE, BUSY, PARADIGMS, SYNCHRONOUS
from latecomer.study.har.scores import LAST_EVALUATIONS
from latecomer.study.har.takeaways import StudyResults, check_takeaways
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


def findings(title: str, notes: Sequence[str], results: StudyResults) -> str:
    """findings.md as Markdown; `notes` are the messages of the run about its data."""
    plan = results.plan
    parts = [
        f"# {title}",
        f"{plan.devices} devices, as many client updates as {plan.rounds} rounds,"
        f" seeds {', '.join(map(str, results.seeds))}. Scores are means of the last"
        f" {LAST_EVALUATIONS} evaluations on the central test set; ± is the standard deviation"
        " over seeds.",
        "\n".join(f"- {note}" for note in notes),
        "## Paradigms at equal client updates",
        *_paradigms(results),
        "## Effects of decisions",
        *_effects(results),
        "## Comparison with the paper",
        _takeaways(results),
        "## Tables",
        *(_paper_table(results, factors) for factors in TABLES),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _paradigms(results: StudyResults) -> Iterable[str]:
    """Centralised, synchronous and asynchronous base runs at equal numbers of client updates."""
    base = results.table[results.table["factor"] == BASE]
    columns = [
        "paradigm",
        "macro-F1",
        "balanced accuracy",
        f"F1 of {results.rarest}",
        "local test macro-F1",
        "lowest local test accuracy",
        "virtual time",
    ]
    rows = []
    for paradigm in PARADIGMS:
        equal = results.equal[results.equal["paradigm"] == paradigm]
        final = base[base["paradigm"] == paradigm]
        rows.append(
            [
                paradigm,
                _cell(equal["macro_f1"]),
                _cell(equal["balanced_accuracy"]),
                _cell(final["f1_rarest"]),
                _cell(final["client_macro_f1_mean"]),
                _cell(final["client_accuracy_worst"]),
                span(float(equal["virtual_seconds"].mean())),
            ]
        )
    yield markdown_table(columns, rows)
    by = results.equal.set_index("seed").groupby("paradigm")
    sync, other = by.get_group(SYNCHRONOUS), by.get_group(ASYNCHRONOUS)
    ratio = other["macro_f1"] / sync["macro_f1"]
    faster = float((sync["virtual_seconds"] / other["virtual_seconds"]).mean())
    spread = f" ± {ratio.std():.1%}" if len(ratio) > 1 else ""
    yield (
        f"At equal client updates asynchronous learning reaches {ratio.mean():.1%}{spread} of the"
        f" synchronous macro-F1, in 1/{faster:.1f} of the virtual time."
    )


def _effects(results: StudyResults) -> Iterable[str]:
    """The effect of every changed value, by decreasing size."""
    plan = results.plan
    rows = []
    for factor in plan.factors:
        for paradigm in PARADIGMS:
            for value in plan.values(factor)[1:]:
                reference = ("strategy", value) if factor == BUSY else (BASE, "")
                change, rare = (
                    effect(results.table, paradigm, factor, value, column, reference)
                    for column in ("macro_f1", "f1_rarest")
                )
                if change is None or rare is None:
                    continue
                clear = "yes" if change.sign else "no" if change.negligible else "inconclusive"
                name, changed = DECISIONS[factor], _change(results, factor, value)
                cells = [name, paradigm, changed, str(change), str(rare), clear]
                rows.append((abs(change.mean), cells))
    rows.sort(key=lambda row: -row[0])
    rarest = f"F1 of {results.rarest}"
    head = ["decision", "paradigm", "change", "macro-F1", rarest, "clear effect"]
    yield markdown_table(head, [cells for _, cells in rows])
    yield (
        "Differences to the base run of the same seed, mean ± standard deviation over seeds. Clear"
        f' effect: "yes" if the 95% interval (Student\'s t) excludes 0 and the mean is at least'
        f' {MIN_EFFECT}, "no" if the interval lies within ±{MIN_EFFECT}.'
    )


def _change(results: StudyResults, factor: str, value: str) -> str:
    if factor != BUSY:
        return f"{results.plan.base[factor]} -> {value}"
    delays = results.plan.values("server_delay")
    return f"{delays[0]} -> {max(delays, key=float)} with {value}"


def _takeaways(results: StudyResults) -> str:
    return markdown_table(
        ["no.", "takeaway of the paper", "result", "numbers (macro-F1 unless stated)"],
        [
            [str(check.number), check.claim, f"**{check.result}**", check.numbers]
            for check in check_takeaways(results)
        ],
    )


def _paper_table(results: StudyResults, factors: Sequence[str]) -> str:
    """A table like the paper's: columns are values of the factors, rows paradigms and metrics."""
    plan = results.plan
    columns = [
        (factor, value) for factor in factors for value in sorted(plan.values(factor), key=_order)
    ]
    if not columns:
        return ""
    rows = []
    for paradigm in PARADIGMS:
        for metric, name in METRICS.items():
            cells = [_value(results, paradigm, factor, value, metric) for factor, value in columns]
            if any(cells):
                rows.append([paradigm, name, *(cell or "-" for cell in cells)])
    head = [f"{DECISIONS[f]} {v}{'*' if plan.base[f] == v else ''}" for f, v in columns]
    return markdown_table(["paradigm", "metric", *head], rows) + "\n\n\\* the base value"


def _value(results: StudyResults, paradigm: str, factor: str, value: str, metric: str) -> str:
    if results.plan.find(paradigm, factor, value) is None:
        return ""
    if not any(v.factor == factor and v.paradigm == paradigm for v in results.plan.variants):
        return ""
    if results.plan.base[factor] == value:
        factor, value = BASE, ""
    return _cell(scores_by_seed(results.table, paradigm, factor, value, metric))


def _order(value: str) -> tuple[int, float, str]:
    """Sorting key: numbers by size, then other values by name."""
    try:
        return (0, float(value), "")
    except ValueError:
        return (1, 0.0, value)


def _cell(values: "pd.Series[float]") -> str:
    """Mean ± standard deviation over seeds."""
    known = values.dropna()
    if known.empty:
        return "-"
    spread = f" ± {known.std():.3f}" if len(known) > 1 else ""
    return f"{known.mean():.3f}{spread}"


def markdown_table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table of text cells."""
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    lines += ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join(lines)
