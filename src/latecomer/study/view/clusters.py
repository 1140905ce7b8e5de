"""Clusters over time: members of each cluster, splits, merges and broadcasts."""

from collections import Counter
from typing import Any

import numpy as np

from latecomer.study.view.history import History
from latecomer.study.view.panels import (
    COLOURS,
    Clock,
    Lanes,
    Mark,
    Panel,
    Series,
    State,
    View,
    thinned,
)
from latecomer.study.view.timeline import Spans, lanes_of

SHOWN = 7  # clusters with a colour each; all others together are grey
MAX_MARKS = 40
MAX_SPANS = 20_000
OTHERS = "others"


def clusters(history: History, clock: Clock) -> Panel | None:
    """Members of each cluster over virtual time; None for a run with one model."""
    lineages = {lineage for _, _, lineage in history.moves}
    if len(lineages) < 2 and not history.cluster_events:
        return None
    named = _shown_clusters(history)
    views = [
        View(
            "members",
            clock.title,
            "devices",
            _members(history, named, clock),
            marks=_marks(history, clock),
            stacked=True,
            note=_counted(history),
        )
    ]
    if len(history.devices) > 1:
        views.append(View("by device", clock.title, "device", lanes=_lanes(history, named, clock)))
    return Panel(
        "clusters",
        "Clusters",
        "The devices of a cluster share one model. A device changes cluster when it is sent, or its"
        " update is added to, the model of another cluster.",
        views,
    )


def _shown_clusters(history: History) -> list[str]:
    """The clusters with most members at the end, then those with most assignments."""
    now, ever = Counter(history.cluster_of.values()), Counter(name for _, _, name in history.moves)
    names = sorted(ever, key=lambda name: (-now[name], -ever[name], name))
    return names if len(names) <= SHOWN + 1 else names[:SHOWN]


def _members(history: History, named: list[str], clock: Clock) -> list[Series]:
    cluster_of: dict[int, str] = {}
    counts: Counter[str] = Counter()
    times: list[float] = []
    rows: list[list[int]] = []
    labels = [*named, OTHERS]

    def row() -> list[int]:
        return [*(counts[n] for n in named), sum(counts.values()) - sum(counts[n] for n in named)]

    for time, device, lineage in history.moves:
        if device in cluster_of:
            counts[cluster_of[device]] -= 1
        cluster_of[device] = lineage
        counts[lineage] += 1
        if times and times[-1] == time:
            rows[-1] = row()
        else:
            times.append(time)
            rows.append(row())
    times.append(history.now)
    rows.append(row())
    x, picked = thinned(clock.each(times), rows, limit=400)
    return [
        Series(label, x, [r[k] for r in picked], "area", colour=min(k, 7), dash=0)
        for k, label in enumerate(labels)
        if any(r[k] for r in rows)
    ]


def _marks(history: History, clock: Clock) -> list[Mark]:
    """Splits and merges; broadcasts too if all together are at most MAX_MARKS."""
    changes = [e for e in history.cluster_events if e["event"] != "broadcast"]
    shown = (
        history.cluster_events if len(history.cluster_events) <= MAX_MARKS else changes[:MAX_MARKS]
    )
    return [Mark(clock(event["time"]), _event_text(event)) for event in shown]


def _event_text(event: dict[str, Any]) -> str:
    """`split a, b`: the event and every cluster that it names."""
    names: list[str] = []
    for key, value in event.items():
        if key in ("time", "event"):
            continue
        listed = value if isinstance(value, list) else [value]
        names += [str(v) for v in listed if isinstance(v, str) and str(v) not in names]
    return f"{event['event']} {', '.join(names[:3])}".strip()


def _counted(history: History) -> str:
    kinds = Counter(event["event"] for event in history.cluster_events)
    found = [
        f"{kinds[kind]:,} {kind}{'s' if kinds[kind] > 1 else ''}"
        for kind in ("split", "merge", "broadcast")
        if kinds[kind]
    ]
    return f"Total: {', '.join(found)}." if found else ""


def _lanes(history: History, named: list[str], clock: Clock) -> Lanes:
    labels = [*named, OTHERS]
    place = {name: k for k, name in enumerate(named)}
    by_device: dict[int, list[tuple[float, int]]] = {d: [] for d in sorted(history.devices)}
    for time, device, lineage in history.moves:
        by_device.setdefault(device, []).append((time, place.get(lineage, len(named))))
    rows: list[tuple[int, int, float, float]] = []
    shown: list[int] = []
    for device, moves in by_device.items():
        if len(rows) > MAX_SPANS:
            break
        shown.append(device)
        ends = [*(time for time, _ in moves[1:]), history.now]
        rows += [(device, k, begin, end) for (begin, k), end in zip(moves, ends, strict=False)]
    columns = np.array(rows, dtype=float).reshape(-1, 4).T
    spans = Spans(columns[0].astype(np.int64), columns[1].astype(np.uint8), *columns[2:])
    states = [State(label, COLOURS[min(k, SHOWN)]) for k, label in enumerate(labels)]
    return lanes_of(spans, shown, frozenset(), states, clock)
