#!/usr/bin/env python3
"""Result files of `vllm bench serve` into notebook lines, and the levels of a curve into such files.

import appends a level record per result of --save-result (or --append-result); the results of one call are one run,
and the second of a level is its second repeat. With --save-detailed the figures are computed from the requests by our
definitions. export prints the levels that summarise_load.py --json holds, one
result a line, under that tool's names and units. summarise_load.py must stand in the folder above this one.

Examples:
  python3 scripts/vllm_bench.py import result.json --label vllm-bench --set engine=vllm --set server_slots=20
  python3 summarise_load.py --label vllm-baseline --json | python3 scripts/vllm_bench.py export --level 20 > c20.json

Exit codes: 0; 1 where the notebook could not be written (the line is then printed); 2 for bad arguments, a file that
holds something else, or an open-loop result: no level of a curve; 130 after Ctrl-C.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any

sys.path.insert(0, os.path.join(os.path.dirname(os.path.realpath(__file__)), os.pardir))
try:
    from summarise_load import LAB, TOOL_VERSION, ResultError, UserError, append_record, parse_json, read_notebook
except ImportError:
    sys.exit("vllm_bench.py: summarise_load.py is missing from the folder above this script")

METRICS = (("ttft", "ttft_s"), ("tpot", "tpot_s"), ("itl", "chunk_gap_s"), ("e2el", "e2e_s"))  # theirs, ours
PERCENTILES = (50, 90, 95, 99)
ARRAYS = ("ttfts", "itls", "output_lens", "errors")  # one entry a request, there with --save-detailed
SETTINGS = {  # what a level record holds beside its figures; a result has them only from that tool's --metadata
    **dict.fromkeys(("engine", "engine_version", "host", "quant", "prompt_set", "model"), str),
    **dict.fromkeys(("context_length", "server_slots", "max_tokens"), int),
    **dict.fromkeys(("slo_ttft_s", "slo_tpot_s"), float),
}
LEAST_IN_FLIGHT = 0.5  # of the cap: a closed loop falls that low only where most of the level is its ramp and drain
MOST_BYTES = 64 << 20  # of a result file; --save-detailed takes some 2 kB a request
LONGEST_LINE = 100_000  # bytes of a notebook line; ours have 3,000
HIGHEST = 1e12  # no count or millisecond of a run


# ---------------------------------------------------------------- a result of theirs -> a level record


def figure(result: Mapping[str, Any], name: str, least: float | None = None) -> float | None:
    """A number of the result, or None where it has none. Raises ValueError for anything else, or for a missing one
    where `least` says that a curve needs it."""
    value = result.get(name)
    if value is None and least is None:
        return None
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not (least or 0) <= value <= HIGHEST:
        raise ValueError(f"{name} is {json.dumps(value)[:40]}, not a number that a level of a curve can have")
    return float(value)


def count(result: Mapping[str, Any], name: str, least: int = 0) -> int:
    value = figure(result, name, least)
    if value is None or not value.is_integer():
        raise ValueError(f"{name} is {value}, not a whole number")
    return int(value)


def setting(name: str, value: Any) -> Any:
    """A setting in its own type, from the text that --set and --metadata give. Raises ValueError.

    >>> setting("server_slots", "20"), setting("slo_tpot_s", "0.1"), setting("quant", "8")
    (20, 0.1, '8')
    """
    kind = SETTINGS[name]
    try:
        found = kind(str(value))
        if kind is not str and not 0 <= found <= HIGHEST:
            raise ValueError
    except ValueError:
        raise ValueError(f"{name} is {str(value)[:40]!r}, not a number") from None
    return found


def stats(values: Iterable[float]) -> dict[str, float | None]:
    """Nearest-rank percentiles, extremes and mean, to a microsecond; all None without values."""
    ordered = sorted(values)
    if not ordered:
        return dict.fromkeys((*(f"p{p}" for p in PERCENTILES), "min", "max", "mean"))
    found = {f"p{p}": ordered[-(-p * len(ordered) // 100) - 1] for p in PERCENTILES}
    found.update({"min": ordered[0], "max": ordered[-1], "mean": math.fsum(ordered) / len(ordered)})
    return {name: round(value, 6) for name, value in found.items()}


def per_second(number: float, wall_s: float) -> float | None:
    return round(number / wall_s, 4) if wall_s > 0 else None


def level_record(result: Mapping[str, Any], label: str | None, settings: Mapping[str, Any]) -> dict[str, Any]:
    """The level record of one result; `settings` win over those that the result holds. A figure that the tool did not
    compute is None. Raises ValueError where the result is no level of a closed loop, or holds impossible figures."""
    c, asked = count(result, "max_concurrency", 1), count(result, "num_prompts")
    completed, tokens = count(result, "completed"), count(result, "total_output_tokens")
    wall, prompts = figure(result, "duration", 0) or 0.0, figure(result, "total_input_tokens")
    failed = count(result, "failed") if "failed" in result else asked - completed
    own = {name: setting(name, result[name]) for name in SETTINGS if result.get(name) is not None}
    date = str(result.get("date"))
    record: dict[str, Any] = {
        **dict.fromkeys((*SETTINGS, *(ours for _, ours in METRICS), "mean_in_flight", "within_slo")),
        **dict.fromkeys(("engine", "engine_version", "host", "quant"), "unknown"),
        **{"model": result.get("model_id"), "prompt_set": "vllm-bench", **own, **settings},
        "lab": LAB,
        "schema": 2,
        "tool_version": TOOL_VERSION,
        "source": "vllm bench serve",
        "arrival": "closed-loop",
        "label": label or str(result.get("label") or "vllm-bench"),
        "recorded_at": iso_date(date),
        "interrupted": False,
        "concurrency": c,
        "requests": asked,
        "completed": completed,
        "failed": failed,
        "wall_s": round(wall, 6),
        "output_tokens": tokens,
        "output_tokens_per_s": per_second(tokens, wall),
        "requests_per_s": per_second(completed, wall),
        "goodput_requests_per_s": figure(result, "request_goodput"),
        "prompt_tokens_mean": round(prompts / completed, 2) if prompts is not None and completed else None,
        "cached_tokens_mean": None,
        "token_counts": "vllm-bench",
    }
    record.update(from_requests(result, record) or from_summary(result, record))
    refuse_open_loop(result, record)
    if len(json.dumps(record)) > LONGEST_LINE:
        raise ValueError(f"its line would be longer than {LONGEST_LINE} bytes")
    return record


def iso_date(text: str) -> str | None:
    """That tool's local date as ISO 8601 with the offset, or None."""
    try:
        return datetime.strptime(text, "%Y%m%d-%H%M%S").astimezone().isoformat()
    except (ValueError, OverflowError):
        return None


