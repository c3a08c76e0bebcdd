"""The launchers, against stand-ins that record what they were given, and what all shell scripts of the project have in
common: help, documented settings, symbolic links, and nothing that bash 3.2 or BSD tools lack."""

from __future__ import annotations

import re
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from lab_stand_ins import BASH, MLX_PYTHON, Lab

ROOT = Path(__file__).resolve().parent.parent
SCRIPTS = sorted([*ROOT.glob("scripts/*.sh"), ROOT / "tests" / "engines" / "run.sh"])
SOURCED = {"lib.sh", "servers.sh", "steps.sh", "vllm.sh", "models.sh"}
OURS = [path.name for path in SCRIPTS if path.name not in SOURCED]
LLAMA, NATIVE, CONTAINER, MLX = LAUNCHERS = [
    "serve-llama-parallel.sh",
    "serve-vllm-native.sh",
    "serve-vllm-container.sh",
    "serve-mlx.sh",
]
BINARY = {LLAMA: "llama-server", NATIVE: "vllm", CONTAINER: "docker", MLX: "python"}


@pytest.fixture
def lab(root: Path, tmp_path: Path, free_port: int) -> Lab:
    """Everything that the launchers need, with servers that end at once with status 7."""
    lab = Lab(root, tmp_path)
    lab.environment.update(PORT=str(free_port), ENDS="7")
    lab.model("Qwen/Qwen3-8B-AWQ")
    lab.model("mlx-community/Qwen3-8B-4bit")
    gguf = lab.home / "models" / "unsloth" / "Qwen3-8B-GGUF" / "Qwen3-8B-Q4_K_M.gguf"
    gguf.parent.mkdir(parents=True)
    gguf.write_bytes(b"GGUF\x03\0\0\0")
    lab.stand_in(lab.home / "mlx" / ".venv" / "bin" / "python", MLX_PYTHON)
    return lab


def started(lab: Lab, name: str) -> list[list[str]]:
    """The command lines with which a launcher's server was started."""
    asked = ("--version", "--help", "-c", "image", "container")
    return [call for call in lab.calls(BINARY[name]) if call[0] not in asked]


def option(call: list[str], name: str) -> str | None:
    """What follows the option, "" where it stands alone, None where it is absent."""
    if name not in call:
        return None
    following = call[call.index(name) + 1 :]
    return following[0] if following and not following[0].startswith("--") else ""


# ---------------------------------------------------------------------------------------------------------------
# The command line of the server
# ---------------------------------------------------------------------------------------------------------------

VLLM_DEFAULTS = (
    "--max-model-len 4096 --max-num-seqs 20 --gpu-memory-utilization 0.90 --kv-cache-dtype auto "
    "--enable-prefix-caching --tensor-parallel-size 1 --enable-prompt-tokens-details"
)
DEFAULTS = {
    LLAMA: "--model HOME/models/unsloth/Qwen3-8B-GGUF/Qwen3-8B-Q4_K_M.gguf --alias local-chat --host 127.0.0.1 "
    "--port PORT --ctx-size 81920 --parallel 20 --n-gpu-layers 999 --cache-type-k f16 --cache-type-v f16 --cache-ram 0 "
    "--cont-batching --flash-attn on --metrics --jinja --slots --verbosity 4 --log-file ./llama-server.log "
    "--no-kv-unified",
    NATIVE: "serve HOME/models/Qwen/Qwen3-8B-AWQ --served-model-name local-chat --host 127.0.0.1 --port PORT "
    + VLLM_DEFAULTS,
    CONTAINER: "run --rm --name vllm-lab --gpus all --ipc=host --publish 127.0.0.1:PORT:8000 --mount "
    "type=bind,source=HOME/models,target=/models,readonly nvcr.io/nvidia/vllm:26.08-py3 vllm serve "
    "/models/Qwen/Qwen3-8B-AWQ --served-model-name local-chat --host 0.0.0.0 --port 8000 " + VLLM_DEFAULTS,
    MLX: "-m mlx_lm server --model HOME/models/mlx-community/Qwen3-8B-4bit --host 127.0.0.1 --port PORT "
    "--prompt-cache-size 10 --decode-concurrency 32 --prompt-concurrency 8",
}


