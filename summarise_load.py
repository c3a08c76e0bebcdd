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

What the check can and cannot see: a line fails only when no values that round to the printed ones fit together. Counts,
rates, percentiles, times and tokens are tied to each other that way, so most single alterations of a measured figure
show; a figure that nothing else in the line bounds (the largest TTFT raised, prompt tokens, the client's load, a
setting) shows only against the per-request lines, with --raw, or not at all. Copied lines fail, within a notebook and
between the notebooks of one call, whatever was renamed around them. Dates that leave a run no room, figures with fewer
digits than load_test.py writes, a repeat that is missing, levels of another machine, and a curve without any noise are
warned of. Beyond what a notebook alone can show: dates and run ids that were moved together, a measurement of another
machine under one's own name throughout, figures invented with plausible noise. Ask for the --raw file of such a run.

Exit codes: 0; 1 for an unknown label, no records, a FAIL, or a line that could not be appended (it is then printed
on standard output); 2 for bad arguments or a file that cannot be read; 130 after Ctrl-C.
"""

from __future__ import annotations

import signal

if __name__ == "__main__" and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # a Ctrl-C while modules load ends the program without a traceback

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
from functools import cached_property, lru_cache, partial
from typing import IO, Any, Callable, NamedTuple, NoReturn

try:
    import fcntl
except ImportError:  # Windows has no flock; a single O_APPEND write is all there is to be had
    fcntl = None  # type: ignore[assignment]

PROGRAM = "summarise_load.py"
TOOL_VERSION = "2.0.0"
LAB = "part-09/lab-serve-twenty-concurrent-users"  # the `lab` value that marks a line as this lab's
KNOWN_SCHEMAS = (1, 2)  # 1: a line without `schema`
SWEEP_LEVELS = (1, 5, 10, 20)  # the lab's levels
VARIANT_LABELS = ("llama-slots8", "llama-ctx2048", "llama-kv-alt")

MAX_LINE_BYTES = 1 << 20  # a level record is about 3 kB; 1 MiB leaves room and bounds what a hostile line can cost
MAX_FILE_BYTES = 1 << 28  # a year of notebooks is smaller; beyond it this is a model file or a device
MAX_FIGURE = 1e15  # no count, time or rate here comes near it; below it, squares and sums stay finite
MAX_NUMBER_CHARS = 300  # still fits a float; Python itself refuses whole numbers above 4300 digits
MAX_BRACKETS = 900  # a record has about 20; a parser's own limit on nesting differs between Python versions


class UserError(Exception):
    """Bad arguments or a file that cannot be read: exit 2."""


class ResultError(Exception):
    """The notebook does not hold what was asked for: exit 1."""


# ---------------------------------------------------------------------------------------------- reading a notebook


class Field(NamedTuple):
    """One field of a level record: what it may hold, and what it is used for."""

    name: str
    kind: str  # count, measure, text, flag, stats (object of numbers), tally (object of counts), block (object), any
    use: str = ""  # words: setting (identifies what was measured), compared (named where it differs), level (shown)


FIELDS = tuple(
    Field(name, kind, use)
    for use, kind, names in (
        ("setting compared", "text", "engine engine_version model prompt_set prompt_text host quant"),
        ("setting compared", "count", "context_length server_slots max_tokens"),
        ("setting compared", "measure", "temperature slo_ttft_s slo_tpot_s"),
        ("setting compared", "any", "extra_body"),
        ("setting compared", "count", "turns"),
        ("setting compared", "measure", "duration_s"),
        ("setting compared", "text", "arrival"),
        ("setting", "text", "base_url seed"),
        ("", "text", "label run_id recorded_at"),
        ("", "count", "concurrency repeat"),
        ("", "flag", "interrupted searched"),
        ("level", "count", "requests completed failed output_tokens within_slo coalesced"),
        ("level", "measure", "wall_s output_tokens_per_s requests_per_s goodput_requests_per_s mean_in_flight"),
        ("level", "measure", "prompt_tokens_mean cached_tokens_mean steady_output_tokens_per_s steady_window_s"),
        ("level", "measure", "tokens_per_delta prefill_tokens_per_s"),
        ("level", "stats", "ttft_s tpot_s e2e_s connect_s chunk_gap_s output_tokens_per_request"),
        ("level", "tally", "finish_reasons errors models"),
        ("level", "any", "token_counts by_turn"),
        ("level", "text", "first_error"),
        ("level", "block", "server client ttft_split_s drift gpu"),
    )
    for name in names.split()
)
KIND = {item.name: item.kind for item in FIELDS}
SETTINGS = tuple(item.name for item in FIELDS if "setting" in item.use)
COMPARED = tuple(item.name for item in FIELDS if "compared" in item.use)
LEVEL_FIELDS = tuple(item.name for item in FIELDS if item.use == "level")
NUMBERS = tuple(item.name for item in FIELDS if item.kind in ("count", "measure"))
STATS = tuple(item.name for item in FIELDS if item.kind == "stats")
STATISTICS = ("min", "p50", "p90", "p95", "p99", "max", "mean")
UNDEFINED_AS_ZERO = ("ttft_s", "tpot_s", "prompt_tokens_mean")  # version 1 printed 0.0 where nothing was measured

# How a line of load_test.py begins (keys are sorted): a torn line may hold no more than this.
BEGINNINGS = ('{"arrival": "', '{"base_url": "')
KNOWN_KEY = re.compile(rf'"(?:{"|".join(NUMBERS)})"\s*:')
PREFIX = re.compile(r"[\s\ufeff]*(?:[-*+>](?=[\s{>])[\s\ufeff]*)*")  # indentation, bullets, quotes, a BOM


class Printed(float):
    """A number from a JSON line that remembers how it was printed, so that its rounding can be allowed for.

    >>> Printed("12.340").decimals, Printed("2.5e-3").half == 0.00005, Printed("0.0115").digits
    (3, True, 3)
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
        mantissa, _, exponent = self.text.lower().partition("e")
        return len(mantissa.partition(".")[2]) - (int(exponent) if exponent else 0)

    @property
    def half(self) -> float:
        """Half of the last printed digit's unit."""
        return 0.5 * 10.0 ** max(-400, min(300, -self.decimals))

    @property
    def digits(self) -> int:
        """Significant digits printed."""
        return len(self.text.lower().partition("e")[0].replace(".", "").lstrip("-0"))


def as_number(value: Any) -> Printed | None:
    """A JSON number with its printed form; None for everything else (true and "3" are not numbers)."""
    if isinstance(value, int) and not isinstance(value, bool):
        return Printed(str(value))
    return value if isinstance(value, Printed) else None


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
    def c(self) -> int:
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
            value = value.get(key) if isinstance(value, dict) else None
        return value

    def number(self, path: str) -> Printed | None:
        """A measured figure, or None where it is absent, null, or version 1's 0.0 for "undefined"."""
        value = as_number(self.raw(path))
        undefined = value == 0.0 and self.schema == 1 and path.partition(".")[0] in UNDEFINED_AS_ZERO
        return None if undefined else value

    def count(self, path: str) -> int | None:
        value = as_number(self.raw(path))
        return None if value is None else int(value)

    def setting(self, name: str) -> Any:
        """An identifying field in one form (20 and 20.0 slots are the same), or None where the notebook does not say
        ("unknown", an empty value, and 0 for slots or context)."""
        value, number = self.data.get(name), as_number(self.data.get(name))
        if value in (None, "", "unknown", {}) or (name in ("context_length", "server_slots") and not value):
            return None
        if number is None:
            return value
        return {"count": int, "measure": float}.get(KIND[name], lambda same: same.text)(number)


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
        return group(self.records, lambda record: record.label)

    @cached_property
    def curves(self) -> dict[str, Curve]:
        """Every label's curve, in file order."""
        return {label: build_curve(label, records) for label, records in self.by_label().items()}


def group(records: Iterable[Record], key: Callable[[Record], Any]) -> dict[Any, list[Record]]:
    """Records by a key, in the order of their first."""
    found: dict[Any, list[Record]] = {}
    for record in records:
        found.setdefault(key(record), []).append(record)
    return found


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
    begun = any(text.startswith(start) or (len(text) > 1 and start.startswith(text)) for start in BEGINNINGS)
    return begun or len(set(KNOWN_KEY.findall(text))) >= 2


def is_count(value: Any) -> bool:
    """Whether a JSON value is a whole number (3 and 3.0 are, true and "3" are not)."""
    number = as_number(value)
    return number is not None and number.is_integer()


def is_number(value: Any) -> bool:
    return value is None or as_number(value) is not None


KIND_TESTS: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "count": ("a whole number", is_count),
    "measure": ("a number", is_number),
    "text": ("a text", lambda value: isinstance(value, str) or is_number(value)),
    "flag": ("true or false", lambda value: isinstance(value, bool)),
    "stats": ("an object of numbers", lambda value: isinstance(value, dict) and all(map(is_number, value.values()))),
    "tally": ("an object of counts", lambda value: isinstance(value, dict) and all(map(is_count, value.values()))),
    "block": ("an object", lambda value: isinstance(value, dict)),
    "any": ("", lambda value: True),
}


def field_fault(data: Mapping[str, Any]) -> str | None:
    """The first field of a level record whose value cannot be what its name says; None where all can."""
    for name, kind, _ in FIELDS:
        value = data.get(name)
        what, test = KIND_TESTS[kind]
        if value is not None and not (test(value) and (name != "label" or isinstance(value, str))):
            return f"{name} is {json.dumps(value)[:40]}, not {what}"
        if name != "extra_body" and (fault := oversized(name, value)):  # that one is the user's own
            return fault
    if (as_number(data["concurrency"]) or 0) < 1:
        return f"concurrency is {json.dumps(data['concurrency'])[:40]}, not a number of requests"
    return None


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
    return None if number is None or abs(number) <= MAX_FIGURE else f"{path} is {number:g}: implausibly large"


def file_lines(path: str) -> list[bytes]:
    """The lines of a file; only LF ends one, so U+2028 in a text does not. Raises UserError where it cannot be read,
    is not a notebook's size, is UTF-16 or UTF-32, or is a folder, a pipe or a device: those may never end."""
    try:
        mode = os.stat(path).st_mode
        if not stat.S_ISREG(mode):
            kind = "a folder" if stat.S_ISDIR(mode) else "a pipe" if stat.S_ISFIFO(mode) else "a device or a socket"
            raise UserError(f"cannot read {path}: it is {kind}, not a file; name another file")
        with open(path, "rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror or error}; name another file") from None
    if len(data) > MAX_FILE_BYTES:
        raise UserError(f"{path} holds more than {MAX_FILE_BYTES >> 20} MiB: not a notebook")
    if encoding := wide_encoding(data[:64]):
        advice = "(Windows PowerShell's `>` writes UTF-16; use `Set-Content -Encoding utf8`)"
        raise UserError(f"{path} is {encoding} text, not UTF-8: save it again as UTF-8 {advice}")
    return data.split(b"\n")


def wide_encoding(start: bytes) -> str | None:
    """UTF-16 or UTF-32, where a file's first bytes say so by a byte order mark or by NULs between letters; else None.

    >>> wide_encoding("# Lab".encode("utf-16-le")), wide_encoding(b"\\xef\\xbb\\xbf# Lab"), wide_encoding(b"# Lab")
    ('UTF-16', None, None)
    """
    if start.startswith((b"\xff\xfe\x00\x00", b"\x00\x00\xfe\xff")):
        return "UTF-32"
    wide = start.startswith((b"\xff\xfe", b"\xfe\xff")) or (len(start) > 3 and 2 * start.count(0) >= len(start) - 1)
    return "UTF-16" if wide else None


def read_notebook(path: str) -> Notebook:
    """Find every line of this lab in a file. Raises UserError where the file cannot be read."""
    notebook = Notebook(path)
    seen: dict[str, int] = {}
    for number, line in enumerate(file_lines(path), 1):
        text = line.decode("utf-8", errors="replace")
        text = text[PREFIX.match(text).end() :].strip()  # type: ignore[union-attr]  # the pattern matches ""
        fault = None
        if "\x00" in text:
            text, fault = text.replace("\x00", ""), "NUL bytes between letters: appended as UTF-16 by another program"
        elif not text.startswith("{"):
            fault = "record with leading text, or line-wrapped" if LAB in text else None
        elif len(line) > MAX_LINE_BYTES:
            fault = f"longer than {MAX_LINE_BYTES >> 20} MiB"
        else:
            try:
                data = parse_json(text)
                if isinstance(data, dict):
                    is_utf8 = "\ufffd" not in text or "\ufffd".encode() in line
                    read_object(notebook, number, data, None if is_utf8 else "bytes that are not UTF-8", seen, text)
            except ValueError as error:
                fault = str(error)
        if fault and looks_like_ours(text):
            notebook.damaged.append(Remark(number, fault))
    return notebook


def read_object(
    notebook: Notebook, number: int, data: Mapping[str, Any], fault: str | None, seen: dict[str, int], text: str
) -> None:
    """Put a JSON object that stands on a line where it belongs: a record, another line of this lab, damage, prose."""
    schema, is_level = data.get("schema", 1), "concurrency" in data and "ttft_s" in data
    if data.get("lab") != LAB:
        if is_level:
            lab = json.dumps(data.get("lab"))[:60]
            notebook.remarks.append(Remark(number, f"looks like a level record, but its lab is {lab}: left out"))
    elif not is_count(schema) or schema not in KNOWN_SCHEMAS:
        unknown = f"format version {json.dumps(schema)[:20]} is not known here (1 and 2 are): left out"
        notebook.unknown.append(Remark(number, f"{unknown}; a newer summarise_load.py may read it"))
    elif is_level:
        fault = fault or field_fault(data)
        if fault:
            notebook.damaged.append(Remark(number, fault))
        elif text in seen:
            notebook.remarks.append(Remark(number, f"the same line as line {seen[text]}: counted once"))
        else:
            seen[text] = number
            notebook.records.append(Record(number, data))
    else:
        others = {"curve-summary": notebook.summaries, "recovery": notebook.recoveries}
        others.get(str(data.get("record")), []).append(Record(number, data))


# ----------------------------------------------------------------------------------------------- figures of a curve

KNEE_SHARE = 0.5  # of one request's throughput at the lowest level, per added request
NOISE = 0.05  # single runs often differ by so much: two levels alone show no less
WORST_FIT = 0.25  # a line that misses a level by more is no model of a step


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
        """Counts by name (finish reasons, error classes), summed over the runs, without zeros."""
        blocks = [record.raw(path) or {} for record in self.runs]
        total = {name: sum(int(block.get(name, 0)) for block in blocks) for block in blocks for name in block}
        return {name: count for name, count in total.items() if count}

    def setting(self, name: str) -> Any:
        """A setting of the level's last run."""
        return self.runs[-1].setting(name)

    @property
    def interrupted(self) -> bool:
        return all(record.interrupted for record in self.runs)

    @property
    def rounds(self) -> float | None:
        """Requests / c of the run with the fewest; None where the requests are not recorded."""
        requests = self.values("requests")
        return min(requests) / self.c if requests else None

    @property
    def left_out(self) -> str | None:
        """Why the level enters no derived figure; None where it does."""
        arrival = self.setting("arrival")
        if self.interrupted:
            return "interrupted"
        if not self.median("completed"):
            return "no completed request"
        if self.rounds is not None and self.rounds < 1:
            return f"{counted(min(self.values('requests')), 'request')} never filled it"
        return None if arrival in (None, "closed-loop") else f"its requests came open-loop ({arrival})"

    @property
    def cached_share(self) -> float | None:
        """Mean cached tokens / mean prompt tokens, or None."""
        cached, prompt = self.median("cached_tokens_mean"), self.median("prompt_tokens_mean")
        return cached / prompt if cached is not None and prompt else None

    @property
    def slo_misses(self) -> list[str] | None:
        """What keeps the level outside the SLO recorded with it; empty inside it; None where that cannot be told.
        Outputs of one token have no TPOT to miss it."""
        if self.left_out and self.left_out != "no completed request":
            return None
        misses = [f"{failed} failed"] if (failed := self.total("failed")) else []
        if self.left_out:
            return misses or [self.left_out]
        (ttft, slo_ttft), (tpot, slo_tpot) = (
            (self.median(f"{name}.p90"), self.setting(f"slo_{name}")) for name in ("ttft_s", "tpot_s")
        )
        if slo_ttft is None or slo_tpot is None or ttft is None:
            return None
        misses += [f"TTFT p90 {above(ttft, slo_ttft)} s"] if ttft > slo_ttft else []
        if tpot is not None and tpot > slo_tpot:
            misses.append(f"TPOT p90 {above(1000 * tpot, 1000 * slo_tpot)} ms")
        return misses


