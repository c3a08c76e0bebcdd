"""Honest levels for the tests of the analyser: simulated requests, the records that follow from them under every
rounding a writer may use, curves from a formula, and whole notebooks."""

from __future__ import annotations

import copy
import datetime
import heapq
import json
import math
import random
import subprocess
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Callable

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
        "coalesced": 0, **steady_state(load, raw, rnd, rate),
        "client": {"cpu_fraction": 0.05, "loop_lag_s": {"p50": 0.0001, "p99": 0.0004, "max": 0.002}},
        "server": None, "ttft_split_s": None,
    }  # fmt: skip


def steady_state(load: Load, raw: Sequence[Json], rnd: Rounding, rate: Rounding) -> Json:
    """From every worker's first token to the first worker that finds the queue empty: tokens that arrived / length."""
    found: Json = {"steady_output_tokens_per_s": None, "steady_window_s": None}
    starts = [request["started_s"] + request["connect_s"] for request in raw]
    ends = [start + request["ended_s"] for start, request in zip(starts, raw)]
    firsts = [start + request["ttft_s"] for start, request in zip(starts[: load.c], raw) if request["ok"]]
    if len(raw) < 3 * load.c or len(firsts) < load.c:
        return found
    begin, end = max(firsts), min(value for value in ends if value >= starts[-1])
    arrivals = [
        start + request["ttft_s"] + (request["tpot_s"] or 0.0) * k
        for start, request in zip(starts, raw)
        if request["ok"]
        for k in range(request["output_tokens"])
    ]
    if end - begin <= 0:
        return found
    inside = sum(begin <= moment < end for moment in arrivals)
    return {"steady_output_tokens_per_s": rate(inside / (end - begin)), "steady_window_s": rnd(end - begin)}


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


def honest_record(failing: float = 0.1, **changes: Any) -> Json:
    """One plain level, as load_test.py rounds it."""
    load = Load(tokens=(100, 128), failing=failing)
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


LEVELS = (1, 5, 10, 20)


@cache
def base_of(c: int) -> Json:
    load = Load(c=c)
    return level_record(load, simulate(load, random.Random(c)), decimals(6), decimals(4))


def exact(c: int, a_ms: float = 20.0, b_ms: float = 1.5, **changes: Any) -> Json:
    """A level whose throughput and TPOT are exactly those of a step of a + b c."""
    tpot = (a_ms + b_ms * c) / 1000.0
    figures = {"output_tokens_per_s": c / tpot, "tpot_s": dict.fromkeys(sl.STATISTICS, tpot)}
    return {**copy.deepcopy(base_of(c)), **figures, **changes}


def curve_of(*records: dict[str, Any]) -> sl.Curve:
    book = sl.Notebook("labbook.md")
    for number, data in enumerate(records, 1):
        book.records.append(sl.Record(number, sl.parse_json(json.dumps(data))))
    return next(iter(book.curves.values()))


def honest(c: int, seed: int = 0, **changes: Any) -> dict[str, Any]:
    """A level of a simulated run; another seed is another run."""
    load = Load(c=c, requests=max(40, 4 * c))
    return {**level_record(load, simulate(load, random.Random(100 * seed + c)), decimals(6), decimals(4)), **changes}


def prefix(label: str, prompt_set: str, c: int, share: float, seed: int = 1, **changes: Any) -> dict[str, Any]:
    cached = {"prompt_tokens_mean": 1391.0, "cached_tokens_mean": 1391.0 * share}
    return honest(c, seed, label=label, prompt_set=prompt_set, **{**cached, **changes})


def whole_notebook() -> list[dict[str, Any]]:
    """Everything that --check asks for, but the curve-summary."""
    records = [honest(c) for c in LEVELS]
    records += [prefix("llama-prefix-unique", "unique-prefix", c, 0.01, 1) for c in (1, 10)]
    records += [prefix("llama-prefix-shared", "shared-prefix", c, 0.9, 2) for c in (1, 10)]
    records += [honest(c, 3, label="vllm-baseline", engine="vllm", run_id="v") for c in LEVELS]
    records += [honest(20, 4 + i, label=name, run_id=name) for i, name in enumerate(sl.VARIANT_LABELS)]
    now = datetime.datetime.fromisoformat(records[0]["recorded_at"])
    for record in records:  # each is recorded as it ends
        now += datetime.timedelta(seconds=record["wall_s"] + 1.0)
        record["recorded_at"] = now.isoformat(timespec="seconds")
    return records


class Book:
    """A notebook in the test's folder, and the program run on it."""

    def __init__(self, run_program: Any, path: Path) -> None:
        self.run_program, self.path = run_program, path

    def write(self, records: list[dict[str, Any]], *more: str) -> Book:
        lines = [json.dumps(record, sort_keys=True) for record in records]
        self.path.write_text("\n".join(["# Lab", "", *lines, *more]) + "\n", encoding="utf-8")
        return self

    def run(self, *args: Any, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
        result: subprocess.CompletedProcess[str] = self.run_program("summarise_load.py", *args, env=env)
        assert "Traceback" not in result.stderr
        return result
