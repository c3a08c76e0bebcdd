"""What the load generator shows of a server, against three of them: the simulated engine in both dialects and a real
llama.cpp server with a tiny model."""

from __future__ import annotations

import json
import os
import re
import select
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT, RunProgram, SimEngine, SimEngineFactory
from fake_server import strict_json

SLOTS = 2


@dataclass(frozen=True)
class Server:
    kind: str
    base_url: str
    model: str

    @property
    def is_vllm(self) -> bool:
        return self.kind == "simulated vllm"


def real_server(folder: Path, port: int) -> subprocess.Popen[bytes]:
    """The wheel's llama.cpp server with a tiny model, which it still loads when this returns."""
    model, engines = folder / "tiny.gguf", ROOT / "tests" / "engines"
    subprocess.run([sys.executable, str(engines / "tiny_gguf.py"), str(model)], check=True, timeout=60)
    settings = ("--parallel", SLOTS, "--ctx-size", SLOTS * 4096, "--threads", 1, "--threads-http", 32)
    known_as = ("--model", model, "--alias", "tiny", "--port", port, "--metrics", "--slots")
    with (folder / "server.log").open("wb") as log:
        return subprocess.Popen(
            [sys.executable, str(engines / "llama_wheel_server.py"), *map(str, (*settings, *known_as))],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
        )


@pytest.fixture(
    scope="module",
    params=["simulated llama", "simulated vllm", pytest.param("real llama.cpp", marks=pytest.mark.engine)],
)
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("server")
    if request.param != "real llama.cpp":
        figures = ("--slots", SLOTS, "--a-ms", 4, "--b-ms", 0.5, "--prefill-tok-s", 20000)
        engine = SimEngine(folder, "--dialect", request.param.split()[1], *figures)
        yield Server(request.param, engine.base_url, "sim-chat")
        engine.stop()
        return
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    process = real_server(folder, port)
    base_url = f"http://127.0.0.1:{port}/v1"
    waiting = [sys.executable, str(ROOT / "load_test.py"), "--base-url", base_url, "--wait-ready", "60", "--probe"]
    try:
        subprocess.run(waiting, check=True, timeout=90, stdout=subprocess.DEVNULL)
        yield Server(request.param, base_url, "tiny")
    finally:
        process.terminate()
        process.wait(timeout=30)


class Runs:
    """The programs, in one folder, against one server."""

    def __init__(self, run: RunProgram, folder: Path, server: Server) -> None:
        self.run, self.folder, self.server = run, folder, server

    def load(self, *args: object, code: int = 0, **more: Any) -> subprocess.CompletedProcess[str]:
        done = self.run("load_test.py", "--base-url", self.server.base_url, "--max-tokens", 12, *args, **more)
        assert done.returncode == code, done.stdout + done.stderr
        return done

    def summary(self, *args: object) -> str:
        done = self.run("summarise_load.py", *args)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def records(self, kind: str | None = None) -> list[dict[str, Any]]:
        lines = (self.folder / "labbook.md").read_text("utf-8").splitlines()
        return [record for record in map(strict_json, lines) if record.get("record") == kind]


@pytest.fixture
def runs(run_program: RunProgram, tmp_path: Path, server: Server) -> Runs:
    return Runs(run_program, tmp_path, server)


def test_probe_shows_one_answer_and_what_the_server_says_of_itself(runs: Runs) -> None:
    shown = runs.load("--probe").stdout
    fields = dict(re.findall(r"^  (\w+) +(.*)$", shown, re.MULTILINE))
    assert fields["model"] == runs.server.model and fields["finish"] == "length" and len(fields["text"]) > 20
    assert json.loads(fields["usage"])["completion_tokens"] == 12
    assert fields["context"] == "4096 tokens per sequence"
    assert fields.get("slots") == (None if runs.server.is_vllm else str(SLOTS))
    assert shown.endswith("probe passed\n") and not (runs.folder / "labbook.md").exists()


def test_watching_a_level_with_more_requests_than_slots(runs: Runs) -> None:
    shown = runs.load("--concurrency", 6, "--requests", 24, "--max-tokens", 40, "--sample", 0.01).stdout
    (level,) = runs.records()
    told = level["server"]
    assert told["prompt_tokens"] + (0 if runs.server.is_vllm else told["cached_tokens"]) >= 24 * 20
    if runs.server.is_vllm:
        assert told["peak_running"] <= SLOTS and told["peak_waiting"] <= 6 and told["preemptions"] == 0
        assert 0 < told["peak_cache_usage"] <= 1 and told["slots"] is None
        assert f"peak running {told['peak_running']}, peak waiting {told['peak_waiting']}, " in shown
    else:
        assert (told["slots"], told["context_per_slot"]) == (SLOTS, 4096) and told["peak_busy_slots"] <= SLOTS
        assert told["peak_deferred"] <= 6 and 1 <= told["busy_slots_per_decode"] <= SLOTS
        assert f"server: slots {SLOTS}, context per slot 4096, peak busy slots {told['peak_busy_slots']}, " in shown
    assert level["cached_tokens_mean"] * level["completed"] == pytest.approx(told["cached_tokens"], abs=0.01 * 24)
    assert "disagree" not in shown


