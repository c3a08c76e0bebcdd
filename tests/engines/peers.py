#!/usr/bin/env python3
"""Run our client and its peers against one server, alternately, and print their figures in one table.

    python3 tests/engines/peers.py --install
    python3 scripts/simulated_engine.py --port 8000 --a-ms 20 --b-ms 1.5 --slots 20 --model local-chat &
    python3 tests/engines/tiny_qwen3.py tiny-qwen3
    python3 tests/engines/peers.py --base-url http://127.0.0.1:8000/v1 --model local-chat --tokenizer tiny-qwen3

The peers are `vllm bench serve`, aiperf, guidellm and llama-benchy. Each gets the same number of requests in flight, of
requests and of output tokens, and as many prompt tokens as ours has by the server's count: a short run of each, one
request for each in flight, warms the server and settles that length. Then --rounds runs of each, the order turned round
every time, and their medians.

Where the definitions differ, so do the figures:
  tok/s   output tokens over the wall time of the run; llama-benchy's over the decode phase of its batches, which all
          start at once and wait for each other
  TTFT    ours from the request written to an open connection to the first text; the others from before sending, on
          connections that they keep, and vLLM's ends at the first chunk with a choice in it
  TPOT    (last token - first) / (output tokens - 1); aiperf and guidellm call that inter-token latency, for
          llama-benchy it is the inverse of a request's decode rate
  CPU s   of the client and the processes that it waited for, from start to end; beside it that of the short run, which
          is mostly the program's start

Each lives in an environment of its own in ~/.cache/llm-load-lab/peers (XDG_CACHE_HOME moves it), vLLM in VLLM_VENV
(default: where tests/engines/run.sh installs it). Exit: 0; 1 where a client failed; 2 for bad arguments.
"""

from __future__ import annotations

import argparse
import functools
import http.server
import json
import os
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Callable, NamedTuple

ROOT = Path(__file__).resolve().parent.parent.parent
CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "llm-load-lab"
PEERS = CACHE / "peers"
VLLM_VENV = Path(os.environ.get("VLLM_VENV", CACHE / "engines" / "vllm-0.28.0"))
PACKAGES = ("aiperf==0.13.0", "guidellm==0.8.1", "llama-benchy==0.4.0")


class Load(NamedTuple):
    """What one run sends; `prompt` is the length that the client is asked for, in tokens."""

    base_url: str  # with /v1
    model: str
    tokenizer: Path
    concurrency: int
    requests: int
    output: int
    prompt: int
    folder: Path  # for what the client writes
    book_url: str


class Run(NamedTuple):
    """A client's own figures of one run; tokens are those of successful requests."""

    output_tokens_per_s: float
    ttft_p50_ms: float
    tpot_p50_ms: float
    prompt_tokens: float | None  # mean of a request, by the server's count; None where the client does not tell
    output_tokens: float  # of the run
    cpu_s: float = 0.0


@dataclass(frozen=True)
class Client:
    name: str
    command: Callable[[Load], list[Any]]  # str() of each is a word of the command line
    read: Callable[[Load], Run]


def loaded(path: Path) -> Any:
    return json.loads(path.read_text("utf-8"))


def server_of(load: Load) -> str:
    return load.base_url[: -len("/v1")]


# ---------------------------------------------------------------- the clients


def ours_command(load: Load) -> list[Any]:
    levels = [
        "--concurrency",
        str(load.concurrency),
        "--requests",
        str(load.requests),
        "--max-tokens",
        str(load.output),
    ]
    rest = ["--warmup", "0", "--extra-body", '{"ignore_eos": true}', "--labbook", load.folder / "labbook.md", "--quiet"]
    return [sys.executable, ROOT / "load_test.py", "--base-url", load.base_url, "--model", load.model, *levels, *rest]


def ours_read(load: Load) -> Run:
    record = loaded(load.folder / "labbook.md")
    ttft, tpot = record["ttft_s"]["p50"], record["tpot_s"]["p50"]
    tokens = record["output_tokens"]
    return Run(record["output_tokens_per_s"], 1000 * ttft, 1000 * tpot, record["prompt_tokens_mean"], tokens)


