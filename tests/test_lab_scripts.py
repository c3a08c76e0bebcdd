"""lab-env.sh, fetch-models.sh, preflight.sh and cleanup.sh: what they write, fetch, look at and leave alone."""

from __future__ import annotations

import json
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
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

POOL = "VLLM_KV_DTYPE=auto VLLM_KV_BYTES=12079595520 "
AWQ = "VLLM_QUANT=AWQ VLLM_MODEL=HOME/models/Qwen/Qwen3-8B-AWQ VLLM_IMAGE= "
BF16 = "VLLM_QUANT=bf16 VLLM_MODEL=HOME/models/Qwen/Qwen3-8B VLLM_IMAGE= MEM_FRACTION_A=0.40 MEM_FRACTION_B=0.50 "
MLX = "MLX_MODEL=HOME/models/mlx-community/Qwen3-8B-4bit "
F16 = "SLOTS=20 KV_TYPE=f16 ALT_KV_TYPE=q8_0 "
TIERS = [
    (
        "S",
        128,
        F16 + POOL + "MEM_FRACTION_A=0.30 MEM_FRACTION_B=0.40 VLLM_QUANT=AWQ VLLM_MODEL=/models/Qwen/Qwen3-8B-AWQ "
        "VLLM_IMAGE=nvcr.io/nvidia/vllm:26.08-py3",
    ),
    *(("X", memory, F16 + POOL + BF16) for memory in (64, 128)),
    *(("M", memory, F16 + MLX) for memory in (32, 64)),
    *(("M", memory, "SLOTS=10 KV_TYPE=q8_0 ALT_KV_TYPE=q4_0 " + MLX) for memory in (16, 24)),
    *(("N", memory, F16 + POOL + AWQ + "MEM_FRACTION_A=0.90 MEM_FRACTION_B=0.80") for memory in (24, 32)),
    (
        "N",
        16,
        "SLOTS=20 KV_TYPE=q8_0 ALT_KV_TYPE=q4_0 VLLM_KV_DTYPE=fp8 VLLM_KV_BYTES=6039797760 "
        + AWQ
        + "MEM_FRACTION_A=0.90 MEM_FRACTION_B=0.85",
    ),
]


@pytest.mark.parametrize(("track", "memory", "expected"), TIERS)
def test_each_tier_has_its_settings_each_with_a_reason(lab: Lab, track: str, memory: int, expected: str) -> None:
    result = lab.run("lab-env.sh", track, str(memory))
    assert result.returncode == 0, result.stderr
    found = values(lab)
    wanted = dict(word.split("=", 1) for word in expected.replace("HOME", str(lab.home).replace(" ", "%")).split())
    assert {name: found.get(name) for name in wanted} == {
        name: value.replace("%", " ") for name, value in wanted.items()
    }
    assert found["TRACK"] == track and found["MEMORY_GB"] == str(memory) and str(memory) in found["HOST_DESC"]
    assert found["GGUF"] == f"{lab.home}/models/unsloth/Qwen3-8B-GGUF/Qwen3-8B-Q4_K_M.gguf"
    assert ("MLX_MODEL" in found) is (track == "M") and ("VLLM_MODEL" in found) is (track != "M")
    settings = [line for line in (lab.work / "lab.env").read_text("utf-8").splitlines() if line.startswith("export")]
    assert [line for line in settings if len(line.partition("  # ")[2]) < 10] == []


def test_memory_and_versions_are_read_from_the_machine(lab: Lab) -> None:
    for mib, gib in (("16376", "16"), ("24564", "24")):
        lab.run("lab-env.sh", "n", GPU_MIB=mib, LLAMA_BIN=str(lab.bin))
        assert values(lab)["MEMORY_GB"] == gib and "NVIDIA Test GPU" in values(lab)["HOST_DESC"]
    assert values(lab)["LLAMA_VERSION"] == "11434 (abcdef)" and values(lab)["LLAMA_BIN"] == str(lab.bin)


@pytest.mark.parametrize("name", ["a $HOME `b` \"c\" 'd'", "ümläut folder", "back\\slash"])
def test_odd_paths_survive(lab: Lab, name: str) -> None:
    lab.run("lab-env.sh", "S", GGUF=f"{lab.home}/{name}/model.gguf", LLAMA_BIN=f"/opt/{name}")
    assert values(lab)["GGUF"] == f"{lab.home}/{name}/model.gguf"
    assert values(lab)["LLAMA_BIN"] == f"/opt/{name}"


