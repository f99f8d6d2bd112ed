"""Draws the latencies and the load of a benchmark run as SVG, without a plotting library."""

from __future__ import annotations

import html
import importlib.util
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from headrace.bench.record import RequestRecord, latencies_ms
from runtime.errors import StartupError

Points = list[tuple[float, float]]

SUFFIXES = (".svg", ".html", ".png")
_WIDTH, _HEIGHT = 420, 250
_LEFT, _RIGHT, _TOP, _BOTTOM = 58, 14, 30, 38
_MAX_POINTS = 400
_NUM_BINS = 120
_NUM_TICKS = 5
_PNG_SCALE = 2
_COLOURS = ("#1667b8", "#b8541a", "#2b8a3e", "#8639a8", "#555", "#b01050", "#0a8f8f")


@dataclass(frozen=True)
class Line:
    """A curve with a name; curves with the same name have the same colour.

    The legend does not list a curve whose name is empty.
    """

    name: str
    points: Points


@dataclass(frozen=True)
class Panel:
    """One plot with its curves.

    Attributes:
        x_unit: the unit of the horizontal axis; both axes begin at 0.
        steps: whether a curve keeps its value until the next point, instead of rising to it.
        marks: values on the horizontal axis that are marked by a short red line.
    """

    title: str
    x_unit: str
    y_unit: str
    lines: Sequence[Line]
    steps: bool = False
    marks: Sequence[float] = ()


def check_plot_path(path: Path) -> None:
    """Check before a long run that a plot can be written to `path`.

    Raises:
        StartupError: the suffix is not supported, or the package that writes it is not installed.
    """
    if path.suffix not in SUFFIXES:
        raise StartupError(f"--plot {path.name}: the name must end in {', '.join(SUFFIXES)}.")
    if path.suffix == ".png" and importlib.util.find_spec("cairosvg") is None:
        raise StartupError("A .png needs the package cairosvg; .svg and .html need nothing.")


def write_plot(path: Path, title: str, records: Sequence[RequestRecord]) -> None:
    """Write plots of `records` to `path`, in the format of its suffix."""
    drawing = draw(title, [record for record in records if not record.error])
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".png":
        cairosvg = importlib.import_module("cairosvg")
        cairosvg.svg2png(bytestring=drawing.encode(), write_to=str(path), scale=_PNG_SCALE)
        return
    if path.suffix == ".html":
        name = html.escape(title)
        drawing = (
            f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{name}</title>'
            f"<body>{drawing}</body></html>\n"
        )
    path.write_text(drawing, encoding="utf-8")


def draw(title: str, records: Sequence[RequestRecord]) -> str:
    """Return an SVG with the distributions of four latencies, and load and output over time."""
    values = latencies_ms(records)
    return draw_panels(
        title,
        [
            _one_line("Time to first token", "ms", "share of requests", _share(values["ttft_ms"])),
            _one_line(
                "Time per output token", "ms", "share of requests", _share(values["tpot_ms"])
            ),
            _one_line("Between two tokens", "ms", "share of tokens", _share(values["itl_ms"])),
            _one_line("Whole request", "ms", "share of requests", _share(values["e2e_ms"])),
            _one_line("In flight", "s", "requests", _in_flight(records), steps=True),
            _one_line("Output", "s", "tokens/s", _rate(records), steps=True),
        ],
    )


def _one_line(
    title: str, x_unit: str, y_unit: str, points: Points, *, steps: bool = False
) -> Panel:
    return Panel(title, x_unit, y_unit, [Line("", points)], steps=steps)


def draw_panels(title: str, panels: Sequence[Panel]) -> str:
    """Return one SVG with the panels in two columns."""
    columns = 2
    rows = math.ceil(len(panels) / columns)
    parts = [
        f'<g transform="translate({index % columns * _WIDTH},{30 + index // columns * _HEIGHT})">'
        f"{_draw_panel(panel)}</g>"
        for index, panel in enumerate(panels)
    ]
    width, height = columns * _WIDTH, 30 + rows * _HEIGHT
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}" font-family="sans-serif" font-size="11">'
        f'<rect width="{width}" height="{height}" fill="white"/>'
        f'<text x="12" y="20" font-size="13">{html.escape(title)}</text>{"".join(parts)}</svg>\n'
    )


