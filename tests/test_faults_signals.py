"""Ctrl-C once, twice, SIGTERM and SIGKILL, at every moment: what was measured stays, and no line is half.

The moment is the server's: a step of an answer sends the signal. So nothing here sleeps or guesses.
"""

from __future__ import annotations

import fcntl
import os
import random
import signal
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from fake_server import (
    CHUNKED,
    DONE,
    HOLD,
    LAST_CHUNK,
    ROOT,
    FakeServer,
    Request,
    Result,
    Running,
    Step,
    arguments,
    chunk,
    delta,
    json_answer,
    load,
    plain,
    read_records,
    whole_stream,
)

import load_test

LADDER = ("--concurrency", "1,2,4", "--requests", 4)
LEVEL_OF = {**dict.fromkeys(range(4), 1), **dict.fromkeys(range(4, 8), 2), **dict.fromkeys(range(8, 12), 4)}
TAIL = chunk(delta("b", finish="length") + DONE) + LAST_CHUNK

Parts = tuple[list[Step], list[Step]]
MOMENTS: dict[str, Parts] = {  # what the server sends before the signal and after it
    "as the request arrives": ([], [whole_stream()]),
    "after the head": ([CHUNKED], [HOLD]),
    "after a token": ([CHUNKED, chunk(delta("a"))], [HOLD]),
    "inside an event": ([CHUNKED, chunk(delta("a"))[:20]], [chunk(delta("a"))[20:], TAIL]),
    "after the answer": ([whole_stream()], []),
}


class Ended:
    """The program run against a server that sends it signals while it answers one of the requests."""

    def __init__(
        self, folder: Path, number: int, parts: Parts, signals: Iterable[signal.Signals], *args: object
    ) -> None:
        self._running: list[Running] = []
        before, after = parts

        def strike() -> None:
            for one in signals:
                self._running[0].send(one)

        def answer(request: Request) -> list[Step]:
            if request.number == number:
                return [*before, strike, *after]
            return [HOLD] if request.number > number else [whole_stream()]  # the run is not over before the signal

        with FakeServer(answer) as self.server:
            argv = arguments(folder, self.server.base_url, *LADDER, "--timeout", 60, *args)
            with Running(folder, argv) as running:
                self._running.append(running)
                self.result = running.finish()


def check_what_is_left(result: Result, number: int, others: Iterable[int] = ()) -> None:
    """Levels that had ended are whole; the one under way is marked, and its raw lines are those of its record."""
    levels = result.levels
    whole = [record for record in levels if not record["interrupted"]]
    cut = [record for record in levels if record["interrupted"]]
    ended = [c for c in (1, 2, 4) if c < LEVEL_OF[number]]
    assert [record["concurrency"] for record in whole] in (ended, [*ended, LEVEL_OF[number]])
    assert all(record["completed"] == record["requests"] == 4 for record in whole)
    assert len(cut) <= 1 and levels == whole + cut
    for record in cut:
        assert 1 <= record["requests"] <= 4
        assert record["steady_output_tokens_per_s"] is None
    assert len(result.requests) == sum(record["requests"] for record in levels)


@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize(
    ("number", "kind"), [(0, signal.SIGINT), (5, signal.SIGTERM), (7, signal.SIGHUP), (10, signal.SIGINT)]
)
def test_one_signal_ends_the_run_in_order(number: int, kind: signal.Signals, moment: str, tmp_path: Path) -> None:
    # https://github.com/humanbound/humanbound/issues/75, https://github.com/awslabs/llmeter/issues/73
    if signal.getsignal(kind) is signal.SIG_IGN and kind == signal.SIGHUP:
        pytest.skip("whoever runs these tests ignores this signal, as nohup does, and so does the program")
    result = Ended(tmp_path, number, MOMENTS[moment], [kind]).result
    assert result.code == 130
    assert "Traceback" not in result.said and result.err.count("\n") == 1 and "interrupted" in result.err
    check_what_is_left(result, number)
    assert "line(s) appended" in result.out and f"{len(result.levels)} line(s)" in result.out


