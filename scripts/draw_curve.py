#!/usr/bin/env python3
"""Draw the curve that summarise_load.py --json prints: one SVG picture, one HTML page.

Throughput against requests in flight, with the decode-bound curve of the fit, its ceiling, the knee and the operating
point; TTFT and TPOT, p50 and p90, with their SLO. The output of --compare --json puts two labels into the same frames.
The page says the answer first, then shows the picture, tables and settings; it needs no network and no script. Its
sentences are those of summarise_load.py, which must stand in the folder above this one.

Examples:
  python3 summarise_load.py --label llama-baseline --json | python3 scripts/draw_curve.py --svg curve.svg
  python3 summarise_load.py --compare llama-baseline vllm-baseline --json | python3 scripts/draw_curve.py --html p.html

Exit codes: 0; 2 where the input is not such JSON, or a file cannot be written; 130 after Ctrl-C.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import unicodedata
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any, Callable, NamedTuple, NoReturn

sys.path.insert(0, os.path.join(os.path.dirname(os.path.realpath(__file__)), os.pardir))
try:
    import summarise_load as analyser
except ImportError:
    sys.exit("draw_curve.py: summarise_load.py is missing from the folder above this script")

WIDE, NARROW = 880, 360  # pixels: a page or a slide; a phone, where the wide picture's text would shrink to 5 pixels
LEFT, RIGHT = 64, 16  # room for tick labels, and beside the last point
THROUGHPUT_HEIGHT, LATENCY_HEIGHT = 250, 170
ROW = 20  # pixels: one line of text
CHARACTER = 8.2  # pixels: no usual 12 pixel font takes more on average
HEADROOM = 1.06  # of the highest drawn value, so that its mark stays inside
MODEL_ROOM = 1.5  # a fitted curve up to so many times the measured height stays whole in its frame
WORST_FIT = 0.25  # of a level's TPOT: a fit that misses one by more draws a curve of some other server
STEADY_DIFFERS = 1.03  # below that the steady state's line would lie on the measured one
# Two hues of the Okabe-Ito palette, told apart by the usual kinds of colour blindness; shape and dash differ as well.
SERIES = ("first", "second")


class UsageError(Exception):
    """Bad input: the message says what and what to do. Exit 2."""


# ---------------------------------------------------------------- figures out of the document


def number(value: Any) -> float | None:
    """A finite number, or None for anything else."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        return None
    return float(value)


def dig(holder: Any, path: str) -> Any:
    """What stands at a dotted path ("ttft_s.p90") of nested objects, or None."""
    for key in path.split("."):
        holder = holder.get(key) if isinstance(holder, dict) else None
    return holder


class Point(NamedTuple):
    """A figure at one concurrency; `low` and `high` are its range over repeats, where there are any."""

    c: float
    value: float
    low: float | None = None
    high: float | None = None


def points_of(curve: dict[str, Any], path: str, factor: float = 1.0) -> list[Point]:
    """A curve's figure, times a factor, at every level that has it, in order of c."""
    points = []
    for level in curve["levels"]:
        low, high = (level.get("ranges") or {}).get(path) or (None, None)
        figures = [None if (n := number(v)) is None else n * factor for v in (dig(level, path), low, high)]
        if figures[0] is not None:
            points.append(Point(float(level["c"]), figures[0], *figures[1:]))
    return points


def curves_of(document: Any) -> list[dict[str, Any]]:
    """The one or two curves of the document. Raises UsageError for anything else."""
    kind = dig(document, "kind")
    curves = [document] if kind == "curve" else [document.get("a"), document.get("b")] if kind == "compare" else []
    if not curves:
        raise UsageError("expected the JSON of summarise_load.py --label L --json or --compare A B --json")
    for curve in curves:
        levels = dig(curve, "levels")
        if not isinstance(levels, list) or not levels or not all(number(dig(level, "c")) for level in levels):
            raise UsageError("the JSON holds a curve without levels; is the label right?")
    return curves


def slots_of(curve: dict[str, Any]) -> float | None:
    return number(dig(curve, "settings.server_slots"))