def above(value: float, limit: float) -> str:
    """A figure above a limit, with as many digits as show that it is.

    >>> above(2.5, 2.0), above(2.0004, 2.0)
    ('2.5', '2.0004')
    """
    texts = (f"{value:.{digits}g}" for digits in range(3, 17))
    return next((text for text in texts if float(text) > limit), str(value))


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
    def no_growth(self) -> str | None:
        """Why the growth of a step over the levels does not show; None where it does. What rests on b (ceiling, c at
        the SLO, per-sequence cost) is said only then."""
        top_ms = self.a_ms + self.b_ms * self.levels[-1]
        share = self.b_ms * (self.levels[-1] - self.levels[0]) / top_ms if top_ms > 0 else 0.0
        if self.b_ms <= 0 or top_ms <= 0:
            return "b is not above 0"
        if self.b_interval_ms is None:
            return None if share > NOISE else f"two levels grow by {share:.1%}, which may be noise"
        if self.b_interval_ms[0] <= 0:
            return "b's 95 % interval includes 0"
        if share > self.largest_residual:
            return None
        return f"a step grows by {share:.1%}, the fit misses a level by {self.largest_residual:.1%}"

    @property
    def grows(self) -> bool:
        return self.no_growth is None

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
    mean_c, mean_y = (math.fsum(values) / len(points) for values in zip(*points))
    s_xx = math.fsum((c - mean_c) ** 2 for c, _ in points)
    b = math.fsum((c - mean_c) * (y - mean_y) for c, y in points) / s_xx
    a = mean_y - b * mean_c
    misses = [(y - a - b * c, y) for c, y in points]
    interval = None
    if len(levels) > 2:
        freedom = len(points) - 2
        reach = student_t(freedom) * math.sqrt(math.fsum(miss**2 for miss, _ in misses) / freedom / s_xx)
        interval = (b - reach, b + reach)
    return Fit(a, b, levels, interval, max(abs(miss) / y if y > 0 else math.inf for miss, y in misses))


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

    @property
    def slots(self) -> int | None:
        return self.settings["server_slots"]  # type: ignore[no-any-return]

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
        """Output tokens per second if every request were always decoding: n / (a + b n), n = min(c, slots of that
        level, or else of the label); None where there is no fit, or one that misses a level by more than WORST_FIT."""
        if self.fit is None or self.fit.largest_residual > WORST_FIT:
            return None
        slots = next((level.setting("server_slots") for level in self.levels if level.c == c), self.slots)
        return self.fit.throughput(c if slots is None else min(c, slots))

    @cached_property
    def operating_point(self) -> int | None:
        """The highest level with no failure and both p90s inside the SLO recorded with that level."""
        return max((level.c for level in self.levels if level.slo_misses == []), default=None)


def newest_run(records: Sequence[Record]) -> tuple[tuple[Record, ...], list[str]]:
    """Of one label's records at one c: the newest run's repeats, and remarks about them.

    Newest is by `recorded_at`, then by run id, then by place in the file; version 1 lines: the last one. A run in
    which the level was interrupted counts only where no run finished it.
    """
    whole = [record for record in records if not record.interrupted] or records
    runs = list(group(whole, lambda record: record.run).values())
    old = [run for run in runs if run[0].schema == 1]
    candidates = [run for run in runs if run[0].schema > 1] + old[-1:]
    dated = all(record.instant is not None for run in candidates for record in run)
    named = all(run[0].schema > 1 and run[0].data.get("run_id") is not None for run in candidates)

    def age(run: Sequence[Record]) -> tuple[float, str, int]:
        last = max(record.instant or 0.0 for record in run) if dated else 0.0
        return last, run[0].run if named else "", run[-1].line

    remarks = []
    newest = max(candidates, key=age)
    by_repeat = group(newest, lambda record: record.repeat)
    for repeat, same in by_repeat.items():
        if len(same) > 1:
            lines = " and ".join(str(record.line) for record in same)
            run = f"run {printable(same[0].run)}, repeat {repeat}"
            remarks.append(f"c={same[0].c}: lines {lines} are both {run}, and differ: the last one is shown")
    return tuple(by_repeat[repeat][-1] for repeat in sorted(by_repeat)), remarks


VERSION_1_REMARK = (
    "lines of format version 1 are shown: there, in flight counts successes only, TTFT includes connecting, "
    "TPOT ends at the stream's close, and an undefined figure was printed as 0.0"
)


def build_curve(label: str, records: Sequence[Record]) -> Curve:
    """The levels of one label that count, sorted by c."""
    levels, remarks = [], []
    for c, at_c in sorted(group(records, lambda record: record.c).items()):
        runs, said = newest_run(at_c)
        levels.append(Level(c, runs))
        remarks += said
    shown_records = [record for level in levels for record in level.runs]
    newest = max(shown_records, key=lambda record: (record.instant or 0.0, record.line))
    remarks += [VERSION_1_REMARK] if any(record.schema == 1 for record in shown_records) else []
    return Curve(label, tuple(levels), {name: newest.setting(name) for name in SETTINGS}, tuple(remarks))


def find_curve(notebook: Notebook, name: str) -> Curve:
    """The curve of a label, given as written or as --list shows it, or of one of its runs, as L@RUN (the run id, or
    its beginning where that names one run). Raises ResultError where there is none."""
    if not notebook.records:
        raise ResultError(f"no level records in {notebook.path}: run load_test.py first, or name the file: --labbook")
    by_name = {**{as_word(label): label for label in notebook.curves}, **{label: label for label in notebook.curves}}
    if name in by_name:
        return notebook.curves[by_name[name]]
    label, _, run = name.rpartition("@")
    if label not in by_name:
        known = ", ".join(map(as_word, notebook.curves))
        raise ResultError(f"no label {name!r} in {notebook.path}; it holds: {known}")
    runs = group(notebook.by_label()[by_name[label]], lambda record: record.run)
    found = [run] if run in runs else [known for known in runs if known.startswith(run)]
    if len(found) != 1:
        held = ", ".join(map(printable, runs))
        many = "more than one" if found else "no"
        raise ResultError(f"{many} run {run!r} of {as_word(label)} in {notebook.path}; it holds: {held}")
    return build_curve(f"{by_name[label]}@{found[0]}", runs[found[0]])


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
    of freedom by Satterthwaite); None where a side has fewer than two runs or a run that is not above 0, or where no
    run differs from its like. The only judge of "different", "fell" and "grew".

    >>> [round(figure, 3) for figure in ratio_interval([100, 102, 98], [110, 112, 108])]
    [1.053, 1.1, 1.149]
    """
    if min(len(runs_a), len(runs_b)) < 2 or min(*runs_a, *runs_b) <= 0:
        return None
    means, errors = [], []
    for runs in (runs_a, runs_b):
        logs = [math.log(value) for value in runs]
        means.append(math.fsum(logs) / len(logs))
        errors.append(math.fsum((value - means[-1]) ** 2 for value in logs) / (len(logs) - 1) / len(logs))
    if sum(errors) <= 0:
        return None
    freedom = sum(errors) ** 2 / (errors[0] ** 2 / (len(runs_a) - 1) + errors[1] ** 2 / (len(runs_b) - 1))
    reach = student_t(freedom) * math.sqrt(sum(errors))
    middle = means[1] - means[0]
    return Ratio(*(ten_digits(math.exp(value)) for value in (middle - reach, middle, middle + reach)))


@lru_cache(maxsize=1000)
def student_t(freedom: float, confidence: float = 0.95) -> float:
    """The t that a Student variable of so many degrees of freedom stays within, either side, with this confidence.

    Its two-sided tail is the regularised incomplete beta function I_x(freedom/2, 1/2), x = freedom / (freedom + t^2)
    (Abramowitz and Stegun 26.7.1), here inverted by halving.

    >>> [round(student_t(n), 3) for n in (1, 2, 3, 10, 100)]
    [12.706, 4.303, 3.182, 2.228, 1.984]
    """

    def tail(t: float) -> float:
        x, p = freedom / (freedom + t * t), freedom / 2.0
        if x > (p + 1.0) / (p + 2.5):  # there the fraction of the complement converges faster
            return 1.0 - incomplete_beta(1.0 - x, 0.5, p)
        return incomplete_beta(x, p, 0.5)

    low, high = 0.0, 1.0
    while tail(high) > 1.0 - confidence:
        high *= 2.0
    for _ in range(60):  # past a float's 53 bits
        middle = (low + high) / 2.0
        low, high = (middle, high) if tail(middle) > 1.0 - confidence else (low, middle)
    return ten_digits(high)


def incomplete_beta(x: float, p: float, q: float) -> float:
    """The regularised I_x(p, q), for x below its mean: continued fraction 26.5.8 of Abramowitz and Stegun.

    >>> round(incomplete_beta(0.3, 2.0, 3.0), 4)
    0.3483
    """
    if x <= 0.0:
        return 0.0
    fraction = 1.0
    for k in range(200, 0, -1):
        m, odd = divmod(k, 2)
        up = -(p + m) * (p + q + m) if odd else m * (q - m)
        down = (p + 2 * m) * (p + 2 * m + (1 if odd else -1))
        fraction = 1.0 + up * x / down / fraction
    front = math.exp(math.lgamma(p + q) - math.lgamma(p) - math.lgamma(q) + p * math.log(x) + q * math.log(1.0 - x))
    return front / p / fraction


def ten_digits(value: float) -> float:
    """A figure without its last digits, in which machines' logarithms may differ: the same bytes everywhere."""
    return float(f"{value:.10g}")


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


# --------------------------------------------------------------------------------------- statements: notes, reading

PASS, WARN, FAIL, NOTE, READING = "PASS", "WARN", "FAIL", "NOTE", "READING"

NEAR_LINEAR = 0.8  # scaling above it: added requests still cost little
FLAT_TPOT = 1.25  # TPOT p50 against the lowest level's: up to here called flat
FAST_GROWTH = 3.0  # TTFT p90 growing this many times faster than TPOT is waiting, not slower steps
LONG_WAIT_SHARE = 0.25  # TTFT p90 as a share of a median request's decoding: a wait for others to finish
TAIL_RATIO = 1.5  # TPOT p90 / p50: "far above"
FALL = 0.95  # single runs often differ by 5 %: a smaller fall is not worth a sentence
LOW_IN_FLIGHT = 0.75  # of c; at c = 20 that is 15, the lab's own line
FEW_ROUNDS = 8  # a level of fewer rounds loses a sizeable part of its time to filling and draining
CPU_HIGH = 0.8  # of one core: the client's event loop is then rarely idle
CPU_MIN_WALL_S = 1.0  # a share of CPU over less time is start-up, not load
LAG_SHARE = 0.25  # client delay as a share of TPOT (or TTFT) that makes it part of the figure
LAG_MIN_S = 0.002  # an event loop's timers are a millisecond coarse: less lateness says nothing
PAUSE_S, PAUSE_SHARE = 0.1, 0.03  # an event loop late by this much, and by this part of the level, was stopped
CONNECT_SHARE = 0.2  # connect p90 as a share of TTFT p90
NOTICED_S = 0.02  # nobody notices less of a wait, and loopback alone takes some of it
FULL_CACHE = 0.9  # of the KV blocks at the peak: the next sequence may find none
CACHE_POINTS = 0.10  # cached share differing by more than this between levels of one label
SPLIT_SHARE = 0.5  # of the mean time to first token: the part that dominates it
STEADY_SHOWN, DRAINING = 0.03, 0.05  # steady state against the wall figure: worth showing; bends scaling and knee
DRIFT = 1.25  # TPOT of a level's last third against its first; medians of a dozen requests wobble by a few per cent
HOT_C, SLOW_CLOCK = 80, 0.9  # GPUs lower their clocks near here; SM clock against the best level's

SINGLE_RUNS = "single runs: run-to-run variance unknown (often 5 %)"


@dataclass(frozen=True)
class Statement:
    """One thing that the program says: a shape (READING), a remark (NOTE), a rule's verdict (PASS, WARN, FAIL).
    `items` holds each case of a rule on its own, naming its label and level."""

    code: str
    status: str
    text: str
    levels: tuple[int, ...] = ()
    advice: str | None = None
    values: Mapping[str, Any] = field(default_factory=dict)
    certain: bool = True
    items: tuple[str, ...] = ()


class Sign(NamedTuple):
    """What one level shows of a shape: evidence in words and as values; `advice` replaces the shape's own."""

    text: str
    values: Mapping[str, Any] = {}
    certain: bool = True
    advice: str | None = None


def near_linear(curve: Curve, level: Level) -> Sign | None:
    """Every level up to this one scales well, at a TPOT like the lowest level's."""
    lowest, index = curve.usable[0], curve.usable.index(level)
    if curve.knee and level.c > curve.knee[0]:
        return None
    known = [
        (curve.scaling(lower) or 0.0, slower.times)
        for lower in curve.usable[1 : index + 1]
        if (slower := change(lowest, lower, "tpot_s.p50"))
    ]
    if not known or len(known) < index or any(scaling <= NEAR_LINEAR or slow > FLAT_TPOT for scaling, slow in known):
        return None
    scaling, slower_times = known[-1]
    text = (
        f"near-linear scaling up to c={level.c} (efficiency {scaling:.2f}): TPOT p50 {slower_times:.2f} times that at "
    )
    more = level is curve.usable[-1] and curve.knee is None
    advice = "measure higher levels: the knee is not reached" if more else f"admit at least {level.c} at once"
    advice = "the SLO, not throughput, is the limit here" if level.slo_misses else advice
    return Sign(f"{text}c={lowest.c}", {"scaling": scaling, "tpot_growth": slower_times}, advice=advice)


def per_sequence_cost(curve: Curve, level: Level) -> Sign | None:
    """The part of a step that grows with c exceeds the fixed part, by more than the fit misses a level by."""
    fit = curve.fit
    if fit is None or not fit.grows or fit.a_ms <= 0 or level.c not in fit.levels:
        return None
    grown_ms = fit.b_ms * level.c
    if (grown_ms - fit.a_ms) / (grown_ms + fit.a_ms) <= fit.largest_residual:
        return None
    cost = f"per-sequence cost b*c = {grown_ms:.1f} ms exceeds the fixed step cost a = {fit.a_ms:.1f} ms at c={level.c}"
    unknown = "KV reads, attention or sampling (the curve alone cannot say which)"
    return Sign(f"{cost}: {unknown}", {"a_ms": fit.a_ms, "b_ms": fit.b_ms, "bc_ms": grown_ms})


def ttft_parts(level: Level) -> dict[str, float]:
    """The means of queue, prefill and rest in seconds, as far as recorded: means add up to a mean, medians do not."""
    parts = ((part, level.median(f"ttft_split_s.{part}.mean")) for part in ("queue", "prefill", "rest"))
    return {part: value for part, value in parts if value is not None}


