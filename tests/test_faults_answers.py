"""Answers that are none, by kind: each fails its own request, in a class and with a line that says what came."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest
from fake_server import (
    CHUNKED,
    DONE,
    HOLD,
    LAST_CHUNK,
    READ,
    RESET,
    STREAM_HEAD,
    TO_CLOSE,
    ClientReads,
    FakeServer,
    Request,
    Step,
    chunk,
    delta,
    event,
    load,
    plain,
    usage,
    whole_stream,
)

COMPLETE = event(
    {"object": "chat.completion", "choices": [{"message": {"content": "hi"}}], "usage": {"completion_tokens": 1}}
)
HTML = "<html>\n<body><h1>502 Bad Gateway</h1>\x1b[31m</body></html>"


def deep(depth: int) -> bytes:
    """Lists in lists, so many."""
    return b"[" * depth + b"1" + b"]" * depth


KINDS: dict[str, tuple[list[Step], str, str]] = {
    # closing and resetting: https://github.com/vllm-project/vllm/pull/54628
    "closes at once": ([], "truncated", "no response"),
    "resets at once": ([RESET], "truncated", "no response"),
    "resets inside the head": ([b"HTTP/1.1 200 OK\r\nCont", READ, RESET], "truncated", "no complete response head"),
    "closes inside the head": ([b"HTTP/1.1 200 OK\r\n"], "truncated", "no complete response head"),
    "closes after the head": ([CHUNKED], "truncated", "before the last chunk"),
    "resets in mid-stream": ([CHUNKED, chunk(delta("a")), READ, RESET], "truncated", "connection lost"),
    "resets in mid-stream, unframed": ([TO_CLOSE, delta("a"), READ, RESET], "truncated", "connection lost"),
    "closes in mid-stream": ([CHUNKED, chunk(delta("a"))], "truncated", "before the last chunk"),
    "closes inside a chunk": ([CHUNKED, chunk(delta("a"))[:-9]], "truncated", "inside a chunk"),
    "closes in mid-stream, unframed": ([TO_CLOSE, delta("a")], "truncated", "before a finish_reason"),
    "closes inside an event": (
        [TO_CLOSE, delta("a") + delta("b", finish="stop")[:-1]],
        "truncated",
        "before a finish_reason",
    ),
    "short of its length": ([STREAM_HEAD + b"Content-Length: 9999\r\n\r\n", delta("a")], "truncated", "short of its"),
    "finish but no last chunk": ([CHUNKED, chunk(delta("a", finish="stop"))], "truncated", "before the last chunk"),
    # what is no stream: https://github.com/BerriAI/litellm/pull/22085, https://github.com/kubernetes-sigs/inference-perf/issues/713
    "a page instead": ([plain("200 OK", HTML, "text/html")], "protocol", "not an event stream"),
    "a page without a length": (
        [b"HTTP/1.0 200 OK\r\nContent-Type: text/html\r\n\r\n" + HTML.encode()],
        "protocol",
        "not an event",
    ),
    "a bad gateway": ([plain("502 Bad Gateway", HTML, "text/html")], "http", "http 502"),
    "a whole answer": (
        [plain("200 OK", COMPLETE[6:])],
        "protocol",
        "not an event stream (Content-Type application/json)",
    ),
    "an error with status 200": ([plain("200 OK", '{"error":"too long"}')], "server", "too long"),
    "an error without an error": ([plain("500 Oops", '{"status":"sad"}')], "http", '{"status": "sad"}'),
    "an error that is a list": ([plain("500 Oops", '["a"]')], "http", '["a"]'),
    "an error that is null": ([plain("500 Oops", "null")], "http", "null"),
    "an error with details": (
        [plain("422 X", '{"detail":[{"loc":["body"],"msg":"field required"}]}')],
        "http",
        "field required",
    ),
    "a flat error": (
        [plain("400 X", '{"object":"error","message":"bad","type":"BadRequestError","code":400}')],
        "http",
        "BadRequestError: bad",
    ),
    "JSON that is not": ([plain("404 X", "Not Found")], "http", "Not Found"),
    "an empty error": ([plain("500 X", "")], "http", "no text"),
    "an error in bytes": ([plain("500 X", b"\xff\xfe\x00\x01")], "http", "http 500"),
    "an endless error": ([b"HTTP/1.1 500 X\r\n\r\n", *[b"x" * 70000] * 2], "http", "http 500: 'xxx"),
    "an error in chunks": (
        [b"HTTP/1.1 500 X\r\nTransfer-Encoding: chunked\r\n\r\n" + chunk(b'{"error":') + chunk(b'"no"}') + LAST_CHUNK],
        "http",
        "http 500: no",
    ),
    "an error in broken chunks": (
        [b"HTTP/1.1 500 X\r\nTransfer-Encoding: chunked\r\n\r\n" + chunk(b'{"error":"no"}') + b"zz\r\n"],
        "protocol",
        "chunk size",
    ),
    "a truncated error": ([b"HTTP/1.1 500 X\r\nContent-Length: 99\r\n\r\n{"], "http", "http 500"),
    "a redirect": (
        [plain("307 Moved", "", "text/html", "Location: https://elsewhere/v1")],
        "http",
        "https://elsewhere/v1",
    ),
    "a redirect to nowhere": ([plain("302 Found", "")], "http", "http 302"),
    "a demand for a password": (
        [plain("401 X", "", "text/html", 'WWW-Authenticate: Basic realm="x"')],
        "http",
        "http 401",
    ),
    "no content": ([b"HTTP/1.1 204 No Content\r\n\r\n"], "http", "http 204"),
    "accepted": ([plain("202 Accepted", "{}")], "http", "http 202"),
    "too many context tokens": (
        [plain("400 X", '{"error":{"code":400,"message":"request (900 tokens)","type":"exceed_context_size_error"}}')],
        "http",
        "http 400: exceed_context_size_error: request (900 tokens)",
    ),
    # broken off by neither the model nor a limit: each names its reason
    **{
        f"broken off: {reason}": ([CHUNKED + chunk(delta("a", finish=reason) + usage(3, 1) + DONE)], "server", reason)
        for reason in ("abort", "aborted", "error", "cancelled", "timeout", "insufficient_system_resource")
    },
    "broken off in silence": ([CHUNKED + chunk(delta("a") + delta(finish="abort")), HOLD], "server", "abort"),
    # other protocols, other encodings
    "a compressed refusal": (
        [plain("429 X", gzip.compress(b'{"error":{"message":"slow down"}}'), "text/html", "Content-Encoding: gzip")],
        "http",
        "http 429: slow down",
    ),
    "a refusal in an unknown compression": (
        [plain("503 X", b"\x1b\x05\x00", "text/html", "Content-Encoding: br")],
        "http",
        "http 503: 3 bytes compressed as br",
    ),
    "a refusal that says to be compressed": (
        [plain("429 X", b"slow down", "text/html", "Content-Encoding: gzip")],
        "http",
        "http 429: 9 bytes compressed as gzip",
    ),
    "a port that speaks TLS": ([b"\x15\x03\x03\x00\x02\x02\x16"], "protocol", "https://"),
    "a greeting of another service": ([b"SSH-2.0-OpenSSH_9.6\r\n"], "protocol", "SSH-2.0"),
    "zeros": ([b"\0" * 500], "protocol", "expected an HTTP/1 status line"),
    "HTTP/2": ([b"\0\0\x12\x04\0\0\0\0\0"], "protocol", "expected an HTTP/1 status line"),
    "gzip that was not asked for": (
        [STREAM_HEAD + b"Content-Encoding: gzip\r\n\r\n" + gzip.compress(delta("a"))],
        "protocol",
        "gzip",
    ),
    "gzip without a word": ([TO_CLOSE + gzip.compress(delta("a") * 30)], "truncated", "before a finish_reason"),
    "gzip as a transfer": ([STREAM_HEAD + b"Transfer-Encoding: gzip, chunked\r\n\r\n"], "protocol", "gzip, chunked"),
    "a huge head": ([b"HTTP/1.1 200 OK\r\n" + b"X-Filler: y\r\n" * 9000], "protocol", "no end of the response head"),
    "a huge line": ([b"HTTP/1.1 200 OK\r\nX: ", *[b"y" * 65536] * 3], "protocol", "no end of the response head"),
    "a huge chunk header": ([CHUNKED + b"1;" + b"y" * 70000], "protocol", "chunk header"),
    "a huge event": ([TO_CLOSE + b"data: ", *[b"y" * 1048576] * 17], "protocol", "one event of over 16777216 bytes"),
    # in the stream: https://github.com/vllm-project/vllm/pull/57519, https://github.com/sgl-project/sglang/pull/38868
    "an error in the stream": (
        [CHUNKED + chunk(delta("a")), chunk(event({"error": {"message": "died", "code": 500}}) + DONE)],
        "server",
        "died",
    ),
    "no tokens at all": (
        [CHUNKED + chunk(delta(role="assistant") + usage(3, 0) + DONE) + LAST_CHUNK],
        "no_tokens",
        "without any text",
    ),
    "an endless stream": (
        [CHUNKED, *([chunk(delta("a") * 50)] * 21), HOLD],
        "protocol",
        "over 1024 text deltas: this answer has no end",
    ),
    "an endless stream, a token at a time": ([CHUNKED, *([chunk(delta("a"))] * 1025), HOLD], "protocol", "over 1024"),
    "an error in a deep object": ([CHUNKED + chunk(b'data: {"error":' + deep(900) + b"}\n\n")], "server", "[[["),
    "JSON too deep to read": (
        [CHUNKED + chunk(b'data: {"error":' + deep(20000) + b"}\n\n")],
        "protocol",
        "expected a JSON object",
    ),
    "tokens that usage invents": (
        [CHUNKED + chunk(delta(finish="stop") + usage(3, 7) + DONE) + LAST_CHUNK],
        "no_tokens",
        "7 tokens",
    ),
}


@pytest.mark.parametrize("kind", KINDS)
def test_an_answer_that_is_none_fails_its_request_alone(kind: str, tmp_path: Path) -> None:
    """The request before and the one after it succeed."""
    steps, error_class, says = KINDS[kind]

    def answer(request: Request) -> list[Step]:
        return steps if request.number == 1 else [whole_stream()]

    reads = ClientReads()
    with reads.patched(), FakeServer(answer, reads=reads) as server:
        result = load(server, tmp_path, "--requests", 3, "--max-tokens", 5)
    assert result.code == 0 and result.err == ""
    before, bad, after = result.requests
    assert before["ok"] and after["ok"]
    assert not bad["ok"] and bad["error_class"] == error_class, bad["error"]
    assert says in bad["error"] and bad["error"].startswith(error_class), bad["error"]
    assert bad["error"].isprintable() and len(bad["error"]) <= 400
    (level,) = result.levels
    assert level["errors"] == {error_class: 1} and level["first_error"] == bad["error"]
    assert (level["completed"], level["failed"]) == (2, 1) and level["output_tokens"] == 6
    assert f"         first error: {bad['error']}" in result.out.splitlines()


@pytest.mark.parametrize(
    "steps",
    [
        [CHUNKED, chunk(delta("a")), chunk(DONE)],  # https://github.com/jundot/omlx/issues/1267: no last chunk
        [CHUNKED, chunk(delta("a") + DONE), RESET],
        [TO_CLOSE, delta("a", finish="stop")],
        [TO_CLOSE, delta("a") + b"data: [DONE]"],
        [b"HTTP/1.0 200 OK\nContent-type: text/event-stream\n\n" + delta("a") + DONE],
        [b"HTTP/1.1 200 OK\r\n\r\n" + delta("a") + DONE],
        [CHUNKED + chunk(delta("a") + DONE) + b"trailing garbage"],
        [whole_stream(1) + b"HTTP/1.1 408 Request Timeout\r\n\r\n"],
        [*(bytes([byte]) for byte in whole_stream(1))],
        [TO_CLOSE + delta("a" * 300000), delta(finish="stop") + DONE],
        [b"HTTP/1.1 100 Continue\r\n\r\n", 0.01, whole_stream(1)],
    ],
    ids=lambda steps: repr(steps[0])[:30],
)
def test_an_answer_that_is_fine_though_unusual(steps: list[Step], tmp_path: Path) -> None:
    with FakeServer(steps) as server:
        result = load(server, tmp_path, "--requests", 2)
    assert result.code == 0 and [raw["error"] for raw in result.requests] == [None, None]


def test_a_large_prompt_is_sent_whole(tmp_path: Path) -> None:
    """More than a send buffer holds, to a server that reads it late."""
    prompts = tmp_path / "long.txt"
    prompts.write_text("long " * 1_000_000, "utf-8")
    with FakeServer([whole_stream()]) as server:
        result = load(server, tmp_path, "--prompts", prompts, "--requests", 2)
    assert result.code == 0 and len(server.chats[0].body) > 5_000_000


def test_an_answer_before_the_prompt_was_read_whole(tmp_path: Path) -> None:
    """As a proxy answers that takes no body of such a length; it then closes with unread bytes, which resets."""
    prompts = tmp_path / "long.txt"
    prompts.write_text("long " * 2_000_000, "utf-8")
    reads = ClientReads()
    steps: list[Step] = [plain("413 Too Large", "too large"), READ]
    with reads.patched(), FakeServer(steps, reads_bodies=False, reads=reads) as server:
        result = load(server, tmp_path, "--prompts", prompts)
    (raw,) = result.requests
    assert result.code == 1 and raw["error_class"] == "http" and "too large" in raw["error"]


@pytest.mark.parametrize("depth", [50, 500, 900, 20000])
@pytest.mark.parametrize(
    "fields", [b'"usage":{"completion_tokens":1,"x":@}', b'"timings":{"cache_n":1,"x":@}', b'"logprobs":@']
)
def test_no_depth_of_a_servers_json_loses_a_level(depth: int, fields: bytes, tmp_path: Path) -> None:
    odd = b'data: {"choices":[{"delta":{"content":"b"}}],' + fields.replace(b"@", deep(depth)) + b"}\n\n"
    with FakeServer([CHUNKED + chunk(delta("a") + odd + odd + delta(finish="stop") + DONE) + LAST_CHUNK]) as server:
        result = load(server, tmp_path, "--requests", 2)
        probed = load(server, tmp_path, "--probe")
    (level,) = result.levels
    assert level["completed"] + level["failed"] == len(result.requests) == 2
    assert set(level["errors"]) <= {"protocol"} and (depth > 500 or level["completed"] == 2)
    assert "Traceback" not in result.said + probed.said


def test_an_endless_warm_up_comes_to_an_end(tmp_path: Path) -> None:
    with FakeServer([CHUNKED, *([chunk(delta("a") * 50)] * 21), HOLD]) as server:
        result = load(server, tmp_path, "--warmup", 1, "--max-tokens", 5)
    assert "1 of 1 warm-up requests failed, the first with: protocol: over 1024" in result.err
    assert result.code == 1 and result.requests[0]["error_class"] == "protocol"


def test_an_answer_of_eight_deltas_a_token_has_an_end(tmp_path: Path) -> None:
    """As a proxy sends that passes text on letter by letter."""
    letters = CHUNKED + chunk(delta("a") * 1600 + delta(finish="length") + usage(3, 200) + DONE) + LAST_CHUNK
    with FakeServer([letters]) as server:
        result = load(server, tmp_path, "--max-tokens", 200)
    assert result.code == 0 and result.levels[0]["output_tokens"] == 200


def test_figures_that_no_server_can_mean_are_not_believed(tmp_path: Path) -> None:
    odd = usage(10**9 + 1, 10**12, prompt_tokens_details={"cached_tokens": 2**53})
    with FakeServer([CHUNKED + chunk(delta("a", finish="z" * 500000) + odd + DONE) + LAST_CHUNK]) as server:
        result = load(server, tmp_path)
    (raw,) = result.requests
    assert (raw["output_tokens"], raw["token_source"]) == (1, "deltas")
    assert raw["prompt_tokens"] is None and raw["cached_tokens"] is None
    assert raw["finish"][:60] == "z" * 60 and result.levels[0]["finish_reasons"] == {raw["finish"]: 1}
    assert len(raw["finish"]) <= 64
