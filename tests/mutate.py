"""How many faults would the tests catch? A seeded sample of mutants of the programs' pure parts, with cosmic-ray.

    python tests/mutate.py [--sample 60] [--seed 1] [--tree FOLDER] [PROGRAM...]

Each mutant is one small change of one program (an operator, a number, a condition), made in a copy of the tree outside
the repository; the tests that cover the part run until the first failure. A mutant that no test notices has
survived: it is printed with its line, to be looked at. Some change nothing that can be seen. By hand, on a quiet
machine; needs the `dev` group. --tree measures another checkout (an older commit's) in the same way.

Prints for each program: mutants, killed, share. Exit: 0; 2 where the tests fail without a mutant.
"""

from __future__ import annotations

import argparse
import random
import re
import shutil
import sqlite3
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
CONFIG = """[cosmic-ray]
module-path = "{program}"
timeout = 300.0
excluded-modules = []
test-command = "{python} -m pytest -q -x -p no:cacheprovider -p no:randomly {tests}"
[cosmic-ray.distributor]
name = "local"
"""


class Part(NamedTuple):
    """What is mutated: the sections whose banners match, and the test files (globs) that cover them."""

    sections: str
    tests: tuple[str, ...]


PARTS = {
    "load_test.py": Part(
        "prompts|protocol|observing|measuring",
        ("test_wire.py", "test_wire_properties.py", "test_level_figures.py", "test_public_reports.py"),
    ),
    "summarise_load.py": Part("^(?!.*command line)", ("test_summarise_*.py", "test_audit.py", "test_class_check.py")),
    "serving_arithmetic.py": Part("^(?!.*command line)", ("test_serving_arithmetic*.py",)),
}
BANNER = re.compile(r"^# -{20,} ?(.*?)[ -]*$")
# `int | None` in an annotation is never evaluated: its mutants change nothing.
NO_CHANGE = "%ReplaceBinaryOperator_BitOr%"


def pure_lines(source: str, sections: str) -> set[int]:
    """The line numbers, from 1, of the sections whose banner matches."""
    wanted, inside = set(), False
    for number, line in enumerate(source.splitlines(), 1):
        banner = BANNER.match(line)
        if banner:
            inside = re.search(sections, banner.group(1)) is not None
        elif inside:
            wanted.add(number)
    return wanted


def keep_sample(database: Path, lines: set[int], sample: int, seed: int) -> int:
    """Delete all but a random sample of the mutants on these lines; how many are left."""
    with sqlite3.connect(database) as rows:
        found = rows.execute(
            "SELECT job_id, start_pos_row FROM mutation_specs WHERE operator_name NOT LIKE ? ORDER BY start_pos_row, "
            "start_pos_col, operator_name, occurrence, operator_args",
            (NO_CHANGE,),
        ).fetchall()
        able = [job for job, line in found if line in lines]
        kept = random.Random(seed).sample(able, min(sample, len(able)))
        marks = ",".join("?" * len(kept))
        for table in ("mutation_specs", "work_items"):
            rows.execute(f"DELETE FROM {table} WHERE job_id NOT IN ({marks})", kept)
    return len(kept)


def survivors(database: Path) -> list[tuple[int, str]]:
    """(line, operator) of each mutant that no test noticed."""
    with sqlite3.connect(database) as rows:
        return rows.execute(
            "SELECT start_pos_row, operator_name FROM mutation_specs JOIN work_results USING (job_id) "
            "WHERE test_outcome LIKE '%SURVIVED' ORDER BY 1"
        ).fetchall()


def measure(program: str, tree: Path, sample: int, seed: int) -> None:
    part = PARTS[program]
    with tempfile.TemporaryDirectory(prefix="mutate-") as name:
        copy = Path(name) / "tree"
        shutil.copytree(tree, copy, ignore=shutil.ignore_patterns(".git", "__pycache__"))
        tests = sorted(f"tests/{path.name}" for pattern in part.tests for path in (copy / "tests").glob(pattern))
        config, database = copy / "mutate.toml", copy / "mutate.sqlite"
        config.write_text(CONFIG.format(program=program, python=sys.executable, tests=" ".join(tests)), "utf-8")
        cosmic = [sys.executable, "-m", "cosmic_ray.cli"]
        if subprocess.run([*cosmic, "baseline", config], cwd=copy).returncode != 0:
            sys.exit(2)
        subprocess.run([*cosmic, "init", config, database], cwd=copy, check=True)
        source = (copy / program).read_text("utf-8")
        count = keep_sample(database, pure_lines(source, part.sections), sample, seed)
        subprocess.run([*cosmic, "exec", config, database], cwd=copy, check=True)
        alive = survivors(database)
        for line, operator in alive:
            print(
                f"  survived  {program}:{line}  {operator.partition('/')[2]}  {source.splitlines()[line - 1].strip()}"
            )
        print(f"{program}: {count} mutants, {count - len(alive)} killed, {(count - len(alive)) / max(1, count):.0%}")
        sys.stdout.flush()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("programs", nargs="*", metavar="PROGRAM", default=list(PARTS), help="default: all three")
    parser.add_argument("--sample", type=int, default=60, help="mutants a program")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--tree", type=Path, default=ROOT, help="the checkout to measure")
    options = parser.parse_args()
    for program in options.programs:
        measure(program, options.tree, options.sample, options.seed)


if __name__ == "__main__":
    main()