def queueing(curve: Curve, level: Level) -> Sign | None:
    """First tokens wait for a slot or for cache blocks. A wait is long against a request's own decoding; prompts
    that merely arrive together wait for each other's prefill, which is short against it."""
    ttft, tpot = level.median("ttft_s.p90"), level.median("tpot_s.p50")
    if ttft is None or not tpot or ttft < NOTICED_S:
        return None
    lowest, slots = curve.usable[0], level.setting("server_slots")
    later, slower = change(lowest, level, "ttft_s.p90"), change(lowest, level, "tpot_s.p50")
    outgrown = bool(later and slower and later.shown is not False and later.times > FAST_GROWTH * slower.times)
    tokens_each = (level.median("output_tokens") or 0.0) / (level.median("completed") or 1.0)
    long_wait = ttft > LONG_WAIT_SHARE * tpot * max(tokens_each - 1, 1)
    above = slots is not None and level.c > slots
    waits = {name: level.median(f"server.peak_{name}") for name in ("deferred", "waiting")}
    sampled, parts = any(count is not None for count in waits.values()), ttft_parts(level)
    # What a split leaves for the queue holds the server's other delays too, where the server saw nobody wait.
    queued = not sampled and parts.get("queue", 0.0) > SPLIT_SHARE * math.fsum(parts.values())
    # With a slot for each, requests wait for blocks of a full cache, or only for a turn of the prefill.
    full = slots is None or (level.median("server.peak_cache_usage") or 0.0) >= FULL_CACHE
    certain = above or bool(waits["deferred"]) or bool(waits["waiting"] and full) or queued
    unexplained = long_wait and outgrown and not sampled and (slots is None or above)
    if not (certain and (long_wait or outgrown)) and not unexplained:
        return None
    signs = [f"TTFT p90 {ttft:.3f} s"]
    if later and slower and level is not lowest:
        signs.append(f"{later.times:.1f} times that at c={lowest.c}, TPOT p50 {slower.times:.1f} times")
    signs += [f"{level.c} at once on {counted(slots, 'slot')}"] if above else []
    signs += [f"{count:g} {name} at the peak" for name, count in waits.items() if count]
    growth = {"ttft_growth": later.times if later else None, "tpot_growth": slower.times if slower else None}
    text = f"{'' if certain else 'possibly '}requests queue for slots or KV blocks at c={level.c}: {', '.join(signs)}"
    unsure = "sample the server (--sample 1) and record --server-slots to tell a queue from long prompts"
    return Sign(text, {**growth, "slots": slots, **waits}, certain, None if certain else unsure)


SPLIT_MEANING = {  # the dominating part of the mean TTFT: what it means, one thing to try
    "queue": ("queueing dominates: an admission limit, not a slow model", "raise the slots, or admit fewer requests"),
    "prefill": ("dominated by prefill", "cache the common prefix, or shorten the prompts"),
    "rest": ("TTFT is about one decode step: nothing to improve", ""),
    "outside": ("mostly outside the engine", "look at the server's HTTP layer, its tokeniser and the client"),
    "none": ("no part dominates", "see which part grows from level to level"),
}


def ttft_split(curve: Curve, level: Level) -> Sign | None:
    """Where the server says that the mean TTFT goes, at the highest level that has a split worth noticing. vLLM's
    histograms have the first step in their prefill: what they leave of the client's mean is outside the engine."""
    parts = ttft_parts(level)
    total = math.fsum(parts.values())
    if total < NOTICED_S or any(ttft_parts(other) for other in curve.usable if other.c > level.c):
        return None
    part = max(parts, key=lambda name: parts[name])
    if parts[part] <= SPLIT_SHARE * total:
        part = "none"
    elif part == "rest" and level.median("ttft_split_s.rest.p50") is None:
        part = "outside"
    meaning, advice = SPLIT_MEANING[part]
    shares = {name: value / total for name, value in parts.items()}
    text = ", ".join(f"{name} {parts[name]:.3f} s ({share:.0%})" for name, share in shares.items())
    return Sign(
        f"mean TTFT at c={level.c}: {text}: {meaning}",
        {"part": part, "seconds": parts, "shares": shares},
        advice=advice,
    )


def drift_of(level: Level) -> tuple[float, float] | None:
    """TPOT in seconds over the first and the last third of a level's requests, where they differ by more than noise.
    Speeding up counts from six rounds on: the last round of a short level drains, and so decodes faster."""
    paths = ("drift.tpot_first_third_s", "drift.tpot_last_third_s")
    first, last = (level.median(path) for path in paths)
    interval = ratio_interval(*(level.values(path) for path in paths))
    if not first or not last or (interval is not None and not interval.different):
        return None
    sped_up = first > DRIFT * last and (level.rounds or 0.0) >= 6
    return (first, last) if last > DRIFT * first or sped_up else None


def drifting(curve: Curve, level: Level) -> Sign | None:
    """The server changed while the level ran: heat, another load, or a cold start."""
    drift = drift_of(level)
    if drift is None:
        return None
    first, last = drift
    text = f"drift at c={level.c}: TPOT p50 {1000 * first:.1f} ms over the first third of the requests, "
    text += f"{1000 * last:.1f} ms over the last"
    values = {"tpot_first_third_s": first, "tpot_last_third_s": last}
    if last < first:
        return Sign(f"{text}: probably still warming up", values, False, "warm it up first: --warmup auto")
    clock, heat = level.median("gpu.sm_clock_mhz_min"), level.median("gpu.temperature_c_max")
    best = max(other.median("gpu.sm_clock_mhz_min") or 0.0 for other in curve.usable)
    if (clock is not None and clock < SLOW_CLOCK * best) or (heat is not None and heat >= HOT_C):
        figures = ((heat, "up to {:.0f} C"), (clock, "SM clock down to {:.0f} MHz"))
        told = ", ".join(words.format(figure) for figure, words in figures if figure is not None)
        text += f"; probably GPU throttling: {told}"
    return Sign(text, {**values, "temperature_c_max": heat, "sm_clock_mhz_min": clock})


def other_prefills(curve: Curve, level: Level) -> Sign | None:
    """Decoding stalls while other requests' prompts are processed: a long tail of TPOT. A level that slows from its
    first requests to its last has such a tail as well."""
    p50, p90 = level.median("tpot_s.p50"), level.median("tpot_s.p90")
    if level.c == 1 or not p50 or p90 is None or p90 <= TAIL_RATIO * p50 or p90 - p50 < LAG_MIN_S or drift_of(level):
        return None
    tail = f"TPOT p90 {1000 * p90:.1f} ms is {p90 / p50:.1f} times p50 ({1000 * p50:.1f} ms)"
    return Sign(f"probably other requests' prefills at c={level.c}: {tail}", {"ratio": p90 / p50}, certain=False)


def past_saturation(curve: Curve, level: Level) -> Sign | None:
    """More requests give less: throughput is below its peak at a lower level while as many are in flight."""
    best = max(curve.usable, key=lambda other: other.median("output_tokens_per_s") or 0.0)
    fall = change(best, level, "output_tokens_per_s")
    in_flight, best_in_flight = level.median("mean_in_flight"), best.median("mean_in_flight")
    held = in_flight is not None and best_in_flight is not None and in_flight >= best_in_flight
    if fall is None or best.c >= level.c or not held or fall.shown is False:
        return None
    if fall.times >= (1.0 if fall.shown else FALL):
        return None
    rates = [shown(one.median("output_tokens_per_s"), 1) for one in (best, level)]
    text = f"past saturation: throughput falls from {rates[0]} at c={best.c} to {rates[1]} at c={level.c} while in "
    values = {"best_c": best.c, "ratio": fall.times}
    if fall.shown:
        return Sign(f"{text}flight holds", values, advice=f"admit at most {best.c} at once")
    return Sign(f"possibly {text}flight holds (single runs: no verdict)", values, False, "repeat both: --repeat 3")


def preemptions(curve: Curve, level: Level) -> Sign | None:
    """The engine put sequences aside, for its cache was full."""
    count = level.median("server.preemptions")
    text = f"KV cache full: the engine preempted {count or 0:g} times at c={level.c}"
    return Sign(text, {"preemptions": count}) if count else None


def few_in_flight(level: Level) -> str | None:
    """The mean in flight, where it is well below c; None elsewhere."""
    in_flight = level.median("mean_in_flight")
    few = in_flight is not None and level.median("completed") and in_flight < LOW_IN_FLIGHT * level.c
    return f"in flight {in_flight:.1f} of {level.c}" if few else None


def client_evidence(level: Level) -> str | None:
    """Why the client, not the server, may have set a level's figures; None where nothing says so.

    Its lag, a pause, its calibrated floor or its CPU is above a limit: those at which load_test.py warns. That few
    requests are in flight stands beside them and is no sign by itself, for a short level drains too; version 1 lines
    say nothing of the client, so there it is only possibly its doing.
    """
    low = few_in_flight(level)
    if low and all(record.schema == 1 for record in level.runs):
        return f"possibly: {low} (or the level was short and drained)"
    tpot, ttft, wall = (level.median(path) or 0.0 for path in ("tpot_s.p50", "ttft_s.p50", "wall_s"))
    lag, pause, floor_us, floor_ttft, cpu = (
        level.median(f"client.{name}") or 0.0
        for name in ("loop_lag_s.p99", "loop_lag_s.max", "floor_us_per_delta", "floor_ttft_s", "cpu_fraction")
    )
    floor = floor_us * 1e-6 * level.c
    signs = (
        (
            tpot and lag > max(LAG_SHARE * tpot, LAG_MIN_S),
            f"client loop lag p99 {1000 * lag:.1f} ms{per(tpot, 'TPOT')}",
        ),
        (wall and pause > max(PAUSE_S, PAUSE_SHARE * wall), f"the client paused for {pause:.1f} s of {wall:.1f} s"),
        (tpot and floor > LAG_SHARE * tpot, f"reading {level.c} deltas costs {1000 * floor:.2f} ms{per(tpot, 'TPOT')}"),
        (
            ttft and floor_ttft > LAG_SHARE * ttft,
            f"the client alone takes {1000 * floor_ttft:.1f} ms{per(ttft, 'TTFT')}",
        ),
        (cpu > CPU_HIGH and (wall >= CPU_MIN_WALL_S or not wall), f"client CPU {cpu:.0%} of one core"),
    )
    reasons = [text for holds, text in signs if holds]
    return ", ".join(([low] if low and reasons else []) + reasons) or None


def per(seconds: float, name: str) -> str:
    return f" against a {name} of {1000 * seconds:.1f} ms"


def client_bound(curve: Curve, level: Level) -> Sign | None:
    text = client_evidence(level)
    names = ("mean_in_flight", "client.cpu_fraction", "client.loop_lag_s.p99")
    values = {name.rpartition(".")[2]: level.median(name) for name in names}
    return Sign(f"the client at c={level.c}: {text}", values, not text.startswith("possibly")) if text else None


def short_level(curve: Curve, level: Level) -> Sign | None:
    """Few requests in flight, and the client idle: a level of few rounds spends much of its time filling and
    draining; in a longer one, nothing recorded says why."""
    low, rounds = few_in_flight(level), level.rounds
    if not low or client_evidence(level) or rounds is None:
        return None
    if rounds < FEW_ROUNDS:
        idle = (
            "the client was idle" if level.median("client.cpu_fraction") is not None else "the client is not recorded"
        )
        return Sign(f"short level: {low} over {rounds:.1f} rounds at c={level.c}, and {idle}")
    advice = "look for a limit between client and server (a proxy, a connection limit), or run the client elsewhere"
    return Sign(f"{low} over {rounds:.1f} rounds at c={level.c}, and nothing recorded says why", {}, False, advice)


def draining(curve: Curve, level: Level) -> Sign | None:
    """A level that fills and drains for a sizeable part of its time shows less than the server can hold."""
    steady, wall = level.median("steady_output_tokens_per_s"), level.median("output_tokens_per_s")
    if steady is None or not wall or steady <= (1 + DRAINING) * wall:
        return None
    more = f"steady state {steady:.1f} tok/s is {steady / wall - 1:.1%} above the wall figure {wall:.1f}"
    rounds = f" over {level.rounds:.1f} rounds" if level.rounds else ""
    return Sign(f"draining at c={level.c}: {more}{rounds}; scaling and knee are those of the wall figures")


def connecting(curve: Curve, level: Level) -> Sign | None:
    """Connections wait to be accepted."""
    connect, ttft = level.median("connect_s.p90"), level.median("ttft_s.p90")
    if connect is None or not ttft or connect <= max(CONNECT_SHARE * ttft, NOTICED_S):
        return None
    return Sign(f"connecting at c={level.c}: p90 {1000 * connect:.1f} ms beside a TTFT p90 of {1000 * ttft:.1f} ms")


def not_by_length(level: Level) -> tuple[int, str]:
    """(how many responses did not end by their length, by which reasons)."""
    known = {name: count for name, count in level.tally("finish_reasons").items() if name != "none"}  # none was sent
    other = {name: count for name, count in known.items() if name != "length"}
    return sum(other.values()), ", ".join(f"{printable(name)} {count}" for name, count in sorted(other.items()))


def early_stops(curve: Curve, level: Level) -> Sign | None:
    """Outputs that end before max_tokens make requests shorter, and requests per second higher."""
    count, named = not_by_length(level)
    of = counted(sum(level.tally("finish_reasons").values()), "response")
    text = f"early stops at c={level.c}: {count} of {of} did not end by length ({named})"
    return Sign(text, {"count": count}) if count else None


def cache_luck(curve: Curve, level: Level) -> Sign | None:
    """The cached share differs from a lower level's, so they did not do the same work."""
    known = [(one.c, one.cached_share) for one in curve.usable if one.c <= level.c and one.cached_share is not None]
    shares = [share for _, share in known]
    if level.cached_share is None or max(abs(level.cached_share - share) for share in shares) <= CACHE_POINTS:
        return None
    points = 100 * (max(shares) - min(shares))
    told = ", ".join(f"{share:.0%} at c={c}" for c, share in known)
    text = f"cache luck: cached share {told}: {points:.0f} points apart"
    slots = "a server with a cache per slot fills it slot by slot: warm every slot, or use a pooled cache"
    shared = curve.settings["prompt_set"] == "shared-prefix"
    return Sign(text, {"shares": {str(c): share for c, share in known}}, advice=slots if shared else None)


def single_run(curve: Curve, level: Level) -> Sign | None:
    """One run of a level: nothing says how much its figures vary."""
    alone = all(len(other.runs) == 1 for other in curve.usable)
    text = SINGLE_RUNS if alone else f"single run of c={level.c}: its run-to-run variance is unknown (often 5 %)"
    return Sign(text) if len(level.runs) == 1 else None


# (code, test, advice). A test is asked of every usable level; the highest that shows the shape gives the evidence.
SHAPES: tuple[tuple[str, Callable[[Curve, Level], Sign | None], str], ...] = (
    ("near_linear", near_linear, ""),
    (
        "per_sequence_cost",
        per_sequence_cost,
        "serving_arithmetic.py --measured tells KV reads from other work; more slots bring diminishing returns",
    ),
    ("queueing", queueing, "more slots, if memory allows, or admit fewer requests"),
    ("ttft_split", ttft_split, ""),
    (
        "other_prefills",
        other_prefills,
        "a smaller prefill batch (llama-server --ubatch-size, vLLM --max-num-batched-tokens), or prefix caching",
    ),
    ("past_saturation", past_saturation, ""),
    ("preemptions", preemptions, "a larger KV cache, a shorter context, or fewer sequences at once"),
    (
        "client",
        client_bound,
        "run load_test.py on another machine, through an SSH tunnel; the server stays on loopback",
    ),
    ("short_level", short_level, "more requests per level (--min-rounds 8)"),
    ("draining", draining, "more requests per level (--min-rounds 8)"),
    ("drift", drifting, "let the machine cool and stop other loads, then repeat; --sample 1 records the GPU"),
    ("connecting", connecting, "a longer listen backlog or more HTTP threads (llama-server --threads-http)"),
    (
        "early_stops",
        early_stops,
        "compare tokens per second, not requests; for equal outputs --extra-body '{\"ignore_eos\": true}'",
    ),
    ("cache_luck", cache_luck, "use prompts that differ from the first token on (prompt set mixed)"),
    ("single_run", single_run, "--repeat 3 runs the ladder three times, interleaved"),
)


def read_curve(curve: Curve) -> list[Statement]:
    """Every shape that a curve shows."""
    found = []
    for code, test, shape_advice in SHAPES:
        signs = [(level.c, sign) for level in curve.usable if (sign := test(curve, level))]
        if signs:
            c, (text, values, certain, advice) = signs[-1]
            advice = shape_advice if advice is None else advice
            levels = tuple(c for c, _ in signs)
            found.append(Statement(code, READING, text, levels, advice or None, {"c": c, **values}, certain))
    return found


