"""sweep.sh, variants.sh, admission.sh and crosscheck.sh.

Against stand-ins of the three programs: what is asked of them, and what the steps do with each answer. And once
each against the real programs and the simulated engine, which the engines' stand-ins serve.
"""

from __future__ import annotations

import http.server
import json
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from lab_stand_ins import MLX_PYTHON, Lab


class Health(http.server.BaseHTTPRequestHandler):
    """A server that is there: /version as vLLM has it."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b'{"version": "0.28.0"}')

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def listening() -> Iterator[str]:
    """The port of such a server."""
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Health) as server:
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


def level(concurrency: int, **changes: Any) -> dict[str, Any]:
    """A level record as load_test.py prints it, with nothing odd in it."""
    return {
        "concurrency": concurrency,
        "requests": 40,
        "completed": 40,
        "failed": 0,
        "first_error": None,
        "token_counts": "usage",
        "finish_reasons": {"length": 40},
        "mean_in_flight": 0.97 * concurrency,
        "output_tokens": 5120,
        "output_tokens_per_s": 40.0 * concurrency,
        "prompt_tokens_mean": 50.0,
        "cached_tokens_mean": 4.0,
        "server_slots": 20,
        "context_length": 4096,
        "server": {"slots": 20, "context_per_slot": 4096},
        "tpot_s": {"p50": 0.010},
        "ttft_s": {"p50": 0.050},
        **changes,
    }


def answers(lab: Lab, **labels: list[dict[str, Any]] | int) -> None:
    """What load_test.py's stand-in prints for each label ('_' for '-'), or the exit status it ends with."""
    entries = []
    for name, answer in labels.items():
        label = name.replace("_", "-")
        if isinstance(answer, int):
            entries.append(f"--label {label}=>{answer},")
            continue
        path = lab.record.parent / f"{label}.jsonl"
        path.write_text("".join(json.dumps(record) + "\n" for record in answer), "utf-8")
        entries.append(f"--label {label}=>0,{path}")
    lab.environment["ANSWERS"] = ";".join(entries)


def honest(lab: Lab, engine: str, **changes: list[dict[str, Any]] | int) -> None:
    """A sweep in which everything is as predicted, but for the changes."""
    prefix = {"prompt_tokens_mean": 1500.0, "cached_tokens_mean": 8.0}
    shared = {**prefix, "cached_tokens_mean": 1400.0}
    labels: dict[str, Any] = {
        f"{engine}_baseline": [level(1), level(5), level(10), level(20)],
        f"{engine}_prefix_unique": [level(1, **prefix), level(10, **prefix)],
        f"{engine}_prefix_shared": [level(1, **shared), level(10, **shared)],
    }
    answers(lab, **{**labels, **changes})


def option(call: list[str], name: str) -> str | None:
    return call[call.index(name) + 1] if name in call else None


def options(call: list[str], names: str) -> list[str | None]:
    return [option(call, name) for name in names.split()]


# ---------------------------------------------------------------------------------------------------------------
# sweep.sh
# ---------------------------------------------------------------------------------------------------------------

SETTINGS = "--label --prompt-set --concurrency --requests --min-rounds --max-tokens"


