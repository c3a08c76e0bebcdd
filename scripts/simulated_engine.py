#!/usr/bin/env python3
"""A server that batches continuously under a stated model, and can stand for llama-server or vLLM.

It loads no model. It answers /v1/chat/completions at the times that the model below gives, so that a measuring client
can be held against a known truth, a curve can be taught without a GPU, and a test can ask for every odd server.

Examples:
  python3 scripts/simulated_engine.py --port 8000 --slots 20
  python3 scripts/simulated_engine.py --dialect vllm --a-ms 25 --b-ms 2 --slots 20 --log requests.jsonl

The model:
  A request waits, first come first served, for a free slot. Its prefill then takes (prompt - cached) / prefill rate.
  After that it joins the batch at the next step. A step takes a + b x c seconds, c being the sequences in it, and gives
  each of them one token at its end. Steps follow each other without a pause and without drift: a step starts when the
  one before it was due to end, however late the program woke up. A prefill delays nobody else's steps.
  So TTFT = queueing + prefill + the rest of the step under way + one step, and TPOT = a + b x c.
  Tokens are a toy: one per 4 bytes of the messages as UTF-8 text, each message wrapped as <|im_start|>role ...
  <|im_end|>. Byte-identical beginnings are therefore token-identical. An output token is one short piece of a word.

Listening:
  --version               print the version and leave
  --host ADDRESS          address to listen on (default 127.0.0.1)
  --port N                port, 0 for any free one (default 0)
  --port-file FILE        write the port number there once it listens
  --log FILE              append one JSON line per finished completion request (fields below)
  --dialect NAME          llama or vllm: shape of events, errors and endpoints (default llama)
  --model NAME            the name it serves; vllm answers 404 to any other (default sim-chat)
  --api-key KEY           answer 401 without "Authorization: Bearer KEY" (default: none wanted)
  --loading-s S           answer 503 to everything for S seconds after the start (default 0)

The model's figures:
  --a-ms MS               fixed part of a step (default 20)
  --b-ms MS               part of a step per sequence in it (default 1.5)
  --prefill-tok-s N       prompt tokens per second of one prefill (default 5000)
  --prefill-blocks        a prefill stops every decode, as in an engine without chunked prefill; one at a time
  --slots N               sequences admitted at once (default 8)
  --context N             tokens per sequence, prompt and output together (default 4096). llama: a prompt that leaves no
                          room is refused with 400, an output is cut; vllm: prompt + max_tokens above it is refused
  --max-queue N           answer 429 when N requests wait already (default: no limit)
  --cache KIND            prefix cache (default: slot for llama, pool for vllm)
                          slot: each slot keeps its last prompt; a request goes to the free slot that shares the most
                          with it if that is above 10 % of the prompt, else to the least recently used one
                          pool: full blocks of 16 tokens, each known by all before it, shared by every slot
                          none: nothing is reused
  --saturate-at C         above C sequences the step is longer by the factor 1 + F x (c - C) / C (default: never)
  --saturate-factor F     that F; from 1 on throughput falls as c grows (default 2). vllm counts preemptions meanwhile

The answers:
  --reasoning FIELD       none, reasoning_content or reasoning: where the first tokens go unless the request says
                          chat_template_kwargs.enable_thinking false (default none)
  --reasoning-tokens N    how many tokens that is (default 32)
  --early-stop N          finish "stop" after 1 to N tokens, chosen by prompt and seed, unless the request says
                          ignore_eos (default: never)
  --seed N                seed of that choice (default 0)
  --tokens-per-delta N    tokens in one event, as with speculative decoding (default 1)
  --deltas-per-write N    events that leave together, as behind a buffering proxy (default 1)
  --coalesce-ms MS        or: hold events and send them together every MS milliseconds (default 0)
  --no-usage              send no usage block
  --no-prompt-details     no cached token count in it (vLLM without --enable-prompt-tokens-details)
  --null                  a null server, for measuring a client: max_tokens tokens at once in one burst, no slots

Faults:
  --fail-every N          each Nth completion request ends with an error event half-way
  --stall-every N         each Nth one falls silent half-way, keeps its slot and sends only keep-alive comments
  --keep-alive-s S        seconds between those comments (default 1)

Output: the first line on standard output is "listening on http://HOST:PORT/v1". A line of the log:
  event "request", id, status, finish (length, stop, error, cancelled, shutdown, or null when refused), error, stream,
  slot, prompt_tokens, cached_tokens, output_tokens, max_tokens, in_flight_peak (most slots busy at once while this one
  had its slot), batch (for each token the c of its step), late_s (how late the program was for its latest step), and
  time stamps on time.perf_counter(), on Linux one clock for all processes:
  connected     the connection was accepted
  arrived       the request's last bytes reached this machine's network stack (Linux; elsewhere as request_read).
                The model counts from here
  request_read  the program read them
  admitted      it had a slot; prefilled: its prefill was over
  sends         one stamp per text delta, taken just before the write (a request not streamed: one, at its end)
  finished      the answer's last bytes were written
  What did not happen is null. Lines are written when the program has time, at the latest on SIGTERM or Ctrl-C.

Exit codes: 0 after SIGTERM or Ctrl-C; 2 for bad arguments, an address it cannot listen on, a file it cannot write.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import errno
import gc
import heapq
import json
import math
import os
import select
import selectors
import signal
import socket
import struct
import sys
import time
import zlib
from abc import ABC, abstractmethod
from collections import OrderedDict, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from email.utils import formatdate
from http import HTTPStatus
from typing import IO, Any, Callable, NamedTuple, NoReturn

# ----------------------------------------------------------------------------------------------------------------
# Constants
# ----------------------------------------------------------------------------------------------------------------

PROGRAM = "simulated_engine.py"
TOOL_VERSION = "2.0.0"  # the same in all programs
TOKEN_BYTES = 4  # near what Qwen3's tokeniser makes of English (about 4.2 bytes per token)
BLOCK_TOKENS = 16  # vLLM's default block on a GPU
BLOCK_BYTES = BLOCK_TOKENS * TOKEN_BYTES
SLOT_SIMILARITY = 0.10  # llama-server's --slot-prompt-similarity
TRAIN_CONTEXT = 40960  # what /v1/models says the model was trained for (Qwen3)

MAX_HEAD_BYTES = 64 * 1024
MAX_BODY_BYTES = 64 * 1024 * 1024
BACKLOG = 4096  # the kernel lowers it to net.core.somaxconn
ACCEPTS_PER_TURN = 8  # a new connection costs about 0.1 ms: more in a row would delay a step that is due
LINGER_S = 2.0  # how long a refused request's remaining bytes are read, so that the refusal is not lost to a reset
LOG_MARGIN_S = 0.0015  # writing one log line takes well below this

# Linux: SO_TIMESTAMPNS. The kernel stamps what arrives, so that a busy program still knows when a request came.
SO_TIMESTAMPNS = 35
TIMESPEC = struct.Struct("@ll")

# Pieces that follow one another for ever. Two of them need escapes or several bytes per character, as real text does.
WORDS = (
    " the", " server", " keeps", " a", " queue", " of", " requests", " and", " each", " step", " gives", " every",
    " running", " sequence", " one", " token", ".", "\n", " So", " more", " users", " share", " the", " same", " reads",
    " of", " memory", " —", " until", " compute", " binds", ",",
)  # fmt: skip
WORD_MASK = len(WORDS) - 1  # 32 pieces, so that `k & WORD_MASK` picks one
WORDS_JSON = tuple(json.dumps(word, ensure_ascii=False).encode() for word in WORDS)

Clock = Callable[[], float]
Reply = tuple[int, str, bytes]  # status, content type, body

# ----------------------------------------------------------------------------------------------------------------
# Errors and options
# ----------------------------------------------------------------------------------------------------------------


def complain(message: str) -> None:
    """One line on standard error, which whoever started the server may have closed."""
    if sys.stderr is None:
        return
    try:
        print(f"{PROGRAM}: {message}", file=sys.stderr, flush=True)
    except (OSError, ValueError):  # what stays in its buffer must not fail again when the interpreter leaves
        with contextlib.suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())


class UsageError(Exception):
    """Arguments, an address or a file that the program cannot work with; one line that says what to do."""


class ProtocolError(Exception):
    """Bytes that are no HTTP request this server can read. `status` is the answer; the connection cannot go on."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class ApiError(Exception):
    """A request that is answered with an error document. `kind` is looked up in the dialect's table of types."""

    def __init__(
        self, kind: str, message: str, param: str | None = None, extra: Mapping[str, int] | None = None
    ) -> None:
        super().__init__(message)
        self.kind = kind
        self.param = param  # vLLM names the field at fault
        self.extra = extra or {}  # llama-server adds the sizes


@dataclass(frozen=True)
class Options:
    """The command line, checked. Field names are the option names; `None` stands for "never" or "no limit"."""

    host: str = "127.0.0.1"
    port: int = 0
    port_file: str | None = None
    log: str | None = None
    dialect: str = "llama"
    model: str = "sim-chat"
    api_key: str | None = None
    loading_s: float = 0.0
    a_ms: float = 20.0
    b_ms: float = 1.5
    prefill_tok_s: float = 5000.0
    prefill_blocks: bool = False
    slots: int = 8
    context: int = 4096
    max_queue: int | None = None
    cache: str = "slot"
    saturate_at: int | None = None
    saturate_factor: float = 2.0
    reasoning: str = "none"
    reasoning_tokens: int = 32
    early_stop: int | None = None
    seed: int = 0
    tokens_per_delta: int = 1
    deltas_per_write: int = 1
    coalesce_ms: float = 0.0
    no_usage: bool = False
    no_prompt_details: bool = False
    null: bool = False
    fail_every: int | None = None
    stall_every: int | None = None
    keep_alive_s: float = 1.0

    def step_s(self, sequences: int) -> float:
        """Seconds that one batch step takes with this many sequences in it.

        >>> round(Options(a_ms=20, b_ms=1.5).step_s(10), 6)
        0.035
        >>> round(Options(a_ms=20, b_ms=1.5, saturate_at=8, saturate_factor=1).step_s(16), 6)
        0.088
        """
        base_s = (self.a_ms + self.b_ms * sequences) / 1e3
        if self.saturate_at is None or sequences <= self.saturate_at:
            return base_s
        return base_s * (1.0 + self.saturate_factor * (sequences - self.saturate_at) / self.saturate_at)


