"""What a client must make of a response, byte for byte: a table of reported streams, each in every cut and framing.

`data/wire_cases.json` holds streams that people reported as having broken clients, where, and what is right. Each is
fed here to the stream reader without a socket, under rules that change its bytes but not its meaning, and served to the
program by a fake server.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Callable

import pytest
from fake_server import (
    CHUNKED,
    DONE,
    HOLD,
    LAST_CHUNK,
    TO_CLOSE,
    FakeServer,
    Result,
    Running,
    Step,
    arguments,
    chunk,
    compact,
    delta,
    event,
    usage,
    whole_stream,
)
from fuzz_wire import BEGIN, new_stream

import load_test

Case = dict[str, Any]
CASES: list[Case] = json.loads(Path(__file__).with_name("data").joinpath("wire_cases.json").read_text("utf-8"))["cases"]
BY_ID = {case["id"]: case for case in CASES}


def kind(case: Case) -> str:
    """A case's name: its number and the words of its title."""
    return "-".join([case["id"], *re.findall(r"[a-z0-9_]+", case["title"].lower())][:9])


each_case = pytest.mark.parametrize("case", CASES, ids=kind)
STREAMS = [case for case in CASES if b"200 OK" in case["send"][0]["bytes"].encode() and case["id"][:2] != "13"]
each_stream = pytest.mark.parametrize("case", STREAMS, ids=kind)


def writes(case: Case) -> list[bytes]:
    return [step["bytes"].encode("latin-1") for step in case["send"] if "bytes" in step]


def holds(case: Case) -> bool:
    return any("hold" in step for step in case["send"])


def feed(pieces: Iterable[bytes], held: bool = False, reset: str | None = None) -> load_test.Observation:
    """Feed pieces, all at one moment; then the server closes, or stays silent until the limit."""
    stream = new_stream()
    for piece in pieces:
        stream.feed(piece, BEGIN)
    if held:
        stream.silent(1.0, BEGIN + 1)
    else:
        stream.end_of_stream(BEGIN, reset)
    return stream.seen


def byte_by_byte(data: bytes) -> Iterator[bytes]:
    return (data[at : at + 1] for at in range(len(data)))


def check_want(record: dict[str, Any], want: dict[str, Any], timing: bool = True) -> None:
    for name, expected in want.items():
        if name == "error_contains":
            assert record["error"] is not None and expected in record["error"]
        elif isinstance(expected, float):
            assert not timing or record[name] == pytest.approx(expected, abs=1e-6), name
        else:
            assert record[name] == expected, (name, record["error"])


def outcome(seen: load_test.Observation) -> dict[str, Any]:
    """All that a cut must not change (the times are all the same here)."""
    return {**vars(seen.record(0, BEGIN)), "text": seen.text(), "thoughts": seen.text(thoughts=True)}


# ---------------------------------------------------------------- the cases, without a socket


@each_case
@pytest.mark.parametrize("cut", ["as given", "byte by byte"])
def test_reported_streams(case: Case, cut: str) -> None:
    stream, clock = new_stream(), BEGIN
    for step in case["send"]:
        if "pause_s" in step:
            clock += step["pause_s"]
        elif "bytes" in step:
            data = step["bytes"].encode("latin-1")
            for piece in [data] if cut == "as given" else byte_by_byte(data):
                stream.feed(piece, clock)
    if holds(case):
        stream.silent(1.0, clock + 1)
    else:
        stream.end_of_stream(clock)
    check_want(vars(stream.seen.record(0, BEGIN)), case["want"])


@each_case
def test_reported_streams_in_one_write(case: Case) -> None:
    seen = feed([b"".join(writes(case))], holds(case))
    check_want(vars(seen.record(0, BEGIN)), case["want"], timing=False)


ENDED_BY_CLOSE = ("13b", "13c", "18a", "18b", "18c", "32")


@pytest.mark.parametrize(
    "case", [case for case in CASES if case["id"] not in ENDED_BY_CLOSE], ids=lambda case: case["id"]
)
def test_bytes_after_the_end_change_nothing(case: Case) -> None:
    data = b"".join(writes(case))
    plain = feed([data], holds(case))
    for tail in (b"HTTP/1.1 500 Oops\r\n\r\n", b"\x00\xff", delta("more")):
        assert outcome(feed([data, tail], holds(case))) == outcome(plain)
        assert outcome(feed([data + tail], holds(case)))["deltas"] == plain.deltas


@each_case
def test_every_cut_in_two_gives_the_same(case: Case) -> None:
    data = b"".join(writes(case))
    expected = outcome(feed([data], holds(case)))
    for at in places(data):
        assert outcome(feed([data[:at], data[at:]], holds(case))) == expected, at


def places(data: bytes) -> list[int]:
    """Every place to cut; of a long stream only those near its ends and some in between."""
    if len(data) < 4000:
        return list(range(len(data) + 1))
    return [*range(0, 300, 3), *range(300, len(data) - 300, 9999), *range(len(data) - 300, len(data) + 1)]


TERMINAL = re.compile(rb'\[DONE\]|"finish_reason": ?"')


@each_case
@pytest.mark.parametrize("end", ["close", "reset", "silence"])
def test_never_a_success_before_the_terminal_marker(case: Case, end: str) -> None:
    data = b"".join(writes(case))
    complete = outcome(feed([data], holds(case)))
    for at in places(data)[:: 1 if end == "close" else 3]:
        seen = feed([data[:at]], end == "silence", "connection lost" if end == "reset" else None)
        assert seen.over
        if seen.failure is None:
            assert TERMINAL.search(data[:at]), at
            assert seen.deltas == complete["deltas"], at
        else:
            assert seen.failure.message.startswith(seen.failure.error_class), seen.failure
            assert len(seen.failure.message) <= load_test.MAX_MESSAGE_CHARS and seen.failure.message.isprintable()
        json.dumps(outcome(seen), allow_nan=False)