def refuse_open_loop(result: Mapping[str, Any], record: Mapping[str, Any]) -> None:
    """Raise ValueError where the requests did not come from c workers that each wait for their answer."""
    c, asked = record["concurrency"], record["requests"]
    rate, ramp = result.get("request_rate"), result.get("ramp_up_strategy")
    if rate not in (None, "inf") or ramp is not None:
        arrivals = f"a request rate of {rate}" if ramp is None else f"a {ramp} ramp of request rates"
        raise ValueError(
            f"open loop: its requests arrived at {arrivals}, whatever the server finished, so max_concurrency {c} is "
            "a cap and no level of a closed-loop curve; measure with --request-rate inf"
        )
    if asked < c:
        raise ValueError(f"num_prompts {asked} never fills max_concurrency {c}; send at least 2 x {c} prompts")
    latency = (record["e2e_s"] or {}).get("mean")
    if latency is None:  # the tool's default metrics lack it; of means, so good enough for a limit but not for a figure
        ttft, tpot = ((record[name] or {}).get("mean") for name in ("ttft_s", "tpot_s"))
        latency = ttft + (tpot or 0.0) * (record["output_tokens"] / record["completed"] - 1) if ttft else None
    if latency is None or record["failed"] or not record["wall_s"]:
        return  # how long failed requests held their worker is not in the result
    in_flight = record["completed"] * latency / record["wall_s"]
    if in_flight < LEAST_IN_FLIGHT * c:
        raise ValueError(
            f"on average {in_flight:.1f} requests were in flight, well below max_concurrency {c}: arrivals were "
            "limited elsewhere or the run was too short, so it is no closed-loop level; send more prompts"
        )


def from_summary(result: Mapping[str, Any], record: Mapping[str, Any]) -> dict[str, Any]:
    """The figures that the tool itself computed, in seconds. Its percentiles interpolate, and the record says so."""
    if not record["completed"]:
        return {}  # it writes 0 for figures of no request
    found: dict[str, Any] = {"percentile_method": "linear (vllm bench serve)"}
    for theirs, ours in METRICS:
        names = {**{f"p{p}": f"p{p}" for p in PERCENTILES}, "mean": "mean"}
        block = {ours_key: figure(result, f"{key}_{theirs}_ms") for ours_key, key in names.items()}
        if block["p50"] is None:
            block["p50"] = figure(result, f"median_{theirs}_ms")
        if any(value is not None for value in block.values()):
            found[ours] = {key: None if ms is None else round(ms / 1000, 6) for key, ms in block.items()}
    goodput, wall = record["goodput_requests_per_s"], record["wall_s"]
    if goodput is not None:
        found["within_slo"] = round(goodput * wall)
    e2e_mean = found.get("e2e_s", {}).get("mean")
    if e2e_mean is not None and not record["failed"] and wall > 0:
        found["mean_in_flight"] = round(record["completed"] * e2e_mean / wall, 4)
    return found


