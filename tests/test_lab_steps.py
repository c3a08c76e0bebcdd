"""sweep.sh, variants.sh, admission.sh and crosscheck.sh.

Against stand-ins of the three programs: what is asked of them, and what the steps do with each answer. And once
each against the real programs and the simulated engine, which the engines' stand-ins serve.
"""

from __future__ import annotations

import http.server
import json
import os
import re
import signal
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from lab_stand_ins import MLX_PYTHON, Lab


class Engine(http.server.BaseHTTPRequestHandler):
    """A server that is there, and says that it is both engines; on a path below /foreign it is neither."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b'{"version": "0.28.0", "build_info": "b11434"}')

    def log_message(self, *_: object) -> None:
        pass


class Foreign(Engine):
    """Somebody else's server."""

    def do_GET(self) -> None:
        self.send_error(404)


@pytest.fixture
def listening(request: pytest.FixtureRequest) -> Iterator[str]:
    """The port of such a server."""
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), getattr(request, "param", Engine)) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield str(server.server_address[1])
        server.shutdown()
        thread.join()


@pytest.fixture
def lab(root: Path, tmp_path: Path) -> Lab:
    lab = Lab(root, tmp_path)
    gguf = lab.home / "a model-Q4_K_M.gguf"
    gguf.write_bytes(b"GGUF")
    lab.model("mlx-community/Qwen3-8B-4bit")
    lab.model("Qwen/Qwen3-8B-AWQ")
    lab.stand_in(lab.home / "mlx" / ".venv" / "bin" / "python", MLX_PYTHON)
    lab.environment["LLAMA_QUANT"] = "Q4_K_M"
    lab.write_env(
        TRACK="N",
        MEMORY_GB=24,
        HOST_DESC="a machine",
        GGUF=gguf,
        LLAMA_BIN=lab.bin,
        LLAMA_VERSION="11434 (abcdef)",
        SLOTS=20,
        KV_TYPE="f16",
        ALT_KV_TYPE="q8_0",
        VLLM_IMAGE="",
        VLLM_MODEL=lab.home / "models" / "Qwen" / "Qwen3-8B-AWQ",
        VLLM_QUANT="AWQ",
        VLLM_KV_DTYPE="auto",
        VLLM_KV_BYTES=12079595520,
        MEM_FRACTION_A="0.90",
        MEM_FRACTION_B="0.80",
        MLX_MODEL=lab.home / "models" / "mlx-community" / "Qwen3-8B-4bit",
    )
    return lab


def answer(lab: Lab, words: str, status: int = 0, document: object = None) -> None:
    """What the programs' stand-ins say and end with where all these words are among their arguments."""
    path = ""
    if document is not None:
        path = str(lab.record.parent / f"answer-{len(list(lab.record.parent.glob('answer-*')))}.json")
        Path(path).write_text(json.dumps(document) + "\n", "utf-8")
    former = lab.environment.get("ANSWERS", "")
    lab.environment["ANSWERS"] = f"{words}=>{status},{path};{former}"


def option(call: list[str], name: str) -> str | None:
    return call[call.index(name) + 1] if name in call else None


def options(call: list[str], names: str) -> list[str | None]:
    return [option(call, name) for name in names.split()]


def loads(lab: Lab) -> list[list[str]]:
    return [call for call in lab.calls("load_test.py") if "--prompt-set" in call]


def labels(lab: Lab) -> list[str | None]:
    return [option(call, "--label") for call in loads(lab)]


# ---------------------------------------------------------------------------------------------------------------
# sweep.sh: what it measures
# ---------------------------------------------------------------------------------------------------------------

LOAD = "--label --prompt-set --concurrency --requests --min-rounds --max-tokens"
ENGINES = [  # engine, rounds of the prefix pair, what each record says
    ("llama", "0", "llama.cpp|11434 (abcdef)|Q4_K_M|20|1"),
    ("vllm", "4", "vllm|0.28.0|AWQ|20|1"),
    ("mlx", "4", "mlx-lm|0.32.2|MLX 4-bit|32|"),
]


