"""What people reported of load generators, their servers and what stands between: each tried against the program.

A table of cases: the report's address, what the server sends, and the right outcome. These addresses stand in none of
the other tables (`data/wire_cases.json`, the tests named after faults).
"""

from __future__ import annotations

import gzip
from pathlib import Path
from typing import Any

import pytest
from fake_server import (
    CHUNKED,
    DONE,
    LAST_CHUNK,
    STREAM_HEAD,
    TO_CLOSE,
    FakeServer,
    Step,
    chunk,
    compact,
    delta,
    event,
    json_answer,
    load,
    usage,
)

GITHUB = "https://github.com/"


def stream(*events: bytes) -> list[Step]:
    """A whole chunked response, an event a chunk."""
    return [CHUNKED + b"".join(map(chunk, events)) + LAST_CHUNK]


def choice(finish: Any = None, **fields: Any) -> dict[str, Any]:
    return {"index": 0, "finish_reason": finish, **fields}


def text(words: str, finish: Any = None) -> dict[str, Any]:
    return choice(finish, delta={"content": words})


MOONSHOT = {"prompt_tokens": 1336, "completion_tokens": 31, "prompt_tokens_details": {"cached_tokens": 1280}}
FILTERED = {"content_filter_results": {"hate": {"filtered": False, "severity": "safe"}}}
TIMED_OUT = {"message": "upstream timed out", "code": 504}
UNKNOWN_FIELD = {"type": "missing", "loc": ["body", "max_tokens"], "msg": "Field required"}
PROGRESS = event({"choices": [text("")], "prompt_progress": {"total": 237, "cache": 0, "processed": 128}})

# address: what is sent, the class of the failure (None: a success), what the request's record or its error holds
REPORTS: dict[str, tuple[list[Step], str | None, Any]] = {
    # an empty finish_reason in every chunk is none: the answer goes on, and a stream that breaks off there is cut
    "ollama/ollama/issues/4357": (
        stream(*(event({"choices": [text(word, "")]}) for word in "abc"), delta(finish="stop"), usage(5, 3), DONE),
        None,
        {"output_tokens": 3, "finish": "stop", "output_chars": 3},
    ),
    "sgl-project/sglang/issues/3912": (
        [TO_CLOSE + event({"choices": [text("a", "")]}) + event({"choices": [text("b", "")]})],
        "truncated",
        "before a finish_reason",
    ),
    # KoboldCpp: the word "null" for null
    "PowerShell/AIShell/issues/350": (
        [TO_CLOSE + event({"choices": [text("a", "null")]}) + event({"choices": [text("b", "null")]})],
        "truncated",
        "before a finish_reason",
    ),
    # Moonshot: usage inside the choice
    "AstrBotDevs/AstrBot/issues/6614": (
        stream(delta("a"), delta("b"), event({"choices": [choice("stop", delta={}, usage=MOONSHOT)]}), DONE),
        None,
        {"output_tokens": 31, "token_source": "usage", "prompt_tokens": 1336, "cached_tokens": 1280},
    ),
    # Azure: a first chunk without choices, a last one whose choice has no delta
    "microsoft/autogen/issues/6465": (
        stream(
            event({"choices": [], "model": "", "prompt_filter_results": [FILTERED]}),
            delta("a", finish="stop"),
            event({"id": "", "choices": [choice(content_filter_offsets={"check_offset": 9}, **FILTERED)]}),
            usage(5, 1),
            DONE,
        ),
        None,
        {"output_tokens": 1, "finish": "stop", "deltas": 1},
    ),
    # usage that adds up in every chunk, with chunks that have none between and after
    "pydantic/pydantic-ai/issues/7913": (
        stream(
            event({"choices": [text("a")], "usage": {"prompt_tokens": 10, "completion_tokens": 1}}),
            event({"choices": [text("b")], "usage": None}),
            event({"choices": [text("c")], "usage": {"prompt_tokens": 10, "completion_tokens": 5}}),
            event({"choices": [choice("stop", delta={})], "usage": None}),
            DONE,
        ),
        None,
        {"output_tokens": 5, "prompt_tokens": 10, "token_source": "usage"},
    ),
    # an `object` of null
    "ai-dynamo/aiperf/issues/1010": (
        stream(delta("a"), event({"object": None, "choices": [choice("stop", delta={})]}), usage(5, 1), DONE),
        None,
        {"output_tokens": 1, "finish": "stop"},
    ),
    # Perplexity: the whole message so far beside each delta
    "perplexityai/api-discussion/issues/193": (
        stream(
            event({"object": "chat.completion", "choices": [{**text("ab"), "message": {"content": "ab"}}]}),
            event({"object": "chat.completion", "choices": [{**text("c", "stop"), "message": {"content": "abc"}}]}),
            usage(5, 2),
            DONE,
        ),
        None,
        {"output_tokens": 2, "output_chars": 3, "deltas": 2},
    ),
    # two objects in one event: no half of it may be counted as the whole
    "openai/openai-python/issues/663": (
        stream(b"data: " + 2 * compact({"choices": [text("a")]}) + b"\n\n", delta(finish="stop"), DONE),
        "protocol",
        "choices",
    ),
    # the llama.cpp server's progress of a prompt is no token
    "ggml-org/llama.cpp/pull/15827": (
        stream(PROGRESS, PROGRESS, delta("a"), delta(finish="stop"), usage(237, 1), DONE),
        None,
        {"output_tokens": 1, "deltas": 1},
    ),
    "sgl-project/genai-bench/pull/170": (stream(PROGRESS, delta(finish="stop"), usage(237, 1), DONE), "no_tokens", ""),
    # a server that tells no cached count: unknown, not none
    "lmstudio-ai/lmstudio-bug-tracker/issues/2390": (
        stream(delta("a"), delta(finish="stop"), usage(17433, 1, total_tokens=17434), DONE),
        None,
        {"prompt_tokens": 17433, "cached_tokens": None},
    ),
    # errors inside a 200, in four more dialects
    "huggingface/text-generation-inference/pull/2668": (
        stream(delta("a"), event({"error": "Request failed during generation", "error_type": "generation"})),
        "server",
        "Request failed during generation",
    ),
    "zendev-sh/goai/pull/110": (
        stream(delta("a"), event({"error": {"message": "Compute error."}, "message": "Compute error."}), DONE),
        "server",
        "Compute error.",
    ),
    "foundation-model-stack/fms-guardrails-orchestrator/pull/436": (
        stream(b"event: error\n" + event({"code": 400, "details": "Requested sample logprobs of 21"}), DONE),
        "server",
        "Requested sample logprobs of 21",
    ),
    "envoyproxy/ai-gateway/issues/2697": (
        stream(b"event: error\n" + event({"type": "error", "error": {"type": "overloaded_error", "message": "Busy"}})),
        "server",
        "overloaded_error: Busy",
    ),
    # the error's words inside the choice; a reason that says it was broken off
    "genkit-ai/genkit/pull/6259": (
        stream(delta("a"), event({"choices": [choice("error", delta={}, error=TIMED_OUT)]}), usage(5, 1), DONE),
        "server",
        "upstream timed out",
    ),
    "NousResearch/hermes-agent/pull/92161": (
        stream(delta("a"), delta(finish="network_error"), usage(5, 1), DONE),
        "server",
        "network_error",
    ),
    # refusals whose reason is a list, or lies beside the status
    "jundot/omlx/pull/3017": (
        [json_answer({"detail": [UNKNOWN_FIELD]}, "422 Unprocessable Entity")],
        "http",
        "required",
    ),
    "sgl-project/sglang/issues/12100": (
        [json_answer({"object": "error", "message": "Input too long", "type": "BadRequestError"}, "400 Bad Request")],
        "http",
        "Input too long",
    ),
    # compressed although nobody asked for it: said to be, or at least not counted
    "btubbs/sseclient/issues/27": (
        [STREAM_HEAD + b"Content-Encoding: gzip\r\nConnection: close\r\n\r\n" + gzip.compress(delta("a") + DONE)],
        "protocol",
        "gzip",
    ),
    "Wei-Shaw/claude-relay-service/pull/1039": (
        [TO_CLOSE + gzip.compress(delta("a", finish="stop") + usage(5, 1) + DONE)],
        "truncated",
        "",
    ),
    # usage came, and neither a finish_reason nor [DONE]
    "earendil-works/pi/pull/7441": ([TO_CLOSE + delta("a") + usage(10, 5)], "truncated", "before a finish_reason"),
}


