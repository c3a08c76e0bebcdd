"""What the client itself costs: a thousand streams at once, its memory, its calibration, and when it must speak up.

No figure here is a limit on time. What the client says of itself is held against its own records, the engine's log
and the rule of the warning, worked out once more.
"""

from __future__ import annotations

import copy
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT, SimEngineFactory
from fake_server import Result, Running, arguments, read_records

import load_test

THOUSAND = 1000
NO_NUMBER = (type(None), bool, str)


def run_against(base_url: str, folder: Path, *args: object) -> Result:
    """The program in a process of its own: its limits, its CPU time and its event loop are not this one's."""
    with Running(folder, arguments(folder, base_url, "--model", "sim-chat", "--timeout", 120, *args)) as running:
        result = running.finish(200)
    assert "Traceback" not in result.said and result.code == 0, result.said
    return result


def words_of(record: dict[str, Any]) -> list[str]:
    """The reasons for a warning, by the rule: lag above both a timer's own 2 ms and a quarter of TPOT, a pause above
    0.1 s and 3 % of the level, a floor per delta that is above a quarter of TPOT when every stream has a delta, over
    80 % of a core in a level of at least a second."""
    client, tpot_s, found = record["client"], record["tpot_s"]["p50"], []
    lag_s, floor_us, cpu = client["loop_lag_s"]["p99"], client["floor_us_per_delta"], client["cpu_fraction"]
    if tpot_s is not None and lag_s is not None and lag_s > 0.002 and lag_s > tpot_s / 4:
        found.append("loop lag")
    if (client["loop_lag_s"]["max"] or 0.0) > max(0.1, 0.03 * record["wall_s"]):
        found.append("stood still")
    if tpot_s is not None and floor_us is not None and floor_us * record["concurrency"] * 1e-6 > tpot_s / 4:
        found.append("its floor")
    if cpu is not None and cpu > 0.8 and record["wall_s"] >= 1:
        found.append("of one core")
    return found


def assert_says_what_it_cost(result: Result) -> None:
    """Every record has the client's figures, and the printed level warns where, and only where, the rule says so."""
    for record in result.levels:
        client, lag = record["client"], record["client"]["loop_lag_s"]
        assert not isinstance(client["cpu_fraction"], NO_NUMBER) and 0 <= client["cpu_fraction"] < 1.5
        assert set(lag) == {"p50", "p99", "max"}
        if record["wall_s"] < load_test.SENTINEL_S and set(lag.values()) == {None}:
            continue  # it ended before the first look
        assert not any(isinstance(value, NO_NUMBER) for value in lag.values())
        assert 0 <= lag["p50"] <= lag["p99"] <= lag["max"] <= record["wall_s"] + load_test.SENTINEL_S
    levels = re.split(r"^  c=", result.out[result.out.index("SLO TTFT ") :], flags=re.MULTILINE)[1:]
    levels = [text for text in levels if "null server" not in text]
    assert len(levels) == len(result.levels)
    for text, record in zip(levels, result.levels):
        lines = [line.strip() for line in text.splitlines() if line.strip().startswith("client: ")]
        expected = words_of(record)
        assert len(lines) == bool(expected), (lines, record["client"])
        for word in expected:
            assert word in lines[0]


# ---------------------------------------------------------------- a thousand at once


def most_in_flight(raws: Sequence[dict[str, Any]]) -> int:
    """How many requests were under way together at most, by their own times."""
    changes = [
        (raw["started_s"] + 1e-5, 1) for raw in raws
    ]  # a rounding earlier than its predecessor's end is no overlap
    changes += [(raw["started_s"] + raw["connect_s"] + raw["ended_s"], -1) for raw in raws]
    most = now = 0
    for _, step in sorted(changes):
        now += step
        most = max(most, now)
    return most


