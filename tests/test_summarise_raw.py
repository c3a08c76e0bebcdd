"""--check --raw: level records against the per-request lines they were made of."""

from __future__ import annotations

import copy
import json
import random
from pathlib import Path
from typing import Any, Callable

import pytest
from honest_levels import Book, Json, Load, any_load, decimals, leaves, level_record, simulate
from hypothesis import given, settings
from hypothesis import strategies as st

import summarise_load as sl

RUN = {"label": "llama-baseline", "run_id": "20261129T100000-0123abcd", "repeat": 0}


def rounded(raw: list[Json]) -> list[Json]:
    """The per-request records as load_test.py rounds them: times to a microsecond, TPOT to a nanosecond."""
    lines = []
    for request in raw:
        line = dict(request)
        for key, value in request.items():
            if isinstance(value, float):
                line[key] = round(value, 9 if key == "tpot_s" else 6)
        lines.append(line)
    return lines


def level_and_lines(load: Load, seed: int) -> tuple[Json, list[Json]]:
    """A level record, and the raw lines of its requests, as one run writes them."""
    lines = rounded(simulate(load, random.Random(seed)))
    record = level_record(load, lines, decimals(6), decimals(4))
    return record, [{**RUN, "concurrency": load.c, **line} for line in lines]


@pytest.fixture
def book(run_program: Any, tmp_path: Path) -> Book:
    return Book(run_program, tmp_path / "labbook.md")


def write_raw(book: Book, lines: list[Json], *more: str) -> Path:
    path = book.path.parent / "raw.jsonl"
    path.write_text("\n".join([*(json.dumps(line, sort_keys=True) for line in lines), *more]) + "\n", encoding="utf-8")
    return path


def differences(record: Json, lines: list[Json]) -> list[str]:
    parsed = [sl.parse_json(json.dumps(line)) for line in lines]
    return sl.raw_differences(sl.Record(1, sl.parse_json(json.dumps(record))), parsed)


def test_honest_levels_are_what_their_requests_give() -> None:
    rng = random.Random(30)
    for turn in range(1000):
        load = any_load(rng)
        lines = rounded(simulate(load, rng))
        record = level_record(load, lines, rng.choice((decimals(6), decimals(3))), decimals(4))
        assert differences(record, lines) == [], (turn, load)


def test_zeros_that_json_leaves_out_hide_no_alteration() -> None:
    record, lines = level_and_lines(Load(c=1, requests=1), 3)
    lines[0]["tpot_s"] = 0.022
    record["tpot_s"] = dict.fromkeys(record["tpot_s"], 0.022)
    assert not [said for said in differences(record, lines) if said.startswith("tpot_s")]
    record["tpot_s"]["p50"] = 0.02222
    assert [said.partition(" ")[0] for said in differences(record, lines)] == ["tpot_s.p50"]


def test_every_altered_figure_is_named() -> None:
    record, lines = level_and_lines(Load(tokens=(100, 128), failing=0.1), 5)
    not_measured = ("context_length", "server_slots", "max_tokens", "temperature", "concurrency", "schema", "repeat",
                    "warmup", "slo_", "client.", "chunk_gap_s.", "steady_")  # fmt: skip
    checked = 0
    for path, value in leaves(record):
        if path.startswith(not_measured) or (path.endswith("_per_s")):
            continue
        changed = copy.deepcopy(record)
        *parents, last = path.split(".")
        target = changed
        for key in parents:
            target = target[key]
        target[last] = value + 1 if isinstance(value, int) else value * 1.01 + 1e-5
        found = differences(changed, lines)
        assert any(path.split(".")[0] in item for item in found), path
        checked += 1
    assert checked > 35


def test_the_check_passes_on_what_a_run_wrote(book: Book) -> None:
    levels = [level_and_lines(Load(c=c), c) for c in (1, 5)]
    raw = write_raw(book, [line for _, lines in levels for line in lines])
    result = book.write([record for record, _ in levels]).run("--check", "--raw", raw)
    assert f"PASS  raw: 2 level records recomputed from {raw}: the same" in result.stdout


@pytest.mark.parametrize(
    ("edit", "named"),
    [
        (lambda record, lines: (record, lines[:-1]), "requests 40, but its requests give 39"),
        (lambda record, lines: ({**record, "within_slo": 39}, lines), "within_slo 39, but its requests give 40"),
        (lambda record, lines: ({**record, "finish_reasons": {"stop": 40}}, lines), "finish_reasons"),
        (lambda record, lines: ({**record, "wall_s": 1.0}, lines), "wall_s 1.0, but its requests give"),
        (
            lambda record, lines: (record, [{**lines[0], "ok": False, "error_class": "http"}, *lines[1:]]),
            "completed 40",
        ),
    ],
)
def test_differences_are_named(
    book: Book, edit: Callable[[Json, list[Json]], tuple[Json, list[Json]]], named: str
) -> None:
    record, lines = edit(*level_and_lines(Load(c=5), 1))
    result = book.write([record]).run("--check", "--raw", write_raw(book, lines))
    row = next(line for line in result.stdout.splitlines() if "  raw: " in line)
    assert result.returncode == 1 and row.startswith("FAIL  raw: line 3, llama-baseline c=5: ") and named in row


