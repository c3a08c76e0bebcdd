"""The simulated engine: its model on a fake clock, its wire format and endpoints over sockets, its faults, its log."""

from __future__ import annotations

import contextlib
import http.client
import importlib.util
import json
import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Callable

import pytest
from conftest import ROOT, RunProgram, SimEngine, SimEngineFactory
from hypothesis import given, settings
from hypothesis import strategies as st


def load_program() -> Any:
    """The program as a module; it lies in a folder that is no package."""
    spec = importlib.util.spec_from_file_location("simulated_engine", ROOT / "scripts" / "simulated_engine.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up there
    spec.loader.exec_module(module)
    return module


sim = load_program()

# ------------------------------------------------------------------------------------------------------------
# The model, on a clock that the test moves
# ------------------------------------------------------------------------------------------------------------

TOKENS_8 = b"12345678" * 4  # 8 tokens of 4 bytes


class Bench:
    """A batch engine on a fake clock, and for each job the times of its tokens."""

    def __init__(self, **options: Any) -> None:
        self.options = sim.Options(**options)
        self.now = 0.0
        self.engine = sim.BatchEngine(self.options, sim.make_cache(self.options), lambda: self.now)
        self.jobs: dict[int, Any] = {}
        self.tokens: dict[int, list[float]] = {}  # due times
        self.ends: dict[int, tuple[float, str]] = {}

    def submit(self, id: int, tokens: int = 5, prompt: bytes = TOKENS_8, ending: str = "length") -> Any:
        job = sim.Job(id, prompt, sim.count_tokens(prompt), self.now, tokens, ending)
        self.jobs[id], self.tokens[id] = job, []
        job.on_token = lambda made: self.tokens[id].append(self.now)
        job.on_end = lambda reason: self.ends.__setitem__(id, (self.now, reason))
        self.engine.submit(job)
        return job

    def run(self, until: float = float("inf"), late_s: float = 0.0) -> None:
        """Let every event up to `until` happen; each is handled `late_s` after it was due."""
        while True:
            due = self.engine.due()
            if due is None or due > until:
                break
            self.now = max(self.now, due + late_s)
            self.engine.advance()
        if until != float("inf"):
            self.now = max(self.now, until)


def test_first_token_comes_after_prefill_and_one_step_and_the_rest_every_step() -> None:
    bench = Bench(a_ms=20, b_ms=1.5, prefill_tok_s=100, cache="none")
    bench.submit(1, tokens=3)
    bench.run()
    assert bench.tokens[1] == pytest.approx([0.08 + 0.0215, 0.08 + 0.043, 0.08 + 0.0645])
    assert bench.ends[1][1] == "length"


def test_c_sequences_share_a_step_of_a_plus_b_c() -> None:
    """The worked example: a = 20 ms, b = 1.5 ms give 46.5, 181.8, 285.7 and 400.0 tokens/s at 1, 5, 10 and 20."""
    for c, expected in ((1, 46.5), (5, 181.8), (10, 285.7), (20, 400.0)):
        bench = Bench(a_ms=20, b_ms=1.5, slots=20, cache="none")
        for id in range(c):
            bench.submit(id, tokens=11)
        bench.run()
        first, last = bench.tokens[0][0], bench.tokens[0][-1]
        assert c * 10 / (last - first) == pytest.approx(expected, abs=0.05)
        assert bench.jobs[0].batch == [c] * 11


def test_a_request_joins_at_the_next_step_and_delays_nobody_before() -> None:
    bench = Bench(a_ms=10, b_ms=10, prefill_tok_s=8000, cache="none")  # a prefill takes 1 ms
    bench.submit(1, tokens=4)
    bench.run(until=0.025)  # the first step ended at 21 ms
    bench.submit(2, tokens=1)
    bench.run()
    assert bench.tokens[1] == pytest.approx([0.021, 0.041, 0.071, 0.091])
    assert bench.tokens[2] == pytest.approx([0.071])
    assert bench.jobs[1].batch == [1, 1, 2, 1]


def test_steps_do_not_drift_when_the_program_wakes_up_late() -> None:
    bench = Bench(a_ms=20, b_ms=0, prefill_tok_s=8000, cache="none")
    bench.submit(1, tokens=500)
    bench.run(late_s=0.003)
    assert bench.tokens[1][-1] == pytest.approx(0.001 + 500 * 0.020 + 0.003)
    assert bench.jobs[1].late_s == pytest.approx(0.003)


def test_a_blocking_prefill_stops_the_decodes_and_a_chunked_one_does_not() -> None:
    gaps = {}
    for blocks in (False, True):
        bench = Bench(a_ms=10, b_ms=0, prefill_tok_s=80, prefill_blocks=blocks, cache="none")  # 100 ms a prefill
        bench.submit(1, tokens=30)
        bench.run(until=0.155)
        bench.submit(2, tokens=2)
        bench.run()
        gaps[blocks] = max(b - a for a, b in zip(bench.tokens[1], bench.tokens[1][1:]))
        assert bench.jobs[2].ready_at == pytest.approx(0.26 if blocks else 0.255)
    assert gaps[False] == pytest.approx(0.010)
    assert gaps[True] == pytest.approx(0.110)


def test_past_saturation_throughput_falls_and_preemptions_are_counted() -> None:
    for c in range(8, 30):
        plain, saturated = sim.Options(), sim.Options(saturate_at=8, saturate_factor=1.0)
        assert (c + 1) / plain.step_s(c + 1) > c / plain.step_s(c)
        assert (c + 1) / saturated.step_s(c + 1) < c / saturated.step_s(c)
    bench = Bench(saturate_at=3, slots=5, cache="none")
    for id in range(5):
        bench.submit(id)
    bench.run()
    assert bench.engine.counters.preemptions == 2


def test_peak_is_the_most_slots_busy_while_the_request_had_its_own() -> None:
    bench = Bench(slots=3, a_ms=10, b_ms=0, prefill_tok_s=8000, cache="none")
    bench.submit(1, tokens=2)
    bench.run(until=0.015)
    bench.submit(2, tokens=9)
    bench.run(until=0.045)  # the first has ended
    bench.submit(3, tokens=1)
    bench.run()
    assert [job.peak for job in bench.jobs.values()] == [2, 2, 2]
    for id in range(4, 7):
        bench.submit(id)
    bench.run()
    assert [bench.jobs[id].peak for id in (4, 5, 6)] == [3, 3, 3]


def test_a_cancelled_request_gives_its_slot_to_the_next_at_once() -> None:
    bench = Bench(slots=1, a_ms=20, b_ms=0, prefill_tok_s=8000, cache="none")
    first = bench.submit(1, tokens=1000)
    bench.submit(2, tokens=1)
    third = bench.submit(3, tokens=1)
    bench.run(until=0.1)
    bench.engine.cancel(third)
    bench.engine.cancel(first)
    assert bench.jobs[2].admitted == 0.1
    bench.run()
    assert len(bench.tokens[1]) == 4 and len(bench.tokens[2]) == 1 and not bench.tokens[3]
    assert not bench.engine.running and not bench.engine.waiting


@settings(max_examples=60, deadline=None)
@given(
    slots=st.integers(1, 4),
    blocks=st.booleans(),
    plan=st.lists(st.tuples(st.integers(0, 60), st.integers(1, 6), st.integers(1, 60), st.booleans()), max_size=12),
)
def test_whatever_comes_slots_hold_order_holds_and_steps_last_what_they_should(
    slots: int, blocks: bool, plan: list[tuple[int, int, int, bool]]
) -> None:
    bench = Bench(slots=slots, prefill_blocks=blocks, a_ms=7, b_ms=3, prefill_tok_s=2000, cache="none")
    for id, (wait_ms, tokens, prompt_tokens, leaves) in enumerate(plan):
        bench.run(until=bench.now + wait_ms / 1e3)
        job = bench.submit(id, tokens, b"abcd" * prompt_tokens)
        assert len(bench.engine.running) <= slots
        if leaves:
            bench.engine.cancel(job)
    bench.run()
    stayed = [bench.jobs[id] for id, (*_, leaves) in enumerate(plan) if not leaves]
    admitted = [job.admitted for job in stayed]
    assert admitted == sorted(admitted), "first come, first served"
    for job in stayed:
        times = bench.tokens[job.id]
        assert len(times) == job.limit == job.made
        assert job.peak <= slots
        assert job.ready_at >= job.admitted + job.prompt_tokens / 2000 - 1e-9
        assert times[0] >= job.ready_at + bench.options.step_s(job.batch[0]) - 1e-9
        for gap, size in zip([b - a for a, b in zip(times, times[1:])], job.batch[1:]):
            assert gap == pytest.approx(bench.options.step_s(size)) or (blocks and gap > bench.options.step_s(size))
    spans = sorted((job.admitted, bench.ends[job.id][0]) for job in stayed)
    for start, _ in spans:
        assert sum(begin <= start < end for begin, end in spans) <= slots


# ------------------------------------------------------------------------------------------------------------
# Prefix caches
# ------------------------------------------------------------------------------------------------------------

SHARED = b"p" * 400  # 100 tokens


def run_prompts(bench: Bench, prompts: Sequence[bytes]) -> list[tuple[int, int]]:
    """Slot and cached tokens of each prompt, sent one after the other."""
    for id, prompt in enumerate(prompts):
        bench.submit(id, 1, prompt)
        bench.run()
    return [(job.slot, job.cached) for job in bench.jobs.values()]


def test_slot_cache_prefers_the_most_similar_slot_above_ten_percent_else_the_oldest() -> None:
    short = SHARED[:40]  # 10 tokens of the 110: not above 10 %
    placed = run_prompts(
        Bench(slots=3, cache="slot"),
        [SHARED, short + b"x" * 400, b"z" * 400, SHARED + b"q", b"y" * 400, SHARED],
    )
    # never used slots first, the last one before; then the similar one; then the least recently used
    assert placed == [(2, 0), (1, 0), (0, 0), (2, 100), (1, 0), (2, 99)]


def test_slot_cache_computes_at_least_one_token_and_a_cold_slot_reuses_nothing() -> None:
    bench = Bench(slots=2, cache="slot")
    bench.submit(1, 3, SHARED)
    bench.submit(2, 3, SHARED)  # the other slot never saw it
    bench.run()
    assert [bench.jobs[1].cached, bench.jobs[2].cached] == [0, 0]
    bench.submit(3, 1, SHARED)
    assert bench.jobs[3].cached == 99


def test_pool_cache_shares_full_blocks_between_slots() -> None:
    placed = run_prompts(Bench(slots=4, cache="pool"), [SHARED, SHARED + b"q" * 100, b"z" + SHARED[1:], SHARED[:384]])
    # 100 tokens are 6 full blocks of 16; of 96 tokens the last must be computed, so 5 blocks count
    assert [cached for _, cached in placed] == [0, 96, 0, 80]


def test_pool_cache_lends_a_block_only_once_it_is_computed() -> None:
    bench = Bench(slots=2, cache="pool", prefill_tok_s=100, a_ms=1, b_ms=0)
    bench.submit(1, 1, SHARED)
    bench.submit(2, 1, SHARED + b"q" * 4)
    bench.run()
    assert bench.jobs[2].cached == 96
    assert bench.jobs[2].ready_at == bench.jobs[1].ready_at == pytest.approx(1.0)


def test_pool_cache_forgets_the_oldest_blocks_when_it_is_full() -> None:
    bench = Bench(slots=1, context=160, cache="pool")  # 10 blocks
    placed = run_prompts(bench, [b"a" * 512, b"b" * 512, b"b" * 512, b"a" * 512])
    assert [cached for _, cached in placed] == [0, 0, 112, 0]


def test_no_cache_reuses_nothing() -> None:
    assert run_prompts(Bench(cache="none"), [SHARED, SHARED]) == [(0, 0), (0, 0)]


@given(st.binary(max_size=60), st.binary(max_size=40), st.binary(max_size=40))
def test_byte_identical_beginnings_are_token_identical(shared: bytes, one: bytes, other: bytes) -> None:
    tokens = sim.common_tokens(shared + one, shared + other)
    assert tokens >= len(shared) // 4
    assert tokens <= min(sim.count_tokens(shared + one), sim.count_tokens(shared + other))
    assert (shared + one)[: tokens * 4] == (shared + other)[: tokens * 4]


# ------------------------------------------------------------------------------------------------------------
# The request reader
# ------------------------------------------------------------------------------------------------------------

TWO_REQUESTS = (
    b"POST /v1/chat/completions?x=1 HTTP/1.1\r\nHost: h\r\nContent-Length: 4\r\nX-Two:  b \r\n\r\n{}\r\n"
    b"GET /health HTTP/1.0\r\nConnection: Keep-Alive\r\n\r\n"
)


@given(st.lists(st.integers(0, len(TWO_REQUESTS)), max_size=8))
def test_requests_are_the_same_however_their_bytes_were_cut(cuts: list[int]) -> None:
    reader, requests = sim.RequestReader(), []
    edges = [0, *sorted(cuts), len(TWO_REQUESTS)]
    for start, end in zip(edges, edges[1:]):
        reader.feed(TWO_REQUESTS[start:end])
        while True:
            request = reader.next_request()
            if request is None:
                break
            requests.append(request)
    assert [(r.method, r.path, r.body, r.keep_alive, r.chunked) for r in requests] == [
        ("POST", "/v1/chat/completions", b"{}\r\n", True, True),
        ("GET", "/health", b"", True, False),
    ]
    assert requests[0].headers["x-two"] == "b"


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (b"hello\r\n\r\n", 400),
        (b"GET / HTTP/2\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nno colon\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nA : b\r\n\r\n", 400),
        (b"POST / HTTP/1.1\r\nContent-Length: -1\r\n\r\n", 400),
        (b"POST / HTTP/1.1\r\nContent-Length: 1e3\r\n\r\n", 400),
        (b"POST / HTTP/1.1\r\nContent-Length: " + b"9" * 5000 + b"\r\n\r\n", 413),
        (b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n", 411),
        (b"GET / HTTP/1.1\r\nA: " + b"a" * 70000, 431),
    ],
)
def test_what_is_no_request_is_refused_with_its_status(data: bytes, status: int) -> None:
    reader = sim.RequestReader()
    reader.feed(data)
    with pytest.raises(sim.ProtocolError) as caught:
        reader.next_request()
    assert caught.value.status == status


