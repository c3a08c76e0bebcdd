"""The derived figures, against worked examples and published tables; and what two labels' runs show of a difference."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
from honest_levels import LEVELS, Load, curve_of, decimals, exact, level_record, simulate, unrounded

import summarise_load as sl


def brief(c: int, repeat: int, **figures: Any) -> dict[str, Any]:
    """A record of little more than some figures, for tests that need thousands."""
    return {"label": "x", "schema": 2, "run_id": "r", "concurrency": c, "repeat": repeat, "completed": 40, **figures}


def text_of(curve: sl.Curve) -> str:
    return sl.label_text(sl.curve_document(curve), colour=False)


def test_worked_example() -> None:
    """a = 20 ms, b = 1.5 ms."""
    curve = curve_of(*(exact(c) for c in LEVELS))
    assert [round(rate, 1) for _, rate in curve.rates] == [46.5, 181.8, 285.7, 400.0]
    assert [round(curve.scaling(level) or 0, 2) for level in curve.levels] == [1.00, 0.78, 0.61, 0.43]
    assert curve.knee == (5, 10) and curve.operating_point == 20
    assert curve.fit is not None and curve.fit.levels == LEVELS and curve.fit.largest_residual < 1e-9
    text = text_of(curve)
    assert "\nknee: between c=5 and c=10\n" in text and "\nTPOT p50 ~ 20.00 ms + 1.500 ms x c " in text
    assert "\nceiling 666.7 tok/s (1/b; extrapolated, measured 1 to 20; not reached: only 20 slots decode" in text
    assert (
        "\nTPOT SLO 100 ms met at c = 53.3 (extrapolated, measured 1 to 20; not reached: only 20 slots decode" in text
    )
    assert "if every request were always decoding" in text and "c=20: 400.0 tok/s, measured 400.0\n" in text
    assert [line.split()[2:4] for line in text.splitlines() if line.startswith("20 ")] == [["400.0", "0.43"]]


def test_second_worked_example() -> None:
    """a = 25 ms, b = 2 ms."""
    fit = curve_of(*(exact(c, 25.0, 2.0) for c in LEVELS)).fit
    assert fit is not None and fit.ceiling is not None
    found = (fit.ceiling, fit.c_at(0.1) or 0, fit.throughput(20) or 0)
    assert [round(value, 1) for value in found] == [500.0, 37.5, 307.7]


def test_above_the_slots_only_the_slots_decode() -> None:
    """10 slots, a = 20, b = 1.5: 285.7 at c = 20 in text and document, not 400.
    https://github.com/ggml-org/llama.cpp/issues/17300 https://github.com/ggml-org/llama.cpp/issues/5247"""
    queued = exact(20, output_tokens_per_s=285.7, tpot_s=dict.fromkeys(sl.STATISTICS, 0.035), server_slots=10)
    curve = curve_of(*(exact(c, server_slots=10) for c in (1, 5, 10)), queued)
    assert curve.fit is not None and curve.fit.levels == (1, 5, 10) and round(curve.fit.b_ms, 3) == 1.5
    document = sl.curve_document(curve)
    assert round(document["levels"][3]["decode_bound_output_tokens_per_s"], 1) == 285.7
    assert document["levels"][3]["in_fit"] is False
    text = text_of(curve)
    assert "c=20: 285.7 tok/s, measured 285.7 (10 slots decode together)" in text
    assert "extrapolated, measured 1 to 10; not reached: only 10 slots decode together" in text
    unknown = curve_of(*(exact(c, server_slots=None) for c in LEVELS))
    assert unknown.fit is not None and unknown.fit.levels == LEVELS
    assert "not reached: only" not in text_of(unknown)


def test_an_slo_inside_the_levels_needs_no_note() -> None:
    document = sl.curve_document(curve_of(*(exact(c, slo_tpot_s=0.035) for c in LEVELS)))
    assert round(document["fit"]["c_at_slo"], 1) == 10.0 and document["fit"]["c_at_slo_note"] is None
    below = sl.curve_document(curve_of(*(exact(c, slo_tpot_s=0.015) for c in LEVELS)))
    assert below["fit"]["c_at_slo"] is None and "below a" in below["fit"]["c_at_slo_note"]
    assert below["operating_point"] is None and "No level measured stays inside" in below["answer"]["text"]


def test_levels_sort_by_c_and_big_figures_have_no_separators() -> None:
    curve = curve_of(*(exact(c, 0.2, 0.001) for c in (20, 1, 10, 5)))
    rows = [line.split() for line in text_of(curve).splitlines() if line[:1].isdigit()]
    assert [row[0] for row in rows] == ["1", "5", "10", "20"] and float(rows[-1][2]) > 10000


