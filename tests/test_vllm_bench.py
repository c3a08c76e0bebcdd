"""scripts/vllm_bench.py: result files of `vllm bench serve` into level records, and levels of a curve into such files.

The data are two real files of vllm 0.28.0's tool (--save-result; and --append-result --save-detailed with --metadata),
measured on the simulated engine.
"""

from __future__ import annotations

import contextlib
import json
import re
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from conftest import RunProgram
from hypothesis import given
from hypothesis import strategies as st

ROOT = Path(__file__).resolve().parent.parent
level_record = runpy.run_path(str(ROOT / "scripts" / "vllm_bench.py"))["level_record"]

DATA = Path(__file__).resolve().parent / "data" / "notebooks"
SUMMARY, DETAILED = DATA / "vllm_bench_summary.json", DATA / "vllm_bench_detailed.jsonl"
SUMMARY_RESULT = json.loads(SUMMARY.read_text())
DETAILED_RESULT = json.loads(DETAILED.read_text().splitlines()[0])
SLO = {"slo_ttft_s": 2.0, "slo_tpot_s": 0.1}


def program(folder: Path, *args: object, input: str | None = None) -> subprocess.CompletedProcess[str]:
    """Run the script; without `input` its standard input is empty."""
    command = [sys.executable, str(ROOT / "scripts" / "vllm_bench.py"), *map(str, args)]
    return subprocess.run(command, cwd=folder, input=input or "", capture_output=True, encoding="utf-8", timeout=120)


def records_of(notebook: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in notebook.read_text().splitlines() if line.startswith("{")]


def curve_of(run_program: RunProgram, notebook: Path, label: str) -> str:
    done = run_program("summarise_load.py", "--labbook", notebook, "--label", label, "--json")
    assert done.returncode == 0, done.stderr
    return done.stdout


# ---------------------------------------------------------------- import


def test_a_summary_becomes_a_level_that_the_analyser_reads(tmp_path: Path, run_program: RunProgram) -> None:
    settings = ("--set", "engine=vllm", "--set", "server_slots=4", "--set", "slo_ttft_s=2", "--set", "slo_tpot_s=0.1")
    notebook = tmp_path / "labbook.md"
    notebook.write_text("# Lab, its last line torn")
    done = program(tmp_path, "import", SUMMARY, "--label", "theirs", *settings)
    assert done.returncode == 0 and done.stdout == "" and "appended c=4 of theirs to labbook.md" in done.stderr
    (record,) = records_of(notebook)
    assert (record["concurrency"], record["requests"], record["completed"], record["failed"]) == (4, 16, 16, 0)
    assert record["output_tokens"] == SUMMARY_RESULT["total_output_tokens"] and record["engine"] == "vllm"
    assert record["output_tokens_per_s"] == pytest.approx(SUMMARY_RESULT["output_throughput"], rel=1e-6)
    assert record["ttft_s"]["p50"] == pytest.approx(SUMMARY_RESULT["median_ttft_ms"] / 1000, abs=1e-6)
    assert record["tpot_s"]["p90"] == pytest.approx(SUMMARY_RESULT["p90_tpot_ms"] / 1000, abs=1e-6)
    assert record["e2e_s"]["mean"] == pytest.approx(SUMMARY_RESULT["mean_e2el_ms"] / 1000, abs=1e-6)
    assert record["prompt_tokens_mean"] == 28.0 and record["within_slo"] == 16
    assert record["cached_tokens_mean"] is None and "linear" in record["percentile_method"]
    assert 3 < record["mean_in_flight"] <= 4
    assert json.loads(curve_of(run_program, notebook, "theirs"))["operating_point"] == 4


def test_detailed_results_are_counted_by_our_definitions(tmp_path: Path, run_program: RunProgram) -> None:
    """Two results in one file, with the settings that --metadata stored; a second import adds no second run."""
    for _ in range(2):
        done = program(tmp_path, "import", DETAILED, "--set", "slo_ttft_s=2", "--set", "slo_tpot_s=0.1")
        assert done.returncode == 0, done.stderr
    records = records_of(tmp_path / "labbook.md")
    assert [record["concurrency"] for record in records] == [1, 4, 1, 4]
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
    document = json.loads(curve_of(run_program, tmp_path / "labbook.md", "vllm-bench"))
    assert [(level["c"], len(level["run_ids"])) for level in document["levels"]] == [(1, 1), (4, 1)]


