"""Servers that stop: whatever is missing, and whatever trickles on meanwhile, a request ends and the run goes on.

The limits are short; nothing here depends on how short, only on the run coming to its end.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
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
    whole_stream,
)

import load_test

LONG_S = 60  # a limit that no test waits for
TAIL = delta(finish="stop")


def forever(first: list[Step], piece: bytes) -> Iterator[Step]:
    """These steps, then one piece every 10 ms until the client has gone."""
    yield from first
    for _ in itertools.count():
        yield 0.01
        yield piece


STALLS: dict[str, tuple[list[Step], bytes | None]] = {
    "silent from the start": ([HOLD], None),
    "silent inside the head": ([b"HTTP/1.1 200 OK\r\nContent-Type: te", HOLD], None),
    "silent after the head": ([CHUNKED, HOLD], None),
    "silent after the role": ([CHUNKED, chunk(delta(role="assistant", content="")), HOLD], None),
    "silent after a token": ([CHUNKED, chunk(delta("a")), HOLD], None),
    "silent inside a chunk": ([CHUNKED, chunk(delta("a")), b"40\r\ndata: {", HOLD], None),
    "a head that trickles": ([b"HTTP/1.1 200 OK\r\n"], b"X"),
    "a head of many lines": ([b"HTTP/1.1 200 OK\r\n"], b"X: y\r\n"),
    "interim heads for ever": ([], b"HTTP/1.1 100 Continue\r\n\r\n"),
    # https://github.com/noonghunna/benchlocal-cli/issues/157: keep-alive comments defeat a limit on bytes
    "keep-alives before the first token": ([TO_CLOSE], b": keepalive 1/2\n\n"),
    "keep-alives after a token": ([TO_CLOSE, delta("a")], b":\n\n"),
    "empty events for ever": ([TO_CLOSE, delta("a")], b"data:\n\n"),
    "roles for ever": ([TO_CLOSE], delta(role="assistant", content="")),
    "an event that trickles": ([TO_CLOSE, delta("a"), b"data: "], b"x"),
    "a chunk size that trickles": ([CHUNKED, chunk(delta("a"))], b"0"),
    "a chunk extension that trickles": ([CHUNKED, chunk(delta("a")), b"5;"], b"x"),
    "a trailer for ever": ([CHUNKED, chunk(delta("a")), b"0\r\n"], b"X: y\r\n"),
}


@pytest.mark.parametrize("kind", STALLS)
def test_a_stall_fails_its_request_and_nothing_else(kind: str, tmp_path: Path) -> None:
    # https://github.com/vllm-project/vllm/pull/51030: one half-open stream blocked a whole run
    first, piece = STALLS[kind]

    def answer(request: Request) -> Iterator[Step]:
        if request.prompt != "stall":
            return iter([whole_stream()])
        return iter(first) if piece is None else forever(first, piece)

    prompts = tmp_path / "prompts.txt"
    prompts.write_text("fine\nstall\nfine\nfine\n", "utf-8")
    with FakeServer(answer) as server:
        args = ["--concurrency", "2", "--requests", 4, "--timeout", "0.15", "--prompts", prompts]
        result = load(server, tmp_path, *args)
    assert result.code == 0 and result.err == ""
    (level,) = result.levels
    assert (level["completed"], level["failed"], level["errors"]) == (3, 1, {"timeout": 1})
    bad = result.requests[1]
    assert bad["error"] == "timeout: no token for 0.15 s"
    assert bad["ended_s"] >= 0.15 + (bad["last_token_s"] or 0.0) - 0.001


@pytest.mark.parametrize("framing", ["chunked", "unframed"])
def test_a_server_that_never_closes_is_not_waited_for(framing: str, tmp_path: Path) -> None:
    # https://github.com/anistark/wasmrun/pull/111
    body = delta("a") + TAIL + DONE
    steps: list[Step] = [CHUNKED + chunk(body) if framing == "chunked" else TO_CLOSE + body, HOLD]
    with FakeServer(steps) as server:
        result = load(server, tmp_path, "--requests", 3, "--timeout", LONG_S)
        for _ in range(3):
            assert server.hung_up.acquire(timeout=10)
    assert result.code == 0 and all(raw["ok"] and raw["ended_s"] < LONG_S / 2 for raw in result.requests)


@pytest.mark.parametrize(
    "first",
    [
        [TO_CLOSE + delta("a") + TAIL],
        [CHUNKED + chunk(delta("a") + TAIL)],
        [CHUNKED + chunk(delta("a") + TAIL) + LAST_CHUNK[:-2]],
    ],
)
def test_a_finish_reason_and_then_silence_is_a_success_that_is_not_waited_for_long(
    first: list[Step], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(load_test, "TAIL_GRACE_S", 0.15)
    with FakeServer([*first, HOLD]) as server:
        result = load(server, tmp_path, "--timeout", LONG_S)
    (raw,) = result.requests
    assert raw["ok"] and raw["finish"] == "stop" and LONG_S > raw["ended_s"] >= 0.149 > raw["last_token_s"]


@pytest.mark.parametrize(
    ("first", "says"),
    [
        ([b"HTTP/1.1 500 X\r\nContent-Length: 99\r\n\r\n" + b'{"error":"no"}'], "http 500: no"),
        ([b"HTTP/1.1 500 X\r\n\r\n"], "http 500: no text"),
        ([plain("200 OK", "<h1>hi</h1>", "text/html")[:-3]], "not an event stream"),
    ],
)
def test_an_error_that_never_ends_is_told_nevertheless(first: list[Step], says: str, tmp_path: Path) -> None:
    with FakeServer([*first, HOLD]) as server:
        result = load(server, tmp_path, "--timeout", "0.15")
    assert result.code == 1 and says in result.requests[0]["error"]


def test_an_error_that_trickles_is_told_nevertheless(tmp_path: Path) -> None:
    with FakeServer(lambda request: forever([b"HTTP/1.1 500 X\r\n\r\n"], b"x")) as server:
        result = load(server, tmp_path, "--timeout", "0.15")
    assert result.code == 1 and result.requests[0]["error"].startswith("http 500: 'xx")


def test_a_stream_may_take_longer_than_the_limit_while_tokens_come(tmp_path: Path) -> None:
    """A limit between tokens, not on the whole request: https://github.com/generative-computing/mellea/issues/1272"""
    slow: list[Step] = [TO_CLOSE]
    for _ in range(6):
        slow += [0.1, delta("a")]
    with FakeServer([*slow, TAIL + DONE]) as server:
        result = load(server, tmp_path, "--timeout", "0.5")
    (raw,) = result.requests
    assert raw["ok"] and raw["ended_s"] > 0.6


def test_a_prompt_that_nobody_reads(tmp_path: Path) -> None:
    """More bytes than the buffers on the way hold, and a server that takes none: no token, so a timeout."""
    prompts = tmp_path / "long.txt"
    prompts.write_text("long " * 4_000_000, "utf-8")
    with FakeServer([HOLD], reads_bodies=False) as server:
        result = load(server, tmp_path, "--prompts", prompts, "--timeout", "0.3")
    (raw,) = result.requests
    assert result.code == 1 and raw["error"] == "timeout: no token for 0.3 s" and raw["connect_s"] < 0.3


def test_silence_in_a_frame_that_announced_more(tmp_path: Path) -> None:
    head = STREAM_HEAD + b"Content-Length: 5000\r\n\r\n"
    with FakeServer([head + delta("a"), HOLD]) as server:
        result = load(server, tmp_path, "--timeout", "0.15")
    assert result.requests[0]["error_class"] == "timeout"
