"""No false accusation: thousands of honest levels, with every rounding a writer may use, contradict nothing; and what
an alteration of one field does. Other test files take their records from here."""

from __future__ import annotations

import copy
import heapq
import json
import math
import random
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Callable

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import summarise_load as sl

Json = dict[str, Any]
Rounding = Callable[[float], float]


def decimals(places: int) -> Rounding:
    return lambda value: round(value, places)


def significant(digits: int) -> Rounding:
    """So many significant digits, at least one decimal: JSON prints 1450 as 1450.0, which claims a tenth."""

    def rounded(value: float) -> float:
        return round(value, max(1, digits - 1 - math.floor(math.log10(value)))) if value > 0 else value

    return rounded


def twice(value: float) -> float:
    """A request rounded to a nanosecond, then the level to a microsecond."""
    return round(round(value, 9), 6)


def unrounded(value: float) -> float:
    return value


ROUNDINGS: list[Rounding] = [*map(decimals, range(2, 7)), *map(significant, range(3, 7)), twice, unrounded]


@dataclass(frozen=True)
class Load:
    """A server whose step takes a + b x running, and what one level asks of it. Times in seconds."""

    c: int = 10
    requests: int = 40
    a: float = 0.020
    b: float = 0.0015
    slots: int = 20
    prefill: float = 0.010
    tokens: tuple[int, int] = (128, 128)
    noise: float = 0.02
    failing: float = 0.0
    cached_share: float = 0.1
    slo_ttft: float = 2.0
    slo_tpot: float = 0.1


def simulate(load: Load, rng: random.Random) -> list[Json]:
    """The raw per-request records of one closed-loop level, unrounded, in the order of their starts."""
    workers = [(0.0, index) for index in range(min(load.c, load.requests))]
    slots = [0.0] * load.slots
    heapq.heapify(workers)
    records: list[Json] = []
    for index in range(load.requests):
        started, worker = heapq.heappop(workers)
        connect = rng.uniform(0.0001, 0.002)
        free = heapq.heappop(slots)
        wait = max(0.0, free - started - connect)
        step = (load.a + load.b * min(load.c, load.slots)) * rng.uniform(1 - load.noise, 1 + load.noise)
        tokens = rng.randint(*load.tokens)
        ttft = wait + load.prefill * rng.uniform(0.8, 1.2) + step
        last = ttft + step * (tokens - 1)
        ended = last + rng.uniform(0.0, 0.002)
        ok = rng.random() >= load.failing
        if not ok:
            ended = rng.uniform(0.0, ended)
        prompt = rng.randint(20, 40)
        records.append(
            {
                "index": index, "started_s": started, "connect_s": connect, "ok": ok, "ended_s": ended,
                "error_class": None if ok else "http", "error": None if ok else "http 500: out of luck",
                "status": 200 if ok else 500, "ttft_s": ttft if ok else None, "last_token_s": last if ok else None,
                "e2e_s": last if ok else None, "tpot_s": step if ok and tokens > 1 else None,
                "output_tokens": tokens if ok else 0, "token_source": "usage" if ok else None,
                "deltas": tokens if ok else 0, "prompt_tokens": prompt if ok else None, "coalesced": False,
                "cached_tokens": round(prompt * load.cached_share) if ok else None,
                "finish": "length" if ok and tokens == load.tokens[1] else "stop" if ok else None,
            }
        )  # fmt: skip
        heapq.heappush(workers, (started + connect + ended, worker))
        heapq.heappush(slots, max(free, started + connect + ended))
    return records


def rank(values: Sequence[float], percent: float) -> float:
    return sorted(values)[max(1, math.ceil(percent * len(values) / 100)) - 1]


def linear(values: Sequence[float], percent: float) -> float:
    ordered = sorted(values)
    place = (len(ordered) - 1) * percent / 100
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def block(values: Iterable[float], rnd: Rounding, keys: Sequence[str], percentile: Any = rank) -> Json:
    known = list(values)
    if not known:
        return dict.fromkeys(keys)
    found = {"min": min(known), "max": max(known), "mean": math.fsum(known) / len(known)}
    found.update({f"p{p}": percentile(known, p) for p in (50, 90, 95, 99)})
    return {key: rnd(found[key]) for key in keys}


ALL_KEYS = ("min", "p50", "p90", "p95", "p99", "max", "mean")


