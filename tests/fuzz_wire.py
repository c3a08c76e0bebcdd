"""A plain reference reader of streamed responses, and a fuzzer that holds `load_test.Observation` against it.

Run by hand, for minutes:

    python tests/fuzz_wire.py --minutes 3 [--seed 7]

It mutates real and reported streams, feeds each in one piece and in random cuts, and ends it by a close, a reset or
silence. What must hold: no exception; the outcome does not depend on the cuts; no success unless the reference, which
parses every event with `json.loads`, sees one too, with the same text and counts; every record is strict JSON.
On a finding it prints the bytes and exits with 1. `test_wire_properties.py` runs a small, fixed part of it.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fake_server import CHUNKED, DONE, LAST_CHUNK, TO_CLOSE, chunk, compact, delta, event, usage, whole_stream

import load_test

BEGIN = 1000.0  # what the clock shows when a replayed request is written


def new_stream() -> load_test.Stream:
    """The program's reader of one response, at the moment the request is written."""
    stream = load_test.Stream(load_test.Observation())
    stream.seen.connecting_at = BEGIN
    stream.begin(BEGIN)
    return stream


class Broken(Exception):
    """The framing is not what it says."""


class Reference:
    """Reads a response byte by byte, as plainly as it can be written: no short cut, no look-ahead.

    `head` is how many bytes of head to skip. Chunked framing is followed to the letter.
    """

    def __init__(self, head: int, chunked: bool) -> None:
        self._skip = head
        self._chunked = chunked
        self._frame = "size"
        self._left = 0
        self._size_line = b""
        self._line = b""
        self._after_cr = False
        self._first_line = True
        self._data: list[bytes] = []
        self._name = b""
        self.arrivals: list[float] = []
        self.answer = ""
        self.thoughts = ""
        self.usage: dict[str, Any] = {}
        self.timings: Any = None
        self.finish: str | None = None
        self.model: str | None = None
        self.failure: str | None = None
        self.over = False
        self.ended_at = 0.0

    def feed(self, piece: bytes, at_s: float) -> None:
        for number in piece:
            if self.over:
                return
            if self._skip:
                self._skip -= 1
                continue
            try:
                self._framed(bytes([number]), at_s)
            except Broken:
                self._end(at_s, "protocol")

    def close(self, at_s: float) -> None:
        if self.over:
            return
        rest = self._line[5:].lstrip(b" ") if self._line.startswith(b"data:") else b""
        unfinished = b"\n".join([*self._data, *([rest] if self._line.startswith(b"data:") else [])])
        if unfinished == b"[DONE]" or (self.finish is not None and not self._chunked and not self._skip):
            self._succeed(at_s)
        else:
            self._end(at_s, "truncated")

    def _end(self, at_s: float, failure: str | None) -> None:
        if not self.over:
            self.over, self.ended_at, self.failure = True, at_s, failure

    def _succeed(self, at_s: float) -> None:
        self._end(at_s, None if self.arrivals else "no_tokens")

    def _framed(self, byte: bytes, at_s: float) -> None:
        if not self._chunked:
            self._body(byte, at_s)
        elif self._frame == "data":
            self._body(byte, at_s)
            self._left -= 1
            if not self._left:
                self._frame = "end of data"
        elif byte != b"\n":
            self._size_line += byte
            if self._frame == "end of data" and self._size_line != b"\r":
                raise Broken
        else:
            line, self._size_line = re.sub(rb"\r\Z", b"", self._size_line), b""
            self._frame_line(line, at_s)

    def _frame_line(self, line: bytes, at_s: float) -> None:
        if self._frame == "end of data":
            self._frame = "size"
        elif self._frame == "size":
            if not re.fullmatch(rb"[ \t]*[0-9a-fA-F]{1,15}[ \t]*(;.*)?", line, re.DOTALL):
                raise Broken
            self._left = int(line.split(b";")[0], 16)
            self._frame = "data" if self._left else "trailer"
        elif not line:  # after the trailer
            unfinished = self._line[5:].lstrip(b" ") if self._line.startswith(b"data:") else b""
            if self.finish is not None or b"\n".join([*self._data, unfinished]).strip(b"\n") == b"[DONE]":
                self._succeed(at_s)
            else:
                self._end(at_s, "truncated")

    def _body(self, byte: bytes, at_s: float) -> None:
        if self._after_cr and byte == b"\n":
            self._after_cr = False
            return
        self._after_cr = byte == b"\r"
        if byte not in b"\r\n":
            self._line += byte
            return
        line, self._line = self._line, b""
        if self._first_line and line.startswith(b"\xef\xbb\xbf"):
            line = line[3:]
        self._first_line = False
        if line:
            self._field(line)
        else:
            data, name = b"\n".join(self._data), self._name
            self._data, self._name = [], b""
            if data:
                self._event(name, data.decode("utf-8", "replace").strip(), at_s)

    def _field(self, line: bytes) -> None:
        name, _, value = line.partition(b":")
        value = value[1:] if value.startswith(b" ") else value
        if name == b"data":
            self._data.append(value)
        elif name == b"event":
            self._name = value
        elif name == b"error":
            self._name = b"error"
            self._data.append(value)

    def _event(self, name: bytes, data: str, at_s: float) -> None:
        if data == "[DONE]":
            self._succeed(at_s)
        elif data.startswith(":"):
            pass
        elif name == b"error":
            self._end(at_s, "server")
        else:
            try:
                doc = json.loads(data)
            except (ValueError, RecursionError):
                doc = None
            if not isinstance(doc, dict):
                self._end(at_s, "protocol")
            elif doc.get("error") or doc.get("object") == "error":
                self._end(at_s, "server")
            else:
                self._chunk(doc, at_s)

    def _chunk(self, doc: dict[str, Any], at_s: float) -> None:
        listed = doc.get("choices")
        choices = [choice for choice in listed if isinstance(choice, dict)] if isinstance(listed, list) else []
        counts = [part["usage"] for part in (doc, *choices) if isinstance(part.get("usage"), dict)]
        if counts:
            self.usage.update({key: value for key, value in counts[0].items() if value is not None})
        if isinstance(doc.get("timings"), dict):
            self.timings = {key: n for key, n in doc["timings"].items() if isinstance(n, (int, float))}
        if self.model is None and isinstance(doc.get("model"), str):
            self.model = doc["model"] or None
        told = [choice["finish_reason"] for choice in choices if choice.get("finish_reason")]
        reasons = [reason if isinstance(reason, str) else json.dumps(reason) for reason in told if reason != "null"]
        if reasons:
            self.finish = load_test.printable(reasons[-1], load_test.MAX_FINISH_CHARS)
        if any(choice.get("error") for choice in choices) or "error" in "".join(reasons):
            self._end(at_s, "server")
            return
        called = False
        texts: list[tuple[str, str]] = []
        for choice in choices:
            part = choice.get("delta")
            if isinstance(part, dict):
                for channel in ("content", "reasoning_content", "reasoning", "refusal"):
                    thought = channel.startswith("reasoning")
                    texts += strings_in(part.get(channel), "thoughts" if thought else "answer")
                called = called or calls_something(part)
        self.answer += "".join(text for where, text in texts if where == "answer")
        self.thoughts += "".join(text for where, text in texts if where == "thoughts")
        if texts or called:
            self.arrivals.append(at_s)


