"""The short cut for plain events is exact: any stream, cut anywhere and framed either way, reads as it does for a
reader that parses every event with `json.loads`.

The reference is `fuzz_wire.Reference`. Streams are made of runs of events from one template (so that the program
learns it), other events between them, and everything else that valid JSON and valid framing allow. Every piece has a
time of its own, so that each delta's arrival is compared too.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterable
from typing import Any

import pytest
from fake_server import CHUNKED, DONE, LAST_CHUNK, TO_CLOSE, delta, event, usage
from fuzz_wire import BEGIN, Reference, fuzz, new_stream, observe, seen_by_program, seen_by_reference
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import load_test

# ---------------------------------------------------------------- what streams are made of

# Insides of JSON strings: escapes of every kind, characters of every width, and what looks like the end of something.
PIECES = [
    *(b"a", b" the", b" ", b"0", b"/", b"\x7f", "é".encode(), "你".encode(), "\U0001f600".encode(), "\u2028".encode()),
    *(rb"\n", rb"\"", rb"\\", rb"\/", rb"\t", rb"\u0041", rb"\u00e9", rb"\ud83d\ude00", rb"\ud83d", rb"\ude00"),
    *(rb"\"content\":\"", rb"\"}}]}", b"data: ", b"}]}", rb"\n\n", rb"\r\n5\r\n", b"[DONE]", b":", b"error", b"null"),
]
texts = st.lists(st.sampled_from(PIECES), max_size=4).map(b"".join)
# Bytes that no JSON string may hold, or that are no UTF-8: the short cut must leave these to the parser too.
broken_texts = st.sampled_from(
    [b"\t", b'"', b"\\", b"\\x", b"\\u12", b"\x00", b"\x1f", b'","content":"b', b"\xff", b"\xe4\xbd"]
)

SLOT = "@@@"
CHANNELS = ("content", "content", "content", "reasoning", "reasoning_content")


@st.composite
def templates(draw: st.DrawFn) -> bytes:
    """One line of an event with SLOT in the place of its text."""
    channel = draw(st.sampled_from(CHANNELS))
    part: dict[str, Any] = {channel: SLOT}
    choice: dict[str, Any] = {"index": 0, "delta": part, "finish_reason": None}
    doc: dict[str, Any] = {"id": "c-1", "object": "chat.completion.chunk", "model": "m", "choices": [choice]}
    nulls = {"usage": None, "error": None, "timings": None, "logprobs": None, "created": 5, "system_fingerprint": "f"}
    decoys = {"x_delta": {"content": "no"}, "y": 'say \\"content\\":\\"', "z": [1.5, True, {"reasoning": ""}], "ü": "€"}
    extra = {**nulls, **decoys, "role": "assistant", "refusal": None, "tool_calls": [], "finish_reason": "", "n": 1e30}
    for target in (doc, choice, part):
        chosen = draw(st.lists(st.sampled_from(sorted(extra)), max_size=3, unique=True))
        items = [*target.items(), *((name, extra[name]) for name in chosen if name not in target)]
        target.clear()
        target.update(draw(st.permutations(items)))
    separators = draw(st.sampled_from([(",", ":"), (", ", ": "), (" ,\t", " : ")]))
    line = json.dumps(doc, separators=separators, ensure_ascii=draw(st.booleans())).encode()
    return draw(st.sampled_from([b"data: ", b"data:", b"data:  "])) + line


RAW_TEMPLATES = [  # JSON that no dictionary writes: a key twice, in either order, and the text in two places
    b'data: {"choices":[{"delta":{"content":"@@@","content":null}}]}',
    b'data: {"choices":[{"delta":{"content":null,"content":"@@@"}}]}',
    b'data: {"choices":[{"delta":{"content":"a","content":"@@@"}}]}',
    b'data: {"choices":[{"delta":{"content":"@@@"}}],"choices":[{"delta":{"content":"b"}}]}',
    b'data: {"choices":[{"delta":{"content":"b"}}],"choices":[{"delta":{"content":"@@@"}}]}',
    b'data: {"content":"@@@","choices":[{"delta":{"content":"a"}}]}',
    b'data: {"choices":[{"delta":{"x":{"content":"@@@"},"content":"a"}}]}',
    b'data: {"choices":[{"delta":{"content":"@@@","reasoning":"@@@"}}]}',
    b'data: {"choices":[{"delta":{"content":"@@@"}},{"delta":{"content":"@@@"}}]}',
    b'data: {"choices":[{"delta":{"content":"@@@"},"finish_reason":null}],"error":0}',
    b'data: {"choices":[{"delta":{"content":"@@@"}}],"n":NaN}',
    b'data: {"choices":[{"delta":{"\\u0063ontent":"@@@"}}]}',
    b'data: {"choices":[{"delta":{"content":"@@@","\\u0063ontent":"b"}}]}',
    b'data: {"x":{"content":"@@@"},"choices":[{"delta":{"\\u0063ontent":"a"}}]}',
    b'data: {"choices":[{"message":{"content":"x"},"delta":{"content" : "@@@"}}]}',
    b'data: {"choices":[{"delta":{"content":"@@@","tool_calls":[{"function":{"name":"f"}}]}}]}',
    b'data: {"choices":[{"delta":{"content":"@@@"}}],"usage":{"completion_tokens":3}}',
    b'data: {"choices":[{"delta":{"content":"@@@"}}],"timings":{"cache_n":1}}',
    b'id: 3\ndata: {"choices":[{"delta":{"content":"@@@"}}]}',
    b'data: {"choices":[{"delta":{"content":"@@@"}}]}\n: comment',
    b'data: {"choices":\ndata: [{"delta":{"content":"@@@"}}]}',
    b'event: message\ndata: {"choices":[{"delta":{"content":"@@@"}}]}',
]

other_events = st.one_of(
    st.sampled_from(
        [
            *(b": keep-alive\n\n", b":\n", b"retry: 5\n\n", b"event: ping\ndata:\n\n", b"\n", b"data: : wrapped\n\n"),
            *(
                delta(role="assistant", content=""),
                delta(),
                event({"choices": []}),
                event({"choices": None, "usage": None}),
            ),
            *(
                usage(3, 2),
                usage(3, 9, prompt_tokens_details={"cached_tokens": 1}),
                event({"usage": {"completion_tokens": None}}),
            ),
            *(event({"timings": {"cache_n": 2, "prompt_ms": 1.5}}), delta(finish="stop"), delta("z", finish="length")),
            *(delta(tool_calls=[{"function": {"name": "f", "arguments": ""}}]), delta("a", reasoning="b")),
            *(event({"choices": [{"delta": {"content": "p"}}, {"delta": {"content": "q"}}]}), delta(content=5)),
        ]
    )
)
ends = st.sampled_from(
    [
        *(
            DONE,
            DONE,
            DONE,
            b"data:[DONE]\n\n",
            b"data: [DONE]",
            b"",
            delta(finish="stop") + b"\n",
            DONE + delta("late"),
        ),
        *(event({"error": {"message": "died"}}), event({"error": "died"}), b"event: error\ndata: x\n\n"),
        *(b"error: died\n\n", b"data: <html>\n\n", b"data: 5\n\n", delta(finish="error")),
    ]
)


@st.composite
def bodies(draw: st.DrawFn) -> list[bytes]:
    """The events of a body, each with its end."""
    line_end = draw(st.sampled_from([b"\n", b"\n", b"\n", b"\n", b"\r\n", b"\r"]))
    events: list[bytes] = []
    for _ in range(draw(st.integers(1, 4))):
        template = draw(st.one_of(templates(), st.sampled_from(RAW_TEMPLATES)))
        insides = draw(st.lists(texts, min_size=1, max_size=12))
        if draw(st.integers(0, 9)) == 0:
            insides.insert(draw(st.integers(0, len(insides))), draw(broken_texts))
        for inside in insides:
            events.append(template.replace(SLOT.encode(), inside) + b"\n\n")
            if draw(st.integers(0, 7)) == 0:
                events.append(draw(other_events))
    events.append(draw(ends))
    return [one.replace(b"\n", line_end) for one in events]


def framed(draw: st.DrawFn, events: list[bytes], chunked: bool) -> list[bytes]:
    """The events as a server writes them: as they are, or a chunk each, or in chunks of any size and spelling."""
    if not chunked:
        return events
    parts = events
    if draw(st.integers(0, 3)) == 0:
        body = b"".join(events)
        parts = draw(pieces_of(body, 6))
    spelled = draw(st.sampled_from([b"%x\r\n", b"%x\r\n", b"%x\r\n", b"%X\r\n", b"0%x\r\n", b"%x;a=b\r\n", b"%x\n"]))
    last = draw(st.sampled_from([LAST_CHUNK, LAST_CHUNK, b"0\r\nX-Trailer: a\r\n\r\n", b"", b"0\r\n", b"zz\r\n"]))
    return [*(spelled % len(part) + part + b"\r\n" for part in parts if part), last]


@st.composite
def pieces_of(draw: st.DrawFn, data: bytes, most: int) -> list[bytes]:
    places = sorted(draw(st.lists(st.integers(0, len(data)), max_size=most)))
    return [data[low:high] for low, high in zip([0, *places], [*places, len(data)])]


@st.composite
def streams(draw: st.DrawFn) -> tuple[bytes, list[bytes], set[int]]:
    """(head, the reads that the client sees, after which of them its timers look at the stream)."""
    chunked = draw(st.booleans())
    parts = framed(draw, draw(bodies()), chunked)
    style = draw(st.sampled_from(["one read each", "one read each", "some together", "anywhere", "one read"]))
    if style == "some together":
        size = draw(st.integers(2, 5))
        parts = [b"".join(parts[at : at + size]) for at in range(0, len(parts), size)]
    elif style == "anywhere":
        parts = draw(pieces_of(b"".join(parts), 12))
    elif style == "one read":
        parts = [b"".join(parts)]
    looks = draw(st.sets(st.integers(0, len(parts)), max_size=3))
    return (CHUNKED if chunked else TO_CLOSE), [part for part in parts if part], looks


@settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))
@given(streams())
def test_the_short_cut_is_exact(stream: tuple[bytes, list[bytes], set[int]]) -> None:
    compare(*stream)


def compare(head: bytes, reads: list[bytes], looks: Iterable[int] = ()) -> None:
    """Feed both readers the same reads, one second apart, and close."""
    stream, plain = new_stream(), Reference(len(head), head is CHUNKED)
    seen = stream.seen
    for number, read in enumerate([head, *reads], 1):
        stream.feed(read, BEGIN + number)
        plain.feed(read, BEGIN + number)
        if number in looks:
            stream.deadline_at(5.0)
            assert seen_by_program(seen) == seen_by_reference(plain)
    closing_at = BEGIN + len(reads) + 2
    stream.end_of_stream(closing_at)
    plain.close(closing_at)
    assert seen_by_program(seen) == seen_by_reference(plain)


def plain_event(text: bytes, more: bytes = b"") -> bytes:
    return b'data: {"choices":[{"index":0,"delta":{"content":"%b"}}]%b}\n\n' % (text, more)


LEARNT = [plain_event(b"a"), plain_event(b"b")]
COUNTED = [plain_event(b"a", b',"usage":{"completion_tokens":3}'), usage(1, 9)]
WITH_TIMINGS = [plain_event(b"a", b',"timings":{"cache_n":1}'), event({"timings": {"cache_n": 5}})]


@pytest.mark.parametrize(
    "events",
    [
        [*LEARNT, b"event: error\n", *LEARNT],  # an event that has begun takes the next line in
        [*LEARNT, b"error: x\n", *LEARNT],
        [*LEARNT, b"data: {\n", *LEARNT],
        [*LEARNT, b"id: 1\n", *LEARNT],
        [*LEARNT, b":", *LEARNT, b"\n", *LEARNT],
        [*LEARNT, b"\n", plain_event(b""), *LEARNT],
        [*LEARNT, b"\0", *LEARNT, *LEARNT],
        [*LEARNT, plain_event(b"\xe4\xbd"), plain_event(b"\xa0"), *LEARNT],  # half a character each
        [*LEARNT, plain_event(rb"\ud83d"), plain_event(rb"\ude00"), *LEARNT],
        [*LEARNT, plain_event(b"\t"), *LEARNT],
        [*LEARNT, plain_event(b'"'), *LEARNT],
        [*LEARNT, plain_event(b"\\"), plain_event(b"n"), *LEARNT],
        [*LEARNT, plain_event(b"a", b',"error":"late"'), *LEARNT],
        [*COUNTED, COUNTED[0], COUNTED[0]],  # the last count is the smaller one again
        [*WITH_TIMINGS, WITH_TIMINGS[0], WITH_TIMINGS[0]],
        [*LEARNT, DONE, *LEARNT],
        [*LEARNT, delta(finish="stop"), *LEARNT],
    ],
)
def test_what_must_not_take_the_short_cut(events: list[bytes]) -> None:
    events = [*events, DONE]
    chunks = [b"%x\r\n%b\r\n" % (len(part), part) for part in events]
    for head, parts in ((TO_CLOSE, events), (CHUNKED, [*chunks, LAST_CHUNK])):
        compare(head, parts)
        compare(head, [b"".join(parts)])
        compare(head, [b"".join(parts[at : at + 2]) for at in range(0, len(parts), 2)])
        compare(head, [parts[0], *(piece for part in parts[1:] for piece in (part[:9], part[9:]) if piece)])
        compare(head, parts[:-2])


def test_the_streams_above_do_take_the_short_cut(monkeypatch: Any) -> None:
    """A property that only ever meets the full parser would prove nothing: count what the recogniser took."""
    taken = 0
    note = load_test.Observation.add_plain

    def counting(self: load_test.Observation, texts: Any, *more: Any) -> None:
        nonlocal taken
        taken += len(texts)
        note(self, texts, *more)

    monkeypatch.setattr(load_test.Observation, "add_plain", counting)
    deltas = 0
    for chunked in (False, True):
        for template in [
            *RAW_TEMPLATES,
            b'data: {"choices": [{"index": 0, "delta": {"content": "@@@"}}], "usage": null}',
        ]:
            for together in (False, True):
                one = [template.replace(b"@@@", text) + b"\n\n" for text in (b"a", b" b", rb"\n", "é".encode()) * 3]
                reads = [b"%x\r\n%b\r\n" % (len(part), part) for part in one] if chunked else one
                deltas += observe(
                    [CHUNKED if chunked else TO_CLOSE, *([b"".join(reads)] if together else reads)], "close"
                ).deltas
    assert deltas == 1056 and taken > 150


def test_escapes_take_the_short_cut() -> None:
    """A server that writes ASCII only is no reason to parse every event."""
    recogniser = load_test.PlainDeltas(b'data: {"content":"', b'"}', "content", chunked=False)
    insides = [rb"\u00e9", rb"caf\u00E9\n", rb"\ud83d\ude00", rb"\"\u0022"]
    stream = b"".join(b'data: {"content":"%b"}\n\n' % inside for inside in insides)
    assert recogniser.take(stream) == (insides, len(stream))
    assert recogniser.take(stream.replace(rb"\ud83d", rb"\ud83"))[0] == insides[:2]


def test_a_run_of_one_thousand_events_is_read_as_one_thousand() -> None:
    """Held reads are let go in time, and none is lost or doubled, however many there are."""
    for chunked in (False, True):
        one = [delta(f" w{number}") for number in range(1000)]
        reads = [b"%x\r\n%b\r\n" % (len(part), part) if chunked else part for part in one]
        stream = new_stream()
        seen = stream.seen
        stream.feed(CHUNKED if chunked else TO_CLOSE, BEGIN)
        for number, read in enumerate(reads):
            stream.feed(read, BEGIN + number)
            assert number + 1 - load_test.HOLD_READS <= seen.deltas == number + 1 - len(seen.held_at)
        stream.feed(b"%x\r\n%b\r\n" % (len(DONE), DONE) if chunked else DONE, BEGIN + 1000)
        assert seen.over and seen.failure is None and seen.ended_at == BEGIN + 1000
        assert seen.deltas == 1000 and list(seen.moments) == [BEGIN + number for number in range(1000)]
        assert seen.text() == "".join(f" w{number}" for number in range(1000))


# ---------------------------------------------------------------- framing, events, figures


@settings(max_examples=150, deadline=None)
@given(st.binary(max_size=300), st.randoms(use_true_random=False))
def test_a_body_is_the_same_in_every_framing(body: bytes, rng: random.Random) -> None:
    length = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n"
    places = sorted(rng.randrange(len(body) + 1) for _ in range(5))
    parts = [body[low:high] for low, high in zip([0, *places], [*places, len(body)])]
    chunks = b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in parts if part)
    for data in (length % len(body) + body + b"more", CHUNKED + chunks + LAST_CHUNK + b"more", TO_CLOSE + body):
        http, found = load_test.HttpResponse(), b""
        at = 0
        while at < len(data):
            step = rng.choice((1, 2, 7, 100))
            found += http.feed(data[at : at + step])
            at += step
        assert found == body
        assert http.complete is (not data.startswith(TO_CLOSE))


def events_by_rule(body: bytes) -> list[tuple[str, bytes]]:
    """Events by the letter of the rules: split into lines, look at each."""
    found: list[tuple[str, bytes]] = []
    data: list[bytes] = []
    name = ""
    body = body[3:] if body.startswith(b"\xef\xbb\xbf") else body
    lines = re.split(rb"\r\n|\n|\r", body)[:-1]
    for line in lines:
        if not line:
            if b"\n".join(data):
                found.append((name, b"\n".join(data)))
            name, data = "", []
            continue
        field, _, value = line.partition(b":")
        value = value[1:] if value.startswith(b" ") else value
        if field == b"data":
            data.append(value)
        elif field == b"event":
            name = value.decode("utf-8", "replace")
        elif field == b"error":
            name = "error"
            data.append(value)
    return found


BITS = [
    b"\n",
    b"\r",
    b"\r\n",
    b"data",
    b"data:",
    b"data: ",
    b":",
    b" ",
    b"event: x",
    b"id: 1",
    b"a",
    b"\xff",
    b"error:",
    b"\xef\xbb\xbf",
]


@settings(max_examples=300, deadline=None)
@given(st.lists(st.sampled_from(BITS), max_size=25).map(b"".join), st.randoms(use_true_random=False))
def test_events_are_those_of_the_rules_in_every_cut(body: bytes, rng: random.Random) -> None:
    reader, found = load_test.EventReader(), []
    at = 0
    while at < len(body):
        step = rng.choice((1, 1, 2, 5, 50))
        found += reader.feed(body[at : at + step])
        at += step
    assert [(one.name, one.data) for one in found] == events_by_rule(body)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=120), st.integers(1, 100), st.integers(0, 50))
def test_a_percentile_is_the_smallest_value_with_enough_at_or_below_it(
    values: list[float], percent: int, zeros: int
) -> None:
    everything = sorted([0.0] * zeros + values)
    enough = [value for value in everything if 100 * sum(v <= value for v in everything) >= percent * len(everything)]
    assert load_test.percentile(sorted(values), percent, zeros) == min(enough)


# ---------------------------------------------------------------- fuzz, a small and fixed part


def test_a_thousand_mutants() -> None:
    assert fuzz(seed=20261130, rounds=1000) == 1000


def test_a_short_cut_that_proves_nothing_is_found_out(monkeypatch: Any) -> None:
    """The comparison can fail: a recogniser that takes the first text-like place for the text is caught."""

    def gullible(read: bytes, chunked: bool) -> Any:
        line = read.rstrip(b"\n")
        start = line.index(b'"content":"') + len(b'"content":"')
        end = line.index(b'"', start)
        return load_test.PlainDeltas(line[:start], line[end:], "content", chunked)

    monkeypatch.setattr(load_test, "learn_plain", gullible)
    line = b'data: {"content":"%b","choices":[{"delta":{"content":"a"}}]}\n\n'
    stream, plain = new_stream(), Reference(len(TO_CLOSE), False)
    for read in (TO_CLOSE, line % b"w", line % b"x", line % b"y", DONE):
        stream.feed(read, BEGIN)
        plain.feed(read, BEGIN)
    assert seen_by_program(stream.seen) != seen_by_reference(plain)
