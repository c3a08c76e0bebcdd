"""Reading a notebook: records in prose, damaged lines named, versions mixed, and a line appended without harm."""

from __future__ import annotations

import copy
import errno
import fcntl
import json
import multiprocessing
import os
import random
import re
import sys
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from honest_levels import Load, decimals, level_record, simulate, version_1_record
from hypothesis import given, settings
from hypothesis import strategies as st

import summarise_load as sl

LOAD = Load(requests=24)
RECORD = level_record(LOAD, simulate(LOAD, random.Random(1)), decimals(6), decimals(4))
OLD = version_1_record(LOAD, simulate(LOAD, random.Random(1)), decimals(6), decimals(4))


def line(**changes: Any) -> str:
    return json.dumps({**RECORD, **changes}, sort_keys=True)


def without(name: str, **changes: Any) -> str:
    data = {**RECORD, **changes}
    del data[name]
    return json.dumps(data, sort_keys=True)


@pytest.fixture
def read(tmp_path: Path) -> Any:
    """Write bytes or text as a notebook and read it."""

    def reader(content: bytes | str) -> sl.Notebook:
        path = tmp_path / "labbook.md"
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return sl.read_notebook(str(path))

    return reader


def found(book: sl.Notebook) -> list[int]:
    return [record.c for record in book.records]


def damaged(book: sl.Notebook) -> list[int]:
    return [remark.line for remark in book.damaged]


# -------------------------------------------------------------------------------------------- where a record may stand


@pytest.mark.parametrize("prefix", ["", "    ", "\t", "- ", "* ", "> ", "> - ", "  > > ", "\ufeff", "\u00a0", ">"])
@pytest.mark.parametrize("end", ["\n", "\r\n", "  \n", ""])
def test_prefixes_and_line_ends_do_not_hide_a_record(read: Any, prefix: str, end: str) -> None:
    # https://github.com/langgenius/dify/issues/41958 https://github.com/microsoft/autogen/pull/7889
    book = read(f"# Lab\n{prefix}{line(concurrency=5)}{end}")
    assert found(book) == [5] and not book.damaged


def test_json_inside_prose(read: Any) -> None:
    """Public kind: records in fences and indents, braces and U+2028 in text, hostile lines.
    https://github.com/langgenius/dify/issues/42451 https://github.com/datalad/datalad/issues/3523"""
    nines = "9" * 5000
    book = read(
        f"```json\r\n{line(concurrency=1)}\r\n```\r\n"
        f"    {json.dumps({**RECORD, 'concurrency': 2, 'note': 'has ``` and } and  in it'}, ensure_ascii=False)}  \n"
        'we saw {odd} results [1], see {"rec": below}\n{ not json at all\n123\ntrue\n[1]\n{"other":"tool","c":3}\n'
        + line(concurrency=1).replace('"concurrency": 1', f'"concurrency": {nines}')
        + f'\n{{"lab": "{sl.LAB}", "x":{"[" * 100000}\n'
    )
    assert found(book) == [1, 2]
    assert damaged(book) == [11, 12]
    assert "5000" in book.damaged[0].text


def test_raw_line_separators_in_a_text_do_not_split_a_line(read: Any) -> None:
    for separator in ("\u2028", "\u2029", "\x85", "\x0b", "\x0c"):
        text = json.dumps({**RECORD, "host": f"a{separator}b"}, ensure_ascii=False)
        text = text if separator > " " else text.replace(separator, json.dumps(separator)[1:-1])
        assert found(read(text)) == [10], repr(separator)


def test_torn_lines_are_named_and_hide_no_other(read: Any) -> None:
    """Public kind: a torn last line swallows the next record, or its cut character fails the whole file.
    https://github.com/Tracer-Cloud/opensre/issues/5750"""
    whole = line(concurrency=1).encode()
    cut_character = line(concurrency=2).encode()[:-1] + b', "note":"caf\xc3'
    book = read(
        b"# Labbook\n" + whole + b"\n" + cut_character + b"\n" + whole.replace(b"bench", b"other") + b"\n" + whole[:90]
    )
    assert found(book) == [1, 1]
    assert damaged(book) == [3, 5]