# ------------------------------------------------------------------------------------------------------------
# Over sockets
# ------------------------------------------------------------------------------------------------------------

FAST = ("--a-ms", 2, "--b-ms", 0.1, "--prefill-tok-s", 100000)
ENDLESS = ("--a-ms", 20, "--b-ms", 0, "--context", 1_000_000)  # 10,000 tokens take 200 s, longer than any test


def chat(content: str = "hello", **fields: Any) -> dict[str, Any]:
    body = {"model": "sim-chat", "messages": [{"role": "user", "content": content}], "max_tokens": 5}
    return {**body, **fields}


def streamed(content: str = "hello", **fields: Any) -> dict[str, Any]:
    return chat(content, stream=True, stream_options={"include_usage": True}, **fields)


class Reply:
    """A whole response, read by the standard library's client."""

    def __init__(self, response: http.client.HTTPResponse) -> None:
        self.status = response.status
        self.headers = response.headers
        self.body = response.read()

    def json(self) -> Any:
        return json.loads(self.body)

    def events(self) -> list[Any]:
        """The events of a stream; the end marker as None."""
        assert self.body.endswith(b"\n\n")
        lines = [line for line in self.body.split(b"\n\n") if line and not line.startswith(b":")]
        assert all(line.startswith(b"data: ") for line in lines)
        return [None if line == b"data: [DONE]" else json.loads(line[6:]) for line in lines]

    def texts(self, field: str = "content") -> list[str]:
        choices = [event["choices"][0] for event in self.events() if event and event.get("choices")]
        return [choice["delta"][field] for choice in choices if choice["delta"].get(field)]


