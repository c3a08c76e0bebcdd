"""summarise_load.py as people run it: what it prints, where, and with which exit code."""

from __future__ import annotations

import csv
import io
import json
import os
import pty
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT
from honest_levels import LEVELS, Book, Json, exact, honest, prefix, whole_notebook

import summarise_load as sl

ENGINES = ROOT / "tests" / "data" / "engines" / "labbook.md"
VERSION_1 = Path(__file__).resolve().parent / "data" / "notebooks" / "version_1.md"


@pytest.fixture
def book(run_program: Any, tmp_path: Path) -> Book:
    return Book(run_program, tmp_path / "labbook.md")


# --------------------------------------------------------------------------------------------------------------- views


def test_list(book: Book) -> None:
    book.write([honest(20), honest(5, label="my second run"), honest(1), honest(10, label="100%")])
    for args in ((), ("--list",)):
        result = book.run(*args)
        assert result.returncode == 0
        lines = result.stdout.splitlines()
        assert lines[0] == "==> 3 label(s) in labbook.md"
        assert [line.split()[0] for line in lines[1:]] == ["llama-baseline", "my%20second%20run", "100%25"]
        assert re.search(r"llama\.cpp +mixed +levels 1,20 +last 2026-11-29$", lines[1])


def test_list_gives_the_newest_line_as_text_and_as_json(book: Book) -> None:
    book.write([honest(1), honest(1, interrupted=True, recorded_at="2026-11-30T08:00:00+00:00", run_id="later")])
    assert "last 2026-11-30" in book.run("--list").stdout
    assert json.loads(book.run("--list", "--json").stdout)["labels"][0]["last"] == "2026-11-30T08:00:00+00:00"


@pytest.mark.parametrize("name", ["my second run", "my%20second%20run"])
def test_a_label_is_found_as_written_and_as_listed(book: Book, name: str) -> None:
    result = book.write([honest(5, label="my second run")]).run("--label", name)
    assert result.returncode == 0 and "\nmy%20second%20run: " in result.stdout


def test_label_as_text(book: Book) -> None:
    result = book.write([exact(c) for c in LEVELS]).run("--label", "llama-baseline")
    assert result.returncode == 0 and result.stderr == ""
    lines = result.stdout.splitlines()
    assert lines[0].startswith("At least 20 requests in flight stay inside TTFT 2 s and TPOT 100 ms (p90)")
    for word in ("llama.cpp b7000", "local-chat", "mixed", "bench box", "Q4_K_M", "4096", "slots 20", "SLO TTFT 2.0 s"):
        assert word in lines[2] + lines[3]
    head = re.split(r"  +", lines[5].strip())
    assert ",".join(head) == (
        "c,ok,out tok/s,scaling,req/s,goodput,TTFT p50,TTFT p90,TPOT p50,TPOT p90,in flight,cached"
    )
    rows = [line.split() for line in lines[6:10]]
    assert [row[0] for row in rows] == ["1", "5", "10", "20"] and all(len(row) == len(head) for row in rows)
    assert rows[3][:4] == ["20", "40/40", "400.0", "0.43"]
    assert "  c=20   " + "#" * 40 + " 400.0" in lines


def test_label_as_markdown(book: Book) -> None:
    book.write([exact(c, host="a|b") for c in LEVELS])
    text = book.run("--label", "llama-baseline", "--markdown").stdout
    rows = [line for line in text.splitlines() if line.startswith("|")]
    assert len(rows) == 6 and rows[0].startswith("| c | ok |") and rows[2].startswith("| 1 | 40/40 | 46.5 | 1.00 |")
    assert r"host a\|b" in text and "- knee: between c=5 and c=10" in text
    assert "- TPOT p50 ~ 20.00 ms + 1.500 ms x c" in text
    book.path.write_text(book.path.read_text() + text)
    assert book.run("--check").stdout.count("damaged-lines: 4 level records parsed") == 1


def test_label_as_json(book: Book) -> None:
    book.write([exact(c) for c in LEVELS], "{torn")
    document = json.loads(book.run("--label", "llama-baseline", "--json").stdout)
    assert document["kind"] == "curve" and document["label"] == "llama-baseline"
    assert document["slo"] == {"ttft_s": 2.0, "tpot_s": 0.1} and document["settings"]["server_slots"] == 20
    assert [level["c"] for level in document["levels"]] == list(LEVELS)
    assert document["knee"]["between"] == [5, 10] and document["operating_point"] == 20
    fit = document["fit"]
    assert (round(fit["a_ms"], 3), round(fit["b_ms"], 3), round(fit["ceiling_tokens_per_s"], 1)) == (20.0, 1.5, 666.7)
    assert round(fit["c_at_slo"], 1) == 53.3 and fit["levels"] == list(LEVELS) and len(fit["b_interval_ms"]) == 2
    assert document["levels"][3]["decode_bound_output_tokens_per_s"] == pytest.approx(400)
    assert document["levels"][3]["ttft_s"]["p95"] is not None and document["levels"][3]["in_fit"] is True
    assert document["peak"] == {"c": 20, "output_tokens_per_s": pytest.approx(400)}
    assert {"code", "status", "levels", "text", "advice", "values", "certain"} == set(document["statements"][0])
    assert {item["code"] for item in document["check"]["statements"]} >= {"sweep", "consistent", "curve-summary"}
    assert document["notebook"] == "labbook.md"