def note_statements(notebook: Notebook, curve: Curve) -> list[Statement]:
    """What else is known of a curve: what was left out, steady state, failures, the server's side, recovery."""
    found = [
        Statement(code, NOTE, text, (level.c,)) for level in curve.levels for code, text in level_notes(level) if text
    ]
    rates = {level.c: level.median("prefill_tokens_per_s") for level in curve.levels}
    if told := [f"c={c} {rate:.0f}" for c, rate in rates.items() if rate is not None]:
        found.append(Statement("prefill", NOTE, f"prefill, uncached tokens/s by the server's clock: {', '.join(told)}"))
    runs = {record.run for level in curve.levels for record in level.runs}
    for record in notebook.recoveries:
        if record.run in runs:
            states = [f"{'' if record.data.get(key) is True else 'not '}{key}" for key in ("idle", "answered")]
            after = record.number("after_s")
            text = f"recovery: {', '.join(states)}{f' after {after:.1f} s' if after is not None else ''}"
            found.append(Statement("recovery", NOTE, text))
    texts = (("mixed_settings", mixed_settings(curve)), ("remark", curve.remarks))
    return found + [Statement(code, NOTE, text) for code, of_code in texts for text in of_code]


def level_notes(level: Level) -> Iterator[tuple[str, str]]:
    """(code, text) of what is known of one level alone."""
    at = f"at c={level.c}"
    yield "left_out", f"c={level.c} is left out of fit, knee and scaling: {level.left_out}" if level.left_out else ""
    steady, wall = level.median("steady_output_tokens_per_s"), level.median("output_tokens_per_s")
    if steady is not None and wall and abs(steady / wall - 1) > STEADY_SHOWN:
        yield "steady_state", f"steady state {at}: {steady:.1f} tok/s, {steady / wall - 1:+.1%} against the wall figure"
    yield "failed", f"failures {at}: {failures(level)}" if level.total("failed") else ""
    names = level.tally("models")
    yield "models", f"responses {at} named {', '.join(map(printable, names))}" if len(names) > 1 else ""
    for block in ("server", "gpu"):
        keys = dict.fromkeys(key for record in level.runs for key in record.data.get(block) or {})
        figures = [(key, level.median(f"{block}.{key}")) for key in keys]
        text = ", ".join(f"{printable(key)} {value:g}" for key, value in figures if value is not None)
        yield block, f"{block} {at}: {text}" if text else ""
    turns = level.runs[-1].data.get("by_turn")
    rows = [row for row in turns if isinstance(row, dict)] if isinstance(turns, list) else []
    told = (
        f"{turn}: TTFT p50 {shown(as_number(row.get('ttft_p50_s')), 3)} s, cached "
        f"{shown(as_number(row.get('cached_tokens_mean')), 0)} of {shown(as_number(row.get('prompt_tokens_mean')), 0)}"
        for turn, row in enumerate(rows, 1)
    )
    yield "by_turn", f"by turn {at}: {'; '.join(told)}" if rows else ""


def failures(level: Level) -> str:
    """How many requests of a level failed in all its runs, with the first error."""
    errors = [record.data["first_error"] for record in level.runs if record.data.get("first_error")]
    of = level.total("requests") or level.total("failed")
    runs = f" in {len(level.runs)} runs" if len(level.runs) > 1 else ""
    return f"{level.total('failed')} of {of} failed{runs}{f' ({printable(errors[0])[:120]})' if errors else ''}"


def mixed_settings(curve: Curve) -> list[str]:
    """Each setting in which the levels of one label differ."""
    records = [record for level in curve.levels for record in level.runs]
    values = {name: dict.fromkeys(setting_text(record.setting(name), name) for record in records) for name in COMPARED}
    return [
        f"levels of this label differ in {name}: {', '.join(texts)}" for name, texts in values.items() if len(texts) > 1
    ]


# ------------------------------------------------------------------------------ what a record's figures must satisfy

# A writer may round twice (a request to a nanosecond, then its level to a microsecond), and sums of floats are off in
# their last bits: both widen a printed value's interval by less than this.
HALF_SLACK, FLOAT_SLACK = 1.01, 1e-9


class Span(NamedTuple):
    """The true values that a printed figure can stand for."""

    low: float
    high: float

    def meets(self, other: Span) -> bool:
        return self.low <= other.high and other.low <= self.high

    def times(self, other: Span) -> Span:
        """Of figures that are not negative."""
        return Span(self.low * other.low, self.high * other.high)

    def plus(self, other: Span) -> Span:
        return Span(self.low + other.low, self.high + other.high)


def measured(record: Record, path: str) -> Span | None:
    """A printed figure as the interval of half its last printed digit to either side, or None where the record does
    not have it. Counts are exact, and so are numbers of tokens per request; `sum.NAME` adds a block of counts up.

    >>> measured(Record(1, {"wall_s": Printed("12.3")}), "wall_s").meets(Span(12.34, 12.5))
    True
    """
    if path.isdigit():
        return Span(float(path), float(path))
    if path.startswith("sum."):
        block = record.data.get(path[4:])
        return None if block is None else Span(*[float(sum(map(int, block.values())))] * 2)
    value = record.number(path)
    if value is None:
        return None
    exact = KIND.get(path) == "count" or (path.startswith("output_tokens_per_request.") and value.text.isdigit())
    reach = 0.0 if exact else value.half * HALF_SLACK + abs(value) * FLOAT_SLACK
    return Span(max(0.0, value - reach), value + reach)