@pytest.mark.parametrize(
    ("freedom", "published"),
    [(1, 12.706), (2, 4.303), (3, 3.182), (4, 2.776), (5, 2.571), (6, 2.447), (7, 2.365), (8, 2.306), (9, 2.262),
     (10, 2.228), (15, 2.131), (20, 2.086), (30, 2.042), (60, 2.000), (120, 1.980)],
)  # fmt: skip
def test_student_t_against_the_published_table(freedom: int, published: float) -> None:
    assert round(sl.student_t(freedom), 3) == published
    assert round(sl.student_t(2, 0.99), 3) == 9.925
    assert sl.student_t(freedom + 1) < sl.student_t(freedom + 0.5) < sl.student_t(freedom)


def test_interval_for_b_against_a_textbook_regression() -> None:
    """Heights and weights of American women (30 to 39, 15 points): slope 3.45, standard error 0.09114, t for 13
    degrees of freedom 2.160."""
    weights = (115, 117, 120, 123, 126, 129, 132, 135, 139, 142, 146, 150, 154, 159, 164)
    fit = sl.fit_line(list(zip(range(58, 73), weights)))
    assert fit is not None and fit.b_interval_ms is not None
    assert round(fit.a_ms, 3) == -87.517 and round(fit.b_ms, 2) == 3.45
    low, high = fit.b_interval_ms
    assert (high - low) / 2 == pytest.approx(2.1604 * 0.09114, rel=1e-3) and (low + high) / 2 == pytest.approx(fit.b_ms)


def test_the_interval_holds_the_true_b_19_times_of_20_whatever_the_repeats() -> None:
    """Repeats of a level share its error, so they are one point: as their own points they halve the interval."""
    rng = random.Random(3)
    held = 0
    for _ in range(600):
        tpots = {c: 20 + 1.5 * c + rng.gauss(0, 0.5) for c in LEVELS}
        runs = [
            brief(c, repeat, tpot_s={"p50": (tpots[c] + rng.gauss(0, 0.05)) / 1000})
            for c in LEVELS
            for repeat in range(3)
        ]
        fit = curve_of(*runs).fit
        assert fit is not None and fit.b_interval_ms is not None
        held += fit.b_interval_ms[0] <= 1.5 <= fit.b_interval_ms[1]
    assert 0.93 * 600 <= held <= 0.97 * 600


def test_degenerate_fits() -> None:
    assert sl.fit_line([]) is None and sl.fit_line([(5, 20.0), (5, 21.0)]) is None
    two = sl.fit_line([(1, 20.0), (5, 20.0)])
    assert two is not None and two.b_interval_ms is None and two.ceiling is None
    falling = text_of(curve_of(exact(1, 30, 0), exact(5, 20, 0), exact(10, 10, 0)))
    assert "ceiling: none implied (b is not above 0)" in falling and "ms - 2.213 ms x c" in falling
    one = text_of(curve_of(exact(1)))
    assert "TPOT fit: not enough points" in one and "knee: not enough points" in one
    negative = text_of(curve_of(*(exact(c, -2, 5) for c in (1, 5, 10))))
    assert "a is below 0, so no step time" in negative


def test_no_ceiling_rests_on_a_fit_that_misses_a_level_by_more_than_its_growth() -> None:
    """TPOT 20, 20.3, 20.1, 20.4 ms: a slope of 0.02 ms a request would be a ceiling of 60,000 tok/s."""
    flat = [exact(c, t, 0) for c, t in zip(LEVELS, (20.0, 20.3, 20.1, 20.4))]
    document = sl.curve_document(curve_of(*flat))
    assert document["fit"]["ceiling_tokens_per_s"] is None and document["fit"]["c_at_slo"] is None
    assert document["fit"]["ceiling_note"] == "b's 95 % interval includes 0"
    two = sl.fit_line([(1, 20.0), (20, 20.5)])
    assert two is not None and two.ceiling is None, "two runs of one setup differ by as much"
    bent = sl.fit_line([(1, 40.0), (5, 21.0), (10, 30.0), (20, 50.0)])
    assert bent is not None and bent.largest_residual > 0.3 and not bent.grows


def test_knee_is_a_step_between_measured_levels() -> None:
    # https://github.com/NVIDIA-NeMo/Guardrails/pull/2323 https://github.com/Avarok-Cybersecurity/atlas/issues/954
    assert sl.find_knee([(1, 20), (2, 41), (4, 78), (8, 76)]) == (4, 8)
    assert sl.find_knee([(1, 20), (2, 41), (4, 78)]) is None
    assert sl.find_knee([(4, 80), (8, 121), (16, 190)]) == (8, 16)  # the lowest level's throughput is 20 per request
    assert sl.find_knee([(1, 0.0), (2, 5.0)]) is None and sl.find_knee([]) is None
    assert "knee: not reached up to c=5" in text_of(curve_of(exact(1, 20, 0), exact(5, 20, 0)))