# ----------------------------------------------------------------------------------------------------------------
# The toy tokeniser and the request
# ----------------------------------------------------------------------------------------------------------------


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
        start, end = low * TOKEN_BYTES, middle * TOKEN_BYTES
        if one[start:end] == other[start:end]:
            low = middle
        else:
            high = middle - 1
    return low


def message_text(content: object) -> str:
    """The text of a message's content: a string, a list of text parts, or nothing."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        parts = [part.get("text") for part in content if isinstance(part, dict) and part.get("type") == "text"]
        return "".join(part for part in parts if isinstance(part, str))
    raise ApiError("invalid", "a message's content must be a string or a list of parts", "messages")


def render_prompt(messages: object, tools: object) -> bytes:
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
    stream_options = document.get("stream_options")
    template = document.get("chat_template_kwargs")
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


def early_stop_tokens(prompt: bytes, most: int, seed: int) -> int:
    """After how many tokens, 1 to `most`, the model stops by itself: the same for the same prompt and seed."""
    return 1 + zlib.crc32(prompt, seed & 0xFFFFFFFF) % most


# ----------------------------------------------------------------------------------------------------------------
# Prefix caches
# ----------------------------------------------------------------------------------------------------------------


class Placement(NamedTuple):
    """Where a request goes and what it can reuse. `usable_from`: when the reused tokens have been computed."""

    slot: int
    cached: int
    usable_from: float
    blocks: tuple[int, ...] = ()


class PrefixCache(ABC):
    """Chooses a slot among the free ones and says how many prompt tokens need no prefill.

    At least the last prompt token is always computed: its output is what the first token is drawn from.
    """

    @abstractmethod
    def place(self, prompt: bytes, tokens: int, free: set[int]) -> Placement:
        """Choose a slot for the prompt; changes nothing."""

    def store(self, placement: Placement, prompt: bytes, ready_at: float) -> None:
        """The prompt was admitted there and will have been computed at `ready_at`."""
        return

    def release(self, slot: int, prompt: bytes, computed: int) -> None:
        """The slot is free again; `computed` tokens of its prompt are in it."""
        return


class NoCache(PrefixCache):
    """Reuses nothing; the lowest free slot."""

    def place(self, prompt: bytes, tokens: int, free: set[int]) -> Placement:
        return Placement(min(free), 0, 0.0)


class SlotCache(PrefixCache):
    """llama-server: each slot keeps its last prompt, and a request reuses what the slot it lands on holds."""

    def __init__(self, slots: int) -> None:
        self._held = [b""] * slots
        # Least recently used first; of those never used llama-server takes the last.
        self._idle: OrderedDict[int, None] = OrderedDict.fromkeys(reversed(range(slots)))

    def place(self, prompt: bytes, tokens: int, free: set[int]) -> Placement:
        best_slot, best_shared = None, int(SLOT_SIMILARITY * tokens)
        probe = prompt[: (best_shared + 1) * TOKEN_BYTES]  # what a slot must share to be better
        for slot in sorted(free):
            if self._held[slot].startswith(probe):
                shared = common_tokens(prompt, self._held[slot])
                if shared > best_shared:
                    best_slot, best_shared = slot, shared
                    probe = prompt[: (shared + 1) * TOKEN_BYTES]
        if best_slot is None:  # what the oldest slot happens to share is reused all the same
            best_slot = next(slot for slot in self._idle if slot in free)
            best_shared = common_tokens(prompt, self._held[best_slot])
        return Placement(best_slot, min(best_shared, tokens - 1), 0.0)

    def store(self, placement: Placement, prompt: bytes, ready_at: float) -> None:
        self._held[placement.slot] = prompt
        self._idle.pop(placement.slot, None)

    def release(self, slot: int, prompt: bytes, computed: int) -> None:
        self._held[slot] = prompt[: computed * TOKEN_BYTES]
        self._idle[slot] = None


class PoolCache(PrefixCache):
    """vLLM: full blocks of tokens, each known by its content and all before it, in one pool; oldest use evicted."""

    def __init__(self, blocks: int) -> None:
        self._capacity = blocks
        self._computed_at: OrderedDict[int, float] = OrderedDict()

    def place(self, prompt: bytes, tokens: int, free: set[int]) -> Placement:
        blocks: list[int] = []
        chain = 0
        for start in range(0, len(prompt) - BLOCK_BYTES + 1, BLOCK_BYTES):
            chain = hash((chain, prompt[start : start + BLOCK_BYTES]))
            blocks.append(chain)
        hits, usable_from = 0, 0.0
        for block in blocks[: (tokens - 1) // BLOCK_TOKENS]:
            if block not in self._computed_at:
                break
            hits += 1
            usable_from = max(usable_from, self._computed_at[block])
        return Placement(min(free), hits * BLOCK_TOKENS, usable_from, tuple(blocks))

    def store(self, placement: Placement, prompt: bytes, ready_at: float) -> None:
        for block in placement.blocks:
            self._computed_at.setdefault(block, ready_at)
            self._computed_at.move_to_end(block)
        while len(self._computed_at) > self._capacity:
            self._computed_at.popitem(last=False)


def make_cache(options: Options) -> PrefixCache:
    """The cache that `--cache` names."""
    if options.cache == "slot":
        return SlotCache(options.slots)
    if options.cache == "pool":
        return PoolCache(options.slots * options.context // BLOCK_TOKENS)
    return NoCache()


# ----------------------------------------------------------------------------------------------------------------
# The batch engine: no sockets, no waiting; a clock is read, and someone calls advance() when due() says so
# ----------------------------------------------------------------------------------------------------------------


class Job:
    """One request as the batch sees it. `limit` tokens are made, then it ends with `ending`:
    length or stop; error; or stall, which leaves the batch but keeps the slot."""

    __slots__ = (
        "admitted", "arrived", "batch", "cached", "ending", "first_at", "id", "late_s", "limit", "made", "on_end",
        "on_token", "peak", "prompt", "prompt_tokens", "ready_at", "slot", "state",
    )  # fmt: skip

    def __init__(self, id: int, prompt: bytes, prompt_tokens: int, arrived: float, limit: int, ending: str) -> None:
        self.id = id
        self.prompt = prompt
        self.prompt_tokens = prompt_tokens
        self.arrived = arrived
        self.limit = limit
        self.ending = ending
        self.state = "new"  # then waiting, prefill, decode, parked, done
        self.slot: int | None = None
        self.cached: int | None = None
        self.admitted: float | None = None
        self.ready_at: float | None = None  # end of prefill
        self.first_at: float | None = None  # end of the step that made its first token
        self.made = 0
        self.batch: list[int] = []
        self.peak = 0
        self.late_s = 0.0
        self.on_token: Callable[[int], None] = lambda made: None
        self.on_end: Callable[[str], None] = lambda reason: None


class Histogram:
    """Counts per upper bound, as Prometheus keeps them; values in seconds."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float) -> None:
        self.counts[sum(value > bound for bound in self.bounds)] += 1
        self.total += value


# Bounds of vLLM's request latency histograms, seconds.
LATENCY_BOUNDS = (
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0,
    1920.0, 7680.0,
)  # fmt: skip


@dataclass
class Counters:
    """Totals since the start, for /metrics. Prompt tokens are counted at the end of a prefill."""

    prompt_computed: int = 0
    prompt_cached: int = 0
    prompt_s: float = 0.0
    predicted: int = 0
    predict_s: float = 0.0
    steps: int = 0
    busy_slots: int = 0  # summed over the steps
    longest: int = 0  # tokens of the longest job so far
    preemptions: int = 0
    finished: dict[str, int] = field(default_factory=dict)
    queue_time: Histogram = field(default_factory=lambda: Histogram(LATENCY_BOUNDS))
    prefill_time: Histogram = field(default_factory=lambda: Histogram(LATENCY_BOUNDS))