# ---------------------------------------------------------------- rules that change the bytes and not the meaning


def body_of(data: bytes) -> bytes:
    """The body of a response, chunked or to close, by a reader of our own."""
    head, _, rest = data.partition(b"\r\n\r\n")
    if b"chunked" not in head:
        return rest
    body = b""
    while rest:
        size, _, rest = rest.partition(b"\r\n")
        length = int(size, 16)
        if not length:
            break
        body += rest[:length]
        rest = rest[length + 2 :]
    return body


def events_of(body: bytes) -> list[list[bytes]]:
    """The lines of each event of a body (comments too), whatever its line ends; the last may be a torn one."""
    text = re.sub(rb"\r\n|\r", b"\n", body)
    return [block.split(b"\n") for block in text.split(b"\n\n") if block.strip(b"\n")]


def joined(events: Iterable[list[bytes]], end: bytes = b"\n") -> bytes:
    return b"".join(end.join(lines) + end + end for lines in events)


def with_line_end(end: bytes) -> Callable[[bytes], bytes]:
    return lambda body: joined(events_of(body), end)


def without_space(body: bytes) -> bytes:
    return joined([[re.sub(rb"^(\w+): ", rb"\1:", line) for line in lines] for lines in events_of(body)])


def with_space(body: bytes) -> bytes:
    return joined([[re.sub(rb"^(\w+): ?", rb"\1: ", line) for line in lines] for lines in events_of(body)])


def comments(body: bytes) -> bytes:
    return b": hello\n\n" + joined([[b":", *lines, b": keepalive 1/2"] for lines in events_of(body)])


def control_events(body: bytes) -> bytes:
    idle = b":\n\nretry: 500\n\nid: 9\n\nevent: ping\n\ndata:\n\ndata: : wrapped by a proxy\n\n"
    return idle + b"".join(joined([lines]) + idle for lines in events_of(body))


def byte_order_mark(body: bytes) -> bytes:
    return b"\xef\xbb\xbf" + body


def other_fields(body: bytes) -> bytes:
    lines = [[b"id: 4", *block, b"retry: 10", b"unknown", b"x-field: y"] for block in events_of(body)]
    return joined(lines)


def blank_lines(body: bytes) -> bytes:
    return b"\n\n" + joined(events_of(body)).replace(b"\n\n", b"\n\n\n\n")


def rewritten(change: Callable[[Any], Any], **style: Any) -> Callable[[bytes], bytes]:
    """Each event's document, where it is one, changed and written again."""

    def rewrite(body: bytes) -> bytes:
        events: list[list[bytes]] = []
        for lines in events_of(body):
            data = b"\n".join(re.sub(rb"^data: ?", b"", line) for line in lines if line.startswith(b"data:"))
            try:
                doc = json.loads(data)
            except ValueError:
                events.append(lines)
                continue
            written = json.dumps(change(doc), **style).encode()
            rest = [line for line in lines if not line.startswith(b"data:")]
            events.append([*rest, *(b"data: " + line for line in written.split(b"\n"))])
        return joined(events)

    return rewrite


def more_keys(value: Any, top: bool = True) -> Any:
    """Null and unknown fields before and after what is there, at every depth."""
    decoys: dict[str, Any] = {
        "x_note": {"content": "no", "delta": {"content": "no"}, "error": "no"},
        "logprobs": None,
        "obj": [],
    }
    if isinstance(value, dict):
        inner = {key: more_keys(item, False) for key, item in value.items()}
        before: dict[str, Any] = {"usage": None, "error": None, "timings": None} if top else {"finish_reason": None}
        return {**before, "x_first": [1, {"content": "no"}], **inner, **decoys}
    if isinstance(value, list):
        return [more_keys(item, False) for item in value]
    return value


def reversed_keys(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: reversed_keys(value[key]) for key in reversed(list(value))}
    return [reversed_keys(item) for item in value] if isinstance(value, list) else value


def null_usage_after_each(body: bytes) -> bytes:
    null = [b'data: {"choices":[],"usage":null}']
    return joined(block for lines in events_of(body) for block in (lines, null))


def escaped(body: bytes) -> bytes:
    """Each letter of each text written as an escape."""
    return re.sub(
        rb'("(?:content|reasoning|reasoning_content)":")([a-z ]{1,99})(")',
        lambda match: match[1] + b"".join(b"\\u%04x" % byte for byte in match[2]) + match[3],
        body,
    )


BODY_RULES: dict[str, Callable[[bytes], bytes]] = {
    "as it is": lambda body: body,
    "LF": with_line_end(b"\n"),
    "CRLF": with_line_end(b"\r\n"),
    "CR": with_line_end(b"\r"),
    "no space after the colon": without_space,
    "a space after the colon": with_space,
    "a comment in and before every event": comments,
    "events without data between": control_events,
    "byte order mark": byte_order_mark,
    "other fields": other_fields,
    "more blank lines": blank_lines,
    "usage null after each": null_usage_after_each,
    "null and unknown keys": rewritten(more_keys),
    "keys in another order": rewritten(reversed_keys),
    "spaces in the documents": rewritten(lambda doc: doc),
    "documents over several lines": rewritten(lambda doc: doc, indent=1),
    "escapes": escaped,
}


def close_delimited(body: bytes, whole: bool) -> bytes:
    return TO_CLOSE + body


def http_1_0(body: bytes, whole: bool) -> bytes:
    return b"HTTP/1.0 200 OK\nContent-type:  text/event-stream ; charset=utf-8 \n\n" + body


def one_chunk(body: bytes, whole: bool) -> bytes:
    return CHUNKED + (chunk(body) if body else b"") + (LAST_CHUNK if whole else b"")


