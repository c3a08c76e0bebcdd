#!/usr/bin/env python3
"""Read the curve that load_test.py measured: an answer, tables, knee, fit, reading, and a check of the notebook.

A notebook is a text file (labbook.md) in which prose and JSON lines stand side by side. load_test.py appends one line
per concurrency level; this program finds them all, whatever stands around them, and says what they show. It changes
the notebook only with --record, and then by appending one line.

Examples:
  python3 summarise_load.py --list
  python3 summarise_load.py --label llama-baseline
  python3 summarise_load.py --label llama-baseline --record
  python3 summarise_load.py --label llama-baseline --runs
  python3 summarise_load.py --compare llama-baseline vllm-baseline
  python3 summarise_load.py --compare llama-baseline@20261129T100000-0123abcd llama-baseline
  python3 summarise_load.py --label llama-baseline --json | python3 scripts/draw_curve.py --svg curve.svg
  python3 summarise_load.py --check
  python3 summarise_load.py --check --label llama-baseline
  python3 summarise_load.py --check students/
  python3 summarise_load.py --check --raw requests.jsonl

Output:
  --list     "==> N label(s) in FILE", then a line per label in file order: label, engine, prompt set,
             "levels 1,5,10,20", "last DATE". The label is always the first word of its line: white space, "%" and
             unprintable characters in it are shown as %XX ("my run" as "my%20run"). --label and --compare take a
             label as it was written or as it is listed, and L@RUN for one run of it (--runs lists them).
  --label    the answer in a sentence, heading, table, bars, derived figures, notes, reading. A table row begins with
             its c. TTFT and TPOT are in seconds. Bars are in colour only on a terminal, never where NO_COLOR is set.
  --compare  the same levels of two labels side by side, and each setting that differs between them. Where both sides
             repeated a level, the 95 % interval of B/A decides whether they are different.
  --check    one line per rule, PASS, WARN or FAIL, then "N pass, N warn, N fail". With --label, the rules that speak
             of one label, and stricter: failed requests, tokens not from usage and few requests in flight are a FAIL.
             Of several notebooks or of folders: a table with a verdict per notebook first.
  --json     all of it, with every figure: for scripts/draw_curve.py and for jq. A figure that is not known is null.
  Notes about the file itself (damaged, repeated or unknown lines) go to standard error, with their line numbers.

How the figures are defined (a level's figure, and its counts, are the median of its runs):
  scaling          throughput(c) / (c x throughput at the lowest level / that level)
  knee             first step between neighbouring levels where throughput gained per added request is below half
                   of one request's throughput at the lowest level
  fit              least squares of TPOT p50 on c, a + b x c, over levels at or below the server's slots
  decode-bound     n / (a + b n), n = min(c, slots): the throughput if every request were always decoding
  ceiling          1/b: what that tends to, whatever the concurrency
  operating point  the highest level with no failure and both p90s inside the SLO recorded with that level
  different        the 95 % interval of a ratio (Welch's t on the logarithms of the runs) excludes 1
  Of a label that was run more than once, the newest run of each level counts, with its repeats.

What the check (rule "consistent") can and cannot see: a line fails only when no values that round to the printed ones
fit together. Counts, rates, percentiles, times and tokens are tied to each other that way, so most single alterations
of a measured figure show; a figure that nothing else in the line bounds (the largest TTFT raised, prompt tokens, the
client's load, a setting) shows only against the per-request lines, with --raw, or not at all.

Exit codes: 0; 1 for an unknown label, no records, a FAIL, or a line that could not be appended (it is then printed
on standard output); 2 for bad arguments or a file that cannot be read; 130 after Ctrl-C.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import io
import json
import math
import os
import re
import stat
import statistics
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta, timezone
from functools import cached_property
from typing import IO, Any, Callable, NamedTuple, NoReturn

try:
    import fcntl
except ImportError:  # Windows has no flock; a single O_APPEND write is all there is to be had
    fcntl = None  # type: ignore[assignment]

PROGRAM = "summarise_load.py"
TOOL_VERSION = "2.0.0"
LAB = "part-09/lab-serve-twenty-concurrent-users"  # the `lab` value that marks a line as this lab's
KNOWN_SCHEMAS = (1, 2)  # 1: a line without `schema`

MAX_LINE_BYTES = 1 << 20  # a level record is about 3 kB; 1 MiB leaves room and bounds what a hostile line can cost
MAX_FILE_BYTES = 1 << 30  # beyond this it is not a notebook (/dev/zero, a model file)
MAX_FIGURE = 1e15  # no count, time or rate here comes near it; below it, squares and sums stay finite
MAX_NUMBER_CHARS = 300  # still fits a float; Python itself refuses whole numbers above 4300 digits
MAX_BRACKETS = 900  # a record has about 20; a parser's own limit on nesting differs between Python versions
LOCK_WAIT_S = 10.0  # how long --record waits for another writer of the notebook

SWEEP_LEVELS = (1, 5, 10, 20)  # the lab's levels
VARIANT_LABELS = ("llama-slots8", "llama-ctx2048", "llama-kv-alt")

KNEE_SHARE = 0.5  # of one request's throughput at the lowest level, per added request
NEAR_LINEAR = 0.8  # scaling above it: added requests still cost little
FLAT_TPOT = 1.25  # TPOT p50 against the lowest level's: up to here called flat
FAST_GROWTH = 3.0  # TTFT p90 growing this many times faster than TPOT is waiting, not slower steps
LONG_WAIT_SHARE = 0.25  # TTFT p90 as a share of a median request's decoding: a wait for others to finish
TAIL_RATIO = 1.5  # TPOT p90 / p50: "far above"
FALL = 0.95  # single runs often differ by 5 %: a smaller fall is not worth a sentence
LOW_IN_FLIGHT = 0.75  # of c; at c = 20 that is 15, the lab's own line
FEW_ROUNDS = 8  # a level of fewer rounds loses a sizeable part of its time to filling and draining
CPU_HIGH = 0.8  # of one core: the client's event loop is then rarely idle
LAG_SHARE = 0.25  # client delay as a share of TPOT (or TTFT) that makes it part of the figure
LAG_MIN_S = 0.002  # an event loop's timers are a millisecond coarse: less lateness says nothing
CPU_MIN_WALL_S = 1.0  # a share of CPU over less time is start-up, not load
CONNECT_SHARE = 0.2  # connect p90 as a share of TTFT p90
NOTICED_S = 0.02  # nobody notices less of a wait, and loopback alone takes some of it
CACHE_POINTS = 0.10  # cached share differing by more than this between levels of one label
SPLIT_SHARE = 0.5  # of the mean time to first token: the part that dominates it
STEADY_SHOWN = 0.03  # steady state and wall figure this far apart are shown side by side
DRAINING = 0.05  # this far apart, filling and draining bend scaling and knee
DRIFT = 1.25  # TPOT of a level's last third against its first; medians of a dozen requests wobble by a few per cent
PAUSE_S, PAUSE_SHARE = 0.1, 0.03  # an event loop late by this much, and this part of the level, was stopped
HOT_C = 80  # GPUs begin to lower their clocks near here
COUNTER_GAP = 0.02  # the server's and the responses' cached tokens may differ by what was in flight at the ends


class UserError(Exception):
    """Bad arguments or a file that cannot be read: exit 2."""


class ResultError(Exception):
    """The notebook does not hold what was asked for: exit 1."""


# ---------------------------------------------------------------------------------------------- reading a notebook


class Field(NamedTuple):
    """One field of a level record: what it may hold, and how comparisons use it."""

    name: str
    kind: str  # count, measure, stats, tally (name -> count), text, flag, block (an object), any
    use: str = ""  # words: setting (identifies what was measured), compared (named where it differs), level (shown)


FIELDS = tuple(
    Field(*row)
    for row in (
        ("label", "text"),
        ("engine", "text", "setting compared"),
        ("engine_version", "text", "setting compared"),
        ("model", "text", "setting compared"),
        ("prompt_set", "text", "setting compared"),
        ("prompt_text", "text", "setting compared"),
        ("host", "text", "setting compared"),
        ("quant", "text", "setting compared"),
        ("context_length", "count", "setting compared"),
        ("server_slots", "count", "setting compared"),
        ("max_tokens", "count", "setting compared"),
        ("temperature", "measure", "setting compared"),
        ("slo_ttft_s", "measure", "setting compared"),
        ("slo_tpot_s", "measure", "setting compared"),
        ("extra_body", "any", "setting compared"),
        ("turns", "count", "setting compared"),
        ("duration_s", "measure", "setting compared"),
        ("base_url", "text", "setting"),
        ("arrival", "text", "setting compared"),
        ("seed", "text", "setting"),
        ("concurrency", "count"),
        ("repeat", "count"),
        ("run_id", "text"),
        ("recorded_at", "text"),
        ("interrupted", "flag"),
        ("searched", "flag"),
        ("requests", "count", "level"),
        ("completed", "count", "level"),
        ("failed", "count", "level"),
        ("output_tokens", "count", "level"),
        ("within_slo", "count", "level"),
        ("coalesced", "count", "level"),
        ("wall_s", "measure", "level"),
        ("output_tokens_per_s", "measure", "level"),
        ("requests_per_s", "measure", "level"),
        ("goodput_requests_per_s", "measure", "level"),
        ("mean_in_flight", "measure", "level"),
        ("prompt_tokens_mean", "measure", "level"),
        ("cached_tokens_mean", "measure", "level"),
        ("steady_output_tokens_per_s", "measure", "level"),
        ("steady_window_s", "measure", "level"),
        ("tokens_per_delta", "measure", "level"),
        ("prefill_tokens_per_s", "measure", "level"),
        ("ttft_s", "stats", "level"),
        ("tpot_s", "stats", "level"),
        ("e2e_s", "stats", "level"),
        ("connect_s", "stats", "level"),
        ("chunk_gap_s", "stats", "level"),
        ("output_tokens_per_request", "stats", "level"),
        ("finish_reasons", "tally", "level"),
        ("errors", "tally", "level"),
        ("models", "tally", "level"),
        ("token_counts", "any", "level"),
        ("by_turn", "any", "level"),
        ("first_error", "text", "level"),
        ("server", "block", "level"),
        ("client", "block", "level"),
        ("ttft_split_s", "block", "level"),
        ("drift", "block", "level"),
        ("gpu", "block", "level"),
    )
)
KIND = {item.name: item.kind for item in FIELDS}
SETTINGS = tuple(item.name for item in FIELDS if "setting" in item.use)
COMPARED = tuple(item.name for item in FIELDS if "compared" in item.use)
STATISTICS = ("min", "p50", "p90", "p95", "p99", "max", "mean")
STATISTIC_FIELDS = tuple(item.name for item in FIELDS if item.kind == "stats")
UNDEFINED_AS_ZERO = ("ttft_s", "tpot_s", "prompt_tokens_mean")  # version 1 printed 0.0 where nothing was measured

# How a line of load_test.py begins (keys are sorted): a torn line may hold no more than this.
BEGINNINGS = ('{"arrival": "', '{"base_url": "')
KNOWN_KEY = re.compile('"(?:' + "|".join(item.name for item in FIELDS if item.kind in ("count", "measure")) + r')"\s*:')
PREFIX = re.compile(r"[\s\ufeff]*(?:[-*+>](?=[\s{>])[\s\ufeff]*)*")  # indentation, bullets, quotes, a BOM


class Printed(float):
    """A number from a JSON line that remembers how it was printed, so that its rounding can be allowed for.

    >>> Printed("12.340").half == 0.0005, Printed("40").half, Printed("2.5e-3").half == 0.00005
    (True, 0.5, True)
    """

    text: str

    def __new__(cls, text: str) -> Printed:
        if len(text) > MAX_NUMBER_CHARS:
            raise ValueError(f"a number of {len(text)} characters")
        value = super().__new__(cls, text)
        if not math.isfinite(value):
            raise ValueError(f"{text} is not a finite number")
        value.text = text
        return value

    @property
    def decimals(self) -> int:
        """Decimals printed: 4 for 0.0115, 1 for 11.0, -2 for 1e2."""
        mantissa, _, exponent = self.text.lower().partition("e")
        return len(mantissa.partition(".")[2]) - (int(exponent) if exponent else 0)

    @property
    def half(self) -> float:
        """Half of the last printed digit's unit."""
        return 0.5 * 10.0 ** max(-400, min(300, -self.decimals))

    @property
    def digits(self) -> int:
        """Significant digits printed: 3 for 0.0115 and for 11.0.

        >>> Printed("0.0115").digits, Printed("11.0").digits, Printed("0.0").digits
        (3, 3, 0)
        """
        return len(self.text.lower().partition("e")[0].replace(".", "").lstrip("-0"))


def as_number(value: Any) -> Printed | None:
    """A JSON number with its printed form; None for everything else (true and "3" are not numbers)."""
    if isinstance(value, Printed):
        return value
    if isinstance(value, int) and not isinstance(value, bool):
        return Printed(str(value))
    return None


@dataclass(frozen=True)
class Record:
    """One level record: its line number and its fields, read by dotted path (``"ttft_s.p90"``)."""

    line: int
    data: Mapping[str, Any]

    @property
    def schema(self) -> int:
        return int(self.data.get("schema", 1))

    @property
    def label(self) -> str:
        return str(self.data.get("label") or "")

    @property
    def concurrency(self) -> int:
        return int(self.data["concurrency"])

    @property
    def interrupted(self) -> bool:
        return self.data.get("interrupted") is True

    @property
    def run(self) -> str:
        """Run identifier: the run id; in version 1, which had none, the line."""
        run_id = self.data.get("run_id")
        return str(run_id) if self.schema > 1 and run_id is not None else f"line-{self.line}"

    @property
    def repeat(self) -> int:
        return self.count("repeat") or 0

    @cached_property
    def instant(self) -> float | None:
        """`recorded_at` in seconds since 1970, or None where it cannot be told."""
        return parse_instant(self.data.get("recorded_at"))

    def raw(self, path: str) -> Any:
        """The value at a dotted path, or None."""
        value: Any = self.data
        for key in path.split("."):
            value = value.get(key) if isinstance(value, Mapping) else None
        return value

    def number(self, path: str) -> Printed | None:
        """A measured figure, or None where it is absent, null, or version 1's 0.0 for "undefined"."""
        value = as_number(self.raw(path))
        if value == 0.0 and self.schema == 1 and path.partition(".")[0] in UNDEFINED_AS_ZERO:
            return None
        return value

    def count(self, path: str) -> int | None:
        """A whole number, or None."""
        value = as_number(self.raw(path))
        return None if value is None else int(value)

    def setting(self, name: str) -> Any:
        """An identifying field in one form (20 and 20.0 slots are the same), or None where the notebook does not say
        ("unknown", an empty value, and 0 for slots or context)."""
        value = self.data.get(name)
        number = as_number(value)
        if value in (None, "", "unknown") or value == {} or (name in ("context_length", "server_slots") and not value):
            return None
        if number is not None and KIND[name] in ("count", "measure"):
            return int(number) if KIND[name] == "count" else float(number)
        return number.text if number is not None else value


class Remark(NamedTuple):
    """Something to say about a line of the file."""

    line: int
    text: str


@dataclass
class Notebook:
    """What was found in one file: level records in file order, other lines of this lab, and what is wrong."""

    path: str
    records: list[Record] = field(default_factory=list)
    summaries: list[Record] = field(default_factory=list)
    recoveries: list[Record] = field(default_factory=list)
    damaged: list[Remark] = field(default_factory=list)
    unknown: list[Remark] = field(default_factory=list)  # lines of a version that this program does not know
    remarks: list[Remark] = field(default_factory=list)

    def by_label(self) -> dict[str, list[Record]]:
        """The level records of each label; labels in file order."""
        found: dict[str, list[Record]] = {}
        for record in self.records:
            found.setdefault(record.label, []).append(record)
        return found

    @cached_property
    def curves(self) -> dict[str, Curve]:
        """Every label's curve, in file order."""
        return {label: build_curve(label, records) for label, records in self.by_label().items()}


ISO_TIME = re.compile(
    r"(\d{4})-(\d\d)-(\d\d)[T ](\d\d):(\d\d)(?::(\d\d)(?:[.,](\d{1,6})\d*)?)?(?:Z|([+-])(\d\d):?(\d\d)?)?$"
)


def parse_instant(value: Any) -> float | None:
    """Seconds since 1970 of an ISO 8601 date and time, UTC where it has no offset; None where it is none. (Python's
    own parser reads less of the standard before 3.11.)

    >>> parse_instant("1970-01-02T01:00:00+0100"), parse_instant("1970-01-02 00:00Z"), parse_instant("yesterday")
    (86400.0, 86400.0, None)
    """
    match = ISO_TIME.match(value) if isinstance(value, str) and value.isascii() else None
    if match is None:
        return None
    *parts, fraction, sign, hours, minutes = match.groups()
    offset = timedelta(hours=int(hours or 0), minutes=int(minutes or 0)) * (-1 if sign == "-" else 1)
    try:
        moment = datetime(*(int(part or 0) for part in parts), tzinfo=timezone(offset))  # type: ignore[misc, arg-type]
        return moment.timestamp() + int((fraction or "0").ljust(6, "0")) / 1e6
    except (ValueError, OverflowError):
        return None


def parse_json(text: str) -> Any:
    """Strict JSON: no NaN or Infinity, no number beyond a float, no key twice. Raises ValueError, saying which."""

    def refuse(name: str) -> Any:
        raise ValueError(f"{name} is not a number in JSON")

    def whole(digits: str) -> int:
        if len(digits) > MAX_NUMBER_CHARS:
            raise ValueError(f"a whole number of {len(digits)} digits")
        return int(digits)

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            keys = [key for key, _ in pairs]
            raise ValueError(f"duplicate key {next(key for key in keys if keys.count(key) > 1)!r}")
        return found

    if text.count("[") + text.count("{") > MAX_BRACKETS:
        raise ValueError(f"more than {MAX_BRACKETS} brackets")
    try:
        return json.loads(text, parse_constant=refuse, parse_int=whole, parse_float=Printed, object_pairs_hook=unique)
    except RecursionError:
        raise ValueError("brackets nested too deeply") from None
    except json.JSONDecodeError as error:  # its own words differ between Python versions
        if error.msg.startswith("Extra data"):
            raise ValueError("more text after the record (a record stands alone on its line)") from None
        raise ValueError("not valid JSON: torn or edited") from None


def looks_like_ours(text: str) -> bool:
    """Whether a line that is no valid record was probably meant as one: then it is damage, not prose.

    >>> looks_like_ours('{"arrival": "clo'), looks_like_ours('{ not json at all'), looks_like_ours('{"rec": below}')
    (True, False, False)
    """
    if LAB in text:
        return text.startswith("{") or '"lab"' in text
    if not text.startswith("{"):
        return False
    if any(text.startswith(start) or (len(text) > 1 and start.startswith(text)) for start in BEGINNINGS):
        return True
    return len(set(KNOWN_KEY.findall(text))) >= 2


def is_count(value: Any) -> bool:
    """Whether a JSON value is a whole number.

    >>> is_count(3), is_count(True), is_count("3")
    (True, False, False)
    """
    number = as_number(value)
    return number is not None and number.is_integer()


def excerpt(value: Any) -> str:
    """A JSON value in a few characters."""
    return json.dumps(value)[:40]


def field_fault(data: Mapping[str, Any]) -> str | None:
    """The first field of a level record whose value cannot be what its name says; None where all can."""
    for name, kind, _ in FIELDS:
        value = data.get(name)
        fault = None if value is None else value_fault(name, kind, value)
        if fault:
            return fault
    if (as_number(data["concurrency"]) or 0) < 1:
        return f"concurrency is {excerpt(data['concurrency'])}, not a number of requests"
    return None


