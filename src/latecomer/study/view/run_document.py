"""The document of one run, finished or not, from the files in its folder."""

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pandas as pd

from latecomer import __version__
from latecomer.errors import BadInput
from latecomer.study.given import GIVEN
from latecomer.study.metric_names import label_of, main_metric, metric_columns, number_text
from latecomer.study.results import Result, read_csv, read_json
from latecomer.study.terminal import compensation_text, span
from latecomer.study.view.clusters import clusters
from latecomer.study.view.compensation import compensation
from latecomer.study.view.devices import device_scores, device_table, score_column, widths
from latecomer.study.view.history import History
from latecomer.study.view.learning import classes, learning
from latecomer.study.view.panels import Document, clock_for, without_empty
from latecomer.study.view.privacy import privacy
from latecomer.study.view.staleness import staleness
from latecomer.study.view.timeline import MAX_SPANS, Fleet, timeline
from latecomer.study.view.traffic import traffic, unit_for


def run_document(run: Result, history: History, max_spans: int = MAX_SPANS) -> Document:
    """All panels and tables of a run; `max_spans` bounds the size of its timeline."""
    metrics, summary = run.metrics, summary_of(run)
    config, fleet = config_of(run), fleet_of(run.folder)
    devices = devices_of(run.folder)
    ends = [history.now, *metrics["virtual_seconds"].iloc[-1:].astype(float)]
    clock = clock_for(max(ends))
    budget = budget_of(config)
    panels = without_empty(
        (
            learning(metrics, clock, loss_of(config)) if len(metrics) else None,
            classes(metrics, late_classes(run.folder), clock),
            timeline(history, fleet, clock, max_spans),
            staleness(history),
            compensation(history, clock),
            clusters(history, clock),
            privacy(history, budget, clock),
            traffic(history, clock),
            widths(history, fleet),
            device_scores(devices),
        )
    )
    table = device_table(history, fleet, devices, budget, ended=summary is not None)
    return Document(
        title=_title(config, summary),
        subtitle=_subtitle(config, history),
        facts=_facts(metrics, history, summary),
        panels=panels,
        tables=[table] if table else [],
        texts={"Command to reproduce": _command(config), "Config": run.config}
        if run.config
        else {},
        notes=[*(summary or {}).get("notes", []), *(summary or {}).get("warnings", [])],
    )


def summary_of(run: Result) -> dict[str, Any] | None:
    """The contents of summary.json; None before the run has finished."""
    return run.summary if (run.folder / "summary.json").is_file() else None


def fleet_of(folder: Path) -> Fleet:
    """Late devices, availability windows and widths from fleet.json; empty where it is missing."""
    path = folder / "fleet.json"
    if path.is_file():
        found = read_json(path)
        try:
            windows = {
                int(device): (float(period), tuple((float(a), float(b)) for a, b in some))
                for device, (period, some) in found["windows"].items()
            }
            widths = {int(d): float(width) for d, width in found.get("widths", {}).items()}
            return Fleet(int(found["devices"]), frozenset(found["late"]), windows, widths)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise BadInput(f"{path}: not the fleet of a run ({error})") from error
    summary = folder / "summary.json"
    late = read_json(summary).get("late_devices", []) if summary.is_file() else []
    return Fleet(0, frozenset(late), {})


def late_classes(folder: Path) -> list[str]:
    """Names of the classes in `fleet.late.classes`."""
    path = folder / "fleet.json"
    return [str(name) for name in read_json(path).get("affected", [])] if path.is_file() else []


def devices_of(folder: Path) -> pd.DataFrame | None:
    """devices.csv; None if there is none yet."""
    path = folder / "devices.csv"
    if not path.is_file():
        return None
    table = read_csv(path)
    missing = {"device", "late", "examples"} - set(table)
    if missing := missing or ({"accuracy"} if score_column(table) is None else set()):
        raise BadInput(f"{path}: not the devices of a run, it has no {', '.join(sorted(missing))}")
    return table


def config_of(run: Result) -> dict[str, Any]:
    """The config as a tree; empty if it is not valid TOML: the page shows its text anyway."""
    try:
        return tomllib.loads(run.config)
    except tomllib.TOMLDecodeError:
        return {}