def decode_bound(curve: dict[str, Any]) -> Callable[[float], float] | None:
    """c -> tokens per second if every request were always decoding: n / (a + b n) with n = min(c, slots), by the fit
    of TPOT; None without a fit that meets its levels."""
    a_ms, b_ms, missed = (number(dig(curve, f"fit.{key}")) for key in ("a_ms", "b_ms", "largest_residual"))
    if a_ms is None or b_ms is None or (missed or 0.0) > WORST_FIT:
        return None
    slots = slots_of(curve) or math.inf

    def predict(c: float) -> float:
        n = min(c, slots)
        step_ms = a_ms + b_ms * n
        return 1000 * n / step_ms if step_ms > 0 else math.nan

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


def text_width(words: str) -> float:
    """At least the pixels that the words take; those of Chinese, Japanese, Korean and emoji are twice as wide."""
    return CHARACTER * sum(2 if unicodedata.east_asian_width(letter) in "WF" else 1 for letter in words)


def fitting(words: str, room: float) -> str:
    """The words, or as many of their first letters as the room in pixels takes."""
    if text_width(words) <= room:
        return words
    return next(cut for end in range(len(words), -1, -1) if text_width(cut := words[:end] + "\u2026") <= room)


def clean(words: Any) -> str:
    """Text for XML: markup escaped, and no character that XML forbids."""
    return escape("".join(letter if letter.isprintable() else " " for letter in str(words)))


@dataclass(frozen=True)
class Frame:
    """A panel's plot area in pixels and the values at its edges (both axes start at 0)."""

    top: float
    height: float
    width: float  # of the whole picture
    c_max: float
    y_max: float

    def x(self, c: float) -> float:
        return LEFT + c / self.c_max * (self.right - LEFT)

    def y(self, value: float) -> float:
        return self.bottom - value / self.y_max * self.height

    @property
    def bottom(self) -> float:
        return self.top + self.height

    @property
    def right(self) -> float:
        return self.width - RIGHT