def value_fault(name: str, kind: str, value: Any) -> str | None:
    """Why a value that is not null cannot be the field of this name and kind; None where it can.

    >>> value_fault("wall_s", "measure", "12.5"), value_fault("failed", "count", Printed("0.5"))
    ('wall_s is "12.5", not a number', 'failed is 0.5, not a whole number')
    """
    number = as_number(value)
    if kind in ("count", "measure"):
        if number is None:
            return f"{name} is {excerpt(value)}, not a number"
        if kind == "count" and abs(number) <= MAX_FIGURE and not number.is_integer():
            return f"{name} is {number.text}, not a whole number"
    elif kind == "text":
        if not isinstance(value, str) and (number is None or name == "label"):
            return f"{name} is {excerpt(value)}, not a text"
        return None
    elif kind == "flag":
        return None if isinstance(value, bool) else f"{name} is {excerpt(value)}, neither true nor false"
    elif kind != "any":
        if not isinstance(value, dict):
            return f"{name} is {excerpt(value)}, not an object"
        inner_kind = {"stats": "measure", "tally": "count"}.get(kind, "any")
        for key in STATISTICS if kind == "stats" else value:
            if value.get(key) is None and kind != "tally":
                continue
            fault = value_fault(f"{name}.{key}", inner_kind, value[key])
            if fault:
                return fault
    return None if name == "extra_body" else oversized(name, value)  # that one is the user's own


def oversized(path: str, value: Any) -> str | None:
    """The first figure in a JSON value that is too large to have been measured; None where all can be.

    >>> oversized("", {"server": {"slots": 20, "peak_waiting": 1e300}}), oversized("wall_s", 12.5)
    ('server.peak_waiting is 1e+300: implausibly large', None)
    """
    if isinstance(value, (Mapping, list)):
        inner = value.items() if isinstance(value, Mapping) else enumerate(value)
        faults = (oversized(f"{path}.{key}" if path else str(key), item) for key, item in inner)
        return next(filter(None, faults), None)
    number = value if isinstance(value, float) else as_number(value)
    if number is None or abs(number) <= MAX_FIGURE:
        return None
    return f"{path} is {number:g}: implausibly large"


def open_file(path: str) -> io.BufferedReader:
    """A file, open for reading. Raises UserError where it cannot be read, or is a folder, a pipe or a device: those
    may never end, and a pipe that nobody writes to cannot even be opened."""
    try:
        mode = os.stat(path).st_mode
        if not stat.S_ISREG(mode):
            kind = "a folder" if stat.S_ISDIR(mode) else "a pipe" if stat.S_ISFIFO(mode) else "a device or a socket"
            raise UserError(f"cannot read {path}: it is {kind}, not a file; name another file")
        return open(path, "rb")
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror or error}; name another file") from None


def file_lines(path: str) -> Iterator[tuple[int, bytes, bool]]:
    """(number, bytes, whether cut at MAX_LINE_BYTES) of each line; only LF ends one, so U+2028 in a text does not.

    Raises UserError where the file cannot be read, is not a notebook's size, or is UTF-16 or UTF-32.
    """
    try:
        with open_file(path) as file:
            number = total = 0
            while True:
                line = file.readline(MAX_LINE_BYTES)
                if not line:
                    return
                number += 1
                if number == 1 and (encoding := wide_encoding(line + file.peek(64)[:64])):
                    raise UserError(
                        f"{path} is {encoding} text, not UTF-8: save it again as UTF-8 "
                        "(Windows PowerShell's `>` writes UTF-16; use `Set-Content -Encoding utf8`)"
                    )
                total += len(line)
                cut = False
                while len(line) >= MAX_LINE_BYTES and not line.endswith(b"\n"):  # walk to the end of a giant line
                    rest = file.readline(MAX_LINE_BYTES)
                    total += len(rest)
                    cut = True
                    if not rest or rest.endswith(b"\n") or total > MAX_FILE_BYTES:
                        break
                if total > MAX_FILE_BYTES:
                    raise UserError(f"{path} holds more than {MAX_FILE_BYTES >> 30} GiB: not a notebook")
                yield number, line, cut
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror or error}; name another file") from None


def wide_encoding(start: bytes) -> str | None:
    """UTF-16 or UTF-32, where a file's first bytes say so by a byte order mark or by NULs between letters; else None.

    >>> wide_encoding("# Lab".encode("utf-16-le")), wide_encoding(b"\\xef\\xbb\\xbf# Lab"), wide_encoding(b"# Lab")
    ('UTF-16', None, None)
    """
    if start.startswith((b"\xff\xfe\x00\x00", b"\x00\x00\xfe\xff")):
        return "UTF-32"
    sample = start[:64]
    if start.startswith((b"\xff\xfe", b"\xfe\xff")) or (len(sample) > 3 and 2 * sample.count(0) >= len(sample) - 1):
        return "UTF-16"
    return None


def read_notebook(path: str) -> Notebook:
    """Find every line of this lab in a file. Raises UserError where the file cannot be read."""
    notebook = Notebook(path)
    seen: dict[str, int] = {}
    for number, line, cut in file_lines(path):
        text = line.decode("utf-8", errors="replace")
        text = text[PREFIX.match(text).end() :].strip()  # type: ignore[union-attr]  # the pattern matches ""
        if "\x00" in text and looks_like_ours(text.replace("\x00", "")):
            notebook.damaged.append(Remark(number, "NUL bytes between letters: appended as UTF-16 by another program"))
        elif not text.startswith("{"):
            if LAB in text and looks_like_ours(text):
                notebook.damaged.append(Remark(number, "record with leading text, or line-wrapped"))
        elif cut:
            if looks_like_ours(text):
                notebook.damaged.append(Remark(number, f"longer than {MAX_LINE_BYTES >> 20} MiB"))
        else:
            read_candidate(notebook, number, text, is_utf8="\ufffd" not in text or "\ufffd".encode() in line, seen=seen)
    return notebook


def read_candidate(notebook: Notebook, number: int, text: str, *, is_utf8: bool, seen: dict[str, int]) -> None:
    """Put one line that starts with a brace where it belongs: a record, another line of this lab, damage, prose."""
    try:
        data = parse_json(text)
    except ValueError as error:
        if looks_like_ours(text):
            notebook.damaged.append(Remark(number, str(error)))
        return
    if not isinstance(data, dict) or data.get("lab") != LAB:
        if isinstance(data, dict) and "concurrency" in data and "ttft_s" in data:
            remark = f"looks like a level record, but its lab is {json.dumps(data.get('lab'))[:60]}: left out"
            notebook.remarks.append(Remark(number, remark))
        return
    schema = data.get("schema", 1)
    if not is_count(schema) or schema not in KNOWN_SCHEMAS:
        remark = f"format version {json.dumps(schema)[:20]} is not known here (1 and 2 are): left out; "
        notebook.unknown.append(Remark(number, remark + "a newer summarise_load.py may read it"))
    elif "concurrency" in data and "ttft_s" in data:
        fault = field_fault(data) if is_utf8 else "bytes that are not UTF-8"
        if fault:
            notebook.damaged.append(Remark(number, fault))
        elif text in seen:
            notebook.remarks.append(Remark(number, f"the same line as line {seen[text]}: counted once"))
        else:
            seen[text] = number
            notebook.records.append(Record(number, data))
    elif data.get("record") == "curve-summary":
        notebook.summaries.append(Record(number, data))
    elif data.get("record") == "recovery":
        notebook.recoveries.append(Record(number, data))


# ----------------------------------------------------------------------------------------------- figures of a curve


@dataclass(frozen=True)
class Level:
    """The runs that count for one concurrency level of a label: one record, or the repeats of one run."""

    c: int
    runs: tuple[Record, ...]

    def values(self, path: str) -> list[float]:
        """A figure or a count in each run that has it, as plain floats."""
        return [float(value) for value in (record.number(path) for record in self.runs) if value is not None]

    def median(self, path: str) -> float | None:
        """A figure or a count: the median of the runs that have it, or None."""
        values = self.values(path)
        return statistics.median(values) if values else None

    def range(self, path: str) -> tuple[float, float] | None:
        """(lowest, highest) of the runs; None with fewer than two."""
        values = self.values(path)
        return (min(values), max(values)) if len(values) > 1 else None

    def total(self, path: str) -> int:
        """A count, summed over the runs: for "did it ever happen", never beside a median."""
        return int(math.fsum(self.values(path)))

    def tally(self, path: str) -> dict[str, int]:
        """Counts by name (finish reasons, error classes), summed over the runs."""
        total: dict[str, int] = {}
        for record in self.runs:
            for name, count in (record.raw(path) or {}).items():
                total[name] = total.get(name, 0) + int(count)
        return total

    def setting(self, name: str) -> Any:
        """A setting of the level's last run."""
        return self.runs[-1].setting(name)

    @property
    def interrupted(self) -> bool:
        return all(record.interrupted for record in self.runs)

    @property
    def left_out(self) -> str | None:
        """Why the level enters no derived figure; None where it does."""
        requests, arrival = self.median("requests"), self.setting("arrival")
        if self.interrupted:
            return "interrupted"
        if not self.median("completed"):
            return "no completed request"
        if requests is not None and requests < self.c:
            return f"{counted(requests, 'request')} never filled it"
        return None if arrival in (None, "closed-loop") else f"its requests came open-loop ({arrival})"

    @property
    def rounds(self) -> float | None:
        """Requests / c of the run with the fewest; None where the requests are not recorded."""
        return min(self.values("requests"), default=math.nan) / self.c if self.values("requests") else None

    @property
    def cached_share(self) -> float | None:
        """Mean cached tokens / mean prompt tokens, or None."""
        cached, prompt = self.median("cached_tokens_mean"), self.median("prompt_tokens_mean")
        return cached / prompt if cached is not None and prompt else None

    @property
    def slo_misses(self) -> list[str] | None:
        """What keeps the level outside the SLO recorded with it; empty inside it; None where that cannot be told.
        Outputs of one token have no TPOT to miss it."""
        if self.interrupted or (self.left_out and self.median("completed")):
            return None
        misses = [f"{failed} failed"] if (failed := self.total("failed")) else []
        if not self.median("completed"):
            return misses or ["no completed request"]
        slo_ttft, slo_tpot = self.setting("slo_ttft_s"), self.setting("slo_tpot_s")
        ttft, tpot = self.median("ttft_s.p90"), self.median("tpot_s.p90")
        if slo_ttft is None or slo_tpot is None or ttft is None:
            return None
        misses += [f"TTFT p90 {ttft:.3g} s"] if ttft > slo_ttft else []
        return misses + ([f"TPOT p90 {1000 * tpot:.4g} ms"] if tpot is not None and tpot > slo_tpot else [])


def counted(number: float, noun: str) -> str:
    """
    >>> counted(1, "level"), counted(2, "level")
    ('1 level', '2 levels')
    """
    return f"{number:g} {noun}{'' if number == 1 else 's'}"


@dataclass(frozen=True)
class Fit:
    """TPOT p50 ~ a + b x c over levels, in milliseconds; `b_interval_ms` is 95 %, None below three levels;
    `largest_residual` is relative: the most by which the line misses a level, as a share of that level."""

    a_ms: float
    b_ms: float
    levels: tuple[int, ...]
    b_interval_ms: tuple[float, float] | None
    largest_residual: float

    def throughput(self, n: float) -> float | None:
        """Output tokens per second where n requests always decode together: n / (a + b n)."""
        step_ms = self.a_ms + self.b_ms * n
        return 1000.0 * n / step_ms if step_ms > 0 else None

    @property
    def grows(self) -> bool:
        """Whether the growth of a step over the levels shows: above what the line misses a level by, and b's interval
        above 0. What rests on b (ceiling, c at the SLO, per-sequence cost) is said only then."""
        low, high = self.levels[0], self.levels[-1]
        top_ms = self.a_ms + self.b_ms * high
        if self.b_ms <= 0 or top_ms <= 0 or (self.b_interval_ms is not None and self.b_interval_ms[0] <= 0):
            return False
        return self.b_ms * (high - low) / top_ms > self.largest_residual

    @property
    def ceiling(self) -> float | None:
        """Tokens per second as c grows without end, 1/b; None where none is implied."""
        return 1000.0 / self.b_ms if self.grows else None

    def c_at(self, slo_tpot_s: float | None) -> float | None:
        """The concurrency at which the fit meets a TPOT SLO, (slo - a) / b; None where none is implied."""
        return (1000.0 * slo_tpot_s - self.a_ms) / self.b_ms if slo_tpot_s is not None and self.grows else None


def fit_line(points: Sequence[tuple[int, float]]) -> Fit | None:
    """Least squares of TPOT in ms on c, one point a level; None below two different c.

    >>> fit = fit_line([(c, 20 + 1.5 * c) for c in (1, 5, 10, 20)])
    >>> round(fit.a_ms, 6), round(fit.b_ms, 6), round(fit.ceiling, 1), round(fit.c_at(0.1), 1)
    (20.0, 1.5, 666.7, 53.3)
    """
    levels = tuple(sorted({c for c, _ in points}))
    if len(levels) < 2:
        return None
    mean_c = math.fsum(c for c, _ in points) / len(points)
    mean_y = math.fsum(y for _, y in points) / len(points)
    s_xx = math.fsum((c - mean_c) ** 2 for c, _ in points)
    b = math.fsum((c - mean_c) * (y - mean_y) for c, y in points) / s_xx
    a = mean_y - b * mean_c
    residuals = [(y - a - b * c, y) for c, y in points]
    interval = None
    if len(points) > 2 and len(levels) > 2:
        freedom = len(points) - 2
        reach = student_t(freedom) * math.sqrt(math.fsum(r * r for r, _ in residuals) / freedom / s_xx)
        interval = (b - reach, b + reach)
    return Fit(a, b, levels, interval, max(abs(r) / y if y > 0 else math.inf for r, y in residuals))


def find_knee(points: Sequence[tuple[int, float]]) -> tuple[int, int] | None:
    """The first step between neighbouring (c, tokens per second) points, sorted by c, where the gain per added
    request is below half of one request's throughput at the lowest c; None where there is no such step.

    >>> find_knee([(1, 46.5), (5, 181.8), (10, 285.7), (20, 400.0)])
    (5, 10)
    """
    if not points or points[0][1] <= 0:
        return None
    threshold = KNEE_SHARE * points[0][1] / points[0][0]
    for (c, rate), (next_c, next_rate) in zip(points, points[1:]):
        if (next_rate - rate) / (next_c - c) < threshold:
            return c, next_c
    return None


@dataclass(frozen=True)
class Curve:
    """One label's levels, sorted by c, and its settings (those of the newest record that counts)."""

    label: str
    levels: tuple[Level, ...]
    settings: Mapping[str, Any]
    remarks: tuple[str, ...] = ()

    @cached_property
    def usable(self) -> tuple[Level, ...]:
        """The levels that enter derived figures."""
        return tuple(level for level in self.levels if level.left_out is None)

    @cached_property
    def rates(self) -> list[tuple[int, float]]:
        """(c, output tokens per second) of the usable levels that have both."""
        rates = ((level.c, level.median("output_tokens_per_s")) for level in self.usable)
        return [(c, rate) for c, rate in rates if rate is not None]

    def scaling(self, level: Level) -> float | None:
        """Throughput(c) / (c x throughput at the lowest level / that level)."""
        rate = level.median("output_tokens_per_s")
        if level.left_out or rate is None or not self.rates[0][1]:
            return None
        return rate / (level.c * self.rates[0][1] / self.rates[0][0])

    @cached_property
    def knee(self) -> tuple[int, int] | None:
        return find_knee(self.rates)

    @cached_property
    def knee_per_repeat(self) -> list[tuple[int, int] | None]:
        """The knee of each repeat that has every usable level; empty where there is one run."""
        knees = []
        for repeat in sorted({record.repeat for level in self.usable for record in level.runs}):
            own = [
                (level.c, float(rate))
                for level in self.usable
                for record in level.runs
                if record.repeat == repeat and (rate := record.number("output_tokens_per_s")) is not None
            ]
            if len(own) == len(self.usable):
                knees.append(find_knee(own))
        return knees if len(knees) > 1 else []

    @property
    def slots(self) -> int | None:
        value = self.settings["server_slots"]
        return int(value) if value is not None else None

    @cached_property
    def fit(self) -> Fit | None:
        """TPOT p50 on c over the levels whose requests all decode together, one point a level."""
        points = []
        for level in self.usable:
            slots, tpot = level.setting("server_slots"), level.median("tpot_s.p50")
            if tpot is not None and (slots is None or level.c <= slots):
                points.append((level.c, 1000.0 * tpot))
        return fit_line(points)

    def decode_bound(self, c: float) -> float | None:
        """Output tokens per second if every request were always decoding: n / (a + b n), n = min(c, slots)."""
        return self.fit.throughput(c if self.slots is None else min(c, self.slots)) if self.fit else None

    @cached_property
    def operating_point(self) -> int | None:
        """The highest level with no failure and both p90s inside the SLO recorded with that level."""
        return max((level.c for level in self.levels if level.slo_misses == []), default=None)


def student_t(freedom: float, confidence: float = 0.95) -> float:
    """The t that a Student variable of so many degrees of freedom stays within, either side, with this confidence.

    Its two-sided tail is the regularised incomplete beta function I_x(freedom/2, 1/2), x = freedom / (freedom + t^2)
    (Abramowitz and Stegun 26.7.1), here by its continued fraction (26.5.8), inverted by halving.

    >>> [round(student_t(n), 3) for n in (1, 2, 3, 10, 100)]
    [12.706, 4.303, 3.182, 2.228, 1.984]
    """

    def tail(t: float) -> float:
        x = freedom / (freedom + t * t)
        p, q = freedom / 2.0, 0.5
        if x > (p + 1.0) / (p + q + 2.0):  # there the fraction of the complement converges faster
            return 1.0 - beta_part(1.0 - x, q, p)
        return beta_part(x, p, q)

    low, high = 0.0, 1.0
    while tail(high) > 1.0 - confidence:
        high *= 2.0
    for _ in range(60):  # past a float's 53 bits
        middle = (low + high) / 2.0
        low, high = (middle, high) if tail(middle) > 1.0 - confidence else (low, middle)
    return ten_digits(high)


def ten_digits(value: float) -> float:
    """A figure without its last digits, in which machines' logarithms may differ: the same bytes everywhere."""
    return float(f"{value:.10g}")


def beta_part(x: float, p: float, q: float) -> float:
    """The regularised incomplete beta function I_x(p, q), for x below its mean (Abramowitz and Stegun 26.5.8).

    >>> round(beta_part(0.3, 2.0, 3.0), 4)
    0.3483
    """
    if x <= 0.0:
        return 0.0
    fraction = 1.0
    for k in range(200, 0, -1):
        m, odd = divmod(k, 2)
        if odd:
            term = -(p + m) * (p + q + m) * x / ((p + 2 * m) * (p + 2 * m + 1))
        else:
            term = m * (q - m) * x / ((p + 2 * m - 1) * (p + 2 * m))
        fraction = 1.0 + term / fraction
    front = math.exp(math.lgamma(p + q) - math.lgamma(p) - math.lgamma(q) + p * math.log(x) + q * math.log(1.0 - x))
    return front / p / fraction


def newest_run(records: Sequence[Record]) -> tuple[tuple[Record, ...], list[str]]:
    """Of one label's records at one c: the newest run's repeats, and remarks about them.

    Newest is by `recorded_at`, then by run id, then by place in the file; version 1 lines: the last one. A run in
    which the level was interrupted counts only where no run finished it.
    """
    whole = [record for record in records if not record.interrupted] or list(records)
    runs: dict[str, list[Record]] = {}
    for record in whole:
        runs.setdefault(record.run, []).append(record)
    old = [run for run in runs.values() if run[0].schema == 1]
    candidates = [run for run in runs.values() if run[0].schema > 1] + old[-1:]
    dated = all(record.instant is not None for run in candidates for record in run)
    named = all(run[0].schema > 1 and run[0].data.get("run_id") is not None for run in candidates)

    def age(run: list[Record]) -> tuple[float, str, int]:
        newest = max(record.instant or 0.0 for record in run) if dated else 0.0
        return newest, run[0].run if named else "", run[-1].line

    by_repeat: dict[int, Record] = {}
    remarks = []
    for record in max(candidates, key=age):
        if record.repeat in by_repeat:
            remarks.append(
                f"c={record.concurrency}: lines {by_repeat[record.repeat].line} and {record.line} are both "
                f"run {printable(record.run)}, repeat {record.repeat}, and differ: the later one is shown"
            )
        by_repeat[record.repeat] = record
    return tuple(by_repeat[repeat] for repeat in sorted(by_repeat)), remarks


def build_curve(label: str, records: Sequence[Record]) -> Curve:
    """The levels of one label that count, sorted by c."""
    by_c: dict[int, list[Record]] = {}
    for record in records:
        by_c.setdefault(record.concurrency, []).append(record)
    levels, remarks = [], []
    for c in sorted(by_c):
        runs, said = newest_run(by_c[c])
        levels.append(Level(c, runs))
        remarks += said
    shown = [record for level in levels for record in level.runs]
    newest = max(shown, key=lambda record: (record.instant or 0.0, record.line))
    if any(record.schema == 1 for record in shown):
        remarks.append(VERSION_1_REMARK)
    return Curve(label, tuple(levels), {name: newest.setting(name) for name in SETTINGS}, tuple(remarks))