def test_scaling_starts_at_the_lowest_level_and_may_be_above_one() -> None:
    curve = curve_of(exact(5, 40, 0), exact(10, 20, 0))
    assert [curve.scaling(level) for level in curve.levels] == [pytest.approx(1.0), pytest.approx(2.0)]


NO_SUCCESS = level_record(
    Load(c=1, requests=4, failing=1.0), simulate(Load(c=1, requests=4, failing=1.0), random.Random(1)),
    decimals(6), decimals(4),
)  # fmt: skip


@pytest.mark.parametrize(
    ("level", "why"),
    [
        (NO_SUCCESS, "no completed request"),  # https://github.com/openshift-psap/llm-load-test/pull/54
        (exact(1, interrupted=True), "interrupted"),
        (exact(20, requests=10, completed=10), "10 requests never filled it"),
        (exact(20, arrival="request rate 5"), "open-loop (request rate 5)"),
    ],
)
def test_levels_that_enter_no_derived_figure_are_named(level: dict[str, Any], why: str) -> None:
    curve = curve_of(level, exact(5), exact(10))
    left_out = next(one for one in curve.levels if one.c == level["concurrency"])
    assert left_out.left_out and why in left_out.left_out and curve.scaling(left_out) is None
    assert curve.fit is not None and curve.fit.levels == (5, 10) and [one.c for one in curve.usable] == [5, 10]
    assert curve.operating_point == 10
    assert f"c={left_out.c} is left out of fit, knee and scaling: " in text_of(curve)
    alone = sl.curve_document(curve_of(level))
    assert (alone["operating_point"], alone["peak"], alone["fit"]) == (None, None, None)
    assert "knee: not enough points" in text_of(curve_of(level))


@pytest.mark.parametrize(
    ("changes", "point"),
    [
        ({}, 10),  # TPOT p90 of c = 20 is 50 ms
        ({10: {"failed": 1}}, 5),
        ({10: {"ttft_s": {"p90": 2.01}}}, 5),
        ({20: {"slo_tpot_s": 0.06}}, 20),  # each level against its own SLO
        ({1: {"slo_tpot_s": None}, 5: {"slo_tpot_s": None}, 10: {"slo_ttft_s": None}, 20: {}}, None),
        ({c: {"tpot_s": None} for c in LEVELS}, 20),  # outputs of one token have no TPOT to miss
        ({20: {"slo_tpot_s": None}}, 10),  # an SLO missing at the newest
    ],
)
def test_the_operating_point_is_the_highest_inside_its_own_slo(changes: dict[int, Any], point: int | None) -> None:
    curve = curve_of(*(exact(c, **{"slo_tpot_s": 0.04, **changes.get(c, {})}) for c in LEVELS))
    assert curve.operating_point == point and sl.curve_document(curve)["answer"]["c"] == point


@pytest.mark.parametrize(
    ("records", "words", "bound"),
    [
        ([exact(c) for c in LEVELS], ["At least 20 requests in flight stay inside TTFT 2 s and TPOT 100 ms (p90)",
                                      "20.0 tokens/s", "20 is the highest level measured", "variance unknown"], True),
        ([exact(c, slo_tpot_s=0.04) for c in LEVELS], ["Up to 10 requests", "each then getting 28.6 tokens/s",
                                                       "20 is outside (TPOT p90 50 ms)"], False),
        ([exact(1), exact(5, failed=2), exact(10)], ["At least 10 requests", "yet c=5 was outside"], True),
        ([exact(1), exact(5, completed=0, failed=40)], ["Up to 1 request in flight stays", "(40 failed"], False),
        ([exact(1), exact(5, interrupted=True)], ["At least 1 request"], True),
        ([exact(c, repeat=r) for c in (1, 5) for r in range(3)], ["(3 runs of that level)"], True),
        ([exact(5, repeat=r, ttft_s={"p90": t}) for r, t in enumerate((0.1, 0.1, 9.0))], ["1 of them outside"], True),
        ([exact(1, slo_ttft_s=None), exact(5, slo_tpot_s=0.001)], ["No level measured with an SLO stays"], None),
        ([exact(1, slo_tpot_s=None)], ["No SLO is recorded"], None),
        ([exact(1, slo_tpot_s=0.001)], ["No level measured stays inside", "at c=1 TPOT p90 21.5 ms"], None),
        ([NO_SUCCESS], ["No whole level has a completed request"], None),
    ],
)  # fmt: skip
def test_the_answer_comes_first_and_holds(records: list[dict[str, Any]], words: list[str], bound: bool | None) -> None:
    document = sl.curve_document(curve_of(*records))
    assert document["answer"]["lower_bound"] is bound
    first = text_of(curve_of(*records)).splitlines()[0]
    assert first == document["answer"]["text"]
    for word in words:
        assert word in first, first