def identity(load: Load, label: str) -> Json:
    return {
        "lab": sl.LAB, "label": label, "engine": "llama.cpp", "engine_version": "b7000", "host": "bench box",
        "quant": "Q4_K_M", "context_length": 4096, "server_slots": load.slots, "model": "local-chat",
        "base_url": "http://127.0.0.1:8080/v1", "prompt_set": "mixed", "max_tokens": load.tokens[1], "temperature": 0.0,
        "slo_ttft_s": load.slo_ttft, "slo_tpot_s": load.slo_tpot, "concurrency": load.c,
        "recorded_at": "2026-11-29T10:00:00+01:00",
    }  # fmt: skip


def tally(values: Iterable[str]) -> dict[str, int]:
    known = list(values)
    return {value: known.count(value) for value in known}


def level_record(load: Load, raw: Sequence[Json], rnd: Rounding, rate: Rounding, label: str = "llama-baseline") -> Json:
    """The schema 2 record of a level, by the method that load_test.py documents."""
    good = [request for request in raw if request["ok"]]
    bad = [request for request in raw if not request["ok"]]
    wall = max(request["started_s"] + request["connect_s"] + request["ended_s"] for request in raw)
    tokens = sum(request["output_tokens"] for request in good)
    within = sum(request["ttft_s"] <= load.slo_ttft and (request["tpot_s"] or 0.0) <= load.slo_tpot for request in good)
    busy = math.fsum(request["connect_s"] + request["ended_s"] for request in raw)
    lengths = [request["output_tokens"] for request in good]
    return {
        **identity(load, label),
        "schema": 2, "tool_version": "2.0.0", "run_id": "20261129T100000-0123abcd", "repeat": 0,
        "arrival": "closed-loop", "seed": None, "warmup": 1, "interrupted": False, "requests": len(raw),
        "completed": len(good), "failed": len(bad), "wall_s": rnd(wall), "output_tokens": tokens,
        "output_tokens_per_s": rate(tokens / wall), "requests_per_s": rate(len(good) / wall),
        "goodput_requests_per_s": rate(within / wall), "within_slo": within,
        "mean_in_flight": min(rate(busy / wall), float(load.c)),
        "ttft_s": block([request["ttft_s"] for request in good], rnd, ALL_KEYS),
        "tpot_s": block([request["tpot_s"] for request in good if request["tpot_s"]], rnd, ALL_KEYS),
        "e2e_s": block([request["e2e_s"] for request in good], rnd, ALL_KEYS),
        "connect_s": block([request["connect_s"] for request in good], rnd, ALL_KEYS),
        "chunk_gap_s": block([request["tpot_s"] for request in good if request["tpot_s"]], rnd, ALL_KEYS),
        "output_tokens_per_request": block(lengths, round, ("min", "p50", "p90", "max")),
        "prompt_tokens_mean": rate(math.fsum(r["prompt_tokens"] for r in good) / len(good)) if good else None,
        "cached_tokens_mean": rate(math.fsum(r["cached_tokens"] for r in good) / len(good)) if good else None,
        "token_counts": "usage" if good else "none", "finish_reasons": tally(r["finish"] for r in good),
        "errors": tally(r["error_class"] for r in bad), "first_error": bad[0]["error"] if bad else None,
        "coalesced": 0, "steady_output_tokens_per_s": None, "steady_window_s": None,
        "client": {"cpu_fraction": 0.05, "loop_lag_s": {"p50": 0.0001, "p99": 0.0004, "max": 0.002}},
        "server": None, "ttft_split_s": None,
    }  # fmt: skip


VERSION_1_KEYS = ("p50", "p90", "p99", "mean")