VERSION_1_REMARK = (
    "lines of format version 1 are shown: there, in flight counts successes only, TTFT includes connecting, "
    "TPOT ends at the stream's close, and an undefined figure was printed as 0.0"
)


def find_curve(notebook: Notebook, name: str) -> Curve:
    """The curve of a label, given as written or as --list shows it, or of one of its runs, as L@RUN (the run id, or
    its beginning where that names one run). Raises ResultError where there is none."""
    if not notebook.records:
        raise ResultError(f"no level records in {notebook.path}: run load_test.py first, or name the file: --labbook")
    label = find_label(notebook, name)
    if label is not None:
        return notebook.curves[label]
    name_of_label, at, run = name.rpartition("@")
    label = find_label(notebook, name_of_label) if at else None
    if label is None:
        known = ", ".join(map(as_word, notebook.curves))
        raise ResultError(f"no label {name!r} in {notebook.path}; it holds: {known}")
    records = notebook.by_label()[label]
    runs = dict.fromkeys(record.run for record in records)
    found = [run] if run in runs else [known for known in runs if known.startswith(run)]
    if len(found) != 1:
        raise ResultError(
            f"{'no' if not found else 'more than one'} run {run!r} of {as_word(label)} in {notebook.path}; "
            f"it holds: {', '.join(map(printable, runs))}"
        )
    return build_curve(f"{label}@{found[0]}", [record for record in records if record.run == found[0]])


def find_label(notebook: Notebook, name: str) -> str | None:
    """A label by its name as written, else as --list shows it."""
    if name in notebook.curves:
        return name
    return next((label for label in notebook.curves if as_word(label) == name), None)


# ---------------------------------------------------------------------------------------------------- comparing two


class Ratio(NamedTuple):
    """How many times b's figure is a's: the ratio of their geometric means and its 95 % interval."""

    low: float
    ratio: float
    high: float

    @property
    def different(self) -> bool:
        return self.low > 1.0 or self.high < 1.0


def ratio_interval(runs_a: Sequence[float], runs_b: Sequence[float]) -> Ratio | None:
    """b / a with its 95 % interval by Welch's unequal-variance t on the logarithms of the runs (Welch 1947; degrees
    of freedom by Satterthwaite); None where a side has fewer than two runs or a run that is not above 0. The only
    judge of "different", "fell" and "grew".

    >>> [round(figure, 3) for figure in ratio_interval([100, 102, 98], [110, 112, 108])]
    [1.055, 1.1, 1.147]
    """
    if min(len(runs_a), len(runs_b)) < 2 or min(*runs_a, *runs_b) <= 0:
        return None
    (mean_a, part_a, free_a), (mean_b, part_b, free_b) = map(mean_and_error, (runs_a, runs_b))
    error = part_a + part_b
    reach = 0.0
    if error > 0:
        freedom = error**2 / (part_a**2 / free_a + part_b**2 / free_b)
        reach = student_t(freedom) * math.sqrt(error)
    return Ratio(*(ten_digits(math.exp(mean_b - mean_a + shift)) for shift in (-reach, 0.0, reach)))


def mean_and_error(runs: Sequence[float]) -> tuple[float, float, int]:
    """The mean of the logarithms of runs, the variance of that mean, and its degrees of freedom."""
    logs = [math.log(value) for value in runs]
    mean = math.fsum(logs) / len(logs)
    free = len(logs) - 1
    return mean, math.fsum((value - mean) ** 2 for value in logs) / free / len(logs), free


class Change(NamedTuple):
    """How many times one level's figure is another's; `shown` by the runs, or None where they allow no verdict."""

    times: float
    shown: bool | None


def change(a: Level, b: Level, path: str) -> Change | None:
    """b / a of a figure's medians, and whether the runs show a difference; None where either is missing."""
    top, bottom = b.median(path), a.median(path)
    if top is None or not bottom:
        return None
    interval = ratio_interval(a.values(path), b.values(path))
    return Change(top / bottom, None if interval is None else interval.different)


# ---------------------------------------------------------------------------------- statements: reading, notes, check

PASS, WARN, FAIL, NOTE, READING = "PASS", "WARN", "FAIL", "NOTE", "READING"


@dataclass(frozen=True)
class Statement:
    """One thing that a program says of a curve or a notebook: a shape (READING), a remark (NOTE), a rule's verdict
    (PASS, WARN, FAIL). `items` holds each case of a rule on its own, naming its label and level."""

    code: str
    status: str
    text: str
    levels: tuple[int, ...] = ()
    advice: str | None = None
    values: Mapping[str, Any] = field(default_factory=dict)
    certain: bool = True
    items: tuple[str, ...] = ()


class Sign(NamedTuple):
    """What one level shows of a shape: the evidence in words and as values; `advice` replaces the shape's."""

    text: str
    values: Mapping[str, Any]
    certain: bool = True
    advice: str | None = None


class Shape(NamedTuple):
    """A shape that a curve can have. `test` is asked of every usable level; the highest level that shows it gives
    the evidence."""

    code: str
    test: Callable[[Curve, Level], Sign | None]
    advice: str


SINGLE_RUNS = "single runs: run-to-run variance unknown (often 5 %); use --repeat 3"


def near_linear(curve: Curve, level: Level) -> Sign | None:
    """Every level up to this one scales well, at a TPOT like the lowest level's."""
    lowest = curve.usable[0]
    if level is lowest:
        return None
    for lower in curve.usable[1 : curve.usable.index(level) + 1]:
        scaling, slower = curve.scaling(lower), change(lowest, lower, "tpot_s.p50")
        if scaling is None or scaling <= NEAR_LINEAR or slower is None or slower.times > FLAT_TPOT:
            return None
    assert scaling is not None and slower is not None
    more = level is curve.usable[-1] and curve.knee is None
    return Sign(
        f"near-linear scaling up to c={level.c} (efficiency {scaling:.2f}): TPOT p50 {slower.times:.2f} times that at "
        f"c={lowest.c}",
        {"c": level.c, "scaling": scaling, "tpot_growth": slower.times},
        advice="measure higher levels: the knee is not reached" if more else f"admit at least {level.c} at once",
    )


def per_sequence_cost(curve: Curve, level: Level) -> Sign | None:
    """The part of a step that grows with c exceeds the fixed part, by more than the fit misses a level by."""
    fit = curve.fit
    if fit is None or not fit.grows or fit.a_ms <= 0 or level.c not in fit.levels:
        return None
    grown_ms = fit.b_ms * level.c
    if (grown_ms - fit.a_ms) / (grown_ms + fit.a_ms) <= fit.largest_residual:
        return None
    return Sign(
        f"per-sequence cost b*c = {grown_ms:.1f} ms exceeds the fixed step cost a = {fit.a_ms:.1f} ms at c={level.c}: "
        "KV reads, attention or sampling (the curve alone cannot say which)",
        {"c": level.c, "a_ms": fit.a_ms, "b_ms": fit.b_ms, "bc_ms": grown_ms},
    )


def waiting_seen(level: Level) -> tuple[str, float] | None:
    """The server's own sign that requests waited: (what, how many)."""
    for path, words in (("server.peak_deferred", "deferred"), ("server.peak_waiting", "waiting")):
        value = level.median(path)
        if value:
            return words, value
    return None


def split_of_ttft(level: Level) -> dict[str, float]:
    """The means of queue, prefill and rest in seconds, as far as recorded: means add up to a mean, medians do not."""
    parts = ((part, level.median(f"ttft_split_s.{part}.mean")) for part in ("queue", "prefill", "rest"))
    return {part: value for part, value in parts if value is not None}


def queueing(curve: Curve, level: Level) -> Sign | None:
    """First tokens wait for a slot or for cache blocks. A wait is long against a request's own decoding; prompts
    that merely arrive together wait for each other's prefill, which is short against it."""
    ttft, tpot, tokens = (level.median(path) for path in ("ttft_s.p90", "tpot_s.p50", "output_tokens"))
    if ttft is None or not tpot or ttft < NOTICED_S:
        return None
    lowest, slots = curve.usable[0], level.setting("server_slots")
    growth = {path: change(lowest, level, path) for path in ("ttft_s.p90", "tpot_s.p50")}
    ttft_change, tpot_change = growth.values()
    outgrown = bool(ttft_change and tpot_change and ttft_change.times > FAST_GROWTH * tpot_change.times)
    outgrown = outgrown and ttft_change is not None and ttft_change.shown is not False
    tokens_each = (tokens or 0.0) / (level.median("completed") or 1.0)
    long_wait = ttft > LONG_WAIT_SHARE * tpot * max(tokens_each - 1, 1)
    above, waiting, split = slots is not None and level.c > slots, waiting_seen(level), split_of_ttft(level)
    sampled = any(level.median(path) is not None for path in ("server.peak_deferred", "server.peak_waiting"))
    # What a split leaves for the queue holds the server's other delays too, where the server saw nobody wait.
    queued = not sampled and split.get("queue", 0.0) > SPLIT_SHARE * math.fsum(split.values())
    certain = above or waiting is not None or queued
    fits = slots is not None and level.c <= slots
    if not (certain and (long_wait or outgrown)) and not (long_wait and outgrown and not sampled and not fits):
        return None
    signs = [f"TTFT p90 {ttft:.3f} s"]
    if ttft_change and tpot_change and level is not lowest:
        signs.append(f"{ttft_change.times:.1f} times that at c={lowest.c}, TPOT p50 {tpot_change.times:.1f} times")
    signs += [f"{level.c} at once on {counted(slots, 'slot')}"] if above else []
    signs += [f"{waiting[1]:g} {waiting[0]} at the peak"] if waiting else []
    values = {
        "c": level.c,
        "ttft_growth": ttft_change.times if ttft_change else None,
        "tpot_growth": tpot_change.times if tpot_change else None,
        "slots": slots,
        waiting[0] if waiting else "waiting": waiting[1] if waiting else None,
    }
    unsure = "sample the server (--sample 1) and record --server-slots to tell a queue from long prompts"
    cause = "requests queue for slots or KV blocks" if certain else "possibly requests queue for slots or KV blocks"
    return Sign(f"{cause} at c={level.c}: {', '.join(signs)}", values, certain, None if certain else unsure)


def ttft_parts(level: Level, least_s: float = NOTICED_S) -> tuple[str, str, dict[str, Any]] | None:
    """(the part that dominates the mean TTFT, or "none"; all parts in words; as values); None without a split, or
    where the whole is too short to notice."""
    seconds = split_of_ttft(level)
    total = math.fsum(seconds.values())
    if total < least_s:
        return None
    shares = {part: value / total for part, value in seconds.items()}
    part = max(shares, key=lambda name: shares[name])
    text = ", ".join(f"{name} {seconds[name]:.3f} s ({share:.0%})" for name, share in shares.items())
    values: dict[str, Any] = {"c": level.c, "seconds": seconds, "shares": shares}
    return part if shares[part] > SPLIT_SHARE else "none", f"mean TTFT at c={level.c}: {text}", values


def ttft_split(part: str, meaning: str, *, histograms: bool = False) -> Callable[[Curve, Level], Sign | None]:
    """The test of one part of the TTFT split, at the highest level that has a split. vLLM's histograms have the
    first step in their prefill: what is left of the client's mean is outside the engine."""

    def test(curve: Curve, level: Level) -> Sign | None:
        parts = ttft_parts(level)
        if parts is None or any(ttft_parts(other) for other in curve.usable if other.c > level.c) or parts[0] != part:
            return None
        if part == "rest" and histograms != (level.median("ttft_split_s.rest.p50") is None):
            return None
        return Sign(f"{parts[1]}: {meaning}", parts[2])

    return test


def other_prefills(curve: Curve, level: Level) -> Sign | None:
    """Decoding stalls while other requests' prompts are processed: a long tail of TPOT. A level that slows from its
    first requests to its last has such a tail as well."""
    p50, p90 = level.median("tpot_s.p50"), level.median("tpot_s.p90")
    if level.c == 1 or not p50 or p90 is None or p90 <= TAIL_RATIO * p50 or p90 - p50 < LAG_MIN_S or drift_of(level):
        return None
    return Sign(
        f"probably other requests' prefills at c={level.c}: TPOT p90 {1000 * p90:.1f} ms is {p90 / p50:.1f} times p50 "
        f"({1000 * p50:.1f} ms)",
        {"c": level.c, "tpot_p50_s": p50, "tpot_p90_s": p90, "ratio": p90 / p50},
        certain=False,
    )


def past_saturation(curve: Curve, level: Level) -> Sign | None:
    """More requests give less: throughput is below that of a lower level while as many are in flight."""
    lower = [other for other in curve.usable if other.c < level.c and other.median("output_tokens_per_s")]
    if not lower:
        return None
    best = max(lower, key=lambda other: other.median("output_tokens_per_s") or 0.0)
    fall = change(best, level, "output_tokens_per_s")
    held = (level.median("mean_in_flight") or 0.0) >= (best.median("mean_in_flight") or 0.0)
    if fall is None or not held or fall.shown is False or fall.times >= (1.0 if fall.shown else FALL):
        return None
    rate, next_rate = best.median("output_tokens_per_s"), level.median("output_tokens_per_s")
    return Sign(
        f"{'' if fall.shown else 'possibly '}past saturation: throughput falls from {rate:.1f} at c={best.c} to "
        f"{next_rate:.1f} at c={level.c} while in flight holds{'' if fall.shown else ' (too few runs for a verdict)'}",
        {"c": level.c, "from": rate, "to": next_rate},
        bool(fall.shown),
        f"admit at most {best.c} at once" if fall.shown else "repeat both levels: --repeat 3",
    )


def preemptions(curve: Curve, level: Level) -> Sign | None:
    """The engine put sequences aside, for its cache was full."""
    count = level.median("server.preemptions")
    if not count:
        return None
    text = f"KV cache full: the engine preempted {count:g} times at c={level.c}"
    return Sign(text, {"c": level.c, "preemptions": count})


def client_bound(curve: Curve, level: Level) -> Sign | None:
    """The client, not the server, may have set a level's figures."""
    text = client_evidence(level)
    values = {
        "c": level.c,
        "in_flight": level.median("mean_in_flight"),
        "cpu_fraction": level.median("client.cpu_fraction"),
        "loop_lag_p99_s": level.median("client.loop_lag_s.p99"),
    }
    return Sign(f"the client at c={level.c}: {text}", values, not text.startswith("possibly")) if text else None


def few_in_flight(level: Level) -> str | None:
    """The mean in flight, where it is well below c; None elsewhere."""
    in_flight = level.median("mean_in_flight")
    if in_flight is None or not level.median("completed") or in_flight >= LOW_IN_FLIGHT * level.c:
        return None
    return f"in flight {in_flight:.1f} of {level.c}"


def client_evidence(level: Level) -> str | None:
    """Why the client, not the server, may have set a level's figures; None where nothing says so.

    Its lag, a pause, its calibrated floor or its CPU is above a limit: those at which load_test.py warns. That few
    requests are in flight stands beside them and is no sign by itself, for a short level drains too; version 1 lines
    say nothing of the client, so there it is only possibly its doing.
    """
    low = few_in_flight(level)
    if low and all(record.schema == 1 for record in level.runs):
        return f"possibly: {low} (or the level was short and drained)"
    tpot, ttft, wall = (level.median(path) for path in ("tpot_s.p50", "ttft_s.p50", "wall_s"))
    lag, pause = level.median("client.loop_lag_s.p99"), level.median("client.loop_lag_s.max")
    floor, floor_ttft = level.median("client.floor_us_per_delta"), level.median("client.floor_ttft_s")
    cpu = level.median("client.cpu_fraction")
    reasons = []
    if lag is not None and tpot and lag > max(LAG_SHARE * tpot, LAG_MIN_S):
        reasons.append(f"client loop lag p99 {1000 * lag:.1f} ms against a TPOT of {1000 * tpot:.1f} ms")
    if pause is not None and wall and pause > max(PAUSE_S, PAUSE_SHARE * wall):
        reasons.append(f"the client paused for {pause:.1f} s of {wall:.1f} s")
    if floor is not None and tpot and floor * 1e-6 * level.c > LAG_SHARE * tpot:
        reasons.append(f"reading {level.c} deltas costs {floor * level.c / 1000:.2f} of {1000 * tpot:.2f} ms of TPOT")
    elif floor_ttft is not None and ttft and floor_ttft > LAG_SHARE * ttft:
        reasons.append(f"this client alone takes {1000 * floor_ttft:.1f} ms of a TTFT of {1000 * ttft:.1f} ms")
    if cpu is not None and cpu > CPU_HIGH and (wall is None or wall >= CPU_MIN_WALL_S):
        reasons.append(f"client CPU {cpu:.0%} of one core")
    return ", ".join(([low] if low and reasons else []) + reasons) or None


def short_level(curve: Curve, level: Level) -> Sign | None:
    """Few requests in flight, and the client idle: a level of few rounds spends much of its time filling and
    draining; in a longer one, nothing recorded says why."""
    low, rounds = few_in_flight(level), level.rounds
    if not low or client_evidence(level) or rounds is None:
        return None
    values = {"c": level.c, "in_flight": level.median("mean_in_flight"), "rounds": rounds}
    if rounds < FEW_ROUNDS:
        return Sign(f"short level at c={level.c}: {low} over {rounds:.1f} rounds, and the client was idle", values)
    return Sign(
        f"{low} over {rounds:.1f} rounds, and nothing recorded says why",
        values,
        False,
        "look for a limit between client and server (a proxy, a connection limit), or run the client elsewhere",
    )


def draining(curve: Curve, level: Level) -> Sign | None:
    """A level that fills and drains for a sizeable part of its time shows less than the server can hold."""
    steady, wall = level.median("steady_output_tokens_per_s"), level.median("output_tokens_per_s")
    if steady is None or not wall or steady <= (1 + DRAINING) * wall:
        return None
    rounds = f" over {level.rounds:.1f} rounds" if level.rounds else ""
    return Sign(
        f"draining at c={level.c}: steady state {steady:.1f} tok/s is {steady / wall - 1:.1%} above the wall figure "
        f"{wall:.1f}{rounds}; scaling and knee are those of the wall figures",
        {"c": level.c, "steady_output_tokens_per_s": steady, "output_tokens_per_s": wall, "rounds": level.rounds},
    )


def drift_of(level: Level) -> tuple[float, float] | None:
    """TPOT in seconds over the first and the last third of a level's requests, where they differ by more than noise.
    Speeding up counts from six rounds on: the last round of a short level drains, and so decodes faster."""
    paths = ("drift.tpot_first_third_s", "drift.tpot_last_third_s")
    first, last = (level.median(path) for path in paths)
    interval = ratio_interval(*(level.values(path) for path in paths))
    if not first or not last or (interval is not None and not interval.different):
        return None
    slowed, sped_up = last > DRIFT * first, first > DRIFT * last and (level.rounds or 0.0) >= 6
    return (first, last) if slowed or sped_up else None


def drifting(curve: Curve, level: Level) -> Sign | None:
    """The server changed while the level ran: heat, another load, a growing cache, or a cold start."""
    drift = drift_of(level)
    if drift is None:
        return None
    first, last = drift
    text = f"drift at c={level.c}: TPOT p50 {1000 * first:.1f} ms over the first third of the requests, "
    text += f"{1000 * last:.1f} ms over the last"
    values: dict[str, Any] = {"c": level.c, "tpot_first_third_s": first, "tpot_last_third_s": last}
    if last < first:
        return Sign(text + ": the server was still warming up", values, advice="warm it up first: --warmup auto")
    clock, heat = level.median("gpu.sm_clock_mhz_min"), level.median("gpu.temperature_c_max")
    best = max((value for other in curve.usable if (value := other.median("gpu.sm_clock_mhz_min"))), default=None)
    slower = clock is not None and best is not None and clock < 0.9 * best
    if slower or (heat is not None and heat >= HOT_C):
        signs = [f"up to {heat:.0f} C"] if heat is not None else []
        signs += [f"SM clock down to {clock:.0f} MHz (best level {best:.0f})"] if clock is not None else []
        text += f"; probably GPU throttling: {', '.join(signs)}"
        values.update({"temperature_c_max": heat, "sm_clock_mhz_min": clock})
    return Sign(text, values)