@pytest.mark.parametrize(("engine", "rounds", "facts"), ENGINES)
def test_sweep_asks_for_the_labs_loads(lab: Lab, listening: str, engine: str, rounds: str, facts: str) -> None:
    (lab.work / "labbook.md").write_text("records\n", "utf-8")
    result = lab.run("sweep.sh", engine, PORT=listening)
    assert result.returncode == 0, result.stdout + result.stderr
    model = str(lab.home / "models" / "mlx-community" / "Qwen3-8B-4bit") if engine == "mlx" else "local-chat"
    probe = lab.calls("load_test.py")[0]
    assert "--probe" in probe and option(probe, "--model") == model
    assert [options(load, LOAD) for load in loads(lab)] == [
        [f"{engine}-baseline", "mixed", "1,5,10,20", "40", "4", "128"],
        [f"{engine}-prefix-unique", "unique-prefix", "1,10", "40", rounds, "64"],
        [f"{engine}-prefix-shared", "shared-prefix", "1,10", "40", rounds, "64"],
    ]
    for load in loads(lab):
        names = "--engine --engine-version --quant --server-slots --sample"
        assert [value or "" for value in options(load, names)] == facts.split("|")
        common = [f"http://127.0.0.1:{listening}/v1", "4096", "a machine", "labbook.md", model]
        assert options(load, "--base-url --context-length --host-desc --labbook --model") == common
    summaries = [" ".join(call[2:]) for call in lab.calls("summarise_load.py")]
    for wanted in (
        *(f"--check --label {engine}-{name}" for name in ("baseline", "prefix-unique", "prefix-shared")),
        f"--label {engine}-baseline --record",
        f"--compare {engine}-prefix-unique {engine}-prefix-shared",
        *([f"--compare llama-baseline {engine}-baseline"] if engine != "llama" else []),
    ):
        assert wanted in summaries, wanted
    assert "$ python3 load_test.py --" in result.stdout and "--host-desc 'a machine'" in result.stdout, "can be pasted"


@pytest.mark.parametrize(
    ("args", "measured", "flags"),
    [
        ("llama prefix", ["llama-prefix-unique", "llama-prefix-shared"], []),
        ("llama baseline -- --timeout 900", ["llama-baseline"], ["--timeout", "900"]),
        ("vllm compare", [], []),
        ("llama baseline --find-operating-point", ["llama-baseline"], ["--find-operating-point"]),
        ("mlx prefix --find-operating-point", ["mlx-prefix-unique", "mlx-prefix-shared"], []),
    ],
)
def test_sweep_runs_the_parts_that_are_named(
    lab: Lab, listening: str, args: str, measured: list[str], flags: list[str]
) -> None:
    assert lab.run("sweep.sh", *args.split(), PORT=listening).returncode == 0
    assert labels(lab) == measured
    assert not flags or loads(lab)[-1][-len(flags) :] == flags
    assert flags or all("--find-operating-point" not in load for load in loads(lab))


@pytest.mark.parametrize(
    ("engine", "log", "expected"),
    [
        ("llama", "llama-server.log", "--slots 20 --ctx 4096 --kv-type f16"),
        ("vllm", "vllm-server.log", "--available-kv 11.25 --slots 20 --ctx 4096 --kv-type auto"),
    ],
)
def test_sweep_reads_the_servers_log_first(lab: Lab, listening: str, engine: str, log: str, expected: str) -> None:
    assert f"there is no {log}" in lab.run("sweep.sh", engine, PORT=listening).stdout
    (lab.work / log).write_text("a log\n", "utf-8")
    for settings in ({}, {"CPU_EXPECTED": "1"}):
        assert lab.run("sweep.sh", engine, PORT=listening, **settings).returncode == 0
    checks = [" ".join(call) for call in lab.calls("serving_arithmetic.py") if "--check-log" in call]
    assert [check.startswith(f"--check-log {log} ") and check.endswith(expected) for check in checks] == [True] * 2
    assert ["--cpu-expected" in check for check in checks] == [False, engine == "llama"]


@pytest.mark.parametrize(
    ("told", "setting", "recorded"), [("Q5_K_S", "", "Q5_K_S"), ("Q5_K_S", "my own", "my own"), (None, "", None)]
)
def test_the_recorded_quant_is_the_files_own(
    lab: Lab, listening: str, told: str | None, setting: str, recorded: str | None
) -> None:
    answer(lab, "--gguf", document={"model": {"quant": told}})
    assert lab.run("sweep.sh", "llama", "prefix", PORT=listening, LLAMA_QUANT=setting).returncode == 0
    assert option(loads(lab)[-1], "--quant") == recorded