@pytest.mark.parametrize(
    ("engine", "rounds", "facts"),
    [
        ("llama", "0", {"--engine": "llama.cpp", "--engine-version": "11434 (abcdef)", "--quant": "Q4_K_M"}),
        ("vllm", "4", {"--engine": "vllm", "--engine-version": "0.28.0", "--quant": "AWQ", "--server-slots": "20"}),
        (
            "mlx",
            "4",
            {"--engine": "mlx-lm", "--engine-version": "0.32.2", "--quant": "MLX 4-bit", "--server-slots": "32"},
        ),
    ],
)
def test_sweep_asks_for_the_labs_loads(
    lab: Lab, listening: str, engine: str, rounds: str, facts: dict[str, str]
) -> None:
    honest(lab, engine)
    result = lab.run("sweep.sh", engine, PORT=listening)
    assert result.returncode == 0, result.stdout + result.stderr
    probe, *loads = lab.calls("load_test.py")
    model = str(lab.home / "models" / "mlx-community" / "Qwen3-8B-4bit") if engine == "mlx" else "local-chat"
    assert "--probe" in probe and option(probe, "--model") == model
    assert [options(load, SETTINGS) for load in loads] == [
        [f"{engine}-baseline", "mixed", "1,5,10,20", "40", "4", "128"],
        [f"{engine}-prefix-unique", "unique-prefix", "1,10", "40", rounds, "64"],
        [f"{engine}-prefix-shared", "shared-prefix", "1,10", "40", rounds, "64"],
    ]
    for load in loads:
        common = {"--base-url": f"http://127.0.0.1:{listening}/v1", "--context-length": "4096", **facts}
        common.update({"--host-desc": "a machine", "--labbook": "labbook.md", "--model": model})
        assert {name: option(load, name) for name in common} == common
    assert lab.calls("summarise_load.py") == [
        ["--labbook", "labbook.md", "--label", f"{engine}-baseline", "--record"],
        ["--labbook", "labbook.md", "--compare", f"{engine}-prefix-unique", f"{engine}-prefix-shared"],
    ]


def test_sweep_shows_commands_that_can_be_typed_again(lab: Lab, listening: str) -> None:
    honest(lab, "llama")
    shown = lab.run("sweep.sh", "llama", PORT=listening).stdout
    assert "$ python3 load_test.py --base-url http" in shown and "--host-desc 'a machine'" in shown


def test_sweep_runs_the_parts_that_are_named(lab: Lab, listening: str) -> None:
    honest(lab, "llama")
    lab.run("sweep.sh", "llama", "prefix", PORT=listening)
    assert [option(call, "--label") for call in lab.calls("load_test.py")] == [
        "llama-prefix-unique",
        "llama-prefix-shared",
    ]


def test_sweep_passes_flags_on(lab: Lab, listening: str) -> None:
    honest(lab, "llama")
    lab.run("sweep.sh", "llama", "baseline", "--", "--timeout", "900", PORT=listening)
    assert lab.calls("load_test.py")[-1][-2:] == ["--timeout", "900"]


@pytest.mark.parametrize(
    ("label", "record", "symptom", "advice"),
    [
        (
            "baseline",
            level(5, failed=2, completed=38, first_error="no_tokens: x"),
            "2 of 40 requests failed",
            "model name",
        ),
        ("baseline", level(5, token_counts="deltas"), "tokens counted from", "sends usage"),
        ("baseline", level(20, mean_in_flight=13.1), "13.1 requests in flight", "SSH tunnel"),
        ("baseline", level(20, server={"slots": 8}), "slots = 8", "another configuration"),
        ("baseline", level(1, server={"context_per_slot": 2048}), "context_per_slot = 2048", "another configuration"),
        ("prefix-unique", level(1, cached_tokens_mean=30.0), "60.0 % of the control's prompt", "share nothing"),
        ("prefix-shared", level(10, cached_tokens_mean=20.0), "40.0 % of the prompt", "variable first line"),
        (
            "prefix-shared",
            level(1, cached_tokens_mean=None),
            "reports no cached tokens",
            "--enable-prompt-tokens-details",
        ),
    ],
)
def test_sweep_stops_at_what_is_not_as_predicted(
    lab: Lab, listening: str, label: str, record: dict[str, Any], symptom: str, advice: str
) -> None:
    honest(lab, "llama", **{f"llama_{label.replace('-', '_')}": [record]})
    result = lab.run("sweep.sh", "llama", PORT=listening)
    assert result.returncode == 1
    assert f"NOT AS PREDICTED: c={record['concurrency']}: " in result.stderr
    assert symptom in result.stderr and advice in result.stderr
    last = [option(call, "--label") for call in lab.calls("load_test.py")][-1]
    assert last == f"llama-{label}", "nothing is measured after it"


