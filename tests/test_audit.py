"""What the audit of a notebook catches: every number of an honest record altered, one at a time.

"always" means that `summarise_load.py --check` fails for every such alteration, "never" that it fails for none, and
"some" makes no claim: a median that moves a little and stays between its neighbours fits the rest of its line. The raw
records (`--raw`) show that as well. No arithmetic can show what a line's texts say of machine, model and engine, the
server's own figures, a line whose figures were all changed so that they fit again, or a bad run that was left out.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT, RunProgram, SimEngineFactory

Record = dict[str, Any]

# field: altered by 1 % (a count by at least one), to half or double, by 1 % beside the raw records
CAUGHT = {
    **dict.fromkeys(("requests", "completed", "failed", "within_slo", "output_tokens", "wall_s"), ("always",) * 3),
    **dict.fromkeys(("output_tokens_per_s", "requests_per_s", "goodput_requests_per_s"), ("always",) * 3),
    "mean_in_flight": ("some", "always", "always"),
    **dict.fromkeys(("ttft_s", "tpot_s", "e2e_s"), ("some", "some", "always")),
    "prompt_tokens_mean": ("never", "some", "always"),
    "cached_tokens_mean": ("never", "some", "always"),
    **dict.fromkeys(("context_length", "server_slots", "max_tokens", "temperature", "warmup"), ("never",) * 3),
    **dict.fromkeys(("client", "server", "ttft_split_s"), ("never",) * 3),
}


def numbers_in(value: Any, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], float]]:
    """Each number under a field, with the keys that lead to it."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from numbers_in(inner, (*path, key))
    elif isinstance(value, (int, float)) and not isinstance(value, bool):
        yield path, value


def alterations(record: Mapping[str, Any], field: str, factors: Sequence[float]) -> Iterator[Record]:
    """Copies of a record with one number under a field altered; a count moves by at least one, and not below 0."""
    for path, value in numbers_in(record[field], (field,)):
        for factor in factors:
            changed: float = value * factor or 0.5
            if isinstance(value, int):
                changed = max(value + 1, round(changed)) if factor > 1 else min(value - 1, round(changed))
                changed = value + 1 if changed < 0 else changed
            altered: Record = json.loads(json.dumps(record))
            inner: Any = altered
            for key in path[:-1]:
                inner = inner[key]
            inner[path[-1]] = changed
            yield altered


def is_caught(folder: Path, records: Sequence[Mapping[str, Any]], *more: str) -> bool:
    """Whether the check of a notebook of these records fails in `consistent` or in `raw`."""
    sys.path.insert(0, str(ROOT))
    program = importlib.import_module("summarise_load")
    sys.path.remove(str(ROOT))
    notebook = folder / "altered.md"
    notebook.write_text("".join(json.dumps(record, sort_keys=True) + "\n" for record in records), "utf-8")
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(io.StringIO()):
        program.main(["--labbook", str(notebook), "--check", *more])
    return any(line.startswith(("FAIL  consistent", "FAIL  raw")) for line in printed.getvalue().splitlines())


@pytest.fixture
def measured(tmp_path: Path, run_program: RunProgram, sim_engine: SimEngineFactory) -> list[Record]:
    """The two levels of a short run, whose raw records lie in `raw.jsonl` beside the test."""
    engine = sim_engine("--a-ms", 2, "--b-ms", 0.1)
    load = ("--base-url", engine.base_url, "--concurrency", "1,2", "--requests", 4, "--max-tokens", 8, "--sample", 0.02)
    done = run_program("load_test.py", *load, "--raw", "raw.jsonl")
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in (tmp_path / "labbook.md").read_text("utf-8").splitlines()]


def test_one_line_alone(tmp_path: Path) -> None:
    walk = (ROOT / "tests" / "data" / "walk" / "sim.md").read_text("utf-8")
    level = next(
        record
        for record in map(json.loads, (line for line in walk.splitlines() if line.startswith("{")))
        if record["concurrency"] == 20
    )
    assert not is_caught(tmp_path, [level])
    wrong = [
        f"{field}: altered by {factors}"
        for field, claims in CAUGHT.items()
        for claim, factors in zip(claims, ((1.01, 0.99), (2.0, 0.5)))
        if claim != "some"
        for altered in alterations(level, field, factors)
        if is_caught(tmp_path, [altered]) != (claim == "always")
    ]
    assert not wrong


def test_a_line_beside_its_raw_records(tmp_path: Path, measured: Sequence[Record]) -> None:
    raw = ("--raw", str(tmp_path / "raw.jsonl"))
    first, second = measured
    assert not is_caught(tmp_path, measured, *raw)
    wrong = [
        field
        for field, (*_, claim) in CAUGHT.items()
        for altered in alterations(second, field, (1.01,))
        if is_caught(tmp_path, [first, altered], *raw) != (claim == "always")
    ]
    assert not wrong
