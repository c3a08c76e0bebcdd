#!/usr/bin/env python3
"""A server with a known step time that stands for llama-server or vLLM: it loads no model and answers when it says.

A load generator can be held against a known truth, a curve be taught without a GPU, and a client meet an odd server.

examples:
  python3 scripts/simulated_engine.py --port 8000 --slots 20
  python3 scripts/simulated_engine.py --dialect vllm --a-ms 25 --b-ms 2 --slots 20 --log requests.jsonl
  python3 scripts/simulated_engine.py --slots 24 --max-queue 0     # more than 24 in flight: 429

the model:
  A request waits, first come first served, for a free slot. Its prefill then takes (prompt - cached) / prefill rate.
  After that it joins the batch at the next step. A step takes a + b x c, c being the sequences in it, and gives each of
  them one token at its end. Steps follow each other without a pause, and without drift: a step starts when the one
  before it was due to end, however late the program woke up (a timer is up to 1 ms late). A prefill delays no step.
  So TTFT = queueing + prefill + the rest of the step under way + one step, and TPOT = a + b x c.
  Tokens are a toy: one per 4 bytes of the messages as UTF-8 text, each message wrapped as <|im_start|>role ...
  <|im_end|>. Byte-identical beginnings are token-identical. An output token is a short piece of a word. A sequence
  stays in the prefix cache with its answer, so the next turn of a conversation finds all of the turn before.

output:
  The first line on standard output is "listening on http://HOST:PORT/v1". Each connection serves one request.
  The log has one JSON line per completion request, written when nothing is under way and at the end. Times are
  readings of time.perf_counter(), on Linux one clock for all processes; what did not happen is null:
  id, status, connected (the connection was accepted), arrived (the request's last bytes reached this machine's network
  stack, where Linux says so, else as request_read; the model counts from here), request_read; and unless it was refused
  finish (length, stop, error, abort, cancelled, shutdown), slot, prompt_tokens, cached_tokens, output_tokens, batch
  (for each token the c of its step), admitted (it had a slot), prefilled, sends (one for each text delta, taken just
  before the write; not streamed: one), finished (the answer's last bytes were written).

exit codes: 0 after SIGTERM or Ctrl-C; 2 for bad arguments, an address or a file that cannot be used.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import json
import math
import os
import random
import signal
import socket
import struct
import sys
import time
import zlib
from collections import OrderedDict, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from http import HTTPStatus
from typing import IO, Any, Callable, NamedTuple, NoReturn, Union

PROGRAM = "simulated_engine.py"
TOOL_VERSION = "2.0.0"  # the same in all programs
TOKEN_BYTES = 4  # near what Qwen3's tokeniser makes of English (about 4.2 bytes per token)
BLOCK_TOKENS = 16  # vLLM's default block on a GPU
SLOT_SIMILARITY = 0.10  # llama-server's --slot-prompt-similarity
MAX_REQUEST_BYTES = 64 * 1024 * 1024
BACKLOG = 16384  # the kernel lowers it to net.core.somaxconn
KEEP_ALIVE_S = 1.0  # between the comments of a stalled answer

# Linux: SO_TIMESTAMPNS. The kernel stamps what arrives, so that a busy program still knows when a request came.
SO_TIMESTAMPNS = 35
TIMESPEC = struct.Struct("@ll")

# Pieces that follow one another for ever. Two of them need escapes or several bytes per character, as real text does.
WORDS = (
    " the", " server", " keeps", " a", " queue", " of", " requests", " and", " each", " step", " gives", " every",
    " running", " sequence", " one", " token", ".", "\n", " So", " more", " users", " share", " the", " same", " reads",
    " of", " memory", " —", " until", " compute", " binds", ",",
)  # fmt: skip

Clock = Callable[[], float]

# ----------------------------------------------------------------------------------------------------------------
# Errors and options
# ----------------------------------------------------------------------------------------------------------------


class UsageError(Exception):
    """Arguments, an address or a file that the program cannot work with; one line that says what to do."""


class ApiError(Exception):
    """A request that is answered with an error document. `kind` is looked up in the dialect's table of types;
    vLLM names the field at fault, `param`, and llama-server adds the `sizes`."""

    def __init__(self, kind: str, message: str, param: str | None = None, **sizes: int) -> None:
        super().__init__(message)
        self.kind, self.param, self.sizes = kind, param, sizes


def whole(least: int, most: int = 2**31 - 1) -> Callable[[str], int]:
    """An argument type: an integer in a range."""

    def parse(text: str) -> int:
        value = int(text)
        if not least <= value <= most:
            raise argparse.ArgumentTypeError(f"{value} is not between {least} and {most}")
        return value

    parse.__name__ = "whole number"  # argparse says: invalid whole number value: 'x'
    return parse


def number(least: float, *, above: bool = False) -> Callable[[str], float]:
    """An argument type: a finite number, at least `least` or above it."""

    def parse(text: str) -> float:
        value = float(text)
        if not math.isfinite(value) or value < least or (above and value == least):
            raise argparse.ArgumentTypeError(f"{text} is not {'above' if above else 'at least'} {least:g} and finite")
        return value

    parse.__name__ = "number"
    return parse


def option(default: object, kind: object, text: str) -> Any:
    """One row of the table below. `kind`: an argument type, a tuple of choices, or bool for a switch."""
    return field(default=default, metadata={"kind": kind, "text": text})


@dataclass(frozen=True)
class Options:
    """The command line, checked. An option is its field's name with hyphens; None is "never" or "no limit"."""

    host: str = option("127.0.0.1", str, "address to listen on")
    port: int = option(0, whole(0, 65535), "port, 0 for any free one")
    log: str | None = option(None, str, "append a JSON line per completion request to this file")
    dialect: str = option("llama", ("llama", "vllm"), "shape of events, errors and endpoints")
    model: str = option("sim-chat", str, "the name it serves; vllm answers 404 to any other")
    api_key: str | None = option(None, str, 'answer 401 without "Authorization: Bearer KEY"')
    loading_s: float = option(0.0, number(0), "answer 503 for so many seconds after the start")

    a_ms: float = option(20.0, number(0), "fixed part of a step")
    b_ms: float = option(1.5, number(0), "part of a step per sequence in it")
    prefill_tok_s: float = option(5000.0, number(0, above=True), "prompt tokens per second of one prefill")
    prefill_blocks: bool = option(False, bool, "a prefill stops every decode (no chunked prefill), one at a time")
    slots: int = option(8, whole(1, 100_000), "sequences admitted at once")
    context: int = option(
        4096,
        whole(16),
        "tokens per sequence, prompt and output. llama: a prompt that leaves no room gets 400, an output is cut; "
        "vllm: prompt + max_tokens above it gets 400",
    )
    max_queue: int | None = option(None, whole(0), "answer 429 when so many wait already; 0: none beyond the slots")
    cache: str | None = option(
        None,
        ("slot", "pool", "none"),
        "prefix cache (default: slot for llama, pool for vllm). slot: each slot keeps its last sequence, and a request "
        "goes to the free slot that shares most with it if that is above a tenth of the prompt, else to the least "
        "recently used one. pool: full blocks of 16 tokens, each known by all before it, shared by every slot",
    )
    saturate_at: int | None = option(None, whole(1), "above C sequences a step takes 1 + F x (c - C) / C times as long")
    saturate_factor: float = option(2.0, number(0, above=True), "that F; from 1 on throughput falls as c grows")
    warmup_requests: int = option(0, whole(0), "until so many requests are answered, the engine is slower")
    warmup_factor: float = option(3.0, number(1), "by this factor, steps and prefills")
    drift_factor: float = option(1.0, number(0, above=True), "steps and prefills slow down evenly to this factor")
    drift_steps: int = option(1000, whole(1), "in so many steps, and then stay there")
    noise_percent: float = option(0.0, number(0), "standard deviation of the step time, normal, in per cent")
    noise_requests: int = option(0, whole(0), "one draw holds for N requests, a run's noise; 0: a draw for each step")

    reasoning: str = option(
        "none",
        ("none", "reasoning_content", "reasoning", "hidden"),
        "the field of the first tokens, unless chat_template_kwargs.enable_thinking is false; hidden: they take their "
        "steps and stand in usage, and are not sent",
    )
    reasoning_tokens: int = option(32, whole(1), "how many tokens that is")
    early_stop: int | None = option(None, whole(1), "stop after 1 to N tokens, by prompt and seed; not with ignore_eos")
    seed: int = option(0, whole(0), "seed of that choice and of the noise")
    tokens_per_delta: int = option(1, whole(1), "tokens in one event, as with speculative decoding")
    deltas_per_write: int = option(1, whole(1), "events that leave together, as behind a buffering proxy")
    content_parts: bool = option(False, bool, 'text as a list of parts: [{"type": "text", "text": ...}]')
    no_usage: bool = option(False, bool, "send no usage block")
    no_prompt_details: bool = option(False, bool, "no cached token count in it")
    null: bool = option(False, bool, "no engine, for measuring a client: max_tokens tokens at once in one write")

    fail_every: int | None = option(None, whole(1), "each Nth completion request ends half-way in an error event")
    stall_every: int | None = option(None, whole(1), "each Nth falls silent half-way, but for keep-alive comments")
    abort_every: int | None = option(None, whole(1), 'each Nth ends half-way with finish_reason "abort"')
    other_model_every: int | None = option(None, whole(1), 'each Nth names another model: the served one + "-fallback"')

    def __post_init__(self) -> None:
        if self.a_ms + self.b_ms <= 0:
            raise UsageError("--a-ms and --b-ms are both 0, so a step takes no time; give one of them, or --null")
        if not self.model:
            raise UsageError("--model: the name is empty; give one")

    @property
    def cache_kind(self) -> str:
        return self.cache or ("slot" if self.dialect == "llama" else "pool")

    def step_s(self, sequences: int) -> float:
        """Seconds of one batch step with this many sequences in it, warm, without drift and noise.

        >>> round(Options(a_ms=20, b_ms=1.5).step_s(10), 6)
        0.035
        >>> round(Options(a_ms=20, b_ms=1.5, saturate_at=8, saturate_factor=1).step_s(16), 6)
        0.088
        """
        base_s = (self.a_ms + self.b_ms * sequences) / 1e3
        if self.saturate_at is None or sequences <= self.saturate_at:
            return base_s
        return base_s * (1.0 + self.saturate_factor * (sequences - self.saturate_at) / self.saturate_at)

    def ending(self, number: int, limit: int, prompt: bytes, ignore_eos: bool) -> tuple[int, str]:
        """After how many tokens the answer to the request of this number ends, and how.

        >>> [Options(fail_every=2).ending(n, 10, b"", False) for n in (1, 2)]
        [(10, 'length'), (5, 'error')]
        """
        faults = ((self.fail_every, "error"), (self.stall_every, "stall"), (self.abort_every, "abort"))
        for every, name in faults:
            if every is not None and number % every == 0:
                return max(1, limit // 2), name
        if self.early_stop is not None and not ignore_eos:
            stop = 1 + zlib.crc32(prompt, self.seed & 0xFFFFFFFF) % self.early_stop
            if stop <= limit:
                return stop, "stop"
        return limit, "length"


# ----------------------------------------------------------------------------------------------------------------
# The toy tokeniser and the request
# ----------------------------------------------------------------------------------------------------------------


def words(first: int, last: int) -> str:
    """The text of output tokens first to last, counted from 1."""
    return "".join(WORDS[k % len(WORDS)] for k in range(first, last + 1))


def count_tokens(prompt: bytes) -> int:
    """Tokens of a rendered prompt: one per 4 bytes, the last one may be shorter.

    >>> count_tokens(b"12345678"), count_tokens(b"123456789")
    (2, 3)
    """
    return -(-len(prompt) // TOKEN_BYTES)


def common_tokens(one: bytes, other: bytes) -> int:
    """Tokens that two rendered prompts share at their start.

    >>> common_tokens(b"abcdEFGHijk", b"abcdEFGHxyz"), common_tokens(b"abcdef", b"abcdef"), common_tokens(b"ab", b"abc")
    (2, 2, 0)
    """
    if one == other:
        return count_tokens(one)
    low, high = 0, min(len(one), len(other)) // TOKEN_BYTES
    while low < high:  # largest k whose first k tokens agree
        middle = (low + high + 1) // 2
        if one[: middle * TOKEN_BYTES] == other[: middle * TOKEN_BYTES]:
            low = middle
        else:
            high = middle - 1
    return low


def message_text(content: object) -> str:
    """The text of a message's content: a string, a list of text parts, or nothing."""
    if isinstance(content, list):
        parts = [part.get("text") for part in content if isinstance(part, dict) and part.get("type") == "text"]
        return "".join(part for part in parts if isinstance(part, str))
    if content is not None and not isinstance(content, str):
        raise ApiError("invalid", "a message's content must be a string or a list of parts", "messages")
    return content or ""


def render_prompt(messages: object, tools: object = None) -> bytes:
    """The messages as one text, the way a chat template does it; what the tokens are counted on."""
    if not isinstance(messages, list) or not messages:
        raise ApiError("invalid", "'messages' must be a list with at least one message", "messages")
    lines = [f"<|im_start|>tools\n{json.dumps(tools)}<|im_end|>\n"] if tools else []
    for message in messages:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise ApiError("invalid", "each message must be an object with a 'role'", "messages")
        lines.append(f"<|im_start|>{message['role']}\n{message_text(message.get('content'))}<|im_end|>\n")
    lines.append("<|im_start|>assistant\n")
    return "".join(lines).encode("utf-8", "surrogatepass")


@dataclass(frozen=True)
class ChatRequest:
    """What a completion request asks for. `max_tokens` is None where it does not say."""

    model: str | None
    prompt: bytes
    prompt_tokens: int
    max_tokens: int | None
    stream: bool
    include_usage: bool
    ignore_eos: bool
    thinking: bool


def read_max_tokens(document: Mapping[str, Any]) -> int | None:
    """`max_completion_tokens`, else `max_tokens`; None where neither stands."""
    for name in ("max_completion_tokens", "max_tokens"):
        value = document.get(name)
        if isinstance(value, int) and not isinstance(value, bool):
            return value
        if value is not None:
            raise ApiError("invalid", f"{name} must be a whole number, got {value!r}.", name)
    return None


def parse_chat_request(body: bytes) -> ChatRequest:
    """Read a completion request's body; ApiError says what is wrong with it."""
    try:
        document = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise ApiError("invalid", f"the request body is not JSON: {error}") from None
    if not isinstance(document, dict):
        raise ApiError("invalid", "the request body must be a JSON object")
    prompt = render_prompt(document.get("messages"), document.get("tools"))
    stream_options, template = document.get("stream_options"), document.get("chat_template_kwargs")
    return ChatRequest(
        model=document["model"] if isinstance(document.get("model"), str) else None,
        prompt=prompt,
        prompt_tokens=count_tokens(prompt),
        max_tokens=read_max_tokens(document),
        stream=document.get("stream") is True,
        include_usage=isinstance(stream_options, dict) and stream_options.get("include_usage") is True,
        ignore_eos=document.get("ignore_eos") is True,
        thinking=not (isinstance(template, dict) and template.get("enable_thinking") is False),
    )


# ----------------------------------------------------------------------------------------------------------------
# Slots and their prefix caches
# ----------------------------------------------------------------------------------------------------------------


class Slots:
    """The free slots, least recently used first, each with the time since when; no cache (`--cache none`).

    At least the last prompt token is always computed: its output is what the first token is drawn from.
    """

    def __init__(self, options: Options) -> None:
        # Of those never used llama-server takes the last.
        self.free: OrderedDict[int, float] = OrderedDict.fromkeys(reversed(range(options.slots)), -math.inf)

    def choose(self, prompt: bytes, tokens: int) -> tuple[int, int, float]:
        """A free slot, how many prompt tokens need no prefill, and when those will have been computed."""
        return next(iter(self.free)), 0, 0.0

    def keep(self, slot: int, text: bytes, computed_at: float) -> None:
        """The slot's sequence is now this text, computed at that time."""
        return


class SlotCache(Slots):
    """llama-server: each slot keeps its last sequence, and a request reuses what the slot it lands on holds."""

    def __init__(self, options: Options) -> None:
        super().__init__(options)
        self._held = [b""] * options.slots

    def choose(self, prompt: bytes, tokens: int) -> tuple[int, int, float]:
        least = prompt[: (int(SLOT_SIMILARITY * tokens) + 1) * TOKEN_BYTES]  # what a similar slot shares at least
        similar = [slot for slot in self.free if self._held[slot].startswith(least)]
        slot = max(similar, key=lambda slot: common_tokens(prompt, self._held[slot]), default=next(iter(self.free)))
        return slot, min(common_tokens(prompt, self._held[slot]), tokens - 1), 0.0

    def keep(self, slot: int, text: bytes, computed_at: float) -> None:
        self._held[slot] = text


class PoolCache(Slots):
    """vLLM: full blocks of tokens, each known by its content and all before it, in one pool; oldest use evicted."""

    def __init__(self, options: Options) -> None:
        super().__init__(options)
        self._capacity = options.slots * options.context // BLOCK_TOKENS
        self._computed_at: OrderedDict[int, float] = OrderedDict()

    @staticmethod
    def _blocks(text: bytes) -> list[int]:
        size = BLOCK_TOKENS * TOKEN_BYTES
        chain, blocks = 0, []
        for end in range(size, len(text) + 1, size):
            chain = hash((chain, text[end - size : end]))
            blocks.append(chain)
        return blocks

    def choose(self, prompt: bytes, tokens: int) -> tuple[int, int, float]:
        hits, usable_from = 0, 0.0
        for block in self._blocks(prompt)[: (tokens - 1) // BLOCK_TOKENS]:
            if block not in self._computed_at:
                break
            hits += 1
            usable_from = max(usable_from, self._computed_at[block])
        return next(iter(self.free)), hits * BLOCK_TOKENS, usable_from

    def keep(self, slot: int, text: bytes, computed_at: float) -> None:
        for block in self._blocks(text):
            self._computed_at.setdefault(block, computed_at)
            self._computed_at.move_to_end(block)
        while len(self._computed_at) > self._capacity:
            self._computed_at.popitem(last=False)


CACHES: Mapping[str, type[Slots]] = {"slot": SlotCache, "pool": PoolCache, "none": Slots}

# ----------------------------------------------------------------------------------------------------------------
# The batch engine: no sockets, no waiting; a clock is read, and someone calls advance() when due() says so
# ----------------------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class Job:
    """One request as the batch sees it. `limit` tokens are made, then it ends with `ending`: length, stop, error,
    abort; or stall, which leaves the batch but keeps the slot. Times are on the engine's clock."""

    id: int
    prompt: bytes
    prompt_tokens: int
    arrived: float
    limit: int
    ending: str
    on_token: Callable[[int], None] = lambda made: None
    on_end: Callable[[str], None] = lambda ending: None
    slot: int | None = None
    cached: int | None = None
    admitted: float | None = None
    ready_at: float | None = None  # end of prefill
    prefill_s: float = 0.0
    first_at: float | None = None  # when its first and its latest token were due
    last_at: float | None = None
    made: int = 0
    batch: list[int] = field(default_factory=list)

    def run_at_once(self) -> None:
        """The null server's model: everything is there when the request is."""
        self.admitted = self.ready_at = self.first_at = self.last_at = self.arrived
        while self.made < self.limit:
            self.made += 1
            self.on_token(self.made)
        self.on_end(self.ending)


@dataclass
class Counters:
    """Totals since the start, for /metrics. Prompt tokens are counted at the end of a prefill."""

    prompt_computed: int = 0
    prompt_cached: int = 0
    prompt_s: float = 0.0
    predicted: int = 0
    steps: int = 0
    busy_slots: int = 0  # summed over the steps
    preemptions: int = 0
    admitted: int = 0
    answered: int = 0
    queue_s: float = 0.0  # summed over the answered requests: until admitted
    first_token_s: float = 0.0  # and from there to the first token, which is where vLLM's "prefill" ends


class BatchEngine:
    """Slots, queue, prefills and steps. Times are seconds on `clock`.

    The owner calls submit() and cancel() as requests come and go, and advance() once the clock has reached due();
    one call handles one event. Events happen at the time they were due, whatever the clock says by then.
    """

    def __init__(self, options: Options, clock: Clock) -> None:
        self._options = options
        self._clock = clock
        self._slots = CACHES[options.cache_kind](options)
        self._prefilling: list[Job] = []  # beside the batch, each until its ready_at
        self._blocking: deque[Job] = deque()  # --prefill-blocks: prefills that wait for the batch
        self._batch: list[Job] = []
        self._under_way: Job | int = 0  # a blocking prefill's job, or the c of the step
        self._busy_until: float | None = None
        self._now = -math.inf  # time of the last event
        self._random = random.Random(options.seed)
        self._noise = (-1, 1.0)  # which draw this is, and its factor
        self.waiting: deque[Job] = deque()
        self.running: dict[int, Job] = {}  # by slot
        self.counters = Counters()

    def submit(self, job: Job) -> None:
        """Admit the request if a slot is free, else put it at the end of the queue."""
        self.waiting.append(job)
        self._admit(job.arrived)

    def cancel(self, job: Job) -> None:
        """The client went away, or the server stops: its slot is free at once and the next request gets it."""
        for place in (self.waiting, self._batch, self._blocking, self._prefilling):
            if job in place:
                place.remove(job)
        if job.slot is not None and self.running.get(job.slot) is job:
            self._release(job, self._clock())
            self._admit(self._clock())

    def due(self) -> float | None:
        """When the next event happens; None while nothing is under way."""
        if self._busy_until is not None:
            return self._busy_until
        ready = [job.ready_at for job in self._prefilling if job.ready_at is not None]
        return max(self._now, min(ready)) if ready else None

    def advance(self) -> None:
        """Handle the event that due() names: a step's end, a blocking prefill's end, or a first prefill's end."""
        at = self.due()
        if at is None:
            return
        self._now = at
        ended, self._under_way = self._under_way, 0
        if isinstance(ended, Job):
            if ended in self.running.values():  # not cancelled meanwhile
                self._join(ended)
        elif self._busy_until is not None:
            self._end_step(ended, at)
        self._start(at)

    def _pace(self) -> float:
        """The factor on steps and prefills now: warm-up, drift and noise."""
        options, count = self._options, self.counters
        factor = options.warmup_factor if count.answered < options.warmup_requests else 1.0
        factor *= 1.0 + (options.drift_factor - 1.0) * min(1.0, count.steps / options.drift_steps)
        if options.noise_percent:
            draw = (count.admitted - 1) // options.noise_requests if options.noise_requests else count.steps
            if draw != self._noise[0]:
                self._noise = draw, max(0.01, self._random.gauss(1.0, options.noise_percent / 100))
            factor *= self._noise[1]
        return factor

    def _admit(self, at: float) -> None:
        """Give free slots to those who wait, in their order."""
        while self.waiting and self._slots.free:
            job = self.waiting.popleft()
            self.counters.admitted += 1
            job.slot, job.cached, usable_from = self._slots.choose(job.prompt, job.prompt_tokens)
            job.admitted = max(at, self._slots.free.pop(job.slot))
            self.running[job.slot] = job
            job.prefill_s = (job.prompt_tokens - job.cached) / self._options.prefill_tok_s * self._pace()
            job.ready_at = max(job.admitted + job.prefill_s, usable_from)
            self._slots.keep(job.slot, job.prompt, job.ready_at)
            (self._blocking if self._options.prefill_blocks else self._prefilling).append(job)
            if self._blocking and self._busy_until is None:
                self._start(max(job.admitted, self._now))

    def _start(self, at: float) -> None:
        """Begin what comes next: a blocking prefill, else a step of everything that is ready, else nothing."""
        if self._blocking:
            job = self._blocking.popleft()
            self._under_way = job
            job.ready_at = self._busy_until = max(at, job.admitted or at) + job.prefill_s
            return
        before = len(self._batch)
        for job in [job for job in self._prefilling if job.ready_at is not None and job.ready_at <= at]:
            self._prefilling.remove(job)
            self._join(job)
        size = len(self._batch)
        if self._options.saturate_at is not None and size > before:
            self.counters.preemptions += max(0, size - max(before, self._options.saturate_at))
        self._under_way = size
        self._busy_until = at + self._options.step_s(size) * self._pace() if size else None

    def _join(self, job: Job) -> None:
        self._batch.append(job)
        self.counters.prompt_cached += job.cached or 0
        self.counters.prompt_computed += job.prompt_tokens - (job.cached or 0)
        self.counters.prompt_s += job.prefill_s

    def _end_step(self, size: int, at: float) -> None:
        """One token for each job of the batch, then the ends, then the freed slots' next requests."""
        self.counters.steps += 1
        self.counters.busy_slots += len(self.running)
        self.counters.predicted += len(self._batch)
        for job in self._batch:  # nothing in here changes the batch
            job.made += 1
            job.batch.append(size)
            job.last_at = at
            if job.made == 1:
                job.first_at = at
            job.on_token(job.made)
        ended = [job for job in self._batch if job.made >= job.limit]
        self._batch = [job for job in self._batch if job.made < job.limit]
        for job in ended:
            if job.ending != "stall":
                self.counters.answered += 1
                self.counters.queue_s += (job.admitted or at) - job.arrived
                self.counters.first_token_s += (job.first_at or at) - (job.admitted or at)
                self._release(job, at)
            job.on_end(job.ending)
        self._admit(at)

    def _release(self, job: Job, at: float) -> None:
        """Free the slot; what has been computed of its sequence stays in the cache."""
        assert job.slot is not None
        computed = job.prompt_tokens if job.ready_at is not None and job.ready_at <= at else job.cached or 0
        self._slots.keep(job.slot, job.prompt[: computed * TOKEN_BYTES] + words(1, job.made).encode(), at)
        del self.running[job.slot]
        self._slots.free[job.slot] = at


# ----------------------------------------------------------------------------------------------------------------
# Dialects: what llama-server and vLLM write, read from their sources (llama.cpp of autumn 2026, vLLM 0.28)
# ----------------------------------------------------------------------------------------------------------------

ENCODER = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), allow_nan=False)
Document = dict[str, Any]
Pages = Mapping[str, Callable[[], tuple[str, bytes]]]


def to_json(document: object) -> bytes:
    """Compact JSON; text beyond ASCII is written as it is, as both servers do."""
    return ENCODER.encode(document).encode("utf-8", "surrogatepass")


def metrics_text(rows: Iterable[tuple[str, str, float]], labels: str, form: Callable[[float], str]) -> bytes:
    """Prometheus text: kind, name and value of each sample; a summary's value stands for its _sum."""
    lines = [f"# TYPE {name} {kind}\n{name}{labels} {form(value)}\n" for kind, name, value in rows]
    return "".join(lines).encode()


class Answer(NamedTuple):
    """What a dialect needs to know of one answer to write it."""

    name: str  # chatcmpl-...
    created: int  # Unix time
    model: str
    request: ChatRequest
    job: Job


class Shared:
    """What both dialects have in common. Each has, beside it: `json_type`, `stream_type`, `headers` (sent with every
    answer), `early_head` (the response head leaves before the first token), `finish_on_text` (the finish reason goes
    with the last text, else in an event of its own), `kinds` (ApiError.kind -> status and type), `chat_paths`, `pages`
    (GET path -> content type and body); and error(), limit(), chunk(), tail() and failure()."""

    def __init__(self, options: Options, engine: BatchEngine) -> None:
        self.options, self.engine = options, engine

    def thinking(self, request: ChatRequest) -> int:
        """How many of the first tokens are thinking."""
        return self.options.reasoning_tokens if self.options.reasoning != "none" and request.thinking else 0

    def usage(self, answer: Answer) -> Document:
        prompt, made = answer.request.prompt_tokens, answer.job.made
        usage: Document = {"prompt_tokens": prompt, "completion_tokens": made, "total_tokens": prompt + made}
        if not self.options.no_prompt_details:
            usage["prompt_tokens_details"] = {"cached_tokens": answer.job.cached or 0}
        if self.options.reasoning == "hidden":
            usage["completion_tokens_details"] = {"reasoning_tokens": min(made, self.thinking(answer.request))}
        return usage

    def whole(self, answer: Answer, finish: str, message: Document) -> Document:
        """The answer that is not streamed."""
        choice = {"index": 0, "message": {"role": "assistant", **message}, "finish_reason": finish}
        head = {"id": answer.name, "object": "chat.completion", "created": answer.created, "model": answer.model}
        return {**head, "choices": [choice], **({} if self.options.no_usage else {"usage": self.usage(answer)})}


class LlamaDialect(Shared):
    """llama-server with --metrics and --slots."""

    json_type = "application/json; charset=utf-8"
    stream_type = "text/event-stream"
    headers = "Server: llama.cpp\r\nAccess-Control-Allow-Origin: \r\n"
    early_head = False
    finish_on_text = False
    chat_paths = ("/v1/chat/completions", "/chat/completions")
    kinds: Mapping[str, tuple[int, str]] = {
        "invalid": (400, "invalid_request_error"),
        "context": (400, "exceed_context_size_error"),
        "key": (401, "authentication_error"),
        "missing": (404, "not_found_error"),
        "method": (404, "not_found_error"),
        "busy": (429, "rate_limit_error"),  # llama-server itself never refuses; a gateway before it does
        "failed": (500, "server_error"),
        "loading": (503, "unavailable_error"),
    }

    def __init__(self, options: Options, engine: BatchEngine) -> None:
        super().__init__(options, engine)
        self.pages: Pages = {
            "/health": lambda: (self.json_type, b'{"status":"ok"}'),
            "/v1/models": lambda: (self.json_type, to_json(self._models())),
            "/slots": lambda: (self.json_type, to_json(self._slots())),
            "/props": lambda: (self.json_type, to_json(self._props())),
            "/metrics": lambda: ("text/plain; version=0.0.4", self._metrics()),
        }

    def error(self, error: ApiError) -> bytes:
        status, kind = self.kinds[error.kind]
        return to_json({"error": {"code": status, "message": str(error), "type": kind, **error.sizes}})

    def limit(self, request: ChatRequest) -> int:
        """The model's name is ignored; an output that meets the end of the context is cut there."""
        size, room = self.options.context, self.options.context - request.prompt_tokens
        if room <= 0:
            message = f"request ({request.prompt_tokens} tokens) exceeds the available context size ({size} tokens)"
            raise ApiError(
                "context", f"{message}, try increasing it", n_prompt_tokens=request.prompt_tokens, n_ctx=size
            )
        wanted = request.max_tokens if request.max_tokens is not None and request.max_tokens >= 0 else room
        return max(1, min(wanted, room))

    def _identity(self, answer: Answer) -> Document:
        kind = {"system_fingerprint": "b0-simulated", "object": "chat.completion.chunk"}
        return {"created": answer.created, "id": answer.name, "model": answer.model, **kind}

    def chunk(self, answer: Answer, delta: Document, finish: str | None) -> Document:
        if "role" in delta:
            delta = {"role": "assistant", "content": None}
        return {"choices": [{"finish_reason": finish, "index": 0, "delta": delta}], **self._identity(answer)}

    def tail(self, answer: Answer, finish: str) -> list[Document]:
        events = [self.chunk(answer, {}, finish)]
        if answer.request.include_usage and not self.options.no_usage:
            events.append({"choices": [], **self._identity(answer), "usage": self.usage(answer)})
        events[-1]["timings"] = self._timings(answer.job)
        return events

    def failure(self) -> list[bytes]:
        return [self.error(ApiError("failed", "Compute error. (simulated)"))]

    def whole(self, answer: Answer, finish: str, message: Document) -> Document:
        return {**super().whole(answer, finish, message), "timings": self._timings(answer.job)}

    def _timings(self, job: Job) -> Document:
        cached, prompt_ms = job.cached or 0, job.prefill_s * 1e3
        predicted_ms = ((job.last_at or 0.0) - (job.ready_at or 0.0)) * 1e3
        timings = {"cache_n": cached, "prompt_n": job.prompt_tokens - cached, "prompt_ms": round(prompt_ms, 3)}
        return {**timings, "predicted_n": job.made, "predicted_ms": round(predicted_ms, 3)}

    def _models(self) -> Document:
        meta = {"vocab_type": 2, "n_ctx": self.options.context, "n_ctx_train": 40960}
        entry = {"id": self.options.model, "object": "model", "created": int(time.time()), "owned_by": "llamacpp"}
        return {"object": "list", "data": [{**entry, "meta": meta}]}

    def _slots(self) -> list[Document]:
        slots = []
        for number in range(self.options.slots):
            job = self.engine.running.get(number)
            slot: Document = {"id": number, "n_ctx": self.options.context, "is_processing": job is not None}
            if job is not None:
                decoded = {"n_remain": job.limit - job.made, "n_decoded": job.made}
                slot.update(id_task=job.id, n_prompt_tokens_cache=job.cached, next_token=[decoded])
            slots.append(slot)
        return slots

    def _props(self) -> Document:
        names = {"model_alias": self.options.model, "build_info": "b0-simulated"}
        settings = {"n_ctx": self.options.context}
        return {"default_generation_settings": settings, "total_slots": self.options.slots, **names}

    def _metrics(self) -> bytes:
        count = self.engine.counters
        rows = [
            ("counter", "prompt_tokens_total", count.prompt_computed),  # without the cached ones
            ("counter", "prompt_tokens_cached_total", count.prompt_cached),
            ("counter", "prompt_seconds_total", count.prompt_s),
            ("counter", "tokens_predicted_total", count.predicted),
            ("counter", "n_decode_total", count.steps),
            ("gauge", "requests_processing", len(self.engine.running)),
            ("gauge", "requests_deferred", len(self.engine.waiting)),
            ("gauge", "n_busy_slots_per_decode", count.busy_slots / max(count.steps, 1)),
        ]
        # Six significant digits, as the C++ stream that llama-server writes its figures to.
        return metrics_text([(kind, f"llamacpp:{name}", value) for kind, name, value in rows], "", "{:g}".format)


class VllmDialect(Shared):
    """vLLM's OpenAI server with --enable-prompt-tokens-details."""

    json_type = "application/json"
    stream_type = "text/event-stream; charset=utf-8"
    headers = "server: uvicorn\r\n"
    early_head = True
    finish_on_text = True
    chat_paths = ("/v1/chat/completions",)
    kinds: Mapping[str, tuple[int, str]] = {
        "invalid": (400, "BadRequestError"),
        "context": (400, "BadRequestError"),
        "key": (401, "Unauthorized"),
        "model": (404, "NotFoundError"),
        "missing": (404, "Not Found"),
        "method": (405, "Method Not Allowed"),
        "busy": (429, "TooManyRequestsError"),
        "failed": (500, "InternalServerError"),
        "loading": (503, "ServiceUnavailableError"),
    }

    def __init__(self, options: Options, engine: BatchEngine) -> None:
        super().__init__(options, engine)
        self.pages: Pages = {
            "/health": lambda: ("", b""),
            "/version": lambda: (self.json_type, b'{"version":"0.28.0+simulated"}'),
            "/v1/models": lambda: (self.json_type, to_json(self._models())),
            "/metrics": lambda: ("text/plain; version=0.0.4; charset=utf-8", self._metrics()),
        }

    def error(self, error: ApiError) -> bytes:
        status, kind = self.kinds[error.kind]
        return to_json({"error": {"message": str(error), "type": kind, "param": error.param, "code": status}})

    def limit(self, request: ChatRequest) -> int:
        """The name must be the served one, and the output asked for must fit beside the prompt."""
        if request.model and request.model != self.options.model:
            raise ApiError("model", f"The model `{request.model}` does not exist.", "model")
        if request.max_tokens is not None and request.max_tokens < 1:
            raise ApiError("invalid", f"max_tokens must be at least 1, got {request.max_tokens}.", "max_tokens")
        context, prompt = self.options.context, request.prompt_tokens
        wanted = request.max_tokens if request.max_tokens is not None else 1
        if prompt + wanted > context:
            message = f"This model's maximum context length is {context} tokens. However, you requested {wanted} "
            message += f"output tokens and your prompt contains {prompt} input tokens; reduce one of them."
            raise ApiError("context", message, "input_tokens")
        return request.max_tokens if request.max_tokens is not None else context - prompt

    def _identity(self, answer: Answer) -> Document:
        kind = "chat.completion.chunk"
        return {"id": answer.name, "object": kind, "created": answer.created, "model": answer.model}

    def chunk(self, answer: Answer, delta: Document, finish: str | None) -> Document:
        choice: Document = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish}
        if "role" not in delta:
            choice.update({} if finish is None else {"stop_reason": None}, token_ids=None)
        return {**self._identity(answer), "choices": [choice]}

    def tail(self, answer: Answer, finish: str) -> list[Document]:
        if not answer.request.include_usage or self.options.no_usage:
            return []
        return [{**self._identity(answer), "choices": [], "usage": self.usage(answer)}]

    def failure(self) -> list[bytes]:
        return [self.error(ApiError("failed", "Internal server error (simulated)")), b"[DONE]"]

    def _models(self) -> Document:
        entry = {"id": self.options.model, "object": "model", "created": int(time.time()), "owned_by": "vllm"}
        return {"object": "list", "data": [{**entry, "max_model_len": self.options.context}]}

    def _metrics(self) -> bytes:
        engine, count = self.engine, self.engine.counters
        held = sum(job.prompt_tokens + job.made for job in engine.running.values())
        prompt_tokens = count.prompt_cached + count.prompt_computed
        rows: list[tuple[str, str, float]] = [
            ("gauge", "num_requests_running", len(engine.running)),
            ("gauge", "num_requests_waiting", len(engine.waiting)),
            ("gauge", "kv_cache_usage_perc", held / (self.options.slots * self.options.context)),
            ("counter", "prefix_cache_queries_total", prompt_tokens),
            ("counter", "prefix_cache_hits_total", count.prompt_cached),
            ("counter", "num_preemptions_total", count.preemptions),
            ("counter", "prompt_tokens_total", prompt_tokens),
            ("counter", "generation_tokens_total", count.predicted),
        ]
        # Of the two histograms only what a mean needs.
        for name, total in (("queue", count.queue_s), ("prefill", count.first_token_s)):
            rows.append(("untyped", f"request_{name}_time_seconds_sum", total))
            rows.append(("untyped", f"request_{name}_time_seconds_count", count.answered))
        labels = f'{{engine="0",model_name={to_json(self.options.model).decode()}}}'
        return metrics_text(((kind, f"vllm:{name}", float(value)) for kind, name, value in rows), labels, repr)