@pytest.mark.parametrize("dialect", ["llama", "vllm"])
def test_a_thousand_streams(dialect: str, sim_engine: SimEngineFactory, tmp_path: Path) -> None:
    engine = sim_engine("--dialect", dialect, "--slots", THOUSAND, "--a-ms", 150, "--b-ms", 0, "--prefill-tok-s", 10**8)
    size = ["--concurrency", THOUSAND, "--requests", THOUSAND + 100, "--max-tokens", 6]
    result = run_against(engine.base_url, tmp_path, *size)
    engine.stop()
    (level,), log = result.levels, engine.read_log()
    assert (level["requests"], level["completed"], level["failed"]) == (1100, 1100, 0) and len(log) == 1100
    assert level["errors"] == {} and level["first_error"] is None and level["finish_reasons"] == {"length": 1100}
    assert level["output_tokens"] == sum(line["output_tokens"] for line in log) == 6600
    assert level["token_counts"] == "usage" and not level["interrupted"]
    raws = result.requests
    assert sorted(raw["prompt_tokens"] for raw in raws) == sorted(line["prompt_tokens"] for line in log)
    assert sum(raw["deltas"] for raw in raws) == sum(len(line["sends"]) for line in log)
    assert 1 <= most_in_flight(raws) <= THOUSAND and level["mean_in_flight"] <= THOUSAND
    assert "c=1000  ok 1100/1100 fail 0 " in result.out
    assert_says_what_it_cost(result)


# ---------------------------------------------------------------- calibrating


NULL_LINE = re.compile(r"^  c= *(\d+)  null server: client (\S+) us CPU per delta .*, TTFT p50 (\S+) s$", re.MULTILINE)


def test_calibration_is_stored_with_its_own_level_and_speaks_up(sim_engine: SimEngineFactory, tmp_path: Path) -> None:
    """Against a server that sends a whole answer in one burst there is no time between tokens: the floor must show."""
    engine = sim_engine("--null")
    size = ["--concurrency", "1,60", "--requests", 60, "--max-tokens", 40]
    result = run_against(engine.base_url, tmp_path, "--calibrate", *size)
    engine.stop()
    assert len(engine.read_log()) == 120, "the calibration's requests go to a server of its own"
    printed = {int(c): (float(us), float(ttft)) for c, us, ttft in NULL_LINE.findall(result.out)}
    assert list(printed) == [1, 60]
    for record in result.levels:
        client = record["client"]
        assert client["floor_us_per_delta"] > 0 and client["floor_ttft_s"] > 0
        us_per_delta, ttft_s = printed[record["concurrency"]]
        assert client["floor_us_per_delta"] == pytest.approx(us_per_delta, abs=0.006)
        assert client["floor_ttft_s"] == pytest.approx(ttft_s, abs=0.00006)
        assert record["output_tokens"] == 60 * 40
    one, sixty = (record["client"] for record in result.levels)
    assert (one["floor_us_per_delta"], one["floor_ttft_s"]) != (sixty["floor_us_per_delta"], sixty["floor_ttft_s"])
    assert "its floor" in words_of(result.levels[1])
    assert_says_what_it_cost(result)


def test_without_calibration_there_is_no_floor(sim_engine: SimEngineFactory, tmp_path: Path) -> None:
    engine = sim_engine("--a-ms", 1, "--b-ms", 0, "--prefill-tok-s", 10**8)
    result = run_against(engine.base_url, tmp_path, "--concurrency", "1,8", "--requests", 16, "--max-tokens", 20)
    for record in result.levels:
        assert record["client"]["floor_us_per_delta"] is None and record["client"]["floor_ttft_s"] is None
    assert_says_what_it_cost(result)


# ---------------------------------------------------------------- the warning, at its limits


RECORD: dict[str, Any] = {
    "concurrency": 20,
    "wall_s": 15.0,
    "tpot_s": {"p50": 0.02},
    "client": {
        "cpu_fraction": 0.1,
        "loop_lag_s": {"p50": 0.0001, "p99": 0.001, "max": 0.002},
        "floor_us_per_delta": None,
        "floor_ttft_s": None,
    },
}

