"""The derived figures, against worked examples and published tables."""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path
from typing import Any

import pytest
from test_summarise_honest import Load, decimals, level_record, simulate, unrounded

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import summarise_load as sl

LEVELS = (1, 5, 10, 20)


def exact(c: int, a_ms: float = 20.0, b_ms: float = 1.5, **changes: Any) -> dict[str, Any]:
    """A level whose throughput and TPOT are exactly those of a step of a + b c."""
    tpot = (a_ms + b_ms * c) / 1000.0
    load = Load(c=c)
    data = level_record(load, simulate(load, random.Random(c)), decimals(6), decimals(4))
    data["output_tokens_per_s"] = c / tpot
    data["tpot_s"] = dict.fromkeys(sl.STATISTICS, tpot)
    return {**data, **changes}


def curve_of(*records: dict[str, Any]) -> sl.Curve:
    book = sl.Notebook("labbook.md")
    for number, data in enumerate(records, 1):
        book.records.append(sl.Record(number, sl.parse_json(json.dumps(data))))
    return next(iter(sl.build_curves(book).values()))


def text_of(curve: sl.Curve) -> str:
    return sl.label_text(sl.Notebook("labbook.md"), curve, colour=False)


def test_worked_example() -> None:
    """a = 20 ms, b = 1.5 ms."""
    curve = curve_of(*(exact(c) for c in LEVELS))
    assert [round(level.throughput or 0, 1) for level in curve.levels] == [46.5, 181.8, 285.7, 400.0]
    assert [round(curve.scaling(level) or 0, 2) for level in curve.levels] == [1.00, 0.78, 0.61, 0.43]
    assert curve.knee == (5, 10)
    assert curve.fit is not None and curve.fit.levels == LEVELS
    assert curve.operating_point == 20
    text = text_of(curve)
    assert "\nknee: between c=5 and c=10" in text
    assert "\nTPOT p50 ~ 20.00 ms + 1.500 ms x c" in text
    assert "\nceiling 666.7 tok/s" in text
    assert "100 ms met at c = 53.3" in text
    assert "predicted at c=20: 400.0 tok/s, measured 400.0" in text
    rows = [line.split() for line in text.splitlines() if line.split()[:1] == ["20"]]
    assert [row[2:4] for row in rows] == [["400.0", "0.43"]]


def test_second_worked_example() -> None:
    """a = 25 ms, b = 2 ms."""
    fit = curve_of(*(exact(c, 25.0, 2.0) for c in LEVELS)).fit
    assert fit is not None and fit.ceiling is not None
    assert round(fit.ceiling, 1) == 500.0
    assert round(fit.c_at(0.1) or 0, 1) == 37.5
    assert round(fit.throughput(20) or 0, 1) == 307.7


def test_levels_sort_by_c_and_big_figures_have_no_separators() -> None:
    curve = curve_of(*(exact(c, 0.2, 0.001) for c in (20, 1, 10, 5)))
    assert [level.c for level in curve.levels] == [1, 5, 10, 20]
    rows = [line.split() for line in text_of(curve).splitlines() if line[:1].isdigit()]
    assert [row[0] for row in rows] == ["1", "5", "10", "20"]
    assert float(rows[-1][2]) > 10000


@pytest.mark.parametrize(
    ("freedom", "published"),
    [(1, 12.706), (2, 4.303), (3, 3.182), (4, 2.776), (5, 2.571), (6, 2.447), (7, 2.365), (8, 2.306), (9, 2.262),
     (10, 2.228), (15, 2.131), (20, 2.086), (30, 2.042), (60, 2.000), (120, 1.980)],
)  # fmt: skip
def test_student_t_against_the_published_table(freedom: int, published: float) -> None:
    assert round(sl.student_t(freedom), 3) == published
    assert round(sl.student_t(2, 0.99), 3) == 9.925