class BatchEngine:
    """Slots, queue, prefills and steps. Times are seconds on `clock`.

    The owner calls submit() and cancel() as requests come and go, and advance() once the clock has reached due();
    one call handles one event. Events happen at the time they were due, whatever the clock says by then.
    """

    def __init__(self, options: Options, cache: PrefixCache, clock: Clock) -> None:
        self._options = options
        self._cache = cache
        self._clock = clock
        self._free = set(range(options.slots))
        self._freed_at = [-math.inf] * options.slots
        self._prefilling: list[tuple[float, int, Job]] = []  # heap by end of prefill
        self._blocking: deque[Job] = deque()  # prefills that wait for the batch
        self._blocked_by: Job | None = None  # the one that has it now
        self._batch: list[Job] = []
        self._step_size = 0  # c of the step under way
        self._busy_until: float | None = None
        self._model_time = -math.inf  # of the last event
        self.waiting: deque[Job] = deque()
        self.running: dict[int, Job] = {}  # by slot
        self.counters = Counters()

    def full(self) -> bool:
        """Whether the next request would have to wait: while any waits, no slot is free."""
        return not self._free

    def submit(self, job: Job) -> None:
        """Admit the request if a slot is free, else put it at the end of the queue."""
        if self._free:
            self._admit(job, job.arrived)
            if self._blocking and self._busy_until is None:
                self._start(max(job.arrived, self._model_time))
        else:
            job.state = "waiting"
            self.waiting.append(job)

    def cancel(self, job: Job) -> None:
        """The client went away: its slot is free at once and the next request gets it."""
        if job.state == "waiting":
            self.waiting.remove(job)
        if job in self._batch:
            self._batch.remove(job)
        if job in self._blocking:
            self._blocking.remove(job)
        if job.state not in ("new", "done"):
            self.counters.finished["abort"] = self.counters.finished.get("abort", 0) + 1
        if job.state in ("prefill", "decode", "parked"):
            self._release(job)
            job.state = "done"
            self._admit_waiting()
        job.state = "done"

    def due(self) -> float | None:
        """When the next event happens; None while nothing is under way."""
        if self._busy_until is not None:
            return self._busy_until
        while self._prefilling and self._prefilling[0][2].state != "prefill":  # cancelled meanwhile
            heapq.heappop(self._prefilling)
        return max(self._prefilling[0][0], self._model_time) if self._prefilling else None

    def advance(self) -> None:
        """Handle the event that due() names: a step's end, a blocking prefill's end, or a first prefill's end."""
        at = self.due()
        if at is None:
            return
        self._model_time = at
        prefilled = self._blocked_by
        if prefilled is not None:
            self._blocked_by = None
            if prefilled.state == "prefill":
                self._join(prefilled, at)
        elif self._busy_until is not None:
            self._end_step(at)
        self._start(at)

    def _admit(self, job: Job, at: float) -> None:
        place = self._cache.place(job.prompt, job.prompt_tokens, self._free)
        self._free.remove(place.slot)
        self.running[place.slot] = job
        at = max(at, self._freed_at[place.slot])
        job.state, job.slot, job.cached, job.admitted = "prefill", place.slot, place.cached, at
        ready_at = max(at + self._prefill_s(job), place.usable_from)
        self._cache.store(place, job.prompt, ready_at)
        if self._options.prefill_blocks:
            self._blocking.append(job)
        else:
            heapq.heappush(self._prefilling, (ready_at, job.id, job))
        busy = len(self.running)
        for other in self.running.values():
            if busy > other.peak:
                other.peak = busy

    def _prefill_s(self, job: Job) -> float:
        return (job.prompt_tokens - (job.cached or 0)) / self._options.prefill_tok_s

    def _admit_waiting(self) -> None:
        while self.waiting and self._free:
            self._admit(self.waiting.popleft(), self._clock())
        if self._blocking and self._busy_until is None:
            self._start(self._clock())

    def _start(self, at: float) -> None:
        """Begin what comes next: a blocking prefill, else a step of everything that is ready, else nothing."""
        if self._blocking:
            job = self._blocking.popleft()
            self._blocked_by = job
            self._busy_until = max(at, job.admitted or at) + self._prefill_s(job)
            return
        before = len(self._batch)
        while self._prefilling and self._prefilling[0][0] <= at:
            ready_at, _, job = heapq.heappop(self._prefilling)
            if job.state == "prefill":
                self._join(job, ready_at)
        size = len(self._batch)
        if self._options.saturate_at is not None and size > before:
            self.counters.preemptions += max(0, size - max(before, self._options.saturate_at))
        self._step_size = size
        self._busy_until = at + self._options.step_s(size) if size else None

    def _join(self, job: Job, ready_at: float) -> None:
        job.state, job.ready_at = "decode", ready_at
        self._batch.append(job)
        self.counters.prompt_cached += job.cached or 0
        self.counters.prompt_computed += job.prompt_tokens - (job.cached or 0)
        self.counters.prompt_s += self._prefill_s(job)

    def _end_step(self, at: float) -> None:
        """One token for each job of the batch, then the ends, then the freed slots' next requests."""
        size, late_s = self._step_size, max(0.0, self._clock() - at)
        self.counters.steps += 1
        self.counters.busy_slots += len(self.running)
        self.counters.predicted += len(self._batch)
        ended = []
        for job in self._batch:  # nothing in here changes the batch: the hot loop of the program
            made = job.made + 1
            job.made = made
            job.batch.append(size)
            if made == 1:
                job.first_at = at
            if late_s > job.late_s:
                job.late_s = late_s
            job.on_token(made)
            if made >= job.limit:
                ended.append(job)
        for job in ended:
            self._end(job, at)
        if ended:
            self._batch = [job for job in self._batch if job.state == "decode"]
            self._admit_waiting()

    def _end(self, job: Job, at: float) -> None:
        if job.ending == "stall":
            job.state = "parked"
            job.on_end("stall")
            return
        counters = self.counters
        counters.finished[job.ending] = counters.finished.get(job.ending, 0) + 1
        counters.longest = max(counters.longest, job.prompt_tokens + job.made)
        counters.predict_s += at - (job.ready_at or at)
        counters.queue_time.observe((job.admitted or at) - job.arrived)
        # vLLM's "prefill" ends with the first token, so one decode step is in it.
        counters.prefill_time.observe((job.first_at or at) - (job.admitted or at))
        job.on_end(job.ending)
        self._release(job)
        job.state = "done"

    def _release(self, job: Job) -> None:
        assert job.slot is not None
        computed = (job.cached or 0) if job.state == "prefill" else job.prompt_tokens
        self._cache.release(job.slot, job.prompt, computed)
        del self.running[job.slot]
        self._free.add(job.slot)
        self._freed_at[job.slot] = self._clock()


# ----------------------------------------------------------------------------------------------------------------
# Dialects: what llama-server and vLLM write, read from their sources (llama.cpp of autumn 2026, vLLM 0.28)
# ----------------------------------------------------------------------------------------------------------------


ENCODER = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), allow_nan=False)


def to_json(document: object) -> bytes:
    """Compact JSON; text beyond ASCII is written as it is, as both servers do."""
    return ENCODER.encode(document).encode()


@dataclass
class Answer:
    """What a dialect needs to know of one answer to write it. Times are on the engine's clock."""

    name: str  # chatcmpl-...
    created: int  # Unix time
    request: ChatRequest
    job: Job
    thought: str = ""  # text of the reasoning field, for an answer that is not streamed
    text: str = ""
    last_at: float | None = None  # when the last token was sent


class Dialect(ABC):
    """One server's way to write events, documents and errors. Payloads are JSON without framing."""

    json_type: str
    stream_type: str
    headers: tuple[tuple[str, str], ...]  # sent with every answer
    lower_case = False  # header names
    early_head: bool  # the response head leaves before the first token
    kinds: Mapping[str, tuple[int, str]]  # ApiError.kind -> status, type
    default_cache: str
    chat_paths: tuple[str, ...]

    def __init__(self, options: Options, engine: BatchEngine) -> None:
        self.options = options
        self.engine = engine
        self.started = time.time()
        self.model_json = to_json(options.model)
        self.pages: dict[str, Callable[[], Reply]] = {}  # what GET answers

    def status(self, error: ApiError) -> int:
        return self.kinds[error.kind][0]

    @abstractmethod
    def error(self, error: ApiError) -> bytes:
        """The document of a refusal or failure."""

    @abstractmethod
    def authorized(self, path: str, given: str | None) -> bool:
        """Whether the Authorization header `given` opens this path."""

    @abstractmethod
    def unauthorized(self) -> bytes:
        """The document that goes with 401."""

    @abstractmethod
    def limit(self, request: ChatRequest) -> int:
        """How many tokens the request may have; ApiError where its model or its length is refused."""

    @abstractmethod
    def role(self, answer: Answer) -> bytes:
        """The first event, which carries a role and no text."""

    @abstractmethod
    def delta(self, answer: Answer, field: str, finish: str | None) -> tuple[bytes, bytes]:
        """What stands before and after the text in a delta event; `finish` is set for the last one."""

    @abstractmethod
    def tail(self, answer: Answer, finish: str) -> list[bytes]:
        """Payloads after the last text delta, without the end marker."""

    @abstractmethod
    def failure(self) -> list[bytes]:
        """Payloads of a stream that fails half-way, the end marker included where the server still sends it."""

    @abstractmethod
    def whole(self, answer: Answer, finish: str) -> bytes:
        """The document of an answer that is not streamed."""

    def method_not_allowed(self) -> ApiError:
        return ApiError("missing", "File Not Found")

    def not_found(self) -> ApiError:
        return ApiError("missing", "File Not Found")