def test_sweep_can_go_on_all_the_same(lab: Lab, listening: str) -> None:
    honest(lab, "llama", llama_baseline=[level(20, mean_in_flight=3.0)])
    result = lab.run("sweep.sh", "llama", PORT=listening, KEEP_GOING="1")
    assert result.returncode == 0 and "NOT AS PREDICTED" in result.stderr
    assert len(lab.calls("load_test.py")) == 4


@pytest.mark.parametrize(
    ("records", "remark"),
    [
        ([level(10, finish_reasons={"length": 30, "stop": 10})], "compare tokens/s"),
        ([level(10), level(20, output_tokens_per_s=390.0)], "past saturation"),
    ],
)
def test_sweep_remarks_on_results_without_stopping(
    lab: Lab, listening: str, records: list[dict[str, Any]], remark: str
) -> None:
    honest(lab, "llama", llama_baseline=records)
    result = lab.run("sweep.sh", "llama", PORT=listening)
    assert result.returncode == 0, result.stderr
    assert remark in result.stdout


def test_a_control_without_cached_counts_is_only_remarked_on(lab: Lab, listening: str) -> None:
    honest(lab, "vllm", vllm_prefix_unique=[level(1, cached_tokens_mean=None)])
    result = lab.run("sweep.sh", "vllm", PORT=listening)
    assert result.returncode == 0 and "reports no cached tokens" in result.stdout


def test_sweep_stops_when_a_load_fails(lab: Lab, listening: str) -> None:
    honest(lab, "llama", llama_baseline=1)
    result = lab.run("sweep.sh", "llama", PORT=listening)
    assert result.returncode == 1 and "exit status 1" in result.stderr
    assert lab.calls("summarise_load.py") == []


LLAMA_FULL = "exceed_context_size_error: request (1111 tokens) exceeds the available context size (512 tokens)"
VLLM_FULL = "BadRequestError: This model's maximum context length is 512 tokens. However, you requested 64 output"


@pytest.mark.parametrize(
    ("errors", "first", "advice"),
    [
        ({"connect": 40}, "connect: [Errno 111] Connection refused", "a wrong port, a server that has stopped"),
        ({"no_tokens": 40}, "no_tokens: the stream ended without a token", "a wrong model name or chat template"),
        ({"http": 40}, f"http 400: {LLAMA_FULL}", "the prefix sets need 4,096 tokens per sequence"),
        ({"http": 40}, f"http 400: {VLLM_FULL}", "the prefix sets need 4,096 tokens per sequence"),
        ({"timeout": 40}, "timeout: no token for 300 s", "read the error above and the server's log"),
    ],
)
def test_a_failed_load_gets_the_advice_of_its_error(
    lab: Lab, listening: str, errors: dict[str, int], first: str, advice: str
) -> None:
    """Every record holds context_length, whatever went wrong."""
    honest(lab, "llama", llama_baseline=[level(1, completed=0, failed=40, errors=errors, first_error=first)])
    lab.environment["ANSWERS"] = lab.environment["ANSWERS"].replace("llama-baseline=>0", "llama-baseline=>1")
    result = lab.run("sweep.sh", "llama", "baseline", PORT=listening)
    assert result.returncode == 1 and "exit status 1" in result.stderr
    assert advice in result.stderr.split("what to do: ")[1].splitlines()[0]


def test_sweep_stops_when_the_endpoint_is_not_proven(lab: Lab, listening: str) -> None:
    honest(lab, "llama")
    lab.environment["ANSWERS"] = "--probe=>1,"
    result = lab.run("sweep.sh", "llama", PORT=listening)
    assert result.returncode == 1 and "wrong model name" in result.stderr
    assert len(lab.calls("load_test.py")) == 1