def test_repeats_are_medians_in_every_column() -> None:
    runs = [exact(c, repeat=r) for r in range(3) for c in LEVELS]
    for record, factor in zip(runs, [0.98] * 4 + [1.0] * 4 + [1.05] * 4):
        record["output_tokens_per_s"] *= factor
    runs[3].update(completed=38, failed=2, output_tokens=runs[3]["output_tokens"] - 256)
    document = sl.curve_document(curve_of(*runs))
    level = document["levels"][3]
    assert level["output_tokens_per_s"] == pytest.approx(400.0) and level["runs"] == 3
    assert level["ranges"]["output_tokens_per_s"] == pytest.approx([392.0, 420.0])
    assert (level["requests"], level["completed"], level["failed"]) == (40, 40, 0)
    assert level["output_tokens"] == 5120 and isinstance(level["output_tokens"], int)
    text = text_of(curve_of(*runs))
    assert "range at c=20 over 3 runs: out tok/s 392.0 to 420.0" in text and "40/40" in text and "120/120" not in text
    assert "failures at c=20: 2 of 120 failed in 3 runs" in text
    assert document["operating_point"] == 10, "a failure in one run counts"


def test_a_fit_of_simulated_requests_recovers_a_and_b() -> None:
    rng = random.Random(9)
    loads = [Load(c=c, requests=80, a=0.020, b=0.0015) for c in LEVELS]
    fit = curve_of(*(level_record(load, simulate(load, rng), unrounded, unrounded) for load in loads)).fit
    assert fit is not None and fit.a_ms == pytest.approx(20, rel=0.03) and fit.b_ms == pytest.approx(1.5, rel=0.03)


# ----------------------------------------------------------------------------------------------------- two labels


def verdicts(runs: int, apart: float, pairs: int = 200) -> float:
    """The share of simulated pairs that --compare calls different: sd 2 %, the second `apart` times the first."""
    rng = random.Random(runs)
    different = 0
    for _ in range(pairs):
        sides = []
        for factor in (1.0, apart):
            rates = [400.0 * factor * math.exp(rng.gauss(0, 0.02)) for _ in range(runs)]
            sides.append(curve_of(*(brief(20, r, output_tokens_per_s=rate) for r, rate in enumerate(rates))).levels[0])
        rate = sl.compare_rates(*sides)
        assert rate["low"] <= rate["ratio"] <= rate["high"]
        assert rate["different"] == (not rate["low"] <= 1 <= rate["high"])
        different += rate["different"]
    return different / pairs


@pytest.mark.parametrize("runs", [2, 3, 5])
def test_identical_setups_are_seldom_called_different(runs: int) -> None:
    assert verdicts(runs, 1.0) <= 0.08


def test_setups_ten_per_cent_apart_are_called_different() -> None:
    assert verdicts(3, 1.10) >= 0.90


def test_ratio_interval_against_welch_worked_by_hand() -> None:
    """Logs 0, 0.1, 0.2 and 1.0, 1.2: means 0.1 and 1.1, variances 0.01 / 3 and 0.02 / 2, s.e. 0.11547, 1.5 degrees of
    freedom (Satterthwaite), whose t is 6.03."""
    found = sl.ratio_interval([math.exp(x) for x in (0, 0.1, 0.2)], [math.exp(x) for x in (1.0, 1.2)])
    freedom = (0.01 / 3 + 0.01) ** 2 / ((0.01 / 3) ** 2 / 2 + 0.01**2 / 1)
    assert found is not None and math.log(found.ratio) == pytest.approx(1.0)
    reach = sl.student_t(freedom) * math.sqrt(0.01 / 3 + 0.01)
    assert math.log(found.high) == pytest.approx(1.0 + reach) and math.log(found.low) == pytest.approx(1.0 - reach)


@pytest.mark.parametrize(("a", "b"), [([1.0], [2.0, 2.1]), ([1.0, 1.1], []), ([0.0, 1.0], [1.0, 1.0])])
def test_no_interval_without_two_positive_runs_a_side(a: list[float], b: list[float]) -> None:
    assert sl.ratio_interval(a, b) is None


def test_runs_without_any_spread_allow_no_verdict() -> None:
    assert sl.ratio_interval([2.0, 2.0], [2.0, 2.0]) is None and sl.ratio_interval([2.0, 2.0], [3.0, 3.0]) is None
