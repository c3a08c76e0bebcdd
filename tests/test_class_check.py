"""A class's notebooks: verdicts, the table, what two notebooks share; each forgery caught or warned of, and no honest
notebook accused."""

from __future__ import annotations

import copy
import csv
import datetime
import io
import json
import random
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Callable

import pytest
from honest_levels import LEVELS, Json, Load, decimals, level_record, significant, simulate

import summarise_load as sl

Forge = Callable[[list[Json]], list[Json]]
HERE = Path(__file__).parent


def student_notebook(seed: int, repeats: int = 3, noise: float = 0.02, with_pair: bool = True) -> list[Json]:
    """The lines that one student's runs append: a repeated sweep and a prefix pair, one after another on one machine,
    each level's date at its end."""
    rng = random.Random(seed)
    now = datetime.datetime(2026, 11, 2 + seed % 20, 9, seed % 60, tzinfo=datetime.timezone.utc)
    machine: dict[str, Any] = {"a": rng.uniform(0.01, 0.03), "b": rng.uniform(0.0005, 0.003), "noise": noise}
    sweeps: list[tuple[str, str, Sequence[int], int, float]] = [("llama-baseline", "mixed", LEVELS, repeats, 0.1)]
    if with_pair:
        sweeps.append(("llama-prefix-unique", "unique-prefix", (1, 10), 1, 0.01))
        sweeps.append(("llama-prefix-shared", "shared-prefix", (1, 10), 1, 0.9))
    records = []
    for label, prompt_set, levels, times, cached in sweeps:
        run_id = f"{now:%Y%m%dT%H%M%S}-{rng.randrange(16**8):08x}"
        now += datetime.timedelta(seconds=2)
        for repeat in range(times):
            for c in levels:
                load = Load(c=c, requests=max(40, 4 * c), cached_share=cached, **machine)
                data = level_record(load, simulate(load, rng), decimals(6), decimals(4), label)
                now += datetime.timedelta(seconds=data["wall_s"] + rng.uniform(0.1, 1.0))
                data.update(prompt_set=prompt_set, run_id=run_id, repeat=repeat, host=f"desk {seed}")
                records.append({**data, "recorded_at": now.isoformat(timespec="seconds")})
        now += datetime.timedelta(seconds=rng.uniform(5, 60))
    return records


def write(path: Path, records: Iterable[Json]) -> Path:
    path.write_text("# Lab\n\n" + "".join(json.dumps(data, sort_keys=True) + "\n" for data in records), "utf-8")
    return path


def check(capsys: pytest.CaptureFixture[str], *args: object) -> tuple[int, str]:
    code = sl.main(["--check", *map(str, args)])
    return code, capsys.readouterr().out


def findings(capsys: pytest.CaptureFixture[str], path: Path) -> dict[str, tuple[str, str]]:
    """Rule -> (status, text) of one notebook."""
    _, out = check(capsys, path, "--json")
    return {item["code"]: (item["status"], item["text"]) for item in json.loads(out)["statements"]}


# ------------------------------------------------------------------------------------------------------ forgeries


def renamed_sweep(records: list[Json]) -> list[Json]:
    """A sweep copied under another label, host and run id, an hour later."""
    sweep = [data for data in records if data["label"] == "llama-baseline"]
    return records + [
        {**data, "label": "vllm-baseline", "engine": "vllm", "host": "another desk",
         "run_id": "20261125T100000-aaaaaaaa", "recorded_at": shifted(data["recorded_at"], hours=1)}
        for data in sweep
    ]  # fmt: skip


def shifted(date: str, **by: float) -> str:
    return (datetime.datetime.fromisoformat(date) + datetime.timedelta(**by)).isoformat(timespec="seconds")


def shifted_dates(records: list[Json]) -> list[Json]:
    return [{**data, "recorded_at": shifted(data["recorded_at"], days=3)} for data in records]


def duplicated_repeat(records: list[Json]) -> list[Json]:
    """c=20 of repeat 0 in the place of c=20 of repeat 2."""
    first = next(data for data in records if data["concurrency"] == 20 and data["repeat"] == 0)
    return [
        {**first, "repeat": 2, "recorded_at": data["recorded_at"]}
        if data["concurrency"] == 20 and data["repeat"] == 2
        else data
        for data in records
    ]