def version_1_record(load: Load, raw: Sequence[Json], rnd: Rounding, rate: Rounding, percentile: Any = rank) -> Json:
    """The same level as version 1 wrote it: the kept fields, its definitions, 0.0 where nothing is known."""
    modern = level_record(load, raw, rnd, rate)
    good = [request for request in raw if request["ok"]]
    wall = max(request["started_s"] + request["connect_s"] + request["ended_s"] for request in raw)
    spans = [request["connect_s"] + request["ended_s"] for request in good]
    ttft = [request["connect_s"] + request["ttft_s"] for request in good]
    tpot = [
        (request["connect_s"] + request["ended_s"] - first) / (request["output_tokens"] - 1)
        for request, first in zip(good, ttft)
        if request["output_tokens"] > 1
    ]
    kept = (
        "requests", "completed", "failed", "wall_s", "output_tokens", "output_tokens_per_s", "requests_per_s",
        "goodput_requests_per_s", "within_slo", "token_counts", "finish_reasons", "first_error",
    )  # fmt: skip
    zeros = dict.fromkeys(VERSION_1_KEYS, 0.0)
    return {
        **identity(load, "llama-baseline"),
        **{key: modern[key] for key in kept},
        "mean_in_flight": rate(math.fsum(spans) / wall),
        "ttft_s": block(ttft, rnd, VERSION_1_KEYS, percentile) if ttft else zeros,
        "tpot_s": block(tpot, rnd, VERSION_1_KEYS, percentile) if tpot else zeros,
        "prompt_tokens_mean": modern["prompt_tokens_mean"] or 0.0,
        "cached_tokens_mean": modern["cached_tokens_mean"] or 0.0,
    }


def as_read(data: Json, line: int = 1) -> sl.Record:
    """A record as the program reads it: through its JSON text."""
    parsed = sl.parse_json(json.dumps(data, sort_keys=True, allow_nan=False))
    assert sl.field_fault(parsed) is None
    return sl.Record(line, parsed)


def any_load(rng: random.Random) -> Load:
    """A level of any shape: short or long, queued or not, failing or not, one token or many, tight or loose limits."""
    c = rng.choice((1, 2, 4, 5, 10, 20, 64))
    longest = rng.choice((1, 2, 8, 64, 128))
    return Load(
        c=c,
        requests=rng.choice((1, 3, c, c + 1, 2 * c, 40)),
        a=rng.choice((0.0002, 0.004, 0.02, 0.2)),
        b=rng.choice((0.0, 0.0001, 0.0015)),
        slots=rng.choice((1, 4, 8, 64)),
        prefill=rng.choice((0.0001, 0.01, 0.5)),
        tokens=(rng.choice((1, longest)), longest),
        noise=rng.choice((0.0, 0.001, 0.02, 0.3)),
        failing=rng.choice((0.0, 0.0, 0.2, 1.0)),
        cached_share=rng.choice((0.0, 0.1, 1.0)),
        slo_ttft=rng.choice((0.01, 0.05, 2.0)),
        slo_tpot=rng.choice((0.001, 0.03, 0.1)),
    )


def test_honest_levels_contradict_nothing() -> None:
    rng = random.Random(20)
    for turn in range(4000):
        load = any_load(rng)
        raw = simulate(load, rng)
        rnd, rate = rng.choice(ROUNDINGS), rng.choice(ROUNDINGS)
        for data in (
            level_record(load, raw, rnd, rate),
            version_1_record(load, raw, rnd, rate, rng.choice((rank, linear))),
        ):
            assert sl.contradictions(as_read(data)) == [], (turn, load, data)


def test_honest_interrupted_levels_contradict_nothing() -> None:
    """A level that was cut short: planned requests, fewer ended."""
    rng = random.Random(21)
    for _ in range(300):
        load = any_load(rng)
        data = level_record(load, simulate(load, rng), decimals(6), decimals(4))
        data.update(interrupted=True, requests=data["requests"] + rng.randint(0, 30))
        assert sl.contradictions(as_read(data)) == []


def test_two_honest_runs_are_not_called_copies() -> None:
    rng = random.Random(22)
    for turn in range(1500):
        load = any_load(rng)
        rnd, rate = rng.choice(ROUNDINGS), rng.choice(ROUNDINGS)
        write = rng.choice((level_record, version_1_record))
        pair = []
        for line in (1, 2):
            # noise 0 is a server that repeats itself exactly; a real one wobbles by at least a thousandth
            quiet = Load(**{**load.__dict__, "noise": max(load.noise, 0.001)})
            data = write(quiet, simulate(quiet, rng), rnd, rate)
            data.update(run_id=f"run-{line}", recorded_at=f"2026-11-29T10:00:0{line}+01:00")
            pair.append(as_read(data, line))
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
        write = rng.choice((level_record, version_1_record))
        pair = []
        for line in (1, 2):
            data = write(load, simulate(load, rng), rnd, decimals(4))
            data.update(run_id=f"run-{line}", recorded_at=f"2026-11-29T10:00:0{line}+01:00")
            pair.append(as_read(data, line))
        equal += sl.latency_figures(pair[0]) == sl.latency_figures(pair[1])
        assert sl.copied_latencies(pair) == [], (turn, load)
    assert equal, "none coincided, so the test shows nothing"