# ---------------------------------------------------------------------------------------------------------------
# sweep.sh: where it stops, in one sentence, with the command that repeats the part
# ---------------------------------------------------------------------------------------------------------------

STOPS = [  # what a program answers, exit status, words, the last label measured, what repeats the part
    ("--probe=>1,", 1, ("did not answer one request", "wrong model name"), None, "llama baseline"),
    ("--check-log=>1,", 1, ("does not agree with the prediction", "CPU_EXPECTED=1"), None, "llama baseline prefix"),
    ("--check-log=>2,", 1, ("could not be compared",), None, "llama baseline prefix"),
    (
        "--label llama-baseline --prompt-set=>1,",
        1,
        ("exit status 1", "a wrong port"),
        "llama-baseline",
        "llama baseline",
    ),
    ("--label llama-baseline --prompt-set=>130,", 130, ("interrupted",), "llama-baseline", "llama baseline"),
    ("--check --label llama-baseline=>1,", 1, ("llama-baseline is not as",), "llama-baseline", "llama baseline"),
    ("--check llama-prefix-unique=>1,", 1, ("llama-prefix-unique is not",), "llama-prefix-unique", "llama prefix"),
    ("--check llama-prefix-shared=>1,", 1, ("llama-prefix-shared is not",), "llama-prefix-shared", "llama prefix"),
    ("--compare=>1,", 1, ("summarise_load.py found",), "llama-prefix-shared", "llama prefix"),
]


@pytest.mark.parametrize(("answers", "status", "words", "last", "again"), STOPS)
def test_sweep_stops_at_what_is_not_as_predicted(
    lab: Lab, listening: str, answers: str, status: int, words: tuple[str, ...], last: str | None, again: str
) -> None:
    (lab.work / "llama-server.log").write_text("a log\n", "utf-8")
    lab.environment["ANSWERS"] = answers
    result = lab.run("sweep.sh", "llama", "--", "--timeout", "9 s", PORT=listening)
    assert result.returncode == status, result.stderr
    assert [word for word in words if word not in result.stderr] == []
    assert (
        f"this part alone, again: bash '{lab.repository}/scripts'/sweep.sh {again} -- --timeout '9 s'\n"
        in result.stderr
    )
    assert (labels(lab) or [None])[-1] == last, "nothing is measured after it"
    if answers == STOPS[0][0]:
        going_on = lab.run("sweep.sh", "llama", PORT=listening, KEEP_GOING="1")
        assert going_on.returncode == 0 and "NOT AS PREDICTED" in going_on.stderr
        assert labels(lab)[-1] == "llama-prefix-shared"


def test_sweep_without_a_server_says_how_to_start_it(lab: Lab, free_port: int) -> None:
    for engine, launcher in (("llama", "llama-parallel"), ("vllm", "vllm-native"), ("mlx", "mlx")):
        result = lab.run("sweep.sh", engine, PORT=str(free_port))
        assert result.returncode == 1 and f"serve-{launcher}.sh" in result.stderr
    assert lab.calls("load_test.py") == []


@pytest.mark.parametrize("listening", [Foreign], indirect=True)
@pytest.mark.parametrize("args", ["sweep.sh llama", "sweep.sh vllm", "crosscheck.sh"])
def test_a_foreign_server_on_the_port_is_told_from_the_engine(lab: Lab, listening: str, args: str) -> None:
    script, *rest = args.split()
    result = lab.run(script, *rest, PORT=listening)
    assert result.returncode == 1 and f"what answers on port {listening} is not" in result.stderr
    assert loads(lab) == []


@pytest.mark.parametrize(
    "args",
    [
        *("sweep.sh", "sweep.sh ollama", "sweep.sh llama everything", "sweep.sh llama --timeout 9"),
        *("variants.sh everything", "admission.sh everything", "crosscheck.sh everything"),
    ],
)
def test_wrong_arguments_are_refused(lab: Lab, args: str) -> None:
    result = lab.run(*args.split())
    assert result.returncode == 2 and len(result.stderr.splitlines()) == 1


