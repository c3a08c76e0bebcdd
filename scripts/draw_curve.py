#!/usr/bin/env python3
"""Draw the curve that summarise_load.py --json prints: one SVG picture, one HTML page.

Throughput against concurrency with the fitted c / (a + b c), its ceiling 1 / b, the knee
and the operating point; TTFT and TPOT p50 and p90 with their objectives. The output of
--compare --json puts two labels into the same frames. The page needs no network and no
script: settings, table, picture, reading, check and method in one file.

Examples:
  python3 summarise_load.py --label llama-baseline --json | python3 scripts/draw_curve.py --svg curve.svg
  python3 summarise_load.py --compare llama-baseline vllm-baseline --json | python3 scripts/draw_curve.py --html p.html

Exit codes: 0; 2 where the input is not such JSON, or a file cannot be written; 130 after Ctrl-C.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import json
import math
import os
import stat
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any, Callable, NamedTuple, NoReturn

TOOL_VERSION = "2.0.0"  # the same in all programs

WIDTH = 800  # of the picture in pixels: what fits a page and a slide without scaling
LEFT, RIGHT = 72, 24
PANEL_GAP = 64
THROUGHPUT_HEIGHT, LATENCY_HEIGHT = 250, 170
LEGEND_LINE = 18
HEADROOM = 1.12  # of the largest drawn value, so that labels above it stay inside
MODEL_ROOM = 1.5  # a fitted curve up to so many times the measured height stays whole in its frame
# Two hues of the Okabe-Ito palette, told apart by the usual kinds of colour blindness; shape and dash differ as well.
SERIES_CLASSES = ("first", "second")


class UsageError(Exception):
    """Bad input: the message says what and what to do. Exit 2."""


# ---------------------------------------------------------------- figures out of the JSON


def number(value: Any) -> float | None:
    """A finite number, or None for anything else."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        return None
    return float(value)


def dig(level: dict[str, Any], path: str) -> float | None:
    """The number at a dotted path ("ttft_s.p90") of a level."""
    value: Any = level
    for key in path.split("."):
        value = value.get(key) if isinstance(value, dict) else None
    return number(value)


class Point(NamedTuple):
    """A figure at one concurrency; `low` and `high` are its range over repeats, where there are any."""

    c: float
    value: float
    low: float | None = None
    high: float | None = None


def points_of(curve: dict[str, Any], path: str) -> list[Point]:
    """A curve's figure at every level that has it, in order of c."""
    points = []
    for level in curve["levels"]:
        value = dig(level, path)
        if value is None:
            continue
        limits = (level.get("ranges") or {}).get(path) or (None, None)
        points.append(Point(float(level["c"]), value, number(limits[0]), number(limits[1])))
    return points


def curves_of(doc: Any) -> list[dict[str, Any]]:
    """The one or two curves of the document. Raises UsageError for anything else."""
    kind = doc.get("kind") if isinstance(doc, dict) else None
    curves = {"curve": lambda: [doc], "compare": lambda: [doc["a"], doc["b"]]}.get(str(kind), lambda: [])()
    if not curves:
        raise UsageError("expected the JSON of summarise_load.py --label L --json or --compare A B --json")
    for curve in curves:
        levels = curve.get("levels") if isinstance(curve, dict) else None
        if not isinstance(levels, list) or not levels or not all(number(level.get("c")) for level in levels):
            raise UsageError("the JSON holds a curve without levels; is the label right?")
    return curves


def model_throughput(curve: dict[str, Any]) -> Callable[[float], float] | None:
    """c -> tokens per second by the fit, c / (a + b c), or None without one."""
    fit = curve.get("fit") or {}
    a_ms, b_ms = number(fit.get("a_ms")), number(fit.get("b_ms"))
    if a_ms is None or b_ms is None:
        return None

    def predict(c: float) -> float:
        step_ms = a_ms + b_ms * c
        return 1000 * c / step_ms if step_ms > 0 else math.nan

    return predict


