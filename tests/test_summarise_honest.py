"""No false accusation: thousands of honest levels, with every rounding a writer may use, contradict nothing; and what
an alteration of one field does."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from honest_levels import (
    ALL_KEYS,
    ROUNDINGS,
    Load,
    Rounding,
    altered,
    any_load,
    as_read,
    decimals,
    disguised,
    honest_record,
    level_record,
    linear,
    rank,
    significant,
    simulate,
    version_1_record,
)

import summarise_load as sl


def test_honest_levels_contradict_nothing_and_lack_no_digit() -> None:
    rng = random.Random(20)
    for turn in range(4000):
        load = any_load(rng)
        raw = simulate(load, rng)
        rnd, rate = rng.choice(ROUNDINGS), rng.choice(ROUNDINGS)
        interrupted = level_record(load, raw, decimals(6), decimals(4))
        assert sl.missing_digits(as_read(interrupted)) == [], (turn, load)
        interrupted.update(interrupted=True, requests=interrupted["requests"] + rng.randint(0, 30))
        for data in (
            level_record(load, raw, rnd, rate),
            version_1_record(load, raw, rnd, rate, rng.choice((rank, linear))),
            interrupted,
        ):
            assert sl.contradictions(as_read(data)) == [], (turn, load, data)


@pytest.mark.parametrize("rnd", [decimals(3), decimals(4), significant(3)], ids=["1 ms", "0.1 ms", "3 digits"])
def test_a_line_rounded_afterwards_lacks_digits(rnd: Rounding) -> None:
    load = Load()
    data = level_record(load, simulate(load, random.Random(5)), rnd, decimals(4))
    assert len(sl.missing_digits(as_read(data))) == 1
    assert sl.missing_digits(as_read({**data, "schema": 1})) == []  # version 1 wrote fewer


def pair_of(load: Load, rng: random.Random, rnd: Rounding, rate: Rounding) -> list[sl.Record]:
    """Two honest runs of one level."""
    write = rng.choice((level_record, version_1_record))
    pair = []
    for line in (1, 2):
        data = write(load, simulate(load, rng), rnd, rate)
        data.update(run_id=f"run-{line}", recorded_at=f"2026-11-29T10:00:0{line}+01:00")
        pair.append(as_read(data, line))
    return pair


def test_two_honest_runs_are_not_called_copies() -> None:
    rng = random.Random(22)
    for turn in range(1500):
        load = any_load(rng)
        # noise 0 is a server that repeats itself exactly; a real one wobbles by at least a thousandth
        load = replace(load, noise=max(load.noise, 0.001))
        pair = pair_of(load, rng, rng.choice(ROUNDINGS), rng.choice(ROUNDINGS))
        assert sl.copied_latencies(pair) == [], (turn, load)


@pytest.mark.parametrize(
    "rnd", [*map(decimals, (2, 3, 4)), significant(3)], ids=["10 ms", "1 ms", "0.1 ms", "3 digits"]
)
def test_two_honest_runs_at_a_low_resolution_are_not_called_copies(rnd: Rounding) -> None:
    """The same server twice, wobbling by half a per cent: figures do coincide, and that alone is no copy."""
    rng = random.Random(23)
    equal = 0
    for turn in range(400):
        load = replace(any_load(rng), requests=rng.choice((5, 20, 40)), noise=rng.choice((0.005, 0.02)), failing=0.0)
        pair = pair_of(load, rng, rnd, decimals(4))
        equal += sl.latency_figures(pair[0]) == sl.latency_figures(pair[1])
        assert sl.copied_latencies(pair) == [], (turn, load)
    assert equal, "none coincided, so the test shows nothing"


VERSION_1_LINES = [
    line.lstrip("->` ")
    for line in (Path(__file__).parent / "data" / "notebooks" / "version_1.md").read_text("utf-8").splitlines()
    if '"lab"' in line
]
COARSE = [level_record(load, simulate(load, random.Random(c)), decimals(3), decimals(3)) for c in (1, 5, 10, 20)
          for load in [Load(c=c)]]  # fmt: skip


@pytest.mark.parametrize(
    "data", [*map(json.loads, VERSION_1_LINES), *COARSE], ids=lambda d: f"{d['label']}-{d['wall_s']}"
)
def test_a_disguised_copy_is_caught(data: dict[str, Any]) -> None:
    assert len(sl.copied_latencies([as_read(data, 1), as_read(disguised(data), 2)])) == 1


def test_copies_are_judged_by_run_and_by_how_much_they_show() -> None:
    one = honest_record(run_id="a", repeat=0)
    for changes in ({"run_id": "b"}, {"repeat": 1}, {"run_id": "b", "wall_s": 1.1, "output_tokens_per_s": 1.0}):
        found = sl.copied_latencies([as_read(one, 3), as_read({**one, **changes}, 9)])
        assert len(found) == 1 and "line 9, " in found[0] and "line 3, " in found[0] and "c=10" in found[0], changes
    few = [as_read({**one, "completed": 4, "run_id": name}) for name in "ab"]
    assert sl.copied_latencies(few) == []
    nothing = {**one, "ttft_s": None, "tpot_s": None, "e2e_s": None}
    assert sl.copied_latencies([as_read({**nothing, "run_id": name}) for name in "ab"]) == []
    coarse = {**one, **{name: dict.fromkeys(ALL_KEYS, 0.02) for name in ("ttft_s", "tpot_s", "e2e_s")}}
    other = {**coarse, "run_id": "b", "wall_s": 1.5, "mean_in_flight": 1.5, "output_tokens_per_s": 9.9}
    assert sl.copied_latencies([as_read(coarse), as_read(other)]) == []


def test_version_1_copies_are_told_by_their_time() -> None:
    load = Load()
    old = version_1_record(load, simulate(load, random.Random(7)), decimals(6), decimals(3))
    later = {**old, "recorded_at": "2026-11-30T10:00:00+01:00"}
    assert sl.copied_latencies([as_read(old, 1), as_read(later, 2)])
    assert sl.copied_latencies([as_read(old, 1), as_read({**old, "host": "renamed"}, 2)]) == []


def caught(data: dict[str, Any], path: str, factor: float) -> bool:
    return bool(sl.contradictions(as_read(altered(data, path, factor))))


@pytest.mark.parametrize(
    ("path", "factors"),
    [
        # Altered by a lot, either way.
        *((path, (2.0, 0.5)) for path in (
            "requests", "completed", "failed", "wall_s", "output_tokens", "output_tokens_per_s", "requests_per_s",
            "goodput_requests_per_s", "within_slo", "finish_reasons.stop", "errors.http", "ttft_s.p50", "tpot_s.p50",
            "e2e_s.p50", "e2e_s.mean", "mean_in_flight")),
        # A little, where figures are counts.
        *((path, (1.0001, 0.9999)) for path in ("requests", "completed", "failed", "output_tokens", "within_slo")),
        # Where they cross what the rest of the line allows.
        ("tpot_s.max", (0.5,)), ("tpot_s.min", (2.0,)), ("ttft_s.max", (0.5,)), ("ttft_s.min", (2.0,)),
        ("cached_tokens_mean", (50.0,)), ("output_tokens_per_request.max", (0.5,)),
        ("output_tokens_per_request.min", (2.0,)), ("slo_ttft_s", (0.01,)), ("slo_tpot_s", (0.1,)),
        ("concurrency", (0.5,)), ("steady_output_tokens_per_s", (3.0,)), ("steady_window_s", (3.0,)),
    ],
)  # fmt: skip
def test_an_altered_field_is_caught(path: str, factors: tuple[float, ...]) -> None:
    data = honest_record()
    assert sl.contradictions(as_read(data)) == []
    for factor in factors:
        # steady state is only tied to the tokens where no request failed
        one = honest_record(failing=0.0) if path.startswith("steady_output") else data
        assert caught(one, path, factor), f"{path} times {factor}"


def test_equal_outputs_tie_tpot_ttft_and_e2e_together() -> None:
    load = Load()
    data = level_record(load, simulate(load, random.Random(6)), decimals(6), decimals(4))
    for path in ("tpot_s.mean", "ttft_s.mean", "e2e_s.mean"):
        # a TTFT is 1 % of its request here, so only its half or double shows
        assert caught(data, path, 1.1 if path != "ttft_s.mean" else 2.0), path


@pytest.mark.parametrize(
    ("percentile", "value", "least", "most"),
    [
        ("min", 2.1, 0, 0), ("p50", 2.1, 0, 19), ("p90", 2.1, 0, 35), ("p99", 2.1, 0, 39), ("max", 2.1, 0, 39),
        ("min", 1.9, 1, 40), ("p50", 1.9, 20, 40), ("p90", 1.9, 36, 40), ("p99", 1.9, 40, 40), ("max", 1.9, 40, 40),
    ],
)  # fmt: skip
def test_a_percentile_bounds_within_slo(percentile: str, value: float, least: int, most: int) -> None:
    """40 requests, limit 2.0 s: p50 is the 20th, so 2.1 there leaves at most 19 inside, 1.9 at least 20."""
    data = honest_record(completed=40, failed=0, ttft_s={percentile: value}, tpot_s={"max": 0.05}, slo_tpot_s=0.1)
    for within, holds in ((least - 1, False), (least, True), (most, True), (most + 1, False)):
        found = sl.check_within_slo(as_read({**data, "within_slo": within}))
        assert (found == []) == holds, within


def test_negative_figures_contradict_themselves() -> None:
    assert sl.contradictions(as_read(honest_record(wall_s=-1.0))) == ["wall_s -1.0 is negative"]
