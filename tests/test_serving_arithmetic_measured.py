"""Prediction meets measurement: what is read from a notebook, the fit, the shares, and what explains the knee."""

from __future__ import annotations

import contextlib
import io
import json
import random
import sys
from pathlib import Path
from typing import Any

import pytest
from conftest import RunProgram, SimEngineFactory
from hypothesis import given, settings
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import serving_arithmetic as sa
import summarise_load

LEVELS = (1, 5, 10, 20)


def level(c: int, a_ms: float = 20.0, b_ms: float = 1.5, slots: int = 20, **changes: Any) -> dict[str, Any]:
    """A record of a level in which a step takes a + b n for the n = min(c, slots) that decode together."""
    together = min(c, slots)
    tpot = (a_ms + b_ms * together) / 1000
    record: dict[str, Any] = {
        "lab": sa.LAB, "schema": 2, "label": "llama-baseline", "run_id": "20261129T233000-aaaaaaaa", "repeat": 0,
        "recorded_at": "2026-11-29T23:30:00+01:00", "engine": "llama.cpp", "quant": "Q4_K_M", "server_slots": slots,
        "context_length": 4096, "concurrency": c, "requests": 40, "completed": 40, "failed": 0, "interrupted": False,
        "output_tokens": 40 * 128, "output_tokens_per_s": together / tpot, "prompt_tokens_mean": 36.0,
        "slo_ttft_s": 2.0, "slo_tpot_s": 0.1, "max_tokens": 128, "prompt_set": "mixed", "model": "local-chat",
        "ttft_s": {"p50": 0.1, "p90": 0.2}, "tpot_s": {"p50": tpot, "p90": tpot}, "server": None,
    }  # fmt: skip
    return {**record, **changes}


def notebook(folder: Path, *records: dict[str, Any]) -> Path:
    path = folder / "labbook.md"
    path.write_text("".join(json.dumps(record, sort_keys=True) + "\n" for record in records), encoding="utf-8")
    return path


