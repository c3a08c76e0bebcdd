"""The notebook of three real engines in `data/engines`: what the programs make of it, and that it is not accused.

Its lines were written by `engines/run.sh` on a CPU with tiny models of random weights: a sweep, the prefix pair and
a curve summary of llama-server, vLLM and mlx_lm.server each, and llama-server's variants.
"""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT, RunProgram
from fake_server import strict_json

NOTEBOOK = ROOT / "tests" / "data" / "engines" / "labbook.md"
ENGINES = ("llama", "vllm", "mlx")
RECORDS: list[dict[str, Any]] = [
    strict_json(line) for line in NOTEBOOK.read_text("utf-8").splitlines() if line.startswith("{")
]


def levels_of(label: str) -> list[dict[str, Any]]:
    return [record for record in RECORDS if record["label"] == label and "concurrency" in record]


def answer(run_program: RunProgram, *args: object) -> Any:
    done = run_program("summarise_load.py", "--labbook", NOTEBOOK, *args, "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    return strict_json(done.stdout)


def test_nothing_real_is_accused(run_program: RunProgram) -> None:
    status = {one["code"]: one["status"] for one in answer(run_program, "--check")["statements"]}
    assert "FAIL" not in status.values() and status["consistent"] == "PASS"
    assert {record["engine"] for record in RECORDS} == {"llama.cpp", "vllm", "mlx-lm"}


@pytest.mark.parametrize("engine", ENGINES)
def test_the_curve_is_that_of_its_lines(run_program: RunProgram, engine: str) -> None:
    """Fit, scaling and knee, worked out here from the lines alone."""
    label = f"{engine}-baseline"
    curve = answer(run_program, "--label", label)
    levels = levels_of(label)
    assert [level["output_tokens_per_s"] for level in curve["levels"]] == [
        level["output_tokens_per_s"] for level in levels
    ]
    points = [(level["concurrency"], 1000 * level["tpot_s"]["p50"]) for level in levels]
    mean_c, mean_t = (math.fsum(values) / len(points) for values in zip(*points))
    slope = math.fsum((c - mean_c) * (t - mean_t) for c, t in points) / math.fsum((c - mean_c) ** 2 for c, _ in points)
    assert curve["fit"]["b_ms"] == pytest.approx(slope) and curve["fit"]["a_ms"] == pytest.approx(
        mean_t - slope * mean_c
    )
    rates = {level["concurrency"]: level["output_tokens_per_s"] for level in levels}
    gains = [(b, (rates[b] - rates[a]) / (b - a)) for a, b in zip((1, 5, 10), (5, 10, 20))]
    first = next((c for c, gain in gains if gain < rates[1] / 2), None)
    assert (curve["knee"]["between"] or [None, None])[1] == first


def test_where_the_server_saw_nobody_wait_there_was_no_queue(run_program: RunProgram) -> None:
    assert all(level["server"]["peak_deferred"] == 0 for level in levels_of("llama-baseline"))
    readings = answer(run_program, "--label", "llama-baseline")["statements"]
    assert "queueing" not in [reading["code"] for reading in readings]


@pytest.mark.parametrize("engine", ENGINES)
def test_the_shared_preamble_was_cached_and_the_control_was_not(run_program: RunProgram, engine: str) -> None:
    compared = answer(run_program, "--compare", f"{engine}-prefix-unique", f"{engine}-prefix-shared")
    for side, low, high in (("a", 0.0, 0.1), ("b", 0.5, 1.0)):
        shares = [level["cached_share"] for level in compared[side]["levels"]]
        assert all(low <= share <= high for share in shares), (side, shares)


@pytest.mark.parametrize("engine", ENGINES)
def test_it_draws(run_program: RunProgram, tmp_path: Path, engine: str) -> None:
    curve = json.dumps(answer(run_program, "--label", f"{engine}-baseline"))
    done = run_program("scripts/draw_curve.py", "--svg", "curve.svg", "--html", "curve.html", input=curve)
    assert done.returncode == 0, done.stderr
    picture = (tmp_path / "curve.svg").read_text("utf-8")
    assert f"{engine}-baseline" in picture
    drawn = [
        len(re.findall("[ML]", path)) for path in re.findall(r'<path d="([^"]*)" class="line [^"]*model"', picture)
    ]
    assert drawn == ([] if engine == "llama" else [121]), "inside its frame; llama's fit misses a level by 122 %"
    assert "consistent" in (tmp_path / "curve.html").read_text("utf-8")