def loss_of(config: Mapping[str, Any]) -> str:
    """The name of the loss."""
    return str(config.get("objective", {}).get("loss", "cross-entropy"))


def budget_of(config: Mapping[str, Any]) -> float:
    """Epsilon that a device may spend in the whole run; 0: no limit."""
    privacy = config.get("privacy", {})
    found = privacy.get("budget", 0.0)
    if not found and privacy.get("mode") == "whole-run":
        found = privacy.get("epsilon", 0.0)
    return float(found) if isinstance(found, int | float) else 0.0


def _title(config: Mapping[str, Any], summary: Mapping[str, Any] | None) -> str:
    if summary is not None:
        return f"{summary['strategy']} on {summary['source']}"
    name = config.get("strategy", {}).get("name", "").removeprefix(GIVEN)
    return f"{name} on {config.get('data', {}).get('source')}" if name else "Latecomer run"


def _subtitle(config: Mapping[str, Any], history: History) -> str:
    parts = []
    if model := config.get("model", {}).get("name"):
        parts.append(str(model))
    fleet = config.get("fleet", {})
    if devices := fleet.get("devices") or len(history.devices):
        kind = "deployed" if history.names else fleet.get("profile", "fleet")
        parts.append(f"{devices:,} devices ({kind})")
    if "seed" in config:
        parts.append(f"seed {config['seed']}")
    return ", ".join(parts)


def _facts(
    metrics: pd.DataFrame, history: History, summary: Mapping[str, Any] | None
) -> dict[str, str]:
    # A deployed server may not evaluate: then only the log has numbers.
    logged = {"updates": sum(history.updates.values()), "virtual_seconds": history.now}
    last = metrics.iloc[-1] if len(metrics) else pd.Series(logged)
    shown = metric_columns(metrics) if len(metrics) else []
    facts = {label_of(name): number_text(name, _number(last[name])) for name in shown}
    arrivals = sum(history.staleness.values())
    if arrivals:
        mean = sum(s * n for s, n in history.staleness.items()) / arrivals
        facts["mean staleness"] = f"{mean:.1f}"
    facts |= {"client updates": f"{int(last['updates']):,}"}
    facts |= {"virtual time": span(float(last["virtual_seconds"]))}
    sums = [sum(history.up[1]), sum(history.down[1])]
    unit, size = unit_for(max(sums))
    if max(sums):
        facts["upload / download"] = f"{sums[0] / size:.3g} / {sums[1] / size:.3g} {unit}"
    if summary is not None:
        main = main_metric(summary)
        local = summary.get(f"client_{main.name}", {})  # a deployed app may have other metrics
        facts |= {
            f"local test {main.label}": number_text(main.name, local.get("mean")),
            "local, worst device": number_text(main.name, local.get("worst")),
            "local, late devices": number_text(main.name, local.get("late_mean")),
            "compensated updates": compensation_text(summary),
            "epsilon, largest": _three_decimals((summary.get("epsilon") or {}).get("max")),
            "clusters at the end": str((summary.get("clusters") or {}).get("final", "-")),
            "wall time": span(summary["wall_seconds"]),
        }
    else:
        if "wall_seconds" in last:
            facts["wall time"] = span(float(last["wall_seconds"]))
        facts["state"] = "not finished"
    return {name: value for name, value in facts.items() if value != "-"}


def _number(value: Any) -> float | None:
    return None if value is None or pd.isna(value) else float(value)


def _three_decimals(value: Any) -> str:
    return "-" if (found := _number(value)) is None else f"{found:.3f}"


def _command(config: Mapping[str, Any]) -> str:
    # A strategy that was given in Python; deployments have its name alone.
    from latecomer.strategies.recipe import recipes

    full = str(config.get("strategy", {}).get("name", ""))
    name = full.removeprefix(GIVEN)
    if full != name or (name and ":" not in name and name not in recipes()):
        return f"# latecomer {__version__}\n# {name} was built from parts in Python: latecomer.run"
    return (
        f"# latecomer {__version__}; config.toml is beside this page and below\n"
        "# a relative data.path in it is relative to the working directory\n"
        "latecomer run config.toml --out again"
    )
