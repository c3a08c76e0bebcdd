"""Files of `vllm bench serve`: read into level records, and written from them.

The data are two real files of vllm 0.28.0's tool (--save-result; and --append-result --save-detailed with --metadata),
measured on the simulated engine.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_summarise_cli import Book
from test_summarise_figures import LEVELS, exact
from test_summarise_honest import Load, as_read, decimals, level_record, simulate

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import summarise_load as sl

DATA = Path(__file__).resolve().parent / "data" / "notebooks"
SUMMARY, DETAILED = DATA / "vllm_bench_summary.json", DATA / "vllm_bench_detailed.jsonl"


@pytest.fixture
def book(run_program: Any, tmp_path: Path) -> Book:
    return Book(run_program, tmp_path / "labbook.md")


def records_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines() if line.startswith("{")]


def test_a_summary_becomes_a_level_record(book: Book) -> None:
    theirs = json.loads(SUMMARY.read_text())
    settings = ("--set", "engine=vllm", "--set", "server_slots=4", "--set", "slo_ttft_s=2", "--set", "slo_tpot_s=0.1")
    result = book.run("--import", "vllm-bench", SUMMARY, "--label", "theirs", *settings)
    assert result.returncode == 0 and "appended c=4 of theirs to labbook.md" in result.stderr and result.stdout == ""
    (record,) = records_of(book.path)
    assert (record["concurrency"], record["requests"], record["completed"], record["failed"]) == (4, 16, 16, 0)
    assert record["output_tokens"] == theirs["total_output_tokens"] and record["engine"] == "vllm"
    assert record["output_tokens_per_s"] == pytest.approx(theirs["output_throughput"], rel=1e-6)
    assert record["ttft_s"]["p50"] == pytest.approx(theirs["median_ttft_ms"] / 1000, abs=1e-6)
    assert record["tpot_s"]["p90"] == pytest.approx(theirs["p90_tpot_ms"] / 1000, abs=1e-6)
    assert record["e2e_s"]["mean"] == pytest.approx(theirs["mean_e2el_ms"] / 1000, abs=1e-6)
    assert record["prompt_tokens_mean"] == 28.0 and record["within_slo"] == 16
    assert record["cached_tokens_mean"] is None and "linear" in record["percentile_method"]
    assert 3 < record["mean_in_flight"] <= 4
    assert sl.contradictions(as_read(record)) == []
    shown = book.run("--label", "theirs")
    assert shown.returncode == 0 and "operating point: c=4" in shown.stdout


def test_detailed_results_are_counted_by_our_definitions(book: Book) -> None:
    """Two results in one file, with the settings that --metadata stored."""
    result = book.run("--import", "vllm-bench", DETAILED, "--set", "slo_ttft_s=2", "--set", "slo_tpot_s=0.1")
    assert result.returncode == 0, result.stderr
    records = records_of(book.path)
    assert [record["concurrency"] for record in records] == [1, 4]
    for record, line in zip(records, DETAILED.read_text().splitlines()):
        theirs = json.loads(line)
        assert record["label"] == "vllm-bench" and record["engine"] == "simulated" and record["server_slots"] == 4
        assert record["ttft_s"]["max"] == pytest.approx(max(theirs["ttfts"]), abs=1e-6)
        assert record["ttft_s"]["mean"] == pytest.approx(theirs["mean_ttft_ms"] / 1000, abs=1e-6)
        tpots = [sum(gaps) / (n - 1) for gaps, n in zip(theirs["itls"], theirs["output_lens"])]
        assert record["tpot_s"]["p50"] == pytest.approx(sorted(tpots)[4], abs=1e-6)
        assert record["output_tokens_per_request"] == {"min": 16, "p50": 16, "p90": 16, "max": 42}
        assert record["within_slo"] == 10 and record["goodput_requests_per_s"] == record["requests_per_s"]
        assert "percentile_method" not in record
        assert sl.contradictions(as_read(record)) == []
    assert "levels 1,4" in book.run("--list").stdout
    again = book.run("--import", "vllm-bench", DETAILED, "--set", "slo_ttft_s=2", "--set", "slo_tpot_s=0.1")
    assert again.returncode == 0
    assert "the same line as line 1: counted once" in book.run("--list").stderr


def test_failed_requests_of_a_detailed_result_enter_no_figure() -> None:
    theirs = json.loads(DETAILED.read_text().splitlines()[0])
    theirs["errors"][0], theirs["ttfts"][0], theirs["itls"][0], theirs["output_lens"][0] = "refused", 0.0, [], 0
    theirs.update(completed=9, failed=1, total_output_tokens=sum(theirs["output_lens"]))
    record = sl.from_vllm_bench(sl.parse_json(json.dumps(theirs)), "x", {})
    assert record["completed"] == 9 and record["failed"] == 1 and record["ttft_s"]["min"] > 0
    assert record["mean_in_flight"] is None and record["within_slo"] is None
    assert sl.contradictions(as_read(record)) == []


def test_a_file_of_an_older_version_has_no_failed_count() -> None:
    theirs = json.loads(SUMMARY.read_text())
    del theirs["failed"]
    record = sl.from_vllm_bench(sl.parse_json(json.dumps({**theirs, "num_prompts": 20})), None, {})
    assert record["failed"] == 4 and record["label"] == "vllm-bench"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"max_concurrency": None}, "max_concurrency is null: a curve needs it (vllm bench serve --max-concurrency N)"),
        ({"duration": "x"}, 'duration is "x"'),
        ({"server_slots": "many"}, "server_slots is 'many', not a number"),
    ],
)
def test_what_is_no_level_is_refused_before_anything_is_written(book: Book, changes: Any, words: str) -> None:
    path = book.path.parent / "odd.json"
    path.write_text(json.dumps({**json.loads(SUMMARY.read_text()), **changes}))
    result = book.run("--import", "vllm-bench", path)
    assert result.returncode == 2 and words in result.stderr and not book.path.exists()


@pytest.mark.parametrize("text", ["", "{}", "[1]", "not json", '{"duration": NaN}', '{"a": 1}\n{"b": 2}\n'])
def test_other_files_are_refused(book: Book, text: str) -> None:
    path = book.path.parent / "other.json"
    path.write_text(text)
    result = book.run("--import", "vllm-bench", path)
    assert result.returncode == 2 and result.stderr.count("\n") == 1 and not book.path.exists()


def test_an_exported_level_has_the_tools_fields(book: Book) -> None:
    """Every field that the real summary holds, with the same type or null."""
    book.write([exact(c) for c in LEVELS])
    out = book.path.parent / "c20.json"
    result = book.run("--label", "llama-baseline", "--export", "vllm-bench", out, "--level", 20)
    assert result.returncode == 0 and f"wrote c=20 of llama-baseline to {out}" in result.stderr
    ours, theirs = json.loads(out.read_text()), json.loads(SUMMARY.read_text())
    assert set(theirs) <= set(ours)
    for key, value in theirs.items():
        if value is not None and ours[key] is not None:
            assert isinstance(ours[key], (int, float)) == isinstance(value, (int, float)), key
    assert ours["max_concurrency"] == 20 and ours["completed"] == 40 and ours["request_rate"] == "inf"
    assert ours["output_throughput"] == pytest.approx(400) and ours["median_tpot_ms"] == pytest.approx(50)
    assert ours["p99_ttft_ms"] is not None and ours["std_ttft_ms"] is None


def test_export_and_import_meet(book: Book) -> None:
    load = Load(c=10, tokens=(100, 128))
    record = level_record(load, simulate(load, random.Random(3)), decimals(6), decimals(4))
    book.write([record])
    text = book.run("--label", "llama-baseline", "--export", "vllm-bench", "-").stdout
    path = book.path.parent / "level.json"
    path.write_text(text)
    assert book.run("--import", "vllm-bench", path, "--label", "back").returncode == 0
    back = records_of(book.path)[-1]
    for name in ("engine", "engine_version", "host", "quant", "context_length", "server_slots", "prompt_set", "model",
                 "max_tokens", "slo_ttft_s", "slo_tpot_s", "requests", "completed", "failed", "wall_s", "output_tokens",
                 "output_tokens_per_s", "requests_per_s", "goodput_requests_per_s", "within_slo"):  # fmt: skip
        assert back[name] == record[name], name
    for name in ("ttft_s", "tpot_s", "e2e_s"):
        for key in ("p50", "p90", "p95", "p99", "mean"):
            assert back[name][key] == pytest.approx(record[name][key], abs=1e-6)
    assert back["prompt_tokens_mean"] == pytest.approx(record["prompt_tokens_mean"], abs=0.1)


def test_export_of_repeats_is_the_median_run(book: Book) -> None:
    rates = [300.0, 310.0, 290.0]
    book.write([exact(10, repeat=r, output_tokens_per_s=rate) for r, rate in enumerate(rates)])
    out = json.loads(book.run("--label", "llama-baseline", "--export", "vllm-bench", "-").stdout)
    assert out["output_throughput"] == 300.0


def test_export_asks_which_level(book: Book) -> None:
    book.write([*(exact(c) for c in LEVELS), exact(40, completed=0, failed=40)])
    many = book.run("--label", "llama-baseline", "--export", "vllm-bench", "-")
    assert many.returncode == 2 and "--level C (it holds c=1,5,10,20)" in many.stderr
    other = book.run("--label", "llama-baseline", "--export", "vllm-bench", "-", "--level", 7)
    assert other.returncode == 1 and "c=1,5,10,20" in other.stderr
    itself = book.run("--label", "llama-baseline", "--export", "vllm-bench", "labbook.md", "--level", 5)
    assert itself.returncode == 2 and "that is the notebook" in itself.stderr
    nowhere = book.run("--label", "llama-baseline", "--export", "vllm-bench", "no/such/f.json", "--level", 5)
    assert nowhere.returncode == 2 and "cannot write" in nowhere.stderr


def test_an_export_waits_for_no_reader_and_a_full_disk_loses_nothing(book: Book) -> None:
    book.write([exact(c) for c in LEVELS])
    folder = book.path.parent
    os.mkfifo(folder / "pipe")
    export = ("--label", "llama-baseline", "--level", 5, "--export", "vllm-bench")
    for target in ("pipe", "."):
        result = book.run(*export, target)
        assert result.returncode == 2 and "not a file" in result.stderr and result.stderr.count("\n") == 1
    assert book.run(*export, "/dev/null").returncode == 0
    assert '"max_concurrency": 5' in book.run(*export, "/dev/stdout").stdout
    (folder / "old.json").write_text("old")
    command = " ".join(f"'{word}'" for word in (sys.executable, sl.__file__, *export))
    for target in ("old.json", "new.json"):  # a limit on the size of files stands for the full disk
        line = f"trap '' XFSZ; ulimit -f 1; {command} {target}"
        done = subprocess.run(["sh", "-c", line], cwd=folder, capture_output=True, text=True, timeout=60)
        assert done.returncode == 2 and f"cannot write {target}" in done.stderr, done
    assert (folder / "old.json").read_text() == "old"
    assert sorted(path.name for path in folder.iterdir()) == ["labbook.md", "old.json", "pipe"]
    assert book.run(*export, "old.json").returncode == 0
    assert json.loads((folder / "old.json").read_text())["max_concurrency"] == 5


@pytest.mark.parametrize("moment", ["9999-12-31T23:59:59-12:00", "0001-01-01T00:00:00+14:00"])
def test_an_instant_in_no_year_that_a_date_has_is_exported_as_none(book: Book, moment: str) -> None:
    book.write([exact(5, recorded_at=moment)])
    result = book.run("--label", "llama-baseline", "--export", "vllm-bench", "-")
    assert result.returncode == 0 and json.loads(result.stdout)["date"] is None


def test_import_appends_no_line_that_cannot_be_read_again(book: Book) -> None:
    path = book.path.parent / "long.json"
    theirs = json.loads(SUMMARY.read_text())
    path.write_text(json.dumps({**theirs, "model_id": "x" * sl.MAX_LINE_BYTES}))
    result = book.run("--import", "vllm-bench", path)
    assert result.returncode == 2 and "result 1: its line would be" in result.stderr and not book.path.exists()


def test_import_refuses_a_notebook_that_is_not_utf_8(book: Book) -> None:
    book.path.write_text("# Lab\n", encoding="utf-16")
    before = book.path.read_bytes()
    result = book.run("--import", "vllm-bench", SUMMARY)
    assert result.returncode == 2 and "UTF-16" in result.stderr and book.path.read_bytes() == before


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=2),
    max_leaves=4,
)


@given(source=st.sampled_from((SUMMARY, DETAILED)), data=st.data(), value=VALUES)
def test_no_value_makes_the_import_fail_otherwise_than_by_saying_so(
    source: Path, data: st.DataObject, value: Any
) -> None:
    result = json.loads(source.read_text().splitlines()[0])
    name = data.draw(st.sampled_from(sorted(result)))
    if isinstance(result[name], list) and data.draw(st.booleans()):
        result[name][0] = value
    else:
        result[name] = value
    with contextlib.suppress(ValueError):
        parsed = sl.parse_json(json.dumps(result))
        record = sl.from_vllm_bench(parsed, "x", {"slo_ttft_s": 1.0, "slo_tpot_s": 0.1})
        json.dumps(record, allow_nan=False)