def from_requests(result: Mapping[str, Any], record: Mapping[str, Any]) -> dict[str, Any] | None:
    """The figures by our definitions, from the arrays of --save-detailed; None where they are absent or uneven."""
    arrays = [result.get(name) for name in ARRAYS]
    if not all(isinstance(array, list) and len(array) == record["requests"] for array in arrays):
        return None
    try:
        good = [(float(t), [float(g) for g in gaps], int(n)) for t, gaps, n, bad in zip(*arrays) if not bad and n]
    except (TypeError, ValueError, OverflowError):
        raise ValueError(f"{', '.join(ARRAYS)} are not all numbers") from None
    if any(not 0 <= figure <= HIGHEST for ttft, gaps, n in good for figure in (ttft, n, *gaps)):
        raise ValueError(f"{', '.join(ARRAYS)} hold a negative or an impossible figure")
    if len(good) != record["completed"]:
        return None
    spent = [(ttft, math.fsum(gaps), n) for ttft, gaps, n in good]
    ends = [ttft + decode for ttft, decode, _ in spent]
    tpots = [decode / (n - 1) if n > 1 else None for _, decode, n in spent]
    lengths = stats(n for _, _, n in spent)
    found: dict[str, Any] = {
        "ttft_s": stats(ttft for ttft, _, _ in spent),
        "tpot_s": stats(tpot for tpot in tpots if tpot is not None),
        "e2e_s": stats(ends),
        "chunk_gap_s": stats(gap for _, gaps, _ in good for gap in gaps),
        "output_tokens_per_request": {key: lengths[key] for key in ("min", "p50", "p90", "max")},
    }
    wall, slo_ttft, slo_tpot = record["wall_s"], record["slo_ttft_s"], record["slo_tpot_s"]
    if not record["failed"] and wall > 0:
        found["mean_in_flight"] = round(math.fsum(ends) / wall, 4)
    if slo_ttft is not None and slo_tpot is not None:
        within = sum(ttft <= slo_ttft and (tpot or 0) <= slo_tpot for (ttft, _, _), tpot in zip(spent, tpots))
        found.update({"within_slo": within, "goodput_requests_per_s": per_second(within, wall)})
    return found


# ---------------------------------------------------------------- a level of the curve document -> a result of theirs


def bench_result(document: Mapping[str, Any], level: Mapping[str, Any]) -> dict[str, Any]:
    """A level as `vllm bench serve --save-result` writes it (vllm/benchmarks/serve.py, 0.28): same names, milliseconds,
    null for what a level does not hold. Of a repeated level the medians over its runs; its "median" is a nearest rank.
    The settings stand, as text, where that tool's --metadata puts them, so that import finds them again."""
    prompt, completed, tokens, wall = (
        level.get(n) for n in ("prompt_tokens_mean", "completed", "output_tokens", "wall_s")
    )
    given = round(prompt * completed) if prompt is not None else None
    date = str(level.get("recorded_at") or "")[:19]
    result: dict[str, Any] = {
        "date": date.replace("-", "").replace(":", "").replace("T", "-") or None,
        "endpoint_type": "openai-chat",
        "backend": "openai-chat",
        "label": document["label"],
        "model_id": document["settings"].get("model"),
        "tokenizer_id": None,
        "num_prompts": level.get("requests"),
        **{name: str(value) for name in SETTINGS if (value := document["settings"].get(name)) is not None},
        "request_rate": "inf",
        "burstiness": 1.0,
        "max_concurrency": level["c"],
        "duration": wall,
        "completed": completed,
        "failed": level.get("failed"),
        "total_input_tokens": given,
        "total_output_tokens": tokens,
        "request_throughput": level.get("requests_per_s"),
        "request_goodput": level.get("goodput_requests_per_s"),
        "output_throughput": level.get("output_tokens_per_s"),
        "total_token_throughput": (given + tokens) / wall
        if given is not None and tokens is not None and wall
        else None,
        "max_output_tokens_per_s": None,
        "max_concurrent_requests": None,
        "rtfx": 0.0,
    }
    for theirs, ours in METRICS:
        block = level.get(ours) or {}
        for name, key in (("mean", "mean"), ("median", "p50"), ("std", "std"), *((f"p{p}",) * 2 for p in PERCENTILES)):
            value = block.get(key)
            result[f"{name}_{theirs}_ms"] = None if value is None else 1000 * value
    return result


# ---------------------------------------------------------------- command line