def test_running_again_updates_an_unedited_file(lab: Lab) -> None:
    for memory, kv_type in (("24", "f16"), ("24", "f16"), ("16", "q8_0")):
        assert lab.run("lab-env.sh", "N", memory).returncode == 0
        assert values(lab)["KV_TYPE"] == kv_type


@pytest.mark.parametrize(
    "edit",
    [
        lambda text: text.replace("MEM_FRACTION_A=0.30", "MEM_FRACTION_A=0.35"),
        lambda text: text + "export MINE=1\n",
        lambda text: "".join(text.splitlines(keepends=True)[:-1]),
        lambda text: "export SLOTS=4\n",
    ],
    ids=["changed", "appended to", "cut short", "somebody's own"],
)
def test_an_edited_file_is_never_overwritten(lab: Lab, edit: Callable[[str], str]) -> None:
    lab.run("lab-env.sh", "S")
    path = lab.work / "lab.env"
    path.write_text(edited := edit(path.read_text("utf-8")), "utf-8")
    result = lab.run("lab-env.sh", "S")
    assert result.returncode == 1 and path.read_text("utf-8") == edited
    assert "was edited and is kept" in result.stderr
    assert [line for line in result.stdout.splitlines() if line[:2] in ("< ", "> ")], "the difference is shown"


@pytest.mark.parametrize(
    ("args", "word"),
    [
        *(((), "track"), (("Z",), "'Z'"), (("S", "128", "x"), "one track")),
        *((("N", memory), memory) for memory in ("12", "24GB", "-16", "16.5")),
        (("M", "8"), "8 GB"),
        (("N",), "nvidia-smi"),  # which is not there
    ],
)
def test_wrong_track_or_memory(lab: Lab, args: tuple[str, ...], word: str) -> None:
    (lab.bin / "nvidia-smi").unlink()
    result = lab.run("lab-env.sh", *args, PATH=f"{lab.bin}:/usr/bin:/bin")
    assert result.returncode == 2 and word in result.stderr and len(result.stderr.splitlines()) == 1
    assert not (lab.work / "lab.env").exists()


# ---------------------------------------------------------------------------------------------------------------
# fetch-models.sh
# ---------------------------------------------------------------------------------------------------------------

GGUF_BYTES, AWQ_BYTES, BF16_BYTES, MLX_BYTES = 5_027_784_512, 6_114_568_235, 16_397_461_266, 4_600_000_000
FETCHED = {
    "gguf": "download unsloth/Qwen3-8B-GGUF Qwen3-8B-Q4_K_M.gguf --local-dir HOME/models/unsloth/Qwen3-8B-GGUF",
    "S": "download Qwen/Qwen3-8B-AWQ --local-dir HOME/models/Qwen/Qwen3-8B-AWQ",
    "N": "download Qwen/Qwen3-8B-AWQ --local-dir HOME/models/Qwen/Qwen3-8B-AWQ",
    "X": "download Qwen/Qwen3-8B --local-dir HOME/models/Qwen/Qwen3-8B",
    "M": "download mlx-community/Qwen3-8B-4bit --local-dir HOME/models/mlx-community/Qwen3-8B-4bit",
}


def disk(lab: Lab, kib: int) -> None:
    """A df that says that so much is free."""
    (lab.bin / "df").write_text(f"#!/bin/sh\nprintf 'head\\nd 9 9 {kib} 9%% /\\n'\n", "utf-8")
    (lab.bin / "df").chmod(0o755)