TAIL_S = 5  # load_test.py waits so long for the close of a response whose last token has come

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
    # Before the window every worker waits for its first token; after it, for the response that it has begun.
    (
        "wall_s",
        "<=",
        f"steady_window_s + connect_s.max + ttft_s.max + connect_s.max + e2e_s.max + {TAIL_S}",
        "no failures",
    ),
    ("steady_window_s * steady_output_tokens_per_s", "<=", "output_tokens", "no failures"),
    # Both means are over the same requests, except in older lines whose counts are mixed.
    ("cached_tokens_mean", "<=", "prompt_tokens_mean", "one kind of count"),
    ("output_tokens_per_request.min * completed", "<=", "output_tokens", ""),
    ("output_tokens", "<=", "output_tokens_per_request.max * completed", ""),
    *((f"ttft_s.{key}", "<=", f"e2e_s.{key}", "") for key in STATISTICS),
    *(
        (f"{name}.{low}", "<=", f"{name}.{high}", "")
        for name in STATS
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
    value = record.raw(path)
    if path.isdigit():
        return f"{path} s"
    if path.startswith("sum."):
        return f"the sum of {path[4:]}"
    return f"{path} {value.text if isinstance(value, Printed) else json.dumps(value)}"


def format_side(record: Record, expression: str, value: Span) -> str:
    """A side of a relation, with its value where it is worked out."""
    words = re.sub(r"[\w.]+", lambda match: format_figure(record, match[0]), expression)
    worked_out = " " in expression or expression.startswith("sum.")
    return f"{words} = {(value.low + value.high) / 2:.6g}" if worked_out else words


def contradictions(record: Record) -> list[str]:
    """Every piece of arithmetic that an honest line satisfies and this one does not."""
    paths = [*NUMBERS, *(f"{name}.{key}" for name in STATS for key in STATISTICS)]
    negative = [f"{format_figure(record, path)} is negative" for path in paths if (record.number(path) or 0.0) < 0.0]
    if negative:
        return negative  # the rest holds for figures that are not negative
    found = []
    for left, relation, right, guard in RELATIONS:
        one, other = evaluate(record, left), evaluate(record, right)
        if one is None or other is None or not GUARDS[guard](record):
            continue
        if one.low > other.high or (relation == "=" and other.low > one.high):
            words = "is not" if relation == "=" else "is more than"
            found.append(f"{format_side(record, left, one)} {words} {format_side(record, right, other)}")
    return found + check_decoding_time(record) + check_within_slo(record)


def check_decoding_time(record: Record) -> list[str]:
    """A request of n >= 2 tokens takes TTFT + TPOT x (n - 1), so the means of E2E - TTFT stand between those of the
    smallest and the largest TPOT, and equal the mean's where all outputs have one length."""
    least, most = (record.count(f"output_tokens_per_request.{key}") for key in ("min", "max"))
    tokens, completed = record.count("output_tokens"), record.count("completed")
    bounds = ("tpot_s.mean", "tpot_s.mean") if least == most else ("tpot_s.min", "tpot_s.max")
    e2e, ttft, low, high = (measured(record, path) for path in ("e2e_s.mean", "ttft_s.mean", *bounds))
    if least is None or least < 2 or tokens is None or not completed or not (e2e and ttft and low and high):
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
    tokens = record.count("output_tokens_per_request.min")
    limits = [(name, record.number(f"slo_{name}")) for name in ("ttft_s", "tpot_s")]
    if record.schema == 1 or not completed or within is None or record.data.get("percentile_method") is not None:
        return []
    if tokens is None or tokens < 2 or any(limit is None for _, limit in limits):
        return []  # below 2 tokens there is no TPOT, and how many those are is not known
    misses, most = 0, completed  # at most so many outside one limit or the other, at most so many inside both
    for name, limit in limits:
        at_least = 0
        for key, percent in zip(STATISTICS[:6], PERCENTS):
            value, index = measured(record, f"{name}.{key}"), rank(percent, completed)
            if value is not None and value.high <= (limit or 0.0):
                at_least = max(at_least, index + 1)
            elif value is not None and value.low > (limit or 0.0):
                most = min(most, index)
        misses += completed - at_least
    least = max(0, completed - misses)
    if least <= within <= most:
        return []
    return [f"within_slo {within} does not fit the percentiles and limits: between {least} and {most} of {completed}"]


PERCENTS = (0, 50, 90, 95, 99, 100)  # of the first six STATISTICS


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
RUN_ID_TIME = re.compile(r"(\d{4})(\d\d)(\d\d)T(\d\d)(\d\d)(\d\d)-")
DATE_SLACK_S = 2.0  # two dates are whole seconds each
LONG_START_S = 12 * 3600.0  # between a run's start and the end of its first level: longer is a server nobody waits for
NOISE_MS = 0.002  # two of the last digit that load_test.py writes: a process is not woken that evenly
NOISE_SHARE = 0.0005  # of TPOT: even a simulated engine's steps differ by a tenth of a per cent
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


def fingerprint(record: Record) -> tuple[Any, ...] | None:
    """c and latency figures, whatever stands around them; None where too few requests stand behind them."""
    figures = latency_figures(record)
    enough = (record.count("completed") or 0) >= 5 and figures
    return (record.c, *((path, float(value)) for path, value in figures.items())) if enough else None


def copied_latencies(records: Sequence[Record]) -> list[str]:
    """Two runs, repeats or labels whose latency figures are equal to the last digit.

    Two honest runs of a steady server can agree where figures are coarse, so equality alone is not enough. Either the
    figures show enough by themselves (see tells_a_copy), or wall time, rate and requests in flight must be equal as
    well, with COPY_LOAD_DIGITS digits between them.
    """
    found = []
    seen: dict[Any, Record] = {}
    for record in records:
        mark = fingerprint(record)
        if mark is None:
            continue
        earlier = seen.setdefault(mark, record)
        both_old = record.schema == 1 and earlier.schema == 1
        runs = (
            (one.label, *((one.data.get("recorded_at"),) if both_old else (one.run, one.repeat)))
            for one in (record, earlier)
        )
        also = ("wall_s", "output_tokens_per_s", "mean_in_flight")
        same = sum(value.digits for path in also if (value := earlier.number(path)) and value == record.number(path))
        if len(set(runs)) > 1 and (tells_a_copy(latency_figures(record)) or same >= COPY_LOAD_DIGITS):
            found.append(
                f"{place(record)} and {place(earlier)} are different runs or repeats, but all "
                f"{len(mark) - 1} latency figures are equal to the last digit"
            )
    return found


def missing_digits(record: Record) -> list[str]:
    """Whether latency figures of a schema 2 line have fewer decimals than load_test.py writes.

    A figure of a microsecond's resolution ends in k zeros, which JSON leaves out, once in 10^k: a handful of different
    figures that lack one and a half digits each, on average, were rounded afterwards.
    """
    figures = {float(value): value for value in latency_figures(record).values() if value > 0}
    lacking = sum(max(0, WRITTEN_DECIMALS - value.decimals) for value in figures.values())
    if record.schema == 1 or len(figures) < 6 or lacking < 1.5 * len(figures):
        return []
    each = f"{lacking / len(figures):.1f} digits each of what load_test.py writes"
    return [f"its {len(figures)} latency figures lack {each}"]


def run_start(record: Record) -> float | None:
    """When a record's run began by its run id, which starts with the local time, in seconds since 1970; or None."""
    match = RUN_ID_TIME.match(record.run)
    if match is None:
        return None
    year, month, day, hour, minute, second = match.groups()
    offset = re.search(r"(Z|[+-]\d\d:?\d\d)$", str(record.data.get("recorded_at")))
    return parse_instant(f"{year}-{month}-{day}T{hour}:{minute}:{second}{offset[0] if offset else ''}")


def impossible_dates(records: Sequence[Record]) -> list[str]:
    """Levels of one run whose dates do not leave room for them. Each is recorded as it ends, so it began wall_s before,
    and neither before the run did nor before the level recorded ahead of it."""
    runs: dict[str, list[Record]] = {}
    for record in records:
        if record.schema > 1 and record.instant is not None:
            runs.setdefault(record.run, []).append(record)
    found = []
    for run in runs.values():
        since, what = run_start(run[0]), "its run began"
        for number, record in enumerate(sorted(run, key=lambda record: (record.instant or 0.0, record.line))):
            if since is not None:
                room, wall_s = (record.instant or 0.0) - since, record.number("wall_s") or 0.0
                if room < wall_s - DATE_SLACK_S:
                    found.append(f"{place(record)}: recorded {room:.0f} s after {what}, but its wall_s is {wall_s:g}")
                elif number == 0 and room > LONG_START_S:
                    found.append(f"{place(record)}: recorded {room / 3600:.0f} hours after {what}")
            since, what = record.instant, f"line {record.line} of its run was recorded"
    return found


def without_noise(curve: Curve) -> list[str]:
    """A curve that lies on its fit to the last digit written, with levels in which every request had one TPOT."""
    fit = curve.fit
    if fit is None or len(fit.levels) < 4:
        return []
    levels = [level for level in curve.usable if level.c in fit.levels]
    off_ms, spread = 0.0, 0.0
    for level in levels:
        least, median, most = (level.median(f"tpot_s.{key}") for key in ("min", "p50", "max"))
        if not least or not median or not most or level.runs[0].schema == 1:
            return []
        off_ms = max(off_ms, abs(1000.0 * median - fit.a_ms - fit.b_ms * level.c))
        spread = max(spread, most / least - 1.0)
    if spread > NOISE_SHARE or off_ms > NOISE_MS:
        return []
    even = f"TPOT p50 within {off_ms:.4f} ms of the fitted line at {len(levels)} levels, max within {spread:.3%} of min"
    return [f"{as_word(curve.label)}: {even}: no measurement is that even"]


# ------------------------------------------------------------------------- recomputing levels from per-request lines

RAW_STEP_S = 1e-6  # a per-request line gives its times to a microsecond


@dataclass
class RawFile:
    """The per-request lines of a --raw file, by the level they belong to: (label, run, repeat, c)."""

    path: str
    levels: dict[tuple[str, str, int, int], list[Mapping[str, Any]]] = field(default_factory=dict)
    damaged: list[Remark] = field(default_factory=list)


def read_raw(path: str) -> RawFile:
    """Read a --raw file. Raises UserError where it cannot be read or holds no request at all."""
    raw = RawFile(path)
    for number, line in enumerate(file_lines(path), 1):
        text = line.decode("utf-8", errors="replace").strip("\ufeff \t\r\n")
        if not text:
            continue
        try:
            data = parse_json(text)
            if not isinstance(data, dict) or not all(is_count(data.get(key)) for key in ("repeat", "concurrency")):
                raise ValueError("no per-request record")
            ours = {name: value for name, value in data.items() if name != "timings"}  # the server's own, in any unit
            if fault := oversized("", ours):
                raise ValueError(fault)
        except ValueError as error:
            raw.damaged.append(Remark(number, str(error)))
        else:
            key = (str(data.get("label")), str(data.get("run_id")), int(data["repeat"]), int(data["concurrency"]))
            raw.levels.setdefault(key, []).append(data)
    if not raw.levels:
        raise UserError(f"{path} holds no per-request record: load_test.py --raw FILE writes them")
    return raw


def figures_of(requests: Iterable[Mapping[str, Any]], path: str) -> list[float]:
    """One figure of the requests that have it."""
    return [float(value) for value in (as_number(request.get(path)) for request in requests) if value is not None]


def raw_figures(requests: Sequence[Mapping[str, Any]], c: int) -> dict[str, tuple[float, float]]:
    """Every measured figure of a level that follows from its requests, and by how much their own rounding blurs it."""
    good = [request for request in requests if request.get("ok") is True]
    found: dict[str, tuple[float, float]] = {}
    for name in (*LATENCIES, "connect_s", "output_tokens"):
        values = sorted(figures_of(good, name))
        block = "output_tokens_per_request" if name == "output_tokens" else name
        if values:
            found[f"{block}.mean"] = math.fsum(values) / len(values), RAW_STEP_S
            for key, percent in zip(STATISTICS[:6], PERCENTS):
                found[f"{block}.{key}"] = values[rank(percent, len(values))], RAW_STEP_S
    parts = ("started_s", "connect_s", "ended_s")
    timed = [[value for name in parts if (value := as_number(request.get(name))) is not None] for request in requests]
    if timed and all(len(times) == 3 for times in timed):
        wall = max(map(math.fsum, timed))
        found["wall_s"] = wall, 3 * RAW_STEP_S
        if wall > 0:
            in_flight = min(math.fsum(connect + ended for _, connect, ended in timed) / wall, c)
            found["mean_in_flight"] = in_flight, (len(timed) + 3 * in_flight) * RAW_STEP_S / wall
    reporting = [request for request in good if as_number(request.get("prompt_tokens")) is not None]
    prompts, cached = figures_of(reporting, "prompt_tokens"), figures_of(reporting or good, "cached_tokens")
    if prompts:
        found["prompt_tokens_mean"] = math.fsum(prompts) / len(prompts), 0.0
    if cached:  # a request that reports none counts as 0 beside others that report some
        found["cached_tokens_mean"] = math.fsum(cached) / len(reporting or good), 0.0
    return found


def raw_counts(record: Record, requests: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Every count of a level that follows from its requests."""
    good = [request for request in requests if request.get("ok") is True]
    bad = [request for request in requests if request.get("ok") is not True]
    tallies: dict[str, dict[str, int]] = {"finish_reasons": {}, "errors": {}}
    for path, key, of in (("finish_reasons", "finish", good), ("errors", "error_class", bad)):
        for name in (str(request.get(key) or "none") for request in of):
            tallies[path][name] = tallies[path].get(name, 0) + 1
    counts = {
        "requests": len(requests),
        "completed": len(good),
        "failed": len(bad),
        "output_tokens": int(math.fsum(figures_of(good, "output_tokens"))),
        "coalesced": sum(request.get("coalesced") is True for request in good),
        **tallies,
    }
    slo_ttft, slo_tpot = record.number("slo_ttft_s"), record.number("slo_tpot_s")
    if slo_ttft is not None and slo_tpot is not None:
        counts["within_slo"] = sum(  # below 2 tokens there is no TPOT to miss its limit
            (as_number(request.get("ttft_s")) or math.inf) <= slo_ttft
            and (as_number(request.get("tpot_s")) or 0.0) <= slo_tpot
            for request in good
        )
    return counts


def raw_differences(record: Record, requests: Sequence[Mapping[str, Any]]) -> list[str]:
    """Each figure of a level record that its per-request lines do not give."""
    found = []
    for path, count in raw_counts(record, requests).items():
        written = record.raw(path)
        if isinstance(count, dict) and written is not None:
            written = {name: int(number) for name, number in written.items()}
        if written is not None and written != count:
            found.append(f"{format_figure(record, path)}, but its requests give {json.dumps(count)}")
    for path, (figure, blur) in raw_figures(requests, record.c).items():
        printed = measured(record, path)
        if printed is not None and not printed.meets(Span(figure - blur, figure + blur)):
            found.append(f"{format_figure(record, path)}, but its requests give {figure:.6g}")
    return found


# ------------------------------------------------------------------------------------------------ rules of the check

SHOWN_ITEMS = 6  # cases named on a rule's line; --json names all
COUNTER_GAP = 0.02  # the server's and the responses' cached tokens may differ by what was in flight at the ends
IDENTIFYING = ("host", "quant", "context_length", "server_slots")
PAIR_SETTINGS = ("engine", "model", "host", "quant", "max_tokens")


@dataclass(frozen=True)
class Audit:
    """What the rules look at: the curves of a notebook, or one of them, and the records behind them."""

    notebook: Notebook
    curves: Mapping[str, Curve]
    records: Sequence[Record]
    raw: RawFile | None

    def levels(self, prompt_set: str | None = None) -> Iterator[tuple[str, Level]]:
        """(how a finding names it, level) of every level (of one prompt set)."""
        for curve in self.curves.values():
            for level in curve.levels:
                if prompt_set is None or level.setting("prompt_set") == prompt_set:
                    yield f"{as_word(curve.label)} c={level.c}", level

    def baselines(self) -> list[Curve]:
        """Whole sweeps: labels with prompt set mixed and a completed request at each of the lab's levels."""
        return [curve for curve in self.curves.values() if not missing_levels(curve)]


def missing_levels(curve: Curve) -> list[int]:
    """The lab's levels without a completed request of prompt set mixed in a whole run."""
    done = {
        level.c
        for level in curve.levels
        if level.setting("prompt_set") == "mixed" and level.median("completed") and not level.interrupted
    }
    return [c for c in SWEEP_LEVELS if c not in done]


class Found(NamedTuple):
    """What a rule found: its cases, or what it says where there is none; `status` replaces the rule's own."""

    items: Sequence[str]
    good: str = ""
    status: str | None = None


def rule_sweep(audit: Audit) -> Found:
    whole = audit.baselines()
    mixed = [c for c in audit.curves.values() if any(level.setting("prompt_set") == "mixed" for level in c.levels)]
    levels = c_list(SWEEP_LEVELS)
    items = [
        f"{as_word(c.label)} has no whole level with a completed request at c={c_list(missing_levels(c))}"
        for c in mixed
    ]
    items = items or [f"no label with prompt set mixed; levels c={levels} are needed"]
    return Found([], f"{as_word(whole[0].label)}: completed requests at c={levels}") if whole else Found(items)


def rule_prefix_pair(audit: Audit) -> Found:
    """A shared-prefix and a unique-prefix label of one engine, model, host, quant, output cap and levels. One whole
    pair is enough to pass; a label whose partner is missing beside it is a warning."""
    sides: dict[str, dict[tuple[str, ...], str]] = {"shared-prefix": {}, "unique-prefix": {}}
    for curve in audit.curves.values():
        for prompt_set, labels in sides.items():
            levels = [level.c for level in curve.usable if level.setting("prompt_set") == prompt_set]
            if levels:
                key = (*(setting_text(curve.settings[name]) for name in PAIR_SETTINGS), c_list(levels))
                labels[key] = as_word(curve.label)
    shared, unique = sides.values()
    pairs = [f"{shared[key]} with control {unique[key]}" for key in shared if key in unique]
    alone = []
    sides_of = ((shared, unique, "unique-prefix control"), (unique, shared, "shared-prefix partner"))
    for labels, others, partner in sides_of:
        for key, label in labels.items():
            told = ", ".join(f"{name} {text}" for name, text in zip((*PAIR_SETTINGS, "levels"), key))
            alone += [] if key in others else [f"{label} has no {partner} of {told}"]
    if not shared and not unique:
        alone = ["no label with prompt set shared-prefix, and none with unique-prefix"]
    return Found(alone, "; ".join(pairs), WARN if pairs else None)


def cached_rule(prompt_set: str, holds: Callable[[float], bool], want: str, audit: Audit) -> Found:
    """Every level of a prompt set has a cached share within a limit."""
    levels = list(audit.levels(prompt_set))
    known = [(where, level, level.cached_share) for where, level in levels if not no_cached_count(level)]
    known = [(where, level, share) for where, level, share in known if share is not None]
    if not levels:
        return Found([f"no {prompt_set} level: nothing shows a cached share {want}"])
    if not known:
        return Found([f"not judged: no {prompt_set} level has a cached count"], status=WARN)
    bad = []
    for where, level, share in known:
        if share is not None and not holds(share):
            figures = [shown(level.median(f"{name}_tokens_mean"), 1) for name in ("cached", "prompt")]
            bad.append(f"{where}: {figures[0]} cached of {figures[1]} prompt tokens is {share:.1%}, not {want}")
    return Found(bad, f"{', '.join(f'{where} {share:.0%}' for where, _, share in known)}: {want}")


def no_cached_count(level: Level) -> bool:
    """Whether the server reports no cached tokens; a version 1 line's 0.0 may be that too, so it is taken as that for
    what should be cached."""
    zero_is_unknown = level.setting("prompt_set") == "shared-prefix"
    counts = [(record.schema, record.number("cached_tokens_mean")) for record in level.runs]
    return all(count is None or (schema == 1 and count == 0.0 and zero_is_unknown) for schema, count in counts)


def shared_without_count(level: Level) -> str | None:
    missing = level.setting("prompt_set") == "shared-prefix" and no_cached_count(level)
    advice = "(vLLM: start it with --enable-prompt-tokens-details)"
    return f"the server does not report cached tokens {advice}" if missing else None


def server_cached(level: Level) -> str | None:
    """The cached tokens that responses reported against the server's own counter."""
    for record in level.runs:
        mean, counter = measured(record, "cached_tokens_mean"), record.number("server.cached_tokens")
        completed = record.count("completed") or 0
        if mean is None or counter is None or record.count("failed"):
            continue
        low, high = mean.low * completed * (1 - COUNTER_GAP) - 1, mean.high * completed * (1 + COUNTER_GAP) + 1
        if not low <= counter <= high:
            told = f"responses report {(mean.low + mean.high) / 2 * completed:.0f} cached tokens"
            return f"{told}, the server's own counter {counter:.0f}"
    return None


def server_settings(level: Level) -> str | None:
    """Slots and context that the server itself reports against those of the record."""
    texts = []
    for name, path, words in (
        ("server_slots", "server.slots", "slots"),
        ("context_length", "server.context_per_slot", "tokens of context a slot"),
    ):
        recorded, reported = level.setting(name), level.median(path)
        if recorded is not None and reported and reported != recorded:
            texts.append(f"the server has {reported:g} {words}, the record says {recorded}")
    return "; ".join(texts) or None


def token_counts(level: Level) -> str | None:
    kinds = {json.dumps(record.data.get("token_counts")) for record in level.runs if record.count("completed")}
    if "null" in kinds:
        return "from what tokens were counted is not recorded"
    return f"counted from {printable(', '.join(sorted(kinds)))}" if kinds - {'"usage"'} else None


def finish(level: Level) -> str | None:
    count, named = not_by_length(level)
    return f"not every answer ran to its length ({named}): compare tokens/s, not requests/s" if count else None


def few_rounds(level: Level) -> str | None:
    few = level.rounds is not None and level.rounds < 2
    requests = counted(min(level.values("requests"), default=0), "request")
    return f"{requests}, which is {counted(round(level.rounds or 0, 2), 'round')}" if few else None


def held_back(level: Level) -> str | None:
    of = counted(level.total("completed"), "response")
    return f"{level.total('coalesced')} of {of} came in one or two bursts" if level.total("coalesced") else None


def each_level(test: Callable[[Level], str | None], good: str, audit: Audit) -> Found:
    """A rule that asks every level the same question."""
    return Found([f"{where}: {text}" for where, level in audit.levels() if (text := test(level))], good)


def each_record(test: Callable[[Record], Sequence[str]], good: str, audit: Audit) -> Found:
    """A rule that asks every record the same question."""
    return Found([f"{place(record)}: {text}" for record in audit.records for text in test(record)], good)


def place(record: Record) -> str:
    return f"line {record.line}, {as_word(record.label)} c={record.c}"


def rule_consistent(audit: Audit) -> Found:
    found = each_record(contradictions, f"{counted(len(audit.records), 'record')} without contradiction", audit)
    return found._replace(items=[*found.items, *copied_latencies(audit.records)])


def rule_dates(audit: Audit) -> Found:
    items = [
        f"{item} (a date or a duration was changed, or the clock was set)" for item in impossible_dates(audit.records)
    ]
    return Found(items, "no run's dates lack room for its levels")


def rule_noise(audit: Audit) -> Found:
    items = [item for curve in audit.curves.values() for item in without_noise(curve)]
    return Found(items, "no curve of four levels is without noise")


def rule_identified(audit: Audit) -> Found:
    items = []
    for curve in audit.curves.values():
        runs = [record for level in curve.levels for record in level.runs]
        missing = [name for name in IDENTIFYING if any(record.setting(name) is None for record in runs)]
        items += [f"{as_word(curve.label)}: {', '.join(missing)} missing"] if missing else []
    return Found(items, f"{', '.join(IDENTIFYING)} are given everywhere")


def searched(level: Level) -> bool:
    """Whether a level was tried by --find-operating-point, which repeats only the one that it answers with."""
    return any(run.data.get("searched") is True for run in level.runs)


def rule_same_setup(audit: Audit) -> Found:
    """The levels of a label were measured on one setup, and as often as each other."""
    items = []
    for curve in audit.curves.values():
        texts = [*mixed_settings(curve), *(text for text in curve.remarks if text != VERSION_1_REMARK)]
        items += [f"{as_word(curve.label)}: {text}" for text in texts]
        most = max((len(level.runs) for level in curve.levels if not searched(level)), default=0)
        items += [
            f"{as_word(curve.label)} c={level.c}: {counted(len(level.runs), 'run')}, where other levels have {most}"
            for level in curve.levels
            if len(level.runs) < most and not level.interrupted and not searched(level)
        ]
    return Found(items, "no label's levels differ in setup or number of runs")


def rule_second_engine(audit: Audit) -> Found:
    """Two engines have a whole baseline each."""
    engines = {str(curve.settings["engine"]): as_word(curve.label) for curve in reversed(audit.baselines())}
    engines.pop("None", None)
    named = ", ".join(f"{label} ({printable(engine)})" for engine, label in reversed(engines.items()))
    only = f"only {named}" if named else "no whole baseline names its engine"
    item = f"no second engine's baseline at c={c_list(SWEEP_LEVELS)}: {only}; if it could not run, say so in prose"
    return Found([] if len(engines) > 1 else [item], named)


def rule_variants(audit: Audit) -> Found:
    missing = [label for label in VARIANT_LABELS if label not in audit.curves or not audit.curves[label].usable]
    return Found([f"{', '.join(missing)} missing"] if missing else [], ", ".join(VARIANT_LABELS))


def rule_summary(audit: Audit) -> Found:
    """Each whole baseline has a curve-summary line."""
    have = {record.label for record in audit.notebook.summaries}
    missing = [as_word(curve.label) for curve in audit.baselines() if curve.label not in have]
    missing = missing or ([] if have else ["LABEL"])
    items = [f"no curve-summary of {word}: append it with {PROGRAM} --label {word} --record" for word in missing]
    return Found(items, ", ".join(map(as_word, sorted(have))))


def rule_lines(remarks: Sequence[Remark], good: str) -> Found:
    """A rule about lines that could not be read."""
    return Found([f"line {remark.line}: {printable(remark.text)}" for remark in remarks], good)


def rule_raw(audit: Audit) -> Found:
    """With --raw: each level record is what its per-request lines give, and neither file has a level that the other
    lacks. A level without its counterpart is a warning, not a failure."""
    raw = audit.raw
    assert raw is not None
    items = [f"{raw.path} {item}" for item in rule_lines(raw.damaged, "").items]
    absent, unused = [], dict(raw.levels)
    for record in audit.records:
        requests = unused.pop((record.label, record.run, record.repeat, record.c), None)
        if requests is not None:
            items += [f"{place(record)}: {difference}" for difference in raw_differences(record, requests)]
        elif record.schema > 1:
            absent.append(f"{place(record)}: no request of its run in {raw.path}")
    elsewhere = {(record.label, record.run, record.repeat, record.c) for record in audit.notebook.records}
    for label, run, repeat, c in unused.keys() - elsewhere:
        held = f"{raw.path} holds run {printable(run)}, repeat {repeat}, which the notebook lacks"
        absent.append(f"{as_word(label)} c={c}: {held}")
    used = counted(len(raw.levels) - len(unused), "level record")
    return Found(items + absent, f"{used} recomputed from {raw.path}: the same", None if items else WARN)


# (code, what a case means for a notebook, what it means for one label alone, which the lab's scripts check after a
# load; None: not asked there; test)
RULES: tuple[tuple[str, str | None, str | None, Callable[[Audit], Found]], ...] = (
    ("sweep", FAIL, None, rule_sweep),
    ("prefix-pair", FAIL, None, rule_prefix_pair),
    ("shared-cached", FAIL, FAIL, partial(cached_rule, "shared-prefix", lambda share: share > 0.5, "above 50 %")),
    ("unique-cached", FAIL, FAIL, partial(cached_rule, "unique-prefix", lambda share: share < 0.1, "below 10 %")),
    ("consistent", FAIL, FAIL, rule_consistent),
    ("digits", WARN, WARN, partial(each_record, missing_digits, "no line lacks digits that load_test.py writes")),
    ("dates", WARN, WARN, rule_dates),
    ("noise", WARN, WARN, rule_noise),
    (
        "damaged-lines",
        FAIL,
        None,
        lambda audit: rule_lines(audit.notebook.damaged, f"{counted(len(audit.records), 'level record')} parsed"),
    ),
    (
        "failed-requests",
        WARN,
        FAIL,
        partial(each_level, lambda level: failures(level) if level.total("failed") else None, "none"),
    ),
    (
        "tokens-from-usage",
        WARN,
        FAIL,
        partial(each_level, token_counts, "no level counts tokens from anything but usage"),
    ),
    ("finish", None, WARN, partial(each_level, finish, "no answer is recorded to have ended early")),
    ("in-flight", None, FAIL, partial(each_level, few_in_flight, "no level's in flight is well below c")),
    ("server-settings", WARN, FAIL, partial(each_level, server_settings, "no server reports other slots or context")),
    ("identified", WARN, WARN, rule_identified),
    ("same-setup", WARN, WARN, rule_same_setup),
    ("cached-count", WARN, WARN, partial(each_level, shared_without_count, "no shared-prefix level lacks a count")),
    ("cached-counter", WARN, WARN, partial(each_level, server_cached, "no server counter disagrees")),
    ("second-engine", WARN, None, rule_second_engine),
    ("variants", WARN, None, rule_variants),
    ("client-bound", WARN, WARN, partial(each_level, client_evidence, "no level shows the client as the limit")),
    ("coalesced", WARN, WARN, partial(each_level, held_back, "no level reports a response held back by a proxy")),
    (
        "interrupted",
        WARN,
        WARN,
        partial(
            each_level, lambda level: "interrupted" if level.interrupted else None, "no level has only interrupted runs"
        ),
    ),
    ("rounds", WARN, WARN, partial(each_level, few_rounds, "no level of fewer than 2 rounds (requests / c)")),
    ("curve-summary", WARN, None, rule_summary),
    (
        "format-version",
        WARN,
        None,
        lambda audit: rule_lines(audit.notebook.unknown, "every line is of a known version"),
    ),
)


def check(notebook: Notebook, raw: RawFile | None = None, curve: Curve | None = None) -> list[Statement]:
    """Every rule's statement on a notebook, or on one label's curve, in a fixed order."""
    audit = Audit(notebook, notebook.curves, notebook.records, raw)
    if curve is not None:
        audit = Audit(notebook, {curve.label: curve}, [run for level in curve.levels for run in level.runs], raw)
    found = []
    for code, notebook_status, label_status, test in (*RULES, *([("raw", FAIL, FAIL, rule_raw)] if raw else [])):
        status = notebook_status if curve is None else label_status
        other_prompts = code in PROMPTS_OF_RULE and not any(audit.levels(PROMPTS_OF_RULE[code]))
        if status is None or (curve is not None and other_prompts):
            continue
        items, good, own_status = test(audit)
        text = "; ".join(items[:SHOWN_ITEMS]) + (
            f"; and {len(items) - SHOWN_ITEMS} more" if items[SHOWN_ITEMS:] else ""
        )
        good = good if notebook.records else "no level to judge"
        found.append(Statement(code, (own_status or status) if items else PASS, text or good, items=tuple(items)))
    return found


PROMPTS_OF_RULE = {"shared-cached": "shared-prefix", "unique-cached": "unique-prefix"}  # asked of no other label alone


# --------------------------------------------------------------------------------------------- documents for output

RANGED = ("output_tokens_per_s", "goodput_requests_per_s", "ttft_s.p50", "ttft_s.p90", "tpot_s.p50", "tpot_s.p90")
PROMPT_GAP = 0.02  # of the mean prompt: more is other text or another template
UNREADABLE = "UNREADABLE"

Document = Mapping[str, Any]


def curve_document(curve: Curve, notebook: Notebook | None = None) -> dict[str, Any]:
    """Everything that is said of one label: what --label L --json prints, what stands under "a" and "b" of --compare
    --json, and what every view shows. `notebook` adds its path, its recovery lines and its check.

    kind "curve" · tool_version · notebook (path) · label · answer {text, c, per_request_tokens_per_s, lower_bound,
    highest_measured, outside [c], runs}: the operating point in the reader's terms ·
    settings {engine, engine_version, model, prompt_set, prompt_text, host, quant, context_length, server_slots,
    max_tokens, temperature, slo_ttft_s, slo_tpot_s, extra_body, turns, duration_s, arrival, base_url, seed}: null
    where the notebook does not say · slo {ttft_s, tpot_s}: of the newest level ·
    levels: sorted by c, each {c; runs (how many); interrupted; left_out (why it enters no derived figure, or null);
    requests, completed, failed, output_tokens, within_slo, coalesced, wall_s, output_tokens_per_s, requests_per_s,
    goodput_requests_per_s, mean_in_flight, prompt_tokens_mean, cached_tokens_mean, steady_output_tokens_per_s,
    steady_window_s, tokens_per_delta, prefill_tokens_per_s: medians over the runs; ttft_s, tpot_s, e2e_s, connect_s,
    chunk_gap_s, output_tokens_per_request: {min, p50, p90, p95, p99, max, mean} of medians, or null; cached_share (0
    to 1); finish_reasons, errors, models {name: median count}; token_counts, by_turn, first_error: as the last run
    recorded them; server, client, ttft_split_s, drift, gpu: medians of the numbers in them, or null; scaling;
    decode_bound_output_tokens_per_s: n / (a + b n), n = min(c, slots); in_fit; slo {ttft_s, tpot_s} and
    server_slots recorded with the level; meets_objective (null where it cannot be told); ranges {path: [lowest,
    highest]} where repeated; run_ids; lines (in the notebook); recorded_at; schema} ·
    fit {a_ms, b_ms, largest_residual (a share), b_interval_ms [low, high] or null, levels, ceiling_tokens_per_s,
    ceiling_note, c_at_slo, c_at_slo_note} or null · knee {between [c, c] or null} · operating_point (c or null) ·
    peak {c, output_tokens_per_s} or null ·
    statements [{code, status (READING or NOTE), levels, text, advice, values, certain}] ·
    check {statements [{code, status (PASS, WARN or FAIL), text, items}], pass, warn, fail}: of the whole notebook, or
    null without one.

    Times are in seconds where a name ends in _s and in milliseconds where it ends in _ms; a figure that is not
    known is null, never 0.
    """
    book = notebook or Notebook("")
    peak = max(curve.rates, key=lambda point: point[1], default=None)
    said = [*note_statements(book, curve), *read_curve(curve)]
    return {
        "kind": "curve",
        "tool_version": TOOL_VERSION,
        "notebook": book.path,
        "label": curve.label,
        "answer": answer(curve),
        "settings": dict(curve.settings),
        "slo": {name: curve.settings[f"slo_{name}"] for name in ("ttft_s", "tpot_s")},
        "levels": [level_document(curve, level) for level in curve.levels],
        "fit": fit_document(curve),
        "knee": {"between": list(curve.knee) if curve.knee else None},
        "operating_point": curve.operating_point,
        "peak": {"c": peak[0], "output_tokens_per_s": peak[1]} if peak else None,
        "statements": [pick(item, "code status levels text advice values certain") for item in said],
        "check": check_document(check(book)) if notebook else None,
    }


def pick(item: Statement, names: str) -> dict[str, Any]:
    """Some of a statement's parts, as JSON has them."""
    parts = {name: getattr(item, name) for name in names.split()}
    return {name: list(value) if isinstance(value, tuple) else value for name, value in parts.items()}


def check_document(statements: Sequence[Statement]) -> dict[str, Any]:
    """A check's statements and their counts."""
    counts = {status.lower(): sum(item.status == status for item in statements) for status in (PASS, WARN, FAIL)}
    return {"statements": [pick(item, "code status text items") for item in statements], **counts}


def level_document(curve: Curve, level: Level) -> dict[str, Any]:
    """One level for curve_document."""
    last, misses = level.runs[-1].data, level.slo_misses
    figures: dict[str, Any] = {}
    for name in LEVEL_FIELDS:
        if KIND[name] in ("count", "measure"):
            figures[name] = whole(level.median(name))
        elif KIND[name] == "stats":
            block = {key: whole(level.median(f"{name}.{key}")) for key in STATISTICS}
            figures[name] = block if any(value is not None for value in block.values()) else None
        elif KIND[name] == "tally":
            counts = {key: [(run.raw(name) or {}).get(key, 0) for run in level.runs] for key in level.tally(name)}
            figures[name] = {key: whole(statistics.median(map(float, values))) for key, values in counts.items()}
        else:
            blocks = [run.data.get(name) for run in level.runs]
            figures[name] = block_medians(blocks) if KIND[name] == "block" else blocks[-1]
    return {
        "c": level.c,
        "runs": len(level.runs),
        "interrupted": level.interrupted,
        "left_out": level.left_out,
        **figures,
        "cached_share": level.cached_share,
        "scaling": curve.scaling(level),
        "decode_bound_output_tokens_per_s": curve.decode_bound(level.c),
        "in_fit": curve.fit is not None and level in curve.usable and level.c in curve.fit.levels,
        "slo": {name: level.setting(f"slo_{name}") for name in ("ttft_s", "tpot_s")},
        "server_slots": level.setting("server_slots"),
        "meets_objective": None if misses is None else not misses,
        "ranges": {path: list(limits) for path in RANGED if (limits := level.range(path))},
        "run_ids": list(dict.fromkeys(record.run for record in level.runs)),
        "lines": [record.line for record in level.runs],
        "recorded_at": last.get("recorded_at"),
        "schema": max(record.schema for record in level.runs),
    }


def whole(value: float | None) -> float | None:
    """A median as a whole number where it is one: 40, not 40.0."""
    return int(value) if value is not None and float(value).is_integer() else value


def block_medians(blocks: Sequence[Any]) -> Any:
    """One block of several runs (server, client, ...): the median of each number, what is no number as the last run
    has it; None where no run has the block."""
    known = [block for block in blocks if block is not None]
    if known and all(isinstance(block, Mapping) for block in known):
        keys = dict.fromkeys(key for block in known for key in block)
        return {key: block_medians([block.get(key) for block in known]) for key in keys}
    numbers = [as_number(block) for block in known]
    if known and all(number is not None for number in numbers):
        return whole(statistics.median(float(number or 0.0) for number in numbers))
    return known[-1] if known else None


def fit_document(curve: Curve) -> dict[str, Any] | None:
    """The TPOT fit for curve_document, and how far what it implies can be taken; None where there are too few
    points."""
    fit, slo, slots = curve.fit, curve.settings["slo_tpot_s"], curve.slots
    if fit is None:
        return None
    measured_to = f"extrapolated, measured {fit.levels[0]} to {fit.levels[-1]}"
    only_slots = f"not reached: only {counted(slots or 0, 'slot')} decode together"
    ceiling, at = fit.ceiling, fit.c_at(slo)
    if ceiling is None:
        ceiling_note = at_note = fit.no_growth
    else:
        ceiling_note = measured_to + (f"; {only_slots}" if slots else "")
        beyond = at is not None and not fit.levels[0] <= at <= fit.levels[-1]
        notes = [measured_to] if beyond else []
        at_note = "; ".join(notes + ([only_slots] if at is not None and slots and at > slots else []))
        if at is None or at <= 0:
            at, at_note = None, "no TPOT SLO is recorded" if slo is None else "met at no c: the SLO is below a"
    return {
        "a_ms": fit.a_ms,
        "b_ms": fit.b_ms,
        "largest_residual": fit.largest_residual,
        "b_interval_ms": list(fit.b_interval_ms) if fit.b_interval_ms else None,
        "levels": list(fit.levels),
        "ceiling_tokens_per_s": ceiling,
        "ceiling_note": ceiling_note,
        "c_at_slo": at,
        "c_at_slo_note": at_note or None,
    }


def answer(curve: Curve) -> dict[str, Any]:
    """How many requests in flight stay inside the SLO, and what each then gets, in a sentence with its conditions."""
    tried = [level for level in curve.levels if not level.interrupted]
    outside = [level for level in tried if level.slo_misses]
    level = next((one for one in tried if one.c == curve.operating_point), None)
    rate, above = level.median("output_tokens_per_s") if level else None, False
    if not any(one.median("completed") for one in tried):
        text = "No whole level has a completed request: the curve answers nothing."
    elif not any(one.setting("slo_ttft_s") is not None and one.setting("slo_tpot_s") is not None for one in tried):
        text = "No SLO is recorded with the levels, so none can be said to stay inside it (--slo-ttft, --slo-tpot)."
    elif level is None and not outside:
        reasons = ", ".join(f"c={one.c} {one.left_out or 'has no TTFT, or only a part of an SLO'}" for one in tried)
        text = f"No level can be judged against its SLO: {reasons}."
    elif level is None:
        lowest = outside[0]
        misses = " and ".join(lowest.slo_misses or [])
        known = all(one.slo_misses is not None for one in tried)
        which = "No level measured" if known else "No level measured with an SLO"
        text = f"{which} stays inside {slo_text(lowest)}: at c={lowest.c} {misses}."
    else:
        higher = [one for one in outside if one.c > level.c]
        lower = [one.c for one in outside if one.c < level.c]
        above = bool(higher)
        text = f"{'Up to' if above else 'At least'} {counted(level.c, 'request')} in flight "
        text += f"{'stays' if level.c == 1 else 'stay'} inside {slo_text(level)} (p90)"
        text += "" if rate is None else f", each then getting {rate / level.c:.1f} tokens/s"
        if above:
            text += f"; {higher[0].c} is outside ({' and '.join(higher[0].slo_misses or [])})"
        else:
            highest = "the highest level measured" if level is curve.levels[-1] else "the highest that can be judged"
            text += f"; {level.c} is {highest}, so this is a lower bound"
        text += f"; yet c={c_list(lower)} was outside" if lower else ""
        missed = sum(Level(level.c, (run,)).slo_misses != [] for run in level.runs)
        runs = "1 run: run-to-run variance unknown"
        if len(level.runs) > 1:
            runs = f"{len(level.runs)} runs of that level{f', {missed} of them outside' if missed else ''}"
        text += f" ({runs})."
    return {
        "text": text,
        "c": curve.operating_point,
        "per_request_tokens_per_s": rate / level.c if level and rate is not None else None,
        "lower_bound": not above if level else None,
        "highest_measured": tried[-1].c if tried else None,
        "outside": [one.c for one in outside],
        "runs": len(level.runs) if level else None,
    }


def slo_text(level: Level) -> str:
    """The SLO recorded with a level."""
    ttft, tpot = level.setting("slo_ttft_s"), level.setting("slo_tpot_s")
    parts = [f"TTFT {ttft:g} s"] if ttft is not None else []
    return " and ".join(parts + ([f"TPOT {1000 * tpot:g} ms"] if tpot is not None else [])) or "its SLO"


def compare_document(notebook: Notebook, a: Curve, b: Curve) -> dict[str, Any]:
    """What --compare A B --json prints: kind "compare" · tool_version · notebook · a, b: curve documents · levels
    [{c, output_tokens_per_s {a, b, ratio, low, high, different (true, false, or null for no verdict), a_runs, b_runs},
    and {a, b} of each other figure by its dotted path}] · statements [{code, text, values}].

    Raises ResultError where no level of both has a completed request.
    """
    ours, theirs = ({level.c: level for level in curve.usable} for curve in (a, b))
    paths = [column.path for column in COLUMNS if "compared" in column.flags and column.path != "output_tokens_per_s"]
    rows = [
        {
            "c": c,
            "output_tokens_per_s": compare_rates(ours[c], theirs[c]),
            **{path: {"a": ours[c].median(path), "b": theirs[c].median(path)} for path in paths},
        }
        for c in ours
        if c in theirs
    ]
    if not rows:
        held = (f"{as_word(curve.label)} (c={c_list(level.c for level in curve.usable) or 'none'})" for curve in (a, b))
        raise ResultError(f"{' and '.join(held)} have no level with a completed request in common")
    said = compare_statements(a, b, rows)
    return {
        "kind": "compare",
        "tool_version": TOOL_VERSION,
        "notebook": notebook.path,
        "a": curve_document(a, notebook),
        "b": curve_document(b, notebook),
        "levels": rows,
        "statements": [pick(item, "code text values") for item in said],
    }


def compare_rates(a: Level, b: Level) -> dict[str, Any]:
    """Output throughput of one level of two labels, and whether their runs show a difference."""
    path = "output_tokens_per_s"
    interval, plain = ratio_interval(a.values(path), b.values(path)), change(a, b, path)
    return {
        "a": a.median(path),
        "b": b.median(path),
        "ratio": interval.ratio if interval else plain.times if plain else None,
        "low": interval.low if interval else None,
        "high": interval.high if interval else None,
        "different": interval.different if interval else None,
        "a_runs": len(a.values(path)),
        "b_runs": len(b.values(path)),
    }


def compare_statements(a: Curve, b: Curve, rows: Sequence[Document]) -> list[Statement]:
    """Settings that differ, levels that only one has, and what the runs show."""
    found = []
    for name in COMPARED:
        one, other = (setting_text(curve.settings[name], name) for curve in (a, b))
        unknown_text = name == "prompt_text" and a.settings[name] is None
        if one != other or unknown_text:
            text = f"{name} differs: {one} and {other}" if one != other else f"{name}: {one} on either side"
            values = {"name": name, "a": a.settings[name], "b": b.settings[name]}
            found.append(Statement("setting", NOTE, text, values=values))
    ours, theirs = ({level.c: level for level in curve.levels} for curve in (a, b))
    for curve, only in ((a, ours.keys() - theirs), (b, theirs.keys() - ours)):
        if only:
            text = f"only in {as_word(curve.label)}: c={c_list(sorted(only))}"
            found.append(Statement("only_in", NOTE, text, tuple(sorted(only))))
    for c in sorted(ours.keys() & theirs):
        sides = ((as_word(a.label), ours[c].left_out), (as_word(b.label), theirs[c].left_out))
        reasons = ", ".join(f"{label}: {reason}" for label, reason in sides if reason)
        prompts = change(ours[c], theirs[c], "prompt_tokens_mean")
        if reasons:
            found.append(Statement("left_out", NOTE, f"c={c} is not compared ({reasons})", (c,)))
        elif prompts and abs(prompts.times - 1) > PROMPT_GAP:
            text = f"prompt tokens differ at c={c}: B's prompts have {prompts.times:.2f} times as many as A's"
            found.append(Statement("prompt_tokens", NOTE, text, (c,)))
    if all(max(row["output_tokens_per_s"][f"{side}_runs"] for side in "ab") < 2 for row in rows):
        found.append(Statement("single_runs", NOTE, f"{SINGLE_RUNS}; use --repeat 3"))
    else:
        found += [Statement("ratio", NOTE, ratio_text(row), (row["c"],)) for row in rows]
    return found + [Statement("remark", NOTE, text) for text in dict.fromkeys((*a.remarks, *b.remarks))]


def ratio_text(row: Document) -> str:
    """The verdict on one level's output throughput in a sentence."""
    rate = row["output_tokens_per_s"]
    runs = f"{rate['a_runs']} against {counted(rate['b_runs'], 'run')}"
    if rate["different"] is None:
        enough = min(rate["a_runs"], rate["b_runs"]) > 1
        why = "the runs do not vary, or one is 0" if enough else "each side needs two runs"
        return f"at c={row['c']}: B/A {shown(rate['ratio'], 2)} ({runs}): no verdict, {why}"
    digits = 2  # more where two hide what the verdict rests on
    while rate["different"] and digits < 6 and any(round(rate[end], digits) == 1.0 for end in ("low", "high")):
        digits += 1
    ratio, low, high = (f"{rate[name]:.{digits}f}" for name in ("ratio", "low", "high"))
    verdict = "different" if rate["different"] else "no difference shown"
    return f"at c={row['c']}: throughput (geometric means) B/A {ratio} (95 % {low} to {high}, {runs}): {verdict}"


def levels_of(curve: Curve, records: Sequence[Record]) -> dict[str, Any]:
    """What --list and --runs say of a label or of one of its runs."""
    dated = [(record.instant, str(record.data["recorded_at"])) for record in records if record.instant is not None]
    return {
        "levels": [level.c for level in curve.levels if not level.interrupted],
        "interrupted": [level.c for level in curve.levels if level.interrupted],
        "runs": max(len(level.runs) for level in curve.levels),
        "settings": dict(curve.settings),
        "last": max(dated)[1] if dated else None,
    }


def list_document(notebook: Notebook) -> dict[str, Any]:
    """What --list --json prints: kind "list" · tool_version · notebook · labels [{label, word (as --list shows it),
    levels, interrupted, runs (the most of any level), settings, last (`recorded_at` of the newest line)}]."""
    labels = [
        {"label": label, "word": as_word(label), **levels_of(notebook.curves[label], records)}
        for label, records in notebook.by_label().items()
    ]
    return {"kind": "list", "tool_version": TOOL_VERSION, "notebook": notebook.path, "labels": labels}


def runs_document(notebook: Notebook, name: str) -> dict[str, Any]:
    """What --label L --runs --json prints: kind "runs" · tool_version · notebook · label · runs, in file order [{run,
    shown_at (the levels at which --label shows this run), levels, interrupted, runs, settings, last: see
    list_document}]."""
    curve = find_curve(notebook, name)
    runs = []
    for run, records in group(notebook.by_label()[curve.label], lambda record: record.run).items():
        shown_at = [level.c for level in curve.levels if run == level.runs[-1].run]
        runs.append({"run": run, "shown_at": shown_at, **levels_of(build_curve(run, records), records)})
    path = notebook.path
    return {"kind": "runs", "tool_version": TOOL_VERSION, "notebook": path, "label": curve.label, "runs": runs}


def notebook_verdict(notebook: Notebook, statements: Sequence[Statement]) -> dict[str, Any]:
    """A check's result on one notebook: {notebook, verdict, error (why it could not be read, or null), baselines
    [{label, operating_point, knee, a, b}], failed_rules; statements, pass, warn, fail: see curve_document}."""
    baselines = [
        {
            "label": label,
            "operating_point": curve.operating_point,
            "knee": list(curve.knee) if curve.knee else None,
            "a": curve.fit.a_ms if curve.fit else None,
            "b": curve.fit.b_ms if curve.fit else None,
        }
        for label, curve in notebook.curves.items()
        if not missing_levels(curve)
    ]
    found = [item.status for item in statements]
    return {
        "notebook": notebook.path,
        "verdict": FAIL if FAIL in found else WARN if WARN in found else PASS,
        "error": None,
        "baselines": baselines,
        "failed_rules": [item.code for item in statements if item.status == FAIL],
        **check_document(statements),
    }


def check_class(paths: Sequence[str], raw: RawFile | None) -> list[dict[str, Any]]:
    """A verdict on each of several notebooks, and on what they share: level lines with equal figures, whatever was
    renamed around them, fail both places."""
    found: list[tuple[Notebook, list[Statement], str | None]] = []
    places: dict[Any, list[tuple[int, str]]] = {}  # fingerprint -> (index of the notebook, where in it)
    for index, path in enumerate(paths):
        try:
            notebook = read_notebook(path)
        except UserError as error:
            found.append((Notebook(path), [], str(error)))
            continue
        report(path, notebook.remarks)
        found.append((notebook, check(notebook, raw), None))
        for record in notebook.records:
            mark = fingerprint(record)
            if mark is not None and tells_a_copy(latency_figures(record)):
                places.setdefault(mark, []).append((index, f"{printable(path)} {place(record)}"))
    results = []
    for index, (notebook, statements, error_text) in enumerate(found):
        items = []
        for same in places.values():
            elsewhere = [where for other, where in same if other != index]
            items += [f"{where} has the figures of {elsewhere[0]}" for i, where in same if i == index and elsewhere]
        if items:
            statements.append(Statement("copied", FAIL, "; ".join(items[:SHOWN_ITEMS]), items=tuple(items)))
        result = notebook_verdict(notebook, statements)
        results.append({**result, "verdict": UNREADABLE, "error": error_text} if error_text else result)
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
    block, _, key = path.partition(".")
    return (level[block] or {}).get(key) if key else level[block]


def align(rows: Sequence[Sequence[str]], right: bool = True) -> list[str]:
    """Rows as lines: the first column to the left, the others to the right (or left), the last one as it is.

    >>> align([["c", "ok"], ["10", "40/40"]])
    ['c      ok', '10  40/40']
    """
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))] if rows else []
    lines = []
    for row in rows:
        cells = [text.rjust(width) if right else text.ljust(width) for text, width in zip(row[1:], widths[1:])]
        lines.append("  ".join([row[0].ljust(widths[0]), *cells]).rstrip())
    return lines


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
        done, asked = ("?" if level[name] is None else f"{level[name]:g}" for name in ("completed", "requests"))
        cells = (shown(at_path(level, column.path), column.decimals) for column in columns)
        rows.append([str(level["c"]), f"{done}/{asked}{'(interrupted)' if level['interrupted'] else ''}", *cells])
    return rows