def read_text(path: str | None) -> str:
    """The text of a file, or of standard input. Raises UserError."""
    try:
        if path is None:
            return sys.stdin.buffer.read(MOST_BYTES).decode("utf-8-sig")
        if os.path.exists(path) and not os.path.isfile(path):
            raise UserError(f"cannot read {path}: it is a folder, a pipe or a device, not a file")
        with open(path, "rb") as file:
            return file.read(MOST_BYTES).decode("utf-8-sig")
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror or error}") from None
    except UnicodeDecodeError:
        raise UserError(f"{path or 'standard input'} is not UTF-8 text") from None


def read_results(path: str) -> list[dict[str, Any]]:
    """The results of a file: one JSON object, or one per line (--append-result). Raises UserError."""
    text = read_text(path)
    try:
        try:
            results = [parse_json(text)]
        except ValueError:
            results = [parse_json(line) for line in text.split("\n") if line.strip()]
    except ValueError as error:
        raise UserError(f"{path} is not JSON: {error}") from None
    wanted = {"duration", "completed", "max_concurrency"}
    if not results or not all(isinstance(result, dict) and wanted <= result.keys() for result in results):
        raise UserError(f"{path} is not what vllm bench serve --save-result writes")
    return results


def import_results(args: argparse.Namespace) -> None:
    """Append a record per result, numbered as repeats of one run: all of them or, where one is refused, none."""
    settings = {}
    for pair in args.set:
        name, equals, value = pair.partition("=")
        if not equals or name not in SETTINGS:
            raise UserError(f"--set {pair}: expected KEY=VALUE, KEY one of {', '.join(SETTINGS)}")
        try:
            settings[name] = setting(name, value)
        except ValueError as error:
            raise UserError(f"--set {pair}: {error}") from None
    records: list[dict[str, Any]] = []
    for path in args.files:
        for number, result in enumerate(read_results(path), 1):
            try:
                records.append(level_record(result, args.label, settings))
            except ValueError as error:
                raise UserError(f"{path}, result {number}: {error}") from None
    run = hashlib.sha256(json.dumps(records, sort_keys=True).encode()).hexdigest()[:12]  # again the same: no second run
    for index, record in enumerate(records):
        level = (record["label"], record["concurrency"])
        earlier = [(one["label"], one["concurrency"]) for one in records[:index]]
        record.update({"run_id": f"vllm-bench-{run}", "repeat": earlier.count(level)})
    if os.path.exists(args.labbook):
        read_notebook(args.labbook)  # refuses what is no UTF-8 text before anything is appended
    for record in records:
        append_record(args.labbook, record)
        say(f"appended c={record['concurrency']} of {record['label']} to {args.labbook}")


def export_levels(args: argparse.Namespace) -> None:
    """Print each level with a completed request as a result, or the one of --level."""
    try:
        document = json.loads(read_text(args.file))
        if not isinstance(document, dict) or document.get("kind") != "curve":
            raise ValueError
    except ValueError:
        raise UserError("expected the JSON of summarise_load.py --label L --json") from None
    levels = {level["c"]: level for level in document["levels"] if level.get("completed")}
    if args.level is not None and args.level not in levels:
        held = ",".join(map(str, levels)) or "none"
        raise UserError(f"--level {args.level}: {document['label']} holds c={held} with a completed request")
    for c in levels if args.level is None else (args.level,):
        print(json.dumps(bench_result(document, levels[c])), flush=True)


def say(message: str) -> None:
    print(f"vllm_bench.py: {message}", file=sys.stderr)


def build_parser() -> argparse.ArgumentParser:
    about, _, rest = (__doc__ or "").partition("Examples:")
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        prog="vllm_bench.py", description=about, epilog="Examples:" + rest, formatter_class=raw, allow_abbrev=False
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {TOOL_VERSION}")
    ways = parser.add_subparsers(dest="way", metavar="import|export", required=True)
    way = ways.add_parser("import", help="append the results in the files to a notebook", allow_abbrev=False)
    way.add_argument("files", nargs="+", metavar="FILE", help="what --save-result or --append-result wrote")
    way.add_argument("--labbook", metavar="FILE", default="labbook.md", help="the notebook (default %(default)s)")
    way.add_argument("--label", metavar="L", help="label of the records (default: the result's, or vllm-bench)")
    way.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help=f"a setting; KEY is one of {', '.join(SETTINGS)}",
    )
    way.set_defaults(act=import_results)
    way = ways.add_parser("export", help="print the levels of a curve as results", allow_abbrev=False)
    way.add_argument("file", nargs="?", metavar="FILE", help="the curve document (default: standard input)")
    way.add_argument("--level", type=int, metavar="C", help="only this level")
    way.set_defaults(act=export_levels)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program; returns the exit code."""
    args = build_parser().parse_args(argv)
    try:
        args.act(args)
    except UserError as error:
        say(str(error))
        return 2
    except ResultError as error:
        say(str(error))
        return 1
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # nor may the interpreter complain as it leaves
    except OSError as error:
        say(f"cannot write the output: {error.strerror or error}")
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