def test_the_parts_of_the_time_to_first_token_add_up(runs: Runs) -> None:
    runs.load("--concurrency", "2,8", "--requests", 16, "--max-tokens", 20, "--sample", 0.05)
    crowd = runs.records()[-1]
    split = crowd["ttft_split_s"]
    assert set(split) == {"queue", "prefill", "rest"}
    assert all(set(part) == ({"mean"} if runs.server.is_vllm else {"mean", "p50", "p90"}) for part in split.values())
    whole = sum(part["mean"] for part in split.values())
    assert whole == pytest.approx(crowd["ttft_s"]["mean"], abs=1e-3)  # no part is below 0; parts are rounded
    assert split["queue"]["mean"] > 0


def test_a_parallelism_labs_view(runs: Runs) -> None:
    shown = runs.load(
        *("--concurrency", 4, "--requests", 4, "--per-request", "--no-thinking", "--sample", 0.01, "--raw", "raw.jsonl")
    ).stdout
    rows = re.findall(r"# +(\d+)  latency +(\S+) s  tokens +(\d+)  tokens/s +(\S+)  in its own slot +(\S+)", shown)
    requests = [strict_json(line) for line in (runs.folder / "raw.jsonl").read_text("utf-8").splitlines()]
    by_number = {request["index"]: request for request in requests}
    assert sorted(int(row[0]) for row in rows) == sorted(by_number) == [0, 1, 2, 3]
    for number, latency, tokens, rate, own in rows:
        request = by_number[int(number)]
        assert (
            float(latency) == pytest.approx(request["e2e_s"], abs=6e-4)
            and int(tokens) == request["output_tokens"] == 12
        )
        assert float(rate) == pytest.approx(12 / request["e2e_s"], rel=1e-3)
        assert float(own) == pytest.approx(1 / request["tpot_s"], rel=1e-3)
    (level,) = runs.records()
    closing = re.search(r"latency mean (\S+) s  max (\S+) s  total (\S+) s  aggregate (\S+) tok/s", shown)
    assert closing is not None
    figures = (level["e2e_s"]["mean"], level["e2e_s"]["max"], level["wall_s"], level["output_tokens_per_s"])
    assert [float(text) for text in closing.groups()] == pytest.approx(figures, abs=0.01)
    assert level["extra_body"] == {"chat_template_kwargs": {"enable_thinking": False}}


def test_a_server_authors_bench(runs: Runs) -> None:
    """Two servers by label: stdout is JSON alone, the key comes from the environment and stays there."""
    common = ("--concurrency", "1,2", "--requests", 8, "--json", "--api-key-env", "BENCH_KEY")
    for label in ("ours", "theirs"):
        done = runs.load(*common, "--label", label, env={"BENCH_KEY": "sk-only-here"})
        levels = [strict_json(line) for line in done.stdout.splitlines()]
        assert [level["concurrency"] for level in levels] == [1, 2]
        assert all(level["ttft_s"]["p95"] > 0 and level["failed"] == 0 for level in levels)
        assert "sk-only-here" not in done.stdout + done.stderr + (runs.folder / "labbook.md").read_text("utf-8")
    document = strict_json(runs.summary("--compare", "ours", "theirs", "--json"))
    assert [row["c"] for row in document["levels"]] == [1, 2]
    assert all(row["ttft_s.p90"][side] > 0 for row in document["levels"] for side in "ab")


def test_repeats_are_interleaved_and_shown_as_median_and_range(runs: Runs) -> None:
    for label in ("before", "after"):
        runs.load("--concurrency", "1,2", "--requests", 6, "--repeat", 3, "--label", label)
    order = [(level["repeat"], level["concurrency"]) for level in runs.records() if level["label"] == "before"]
    assert order == [(0, 1), (0, 2), (1, 1), (1, 2), (2, 1), (2, 2)]
    levels = strict_json(runs.summary("--label", "before", "--json"))["levels"]
    for level in levels:
        low, median, high = sorted(
            record["output_tokens_per_s"]
            for record in runs.records()
            if record["label"] == "before" and record["concurrency"] == level["c"]
        )
        assert level["output_tokens_per_s"] == median and level["runs"] == 3
        assert level["ranges"]["output_tokens_per_s"] == [low, high]
    compared = strict_json(runs.summary("--compare", "before", "after", "--json"))
    for row in compared["levels"]:
        rates = row["output_tokens_per_s"]
        assert rates["different"] is not (rates["low"] <= 1 <= rates["high"]), row


def test_the_ladder_stops_at_the_objective(runs: Runs) -> None:
    shown = runs.load("--concurrency", "1,2,4", "--requests", 4, "--stop-at-slo", "--slo-tpot", "0.000001").stdout
    assert [level["concurrency"] for level in runs.records()] == [1] and "outside the SLO" in shown