@settings(deadline=None)
@given(cut=st.integers(2, len(line()) - 1))
def test_every_cut_of_a_line_is_noticed(cut: int) -> None:
    """What load_test.py writes begins with "arrival"; version 1 lines began with "base_url"."""
    assert sl.looks_like_ours(line()[:cut])
    assert sl.looks_like_ours(json.dumps(OLD, sort_keys=True)[:cut])


def test_two_records_glued_together_are_damage(read: Any) -> None:
    book = read(line() + line(concurrency=5) + "\n" + line(concurrency=20))
    assert found(book) == [20]
    assert "more text after the record" in book.damaged[0].text


@pytest.mark.parametrize("text", ["NaN", "Infinity", "-Infinity", "1e999", "-1e999"])
def test_numbers_that_are_none_are_refused(read: Any, text: str) -> None:
    """Public kind: NaN in the file defeats every comparison.
    https://github.com/redis/memtier_benchmark/issues/271"""
    bad = re.sub(r'"wall_s": [0-9.]+', f'"wall_s": {text}', line())
    extra = line()[:-1] + f', "unread": {text}}}'
    book = read(f"\n{bad}\n{extra}\n{line(concurrency=5)}\n")
    assert found(book) == [5]
    assert damaged(book) == [2, 3]
    assert all(text.strip("-") in remark.text for remark in book.damaged)


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("concurrency", "10", "concurrency"),
        ("concurrency", True, "concurrency"),
        ("concurrency", 0, "concurrency"),
        ("concurrency", None, "concurrency"),
        ("concurrency", 2.5, "whole"),
        ("wall_s", "12.5", "wall_s"),
        ("completed", False, "completed"),
        ("ttft_s", [0.1], "ttft_s"),
        ("ttft_s", {"p50": "0.2"}, "ttft_s is"),
        ("tpot_s", {"p90": True}, "an object of numbers"),
        ("finish_reasons", {"length": "40"}, "finish_reasons"),
        ("finish_reasons", ["length"], "finish_reasons"),
        ("label", 7, "label"),
        ("server", 3, "server"),
    ],
)
def test_a_value_of_the_wrong_kind_is_damage(read: Any, name: str, value: Any, words: str) -> None:
    book = read(line(**{name: value}))
    assert found(book) == [] and words in book.damaged[0].text


def test_null_and_absent_figures_are_unknown(read: Any) -> None:
    book = read(line(wall_s=None, ttft_s=None, server_slots=0) + "\n" + without("tpot_s", concurrency=5))
    first, second = book.records
    assert first.number("wall_s") is None and first.number("ttft_s.p50") is None
    assert first.setting("server_slots") is None and second.number("tpot_s.p50") is None


def test_a_key_that_stands_twice_is_damage(read: Any) -> None:
    book = read(line()[:-1] + ', "failed": 0}')
    assert "duplicate key 'failed'" in book.damaged[0].text


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be", "utf-32"])
def test_utf_16_is_said(read: Any, encoding: str) -> None:
    with pytest.raises(sl.UserError, match=r"UTF-(16|32) text.*UTF-8"):
        read(("# Lab\n" + line()).encode(encoding))


def test_a_utf_16_line_appended_to_utf_8_is_damage(read: Any) -> None:
    """Windows PowerShell's >> does this."""
    book = read(
        b"# Lab\n" + line(concurrency=5).encode() + b"\n" + line().encode("utf-16-le") + "\n".encode("utf-16-le")
    )
    assert found(book) == [5] and damaged(book) == [3] and "UTF-16" in book.damaged[0].text