class LlamaDialect(Dialect):
    """llama-server with --metrics and --slots."""

    json_type = "application/json; charset=utf-8"
    stream_type = "text/event-stream"
    headers = (("Server", "llama.cpp"), ("Access-Control-Allow-Origin", ""))
    early_head = False
    default_cache = "slot"
    chat_paths = ("/v1/chat/completions", "/chat/completions")
    public_paths = ("/health", "/v1/health")
    kinds: Mapping[str, tuple[int, str]] = {
        "invalid": (400, "invalid_request_error"),
        "context": (400, "exceed_context_size_error"),
        "missing": (404, "not_found_error"),
        "busy": (429, "rate_limit_error"),  # llama-server itself never refuses; a gateway before it does
        "failed": (500, "server_error"),
        "loading": (503, "unavailable_error"),
    }

    def __init__(self, options: Options, engine: BatchEngine) -> None:
        super().__init__(options, engine)
        self.pages = {
            "/health": self._health,
            "/v1/health": self._health,
            "/v1/models": self._models,
            "/models": self._models,
            "/slots": self._slots,
            "/props": self._props,
            "/metrics": self._metrics,
        }

    def error(self, error: ApiError) -> bytes:
        status, kind = self.kinds[error.kind]
        return to_json({"error": {"code": status, "message": str(error), "type": kind, **error.extra}})

    def authorized(self, path: str, given: str | None) -> bool:
        return path in self.public_paths or (given or "").replace("Bearer ", "", 1) == self.options.api_key

    def unauthorized(self) -> bytes:
        return to_json({"error": {"message": "Invalid API Key", "type": "authentication_error", "code": 401}})

    def limit(self, request: ChatRequest) -> int:
        """The model's name is ignored; an output that meets the end of the context is cut there."""
        room = self.options.context - request.prompt_tokens
        if room <= 0:
            message = (
                f"request ({request.prompt_tokens} tokens) exceeds the available context size "
                f"({self.options.context} tokens), try increasing it"
            )
            sizes = {"n_prompt_tokens": request.prompt_tokens, "n_ctx": self.options.context}
            raise ApiError("context", message, extra=sizes)
        if request.max_tokens is None or request.max_tokens < 0:
            return room
        return max(1, min(request.max_tokens, room))

    def role(self, answer: Answer) -> bytes:
        before, after = self._chunk(answer, b"null")
        return before + b'{"role":"assistant","content":null}' + after

    def delta(self, answer: Answer, field: str, finish: str | None) -> tuple[bytes, bytes]:
        before, after = self._chunk(answer, b"null")
        return before + b'{"%b":' % field.encode(), b"}" + after

    def _chunk(self, answer: Answer, finish: bytes) -> tuple[bytes, bytes]:
        before = b'{"choices":[{"finish_reason":%b,"index":0,"delta":' % finish
        return before, b"}]," + self._identity(answer) + b"}"

    def _identity(self, answer: Answer, kind: str = "chat.completion.chunk") -> bytes:
        return b'"created":%d,"id":"%b","model":%b,"system_fingerprint":"b0-simulated","object":"%b"' % (
            answer.created,
            answer.name.encode(),
            self.model_json,
            kind.encode(),
        )

    def tail(self, answer: Answer, finish: str) -> list[bytes]:
        before, after = self._chunk(answer, to_json(finish))
        events = [before + b"{}" + after]
        if answer.request.include_usage and not self.options.no_usage:
            usage = to_json(self._usage(answer))
            events.append(b'{"choices":[],' + self._identity(answer) + b',"usage":' + usage + b"}")
        events[-1] = events[-1][:-1] + b',"timings":' + to_json(self._timings(answer)) + b"}"
        return events

    def failure(self) -> list[bytes]:
        return [self.error(ApiError("failed", "Compute error. (simulated)"))]

    def whole(self, answer: Answer, finish: str) -> bytes:
        message: dict[str, object] = {"role": "assistant", "content": answer.text}
        if answer.thought:
            message[self.options.reasoning] = answer.thought
        head = {"choices": [{"finish_reason": finish, "index": 0, "message": message}]}
        document = {**head, **json.loads(b"{" + self._identity(answer, "chat.completion") + b"}")}
        if not self.options.no_usage:
            document["usage"] = self._usage(answer)
        return to_json({**document, "timings": self._timings(answer)})

    def _usage(self, answer: Answer) -> dict[str, object]:
        prompt, made = answer.request.prompt_tokens, answer.job.made
        usage: dict[str, object] = {"completion_tokens": made, "prompt_tokens": prompt, "total_tokens": prompt + made}
        if not self.options.no_prompt_details:
            usage["prompt_tokens_details"] = {"cached_tokens": answer.job.cached or 0}
        return usage

    def _timings(self, answer: Answer) -> dict[str, float]:
        job = answer.job
        cached = job.cached or 0
        computed = job.prompt_tokens - cached
        ready_at = job.ready_at if job.ready_at is not None else job.arrived
        admitted = job.admitted if job.admitted is not None else job.arrived
        prompt_ms = (ready_at - admitted) * 1e3
        predicted_ms = ((answer.last_at if answer.last_at is not None else ready_at) - ready_at) * 1e3
        return {
            "cache_n": cached,
            "prompt_n": computed,
            "prompt_ms": round(prompt_ms, 3),
            "prompt_per_token_ms": prompt_ms / computed,
            "prompt_per_second": computed / prompt_ms * 1e3 if prompt_ms > 0 else 0.0,
            "predicted_n": job.made,
            "predicted_ms": round(predicted_ms, 3),
            "predicted_per_token_ms": predicted_ms / max(job.made, 1),
            "predicted_per_second": job.made / predicted_ms * 1e3 if predicted_ms > 0 else 0.0,
        }

    def _health(self) -> Reply:
        return 200, self.json_type, to_json({"status": "ok"})

    def _models(self) -> Reply:
        name = self.options.model
        meta = {"vocab_type": 2, "n_vocab": len(WORDS), "n_ctx": self.options.context, "n_ctx_train": TRAIN_CONTEXT}
        entry = {"id": name, "aliases": [name], "tags": [], "object": "model", "created": int(time.time())}
        listed = {"name": name, "model": name, "type": "model", "capabilities": ["completion"], "parameters": ""}
        data = [{**entry, "owned_by": "llamacpp", "meta": meta}]
        return 200, self.json_type, to_json({"models": [listed], "object": "list", "data": data})

    def _slots(self) -> Reply:
        slots: list[dict[str, object]] = []
        for number in range(self.options.slots):
            job = self.engine.running.get(number)
            slot: dict[str, object] = {"id": number, "n_ctx": self.options.context, "speculative": False}
            slot["is_processing"] = job is not None
            if job is not None:
                slot["id_task"] = job.id
                slot["n_prompt_tokens"] = job.prompt_tokens + job.made
                slot["n_prompt_tokens_processed"] = job.prompt_tokens - (job.cached or 0)
                slot["n_prompt_tokens_cache"] = job.cached
                slot["params"] = {"n_predict": job.limit, "max_tokens": job.limit}
                remaining = {"has_next_token": True, "has_new_line": False, "n_remain": job.limit - job.made}
                slot["next_token"] = [{**remaining, "n_decoded": job.made}]
            slots.append(slot)
        return 200, self.json_type, to_json(slots)

    def _props(self) -> Reply:
        props = {
            "default_generation_settings": {"params": {"seed": self.options.seed}, "n_ctx": self.options.context},
            "total_slots": self.options.slots,
            "model_alias": self.options.model,
            "model_path": "simulated",
            "modalities": {"vision": False, "video": False, "audio": False},
            "endpoint_slots": True,
            "endpoint_props": False,
            "endpoint_metrics": True,
            "chat_template": "",
            "build_info": "b0-simulated",
            "is_sleeping": False,
        }
        return 200, self.json_type, to_json(props)

    def _metrics(self) -> Reply:
        count = self.engine.counters
        rows: list[tuple[str, str, str, float]] = [
            ("counter", "prompt_tokens_total", "Number of prompt tokens processed, excluding cached tokens",
             count.prompt_computed),
            ("counter", "prompt_tokens_cached_total", "Number of prompt tokens reused from the cache",
             count.prompt_cached),
            ("counter", "prompt_seconds_total", "Total time spent processing prompts", count.prompt_s),
            ("counter", "tokens_predicted_total", "Number of generation tokens processed", count.predicted),
            ("counter", "tokens_predicted_seconds_total", "Total time spent generating tokens", count.predict_s),
            ("counter", "n_decode_total", "Total number of llama_decode() calls", count.steps),
            ("counter", "n_tokens_max", "Largest observed sequence length (prompt + generation)", count.longest),
            ("gauge", "prompt_tokens_seconds", "Average prompt throughput in tokens/s",
             count.prompt_computed / count.prompt_s if count.prompt_s else 0.0),
            ("gauge", "predicted_tokens_seconds", "Average generation throughput in tokens/s",
             count.predicted / count.predict_s if count.predict_s else 0.0),
            ("gauge", "requests_processing", "Number of requests processing", len(self.engine.running)),
            ("gauge", "requests_deferred", "Number of requests deferred", len(self.engine.waiting)),
            ("gauge", "n_busy_slots_per_decode", "Average number of busy slots per llama_decode() call",
             count.busy_slots / max(count.steps, 1)),
        ]  # fmt: skip
        # Six significant digits, as the C++ stream that llama-server writes its figures to.
        lines = [
            f"# HELP llamacpp:{name} {text}\n# TYPE llamacpp:{name} {kind}\nllamacpp:{name} {value:g}\n"
            for kind, name, text, value in rows
        ]
        return 200, "text/plain; version=0.0.4", "".join(lines).encode()


