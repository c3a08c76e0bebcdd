"""Measure the load generator itself: what its client costs, and how true its times are. Run by hand.

  python3 tests/bench_client.py
  python3 tests/bench_client.py --parts burst,parse --rounds 9

Three clients take the same streams from a server in another process that sends prebuilt bytes, each client in a
process of its own, so that CPU time (getrusage) and memory are its own: a bare asyncio.Protocol that only counts
events, load_test.py through its real code path, and an aiohttp client as most load generators are written. Without
aiohttp that column is left out, and the output says so.

Parts:
  burst     CPU us per delta and deltas/s while the server sends as fast as it can; llama-server's and vLLM's events,
            each event an HTTP chunk of its own
  parse     CPU us per delta of the stream reader alone, without sockets: reads of 64 KiB, reads of one event
  paced     CPU us per delta at one event per read: 100 streams, a token every 20 ms
  fidelity  at 20, 100, 300 and 1,000 streams started together: the client's times against the send stamps of
            scripts/simulated_engine.py (one monotonic clock; run it on Linux), and what a clock would show that
            starts before connecting
  connect   CPU us per request with one token: what a connection and its bookkeeping cost
  memory    peak memory of 1,000 streams x 2,000 deltas
  many      2,000, 5,000 and 10,000 streams at 20 tokens/s each: CPU, memory, loop lag, and the TTFT that the client
            adds (its stamp of the first text less the server's, which stands in that text). The server writes to a
            fiftieth of the streams at a time; where it cannot keep the pace, tokens/s shows it

Each figure is the median of the rounds; clients take turns inside a round, and ratios are medians of each round's
own ratio. Exit codes: 0; 1 where a client missed a delta (no figure counts then); 2 for bad arguments.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import datetime
import gc
import json
import os
import platform
import resource
import selectors
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Callable, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import bare_clients  # noqa: E402
from bare_clients import Stream  # noqa: E402

import load_test  # noqa: E402

# Measured on 2026-11-30 with two cores of an AMD EPYC, Linux 6.18, Python 3.11, aiohttp 3.14; client and server on one
# core each, nothing else running. Write a new run's figures here.
#
#   CPU per delta                                bare counter   load_test.py            aiohttp client
#   bursting, llama-server's events              0.30 us        1.08 us (3.6 x)         11.4 us (38 x)
#   bursting, vLLM's events                      0.29 us        0.97 us (3.4 x)         11.3 us (39 x)
#   paced, 100 streams, each at its own moment   26 to 33 us    32 to 37 us (1.1 x)     62 to 72 us (2.0 to 2.4 x)
#   paced, the same, all at one moment           10.3 us        13.7 us (1.3 to 1.4 x)  28 us (2.7 x)
#
#   Streams started together, a token every 20 ms: the client's time less the engine's own stamp, ms, median / p99
#   streams   TTFT          last token    TTFT, clock started before connecting   TTFT, aiohttp client
#   20        0.44 / 0.50   0.17 / 0.25   2.33 / 3.01                             3.96 / 5.44
#   100       0.28 / 0.48   0.08 / 0.22   1.92 / 2.32                             22.6 / 29.7
#   300       0.30 / 0.66   0.40 / 0.61   2.42 / 3.58                             66.2 / 83.1
#   1,000     0.36 / 2.89   0.50 / 0.95   3.35 / 5.56                             233 / 294
#
# Many streams at 20 tokens/s each: not yet measured on a machine with nothing else running (`--parts many`).

PARTS = ("burst", "parse", "paced", "fidelity", "connect", "memory", "many")
SHAPES = ("llama", "vllm")
BARE, OURS, AIOHTTP = "bare counter", "load_test.py", "aiohttp"
KEY_HEADER = "X-Request-Id"
NOT_TEXT = 4  # events without text in every response: role, finish, usage, [DONE]
BURST_TARGET_US, BURST_TARGET_RATIO, PACED_TARGET_RATIO = 1.0, 3.0, 1.15
FIDELITY_TARGET_MS = {"median": 1.0, "p99": 5.0}
TPOT_TARGET_PERCENT = 0.5
MEMORY_TARGET_MB = 300
MANY_PACE_S, MANY_GROUPS = 0.05, 50
READ_BYTES = 64 * 1024
PINNED = "BENCH_NO_PIN" not in os.environ

# Pieces as a tokeniser cuts English, some of which JSON escapes or UTF-8 spells with several bytes.
PIECES = (
    " The", " queue", " grows", " when", " more", " people", " ask", " than", " the", " server", " can", " serve", ".",
    "\n\n", "1", ".", " **", "Slots", "**", " –", " each", " one", " holds", " a", " cache", " for", " a", " single",
    " sequence", ",", " and", " \"", "busy", "\"", " means", " it", " decodes", " a", " token", " per", " step", ".",
)  # fmt: skip


# ---------------------------------------------------------------- events as engines send them


def frame(shape: str, choices: Sequence[Any], **extra: Any) -> bytes:
    """One event with the fields, and in the order, that llama-server or vLLM sends, as one HTTP chunk."""
    created, ident = 1781492230, "chatcmpl-qC6laQHbZ2CmxNvJ4NoB1L93LcVF7nfe"
    doc: dict[str, Any]
    if shape == "llama":
        doc = {"choices": choices, "created": created, "id": ident, "model": "local-chat"}
        doc.update(system_fingerprint="b9554-d403f00ec", object="chat.completion.chunk")
    else:
        doc = {"id": ident, "object": "chat.completion.chunk", "created": created, "model": "local-chat"}
        doc["choices"] = choices
    text = json.dumps({**doc, **extra}, separators=(",", ":"), ensure_ascii=False)
    return chunk(b"data: " + text.encode() + b"\n\n")


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def choice(shape: str, delta: Mapping[str, Any], finish: str | None = None) -> list[dict[str, Any]]:
    if shape == "llama":
        return [{"finish_reason": finish, "index": 0, "delta": delta}]
    return [{"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish, "token_ids": None}]


class Answer(NamedTuple):
    """One response, ready to send: what comes before the deltas, a chunk per delta, what comes after."""

    head: bytes
    deltas: list[bytes]
    tail: bytes


def build_answer(shape: str, deltas: int) -> Answer:
    head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
    head += frame(shape, choice(shape, {"role": "assistant", "content": None if shape == "llama" else ""}))
    pieces = [frame(shape, choice(shape, {"content": piece})) for piece in PIECES]
    usage = {"prompt_tokens": 9, "completion_tokens": deltas, "total_tokens": 9 + deltas}
    tail = frame(shape, choice(shape, {}, "length")) + frame(shape, [], usage=usage)
    return Answer(
        head, [pieces[k % len(pieces)] for k in range(deltas)], tail + chunk(b"data: [DONE]\n\n") + chunk(b"")
    )


# ---------------------------------------------------------------- the server, in its own process


class Peer:
    """A connection of the server: its request, then what is still to be sent."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.received = b""
        self.sent = 0  # deltas of a paced response
        self.pending = memoryview(b"")

    def has_request(self) -> bool:
        """Read what has come; whether the request is whole."""
        self.received += self.sock.recv(65536)
        head, blank, body = self.received.partition(b"\r\n\r\n")
        length = head.lower().partition(b"content-length:")[2].split(b"\r\n")[0]
        return bool(blank) and len(body) >= int(length or b"0")