def range_lines(doc: Document) -> list[str]:
    """For levels that were run several times: the range behind each median."""
    lines = []
    for level in doc["levels"]:
        ranges = [(column, level["ranges"][column.path]) for column in COLUMNS if column.path in level["ranges"]]
        parts = [
            f"{column.heading} {' to '.join(shown(limit, column.decimals) for limit in ends)}"
            for column, ends in ranges
        ]
        lines += [f"range at c={level['c']} over {level['runs']} runs: {', '.join(parts)}"] if parts else []
    return lines


def bar_lines(doc: Document, colour: bool) -> list[str]:
    """Bars for throughput and TPOT p90, green inside the level's SLO and red outside when in colour."""
    lines = []
    for title, path, decimals in (("out tok/s", "output_tokens_per_s", 1), ("TPOT p90 s", "tpot_s.p90", 4)):
        top = max((at_path(level, path) or 0.0 for level in doc["levels"]), default=0.0)
        lines += [title] if top else []
        for level in doc["levels"] if top else ():
            value, slo = at_path(level, path), level["slo"]["tpot_s"]
            bar = "#" * max(round(BAR_WIDTH * (value or 0.0) / top), 1 if value else 0)
            judged = path == "tpot_s.p90" and slo is not None and value is not None
            paint = "plain" if not judged else "good" if value <= slo else "bad"
            drawn = f"{COLOURS[paint]}{bar}{COLOURS['off']}" if colour and bar else bar
            lines.append(f"  c={level['c']:<5}{drawn}{' ' if bar else ''}{shown(value, decimals)}")
    return lines