def connecting(curve: Curve, level: Level) -> Sign | None:
    """Connections wait to be accepted."""
    connect, ttft = level.median("connect_s.p90"), level.median("ttft_s.p90")
    if connect is None or not ttft or connect <= max(CONNECT_SHARE * ttft, NOTICED_S):
        return None
    text = f"connecting at c={level.c}: p90 {1000 * connect:.1f} ms beside a TTFT p90 of {1000 * ttft:.1f} ms"
    return Sign(text, {"c": level.c, "connect_p90_s": connect, "ttft_p90_s": ttft})


def early_stops(curve: Curve, level: Level) -> Sign | None:
    """Outputs that end before max_tokens make requests shorter, and requests per second higher."""
    reasons = level.tally("finish_reasons")
    other = {name: count for name, count in reasons.items() if name != "length" and count}
    if not other:
        return None
    count, total = sum(other.values()), sum(reasons.values())
    named = ", ".join(f"{printable(name)} {number}" for name, number in sorted(other.items()))
    text = f"early stops at c={level.c}: {count} of {counted(total, 'response')} did not end by length ({named})"
    return Sign(text, {"c": level.c, "count": count, "of": total, "finish_reasons": other})


def cache_luck(curve: Curve, level: Level) -> Sign | None:
    """The cached share differs from a lower level's, so they did not do the same work."""
    share = level.cached_share
    known = [
        (other.c, other.cached_share) for other in curve.usable if other.c <= level.c and other.cached_share is not None
    ]
    shares = [value for _, value in known]
    if share is None or max(abs(share - value) for value in shares) <= CACHE_POINTS:
        return None
    points = 100 * (max(shares) - min(shares))
    shown = ", ".join(f"{value:.0%} at c={c}" for c, value in known)
    slots = "a server with a cache per slot fills it slot by slot: warm every slot, or use a pooled cache"
    return Sign(
        f"cache luck: cached share {shown}: {points:.0f} points apart",
        {"c": level.c, "shares": {str(c): value for c, value in known}, "points": points},
        advice=slots if curve.settings["prompt_set"] == "shared-prefix" else None,
    )


def single_run(curve: Curve, level: Level) -> Sign | None:
    """One run of a level: nothing says how much its figures vary."""
    text = "single run of each level: run-to-run variance unknown (often 5 %), so differences of a few percent may be "
    if any(len(other.runs) > 1 for other in curve.usable):
        text = f"single run of c={level.c}: run-to-run variance unknown (often 5 %), so a few percent may be "
    return Sign(text + "noise", {"runs": 1}) if len(level.runs) == 1 else None


def repeats(curve: Curve, level: Level) -> Sign | None:
    """How much the runs of the level that varies most differ."""

    def share(other: Level) -> float:
        low, high = other.range("output_tokens_per_s") or (0.0, 0.0)
        return (high - low) / (other.median("output_tokens_per_s") or 1.0)

    limits = level.range("output_tokens_per_s")
    if limits is None or level is not max(curve.usable, key=share):
        return None
    text = f"{len(level.runs)} runs: throughput varies most at c={level.c}, {limits[0]:.1f} to {limits[1]:.1f} "
    values = {"c": level.c, "runs": len(level.runs), "low": limits[0], "high": limits[1]}
    return Sign(text + f"({share(level):.1%} of the median)", values)


SHAPES = (
    Shape("near_linear", near_linear, ""),
    Shape(
        "per_sequence_cost",
        per_sequence_cost,
        "serving_arithmetic.py --measured tells KV reads from other work; more slots bring diminishing returns",
    ),
    Shape("queueing", queueing, "more slots, if memory allows, or admit fewer requests"),
    Shape(
        "ttft_is_queue",
        ttft_split("queue", "queueing dominates: an admission limit, not a slow model"),
        "raise the slots, or admit fewer requests",
    ),
    Shape(
        "ttft_is_prefill",
        ttft_split("prefill", "dominated by prefill"),
        "cache the common prefix, or shorten the prompts",
    ),
    Shape("ttft_is_decode", ttft_split("rest", "TTFT is about one decode step: nothing to improve"), ""),
    Shape(
        "ttft_is_outside",
        ttft_split("rest", "mostly outside the engine", histograms=True),
        "look at the server's HTTP layer, its tokeniser and the client",
    ),
    Shape("ttft_is_mixed", ttft_split("none", "no part dominates"), "see which part grows from level to level"),
    Shape(
        "other_prefills",
        other_prefills,
        "a smaller prefill batch (llama-server --ubatch-size, vLLM --max-num-batched-tokens), or prefix caching",
    ),
    Shape("past_saturation", past_saturation, ""),
    Shape("preemptions", preemptions, "a larger KV cache, a shorter context, or fewer sequences at once"),
    Shape(
        "client",
        client_bound,
        "run load_test.py on another machine, through an SSH tunnel; the server stays on loopback",
    ),
    Shape("short_level", short_level, "more requests per level (--min-rounds 8)"),
    Shape("draining", draining, "more requests per level (--min-rounds 8)"),
    Shape("drift", drifting, "let the machine cool and stop other loads, then repeat; --sample 1 records the GPU"),
    Shape("connecting", connecting, "a longer listen backlog or more HTTP threads (llama-server --threads-http)"),
    Shape(
        "early_stops",
        early_stops,
        "compare tokens per second, not requests; for equal outputs --extra-body '{\"ignore_eos\": true}'",
    ),
    Shape("cache_luck", cache_luck, "use prompts that differ from the first token on (prompt set mixed)"),
    Shape("single_run", single_run, "--repeat 3 runs the ladder three times, interleaved"),
    Shape("repeats", repeats, "--compare judges differences by the runs; more runs narrow its interval"),
)


def read_curve(curve: Curve) -> list[Statement]:
    """Every shape that a curve shows."""
    found = []
    for shape in SHAPES:
        signs = [(level.c, sign) for level in curve.usable if (sign := shape.test(curve, level))]
        if signs:
            levels, (text, values, certain, advice) = tuple(c for c, _ in signs), signs[-1][1]
            advice = shape.advice if advice is None else advice
            found.append(Statement(shape.code, READING, text, levels, advice or None, values, certain))
    return found


def note_statements(notebook: Notebook, curve: Curve) -> list[Statement]:
    """What else is known of the levels: what was left out, tails, lengths, the server's side, recovery, versions."""
    found = []

    def note(code: str, text: str, *levels: int) -> None:
        found.append(Statement(code, NOTE, text, levels))

    for level in curve.levels:
        if level.left_out:
            note("left_out", f"c={level.c} is left out of fit, knee and scaling: {level.left_out}", level.c)
    for code, title, paths in CURVE_NOTES:
        for path in paths:
            values = [(level.c, level.median(path)) for level in curve.levels]
            known = [(c, value) for c, value in values if value is not None]
            if known:
                figures = ", ".join(f"c={c} {value:.4g}" for c, value in known)
                note(code, f"{title.format(path.rpartition('.')[2])}: {figures}", *(c for c, _ in known))
    for level in curve.levels:
        for code, text in level_notes(level):
            note(code, text, level.c)
    runs = {record.run for level in curve.levels for record in level.runs}
    for record in notebook.recoveries:
        if record.run in runs:
            after = record.number("after_s")
            states = [f"{'' if record.data.get(key) is True else 'not '}{key}" for key in ("idle", "answered")]
            note("recovery", f"recovery: {', '.join(states)}{f' after {after:.1f} s' if after is not None else ''}")
    for text in mixed_settings(curve):
        note("mixed_settings", text)
    for text in curve.remarks:
        note("remark", text)
    return found


CURVE_NOTES = (
    ("ttft_p95", "TTFT {}", ("ttft_s.p95",)),
    ("prefill", "the server's prefill, tokens/s", ("prefill_tokens_per_s",)),
    ("tokens_per_delta", "tokens per delta", ("tokens_per_delta",)),
    ("tokens_per_joule", "tokens per joule", ("gpu.tokens_per_joule",)),
)
SERVER_NOTES = (
    ("server.peak_busy_slots", "busy slots"),
    ("server.peak_deferred", "deferred"),
    ("server.busy_slots_per_decode", "per decode"),
    ("server.peak_running", "running"),
    ("server.peak_waiting", "waiting"),
    ("server.preemptions", "preemptions"),
    ("server.peak_cache_usage", "cache use"),
)
GPU_NOTES = (
    ("gpu.power_w_mean", "W"),
    ("gpu.temperature_c_max", "C at most"),
    ("gpu.sm_clock_mhz_min", "MHz at least"),
    ("gpu.memory_used_mib_max", "MiB at most"),
)


def level_notes(level: Level) -> Iterator[tuple[str, str]]:
    """(code, text) of what is known of one level alone."""
    steady, wall = level.median("steady_output_tokens_per_s"), level.median("output_tokens_per_s")
    if steady is not None and wall and abs(steady / wall - 1) > STEADY_SHOWN:
        share = f"{steady / wall - 1:+.1%}"
        yield "steady_state", f"steady state at c={level.c}: {steady:.1f} tok/s, {share} against the wall figure"
    low, p50, p90, high = (level.median(f"output_tokens_per_request.{key}") for key in ("min", "p50", "p90", "max"))
    if low is not None and high is not None and low != high:
        text = f"{low:.0f} to {high:.0f}, p50 {shown(p50, 0)}, p90 {shown(p90, 0)}"
        yield "output_lengths", f"output tokens per request at c={level.c}: {text}"
    if level.total("failed"):
        yield "failed", f"c={level.c}: {failures(level)}"
    names = level.tally("models")
    if len(names) > 1:
        yield "models", f"c={level.c}: responses named {len(names)} models: {', '.join(map(printable, names))}"
    turns = level.runs[-1].data.get("by_turn")
    if isinstance(turns, list):
        rows = [row for row in turns if isinstance(row, dict)]
        figures = [(as_number(row.get("ttft_p50_s")), as_number(row.get("cached_tokens_mean"))) for row in rows]
        text = "; ".join(
            f"{turn}: TTFT p50 {shown(ttft, 3)} s, cached {shown(cached, 0)}"
            for turn, (ttft, cached) in enumerate(figures, 1)
        )
        yield "by_turn", f"by turn at c={level.c}: {text}"
    for code, notes in (("server", SERVER_NOTES), ("gpu", GPU_NOTES)):
        seen = [(words, value) for path, words in notes if (value := level.median(path)) is not None]
        texts = (f"{words} {value:g}" if code == "server" else f"{value:g} {words}" for words, value in seen)
        if seen:
            yield code, f"{'GPU' if code == 'gpu' else code} at c={level.c}: {', '.join(texts)}"


def failures(level: Level) -> str:
    """How many requests of a level failed in all its runs, with the first error."""
    asked = level.total("requests") or level.total("failed")
    errors = [record.data["first_error"] for record in level.runs if record.data.get("first_error")]
    runs = f" in {len(level.runs)} runs" if len(level.runs) > 1 else ""
    first = f" ({printable(errors[0])[:120]})" if errors else ""
    return f"{level.total('failed')} of {asked} failed{runs}{first}"


def mixed_settings(curve: Curve) -> list[str]:
    """Each setting in which the levels of one label differ."""
    texts = []
    for name in COMPARED:
        values = dict.fromkeys(
            setting_text(record.setting(name), name) for level in curve.levels for record in level.runs
        )
        if len(values) > 1:
            texts.append(f"levels of this label differ in {name}: {', '.join(values)}")
    return texts


# ------------------------------------------------------------------------------ what a record's figures must satisfy


class Span(NamedTuple):
    """The true values that a printed one can stand for."""

    low: float
    high: float

    def meets(self, other: Span) -> bool:
        return self.low <= other.high and other.low <= self.high

    def times(self, other: Span) -> Span:
        """Of figures that are not negative."""
        return Span(self.low * other.low, self.high * other.high)

    def plus(self, other: Span) -> Span:
        return Span(self.low + other.low, self.high + other.high)


# A writer may round twice (a request to a nanosecond, then its level to a microsecond), and sums of floats are off in
# their last bits: both widen a printed value's interval by less than this.
HALF_SLACK = 1.01
FLOAT_SLACK = 1e-9
RAW_HALF = 0.5e-6  # a per-request line gives its times to a microsecond


def span(value: float, half: float = math.inf) -> Span:
    """A printed figure as the interval of half its last printed digit to either side; a count is exact.

    `half` bounds that reach where the writer's digits are known: JSON leaves out zeros at the end.

    >>> span(40), Span(11.9, 12.1).meets(span(Printed("12.3"))), Span(11.9, 12.26).meets(span(Printed("12.3")))
    (Span(low=40.0, high=40.0), False, True)
    """
    if not isinstance(value, Printed):
        return Span(float(value), float(value))
    reach = min(value.half, half) * HALF_SLACK + abs(value) * FLOAT_SLACK
    return Span(max(0.0, value - reach), value + reach)


def measured(record: Record, path: str) -> Span | None:
    """The interval of a printed figure, or None where the record does not have it. Counts are exact, and so are
    numbers of tokens per request; `sum.NAME` is the sum of a block of counts."""
    if path.startswith("sum."):
        block = record.data.get(path[4:])
        return None if block is None else span(sum(map(int, block.values())))
    value = record.number(path)
    if value is None:
        return None
    exact = KIND.get(path) == "count" or (path.startswith("output_tokens_per_request.") and value.text.isdigit())
    return span(int(value)) if exact else span(value)


# (left, relation, right, guard): sums and products of figures that are not negative. A guard names when it holds.
RELATIONS: tuple[tuple[str, str, str, str], ...] = (
    ("completed + failed", "=", "requests", "whole"),
    ("completed + failed", "<=", "requests", ""),
    ("sum.finish_reasons", "=", "completed", ""),
    ("sum.errors", "=", "failed", ""),
    ("within_slo", "<=", "completed", ""),
    ("coalesced", "<=", "completed", ""),
    ("output_tokens_per_s * wall_s", "=", "output_tokens", ""),
    ("requests_per_s * wall_s", "=", "completed", ""),
    ("goodput_requests_per_s * wall_s", "=", "within_slo", ""),
    ("mean_in_flight", "<=", "concurrency", ""),
    ("completed * e2e_s.mean", "<=", "wall_s * mean_in_flight", ""),  # Little's law
    ("completed * ttft_s.mean", "<=", "wall_s * mean_in_flight", ""),
    ("e2e_s.max", "<=", "wall_s", ""),
    ("ttft_s.max", "<=", "wall_s", ""),
    ("ttft_s.p99", "<=", "wall_s", ""),
    ("steady_window_s", "<=", "wall_s", ""),
    ("steady_window_s * steady_output_tokens_per_s", "<=", "output_tokens", "no failures"),
    # Both means are over the same requests, except in older lines whose counts are mixed.
    ("cached_tokens_mean", "<=", "prompt_tokens_mean", "one kind of count"),
    ("output_tokens_per_request.min * completed", "<=", "output_tokens", ""),
    ("output_tokens", "<=", "output_tokens_per_request.max * completed", ""),
    *((f"ttft_s.{key}", "<=", f"e2e_s.{key}", "") for key in STATISTICS),
    *(
        (f"{name}.{low}", "<=", f"{name}.{high}", "")
        for name in STATISTIC_FIELDS
        for low, high in (*zip(STATISTICS[:5], STATISTICS[1:6]), ("min", "mean"), ("mean", "max"))
    ),
)
GUARDS: dict[str, Callable[[Record], bool]] = {
    "": lambda record: True,
    "whole": lambda record: not record.interrupted,
    "no failures": lambda record: not record.count("failed"),
    "one kind of count": lambda record: not isinstance(record.data.get("token_counts"), dict),
}


def evaluate(record: Record, expression: str) -> Span | None:
    """The interval of a side of a relation; None where a figure is missing."""
    total: Span | None = None
    for term in expression.split(" + "):
        product = Span(1.0, 1.0)
        for path in term.split(" * "):
            factor = measured(record, path)
            if factor is None:
                return None
            product = product.times(factor)
        total = product if total is None else total.plus(product)
    return total


def format_figure(record: Record, path: str) -> str:
    """A figure as it is printed, for a finding."""
    if path.startswith("sum."):
        return f"the sum of {path[4:]}"
    value = record.raw(path)
    return f"{path} {value.text if isinstance(value, Printed) else json.dumps(value)}"


def format_side(record: Record, expression: str, value: Span) -> str:
    """A side of a relation, with its value where it is worked out."""
    words = re.sub(r"[\w.]+", lambda match: format_figure(record, match[0]), expression)
    worked_out = " " in expression or expression.startswith("sum.")
    return f"{words} = {(value.low + value.high) / 2:.6g}" if worked_out else words


def contradictions(record: Record) -> list[str]:
    """Every piece of arithmetic that an honest line satisfies and this one does not."""
    numbers = [item.name for item in FIELDS if item.kind in ("count", "measure")]
    paths = [*numbers, *(f"{name}.{key}" for name in STATISTIC_FIELDS for key in STATISTICS)]
    negative = [f"{format_figure(record, path)} is negative" for path in paths if (record.number(path) or 0.0) < 0.0]
    if negative:
        return negative  # the rest holds for figures that are not negative
    found = []
    for left, relation, right, guard in RELATIONS:
        one, other = evaluate(record, left), evaluate(record, right)
        if one is None or other is None or (one.low <= other.high and (relation == "<=" or other.low <= one.high)):
            continue
        if GUARDS[guard](record):
            words = "is not" if relation == "=" else "is more than"
            found.append(f"{format_side(record, left, one)} {words} {format_side(record, right, other)}")
    return list(dict.fromkeys(found + check_decoding_time(record) + check_within_slo(record)))


def check_decoding_time(record: Record) -> list[str]:
    """A request of n >= 2 tokens takes TTFT + TPOT x (n - 1), so the means of E2E - TTFT stand between those of the
    smallest and the largest TPOT, and equal the mean's where all outputs have one length."""
    least, most = (record.count(f"output_tokens_per_request.{key}") for key in ("min", "max"))
    tokens, completed = record.count("output_tokens"), record.count("completed")
    if least is None or most is None or tokens is None or not completed or least < 2:
        return []
    bounds = ("tpot_s.mean", "tpot_s.mean") if least == most else ("tpot_s.min", "tpot_s.max")
    e2e, ttft, low, high = (measured(record, path) for path in ("e2e_s.mean", "ttft_s.mean", *bounds))
    if e2e is None or ttft is None or low is None or high is None:
        return []
    each = (tokens - completed) / completed
    if Span(e2e.low - ttft.high, e2e.high - ttft.low).meets(Span(low.low * each, high.high * each)):
        return []
    figures = f"{format_figure(record, 'e2e_s.mean')} - {format_figure(record, 'ttft_s.mean')}"
    return [f"{figures} does not fit {each:.1f} further tokens at {format_figure(record, bounds[1])}"]


def check_within_slo(record: Record) -> list[str]:
    """within_slo fits the nearest-rank percentiles: a percentile q inside a limit means that at least q of the
    requests are; one outside, that fewer are. Version 1's percentiles are not known to be nearest rank."""
    completed, within = record.count("completed"), record.count("within_slo")
    least_tokens = record.count("output_tokens_per_request.min")
    if record.schema == 1 or not completed or within is None or record.data.get("percentile_method") is not None:
        return []
    counts = []
    for name, limit in (("ttft_s", record.number("slo_ttft_s")), ("tpot_s", record.number("slo_tpot_s"))):
        if limit is None or (name == "tpot_s" and (least_tokens is None or least_tokens < 2)):
            return []  # below 2 tokens there is no TPOT, and how many those are is not known
        counts.append(count_within(record, name, float(limit), completed))
    most = min(high for _, high in counts)
    least = max(0, sum(low for low, _ in counts) - completed)
    if least <= within <= most:
        return []
    return [f"within_slo {within} does not fit the percentiles and limits: between {least} and {most} of {completed}"]


def count_within(record: Record, name: str, limit: float, completed: int) -> tuple[int, int]:
    """(at least, at most) how many of the requests have a figure at or below a limit."""
    least, most = 0, completed
    for key, percent in (("min", 0), ("p50", 50), ("p90", 90), ("p95", 95), ("p99", 99), ("max", 100)):
        value = measured(record, f"{name}.{key}")
        index = rank(percent, completed)
        if value is not None and value.high <= limit:
            least = max(least, index + 1)
        if value is not None and value.low > limit:
            most = min(most, index)
    return least, most