def test_sweep_without_a_server_says_how_to_start_it(lab: Lab, free_port: int) -> None:
    for engine, launcher in (("llama", "parallel"), ("vllm", "vllm-native"), ("mlx", "mlx")):
        result = lab.run("sweep.sh", engine, PORT=str(free_port))
        assert result.returncode == 1 and f"serve-{'llama-' * (engine == 'llama')}{launcher}.sh" in result.stderr
    assert lab.calls("load_test.py") == []


@pytest.mark.parametrize(
    ("engine", "log", "expected"),
    [
        ("llama", "llama-server.log", ["--slots", "20", "--ctx", "4096", "--kv-type", "f16"]),
        ("vllm", "vllm-server.log", ["--slots", "20", "--ctx", "4096", "--kv-type", "auto", "--available-kv", "11.25"]),
    ],
)
def test_sweep_reads_the_servers_log_first(
    lab: Lab, listening: str, engine: str, log: str, expected: list[str]
) -> None:
    honest(lab, engine)
    (lab.work / log).write_text("a log\n", "utf-8")
    assert lab.run("sweep.sh", engine, PORT=listening).returncode == 0
    (check,) = [call for call in lab.calls("serving_arithmetic.py") if "--check-log" in call]
    assert check[:2] == ["--check-log", log] and check[-len(expected) :] == expected
    lab.environment["ANSWERS"] = "--check-log=>1,"
    result = lab.run("sweep.sh", engine, PORT=listening)
    assert result.returncode == 1 and "than predicted" in result.stderr


@pytest.mark.parametrize("args", [(), ("ollama",), ("llama", "everything"), ("llama", "--timeout", "9")])
def test_sweep_refuses_wrong_arguments(lab: Lab, args: tuple[str, ...]) -> None:
    result = lab.run("sweep.sh", *args)
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


@pytest.mark.parametrize(
    ("name", "told", "setting", "recorded"),
    [
        ("a model.gguf", '{"model": {"quant": "Q5_K_S"}}', "", "Q5_K_S"),
        ("a model-Q8_0.gguf", '{"model": {"quant": "Q5_K_S"}}', "", "Q5_K_S"),
        ("a model-q8_0.gguf", '{"model": {"quant": null}}', "", "Q8_0"),
        ("model.BF16-00001-of-00003.gguf", "", "", "BF16"),
        ("a model-Q8_0.gguf", '{"model": {"quant": "Q5_K_S"}}', "my own", "my own"),
        ("a model.gguf", "", "", None),
    ],
)
def test_the_recorded_quant_is_the_files_own(
    lab: Lab, listening: str, tmp_path: Path, name: str, told: str, setting: str, recorded: str | None
) -> None:
    gguf = lab.home / name
    gguf.write_bytes(b"GGUF")
    with (lab.work / "lab.env").open("a", encoding="utf-8") as text:
        text.write(f"export GGUF='{gguf}' LLAMA_QUANT='{setting}'\n")
    honest(lab, "llama")
    (tmp_path / "told.json").write_text(told, "utf-8")
    lab.environment["ANSWERS"] += f";--gguf=>0,{tmp_path / 'told.json'}"
    assert lab.run("sweep.sh", "llama", "prefix", PORT=listening).returncode == 0
    load = lab.calls("load_test.py")[-1]
    assert (load[load.index("--quant") + 1] if "--quant" in load else None) == recorded


# ---------------------------------------------------------------------------------------------------------------
# variants.sh
# ---------------------------------------------------------------------------------------------------------------


@pytest.fixture
def after_baseline(lab: Lab, free_port: int) -> Lab:
    """The baseline is in the notebook, the server is stopped."""
    lab.environment["PORT"] = str(free_port)
    (lab.work / "labbook.md").write_text("records\n", "utf-8")
    shown = lab.record.parent / "list.txt"
    shown.write_text("==> 2 label(s) in labbook.md\nllama-baseline  llama.cpp\nvllm-baseline  vllm\n", "utf-8")
    lab.environment["LISTED"] = f"--list=>0,{shown}"
    variant = {"server": {"peak_deferred": 12}}
    answers(
        lab,
        llama_slots8=[level(20, server_slots=8, **variant)],
        llama_ctx2048=[level(20, context_length=2048, server={"context_per_slot": 2048})],
        llama_kv_alt=[level(20)],
    )
    lab.environment["ANSWERS"] += f";{lab.environment['LISTED']}"
    return lab


