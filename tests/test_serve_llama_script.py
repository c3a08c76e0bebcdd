"""The real llama.cpp server (the wheel's) under scripts/serve-llama-parallel.sh, and the tiny model built for it."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from lab_stand_ins import BASH, Lab


@pytest.fixture(scope="module")
def tiny_model(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "tiny.gguf"
    build_tiny(root, path)
    return path


def build_tiny(root: Path, path: Path, *args: str) -> None:
    subprocess.run(
        [sys.executable, str(root / "tests/engines/tiny_gguf.py"), str(path), *args], check=True, timeout=280
    )


@pytest.fixture
def wheel_server(root: Path, tmp_path: Path) -> Path:
    """A binary, as the launcher sees it, that runs the llama.cpp server of the wheel."""
    path = tmp_path / "wheel server"
    server = root / "tests" / "engines" / "llama_wheel_server.py"
    path.write_text(f'#!/usr/bin/env bash\nexec "{sys.executable}" "{server}" "$@"\n', encoding="utf-8")
    path.chmod(0o755)
    return path


@pytest.mark.engine
def test_the_tiny_model_is_the_same_for_the_same_seed(root: Path, tiny_model: Path, tmp_path: Path) -> None:
    build_tiny(root, tmp_path / "again.gguf")
    assert (tmp_path / "again.gguf").read_bytes() == tiny_model.read_bytes()
    build_tiny(root, tmp_path / "other.gguf", "--seed", "2")
    assert (tmp_path / "other.gguf").read_bytes() != tiny_model.read_bytes()
    assert 1_000_000 < tiny_model.stat().st_size < 1_400_000
    assert sorted(path.name for path in tmp_path.glob("*.gguf*")) == ["again.gguf", "other.gguf"]


@pytest.mark.engine
def test_only_tokens_that_are_text_by_themselves_can_win(tiny_model: Path) -> None:
    import gguf

    reader = gguf.GGUFReader(str(tiny_model))
    tokens = reader.fields["tokenizer.ggml.tokens"].contents()
    assert len(tokens) == 1500
    (output,) = (tensor.data for tensor in reader.tensors if tensor.name == "output.weight")
    can_win = [token for token, row in zip(tokens, output) if row.any()]
    assert len(can_win) > 750
    assert all(token.replace("Ġ", "", 1).isalnum() and token.replace("Ġ", "", 1).isascii() for token in can_win)
    assert not [token for token in can_win if token.startswith("<|")]


@pytest.fixture
def lab(root: Path, tmp_path: Path) -> Lab:
    return Lab(root, tmp_path)


@pytest.mark.engine
@pytest.mark.parametrize(
    ("settings", "pool", "decided"),
    [
        ({"SLOTS": "4", "NGL": "all"}, "8.00 MiB", "n_slots = 4, n_ctx_slot = 4096, kv_unified = 'false'"),
        ({"SLOTS": "4", "CACHE_TYPE": "q8_0"}, "4.25 MiB", "n_slots = 4, n_ctx_slot = 4096, kv_unified = 'false'"),
        ({"SLOTS": "-1", "NGL": "auto"}, "2.00 MiB", "n_slots = 4, n_ctx_slot = 4096, kv_unified = 'true'"),
    ],
)
def test_the_real_server_starts_answers_and_stops(
    lab: Lab, wheel_server: Path, tiny_model: Path, free_port: int, settings: dict[str, str], pool: str, decided: str
) -> None:
    places = {"LLAMA_BIN": str(wheel_server), "MODEL": str(tiny_model), "PORT": str(free_port), "THREADS": "1"}
    with lab.start("serve-llama-parallel.sh", **places, **settings) as process:
        try:
            assert process.stdout is not None
            shown = ""
            for line in process.stdout:
                shown += line
                if "decided, says its log" in shown and "listening at" in shown:
                    break
            assert process.poll() is None, shown
            assert (lab.work / "llama-server.pid").read_text() == f"{process.pid}\n"
            answers = [chat(free_port, f"{words} and then?") for words in ("First", "Über 5 µs — or", "{}\n\t")]
        finally:
            process.send_signal(signal.SIGTERM)
            shown += process.communicate(timeout=280)[0]
    assert process.returncode == 0
    for answer in answers:
        assert answer["choices"][0]["finish_reason"] == "length", "no answer ends early"
        assert answer["usage"]["completion_tokens"] == 200
        assert len(answer["choices"][0]["message"]["content"]) >= 200, "each token is text by itself"
    log = (lab.work / "llama-server.log").read_text(encoding="utf-8", errors="replace")
    for line in (f"KV buffer size =     {pool}", decided):
        assert line in log, "the log file has what was allocated"
        assert line in shown, "and the terminal shows it too"
    assert f"decided, says its log: {decided}" in shown


def chat(port: int, prompt: str) -> Any:
    body = {"messages": [{"role": "user", "content": prompt}], "max_tokens": 200, "temperature": 0}
    request = urllib.request.Request(f"http://127.0.0.1:{port}/v1/chat/completions", json.dumps(body).encode())
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(request, timeout=280) as answer:
        return json.load(answer)


@pytest.mark.engine
def test_the_wheel_server_refuses_a_flag_that_it_does_not_know(wheel_server: Path, tiny_model: Path) -> None:
    done = subprocess.run(
        [BASH, str(wheel_server), "--model", str(tiny_model), "--no-such-flag"],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        encoding="utf-8",
        timeout=280,
    )
    assert done.returncode == 2
    assert "--no-such-flag" in done.stderr


@pytest.mark.engine
def test_the_wheel_server_ends_where_it_cannot_listen(wheel_server: Path, tiny_model: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        done = subprocess.run(
            [BASH, str(wheel_server), "--model", str(tiny_model), "--port", str(other.getsockname()[1])],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            encoding="utf-8",
            timeout=280,
        )
    assert done.returncode == 1
    assert "did not start" in done.stderr