def chunk_per_line(body: bytes, whole: bool) -> bytes:
    parts = re.findall(rb"[^\n]*\n|[^\n]+", body)
    return CHUNKED + b"".join(map(chunk, parts)) + (LAST_CHUNK if whole else b"")


def chunk_per_byte(body: bytes, whole: bool) -> bytes:
    head = b"HTTP/1.1 200 Fine\r\ntransfer-encoding:Chunked\r\ncontent-type:TEXT/EVENT-STREAM\r\n\r\n"
    return head + b"".join(map(chunk, byte_by_byte(body))) + (LAST_CHUNK if whole else b"")


def odd_chunks(body: bytes, whole: bool) -> bytes:
    """Upper-case sizes, leading zeros, extensions, bare LF, a trailer: all allowed or common."""
    parts = [body[at : at + 27] for at in range(0, len(body), 27)]
    written = b"".join(b'000%X ;name="a;b"\r\n%b\n' % (len(part), part) for part in parts)
    return CHUNKED + written + (b"00;x\r\nX-Trailer: 1\r\n\r\n" if whole else b"")


def early_hints(body: bytes, whole: bool) -> bytes:
    return b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nLink: </a>\r\n\r\n" + one_chunk(body, whole)


FRAMINGS: dict[str, Callable[[bytes, bool], bytes]] = {
    "close-delimited": close_delimited,
    "HTTP/1.0, LF, parameters": http_1_0,
    "one chunk": one_chunk,
    "a chunk per line": chunk_per_line,
    "a chunk per byte": chunk_per_byte,
    "odd chunks": odd_chunks,
    "after interim heads": early_hints,
}


@each_stream
@pytest.mark.parametrize("framing", FRAMINGS)
def test_rules_that_change_the_bytes_and_not_the_meaning(case: Case, framing: str) -> None:
    """Every rule over every stream in every framing, whole and byte by byte."""
    body = body_of(b"".join(writes(case)))
    whole = case["id"] not in ("18b", "32")
    for name, rule in BODY_RULES.items():
        if case["id"] == "18b" and name != "as it is":
            continue  # its last event is torn: there is no other way to write it
        if case["id"] == "12" and "byte" in framing and name != "as it is":
            continue  # 70,000 chunks, seconds each
        data = FRAMINGS[framing](rule(body), whole)
        seen = feed([data], holds(case))
        check_want(vars(seen.record(0, BEGIN)), case["want"], timing=False)
        if len(data) < 5000:
            assert outcome(feed(byte_by_byte(data), holds(case))) == outcome(seen), name


@pytest.mark.parametrize("case", [case for case in STREAMS if case["id"] != "32"], ids=lambda case: case["id"])
def test_a_length_frames_a_stream_as_well(case: Case) -> None:
    body = body_of(b"".join(writes(case)))
    head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nContent-Length: %d\r\n\r\n" % len(body)
    for pieces in ([head + body], byte_by_byte(head + body) if len(body) < 4000 else [head, body]):
        check_want(vars(feed(pieces, holds(case)).record(0, BEGIN)), case["want"], timing=False)


def test_a_body_short_of_its_length_is_truncated_even_after_a_finish_reason() -> None:
    body = delta("a") + delta(finish="stop")
    head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nContent-Length: %d\r\n\r\n" % (len(body) + 1)
    failure = feed([head + body]).failure
    assert failure is not None and failure.error_class == "truncated" and "1 bytes short" in failure.message


# ---------------------------------------------------------------- the cases, over a socket


def steps_of(case: Case, cut: str) -> list[Step]:
    """The steps of a case for the fake server: 10 ms between neighbouring writes, unless all goes in one write."""
    steps: list[Step] = []
    if cut == "one write":
        steps = [b"".join(writes(case))]
        return [*steps, HOLD] if holds(case) else steps
    for step in case["send"]:
        if "pause_s" in step:
            steps.append(float(step["pause_s"]))
        elif "hold" in step:
            steps.append(HOLD)
        else:
            data = step["bytes"].encode("latin-1")
            if cut == "byte by byte" and len(data) < 2000:
                steps += byte_by_byte(data)
            elif steps and isinstance(steps[-1], bytes) and cut == "as given":
                steps += [0.01, data]
            else:
                steps.append(data)
    return steps


Played = dict[str, dict[str, Any]]


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Played, Result]]:
    """``played("one write")``: all cases served at once to one run of the program; the raw record of each case."""
    done: dict[str, tuple[Played, Result]] = {}

    def run(cut: str, cases: list[Case], timeout_s: float) -> tuple[Played, Result]:
        folder = tmp_path_factory.mktemp("wire")
        prompts = folder / "prompts.txt"
        prompts.write_text("\n".join(case["id"] for case in cases), "utf-8")
        with FakeServer(lambda request: steps_of(BY_ID[request.prompt], cut)) as server:
            size = ["--concurrency", len(cases), "--requests", len(cases), "--timeout", timeout_s]
            with Running(folder, arguments(folder, server.base_url, "--prompts", prompts, *size)) as running:
                result = running.finish()
        return {cases[raw["index"]]["id"]: raw for raw in result.requests}, result

    def play(cut: str) -> tuple[Played, Result]:
        if cut not in done:
            stalled, _ = run(cut, [BY_ID["32"]], 0.5)  # alone, so that its limit is no limit for the others
            others, result = run(cut, [case for case in CASES if case["id"] != "32"], 30)
            done[cut] = {**others, **stalled}, result
        return done[cut]

    return play


@pytest.mark.parametrize("cut", ["as given", "byte by byte", "one write"])
def test_the_program_survives_all_of_them_together(cut: str, played: Callable[[str], tuple[Played, Result]]) -> None:
    records, result = played(cut)
    assert result.code == 0 and result.err == ""
    assert len(records) == len(CASES) and len(result.levels) == 1
    level = result.levels[0]
    assert level["completed"] == sum(case["want"]["ok"] for case in CASES)
    assert level["completed"] + level["failed"] == len(CASES) - 1 == level["requests"]
    assert sum(level["errors"].values()) == level["failed"]