def text(x: float, y: float, words: str, css: str, anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" class="{css}" text-anchor="{anchor}">{clean(words)}</text>'


def line(x1: float, y1: float, x2: float, y2: float, css: str) -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" class="{css}"/>'


def path_of(pairs: Iterable[tuple[float, float]], css: str) -> str:
    moves = " ".join(f"{'M' if index == 0 else 'L'}{x:.1f} {y:.1f}" for index, (x, y) in enumerate(pairs))
    return f'<path d="{moves}" class="{css}"/>' if moves else ""


def box(x: float, y: float, width: float, height: float, css: str) -> str:
    return f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" class="{css}"/>'


def ring(x: float, y: float, css: str) -> str:
    return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="8" class="ring {css}"/>'


def mark(x: float, y: float, css: str) -> str:
    """A circle for the first label, a square for the second."""
    if SERIES[0] in css:
        return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" class="mark {css}"/>'
    return box(x - 4, y - 4, 8, 8, f"mark {css}")


class Key(NamedTuple):
    """One entry of a legend. All words of a picture stand in legends and beside the axes: none can lie on a line."""

    shape: str  # marks, line, band or ring
    css: str
    words: str
    new_row: bool = False


def legend(keys: Sequence[Key], top: float, width: float) -> tuple[list[str], float]:
    """The entries in as many rows as they need, and where they end."""
    parts: list[str] = []
    x, y = 0.0, top - ROW
    for key in keys:
        words = fitting(key.words, width - 46)
        room = 42 + text_width(words)
        if key.new_row or not parts or x + room > width:
            x, y = 8.0, y + ROW
        middle = y + ROW / 2
        if key.shape == "band":
            parts.append(box(x, middle - 6, 24, 12, f"band {key.css}"))
        elif key.shape == "ring":
            parts.append(ring(x + 12, middle, key.css))
        else:
            parts.append(line(x, middle, x + 24, middle, f"line {key.css}"))
        if key.shape == "marks":
            parts.append(mark(x + 12, middle, key.css))
        parts.append(text(x + 30, middle + 4, words, "soft"))
        x += room
    return parts, y + ROW


# ---------------------------------------------------------------- panels


def axes(frame: Frame, levels: Sequence[float]) -> list[str]:
    """Grid, ticks and their labels; where two levels are too near for both labels, the higher one's stands."""
    parts = []
    for value in ticks(frame.y_max / HEADROOM):
        if value <= frame.y_max:
            parts.append(line(LEFT, frame.y(value), frame.right, frame.y(value), "grid"))
            parts.append(text(LEFT - 8, frame.y(value) + 4, shown(value), "soft", "end"))
    free = math.inf
    for c in reversed(levels):
        half = text_width(shown(c)) / 2
        parts.append(line(frame.x(c), frame.bottom, frame.x(c), frame.bottom + 5, "axis"))
        if frame.x(c) + half < free:
            parts.append(text(frame.x(c), frame.bottom + 20, shown(c), "soft", "middle"))
            free = frame.x(c) - half - 4
    parts.append(line(LEFT, frame.bottom, frame.right, frame.bottom, "axis"))
    parts.append(text(frame.right, frame.bottom + 20 + ROW, "requests in flight, c", "soft", "end"))
    return parts


def series(frame: Frame, points: Sequence[Point], css: str) -> list[str]:
    """A line with its marks and, over repeats, their ranges."""
    parts = [path_of(((frame.x(p.c), frame.y(p.value)) for p in points), f"line {css}")]
    for p in points:
        if p.low is not None and p.high is not None and p.high > p.low:
            parts.append(line(frame.x(p.c), frame.y(p.low), frame.x(p.c), frame.y(p.high), f"range {css}"))
        parts.append(mark(frame.x(p.c), frame.y(p.value), css))
    return parts


class Layer(NamedTuple):
    """What a panel shows of one thing: its legend entry and, in a frame, its drawing (none: only said)."""

    key: Key
    draw: Callable[[Frame], list[str]]


def panel(title: str, layers: Sequence[Layer], frame: Frame, levels: Sequence[float]) -> tuple[list[str], float]:
    """Title, legend, frame and what is drawn in it, from `frame.top` on; and where all that ends."""
    heading = text(8, frame.top + 14, title, "title")
    keys, end = legend([layer.key for layer in layers], frame.top + ROW + 4, frame.width)
    frame = Frame(end + 12, frame.height, frame.width, frame.c_max, frame.y_max)
    drawn = [part for layer in layers for part in layer.draw(frame)]
    return [heading, *keys, *axes(frame, levels), *drawn], frame.bottom + 20 + 2 * ROW


def level_line(value: float, css: str) -> Callable[[Frame], list[str]]:
    return lambda frame: [line(LEFT, frame.y(value), frame.right, frame.y(value), css)]


def measured_layer(points: Sequence[Point], css: str, words: str, new_row: bool = False) -> Layer:
    return Layer(Key("marks", css, words, new_row), lambda frame: series(frame, points, css))


def steady_points(curve: dict[str, Any]) -> list[Point]:
    """The steady state's throughput, where it was recorded and some level's differs from the wall figure."""
    steady = points_of(curve, "steady_output_tokens_per_s")
    wall = {point.c: point.value for point in points_of(curve, "output_tokens_per_s")}
    apart = (max(p.value, wall[p.c]) > STEADY_DIFFERS * min(p.value, wall[p.c]) for p in steady if p.c in wall)
    return steady if any(apart) else []


def knee_layer(curve: dict[str, Any], css: str) -> Layer | None:
    between = dig(curve, "knee.between")
    if not between:
        return None
    low, high = between

    def draw(frame: Frame) -> list[str]:
        return [box(frame.x(low), frame.top, frame.x(high) - frame.x(low), frame.height, f"band {css}")]

    return Layer(Key("band", css, f"knee between c={low} and c={high}"), draw)


def operating_point_layer(curve: dict[str, Any], css: str) -> Layer | None:
    chosen = number(curve.get("operating_point"))
    at = next((point for point in points_of(curve, "output_tokens_per_s") if point.c == chosen), None)
    if at is None:
        return None
    words = f"operating point c={shown(at.c)}"
    return Layer(Key("ring", css, words), lambda frame: [ring(frame.x(at.c), frame.y(at.value), css)])


def decode_bound_layer(curve: dict[str, Any], css: str, highest_c: float) -> Layer | None:
    predict = decode_bound(curve)
    if predict is None:
        return None
    lowest = min(dig(curve, "fit.levels") or [level["c"] for level in curve["levels"]])  # below it the fit says nothing
    grid = [lowest + (highest_c - lowest) * step / 120 for step in range(121)]

    def draw(frame: Frame) -> list[str]:
        inside = [(frame.x(c), frame.y(predict(c))) for c in grid if 0 <= predict(c) <= frame.y_max]
        return [path_of(inside, f"line {css} model")]

    slots = slots_of(curve)
    words = "c/(a+bc)" if slots is None else f"n/(a+bn), n=min(c,{shown(slots)})"
    return Layer(Key("line", f"{css} model", f"decode-bound {words}"), draw)


def throughput_panel(
    curves: Sequence[dict[str, Any]], top: float, width: float, levels: Sequence[float]
) -> tuple[list[str], float]:
    """Measured throughput and its steady state, decode-bound curve, ceiling, knee and operating point."""
    highest = max((p.high or p.value for curve in curves for p in points_of(curve, "output_tokens_per_s")), default=0.0)
    highest = max([highest, *(p.value for curve in curves for p in steady_points(curve))]) or 1.0
    ends = [predict(levels[-1]) for predict in map(decode_bound, curves) if predict is not None]
    y_max = HEADROOM * max([highest, *(end for end in ends if end <= MODEL_ROOM * highest)])
    layers: list[Layer | None] = []
    for curve, css in zip(curves, SERIES):
        layers.append(measured_layer(points_of(curve, "output_tokens_per_s"), css, str(curve["label"]), True))
        if steady_points(curve):
            layers.append(measured_layer(steady_points(curve), f"{css} hollow", "steady state"))
        layers.append(decode_bound_layer(curve, css, levels[-1]))
        ceiling = number(dig(curve, "fit.ceiling_tokens_per_s"))
        if ceiling is not None:
            above = ceiling > y_max
            key = Key("line", f"limit {css}", f"ceiling 1/b = {ceiling:.1f} tok/s{' (above)' * above}")
            layers.append(Layer(key, (lambda _: []) if above else level_line(ceiling, f"line limit {css}")))
        layers += [knee_layer(curve, css), operating_point_layer(curve, css)]
    frame = Frame(top, THROUGHPUT_HEIGHT, width, levels[-1] * 1.04, y_max)
    return panel("Output throughput, tok/s", [layer for layer in layers if layer], frame, levels)


def latency_panel(
    curves: Sequence[dict[str, Any]], top: float, width: float, levels: Sequence[float], title: str, key: str
) -> tuple[list[str], float]:
    """p50 and p90 of one latency in milliseconds, with the SLO."""
    layers, highest = [], 0.0
    for curve, css in zip(curves, SERIES):
        for q, hollow in (("p50", ""), ("p90", " hollow")):
            points = points_of(curve, f"{key}.{q}", 1000)
            highest = max([highest, *(p.high or p.value for p in points)])
            words = f"{curve['label']} {q}" if len(curves) > 1 else q
            layers.append(measured_layer(points, css + hollow, words, q == "p50"))
    limits = sorted({limit * 1000 for curve in curves if (limit := number(dig(curve, f"slo.{key}"))) is not None})
    drawn = [limit for limit in limits if limit <= 2.5 * highest]
    for limit in limits:
        words = f"SLO {shown(limit)} ms{'' if limit in drawn else ' (above)'}"
        draw = level_line(limit, "line limit slo") if limit in drawn else lambda _: []
        layers.append(Layer(Key("line", "limit slo", words), draw))
    frame = Frame(top, LATENCY_HEIGHT, width, levels[-1] * 1.04, HEADROOM * (max([highest, *drawn]) or 1.0))
    return panel(f"{title}, ms", layers, frame, levels)


# ---------------------------------------------------------------- the picture

STYLE = """
.curve { font: 12px system-ui, -apple-system, "Segoe UI", sans-serif; color: #1f2328; }
.curve text { fill: currentColor; }
.curve .title { font-size: 14px; font-weight: 600; }
.curve .soft, .curve .axis, .curve .slo { color: #57606a; }
.curve .first { color: #0072b2; }
.curve .second { color: #d55e00; }
.curve .grid { stroke: #d8dee4; }
.curve .axis { stroke: currentColor; }
.curve .line, .curve .range, .curve .ring { fill: none; stroke: currentColor; stroke-width: 2; }
.curve .line.hollow { stroke-dasharray: 6 4; }
.curve .line.model { stroke-dasharray: 2 4; stroke-width: 1.5; }
.curve .line.limit { stroke-dasharray: 10 4 2 4; stroke-width: 1; }
.curve .band { fill: currentColor; opacity: 0.15; }
.curve .mark { fill: currentColor; stroke: currentColor; stroke-width: 1.5; }
.curve .mark.hollow, .curve .paper { fill: #ffffff; }
@media screen and (prefers-color-scheme: dark) {
  .curve { color: #e6edf3; }
  .curve .soft, .curve .axis, .curve .slo { color: #9da7b1; }
  .curve .first { color: #56b4e9; }
  .curve .second { color: #e69f00; }
  .curve .grid { stroke: #30363d; }
  .curve .mark.hollow, .curve .paper { fill: #0d1117; }
}
"""


def description(curves: Sequence[dict[str, Any]]) -> str:
    """The picture in words: what a reader who cannot see it needs."""
    sentences = []
    for curve in curves:
        rates = ", ".join(f"{p.value:.1f} tok/s at c={shown(p.c)}" for p in points_of(curve, "output_tokens_per_s"))
        knee, *_, point = analyser.derived_lines(curve)
        sentences.append(f"{curve['label']}: {rates or 'no throughput'}; {knee}; {point}.")
    return " ".join(sentences)


def names(curves: Sequence[dict[str, Any]]) -> str:
    return clean(" and ".join(str(curve["label"]) for curve in curves))


def svg(curves: Sequence[dict[str, Any]], width: int = WIDE, css: str = "") -> str:
    """The picture: three panels under each other. With a class (`css`) for a page, which brings the style."""
    levels = sorted({float(level["c"]) for curve in curves for level in curve["levels"]})
    parts, end = throughput_panel(curves, 8, width, levels)
    for title, key in (("Time to first token (TTFT)", "ttft_s"), ("Time per output token (TPOT)", "tpot_s")):
        more, end = latency_panel(curves, end + ROW, width, levels, title, key)
        parts += more
    style = "" if css else f"<style>{STYLE}</style>\n"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="{f"curve {css}".strip()}" viewBox="0 0 {width} {end:.0f}"'
        f' width="{width}" height="{end:.0f}" role="img" aria-labelledby="title{width} text{width}">\n'
        f'<title id="title{width}">Load curve of {names(curves)}</title>\n'
        f'<desc id="text{width}">{clean(description(curves))}</desc>\n{style}{box(0, 0, width, end, "paper")}\n'
        + "\n".join(part for part in parts if part)
        + "\n</svg>\n"
    )


