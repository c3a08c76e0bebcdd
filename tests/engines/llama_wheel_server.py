"""Run the llama.cpp server that comes as a Python wheel (xllamacpp), in the foreground, under llama-server's flags.

    python tests/engines/llama_wheel_server.py --model tiny.gguf --port 8080 --parallel 8 --ctx-size 32768
    LLAMA_BIN=wrapper bash scripts/serve-llama-parallel.sh    # where wrapper runs: exec python THIS "$@"

It stands in for the `llama-server` binary where none is installed: same server code, same endpoints, same log
lines. It knows the flags that scripts/serve-llama-parallel.sh passes and a few more; any other is an error, so
that a setting is never silently ignored. The log goes to the terminal and, with --log-file, to that file too.

Needs the package xllamacpp. Exit: 0 after SIGTERM or Ctrl-C, 1 when the server cannot start, 2 for bad arguments.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

PROGRAM = "llama_wheel_server"

CACHE_TYPES = ("f32", "f16", "bf16", "q8_0", "q4_0", "q4_1", "iq4_nl", "q5_0", "q5_1")

# ---------------------------------------------------------------------------------------------------------------
# Flags
# ---------------------------------------------------------------------------------------------------------------


def gpu_layers(text: str) -> int:
    """llama.cpp's own numbers for the two words."""
    return {"auto": -1, "all": -2}.get(text) or int(text)


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=PROGRAM,
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--version", action="store_true", help="show the wheel's and llama.cpp's version and exit")
    add("-m", "--model", type=Path, help="GGUF file to load")
    add("-a", "--alias", help="model name that the API shows")
    add("--host", default="127.0.0.1", help="address to listen on")
    add("--port", type=int, default=8080, help="port to listen on")
    add("-c", "--ctx-size", type=int, default=4096, help="total context, shared out among the slots")
    add("-np", "--parallel", type=int, default=1, help="number of slots")
    add("-t", "--threads", type=int, help="CPU threads for generation and for prompts")
    add("--threads-http", type=int, default=-1, help="threads for HTTP; each open request holds one")
    add("-b", "--batch-size", type=int, help="most tokens of a prompt taken in one step")
    add("-ub", "--ubatch-size", type=int, help="most tokens computed at once")
    add("-ngl", "--n-gpu-layers", type=gpu_layers, default=-1, help="number, all or auto (the CPU wheel has no GPU)")
    add("-ctk", "--cache-type-k", choices=CACHE_TYPES, default="f16", help="type of cached keys")
    add("-ctv", "--cache-type-v", choices=CACHE_TYPES, default="f16", help="type of cached values")
    add("-cram", "--cache-ram", type=int, default=0, help="host prompt cache, MiB")
    add("-fa", "--flash-attn", choices=("on", "off", "auto"), default="auto", help="flash attention")
    for on, off, default, text in (
        ("--cont-batching", "--no-cont-batching", True, "continuous batching"),
        ("--jinja", "--no-jinja", True, "the model's own chat template"),
        ("--slots", "--no-slots", True, "the /slots endpoint"),
        ("--kv-unified", "--no-kv-unified", False, "one cache shared by all slots"),
    ):
        name = on[2:].replace("-", "_")
        add(on, dest=name, action="store_true", default=default, help=text)
        add(off, dest=name, action="store_false", help=argparse.SUPPRESS)
    add("--metrics", action="store_true", help="the /metrics endpoint")
    add("-lv", "--verbosity", type=int, default=3, help="log threshold (4 shows the cache sizes)")
    add("--log-file", type=Path, help="write the log here too")
    return parser


