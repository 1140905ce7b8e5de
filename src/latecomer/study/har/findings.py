"""The text of findings.md: paradigms at equal updates, effects, the paper's takeaways, tables."""

from collections.abc import Iterable, Sequence

import pandas as pd

from latecomer.study.har.effects import MIN_EFFECT
from latecomer.study.har.plan import ASYNCHRONOUS, BASE, BUSY, PARADIGMS, SYNCHRONOUS, Plan
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


Block = str | pd.DataFrame  # a paragraph in Markdown, or a table of texts


def findings(title: str, notes: Sequence[str], results: StudyResults) -> list[Block]:
    """The blocks of findings.md; `notes` are the messages of the run about its data."""
    plan = results.plan
    tables = [_paper_table(results, factors) for factors in TABLES]
    return [
        f"# {title}",
        f"{plan.devices} devices, as many client updates as {plan.rounds} rounds,"
        f" seeds {', '.join(map(str, results.seeds))}. Scores are means of the last"
        f" {LAST_EVALUATIONS} evaluations on the central test set; ± is the standard deviation"
        " over seeds.",
        *(["\n".join(f"- {note}" for note in notes)] if notes else []),
        "## Paradigms at equal client updates",
        *_paradigms(results),
        "## Effects of decisions",
        *_effects(results),
        "## Comparison with the paper",
        _takeaways(results),
        "## Tables",
        *(part for table in tables if len(table) for part in (table, "\\* the base value")),
    ]


def markdown(blocks: Iterable[Block]) -> str:
    """The text of findings.md."""
    return "\n\n".join(b if isinstance(b, str) else _markdown_table(b) for b in blocks) + "\n"


def _markdown_table(table: pd.DataFrame) -> str:
    rows: list[list[str]] = table.to_numpy().tolist()
    rows = [list(map(str, table)), ["---"] * len(table.columns), *rows]
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def _paradigms(results: StudyResults) -> Iterable[Block]:
    """Centralised, synchronous and asynchronous base runs at equal numbers of client updates."""
    base = results.table[results.table["factor"] == BASE]
    rows = []
    for paradigm in PARADIGMS:
        equal = results.equal[results.equal["paradigm"] == paradigm]
        final = base[base["paradigm"] == paradigm]
        rows.append(
            {
                "paradigm": paradigm,
                "macro-F1": _cell(equal["macro_f1"]),
                "balanced accuracy": _cell(equal["balanced_accuracy"]),
                f"F1 of {results.rarest}": _cell(final["f1_rarest"]),
                "local test macro-F1": _cell(final["client_macro_f1_mean"]),
                "lowest local test accuracy": _cell(final["client_accuracy_worst"]),
                "virtual time": span(float(equal["virtual_seconds"].mean())),
            }
        )
    yield pd.DataFrame(rows)
    by = results.equal.set_index("seed").groupby("paradigm")
    sync, other = by.get_group(SYNCHRONOUS), by.get_group(ASYNCHRONOUS)
    ratio = other["macro_f1"] / sync["macro_f1"]
    faster = float((sync["virtual_seconds"] / other["virtual_seconds"]).mean())
    spread = f" ± {ratio.std():.1%}" if len(ratio) > 1 else ""
    yield (
        f"At equal client updates asynchronous learning reaches {ratio.mean():.1%}{spread} of the"
        f" synchronous macro-F1, in 1/{faster:.1f} of the virtual time."
    )


def _effects(results: StudyResults) -> Iterable[Block]:
    """The effect of every changed value, by decreasing size."""
    plan, rows = results.plan, []
    for variant in plan.variants[len(PARADIGMS) :]:
        factor, value, paradigm = variant.factor, variant.value, variant.paradigm
        before = ("strategy", value) if factor == BUSY else (factor, plan.base[factor])
        change, rare = (
            results.difference(paradigm, (factor, value), before, column)
            for column in ("macro_f1", "f1_rarest")
        )
        if change is None or rare is None:
            continue
        clear = "yes" if change.sign else "no" if change.negligible else "inconclusive"
        row = {
            "decision": DECISIONS[factor],
            "paradigm": paradigm,
            "change": _change(plan, factor, value),
            "macro-F1": str(change),
            f"F1 of {results.rarest}": str(rare),
            "clear effect": clear,
        }
        rows.append((abs(change.mean), row))
    if rows:
        yield pd.DataFrame([row for _, row in sorted(rows, key=lambda each: -each[0])])
    yield (
        "Differences to the base run of the same seed, mean ± standard deviation over seeds. Clear"
        f' effect: "yes" if the 95% interval (Student\'s t) excludes 0 and the mean is at least'
        f' {MIN_EFFECT}, "no" if the interval lies within ±{MIN_EFFECT}.'
    )


def _change(plan: Plan, factor: str, value: str) -> str:
    if factor != BUSY:
        return f"{plan.base[factor]} -> {value}"
    delays = plan.values("server_delay")
    return f"{delays[0]} -> {max(delays, key=float)} with {value}"


def _takeaways(results: StudyResults) -> pd.DataFrame:
    return pd.DataFrame(
        {
            "no.": str(check.number),
            "takeaway of the paper": check.claim,
            "result": f"**{check.result}**",
            "numbers (macro-F1 unless stated)": check.numbers,
        }
        for check in check_takeaways(results)
    )


def _paper_table(results: StudyResults, factors: Sequence[str]) -> pd.DataFrame:
    """A table like the paper's: columns are values of the factors, rows paradigms and metrics."""
    plan, rows = results.plan, []
    varied = {(v.paradigm, v.factor) for v in plan.variants}
    for paradigm in PARADIGMS:
        for metric, name in METRICS.items():
            cells = {
                f"{DECISIONS[f]} {v}{'*' if plan.base[f] == v else ''}": (
                    _cell(results.scores(paradigm, f, v, metric))
                    if (paradigm, f) in varied
                    else "-"
                )
                for f in factors
                for v in sorted(plan.values(f), key=_order)
            }
            if set(cells.values()) - {"-"}:
                rows.append({"paradigm": paradigm, "metric": name, **cells})
    return pd.DataFrame(rows)


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