def strings_in(value: Any, where: str) -> list[tuple[str, str]]:
    """The texts of a channel, one below the other in the parts that it may consist of."""
    if isinstance(value, str):
        return [(where, value)] if value else []
    if isinstance(value, list):
        return [found for part in value if not isinstance(part, str) for found in strings_in(part, where)]
    if not isinstance(value, dict):
        return []
    below = "thoughts" if re.search("thinking|reasoning", str(value.get("type"))) else where
    kept = [(key, "thoughts") for key in ("reasoning", "thinking")] + [(key, below) for key in ("refusal", "text")]
    return [found for key, place in kept for found in strings_in(value.get(key), place)]


def calls_something(part: dict[str, Any]) -> bool:
    calls = part.get("tool_calls")
    called = [call.get("function") for call in calls if isinstance(call, dict)] if isinstance(calls, list) else []
    for function in (*called, part.get("function_call")):
        told = [function.get(key) for key in ("name", "arguments")] if isinstance(function, dict) else []
        if any(isinstance(text, str) and text for text in told):
            return True
    return False


def as_one_text(text: str) -> str:
    """Two halves of a surrogate pair, one in each of two deltas, are one character."""
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "surrogatepass")


def seen_by_reference(reader: Reference) -> dict[str, Any]:
    return {
        "arrivals": reader.arrivals,
        "answer": as_one_text(reader.answer),
        "thoughts": as_one_text(reader.thoughts),
        "usage": reader.usage,
        "timings": reader.timings,
        "finish": reader.finish,
        "model": reader.model,
        "over": reader.over,
        "failure": reader.failure,
        "ended_at": reader.ended_at,
    }


