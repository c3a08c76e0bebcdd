"""Beyond a fixed ladder: the search for the operating point, repeats until the figures hold, a warm-up until TPOT has
settled, levels of a duration, conversations, and the GPU beside a level.

No clock decides anything here: engines are functions that give each response its times, a level's end is an event.
"""

from __future__ import annotations

import heapq
import itertools
import random
import stat
import sys
import threading
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Callable

import pytest
from fake_server import (
    CHUNKED,
    DONE,
    LAST_CHUNK,
    FakeServer,
    Request,
    Result,
    Step,
    call_main,
    chunk,
    delta,
    json_answer,
    load,
    one_line,
    plain,
    usage,
    whole_stream,
)
from test_level_figures import observed

import load_test
from load_test import Tried

TOKENS = 8
HEALTHY = whole_stream()

# ---------------------------------------------------------------- the search: which level is next


def searched(inside: Callable[[int], bool], most: int, ladder: Iterable[int] = (1, 5, 10, 20)) -> list[Tried]:
    """All runs of a search whose levels are judged by `inside`."""
    tried = [Tried(concurrency, inside(concurrency)) for concurrency in ladder]
    while (concurrency := load_test.next_level(tried, most)) is not None:
        tried.append(Tried(concurrency, inside(concurrency)))
        assert len(tried) < 100
    return tried


SEARCHES = [  # the highest level that is inside, MAX, the levels tried after 1, 5, 10, 20, and the answer
    (40, 256, [40, 80, 60, 50, 45, 42, 40], 40),
    (20, 256, [40, 30, 25, 22, 21, 20], 20),
    (7, 256, [7, 8, 7], 7),
    (1, 256, [3, 2, 1], 1),
    (0, 256, [], 0),
    (10**9, 256, [40, 80, 160, 256, 256], 256),
    (10**9, 50, [40, 50, 50], 50),
    (10**9, 20, [20], 20),
    (10**9, 8, [20], 20),  # the ladder went beyond MAX by itself
]


@pytest.mark.parametrize(("highest", "most", "levels", "answer"), SEARCHES)
def test_the_search_doubles_then_halves_the_gap_then_confirms(
    highest: int, most: int, levels: list[int], answer: int
) -> None:
    tried = searched(lambda c: c <= highest, most)
    assert [run.concurrency for run in tried[4:]] == levels
    assert load_test.bracket(tried)[0] == answer


@pytest.mark.parametrize("ladder", [(1, 5, 10, 20), (1,), (50,), (3, 2), (20, 10, 1)])
def test_the_answer_is_inside_next_to_one_outside_and_confirmed_once(ladder: tuple[int, ...]) -> None:
    for highest in range(1, 300):
        tried = searched(lambda c, highest=highest: c <= highest, 256, ladder)  # type: ignore[misc]
        low, high = load_test.bracket(tried)
        runs = [run.concurrency for run in tried]
        assert low <= highest and runs.count(low) == 2 and all(runs.count(c) == 1 for c in set(runs) - {low})
        if high is None:
            assert low == max(256, *ladder) if max(ladder) > 256 else low == 256
        else:
            assert highest < high and high - low <= max(1, 0.05 * low)


def test_a_noisy_border_never_gives_an_answer_that_a_repeat_had_contradicted() -> None:
    draw = random.Random(14)
    for _ in range(2000):
        tried = searched(lambda c: draw.random() < (1.0 if c < 30 else 0.5 if c < 50 else 0.0), 256)
        low, _ = load_test.bracket(tried)
        runs = [run.inside for run in tried if run.concurrency == low]
        assert runs == [True, True] and 24 <= low < 50
        assert max(sum(run.concurrency == c for run in tried) for c in {run.concurrency for run in tried}) <= 2


def test_repeats_of_the_ladder_confirm_as_well() -> None:
    tried = [Tried(c, c <= 10) for _ in range(2) for c in (1, 10, 11)]
    assert load_test.next_level(tried, 256) is None
    tried.append(Tried(10, False))
    assert load_test.next_level(tried, 256) == 5