def deleted_repeat(records: list[Json]) -> list[Json]:
    return [data for data in records if not (data["concurrency"] == 20 and data["repeat"] == 1)]


def other_machine(records: list[Json]) -> list[Json]:
    """c=20 of a faster machine, with its own run id, under the label."""
    other = [data for data in student_notebook(999) if data["concurrency"] == 20 and data["label"] == "llama-baseline"]
    return [data for data in records if not (data["concurrency"] == 20 and data["label"] == "llama-baseline")] + other


def rounded(records: list[Json]) -> list[Json]:
    digits = significant(3)

    def short(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: short(inner) for key, inner in value.items()}
        return digits(value) if isinstance(value, float) else value

    return [
        {**data, **{name: short(data[name]) for name in ("ttft_s", "tpot_s", "e2e_s", "connect_s")}} for data in records
    ]


def doubled(records: list[Json]) -> list[Json]:
    """Twice the requests in twice the time: every rate stays."""
    counts = ("requests", "completed", "within_slo", "output_tokens", "wall_s")
    return [
        {**data, **{name: data[name] * 2 for name in counts},
         "finish_reasons": {name: count * 2 for name, count in data["finish_reasons"].items()}}
        for data in records
    ]  # fmt: skip


def from_the_formula(records: list[Json]) -> list[Json]:
    """A curve without noise: every step takes exactly a + b c."""
    return student_notebook(5, noise=0.0)


FORGERIES: list[tuple[Forge, str, str, str]] = [
    # what was done, the rule that sees it, its status, and what the finding must name
    (renamed_sweep, "consistent", "FAIL", "vllm-baseline"),
    (shifted_dates, "dates", "WARN", "llama-baseline"),
    (duplicated_repeat, "consistent", "FAIL", "c=20"),
    (deleted_repeat, "same-setup", "WARN", "2 runs, where other levels have 3"),
    (other_machine, "same-setup", "WARN", "host"),
    (rounded, "digits", "WARN", "llama-baseline"),
    (doubled, "dates", "WARN", "llama-baseline"),
    (from_the_formula, "noise", "WARN", "llama-baseline"),
]


