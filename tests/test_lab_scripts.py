"""lab-env.sh, preflight.sh and cleanup.sh: what they write, what they look at, what they leave alone."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from lab_stand_ins import BASH, MLX_PYTHON, Lab


@pytest.fixture
def lab(root: Path, tmp_path: Path) -> Lab:
    return Lab(root, tmp_path)


def values(lab: Lab) -> dict[str, str]:
    """What lab.env exports, as a shell that reads it sees it."""
    names = "TRACK MEMORY_GB HOST_DESC GGUF LLAMA_BIN LLAMA_VERSION SLOTS KV_TYPE ALT_KV_TYPE VLLM_IMAGE VLLM_MODEL "
    names += "VLLM_QUANT VLLM_KV_DTYPE VLLM_KV_BYTES VLLM_VENV MEM_FRACTION_A MEM_FRACTION_B MLX_MODEL"
    show = 'set -eu; . ./lab.env; for n in $1; do printf "%s=%s\\n" "$n" "$(printenv "$n" || echo UNSET)"; done'
    shown = subprocess.run(
        [BASH, "-c", show, "bash", names],
        cwd=lab.work,
        env={name: value for name, value in lab.environment.items() if name != "LLAMA_BIN"},
        capture_output=True,
        encoding="utf-8",
        check=True,
    ).stdout
    return {name: value for name, _, value in (line.partition("=") for line in shown.splitlines()) if value != "UNSET"}


# ---------------------------------------------------------------------------------------------------------------
# lab-env.sh
# ---------------------------------------------------------------------------------------------------------------

F16 = {"SLOTS": "20", "KV_TYPE": "f16", "ALT_KV_TYPE": "q8_0"}
EIGHT_BIT_20 = {"SLOTS": "20", "KV_TYPE": "q8_0", "ALT_KV_TYPE": "q4_0"}
EIGHT_BIT_10 = {"SLOTS": "10", "KV_TYPE": "q8_0", "ALT_KV_TYPE": "q4_0"}
POOL = {"VLLM_KV_DTYPE": "auto", "VLLM_KV_BYTES": "12079595520"}
FP8 = {"VLLM_KV_DTYPE": "fp8", "VLLM_KV_BYTES": "6039797760"}


def fractions(a: str, b: str) -> dict[str, str]:
    return {"MEM_FRACTION_A": a, "MEM_FRACTION_B": b}


@pytest.mark.parametrize(
    ("track", "memory", "expected"),
    [
        ("S", "128", {**F16, **POOL, **fractions("0.30", "0.40"), "VLLM_MODEL": "/models/Qwen/Qwen3-8B-AWQ"}),
        ("X", "128", {**F16, **POOL, **fractions("0.40", "0.50"), "VLLM_QUANT": "bf16"}),
        ("X", "64", {**F16, **POOL, **fractions("0.40", "0.50")}),
        ("M", "64", F16),
        ("M", "32", F16),
        ("M", "24", EIGHT_BIT_10),
        ("M", "16", EIGHT_BIT_10),
        ("N", "32", {**F16, **POOL, **fractions("0.90", "0.80"), "VLLM_QUANT": "AWQ"}),
        ("N", "24", {**F16, **POOL, **fractions("0.90", "0.80")}),
        ("N", "16", {**EIGHT_BIT_20, **FP8, **fractions("0.90", "0.85")}),
    ],
)
def test_tiers(lab: Lab, track: str, memory: str, expected: dict[str, str]) -> None:
    result = lab.run("lab-env.sh", track, memory)
    assert result.returncode == 0, result.stderr
    found = values(lab)
    assert {name: found.get(name) for name in expected} == expected
    assert found["TRACK"] == track and found["MEMORY_GB"] == memory and memory in found["HOST_DESC"]
    assert found["GGUF"] == f"{lab.home}/models/unsloth/Qwen3-8B-GGUF/Qwen3-8B-Q4_K_M.gguf"


def test_each_track_has_its_own_second_engine(lab: Lab) -> None:
    seen = {}
    for track in "SXMN":
        lab.run("lab-env.sh", track, "64")
        seen[track] = values(lab)
    assert seen["S"]["VLLM_IMAGE"] == "nvcr.io/nvidia/vllm:26.08-py3"
    assert [seen[track]["VLLM_IMAGE"] for track in "XN"] == ["", ""], "vLLM runs natively"
    assert seen["X"]["VLLM_MODEL"] == f"{lab.home}/models/Qwen/Qwen3-8B"
    assert seen["N"]["VLLM_MODEL"] == f"{lab.home}/models/Qwen/Qwen3-8B-AWQ"
    assert seen["N"]["VLLM_VENV"] == f"{lab.home}/vllm/.venv"
    assert seen["M"]["MLX_MODEL"] == f"{lab.home}/models/mlx-community/Qwen3-8B-4bit"
    assert not [name for name in seen["M"] if name.startswith(("VLLM", "MEM_FRACTION"))]
    assert "MLX_MODEL" not in seen["S"]


def test_each_setting_has_its_reason(lab: Lab) -> None:
    lab.run("lab-env.sh", "N", "16")
    settings = [line for line in (lab.work / "lab.env").read_text("utf-8").splitlines() if line.startswith("export")]
    assert len(settings) > 15
    assert [line for line in settings if len(line.partition("  # ")[2]) < 10] == []


def test_pools_hold_equally_many_tokens(lab: Lab) -> None:
    for memory, bytes_per_token in (("24", 147456), ("16", 73728)):
        lab.run("lab-env.sh", "N", memory)
        assert int(values(lab)["VLLM_KV_BYTES"]) == 20 * 4096 * bytes_per_token


def test_memory_is_read_from_the_gpu(lab: Lab) -> None:
    lab.run("lab-env.sh", "N", GPU_MIB="16376")
    assert values(lab)["MEMORY_GB"] == "16" and "NVIDIA Test GPU" in values(lab)["HOST_DESC"]
    lab.run("lab-env.sh", "N", GPU_MIB="24564")
    assert values(lab)["MEMORY_GB"] == "24"


def test_version_of_llama_server_is_noted(lab: Lab) -> None:
    lab.run("lab-env.sh", "n", LLAMA_BIN=str(lab.bin))
    assert values(lab)["LLAMA_VERSION"] == "11434 (abcdef)" and values(lab)["LLAMA_BIN"] == str(lab.bin)


@pytest.mark.parametrize("name", ["a $HOME `b` \"c\" 'd'", "ümläut folder", "back\\slash"])
def test_odd_paths_survive(lab: Lab, name: str) -> None:
    lab.run("lab-env.sh", "S", GGUF=f"{lab.home}/{name}/model.gguf", LLAMA_BIN=f"/opt/{name}")
    assert values(lab)["GGUF"] == f"{lab.home}/{name}/model.gguf"
    assert values(lab)["LLAMA_BIN"] == f"/opt/{name}"


def test_running_again_updates_an_unedited_file(lab: Lab) -> None:
    lab.run("lab-env.sh", "N", "24")
    assert lab.run("lab-env.sh", "N", "24").returncode == 0
    assert lab.run("lab-env.sh", "N", "16").returncode == 0
    assert values(lab)["KV_TYPE"] == "q8_0"


@pytest.mark.parametrize("edit", ["change", "append", "drop the last line", "own file"])
def test_an_edited_file_is_never_overwritten(lab: Lab, edit: str) -> None:
    lab.run("lab-env.sh", "S")
    path = lab.work / "lab.env"
    text = path.read_text("utf-8")
    edited = {
        "change": text.replace("MEM_FRACTION_A=0.30", "MEM_FRACTION_A=0.35"),
        "append": text + "export MINE=1\n",
        "drop the last line": "".join(text.splitlines(keepends=True)[:-1]),
        "own file": "export SLOTS=4\n",
    }[edit]
    path.write_text(edited, "utf-8")
    result = lab.run("lab-env.sh", "S")
    assert result.returncode == 1
    assert path.read_text("utf-8") == edited
    assert "was edited and is kept" in result.stderr
    if edit == "change":
        assert "< export MEM_FRACTION_A=0.35" in result.stdout and "> export MEM_FRACTION_A=0.30" in result.stdout


@pytest.mark.parametrize(
    ("args", "word"),
    [
        ((), "track"),
        (("Z",), "'Z'"),
        (("S", "128", "x"), "one track"),
        (("N", "12"), "12 GB"),
        (("M", "8"), "8 GB"),
        (("N", "24GB"), "24GB"),
        (("N", "-16"), "-16"),
        (("N", "16.5"), "16.5"),
    ],
)
def test_wrong_track_or_memory(lab: Lab, args: tuple[str, ...], word: str) -> None:
    result = lab.run("lab-env.sh", *args)
    assert result.returncode == 2 and word in result.stderr and len(result.stderr.splitlines()) == 1
    assert not (lab.work / "lab.env").exists()


def test_without_a_gpu_the_memory_must_be_given(lab: Lab) -> None:
    (lab.bin / "nvidia-smi").unlink()
    result = lab.run("lab-env.sh", "N", PATH=f"{lab.bin}:/usr/bin:/bin")
    assert result.returncode == 2 and "nvidia-smi" in result.stderr


# ---------------------------------------------------------------------------------------------------------------
# preflight.sh
# ---------------------------------------------------------------------------------------------------------------

GGUF_BYTES = 5_027_784_512


def three_free_ports() -> dict[str, str]:
    sockets = [socket.socket() for _ in range(3)]
    for each in sockets:
        each.bind(("127.0.0.1", 0))
    ports = [str(each.getsockname()[1]) for each in sockets]
    for each in sockets:
        each.close()
    return dict(zip(("LLAMA_PORT", "VLLM_PORT", "MLX_PORT"), ports))


@pytest.fixture
def ready(lab: Lab) -> Lab:
    """A track N machine with everything in place; the models are sparse files of the right size."""
    lab.environment.update(three_free_ports())
    gguf = lab.home / "models" / "unsloth" / "Qwen3-8B-GGUF" / "Qwen3-8B-Q4_K_M.gguf"
    gguf.parent.mkdir(parents=True)
    write_gguf(gguf, GGUF_BYTES)
    lab.model("Qwen/Qwen3-8B-AWQ", weights=6_114_568_233)
    lab.environment["LLAMA_BIN"] = str(lab.bin)
    answer_memory(lab, needed=15.93, fits=True)
    assert lab.run("lab-env.sh", "N", "24").returncode == 0
    return lab


def write_gguf(path: Path, size: int, magic: bytes = b"GGUF") -> None:
    with path.open("wb") as stream:
        stream.write(magic)
        stream.truncate(size)


def answer_memory(lab: Lab, needed: float, fits: bool) -> None:
    answer = lab.record.parent / "memory.json"
    answer.write_text(f'{{"memory": [{{"needed_gib": {needed}, "fits": {str(fits).lower()}}}]}}', "utf-8")
    lab.environment["ANSWERS"] = f"--memory=>0,{answer}"


def test_preflight_passes_where_everything_is_there(ready: Lab) -> None:
    result = ready.run("preflight.sh")
    assert result.returncode == 0, result.stdout + result.stderr
    assert "FAIL" not in result.stdout and "note" not in result.stdout
    for shown in ("5,027,784,512 bytes", "CUDA0: NVIDIA Test", "15.93 GiB of weights and pool, 23.44 GiB free"):
        assert shown in result.stdout
    llama, vllm = ready.calls("serving_arithmetic.py")
    assert llama[llama.index("--kv-type") + 1] == "f16" and llama[llama.index("--slots") + 1] == "20"
    assert vllm[vllm.index("--config") + 1].endswith("Qwen3-8B-AWQ/config.json")
    assert ready.calls("vllm") == [], "nothing is started"


@pytest.mark.parametrize(
    ("fault", "name", "advice"),
    [
        ("truncated gguf", "GGUF", "not complete"),
        ("no gguf", "GGUF", "download"),
        ("pointer", "GGUF", "pointer"),
        ("truncated checkpoint", "vLLM model", "not complete"),
        ("no config", "vLLM model", "not complete"),
        ("cpu build", "GPU", "build it with CUDA"),
        ("no llama-server", "llama-server", "build llama.cpp"),
        ("busy port", "port", "one server at a time"),
        ("no memory", "memory", "eight-bit tier"),
        ("no vllm", "vLLM", "VLLM_VENV"),
    ],
)
def test_preflight_names_what_is_wrong(ready: Lab, fault: str, name: str, advice: str) -> None:
    gguf = ready.home / "models" / "unsloth" / "Qwen3-8B-GGUF" / "Qwen3-8B-Q4_K_M.gguf"
    checkpoint = ready.home / "models" / "Qwen" / "Qwen3-8B-AWQ"
    settings = {}
    with socket.socket() as busy:
        if fault == "truncated gguf":
            write_gguf(gguf, GGUF_BYTES - 1)
        elif fault == "no gguf":
            gguf.unlink()
        elif fault == "pointer":
            write_gguf(gguf, GGUF_BYTES, b"vers")
        elif fault == "truncated checkpoint":
            os.truncate(checkpoint / "weights", 5_000_000_000)
        elif fault == "no config":
            (checkpoint / "config.json").unlink()
        elif fault == "cpu build":
            settings["DEVICE"] = "(none)"
        elif fault == "no llama-server":
            (ready.bin / "llama-server").unlink()
        elif fault == "busy port":
            busy.bind(("127.0.0.1", int(ready.environment["VLLM_PORT"])))
            busy.listen()
        elif fault == "no memory":
            answer_memory(ready, needed=30.0, fits=False)
        elif fault == "no vllm":
            (ready.bin / "vllm").unlink()
            settings["PATH"] = f"{ready.bin}:/usr/bin:/bin"
        result = ready.run("preflight.sh", **settings)
    assert result.returncode == 1, result.stdout
    failed = [line for line in result.stdout.splitlines() if line.startswith("  FAIL")]
    assert failed and name in failed[0]
    assert f"NOT AS PREDICTED: {name}" in result.stderr and advice in result.stderr


def test_preflight_shows_all_faults_at_once(ready: Lab) -> None:
    (ready.home / "models" / "Qwen" / "Qwen3-8B-AWQ" / "config.json").unlink()
    result = ready.run("preflight.sh", DEVICE="(none)")
    lines = result.stdout.splitlines()
    faults = [number for number, line in enumerate(lines) if line.startswith("  FAIL")]
    assert len(faults) == 2
    assert all(lines[number + 1].strip().startswith("what to do: ") for number in faults), "each its own remedy"
    assert ready.run("preflight.sh", DEVICE="(none)", KEEP_GOING="1").returncode == 0


def test_preflight_counts_what_is_still_to_be_downloaded(ready: Lab) -> None:
    (ready.home / "models" / "Qwen" / "Qwen3-8B-AWQ" / "config.json").unlink()
    (ready.bin / "df").write_text("#!/bin/sh\nprintf 'head\\nd 9 9 3000000 9%% /\\n'\n", "utf-8")
    (ready.bin / "df").chmod(0o755)
    assert "  ok    disk" in ready.run("preflight.sh").stdout, "a GiB is enough when the models are here"
    (ready.home / "models" / "unsloth" / "Qwen3-8B-GGUF" / "Qwen3-8B-Q4_K_M.gguf").unlink()
    assert "  FAIL  disk             2 GiB free" in ready.run("preflight.sh").stdout


def test_preflight_of_the_container_track(ready: Lab) -> None:
    ready.run("lab-env.sh", "S")
    shown = ready.run("preflight.sh").stdout
    assert "ok    container        image nvcr.io/nvidia/vllm:26.08-py3" in shown
    assert str(ready.home / "models" / "Qwen" / "Qwen3-8B-AWQ") in shown
    result = ready.run("preflight.sh", NO_IMAGE="1")
    assert result.returncode == 1 and "docker pull" in result.stderr


def test_preflight_of_the_mac_track(ready: Lab) -> None:
    ready.run("lab-env.sh", "M", "32")
    ready.stand_in(ready.home / "mlx" / ".venv" / "bin" / "python", MLX_PYTHON)
    result = ready.run("preflight.sh")
    assert result.returncode == 1 and "MLX model" in result.stderr
    ready.model("mlx-community/Qwen3-8B-4bit", weights=4_610_000_000)
    result = ready.run("preflight.sh")
    assert result.returncode == 0, result.stdout
    assert "version 0.32.2" in result.stdout


def test_preflight_of_track_x_only_notes_a_missing_second_engine(ready: Lab) -> None:
    ready.run("lab-env.sh", "X", "64")
    (ready.bin / "vllm").unlink()
    result = ready.run("preflight.sh", PATH=f"{ready.bin}:/usr/bin:/bin")
    assert result.returncode == 0, result.stdout
    assert "note  vLLM" in result.stdout and "say so in the notebook" in result.stdout


def test_preflight_needs_lab_env(lab: Lab) -> None:
    result = lab.run("preflight.sh")
    assert result.returncode == 2 and "lab-env.sh" in result.stderr


# ---------------------------------------------------------------------------------------------------------------
# cleanup.sh
# ---------------------------------------------------------------------------------------------------------------


@pytest.fixture
def done(lab: Lab) -> Lab:
    lab.environment.update(three_free_ports())
    lab.write_env(HOST_DESC="a machine", MLX_MODEL="/the/mlx model")
    (lab.work / "labbook.md").write_text("notes\n", "utf-8")
    (lab.work / "llama-server.log").write_text("log\n", "utf-8")
    return lab


def start(lab: Lab, name: str, port: str) -> subprocess.Popen[str]:
    """A process that has this word in its command line and listens; its id goes to `name`.pid."""
    code = (
        "import signal, socket, sys; s = socket.socket(); s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1); "
        "s.bind(('127.0.0.1', int(sys.argv[2]))); s.listen(); print('up', flush=True); signal.pause()"
    )
    process = subprocess.Popen([sys.executable, "-c", code, name, port], stdout=subprocess.PIPE, encoding="utf-8")
    assert process.stdout is not None
    process.stdout.readline()
    return process


def end(process: subprocess.Popen[str]) -> None:
    if process.poll() is None:
        process.kill()
    process.communicate()


def test_cleanup_asks_checks_stops_and_keeps_what_was_measured(done: Lab) -> None:
    process = start(done, "llama-server", done.environment["LLAMA_PORT"])
    try:
        # Its parent, this test, must collect it before cleanup.sh sees it gone: ps shows a zombie otherwise.
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)
        (done.work / "llama-server.pid").write_text(f"{process.pid}\n", "utf-8")
        result = done.run("cleanup.sh")
    finally:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        end(process)
    assert result.returncode == 0, result.stdout + result.stderr
    (probe,) = done.calls("load_test.py")
    url = f"http://127.0.0.1:{done.environment['LLAMA_PORT']}/v1"
    assert probe == ["--base-url", url, "--model", "local-chat", "--probe"]
    assert done.calls("summarise_load.py") == [["--labbook", "labbook.md", "--check"]]
    assert f"stopping process {process.pid}" in result.stdout
    assert sorted(path.name for path in done.work.iterdir()) == ["lab.env", "labbook.md", "llama-server.log"]
    assert done.run("cleanup.sh").returncode == 0, "running it again is harmless"


def test_cleanup_never_stops_a_process_that_is_something_else(done: Lab) -> None:
    process = start(done, "innocent", "0")
    try:
        (done.work / "vllm-server.pid").write_text(f"{process.pid}\n", "utf-8")
        result = done.run("cleanup.sh")
        assert process.poll() is None, "it must still run"
    finally:
        end(process)
    assert "something else by now: left alone" in result.stdout


@pytest.mark.parametrize("content", ["", "not a number", "999999999"])
def test_cleanup_takes_odd_pid_files(done: Lab, content: str) -> None:
    (done.work / "mlx-server.pid").write_text(content, "utf-8")
    assert done.run("cleanup.sh").returncode == 0


def test_cleanup_says_which_port_still_answers(done: Lab) -> None:
    with socket.socket() as busy:
        busy.bind(("127.0.0.1", int(done.environment["MLX_PORT"])))
        busy.listen()
        result = done.run("cleanup.sh")
    assert result.returncode == 1
    assert f"port {done.environment['MLX_PORT']} still answers" in result.stderr
    assert "/the/mlx model" in done.calls("load_test.py")[0]


def test_cleanup_passes_on_what_the_check_says(done: Lab) -> None:
    done.environment["ANSWERS"] = "--check=>1,"
    result = done.run("cleanup.sh")
    assert result.returncode == 1 and "FAIL" in result.stderr
    assert "is free" in result.stdout, "the servers are stopped all the same"


def test_cleanup_can_leave_the_servers_running(done: Lab) -> None:
    process = start(done, "llama-server", done.environment["LLAMA_PORT"])
    try:
        (done.work / "llama-server.pid").write_text(f"{process.pid}\n", "utf-8")
        assert done.run("cleanup.sh", "--keep-running").returncode == 0
        assert process.poll() is None
    finally:
        end(process)


def test_cleanup_stops_the_container(done: Lab) -> None:
    done.write_env(HOST_DESC="a machine", VLLM_IMAGE="an/image:1")
    assert done.run("cleanup.sh", CONTAINER_EXISTS="1").returncode == 0
    assert ["stop", "vllm-lab"] in done.calls("docker")
