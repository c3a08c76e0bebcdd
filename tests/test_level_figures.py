"""Every figure of a level against a value worked out by hand, and the exact fields of both kinds of record."""

from __future__ import annotations

import dataclasses
import datetime
import json
import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from fake_server import (
    CHUNKED,
    DONE,
    LAST_CHUNK,
    FakeServer,
    Request,
    Step,
    chunk,
    delta,
    event,
    load,
    plain,
    usage,
    whole_stream,
)

import load_test

OK = load_test.RequestRecord(
    index=0,
    started_s=0.0,
    connect_s=0.0,
    ok=True,
    error_class=None,
    error=None,
    status=200,
    ttft_s=0.1,
    last_token_s=0.5,
    e2e_s=0.5,
    ended_s=0.6,
    tpot_s=0.1,
    output_tokens=5,
    token_source="usage",
    output_chars=10,
    deltas=5,
    prompt_tokens=30,
    cached_tokens=None,
    finish="length",
    coalesced=False,
    timings=None,
    streamed_tokens=5,
)
FAILED = dataclasses.replace(
    OK,
    ok=False,
    error_class="http",
    error="http 503: Loading model",
    status=503,
    ttft_s=None,
    last_token_s=None,
    e2e_s=None,
    ended_s=0.001,
    tpot_s=None,
    output_tokens=0,
    token_source=None,
    deltas=0,
    prompt_tokens=None,
    finish=None,
)


def figures(requests: Sequence[load_test.RequestRecord], concurrency: int = 1, **limits: float) -> dict[str, Any]:
    slo = {"slo_ttft_s": 2.0, "slo_tpot_s": 0.1, **limits}
    return load_test.level_figures(requests, concurrency, **slo)


# ---------------------------------------------------------------- percentiles


@pytest.mark.parametrize(
    ("values", "percent", "expected"),
    [
        # https://github.com/harvard-edge/cs249r_book/pull/1936 and others: off by one in four ways
        (range(1, 21), 95, 19),
        (range(1, 101), 95, 95),
        (range(1, 101), 99, 99),
        (range(1, 101), 100, 100),
        (range(1, 4), 99, 3),
        (range(1, 4), 50, 2),
        (range(1, 3), 50, 1),
        (range(1, 11), 90, 9),
        (range(1, 11), 91, 10),
        (range(1, 23), 95, 21),
        ([7], 1, 7),
        ([7], 50, 7),
        ([7], 99, 7),
    ],
)
def test_nearest_rank(values: Sequence[float], percent: int, expected: float) -> None:
    # https://github.com/mergewatch/mergewatch.ai/issues/336 https://github.com/bojieli/ai-agent-book/issues/225
    # https://github.com/BenchBox-dev/BenchBox/pull/1551
    assert load_test.percentile(values, percent) == expected


def test_zeros_that_are_not_listed_count() -> None:
    assert load_test.percentile([5, 6], 50, zeros=2) == 0.0
    assert load_test.percentile([5, 6], 75, zeros=2) == 5
    assert load_test.percentile([], 99, zeros=1) == 0.0
    assert load_test.summary([5.0, 6.0], zeros=2) == {
        **{"p50": 0.0, "p90": 6.0, "p95": 6.0, "p99": 6.0},
        **{"mean": 2.75, "min": 0.0, "max": 6.0},
    }


def test_a_summary_of_nothing_is_null_and_never_zero() -> None:
    assert load_test.summary([]) == dict.fromkeys(("p50", "p90", "p95", "p99", "mean", "min", "max"))
    assert load_test.summary([0.1234567]) == dict.fromkeys(("p50", "p90", "p95", "p99", "mean", "min", "max"), 0.123457)


# ---------------------------------------------------------------- sums and rates


