"""scripts/smoke-cpu.sh: the real smoke run, the simulated one, and what it does when something goes wrong."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

BASH = shutil.which("bash") or "bash"


def environment(**changes: str) -> dict[str, str]:
    """The environment without what would steer the run, and with `changes`."""
    steering = {"MODEL", "LLAMA_BIN", "OUT", "QUANT", "NGL"}
    return {**{name: value for name, value in os.environ.items() if name not in steering}, **changes}


def smoke(root: Path, *args: str, timeout: float = 280, **changes: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [BASH, str(root / "scripts" / "smoke-cpu.sh"), *args],
        env=environment(**changes),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        encoding="utf-8",
        timeout=timeout,
    )


@pytest.fixture
def checkout(root: Path, tmp_path: Path) -> Path:
    """A copy of the repository, on a path with a space: whatever a run leaves in it shows."""
    copy = tmp_path / "a checkout"
    shutil.copytree(
        root, copy, ignore=shutil.ignore_patterns(".git", ".venv", "__pycache__", ".*_cache", ".hypothesis")
    )
    return copy


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def port_of(output: str) -> int:
    match = re.search(r"slots and context .* port (\d+)", output)
    assert match, output
    return int(match.group(1))


def refuses_connections(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) != 0


def check_whole_run(done: subprocess.CompletedProcess[str], out: Path, engine: str) -> None:
    """What the run prints and leaves, whichever engine it was."""
    assert done.returncode == 0, done.stdout + done.stderr
    for heading in ("== The curve", "== What prefix caching was worth", "== The check", "== Left for you"):
        assert heading in done.stdout
    assert re.search(r"^knee: ", done.stdout, re.MULTILINE)
    assert [int(c) for c in re.findall(r"^(\d+) +\d+/\d+ ", done.stdout, re.MULTILINE)] == [1, 5, 10, 20]
    assert re.search(r"^\d+ pass, \d+ warn, 0 fail$", done.stdout, re.MULTILINE)
    for rule in ("identified", "tokens-from-usage", "cached-count", "rounds", "curve-summary", "failed-requests"):
        assert re.search(rf"^PASS  {rule}\b", done.stdout, re.MULTILINE), rule
    assert str(out / "labbook.md") in done.stdout
    assert str(out / "requests.jsonl") in done.stdout
    assert refuses_connections(port_of(done.stdout)), "the server was stopped"

    levels = [record for record in records(out / "labbook.md") if "concurrency" in record]
    assert [(level["label"], level["concurrency"], level["requests"]) for level in levels] == [
        ("llama-baseline", 1, 40),
        ("llama-baseline", 5, 40),
        ("llama-baseline", 10, 40),
        ("llama-baseline", 20, 80),
        ("llama-prefix-unique", 1, 40),
        ("llama-prefix-unique", 4, 40),
        ("llama-prefix-shared", 1, 40),
        ("llama-prefix-shared", 4, 40),
    ]
    for level in levels:
        assert level["failed"] == 0
        assert level["finish_reasons"] == {"length": level["requests"]}, "no answer ends early"
        assert level["engine"] == engine
        assert level["server_slots"] == 8
        assert level["context_length"] == 4096
        assert not {"", "unknown"} & {level["engine_version"], level["host"], level["quant"]}
        if level["prompt_set"] == "shared-prefix":
            assert level["cached_tokens_mean"] > 0.5 * level["prompt_tokens_mean"]
        if level["prompt_set"] == "unique-prefix":
            assert level["cached_tokens_mean"] < 0.1 * level["prompt_tokens_mean"]
            assert 1000 < level["prompt_tokens_mean"] < 4000
    raw = (out / "requests.jsonl").read_text(encoding="utf-8").splitlines()
    assert len(raw) == sum(level["requests"] for level in levels)


def records(labbook: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in labbook.read_text(encoding="utf-8").splitlines() if line.startswith("{")]


@pytest.mark.engine
@pytest.mark.timeout(900)  # the first run on a machine installs the engines' packages
def test_the_real_run_ends_with_a_curve_and_a_clean_check(checkout: Path, tmp_path: Path) -> None:
    before = contents(checkout)
    done = smoke(checkout, OUT=str(tmp_path / "an out folder"), timeout=840)
    check_whole_run(done, tmp_path / "an out folder", "llama.cpp")
    assert contents(checkout) == before, "the repository stays as it was"
    log = (tmp_path / "an out folder" / "llama-server.log").read_text(encoding="utf-8", errors="replace")
    assert "n_slots = 8, n_ctx_slot = 4096" in log


def test_the_simulated_run_needs_nothing_installed(checkout: Path, tmp_path: Path) -> None:
    before = contents(checkout)
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    done = smoke(checkout, "--sim", TMPDIR=str(temporary), XDG_CACHE_HOME=str(tmp_path / "cache"))
    (out,) = temporary.iterdir()  # and no scratch folder beside it
    check_whole_run(done, out, "simulated")
    assert not (tmp_path / "cache").exists(), "nothing was installed"
    assert contents(checkout) == before, "the repository stays as it was"


@pytest.mark.parametrize(
    ("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)], ids=lambda v: str(v)
)
def test_a_signal_stops_the_load_and_the_server(root: Path, tmp_path: Path, number: int, status: int) -> None:
    if signal.getsignal(number) == signal.SIG_IGN:
        pytest.skip("the shell that runs the tests ignores this signal (nohup), and bash cannot trap such a one")
    with started(root, tmp_path) as process:
        assert process.stdout is not None
        shown = ""
        for line in process.stdout:
            shown += line
            if line.startswith("prompt set mixed"):  # the load is about to begin
                break
        port = port_of(shown)
        assert not refuses_connections(port)
        if number == signal.SIGINT:
            os.killpg(process.pid, number)  # a terminal's Ctrl-C reaches every process of the group
        else:
            process.send_signal(number)
        rest = process.communicate(timeout=280)[0]
    assert process.returncode == status, shown + rest
    assert refuses_connections(port), "the server was stopped"
    assert "Traceback" not in rest
    assert "== The curve" not in rest


class started:
    """The simulated run in a process group of its own, ended with its group whatever happens."""

    def __init__(self, root: Path, folder: Path) -> None:
        self.process = subprocess.Popen(
            [BASH, str(root / "scripts" / "smoke-cpu.sh"), "--sim"],
            env=environment(OUT=str(folder / "out"), PYTHONUNBUFFERED="1"),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            encoding="utf-8",
            start_new_session=True,
        )

    def __enter__(self) -> subprocess.Popen[str]:
        return self.process

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        if self.process.stdout is not None:
            self.process.stdout.close()


# ---------------------------------------------------------------------------------------------------------------
# With stand-ins for the two programs
# ---------------------------------------------------------------------------------------------------------------


@pytest.fixture
def stand_ins(checkout: Path) -> Path:
    """The checkout with stand-ins for two programs, which end with the statuses that the environment says."""
    (checkout / "load_test.py").write_text(
        "import os, sys\nsys.exit('stand-in: no luck' if '--version' not in sys.argv and os.environ.get('BAD_LOAD')"
        " else 0)\n"
    )
    (checkout / "summarise_load.py").write_text(
        "import os, sys\nsys.exit(int(os.environ.get('CHECK_STATUS', 0)) if '--check' in sys.argv else 0)\n"
    )
    return checkout


@pytest.mark.parametrize("status", [0, 1])
def test_the_exit_status_is_that_of_the_check(stand_ins: Path, tmp_path: Path, status: int) -> None:
    done = smoke(stand_ins, "--sim", OUT=str(tmp_path / "out"), CHECK_STATUS=str(status))
    assert done.returncode == status, done.stderr
    assert "== Left for you" in done.stdout, "the paths are printed either way"


def test_a_load_that_fails_ends_the_run_and_the_server(stand_ins: Path, tmp_path: Path) -> None:
    done = smoke(stand_ins, "--sim", OUT=str(tmp_path / "out"), BAD_LOAD="1")
    assert done.returncode == 1
    assert "llama-baseline ended with status 1" in done.stderr
    assert refuses_connections(port_of(done.stdout))


def test_results_never_go_into_the_repository(stand_ins: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(stand_ins)
    for inside in (stand_ins / "results", tmp_path / "link" / "results"):
        done = smoke(stand_ins, "--sim", OUT=str(inside))
        assert done.returncode == 2
        assert "lies in the repository" in done.stderr
        assert not inside.exists()


def test_the_packaged_server_and_the_model_can_be_used_again(stand_ins: Path, tmp_path: Path) -> None:
    """The wrapper around the packaged server outlives the run; the last line starts it again."""
    packages = tmp_path / "packages" / "python"
    packages.parent.mkdir()
    packages.write_text(
        f"#!{sys.executable}\nimport os, sys\n"
        "if '--version' in sys.argv or '--help' in sys.argv: sys.exit()\n"
        "port = sys.argv[sys.argv.index('--port') + 1]\n"
        f"engine = [{sys.executable!r}, {str(stand_ins / 'scripts' / 'simulated_engine.py')!r}, '--port', port]\n"
        "os.execv(engine[0], engine)\n"
    )
    packages.chmod(0o755)
    (stand_ins / "tests" / "private-env.sh").write_text(
        f"mkdir -p \"$XDG_CACHE_HOME/llm-load-lab\"; echo '{packages}'\n"
    )
    model = tmp_path / "a model-Q8_0.gguf"
    model.write_bytes(b"GGUF")
    cache = tmp_path / "the cache"
    path = os.pathsep.join(
        folder for folder in os.environ["PATH"].split(os.pathsep) if not (Path(folder) / "llama-server").exists()
    )
    settings: dict[str, Any] = {
        "OUT": str(tmp_path / "out"),
        "XDG_CACHE_HOME": str(cache),
        "MODEL": str(model),
        "PATH": path,
    }
    for _ in range(2):
        done = smoke(stand_ins, **settings)
        assert done.returncode == 0, done.stdout + done.stderr
        (wrapper,) = (cache / "llm-load-lab").glob("llama-server-*")
    again = re.search(r"^  the same server again  *(LLAMA_BIN=.*)$", done.stdout, re.MULTILINE)
    assert again and again[1] == (
        f"LLAMA_BIN='{wrapper}' MODEL='{model}' bash '{stand_ins / 'scripts'}'/serve-llama-parallel.sh"
    )
    version = subprocess.run([str(wrapper), "--version"], stdin=subprocess.DEVNULL, timeout=280)
    assert version.returncode == 0


@pytest.mark.parametrize("argument", ["--simulate", "now"])
def test_an_unknown_argument_is_refused(root: Path, argument: str) -> None:
    done = smoke(root, argument)
    assert done.returncode == 2
    assert argument in done.stderr
