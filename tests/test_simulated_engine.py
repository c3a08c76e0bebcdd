"""The simulated engine: its model on a fake clock, its wire format and endpoints over sockets, its faults, its log."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import importlib.util
import io
import json
import re
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Callable

import pytest
from conftest import ROOT, RunProgram, SimEngineFactory
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
        self.options = sim.Options(**{"cache": "none", **options})
        self.now = 0.0
        self.engine = sim.BatchEngine(self.options, lambda: self.now)
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

    def gaps(self, id: int) -> list[float]:
        times = self.tokens[id]
        return [later - sooner for sooner, later in zip(times, times[1:])]


def test_first_token_comes_after_prefill_and_one_step_and_the_rest_every_step() -> None:
    bench = Bench(a_ms=20, b_ms=1.5, prefill_tok_s=100)
    bench.submit(1, tokens=3)
    bench.run()
    assert bench.tokens[1] == pytest.approx([0.08 + 0.0215, 0.08 + 0.043, 0.08 + 0.0645])
    assert bench.ends[1][1] == "length"


def test_c_sequences_share_a_step_of_a_plus_b_c() -> None:
    """The worked example: a = 20 ms, b = 1.5 ms give 46.5, 181.8, 285.7 and 400.0 tokens/s at 1, 5, 10 and 20."""
    for c, expected in ((1, 46.5), (5, 181.8), (10, 285.7), (20, 400.0)):
        bench = Bench(a_ms=20, b_ms=1.5, slots=20)
        for id in range(c):
            bench.submit(id, tokens=11)
        bench.run()
        first, last = bench.tokens[0][0], bench.tokens[0][-1]
        assert c * 10 / (last - first) == pytest.approx(expected, abs=0.05)
        assert bench.jobs[0].batch == [c] * 11


def test_a_request_joins_at_the_next_step_and_delays_nobody_before() -> None:
    bench = Bench(a_ms=10, b_ms=10, prefill_tok_s=8000)  # a prefill takes 1 ms
    bench.submit(1, tokens=4)
    bench.run(until=0.025)  # the first step ended at 21 ms
    bench.submit(2, tokens=1)
    bench.run()
    assert bench.tokens[1] == pytest.approx([0.021, 0.041, 0.071, 0.091])
    assert bench.tokens[2] == pytest.approx([0.071])
    assert bench.jobs[1].batch == [1, 1, 2, 1]


def test_a_freed_slot_is_taken_when_the_step_was_due_however_late_the_program_woke_up() -> None:
    bench = Bench(slots=1, a_ms=20, b_ms=0, prefill_tok_s=8000)
    bench.submit(1, tokens=500)
    second = bench.submit(2, tokens=1)
    bench.run(late_s=0.003)
    assert bench.tokens[1][-1] == pytest.approx(0.001 + 500 * 0.020 + 0.003), "no drift"
    assert second.admitted == pytest.approx(0.001 + 500 * 0.020)
    assert second.first_at == pytest.approx(second.admitted + 0.001 + 0.020)


def test_a_blocking_prefill_stops_the_decodes_and_a_chunked_one_does_not() -> None:
    gaps = {}
    for blocks in (False, True):
        bench = Bench(a_ms=10, b_ms=0, prefill_tok_s=80, prefill_blocks=blocks)  # 100 ms a prefill
        bench.submit(1, tokens=30)
        bench.run(until=0.155)
        bench.submit(2, tokens=2)
        bench.run()
        gaps[blocks] = max(bench.gaps(1))
        assert bench.jobs[2].ready_at == pytest.approx(0.26 if blocks else 0.255)
    assert gaps[False] == pytest.approx(0.010)
    assert gaps[True] == pytest.approx(0.110)


def test_past_saturation_throughput_falls_and_preemptions_are_counted() -> None:
    for c in range(8, 30):
        plain, saturated = sim.Options(), sim.Options(saturate_at=8, saturate_factor=1.0)
        assert (c + 1) / plain.step_s(c + 1) > c / plain.step_s(c)
        assert (c + 1) / saturated.step_s(c + 1) < c / saturated.step_s(c)
    bench = Bench(saturate_at=3, slots=5)
    for id in range(5):
        bench.submit(id)
    bench.run()
    assert bench.engine.counters.preemptions == 2


def test_the_first_requests_are_slower_by_the_warm_up_factor() -> None:
    bench = Bench(a_ms=10, b_ms=0, prefill_tok_s=8000, warmup_requests=2, warmup_factor=3)
    for id in range(4):
        bench.submit(id, tokens=3)
        bench.run()
    assert [bench.gaps(id) for id in range(4)] == [pytest.approx([step] * 2) for step in (0.03, 0.03, 0.01, 0.01)]
    assert [job.ready_at - job.admitted for job in bench.jobs.values()] == pytest.approx([0.003] * 2 + [0.001] * 2)


def test_a_drifting_engine_slows_down_evenly_and_then_stays() -> None:
    bench = Bench(a_ms=10, b_ms=0, prefill_tok_s=1e9, drift_factor=2, drift_steps=100)
    bench.submit(1, tokens=300)
    bench.run()
    gaps = bench.gaps(1)
    assert gaps[0] == pytest.approx(0.0101) and gaps[49] == pytest.approx(0.0150)
    assert gaps[99:] == pytest.approx([0.02] * 200)
    assert gaps[:100] == sorted(gaps[:100])


def test_noise_has_its_deviation_is_seeded_and_may_hold_for_a_run() -> None:
    def play(requests: int, seed: int) -> list[list[float]]:
        bench = Bench(a_ms=10, b_ms=0, prefill_tok_s=1e9, slots=1, noise_percent=5, noise_requests=requests, seed=seed)
        for id in range(200):
            bench.submit(id, tokens=11)
        bench.run()
        return [bench.gaps(id) for id in range(200)]

    each_step = [gap for gaps in play(0, 1) for gap in gaps]
    assert statistics.mean(each_step) == pytest.approx(0.010, rel=0.01)
    assert statistics.stdev(each_step) == pytest.approx(0.0005, rel=0.1)
    assert play(0, 1) == play(0, 1) != play(0, 2)
    runs = play(2, 1)
    assert all(gaps == pytest.approx([gaps[0]] * 10) for gaps in runs), "one draw holds for a whole request"
    firsts = [gaps[0] for gaps in runs]
    assert firsts[::2] == pytest.approx(firsts[1::2]), "and for two in a row"
    assert statistics.stdev(firsts[::2]) == pytest.approx(0.0005, rel=0.3)


def test_a_cancelled_request_gives_its_slot_to_the_next_at_once() -> None:
    bench = Bench(slots=1, a_ms=20, b_ms=0, prefill_tok_s=8000)
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
    bench = Bench(slots=slots, prefill_blocks=blocks, a_ms=7, b_ms=3, prefill_tok_s=2000)
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
        assert job.ready_at >= job.admitted + job.prompt_tokens / 2000 - 1e-9
        assert times[0] >= job.ready_at + bench.options.step_s(job.batch[0]) - 1e-9
        for gap, size in zip(bench.gaps(job.id), job.batch[1:]):
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
    assert [cached for _, cached in run_prompts(Bench(cache="none"), [SHARED, SHARED])] == [0, 0]


@pytest.mark.parametrize(("cache", "grain"), [("slot", 1), ("pool", 16)])
def test_the_next_turn_of_a_conversation_finds_the_turn_before_with_its_answer(cache: str, grain: int) -> None:
    bench = Bench(slots=3, cache=cache)
    messages = [{"role": "user", "content": "tell me of queues, and why they grow " * 5}]
    bench.submit(0, 60, sim.render_prompt(messages))
    bench.submit(1, 60, sim.render_prompt([{"role": "user", "content": "something else"}]))
    bench.run()
    so_far = sim.render_prompt(messages) + sim.words(1, 60).encode()
    messages += [{"role": "assistant", "content": sim.words(1, 60)}, {"role": "user", "content": "and then?"}]
    again = bench.submit(2, 5, sim.render_prompt(messages))
    bench.run()
    assert again.cached == len(so_far) // 4 // grain * grain
    if cache == "slot":
        assert again.slot == bench.jobs[0].slot


@given(st.binary(max_size=60), st.binary(max_size=40), st.binary(max_size=40))
def test_byte_identical_beginnings_are_token_identical(shared: bytes, one: bytes, other: bytes) -> None:
    tokens = sim.common_tokens(shared + one, shared + other)
    assert tokens >= len(shared) // 4
    assert tokens <= min(sim.count_tokens(shared + one), sim.count_tokens(shared + other))
    assert (shared + one)[: tokens * 4] == (shared + other)[: tokens * 4]


# ------------------------------------------------------------------------------------------------------------
# Reading a request
# ------------------------------------------------------------------------------------------------------------


def test_a_request_is_whole_with_its_last_byte() -> None:
    data = b"POST /v1/chat/completions?x=1 HTTP/1.1\r\nHost: h\r\nContent-Length: 4\r\nX-Two:  b \r\n\r\n{}\r\n"
    assert [cut for cut in range(len(data)) if sim.parse_http(data[:cut]) is not None] == []
    for tail in (b"", b"and more"):
        method, path, headers, body = sim.parse_http(data + tail)
        assert (method, path, headers["x-two"], body) == ("POST", "/v1/chat/completions", "b", b"{}\r\n")


@pytest.mark.parametrize(
    "data",
    [
        b"hello\r\n\r\n",
        b"GET / HTTP/2\r\n\r\n",
        b"POST / HTTP/1.1\r\nContent-Length: -1\r\n\r\n",
        b"POST / HTTP/1.1\r\nContent-Length: 1e3\r\n\r\n",
        b"POST / HTTP/1.1\r\nContent-Length: " + b"9" * 5000 + b"\r\n\r\n",
        b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n",
        b"GET / HTTP/1.1\r\nA: " + b"a" * 70000,
    ],
)
def test_what_is_no_request_is_refused(data: bytes) -> None:
    with pytest.raises(sim.ApiError):
        sim.parse_http(data)


# ------------------------------------------------------------------------------------------------------------
# Over sockets: the engine runs in a thread of the test
# ------------------------------------------------------------------------------------------------------------

FAST = ("--a-ms", 2, "--b-ms", 0.1, "--prefill-tok-s", 100000)
ENDLESS = ("--a-ms", 20, "--b-ms", 0, "--context", 1_000_000)  # 10,000 tokens take 200 s, longer than any test


class Engine:
    """A running server; stop() ends it and gives its log, in the order of the requests."""

    def __init__(self, *args: object) -> None:
        self.options = sim.Options(**vars(sim.build_parser().parse_args([*map(str, args)])))
        self._log = io.StringIO()
        self._listener = sim.open_listener("127.0.0.1", 0)
        self.port = self._listener.getsockname()[1]
        self._loop = asyncio.new_event_loop()
        self._server = sim.Server(self.options, self._loop, self._log)
        self._loop.call_soon(self._server.listen, self._listener)
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()

    def log(self) -> list[dict[str, Any]]:
        return sorted(map(json.loads, self._log.getvalue().splitlines()), key=lambda line: int(line["id"]))

    def stop(self) -> list[dict[str, Any]]:
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._server.stop)
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()
            self._listener.close()
        return self.log()


EngineFactory = Callable[..., Engine]


@pytest.fixture
def start() -> Iterator[EngineFactory]:
    """``start("--slots", 4)`` gives a running engine; all are stopped at the end of the test."""
    with contextlib.ExitStack() as running:

        def start_one(*args: object) -> Engine:
            engine = Engine(*args)
            running.callback(engine.stop)
            return engine

        yield start_one


@pytest.fixture(scope="module")
def shared() -> Iterator[dict[str, Engine]]:
    """One server per dialect for requests that leave no trace in it."""
    engines = {name: Engine("--dialect", name, *FAST) for name in ("llama", "vllm")}
    yield engines
    for engine in engines.values():
        engine.stop()


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

    def texts(self, field: str = "content") -> list[Any]:
        choices = [event["choices"][0] for event in self.events() if event and event.get("choices")]
        return [choice["delta"][field] for choice in choices if choice["delta"].get(field)]


def ask(engine: Engine, path: str, document: Any = None, **headers: str) -> Reply:
    """One request on its own connection: GET, or POST where there is a document (bytes are sent as they are)."""
    body = document if isinstance(document, bytes) or document is None else json.dumps(document).encode()
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", engine.port, timeout=60)) as connection:
        connection.request("GET" if body is None else "POST", path, body, headers)
        return Reply(connection.getresponse())


def complete(engine: Engine, document: dict[str, Any]) -> Reply:
    return ask(engine, "/v1/chat/completions", document)


def metrics(engine: Engine) -> dict[str, float]:
    """The samples of /metrics, each line checked against the Prometheus text format."""
    samples = {}
    for line in ask(engine, "/metrics").body.decode().splitlines():
        if line.startswith("#"):
            assert re.fullmatch(r"# TYPE [a-z:_]+ (counter|gauge|untyped)", line)
            continue
        match = re.fullmatch(r'([a-z:_]+)(?:\{[a-z_]+="[^"]*"(?:,[a-z_]+="[^"]*")*\})? (\S+)', line)
        assert match is not None, line
        samples[match.group(1)] = float(match.group(2))
    return samples


def wait_until(condition: Callable[[], bool]) -> None:
    """Ask again until it is so; the suite's own time limit ends a test in which it never is."""
    while not condition():
        time.sleep(0.005)


