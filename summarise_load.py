#!/usr/bin/env python3
"""Read the curve that load_test.py measured: tables, knee, fit, reading, and an audit of the notebook.

A notebook is a text file (labbook.md) in which prose and JSON lines stand side by side. load_test.py appends one line
per concurrency level; this program finds them all, whatever stands around them, and says what they show. It changes
the notebook only with --record and --import, and then by appending one line.

Examples:
  python3 summarise_load.py --list
  python3 summarise_load.py --label llama-baseline
  python3 summarise_load.py --label llama-baseline --record
  python3 summarise_load.py --compare llama-baseline vllm-baseline
  python3 summarise_load.py --label llama-baseline --json | python3 scripts/draw_curve.py --svg curve.svg
  python3 summarise_load.py --check
  python3 summarise_load.py --check students/*/labbook.md
  python3 summarise_load.py --check --raw requests.jsonl
  python3 summarise_load.py --label vllm-baseline --level 20 --export vllm-bench c20.json
  python3 summarise_load.py --import vllm-bench result.json --label vllm-bench --set engine=vllm --set server_slots=20

Output:
  --list     "==> N label(s) in FILE", then a line per label in file order: label, engine, prompt set,
             "levels 1,5,10,20", "last DATE". The label is always the first word of its line: white space, "%" and
             unprintable characters in it are shown as %XX ("my run" as "my%20run"). --label and --compare take a
             label as it was written or as it is listed.
  --label    heading, table, bars, derived figures, notes, reading. A table row begins with its c. TTFT and TPOT are in
             seconds. Bars are in colour only on a terminal, and never where NO_COLOR is set.
  --compare  the same levels of two labels side by side, and each setting that differs between them. Where levels were
             repeated, a difference inside their ranges is called none.
  --check    one line per rule, PASS, WARN or FAIL, then "N pass, N warn, N fail"; of several files, a table at the end.
  --json     all of it, with every figure: for scripts/draw_curve.py and for jq. A figure that is not known is null.
  Notes about the file itself (damaged, repeated or unknown lines) go to standard error, with their line numbers.

How the figures are defined:
  scaling          throughput(c) / (c x throughput at the lowest level / that level)
  knee             first step between neighbouring levels where throughput gained per added request is below half
                   of one request's throughput at the lowest level
  fit              least squares of TPOT p50 on c, a + b x c, over levels at or below the server's slots
  ceiling          1/b: what throughput tends to under that fit, whatever the concurrency
  operating point  the highest level with no failure and both p90s inside the recorded objective
  Of a label that was run more than once, the newest run of each level counts. Levels that this run repeated
  (load_test.py --repeat) show the median, and their range beside it.

What the audit (rule "consistent") can and cannot see: a line fails only when no values that round to the printed ones
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
import errno
import hashlib
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
from dataclasses import dataclass, field, replace
from datetime import datetime
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
LOCK_WAIT_S = 10.0  # how long --record and --import wait for another writer of the notebook
MAX_NUMBER_CHARS = 300  # still fits a float; Python itself refuses whole numbers above 4300 digits

SWEEP_LEVELS = (1, 5, 10, 20)  # the lab's levels
VARIANT_LABELS = ("llama-slots8", "llama-ctx2048", "llama-kv-alt")
COMPARED_SETTINGS = ("model", "max_tokens", "prompt_set", "context_length", "server_slots", "quant", "engine")
ALSO_COMPARED = ("host", "temperature", "slo_ttft_s", "slo_tpot_s", "extra_body")
IDENTITY = (
    "engine",
    "engine_version",
    "model",
    "prompt_set",
    "host",
    "quant",
    "context_length",
    "server_slots",
    "max_tokens",
    "temperature",
    "slo_ttft_s",
    "slo_tpot_s",
    "base_url",
    "arrival",
    "seed",
    "extra_body",
)

KNEE_SHARE = 0.5  # of one request's throughput at the lowest level, per added request
CHEAP_SCALING = 0.8  # above it, added requests still cost little
FLAT_TPOT = 1.25  # TPOT p50 against the lowest level's: up to here called flat
FAST_GROWTH = 3.0  # TTFT p90 growing this many times faster than TPOT is waiting, not slower steps
LONG_WAIT_SHARE = 0.25  # TTFT p90 as a share of a median request's decoding: a wait for others to finish
TAIL_RATIO = 1.5  # TPOT p90 / p50: "far above"
FALL = 0.95  # throughput below this share of the level before it has fallen, not wobbled
LOW_IN_FLIGHT = 0.75  # of c; at c = 20 that is 15, the lab's own line
CPU_HIGH = 0.8  # of one core: the client's event loop is then rarely idle
LAG_SHARE = 0.25  # client delay as a share of TPOT (or TTFT) that makes it part of the figure
LAG_MIN_S = 0.002  # an event loop's timers are a millisecond coarse: less lateness says nothing
CONNECT_SHARE = 0.2  # connect p90 as a share of TTFT p90
CACHE_POINTS = 0.10  # cached share differing by more than this between levels of one label
SPLIT_SHARE = 0.5  # of the mean time to first token: the part that dominates it


class UserError(Exception):
    """Bad arguments or a file that cannot be read: exit 2."""


class ResultError(Exception):
    """The notebook does not hold what was asked for: exit 1."""


# ---------------------------------------------------------------------------------------------- reading a notebook


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
    def half(self) -> float:
        """Half of the last printed digit's unit."""
        mantissa, _, exponent = self.text.lower().partition("e")
        decimals = len(mantissa.partition(".")[2]) - (int(exponent) if exponent else 0)
        return 0.5 * 10.0 ** max(-400, min(300, -decimals))

    @property
    def digits(self) -> int:
        """Significant digits printed: 3 for 0.0115 and for 11.0.

        >>> Printed("0.0115").digits, Printed("11.0").digits, Printed("0.0").digits
        (3, 3, 0)
        """
        return len(self.text.lower().partition("e")[0].replace(".", "").lstrip("-0"))


COUNT_FIELDS = (
    "concurrency",
    "requests",
    "completed",
    "failed",
    "output_tokens",
    "within_slo",
    "coalesced",
    "context_length",
    "server_slots",
    "max_tokens",
    "repeat",
)
MEASURE_FIELDS = (
    "wall_s",
    "output_tokens_per_s",
    "requests_per_s",
    "goodput_requests_per_s",
    "mean_in_flight",
    "prompt_tokens_mean",
    "cached_tokens_mean",
    "steady_output_tokens_per_s",
    "steady_window_s",
    "temperature",
    "slo_ttft_s",
    "slo_tpot_s",
)
STATISTICS = ("min", "p50", "p90", "p95", "p99", "max", "mean")
STATISTIC_FIELDS = ("ttft_s", "tpot_s", "e2e_s", "connect_s", "chunk_gap_s", "output_tokens_per_request")
TALLY_FIELDS = ("finish_reasons", "errors")
OBJECT_FIELDS = ("client", "server", "ttft_split_s")
OPEN_OBJECT_FIELDS = ("extra_body",)  # the user's own: any value may stand in it
TEXT_FIELDS = ("label", "engine", "engine_version", "model", "prompt_set", "host", "quant", "base_url", "arrival",
               "seed", "run_id", "recorded_at", "first_error")  # fmt: skip
UNDEFINED_AS_ZERO = ("ttft_s", "tpot_s", "prompt_tokens_mean")  # version 1 printed 0.0 where nothing was measured

# How a line of load_test.py begins (keys are sorted): a torn line may hold no more than this.
BEGINNINGS = ('{"arrival": "', '{"base_url": "')
KNOWN_KEY = re.compile('"(?:' + "|".join((*COUNT_FIELDS, *MEASURE_FIELDS[:8], *STATISTIC_FIELDS[:2])) + r')"\s*:')
PREFIX = re.compile(r"[\s\ufeff]*(?:[-*+>](?=[\s{>])[\s\ufeff]*)*")  # indentation, bullets, quotes, a BOM


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
        """What tells this run from another: its run id; in version 1, which had none, the line itself."""
        run_id = self.data.get("run_id")
        return str(run_id) if self.schema > 1 and run_id is not None else f"line {self.line}"

    @property
    def repeat(self) -> int:
        return self.count("repeat") or 0

    @property
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
        """An identifying field, or None where the notebook does not say ("unknown", and 0 for slots or context)."""
        value = self.data.get(name)
        if value in (None, "", "unknown") or (name in ("context_length", "server_slots") and value == 0):
            return None
        return value


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


def as_number(value: Any) -> Printed | None:
    """A JSON number with its printed form; None for everything else (true and "3" are not numbers)."""
    if isinstance(value, Printed):
        return value
    if isinstance(value, int) and not isinstance(value, bool):
        return Printed(str(value))
    return None


def parse_instant(value: Any) -> float | None:
    """Seconds since 1970 of an ISO 8601 text; None where it is none.

    >>> parse_instant("1970-01-02T01:00:00+01:00"), parse_instant("1970-01-02T00:00:00Z"), parse_instant("yesterday")
    (86400.0, 86400.0, None)
    """
    if not isinstance(value, str):
        return None
    try:
        return datetime.fromisoformat(value[:-1] + "+00:00" if value.endswith("Z") else value).timestamp()
    except (ValueError, OverflowError, OSError):
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
            raise ValueError(f"the key {next(key for key in keys if keys.count(key) > 1)!r} stands twice")
        return found

    try:
        return json.loads(text, parse_constant=refuse, parse_int=whole, parse_float=Printed, object_pairs_hook=unique)
    except RecursionError:
        raise ValueError("brackets nested too deeply") from None


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


def field_fault(data: Mapping[str, Any]) -> str | None:
    """The first field of a level record whose value cannot be what its name says; None where all can."""
    for path in (*COUNT_FIELDS, *MEASURE_FIELDS):
        fault = number_fault(path, data.get(path))
        if fault:
            return fault
    for name in STATISTIC_FIELDS:
        block = {} if data.get(name) is None else data[name]
        if not isinstance(block, dict):
            return f"{name} is {json.dumps(block)[:40]}, not an object of percentiles"
        for key in STATISTICS:
            fault = number_fault(f"{name}.{key}", block.get(key))
            if fault:
                return fault
    for name in TALLY_FIELDS:
        block = data.get(name)
        if block is not None and not (isinstance(block, dict) and all(map(is_count, block.values()))):
            return f"{name} is {json.dumps(block)[:40]}, not an object of counts"
    for name in OBJECT_FIELDS + OPEN_OBJECT_FIELDS:
        if not isinstance(data.get(name), (dict, type(None))):
            return f"{name} is {json.dumps(data[name])[:40]}, neither an object nor null"
        fault = oversized(name, data.get(name)) if name in OBJECT_FIELDS else None
        if fault:
            return fault
    for name in TEXT_FIELDS:
        value = data.get(name)
        if not (value is None or isinstance(value, str) or (name != "label" and as_number(value) is not None)):
            return f"{name} is {json.dumps(value)[:40]}, not a text"
    if not isinstance(data.get("interrupted"), (bool, type(None))):
        return f"interrupted is {json.dumps(data['interrupted'])[:40]}, neither true nor false"
    if (as_number(data["concurrency"]) or 0) < 1:
        return f"concurrency is {json.dumps(data['concurrency'])[:40]}, not a number of requests"
    return None


def number_fault(path: str, value: Any) -> str | None:
    """Why a value cannot be the figure of this name; None where it can, or is unknown.

    >>> number_fault("wall_s", "12.5"), number_fault("failed", Printed("0.5")), number_fault("failed", None)
    ('wall_s is "12.5", not a number', 'failed is 0.5, not a whole number', None)
    """
    number = as_number(value)
    if number is None:
        return None if value is None else f"{path} is {json.dumps(value)[:40]}, not a number"
    if abs(number) > MAX_FIGURE:
        return oversized(path, number)
    if path in COUNT_FIELDS and not number.is_integer():
        return f"{path} is {number.text}, not a whole number"
    return None


def oversized(path: str, value: Any) -> str | None:
    """The first figure in a JSON value that is too large to have been measured; None where all can be.

    >>> oversized("", {"server": {"slots": 20, "peak_waiting": 1e300}}), oversized("wall_s", 12.5)
    ('server.peak_waiting is 1e+300: beyond anything that can be measured', None)
    """
    if isinstance(value, Mapping):
        faults = (oversized(f"{path}.{key}" if path else str(key), inner) for key, inner in value.items())
        return next(filter(None, faults), None)
    number = value if isinstance(value, float) else as_number(value)
    if number is None or abs(number) <= MAX_FIGURE:
        return None
    return f"{path} is {number:g}: beyond anything that can be measured"


def is_count(value: Any) -> bool:
    """Whether a JSON value is a whole number.

    >>> is_count(3), is_count(True), is_count("3")
    (True, False, False)
    """
    number = as_number(value)
    return number is not None and number.is_integer()


def json_fault(error: ValueError) -> str:
    """Why a line is no JSON, in a few words."""
    if isinstance(error, json.JSONDecodeError):
        if error.msg.startswith("Extra data"):
            return f"more text after the record, at character {error.pos + 1} (a record stands alone on its line)"
        return f"not valid JSON at character {error.pos + 1} ({error.msg.lower()}): torn or edited"
    return str(error)


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


def setting_text(value: Any) -> str:
    """A setting for people; "unknown" where the notebook does not say."""
    if isinstance(value, (dict, list)):
        return printable(json.dumps(value, sort_keys=True, ensure_ascii=False))
    return "unknown" if value is None else printable(value)


def read_notebook(path: str) -> Notebook:
    """Find every line of this lab in a file. Raises UserError where the file cannot be read."""
    book = Notebook(path)
    seen: dict[str, int] = {}
    for number, line, cut in file_lines(path):
        text = line.decode("utf-8", errors="replace")
        text = text[PREFIX.match(text).end() :].strip()  # type: ignore[union-attr]  # the pattern matches ""
        if "\x00" in text and looks_like_ours(text.replace("\x00", "")):
            book.damaged.append(Remark(number, "NUL bytes between letters: appended as UTF-16 by another program"))
        elif not text.startswith("{"):
            if LAB in text and looks_like_ours(text):
                book.damaged.append(Remark(number, "a record, but not alone on its line (text before it, or wrapped)"))
        elif cut:
            if looks_like_ours(text):
                book.damaged.append(Remark(number, f"longer than {MAX_LINE_BYTES >> 20} MiB"))
        else:
            read_candidate(book, number, text, whole=line_is_utf8(line), seen=seen)
    return book


def line_is_utf8(line: bytes) -> bool:
    try:
        line.decode("utf-8")
    except UnicodeDecodeError:
        return False
    return True


def read_candidate(book: Notebook, number: int, text: str, *, whole: bool, seen: dict[str, int]) -> None:
    """Put one line that starts with a brace where it belongs: a record, another line of this lab, damage, prose."""
    try:
        data = parse_json(text)
    except ValueError as error:
        if looks_like_ours(text):
            book.damaged.append(Remark(number, json_fault(error)))
        return
    if not isinstance(data, dict) or data.get("lab") != LAB:
        if isinstance(data, dict) and "concurrency" in data and "ttft_s" in data:
            shown = json.dumps(data.get("lab"))[:60]
            book.remarks.append(Remark(number, f"looks like a level record, but its lab is {shown}: left out"))
        return
    schema = data.get("schema", 1)
    if not is_count(schema) or schema not in KNOWN_SCHEMAS:
        book.unknown.append(
            Remark(
                number,
                f"format version {json.dumps(schema)[:20]} is not known here (1 and 2 "
                "are): left out; a newer summarise_load.py may read it",
            )
        )
    elif "concurrency" in data and "ttft_s" in data:
        fault = field_fault(data) if whole else "bytes that are not UTF-8"
        if fault:
            book.damaged.append(Remark(number, fault))
        elif text in seen:
            book.remarks.append(Remark(number, f"the same line as line {seen[text]}: counted once"))
        else:
            seen[text] = number
            book.records.append(Record(number, data))
    elif data.get("record") == "curve-summary":
        book.summaries.append(Record(number, data))
    elif data.get("record") == "recovery":
        book.recoveries.append(Record(number, data))