@contextlib.contextmanager
def client(engine: SimEngine) -> Iterator[http.client.HTTPConnection]:
    connection = http.client.HTTPConnection("127.0.0.1", engine.port, timeout=60)
    try:
        yield connection
    finally:
        connection.close()


def ask(engine: SimEngine, path: str, document: Any = None, **headers: str) -> Reply:
    """One request on its own connection: GET, or POST where there is a document (bytes are sent as they are)."""
    body = document if isinstance(document, bytes) or document is None else json.dumps(document).encode()
    with client(engine) as connection:
        connection.request("GET" if body is None else "POST", path, body, headers)
        return Reply(connection.getresponse())


def complete(engine: SimEngine, document: dict[str, Any]) -> Reply:
    return ask(engine, "/v1/chat/completions", document)


def raw_request(document: dict[str, Any], version: str = "HTTP/1.1", *headers: str) -> bytes:
    body = json.dumps(document).encode()
    lines = [f"POST /v1/chat/completions {version}", "Host: h", f"Content-Length: {len(body)}", *headers, "", ""]
    return "\r\n".join(lines).encode() + body


def metrics(engine: SimEngine) -> dict[str, float]:
    """The samples of /metrics, each line checked against the Prometheus text format."""
    samples = {}
    for line in ask(engine, "/metrics").body.decode().splitlines():
        if line.startswith("#"):
            assert re.fullmatch(r"# (HELP [a-z:_]+ .+|TYPE [a-z:_]+ (counter|gauge|histogram))", line)
            continue
        match = re.fullmatch(r'([a-z:_]+(?:\{[a-z_]+="[^"]*"(?:,[a-z_]+="[^"]*")*\})?) (\S+)', line)
        assert match is not None, line
        samples[match.group(1)] = float(match.group(2))
    return samples


def wait_until(condition: Callable[[], bool]) -> None:
    """Ask again until it is so; the suite's own time limit ends a test in which it never is."""
    while not condition():
        time.sleep(0.005)


def log_after_stop(engine: SimEngine) -> list[dict[str, Any]]:
    assert engine.stop() == 0
    assert engine.stderr() == ""
    return sorted(engine.read_log(), key=lambda record: int(record["id"]))


def busy_and_waiting(engine: SimEngine) -> tuple[float, float]:
    samples = metrics(engine)
    return samples["llamacpp:requests_processing"], samples["llamacpp:requests_deferred"]


@contextlib.contextmanager
def open_stream(engine: SimEngine, document: dict[str, Any]) -> Iterator[socket.socket]:
    """A request under way; nothing of its answer is read yet."""
    with socket.create_connection(("127.0.0.1", engine.port), timeout=60) as sock:
        sock.sendall(raw_request(document))
        yield sock


def read_until(sock: socket.socket, marker: bytes, times: int = 1) -> bytes:
    data = b""
    while data.count(marker) < times:
        piece = sock.recv(65536)
        assert piece, f"closed before {marker!r}: {data[-300:]!r}"
        data += piece
    return data


def read_to_end(sock: socket.socket) -> bytes:
    data = b""
    while True:
        piece = sock.recv(65536)
        if not piece:
            return data
        data += piece


# --- what the two servers write -------------------------------------------------------------------------------


def test_llama_stream_has_role_text_finish_usage_and_timings(sim_engine: SimEngineFactory) -> None:
    reply = complete(sim_engine(*FAST), streamed(max_tokens=4))
    assert reply.headers["content-type"] == "text/event-stream"
    assert reply.headers["transfer-encoding"] == "chunked"
    events = reply.events()
    assert [list(event or ()) for event in events[:2]] == [
        ["choices", "created", "id", "model", "system_fingerprint", "object"]
    ] * 2
    deltas = [event["choices"][0]["delta"] for event in events[:6]]
    assert deltas[0] == {"role": "assistant", "content": None}
    assert all(list(delta) == ["content"] and delta["content"] for delta in deltas[1:5])
    assert deltas[5] == {}
    finishes = [event["choices"][0]["finish_reason"] for event in events[:6]]
    assert finishes == [None] * 5 + ["length"]
    usage = events[6]
    assert usage["choices"] == []
    tokens = sim.count_tokens(sim.render_prompt(streamed()["messages"], None))
    assert usage["usage"] == {
        "completion_tokens": 4,
        "prompt_tokens": tokens,
        "total_tokens": tokens + 4,
        "prompt_tokens_details": {"cached_tokens": 0},
    }
    timings = usage["timings"]
    assert (timings["cache_n"], timings["prompt_n"], timings["predicted_n"]) == (0, tokens, 4)
    assert timings["prompt_ms"] == pytest.approx(tokens / 100, abs=0.002)
    assert events[7:] == [None]


