"""Prediction beside a measured curve: bytes of each step, share of the bandwidth, and what the growth is made of."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import RunProgram, SimEngineFactory
from hypothesis import given, settings
from hypothesis import strategies as st
from test_serving_arithmetic_models import CONFIGS, write_config, write_safetensors

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import serving_arithmetic as sa

LEVELS = (1, 5, 10, 20)
BANDWIDTH = 273e6  # bytes per ms at 273 GB/s
Q4 = 5_021_827_072 - 350_060_544  # bytes that a step reads of the lab's GGUF
ROW = 147_456  # bytes per token of Qwen3-8B's f16 cache
LONG = 3064 * ROW / BANDWIDTH


def level(c: int, a_ms: float = 20.0, b_ms: float = 1.5, slots: int | None = 20, **changes: Any) -> dict[str, Any]:
    """A record of a level in which a step takes a + b n for the n = min(c, slots) that decode together."""
    together = min(c, slots or c)
    tpot = changes.pop("tpot_ms", a_ms + b_ms * together) / 1000
    record: dict[str, Any] = {
        "lab": "part-09/lab-serve-twenty-concurrent-users", "schema": 2, "label": "L", "run_id": "20261129T233000-aa",
        "repeat": 0, "recorded_at": "2026-11-29T23:30:00+01:00", "engine": "llama.cpp", "quant": "Q4_K_M",
        "server_slots": slots, "context_length": 4096, "concurrency": c, "requests": 40, "completed": 40, "failed": 0,
        "interrupted": False, "output_tokens": 40 * 128, "output_tokens_per_s": together / tpot,
        "prompt_tokens_mean": 36.0, "slo_ttft_s": 2.0, "slo_tpot_s": 0.1, "max_tokens": 128, "prompt_set": "mixed",
        "model": "local-chat", "ttft_s": {"p50": 0.1, "p90": 0.2}, "tpot_s": {"p50": tpot, "p90": tpot}, "server": None,
    }  # fmt: skip
    return {**record, **changes}


def notebook(folder: Path, *records: dict[str, Any]) -> Path:
    path = folder / "labbook.md"
    path.write_text("".join(json.dumps(record, sort_keys=True) + "\n" for record in records), encoding="utf-8")
    return path


class Shown:
    """What --measured says of label L: the document, the only machine's part, and the text."""

    def __init__(self, capsys: pytest.CaptureFixture[str], path: Path, *args: object, code: int = 0) -> None:
        command = ["--measured", str(path), "--label", "L", *map(str, args)]
        assert sa.main([*command, "--json"]) == code
        out = capsys.readouterr().out
        self.document = json.loads(out) if code == 0 else {}
        self.machine = self.document["machines"][0] if code == 0 else {}
        self.growth: Any = self.machine.get("growth")
        assert sa.main(command) == code
        self.text, self.error = capsys.readouterr()

    def rows(self, name: str) -> list[Any]:
        return [row[name] for row in self.machine["levels"]]


# ------------------------------------------------------------------------------------------ the lines and the levels