def test_every_key_of_the_json_is_documented(book: Book) -> None:
    book.write([exact(c, server={"slots": 20}) for c in LEVELS])
    for args, function in (
        (("--label", "llama-baseline"), sl.curve_document), (("--list",), sl.list_document),
        (("--label", "llama-baseline", "--runs"), sl.runs_document), (("--check",), sl.notebook_verdict),
        (("--compare", "llama-baseline", "llama-baseline"), sl.compare_document),
    ):  # fmt: skip
        document = json.loads(book.run(*args, "--json").stdout)
        described = re.sub(r"\s+", " ", f"{sl.curve_document.__doc__} {sl.list_document.__doc__} {function.__doc__}")
        parts = [document, *(v for v in document.values() if isinstance(v, dict)), *document.get("levels", [])[:1],
                 *document.get("statements", [])[:1], *document.get("runs", []),
                 *document.get("labels", [])]  # fmt: skip
        for key in {key for part in parts for key in part}:
            block, _, inner = key.partition(".")
            assert inner or re.search(rf"\b{re.escape(block)}\b", described), (args, key)


def test_csv(book: Book) -> None:
    book.write([exact(c, label='a, "b"') for c in LEVELS])
    rows = list(csv.DictReader(io.StringIO(book.run("--label", 'a, "b"', "--csv").stdout)))
    assert [row["c"] for row in rows] == ["1", "5", "10", "20"] and rows[0]["label"] == 'a, "b"'
    assert float(rows[3]["output_tokens_per_s"]) == pytest.approx(400) and rows[0]["prefill_tokens_per_s"] == ""
    assert float(rows[3]["ttft_s.p95"]) > 0
    listed = list(csv.DictReader(io.StringIO(book.run("--list", "--csv").stdout)))
    assert listed[0]["levels"] == "[1, 5, 10, 20]"
    checked = list(csv.DictReader(io.StringIO(book.run("--check", "--csv").stdout)))
    assert {row["status"] for row in checked} <= {"PASS", "WARN", "FAIL"}
    pair = list(csv.DictReader(io.StringIO(book.run("--compare", 'a, "b"', 'a, "b"', "--csv").stdout)))
    assert float(pair[0]["output_tokens_per_s.ratio"]) == 1.0


def test_compare(book: Book) -> None:
    other = {"label": "B", "engine": "vllm", "quant": "AWQ", "server_slots": 8, "max_tokens": 64, "slo_tpot_s": 0.2}
    book.write([*(exact(c) for c in LEVELS), *(exact(c, 25, 2, **other) for c in (5, 20, 40))])
    result = book.run("--compare", "llama-baseline", "B")
    assert result.returncode == 0
    rows = [line.split() for line in result.stdout.splitlines() if line[:1].isdigit()]
    assert [row[:4] for row in rows] == [["5", "181.8", "142.9", "0.79"], ["20", "400.0", "307.7", "0.77"]]
    for note in (
        "engine differs: llama.cpp and vllm",
        "quant differs: Q4_K_M and AWQ",
        "server_slots differs: 20 and 8",
        "max_tokens differs: 128 and 64",
        "slo_tpot_s differs: 0.1 and 0.2",
    ):
        assert note in result.stdout
    assert "model differs" not in result.stdout
    assert "only in llama-baseline: c=1,10\n" in result.stdout and "only in B: c=40\n" in result.stdout
    assert "single runs: run-to-run variance unknown" in result.stdout and "different" not in result.stdout
    assert "prompt_text: text not recorded on either side" in result.stdout
    markdown = book.run("--compare", "llama-baseline", "B", "--markdown").stdout
    assert "| 5 | 181.8 | 142.9 | 0.79 |" in markdown
    document = json.loads(book.run("--compare", "llama-baseline", "B", "--json").stdout)
    assert document["kind"] == "compare" and document["a"]["kind"] == document["b"]["kind"] == "curve"
    rates = [level["output_tokens_per_s"] for level in document["levels"]]
    assert [level["c"] for level in document["levels"]] == [5, 20] and round(rates[1]["ratio"], 2) == 0.77
    assert all(rate[name] is None for rate in rates for name in ("low", "high", "different"))
    settings = {item["values"]["name"]: item["values"] for item in document["statements"] if item["code"] == "setting"}
    assert settings["engine"] == {"name": "engine", "a": "llama.cpp", "b": "vllm"}
    assert document["levels"][0]["ttft_s.p90"]["a"] > 0


def runs(label: str, rates: tuple[float, ...], **changes: Any) -> list[Json]:
    return [exact(10, label=label, repeat=r, output_tokens_per_s=rate, **changes) for r, rate in enumerate(rates)]


@pytest.mark.parametrize(
    ("b", "words", "different"),
    [
        ((295, 310, 305), "no difference shown", False),
        ((292, 294, 293), "no difference shown", False),  # ranges apart from c's would not matter
        ((330, 340, 350), "different", True),
        ((400,), "(3 against 1 run): no verdict, each side needs two runs", None),
    ],
)
def test_compare_tells_noise_from_difference(book: Book, b: tuple[float, ...], words: str, different: Any) -> None:
    book.write(runs("a", (280, 300, 290)) + runs("b", b))
    text = book.run("--compare", "a", "b").stdout.splitlines()[-2:]
    line = next(line for line in text if line.startswith("at c=10: "))
    assert line.endswith(words) and ("95 %" in line) == (different is not None)
    document = json.loads(book.run("--compare", "a", "b", "--json").stdout)
    assert document["levels"][0]["output_tokens_per_s"]["different"] is different


