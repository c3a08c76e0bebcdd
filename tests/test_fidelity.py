"""What the load generator measures against what the engine wrote down itself, by the order of events.

The simulated engine runs in a process of its own and stamps every arrival and every send on the clock that the client
reads too (CLOCK_MONOTONIC, one for all processes on Linux). So what must hold is an order, never a duration: a text
is not seen before it was sent, a request does not arrive before its clock has started. Every figure of a level is
worked out once more, by other means, from the raw lines.
"""

from __future__ import annotations

import math
import socket
import ssl
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import pytest
import trustme
from conftest import SimEngine
from fake_server import (
    CHUNKED,
    DONE,
    LAST_CHUNK,
    ClientReads,
    FakeServer,
    Request,
    Result,
    Step,
    arguments,
    call_main,
    chunk,
    delta,
    event,
    load,
    usage,
    whole_stream,
)

import load_test

one_clock = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="one clock for all processes is Linux's")

# A raw line rounds to 1 us, and a moment is the sum of up to four of its figures; the kernel's stamp of an arrival is
# wall-clock time, of which a float holds a quarter of a microsecond.
ROUNDED_S = 2e-6
ARRIVAL_S = ROUNDED_S + 1e-6
LEVELS, REQUESTS, TOKENS = (1, 4), 16, 24
PACE = ("--a-ms", 2, "--b-ms", 0.3, "--prefill-tok-s", 20_000)
ENGINES: dict[str, tuple[object, ...]] = {
    "llama, two slots": ("--dialect", "llama", "--slots", 2, "--early-stop", TOKENS),
    "vllm, reasoning in threes": (
        *("--dialect", "vllm", "--slots", 4, "--reasoning", "reasoning", "--reasoning-tokens", 7),
        *("--tokens-per-delta", 3),
    ),
    "llama, four deltas a write": ("--dialect", "llama", "--slots", 4, "--deltas-per-write", 4),
}


class Pair(NamedTuple):
    """One request: the raw line, the engine's line, and the client's own moments of it (clock readings)."""

    raw: dict[str, Any]
    log: dict[str, Any]
    run: load_test.LevelRun
    seen: load_test.Observation

    def moment(self, name: str) -> float:
        """A time of the raw line that counts from the write, as a clock reading."""
        value: float = self.raw[name]
        return self.written + value

    @property
    def connecting(self) -> float:
        started_s: float = self.raw["started_s"]
        return self.run.started_at + started_s

    @property
    def written(self) -> float:
        connect_s: float = self.raw["connect_s"]
        return self.connecting + connect_s


class Level(NamedTuple):
    """One level: its record, and its requests in the order of their numbers."""

    record: dict[str, Any]
    pairs: list[Pair]
    run: load_test.LevelRun


class Capture:
    """Keeps what `run_level` fills in: clock readings, of which the files hold differences only."""

    def __init__(self) -> None:
        self.runs: list[load_test.LevelRun] = []

    def patched(self) -> Any:
        original = load_test.run_level

        async def run_level(
            route: Any, concurrency: int, payloads: Any, stop: Any, run: load_test.LevelRun, ended: Any
        ) -> None:
            self.runs.append(run)
            await original(route, concurrency, payloads, stop, run, ended)

        return mock.patch.object(load_test, "run_level", run_level)


def write_prompts(path: Path) -> Path:
    """Prompts that begin alike, each longer than the one before: their lengths name them in the engine's log."""
    path.write_text("\n".join("a beginning for all " * 8 + "tell " * 3 * k for k in range(1, REQUESTS + 1)), "utf-8")
    return path


def levels_of(result: Result, log: Sequence[dict[str, Any]], runs: Sequence[load_test.LevelRun]) -> list[Level]:
    by_arrival = sorted(log, key=lambda line: float(line["request_read"]))
    found = []
    for number, (record, run) in enumerate(zip(result.levels, runs)):
        raws = [raw for raw in result.requests if raw["concurrency"] == record["concurrency"]]
        lines = by_arrival[number * REQUESTS : (number + 1) * REQUESTS]  # levels do not overlap
        lines.sort(key=lambda line: int(line["prompt_tokens"]))
        seen = {item.index: item.seen for item in run.finished}
        pairs = [Pair(raw, line, run, seen[raw["index"]]) for raw, line in zip(raws, lines)]
        assert [pair.raw["index"] for pair in pairs] == list(range(REQUESTS)) and len(lines) == REQUESTS
        found.append(Level(record, pairs, run))
    return found