def test_an_interrupted_level_says_so_and_what_had_ended_counts(tmp_path: Path) -> None:
    result = Ended(tmp_path, 3, MOMENTS["after a token"], [signal.SIGINT]).result
    assert [(record["concurrency"], record["interrupted"]) for record in result.levels] == [(1, True)]
    cut = result.levels[0]
    assert cut["requests"] == cut["completed"] == 3 and "interrupted: this level is not whole" in result.out
    assert "interrupted; 0 finished level(s) and a part of the one under way in " in result.err


def test_an_interrupted_level_in_which_nothing_had_ended_says_so(tmp_path: Path) -> None:
    result = Ended(tmp_path, 0, MOMENTS["after a token"], [signal.SIGINT]).result
    assert result.code == 130 and result.levels == result.requests == []
    assert "interrupted; 0 finished level(s) in " in result.err
    assert "  c=  1  interrupted before any of its requests had ended: no line for this level\n" in result.out


@pytest.mark.parametrize("number", [0, 4, 11])
@pytest.mark.parametrize("signals", [[signal.SIGINT] * 2, [signal.SIGTERM, signal.SIGINT], [signal.SIGINT] * 5])
def test_two_signals_end_it_at_once(number: int, signals: list[signal.Signals], tmp_path: Path) -> None:
    result = Ended(tmp_path, number, MOMENTS["after a token"], signals).result
    # One that comes when the run has already ended in order ends it by itself: a shell shows 130 for that, too.
    assert result.code in (130, -signals[-1]) and "Traceback" not in result.said
    check_what_is_left_after_a_kill(tmp_path, number)


def check_what_is_left_after_a_kill(folder: Path, number: int) -> None:
    """Levels that had ended are there; of the one under way there is a line or none, and no half one."""
    levels = read_records(folder / "book.md")
    ended = [c for c in (1, 2, 4) if c < LEVEL_OF[number]]
    assert [record["concurrency"] for record in levels[: len(ended)]] == ended
    assert not any(record["interrupted"] for record in levels[: len(ended)])
    assert len(levels) <= len(ended) + 1
    read_records(folder / "raw.jsonl")


def test_the_second_press_leaves_whatever_the_first_one_waits_for(tmp_path: Path) -> None:
    # https://github.com/fw-ai/benchmark/pull/134: a soft stop that ignored later presses
    book = tmp_path / "book.md"
    running: list[Running] = []

    def strike() -> None:
        running[0].send(signal.SIGINT)

    def answer(request: Request) -> list[Step]:
        return [strike, HOLD] if request.number == 2 else [whole_stream()]

    with book.open("ab") as held, FakeServer(answer) as server:
        fcntl.flock(held, fcntl.LOCK_EX)  # the interrupted level cannot be written while we hold this
        argv = arguments(tmp_path, server.base_url, "--requests", 4, "--timeout", 60)
        with Running(tmp_path, argv) as program:
            running.append(program)
            assert server.hung_up.acquire(timeout=30)  # the first press cut the request off
            with pytest.raises(subprocess.TimeoutExpired):
                program.process.wait(0.2)
            program.send(signal.SIGINT)
            result = program.finish()
    assert result.code == 130 and "Traceback" not in result.said and result.levels == []


@pytest.mark.parametrize("kind", [signal.SIGKILL, signal.SIGINT])
def test_killed_at_random_moments_then_appended_and_summarised(kind: signal.Signals, tmp_path: Path) -> None:
    rng = random.Random(20261130)
    kept = 0
    for number in rng.sample(range(12), 4):
        before, after = MOMENTS[rng.choice(sorted(MOMENTS))]
        Ended(tmp_path, number, (before, after), [kind], "--label", "killed")
        levels = read_records(tmp_path / "book.md")
        whole = [record for record in levels if not record["interrupted"]]
        assert len(whole) >= kept + len([c for c in (1, 2, 4) if c < LEVEL_OF[number]])
        kept = len(whole)
    with FakeServer([whole_stream()]) as server:
        assert load(server, tmp_path, "--label", "afterwards").code == 0
    assert len([record for record in read_records(tmp_path / "book.md") if not record["interrupted"]]) == kept + 1
    command = [sys.executable, str(ROOT / "summarise_load.py"), "--labbook", str(tmp_path / "book.md"), "--list"]
    done = subprocess.run(command, capture_output=True, encoding="utf-8", timeout=60)
    assert done.returncode == 0 and "afterwards" in done.stdout and "killed" in done.stdout, done.stderr