# ---------------------------------------------------------------- scales and shapes


def ticks(highest: float, most: int = 5) -> list[float]:
    """Round values from 0 to at least `highest`, at most `most` steps.

    >>> ticks(0.37)
    [0.0, 0.1, 0.2, 0.3, 0.4]
    """
    if highest <= 0:
        return [0.0, 1.0]
    power = 10.0 ** math.floor(math.log10(highest / most))
    step = next(power * factor for factor in (1, 2, 2.5, 5, 10, 20) if power * factor * most >= highest * (1 - 1e-9))
    return [round(step * index, 12) for index in range(math.ceil(highest / step - 1e-9) + 1)]


def shown(value: float) -> str:
    """A tick label without needless zeros."""
    return f"{value:.6g}"


@dataclass(frozen=True)
class Frame:
    """A panel's plot area in pixels and the values at its edges (both axes start at 0)."""

    top: float
    height: float
    c_max: float
    y_max: float

    def x(self, c: float) -> float:
        return LEFT + c / self.c_max * (WIDTH - LEFT - RIGHT)

    def y(self, value: float) -> float:
        return self.top + self.height - value / self.y_max * self.height

    @property
    def bottom(self) -> float:
        return self.top + self.height


def text(x: float, y: float, content: str, css: str = "", anchor: str = "start") -> str:
    kind = f' class="{css}"' if css else ""
    return f'<text x="{x:.1f}" y="{y:.1f}"{kind} text-anchor="{anchor}">{escape(content)}</text>'


def line(x1: float, y1: float, x2: float, y2: float, css: str) -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" class="{css}"/>'


def path_of(pairs: Iterable[tuple[float, float]], css: str) -> str:
    moves = " ".join(f"{'M' if index == 0 else 'L'}{x:.1f} {y:.1f}" for index, (x, y) in enumerate(pairs))
    return f'<path d="{moves}" class="{css}"/>' if moves else ""


def marker(x: float, y: float, series: int, hollow: bool) -> str:
    """A circle for the first label, a square for the second; hollow for p90."""
    css = f"mark {SERIES_CLASSES[series]}{' hollow' if hollow else ''}"
    if series == 0:
        return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" class="{css}"/>'
    return f'<rect x="{x - 4:.1f}" y="{y - 4:.1f}" width="8" height="8" class="{css}"/>'


def axes(frame: Frame, title: str, levels: Sequence[float], unit: str) -> list[str]:
    """Title with its unit, grid, tick labels and axis names of a panel."""
    parts = [text(LEFT, frame.top - 26, f"{title}, {unit}", "title")]
    for value in ticks(frame.y_max / HEADROOM):
        if value <= frame.y_max:
            parts.append(line(LEFT, frame.y(value), WIDTH - RIGHT, frame.y(value), "grid"))
            parts.append(text(LEFT - 8, frame.y(value) + 4, shown(value), "tick", "end"))
    last = -math.inf
    for c in levels:
        x = frame.x(c)
        parts.append(line(x, frame.bottom, x, frame.bottom + 5, "axis"))
        if x - last >= 22:
            parts.append(text(x, frame.bottom + 18, shown(c), "tick", "middle"))
            last = x
    parts.append(line(LEFT, frame.bottom, WIDTH - RIGHT, frame.bottom, "axis"))
    parts.append(text(WIDTH - RIGHT, frame.bottom + 34, "requests in flight, c", "tick", "end"))
    return parts


def series(frame: Frame, points: Sequence[Point], number_of: int, p90: bool = False) -> list[str]:
    """A measured line with its markers and, over repeats, its ranges."""
    css = SERIES_CLASSES[number_of]
    parts = [path_of(((frame.x(p.c), frame.y(p.value)) for p in points), f"line {css}{' p90' if p90 else ''}")]
    for p in points:
        if p.low is not None and p.high is not None and p.high > p.low:
            parts.append(line(frame.x(p.c), frame.y(p.low), frame.x(p.c), frame.y(p.high), f"range {css}"))
        parts.append(marker(frame.x(p.c), frame.y(p.value), number_of, p90))
    return parts


