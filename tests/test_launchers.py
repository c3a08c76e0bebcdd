"""The launchers for vLLM and mlx_lm.server, against stand-ins that record what they were given, and what all shell
scripts of the project have in common: help, documented settings, and nothing that bash 3.2 or BSD tools lack."""

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
LAUNCHERS = ["serve-llama-parallel.sh", "serve-vllm-native.sh", "serve-vllm-container.sh", "serve-mlx.sh"]
OURS = [
    *LAUNCHERS[1:],
    *("lab-env.sh", "preflight.sh", "sweep.sh", "variants.sh", "admission.sh", "crosscheck.sh", "cleanup.sh"),
]


@pytest.fixture
def lab(root: Path, tmp_path: Path, free_port: int) -> Lab:
    lab = Lab(root, tmp_path)
    lab.environment.update(PORT=str(free_port), VLLM_ENDS="7", MLX_ENDS="1")
    lab.model("Qwen/Qwen3-8B-AWQ")
    lab.model("mlx-community/Qwen3-8B-4bit")
    lab.stand_in(lab.home / "mlx" / ".venv" / "bin" / "python", MLX_PYTHON)
    return lab


def refused(result: subprocess.CompletedProcess[str], status: int, *words: str) -> None:
    assert result.returncode == status, result.stderr + result.stdout
    lines = result.stderr.splitlines()
    assert len(lines) == 1, result.stderr
    for word in words:
        assert word in lines[0]


# ---------------------------------------------------------------------------------------------------------------
# vLLM, natively
# ---------------------------------------------------------------------------------------------------------------


def native_command(lab: Lab, *memory: str, caching: str = "--enable-prefix-caching") -> list[str]:
    return [
        *("serve", str(lab.home / "models" / "Qwen" / "Qwen3-8B-AWQ"), "--served-model-name", "local-chat"),
        *("--host", "127.0.0.1", "--port", lab.environment["PORT"], "--max-model-len", "4096"),
        *("--max-num-seqs", "20", *memory, "--kv-cache-dtype", "auto", caching),
        *("--tensor-parallel-size", "1", "--enable-prompt-tokens-details"),
    ]


def test_native_defaults_are_all_on_the_command_line(lab: Lab) -> None:
    result = lab.run("serve-vllm-native.sh")
    assert lab.calls("vllm") == [native_command(lab, "--gpu-memory-utilization", "0.90")]
    assert result.returncode == 7, "the exit status is vLLM's own"


def test_native_cache_in_bytes_replaces_the_fraction(lab: Lab) -> None:
    lab.run("serve-vllm-native.sh", KV_BYTES="12079595520", MEM_FRACTION="not looked at")
    assert lab.calls("vllm") == [native_command(lab, "--kv-cache-memory-bytes", "12079595520")]


def test_native_every_setting_arrives(lab: Lab) -> None:
    folder = lab.model("own/a model")
    lab.run(
        "serve-vllm-native.sh",
        *("--", "--enforce-eager", "--seed", "a b"),
        MODEL=str(folder),
        SERVED_NAME="other",
        HOST="0.0.0.0",
        CTX="2048",
        MAX_SEQS="8",
        MEM_FRACTION=".5",
        KV_DTYPE="fp8",
        PREFIX_CACHING="off",
        TP_SIZE="2",
    )
    (call,) = lab.calls("vllm")
    assert call == [
        *("serve", str(folder), "--served-model-name", "other", "--host", "0.0.0.0", "--port"),
        *(lab.environment["PORT"], "--max-model-len", "2048", "--max-num-seqs", "8"),
        *("--gpu-memory-utilization", ".5", "--kv-cache-dtype", "fp8", "--no-enable-prefix-caching"),
        *("--tensor-parallel-size", "2", "--enable-prompt-tokens-details", "--enforce-eager", "--seed", "a b"),
    ]


def test_native_prints_settings_first_copies_the_log_and_notes_its_own_pid(lab: Lab) -> None:
    result = lab.run("serve-vllm-native.sh", LOGFILE="my log.txt", PIDFILE="my pid.txt")
    shown, said = result.stdout.split("GPU KV cache size", 1)
    for setting in ("local-chat", "4096", "20", "0.90", "auto", "my log.txt", "my pid.txt", "--max-num-seqs"):
        assert setting in shown
    log = (lab.work / "my log.txt").read_text(encoding="utf-8")
    assert log.startswith("GPU KV cache size") and said.strip() in log
    pid = (lab.work / "my pid.txt").read_text(encoding="utf-8").strip()
    assert f"pid {pid}" in log, "the pid file holds the process that vLLM runs as"