def test_compare_names_other_prompts_and_levels_left_out(book: Book) -> None:
    """The prompt sets of versions 1 and 2 have other texts: 1,440 tokens and 1,365."""
    old: Json = {"label": "a", "prompt_set": "shared-prefix", "prompt_tokens_mean": 1440.0}
    new: Json = {"label": "b", "prompt_set": "shared-prefix", "prompt_tokens_mean": 1365.0, "prompt_text": "0123abcd"}
    book.write([exact(1, **old), exact(5, **old), exact(1, **new), exact(5, interrupted=True, **new)])
    said = book.run("--compare", "a", "b").stdout
    assert "prompt_text differs: text not recorded and 0123abcd" in said
    assert "prompt tokens differ at c=1: B's prompts have 0.95 times as many as A's" in said
    assert "c=5 is not compared (b: interrupted)" in said


def test_runs_of_a_label_are_listed_shown_and_compared(book: Book) -> None:
    """A driver update: the same label, twice."""
    old = {"run_id": "20261101T100000-aaaa", "recorded_at": "2026-11-01T10:00:00+01:00"}
    book.write([*(exact(c, 25, 2, **old) for c in LEVELS), *(exact(c) for c in (1, 5)), exact(1, label="a@b")])
    listed = book.run("--label", "llama-baseline", "--runs").stdout.splitlines()
    assert listed[0] == "==> 2 run(s) of llama-baseline in labbook.md"
    assert re.fullmatch(
        r"20261101T100000-aaaa +1 repeat +levels 1,5,10,20 +last 2026-11-01 +shown at c=10,20", listed[1]
    )
    assert listed[2].endswith("shown at c=1,5")
    for args in (
        ("--label", "llama-baseline", "--run", "20261101"),
        ("--label", "llama-baseline@20261101T100000-aaaa"),
    ):
        document = json.loads(book.run(*args, "--json").stdout)
        assert round(document["fit"]["a_ms"], 3) == 25.0 and document["label"] == "llama-baseline@20261101T100000-aaaa"
    pair = book.run("--compare", "llama-baseline@20261101", "llama-baseline")
    assert "1      37.0     46.5  1.26" in pair.stdout
    assert book.run("--label", "a@b").returncode == 0, "a label that holds an @"
    missing = book.run("--label", "llama-baseline@2027")
    assert missing.returncode == 1 and "no run '2027'" in missing.stderr and "20261129" in missing.stderr


def test_compare_without_a_common_level(book: Book) -> None:
    result = book.write([honest(5, label="a"), honest(10, label="b")]).run("--compare", "a", "b")
    assert (
        result.returncode == 1
        and result.stdout == ""
        and "no level with a completed request in common" in result.stderr
    )


def test_version_1_reads_lists_compares_and_checks(book: Book) -> None:
    at = ("--labbook", VERSION_1)
    assert "llama-baseline       llama.cpp  mixed          levels 1,5,10,20" in book.run("--list", *at).stdout
    shown = book.run("--label", "llama-baseline", *at)
    assert shown.returncode == 0 and shown.stdout.count("format version 1") == 1 and "lack" not in shown.stdout
    assert "knee: between c=5 and c=10" in shown.stdout and "TPOT p50 ~ 20.0" in shown.stdout
    pair = book.run("--compare", "llama-prefix-unique", "llama-prefix-shared", *at)
    assert "1.37" in pair.stdout and pair.stdout.count("format version 1") == 1
    result = book.run("--check", *at)
    assert result.returncode == 0 and result.stdout.endswith("22 pass, 2 warn, 0 fail\n")


def test_the_same_lines_with_a_schema_check_the_same(book: Book) -> None:
    """A version 1 notebook whose lines say schema 2, with null for 0.0, gets the same verdicts."""
    lines = []
    for text in VERSION_1.read_text(encoding="utf-8").splitlines():
        start = text.find("{")
        if start < 0:
            lines.append(text)
            continue
        record = json.loads(text[start:])
        lines.append(json.dumps({**record, "schema": 2, "run_id": record["recorded_at"]}))
    book.path.write_text("\n".join(lines), encoding="utf-8")
    old, new = (book.run("--check", "--json", *args) for args in (("--labbook", VERSION_1), ()))
    verdicts = [{item["code"]: item["status"] for item in json.loads(run.stdout)["statements"]} for run in (old, new)]
    assert verdicts[1].pop("digits") == "WARN" and verdicts[0].pop("digits") == "PASS", "version 1 wrote fewer"
    assert verdicts[0] == verdicts[1]


# -------------------------------------------------------------------------------------------------------------- record


def test_record_appends_a_summary_that_the_check_finds(book: Book) -> None:
    book.write([exact(c) for c in LEVELS])
    book.path.write_bytes(book.path.read_bytes().rstrip(b"\n") + b"\ntorn prose")
    result = book.run("--label", "llama-baseline", "--record")
    assert result.returncode == 0 and "appended" in result.stderr
    last = book.path.read_text().splitlines()[-1]
    assert '"record": "curve-summary"' in last
    record = json.loads(last)
    assert record["levels"] == [1, 5, 10, 20] and record["knee_between"] == [5, 10] and record["operating_point"] == 20
    assert record["peak_output_tokens_per_s"] == 400.0 and record["tpot_fit_ms"] == {"a": 20.0, "b": 1.5}
    assert record["lab"] == sl.LAB and record["label"] == "llama-baseline" and record["engine"] == "llama.cpp"
    assert last == json.dumps(record, sort_keys=True)
    assert "PASS  curve-summary: llama-baseline" in book.run("--check").stdout
    assert book.run("--list").stdout.startswith("==> 1 label(s)")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_record_on_a_read_only_file_prints_the_line(book: Book) -> None:
    book.write([exact(c) for c in LEVELS]).path.chmod(0o444)
    result = book.run("--label", "llama-baseline", "--record")
    assert result.returncode == 1 and '"record": "curve-summary"' in result.stdout