# ---------------------------------------------------------------- the page

PAGE_STYLE = """
:root { color-scheme: light dark; --ink: #1f2328; --soft: #57606a; --rule: #d8dee4; --paper: #ffffff; }
@media screen and (prefers-color-scheme: dark) {
  :root { --ink: #e6edf3; --soft: #9da7b1; --rule: #30363d; --paper: #0d1117; }
}
body { margin: 2rem auto; max-width: 56rem; padding: 0 1rem; color: var(--ink); background: var(--paper);
  font: 1rem/1.5 system-ui, -apple-system, "Segoe UI", sans-serif; overflow-wrap: anywhere; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.15rem; margin-top: 2rem; }
.answer { font-size: 1.15rem; }
figure { margin: 1.5rem 0; } svg { display: block; width: 100%; height: auto; } svg.narrow { display: none; }
@media (max-width: 40rem) { svg.wide { display: none; } svg.narrow { display: block; } }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: 0.9rem; overflow-wrap: normal; }
th, td { padding: 0.25rem 0.6rem; border-bottom: 1px solid var(--rule); text-align: right; }
th:first-child, td:first-child, .words th, .words td { text-align: left; vertical-align: top; }
.figures th, .figures td { padding: 0.25rem 0.4rem; }
figcaption, .soft { color: var(--soft); font-size: 0.9rem; }
@media print { body { margin: 0; max-width: none; } section, figure { break-inside: avoid; } }
"""