def test_native_log_is_new_at_each_start(lab: Lab) -> None:
    for _ in range(2):
        lab.run("serve-vllm-native.sh")
    assert (lab.work / "vllm-server.log").read_text(encoding="utf-8").count("GPU KV cache size") == 1


def test_native_takes_a_repository_id(lab: Lab) -> None:
    lab.run("serve-vllm-native.sh", MODEL="Qwen/Qwen3-8B")
    assert lab.calls("vllm")[0][1] == "Qwen/Qwen3-8B"


def test_native_prefers_the_environment_in_vllm_venv(lab: Lab) -> None:
    lab.stand_in(lab.home / "a venv" / "bin" / "vllm", 'print(os.environ["PATH"].split(":")[0])\n')
    result = lab.run("serve-vllm-native.sh", VLLM_VENV=str(lab.home / "a venv"))
    assert result.stdout.splitlines()[-1] == str(lab.home / "a venv" / "bin"), "its tools come first on PATH"
    assert len(lab.calls("vllm")) == 1


@pytest.mark.parametrize("host", ["0.0.0.0", "192.168.1.5", "::"])
def test_native_warns_where_others_can_reach_it(lab: Lab, host: str) -> None:
    result = lab.run("serve-vllm-native.sh", HOST=host)
    assert "unauthenticated" in result.stderr
    assert lab.calls("vllm")


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1", "127.0.0.2"])
def test_native_does_not_warn_on_loopback(lab: Lab, host: str) -> None:
    assert lab.run("serve-vllm-native.sh", HOST=host).stderr == ""


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("PORT", bad) for bad in ("0", "65536", "80a", "-1", "1 2")),
        *(("CTX", bad) for bad in ("0", "4k", "4096.0")),
        *(("MAX_SEQS", bad) for bad in ("0", "-8", "twenty", "99999999999999999999")),
        *(("KV_BYTES", bad) for bad in ("0", "12GB", "1e10")),
        *(("MEM_FRACTION", bad) for bad in ("0", "0.0", "1.5", "90", "90%", "-0.5", ".", "0,9")),
        *(("PREFIX_CACHING", bad) for bad in ("yes", "1", "ON")),
        *(("TP_SIZE", bad) for bad in ("0", "two")),
        ("MODEL", "/no such/folder"),
        ("MODEL", "just-a-name"),
    ],
)
def test_native_refuses_a_wrong_setting(lab: Lab, name: str, value: str) -> None:
    refused(lab.run("serve-vllm-native.sh", **{name: value}), 2, name, value)
    assert lab.calls("vllm") == []


def test_native_refuses_a_folder_that_is_no_checkpoint(lab: Lab) -> None:
    (lab.home / "empty").mkdir()
    refused(lab.run("serve-vllm-native.sh", MODEL=str(lab.home / "empty")), 2, "config.json", "empty")


def test_native_refuses_when_there_is_no_vllm(lab: Lab) -> None:
    (lab.bin / "vllm").unlink()
    refused(lab.run("serve-vllm-native.sh", PATH=f"{lab.bin}:/usr/bin:/bin"), 2, "cannot find vllm", "VLLM_VENV")


def test_native_refuses_arguments_of_its_own(lab: Lab) -> None:
    refused(lab.run("serve-vllm-native.sh", "--port", "9"), 2, "--port", "after --")


@pytest.mark.parametrize("script", LAUNCHERS[1:])
def test_a_busy_port_is_refused(lab: Lab, script: str) -> None:
    with socket.socket() as busy:
        busy.bind(("127.0.0.1", 0))
        busy.listen()
        port = str(busy.getsockname()[1])
        refused(lab.run(script, PORT=port), 1, port, "already answers")
    started = [call for call in lab.calls("vllm") + lab.calls("python") if call[0] != "-c"]
    assert started == [] and not any(call[0] == "run" for call in lab.calls("docker"))


# ---------------------------------------------------------------------------------------------------------------
# vLLM in a container
# ---------------------------------------------------------------------------------------------------------------


def docker_run(lab: Lab) -> list[str]:
    runs = [call for call in lab.calls("docker") if call[0] == "run"]
    assert len(runs) == 1
    return runs[0]


