"""Waiting for a server, watching it, and asking it afterwards: also where it says little, nonsense or nothing."""

from __future__ import annotations

import json
import math
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Callable

import pytest
from fake_server import (
    CHUNKED,
    DONE,
    HOLD,
    LAST_CHUNK,
    TO_CLOSE,
    FakeServer,
    Request,
    Step,
    chunk,
    delta,
    event,
    json_answer,
    load,
    one_line,
    plain,
    usage,
    whole_stream,
)

import load_test

LOADING = plain(
    "503 Service Unavailable", '{"error":{"code":503,"message":"Loading model","type":"unavailable_error"}}'
)
NOT_FOUND = plain("404 Not Found", '{"error":{"code":404,"message":"File Not Found","type":"not_found_error"}}')

# ---------------------------------------------------------------- --wait-ready


@pytest.mark.parametrize("status", ["503 Service Unavailable", "502 Bad Gateway", "504 Timeout", "429 Too Many"])
def test_a_server_that_still_loads_is_waited_for(status: str, tmp_path: Path) -> None:
    # https://github.com/ggml-org/llama.cpp/pull/7284, https://github.com/containers/ramalama/issues/2343
    def answer(request: Request) -> list[Step]:
        if not request.is_chat:  # a list of models is there long before the model is
            return [json_answer({"data": [{"id": "m"}]})]
        return [plain(status, "not yet")] if request.number < 4 else [whole_stream()]

    with FakeServer(answer) as server:
        result = load(server, tmp_path, "--wait-ready", 60, "--model", "")
    over_s = time.perf_counter()
    assert result.code == 0 and result.err == ""
    waiting = [request for request in server.requests if request.is_chat and request.is_warm_up]
    assert len(waiting) >= 2 and all(request.doc["max_tokens"] <= 8 for request in waiting)
    assert len({request.prompt for request in waiting}) == len(waiting)
    (raw,) = result.requests
    assert raw["ok"] and result.levels[0]["requests"] == 1
    assert result.levels[0]["wall_s"] <= over_s - waiting[-1].arrived_s  # the wait is in no time of the level's


def test_a_model_whose_first_tokens_carry_no_text_is_ready(tmp_path: Path) -> None:
    """Two tokens of hidden thoughts, or of a tool call's frame: the stream ends in order, without text."""
    silent = CHUNKED + chunk(delta(finish="length") + usage(5, 2) + DONE) + LAST_CHUNK
    with FakeServer(lambda request: [silent] if request.is_warm_up else [whole_stream()]) as server:
        result = load(server, tmp_path, "--wait-ready", 20)
    assert result.code == 0 and result.err == "" and len(server.requests) == 2


def test_a_server_that_never_comes_is_waited_for_only_so_long(
    free_port: int, tmp_path: Path, no_second_try: None
) -> None:
    result = load(f"http://127.0.0.1:{free_port}", tmp_path, "--wait-ready", "60")
    line = one_line(result)
    assert result.code == 1 and "--wait-ready" in line and "60 s" in line and "refused" in line
    assert result.levels == []


@pytest.mark.parametrize("status", ["404 Not Found", "400 Bad Request", "401 Unauthorized", "500 Oops"])
def test_an_error_that_waiting_will_not_mend_ends_it(status: str, tmp_path: Path) -> None:
    with FakeServer([plain(status, '{"error":"no such model"}')]) as server:
        result = load(server, tmp_path, "--wait-ready", 60)
    line = one_line(result)
    assert result.code == 1 and "--wait-ready" in line and "no such model" in line and status[:3] in line
    assert len(server.requests) == 1 and result.levels == []