class Key(NamedTuple):
    """One entry of a legend."""

    series: int
    label: str
    style: str  # solid, p90 or model


def legend_name(curve: dict[str, Any]) -> str:
    label = str(curve["label"])
    return label if len(label) <= 28 else label[:27] + "\u2026"


def legend(frame: Frame, keys: Sequence[Key]) -> list[str]:
    """Entries in one row above the frame, from the right edge of the title on."""
    parts: list[str] = []
    x = WIDTH - RIGHT - sum(44 + 6.4 * len(key.label) for key in keys)
    for key in keys:
        css = SERIES_CLASSES[key.series]
        dash = {"solid": "", "p90": " p90", "model": " model"}[key.style]
        y = frame.top - 12
        parts.append(line(x, y, x + 24, y, f"line {css}{dash}"))
        if key.style != "model":
            parts.append(marker(x + 12, y, key.series, key.style == "p90"))
        parts.append(text(x + 30, y + 4, key.label, "tick"))
        x += 44 + 6.4 * len(key.label)
    return parts


# ---------------------------------------------------------------- panels


def throughput_panel(curves: Sequence[dict[str, Any]], top: float, levels: Sequence[float]) -> tuple[list[str], Frame]:
    """Measured throughput, the fitted curve, its ceiling, the knee and the operating point."""
    measured = [points_of(curve, "output_tokens_per_s") for curve in curves]
    highest = max((p.high or p.value for points in measured for p in points), default=1.0)
    ends = [predict(max(levels)) for predict in map(model_throughput, curves) if predict is not None]
    highest = max([highest, *(end for end in ends if end <= MODEL_ROOM * highest)])
    frame = Frame(top, THROUGHPUT_HEIGHT, max(levels) * 1.04, highest * HEADROOM or 1.0)
    parts = axes(frame, "Output throughput", levels, "tok/s")
    keys: list[Key] = []
    for index, (curve, points) in enumerate(zip(curves, measured)):
        parts += knee_band(frame, curve, index)
        predict = model_throughput(curve)
        if predict is not None:
            begin = min(curve["fit"].get("levels") or levels)  # below the fitted levels the model says nothing
            grid = [begin + (max(levels) - begin) * step / 120 for step in range(121)]
            pairs = [(frame.x(c), frame.y(predict(c))) for c in grid if 0 <= predict(c) <= frame.y_max]
            parts.append(path_of(pairs, f"line {SERIES_CLASSES[index]} model"))
            keys.append(Key(index, "c/(a + b c)", "model"))
        parts += ceiling(frame, curve, index)
        parts += series(frame, points, index)
        parts += operating_point(frame, curve, points, index)
        keys.append(Key(index, legend_name(curve), "solid"))
    return parts + legend(frame, keys), frame


def knee_band(frame: Frame, curve: dict[str, Any], index: int) -> list[str]:
    between = (curve.get("knee") or {}).get("between")
    if not between:
        return []
    x1, x2 = frame.x(between[0]), frame.x(between[1])
    css = SERIES_CLASSES[index]
    band = f'<rect x="{x1:.1f}" y="{frame.top:.1f}" width="{x2 - x1:.1f}" height="{frame.height}" class="band {css}"/>'
    return [band, text(x1 + 4, frame.bottom - 6 - LEGEND_LINE * index, "knee", f"note {css}")]