# ---------------------------------------------------------------- engines in the place of run_level

Times = Callable[
    [int, int], "tuple[float, float] | None"
]  # c, how many levels there were -> TTFT and TPOT; None: fails


class Engine:
    """Stands for `run_level`: each request of a level takes the times that a model gives, on a clock of its own."""

    def __init__(self, times: Times) -> None:
        self._times = times
        self.levels: list[int] = []

    async def __call__(
        self, route: Any, concurrency: int, supply: Any, stop: Any, run: load_test.LevelRun, ended: Any
    ) -> None:
        run.started_at = 0.0
        times = self._times(concurrency, len(self.levels))
        self.levels.append(concurrency)
        free: list[tuple[float, int, Any]] = [(1e-9, worker, None) for worker in range(concurrency)]
        while free:
            now, worker, last = heapq.heappop(free)
            order = supply(worker, last)
            if order is None:
                run.empty_at = now if run.empty_at is None else run.empty_at
                continue
            if times is None:
                seen = load_test.Observation()
                seen.connecting_at = seen.written_at = now
                seen.fail("http", "too many", now + 0.01, 429)
            else:
                ttft, tpot = times
                seen = observed([now + ttft + tpot * token for token in range(TOKENS)], TOKENS)
                seen.connecting_at = seen.written_at = now
            item = load_test.Finished(order.place, worker, seen, order.turn)
            run.finished.append(item)
            heapq.heappush(free, (seen.ended_at, worker, item))


def run_engine(
    monkeypatch: pytest.MonkeyPatch, folder: Path, times: Times, *args: object, behind: Step = HEALTHY
) -> tuple[Result, list[int]]:
    """The program over an engine; the server behind it answers what is asked outside of levels."""
    engine = Engine(times)
    monkeypatch.setattr(load_test, "run_level", engine)
    with FakeServer([behind]) as server:
        argv = ["--base-url", server.base_url, "--model", "fake", "--labbook", str(folder / "book.md"), "--warmup", "0"]
        result = call_main([*argv, *map(str, args)], folder)
    return result, engine.levels