def test_levels_that_one_side_lacks_are_a_warning(book: Book) -> None:
    first, lines = level_and_lines(Load(c=1), 1)
    second, others = level_and_lines(Load(c=5), 2)
    result = book.write([first, second]).run("--check", "--raw", write_raw(book, lines))
    assert "WARN  raw: line 4, llama-baseline c=5: no request of its run in" in result.stdout
    result = book.write([first]).run("--check", "--raw", write_raw(book, lines + others))
    assert "WARN  raw: llama-baseline c=5: " in result.stdout and "which the notebook lacks" in result.stdout


def test_damaged_raw_lines_fail(book: Book) -> None:
    record, lines = level_and_lines(Load(c=1), 1)
    result = book.write([record]).run("--check", "--raw", write_raw(book, lines, '{"label": "x"', "[1]", "NaN"))
    row = next(line for line in result.stdout.splitlines() if "  raw: " in line)
    assert row.startswith("FAIL") and all(f"line {number}: " in row for number in (41, 42, 43))


def test_a_raw_file_without_requests_is_refused(book: Book) -> None:
    record, _ = level_and_lines(Load(c=1), 1)
    empty = book.path.parent / "empty.jsonl"
    empty.write_text("\n")
    result = book.write([record]).run("--check", "--raw", empty)
    assert result.returncode == 2 and "holds no per-request record" in result.stderr


def test_a_real_run_agrees_with_its_raw_file(book: Book, sim_engine: Any, run_program: Any) -> None:
    """What load_test.py writes today: the contract between the programs."""
    engine = sim_engine("--a-ms", 4, "--b-ms", 0.2, "--slots", 4, "--fail-every", 7)
    book.path.touch()
    raw = book.path.parent / "raw.jsonl"
    run = run_program(
        "load_test.py", "--base-url", engine.base_url, "--labbook", book.path, "--raw", raw, "--label", "x",
        "--concurrency", "1,6", "--requests", 20, "--max-tokens", 12, "--repeat", 2, "--seed", 3, "--quiet",
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    result = book.run("--check", "--raw", raw)
    assert f"PASS  raw: 4 level records recomputed from {raw}: the same" in result.stdout, result.stdout
    assert "PASS  consistent: 4 records without contradiction" in result.stdout


RAW_FIELDS = (
    "ok", "ttft_s", "tpot_s", "started_s", "ended_s", "output_tokens", "prompt_tokens", "finish", "label",
    "cached_tokens", "error_class", "run_id", "repeat", "concurrency", "coalesced",
)  # fmt: skip
SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=3)
CONTAINERS = st.lists(st.integers(), max_size=2) | st.dictionaries(st.text(max_size=2), st.integers(), max_size=1)


@settings(deadline=None)
@given(name=st.sampled_from(RAW_FIELDS), value=SCALARS | CONTAINERS)
def test_no_value_in_a_raw_line_makes_the_check_fail(
    tmp_path_factory: pytest.TempPathFactory, name: str, value: Any
) -> None:
    record, lines = level_and_lines(Load(c=2, requests=4), 1)
    lines[1][name] = value
    path = tmp_path_factory.mktemp("fuzz") / "raw.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)) + "\n", encoding="utf-8")
    book = sl.Notebook("labbook.md", [sl.Record(1, sl.parse_json(json.dumps(record)))])
    assert sl.check(book, sl.read_raw(str(path)))[-1].code == "raw"


@pytest.mark.parametrize("number", [1e300, -1e308, 10**200])
@pytest.mark.parametrize("field", ["ttft_s", "started_s", "ended_s", "output_tokens", "prompt_tokens", "cached_tokens"])
def test_a_raw_figure_that_no_request_can_have_is_damage(book: Book, field: str, number: float) -> None:
    record, lines = level_and_lines(Load(), 6)
    book.write([{**record, **RUN}])
    raw = write_raw(book, lines[1:], *[json.dumps({**lines[0], field: number})] * 2)
    result = book.run("--check", "--raw", raw)
    assert result.returncode == 1 and f"{field} is {number:g}: implausibly large" in result.stdout


def test_the_servers_own_timings_are_in_no_unit_of_ours(book: Book) -> None:
    """A clock in nanoseconds is larger than any figure of ours."""
    record, lines = level_and_lines(Load(), 6)
    book.write([{**record, **RUN}])
    raw = write_raw(book, [{**line, "timings": {"t_start_ns": 1_800_000_000_000_000_000}} for line in lines])
    result = book.run("--check", "--raw", raw)
    assert "PASS  raw: 1 level record recomputed" in result.stdout, result


def test_a_file_name_cannot_act_on_a_terminal(book: Book) -> None:
    record, lines = level_and_lines(Load(), 6)
    book.path = book.path.parent / "a\n\x1b[31mb.md"
    book.write([{**record, **RUN}], '{"lab": "llm-load-lab"')
    raw = write_raw(book, lines)
    odd = raw.rename(raw.parent / "r\n\x1b[31m.jsonl")
    named = ("--labbook", book.path)
    for arguments in (
        ("--list", *named),
        ("--label", "none", *named),
        ("--check", "--raw", odd, *named),
        ("--check", book.path, book.path.parent / "no\n\x1b.md"),
        ("--check", "--raw", book.path.parent / "no\n\x1b.jsonl", *named),
    ):
        result = book.run(*arguments)
        assert "\x1b" not in result.stdout + result.stderr, arguments
        assert "\\n\\x1b" in result.stdout + result.stderr, arguments