@pytest.mark.parametrize("name", LAUNCHERS)
def test_every_default_is_on_the_command_line_and_shown_before_the_start(lab: Lab, name: str) -> None:
    result = lab.run(name, *("--", "--extra", "two words"), **({"LLAMA_BIN": str(lab.bin)} if name == LLAMA else {}))
    places = {"HOME": str(lab.home), "PORT": lab.environment["PORT"]}
    words = [re.sub("HOME|PORT", lambda found: places[str(found[0])], word) for word in DEFAULTS[name].split()]
    assert started(lab, name) == [[*words, "--extra", "two words"]]
    assert result.returncode == 7, "the script becomes the server: its exit status is the server's"
    shown, said = result.stdout.split("the server speaks, pid ")
    for setting in (
        "local-chat" if name != MLX else "absolute path",
        "http://127.0.0.1:",
        ".log",
        ".pid",
        "'two words'",
    ):
        assert setting in shown
    short = {LLAMA: "llama", MLX: "mlx"}.get(name, "vllm")
    assert (lab.work / f"{short}-server.pid").read_text("utf-8").strip() == said.split()[0], "the server's own"
    if name != LLAMA:  # which writes its log itself
        assert (lab.work / f"{short}-server.log").read_text("utf-8") in result.stdout
        assert "the server speaks" in (lab.work / f"{short}-server.log").read_text("utf-8")


def test_a_log_is_new_at_each_start(lab: Lab) -> None:
    for _ in range(2):
        lab.run(NATIVE)
    assert (lab.work / "vllm-server.log").read_text("utf-8").count("the server speaks") == 1


SETTINGS = [  # launcher, settings, options of the server and their values (None: absent, "": alone)
    (LLAMA, {"SLOTS": "8", "CTX_PER_SLOT": "2048"}, {"--parallel": "8", "--ctx-size": "16384"}),
    (LLAMA, {"SLOTS": "010", "CTX_PER_SLOT": "08"}, {"--parallel": "010", "--ctx-size": "80"}),
    (LLAMA, {"SLOTS": "-1", "CTX_PER_SLOT": "512"}, {"--parallel": "-1", "--ctx-size": "512", "--no-kv-unified": None}),
    (LLAMA, {"SLOTS": "-1", "KV_UNIFIED": "1"}, {"--parallel": "-1", "--kv-unified": ""}),
    (LLAMA, {"KV_UNIFIED": "1"}, {"--kv-unified": "", "--no-kv-unified": None}),
    (LLAMA, {"LLAMA_HELP": "--kv-unified"}, {"--kv-unified": None, "--no-kv-unified": None}),  # an older build
    (LLAMA, {"NGL": "all"}, {"--n-gpu-layers": "all"}),
    (LLAMA, {"NGL": "auto"}, {"--n-gpu-layers": "auto"}),
    (LLAMA, {"NGL": "0", "THREADS": "1"}, {"--n-gpu-layers": "0", "--threads": "1"}),
    (
        LLAMA,
        {"CACHE_TYPE": "q8_0", "CACHE_RAM": "-1"},
        {"--cache-type-k": "q8_0", "--cache-type-v": "q8_0", "--cache-ram": "-1"},
    ),
    (LLAMA, {"ALIAS": "other", "HOST": "127.0.0.2"}, {"--alias": "other", "--host": "127.0.0.2"}),
    (LLAMA, {"LOGFILE": "my log", "PIDFILE": "my pid"}, {"--log-file": "my log"}),
    (LLAMA, {"MODEL": "unsloth/Qwen3-0.6B-GGUF:Q8_0"}, {"--hf-repo": "unsloth/Qwen3-0.6B-GGUF:Q8_0", "--model": None}),
    (LLAMA, {"MODEL": "unsloth/Qwen3-0.6B-GGUF"}, {"--hf-repo": "unsloth/Qwen3-0.6B-GGUF"}),
    (NATIVE, {"MODEL": "Qwen/Qwen3-8B"}, {"serve": "Qwen/Qwen3-8B"}),
    (NATIVE, {"SERVED_NAME": "other", "HOST": "0.0.0.0"}, {"--served-model-name": "other", "--host": "0.0.0.0"}),
    (CONTAINER, {"HOST": "0.0.0.0"}, {"--publish": "127.0.0.1:PORT:8000", "--network": None}),  # this machine only
    (CONTAINER, {"IMAGE": "an/image:1", "CONTAINER_NAME": "mine"}, {"an/image:1": "vllm", "--name": "mine"}),
    (
        MLX,
        {"PROMPT_CACHE_SIZE": "20", "DECODE_CONCURRENCY": "4"},
        {"--prompt-cache-size": "20", "--decode-concurrency": "4"},
    ),
    (MLX, {"PROMPT_CONCURRENCY": "2"}, {"--prompt-concurrency": "2"}),
    *(
        (vllm, settings, options)
        for vllm in (NATIVE, CONTAINER)
        for settings, options in (
            (
                {"KV_BYTES": "12079595520", "MEM_FRACTION": "not looked at"},
                {"--kv-cache-memory-bytes": "12079595520", "--gpu-memory-utilization": None},
            ),
            ({"MEM_FRACTION": ".5", "KV_DTYPE": "fp8"}, {"--gpu-memory-utilization": ".5", "--kv-cache-dtype": "fp8"}),
            ({"CTX": "2048", "MAX_SEQS": "8"}, {"--max-model-len": "2048", "--max-num-seqs": "8"}),
            ({"PREFIX_CACHING": "off"}, {"--no-enable-prefix-caching": "", "--enable-prefix-caching": None}),
            ({"TP_SIZE": "2"}, {"--tensor-parallel-size": "2"}),
        )
    ),
]