def vllm_command(load: Load) -> list[Any]:
    server = ["--backend", "openai-chat", "--base-url", server_of(load), "--endpoint", "/v1/chat/completions"]
    names = ["--model", load.model, "--tokenizer", load.tokenizer, "--dataset-name", "random"]
    sizes = ["--random-input-len", str(load.prompt), "--random-output-len", str(load.output), "--ignore-eos"]
    levels = ["--num-prompts", str(load.requests), "--max-concurrency", str(load.concurrency), "--temperature", "0"]
    out = ["--save-result", "--result-dir", load.folder, "--result-filename", "vllm.json", "--disable-tqdm"]
    seed = ["--seed", str(time.time_ns() % 10**6)]  # the same prompts a second time would come from the prefix cache
    return [VLLM_VENV / "bin" / "vllm", "bench", "serve", *server, *names, *sizes, *levels, *out, *seed]


def vllm_read(load: Load) -> Run:
    result = loaded(load.folder / "vllm.json")
    prompt = result["total_input_tokens"] / result["completed"]
    latencies = result["median_ttft_ms"], result["median_tpot_ms"]
    return Run(result["output_throughput"], *latencies, prompt, result["total_output_tokens"])


def aiperf_command(load: Load) -> list[Any]:
    server = ["-m", load.model, "--url", server_of(load), "--endpoint-type", "chat", "--streaming"]
    sizes = ["--isl", str(load.prompt), "--osl", str(load.output), "--extra-inputs", "ignore_eos:true"]
    levels = ["--concurrency", str(load.concurrency), "--request-count", str(load.requests)]
    rest = ["--use-server-token-count", "--tokenizer", load.tokenizer, "--ui", "none", "--artifact-dir", load.folder]
    return [PEERS / "aiperf" / "bin" / "aiperf", "profile", *server, *sizes, *levels, *rest]


def aiperf_read(load: Load) -> Run:
    result = loaded(load.folder / "profile_export_aiperf.json")
    tokens = result["total_usage_completion_tokens"]["avg"]
    latencies = result["time_to_first_token"]["p50"], result["inter_token_latency"]["p50"]
    return Run(result["output_token_throughput"]["avg"], *latencies, result["usage_prompt_tokens"]["avg"], tokens)


def guidellm_command(load: Load) -> list[Any]:
    options = {
        "--backend": f"kind=openai_http,target={server_of(load)},model={load.model}",
        "--profile": f"kind=concurrent,streams={load.concurrency}",
        "--constraint": f"kind=max_requests,count={load.requests}",
        "--data": f"kind=synthetic_text,prompt_tokens={load.prompt},output_tokens={load.output}",
        "--tokenizer": f"kind=hf_auto,model={load.tokenizer}",
        "--seed": f"kind=static,value={time.time_ns() % 10**6}",
        "--output": f"kind=json,path={load.folder / 'guidellm.json'}",
    }
    pairs = [word for option in options.items() for word in option]
    return [PEERS / "guidellm" / "bin" / "guidellm", "run", *pairs, "--disable-console"]


def guidellm_read(load: Load) -> Run:
    (benchmark,) = loaded(load.folder / "guidellm.json")["benchmarks"]
    names = ("output_token_count", "prompt_token_count", "time_to_first_token_ms", "inter_token_latency_ms")
    tokens, prompts, ttft, tpot = (benchmark["metrics"][name]["successful"] for name in names)
    rate = tokens["total_sum"] / benchmark["duration"]
    return Run(rate, ttft["median"], tpot["median"], prompts["mean"], tokens["total_sum"])