def test_record_needs_something_to_record(book: Book) -> None:
    before = book.write([exact(1, completed=0, failed=40)]).path.read_bytes()
    result = book.run("--label", "llama-baseline", "--record")
    assert result.returncode == 1 and "nothing to record" in result.stderr and book.path.read_bytes() == before


# --------------------------------------------------------------------------------------------------------------- check


def statuses(result: subprocess.CompletedProcess[str]) -> dict[str, str]:
    """rule -> status of a --check."""
    found = re.findall(r"^(PASS|WARN|FAIL)  ([a-z0-9-]+): ", result.stdout, re.MULTILINE)
    return {rule: status for status, rule in found}


def test_a_whole_notebook_passes(book: Book) -> None:
    book.write(whole_notebook())
    for label in ("llama-baseline", "vllm-baseline"):
        book.run("--label", label, "--record")
    result = book.run("--check")
    assert result.returncode == 0, result.stdout
    assert set(statuses(result).values()) == {"PASS"}
    count = len(result.stdout.splitlines()) - 1
    assert result.stdout.splitlines()[-1] == f"{count} pass, 0 warn, 0 fail"


def test_an_empty_notebook_says_what_is_missing(book: Book) -> None:
    book.path.write_text("# Lab book\n\nNothing yet.\n")
    result = book.run("--check")
    assert result.returncode == 1
    found = statuses(result)
    assert [found[rule] for rule in ("sweep", "prefix-pair", "shared-cached", "unique-cached")] == ["FAIL"] * 4
    assert "levels c=1,5,10,20 are needed" in result.stdout and found["curve-summary"] == "WARN"


def change(label: str, c: int | None = None, **changes: Any) -> Any:
    """A change of the records of one label (at one level)."""
    return lambda r: {**r, **changes} if r["label"] == label and c in (None, r["concurrency"]) else r


def drop(*labels: str, c: int | None = None) -> Any:
    return lambda r: None if r["label"] in labels and c in (None, r["concurrency"]) else r


SHARED, UNIQUE, SLOTS8 = "llama-prefix-shared", "llama-prefix-unique", "llama-slots8"


@pytest.mark.parametrize(
    ("rule", "status", "edit", "named"),
    [
        ("sweep", "FAIL", drop("llama-baseline", "vllm-baseline", c=5), "a completed request at c=5"),
        ("sweep", "PASS", drop("llama-baseline", c=5), "vllm-baseline"),
        ("prefix-pair", "FAIL", drop(SHARED), "llama-prefix-unique has no shared-prefix partner"),
        ("prefix-pair", "FAIL", drop(UNIQUE), "llama-prefix-shared has no unique-prefix control"),
        ("prefix-pair", "FAIL", change(UNIQUE, model="other"), "model other"),
        ("prefix-pair", "FAIL", change(UNIQUE, host="other"), "host other"),
        ("prefix-pair", "FAIL", change(UNIQUE, quant="Q8_0"), "quant Q8_0"),
        ("prefix-pair", "FAIL", change(UNIQUE, max_tokens=32), "max_tokens 32"),
        ("prefix-pair", "FAIL", drop(UNIQUE, c=10), "levels 1"),
        ("shared-cached", "FAIL", change(SHARED, 10, cached_tokens_mean=600.0), f"{SHARED} c=10: 600.0 cached"),
        ("shared-cached", "FAIL", change(SHARED, 10, cached_tokens_mean=695.5), "is 50.0%, not above 50 %"),
        ("shared-cached", "FAIL", drop(SHARED), "no shared-prefix level"),
        ("unique-cached", "FAIL", change(UNIQUE, 1, cached_tokens_mean=200.0), f"{UNIQUE} c=1: 200.0 cached"),
        ("consistent", "FAIL", change("vllm-baseline", 20, failed=7),
         "c=20: completed 80 + failed 7 = 87 is not requests"),
        ("digits", "WARN", change(SLOTS8, ttft_s={"p50": 0.21, "p90": 0.31, "p99": 0.42},
                                  tpot_s={"p50": 0.011, "p90": 0.012, "p99": 0.013}), "lack"),
        ("failed-requests", "WARN", change(SLOTS8, failed=3, completed=77, requests=80), f"{SLOTS8} c=20: 3 of 80"),
        ("tokens-from-usage", "WARN", change(SLOTS8, token_counts="deltas"), f'{SLOTS8} c=20: counted from "deltas"'),
        ("tokens-from-usage", "WARN", change(SLOTS8, token_counts={"usage": 1, "deltas": 79}), "deltas"),
        ("server-settings", "WARN", change(SLOTS8, server={"slots": 8}), "the server has 8 slots, the record says 20"),
        ("server-settings", "WARN", change(SLOTS8, server={"context_per_slot": 512}), "512 tokens of context a slot"),
        ("identified", "WARN", change(SLOTS8, host="unknown", server_slots=None), "llama-slots8: host, server_slots"),
        ("same-setup", "WARN", change("llama-baseline", 20, host="other"), "levels of this label differ in host"),
        ("same-setup", "WARN", change("llama-baseline", 5, engine="vllm"), "differ in engine: llama.cpp, vllm"),
        ("cached-count", "WARN", change(SHARED, 1, cached_tokens_mean=None), "c=1: the server does not report"),
        ("cached-counter", "WARN", change(SLOTS8, cached_tokens_mean=3.0, server={"cached_tokens": 300}),
         "responses report 240 cached tokens, the server's own counter 300"),
        ("cached-counter", "PASS", change(SLOTS8, cached_tokens_mean=3.0, server={"cached_tokens": 243}), "agree"),
        ("second-engine", "WARN", drop("vllm-baseline"), "only llama-baseline (llama.cpp)"),
        ("second-engine", "WARN", drop("vllm-baseline", c=20), "only llama-baseline"),  # one request at c = 1 is none
        ("variants", "WARN", drop(SLOTS8, "llama-kv-alt"), "llama-slots8, llama-kv-alt missing"),
        ("variants", "WARN", change(SLOTS8, completed=0, failed=80), "llama-slots8 missing"),
        ("client-bound", "WARN", change(SLOTS8, client={"loop_lag_s": {"p99": 0.5}}), "llama-slots8 c=20: client"),
        ("coalesced", "WARN", change(SLOTS8, coalesced=4), "llama-slots8 c=20: 4 of 80"),
        ("interrupted", "WARN", change(SLOTS8, interrupted=True), "llama-slots8 c=20: interrupted"),
        ("rounds", "WARN", change(SLOTS8, requests=30), "llama-slots8 c=20: 30 requests, which is 1.5 rounds"),
        ("rounds", "WARN", change("vllm-baseline", 1, requests=1), "vllm-baseline c=1: 1 request, which is 1 round"),
        ("curve-summary", "WARN", lambda record: record, "no curve-summary of vllm-baseline: append it with"),
        ("format-version", "WARN", change(SLOTS8, schema=9), "format version 9"),
    ],
)  # fmt: skip
def test_each_rule(book: Book, rule: str, status: str, edit: Any, named: str) -> None:
    records = [edited for record in whole_notebook() if (edited := edit(record)) is not None]
    result = book.write(records).run("--check")
    line = next(text for text in result.stdout.splitlines() if re.match(rf"[A-Z]+  {rule}: ", text))
    assert line.startswith(status) and named in line, line
    assert result.returncode == (1 if "FAIL  " in result.stdout else 0)