def test_variants_change_one_setting_at_a_time(after_baseline: Lab) -> None:
    lab = after_baseline
    result = lab.run("variants.sh")
    assert result.returncode == 0, result.stdout + result.stderr
    servers = [call for call in lab.calls("llama-server") if "--parallel" in call]
    assert [options(call, "--parallel --ctx-size --cache-type-k --cache-type-v") for call in servers] == [
        ["8", "32768", "f16", "f16"],
        ["20", "40960", "f16", "f16"],
        ["20", "81920", "q8_0", "q8_0"],
    ]
    names = "--label --server-slots --context-length --quant --concurrency --requests --max-tokens"
    assert [options(call, names) for call in lab.calls("load_test.py")] == [
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
    assert not list(lab.work.glob("*.pid")), "nothing is left running"


def test_variants_stop_at_another_cache_than_predicted(after_baseline: Lab) -> None:
    lab = after_baseline
    lab.environment["ANSWERS"] += ";--check-log=>1,"
    result = lab.run("variants.sh")
    assert result.returncode == 1 and "allocated something else than predicted" in result.stderr
    assert lab.calls("load_test.py") == [], "no load on another configuration than intended"
    assert len([call for call in lab.calls("llama-server") if "--parallel" in call]) == 1


def test_variants_name_a_server_that_does_not_fit(after_baseline: Lab) -> None:
    result = after_baseline.run("variants.sh", "slots8", LLAMA_DIES="failed to allocate buffer for the cache")
    assert result.returncode == 1
    assert "weights and pool do not fit" in result.stderr and "eight-bit tier" in result.stderr


def test_variants_need_the_baseline(after_baseline: Lab) -> None:
    (after_baseline.work / "labbook.md").unlink()
    result = after_baseline.run("variants.sh")
    assert result.returncode == 1 and "sweep.sh llama" in result.stderr
    assert after_baseline.calls("llama-server") == []


@pytest.mark.parametrize("script", ["variants.sh", "admission.sh"])
def test_a_server_that_still_runs_is_in_the_way(after_baseline: Lab, listening: str, script: str) -> None:
    result = after_baseline.run(script, PORT=listening)
    assert result.returncode == 1 and "already answers" in result.stderr


@pytest.mark.parametrize("script", ["variants.sh", "admission.sh"])
def test_unknown_parts_are_refused(after_baseline: Lab, script: str) -> None:
    result = after_baseline.run(script, "everything")
    assert result.returncode == 2 and len(result.stderr.splitlines()) == 1


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_stops_the_server_too(after_baseline: Lab, number: signal.Signals, status: int) -> None:
    lab = after_baseline
    process = lab.start("variants.sh", "slots8", ENGINE_FLAGS="--loading-s 100")
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("starting llama-server"):
            break
    pid_file = lab.work / "llama-slots8.pid"
    while not (pid_file.exists() and pid_file.read_text("utf-8").strip()):
        assert process.poll() is None
    process.send_signal(number)
    process.communicate(timeout=60)
    assert process.returncode == status
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid_file.read_text("utf-8")), 0)


# ---------------------------------------------------------------------------------------------------------------
# admission.sh
# ---------------------------------------------------------------------------------------------------------------


@pytest.fixture
def vllm(after_baseline: Lab) -> Lab:
    seen = {"peak_running": 8, "peak_waiting": 12, "peak_cache_usage": 0.02}
    answers(after_baseline, vllm_seqs8=[level(20, server_slots=8, server=seen)])
    after_baseline.environment["ANSWERS"] += f";{after_baseline.environment['LISTED']}"
    return after_baseline


