"""Nothing measured is lost and no line is spoilt: how records reach the notebook."""

from __future__ import annotations

import fcntl
import json
import math
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Callable

import pytest
from fake_server import (
    ROOT,
    FakeServer,
    Request,
    Running,
    Step,
    arguments,
    load,
    one_line,
    plain,
    read_records,
    strict_json,
    whole_stream,
)
from hypothesis import given, settings
from hypothesis import strategies as st

import load_test

HEALTHY = [whole_stream()]
needs_dev_full = pytest.mark.skipif(not os.path.exists("/dev/full"), reason="this system has no /dev/full")


def book_of(path: Path) -> dict[str, Any]:
    """The last line of a notebook, by the strict parser."""
    data = path.read_bytes()
    assert data.endswith(b"\n")
    record = strict_json(data.splitlines()[-1].decode("utf-8"))
    assert isinstance(record, dict)
    return record


# ---------------------------------------------------------------- what stands there already


@pytest.mark.parametrize(
    "before",
    [
        b"",
        b"# Notebook\n",
        b"prose without an end",
        b'{"lab":"part-09/lab-serve-tw',  # torn by a crash: https://github.com/Tracer-Cloud/opensre/issues/5750
        b'{"lab": "x", "note": "caf\xc3',  # torn inside a character: https://github.com/elizaOS/eliza/issues/30878
        b"```json\r\n{}\r\n```\r\n",
        b"old Mac\r",
        b"\n\n\n",
        b"\x00",
        b"\xff\xfe\n\x00",
        b"no-break\xc2\x85",
    ],
)
def test_a_record_is_never_glued_to_what_stands_there(before: bytes, tmp_path: Path) -> None:
    book = tmp_path / "book.md"
    book.write_bytes(before)
    with FakeServer(HEALTHY) as server:
        assert load(server, tmp_path, "--concurrency", "1,2").code == 0
    data = book.read_bytes()
    assert data.startswith(before)
    added = data[len(before) :]
    assert added.startswith(b"{") if before.endswith(b"\n") or not before else added.startswith(b"\n{")
    lines = added.strip(b"\n").split(b"\n")
    assert [strict_json(line.decode())["concurrency"] for line in lines] == [1, 2]
    assert added.count(b"\n") == 2 + (not (before.endswith(b"\n") or not before))


def test_the_new_lines_survive_a_torn_one_for_the_analyser(tmp_path: Path) -> None:
    # https://github.com/Tracer-Cloud/opensre/issues/6356
    book = tmp_path / "book.md"
    book.write_bytes(b'# Notes\n{"lab": "part-09/lab-serve-twenty-concurrent-users", "concurrency": 1, "ttft_s": {"p5')
    with FakeServer(HEALTHY) as server:
        load(server, tmp_path, "--label", "after-the-crash")
    command = [sys.executable, str(ROOT / "summarise_load.py"), "--labbook", str(book), "--list"]
    done = subprocess.run(command, capture_output=True, encoding="utf-8", timeout=60)
    assert "after-the-crash" in done.stdout and "line 2" in done.stdout + done.stderr


# ---------------------------------------------------------------- found out before the first request


def test_a_notebook_in_a_missing_folder(tmp_path: Path) -> None:
    for option in ("--labbook", "--raw"):
        missing = tmp_path / "no such folder" / "book.md"
        with FakeServer(HEALTHY) as server:
            result = load(server, tmp_path, option, missing)
        line = one_line(result)
        assert result.code == 2 and option in line and str(missing) in line and not server.connections


def test_a_folder_is_no_notebook(tmp_path: Path) -> None:
    for option in ("--labbook", "--raw"):
        with FakeServer(HEALTHY) as server:
            result = load(server, tmp_path, option, tmp_path)
        assert result.code == 2 and option in one_line(result) and not server.connections