Dialect = Union[LlamaDialect, VllmDialect]
DIALECTS: Mapping[str, type[Dialect]] = {"llama": LlamaDialect, "vllm": VllmDialect}

# ----------------------------------------------------------------------------------------------------------------
# HTTP: one request and one answer per connection, one write system call per delta
# ----------------------------------------------------------------------------------------------------------------

TEXT = "\0"  # stands for the text in a delta's template
LAST_CHUNK = b"0\r\n\r\n"
FINISH_REASONS = ("length", "stop", "abort")  # the endings that the stream names


def chunked(payload: bytes) -> bytes:
    """One chunk of a streamed body.

    >>> chunked(b"data: x")
    b'7\\r\\ndata: x\\r\\n'
    """
    return b"%x\r\n%b\r\n" % (len(payload), payload)


def event(payload: bytes) -> bytes:
    """One server-sent event in a chunk of its own."""
    return chunked(b"data: %b\n\n" % payload)


class HttpRequest(NamedTuple):
    """One request. `path` is without the query; header names are in lower case."""

    method: str
    path: str
    headers: Mapping[str, str]
    body: bytes


def parse_http(data: bytes) -> HttpRequest | None:
    """A whole request from the first bytes of a connection; None while more is needed, ApiError where it is none."""
    head, end, body = data.partition(b"\r\n\r\n")
    if len(data) > MAX_REQUEST_BYTES or (not end and len(data) > 65536):
        raise ApiError("invalid", f"the request is longer than {len(data)} bytes")
    if not end:
        return None
    first, *lines = head.decode("latin-1").split("\r\n")
    parts = first.split(" ")
    if len(parts) != 3 or parts[2] not in ("HTTP/1.0", "HTTP/1.1"):
        raise ApiError("invalid", f"not an HTTP/1.1 request line: {first[:80]!r}")
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    length = headers.get("content-length", "0")
    if "transfer-encoding" in headers or not (length.isascii() and length.isdigit() and len(length) < 10):
        raise ApiError("invalid", f"send the body with a Content-Length, not {length[:80]!r} and not chunked")
    if len(body) < int(length):
        return None
    return HttpRequest(parts[0], parts[1].split("?", 1)[0], headers, body[: int(length)])