def test_a_level_by_hand() -> None:
    requests = [
        OK,  # 0.0 to 0.6
        dataclasses.replace(
            OK,
            index=1,
            started_s=0.1,
            connect_s=0.1,
            ttft_s=0.3,
            e2e_s=0.7,
            ended_s=0.8,
            output_tokens=9,
            tpot_s=0.05,
            finish="stop",
        ),
        dataclasses.replace(
            OK, index=2, started_s=0.6, connect_s=0.2, ttft_s=2.5, e2e_s=2.9, ended_s=3.2, output_tokens=2, tpot_s=0.4
        ),
        dataclasses.replace(FAILED, index=3, started_s=1.0, connect_s=0.5, ended_s=0.5),
    ]
    found = figures(requests, concurrency=2)
    assert found["requests"] == 4 and found["completed"] == 3 and found["failed"] == 1
    assert found["wall_s"] == 4.0  # 0.6 + 0.2 + 3.2
    assert found["output_tokens"] == 16
    assert found["output_tokens_per_s"] == 4.0
    assert found["requests_per_s"] == 0.75
    assert found["within_slo"] == 2 and found["goodput_requests_per_s"] == 0.5
    assert found["mean_in_flight"] == 1.475  # (0.6 + 0.9 + 3.4 + 1.0) / 4
    assert found["ttft_s"] == {
        **{"p50": 0.3, "p90": 2.5, "p95": 2.5, "p99": 2.5},
        **{"mean": 0.966667, "min": 0.1, "max": 2.5},
    }
    assert found["tpot_s"]["p50"] == 0.1 and found["tpot_s"]["mean"] == 0.183333
    assert found["e2e_s"]["max"] == 2.9 and found["connect_s"]["max"] == 0.2
    assert found["output_tokens_per_request"] == {"min": 2, "p50": 5, "p90": 9, "max": 9}
    assert found["finish_reasons"] == {"length": 2, "stop": 1}
    assert found["errors"] == {"http": 1} and found["first_error"] == "http 503: Loading model"
    assert found["prompt_tokens_mean"] == 30.0 and found["cached_tokens_mean"] is None
    assert found["token_counts"] == "usage"


def test_a_level_of_which_nothing_came() -> None:
    found = figures([FAILED, dataclasses.replace(FAILED, error_class="connect", error="connect: refused", ended_s=0.0)])
    assert (found["completed"], found["failed"], found["output_tokens"], found["within_slo"]) == (0, 2, 0, 0)
    assert found["errors"] == {"http": 1, "connect": 1} and found["token_counts"] == "none"
    for name in ("ttft_s", "tpot_s", "e2e_s", "connect_s", "output_tokens_per_request"):
        assert set(found[name].values()) == {None}, name
    assert found["prompt_tokens_mean"] is None and found["finish_reasons"] == {}
    assert found["output_tokens_per_s"] == 0.0 and found["goodput_requests_per_s"] == 0.0
    empty = figures([])
    assert empty["wall_s"] == 0.0 and empty["mean_in_flight"] is None and empty["output_tokens_per_s"] is None


def test_failures_are_in_no_latency_figure_and_never_good() -> None:
    # https://github.com/vllm-project/guidellm/issues/444 https://github.com/vllm-project/guidellm/pull/1085
    # https://github.com/triton-inference-server/perf_analyzer/pull/32
    # https://github.com/gpustack/gpustack/issues/1677: instant 503s made the rate rise
    quick = dataclasses.replace(FAILED, ttft_s=0.001, e2e_s=0.002, tpot_s=0.0001, output_tokens=50, cached_tokens=9)
    found = figures([OK, quick, quick])
    assert found["output_tokens"] == 5 and found["within_slo"] == 1
    assert found["ttft_s"]["min"] == found["ttft_s"]["max"] == 0.1
    assert found["cached_tokens_mean"] is None and found["coalesced"] == 0


def test_one_token_has_no_tpot_and_passes_its_limit() -> None:
    # https://github.com/openshift-psap/llm-load-test/pull/54: division by n - 1
    one = dataclasses.replace(OK, output_tokens=1, tpot_s=None)
    found = figures([one, OK], slo_tpot_s=0.05)
    assert found["tpot_s"]["mean"] == 0.1 and found["within_slo"] == 1
    only = figures([one])
    assert set(only["tpot_s"].values()) == {None} and only["within_slo"] == 1


def test_the_objective_includes_its_limits() -> None:
    exact = dataclasses.replace(OK, ttft_s=2.0, tpot_s=0.1)
    assert figures([exact])["within_slo"] == 1
    assert figures([exact], slo_ttft_s=1.999999)["within_slo"] == 0
    assert figures([exact], slo_tpot_s=0.099999)["within_slo"] == 0