def test_the_results_of_one_call_are_repeats_of_one_run(tmp_path: Path) -> None:
    for name, seconds in (("1.json", 1.2), ("2.json", 1.3), ("3.json", 1.25)):
        (tmp_path / name).write_text(json.dumps({**SUMMARY_RESULT, "duration": seconds}))
    assert program(tmp_path, "import", "1.json", "2.json", DETAILED, "3.json", "--label", "x").returncode == 0
    records = records_of(tmp_path / "labbook.md")
    assert [(one["concurrency"], one["repeat"]) for one in records] == [(4, 0), (4, 1), (1, 0), (4, 2), (4, 3)]
    assert len({one["run_id"] for one in records}) == 1


def test_failed_requests_of_a_detailed_result_enter_no_figure() -> None:
    theirs = json.loads(json.dumps(DETAILED_RESULT))
    theirs["errors"][0], theirs["ttfts"][0], theirs["itls"][0], theirs["output_lens"][0] = "refused", 0.0, [], 0
    theirs.update(completed=9, failed=1, total_output_tokens=sum(theirs["output_lens"]))
    record = level_record(theirs, "x", {})
    assert record["completed"] == 9 and record["failed"] == 1 and record["ttft_s"]["min"] > 0
    assert record["mean_in_flight"] is None and record["within_slo"] is None


def test_a_file_of_an_older_version_has_no_failed_count() -> None:
    theirs = {key: value for key, value in SUMMARY_RESULT.items() if key != "failed"}
    record = level_record({**theirs, "num_prompts": 20}, None, {})
    assert record["failed"] == 4 and record["label"] == "vllm-bench"


def test_a_level_without_a_success_has_no_figure() -> None:
    nothing = {key: 0.0 for key in SUMMARY_RESULT if key.endswith("_ms")}
    theirs = {**SUMMARY_RESULT, **nothing, "completed": 0, "failed": 16, "total_output_tokens": 0}
    record = level_record(theirs, None, {})
    assert record["ttft_s"] is None and record["tpot_s"] is None and record["mean_in_flight"] is None


NO_E2E = {key: None for key in SUMMARY_RESULT if "e2el" in key}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"request_rate": 8.0}, "open loop: its requests arrived at a request rate of 8.0"),
        ({"request_rate": "8"}, "open loop: its requests arrived at a request rate of 8"),
        ({"ramp_up_strategy": "linear"}, "open loop: its requests arrived at a linear ramp"),
        ({"duration": 12.0}, "on average 0.4 requests were in flight, well below max_concurrency 4"),
        ({"duration": 12.0, **NO_E2E}, "on average 0.4 requests were in flight, well below max_concurrency 4"),
        ({"max_concurrency": 32}, "num_prompts 16 never fills max_concurrency 32"),
        ({"max_concurrency": None}, "max_concurrency is null"),
        ({"max_concurrency": 2.5}, "max_concurrency is 2.5, not a whole number"),
        ({"duration": "x"}, 'duration is "x"'),
        ({"completed": True}, "completed is true"),
        ({"mean_ttft_ms": -1}, "mean_ttft_ms is -1"),
        ({"server_slots": "many"}, "server_slots is 'many', not a number"),
        ({"model_id": "x" * 200_000}, "its line would be longer than"),
    ],
)
def test_what_is_no_level_of_a_curve_is_refused(changes: Any, words: str) -> None:
    level_record(SUMMARY_RESULT, None, {})  # as it came it is one
    with pytest.raises(ValueError, match=re.escape(words)):
        level_record({**SUMMARY_RESULT, **changes}, None, {})


def test_nothing_is_written_where_one_result_of_a_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "two.jsonl"
    path.write_text(json.dumps(SUMMARY_RESULT) + "\n" + json.dumps({**SUMMARY_RESULT, "request_rate": 3.0}) + "\n")
    done = program(tmp_path, "import", path)
    assert done.returncode == 2 and "result 2: open loop" in done.stderr and not (tmp_path / "labbook.md").exists()


@pytest.mark.parametrize("text", ["", "{}", "[1]", "not json", '{"duration": NaN}', '{"a": 1}\n{"b": 2}\n', "\udcff"])
def test_other_files_are_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "other.json"
    path.write_bytes(text.encode("utf-8", "surrogateescape"))
    done = program(tmp_path, "import", path)
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and not (tmp_path / "labbook.md").exists()


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["import", "absent.json"], "cannot read absent.json"),
        (["import", "."], "cannot read .: it is a folder"),
        (["import", SUMMARY, "--set", "colour=red"], "--set colour=red: expected KEY=VALUE"),
        (["import", SUMMARY, "--set", "server_slots=four"], "server_slots is 'four', not a number"),
        (["import", SUMMARY, "--labbook", "wide.md"], "UTF-16"),
        (["export", SUMMARY], "expected the JSON of summarise_load.py"),
    ],
)
def test_errors_are_one_clear_line(tmp_path: Path, args: list[object], words: str) -> None:
    (tmp_path / "wide.md").write_text("# Lab\n", encoding="utf-16")
    before = (tmp_path / "wide.md").read_bytes()
    done = program(tmp_path, *args)
    assert done.returncode == 2 and words in done.stderr and done.stderr.count("\n") == 1
    assert (tmp_path / "wide.md").read_bytes() == before