def read_stamped(sock: socket.socket, clock: Clock) -> tuple[bytes, float, float]:
    """Read once: bytes (none at the end), when the last of them arrived at this machine, when they were read.

    The kernel's stamp is wall-clock time; the age it gives is taken off `clock`. Without a stamp both times are equal.
    """
    if not sys.platform.startswith("linux"):
        data = sock.recv(65536)
        now = clock()
        return data, now, now
    data, ancillary, _, _ = sock.recvmsg(65536, 64)
    wall = time.time()
    now = clock()  # after it, so that a pause between the two makes an arrival too late and never too early
    for level, kind, value in ancillary:
        if level == socket.SOL_SOCKET and kind == SO_TIMESTAMPNS and len(value) >= TIMESPEC.size:
            seconds, nanoseconds = TIMESPEC.unpack_from(value)
            age = wall - (seconds + nanoseconds * 1e-9)
            if 0.0 <= age < 60.0:  # else the wall clock was set meanwhile
                return data, now - age, now
    return data, now, now


class Connection:
    """One client's socket: one request in, one answer out. Closing is left to the client, unless it has gone:
    a server that closes first could lose what the client has not read."""

    def __init__(self, server: Server, sock: socket.socket) -> None:
        self._server, self._sock = server, sock
        self._incoming = b""
        self._outgoing = bytearray()  # what the socket would not take yet
        self._answered = False  # the last byte is written, or on its way
        self._handled = False  # the request was read, or was none
        self.completion: Completion | None = None
        self.connected = self.arrived = self.read_at = server.clock()
        server.connections.add(self)
        server.loop.add_reader(sock, self._on_readable)
        self._on_readable()  # most clients write as soon as they are connected

    def _on_readable(self) -> None:
        try:
            data, arrived, read_at = read_stamped(self._sock, self._server.clock)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            data = b""
        if not data:
            self.close("cancelled")
        elif not self._handled:
            self.arrived, self.read_at = arrived, read_at
            self._incoming += data
            try:
                request = parse_http(self._incoming)
                if request is not None:
                    self._handled = True
                    self._server.handle(self, request)
            except ApiError as error:
                self._handled = True
                dialect = self._server.dialect
                self.respond(dialect.kinds[error.kind][0], dialect.json_type, dialect.error(error))

    def head(self, status: int, content_type: str, length: str) -> bytes:
        """Status line and headers; `length` is the header that says how long the body is."""
        kind = f"Content-Type: {content_type}\r\n" if content_type else ""
        first = f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\n"
        return f"{first}{self._server.dialect.headers}{kind}{length}\r\nConnection: close\r\n\r\n".encode("latin-1")

    def respond(self, status: int, content_type: str, body: bytes) -> None:
        """Write a whole answer."""
        self.write(self.head(status, content_type, f"Content-Length: {len(body)}") + body)
        self.end()

    def write(self, data: bytes) -> None:
        """Send now what the socket takes, the rest when it can."""
        if not self._outgoing:
            try:
                data = data[self._sock.send(data) :]
            except (BlockingIOError, InterruptedError):
                pass
            except OSError:
                self._server.loop.call_soon(self.close, "cancelled")
                return
            if not data:
                return
            self._server.loop.add_writer(self._sock, self._on_writable)
        self._outgoing += data

    def _on_writable(self) -> None:
        try:
            del self._outgoing[: self._sock.send(self._outgoing)]
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            self.close("cancelled")
            return
        if not self._outgoing:
            self._server.loop.remove_writer(self._sock)
            if self._answered:
                self.end()

    def end(self) -> None:
        """The answer is complete: say so to the client once everything has left."""
        self._answered = True
        if not self._outgoing:
            with contextlib.suppress(OSError):
                self._sock.shutdown(socket.SHUT_WR)

    def close(self, finish: str) -> None:
        """The client has gone, or the server stops; an answer under way is given up."""
        if self not in self._server.connections:
            return
        self._server.connections.discard(self)
        self._server.loop.remove_reader(self._sock)
        self._server.loop.remove_writer(self._sock)
        self._sock.close()
        if self.completion is not None:
            self.completion.give_up(finish)


