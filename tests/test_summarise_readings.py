"""The reading: for every sentence a curve that shows it, and one for which it would be false.

Some are real runs of load_test.py against the simulated engine, whose step time, slots and caches are known; the rest
are records with one figure changed.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from honest_levels import LEVELS, Json, Load, curve_of, decimals, exact, level_record, simulate, version_1_record

import load_test
import summarise_load as sl

PLAIN = ("--a-ms", 10, "--b-ms", 0.05, "--slots", 8)


class Sweep:
    """Run load_test.py against a simulated engine and read the curve."""

    def __init__(self, sim_engine: Any, run_program: Any, tmp_path: Path) -> None:
        self.sim_engine, self.run_program, self.tmp_path = sim_engine, run_program, tmp_path

    def __call__(self, engine: tuple[Any, ...], levels: str, *load: Any) -> dict[str, dict[str, Any]]:
        """The statements of the label, by code."""
        running = self.sim_engine(*engine)
        book = self.tmp_path / "labbook.md"
        book.touch()
        result = self.run_program(
            "load_test.py", "--base-url", running.base_url, "--label", "x", "--concurrency", levels, "--labbook", book,
            "--server-slots", engine[engine.index("--slots") + 1], "--quiet", "--requests", 16,
            "--max-tokens", 16, *load,
        )  # fmt: skip
        assert result.returncode == 0, result.stderr
        shown = self.run_program("summarise_load.py", "--labbook", book, "--label", "x", "--json")
        assert shown.returncode == 0, shown.stderr
        return {item["code"]: item for item in json.loads(shown.stdout)["statements"]}


@pytest.fixture
def sweep(sim_engine: Any, run_program: Any, tmp_path: Path) -> Sweep:
    return Sweep(sim_engine, run_program, tmp_path)


def test_waiting_for_a_slot(sweep: Sweep) -> None:
    said = sweep(("--a-ms", 10, "--b-ms", 0.05, "--slots", 2), "1,8", "--sample", 0.2)
    queue = said["queueing"]
    assert queue["levels"] == [8] and queue["certain"] and queue["values"]["slots"] == 2
    assert "8 at once on 2 slots" in queue["text"] and "deferred" in queue["text"]
    assert said["ttft_split"]["values"]["part"] == "queue" and "admission limit" in said["ttft_split"]["text"]


def test_waiting_for_the_prompt_is_no_queue(sweep: Sweep) -> None:
    said = sweep((*PLAIN, "--prefill-tok-s", 10000), "1,4", "--prompt-set", "unique-prefix")
    assert said["ttft_split"]["values"]["part"] == "prefill" and "queueing" not in said


def test_the_split_from_histograms(sweep: Sweep) -> None:
    said = sweep(("--dialect", "vllm", "--a-ms", 10, "--b-ms", 0.05, "--slots", 2), "8", "--sample", 0.2)
    assert said["ttft_split"]["values"]["seconds"]["queue"] > 0


def test_other_requests_prefills(sweep: Sweep) -> None:
    # answers of different lengths, or all requests would start and stall together
    blocking = (*PLAIN, "--prefill-blocks", "--prefill-tok-s", 2500, "--early-stop", 24)
    said = sweep(blocking, "4", "--prompt-set", "mixed-length", "--requests", 32, "--max-tokens", 24, "--seed", 4)
    assert said["other_prefills"]["values"]["ratio"] > 1.5 and not said["other_prefills"]["certain"]
    assert said["early_stops"]["values"]["count"] > 0


def test_past_saturation(sweep: Sweep) -> None:
    engine = ("--dialect", "vllm", *PLAIN, "--saturate-at", 2, "--saturate-factor", 3)
    said = sweep(engine, "2,8", "--sample", 0.2, "--repeat", 2)
    assert said["past_saturation"]["certain"] and said["past_saturation"]["advice"] == "admit at most 2 at once"
    assert said["preemptions"]["values"]["preemptions"] > 0 and "single_run" not in said


def test_cache_luck(sweep: Sweep) -> None:
    said = sweep((*PLAIN, "--prefill-tok-s", 100000), "1,8", "--prompt-set", "shared-prefix")
    shares = said["cache_luck"]["values"]["shares"]
    assert said["cache_luck"]["levels"] == [8] and shares["1"] - shares["8"] > 0.1


# ---------------------------------------------------------------------------------------------------------- on records


def said_of(*records: Json) -> dict[str, sl.Statement]:
    """The shapes that records show, by code."""
    found = sl.read_curve(curve_of(*records))
    assert len({item.code for item in found}) == len(found)
    return {item.code: item for item in found}


def runs(c: int, rates: tuple[float, ...], **changes: Any) -> list[Json]:
    return [exact(c, repeat=r, output_tokens_per_s=rate, **changes) for r, rate in enumerate(rates)]


def split(queue: float, prefill: float, rest: float, **keys: float) -> Json:
    """A split whose parts have these means; `each`: as a server that tells it of each request."""
    return {part: {"mean": value, **keys} for part, value in zip(("queue", "prefill", "rest"), (queue, prefill, rest))}


def blocks(used: float) -> dict[str, Any]:
    """What vLLM reports of 12 waiting requests, with so much of its cache in use."""
    return {"peak_waiting": 12, "peak_cache_usage": used}


LAGGING, BUSY = {"loop_lag_s": {"p99": 0.03}}, {"cpu_fraction": 0.95}
DRIFT = {"tpot_first_third_s": 0.0074, "tpot_last_third_s": 0.0157}
FEW = {"mean_in_flight": 12.0}
SLOW_CONNECT = {"p90": 0.08}
FINE = {"prompt_tokens_mean": 100.0}

# (code, records that show it, the levels it names, records for which the sentence would be false)
CASES: list[tuple[str, list[Json], list[int], list[Json]]] = [
    ("near_linear", [exact(1, 20, 0.1), exact(5, 20, 0.1), exact(10, 20, 0.1)], [5, 10],
     [exact(1), exact(5), exact(10)]),
    # "up to c=10" would be false where c = 5 does not scale
    ("near_linear", [exact(1, 20, 0), exact(5, 20, 0)], [5], [exact(1, 20, 0), exact(5, 40, 0), exact(10, 20, 0)]),
    ("per_sequence_cost", [exact(c) for c in LEVELS], [20], [exact(c, 40) for c in LEVELS]),
    # b*c > a by 33 % of a step, and the line misses c = 1 by 43 %
    ("per_sequence_cost", [exact(c, 4, 4) for c in LEVELS], [5, 10, 20],
     [exact(1, 14, 0), exact(5, 12, 0), exact(10, 24, 0), exact(20, 30, 0)]),
    ("queueing", [exact(1), exact(20, ttft_s={"p90": 2.5}, server_slots=8)], [20],
     [exact(1), exact(20, ttft_s={"p50": 0.2, "p90": 0.4})]),  # prompts that arrive together are no queue
    ("queueing", [exact(1), exact(20, ttft_s={"p90": 2.5}, server=blocks(0.95))], [20],
     [exact(1), exact(20, ttft_s={"p90": 2.5}, server=blocks(0.2))]),
    ("ttft_split", [exact(10, ttft_split_s=split(2, 0.3, 0.02))], [10],
     [exact(10, ttft_split_s=split(1e-4, 2e-4, 4e-4))]),
    ("other_prefills", [exact(4, tpot_s={"p50": 0.02, "p90": 0.04})], [4],
     [exact(4, tpot_s={"p50": 0.02, "p90": 0.029})]),
    # a level that slowed has a tail too, and so has loopback's noise
    ("other_prefills", [exact(4, tpot_s={"p50": 0.02, "p90": 0.04})], [4],
     [exact(4, tpot_s={"p50": 0.02, "p90": 0.04}, drift=DRIFT), exact(5, tpot_s={"p50": 1e-4, "p90": 3e-4})]),
    ("past_saturation", runs(10, (300, 305, 302)) + runs(20, (280, 282, 281)), [20],
     runs(10, (300, 380, 340)) + runs(20, (290, 340, 310))),  # the runs overlap
    ("past_saturation", runs(10, (340,)) + runs(20, (300,)), [20], runs(10, (340,)) + runs(20, (330,))),
    ("past_saturation", runs(10, (340,)) + runs(20, (300,)), [20],
     runs(10, (340,)) + runs(20, (300,), mean_in_flight=9.0)),
    # a dip, for more comes at 20; and nobody knows what was in flight
    ("past_saturation", runs(5, (300, 305)) + runs(10, (280, 282)), [10],
     runs(5, (300, 305)) + runs(10, (280, 282)) + runs(20, (400, 402))),
    ("past_saturation", runs(10, (340,)) + runs(20, (300,)), [20],
     runs(10, (340,), mean_in_flight=None) + runs(20, (300,), mean_in_flight=None)),
    ("preemptions", [exact(20, server={"preemptions": 3})], [20], [exact(20, server={"preemptions": 0})]),
    ("client", [exact(1), exact(20, client=LAGGING)], [20], [exact(20, client={"loop_lag_s": {"p99": 0.0019}})]),
    ("client", [exact(20, client=BUSY)], [20], [exact(20, client=BUSY, wall_s=0.004)]),  # 90 % of 4 ms is start-up
    ("client", [exact(20, client={"loop_lag_s": {"max": 0.9}}, wall_s=10.0)], [20],
     [exact(20, client={"loop_lag_s": {"max": 0.2}}, wall_s=10.0)]),
    ("client", [exact(20, client={"floor_us_per_delta": 900.0})], [20],
     [exact(20, client={"floor_us_per_delta": 9.0})]),
    ("client", [exact(20, client={"floor_ttft_s": 0.05})], [20], [exact(20, client={"floor_ttft_s": 0.0005})]),
    ("short_level", [exact(20, **FEW)], [20], [exact(20, **FEW, client=BUSY)]),
    ("short_level", [exact(20, **FEW)], [20], [exact(20, mean_in_flight=19.0)]),
    ("draining", [exact(20, steady_output_tokens_per_s=452.0)], [20], [exact(20, steady_output_tokens_per_s=416.0)]),
    ("drift", [exact(5, drift=DRIFT)], [5],
     [exact(5, drift={"tpot_first_third_s": 0.0074, "tpot_last_third_s": 0.0080})]),
    # the last round of a short level drains, and so decodes faster
    ("drift", [exact(5, drift={"tpot_first_third_s": 0.03, "tpot_last_third_s": 0.01})], [5],
     [exact(10, drift={"tpot_first_third_s": 0.03, "tpot_last_third_s": 0.01})]),
    ("connecting", [exact(20, connect_s=SLOW_CONNECT, ttft_s={"p90": 0.2})], [20],
     [exact(20, connect_s=SLOW_CONNECT, ttft_s={"p90": 2.0}),
      exact(1, connect_s={"p90": 0.0005}, ttft_s={"p90": 0.0009})]),
    ("early_stops", [exact(5, finish_reasons={"length": 39, "stop": 1})], [5],
     [exact(5, finish_reasons={"length": 40, "stop": 0})]),
    ("cache_luck", [exact(c, cached_tokens_mean=x, **FINE) for c, x in zip(LEVELS, (10, 18, 26, 27))], [10, 20],
     [exact(c, cached_tokens_mean=x, **FINE) for c, x in zip(LEVELS, (10, 15, 12, 19))]),
    ("single_run", [exact(1), exact(5)], [1, 5], runs(1, (46, 47)) + runs(5, (180, 181))),
]  # fmt: skip


@pytest.mark.parametrize(
    ("code", "records", "levels", "others"), CASES, ids=[f"{i}-{c[0]}" for i, c in enumerate(CASES)]
)
def test_each_shape(code: str, records: list[Json], levels: list[int], others: list[Json]) -> None:
    found = said_of(*records)[code]
    assert list(found.levels) == levels and found.values["c"] == levels[-1]
    assert f"c={levels[-1]}" in found.text or code == "single_run"
    assert found.advice or "nothing to improve" in found.text
    assert code not in said_of(*others)
    text = sl.label_text(sl.curve_document(curve_of(*records)), colour=False)
    assert found.text in text.split("\nreading\n")[1]


def test_no_shape_is_called_compute_or_bandwidth() -> None:
    """A curve alone cannot say which."""
    for records in ([exact(c) for c in LEVELS], [exact(c, 4, 4) for c in LEVELS], [exact(c, 20, 0.1) for c in LEVELS]):
        text = sl.label_text(sl.curve_document(curve_of(*records)), colour=False)
        assert "compute" not in text and "bandwidth" not in text
    assert "KV reads, attention or sampling" in said_of(*(exact(c) for c in LEVELS))["per_sequence_cost"].text


@pytest.mark.parametrize(
    ("parts", "part", "words"),
    [
        # half of the requests queue for 4 s and half do not: the median of the queue is 0, and its mean 2 s
        (
            {"queue": {"p50": 0.0, "p90": 4.0, "mean": 2.0}, "prefill": {"mean": 0.3}, "rest": {"mean": 0.02}},
            "queue",
            "86%",
        ),
        (split(0.001, 0.02, 0.1), "outside", "outside the engine"),
        (split(0.001, 0.02, 0.1, p50=0.1), "rest", "nothing to improve"),
        (split(0.1, 0.1, 0.1), "none", "no part dominates"),
    ],
)
def test_the_split_of_ttft_is_one_of_means(parts: Json, part: str, words: str) -> None:
    found = said_of(exact(10, ttft_split_s=parts))["ttft_split"]
    assert found.values["part"] == part and words in found.text


def test_what_is_unsure_says_so() -> None:
    load = Load(c=20, slots=4)
    queued = level_record(load, simulate(load, random.Random(2)), decimals(6), decimals(4))
    wait = said_of(exact(1, server_slots=None), {**queued, "server_slots": None})["queueing"]
    assert not wait.certain and "possibly" in wait.text and "--sample" in str(wait.advice)
    alone = said_of(*runs(10, (340,)), *runs(20, (300,)))["past_saturation"]
    assert not alone.certain and "possibly" in alone.text and "--repeat 3" in str(alone.advice)
    long = said_of(exact(20, requests=400, **FEW))["short_level"]
    assert not long.certain and "nothing recorded says why" in long.text
    old = version_1_record(Load(c=20), simulate(Load(c=20), random.Random(1)), decimals(6), decimals(4))
    busy = said_of({**old, "mean_in_flight": 11.0})["client"]
    assert not busy.certain and "possibly" in busy.text and "client" not in said_of(old)


def test_what_is_not_recorded_is_not_claimed() -> None:
    assert "the client was idle" in said_of(exact(20, **FEW))["short_level"].text
    assert "the client is not recorded" in said_of(exact(20, client=None, **FEW))["short_level"].text
    outside = said_of(exact(1, 20, 0), exact(5, 20, 0, slo_tpot_s=0.01))["near_linear"]
    assert "the SLO, not throughput" in str(outside.advice)


def test_drift_is_named_with_both_figures_and_the_gpu_beside_it() -> None:
    hot = {"temperature_c_max": 87, "sm_clock_mhz_min": 1200}
    found = said_of(exact(1, gpu={"sm_clock_mhz_min": 1980}), exact(5, drift=DRIFT, gpu=hot))["drift"]
    assert "7.4 ms" in found.text and "15.7 ms" in found.text and "throttling: up to 87 C" in found.text
    cool = {"temperature_c_max": 60, "sm_clock_mhz_min": 1950}
    assert (
        "throttling"
        not in said_of(exact(1, gpu={"sm_clock_mhz_min": 1980}), exact(5, drift=DRIFT, gpu=cool))["drift"].text
    )
    assert (
        "warming up" in said_of(exact(5, drift={"tpot_first_third_s": 0.03, "tpot_last_third_s": 0.01}))["drift"].text
    )


def test_an_even_level_is_never_called_drifting() -> None:
    """1,000 levels of an even engine whose requests differ by 5 %: medians of at least 12 a third."""
    rng = random.Random(4)
    named = 0
    for _ in range(1000):
        size = rng.choice((12, 13, 26, 40))
        thirds = [sorted(rng.gauss(0.02, 0.001) for _ in range(size))[size // 2] for _ in range(2)]
        drift = {"tpot_first_third_s": thirds[0], "tpot_last_third_s": thirds[1]}
        data = {"schema": 2, "run_id": "r", "concurrency": 5, "completed": 40, "requests": 40, "drift": drift}
        named += sl.drift_of(curve_of(data).levels[0]) is not None
    assert named <= 10


def test_steady_state_is_shown_beside_the_wall_figure() -> None:
    notes = [
        text for _, text in sl.level_notes(curve_of(exact(20, steady_output_tokens_per_s=416.0)).levels[0]) if text
    ]
    assert notes == ["steady state at c=20: 416.0 tok/s, +4.0% against the wall figure"]
    assert not any(text for _, text in sl.level_notes(curve_of(exact(20, steady_output_tokens_per_s=405.0)).levels[0]))


def test_turns_models_and_the_servers_side_are_noted() -> None:
    turns = [{"turn": 1, "ttft_p50_s": 0.2, "cached_tokens_mean": 0.0, "prompt_tokens_mean": 40.0},
             {"turn": 2, "ttft_p50_s": 0.05, "cached_tokens_mean": 90.0, "prompt_tokens_mean": 130.0}]  # fmt: skip
    record = exact(
        5, by_turn=turns, models={"a": 39, "b": 1}, gpu={"power_w_mean": 300.5, "name": "H200"}, server={"slots": 8}
    )
    notes = " | ".join(text for _, text in sl.level_notes(curve_of(record).levels[0]))
    assert "by turn at c=5: 1: TTFT p50 0.200 s, cached 0 of 40; 2: TTFT p50 0.050 s, cached 90 of 130" in notes
    assert (
        "responses at c=5 named a, b" in notes and "power_w_mean 300.5" in notes and "server at c=5: slots 8" in notes
    )


@pytest.mark.parametrize("in_flight", [19.0, 12.0], ids=["full", "drained"])
@pytest.mark.parametrize("cpu", [None, 0.79, 0.81])
@pytest.mark.parametrize(("lag_s", "tpot_ms"), [(0.0019, 4), (0.0021, 4), (0.0049, 20), (0.0051, 20)])
@pytest.mark.parametrize(("floor_us", "pause_s"), [(None, 0.05), (300.0, 0.05), (10.0, 0.5)])
def test_the_load_generator_and_the_analyser_call_the_same_levels_client_bound(
    in_flight: float, cpu: float | None, lag_s: float, tpot_ms: float, floor_us: float | None, pause_s: float
) -> None:
    client = {
        "cpu_fraction": cpu, "loop_lag_s": {"p50": 0.0001, "p99": lag_s, "max": pause_s},
        "floor_us_per_delta": floor_us, "floor_ttft_s": 0.0001 if floor_us else None,
    }  # fmt: skip
    record = exact(20, tpot_ms, 0, client=client, mean_in_flight=in_flight)
    found = said_of(record)
    warned = load_test.client_warning(record) is not None
    assert ("client" in found) == warned and ("short_level" in found) == (in_flight == 12.0 and not warned)