# ---------------------------------------------------------------- outside a level

BUSY = json_answer([{"id": 0, "n_ctx": 5, "is_processing": True}])
IDLE = json_answer([{"id": 0, "n_ctx": 5, "is_processing": False}])
NOT_FOUND = plain("404 X", "")


def is_warm(request: Request) -> bool:
    return request.is_chat and request.is_warm_up


PHASES: dict[str, tuple[list[object], Any]] = {
    "looking for the model": (["--model", ""], lambda request: [HOLD] if not request.is_chat else None),
    "waiting for the server": (
        ["--wait-ready", 60],
        lambda request: [plain("503 X", "loading")] if is_warm(request) else None,
    ),
    "waiting for its answer": (["--wait-ready", 60], lambda request: [HOLD] if is_warm(request) else None),
    "warming up": (["--warmup", 2], lambda request: [HOLD] if is_warm(request) else None),
    "probing": (["--probe"], lambda request: [HOLD] if request.is_chat else None),
    "finding the endpoints": (["--sample", 5], lambda request: [HOLD] if request.path == "/slots" else None),
    "waiting until it is idle": (["--recovery-check"], lambda request: [BUSY] if request.path == "/slots" else None),
    "the fresh request": (
        ["--recovery-check"],
        lambda request: [HOLD] if is_warm(request) else [IDLE] if request.path == "/slots" else None,
    ),
}


@pytest.mark.parametrize("phase", PHASES)
def test_a_signal_outside_a_level(phase: str, tmp_path: Path) -> None:
    args, answer_to = PHASES[phase]
    running: list[Running] = []
    struck = False
    due = "--recovery-check" not in args  # which looks at its endpoints once before the load, too

    def strike() -> None:
        nonlocal struck
        if due and not struck:
            struck = True
            running[0].send(signal.SIGINT)

    def answer(request: Request) -> list[Step]:
        nonlocal due
        due = due or (request.is_chat and not request.is_warm_up)
        steps = answer_to(request)
        if steps is not None:
            return [strike, *steps]
        return [whole_stream()] if request.is_chat else [NOT_FOUND]

    with FakeServer(answer) as server:
        argv = arguments(tmp_path, server.base_url, "--timeout", 60, *args)
        with Running(tmp_path, argv) as program:
            running.append(program)
            result = program.finish()
    assert struck and result.code == 130 and "Traceback" not in result.said
    assert "interrupted" in result.err
    assert len(result.levels) == ("--recovery-check" in args)


def test_a_signal_while_the_server_hangs_in_a_look(tmp_path: Path) -> None:
    """The level's last look is left out: nobody waits five seconds for a Ctrl-C."""
    running: list[Running] = []
    in_level = False

    def strike() -> None:
        running[0].send(signal.SIGINT)

    def answer(request: Request) -> list[Step]:
        nonlocal in_level
        if request.is_chat:
            in_level = True
            return [CHUNKED, chunk(delta("a")), strike, HOLD] if request.number > 6 else [whole_stream()]
        return [HOLD] if in_level else [IDLE]

    with FakeServer(answer) as server:
        argv = arguments(tmp_path, server.base_url, "--requests", 9, "--sample", 60, "--timeout", 60)
        with Running(tmp_path, argv) as program:
            running.append(program)
            result = program.finish()
        looks = [request for request in server.requests if not request.is_chat]
    assert result.code == 130 and result.levels[0]["interrupted"] is True
    assert len(looks) <= 6  # found twice, looked at before the level, and one look during it


