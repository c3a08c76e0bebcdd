"""https: a certificate that is trusted, one that is not, and ports that speak something else."""

from __future__ import annotations

import os
import ssl
from collections.abc import Iterator
from pathlib import Path

import pytest
import trustme
from fake_server import (
    CHUNKED,
    DONE,
    HOLD,
    READ,
    RESET,
    TO_CLOSE,
    ClientReads,
    FakeServer,
    Running,
    Step,
    arguments,
    chunk,
    delta,
    json_answer,
    load,
    plain,
    whole_stream,
)


@pytest.fixture(scope="module")
def authority() -> trustme.CA:
    return trustme.CA()


@pytest.fixture
def ca_file(authority: trustme.CA, tmp_path: Path) -> Path:
    path = tmp_path / "authority.pem"
    authority.cert_pem.write_to_path(str(path))
    return path


def context_for(authority: trustme.CA, *names: str) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert(*names).configure_cert(context)
    return context


@pytest.fixture
def tls(authority: trustme.CA) -> ssl.SSLContext:
    return context_for(authority, "127.0.0.1", "::1", "localhost")


@pytest.fixture(autouse=True)
def no_other_authorities(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv("SSL_CERT_FILE", raising=False)
    monkeypatch.delenv("SSL_CERT_DIR", raising=False)
    yield


def test_a_certificate_is_accepted_through_ssl_cert_file(tls: ssl.SSLContext, ca_file: Path, tmp_path: Path) -> None:
    """In a process of its own, as a user does it."""
    with FakeServer([whole_stream(2)], tls=tls) as server:
        argv = arguments(tmp_path, server.base_url, "--concurrency", "1,3", "--requests", 3, "--warmup", 1)
        with Running(tmp_path, argv, env={"SSL_CERT_FILE": str(ca_file)}) as running:
            result = running.finish()
    assert result.code == 0 and result.err == ""
    assert [record["completed"] for record in result.levels] == [3, 3]
    assert {record["base_url"] for record in result.levels} == {server.base_url}
    assert server.requests[0].headers["host"] == server.authority


def test_without_it_the_certificate_is_refused_in_one_clear_line(tls: ssl.SSLContext, tmp_path: Path) -> None:
    with FakeServer([whole_stream()], tls=tls) as server:
        argv = arguments(tmp_path, server.base_url, "--warmup", 1)
        env = {name: "" for name in ("SSL_CERT_FILE", "SSL_CERT_DIR") if name in os.environ}
        with Running(tmp_path, argv, env=env) as running:
            result = running.finish()
    assert result.code == 1 and result.levels == [] and "Traceback" not in result.err
    assert "TLS certificate refused" in result.err and "SSL_CERT_FILE" in result.err
    assert not server.requests


@pytest.mark.parametrize("option", [["--warmup", "0"], ["--probe"], ["--model", ""], ["--wait-ready", "60"]])
def test_a_refused_certificate_everywhere(
    option: list[str], tls: ssl.SSLContext, tmp_path: Path, no_second_try: None
) -> None:
    with FakeServer([whole_stream()], tls=tls) as server:
        result = load(server, tmp_path, *option)
    assert result.code == 1 and "TLS certificate refused" in result.said and "Traceback" not in result.said
    if result.levels:
        (level,) = result.levels
        assert level["errors"] == {"connect": 1} and level["first_error"].startswith("connect: TLS certificate refused")


def test_a_certificate_for_another_name_is_refused(
    authority: trustme.CA, ca_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", str(ca_file))
    with FakeServer([whole_stream()], tls=context_for(authority, "elsewhere.example")) as server:
        result = load(server, tmp_path)
    assert result.code == 1 and "127.0.0.1" in result.levels[0]["first_error"]


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_an_address_may_be_in_the_certificate(
    host: str, tls: ssl.SSLContext, ca_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", str(ca_file))
    with FakeServer([whole_stream()], host=host, tls=tls) as server:
        assert load(server, tmp_path).code == 0


def test_the_name_is_checked_and_the_address_is_pinned(
    authority: trustme.CA, ca_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", str(ca_file))
    with FakeServer([whole_stream()], tls=context_for(authority, "localhost")) as server:
        result = load(f"https://localhost:{server.port}", tmp_path, "--requests", 3)
    assert result.code == 0 and "address 127.0.0.1" in result.out


def test_https_to_a_plain_port(tmp_path: Path) -> None:
    """Such a server waits for a blank line that never comes."""
    with FakeServer([whole_stream()]) as server:
        result = load(server.base_url.replace("http:", "https:"), tmp_path, "--timeout", "0.5")
    assert result.code == 1 and result.levels[0]["errors"] == {"connect": 1}
    assert "TLS" in result.levels[0]["first_error"] or "no connection" in result.levels[0]["first_error"]


@pytest.mark.parametrize("option", [["--warmup", "0"], ["--model", ""]])
def test_plain_http_to_a_tls_port_names_https(option: list[str], tls: ssl.SSLContext, tmp_path: Path) -> None:
    with FakeServer([whole_stream()], tls=tls) as server:
        result = load(server.base_url.replace("https:", "http:"), tmp_path, *option)
    assert result.code == 1 and "does this port speak https?" in result.said


ENDS: list[tuple[str, list[Step], str | None]] = [
    ("a last chunk", [whole_stream(2)], None),
    ("[DONE] and no more", [CHUNKED + chunk(delta("a") + DONE), HOLD], None),
    ("closed after a finish_reason", [TO_CLOSE + delta("a", finish="stop")], None),
    ("byte by byte", [*(bytes([byte]) for byte in whole_stream(1))], None),
    ("a large event", [TO_CLOSE + delta("x" * 200_000) + DONE], None),
    ("closed in mid-stream", [CHUNKED + chunk(delta("a"))], "truncated"),
    ("closed in mid-stream, unframed", [TO_CLOSE + delta("a")], "truncated"),
    ("reset in mid-stream", [CHUNKED + chunk(delta("a")), READ, RESET], "truncated"),
    ("closed at once", [], "truncated"),
    ("an error", [plain("503 X", '{"error":"Loading model"}')], "http"),
]


@pytest.mark.parametrize(("steps", "error_class"), [end[1:] for end in ENDS], ids=[end[0] for end in ENDS])
def test_ends_are_the_same_over_tls(
    steps: list[Step],
    error_class: str | None,
    tls: ssl.SSLContext,
    ca_file: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", str(ca_file))
    reads = ClientReads()
    with reads.patched(), FakeServer(steps, tls=tls, reads=reads) as server:
        result = load(server, tmp_path, "--requests", 2)
    assert [raw["error_class"] for raw in result.requests] == [error_class] * 2, result.requests[0]["error"]


def test_a_long_prompt_over_tls(
    tls: ssl.SSLContext, ca_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", str(ca_file))
    prompts = tmp_path / "long.txt"
    prompts.write_text("long " * 600_000, "utf-8")
    with FakeServer([whole_stream()], tls=tls) as server:
        assert load(server, tmp_path, "--prompts", prompts).code == 0
    assert len(server.chats[0].body) > 3_000_000


def test_models_slots_and_metrics_over_tls(
    tls: ssl.SSLContext, ca_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", str(ca_file))

    def answer(request: object) -> list[Step]:
        path = getattr(request, "path", "")
        if path == "/v1/models":
            return [json_answer({"data": [{"id": "only"}]})]
        if path == "/slots":
            return [json_answer([{"id": 0, "n_ctx": 512, "is_processing": False}])]
        return [whole_stream()] if path.endswith("completions") else [plain("404 X", "")]

    with FakeServer(answer, tls=tls) as server:
        result = load(server, tmp_path, "--model", "", "--sample", "5")
    assert result.code == 0 and result.levels[0]["server"]["slots"] == 1 and result.levels[0]["model"] == "only"