@pytest.mark.parametrize("address", REPORTS)
def test_a_report(address: str, tmp_path: Path) -> None:
    steps, error_class, right = REPORTS[address]
    with FakeServer(steps) as server:
        result = load(server, tmp_path)
    (record,) = result.requests
    assert "Traceback" not in result.said
    assert (record["ok"], record["error_class"]) == (error_class is None, error_class), GITHUB + address
    if error_class is None:
        assert {name: record[name] for name in right} == right, GITHUB + address
    else:
        assert right in record["error"], GITHUB + address


def test_a_count_of_hidden_tokens_that_were_streamed_all_the_same(tmp_path: Path) -> None:
    """https://github.com/sgl-project/sglang/pull/34634: a plain answer, four of its five tokens called reasoning. Five
    deltas came, so that the time per token is over four gaps (or unknown), never over what is left of one token."""
    details = {"completion_tokens_details": {"reasoning_tokens": 4}, "reasoning_tokens": 4}
    pieces: list[Step] = [piece for word in "abcde" for piece in (chunk(delta(word)), 0.002)]
    with FakeServer(
        [CHUNKED, *pieces, chunk(delta(finish="stop") + usage(5, 5, **details) + DONE), LAST_CHUNK]
    ) as server:
        (record,) = load(server, tmp_path).requests
    assert record["ok"] and record["output_tokens"] == 5
    if record["tpot_s"] is not None:
        assert record["tpot_s"] == pytest.approx((record["last_token_s"] - record["ttft_s"]) / 4, rel=1e-3)


def test_no_compression_is_asked_for(tmp_path: Path) -> None:
    """https://github.com/editor-code-assistant/eca/pull/479: a compressed stream comes in blocks, not in tokens."""
    with FakeServer(stream(delta("a", finish="stop"), usage(5, 1), DONE)) as server:
        load(server, tmp_path)
        assert server.requests[0].headers.get("accept-encoding", "identity") == "identity"


def test_no_proxy_of_the_environment_stands_between(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """https://github.com/vllm-project/vllm/pull/22058: a proxy may hold a stream's chunks back; none is used."""
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    with FakeServer(stream(delta("a", finish="stop"), usage(5, 1), DONE)) as server:
        (record,) = load(server, tmp_path).requests
    assert record["ok"]