class Completion:
    """The answer to one completion request: the engine's tokens become bytes, and at its end a log line."""

    def __init__(self, server: Server, connection: Connection, answer: Answer) -> None:
        self._server, self._connection, self._answer = server, connection, answer
        self._options, self._dialect = server.options, server.dialect
        self._job = answer.job
        self._thinking = server.dialect.thinking(answer.request)
        self._per_write = answer.job.limit if server.options.null else server.options.deltas_per_write
        self._lead = b""  # what must leave before the first delta
        self._held: list[bytes] = []  # deltas that wait to leave together
        self._templates: dict[tuple[str, str | None], list[bytes]] = {}  # what stands before and after a text
        self._sends: list[float] = []
        self._keep_alive_timer: asyncio.TimerHandle | None = None
        self._open = True
        self._job.on_end = self._ended
        if answer.request.stream:
            self._job.on_token = self._token
            self._lead = connection.head(200, self._dialect.stream_type, "Transfer-Encoding: chunked")
            if self._dialect.early_head:
                connection.write(self._lead)
                self._lead = b""
            self._lead += event(to_json(self._dialect.chunk(answer, {"role": "assistant", "content": ""}, None)))

    def _token(self, made: int) -> None:
        """The engine made one more token: send a delta when it is full, at the end, and where thinking ends."""
        last, thinks = made == self._job.limit, made <= self._thinking
        start, size = (0 if thinks else self._thinking), self._options.tokens_per_delta
        if (made - start) % size == 0 or made == self._thinking or last:
            first = start + (made - start - 1) // size * size + 1
            if not (thinks and self._options.reasoning == "hidden"):
                self._held.append(self._delta(self._options.reasoning if thinks else "content", first, made))
        if self._held and (len(self._held) >= self._per_write or last):
            data = self._lead + b"".join(self._held)
            self._lead = b""
            self._sends += [self._server.clock()] * len(self._held)
            self._held.clear()
            self._connection.write(data)

    def _delta(self, name: str, first: int, made: int) -> bytes:
        """The event with the text of tokens first to made."""
        ends_here = made == self._job.limit and self._dialect.finish_on_text and self._job.ending in FINISH_REASONS
        finish = self._job.ending if ends_here else None
        if (name, finish) not in self._templates:
            text: object = [{"type": "text", "text": TEXT}] if self._options.content_parts else TEXT
            template = to_json(self._dialect.chunk(self._answer, {name: text}, finish))
            self._templates[name, finish] = template.split(to_json(TEXT))
        before, after = self._templates[name, finish]
        return event(before + to_json(words(first, made)) + after)

    def _ended(self, ending: str) -> None:
        """The engine made the last token."""
        if ending == "stall":
            if self._answer.request.stream:
                self._keep_alive()
            return
        if self._answer.request.stream:
            payloads = [*map(to_json, self._dialect.tail(self._answer, ending)), b"[DONE]"]
            if ending == "error":
                payloads = self._dialect.failure()
            self._connection.write(self._lead + b"".join(map(event, payloads)) + LAST_CHUNK)
            self._connection.end()
        elif ending == "error":
            failure = ApiError("failed", "Internal server error (simulated)")
            self._connection.respond(500, self._dialect.json_type, self._dialect.error(failure))
        else:
            self._sends = [self._server.clock()]
            thought = min(self._thinking, self._job.made)
            message: Document = {"content": words(thought + 1, self._job.made)}
            if thought and self._options.reasoning != "hidden":
                message[self._options.reasoning] = words(1, thought)
            document = self._dialect.whole(self._answer, ending, message)
            self._connection.respond(200, self._dialect.json_type, to_json(document))
        self._log(ending)

    def _keep_alive(self) -> None:
        """The comment that llama-server sends while a stream is silent."""
        self._connection.write(self._lead + chunked(b":\n\n"))
        self._lead = b""
        self._keep_alive_timer = self._server.loop.call_later(KEEP_ALIVE_S, self._keep_alive)

    def give_up(self, finish: str) -> None:
        """The client has gone, or the server stops."""
        if self._keep_alive_timer is not None:
            self._keep_alive_timer.cancel()
        if self._open:
            self._server.engine.cancel(self._job)
            self._server.arm()
            self._log(finish)

    def _log(self, finish: str) -> None:
        job = self._job
        self._open = False
        self._server.log(
            self._connection, job.id, 500 if finish == "error" and not self._answer.request.stream else 200,
            finish=finish, slot=job.slot, prompt_tokens=job.prompt_tokens, cached_tokens=job.cached,
            output_tokens=job.made, batch=job.batch, admitted=job.admitted, prefilled=job.ready_at, sends=self._sends,
            finished=self._server.clock(),
        )  # fmt: skip