def test_a_giant_line_hides_nothing(read: Any) -> None:
    giant = json.dumps({"lab": sl.LAB, "x": "y" * (3 * sl.MAX_LINE_BYTES)})
    book = read(giant + "\n" + "z" * (2 * sl.MAX_LINE_BYTES) + "\n" + line(concurrency=5) + "\n")
    assert found(book) == [5] and damaged(book) == [1]


def test_a_record_that_is_not_alone_on_its_line_is_damage(read: Any) -> None:
    """grep -n output, a table cell, or a record that an editor wrapped."""
    halves = line().split('"lab"')
    book = read("12:" + line() + "\n| " + line() + " |\n" + halves[0] + '\n"lab"' + halves[1] + "\n")
    assert found(book) == [] and damaged(book) == [1, 2, 3, 4]


def test_prose_about_the_lab_is_not_damage(read: Any) -> None:
    book = read(f"Lines carry {sl.LAB} as their lab.\nThe `wall_s` is {{in seconds}}.\n{{\n")
    assert book == sl.Notebook(book.path)


def test_other_labs_lines_are_left_out_and_named(read: Any) -> None:
    book = read(line(lab="part-10/other") + "\n" + json.dumps({"lab": "part-10/other", "x": 1}))
    assert not book.records and [remark.line for remark in book.remarks] == [1]


@pytest.mark.parametrize("schema", [3, 0, "2", None, True])
def test_an_unknown_version_is_named_not_guessed(read: Any, schema: Any) -> None:
    book = read(line(schema=schema) + "\n" + line(concurrency=5))
    assert found(book) == [5] and not book.damaged
    assert book.unknown[0].line == 1 and json.dumps(schema) in book.unknown[0].text


def test_identical_lines_count_once_with_a_note(read: Any) -> None:
    book = read(f"{line()}\n> {line()}\r\n")
    assert found(book) == [10] and "line 1" in book.remarks[0].text


@pytest.mark.parametrize("trouble", ["missing", "folder"])
def test_what_cannot_be_read_is_said(tmp_path: Path, trouble: str) -> None:
    with pytest.raises(sl.UserError, match="cannot read"):
        sl.read_notebook(str(tmp_path / "no.md" if trouble == "missing" else tmp_path))


@settings(deadline=None)
@given(st.binary(max_size=300))
def test_no_bytes_make_the_reader_fail(tmp_path_factory: pytest.TempPathFactory, content: bytes) -> None:
    path = tmp_path_factory.mktemp("fuzz") / "book.md"
    path.write_bytes(b"x\n" + content + b"\n" + line(concurrency=5).encode() + b"\n")
    book = sl.read_notebook(str(path))
    assert found(book)[-1:] == [5]


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


FIELDS = [*RECORD, "new", "ttft_s.p50", "tpot_s.p50", "tpot_s.p90", "e2e_s.mean", "finish_reasons.length", "client.x",
          "client.cpu_fraction", "client.loop_lag_s", "client.loop_lag_s.p99", "client.floor_us_per_delta",
          "server.peak_deferred", "server.preemptions", "ttft_split_s.queue", "ttft_split_s.queue.p50"]  # fmt: skip