def test_a_pipe_is_no_notebook_and_is_not_waited_for(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with FakeServer(HEALTHY) as server:
        result = load(server, tmp_path, "--labbook", pipe)
    assert result.code == 2 and "not a file" in one_line(result) and not server.connections


def test_a_socket_is_no_notebook() -> None:
    folder = Path(tempfile.mkdtemp())  # a socket's path may not be long
    try:
        with socket.socket(socket.AF_UNIX) as listener, FakeServer(HEALTHY) as server:
            listener.bind(str(folder / "s"))
            result = load(server, folder, "--labbook", folder / "s")
        assert result.code == 2 and "not a file" in one_line(result)
    finally:
        shutil.rmtree(folder)


@pytest.fixture
def as_somebody() -> Iterator[Path]:
    """A folder that everybody may enter, and, where we are root, the rights of nobody in particular."""
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o777)
    root = os.geteuid() == 0
    try:
        if root:
            os.seteuid(65534)
        yield folder
    finally:
        if root:
            os.seteuid(0)
        shutil.rmtree(folder)


@pytest.mark.parametrize("mode", [0o444, 0o222, 0o000])
def test_a_notebook_without_the_rights(mode: int, as_somebody: Path) -> None:
    # https://github.com/Raven-Scout/scout-plugin/issues/38: an hour of load, nothing stored
    book = as_somebody / "book.md"
    book.write_text("kept\n", "utf-8")
    book.chmod(mode)
    with FakeServer(HEALTHY) as server:
        result = load(server, as_somebody)
    assert result.code == 2 and "Permission denied" in one_line(result) and not server.connections
    book.chmod(0o644)
    assert book.read_text("utf-8") == "kept\n"


def test_a_folder_without_the_rights(as_somebody: Path) -> None:
    inner = as_somebody / "inner"
    inner.mkdir()
    inner.chmod(0o555)
    with FakeServer(HEALTHY) as server:
        result = load(server, as_somebody, "--labbook", inner / "new.md")
    assert result.code == 2 and "--labbook" in one_line(result) and not server.connections
    inner.chmod(0o755)


# ---------------------------------------------------------------- found out after the load


@needs_dev_full
@pytest.mark.parametrize("more", [[], ["--json"], ["--quiet"]])
def test_a_full_disk_puts_the_line_on_stdout(more: list[str], tmp_path: Path) -> None:
    # https://github.com/mlcommons/endpoints/issues/426
    with FakeServer(HEALTHY) as server:
        result = load(server, tmp_path, "--labbook", "/dev/full", "--concurrency", "1,2", "--requests", 2, *more)
    assert result.code == 1
    records = [strict_json(line) for line in result.out.splitlines() if line.startswith("{")]
    assert [record["concurrency"] for record in records] == [1, 2]
    assert result.err.count("/dev/full: No space left") == 2
    assert len(result.requests) == 4  # the other file is whole
    assert "--quiet" not in more or len(result.out.splitlines()) == 2


@needs_dev_full
def test_a_full_disk_for_the_raw_file_puts_its_lines_on_stderr(tmp_path: Path) -> None:
    with FakeServer(HEALTHY) as server:
        result = load(server, tmp_path, "--raw", "/dev/full", "--requests", 3)
    assert result.code == 1 and len(result.levels) == 1
    lines = [line for line in result.err.splitlines() if line.startswith("{")]
    assert [strict_json(line)["index"] for line in lines] == [0, 1, 2]
    assert "0 request(s) appended" in result.out


@pytest.mark.parametrize("before", [b"", b"kept\n", b"kept, torn"])
def test_a_disk_that_fills_in_the_middle_of_a_line(before: bytes, tmp_path: Path) -> None:
    """A line is cut at 1 KiB: it stands on stdout instead, and its half is taken back."""
    book = tmp_path / "book.md"
    book.write_bytes(before)
    with FakeServer(HEALTHY) as server:
        argv = arguments(tmp_path, server.base_url, "--label", "cut")
        argv[argv.index("--raw") : argv.index("--raw") + 2] = []
        with Running(tmp_path, argv, prefix=["bash", "-c", 'ulimit -f 1; exec "$0" "$@"']) as running:
            result = running.finish()
        assert result.code == 1 and "only a part" in result.err
        (line,) = [line for line in result.out.splitlines() if line.startswith("{")]
        assert strict_json(line)["label"] == "cut"
        assert book.read_bytes() == before
        assert load(server, tmp_path, "--label", "after").code == 0
    assert book_of(book)["label"] == "after" and book.read_bytes().startswith(before)