def derived_lines(doc: Document) -> list[str]:
    """Knee, fit and operating point in the wording that people grep for."""
    rates = [(level["c"], level["output_tokens_per_s"]) for level in doc["levels"] if not level["left_out"]]
    rated = [(c, rate) for c, rate in rates if rate is not None]
    between, point = doc["knee"]["between"], doc["operating_point"]
    if len(rated) < 2 or rated[0][1] <= 0:
        knee = "knee: not enough points (it needs two levels with a completed request and a throughput)"
    elif between is None:
        knee = f"knee: not reached up to c={rated[-1][0]}"
    else:
        knee = f"knee: between c={between[0]} and c={between[1]}"
    if point is not None:
        operating = f"c={point} (highest with no failure, both p90s inside its SLO)"
    elif not any(level["slo"]["ttft_s"] is not None and level["slo"]["tpot_s"] is not None for level in doc["levels"]):
        operating = "none, no SLO is recorded"
    elif all(level["meets_objective"] is None for level in doc["levels"]):
        operating = "none (no level can be judged against its SLO)"
    else:
        operating = "none (no level is without failure and inside its SLO)"
    return [knee, *fit_lines(doc), f"operating point: {operating}"]


DECODE_BOUND = (
    "decode-bound throughput, if every request were always decoding (prefill and waiting lower the measured one):"
)


def fit_lines(doc: Document) -> list[str]:
    """The TPOT fit, what it implies, and the decode-bound beside the measured throughput."""
    fit, slots, slo = doc["fit"], doc["settings"]["server_slots"], doc["slo"]["tpot_s"]
    if fit is None:
        within = f" at or below {counted(slots, 'slot')}" if slots else ""
        return [f"TPOT fit: not enough points (it needs two different levels{within} with a TPOT)"]
    details = "two levels: a line through both, no interval"
    if fit["b_interval_ms"]:
        low, high = fit["b_interval_ms"]
        details = f"largest residual {fit['largest_residual']:.1%}, 95 % interval for b {low:.3f} to {high:.3f}"
    slope = f"{'-' if fit['b_ms'] < 0 else '+'} {abs(fit['b_ms']):.3f} ms x c"
    lines = [f"TPOT p50 ~ {fit['a_ms']:.2f} ms {slope}  (levels {c_list(fit['levels'])}, {details})"]
    lines += ["a is below 0, so no step time: the line does not hold near c = 0"] if fit["a_ms"] < 0 else []
    if fit["ceiling_tokens_per_s"] is None:
        lines.append(f"ceiling: none implied ({fit['ceiling_note']})")
    else:
        lines.append(f"ceiling {fit['ceiling_tokens_per_s']:.1f} tok/s (1/b; {fit['ceiling_note']})")
        at, note = fit["c_at_slo"], fit["c_at_slo_note"]
        met = f" met at c = {at:.1f}{f' ({note})' if note else ''}" if at is not None else f": {note}"
        lines += [f"TPOT SLO {1000 * slo:g} ms{met}"] if slo is not None else []
    if fit["largest_residual"] > WORST_FIT:
        return [*lines, f"decode-bound throughput: not stated, the fit misses a level by {fit['largest_residual']:.0%}"]
    lines.append(DECODE_BOUND)
    for level in doc["levels"]:
        if not level["left_out"]:
            bound, rate = level["decode_bound_output_tokens_per_s"], level["output_tokens_per_s"]
            own = level["server_slots"]
            only = f" ({counted(own, 'slot')} decode together)" if own and level["c"] > own else ""
            lines.append(f"  c={level['c']}: {shown(bound, 1)} tok/s, measured {shown(rate, 1)}{only}")
    return lines


def statement_lines(doc: Document, status: str) -> list[str]:
    """One line per statement: the evidence (at its highest level), where else it shows, and one thing to try."""
    lines = []
    for item in doc["statements"]:
        if item["status"] == status:
            also = [c for c in item["levels"] if f"c={c}" not in item["text"] and "c" in item["values"]]
            named = f" (also at c={c_list(also)})" if also and item["code"] != "single_run" else ""
            lines.append(f"{item['text']}{named}{'. Try: ' + item['advice'] if item['advice'] else ''}")
    return lines