def rank(percent: int, count: int) -> int:
    """The index, from 0, of a nearest-rank percentile among `count` ordered values; 0 % is the smallest one's.

    >>> rank(90, 10), rank(50, 1), rank(0, 7)
    (8, 0, 0)
    """
    return max(1, -(-percent * count // 100)) - 1


LATENCIES = ("ttft_s", "tpot_s", "e2e_s")
COPY_DIGITS = 18  # digits that latency figures must carry together before equality means a copy
COPY_ROOM = 64.0  # how far apart they must stand, as a product of distances in units of the last digit
COPY_LOAD_DIGITS = 8  # or the digits of wall time, rate and requests in flight, where those are equal as well
COPY_HALF_S = 0.000501  # half a millisecond, and what a float adds to it
WRITTEN_DECIMALS = 6  # load_test.py writes times to a microsecond


def latency_figures(record: Record) -> dict[str, Printed]:
    """The latency figures of a record that are not null."""
    paths = (f"{name}.{key}" for name in LATENCIES for key in STATISTICS)
    return {path: value for path in paths if (value := record.number(path)) is not None}


def tells_a_copy(figures: Mapping[str, Printed]) -> bool:
    """Whether latency figures are fine enough that two honest runs do not share them by chance.

    Only different values count, and only those printed to a millisecond or finer: above that a queue repeats itself.
    They must carry COPY_DIGITS digits together, and stand apart: neighbours of one block that differ by few units of
    the last digit leave no room for noise. The room is the product of (1 + difference in such units).

    >>> block = {f"ttft_s.{key}": Printed(text) for key, text in zip("abcd", ("0.0326", "0.0327", "0.0341", "0.0349"))}
    >>> tells_a_copy(block), tells_a_copy({**block, "tpot_s.p50": Printed("0.0215"), "tpot_s.p90": Printed("0.0219")})
    (False, True)
    """
    seen: set[Printed] = set()
    digits, room = 0, 1.0
    for name in LATENCIES:
        fine = {value for path, value in figures.items() if path.startswith(name) and value.half <= COPY_HALF_S}
        values = sorted(fine - seen)
        seen.update(values)
        digits += sum(value.digits for value in values)
        for value, following in zip(values, values[1:]):
            room *= 1.0 + (following - value) / (2.0 * max(value.half, following.half))
    return digits >= COPY_DIGITS and room >= COPY_ROOM


def fingerprint(record: Record) -> tuple[int, tuple[tuple[str, float], ...]] | None:
    """c and latency figures, whatever stands around them; None where too few requests stand behind them."""
    figures = latency_figures(record)
    if (record.count("completed") or 0) < 5 or not figures:
        return None
    return record.concurrency, tuple((path, float(value)) for path, value in figures.items())


def copied_latencies(records: Sequence[Record]) -> list[str]:
    """Two runs or repeats of one label whose latency figures are equal to the last digit.

    Two honest runs of a steady server can agree where figures are coarse, so equality alone is not enough. Either the
    figures show enough by themselves (see tells_a_copy), or wall time, rate and requests in flight must be equal as
    well, with COPY_LOAD_DIGITS digits between them.
    """
    found = []
    seen: dict[Any, Record] = {}
    for record in records:
        print_of = fingerprint(record)
        if print_of is None:
            continue
        earlier = seen.setdefault((record.label, print_of), record)
        if record.schema == 1 and earlier.schema == 1:
            other = record.data.get("recorded_at") != earlier.data.get("recorded_at")
        else:
            other = (record.run, record.repeat) != (earlier.run, earlier.repeat)
        also = ("wall_s", "output_tokens_per_s", "mean_in_flight")
        same = sum(value.digits for path in also if (value := earlier.number(path)) and value == record.number(path))
        if other and (tells_a_copy(latency_figures(record)) or same >= COPY_LOAD_DIGITS):
            found.append(
                f"{as_word(record.label)} c={record.concurrency}: lines {earlier.line} and {record.line} are different "
                f"runs or repeats, but all {len(print_of[1])} latency figures are equal to the last digit"
            )
    return found


def missing_digits(record: Record) -> str | None:
    """Latency figures of a schema 2 line with fewer decimals than load_test.py writes; None where they are whole.

    A figure of a microsecond's resolution ends in k zeros, which JSON leaves out, once in 10^k: a handful of different
    figures that lack one and a half digits each, on average, were rounded afterwards.
    """
    figures = {float(value): value for value in latency_figures(record).values() if value > 0}
    lacking = sum(max(0, WRITTEN_DECIMALS - value.decimals) for value in figures.values())
    if record.schema == 1 or len(figures) < 6 or lacking < 1.5 * len(figures):
        return None
    return (
        f"its {len(figures)} latency figures lack {lacking / len(figures):.1f} digits each of what load_test.py writes"
    )


# ------------------------------------------------------------------------- recomputing levels from per-request lines

LevelKey = tuple[str, str, int, int]  # label, run id, repeat, c


@dataclass
class RawFile:
    """The per-request lines of a --raw file, by the level they belong to."""

    path: str
    levels: dict[LevelKey, list[Mapping[str, Any]]] = field(default_factory=dict)
    damaged: list[Remark] = field(default_factory=list)


def read_raw(path: str) -> RawFile:
    """Read a --raw file. Raises UserError where it cannot be read or holds no request at all."""
    raw = RawFile(path)
    for number, line, cut in file_lines(path):
        text = line.decode("utf-8", errors="replace").strip("\ufeff \t\r\n")
        if not text:
            continue
        try:
            data = parse_json(text)
            if cut or not isinstance(data, dict) or not all(map(is_count, (data["repeat"], data["concurrency"]))):
                raise ValueError("no per-request record")
            ours = {name: value for name, value in data.items() if name != "timings"}  # the server's own, in any unit
            if fault := oversized("", ours):
                raise ValueError(fault)
            key = (str(data["label"]), str(data["run_id"]), int(data["repeat"]), int(data["concurrency"]))
        except KeyError as error:
            raw.damaged.append(Remark(number, f"no per-request record: {error.args[0]} is missing"))
        except ValueError as error:
            raw.damaged.append(Remark(number, str(error)))
        else:
            raw.levels.setdefault(key, []).append(data)
    if not raw.levels:
        raise UserError(f"{path} holds no per-request record: load_test.py --raw FILE writes them")
    return raw


def figures_of(requests: Iterable[Mapping[str, Any]], path: str) -> list[Span]:
    """The intervals of one figure over the requests that have it; counts are exact."""
    values = (as_number(request.get(path)) for request in requests)
    half = RAW_HALF if path.endswith("_s") else 0.0
    return [span(value, half) if half else span(float(value)) for value in values if value is not None]


def nearest_rank(spans: Sequence[Span], percent: int) -> Span:
    """The interval of a nearest-rank percentile."""
    index = rank(percent, len(spans))
    return Span(sorted(item.low for item in spans)[index], sorted(item.high for item in spans)[index])


def total_span(spans: Sequence[Span]) -> Span:
    return Span(math.fsum(item.low for item in spans), math.fsum(item.high for item in spans))


def mean_span(spans: Sequence[Span]) -> Span:
    total = total_span(spans)
    return Span(total.low / len(spans), total.high / len(spans))


def raw_spans(requests: Sequence[Mapping[str, Any]], concurrency: int) -> dict[str, Span]:
    """Every measured figure of a level that follows from its requests, as an interval."""
    good = [request for request in requests if request.get("ok") is True]
    found: dict[str, Span] = {}
    blocks = {name: figures_of(good, name) for name in ("ttft_s", "tpot_s", "e2e_s", "connect_s")}
    blocks["output_tokens_per_request"] = figures_of(good, "output_tokens")
    for name, spans in blocks.items():
        if spans:
            found[f"{name}.mean"] = mean_span(spans)
            for key, percent in zip(STATISTICS[:6], (0, 50, 90, 95, 99, 100)):
                found[f"{name}.{key}"] = nearest_rank(spans, percent)
    timed = [[*figures_of([request], path)] for request in requests for path in ("started_s", "connect_s", "ended_s")]
    if timed and all(timed):
        ends = [total_span([part[0] for part in timed[i : i + 3]]) for i in range(0, len(timed), 3)]
        wall = nearest_rank(ends, 100)
        busy = total_span([part[0] for i, part in enumerate(timed) if i % 3])
        found["wall_s"] = wall
        if wall.low > 0:
            in_flight = (busy.low / wall.high, busy.high / wall.low)
            found["mean_in_flight"] = Span(*(min(value, concurrency) for value in in_flight))
    counted_requests = [request for request in good if as_number(request.get("prompt_tokens")) is not None]
    prompts, cached = figures_of(good, "prompt_tokens"), figures_of(counted_requests or good, "cached_tokens")
    if prompts:
        found["prompt_tokens_mean"] = mean_span(prompts)
    if cached:  # a request that reports none counts as 0 beside others that report some
        total = total_span(cached)
        found["cached_tokens_mean"] = Span(*(value / len(counted_requests or good) for value in total))
    return found


def raw_counts(record: Record, requests: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Every count of a level that follows from its requests."""
    good = [request for request in requests if request.get("ok") is True]
    bad = [request for request in requests if request.get("ok") is not True]
    counts: dict[str, Any] = {
        "requests": len(requests),
        "completed": len(good),
        "failed": len(bad),
        "output_tokens": sum(int(as_number(request.get("output_tokens")) or 0) for request in good),
        "coalesced": sum(request.get("coalesced") is True for request in good),
        "finish_reasons": tally_by(good, "finish"),
        "errors": tally_by(bad, "error_class"),
    }
    slo_ttft_s, slo_tpot_s = record.number("slo_ttft_s"), record.number("slo_tpot_s")
    if slo_ttft_s is not None and slo_tpot_s is not None:
        counts["within_slo"] = sum(request_within(request, slo_ttft_s, slo_tpot_s) for request in good)
    return counts


def tally_by(requests: Sequence[Mapping[str, Any]], path: str) -> dict[str, int]:
    names = [str(request.get(path) or "none") for request in requests]
    return {name: names.count(name) for name in dict.fromkeys(names)}


def request_within(request: Mapping[str, Any], slo_ttft_s: float, slo_tpot_s: float) -> bool:
    """Whether a successful request meets both limits; below 2 tokens there is no TPOT to miss its own."""
    ttft, tpot = as_number(request.get("ttft_s")), as_number(request.get("tpot_s"))
    return ttft is not None and ttft <= slo_ttft_s and (tpot is None or tpot <= slo_tpot_s)


def raw_differences(record: Record, requests: Sequence[Mapping[str, Any]]) -> list[str]:
    """Each figure of a level record that its per-request lines do not give."""
    found = []
    for path, count in raw_counts(record, requests).items():
        written = record.raw(path)
        if isinstance(count, dict) and written is not None:
            written = {name: int(number) for name, number in written.items()}
        if written is not None and written != count:
            found.append(f"{format_figure(record, path)}, but its requests give {json.dumps(count)}")
    for path, recomputed in raw_spans(requests, record.concurrency).items():
        printed = measured(record, path)
        if printed is not None and not printed.meets(recomputed):
            middle = (recomputed.low + recomputed.high) / 2
            found.append(f"{format_figure(record, path)}, but its requests give {middle:.6g}")
    return found


# ------------------------------------------------------------------------------------------------ rules of the check


@dataclass(frozen=True)
class Audit:
    """What the rules look at: the curves of a notebook, or one of them, and the records behind them."""

    notebook: Notebook
    curves: Mapping[str, Curve]
    records: Sequence[Record]
    raw: RawFile | None
    of_label: bool  # one label alone

    def with_prompts(self, prompt_set: str) -> list[tuple[Curve, list[Level]]]:
        """The curves that have levels of one prompt set, with those levels."""
        found = []
        for curve in self.curves.values():
            levels = [level for level in curve.levels if level.setting("prompt_set") == prompt_set]
            if levels:
                found.append((curve, levels))
        return found

    def baselines(self) -> dict[str, Curve]:
        """Whole sweeps: labels with prompt set mixed and a completed request at each of the lab's levels."""
        return {curve.label: curve for curve, levels in self.with_prompts("mixed") if not missing_levels(levels)}


class Found(NamedTuple):
    """What a rule found: its cases, or what it says where there is none; `status` replaces the rule's own."""

    items: Sequence[str]
    good: str = ""
    status: str | None = None


Test = Callable[["Audit"], "Found | None"]  # None where the rule does not apply


class Rule(NamedTuple):
    """A rule of the check. `status` is what a case of it means for a notebook, `label_status` for one label alone
    (--check --label, which the lab's scripts run after a load); None where it is not asked there."""

    code: str
    status: str | None
    label_status: str | None
    test: Test


SHOWN_ITEMS = 6  # cases named on a rule's line; --json names all


def each_level(test: Callable[[Level], str | None], good: str) -> Test:
    """A rule's test from a question to every level; the driver names label and c."""

    def ask(audit: Audit) -> Found:
        return Found(
            [
                f"{where(curve, level)}: {text}"
                for curve in audit.curves.values()
                for level in curve.levels
                if (text := test(level))
            ],
            good,
        )

    return ask


def where(curve: Curve, level: Level) -> str:
    """How a finding names a level: its label and c."""
    return f"{as_word(curve.label)} c={level.c}"


def missing_levels(levels: Sequence[Level]) -> list[int]:
    """The lab's levels without a completed request in a whole run."""
    done = {level.c for level in levels if level.median("completed") and not level.interrupted}
    return [c for c in SWEEP_LEVELS if c not in done]


def rule_sweep(audit: Audit) -> Found:
    """Some label with prompt set mixed has a completed request at each of the lab's levels."""
    whole = next(iter(audit.baselines()), None)
    if whole is not None:
        return Found([], f"{as_word(whole)}: completed requests at c={c_list(SWEEP_LEVELS)}")
    sweeps = audit.with_prompts("mixed")
    return Found(
        [f"{as_word(curve.label)} has no completed request at c={c_list(missing_levels(at))}" for curve, at in sweeps]
        or [f"no label with prompt set mixed; levels c={c_list(SWEEP_LEVELS)} are needed"]
    )


PAIR_SETTINGS = ("engine", "model", "host", "quant", "max_tokens")


def rule_prefix_pair(audit: Audit) -> Found:
    """A shared-prefix and a unique-prefix label of one engine, model, host, quant, output cap and levels. One whole
    pair is enough to pass; a label whose partner is missing beside it is a warning."""

    def key(curve: Curve, levels: Sequence[Level]) -> tuple[str, ...]:
        texts = (setting_text(curve.settings[name]) for name in PAIR_SETTINGS)
        return (*texts, c_list(level.c for level in levels if not level.left_out) or "none")

    shared, unique = (
        {key(curve, levels): as_word(curve.label) for curve, levels in audit.with_prompts(f"{name}-prefix")}
        for name in ("shared", "unique")
    )
    pairs = [f"{shared[found]} with control {unique[found]}" for found in shared if found in unique]
    alone = [
        f"{labels[found]} has no {partner} of "
        + ", ".join(f"{name} {text}" for name, text in zip((*PAIR_SETTINGS, "levels"), found))
        for labels, others, partner in (
            (shared, unique, "unique-prefix control"),
            (unique, shared, "shared-prefix partner"),
        )
        for found in labels
        if found not in others
    ]
    if not shared and not unique:
        alone = ["no label with prompt set shared-prefix, and none with unique-prefix"]
    return Found(alone, "; ".join(pairs), WARN if pairs else None)


def cached_rule(prompt_set: str, holds: Callable[[float], bool], want: str) -> Test:
    """The rule that every level of a prompt set has a cached share within a limit."""

    def test(audit: Audit) -> Found | None:
        bad, known = [], []
        judged = audit.with_prompts(prompt_set)
        for curve, levels in judged:
            for level in levels:
                share = level.cached_share
                if share is None or (prompt_set == "shared-prefix" and no_cached_count(level)):
                    continue
                known.append(f"{where(curve, level)} {share:.0%}")
                if not holds(share):
                    cached, prompt = level.median("cached_tokens_mean"), level.median("prompt_tokens_mean")
                    bad.append(
                        f"{where(curve, level)}: {cached:.1f} cached of {prompt:.1f} prompt tokens is {share:.1%}, "
                        f"not {want}"
                    )
        if not judged:
            return None if audit.of_label else Found([f"no {prompt_set} level: nothing shows a cached share {want}"])
        if not known:
            return Found([f"not judged: no {prompt_set} level has a cached count"], status=WARN)
        return Found(bad, f"{', '.join(known)}: {want}")

    return test


def no_cached_count(level: Level) -> bool:
    """Whether the server reports no cached tokens; a version 1 line's 0.0 may be that too, so it is taken as that."""
    counts = [(record.schema, record.number("cached_tokens_mean")) for record in level.runs]
    return all(count is None or (schema == 1 and count == 0.0) for schema, count in counts)


def shared_without_count(level: Level) -> str | None:
    if level.setting("prompt_set") != "shared-prefix" or not no_cached_count(level):
        return None
    return "the server does not report cached tokens (vLLM: start it with --enable-prompt-tokens-details)"


def server_cached(level: Level) -> str | None:
    """The cached tokens that responses reported against the server's own counter."""
    for record in level.runs:
        mean, completed = record.number("cached_tokens_mean"), record.count("completed")
        counter = record.number("server.cached_tokens")
        if mean is None or counter is None or not completed or record.count("failed"):
            continue
        low, high = (value * completed for value in span(mean))
        if counter < (1 - COUNTER_GAP) * low - 1 or counter > (1 + COUNTER_GAP) * high + 1:
            return f"responses report {mean * completed:.0f} cached tokens, the server's counter {counter:.0f}"
    return None


def server_settings(level: Level) -> str | None:
    """Slots and context that the server itself reports against those of the record."""
    texts = []
    for name, path, words in (
        ("server_slots", "server.slots", "slots"),
        ("context_length", "server.context_per_slot", "tokens of context a slot"),
    ):
        for record in level.runs:
            recorded, reported = record.setting(name), record.number(path)
            if recorded is not None and reported and reported != recorded:
                texts.append(f"the server has {reported:g} {words}, the record says {recorded}")
                break
    return "; ".join(texts) or None


def token_counts(level: Level) -> str | None:
    kinds = {json.dumps(record.data.get("token_counts")) for record in level.runs if record.count("completed")}
    return f"counted from {printable(', '.join(sorted(kinds)))}" if kinds - {'"usage"'} else None


def finish_not_length(level: Level) -> str | None:
    other = {name: count for name, count in level.tally("finish_reasons").items() if name != "length" and count}
    named = ", ".join(f"{printable(name)} {count}" for name, count in sorted(other.items()))
    return f"not every answer ran to its length ({named}): compare tokens/s, not requests/s" if other else None


def few_rounds(level: Level) -> str | None:
    requests = min(level.values("requests"), default=None)
    if requests is None or requests >= 2 * level.c:
        return None
    return f"{counted(requests, 'request')} at c={level.c}: {counted(round(requests / level.c, 2), 'round')}"


def held_back(level: Level) -> str | None:
    count = level.total("coalesced")
    of = counted(level.total("completed"), "response")
    return f"{count} of {of} came in one or two bursts" if count else None


def rule_identified(audit: Audit) -> Found:
    items = []
    for curve in audit.curves.values():
        records = [record for level in curve.levels for record in level.runs]
        names = [name for name in IDENTIFYING if any(record.setting(name) is None for record in records)]
        items += [f"{as_word(curve.label)}: {', '.join(names)} missing"] if names else []
    return Found(items, f"{', '.join(IDENTIFYING)} are given everywhere")


IDENTIFYING = ("host", "quant", "context_length", "server_slots")


def rule_same_setup(audit: Audit) -> Found:
    """The levels of a label were measured on one setup, and as often as each other."""
    items = []
    for curve in audit.curves.values():
        items += [f"{as_word(curve.label)}: {text}" for text in mixed_settings(curve)]
        whole = [level for level in curve.levels if not level.interrupted]
        most = max((len(level.runs) for level in whole), default=0)
        for level in whole:
            if len(level.runs) < most:
                runs = counted(len(level.runs), "run")
                items.append(f"{where(curve, level)}: {runs}, where other levels have {most}")
        for text in curve.remarks:
            items += [f"{as_word(curve.label)} {text}"] if "both run" in text else []
    return Found(items, "the levels of each label share one setup and one number of runs")


def rule_second_engine(audit: Audit) -> Found:
    """Two engines have a whole baseline each."""
    engines: dict[str, str] = {}
    for label, curve in audit.baselines().items():
        if curve.settings["engine"] is not None:
            engines.setdefault(setting_text(curve.settings["engine"]), as_word(label))
    named = ", ".join(f"{label} ({engine})" for engine, label in engines.items())
    if len(engines) > 1:
        return Found([], named)
    only = f"only {named}" if named else "no whole baseline names its engine"
    levels = c_list(SWEEP_LEVELS)
    return Found([f"no second engine's baseline at c={levels}: {only}; if it could not run, say so in prose"])


def rule_variants(audit: Audit) -> Found:
    """Each of the lab's variants has a completed request."""
    present = [label for label in VARIANT_LABELS if label in audit.curves and audit.curves[label].usable]
    missing = [label for label in VARIANT_LABELS if label not in present]
    return Found([f"{', '.join(missing)} missing"] if missing else [], ", ".join(present))


def rule_summary(audit: Audit) -> Found:
    """Each whole baseline has a curve-summary line."""
    have = {record.label for record in audit.notebook.summaries}
    hint = f"append it with {PROGRAM} --record --label"
    items = [f"no curve-summary of {as_word(label)}: {hint} {as_word(label)}" for label in audit.baselines()]
    items = [item for item, label in zip(items, audit.baselines()) if label not in have]
    if not audit.baselines() and not have:
        items = [f"no curve-summary line: {hint} LABEL"]
    return Found(items, ", ".join(map(as_word, sorted(have))))


def rule_consistent(audit: Audit) -> Found:
    """No record contradicts itself, and no two runs are copies of each other."""
    items = [
        f"line {record.line}, {as_word(record.label)} c={record.concurrency}: {item}"
        for record in audit.records
        for item in contradictions(record)
    ]
    return Found(
        items + copied_latencies(audit.records), f"{counted(len(audit.records), 'record')} without contradiction"
    )


def rule_digits(audit: Audit) -> Found:
    items = [
        f"line {record.line}, {as_word(record.label)} c={record.concurrency}: {text}"
        for record in audit.records
        if (text := missing_digits(record))
    ]
    return Found(items, "every line has the digits that load_test.py writes")


def rule_damaged(audit: Audit) -> Found:
    items = [f"line {remark.line}: {printable(remark.text)}" for remark in audit.notebook.damaged]
    return Found(items, f"{counted(len(audit.notebook.records), 'level record')} parsed")


def rule_unknown_version(audit: Audit) -> Found:
    items = [f"line {remark.line}: {printable(remark.text)}" for remark in audit.notebook.unknown]
    return Found(items, "every line is of a known version")


def rule_raw(audit: Audit) -> Found:
    """With --raw: each level record is what its per-request lines give, and neither file has a level that the other
    lacks. A level without its counterpart is a warning, not a failure."""
    assert audit.raw is not None
    raw = audit.raw
    items = [f"{raw.path} line {remark.line}: {printable(remark.text)}" for remark in raw.damaged]
    absent, used = [], set()
    for record in audit.records:
        key = (record.label, record.run, record.repeat, record.concurrency)
        place = f"line {record.line}, {as_word(record.label)} c={record.concurrency}"
        if key in raw.levels:
            used.add(key)
            items += [f"{place}: {difference}" for difference in raw_differences(record, raw.levels[key])]
        elif record.schema > 1:
            absent.append(f"{place}: no request of its run in {raw.path}")
    for label, run, repeat, c in raw.levels:
        if (label, run, repeat, c) not in used:
            run_text = f"run {printable(run)}, repeat {repeat}"
            absent.append(f"{as_word(label)} c={c}: {raw.path} holds {run_text}, which the notebook lacks")
    good = f"{counted(len(used), 'level record')} recomputed from {raw.path}: the same"
    return Found(items + absent, good, None if items else WARN)


RULES = (
    Rule("sweep", FAIL, None, rule_sweep),
    Rule("prefix-pair", FAIL, None, rule_prefix_pair),
    Rule("shared-cached", FAIL, FAIL, cached_rule("shared-prefix", lambda share: share > 0.5, "above 50 %")),
    Rule("unique-cached", FAIL, FAIL, cached_rule("unique-prefix", lambda share: share < 0.1, "below 10 %")),
    Rule("consistent", FAIL, FAIL, rule_consistent),
    Rule("digits", WARN, WARN, rule_digits),
    Rule("damaged-lines", FAIL, None, rule_damaged),
    Rule(
        "failed-requests",
        WARN,
        FAIL,
        each_level(lambda level: failures(level) if level.total("failed") else None, "none"),
    ),
    Rule("tokens-from-usage", WARN, FAIL, each_level(token_counts, "every level counts tokens from usage")),
    Rule("finish", None, WARN, each_level(finish_not_length, "every answer ran to its length")),
    Rule("in-flight", None, FAIL, each_level(few_in_flight, "in flight close to c")),
    Rule("server-settings", WARN, FAIL, each_level(server_settings, "the server reports what the records say")),
    Rule("identified", WARN, WARN, rule_identified),
    Rule("same-setup", WARN, WARN, rule_same_setup),
    Rule("cached-count", WARN, WARN, each_level(shared_without_count, "every shared-prefix level has a cached count")),
    Rule("cached-counter", WARN, WARN, each_level(server_cached, "responses and the server's counter agree")),
    Rule("second-engine", WARN, None, rule_second_engine),
    Rule("variants", WARN, None, rule_variants),
    Rule("client-bound", WARN, WARN, each_level(client_evidence, "no level shows the client as the limit")),
    Rule("coalesced", WARN, WARN, each_level(held_back, "no response was held back by a buffering proxy")),
    Rule(
        "interrupted",
        WARN,
        WARN,
        each_level(lambda level: "interrupted" if level.interrupted else None, "no level has only interrupted runs"),
    ),
    Rule("rounds", WARN, WARN, each_level(few_rounds, "every level has at least 2 rounds (requests / c)")),
    Rule("curve-summary", WARN, None, rule_summary),
    Rule("format-version", WARN, None, rule_unknown_version),
)


def check(notebook: Notebook, raw: RawFile | None = None, curve: Curve | None = None) -> list[Statement]:
    """Every rule's statement on a notebook, or on one label's curve, in a fixed order."""
    if curve is None:
        audit = Audit(notebook, notebook.curves, notebook.records, raw, of_label=False)
    else:
        audit = Audit(
            notebook, {curve.label: curve}, [run for level in curve.levels for run in level.runs], raw, of_label=True
        )
    found = []
    for rule in (*RULES, *([Rule("raw", FAIL, FAIL, rule_raw)] if raw else [])):
        status = rule.status if curve is None else rule.label_status
        answer = rule.test(audit) if status is not None else None
        if status is None or answer is None:
            continue
        items, good, own_status = answer
        if items:
            more = f"; and {len(items) - SHOWN_ITEMS} more" if len(items) > SHOWN_ITEMS else ""
            text = "; ".join(items[:SHOWN_ITEMS]) + more
            found.append(Statement(rule.code, own_status or status, text, items=tuple(items)))
        else:
            found.append(Statement(rule.code, PASS, good if notebook.records else "no level to judge"))
    return found


def tally_of(statements: Sequence[Statement]) -> dict[str, int]:
    """How many statements have each of a check's statuses."""
    return {status: sum(item.status == status for item in statements) for status in (PASS, WARN, FAIL)}


# ------------------------------------------------------------------------------------------------ the curve document

RANGED = ("output_tokens_per_s", "goodput_requests_per_s", "ttft_s.p50", "ttft_s.p90", "tpot_s.p50", "tpot_s.p90")


def curve_document(curve: Curve, notebook: Notebook | None = None) -> dict[str, Any]:
    """Everything that is said of one label: what --label L --json prints, what stands under "a" and "b" of --compare
    --json, and what every view shows. `notebook` adds its recovery lines, its path and its check.

    kind "curve" · tool_version · notebook (path) · label · answer {text, c, per_request_tokens_per_s, lower_bound,
    highest_measured, outside [c], runs}: the operating point in the reader's terms ·
    settings {engine, engine_version, model, prompt_set, prompt_text, host, quant, context_length, server_slots,
    max_tokens, temperature, slo_ttft_s, slo_tpot_s, extra_body, turns, duration_s, base_url, arrival, seed}: null
    where the notebook does not say · slo {ttft_s, tpot_s}: of the newest level ·
    levels: sorted by c, each {c; runs (how many); interrupted; left_out (why it enters no derived figure, or null);
    requests, completed, failed, output_tokens, within_slo, coalesced, wall_s, output_tokens_per_s, requests_per_s,
    goodput_requests_per_s, mean_in_flight, prompt_tokens_mean, cached_tokens_mean, steady_output_tokens_per_s,
    steady_window_s, tokens_per_delta, prefill_tokens_per_s: medians over the runs; ttft_s, tpot_s, e2e_s, connect_s,
    chunk_gap_s, output_tokens_per_request: {min, p50, p90, p95, p99, max, mean} of medians, or null; cached_share (0
    to 1); finish_reasons, errors, models {name: median count}; token_counts, by_turn, first_error: as the last run
    recorded them; server, client, ttft_split_s, drift, gpu: medians of the numbers in them, or null; scaling;
    decode_bound_output_tokens_per_s: n / (a + b n), n = min(c, slots); in_fit; slo {ttft_s, tpot_s} recorded with
    the level; meets_objective (null where it cannot be told); ranges {path: [lowest, highest]} where repeated;
    run_ids; lines (in the notebook); recorded_at; schema} ·
    fit {a_ms, b_ms, largest_residual (a share), b_interval_ms [low, high] or null, levels, ceiling_tokens_per_s,
    ceiling_note, c_at_slo, c_at_slo_note} or null · knee {between [c, c] or null, per_repeat [[c, c] or null, ...]} ·
    operating_point (c or null) · peak {c, output_tokens_per_s} or null ·
    statements [{code, status (READING or NOTE), levels, text, advice, values, certain}] ·
    check {statements [{code, status (PASS, WARN or FAIL), text, items}], pass, warn, fail}: of the whole notebook.

    Times are in seconds where a name ends in _s and in milliseconds where it ends in _ms; a figure that is not
    known is null, never 0.
    """
    notebook = notebook or Notebook("")
    peak = max(curve.rates, key=lambda point: point[1], default=None)
    return {
        "kind": "curve",
        "tool_version": TOOL_VERSION,
        "notebook": notebook.path,
        "label": curve.label,
        "answer": answer(curve),
        "settings": dict(curve.settings),
        "slo": {"ttft_s": curve.settings["slo_ttft_s"], "tpot_s": curve.settings["slo_tpot_s"]},
        "levels": [level_document(curve, level) for level in curve.levels],
        "fit": fit_document(curve),
        "knee": {
            "between": list(curve.knee) if curve.knee else None,
            "per_repeat": [list(knee) if knee else None for knee in curve.knee_per_repeat],
        },
        "operating_point": curve.operating_point,
        "peak": {"c": peak[0], "output_tokens_per_s": peak[1]} if peak else None,
        "statements": [
            {
                "code": item.code,
                "status": item.status,
                "levels": list(item.levels),
                "text": item.text,
                "advice": item.advice,
                "values": dict(item.values),
                "certain": item.certain,
            }
            for item in (*note_statements(notebook, curve), *read_curve(curve))
        ],
        "check": check_document(check(notebook)) if notebook.path else None,
    }


def level_document(curve: Curve, level: Level) -> dict[str, Any]:
    """One level for curve_document."""
    last = level.runs[-1].data
    out: dict[str, Any] = {
        "c": level.c,
        "runs": len(level.runs),
        "interrupted": level.interrupted,
        "left_out": level.left_out,
    }
    for item in FIELDS:
        if "level" not in item.use:
            continue
        if item.kind in ("count", "measure"):
            out[item.name] = whole_if_it_is(level.median(item.name))
        elif item.kind == "stats":
            block = {key: whole_if_it_is(level.median(f"{item.name}.{key}")) for key in STATISTICS}
            out[item.name] = block if any(value is not None for value in block.values()) else None
        elif item.kind == "tally":
            names = level.tally(item.name)
            counts = {
                name: statistics.median(int((run.raw(item.name) or {}).get(name, 0)) for run in level.runs)
                for name in names
            }
            out[item.name] = {name: whole_if_it_is(count) for name, count in counts.items() if count}
        elif item.kind == "block":
            out[item.name] = block_medians([run.data.get(item.name) for run in level.runs])
        else:
            out[item.name] = last.get(item.name)
    misses = level.slo_misses
    out.update(
        {
            "cached_share": level.cached_share,
            "scaling": curve.scaling(level),
            "decode_bound_output_tokens_per_s": curve.decode_bound(level.c),
            "in_fit": curve.fit is not None and level in curve.usable and level.c in curve.fit.levels,
            "slo": {"ttft_s": level.setting("slo_ttft_s"), "tpot_s": level.setting("slo_tpot_s")},
            "meets_objective": None if misses is None else not misses,
            "ranges": {path: list(limits) for path in RANGED if (limits := level.range(path))},
            "run_ids": list(dict.fromkeys(record.run for record in level.runs)),
            "lines": [record.line for record in level.runs],
            "recorded_at": last.get("recorded_at"),
            "schema": max(record.schema for record in level.runs),
        }
    )
    return out


def whole_if_it_is(value: float | None) -> float | None:
    """A median as a whole number where it is one: 40, not 40.0."""
    return int(value) if value is not None and float(value).is_integer() else value


def block_medians(blocks: Sequence[Any]) -> Any:
    """One block of several runs' (server, client, ...): the median of each number, what is no number as the last run
    has it; None where no run has the block."""
    known = [block for block in blocks if block is not None]
    if not known:
        return None
    if all(isinstance(block, Mapping) for block in known):
        keys = dict.fromkeys(key for block in known for key in block)
        return {key: block_medians([block.get(key) for block in known]) for key in keys}
    numbers = [number for block in known if (number := as_number(block)) is not None]
    return whole_if_it_is(statistics.median(map(float, numbers))) if len(numbers) == len(known) else known[-1]


def fit_document(curve: Curve) -> dict[str, Any] | None:
    """The TPOT fit for curve_document, and how far what it implies can be taken; None where there are too few
    points."""
    fit, slo = curve.fit, curve.settings["slo_tpot_s"]
    if fit is None:
        return None
    low, high = fit.levels[0], fit.levels[-1]
    not_shown = (
        f"not stated: b is not above what the fit misses a level by ({fit.largest_residual:.1%}), or not above 0"
    )
    ceiling, at = fit.ceiling, fit.c_at(slo)
    ceiling_note = at_note = None if fit.grows else not_shown
    if ceiling is not None:
        ceiling_note = f"extrapolated, measured {low} to {high}"
        if curve.slots is not None:
            ceiling_note += f"; not reached: only {counted(curve.slots, 'slot')} decode together"
    if at is not None and at <= 0:
        at, at_note = None, "met at no c: the SLO is below a"
    elif at is not None:
        notes = [f"extrapolated, measured {low} to {high}"] if not low <= at <= high else []
        if curve.slots is not None and at > curve.slots:
            notes.append(f"not reached: only {counted(curve.slots, 'slot')} decode together")
        at_note = "; ".join(notes) or None
    elif slo is None:
        at_note = "no TPOT SLO is recorded"
    return {
        "a_ms": fit.a_ms,
        "b_ms": fit.b_ms,
        "largest_residual": fit.largest_residual,
        "b_interval_ms": list(fit.b_interval_ms) if fit.b_interval_ms else None,
        "levels": list(fit.levels),
        "ceiling_tokens_per_s": ceiling,
        "ceiling_note": ceiling_note,
        "c_at_slo": at,
        "c_at_slo_note": at_note,
    }


def answer(curve: Curve) -> dict[str, Any]:
    """How many requests in flight stay inside the SLO, and what each then gets, in a sentence with its conditions."""
    tried = [level for level in curve.levels if not level.interrupted]
    outside = [level for level in tried if level.slo_misses]
    found: dict[str, Any] = {
        "text": "",
        "c": curve.operating_point,
        "per_request_tokens_per_s": None,
        "lower_bound": None,
        "highest_measured": tried[-1].c if tried else None,
        "outside": [level.c for level in outside],
        "runs": None,
    }
    if not any(level.median("completed") for level in tried):
        found["text"] = "No whole level has a completed request, so the curve answers nothing."
    elif curve.operating_point is None and not outside:
        found["text"] = (
            "No SLO is recorded with the levels, so none can be said to stay inside it (--slo-ttft, --slo-tpot)."
        )
    elif curve.operating_point is None:
        lowest = outside[0]
        misses = " and ".join(lowest.slo_misses or [])
        found["text"] = f"No level measured stays inside {slo_text(lowest)}: at c={lowest.c} {misses}."
    else:
        found.update(answer_at(next(level for level in tried if level.c == curve.operating_point), tried, outside))
    return found


def answer_at(level: Level, tried: Sequence[Level], outside: Sequence[Level]) -> dict[str, Any]:
    """The answer where there is an operating point."""
    rate = level.median("output_tokens_per_s")
    each = None if rate is None else rate / level.c
    above = [other for other in outside if other.c > level.c]
    below = [other.c for other in outside if other.c < level.c]
    runs = len(level.runs)
    text = f"{'Up to' if above else 'At least'} {counted(level.c, 'request')} in flight "
    text += f"{'stays' if level.c == 1 else 'stay'} inside {slo_text(level)} (p90)"
    text += "" if each is None else f", each then getting {each:.1f} tokens/s"
    if above:
        text += f"; {above[0].c} does not ({' and '.join(above[0].slo_misses or [])})"
    else:
        text += (
            "; no higher level was measured against it, so this is a lower bound"
            if (tried[-1].c > level.c)
            else f"; {level.c} is the highest level measured, so this is a lower bound"
        )
    text += f"; yet c={c_list(below)} did not" if below else ""
    text += f" ({counted(runs, 'run')} of that level{', run-to-run variance unknown' if runs == 1 else ''})."
    return {"text": text, "per_request_tokens_per_s": each, "lower_bound": not above, "runs": runs}


def slo_text(level: Level) -> str:
    """The SLO recorded with a level."""
    ttft, tpot = level.setting("slo_ttft_s"), level.setting("slo_tpot_s")
    parts = [f"TTFT {ttft:g} s"] if ttft is not None else []
    parts += [f"TPOT {1000 * tpot:g} ms"] if tpot is not None else []
    return " and ".join(parts) or "an SLO that is not recorded"


def check_document(statements: Sequence[Statement]) -> dict[str, Any]:
    """A check's statements and their counts."""
    return {
        "statements": [
            {"code": item.code, "status": item.status, "text": item.text, "items": list(item.items)}
            for item in statements
        ],
        **{status.lower(): count for status, count in tally_of(statements).items()},
    }


def compare_document(notebook: Notebook, a: Curve, b: Curve) -> dict[str, Any]:
    """What --compare A B --json prints: kind "compare" · tool_version · notebook · a, b: curve documents · levels
    [{c, output_tokens_per_s {a, b, ratio, low, high, different (true, false, or null for no verdict), a_runs, b_runs},
    and {a, b} of each other figure by its dotted path}] · statements [{code, text, values}].

    Raises ResultError where no level of both has a completed request.
    """
    ours, theirs = ({level.c: level for level in curve.usable} for curve in (a, b))
    rows = []
    for c in sorted(ours.keys() & theirs.keys()):
        row: dict[str, Any] = {"c": c, "output_tokens_per_s": compare_rates(ours[c], theirs[c])}
        for column in COLUMNS:
            if "compared" in column.flags and column.path != "output_tokens_per_s":
                row[column.path] = {"a": ours[c].median(column.path), "b": theirs[c].median(column.path)}
        rows.append(row)
    if not rows:
        raise ResultError(
            f"{as_word(a.label)} (c={c_list(ours) or 'none'}) and {as_word(b.label)} "
            f"(c={c_list(theirs) or 'none'}) have no level with a completed request in common"
        )
    return {
        "kind": "compare",
        "tool_version": TOOL_VERSION,
        "notebook": notebook.path,
        "a": curve_document(a, notebook),
        "b": curve_document(b, notebook),
        "levels": rows,
        "statements": [
            {"code": item.code, "text": item.text, "values": dict(item.values)}
            for item in compare_statements(a, b, rows)
        ],
    }


def compare_rates(a: Level, b: Level) -> dict[str, Any]:
    """Output throughput of one level of two labels, and whether their runs show a difference."""
    values = [level.values("output_tokens_per_s") for level in (a, b)]
    medians = [level.median("output_tokens_per_s") for level in (a, b)]
    interval = ratio_interval(*values)
    plain = medians[1] / medians[0] if medians[0] and medians[1] is not None else None
    return {
        "a": medians[0],
        "b": medians[1],
        "ratio": interval.ratio if interval else plain,
        "low": interval.low if interval else None,
        "high": interval.high if interval else None,
        "different": interval.different if interval else None,
        "a_runs": len(values[0]),
        "b_runs": len(values[1]),
    }


def compare_statements(a: Curve, b: Curve, rows: Sequence[Mapping[str, Any]]) -> list[Statement]:
    """Settings that differ, levels that only one has, and what the runs show."""
    found = []
    for name in COMPARED:
        one, other = a.settings[name], b.settings[name]
        texts = [setting_text(value, name) for value in (one, other)]
        if texts[0] != texts[1]:
            text = f"{name} differs: {texts[0]} and {texts[1]}"
            found.append(Statement("setting", NOTE, text, values={"name": name, "a": one, "b": other}))
        elif name == "prompt_text" and one is None:
            found.append(Statement("setting", NOTE, "prompt_text: text not recorded on either side"))
    ours, theirs = ({level.c: level for level in curve.levels} for curve in (a, b))
    for curve, opposite in ((a, b), (b, a)):
        measured_there = {level.c for level in opposite.levels}
        only = [level.c for level in curve.levels if level.c not in measured_there]
        if only:
            found.append(Statement("only_in", NOTE, f"only in {as_word(curve.label)}: c={c_list(only)}", tuple(only)))
    compared = [row["c"] for row in rows]
    for c in ours:
        if c in theirs and c not in compared:
            sides = ((as_word(a.label), ours[c].left_out), (as_word(b.label), theirs[c].left_out))
            reasons = ", ".join(f"{label}: {reason}" for label, reason in sides if reason)
            found.append(Statement("left_out", NOTE, f"c={c} is not compared ({reasons})", (c,)))
    for row in rows:
        prompts = change(ours[row["c"]], theirs[row["c"]], "prompt_tokens_mean")
        if prompts is not None and abs(prompts.times - 1) > PROMPT_GAP:
            text = f"prompt tokens differ at c={row['c']}: B's are {prompts.times:.2f} times A's on average"
            found.append(Statement("prompt_tokens", NOTE, text, (row["c"],)))
    if all(max(row["output_tokens_per_s"][f"{side}_runs"] for side in "ab") < 2 for row in rows):
        found.append(Statement("single_runs", NOTE, SINGLE_RUNS))
    else:
        found += [Statement("ratio", NOTE, ratio_text(row), (row["c"],)) for row in rows]
    remarks = dict.fromkeys((*a.remarks, *b.remarks))
    return found + [Statement("remark", NOTE, text) for text in remarks]


PROMPT_GAP = 0.02  # of the mean prompt: more is other text or another template


def ratio_text(row: Mapping[str, Any]) -> str:
    """The verdict on one level's output throughput in a sentence."""
    rate = row["output_tokens_per_s"]
    runs = f"{rate['a_runs']} against {counted(rate['b_runs'], 'run')}"
    if rate["different"] is None:
        return f"at c={row['c']}: B/A {shown(rate['ratio'], 2)} ({runs}): no verdict, each side needs two runs"
    verdict = "different" if rate["different"] else "no difference shown"
    limits = f"95 % {rate['low']:.2f} to {rate['high']:.2f}"
    return f"at c={row['c']}: B/A {rate['ratio']:.2f} ({limits}, {runs}): {verdict}"


def list_document(notebook: Notebook) -> dict[str, Any]:
    """What --list --json prints: kind "list" · tool_version · notebook · labels [{label, word (as --list shows it),
    levels, interrupted, runs (the most of any level), settings, last}]."""
    labels = []
    records = notebook.by_label()
    for label, curve in notebook.curves.items():
        labels.append(
            {
                "label": label,
                "word": as_word(label),
                "levels": [level.c for level in curve.levels if not level.interrupted],
                "interrupted": [level.c for level in curve.levels if level.interrupted],
                "runs": max(len(level.runs) for level in curve.levels),
                "settings": dict(curve.settings),
                "last": newest_date(records[label]),
            }
        )
    return {"kind": "list", "tool_version": TOOL_VERSION, "notebook": notebook.path, "labels": labels}


def runs_document(notebook: Notebook, name: str) -> dict[str, Any]:
    """What --label L --runs --json prints: kind "runs" · tool_version · notebook · label · runs [{run, levels,
    repeats, interrupted, last, counts_at (the levels at which --label shows this run), settings}], in file order."""
    curve = find_curve(notebook, name)
    counts = {(record.run, level.c) for level in curve.levels for record in level.runs}
    by_run: dict[str, list[Record]] = {}
    for record in notebook.by_label().get(curve.label, []):
        by_run.setdefault(record.run, []).append(record)
    runs = []
    for run, records in by_run.items():
        one = build_curve(curve.label, records)
        runs.append(
            {
                "run": run,
                "levels": [level.c for level in one.levels if not level.interrupted],
                "interrupted": [level.c for level in one.levels if level.interrupted],
                "repeats": max(len(level.runs) for level in one.levels),
                "last": newest_date(records),
                "counts_at": [level.c for level in one.levels if (run, level.c) in counts],
                "settings": dict(one.settings),
            }
        )
    return {
        "kind": "runs",
        "tool_version": TOOL_VERSION,
        "notebook": notebook.path,
        "label": curve.label,
        "runs": runs,
    }


def newest_date(records: Iterable[Record]) -> str | None:
    """`recorded_at` of the newest line, whether it counts or not."""
    dated = [(record.instant, str(record.data["recorded_at"])) for record in records if record.instant is not None]
    return max(dated)[1] if dated else None


UNREADABLE = "UNREADABLE"


def notebook_verdict(notebook: Notebook, statements: Sequence[Statement]) -> dict[str, Any]:
    """A check's result on one notebook: {notebook, verdict, error (why it could not be read, or null), baselines
    [{label, operating_point, knee, a, b}], failed_rules; statements, pass, warn, fail: see curve_document}."""
    counts = tally_of(statements)
    baselines = []
    for label, curve in notebook.curves.items():
        if not missing_levels([level for level in curve.levels if level.setting("prompt_set") == "mixed"]):
            baselines.append(
                {
                    "label": label,
                    "operating_point": curve.operating_point,
                    "knee": list(curve.knee) if curve.knee else None,
                    "a": curve.fit.a_ms if curve.fit else None,
                    "b": curve.fit.b_ms if curve.fit else None,
                }
            )
    return {
        "notebook": notebook.path,
        "verdict": next((status for status in (FAIL, WARN) if counts[status]), PASS),
        "error": None,
        "baselines": baselines,
        "failed_rules": [item.code for item in statements if item.status == FAIL],
        **check_document(statements),
    }


def check_class(paths: Sequence[str], raw: RawFile | None) -> list[dict[str, Any]]:
    """A verdict on each of several notebooks, and on what they share: level lines with equal figures, whatever was
    renamed around them, fail both places."""
    results = []
    places: dict[Any, list[tuple[int, str]]] = {}  # fingerprint -> (index of the notebook, where in it)
    for index, path in enumerate(paths):
        try:
            notebook = read_notebook(path)
        except UserError as error:
            results.append({**notebook_verdict(Notebook(path), []), "verdict": UNREADABLE, "error": str(error)})
            continue
        report(path, notebook.remarks)
        results.append(notebook_verdict(notebook, check(notebook, raw)))
        for record in notebook.records:
            mark = fingerprint(record)
            if mark is not None and tells_a_copy(latency_figures(record)):
                place = f"{printable(path)} line {record.line} ({as_word(record.label)} c={record.concurrency})"
                places.setdefault(mark, []).append((index, place))
    shared: dict[int, list[str]] = {}
    for found in places.values():
        for index, place in found:
            other = next((elsewhere for other_index, elsewhere in found if other_index != index), None)
            if other is not None:
                shared.setdefault(index, []).append(f"{place} has the figures of {other}")
    for index, items in shared.items():
        statement = Statement("copied", FAIL, "; ".join(items[:SHOWN_ITEMS]), items=tuple(items))
        result = results[index]
        result["statements"] += check_document([statement])["statements"]
        result.update(verdict=FAIL, fail=result["fail"] + 1, failed_rules=[*result["failed_rules"], "copied"])
    return results


# ------------------------------------------------------------------------------------------------------------- views


class Column(NamedTuple):
    """A figure that tables show: heading, dotted path in a level of the document, decimals, and where it stands."""

    heading: str
    path: str
    decimals: int
    flags: str


COLUMNS = (
    Column("out tok/s", "output_tokens_per_s", 1, "table compared"),
    Column("scaling", "scaling", 2, "table"),
    Column("req/s", "requests_per_s", 3, "table"),
    Column("goodput", "goodput_requests_per_s", 3, "table compared"),
    Column("TTFT p50", "ttft_s.p50", 3, "table compared"),
    Column("TTFT p90", "ttft_s.p90", 3, "table compared"),
    Column("TPOT p50", "tpot_s.p50", 4, "table compared"),
    Column("TPOT p90", "tpot_s.p90", 4, "table"),
    Column("in flight", "mean_in_flight", 1, "table"),
    Column("cached", "cached_tokens_mean", 1, "table compared"),
)
BAR_WIDTH = 40
COLOURS = {"good": "\033[32m", "bad": "\033[31m", "plain": "\033[36m", "off": "\033[0m"}

Document = Mapping[str, Any]


def printable(text: object) -> str:
    r"""A text that cannot act on a terminal or break a line: unprintable characters as escapes.

    >>> printable("a\x1b[31m\u2028b")
    'a\\x1b[31m\\u2028b'
    """
    return "".join(ch if ch.isprintable() else ch.encode("unicode_escape").decode() for ch in str(text))


def as_word(label: str) -> str:
    """A label as one word: white space, "%" and unprintable characters as %XX.

    >>> as_word("llama-baseline"), as_word("my run"), as_word("")
    ('llama-baseline', 'my%20run', '""')
    """
    parts = [
        ch
        if ch.isprintable() and not ch.isspace() and ch != "%"
        else "".join(f"%{byte:02X}" for byte in ch.encode("utf-8", "surrogatepass"))
        for ch in label
    ]
    return "".join(parts) or '""'


def setting_text(value: Any, name: str = "") -> str:
    """A setting for people; "unknown" where the notebook does not say."""
    if isinstance(value, (dict, list)):
        return printable(json.dumps(value, sort_keys=True, ensure_ascii=False))
    if value is None:
        return "text not recorded" if name == "prompt_text" else "unknown"
    return printable(value)


def c_list(levels: Iterable[int]) -> str:
    return ",".join(map(str, levels))


def shown(value: float | None, decimals: int) -> str:
    """
    >>> shown(46.5116, 1), shown(None, 1)
    ('46.5', '-')
    """
    return "-" if value is None else f"{value:.{decimals}f}"


def at_path(level: Document, path: str) -> Any:
    """A figure of a level document by its dotted path."""
    if path in level:
        return level[path]
    block, _, key = path.partition(".")
    return (level.get(block) or {}).get(key)


def align(rows: Sequence[Sequence[str]], tails: Sequence[str] = ()) -> list[str]:
    """Rows as lines: the first column to the left, the others to the right, then a tail as it is.

    >>> align([["c", "ok"], ["10", "40/40"]])
    ['c      ok', '10  40/40']
    """
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return [
        "  ".join([row[0].ljust(widths[0]), *(text.rjust(width) for text, width in zip(row[1:], widths[1:])), *tail])
        for row, tail in zip(rows, [[text] for text in tails] or [[]] * len(rows))
    ]


def markdown_table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Rows as a Markdown table; figures to the right."""
    lines = [f"| {' | '.join(text.replace('|', chr(92) + '|') for text in row)} |" for row in rows]
    return [lines[0], "|" + " ---: |" * len(rows[0]), *lines[1:]]


def markdown_text(text: str) -> str:
    r"""
    >>> markdown_text("a*b <c>")
    'a\\*b \\<c>'
    """
    return re.sub(r"([\\`*<|])", r"\\\1", text)


def heading_lines(doc: Document) -> list[str]:
    """What was measured, in two lines."""
    text = {name: setting_text(value) for name, value in doc["settings"].items()}
    what = f"{text['engine']} {text['engine_version']}, model {text['model']}, prompt set {text['prompt_set']}"
    setup = (
        f"host {text['host']}, quant {text['quant']}, context {text['context_length']}, slots {text['server_slots']}"
    )
    slo = f"SLO TTFT {text['slo_ttft_s']} s, TPOT {text['slo_tpot_s']} s"
    return [f"{as_word(doc['label'])}: {what}, max tokens {text['max_tokens']}", f"{setup}, {slo}"]


def table_rows(doc: Document) -> list[list[str]]:
    """The level table, heading first; every row begins with its c. `ok` is one word, completed of asked."""
    columns = [column for column in COLUMNS if "table" in column.flags]
    rows = [["c", "ok", *(column.heading for column in columns)]]
    for level in doc["levels"]:
        asked, done = ("?" if level[name] is None else f"{level[name]:g}" for name in ("requests", "completed"))
        cut = "(interrupted)" if level["interrupted"] else ""
        cells = (shown(at_path(level, column.path), column.decimals) for column in columns)
        rows.append([str(level["c"]), f"{done}/{asked}{cut}", *cells])
    return rows


def range_lines(doc: Document) -> list[str]:
    """For levels that were run several times: the range behind each median."""
    lines = []
    for level in doc["levels"]:
        parts = [
            f"{column.heading} {' to '.join(shown(limit, column.decimals) for limit in level['ranges'][column.path])}"
            for column in COLUMNS
            if column.path in level["ranges"]
        ]
        if parts:
            lines.append(f"range at c={level['c']} over {level['runs']} runs: {', '.join(parts)}")
    return lines


def bar_lines(doc: Document, colour: bool) -> list[str]:
    """Bars for throughput and TPOT p90, green inside the level's SLO and red outside when in colour."""
    lines = []
    for title, path, decimals in (("out tok/s", "output_tokens_per_s", 1), ("TPOT p90 s", "tpot_s.p90", 4)):
        values = [(level, at_path(level, path)) for level in doc["levels"]]
        top = max((value for _, value in values if value), default=None)
        if top is None:
            continue
        lines.append(title)
        for level, value in values:
            bar = "#" * max(round(BAR_WIDTH * value / top), 1 if value else 0) if value is not None else ""
            paint, slo = "plain", level["slo"]["tpot_s"]
            if path == "tpot_s.p90" and slo is not None and value is not None:
                paint = "good" if value <= slo else "bad"
            drawn = f"{COLOURS[paint]}{bar}{COLOURS['off']}" if colour and bar else bar
            lines.append(f"  c={level['c']:<5}{drawn}{' ' if bar else ''}{shown(value, decimals)}")
    return lines


def knee_line(doc: Document) -> str:
    rated = [level for level in doc["levels"] if not level["left_out"] and level["output_tokens_per_s"] is not None]
    between, knees = doc["knee"]["between"], doc["knee"]["per_repeat"]
    if len(rated) < 2:
        return "knee: not enough points (it needs two levels with a completed request)"
    agree = f" ({knees.count(between)} of {len(knees)} runs agree)" if knees else ""
    if between is None:
        return f"knee: not reached up to c={rated[-1]['c']}{agree}"
    return f"knee: between c={between[0]} and c={between[1]}{agree}"


def fit_lines(doc: Document) -> list[str]:
    """The TPOT fit, what it implies, and the decode-bound beside the measured throughput."""
    fit, slots = doc["fit"], doc["settings"]["server_slots"]
    if fit is None:
        within = f" at or below {counted(slots, 'slot')}" if slots else ""
        return [f"TPOT fit: not enough points (it needs two different levels{within} with a TPOT)"]
    details = [f"levels {c_list(fit['levels'])}"]
    if fit["b_interval_ms"] is None:
        details.append("two levels: a line through both, no interval")
    else:
        low, high = fit["b_interval_ms"]
        details.append(f"largest residual {fit['largest_residual']:.1%}, 95 % interval for b {low:.3f} to {high:.3f}")
    sign = "+" if fit["b_ms"] >= 0 else "-"
    lines = [f"TPOT p50 ~ {fit['a_ms']:.2f} ms {sign} {abs(fit['b_ms']):.3f} ms x c  ({', '.join(details)})"]
    if fit["a_ms"] < 0:
        lines.append("a is below 0, so no step time: the line does not hold near c = 0")
    ceiling, at, slo = fit["ceiling_tokens_per_s"], fit["c_at_slo"], doc["slo"]["tpot_s"]
    if ceiling is None:
        lines.append(f"ceiling: none implied ({fit['ceiling_note']})")
    else:
        lines.append(f"ceiling {ceiling:.1f} tok/s (1/b; {fit['ceiling_note']})")
        note = f" ({fit['c_at_slo_note']})" if fit["c_at_slo_note"] else ""
        if slo is not None:
            lines.append(f"TPOT SLO {1000 * slo:g} ms" + (f" met at c = {at:.1f}{note}" if at is not None else note))
    lines.append(
        "decode-bound throughput, if every request were always decoding (prefill and waiting lower the measured one):"
    )
    for level in doc["levels"]:
        if level["left_out"]:
            continue
        bound, rate = level["decode_bound_output_tokens_per_s"], level["output_tokens_per_s"]
        only = f" ({counted(slots, 'slot')} decode together)" if slots is not None and level["c"] > slots else ""
        lines.append(f"  c={level['c']}: {shown(bound, 1)} tok/s, measured {shown(rate, 1)}{only}")
    return lines


def operating_line(doc: Document) -> str:
    if doc["operating_point"] is not None:
        return f"operating point: c={doc['operating_point']} (highest with no failure, both p90s inside its SLO)"
    if all(level["meets_objective"] is None for level in doc["levels"]):
        return "operating point: none, no SLO is recorded"
    return "operating point: none (no level is without failure and inside its SLO)"


def statement_lines(doc: Document, status: str) -> list[str]:
    """One line per statement: the evidence (at its highest level), where else it shows, and one thing to try."""
    lines = []
    for item in doc["statements"]:
        if item["status"] == status:
            c = item["values"].get("c")
            also = [level for level in item["levels"] if c is not None and level != c]
            named = f" (also at c={c_list(also)})" if also else ""
            lines.append(f"{item['text']}{named}{'. Try: ' + item['advice'] if item['advice'] else ''}")
    return lines


def label_text(doc: Document, colour: bool) -> str:
    """The whole view of one label for a terminal."""
    lines = [doc["answer"]["text"], "", *heading_lines(doc), "", *align(table_rows(doc)), "TTFT and TPOT in seconds"]
    lines += [*range_lines(doc), "", *bar_lines(doc, colour), ""]
    lines += [knee_line(doc), *fit_lines(doc), operating_line(doc)]
    for title, status in (("notes", NOTE), ("reading", READING)):
        found = statement_lines(doc, status)
        lines += ["", title, *(f"  {line}" for line in found)] if found else []
    return "\n".join(lines) + "\n"


def label_markdown(doc: Document) -> str:
    """The same as Markdown, to paste into the notebook's prose (a pasted table is never a record)."""
    title, setup = (markdown_text(line) for line in heading_lines(doc))
    lines = [f"### {title}", "", markdown_text(doc["answer"]["text"]), "", setup, ""]
    lines += [*markdown_table(table_rows(doc)), "", "TTFT and TPOT in seconds.", ""]
    facts = [*range_lines(doc), knee_line(doc), *fit_lines(doc), operating_line(doc)]
    facts += [*statement_lines(doc, NOTE), *statement_lines(doc, READING)]
    return "\n".join(lines + [f"- {markdown_text(line.strip())}" for line in facts]) + "\n"


def list_text(doc: Document) -> str:
    """One line per label, in file order."""
    rows = [
        [
            entry["word"],
            setting_text(entry["settings"]["engine"]),
            setting_text(entry["settings"]["prompt_set"]),
            levels_text(entry),
            f"last {(entry['last'] or 'unknown')[:10]}",
        ]
        for entry in doc["labels"]
    ]
    return "\n".join([f"==> {len(rows)} label(s) in {printable(doc['notebook'])}", *left_aligned(rows)]) + "\n"


def runs_text(doc: Document) -> str:
    """One line per run of a label, in file order."""
    rows = [
        [
            printable(entry["run"]),
            f"{counted(entry['repeats'], 'repeat')}",
            levels_text(entry),
            f"last {(entry['last'] or 'unknown')[:19]}",
            f"shown at c={c_list(entry['counts_at'])}" if entry["counts_at"] else "older",
        ]
        for entry in doc["runs"]
    ]
    head = f"==> {len(rows)} run(s) of {as_word(doc['label'])} in {printable(doc['notebook'])}"
    return "\n".join([head, *left_aligned(rows)]) + "\n"


def levels_text(entry: Document) -> str:
    cut = f" interrupted {c_list(entry['interrupted'])}" if entry["interrupted"] else ""
    return f"levels {c_list(entry['levels']) or 'none'}{cut}"


def left_aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]) - 1)] if rows else []
    return ["  ".join([*(text.ljust(width) for text, width in zip(row, widths)), row[-1]]) for row in rows]