def served(lab: Lab) -> list[list[str]]:
    return [call for call in lab.calls("vllm") if call[0] == "serve"]


def test_admission_caps_the_sequences_and_tries_both_fractions(vllm: Lab) -> None:
    result = vllm.run("admission.sh", "--", "--enforce-eager", KV_BYTES="12079595520")  # left over in the terminal
    assert result.returncode == 0, result.stdout + result.stderr
    names = "--max-num-seqs --kv-cache-memory-bytes --gpu-memory-utilization"
    assert [options(call, names) for call in served(vllm)] == [
        ["8", "12079595520", None],
        ["20", None, "0.90"],
        ["20", None, "0.80"],
    ]
    assert all(call[-1] == "--enforce-eager" for call in served(vllm))
    (load,) = vllm.calls("load_test.py")
    names = "--label --concurrency --requests --max-tokens --server-slots --sample --quant"
    assert options(load, names) == ["vllm-seqs8", "20", "80", "128", "8", "0.5", "AWQ"]
    checks = [call for call in vllm.calls("serving_arithmetic.py") if "--check-log" in call]
    assert [option(call, "--available-kv") for call in checks] == ["11.25", None, None]
    assert ["--labbook", "labbook.md", "--compare", "vllm-baseline", "vllm-seqs8"] in vllm.calls("summarise_load.py")
    assert "0.90\tGPU KV cache size: 81,920 tokens" in result.stdout
    assert not list(vllm.work.glob("*.pid"))


def test_admission_in_the_container(vllm: Lab) -> None:
    text = (vllm.work / "lab.env").read_text("utf-8")
    text = text.replace("VLLM_IMAGE=''", "VLLM_IMAGE='an/image:1'")
    model = str(vllm.home / "models" / "Qwen" / "Qwen3-8B-AWQ")
    (vllm.work / "lab.env").write_text(text.replace(model, "/models/Qwen/Qwen3-8B-AWQ"), "utf-8")
    result = vllm.run("admission.sh", "seqs8")
    assert result.returncode == 1, "the stand-in's container ends at once"
    (run,) = [call for call in vllm.calls("docker") if call[0] == "run"]
    assert run[run.index("an/image:1") + 3] == "/models/Qwen/Qwen3-8B-AWQ" and option(run, "--max-num-seqs") == "8"


@pytest.mark.parametrize(
    ("seen", "symptom"),
    [
        ({"peak_running": 20, "peak_waiting": 0}, "at most 20 sequences were seen running, predicted 8"),
        ({"peak_running": 8, "peak_waiting": 3}, "at most 3 requests were seen waiting, predicted 12"),
        (None, "could not be sampled"),
    ],
)
def test_admission_stops_when_the_queue_is_not_as_predicted(
    vllm: Lab, seen: dict[str, int] | None, symptom: str
) -> None:
    answers(vllm, vllm_seqs8=[level(20, server_slots=8, server=seen)])
    result = vllm.run("admission.sh")
    assert result.returncode == 1 and symptom in result.stderr
    assert len(served(vllm)) == 1


@pytest.mark.parametrize(
    ("words", "advice"),
    [
        (
            "ValueError: Free memory on device (9/16 GiB) is less than desired GPU memory utilization",
            "lower the fraction",
        ),
        ("ValueError: No available memory for the cache blocks. Try increasing", "raise the memory fraction"),
        ("ValueError: To serve at least one request with the model's max seq len", "raise the memory fraction"),
        ("NotImplementedError: fp8 kv cache is not supported on this GPU", "40,960"),
        ("something else broke", "read its last lines"),
    ],
)
def test_admission_names_the_symptom_of_a_server_that_does_not_start(vllm: Lab, words: str, advice: str) -> None:
    result = vllm.run("admission.sh", "fractions", VLLM_DIES=words)
    assert result.returncode == 1
    assert words in result.stderr and advice in result.stderr


