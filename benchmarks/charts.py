"""Line and bar charts as SVG files, for the studies in docs/."""

import math
from collections.abc import Mapping, Sequence
from html import escape
from math import log
from pathlib import Path

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#7f7f7f", "#000000")
WIDTH, HEIGHT = 760, 380
LEFT, RIGHT, TOP, BOTTOM = 56, 190, 34, 46

Line = Sequence[tuple[float, float, float, float]]  # x, mean, lowest, highest


def line_chart(
    path: Path,
    title: str,
    x_title: str,
    y_title: str,
    lines: Mapping[str, Line],
    ticks: Sequence[float] = (0.0, 0.25, 0.5, 0.75, 1.0),
    logarithmic: bool = False,
) -> None:
    """One line per label with its range shaded; y runs from the first to the last of `ticks`."""
    longest = max((points[-1][0] for points in lines.values() if points), default=1.0) or 1.0

    def at(x: float, y: float) -> str:
        across = LEFT + (WIDTH - LEFT - RIGHT) * x / longest
        low, high, y = (
            log(v) if logarithmic else v for v in (ticks[0], ticks[-1], max(y, ticks[0]))
        )
        up = TOP + (HEIGHT - TOP - BOTTOM) * (1 - min((y - low) / (high - low), 1.0))
        return f"{across:.1f},{up:.1f}"

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}"'
        ' font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        f'<text x="{LEFT}" y="20" font-size="14" font-weight="bold">{escape(title)}</text>',
    ]
    for tick in ticks:
        a, b = at(0, tick), at(longest, tick)
        parts.append(f'<polyline points="{a} {b}" stroke="#dddddd" fill="none"/>')
        x, y = a.split(",")
        parts.append(
            f'<text x="{float(x) - 6}" y="{float(y) + 4}" text-anchor="end">{tick:,g}</text>'
        )
    for i in range(5):
        value = longest * i / 4
        x, y = at(value, ticks[0]).split(",")
        parts.append(
            f'<text x="{x}" y="{float(y) + 16}" text-anchor="middle">{round(value, 2):g}</text>'
        )
    middle = LEFT + (WIDTH - LEFT - RIGHT) / 2
    parts.append(
        f'<text x="{middle}" y="{HEIGHT - 8}" text-anchor="middle">{escape(x_title)}</text>'
    )
    parts.append(
        f'<text transform="translate(14,{HEIGHT / 2}) rotate(-90)" text-anchor="middle">'
        f"{escape(y_title)}</text>"
    )
    for i, (label, points) in enumerate(lines.items()):
        colour = COLOURS[i % len(COLOURS)]
        dash = ' stroke-dasharray="5,4"' if i >= len(COLOURS) else ""
        low = [at(x, lowest) for x, _, lowest, _ in points]
        high = [at(x, highest) for x, _, _, highest in points]
        area = " ".join([*high, *reversed(low)])
        parts.append(f'<polygon points="{area}" fill="{colour}" opacity="0.13"/>')
        trace = " ".join(at(x, mean) for x, mean, _, _ in points)
        parts.append(
            f'<polyline points="{trace}" stroke="{colour}" stroke-width="2" fill="none"{dash}/>'
        )
        y = TOP + 14 + 20 * i
        x = WIDTH - RIGHT + 14
        parts.append(f'<rect x="{x}" y="{y - 4}" width="18" height="3" fill="{colour}"/>')
        parts.append(f'<text x="{x + 24}" y="{y}">{escape(label)}</text>')
    parts.append("</svg>")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(parts) + "\n")


def bar_chart(
    path: Path,
    title: str,
    x_title: str,
    y_title: str,
    places: Sequence[str],
    bars: Mapping[str, Sequence[float]],
    stacked: bool,
) -> None:
    """One bar per label at every place, on top of each other or side by side."""
    totals = [sum(values) for values in zip(*bars.values(), strict=True)]
    highest = _round_up(max(totals if stacked else (v for vs in bars.values() for v in vs)))
    room = (WIDTH - LEFT - RIGHT) / len(places)
    width = 0.8 * room / (1 if stacked else len(bars))
    depth = HEIGHT - TOP - BOTTOM
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}"'
        ' font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        f'<text x="{LEFT}" y="20" font-size="14" font-weight="bold">{escape(title)}</text>',
    ]
    for tick in (0.0, 0.25, 0.5, 0.75, 1.0):
        y = TOP + depth * (1 - tick)
        parts.append(
            f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}" stroke="#dddddd"/>'
            f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{tick * highest:,.6g}</text>'
        )
    heights = [0.0] * len(places)
    for i, (label, values) in enumerate(bars.items()):
        colour = COLOURS[i % len(COLOURS)]
        for k, value in enumerate(values):
            tall = depth * value / highest
            x = LEFT + room * k + 0.1 * room + (0 if stacked else width * i)
            y = TOP + depth - tall - (heights[k] if stacked else 0)
            heights[k] += tall
            parts.append(
                f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{tall:.1f}"'
                f' fill="{colour}"/>'
            )
        y, x = TOP + 14 + 20 * i, WIDTH - RIGHT + 14
        parts.append(f'<rect x="{x}" y="{y - 9}" width="18" height="10" fill="{colour}"/>')
        parts.append(f'<text x="{x + 24}" y="{y}">{escape(label)}</text>')
    # A letter is about 0.55 of the font size wide; the size is chosen so that names do not overlap.
    size = min(12.0, room / (0.55 * max(map(len, places))))
    for k, place in enumerate(places):
        x = LEFT + room * (k + 0.5)
        parts.append(
            f'<text x="{x:.1f}" y="{TOP + depth + 16}" text-anchor="middle"'
            f' font-size="{size:.1f}">{escape(place)}</text>'
        )
    middle = LEFT + (WIDTH - LEFT - RIGHT) / 2
    parts.append(
        f'<text x="{middle}" y="{HEIGHT - 8}" text-anchor="middle">{escape(x_title)}</text>'
        f'<text transform="translate(14,{HEIGHT / 2}) rotate(-90)" text-anchor="middle">'
        f"{escape(y_title)}</text></svg>"
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(parts) + "\n")


def _round_up(value: float) -> float:
    """The smallest number of at least `value` whose quarters are round."""
    unit = 10 ** math.floor(math.log10(value)) if value > 0 else 1.0
    return next(
        unit * step for step in (1, 1.2, 1.6, 2, 2.4, 3, 4, 6, 8, 10) if unit * step >= value
    )