def server_parameters(args: argparse.Namespace) -> Any:
    """The flags as the wheel's own parameter object."""
    import xllamacpp

    flash_attn = {"on": "ENABLED", "off": "DISABLED", "auto": "AUTO"}[args.flash_attn]
    params = xllamacpp.CommonParams()
    params.model.path = str(args.model)
    params.model_alias = {args.alias or args.model.name}
    params.hostnames = [args.host]
    params.port = args.port
    params.n_ctx = args.ctx_size
    params.n_parallel = args.parallel
    params.n_gpu_layers = args.n_gpu_layers
    params.cache_type_k = getattr(xllamacpp.ggml_type, f"GGML_TYPE_{args.cache_type_k.upper()}")
    params.cache_type_v = getattr(xllamacpp.ggml_type, f"GGML_TYPE_{args.cache_type_v.upper()}")
    params.cache_ram_mib = args.cache_ram
    params.cont_batching = args.cont_batching
    params.flash_attn_type = getattr(xllamacpp.llama_flash_attn_type, f"LLAMA_FLASH_ATTN_TYPE_{flash_attn}")
    params.kv_unified = args.kv_unified
    params.endpoint_metrics = args.metrics
    params.endpoint_slots = args.slots
    params.use_jinja = args.jinja
    params.verbosity = args.verbosity
    params.n_threads_http = args.threads_http
    if args.batch_size is not None:
        params.n_batch = args.batch_size
    if args.ubatch_size is not None:
        params.n_ubatch = args.ubatch_size
    if args.threads is not None:
        params.cpuparams.n_threads = args.threads
        params.cpuparams_batch.n_threads = args.threads
    return params


# ---------------------------------------------------------------------------------------------------------------
# The log, on the terminal and in a file
# ---------------------------------------------------------------------------------------------------------------


class LogCopy:
    """Copies everything that this process writes to standard output and standard error into a file as well.

    The server writes below Python, so the copy is made at the file descriptors. `close()` restores them and
    returns when the last byte is in the file.
    """

    def __init__(self, path: Path) -> None:
        self._file = path.open("wb", buffering=0)
        sys.stdout.flush()
        sys.stderr.flush()
        self._originals = [os.dup(1), os.dup(2)]
        self._threads = [self._copy(1, self._originals[0]), self._copy(2, self._originals[1])]

    def _copy(self, descriptor: int, original: int) -> threading.Thread:
        reading, writing = os.pipe()
        os.dup2(writing, descriptor)
        os.close(writing)

        def run() -> None:
            with os.fdopen(reading, "rb", buffering=0) as source:
                while data := source.read(65536):
                    self._file.write(data)
                    try:
                        os.write(original, data)
                    except OSError:
                        continue  # the terminal has gone; the file still gets the log

        thread = threading.Thread(target=run, name=f"log copy {descriptor}", daemon=True)
        thread.start()
        return thread

    def close(self) -> None:
        sys.stdout.flush()
        sys.stderr.flush()
        for descriptor, original, thread in zip((1, 2), self._originals, self._threads):
            os.dup2(original, descriptor)
            thread.join()
            os.close(original)
        self._file.close()


# ---------------------------------------------------------------------------------------------------------------
# Running
# ---------------------------------------------------------------------------------------------------------------


def serve(args: argparse.Namespace) -> int:
    """Start the server and keep the process alive until SIGTERM or Ctrl-C."""
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    import xllamacpp

    try:
        server = xllamacpp.Server(server_parameters(args))
    except RuntimeError as error:
        print(f"{PROGRAM}: the server did not start: {error}", file=sys.stderr)
        return 1
    print(f"{PROGRAM}: xllamacpp {xllamacpp.__version__} listening at {server.listening_address}", flush=True)
    stop.wait()
    del server  # ends its threads and frees the model
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    parser = build_parser()
    args = parser.parse_args(argv)
    try:
        import xllamacpp
    except ImportError as error:
        parser.error(f"{error}: install the package xllamacpp")
    if args.version:
        print(f"version: xllamacpp {xllamacpp.__version__}")
        return 0
    if args.model is None or not args.model.is_file():
        parser.error(f"--model {args.model}: no such file")
    try:
        copy = LogCopy(args.log_file) if args.log_file else None
    except OSError as error:
        parser.error(f"--log-file {args.log_file}: {error.strerror}")
    try:
        return serve(args)
    finally:
        if copy:
            copy.close()


if __name__ == "__main__":
    sys.exit(main())