def test_mean_in_flight_never_passes_the_concurrency() -> None:
    together = [dataclasses.replace(OK, connect_s=0.0, ended_s=0.001)] * 20
    last = dataclasses.replace(together[0], ended_s=0.001 + 4e-6)  # each rounded up, in a level of a millisecond
    level = figures([*together, last], concurrency=20)
    assert 0.021 / level["wall_s"] > 20.0 and level["mean_in_flight"] == 20.0


def test_mean_in_flight_includes_connecting_and_failures() -> None:
    refused = dataclasses.replace(FAILED, error_class="connect", connect_s=1.0, ended_s=0.0)
    slow = dataclasses.replace(OK, connect_s=0.4, ended_s=0.6)
    assert figures([slow, refused], concurrency=2)["mean_in_flight"] == 2.0


@pytest.mark.parametrize(
    ("sources", "expected"),
    [
        (["usage", "usage"], "usage"),
        (["deltas"], "deltas"),
        (["usage", "deltas", "usage"], {"usage": 2, "deltas": 1}),
        ([], "none"),
    ],
)
def test_what_counted_the_tokens(sources: list[str], expected: Any) -> None:
    requests = [dataclasses.replace(OK, token_source=source) for source in sources] or [FAILED]
    assert figures(requests)["token_counts"] == expected


@pytest.mark.parametrize(
    ("cached", "expected"),
    [([None, None], None), ([0, 0], 0.0), ([30, 10], 20.0), ([30, None], 15.0), ([0, None], 0.0), ([1, 0, 0], 0.33)],
)
def test_cached_tokens_are_unknown_or_a_mean(cached: list[int | None], expected: float | None) -> None:
    assert figures([dataclasses.replace(OK, cached_tokens=n) for n in cached])["cached_tokens_mean"] == expected


def test_cached_tokens_stand_beside_the_prompts_that_were_counted() -> None:
    """Half of the answers tell no prompt: their cached tokens would make a mean that is more than the mean prompt."""
    counted = dataclasses.replace(OK, prompt_tokens=10, cached_tokens=0)
    untold = dataclasses.replace(OK, prompt_tokens=None, cached_tokens=1000)
    level = figures([counted, untold])
    assert (level["prompt_tokens_mean"], level["cached_tokens_mean"]) == (10.0, 0.0)
    assert figures([untold])["cached_tokens_mean"] == 1000.0


def test_a_success_without_a_finish_reason_counts_as_none() -> None:
    requests = [OK, dataclasses.replace(OK, finish=None), dataclasses.replace(OK, finish="tool_calls")]
    assert figures(requests)["finish_reasons"] == {"length": 1, "none": 1, "tool_calls": 1}


def test_names_that_a_hostile_server_makes_up_are_counted_together() -> None:
    requests = [dataclasses.replace(OK, finish=f"reason {number}") for number in range(50)] + [OK, OK]
    reasons = figures(requests)["finish_reasons"]
    assert len(reasons) == load_test.MOST_NAMES + 1 and sum(reasons.values()) == 52
    assert reasons["length"] == 2 and reasons["(other names)"] == 50 - load_test.MOST_NAMES + 1


@pytest.mark.parametrize(
    ("tokens", "deltas", "expected"),
    [([5, 5], [5, 5], 1.0), ([8, 8], [2, 2], 4.0), ([9, 1], [1, 1], 5.0), ([], [], None)],
)
def test_tokens_per_delta(tokens: list[int], deltas: list[int], expected: float | None) -> None:
    requests = [dataclasses.replace(OK, streamed_tokens=n, deltas=d) for n, d in zip(tokens, deltas)]
    unknown = dataclasses.replace(OK, streamed_tokens=None, deltas=1000)
    assert figures([*requests, unknown])["tokens_per_delta"] == expected
    assert figures(requests or [FAILED])["tokens_per_delta"] == expected