@pytest.mark.parametrize(
    ("steps", "limit", "says"),
    [
        ([LOADING], "60", "Loading model"),
        ([HOLD], "0.2", "no answer in time"),
        ([], "60", "truncated"),
        ([TO_CLOSE + DONE], "60", "no_tokens"),
        ([b"junk\r\n\r\n"], "60", "junk"),
    ],
)
def test_a_wait_has_an_end(steps: list[Step], limit: str, says: str, tmp_path: Path, no_second_try: None) -> None:
    with FakeServer(steps) as server:
        result = load(server, tmp_path, "--wait-ready", limit)
    line = one_line(result)
    assert result.code == 1 and f"not ready after {limit} s" in line and says in line


# ---------------------------------------------------------------- --sample


def llama_metrics(busy: int, deferred: int, prompt: int, cached: int, decodes: int, per_decode: float) -> str:
    return "\n".join(
        [
            "# HELP llamacpp:prompt_tokens_total Number of prompt tokens processed.",
            "# TYPE llamacpp:prompt_tokens_total counter",
            f"llamacpp:prompt_tokens_total {prompt}",
            f"llamacpp:prompt_tokens_cached_total {cached}",
            f"llamacpp:n_decode_total {decodes}",
            f"llamacpp:n_busy_slots_per_decode {per_decode}",
            f"llamacpp:requests_processing {busy}",
            f"llamacpp:requests_deferred {deferred}",
            "llamacpp:predicted_tokens_seconds nan",
            "",
        ]
    )


def slots(*busy: bool) -> list[dict[str, Any]]:
    return [{"id": number, "n_ctx": 512, "is_processing": state} for number, state in enumerate(busy)]


class Watched:
    """A server with control endpoints: what /slots and /metrics answer changes when a chat begins and ends."""

    def __init__(self, **endpoints: Callable[[str], bytes]) -> None:
        self._endpoints = endpoints
        self.state = "before"
        self.looked = threading.Event()
        self._looks = 0

    def __call__(self, request: Request) -> Iterable[Step]:
        if request.is_chat:
            if request.is_warm_up:
                return [whole_stream()]
            return [self._begin, CHUNKED, chunk(delta("a")), self.looked, chunk(delta("b")), *self._rest()]
        name = request.path.lstrip("/")
        if name not in self._endpoints:
            return [NOT_FOUND]
        if self.state == "during" and name == next(iter(self._endpoints)):
            self._looks += 1
            if self._looks == 2:  # one whole look is behind us
                self.looked.set()
        return [self._endpoints[name](self.state)]

    def _begin(self) -> None:
        self.state = "during"

    def _rest(self) -> list[Step]:
        def end() -> None:
            self.state = "after"

        return [end, chunk(delta(finish="length") + usage(30, 2) + DONE) + LAST_CHUNK]


def by_state(before: Any, during: Any, after: Any, form: Callable[[Any], bytes]) -> Callable[[str], bytes]:
    answers = {"before": form(before), "during": form(during), "after": form(after)}
    return answers.__getitem__


def as_text(text: str) -> bytes:
    return plain("200 OK", text, "text/plain; version=0.0.4")


def test_sampling_a_llama_server(tmp_path: Path) -> None:
    watched = Watched(
        slots=by_state(slots(False, False), slots(True, True), slots(False, False), json_answer),
        metrics=by_state(
            llama_metrics(0, 0, 100, 50, 10, 1.0),
            llama_metrics(2, 3, 120, 50, 15, 1.2),
            llama_metrics(0, 0, 160, 90, 30, 1.5),
            as_text,
        ),
    )
    with FakeServer(watched) as server:
        result = load(server, tmp_path, "--sample", "0.02")
    assert result.code == 0 and result.err == ""
    assert result.levels[0]["server"] == {
        "slots": 2,
        "context_per_slot": 512,
        "peak_busy_slots": 2,
        "peak_deferred": 3,
        "busy_slots_per_decode": 1.75,  # (1.5 x 30 - 1.0 x 10) / 20: the level's own part of an average since the start
        "peak_running": None,
        "peak_waiting": None,
        "preemptions": None,
        "peak_cache_usage": None,
        "prompt_tokens": 60,
        "cached_tokens": 40,
    }
    assert "peak deferred 3" in result.out and "context per slot 512" in result.out