@needs_dev_full
def test_a_full_disk_and_a_closed_pipe_lose_no_level_of_the_raw_file(tmp_path: Path) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    with FakeServer(HEALTHY) as server:
        argv = arguments(tmp_path, server.base_url, "--labbook", "/dev/full", "--concurrency", "1,2", "--requests", 2)
        with Running(tmp_path, argv, stdout=writing) as running:
            os.close(writing)
            result = running.finish()
    assert result.code == 1 and len(result.requests) == 4 and "Traceback" not in result.err


@needs_dev_full
@pytest.mark.parametrize("redirection", [">/dev/full", ">&-"])
@pytest.mark.parametrize("more", [[], ["--json"]])
def test_a_full_disk_and_no_stdout_put_the_lines_on_stderr(more: list[str], redirection: str, tmp_path: Path) -> None:
    with FakeServer(HEALTHY) as server:
        argv = arguments(tmp_path, server.base_url, "--labbook", "/dev/full", "--concurrency", "1,2", *more)
        with Running(tmp_path, argv, prefix=["bash", "-c", f'exec "$0" "$@" {redirection}']) as running:
            result = running.finish()
    lines = [strict_json(line) for line in result.err.splitlines() if line.startswith("{")]
    assert [record["concurrency"] for record in lines] == [1, 2]
    assert result.code == 1 and result.err.count("printed on stderr instead") == 2 and "Traceback" not in result.err


@needs_dev_full
def test_where_nothing_takes_a_line_the_program_still_ends_in_order(tmp_path: Path) -> None:
    with FakeServer(HEALTHY) as server:
        argv = arguments(tmp_path, server.base_url, "--labbook", "/dev/full")
        with Running(tmp_path, argv, prefix=["bash", "-c", 'exec "$0" "$@" >/dev/full 2>/dev/full']) as running:
            result = running.finish()
    assert result.code == 1 and len(result.requests) == 1


def test_a_lock_that_is_never_given_up_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load_test, "LOCK_LIMIT_S", 0.1)
    with (tmp_path / "book.md").open("ab") as held, FakeServer(HEALTHY) as server:
        fcntl.flock(held, fcntl.LOCK_EX)
        result = load(server, tmp_path)
    assert result.code == 1 and "another program holds its lock" in one_line(result)
    (line,) = [line for line in result.out.splitlines() if line.startswith("{")]
    assert strict_json(line)["completed"] == 1 and result.levels == []


def test_a_lock_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with (tmp_path / "book.md").open("ab") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        waited = 0

        def wait(_: float) -> None:
            nonlocal waited
            waited += 1
            if waited == 3:
                fcntl.flock(held, fcntl.LOCK_UN)

        monkeypatch.setattr(time, "sleep", wait)
        load_test.append_lines(str(tmp_path / "book.md"), ["one"])
    assert waited == 3 and (tmp_path / "book.md").read_text("utf-8") == "one\n"


@pytest.mark.parametrize("cause", ["no server", "refused"])
def test_a_run_that_measured_nothing_leaves_no_empty_file_behind(cause: str, free_port: int, tmp_path: Path) -> None:
    with FakeServer([b"HTTP/1.1 401 No\r\n\r\n"]) as server:
        url = f"http://127.0.0.1:{free_port}" if cause == "no server" else server.base_url
        result = load(url, tmp_path, "--warmup", 1)
        assert result.code == 1 and list(tmp_path.iterdir()) == []
        (tmp_path / "book.md").touch()
        load(url, tmp_path, "--warmup", 1)
    assert (tmp_path / "book.md").exists()  # what was there stays