VERSION_1_LINES = [
    line.lstrip("->` ")
    for line in (Path(__file__).parent / "data" / "notebooks" / "version_1.md").read_text("utf-8").splitlines()
    if '"lab"' in line
]


def disguised(data: Json) -> Json:
    """A copy that was touched up: another time and run, the wall time stretched, the rates worked out again."""
    wall = round(data["wall_s"] * 1.02, 4)
    return {
        **data, "run_id": "another", "recorded_at": "2025-12-24T18:00:00+01:00", "wall_s": wall,
        "output_tokens_per_s": round(data["output_tokens"] / wall, 3),
        "requests_per_s": round(data["completed"] / wall, 3),
        "goodput_requests_per_s": round(data["within_slo"] / wall, 3),
        "mean_in_flight": round(data["mean_in_flight"] / 1.02, 3),
    }  # fmt: skip


@pytest.mark.parametrize("line", VERSION_1_LINES, ids=lambda line: f"{json.loads(line)['label']}-{line[50:64]}")
def test_a_disguised_copy_of_a_version_1_line_is_caught(line: str) -> None:
    data = json.loads(line)
    assert len(sl.copied_latencies([as_read(data, 1), as_read(disguised(data), 2)])) == 1


@pytest.mark.parametrize("c", [1, 5, 10, 20])
def test_a_disguised_copy_at_three_decimals_is_caught(c: int) -> None:
    load = Load(c=c)
    data = level_record(load, simulate(load, random.Random(c)), decimals(3), decimals(3))
    assert len(sl.copied_latencies([as_read(data, 1), as_read(disguised(data), 2)])) == 1


def honest_record(**changes: Any) -> Json:
    """One plain level, as load_test.py rounds it."""
    load = Load(tokens=(100, 128), failing=0.1)
    data = level_record(load, simulate(load, random.Random(5)), decimals(6), decimals(4))
    return {**data, **changes}


def leaves(value: Any, prefix: str = "") -> Iterable[tuple[str, float]]:
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from leaves(inner, f"{prefix}.{key}" if prefix else key)
    elif isinstance(value, (int, float)) and not isinstance(value, bool):
        yield prefix, value


def altered(data: Json, path: str, factor: float) -> Json:
    """The record with one number multiplied; a count stays whole, and moves by at least one."""
    changed = copy.deepcopy(data)
    *parents, last = path.split(".")
    target = changed
    for key in parents:
        target = target[key]
    value = target[last]
    if isinstance(value, int):
        target[last] = max(value + 1, round(value * factor)) if factor > 1 else min(value - 1, round(value * factor))
    else:
        target[last] = value * factor
    return changed


def caught(data: Json, path: str, factor: float) -> bool:
    return bool(sl.contradictions(as_read(altered(data, path, factor))))


CAUGHT_BOTH_WAYS = (
    "requests", "completed", "failed", "wall_s", "output_tokens", "output_tokens_per_s", "requests_per_s",
    "goodput_requests_per_s", "within_slo", "finish_reasons.stop", "errors.http",
    "ttft_s.p50", "tpot_s.p50", "e2e_s.p50", "e2e_s.mean",
)  # fmt: skip


@pytest.mark.parametrize("path", CAUGHT_BOTH_WAYS)
def test_a_field_altered_by_a_lot_is_caught(path: str) -> None:
    data = honest_record()
    assert sl.contradictions(as_read(data)) == []
    assert caught(data, path, 2.0), f"{path} doubled"
    assert caught(data, path, 0.5), f"{path} halved"


def test_figures_that_others_bound_are_caught_where_they_cross_them() -> None:
    """Raised above, or lowered below, what the rest of the line allows."""
    data = honest_record()
    for path, factor in (("mean_in_flight", 2.0), ("mean_in_flight", 0.5), ("tpot_s.max", 0.5), ("tpot_s.min", 2.0),
                         ("ttft_s.max", 0.5), ("ttft_s.min", 2.0), ("cached_tokens_mean", 50.0),
                         ("output_tokens_per_request.max", 0.5), ("output_tokens_per_request.min", 2.0),
                         ("slo_ttft_s", 0.01), ("slo_tpot_s", 0.1), ("concurrency", 0.5)):  # fmt: skip
        assert caught(data, path, factor), (path, factor)