def vllm_metrics(running: float, waiting: float, preempted: float, usage_: float, queue: tuple[float, int]) -> str:
    labels = '{engine="0",model_name="m"}'
    lines = [
        f"vllm:num_requests_running{labels} {running}",
        f"vllm:num_requests_waiting{labels} {waiting}",
        f"vllm:num_preemptions_total{labels} {preempted}",
        f"vllm:kv_cache_usage_perc{labels} {usage_}",
        f"vllm:prompt_tokens_total{labels} 1.0e+02",
        f"vllm:prefix_cache_hits_total{labels} 0.0",
        f"vllm:request_queue_time_seconds_sum{labels} {queue[0]}",
        f"vllm:request_queue_time_seconds_count{labels} {queue[1]}",
        f"vllm:request_prefill_time_seconds_sum{labels} {queue[0] / 2}",
        f"vllm:request_prefill_time_seconds_count{labels} {queue[1]}",
    ]
    return "\r\n".join(lines)


def test_sampling_a_vllm_server_without_slots(tmp_path: Path) -> None:
    watched = Watched(
        metrics=by_state(
            vllm_metrics(0, 0, 1, 0.0, (1.0, 10)),
            vllm_metrics(8, 12, 3, 0.91234567, (1.0, 10)),
            vllm_metrics(0, 0, 4, 0.0, (1.0002, 11)),
            as_text,
        )
    )
    with FakeServer(watched) as server:
        result = load(server, tmp_path, "--sample", "0.02")
    (level,) = result.levels
    assert "/slots is not there" in one_line(result) and "http 404" in result.err
    told = {key: value for key, value in level["server"].items() if value is not None}
    assert told == {
        **{"peak_running": 8, "peak_waiting": 12, "preemptions": 3, "peak_cache_usage": 0.9123},
        **{"prompt_tokens": 0, "cached_tokens": 0},
    }
    split = level["ttft_split_s"]
    assert split["queue"] == {"mean": 0.0002} and split["prefill"] == {"mean": 0.0001}
    assert split["rest"]["mean"] == pytest.approx(max(0.0, level["ttft_s"]["mean"] - 0.0003), abs=2e-6)


def test_a_server_that_says_nothing_of_itself(tmp_path: Path) -> None:
    with FakeServer(lambda request: [whole_stream()] if request.is_chat else [NOT_FOUND]) as server:
        result = load(server, tmp_path, "--sample", "0.01")
    assert result.code == 0 and set(result.levels[0]["server"].values()) == {None}
    assert [line.split("(")[0] for line in result.err.splitlines()] == [
        "load_test.py: sampling: /slots is not there ",
        "load_test.py: sampling: /metrics is not there ",
    ]
    assert len([request for request in server.requests if not request.is_chat]) == 2  # not asked again


@pytest.mark.parametrize(
    "answer",
    [
        plain("200 OK", "<html>one page for every path</html>", "text/html"),
        plain("200 OK", "{}"),
        plain("200 OK", "[]"),
        plain("200 OK", "[null, 5]"),
        plain("200 OK", '[{"n_ctx": "many", "is_processing": {}}]'),
        plain("200 OK", "llamacpp:requests_processing many\nvllm:x{ 5\nllamacpp:requests_deferred 1e999\n= = =\n"),
        plain("200 OK", b"\xff\xfe\x00"),
        plain("501 Not Implemented", '{"error":{"message":"This server does not support slots endpoint"}}'),
        plain("401 Unauthorized", ""),
        b"junk\r\n\r\n",
        b"",
        b"HTTP/1.1 200 OK\r\nContent-Length: 999\r\n\r\n[",
    ],
)
def test_control_endpoints_that_answer_nonsense_spoil_nothing(answer: bytes, tmp_path: Path) -> None:
    with FakeServer(lambda request: [whole_stream()] if request.is_chat else [answer]) as server:
        result = load(server, tmp_path, "--sample", "0.01", "--recovery-check", "--requests", 3)
    level, recovery = result.everything
    assert level["completed"] == 3 and recovery["answered"] is True
    assert {value for key, value in level["server"].items() if key != "slots"} <= {None, 0, 1}
    assert result.code == 0 and "Traceback" not in result.said