class VllmDialect(Dialect):
    """vLLM's OpenAI server with --enable-prompt-tokens-details."""

    json_type = "application/json"
    stream_type = "text/event-stream; charset=utf-8"
    headers = (("Server", "uvicorn"),)
    lower_case = True
    early_head = True
    default_cache = "pool"
    chat_paths = ("/v1/chat/completions",)
    guarded_prefix = "/v1"
    kinds: Mapping[str, tuple[int, str]] = {
        "invalid": (400, "BadRequestError"),
        "context": (400, "BadRequestError"),
        "model": (404, "NotFoundError"),
        "missing": (404, "Not Found"),
        "method": (405, "Method Not Allowed"),
        "busy": (429, "TooManyRequestsError"),
        "failed": (500, "InternalServerError"),
        "loading": (503, "ServiceUnavailableError"),
    }

    def __init__(self, options: Options, engine: BatchEngine) -> None:
        super().__init__(options, engine)
        self.pages = {
            "/health": lambda: (200, "", b""),
            "/ping": lambda: (200, "", b""),
            "/version": lambda: (200, self.json_type, to_json({"version": "0.28.0+simulated"})),
            "/v1/models": self._models,
            "/metrics": self._metrics,
        }

    def error(self, error: ApiError) -> bytes:
        status, kind = self.kinds[error.kind]
        return to_json({"error": {"message": str(error), "type": kind, "param": error.param, "code": status}})

    def authorized(self, path: str, given: str | None) -> bool:
        scheme, _, key = (given or "").partition(" ")
        right = scheme.lower() == "bearer" and key == self.options.api_key
        return right or not path.startswith(self.guarded_prefix)

    def unauthorized(self) -> bytes:
        return to_json({"error": "Unauthorized"})

    def method_not_allowed(self) -> ApiError:
        return ApiError("method", "Method Not Allowed")

    def not_found(self) -> ApiError:
        return ApiError("missing", "Not Found")

    def limit(self, request: ChatRequest) -> int:
        """The name must be the served one, and the output asked for must fit beside the prompt."""
        if request.model and request.model != self.options.model:
            raise ApiError("model", f"The model `{request.model}` does not exist.", "model")
        if request.max_tokens is not None and request.max_tokens < 1:
            raise ApiError("invalid", f"max_tokens must be at least 1, got {request.max_tokens}.", "max_tokens")
        context, prompt = self.options.context, request.prompt_tokens
        wanted = request.max_tokens if request.max_tokens is not None else 1
        if prompt + wanted > context:
            raise ApiError(
                "context",
                f"This model's maximum context length is {context} tokens. However, you requested {wanted} output "
                f"tokens and your prompt contains {prompt} input tokens, for a total of {prompt + wanted} tokens. "
                "Please reduce the length of the input prompt or the number of requested output tokens. "
                f"(parameter=input_tokens, value={prompt})",
                "input_tokens",
            )
        return request.max_tokens if request.max_tokens is not None else context - prompt

    def role(self, answer: Answer) -> bytes:
        return self._identity(answer) + (
            b',"choices":[{"index":0,"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}],'
            b'"prompt_token_ids":null,"prompt_text":null}'
        )

    def delta(self, answer: Answer, field: str, finish: str | None) -> tuple[bytes, bytes]:
        before = self._identity(answer) + b',"choices":[{"index":0,"delta":{"%b":' % field.encode()
        end = b"null" if finish is None else to_json(finish) + b',"stop_reason":null'
        return before, b'},"logprobs":null,"finish_reason":' + end + b',"token_ids":null}]}'

    def _identity(self, answer: Answer, kind: str = "chat.completion.chunk") -> bytes:
        return b'{"id":"%b","object":"%b","created":%d,"model":%b' % (
            answer.name.encode(), kind.encode(), answer.created, self.model_json,
        )  # fmt: skip

    def tail(self, answer: Answer, finish: str) -> list[bytes]:
        """The finish reason went with the last delta, so only the usage event is left."""
        if not answer.request.include_usage or self.options.no_usage:
            return []
        usage = to_json(self._usage(answer))
        return [self._identity(answer) + b',"choices":[],"usage":' + usage + b',"system_fingerprint":"simulated"}']

    def failure(self) -> list[bytes]:
        return [self.error(ApiError("failed", "Internal server error (simulated)")), b"[DONE]"]

    def whole(self, answer: Answer, finish: str) -> bytes:
        message: dict[str, object] = {"role": "assistant", "content": answer.text, "refusal": None}
        if self.options.reasoning != "none":
            message[self.options.reasoning] = answer.thought or None
        choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": finish, "stop_reason": None}
        document = json.loads(self._identity(answer, "chat.completion") + b"}")
        document["choices"] = [choice]
        if not self.options.no_usage:
            document["usage"] = self._usage(answer)
        return to_json(document)

    def _usage(self, answer: Answer) -> dict[str, object]:
        prompt, made = answer.request.prompt_tokens, answer.job.made
        usage: dict[str, object] = {"prompt_tokens": prompt, "total_tokens": prompt + made, "completion_tokens": made}
        if not self.options.no_prompt_details:
            usage["prompt_tokens_details"] = {"cached_tokens": answer.job.cached or 0}
        return usage

    def _models(self) -> Reply:
        entry = {
            "id": self.options.model,
            "object": "model",
            "created": int(time.time()),
            "owned_by": "vllm",
            "root": self.options.model,
            "parent": None,
            "max_model_len": self.options.context,
            "permission": [],
        }
        return 200, self.json_type, to_json({"object": "list", "data": [entry]})

    def _metrics(self) -> Reply:
        engine, count = self.engine, self.engine.counters
        held = sum(job.prompt_tokens + job.made for job in engine.running.values())
        prompt_tokens = count.prompt_cached + count.prompt_computed
        lines = [
            *self._single("gauge", "num_requests_running", len(engine.running)),
            *self._single("gauge", "num_requests_waiting", len(engine.waiting)),
            *self._single("gauge", "kv_cache_usage_perc", held / (self.options.slots * self.options.context)),
            *self._single("counter", "prefix_cache_queries", prompt_tokens),
            *self._single("counter", "prefix_cache_hits", count.prompt_cached),
            *self._single("counter", "num_preemptions", count.preemptions),
            *self._single("counter", "prompt_tokens", prompt_tokens),
            *self._single("counter", "prompt_tokens_cached", count.prompt_cached),
            *self._single("counter", "generation_tokens", count.predicted),
            *self._success(count.finished),
            *self._histogram("request_queue_time_seconds", count.queue_time),
            *self._histogram("request_prefill_time_seconds", count.prefill_time),
        ]
        body = "".join(f"{line}\n" for line in lines).encode()
        return 200, "text/plain; version=0.0.4; charset=utf-8", body

    def _labels(self, **more: str) -> str:
        name = self.options.model.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
        labels = {"engine": "0", "model_name": name, **more}
        return "{" + ",".join(f'{key}="{labels[key]}"' for key in sorted(labels)) + "}"

    def _created(self, name: str, labels: str) -> list[str]:
        """The Python Prometheus client adds when each counter began, as a gauge of its own."""
        title = f"vllm:{name}_created"
        return [f"# TYPE {title} gauge", f"{title}{labels} {self.started!r}"]

    def _single(self, kind: str, name: str, value: float) -> list[str]:
        title = f"vllm:{name}" + ("_total" if kind == "counter" else "")
        labels = self._labels()
        lines = [f"# HELP {title} Simulated.", f"# TYPE {title} {kind}", f"{title}{labels} {float(value)!r}"]
        return lines + (self._created(name, labels) if kind == "counter" else [])

    def _success(self, finished: Mapping[str, int]) -> list[str]:
        title = "vllm:request_success_total"
        lines = [f"# HELP {title} Simulated.", f"# TYPE {title} counter"]
        for reason in ("stop", "length", "abort", "error"):
            labels = self._labels(finished_reason=reason)
            lines.append(f"{title}{labels} {float(finished.get(reason, 0))!r}")
        return lines

    def _histogram(self, name: str, histogram: Histogram) -> list[str]:
        title, labels = f"vllm:{name}", self._labels()
        lines = [f"# HELP {title} Simulated.", f"# TYPE {title} histogram"]
        below = 0
        for bound, count in zip([*histogram.bounds, math.inf], histogram.counts):
            below += count
            limit = "+Inf" if math.isinf(bound) else repr(float(bound))
            lines.append(f"{title}_bucket{self._labels(le=limit)} {float(below)!r}")
        lines += [f"{title}_count{labels} {float(below)!r}", f"{title}_sum{labels} {histogram.total!r}"]
        return lines + self._created(name, labels)


DIALECTS: Mapping[str, type[Dialect]] = {"llama": LlamaDialect, "vllm": VllmDialect}

# ----------------------------------------------------------------------------------------------------------------
# HTTP: bytes in, requests out; no sockets
# ----------------------------------------------------------------------------------------------------------------

LAST_CHUNK = b"0\r\n\r\n"
KEEP_ALIVE_COMMENT = b":\n\n"  # what llama-server sends while a stream is silent


@dataclass(frozen=True)
class HttpRequest:
    """One request. `path` is without the query; header names are in lower case."""

    method: str
    path: str
    headers: Mapping[str, str]
    body: bytes
    keep_alive: bool
    chunked: bool  # whether the answer may be chunked: HTTP/1.1


class RequestReader:
    """feed() bytes as they come; next_request() gives a whole request, or None while more is needed.

    ProtocolError means that the rest of the connection cannot be understood.
    """

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._head: tuple[str, str, str, dict[str, str]] | None = None
        self._body_bytes = 0
        self.wants_continue = False  # the client waits for "100 Continue" before it sends the body

    def feed(self, data: bytes) -> None:
        self._buffer += data
        if len(self._buffer) > MAX_HEAD_BYTES + MAX_BODY_BYTES:
            raise ProtocolError(413, "too much was sent ahead of the answer")

    def next_request(self) -> HttpRequest | None:
        if self._head is None:
            end = self._buffer.find(b"\r\n\r\n")
            if end > MAX_HEAD_BYTES or (end < 0 and len(self._buffer) > MAX_HEAD_BYTES):
                raise ProtocolError(431, f"the request head is longer than {MAX_HEAD_BYTES} bytes")
            if end < 0:
                return None
            self._read_head(bytes(self._buffer[:end]))
            del self._buffer[: end + 4]
        assert self._head is not None
        if len(self._buffer) < self._body_bytes:
            return None
        method, target, version, headers = self._head
        body = bytes(self._buffer[: self._body_bytes])
        del self._buffer[: self._body_bytes]
        self._head, self.wants_continue = None, False
        options = headers.get("connection", "").lower()
        keep_alive = "close" not in options if version == "HTTP/1.1" else "keep-alive" in options
        path = target.split("?", 1)[0]
        return HttpRequest(method, path, headers, body, keep_alive, version == "HTTP/1.1")

    def _read_head(self, head: bytes) -> None:
        lines = head.decode("latin-1").split("\r\n")
        parts = lines[0].split(" ")
        if len(parts) != 3 or parts[2] not in ("HTTP/1.0", "HTTP/1.1"):
            raise ProtocolError(400, f"not an HTTP/1.1 request line: {lines[0][:80]!r}")
        headers = {}
        for line in lines[1:]:
            name, colon, value = line.partition(":")
            if not colon or not name or name != name.strip():
                raise ProtocolError(400, f"not a header line: {line[:80]!r}")
            headers[name.lower()] = value.strip()
        if "transfer-encoding" in headers:
            raise ProtocolError(411, "send the body with Content-Length; chunked requests are not read")
        length = headers.get("content-length", "0")
        if not (length.isascii() and length.isdigit()):
            raise ProtocolError(400, f"not a Content-Length: {length[:80]!r}")
        self._body_bytes = int(length) if len(length) < 20 else MAX_BODY_BYTES + 1
        if self._body_bytes > MAX_BODY_BYTES:
            raise ProtocolError(413, f"the body is longer than {MAX_BODY_BYTES} bytes")
        self.wants_continue = headers.get("expect", "").lower() == "100-continue"
        self._head = (parts[0], parts[1], parts[2], headers)


def response_head(
    dialect: Dialect, status: int, content_type: str, body_bytes: int | None, keep_alive: bool, chunked: bool
) -> bytes:
    """Status line and headers. `body_bytes` None: chunked where `chunked`, else until the connection closes."""
    fields = [*dialect.headers]
    if dialect.lower_case:
        fields.append(("Date", formatdate(usegmt=True)))
    if content_type:
        fields.append(("Content-Type", content_type))
    if body_bytes is not None:
        fields.append(("Content-Length", str(body_bytes)))
    elif chunked:
        fields.append(("Transfer-Encoding", "chunked"))
    if not keep_alive:
        fields.append(("Connection", "close"))
    elif not dialect.lower_case:
        fields.append(("Keep-Alive", "timeout=5, max=100"))
    try:
        phrase = HTTPStatus(status).phrase
    except ValueError:
        phrase = ""
    lines = [f"HTTP/1.1 {status} {phrase}"]
    lines += [f"{name.lower() if dialect.lower_case else name}: {value}" for name, value in fields]
    return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")


def frame(payload: bytes, chunked: bool) -> bytes:
    """One write of a streamed body.

    >>> frame(b"data: x", True)
    b'7\\r\\ndata: x\\r\\n'
    """
    return b"%x\r\n%b\r\n" % (len(payload), payload) if chunked else payload