def test_drift_is_the_median_of_the_first_and_of_the_last_third_by_start() -> None:
    """An engine that slows from 7.4 to 15.7 ms; the order of the records is not that of the starts."""
    tpots = [0.0074] * 12 + [0.011] * 13 + [0.0157] * 12
    requests = [dataclasses.replace(OK, started_s=float(n), tpot_s=tpot) for n, tpot in enumerate(tpots)]
    assert figures(requests[::-1])["drift"] == {"tpot_first_third_s": 0.0074, "tpot_last_third_s": 0.0157}
    assert figures(requests[:35])["drift"] is None  # eleven a third
    failures = [dataclasses.replace(FAILED, started_s=0.5)] * 12
    assert figures([*failures, *requests])["drift"] == figures(requests)["drift"]


# ---------------------------------------------------------------- what is said under a level

LINE: dict[str, Any] = {  # a level of which there is nothing to say
    **figures([OK] * 4),
    **load_test.run_figures(load_test.LevelRun(1)),
    **{"concurrency": 1, "model": "m", "models": {}, "server": None, "gpu": None, "by_turn": None},
    **{"ttft_split_s": None, "steady_output_tokens_per_s": None},
}


def test_a_count_that_cannot_be_true_and_an_answer_without_an_end_are_said_and_counted() -> None:
    """https://github.com/vllm-project/vllm/issues/8268 and its kin: usage and stream disagree."""
    requests = [
        OK,
        dataclasses.replace(OK, count_notes=(load_test.HIDDEN_REASONING,), streamed_tokens=2),
        dataclasses.replace(OK, count_notes=(load_test.FEWER_THAN_DELTAS,), streamed_tokens=None, tpot_s=None),
        dataclasses.replace(OK, unclosed=True),
    ]
    found = figures(requests)
    assert found["count_notes"] == {load_test.HIDDEN_REASONING: 1, load_test.FEWER_THAN_DELTAS: 1}
    assert found["unclosed"] == 1 and found["within_slo"] == 3  # a TPOT that is not known is not met
    said = "\n".join(load_test.level_lines({**LINE, **found}))
    assert f"1 response(s): {load_test.HIDDEN_REASONING}" in said and "1 response(s) ended without closing" in said
    assert len(load_test.level_lines(LINE)) == 2


DOUBTS: list[tuple[dict[str, Any], str | None]] = [  # what is changed of the level above, and what is said then
    ({"requests": 4, "concurrency": 2}, None),
    ({"requests": 3, "concurrency": 2}, "under two rounds (3 requests for 2 workers)"),
    ({"requests": 3, "concurrency": 2, "interrupted": True}, "interrupted: this level is not whole"),
    (
        {"output_tokens_per_s": 97.0, "steady_output_tokens_per_s": 100.0, "steady_window_s": 2.0},
        "ramp and drain, -3.0 %",
    ),
    ({"output_tokens_per_s": 98.0, "steady_output_tokens_per_s": 100.0, "steady_window_s": 2.0}, None),
    ({"output_tokens_per_s": 104.0, "steady_output_tokens_per_s": 100.0, "steady_window_s": 2.0}, "drain, +4.0 %"),
    ({"coalesced": 2}, "2 response(s) arrived in under 3 pieces"),
]


@pytest.mark.parametrize(("changes", "says"), DOUBTS)
def test_what_may_not_be_what_it_seems_is_said_and_only_that(changes: dict[str, Any], says: str | None) -> None:
    lines = load_test.level_lines({**LINE, **changes})[2:]
    assert len(lines) == (says is not None) and (says is None or says in lines[0]), lines


@pytest.mark.parametrize(
    ("counted", "changes", "said"),
    [
        (82, {}, False),  # two per cent of 4 x 30 prompt tokens: 2.4
        (83, {}, True),
        (77, {}, True),
        (90, {"interrupted": True}, False),
        (90, {"completed": 3}, False),
        (90, {"cached_tokens_mean": None}, False),
        (None, {}, False),
    ],
)
def test_two_counts_of_cached_tokens_that_disagree(counted: int | None, changes: dict[str, Any], said: bool) -> None:
    record = {**LINE, "cached_tokens_mean": 20.0, "server": {"cached_tokens": counted}, **changes}
    found = [line for line in load_test.level_lines(record) if "cached tokens disagree" in line]
    assert len(found) == said and (not said or f"the responses say 80, the server's counter {counted}" in found[0])


# ---------------------------------------------------------------- which model answered