@pytest.fixture(scope="module", params=list(ENGINES))
def played(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[Level]:
    """Both levels against one of the engines."""
    folder = tmp_path_factory.mktemp("fidelity")
    engine = SimEngine(folder, *PACE, *ENGINES[request.param])
    capture = Capture()
    try:
        size = ["--concurrency", ",".join(map(str, LEVELS)), "--requests", REQUESTS, "--max-tokens", TOKENS]
        objective = ["--slo-ttft", 0.05, "--slo-tpot", 0.0026]  # some meet it, some do not
        prompts = ["--prompts", write_prompts(folder / "prompts.txt"), "--model", "sim-chat"]
        with capture.patched():
            result = call_main(arguments(folder, engine.base_url, *size, *objective, *prompts), folder)
    finally:
        engine.stop()
    assert result.code == 0 and result.err == ""
    log = engine.read_log()
    assert len(log) == len(LEVELS) * REQUESTS and len(result.levels) == len(LEVELS)
    return levels_of(result, log, capture.runs)


# ---------------------------------------------------------------- times


@one_clock
def test_no_text_is_seen_before_it_was_sent(played: list[Level]) -> None:
    for level in played:
        for pair in level.pairs:
            assert len(pair.log["sends"]) == pair.raw["deltas"] == pair.seen.deltas
            stamps = [at for at, count in zip(pair.seen.moments, pair.seen.counts) for _ in range(count)]
            assert stamps == sorted(stamps)
            for sent, came in zip(pair.log["sends"], stamps):
                assert sent <= came
            assert pair.moment("ttft_s") >= pair.log["sends"][0] - ROUNDED_S
            assert pair.moment("last_token_s") >= pair.log["sends"][-1] - ROUNDED_S
            assert pair.moment("ttft_s") == pytest.approx(stamps[0], abs=ROUNDED_S)
            assert pair.moment("last_token_s") == pytest.approx(stamps[-1], abs=ROUNDED_S)


@one_clock
def test_the_clock_of_a_request_starts_at_its_write(played: list[Level]) -> None:
    for level in played:
        assert all(pair.connecting >= level.run.started_at for pair in level.pairs)
        for pair in level.pairs:
            assert pair.connecting <= pair.log["connected"] + ROUNDED_S
            assert pair.written <= pair.log["request_read"] + ROUNDED_S
            assert pair.written <= pair.log["arrived"] + ARRIVAL_S
            for name, which in (("ttft_s", 0), ("last_token_s", -1)):
                assert pair.raw[name] >= pair.log["sends"][which] - pair.log["arrived"] - ARRIVAL_S


@one_clock
def test_one_at_a_time_a_response_ends_before_the_next_request_is_there(played: list[Level]) -> None:
    """The other side of the bounds above: what the client says of a response is over by the next arrival."""
    level = played[0]
    assert level.record["concurrency"] == 1
    for pair, following in zip(level.pairs, level.pairs[1:]):
        moments = [pair.moment("ttft_s"), pair.moment("last_token_s"), pair.moment("ended_s")]
        moments += [following.connecting, following.written, following.log["request_read"]]
        for earlier, later in zip(moments, moments[1:]):
            assert earlier <= later + ROUNDED_S
        assert pair.moment("ended_s") <= following.log["connected"] + ROUNDED_S


@one_clock
def test_a_level_is_never_faster_than_the_engine_was(played: list[Level]) -> None:
    for level in played:
        first = min(pair.log["request_read"] for pair in level.pairs)
        last = max(pair.log["sends"][-1] for pair in level.pairs)
        assert level.record["wall_s"] >= last - first - ROUNDED_S
        made = sum(pair.log["output_tokens"] for pair in level.pairs)
        assert level.record["output_tokens_per_s"] <= made / (last - first) + 1e-3


# ---------------------------------------------------------------- counts


def test_counts_are_those_of_the_engines_log(played: list[Level]) -> None:
    cached = 0
    for level in played:
        for raw, log, _, seen in level.pairs:
            assert (raw["output_tokens"], raw["prompt_tokens"]) == (log["output_tokens"], log["prompt_tokens"])
            assert (raw["cached_tokens"], raw["finish"]) == (log["cached_tokens"], log["finish"])
            assert (raw["deltas"], raw["status"], raw["ok"]) == (len(log["sends"]), log["status"], True)
            assert raw["token_source"] == "usage" and raw["output_chars"] == len(seen.text())
        logs = [pair.log for pair in level.pairs]
        assert level.record["output_tokens"] == sum(log["output_tokens"] for log in logs)
        for name in ("prompt_tokens", "cached_tokens"):
            assert level.record[f"{name}_mean"] == pytest.approx(sum(log[name] for log in logs) / REQUESTS, abs=0.005)
        cached += sum(log["cached_tokens"] for log in logs)
    assert cached > 0, "prompts that begin alike must have shown the cached tokens"


# ---------------------------------------------------------------- a level's figures, from its raw lines


def nearest_rank(values: Sequence[float], percent: int) -> float:
    """The definition to the letter: the smallest value with at least `percent` % of all at or below it."""
    return min(v for v in values if sum(other <= v for other in values) * 100 >= percent * len(values))


def assert_summary(found: dict[str, Any], values: Sequence[float]) -> None:
    assert set(found) == {"p50", "p90", "p95", "p99", "mean", "min", "max"} and values
    for percent in (50, 90, 95, 99):
        assert found[f"p{percent}"] == round(nearest_rank(values, percent), 6), percent
    assert (found["min"], found["max"]) == (round(min(values), 6), round(max(values), 6))
    assert found["mean"] == pytest.approx(math.fsum(values) / len(values), abs=6e-7)


def test_tpot_is_the_time_between_first_and_last_over_one_less_than_the_tokens(played: list[Level]) -> None:
    for level in played:
        for pair in level.pairs:
            raw, tokens = pair.raw, pair.raw["output_tokens"]
            if tokens < 2:
                assert raw["tpot_s"] is None
                continue
            assert raw["tpot_s"] == pytest.approx((raw["last_token_s"] - raw["ttft_s"]) / (tokens - 1), abs=1e-9)
            span = pair.seen.moments[-1] - pair.seen.moments[0]
            assert raw["tpot_s"] * (tokens - 1) == pytest.approx(span, abs=ROUNDED_S)


def test_the_figures_of_a_level_follow_from_its_raw_lines(played: list[Level]) -> None:
    for record, pairs, run in played:
        raws = [pair.raw for pair in pairs]
        wall_s = max(raw["started_s"] + raw["connect_s"] + raw["ended_s"] for raw in raws)
        tokens = sum(raw["output_tokens"] for raw in raws)
        good = [
            raw
            for raw in raws
            if raw["ttft_s"] <= record["slo_ttft_s"]
            and (raw["output_tokens"] < 2 or raw["tpot_s"] <= record["slo_tpot_s"])
        ]
        assert (record["requests"], record["completed"], record["failed"]) == (REQUESTS, REQUESTS, 0)
        assert (record["output_tokens"], record["within_slo"]) == (tokens, len(good))
        assert record["wall_s"] == pytest.approx(wall_s, abs=ROUNDED_S)
        for name, count in (
            ("output_tokens_per_s", tokens),
            ("requests_per_s", REQUESTS),
            ("goodput_requests_per_s", len(good)),
        ):
            assert record[name] == pytest.approx(count / wall_s, abs=1e-4), name
        in_flight = sum(raw["connect_s"] + raw["ended_s"] for raw in raws) / wall_s
        assert record["mean_in_flight"] == pytest.approx(min(in_flight, run.concurrency), abs=1e-4)
        for name in ("ttft_s", "tpot_s", "e2e_s", "connect_s"):
            assert_summary(record[name], [raw[name] for raw in raws if raw[name] is not None])
        sizes = sorted(raw["output_tokens"] for raw in raws)
        per_request = {f"p{p}": nearest_rank(sizes, p) for p in (50, 90)}
        assert record["output_tokens_per_request"] == {"min": sizes[0], **per_request, "max": sizes[-1]}


def test_gaps_and_the_steady_state_follow_from_the_moments(played: list[Level]) -> None:
    """Neither stands in the raw file: both need the moment of every delta."""
    gaps_seen = steady_seen = 0
    for record, pairs, run in played:
        texts: list[tuple[float, float]] = []  # when each delta came, and how many tokens it stands for
        gaps: list[float] = []
        for pair in pairs:
            stamps = [at for at, count in zip(pair.seen.moments, pair.seen.counts) for _ in range(count)]
            texts += [(at, pair.raw["output_tokens"] / len(stamps)) for at in stamps]
            gaps += [later - sooner for sooner, later in zip(stamps, stamps[1:])]
        assert_summary(record["chunk_gap_s"], gaps)
        gaps_seen += len(gaps)
        # The first c requests are each some worker's first, and none failed.
        begin = max(pair.seen.moments[0] for pair in pairs[: run.concurrency])
        end = run.empty_at
        assert end is not None
        if sum(begin < pair.seen.ended_at <= end for pair in pairs) < 2 * run.concurrency:
            assert record["steady_window_s"] is None and record["steady_output_tokens_per_s"] is None
            continue
        assert record["steady_window_s"] == pytest.approx(end - begin, abs=ROUNDED_S)
        inside = math.fsum(tokens for at, tokens in texts if begin < at <= end)
        assert record["steady_output_tokens_per_s"] == pytest.approx(inside / (end - begin), abs=1e-3)
        # The queue is empty once the last request has been taken, and a worker finds out when its response is over.
        taken = max(pair.connecting for pair in pairs)
        assert end >= min(at for at in (pair.moment("ended_s") for pair in pairs) if at >= taken) - ROUNDED_S
        steady_seen += 1
    assert gaps_seen and steady_seen, "one at a time, all but the first and the last end inside"


# ---------------------------------------------------------------- step by step: nothing is stamped late either


def text_pieces(texts: int) -> list[tuple[bool, bytes]]:
    """A response piece by piece, and whether each carries text. More plain ones in a row than may wait unparsed, and
    some that are not plain."""
    pieces = [(False, CHUNKED), (False, chunk(delta(role="assistant") + delta(""))), (False, chunk(b": waiting\n\n"))]
    pieces += [(True, chunk(delta(f" w{number}"))) for number in range(texts)]
    pieces.insert(10, (False, chunk(b":\n\n")))
    pieces.insert(20, (True, chunk(b'data: {"choices":[{"delta":{"content":"\\u00e9\\ud83d\\ude00"}}]}\n\n')))
    pieces.insert(30, (False, chunk(event({"choices": []}))))
    calls = [{"index": 0, "function": {"name": "f", "arguments": "{}"}}]
    pieces.append((True, chunk(delta(tool_calls=calls))))
    return [*pieces, (False, chunk(delta(finish="stop"))), (False, chunk(usage(9, 500) + DONE) + LAST_CHUNK)]


def context_of(authority: trustme.CA) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("127.0.0.1").configure_cert(context)
    return context


@pytest.fixture(scope="module")
def authority() -> trustme.CA:
    return trustme.CA()


@pytest.fixture
def trusted(authority: trustme.CA, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ssl.SSLContext:
    """A server's TLS context that the program trusts."""
    path = tmp_path / "authority.pem"
    authority.cert_pem.write_to_path(str(path))
    monkeypatch.setenv("SSL_CERT_FILE", str(path))
    monkeypatch.delenv("SSL_CERT_DIR", raising=False)
    return context_of(authority)


@pytest.mark.parametrize("secure", [False, True], ids=["plain", "tls"])
def test_every_text_is_stamped_between_its_sending_and_the_next(
    secure: bool, trusted: ssl.SSLContext, tmp_path: Path
) -> None:
    """The server writes a piece only when the one before has been read, and stamps each before the write."""
    reads, capture = ClientReads(), Capture()
    pieces = text_pieces(2 * load_test.HOLD_READS + 20)
    sent_at: list[float] = []

    def answer(request: Request) -> Iterator[Step]:
        sent = 0
        for _, piece in pieces:
            sent_at.append(time.perf_counter())
            yield piece
            sent += len(piece)
            reads.wait_for(sent)

    with capture.patched(), reads.patched(), FakeServer(answer, tls=trusted if secure else None) as server:
        result = load(server, tmp_path)
        (request,) = server.requests
    assert result.code == 0
    (raw,) = result.requests
    seen = capture.runs[0].finished[0].seen
    texts = [number for number, (is_text, _) in enumerate(pieces) if is_text]
    assert raw["deltas"] == len(texts) == len(seen.moments) and raw["output_tokens"] == 500
    for number, came in zip(texts, seen.moments):
        assert sent_at[number] <= came <= sent_at[number + 1], number
    written = capture.runs[0].started_at + raw["started_s"] + raw["connect_s"]
    assert written <= request.arrived_s + ROUNDED_S
    first, last = texts[0], texts[-1]
    assert sent_at[first] - ROUNDED_S <= written + raw["ttft_s"] <= sent_at[first + 1] + ROUNDED_S
    assert sent_at[last] - ROUNDED_S <= written + raw["last_token_s"] <= sent_at[last + 1] + ROUNDED_S
    assert written + raw["ended_s"] >= sent_at[-1] - ROUNDED_S  # what follows the last text is no latency


# ---------------------------------------------------------------- a door that opens late


class SlowDoor:
    """A server that answers one request, and lets its client wait outside first.

    TLS: the connection is taken, the handshake waits. Plain: the accept queue is full (`fill` it), so that the system
    takes no connection at all until somebody has been let in. `opened_at` is read just before either goes on.
    """

    def __init__(self, tls: ssl.SSLContext | None) -> None:
        self._tls = tls
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=0)
        self._listener.settimeout(60)
        self.address: tuple[str, int] = self._listener.getsockname()
        self.knocking = threading.Event()
        self.opened_at = 0.0
        self.request = b""
        self.problem: BaseException | None = None
        self._thread = threading.Thread(target=self._work, daemon=True)
        self._thread.start()

    def fill(self) -> None:
        """Take the one place in the queue."""
        self._filler = socket.create_connection(self.address)

    def close(self) -> None:
        self._thread.join(60)
        self._listener.close()
        if self._tls is None:
            self._filler.close()
        if self.problem is not None:
            raise self.problem

    def _work(self) -> None:
        try:
            self._listener.accept()[0].close()  # the program looks for an address that answers
            if self._tls is None:
                assert self.knocking.wait(60)
                self.opened_at = time.perf_counter()
                self._listener.accept()[0].close()
            connection, _ = self._listener.accept()
            connection.settimeout(60)
            if self._tls is not None:
                self.opened_at = time.perf_counter()
                connection = self._tls.wrap_socket(connection, server_side=True)
            with connection:
                while b'"stream_options"' not in self.request or not self.request.endswith(b"}"):
                    more = connection.recv(65536)
                    assert more, "the client closed before its request was whole"
                    self.request += more
                connection.sendall(whole_stream())
        except BaseException as error:
            self.problem = error


def assert_waited_outside(door: SlowDoor, run: load_test.LevelRun, result: Result) -> None:
    """Connecting began before the door opened, the request's clock after that: the wait is in `connect_s` alone."""
    (raw,), (level,) = result.requests, result.levels
    assert result.code == 0 and raw["ok"] and b"POST " in door.request
    connecting = run.started_at + raw["started_s"]
    assert connecting <= door.opened_at + ROUNDED_S
    assert connecting + raw["connect_s"] >= door.opened_at - ROUNDED_S
    assert raw["connect_s"] >= door.opened_at - connecting - ROUNDED_S
    seen = run.finished[0].seen
    assert seen.first_token_at is not None and seen.written_at >= door.opened_at
    assert raw["ttft_s"] == pytest.approx(seen.first_token_at - seen.written_at, abs=ROUNDED_S)
    assert level["connect_s"]["max"] == raw["connect_s"] and level["ttft_s"]["max"] == raw["ttft_s"]
    assert level["wall_s"] >= raw["connect_s"] + raw["ttft_s"]  # in flight it was all along


def test_a_handshake_that_waits_is_in_connect_s_and_not_in_ttft(trusted: ssl.SSLContext, tmp_path: Path) -> None:
    door, capture = SlowDoor(trusted), Capture()
    with capture.patched():
        result = load(f"https://127.0.0.1:{door.address[1]}/v1", tmp_path)
    door.close()
    assert_waited_outside(door, capture.runs[0], result)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="a full accept queue is Linux's way of waiting")
def test_a_full_accept_queue_is_in_connect_s_and_not_in_ttft(tmp_path: Path) -> None:
    door, capture = SlowDoor(None), Capture()
    original = load_test.Connection.open

    def opening(connection: Any) -> None:
        door.fill()
        original(connection)
        door.knocking.set()  # the connection attempt is under way

    with capture.patched(), mock.patch.object(load_test.Connection, "open", opening):
        result = load(f"http://127.0.0.1:{door.address[1]}/v1", tmp_path)
    door.close()
    assert_waited_outside(door, capture.runs[0], result)