@pytest.mark.parametrize(("name", "settings", "options"), SETTINGS, ids=str)
def test_a_setting_reaches_the_command_line(
    lab: Lab, name: str, settings: dict[str, str], options: dict[str, str | None]
) -> None:
    result = lab.run(name, **settings)
    (call,) = started(lab, name)
    expected = {word: value and value.replace("PORT", lab.environment["PORT"]) for word, value in options.items()}
    assert {word: option(call, word) for word in expected} == expected, result.stderr
    for setting in ("LOGFILE", "PIDFILE"):
        assert (lab.work / settings.get(setting, ".")).exists()


def test_what_llama_server_decided_is_read_from_its_log(lab: Lab) -> None:
    """SLOTS=-1 leaves the number of slots to the server: the launcher must not guess it."""
    del lab.environment["ENDS"]
    with lab.start(LLAMA, SLOTS="-1", CTX_PER_SLOT="512", LLAMA_BIN=str(lab.bin)) as process:
        assert process.stdout is not None
        shown = []
        for line in process.stdout:
            shown.append(line)
            if "decided, says its log" in line:
                break
        process.terminate()
        process.communicate(timeout=280)
    assert "n_slots = 4, n_ctx_slot = 512, kv_unified = 'true', offloaded 37/37 layers" in shown[-1]
    (slots,) = (line for line in shown if line.startswith("  slots "))
    assert slots.endswith(" as many as llama-server decides\n")


@pytest.mark.parametrize("place", ["binary", "folder", "home", "PATH"])
def test_llama_server_is_found(lab: Lab, place: str) -> None:
    binary = lab.bin / "llama-server"
    if place == "home":
        shutil.move(binary, lab.work / "llama-server")
        (lab.home / "llama.cpp" / "build" / "bin").mkdir(parents=True)
        shutil.move(lab.work / "llama-server", lab.home / "llama.cpp" / "build" / "bin" / "llama-server")
    result = lab.run(
        LLAMA, **{"binary": {"LLAMA_BIN": str(binary)}, "folder": {"LLAMA_BIN": str(lab.bin)}}.get(place, {})
    )
    assert result.returncode == 7, result.stderr


def test_native_prefers_the_environment_in_vllm_venv(lab: Lab) -> None:
    lab.stand_in(lab.home / "a venv" / "bin" / "vllm", 'print(os.environ["PATH"].split(":")[0])\n')
    result = lab.run(NATIVE, VLLM_VENV=str(lab.home / "a venv"))
    assert result.stdout.splitlines()[-1] == str(lab.home / "a venv" / "bin"), "its tools come first on PATH"


def test_a_model_folder_becomes_absolute_for_mlx(lab: Lab) -> None:
    (lab.work / "a model").mkdir()
    (lab.work / "a model" / "config.json").write_text("{}", encoding="utf-8")
    lab.run(MLX, MODEL="a model")
    assert option(started(lab, MLX)[0], "--model") == str(lab.work / "a model")


@pytest.mark.parametrize("name", [LLAMA, NATIVE, MLX])
@pytest.mark.parametrize(
    ("host", "warned"),
    [*((host, True) for host in ("0.0.0.0", "192.168.1.5", "::")), *((host, False) for host in ("localhost", "::1"))],
)
def test_a_warning_where_others_can_reach_the_server(lab: Lab, name: str, host: str, warned: bool) -> None:
    assert ("unauthenticated" in lab.run(name, HOST=host).stderr) is warned
    assert started(lab, name)