def compare_text(doc: Document, markdown: bool) -> str:
    """Two labels side by side; A / B in one cell where both are shown."""
    columns = [column for column in COLUMNS[1:] if "compared" in column.flags]
    table = [["c", "A tok/s", "B tok/s", "B/A", *(f"{column.heading} A / B" for column in columns)]]
    for row in doc["levels"]:
        rate = row["output_tokens_per_s"]
        cells = [shown(rate["a"], 1), shown(rate["b"], 1), shown(rate["ratio"], 2)]
        for column in columns:
            cells.append(" / ".join(shown(row[column.path][side], column.decimals) for side in "ab"))
        table.append([str(row["c"]), *cells])
    heads = [f"{side.upper()} = {heading_lines(doc[side])[0]}" for side in "ab"]
    notes = [item["text"] for item in doc["statements"]]
    if markdown:
        lines = [*(f"- {markdown_text(line)}" for line in heads), "", *markdown_table(table), ""]
        return "\n".join(lines + [f"- {markdown_text(note)}" for note in notes]) + "\n"
    return "\n".join([*heads, "", *align(table), "TTFT and TPOT in seconds", *notes]) + "\n"


def check_lines(doc: Document) -> list[str]:
    """One line per rule, then the count."""
    lines = [f"{item['status']}  {item['code']}: {printable(item['text'])}" for item in doc["statements"]]
    return [*lines, f"{doc['pass']} pass, {doc['warn']} warn, {doc['fail']} fail"]