def benchy_command(load: Load) -> list[Any]:
    server = ["--base-url", load.base_url, "--model", load.model, "--tokenizer", load.tokenizer]
    sizes = ["--pp", str(load.prompt), "--tg", str(load.output), "--exact-tg", "--book-url", load.book_url]
    levels = ["--concurrency", str(load.concurrency), "--runs", str(max(1, load.requests // load.concurrency))]
    rest = ["--no-cache", "--skip-coherence", "--latency-mode", "none", "--format", "json"]
    out = ["--save-result", load.folder / "benchy.json"]
    return [PEERS / "llama-benchy" / "bin" / "llama-benchy", *server, *sizes, *levels, *rest, *out]


def benchy_read(load: Load) -> Run:
    (result,) = loaded(load.folder / "benchy.json")["benchmarks"]
    rates = result["tg_req_throughput"]["values"]
    ttft, tpot = statistics.median(result["e2e_ttft"]["values"]), 1000 / statistics.median(rates)
    return Run(result["tg_throughput"]["mean"], ttft, tpot, None, len(rates) * load.output)


CLIENTS = (
    Client("ours", ours_command, ours_read),
    Client("vllm", vllm_command, vllm_read),
    Client("aiperf", aiperf_command, aiperf_read),
    Client("guidellm", guidellm_command, guidellm_read),
    Client("llama-benchy", benchy_command, benchy_read),
)


# ---------------------------------------------------------------- running them


def install() -> None:
    """Each peer into its environment, those that are there already left alone."""
    for package in PACKAGES:
        folder = PEERS / package.partition("==")[0]
        if not folder.exists():
            print(f"installing {package} into {folder}", flush=True)
            subprocess.run([sys.executable, "-m", "venv", folder], check=True)
            subprocess.run([folder / "bin" / "python", "-m", "pip", "install", "-q", package], check=True)


def serve_book(folder: Path) -> str:
    """The address of a text that llama-benchy cuts its prompts from: this project's README, served from here."""
    (folder / "book.txt").write_text((ROOT / "README.md").read_text("utf-8"), "utf-8")

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *_: Any) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=str(folder)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return f"http://127.0.0.1:{server.server_address[1]}/book.txt"


def run(client: Client, load: Load) -> Run:
    """One run of a client, with the CPU seconds of its process and of those that it waited for. Raises RuntimeError."""
    load.folder.mkdir(parents=True)
    environment = dict(os.environ)
    if client.name != "aiperf":  # which looks for a local folder's tokenizer in a cache when it is set
        environment["HF_HUB_OFFLINE"] = "1"
    log = load.folder / "log.txt"
    with log.open("wb") as output:
        command = [str(word) for word in client.command(load)]
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=environment)
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode != 0:
        tail = "\n".join(log.read_text("utf-8", "replace").splitlines()[-15:])
        raise RuntimeError(f"{client.name} ended with {process.returncode}; the end of {log}:\n{tail}")
    return client.read(load)._replace(cpu_s=usage.ru_utime + usage.ru_stime)


def medians(runs: Sequence[Run]) -> dict[str, Any]:
    columns = zip(Run._fields, zip(*runs))
    return {name: None if None in values else statistics.median(values) for name, values in columns}


def row(name: str, runs: Sequence[Run], short: Run, base: dict[str, Any] | None) -> str:
    """The medians of a client's runs; throughput and TPOT with their distance from vLLM's."""
    middle = medians(runs)
    cells = [f"{name:<13}"]
    for field, width, form in (("output_tokens_per_s", 9, ".1f"), ("ttft_p50_ms", 8, ".1f"), ("tpot_p50_ms", 8, ".2f")):
        cells.append(f"{middle[field]:>{width}{form}}")
        if field != "ttft_p50_ms":
            cells.append(f"{'' if base is None else f'{100 * (middle[field] / base[field] - 1):+.1f} %':>8}")
    prompt = middle["prompt_tokens"]
    return " ".join(
        [
            *cells,
            f"{middle['cpu_s']:>7.2f} {short.cpu_s:>7.2f}",
            f"{'?' if prompt is None else format(prompt, '.1f'):>7}",
        ]
    )


def compare(clients: Sequence[Client], load: Load, rounds: int) -> None:
    """Settle the prompt lengths, run the rounds, print the table. Raises RuntimeError where a client fails."""
    short, lengths, target = {}, {}, float(load.prompt)
    for client in clients:
        settle = load._replace(requests=load.concurrency, prompt=round(target), folder=load.folder / f"{client.name}-0")
        short[client.name] = found = run(client, settle)
        if client.name == "ours":
            target = found.prompt_tokens or target
        lengths[client.name] = round(target + target - (found.prompt_tokens or target))
        print(
            f"{client.name}: asked for {settle.prompt} prompt tokens, the server counted {found.prompt_tokens}",
            flush=True,
        )
    runs: dict[str, list[Run]] = {client.name: [] for client in clients}
    for number in range(1, rounds + 1):
        for client in clients if number % 2 else reversed(clients):
            place = load.folder / f"{client.name}-{number}"
            runs[client.name].append(run(client, load._replace(prompt=lengths[client.name], folder=place)))
            print(f"round {number}: {client.name} {runs[client.name][-1].output_tokens_per_s:.1f} tok/s", flush=True)
    base = medians(runs["vllm"]) if "vllm" in runs else None
    heads = (" " * 13, "out tok/s", "to vllm ", " TTFT ms", " TPOT ms", "to vllm ", "  CPU s", "  short", " prompt")
    print("\n" + " ".join(heads))
    for name, found_runs in runs.items():
        print(row(name, found_runs, short[name], base))
    print(
        f"medians of {rounds} runs each: {load.concurrency} in flight, {load.requests} requests of {load.output} tokens"
    )


def main(argv: Sequence[str] | None = None) -> int:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw, allow_abbrev=False)
    parser.add_argument("--install", action="store_true", help="install the peers that are missing, and leave")
    parser.add_argument("--base-url", default="http://127.0.0.1:8000/v1", help="the server, with /v1 (%(default)s)")
    parser.add_argument("--model", default="local-chat", help="the name that the server knows (%(default)s)")
    parser.add_argument("--tokenizer", type=Path, metavar="FOLDER", help="a Hugging Face folder, for their prompts")
    parser.add_argument("--concurrency", type=int, default=20, help="requests in flight (%(default)s)")
    parser.add_argument("--requests", type=int, default=80, help="requests of a run (%(default)s)")
    parser.add_argument("--output", type=int, default=128, help="output tokens of a request (%(default)s)")
    parser.add_argument("--rounds", type=int, default=3, help="runs of each client (%(default)s)")
    parser.add_argument(
        "--out", type=Path, default=Path("peers"), help="a new folder for what they write (%(default)s)"
    )
    parser.add_argument("--only", metavar="NAMES", help="only these, of " + ",".join(client.name for client in CLIENTS))
    args = parser.parse_args(argv)
    if args.install:
        install()
        return 0
    names = (args.only or ",".join(client.name for client in CLIENTS)).split(",")
    clients = [client for client in CLIENTS if client.name in names]
    if len(clients) != len(set(names)):
        parser.error(f"--only {args.only}: the names are {','.join(client.name for client in CLIENTS)}")
    if args.tokenizer is None or not (args.tokenizer / "tokenizer.json").is_file():
        parser.error("--tokenizer needs a folder with a tokenizer.json (tests/engines/tiny_qwen3.py builds one)")
    if not args.base_url.endswith("/v1") or args.requests < 2 * args.concurrency or args.rounds < 1:
        parser.error("--base-url ends with /v1, --requests is at least twice --concurrency, --rounds at least 1")
    if args.out.exists():
        parser.error(f"--out {args.out} is there already; name a new folder")
    folder, tokenizer = args.out.resolve(), args.tokenizer.resolve()
    folder.mkdir(parents=True)
    load = Load(
        args.base_url,
        args.model,
        tokenizer,
        args.concurrency,
        args.requests,
        args.output,
        50,
        folder,
        serve_book(folder),
    )
    try:
        compare(clients, load, args.rounds)
    except (OSError, RuntimeError, KeyError, ValueError) as error:
        print(f"peers.py: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