@each_case
@pytest.mark.parametrize("cut", ["as given", "byte by byte", "one write"])
def test_reported_streams_over_a_socket(case: Case, cut: str, played: Callable[[str], tuple[Played, Result]]) -> None:
    """All but the times, which `test_reported_streams` checks on a clock of its own."""
    records, _ = played(cut)
    check_want(records[case["id"]], case["want"], timing=False)


# ---------------------------------------------------------------- from first principles: response heads


def head_of(*lines: bytes, end: bytes = b"\r\n") -> bytes:
    return end.join(lines) + end + end


GOOD = delta("a") + delta(finish="stop") + DONE


@pytest.mark.parametrize(
    "head",
    [
        head_of(b"HTTP/1.1 200 OK", b"Content-Type: text/event-stream"),
        head_of(b"HTTP/1.1 200 OK", b"Content-Type: text/event-stream", end=b"\n"),
        head_of(b"HTTP/1.1 200", b"Content-Type: text/event-stream"),
        head_of(b"HTTP/1.1 200 ", b"content-type:text/event-stream;charset=UTF-8"),
        head_of(b"HTTP/1.1  200 OK", b"CONTENT-TYPE: Text/Event-Stream"),
        head_of(b"HTTP/1.1 200 Alles klar \xc3\xa4 \xff", b"Content-Type:\ttext/event-stream \t"),
        head_of(b"HTTP/1.0 200 OK", b"Server: x"),  # no type at all: judged by what comes
        head_of(b"HTTP/1.1 200 OK", b"X-Folded: a", b"  b", b"\tc", b"Content-Type: text/event-stream"),
        head_of(b"HTTP/1.1 200 OK", b"Content-Encoding: identity", b"Content-Type: text/event-stream"),
        head_of(b"HTTP/1.1 200 OK", b"Transfer-Encoding: identity", b"Content-Type: text/event-stream"),
        head_of(b"HTTP/1.1 200 OK", b"Content-Type: text/event-stream", b"X: \xff\xfe", b"Empty:"),
        b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\n\r\n",
        b"HTTP/1.1 100 Continue\r\n\r\n" + head_of(b"HTTP/1.1 200 OK", b"Content-Type: text/event-stream"),
    ],
)
def test_heads_that_are_fine(head: bytes) -> None:
    for pieces in ([head + GOOD], byte_by_byte(head + GOOD)):
        seen = feed(pieces)
        assert seen.failure is None and seen.text() == "a" and seen.finish == "stop"


@pytest.mark.parametrize(
    ("data", "error_class", "evidence"),
    [
        (b"", "truncated", "no response"),
        (b"H", "truncated", "1 bytes"),
        (b"HTTP/1.1 200 OK\r\nContent-Ty", "truncated", "no complete response head"),
        (b"SSH-2.0-OpenSSH_9.6\r\n", "protocol", "SSH-2.0"),
        (b"\x15\x03\x01\x00\x02\x02\x16", "protocol", "write https://"),  # a TLS alert
        (b"HTTP/2 200\r\n\r\n", "protocol", "HTTP/2"),
        (b"HTTP/1.1 2OO OK\r\n\r\n", "protocol", "2OO"),
        (b"HTTP/1.1 20 OK\r\n\r\n", "protocol", "20 OK"),
        (b"HTTP/1.1 -200 OK\r\n\r\n", "protocol", "-200"),
        (b"ICY 200 OK\r\n\r\n", "protocol", "ICY"),
        (b"\r\n\r\n", "protocol", "status line"),
        (b"<html>hello</html>\r\n\r\n", "protocol", "<html>"),
        (head_of(b"HTTP/1.1 200 OK", b"no colon here"), "protocol", "no colon here"),
        (head_of(b"HTTP/1.1 200 OK", b"Content-Length: -5"), "protocol", "-5"),
        (head_of(b"HTTP/1.1 200 OK", b"Content-Length: 5x"), "protocol", "5x"),
        (head_of(b"HTTP/1.1 200 OK", b"Content-Length: \xb2"), "protocol", "Content-Length"),
        (head_of(b"HTTP/1.1 200 OK", b"Content-Length: " + b"9" * 5000), "protocol", "Content-Length"),
        (head_of(b"HTTP/1.1 200 OK", b"Content-Length: 5", b"Content-Length: 6"), "protocol", "5, 6"),
        (head_of(b"HTTP/1.1 200 OK", b"Content-Length:"), "protocol", "Content-Length"),
        (head_of(b"HTTP/1.1 200 OK", b"Transfer-Encoding: gzip, chunked"), "protocol", "gzip"),
        (head_of(b"HTTP/1.1 200 OK", b"Content-Encoding: gzip") + b"\x1f\x8b\x08", "protocol", "gzip"),
        (head_of(b"HTTP/1.1 200 OK", b"Content-Type: text/event-stream", b"Content-Length: 0"), "truncated", "ended"),
        (head_of(b"HTTP/1.1 204 No Content"), "http", "204"),
        (head_of(b"HTTP/1.1 304 Not Modified", b"Content-Length: 10"), "http", "304"),
        (head_of(b"HTTP/1.1 503 Unavailable", b"Content-Length: 0"), "http", "503"),
        (head_of(b"HTTP/1.1 200 OK", b"Content-Type: text/html") + b"<h1>hi</h1>", "protocol", "not an event stream"),
        (head_of(b"HTTP/1.1 200 OK", b"Content-Type: text/event-stream") + b"<h1>hi</h1>", "truncated", "closed"),
        (b"HTTP/1.1 200 OK\r\nX: " + b"x" * 70000, "protocol", "no end of the response head"),
        (CHUNKED + b"zz\r\n", "protocol", "chunk size"),
        (CHUNKED + b"\r\n", "protocol", "chunk size"),
        (CHUNKED + b"-5\r\nhello\r\n", "protocol", "chunk size"),
        (CHUNKED + b"0x5\r\nhello\r\n", "protocol", "chunk size"),
        (CHUNKED + b"f" * 16 + b"\r\n", "protocol", "chunk size"),
        (CHUNKED + b"5\r\ndata:XX\r\n", "protocol", "end of a chunk"),
        (CHUNKED + b"5;" + b"x" * 70000, "protocol", "chunk header"),
        (CHUNKED + LAST_CHUNK, "truncated", "ended before"),
        (CHUNKED + chunk(b"data: [DONE]\n\n"), "no_tokens", "without any text"),
    ],
)
def test_heads_and_framings_that_are_not(data: bytes, error_class: str, evidence: str) -> None:
    whole, slow = feed([data]).failure, feed(byte_by_byte(data)).failure
    assert whole is not None and slow is not None
    assert (whole.error_class, evidence in whole.message) == (error_class, True), whole
    assert slow.error_class == error_class  # byte by byte it is refused sooner, with less to quote