def busy_and_waiting(engine: Engine) -> tuple[float, float]:
    samples = metrics(engine)
    names = ("requests_processing", "requests_deferred")
    return tuple(samples[f"llamacpp:{name}"] for name in names)  # type: ignore[return-value]


@contextlib.contextmanager
def open_stream(port: int, document: dict[str, Any]) -> Iterator[socket.socket]:
    """A request under way; nothing of its answer is read yet."""
    body = json.dumps(document).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: h\r\nContent-Length: {len(body)}\r\n\r\n".encode()
    with socket.create_connection(("127.0.0.1", port), timeout=60) as sock:
        sock.sendall(head + body)
        yield sock


def read_until(sock: socket.socket, marker: bytes, times: int = 1) -> bytes:
    data = b""
    while data.count(marker) < times:
        piece = sock.recv(65536)
        assert piece, f"closed before {marker!r}: {data[-300:]!r}"
        data += piece
    return data


def read_to_end(sock: socket.socket) -> bytes:
    return b"".join(iter(lambda: sock.recv(65536), b""))


# --- what the two servers write -------------------------------------------------------------------------------


def test_llama_stream_has_role_text_finish_usage_and_timings(start: EngineFactory) -> None:
    reply = complete(start(*FAST), streamed(max_tokens=4))
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
    tokens = sim.count_tokens(sim.render_prompt(streamed()["messages"]))
    assert usage["choices"] == [] and usage["usage"] == {
        "completion_tokens": 4,
        "prompt_tokens": tokens,
        "total_tokens": tokens + 4,
        "prompt_tokens_details": {"cached_tokens": 0},
    }
    assert usage["timings"] == {
        "cache_n": 0,
        "prompt_n": tokens,
        "prompt_ms": pytest.approx(tokens / 100, abs=0.001),
        "predicted_n": 4,
        "predicted_ms": pytest.approx(4 * 2.1, abs=0.001),
    }
    assert events[7:] == [None]