def test_a_warning_of_more_threads_than_cores(lab: Lab) -> None:
    assert "more threads than cores" in lab.run(LLAMA, THREADS="5000").stderr


# ---------------------------------------------------------------------------------------------------------------
# What is refused, in one line, before anything is started
# ---------------------------------------------------------------------------------------------------------------

BAD_NUMBERS = [
    *((NATIVE, "PORT", bad) for bad in ("0", "65536", "80a", "-1", "1 2")),
    *((NATIVE, "MAX_SEQS", bad) for bad in ("0", "-8", "twenty", "99999999999999999999")),
    *((NATIVE, "MEM_FRACTION", bad) for bad in ("0", "0.0", "1.5", "90", "90%", "-0.5", ".", "0,9")),
    *((NATIVE, name, bad) for name, bad in (("CTX", "4k"), ("KV_BYTES", "12GB"), ("TP_SIZE", "two"))),
    *(
        (CONTAINER, name, bad)
        for name, bad in (("MEM_FRACTION", "3"), ("KV_BYTES", "x"), ("PREFIX_CACHING", "perhaps"))
    ),
    *((LLAMA, "SLOTS", bad) for bad in ("0", "-3", "4.5", "-01")),
    *((LLAMA, "NGL", bad) for bad in ("most", "-1", "all of them")),
    *((LLAMA, name, "x/") for name in ("PORT", "CTX_PER_SLOT", "CACHE_RAM", "KV_UNIFIED", "THREADS", "CACHE_TYPE")),
    *((MLX, name, "x") for name in ("PORT", "PROMPT_CACHE_SIZE", "DECODE_CONCURRENCY", "PROMPT_CONCURRENCY")),
]
REFUSED = [  # launcher, settings, exit status, words of the one line
    *((name, {setting: bad}, 2, (setting, bad)) for name, setting, bad in BAD_NUMBERS),
    *((name, {"MODEL": "/no such/place"}, 2, ("MODEL", "/no such/place")) for name in LAUNCHERS),
    *((name, {"LOGFILE": "/no such/log"}, 2, ("LOGFILE", "/no such/log")) for name in LAUNCHERS),
    *((name, {"PIDFILE": "/no such/pid"}, 2, ("PIDFILE", "/no such/pid")) for name in LAUNCHERS),
    (LLAMA, {"CACHE_TYPE": "f16; reboot"}, 2, ("CACHE_TYPE", "f16; reboot")),
    (LLAMA, {"LLAMA_BIN": "/no such/place"}, 2, ("LLAMA_BIN", "/no such/place")),
    (LLAMA, {"MODEL": "models/missing.gguf"}, 2, ("MODEL", "fetch-models.sh")),  # no repository, for all its form
    (NATIVE, {"MODEL": "just-a-name"}, 2, ("MODEL", "just-a-name")),
    (CONTAINER, {"NO_IMAGE": "1"}, 2, ("no container image", "docker pull nvcr.io/nvidia/vllm:26.08-py3")),
    (CONTAINER, {"CONTAINER_EXISTS": "1"}, 1, ("'vllm-lab' already", "docker stop vllm-lab")),
    (CONTAINER, {"MODEL": "/models/Qwen/none"}, 2, ("no checkpoint", "config.json")),
    (CONTAINER, {"MODEL": "/models/../etc"}, 2, ("MODEL", "climb")),
    (CONTAINER, {"MODELS_DIR": "/no such/library"}, 2, ("MODELS_DIR", "/no such/library")),
    (CONTAINER, {"CONTAINER_NAME": "a b"}, 2, ("CONTAINER_NAME",)),
    (CONTAINER, {"DOCKER": "no-such-docker"}, 2, ("no-such-docker",)),
]


def refused(lab: Lab, name: str, result: subprocess.CompletedProcess[str], status: int, *words: str) -> None:
    assert result.returncode == status, result.stderr + result.stdout
    assert len(result.stderr.splitlines()) == 1, result.stderr
    assert [word for word in words if word not in result.stderr] == []
    assert started(lab, name) == []


@pytest.mark.parametrize(("name", "settings", "status", "words"), REFUSED, ids=str)
def test_a_wrong_setting_is_refused(
    lab: Lab, name: str, settings: dict[str, str], status: int, words: tuple[str, ...]
) -> None:
    refused(lab, name, lab.run(name, **settings), status, *words)