# ----------------------------------------------------------------------------------------------- figures of a curve


@dataclass(frozen=True)
class Level:
    """The records that count for one concurrency level of a label: one, or the repeats of one run."""

    c: int
    records: tuple[Record, ...]

    @property
    def interrupted(self) -> bool:
        return all(record.interrupted for record in self.records)

    @property
    def usable(self) -> bool:
        """Whether the level enters derived figures: whole, and with a completed request."""
        return not self.interrupted and self.completed > 0

    @property
    def requests(self) -> int | None:
        return self.total("requests")

    @property
    def completed(self) -> int:
        return self.total("completed") or 0

    @property
    def failed(self) -> int:
        return self.total("failed") or 0

    def total(self, path: str) -> int | None:
        """A count, summed over the repeats; None where no record has it."""
        counts = [count for count in (record.count(path) for record in self.records) if count is not None]
        return sum(counts) if counts else None

    def values(self, path: str) -> list[float]:
        """A figure in each repeat that has it, as plain floats."""
        return [float(value) for value in (record.number(path) for record in self.records) if value is not None]

    def figure(self, path: str) -> float | None:
        """A figure: the median over the repeats that have it, or None."""
        values = self.values(path)
        return statistics.median(values) if values else None

    def spread(self, path: str) -> tuple[float, float] | None:
        """(lowest, highest) over the repeats; None with fewer than two."""
        values = self.values(path)
        return (min(values), max(values)) if len(values) > 1 else None

    def tally(self, path: str) -> dict[str, int]:
        """Counts by name (finish reasons, error classes), summed over the repeats."""
        total: dict[str, int] = {}
        for record in self.records:
            for name, count in (record.raw(path) or {}).items():
                total[name] = total.get(name, 0) + int(count)
        return total

    @property
    def throughput(self) -> float | None:
        return self.figure("output_tokens_per_s")

    @property
    def cached_share(self) -> float | None:
        """Mean cached tokens / mean prompt tokens, or None."""
        cached, prompt = self.figure("cached_tokens_mean"), self.figure("prompt_tokens_mean")
        return cached / prompt if cached is not None and prompt else None


class Fit(NamedTuple):
    """TPOT p50 ~ a + b x c. Times in milliseconds; `interval_ms` is 95 % for b, None below three levels."""

    a_ms: float
    b_ms: float
    r2: float | None
    interval_ms: tuple[float, float] | None
    levels: tuple[int, ...]
    points: int

    def throughput(self, c: float) -> float | None:
        """Output tokens per second that the fit predicts at c: c / (a + b c)."""
        step_ms = self.a_ms + self.b_ms * c
        return 1000.0 * c / step_ms if step_ms > 0 else None

    @property
    def ceiling(self) -> float | None:
        """Tokens per second as c grows without end, 1/b; None where b is not positive."""
        return 1000.0 / self.b_ms if self.b_ms > 0 else None

    def c_at(self, slo_tpot_s: float | None) -> float | None:
        """The concurrency at which the fit meets a TPOT objective, (slo - a) / b; None where none is implied."""
        return (1000.0 * slo_tpot_s - self.a_ms) / self.b_ms if slo_tpot_s is not None and self.b_ms > 0 else None


@dataclass(frozen=True)
class Curve:
    """One label's levels, sorted by c, and its settings (those of the newest record that counts)."""

    label: str
    levels: tuple[Level, ...]
    settings: Mapping[str, Any]
    remarks: tuple[str, ...] = ()

    @cached_property
    def usable(self) -> list[Level]:
        return [level for level in self.levels if level.usable]

    @cached_property
    def per_request(self) -> float | None:
        """One request's throughput at the lowest level: throughput / c there; None where nothing completed."""
        for level in self.usable:
            return level.throughput / level.c if level.throughput else None
        return None

    def scaling(self, level: Level) -> float | None:
        if not level.usable or not self.per_request or level.throughput is None:
            return None
        return level.throughput / (level.c * self.per_request)

    @cached_property
    def knee(self) -> tuple[int, int] | None:
        points = [(level.c, level.throughput) for level in self.usable if level.throughput is not None]
        return find_knee(points)

    @cached_property
    def slots(self) -> int | None:
        value = self.settings.get("server_slots")
        return int(value) if value is not None else None

    @cached_property
    def fit(self) -> Fit | None:
        return fit_tpot(
            [
                (level.c, 1000.0 * value)
                for level in self.usable
                if self.slots is None or level.c <= self.slots
                for value in level.values("tpot_s.p50")
            ]
        )

    @property
    def slo_ttft_s(self) -> float | None:
        return self.settings.get("slo_ttft_s")

    @property
    def slo_tpot_s(self) -> float | None:
        return self.settings.get("slo_tpot_s")

    def meets_objective(self, level: Level) -> bool:
        """No failure, and both p90s inside the objective; outputs of one token have no TPOT to miss it."""
        ttft, tpot = level.figure("ttft_s.p90"), level.figure("tpot_s.p90")
        if not level.usable or level.failed or ttft is None or self.slo_ttft_s is None or self.slo_tpot_s is None:
            return False
        return ttft <= self.slo_ttft_s and (tpot is None or tpot <= self.slo_tpot_s)

    @cached_property
    def operating_point(self) -> int | None:
        return max((level.c for level in self.levels if self.meets_objective(level)), default=None)

    @cached_property
    def peak(self) -> Level | None:
        """The level with the highest throughput."""
        return max(self.usable, key=lambda level: level.throughput or 0.0, default=None)

    @cached_property
    def repeats(self) -> int:
        """The most runs that any level has."""
        return max((len(level.records) for level in self.levels), default=0)


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


def fit_tpot(points: Sequence[tuple[int, float]]) -> Fit | None:
    """Least squares of TPOT in ms on c, every run's p50 a point; None below two different c.

    >>> fit = fit_tpot([(c, 20 + 1.5 * c) for c in (1, 5, 10, 20)])
    >>> round(fit.a_ms, 6), round(fit.b_ms, 6), round(fit.r2, 6), round(fit.ceiling, 1), round(fit.c_at(0.1), 1)
    (20.0, 1.5, 1.0, 666.7, 53.3)
    """
    levels = tuple(sorted({c for c, _ in points}))
    if len(levels) < 2:
        return None
    mean_c = statistics.fmean(c for c, _ in points)
    mean_y = statistics.fmean(y for _, y in points)
    s_xx = math.fsum((c - mean_c) ** 2 for c, _ in points)
    b = math.fsum((c - mean_c) * (y - mean_y) for c, y in points) / s_xx
    a = mean_y - b * mean_c
    residual = math.fsum((y - a - b * c) ** 2 for c, y in points)
    total = math.fsum((y - mean_y) ** 2 for _, y in points)
    interval = None
    if len(levels) >= 3:
        freedom = len(points) - 2
        reach = student_t(freedom) * math.sqrt(residual / freedom / s_xx)
        interval = (b - reach, b + reach)
    return Fit(a, b, 1.0 - residual / total if total > 0 else None, interval, levels, len(points))


def student_t(freedom: int, confidence: float = 0.95) -> float:
    """The t that a Student variable of so many degrees of freedom stays within, either side, with this confidence.

    The distribution has a finite sum for whole degrees of freedom (Abramowitz and Stegun 26.7.3 and 26.7.4); it is
    inverted by halving.

    >>> [round(student_t(n), 3) for n in (1, 2, 3, 10, 100)]
    [12.706, 4.303, 3.182, 2.228, 1.984]
    """

    def within(t: float) -> float:
        angle = math.atan2(t, math.sqrt(freedom))
        cos2 = math.cos(angle) ** 2
        odd = freedom % 2
        term = math.cos(angle) if odd else 1.0
        total = term if freedom > 1 else 0.0
        for k in range(2 + odd, freedom - 1, 2):
            term *= cos2 * (k - 1) / k
            total += term
        if odd:
            return 2.0 / math.pi * (angle + math.sin(angle) * total)
        return math.sin(angle) * total

    low, high = 0.0, 1.0
    while within(high) < confidence:
        high *= 2.0
    for _ in range(200):
        middle = (low + high) / 2.0
        if within(middle) < confidence:
            low = middle
        else:
            high = middle
    return high


def counted_records(records: Sequence[Record]) -> tuple[tuple[Record, ...], list[str]]:
    """Of one label's records at one c: those that count (the newest run's repeats), and what is to be said.

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
                f"c={record.concurrency}: lines {by_repeat[record.repeat].line} and {record.line} both say "
                f"run {printable(record.run)}, repeat {record.repeat}, and differ: the later one is shown"
            )
        by_repeat[record.repeat] = record
    return tuple(by_repeat[repeat] for repeat in sorted(by_repeat)), remarks


def build_curve(label: str, records: Sequence[Record]) -> Curve:
    """The levels of one label that count, sorted by c."""
    by_c: dict[int, list[Record]] = {}
    for record in records:
        by_c.setdefault(record.concurrency, []).append(record)
    levels = []
    remarks: list[str] = []
    for c in sorted(by_c):
        counted, said = counted_records(by_c[c])
        levels.append(Level(c, counted))
        remarks += said
    shown = [record for level in levels for record in level.records]
    newest = max(shown, key=lambda record: (record.instant or 0.0, record.line))
    for name in COMPARED_SETTINGS + ALSO_COMPARED:
        values = dict.fromkeys(setting_text(record.setting(name)) for record in shown)
        if len(values) > 1:
            remarks.append(f"levels of this label differ in {name}: {', '.join(values)}")
    if any(record.schema == 1 for record in shown):
        remarks.append(VERSION_1_REMARK)
    return Curve(label, tuple(levels), {name: newest.setting(name) for name in IDENTITY}, tuple(remarks))


VERSION_1_REMARK = (
    "lines of format version 1 are shown: there, in flight counts successes only, TTFT includes connecting, "
    "TPOT ends at the stream's close, and an undefined figure was printed as 0.0"
)


def build_curves(book: Notebook) -> dict[str, Curve]:
    """Every label's curve, in file order."""
    return {label: build_curve(label, records) for label, records in book.by_label().items()}


def find_curve(book: Notebook, name: str) -> Curve:
    """The curve of a label, given as written or as --list shows it. Raises ResultError where there is none."""
    if not book.records:
        raise ResultError(f"no level records in {book.path}: run load_test.py first, or name the file with --labbook")
    labels = book.by_label()
    if name in labels:
        return build_curve(name, labels[name])
    for label, records in labels.items():
        if name == as_word(label):
            return build_curve(label, records)
    known = ", ".join(map(as_word, labels))
    raise ResultError(f"no label {name!r} in {book.path}; it holds: {known}")


class Span(NamedTuple):
    """The true values that a printed one can stand for."""

    low: float
    high: float

    def meets(self, other: Span) -> bool:
        return self.low <= other.high and other.low <= self.high

    def times(self, other: Span) -> Span:
        """Of figures that are not negative."""
        return Span(self.low * other.low, self.high * other.high)

    def over(self, other: Span) -> Span:
        """Of figures that are not negative; a divisor that may be 0 leaves the quotient unbounded."""
        return Span(self.low / other.high, self.high / other.low if other.low > 0 else math.inf)

    def minus(self, other: Span) -> Span:
        return Span(self.low - other.high, self.high - other.low)


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
    """The interval of a printed figure, or None where the record does not have it. Numbers of tokens are counts."""
    value = record.number(path)
    if value is not None and path.startswith("output_tokens_per_request.") and value.text.isdigit():
        return span(int(value))
    return None if value is None else span(value)


def says(record: Record, path: str) -> str:
    """A field as it is printed, for a finding."""
    value = record.raw(path)
    return f"{path} {value.text if isinstance(value, Printed) else json.dumps(value)}"


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
            raw.damaged.append(Remark(number, json_fault(error)))
        else:
            raw.levels.setdefault(key, []).append(data)
    if not raw.levels:
        raise UserError(f"{path} holds no per-request record: load_test.py --raw FILE writes them")
    return raw


def level_key(record: Record) -> LevelKey:
    return record.label, record.run, record.repeat, record.concurrency


def spans_of(requests: Iterable[Mapping[str, Any]], path: str) -> list[Span]:
    """The intervals of one figure over the requests that have it."""
    values = (as_number(request.get(path)) for request in requests)
    return [span(value, RAW_HALF) for value in values if value is not None]