class Server:
    """Sends one prebuilt answer to every request: in one go, or a piece of it to everybody at each tick.

    Single-threaded and non-blocking, so that nothing here waits for anything but the clock and the sockets.
    """

    def __init__(
        self, answer: Answer, pace_s: float | None, per_write: int, gather: int, groups: int, stamped: bool
    ) -> None:
        self.answer = answer
        self.whole = b"".join([answer.head, *answer.deltas, answer.tail])
        self.pieces = [b"".join(answer.deltas[k : k + per_write]) for k in range(0, len(answer.deltas), per_write)]
        self.pace_s = pace_s
        self.gather = gather  # a paced run starts once so many requests are there
        self.groups = groups  # of streams, each with a moment of its own within the pace; 1: all share one
        self.stamped = stamped  # the first text of each stream is the moment it is sent
        self.waiting: list[Peer] = []
        self.playing: list[Peer] = []
        self.turn = 0
        self.turn_at = 0.0
        self.selector = selectors.DefaultSelector()

    def run(self) -> None:
        """Serve until standard input is closed; the first output line is the port."""
        listener = socket.create_server(("127.0.0.1", 0), backlog=4096)
        listener.setblocking(False)
        self.selector.register(listener, selectors.EVENT_READ)
        self.selector.register(sys.stdin, selectors.EVENT_READ)
        print(listener.getsockname()[1], flush=True)
        while True:
            for key, mask in self.selector.select(self.wait_s()):
                if key.fileobj is sys.stdin:
                    return
                if key.fileobj is listener:
                    self.accept(listener)
                else:
                    self.serve(key.data, mask)
            if self.playing and time.perf_counter() >= self.turn_at:
                self.take_turn()

    def wait_s(self) -> float | None:
        """How long to wait for the sockets. They wait in whole milliseconds, so the last of it is slept away here."""
        if not self.playing:
            return None
        left_s = self.turn_at - time.perf_counter()
        if left_s > 0.002:
            return left_s - 0.002
        time.sleep(max(0.0, left_s))
        return 0.0

    def accept(self, listener: socket.socket) -> None:
        with contextlib.suppress(BlockingIOError):
            while True:
                sock, _ = listener.accept()
                sock.setblocking(False)
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                self.selector.register(sock, selectors.EVENT_READ, Peer(sock))

    def serve(self, peer: Peer, mask: int) -> None:
        try:
            if mask & selectors.EVENT_WRITE:
                self.push(peer)
            elif peer.has_request():
                self.begin(peer)
        except OSError:
            self.drop(peer)

    def begin(self, peer: Peer) -> None:
        if self.pace_s is None:
            peer.pending = memoryview(self.whole)
            self.selector.modify(peer.sock, selectors.EVENT_WRITE, peer)
            return
        self.selector.unregister(peer.sock)
        peer.sock.send(self.answer.head)
        self.waiting.append(peer)
        if len(self.waiting) >= self.gather:
            self.playing, self.waiting = self.waiting, []
            self.turn, self.turn_at = 0, time.perf_counter() + (self.pace_s or 0.0)

    def push(self, peer: Peer) -> None:
        sent = peer.sock.send(peer.pending[: 256 * 1024])
        peer.pending = peer.pending[sent:]
        if not peer.pending:
            self.drop(peer)

    def drop(self, peer: Peer) -> None:
        with contextlib.suppress(KeyError, ValueError):
            self.selector.unregister(peer.sock)
        peer.sock.close()

    def take_turn(self) -> None:
        """The next piece to every response under way, or to one of them; an end to those that are through."""
        pace_s = self.pace_s or 0.0
        size = -(-len(self.playing) // self.groups)
        group = self.playing[self.turn : self.turn + size]
        self.turn_at += pace_s * len(group) / len(self.playing)
        self.turn += len(group)
        for peer in group:
            try:
                if self.stamped and not peer.sent:
                    moment = f"{time.perf_counter():.6f} "
                    self.send_all(peer, frame("llama", choice("llama", {"content": moment})))
                elif peer.sent < len(self.pieces):
                    self.send_all(peer, self.pieces[peer.sent])
                else:
                    self.send_all(peer, self.answer.tail)
                    peer.sock.close()
            except OSError:
                peer.sent = len(self.pieces)
                peer.sock.close()
            peer.sent += 1
        if self.turn >= len(self.playing):
            self.turn = 0
            self.playing = [peer for peer in self.playing if peer.sent <= len(self.pieces)]

    def send_all(self, peer: Peer, data: bytes) -> None:
        sent = 0
        while sent < len(data):
            try:
                sent += peer.sock.send(data[sent:])
            except BlockingIOError:  # the client is slower than the ticks: its turn first
                time.sleep(0.0002)


def pin(process_id: int, end: int) -> None:
    """Keep a process (0: this one) on the first (0) or last (-1) core. Linux likes to put two processes that wake each
    other on one core; there the client would wait for the server's work, and its times would show that."""
    if PINNED and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(process_id, {range(os.cpu_count() or 1)[end]})


@contextlib.contextmanager
def serving(
    shape: str,
    deltas: int,
    pace_s: float | None = None,
    per_write: int = 1,
    gather: int = 1,
    groups: int = 1,
    stamped: bool = False,
) -> Iterator[int]:
    """Run the server in another process; gives its port."""
    spec = {"shape": shape, "deltas": deltas, "pace_s": pace_s, "per_write": per_write, "gather": gather}
    spec.update(groups=groups, stamped=stamped)
    command = [sys.executable, __file__, "--serve", json.dumps(spec)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, encoding="utf-8") as process:
        try:
            assert process.stdout is not None
            pin(process.pid, -1)
            yield int(process.stdout.readline())
        finally:
            process.kill()


@contextlib.contextmanager
def simulating(*options: object) -> Iterator[tuple[int, list[dict[str, Any]]]]:
    """Run the simulated engine in another process; gives its port and a list that holds its log once it has ended."""
    lines: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log.jsonl"
        command = [sys.executable, str(ROOT / "scripts" / "simulated_engine.py"), "--log", str(log), *map(str, options)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, encoding="utf-8") as process:
            try:
                assert process.stdout is not None
                pin(process.pid, -1)
                yield int(process.stdout.readline().rstrip().removesuffix("/v1").rpartition(":")[2]), lines
            finally:
                process.terminate()
                process.wait()
        lines += map(json.loads, log.read_text(encoding="utf-8").splitlines())


# ---------------------------------------------------------------- the clients, each in its own process


class Job(NamedTuple):
    """What a client's process is told to do. Stream `k` asks for a prompt of its own length, so that an engine's log
    tells the requests apart whatever order they arrive in."""

    client: str
    port: int
    streams: int
    deltas: int
    times: bool = False
    stamped: bool = False  # the first text of each stream says when it was sent; all prompts are alike

    def body(self, number: int) -> dict[str, Any]:
        messages = [{"role": "user", "content": "word" * (1 if self.stamped else number + 1)}]
        options = {"stream": True, "stream_options": {"include_usage": True}, "temperature": 0.0}
        return {"model": "sim-chat", "messages": messages, "max_tokens": self.deltas, **options}


class Result(NamedTuple):
    """What a client's process found out about itself."""

    cpu_s: float
    wall_s: float
    deltas: int
    maxrss_mb: float
    before_mb: float
    moments: int
    lag_p99_s: float
    added_ttft_s: list[float]
    streams: list[Stream]

    @property
    def us_per_delta(self) -> float:
        return self.cpu_s * 1e6 / max(1, self.deltas)


def cpu_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def maxrss_mb() -> float:
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e6


async def our_level(target: load_test.Target, payloads: Sequence[tuple[str, bytes]]) -> load_test.LevelRun:
    """All requests at once through the code that runs a level of a sweep."""
    route = load_test.Route(target, (target.host, target.port), (), 120.0, load_test.Secrets(()), None)
    run = load_test.LevelRun(len(payloads), len(payloads))
    stop: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    supply = load_test.in_order(data for _, data in payloads)
    await load_test.run_level(route, len(payloads), supply, stop, run, lambda item: None)
    return run


def streams_of(run: load_test.LevelRun) -> list[Stream]:
    for item in run.finished:
        if item.seen.failure is not None:
            raise SystemExit(f"bench_client.py: a request of ours failed: {item.seen.failure.message}")
    return [
        Stream(str(i.index), s.connecting_at, s.written_at, s.first_token_at or 0.0, s.last_token_at or 0.0, s.deltas)
        for i in run.finished
        for s in (i.seen,)
    ]


def run_job(job: Job) -> Result:
    """Play one client once, here."""
    pin(0, 0)
    target = load_test.Target("http", bare_clients.HOST, job.port, "", None)
    bodies = [(str(k), job.body(k)) for k in range(job.streams)]
    payloads = [
        (key, load_test.request_bytes(target, "POST", target.chat_path, [(KEY_HEADER, key)], json.dumps(body).encode()))
        for key, body in bodies
    ]
    level: load_test.LevelRun | None = None

    async def play() -> list[Stream]:
        nonlocal level
        if job.client == BARE:
            return await bare_clients.counting_level(job.port, payloads, NOT_TEXT)
        if job.client == AIOHTTP:
            return await bare_clients.aiohttp_level(job.port, bodies, KEY_HEADER)
        level = await our_level(target, payloads)
        return []

    async def timed(work: Callable[[], Awaitable[list[Stream]]]) -> tuple[float, float, list[Stream]]:
        cpu_before, before = cpu_s(), time.perf_counter()
        streams = await work()
        return cpu_s() - cpu_before, time.perf_counter() - before, streams

    before_mb = maxrss_mb()
    gc.collect()
    gc.freeze()
    run = load_test.run_client if job.client == OURS else asyncio.run
    cpu, wall, streams = run(timed(play))
    moments, lag_s = 0, 0.0
    added: list[float] = []
    if level is not None:
        streams = streams_of(level)
        moments = sum(len(item.seen.moments) for item in level.finished)
        lag_s = load_test.summary(level.lags_s)["p99"] or 0.0
        if job.stamped:
            seen = [item.seen for item in level.finished]
            added = [(one.first_token_at or 0.0) - float(one.text().split()[0]) for one in seen]
    deltas = sum(stream.deltas for stream in streams)
    return Result(cpu, wall, deltas, maxrss_mb(), before_mb, moments, lag_s, added, streams if job.times else [])


def play(job: Job) -> Result:
    """Play one client once, in a fresh process. SystemExit(1) where it missed a delta."""
    command = [sys.executable, __file__, "--play", json.dumps(job)]
    done = subprocess.run(command, stdout=subprocess.PIPE, encoding="utf-8", check=False)
    if done.returncode != 0:
        raise SystemExit(f"bench_client.py: the {job.client} client failed")
    figures = json.loads(done.stdout)
    streams = figures[-1]
    result = Result(*figures)._replace(streams=[Stream(*stream) for stream in streams])
    if result.deltas != job.streams * job.deltas:
        raise SystemExit(
            f"bench_client.py: the {job.client} client saw {result.deltas} of {job.streams * job.deltas} deltas"
        )
    return result


def clients(*names: str) -> list[str]:
    return [name for name in names if name != AIOHTTP or bare_clients.aiohttp_version()]


# ---------------------------------------------------------------- the parts


def say(text: str = "") -> None:
    print(text, flush=True)


def verdict(met: bool) -> str:
    return "met" if met else "MISSED"


def compare(title: str, port: int, streams: int, deltas: int, rounds: int) -> dict[str, list[Result]]:
    """Each client once per round, in turn; prints the table and returns the results."""
    results: dict[str, list[Result]] = {name: [] for name in clients(BARE, OURS, AIOHTTP)}
    for _ in range(rounds):
        for name, found in results.items():
            found.append(play(Job(name, port, streams, deltas)))
    say(f"\n{title}: {streams} streams x {deltas:,} deltas, median of {rounds}")
    say(f"  {'client':<14}{'us CPU/delta':>13}{'least':>8}{'deltas/s':>12}{'x bare':>8}")
    for name, found in results.items():
        us = [result.us_per_delta for result in found]
        speed = statistics.median(result.deltas / result.wall_s for result in found)
        ratio = ratio_to_bare(results, name)
        say(f"  {name:<14}{statistics.median(us):>13.2f}{min(us):>8.2f}{speed:>12,.0f}{ratio:>8.2f}")
    return results


def ratio_to_bare(results: Mapping[str, Sequence[Result]], name: str) -> float:
    """Median over the rounds of this client's CPU per delta over the bare counter's in the same round."""
    return statistics.median(mine.us_per_delta / bare.us_per_delta for mine, bare in zip(results[name], results[BARE]))


def part_burst(options: argparse.Namespace) -> None:
    for shape in SHAPES:
        with serving(shape, options.burst_deltas) as port:
            results = compare(f"bursting, {shape} events", port, 20, options.burst_deltas, options.rounds)
        us = statistics.median(result.us_per_delta for result in results[OURS])
        ratio = ratio_to_bare(results, OURS)
        say(
            f"  ours at most {BURST_TARGET_US} us: {verdict(us <= BURST_TARGET_US)};"
            f" at most {BURST_TARGET_RATIO:g} x the bare counter: {verdict(ratio <= BURST_TARGET_RATIO)}"
        )


def part_parse(options: argparse.Namespace) -> None:
    say(f"\nreading alone, no sockets: one stream x 50,000 deltas, median of {options.rounds}")
    say(f"  {'events':<14}{'64 KiB reads, us/delta':>24}{'one event a read':>20}")
    for shape in SHAPES:
        answer = build_answer(shape, 50_000)
        whole = b"".join([answer.head, *answer.deltas, answer.tail])
        cuts = [whole[k : k + READ_BYTES] for k in range(0, len(whole), READ_BYTES)]
        us = [
            statistics.median(parse_us(reads, 50_000) for _ in range(options.rounds))
            for reads in (cuts, [answer.head, *answer.deltas, answer.tail])
        ]
        say(f"  {shape:<14}{us[0]:>24.2f}{us[1]:>20.2f}")


def parse_us(reads: Sequence[bytes], deltas: int) -> float:
    stream = load_test.Stream(load_test.Observation())
    before = time.process_time()
    stream.begin(before)
    for moment, data in enumerate(reads, 1):
        stream.feed(data, before + moment)
    spent_s, seen = time.process_time() - before, stream.seen
    if seen.failure is not None or seen.deltas != deltas:
        raise SystemExit(f"bench_client.py: the reader saw {seen.deltas} of {deltas} deltas ({seen.failure})")
    return spent_s * 1e6 / deltas


def part_paced(options: argparse.Namespace) -> None:
    deltas = round(options.paced_s / 0.02)
    for groups, how in ((100, "each stream at its own moment"), (1, "all streams at the same moment")):
        with serving("llama", deltas, pace_s=0.02, gather=100, groups=groups) as port:
            results = compare(f"paced, a token every 20 ms, {how}, llama events", port, 100, deltas, options.rounds)
        ratio = ratio_to_bare(results, OURS)
        say(f"  ours at most {PACED_TARGET_RATIO} x the bare counter: {verdict(ratio <= PACED_TARGET_RATIO)}")


def part_connect(options: argparse.Namespace) -> None:
    with serving("llama", 1) as port:
        compare("connecting, one token a request, llama events", port, 200, 1, options.rounds)
        say("  (us per delta is us per request here)")


def part_memory(options: argparse.Namespace) -> None:
    with serving("llama", 2000, pace_s=0.0, per_write=4, gather=1000) as port:
        result = play(Job(OURS, port, 1000, 2000))
    say("\nmemory, ours: 1,000 streams x 2,000 deltas, at most 4 of them a write")
    say(
        f"  peak {result.maxrss_mb:.0f} MB (before: {result.before_mb:.0f} MB), {result.moments:,} arrival times"
        f" kept; at most {MEMORY_TARGET_MB} MB: {verdict(result.maxrss_mb <= MEMORY_TARGET_MB)}"
    )


def part_many(options: argparse.Namespace) -> None:
    tokens = round(options.many_s / MANY_PACE_S)
    say(f"\nmany streams, ours: {1 / MANY_PACE_S:g} tokens/s each for {options.many_s:g} s")
    say(
        f"  {'streams':>8}{'tokens/s':>11}{'us CPU/delta':>14}{'of a core':>11}{'peak MB':>9}{'lag p99':>9}",
    )
    say(f"  {'':>8}{'':>11}{'':>14}{'':>11}{'':>9}{'ms':>9}   added TTFT, ms: median and p99")
    for streams in options.many:
        with serving("llama", tokens, MANY_PACE_S, 1, streams, MANY_GROUPS, stamped=True) as port:
            result = play(Job(OURS, port, streams, tokens, stamped=True))
        say(
            f"  {streams:>8,}{result.deltas / result.wall_s:>11,.0f}{result.us_per_delta:>14.2f}"
            f"{result.cpu_s / result.wall_s:>11.0%}{result.maxrss_mb:>9.0f}{result.lag_p99_s * 1e3:>9.1f}"
            f"   {spread_ms(result.added_ttft_s)}"
        )
    say("  (connecting is in the wall time and the CPU time)")


# ---------------------------------------------------------------- fidelity


class Error(NamedTuple):
    """One request, client against engine, in seconds: see `errors_of`."""

    ttft: float
    ttft_from_start: float
    first: float
    last: float
    last_time: float
    tpot_percent: float
    connect: float
    true_ttft: float


def errors_of(streams: Iterable[Stream], log: Iterable[dict[str, Any]]) -> list[Error]:
    """The client's TTFT and last-token time (both from the write) minus the engine's (both from the arrival of the
    request), the TTFT of a clock that starts before connecting, how late each first and last text was seen after it was
    sent, and the TPOT's error in per cent."""
    sent = {line["prompt_tokens"]: line for line in log}
    order = sorted(sent)  # prompt lengths grow with the stream's number
    errors = []
    for stream in streams:
        line = sent[order[int(stream.key)]]
        arrived, sends = line["arrived"], line["sends"]
        ttft, true_ttft = stream.first_at - stream.written_at, sends[0] - arrived
        last_time = stream.last_at - stream.written_at
        tpot = (stream.last_at - stream.first_at) / (sends[-1] - sends[0])
        errors.append(
            Error(
                ttft=ttft - true_ttft,
                ttft_from_start=stream.first_at - stream.started_at - true_ttft,
                first=stream.first_at - sends[0],
                last=stream.last_at - sends[-1],
                last_time=last_time - (sends[-1] - arrived),
                tpot_percent=100 * (tpot - 1),
                connect=stream.written_at - stream.started_at,
                true_ttft=true_ttft,
            )
        )
    return errors


def spread_ms(values: Iterable[float]) -> str:
    ordered = sorted(values)
    p50, p99 = (load_test.percentile(ordered, percent) * 1e3 for percent in (50, 99))
    return f"{p50:>8.2f}{p99:>9.2f}"


def part_fidelity(options: argparse.Namespace) -> None:
    tokens = options.fidelity_tokens
    say(f"\nfidelity: all streams started together, {tokens} tokens each, one every 20 ms; ms, median and p99")
    say(f"  {'':>7}{'':<14}{'true':>7}{'TTFT error':>17}{'last-token error':>17}{'TPOT error %':>17}{'lag p99':>9}")
    clocks: list[str] = []
    for streams in options.streams:
        for name in clients(OURS, AIOHTTP):
            with simulating("--a-ms", 20, "--b-ms", 0, "--slots", streams, "--prefill-tok-s", 10**9) as (port, log):
                result = play(Job(name, port, streams, tokens, times=True))
            errors = errors_of(result.streams, log)
            true_ms = statistics.median(error.true_ttft for error in errors) * 1e3
            tpot = sorted(abs(error.tpot_percent) for error in errors)
            lag = f"{result.lag_p99_s * 1e3:.1f}" if name == OURS else "n/a"
            say(
                f"  c={streams:<5}{name:<14}{true_ms:>7.1f}{spread_ms(e.ttft for e in errors)}"
                f"{spread_ms(e.last_time for e in errors)}"
                f"{load_test.percentile(tpot, 50):>8.2f}{load_test.percentile(tpot, 99):>9.2f}{lag:>9}"
            )
            if name == OURS:
                clocks.append(clock_line(streams, errors))
                if streams <= 100:
                    say(f"  {'':>7}{fidelity_verdict(errors)}")
    say("\nwhere the clock starts (ours, same runs): TTFT error in ms, median and p99")
    say(f"  {'':>7}{'at the write':>17}{'before connecting':>19}{'connecting':>18}")
    for line in clocks:
        say(line)


def clock_line(streams: int, errors: Sequence[Error]) -> str:
    columns = (e.ttft for e in errors), (e.ttft_from_start for e in errors), (e.connect for e in errors)
    written, started, connect = map(spread_ms, columns)
    return f"  c={streams:<5}{written}  {started} {connect}"


def fidelity_verdict(errors: Sequence[Error]) -> str:
    """Whether the targets are met: TTFT and last-token time, median and p99; median TPOT."""
    met = True
    for values in ([e.ttft for e in errors], [e.last_time for e in errors]):
        ordered = sorted(values)
        met = met and load_test.percentile(ordered, 50) * 1e3 < FIDELITY_TARGET_MS["median"]
        met = met and load_test.percentile(ordered, 99) * 1e3 < FIDELITY_TARGET_MS["p99"]
    tpot = load_test.percentile(sorted(abs(e.tpot_percent) for e in errors), 50)
    return (
        f"under {FIDELITY_TARGET_MS['median']:g} ms median and {FIDELITY_TARGET_MS['p99']:g} ms p99: {verdict(met)};"
        f" TPOT within {TPOT_TARGET_PERCENT} %: {verdict(tpot <= TPOT_TARGET_PERCENT)}"
    )


# ---------------------------------------------------------------- command line


def machine() -> str:
    """Processor, cores and system in one line."""
    model = platform.processor() or platform.machine()
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                model = line.partition(":")[2].strip()
                break
    return f"{model}, {os.cpu_count()} cores, {platform.system()} {platform.release()}"


def parts_list(text: str) -> list[str]:
    parts = [part.strip() for part in text.split(",")]
    for part in parts:
        if part not in PARTS:
            raise argparse.ArgumentTypeError(f"{part!r} is no part; choose from {','.join(PARTS)}")
    return parts


def numbers(text: str) -> list[int]:
    return [whole(part) for part in text.split(",")]


def whole(text: str) -> int:
    if not text.strip().isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="bench_client.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add(
        "--parts",
        type=parts_list,
        default=list(PARTS),
        metavar="LIST",
        help=f"some of {','.join(PARTS)} (default: all)",
    )
    add("--rounds", type=whole, default=5, metavar="N", help="repetitions of each figure (default: %(default)s)")
    add("--burst-deltas", type=whole, default=5000, metavar="N", help="deltas of a bursting stream (default: 5000)")
    add("--paced-s", type=float, default=3.0, metavar="S", help="seconds of a paced round (default: 3)")
    add("--streams", type=numbers, default=[20, 100, 300, 1000], metavar="LIST", help="levels of the fidelity part")
    add("--fidelity-tokens", type=whole, default=64, metavar="N", help="tokens of a stream there (default: 64)")
    add("--many", type=numbers, default=[2000, 5000, 10000], metavar="LIST", help="streams of the many part")
    add("--many-s", type=float, default=10.0, metavar="S", help="seconds of one run there (default: 10)")
    add("--serve", help=argparse.SUPPRESS)  # how the bench starts its server ...
    add("--play", help=argparse.SUPPRESS)  # ... and its clients
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    options = build_parser().parse_args(argv)
    if options.serve is not None:
        spec = json.loads(options.serve)
        answer = build_answer(spec["shape"], spec["deltas"])
        with contextlib.suppress(KeyboardInterrupt):
            Server(answer, *(spec[key] for key in ("pace_s", "per_write", "gather", "groups", "stamped"))).run()
        return 0
    load_test.raise_descriptor_limit(max(2048, *options.many) if "many" in options.parts else 2048)
    if options.play is not None:
        print(json.dumps(run_job(Job(*json.loads(options.play)))))
        return 0
    begun = time.monotonic()
    now = datetime.datetime.now().astimezone()
    version = bare_clients.aiohttp_version()
    say(f"{now:%Y-%m-%d %H:%M %z}  {machine()}  Python {platform.python_version()}")
    say(
        f"load_test.py {load_test.TOOL_VERSION}; "
        + (f"aiohttp {version}" if version else "aiohttp is not installed: left out")
    )
    parts: dict[str, Callable[[argparse.Namespace], None]] = dict(
        zip(PARTS, (part_burst, part_parse, part_paced, part_fidelity, part_connect, part_memory, part_many))
    )
    for name in options.parts:
        parts[name](options)
    say(f"\n{time.monotonic() - begun:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