@pytest.mark.parametrize("name", LAUNCHERS)
def test_arguments_of_its_own_are_refused(lab: Lab, name: str) -> None:
    refused(lab, name, lab.run(name, "--port", "9"), 2, "--port", "after --")


@pytest.mark.parametrize("name", LAUNCHERS)
def test_a_busy_port_is_refused_and_the_running_servers_files_are_left_alone(lab: Lab, name: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as busy:
        port = str(busy.getsockname()[1])
        refused(lab, name, lab.run(name, PORT=port), 1, port, "already answers")
    assert list(lab.work.iterdir()) == []


@pytest.mark.parametrize("content", [b"", b"GG", b"version https://git-lfs\n", b"\0GGUF"])
def test_a_file_that_is_no_gguf_is_refused(lab: Lab, content: bytes) -> None:
    (lab.work / "model.gguf").write_bytes(content)
    refused(lab, LLAMA, lab.run(LLAMA, MODEL="model.gguf"), 2, "is not a GGUF file")


@pytest.mark.parametrize("name", [NATIVE, MLX])
def test_a_folder_that_is_no_checkpoint_is_refused(lab: Lab, name: str) -> None:
    refused(lab, name, lab.run(name, MODEL=str(lab.work)), 2, "config.json")


@pytest.mark.parametrize(
    ("name", "missing", "words"),
    [
        (LLAMA, "llama-server", ("cannot find llama-server", "LLAMA_BIN")),
        (NATIVE, "vllm", ("cannot find vllm", "VLLM_VENV")),
        (MLX, "", ("mlx-lm", "MLX_VENV")),
    ],
)
def test_a_missing_engine_is_named(lab: Lab, name: str, missing: str, words: tuple[str, ...]) -> None:
    (lab.bin / missing).unlink() if missing else lab.stand_in(lab.home / "mlx/.venv/bin/python", "sys.exit(1)\n")
    refused(lab, name, lab.run(name, PATH=f"{lab.bin}:/usr/bin:/bin"), 2, *words)


def test_a_llama_server_without_the_right_to_run_is_refused(lab: Lab) -> None:
    (lab.bin / "llama-server").chmod(0o644)
    refused(lab, LLAMA, lab.run(LLAMA, LLAMA_BIN=str(lab.bin)), 2, "is not executable")


# ---------------------------------------------------------------------------------------------------------------
# All scripts
# ---------------------------------------------------------------------------------------------------------------


def help_of(lab: Lab, path: Path, *, through: Path | None = None, flag: str = "--help") -> str:
    result = subprocess.run(
        [BASH, str(through or path), flag],
        cwd=lab.work,
        env=lab.environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        encoding="utf-8",
        timeout=280,
    )
    assert result.returncode == 0 and result.stderr == ""
    return result.stdout


@pytest.mark.parametrize("path", [path for path in SCRIPTS if path.name in OURS], ids=lambda path: path.name)
def test_help_is_the_header_and_nothing_is_done(lab: Lab, path: Path) -> None:
    shown = help_of(lab, path)
    assert shown.startswith(f"{path.name} - ") and "set -euo" not in shown
    assert help_of(lab, path, flag="-h") == shown
    assert list(lab.work.iterdir()) == [] and not lab.record.exists()
    read = set(re.findall(r'\b([A-Z][A-Z_]+)="\$\{\1:-', path.read_text("utf-8")))
    if path.name in (NATIVE, CONTAINER):
        read |= set(re.findall(r'\b([A-Z][A-Z_]+)="\$\{\1:-', (ROOT / "scripts" / "vllm.sh").read_text("utf-8")))
    assert {name for name in read if not re.search(rf"\b{name}\b", shown)} == set(), "every setting is documented"
    if path.name in LAUNCHERS:
        assert re.search(r"All of its flags: .*--help", shown) and "Flags after -- go to" in shown


@pytest.mark.parametrize("path", [path for path in SCRIPTS if path.name in OURS], ids=lambda path: path.name)
def test_a_script_is_reached_through_symbolic_links(lab: Lab, path: Path) -> None:
    """From another folder, over a relative link to an absolute one."""
    (lab.work / "a bin").mkdir()
    (lab.work / "a bin" / "second").symlink_to(path)
    (lab.work / "first.sh").symlink_to(Path("a bin") / "second")
    assert help_of(lab, path, through=lab.work / "first.sh") == help_of(lab, path)


NOT_IN_BASH_3_2 = {
    "associative array": r"\b(declare|local|typeset) -[a-zA-Z]*[An]",
    "mapfile": r"\b(mapfile|readarray)\b",
    "case conversion": r"\$\{\w+(\[[^]]*\])?(,,?|\^\^?)\}",
    "transformation": r"\$\{\w+@[A-Za-z]\}",
    "append both": r"&>>",
    "pipe both": r"\|&",
    "coproc": r"^\s*coproc\b",
    "time format": r"printf '?\"?%\(",
    "test -v": r"\[\[? -v ",
    "wait -n": r"\bwait -n\b",
    "fractional read": r"\bread\b.* -t ?0?\.",
    "fall through": r";;?&",
    "negative length": r"\$\{\w+:[^}:]*:-\d",
    "newer variables": r"\$\{?(EPOCHSECONDS|EPOCHREALTIME|BASHPID|SRANDOM)\b",
    "globstar": r"shopt -s (globstar|lastpipe|inherit_errexit)",
}
NOT_IN_BSD_TOOLS = {
    "sed -i": r"\bsed -[a-zA-Z]*i",
    "sed -r": r"\bsed -[a-zA-Z]*r",
    "grep -P": r"\bgrep -[a-zA-Z]*P",
    "readlink -f": r"\breadlink -f",
    "realpath": r"\$\(realpath\b",
    "stat -c": r"\bstat -[a-zA-Z]*c",
    "date -d": r"\bdate -d|\bdate \+%[sN]*N",
    "timeout": r"^\s*timeout ",
    "nproc": r"\$\(nproc",
    "tac": r"\btac\b",
    "negative head": r"\bhead -n ?-",
    "sort -V": r"\bsort -[a-zA-Z]*V",
    "xargs -r": r"\bxargs -[a-zA-Z]*r",
    "long options": r"(?<![-\w])(mktemp|cp|mv|rm|mkdir|tail|tee|ps|cksum) --[a-z]",
}


@pytest.mark.parametrize("path", SCRIPTS, ids=str)
def test_nothing_that_old_bash_or_bsd_tools_lack(path: Path) -> None:
    found = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        code = re.sub(r"^\s*#.*|(?<=\s)# .*", "", line)
        for name, pattern in {**NOT_IN_BASH_3_2, **NOT_IN_BSD_TOOLS}.items():
            if re.search(pattern, code):
                found.append(f"{number}: {name}: {line.strip()}")
    assert found == []


@pytest.mark.parametrize("path", SCRIPTS, ids=str)
def test_arrays_that_may_be_empty_are_guarded(path: Path) -> None:
    """Under `set -u`, bash before 4.4 calls an empty array unset: name=() is expanded as ${name[@]+"${name[@]}"}."""
    text = path.read_text(encoding="utf-8")
    for name in re.findall(r"\b(\w+)=\(\)", text):
        expansion = f'"${{{name}[@]}}"'
        guarded = f"${{{name}[@]+{expansion}}}"
        assert expansion not in text.replace(guarded, ""), name


@pytest.mark.parametrize("path", SCRIPTS, ids=str)
def test_scripts_parse_and_begin_as_they_should(path: Path) -> None:
    assert subprocess.run([BASH, "-n", str(path)], capture_output=True).returncode == 0
    if path.name not in SOURCED:
        text = path.read_text(encoding="utf-8")
        assert text.startswith("#!/usr/bin/env bash\n# ")
        assert "\nset -euo pipefail\n" in text
        assert path.stat().st_mode & 0o111


@pytest.mark.parametrize("path", [None, "/nowhere"], ids=["by Python", "by curl"])
def test_a_port_is_seen_by_a_bash_without_dev_tcp(root: Path, path: str | None, free_port: int) -> None:
    """Some are built without it, and say that there is no such file."""
    if path is not None and shutil.which("curl") is None:
        pytest.skip("no curl here")
    script = f"""
        . '{root / "scripts" / "lib.sh"}'
        . '{root / "scripts" / "servers.sh"}'
        bash_connects() {{ echo "bash: /dev/tcp/$1/$2: No such file or directory"; return 1; }}
        PYTHON='{path or sys.executable}'
        port_answers 127.0.0.1 "$1" && echo open || echo closed
    """
    with socket.create_server(("127.0.0.1", 0)) as server:
        for port, state in ((server.getsockname()[1], "open"), (free_port, "closed")):
            done = subprocess.run(
                [BASH, "-c", script, "test", str(port)], capture_output=True, encoding="utf-8", timeout=280
            )
            assert (done.stdout, done.stderr) == (f"{state}\n", "")