def event(payload: bytes) -> bytes:
    """One server-sent event."""
    return b"data: %b\n\n" % payload


# ----------------------------------------------------------------------------------------------------------------
# The log
# ----------------------------------------------------------------------------------------------------------------


LOG_ENCODER = json.JSONEncoder(allow_nan=False)


class RequestLog:
    """Finished requests, kept until there is time to write them: a line takes longer than a delta may be late."""

    def __init__(self, path: str | None) -> None:
        self._lines: deque[dict[str, Any]] = deque()
        self._file: IO[str] | None = None
        if path is not None:
            try:
                self._file = open(path, "a", encoding="utf-8")  # noqa: SIM115 - open as long as the server
            except OSError as error:
                raise UsageError(f"--log {path}: {error.strerror}; give a file that can be written") from None

    def __bool__(self) -> bool:
        return bool(self._lines)

    def add(self, record: dict[str, Any]) -> None:
        if self._file is not None:
            self._lines.append(record)

    def write_one(self) -> None:
        """Write the oldest record; flush once none is left."""
        assert self._file is not None
        try:
            self._file.write(LOG_ENCODER.encode(self._lines.popleft()) + "\n")
            if not self._lines:
                self._file.flush()
        except OSError as error:  # a full disk: serve on without a log
            self._give_up(error)

    def close(self) -> None:
        while self._lines:
            self.write_one()
        if self._file is not None:
            try:
                self._file.close()
            except OSError as error:
                self._give_up(error)

    def _give_up(self, error: OSError) -> None:
        complain(f"the log cannot be written any more: {error.strerror}; what follows is not logged")
        self._lines.clear()
        self._file = None


# ----------------------------------------------------------------------------------------------------------------
# Answering one request
# ----------------------------------------------------------------------------------------------------------------


class Responder:
    """One completion request from its parsing to its log line: the engine calls it, it writes to the connection."""

    def __init__(self, server: Server, connection: Connection, http: HttpRequest, answer: Answer) -> None:
        self.server = server
        self.connection = connection
        self.http = http
        self.answer = answer
        self.job = answer.job
        self.status = 200
        self.finish: str | None = None
        self.error: str | None = None
        self.sends: list[float] = []
        self.keep_alive = http.keep_alive
        self.arrived = connection.arrived
        self.request_read = connection.read_at
        self.job.on_token = self.token
        self.job.on_end = self.ended

    def begin(self) -> None:
        """Called once before the engine has the request."""

    def token(self, made: int) -> None:
        """The engine made one more token."""

    def ended(self, reason: str) -> None:
        """The engine made the last one: length, stop, error or stall."""

    def abandon(self, finish: str) -> None:
        """The client went away, or the server stops."""
        self.server.engine.cancel(self.job)
        self.finish = finish
        self.server.log_request(self)

    def close(self) -> None:
        """The answer is written."""
        self.server.log_request(self)
        self.connection.answered(self.keep_alive)

    def words(self, first: int, last: int) -> str:
        """The text of tokens first to last, counted from 1."""
        return "".join(WORDS[k & WORD_MASK] for k in range(first, last + 1))

    def reasoning_tokens(self) -> int:
        """How many of the first tokens are thinking."""
        options = self.server.options
        thinks = options.reasoning != "none" and self.answer.request.thinking and not options.null
        return options.reasoning_tokens if thinks else 0


class WholeResponder(Responder):
    """An answer that is not streamed: one document at the end."""

    def ended(self, reason: str) -> None:
        dialect, answer = self.server.dialect, self.answer
        if reason == "stall":
            return
        thought = min(self.reasoning_tokens(), self.job.made)
        answer.thought, answer.text = self.words(1, thought), self.words(thought + 1, self.job.made)
        answer.last_at = self.server.clock()
        self.finish = reason
        if reason == "error":
            failure = ApiError("failed", "Internal server error (simulated)")
            self.status, self.error = dialect.status(failure), str(failure)
            body = dialect.error(failure)
        else:
            body = dialect.whole(answer, reason)
            self.sends.append(self.server.clock())
        self.connection.respond(self.status, dialect.json_type, body, self.http)
        self.close()


class StreamResponder(Responder):
    """A streamed answer: each delta's bytes are ready before its moment, and leave in one write."""

    def __init__(self, server: Server, connection: Connection, http: HttpRequest, answer: Answer) -> None:
        super().__init__(server, connection, http, answer)
        self.keep_alive = http.keep_alive and http.chunked  # else only the close ends the body
        self._clock = server.clock
        self._write = connection.write
        self._per_delta = server.options.tokens_per_delta
        self._first_content = self.reasoning_tokens() + 1
        self._lead = b""  # what must leave before the first delta
        self._plain: list[bytes] = []  # the event of token k is at k & WORD_MASK
        self._special: set[int] = set()  # tokens that need more than that
        self._silence: asyncio.TimerHandle | None = None

    def begin(self) -> None:
        server, dialect, http = self.server, self.server.dialect, self.http
        head = response_head(dialect, 200, dialect.stream_type, None, self.keep_alive, http.chunked)
        if dialect.early_head:
            self._write(head)
            head = b""
        self._lead = head + frame(event(dialect.role(self.answer)), http.chunked)
        thinking = self._first_content > 1
        self._plain = self._events(server.options.reasoning if thinking else "content")
        self._special = {1, self._first_content, self.job.limit}

    def _events(self, field: str) -> list[bytes]:
        before, after = self.server.dialect.delta(self.answer, field, None)
        before, chunked = b"data: " + before, self.http.chunked
        after += b"\n\n"
        return [frame(before + word + after, chunked) for word in WORDS_JSON]

    def token(self, made: int) -> None:
        if self._per_delta > 1:
            self._several(made)
            return
        data = self._plain[made & WORD_MASK]
        if made in self._special:
            data = self._special_event(made)
        self.send(data)

    def send(self, data: bytes) -> None:
        """Write one text delta; its stamp is taken just before."""
        self.sends.append(self._clock())
        self._write(data)

    def _special_event(self, made: int) -> bytes:
        if made == self._first_content and made > 1:
            self._plain = self._events("content")
        data = self._plain[made & WORD_MASK]
        if made == self.job.limit and self.job.ending in ("length", "stop"):
            data = self._text_event(made, made)
        return self._take_lead() + data

    def _take_lead(self) -> bytes:
        lead, self._lead = self._lead, b""
        return lead

    def _text_event(self, first: int, last: int) -> bytes:
        """One event with the text of tokens first to last, which are all thinking or all answer."""
        field = "content" if first >= self._first_content else self.server.options.reasoning
        ending = self.job.ending
        finish = ending if last == self.job.limit and ending in ("length", "stop") else None
        before, after = self.server.dialect.delta(self.answer, field, finish)
        text = to_json(self.words(first, last))
        return frame(event(before + text + after), self.http.chunked)

    def _several(self, made: int) -> None:
        """With several tokens in a delta: send when there are enough, at the end, and where thinking ends."""
        thinking = self._first_content - 1
        start = thinking if made > thinking else 0
        size = self._per_delta
        if (made - start) % size and made not in (thinking, self.job.limit):
            return
        first = start + (made - start - 1) // size * size + 1
        self.send(self._take_lead() + self._text_event(first, made))

    def flush(self) -> None:
        """Send what is held back, if anything is."""

    def ended(self, reason: str) -> None:
        dialect, chunked = self.server.dialect, self.http.chunked
        self.flush()
        if reason == "stall":
            self._keep_alive()
            return
        self.finish = reason
        self.answer.last_at = self.sends[-1]
        if reason == "error":
            payloads = dialect.failure()
            self.error = "error event (simulated)"
        else:
            payloads = [*dialect.tail(self.answer, reason), b"[DONE]"]
        data = b"".join(frame(event(payload), chunked) for payload in payloads)
        self._write(data + (LAST_CHUNK if chunked else b""))
        self.close()

    def _keep_alive(self) -> None:
        self._write(frame(KEEP_ALIVE_COMMENT, self.http.chunked))
        self._silence = self.server.loop.call_later(self.server.options.keep_alive_s, self._keep_alive)

    def abandon(self, finish: str) -> None:
        if self._silence is not None:
            self._silence.cancel()
        super().abandon(finish)