def test_a_page_for_every_path_is_no_list_of_slots(tmp_path: Path) -> None:
    page = plain("200 OK", "<html>one page for every path</html>", "text/html")
    with FakeServer(lambda request: [whole_stream()] if request.is_chat else [page]) as server:
        result = load(server, tmp_path, "--sample", "0.01")
    assert "/slots is not there" in result.err


def test_control_endpoints_that_hang_do_not_delay_the_load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first look during the level is answered only once the level's last request has come, the others never."""
    monkeypatch.setattr(load_test.fetch, "__defaults__", (60.0,))
    looking, all_came = threading.Event(), threading.Event()

    def hold_until_all_came() -> None:
        assert all_came.wait(60), "the load waits for the look"

    def answer(request: Request) -> list[Step]:
        if request.is_chat:
            if len(server.chats) == 5:
                monkeypatch.setattr(load_test.fetch, "__defaults__", (0.1,))
                all_came.set()
            return [CHUNKED, chunk(delta("a")), looking, chunk(delta(finish="stop") + DONE) + LAST_CHUNK]
        if not server.chats:  # looked for, and before the level
            return [json_answer(slots(True))]
        steps: list[Step] = [HOLD] if looking.is_set() else [hold_until_all_came, json_answer(slots(True))]
        looking.set()
        return steps

    with FakeServer(answer) as server:
        result = load(server, tmp_path, "--sample", "0.01", "--requests", 5)
    assert result.code == 0 and result.levels[0]["completed"] == 5


def test_endpoints_behind_a_prefix_are_asked_for_there(tmp_path: Path) -> None:
    with FakeServer(lambda request: [whole_stream()] if request.is_chat else [NOT_FOUND]) as server:
        load(f"http://{server.authority}/proxy/v1", tmp_path, "--sample", "1", "--model", "m")
    assert [request.path for request in server.requests if not request.is_chat] == ["/proxy/slots", "/proxy/metrics"]


def test_without_sampling_nobody_is_asked(tmp_path: Path) -> None:
    with FakeServer([whole_stream()]) as server:
        result = load(server, tmp_path, "--requests", 2)
    assert all(request.is_chat for request in server.requests) and result.levels[0]["server"] is None


def test_counts_of_several_engines_in_one_text_are_added_and_ratios_are_not() -> None:
    text = 'vllm:num_requests_running{engine="0"} 3.0\nvllm:num_requests_running{engine="1"} 4.0 1700000000\n'
    text += 'vllm:gpu_cache_usage_perc{engine="0"} 0.5\nvllm:gpu_cache_usage_perc{engine="1"} 0.8\n'
    assert load_test.parse_metrics(text) == {"running": 7.0, "cache_usage": 0.8}


def test_metrics_that_no_server_can_mean() -> None:
    text = "vllm:num_requests_running 1.7e308\n" * 2 + "vllm:num_requests_waiting -inf\nvllm:kv_cache_usage_perc 0.5\n"
    assert load_test.parse_metrics(text) == {"cache_usage": 0.5}
    endless = load_test.Snapshot(metrics={"running": math.inf, "waiting": math.nan, "cache_usage": math.inf})
    figures = load_test.server_figures(endless, [endless], endless)
    assert (figures["peak_running"], figures["peak_waiting"]) == (None, None)


def test_a_metric_is_one_line() -> None:
    """A brace that is not closed on its line reaches no further, so that a hostile text costs no quadratic time."""
    text = 'vllm:num_requests_running{engine="0\nvllm:num_requests_waiting\n} 4\nvllm:num_requests_waiting\t2\n'
    assert load_test.parse_metrics(text) == {"waiting": 2.0}