# ---------------------------------------------------------------- from first principles: events and documents


def replay(*events: bytes, text: str = "a") -> load_test.Observation:
    """One text, then these events, then a proper end, in two framings and byte by byte: the same each time."""
    body = delta(text) + b"".join(events) + delta(finish="stop") + DONE
    seen = feed([CHUNKED + chunk(body) + LAST_CHUNK])
    parts = [chunk(part + b"\n\n") for part in body.split(b"\n\n") if part]
    others = ([TO_CLOSE + body], byte_by_byte(TO_CLOSE + body), [CHUNKED, *parts], [CHUNKED + b"".join(parts)])
    for pieces in others:
        assert outcome(feed(pieces)) == outcome(seen)
    return seen


@pytest.mark.parametrize(
    "noise",
    [
        b":\n\n",
        b": \n",
        b"retry: 1000\n\n",
        b"id\n\n",
        b"event: ping\n\n",
        b"event: ping\ndata:\n\n",
        b"data:\n\n",
        b"data: : keep-alive\n\n",
        b"unknown: field\n\n",
        b"DATA: not the data field\n\n",
        b" data: neither\n\n",
        b"data\n\n",
        event({}),
        event({"choices": None}),
        event({"choices": []}),
        event({"choices": [None, 5, "x", {}]}),
        event({"choices": [{"delta": None}]}),
        event({"choices": [{"delta": "text"}]}),
        event({"choices": [{"delta": {"content": 5}}]}),
        event({"choices": [{"delta": {"content": ["a"]}}]}),
        event({"choices": [{"text": "completion dialect"}]}),
        event({"choices": [{"delta": {"role": "assistant", "content": ""}}]}),
        event({"choices": [{"delta": {"content": None, "reasoning": "", "tool_calls": []}}]}),
        event({"choices": [{"delta": {"tool_calls": [None, {}, {"function": None}, {"function": {"name": ""}}]}}]}),
        event({"choices": [{"delta": {}, "finish_reason": None}], "usage": None}),
        event({"choices": {"0": {"delta": {"content": "not a list"}}}}),
        event({"usage": "many"}),
        event({"usage": []}),
        event({"error": None}),
        event({"error": ""}),
        event({"error": False}),
        event({"error": {}}),
        event({"timings": None}),
        event({"model": None}),
    ],
)
def test_events_that_say_nothing(noise: bytes) -> None:
    seen = replay(noise)
    assert seen.failure is None and seen.deltas == 1 and seen.text() == "a" and seen.finish == "stop"
    assert seen.usage is None or seen.output_tokens == (1, "deltas")


@pytest.mark.parametrize(
    ("bad", "error_class", "evidence"),
    [
        (event({"error": {"message": "engine died", "code": 500}}), "server", "engine died"),
        (event({"error": "engine died"}), "server", "engine died"),
        (event({"error": {"code": 7}}), "server", "7"),
        (event({"error": ["a", "b"]}), "server", "a"),
        (event({"error": 500}), "server", "500"),
        (event({"error": True}), "server", "true"),
        (event({"error": {"message": {"deep": "reason"}}}), "server", "reason"),
        (event({"object": "error", "message": "engine died", "type": "E", "code": 500}), "server", "E: engine died"),
        (b"event: error\n" + event({"message": "engine died"}), "server", "engine died"),
        (b"event: error\ndata: not even JSON\n\n", "server", "not even JSON"),
        (b'error: {"message":"engine died"}\n\n', "server", "engine died"),
        (b"error: in words\n\n", "server", "in words"),
        (delta("b", finish="error"), "server", "finish_reason"),
        (b"data: <html>502</html>\n\n", "protocol", "<html>502"),
        (b"data: 5\n\n", "protocol", "5"),
        (b"data: [1]\n\n", "protocol", "[1]"),
        (b"data: null\n\n", "protocol", "null"),
        (b'data: "text"\n\n', "protocol", "text"),
        (b'data: {"a":1}{"b":2}\n\n', "protocol", '{"a":1}'),
        (b'data: {"a":\n\n', "protocol", '{"a":'),
        (b"data: " + b"[" * 100000 + b"\n\n", "protocol", "[[["),
        (b'data: {"n":' + b"9" * 5000 + b"}\n\n", "protocol", "999"),
        (b"data: [done]\n\n", "protocol", "[done]"),
        (b"data: \xff\xfe\n\n", "protocol", "received"),
    ],
)
def test_events_that_fail_the_request(bad: bytes, error_class: str, evidence: str) -> None:
    seen = replay(bad)
    assert seen.failure is not None
    assert (seen.failure.error_class, evidence in seen.failure.message) == (error_class, True), seen.failure
    assert not seen.record(0, BEGIN).ok