def test_container_defaults_are_all_on_the_command_line(lab: Lab) -> None:
    result = lab.run("serve-vllm-container.sh")
    port = lab.environment["PORT"]
    assert docker_run(lab) == [
        *("run", "--rm", "--name", "vllm-lab", "--gpus", "all", "--ipc=host", "--publish", f"127.0.0.1:{port}:8000"),
        *("--mount", f"type=bind,source={lab.home / 'models'},target=/models,readonly"),
        *("nvcr.io/nvidia/vllm:26.08-py3", "vllm", "serve", "/models/Qwen/Qwen3-8B-AWQ"),
        *("--served-model-name", "local-chat", "--host", "0.0.0.0", "--port", "8000", "--max-model-len", "4096"),
        *("--max-num-seqs", "20", "--gpu-memory-utilization", "0.90", "--kv-cache-dtype", "auto"),
        *("--enable-prefix-caching", "--tensor-parallel-size", "1", "--enable-prompt-tokens-details"),
    ]
    assert result.returncode == 7
    assert result.stdout.index("nvcr.io") < result.stdout.index("the container speaks")
    assert (lab.work / "vllm-server.log").read_text(encoding="utf-8") == "the container speaks\n"


def test_container_every_setting_arrives(lab: Lab) -> None:
    library = lab.home / "my library"
    (library / "own" / "model").mkdir(parents=True)
    (library / "own" / "model" / "config.json").write_text("{}", encoding="utf-8")
    lab.run(
        "serve-vllm-container.sh",
        *("--", "--enforce-eager"),
        IMAGE="an/image:1",
        CONTAINER_NAME="mine",
        MODELS_DIR=str(library),
        MODEL="/models/own/model",
        KV_BYTES="6039797760",
        KV_DTYPE="fp8",
        MAX_SEQS="8",
        PREFIX_CACHING="off",
    )
    call = docker_run(lab)
    assert call[2:4] == ["--name", "mine"]
    assert f"type=bind,source={library},target=/models,readonly" in call
    image = call.index("an/image:1")
    assert call[image + 1 : image + 4] == ["vllm", "serve", "/models/own/model"]
    for pair in (["--kv-cache-memory-bytes", "6039797760"], ["--kv-cache-dtype", "fp8"], ["--max-num-seqs", "8"]):
        assert call[call.index(pair[0]) + 1] == pair[1]
    assert "--gpu-memory-utilization" not in call and "--no-enable-prefix-caching" in call
    assert call[-1] == "--enforce-eager"


def test_container_is_never_published_beyond_this_machine(lab: Lab) -> None:
    lab.run("serve-vllm-container.sh", HOST="0.0.0.0")
    call = docker_run(lab)
    assert [call[at + 1].split(":")[0] for at, word in enumerate(call) if word in ("-p", "--publish")] == ["127.0.0.1"]
    assert "--network" not in " ".join(call)


@pytest.mark.parametrize(
    ("settings", "status", "words"),
    [
        ({"NO_IMAGE": "1"}, 2, ("no container image", "docker pull nvcr.io/nvidia/vllm:26.08-py3")),
        ({"CONTAINER_EXISTS": "1"}, 1, ("'vllm-lab' already", "docker stop vllm-lab")),
        ({"MODEL": "/models/Qwen/none"}, 2, ("no checkpoint", "config.json")),
        ({"MODEL": "/models/../etc"}, 2, ("MODEL", "climb")),
        ({"MODEL": "/elsewhere/model"}, 2, ("MODEL", "/models")),
        ({"MODELS_DIR": "/no such/library"}, 2, ("MODELS_DIR", "/no such/library")),
        ({"CONTAINER_NAME": "a b"}, 2, ("CONTAINER_NAME",)),
        ({"DOCKER": "no-such-docker"}, 2, ("no-such-docker",)),
        ({"KV_BYTES": "x"}, 2, ("KV_BYTES",)),
        ({"MEM_FRACTION": "3"}, 2, ("MEM_FRACTION",)),
        ({"PREFIX_CACHING": "perhaps"}, 2, ("PREFIX_CACHING",)),
    ],
)
def test_container_refuses(lab: Lab, settings: dict[str, str], status: int, words: tuple[str, ...]) -> None:
    refused(lab.run("serve-vllm-container.sh", **settings), status, *words)
    assert not any(call[0] == "run" for call in lab.calls("docker"))


# ---------------------------------------------------------------------------------------------------------------
# mlx_lm.server
# ---------------------------------------------------------------------------------------------------------------


def mlx_calls(lab: Lab) -> list[list[str]]:
    return [call for call in lab.calls("python") if call[0] == "-m"]