def rank(percent: int, count: int) -> int:
    """The place, from 0, of a nearest-rank percentile among `count` ordered values; 0 % is the smallest one's.

    >>> rank(90, 10), rank(50, 1), rank(0, 7)
    (8, 0, 0)
    """
    return max(1, -(-percent * count // 100)) - 1


def nearest_rank(spans: Sequence[Span], percent: int) -> Span:
    """The interval of a nearest-rank percentile."""
    place = rank(percent, len(spans))
    return Span(sorted(item.low for item in spans)[place], sorted(item.high for item in spans)[place])


def mean_span(spans: Sequence[Span]) -> Span:
    count = len(spans)
    return Span(math.fsum(item.low for item in spans) / count, math.fsum(item.high for item in spans) / count)


def total_span(*spans: Span) -> Span:
    return Span(math.fsum(item.low for item in spans), math.fsum(item.high for item in spans))


def raw_spans(requests: Sequence[Mapping[str, Any]], concurrency: int) -> dict[str, Span]:
    """Every measured figure of a level that follows from its requests, as an interval."""
    good = [request for request in requests if request.get("ok") is True]
    found: dict[str, Span] = {}
    tokens = [span(int(count)) for request in good if (count := as_number(request.get("output_tokens"))) is not None]
    blocks = {name: spans_of(good, name) for name in ("ttft_s", "tpot_s", "e2e_s", "connect_s")}
    for name, spans in {**blocks, "output_tokens_per_request": tokens}.items():
        if spans:
            found[f"{name}.mean"] = mean_span(spans)
            for key, percent in zip(STATISTICS[:6], (0, 50, 90, 95, 99, 100)):
                found[f"{name}.{key}"] = nearest_rank(spans, percent)
    timed = [[spans_of([request], path) for path in ("started_s", "connect_s", "ended_s")] for request in requests]
    if timed and all(all(parts) for parts in timed):
        ends = [total_span(*(part[0] for part in parts)) for parts in timed]
        wall = nearest_rank(ends, 100)
        busy = total_span(*(part[0] for parts in timed for part in parts[1:]))
        found["wall_s"] = wall
        if wall.low > 0:
            in_flight = busy.over(wall)
            found["mean_in_flight"] = Span(min(in_flight.low, concurrency), min(in_flight.high, concurrency))
    prompts = [value for request in good if (value := as_number(request.get("prompt_tokens"))) is not None]
    counted = [request for request in good if as_number(request.get("prompt_tokens")) is not None] or good
    cached = [as_number(request.get("cached_tokens")) for request in counted]
    if prompts:
        found["prompt_tokens_mean"] = mean_span([Span(float(value), float(value)) for value in prompts])
    if any(value is not None for value in cached):
        found["cached_tokens_mean"] = mean_span([Span(float(value or 0), float(value or 0)) for value in cached])
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
    said = []
    for path, count in raw_counts(record, requests).items():
        written = record.raw(path)
        if (
            written is not None
            and ({name: int(number) for name, number in written.items()} if isinstance(count, dict) else written)
            != count
        ):
            said.append(f"{says(record, path)}, but its requests give {json.dumps(count)}")
    for path, recomputed in raw_spans(requests, record.concurrency).items():
        printed = measured(record, path)
        if printed is not None and not printed.meets(recomputed):
            said.append(f"{says(record, path)}, but its requests give {(recomputed.low + recomputed.high) / 2:.6g}")
    return said


# ------------------------------------------------------------------------------------------------------------ rules

PASS, WARN, FAIL = "PASS", "WARN", "FAIL"


@dataclass(frozen=True)
class Finding:
    """What one rule says of a notebook. `items` holds each case on its own, naming its label and level."""

    rule: str
    status: str
    message: str
    items: tuple[str, ...] = ()


@dataclass(frozen=True)
class Audit:
    """What the rules look at: a notebook and its curves."""

    book: Notebook
    curves: Mapping[str, Curve]
    raw: RawFile | None = None

    def with_prompts(self, prompt_set: str) -> list[tuple[Curve, list[Level]]]:
        """The curves that have levels of one prompt set, with those levels."""
        found = []
        for curve in self.curves.values():
            levels = [level for level in curve.levels if level.records[-1].data.get("prompt_set") == prompt_set]
            if levels:
                found.append((curve, levels))
        return found

    def every_level(self) -> Iterator[tuple[Curve, Level]]:
        for curve in self.curves.values():
            for level in curve.levels:
                yield curve, level


Rule = Callable[[Audit], Finding]
SHOWN_ITEMS = 6  # cases named on a rule's line; --json names all


def verdict(rule: str, bad_status: str, items: Sequence[str], good: str) -> Finding:
    """A finding that passes with a sentence, or names its cases."""
    if not items:
        return Finding(rule, PASS, good)
    more = f"; and {len(items) - SHOWN_ITEMS} more" if len(items) > SHOWN_ITEMS else ""
    return Finding(rule, bad_status, "; ".join(items[:SHOWN_ITEMS]) + more, tuple(items))


def place(curve: Curve, level: Level) -> str:
    """How a finding names a level: its label and c."""
    return f"{as_word(curve.label)} c={level.c}"


def c_list(levels: Iterable[int]) -> str:
    return ",".join(map(str, levels))


def rule_sweep(audit: Audit) -> Finding:
    """Some label with prompt set mixed has a completed request at each of the lab's levels."""
    sweeps = audit.with_prompts("mixed")
    missing = []
    for curve, levels in sweeps:
        absent = [c for c in SWEEP_LEVELS if not any(level.c == c and level.usable for level in levels)]
        if not absent:
            return Finding("sweep", PASS, f"{as_word(curve.label)}: completed requests at c={c_list(SWEEP_LEVELS)}")
        missing.append(f"{as_word(curve.label)} has no completed request at c={c_list(absent)}")
    if not sweeps:
        missing = [f"no label with prompt set mixed; levels c={c_list(SWEEP_LEVELS)} are needed"]
    return verdict("sweep", FAIL, missing, "")


def served_by(curve: Curve) -> tuple[str, str]:
    """What a prefix pair has in common: engine and model."""
    return setting_text(curve.settings["engine"]), setting_text(curve.settings["model"])


def rule_prefix_pair(audit: Audit) -> Finding:
    """A shared-prefix and a unique-prefix label of the same engine and model. One whole pair is enough to pass;
    a label whose partner is missing beside it is a warning."""
    shared = {served_by(curve): as_word(curve.label) for curve, _ in audit.with_prompts("shared-prefix")}
    unique = {served_by(curve): as_word(curve.label) for curve, _ in audit.with_prompts("unique-prefix")}
    pairs = [f"{shared[key]} with control {unique[key]}" for key in shared if key in unique]
    alone = [
        f"{shared[key]} has no unique-prefix control of engine {key[0]}, model {key[1]}"
        for key in shared
        if key not in unique
    ]
    alone += [
        f"{unique[key]} has no shared-prefix partner of engine {key[0]}, model {key[1]}"
        for key in unique
        if key not in shared
    ]
    if not shared and not unique:
        alone = ["no label with prompt set shared-prefix, and none with unique-prefix"]
    return verdict("prefix-pair", WARN if pairs else FAIL, alone, "; ".join(pairs))


def rule_shared_cached(audit: Audit) -> Finding:
    """Every shared-prefix level's mean cached tokens are above 50 % of its prompt."""
    return cached_share_rule(audit, "shared-cached", "shared-prefix", lambda share: share > 0.5, "above 50 %")


def rule_unique_cached(audit: Audit) -> Finding:
    """Every unique-prefix level's mean cached tokens are below 10 % of its prompt."""
    return cached_share_rule(audit, "unique-cached", "unique-prefix", lambda share: share < 0.1, "below 10 %")


def cached_share_rule(audit: Audit, rule: str, prompts: str, holds: Callable[[float], bool], want: str) -> Finding:
    judged, bad, known = 0, [], []
    for curve, levels in audit.with_prompts(prompts):
        for level in levels:
            judged += 1
            share = level.cached_share
            if share is None or (prompts == "shared-prefix" and no_cached_count(level)):
                continue
            known.append(f"{place(curve, level)} {share:.0%}")
            if not holds(share):
                bad.append(
                    f"{place(curve, level)}: {level.figure('cached_tokens_mean'):.1f} cached of "
                    f"{level.figure('prompt_tokens_mean'):.1f} prompt tokens is {share:.0%}, not {want}"
                )
    if not judged:
        return Finding(rule, FAIL, f"no {prompts} level: nothing shows a cached share {want}")
    if not known:
        return Finding(rule, WARN, f"not judged: no {prompts} level has a cached count")
    return verdict(rule, FAIL, bad, ", ".join(known) + f": {want}")


def no_cached_count(level: Level) -> bool:
    """Whether the server told no cached tokens; a version 1 line's 0.0 may be that too, so it is taken as that."""
    return all(
        record.number("cached_tokens_mean") is None
        or (record.schema == 1 and record.number("cached_tokens_mean") == 0.0)
        for record in level.records
    )


def rule_damaged(audit: Audit) -> Finding:
    """No line that looks like a record is damaged."""
    items = [f"line {remark.line}: {printable(remark.text)}" for remark in audit.book.damaged]
    return verdict("damaged-lines", FAIL, items, f"{count_of(len(audit.book.records), 'level record')} read whole")


def count_of(number: int, noun: str) -> str:
    """
    >>> count_of(1, "level"), count_of(2, "level")
    ('1 level', '2 levels')
    """
    return f"{number} {noun}{'' if number == 1 else 's'}"


def rule_unknown_version(audit: Audit) -> Finding:
    items = [f"line {remark.line}: {printable(remark.text)}" for remark in audit.book.unknown]
    return verdict("format-version", WARN, items, "every line is of a known version")


def rule_failed(audit: Audit) -> Finding:
    items = [
        f"{place(curve, level)}: {level.failed} of {level.requests or level.failed} failed{first_error(level)}"
        for curve, level in audit.every_level()
        if level.failed
    ]
    return verdict("failed-requests", WARN, items, "none")


def first_error(level: Level) -> str:
    texts = [record.data.get("first_error") for record in level.records if record.data.get("first_error")]
    return f" ({printable(texts[0])[:120]})" if texts else ""


def rule_token_counts(audit: Audit) -> Finding:
    items = []
    for curve, level in audit.every_level():
        kinds = {json.dumps(record.data.get("token_counts")) for record in level.records if record.count("completed")}
        if kinds - {'"usage"'}:
            items.append(f"{place(curve, level)}: {printable(', '.join(sorted(kinds)))}")
    return verdict("tokens-from-usage", WARN, items, "every level counts tokens from usage")


def rule_identified(audit: Audit) -> Finding:
    items = []
    for curve in audit.curves.values():
        names = [
            name
            for name in ("host", "quant", "context_length", "server_slots")
            if any(record.setting(name) is None for level in curve.levels for record in level.records)
        ]
        if names:
            items.append(f"{as_word(curve.label)}: {', '.join(names)} missing")
    return verdict("identified", WARN, items, "host, quant, context_length and server_slots are given everywhere")


def rule_cached_count(audit: Audit) -> Finding:
    items = [
        f"{place(curve, level)}: the server told no cached tokens (vLLM: start it with --enable-prompt-tokens-details)"
        for curve, levels in audit.with_prompts("shared-prefix")
        for level in levels
        if no_cached_count(level)
    ]
    return verdict("cached-count", WARN, items, "every shared-prefix level has a cached count")


def rule_second_engine(audit: Audit) -> Finding:
    engines: dict[str, str] = {}
    for curve, _ in audit.with_prompts("mixed"):
        if curve.settings["engine"] is not None:
            engines.setdefault(setting_text(curve.settings["engine"]), as_word(curve.label))
    if len(engines) > 1:
        return Finding("second-engine", PASS, ", ".join(f"{label} ({engine})" for engine, label in engines.items()))
    only = next((f"only {engine} ({label})" for engine, label in engines.items()), "no engine is named")
    return Finding("second-engine", WARN, f"no second engine's baseline: {only}; if it could not run, say so in prose")


def rule_variants(audit: Audit) -> Finding:
    found = [label for label in VARIANT_LABELS if label in audit.curves]
    return Finding("variants", PASS if found else WARN, ", ".join(found) or f"none of {', '.join(VARIANT_LABELS)}")


def rule_client(audit: Audit) -> Finding:
    items = []
    for curve, level in audit.every_level():
        evidence = client_evidence(level)
        if evidence:
            items.append(f"{place(curve, level)}: {evidence}")
    return verdict("client-bound", WARN, items, "no level shows the client as the limit")


def client_evidence(level: Level) -> str | None:
    """Why the client, not the server, may have set a level's figures; None where nothing says so.

    Its lag, its calibrated floor or its CPU is above a limit: those at which load_test.py warns. That requests in
    flight are few is told beside them, and is no sign by itself, for a short level drains too.

    Version 1 lines say nothing of the client, so there a low count in flight is only possibly its doing.
    """
    in_flight = level.figure("mean_in_flight")
    low = in_flight is not None and level.usable and in_flight < LOW_IN_FLIGHT * level.c
    if low and all(record.schema == 1 for record in level.records):
        return f"possibly: in flight {in_flight:.1f} of {level.c} (or the level was short and drained)"
    reasons = [reason for reason in (client_lag(level), client_floor(level), client_cpu(level)) if reason]
    if low and reasons:
        reasons.insert(0, f"in flight {in_flight:.1f} of {level.c}")
    return ", ".join(reasons) or None


def client_lag(level: Level) -> str | None:
    """The event loop's lateness, where it is a sizeable part of TPOT (and more than a timer's coarseness)."""
    lag, tpot = level.figure("client.loop_lag_s.p99"), level.figure("tpot_s.p50")
    if lag is not None and tpot and lag > max(LAG_SHARE * tpot, LAG_MIN_S):
        return f"client loop lag p99 {1000 * lag:.1f} ms against a TPOT of {1000 * tpot:.1f} ms"
    return None


def client_cpu(level: Level) -> str | None:
    """The client's share of one core, where its event loop is rarely idle."""
    cpu = level.figure("client.cpu_fraction")
    return f"client CPU {cpu:.0%} of one core" if cpu is not None and cpu > CPU_HIGH else None


def client_floor(level: Level) -> str | None:
    """The calibrated cost of this client, where it is a sizeable part of a decode step or of TTFT."""
    floor, tpot = level.figure("client.floor_us_per_delta"), level.figure("tpot_s.p50")
    if floor is not None and tpot and floor * 1e-6 * level.c > LAG_SHARE * tpot:
        return f"reading {level.c} deltas costs {floor * level.c / 1000:.2f} ms of a TPOT of {1000 * tpot:.1f} ms"
    floor_ttft, ttft = level.figure("client.floor_ttft_s"), level.figure("ttft_s.p50")
    if floor_ttft is not None and ttft and floor_ttft > LAG_SHARE * ttft:
        return f"this client alone takes {1000 * floor_ttft:.1f} ms of a TTFT of {1000 * ttft:.1f} ms"
    return None


def rule_coalesced(audit: Audit) -> Finding:
    items = [
        f"{place(curve, level)}: {level.total('coalesced')} of {level.completed} responses came in one or two bursts"
        for curve, level in audit.every_level()
        if level.total("coalesced")
    ]
    return verdict("coalesced", WARN, items, "no response was held back by a buffering proxy")


def rule_interrupted(audit: Audit) -> Finding:
    items = [f"{place(curve, level)}: interrupted" for curve, level in audit.every_level() if level.interrupted]
    return verdict("interrupted", WARN, items, "no level stands only as interrupted")


def rule_rounds(audit: Audit) -> Finding:
    items = [
        f"{place(curve, level)}: {requests} requests are {requests / level.c:.1f} rounds"
        for curve, level in audit.every_level()
        for requests in [level.records[-1].count("requests")]
        if requests is not None and requests < 2 * level.c
    ]
    return verdict("rounds", WARN, items, "every level has at least 2 rounds (requests / c)")


def rule_summary(audit: Audit) -> Finding:
    labels = [as_word(record.label) for record in audit.book.summaries]
    hint = f"no curve-summary line: {PROGRAM} --label LABEL --record appends one"
    return Finding("curve-summary", PASS if labels else WARN, ", ".join(dict.fromkeys(labels)) or hint)


def is_negative(record: Record) -> list[str]:
    """No count, time or rate is below 0."""
    paths = [*COUNT_FIELDS, *MEASURE_FIELDS, *(f"{name}.{key}" for name in STATISTIC_FIELDS for key in STATISTICS)]
    return [f"{says(record, path)} is negative" for path in paths if (record.number(path) or 0.0) < 0.0]


def miscounted(record: Record) -> list[str]:
    """completed + failed = requests; what counts successes or failures adds up to them."""
    said = []
    requests, completed, failed = (record.count(path) for path in ("requests", "completed", "failed"))
    if requests is not None and completed is not None and failed is not None:
        ended = completed + failed
        if ended > requests or (ended < requests and not record.interrupted):
            said.append(f"completed {completed} + failed {failed} = {ended}, but requests {requests}")
    for path, total, name in (("finish_reasons", completed, "completed"), ("errors", failed, "failed")):
        block = record.data.get(path)
        if block is not None and total is not None and sum(map(int, block.values())) != total:
            said.append(f"{path} add up to {sum(map(int, block.values()))}, but {name} {total}")
    for path in ("within_slo", "coalesced"):
        count = record.count(path)
        if count is not None and completed is not None and count > completed:
            said.append(f"{path} {count} is more than completed {completed}")
    return said


def misrated(record: Record) -> list[str]:
    """Each rate is its count / wall_s."""
    said = []
    wall = measured(record, "wall_s")
    for count_path, rate_path in (
        ("output_tokens", "output_tokens_per_s"),
        ("completed", "requests_per_s"),
        ("within_slo", "goodput_requests_per_s"),
    ):
        count, rate = record.count(count_path), measured(record, rate_path)
        if wall is None or wall.high <= 0 or count is None or rate is None or span(count).over(wall).meets(rate):
            continue
        quotient = count / (record.number("wall_s") or math.inf)
        said.append(f"{count_path} {count} / {says(record, 'wall_s')} = {quotient:.4g}, but {says(record, rate_path)}")
    return said


def misordered(record: Record) -> list[str]:
    """min <= p50 <= p90 <= p95 <= p99 <= max, and the mean between min and max."""
    said = []
    for name in STATISTIC_FIELDS:
        for keys in (STATISTICS[:6], ("min", "mean", "max")):
            known = [(f"{name}.{key}", value) for key in keys if (value := measured(record, f"{name}.{key}"))]
            for (path, value), (next_path, next_value) in zip(known, known[1:]):
                if value.low > next_value.high:
                    said.append(f"{says(record, path)} is above {says(record, next_path)}")
    return said


def overfull(record: Record) -> list[str]:
    """At most c requests are in flight; all that were in flight hold at least the successes' own time (Little)."""
    said = []
    in_flight, wall = measured(record, "mean_in_flight"), measured(record, "wall_s")
    if in_flight is not None and in_flight.low > record.concurrency:
        said.append(f"{says(record, 'mean_in_flight')} is above concurrency {record.concurrency}")
    completed = record.count("completed")
    for path in ("e2e_s.mean", "ttft_s.mean") if record.schema > 1 else ("ttft_s.mean",):
        mean = measured(record, path)
        if None in (in_flight, wall, completed, mean):
            continue
        assert in_flight is not None and wall is not None and completed is not None and mean is not None
        if in_flight.times(wall).high < completed * mean.low:
            said.append(
                f"{says(record, 'wall_s')} x {says(record, 'mean_in_flight')} is less than "
                f"completed {completed} x {says(record, path)}"
            )
            break
    return said


def outlasting(record: Record) -> list[str]:
    """No response is longer than the level, nor shorter than its own wait for the first token."""
    said = []
    wall = measured(record, "wall_s")
    for path in ("e2e_s.max", "ttft_s.max", "ttft_s.p99"):
        longest = measured(record, path)
        if wall is not None and longest is not None and longest.low > wall.high:
            said.append(f"{says(record, path)} is longer than {says(record, 'wall_s')}")
            break
    for key in STATISTICS:
        ttft, e2e = measured(record, f"ttft_s.{key}"), measured(record, f"e2e_s.{key}")
        if ttft is not None and e2e is not None and ttft.low > e2e.high:
            said.append(f"{says(record, f'ttft_s.{key}')} is above {says(record, f'e2e_s.{key}')}")
    window = measured(record, "steady_window_s")
    if wall is not None and window is not None and window.low > wall.high:
        said.append(f"{says(record, 'steady_window_s')} is longer than {says(record, 'wall_s')}")
    rate, tokens = measured(record, "steady_output_tokens_per_s"), record.count("output_tokens")
    if None not in (window, rate, tokens) and not record.count("failed"):
        assert window is not None and rate is not None and tokens is not None
        if window.times(rate).low > tokens:
            said.append(
                f"{says(record, 'steady_window_s')} x {says(record, 'steady_output_tokens_per_s')} is more "
                f"than output_tokens {tokens}"
            )
    return said


def cached_beyond_prompt(record: Record) -> list[str]:
    """Cached tokens are a part of the prompt: load_test.py takes both means over the same requests and believes no
    server that says otherwise of one. Not where counts are mixed: older lines then took them over
    different requests."""
    cached, prompt = measured(record, "cached_tokens_mean"), measured(record, "prompt_tokens_mean")
    if cached is None or prompt is None or isinstance(record.data.get("token_counts"), dict):
        return []
    if cached.low <= prompt.high:
        return []
    return [f"{says(record, 'cached_tokens_mean')} is more than {says(record, 'prompt_tokens_mean')}"]


def mistimed(record: Record) -> list[str]:
    """Tokens, TPOT, TTFT and E2E fit together. A request of n >= 2 tokens takes TTFT + TPOT x (n - 1), so their sums
    stand between the smallest and the largest TPOT, and equal the mean's where all outputs have one length."""
    said: list[str] = []
    least, most = (record.count(f"output_tokens_per_request.{key}") for key in ("min", "max"))
    tokens, completed = record.count("output_tokens"), record.count("completed")
    if None in (least, most, tokens, completed):
        return said
    assert least is not None and most is not None and tokens is not None and completed is not None
    if not least * completed <= tokens <= most * completed:
        said.append(f"output_tokens {tokens} of {completed} requests is not between {least} and {most} each")
    if least < 2 or completed < 1 or said:
        return said
    e2e, ttft = measured(record, "e2e_s.mean"), measured(record, "ttft_s.mean")
    bounds = ("tpot_s.mean",) * 2 if least == most else ("tpot_s.min", "tpot_s.max")
    low, high = (measured(record, path) for path in bounds)
    if e2e is None or ttft is None or low is None or high is None:
        return said
    per_request = (tokens - completed) / completed
    decoding = Span(low.low * per_request, high.high * per_request)
    if not e2e.minus(ttft).meets(decoding):
        said.append(
            f"{says(record, 'e2e_s.mean')} - {says(record, 'ttft_s.mean')} does not fit {per_request:.1f} "
            f"further tokens at {says(record, bounds[1])}"
        )
    return said


def misjudged(record: Record) -> list[str]:
    """within_slo fits the nearest-rank percentiles: a percentile q inside a limit means that at least q of the
    requests are; one outside, that fewer are. Version 1's percentiles are not known to be nearest rank."""
    completed, within = record.count("completed"), record.count("within_slo")
    if record.schema == 1 or not completed or within is None or record.data.get("percentile_method") is not None:
        return []
    counts = []
    for name, limit in (("ttft_s", record.number("slo_ttft_s")), ("tpot_s", record.number("slo_tpot_s"))):
        least_tokens = record.count("output_tokens_per_request.min")
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
        place = rank(percent, completed)
        if value is not None and value.high <= limit:
            least = max(least, place + 1)
        if value is not None and value.low > limit:
            most = min(most, place)
    return least, most


CONTRADICTIONS: tuple[Callable[[Record], list[str]], ...] = (
    miscounted,
    misrated,
    misordered,
    overfull,
    outlasting,
    cached_beyond_prompt,
    mistimed,
    misjudged,
)


def contradictions(record: Record) -> list[str]:
    """Every piece of arithmetic that an honest line satisfies and this one does not."""
    negative = is_negative(record)
    if negative:
        return negative  # the other rules hold for figures that are not negative
    return [item for rule in CONTRADICTIONS for item in rule(record)]


def copied_latencies(records: Sequence[Record]) -> list[str]:
    """Two runs of one label whose latency figures are equal to the last digit.

    Two honest runs of a steady server can agree where figures are coarse, so equality alone is not enough. Either the
    figures show enough by themselves (see tells_a_copy), or wall time, rate and requests in flight must be equal as
    well, with COPY_LOAD_DIGITS digits between them.
    """
    said = []
    seen: dict[tuple[str, int, tuple[tuple[str, float], ...]], Record] = {}
    for record in records:
        figures = latency_figures(record)
        if (record.count("completed") or 0) < 5 or not figures:
            continue
        key = (record.label, record.concurrency, tuple((path, float(value)) for path, value in figures.items()))
        earlier = seen.setdefault(key, record)
        if not other_run(earlier, record):
            continue
        also = ("wall_s", "output_tokens_per_s", "mean_in_flight")
        same = sum(value.digits for path in also if (value := earlier.number(path)) and value == record.number(path))
        if tells_a_copy(figures) or same >= COPY_LOAD_DIGITS:
            said.append(
                f"{as_word(record.label)} c={record.concurrency}: lines {earlier.line} and {record.line} are "
                f"different runs, but all {len(figures)} latency figures are equal to the last digit"
            )
    return said


COPY_DIGITS = 18
COPY_ROOM = 64.0
COPY_LOAD_DIGITS = 8
COPY_HALF_S = 0.000501  # half a millisecond, and what a float adds to it


def tells_a_copy(figures: Mapping[str, Printed]) -> bool:
    """Whether latency figures are fine enough that two honest runs do not share them by chance.

    Only different values count, and only those printed to a millisecond or finer: above that a queue repeats itself.
    They must carry COPY_DIGITS digits together, and stand apart: where neighbours of one block differ by few units of
    the last digit, noise had no room to show. The room is the product of (1 + difference in such units).

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


LATENCIES = ("ttft_s", "tpot_s", "e2e_s")


def latency_figures(record: Record) -> dict[str, Printed]:
    """The latency figures of a record that are not null."""
    paths = (f"{name}.{key}" for name in LATENCIES for key in STATISTICS)
    return {path: value for path in paths if (value := record.number(path)) is not None}


def other_run(one: Record, other: Record) -> bool:
    """Whether two records come from different runs: by run id, in version 1 by `recorded_at`."""
    if one.schema == 1 and other.schema == 1:
        return one.data.get("recorded_at") != other.data.get("recorded_at")
    return one is not other and one.run != other.run


def rule_consistent(audit: Audit) -> Finding:
    """No record contradicts itself, and no two runs are copies of each other."""
    items = [
        f"line {record.line}, {as_word(record.label)} c={record.concurrency}: {item}"
        for record in audit.book.records
        for item in contradictions(record)
    ]
    items += copied_latencies(audit.book.records)
    return verdict("consistent", FAIL, items, f"{count_of(len(audit.book.records), 'record')} without contradiction")


def rule_raw(audit: Audit) -> Finding:
    """With --raw: each level record is what its per-request lines give, and neither file has a level that the other
    lacks. Other labs' or labels' lines in the raw file are told, not failed."""
    assert audit.raw is not None
    raw = audit.raw
    items = [f"{raw.path} line {remark.line}: {printable(remark.text)}" for remark in raw.damaged]
    absent, used = [], set()
    for record in audit.book.records:
        where = f"{as_word(record.label)} c={record.concurrency}"
        if level_key(record) in raw.levels:
            used.add(level_key(record))
            differences = raw_differences(record, raw.levels[level_key(record)])
            items += [f"line {record.line}, {where}: {difference}" for difference in differences]
        elif record.schema > 1:
            absent.append(f"line {record.line}, {where}: no request of its run in {raw.path}")
    for label, run, repeat, c in raw.levels:
        if (label, run, repeat, c) not in used:
            absent.append(
                f"{as_word(label)} c={c}: {raw.path} holds run {printable(run)}, repeat {repeat}, "
                "which the notebook lacks"
            )
    if items:
        return verdict("raw", FAIL, items + absent, "")
    return verdict("raw", WARN, absent, f"{count_of(len(used), 'level record')} recomputed from {raw.path}: the same")


RULES: tuple[Rule, ...] = (
    rule_sweep,
    rule_prefix_pair,
    rule_shared_cached,
    rule_unique_cached,
    rule_consistent,
    rule_damaged,
    rule_failed,
    rule_token_counts,
    rule_identified,
    rule_cached_count,
    rule_second_engine,
    rule_variants,
    rule_client,
    rule_coalesced,
    rule_interrupted,
    rule_rounds,
    rule_summary,
    rule_unknown_version,
)


def check(book: Notebook, raw: RawFile | None = None) -> list[Finding]:
    """Every rule's finding, in a fixed order."""
    audit = Audit(book, build_curves(book), raw)
    findings = [rule(audit) for rule in (*RULES, *([rule_raw] if raw else []))]
    if book.records:
        return findings
    return [replace(item, message="no level to judge") if item.status == PASS else item for item in findings]


def tally_of(findings: Sequence[Finding]) -> dict[str, int]:
    """How many findings have each status."""
    return {status: sum(finding.status == status for finding in findings) for status in (PASS, WARN, FAIL)}


# --------------------------------------------------------------------------------------------------------- readings


@dataclass(frozen=True)
class Reading:
    """A shape that the numbers show: its code, where, the evidence in words and as values, and one thing to try."""

    code: str
    levels: tuple[int, ...]
    evidence: str
    advice: str
    values: Mapping[str, Any]
    certain: bool = True


def growth(level: Level, base: Level, path: str) -> float | None:
    """A figure against the lowest level's; None where either is missing."""
    top, bottom = level.figure(path), base.figure(path)
    return top / bottom if top is not None and bottom else None


def read_bandwidth(curve: Curve) -> list[Reading]:
    """Added requests are nearly free: the weights are read once per step for all of them."""
    cheap = []
    for level in curve.usable[1:]:
        scaling, slower = curve.scaling(level), growth(level, curve.usable[0], "tpot_s.p50")
        if scaling is not None and scaling > CHEAP_SCALING and slower is not None and slower <= FLAT_TPOT:
            cheap.append((level, scaling, slower))
    if not cheap:
        return []
    level, scaling, slower = cheap[-1]
    at_top = level is curve.usable[-1]
    return [
        Reading(
            "bandwidth_bound",
            tuple(item[0].c for item in cheap),
            f"bandwidth-bound and still cheap up to c={level.c}: scaling {scaling:.2f}, TPOT p50 {slower:.2f} times "
            f"that at c={curve.usable[0].c}",
            "measure higher levels: the knee is not reached" if at_top else f"admit at least {level.c} at once",
            {"c": level.c, "scaling": scaling, "tpot_growth": slower},
        )
    ]


def read_compute(curve: Curve) -> list[Reading]:
    """The part of a step that grows with c has passed the part that does not."""
    fit = curve.fit
    if fit is None or fit.a_ms <= 0 or fit.b_ms <= 0 or (fit.interval_ms is not None and fit.interval_ms[0] <= 0):
        return []
    levels = [c for c in fit.levels if fit.b_ms * c > fit.a_ms]
    if not levels:
        return []
    c = levels[-1]
    return [
        Reading(
            "compute_per_step",
            tuple(levels),
            f"compute per step: at c={c} the growing part of a step, b x c = {fit.b_ms * c:.1f} ms, is beyond "
            f"the fixed part, a = {fit.a_ms:.1f} ms",
            "a smaller or eight-bit cache and shorter contexts lower b; more slots no longer buy throughput cheaply",
            {"c": c, "a_ms": fit.a_ms, "b_ms": fit.b_ms, "bc_ms": fit.b_ms * c},
        )
    ]


def waiting_seen(level: Level) -> tuple[str, float] | None:
    """The server's own sign that requests waited: (what, how many)."""
    for path, words in (("server.peak_deferred", "deferred"), ("server.peak_waiting", "waiting")):
        value = level.figure(path)
        if value:
            return words, value
    return None


def split_part(level: Level, part: str) -> float | None:
    """The mean of one part of the time to first token, in seconds: means add up to a mean, medians do not."""
    return level.figure(f"ttft_split_s.{part}.mean")


def split_shares(level: Level) -> dict[str, float] | None:
    """Queue, prefill and rest as shares of their sum; None where the server told nothing."""
    parts = {part: value for part in ("queue", "prefill", "rest") if (value := split_part(level, part)) is not None}
    total = sum(parts.values())
    return {part: value / total for part, value in parts.items()} if total > 0 else None


def read_queueing(curve: Curve) -> list[Reading]:
    """First tokens wait for a slot or for cache blocks. A wait is long against a request's own decoding; prompts
    that merely arrive together wait for each other's prefill, which is short against it."""
    found = []
    for level in curve.usable:
        ttft, tpot = level.figure("ttft_s.p90"), level.figure("tpot_s.p50")
        if ttft is None or not tpot:
            continue
        ttft_growth = growth(level, curve.usable[0], "ttft_s.p90")
        tpot_growth = growth(level, curve.usable[0], "tpot_s.p50")
        outgrown = bool(ttft_growth and tpot_growth and ttft_growth > FAST_GROWTH * tpot_growth)
        tokens = (level.total("output_tokens") or 0) / level.completed
        long_wait = ttft > LONG_WAIT_SHARE * tpot * max(tokens - 1, 1)
        above = curve.slots is not None and level.c > curve.slots
        shares, waiting = split_shares(level) or {}, waiting_seen(level)
        sampled = level.figure("server.peak_deferred") is not None or level.figure("server.peak_waiting") is not None
        # What a split leaves for the queue holds the server's other delays too, where the server saw nobody wait.
        told = above or waiting is not None or (shares.get("queue", 0.0) > SPLIT_SHARE and not sampled)
        fits = curve.slots is not None and level.c <= curve.slots
        if (told and (long_wait or outgrown)) or (long_wait and outgrown and not sampled and not fits):
            signs = [f"TTFT p90 {ttft:.3f} s"]
            if ttft_growth and tpot_growth and level is not curve.usable[0]:
                signs.append(f"{ttft_growth:.1f} times that at c={curve.usable[0].c}, TPOT p50 {tpot_growth:.1f} times")
            if above:
                signs.append(f"{level.c} at once on {curve.slots} slots")
            if waiting:
                signs.append(f"{waiting[1]:g} {waiting[0]} at the peak")
            values = {
                "c": level.c,
                "ttft_growth": ttft_growth,
                "tpot_growth": tpot_growth,
                "slots": curve.slots,
                waiting[0] if waiting else "waiting": waiting[1] if waiting else None,
            }
            found.append((level.c, ", ".join(signs), values, told))
    if not found:
        return []
    c, signs_text, values, told = found[-1]
    possibly = "" if told else "possibly "
    advice = (
        "more slots, if memory allows, or admit fewer requests: the configuration makes this wait, not the model"
        if told
        else "sample the server (--sample 1) and record --server-slots to tell a queue from long prompts"
    )
    evidence = f"{possibly}queueing for a slot or block at c={c}: {signs_text}"
    return [Reading("queueing", tuple(item[0] for item in found), evidence, advice, values, certain=told)]


SPLIT_MEANING = {  # the part of the mean that dominates: code, what it means, one thing to try
    "queue": ("ttft_is_queue", "an admission limit, not a slow model", "raise the slots, or admit fewer requests"),
    "prefill": ("ttft_is_prefill", "it waits for prompts", "cache the common prefix, or shorten the prompts"),
    "rest": ("ttft_is_decode", "mostly one decode step", "nothing: the first token comes like any other"),
    "none": ("ttft_is_mixed", "no part dominates", "see which part grows from level to level"),
}
# vLLM's own clock has the first step in its prefill: what is left of the client's mean is outside the engine.
OUTSIDE_MEANING = (
    "ttft_is_outside",
    "mostly outside the engine",
    "look at its HTTP server, its tokeniser and the client",
)


def read_split(curve: Curve) -> list[Reading]:
    """Where the server says that the time to first token went, at the highest level it told it for."""
    told = [(level, shares) for level in curve.usable if (shares := split_shares(level))]
    if not told:
        return []
    level, shares = told[-1]
    part = max(shares, key=lambda name: shares[name])
    code, meaning, advice = SPLIT_MEANING[part if shares[part] > SPLIT_SHARE else "none"]
    if code == "ttft_is_decode" and level.figure("ttft_split_s.rest.p50") is None:  # from histograms
        code, meaning, advice = OUTSIDE_MEANING
    seconds = {name: split_part(level, name) for name in shares}
    text = ", ".join(f"{name} {seconds[name]:.3f} s ({share:.0%})" for name, share in shares.items())
    values = {"c": level.c, "seconds": seconds, "shares": shares}
    return [Reading(code, (level.c,), f"mean time to first token at c={level.c}: {text}: {meaning}", advice, values)]


def read_prefills(curve: Curve) -> list[Reading]:
    """Decoding stalls while other requests' prompts are processed: a long tail of TPOT."""
    found = []
    for level in curve.usable:
        p50, p90 = level.figure("tpot_s.p50"), level.figure("tpot_s.p90")
        if level.c > 1 and p50 and p90 is not None and p90 > TAIL_RATIO * p50:
            found.append((level.c, p50, p90))
    if not found:
        return []
    c, p50, p90 = found[-1]
    return [
        Reading(
            "other_prefills",
            tuple(item[0] for item in found),
            f"other requests' prefills at c={c}: TPOT p90 {1000 * p90:.1f} ms is {p90 / p50:.1f} times p50 "
            f"({1000 * p50:.1f} ms)",
            "a smaller prefill batch (llama-server --ubatch-size, vLLM --max-num-batched-tokens), or prefix caching",
            {"c": c, "tpot_p50_s": p50, "tpot_p90_s": p90, "ratio": p90 / p50},
        )
    ]


def read_saturation(curve: Curve) -> list[Reading]:
    """More requests give less: throughput falls while as many are in flight, or the engine preempts."""
    readings = []
    for level, following in zip(curve.usable, curve.usable[1:]):
        rate, next_rate = level.throughput, following.throughput
        held = (following.figure("mean_in_flight") or 0.0) >= (level.figure("mean_in_flight") or 0.0)
        if rate and next_rate is not None and next_rate < FALL * rate and held and apart(level, following):
            readings.append(
                Reading(
                    "past_saturation",
                    (following.c,),
                    f"past saturation: throughput falls from {rate:.1f} at c={level.c} to {next_rate:.1f} at "
                    f"c={following.c} while in flight holds",
                    f"admit at most {level.c} at once",
                    {"c": following.c, "from": rate, "to": next_rate},
                )
            )
    preempted = [(level.c, count) for level in curve.usable if (count := level.figure("server.preemptions"))]
    if preempted:
        c, count = preempted[-1]
        readings.append(
            Reading(
                "preemptions",
                tuple(c for c, _ in preempted),
                f"past saturation: the engine preempted {count:g} times at c={c}: its cache was full",
                "a larger cache, a shorter context, or fewer sequences at once",
                {"c": c, "preemptions": count},
            )
        )
    return readings


def apart(one: Level, other: Level) -> bool:
    """Whether two levels' throughputs differ beyond their repeats' ranges (always, where there is one run each)."""
    a, b = one.spread("output_tokens_per_s"), other.spread("output_tokens_per_s")
    return a is None or b is None or a[1] < b[0] or b[1] < a[0]


def read_client(curve: Curve) -> list[Reading]:
    """The client, or a level too short to stay full, is what the figures show."""
    readings = []
    bound = [(level, text) for level in curve.usable if (text := client_evidence(level))]
    if bound:
        level, text = bound[-1]
        in_flight, cpu = level.figure("mean_in_flight"), level.figure("client.cpu_fraction")
        readings.append(
            Reading(
                "client",
                tuple(item[0].c for item in bound),
                f"the client at c={level.c}: {text}",
                "run load_test.py on another machine, through an SSH tunnel; the server stays on loopback",
                {
                    "c": level.c,
                    "in_flight": in_flight,
                    "cpu_fraction": cpu,
                    "loop_lag_p99_s": level.figure("client.loop_lag_s.p99"),
                },
                certain=not text.startswith("possibly"),
            )
        )
    drained = [
        (level, in_flight)
        for level in curve.usable
        if (in_flight := level.figure("mean_in_flight")) is not None
        and in_flight < LOW_IN_FLIGHT * level.c
        and not client_evidence(level)
    ]
    if drained:
        level, in_flight = drained[-1]
        readings.append(
            Reading(
                "short_level",
                tuple(item[0].c for item in drained),
                f"a short level drained at c={level.c}: in flight {in_flight:.1f} of {level.c}, and nothing shows "
                "the client as busy",
                "more requests per level (--min-rounds 4)",
                {"c": level.c, "in_flight": in_flight, "requests": level.requests},
            )
        )
    return readings


def read_connecting(curve: Curve) -> list[Reading]:
    """Connections wait to be accepted."""
    slow = []
    for level in curve.usable:
        connect, ttft = level.figure("connect_s.p90"), level.figure("ttft_s.p90")
        if connect is not None and ttft and connect > CONNECT_SHARE * ttft:
            slow.append((level.c, connect, ttft))
    if not slow:
        return []
    c, connect, ttft = slow[-1]
    return [
        Reading(
            "connecting",
            tuple(item[0] for item in slow),
            f"connecting at c={c}: p90 {1000 * connect:.1f} ms beside a TTFT p90 of {1000 * ttft:.1f} ms",
            "a longer accept queue or more HTTP threads on the server (llama-server --threads-http)",
            {"c": c, "connect_p90_s": connect, "ttft_p90_s": ttft},
        )
    ]


def read_early_stops(curve: Curve) -> list[Reading]:
    """Outputs that end before max_tokens make requests shorter, and requests per second higher."""
    early = []
    for level in curve.usable:
        reasons = level.tally("finish_reasons")
        other = {name: count for name, count in reasons.items() if name != "length" and count}
        if other:
            early.append((level.c, sum(other.values()), sum(reasons.values()), other))
    if not early:
        return []
    c, count, total, other = early[-1]
    named = ", ".join(f"{printable(name)} {number}" for name, number in sorted(other.items()))
    return [
        Reading(
            "early_stops",
            tuple(item[0] for item in early),
            f"early stops at c={c}: {count} of {total} responses did not end by length ({named})",
            "compare tokens per second, not requests; for equal outputs --extra-body '{\"ignore_eos\": true}'",
            {"c": c, "count": count, "of": total, "finish_reasons": other},
        )
    ]


def read_cache_luck(curve: Curve) -> list[Reading]:
    """The cached share differs between levels, so they did not do the same work."""
    known = [(level, share) for level in curve.usable if (share := level.cached_share) is not None]
    shares = [share for _, share in known]
    if not shares or max(shares) - min(shares) <= CACHE_POINTS:
        return []
    jumps = tuple(
        following.c for (_, share), (following, next_share) in zip(known, known[1:])
        if abs(next_share - share) > CACHE_POINTS
    )  # fmt: skip
    advice = (
        "a server that keeps a cache per slot fills it slot by slot: warm every slot, or use a pooled cache"
        if curve.settings["prompt_set"] == "shared-prefix"
        else "use prompts that differ from the first token on (prompt set mixed)"
    )
    told = ", ".join(f"{share:.0%} at c={level.c}" for level, share in known)
    evidence = f"cache luck: cached share {told}: {100 * (max(shares) - min(shares)):.0f} points apart"
    if jumps:
        evidence += f", more than 10 from its neighbour at c={c_list(jumps)}"
    values = {"shares": {str(level.c): share for level, share in known}, "points": 100 * (max(shares) - min(shares))}
    changed = jumps or tuple(level.c for level, share in known if share in (min(shares), max(shares)))
    return [Reading("cache_luck", changed, evidence, advice, values)]


def read_certainty(curve: Curve) -> list[Reading]:
    """What the number of runs allows to be said."""
    spreads = [(level, spread) for level in curve.usable if (spread := level.spread("output_tokens_per_s"))]
    if not spreads:
        if not curve.usable:
            return []
        return [
            Reading(
                "single_run",
                tuple(level.c for level in curve.usable),
                "one run per level: it cannot tell a difference of a few per cent from noise, nor one dip from a knee",
                "--repeat 3 runs the ladder three times, interleaved",
                {"repeats": 1},
            )
        ]
    level, (low, high) = max(spreads, key=lambda item: (item[1][1] - item[1][0]) / (item[0].throughput or 1.0))
    share = (high - low) / (level.throughput or 1.0)
    return [
        Reading(
            "repeats",
            tuple(item[0].c for item in spreads),
            f"{curve.repeats} runs: throughput varies most at c={level.c}, {low:.1f} to {high:.1f} "
            f"({share:.1%} of the median)",
            "call nothing inside these ranges a difference",
            {"repeats": curve.repeats, "c": level.c, "low": low, "high": high},
        )
    ]


READERS: tuple[Callable[[Curve], list[Reading]], ...] = (
    read_bandwidth,
    read_compute,
    read_queueing,
    read_split,
    read_prefills,
    read_saturation,
    read_client,
    read_connecting,
    read_early_stops,
    read_cache_luck,
    read_certainty,
)


def read_curve(curve: Curve) -> list[Reading]:
    """Every shape that a curve shows."""
    return [reading for reader in READERS for reading in reader(curve)]


# -------------------------------------------------------------------------------------------------------- rendering


class Column(NamedTuple):
    """One column of a level table: heading, dotted path or name, decimals."""

    heading: str
    path: str
    decimals: int


TABLE = (
    Column("out tok/s", "output_tokens_per_s", 1),
    Column("scaling", "scaling", 2),
    Column("req/s", "requests_per_s", 3),
    Column("goodput", "goodput_requests_per_s", 3),
    Column("TTFT p50", "ttft_s.p50", 3),
    Column("TTFT p90", "ttft_s.p90", 3),
    Column("TPOT p50", "tpot_s.p50", 4),
    Column("TPOT p90", "tpot_s.p90", 4),
    Column("in flight", "mean_in_flight", 1),
    Column("cached", "cached_tokens_mean", 1),
)
COMPARED_FIGURES = (
    Column("goodput", "goodput_requests_per_s", 3),
    Column("TTFT p50", "ttft_s.p50", 3),
    Column("TTFT p90", "ttft_s.p90", 3),
    Column("TTFT p95", "ttft_s.p95", 3),
    Column("TPOT p50", "tpot_s.p50", 4),
    Column("cached", "cached_tokens_mean", 1),
)
LEVEL_FIGURES = (
    "wall_s",
    "output_tokens_per_s",
    "requests_per_s",
    "goodput_requests_per_s",
    "mean_in_flight",
    "prompt_tokens_mean",
    "cached_tokens_mean",
    "steady_output_tokens_per_s",
    "steady_window_s",
)
LEVEL_COUNTS = ("requests", "completed", "failed", "output_tokens", "within_slo", "coalesced")
RANGED = ("output_tokens_per_s", "goodput_requests_per_s", "ttft_s.p50", "ttft_s.p90", "tpot_s.p50", "tpot_s.p90")
BAR_WIDTH = 40
COLOURS = {"good": "\033[32m", "bad": "\033[31m", "plain": "\033[36m", "off": "\033[0m"}


def shown(value: float | None, decimals: int) -> str:
    """
    >>> shown(46.5116, 1), shown(None, 1)
    ('46.5', '-')
    """
    return "-" if value is None else f"{value:.{decimals}f}"


def cell(curve: Curve, level: Level, column: Column) -> str:
    value = curve.scaling(level) if column.path == "scaling" else level.figure(column.path)
    return shown(value, column.decimals)


def ok_cell(level: Level) -> str:
    """Completed of asked, one word, as 40/40; a level that was cut short is marked."""
    asked = "?" if level.requests is None else level.requests
    return f"{level.completed}/{asked}{'(interrupted)' if level.interrupted else ''}"


def table_rows(curve: Curve) -> list[list[str]]:
    """The level table, heading first; every row begins with its c."""
    rows = [["c", "ok", *(column.heading for column in TABLE)]]
    for level in curve.levels:
        rows.append([str(level.c), ok_cell(level), *(cell(curve, level, column) for column in TABLE)])
    return rows


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


def heading_lines(curve: Curve) -> list[str]:
    """What was measured, in two lines."""
    text = {name: setting_text(curve.settings[name]) for name in IDENTITY}
    what = f"{text['engine']} {text['engine_version']}, model {text['model']}, prompt set {text['prompt_set']}"
    where = (
        f"host {text['host']}, quant {text['quant']}, context {text['context_length']}, slots {text['server_slots']}"
    )
    objective = f"objective TTFT {text['slo_ttft_s']} s, TPOT {text['slo_tpot_s']} s"
    return [f"{as_word(curve.label)}: {what}, max tokens {text['max_tokens']}", f"{where}, {objective}"]


def range_lines(curve: Curve) -> list[str]:
    """For levels that were run several times: the range behind each median."""
    lines = []
    for level in curve.levels:
        parts = []
        for column in TABLE:
            spread = level.spread(column.path) if column.path in RANGED else None
            if spread:
                low, high = (shown(value, column.decimals) for value in spread)
                parts.append(f"{column.heading} {low} to {high}")
        if parts:
            lines.append(f"range at c={level.c} over {len(level.records)} runs: {', '.join(parts)}")
    return lines


def bar_lines(curve: Curve, colour: bool) -> list[str]:
    """Bars for throughput and TPOT p90, green inside the objective and red outside when in colour."""
    lines = []
    for title, path, decimals in (("out tok/s", "output_tokens_per_s", 1), ("TPOT p90 s", "tpot_s.p90", 4)):
        values = [(level, level.figure(path)) for level in curve.levels]
        top = max((value for _, value in values if value), default=None)
        if top is None:
            continue
        lines.append(title)
        for level, value in values:
            bar = "#" * max(round(BAR_WIDTH * value / top), 1 if value else 0) if value is not None else ""
            paint = "plain"
            if path == "tpot_s.p90" and curve.slo_tpot_s is not None and value is not None:
                paint = "good" if value <= curve.slo_tpot_s else "bad"
            drawn = f"{COLOURS[paint]}{bar}{COLOURS['off']}" if colour and bar else bar
            lines.append(f"  c={level.c:<5}{drawn}{' ' if bar else ''}{shown(value, decimals)}")
    return lines


def fit_lines(curve: Curve) -> list[str]:
    """The TPOT fit, what it implies, and the predicted beside the measured throughput."""
    fit = curve.fit
    if fit is None:
        slots = f" at or below {curve.slots} slots" if curve.slots else ""
        return [f"TPOT fit: not enough points (it needs two different levels{slots} with a TPOT)"]
    details = [f"levels {c_list(fit.levels)}"]
    details.append("R2 not defined" if fit.r2 is None else f"R2 {fit.r2:.3f}")
    if fit.interval_ms is None:
        details.append("two levels: a line through both, no interval")
    else:
        details.append(f"95 % interval for b {fit.interval_ms[0]:.3f} to {fit.interval_ms[1]:.3f}")
    lines = [f"TPOT p50 ~ {fit.a_ms:.2f} ms + {fit.b_ms:.3f} ms x c  ({', '.join(details)})"]
    at = fit.c_at(curve.slo_tpot_s)
    if fit.a_ms < 0:
        lines.append(
            "a is below 0, so no step time: the line does not hold near c = 0; repeat with load_test.py --repeat 3"
        )
    if fit.ceiling is None:
        lines.append("ceiling: none implied, b is not above 0 over these levels")
    else:
        unsure = fit.interval_ms is not None and fit.interval_ms[0] <= 0
        lines.append(f"ceiling {fit.ceiling:.1f} tok/s (1/b{'; the interval for b holds 0' if unsure else ''})")
        if at is not None and at <= 0:
            lines.append(f"TPOT objective {1000 * float(curve.slo_tpot_s or 0):g} ms: below a, met at no c")
        elif at is not None:
            lines.append(f"TPOT objective {1000 * float(curve.slo_tpot_s or 0):g} ms met at c = {at:.1f}")
    for level in curve.usable:
        beyond = " (above the slots: not in the fit)" if curve.slots is not None and level.c > curve.slots else ""
        lines.append(
            f"predicted at c={level.c}: {shown(fit.throughput(level.c), 1)} tok/s, "
            f"measured {shown(level.throughput, 1)}{beyond}"
        )
    return lines


def derived_lines(curve: Curve) -> list[str]:
    """Knee, fit and operating point in the wording that people grep for."""
    lines = []
    if len(curve.usable) < 2:
        lines.append("knee: not enough points (it needs two levels with a completed request)")
    elif curve.knee is None:
        lines.append(f"knee: not reached up to c={curve.usable[-1].c}")
    else:
        lines.append(f"knee: between c={curve.knee[0]} and c={curve.knee[1]}{knee_agreement(curve)}")
    lines += fit_lines(curve)
    if curve.operating_point is not None:
        lines.append(f"operating point: c={curve.operating_point} (highest with no failure, p90s inside objective)")
    elif curve.slo_ttft_s is None or curve.slo_tpot_s is None:
        lines.append("operating point: none, no objective is recorded")
    else:
        lines.append("operating point: none (no level is without failure and inside the objective)")
    return lines


def knees_by_repeat(curve: Curve) -> dict[int, tuple[int, int] | None]:
    """The knee of each repeat that has every level; empty where there is one run."""
    knees = {}
    if curve.repeats > 1:
        for repeat in sorted({record.repeat for level in curve.usable for record in level.records}):
            own = [
                (level.c, float(rate))
                for level in curve.usable
                for record in level.records
                if record.repeat == repeat and (rate := record.number("output_tokens_per_s")) is not None
            ]
            if len(own) == len(curve.usable):
                knees[repeat] = find_knee(own)
    return knees


def knee_agreement(curve: Curve) -> str:
    """How many of several runs have this knee, as " (2 of 3 runs agree)"; nothing where there is one run."""
    knees = list(knees_by_repeat(curve).values())
    return f" ({knees.count(curve.knee)} of {len(knees)} runs agree)" if knees else ""


def note_lines(book: Notebook, curve: Curve) -> list[str]:
    """What else is known of the levels: tails, output lengths, the server's side, recovery, versions."""
    lines = []
    tails = [f"c={level.c} {value:.3f}" for level in curve.levels if (value := level.figure("ttft_s.p95")) is not None]
    if tails:
        lines.append(f"TTFT p95: {', '.join(tails)}")
    for level in curve.levels:
        low, high = (level.figure(f"output_tokens_per_request.{key}") for key in ("min", "max"))
        if low is not None and high is not None and low != high:
            p50, p90 = (level.figure(f"output_tokens_per_request.{key}") for key in ("p50", "p90"))
            lines.append(
                f"output tokens per request at c={level.c}: {low:.0f} to {high:.0f}, "
                f"p50 {shown(p50, 0)}, p90 {shown(p90, 0)}"
            )
        if level.failed:
            lines.append(f"c={level.c}: {level.failed} failed{first_error(level)}")
        lines += server_lines(level)
    lines += recovery_lines(book, curve)
    return lines + list(curve.remarks)


def server_lines(level: Level) -> list[str]:
    """What --sample saw of the server at one level, in one line."""
    names = (
        ("peak_busy_slots", "busy slots"),
        ("peak_deferred", "deferred"),
        ("busy_slots_per_decode", "per decode"),
        ("peak_running", "running"),
        ("peak_waiting", "waiting"),
        ("preemptions", "preemptions"),
        ("peak_cache_usage", "cache use"),
    )
    seen = [f"{words} {value:g}" for key, words in names if (value := level.figure(f"server.{key}")) is not None]
    return [f"server at c={level.c}: {', '.join(seen)}"] if seen else []


def recovery_lines(book: Notebook, curve: Curve) -> list[str]:
    """Whether the server was idle and answered again after this curve's run."""
    runs = {record.run for level in curve.levels for record in level.records}
    lines = []
    for record in book.recoveries:
        if record.run in runs:
            after = record.number("after_s")
            states = [f"{'' if record.data.get(key) is True else 'not '}{key}" for key in ("idle", "answered")]
            lines.append(f"recovery: {', '.join(states)}{f' after {after:.1f} s' if after is not None else ''}")
    return lines


def reading_lines(readings: Sequence[Reading]) -> list[str]:
    """One line per shape: the evidence (at its highest level), where else it shows, and one thing to try."""
    lines = []
    for reading in readings:
        also = [c for c in reading.levels if f"c={c}" not in reading.evidence]
        named = f" (also at c={c_list(also)})" if also and "c" in reading.values else ""
        lines.append(f"{reading.evidence}{named}. Try: {reading.advice}")
    return lines


def label_text(book: Notebook, curve: Curve, colour: bool) -> str:
    """The whole view of one label for a terminal."""
    lines = [*heading_lines(curve), "", *align(table_rows(curve)), "TTFT and TPOT in seconds"]
    lines += [*range_lines(curve), "", *bar_lines(curve, colour), "", *derived_lines(curve)]
    notes, readings = note_lines(book, curve), reading_lines(read_curve(curve))
    if notes:
        lines += ["", "notes", *(f"  {line}" for line in notes)]
    if readings:
        lines += ["", "reading", *(f"  {line}" for line in readings)]
    return "\n".join(lines) + "\n"


def label_markdown(book: Notebook, curve: Curve) -> str:
    """The same as Markdown, to paste into the notebook's prose (a pasted table is never a record)."""
    escaped = [markdown_text(line) for line in heading_lines(curve)]
    lines = [
        f"### {escaped[0]}",
        "",
        escaped[1],
        "",
        *markdown_table(table_rows(curve)),
        "",
        "TTFT and TPOT in seconds.",
        "",
    ]
    facts = [*range_lines(curve), *derived_lines(curve), *note_lines(book, curve), *reading_lines(read_curve(curve))]
    return "\n".join(lines + [f"- {markdown_text(line)}" for line in facts]) + "\n"


def markdown_text(text: str) -> str:
    r"""
    >>> markdown_text("a*b <c>")
    'a\\*b \\<c>'
    """
    return re.sub(r"([\\`*<|])", r"\\\1", text)


def newest_date(records: Iterable[Record]) -> str | None:
    """`recorded_at` of the newest line, whether it counts or not."""
    dated = [(record.instant, str(record.data["recorded_at"])) for record in records if record.instant is not None]
    return max(dated)[1] if dated else None


def list_lines(book: Notebook) -> list[str]:
    """One line per label, in file order."""
    rows = []
    for label, records in book.by_label().items():
        curve = build_curve(label, records)
        whole = [level.c for level in curve.levels if not level.interrupted]
        cut = [level.c for level in curve.levels if level.interrupted]
        rows.append(
            [
                as_word(curve.label),
                setting_text(curve.settings["engine"]),
                setting_text(curve.settings["prompt_set"]),
                f"levels {c_list(whole) or 'none'}{f' interrupted {c_list(cut)}' if cut else ''}",
                f"last {(newest_date(records) or 'unknown')[:10]}",
            ]
        )
    widths = [max((len(row[i]) for row in rows), default=0) for i in range(4)]
    return [
        f"==> {len(rows)} label(s) in {printable(book.path)}",
        *("  ".join([*(text.ljust(width) for text, width in zip(row, widths)), row[-1]]) for row in rows),
    ]


class Comparison(NamedTuple):
    """One concurrency level of two labels. `noise` says, per figure, what the repeats allow to be said."""

    c: int
    a: Level
    b: Level
    ratio: float | None
    noise: Mapping[str, str]


NOISE_FIGURES = ("output_tokens_per_s", "ttft_s.p90", "tpot_s.p50")
WITHIN, BEYOND, UNTOLD = "no difference beyond noise", "differs beyond noise", "one run each: noise unknown"


def compare(a: Curve, b: Curve) -> list[Comparison]:
    """The levels that both labels have with a completed request. Raises ResultError where there is none."""
    ours = {level.c: level for level in a.usable}
    theirs = {level.c: level for level in b.usable}
    rows = []
    for c in sorted(ours.keys() & theirs.keys()):
        rate_a, rate_b = ours[c].throughput, theirs[c].throughput
        noise = {path: noise_verdict(ours[c].values(path), theirs[c].values(path)) for path in NOISE_FIGURES}
        rows.append(
            Comparison(c, ours[c], theirs[c], rate_b / rate_a if rate_a and rate_b is not None else None, noise)
        )
    if not rows:
        raise ResultError(
            f"{as_word(a.label)} (c={c_list(ours) or 'none'}) and {as_word(b.label)} "
            f"(c={c_list(theirs) or 'none'}) have no level with a completed request in common"
        )
    return rows


def noise_verdict(a: Sequence[float], b: Sequence[float]) -> str:
    """Whether two figures differ by more than their repeats' ranges. Ranges that overlap are no difference; to call
    one a difference, both sides need repeats.

    >>> noise_verdict([400, 404], [402, 410]), noise_verdict([400, 404], [420, 422]), noise_verdict([400], [404])
    ('no difference beyond noise', 'differs beyond noise', 'one run each: noise unknown')
    """
    if not a or not b or max(len(a), len(b)) < 2:
        return UNTOLD
    if min(a) <= max(b) and min(b) <= max(a):
        return WITHIN
    return BEYOND if min(len(a), len(b)) > 1 else "outside the range of one, but the other ran once"


def compare_rows(rows: Sequence[Comparison]) -> list[list[str]]:
    """The comparison as a table, heading first; A / B in one cell where both are shown."""
    table = [["c", "A tok/s", "B tok/s", "B/A", *(f"{column.heading} A / B" for column in COMPARED_FIGURES)]]
    for row in rows:
        pairs = [
            f"{shown(row.a.figure(column.path), column.decimals)} / {shown(row.b.figure(column.path), column.decimals)}"
            for column in COMPARED_FIGURES
        ]
        table.append([str(row.c), shown(row.a.throughput, 1), shown(row.b.throughput, 1), shown(row.ratio, 2), *pairs])
    return table


def differing_settings(a: Curve, b: Curve) -> list[tuple[str, Any, Any]]:
    """(name, A's, B's) of each setting that the two labels do not share."""
    return [
        (name, a.settings[name], b.settings[name])
        for name in COMPARED_SETTINGS + ALSO_COMPARED
        if setting_text(a.settings[name]) != setting_text(b.settings[name])
    ]


def compare_notes(a: Curve, b: Curve, rows: Sequence[Comparison]) -> list[str]:
    """Settings that differ, levels that only one has, and what the repeats allow to be said."""
    notes = [
        f"{name} differs: {setting_text(one)} and {setting_text(other)}"
        for name, one, other in differing_settings(a, b)
    ]
    for curve in (a, b):
        only = [level.c for level in curve.levels if level.c not in {row.c for row in rows}]
        if only:
            notes.append(f"not compared: c={c_list(only)} of {as_word(curve.label)} (not usable in both)")
    titles = dict(zip(NOISE_FIGURES, ("throughput", "TTFT p90", "TPOT p50")))
    if all(verdict == UNTOLD for row in rows for verdict in row.noise.values()):
        notes.append(
            "one run each: what is noise cannot be told; runs of one setup often differ by 5 % (--repeat 3 measures it)"
        )
    else:
        for row in rows:
            said = ", ".join(f"{titles[path]} {verdict}" for path, verdict in row.noise.items())
            notes.append(f"at c={row.c}: {said}")
    return notes + list(dict.fromkeys(a.remarks + b.remarks))


def compare_text(a: Curve, b: Curve, markdown: bool) -> str:
    """Two labels side by side."""
    rows = compare(a, b)
    heads = [f"A = {heading_lines(a)[0]}", f"B = {heading_lines(b)[0]}"]
    notes = compare_notes(a, b, rows)
    if markdown:
        table = [*(f"- {markdown_text(line)}" for line in heads), "", *markdown_table(compare_rows(rows)), ""]
        return "\n".join(table + [f"- {markdown_text(note)}" for note in notes]) + "\n"
    return "\n".join([*heads, "", *align(compare_rows(rows)), "TTFT and TPOT in seconds", *notes]) + "\n"


def finding_lines(findings: Sequence[Finding]) -> list[str]:
    """One line per rule, then the count."""
    lines = [f"{finding.status}  {finding.rule}: {printable(finding.message)}" for finding in findings]
    counts = tally_of(findings)
    return [*lines, f"{counts[PASS]} pass, {counts[WARN]} warn, {counts[FAIL]} fail"]


def level_json(curve: Curve, level: Level) -> dict[str, Any]:
    """One level for curve_json."""
    out: dict[str, Any] = {"c": level.c, "repeats": len(level.records), "interrupted": level.interrupted}
    out.update({name: level.total(name) for name in LEVEL_COUNTS})
    out.update({name: level.figure(name) for name in LEVEL_FIGURES})
    for name in STATISTIC_FIELDS:
        block = {key: level.figure(f"{name}.{key}") for key in STATISTICS}
        out[name] = block if any(value is not None for value in block.values()) else None
    out["cached_share"] = level.cached_share
    out["finish_reasons"] = level.tally("finish_reasons")
    out["errors"] = level.tally("errors")
    for name in ("token_counts", "server", "client", "ttft_split_s", "first_error"):
        out[name] = level.records[-1].data.get(name)
    out["scaling"] = curve.scaling(level)
    out["predicted_output_tokens_per_s"] = curve.fit.throughput(level.c) if curve.fit else None
    out["in_fit"] = curve.fit is not None and level.usable and level.c in curve.fit.levels
    out["meets_objective"] = curve.meets_objective(level)
    out["ranges"] = {path: list(spread) for path in RANGED if (spread := level.spread(path))}
    out["run_ids"] = list(dict.fromkeys(record.run for record in level.records))
    out["lines"] = [record.line for record in level.records]
    out["recorded_at"] = level.records[-1].data.get("recorded_at")
    out["schema"] = max(record.schema for record in level.records)
    return out


def fit_json(curve: Curve) -> dict[str, Any] | None:
    """The TPOT fit for curve_json; None where there are too few points."""
    fit = curve.fit
    if fit is None:
        return None
    return {
        "a_ms": fit.a_ms,
        "b_ms": fit.b_ms,
        "r2": fit.r2,
        "b_interval_ms": list(fit.interval_ms) if fit.interval_ms else None,
        "levels": list(fit.levels),
        "points": fit.points,
        "ceiling_tokens_per_s": fit.ceiling,
        "c_at_objective": fit.c_at(curve.slo_tpot_s),
    }


def curve_json(book: Notebook, curve: Curve) -> dict[str, Any]:
    """Everything that a picture or another program needs of one label. This is what --label L --json prints, and
    what stands under "a" and "b" of --compare --json.

    kind "curve" · tool_version · labbook (path) · label ·
    settings {engine, engine_version, model, prompt_set, host, quant, context_length, server_slots, max_tokens,
    temperature, slo_ttft_s, slo_tpot_s, base_url, arrival, seed, extra_body}: null where the notebook does not say ·
    slo {ttft_s, tpot_s} ·
    levels: sorted by c, each {c, repeats, interrupted; requests, completed, failed, output_tokens, within_slo,
    coalesced: summed over the repeats; wall_s, output_tokens_per_s, requests_per_s, goodput_requests_per_s,
    mean_in_flight, prompt_tokens_mean, cached_tokens_mean, steady_output_tokens_per_s, steady_window_s: medians over
    the repeats; ttft_s, tpot_s, e2e_s, connect_s, chunk_gap_s, output_tokens_per_request: {min, p50, p90, p95, p99,
    max, mean} of medians, or null; cached_share (0 to 1); finish_reasons, errors {name: count}; token_counts, server,
    client, ttft_split_s, first_error: as the last repeat recorded them; scaling; predicted_output_tokens_per_s, c/(a
    + b c); in_fit; meets_objective; ranges {path: [lowest, highest]} where repeated; run_ids; lines (in the notebook);
    recorded_at; schema} ·
    fit {a_ms, b_ms, r2, b_interval_ms [low, high] or null, levels, points, ceiling_tokens_per_s or null,
    c_at_objective or null} or null ·
    knee {between [c, c] or null, per_repeat [[c, c] or null, ...]} · operating_point (c or null) ·
    peak {c, output_tokens_per_s} or null · repeats (the most runs of any level) ·
    readings [{code, levels, evidence, try, values, certain}] · notes [text] ·
    check {findings [{rule, status, message, items}], pass, warn, fail}: of the whole notebook.

    Times are in seconds where a name ends in _s and in milliseconds where it ends in _ms; a figure that is not
    known is null, never 0.
    """
    peak = curve.peak
    return {
        "kind": "curve",
        "tool_version": TOOL_VERSION,
        "labbook": book.path,
        "label": curve.label,
        "settings": dict(curve.settings),
        "slo": {"ttft_s": curve.slo_ttft_s, "tpot_s": curve.slo_tpot_s},
        "levels": [level_json(curve, level) for level in curve.levels],
        "fit": fit_json(curve),
        "knee": {
            "between": list(curve.knee) if curve.knee else None,
            "per_repeat": [list(knee) if knee else None for knee in knees_by_repeat(curve).values()],
        },
        "operating_point": curve.operating_point,
        "peak": {"c": peak.c, "output_tokens_per_s": peak.throughput} if peak else None,
        "repeats": curve.repeats,
        "readings": [reading_json(reading) for reading in read_curve(curve)],
        "notes": note_lines(book, curve),
        "check": check_json(check(book)),
    }


def reading_json(reading: Reading) -> dict[str, Any]:
    return {
        "code": reading.code,
        "levels": list(reading.levels),
        "evidence": reading.evidence,
        "try": reading.advice,
        "values": dict(reading.values),
        "certain": reading.certain,
    }


def check_json(findings: Sequence[Finding]) -> dict[str, Any]:
    """Findings and their counts."""
    return {
        "findings": [
            {"rule": item.rule, "status": item.status, "message": item.message, "items": list(item.items)}
            for item in findings
        ],
        **{status.lower(): count for status, count in tally_of(findings).items()},
    }


def compare_json(book: Notebook, a: Curve, b: Curve) -> dict[str, Any]:
    """What --compare A B --json prints: kind "compare" · a, b: see curve_json · rows [{c, a and b {figures of the
    comparison by dotted path}, ratio (B/A of throughput), noise {path: sentence}}] · differing_settings [{name, a, b}]
    · notes [text]."""
    rows = compare(a, b)
    paths = ("output_tokens_per_s", *(column.path for column in COMPARED_FIGURES))
    return {
        "kind": "compare",
        "tool_version": TOOL_VERSION,
        "labbook": book.path,
        "a": curve_json(book, a),
        "b": curve_json(book, b),
        "rows": [
            {
                "c": row.c,
                "a": {path: row.a.figure(path) for path in paths},
                "b": {path: row.b.figure(path) for path in paths},
                "ratio": row.ratio,
                "noise": dict(row.noise),
            }
            for row in rows
        ],
        "differing_settings": [{"name": name, "a": one, "b": other} for name, one, other in differing_settings(a, b)],
        "notes": compare_notes(a, b, rows),
    }


def list_json(book: Notebook) -> dict[str, Any]:
    """What --list --json prints: kind "list" · labels [{label, word (as --list shows it), levels, interrupted,
    repeats, settings, last}]."""
    labels = []
    for label, records in book.by_label().items():
        curve = build_curve(label, records)
        labels.append(
            {
                "label": curve.label,
                "word": as_word(curve.label),
                "levels": [level.c for level in curve.levels if not level.interrupted],
                "interrupted": [level.c for level in curve.levels if level.interrupted],
                "repeats": curve.repeats,
                "settings": dict(curve.settings),
                "last": newest_date(records),
            }
        )
    return {"kind": "list", "tool_version": TOOL_VERSION, "labbook": book.path, "labels": labels}


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
    flat = [flatten(row) for row in rows]
    out = io.StringIO()
    writer = csv.DictWriter(out, list(dict.fromkeys(key for row in flat for key in row)), lineterminator="\n")
    writer.writeheader()
    writer.writerows(flat)
    return out.getvalue()


def csv_level_rows(curve: Curve) -> list[dict[str, Any]]:
    """One row per level: the label and every figure. Blocks without a figure keep their columns, empty."""
    rows = []
    for level in curve.levels:
        row = {"label": curve.label, **level_json(curve, level)}
        for name in STATISTIC_FIELDS:
            row[name] = row[name] or dict.fromkeys(STATISTICS)
        for name in ("finish_reasons", "errors", "token_counts", "server", "client", "ttft_split_s", "ranges"):
            row[name] = json.dumps(row[name]) if row[name] else None
        rows.append(row)
    return rows


def to_json(value: Any) -> str:
    """Strict JSON, indented; a quotient that ran out of a float's range is null."""
    return json.dumps(finite(value), indent=2, allow_nan=False) + "\n"


def finite(value: Any) -> Any:
    """
    >>> finite({"a": [1.5, float("inf")]})
    {'a': [1.5, None]}
    """
    if isinstance(value, dict):
        return {key: finite(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


# ---------------------------------------------------------------------- writing the notebook, and other tools' files


def summary_record(curve: Curve, now: datetime) -> dict[str, Any]:
    """The curve-summary line that --record appends."""
    peak, fit = curve.peak, curve.fit
    record: dict[str, Any] = {name: curve.settings[name] for name in IDENTITY if name not in ("seed", "extra_body")}
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
            "peak_output_tokens_per_s": round(peak.throughput, 2) if peak and peak.throughput is not None else None,
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


STREAM_FOLDERS = ("/dev", "/dev/fd", "/proc/self/fd")  # /dev/null, /dev/stdout and the shell's >(command)


def write_file(path: str, text: str) -> None:
    """Write a file, whole or not at all: a full disk leaves what was there before. Raises UserError, also for a folder
    and for a pipe, whose opening waits for a reader."""
    data = text.encode("utf-8", "backslashreplace")
    try:
        if os.path.dirname(path) in STREAM_FOLDERS:
            with open(path, "wb") as file:
                file.write(data)
            return
        mode = os.stat(path).st_mode if os.path.exists(path) else None
        if (mode is not None and not stat.S_ISREG(mode)) or not os.path.basename(path):
            raise UserError(f"cannot write {path}: it is a folder, a pipe or a device, not a file; name another file")
        if mode is not None and not os.access(path, os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        replace_file(os.path.realpath(path), data, mode)
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror or error}") from None


def replace_file(path: str, data: bytes, mode: int | None) -> None:
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


VLLM_METRICS = (("ttft", "ttft_s"), ("tpot", "tpot_s"), ("itl", "chunk_gap_s"), ("e2el", "e2e_s"))
VLLM_ARRAYS = ("ttfts", "itls", "output_lens", "errors")  # there with --save-detailed
IMPORT_SETTINGS = (
    "engine",
    "engine_version",
    "host",
    "quant",
    "prompt_set",
    "model",
    "context_length",
    "server_slots",
    "max_tokens",
    "slo_ttft_s",
    "slo_tpot_s",
)
NUMBER_SETTINGS = ("context_length", "server_slots", "max_tokens", "slo_ttft_s", "slo_tpot_s")


def to_vllm_bench(level: Level) -> dict[str, Any]:
    """A level as the JSON that `vllm bench serve --save-result` writes (vllm/benchmarks/serve.py, 0.28).

    Of a repeated level, the run with the median throughput. Same names and units (milliseconds); what a level record
    does not hold (standard deviations, peaks) is null. "median" is our nearest-rank p50, where that tool interpolates.
    The identifying fields stand where that tool's --metadata puts them, so that --import finds them again.
    """
    runs = sorted(level.records, key=lambda record: record.number("output_tokens_per_s") or 0.0)
    record = runs[(len(runs) - 1) // 2]
    prompt, completed, tokens = (
        record.number("prompt_tokens_mean"),
        record.count("completed"),
        record.count("output_tokens"),
    )
    total_input = round(prompt * completed) if prompt is not None and completed is not None else None
    wall = record.number("wall_s")
    both = (total_input + tokens) / wall if total_input is not None and tokens is not None and wall else None
    out: dict[str, Any] = {
        "date": local_date(record.instant),
        "endpoint_type": "openai-chat",
        "backend": "openai-chat",
        "label": record.label,
        "model_id": record.data.get("model"),
        "tokenizer_id": None,
        "num_prompts": record.count("requests"),
        **{name: str(value) for name in IMPORT_SETTINGS if (value := record.setting(name)) is not None},
        "request_rate": "inf",
        "burstiness": 1.0,
        "max_concurrency": record.concurrency,
        "duration": wall,
        "completed": completed,
        "failed": record.count("failed"),
        "total_input_tokens": total_input,
        "total_output_tokens": tokens,
        "request_throughput": record.number("requests_per_s"),
        "request_goodput": record.number("goodput_requests_per_s"),
        "output_throughput": record.number("output_tokens_per_s"),
        "total_token_throughput": both,
        "max_output_tokens_per_s": None,
        "max_concurrent_requests": None,
        "rtfx": 0.0,
    }
    for theirs, ours in VLLM_METRICS:
        for key, name in (
            ("mean", "mean"),
            ("p50", "median"),
            (None, "std"),
            *((f"p{p}",) * 2 for p in (50, 90, 95, 99)),
        ):
            value = record.number(f"{ours}.{key}") if key else None
            out[f"{name}_{theirs}_ms"] = None if value is None else 1000.0 * value
    return out


def local_date(instant: float | None) -> str | None:
    """An instant as that tool writes it, in local time; None where it is unknown, or in no year that a date has."""
    try:
        return None if instant is None else datetime.fromtimestamp(instant).strftime("%Y%m%d-%H%M%S")
    except (ValueError, OverflowError, OSError):
        return None


def read_vllm_bench(path: str) -> list[dict[str, Any]]:
    """The results in a file of `vllm bench serve`: one JSON object, or one per line (--append-result)."""
    try:
        with open_file(path) as file:
            text = file.read(MAX_FILE_BYTES).decode("utf-8-sig")
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror or error}") from None
    except UnicodeDecodeError:
        raise UserError(f"{path} is not UTF-8 text") from None
    try:
        lines = [text] if looks_whole(text) else [line for line in text.split("\n") if line.strip()]
        results = [parse_json(line) for line in lines]
    except ValueError as error:
        raise UserError(f"{path}: {json_fault(error)}") from None
    for result in results:
        if not isinstance(result, dict) or not {"duration", "completed", "max_concurrency"} <= result.keys():
            raise UserError(f"{path} is not what vllm bench serve --save-result writes")
    if not results:
        raise UserError(f"{path} is empty")
    return results


def looks_whole(text: str) -> bool:
    """Whether a text is one JSON value."""
    try:
        parse_json(text)
    except ValueError:
        return False
    return True


def from_vllm_bench(result: Mapping[str, Any], label: str | None, settings: Mapping[str, Any]) -> dict[str, Any]:
    """A level record of one result of `vllm bench serve`. Raises ValueError where it holds no level of a curve.

    With --save-detailed the figures come from its requests by our definitions; otherwise they are its own, whose
    percentiles interpolate: then `percentile_method` says so, and what it did not compute is null.
    """
    for path in ("duration", "completed", "max_concurrency", "num_prompts", "total_output_tokens"):
        number = as_number(result.get(path))
        if number is None or number < (1 if path == "max_concurrency" else 0):
            raise ValueError(
                f"{path} is {json.dumps(result.get(path))[:40]}: a curve needs it"
                + (" (vllm bench serve --max-concurrency N)" if path == "max_concurrency" else "")
            )
    source = Record(0, result)
    wall, completed, asked = source.number("duration") or 0.0, source.count("completed"), source.count("num_prompts")
    failed = source.count("failed") if "failed" in result else (asked or 0) - (completed or 0)
    record = vllm_identity(result, label, settings)
    record.update(
        {
            "concurrency": source.count("max_concurrency"),
            "requests": asked,
            "completed": completed,
            "failed": failed,
            "wall_s": round(wall, 6),
            "output_tokens": source.count("total_output_tokens"),
            "output_tokens_per_s": per_second(source.count("total_output_tokens"), wall),
            "requests_per_s": per_second(completed, wall),
            "prompt_tokens_mean": vllm_prompt_mean(source),
            "cached_tokens_mean": None,
            "token_counts": "vllm-bench",
            "mean_in_flight": None,
            "within_slo": None,
            "goodput_requests_per_s": source.number("request_goodput"),
        }
    )
    try:
        record.update(vllm_detailed(result, record, wall) or vllm_summary(source, record, wall))
    except (TypeError, OverflowError) as error:
        raise ValueError(f"its figures are not all numbers of a possible size ({error})") from None
    line = json.dumps(record, sort_keys=True)
    if len(line) >= MAX_LINE_BYTES:
        raise ValueError(f"its line would be {len(line)} bytes; a notebook's are shorter than {MAX_LINE_BYTES}")
    fault = field_fault(parse_json(line))  # what is written must be read again
    if fault:
        raise ValueError(fault)
    return record


def vllm_identity(result: Mapping[str, Any], label: str | None, settings: Mapping[str, Any]) -> dict[str, Any]:
    """What tells a result's level record from others: its settings, its label and its run. `settings` comes first,
    then what the result says. Raises ValueError where a setting is not what its name says."""
    digest = hashlib.sha256(json.dumps(result, sort_keys=True).encode()).hexdigest()[:8]
    date = str(result.get("date"))
    rate = result.get("request_rate")
    record: dict[str, Any] = dict.fromkeys((*IMPORT_SETTINGS, *STATISTIC_FIELDS))
    record.update(dict.fromkeys(("engine", "engine_version", "host", "quant"), "unknown"))
    record.update({"model": result.get("model_id"), "prompt_set": "vllm-bench"})
    record.update({name: setting_value(name, result[name]) for name in IMPORT_SETTINGS if result.get(name) is not None})
    record.update(settings)
    record.update(
        {
            "lab": LAB,
            "schema": KNOWN_SCHEMAS[-1],
            "tool_version": TOOL_VERSION,
            "source": "vllm bench serve",
            "run_id": f"{date}-{digest}",
            "repeat": 0,
            "recorded_at": vllm_date(date),
            "label": label or str(result.get("label") or "vllm-bench"),
            "arrival": "closed-loop" if rate in ("inf", None) else f"request rate {setting_text(rate)}",
            "interrupted": False,
        }
    )
    return record


def setting_value(name: str, value: Any) -> Any:
    """A setting that came as text, as the number it stands for where it is one's. Raises ValueError.

    >>> setting_value("server_slots", "20"), setting_value("slo_tpot_s", "0.1"), setting_value("quant", "8")
    (20, 0.1, '8')
    """
    if name not in NUMBER_SETTINGS:
        return str(value)
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not math.isfinite(number) or number < 0:
        raise ValueError(f"{name} is {value!r}, not a number")
    return int(number) if number.is_integer() and not name.startswith("slo_") else number


def vllm_date(text: str) -> str | None:
    """That tool's local date as ISO 8601, or None."""
    try:
        return datetime.strptime(text, "%Y%m%d-%H%M%S").astimezone().isoformat()
    except (ValueError, OverflowError):
        return None


def per_second(count: int | None, wall: float) -> float | None:
    return round(count / wall, 4) if count is not None and wall > 0 else None


def vllm_prompt_mean(source: Record) -> float | None:
    total, completed = source.count("total_input_tokens"), source.count("completed")
    return round(total / completed, 2) if total is not None and completed else None


def vllm_summary(source: Record, record: Mapping[str, Any], wall: float) -> dict[str, Any]:
    """The figures that the tool itself computed, in seconds; null where it did not."""
    found: dict[str, Any] = {"percentile_method": "linear (vllm bench serve)"}
    if not source.count("completed"):
        return {"within_slo": None}  # it writes 0 for figures of no request
    for theirs, ours in VLLM_METRICS:
        block: dict[str, float | None] = dict.fromkeys(STATISTICS)
        for key in ("p50", "p90", "p95", "p99", "mean"):
            value = source.number(f"{key}_{theirs}_ms")
            block[key] = None if value is None else round(value / 1000.0, 6)
        median = source.number(f"median_{theirs}_ms")
        if block["p50"] is None and median is not None:
            block["p50"] = round(median / 1000.0, 6)
        if any(block.values()):
            found[ours] = block
    goodput, latency = source.number("request_goodput"), source.number("mean_e2el_ms")
    if goodput is not None:
        found["within_slo"] = round(goodput * wall)
    if latency is not None and not record["failed"] and wall > 0:
        found["mean_in_flight"] = round(record["completed"] * latency / 1000.0 / wall, 4)
    return found


def vllm_detailed(result: Mapping[str, Any], record: Mapping[str, Any], wall: float) -> dict[str, Any] | None:
    """The figures by our definitions, from the arrays of --save-detailed; None where they are absent or uneven."""
    arrays = [result.get(name) for name in VLLM_ARRAYS]
    if not all(isinstance(array, list) and len(array) == record["requests"] for array in arrays):
        return None
    good = [(ttft, gaps, tokens) for ttft, gaps, tokens, error in zip(*arrays) if not error and tokens]
    if len(good) != record["completed"]:
        return None
    ttfts = [float(ttft) for ttft, _, _ in good]
    ends = [ttft + math.fsum(gaps) for ttft, (_, gaps, _) in zip(ttfts, good)]
    tokens = sorted(int(count) for _, _, count in good)
    tpots = [(end - ttft) / (count - 1) if count > 1 else None for ttft, end, (_, _, count) in zip(ttfts, ends, good)]
    found: dict[str, Any] = {
        "ttft_s": statistics_of(ttfts),
        "tpot_s": statistics_of([tpot for tpot in tpots if tpot is not None]),
        "e2e_s": statistics_of(ends),
        "chunk_gap_s": statistics_of([gap for _, gaps, _ in good for gap in gaps]),
    }
    if tokens:
        found["output_tokens_per_request"] = {"min": tokens[0], "max": tokens[-1]}
        found["output_tokens_per_request"].update({f"p{p}": tokens[rank(p, len(tokens))] for p in (50, 90)})
    if not record["failed"] and wall > 0:
        found["mean_in_flight"] = round(math.fsum(ends) / wall, 4)
    slo_ttft, slo_tpot = record["slo_ttft_s"], record["slo_tpot_s"]
    if slo_ttft is not None and slo_tpot is not None:
        met = [ttft <= slo_ttft and (tpot is None or tpot <= slo_tpot) for ttft, tpot in zip(ttfts, tpots)]
        found.update({"within_slo": sum(met), "goodput_requests_per_s": per_second(sum(met), wall)})
    return found


def statistics_of(values: Iterable[float]) -> dict[str, float | None]:
    """Nearest-rank percentiles, extremes and mean, to a microsecond; all None without values."""
    ordered = sorted(values)
    if not ordered:
        return dict.fromkeys(STATISTICS)
    found = {f"p{p}": ordered[rank(p, len(ordered))] for p in (50, 90, 95, 99)}
    found.update({"min": ordered[0], "max": ordered[-1], "mean": math.fsum(ordered) / len(ordered)})
    return {key: round(value, 6) for key, value in found.items()}


# ----------------------------------------------------------------------------------------------------- command line


@dataclass(frozen=True)
class Options:
    """The command line, once."""

    labbook: str
    label: str | None
    compare: tuple[str, str] | None
    check: tuple[str, ...] | None  # the notebooks to check
    record: bool
    form: str  # text, markdown, json or csv
    raw: str | None
    export_to: str | None
    level: int | None
    import_from: str | None
    settings: Mapping[str, Any]


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
    what.add_argument("--label", metavar="L", help="one label's curve")
    what.add_argument("--compare", nargs=2, metavar=("A", "B"), help="two labels, level by level")
    what.add_argument(
        "--check",
        nargs="*",
        metavar="FILE",
        help="check the notebook, or each FILE, with a table of verdicts at the end",
    )
    form = parser.add_argument_group("in which form (default: text)").add_mutually_exclusive_group()
    form.add_argument("--markdown", dest="form", action="store_const", const="markdown", help="Markdown, to paste")
    form.add_argument("--json", dest="form", action="store_const", const="json", help="all figures as one JSON value")
    form.add_argument("--csv", dest="form", action="store_const", const="csv", help="the table as CSV")
    also = parser.add_argument_group("also")
    also.add_argument("--record", action="store_true", help="with --label: append a curve-summary line")
    also.add_argument(
        "--raw",
        metavar="FILE",
        help="with --check: recompute the levels from load_test.py's --raw FILE, name differences",
    )
    also.add_argument(
        "--export",
        nargs=2,
        metavar=("vllm-bench", "FILE"),
        help="with --label: write one level (--level C) as vllm bench serve --save-result does; FILE - is stdout",
    )
    also.add_argument("--level", type=int, metavar="C", help="with --export: which level")
    also.add_argument(
        "--import",
        dest="import_",
        nargs=2,
        metavar=("vllm-bench", "FILE"),
        help="append the results of vllm bench serve --save-result in FILE as level records (label: --label or FILE's)",
    )
    also.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help=f"with --import: a setting that FILE does not hold ({', '.join(IMPORT_SETTINGS)})",
    )
    also.add_argument("--version", action="version", version=f"%(prog)s {TOOL_VERSION}")
    return parser


def parse_options(argv: Sequence[str] | None) -> Options:
    """Options, or exit 2 with one line where they do not go together."""
    parser = build_parser()
    args = parser.parse_args(argv)
    refuse_conflicts(parser, args)
    settings = {}
    for pair in args.set:
        name, equals, value = pair.partition("=")
        if not equals or name not in IMPORT_SETTINGS:
            parser.error(f"--set {pair}: expected KEY=VALUE, KEY one of {', '.join(IMPORT_SETTINGS)}")
        try:
            settings[name] = setting_value(name, value)
        except ValueError as error:
            parser.error(f"--set {pair}: {error}")
    return Options(
        labbook=args.labbook,
        label=args.label,
        compare=tuple(args.compare) if args.compare else None,
        check=None if args.check is None else tuple(args.check or [args.labbook]),
        record=args.record,
        form=args.form or "text",
        raw=args.raw,
        export_to=args.export[1] if args.export else None,
        level=args.level,
        import_from=args.import_[1] if args.import_ else None,
        settings=settings,
    )


def refuse_conflicts(parser: Parser, args: argparse.Namespace) -> None:
    """Say which options do not go together, before anything is read."""
    views = [
        f"--{name}" for name in ("list", "compare", "check", "import_") if getattr(args, name) not in (None, False)
    ]
    views = [view.rstrip("_") for view in views]
    if args.label is not None and views != ["--import"]:
        views.insert(0, "--label")
    if len(views) > 1:
        parser.error(f"{' and '.join(views)} do not go together: choose one")
    for option, kind in (("--export", args.export), ("--import", args.import_)):
        if kind and kind[0] != "vllm-bench":
            parser.error(f"{option} {kind[0]}: the only format is vllm-bench")
    needs = (
        ("--record", args.record, args.label is not None and not args.import_, "--label"),
        ("--export", args.export, args.label is not None and not args.import_, "--label"),
        ("--raw", args.raw, args.check is not None, "--check"),
        ("--level", args.level is not None, args.export, "--export"),
        ("--set", args.set, args.import_, "--import"),
        ("--markdown", args.form == "markdown", args.label is not None or args.compare, "--label or --compare"),
    )
    for option, given, met, needed in needs:
        if given and not met:
            parser.error(f"{option} needs {needed}")
    if args.export and (args.form or args.record):
        parser.error("--export writes one file: leave --json, --csv, --markdown and --record out")


def silence(stream: IO[str]) -> None:
    """Give a stream that cannot be written another place to write to, or the interpreter complains when it leaves."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def complain(message: str) -> None:
    """One line on standard error. Where that is closed or full, the exit code alone has to say it."""
    if sys.stderr is None:
        return
    try:
        sys.stderr.write(f"{PROGRAM}: {printable(message)}\n")
        sys.stderr.flush()
    except (OSError, ValueError):
        silence(sys.stderr)


def report(path: str, remarks: Iterable[Remark]) -> None:
    """Say on standard error which lines were not used, or used once."""
    for remark in sorted(remarks):
        complain(f"{path} line {remark.line}: {printable(remark.text)}")


def in_colour() -> bool:
    """Only on a terminal, and never with NO_COLOR."""
    return (
        sys.stdout is not None
        and sys.stdout.isatty()
        and "NO_COLOR" not in os.environ
        and os.environ.get("TERM") != "dumb"
    )


def run_list(options: Options, book: Notebook) -> tuple[str, int]:
    if not book.records:
        complain(f"no level records in {book.path}: run load_test.py first, or name the file with --labbook")
    code = 0 if book.records else 1
    if options.form == "json":
        return to_json(list_json(book)), code
    if options.form == "csv":
        return to_csv(list_json(book)["labels"]), code
    return "\n".join(list_lines(book)) + "\n", code


def run_label(options: Options, book: Notebook) -> tuple[str, int]:
    curve = find_curve(book, str(options.label))
    if options.form == "json":
        text = to_json(curve_json(book, curve))
    elif options.form == "csv":
        text = to_csv(csv_level_rows(curve))
    elif options.form == "markdown":
        text = label_markdown(book, curve)
    else:
        text = label_text(book, curve, in_colour())
    if options.record:
        if not curve.usable:
            raise ResultError(f"{as_word(curve.label)} has no whole level with a completed request: nothing to record")
        append_record(book.path, summary_record(curve, datetime.now()))
        complain(f"appended a curve-summary line to {book.path}")
    return text, 0


def run_compare(options: Options, book: Notebook) -> tuple[str, int]:
    assert options.compare is not None
    a, b = (find_curve(book, name) for name in options.compare)
    if options.form == "json":
        return to_json(compare_json(book, a, b)), 0
    if options.form == "csv":
        document = compare_json(book, a, b)
        return to_csv([{**row, "a_label": a.label, "b_label": b.label} for row in document["rows"]]), 0
    return compare_text(a, b, options.form == "markdown"), 0


def run_export(options: Options, book: Notebook) -> tuple[str, int]:
    curve = find_curve(book, str(options.label))
    levels = {level.c: level for level in curve.usable}
    c = next(iter(levels), None) if options.level is None and len(levels) == 1 else options.level
    if c not in levels:
        held = f"it holds c={c_list(levels) or 'none'}"
        raise (UserError if options.level is None and levels else ResultError)(
            f"--export writes one level of {as_word(curve.label)}: choose it with --level C ({held})"
        )
    text = to_json(to_vllm_bench(levels[c]))
    if options.export_to == "-":
        return text, 0
    if os.path.exists(str(options.export_to)) and os.path.samefile(str(options.export_to), book.path):
        raise UserError(f"--export {options.export_to}: that is the notebook")
    write_file(str(options.export_to), text)
    complain(f"wrote c={c} of {as_word(curve.label)} to {options.export_to}")
    return "", 0


def run_import(options: Options) -> tuple[str, int]:
    """Append a level record per result; with --json, print them as well."""
    records = []
    for number, result in enumerate(read_vllm_bench(str(options.import_from)), 1):
        try:
            records.append(from_vllm_bench(result, options.label, options.settings))
        except ValueError as error:
            raise UserError(f"{options.import_from}, result {number}: {error}") from None
    if os.path.exists(options.labbook):
        read_notebook(options.labbook)  # refuses a file that is no UTF-8 text before anything is appended
    for record in records:
        append_record(options.labbook, record)
        complain(f"appended c={record['concurrency']} of {as_word(record['label'])} to {options.labbook}")
    return "".join(json.dumps(record, sort_keys=True) + "\n" for record in records if options.form == "json"), 0


def run_check(options: Options, paths: Sequence[str]) -> tuple[str, int]:
    """One notebook's findings, or several notebooks' with a table of verdicts. 2 where a file cannot be read, else 1
    where any rule failed."""
    raw = read_raw(options.raw) if options.raw else None
    if len(paths) == 1:
        book = read_notebook(paths[0])
        report(book.path, book.remarks)  # damaged and unknown lines have rules of their own
        findings = check(book, raw)
        code = 1 if tally_of(findings)[FAIL] else 0
        if options.form == "json":
            return to_json(
                {"kind": "check", "tool_version": TOOL_VERSION, "labbook": paths[0], **check_json(findings)}
            ), code
        if options.form == "csv":
            return to_csv(check_json(findings)["findings"]), code
        return "\n".join(finding_lines(findings)) + "\n", code
    return check_many(options, paths, raw)


def check_many(options: Options, paths: Sequence[str], raw: RawFile | None) -> tuple[str, int]:
    """Several notebooks: each one's findings, then a table. As JSON: kind "checks" · files [{labbook, verdict, error;
    findings, pass, warn, fail as for one}]."""
    lines: list[str] = []
    files: list[dict[str, Any]] = []
    for path in paths:
        lines.append(f"==> {printable(path)}")
        try:
            book = read_notebook(path)
            report(book.path, book.remarks)
            findings = check(book, raw)
        except UserError as error:
            files.append({"labbook": path, "verdict": UNREADABLE, "error": str(error), **check_json([])})
            lines += [printable(error), ""]
            continue
        counts = tally_of(findings)
        result = next((status for status in (FAIL, WARN) if counts[status]), PASS)
        files.append({"labbook": path, "verdict": result, "error": None, **check_json(findings)})
        lines += [*finding_lines(findings), ""]
    verdicts = [item["verdict"] for item in files]
    code = 2 if UNREADABLE in verdicts else 1 if FAIL in verdicts else 0
    if options.form == "json":
        return to_json({"kind": "checks", "tool_version": TOOL_VERSION, "files": files}), code
    if options.form == "csv":
        return to_csv([{"labbook": item["labbook"], **found} for item in files for found in item["findings"]]), code
    table = [["verdict", "pass", "warn", "fail", "notebook"]]
    table += [
        [item["verdict"], *(str(item[key]) for key in ("pass", "warn", "fail")), printable(item["labbook"])]
        for item in files
    ]
    return "\n".join(lines + align([row[:4] for row in table], [row[4] for row in table])) + "\n", code


UNREADABLE = "UNREADABLE"


def run(options: Options) -> tuple[str, int]:
    """What to print, and the exit code."""
    if options.check is not None:
        return run_check(options, options.check)
    if options.import_from is not None:
        return run_import(options)
    book = read_notebook(options.labbook)
    report(book.path, [*book.damaged, *book.unknown, *book.remarks])
    if options.export_to is not None:
        return run_export(options, book)
    if options.label is not None:
        return run_label(options, book)
    if options.compare is not None:
        return run_compare(options, book)
    return run_list(options, book)


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
        silence(sys.stdout)
    except OSError as error:
        silence(sys.stdout)
        raise ResultError(f"cannot write the output: {error.strerror or error}") from None


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program; returns the exit code."""
    try:
        text, code = run(parse_options(argv))
        write_out(text)
    except UserError as error:
        complain(str(error))
        return 2
    except ResultError as error:
        complain(str(error))
        return 1
    except KeyboardInterrupt:
        return 130
    return code


if __name__ == "__main__":
    sys.exit(main())