# What is changed of the record above, and the reasons that the warning then names.
LIMITS: list[tuple[dict[str, Any], list[str]]] = [
    ({}, []),
    ({"lag": 0.005}, []),  # just a quarter of TPOT
    ({"lag": 0.005001}, ["loop lag"]),
    ({"lag": 0.002, "tpot": 0.004}, []),  # a timer's own coarseness
    ({"lag": 0.002, "tpot": 0.0}, []),
    ({"lag": 0.002001, "tpot": 0.004}, ["loop lag"]),
    ({"lag": 9.9, "tpot": None}, []),  # no request of two tokens: nothing to hold it against
    ({"lag": None}, []),
    ({"pause": 4.0}, ["stood still"]),  # SIGSTOP for 4 s of 15 s, whatever the percentiles say
    ({"pause": 4.0, "tpot": None}, ["stood still"]),
    ({"pause": 0.4499}, []),
    ({"pause": 0.4501}, ["stood still"]),
    ({"pause": 0.1, "wall": 0.2}, []),
    ({"pause": 0.1001, "wall": 0.2}, ["stood still"]),
    ({"pause": None}, []),
    ({"floor": 250.0}, []),  # 20 x 250 us = 5 ms
    ({"floor": 250.001}, ["its floor"]),
    ({"floor": 250.001, "concurrency": 19}, []),
    ({"floor": 13.0, "concurrency": 1000}, ["its floor"]),
    ({"floor": 250.001, "tpot": None}, []),
    ({"cpu": 0.8}, []),
    ({"cpu": 0.9, "wall": 0.9}, []),  # of a short level it says nothing
    ({"cpu": 0.8001}, ["of one core"]),
    ({"cpu": 0.8001, "tpot": None}, ["of one core"]),
    ({"cpu": None}, []),
    ({"cpu": 1.2, "lag": 0.03, "floor": 300.0}, ["loop lag", "its floor", "of one core"]),
]


def record_with(changes: dict[str, Any]) -> dict[str, Any]:
    record = copy.deepcopy(RECORD)
    record["concurrency"] = changes.get("concurrency", 20)
    record["tpot_s"]["p50"] = changes.get("tpot", 0.02)
    record["client"]["loop_lag_s"]["p99"] = changes.get("lag", 0.001)
    record["wall_s"] = changes.get("wall", 15.0)
    record["client"]["loop_lag_s"]["max"] = changes.get("pause", 0.002)
    record["client"]["floor_us_per_delta"] = changes.get("floor")
    record["client"]["cpu_fraction"] = changes.get("cpu", 0.1)
    return record


@pytest.mark.parametrize(("changes", "reasons"), LIMITS, ids=[str(changes) for changes, _ in LIMITS])
def test_the_client_warns_past_its_limits_and_only_there(changes: dict[str, Any], reasons: list[str]) -> None:
    record = record_with(changes)
    warning = load_test.client_warning(record)
    assert words_of(record) == reasons  # the rule as this file has it
    if not reasons:
        assert warning is None
        return
    assert warning is not None and warning.startswith("client: ") and "second machine" in warning
    assert [word for word in ("loop lag", "stood still", "its floor", "of one core") if word in warning] == reasons


def test_the_evidence_is_the_records_own() -> None:
    warning = load_test.client_warning(record_with({"cpu": 1.2, "lag": 0.0304, "floor": 300.25}))
    assert warning is not None
    for part in ("p99 30.4 ms", "TPOT p50 20.0 ms", "300.2 us per delta", "6.0 ms a token", "120 % of one core"):
        assert part in warning


# ---------------------------------------------------------------- memory


FEEDS = """
import resource, sys
sys.path.insert(0, sys.argv[1])
import load_test
from fake_server import CHUNKED, DONE, LAST_CHUNK, chunk, delta, usage

def peak_mb():
    try:  # of this program alone: getrusage counts in whoever started it
        with open("/proc/self/status") as status:
            return next(int(line.split()[1]) for line in status if line.startswith("VmHWM")) * 1024 / 1e6
    except OSError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024) / 1e6

streams, deltas, per_read = 1000, 2000, int(sys.argv[2])
words = [chunk(delta(text)) for text in (" queue", " grows", "\\n\\n", " a", ' "busy"', ".")]
words.append(chunk(delta("-").replace(b"-", " \\u2013".encode())))  # as servers send it: not escaped
seen = [load_test.Stream(load_test.Observation()) for _ in range(streams)]
for one in seen:
    one.begin(1.0)
    one.feed(CHUNKED, 2.0)
reads = [b"".join(words[(first + k) % len(words)] for k in range(per_read)) for first in range(len(words))]
for number in range(deltas // per_read):
    for one in seen:
        one.feed(reads[number % len(reads)], 3.0 + number * 0.02)
records = []
for index, one in enumerate(seen):
    one.feed(chunk(delta(finish="length") + usage(9, deltas) + DONE) + LAST_CHUNK, 1e4)
    records.append(one.seen.record(index, 0.5))
seen = [one.seen for one in seen]
gaps = load_test.chunk_gaps(seen)
assert all(record.ok and record.deltas == deltas for record in records) and gaps["max"] is not None
print(sum(record.deltas for record in records), sum(len(one.moments) for one in seen), peak_mb())
"""