# ---------------------------------------------------------------------------------------------------------------
# crosscheck.sh
# ---------------------------------------------------------------------------------------------------------------


@pytest.fixture
def running(lab: Lab, listening: str) -> Lab:
    lab.environment["PORT"] = listening
    ours = level(20, completed=80, output_tokens=80 * 128, output_tokens_per_s=1003.0, prompt_tokens_mean=34.3)
    answers(lab, vllm_crosscheck=[ours])
    return lab


def bench(lab: Lab) -> list[list[str]]:
    return [call for call in lab.calls("vllm") if call[:2] == ["bench", "serve"]]


def test_crosscheck_runs_the_same_load_alternately(running: Lab) -> None:
    result = running.run("crosscheck.sh")
    assert result.returncode == 0, result.stdout + result.stderr
    calls = [json.loads(line) for line in running.record.read_text("utf-8").splitlines()]
    order = ["ours" if call[0] == "load_test.py" else "theirs" for call in calls if call[0] in ("load_test.py", "vllm")]
    assert order == ["ours", "theirs", *("ours", "theirs"), *("theirs", "ours"), *("ours", "theirs")]
    for load in running.calls("load_test.py"):
        assert option(load, "--extra-body") == '{"ignore_eos": true}'
        names = "--label --concurrency --requests --max-tokens --temperature --prompt-set"
        assert options(load, names) == ["vllm-crosscheck", "20", "80", "128", "0", "mixed"]
    for call in bench(running):
        expected = {
            "--backend": "openai-chat",
            "--endpoint": "/v1/chat/completions",
            "--base-url": f"http://127.0.0.1:{running.environment['PORT']}",
            "--model": str(running.home / "models" / "Qwen" / "Qwen3-8B-AWQ"),
            "--served-model-name": "local-chat",
            "--dataset-name": "random",
            "--random-output-len": "128",
            "--num-prompts": "80",
            "--max-concurrency": "20",
            "--percentile-metrics": "ttft,tpot,itl",
            "--metric-percentiles": "50,90",
            "--goodput": "ttft:2000",
            "--temperature": "0",
        }
        assert {name: option(call, name) for name in expected} == expected
        assert "--ignore-eos" in call and "tpot:100" in call
    assert "agreed: within 5 %" in result.stdout


def test_crosscheck_settles_equal_prompt_lengths_and_never_repeats_prompts(running: Lab) -> None:
    running.run("crosscheck.sh")
    # The stand-in's template adds nine tokens, as the server counts them: 34 would become 43, so 25 are asked for.
    assert [option(call, "--random-input-len") for call in bench(running)] == ["34", "25", "25", "25"]
    seeds = [option(call, "--seed") for call in bench(running)]
    assert len(set(seeds)) == len(seeds), "the same random prompts again would come from the prefix cache"


def test_crosscheck_keeps_the_warm_up_out_of_the_notebook(running: Lab) -> None:
    running.run("crosscheck.sh")
    books = [option(call, "--labbook") for call in running.calls("load_test.py")]
    assert "labbook.md" not in books[:1] and set(books[1:]) == {"labbook.md"}


@pytest.mark.parametrize("speed", ["0.9", "1.1"])
def test_crosscheck_says_when_the_two_differ(running: Lab, speed: str) -> None:
    result = running.run("crosscheck.sh", BENCH_SPEED=speed)
    assert result.returncode == 1 and "differ by more than 5 %" in result.stderr
    assert running.run("crosscheck.sh", BENCH_SPEED=speed, LIMIT_PERCENT="15").returncode == 0


@pytest.mark.parametrize("tpot_ms", ["9", "12"])
def test_crosscheck_judges_each_figure_and_each_direction(running: Lab, tpot_ms: str) -> None:
    result = running.run("crosscheck.sh", PAIRS="1", BENCH_TPOT_MS=tpot_ms)
    assert result.returncode == 1 and "differ by more than 5 %" in result.stderr