Column = tuple[str, str, int]  # heading, dotted path in a level, decimals
COLUMNS: list[Column] = [
    (column.heading, column.path, column.decimals) for column in analyser.COLUMNS if "table" in column.flags
]
COLUMNS.insert(1, ("steady state", "steady_output_tokens_per_s", 1))
GPU_COLUMNS: list[Column] = [
    ("power W, mean", "gpu.power_w_mean", 0),
    ("temperature \u00b0C, max", "gpu.temperature_c_max", 0),
    ("SM clock MHz, min", "gpu.sm_clock_mhz_min", 0),
    ("memory MiB, max", "gpu.memory_used_mib_max", 0),
    ("tokens per joule", "gpu.tokens_per_joule", 3),
]
RATE_COLUMNS: list[Column] = [
    (heading, f"output_tokens_per_s.{key}", decimals)
    for heading, key, decimals in (
        ("A tok/s", "a", 1),
        ("B tok/s", "b", 1),
        ("B/A", "ratio", 2),
        ("95 % from", "low", 2),
        ("to", "high", 2),
    )
]

METHOD = (
    "Each level keeps c requests in flight until its queue is empty (closed loop): a slow server is offered less "
    "load, so c is not a number of people. Throughput is the output tokens of successful requests over the wall time "
    "of the level, goodput the successful requests inside the SLO over the same time; steady state leaves out the "
    "level's ramp and drain. TTFT runs from the request written to an open connection to the first text; TPOT is "
    "(last token - first token) / (output tokens - 1). Percentiles are nearest rank. Scaling is throughput(c) / "
    "(c x throughput of the lowest level / that level). The fit is TPOT p50 = a + b c by least squares over the levels "
    "at or below the server's slots; its ceiling is 1 / b. The knee is the first step where each added request gains "
    "less than half of one request's throughput at the lowest level. The operating point is the highest level without "
    "failures whose p90s are inside the SLO."
)
DECODE_BOUND = (
    "Dotted: the decode-bound throughput n/(a + b n) of the TPOT fit, n = min(c, slots), if every request were always "
    "decoding; prefill and waiting lower the measured one."
)