@settings(deadline=None)
@given(path=st.sampled_from(FIELDS), value=JSON_VALUES | st.sampled_from([1e-320, 1e-200, 1e14, 1e200, 10**299, -1, 0]))
def test_no_value_of_any_field_makes_a_view_fail(
    tmp_path_factory: pytest.TempPathFactory, path: str, value: Any
) -> None:
    """Every view either shows a record with this value or the line is named as unusable."""
    changed = {**copy.deepcopy(RECORD), "concurrency": 20, "run_id": "other"}
    *parents, last = path.split(".")
    target = changed
    for key in parents:
        target[key] = target[key] if isinstance(target.get(key), dict) else {}
        target = target[key]
    target[last] = value
    file = tmp_path_factory.mktemp("fuzz") / "book.md"
    file.write_text(f"{line()}\n{json.dumps(changed)}\n{line(concurrency=1)}\n", encoding="utf-8")
    book = sl.read_notebook(str(file))
    assert len(book.records) >= 2
    sl.check_lines(sl.notebook_verdict(book, sl.check(book)))
    for curve in book.curves.values():
        document = sl.curve_document(curve, book)
        sl.label_text(document, colour=True)
        sl.label_markdown(document)
        json.loads(sl.to_json(document), parse_constant=pytest.fail)
        sl.to_csv(sl.level_rows(document))
        if curve.usable:
            sl.compare_text(sl.compare_document(book, curve, curve), markdown=False)
            json.dumps(sl.summary_record(curve, datetime.now()), allow_nan=False)
    sl.list_text(sl.list_document(book)).encode("utf-8", "backslashreplace")


# ---------------------------------------------------------------------------------------------------- which lines count


def levels(book: sl.Notebook, label: str = "llama-baseline") -> list[tuple[int, list[int]]]:
    """(c, lines that count) of a label."""
    curve = book.curves[label]
    return [(level.c, [record.line for record in level.runs]) for level in curve.levels]


def test_the_newest_run_of_each_level_counts(read: Any) -> None:
    book = read(
        "\n".join(
            [
                line(concurrency=20, run_id="b", recorded_at="2026-11-30T10:00:00+01:00"),
                line(concurrency=20, run_id="a", recorded_at="2026-11-29T10:00:00+01:00"),
                line(concurrency=5, run_id="a"),
            ]
        )
    )
    assert levels(book) == [(5, [3]), (20, [1])]


def test_equal_times_leave_it_to_the_run_id_then_to_the_place(read: Any) -> None:
    assert levels(read("\n".join([line(run_id="r2"), line(run_id="r1")]))) == [(10, [1])]
    undated = [line(run_id="r2", recorded_at=None), line(run_id="r1", recorded_at=None)]
    assert levels(read("\n".join(undated))) == [(10, [1])]


def test_times_are_compared_across_offsets(read: Any) -> None:
    book = read(
        line(run_id="x", recorded_at="2026-11-29T12:00:00+02:00")
        + "\n"
        + line(run_id="y", recorded_at="2026-11-29T11:00:00+00:00")
    )
    assert levels(book) == [(10, [2])]


@pytest.mark.parametrize(
    ("text", "instant"),
    [
        ("2026-12-04T22:20:46+0000", 1796422846.0), ("2026-12-04T22:20:46+00:00", 1796422846.0),
        ("2026-12-04T22:20:46Z", 1796422846.0), ("2026-12-04 23:20:46+01", 1796422846.0),
        ("2026-12-05T03:50:46+0530", 1796422846.0),
        ("2026-12-04T22:20:46.5-00:00", 1796422846.5), ("2026-12-04T22:20", 1796422800.0),
        ("2026-13-04T22:20:46Z", None), ("2026-12-04", None), ("yesterday", None), (1796422846, None), (None, None),
    ],
)  # fmt: skip
def test_times_in_every_form_that_a_clock_writes(text: Any, instant: float | None) -> None:
    assert sl.parse_instant(text) == instant


def test_a_setting_has_one_form(read: Any) -> None:
    """20 and 20.0 slots, 2 and 2.0 seconds, "unknown" and nothing, are no differences between levels."""
    texts = [line(concurrency=5).replace('"server_slots": 20', '"server_slots": 20.0'),
             line(concurrency=10.0, slo_ttft_s=2, host="unknown"),
             line(concurrency=20, host=None, extra_body={})]  # fmt: skip
    curve = read("\n".join(texts).replace('"bench box"', "null")).curves["llama-baseline"]
    assert [level.c for level in curve.levels] == [5, 10, 20] and curve.slots == 20
    assert all(isinstance(level.setting("server_slots"), int) for level in curve.levels)
    assert sl.mixed_settings(curve) == []


