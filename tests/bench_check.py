"""How long `summarise_load.py --check` takes over a class: 200 notebooks of 30 lines in one call, its time and memory.

Run by hand: python3 tests/bench_check.py [NOTEBOOKS]. No bound is asserted: figures of a machine are no test.
"""

from __future__ import annotations

import json
import random
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from honest_levels import LEVELS, Load, decimals, level_record, simulate

import summarise_load as sl

LABELS = ("llama-baseline", "vllm-baseline", *sl.VARIANT_LABELS)


def lines_of(student: int) -> list[str]:
    """30 level lines of one student's machine: two sweeps of three repeats, and the variants twice."""
    plans = [(label, c, repeat) for label in LABELS[:2] for repeat in range(3) for c in LEVELS]
    plans += [(label, 20, repeat) for label in LABELS[2:] for repeat in range(2)]
    lines = []
    for number, (label, c, repeat) in enumerate(plans):
        load = Load(c=c, noise=0.02 + 0.0001 * student)
        record = level_record(load, simulate(load, random.Random(1000 * student + number)), decimals(6), decimals(4))
        record.update(label=label, host=f"machine {student}", repeat=repeat, run_id=f"{label}-{student}")
        lines.append(json.dumps({**record, "engine": label.partition("-")[0]}, sort_keys=True))
    return lines


def main() -> None:
    notebooks = int(sys.argv[1]) if len(sys.argv) > 1 else 200
    with tempfile.TemporaryDirectory() as folder:
        for student in range(notebooks):
            path = Path(folder) / f"student-{student:03d}" / "labbook.md"
            path.parent.mkdir()
            path.write_text("# Lab\n\n" + "\n".join(lines_of(student)) + "\n", encoding="utf-8")
        size = sum(path.stat().st_size for path in Path(folder).glob("*/labbook.md"))
        command = [sys.executable, str(Path(sl.__file__)), "--check", folder, "--csv"]
        began = time.perf_counter()
        done = subprocess.run(command, capture_output=True, encoding="utf-8", check=False)
        took = time.perf_counter() - began
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = used.ru_utime + used.ru_stime
    print(f"{notebooks} notebooks, {30 * notebooks} lines, {size / 1e6:.1f} MB: exit {done.returncode}")
    print(f"{took:.1f} s ({cpu:.1f} s of CPU), {used.ru_maxrss / 1024:.0f} MiB at most")


if __name__ == "__main__":
    main()
