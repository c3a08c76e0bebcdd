"""A scripted HTTP server, and the load generator run against it, for the tests of `load_test.py`.

An answer is a list of steps, done in order once a whole request has come:

    bytes             one write (TCP_NODELAY is set)
    float             a pause in seconds
    HOLD              keep the connection open, silent, until the client closes it
    RESET             close with a TCP reset
    READ              wait until the client has read, and stamped, all that was sent (see `ClientReads`)
    threading.Event   wait until somebody sets it
    a function        call it: the test's hook into this very moment

and after the last one the server closes. Everything waits for events; nothing polls.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import math
import os
import signal
import socket
import ssl
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Callable, Union
from unittest import mock

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
import load_test  # noqa: E402 - found through the line above

# ---------------------------------------------------------------- what a stream is made of

STREAM_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"
CHUNKED = STREAM_HEAD + b"Transfer-Encoding: chunked\r\n\r\n"
TO_CLOSE = STREAM_HEAD + b"Connection: close\r\n\r\n"
LAST_CHUNK = b"0\r\n\r\n"
DONE = b"data: [DONE]\n\n"


def compact(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()


def chunk(data: bytes) -> bytes:
    """One chunk of a chunked body."""
    return b"%x\r\n%b\r\n" % (len(data), data)


def event(value: Any) -> bytes:
    """One server-sent event."""
    return b"data: " + compact(value) + b"\n\n"


def delta(text: str | None = None, finish: str | None = None, **fields: Any) -> bytes:
    """The event of one chat chunk; without a text it has no content field."""
    if text is not None:
        fields["content"] = text
    return event({"choices": [{"index": 0, "delta": fields, "finish_reason": finish}]})


def usage(prompt: int, completion: int, **more: Any) -> bytes:
    """The event that carries nothing but token counts."""
    return event({"choices": [], "usage": {"prompt_tokens": prompt, "completion_tokens": completion, **more}})


def whole_stream(tokens: int = 3, prompt_tokens: int = 7, finish: str = "length") -> bytes:
    """A whole, healthy, chunked response of so many one-token deltas."""
    body = b"".join(delta(f" w{number}") for number in range(tokens))
    return CHUNKED + chunk(body) + chunk(delta(finish=finish) + usage(prompt_tokens, tokens) + DONE) + LAST_CHUNK


def plain(status: str, body: bytes | str, kind: str = "application/json", *headers: str) -> bytes:
    """A response that is no stream, with its length."""
    data = body.encode() if isinstance(body, str) else body
    lines = [f"HTTP/1.1 {status}", f"Content-Type: {kind}", f"Content-Length: {len(data)}", *headers]
    return "\r\n".join(lines).encode("latin-1") + b"\r\n\r\n" + data


def json_answer(value: Any, status: str = "200 OK") -> bytes:
    return plain(status, compact(value))


# ---------------------------------------------------------------- the server

HOLD = object()
RESET = object()
READ = object()
Step = Union[bytes, float, threading.Event, Callable[[], object], object]


@dataclasses.dataclass
class Request:
    """One request as it came over the wire, and when each write of its answer was done."""

    number: int
    head: bytes
    body: bytes
    arrived_s: float
    sends: list[float] = dataclasses.field(default_factory=list)

    @property
    def method(self) -> str:
        return self.head.split(b" ", 1)[0].decode()

    @property
    def path(self) -> str:
        return self.head.split(b" ", 2)[1].decode()

    @property
    def headers(self) -> dict[str, str]:
        lines = self.head.decode("latin-1").split("\r\n")[1:]
        return {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines if line)}

    @property
    def doc(self) -> Any:
        return json.loads(self.body)

    @property
    def prompt(self) -> str:
        return str(self.doc["messages"][-1]["content"])

    @property
    def is_chat(self) -> bool:
        return self.path.endswith("/chat/completions")

    @property
    def is_warm_up(self) -> bool:
        return "Say hello." in self.prompt


Answer = Callable[[Request], Iterable[Step]]


class ClientReads:
    """How many bytes the program in this process has read and stamped, while `patched()` is in force."""

    def __init__(self) -> None:
        self._bytes = 0
        self._more = threading.Condition()

    def count(self, size: int) -> None:
        with self._more:
            self._bytes += size
            self._more.notify_all()

    def wait_for(self, size: int) -> None:
        with self._more:
            assert self._more.wait_for(lambda: self._bytes >= size, 60)

    def patched(self) -> Any:
        original = load_test.Connection._read

        def reading(connection: Any) -> None:
            real, sizes = connection._socket, [0]

            class Counting:
                def recv(self, size: int) -> bytes:
                    data: bytes = real.recv(size)
                    sizes.append(len(data))
                    return data

            connection._socket = Counting()
            original(connection)
            if isinstance(connection._socket, Counting):  # else it has been closed
                connection._socket = real
            self.count(sum(sizes))

        return mock.patch.object(load_test.Connection, "_read", reading)


class FakeServer:
    """Listens as soon as it is made; use it as a context manager.

    `answer` is called for every request with its steps wanted. `requests` holds what came, in
    the order of arrival; `arrived` is a semaphore that counts it.
    """

    def __init__(
        self,
        answer: Answer | Iterable[Step],
        host: str = "127.0.0.1",
        tls: ssl.SSLContext | None = None,
        reads_bodies: bool = True,
        reads: ClientReads | None = None,
    ) -> None:
        steps = answer if callable(answer) else None
        fixed = [] if callable(answer) else list(answer)
        self._answer: Answer = steps or (lambda _request: fixed)
        self._tls = tls
        self._reads_bodies = reads_bodies
        self._reads = reads
        self._sent = 0
        self.requests: list[Request] = []
        self.arrived = threading.Semaphore(0)
        self.connections = 0
        self.hung_up = threading.Semaphore(0)  # connections that the client closed while we held them
        self.problems: list[BaseException] = []
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._sockets: set[socket.socket] = set()
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.socket(family, socket.SOCK_STREAM)
        self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._listener.bind((host, 0))
        self._listener.listen(1024)
        self.port: int = self._listener.getsockname()[1]
        shown = f"[{host}]" if ":" in host else host
        self.authority = f"{shown}:{self.port}"
        self.base_url = f"{'https' if tls else 'http'}://{self.authority}/v1"
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    def __enter__(self) -> FakeServer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
        if error is None and self.problems:
            raise self.problems[0]

    def close(self) -> None:
        self._closing.set()
        self.stop_listening()
        with self._lock:
            for connection in self._sockets:
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(10)

    def stop_listening(self) -> None:
        """From here on connections are refused; those that are open go on."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    @property
    def chats(self) -> list[Request]:
        """The chat requests of the load: neither warm-up nor control endpoints."""
        return [request for request in self.requests if request.is_chat and not request.is_warm_up]

    def _accept(self) -> None:
        while not self._closing.is_set():
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            with self._lock:
                self.connections += 1
                self._sockets.add(connection)
                thread = threading.Thread(target=self._serve, args=(connection,), daemon=True)
                self._threads.append(thread)
            thread.start()

    def _serve(self, connection: socket.socket) -> None:
        stream = connection
        try:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if self._tls is not None:
                stream = self._tls.wrap_socket(connection, server_side=True)
            request = self._read(stream)
            if request is not None:
                self._play(stream, request)
        except OSError:  # the client went away, as clients do
            pass
        except BaseException as error:
            self.problems.append(error)
        finally:
            with self._lock:
                self._sockets.discard(connection)
            stream.close()
            connection.close()

    def _read(self, stream: socket.socket) -> Request | None:
        data = b""
        while b"\r\n\r\n" not in data:
            data += (more := stream.recv(65536))
            if not more:
                return None
        head, _, body = data.partition(b"\r\n\r\n")
        request = Request(0, head, b"", time.perf_counter())
        length = int(request.headers.get("content-length", 0)) if self._reads_bodies else 0
        while len(body) < length:
            body += (more := stream.recv(65536))
            if not more:
                return None
        request.body = body
        with self._lock:
            request.number = len(self.requests)
            self.requests.append(request)
        self.arrived.release()
        return request

    def _play(self, stream: socket.socket, request: Request) -> None:
        for step in self._answer(request):
            if isinstance(step, bytes):
                stream.sendall(step)
                self._sent += len(step)
                request.sends.append(time.perf_counter())
            elif isinstance(step, float):
                self._closing.wait(step)
            elif isinstance(step, threading.Event):
                step.wait(30)
            elif step is HOLD:
                self._hold(stream)
            elif step is READ:
                assert self._reads is not None
                self._reads.wait_for(self._sent)
            elif step is RESET:
                stream.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                return
            elif callable(step):
                step()
            else:
                raise AssertionError(f"no step: {step!r}")

    def _hold(self, stream: socket.socket) -> None:
        """Wait for the client's end of the connection to close, or for ours."""
        with contextlib.suppress(OSError):
            if self._reads_bodies:
                stream.recv(1)
            else:
                self._closing.wait(30)
        if not self._closing.is_set():
            self.hung_up.release()