# ----------------------------------------------------------------------------------------------------------------
# The server: routes, the engine's timer, the log
# ----------------------------------------------------------------------------------------------------------------


class Server:
    """Everything of one running server. `clock` is time.perf_counter; the event loop's may have another zero."""

    def __init__(self, options: Options, loop: asyncio.AbstractEventLoop, log_file: IO[str] | None) -> None:
        self.options, self.loop = options, loop
        self.clock: Clock = time.perf_counter
        self.engine = BatchEngine(options, self.clock)
        self.dialect: Dialect = DIALECTS[options.dialect](options, self.engine)
        self.connections: set[Connection] = set()
        self._completions = 0
        self._ready_at = self.clock() + options.loading_s
        self._log_file = log_file
        self._log_lines: list[str] = []
        self._timer: asyncio.Handle | None = None

    def arm(self) -> None:
        """See to it that the engine's next event is handled when it is due."""
        if self._timer is not None:
            self._timer.cancel()
        due = self.engine.due()
        self._timer = None if due is None else self.loop.call_later(max(0.0, due - self.clock()), self._on_timer)

    def _on_timer(self) -> None:
        due = self.engine.due()
        if due is not None and due <= self.clock():
            self.engine.advance()  # one event: others get their turn between two late steps
        self.arm()

    def listen(self, listener: socket.socket) -> None:
        self.loop.add_reader(listener, self._on_connection, listener)

    def _on_connection(self, listener: socket.socket) -> None:
        try:
            sock, _address = listener.accept()
        except (BlockingIOError, InterruptedError, ConnectionAbortedError):
            return
        except OSError as error:
            complain(f"cannot accept a connection: {error.strerror} (ulimit -n?); trying again in 0.5 s")
            self.loop.remove_reader(listener)
            self.loop.call_later(0.5, self.listen, listener)
            return
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        Connection(self, sock)

    def handle(self, connection: Connection, http: HttpRequest) -> None:
        """Answer one request, or begin to; ApiError where it is refused."""
        pages, chat_paths, key = self.dialect.pages, self.dialect.chat_paths, self.options.api_key
        if key is not None and http.path != "/health" and http.headers.get("authorization") != f"Bearer {key}":
            raise ApiError("key", "Invalid API key")
        if self.clock() < self._ready_at:
            raise ApiError("loading", "Loading model")
        if http.path not in (*pages, *chat_paths):
            raise ApiError("missing", "Not Found")
        if http.method != ("POST" if http.path in chat_paths else "GET"):
            raise ApiError("method", "Method Not Allowed")
        if http.path in pages:
            connection.respond(200, *pages[http.path]())
            return
        self._completions += 1
        try:
            self._complete(connection, self._completions, http.body)
        except ApiError as error:
            self.log(connection, self._completions, self.dialect.kinds[error.kind][0])
            raise

    def _complete(self, connection: Connection, number: int, body: bytes) -> None:
        options, engine = self.options, self.engine
        request = parse_chat_request(body)
        limit = self.dialect.limit(request)
        waiting = len(engine.waiting)
        if options.max_queue is not None and waiting >= options.max_queue and len(engine.running) == options.slots:
            raise ApiError("busy", f"too many requests: {waiting} are waiting already")
        limit, ending = options.ending(number, limit, request.prompt, request.ignore_eos)
        job = Job(number, request.prompt, request.prompt_tokens, connection.arrived, limit, ending)
        other = options.other_model_every is not None and number % options.other_model_every == 0
        model = f"{options.model}-fallback" if other else options.model
        answer = Answer(f"chatcmpl-sim{number:029d}", int(time.time()), model, request, job)
        connection.completion = Completion(self, connection, answer)
        if options.null:
            job.run_at_once()
        else:
            engine.submit(job)
            self.arm()

    def log(self, connection: Connection, number: int, status: int, **facts: object) -> None:
        """A completion's line, written once nothing is under way: it costs time that a step needs."""
        if self._log_file is None:
            return
        stamps = {"connected": connection.connected, "arrived": connection.arrived, "request_read": connection.read_at}
        self._log_lines.append(json.dumps({"id": number, "status": status, **stamps, **facts}) + "\n")
        if not (self.engine.running or self.engine.waiting):
            self._write_log()

    def _write_log(self) -> None:
        lines, self._log_lines = self._log_lines, []
        try:
            if self._log_file is not None:
                self._log_file.writelines(lines)
                self._log_file.flush()
        except OSError as error:  # a full disk: serve on without a log
            complain(f"the log cannot be written any more: {error.strerror}; what follows is not logged")
            self._log_file = None

    def stop(self) -> None:
        """Give up what is under way and write the log to its end."""
        for connection in list(self.connections):
            connection.close("shutdown")
        self._write_log()