def test_mlx_defaults_are_all_on_the_command_line(lab: Lab) -> None:
    result = lab.run("serve-mlx.sh")
    model = str(lab.home / "models" / "mlx-community" / "Qwen3-8B-4bit")
    assert mlx_calls(lab) == [
        [
            *("-m", "mlx_lm", "server", "--model", model, "--host", "127.0.0.1", "--port", lab.environment["PORT"]),
            *("--prompt-cache-size", "10", "--decode-concurrency", "32", "--prompt-concurrency", "8"),
        ]
    ]
    assert result.returncode == 7
    shown, _ = result.stdout.split("the server speaks")
    assert "mlx-lm 0.32.2 mlx 0.32.4" in shown
    assert "absolute path" in shown and model in shown
    assert (lab.work / "mlx-server.log").read_text(encoding="utf-8") == "the server speaks\n"
    assert (lab.work / "mlx-server.pid").read_text(encoding="utf-8").strip().isdigit()


def test_mlx_every_setting_arrives_and_the_model_becomes_absolute(lab: Lab) -> None:
    (lab.work / "a model").mkdir()
    (lab.work / "a model" / "config.json").write_text("{}", encoding="utf-8")
    lab.run(
        "serve-mlx.sh",
        *("--", "--log-level", "DEBUG"),
        MODEL="a model",
        PROMPT_CACHE_SIZE="20",
        DECODE_CONCURRENCY="4",
        PROMPT_CONCURRENCY="2",
    )
    (call,) = mlx_calls(lab)
    assert call[call.index("--model") + 1] == str(lab.work / "a model")
    assert call[call.index("--prompt-cache-size") :] == [
        *(
            "--prompt-cache-size",
            "20",
            "--decode-concurrency",
            "4",
            "--prompt-concurrency",
            "2",
            "--log-level",
            "DEBUG",
        ),
    ]


@pytest.mark.parametrize("name", ["PORT", "PROMPT_CACHE_SIZE", "DECODE_CONCURRENCY", "PROMPT_CONCURRENCY", "MODEL"])
def test_mlx_refuses_a_wrong_setting(lab: Lab, name: str) -> None:
    refused(lab.run("serve-mlx.sh", **{name: "nonsense"}), 2, name, "nonsense")
    assert mlx_calls(lab) == []


def test_mlx_refuses_an_environment_without_it(lab: Lab) -> None:
    lab.stand_in(lab.home / "mlx" / ".venv" / "bin" / "python", "sys.exit(1)\n")
    refused(lab.run("serve-mlx.sh"), 2, "mlx-lm", "MLX_VENV")


# ---------------------------------------------------------------------------------------------------------------
# All scripts
# ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", OURS)
@pytest.mark.parametrize("flag", ["--help", "-h"])
def test_help_is_printed_and_nothing_is_done(lab: Lab, name: str, flag: str) -> None:
    result = lab.run(name, flag)
    assert result.returncode == 0 and result.stderr == ""
    assert result.stdout.startswith(f"{name} - ")
    assert list(lab.work.iterdir()) == []
    assert lab.record.exists() is False


@pytest.mark.parametrize("name", LAUNCHERS)
def test_launchers_say_where_the_engines_help_is(lab: Lab, name: str) -> None:
    shown = lab.run(name, "--help").stdout
    assert re.search(r"All of its flags: .*--help", shown)
    assert "Flags after -- go to" in shown


@pytest.mark.parametrize("path", [path for path in SCRIPTS if path.name in OURS or path.name == "run.sh"], ids=str)
def test_every_setting_is_documented(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    header = text.split("\nset -euo pipefail", 1)[0]
    read = set(re.findall(r'\b([A-Z][A-Z_]+)="\$\{\1:-', text))
    assert {name for name in read if not re.search(rf"\b{name}\b", header)} == set()


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
    if path.name != "lib.sh":  # it is sourced
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
        bash_connects() {{ echo "bash: /dev/tcp/$1/$2: No such file or directory"; return 1; }}
        PYTHON='{path or sys.executable}'
        port_answers 127.0.0.1 "$1" && echo open || echo closed
    """
    with socket.create_server(("127.0.0.1", 0)) as server:
        for port, state in ((server.getsockname()[1], "open"), (free_port, "closed")):
            done = subprocess.run(
                [BASH, "-c", script, "test", str(port)], capture_output=True, encoding="utf-8", timeout=60
            )
            assert (done.stdout, done.stderr) == (f"{state}\n", "")