@pytest.mark.parametrize(
    ("last", "tokens"),
    [
        (usage(5, 7), (7, "usage")),
        (usage(5, 9) + usage(5, 7), (7, "usage")),  # the last one counts
        (usage(5, 7) + event({"usage": None}), (7, "usage")),
        (usage(5, 7) + event({"usage": {"prompt_tokens": 5}}), (7, "usage")),  # the last that is not null
        (usage(5, 7) + event({"usage": {"completion_tokens": None}}), (7, "usage")),
        (event({"choices": [{"delta": {}, "finish_reason": "stop"}], "usage": {"completion_tokens": 7}}), (7, "usage")),
        (event({"usage": {"completion_tokens": 7.0}}), (7, "usage")),  # a proxy in a language without integers
        (event({"usage": {"completion_tokens": 7.5}}), (1, "deltas")),
        (event({"usage": {"completion_tokens": "7"}}), (1, "deltas")),
        (event({"usage": {"completion_tokens": True}}), (1, "deltas")),
        (event({"usage": {"completion_tokens": -7}}), (1, "deltas")),
        (event({"usage": {"completion_tokens": 0}}), (1, "deltas")),
        (event({"usage": {"completion_tokens": 10**400}}), (1, "deltas")),
        (b'data: {"usage":{"completion_tokens":NaN}}\n\n', (1, "deltas")),
        (b'data: {"usage":{"completion_tokens":1e999}}\n\n', (1, "deltas")),
        (event({"usage": {}}), (1, "deltas")),
        (b"", (1, "deltas")),
    ],
)
def test_what_counts_the_tokens(last: bytes, tokens: tuple[int, str]) -> None:
    seen = replay(last)
    assert seen.failure is None and seen.output_tokens == tokens
    json.dumps(vars(seen.record(0, BEGIN)), allow_nan=False)


@pytest.mark.parametrize(
    ("sent", "cached"),
    [
        ({"usage": {"prompt_tokens": 9, "prompt_tokens_details": {"cached_tokens": 4}}}, 4),
        ({"usage": {"prompt_tokens": 9, "prompt_tokens_details": {"cached_tokens": 0}}}, 0),
        ({"usage": {"prompt_tokens": 9, "prompt_tokens_details": None}, "timings": {"cache_n": 6}}, 6),
        ({"usage": {"prompt_tokens_details": {"cached_tokens": 4}}, "timings": {"cache_n": 6}}, 4),
        ({"timings": {"cache_n": 0}}, 0),
        ({"timings": {"cache_n": None}}, None),
        ({"usage": {"prompt_tokens_details": {"cached_tokens": None}}}, None),
        ({"usage": {"prompt_tokens_details": [4]}}, None),
        ({"usage": {"prompt_tokens": 9}}, None),
    ],
)
def test_where_the_cached_tokens_come_from(sent: dict[str, Any], cached: int | None) -> None:
    assert replay(event(sent)).record(0, BEGIN).cached_tokens == cached


DETAILS = {"completion_tokens_details": {"reasoning_tokens": 400}}
TOOL = delta(tool_calls=[{"function": {"name": "f", "arguments": "{}"}}])
THOUGHT = delta(reasoning="hm")
# The counts a server gives for 20 one-letter deltas 1 s apart, what else it streams, and what TPOT is then over.
COUNTS: dict[str, tuple[list[bytes], float | None, tuple[str, ...]]] = {
    "as many as deltas": ([usage(5, 20)], 1.0, ()),
    "none": ([], 1.0, ()),
    "zeros": ([usage(0, 0)], 1.0, ()),
    "two a delta, up to what letters can hold": ([usage(5, 36)], 19 / 35, ()),
    "an end-of-text token more": ([usage(5, 21)], 19 / 20, ()),
    "half as many": ([usage(5, 10)], 19 / 9, ()),
    "under half as many": ([usage(5, 9)], None, (load_test.FEWER_THAN_DELTAS,)),
    "two for twenty": ([usage(5, 2)], None, (load_test.FEWER_THAN_DELTAS,)),
    "more than letters can hold": ([usage(5, 37)], None, (load_test.MORE_THAN_TEXT,)),
    "hidden reasoning that nobody tells apart": (
        [usage(5, 420)],
        None,
        (load_test.OVER_MAX_TOKENS, load_test.MORE_THAN_TEXT),
    ),
    "hidden reasoning": ([usage(5, 420, **DETAILS)], 1.0, (load_test.HIDDEN_REASONING, load_test.OVER_MAX_TOKENS)),
    "more hidden than counted": (
        [usage(5, 20, **DETAILS)],
        None,
        (load_test.HIDDEN_REASONING, load_test.FEWER_THAN_DELTAS),
    ),
    "reasoning that was streamed": ([THOUGHT, usage(5, 21, **DETAILS)], 19 / 20, ()),
    "a tool call, which has markers of its own": ([TOOL, usage(5, 60)], 19 / 59, ()),
    "more than was asked for": ([usage(5, 101)], None, (load_test.OVER_MAX_TOKENS, load_test.MORE_THAN_TEXT)),
}


@pytest.mark.parametrize("kind", COUNTS)
def test_tpot_is_over_the_tokens_that_were_streamed_or_null_with_a_reason(kind: str) -> None:
    last, tpot_s, notes = COUNTS[kind]
    stream = new_stream()
    stream.seen.max_tokens = 60  # just what the tool call is said to have
    stream.feed(CHUNKED, BEGIN)
    for second in range(20):
        stream.feed(chunk(delta("a")), BEGIN + second)
    stream.feed(b"".join(map(chunk, last)) + chunk(delta(finish="stop") + DONE), BEGIN + 19)
    record = stream.seen.record(0, BEGIN)
    assert record.ok and record.count_notes == notes
    assert record.tpot_s == (None if tpot_s is None else pytest.approx(tpot_s, abs=1e-8))
    assert (record.streamed_tokens is None) is (tpot_s is None)
    assert record.output_tokens == (stream.seen.usage or {}).get("completion_tokens", 0) or record.deltas
    assert record.prompt_tokens == (5 if b"5" in b"".join(last) else None)  # a prompt of no tokens cannot be
    assert record.raw().get("count_notes", ()) == notes and "model" not in record.raw()