def test_a_level_with_fewer_repeats_and_a_copied_repeat_are_told(book: Book) -> None:
    levels = [honest(c, seed, repeat=seed) for seed in range(3) for c in LEVELS]
    text = book.write([one for one in levels if (one["concurrency"], one["repeat"]) != (10, 2)]).run("--check").stdout
    assert "WARN  same-setup: llama-baseline c=10: 2 runs, where other levels have 3" in text
    copied = [{**levels[0], "repeat": 2} if one is levels[8] else one for one in levels]
    text = book.write(copied).run("--check").stdout
    assert re.search(
        r"FAIL  consistent: line \d+, llama-baseline c=1 and line \d+, llama-baseline c=1 are different runs", text
    )


@pytest.mark.parametrize(
    ("label", "edit", "rule", "status"),
    [
        ("llama-baseline", {}, "", "PASS"),
        ("llama-baseline", {"failed": 3, "completed": 77}, "failed-requests", "FAIL"),
        ("llama-baseline", {"token_counts": "deltas"}, "tokens-from-usage", "FAIL"),
        ("llama-baseline", {"mean_in_flight": 9.0}, "in-flight", "FAIL"),
        ("llama-baseline", {"server": {"slots": 8}}, "server-settings", "FAIL"),
        ("llama-baseline", {"within_slo": 9}, "consistent", "FAIL"),
        ("llama-baseline", {"finish_reasons": {"length": 79, "stop": 1}}, "finish", "WARN"),
        (SHARED, {"cached_tokens_mean": 100.0}, "shared-cached", "FAIL"),
        (UNIQUE, {"cached_tokens_mean": 900.0}, "unique-cached", "FAIL"),
        (SHARED, {"cached_tokens_mean": None}, "cached-count", "WARN"),
    ],
)  # fmt: skip
def test_the_check_of_one_label_speaks_of_nothing_else(
    book: Book, label: str, edit: Json, rule: str, status: str
) -> None:
    """What the lab's scripts run after a load: a broken other label and damage elsewhere are no matter."""
    level = 20 if label == "llama-baseline" else 10
    records = [change(label, level, **edit)(record) for record in whole_notebook()]
    records = [change("vllm-baseline", 20, failed=7)(record) for record in records]
    result = book.write(records, '{"arrival": "torn').run("--check", "--label", label)
    assert result.returncode == (1 if status == "FAIL" else 0), result.stdout
    found = statuses(result)
    failed = {code for code, verdict in found.items() if verdict == "FAIL"}
    assert failed <= {rule, "consistent"} and (status == "PASS" or found[rule] == status)
    assert "sweep" not in found and ("shared-cached" in found) == (label == SHARED)
    unknown = book.run("--check", "--label", "nope")
    assert unknown.returncode == 1 and unknown.stderr.count("\n") == 2  # the torn line, and the label


def test_damaged_lines_fail_with_their_numbers(book: Book) -> None:
    result = book.write(whole_notebook(), '{"arrival": "closed-loop", "ba').run("--check")
    assert result.returncode == 1 and "FAIL  damaged-lines: line 18: " in result.stdout


def test_no_cached_count_anywhere_is_a_warning_not_a_failure(book: Book) -> None:
    records = [change(SHARED, cached_tokens_mean=None)(record) for record in whole_notebook()]
    result = book.write(records).run("--check")
    assert statuses(result)["shared-cached"] == "WARN" and result.returncode == 0


def test_a_version_1_zero_cached_count_is_unknown(book: Book) -> None:
    text = VERSION_1.read_text(encoding="utf-8")
    edited = re.sub(r'"cached_tokens_mean": 1284\.\d', '"cached_tokens_mean": 0.0', text)
    assert edited != text
    book.path.write_text(edited, encoding="utf-8")
    result = book.run("--check")
    assert statuses(result)["shared-cached"] == "WARN" and statuses(result)["cached-count"] == "WARN"


