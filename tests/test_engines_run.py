"""tests/engines/run.sh: its llama.cpp part on the real server (the wheel's), and what it refuses."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from lab_stand_ins import BASH, SETTINGS


def run(root: Path, folder: Path, *args: str, **settings: str) -> subprocess.CompletedProcess[str]:
    inherited = {name: value for name, value in os.environ.items() if name not in SETTINGS.split()}
    return subprocess.run(
        [BASH, str(root / "tests" / "engines" / "run.sh"), *args],
        cwd=folder,
        env={**inherited, "PYTHON": sys.executable, "XDG_CACHE_HOME": str(folder / "no cache"), **settings},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        encoding="utf-8",
        timeout=600,
    )


@pytest.mark.engine
@pytest.mark.timeout(700)  # four servers, and some two hundred requests of a real engine
def test_llama_goes_through_all_of_its_steps(root: Path, tmp_path: Path) -> None:
    binary = tmp_path / "the wheel" / "llama-server"
    binary.parent.mkdir()
    server = root / "tests" / "engines" / "llama_wheel_server.py"
    binary.write_text(f"#!/bin/sh\nexec '{sys.executable}' '{server}' \"$@\"\n", "utf-8")
    binary.chmod(0o755)
    # A busy machine may starve the client, which the steps would stop at; what they read from logs and notebook
    # is judged below.
    done = run(
        *(root, tmp_path, "--out", "the proof", "llama"),
        LLAMA_BIN=str(binary),
        LLAMA_VENV=sys.prefix,
        KEEP_GOING="1",
        LOAD="--requests 20 --min-rounds 1 --max-tokens 16",
    )
    assert done.returncode == 0, done.stdout
    assert done.stdout.rstrip().endswith("PASS")
    assert done.stdout.count("agrees with the prediction") == 4, "the sweep's server and the three variants'"
    assert "does not agree" not in done.stdout
    folder = tmp_path / "the proof"
    book = (folder / "labbook.md").read_text("utf-8")
    assert book.startswith((root / "labbook.md").read_text("utf-8")), "the lab's own notebook, with its ten steps"
    records = [json.loads(line) for line in book.splitlines() if line.startswith("{")]
    levels = [record for record in records if "concurrency" in record]
    assert {level["label"] for level in levels} == {
        *("llama-baseline", "llama-prefix-unique", "llama-prefix-shared"),
        *("llama-slots8", "llama-ctx2048", "llama-kv-alt"),
    }
    assert not any(level["failed"] for level in levels)
    (fewer,) = (level for level in levels if level["label"] == "llama-slots8")
    assert fewer["server"]["slots"] == 8 and (fewer["server"]["peak_busy_slots"] or 0) <= 8
    assert (folder / "llama" / "transcript.txt").read_text("utf-8") in done.stdout


def test_an_engine_that_is_not_there_fails_alone_and_is_named(root: Path, tmp_path: Path) -> None:
    done = run(root, tmp_path, "vllm", "mlx")
    assert done.returncode == 1
    for engine in ("vllm", "mlx"):
        assert f"the engine '{engine}' is not there: --install" in done.stdout
    verdicts = done.stdout[done.stdout.index("== verdicts") :].splitlines()[1:]
    assert [line.split()[0] for line in verdicts] == ["vllm", "mlx"]
    assert all("FAIL (exit status 1" in line for line in verdicts)


@pytest.mark.parametrize("args", [("ollama",), ("--out",), ("--everything",)])
def test_wrong_arguments(root: Path, tmp_path: Path, args: tuple[str, ...]) -> None:
    done = run(root, tmp_path, *args)
    assert done.returncode == 2 and len(done.stdout.splitlines()) == 1