def test_steps_refuse_a_folder_without_lab_env_or_with_another_tracks(lab: Lab) -> None:
    lab.write_env(TRACK="M", HOST_DESC="a Mac")
    for script in ("admission.sh", "crosscheck.sh"):
        result = lab.run(script)
        assert result.returncode == 2 and "does not set VLLM_MODEL" in result.stderr and "track M" in result.stderr
    (lab.work / "lab.env").unlink()
    for call in (["sweep.sh", "llama"], ["variants.sh"], ["admission.sh"], ["crosscheck.sh"]):
        result = lab.run(*call)
        assert result.returncode == 2
        # The lab's folder has a space in its name: the hint is one that can be pasted.
        assert f"run 'bash '{lab.repository}/scripts'/lab-env.sh TRACK' here first" in result.stderr


# ---------------------------------------------------------------------------------------------------------------
# sweep.sh: the two engines side by side
# ---------------------------------------------------------------------------------------------------------------


def side(**changes: Any) -> dict[str, Any]:
    """The settings of one side of a comparison."""
    settings = {"context_length": 4096, "server_slots": 20, "quant": "Q4_K_M", "prompt_set": "mixed", "max_tokens": 128}
    return {"settings": {**settings, **changes}}


SHAPE = {"layers": 36, "kv_heads": 8, "head_dim": 128}


@pytest.mark.parametrize(
    ("engine", "theirs", "tokens", "shape", "unequal"),
    [
        ("vllm", {"quant": "AWQ"}, 81920, {}, None),
        ("vllm", {"context_length": 2048}, 81920, {}, "context per sequence"),
        ("vllm", {"server_slots": 8}, 81920, {}, "cap on sequences"),
        ("vllm", {}, 40960, {}, "tokens in the pool"),
        ("vllm", {}, None, {}, "tokens in the pool"),
        ("vllm", {"max_tokens": 64}, 81920, {}, "client and load"),
        ("vllm", {"prompt_set": "mixed-length"}, 81920, {}, "client and load"),
        ("vllm", {}, 81920, {"layers": 28}, "model family and size"),
        ("mlx", {"server_slots": 32}, None, {}, "cap on sequences, tokens in the pool"),
    ],
)
def test_what_is_equal_on_both_sides_stands_below_the_comparison(
    lab: Lab, engine: str, theirs: dict[str, Any], tokens: int | None, shape: dict[str, int], unequal: str | None
) -> None:
    (lab.work / "labbook.md").write_text("records\n", "utf-8")
    answer(lab, "--compare --json", document={"a": side(), "b": side(**theirs)})
    answer(lab, "--gguf", document={"model": SHAPE})
    answer(lab, "--config", document={"model": {**SHAPE, **shape}})
    answer(lab, "--available-kv", document={"vllm": [{"tokens": tokens}]})
    if engine == "mlx":
        answer(lab, f"{lab.home}/models/mlx-community/Qwen3-8B-4bit/config.json", document={"model": SHAPE})
    result = lab.run("sweep.sh", engine, "compare")
    assert result.returncode == 0, result.stderr
    said = re.findall(r"not equal, or not known: (.*)\. Say so", result.stdout)
    assert said == ([unequal] if unequal else []), result.stdout
    assert f"weights: Q4_K_M and {theirs.get('quant', 'Q4_K_M')}" in result.stdout


@pytest.mark.parametrize("missing", ["llama-baseline", "vllm-baseline"])
def test_a_comparison_that_cannot_be_made_says_why(lab: Lab, missing: str) -> None:
    (lab.work / "labbook.md").write_text("records\n", "utf-8")
    answer(lab, f"--label {missing}", 1)
    result = lab.run("sweep.sh", "vllm", "compare")
    assert f"not compared: there is no {missing} in 'labbook.md'" in result.stdout
    assert f"sweep.sh {missing.split('-')[0]} baseline" in result.stdout
    assert not [call for call in lab.calls("summarise_load.py") if "--compare" in call]


# ---------------------------------------------------------------------------------------------------------------
# variants.sh
# ---------------------------------------------------------------------------------------------------------------


@pytest.fixture
def after_baseline(lab: Lab, free_port: int) -> Lab:
    """The baselines are in the notebook, the server is stopped."""
    lab.environment["PORT"] = str(free_port)
    (lab.work / "labbook.md").write_text("records\n", "utf-8")
    return lab