def test_each_track_fetches_its_models_once(lab: Lab) -> None:
    disk(lab, 10**9)
    for track, size in (("S", AWQ_BYTES), ("X", BF16_BYTES), ("M", MLX_BYTES), ("N", AWQ_BYTES)):
        shutil.rmtree(lab.home / "models", ignore_errors=True)
        lab.record.unlink(missing_ok=True)
        lab.run("lab-env.sh", track, "64")
        for part, number in (("gguf", GGUF_BYTES), ("second", size)):
            result = lab.run("fetch-models.sh", part, BYTES=str(number), NO_IMAGE="1")
            assert result.returncode == 0, result.stdout + result.stderr
        wanted = [
            line.replace("HOME", str(lab.home).replace(" ", "%")).split() for line in (FETCHED["gguf"], FETCHED[track])
        ]
        assert lab.calls("hf") == [[word.replace("%", " ") for word in line] for line in wanted]
        assert (["pull", "nvcr.io/nvidia/vllm:26.08-py3"] in lab.calls("docker")) is (track == "S")
        again = lab.run("fetch-models.sh", HF="no-hf-needed")
        assert again.returncode == 0 and again.stdout.count("here already: '") == 2, "what is there is left alone"
        assert "preflight.sh" in again.stdout


@pytest.mark.parametrize(
    ("settings", "status", "words"),
    [
        ({"HF": "no-hf"}, 2, ("cannot find 'no-hf'", "pip install huggingface_hub")),
        ({"BYTES": str(GGUF_BYTES - 1)}, 1, ("5,027,784,511 bytes", "expected 5,027,784,512", "run this again")),
        ({"HF_BREAKS": "1"}, 1, ("broke off", "run this again")),
        ({"GGUF": "/elsewhere/own.gguf"}, 2, ("not one of the lab's own models",)),
        ({"FREE": "5000000"}, 1, ("4 GiB free", "5 GiB needed")),
    ],
    ids=str,
)
def test_a_fetch_that_cannot_be_whole_is_said(
    lab: Lab, settings: dict[str, str], status: int, words: tuple[str, ...]
) -> None:
    disk(lab, int(settings.get("FREE", 10**9)))
    lab.run("lab-env.sh", "N", "24", **{name: value for name, value in settings.items() if name == "GGUF"})
    result = lab.run("fetch-models.sh", "gguf", **{"BYTES": str(GGUF_BYTES), **settings})
    assert result.returncode == status, result.stdout + result.stderr
    assert [word for word in words if word not in result.stderr] == []
    if settings.keys() & {"HF", "GGUF", "FREE"}:
        assert lab.calls("hf") == [], "refused before the first byte"


# ---------------------------------------------------------------------------------------------------------------
# preflight.sh
# ---------------------------------------------------------------------------------------------------------------


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
    lab.gguf(GGUF_BYTES)
    lab.model("Qwen/Qwen3-8B-AWQ", weights=AWQ_BYTES - 2)
    lab.environment["LLAMA_BIN"] = str(lab.bin)
    answer_memory(lab, needed=15.93, fits=True)
    disk(lab, 10**9)
    assert lab.run("lab-env.sh", "N", "24").returncode == 0
    return lab


def answer_memory(lab: Lab, needed: float, fits: bool | None, weights: bool = True) -> None:
    """What serving_arithmetic.py's stand-in says of memory."""
    answer = lab.record.parent / "memory.json"
    memory = {"needed_gib": needed, "fits": fits, "weights_counted": weights}
    answer.write_text(json.dumps({"memory": [memory]}), "utf-8")
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


def break_gguf(lab: Lab) -> None:
    lab.gguf(GGUF_BYTES).unlink()


def fill_the_disk(lab: Lab) -> None:
    break_gguf(lab)
    disk(lab, 3 * 10**6)


def without(*names: str) -> Callable[[Lab], None]:
    def remove(lab: Lab) -> None:
        for name in names:
            (lab.bin / name).unlink()
        lab.environment["PATH"] = f"{lab.bin}:/usr/bin:/bin"

    return remove