@pytest.mark.parametrize("kind", [signal.SIGINT, signal.SIGKILL])
def test_the_null_server_ends_with_us_and_says_nothing(kind: signal.Signals, tmp_path: Path) -> None:
    """A terminal sends Ctrl-C to the whole group: the second process is not in it, and its end is not awaited
    in vain. It holds our stderr, which is therefore closed only once it has ended."""
    with FakeServer([whole_stream()]) as server:
        levels = ",".join(map(str, range(1, 60)))
        argv = arguments(tmp_path, server.base_url, "--calibrate", "--concurrency", levels, "--requests", 200)
        with Running(tmp_path, argv, start_new_session=True) as program:
            assert program.process.stdout is not None
            assert "null server" in program.process.stdout.readline()
            os.killpg(program.process.pid, kind)
            result = program.finish()
            with pytest.raises(ProcessLookupError):
                os.killpg(program.process.pid, 0)
    assert result.code == (130 if kind == signal.SIGINT else -kind)
    assert "Traceback" not in result.said and result.levels == []


def test_the_null_server_is_no_part_of_our_group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[subprocess.Popen[bytes]] = []
    groups: list[int] = []
    real_popen, real_from_thread = subprocess.Popen, load_test.from_thread

    def start(*args: Any, **more: Any) -> Any:
        started.append(real_popen(*args, **more))
        return started[-1]

    async def look(call: Any) -> Any:
        result = await real_from_thread(call)  # the second one: its port, so it is there
        groups.extend(os.getpgid(process.pid) for process in started)
        return result

    monkeypatch.setattr(subprocess, "Popen", start)
    monkeypatch.setattr(load_test, "from_thread", look)
    with FakeServer([whole_stream()]) as server:
        assert load(server, tmp_path, "--calibrate").code == 0
    assert groups == [process.pid for process in started] and len(groups) == 1


AT_START = {  # what sitecustomize does, in the interpreter that then runs the program
    "importing": """
import os, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # even where the tests' own shell ignores it
class Strike:
    def find_spec(self, name, path=None, target=None):
        if name == "asyncio":
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Strike())
""",
    "resolving": """
import os, signal, socket, threading
def hang(*args, **more):
    os.kill(os.getpid(), signal.SIGINT)
    threading.Event().wait()
socket.getaddrinfo = hang
""",
}


@pytest.mark.parametrize("moment", AT_START)
def test_a_signal_before_anything_is_open(moment: str, tmp_path: Path) -> None:
    hooks = tmp_path / "hooks"
    hooks.mkdir()
    (hooks / "sitecustomize.py").write_text(AT_START[moment], "utf-8")
    argv = arguments(tmp_path, "http://a-name:8080", "--timeout", 60)
    with Running(tmp_path, argv, env={"PYTHONPATH": str(hooks)}) as program:
        result = program.finish()
    # a shell shows 130 for a program that the signal itself has ended
    assert result.code == (-signal.SIGINT if moment == "importing" else 130) and "Traceback" not in result.said
    assert ("interrupted" in result.err) == (moment == "resolving") and result.levels == []


def test_the_handlers_of_whoever_runs_us_come_back(tmp_path: Path) -> None:
    def mine(*_: object) -> None:
        pass

    kept = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    argv = arguments(tmp_path, "http://127.0.0.1:1")
    try:
        signal.signal(signal.SIGINT, mine)
        signal.signal(signal.SIGTERM, mine)
        assert load_test.main(argv) == 1
        assert signal.getsignal(signal.SIGINT) is signal.getsignal(signal.SIGTERM) is mine
    finally:
        for number, handler in kept.items():
            signal.signal(number, handler)


def test_a_run_in_the_background_takes_no_ctrl_c_for_granted(tmp_path: Path) -> None:
    """A shell starts background jobs with SIGINT ignored: SIGTERM ends the run in order nevertheless."""
    running: list[Running] = []

    def strike() -> None:
        running[0].send(signal.SIGTERM)

    def answer(request: Request) -> list[Step]:
        return [strike, HOLD] if request.number == 1 else [whole_stream()]

    with FakeServer(answer) as server:
        argv = arguments(tmp_path, server.base_url, "--requests", 3, "--timeout", 60)
        prefix = ["bash", "-c", 'trap "" INT; exec "$0" "$@"']
        with Running(tmp_path, argv, prefix=prefix) as program:
            running.append(program)
            result = program.finish()
    assert result.code == 130 and result.levels[0]["requests"] == 1 and result.levels[0]["interrupted"]