def test_of_a_huge_metrics_text_the_beginning_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    body = "vllm:prompt_tokens_total 5\nvllm:num_preemptions_total 1234567\n"
    monkeypatch.setattr(load_test, "MAX_METRICS_BYTES", len(body) - 4)  # inside the last number

    def answer(request: Request) -> list[Step]:
        return [whole_stream()] if request.is_chat else [as_text(body) if request.path == "/metrics" else NOT_FOUND]

    with FakeServer(answer) as server:
        result = load(server, tmp_path, "--sample", "10")
    told = result.levels[0]["server"]
    assert (told["prompt_tokens"], told["preemptions"]) == (0, None)


@pytest.mark.parametrize("broken", ["server_figures", "split_by_timings", "level_lines"])
def test_an_extra_that_fails_costs_no_level_its_line(
    broken: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise OverflowError("as if a server had found a hole")

    monkeypatch.setattr(load_test, broken, fail)
    with FakeServer(lambda request: [whole_stream()] if request.is_chat else [NOT_FOUND]) as server:
        result = load(server, tmp_path, "--sample", "10", "--concurrency", "1,2")
    assert result.code == 0 and [record["completed"] for record in result.levels] == [1, 2]
    assert result.err.count("left out (OverflowError: as if a server had found a hole)") == 2


def test_a_server_that_restarted_has_no_difference() -> None:
    first, last = (
        load_test.Snapshot(metrics={"prompt_tokens": 90.0}),
        load_test.Snapshot(metrics={"prompt_tokens": 5.0}),
    )
    assert load_test.server_figures(first, [], last)["prompt_tokens"] is None
    assert load_test.server_figures(last, [], first)["prompt_tokens"] == 85
    assert load_test.server_figures(last, [], last)["prompt_tokens"] == 0  # read twice, and nothing came


def test_cached_tokens_that_two_sources_count_differently_are_said(tmp_path: Path) -> None:
    body = delta("a", finish="stop") + usage(100, 1, prompt_tokens_details={"cached_tokens": 80}) + DONE
    counts = iter([10, 10, 15, *[15] * 99])  # looked for, looked at before, during, after

    def answer(request: Request) -> list[Step]:
        if request.is_chat:
            return [CHUNKED + chunk(body) + LAST_CHUNK]
        if request.path == "/slots":
            return [NOT_FOUND]
        return [as_text(f"llamacpp:prompt_tokens_cached_total {next(counts)}\n")]

    with FakeServer(answer) as server:
        result = load(server, tmp_path, "--sample", "10")
    assert "cached tokens disagree: the responses say 80, the server's counter 5" in result.out


def test_timings_of_a_llama_server_split_the_time_to_first_token(tmp_path: Path) -> None:
    timings = {"cache_n": 12, "prompt_n": 3, "prompt_ms": 1e-3, "predicted_n": 2, "predicted_ms": 2e-3}
    stream = CHUNKED + chunk(delta("a") + event({"choices": [], "timings": timings}) + delta(finish="stop") + DONE)
    with FakeServer([stream + LAST_CHUNK]) as server:
        result = load(server, tmp_path)
    (level,) = result.levels
    assert level["cached_tokens_mean"] == 12.0 and result.requests[0]["timings"] == timings
    split = level["ttft_split_s"]
    assert split["prefill"]["p50"] == 1e-6 and split["rest"]["p50"] == 1e-6
    assert math.isclose(split["queue"]["p50"], level["ttft_s"]["p50"] - 2e-6, abs_tol=2e-6)
    assert "TTFT mean split: queue" in result.out


# ---------------------------------------------------------------- --recovery-check


def recovered(result: Any) -> dict[str, Any]:
    record: dict[str, Any] = result.everything[-1]
    assert record["record"] == "recovery" and record["lab"] == result.levels[0]["lab"]
    assert record["run_id"] == result.levels[0]["run_id"] and record["after_s"] >= 0
    return record


def test_an_idle_server_that_answers_has_recovered(tmp_path: Path) -> None:
    def answer(request: Request) -> list[Step]:
        return [whole_stream()] if request.is_chat else [json_answer(slots(False, False))]

    with FakeServer(answer) as server:
        result = load(server, tmp_path, "--recovery-check", "--label", "x")
    record = recovered(result)
    assert result.code == 0 and (record["idle"], record["answered"], record["label"]) == (True, True, "x")
    assert "recovery: server idle, fresh request answered" in result.out
    assert server.requests[-1].is_warm_up and server.requests[-1].doc["max_tokens"] <= 8
    assert "1 line(s) appended" in result.out or "2 line(s) appended" in result.out
    line = (tmp_path / "book.md").read_text("utf-8").splitlines()[-1]
    assert line == json.dumps(record, sort_keys=True) and '"record": "recovery"' in line


def test_a_busy_server_is_waited_for(tmp_path: Path) -> None:
    looks = iter([False, True, True, False])

    def answer(request: Request) -> list[Step]:
        if request.is_chat:
            return [whole_stream()]
        return [json_answer(slots(next(looks, False)))] if request.path == "/slots" else [NOT_FOUND]

    with FakeServer(answer) as server:
        result = load(server, tmp_path, "--recovery-check")
    assert result.code == 0 and recovered(result)["idle"] is True and list(looks) == []


def test_a_server_that_never_becomes_idle_has_not_recovered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load_test, "IDLE_LIMIT_S", 0.1)

    def answer(request: Request) -> list[Step]:
        return [whole_stream()] if request.is_chat else [json_answer(slots(True))]

    with FakeServer(answer) as server:
        result = load(server, tmp_path, "--recovery-check")
    assert result.code == 1 and (recovered(result)["idle"], recovered(result)["answered"]) == (False, True)
    assert "did not become idle" in result.err