ANSWERED: list[tuple[str, list[str], dict[str, int], bool]] = [  # asked for, known aliases, named by responses; said?
    ("m", [], {}, False),
    ("m", [], {"m": 9}, False),
    ("org/m", [], {"m": 9}, False),
    ("m", [], {"/models/m": 9}, False),
    ("m", ["m-v2"], {"m-v2": 9}, False),
    ("m", [], {"m-v2": 9}, True),
    ("m", [], {"m": 5, "small": 4}, True),
    ("m", ["small"], {"m": 5, "small": 4}, True),
]


@pytest.mark.parametrize(("asked", "aliases", "named", "said"), ANSWERED)
def test_another_model_than_asked_for_is_said(
    asked: str, aliases: list[str], named: dict[str, int], said: bool
) -> None:
    record = {**LINE, "model": asked, "models": named}
    lines = [line for line in load_test.level_lines(record, aliases) if "answered by" in line]
    assert len(lines) == said
    assert all(f"{name} {count}" in line for line in lines for name, count in named.items())


def test_a_router_that_falls_back_is_said_and_recorded(tmp_path: Path) -> None:
    def answer(request: Request) -> list[Step]:
        named = event({"model": ("big", "small")[request.number % 2], "choices": []})
        return [CHUNKED + chunk(named + delta("a", finish="stop") + usage(3, 1) + DONE) + LAST_CHUNK]

    with FakeServer(answer) as server:
        result = load(server, tmp_path, "--requests", 4, "--model", "big")
    assert result.levels[0]["models"] == {"big": 2, "small": 2}
    assert "answered by big 2, small 2, asked for big" in result.out


# ---------------------------------------------------------------- from deltas


def observed(arrivals: Sequence[float], tokens: int | None = None, ended: float | None = None) -> load_test.Observation:
    """A request written at 0 whose deltas arrived at these moments."""
    stream = load_test.Stream(load_test.Observation())
    seen = stream.seen
    seen.connecting_at = 1e-9
    stream.begin(1e-9)
    stream.feed(CHUNKED, 0.0)
    for number, at_s in enumerate(arrivals):
        stream.feed(chunk(delta(f" w{number}")), at_s)
    end_s = arrivals[-1] if ended is None else ended
    stream.feed(chunk((usage(3, tokens) if tokens else b"") + delta(finish="stop") + DONE) + LAST_CHUNK, end_s)
    assert seen.failure is None
    return seen


@pytest.mark.parametrize(
    ("arrivals", "tokens", "tpot"),
    [
        ([1.0, 1.5, 2.0], None, 0.5),  # three tokens by deltas: two gaps
        ([1.0, 2.0], 5, 0.25),  # the server says that they were five
        ([1.0], 9, 0.0),  # all in one
        ([1.0], None, None),
        ([1.0, 2.0], 1, None),
    ],
)
def test_tpot_divides_by_one_less_than_the_tokens(
    arrivals: list[float], tokens: int | None, tpot: float | None
) -> None:
    assert observed(arrivals, tokens).record(0, 0.0).tpot_s == tpot


@pytest.mark.parametrize(
    ("arrivals", "tokens", "coalesced"),
    [
        ([1.0] * 8, None, True),
        ([1.0] * 7, None, False),
        ([1.0, 2.0] * 4, None, True),
        ([1.0, 2.0, 3.0, 3.0, 3.0, 3.0, 3.0, 3.0], None, False),
        ([1.0, 2.0], 8, True),
        ([1.0, 2.0, 3.0], 100, False),
    ],
)
def test_a_buffering_proxy_is_seen(arrivals: list[float], tokens: int | None, coalesced: bool) -> None:
    assert observed(sorted(arrivals), tokens).record(0, 0.0).coalesced is coalesced


def test_chunk_gaps_are_those_of_all_requests_together() -> None:
    gaps = load_test.chunk_gaps([observed([1.0, 1.0, 2.0]), observed([5.0, 9.0]), observed([1.0])])
    assert gaps == {**{"p50": 1.0, "p90": 4.0, "p95": 4.0, "p99": 4.0}, **{"mean": 1.666667, "min": 0.0, "max": 4.0}}
    assert set(load_test.chunk_gaps([observed([1.0])]).values()) == {None}
    assert set(load_test.chunk_gaps([]).values()) == {None}