def test_a_line_that_went_into_a_file_that_was_just_removed_is_missed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As by another run that only looked whether the notebook can be made."""
    book, real = tmp_path / "book.md", load_test.lock_file

    def remove_first(descriptor: int) -> None:
        book.unlink()
        real(descriptor)

    monkeypatch.setattr(load_test, "lock_file", remove_first)
    notebook = load_test.Notebook(str(book))
    notebook.append("one")
    assert notebook.take_missing() == ["one"] and notebook.lines == []


def lose_it(book: Path) -> None:
    book.unlink()


def shorten(book: Path) -> None:
    book.write_text("# emptied\n", "utf-8")


def move_away(book: Path) -> None:
    book.rename(book.with_name("old.md"))


def replace_by_an_older_copy(book: Path) -> None:
    (book.parent / "new").write_text("# as it was in the morning\n", "utf-8")
    os.replace(book.parent / "new", book)


def make_a_folder_of_it(book: Path) -> None:
    book.unlink()
    book.mkdir()


def remove_the_folder(book: Path) -> None:
    shutil.rmtree(book.parent)


def save_in_an_editor(book: Path) -> None:
    (book.parent / "new").write_bytes(book.read_bytes() + b"a sentence without an end")
    os.replace(book.parent / "new", book)


def add_a_sentence(book: Path) -> None:
    with book.open("a", encoding="utf-8") as file:
        file.write("a sentence\n")


# what somebody does to the notebook during the second of three levels -> levels that then stand in it, and on stdout
CHANGES: list[tuple[Callable[[Path], object], list[int], list[int]]] = [
    (lose_it, [2, 4], [1]),
    (shorten, [2, 4], [1]),
    (move_away, [2, 4], [1]),
    (replace_by_an_older_copy, [2, 4], [1]),
    (make_a_folder_of_it, [], [1, 2, 4]),
    (remove_the_folder, [], [1, 2, 4]),
    (save_in_an_editor, [1, 2, 4], []),
    (add_a_sentence, [1, 2, 4], []),
]


@pytest.mark.parametrize(("change", "kept", "printed"), CHANGES, ids=[row[0].__name__ for row in CHANGES])
def test_a_notebook_that_changes_during_a_run(
    change: Callable[[Path], object], kept: list[int], printed: list[int], tmp_path: Path
) -> None:
    """The next level goes where the name leads then; lines that are gone are printed once more, and it is exit 1."""
    book = tmp_path / "notes" / "book.md"
    book.parent.mkdir()

    def answer(request: Request) -> list[Step]:
        return [lambda: change(book), whole_stream()] if request.number == 1 else list(HEALTHY)

    with FakeServer(answer) as server:
        result = load(server, tmp_path, "--labbook", book, "--concurrency", "1,2,4", "--requests", "1")
    standing = book.read_text("utf-8").splitlines() if book.is_file() else []
    assert [strict_json(line)["concurrency"] for line in standing if line[0] == "{"] == kept
    assert [strict_json(line)["concurrency"] for line in result.out.splitlines() if line[0] == "{"] == printed
    assert f"{len(kept)} line(s) appended to {book}" in result.out
    assert result.code == (1 if printed else 0) and ("--labbook" in result.err) == bool(printed)


def test_a_notebook_lost_after_the_last_level_is_noticed_too(tmp_path: Path) -> None:
    book = tmp_path / "book.md"

    def answer(request: Request) -> list[Step]:
        if request.is_chat and request.is_warm_up:
            return [book.unlink, plain("503 X", "")]
        return [whole_stream()] if request.is_chat else [plain("404 X", "")]

    with FakeServer(answer) as server:
        result = load(server, tmp_path, "--recovery-check")
    assert result.code == 1 and "1 line(s) written to it before are gone" in result.err
    assert "1 line(s) appended" in result.out and [record["record"] for record in read_records(book)] == ["recovery"]


# ---------------------------------------------------------------- several writers


def test_two_runs_at_once_write_whole_lines(tmp_path: Path) -> None:
    # https://github.com/NousResearch/hermes-agent/pull/109192
    # https://github.com/tinyhumansai/opencompany/pull/43: 20 of 20 runs interleaved
    with FakeServer(HEALTHY) as server:
        argv = arguments(tmp_path, server.base_url, "--repeat", 50, "--requests", 2)
        with Running(tmp_path, argv) as one, Running(tmp_path, argv) as two:
            assert [running.finish().code for running in (one, two)] == [0, 0]
    levels = read_records(tmp_path / "book.md")
    runs = {record["run_id"] for record in levels}
    assert len(levels) == 100 and len(runs) == 2
    for run in runs:
        assert sorted(record["repeat"] for record in levels if record["run_id"] == run) == list(range(50))
    assert len(read_records(tmp_path / "raw.jsonl")) == 200


def test_many_threads_append_whole_lines_to_a_torn_file(tmp_path: Path) -> None:
    book = tmp_path / "book.md"
    book.write_bytes(b"torn")
    lines = {
        f'{{"writer": {writer}, "line": {line}, "filler": "{"x" * 3000}"}}' for writer in range(4) for line in range(20)
    }

    def write(writer: int) -> None:
        for line in sorted(line for line in lines if f'"writer": {writer},' in line):
            load_test.append_lines(str(book), [line])

    threads = [threading.Thread(target=write, args=(writer,)) for writer in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    first, *rest = book.read_text("utf-8").splitlines()
    assert first == "torn" and len(rest) == 80 and set(rest) == lines


def test_where_the_system_has_no_locks_a_line_is_still_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_locks(*_: object) -> None:
        raise OSError(37, "No locks available")  # as on some network file systems

    monkeypatch.setattr(fcntl, "flock", no_locks)
    load_test.append_lines(str(tmp_path / "a"), ["one"])
    monkeypatch.setattr(load_test, "fcntl", None)
    load_test.append_lines(str(tmp_path / "a"), ["two", "three"])
    assert (tmp_path / "a").read_text("utf-8") == "one\ntwo\nthree\n"


def test_names_with_spaces_links_and_other_alphabets(tmp_path: Path) -> None:
    book = tmp_path / "my notes  für 你.md"
    link = tmp_path / "link.md"
    link.symlink_to(book.name)
    with FakeServer(HEALTHY) as server:
        assert load(server, tmp_path, "--labbook", link).code == 0
        result = load(server, tmp_path, "--labbook", book)
    assert len(read_records(book)) == 2 and link.is_symlink() and str(book) in result.out


def test_the_current_folder_is_where_a_bare_name_goes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with FakeServer(HEALTHY) as server:
        assert load(server, tmp_path, "--labbook", "labbook.md").code == 0
    assert len(read_records(tmp_path / "labbook.md")) == 1


# ---------------------------------------------------------------- strict JSON


def test_what_is_not_finite_becomes_null() -> None:
    # https://github.com/Medical-Event-Data-Standard/MEDS-DEV/pull/286
    # https://github.com/dotnet/BenchmarkDotNet/issues/1242
    # https://github.com/redis/memtier_benchmark/issues/271: NaN in the file defeats other readers
    value = {"b": [math.nan, math.inf, -math.inf, 1.5, (2.0, math.nan)], "a": {"x": math.nan, "y": True, "z": None}}
    assert load_test.strict_json(value) == (
        '{"a": {"x": null, "y": true, "z": null}, "b": [null, null, null, 1.5, [2.0, null]]}'
    )


values = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(st.characters())),
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(st.text(max_size=5), inner, max_size=4)),
    max_leaves=12,
)


@settings(max_examples=150, deadline=None)
@given(values)
def test_any_value_is_one_line_that_a_strict_parser_reads(value: Any) -> None:
    line = load_test.strict_json(value)
    assert line.isascii() and len(line.splitlines()) == 1
    assert load_test.strict_json(strict_json(line)) == line


def test_whatever_a_server_says_is_stored_as_strict_json(tmp_path: Path) -> None:
    odd = b'data: {"choices":[{"delta":{"content":"a"},"finish_reason":{"x":"\\ud800"}}],"model":"\\u0000",'
    odd += b'"usage":{"completion_tokens":1e999,"prompt_tokens":NaN,"prompt_tokens_details":{"cached_tokens":-1}},'
    odd += b'"timings":{"prompt_ms":NaN,"predicted_ms":1e999,"predicted_n":1,"cache_n":1.5,"\\u2028":"\\n",'
    odd += b'"deep":[-Infinity]}}\n\n'
    stream = b"HTTP/1.0 200 OK\r\nContent-Type: text/event-stream\r\n\r\n" + odd + b"data: [DONE]\n\n"
    with FakeServer([stream]) as server:
        result = load(server, tmp_path, "--sample", "5")
    (level,) = result.levels
    assert level["completed"] == 1 and level["prompt_tokens_mean"] is None and level["cached_tokens_mean"] is None
    (raw,) = result.requests
    assert raw["timings"]["prompt_ms"] is None and "deep" not in raw["timings"]
    assert json.loads((tmp_path / "book.md").read_text("utf-8")) == level