@pytest.mark.skipif(sys.platform == "win32", reason="asks for the peak memory as Unix systems tell it")
@pytest.mark.parametrize("per_read", [1, 8])
def test_a_thousand_streams_of_two_thousand_deltas_stay_under_300_mb(per_read: int) -> None:
    """Every delta's moment is kept, and all texts, until the figures have been worked out."""
    command = [sys.executable, "-c", FEEDS, str(ROOT / "tests"), str(per_read)]
    done = subprocess.run(command, capture_output=True, encoding="utf-8", stdin=subprocess.DEVNULL, timeout=200)
    assert done.returncode == 0, done.stderr
    deltas, moments, peak_mb = map(float, done.stdout.split())
    assert deltas == 2_000_000 and moments == deltas / per_read
    assert peak_mb < 300


# ---------------------------------------------------------------- where the time to first token went


@pytest.mark.parametrize("dialect", ["llama", "vllm"])
def test_the_parts_of_ttft_add_up_to_it(dialect: str, sim_engine: SimEngineFactory, tmp_path: Path) -> None:
    """One slot for three: the first request waits for nobody, all others for a whole answer."""
    a_s, b_s, rate, tokens = 0.004, 0.001, 4000, 6
    pace = ("--a-ms", a_s * 1e3, "--b-ms", b_s * 1e3, "--prefill-tok-s", rate, "--slots", 1, "--cache", "none")
    engine = sim_engine("--dialect", dialect, *pace)
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("of one length always, " * 20, "utf-8")
    size = ["--concurrency", 3, "--requests", 9, "--max-tokens", tokens, "--prompts", prompts, "--sample", 0.05]
    result = run_against(engine.base_url, tmp_path, *size)
    engine.stop()
    (level,), log, raws = result.levels, engine.read_log(), result.requests
    split, (prompt_tokens,) = level["ttft_split_s"], {line["prompt_tokens"] for line in log}
    assert set(split) == {"queue", "prefill", "rest"}
    assert all(set(part) == ({"mean"} if dialect == "vllm" else {"p50", "p90", "mean"}) for part in split.values())
    # On llama-server a part is cut off at 0 where the server's own times are longer than the client's TTFT.
    cut_off_s = 0.0
    if dialect == "llama":
        own_s = [(t["prompt_ms"] + t["predicted_ms"] / t["predicted_n"]) / 1e3 for t in (r["timings"] for r in raws)]
        cut_off_s = sum(max(0.0, own - raw["ttft_s"]) for own, raw in zip(own_s, raws)) / len(raws)
    total = sum(part["mean"] for part in split.values())
    assert total == pytest.approx(level["ttft_s"]["mean"] + cut_off_s, abs=2.5e-6)
    queued = [line["admitted"] - line["arrived"] for line in log]
    assert split["queue"]["mean"] > 0 and split["rest"]["mean"] > 0
    if dialect == "llama":
        for part in ("p50", "p90", "mean"):
            assert split["prefill"][part] == pytest.approx(prompt_tokens / rate, abs=2e-6)
        assert split["rest"]["mean"] >= a_s + b_s - 2e-6
    else:  # vLLM's prefill ends with the first token: one step is in it
        assert split["prefill"]["mean"] == pytest.approx(prompt_tokens / rate + a_s + b_s, abs=2e-6)
        assert split["queue"]["mean"] == pytest.approx(sum(queued) / len(queued), abs=2e-6)
    assert "TTFT mean split: queue " in result.out
    assert read_records(tmp_path / "book.md") == [level]