def test_interval_for_b_against_a_textbook_regression() -> None:
    """Heights and weights of American women (30 to 39, 15 points): slope 3.45, standard error 0.09114, r2 0.991,
    t for 13 degrees of freedom 2.160."""
    weights = (115, 117, 120, 123, 126, 129, 132, 135, 139, 142, 146, 150, 154, 159, 164)
    fit = sl.fit_tpot(list(zip(range(58, 73), weights)))
    assert fit is not None and fit.interval_ms is not None and fit.r2 is not None
    assert round(fit.a_ms, 3) == -87.517 and round(fit.b_ms, 2) == 3.45 and round(fit.r2, 3) == 0.991
    low, high = fit.interval_ms
    assert (high - low) / 2 == pytest.approx(2.1604 * 0.09114, rel=1e-3)
    assert (low + high) / 2 == pytest.approx(fit.b_ms)


def test_the_interval_holds_the_true_b_19_times_of_20() -> None:
    rng = random.Random(3)
    held = 0
    for _ in range(2000):
        fit = sl.fit_tpot([(c, 20 + 1.5 * c + rng.gauss(0, 0.5)) for c in LEVELS])
        assert fit is not None and fit.interval_ms is not None
        held += fit.interval_ms[0] <= 1.5 <= fit.interval_ms[1]
    assert 1870 <= held <= 1930


def test_degenerate_fits() -> None:
    assert sl.fit_tpot([]) is None
    assert sl.fit_tpot([(5, 20.0), (5, 21.0)]) is None
    two = sl.fit_tpot([(1, 20.0), (5, 20.0)])
    assert two is not None and two.interval_ms is None and two.r2 is None and two.ceiling is None
    falling = curve_of(exact(1, 30, 0), exact(5, 20, 0), exact(10, 10, 0))
    assert "ceiling: none implied" in text_of(falling)
    one = curve_of(exact(1))
    assert "TPOT fit: not enough points" in text_of(one) and "knee: not enough points" in text_of(one)


def test_an_objective_below_a_is_met_nowhere() -> None:
    curve = curve_of(*(exact(c, slo_tpot_s=0.015) for c in LEVELS))
    assert "15 ms: below a, met at no c" in text_of(curve)
    assert curve.operating_point is None


def test_the_fit_leaves_levels_above_the_slots_out() -> None:
    # https://github.com/ggml-org/llama.cpp/issues/17300 https://github.com/ggml-org/llama.cpp/issues/5247
    queued = exact(20)
    queued["tpot_s"] = dict.fromkeys(sl.STATISTICS, 0.032)
    limited = curve_of(*(exact(c, server_slots=8) for c in (1, 5, 8)), {**queued, "server_slots": 8})
    assert limited.fit is not None and limited.fit.levels == (1, 5, 8)
    assert round(limited.fit.b_ms, 3) == 1.5
    assert "measured 400.0 (above the slots: not in the fit)" in text_of(limited)
    unknown = curve_of(*(exact(c, server_slots=None) for c in LEVELS))
    assert unknown.fit is not None and unknown.fit.levels == LEVELS


def test_knee_is_a_step_between_measured_levels() -> None:
    # https://github.com/NVIDIA-NeMo/Guardrails/pull/2323 https://github.com/Avarok-Cybersecurity/atlas/issues/954
    assert sl.find_knee([(1, 20), (2, 41), (4, 78), (8, 76)]) == (4, 8)
    assert sl.find_knee([(1, 20), (2, 41), (4, 78)]) is None
    assert sl.find_knee([(4, 80), (8, 121), (16, 190)]) == (8, 16)  # the lowest level's throughput is 20 per request
    assert sl.find_knee([(1, 0.0), (2, 5.0)]) is None
    assert sl.find_knee([]) is None
    assert "knee: not reached up to c=5" in text_of(curve_of(exact(1, 20, 0), exact(5, 20, 0)))


def test_scaling_above_one_is_shown() -> None:
    curve = curve_of(exact(1, 40, 0), exact(5, 20, 0))
    assert round(curve.scaling(curve.levels[1]) or 0, 2) == 2.0