def test_several_pairs_are_each_judged(book: Book) -> None:
    vllm: dict[str, Any] = {"engine": "vllm", "model": "awq", "run_id": "p"}
    extra = [prefix("v-u", "unique-prefix", 1, 0.01, **vllm), prefix("v-s", "shared-prefix", 1, 0.4, **vllm)]
    result = book.write(whole_notebook() + extra).run("--check")
    assert (
        "PASS  prefix-pair: llama-prefix-shared with control llama-prefix-unique; v-s with control v-u" in result.stdout
    )
    assert "FAIL  shared-cached: v-s c=1" in result.stdout
    alone = book.write(whole_notebook() + extra[1:]).run("--check")
    assert statuses(alone)["prefix-pair"] == "WARN"


def test_several_notebooks_get_a_table(book: Book, tmp_path: Path) -> None:
    others = [honest(c, 50) for c in LEVELS]
    (tmp_path / "class" / "deep").mkdir(parents=True)
    for name, records in (("class/good.md", whole_notebook()), ("class/deep/bad.md", others)):
        Book(book.run_program, tmp_path / name).write(records)
    (tmp_path / "class" / "prose.md").write_text("# no record")
    result = book.run("--check", "class")
    assert result.returncode == 1
    table = result.stdout.split("\n\n")[0].splitlines()
    assert table[0].split()[:2] == ["notebook", "verdict"] and len(table) == 4
    assert table[1].split()[:4] == ["class/deep/bad.md", "FAIL", "c=20", "5-10"]
    assert table[1].split()[6:] == ["llama-baseline", "prefix-pair", "shared-cached", "unique-cached"]
    assert table[2].split()[:2] == ["class/good.md", "WARN"] and table[3].split()[-1] == "vllm-baseline"
    assert result.stdout.count("==> ") == 1 and book.run("--check", "class", "--details").stdout.count("==> ") == 2
    assert book.run("--check", "class/good.md", "class/good.md").returncode == 0, "one file, named twice"
    unread = book.run("--check", "class/good.md", "nowhere.md", "class/deep/bad.md")
    assert unread.returncode == 2 and "cannot read nowhere.md" in unread.stdout and "1 UNREADABLE" in unread.stdout
    document = json.loads(book.run("--check", "class", "--json").stdout)
    assert [item["verdict"] for item in document["files"]] == ["FAIL", "WARN"]
    assert [item["label"] for item in document["files"][1]["baselines"]] == ["llama-baseline", "vllm-baseline"]
    rows = list(csv.DictReader(io.StringIO(book.run("--check", "class", "--csv").stdout)))
    assert [(row["notebook"], row["verdict"]) for row in rows] == [
        ("class/deep/bad.md", "FAIL"),
        ("class/good.md", "WARN"),
    ]
    empty = book.run("--check", "class/deep/..", "/proc/self/fdinfo")
    assert empty.returncode == 2 and "no *.md below /proc/self/fdinfo holds a level record" in empty.stderr


def test_lines_that_two_notebooks_share_are_named_with_both_places(book: Book, tmp_path: Path) -> None:
    renamed: Json = {
        "label": "mine",
        "host": "my laptop",
        "run_id": "20260101T000000-mine",
        "recorded_at": "2026-01-01T00:00:00Z",
    }
    book.write([honest(c) for c in LEVELS])
    Book(book.run_program, tmp_path / "copy.md").write([honest(c, **renamed) for c in LEVELS])
    result = book.run("--check", "labbook.md", "copy.md")
    assert result.returncode == 1 and result.stdout.count("FAIL  copied: ") == 2
    assert "copy.md line 3, mine c=1 has the figures of labbook.md line 3, llama-baseline c=1" in result.stdout


# ------------------------------------------------------------------------------------------------- errors and plumbing


@pytest.mark.parametrize(
    ("args", "code", "words"),
    [
        (("--label", "nope"), 1, "no label 'nope' in labbook.md; it holds: llama-baseline"),
        (("--compare", "llama-baseline", "nope"), 1, "no label 'nope'"),
        (("--list", "--labbook", "absent.md"), 2, "cannot read absent.md: No such file"),
        (("--check", "--labbook", "absent.md"), 2, "cannot read absent.md"),
        (("--check", "--raw", "absent.jsonl"), 2, "cannot read absent.jsonl"),
        (("--record",), 2, "--record needs --label"),
        (("--raw", "x"), 2, "--raw needs --check"),
        (("--markdown",), 2, "--markdown needs --label or --compare"),
        (("labbook.md",), 2, "unrecognized arguments: labbook.md; name the notebook with --labbook labbook.md"),
        (("--runs",), 2, "--runs needs --label"),
        (("--label", "x", "--record", "--run", "y"), 2, "--record needs --label L alone"),
        (("--check", "a.md", "b.md", "--label", "x"), 2, "--check --label speaks of one notebook"),
        (("--list", "--check"), 2, "--list and --check do not go together"),
        (("--label", "x", "--compare", "a", "b"), 2, "--compare and --label do not go together"),
        (("--label", "nope", "--check"), 1, "no label 'nope'"),
        (("--json", "--csv"), 2, "not allowed with argument"),
        (("--compare", "x"), 2, "expected 2 arguments"),
        (("--lable", "x"), 2, "unrecognized arguments: --lable"),
        (("--labb", "x"), 2, "unrecognized arguments: --labb"),
    ],
)
def test_errors_are_one_clear_line(book: Book, args: tuple[str, ...], code: int, words: str) -> None:
    result = book.write([honest(5)]).run(*args)
    assert result.returncode == code
    assert words in result.stderr and result.stderr.count("\n") == 1 and result.stderr.startswith("summarise_load.py: ")
    assert result.stdout == ""