def test_left_clean_a_server_answers_once_more(runs: Runs) -> None:
    shown = runs.load("--concurrency", 4, "--requests", 8, "--recovery-check").stdout
    (recovery,) = runs.records("recovery")
    assert recovery["idle"] is True and recovery["answered"] is True
    assert "recovery: server idle, fresh request answered" in shown


def test_mixed_lengths_are_three_short_prompts_and_a_long_one(runs: Runs) -> None:
    runs.load("--concurrency", 2, "--requests", 8, "--prompt-set", "mixed-length", "--raw", "raw.jsonl")
    requests = [strict_json(line) for line in (runs.folder / "raw.jsonl").read_text("utf-8").splitlines()]
    lengths = sorted(request["prompt_tokens"] for request in requests)
    assert lengths[5] < lengths[6] / 8, lengths
    (level,) = runs.records()
    assert level["output_tokens_per_request"] == {"min": 12, "p50": 12, "p90": 12, "max": 12}


def test_waiting_for_a_server_that_still_loads(runs: Runs, sim_engine: SimEngineFactory) -> None:
    if runs.server.kind == "real llama.cpp":
        runs.load("--wait-ready", 30, "--requests", 2, "--concurrency", 1)
    else:
        engine = sim_engine("--dialect", runs.server.kind.split()[1], "--loading-s", 0.7)
        runs.load("--base-url", engine.base_url, "--wait-ready", 30, "--requests", 2, "--concurrency", 1)
        engine.stop()
        refused = [line for line in engine.read_log() if line["status"] != 200]
        assert len(engine.read_log()) - len(refused) == 4, "one to be ready, one to warm up, two measured"
    (level,) = runs.records()
    assert level["failed"] == 0 and level["requests"] == 2


@pytest.mark.skipif(sys.platform == "win32", reason="needs a pseudo-terminal")
def test_on_a_terminal_one_line_tells_how_far_it_is(runs: Runs) -> None:
    import pty

    shown, screen = pty.openpty()
    command = [sys.executable, str(ROOT / "load_test.py"), "--base-url", runs.server.base_url, "--concurrency", "2"]
    number = "600" if runs.server.kind == "real llama.cpp" else "40"  # so that it lasts seconds
    with subprocess.Popen(
        [*command, "--requests", number, "--max-tokens", "32"],
        cwd=runs.folder,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=screen,
    ) as process:
        os.close(screen)
        seen = b""
        while select.select([shown], [], [], 60)[0]:
            try:
                part = os.read(shown, 65536)
            except OSError:  # Linux says so when the other side has closed
                break
            if not part:
                break
            seen += part
        assert process.wait(timeout=60) == 0
    os.close(shown)
    lines = [line for line in seen.split(b"\r") if b"in flight" in line]
    assert lines and f"/{number}".encode() in lines[0] and b"\n" not in lines[0], seen
    assert seen.rstrip().endswith(b"\x1b[K"), "gone at the end"
    piped = runs.load("--concurrency", 2, "--requests", 8)
    assert "\r" not in piped.stdout + piped.stderr


def test_a_conversation_finds_what_was_said_in_the_cache(runs: Runs) -> None:
    """What a slot's cache (or vLLM's pool) is worth: each turn's prompt holds the one before it."""
    shown = runs.load("--turns", 3, "--concurrency", 1, "--requests", 6).stdout
    (level,) = runs.records()
    prompts = [turn["prompt_tokens_mean"] for turn in level["by_turn"]]
    cached = [turn["cached_tokens_mean"] for turn in level["by_turn"]]
    assert prompts[0] < prompts[1] < prompts[2] and cached[0] < cached[1] < cached[2], level["by_turn"]
    assert all(later > 0.5 * earlier for earlier, later in zip(prompts, cached[1:])), level["by_turn"]
    assert "by turn: TTFT p50 " in shown


@pytest.mark.parametrize("dialect", ["llama", "vllm"])
def test_the_search_finds_the_level_above_which_a_server_refuses(
    dialect: str, sim_engine: SimEngineFactory, run_program: RunProgram, tmp_path: Path
) -> None:
    """Six slots and no queue. How long anything takes decides nothing: the SLO is out of reach."""
    engine = sim_engine("--dialect", dialect, "--slots", 6, "--max-queue", 0, "--a-ms", 50)
    slo = ("--slo-ttft", 1000, "--slo-tpot", 1000)
    size = ("--concurrency", 2, "--requests", 2, "--max-tokens", 8, "--labbook", tmp_path / "book.md")
    done = run_program("load_test.py", "--base-url", engine.base_url, *size, *slo, "--find-operating-point", 32)
    assert done.returncode == 0 and "Up to 6 requests in flight stay" in done.stdout and "7 is outside" in done.stdout
    levels = [strict_json(line) for line in (tmp_path / "book.md").read_text("utf-8").splitlines()]
    assert [level["concurrency"] for level in levels] == [2, 4, 8, 6, 7, 6]
    assert [level["failed"] > 0 for level in levels] == [False, False, True, False, True, False]