def _share(values: Sequence[float]) -> Points:
    ordered = sorted(values)
    count = len(ordered)
    step = max(1, count // _MAX_POINTS)
    picked = sorted({*range(0, count, step), count - 1} - {-1})
    return [(ordered[index], (index + 1) / count) for index in picked]


def _in_flight(records: Sequence[RequestRecord]) -> Points:
    if not records:
        return []
    begin = min(record.started for record in records)
    changes = sorted(
        [(record.started - begin, 1) for record in records]
        + [(record.finished - begin, -1) for record in records]
    )
    points: Points = []
    running = 0
    for when, change in changes:
        running += change
        points.append((when, float(running)))
    return points


def _rate(records: Sequence[RequestRecord]) -> Points:
    if not records:
        return []
    begin = min(record.started for record in records)
    width = (max(record.finished for record in records) - begin) / _NUM_BINS
    if width <= 0:
        return []
    bins = [0.0] * _NUM_BINS
    for record in records:
        # A server may report too few tokens for a piece. The total is known, so the tokens of all
        # pieces are scaled to this total.
        reported = sum(record.event_tokens) or 1
        for when, count in zip(record.event_times, record.event_tokens, strict=True):
            share = count * record.output_tokens / reported
            bins[min(int((when - begin) / width), _NUM_BINS - 1)] += share
    return [(index * width, count / width) for index, count in enumerate(bins)]


def _ticks(most: float) -> list[float]:
    rough = most / _NUM_TICKS
    scale = 10 ** math.floor(math.log10(rough))
    step = next(factor * scale for factor in (1, 2, 5, 10) if factor * scale >= rough)
    return [index * step for index in range(math.floor(most / step + 1e-9) + 1)]


def _draw_panel(panel: Panel) -> str:
    title = html.escape(panel.title)
    parts = [f'<text x="{_LEFT}" y="18" font-weight="bold">{title}</text>']
    every = [point for line in panel.lines for point in line.points]
    if not every:
        return parts[0] + f'<text x="{_LEFT}" y="60" fill="#777">nothing measured</text>'
    most_x = max(x for x, _ in every) or 1.0
    most_y = max(y for _, y in every) or 1.0
    inner_width = _WIDTH - _LEFT - _RIGHT
    floor = _HEIGHT - _BOTTOM
    inner_height = floor - _TOP

    def at(x: float, y: float) -> tuple[float, float]:
        return _LEFT + x / most_x * inner_width, floor - y / most_y * inner_height

    for tick in _ticks(most_x):
        x, _ = at(tick, 0)
        parts.append(_line(x, _TOP, x, floor) + _label(x, floor + 13, "middle", tick))
    for tick in _ticks(most_y):
        _, y = at(0, tick)
        parts.append(_line(_LEFT, y, _WIDTH - _RIGHT, y) + _label(_LEFT - 5, y + 4, "end", tick))
    for mark in panel.marks:
        x, _ = at(mark, 0)
        parts.append(f'<path d="M{x:.1f} {floor}v-6" stroke="#b00"/>')
    names = list(dict.fromkeys(line.name for line in panel.lines))
    for line in panel.lines:
        corners = [at(x, y) for x, y in line.points]
        if not corners:
            continue
        path = f"M{corners[0][0]:.1f} {corners[0][1]:.1f}"
        for x, y in corners[1:]:
            path += f"H{x:.1f}V{y:.1f}" if panel.steps else f"L{x:.1f} {y:.1f}"
        colour = _COLOURS[names.index(line.name) % len(_COLOURS)]
        parts.append(f'<path d="{path}" fill="none" stroke="{colour}" stroke-width="1.6"/>')
    legend = "".join(
        f'<tspan dx="8" fill="{_COLOURS[index % len(_COLOURS)]}">{html.escape(name)}</tspan>'
        for index, name in enumerate(names)
    )
    parts.append(f'<text x="{_LEFT - 8}" y="28" font-size="9.5">{legend}</text>')
    middle = _LEFT + inner_width / 2
    parts.append(f'<text x="{middle}" y="{_HEIGHT - 8}" text-anchor="middle">{panel.x_unit}</text>')
    parts.append(
        f'<text transform="translate(12,{_TOP + inner_height / 2}) rotate(-90)" '
        f'text-anchor="middle">{panel.y_unit}</text>'
    )
    return "".join(parts)


def _line(x1: float, y1: float, x2: float, y2: float) -> str:
    return f'<path d="M{x1:.1f} {y1:.1f}L{x2:.1f} {y2:.1f}" stroke="#ddd"/>'


def _label(x: float, y: float, anchor: str, value: float) -> str:
    text = f"{value:.4g}"
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="#444">{text}</text>'
