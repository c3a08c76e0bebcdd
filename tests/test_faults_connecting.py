"""Before the first byte of an answer: addresses, names, refusals, limits of this machine, credentials on the way."""

from __future__ import annotations

import errno
import itertools
import os
import resource
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from fake_server import (
    CHUNKED,
    DONE,
    HOLD,
    LAST_CHUNK,
    FakeServer,
    Request,
    Running,
    Step,
    arguments,
    chunk,
    delta,
    json_answer,
    load,
    one_line,
    plain,
    whole_stream,
)

import load_test

HEALTHY = [whole_stream()]

# ---------------------------------------------------------------- the base URL


@pytest.mark.parametrize(
    ("given", "path"),
    [
        # https://github.com/FerroxLabs/wayland/issues/1178, https://github.com/BerriAI/litellm/issues/8350
        ("", "/v1/chat/completions"),
        ("/", "/v1/chat/completions"),
        ("/v1", "/v1/chat/completions"),
        ("/v1/", "/v1/chat/completions"),
        ("/v1//", "/v1/chat/completions"),
        ("/v1/chat/completions", "/v1/chat/completions"),
        ("/v1/chat/completions/", "/v1/chat/completions"),
        ("/proxy", "/proxy/v1/chat/completions"),
        ("/proxy/v1/", "/proxy/v1/chat/completions"),
        ("/a/b/v1/chat/completions", "/a/b/v1/chat/completions"),
        ("/v10", "/v10/v1/chat/completions"),
        ("/x%20y/v1", "/x%20y/v1/chat/completions"),
        ("/av1", "/av1/v1/chat/completions"),
    ],
)
def test_every_spelling_of_the_base_url_means_one_path(given: str, path: str, tmp_path: Path) -> None:
    # https://github.com/nbramia/LifeOS/pull/708
    with FakeServer(HEALTHY) as server:
        result = load(f"http://{server.authority}{given}", tmp_path)
    assert result.code == 0 and [request.path for request in server.chats] == [path]
    assert result.levels[0]["base_url"] == f"http://{server.authority}{path[: -len('/chat/completions')]}"


@pytest.mark.parametrize(
    ("url", "host", "authority"),
    [
        ("http://h", "h", "h"),
        ("http://h:80/v1", "h", "h"),
        ("http://h:8080", "h", "h:8080"),
        ("https://h", "h", "h"),
        ("https://h:443", "h", "h"),
        ("https://h:80", "h", "h:80"),
        ("HTTP://EXAMPLE.com:8080/v1", "example.com", "example.com:8080"),
        ("http://[::1]:8080/v1", "::1", "[::1]:8080"),
        ("http://[2001:db8::1]", "2001:db8::1", "[2001:db8::1]"),
        ("http://u:p@h:8080", "h", "h:8080"),
    ],
)
def test_host_and_port_of_a_base_url(url: str, host: str, authority: str) -> None:
    target = load_test.parse_base_url(url)
    assert (target.host, target.authority) == (host, authority)


def test_a_404_names_the_path_that_was_asked_for(tmp_path: Path) -> None:
    with FakeServer([plain("404 Not Found", "Not Found")]) as server:
        result = load(f"http://{server.authority}/wrong/v1", tmp_path)
    error = result.requests[0]["error"]
    assert error.startswith("http 404: ") and "Not Found" in error and "/wrong/v1/chat/completions" in error


# ---------------------------------------------------------------- names and addresses


@contextmanager
def resolving_to(monkeypatch: pytest.MonkeyPatch, *addresses: str) -> Iterator[list[Any]]:
    """`localhost` leads to these addresses; yields the look-ups that were made."""
    asked: list[Any] = []
    real = socket.getaddrinfo

    def fake(host: Any, port: Any, *args: Any, **more: Any) -> Any:
        if host != "localhost":
            return real(host, port, *args, **more)
        asked.append(host)
        return [
            (socket.AF_INET6, socket.SOCK_STREAM, 6, "", (address, port, 0, 0))
            if ":" in address
            else (socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port))
            for address in addresses
        ]

    with monkeypatch.context() as patched:
        patched.setattr(socket, "getaddrinfo", fake)
        yield asked