def finished(worker: int, arrivals: Sequence[float], tokens: int | None = None, ended: float | None = None) -> Any:
    return load_test.Finished(0, worker, observed(arrivals, tokens, ended))


def test_steady_state_by_hand() -> None:
    run = load_test.LevelRun(2, 6, started_at=0.0, empty_at=7.0)
    run.finished = [
        finished(0, [1.0, 2.0], ended=2.5),
        finished(
            1, [2.0, 3.0, 4.0], tokens=6, ended=4.0
        ),  # its first token opens the window at 2.0; two tokens a delta
        finished(0, [3.0, 4.0], ended=4.5),
        finished(1, [5.0, 6.0], ended=6.5),
        finished(0, [5.0, 6.0], ended=7.0),
        finished(1, [6.5, 7.5, 8.0], ended=8.0),
    ]
    # after 2.0 up to 7.0: 0 of the first, 2 deltas of 2 tokens, 2, 2, 2 and 1
    assert load_test.steady_state(run) == (round(11 / 5, 4), 5.0)


def test_no_steady_state_without_two_rounds_or_without_a_first_token_each() -> None:
    run = load_test.LevelRun(2, 4, started_at=0.0, empty_at=7.0)
    run.finished = [finished(0, [1.0]), finished(1, [1.5]), finished(0, [3.0]), finished(1, [4.0]), finished(0, [5.0])]
    assert load_test.steady_state(run) == (None, None)  # three ended inside
    run.finished.append(finished(1, [6.0]))
    assert load_test.steady_state(run)[1] == 5.5
    run.empty_at = None
    assert load_test.steady_state(run) == (None, None)
    run.empty_at = 7.0
    run.finished = [item for item in run.finished if item.worker == 0]
    assert load_test.steady_state(run) == (None, None)


# ---------------------------------------------------------------- where the time to first token went


def test_ttft_split_by_the_servers_own_clock() -> None:
    timings = {"prompt_ms": 150.0, "predicted_ms": 1000.0, "predicted_n": 20}
    good = [dataclasses.replace(OK, ttft_s=0.5, timings=timings), dataclasses.replace(OK, ttft_s=0.1, timings=timings)]
    split = load_test.split_by_timings(good)
    assert split is not None
    assert split["prefill"] == {"p50": 0.15, "p90": 0.15, "mean": 0.15}
    assert split["rest"] == {"p50": 0.05, "p90": 0.05, "mean": 0.05}
    assert split["queue"] == {"p50": 0.0, "p90": 0.3, "mean": 0.15}  # never below 0


@pytest.mark.parametrize(
    "timings",
    [
        None,
        {},
        {"prompt_ms": 1.0},
        {"prompt_ms": "1", "predicted_ms": 1, "predicted_n": 1},
        {"prompt_ms": 1, "predicted_ms": 1, "predicted_n": 0},
        {"prompt_ms": math.nan, "predicted_ms": 1, "predicted_n": 1},
        {"prompt_ms": math.inf, "predicted_ms": 1, "predicted_n": 1},
        {"prompt_ms": 10**400, "predicted_ms": 1, "predicted_n": 1},
        {"prompt_ms": None, "predicted_ms": None, "predicted_n": None},
        {"prompt_ms": -1, "predicted_ms": 1, "predicted_n": 1},
        {"prompt_ms": 1, "predicted_ms": -8e15, "predicted_n": 1},
        {"prompt_ms": 1, "predicted_ms": 1, "predicted_n": 5e-324},  # the quotient would be infinite
    ],
)
def test_timings_that_say_nothing(timings: dict[str, Any] | None) -> None:
    assert load_test.split_by_timings([dataclasses.replace(OK, timings=timings)]) is None