# ----------------------------------------------------------------------------------------------------------------
# Command line
# ----------------------------------------------------------------------------------------------------------------


def complain(message: str) -> None:
    """One line on standard error, which whoever started the server may have closed."""
    with contextlib.suppress(OSError, ValueError):
        print(f"{PROGRAM}: {message}", file=sys.stderr, flush=True)


class OneLineParser(argparse.ArgumentParser):
    """Reports a wrong argument in one line."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message}; see --help")


# The heading that stands before an option.
GROUPS = {"host": "listening", "a_ms": "the model", "reasoning": "the answers", "fail_every": "faults"}


def build_parser() -> argparse.ArgumentParser:
    """The fields of Options, in groups."""
    parser = OneLineParser(
        prog=PROGRAM, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--version", action="version", version=f"{PROGRAM} {TOOL_VERSION}")
    for one in fields(Options):
        kind, text = one.metadata["kind"], one.metadata["text"].replace("%", "%%")
        if one.name in GROUPS:
            group = parser.add_argument_group(GROUPS[one.name])
        name = "--" + one.name.replace("_", "-")
        if kind is bool:
            group.add_argument(name, action="store_true", help=text)
            continue
        if one.default is not None:
            text += f" (default {one.default:g})" if isinstance(one.default, float) else f" (default {one.default})"
        if isinstance(kind, tuple):
            group.add_argument(name, choices=kind, default=one.default, help=text)
        else:
            group.add_argument(name, type=kind, default=one.default, help=text, metavar="TEXT" if kind is str else "N")
    return parser


def open_listener(host: str, port: int) -> socket.socket:
    """A listening socket; UsageError where the address cannot be had."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
        if os.name == "posix":
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if sys.platform.startswith("linux"):
            with contextlib.suppress(OSError):
                listener.setsockopt(socket.SOL_SOCKET, SO_TIMESTAMPNS, 1)  # accepted sockets inherit it
        listener.bind(address)
        listener.listen(BACKLOG)
    except (OSError, UnicodeError, OverflowError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise UsageError(f"cannot listen on {host} port {port}: {reason}; give another --host or --port") from None
    listener.setblocking(False)
    return listener


def raise_descriptor_limit() -> None:
    """As many connections as the system lets this process have."""
    with contextlib.suppress(ImportError, ValueError, OSError):
        import resource  # Windows has no such limit

        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        # macOS refuses more than OPEN_MAX although its hard limit is infinite.
        wanted = 10240 if hard == resource.RLIM_INFINITY else hard
        if soft != resource.RLIM_INFINITY and soft < wanted:
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


async def serve(options: Options, listener: socket.socket, log: IO[str] | None) -> None:
    """Serve until SIGTERM or Ctrl-C."""
    loop, stop = asyncio.get_running_loop(), asyncio.Event()
    with contextlib.suppress(NotImplementedError):  # Windows raises KeyboardInterrupt instead
        for each in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(each, stop.set)
    server = Server(options, loop, log)
    server.listen(listener)
    host, port = listener.getsockname()[:2]
    print(f"listening on http://{f'[{host}]' if ':' in host else host}:{port}/v1", flush=True)
    try:
        await stop.wait()
    finally:
        server.stop()


def run(options: Options) -> None:
    """Open what can fail, then serve."""
    raise_descriptor_limit()
    try:
        log = open(options.log, "a", encoding="utf-8") if options.log is not None else None  # noqa: SIM115
    except OSError as error:
        raise UsageError(f"--log {options.log}: {error.strerror}; give a file that can be written") from None
    with open_listener(options.host, options.port) as listener:
        gc.freeze()  # a collection in the middle of a step would show as a late token
        gc.set_threshold(100_000, 50, 50)
        asyncio.run(serve(options, listener, log))


def main(argv: Sequence[str] | None = None) -> int:
    try:
        run(Options(**vars(build_parser().parse_args(argv))))
    except UsageError as error:
        complain(str(error))
        return 2
    except KeyboardInterrupt:  # before the signal handlers stood
        return 0
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        complain(f"cannot write the output: {error.strerror or error}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