def label_text(doc: Document, colour: bool) -> str:
    """The whole view of one label for a terminal."""
    lines = [doc["answer"]["text"], "", *heading_lines(doc), "", *align(table_rows(doc)), "TTFT and TPOT in seconds"]
    lines += [*range_lines(doc), "", *bar_lines(doc, colour), "", *derived_lines(doc)]
    for title, status in (("notes", NOTE), ("reading", READING)):
        found = statement_lines(doc, status)
        lines += ["", title, *(f"  {line}" for line in found)] if found else []
    return "\n".join(lines) + "\n"


def label_markdown(doc: Document) -> str:
    """The same as Markdown, to paste into the notebook's prose (a pasted table is never a record)."""
    title, setup = (markdown_text(line) for line in heading_lines(doc))
    lines = [f"### {title}", "", markdown_text(doc["answer"]["text"]), "", setup, ""]
    lines += [*markdown_table(table_rows(doc)), "", "TTFT and TPOT in seconds.", ""]
    facts = [*range_lines(doc), *derived_lines(doc), *statement_lines(doc, NOTE), *statement_lines(doc, READING)]
    return "\n".join(lines + [f"- {markdown_text(line.strip())}" for line in facts]) + "\n"


def levels_text(entry: Document) -> list[str]:
    """Levels and date of an entry of --list or --runs."""
    cut = f" interrupted {c_list(entry['interrupted'])}" if entry["interrupted"] else ""
    return [f"levels {c_list(entry['levels']) or 'none'}{cut}", f"last {(entry['last'] or 'unknown')[:10]}"]


def list_text(doc: Document) -> str:
    """One line per label, in file order."""
    names = ("engine", "prompt_set")
    rows = [
        [entry["word"], *(setting_text(entry["settings"][name]) for name in names), *levels_text(entry)]
        for entry in doc["labels"]
    ]
    return "\n".join([f"==> {len(rows)} label(s) in {printable(doc['notebook'])}", *align(rows, right=False)]) + "\n"


def runs_text(doc: Document) -> str:
    """One line per run of a label, in file order."""
    rows = [
        [
            printable(entry["run"]),
            counted(entry["runs"], "repeat"),
            *levels_text(entry),
            f"shown at c={c_list(entry['shown_at'])}" if entry["shown_at"] else "older",
        ]
        for entry in doc["runs"]
    ]
    head = f"==> {len(rows)} run(s) of {as_word(doc['label'])} in {printable(doc['notebook'])}"
    return "\n".join([head, *align(rows, right=False)]) + "\n"


def compare_text(doc: Document, markdown: bool) -> str:
    """Two labels side by side; A / B in one cell where both are shown."""
    columns = [column for column in COLUMNS[1:] if "compared" in column.flags]
    table = [["c", "A tok/s", "B tok/s", "B/A", *(f"{column.heading} A / B" for column in columns)]]
    for row in doc["levels"]:
        rate = row["output_tokens_per_s"]
        ratio = rate["b"] / rate["a"] if rate["a"] and rate["b"] is not None else None
        pairs = (" / ".join(shown(row[column.path][side], column.decimals) for side in "ab") for column in columns)
        table.append([str(row["c"]), shown(rate["a"], 1), shown(rate["b"], 1), shown(ratio, 2), *pairs])
    heads = [f"{side.upper()} = {heading_lines(doc[side])[0]}" for side in "ab"]
    notes = [item["text"] for item in doc["statements"]]
    if markdown:
        heads, notes = ([f"- {markdown_text(line)}" for line in lines] for lines in (heads, notes))
        return "\n".join([*heads, "", *markdown_table(table), "", *notes]) + "\n"
    return "\n".join([*heads, "", *align(table), "TTFT and TPOT in seconds", *notes]) + "\n"


def check_lines(doc: Document) -> list[str]:
    """One line per rule, then the count."""
    lines = [f"{item['status']}  {item['code']}: {printable(item['text'])}" for item in doc["statements"]]
    return [*lines, f"{doc['pass']} pass, {doc['warn']} warn, {doc['fail']} fail"]


def class_text(files: Sequence[Document], details: bool) -> str:
    """A table with a row per notebook (and per further baseline), then the failed rules of those that failed; with
    details, every rule of every notebook."""
    rows = [["notebook", "verdict", "operating point", "knee", "a ms", "b ms", "baseline", "failed rules"]]
    for item in files:
        told = printable(item["error"] or " ".join(item["failed_rules"]))
        head = [printable(item["notebook"]), item["verdict"]]
        for curve in item["baselines"] or [None]:
            rows.append([*head, *baseline_cells(curve), told])
            head, told = ["", ""], ""
    lines = align(rows, right=False)
    for item in files:
        shown_rules = [rule for rule in item["statements"] if details or rule["status"] == FAIL]
        if shown_rules:
            lines += ["", f"==> {printable(item['notebook'])}", *check_lines({**item, "statements": shown_rules})]
    verdicts = [item["verdict"] for item in files]
    total = ", ".join(f"{verdicts.count(verdict)} {verdict}" for verdict in (PASS, WARN, FAIL, UNREADABLE))
    return "\n".join([*lines, "", total]) + "\n"


def baseline_cells(curve: Document | None) -> list[str]:
    """Operating point, knee, a, b and label of one baseline; of none, what is said instead."""
    if curve is None:
        return ["-", "-", "-", "-", "no whole baseline"]
    point = "none" if curve["operating_point"] is None else f"c={curve['operating_point']}"
    knee = "not reached" if curve["knee"] is None else "-".join(map(str, curve["knee"]))
    return [point, knee, shown(curve["a"], 2), shown(curve["b"], 3), as_word(curve["label"])]


def class_rows(files: Sequence[Document]) -> Iterator[dict[str, Any]]:
    """A row per notebook for the CSV; a second baseline's columns end in _2, and so on."""
    for item in files:
        row = {key: item[key] for key in ("notebook", "verdict", "error", "pass", "warn", "fail")}
        row["failed_rules"] = " ".join(item["failed_rules"])
        for number, curve in enumerate(item["baselines"], 1):
            cells = {**curve, "knee": "-".join(map(str, curve["knee"] or [])) or None}
            row.update({name if number == 1 else f"{name}_{number}": value for name, value in cells.items()})
        yield row


def flatten(value: Any, prefix: str = "") -> dict[str, Any]:
    """Nested objects as one row with dotted names; lists as compact JSON.

    >>> flatten({"a": 1, "b": {"c": None, "d": [1, 2]}})
    {'a': 1, 'b.c': None, 'b.d': '[1, 2]'}
    """
    if isinstance(value, Mapping):
        parts = (flatten(inner, f"{prefix}.{key}" if prefix else str(key)) for key, inner in value.items())
        return {name: inner for part in parts for name, inner in part.items()}
    return {prefix: json.dumps(value) if isinstance(value, list) else value}


def to_csv(rows: Iterable[Document]) -> str:
    """Rows as CSV with a heading; an unknown figure is an empty cell. Columns are those of any row, in order."""
    flat = [flatten(null_if_not_finite(row)) for row in rows]
    out = io.StringIO()
    writer = csv.DictWriter(out, list(dict.fromkeys(key for row in flat for key in row)), lineterminator="\n")
    writer.writeheader()
    writer.writerows(flat)
    return out.getvalue()


def level_rows(doc: Document) -> Iterator[dict[str, Any]]:
    """One row per level for the CSV: the label and every figure. Missing blocks give empty cells."""
    for level in doc["levels"]:
        row = {"label": doc["label"], **level}
        for name in (*LEVEL_FIELDS, "ranges"):
            if name in STATS:
                row[name] = row[name] or dict.fromkeys(STATISTICS)
            elif isinstance(row[name], Mapping):
                row[name] = json.dumps(row[name]) if row[name] else None
        yield row


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
    return None if isinstance(value, float) and not math.isfinite(value) else value


# ---------------------------------------------------------------------------------------------- writing the notebook

LOCK_WAIT_S = 10.0  # how long --record waits for another writer of the notebook
NOT_SUMMED = ("prompt_text", "extra_body", "turns", "duration_s", "seed")  # settings that a summary leaves out


def summary_record(curve: Curve, now: datetime) -> dict[str, Any]:
    """The curve-summary line that --record appends."""
    fit = curve.fit
    return {
        **{name: curve.settings[name] for name in SETTINGS if name not in NOT_SUMMED},
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
    checked = "check the notebook, or each FILE and each *.md with a record below a folder; with --label, one label"
    what.add_argument("--check", nargs="*", metavar="FILE", help=checked)
    form = parser.add_argument_group("in which form (default: text)").add_mutually_exclusive_group()
    for name, text in (
        ("markdown", "Markdown, to paste"),
        ("json", "all figures as one JSON value"),
        ("csv", "the table as CSV"),
    ):
        form.add_argument(f"--{name}", dest="form", action="store_const", const=name, default="text", help=text)
    also = parser.add_argument_group("also")
    also.add_argument("--record", action="store_true", help="with --label: append a curve-summary line")
    also.add_argument("--runs", action="store_true", help="with --label: list the label's runs")
    also.add_argument("--run", metavar="ID", help="with --label: show that run, as L@ID does")
    also.add_argument("--details", action="store_true", help="with --check of several notebooks: the rules of each")
    recomputed = "with --check: recompute the levels from load_test.py's --raw FILE, name differences"
    also.add_argument("--raw", metavar="FILE", help=recomputed)
    also.add_argument("--version", action="version", version=f"%(prog)s {TOOL_VERSION}")
    return parser


def parse_options(argv: Sequence[str] | None) -> Options:
    """Options. Raises UserError with one line where they do not go together."""
    parser = build_parser()
    args, rest = parser.parse_known_args(argv)
    if rest:
        hint = "" if rest[0].startswith("-") else f"; name the notebook with --labbook {rest[0]}"
        parser.error(f"unrecognized arguments: {' '.join(rest)}{hint}")
    views = [f"--{name}" for name in ("list", "compare", "check") if getattr(args, name) not in (None, False)]
    views += ["--label"] if args.label is not None and views != ["--check"] else []
    if len(views) > 1:
        parser.error(f"{' and '.join(views)} do not go together: choose one")
    show_label = args.label is not None and args.check is None
    for option, given, met, needed in (
        ("--record", args.record, show_label and args.run is None and not args.runs, "--label L alone"),
        ("--runs", args.runs, show_label and args.run is None and args.form != "markdown", "--label L alone"),
        ("--run", args.run is not None, args.label is not None, "--label"),
        ("--raw", args.raw, args.check is not None, "--check"),
        ("--details", args.details, args.check is not None, "--check"),
        ("--markdown", args.form == "markdown", show_label or args.compare, "--label or --compare"),
    ):
        if given and not met:
            parser.error(f"{option} needs {needed}")
    if args.check and args.label is not None and (len(args.check) > 1 or os.path.isdir(args.check[0])):
        parser.error("--check --label speaks of one notebook: name one file, or none")
    return Options(
        labbook=args.labbook,
        label=args.label if args.run is None else f"{args.label}@{args.run}",
        runs=args.runs,
        compare=tuple(args.compare) if args.compare else None,
        check=None if args.check is None else tuple(args.check or [args.labbook]),
        details=args.details,
        record=args.record,
        form=args.form,
        raw=args.raw,
    )


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
    terminal = sys.stdout is not None and sys.stdout.isatty() and os.environ.get("TERM") != "dumb"
    return terminal and "NO_COLOR" not in os.environ


def render(options: Options, doc: Document, text: Callable[[], str], rows: Iterable[Document]) -> str:
    """A document as JSON, as CSV or as text."""
    return to_json(doc) if options.form == "json" else to_csv(rows) if options.form == "csv" else text()


def run_list(options: Options, notebook: Notebook) -> tuple[str, int]:
    if not notebook.records:
        warn(f"no level records in {notebook.path}: run load_test.py first, or name the file with --labbook")
    doc = list_document(notebook)
    return render(options, doc, lambda: list_text(doc), doc["labels"]), 0 if notebook.records else 1


def run_label(options: Options, notebook: Notebook, label: str) -> tuple[str, int]:
    if options.runs:
        doc = runs_document(notebook, label)
        return render(options, doc, lambda: runs_text(doc), doc["runs"]), 0
    curve = find_curve(notebook, label)
    doc = curve_document(curve, notebook)
    view = label_markdown if options.form == "markdown" else partial(label_text, colour=in_colour())
    text = render(options, doc, lambda: view(doc), level_rows(doc))
    if options.record:
        if curve.label not in notebook.curves:
            raise UserError("--record sums up a label's newest levels: name the label without a run")
        if not curve.usable:
            raise ResultError(f"{as_word(curve.label)} has no whole level with a completed request: nothing to record")
        append_record(notebook.path, summary_record(curve, datetime.now()))
        warn(f"appended a curve-summary line to {notebook.path}")
    return text, 0


def run_compare(options: Options, notebook: Notebook, names: tuple[str, str]) -> tuple[str, int]:
    a, b = (find_curve(notebook, name) for name in names)
    doc = compare_document(notebook, a, b)
    rows = [{**row, "a_label": a.label, "b_label": b.label} for row in doc["levels"]]
    return render(options, doc, lambda: compare_text(doc, options.form == "markdown"), rows), 0


def run_check(options: Options, given: Sequence[str]) -> tuple[str, int]:
    """One notebook's rules, or several notebooks' verdicts. 2 where a file cannot be read, else 1 where any rule
    failed."""
    raw = read_raw(options.raw) if options.raw else None
    if len(given) > 1 or os.path.isdir(given[0]):
        files = check_class(notebooks_at(given), raw)
        verdicts = [item["verdict"] for item in files]
        doc: dict[str, Any] = {"kind": "checks", "tool_version": TOOL_VERSION, "files": files}
        code = 2 if UNREADABLE in verdicts else 1 if FAIL in verdicts else 0
        return render(options, doc, lambda: class_text(files, options.details), class_rows(files)), code
    notebook = read_notebook(given[0])
    rules = options.label is None  # then damaged and unknown lines have rules of their own
    report(notebook.path, notebook.remarks if rules else [*notebook.damaged, *notebook.unknown, *notebook.remarks])
    curve = find_curve(notebook, options.label) if options.label is not None else None
    doc = {"kind": "check", "tool_version": TOOL_VERSION, "label": curve.label if curve else None}
    doc.update(notebook_verdict(notebook, check(notebook, raw, curve)))
    text = "\n".join(check_lines(doc)) + "\n"
    return render(options, doc, lambda: text, doc["statements"]), 1 if doc["fail"] else 0


def notebooks_at(given: Sequence[str]) -> list[str]:
    """The files that were named, each once, and of each folder every *.md below it that holds a record, in the order
    of their names. Raises UserError for a folder without one."""
    found: dict[str, str] = {}  # by real path
    for path in given:
        names = [path]
        if os.path.isdir(path):
            below = (os.path.join(folder, name) for folder, _, files in os.walk(path) for name in files)
            names = [name for name in sorted(below) if name.endswith(".md") and mentions_the_lab(name)]
            if not names:
                raise UserError(f"no *.md below {path} holds a level record")
        for name in names:
            found.setdefault(os.path.realpath(name), name)
    return list(found.values())


def mentions_the_lab(path: str) -> bool:
    """Whether a file below a folder is somebody's notebook, or cannot be read to tell."""
    try:
        return any(LAB.encode() in line for line in file_lines(path))
    except UserError:
        return True


def run(options: Options) -> tuple[str, int]:
    """What to print, and the exit code."""
    if options.check is not None:
        return run_check(options, options.check)
    notebook = read_notebook(options.labbook)
    report(notebook.path, [*notebook.damaged, *notebook.unknown, *notebook.remarks])
    if options.label is not None:
        return run_label(options, notebook, options.label)
    if options.compare is not None:
        return run_compare(options, notebook, options.compare)
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
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)  # from here on main() ends it, with 130
    sys.exit(main())