def test_repeats_of_the_newest_run_stand_together(read: Any) -> None:
    rows = [line(run_id="a", repeat=0, wall_s=9.0)] + [line(run_id="b", repeat=i, wall_s=1.0 + i) for i in (2, 0, 1)]
    book = read("\n".join(rows))
    assert levels(book) == [(10, [3, 4, 2])]
    level = book.curves["llama-baseline"].levels[0]
    assert level.median("wall_s") == 2.0 and level.range("wall_s") == (1.0, 3.0)
    assert level.median("requests") == 24


def test_of_version_1_lines_the_last_counts(read: Any) -> None:
    old = json.dumps(OLD)
    later = json.dumps({**OLD, "recorded_at": "2026-11-28T10:00:00+01:00"})
    assert levels(read(f"{old}\n{later}")) == [(10, [2])]


def test_versions_mix_in_one_label(read: Any) -> None:
    new = line(run_id="a", recorded_at="2026-11-29T12:00:00+01:00")
    old = json.dumps({**OLD, "recorded_at": "2026-11-29T11:00:00+01:00"})
    assert levels(read(f"{new}\n{old}")) == [(10, [1])]
    late = json.dumps({**OLD, "recorded_at": "2026-11-29T13:00:00+01:00"})
    assert levels(read(f"{late}\n{new}")) == [(10, [1])]
    curve = read(f"{new}\n{json.dumps({**OLD, 'concurrency': 5})}").curves["llama-baseline"]
    assert sum("version 1" in remark for remark in curve.remarks) == 1


def test_an_interrupted_line_never_hides_a_whole_one(read: Any) -> None:
    whole = line(run_id="a", recorded_at="2026-11-29T10:00:00+01:00")
    cut = line(run_id="b", recorded_at="2026-11-30T10:00:00+01:00", interrupted=True)
    book = read(f"{whole}\n{cut}\n{line(concurrency=20, interrupted=True)}")
    assert levels(book) == [(10, [1]), (20, [3])]
    curve = book.curves["llama-baseline"]
    assert [level.c for level in curve.usable] == [10]
    assert sl.list_text(sl.list_document(book)).split("levels ")[1].startswith("10 interrupted 20")


def test_lines_of_one_repeat_that_differ_are_told(read: Any) -> None:
    curve = read(f"{line(wall_s=1.0)}\n{line(wall_s=2.0)}").curves["llama-baseline"]
    assert curve.levels[0].median("wall_s") == 2.0
    assert any("lines 1 and 2" in remark for remark in curve.remarks)


def test_version_1_zeros_are_unknown(read: Any) -> None:
    zeros = dict.fromkeys(("p50", "p90", "p99", "mean"), 0.0)
    level = read(json.dumps({**OLD, "ttft_s": zeros, "tpot_s": zeros})).curves["llama-baseline"].levels[0]
    assert level.median("ttft_s.p50") is None and level.median("tpot_s.p90") is None
    same = {**OLD, "schema": 2, "ttft_s": zeros}
    assert read(json.dumps(same)).curves["llama-baseline"].levels[0].median("ttft_s.p50") == 0.0


# --------------------------------------------------------------------------------------------------- appending a line


def test_a_file_that_does_not_end_in_a_newline_gets_one(tmp_path: Path) -> None:
    path = tmp_path / "book.md"
    path.write_bytes(b"torn {")
    sl.append_line(str(path), '{"a": 1}')
    sl.append_line(str(path), '{"b": 2}')
    assert path.read_bytes() == b'torn {\n{"a": 1}\n{"b": 2}\n'
    empty = tmp_path / "empty.md"
    empty.touch()
    sl.append_line(str(empty), "{}")
    assert empty.read_bytes() == b"{}\n"


