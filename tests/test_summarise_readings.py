"""The reading: for every shape a run that shows it and one that must not.

Most are real runs of load_test.py against the simulated engine, whose step time, slots and caches are known; what such
an engine cannot do (a client short of CPU, a full accept queue) is shown on simulated records.
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path
from typing import Any

import pytest
from test_summarise_figures import curve_of, exact
from test_summarise_honest import Load, decimals, level_record, simulate, version_1_record

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import load_test
import summarise_load as sl

PLAIN = ("--a-ms", 10, "--b-ms", 0.05, "--slots", 8)
SHORT = ("--requests", 16, "--max-tokens", 16)


class Sweep:
    """Run load_test.py against a simulated engine and read the curve."""

    def __init__(self, sim_engine: Any, run_program: Any, tmp_path: Path) -> None:
        self.sim_engine, self.run_program, self.tmp_path = sim_engine, run_program, tmp_path

    def __call__(self, engine: tuple[Any, ...], levels: str, *load: Any) -> dict[str, Any]:
        """The --json of the label."""
        running = self.sim_engine(*engine)
        slots = engine[engine.index("--slots") + 1]
        book = self.tmp_path / "labbook.md"
        book.touch()
        result = self.run_program(
            "load_test.py", "--base-url", running.base_url, "--label", "x", "--concurrency", levels,
            "--labbook", book, "--server-slots", slots, "--quiet", *SHORT, *load,
        )  # fmt: skip
        assert result.returncode == 0, result.stderr
        shown = self.run_program("summarise_load.py", "--labbook", book, "--label", "x", "--json")
        assert shown.returncode == 0, shown.stderr
        document: dict[str, Any] = json.loads(shown.stdout)
        return document


@pytest.fixture
def sweep(sim_engine: Any, run_program: Any, tmp_path: Path) -> Sweep:
    return Sweep(sim_engine, run_program, tmp_path)


def reading(document: dict[str, Any], code: str) -> dict[str, Any] | None:
    found = [item for item in document["readings"] if item["code"] == code]
    assert len(found) <= 1
    return found[0] if found else None


def codes(curve: sl.Curve) -> set[str]:
    return {item.code for item in sl.read_curve(curve)}


# ---------------------------------------------------------------------------------------------------------- real runs


def test_a_server_that_is_still_cheap(sweep: Sweep) -> None:
    document = sweep(PLAIN, "1,4")
    cheap = reading(document, "bandwidth_bound")
    assert cheap is not None and cheap["levels"] == [4]
    assert cheap["values"]["scaling"] > 0.8 and "c=4" in cheap["evidence"] and cheap["try"]
    for other in ("compute_per_step", "queueing", "past_saturation", "preemptions", "other_prefills", "early_stops",
                  "cache_luck", "short_level", "ttft_is_queue", "repeats", "connecting"):  # fmt: skip
        assert reading(document, other) is None, other
    assert reading(document, "single_run") is not None


def test_steps_that_grow_with_the_batch(sweep: Sweep) -> None:
    document = sweep(("--a-ms", 4, "--b-ms", 4, "--slots", 8), "1,4,8")
    compute = reading(document, "compute_per_step")
    assert compute is not None and 8 in compute["levels"]
    assert compute["values"]["bc_ms"] > compute["values"]["a_ms"]
    assert reading(document, "bandwidth_bound") is None


def test_waiting_for_a_slot(sweep: Sweep) -> None:
    document = sweep(("--a-ms", 10, "--b-ms", 0.05, "--slots", 2), "1,8", "--sample", 0.2)
    queue = reading(document, "queueing")
    assert queue is not None and queue["levels"] == [8] and queue["certain"]
    assert queue["values"]["slots"] == 2 and queue["values"]["ttft_growth"] > queue["values"]["tpot_growth"]
    assert "8 at once on 2 slots" in queue["evidence"] and "deferred" in queue["evidence"]
    split = reading(document, "ttft_is_queue")
    assert split is not None and split["values"]["shares"]["queue"] > 0.5 and "admission limit" in split["evidence"]
    assert document["levels"][1]["ttft_split_s"]["queue"]["p50"] > 0


def test_waiting_for_the_prompt_is_no_queue(sweep: Sweep) -> None:
    document = sweep((*PLAIN, "--prefill-tok-s", 10000), "1,4", "--prompt-set", "unique-prefix")
    split = reading(document, "ttft_is_prefill")
    assert split is not None and split["values"]["shares"]["prefill"] > 0.5
    assert reading(document, "queueing") is None and reading(document, "ttft_is_queue") is None


def test_the_split_from_histograms(sweep: Sweep) -> None:
    document = sweep(("--dialect", "vllm", "--a-ms", 10, "--b-ms", 0.05, "--slots", 2), "8", "--sample", 0.2)
    split = reading(document, "ttft_is_queue")
    assert split is not None and split["values"]["seconds"]["queue"] > 0


def test_the_split_is_one_of_means() -> None:
    """Half of the requests queue for 4 s and half do not: the median of the queue is 0, and its mean 2 s."""
    split = {"queue": {"p50": 0.0, "p90": 4.0, "mean": 2.0}, "prefill": {"p50": 0.3, "p90": 0.3, "mean": 0.3}}
    split["rest"] = {"p50": 0.02, "p90": 0.02, "mean": 0.02}
    found = {one.code: one for one in sl.read_curve(curve_of(exact(10, ttft_split_s=split)))}
    assert found["ttft_is_queue"].values["shares"]["queue"] == pytest.approx(2 / 2.32)


def test_what_histograms_leave_is_outside_the_engine() -> None:
    parts = {"queue": 0.001, "prefill": 0.02, "rest": 0.1}
    means = {part: {"mean": value} for part, value in parts.items()}
    assert "ttft_is_outside" in codes(curve_of(exact(10, ttft_split_s=means)))
    each = {part: {"p50": value, "p90": value, "mean": value} for part, value in parts.items()}
    assert "ttft_is_decode" in codes(curve_of(exact(10, ttft_split_s=each)))


def test_other_requests_prefills(sweep: Sweep) -> None:
    # answers of different lengths, or all requests would start and stall together
    blocking = (*PLAIN, "--prefill-blocks", "--prefill-tok-s", 2500, "--early-stop", 24)
    document = sweep(blocking, "4", "--prompt-set", "mixed-length", "--requests", 32, "--max-tokens", 24, "--seed", 4)
    stalls = reading(document, "other_prefills")
    assert stalls is not None and stalls["values"]["ratio"] > 1.5


def test_past_saturation(sweep: Sweep) -> None:
    engine = ("--dialect", "vllm", *PLAIN, "--saturate-at", 2, "--saturate-factor", 3)
    document = sweep(engine, "2,8", "--sample", 0.2)
    fallen = reading(document, "past_saturation")
    assert fallen is not None and fallen["values"]["to"] < fallen["values"]["from"] and "at most 2" in fallen["try"]
    preempted = reading(document, "preemptions")
    assert preempted is not None and preempted["values"]["preemptions"] > 0


def test_early_stops(sweep: Sweep) -> None:
    document = sweep((*PLAIN, "--early-stop", 12), "4")
    early = reading(document, "early_stops")
    assert early is not None and early["values"]["finish_reasons"]["stop"] == early["values"]["count"] > 0
    assert any("output tokens per request at c=4" in note for note in document["notes"])


def test_cache_luck(sweep: Sweep) -> None:
    document = sweep((*PLAIN, "--prefill-tok-s", 100000), "1,8", "--prompt-set", "shared-prefix")
    luck = reading(document, "cache_luck")
    assert luck is not None and luck["levels"] == [8]
    assert luck["values"]["shares"]["1"] - luck["values"]["shares"]["8"] > 0.1


def test_a_pooled_cache_has_no_luck(sweep: Sweep) -> None:
    engine = ("--dialect", "vllm", *PLAIN, "--prefill-tok-s", 100000)
    assert reading(sweep(engine, "1,4", "--prompt-set", "shared-prefix", "--warmup", 0), "cache_luck") is None


def test_repeats_and_short_levels(sweep: Sweep) -> None:
    # https://github.com/vllm-project/vllm/issues/4252
    document = sweep(PLAIN, "1,4", "--repeat", 2, "--requests", 5)
    repeats = reading(document, "repeats")
    assert repeats is not None and repeats["values"]["low"] <= repeats["values"]["high"]
    assert reading(document, "single_run") is None
    assert document["repeats"] == 2 and len(document["levels"][0]["ranges"]["output_tokens_per_s"]) == 2
    short = reading(document, "short_level")
    assert short is not None and short["levels"] == [4] and "--min-rounds" in short["try"]


# ---------------------------------------------------------------------------------------------------------- on records


def test_a_busy_client_is_named() -> None:
    idle = {"cpu_fraction": 0.1, "loop_lag_s": {"p99": 0.001}}
    assert "client" not in codes(curve_of(exact(1), exact(20, client=idle)))
    lagging = curve_of(exact(1), exact(20, client={"cpu_fraction": 0.3, "loop_lag_s": {"p99": 0.03}}))
    assert "client" in codes(lagging)
    assert "client" in codes(curve_of(exact(20, client={"cpu_fraction": 0.95, "loop_lag_s": {"p99": 0.001}})))
    starved = curve_of(exact(20, mean_in_flight=12.0, client={"cpu_fraction": 0.95, "loop_lag_s": {"p99": 0.001}}))
    assert {"client"} <= codes(starved) and "short_level" not in codes(starved)
    drained = curve_of(exact(20, mean_in_flight=12.0, client=idle))
    assert "short_level" in codes(drained) and "client" not in codes(drained)


@pytest.mark.parametrize("floor", [{"floor_us_per_delta": 900.0}, {"floor_ttft_s": 0.05}])
def test_a_calibrated_floor_is_named(floor: dict[str, float]) -> None:
    assert "client" in codes(curve_of(exact(20, client=floor)))
    small = {name: value / 1000 for name, value in floor.items()}
    assert "client" not in codes(curve_of(exact(20, client=small)))


@pytest.mark.parametrize("in_flight", [19.0, 12.0], ids=["full", "drained"])
@pytest.mark.parametrize("cpu", [None, 0.79, 0.81])
@pytest.mark.parametrize(("lag_s", "tpot_ms"), [(0.0019, 4), (0.0021, 4), (0.0049, 20), (0.0051, 20)])
@pytest.mark.parametrize("floor_us", [None, 10.0, 300.0])
def test_the_load_generator_and_the_analyser_call_the_same_levels_client_bound(
    in_flight: float, cpu: float | None, lag_s: float, tpot_ms: float, floor_us: float | None
) -> None:
    client = {
        "cpu_fraction": cpu, "loop_lag_s": {"p50": 0.0001, "p99": lag_s, "max": 0.05},
        "floor_us_per_delta": floor_us, "floor_ttft_s": 0.0001 if floor_us else None,
    }  # fmt: skip
    record = exact(20, tpot_ms, 0, client=client, mean_in_flight=in_flight)
    curve = curve_of(record)
    warned = load_test.client_warning(record) is not None
    assert (sl.client_evidence(curve.levels[0]) is not None) == warned
    assert ("client" in codes(curve)) == warned
    assert ("short_level" in codes(curve)) == (in_flight == 12.0 and not warned)


def test_version_1_can_only_say_possibly() -> None:
    load = Load(c=20)
    old = version_1_record(load, simulate(load, random.Random(1)), decimals(6), decimals(4))
    found = [item for item in sl.read_curve(curve_of({**old, "mean_in_flight": 11.0})) if item.code == "client"]
    assert found and not found[0].certain and "possibly" in found[0].evidence
    assert "client" not in codes(curve_of(old))


def test_connecting_is_named_where_it_is_a_sizeable_part_of_ttft() -> None:
    slow = {"p90": 0.08}
    assert "connecting" in codes(curve_of(exact(20, connect_s=slow, ttft_s={"p90": 0.2})))
    assert "connecting" not in codes(curve_of(exact(20, connect_s=slow, ttft_s={"p90": 2.0})))


def cached(*shares: float) -> list[sl.Reading]:
    levels = (
        exact(c, prompt_tokens_mean=100.0, cached_tokens_mean=100 * share) for c, share in zip((1, 5, 10), shares)
    )
    return [item for item in sl.read_curve(curve_of(*levels)) if item.code == "cache_luck"]


def test_cached_shares_that_drift_apart_are_cache_luck_too() -> None:
    """No step from a level to the next is above ten points, the whole way is."""
    (drift,) = cached(0.10, 0.18, 0.26)
    assert "16 points apart" in drift.evidence and "neighbour" not in drift.evidence and drift.levels == (1, 10)
    (jump,) = cached(0.10, 0.12, 0.26)
    assert "16 points apart, more than 10 from its neighbour at c=10" in jump.evidence and jump.levels == (10,)
    assert cached(0.10, 0.15, 0.12) == []


def test_a_wait_without_a_cause_is_only_possible() -> None:
    """Slots unknown and nothing sampled: TTFT grows as a queue's would."""
    load = Load(c=20, slots=4)
    queued = level_record(load, simulate(load, random.Random(2)), decimals(6), decimals(4))
    found = [
        item
        for item in sl.read_curve(curve_of(exact(1, server_slots=None), {**queued, "server_slots": None}))
        if item.code == "queueing"
    ]
    assert found and not found[0].certain and "possibly" in found[0].evidence and "--sample" in found[0].advice


def test_prompts_that_arrive_together_are_no_queue() -> None:
    """Twenty prefills one after the other: TTFT grows, but is short against decoding."""
    assert "queueing" not in codes(curve_of(exact(1), exact(20, ttft_s={"p50": 0.2, "p90": 0.4})))


def test_saturation_inside_the_repeats_range_is_none() -> None:
    one = [exact(10, repeat=r, output_tokens_per_s=rate) for r, rate in enumerate((300.0, 380.0))]
    two = [exact(20, repeat=r, output_tokens_per_s=rate) for r, rate in enumerate((290.0, 340.0))]
    assert "past_saturation" not in codes(curve_of(*one, *two))
    alone = [exact(10, output_tokens_per_s=340.0), exact(20, output_tokens_per_s=300.0)]
    assert "past_saturation" in codes(curve_of(*alone))


def test_the_text_ends_with_the_reading() -> None:
    curve = curve_of(*(exact(c, 4, 4) for c in (1, 5, 10, 20)))
    lines = sl.label_text(sl.Notebook("x"), curve, colour=False).split("\nreading\n")[1].splitlines()
    assert len(lines) == len(sl.read_curve(curve)) and all(". Try: " in line for line in lines)
