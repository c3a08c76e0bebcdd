"""Servers that stop: whatever is missing, and whatever trickles on meanwhile, a request ends and the run goes on.

When a response is given up is arithmetic on the times of its tokens: it is tried here without a socket and on a clock
of the test's own. That the client then does give up is tried over a socket, with that arithmetic replaced by the
server's word.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from fake_server import (
    CHUNKED,
    DONE,
    HOLD,
    LAST_CHUNK,
    STREAM_HEAD,
    TO_CLOSE,
    FakeServer,
    Request,
    Step,
    chunk,
    delta,
    load,
    plain,
    usage,
    whole_stream,
)
from fuzz_wire import BEGIN, new_stream

import load_test

LIMIT_S = 20.0
TAIL = delta(finish="stop")

# What comes at first, and what then comes every second for ever.
STALLS: dict[str, tuple[bytes, bytes]] = {
    "silent from the start": (b"", b""),
    "silent inside the head": (b"HTTP/1.1 200 OK\r\nContent-Type: te", b""),
    "silent after the head": (CHUNKED, b""),
    "silent after the role": (CHUNKED + chunk(delta(role="assistant", content="")), b""),
    "silent after a token": (CHUNKED + chunk(delta("a")), b""),
    "silent inside a chunk": (CHUNKED + chunk(delta("a")) + b"40\r\ndata: {", b""),
    "short of its length": (STREAM_HEAD + b"Content-Length: 5000\r\n\r\n" + delta("a"), b""),
    "a head that trickles": (b"HTTP/1.1 200 OK\r\n", b"X"),
    "a head of many lines": (b"HTTP/1.1 200 OK\r\n", b"X: y\r\n"),
    "interim heads for ever": (b"", b"HTTP/1.1 100 Continue\r\n\r\n"),
    # https://github.com/noonghunna/benchlocal-cli/issues/157: keep-alive comments defeat a limit on bytes
    "keep-alives before the first token": (TO_CLOSE, b": keepalive 1/2\n\n"),
    "keep-alives after a token": (TO_CLOSE + delta("a"), b":\n\n"),
    "empty events for ever": (TO_CLOSE + delta("a"), b"data:\n\n"),
    "roles for ever": (TO_CLOSE, delta(role="assistant", content="")),
    "usage for ever": (TO_CLOSE + delta("a"), usage(1, 1)),
    "an event that trickles": (TO_CLOSE + delta("a") + b"data: ", b"x"),
    "a chunk size that trickles": (CHUNKED + chunk(delta("a")), b"0"),
    "a chunk extension that trickles": (CHUNKED + chunk(delta("a")) + b"5;", b"x"),
    "a trailer for ever": (CHUNKED + chunk(delta("a")) + b"0\r\n", b"X: y\r\n"),
    "text after a finish reason, then nothing": (TO_CLOSE + TAIL + delta("a"), b""),
}


@pytest.mark.parametrize("kind", STALLS)
def test_only_a_token_puts_the_end_off(kind: str) -> None:
    # https://github.com/generative-computing/mellea/issues/1272: a limit between tokens, not on the whole request
    first, piece = STALLS[kind]
    stream = new_stream()
    stream.feed(first, BEGIN + 1)
    last_token_at = BEGIN + 1 if stream.seen.deltas else BEGIN
    for second in range(2, 15):
        stream.feed(piece, BEGIN + second)
        assert not stream.over and stream.deadline_at(LIMIT_S) == last_token_at + LIMIT_S
    stream.silent(LIMIT_S, BEGIN + 99)
    assert stream.seen.failure == load_test.Failure("timeout", "timeout: no token for 20 s")
    assert stream.seen.record(0, BEGIN).ended_s == 99


def test_each_token_puts_the_end_off() -> None:
    stream = new_stream()
    stream.feed(TO_CLOSE, BEGIN)
    for second in range(1, 200):
        stream.feed(delta("a"), BEGIN + second)
        assert stream.deadline_at(LIMIT_S) == BEGIN + second + LIMIT_S


# What is known before the end of the response: the outcome; only the end is missing then, for a while.
KNOWN: dict[str, tuple[bytes, str | None]] = {
    "a finish reason": (TO_CLOSE + delta("a") + TAIL, None),
    "a finish reason in a chunk": (CHUNKED + chunk(delta("a") + TAIL), None),
    "half a last chunk": (CHUNKED + chunk(delta("a") + TAIL) + LAST_CHUNK[:-2], None),
    "a finish reason with the text": (TO_CLOSE + delta("a", finish="length"), None),
    "a finish reason and usage": (TO_CLOSE + delta("a") + TAIL + usage(3, 1), None),
    "half an error": (b"HTTP/1.1 500 X\r\nContent-Length: 99\r\n\r\n" + b'{"error":"no"}', "http 500: no"),
    "an error without a body": (b"HTTP/1.1 500 X\r\n\r\n", "http 500: no text"),
    "an endless error": (b"HTTP/1.1 500 X\r\n\r\n" + b"x" * 99, "http 500: 'xxx"),
    "half a page": (plain("200 OK", "<h1>hi</h1>", "text/html")[:-3], "not an event stream"),
}


@pytest.mark.parametrize("kind", KNOWN)
@pytest.mark.parametrize("limit_s", [1.0, 60.0])
def test_a_known_outcome_is_not_waited_for_long(kind: str, limit_s: float) -> None:
    data, says = KNOWN[kind]
    stream = new_stream()
    stream.feed(data, BEGIN + 1)
    until = BEGIN + 1 + min(load_test.TAIL_GRACE_S, limit_s)
    assert not stream.over and stream.deadline_at(limit_s) == until
    stream.silent(limit_s, until)
    record = stream.seen.record(0, BEGIN)
    assert record.ok is (says is None) and (says or "") in (record.error or "")
    assert record.unclosed is (says is None)  # its end was waited for in vain: a level counts that


def test_text_after_a_finish_reason_goes_on_as_long_as_it_comes() -> None:
    """As of a server whose role chunk says `stop`, or of a second choice."""
    stream = new_stream()
    stream.feed(TO_CLOSE + delta(role="assistant", finish="stop"), BEGIN)
    for second in range(3, 60, 3):
        stream.feed(delta(f" w{second}"), BEGIN + second)
        assert stream.deadline_at(LIMIT_S) == BEGIN + second + LIMIT_S
        stream.feed(TAIL, BEGIN + second)  # one after each text, which the short cut knows by then
        assert stream.deadline_at(LIMIT_S) == BEGIN + second + load_test.TAIL_GRACE_S
    stream.feed(TAIL + DONE, BEGIN + 60)
    assert stream.over and stream.seen.failure is None and stream.seen.deltas == 19
    assert stream.seen.record(0, BEGIN).unclosed is False


# ---------------------------------------------------------------- over a socket


@pytest.fixture
def given_up(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Once set, every response that is looked at has passed its deadline. Looks come often."""
    event = threading.Event()
    real = load_test.Stream.deadline_at

    def deadline_at(stream: load_test.Stream, timeout_s: float) -> float:
        return 0.0 if event.is_set() else real(stream, timeout_s)

    monkeypatch.setattr(load_test.Stream, "deadline_at", deadline_at)
    monkeypatch.setattr(load_test, "TAIL_GRACE_S", 0.01)
    return event