def class_text(files: Sequence[Document], details: bool) -> str:
    """A verdict per notebook in a table, then the rules of those that failed, or of all."""
    table = [["verdict", "pass", "warn", "fail", "notebook: baselines (operating point, knee, a, b), failed rules"]]
    tails = []
    for item in files:
        told = [
            f"{as_word(curve['label'])} ({'none' if curve['operating_point'] is None else curve['operating_point']}, "
            f"{'none' if curve['knee'] is None else '-'.join(map(str, curve['knee']))}, "
            f"{shown(curve['a'], 2)}, {shown(curve['b'], 3)})"
            for curve in item["baselines"]
        ]
        failed = f"; failed: {', '.join(item['failed_rules'])}" if item["failed_rules"] else ""
        said = printable(item["error"]) if item["error"] else f"{', '.join(told) or 'no whole baseline'}{failed}"
        table.append([item["verdict"], *(str(item[key]) for key in ("pass", "warn", "fail"))])
        tails.append(f"{printable(item['notebook'])}: {said}")
    lines = align([row[:4] for row in table], [table[0][4], *tails])
    for item in files:
        if item["verdict"] == FAIL or (details and not item["error"]):
            lines += ["", f"==> {printable(item['notebook'])}", *check_lines(item)]
    counts = (f"{sum(item['verdict'] == verdict for item in files)} {verdict}" for verdict in (PASS, WARN, FAIL))
    unread = sum(item["verdict"] == UNREADABLE for item in files)
    return "\n".join([*lines, "", ", ".join([*counts, *([f"{unread} {UNREADABLE}"] if unread else [])])]) + "\n"