def table(head: Sequence[str], rows: Sequence[Sequence[str]], css: str = "figures") -> str:
    """A table of cells that are markup already; it scrolls inside a narrow page."""
    headings = "".join(f'<th scope="col">{name}</th>' for name in head)
    body = [f'<tr><th scope="row">{row[0]}</th>{"".join(f"<td>{cell}</td>" for cell in row[1:])}</tr>' for row in rows]
    return (
        f'<div class="scroll"><table class="{css}"><thead><tr>{headings}</tr></thead>\n<tbody>'
        + "\n".join(body)
        + "</tbody></table></div>"
    )


def section(title: str, *content: str) -> str:
    return f"<section><h2>{title}</h2>{''.join(content)}</section>" if any(content) else ""


def items(lines: Iterable[str]) -> str:
    entries = [f"<li>{line}</li>" for line in lines]
    return "<ul>\n" + "\n".join(entries) + "\n</ul>" if entries else ""


def figures_table(levels: Sequence[dict[str, Any]], columns: Sequence[Column], counts: bool = False) -> str:
    """A row a level, with the columns that any level has a figure for; nothing where none has."""
    used = [column for column in columns if any(number(dig(level, column[1])) is not None for level in levels)]
    rows = []
    for level in levels:
        asked = (level[name] for name in ("completed", "requests") if counts)
        ok = ["/".join("?" if count is None else f"{count:g}" for count in asked)] if counts else []
        figures = [(number(dig(level, path)), decimals) for _, path, decimals in used]
        cells = ("-" if value is None else f"{value:.{decimals}f}" for value, decimals in figures)
        rows.append([clean(level["c"]), *ok, *cells])
    return table(["c", *(["ok"] if counts else []), *(heading for heading, _, _ in used)], rows) if used else ""


def curve_sections(curve: dict[str, Any]) -> list[str]:
    """Levels, what follows from them, GPU and reading of one label."""
    label = clean(curve["label"])
    notes, shapes = (items(map(clean, analyser.statement_lines(curve, status))) for status in ("NOTE", "READING"))
    units = '<p class="soft">Throughput in tokens per second, TTFT and TPOT in seconds.</p>'
    levels = figures_table(curve["levels"], COLUMNS, counts=True)
    return [
        section(f"Levels of {label}", levels, units, items(map(clean, analyser.derived_lines(curve)))),
        gpu_section(curve, label),
        section(f"Reading of {label}", shapes, f'<div class="soft">{notes}</div>' if notes else ""),
    ]


def gpu_section(curve: dict[str, Any], label: str) -> str:
    figures = figures_table(curve["levels"], GPU_COLUMNS)
    devices = sorted({clean(name) for level in curve["levels"] if (name := dig(level, "gpu.name"))})
    return section(f"GPU of {label}", f'<p class="soft">{", ".join(devices)}</p>' if devices else "", figures)


def comparison_section(document: dict[str, Any]) -> str:
    rows = [row for row in document.get("levels") or [] if dig(row, "output_tokens_per_s.ratio") is not None]
    said = items(clean(one["text"]) for one in document["statements"])
    return section("Comparison (A first, B second)", figures_table(rows, RATE_COLUMNS), said)


