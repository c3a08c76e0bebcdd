"""Statements are claims: notebooks for which a sentence once was false or misleading, and what stands there now.

Each row: a notebook, what is asked of it, texts that must stand in the answer, and texts that must not.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from honest_levels import exact

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import summarise_load as sl

Json = dict[str, Any]
BASE = "llama-baseline"
SHOW = ("--label", BASE)
NO_SLO: Json = {"slo_ttft_s": None, "slo_tpot_s": None}


def rated(c: int, *rates: float, **changes: Any) -> list[Json]:
    """A level with one run per output throughput."""
    return [exact(c, repeat=number, output_tokens_per_s=rate, **changes) for number, rate in enumerate(rates)]


def curve(tpots_ms: dict[int, float], **changes: Any) -> list[Json]:
    """Levels with these TPOTs, every request always decoding."""
    return [exact(c, tpot, 0.0, **changes) for c, tpot in tpots_ms.items()]


def one_tpot(ms: float) -> Json:
    return dict.fromkeys(sl.STATISTICS, ms / 1000)


def without(record: Json, *names: str) -> Json:
    return {**record, **dict.fromkeys(names)}


ROWS: list[tuple[str, list[Json], tuple[str, ...], tuple[str, ...], tuple[str, ...]]] = [
    # (what is tested, records, options, must stand there, must not stand there)
    (
        "a level that was never filled has an SLO nevertheless",
        [exact(20, requests=10, completed=10)],
        SHOW,
        (),
        ("No SLO is recorded", "no SLO is recorded"),
    ),
    (
        "an interrupted level has an SLO nevertheless",
        [exact(5, interrupted=True)],
        SHOW,
        (),
        ("no SLO is recorded",),
    ),
    (
        "without an SLO no level is outside one",
        [exact(1, **NO_SLO), exact(5, completed=0, failed=40, **NO_SLO)],
        SHOW,
        ("No SLO is recorded",),
        ("inside its SLO",),
    ),
    (
        "a miss by less than the digits shown still shows",
        [exact(1), exact(5, ttft_s={"p50": 1.0, "p90": 2.0004}, slo_ttft_s=2.0)],
        SHOW,
        ("TTFT p90 2.0004 s",),
        ("(TTFT p90 2 s)",),
    ),
    (
        "a level cut short is measured as well",
        [exact(1), exact(5), exact(10, interrupted=True)],
        SHOW,
        (),
        ("5 is the highest level measured",),
    ),
    (
        "a run outside is said where the median is inside",
        [exact(1), *(exact(5, repeat=r, tpot_s=one_tpot(ms)) for r, ms in enumerate((90.0, 95.0, 101.0)))],
        SHOW,
        ("1 of them outside",),
        (),
    ),
    (
        "the knee of one throughput that is 0 cannot be told",
        [exact(1, output_tokens_per_s=0.0), exact(5)],
        SHOW,
        ("knee: not enough points",),
        ("knee: not reached",),
    ),
    (
        "each level decodes on the slots that it had",
        [exact(1), exact(20), exact(5, server_slots=2)],
        SHOW,
        ("c=20: 400.0 tok/s",),
        ("(2 slots decode together)\noperating", "c=20: 86.9"),
    ),
    (
        "a growth that b's interval leaves open is not called a miss of the fit",
        curve({1: 20.0, 5: 21.5, 10: 21.0}),
        SHOW,
        ("interval",),
        ("its growth does not show: the fit misses",),
    ),
    (
        "near-linear scaling does not advise past the SLO",
        [exact(1, 50, 0.1), exact(5, 50, 0.1), exact(10, 50, 0.1, failed=1, completed=39)],
        SHOW,
        ("near-linear scaling up to c=10",),
        ("admit at least 10", "measure higher levels"),
    ),
    (
        "near-linear scaling ends at the knee",
        [exact(c, 50, 0.1, output_tokens_per_s=rate) for c, rate in ((1, 10.0), (9, 90.0), (10, 85.0))],
        SHOW,
        ("knee: between c=9 and c=10",),
        ("near-linear scaling up to c=10", "admit at least 10"),
    ),
    (
        "who waits for the prefill budget is in no queue for slots",
        [
            exact(1, ttft_s={"p50": 0.02, "p90": 0.02}),
            exact(20, server_slots=64, ttft_s={"p50": 0.3, "p90": 0.5}, server={"peak_waiting": 12}),
        ],
        SHOW,
        (),
        ("requests queue for slots or KV blocks at",),
    ),
    (
        "without the GPU's heat none is printed",
        [
            exact(1, gpu={"sm_clock_mhz_min": 2000}),
            exact(10, gpu={"sm_clock_mhz_min": 900}, drift={"tpot_first_third_s": 0.02, "tpot_last_third_s": 0.04}),
        ],
        SHOW,
        ("SM clock down to 900 MHz",),
        ("up to - C",),
    ),
    (
        "a level that speeds up was not certainly cold",
        [exact(5, requests=60, completed=60, drift={"tpot_first_third_s": 0.04, "tpot_last_third_s": 0.02})],
        SHOW,
        ("drift at c=5",),
        (": the server was still warming up",),
    ),
    (
        "in flight that is not recorded does not hold",
        [without(record, "mean_in_flight") for record in (*rated(10, 300.0), *rated(20, 200.0))],
        SHOW,
        (),
        ("while in flight holds",),
    ),
    (
        "a client of which nothing is recorded was not idle",
        [exact(20, mean_in_flight=12.0, client=None)],
        SHOW,
        ("short level",),
        ("client was idle",),
    ),
    (
        "an answer without a finish reason did not stop early",
        [exact(5, finish_reasons={"none": 40})],
        SHOW,
        (),
        ("did not end by length",),
    ),
    (
        "two equal repeats a side show no difference of a thousandth",
        [*rated(5, 100.0, 100.0, label="a"), *rated(5, 100.1, 100.1, label="b")],
        ("--compare", "a", "b"),
        (),
        (": different", "each side needs two runs"),
    ),
    (
        "a difference below the digits shown is shown",
        [*rated(5, 100.0, 100.01, 99.99, label="a"), *rated(5, 100.2, 100.21, 100.19, label="b")],
        ("--compare", "a", "b"),
        ("1.002", ": different"),
        ("1.00 (95 % 1.00 to 1.00",),
    ),
    (
        "B/A in the table is that of the figures beside it",
        [*rated(5, 100.0, 100.0, 130.0, label="a"), *rated(5, 105.0, 105.0, 80.0, label="b")],
        ("--compare", "a", "b"),
        ("100.0    105.0  1.05",),
        (),
    ),
    (
        "three runs against three without a rate above 0 have two runs each",
        [*rated(5, 0.0, 1.0, 2.0, label="a"), *rated(5, 1.0, 2.0, 3.0, label="b")],
        ("--compare", "a", "b"),
        (),
        ("each side needs two runs",),
    ),
    (
        "an interrupted level may have completed requests",
        [exact(1), exact(5), exact(10), exact(20, interrupted=True, completed=30, requests=40)],
        ("--check",),
        ("sweep: llama-baseline has no whole level with a completed request at c=20",),
        (),
    ),
    (
        "a source of tokens that is not recorded is not null",
        [without(exact(1), "token_counts")],
        ("--check",),
        (),
        ("counted from null",),
    ),
    (
        "what is not recorded is not judged as good",
        [without(exact(5), "finish_reasons", "mean_in_flight", "server", "coalesced", "requests", "recorded_at")],
        ("--check", *SHOW),
        (),
        (
            "every answer ran to its length",
            "in flight close to c",
            "the server reports what the records say",
            "responses and the server's counter agree",
            "every shared-prefix level has a count",
            "no response was held back",
            "every level has at least 2 rounds",
            "every run's dates leave room",
            "every curve has the unevenness",
            "every line has the digits",
        ),
    ),
]


@pytest.mark.parametrize(
    ("records", "options", "present", "absent"), [row[1:] for row in ROWS], ids=[r[0] for r in ROWS]
)
def test_no_sentence_is_false_for_this_notebook(
    records: list[Json], options: tuple[str, ...], present: tuple[str, ...], absent: tuple[str, ...],
    tmp_path: Path, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    book = tmp_path / "labbook.md"
    book.write_text("\n".join(json.dumps(record, sort_keys=True) for record in records) + "\n", encoding="utf-8")
    assert sl.main(["--labbook", str(book), *options]) in (0, 1)
    said = capsys.readouterr().out
    assert [text for text in present if text not in said] == [], said
    assert [text for text in absent if text in said] == [], said