@pytest.mark.parametrize("serves", ["127.0.0.1", "::1"])
@pytest.mark.parametrize("order", [("127.0.0.1", "::1"), ("::1", "127.0.0.1"), ("::1", "127.0.0.1", "::1")])
def test_localhost_is_resolved_once_and_every_address_tried(
    serves: str, order: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # https://github.com/yhirose/cpp-httplib/issues/366
    # https://github.com/librefang/librefang/pull/3112 and, the other way round, https://github.com/fcsonline/drill/issues/126
    with resolving_to(monkeypatch, *order) as asked, FakeServer(HEALTHY, host=serves) as server:
        result = load(f"http://localhost:{server.port}/v1", tmp_path, "--requests", 5, "--concurrency", 2)
    assert result.code == 0 and asked == ["localhost"]
    assert f"address {serves}" in result.out and result.levels[0]["completed"] == 5
    assert {request.headers["host"] for request in server.requests} == {f"localhost:{server.port}"}
    assert server.connections <= 5 + 1  # one to find out which address answers


def test_an_ipv6_literal_has_brackets_in_the_host_header_only(tmp_path: Path) -> None:
    # https://github.com/wg/wrk/issues/34, https://github.com/lalinsky/dusty/issues/167
    with FakeServer(HEALTHY, host="::1") as server:
        result = load(f"http://[::1]:{server.port}/v1", tmp_path)
    assert result.code == 0
    assert server.chats[0].headers["host"] == f"[::1]:{server.port}"
    assert result.levels[0]["base_url"] == f"http://[::1]:{server.port}/v1"


def test_a_name_that_leads_nowhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(*_: Any, **__: Any) -> Any:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    result = load("http://no-such-host.invalid:8080", tmp_path)
    line = one_line(result)
    assert result.code == 1 and "no-such-host.invalid" in line and "not known" in line and result.levels == []


@pytest.mark.parametrize("option", [["--timeout", "0.1"], ["--wait-ready", "0.1"]])
def test_a_name_server_that_never_answers(option: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answered = threading.Event()
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: answered.wait(60))
    result = load("http://some-host:8080", tmp_path, *option)
    line = one_line(result)
    assert not answered.is_set() and result.code == 1 and result.levels == []
    assert "no answer" in line and ("some-host" in line or "--wait-ready" in option)
    answered.set()


@pytest.mark.parametrize("host", ["x" * 70, "a..b", "x" * 300])
def test_a_name_that_can_be_none(host: str, tmp_path: Path) -> None:
    result = load(f"http://{host}:8080", tmp_path)
    assert result.code in (1, 2) and host[:20] in one_line(result)


def test_every_address_that_was_tried_is_named(free_port: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with resolving_to(monkeypatch, "::1", "127.0.0.1"):
        result = load(f"http://localhost:{free_port}", tmp_path)
    line = one_line(result)
    assert result.code == 1 and result.levels == [] and f"localhost:{free_port}" in line
    assert "::1: connection refused" in line and "127.0.0.1: connection refused" in line and "running?" in line


def test_a_listener_that_never_accepts(tmp_path: Path) -> None:
    """Its queue is full: SYNs are dropped and nothing ever answers."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        fillers = []
        try:
            for _ in range(4):
                filler = socket.socket()
                filler.setblocking(False)
                filler.connect_ex(listener.getsockname())
                fillers.append(filler)
            result = load(f"http://127.0.0.1:{listener.getsockname()[1]}", tmp_path, "--timeout", "0.3")
        finally:
            for filler in fillers:
                filler.close()
    assert result.code == 1 and "no connection within 0.3 s" in one_line(result)


def test_a_server_that_goes_away_after_the_first_level(tmp_path: Path) -> None:
    """What had been measured stays; what is refused later is a failure of its class, each counted once."""

    def answer(request: Request) -> list[Step]:
        return [whole_stream(), server.stop_listening] if request.number == 1 else list(HEALTHY)

    with FakeServer(answer) as server:
        result = load(server, tmp_path, "--concurrency", "1,2", "--requests", 2)
    assert result.code == 1 and [record["completed"] for record in result.levels] == [2, 0]
    assert result.levels[1]["errors"] == {"connect": 2} and "refused" in result.levels[1]["first_error"]
    for raw in result.requests[2:]:
        assert (raw["status"], raw["ttft_s"], raw["ended_s"], raw["output_tokens"]) == (None, None, 0.0, 0)
        assert raw["error"].startswith("connect: ") and raw["connect_s"] >= 0


# ---------------------------------------------------------------- one connection, one attempt


def test_each_request_has_a_connection_of_its_own(tmp_path: Path) -> None:
    # https://github.com/NVIDIA-NeMo/Gym/pull/1555
    # https://github.com/vllm-project/vllm-omni/issues/1374: a reused connection is closed under the client's hands
    kept = whole_stream().replace(b"text/event-stream\r\n", b"text/event-stream\r\nConnection: keep-alive\r\n")
    with FakeServer([kept, HOLD]) as server:
        result = load(server, tmp_path, "--requests", 6, "--concurrency", 2)
        assert result.code == 0 and result.levels[0]["completed"] == 6
        assert server.connections == 6 + 1
        for _ in range(6):
            assert server.hung_up.acquire(timeout=10)  # none is left open


@pytest.mark.parametrize("status", ["429 Too Many Requests", "503 Service Unavailable"])
def test_a_refusal_is_one_attempt_and_no_storm(status: str, tmp_path: Path) -> None:
    # https://github.com/mostlygeek/llama-swap/issues/146, https://github.com/containers/ramalama/issues/2343
    with FakeServer(
        [plain(status, '{"error":{"message":"slow down"}}', "application/json", "Retry-After: 1")]
    ) as server:
        result = load(server, tmp_path, "--concurrency", 4, "--requests", 8)
    assert len(server.chats) == 8 and server.connections == 9
    (level,) = result.levels
    assert result.code == 1 and level["failed"] == 8 and level["errors"] == {"http": 8}
    assert level["first_error"] == f"http {status[:3]}: slow down"


# ---------------------------------------------------------------- what this machine has no more of


def test_more_connections_than_descriptors_are_refused_before_the_load(tmp_path: Path) -> None:
    # https://github.com/BerriAI/litellm/issues/12872: shown as the server's "connection error"
    with FakeServer(HEALTHY) as server:
        argv = arguments(tmp_path, server.base_url, "--concurrency", "1,64", "--requests", 64)
        with Running(tmp_path, argv, prefix=["bash", "-c", 'ulimit -n 32; exec "$0" "$@"']) as running:
            result = running.finish()
    line = one_line(result)
    assert result.code == 2 and "64" in line and "ulimit -n" in line and not server.connections
    assert result.levels == []


def test_more_connections_than_a_number_of_them_can_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def too_large(*_: object) -> None:
        raise OverflowError("Python int too large to convert to C long")  # as setrlimit does

    monkeypatch.setattr(resource, "setrlimit", too_large)  # no test may raise the limit of this process
    result = load("http://127.0.0.1:1", tmp_path, "--concurrency", 10**14)
    assert result.code == 2 and f"--concurrency {10**14}: needs" in one_line(result)


def test_a_soft_limit_is_raised(tmp_path: Path) -> None:
    with FakeServer([CHUNKED, chunk(delta("a")), 0.05, chunk(DONE) + LAST_CHUNK]) as server:
        argv = arguments(tmp_path, server.base_url, "--concurrency", "64", "--requests", 64)
        with Running(tmp_path, argv, prefix=["bash", "-c", 'ulimit -Sn 32; exec "$0" "$@"']) as running:
            result = running.finish()
    assert result.code == 0 and result.levels[0]["completed"] == 64
    assert "open files: limit raised from 32 to 96" in result.out


def fail_from(number: int, code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the connection of this number on (1, 2, ...) this machine has no more to give."""
    opened = itertools.count(1)
    real = load_test.Connection.open

    def open_or_fail(self: load_test.Connection) -> None:
        if next(opened) < number:
            real(self)
        else:
            self._give_up(OSError(code, os.strerror(code)))

    monkeypatch.setattr(load_test.Connection, "open", open_or_fail)


@pytest.mark.parametrize("code", [errno.EMFILE, errno.ENFILE, errno.EADDRNOTAVAIL, errno.ENOBUFS])
def test_a_fault_of_this_machine_is_no_result_of_the_servers(
    code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # https://github.com/aio-libs/aiohttp/issues/4067
    fail_from(5, code, monkeypatch)
    with FakeServer(HEALTHY) as server:
        result = load(server, tmp_path, "--concurrency", "1,2", "--requests", 3)
    assert result.code == 1 and [(record["concurrency"], record["interrupted"]) for record in result.levels][:1] == [
        (1, False)
    ]
    line = one_line(result)
    assert "this machine" in line and os.strerror(code) in line


def test_what_had_ended_before_a_fault_of_this_machine_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fail_from(6, errno.EMFILE, monkeypatch)
    with FakeServer(HEALTHY) as server:
        result = load(server, tmp_path, "--concurrency", "1,2", "--requests", 6)
    (level,) = result.levels
    assert result.code == 1 and "this machine" in one_line(result)
    assert level["interrupted"] and level["requests"] == level["completed"] == len(result.requests) == 5
    assert "interrupted: this level is not whole" in result.out and "1 line(s) appended" in result.out


# ---------------------------------------------------------------- credentials stay where they belong

KEY = "sk-Geheim/0123456789+abcdef=="
PASSWORD = "pa55/w%rd"
IN_URL = "joe.secret:pa55%2Fw%25rd@"


def secrets_of(text: str) -> list[str]:
    """The credentials, or a good part of them, that a text gives away."""
    return [word for word in (KEY[:10], KEY[-10:], PASSWORD[:6], IN_URL[11:20], "joe.secret") if word in text]


def everything_of(result: Any) -> str:
    files = [path.read_text("utf-8") for path in result.folder.iterdir() if path.is_file()]
    return "\n".join([result.out, result.err, *files])


def echoes(told: str) -> list[bytes]:
    """A server's words with a credential in them, in every place where the program quotes a server."""
    doc = f'{{"error":{{"message":"Incorrect API key provided: {told}","type":"auth"}}}}'
    padded = [f"{'x' * filler}{told}{'y' * 200}" for filler in (20, 40, 52, 250, 270, 285)]
    return [
        plain("401 Unauthorized", doc),
        plain("401 Unauthorized", f"bad key {told}", "text/plain"),
        plain("403 Forbidden", f'{{"detail":"{told}"}}'),
        plain("302 Found", "", "text/html", f"Location: https://login/?key={told}"),
        plain("200 OK", f"<html>{told}</html>", "text/html"),
        plain("200 OK", doc),
        f"{told}\r\n\r\n".encode(),
        f"HTTP/1.1 {told}\r\n\r\n".encode(),
        f"HTTP/1.1 200 OK\r\n{told}\r\n\r\n".encode(),
        f"HTTP/1.1 200 OK\r\nTransfer-Encoding: {told}\r\n\r\n".encode(),
        f"HTTP/1.1 200 OK\r\nContent-Encoding: {told}\r\n\r\n".encode(),
        f"HTTP/1.1 200 OK\r\nContent-Length: {told}\r\n\r\n".encode(),
        CHUNKED + f"{told}\r\n".encode(),
        CHUNKED + chunk(delta("a") + f'data: {{"error":"{told}"}}\n\n'.encode()),
        CHUNKED + chunk(delta("a") + f"data: {told}\n\n".encode()),
        *(plain("401 No", text, "text/plain") for text in padded),
        *(plain("401 No", f'{{"error":"{text}"}}') for text in padded),
        *(CHUNKED + chunk(f"data: {text}\n\n".encode()) for text in padded),
    ]


@pytest.mark.parametrize("number", range(len(echoes(""))))
def test_a_key_that_the_server_repeats_is_nowhere(number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOADTEST_API_KEY", KEY)
    answer = echoes(KEY)[number]
    with FakeServer([answer]) as server:
        result = load(server, tmp_path, "--warmup", 0)
        assert server.chats[0].headers["authorization"] == f"Bearer {KEY}"
        load(server, tmp_path, "--probe")
        load(server, tmp_path, "--model", "")
        warned = load(server, tmp_path, "--warmup", 1)
    assert result.code == 1 and result.requests[0]["error"]
    assert secrets_of(everything_of(result) + warned.said) == []


@pytest.mark.parametrize("option", [[], ["--probe"], ["--model", ""], ["--warmup", "1"], ["--wait-ready", "0.1"]])
@pytest.mark.parametrize("number", [0, 1, 3, 6, 14])
def test_credentials_of_the_url_are_nowhere(number: int, option: list[str], tmp_path: Path) -> None:
    for told in (PASSWORD, IN_URL, "joe.secret"):
        with FakeServer([echoes(told)[number]]) as server:
            result = load(f"http://{IN_URL}{server.authority}/v1", tmp_path, *option)
        assert result.code in (1, 2) and secrets_of(everything_of(result)) == []


@pytest.mark.parametrize(
    ("header", "told", "shown"),
    [
        ("X-Mode: http", "http is the mode", "http 401: http is the mode"),
        ("X-Team: support", "of support", "http 401: of support"),
        ("X-Route: long-enough", "of long-enough", "http 401: of ***"),
        ("X-Access-Token: tok1", "a tok1 b", "http 401: a *** b"),
        ("Cookie: a=1", "a=1", "http 401: ***"),
        ("X-PASSWORD: k", "no k here", "http 401: no *** here"),
    ],
)
def test_only_what_may_be_a_secret_is_blanked_out(header: str, told: str, shown: str, tmp_path: Path) -> None:
    with FakeServer([plain("401 No", f'{{"error":"{told}"}}')]) as server:
        result = load(server, tmp_path, "--header", header)
    assert result.requests[0]["error"] == shown and f"first error: {shown}\n" in result.out


@pytest.mark.parametrize("header", ["Authorization: Bearer", "X-Api-Key:"])
def test_a_secret_header_is_nowhere(header: str, tmp_path: Path) -> None:
    with FakeServer([plain("401 No", f'{{"error":"{KEY}"}}')]) as server:
        result = load(server, tmp_path, "--header", f"{header} {KEY}")
    assert result.code == 1 and secrets_of(everything_of(result)) == []


@pytest.mark.parametrize("short", ["k", "abc", "a1!"])
def test_a_short_key_is_nowhere_either(short: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOADTEST_API_KEY", short)
    with FakeServer([plain("401 No", f'{{"error":"the token {short} is not known, Bearer {short}."}}')]) as server:
        result = load(server, tmp_path)
    assert result.requests[0]["error"] == "http 401: the token *** is not known, Bearer ***."


@pytest.mark.parametrize(
    "url",
    [
        f"http://{IN_URL}h:99999/v1",
        f"http://{IN_URL}h:port/v1",
        f"ftp://{IN_URL}h/v1",
        f"http://{IN_URL}h/v1?x=1",
        f"http://{IN_URL}h ost/",
        f"http://{IN_URL}[::1",
        f"http://joe.secret:{PASSWORD}@h/v1",  # a slash that should have been escaped
        f"http://joe.secret:pa55@{PASSWORD}@h:0/v1",
        f"joe.secret:{PASSWORD}@h/v1",
        f"http://{IN_URL}",
    ],
)
def test_a_wrong_url_is_named_without_its_credentials(url: str, tmp_path: Path) -> None:
    result = load(url, tmp_path)
    assert result.code == 2 and "--base-url" in one_line(result) and secrets_of(result.said) == []


@pytest.mark.parametrize("told", [KEY, PASSWORD])
def test_what_sampling_and_the_recovery_check_say_holds_no_credential(
    told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOADTEST_API_KEY", KEY)
    problem = plain("403 No", f"no {told} here", "text/plain")
    with FakeServer(lambda request: HEALTHY if request.is_chat else [problem]) as server:
        url = f"http://{IN_URL}{server.authority}"
        result = load(url, tmp_path, "--sample", "1", "--recovery-check")
        models = load(url, tmp_path, "--model", "")
    assert secrets_of(everything_of(result) + models.said) == []
    with FakeServer(lambda request: HEALTHY if request.is_chat else [json_answer([told])]) as server:
        result = load(f"http://{IN_URL}{server.authority}", tmp_path, "--model", "", "--sample", "1")
    assert secrets_of(everything_of(result)) == []