def test_vllm_stream_puts_the_finish_reason_on_the_last_text(sim_engine: SimEngineFactory) -> None:
    events = complete(sim_engine("--dialect", "vllm", *FAST), streamed(max_tokens=3)).events()
    assert list(events[0]) == ["id", "object", "created", "model", "choices", "prompt_token_ids", "prompt_text"]
    assert events[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    last = events[3]["choices"][0]
    assert list(last) == ["index", "delta", "logprobs", "finish_reason", "stop_reason", "token_ids"]
    assert last["delta"]["content"] and last["finish_reason"] == "length"
    assert events[4]["choices"] == [] and events[4]["usage"]["completion_tokens"] == 3
    assert "timings" not in events[4]
    assert events[5:] == [None]


@pytest.mark.parametrize("dialect", ["llama", "vllm"])
def test_an_answer_that_is_not_streamed_says_the_same(sim_engine: SimEngineFactory, dialect: str) -> None:
    engine = sim_engine("--dialect", dialect, *FAST)
    stream = complete(engine, streamed("one", max_tokens=40))
    document = complete(engine, chat("two", max_tokens=40)).json()
    assert document["object"] == "chat.completion"
    assert document["choices"][0]["message"]["content"] == "".join(stream.texts())
    assert document["choices"][0]["finish_reason"] == "length"
    assert document["usage"]["completion_tokens"] == len(stream.texts()) == 40


def test_without_include_usage_no_usage_is_streamed(sim_engine: SimEngineFactory) -> None:
    for dialect in ("llama", "vllm"):
        reply = complete(sim_engine("--dialect", dialect, *FAST), chat(stream=True))
        assert not [event for event in reply.events() if event and event.get("usage")]


@pytest.mark.parametrize("dialect", ["llama", "vllm"])
def test_usage_and_its_details_can_be_left_out(sim_engine: SimEngineFactory, dialect: str) -> None:
    reply = complete(sim_engine("--dialect", dialect, "--no-usage", *FAST), streamed())
    assert b'"usage"' not in reply.body and len(reply.texts()) == 5
    reply = complete(sim_engine("--dialect", dialect, "--no-prompt-details", *FAST), streamed())
    assert b'"completion_tokens":5' in reply.body and b"prompt_tokens_details" not in reply.body


@pytest.mark.parametrize("field", ["reasoning_content", "reasoning"])
def test_reasoning_comes_first_unless_thinking_is_off(sim_engine: SimEngineFactory, field: str) -> None:
    engine = sim_engine("--reasoning", field, "--reasoning-tokens", 3, *FAST)
    reply = complete(engine, streamed())
    assert (len(reply.texts(field)), len(reply.texts("content"))) == (3, 2)
    short = complete(engine, streamed(max_tokens=2))
    assert (len(short.texts(field)), len(short.texts("content"))) == (2, 0)
    off = complete(engine, streamed(chat_template_kwargs={"enable_thinking": False}))
    assert (len(off.texts(field)), len(off.texts("content"))) == (0, 5)
    whole = complete(engine, chat()).json()["choices"][0]["message"]
    assert whole[field] == "".join(reply.texts(field)) and whole["content"] == "".join(reply.texts("content"))


def test_early_stop_is_repeatable_spread_and_off_with_ignore_eos(sim_engine: SimEngineFactory) -> None:
    engine = sim_engine("--early-stop", 6, "--a-ms", 0.5, "--b-ms", 0, "--prefill-tok-s", 1e6)
    lengths = [len(complete(engine, streamed(f"prompt {k}", max_tokens=5)).texts()) for k in range(30)]
    again = [len(complete(engine, streamed(f"prompt {k}", max_tokens=5)).texts()) for k in range(30)]
    assert lengths == again and set(lengths) == {1, 2, 3, 4, 5}
    finishes = {record["finish"] for record in log_after_stop(engine)}
    assert finishes == {"stop", "length"}
    engine = sim_engine("--early-stop", 1, *FAST)
    assert len(complete(engine, streamed(ignore_eos=True)).texts()) == 5
    assert sim.early_stop_tokens(b"x", 1000, 1) != sim.early_stop_tokens(b"x", 1000, 2)


def test_one_delta_may_hold_several_tokens(sim_engine: SimEngineFactory) -> None:
    engine = sim_engine("--tokens-per-delta", 3, "--reasoning", "reasoning", "--reasoning-tokens", 4, *FAST)
    plain = complete(sim_engine(*FAST), streamed(max_tokens=12))
    reply = complete(engine, streamed(max_tokens=12))
    assert len(reply.texts("reasoning")) == 2 and len(reply.texts("content")) == 3  # 3 + 1, then 3 + 3 + 2
    assert "".join(reply.texts("reasoning") + reply.texts("content")) == "".join(plain.texts())
    assert reply.events()[-2]["usage"]["completion_tokens"] == 12
    assert len(log_after_stop(engine)[0]["sends"]) == 5


@pytest.mark.parametrize("options", [("--deltas-per-write", 4), ("--coalesce-ms", 100_000)])
def test_held_deltas_leave_together_and_none_is_lost(sim_engine: SimEngineFactory, options: tuple[Any, ...]) -> None:
    engine = sim_engine(*options, *FAST)
    assert (
        complete(engine, streamed(max_tokens=10)).texts()
        == complete(sim_engine(*FAST), streamed(max_tokens=10)).texts()
    )
    sends = log_after_stop(engine)[0]["sends"]
    assert len(sends) == 10
    assert [sends.count(stamp) for stamp in dict.fromkeys(sends)] == ([4, 4, 2] if options[1] == 4 else [10])


@pytest.mark.parametrize("dialect", ["llama", "vllm"])
def test_the_null_server_answers_in_full_at_once(sim_engine: SimEngineFactory, dialect: str) -> None:
    engine = sim_engine("--null", "--dialect", dialect, "--context", 100_000)
    for tokens in (1, 2, 3, 500, 20_000, 500):  # 20,000 deltas are far more than a socket takes at once
        reply = complete(engine, streamed(max_tokens=tokens))
        assert len(reply.texts()) == tokens and reply.events()[-1] is None
        assert reply.events()[-2]["usage"]["completion_tokens"] == tokens
    assert complete(engine, chat(max_tokens=7)).json()["usage"]["completion_tokens"] == 7
    assert all(len(set(record["sends"])) == 1 for record in log_after_stop(engine))


# --- endpoints ------------------------------------------------------------------------------------------------


def test_llama_endpoints(sim_engine: SimEngineFactory) -> None:
    engine = sim_engine("--slots", 3, "--context", 2048, "--model", "tiny", *FAST)
    assert ask(engine, "/health").json() == {"status": "ok"}
    (model,) = ask(engine, "/v1/models").json()["data"]
    assert (model["id"], model["meta"]["n_ctx"], model["meta"]["n_ctx_train"]) == ("tiny", 2048, 40960)
    slots = ask(engine, "/slots?x=1").json()
    assert [(slot["id"], slot["n_ctx"], slot["is_processing"]) for slot in slots] == [
        (k, 2048, False) for k in range(3)
    ]
    props = ask(engine, "/props").json()
    assert (props["total_slots"], props["default_generation_settings"]["n_ctx"]) == (3, 2048)
    assert ask(engine, "/version").status == 404


def test_llama_metrics_count_what_was_done(sim_engine: SimEngineFactory) -> None:
    engine = sim_engine(*FAST)
    prompt = "the same words again " * 20
    tokens = sim.count_tokens(sim.render_prompt(chat(prompt)["messages"], None))
    for _ in range(2):
        complete(engine, streamed(prompt, max_tokens=6))
    samples = metrics(engine)
    assert samples["llamacpp:prompt_tokens_total"] == tokens + 1  # cached ones are not in it
    assert samples["llamacpp:prompt_tokens_cached_total"] == tokens - 1
    assert samples["llamacpp:tokens_predicted_total"] == samples["llamacpp:n_decode_total"] == 12
    assert samples["llamacpp:n_busy_slots_per_decode"] == 1
    assert samples["llamacpp:requests_processing"] == samples["llamacpp:requests_deferred"] == 0


def test_vllm_endpoints_and_metrics(sim_engine: SimEngineFactory) -> None:
    engine = sim_engine("--dialect", "vllm", "--context", 2048, "--saturate-at", 1, *FAST)
    health = ask(engine, "/health")
    assert (health.status, health.body) == (200, b"")
    (model,) = ask(engine, "/v1/models").json()["data"]
    assert (model["id"], model["owned_by"], model["max_model_len"]) == ("sim-chat", "vllm", 2048)
    assert ask(engine, "/slots").status == 404
    prompt = "the same words again " * 20
    tokens = sim.count_tokens(sim.render_prompt(chat(prompt)["messages"], None))
    for _ in range(2):
        complete(engine, streamed(prompt))
    samples = metrics(engine)
    label = '{engine="0",model_name="sim-chat"}'
    assert samples[f"vllm:prefix_cache_queries_total{label}"] == 2 * tokens
    assert samples[f"vllm:prefix_cache_hits_total{label}"] == (tokens - 1) // 16 * 16
    assert samples[f"vllm:prompt_tokens_total{label}"] == 2 * tokens
    assert samples[f"vllm:generation_tokens_total{label}"] == 10
    for name in ("num_requests_running", "num_requests_waiting", "num_preemptions_total", "kv_cache_usage_perc"):
        assert samples[f"vllm:{name}{label}"] == 0
    for name in ("request_queue_time_seconds", "request_prefill_time_seconds"):
        buckets = [samples[key] for key in samples if key.startswith(f"vllm:{name}_bucket")]
        assert buckets == sorted(buckets) and buckets[-1] == samples[f"vllm:{name}_count{label}"] == 2
    records = log_after_stop(engine)
    prefill = samples[f"vllm:request_prefill_time_seconds_sum{label}"]
    least = sum(record["prefilled"] - record["admitted"] + 0.0021 for record in records)
    assert prefill == pytest.approx(least, abs=1e-6)


def test_what_runs_and_what_waits_shows_while_it_does(sim_engine: SimEngineFactory) -> None:
    engine = sim_engine("--slots", 2, *ENDLESS)
    with contextlib.ExitStack() as streams:
        for _ in range(3):
            streams.enter_context(open_stream(engine, streamed(max_tokens=10_000)))
        wait_until(lambda: busy_and_waiting(engine) == (2, 1))
        slots = ask(engine, "/slots").json()
        assert all(slot["is_processing"] and slot["next_token"][0]["n_remain"] > 0 for slot in slots)
    wait_until(lambda: busy_and_waiting(engine) == (0, 0))
    vllm = sim_engine("--slots", 2, "--dialect", "vllm", "--saturate-at", 1, *ENDLESS)
    label = '{engine="0",model_name="sim-chat"}'
    with contextlib.ExitStack() as streams:
        for _ in range(3):
            streams.enter_context(open_stream(vllm, streamed(max_tokens=10_000)))
        wait_until(lambda: metrics(vllm)[f"vllm:num_requests_running{label}"] == 2)
        wait_until(lambda: metrics(vllm)[f"vllm:num_requests_waiting{label}"] == 1)
        wait_until(lambda: metrics(vllm)[f"vllm:num_preemptions_total{label}"] == 1)
        assert metrics(vllm)[f"vllm:kv_cache_usage_perc{label}"] > 0


# --- refusals -------------------------------------------------------------------------------------------------


def test_context_overflow_names_both_sizes(sim_engine: SimEngineFactory) -> None:
    long = "x" * 4800
    tokens = sim.count_tokens(sim.render_prompt(chat(long)["messages"], None))
    llama = sim_engine("--context", 512, *FAST)
    reply = complete(llama, streamed(long))
    assert reply.status == 400
    error = reply.json()["error"]
    assert (error["type"], error["code"]) == ("exceed_context_size_error", 400)
    assert (error["n_prompt_tokens"], error["n_ctx"]) == (tokens, 512)
    assert f"request ({tokens} tokens) exceeds the available context size (512 tokens)" in error["message"]
    cut = complete(llama, chat("x" * 1800, max_tokens=1000)).json()  # fits, and is cut at the context's end
    assert cut["usage"]["total_tokens"] == 512 and cut["choices"][0]["finish_reason"] == "length"
    vllm = sim_engine("--context", 512, "--dialect", "vllm", *FAST)
    error = complete(vllm, streamed("hello", max_tokens=510)).json()["error"]
    assert error["type"] == "BadRequestError" and "maximum context length is 512 tokens" in error["message"]
    assert log_after_stop(llama)[0]["status"] == 400
    assert log_after_stop(vllm)[0]["admitted"] is None


@pytest.mark.parametrize("dialect", ["llama", "vllm"])
@pytest.mark.parametrize(
    "body",
    [
        b"{",
        b"",
        b"[1]",
        b"[" * 100_000,
        b"\xff\xfe",
        b'{"model":"sim-chat"}',
        b'{"messages":[]}',
        b'{"messages":[1]}',
        b'{"messages":[{"role":"user","content":5}]}',
        b'{"messages":[{"role":"user","content":"a"}],"max_tokens":"5"}',
        b'{"messages":[{"role":"user","content":"a"}],"max_tokens":1.5}',
    ],
)
def test_bad_bodies_are_refused_with_400(shared_engines: dict[str, SimEngine], dialect: str, body: bytes) -> None:
    reply = ask(shared_engines[dialect], "/v1/chat/completions", body)
    assert reply.status == 400
    assert reply.json()["error"]["message"]


@pytest.fixture(scope="module")
def shared_engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, SimEngine]]:
    """One server per dialect for requests that leave no trace in it."""
    engines = {name: SimEngine(tmp_path_factory.mktemp(name), "--dialect", name, *FAST) for name in ("llama", "vllm")}
    yield engines
    for engine in engines.values():
        engine.stop()