def seen_by_program(seen: load_test.Observation) -> dict[str, Any]:
    arrivals = [at_s for at_s, count in zip(seen.moments, seen.counts) for _ in range(count)]
    assert len(arrivals) == seen.deltas
    assert arrivals == sorted(arrivals)
    assert (seen.first_token_at, seen.last_token_at) == ((arrivals[0], arrivals[-1]) if arrivals else (None, None))
    return {
        "arrivals": arrivals,
        "answer": seen.text(),
        "thoughts": seen.text(thoughts=True),
        "usage": seen.usage or {},
        "timings": seen.timings,
        "finish": seen.finish,
        "model": seen.model,
        "over": seen.over,
        "failure": seen.failure.error_class if seen.failure else None,
        "ended_at": seen.ended_at,
    }


# ---------------------------------------------------------------- mutation


def seeds() -> list[bytes]:
    """Streams to start from: the reported ones, and the shapes that the common servers send."""
    path = Path(__file__).with_name("data") / "wire_cases.json"
    cases = json.loads(path.read_text("utf-8"))["cases"]
    streams = ["".join(step.get("bytes", "") for step in case["send"]).encode("latin-1") for case in cases]
    frame = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 1, "model": "m"}
    choice = [{"index": 0, "delta": {"content": " the"}, "logprobs": None, "finish_reason": None}]
    vllm = event({**frame, "choices": choice})
    llama = event({"choices": [{"finish_reason": None, "index": 0, "delta": {"content": " the"}}], **frame})
    end = delta(finish="length") + usage(3, 12) + DONE
    streams += [CHUNKED + chunk(one) * 12 + chunk(end) + LAST_CHUNK for one in (vllm, llama)]
    streams += [TO_CLOSE + one * 12 + end for one in (vllm, llama)]
    streams.append(whole_stream(6))
    return [stream for stream in streams if len(stream) < 5000]


TOKENS = [
    *(
        b"\n",
        b"\r",
        b"\r\n",
        b"\n\n",
        b":",
        b" ",
        b'"',
        b"\\",
        b"{",
        b"}",
        b"[",
        b"]",
        b",",
        b"\x00",
        b"\xff",
        b"\xe4\xbd",
    ),
    *(b"data:", b"data: ", b"event: error\n", b"error: x\n", b"id: 1\n", b"[DONE]", b"data: [DONE]\n\n", b"0\r\n\r\n"),
    *(b"null", b"true", b"NaN", b"1e999", b"9" * 30, b'"error":{"message":"x"},', b'"usage":null,', b'"content":"y"'),
    *(b"\\u0041", b"\\ud83d", b"\\n", b'"finish_reason":"stop"', b'"delta":{}', b"f\r\n", b"\xef\xbb\xbf", b"5;x\r\n"),
    *(b"Content-Length: 5\r\n", b"Content-Encoding: gzip\r\n", b"HTTP/1.1 100 Continue\r\n\r\n", b"[" * 2000),
]