def test_each_level_beside_the_limit_of_the_bandwidth(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """a = 20 ms, b = 1.5 ms measured; at context 100 the limit is that of the lab's table: 58.3 and 1099 tok/s."""
    shown = Shown(capsys, notebook(tmp_path, *map(level, LEVELS)), "--bandwidth", 273)
    fitted, predicted = shown.document["fitted"], shown.machine["predicted"]
    assert (fitted["a_ms"], fitted["b_ms"]) == (pytest.approx(20.0), pytest.approx(1.5))
    assert (predicted["a_ms"], predicted["b_ms"]) == (
        pytest.approx(Q4 / BANDWIDTH), pytest.approx(100 * ROW / BANDWIDTH)
    )  # fmt: skip
    steps = [(Q4 + c * 100 * ROW) / BANDWIDTH for c in LEVELS]
    assert shown.rows("context") == [36 + 128 / 2] * 4
    assert shown.rows("predicted_tpot_ms") == pytest.approx(steps)
    assert shown.rows("mbu") == pytest.approx([step / (20 + 1.5 * c) for c, step in zip(LEVELS, steps)])
    assert shown.rows("ceiling_tokens_per_s") == pytest.approx([1000 * c / step for c, step in zip(LEVELS, steps)])
    assert shown.rows("share_of_ceiling") == pytest.approx(shown.rows("mbu")), "these records wait for nothing"
    assert shown.rows("share_at_context_100") == shown.rows("share_of_ceiling")
    ceilings = shown.rows("ceiling_at_context_100_tokens_per_s")
    assert (round(ceilings[0], 1), round(ceilings[3])) == (58.3, 1099)
    assert shown.document["knee_between"] == [5, 10] and shown.document["operating_point"] == 20
    for part in (
        "Fitted: TPOT p50 ~ 20.00 ms + 1.500 ms x c  (levels 1,5,10,20, largest residual 0.0%",
        "predicted TPOT p50 ~ 17.11 ms + 0.054 ms x c (largest residual 0.0 %); fitted / predicted: a 1.17, b 27.77",
        "for the record's quant Q4_K_M", "knee: between c=5 and c=10", "operating point: c=20",
    ):  # fmt: skip
        assert part in shown.text


def test_the_ceiling_at_context_100_is_its_own_where_prompts_are_long(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    shown = Shown(
        capsys, notebook(tmp_path, *(level(c, prompt_tokens_mean=3000.0) for c in LEVELS)), "--bandwidth", 273
    )
    assert round(shown.rows("ceiling_at_context_100_tokens_per_s")[3]) == 1099
    assert shown.rows("share_at_context_100")[3] == pytest.approx(400 / (20e3 / ((Q4 + 20 * 100 * ROW) / BANDWIDTH)))
    assert round(shown.rows("ceiling_tokens_per_s")[3]) == round(20e3 / ((Q4 + 20 * 3064 * ROW) / BANDWIDTH))


def test_only_what_decodes_together_counts_above_the_slots(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    shown = Shown(capsys, notebook(tmp_path, *(level(c, 25, 2, slots=8) for c in LEVELS)), "--bandwidth", 273)
    assert shown.rows("n") == [1, 5, 8, 8]
    assert shown.rows("ceiling_tokens_per_s")[2] == shown.rows("ceiling_tokens_per_s")[3]
    assert shown.document["fitted"]["levels"] == shown.machine["predicted"]["levels"] == [1, 5]
    assert (shown.growth["from_c"], shown.growth["to_c"]) == (1, 10), "from 10 to 20 requests only wait"
    assert shown.machine["predicted_knee_between"] == [10, 20], "the limit knows the slots"
    unknown = Shown(capsys, notebook(tmp_path, *(level(c, slots=None) for c in LEVELS)), "--bandwidth", 273)
    assert unknown.rows("n") == list(LEVELS)


def test_without_a_bandwidth_the_labs_machines_are_shown_and_none_explains(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    shown = Shown(capsys, notebook(tmp_path, *map(level, LEVELS)))
    assert [each["machine"] for each in shown.document["machines"]] == [machine.name for machine in sa.LAB_MACHINES]
    assert "growth" not in shown.text, "which of them it is, only the user knows"


def test_a_line_that_falls_has_one_sign(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    shown = Shown(capsys, notebook(tmp_path, *(level(c, 40, -0.5) for c in LEVELS)), "--bandwidth", 273)
    assert "TPOT p50 ~ 40.00 ms - 0.500 ms x c" in shown.text and "+ -" not in shown.text
    assert shown.growth["reason"] == "flat" and "nothing to explain: it did not grow by 5 %" in shown.text


@pytest.mark.parametrize("records", [[level(20)], [level(c, tpot_s={"p50": None, "p90": None}) for c in LEVELS]])
def test_what_has_no_line_says_so(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, records: list[dict[str, Any]]
) -> None:
    shown = Shown(capsys, notebook(tmp_path, *records), "--bandwidth", 273)
    assert shown.document["fitted"] is None and shown.growth is None
    assert (
        "Fitted: TPOT fit: not enough points" in shown.text
        and "needs a TPOT at two levels with different n" in shown.text
    )


NO_SLO: dict[str, Any] = {"slo_ttft_s": None, "slo_tpot_s": None}


@pytest.mark.parametrize(
    ("records", "present", "absent"),
    [
        ([level(20)], "knee: not enough points", "not reached"),
        ([level(c, **NO_SLO) for c in LEVELS], "operating point: none, no SLO is recorded", "none (no"),
        ([level(c, slots=1) for c in LEVELS], "at or below 1 slot", "Fitted: not possible"),
        ([level(c, slots=None) for c in LEVELS], "note: slots are not recorded: n = c is assumed", "fewer than n"),
        (
            [level(1), level(20, mean_in_flight=12.0)],
            "note: fewer than n were in flight on average at c = 20",
            "slots are not recorded",
        ),
        ([level(1), level(20), level(5, slots=2)], " 20  20 ", " 20   2 "),
    ],
    ids=["one level", "no SLO", "all above the slots", "slots unknown", "drained", "slots of each level"],
)
def test_what_the_notebook_does_not_hold_is_not_claimed(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, records: list[dict[str, Any]], present: str, absent: str
) -> None:
    """Knee, fit and operating point are the analyser's sentences, so the two cannot contradict each other."""
    text = Shown(capsys, notebook(tmp_path, *records), "--bandwidth", 273).text
    assert present in text and absent not in text, text


def test_records_without_prompt_tokens_give_a_lower_bound(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    records = [level(1), level(5, prompt_tokens_mean=None)]
    (note,) = Shown(capsys, notebook(tmp_path, *records), "--bandwidth", 273).document["notes"]
    assert note.startswith("no prompt tokens recorded at c = 5:") and note.endswith("is a lower bound")


def test_more_than_the_limit_means_a_wrong_input(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    steps = {c: (Q4 + c * 100 * ROW) / BANDWIDTH for c in LEVELS}
    for factor, named in ((1.0, False), (0.9, True)):
        records = [level(c, tpot_ms=step * (factor if c == 10 else 1.0)) for c, step in steps.items()]
        shown = Shown(capsys, notebook(tmp_path, *records), "--bandwidth", 273)
        assert ("above the bandwidth limit at c=10: an input is wrong" in shown.text) == named
        assert ("growth" in shown.text, shown.growth is None) == (not named, named), "no claim rests on a wrong input"


def test_first_tokens_are_not_above_the_limit(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Of eight tokens prefill made one: throughput is above n / TPOT, and no input is wrong."""
    records = [level(c, tpot_ms=(Q4 + c * 40 * ROW) / BANDWIDTH, output_tokens=40 * 8) for c in LEVELS]
    for record in records:
        record["output_tokens_per_s"] *= 8 / 7
    shown = Shown(capsys, notebook(tmp_path, *records), "--bandwidth", 273)
    assert shown.rows("share_of_ceiling") == pytest.approx([8 / 7] * 4) and "above the bandwidth" not in shown.text


# ------------------------------------------------------------------------------------- which weights and cache type


@pytest.mark.parametrize(
    ("quant", "weights", "kv_type"),
    [
        ("Q4_K_M", 5_021_827_072, "f16"),
        ("Q4_K_M, KV q8_0", 5_021_827_072, "q8_0"),
        ("AWQ", 6_098_581_864, "f16"),
        ("AWQ, KV fp8_e4m3", 6_098_581_864, "fp8"),
        ("bf16", 16_381_470_720, "f16"),
        ("MLX 4-bit", 4_607_731_712, "f16"),
    ],
)
def test_weights_and_cache_type_are_the_records(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, quant: str, weights: int, kv_type: str
) -> None:
    """A bf16 label is not measured against the bytes of a four-bit file."""
    path = notebook(tmp_path, *(level(c, quant=quant) for c in LEVELS))
    document = Shown(capsys, path, "--bandwidth", 273).document
    assert (document["weights"]["total_bytes"], document["kv_type"]) == (weights, kv_type)
    stated = Shown(capsys, path, "--weights-bytes", 1000, "--kv-type", "q4_0").document
    assert (stated["weights"]["total_bytes"], stated["kv_type"]) == (1000, "q4_0")


def test_what_is_left_out_is_said(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = notebook(tmp_path, *map(level, LEVELS), level(40, interrupted=True))
    path.write_text(path.read_text("utf-8") + json.dumps(level(60))[:-9] + "\n", encoding="utf-8")
    shown = Shown(capsys, path, "--bandwidth", 273)
    assert shown.rows("c") == list(LEVELS) and "note: c=40 left out: interrupted" in shown.text
    assert "note: line 6 left out: " in shown.text


@pytest.mark.parametrize("quant", ["unknown", None, "Q8_0", "UD-Q4_K_XL", "AWQ-Marlin", "none", "bf16, tiny random"])
def test_no_weight_is_assumed_of_another_quant(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, quant: str | None
) -> None:
    path = notebook(tmp_path, *(level(c, quant=quant) for c in LEVELS))
    assert "known for Q4_K_M, AWQ, bf16 and MLX 4-bit only" in Shown(capsys, path, code=2).error
    assert "none is stated" not in Shown(capsys, path, "--weights-bytes", 1000).text


@pytest.mark.parametrize(
    ("model", "said"), [("local-chat", False), ("Qwen/Qwen3-8B-AWQ", False), ("Qwen2.5-0.5B", True), (None, True)]
)
def test_another_model_than_the_labs_is_pointed_out(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, model: str | None, said: bool
) -> None:
    path = notebook(tmp_path, *(level(c, model=model) for c in LEVELS))
    assert ("predicted for the lab's Qwen3-8B, as none is stated" in Shown(capsys, path).text) == said


@pytest.mark.parametrize(
    ("records", "args", "code", "says"),
    [
        ([], (), 1, "labbook.md"),
        ([level(1, label="other")], (), 1, "other"),
        (
            [level(1, completed=0, output_tokens=0)],
            (),
            1,
            "has no level to compare: c=1 left out: no completed request",
        ),
        ([level(1)], ("--kv-type", "f16,q8_0"), 2, "one type here"),
        ([level(1, quant="AWQ, KV int4")], (), 2, "names the cache type int4, not known here; state --kv-type"),
        ([level(1)], ("--layers", 1, "--kv-heads", 1, "--head-dim", 1), 2, "needs the weights"),
    ],
)
def test_a_notebook_that_does_not_answer(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, records: list[dict[str, Any]], args: tuple[object, ...],
    code: int, says: str,
) -> None:  # fmt: skip
    error = Shown(capsys, notebook(tmp_path, *records), *args, code=code).error
    assert says in error and error.count("\n") == 1


def test_without_the_analyser_everything_else_works(run_program: RunProgram, root: Path, tmp_path: Path) -> None:
    alone = shutil.copy(root / "serving_arithmetic.py", tmp_path)
    assert run_program(alone).stdout == run_program("serving_arithmetic.py").stdout
    done = run_program(alone, "--measured", notebook(tmp_path, level(1)), "--label", "L")
    assert (done.returncode, done.stdout) == (2, "")
    assert f"summarise_load.py, which is not in {tmp_path}" in done.stderr and done.stderr.count("\n") == 1
    (tmp_path / "summarise_load.py").write_text("TOOL_VERSION = '1'\n", encoding="utf-8")
    done = run_program(alone, "--measured", notebook(tmp_path, level(1)), "--label", "L")
    assert done.returncode == 2 and "take both from one release" in done.stderr


# -------------------------------------------------------------------------------------- what the growth is made of

MOE = {"model_type": "qwen3_moe", "num_hidden_layers": 48, "num_attention_heads": 32, "num_key_value_heads": 4,
       "head_dim": 128, "hidden_size": 2048, "num_experts": 128, "num_experts_per_tok": 8}  # fmt: skip
EXPERTS, DENSE = 16_300_000_000, 1_500_000_000  # a 30B-A3B in four bits
MOE_ROW, HYBRID_ROW = 2 * 48 * 4 * 128 * 2, 24_576
HYBRID_STATE = 36 * 4 * (3 * 8192 + 32 * 128 * 128)  # Qwen3-Next's, as worked out in the models' tests


def dense_step(n: int, context: float) -> tuple[float, float, float]:
    return Q4, n * context * ROW, 0.0


def moe_step(n: int, context: float) -> tuple[float, float, float]:
    return DENSE + EXPERTS * (1 - (120 / 128) ** n), n * context * MOE_ROW, 0.0


def hybrid_step(n: int, context: float) -> tuple[float, float, float]:
    return DENSE, n * context * HYBRID_ROW, 2.0 * n * HYBRID_STATE


def moe_files(folder: Path) -> tuple[object, ...]:
    write_config(folder, MOE)
    tensors = {"model.layers.0.self_attn.q_proj.weight": DENSE, "model.layers.0.mlp.experts.0.up_proj.weight": EXPERTS}
    write_safetensors(folder / "model.safetensors", tensors, data=False)
    return "--config", folder


def hybrid_files(folder: Path) -> tuple[object, ...]:
    dense = {name: value for name, value in CONFIGS["qwen3-next-80b"].items() if "expert" not in name}
    return "--config", write_config(folder, dense), "--weights-bytes", DENSE


ON_THE_LIMIT: dict[str, tuple[Callable[[Path], tuple[object, ...]], Any, float, str]] = {
    # name: (options that name the model, bytes of a step of n sequences, prompt tokens, what most of the growth is)
    "dense, short": (lambda folder: (), dense_step, 36.0, "cache"),
    "dense, long": (lambda folder: (), dense_step, 3000.0, "cache"),
    "experts, short": (moe_files, moe_step, 36.0, "weights"),
    "experts, 32k": (moe_files, moe_step, 32_000.0, "cache"),
    "recurrent, short": (hybrid_files, hybrid_step, 36.0, "state"),
}


@pytest.mark.parametrize("name", list(ON_THE_LIMIT))
@pytest.mark.parametrize("efficiency", [1.0, 0.6])
def test_a_curve_on_the_bandwidth_limit_is_never_called_anything_else(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, name: str, efficiency: float
) -> None:
    """The bytes are worked out here, not by the program. At 60 % of the bandwidth the growth is still mostly bytes."""
    files, step, prompt, reason = ON_THE_LIMIT[name]
    steps = {c: sum(step(c, prompt + 64)) / BANDWIDTH / efficiency for c in LEVELS}
    records = [level(c, tpot_ms=tpot, prompt_tokens_mean=prompt) for c, tpot in steps.items()]
    shown = Shown(capsys, notebook(tmp_path, *records), "--bandwidth", 273, *files(tmp_path))
    assert shown.growth["reason"] == reason
    assert shown.growth["share"] == pytest.approx(efficiency)
    assert shown.rows("mbu") == pytest.approx([efficiency] * 4)
    grown = [high - low for low, high in zip(step(1, prompt + 64), step(20, prompt + 64))]
    parts = shown.growth["bytes_ms_by_kind"]
    assert [parts[kind] for kind in ("weights", "cache", "state")] == pytest.approx(
        [part / BANDWIDTH for part in grown]
    )
    assert "beyond" not in shown.text and "compute" not in shown.text and "above the bandwidth" not in shown.text


@pytest.mark.parametrize(
    ("beyond_ms", "b_ms", "prompt", "reason", "says"),
    [
        (0, 1.5, 36.0, "beyond", "mostly time beyond the bytes"),
        (0, 1.99 * LONG, 3000.0, "cache", "mostly bytes read, 50 % of it; the largest part: KV cache"),
        (0, 2.01 * LONG, 3000.0, "beyond", "mostly time beyond the bytes"),
        (9, 0.8 * LONG, 3000.0, "cache", "more than all of it (125 %): the time beyond them shrank"),
        (9, 0.01, 36.0, "flat", "nothing to explain"),
    ],
)
def test_growth_is_bytes_where_they_are_half_of_it_and_worth_a_sentence(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, beyond_ms: float, b_ms: float, prompt: float, reason: str,
    says: str,
) -> None:  # fmt: skip
    """LONG is what reading a cache of 3,064 tokens takes."""
    records = [level(c, Q4 / BANDWIDTH + beyond_ms, b_ms, prompt_tokens_mean=prompt) for c in LEVELS]
    shown = Shown(capsys, notebook(tmp_path, *records), "--bandwidth", 273)
    assert shown.growth["reason"] == reason and says in shown.text
    assert shown.growth["grown_ms"] == pytest.approx(19 * b_ms)


def test_a_bandwidth_that_is_not_reached_is_no_other_limit(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """All of the step's growth is bytes, read at 40 % of the bandwidth that was stated: the text names that reading."""
    records = [level(c, tpot_ms=sum(dense_step(c, 3064)) / BANDWIDTH / 0.4, prompt_tokens_mean=3000.0) for c in LEVELS]
    shown = Shown(capsys, notebook(tmp_path, *records), "--bandwidth", 273)
    assert shown.growth["reason"] == "beyond" and shown.growth["share_at_reached_bandwidth"] == pytest.approx(1.0)
    assert "at the bandwidth that c=1 reached, the bytes would be 100 % of it" in shown.text


# ------------------------------------------------------------------------------------------------ whole and odd input


def test_the_prediction_equals_what_an_engine_of_that_a_and_b_does(
    run_program: RunProgram, sim_engine: SimEngineFactory, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """An engine whose step takes 40 + 4 c ms is measured; a machine on which weights and cache take exactly that long
    to read is predicted. (Wide of every boundary: the gains per added request are 15.2, 8.3 and 4.2 tok/s against
    11.4, the TPOTs 44, 60, 80 and 120 ms against 70.)"""
    engine = sim_engine("--a-ms", 40, "--b-ms", 4, "--slots", 20, "--prefill-tok-s", 10_000_000)
    book = tmp_path / "labbook.md"
    done = run_program(
        "load_test.py", "--base-url", engine.base_url, "--label", "L", "--concurrency", "1,5,10,20", "--requests", 3,
        "--min-rounds", 1, "--max-tokens", 24, "--slo-tpot", 0.07, "--server-slots", 20, "--labbook", book,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    weights = ("--layers", 1, "--kv-heads", 1, "--weights-bytes", 4_000_000_000, "--bandwidth", 100)
    context = Shown(capsys, book, *weights, "--head-dim", 1).rows("context")[0]
    dim = round(4e8 / context / 4)  # so that context x (2 x head dim x 2 bytes) takes 4 ms at 100 GB/s
    shown = Shown(capsys, book, *weights, "--head-dim", dim)
    predicted = shown.machine["predicted"]
    assert (predicted["a_ms"], predicted["b_ms"]) == (pytest.approx(40, rel=0.02), pytest.approx(4, rel=0.02))
    assert shown.machine["predicted_knee_between"] == shown.document["knee_between"] == [5, 10]
    assert shown.document["operating_point"] == 5
    assert shown.growth["reason"] == "cache"


FIELDS = sorted(level(1).keys() - {"lab", "label", "ttft_s", "concurrency"})
JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=3),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["p50", "p90", "x"]), inner, max_size=3)
    ),
    max_leaves=6,
)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(LEVELS), st.dictionaries(st.sampled_from(FIELDS), JSON_VALUES, max_size=4)),
                min_size=1, max_size=5))  # fmt: skip
def test_no_record_ends_in_a_traceback(
    tmp_path_factory: pytest.TempPathFactory, changes: list[tuple[int, dict[str, Any]]]
) -> None:
    path = notebook(tmp_path_factory.mktemp("book"), *({**level(c), **change} for c, change in changes))
    for extra in ([], ["--json"]):
        options = sa.build_parser().parse_args(["--measured", str(path), "--label", "L", "--bandwidth", "273", *extra])
        try:
            shown, code = sa.run(sa.parse_options(options))
        except (sa.UsageError, sa.ResultError):
            continue
        assert code == 0 and shown