def test_variants_change_one_setting_at_a_time(after_baseline: Lab) -> None:
    lab = after_baseline
    answer(lab, "--label llama-slots8 --json", document={"levels": [{"server": {"peak_deferred": 12}}]})
    result = lab.run("variants.sh")
    assert result.returncode == 0, result.stdout + result.stderr
    servers = [call for call in lab.calls("llama-server") if "--parallel" in call]
    assert [options(call, "--parallel --ctx-size --cache-type-k --cache-type-v") for call in servers] == [
        ["8", "32768", "f16", "f16"],
        ["20", "40960", "f16", "f16"],
        ["20", "81920", "q8_0", "q8_0"],
    ]
    names = "--label --server-slots --context-length --quant --concurrency --requests --max-tokens"
    assert [options(call, names) for call in loads(lab)] == [
        ["llama-slots8", "8", "4096", "Q4_K_M", "20", "80", "128"],
        ["llama-ctx2048", "20", "2048", "Q4_K_M", "20", "80", "128"],
        ["llama-kv-alt", "20", "4096", "Q4_K_M, KV q8_0", "20", "80", "128"],
    ]
    checks = [call for call in lab.calls("serving_arithmetic.py") if "--check-log" in call]
    assert [options(call, "--check-log --slots --ctx --kv-type") for call in checks] == [
        ["./llama-slots8.log", "8", "4096", "f16"],
        ["./llama-ctx2048.log", "20", "2048", "f16"],
        ["./llama-kv-alt.log", "20", "4096", "q8_0"],
    ]
    compared = [call[-3:] for call in lab.calls("summarise_load.py") if "--compare" in call]
    assert compared == [["--compare", "llama-baseline", f"llama-{name}"] for name in ("slots8", "ctx2048", "kv-alt")]
    assert "deferred together 12, expected 12" in result.stdout
    assert result.stdout.count("deferred together not sampled, expected 0") == 2
    assert not list(lab.work.glob("*.pid")), "nothing is left running"


@pytest.mark.parametrize(
    ("answers", "settings", "words", "again"),
    [
        ("--check-log=>1,", {}, "does not agree with the prediction", "slots8"),
        ("--check --label llama-slots8=>1,", {}, "llama-slots8 is not as it should be", "slots8"),
        ("--label llama-baseline=>1,", {}, "there is no llama-baseline", "slots8 ctx2048 kv-alt"),
        ("", {"LLAMA_DIES": "failed to allocate buffer for the cache"}, "weights and pool do not fit", "slots8"),
        ("", {"LLAMA_BIN": "/no such/llama"}, "the launcher refused to start", "slots8"),
        ("", {"GGUF": "/no such/model"}, "the launcher refused to start", "slots8"),
    ],
)
def test_variants_stop_at_what_is_not_as_predicted(
    after_baseline: Lab, answers: str, settings: dict[str, str], words: str, again: str
) -> None:
    lab = after_baseline
    lab.environment["ANSWERS"] = answers
    with (lab.work / "lab.env").open("a", encoding="utf-8") as text:
        text.writelines(f"export {name}='{value}'\n" for name, value in settings.items())
    result = lab.run("variants.sh")
    assert result.returncode == 1 and words in result.stderr
    assert f"/variants.sh {again}\n" in result.stderr
    assert len([call for call in lab.calls("llama-server") if "--parallel" in call]) <= 1
    assert len(loads(lab)) == ("--check --label" in answers), "no load on another configuration than meant"


@pytest.mark.parametrize("script", ["variants.sh", "admission.sh"])
def test_a_server_that_still_runs_is_in_the_way(after_baseline: Lab, listening: str, script: str) -> None:
    result = after_baseline.run(script, PORT=listening)
    assert result.returncode == 1 and "already answers" in result.stderr
    assert not [call for name in ("vllm", "llama-server") for call in after_baseline.calls(name) if "--port" in call]


def still_running(group: int) -> list[str]:
    """The processes of a group that have not ended."""
    shown = subprocess.run(["ps", "-A", "-ww", "-o", "pgid=,stat=,command="], stdout=subprocess.PIPE, encoding="utf-8")
    return [line for line in shown.stdout.splitlines() if line.split()[0] == str(group) and line.split()[1][0] != "Z"]


# Where the step is when the signal comes: a line that it prints then, and what the server is told to be like.
LOADING = ("starting llama-server", "--loading-s 100")
MEASURING = ("  $ python3 load_test.py", "--a-ms 50 --b-ms 0")