def mutant(rng: random.Random, sources: Sequence[bytes]) -> bytes:
    """One stream with a few bytes or pieces deleted, doubled, replaced, inserted, moved or cut off."""
    data = rng.choice(sources)
    for _ in range(rng.choice((0, 1, 1, 2, 3, 6))):
        at = rng.randrange(len(data) + 1)
        to = min(len(data), at + rng.choice((1, 1, 2, 5, 40, 300)))
        kind = rng.randrange(6)
        if kind == 0:
            data = data[:at] + data[to:]
        elif kind == 1:
            data = data[:to] + data[at:]
        elif kind == 2:
            data = data[:at] + rng.choice(TOKENS) + data[at:]
        elif kind == 3:
            data = data[:at] + rng.choice(TOKENS) + data[to:]
        elif kind == 4:
            data = data[:at] + bytes([rng.randrange(256)]) + data[at + 1 :]
        else:
            other = rng.choice(sources)
            data = data[:at] + other[rng.randrange(len(other)) :]
    return data[: rng.randrange(len(data) + 1)] if data and rng.random() < 0.2 else data


def random_cuts(rng: random.Random, data: bytes) -> list[bytes]:
    """`data` in pieces: a few, many, one byte each, or one per event."""
    style = rng.randrange(4)
    if style == 0:
        places = sorted(rng.randrange(len(data) + 1) for _ in range(rng.randrange(1, 6)))
    elif style == 1:
        places = sorted(rng.randrange(len(data) + 1) for _ in range(len(data) // 10))
    elif style == 2:
        places = list(range(1, len(data)))
    else:
        places = [found.end() for found in re.finditer(rb"\n\n(?:\r\n)?", data)]
    edges = [0, *places, len(data)]
    return [data[low:high] for low, high in zip(edges, edges[1:])]


def observe(pieces: Sequence[bytes], end: str) -> load_test.Observation:
    stream = new_stream()
    for piece in pieces:
        stream.feed(piece, BEGIN)
        assert not stream.over or stream.seen.ended_at == BEGIN
    if end == "silence":
        stream.silent(1.0, BEGIN)
    else:
        stream.end_of_stream(BEGIN, "connection lost" if end == "reset" else None)
    return stream.seen


def outcome(seen: load_test.Observation) -> dict[str, Any]:
    """What no cut may change: all but the words of a failure, which quote what had come by then."""
    return {**seen_by_program(seen), "status": seen.status}


def check(data: bytes, pieces: Sequence[bytes], end: str) -> None:
    """Everything that must hold for one stream. Raises AssertionError, or whatever the program raises."""
    whole, cut = observe([data], end), observe(pieces, end)
    assert outcome(whole) == outcome(cut)
    assert whole.over
    if whole.failure is not None:
        message = whole.failure.message
        assert message.startswith(whole.failure.error_class) and message.isprintable() and len(message) <= 300
    record = vars(whole.record(0, BEGIN))
    json.dumps(json.loads(load_test.strict_json(record)), allow_nan=False)
    head, blank, _ = data.partition(b"\r\n\r\n")
    if end == "close" and blank and head + blank in (CHUNKED, TO_CLOSE):
        plain = Reference(len(head + blank), head + blank == CHUNKED)
        plain.feed(data, BEGIN)
        plain.close(BEGIN)
        assert seen_by_reference(plain) == seen_by_program(whole)
    if whole.failure is None:
        assert re.search(rb'\[DONE\]|"finish_reason"', data), "a success without a terminal marker"


def fuzz(seed: int, rounds: int | None = None, seconds: float | None = None) -> int:
    """Check so many mutants, or for so long; returns how many. Raises AssertionError naming the bytes."""
    rng = random.Random(seed)
    sources = seeds()
    until = None if seconds is None else time.monotonic() + seconds
    done = 0
    while (rounds is None or done < rounds) and (until is None or time.monotonic() < until):
        data = mutant(rng, sources)
        pieces, end = random_cuts(rng, data), rng.choice(("close", "close", "reset", "silence"))
        try:
            check(data, pieces, end)
        except Exception as error:
            raise AssertionError(
                f"{error!r}\nend: {end}\npieces: {pieces!r}\n{compact({'seed': seed, 'round': done})!r}"
            ) from error
        done += 1
    return done


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=3.0)
    parser.add_argument("--seed", type=int, default=random.randrange(1 << 32))
    args = parser.parse_args(argv)
    try:
        done = fuzz(args.seed, seconds=args.minutes * 60)
    except AssertionError as error:
        print(f"seed {args.seed}: {error}")
        return 1
    print(f"seed {args.seed}: {done} streams, nothing found")
    return 0


if __name__ == "__main__":
    sys.exit(main())