def test_unknown_paths_methods_and_models(shared_engines: dict[str, SimEngine]) -> None:
    llama, vllm = shared_engines["llama"], shared_engines["vllm"]
    for engine in (llama, vllm):
        reply = ask(engine, "/v1/nothing")
        assert reply.status == 404 and reply.json()["error"]["code"] == 404
        assert ask(engine, "/v1//chat/completions", chat()).status == 404
    assert ask(llama, "/v1/chat/completions").status == 404
    assert ask(vllm, "/v1/chat/completions").status == 405
    assert complete(llama, chat(model="other")).status == 200
    reply = complete(vllm, chat(model="other"))
    assert reply.status == 404 and reply.json()["error"]["message"] == "The model `other` does not exist."
    assert complete(vllm, chat(max_tokens=0)).status == 400


def test_content_in_parts_and_empty_content_are_read(shared_engines: dict[str, SimEngine]) -> None:
    parts = [{"type": "text", "text": "hel"}, {"type": "image_url"}, {"type": "text", "text": "lo"}]
    messages = [{"role": "system", "content": None}, {"role": "user", "content": parts}]
    document = complete(shared_engines["llama"], chat(messages=messages)).json()
    text = b"<|im_start|>system\n<|im_end|>\n<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
    assert document["usage"]["prompt_tokens"] == -(-len(text) // 4)


def test_key_queue_limit_and_loading(sim_engine: SimEngineFactory) -> None:
    for dialect in ("llama", "vllm"):
        engine = sim_engine("--api-key", "secret", "--dialect", dialect, *FAST)
        assert complete(engine, chat()).status == 401
        assert ask(engine, "/v1/models", Authorization="Bearer wrong").status == 401
        assert ask(engine, "/v1/models", Authorization="Bearer secret").status == 200
        assert ask(engine, "/health").status == 200
        loading = sim_engine("--loading-s", 1000, "--dialect", dialect)
        for reply in (ask(loading, "/health"), ask(loading, "/v1/models"), complete(loading, chat())):
            assert reply.status == 503 and reply.json()["error"]["message"] == "Loading model"
    engine = sim_engine("--slots", 1, "--max-queue", 1, *ENDLESS)
    with open_stream(engine, streamed(max_tokens=10_000)), open_stream(engine, streamed(max_tokens=10_000)):
        wait_until(lambda: busy_and_waiting(engine) == (1, 1))
        reply = complete(engine, streamed())
        assert reply.status == 429 and reply.json()["error"]["type"] == "rate_limit_error"


def test_loading_ends(sim_engine: SimEngineFactory) -> None:
    engine = sim_engine("--loading-s", 0.3, *FAST)
    wait_until(lambda: ask(engine, "/health").status == 200)
    assert complete(engine, chat()).status == 200


# --- faults ---------------------------------------------------------------------------------------------------


def test_each_nth_request_fails_half_way(sim_engine: SimEngineFactory) -> None:
    for dialect, done in (("llama", False), ("vllm", True)):
        engine = sim_engine("--fail-every", 2, "--dialect", dialect, *FAST)
        assert complete(engine, streamed(max_tokens=8)).events()[-1] is None
        reply = complete(engine, streamed(max_tokens=8))
        assert reply.status == 200 and len(reply.texts()) == 4
        errors = [event for event in reply.events() if event and event.get("error")]
        assert len(errors) == 1 and errors[0]["error"]["code"] == 500
        assert (reply.events()[-1] is None) is done
        assert b'"finish_reason":"' not in reply.body
        complete(engine, streamed())
        whole = complete(engine, chat())
        assert whole.status == 500 and whole.json()["error"]["message"]
        assert [record["finish"] for record in log_after_stop(engine)] == ["length", "error", "length", "error"]


def test_a_stalled_request_sends_comments_only_and_keeps_its_slot(sim_engine: SimEngineFactory) -> None:
    engine = sim_engine("--stall-every", 1, "--keep-alive-s", 0.01, "--slots", 1, *FAST)
    with open_stream(engine, streamed(max_tokens=8)) as sock:
        data = read_until(sock, b"\r\n:\n\n\r\n", times=5)
        assert data.count(b'"content":"') == 4 and b"[DONE]" not in data
        assert busy_and_waiting(engine) == (1, 0)
    wait_until(lambda: busy_and_waiting(engine) == (0, 0))
    (record,) = log_after_stop(engine)
    assert (record["finish"], record["output_tokens"], len(record["sends"])) == ("cancelled", 4, 4)


def test_a_client_that_leaves_frees_its_slot_for_the_next(sim_engine: SimEngineFactory) -> None:
    engine = sim_engine("--slots", 1, *ENDLESS)
    with open_stream(engine, streamed(max_tokens=10_000)) as first, open_stream(engine, streamed()) as second:
        read_until(first, b'"content":"', times=2)
        wait_until(lambda: busy_and_waiting(engine) == (1, 1))
        first.close()
        assert read_until(second, b"[DONE]").count(b'"content":"') == 5
    assert [record["finish"] for record in log_after_stop(engine)] == ["cancelled", "length"]


def test_a_client_that_leaves_the_queue_is_not_served(sim_engine: SimEngineFactory) -> None:
    engine = sim_engine("--slots", 1, *ENDLESS)
    with open_stream(engine, streamed(max_tokens=10_000)):
        wait_until(lambda: busy_and_waiting(engine) == (1, 0))
        with open_stream(engine, streamed()):
            wait_until(lambda: busy_and_waiting(engine) == (1, 1))
        wait_until(lambda: busy_and_waiting(engine) == (1, 0))
    record = log_after_stop(engine)[1]
    assert (record["finish"], record["admitted"], record["sends"]) == ("cancelled", None, [])


# --- connections ----------------------------------------------------------------------------------------------


def test_one_connection_serves_many_requests(shared_engines: dict[str, SimEngine]) -> None:
    for engine in shared_engines.values():
        with client(engine) as connection:
            sockets = set()
            for document in (streamed(), chat(), chat(messages=[]), streamed()):
                connection.request("POST", "/v1/chat/completions", json.dumps(document))
                connection_socket = connection.sock
                assert Reply(connection.getresponse()).status in (200, 400)
                sockets.add(connection_socket)
            assert len(sockets) == 1


def test_connection_close_is_honoured(shared_engines: dict[str, SimEngine]) -> None:
    for engine in shared_engines.values():
        for document in (streamed(), chat()):
            with socket.create_connection(("127.0.0.1", engine.port), timeout=60) as sock:
                sock.sendall(raw_request(document, "HTTP/1.1", "Connection: close"))
                data = read_to_end(sock)
                assert re.search(rb"\r\nconnection: close\r\n", data, re.I)
                assert data.endswith(b"0\r\n\r\n") is bool(document.get("stream"))


def test_requests_sent_ahead_are_answered_in_order(shared_engines: dict[str, SimEngine]) -> None:
    with socket.create_connection(("127.0.0.1", shared_engines["llama"].port), timeout=60) as sock:
        sock.sendall(
            raw_request(streamed(max_tokens=3)) + raw_request(chat(max_tokens=2)) + b"GET /health HTTP/1.1\r\n\r\n"
        )
        data = read_until(sock, b'{"status":"ok"}')
        assert data.count(b"HTTP/1.1 200 OK") == 3
        assert data.index(b"[DONE]") < data.index(b'"chat.completion"') < data.index(b'{"status":"ok"}')


def test_http_1_0_is_answered_until_close_without_chunks(shared_engines: dict[str, SimEngine]) -> None:
    with socket.create_connection(("127.0.0.1", shared_engines["llama"].port), timeout=60) as sock:
        sock.sendall(raw_request(streamed(), "HTTP/1.0", "Connection: keep-alive"))
        head, _, body = read_to_end(sock).partition(b"\r\n\r\n")
        assert b"transfer-encoding" not in head.lower()
        assert body.startswith(b"data: ") and body.endswith(b"data: [DONE]\n\n")


def test_a_request_may_come_byte_by_byte_and_wait_for_100_continue(shared_engines: dict[str, SimEngine]) -> None:
    request = raw_request(streamed(), "HTTP/1.1", "Expect: 100-continue", "Connection: close")
    head, body = request[: request.index(b"\r\n\r\n") + 4], request[request.index(b"\r\n\r\n") + 4 :]
    with socket.create_connection(("127.0.0.1", shared_engines["vllm"].port), timeout=60) as sock:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for k in range(len(head)):
            sock.sendall(head[k : k + 1])
        assert read_until(sock, b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        for k in range(len(body)):
            sock.sendall(body[k : k + 1])
        assert read_to_end(sock).endswith(b"0\r\n\r\n")


def test_what_is_no_http_is_refused_and_the_server_lives_on(shared_engines: dict[str, SimEngine]) -> None:
    engine = shared_engines["llama"]
    for data, status in ((b"\x16\x03\x01 tls?\r\n\r\n", b" 400 "), (b"A" * 200_000, b" 431 ")):
        with socket.create_connection(("127.0.0.1", engine.port), timeout=60) as sock:
            sock.sendall(data)
            reply = read_to_end(sock)
            assert status in reply.split(b"\r\n")[0] and b'"error"' in reply
    assert complete(engine, chat()).status == 200


def test_every_chunk_is_framed_and_carries_whole_events(shared_engines: dict[str, SimEngine]) -> None:
    for engine in shared_engines.values():
        with socket.create_connection(("127.0.0.1", engine.port), timeout=60) as sock:
            sock.sendall(raw_request(streamed(max_tokens=70), "HTTP/1.1", "Connection: close"))
            _, _, body = read_to_end(sock).partition(b"\r\n\r\n")
        events = 0
        while True:
            size, _, body = body.partition(b"\r\n")
            length = int(size, 16)
            if length == 0:
                break
            chunk, end = body[:length], body[length : length + 2]
            assert chunk.endswith(b"\n\n") and end == b"\r\n"
            events += chunk.count(b"\n\n")
            body = body[length + 2 :]
        assert body == b"\r\n" and events >= 72


# --- the log --------------------------------------------------------------------------------------------------

LOG_FIELDS = {
    "event", "id", "status", "finish", "error", "stream", "slot", "prompt_tokens", "cached_tokens", "output_tokens",
    "max_tokens", "in_flight_peak", "batch", "late_s", "connected", "arrived", "request_read", "admitted",
    "prefilled", "sends", "finished",
}  # fmt: skip


def run_many(engine: SimEngine, documents: Sequence[dict[str, Any]]) -> None:
    """All at once, each on its own connection, read to their ends."""
    with contextlib.ExitStack() as streams:
        sockets = [streams.enter_context(open_stream(engine, document)) for document in documents]
        for sock in sockets:
            read_until(sock, b"[DONE]")


def test_the_log_follows_the_model(sim_engine: SimEngineFactory) -> None:
    a_s, b_s, rate = 0.004, 0.0005, 2000
    options = ("--a-ms", a_s * 1e3, "--b-ms", b_s * 1e3, "--prefill-tok-s", rate, "--slots", 4, "--cache", "none")
    engine = sim_engine(*options)
    before = time.perf_counter()
    run_many(engine, [streamed(f"{k}" * 40, max_tokens=10 + k) for k in range(10)])
    after = time.perf_counter()
    records = log_after_stop(engine)
    assert [record["output_tokens"] for record in records] == [len(record["sends"]) for record in records]
    for record in records:
        assert set(record) == LOG_FIELDS and record["event"] == "request" and record["status"] == 200
        # prefill exactly at its rate; no token before it was due; each later than the one before
        assert record["prefilled"] == pytest.approx(record["admitted"] + record["prompt_tokens"] / rate, abs=1e-9)
        due = record["prefilled"]
        for size, stamp in zip(record["batch"], record["sends"]):
            due += a_s + b_s * size
            assert 1 <= size <= 4 and stamp >= due - 1e-9
        order = [record[name] for name in ("arrived", "admitted", "prefilled")]
        order += [*record["sends"], record["finished"]]
        assert order == sorted(order)
        assert record["arrived"] <= record["request_read"]
        if sys.platform.startswith("linux"):  # one clock for every process
            # `finished` is stamped after the last write, when the client may have its answer already
            assert before < record["arrived"] and record["sends"][-1] < after
        assert record["in_flight_peak"] <= 4
    starts = sorted((record["admitted"], record["finished"]) for record in records)
    for start, _ in starts:
        assert sum(begin <= start < end for begin, end in starts) <= 4, "slots"
    by_read = sorted(records, key=lambda record: float(record["request_read"]))
    waited = [record["admitted"] for record in by_read if record["admitted"] > record["request_read"]]
    assert waited == sorted(waited), "first come, first served"


@pytest.mark.parametrize(("concurrency", "slots"), [(1, 3), (2, 3), (6, 3)])
def test_peak_in_flight_is_the_smaller_of_concurrency_and_slots(
    sim_engine: SimEngineFactory, concurrency: int, slots: int
) -> None:
    engine = sim_engine("--slots", slots, *ENDLESS)
    running = min(concurrency, slots)
    with contextlib.ExitStack() as streams:
        for _ in range(concurrency):
            streams.enter_context(open_stream(engine, streamed(max_tokens=10_000)))
        wait_until(lambda: busy_and_waiting(engine) == (running, concurrency - running))
    wait_until(lambda: busy_and_waiting(engine) == (0, 0))
    peaks = [record["in_flight_peak"] for record in log_after_stop(engine) if record["admitted"] is not None]
    assert max(peaks) == running


@pytest.mark.parametrize(("cache", "share"), [("slot", 0.9), ("pool", 0.9), ("none", 0.0)])
def test_cached_shares_are_as_configured(sim_engine: SimEngineFactory, cache: str, share: float) -> None:
    engine = sim_engine("--cache", cache, *FAST)
    preamble = "be brief. " * 400
    for k in range(4):
        complete(engine, streamed(f"{preamble} question {k}"))
        complete(engine, streamed(f"{k} tag {preamble}"))
    shared, unique = (log_after_stop(engine)[start::2][1:] for start in (0, 1))
    assert all(record["cached_tokens"] >= share * record["prompt_tokens"] for record in shared)
    assert all(record["cached_tokens"] <= 0.1 * record["prompt_tokens"] for record in unique)
    assert share or all(record["cached_tokens"] == 0 for record in shared)


def test_sigterm_logs_what_was_under_way_and_the_log_is_strict_json(sim_engine: SimEngineFactory) -> None:
    engine = sim_engine(*ENDLESS)
    complete(engine, chat(max_tokens=2))
    with open_stream(engine, streamed(max_tokens=10_000)) as sock:
        read_until(sock, b'"content":"', times=2)
        assert engine.stop() == 0
        assert b"[DONE]" not in read_to_end(sock)

    def refuse(name: str) -> None:
        raise AssertionError(name)

    text = engine.log_path.read_text(encoding="utf-8")
    records = [json.loads(line, parse_constant=refuse) for line in text.splitlines()]
    assert text.endswith("\n") and [record["finish"] for record in records] == ["length", "shutdown"]
    assert records[1]["output_tokens"] == len(records[1]["sends"]) >= 2
    assert engine.stderr() == ""


def test_the_log_is_written_without_being_asked_when_the_server_is_idle(sim_engine: SimEngineFactory) -> None:
    engine = sim_engine(*FAST)
    run_many(engine, [streamed()] * 5)
    wait_until(lambda: len(engine.read_log()) == 5)


# ------------------------------------------------------------------------------------------------------------
# Command line
# ------------------------------------------------------------------------------------------------------------


def test_the_port_file_names_the_port(sim_engine: SimEngineFactory, tmp_path: Path) -> None:
    engine = sim_engine("--port-file", tmp_path / "port")
    assert (tmp_path / "port").read_text() == f"{engine.port}\n"
    assert [path.name for path in tmp_path.iterdir()] == ["port"]


def test_help_names_every_option_with_its_default() -> None:
    for action in sim.build_parser()._actions:
        name = action.option_strings[-1]
        if name == "--help":
            continue
        entry = re.search(rf"^  {re.escape(name)}\b(.*?)(?=^  --|\n\n)", sim.__doc__, re.M | re.S)
        assert entry is not None, f"{name} is not documented"
        if action.default not in (None, False):
            text = " ".join(entry.group(1).split())
            assert (
                f"(default {action.default:g})" in text
                if isinstance(action.default, float)
                else str(action.default) in text
            )
    for dialect in sim.DIALECTS.values():
        assert f"{dialect.default_cache} for" in sim.__doc__


@pytest.mark.parametrize(
    "arguments",
    [
        ["--port", "70000"],
        ["--a-ms", "-1"],
        ["--a-ms", "nan"],
        ["--b-ms", "inf"],
        ["--a-ms", "0", "--b-ms", "0"],
        ["--slots", "0"],
        ["--slots", "many"],
        ["--cache", "disk"],
        ["--dialect", "other"],
        ["--prefill-tok-s", "0"],
        ["--seed", "1.5"],
        ["--model", ""],
        ["--unknown"],
        ["extra"],
        ["--host", "256.0.0.1"],
        ["--log", "missing/folder/log"],
        ["--port-file", "missing/folder/port"],
        ["--saturate-factor", "2"],
        ["--reasoning-tokens", "5"],
        ["--coalesce-ms", "5", "--deltas-per-write", "2"],
        ["--null", "--fail-every", "2"],
    ],
)
def test_wrong_arguments_get_one_line_and_exit_2(run_program: RunProgram, arguments: list[str]) -> None:
    result = run_program("scripts/simulated_engine.py", *arguments, timeout=30)
    assert result.returncode == 2 and result.stdout == ""
    assert result.stderr.startswith("simulated_engine.py: ") and result.stderr.count("\n") == 1


def test_a_port_in_use_is_refused(run_program: RunProgram) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        result = run_program("scripts/simulated_engine.py", "--port", taken.getsockname()[1], timeout=30)
    assert result.returncode == 2 and "in use" in result.stderr and result.stderr.count("\n") == 1


def test_version_is_that_of_the_load_generator(run_program: RunProgram) -> None:
    said = run_program("scripts/simulated_engine.py", "--version").stdout.split()
    assert said == ["simulated_engine.py", run_program("load_test.py", "--version").stdout.split()[1]]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")
def test_help_that_cannot_be_printed_is_said() -> None:
    command = [sys.executable, str(ROOT / "scripts" / "simulated_engine.py"), "--help"]
    with open("/dev/full", "w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, encoding="utf-8", timeout=60)
    assert done.returncode == 1 and done.stderr.startswith("simulated_engine.py: cannot write the output: No space")
    assert done.stderr.count("\n") == 1