@pytest.mark.parametrize(
    ("moment", "number", "group", "status"),
    [
        (LOADING, signal.SIGTERM, False, 143),
        (LOADING, signal.SIGINT, True, 130),
        (MEASURING, signal.SIGTERM, False, 143),
        (MEASURING, signal.SIGINT, False, 130),
        (MEASURING, signal.SIGINT, True, 130),
        (MEASURING, signal.SIGHUP, False, 129),
    ],
)
def test_a_signal_ends_everything_and_loses_nothing(
    after_baseline: Lab, moment: tuple[str, str], number: signal.Signals, group: bool, status: int
) -> None:
    """Sent to the script alone, or, as a terminal does, to its whole group."""
    lab = after_baseline
    lab.real("load_test.py")
    process = lab.start("variants.sh", "slots8", ENGINE_FLAGS=moment[1])
    assert process.stdout is not None
    shown = ""
    for line in process.stdout:
        shown += line
        if line.startswith(moment[0]):
            break
    pid_file = lab.work / "llama-slots8.pid"
    while not (pid_file.exists() and pid_file.read_text("utf-8").strip()):
        assert process.poll() is None, shown
    os.killpg(process.pid, number) if group else process.send_signal(number)
    shown += process.communicate(timeout=280)[0]
    assert process.returncode == status, shown
    assert ("interrupted; what was measured until then is in labbook.md" in shown) is (status == 130)
    assert "this part alone, again: " in shown and "Traceback" not in shown
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid_file.read_text("utf-8")), 0)
    while still_running(process.pid):  # nor the load, nor anything else: what is left ends by itself
        pass


# ---------------------------------------------------------------------------------------------------------------
# admission.sh
# ---------------------------------------------------------------------------------------------------------------

SEEN = {"peak_running": 8, "peak_waiting": 12, "peak_cache_usage": 0.02}


def served(lab: Lab) -> list[list[str]]:
    return [call for call in lab.calls("vllm") if call[0] == "serve"]


def test_admission_caps_the_sequences_and_tries_both_fractions(after_baseline: Lab) -> None:
    lab = after_baseline
    answer(lab, "--label vllm-seqs8 --json", document={"levels": [{"server": SEEN}]})
    result = lab.run("admission.sh", "--", "--enforce-eager", KV_BYTES="12079595520")  # left over in the terminal
    assert result.returncode == 0, result.stdout + result.stderr
    names = "--max-num-seqs --kv-cache-memory-bytes --gpu-memory-utilization"
    assert [options(call, names) for call in served(lab)] == [
        ["8", "12079595520", None],
        ["20", None, "0.90"],
        ["20", None, "0.80"],
    ]
    assert all(call[-1] == "--enforce-eager" for call in served(lab))
    (load,) = loads(lab)
    names = "--label --concurrency --requests --max-tokens --server-slots --sample --quant --engine-version"
    assert options(load, names) == ["vllm-seqs8", "20", "80", "128", "8", "0.5", "AWQ", "0.28.0+simulated"]
    seqs8, fractions = (call for call in lab.calls("serving_arithmetic.py") if "--check-log" in call)
    assert options(seqs8, "--check-log --available-kv") == ["./vllm-seqs8.log", "11.25"]
    assert fractions[:5] == [
        "--check-log",
        "./vllm-fraction-a.log",
        "./vllm-fraction-b.log",
        "--fractions",
        "0.90,0.80",
    ]
    assert ["--labbook", "labbook.md", "--compare", "vllm-baseline", "vllm-seqs8"] in lab.calls("summarise_load.py")
    assert "running: 8, predicted 8" in result.stdout and "waiting: 12, predicted 12" in result.stdout
    assert not list(lab.work.glob("*.pid"))


def test_admission_in_the_container(after_baseline: Lab) -> None:
    lab = after_baseline
    with (lab.work / "lab.env").open("a", encoding="utf-8") as text:
        text.write("export VLLM_IMAGE=an/image:1 VLLM_MODEL=/models/Qwen/Qwen3-8B-AWQ\n")
    result = lab.run("admission.sh", "seqs8")
    assert result.returncode == 1, "the stand-in's container ends at once"
    (run,) = [call for call in lab.calls("docker") if call[0] == "run"]
    assert run[run.index("an/image:1") + 3] == "/models/Qwen/Qwen3-8B-AWQ" and option(run, "--max-num-seqs") == "8"