def test_a_notebook_without_records_is_not_a_missing_one(book: Book) -> None:
    book.path.write_text("# empty\n")
    result = book.run("--label", "x")
    assert result.returncode == 1 and "no level records in labbook.md" in result.stderr
    listed = book.run("--list")
    assert listed.returncode == 1 and listed.stdout == "==> 0 label(s) in labbook.md\n" and listed.stderr


def test_utf_16_is_refused_clearly(book: Book) -> None:
    book.path.write_text("# Lab\n", encoding="utf-16")
    result = book.run("--list")
    assert result.returncode == 2 and "UTF-16" in result.stderr


def test_damage_is_told_beside_every_view(book: Book) -> None:
    book.write([honest(5)], '{"arrival": "clo', json.dumps(honest(10, schema=7)))
    result = book.run("--label", "llama-baseline")
    assert result.returncode == 0
    assert "labbook.md line 4: not valid JSON" in result.stderr and "line 5: format version 7" in result.stderr


def test_hostile_texts_cannot_act_on_the_terminal(book: Book) -> None:
    book.write([honest(5, label="a\x1b[31m\nb", host="\x1b]0;x\x07", engine="\ud800", first_error="\x9b5m", failed=1)])
    for args in (("--list",), ("--check",), ("--label", "a\x1b[31m\nb"), ("--label", "a\x1b[31m\nb", "--markdown")):
        result = book.run(*args, env={"PYTHONIOENCODING": "ascii"})
        assert result.stdout and not re.search(r"[^\x20-\x7e\n]", result.stdout), args


def test_a_reader_that_leaves_early_is_no_error(book: Book) -> None:
    book.write([honest(5, label=f"label-{number}", run_id=str(number)) for number in range(2000)])
    command = f"'{sys.executable}' '{ROOT / 'summarise_load.py'}' --list --json; echo status $? >&2"
    result = subprocess.run(
        ["bash", "-c", f"( {command} ) | head -n 1"],
        cwd=book.path.parent,
        capture_output=True,
        encoding="utf-8",
        check=False,
    )
    assert result.stdout == "{\n" and result.stderr == "status 0\n"


def on_a_terminal(folder: Path, env: dict[str, str]) -> str:
    """What --label prints on a pseudo terminal."""
    leader, follower = pty.openpty()
    environment = {key: value for key, value in os.environ.items() if key != "NO_COLOR"}
    process = subprocess.Popen(
        [sys.executable, ROOT / "summarise_load.py", "--label", "llama-baseline"],
        cwd=folder,
        stdout=follower,
        stderr=follower,
        env={**environment, "TERM": "xterm", **env},
    )
    os.close(follower)
    text = b""
    while True:
        try:
            part = os.read(leader, 65536)
        except OSError:  # Linux says EIO where the other end is closed
            break
        if not part:
            break
        text += part
    os.close(leader)
    assert process.wait() == 0
    return text.decode()


def test_colour_only_on_a_terminal_and_never_with_no_color(book: Book) -> None:
    book.write([exact(c, slo_tpot_s=0.04) for c in LEVELS])
    coloured = on_a_terminal(book.path.parent, {})
    assert "\x1b[32m" in coloured and "\x1b[31m" in coloured
    for env in ({"NO_COLOR": "1"}, {"NO_COLOR": ""}, {"TERM": "dumb"}):
        assert "\x1b" not in on_a_terminal(book.path.parent, env)
    assert "\x1b" not in book.run("--label", "llama-baseline").stdout


def test_help_is_complete(book: Book) -> None:
    text = book.run("--help").stdout
    for option in ("labbook", "list", "label", "compare", "check", "record", "markdown", "json", "csv", "raw", "runs",
                   "run ID", "details", "version"):  # fmt: skip
        assert f"--{option}" in text
    for word in ("Examples:", "Exit codes:", "%XX", "scaling", "knee", "operating point", "can and cannot see"):
        assert word in text
    assert book.run("--version").stdout == f"summarise_load.py {sl.TOOL_VERSION}\n"


def test_it_runs_alone(book: Book, tmp_path: Path) -> None:
    alone = tmp_path / "alone"
    alone.mkdir()
    (alone / "summarise-load.py").write_bytes((ROOT / "summarise_load.py").read_bytes())
    result = subprocess.run(
        [sys.executable, "-I", "summarise-load.py", "--help"], cwd=alone, capture_output=True, check=False
    )
    assert result.returncode == 0 and b"Examples:" in result.stdout


def test_a_label_as_written_wins_over_one_as_listed(book: Book) -> None:
    book.write([honest(1, label="my run"), honest(5, label="my%20run")])
    assert "\nmy%2520run: " in book.run("--label", "my%20run").stdout
    assert "\nmy%2520run: " in book.run("--label", "my%2520run").stdout


# ------------------------------------------------------------------------- odd places to read from and to write to


def shell(book: Book, *args: str, redirect: str) -> subprocess.CompletedProcess[str]:
    """The program under a shell that redirects its output."""
    if "/dev/full" in redirect and not os.path.exists("/dev/full"):
        pytest.skip("no /dev/full here")
    command = f'exec "$@" {redirect}'
    result = subprocess.run(
        ["sh", "-c", command, "sh", sys.executable, str(ROOT / "summarise_load.py"), *args],
        cwd=book.path.parent,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        encoding="utf-8",
        timeout=60,
    )
    assert "Traceback" not in result.stderr and "Exception ignored" not in result.stderr
    return result


