"""A hand-made run folder whose log has all that a log can tell: nothing is trained."""

import json
import random
from pathlib import Path
from typing import Any

DEVICES = 12
EPSILON = 2.0


def make(folder: Path) -> Path:
    """Twelve devices, two of them late; splits, a merge, broadcasts, repairs, privacy, widths."""
    folder.mkdir(parents=True)
    luck = random.Random(1)
    lines: list[dict[str, Any]] = []
    spent = dict.fromkeys(range(DEVICES), 0.0)
    home = dict.fromkeys(range(DEVICES), "main")
    task = 0
    lines += [{"time": 0.0, "event": "level", "device": d, "width": 0.5} for d in (3, 4, 5)]
    for epoch in range(40):
        now = 600.0 * epoch
        lines += _turns(epoch, now, home)
        for device in range(DEVICES):
            if spent[device] >= EPSILON:
                continue
            lines.append(
                {"time": now, "event": "dispatch", "device": device, "task": task,
                 "lineage": home[device], "version": epoch, "bytes": 26280}
            )  # fmt: skip
            spans = [luck.uniform(5, 20), luck.uniform(100, 300), luck.uniform(10, 60)]
            late = 150.0 if device in (0, 1) else 0.0
            spent[device] = min(EPSILON, spent[device] + luck.uniform(0.01, 0.02 + 0.01 * device))
            at = now + sum(spans) + late
            if luck.random() < 0.05:
                lines.append({"time": at, "event": "drop", "device": device, "task": task,
                              "reason": "the device was lost in mid-task"})  # fmt: skip
            else:
                stale = 5 + device if late else luck.randrange(3)
                lines.append(
                    {"time": at, "event": "arrival", "device": device, "task": task,
                     "lineage": home[device], "sent": epoch, "version": epoch + 1,
                     "staleness": stale, "weight": 1 / (1 + stale), "bytes": 26280,
                     "epsilon": spent[device], "spans": spans}
                )  # fmt: skip
            if late:
                lines += _repair(device, task, at, epoch, luck)
            if spent[device] >= EPSILON:
                lines.append({"time": at, "event": "retire", "device": device,
                              "epsilon": EPSILON, "reason": "its budget is spent"})  # fmt: skip
            task += 1
        lines.append({"time": now + 599, "event": "commit", "lineage": "main",
                      "version": epoch + 1, "updates": DEVICES})  # fmt: skip
    lines.sort(key=lambda line: line["time"])
    lines.append({"time": 15000.0, "event": "switch", "lineage": "main", "version": 25,
                  "error_estimate": 0.2, "error_stale": 0.1})  # fmt: skip
    lines.sort(key=lambda line: line["time"])
    (folder / "events.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    _write_tables(folder)
    return folder


def _turns(epoch: int, now: float, home: dict[int, str]) -> list[dict[str, Any]]:
    if epoch == 10:
        home.update(dict.fromkeys((6, 7, 8), "c1"))
        return [
            {"time": now, "event": "split", "lineage": "main", "into": "c1", "devices": [6, 7, 8]}
        ]
    if epoch == 18:
        home.update(dict.fromkeys((9, 10), "c2"))
        return [
            {"time": now, "event": "split", "lineage": "main", "into": "c2", "devices": [9, 10]}
        ]
    if epoch == 30:
        home.update({d: "main" for d, name in home.items() if name == "c2"})
        return [{"time": now, "event": "merge", "lineage": "c2", "into": "main"}]
    if epoch == 24:
        return [
            {
                "time": now,
                "event": "broadcast",
                "lineage": "c1",
                "version": 24,
                "devices": 2,
                "bytes": 52560,
            }
        ]
    return []


def _repair(device: int, task: int, at: float, epoch: int, luck: random.Random) -> list[Any]:
    common = {"device": device, "task": task, "lineage": "main"}
    repaired = {"staleness": 5, "weight": 1.0, "gamma": 1.0, "seconds": 0.4}
    errors = {"error_estimate": 0.1 + 0.004 * epoch, "error_stale": luck.uniform(0.2, 0.3)}
    return [
        {"time": at + 1, "event": "compensation", **common, **repaired},
        {"time": at + 2, "event": "validation", **common, "gap": 3, **errors},
    ]


def _write_tables(folder: Path) -> None:
    classes = [f"class {name}" for name in "abcdefgh"] + ["climbing stairs with a load"]
    columns = ["updates", "version", "virtual_seconds", "wall_seconds", "loss", "accuracy"]
    columns += ["balanced_accuracy", "macro_f1", "accuracy_affected", *(f"f1_{c}" for c in classes)]
    rows = []
    for k in range(41):
        grown = 1 - 0.9 / (1 + 0.2 * k)
        rows.append([12 * k, k, 600.0 * k, 0.1 * k, 2 - grown, *[grown] * 3, grown**3,
                     *(grown ** (1 + 0.2 * j) for j in range(len(classes)))])  # fmt: skip
    text = [",".join(columns), *(",".join(str(v) for v in row) for row in rows)]
    (folder / "metrics.csv").write_text("\n".join(text) + "\n")
    own = [f"{d},{int(d < 2)},{20 + d},{0.5 + 0.04 * d},main" for d in range(DEVICES)]
    (folder / "devices.csv").write_text("device,late,examples,accuracy,lineage\n" + "\n".join(own))
    windows = {"2": [86400.0, [[0.0, 7200.0], [10000.0, 18000.0]]]}
    fleet = {"devices": DEVICES, "late": [0, 1], "affected": [classes[-1]], "windows": windows}
    (folder / "fleet.json").write_text(json.dumps(fleet))
    (folder / "config.toml").write_text(
        f'seed = 1\n[data]\nsource = "npz"\n[strategy]\nname = "feddc"\n[model]\nname = "mlp"\n'
        f"[fleet]\ndevices = {DEVICES}\n[privacy]\nepsilon = 0.5\nbudget = {EPSILON}\n"
    )