@pytest.mark.parametrize(
    ("seen", "symptom"),
    [
        ({"peak_running": 20, "peak_waiting": 0}, "at most 20 of the requests were seen running, predicted 8"),
        ({"peak_running": 8, "peak_waiting": 3}, "at most 3 of the requests were seen waiting, predicted 12"),
        ({}, "none that could be sampled"),
    ],
)
def test_admission_stops_when_the_queue_is_not_as_predicted(
    after_baseline: Lab, seen: dict[str, int], symptom: str
) -> None:
    answer(after_baseline, "--label vllm-seqs8 --json", document={"levels": [{"server": seen}]})
    result = after_baseline.run("admission.sh")
    assert result.returncode == 1 and symptom in result.stderr and "/admission.sh seqs8\n" in result.stderr
    assert len(served(after_baseline)) == 1


@pytest.mark.parametrize(
    ("words", "advice"),
    [
        ("Free memory on device (9/16 GiB) is less than desired GPU memory utilization", "lower the fraction"),
        ("ValueError: No available memory for the cache blocks. Try increasing", "raise the memory fraction"),
        ("ValueError: To serve at least one request with the model's max seq len", "raise the memory fraction"),
        ("NotImplementedError: fp8 kv cache is not supported on this GPU", "40,960"),
        ("something else broke", "read its last lines"),
    ],
)
def test_admission_names_the_symptom_of_a_server_that_does_not_start(
    after_baseline: Lab, words: str, advice: str
) -> None:
    result = after_baseline.run("admission.sh", "fractions", VLLM_DIES=words)
    assert result.returncode == 1 and "/admission.sh fractions\n" in result.stderr
    assert words in result.stderr and advice in result.stderr


# ---------------------------------------------------------------------------------------------------------------
# crosscheck.sh: the real analyser and converter, stand-ins of the two clients
# ---------------------------------------------------------------------------------------------------------------


@pytest.fixture
def running(lab: Lab, listening: str) -> Lab:
    """Our client's runs all give the record of a real run: 614.9 tok/s, TPOT p50 29.75 ms, prompts of 50.2 tokens."""
    lab.environment["PORT"] = listening
    lab.real("summarise_load.py")
    notebook = (lab.root / "tests" / "data" / "engines" / "labbook.md").read_text("utf-8")
    records = [json.loads(line) for line in notebook.splitlines() if line.startswith("{")]
    answer(lab, "vllm-crosscheck", document=[record for record in records if record["label"] == "vllm-crosscheck"][-1])
    return lab


def bench(lab: Lab) -> list[list[str]]:
    return [call for call in lab.calls("vllm") if call[:2] == ["bench", "serve"]]


def test_crosscheck_runs_the_same_load_alternately(running: Lab) -> None:
    result = running.run("crosscheck.sh")
    assert result.returncode == 0, result.stdout + result.stderr
    calls = [json.loads(line) for line in running.record.read_text("utf-8").splitlines()]
    order = ["ours" if call[0] == "load_test.py" else "theirs" for call in calls if call[0] in ("load_test.py", "vllm")]
    assert order == ["ours", "theirs", *("ours", "theirs"), *("theirs", "ours"), *("ours", "theirs")]
    for load in loads(running):
        names = "--label --concurrency --requests --max-tokens --temperature --prompt-set --extra-body"
        expected = ["vllm-crosscheck", "20", "80", "128", "0", "mixed", '{"ignore_eos": true}']
        assert options(load, names) == expected
    books = [option(load, "--labbook") for load in loads(running)]
    assert books[1:] == ["labbook.md"] * 3 and books[0] != "labbook.md", "the warm-up is not recorded"
    model = str(running.home / "models" / "Qwen" / "Qwen3-8B-AWQ")
    expected = f"""--backend openai-chat --endpoint /v1/chat/completions
        --base-url http://127.0.0.1:{running.environment["PORT"]} --served-model-name local-chat --dataset-name random
        --random-output-len 128 --num-prompts 80 --max-concurrency 20 --percentile-metrics ttft,tpot,itl
        --metric-percentiles 50,90 --goodput ttft:2000 --temperature 0""".split()
    for call in bench(running):
        assert options(call, " ".join(expected[::2])) == expected[1::2] and option(call, "--model") == model
        assert "--ignore-eos" in call and "tpot:100" in call
    # The stand-in's template adds nine tokens, as the server counts them: 50 would become 59, so 41 are asked for.
    assert [option(call, "--random-input-len") for call in bench(running)] == ["50", "41", "41", "41"]
    seeds = [option(call, "--seed") for call in bench(running)]
    assert len(set(seeds)) == len(seeds), "the same random prompts again would come from the prefix cache"
    assert "agreed: within 5 %" in result.stdout