# Text that stands elsewhere than in a string: the answer and the thoughts that are read out of a delta.
PARTS: dict[str, tuple[dict[str, Any], str, str]] = {
    "parts": ({"content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}, "ab", ""),
    "one part, not in a list": ({"content": {"type": "text", "text": "a"}}, "a", ""),
    "thinking": ({"content": [{"type": "thinking", "thinking": [{"type": "text", "text": "hm"}]}]}, "", "hm"),
    "thinking, then text": (
        {"content": [{"type": "thinking", "thinking": "hm"}, {"type": "text", "text": "a"}]},
        "a",
        "hm",
    ),
    "reasoning parts": ({"reasoning": [{"type": "reasoning.text", "text": "hm"}]}, "", "hm"),
    "text of a thought": ({"content": [{"type": "reasoning", "text": "hm"}, {"text": "a"}]}, "a", "hm"),
    "parts in parts": ({"content": [[{"text": [{"text": [{"text": "a"}]}]}]]}, "a", ""),
    "a refusal": ({"refusal": "no"}, "no", ""),
    "a refusal as a part": ({"content": [{"type": "refusal", "refusal": "no"}]}, "no", ""),
    "an empty part": ({"content": [{"type": "text", "text": ""}]}, "", ""),
    "a part of another kind": ({"content": [{"type": "image_url", "image_url": {"url": "x"}}]}, "", ""),
    "no part": ({"content": [None, 5, {"text": 5}, {"text": None}, [], {}]}, "", ""),
}


@pytest.mark.parametrize("kind", PARTS)
def test_text_in_parts_is_text(kind: str) -> None:
    fields, answer, thoughts = PARTS[kind]
    seen = replay(*[delta(**fields)] * 3)
    assert (seen.text(), seen.text(thoughts=True)) == ("a" + 3 * answer, 3 * thoughts)
    assert seen.deltas == 1 + 3 * bool(answer or thoughts)


def test_a_depth_that_no_parser_would_follow_is_read_or_refused() -> None:
    for depth in (100, 900, 30000):
        deep = b'[{"text":' * depth + b'"a"' + b"}]" * depth
        seen = feed([TO_CLOSE + b'data: {"choices":[{"delta":{"content":' + deep + b"}}]}\n\n" + DONE])
        assert seen.deltas == 1 or (seen.failure is not None and seen.failure.error_class == "protocol")


def told(*events: bytes) -> load_test.Observation:
    seen = feed([TO_CLOSE + b"".join([delta("a"), *events, delta(finish="stop"), DONE])])
    assert seen.failure is None
    return seen


def test_more_cached_than_the_prompt_has_is_not_believed() -> None:
    assert told(usage(3, 1, prompt_tokens_details={"cached_tokens": 3})).cached_tokens == 3
    assert told(usage(3, 1, prompt_tokens_details={"cached_tokens": 50})).cached_tokens is None


def test_of_timings_no_more_is_kept_than_a_line_can_hold() -> None:
    many = {f"t{number}" + "x" * 1000: number for number in range(5000)}
    timings = told(event({"timings": {"text": "x" * 10**6, "deep": [1], **many}})).timings
    assert timings is not None and len(timings) == 64 and set(timings.values()) == set(range(64))
    assert max(map(len, timings)) <= 64


def test_what_was_missing_after_a_finish_reason_is_the_done_marker() -> None:
    seen = feed([TO_CLOSE + delta("a", finish="stop")], reset="connection lost (reset)")
    assert seen.failure is not None and seen.failure.message.endswith("connection lost (reset), before [DONE]")


def test_an_event_may_be_as_large_as_the_limit_and_not_larger(monkeypatch: pytest.MonkeyPatch) -> None:
    # https://github.com/jupyter-ai-contrib/jupyter-ai-acp-client/issues/32 (a reader's own 64 KiB limit)
    monkeypatch.setattr(load_test, "MAX_EVENT_BYTES", 1000)
    fits = delta("x" * (1000 - len(delta(""))))
    assert len(fits) == 1000
    for pieces in ([TO_CLOSE + fits + DONE], byte_by_byte(TO_CLOSE + fits + DONE)):
        assert feed(pieces).failure is None
    for framed in (TO_CLOSE + b"data: " + b"x" * 2000, CHUNKED + chunk(b"data: " + b"x" * 2000)):
        for pieces in ([framed], byte_by_byte(framed), [framed[:200], framed[200:]]):
            failure = feed(pieces, held=True).failure
            assert failure is not None and failure.error_class == "protocol" and "over 1000 bytes" in failure.message


def test_comments_are_no_part_of_an_event_that_grows_too_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load_test, "MAX_EVENT_BYTES", 1000)
    for comment in (b": keep-alive\n\n", b":\n", b"data:\n\n", b"retry: 1\n\n"):
        waiting = comment * 200
        for pieces in ([TO_CLOSE + waiting + GOOD], [TO_CLOSE, *[comment] * 200, GOOD]):
            assert feed(pieces).failure is None, comment


def test_a_silent_prefill_of_keepalives_is_not_a_token() -> None:
    stream = new_stream()
    seen = stream.seen
    stream.feed(TO_CLOSE, BEGIN)
    for second in range(1, 50):
        stream.feed(b": keepalive 512/2048\n\ndata:\n\n" + delta(role="assistant", content=""), BEGIN + second)
        assert stream.deadline_at(20.0) == BEGIN + 20.0  # counted in tokens, not in bytes
    stream.feed(delta("a"), BEGIN + 60)
    assert stream.deadline_at(20.0) == BEGIN + 80.0 and seen.first_token_at == BEGIN + 60


def test_times_are_those_of_the_text_and_not_of_what_follows() -> None:
    stream = new_stream()
    seen = stream.seen
    pieces = (CHUNKED, chunk(delta("a")), chunk(delta("b")), chunk(delta(finish="stop")), chunk(usage(1, 2)))
    for second, piece in enumerate(pieces):
        stream.feed(piece, BEGIN + second)
    stream.feed(chunk(DONE) + LAST_CHUNK, BEGIN + 9)
    record = seen.record(0, BEGIN - 1)
    assert (record.ttft_s, record.last_token_s, record.e2e_s, record.ended_s) == (1, 2, 2, 9)
    assert (record.started_s, record.connect_s, record.end_s) == (1, 0, 10)
    assert record.tpot_s == 1.0


@pytest.mark.parametrize(
    ("sent", "ttft"),
    [
        ({"content": " "}, True),
        ({"content": "\n"}, True),
        ({"content": "\u200b"}, True),
        ({"reasoning": "hm"}, True),
        ({"reasoning_content": "hm"}, True),
        ({"content": None, "tool_calls": [{"function": {"name": "f", "arguments": ""}}]}, True),
        ({"tool_calls": [{"function": {"arguments": "{}"}}]}, True),
        ({"tool_calls": [{"id": "call_1", "type": "function", "function": {"name": None}}]}, False),
        ({"content": ""}, False),
        ({"content": None}, False),
        ({"role": "assistant"}, False),
        ({"tool_calls": []}, False),
        ({"refusal": "no"}, True),
        ({}, False),
    ],
)
def test_what_stops_the_clock_of_the_first_token(sent: dict[str, Any], ttft: bool) -> None:
    seen = feed([CHUNKED + chunk(delta(**sent) + delta(finish="stop") + DONE)])
    assert (seen.first_token_at is not None) is ttft
    assert seen.failure is None if ttft else seen.failure is not None and seen.failure.error_class == "no_tokens"


def test_text_and_thoughts_in_one_chunk_are_one_delta_and_two_choices_are_one() -> None:
    seen = replay(delta("b", reasoning="hm"))
    assert (seen.deltas, seen.text(), seen.text(thoughts=True)) == (2, "ab", "hm")
    both = [{"index": n, "delta": {"content": text}} for n, text in enumerate("cd")]
    seen = replay(event({"choices": both}))
    assert (seen.deltas, seen.text()) == (2, "acd")


def test_half_a_character_in_each_of_two_deltas() -> None:
    # servers that cut UTF-16 send half an emoji as an escape each; servers that cut UTF-8 send bytes that are none
    halves = [event({"choices": [{"delta": {"content": half}}]}) for half in ("\ud83d", "\ude00")]
    assert replay(*halves).text() == "a\U0001f600"
    broken = b'data: {"choices":[{"delta":{"content":"%b"}}]}\n\n'
    many = broken % b"x" + broken % b"\xe4\xbd" + broken % b"\xa0" + broken % b"y"
    seen = replay(many)
    assert seen.failure is None and seen.deltas == 5 and seen.text().startswith("ax") and seen.text().endswith("y")


@pytest.mark.parametrize("ending", [b"data: [DONE]", b"data:[DONE]\n", b"data: [DONE]\r", b"data: [DONE] \n\n"])
def test_done_at_the_very_end_needs_no_blank_line(ending: bytes) -> None:
    assert feed([TO_CLOSE + delta("a") + ending]).failure is None
    assert feed([CHUNKED + chunk(delta("a") + ending) + LAST_CHUNK]).failure is None


@pytest.mark.parametrize(
    "ending", [b"data: [DON", b"[DONE]", b": [DONE]\n\n", b"event: [DONE]\n\n", b"data: [DONE]]\n\n"]
)
def test_what_only_looks_like_done(ending: bytes) -> None:
    assert feed([TO_CLOSE + delta("a") + ending]).failure is not None


def test_message_of_an_error_is_one_printable_line() -> None:
    nasty = "line one\r\nline two\x1b[31m red \x00 \u202e" + "x" * 5000
    escapes = feed([CHUNKED + chunk(b"data: " + b"\x1b[2J" * 99 + b"\n\n")])
    for seen in (replay(event({"error": {"message": nasty}})), escapes):
        assert seen.failure is not None
        message = seen.failure.message
        assert message.isprintable() and len(message) <= load_test.MAX_MESSAGE_CHARS


def test_a_healthy_stream_is_what_the_other_tests_take_it_for() -> None:
    seen = feed([whole_stream(5, 9)])
    assert (seen.failure, seen.deltas, seen.finish) == (None, 5, "length")
    assert seen.usage == json.loads(compact({"prompt_tokens": 9, "completion_tokens": 5}))


# ---------------------------------------------------------------- the words of a message


@pytest.mark.parametrize(
    ("text", "limit", "shown"),
    [
        ("as it is", 8, "as it is"),
        ("cut after a word, not in it", 20, "cut after a word,..."),
        ("cut after a word, not in it", 21, "cut after a word,..."),
        ("cut after a word", 15, "cut after a..."),
        ("x" * 50, 20, "x" * 17 + "..."),
        ("two " + "y" * 100, 60, "two " + "y" * 53 + "..."),
        ("control\x1b[31m\nand   blanks", 40, "control [31m and blanks"),
    ],
)
def test_a_message_is_cut_after_a_word(text: str, limit: int, shown: str) -> None:
    assert load_test.printable(text, limit) == shown and len(shown) <= limit