@pytest.mark.parametrize(
    ("fault", "name", "advice"),
    [
        (lambda lab: lab.gguf(GGUF_BYTES - 1), "GGUF", "fetch-models.sh"),
        (break_gguf, "GGUF", "fetch-models.sh"),
        (lambda lab: lab.gguf(GGUF_BYTES, b"vers"), "GGUF", "fetch-models.sh"),
        (lambda lab: lab.model("Qwen/Qwen3-8B-AWQ", weights=5 * 10**9), "vLLM model", "fetch-models.sh"),
        (lambda lab: (lab.model("Qwen/Qwen3-8B-AWQ") / "config.json").unlink(), "vLLM model", "fetch-models.sh"),
        (lambda lab: lab.environment.update(DEVICE="(none)"), "GPU", "build it with CUDA"),
        (without("llama-server"), "llama-server", "build llama.cpp"),
        (without("vllm"), "vLLM", "VLLM_VENV"),
        (lambda lab: answer_memory(lab, 30.0, False), "memory", "eight-bit tier"),
        (lambda lab: answer_memory(lab, 30.0, False, False), "memory", "eight-bit tier"),
        (fill_the_disk, "disk", "free some"),
    ],
)
def test_preflight_names_what_is_wrong(ready: Lab, fault: Callable[[Lab], object], name: str, advice: str) -> None:
    fault(ready)
    result = ready.run("preflight.sh")
    assert result.returncode == 1, result.stdout
    lines = result.stdout.splitlines()
    failed = [number for number, line in enumerate(lines) if line.startswith(f"  FAIL  {name}")]
    assert failed and advice in lines[failed[0] + 1], "its remedy stands below it"
    assert "NOT AS PREDICTED: " in result.stderr


def test_preflight_shows_all_faults_at_once(ready: Lab) -> None:
    (ready.home / "models" / "Qwen" / "Qwen3-8B-AWQ" / "config.json").unlink()
    with socket.create_server(("127.0.0.1", int(ready.environment["VLLM_PORT"]))):
        result = ready.run("preflight.sh", DEVICE="(none)")
    lines = result.stdout.splitlines()
    faults = [number for number, line in enumerate(lines) if line.startswith("  FAIL")]
    assert len(faults) == 3 and f"port {ready.environment['VLLM_PORT']}" in result.stdout
    assert all(lines[number + 1].strip().startswith("what to do: ") for number in faults), "each its own remedy"
    assert ready.run("preflight.sh", DEVICE="(none)", KEEP_GOING="1").returncode == 0


@pytest.mark.parametrize(
    ("settings", "fits", "shown"),
    [
        ({"GPU_FREE_MIB": "[N/A]"}, True, "note  memory, llama    not known how much is free"),
        ({}, None, "note  memory, llama    not known whether it fits"),
        ({"ANSWERS": "--memory=>2,"}, True, "note  memory, llama    not known whether it fits"),
    ],
)
def test_not_known_is_not_does_not_fit(ready: Lab, settings: dict[str, str], fits: bool | None, shown: str) -> None:
    answer_memory(ready, 15.9, fits)
    result = ready.run("preflight.sh", **settings)
    assert shown in result.stdout and "FAIL" not in result.stdout and result.returncode == 0


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


def test_on_track_x_the_device_line_decides_and_the_second_engine_is_optional(ready: Lab) -> None:
    """The GPU takes only a part of the machine's memory, and vLLM may not run at all."""
    without("vllm")(ready)
    ready.run("lab-env.sh", "X", "64")
    ready.model("Qwen/Qwen3-8B")  # a shape, but no weights
    device = "Vulkan0: AMD Radeon Graphics (RADV GFX1151) (49152 MiB, 40960 MiB free)"
    result = ready.run("preflight.sh", DEVICE=device)
    assert result.returncode == 0, result.stdout
    assert "15.93 GiB of weights and pool, 40.00 GiB free" in result.stdout
    for name in ("vLLM ", "vLLM model"):
        assert f"note  {name}" in result.stdout
    assert result.stdout.count("say so in the notebook") == 2
    answer_memory(ready, 50.0, False)
    result = ready.run("preflight.sh", DEVICE=device)
    assert "FAIL  memory, llama" in result.stdout and "note  memory, vLLM" in result.stdout


def test_preflight_needs_lab_env(lab: Lab) -> None:
    for name in ("preflight.sh", "fetch-models.sh"):
        result = lab.run(name)
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
        result = done.run("cleanup.sh", COLUMNS="20")  # ps cuts its lines there, unless told otherwise
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
    """A foreign server: it gives no answer, it is not ours to stop, and the rest is done all the same."""
    done.environment["ANSWERS"] = "--probe=>1,"
    with socket.create_server(("127.0.0.1", int(done.environment["MLX_PORT"]))):
        result = done.run("cleanup.sh")
    assert result.returncode == 1
    assert f"what answers on port {done.environment['MLX_PORT']} did not answer a fresh request" in result.stderr
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