def linear(a_ms: float, b_ms: float, slots: int = 10**6) -> Times:
    """TPOT a + b x c; beyond the slots a request waits for whole answers of the others."""

    def times(c: int, _: int) -> tuple[float, float]:
        step_s = (a_ms + b_ms * min(c, slots)) / 1000
        return step_s + max(0, -(-c // slots) - 1) * TOKENS * step_s, step_s

    return times


FOUND: list[tuple[Times, list[object], list[str], int]] = [  # engine, options, what the answer says, exit code
    (
        linear(20, 1.5),
        ["--slo-tpot", 0.0809],
        ["Up to 40 requests in flight stay", "42 is outside", "TPOT 80.9 ms (p90)", "12.5 tokens/s", "2 runs"],
        0,
    ),
    (
        linear(20, 1.5, 8),
        ["--slo-ttft", 0.3],
        ["Up to 16 requests in flight stay", "17 is outside"],
        0,
    ),
    (lambda c, _: (0.1, 0.02) if c <= 25 else None, [], ["Up to 25 requests in flight stay", "26 is outside"], 0),
    (linear(20, 1.5), ["--slo-tpot", 0.0216], ["Up to 1 request in flight stays", "2 is outside", "46.5 tokens/s"], 0),
    (linear(200, 0), [], ["No level stays inside", "1 in flight is outside"], 0),
    (linear(5, 0), [], ["At least 256 requests in flight stay", "256 was the highest tried", "200.0 tokens/s"], 0),
    (
        lambda c, level: (0.1, 0.2 if c == 5 or c > 30 else 0.02),
        [],
        ["Up to 30 requests in flight stay", "31 is outside; yet 5 was outside;"],
        0,
    ),
    (
        lambda c, level: (0.1, 0.2 if c == 5 else 0.02),
        [20],
        ["At least 20 requests in flight stay", "20 was the highest tried; yet 5 was outside;"],
        0,
    ),
    (linear(5, 0), [64], ["At least 64 requests in flight stay", "64 was the highest tried"], 0),
]


@pytest.mark.parametrize(("times", "args", "says", "code"), FOUND)
def test_the_operating_point_is_found_and_said_last(
    times: Times, args: list[object], says: list[str], code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    result, levels = run_engine(monkeypatch, tmp_path, times, "--find-operating-point", *args)
    answer = result.out.splitlines()[-2]
    assert result.code == code and [word for word in says if word not in answer] == []
    assert [record["concurrency"] for record in result.levels] == levels
    assert [record["searched"] for record in result.levels] == [False] * 4 + [True] * (len(levels) - 4)
    assert len({(record["concurrency"], record["repeat"]) for record in result.levels}) == len(levels)
    assert all(record["requests"] >= 2 * record["concurrency"] for record in result.levels[4:])


def test_a_server_that_dies_during_the_search_is_a_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    times: Times = lambda c, level: (0.1, 0.02) if level < 6 else None  # noqa: E731
    gone = plain("500 X", "out of memory")
    result, levels = run_engine(monkeypatch, tmp_path, times, "--find-operating-point", behind=gone)
    assert result.code == 1 and "answers no more after c=160: http 500: 'out of memory'" in one_line(result)
    assert len(levels) == len(result.levels) == 7 and "in flight stay" not in result.out


# ---------------------------------------------------------------- until the figures hold

INTERVALS = [  # by hand: t x s / sqrt(n) / mean
    ([98.0, 100.0, 102.0], 4.303 * 2 / 3**0.5 / 100),
    ([99.0, 101.0], 12.706 * 2**0.5 / 2**0.5 / 100),
    ([100.0] * 5, 0.0),
    ([90.0, 110.0] * 10, 2.0856 * (20 * 100 / 19) ** 0.5 / 20**0.5 / 100),
]


@pytest.mark.parametrize(("values", "expected"), INTERVALS)
def test_the_interval_of_a_mean(values: list[float], expected: float) -> None:
    assert load_test.relative_interval(values) == pytest.approx(expected, rel=0.003)


@pytest.mark.parametrize("values", [[], [5.0], [0.0, 0.0]])
def test_an_interval_that_nothing_is_known_of(values: list[float]) -> None:
    assert load_test.relative_interval(values) is None
    assert load_test.not_settled({4: values}, 99) == {4: None}


def by_repeat(*factors: float) -> Times:
    """An engine whose level takes so much longer in each repeat of a ladder of two levels."""
    return lambda c, level: (0.01 * factors[level // 2], 0.02 * factors[level // 2])


UNTIL: list[tuple[Times, list[object], int, str]] = [  # engine, options, repeats, what is said
    (by_repeat(*[1.0] * 10), ["--until", 5], 3, "settled after 3 repeats: each level within +- 5 %"),
    (by_repeat(1, 1.02, 0.98, 1), ["--until", 4.5], 4, "settled after 4 repeats"),  # 4.96 % of three, 2.6 % of four
    (by_repeat(1, 1.02, 0.98, 1), ["--until", 5], 3, "settled after 3 repeats"),
    (by_repeat(*(1.1**n for n in range(10))), ["--until", 2], 10, "not settled to +- 2 % after 10: c=1 +- "),
    (by_repeat(*(1.1**n for n in range(10))), ["--until", 2, "--repeat", 4], 4, "not settled to +- 2 % after 4: c=1"),
    (by_repeat(*[1.0] * 10), ["--repeat", 4], 4, ""),
]


@pytest.mark.parametrize(("times", "args", "repeats", "says"), UNTIL)
def test_the_ladder_is_repeated_until_its_figures_hold(
    times: Times, args: list[object], repeats: int, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    result, levels = run_engine(monkeypatch, tmp_path, times, "--concurrency", "1,2", *args)
    assert result.code == 0 and levels == [1, 2] * repeats and says in result.said
    assert [record["repeat"] for record in result.levels] == [n for n in range(repeats) for _ in range(2)]


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["--until", "5", "--repeat", "2"], "--until needs at least 3 repeats"),
        (["--duration", "5", "--requests", "9"], "--duration and --requests exclude each other"),
        (["--duration", "5", "--min-rounds=2"], "--duration and --min-rounds exclude each other"),
        (["--turns", "30", "--requests", "40"], "--min-rounds 30"),
    ],
)
def test_options_that_contradict_each_other_are_refused(args: list[str], says: str) -> None:
    with pytest.raises(load_test.UsageError, match=says):
        load_test.parse_options(args)


# ---------------------------------------------------------------- a warm-up that ends by itself

WARM_UPS: list[tuple[list[float], int, bool]] = [  # TPOT of each request in ms (the last for ever), how many, settled
    ([20], 3, True),
    ([60, 60, 60, 60, 20], 3, True),  # three alike: nothing more can be known
    ([60, 50, 40, 30, 20], 7, True),
    ([30, 20, 21, 20.5], 4, True),
    ([30, 20, 21.1, 20], 6, True),
    (list(itertools.islice(itertools.cycle([20, 60]), 40)), 20, False),
]


@pytest.mark.parametrize(("tpots_ms", "requests", "settled"), WARM_UPS)
def test_a_warm_up_goes_on_until_tpot_has_settled(
    tpots_ms: list[float], requests: int, settled: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on an engine whose first requests take three times as long."""
    times: Iterator[float] = itertools.chain(tpots_ms, itertools.repeat(tpots_ms[-1]))

    async def say_hello(self: load_test.Service, max_tokens: int = 8) -> load_test.Observation:
        step_s = next(times) / 1000
        return observed([1 + step_s * token for token in range(max_tokens)])

    monkeypatch.setattr(load_test.Service, "say_hello", say_hello)
    with FakeServer([whole_stream()]) as server:
        result = load(server, tmp_path, "--warmup", "auto")
    (record,) = result.levels
    assert (record["warmup"], record["warmup_settled"]) == (requests, settled)
    assert (f"warm-up: settled after {requests} requests" in result.out) == settled
    assert (f"TPOT had not settled after {requests} requests" in result.err) != settled
    assert result.code == 0 and "warm-up auto" in result.out


def test_a_warm_up_that_is_always_refused_ends_the_run(tmp_path: Path) -> None:
    with FakeServer([plain("401 No", "who are you?")]) as server:
        result = load(server, tmp_path, "--warmup", "auto")
    assert result.code == 1 and "every warm-up request was refused" in result.err and result.levels == []


# ---------------------------------------------------------------- levels of a duration


def test_a_level_of_a_duration_hands_out_requests_until_it_is_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server ends the time, by moving the level's start: the requests in flight then finish and count."""
    runs: list[load_test.LevelRun] = []
    real = load_test.run_level

    async def run_level(route: Any, concurrency: int, supply: Any, stop: Any, run: Any, ended: Any) -> None:
        runs.append(run)
        await real(route, concurrency, supply, stop, run, ended)

    monkeypatch.setattr(load_test, "run_level", run_level)
    together = threading.Barrier(3)

    def end() -> None:
        if together.wait(30) == 0:
            runs[-1].started_at -= 1000
        together.wait(30)

    def answer(request: Request) -> list[Step]:
        return [end, whole_stream()] if 6 <= request.number < 9 else [whole_stream()]

    with FakeServer(answer) as server:
        argv = ["--base-url", server.base_url, "--model", "m", "--labbook", str(tmp_path / "book.md"), "--warmup", "0"]
        result = call_main([*argv, "--concurrency", "3", "--duration", "600"], tmp_path)
    (record,) = result.levels
    assert record["requests"] == record["completed"] == len(server.requests) == 9
    assert record["duration_s"] == 600.0 and "600 s a level" in result.out
    assert record["wall_s"] >= 1000  # to the end of the last response


# ---------------------------------------------------------------- conversations


def conversation(request: Request) -> list[str]:
    return [message["content"] for message in request.doc["messages"]]


def answer_in_turn(request: Request) -> list[Step]:
    """Everything that stood in the request before is cached, by this server's count of a token a message."""
    if not request.is_chat:
        return [plain("404 X", "")]
    length = len(request.doc["messages"])
    cached = {"prompt_tokens_details": {"cached_tokens": length - 1}}
    body = delta(f"answer to {length}", finish="stop") + usage(length, 1, **cached) + DONE
    return [CHUNKED + chunk(body) + LAST_CHUNK]


def test_conversations_grow_by_what_was_answered(tmp_path: Path) -> None:
    with FakeServer(answer_in_turn) as server:
        result = load(server, tmp_path, "--turns", 3, "--concurrency", 2, "--requests", 11)
    (record,) = result.levels
    assert record["requests"] == len(server.chats) == 12 and record["turns"] == 3  # whole conversations
    lengths = [len(request.doc["messages"]) for request in server.chats]
    assert sorted(lengths) == [1] * 4 + [3] * 4 + [5] * 4
    beginnings = {conversation(request)[0] for request in server.chats}
    assert len(beginnings) == 4
    for request in server.chats:
        texts = conversation(request)
        roles = [message["role"] for message in request.doc["messages"]]
        assert roles == ["user", "assistant"] * (len(texts) // 2) + ["user"]
        assert texts[1::2] == [f"answer to {n}" for n in (1, 3)][: len(texts) // 2]
    turns = record["by_turn"]
    assert [(turn["turn"], turn["completed"]) for turn in turns] == [(1, 4), (2, 4), (3, 4)]
    assert [(turn["prompt_tokens_mean"], turn["cached_tokens_mean"]) for turn in turns] == [(1, 0), (3, 2), (5, 4)]
    assert all(turn["ttft_p50_s"] > 0 for turn in turns)
    assert "cached/prompt 0/1 2/3 4/5 tok" in result.out


def test_a_conversation_ends_with_a_turn_that_fails(tmp_path: Path) -> None:
    def answer(request: Request) -> list[Step]:
        second = request.is_chat and len(request.doc["messages"]) == 3
        return [plain("500 X", "no")] if second else answer_in_turn(request)

    with FakeServer(answer) as server:
        result = load(server, tmp_path, "--turns", 3, "--requests", 6)
    (record,) = result.levels
    assert [len(request.doc["messages"]) for request in server.chats] == [1, 3, 1, 3]
    assert (record["completed"], record["failed"]) == (2, 2) and [turn["turn"] for turn in record["by_turn"]] == [1]


def test_the_questions_of_a_file_follow_each_other(tmp_path: Path) -> None:
    prompts = tmp_path / "p.txt"
    prompts.write_text("first\nsecond\n", "utf-8")
    with FakeServer(answer_in_turn) as server:
        load(server, tmp_path, "--turns", 2, "--requests", 2, "--prompts", prompts)
    assert conversation(server.chats[-1]) == ["first", "answer to 1", "second"]


@pytest.mark.parametrize(("context", "said"), [(100, True), (100_000, False), (None, False)])
def test_a_context_that_is_too_short_is_told_before_the_load(context: int | None, said: bool, tmp_path: Path) -> None:
    def answer(request: Request) -> list[Step]:
        if request.is_chat:
            return answer_in_turn(request)
        return [json_answer({"data": [{"id": "fake", "max_model_len": context}]})]

    with FakeServer(answer) as server:
        result = load(server, tmp_path, "--turns", 4, "--requests", 4)
    assert ("the context is 100: later turns will fail" in result.err) == said and result.code == 0


# ---------------------------------------------------------------- the GPU

ONE_GPU = ["0, NVIDIA H200, 310.50, 61, 1980, 90112", "0, NVIDIA H200, 650.25, 74, 1755, 90240"]
GPUS: list[tuple[Sequence[str], dict[str, Any] | None]] = [
    (
        ONE_GPU,
        {
            **{"name": "1 x NVIDIA H200", "power_w_mean": 480.38, "temperature_c_max": 74.0},
            **{"sm_clock_mhz_min": 1755.0, "memory_used_mib_max": 90240.0, "tokens_per_joule": 0.2082},
        },
    ),
    (  # two: the idle one's clock says nothing
        ["0, A, 100, 50, 1500, 1000", "1, A, 20, 40, 210, 10", "0, A, 120, 55, 1400, 1100", "1, A, 20, 41, 210, 10"],
        {
            **{"name": "2 x A", "power_w_mean": 130.0, "temperature_c_max": 55.0},
            **{"sm_clock_mhz_min": 1400.0, "memory_used_mib_max": 1110.0, "tokens_per_joule": 0.7692},
        },
    ),
    (  # shared memory: nvidia-smi does not know it
        ["0, NVIDIA GB10, 35.2, 60, 2400, [N/A]"],
        {
            **{"name": "1 x NVIDIA GB10", "power_w_mean": 35.2, "temperature_c_max": 60.0},
            **{"sm_clock_mhz_min": 2400.0, "memory_used_mib_max": None, "tokens_per_joule": 2.8409},
        },
    ),
    (
        ["0, X, [Not Supported], ERR!, -5, nan"],
        {
            **{"name": "1 x X", "power_w_mean": None, "temperature_c_max": None},
            **{"sm_clock_mhz_min": None, "memory_used_mib_max": None, "tokens_per_joule": None},
        },
    ),
    ([], None),
    (["NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver."], None),
    (["0, X, 1, 2", "a, b, c, d, e, f", "\x00" * 50, "1" * 1000], None),
]


@pytest.mark.parametrize(("lines", "expected"), GPUS)
def test_what_nvidia_smi_printed_is_read_or_left_out(lines: Sequence[str], expected: dict[str, Any] | None) -> None:
    """1,000 tokens in 10 s."""
    assert load_test.gpu_figures(lines, 1000, 10.0) == expected


STAND_INS = {  # what a program of that name does, and whether there is a figure then
    "prints": ("while True: print('0, Stand-in, 100.0, 50, 1500, 1000', flush=True); time.sleep(0.02)", True),
    "prints nonsense": ("print('no GPU here', flush=True)\ntime.sleep(60)", False),
    "prints one endless line": ("while True: print('x' * 5000, end='', flush=True)", False),
    "ends": ("sys.exit(9)", False),
    "hangs": ("time.sleep(60)", False),
}


@pytest.mark.parametrize("stand_in", [*STAND_INS, "is not there"])
def test_no_nvidia_smi_disturbs_a_level(stand_in: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text, told = STAND_INS.get(stand_in, ("", False))
    folder = tmp_path / "bin"
    folder.mkdir()
    if text:
        program = folder / "nvidia-smi"
        program.write_text(f"#!{sys.executable}\nimport sys, time\n{text}\n", "utf-8")
        program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", str(folder))
    came = threading.Event()
    watches: list[load_test.GpuWatch] = []

    class Lines(list[Any]):
        def append(self, item: Any) -> None:
            super().append(item)
            came.set()

    class Watch(load_test.GpuWatch):
        def _read(self) -> None:
            watches.append(self)
            self.lines = Lines()
            super()._read()

    monkeypatch.setattr(load_test, "GpuWatch", Watch)

    def answer(request: Request) -> list[Step]:
        if not request.is_chat:
            return [plain("404 X", "")]
        return [CHUNKED, *([came.clear, came] if told else []), whole_stream()[len(CHUNKED) :]]

    with FakeServer(answer) as server:
        result = load(server, tmp_path, "--sample", 5, "--requests", 2)
    (record,) = result.levels
    assert result.code == 0 and record["completed"] == 2
    assert (record["gpu"] is not None) == told == ("gpu: 1 x Stand-in  power mean 100.0 W" in result.out)
    for watch in watches:
        assert watch._process is not None and watch._process.wait(30) is not None  # it does not outlive the run


@pytest.mark.parametrize(
    ("address", "local"), [(("127.0.0.1", 80), True), (("192.0.2.1", 80), False), (("::ffff", 80, 0, 0), False)]
)
def test_only_a_local_servers_gpu_is_this_machines(address: tuple[Any, ...], local: bool) -> None:
    assert load_test.is_local(address) is local