def ceiling(frame: Frame, curve: dict[str, Any], index: int) -> list[str]:
    value = number((curve.get("fit") or {}).get("ceiling_tokens_per_s"))
    if value is None:
        return []
    css = SERIES_CLASSES[index]
    words = f"ceiling 1/b = {value:.1f} tok/s"
    if value > frame.y_max:
        return [text(LEFT + 6, frame.top + 12 + LEGEND_LINE * index, f"{words} (above this frame)", f"note {css}")]
    return [
        line(LEFT, frame.y(value), WIDTH - RIGHT, frame.y(value), f"limit {css}"),
        text(LEFT + 6, frame.y(value) - 5, words, f"note {css}"),
    ]


def operating_point(frame: Frame, curve: dict[str, Any], points: Sequence[Point], index: int) -> list[str]:
    chosen = number(curve.get("operating_point"))
    css = SERIES_CLASSES[index]
    for p in points:
        if p.c == chosen:
            x, y = frame.x(p.c), frame.y(p.value)
            near_right = x > WIDTH - RIGHT - 130
            words = text(
                x + (-12 if near_right else 12),
                y + 20,
                "operating point",
                f"note {css}",
                "end" if near_right else "start",
            )
            return [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="9" class="ring {css}"/>', words]
    return []


def latency_panel(
    curves: Sequence[dict[str, Any]], top: float, levels: Sequence[float], name: str, key: str, slo_key: str
) -> tuple[list[str], Frame]:
    """p50 and p90 of one latency in milliseconds, with the objective."""
    measured = {(i, q): points_of(curve, f"{key}.{q}") for i, curve in enumerate(curves) for q in ("p50", "p90")}
    scaled = {
        which: [Point(p.c, p.value * 1000, *(None if v is None else v * 1000 for v in (p.low, p.high))) for p in points]
        for which, points in measured.items()
    }
    highest = max((p.high or p.value for points in scaled.values() for p in points), default=0.0) or 1.0
    objectives = sorted({value for curve in curves if (value := dig(curve, f"slo.{slo_key}")) is not None})
    drawn = [value * 1000 for value in objectives if value * 1000 <= 2.5 * highest]
    frame = Frame(top, LATENCY_HEIGHT, max(levels) * 1.04, max([highest, *drawn]) * HEADROOM)
    parts = axes(frame, name, levels, "ms")
    for row, value in enumerate(objectives):
        words = f"objective {shown(value * 1000)} ms"
        if value * 1000 in drawn:
            parts.append(line(LEFT, frame.y(value * 1000), WIDTH - RIGHT, frame.y(value * 1000), "objective"))
            parts.append(text(LEFT + 6, frame.y(value * 1000) - 5, words, "note"))
        else:
            parts.append(text(LEFT + 6, frame.top + 12 + LEGEND_LINE * row, f"{words} (above this frame)", "note"))
    for (index, q), points in scaled.items():
        parts += series(frame, points, index, q == "p90")
    keys = [Key(index, f"{legend_name(curve)} p50", "solid") for index, curve in enumerate(curves)]
    keys.append(Key(0, "p90" if len(curves) == 1 else "p90: dashed, hollow", "p90"))
    return parts + legend(frame, keys), frame


# ---------------------------------------------------------------- the picture

STYLE = """
.curve { font: 12px system-ui, -apple-system, "Segoe UI", sans-serif; }
.curve text { fill: #1f2328; }
.curve .title { font-size: 14px; font-weight: 600; }
.curve .tick { fill: #57606a; }
.curve .grid { stroke: #d8dee4; }
.curve .axis { stroke: #57606a; }
.curve .line { fill: none; stroke-width: 2; }
.curve .p90 { stroke-dasharray: 6 4; }
.curve .model { stroke-dasharray: 2 4; stroke-width: 1.5; }
.curve .limit, .curve .objective { stroke-dasharray: 10 4 2 4; }
.curve .objective { stroke: #57606a; }
.curve .range { stroke-width: 1.5; }
.curve .ring { fill: none; stroke-width: 2; }
.curve .band { stroke: none; opacity: 0.13; }
.curve .line.first, .curve .limit.first, .curve .range.first, .curve .ring.first { stroke: #0072b2; }
.curve .line.second, .curve .limit.second, .curve .range.second, .curve .ring.second { stroke: #d55e00; }
.curve .mark.first, .curve .band.first { fill: #0072b2; }
.curve .mark.second, .curve .band.second { fill: #d55e00; }
.curve .note { paint-order: stroke; stroke: #ffffff; stroke-width: 3px; stroke-linejoin: round; }
.curve .note.first { fill: #005a8c; }
.curve .note.second { fill: #a34700; }
.curve .mark.hollow { fill: #ffffff; stroke-width: 1.5; }
.curve .mark.hollow.first { stroke: #0072b2; }
.curve .mark.hollow.second { stroke: #d55e00; }
.curve .paper { fill: #ffffff; }
@media screen and (prefers-color-scheme: dark) {
  .curve text { fill: #e6edf3; }
  .curve .tick { fill: #9da7b1; }
  .curve .grid { stroke: #30363d; }
  .curve .axis, .curve .objective { stroke: #9da7b1; }
  .curve .line.first, .curve .limit.first, .curve .range.first, .curve .ring.first { stroke: #56b4e9; }
  .curve .line.second, .curve .limit.second, .curve .range.second, .curve .ring.second { stroke: #e69f00; }
  .curve .mark.first, .curve .band.first, .curve .note.first { fill: #56b4e9; }
  .curve .mark.second, .curve .band.second, .curve .note.second { fill: #e69f00; }
  .curve .mark.hollow { fill: #0d1117; }
  .curve .note { stroke: #0d1117; }
  .curve .mark.hollow.first { stroke: #56b4e9; }
  .curve .mark.hollow.second { stroke: #e69f00; }
  .curve .paper { fill: #0d1117; }
}
"""


def description(curves: Sequence[dict[str, Any]]) -> str:
    """The picture in words: what a reader who cannot see it needs."""
    sentences = []
    for curve in curves:
        rates = ", ".join(f"{p.value:.1f} tok/s at c={shown(p.c)}" for p in points_of(curve, "output_tokens_per_s"))
        between = (curve.get("knee") or {}).get("between")
        knee = f"knee between c={between[0]} and c={between[1]}" if between else "no knee reached"
        chosen = curve.get("operating_point")
        point = f"operating point c={chosen}" if chosen is not None else "no operating point"
        sentences.append(f"{curve['label']}: {rates or 'no throughput'}; {knee}; {point}.")
    return " ".join(sentences)


def svg(curves: Sequence[dict[str, Any]], standalone: bool = True) -> str:
    """The picture: three panels under each other, WIDTH pixels wide."""
    levels = sorted({float(level["c"]) for curve in curves for level in curve["levels"]})
    top = 54.0
    parts, frame = throughput_panel(curves, top, levels)
    more, frame = latency_panel(
        curves, frame.bottom + PANEL_GAP + 22, levels, "Time to first token", "ttft_s", "ttft_s"
    )
    parts += more
    more, frame = latency_panel(
        curves, frame.bottom + PANEL_GAP + 22, levels, "Time per output token", "tpot_s", "tpot_s"
    )
    parts += more
    height = frame.bottom + 48
    name = " and ".join(str(curve["label"]) for curve in curves)
    space = ' xmlns="http://www.w3.org/2000/svg"' if standalone else ""
    style = f"<style>{STYLE}</style>" if standalone else ""
    return (
        f'<svg{space} class="curve" viewBox="0 0 {WIDTH} {height:.0f}" width="{WIDTH}" height="{height:.0f}" role="img"'
        f' aria-labelledby="curve-title curve-text">\n<title id="curve-title">Load curve of {escape(name)}</title>\n'
        f'<desc id="curve-text">{escape(description(curves))}</desc>\n{style}\n'
        f'<rect class="paper" width="{WIDTH}" height="{height:.0f}"/>\n'
        + "\n".join(p for p in parts if p)
        + "\n</svg>\n"
    )


# ---------------------------------------------------------------- the page

PAGE_STYLE = """
:root { color-scheme: light dark; --ink: #1f2328; --soft: #57606a; --rule: #d8dee4; --paper: #ffffff; }
@media screen and (prefers-color-scheme: dark) {
  :root { --ink: #e6edf3; --soft: #9da7b1; --rule: #30363d; --paper: #0d1117; }
}
body { margin: 2rem auto; max-width: 56rem; padding: 0 1rem; color: var(--ink); background: var(--paper);
  font: 1rem/1.5 system-ui, -apple-system, "Segoe UI", sans-serif; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.15rem; margin-top: 2rem; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: 0.9rem; }
th, td { padding: 0.25rem 0.6rem; border-bottom: 1px solid var(--rule); text-align: right; }
th:first-child, td:first-child, .words th, .words td { text-align: left; }
svg { max-width: 100%; height: auto; }
.soft { color: var(--soft); }
.verdict { font-weight: 600; }
@media print { body { margin: 0; max-width: none; } section { break-inside: avoid; } h2 { break-after: avoid; } }
"""

COLUMNS: tuple[tuple[str, str, str], ...] = (
    ("out tok/s", "output_tokens_per_s", ".1f"),
    ("scaling", "scaling", ".2f"),
    ("req/s", "requests_per_s", ".3f"),
    ("goodput", "goodput_requests_per_s", ".3f"),
    ("TTFT p50 s", "ttft_s.p50", ".3f"),
    ("TTFT p90 s", "ttft_s.p90", ".3f"),
    ("TPOT p50 s", "tpot_s.p50", ".4f"),
    ("TPOT p90 s", "tpot_s.p90", ".4f"),
    ("in flight", "mean_in_flight", ".1f"),
    ("cached", "cached_tokens_mean", ".1f"),
)

METHOD = (
    "Each level keeps c requests in flight until its queue is empty (closed loop): a slow server is offered less "
    "load, so c is not a number of people. Throughput is the output tokens of successful requests over the wall time "
    "of the level, goodput the successful requests inside both limits over the same time. TTFT runs from the request "
    "written to an open connection to the first text; TPOT is (last token - first token) / (output tokens - 1). "
    "Percentiles are nearest rank. Scaling is throughput(c) / (c x throughput of the lowest level / that level). The "
    "fit is TPOT p50 = a + b c by least squares over the levels at or below the server's slots; its ceiling is 1 / b. "
    "The knee is the first step where each added request gains less than half of one request's throughput at the "
    "lowest level. The operating point is the highest level without failures whose p90s are inside the objective."
)


def table(head: str, rows: Sequence[str], css: str = "figures") -> str:
    """A table that scrolls inside a narrow page."""
    body = "\n".join(rows)
    return (
        f'<div class="scroll"><table class="{css}"><thead><tr>{head}</tr></thead>\n<tbody>{body}</tbody></table></div>'
    )


def settings_table(curves: Sequence[dict[str, Any]]) -> str:
    names = list(dict.fromkeys(name for curve in curves for name in curve.get("settings") or {}))
    head = "".join(f'<th scope="col">{escape(str(curve["label"]))}</th>' for curve in curves)
    rows = []
    for name in names:
        cells = [(curve.get("settings") or {}).get(name) for curve in curves]
        if any(cell is not None for cell in cells):
            words = "".join(f"<td>{escape('unknown' if cell is None else str(cell))}</td>" for cell in cells)
            rows.append(f'<tr><th scope="row">{escape(name.replace("_", " "))}</th>{words}</tr>')
    return table(f'<th scope="col">setting</th>{head}', rows, "words")


def level_table(curve: dict[str, Any]) -> str:
    head = "".join(f'<th scope="col">{name}</th>' for name in ("c", "ok", *(name for name, _, _ in COLUMNS)))
    rows = []
    for level in curve["levels"]:
        figures = [(dig(level, path), form) for _, path, form in COLUMNS]
        cells = [f"{level.get('completed')}/{level.get('requests')}"]
        cells += ["n/a" if value is None else format(value, form) for value, form in figures]
        rows.append(f'<tr><th scope="row">{level["c"]}</th>' + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>")
    return table(head, rows)


def derived_lines(curve: dict[str, Any]) -> list[str]:
    """Knee, fit, ceiling and operating point in the words of summarise_load.py."""
    between = (curve.get("knee") or {}).get("between")
    lines = [f"knee: between c={between[0]} and c={between[1]}" if between else "knee: not reached"]
    fit = curve.get("fit") or {}
    a_ms, b_ms, r2 = number(fit.get("a_ms")), number(fit.get("b_ms")), number(fit.get("r2"))
    if a_ms is not None and b_ms is not None:
        used = ",".join(str(c) for c in fit.get("levels") or [])
        quality = "" if r2 is None else f", R2 {r2:.3f}"
        lines.append(f"TPOT p50 ~ {a_ms:.2f} ms + {b_ms:.3f} ms x c (levels {used}{quality})")
    top = number(fit.get("ceiling_tokens_per_s"))
    lines.append("no ceiling implied" if top is None else f"ceiling {top:.1f} tok/s (1/b)")
    chosen = curve.get("operating_point")
    lines.append(f"operating point: {'none' if chosen is None else f'c={chosen}'}")
    return lines


def items(lines: Iterable[str]) -> str:
    return "<ul>\n" + "\n".join(f"<li>{line}</li>" for line in lines) + "\n</ul>"


def reading_items(curve: dict[str, Any]) -> str:
    readings = curve.get("readings") or []
    told = [f"{escape(str(r.get('evidence')))}. <em>Try:</em> {escape(str(r.get('try')))}." for r in readings]
    return items(told) if told else '<p class="soft">No shape stands out.</p>'


def check_section(curve: dict[str, Any]) -> str:
    check = curve.get("check")
    if not isinstance(check, dict):
        return ""
    rows = [
        f'<tr><td class="verdict">{escape(str(f.get("status")))}</td><td>{escape(str(f.get("rule")))}</td>'
        f"<td>{escape(str(f.get('message')))}</td></tr>"
        for f in check.get("findings") or []
    ]
    head = "".join(f'<th scope="col">{name}</th>' for name in ("verdict", "rule", "finding"))
    verdict = f"{check.get('pass')} pass, {check.get('warn')} warn, {check.get('fail')} fail"
    return f"<section><h2>Check of the notebook</h2><p>{verdict}</p>{table(head, rows, 'words')}</section>"


def page(curves: Sequence[dict[str, Any]], notes: Sequence[str]) -> str:
    """The whole page, well-formed as XML too, without anything fetched from elsewhere."""
    name = escape(" and ".join(str(curve["label"]) for curve in curves))
    sections = [f"<section><h2>Settings</h2>{settings_table(curves)}</section>"]
    sections.append(f"<section><h2>Picture</h2>{svg(curves, standalone=False)}</section>")
    for curve in curves:
        label = escape(str(curve["label"]))
        derived = items(escape(one) for one in derived_lines(curve))
        sections.append(f"<section><h2>Levels of {label}</h2>{level_table(curve)}{derived}</section>")
        sections.append(f"<section><h2>Reading of {label}</h2>{reading_items(curve)}</section>")
    if notes:
        sections.append(f"<section><h2>Comparison</h2>{items(escape(str(note)) for note in notes)}</section>")
    sections.append(check_section(curves[0]))
    sections.append(f'<section><h2>Method</h2><p class="soft">{escape(METHOD)}</p></section>')
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8"/>\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1"/>\n'
        f"<title>Load curve of {name}</title>\n<style>{PAGE_STYLE}{STYLE}</style>\n</head>\n<body>\n<main>\n"
        f"<h1>Load curve of {name}</h1>\n"
        + "\n".join(part for part in sections if part)
        + "\n</main>\n</body>\n</html>\n"
    )


# ---------------------------------------------------------------- command line


def read_document(path: str | None) -> Any:
    """The JSON document of a file or of standard input. Raises UsageError."""
    try:
        if path is None:
            data = sys.stdin.buffer.read()
        else:
            with open(path, "rb") as file:
                data = file.read()
        return json.loads(data.decode("utf-8-sig"))
    except OSError as error:
        raise UsageError(f"{path}: cannot be read ({error.strerror})") from None
    except (ValueError, RecursionError):
        raise UsageError(f"{path or 'standard input'}: is not JSON; pipe summarise_load.py --json into this") from None


STREAM_FOLDERS = ("/dev", "/dev/fd", "/proc/self/fd")  # /dev/null, /dev/stdout and the shell's >(command)


def write(path: str, content: str) -> None:
    """Write a file, whole or not at all: a full disk leaves what was there before. Raises UsageError, also for a folder
    and for a pipe, whose opening waits for a reader."""
    try:
        data = content.encode()
        if os.path.dirname(path) in STREAM_FOLDERS:
            with open(path, "wb") as file:
                file.write(data)
            return
        mode = os.stat(path).st_mode if os.path.exists(path) else None
        if (mode is not None and not stat.S_ISREG(mode)) or not os.path.basename(path):
            raise UsageError(f"{path}: cannot be written (it is a folder, a pipe or a device, not a file)")
        if mode is not None and not os.access(path, os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        replace(os.path.realpath(path), data, mode)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise UsageError(f"{path}: cannot be written ({reason})") from None


def replace(path: str, data: bytes, mode: int | None) -> None:
    """Write data beside a file, then put it in the file's place, with its mode. Raises OSError."""
    beside = os.path.join(os.path.dirname(path), f".{os.getpid()}-{time.monotonic_ns()}.tmp")
    handle = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0), 0o666)
    try:
        with open(handle, "wb") as file:
            file.write(data)
        if mode is not None:
            os.chmod(beside, stat.S_IMODE(mode))
        os.replace(beside, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(beside)
        raise


def complain(line: str) -> None:
    """Say it on standard error; where that is closed or full, the exit code alone has to."""
    if sys.stderr is None:
        return
    try:
        print(f"draw_curve.py: {line}", file=sys.stderr, flush=True)
    except (OSError, ValueError):  # what stays in its buffer must not fail again when the interpreter leaves
        with contextlib.suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())


class OneLineParser(argparse.ArgumentParser):
    """argparse whose errors are raised, for one line."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message} (draw_curve.py --help shows the options)")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program; returns the exit code."""
    about = (__doc__ or "").partition("Examples:")
    parser = OneLineParser(
        prog="draw_curve.py",
        description=about[0],
        epilog="Examples:" + about[2],
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("file", nargs="?", metavar="JSON", help="file to read (default: standard input)")
    parser.add_argument("--svg", metavar="FILE", help="write the picture there")
    parser.add_argument("--html", metavar="FILE", help="write the page there")
    parser.add_argument("--version", action="version", version=f"%(prog)s {TOOL_VERSION}")
    try:
        args = parser.parse_args(argv)
        if args.svg is None and args.html is None:
            raise UsageError("name a file to write: --svg FILE, --html FILE or both")
        doc = read_document(args.file)
        curves = curves_of(doc)
        notes = doc.get("notes") or [] if doc.get("kind") == "compare" else []
        if args.svg is not None:
            write(args.svg, svg(curves))
        if args.html is not None:
            write(args.html, page(curves, notes))
    except UsageError as error:
        complain(str(error))
        return 2
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