# ---------------------------------------------------------------- the program


def strict_json(text: str) -> Any:
    """What a strict JSON parser makes of a line: no NaN, no Infinity, no key twice, no overflow."""

    def refuse(name: str) -> Any:
        raise ValueError(f"{name} is not JSON")

    def number(digits: str) -> float:
        value = float(digits)
        if not math.isfinite(value):
            raise ValueError(f"{digits} is not finite")
        return value

    def object_of(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        names = [name for name, _ in pairs]
        if len(set(names)) != len(names):
            raise ValueError(f"a key stands twice: {names}")
        return dict(pairs)

    return json.loads(text, parse_constant=refuse, parse_float=number, object_pairs_hook=object_of)


def read_records(path: Path) -> list[dict[str, Any]]:
    """Every line of a file that holds nothing but records, each by the strict parser."""
    if not path.exists():
        return []
    data = path.read_bytes()
    assert not data or data.endswith(b"\n"), f"half a line at the end: {data[-80:]!r}"
    return [strict_json(line) for line in data.decode("utf-8").split("\n") if line]


@dataclasses.dataclass
class Result:
    """One run of the program."""

    code: int
    out: str
    err: str
    folder: Path

    @property
    def levels(self) -> list[dict[str, Any]]:
        return [record for record in self.everything if "concurrency" in record]

    @property
    def everything(self) -> list[dict[str, Any]]:
        return read_records(self.folder / "book.md")

    @property
    def requests(self) -> list[dict[str, Any]]:
        return read_records(self.folder / "raw.jsonl")

    @property
    def said(self) -> str:
        return self.out + self.err


def arguments(folder: Path, base_url: str, *args: object) -> list[str]:
    """A command line with small defaults; a later option wins over these."""
    small = ["--model", "fake", "--warmup", "0", "--concurrency", "1", "--requests", "1", "--min-rounds", "1"]
    small += ["--timeout", "20"]
    files = ["--labbook", str(folder / "book.md"), "--raw", str(folder / "raw.jsonl")]
    return ["--base-url", base_url, *small, *files, *map(str, args)]


@contextlib.contextmanager
def _signals_kept() -> Iterator[None]:
    """The program installs handlers of its own; put back whatever was there."""
    kept = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in kept.items():
            signal.signal(number, handler)


def call_main(argv: Sequence[str], folder: Path) -> Result:
    """`load_test.main` in this process."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.ExitStack() as around:
        around.enter_context(contextlib.redirect_stdout(out))
        around.enter_context(contextlib.redirect_stderr(err))
        around.enter_context(_signals_kept())
        try:
            code = load_test.main(argv)
        except SystemExit as leaving:
            code = leaving.code if isinstance(leaving.code, int) else 0
    return Result(code, out.getvalue(), err.getvalue(), folder)


def load(server: FakeServer | str, folder: Path, *args: object) -> Result:
    """Run the program in this process against a fake server (or any URL) with small defaults."""
    url = server if isinstance(server, str) else server.base_url
    return call_main(arguments(folder, url, *args), folder)


class Running:
    """The program as a process of its own, for what a process alone can show: signals, pipes, limits."""

    def __init__(self, folder: Path, argv: Sequence[str], prefix: Sequence[str] = (), **options: Any) -> None:
        self.folder = folder
        settings: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        settings.update(options)
        kept = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}  # it hides faults
        env = {**kept, "PYTHONIOENCODING": "utf-8", **settings.pop("env", {})}
        command = [*prefix, sys.executable, str(ROOT / "load_test.py"), *argv]
        self.process = subprocess.Popen(command, env=env, cwd=folder, encoding="utf-8", **settings)

    def __enter__(self) -> Running:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.communicate()

    def send(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def finish(self, timeout_s: float = 60) -> Result:
        out, err = self.process.communicate(timeout=timeout_s)
        return Result(self.process.returncode, out or "", err or "", self.folder)


def one_line(result: Result) -> str:
    """The single line that an error must be: on stderr, with the program's name, no traceback."""
    assert "Traceback" not in result.said
    lines = [line for line in result.err.splitlines() if line]
    assert len(lines) == 1, result.err
    assert lines[0].startswith("load_test.py: "), result.err
    return lines[0]