def settings_section(curves: Sequence[dict[str, Any]]) -> str:
    rows = []
    for name in dict.fromkeys(name for curve in curves for name in curve.get("settings") or {}):
        values = [dig(curve, f"settings.{name}") for curve in curves]
        if any(value is not None for value in values):
            rows.append([clean(name.replace("_", " ")), *("unknown" if v is None else clean(v) for v in values)])
    return section("Settings", table(["setting", *(clean(curve["label"]) for curve in curves)], rows, "words"))


def check_section(check: Any) -> str:
    if not isinstance(check, dict):
        return ""
    rows = [[clean(one["status"]), clean(one["code"]), clean(one["text"])] for one in check["statements"]]
    counts = f"<p>{check.get('pass')} pass, {check.get('warn')} warn, {check.get('fail')} fail</p>"
    return section("Check of the notebook", counts, table(["verdict", "rule", "finding"], rows, "words"))


def page(document: dict[str, Any]) -> str:
    """The whole page, well-formed as XML too, without anything fetched from elsewhere."""
    curves = curves_of(document)
    answers = [str(words) for curve in curves if (words := dig(curve, "answer.text"))]
    if len(curves) > 1:
        answers = [f"{curve['label']}: {words}" for curve, words in zip(curves, answers)]
    parts = [f"<h1>Load curve of {names(curves)}</h1>", *(f'<p class="answer">{clean(words)}</p>' for words in answers)]
    fitted = any(decode_bound(curve) for curve in curves)
    caption = f"<figcaption>{clean(DECODE_BOUND)}</figcaption>" if fitted else ""
    parts.append(f"<figure>{svg(curves, WIDE, 'wide')}{svg(curves, NARROW, 'narrow')}{caption}</figure>")
    if len(curves) > 1:
        parts.append(comparison_section(document))
    for curve in curves:
        parts += curve_sections(curve)
    parts += [settings_section(curves), check_section(curves[0].get("check"))]
    parts.append(section("Method", f'<p class="soft">{clean(METHOD)}</p>'))
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8"/>\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1"/>\n'
        f"<title>Load curve of {names(curves)}</title>\n<style>{PAGE_STYLE}{STYLE}</style>\n</head>\n<body>\n<main>\n"
        + "\n".join(part for part in parts if part)
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


def write(path: str, content: str) -> None:
    """Write a file. Raises UsageError, also for a pipe that nobody reads, which would be waited for."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
    try:
        handle = os.open(path, flags, 0o666)
        with open(handle, "wb") as file:
            if hasattr(os, "O_NONBLOCK"):
                os.set_blocking(handle, True)
            file.write(content.encode("utf-8", "replace"))
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UsageError(f"{path}: cannot be written ({reason}); name another file") from None


class OneLineParser(argparse.ArgumentParser):
    """argparse whose errors are raised, for one line."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message} (draw_curve.py --help shows the options)")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program; returns the exit code."""
    about, _, rest = (__doc__ or "").partition("Examples:")
    raw = argparse.RawDescriptionHelpFormatter
    parser = OneLineParser(
        prog="draw_curve.py", description=about, epilog="Examples:" + rest, formatter_class=raw, allow_abbrev=False
    )
    parser.add_argument("file", nargs="?", metavar="JSON", help="file to read (default: standard input)")
    parser.add_argument("--svg", metavar="FILE", help="write the picture there")
    parser.add_argument("--html", metavar="FILE", help="write the page there")
    parser.add_argument("--version", action="version", version=f"%(prog)s {analyser.TOOL_VERSION}")
    try:
        args = parser.parse_args(argv)
        if args.svg is None and args.html is None:
            raise UsageError("name a file to write: --svg FILE, --html FILE or both")
        document = read_document(args.file)
        curves = curves_of(document)
        try:
            picture = svg(curves)
            html = page(document) if args.html is not None else ""
        except (KeyError, TypeError, ValueError) as error:
            written = f"by {document.get('tool_version')}, this is {analyser.TOOL_VERSION}"
            raise UsageError(f"the JSON lacks something that summarise_load.py writes ({error!r}; {written})") from None
        if args.svg is not None:
            write(args.svg, picture)
        if args.html is not None:
            write(args.html, html)
    except UsageError as error:
        print(f"draw_curve.py: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