def flatten(value: Any, prefix: str = "") -> dict[str, Any]:
    """Nested objects as one row with dotted names; lists as compact JSON.

    >>> flatten({"a": 1, "b": {"c": None, "d": [1, 2]}})
    {'a': 1, 'b.c': None, 'b.d': '[1, 2]'}
    """
    if isinstance(value, Mapping):
        row: dict[str, Any] = {}
        for key, inner in value.items():
            row.update(flatten(inner, f"{prefix}.{key}" if prefix else str(key)))
        return row
    return {prefix: json.dumps(value) if isinstance(value, list) else value}


def to_csv(rows: Sequence[Mapping[str, Any]]) -> str:
    """Rows as CSV with a heading; an unknown figure is an empty cell. Columns are those of any row, in order."""
    flat = [flatten(null_if_not_finite(row)) for row in rows]
    out = io.StringIO()
    writer = csv.DictWriter(out, list(dict.fromkeys(key for row in flat for key in row)), lineterminator="\n")
    writer.writeheader()
    writer.writerows(flat)
    return out.getvalue()


def level_rows(doc: Document) -> list[dict[str, Any]]:
    """One row per level for the CSV: the label and every figure. Missing blocks give empty cells."""
    rows = []
    for level in doc["levels"]:
        row = {"label": doc["label"], **level}
        for item in FIELDS:
            if "level" in item.use and item.kind == "stats":
                row[item.name] = row[item.name] or dict.fromkeys(STATISTICS)
            elif "level" in item.use and item.kind in ("tally", "block", "any"):
                row[item.name] = json.dumps(row[item.name]) if row[item.name] else None
        rows.append({**row, "ranges": json.dumps(row["ranges"]) if row["ranges"] else None})
    return rows


def class_rows(files: Sequence[Document]) -> list[dict[str, Any]]:
    """One row per notebook for the CSV."""
    keys = ("notebook", "verdict", "error", "pass", "warn", "fail", "failed_rules", "baselines")
    return [{key: item[key] for key in keys} for item in files]


def to_json(value: Any) -> str:
    """Strict JSON, indented."""
    return json.dumps(null_if_not_finite(value), indent=2, allow_nan=False) + "\n"


def null_if_not_finite(value: Any) -> Any:
    """A document for output, where a quotient that ran out of a float's range is null.

    >>> null_if_not_finite({"a": [1.5, float("inf")]})
    {'a': [1.5, None]}
    """
    if isinstance(value, Mapping):
        return {key: null_if_not_finite(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [null_if_not_finite(inner) for inner in value]
    if not isinstance(value, float):
        return value
    return value if math.isfinite(value) else None


# ---------------------------------------------------------------------------------------------- writing the notebook


NOT_SUMMED = ("prompt_text", "extra_body", "turns", "duration_s", "seed")  # settings that a summary leaves out


def summary_record(curve: Curve, now: datetime) -> dict[str, Any]:
    """The curve-summary line that --record appends."""
    fit = curve.fit
    record: dict[str, Any] = {name: curve.settings[name] for name in SETTINGS if name not in NOT_SUMMED}
    record.update(
        {
            "lab": LAB,
            "record": "curve-summary",
            "schema": KNOWN_SCHEMAS[-1],
            "tool_version": TOOL_VERSION,
            "label": curve.label,
            "recorded_at": now.astimezone().isoformat(timespec="seconds"),
            "levels": [level.c for level in curve.usable],
            "knee_between": list(curve.knee) if curve.knee else None,
            "operating_point": curve.operating_point,
            "peak_output_tokens_per_s": round(max(rate for _, rate in curve.rates), 2) if curve.rates else None,
            "tpot_fit_ms": {"a": round(fit.a_ms, 3), "b": round(fit.b_ms, 4)} if fit else None,
        }
    )
    return record


def wait_for_lock(handle: int) -> None:
    """Lock a file, where the system has locks. Raises OSError where another process keeps it for LOCK_WAIT_S."""
    end = time.monotonic() + LOCK_WAIT_S
    while fcntl is not None:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() >= end:
                raise OSError(f"another program has kept it locked for {LOCK_WAIT_S:g} s") from None
        except OSError:  # some network file systems have no locks
            return
        time.sleep(0.02)


def append_line(path: str, line: str) -> None:
    """Append one line: line and newline in one O_APPEND write, under a lock where there is one, flushed to disk; a
    file that does not end in a newline gets one first, one that is not there is made. Raises OSError, also where not
    all of it could be written: then a file is as long as it was before."""
    handle = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | getattr(os, "O_BINARY", 0), 0o666)
    try:
        wait_for_lock(handle)
        on_disk = stat.S_ISREG(os.fstat(handle).st_mode)  # a terminal or a pipe has no disk to reach
        size = os.fstat(handle).st_size
        data = line.encode() + b"\n"
        if size > 0:
            os.lseek(handle, size - 1, os.SEEK_SET)
            if os.read(handle, 1) != b"\n":
                data = b"\n" + data
        if os.write(handle, data) != len(data):
            if on_disk:
                os.ftruncate(handle, size)  # half a record is damage to whoever reads the file
            raise OSError("the disk took only a part of the line")
        if on_disk:
            os.fsync(handle)
    finally:
        os.close(handle)


def append_record(path: str, record: Mapping[str, Any]) -> None:
    """Append a record, or print it on standard output, so that it is not lost, and raise ResultError."""
    line = json.dumps(record, sort_keys=True, allow_nan=False)
    try:
        append_line(path, line)
    except OSError as error:
        reason = error.strerror or error
        try:
            write_out(line + "\n")
        except ResultError as lost:
            raise ResultError(f"cannot append to {path}: {reason}; nor is the line printed: {lost}") from None
        raise ResultError(f"cannot append to {path}: {reason}; the line is on standard output") from None


# ------------------------------------------------------------------------------------------------------ command line


@dataclass(frozen=True)
class Options:
    """The command line, once."""

    labbook: str
    label: str | None
    runs: bool
    compare: tuple[str, str] | None
    check: tuple[str, ...] | None  # the notebooks and folders to check
    details: bool
    record: bool
    form: str  # text, markdown, json or csv
    raw: str | None


class Parser(argparse.ArgumentParser):
    """argparse whose errors are one line, raised, and whose help and version go out as every other output does."""

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message} ({PROGRAM} --help shows the options)")

    def _print_message(self, message: str, file: object = None) -> None:
        write_out(message)


def build_parser() -> Parser:
    parser = Parser(
        prog=PROGRAM, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--labbook", metavar="FILE", default="labbook.md", help="the notebook (default %(default)s)")
    what = parser.add_argument_group("what to show (one of them; the default is --list)")
    what.add_argument("--list", action="store_true", help="the labels in the notebook")
    what.add_argument("--label", metavar="L", help="one label's curve; L@RUN for one run of it")
    what.add_argument("--compare", nargs=2, metavar=("A", "B"), help="two labels, level by level")
    what.add_argument(
        "--check",
        nargs="*",
        metavar="FILE",
        help="check the notebook, or each FILE and each *.md with a record below a folder; with --label, one label",
    )
    form = parser.add_argument_group("in which form (default: text)").add_mutually_exclusive_group()
    form.add_argument("--markdown", dest="form", action="store_const", const="markdown", help="Markdown, to paste")
    form.add_argument("--json", dest="form", action="store_const", const="json", help="all figures as one JSON value")
    form.add_argument("--csv", dest="form", action="store_const", const="csv", help="the table as CSV")
    also = parser.add_argument_group("also")
    also.add_argument("--record", action="store_true", help="with --label: append a curve-summary line")
    also.add_argument("--runs", action="store_true", help="with --label: list the label's runs")
    also.add_argument("--run", metavar="ID", help="with --label: show that run, as L@ID does")
    also.add_argument("--details", action="store_true", help="with --check of several notebooks: the rules of each")
    also.add_argument(
        "--raw",
        metavar="FILE",
        help="with --check: recompute the levels from load_test.py's --raw FILE, name differences",
    )
    also.add_argument("--version", action="version", version=f"%(prog)s {TOOL_VERSION}")
    return parser


def parse_options(argv: Sequence[str] | None) -> Options:
    """Options. Raises UserError with one line where they do not go together."""
    parser = build_parser()
    args, rest = parser.parse_known_args(argv)
    if rest:
        file = next((word for word in rest if not word.startswith("-")), None)
        hint = f"; name the notebook with --labbook {file}" if file and rest[0] == file else ""
        parser.error(f"unrecognized arguments: {' '.join(rest)}{hint}")
    refuse_conflicts(parser, args)
    label = args.label if args.run is None else f"{args.label}@{args.run}"
    return Options(
        labbook=args.labbook,
        label=label,
        runs=args.runs,
        compare=tuple(args.compare) if args.compare else None,
        check=None if args.check is None else tuple(args.check or [args.labbook]),
        details=args.details,
        record=args.record,
        form=args.form or "text",
        raw=args.raw,
    )


def refuse_conflicts(parser: Parser, args: argparse.Namespace) -> None:
    """Say which options do not go together, before anything is read."""
    views = [f"--{name}" for name in ("list", "compare", "check") if getattr(args, name) not in (None, False)]
    if args.label is not None and views != ["--check"]:
        views.insert(0, "--label")
    if len(views) > 1:
        parser.error(f"{' and '.join(views)} do not go together: choose one")
    show_label = args.label is not None and args.check is None
    needs = (
        ("--record", args.record, show_label, "--label"),
        ("--runs", args.runs, show_label, "--label"),
        ("--run", args.run is not None, args.label is not None, "--label"),
        ("--raw", args.raw, args.check is not None, "--check"),
        ("--details", args.details, args.check is not None, "--check"),
        ("--markdown", args.form == "markdown", show_label or args.compare, "--label or --compare"),
    )
    for option, given, met, needed in needs:
        if given and not met:
            parser.error(f"{option} needs {needed}")
    if args.runs and (args.record or args.run or args.form == "markdown"):
        parser.error("--runs lists: leave --record, --run and --markdown out")
    if args.check and args.label is not None and (len(args.check) > 1 or os.path.isdir(args.check[0])):
        parser.error("--check --label speaks of one notebook: name one file, or none")


def to_devnull(stream: IO[str]) -> None:
    """Give a stream that cannot be written another place to write to, or the interpreter complains when it leaves."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def warn(message: str) -> None:
    """One line on standard error. Where that is closed or full, the exit code alone has to say it."""
    if sys.stderr is None:
        return
    try:
        sys.stderr.write(f"{PROGRAM}: {printable(message)}\n")
        sys.stderr.flush()
    except (OSError, ValueError):
        to_devnull(sys.stderr)


def report(path: str, remarks: Iterable[Remark]) -> None:
    """Say on standard error which lines were not used, or used once."""
    for remark in sorted(remarks):
        warn(f"{path} line {remark.line}: {printable(remark.text)}")


def in_colour() -> bool:
    """Only on a terminal, and never with NO_COLOR."""
    return (
        sys.stdout is not None
        and sys.stdout.isatty()
        and "NO_COLOR" not in os.environ
        and os.environ.get("TERM") != "dumb"
    )


def run_list(options: Options, notebook: Notebook) -> tuple[str, int]:
    if not notebook.records:
        warn(f"no level records in {notebook.path}: run load_test.py first, or name the file with --labbook")
    code = 0 if notebook.records else 1
    doc = list_document(notebook)
    forms = {"json": lambda: to_json(doc), "csv": lambda: to_csv(doc["labels"])}
    return forms.get(options.form, lambda: list_text(doc))(), code


def run_label(options: Options, notebook: Notebook) -> tuple[str, int]:
    if options.runs:
        doc = runs_document(notebook, str(options.label))
        forms = {"json": lambda: to_json(doc), "csv": lambda: to_csv(doc["runs"])}
        return forms.get(options.form, lambda: runs_text(doc))(), 0
    curve = find_curve(notebook, str(options.label))
    doc = curve_document(curve, notebook)
    forms = {
        "json": lambda: to_json(doc),
        "csv": lambda: to_csv(level_rows(doc)),
        "markdown": lambda: label_markdown(doc),
        "text": lambda: label_text(doc, in_colour()),
    }
    text = forms[options.form]()
    if options.record:
        if curve.label not in notebook.curves:
            raise UserError("--record sums up a label's newest levels: name the label without a run")
        if not curve.usable:
            raise ResultError(f"{as_word(curve.label)} has no whole level with a completed request: nothing to record")
        append_record(notebook.path, summary_record(curve, datetime.now()))
        warn(f"appended a curve-summary line to {notebook.path}")
    return text, 0


def run_compare(options: Options, notebook: Notebook) -> tuple[str, int]:
    assert options.compare is not None
    a, b = (find_curve(notebook, name) for name in options.compare)
    doc = compare_document(notebook, a, b)
    if options.form == "json":
        return to_json(doc), 0
    if options.form == "csv":
        return to_csv([{**row, "a_label": a.label, "b_label": b.label} for row in doc["levels"]]), 0
    return compare_text(doc, options.form == "markdown"), 0


def run_check(options: Options, given: Sequence[str]) -> tuple[str, int]:
    """One notebook's rules, or several notebooks' verdicts. 2 where a file cannot be read, else 1 where any rule
    failed."""
    raw = read_raw(options.raw) if options.raw else None
    paths = notebooks_at(given)
    if len(given) > 1 or os.path.isdir(given[0]):
        files = check_class(paths, raw)
        verdicts = [item["verdict"] for item in files]
        code = 2 if UNREADABLE in verdicts else 1 if FAIL in verdicts else 0
        if options.form == "json":
            return to_json({"kind": "checks", "tool_version": TOOL_VERSION, "files": files}), code
        if options.form == "csv":
            return to_csv(class_rows(files)), code
        return class_text(files, options.details), code
    notebook = read_notebook(paths[0])
    report(notebook.path, notebook.remarks)  # damaged and unknown lines have rules of their own
    curve = find_curve(notebook, options.label) if options.label is not None else None
    doc = notebook_verdict(notebook, check(notebook, raw, curve))
    code = 1 if doc["fail"] else 0
    if options.form == "json":
        return to_json({"kind": "check", "tool_version": TOOL_VERSION, "label": curve and curve.label, **doc}), code
    if options.form == "csv":
        return to_csv(doc["statements"]), code
    return "\n".join(check_lines(doc)) + "\n", code


def notebooks_at(given: Sequence[str]) -> list[str]:
    """The files that were named, each once, and of each folder every *.md below it that holds a record, in the order
    of their names. Raises UserError for a folder without one."""
    found: dict[str, str] = {}  # by real path
    for path in given:
        names = [path]
        if os.path.isdir(path):
            below = (os.path.join(folder, name) for folder, _, files in os.walk(path) for name in files)
            names = [name for name in sorted(below) if name.endswith(".md") and holds_record(name)]
            if not names:
                raise UserError(f"no *.md below {path} holds a level record")
        for name in names:
            found.setdefault(os.path.realpath(name), name)
    return list(found.values())


def holds_record(path: str) -> bool:
    """Whether a file below a folder is somebody's notebook: it mentions this lab, or cannot be read to tell."""
    try:
        return any(LAB.encode() in line for _, line, _ in file_lines(path))
    except UserError:
        return True


def run(options: Options) -> tuple[str, int]:
    """What to print, and the exit code."""
    if options.check is not None:
        return run_check(options, options.check)
    notebook = read_notebook(options.labbook)
    report(notebook.path, [*notebook.damaged, *notebook.unknown, *notebook.remarks])
    if options.label is not None:
        return run_label(options, notebook)
    if options.compare is not None:
        return run_compare(options, notebook)
    return run_list(options, notebook)


def write_out(text: str) -> None:
    """Print, in an encoding that cannot fail; quiet when the reader (head) has gone. Raises ResultError where standard
    output is closed or full."""
    if sys.stdout is None:
        if text:
            raise ResultError("cannot write the output: standard output is closed")
        return
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except BrokenPipeError:
        to_devnull(sys.stdout)
    except OSError as error:
        to_devnull(sys.stdout)
        raise ResultError(f"cannot write the output: {error.strerror or error}") from None


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program; returns the exit code."""
    try:
        text, code = run(parse_options(argv))
        write_out(text)
    except UserError as error:
        warn(str(error))
        return 2
    except ResultError as error:
        warn(str(error))
        return 1
    except KeyboardInterrupt:
        return 130
    return code


if __name__ == "__main__":
    sys.exit(main())