@pytest.mark.parametrize(
    "args", [["--list"], ["--label", "llama-baseline", "--json"], ["--check"], ["--help"], ["--version"]]
)
@pytest.mark.parametrize(("redirect", "why"), [(">&-", "standard output is closed"), (">/dev/full", "No space left")])
def test_output_that_cannot_be_written_is_said(book: Book, args: list[str], redirect: str, why: str) -> None:
    result = shell(book.write([exact(c) for c in LEVELS]), *args, redirect=redirect)
    assert result.returncode == 1 and result.stderr.count("\n") == 1
    assert result.stderr.startswith("summarise_load.py: cannot write the output") and why in result.stderr


@pytest.mark.parametrize("redirect", ["2>&-", "2>/dev/full", ">&- 2>&-", ">/dev/full 2>/dev/full"])
@pytest.mark.parametrize(
    ("args", "code"), [(["--bogus"], 2), (["--labbook", "gone.md"], 2), (["--label", "gone"], 1)], ids=str
)
def test_the_exit_code_is_right_where_nothing_can_be_said(
    book: Book, args: list[str], code: int, redirect: str
) -> None:
    assert shell(book.write([exact(1)]), *args, redirect=redirect).returncode == code


def test_closed_standard_error_does_not_move_messages_to_the_output(book: Book) -> None:
    result = shell(book.write([exact(1)], json.dumps(exact(1), sort_keys=True)), "--list", "--json", redirect="2>&-")
    assert result.returncode == 0 and json.loads(result.stdout)["kind"] == "list"


@pytest.mark.parametrize(
    "args",
    [["--labbook", "{}", "--list"], ["--label", "x", "--labbook", "{}"], ["--check", "--raw", "{}"]],
    ids=str,
)
@pytest.mark.parametrize("kind", ["pipe", "/dev/zero", "folder"])
def test_what_is_no_file_is_refused_before_it_is_read(book: Book, args: list[str], kind: str) -> None:
    path = book.write([exact(1)]).path.parent / "a thing"
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    else:
        path.symlink_to(kind)
    result = book.run(*[arg.replace("{}", str(path)) for arg in args])
    assert result.returncode == 2 and f"cannot read {path}: it is a " in result.stderr and "not a file" in result.stderr


def test_a_key_press_that_interrupts_is_quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    for name in ("build_parser", "run", "write_out"):
        with monkeypatch.context() as patch:
            patch.setattr(sl, name, interrupt)
            assert sl.main(["--list"]) == 130


def test_what_every_request_carried_is_compared(book: Book) -> None:
    thinking = {"chat_template_kwargs": {"enable_thinking": False}}
    book.write([exact(1, extra_body=None), exact(1, label="b", run_id="b", extra_body=thinking)])
    told = 'extra_body differs: unknown and {"chat_template_kwargs": {"enable_thinking": false}}'
    assert told in book.run("--compare", "llama-baseline", "b").stdout.splitlines()
    said = json.loads(book.run("--compare", "llama-baseline", "b", "--json").stdout)["statements"]
    assert {"name": "extra_body", "a": None, "b": thinking} in [item["values"] for item in said]


def test_of_several_notebooks_each_remark_names_its_file(book: Book) -> None:
    line = json.dumps(exact(1), sort_keys=True)
    one = book.path.parent / "one.md"
    one.write_text(f"{line}\n{line}\n")
    two = book.path.parent / "two.md"
    two.write_text(f"{line}\n\n{line}\n")
    result = book.run("--check", one, two)
    assert result.stderr.splitlines() == [
        f"summarise_load.py: {one} line 2: the same line as line 1: counted once",
        f"summarise_load.py: {two} line 3: the same line as line 1: counted once",
    ]


def works(python: str) -> bool:
    """Whether this is a Python that runs (a shim of pyenv may name a version that is not chosen)."""
    return subprocess.run([python, "-c", ""], capture_output=True, check=False).returncode == 0


VERSIONS = ("3.9", "3.10", "3.13")
ON_PATH = [path for version in VERSIONS if (path := shutil.which(f"python{version}"))]
OF_PYENV = [str(path) for version in VERSIONS for path in Path.home().glob(f".pyenv/versions/{version}.*/bin/python")]
OTHER_PYTHONS = list(filter(works, [*ON_PATH, *OF_PYENV]))


@pytest.mark.parametrize("notebook", [VERSION_1, ENGINES], ids=lambda path: path.name)
def test_every_python_prints_the_same_bytes(notebook: Path, tmp_path: Path) -> None:
    """Python 3.9 parses fewer dates than 3.11 (`+0000`), and its sums, errors and help differ."""
    if not OTHER_PYTHONS:
        pytest.skip("no other Python here")
    path = tmp_path / "labbook.md"
    basic_offsets = re.sub(r'(T\d\d:\d\d:\d\d[+-]\d\d):(\d\d")', r"\1\2", notebook.read_text("utf-8"))
    path.write_text(basic_offsets + '{"arrival": "x", }\n', encoding="utf-8")
    label = re.findall(r"^\S+", subprocess.run([sys.executable, ROOT / "summarise_load.py", "--labbook", path],
                       capture_output=True, encoding="utf-8", check=True).stdout, re.MULTILINE)[1]  # fmt: skip
    views = (["--list", "--json"], ["--label", label], ["--label", label, "--json"], ["--check", "--json"],
             ["--compare", label, label, "--json"], ["--label", label, "--csv"])  # fmt: skip
    for view in views:
        printed = []
        for python in (sys.executable, *OTHER_PYTHONS):
            command = [python, ROOT / "summarise_load.py", "--labbook", path, *view]
            run = subprocess.run(command, capture_output=True, env={**os.environ, "PYTHONIOENCODING": "utf-8"})
            printed.append((run.returncode, run.stdout, run.stderr))
        assert len(set(printed)) == 1, (view, OTHER_PYTHONS)