LLAMA = {"prompt_n": 300, "prompt_ms": 150.0}
VLLM = {"prompt_tokens": 100.0, "cached_tokens": 20.0, "prefill_sum": 1.0}
PREFILLS: list[tuple[list[dict[str, Any] | None], dict[str, float], dict[str, float], float | None]] = [
    ([LLAMA, {"prompt_n": 100, "prompt_ms": 50.0}], {}, {}, 2000.0),
    ([LLAMA, None], VLLM, {"prompt_tokens": 900.0, "prefill_sum": 2.0}, 2000.0),  # the responses' own timings win
    ([None], VLLM, {"prompt_tokens": 900.0, "cached_tokens": 220.0, "prefill_sum": 3.0}, 300.0),
    ([None], VLLM, {"prompt_tokens": 900.0, "prefill_sum": 3.0}, 400.0),  # no counter of cached tokens
    ([None], VLLM, {"prompt_tokens": 900.0}, None),
    ([None], VLLM, {"prefill_sum": 3.0}, None),
    ([None], VLLM, VLLM, None),  # nothing was prefilled
    ([{"prompt_n": 0, "prompt_ms": 1.0}], {}, {}, None),
    ([{"prompt_n": 5, "prompt_ms": 0}], {}, {}, None),
    ([None], {}, {}, None),
]


@pytest.mark.parametrize(("timings", "before", "after", "expected"), PREFILLS)
def test_prefill_rate_is_by_the_servers_own_clock(
    timings: list[dict[str, Any] | None],
    before: dict[str, float],
    after: dict[str, float],
    expected: float | None,
) -> None:
    good = [dataclasses.replace(OK, timings=one) for one in timings]
    first, last = load_test.Snapshot(metrics=before), load_test.Snapshot(metrics=after)
    assert load_test.prefill_rate(good, first, last) == expected


# ---------------------------------------------------------------- the two records, field by field

LEVEL_FIELDS = """
lab label engine engine_version host quant context_length server_slots model base_url prompt_set max_tokens temperature
slo_ttft_s slo_tpot_s recorded_at concurrency requests completed failed wall_s output_tokens output_tokens_per_s
requests_per_s goodput_requests_per_s within_slo mean_in_flight ttft_s tpot_s prompt_tokens_mean cached_tokens_mean
token_counts finish_reasons first_error
schema tool_version run_id repeat arrival seed warmup interrupted e2e_s connect_s chunk_gap_s output_tokens_per_request
errors coalesced steady_output_tokens_per_s steady_window_s client server ttft_split_s extra_body models
tokens_per_delta drift prefill_tokens_per_s searched warmup_settled duration_s turns by_turn gpu prompt_text unclosed
count_notes
"""
RAW_FIELDS = """
label run_id repeat concurrency index connect_s ok error_class error status started_s ttft_s last_token_s e2e_s ended_s
tpot_s output_tokens token_source output_chars deltas prompt_tokens cached_tokens finish coalesced timings
"""


def test_both_records_have_the_fields_of_the_contract_and_no_other(tmp_path: Path) -> None:
    with FakeServer([whole_stream()]) as server:
        result = load(server, tmp_path, "--requests", 3, "--label", "x")
    (level,) = result.levels
    assert set(level) == set(LEVEL_FIELDS.split())
    for name in ("ttft_s", "tpot_s", "e2e_s", "connect_s", "chunk_gap_s"):
        assert set(level[name]) == {"p50", "p90", "p95", "p99", "mean", "min", "max"}
    assert set(level["output_tokens_per_request"]) == {"min", "p50", "p90", "max"}
    assert set(level["client"]) == {"cpu_fraction", "loop_lag_s", "floor_us_per_delta", "floor_ttft_s"}
    assert set(level["client"]["loop_lag_s"]) == {"p50", "p99", "max"}
    assert level["lab"] == "part-09/lab-serve-twenty-concurrent-users" and level["schema"] == 2
    assert level["arrival"] == "closed-loop" and level["tool_version"] == load_test.TOOL_VERSION
    assert level["interrupted"] is False and level["server"] is None and level["ttft_split_s"] is None
    assert level["context_length"] is None and level["server_slots"] is None and level["engine"] == "unknown"
    assert [set(raw) for raw in result.requests] == [set(RAW_FIELDS.split())] * 3
    for name in ("book.md", "raw.jsonl"):
        for line in (tmp_path / name).read_text("utf-8").splitlines():
            assert line == json.dumps(json.loads(line), sort_keys=True)  # keys sorted, Python's separators


