"""The charts of docs/studies/har.md, drawn from output folders of `latecomer study har`.

python benchmarks/har.py DIR [DIR ...] [--charts docs/studies]

Four charts per DIR, named after it: macro-F1 over client updates and over virtual time, labels
per device, feature skew per class.
"""

import argparse
import json
from pathlib import Path

import pandas as pd
from charts import Line, bar_chart, line_chart

from latecomer.study.har.plan import CENTRALISED, make_plan
from latecomer.study.har.scores import base_curves
from latecomer.study.view.learning import mean_and_range

UPDATES = ("updates", "client updates")
HOURS = ("virtual_seconds", "virtual time (h)")


def draw(folder: Path, charts: Path) -> None:
    """Write the four charts of the study in `folder` to the folder `charts`."""
    content = json.loads((folder / "plan.json").read_text())
    plan = make_plan(content["config"], content["quick"])
    seeds = sorted(pd.read_csv(folder / "results.csv")["seed"].unique().tolist())
    curves = base_curves(plan, seeds, folder / "runs")
    name = folder.name
    for column, title in (UPDATES, HOURS):
        lines: dict[str, Line] = {}
        for paradigm, runs in reversed(curves.items()):
            if column == HOURS[0] and paradigm == CENTRALISED:
                continue  # the time of one machine with the data of all devices is not comparable
            band = mean_and_range(runs, column, "macro_f1")
            x = band["x"] / (3600 if column == HOURS[0] else 1)
            lines[paradigm] = list(zip(x, band["mean"], band["low"], band["high"], strict=True))
        kind = "time" if column == HOURS[0] else "updates"
        path = charts / f"har-{name}-{kind}.svg"
        line_chart(
            path, f"{name}: mean and range over {len(seeds)} seeds", title, "macro-F1", lines
        )
    labels = pd.read_csv(folder / "labels.csv", index_col="device")
    bar_chart(
        charts / f"har-{name}-labels.svg",
        f"{name}: label distribution per device",
        "device",
        "examples",
        [str(device) for device in labels.index],
        {label: labels[label].tolist() for label in labels.columns},
        stacked=True,
    )
    skew = pd.read_csv(folder / "skew.csv").fillna(0.0)
    bar_chart(
        charts / f"har-{name}-skew.svg",
        f"{name}: share of a class's variance that lies between devices",
        "class (examples)",
        "feature skew",
        [f"{_short(row['class'])} ({row['examples']})" for _, row in skew.iterrows()],
        {f"{kind} scaling": skew[kind].tolist() for kind in ("global", "local")},
        stacked=False,
    )


def _short(name: str) -> str:
    return name.lower().removeprefix("fix_").removeprefix("or_").replace("_", " ")[:12]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folders", nargs="+", type=Path)
    parser.add_argument("--charts", type=Path, default=Path("docs/studies"))
    arguments = parser.parse_args()
    for folder in arguments.folders:
        draw(folder, arguments.charts)


if __name__ == "__main__":
    main()