def test_equal_outputs_tie_tpot_ttft_and_e2e_together() -> None:
    load = Load()
    data = level_record(load, simulate(load, random.Random(6)), decimals(6), decimals(4))
    for path in ("tpot_s.mean", "ttft_s.mean", "e2e_s.mean"):
        # a TTFT is 1 % of its request here, so only its half or double shows
        assert caught(data, path, 1.1 if path != "ttft_s.mean" else 2.0), path


def test_a_little_is_caught_where_figures_are_counts() -> None:
    data = honest_record()
    for path in ("requests", "completed", "failed", "output_tokens", "within_slo"):
        assert caught(data, path, 1.0001) and caught(data, path, 0.9999), path


@pytest.mark.parametrize(
    ("percentile", "value", "at_most"),
    [("min", 2.1, 0), ("p50", 2.1, 19), ("p90", 2.1, 35), ("p99", 2.1, 39), ("max", 2.1, 39)],
)
def test_a_percentile_outside_the_limit_bounds_within_slo(percentile: str, value: float, at_most: int) -> None:
    """40 requests, limit 2.0 s: nearest rank p50 is the 20th, so 2.1 there leaves at most 19 inside."""
    data = honest_record(completed=40, failed=0, ttft_s={percentile: value}, tpot_s={"max": 0.05}, slo_tpot_s=0.1)
    assert sl.misjudged(as_read({**data, "within_slo": at_most})) == []
    assert len(sl.misjudged(as_read({**data, "within_slo": at_most + 1}))) == 1


@pytest.mark.parametrize(("percentile", "at_least"), [("min", 1), ("p50", 20), ("p90", 36), ("p99", 40), ("max", 40)])
def test_a_percentile_inside_the_limit_bounds_within_slo(percentile: str, at_least: int) -> None:
    data = honest_record(completed=40, failed=0, ttft_s={percentile: 1.9}, tpot_s={"max": 0.05}, slo_tpot_s=0.1)
    assert sl.misjudged(as_read({**data, "within_slo": at_least})) == []
    assert len(sl.misjudged(as_read({**data, "within_slo": at_least - 1}))) == 1


def test_negative_figures_contradict_themselves() -> None:
    assert sl.contradictions(as_read(honest_record(wall_s=-1.0))) == ["wall_s -1.0 is negative"]


def test_copied_latency_figures_are_caught() -> None:
    one = honest_record(run_id="a")
    for changes in ({"run_id": "b"}, {"run_id": "b", "wall_s": one["wall_s"] * 1.1, "output_tokens_per_s": 1.0}):
        found = sl.copied_latencies([as_read(one, 3), as_read({**one, **changes}, 9)])
        assert len(found) == 1 and "lines 3 and 9" in found[0] and "c=10" in found[0]


def test_copies_are_judged_by_run_and_by_how_much_they_show() -> None:
    one = honest_record(run_id="a")
    same_run = [as_read(one), as_read({**one, "repeat": 1})]
    assert sl.copied_latencies(same_run) == []
    few = [as_read({**one, "completed": 4, "run_id": name}) for name in "ab"]
    assert sl.copied_latencies(few) == []
    nothing = {**one, "ttft_s": None, "tpot_s": None, "e2e_s": None}
    assert sl.copied_latencies([as_read({**nothing, "run_id": name}) for name in "ab"]) == []
    coarse = {**one, **{name: dict.fromkeys(ALL_KEYS, 0.02) for name in ("ttft_s", "tpot_s", "e2e_s")}}
    apart = [as_read({**coarse, "run_id": "a"}), as_read({**coarse, "run_id": "b", "wall_s": 1.5, "mean_in_flight": 1.5,
                                                           "output_tokens_per_s": 9.9})]  # fmt: skip
    assert sl.copied_latencies(apart) == []


def test_version_1_copies_are_told_by_their_time() -> None:
    load = Load()
    old = version_1_record(load, simulate(load, random.Random(7)), decimals(6), decimals(3))
    later = {**old, "recorded_at": "2026-11-30T10:00:00+01:00"}
    assert sl.copied_latencies([as_read(old, 1), as_read(later, 2)])
    assert sl.copied_latencies([as_read(old, 1), as_read({**old, "host": "renamed"}, 2)]) == []