@pytest.mark.skipif(not hasattr(time, "tzset"), reason="the zone cannot be set here")
def test_the_moment_is_local_time_with_its_offset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TZ", "Lab-05:45")
    time.tzset()
    try:
        before = time.time()
        with FakeServer([whole_stream()]) as server:
            result = load(server, tmp_path)
        moment = datetime.datetime.fromisoformat(result.levels[0]["recorded_at"])
    finally:
        monkeypatch.undo()
        time.tzset()
    assert moment.utcoffset() == datetime.timedelta(hours=5, minutes=45)
    assert int(before) <= moment.timestamp() <= time.time()


def test_the_first_error_is_the_earliest() -> None:
    late = dataclasses.replace(FAILED, index=0, error="late", started_s=0.0, ended_s=9.0)
    early = dataclasses.replace(FAILED, index=1, error="early", started_s=1.0, ended_s=1.0)
    assert figures([late, early])["first_error"] == "early"


def test_slots_busy_per_decode_are_those_of_the_level_or_unknown() -> None:
    def shot(busy: float, decodes: float) -> load_test.Snapshot:
        return load_test.Snapshot(metrics={"busy_per_decode": busy, "decodes": decodes})

    def told(*shots: load_test.Snapshot) -> Any:
        return load_test.server_figures(shots[0], shots, shots[-1])["busy_slots_per_decode"]

    assert told(shot(1.0, 10), shot(1.5, 30)) == 1.75
    assert told(shot(1.0, 10), shot(1.0, 10)) is None  # nothing was decoded
    assert told(load_test.Snapshot(), shot(1.5, 30)) is None  # the first look failed


def test_raw_times_fit_together(tmp_path: Path) -> None:
    steps: list[Step] = [CHUNKED, 0.02, chunk(delta("a")), 0.02, chunk(delta("b")), 0.02]
    steps.append(chunk(delta(finish="stop") + usage(1, 2) + DONE) + LAST_CHUNK)
    with FakeServer(steps) as server:
        result = load(server, tmp_path, "--concurrency", 2, "--requests", 4)
    for raw in result.requests:
        assert 0 < raw["ttft_s"] <= raw["last_token_s"] == raw["e2e_s"] <= raw["ended_s"]
        assert raw["tpot_s"] == pytest.approx(raw["last_token_s"] - raw["ttft_s"], abs=1e-6)
        assert raw["started_s"] >= 0 and raw["connect_s"] > 0
    level = result.levels[0]
    ends = [raw["started_s"] + raw["connect_s"] + raw["ended_s"] for raw in result.requests]
    assert level["wall_s"] == pytest.approx(max(ends), abs=1e-5)
    busy = sum(raw["connect_s"] + raw["ended_s"] for raw in result.requests)
    assert level["mean_in_flight"] == pytest.approx(min(busy / level["wall_s"], 2.0), abs=1e-3)


def test_a_level_of_successes_and_failures_counts_each_once(tmp_path: Path) -> None:
    # https://github.com/ai-dynamo/aiperf/issues/688: four good, one of one token, three failures of two kinds
    died = CHUNKED + chunk(delta("a")) + chunk(b'data: {"error":{"message":"engine died"}}\n\n' + DONE) + LAST_CHUNK
    answers: list[list[bytes]] = [
        *([[whole_stream(1)]] * 4),
        *([[plain("503 Unavailable", '{"error":{"message":"Loading model"}}')]] * 2),
        [died],
        [CHUNKED + chunk(delta("a", finish="length") + usage(3, 1) + DONE) + LAST_CHUNK],
    ]

    def answer(request: Request) -> list[bytes]:
        return answers[int(request.prompt)]

    prompts = tmp_path / "prompts.txt"
    prompts.write_text("\n".join(map(str, range(8))), "utf-8")
    with FakeServer(answer) as server:
        args = ["--requests", 8, "--prompts", prompts, "--slo-ttft", 60, "--slo-tpot", 0.05]
        result = load(server, tmp_path, *args)
    (level,) = result.levels
    assert (level["requests"], level["completed"], level["failed"], level["within_slo"]) == (8, 5, 3, 5)
    assert level["errors"] == {"http": 2, "server": 1} and level["first_error"] == "http 503: Loading model"
    assert level["output_tokens"] == 5 and set(level["tpot_s"].values()) == {None}
    assert level["goodput_requests_per_s"] == pytest.approx(5 / level["wall_s"], rel=1e-3)
    assert result.code == 0