def test_a_server_that_does_not_answer_any_more_has_not_recovered(tmp_path: Path) -> None:
    def answer(request: Request) -> list[Step]:
        if not request.is_chat:
            return [json_answer(slots(False))]
        return [plain("500 X", '{"error":"out of memory"}')] if request.is_warm_up else [whole_stream()]

    with FakeServer(answer) as server:
        result = load(server, tmp_path, "--recovery-check")
    assert result.code == 1 and (recovered(result)["idle"], recovered(result)["answered"]) == (True, False)
    assert "out of memory" in result.err and result.levels[0]["completed"] == 1


def test_a_recovery_line_that_cannot_be_stored_stands_on_stdout(tmp_path: Path) -> None:
    book = tmp_path / "book.md"

    def meddle() -> None:
        book.rename(tmp_path / "old.md")
        book.mkdir()

    def answer(request: Request) -> list[Step]:
        if not request.is_chat:
            return [NOT_FOUND]
        return [meddle, whole_stream()] if request.is_warm_up else [whole_stream()]

    with FakeServer(answer) as server:
        result = load(server, tmp_path, "--recovery-check")
    assert result.code == 1
    level, recovery = (json.loads(line) for line in result.out.splitlines() if line.startswith("{"))
    assert level["concurrency"] == 1 and recovery["record"] == "recovery"
    book.rmdir()


def test_an_answer_that_is_whole_stays_whole_when_its_connection_closes_with_it() -> None:
    """Both may be read in one turn of the event loop, and only then looked at."""
    answer = load_test.PlainAnswer()
    answer.feed(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n[]\r\n0\r\n\r\n", 1.0)
    answer.end_of_stream(1.0)
    assert answer.over and answer.problem is None and answer.body == b"[]"
    half = load_test.PlainAnswer()
    half.feed(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n[", 1.0)
    half.end_of_stream(1.0)
    assert half.problem is not None