def test_vllm_stream_puts_the_finish_reason_on_the_last_text(start: EngineFactory) -> None:
    events = complete(start("--dialect", "vllm", *FAST), streamed(max_tokens=3)).events()
    assert list(events[0]) == ["id", "object", "created", "model", "choices"]
    assert events[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    last = events[3]["choices"][0]
    assert list(last) == ["index", "delta", "logprobs", "finish_reason", "stop_reason", "token_ids"]
    assert last["delta"]["content"] and last["finish_reason"] == "length"
    assert events[4]["choices"] == [] and events[4]["usage"]["completion_tokens"] == 3
    assert events[5:] == [None]


@pytest.mark.parametrize("dialect", ["llama", "vllm"])
def test_an_answer_that_is_not_streamed_says_the_same(shared: dict[str, Engine], dialect: str) -> None:
    stream = complete(shared[dialect], streamed("one", max_tokens=40))
    document = complete(shared[dialect], chat("two", max_tokens=40)).json()
    assert document["object"] == "chat.completion"
    assert document["choices"][0]["message"]["content"] == "".join(stream.texts())
    assert document["choices"][0]["finish_reason"] == "length"
    assert document["usage"]["completion_tokens"] == len(stream.texts()) == 40


@pytest.mark.parametrize("dialect", ["llama", "vllm"])
def test_usage_is_sent_when_asked_for_and_can_be_left_out(start: EngineFactory, dialect: str) -> None:
    plain = start("--dialect", dialect, *FAST)
    assert b'"usage"' in complete(plain, streamed()).body and b'"usage"' not in complete(plain, chat(stream=True)).body
    reply = complete(start("--dialect", dialect, "--no-usage", *FAST), streamed())
    assert b'"usage"' not in reply.body and len(reply.texts()) == 5
    reply = complete(start("--dialect", dialect, "--no-prompt-details", *FAST), streamed())
    assert b'"completion_tokens":5' in reply.body and b"prompt_tokens_details" not in reply.body


@pytest.mark.parametrize("field", ["reasoning_content", "reasoning"])
def test_reasoning_comes_first_unless_thinking_is_off(start: EngineFactory, field: str) -> None:
    engine = start("--reasoning", field, "--reasoning-tokens", 3, *FAST)
    reply = complete(engine, streamed())
    assert (len(reply.texts(field)), len(reply.texts("content"))) == (3, 2)
    short = complete(engine, streamed(max_tokens=2))
    assert (len(short.texts(field)), len(short.texts("content"))) == (2, 0)
    off = complete(engine, streamed(chat_template_kwargs={"enable_thinking": False}))
    assert (len(off.texts(field)), len(off.texts("content"))) == (0, 5)
    whole = complete(engine, chat()).json()["choices"][0]["message"]
    assert whole[field] == "".join(reply.texts(field)) and whole["content"] == "".join(reply.texts("content"))


@pytest.mark.parametrize("dialect", ["llama", "vllm"])
def test_hidden_reasoning_takes_its_steps_and_stands_in_usage_alone(start: EngineFactory, dialect: str) -> None:
    engine = start("--reasoning", "hidden", "--reasoning-tokens", 6, "--dialect", dialect, *FAST)
    reply = complete(engine, streamed(max_tokens=10))
    assert reply.texts() == [sim.words(k, k) for k in range(7, 11)]
    (usage,) = (event["usage"] for event in reply.events() if event and "usage" in event)
    assert usage["completion_tokens"] == 10 and usage["completion_tokens_details"] == {"reasoning_tokens": 6}
    nothing = complete(engine, streamed("more", max_tokens=3))
    assert nothing.texts() == [] and nothing.events()[-1] is None and b'"role":"assistant"' in nothing.body
    assert complete(engine, chat()).json()["choices"][0]["message"] == {"role": "assistant", "content": ""}
    assert [(len(line["batch"]), len(line["sends"])) for line in engine.stop()] == [(10, 4), (3, 0), (5, 1)]


@pytest.mark.parametrize("dialect", ["llama", "vllm"])
def test_text_may_come_as_a_list_of_parts(start: EngineFactory, dialect: str) -> None:
    reply = complete(start("--content-parts", "--dialect", dialect, *FAST), streamed(max_tokens=3))
    assert reply.texts() == [[{"type": "text", "text": sim.words(k, k)}] for k in (1, 2, 3)]


def test_early_stop_is_repeatable_spread_and_off_with_ignore_eos(start: EngineFactory) -> None:
    engine = start("--early-stop", 6, "--a-ms", 0.5, "--b-ms", 0, "--prefill-tok-s", 1e6)
    lengths = [len(complete(engine, streamed(f"prompt {k}", max_tokens=5)).texts()) for k in range(30)]
    again = [len(complete(engine, streamed(f"prompt {k}", max_tokens=5)).texts()) for k in range(30)]
    assert lengths == again and set(lengths) == {1, 2, 3, 4, 5}
    assert {line["finish"] for line in engine.stop()} == {"stop", "length"}
    one, other = (sim.Options(early_stop=1000, seed=seed) for seed in (1, 2))
    assert one.ending(1, 2000, b"x", False) != other.ending(1, 2000, b"x", False)
    assert one.ending(1, 2000, b"x", True) == (2000, "length")


def test_one_delta_may_hold_several_tokens(start: EngineFactory, shared: dict[str, Engine]) -> None:
    engine = start("--tokens-per-delta", 3, "--reasoning", "reasoning", "--reasoning-tokens", 4, *FAST)
    reply = complete(engine, streamed(max_tokens=12))
    assert [len(text.split()) for text in reply.texts("reasoning")] == [3, 1]  # 3 + 1, then 3 + 3 + 2
    assert len(reply.texts("content")) == 3
    assert "".join(reply.texts("reasoning") + reply.texts("content")) == sim.words(1, 12)
    assert reply.events()[-2]["usage"]["completion_tokens"] == 12
    assert len(engine.stop()[0]["sends"]) == 5


def test_held_deltas_leave_together_and_none_is_lost(start: EngineFactory) -> None:
    engine = start("--deltas-per-write", 4, *FAST)
    assert "".join(complete(engine, streamed(max_tokens=10)).texts()) == sim.words(1, 10)
    sends = engine.stop()[0]["sends"]
    assert [sends.count(stamp) for stamp in dict.fromkeys(sends)] == [4, 4, 2]


@pytest.mark.parametrize("dialect", ["llama", "vllm"])
def test_the_null_server_answers_in_full_at_once(start: EngineFactory, dialect: str) -> None:
    engine = start("--null", "--dialect", dialect, "--context", 100_000)
    for tokens in (1, 2, 3, 500, 20_000, 500):  # 20,000 deltas are far more than a socket takes at once
        reply = complete(engine, streamed(max_tokens=tokens))
        assert len(reply.texts()) == tokens and reply.events()[-1] is None
        assert reply.events()[-2]["usage"]["completion_tokens"] == tokens
    assert complete(engine, chat(max_tokens=7)).json()["usage"]["completion_tokens"] == 7
    assert all(len(set(line["sends"])) == 1 for line in engine.stop())


# --- endpoints ------------------------------------------------------------------------------------------------


def test_llama_endpoints(start: EngineFactory) -> None:
    engine = start("--slots", 3, "--context", 2048, "--model", "tiny", *FAST)
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


def test_llama_metrics_count_what_was_done(start: EngineFactory) -> None:
    engine = start(*FAST)
    prompt = "the same words again " * 20
    tokens = sim.count_tokens(sim.render_prompt(chat(prompt)["messages"]))
    for _ in range(2):
        complete(engine, streamed(prompt, max_tokens=6))
    samples = metrics(engine)
    assert samples["llamacpp:prompt_tokens_total"] == tokens + 1  # cached ones are not in it
    assert samples["llamacpp:prompt_tokens_cached_total"] == tokens - 1
    assert samples["llamacpp:prompt_seconds_total"] == pytest.approx((tokens + 1) / 100_000, rel=1e-4)
    assert samples["llamacpp:tokens_predicted_total"] == samples["llamacpp:n_decode_total"] == 12
    assert samples["llamacpp:n_busy_slots_per_decode"] == 1
    assert samples["llamacpp:requests_processing"] == samples["llamacpp:requests_deferred"] == 0


def test_vllm_endpoints_and_metrics(start: EngineFactory) -> None:
    engine = start("--dialect", "vllm", "--context", 2048, "--saturate-at", 1, *FAST)
    health = ask(engine, "/health")
    assert (health.status, health.body) == (200, b"")
    (model,) = ask(engine, "/v1/models").json()["data"]
    assert (model["id"], model["owned_by"], model["max_model_len"]) == ("sim-chat", "vllm", 2048)
    assert ask(engine, "/slots").status == 404
    prompt = "the same words again " * 20
    tokens = sim.count_tokens(sim.render_prompt(chat(prompt)["messages"]))
    for _ in range(2):
        complete(engine, streamed(prompt))
    samples = metrics(engine)
    assert samples["vllm:prefix_cache_queries_total"] == samples["vllm:prompt_tokens_total"] == 2 * tokens
    assert samples["vllm:prefix_cache_hits_total"] == (tokens - 1) // 16 * 16
    assert samples["vllm:generation_tokens_total"] == 10
    for name in ("num_requests_running", "num_requests_waiting", "num_preemptions_total", "kv_cache_usage_perc"):
        assert samples[f"vllm:{name}"] == 0
    for name in ("queue", "prefill"):
        assert samples[f"vllm:request_{name}_time_seconds_count"] == 2
    until_first = sum(line["prefilled"] - line["admitted"] + 0.0021 for line in engine.stop())
    assert samples["vllm:request_prefill_time_seconds_sum"] == pytest.approx(until_first, abs=1e-6)


def test_what_runs_and_what_waits_shows_while_it_does(start: EngineFactory) -> None:
    engine = start("--slots", 2, *ENDLESS)
    with contextlib.ExitStack() as streams:
        for _ in range(3):
            streams.enter_context(open_stream(engine.port, streamed(max_tokens=10_000)))
        wait_until(lambda: busy_and_waiting(engine) == (2, 1))
        slots = ask(engine, "/slots").json()
        assert all(slot["is_processing"] and slot["next_token"][0]["n_remain"] > 0 for slot in slots)
    wait_until(lambda: busy_and_waiting(engine) == (0, 0))
    vllm = start("--slots", 2, "--dialect", "vllm", "--saturate-at", 1, *ENDLESS)
    with contextlib.ExitStack() as streams:
        for _ in range(3):
            streams.enter_context(open_stream(vllm.port, streamed(max_tokens=10_000)))
        wait_until(lambda: metrics(vllm)["vllm:num_requests_running"] == 2)
        wait_until(lambda: metrics(vllm)["vllm:num_requests_waiting"] == 1)
        wait_until(lambda: metrics(vllm)["vllm:num_preemptions_total"] == 1)
        assert metrics(vllm)["vllm:kv_cache_usage_perc"] > 0


# --- refusals -------------------------------------------------------------------------------------------------


def test_context_overflow_names_both_sizes(start: EngineFactory) -> None:
    long = "x" * 4800
    tokens = sim.count_tokens(sim.render_prompt(chat(long)["messages"]))
    llama = start("--context", 512, *FAST)
    reply = complete(llama, streamed(long))
    assert reply.status == 400
    error = reply.json()["error"]
    assert (error["type"], error["code"]) == ("exceed_context_size_error", 400)
    assert (error["n_prompt_tokens"], error["n_ctx"]) == (tokens, 512)
    assert f"request ({tokens} tokens) exceeds the available context size (512 tokens)" in error["message"]
    cut = complete(llama, chat("x" * 1800, max_tokens=1000)).json()  # fits, and is cut at the context's end
    assert cut["usage"]["total_tokens"] == 512 and cut["choices"][0]["finish_reason"] == "length"
    vllm = start("--context", 512, "--dialect", "vllm", *FAST)
    error = complete(vllm, streamed("hello", max_tokens=510)).json()["error"]
    assert error["type"] == "BadRequestError" and "maximum context length is 512 tokens" in error["message"]
    assert [line["status"] for line in (*llama.stop(), *vllm.stop())] == [400, 200, 400]


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
def test_bad_bodies_are_refused_with_400(shared: dict[str, Engine], dialect: str, body: bytes) -> None:
    reply = ask(shared[dialect], "/v1/chat/completions", body)
    assert reply.status == 400
    assert reply.json()["error"]["message"]


def test_unknown_paths_methods_and_models(shared: dict[str, Engine]) -> None:
    llama, vllm = shared["llama"], shared["vllm"]
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


def test_content_in_parts_and_empty_content_are_read(shared: dict[str, Engine]) -> None:
    parts = [{"type": "text", "text": "hel"}, {"type": "image_url"}, {"type": "text", "text": "lo"}]
    messages = [{"role": "system", "content": None}, {"role": "user", "content": parts}]
    document = complete(shared["llama"], chat(messages=messages)).json()
    text = b"<|im_start|>system\n<|im_end|>\n<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
    assert document["usage"]["prompt_tokens"] == -(-len(text) // 4)


@pytest.mark.parametrize("dialect", ["llama", "vllm"])
def test_key_and_loading(start: EngineFactory, dialect: str) -> None:
    engine = start("--api-key", "secret", "--dialect", dialect, *FAST)
    assert complete(engine, chat()).status == 401
    assert ask(engine, "/v1/models", Authorization="Bearer wrong").status == 401
    assert ask(engine, "/v1/models", Authorization="Bearer secret").status == 200
    assert ask(engine, "/health").status == 200
    loading = start("--loading-s", 1000, "--dialect", dialect)
    for reply in (ask(loading, "/health"), ask(loading, "/v1/models"), complete(loading, chat())):
        assert reply.status == 503 and reply.json()["error"]["message"] == "Loading model"
    soon = start("--loading-s", 0.2, "--dialect", dialect, *FAST)
    wait_until(lambda: ask(soon, "/health").status == 200)
    assert complete(soon, chat()).status == 200


@pytest.mark.parametrize("queue", [0, 1])
def test_beyond_the_slots_and_the_queue_requests_are_refused(start: EngineFactory, queue: int) -> None:
    engine = start("--slots", 1, "--max-queue", queue, *ENDLESS)
    with contextlib.ExitStack() as streams:
        for _ in range(1 + queue):
            streams.enter_context(open_stream(engine.port, streamed(max_tokens=10_000)))
        wait_until(lambda: busy_and_waiting(engine) == (1, queue))
        reply = complete(engine, streamed())
        assert reply.status == 429 and reply.json()["error"]["type"] == "rate_limit_error"


# --- faults ---------------------------------------------------------------------------------------------------


def test_each_nth_request_fails_half_way(start: EngineFactory) -> None:
    for dialect, done in (("llama", False), ("vllm", True)):
        engine = start("--fail-every", 2, "--dialect", dialect, *FAST)
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
        ends = [(line["finish"], line["status"]) for line in engine.stop()]
        assert ends == [("length", 200), ("error", 200), ("length", 200), ("error", 500)]


@pytest.mark.parametrize("dialect", ["llama", "vllm"])
def test_each_nth_answer_is_aborted_or_names_another_model(start: EngineFactory, dialect: str) -> None:
    engine = start("--abort-every", 2, "--other-model-every", 3, "--dialect", dialect, *FAST)
    seen = []
    for _ in range(6):
        reply = complete(engine, streamed(max_tokens=8))
        (model,) = {event["model"] for event in reply.events() if event}
        reasons = [event["choices"][0]["finish_reason"] for event in reply.events() if event and event["choices"]]
        (reason,) = filter(None, reasons)
        assert reply.events()[-1] is None
        seen.append((len(reply.texts()), reason, model))
    whole, broken = (8, "length"), (4, "abort")
    assert [one[:2] for one in seen] == [whole, broken] * 3
    assert [one[2] for one in seen] == ["sim-chat", "sim-chat", "sim-chat-fallback"] * 2
    assert [line["finish"] for line in engine.stop()] == ["length", "abort"] * 3


def test_a_stalled_request_sends_comments_only_and_keeps_its_slot(
    start: EngineFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sim, "KEEP_ALIVE_S", 0.01)
    engine = start("--stall-every", 1, "--slots", 1, *FAST)
    with open_stream(engine.port, streamed(max_tokens=8)) as sock:
        data = read_until(sock, b"\r\n:\n\n\r\n", times=5)
        assert data.count(b'"content":"') == 4 and b"[DONE]" not in data
        assert busy_and_waiting(engine) == (1, 0)
    wait_until(lambda: busy_and_waiting(engine) == (0, 0))
    (record,) = engine.stop()
    assert (record["finish"], record["output_tokens"], len(record["sends"])) == ("cancelled", 4, 4)


def test_a_client_that_leaves_frees_its_slot_for_the_next(start: EngineFactory) -> None:
    engine = start("--slots", 1, *ENDLESS)
    with open_stream(engine.port, streamed(max_tokens=10_000)) as first:
        read_until(first, b'"content":"', times=2)
        with open_stream(engine.port, streamed()) as second:
            wait_until(lambda: busy_and_waiting(engine) == (1, 1))
            first.close()
            assert read_until(second, b"[DONE]").count(b'"content":"') == 5
    assert [record["finish"] for record in engine.stop()] == ["cancelled", "length"]


def test_a_client_that_leaves_the_queue_is_not_served(start: EngineFactory) -> None:
    engine = start("--slots", 1, *ENDLESS)
    with open_stream(engine.port, streamed(max_tokens=10_000)):
        wait_until(lambda: busy_and_waiting(engine) == (1, 0))
        with open_stream(engine.port, streamed()):
            wait_until(lambda: busy_and_waiting(engine) == (1, 1))
        wait_until(lambda: busy_and_waiting(engine) == (1, 0))
    record = engine.stop()[1]
    assert (record["finish"], record["admitted"], record["sends"]) == ("cancelled", None, [])


# --- connections ----------------------------------------------------------------------------------------------


def test_a_connection_serves_one_request_and_then_ends(shared: dict[str, Engine]) -> None:
    for engine in shared.values():
        for document in (streamed(), chat()):
            with open_stream(engine.port, document) as sock:
                sock.sendall(b"GET /health HTTP/1.1\r\n\r\n")  # sent ahead: not answered
                data = read_to_end(sock)
                assert data.count(b"HTTP/1.1 200 OK") == 1 and b"\r\nConnection: close\r\n" in data
                assert data.endswith(b"0\r\n\r\n") is bool(document.get("stream"))


def test_what_is_no_http_is_refused_and_the_server_lives_on(shared: dict[str, Engine]) -> None:
    engine = shared["llama"]
    for data in (b"\x16\x03\x01 tls?\r\n\r\n", b"A" * 200_000):
        with socket.create_connection(("127.0.0.1", engine.port), timeout=60) as sock:
            sock.sendall(data)
            reply = read_to_end(sock)
            assert b" 400 " in reply.split(b"\r\n")[0] and b'"error"' in reply
    assert complete(engine, chat()).status == 200


def test_every_chunk_is_framed_and_carries_whole_events(shared: dict[str, Engine]) -> None:
    for engine in shared.values():
        with open_stream(engine.port, streamed(max_tokens=70)) as sock:
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
    "id", "status", "finish", "slot", "prompt_tokens", "cached_tokens", "output_tokens", "batch", "connected",
    "arrived", "request_read", "admitted", "prefilled", "sends", "finished",
}  # fmt: skip


def run_many(engine: Engine, documents: Sequence[dict[str, Any]]) -> None:
    """All at once, each on its own connection, read to their ends."""
    with contextlib.ExitStack() as streams:
        sockets = [streams.enter_context(open_stream(engine.port, document)) for document in documents]
        for sock in sockets:
            read_until(sock, b"[DONE]")


def test_the_log_follows_the_model(start: EngineFactory) -> None:
    a_s, b_s, rate = 0.004, 0.0005, 2000
    options = ("--a-ms", a_s * 1e3, "--b-ms", b_s * 1e3, "--prefill-tok-s", rate, "--slots", 4, "--cache", "none")
    engine = start(*options)
    before = time.perf_counter()
    run_many(engine, [streamed(f"{k}" * 40, max_tokens=10 + k) for k in range(10)])
    after = time.perf_counter()
    records = engine.stop()
    assert [record["output_tokens"] for record in records] == [len(record["sends"]) for record in records]
    for record in records:
        assert set(record) == LOG_FIELDS and record["status"] == 200
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
        # `finished` is stamped after the last write, when the client may have its answer already
        assert before <= record["connected"] and record["sends"][-1] <= after
    by_arrival = sorted(records, key=lambda record: float(record["request_read"]))
    waited = [record["admitted"] for record in by_arrival if record["admitted"] > record["arrived"]]
    assert len(waited) == 6 and waited == sorted(waited), "first come, first served"


@pytest.mark.parametrize(("cache", "share"), [("slot", 0.9), ("pool", 0.9), ("none", 0.0)])
def test_cached_shares_are_as_configured(start: EngineFactory, cache: str, share: float) -> None:
    engine = start("--cache", cache, *FAST)
    preamble = "be brief. " * 400
    for k in range(4):
        complete(engine, streamed(f"{preamble} question {k}"))
        complete(engine, streamed(f"{k} tag {preamble}"))
    records = engine.stop()
    shared, unique = (records[start::2][1:] for start in (0, 1))
    assert all(record["cached_tokens"] >= share * record["prompt_tokens"] for record in shared)
    assert all(record["cached_tokens"] <= 0.1 * record["prompt_tokens"] for record in unique)
    assert share or all(record["cached_tokens"] == 0 for record in shared)


def test_the_log_is_written_without_being_asked_once_nothing_runs(start: EngineFactory) -> None:
    engine = start(*FAST)
    run_many(engine, [streamed()] * 5)
    wait_until(lambda: len(engine.log()) == 5)


# ------------------------------------------------------------------------------------------------------------
# As a program
# ------------------------------------------------------------------------------------------------------------


def test_sigterm_logs_what_was_under_way_and_the_log_is_strict_json(sim_engine: SimEngineFactory) -> None:
    engine = sim_engine(*ENDLESS)
    for document, marker in ((streamed(max_tokens=2), b"[DONE]"), (streamed(max_tokens=10_000), b'"content":"')):
        with open_stream(engine.port, document) as sock:
            read_until(sock, marker, times=2 if marker != b"[DONE]" else 1)
            if marker != b"[DONE]":
                assert engine.stop() == 0
                assert b"[DONE]" not in read_to_end(sock)

    def refuse(name: str) -> None:
        raise AssertionError(name)

    text = engine.log_path.read_text(encoding="utf-8")
    records = [json.loads(line, parse_constant=refuse) for line in text.splitlines()]
    assert text.endswith("\n") and [record["finish"] for record in records] == ["length", "shutdown"]
    assert records[1]["output_tokens"] == len(records[1]["sends"]) >= 2
    assert engine.stderr() == ""


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
    ],
)
def test_wrong_arguments_get_one_line_and_exit_2(capsys: pytest.CaptureFixture[str], arguments: list[str]) -> None:
    assert sim.main(arguments) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("simulated_engine.py: ") and err.count("\n") == 1


def test_a_port_in_use_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        assert sim.main(["--port", str(taken.getsockname()[1])]) == 2
    err = capsys.readouterr().err
    assert "in use" in err and err.count("\n") == 1


def test_version_is_that_of_the_load_generator(run_program: RunProgram) -> None:
    said = run_program("scripts/simulated_engine.py", "--version").stdout.split()
    assert said == ["simulated_engine.py", run_program("load_test.py", "--version").stdout.split()[1]]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")
def test_output_that_cannot_be_printed_is_said() -> None:
    command = [sys.executable, str(ROOT / "scripts" / "simulated_engine.py"), "--port", "0"]
    with open("/dev/full", "w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, encoding="utf-8", timeout=60)
    assert done.returncode == 1 and done.stderr.startswith("simulated_engine.py: cannot write the output: No space")
    assert done.stderr.count("\n") == 1