@pytest.mark.parametrize("trickle", [None, b":\n\n"], ids=["silent", "trickling"])
def test_a_stall_fails_its_request_and_nothing_else(
    trickle: bytes | None, given_up: threading.Event, tmp_path: Path
) -> None:
    # https://github.com/vllm-project/vllm/pull/51030: one half-open stream blocked a whole run
    def answer(request: Request) -> Iterator[Step]:
        given_up.clear()
        if request.prompt != "stall":
            yield whole_stream()
            return
        yield TO_CLOSE + delta("a")
        given_up.set()
        for _ in itertools.count() if trickle else ():
            yield 0.01
            yield trickle
        yield HOLD

    prompts = tmp_path / "prompts.txt"
    prompts.write_text("fine\nstall\nfine\nfine\n", "utf-8")
    with FakeServer(answer) as server:
        result = load(server, tmp_path, "--requests", 4, "--timeout", 60, "--prompts", prompts)
    assert result.code == 0 and result.err == ""
    (level,) = result.levels
    assert (level["completed"], level["failed"], level["errors"]) == (3, 1, {"timeout": 1})
    assert result.requests[1]["error"] == "timeout: no token for 60 s"


@pytest.mark.parametrize("steps", [[TO_CLOSE + delta("a") + TAIL, HOLD], [CHUNKED + chunk(delta("a") + TAIL), HOLD]])
def test_a_server_that_ends_without_closing_is_left(
    steps: Sequence[Step], given_up: threading.Event, tmp_path: Path
) -> None:
    """The limit of what is left after a finish reason is the one that `given_up` makes short."""
    with FakeServer(steps) as server:
        result = load(server, tmp_path, "--requests", 2, "--timeout", 60)
        assert all(server.hung_up.acquire(timeout=60) for _ in range(2))
    assert result.code == 0 and [raw["unclosed"] for raw in result.requests] == [True, True]


@pytest.mark.parametrize("framing", ["chunked", "unframed"])
def test_a_server_that_never_closes_after_its_done_is_not_waited_for(framing: str, tmp_path: Path) -> None:
    # https://github.com/anistark/wasmrun/pull/111
    body = delta("a") + TAIL + DONE
    steps: list[Step] = [CHUNKED + chunk(body) if framing == "chunked" else TO_CLOSE + body, HOLD]
    with FakeServer(steps) as server:
        result = load(server, tmp_path, "--requests", 3, "--timeout", 1000)  # waiting would outlast the test
        assert all(server.hung_up.acquire(timeout=60) for _ in range(3))
    assert result.code == 0 and all(raw["ok"] and "unclosed" not in raw for raw in result.requests)


def test_a_prompt_that_nobody_reads(given_up: threading.Event, tmp_path: Path) -> None:
    """More bytes than the buffers on the way hold, and a server that takes none: no token, so a timeout."""
    prompts = tmp_path / "long.txt"
    prompts.write_text("long " * 4_000_000, "utf-8")
    given_up.set()
    with FakeServer([HOLD], reads_bodies=False) as server:
        result = load(server, tmp_path, "--prompts", prompts, "--timeout", 60)
    (raw,) = result.requests
    assert result.code == 1 and raw["error"] == "timeout: no token for 60 s"