@pytest.mark.parametrize("forge, rule, status, named", FORGERIES, ids=[case[0].__name__ for case in FORGERIES])
def test_a_forgery_is_caught_or_warned_of(
    forge: Forge, rule: str, status: str, named: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    honest = student_notebook(7)
    before = findings(capsys, write(tmp_path / "honest.md", honest))
    after = findings(capsys, write(tmp_path / "forged.md", forge(copy.deepcopy(honest))))
    assert before[rule][0] == "PASS", before[rule]
    assert after[rule][0] == status, after[rule]
    assert named in after[rule][1]


def test_a_doubled_wall_contradicts_a_window_that_was_left(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Outside the steady window a level only fills and drains, which takes a request or two."""
    forged = [
        {**data, "recorded_at": "2026-11-25T12:00:00+00:00", "run_id": "x"} for data in doubled(student_notebook(7))
    ]
    status, text = findings(capsys, write(tmp_path / "forged.md", forged))["consistent"]
    assert status == "FAIL" and "steady_window_s" in text


def test_a_thousand_honest_notebooks_accuse_nobody() -> None:
    """No rule about copies, dates, digits, noise or contradictions speaks of them, whatever their machine."""
    for seed in range(1000):
        records = student_notebook(
            seed, repeats=1 + seed % 3, noise=(0.002, 0.02, 0.1)[seed % 3], with_pair=seed % 4 == 0
        )
        notebook = sl.Notebook(f"{seed}.md")
        for line, data in enumerate(records, 1):
            notebook.records.append(sl.Record(line, sl.parse_json(json.dumps(data))))
        for item in sl.check(notebook):
            if item.code in ("consistent", "dates", "digits", "noise", "same-setup"):
                assert item.status == "PASS", (seed, item)


@pytest.mark.parametrize("name", ["engines/labbook.md", "walk/sim.md", "walk/two.md"])
def test_the_kept_notebooks_accuse_nobody(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    found = findings(capsys, HERE / "data" / name)
    for rule in ("consistent", "dates", "digits", "noise", "same-setup"):
        assert found[rule][0] == "PASS", found[rule]


# ------------------------------------------------------------------------------------------------------- a class


@pytest.fixture
def class_folder(tmp_path: Path) -> Path:
    """Three notebooks: one whole, one with a contradiction, one that is the first with its host and dates renamed."""
    whole = student_notebook(1)
    broken = student_notebook(2)
    broken[0]["completed"] -= 1
    copied = [
        {**data, "host": "mine", "label": data["label"].replace("llama", "my-llama"),
         "run_id": "20261201T080000-0badc0de", "recorded_at": shifted(data["recorded_at"], days=9)}
        for data in whole
    ]  # fmt: skip
    (tmp_path / "ann").mkdir()
    (tmp_path / "bob").mkdir()
    write(tmp_path / "ann" / "labbook.md", whole)
    write(tmp_path / "bob" / "labbook.md", broken)
    write(tmp_path / "copy.md", copied)
    (tmp_path / "README.md").write_text("no record here\n", "utf-8")
    return tmp_path


def test_a_class_is_a_row_a_notebook(class_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out = check(capsys, class_folder)
    assert code == 1
    table, _, details = out.partition("\n\n")
    assert len(table.splitlines()) == 4  # a heading, and three notebooks: README.md holds no record
    assert "copied" in details and "consistent" in details
    assert "PASS  " not in details, "what passed is no detail of a class, unless asked for"


def test_shared_lines_are_named_with_both_places(class_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, out = check(capsys, class_folder, "--json")
    files = {
        Path(item["notebook"]).parent.name + "/" + Path(item["notebook"]).name: item
        for item in json.loads(out)["files"]
    }
    copied = next(item for name, item in files.items() if name.endswith("copy.md"))
    original = files["ann/labbook.md"]
    for item, other in ((copied, "ann"), (original, "copy.md")):
        assert item["verdict"] == "FAIL" and item["failed_rules"] == ["copied"]
        (found,) = [statement for statement in item["statements"] if statement["code"] == "copied"]
        assert other in found["text"] and "line 3" in found["text"] and len(found["items"]) == 16
    assert files["bob/labbook.md"]["failed_rules"] == ["consistent"]


def test_csv_has_a_row_a_notebook_with_its_verdict(class_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out = check(capsys, class_folder, "--csv")
    rows = list(csv.DictReader(io.StringIO(out)))
    assert code == 1 and len(rows) == 3
    assert {row["verdict"] for row in rows} == {"FAIL"}
    assert sorted(row["failed_rules"] for row in rows) == ["consistent", "copied", "copied"]
    ann = next(row for row in rows if "ann" in row["notebook"])
    assert float(ann["a"]) == pytest.approx(sl_fit(student_notebook(1)).a_ms)
    assert ann["operating_point"] == "20"


def sl_fit(records: list[Json]) -> sl.Fit:
    notebook = sl.Notebook("n.md")
    for line, data in enumerate(records, 1):
        notebook.records.append(sl.Record(line, sl.parse_json(json.dumps(data))))
    fit = notebook.curves["llama-baseline"].fit
    assert fit is not None
    return fit


def test_a_class_without_a_fail_exits_with_0(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = [write(tmp_path / f"{seed}.md", student_notebook(seed)) for seed in (1, 2)]
    code, out = check(capsys, *paths)
    assert code == 0 and "2 WARN" in out


def test_one_unreadable_notebook_hides_no_other(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good = write(tmp_path / "good.md", student_notebook(1))
    wide = tmp_path / "wide.md"
    wide.write_text("# Lab\n" + json.dumps(student_notebook(2)[0]), "utf-16")
    code, out = check(capsys, good, wide, tmp_path / "missing.md")
    assert code == 2
    assert out.count("UNREADABLE") == 3  # two rows and the count
    assert "UTF-16" in out and "missing.md" in out


def test_a_folder_without_a_notebook_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = sl.main(["--check", str(tmp_path)])
    assert code == 2 and str(tmp_path) in capsys.readouterr().err


def test_help_says_what_a_notebook_alone_cannot_show(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        sl.main(["--help"])
    out = " ".join(capsys.readouterr().out.split())
    assert "--raw" in out and "dates and run ids" in out