def test_an_appended_line_is_flushed_to_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flushed: list[int] = []
    monkeypatch.setattr(os, "fsync", flushed.append)
    sl.append_line(str(tmp_path / "book.md"), "{}")
    assert len(flushed) == 1


def test_a_file_system_without_locks_still_gets_the_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("summarise_load.fcntl.flock", refuse)
    sl.append_line(str(tmp_path / "book.md"), '{"a": 1}')
    assert (tmp_path / "book.md").read_text() == '{"a": 1}\n'


@pytest.mark.skipif(not os.path.exists("/dev/null"), reason="no /dev/null here")
def test_what_is_no_file_is_not_flushed_to_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """fsync on a terminal or a pipe is an error, though the line was taken."""
    flushed: list[int] = []
    monkeypatch.setattr(os, "fsync", flushed.append)
    sl.append_line("/dev/null", "{}")
    assert flushed == []


def write_many(path: str, name: str) -> None:
    for number in range(50):
        sl.append_line(path, json.dumps({"writer": name, "number": number, "pad": "x" * 9000}))


def test_two_writers_at_once_lose_nothing(tmp_path: Path) -> None:
    """Public kind: record and newline written apart interleave between processes.
    https://github.com/tinyhumansai/opencompany/pull/43"""
    path = tmp_path / "book.md"
    writers = [multiprocessing.Process(target=write_many, args=(str(path), name)) for name in "ab"]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    rows = [json.loads(text) for text in path.read_text().splitlines()]
    assert sorted((row["writer"], row["number"]) for row in rows) == [(w, n) for w in "ab" for n in range(50)]


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full here")
def test_a_line_that_cannot_be_stored_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(sl.ResultError, match=r"cannot append to /dev/full.*standard output"):
        sl.append_record("/dev/full", {"record": "curve-summary"})
    assert capsys.readouterr().out == '{"record": "curve-summary"}\n'


def test_a_write_that_stops_half_way_is_a_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "book.md"
    path.touch()
    write = os.write
    monkeypatch.setattr(os, "write", lambda handle, data: write(handle, data[:5]))
    with pytest.raises(OSError, match="only a part"):
        sl.append_line(str(path), '{"a": 1}')
    assert path.read_bytes() == b"", "half a record would be damage"
    monkeypatch.undo()
    sl.append_line(str(path), '{"b": 2}')
    assert path.read_bytes() == b'{"b": 2}\n'


def test_a_lock_that_another_process_keeps_is_not_waited_for_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "book.md"
    monkeypatch.setattr(sl, "LOCK_WAIT_S", 0.05)
    with path.open("wb") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(sl.ResultError, match=r"locked for 0\.05 s; the line is on standard output"):
            sl.append_record(str(path), {"record": "curve-summary"})
    assert capsys.readouterr().out == '{"record": "curve-summary"}\n' and path.read_bytes() == b""
    sl.append_line(str(path), "{}")
    assert path.read_bytes() == b"{}\n"


def test_a_lock_that_is_let_go_in_time_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "book.md"
    with path.open("wb") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        monkeypatch.setattr("summarise_load.time.sleep", lambda _: fcntl.flock(other, fcntl.LOCK_UN))
        sl.append_line(str(path), "{}")
    assert path.read_bytes() == b"{}\n"


@pytest.mark.parametrize("name", ["client", "server", "ttft_split_s"])
def test_a_block_with_an_impossible_number_is_damage(read: Any, name: str) -> None:
    book = read(json.dumps({**OLD, "schema": 2, name: {"a": {"b": 1e300}}}))
    assert book.records == [] and "implausibly large" in book.damaged[0].text and f"{name}.a.b" in book.damaged[0].text


def test_a_line_that_can_go_nowhere_is_told_as_lost(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sys, "stdout", None)
    with pytest.raises(sl.ResultError, match=r"nor is the line printed: .* standard output is closed"):
        sl.append_record(str(tmp_path), {"record": "curve-summary"})