class HoldingResponder(StreamResponder):
    """A streamed answer behind a buffering proxy: deltas are held and leave together."""

    def __init__(self, server: Server, connection: Connection, http: HttpRequest, answer: Answer) -> None:
        super().__init__(server, connection, http, answer)
        self._held: list[bytes] = []
        self._most = server.options.deltas_per_write
        self._wait_s = server.options.coalesce_ms / 1e3
        self._timer: asyncio.TimerHandle | None = None

    def send(self, data: bytes) -> None:
        self._held.append(data)
        if self._wait_s > 0:
            if self._timer is None:
                self._timer = self.server.loop.call_later(self._wait_s, self.flush)
        elif len(self._held) >= self._most:
            self.flush()

    def flush(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._held:
            data = b"".join(self._held)
            self.sends += [self._clock()] * len(self._held)
            self._held.clear()
            self._write(data)

    def abandon(self, finish: str) -> None:
        if self._timer is not None:
            self._timer.cancel()
        super().abandon(finish)


def finish_at_once(job: Job) -> None:
    """The null server's model: everything is there when the request is."""
    job.admitted = job.ready_at = job.arrived
    job.cached, job.made = 0, job.limit


class NullWholeResponder(WholeResponder):
    """The null server, not streamed."""

    def begin(self) -> None:
        finish_at_once(self.job)
        self.ended(self.job.ending)


class NullResponder(StreamResponder):
    """The null server, streamed: the whole answer in one burst, its deltas made once per length and kept."""

    def begin(self) -> None:
        super().begin()
        job, deltas = self.job, self.server.null_deltas
        finish_at_once(job)
        key = (job.limit, self.http.chunked)
        if key not in deltas:
            if len(deltas) >= 16:
                deltas.clear()
            deltas[key] = b"".join(self._plain[made & WORD_MASK] for made in range(1, job.limit))
        self._write(self._take_lead())
        self.sends = [self._clock()] * job.limit
        self._write(deltas[key])
        self._write(self._text_event(job.limit, job.limit))
        self.ended(job.ending)


# ----------------------------------------------------------------------------------------------------------------
# Connections: non-blocking sockets on the event loop, one write system call per delta
# ----------------------------------------------------------------------------------------------------------------


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
    """One client. At most one request is answered at a time; what is sent ahead waits in the reader."""

    def __init__(self, server: Server, sock: socket.socket) -> None:
        self._server = server
        self._sock = sock
        self._send = sock.send
        self._descriptor = sock.fileno()  # asyncio is quicker with a number than with a socket
        self._reader = RequestReader()
        self._backlog: deque[memoryview] = deque()  # what the socket would not take yet
        self._close_when_sent = False
        self._refused = False  # the rest is read and thrown away
        self.responder: Responder | None = None
        self.open = True
        self.connected = self.arrived = self.read_at = server.clock()
        server.connections.add(self)
        server.loop.add_reader(self._descriptor, self._on_readable)
        self._on_readable()  # most clients write as soon as they are connected

    def _on_readable(self) -> None:
        try:
            data, arrived, read_at = read_stamped(self._sock, self._server.clock)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            data, arrived, read_at = b"", 0.0, 0.0
        if not data:
            self.lost()
            return
        if self._refused:
            return
        self.arrived, self.read_at = arrived, read_at
        self._server.catch_up()  # a step that is due comes before the work that a request makes
        try:
            self._reader.feed(data)
            self._serve()
        except ProtocolError as error:
            self._refuse(error)

    def _serve(self) -> None:
        """Handle the requests that have been read whole, one after the other."""
        while self.open and self.responder is None and not self._close_when_sent:
            request = self._reader.next_request()
            if request is None:
                if self._reader.wants_continue:
                    self._reader.wants_continue = False
                    self.write(b"HTTP/1.1 100 Continue\r\n\r\n")
                return
            self._server.handle(self, request)

    def _serve_again(self) -> None:
        try:
            self._serve()
        except ProtocolError as error:
            self._refuse(error)

    def respond(self, status: int, content_type: str, body: bytes, request: HttpRequest) -> None:
        """Write a whole answer."""
        head = response_head(self._server.dialect, status, content_type, len(body), request.keep_alive, False)
        self.write(head if request.method == "HEAD" else head + body)
        if not request.keep_alive and self.responder is None:
            self._close_after_sending()

    def _refuse(self, error: ProtocolError) -> None:
        """Answer bytes that are no request and stop listening to this client, without resetting the connection."""
        if self.responder is not None:
            self.lost()
            return
        dialect = self._server.dialect
        body = dialect.error(ApiError("invalid", str(error)))
        self.write(response_head(dialect, error.status, dialect.json_type, len(body), False, False) + body)
        self._refused = True
        self._server.loop.call_later(LINGER_S, self.lost)
        with contextlib.suppress(OSError):
            if not self._backlog:
                self._sock.shutdown(socket.SHUT_WR)

    def write(self, data: bytes) -> None:
        """Send now what the socket takes, the rest when it can."""
        if not self._backlog:
            try:
                sent = self._send(data)
            except (BlockingIOError, InterruptedError):
                sent = 0
            except OSError:
                self._server.loop.call_soon(self.lost)
                return
            if sent == len(data):
                return
            self._backlog.append(memoryview(data)[sent:])
            self._server.loop.add_writer(self._descriptor, self._on_writable)
        else:
            self._backlog.append(memoryview(data))

    def _on_writable(self) -> None:
        while self._backlog:
            piece = self._backlog[0]
            try:
                sent = self._send(piece)
            except (BlockingIOError, InterruptedError):
                return
            except OSError:
                self.lost()
                return
            if sent < len(piece):
                self._backlog[0] = piece[sent:]
                return
            self._backlog.popleft()
        self._server.loop.remove_writer(self._descriptor)
        if self._close_when_sent:
            self.lost()

    def answered(self, keep_alive: bool) -> None:
        """The responder is done. The next request is handled after whatever called this has ended."""
        self.responder = None
        if keep_alive:
            self._server.loop.call_soon(self._serve_again)
        else:
            self._close_after_sending()

    def _close_after_sending(self) -> None:
        self._close_when_sent = True
        if not self._backlog:
            self._server.loop.call_soon(self.lost)

    def lost(self, finish: str = "cancelled") -> None:
        """Close; a request under way is given up."""
        if not self.open:
            return
        self.open = False
        self._server.loop.remove_reader(self._descriptor)
        self._server.loop.remove_writer(self._descriptor)
        self._sock.close()
        self._server.connections.discard(self)
        if self.responder is not None:
            responder, self.responder = self.responder, None
            responder.abandon(finish)
            self._server.arm()


# ----------------------------------------------------------------------------------------------------------------
# The server: routes, the engine's timer, the log's spare time
# ----------------------------------------------------------------------------------------------------------------


class PreciseSelector(selectors.DefaultSelector):
    """epoll waits in whole milliseconds, rounded up, so a timer is up to one late. select() on the epoll descriptor
    itself waits in microseconds; other selectors are precise already."""

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is not None and timeout > 0 and hasattr(select, "epoll"):
            select.select([self.fileno()], [], [], timeout)
            timeout = 0
        ready: list[tuple[selectors.SelectorKey, int]] = super().select(timeout)
        return ready


class Server:
    """Everything of one running server. `clock` is time.perf_counter; the event loop's may have another zero."""

    def __init__(self, options: Options, loop: asyncio.AbstractEventLoop, log: RequestLog) -> None:
        self.options = options
        self.loop = loop
        self.clock: Clock = time.perf_counter
        self.engine = BatchEngine(options, make_cache(options), self.clock)
        self.dialect = DIALECTS[options.dialect](options, self.engine)
        self.connections: set[Connection] = set()
        self.null_deltas: dict[tuple[int, bool], bytes] = {}
        self._log = log
        self._log_timer: asyncio.Handle | None = None
        self._loop_ahead_s = loop.time() - self.clock()
        self._timer: asyncio.Handle | None = None
        self._armed_for: float | None = None
        self._requests = 0
        self._ready_at = self.clock() + options.loading_s
        self._listener: socket.socket | None = None

    # --- the timer -------------------------------------------------------------------------------------------

    def arm(self) -> None:
        """See to it that the engine's next event is handled when it is due."""
        due = self.engine.due()
        if due == self._armed_for:
            return
        if self._timer is not None:
            self._timer.cancel()
        self._armed_for = due
        if due is None:
            self._timer = None
        elif due <= self.clock():
            self._timer = self.loop.call_soon(self._on_timer)  # others get their turn between two late steps
        else:
            self._timer = self.loop.call_at(due + self._loop_ahead_s, self._on_timer)

    def _on_timer(self) -> None:
        self._timer = self._armed_for = None
        self.catch_up()
        self.arm()

    def catch_up(self) -> None:
        """Handle one event of the engine if it is due."""
        due = self.engine.due()
        if due is not None and due <= self.clock():
            self.engine.advance()
            self.arm()

    # --- connections -----------------------------------------------------------------------------------------

    def listen(self, listener: socket.socket) -> None:
        self._listener = listener
        self.loop.add_reader(listener, self._on_connection)

    def _on_connection(self) -> None:
        assert self._listener is not None
        for _ in range(ACCEPTS_PER_TURN):
            try:
                sock, _address = self._listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                if error.errno not in (errno.EMFILE, errno.ENFILE):
                    raise
                complain("no descriptor left for a new connection; raise the limit (ulimit -n). Trying again in 0.5 s")
                self.loop.remove_reader(self._listener)
                self.loop.call_later(0.5, self.listen, self._listener)
                return
            sock.setblocking(False)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            Connection(self, sock)

    def stop(self) -> None:
        """Give up what is under way and write the log to its end."""
        if self._listener is not None:
            self.loop.remove_reader(self._listener)
        for connection in list(self.connections):
            connection.lost("shutdown")
        self._log.close()

    # --- requests --------------------------------------------------------------------------------------------

    def handle(self, connection: Connection, request: HttpRequest) -> None:
        """Answer one request, or begin to."""
        dialect = self.dialect
        if self.options.api_key is not None and not dialect.authorized(
            request.path, request.headers.get("authorization")
        ):
            connection.respond(401, dialect.json_type, dialect.unauthorized(), request)
            return
        try:
            if self.clock() < self._ready_at:
                raise ApiError("loading", "Loading model")
            page = dialect.pages.get(request.path) if request.method in ("GET", "HEAD") else None
            if page is not None:
                connection.respond(*page(), request)
            elif request.path in dialect.chat_paths and request.method == "POST":
                self._complete(connection, request)
            elif request.path in dialect.chat_paths or request.path in dialect.pages:
                raise dialect.method_not_allowed()
            else:
                raise dialect.not_found()
        except ApiError as error:
            connection.respond(dialect.status(error), dialect.json_type, dialect.error(error), request)

    def _complete(self, connection: Connection, http: HttpRequest) -> None:
        self._requests += 1
        number = self._requests
        try:
            request = parse_chat_request(http.body)
            limit = self.dialect.limit(request)
            waiting, most = len(self.engine.waiting), self.options.max_queue
            if most is not None and waiting >= most and self.engine.full():
                raise ApiError("busy", f"too many requests: {waiting} are waiting already")
        except ApiError as error:
            self._log.add(refusal_record(number, connection, self.dialect.status(error), str(error)))
            self._write_log_soon()
            raise
        limit, ending = self._plan_ending(number, request, limit)
        job = Job(number, request.prompt, request.prompt_tokens, connection.arrived, limit, ending)
        name = "chatcmpl-null" if self.options.null else f"chatcmpl-sim{number:029d}"
        created = int(self.dialect.started if self.options.null else time.time())
        responder = self._responder(connection, http, Answer(name, created, request, job))
        connection.responder = responder
        responder.begin()
        if not self.options.null:
            self.engine.submit(job)
            self.arm()

    def _plan_ending(self, number: int, request: ChatRequest, limit: int) -> tuple[int, str]:
        """After how many tokens the answer ends, and how."""
        options = self.options
        ending = "length"
        if options.early_stop is not None and not request.ignore_eos:
            stop = early_stop_tokens(request.prompt, options.early_stop, options.seed)
            if stop <= limit:
                limit, ending = stop, "stop"
        if options.fail_every is not None and number % options.fail_every == 0:
            return max(1, limit // 2), "error"
        if options.stall_every is not None and number % options.stall_every == 0:
            return max(1, limit // 2), "stall"
        return limit, ending

    def _responder(self, connection: Connection, http: HttpRequest, answer: Answer) -> Responder:
        options = self.options
        if not answer.request.stream:
            return (NullWholeResponder if options.null else WholeResponder)(self, connection, http, answer)
        if options.null:
            return NullResponder(self, connection, http, answer)
        holds = options.deltas_per_write > 1 or options.coalesce_ms > 0
        return (HoldingResponder if holds else StreamResponder)(self, connection, http, answer)

    # --- the log ---------------------------------------------------------------------------------------------

    def log_request(self, responder: Responder) -> None:
        """Keep the finished request's line until there is time for it."""
        self._log.add(request_record(responder, self.clock()))
        self._write_log_soon()

    def _write_log_soon(self) -> None:
        if self._log_timer is None and self._log:
            self._log_timer = self.loop.call_soon(self._write_log)

    def _write_log(self) -> None:
        """One line if no step is near, and then everything else gets its turn."""
        self._log_timer = None
        if not self._log:  # the server has stopped
            return
        due = self.engine.due()
        spare_s = math.inf if due is None else due - self.clock()
        if spare_s > LOG_MARGIN_S:
            self._log.write_one()
            self._write_log_soon()
        else:
            self._log_timer = self.loop.call_later(LOG_MARGIN_S, self._write_log)


def refusal_record(number: int, connection: Connection, status: int, error: str) -> dict[str, Any]:
    """The log line of a completion request that was refused."""
    record = dict.fromkeys(
        (
            "event", "id", "status", "finish", "error", "stream", "slot", "prompt_tokens", "cached_tokens",
            "output_tokens", "max_tokens", "in_flight_peak", "batch", "late_s", "connected", "arrived",
            "request_read", "admitted", "prefilled", "sends", "finished",
        )
    )  # fmt: skip
    stamps = {"connected": connection.connected, "arrived": connection.arrived, "request_read": connection.read_at}
    return {**record, "event": "request", "id": number, "status": status, "error": error, "sends": [], **stamps}


def request_record(responder: Responder, now: float) -> dict[str, Any]:
    """The log line of a completion request that was taken."""
    job, request = responder.job, responder.answer.request
    return {
        "event": "request",
        "id": job.id,
        "status": responder.status,
        "finish": responder.finish,
        "error": responder.error,
        "stream": request.stream,
        "slot": job.slot,
        "prompt_tokens": job.prompt_tokens,
        "cached_tokens": job.cached,
        "output_tokens": job.made,
        "max_tokens": request.max_tokens,
        "in_flight_peak": job.peak or None,
        "batch": job.batch,
        "late_s": job.late_s,
        "connected": responder.connection.connected,
        "arrived": responder.arrived,
        "request_read": responder.request_read,
        "admitted": job.admitted,
        "prefilled": job.ready_at,
        "sends": responder.sends,
        "finished": now,
    }


# ----------------------------------------------------------------------------------------------------------------
# Command line
# ----------------------------------------------------------------------------------------------------------------


class OneLineParser(argparse.ArgumentParser):
    """Reports a wrong argument in one line."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message}; see --help")


def whole_number(least: int, most: int = 2**31 - 1) -> Callable[[str], int]:
    """An argument type: an integer in a range."""

    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number") from None
        if not least <= value <= most:
            raise argparse.ArgumentTypeError(f"{value} is not between {least} and {most}")
        return value

    return parse


def number(least: float, *, above: bool = False) -> Callable[[str], float]:
    """An argument type: a finite number, at least `least` or above it."""

    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None
        if not math.isfinite(value) or value < least or (above and value == least):
            raise argparse.ArgumentTypeError(
                f"{text} is not a finite number {'above' if above else 'of at least'} {least:g}"
            )
        return value

    return parse


def build_parser() -> argparse.ArgumentParser:
    """Every option with its type; the module's docstring says what each means."""
    parser = OneLineParser(prog=PROGRAM, add_help=False, allow_abbrev=False)
    add = parser.add_argument
    add("-h", "--help", action="store_true")
    add("--version", action="store_true")
    add("--host", default="127.0.0.1")
    add("--port", type=whole_number(0, 65535), default=0)
    add("--port-file")
    add("--log")
    add("--dialect", choices=sorted(DIALECTS), default="llama")
    add("--model", default="sim-chat")
    add("--api-key")
    add("--loading-s", type=number(0), default=0.0)
    add("--a-ms", type=number(0), default=20.0)
    add("--b-ms", type=number(0), default=1.5)
    add("--prefill-tok-s", type=number(0, above=True), default=5000.0)
    add("--prefill-blocks", action="store_true")
    add("--slots", type=whole_number(1, 100_000), default=8)
    add("--context", type=whole_number(16), default=4096)
    add("--max-queue", type=whole_number(0))
    add("--cache", choices=("slot", "pool", "none"))
    add("--saturate-at", type=whole_number(1))
    add("--saturate-factor", type=number(0, above=True))
    add("--reasoning", choices=("none", "reasoning_content", "reasoning"), default="none")
    add("--reasoning-tokens", type=whole_number(1))
    add("--early-stop", type=whole_number(1))
    add("--seed", type=whole_number(0), default=0)
    add("--tokens-per-delta", type=whole_number(1), default=1)
    add("--deltas-per-write", type=whole_number(1), default=1)
    add("--coalesce-ms", type=number(0), default=0.0)
    add("--no-usage", action="store_true")
    add("--no-prompt-details", action="store_true")
    add("--null", action="store_true")
    add("--fail-every", type=whole_number(1))
    add("--stall-every", type=whole_number(1))
    add("--keep-alive-s", type=number(0, above=True), default=1.0)
    return parser


def read_options(arguments: argparse.Namespace) -> Options:
    """Check the options against each other; UsageError names the pair that does not fit."""
    given = {
        name: value for name, value in vars(arguments).items() if name not in ("help", "version") and value is not None
    }
    given.setdefault("cache", DIALECTS[arguments.dialect].default_cache)
    if not arguments.model:
        raise UsageError("--model: the name is empty; give one")
    if arguments.a_ms + arguments.b_ms <= 0:
        raise UsageError("--a-ms and --b-ms are both 0, so a step takes no time; give one of them, or --null")
    if arguments.coalesce_ms and arguments.deltas_per_write > 1:
        raise UsageError("--coalesce-ms and --deltas-per-write both hold deltas back; give one of them")
    if arguments.saturate_factor is not None and arguments.saturate_at is None:
        raise UsageError("--saturate-factor says nothing without --saturate-at; give that as well")
    if arguments.reasoning_tokens is not None and arguments.reasoning == "none":
        raise UsageError("--reasoning-tokens says nothing without --reasoning FIELD; give that as well")
    if arguments.null and (arguments.fail_every or arguments.stall_every):
        raise UsageError("--null answers at once and knows no faults; leave --fail-every and --stall-every out")
    return Options(**given)


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
    try:
        import resource
    except ImportError:  # Windows has no such limit
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    unlimited = resource.RLIM_INFINITY
    for wanted in (1 << 20, 65536, 10240):  # macOS refuses more than OPEN_MAX although the hard limit is infinite
        wanted = wanted if hard == unlimited else min(wanted, hard)
        if soft != unlimited and soft < wanted:
            with contextlib.suppress(ValueError, OSError):
                resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
                return


def write_port_file(path: str, port: int) -> None:
    """Put the file in place whole, so that a reader never sees half a number."""
    temporary = f"{path}.{os.getpid()}"
    try:
        with open(temporary, "w", encoding="ascii") as file:
            file.write(f"{port}\n")
        os.replace(temporary, path)
    except OSError as error:
        raise UsageError(f"--port-file {path}: {error.strerror}; give a file that can be written") from None


@contextlib.contextmanager
def until_signal(loop: asyncio.AbstractEventLoop) -> Iterator[asyncio.Event]:
    """An event that SIGTERM and SIGINT set, for as long as the block runs."""
    stop = asyncio.Event()
    for number_ in (signal.SIGTERM, signal.SIGINT):
        try:
            loop.add_signal_handler(number_, stop.set)
        except NotImplementedError:  # Windows
            signal.signal(number_, lambda *_: loop.call_soon_threadsafe(stop.set))
    yield stop


async def serve(options: Options, listener: socket.socket, log: RequestLog) -> None:
    """Serve until a signal asks to stop."""
    loop = asyncio.get_running_loop()
    server = Server(options, loop, log)
    with until_signal(loop) as stop:
        server.listen(listener)
        host, port = listener.getsockname()[:2]
        if options.port_file is not None:
            write_port_file(options.port_file, port)
        print(f"listening on http://{f'[{host}]' if ':' in host else host}:{port}/v1", flush=True)
        await stop.wait()
    server.stop()


def run(options: Options) -> None:
    """Open what can fail, then serve."""
    raise_descriptor_limit()
    log = RequestLog(options.log)
    listener = open_listener(options.host, options.port)
    # A collection in the middle of a step would show as a late token; what lives for ever need not be looked at.
    gc.freeze()
    gc.set_threshold(100_000, 50, 50)
    loop = asyncio.SelectorEventLoop(PreciseSelector())
    try:
        loop.run_until_complete(serve(options, listener, log))
    finally:
        listener.close()
        loop.close()


def main(argv: Sequence[str] | None = None) -> int:
    try:
        arguments = build_parser().parse_args(argv)
        if arguments.help:
            print((__doc__ or "").strip(), flush=True)
            return 0
        if arguments.version:
            print(f"{PROGRAM} {TOOL_VERSION}", flush=True)
            return 0
        run(read_options(arguments))
    except UsageError as error:
        complain(str(error))
        return 2
    except KeyboardInterrupt:  # before the signal handlers stood
        return 0
    except BrokenPipeError:  # whoever read the first line, or the help, has gone
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        complain(f"cannot write the output: {error.strerror or error}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