def test_crosscheck_prints_the_difference(running: Lab) -> None:
    shown = running.run("crosscheck.sh", BENCH_SPEED="0.98").stdout
    rows = {line[:14].strip(): line.split() for line in shown.splitlines()}
    # ours 10 ms, theirs 10 / 0.98 ms
    assert rows["TPOT p50 ms"][3:6] == ["10.00", "10.20", "-2.00"]


def test_crosscheck_runs_their_client_in_the_container(running: Lab) -> None:
    text = (running.work / "lab.env").read_text("utf-8").replace("VLLM_IMAGE=''", "VLLM_IMAGE='an/image:1'")
    (running.work / "lab.env").write_text(text, "utf-8")
    result = running.run("crosscheck.sh", PAIRS="1")
    assert result.returncode == 0, result.stdout + result.stderr
    executed = [call for call in running.calls("docker") if call[0] == "exec"]
    assert [call[:5] for call in executed] == [["exec", "vllm-lab", "vllm", "bench", "serve"]] * 2
    assert option(executed[0], "--base-url") == "http://127.0.0.1:8000", "the port inside"
    assert (running.work / "crosscheck" / "theirs-1.json").exists()


def test_crosscheck_shows_why_their_client_failed(running: Lab) -> None:
    result = running.run("crosscheck.sh", BENCH_FAILS="1")
    assert result.returncode == 1 and "the bench broke" in result.stderr


# ---------------------------------------------------------------------------------------------------------------
# The real programs and the simulated engine
# ---------------------------------------------------------------------------------------------------------------

SMALL = ("--", "--requests", "20", "--min-rounds", "0", "--max-tokens", "8")


def records(lab: Lab) -> list[dict[str, Any]]:
    lines = (lab.work / "labbook.md").read_text("utf-8").splitlines()
    return [json.loads(line) for line in lines if line.startswith("{")]


def test_a_whole_sweep_against_a_live_server(lab: Lab, sim_engine: Any) -> None:
    lab.real("load_test.py", "summarise_load.py")
    flags = ("--model", "local-chat", "--slots", 20, "--a-ms", 5, "--b-ms", 0.2, "--prefill-tok-s", 200000)
    engine = sim_engine("--dialect", "llama", *flags)
    # Short levels drain for much of their time; what they show of the client is not what is tested here.
    result = lab.run("sweep.sh", "llama", *SMALL, PORT=str(engine.port), KEEP_GOING="1")
    assert result.returncode == 0, result.stdout + result.stderr
    found = {(record["label"], record["concurrency"]) for record in records(lab) if "concurrency" in record}
    assert found == {
        *(("llama-baseline", c) for c in (1, 5, 10, 20)),
        *((f"llama-prefix-{kind}", c) for kind in ("unique", "shared") for c in (1, 10)),
    }
    kinds = {record.get("record") for record in records(lab)}
    assert {"curve-summary", "recovery"} <= kinds
    assert "TPOT p50 ~" in result.stdout and "B/A" in result.stdout


def test_variants_against_live_servers(lab: Lab, free_port: int, sim_engine: Any) -> None:
    lab.real("load_test.py", "summarise_load.py")
    lab.environment["PORT"] = str(free_port)
    engine = sim_engine("--model", "local-chat", "--slots", 20, "--a-ms", 1, "--b-ms", 0.05)
    lab.run("sweep.sh", "llama", "baseline", *SMALL, PORT=str(engine.port), KEEP_GOING="1")
    result = lab.run("variants.sh", "slots8", *SMALL, KEEP_GOING="1")
    assert result.returncode == 0, result.stdout + result.stderr
    (record,) = (record for record in records(lab) if record["label"] == "llama-slots8")
    assert record["completed"] == 20 and record["server"]["slots"] == 8
    assert "llama-slots8" in result.stdout and not (lab.work / "llama-slots8.pid").exists()