def test_scaling_starts_at_the_lowest_level_whatever_it_is() -> None:
    curve = curve_of(exact(5), exact(10))
    assert curve.scaling(curve.levels[0]) == pytest.approx(1.0)


def test_levels_without_a_completed_request_enter_nothing() -> None:
    """Public kind: a level whose every request fails, and figures of no request.
    https://github.com/openshift-psap/llm-load-test/pull/54"""
    load = Load(c=1, requests=4, failing=1.0)
    dead = level_record(load, simulate(load, random.Random(1)), decimals(6), decimals(4))
    curve = curve_of(dead, exact(5), exact(10))
    assert curve.scaling(curve.levels[0]) is None
    assert curve.fit is not None and curve.fit.levels == (5, 10)
    assert "0/4" in text_of(curve) and "4 failed (http 500: out of luck)" in text_of(curve)
    nothing = curve_of(dead)
    assert nothing.per_request is None and nothing.peak is None and nothing.operating_point is None
    assert "knee: not enough points" in text_of(nothing)


def test_the_operating_point_is_the_highest_inside_the_objective() -> None:
    inside = [exact(c, slo_tpot_s=0.04) for c in LEVELS]
    assert curve_of(*inside).operating_point == 10
    failing = [*inside[:2], {**inside[2], "failed": 1}, inside[3]]
    assert curve_of(*failing).operating_point == 5
    late = [*inside[:2], {**inside[2], "ttft_s": {"p90": 2.01}}, inside[3]]
    assert curve_of(*late).operating_point == 5
    no_objective = [{**data, "slo_ttft_s": None} for data in inside]
    assert curve_of(*no_objective).operating_point is None
    assert "operating point: none, no objective is recorded" in text_of(curve_of(*no_objective))
    single_token = [{**data, "tpot_s": None} for data in inside]
    assert curve_of(*single_token).operating_point == 20


def test_an_interrupted_level_enters_no_figure() -> None:
    curve = curve_of(exact(1), exact(5), exact(20, interrupted=True))
    assert curve.fit is not None and curve.fit.levels == (1, 5)
    assert curve.operating_point == 5
    assert "40/40(interrupted)" in text_of(curve)


def test_repeats_show_median_range_and_agreement() -> None:
    runs = [exact(c, repeat=r) for r in range(3) for c in LEVELS]
    for record, factor in zip(runs, [0.98] * 4 + [1.0] * 4 + [1.05] * 4):
        record["output_tokens_per_s"] *= factor
    runs[1]["output_tokens_per_s"] = 100.0  # a dip at c = 5 of the first run puts its knee elsewhere
    curve = curve_of(*runs)
    assert curve.repeats == 3 and curve.levels[3].figure("output_tokens_per_s") == pytest.approx(400.0)
    assert curve.levels[3].spread("output_tokens_per_s") == pytest.approx((392.0, 420.0))
    assert curve.fit is not None and curve.fit.points == 12
    text = text_of(curve)
    assert "range at c=20 over 3 runs: out tok/s 392.0 to 420.0" in text
    assert "(2 of 3 runs agree)" in text
    assert "120/120" in text


def test_a_failure_in_one_repeat_counts() -> None:
    curve = curve_of(exact(1, repeat=0), exact(1, repeat=1, failed=1, completed=39))
    assert curve.levels[0].failed == 1 and curve.operating_point is None


def test_a_fit_of_simulated_requests_recovers_a_and_b() -> None:
    rng = random.Random(9)
    records = []
    for c in LEVELS:
        load = Load(c=c, requests=80, a=0.020, b=0.0015)
        records.append(level_record(load, simulate(load, rng), unrounded, unrounded))
    fit = curve_of(*records).fit
    assert fit is not None and fit.interval_ms is not None
    assert fit.a_ms == pytest.approx(20, rel=0.03) and fit.b_ms == pytest.approx(1.5, rel=0.03)