def measured(capsys: pytest.CaptureFixture[str], path: Path, *args: object) -> dict[str, Any]:
    assert sa.main(["--measured", str(path), *map(str, args), "--json"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    answer = json.loads(out)
    assert isinstance(answer, dict)
    return answer


# ------------------------------------------------------------------------------------------------- the two lines


def test_predicted_beside_fitted(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """a = 20 ms, b = 1.5 ms: ceiling 666.7, 100 ms met at c = 53.3, knee between 5 and 10."""
    path = notebook(tmp_path, *map(level, LEVELS))
    answer = measured(capsys, path, "--label", "llama-baseline", "--bandwidth", 273)
    fitted, (predicted,) = answer["fitted"], answer["predicted"]
    assert (round(fitted["a_ms"], 6), round(fitted["b_ms"], 6)) == (20.0, 1.5)
    assert round(fitted["ceiling_tokens_per_s"], 1) == 666.7
    assert round(fitted["concurrency_at_objective"], 1) == 53.3
    assert fitted["knee_between"] == answer["knee_between"] == [5, 10]
    assert fitted["last_level_within_objective"] == answer["operating_point"] == 20
    assert answer["context"] == 36 + 128 / 2
    assert predicted["a_ms"] == pytest.approx(4_671_766_528 / 273e9 * 1000)
    assert predicted["b_ms"] == pytest.approx(100 * 147_456 / 273e9 * 1000)
    assert answer["peak"] == {"c": 20, "output_tokens_per_s": pytest.approx(400.0)}
    ceiling = 20 * 273e9 / (4_671_766_528 + 20 * 100 * 147_456)
    assert answer["peak_share_of_ceiling"]["273 GB/s"] == pytest.approx(400 / ceiling)


def test_without_a_bandwidth_the_labs_machines_are_shown(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    answer = measured(capsys, notebook(tmp_path, *map(level, LEVELS)))
    assert [line["name"] for line in answer["predicted"]] == [machine.name for machine in sa.LAB_MACHINES]
    assert answer["knee_explained_by"] == "unknown", "which of them it is, only the user knows"


def test_the_text_names_formula_and_inputs(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = notebook(tmp_path, *map(level, LEVELS))
    assert sa.main(["--measured", str(path), "--label", "llama-baseline", "--bandwidth", "273"]) == 0
    shown = capsys.readouterr().out
    for part in (
        "5,021,827,072 - 350,060,544 (embedding look-up) = 4,671,766,528 B",
        "context = mean prompt 36.0 + half of mean output 128.0 = 100.0 tokens",
        "cache of one sequence = 100.0 x 147,456 B (f16, the default) = 14,745,600 B",
        "fitted by least squares to the p50 at c = 1, 5, 10, 20, those at or below 20 slots (4 points)",
        "fitted                  20.000    1.5000          666.7",
        "273 GB/s                17.113    0.0540",
        "fitted / predicted for 273 GB/s: a 1.17, b 27.77",
        "peak 400.0 tok/s at c=20 is 36.4 % of the ceiling there",
        "Knee measured: between c=5 and c=10; explained by: compute",
        "Operating point measured (no failure, both p90s inside the objective): c=20",
    ):
        assert part in shown


def test_only_levels_at_or_below_the_slots_enter_the_fit(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = notebook(tmp_path, *(level(c, 25, 2, slots=8) for c in LEVELS))
    answer = measured(capsys, path, "--bandwidth", 273)
    assert answer["fit_levels"] == [1, 5] and round(answer["fitted"]["b_ms"], 6) == 2.0
    shares = {row["c"]: row for row in answer["levels"]}
    assert shares[20]["batch"] == 8 and shares[20]["ceiling_tokens_per_s"] == shares[10]["ceiling_tokens_per_s"]
    stated = measured(capsys, path, "--bandwidth", 273, "--slots", 10)
    assert stated["fit_levels"] == [1, 5, 10]


def test_the_cache_type_and_the_weights_follow_the_record(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = notebook(tmp_path, *(level(c, quant="Q4_K_M, KV q8_0") for c in LEVELS))
    answer = measured(capsys, path, "--bandwidth", 273)
    assert answer["kv_type"] == "q8_0" and answer["bytes_per_token"] == 78_336
    assert measured(capsys, path, "--bandwidth", 273, "--kv-type", "f16")["kv_type"] == "f16"
    awq = measured(capsys, notebook(tmp_path, *(level(c, quant="AWQ") for c in LEVELS)), "--bandwidth", 273)
    assert awq["weights"]["name"] == "AWQ safetensors"
    shape = ("--layers", 1, "--kv-heads", 1, "--head-dim", 8, "--weights-bytes", 1000)
    assert measured(capsys, path, *shape)["weights"]["total_bytes"] == 1000


def test_more_than_the_ceiling_means_a_wrong_input(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = notebook(tmp_path, *(level(c, 1, 0.1) for c in LEVELS))
    assert sa.main(["--measured", str(path), "--bandwidth", "273"]) == 0
    assert "above the ceiling, so an input is wrong" in capsys.readouterr().out


def analysed(path: Path) -> dict[str, Any]:
    """What the analyser's --json says of the label."""
    shown = io.StringIO()
    with contextlib.redirect_stdout(shown):
        assert summarise_load.main(["--labbook", str(path), "--label", "llama-baseline", "--json"]) == 0
    answer = json.loads(shown.getvalue())
    assert isinstance(answer, dict)
    return answer


@settings(max_examples=50, deadline=None)
@given(st.floats(0.5, 200), st.floats(0, 20), st.integers(1, 40), st.randoms(use_true_random=False))
def test_the_analyser_and_the_arithmetic_fit_the_same_line(
    tmp_path_factory: pytest.TempPathFactory, a: float, b: float, slots: int, chance: random.Random
) -> None:
    """Two programs, two implementations, one definition."""
    records = [level(c, a, b, slots, repeat=repeat) for c in LEVELS for repeat in range(chance.randint(1, 3))]
    for record in records:
        record["tpot_s"] = {"p50": round(record["tpot_s"]["p50"] * chance.uniform(0.9, 1.1), 6), "p90": 0.1}
        record["output_tokens_per_s"] = round(record["output_tokens_per_s"] * chance.uniform(0.9, 1.1), 4)
    path = notebook(tmp_path_factory.mktemp("book"), *records)
    ours, theirs = sa.measure(str(path), "llama-baseline", None), analysed(path)
    between = theirs["knee"]["between"]
    assert ours.knee_between == (tuple(between) if between else None)
    assert ours.operating_point == theirs["operating_point"]
    fit = theirs["fit"]
    assert (ours.fitted is None) == (fit is None)
    if ours.fitted is not None:
        assert (ours.fitted.a_ms, ours.fitted.b_ms) == pytest.approx((fit["a_ms"], fit["b_ms"]), abs=1e-9)
        assert list(ours.fit_levels) == fit["levels"] and ours.fit_points == fit["points"]
        assert ours.fitted.ceiling_tokens_per_s == pytest.approx(fit["ceiling_tokens_per_s"])


# ----------------------------------------------------------------------------------------------- reading a notebook


def test_records_hide_behind_nothing(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    lines = [json.dumps(level(c)) for c in LEVELS]
    text = (
        "\ufeff# Lab book\r\n```json\r\n" + lines[0] + "\r\n```\r\n  - " + lines[1] + "\r\n> " + lines[2]
        + "\r\n    " + lines[3] + "   \r\nwe saw {odd} things [1]\r\n{ not json\r\n123\r\n{\"lab\": \"another\"}\r\n"
    )  # fmt: skip
    path = tmp_path / "labbook.md"
    path.write_bytes(text.encode())
    answer = measured(capsys, path, "--bandwidth", 273)
    assert answer["fit_levels"] == [1, 5, 10, 20] and answer["notes"] == []


def test_damaged_lines_are_left_out_and_named(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = notebook(tmp_path, *map(level, LEVELS))
    whole = path.read_text(encoding="utf-8")
    torn = json.dumps(level(40), sort_keys=True)
    infinite = torn.replace('"failed": 0', '"failed": NaN')
    path.write_text(whole + torn[:-9] + "\n" + infinite + "\n", encoding="utf-8")
    answer = measured(capsys, path, "--bandwidth", 273)
    assert answer["fit_levels"] == [1, 5, 10, 20]
    assert [note.split(":")[0] for note in answer["notes"]] == ["line 5", "line 6"]


def test_the_newest_run_counts_with_its_repeats(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    old = [level(c, 50, 9, run_id="20261128T100000-ffffffff") for c in LEVELS]
    new = [level(c, a, 1.5, run_id="20261129T100000-00000000", repeat=r) for c in LEVELS for r, a in ((0, 19), (1, 21))]
    for records in (old + new, new + old):
        answer = measured(capsys, notebook(tmp_path, *records), "--bandwidth", 273)
        assert round(answer["fitted"]["a_ms"], 6) == 20.0 and answer["fit_points"] == 8


OLDER: dict[str, Any] = {"recorded_at": "2026-11-29T10:00:00+01:00"}
NEWER: dict[str, Any] = {"recorded_at": "2026-11-29T09:30:00Z"}


@pytest.mark.parametrize(
    "records",
    [
        [level(1, 50, run_id="zz", **OLDER), level(1, 20, run_id="aa", **NEWER)],
        [level(1, 20, run_id="aa", **NEWER), level(1, 50, run_id="zz", **OLDER)],
        [level(1, 50, run_id="aa"), level(1, 20, run_id="zz")],
        [level(1, 20, run_id="zz"), level(1, 50, run_id="aa")],
        [level(1, 50, run_id="aa", recorded_at=None), level(1, 20, run_id="zz", **OLDER)],
        [level(1, 50, schema=1, **OLDER), level(1, 20, run_id="aa", **NEWER)],
        [level(1, 20, run_id="aa", **NEWER), level(1, 50, schema=1, **OLDER)],
        [level(1, 50, run_id="aa", **OLDER), level(1, 20, schema=1, **NEWER)],
        [level(1, 50, schema=1, **NEWER), level(1, 20, schema=1, **OLDER)],
        [level(1, 20, run_id="aa", **OLDER), level(1, 50, run_id="zz", schema=3, **NEWER)],
        [level(1, 20, run_id="aa", **OLDER), level(1, 50, run_id="zz", schema="2", **NEWER)],
        [level(1, 50, run_id=None, **OLDER), level(1, 20, run_id=None, **NEWER)],
        [*(level(1, 50 + number, run_id=None) for number in range(9)), level(1, 20, run_id=None)],  # line 10, not 9
    ],
)
def test_both_programs_choose_the_same_run(tmp_path: Path, records: list[dict[str, Any]]) -> None:
    """By the instant recorded, then the run id, then the place; the run to choose has a TPOT of 21.5 ms."""
    path = notebook(tmp_path, *records)
    _, (ours,), _, _ = sa.label_levels(str(path), None)
    curve = summarise_load.find_curve(summarise_load.read_notebook(str(path)), "llama-baseline")
    assert curve.levels[0].figure("tpot_s.p50") == ours.median("tpot_s", "p50") == 0.0215


def test_a_line_of_a_later_version_is_named(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    answer = measured(capsys, notebook(tmp_path, *map(level, LEVELS), level(40, schema=3)), "--bandwidth", 273)
    assert answer["fit_levels"] == [1, 5, 10, 20]
    assert answer["notes"] == ["line 5: format version 3 is not known here (1 and 2 are); left out"]


def test_interrupted_levels_never_count(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    torn = [level(c, 90, 9, run_id="20261130T100000-bbbbbbbb", interrupted=True) for c in LEVELS]
    answer = measured(capsys, notebook(tmp_path, *map(level, LEVELS), *torn), "--bandwidth", 273)
    assert round(answer["fitted"]["a_ms"], 6) == 20.0


def test_version_1_lines_read_and_the_last_one_counts(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    def first_version(c: int, a_ms: float) -> dict[str, Any]:
        record = level(c, a_ms)
        for name in ("schema", "run_id", "repeat", "interrupted", "server"):
            del record[name]
        return record

    undefined = {**first_version(40, 20), "server_slots": 0, "tpot_s": {"p50": 0.0, "p90": 0.0}}
    records = [first_version(c, a_ms) for a_ms in (70, 20) for c in LEVELS]
    answer = measured(capsys, notebook(tmp_path, *records, undefined), "--bandwidth", 273)
    assert answer["fit_levels"] == [1, 5, 10, 20], "a TPOT of 0.0 was version 1's word for none"
    assert round(answer["fitted"]["a_ms"], 6) == 20.0
    newer = [level(c, 30) for c in LEVELS]
    answer = measured(capsys, notebook(tmp_path, *records, *newer), "--bandwidth", 273)
    assert round(answer["fitted"]["a_ms"], 6) == 30.0


@pytest.mark.parametrize(
    ("records", "args", "code", "says"),
    [
        ([], (), 1, "no level record in"),
        ([level(1)], ("--label", "nope"), 1, "no label 'nope'"),
        ([level(1), level(1, label="other")], (), 2, "needs --label; "),
        ([level(1, completed=0)], (), 1, "no level with a completed request"),
        ([level(1, interrupted=True)], (), 1, "no level record in"),
        ([level(1)], ("--kv-type", "f16,q8_0"), 2, "one type here"),
        ([level(1)], ("--layers", 1, "--kv-heads", 1, "--head-dim", 1), 2, "needs the weights"),
    ],
)
def test_a_notebook_that_does_not_answer(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, records: list[dict[str, Any]], args: tuple[object, ...],
    code: int, says: str,
) -> None:  # fmt: skip
    path = notebook(tmp_path, *records)
    assert sa.main(["--measured", str(path), *map(str, args)]) == code
    out, err = capsys.readouterr()
    assert out == "" and says in err and err.count("\n") == 1


def test_utf_16_is_said(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "labbook.md"
    path.write_text(json.dumps(level(1)), encoding="utf-16")
    assert sa.main(["--measured", str(path)]) == 2
    assert "is UTF-16" in capsys.readouterr().err


def test_one_level_has_no_line_and_says_so(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = notebook(tmp_path, level(20))
    answer = measured(capsys, path, "--bandwidth", 273)
    assert answer["fitted"] is None and answer["knee_between"] is None
    assert sa.main(["--measured", str(path), "--bandwidth", "273"]) == 0
    assert "not possible: it needs a TPOT at two different levels" in capsys.readouterr().out


@pytest.mark.parametrize("number", [1e300, 10**200, -1e308])
@pytest.mark.parametrize("field", ["output_tokens", "prompt_tokens_mean", "output_tokens_per_s", "completed"])
def test_a_figure_that_cannot_have_been_measured_is_damage(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, field: str, number: float
) -> None:
    path = notebook(tmp_path, *map(level, LEVELS), {**level(40), field: number})
    (note,) = measured(capsys, path)["notes"]
    assert note.startswith(f"line 5: {field} is ") and note.endswith("beyond anything that can be measured; left out")


def test_a_quotient_beyond_a_float_is_null_in_json(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    tiny = {"p50": 5e-324, "p90": 5e-324}
    path = notebook(tmp_path, level(1, tpot_s={"p50": 0.0, "p90": 0.0}), level(5, tpot_s=tiny), level(10, tpot_s=tiny))
    measured(capsys, path, "--bandwidth", "1e12")
    monster = sa.finite({"a": [float("inf"), (1.5, float("nan"))]})
    assert monster == {"a": [None, [1.5, None]]}


FIELDS = sorted(level(1).keys() - {"lab", "label", "ttft_s", "concurrency"})
JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=3),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["p50", "p90", "x"]), inner, max_size=3)
    ),
    max_leaves=6,
)


@settings(max_examples=300, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(LEVELS), st.dictionaries(st.sampled_from(FIELDS), JSON_VALUES, max_size=4)),
                min_size=1, max_size=5))  # fmt: skip
def test_no_record_ends_in_a_traceback(
    tmp_path_factory: pytest.TempPathFactory, changes: list[tuple[int, dict[str, Any]]]
) -> None:
    path = notebook(tmp_path_factory.mktemp("book"), *({**level(c), **change} for c, change in changes))
    for extra in ([], ["--json"]):
        options = sa.build_parser().parse_args(["--measured", str(path), "--bandwidth", "273", *extra])
        try:
            shown, code = sa.run(sa.parse_options(options))
        except (sa.UsageError, sa.ResultError):
            continue
        assert code == 0 and shown


# ---------------------------------------------------------------------------------------- what explains the knee


def explained(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, *records: dict[str, Any], **more: Any
) -> tuple[str, str]:
    args = [
        part for name, value in {"bandwidth": 273, **more}.items() for part in (f"--{name.replace('_', '-')}", value)
    ]
    answer = measured(capsys, notebook(tmp_path, *records), *args)
    return answer["knee_explained_by"], answer["knee_explanation"]


def test_compute(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    code, sentence = explained(capsys, tmp_path, *map(level, LEVELS))
    assert code == "compute"
    assert "from c=1 to c=10 the step grew by 13.50 ms" in sentence and "0.0540 x 9 = 0.49 ms" in sentence
    assert f"{(13.5 - 9 * 14_745_600 / 273e6) / 9:.2f} ms each" in sentence


def test_bandwidth(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """With long contexts the cache's own bytes fill the step: b is what the prediction says."""
    b_ms = 3064 * 147_456 / 273e6
    records = [level(c, 17.1, b_ms, prompt_tokens_mean=3000.0) for c in LEVELS]
    code, sentence = explained(capsys, tmp_path, *records)
    assert code == "bandwidth" and "(100 %)" in sentence


def test_slots(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    records = [level(c, 20, 0.1, slots=8) for c in LEVELS]
    code, sentence = explained(capsys, tmp_path, *records)
    assert code == "slots" and "c=20 is above 8 slots: 12 requests wait" in sentence
    records[3]["server"] = {"peak_deferred": 12}
    assert "up to 12 requests were seen waiting" in explained(capsys, tmp_path, *records)[1]


def test_pool(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    records = [level(c, 20, 0.1) for c in LEVELS]
    records[3]["output_tokens_per_s"] = records[2]["output_tokens_per_s"] * 1.05
    assert explained(capsys, tmp_path, *records)[0] == "other", "nothing in the records speaks of the pool yet"
    records[3]["server"] = {"preemptions": 7}
    code, sentence = explained(capsys, tmp_path, *records)
    assert code == "pool" and "preempted 7 requests at c=20" in sentence
    records[3]["server"] = {"peak_cache_usage": 1.0, "peak_waiting": 9}
    assert explained(capsys, tmp_path, *records)[0] == "pool"
    records[3]["server"] = None
    pool_gib = 2000 * 147_456 / sa.GIB  # 20 x 164 tokens = 3,280 do not fit in 2,000
    code, sentence = explained(capsys, tmp_path, *records, available_kv=pool_gib)
    assert code == "pool" and "c=20 x 164.0 tokens = 3280, more than the pool's 2,000" in sentence
    assert explained(capsys, tmp_path, *records, available_kv=10)[0] == "other"


def test_neither(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert explained(capsys, tmp_path, *(level(c, 20, 0.01) for c in LEVELS))[0] == "not_reached"
    records = [level(c, 20, 0.01) for c in LEVELS]
    for record in records[1:]:
        record["output_tokens_per_s"] = 60.0
    code, sentence = explained(capsys, tmp_path, *records)
    assert code == "other" and "look at prefill" in sentence
    for record in records:
        record["tpot_s"] = {"p50": None, "p90": None}
    assert explained(capsys, tmp_path, *records)[0] == "unknown"


# --------------------------------------------------------------------------------- against the simulated engine


def test_the_prediction_equals_what_an_engine_of_that_a_and_b_does(
    run_program: RunProgram, sim_engine: SimEngineFactory, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """An engine whose step takes 40 + 4 c ms is measured; a machine on which weights and cache take exactly that long
    to read is predicted. Ceiling, knee and operating point are the same. (Wide of every boundary: the gains per added
    request are 15.2, 8.3 and 4.2 tok/s against 11.4, the TPOTs 44, 60, 80 and 120 ms against 70.)"""
    engine = sim_engine("--a-ms", 40, "--b-ms", 4, "--slots", 20, "--prefill-tok-s", 10_000_000)
    book = tmp_path / "labbook.md"
    done = run_program(
        "load_test.py", "--base-url", engine.base_url, "--label", "sim", "--concurrency", "1,5,10,20", "--requests", 3,
        "--min-rounds", 1, "--max-tokens", 24, "--slo-tpot", 0.07, "--server-slots", 20, "--labbook", book,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    weights = ("--layers", 1, "--kv-heads", 1, "--weights-bytes", 4_000_000_000, "--bandwidth", 100)
    context = measured(capsys, book, *weights, "--head-dim", 1)["context"]
    dim = round(4e8 / context / 4)  # so that context x (2 x head dim x 2 bytes) takes 4 ms at 100 GB/s
    answer = measured(capsys, book, *weights, "--head-dim", dim)
    (predicted,) = answer["predicted"]
    assert (predicted["a_ms"], predicted["b_ms"]) == (40.0, pytest.approx(4.0, rel=1e-4))
    assert predicted["ceiling_tokens_per_s"] == pytest.approx(250.0, rel=1e-4)
    assert predicted["knee_between"] == answer["knee_between"] == [5, 10]
    assert predicted["last_level_within_objective"] == answer["operating_point"] == 5
    assert answer["knee_explained_by"] == "bandwidth"


def test_the_settings_of_a_label_are_those_of_its_newest_record(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """As summarise_load.py has it: one label must not be fitted over other levels here."""
    records = [
        level(20, 24.5, 0.5, 8, server_slots=8, **OLDER),
        *(level(c, server_slots=20, recorded_at="2026-11-30T10:00:00+01:00") for c in (1, 5, 10)),
    ]
    answer = measured(capsys, notebook(tmp_path, *records), "--bandwidth", 273)
    assert answer["fit_levels"] == [1, 5, 10, 20]