@pytest.mark.parametrize(
    ("settings", "status", "words"),
    [
        ({"BENCH_SPEED": "0.9"}, 1, "differ by more than 5 % in output tok/s"),
        ({"BENCH_SPEED": "1.1", "LIMIT_PERCENT": "15"}, 0, "output tok/s: ours 614.9"),
        ({"BENCH_TPOT_MS": "27"}, 1, "differ by more than 5 % in median TPOT"),
        ({"BENCH_TPOT_MS": "32"}, 1, "differ by more than 5 % in median TPOT"),
        ({"BENCH_COMPLETED": "77"}, 1, "completed 77 of 80 requests"),
        ({"BENCH_FAILS": "1"}, 1, "the bench broke"),
    ],
    ids=str,
)
def test_crosscheck_judges_each_figure_in_each_direction(
    running: Lab, settings: dict[str, str], status: int, words: str
) -> None:
    result = running.run("crosscheck.sh", PAIRS="1", **settings)
    assert result.returncode == status, result.stdout + result.stderr
    assert words in result.stdout + result.stderr
    assert (status == 0) is ("agreed: within" in result.stdout)


def test_crosscheck_runs_their_client_in_the_container(running: Lab) -> None:
    with (running.work / "lab.env").open("a", encoding="utf-8") as text:
        text.write("export VLLM_IMAGE=an/image:1\n")
    result = running.run("crosscheck.sh", PAIRS="1")
    assert result.returncode == 0, result.stdout + result.stderr
    executed = [call for call in running.calls("docker") if call[0] == "exec"]
    assert [call[:5] for call in executed] == [["exec", "vllm-lab", "vllm", "bench", "serve"]] * 2
    assert option(executed[0], "--base-url") == "http://127.0.0.1:8000", "the port inside"
    assert (running.work / "crosscheck" / "theirs-1.json").exists()


# ---------------------------------------------------------------------------------------------------------------
# The real programs and the simulated engine
# ---------------------------------------------------------------------------------------------------------------

SMALL = ("--", "--requests", "20", "--min-rounds", "0", "--max-tokens", "8")


def records(lab: Lab) -> list[dict[str, Any]]:
    lines = (lab.work / "labbook.md").read_text("utf-8").splitlines()
    return [json.loads(line) for line in lines if line.startswith("{")]


def test_a_sweep_twice_in_a_row_and_a_variant_against_live_servers(lab: Lab, free_port: int, sim_engine: Any) -> None:
    lab.real("load_test.py", "summarise_load.py")
    flags = ("--model", "local-chat", "--slots", 20, "--a-ms", 5, "--b-ms", 0.2, "--prefill-tok-s", 200000)
    engine = sim_engine("--dialect", "llama", *flags)
    for _ in range(2):
        # Short levels drain for much of their time; what they show of the client is not what is tested here.
        result = lab.run("sweep.sh", "llama", *SMALL, PORT=str(engine.port), KEEP_GOING="1")
        assert result.returncode == 0, result.stdout + result.stderr
    found = [(record["label"], record["concurrency"]) for record in records(lab) if "concurrency" in record]
    once = [
        *(("llama-baseline", c) for c in (1, 5, 10, 20)),
        *((f"llama-prefix-{kind}", c) for kind in ("unique", "shared") for c in (1, 10)),
    ]
    assert sorted(found) == sorted(once * 2), "what was measured first is still there"
    assert {"curve-summary", "recovery"} <= {record.get("record") for record in records(lab)}
    assert "TPOT p50 ~" in result.stdout and "B/A" in result.stdout

    lab.environment["PORT"] = str(free_port)
    result = lab.run("variants.sh", "slots8", *SMALL, KEEP_GOING="1")
    assert result.returncode == 0, result.stdout + result.stderr
    (record,) = (record for record in records(lab) if record["label"] == "llama-slots8")
    assert record["completed"] == 20 and record["server"]["slots"] == 8
    assert not (lab.work / "llama-slots8.pid").exists()