def test_a_line_that_cannot_be_appended_is_printed(tmp_path: Path) -> None:
    done = program(tmp_path, "import", SUMMARY, "--labbook", "no/such/folder.md")
    assert done.returncode == 1 and json.loads(done.stdout)["concurrency"] == 4


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=2),
    max_leaves=4,
)


@given(source=st.sampled_from((SUMMARY_RESULT, DETAILED_RESULT)), data=st.data(), value=VALUES)
def test_no_value_makes_the_import_fail_otherwise_than_by_saying_so(
    source: dict[str, Any], data: st.DataObject, value: Any
) -> None:
    result = json.loads(json.dumps(source))
    name = data.draw(st.sampled_from(sorted(result)))
    if isinstance(result[name], list) and data.draw(st.booleans()):
        result[name][0] = value
    else:
        result[name] = value
    with contextlib.suppress(ValueError):
        json.dumps(level_record(result, "x", SLO), allow_nan=False)


def test_a_missing_mean_leaves_out_what_rests_on_it() -> None:
    record = level_record({**SUMMARY_RESULT, "mean_e2el_ms": None, "p90_e2el_ms": 400.0}, "x", SLO)
    assert record["e2e_s"]["mean"] is None and record.get("mean_in_flight") is None


# ---------------------------------------------------------------- export


def test_export_writes_the_tools_fields_and_import_reads_them_back(tmp_path: Path, run_program: RunProgram) -> None:
    """Every field that the real summary holds, of the same type or null; and what went out comes back."""
    first = program(tmp_path, "import", SUMMARY, "--label", "first", "--set", "host=h", "--set", "server_slots=4")
    assert first.returncode == 0
    document = curve_of(run_program, tmp_path / "labbook.md", "first")
    out = program(tmp_path, "export", "--level", 4, input=document)
    ours = json.loads(out.stdout)
    assert out.returncode == 0 and set(SUMMARY_RESULT) <= set(ours)
    for key, value in SUMMARY_RESULT.items():
        if value is not None and ours[key] is not None:
            assert isinstance(ours[key], (int, float)) == isinstance(value, (int, float)), key
        if isinstance(value, float) and ours[key] is not None:
            assert ours[key] == pytest.approx(value, rel=1e-4), key
    assert ours["date"] == SUMMARY_RESULT["date"] and ours["std_ttft_ms"] is None
    (tmp_path / "c4.json").write_text(out.stdout)
    assert program(tmp_path, "import", "c4.json", "--label", "back").returncode == 0
    one, other = records_of(tmp_path / "labbook.md")
    rate = other.pop("output_tokens_per_s")  # of a wall time to the microsecond
    assert rate == pytest.approx(one.pop("output_tokens_per_s"), rel=1e-5)
    assert {name for name in one if one[name] != other[name]} == {"label", "run_id"}


def test_export_prints_every_level_or_the_one_asked_for(tmp_path: Path, run_program: RunProgram) -> None:
    document = curve_of(run_program, ROOT / "tests" / "data" / "engines" / "labbook.md", "vllm-baseline")
    every = program(tmp_path, "export", input=document)
    assert [json.loads(line)["max_concurrency"] for line in every.stdout.splitlines()] == [1, 5, 10, 20]
    (tmp_path / "curve.json").write_text(document)
    one = program(tmp_path, "export", "curve.json", "--level", 5)
    assert [one.stdout] == [line + "\n" for line in every.stdout.splitlines() if '"max_concurrency": 5,' in line]
    other = program(tmp_path, "export", "curve.json", "--level", 7)
    assert other.returncode == 2 and "holds c=1,5,10,20" in other.stderr


@pytest.mark.parametrize("redirect", ["| head -c 0", "> /dev/full", ">&-"])
def test_export_to_where_nothing_can_be_written_ends_without_a_traceback(
    tmp_path: Path, run_program: RunProgram, redirect: str
) -> None:
    (tmp_path / "curve.json").write_text(
        curve_of(run_program, ROOT / "tests" / "data" / "engines" / "labbook.md", "vllm-baseline")
    )
    command = f"'{sys.executable}' '{ROOT / 'scripts' / 'vllm_bench.py'}' export curve.json {redirect}"
    done = subprocess.run(["sh", "-c", command], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert "Traceback" not in done.stderr and done.stderr.count("\n") <= 1
