#!/usr/bin/env python3
"""Predict what serving a language model takes before a server is started: the KV cache that its slots need, whether
weights and cache fit the memory, and the throughput that memory bandwidth allows. Then hold the prediction against
what the engine logged (--check-log) and against what was measured (--measured).

With no argument it prints the lab's table: Qwen3-8B, 20 sequences of 4,096 tokens.

  python3 serving_arithmetic.py
  python3 serving_arithmetic.py --gguf model.gguf --slots 20 --ctx 4096 --kv-type q8_0 --bandwidth 273 --memory 24

Which model (one of these; the lab's Qwen3-8B without any):
  --layers N --kv-heads N --head-dim N    the shape itself
  --config PATH      a Hugging Face config.json, or the folder that holds it; safetensors beside it give the weights
  --gguf FILE        shape and weights from a GGUF file's header and tensor table
and which weights, where those do not tell: --safetensors PATH, or --weights-bytes N with --not-read-bytes N.

Against a log:       python3 serving_arithmetic.py --check-log llama-server.log --slots 20 --ctx 4096 --kv-type f16
  What you state is checked; slots, context and cache type that you leave out are taken from the log, and it says so.
Against a notebook:  python3 serving_arithmetic.py --measured labbook.md --label llama-baseline --bandwidth 273

Units: GiB and MiB are 2^30 and 2^20 bytes; bandwidth in GB/s is 10^9 bytes per second. --kv-type, --bandwidth: one
value or several with commas. Each figure stands beside its formula and inputs, so that it can be worked out again.

Output: text, or with --json one JSON object. Exit codes: 0; 1 when a log or a result does not agree with the
prediction, or the notebook has no such label, or the output cannot be written; 2 for a wrong or contradictory option
or a file that cannot be read; 130 after Ctrl-C.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import re
import stat
import statistics
import struct
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime
from typing import IO, Any, BinaryIO, NoReturn

PROGRAM = "serving_arithmetic.py"
TOOL_VERSION = "2.0.0"  # the same in all three programs

# ----------------------------------------------------------------------------------------------------------- units

KIB = 2**10
MIB = 2**20
GIB = 2**30
GB = 10**9  # memory bandwidth is quoted in decimal gigabytes per second


@dataclass(frozen=True)
class KvType:
    """How one cached value is stored: `block_values` values take `block_bytes` bytes."""

    name: str
    block_values: int
    block_bytes: int

    @property
    def text(self) -> str:
        """Bytes per value, as the fraction to multiply by."""
        return f"{self.block_bytes}/{self.block_values}" if self.block_values > 1 else str(self.block_bytes)


# Plain types: IEEE and bfloat16 sizes. The others are llama.cpp's cache types (ggml's block_q8_0 and so on: 32 values
# with one scale, and one offset in the _1 types). fp8 is vLLM's; llama.cpp has none.
KV_TYPES = {
    kv_type.name: kv_type
    for kv_type in (
        KvType("f16", 1, 2),
        KvType("q8_0", 32, 34),
        KvType("fp8", 1, 1),
        KvType("q4_0", 32, 18),
        KvType("bf16", 1, 2),
        KvType("f32", 1, 4),
        KvType("q4_1", 32, 20),
        KvType("q5_0", 32, 22),
        KvType("q5_1", 32, 24),
        KvType("iq4_nl", 32, 18),
    )
}
# vLLM's names; `auto` is the model's own 16 bits.
KV_ALIASES = {"auto": "f16", "fp8_e4m3": "fp8", "fp8_e5m2": "fp8", "float16": "f16", "bfloat16": "bf16"}
ONLY_VLLM = ("fp8",)

BLOCK_SIZE = 16  # tokens per block of vLLM's paged cache on a GPU; on a CPU it is larger (the log's engine line says)
LLAMA_PAD = 256  # llama.cpp rounds a sequence's context, and a sliding-window cache, up to a multiple of this
LLAMA_UBATCH = 512  # llama.cpp's default --ubatch-size: a sliding-window cache keeps that many tokens more
LLAMA_FLOAT = 2.0**-23  # llama.cpp prints MiB through a 32-bit float: a relative error on top of the printed digits

LAB = "part-09/lab-serve-twenty-concurrent-users"  # what marks a notebook line as one of this lab's
KNOWN_SCHEMAS = (1, 2)  # 1: a line without `schema`
LAB_SOURCE = "the lab's constants"
LAB_SLOTS, LAB_CONTEXT = 20, 4096
LAB_CONTEXTS = (100, 1500)
LAB_BATCHES = (1, 5, 10, 20)


@dataclass(frozen=True)
class Machine:
    """A name and a memory bandwidth in GB/s (10^9 bytes per second)."""

    name: str
    bandwidth_gb_per_s: float


LAB_MACHINES = (
    Machine("Spark 273 GB/s", 273),
    Machine("Strix 256 GB/s", 256),
    Machine("M4 Max 546 GB/s", 546),
    Machine("RTX 4090 1008 GB/s", 1008),
)

MAX_COUNT = 10**12  # no count, size or context that makes sense is larger
MAX_BYTES = 10**15
MAX_FIGURE = 1e15  # no figure of a notebook comes near it; below it, squares and sums stay finite
MAX_HEADER_BYTES = 100 * MIB  # of a safetensors file: the format's own limit
MAX_LINE_BYTES = 16 * MIB  # of a notebook or a log; longer lines are not ours


class UsageError(Exception):
    """A wrong option, or a file that cannot be used: exit code 2."""


class ResultError(Exception):
    """What was measured does not answer the question: exit code 1."""


def count_text(value: int) -> str:
    return f"{value:,}"


def size_text(value: float) -> str:
    """Bytes as GiB, or as MiB below one GiB, with two decimals.

    >>> size_text(12_079_595_520), size_text(-16 * MIB)
    ('11.25 GiB', '-16.00 MiB')
    """
    return f"{value / GIB:.2f} GiB" if abs(value) >= GIB else f"{value / MIB:.2f} MiB"


def plain(text: object) -> str:
    """Text from a file with its control characters shown, so that it cannot disturb a terminal.

    >>> plain("a\\x1b[2Jb")
    'a\\\\x1b[2Jb'
    """
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in str(text))


def open_file(path: str) -> BinaryIO:
    """A file, open for reading. Raises UsageError where it cannot be read, or is a folder, a pipe or a device: those
    may never end, and a pipe that nobody writes to cannot even be opened."""
    try:
        mode = os.stat(path).st_mode
        if not stat.S_ISREG(mode):
            kind = "a folder" if stat.S_ISDIR(mode) else "a pipe" if stat.S_ISFIFO(mode) else "a device or a socket"
            raise UsageError(f"cannot read {path}: it is {kind}, not a file; name another file")
        return open(path, "rb")
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror or error}") from None


# ------------------------------------------------------------------------------------------------------ model facts


@dataclass(frozen=True)
class Layer:
    """What one layer keeps of a sequence: `k_values` and `v_values` per token, of all tokens or of the last `window`
    ones, and `state_bytes` once per sequence (the fixed state of a linear-attention or state-space layer)."""

    k_values: int
    v_values: int
    window: int | None = None
    state_bytes: int = 0

    @property
    def cached(self) -> bool:
        return self.k_values + self.v_values > 0


@dataclass(frozen=True)
class Weights:
    """Bytes of the weights in memory, and of those that a decoding step does not read."""

    name: str
    source: str
    total_bytes: int
    not_read: tuple[tuple[str, int], ...] = ()  # (why, bytes)
    expert_bytes: int = 0  # of total_bytes: the routed experts
    experts: int = 0
    experts_used: float = 0.0  # per token

    @property
    def not_read_bytes(self) -> int:
        return sum(size for _, size in self.not_read)

    def read_bytes(self, batch: int = 1) -> float:
        """Weight bytes read in a step of `batch` sequences: of the experts, the share that they touch.

        >>> moe = Weights("toy", "here", 1000, (("embedding look-up", 100),), 800, 8, 2)
        >>> moe.read_bytes(1), moe.read_bytes(2)
        (300.0, 450.0)
        """
        always = self.total_bytes - self.not_read_bytes - self.expert_bytes
        if not self.expert_bytes:
            return always
        return always + self.expert_bytes * experts_touched_share(self.experts, self.experts_used, batch)


@dataclass(frozen=True)
class Model:
    """One model's layers and weights, and where the figures come from."""

    name: str
    source: str
    layers: tuple[Layer, ...]
    weights: tuple[Weights, ...] = ()
    uniform: tuple[int, int] | None = None  # (KV heads, head dim) where every layer has these and no window
    notes: tuple[str, ...] = ()
    upper_bound: bool = False  # the KV figures are an upper bound; a note says why
    quant: str | None = None  # how the weights are stored, where the file says so

    @property
    def windowed(self) -> bool:
        return any(layer.cached and layer.window is not None for layer in self.layers)

    @property
    def state_bytes(self) -> int:
        """Bytes per sequence that do not grow with its context."""
        return sum(layer.state_bytes for layer in self.layers)

    @property
    def shape(self) -> str:
        if self.uniform is not None:
            heads, dim = self.uniform
            return f"{len(self.layers)} layers, {heads} KV heads, head dim {dim}"
        return f"{len(self.layers)} layers, {sum(layer.cached for layer in self.layers)} of them with a KV cache"


def uniform_model(name: str, source: str, layers: int, kv_heads: int, head_dim: int, **more: Any) -> Model:
    """A model whose layers all cache keys and values of `kv_heads` heads for the whole context."""
    layer = Layer(kv_heads * head_dim, kv_heads * head_dim)
    return Model(name, source, (layer,) * layers, uniform=(kv_heads, head_dim), **more)


def lab_model() -> Model:
    """Qwen3-8B and the two files that the lab serves.

    The GGUF's figures are its tensor table's; the AWQ checkpoint keeps its embedding in 16 bits: 151,936 x 4,096 x 2.
    """
    gguf = Weights("Q4_K_M GGUF", "the lab's file", 5_021_827_072, (("embedding look-up", 350_060_544),))
    awq = Weights("AWQ safetensors", "the lab's file", 6_098_581_864, (("embedding look-up", 151_936 * 4_096 * 2),))
    return uniform_model("Qwen3-8B", LAB_SOURCE, 36, 8, 128, weights=(gguf, awq))


def layer_groups(layers: Iterable[Layer]) -> list[tuple[Layer, int]]:
    """Equal layers counted together, in the order of their first one.

    >>> layer_groups([Layer(4, 4), Layer(4, 4, 8), Layer(4, 4)])
    [(Layer(k_values=4, v_values=4, window=None, state_bytes=0), 2), (Layer(k_values=4, v_values=4, window=8, state_bytes=0), 1)]
    """  # noqa: E501
    groups: dict[Layer, int] = {}
    for layer in layers:
        groups[layer] = groups.get(layer, 0) + 1
    return list(groups.items())


def describe_group(layer: Layer, count: int) -> str:
    """One line about equal layers."""
    what = f"{count} layer" + ("s" if count > 1 else "")
    if layer.cached:
        kept = "the whole context" if layer.window is None else f"the last {count_text(layer.window)} tokens"
        what += f": {layer.k_values} + {layer.v_values} values per token (keys + values), of {kept}"
    elif not layer.state_bytes:
        return what + ": no cache of their own"
    if layer.state_bytes:
        what += f"{';' if layer.cached else ':'} a fixed state of {count_text(layer.state_bytes)} B per sequence"
    return what


# ---------------------------------------------------------------------------------------------- one function a formula


def kv_row_bytes(values: int, kv_type: str) -> int:
    """Bytes that `values` cached values of one token take in one layer; quantised types store whole blocks.

    >>> kv_row_bytes(1024, "f16"), kv_row_bytes(1024, "q8_0"), kv_row_bytes(1024, "q4_0"), kv_row_bytes(1024, "fp8")
    (2048, 1088, 576, 1024)
    """
    stored = KV_TYPES[kv_type]
    return (
        -(-values // stored.block_values) * stored.block_bytes
        if stored.block_values > 1
        else values * stored.block_bytes
    )


def layer_row_bytes(layer: Layer, kv_type: str) -> int:
    """Bytes per token in one layer: keys and values.

    >>> layer_row_bytes(Layer(576, 0), "f16")
    1152
    """
    return kv_row_bytes(layer.k_values, kv_type) + kv_row_bytes(layer.v_values, kv_type)


def bytes_per_token(model: Model, kv_type: str) -> int:
    """Bytes that one token takes while every layer keeps it (inside every window): the sum over the layers of keys
    and values. Where all are alike, 2 x layers x KV heads x head dim x bytes per value.

    Qwen3-8B, then Qwen2.5-0.5B, Llama-3.2-3B and Llama-2-7B:

    >>> [bytes_per_token(lab_model(), kv_type) for kv_type in ("f16", "q8_0", "fp8", "q4_0")]
    [147456, 78336, 73728, 41472]
    >>> shapes = ((24, 2, 64), (28, 8, 128), (32, 32, 128))
    >>> [bytes_per_token(uniform_model("toy", "here", *shape), "f16") // KIB for shape in shapes]
    [12, 112, 512]
    """
    return sum(layer_row_bytes(layer, kv_type) for layer in model.layers)


def sequence_bytes(model: Model, context: float, kv_type: str) -> float:
    """Bytes that one sequence of `context` tokens keeps: per layer min(context, window) tokens, and fixed states.

    >>> two = Model("toy", "here", (Layer(8, 8), Layer(8, 8, window=10), Layer(0, 0, state_bytes=7)))
    >>> sequence_bytes(two, 5, "f16"), sequence_bytes(two, 100, "f16")
    (327, 3527)
    """
    kept = 0.0
    for layer in model.layers:
        tokens = context if layer.window is None else min(context, layer.window)
        kept += tokens * layer_row_bytes(layer, kv_type)
    total = kept + model.state_bytes
    return int(total) if float(total).is_integer() else total


def pool_bytes(model: Model, slots: int, context: int, kv_type: str) -> int:
    """Bytes that `slots` full sequences keep. Without windows: bytes per token x slots x context.

    >>> pool_bytes(lab_model(), 20, 4096, "f16"), pool_bytes(lab_model(), 20, 4096, "f16") / GIB
    (12079595520, 11.25)
    """
    return slots * int(sequence_bytes(model, context, kv_type))


def padded(tokens: int, step: int = LLAMA_PAD) -> int:
    """`tokens` rounded up to a multiple of `step`.

    >>> padded(4096), padded(1000)
    (4096, 1024)
    """
    return -(-tokens // step) * step


def window_cells(context: int, window: int, sequences: int = 1, ubatch: int = LLAMA_UBATCH) -> int:
    """Cells that llama.cpp gives a sliding-window layer in one stream: min(context, window x sequences + ubatch), in
    whole 256s (llama_kv_cache_iswa). A stream holds one sequence, or all of them with --kv-unified.

    >>> window_cells(131072, 128), window_cells(8192, 1024, sequences=4), window_cells(512, 1024)
    (768, 4608, 512)
    """
    return padded(min(context, window * sequences + ubatch))


@dataclass(frozen=True)
class LlamaCache:
    """How llama-server is to lay its cache out."""

    slots: int
    context: int  # per slot; with `unified` the slots share slots x context cells
    k_type: str
    v_type: str
    unified: bool = False
    ubatch: int = LLAMA_UBATCH
    full_window: bool = False  # --swa-full: sliding-window layers keep the whole context

    @property
    def streams(self) -> int:
        return 1 if self.unified else self.slots

    @property
    def stream_context(self) -> int:
        """Cells of one stream: the context rounded up to a multiple of 256."""
        return padded(self.slots * self.context if self.unified else self.context)


def llama_cache_bytes(model: Model, cache: LlamaCache) -> tuple[int, int, int]:
    """(keys, values, fixed states) in bytes as llama-server allocates them: layers x row x cells x streams.

    >>> keys, values, states = llama_cache_bytes(lab_model(), LlamaCache(20, 4096, "f16", "f16"))
    >>> keys / MIB, values / MIB, states
    (5760.0, 5760.0, 0)
    """
    keys = values = 0
    for layer in model.layers:
        cells = cache.stream_context
        if layer.window is not None and not cache.full_window:
            cells = window_cells(cells, layer.window, cache.slots if cache.unified else 1, cache.ubatch)
        keys += kv_row_bytes(layer.k_values, cache.k_type) * cells * cache.streams
        values += kv_row_bytes(layer.v_values, cache.v_type) * cells * cache.streams
    return keys, values, model.state_bytes * cache.slots


def allocated_bytes(model: Model, slots: int, context: int, kv_type: str) -> int:
    """What a server sets aside for `slots` sequences: vLLM's types what they keep, llama.cpp's what it allocates.

    >>> allocated_bytes(lab_model(), 20, 4096, "q8_0")
    6417285120
    """
    if kv_type in ONLY_VLLM:
        return pool_bytes(model, slots, context, kv_type)
    return sum(llama_cache_bytes(model, LlamaCache(slots, context, kv_type, kv_type)))


def experts_touched_share(experts: int, used: float, batch: int) -> float:
    """Share of a layer's routed experts that a step of `batch` sequences reads, 1 - (1 - used/experts)^batch: each
    sequence picks `used` of them, taken as independent and even. For one sequence that is the active share.

    >>> experts_touched_share(128, 8, 1), round(experts_touched_share(128, 8, 20), 3)
    (0.0625, 0.725)
    """
    return 1.0 - (1.0 - used / experts) ** batch


def step_read_bytes(model: Model, weights: Weights, batch: int, context: float, kv_type: str) -> float:
    """Bytes that one decoding step moves: the weights once, and every sequence's cache and fixed states.

    >>> step_read_bytes(lab_model(), lab_model().weights[0], 20, 1500, "f16")
    9095446528
    """
    return weights.read_bytes(batch) + batch * sequence_bytes(model, context, kv_type)


def per_user_ceiling_tokens_per_s(bandwidth_gb_per_s: float, read_bytes: float) -> float:
    """Steps per second, and so tokens per second of one sequence: bandwidth / bytes read per step.

    >>> round(per_user_ceiling_tokens_per_s(273, 9_095_446_528), 1)
    30.0
    """
    return bandwidth_gb_per_s * GB / read_bytes


def aggregate_ceiling_tokens_per_s(bandwidth_gb_per_s: float, read_bytes: float, batch: int) -> float:
    """Tokens per second of all sequences: batch x per-user ceiling.

    >>> round(aggregate_ceiling_tokens_per_s(273, 9_095_446_528, 20))
    600
    """
    return batch * per_user_ceiling_tokens_per_s(bandwidth_gb_per_s, read_bytes)


def token_bytes_of_blocks(model: Model, kv_type: str) -> int:
    """Bytes per token, to divide by. Raises UsageError for a model that caches nothing."""
    size = bytes_per_token(model, kv_type)
    if not size:
        raise UsageError(f"{model.name} has no KV cache, so no blocks either")
    return size


def vllm_blocks(pool: int, block_size: int, token_bytes: int) -> int:
    """Whole blocks in a pool: floor(pool bytes / (block size x bytes per token)).

    >>> vllm_blocks(7 * GIB, 16, 147_456)
    3185
    """
    return pool // (block_size * token_bytes)


def vllm_tokens(blocks: int, block_size: int) -> int:
    """Tokens in so many blocks.

    >>> vllm_tokens(3185, 16)
    50960
    """
    return blocks * block_size


def vllm_max_concurrency(blocks: int, context: int, block_size: int) -> float:
    """Sequences of `context` tokens that the blocks hold: blocks / ceil(context / block size).

    >>> round(vllm_max_concurrency(3185, 4096, 16), 2), vllm_max_concurrency(5120, 4096, 16)
    (12.44, 20.0)
    """
    return blocks / -(-context // block_size)


def fit_line(points: Sequence[tuple[float, float]]) -> tuple[float, float] | None:
    """(a, b) of the least-squares line y = a + b x; None below two different x.

    >>> a, b = fit_line([(1, 21.5), (5, 27.5), (10, 35.0), (20, 50.0)])
    >>> round(a, 9), round(b, 9)
    (20.0, 1.5)
    """
    if len({x for x, _ in points}) < 2:
        return None
    mean_x = math.fsum(x for x, _ in points) / len(points)
    mean_y = math.fsum(y for _, y in points) / len(points)
    b = math.fsum((x - mean_x) * (y - mean_y) for x, y in points) / math.fsum((x - mean_x) ** 2 for x, _ in points)
    return mean_y - b * mean_x, b


def line_ceiling_tokens_per_s(b_ms: float) -> float | None:
    """Where c / (a + b c) levels off: 1 / b; None where b is not positive.

    >>> round(line_ceiling_tokens_per_s(1.5), 1)
    666.7
    """
    return 1000.0 / b_ms if b_ms > 0 else None


def line_throughput_tokens_per_s(a_ms: float, b_ms: float, c: int, slots: int | None = None) -> float | None:
    """n / (a + b n) with n = min(c, slots) sequences decoding together; the others wait.

    >>> [round(line_throughput_tokens_per_s(20, 1.5, c), 1) for c in (1, 5, 10, 20)]
    [46.5, 181.8, 285.7, 400.0]
    """
    together = c if slots is None else min(c, slots)
    step_ms = a_ms + b_ms * together
    return 1000.0 * together / step_ms if step_ms > 0 else None


def line_concurrency_at(a_ms: float, b_ms: float, tpot_s: float | None) -> float | None:
    """The concurrency at which a + b c meets a TPOT objective: (objective - a) / b; None where b is not positive.

    >>> round(line_concurrency_at(20, 1.5, 0.1), 1), line_concurrency_at(25, 2, 0.1)
    (53.3, 37.5)
    """
    return (1000.0 * tpot_s - a_ms) / b_ms if tpot_s is not None and b_ms > 0 else None


def low_gains(points: Sequence[tuple[int, float]]) -> list[tuple[int, int]]:
    """Every step between neighbouring (c, tokens per second) points, sorted by c, whose gain per added request is below
    half of one request's throughput at the lowest c. The first of them is the knee.

    >>> low_gains([(1, 46.5), (5, 181.8), (10, 285.7), (20, 400.0)])
    [(5, 10), (10, 20)]
    """
    if not points or points[0][1] <= 0:
        return []
    steps = list(zip(points, points[1:]))
    half = points[0][1] / points[0][0] / 2
    return [(c, next_c) for (c, rate), (next_c, next_rate) in steps if (next_rate - rate) / (next_c - c) < half]


def knee(points: Sequence[tuple[int, float]]) -> tuple[int, int] | None:
    """The first step with a low gain; None where there is none."""
    return next(iter(low_gains(points)), None)


# -------------------------------------------------------------------------------- model facts from a config.json

# Fields that transformers leaves out of a file because they equal the class's default, by model_type:
# (layers, heads, KV heads, head dim, hidden size). Only what published checkpoints do leave out.
CLASS_DEFAULTS: dict[str, dict[str, int]] = {
    "gemma2": {"heads": 8, "kv_heads": 4, "head_dim": 256},
    "gemma3_text": {"heads": 8, "kv_heads": 4, "head_dim": 256, "layers": 26},
    "gemma3": {"heads": 8, "kv_heads": 4, "head_dim": 256},
    "llama": {"heads": 32, "layers": 32, "hidden": 4096},
    "mistral": {"heads": 32, "layers": 32, "hidden": 4096, "kv_heads": 8},
}
# Every n-th layer is full attention where the file has a window and names no pattern (transformers' classes).
CONFIG_SWA_PERIODS = {
    "cohere2": 4, "exaone4": 4, "gemma2": 2, "gemma3": 6, "gemma3_text": 6, "gemma3n_text": 5, "gemma4_text": 6,
    "gpt_oss": 2, "olmo3": 4,
}  # fmt: skip
CONFIG_NAMES = {
    "layers": ("num_hidden_layers", "n_layer", "n_layers", "num_layers"),
    "heads": ("num_attention_heads", "n_head", "n_heads", "num_heads"),
    "hidden": ("hidden_size", "n_embd", "d_model"),
    "kv_heads": ("num_key_value_heads", "num_kv_heads", "n_head_kv", "multi_query_group_num"),
    "head_dim": ("head_dim", "kv_channels", "attention_head_dim"),
}
FULL, SLIDING, STATE, BOTH, NOTHING = "full", "sliding", "state", "both", "nothing"
LAYER_WORDS = {
    "full_attention": FULL, "attention": FULL, "global_attention": FULL, "global": FULL, "*": FULL,
    "sliding_attention": SLIDING, "chunked_attention": SLIDING, "local_attention": SLIDING, "local": SLIDING,
    "linear_attention": STATE, "conv": STATE, "mamba": STATE, "mamba2": STATE, "recurrent": STATE, "m": STATE,
    "hybrid": BOTH, "mlp": NOTHING, "moe": NOTHING, "-": NOTHING, "e": NOTHING,
}  # fmt: skip


class Config:
    """A config.json: the language model's part first (`text_config` and its like), then the whole file."""

    def __init__(self, path: str, data: Mapping[str, Any]) -> None:
        self.path = path
        self.notes: list[str] = []
        self.upper_bound = False
        text: Mapping[str, Any] = data
        for name in ("thinker_config", "text_config", "llm_config", "language_config"):
            inner = text.get(name)
            if isinstance(inner, Mapping):
                text = inner
        self.parts = (text, data)
        self.model_type = str(text.get("model_type") or data.get("model_type") or "")

    def get(self, *names: str) -> Any:
        """The first value that is there and not null."""
        for part in self.parts:
            for name in names:
                if part.get(name) is not None:
                    return part[name]
        return None

    def count(self, *names: str) -> int | None:
        """The first whole number above 0 among these names; refuses anything else that is not null."""
        value = self.get(*names)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int) or not 0 < value <= MAX_COUNT:
            raise UsageError(f"{self.path}: {names[0]} is {plain(repr(value))}; expected a whole number above 0")
        number: int = value
        return number

    def needed(self, what: str) -> int:
        """A field of the shape, or the class's default where the file leaves it out."""
        value = self.count(*CONFIG_NAMES[what])
        if value is None:
            value = CLASS_DEFAULTS.get(self.model_type, {}).get(what)
            if value is None:
                raise UsageError(f"{self.path}: no {' or '.join(CONFIG_NAMES[what][:2])} in it; is this the model's "
                                 "config.json? --layers, --kv-heads and --head-dim say it by hand")  # fmt: skip
            self.notes.append(f"{CONFIG_NAMES[what][0]} is not in the file: {value}, the default of {self.model_type}")
        return value

    def bound(self, note: str) -> None:
        """Say why a figure is an upper bound."""
        self.upper_bound = True
        self.notes.append(note)


def read_json_object(path: str) -> Mapping[str, Any]:
    """The JSON object in a file. Raises UsageError with the reason."""
    try:
        with open_file(path) as file:
            raw = file.read(MAX_HEADER_BYTES + 1)
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror or error}") from None
    if len(raw) > MAX_HEADER_BYTES:
        raise UsageError(f"{path} is larger than {MAX_HEADER_BYTES // MIB} MiB: not a config.json")
    try:
        data = json.loads(raw.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{path} is not JSON: {plain(error)}") from None
    if not isinstance(data, Mapping):
        raise UsageError(f"{path} holds {type(data).__name__}, not a JSON object")
    return data


def config_model(path: str, read_weights: bool = True) -> Model:
    """The model that a config.json describes (the file, or the folder that holds it)."""
    file = os.path.join(path, "config.json") if os.path.isdir(path) else path
    if file.lower().endswith((".gguf", ".safetensors")):
        raise UsageError(f"--config wants a config.json; for {file} use --{file.rpartition('.')[2].lower()}")
    if os.path.isdir(path) and not os.path.exists(file):
        raise UsageError(f"no config.json in {path}")
    config = Config(file, read_json_object(file))
    if config.get("is_encoder_decoder") is True:
        raise UsageError(f"{file}: an encoder-decoder model; this arithmetic is for decoders")
    count = layer_count(config)
    kinds = layer_kinds(config, count)
    layers = tuple(config_layer(config, index, kind) for index, kind in enumerate(kinds))
    layers = without_shared_layers(config, layers)
    name = str(config.get("_name_or_path") or os.path.basename(os.path.dirname(os.path.abspath(file))) or "model")
    folder = os.path.dirname(file) or "."
    weights: tuple[Weights, ...] = ()
    if read_weights and names_in(folder, ".safetensors"):
        weights = (safetensors_weights(folder, config, count),)
    heads = None
    if len(set(layers)) == 1 and layers[0].v_values and layers[0].window is None and not layers[0].state_bytes:
        heads = (kv_heads(config, 0), head_dim(config))
    return Model(plain(name), file, layers, weights, heads, tuple(config.notes), config.upper_bound)


def layer_count(config: Config) -> int:
    """Number of layers; a hybrid pattern's own length where it counts MLP blocks too."""
    pattern = config.get("hybrid_override_pattern")
    if isinstance(pattern, str):
        return len(pattern)
    types = config.get("layer_types", "layers_block_type")
    if isinstance(types, list) and types and config.count(*CONFIG_NAMES["layers"]) is None:
        return len(types)
    blocks = config.get("block_configs")
    if isinstance(blocks, list) and blocks and config.count(*CONFIG_NAMES["layers"]) is None:
        return len(blocks)
    return config.needed("layers")


def window_of(config: Config) -> int | None:
    """The sliding window in tokens, or None where the model uses none (`use_sliding_window` false, null, 0)."""
    if config.get("use_sliding_window") is False:
        return None
    for name in ("sliding_window", "attention_window_size", "attention_chunk_size", "sliding_window_size"):
        value = config.get(name)
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return value
    return None


def layer_kinds(config: Config, count: int) -> list[str]:
    """What each layer keeps. The file says it in one of a dozen ways; the first that it uses counts."""
    for way in (kinds_by_list, kinds_by_rule, kinds_by_window):
        kinds = way(config, count)
        if kinds is not None:
            return kinds
    return [FULL] * count


def kinds_by_list(config: Config, count: int) -> list[str] | None:
    """Kinds from a field with one entry per layer (or a cycle of them)."""
    words: list[Any] | None = None
    for name in ("layer_types", "layers_block_type", "hybrid_override_pattern", "block_types", "_block_types"):
        value = config.get(name)
        if isinstance(value, (list, str)) and len(value):
            words = list(value)
            if name.endswith("block_types"):  # a cycle
                words = [words[index % len(words)] for index in range(count)]
            break
    pattern = config.get("sliding_window_pattern")
    if words is None and isinstance(pattern, str) and pattern and window_of(config):  # such as LLLG, a cycle
        words = ["local" if pattern[index % len(pattern)].upper() == "L" else "global" for index in range(count)]
    attention = config.get("attn_type_list")  # MiniMax: 1 full, 0 linear
    if words is None and isinstance(attention, list) and attention:
        words = ["attention" if kind == 1 else "linear_attention" for kind in attention]
    if words is None:
        return None
    if len(words) != count:
        raise UsageError(f"{config.path}: {count} layers, but the list of their types has {len(words)} entries")
    kinds = []
    for word in words:
        kind = LAYER_WORDS.get(str(word).lower())
        if kind is None:
            config.bound(f"layer type {plain(word)!r} is not known here: counted as full attention, an upper bound")
        kinds.append(kind or FULL)
    if SLIDING in kinds and window_of(config) is None:
        config.bound("sliding layers without a window in the file: counted in full, an upper bound")
    return kinds


def kinds_by_rule(config: Config, count: int) -> list[str] | None:
    """Kinds from an interval, an offset or a list of indices."""
    if config.model_type in ("mamba", "mamba2", "falcon_mamba", "rwkv", "xlstm"):
        return [STATE] * count
    if config.model_type == "falcon_h1":
        return [BOTH] * count
    indices = config.get("attn_layer_indices", "full_attn_idxs")
    linear = config.get("linear_attn_config")  # Kimi: layers counted from 1
    if isinstance(linear, Mapping) and isinstance(linear.get("full_attn_layers"), list):
        indices = [index - 1 for index in linear["full_attn_layers"] if isinstance(index, int)]
    if isinstance(indices, list):
        return [FULL if index in indices else STATE for index in range(count)]
    period, offset = config.count("attn_layer_period"), config.get("attn_layer_offset")
    if period is not None and isinstance(offset, int):  # Jamba
        return [FULL if index % period == offset else STATE for index in range(count)]
    interval = config.count("full_attention_interval")
    if interval is None and config.model_type in ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"):
        interval = 4
    if interval is not None:
        return [FULL if (index + 1) % interval == 0 else STATE for index in range(count)]
    no_rope = config.get("no_rope_layers")  # Llama 4: 1 marks a layer with rotary positions, which is a chunked one
    if isinstance(no_rope, list) and len(no_rope) == count and config.get("attention_chunk_size") is not None:
        return [SLIDING if rotary else FULL for rotary in no_rope]
    return None


def kinds_by_window(config: Config, count: int) -> list[str] | None:
    """Kinds from the window alone, or with a period: every n-th layer is full."""
    if window_of(config) is None:
        return None
    first = config.get("max_window_layers")
    if isinstance(first, int) and config.get("use_sliding_window") is True:  # Qwen2, Qwen3
        return [SLIDING if index >= first else FULL for index in range(count)]
    period = config.get("sliding_window_pattern", "_sliding_window_pattern")
    if not isinstance(period, int) or isinstance(period, bool):
        period = CONFIG_SWA_PERIODS.get(config.model_type)
        if period is not None:
            config.notes.append(
                f"no layer pattern in the file: every {period}th layer full, as {config.model_type} has it"
            )
    if period is None or period == 0:
        return [SLIDING] * count
    return [SLIDING if (index + 1) % period else FULL for index in range(count)]


def kv_heads(config: Config, index: int) -> int:
    """KV heads of one layer."""
    for name in ("num_key_value_heads", "num_kv_heads"):
        value = config.get(name)
        if isinstance(value, list):  # one entry per layer
            if index >= len(value) or isinstance(value[index], bool) or not isinstance(value[index], int):
                raise UsageError(f"{config.path}: {name} has no whole number for layer {index}")
            return int(value[index])
    blocks = config.get("block_configs")  # Nemotron-NAS: per layer, null where attention was removed
    if isinstance(blocks, list) and index < len(blocks) and isinstance(blocks[index], Mapping):
        attention = blocks[index].get("attention")
        if isinstance(attention, Mapping):
            group = attention.get("n_heads_in_group")
            return config.needed("heads") // group if isinstance(group, int) and group > 0 else 0
    nested = config.get("attn_config")
    if isinstance(nested, Mapping) and isinstance(nested.get("kv_n_heads"), int):
        return int(nested["kv_n_heads"])
    value = config.count(*CONFIG_NAMES["kv_heads"])
    if value is not None and config.get("multi_query_attention") is not False:
        return value
    if config.get("multi_query") is True and not config.get("new_decoder_architecture"):
        return 1
    return CLASS_DEFAULTS.get(config.model_type, {}).get("kv_heads") or config.needed("heads")


def head_dim(config: Config) -> int:
    """Head dimension: the field, else hidden size / attention heads."""
    value = config.count(*CONFIG_NAMES["head_dim"]) or CLASS_DEFAULTS.get(config.model_type, {}).get("head_dim")
    if value is not None:
        return value
    hidden, heads = config.needed("hidden"), config.needed("heads")
    if hidden % heads:
        raise UsageError(f"{config.path}: no head_dim, and hidden size {hidden} is not a multiple of {heads} heads")
    return hidden // heads


def config_layer(config: Config, index: int, kind: str) -> Layer:
    """One layer's cache."""
    if kind == NOTHING:
        return Layer(0, 0)
    state = state_size(config) if kind in (STATE, BOTH) else 0
    if kind == STATE:
        return Layer(0, 0, None, state)
    window = window_of(config) if kind == SLIDING else None
    latent, rotary = config.count("kv_lora_rank"), config.count("qk_rope_head_dim")
    if latent is not None and rotary is not None:
        if index == 0:
            config.notes.append(
                f"latent attention (MLA): {latent} + {rotary} key values per token and layer, no separate values; "
                "an engine that does not absorb it caches more"
            )
            if config.get("index_head_dim") is not None:
                config.notes.append("the sparse-attention indexer's keys are not counted")
        return Layer(latent + rotary, 0, window, state)
    heads, dim = kv_heads(config, index), head_dim(config)
    if kind == FULL and config.get("global_head_dim") is not None:  # Gemma 4
        dim = config.count("global_head_dim") or dim
        heads = config.count("num_global_key_value_heads") or heads
    return Layer(heads * dim, heads * dim, window, state)


def state_size(config: Config) -> int:
    """Bytes that a linear-attention or state-space layer keeps per sequence, in 32-bit floats as llama.cpp keeps them:
    the convolution's last inputs and the state matrix. 0, and a note, where the fields are not known."""
    kernel = config.count("linear_conv_kernel_dim", "mamba_d_conv", "conv_kernel", "conv_kernel_size") or 4
    heads_v, heads_k = config.count("linear_num_value_heads"), config.count("linear_num_key_heads")
    dim_v, dim_k = config.count("linear_value_head_dim"), config.count("linear_key_head_dim")
    if heads_v and heads_k and dim_v and dim_k:  # gated delta net
        return 4 * ((kernel - 1) * (2 * heads_k * dim_k + heads_v * dim_v) + heads_v * dim_v * dim_k)
    cached = config.count("conv_L_cache")
    if cached is not None:  # LFM2's short convolution
        return 4 * (cached - 1) * config.needed("hidden")
    heads, dim = config.count("mamba_n_heads", "mamba_num_heads"), config.count("mamba_d_head", "mamba_head_dim")
    state = config.count("mamba_d_state", "ssm_state_size", "state_size")
    inner = heads * dim if heads and dim else (config.count("mamba_expand", "expand") or 2) * config.needed("hidden")
    if state is not None:
        groups = (config.count("mamba_n_groups", "n_groups") or 0) if heads else 0
        return 4 * ((kernel - 1) * (inner + 2 * groups * state) + inner * state)
    note = "the fixed state of the layers without a KV cache is not counted: its fields are not known here"
    if note not in config.notes:
        config.notes.append(note)
    return 0


def without_shared_layers(config: Config, layers: tuple[Layer, ...]) -> tuple[Layer, ...]:
    """Gemma 3n and 4: the last `num_kv_shared_layers` layers reuse an earlier layer's cache."""
    shared = config.get("num_kv_shared_layers")
    if not isinstance(shared, int) or isinstance(shared, bool) or not 0 < shared < len(layers):
        return layers
    config.notes.append(f"the last {shared} layers share an earlier layer's cache")
    return layers[:-shared] + (Layer(0, 0),) * shared


# --------------------------------------------------------------------------------- weights from safetensors headers

EMBEDDINGS = re.compile(r"(?:^|\.)(?:embed_tokens|wte|word_embeddings|tok_embeddings|embed_in|embeddings)\.weight$")
OUTPUT_HEADS = re.compile(r"(?:^|\.)(?:lm_head|output|embed_out|output_layer)\.(?:weight|qweight|weight_packed)$")
LOOK_UPS = re.compile(r"(?:embed_tokens_per_layer|(?:^|\.)(?:wpe|position_embeddings|embed_positions))\.weight$")
OTHER_TOWERS = re.compile(r"(?:^|\.)(?:vision|visual|audio|multi_modal_projector|mm_projector|image_|vit\.)")
EXPERTS = re.compile(r"\.experts?\.")
DRAFT_HEAD = re.compile(r"(?:^|\.)mtp\.")
LAYER_INDEX = re.compile(r"(?:^|\.)layers\.(\d+)\.")


def safetensors_weights(path: str, config: Config | None = None, layers: int | None = None) -> Weights:
    """Weights of a safetensors file or folder, from the headers alone. `config` tells the experts' active share."""
    sizes: dict[str, int] = {}
    files = safetensors_files(path)
    for file in files:
        sizes.update(safetensors_sizes(file))
    source = f"{len(files)} safetensors header{'s' if len(files) > 1 else ''} in {path}"
    reasons = {"embedding look-up": 0, "other modalities": 0, "draft head": 0}
    tied = not any(OUTPUT_HEADS.search(name) for name in sizes)
    experts = 0
    for name, size in sizes.items():
        index = LAYER_INDEX.search(name)
        if OTHER_TOWERS.search(name):
            reasons["other modalities"] += size
        elif DRAFT_HEAD.search(name) or (layers is not None and index is not None and int(index[1]) >= layers):
            reasons["draft head"] += size
        elif LOOK_UPS.search(name) or (EMBEDDINGS.search(name) and not tied):
            reasons["embedding look-up"] += size
        elif EXPERTS.search(name):
            experts += size
    count = used = None
    if config is not None:
        count = config.count("num_experts", "num_local_experts", "n_routed_experts")
        used = config.count("num_experts_per_tok", "num_experts_per_token", "moe_topk")
    if not (experts and count and used and used <= count):
        count = used = experts = 0
    not_read = tuple((why, size) for why, size in reasons.items() if size)
    return Weights("safetensors", source, sum(sizes.values()), not_read, experts, count, used)


def names_in(folder: str, ending: str) -> list[str]:
    """The sorted names in a folder with that ending. Raises UsageError where the folder cannot be listed."""
    try:
        return sorted(name for name in os.listdir(folder) if name.endswith(ending))
    except OSError as error:
        raise UsageError(f"cannot list the folder {folder}: {error.strerror or error}; name the file in it") from None


def safetensors_files(path: str) -> list[str]:
    """The files of one checkpoint: those that its index names, else model*.safetensors, else all."""
    if not os.path.isdir(path):
        return [path]
    index = os.path.join(path, "model.safetensors.index.json")
    if os.path.exists(index):
        names = read_json_object(index).get("weight_map")
        if not isinstance(names, Mapping) or not names:
            raise UsageError(f"{index} has no weight_map")
        files = [os.path.join(path, os.path.basename(str(name))) for name in sorted(set(map(str, names.values())))]
        missing = [os.path.basename(file) for file in files if not os.path.exists(file)]
        if missing:
            raise UsageError(
                f"{path}: {len(missing)} of {len(files)} files that the index names are not there, first {missing[0]}"
            )
        return files
    found = names_in(path, ".safetensors")
    chosen = [name for name in found if name.startswith("model")] or found
    if not chosen:
        raise UsageError(f"no .safetensors file in {path}")
    return [os.path.join(path, name) for name in chosen]


def safetensors_sizes(path: str) -> dict[str, int]:
    """Bytes of each tensor, from a file's header: 8 bytes little-endian length, then that much JSON."""
    try:
        with open_file(path) as file:
            start = file.read(8)
            length = struct.unpack("<Q", start)[0] if len(start) == 8 else MAX_HEADER_BYTES + 1
            raw = file.read(length) if length <= MAX_HEADER_BYTES else b""
            end = file.seek(0, os.SEEK_END)
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror or error}") from None
    if length > MAX_HEADER_BYTES or len(raw) < length:
        hint = "; it is a Git LFS pointer, not the file" if start == b"version " else ""
        raise UsageError(f"{path} is not a safetensors file, or was cut short ({count_text(end)} bytes){hint}")
    try:
        header = json.loads(raw)
        sizes = {str(name): int(entry["data_offsets"][1]) - int(entry["data_offsets"][0])
                 for name, entry in header.items() if name != "__metadata__"}  # fmt: skip
    except (ValueError, RecursionError, KeyError, IndexError, TypeError, AttributeError) as error:
        raise UsageError(f"{path}: its safetensors header is damaged: {plain(error)}") from None
    if any(size < 0 for size in sizes.values()):
        raise UsageError(f"{path}: its safetensors header is damaged: a tensor of negative size")
    return sizes


# ------------------------------------------------------------------------------------------ model facts from a GGUF

# ggml's tensor types: number -> (values per block, bytes per block), from ggml's block structures.
GGML_TYPES = {
    0: (1, 4), 1: (1, 2), 2: (32, 18), 3: (32, 20), 6: (32, 22), 7: (32, 24), 8: (32, 34), 9: (32, 36),
    10: (256, 84), 11: (256, 110), 12: (256, 144), 13: (256, 176), 14: (256, 210), 15: (256, 292),
    16: (256, 66), 17: (256, 74), 18: (256, 98), 19: (256, 50), 20: (32, 18), 21: (256, 110), 22: (256, 82),
    23: (256, 136), 24: (1, 1), 25: (1, 2), 26: (1, 4), 27: (1, 8), 28: (1, 8), 29: (256, 56), 30: (1, 2),
    34: (256, 54), 35: (256, 66), 39: (32, 17), 40: (64, 36), 41: (128, 18), 42: (64, 18),
}  # fmt: skip
# GGUF metadata value types with a fixed size: number -> struct code. 8 is a string, 9 an array.
GGUF_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
# general.file_type, how most of the tensors are stored: llama.cpp's enum llama_ftype.
GGUF_FILE_TYPES = {
    0: "F32", 1: "F16", 2: "Q4_0", 3: "Q4_1", 7: "Q8_0", 8: "Q5_0", 9: "Q5_1", 10: "Q2_K", 11: "Q3_K_S", 12: "Q3_K_M",
    13: "Q3_K_L", 14: "Q4_K_S", 15: "Q4_K_M", 16: "Q5_K_S", 17: "Q5_K_M", 18: "Q6_K", 19: "IQ2_XXS", 20: "IQ2_XS",
    21: "Q2_K_S", 22: "IQ3_XS", 23: "IQ3_XXS", 24: "IQ1_S", 25: "IQ4_NL", 26: "IQ3_S", 27: "IQ3_M", 28: "IQ2_S",
    29: "IQ2_M", 30: "IQ4_XS", 31: "IQ1_M", 32: "BF16", 36: "TQ1_0", 37: "TQ2_0", 38: "MXFP4_MOE",
}  # fmt: skip
GGUF_MAX_DIMENSIONS = 8  # ggml has 4; the product of a damaged file's thousands takes minutes
GGUF_KEPT_ARRAY = 4096  # per-layer arrays are kept; a vocabulary's are skipped

# Architectures in which llama.cpp uses a sliding window: the period n (every n-th layer is full) where the file has no
# pattern, and whether the full layer comes first in it. 0: every layer slides. Others keep the whole context.
GGUF_SWA_PERIODS = {
    "afmoe": (4, False), "cohere2": (4, False), "cohere2moe": (4, True), "exaone-moe": (4, False),
    "exaone4": (4, False), "gemma2": (2, False), "gemma3": (6, False), "gemma3n": (5, False), "gpt-oss": (2, False),
    "gemma4": (0, False), "laguna": (4, True), "lfm2": (0, False), "lfm2moe": (0, False), "llama4": (4, False),
    "mellum": (4, False), "muse-glimmer": (4, False), "olmo2": (4, False), "plamo3": (8, False),
    "smallthinker": (4, True),
}  # fmt: skip
GGUF_WINDOWS = {"gemma2": 4096, "llama4": 8192, "exaone4": 4096}  # where the file names none
GGUF_FIXED_WINDOWS = {"llama4": 8192, "smallthinker": 4096}  # whatever the file names, unless 0
GGUF_INTERVALS = {"qwen3next": 4, "qwen35": 4, "qwen35moe": 4, "minimax-01": 8}
GGUF_RECURRENT = ("mamba", "mamba2", "rwkv6", "rwkv6qwen2", "rwkv7", "arwkv7")
GGUF_UNKNOWN_CACHE = ("deepseek4", "minimax-m3", "glm-dsa", "deepseek32", "glm5-next", "hy-v4", "dots3note", "qwen4exp")


class GgufReader:
    """A GGUF file's header: metadata and tensor sizes. Reads no tensor data, and never more than the file holds."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.order = "<"
        self.meta: dict[str, Any] = {}
        self.tensors: dict[str, int] = {}
        self.short = False  # the file ends before its last tensor does
        try:
            with open_file(path) as file:
                self.file = file
                self.size = os.fstat(file.fileno()).st_size
                self.read_header()
        except OSError as error:
            raise UsageError(f"cannot read {path}: {error.strerror or error}") from None

    def bytes(self, count: int) -> bytes:
        data = self.file.read(count) if count <= self.size - self.file.tell() else b""
        if len(data) < count:
            raise UsageError(f"{self.path} ends inside its header ({count_text(self.size)} bytes): cut short?")
        return data

    def skip(self, count: int) -> None:
        if count > self.size - self.file.tell():
            raise UsageError(f"{self.path} ends inside its header ({count_text(self.size)} bytes): cut short?")
        self.file.seek(count, os.SEEK_CUR)

    def number(self, code: str) -> Any:
        return struct.unpack(self.order + code, self.bytes(struct.calcsize(self.order + code)))[0]

    def string(self) -> str:
        return self.bytes(self.number("Q")).decode("utf-8", "replace")

    def value(self, kind: int, depth: int = 0) -> Any:
        """A metadata value; a list for a short array, None for a skipped one."""
        if kind in GGUF_SCALARS:
            return self.number(GGUF_SCALARS[kind])
        if kind == 8:
            return self.string()
        if kind != 9 or depth > 4:
            raise UsageError(f"{self.path}: unknown metadata type {kind}; not a GGUF file, or a damaged one")
        inner, count = self.number("I"), self.number("Q")
        if count <= GGUF_KEPT_ARRAY:
            return [self.value(inner, depth + 1) for _ in range(count)]
        if inner in GGUF_SCALARS:
            self.skip(count * struct.calcsize(self.order + GGUF_SCALARS[inner]))
        elif inner == 8:
            for _ in range(count):
                self.skip(self.number("Q"))
        else:
            raise UsageError(f"{self.path}: a long array of arrays in the metadata; a damaged file")
        return None

    def read_header(self) -> None:
        magic = self.file.read(4)
        if magic != b"GGUF":
            hint = "; it is a Git LFS pointer, not the file" if magic == b"vers" else ""
            raise UsageError(f"{self.path} is not a GGUF file: it starts with {magic!r}{hint}")
        version = self.number("I")
        if version & 0xFFFF == 0 and version:  # the other byte order
            self.order = ">"
            version = struct.unpack(">I", struct.pack("<I", version))[0]
        if version not in (2, 3):
            raise UsageError(f"{self.path}: GGUF version {version}; versions 2 and 3 are read")
        tensor_count, pairs = self.number("Q"), self.number("Q")
        for _ in range(pairs):
            key = self.string()
            self.meta[key] = self.value(self.number("I"))
        self.read_tensors(tensor_count)

    def read_tensors(self, count: int) -> None:
        ends = []
        offsets: list[tuple[int, str]] = []
        unknown = []
        for _ in range(count):
            name = self.string()
            rank = self.number("I")
            if rank > GGUF_MAX_DIMENSIONS:
                raise UsageError(f"{self.path}: a tensor of {rank} dimensions in its header: damaged")
            dimensions = [self.number("Q") for _ in range(rank)]
            kind, offset = self.number("I"), self.number("Q")
            offsets.append((offset, name))
            if kind in GGML_TYPES:
                block, size = GGML_TYPES[kind]
                self.tensors[name] = -(-math.prod(dimensions) // block) * size
                ends.append(offset + self.tensors[name])
            else:
                unknown.append((name, kind))
        step = self.meta.get("general.alignment")
        alignment = step if isinstance(step, int) and 0 < step <= MIB else 32
        start = padded(self.file.tell(), alignment)
        self.short = bool(ends) and start + max(ends) > self.size
        offsets.sort()
        following = {name: after[0] for (_, name), after in zip(offsets, [*offsets[1:], (self.size - start, "")])}
        places = {name: offset for offset, name in offsets}
        for name, _ in unknown:  # a type newer than this program: the distance to the next tensor, padding included
            self.tensors[name] = max(0, following[name] - places[name])


class Gguf:
    """The metadata of one architecture, by the names after its prefix."""

    def __init__(self, reader: GgufReader) -> None:
        self.path = reader.path
        self.meta = reader.meta
        self.arch = str(reader.meta.get("general.architecture") or "")
        self.notes: list[str] = []
        self.upper_bound = False

    def get(self, name: str) -> Any:
        return self.meta.get(f"{self.arch}.{name}")

    def count(self, name: str, default: int | None = None) -> int:
        value = self.get(name)
        if value is None and default is not None:
            return default
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= MAX_COUNT:
            raise UsageError(f"{self.path}: {self.arch}.{name} is {plain(repr(value))}; expected a whole number")
        number: int = value
        return number

    def per_layer(self, name: str, layers: int, default: Sequence[int]) -> list[int]:
        """A number for each layer: the file has one for all, or a list."""
        value = self.get(name)
        if value is None:
            return list(default)
        if isinstance(value, list):
            if len(value) < layers or not all(isinstance(item, int) and 0 <= item <= MAX_COUNT for item in value):
                raise UsageError(f"{self.path}: {self.arch}.{name} has {len(value)} entries for {layers} layers")
            return [int(item) for item in value[:layers]]
        return [self.count(name)] * layers


def gguf_model(path: str) -> Model:
    """Shape and weights of a GGUF file (all parts of a split one)."""
    if os.path.isdir(path):
        found = names_in(path, ".gguf")
        raise UsageError(f"--gguf wants a file; {path} is a folder" + (f" that holds {found[0]}" if found else ""))
    reader = GgufReader(path)
    gguf = Gguf(reader)
    if not gguf.arch or gguf.get("block_count") is None:
        raise UsageError(
            f"{path}: no {gguf.arch or 'architecture'}.block_count in it: not a language model's first part?"
        )
    tensors = dict(reader.tensors)
    for other in split_parts(path, reader):
        tensors.update(other.tensors)
        reader.short = reader.short or other.short
    if reader.short:
        gguf.notes.append("the file is shorter than its tensor table says: cut short, or a header alone")
    all_blocks = gguf.count("block_count")
    blocks = all_blocks - min(gguf.count("nextn_predict_layers", 0), max(all_blocks - 1, 0))
    if not 0 < blocks <= 100_000:
        raise UsageError(f"{path}: {gguf.arch}.block_count is {all_blocks}")
    layers = gguf_layers(gguf, blocks)
    weights = gguf_weights(gguf, tensors, blocks, os.path.basename(path))
    uniform = None
    first = layers[0]
    if len(set(layers)) == 1 and first.k_values == first.v_values and first.window is None and not first.state_bytes:
        heads = gguf.per_layer("attention.head_count_kv", blocks, [gguf.count("attention.head_count", 1)] * blocks)[0]
        uniform = (heads, first.k_values // heads) if heads else None
    name = plain(gguf.meta.get("general.name") or os.path.basename(path))
    known = (weights,) if weights.total_bytes else ()
    stored = gguf.meta.get("general.file_type")
    quant = GGUF_FILE_TYPES.get(stored) if isinstance(stored, int) and not isinstance(stored, bool) else None
    return Model(name, path, tuple(layers), known, uniform, tuple(gguf.notes), gguf.upper_bound, quant)


def split_parts(path: str, reader: GgufReader) -> list[GgufReader]:
    """The other files of a split GGUF (name-00001-of-00003.gguf)."""
    count = reader.meta.get("split.count")
    if not isinstance(count, int) or count < 2:
        return []
    match = re.match(r"(.*)-(\d{5})-of-(\d{5})\.gguf$", path)
    if match is None or int(match[3]) != count:
        raise UsageError(f"{path} says it is one of {count} parts, but is not named NAME-00001-of-{count:05d}.gguf")
    names = [f"{match[1]}-{part:05d}-of-{count:05d}.gguf" for part in range(1, count + 1) if part != int(match[2])]
    missing = [name for name in names if not os.path.exists(name)]
    if missing:
        raise UsageError(f"{path} is one of {count} parts; {missing[0]} is not there")
    return [GgufReader(name) for name in names]


def gguf_layers(gguf: Gguf, blocks: int) -> list[Layer]:
    """What each layer caches, by llama.cpp's rules (llama_hparams and the architectures' own)."""
    heads = gguf.per_layer("attention.head_count", blocks, [0] * blocks)
    default = heads if any(heads) else [0] * blocks
    kv_heads_of = gguf.per_layer("attention.head_count_kv", blocks, default)
    width = gguf.count("embedding_length", 0)
    dim = width // heads[0] if heads[0] else 0
    key, value = gguf.count("attention.key_length", dim), gguf.count("attention.value_length", dim)
    key_swa = gguf.count("attention.key_length_swa", key)
    value_swa = gguf.count("attention.value_length_swa", value)
    latent = gguf.get("attention.key_length_mla") is not None and gguf.get("attention.value_length_mla") is not None
    if latent:
        gguf.notes.append("latent attention (MLA): keys only, no separate values")
    windows = gguf_windows(gguf, blocks)
    recurrent = gguf_recurrent(gguf, blocks, kv_heads_of)
    state = gguf_state_bytes(gguf, heads[0]) if any(recurrent) else 0
    from_start = blocks if gguf.arch != "gemma3n" else 20  # gemma3n: the layers from 20 on reuse earlier caches
    from_start -= gguf.count("attention.shared_kv_layers", 0)
    if from_start < blocks:
        gguf.notes.append(f"layers {from_start} to {blocks - 1} share an earlier layer's cache")
    layers = []
    for index in range(blocks):
        cached = index < from_start and (not recurrent[index] or gguf.arch == "falcon-h1")
        many = kv_heads_of[index] if cached else 0
        slides = windows[index] is not None
        k_values = many * (key_swa if slides else key)
        v_values = 0 if latent else many * (value_swa if slides else value)
        layers.append(Layer(k_values, v_values, windows[index] if many else None, state if recurrent[index] else 0))
    if gguf.arch in GGUF_UNKNOWN_CACHE:
        gguf.upper_bound = True
        gguf.notes.append(f"{gguf.arch} has caches of its own kind: the figure is an estimate, not an exact size")
    return layers


def gguf_windows(gguf: Gguf, blocks: int) -> list[int | None]:
    """Each layer's sliding window, or None for the whole context."""
    window = gguf.get("attention.sliding_window")
    if window is None:
        window = GGUF_WINDOWS.get(gguf.arch)
    elif window and gguf.arch in GGUF_FIXED_WINDOWS:
        window = GGUF_FIXED_WINDOWS[gguf.arch]
    if gguf.arch == "exaone4" and blocks != 64:  # the small ones do not slide
        window = None
    if not isinstance(window, int) or window <= 0:
        return [None] * blocks
    pattern = gguf.get("attention.sliding_window_pattern")
    if isinstance(pattern, list):
        if len(pattern) < blocks:
            raise UsageError(f"{gguf.path}: the sliding-window pattern has {len(pattern)} entries for {blocks} layers")
        return [window if slides else None for slides in pattern[:blocks]]
    if gguf.arch not in GGUF_SWA_PERIODS:
        gguf.notes.append(f"the file names a window of {window}, which llama.cpp does not use for {gguf.arch}: every "
                          "layer keeps the whole context")  # fmt: skip
        return [None] * blocks
    period, full_first = GGUF_SWA_PERIODS[gguf.arch]
    if isinstance(pattern, int) and not isinstance(pattern, bool):
        period = pattern
    full = 0 if full_first else period - 1
    return [window if period == 0 or index % period != full else None for index in range(blocks)]


def gguf_recurrent(gguf: Gguf, blocks: int, kv_heads_of: Sequence[int]) -> list[bool]:
    """Which layers keep a fixed state (linear attention, state space, short convolution)."""
    if gguf.arch in GGUF_RECURRENT or gguf.arch == "falcon-h1":
        return [True] * blocks
    listed = gguf.get("attention.recurrent_layers")
    if isinstance(listed, list) and len(listed) >= blocks:
        return [bool(item) for item in listed[:blocks]]
    interval = gguf.count("full_attention_interval", GGUF_INTERVALS.get(gguf.arch, 0))
    if interval and gguf.arch in GGUF_INTERVALS:
        return [(index + 1) % interval != 0 for index in range(blocks)]
    has_state = any(gguf.get(name) for name in ("ssm.state_size", "shortconv.l_cache", "kda.head_dim"))
    feed_forward = [0] * blocks
    if gguf.arch.startswith("nemotron_h"):  # its MLP blocks have neither heads nor a state
        feed_forward = gguf.per_layer("feed_forward_length", blocks, feed_forward)
    return [has_state and heads == 0 and ff == 0 for heads, ff in zip(kv_heads_of, feed_forward)]


def gguf_state_bytes(gguf: Gguf, heads: int) -> int:
    """Bytes per sequence of one recurrent layer, 32-bit floats (llama_hparams::n_embd_r and n_embd_s)."""
    width = gguf.count("embedding_length", 0)
    conv = max(gguf.count("ssm.conv_kernel", 0) - 1, 0)
    if gguf.get("wkv.head_size"):
        return 4 * (gguf.count("token_shift_count", 2) * width + width * gguf.count("wkv.head_size"))
    if gguf.get("shortconv.l_cache"):
        return 4 * width * (gguf.count("shortconv.l_cache") - 1)
    if gguf.get("kda.head_dim"):
        dim = gguf.count("kda.head_dim")
        return 4 * (3 * (conv or 3) * heads * dim + dim * dim * heads)
    if gguf.arch == "minimax-01":
        return 4 * gguf.count("attention.key_length", 0) ** 2 * heads
    inner, state = gguf.count("ssm.inner_size", 0), gguf.count("ssm.state_size", 0)
    return 4 * (conv * (inner + 2 * gguf.count("ssm.group_count", 0) * state) + state * inner)


GGUF_EXPERTS = re.compile(r"_exps\.|\.ffn_(?:gate|up|down)\.\d+\.")
GGUF_LOOK_UPS = ("per_layer_token_embd.weight", "position_embd.weight")
GGUF_BLOCK = re.compile(r"blk\.(\d+)\.")


def gguf_weights(gguf: Gguf, tensors: Mapping[str, int], blocks: int, name: str) -> Weights:
    """Weights by what a decoding step reads: look-up tables by the row, draft layers not, experts in part."""
    reasons = {"embedding look-up": 0, "draft layers": 0}
    experts = 0
    for tensor, size in tensors.items():
        block = GGUF_BLOCK.match(tensor)
        if block is not None and int(block[1]) >= blocks:
            reasons["draft layers"] += size
        elif tensor in GGUF_LOOK_UPS or (tensor == "token_embd.weight" and "output.weight" in tensors):
            reasons["embedding look-up"] += size
        elif GGUF_EXPERTS.search(tensor):
            experts += size
    if "token_embd.weight" in tensors and "output.weight" not in tensors:
        gguf.notes.append("tied embedding: the output layer reads the same matrix whole, every step")
    count = gguf.count("expert_count", 0)
    used = gguf.per_layer("expert_used_count", blocks, [0] * blocks)
    mean_used = sum(used) / max(1, sum(1 for many in used if many))
    if not (experts and count and 0 < mean_used <= count):
        experts, count, mean_used = 0, 0, 0.0
    not_read = tuple((why, size) for why, size in reasons.items() if size)
    return Weights(name, "tensor table", sum(tensors.values()), not_read, experts, count, mean_used)


# ------------------------------------------------------------------------------------------------------ log reading


@dataclass(frozen=True)
class Printed:
    """A number as a log printed it, and half of its last digit's unit."""

    value: float
    half: float


def printed(text: str, decimals: int | None = None) -> Printed:
    """A printed number; `decimals` where the printer drops trailing zeros (vLLM rounds to 2 and prints 7.0).

    >>> printed("11520.00"), printed("7.0", decimals=2)
    (Printed(value=11520.0, half=0.005), Printed(value=7.0, half=0.005))
    """
    if decimals is None:
        decimals = len(text.partition(".")[2])
    if float(text) > MAX_COUNT or decimals > 15:
        raise UsageError(f"the log holds {text[:20]}..., which is no size: is the file damaged?")
    return Printed(float(text), 0.5 * 10.0**-decimals)


def logged_count(text: str) -> int:
    """A whole number as a log printed it, with or without commas.

    >>> logged_count("50,960")
    50960
    """
    digits = text.replace(",", "")
    if len(digits) > len(str(MAX_COUNT)):
        raise UsageError(f"the log holds the number {digits[:20]}..., which counts nothing: is the file damaged?")
    return int(digits)


@dataclass(frozen=True)
class KvLine:
    """One `llama_kv_cache: size = ...` line, sizes in MiB."""

    size: Printed
    k_type: str
    k_size: Printed
    v_type: str
    v_size: Printed
    cells: int | None = None
    layers: int | None = None
    sequences: int | None = None
    streams: int | None = None


@dataclass
class LlamaLog:
    """What a llama-server log says about its cache (its last start, its main context)."""

    lines: list[KvLine] = field(default_factory=list)
    buffers: list[Printed] = field(default_factory=list)
    states: list[Printed] = field(default_factory=list)
    slots: int | None = None
    slot_context: int | None = None
    sequence_context: int | None = None
    unified: bool | None = None
    ubatch: int | None = None
    full_window: bool = False
    notes: list[str] = field(default_factory=list)


@dataclass
class VllmLog:
    """What a vLLM log says about its cache (its last start)."""

    available: Printed | None = None  # GiB
    source: str = ""  # the words of the line that said so
    tokens: int | None = None
    context: int | None = None
    concurrency: Printed | None = None
    block_size: int | None = None


NUMBER = r"([0-9]+(?:\.[0-9]+)?)"
LLAMA_KV = re.compile(
    rf"llama_\w+:\s+(?:KV self )?size\s*=\s*{NUMBER} MiB(.*?), K \((\w+)\):\s*{NUMBER} MiB, V \((\w+)\):\s*{NUMBER} MiB"
)
LLAMA_CELLS = re.compile(r"\(\s*(\d+) cells,\s*(\d+) layers,\s*(\d+)(?:/\s*(\d+))? seqs")
LLAMA_STATE = re.compile(rf"llama_\w+: size\s*=\s*{NUMBER} MiB .*, R \(\w+\):")
LLAMA_BUFFER = re.compile(rf"llama_\w+:\s+\S+ KV buffer size\s*=\s*{NUMBER} MiB")
LLAMA_SLOTS = re.compile(r"\bn_slots = (\d+)")
LLAMA_SLOT_CONTEXT = re.compile(r"\bn_ctx_slot = (\d+)|new slot,? n_ctx(?:_slot)? = (\d+)")
LLAMA_FIELD = re.compile(r"\b(n_ctx_seq|n_ctx_per_seq|n_ubatch|kv_unified)\s*= *'?(\w+)")
LLAMA_DEBUG = re.compile(r"^(?:\d+\.)+\d+ D ")  # a trial allocation of --fit is logged at debug level only

VLLM_AVAILABLE = re.compile(rf"reserved {NUMBER} GiB memory for KV Cache|Available KV cache memory: {NUMBER} GiB"
                            rf"|Explicitly set \({NUMBER}/[0-9.]+\) GiB for KV cache"
                            rf"|Auto set \({NUMBER}/[0-9.]+\) GiB for KV cache")  # fmt: skip
VLLM_WORDS = ("reserved ... memory for KV Cache", "Available KV cache memory", "Explicitly set", "Auto set")
VLLM_TOKENS = re.compile(r"(?:GPU|CPU) KV cache size: ([0-9][0-9,]*) tokens")
VLLM_CONCURRENCY = re.compile(rf"Maximum concurrency for ([0-9][0-9,]*) tokens per request: {NUMBER}x")
VLLM_BLOCK = re.compile(r"[Ss]etting (?:attention )?block size to (\d+)|'block_size': (\d+)|\bblock_size=(\d+)")


def log_lines(path: str) -> Iterator[str]:
    """A log's lines, whatever its bytes are; colour codes removed."""
    try:
        with open_file(path) as file:
            start = file.read(4)
            if start[:2] in (b"\xff\xfe", b"\xfe\xff"):
                raise UsageError(f"{path} is UTF-16; save it as UTF-8")
            file.seek(0)
            for raw in iter(lambda: file.readline(MAX_LINE_BYTES), b""):
                yield re.sub(r"\x1b\[[0-9;]*m", "", raw.decode("utf-8", "replace")).rstrip("\r\n")
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror or error}") from None


def read_logs(path: str) -> tuple[LlamaLog | None, VllmLog | None]:
    """What the log says, per engine; None for an engine that it has no cache line of."""
    reader = LlamaLogReader()
    vllm = VllmLog()
    for line in log_lines(path):
        reader.feed(line)
        feed_vllm(vllm, line)
    llama = reader.finish()
    return (llama if llama.lines or llama.buffers else None), (vllm if vllm.available or vllm.tokens else None)


class LlamaLogReader:
    """Gathers llama-server's lines. A cache line after a slots line begins the next start; what an earlier start said
    is dropped. Within a start each `constructing llama_context` begins a section: the first that has cache lines is
    the served model's, later ones are a draft model's, or equal to it where --fit tried the allocation out loud."""

    def __init__(self) -> None:
        self.begin()
        self.earlier = 0

    def begin(self) -> None:
        self.sections = [LlamaLog()]
        self.slots: int | None = None
        self.slot_context: int | None = None
        self.unified: bool | None = None

    def feed(self, line: str) -> None:
        if LLAMA_DEBUG.match(line):
            return
        if "constructing llama_context" in line or LLAMA_KV.search(line) or LLAMA_BUFFER.search(line):
            if self.slots is not None:
                self.begin()
                self.earlier += 1
            if "constructing llama_context" in line:
                self.sections.append(LlamaLog())
        self.feed_section(self.sections[-1], line)
        slots = LLAMA_SLOTS.search(line)
        if slots:
            self.slots = logged_count(slots[1])
            unified = re.search(r"kv_unified = '(\w+)'", line)
            self.unified = unified[1] == "true" if unified else None
        context = LLAMA_SLOT_CONTEXT.search(line)
        if context and self.slot_context is None:
            self.slot_context = logged_count(context[1] or context[2])

    def feed_section(self, section: LlamaLog, line: str) -> None:
        match = LLAMA_KV.search(line)
        if match:
            cells = LLAMA_CELLS.search(match[2])
            counts = [logged_count(count) if count else None for count in cells.groups()] if cells else [None] * 4
            section.lines.append(KvLine(printed(match[1]), match[3].lower(), printed(match[4]), match[5].lower(),
                                        printed(match[6]), *counts))  # fmt: skip
            return
        for pattern, into in ((LLAMA_STATE, section.states), (LLAMA_BUFFER, section.buffers)):
            match = pattern.search(line)
            if match:
                into.append(printed(match[1]))
        if "using full-size SWA cache" in line:
            section.full_window = True
        for name, value in LLAMA_FIELD.findall(line) if "llama_" in line else ():
            if name == "kv_unified":
                section.unified = value == "true"
            elif not value.isdigit():
                continue
            elif name == "n_ubatch":
                section.ubatch = logged_count(value)
            elif section.sequence_context is None:
                section.sequence_context = logged_count(value)

    def finish(self) -> LlamaLog:
        found = [section for section in self.sections if section.lines or section.buffers]
        log = found[0] if found else LlamaLog()
        log.slots, log.slot_context = self.slots, self.slot_context
        if self.unified is not None:
            log.unified = self.unified
        if self.earlier:
            log.notes.append(f"the log holds {self.earlier + 1} starts; the last one counts")
        others = [section for section in found[1:] if section.lines != log.lines]
        if others:
            log.notes.append(f"{len(others)} further context in the log (a draft model's) is not counted")
        return log


def feed_vllm(log: VllmLog, line: str) -> None:
    """Take one line of a vLLM log in. A memory line after a tokens line begins the next start."""
    block = VLLM_BLOCK.search(line)
    if block:
        log.block_size = logged_count(next(group for group in block.groups() if group))
    match = VLLM_AVAILABLE.search(line)
    if match:
        which = next(index for index, group in enumerate(match.groups()) if group)
        available = printed(match[which + 1], decimals=2)
        if log.tokens is not None or log.available is None or available.value < log.available.value:
            log.available, log.source = available, VLLM_WORDS[which]  # of several workers the smallest counts
        log.tokens = log.context = log.concurrency = None
    match = VLLM_TOKENS.search(line)
    if match:
        log.tokens = logged_count(match[1])
    match = VLLM_CONCURRENCY.search(line)
    if match:
        log.context, log.concurrency = logged_count(match[1]), printed(match[2])


@dataclass(frozen=True)
class Comparison:
    """One figure predicted and logged. `agrees` is None where it is shown but not judged."""

    what: str
    predicted: str
    logged: str
    agrees: bool | None
    how: str = ""


@dataclass(frozen=True)
class LogCheck:
    """A log held against the prediction."""

    engine: str
    comparisons: tuple[Comparison, ...]
    notes: tuple[str, ...]
    figures: Mapping[str, Any]

    @property
    def agrees(self) -> bool:
        return all(item.agrees is not False for item in self.comparisons)


def stated(value: int | None, logged: int | None, default: int) -> tuple[int, str]:
    """The value to predict with and where it comes from: the option, else the log, else the lab's default."""
    if value is not None:
        return value, "stated"
    return (logged, "from the log") if logged else (default, "the lab's")


def check_llama(model: Model, log: LlamaLog, slots: int | None, context: int | None, kv_type: str | None) -> LogCheck:
    """Predicted sizes beside llama-server's. Slots, context and type that are not stated are the log's own."""
    first = log.lines[0] if log.lines else None
    unified = (
        bool(log.unified) if log.unified is not None else bool(first and first.streams == 1 < (first.sequences or 1))
    )
    logged_slots = log.slots if log.slots is not None else first.sequences if first else None
    n_slots, slots_from = stated(slots, logged_slots, LAB_SLOTS)
    logged_stream = log.sequence_context or log.slot_context or (first.cells if first else None)
    if context is None and unified and logged_stream is not None:
        stream_context, context_from = logged_stream, "from the log"
        per_slot = -(-stream_context // n_slots)
    else:
        per_slot, context_from = stated(context, logged_stream, LAB_CONTEXT)
    k_type = kv_type or (first.k_type if first else "f16")
    v_type = kv_type or (first.v_type if first else "f16")
    for name in (k_type, v_type):
        if name not in KV_TYPES:
            raise UsageError(f"the log's cache type {plain(name)!r} is not known here; state --kv-type")
    cache = LlamaCache(n_slots, per_slot, k_type, v_type, unified, log.ubatch or LLAMA_UBATCH, log.full_window)
    keys, values, states = llama_cache_bytes(model, cache)
    rows = list(llama_stated_rows(log, first, cache, slots, context, kv_type))
    rows += llama_size_rows(model, log, keys, values, states)
    notes = list(log.notes)
    type_from = "stated" if kv_type else "from the log" if first else "the default"
    notes.append(
        f"predicted for {n_slots} slots ({slots_from}) of {per_slot:,} tokens ({context_from}), "
        f"keys {k_type}, values {v_type} ({type_from})"
    )
    if model.source == LAB_SOURCE and not all(row.agrees for row in rows):
        notes.append("the model is the lab's, as none is stated: --gguf, --config or --layers name another")
    if unified:
        notes.append(f"one unified cache: the slots share {count_text(cache.stream_context)} cells")
    if context is not None and cache.stream_context != (n_slots * per_slot if unified else per_slot):
        notes.append(
            f"llama.cpp rounds a stream's context up to a multiple of {LLAMA_PAD}: {count_text(cache.stream_context)}"
        )
    if model.windowed:
        ubatch = f"{cache.ubatch} ({'from the log' if log.ubatch else 'the default'})"
        notes.append(f"sliding-window layers: min(context, window + ubatch {ubatch}) cells, in whole {LLAMA_PAD}s")
    logged_mib = sum(line.size.value for line in log.lines) if log.lines else sum(size.value for size in log.buffers)
    figures = {"slots": n_slots, "context": per_slot, "k_type": k_type, "v_type": v_type, "unified": unified,
               "predicted_kv_bytes": keys + values, "predicted_kv_mib": (keys + values) / MIB,
               "logged_kv_mib": logged_mib, "kv_lines": len(log.lines)}  # fmt: skip
    return LogCheck("llama-server", tuple(rows), tuple(notes), figures)


def llama_stated_rows(log: LlamaLog, first: KvLine | None, cache: LlamaCache, slots: int | None, context: int | None,
                      kv_type: str | None) -> Iterator[Comparison]:  # fmt: skip
    """Rows for what was stated and the log tells too."""
    logged_slots = log.slots if log.slots is not None else first.sequences if first else None
    if slots is not None and logged_slots is not None:
        yield Comparison("slots", str(slots), str(logged_slots), slots == logged_slots, "n_slots")
    if context is not None and log.slot_context is not None:
        agrees = log.slot_context == cache.stream_context
        yield Comparison(
            "context per slot", count_text(cache.stream_context), count_text(log.slot_context), agrees, "n_ctx_slot"
        )
    if kv_type is not None and first is not None:
        logged = first.k_type if first.k_type == first.v_type else f"{first.k_type}/{first.v_type}"
        yield Comparison("cache type", kv_type, logged, logged == kv_type, "K and V of the size line")


def llama_size_rows(model: Model, log: LlamaLog, keys: int, values: int, states: int) -> Iterator[Comparison]:
    """Rows for the sizes: the sum of the lines, keys, values, layers, fixed states."""

    def row(what: str, predicted: int, sizes: Sequence[Printed], how: str) -> Comparison:
        logged = math.fsum(size.value for size in sizes)
        allowed = math.fsum(size.half for size in sizes) + logged * LLAMA_FLOAT + 1e-9
        agrees: bool | None = abs(predicted / MIB - logged) <= allowed
        if model.upper_bound and logged < predicted / MIB:
            agrees = None
        return Comparison(
            what, f"{predicted / MIB:.2f} MiB", f"{logged:.2f} MiB", agrees, f"{how}, within {allowed:.3f} MiB"
        )

    if log.lines:
        count = len(log.lines)
        lines = f"sum of {count} size lines" if count > 1 else "size line"
        yield row("KV cache", keys + values, [line.size for line in log.lines], lines)
        yield row("keys", keys, [line.k_size for line in log.lines], "K")
        yield row("values", values, [line.v_size for line in log.lines], "V")
        logged_layers = [line.layers for line in log.lines if line.layers is not None]
        if logged_layers:
            cached = sum(layer.cached for layer in model.layers)
            agrees = None if model.upper_bound else cached == sum(logged_layers)
            yield Comparison("layers with a cache", str(cached), str(sum(logged_layers)), agrees, lines)
    else:
        yield row("KV cache", keys + values, log.buffers, f"sum of {len(log.buffers)} KV buffers")
    if states and log.states:
        yield row("fixed states", states, log.states, "R and S")


def check_vllm(model: Model, log: VllmLog, context: int | None, kv_type: str, block_size: int | None,
               available: int | None) -> LogCheck:  # fmt: skip
    """Predicted blocks and tokens beside vLLM's. The pool is the stated one, else the log's within its rounding."""
    block, block_from = stated(block_size, log.block_size, BLOCK_SIZE)
    ctx, _ = stated(context, log.context, LAB_CONTEXT)
    token_bytes = token_bytes_of_blocks(model, kv_type)
    rows: list[Comparison] = []
    block_from = block_from if block_size or log.block_size else "the default on a GPU"
    notes = [f"blocks of {block} tokens ({block_from}), cache type {kv_type}: {token_bytes:,} B per token"]
    if log.context is not None and context is not None:
        rows.append(
            Comparison(
                "context", count_text(context), count_text(log.context), context == log.context, "tokens per request"
            )
        )
    if log.tokens is None and log.concurrency is None:
        raise UsageError("the log names memory for the cache but no tokens: vLLM had not finished its start")
    low = high = available
    if log.available is not None:
        logged = log.available
        if available is None:
            low, high = math.ceil((logged.value - logged.half) * GIB), math.floor((logged.value + logged.half) * GIB)
        else:
            agrees = abs(available / GIB - logged.value) <= logged.half + 1e-9
            rows.append(Comparison("pool", f"{available / GIB:.2f} GiB", f"{logged.value:.2f} GiB", agrees, log.source))
    if low is None or high is None:
        raise UsageError("the log names tokens but no memory for them; state it with --available-kv GIB")
    exact = not (model.windowed or model.state_bytes or model.upper_bound)
    if not exact:
        notes.append(
            "vLLM groups the layers of such a model its own way: every layer is counted in full here, and not judged"
        )
    blocks = (vllm_blocks(max(low, 0), block, token_bytes), vllm_blocks(high, block, token_bytes))
    rows += vllm_rows(log, blocks, block, ctx, exact)
    if log.tokens is not None and any(row.what == "tokens" and row.agrees is False for row in rows):
        notes += vllm_hints(model, log.tokens, low, high)
    pool_text = (
        size_text(available) + " (stated)"
        if available is not None
        else f"{low / GIB:.3f} to {high / GIB:.3f} GiB (the log's two decimals)"
    )
    notes.append(
        f"pool {pool_text}; blocks = floor(pool / ({block} x {count_text(token_bytes)} B)) = {range_text(*blocks)}"
    )
    figures = {"block_size": block, "context": ctx, "kv_type": kv_type, "bytes_per_token": token_bytes,
               "pool_bytes": [low, high], "predicted_blocks": list(blocks),
               "predicted_tokens": [vllm_tokens(count, block) for count in blocks], "logged_tokens": log.tokens,
               "logged_max_concurrency": log.concurrency.value if log.concurrency else None}  # fmt: skip
    return LogCheck("vLLM", tuple(rows), tuple(notes), figures)


def vllm_hints(model: Model, tokens: int, low: int, high: int) -> Iterator[str]:
    """Which other cache type or block size would give the logged tokens."""
    for kv_type in ("bf16", "fp8", "f32"):
        for block in (16, 32, 64, 128, 256):
            size = bytes_per_token(model, kv_type)
            least, most = (vllm_tokens(vllm_blocks(pool, block, size), block) for pool in (low, high))
            if least <= tokens <= most:
                yield f"the logged tokens are those of cache type {kv_type} with blocks of {block}"
                break


def range_text(low: int, high: int) -> str:
    return count_text(low) if low == high else f"{count_text(low)} to {count_text(high)}"


def vllm_rows(log: VllmLog, blocks: tuple[int, int], block: int, context: int, exact: bool) -> Iterator[Comparison]:
    """Rows for tokens and concurrency. Since 0.20 or so vLLM prints concurrency x context for the tokens."""

    def agreed(holds: bool) -> bool | None:
        return holds if exact else None

    low, high = (vllm_tokens(count, block) for count in blocks)
    per_request = -(-context // block)
    if log.tokens is not None:
        rescaled = [count * context // per_request for count in blocks]
        holds = low <= log.tokens <= high or rescaled[0] <= log.tokens <= rescaled[1]
        yield Comparison("tokens", range_text(low, high), count_text(log.tokens), agreed(holds), "blocks x block size")
    if log.concurrency is not None:
        least, most = (vllm_max_concurrency(count, context, block) for count in blocks)
        if log.tokens is not None and exact and log.tokens % block == 0:
            least = most = vllm_max_concurrency(log.tokens // block, context, block)
        text = f"{least:.2f}x" if f"{least:.2f}" == f"{most:.2f}" else f"{least:.2f}x to {most:.2f}x"
        half = log.concurrency.half + 1e-9
        holds = least - half <= log.concurrency.value <= most + half
        yield Comparison("maximum concurrency", text, f"{log.concurrency.value:.2f}x", agreed(holds),
                         f"blocks / ceil({count_text(context)} / {block})")  # fmt: skip


# ------------------------------------------------------------------------------------------------- notebook reading

PREFIX = re.compile(r"[\s\ufeff]*(?:[-*+>](?=[\s{>])[\s\ufeff]*)*")  # indentation, bullets, quotes, a BOM


@dataclass(frozen=True)
class Level:
    """The records that count for one concurrency level: the newest run's repeats."""

    c: int
    records: tuple[Mapping[str, Any], ...]

    def values(self, *path: str) -> list[float]:
        """A figure in each repeat that has it. Version 1 printed 0.0 where a TPOT was undefined."""
        found = []
        for record in self.records:
            value: Any = record
            for key in path:
                value = value.get(key) if isinstance(value, Mapping) else None
            number = as_float(value)
            undefined = number == 0 and path[0] in ("tpot_s", "prompt_tokens_mean") and schema(record) == 1
            if number is not None and not undefined:
                found.append(number)
        return found

    def median(self, *path: str) -> float | None:
        values = self.values(*path)
        return statistics.median(values) if values else None

    def total(self, name: str) -> float:
        return math.fsum(self.values(name))

    @property
    def context(self) -> tuple[float, float] | None:
        """(mean prompt tokens, mean output tokens) per request; None where nothing completed."""
        completed = self.total("completed")
        if not completed:
            return None
        return self.median("prompt_tokens_mean") or 0.0, self.total("output_tokens") / completed


def as_float(value: Any) -> float | None:
    """A finite JSON number; None for everything else (true and "3" are not numbers)."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) else None


def schema(record: Mapping[str, Any]) -> float | None:
    """A record's format version; lines without one are version 1. None where it is no number."""
    return as_float(record.get("schema", 1))


def instant(record: Mapping[str, Any]) -> float | None:
    """`recorded_at` in seconds since 1970; None where it cannot be told.

    >>> instant({"recorded_at": "1970-01-02T01:00:00+01:00"}), instant({"recorded_at": "1970-01-02T00:00:00Z"})
    (86400.0, 86400.0)
    """
    value = record.get("recorded_at")
    if not isinstance(value, str):
        return None
    try:
        return datetime.fromisoformat(value[:-1] + "+00:00" if value.endswith("Z") else value).timestamp()
    except (ValueError, OverflowError, OSError):
        return None


def refuse_constant(text: str) -> NoReturn:
    raise ValueError(f"{text} is not JSON")


def oversized(path: str, value: Any) -> str | None:
    """The first figure of a record that is too large to have been measured; None where all can be.

    >>> oversized("", {"ttft_s": {"p50": 0.1, "p90": 1e300}}), oversized("", {"concurrency": 20})
    ('ttft_s.p90 is 1e+300: beyond anything that can be measured', None)
    """
    if isinstance(value, Mapping):
        faults = (
            oversized(f"{path}.{key}" if path else str(key), inner)
            for key, inner in value.items()
            if key != "extra_body"
        )  # the user's own, in which any number may stand
        return next(filter(None, faults), None)
    if not isinstance(value, (int, float)) or abs(value) <= MAX_FIGURE:
        return None
    shown = f"{value:g}" if isinstance(value, float) else f"a number of {len(str(abs(value)))} digits"
    return f"{plain(path)} is {shown}: beyond anything that can be measured"


def notebook_record(raw: bytes) -> Mapping[str, Any] | None:
    """The level record on a line, or None. Raises ValueError where a line of this lab is damaged or of a version
    that is not known here."""
    text = raw.decode("utf-8", "replace")
    text = text[PREFIX.match(text).end() :].strip()  # type: ignore[union-attr]
    if not text.startswith("{"):
        return None
    try:
        record = json.loads(text, parse_constant=refuse_constant)
    except (ValueError, RecursionError):
        if LAB in text:
            raise ValueError("a line of this lab that is not JSON") from None
        return None
    if not isinstance(record, Mapping) or record.get("lab") != LAB or "ttft_s" not in record:
        return None
    if schema(record) not in KNOWN_SCHEMAS:
        version = json.dumps(record["schema"])[:20]
        raise ValueError(f"format version {version} is not known here (1 and 2 are)")
    if fault := oversized("", record):
        raise ValueError(fault)
    c = record.get("concurrency")
    return record if isinstance(c, int) and not isinstance(c, bool) and c > 0 else None


def read_notebook(path: str) -> tuple[list[Mapping[str, Any]], list[str]]:
    """(whole level records in file order, what is to be said about the file)."""
    records, notes = [], []
    try:
        with open_file(path) as file:
            for number, raw in enumerate(iter(lambda: file.readline(MAX_LINE_BYTES), b""), 1):
                if number == 1 and raw[:2] in (b"\xff\xfe", b"\xfe\xff"):
                    raise UsageError(f"{path} is UTF-16; save it as UTF-8")
                try:
                    record = notebook_record(raw)
                except ValueError as error:
                    notes.append(f"line {number}: {error}; left out")
                    continue
                if record is not None and record.get("interrupted") is not True:
                    records.append(record)
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror or error}") from None
    return records, notes


def label_levels(path: str, label: str | None) -> tuple[str, list[Level], Mapping[str, Any], list[str]]:
    """(label, its levels sorted by c, the newest record that counts, notes): that record's settings are the label's, as
    in summarise_load.py. Raises ResultError where the notebook has no such label."""
    records, notes = read_notebook(path)
    labels = list(dict.fromkeys(str(record.get("label")) for record in records))
    if not labels:
        raise ResultError(f"no level record in {path}; load_test.py appends them")
    if label is None and len(labels) > 1:
        raise UsageError(f"--measured needs --label; {path} has: {', '.join(map(plain, labels))}")
    label = labels[0] if label is None else label
    by_c: dict[int, list[Mapping[str, Any]]] = {}
    for record in records:
        if str(record.get("label")) == label:
            by_c.setdefault(record["concurrency"], []).append(record)
    if not by_c:
        raise ResultError(f"no label {label!r} in {path}; it has: {', '.join(map(plain, labels))}")
    levels = [Level(c, newest_run(by_c[c])) for c in sorted(by_c)]
    places = {id(record): place for place, record in enumerate(records)}
    counted = [record for level in levels for record in level.records]
    return label, levels, max(counted, key=lambda record: (instant(record) or 0.0, places[id(record)])), notes


def newest_run(records: Sequence[Mapping[str, Any]]) -> tuple[Mapping[str, Any], ...]:
    """Of one level's records those of the newest run, the later line of the same repeat.

    Newest is by `recorded_at`, then by run id, then by place in the file. Version 1 lines have no run id: of them the
    last one is a run. (summarise_load.py chooses in the same way.)

    >>> runs = [{"schema": 2, "run_id": run, "repeat": r} for run, r in (("2026b", 0), ("2026b", 1), ("2026a", 0))]
    >>> [(record["run_id"], record["repeat"]) for record in newest_run(runs)]
    [('2026b', 0), ('2026b', 1)]
    """
    runs: dict[str, list[int]] = {}  # places in `records`
    nameless: list[list[int]] = []
    old: list[list[int]] = []
    for place, record in enumerate(records):
        if schema(record) == 1:
            old = [[place]]
        elif record.get("run_id") is None:
            nameless.append([place])
        else:
            runs.setdefault(str(record["run_id"]), []).append(place)
    candidates = [*runs.values(), *nameless, *old]
    named = not nameless and not old
    dated = all(instant(records[place]) is not None for places in candidates for place in places)

    def age(places: list[int]) -> tuple[float, str, int]:
        newest = max(instant(records[place]) or 0.0 for place in places) if dated else 0.0
        return newest, str(records[places[0]]["run_id"]) if named else "", places[-1]

    repeats = {str(records[place].get("repeat", 0)): records[place] for place in max(candidates, key=age)}
    return tuple(repeats.values())


# -------------------------------------------------------------------------------------- prediction meets measurement


@dataclass(frozen=True)
class Line:
    """TPOT = a + b c in ms, and what follows from it over the measured levels."""

    name: str
    a_ms: float
    b_ms: float
    ceiling_tokens_per_s: float | None
    concurrency_at_objective: float | None
    knee_between: tuple[int, int] | None
    last_level_within_objective: int | None


@dataclass(frozen=True)
class Share:
    """Measured throughput at one level beside the bandwidth ceiling there."""

    c: int
    batch: int  # min(c, slots): what decodes together
    measured_tokens_per_s: float
    ceiling_tokens_per_s: float

    @property
    def share(self) -> float:
        return self.measured_tokens_per_s / self.ceiling_tokens_per_s


@dataclass(frozen=True)
class Measured:
    """A label's levels reduced to what the prediction is compared with."""

    label: str
    settings: Mapping[str, Any]
    levels: tuple[Level, ...]
    slots: int | None
    slo_tpot_s: float | None
    prompt_tokens: float
    output_tokens: float
    fit_levels: tuple[int, ...]
    fit_points: int
    fitted: Line | None
    knee_between: tuple[int, int] | None
    operating_point: int | None
    notes: tuple[str, ...]

    @property
    def context(self) -> float:
        """Mean tokens in a sequence's cache while it decodes: the prompt and half of the output."""
        return self.prompt_tokens + self.output_tokens / 2

    @property
    def points(self) -> list[tuple[int, float]]:
        found = [(level.c, level.median("output_tokens_per_s")) for level in self.levels]
        return [(c, rate) for c, rate in found if rate is not None]

    @property
    def peak(self) -> tuple[int, float] | None:
        return max(self.points, key=lambda point: point[1], default=None)


def make_line(
    name: str, a_ms: float, b_ms: float, cs: Sequence[int], slots: int | None, slo_tpot_s: float | None
) -> Line:
    """A line and what follows from it."""
    curve = [(c, line_throughput_tokens_per_s(a_ms, b_ms, c, slots)) for c in cs]
    within = None
    if slo_tpot_s is not None:
        within = max((c for c in cs if a_ms + b_ms * min(c, slots or c) <= 1000 * slo_tpot_s), default=None)
    return Line(name, a_ms, b_ms, line_ceiling_tokens_per_s(b_ms), line_concurrency_at(a_ms, b_ms, slo_tpot_s),
                knee([(c, rate) for c, rate in curve if rate is not None]), within)  # fmt: skip


def measure(path: str, label: str | None, slots: int | None) -> Measured:
    """Read a label's levels and fit its TPOT line over those at or below the slots."""
    label, all_levels, settings, notes = label_levels(path, label)
    levels = [level for level in all_levels if level.total("completed") > 0]
    if not levels:
        raise ResultError(f"label {label!r} in {path} has no level with a completed request")
    slots = slots or int(as_float(settings.get("server_slots")) or 0) or None  # 0 stands for unknown
    fitted_levels = [level for level in levels if slots is None or level.c <= slots]
    points = [(float(level.c), 1000 * tpot) for level in fitted_levels for tpot in level.values("tpot_s", "p50")]
    slo = as_float(settings.get("slo_tpot_s")) or None
    coefficients = fit_line(points)
    fitted = make_line("fitted", *coefficients, [level.c for level in levels], slots, slo) if coefficients else None
    weighted = [(level.total("completed"), level.context) for level in fitted_levels or levels]
    whole = math.fsum(count for count, context in weighted if context)
    prompt = math.fsum(count * context[0] for count, context in weighted if context) / whole if whole else 0.0
    output = math.fsum(count * context[1] for count, context in weighted if context) / whole if whole else 0.0
    if prompt == 0:
        notes.append("the records have no prompt tokens: counted as 0, so the predicted b is a lower bound")
    rates = [(level.c, level.median("output_tokens_per_s")) for level in levels]
    return Measured(
        label, settings, tuple(levels), slots, slo, prompt, output,
        tuple(sorted({int(c) for c, _ in points})), len(points), fitted,
        knee([(c, rate) for c, rate in rates if rate is not None]),
        max((level.c for level in levels if meets_objective(level)), default=None), tuple(notes),
    )  # fmt: skip


def meets_objective(level: Level) -> bool:
    """No failure, and both p90s inside the recorded objective (outputs of one token have no TPOT)."""
    ttft, tpot = level.median("ttft_s", "p90"), level.median("tpot_s", "p90")
    slo_ttft, slo_tpot = level.median("slo_ttft_s"), level.median("slo_tpot_s")
    if level.total("failed") or ttft is None or slo_ttft is None or slo_tpot is None:
        return False
    return ttft <= slo_ttft and (tpot is None or tpot <= slo_tpot)


def predicted_line(measured: Measured, model: Model, weights: Weights, kv_type: str, machine: Machine) -> Line:
    """a = weight bytes read / bandwidth, b = context x KV bytes per token / bandwidth, in ms."""
    per_ms = machine.bandwidth_gb_per_s * GB / 1000
    a_ms = weights.read_bytes(1) / per_ms
    b_ms = sequence_bytes(model, measured.context, kv_type) / per_ms
    cs = [level.c for level in measured.levels]
    return make_line(machine.name, a_ms, b_ms, cs, measured.slots, measured.slo_tpot_s)


def ceiling_shares(measured: Measured, model: Model, weights: Weights, kv_type: str, machine: Machine) -> list[Share]:
    """Each level's throughput beside the bandwidth ceiling of what decodes together there."""
    shares = []
    for c, rate in measured.points:
        batch = c if measured.slots is None else min(c, measured.slots)
        moved = step_read_bytes(model, weights, batch, measured.context, kv_type)
        shares.append(Share(c, batch, rate, aggregate_ceiling_tokens_per_s(machine.bandwidth_gb_per_s, moved, batch)))
    return shares


def explain_knee(measured: Measured, predicted: Line | None, pool_tokens: int | None) -> tuple[str, str]:
    """(code, sentence): what explains the knee: slots, pool, bandwidth, compute, other, unknown, or not_reached."""
    if measured.knee_between is None:
        return (
            "not_reached",
            "no step gains less than half of one request's throughput: neither slots, pool nor compute limits yet",
        )
    low, high = measured.knee_between
    level = next(level for level in measured.levels if level.c == high)
    pool = pool_evidence(measured, level, pool_tokens)
    if measured.slots is not None and high > measured.slots and not (pool and level.median("server", "preemptions")):
        waiting = [value for name in ("peak_deferred", "peak_waiting") for value in level.values("server", name)]
        seen = f"; up to {max(waiting):.0f} requests were seen waiting" if waiting else ""
        return (
            "slots",
            f"c={high} is above {measured.slots} slots: {high - measured.slots} requests wait for one at any time"
            + seen,
        )
    if pool:
        return "pool", pool
    return explain_step(measured, predicted, low, high)


def pool_evidence(measured: Measured, level: Level, pool_tokens: int | None) -> str | None:
    """What shows that the cache ran out at a level, or None."""
    preemptions, usage = level.median("server", "preemptions"), level.median("server", "peak_cache_usage")
    waiting = level.median("server", "peak_waiting")
    if preemptions:
        return f"the engine preempted {preemptions:.0f} requests at c={level.c}: the cache was full"
    need = level.c * (measured.prompt_tokens + measured.output_tokens)
    if pool_tokens is not None and need > pool_tokens:
        return (f"c={level.c} x {measured.prompt_tokens + measured.output_tokens:.1f} tokens = {need:.0f}, "
                f"more than the pool's {count_text(pool_tokens)}")  # fmt: skip
    if usage is not None and usage >= 0.99 and waiting:
        return f"cache usage reached {100 * usage:.0f} % at c={level.c} with up to {waiting:.0f} requests waiting"
    return None


def explain_step(measured: Measured, predicted: Line | None, low: int, high: int) -> tuple[str, str]:
    """Below the slots and with room in the pool: does the decoding step explain the knee, and what makes it longer?"""
    first = measured.levels[0]
    level = next(level for level in measured.levels if level.c == high)
    start, end = first.median("tpot_s", "p50"), level.median("tpot_s", "p50")
    rate = first.median("output_tokens_per_s")
    if start is None or end is None or rate is None or first.c == high:
        return "unknown", "the levels have no TPOT to explain it with"
    from_step = [(each.c, rate / first.c * each.c * start / tpot) for each in measured.levels
                 if (tpot := each.median("tpot_s", "p50"))]  # fmt: skip
    if (low, high) not in low_gains(from_step):
        return "other", (
            f"the step grew from {1000 * start:.2f} ms at c={first.c} to {1000 * end:.2f} ms at c={high}, too little "
            "for it: look at prefill (TTFT), at the drain of a short level, and at the client"
        )
    grown = 1000 * (end - start)
    if predicted is None:
        return (
            "unknown",
            f"the step grew by {grown:.2f} ms; with --bandwidth the cache's part of it can be told from compute",
        )
    cache = predicted.b_ms * (high - first.c)
    share = cache / grown if grown > 0 else math.inf
    more = high - first.c
    numbers = (
        f"from c={first.c} to c={high} the step grew by {grown:.2f} ms; reading the cache of {more} more sequences "
        f"takes {predicted.b_ms:.4f} x {more} = {cache:.2f} ms of that ({100 * share:.0f} %)"
    )
    if share >= 0.5:
        return "bandwidth", numbers + ": the pool's bytes pass the memory each step"
    rest = (grown - cache) / (high - first.c)
    return "compute", numbers + f"; the rest is compute and overhead per sequence, {rest:.2f} ms each"


# -------------------------------------------------------------------------------------------------------- rendering


@dataclass(frozen=True)
class Options:
    """What the command line asks for, checked."""

    model: Model
    slots: int | None
    ctx: int | None
    kv_types: tuple[str, ...]  # as stated; empty for the defaults
    machines: tuple[Machine, ...]  # as stated; empty for the lab's
    memory_bytes: int | None
    available_kv_bytes: int | None
    block_size: int | None
    as_json: bool
    check_log: str | None
    measured: str | None
    label: str | None
    lab_table: bool

    @property
    def kv_type(self) -> str | None:
        """The one cache type that was stated, or None. Raises UsageError where there are several."""
        if len(self.kv_types) > 1:
            raise UsageError(f"--kv-type: one type here, not {len(self.kv_types)}")
        return self.kv_types[0] if self.kv_types else None


def lab_pools(model: Model) -> list[tuple[str, int, int]]:
    """(cache type, bytes per token, pool bytes) for the lab's three types."""
    return [(kv_type, bytes_per_token(model, kv_type), pool_bytes(model, LAB_SLOTS, LAB_CONTEXT, kv_type))
            for kv_type in ("f16", "q8_0", "fp8")]  # fmt: skip


def lab_memory(model: Model) -> list[tuple[str, Weights, str]]:
    """(server, weights, cache type) of the lab's four pairings."""
    gguf, awq = model.weights
    return [("llama-server", gguf, "f16"), ("llama-server", gguf, "q8_0"), ("vLLM", awq, "f16"), ("vLLM", awq, "fp8")]


def render_lab_table() -> str:
    """The lab's table. Its bytes are part of the lab: other people compare with them."""
    model = lab_model()
    tokens = LAB_SLOTS * LAB_CONTEXT
    lines = [f"KV pool for {LAB_SLOTS} x {LAB_CONTEXT:,} = {tokens:,} tokens"]
    for kv_type, per_token, pool in lab_pools(model):
        lines.append(f"  {kv_type:<5} {per_token:>7,} B/token  {pool:>14,} B = {pool / GIB:5.2f} GiB")
    lines.append("Weights + pool, before compute buffers and graphs (GiB)")
    for server, weights, kv_type in lab_memory(model):
        total = weights.total_bytes + pool_bytes(model, LAB_SLOTS, LAB_CONTEXT, kv_type)
        lines.append(f"  {server + ', ' + weights.name:<26} + {kv_type:<5} = {total / GIB:5.2f}")
    lines.append("Bandwidth ceiling, Q4_K_M, f16 cache: aggregate tok/s (per user) at batch B")
    for machine in LAB_MACHINES:
        for context in LAB_CONTEXTS:
            cells = ceiling_cells(ceilings(model, model.weights[0], machine, context, LAB_BATCHES, "f16"))
            lines.append(f"  {machine.name:<20}ctx {context:>5}: {cells}")
    return "\n".join(lines) + "\n"


def ceilings(model: Model, weights: Weights, machine: Machine, context: int, batches: Sequence[int],
             kv_type: str) -> list[dict[str, Any]]:  # fmt: skip
    """Bandwidth ceilings at one context, a row for each batch."""
    rows = []
    for batch in batches:
        moved = step_read_bytes(model, weights, batch, context, kv_type)
        per_user = per_user_ceiling_tokens_per_s(machine.bandwidth_gb_per_s, moved)
        rows.append({
            "machine": machine.name, "bandwidth_gb_per_s": machine.bandwidth_gb_per_s, "context": context,
            "batch": batch, "kv_type": kv_type, "read_per_step_bytes": moved, "per_user_tokens_per_s": per_user,
            "aggregate_tokens_per_s": aggregate_ceiling_tokens_per_s(machine.bandwidth_gb_per_s, moved, batch),
        })  # fmt: skip
    return rows


def ceiling_cells(rows: Sequence[Mapping[str, Any]]) -> str:
    cells = (
        f"B={row['batch']:<2} {row['aggregate_tokens_per_s']:>5.0f} ({row['per_user_tokens_per_s']:5.1f})"
        for row in rows
    )
    return "  ".join(cells)


def report_types(options: Options) -> tuple[str, ...]:
    return options.kv_types or ("f16", "q8_0", "fp8", "q4_0")


def batches_for(slots: int) -> list[int]:
    """The lab's batches up to the slots, and the slots."""
    return sorted({batch for batch in LAB_BATCHES if batch <= slots} | {slots})


def contexts_for(ctx: int) -> list[int]:
    return sorted({context for context in LAB_CONTEXTS if context <= ctx} | {ctx})


def served_weights(model: Model, kv_type: str) -> Weights | None:
    """The file that goes with a cache type: of the lab's two, llama.cpp's GGUF or vLLM's AWQ."""
    if not model.weights:
        return None
    return model.weights[-1 if kv_type in ONLY_VLLM else 0]


def build_report(options: Options) -> dict[str, Any]:
    """Every figure of the prediction, as --json prints it."""
    model = options.model
    slots, ctx = options.slots or LAB_SLOTS, options.ctx or LAB_CONTEXT
    report: dict[str, Any] = {
        "program": PROGRAM, "tool_version": TOOL_VERSION, "mode": "prediction",
        "model": model_json(model), "slots": slots, "context": ctx, "tokens": slots * ctx,
        "kv": [], "weights": [weights_json(each) for each in model.weights], "memory": [], "ceilings": [], "vllm": None,
    }  # fmt: skip
    for kv_type in report_types(options):
        pool, allocated = pool_bytes(model, slots, ctx, kv_type), allocated_bytes(model, slots, ctx, kv_type)
        report["kv"].append({
            "kv_type": kv_type, "bytes_per_token": bytes_per_token(model, kv_type), "pool_bytes": pool,
            "pool_mib": pool / MIB, "pool_gib": pool / GIB, "allocated_bytes": allocated,
            "allocated_mib": allocated / MIB,
        })  # fmt: skip
        report["memory"] += memory_rows(options, kv_type, allocated)
    ceiling_type = report_types(options)[0]
    weights = served_weights(model, ceiling_type)
    if weights is not None and weights.read_bytes(1) > 0:
        for machine in options.machines or LAB_MACHINES:
            for context in contexts_for(ctx):
                report["ceilings"] += ceilings(model, weights, machine, context, batches_for(slots), ceiling_type)
    if options.available_kv_bytes is not None:
        report["vllm"] = [vllm_json(options, kv_type, ctx) for kv_type in options.kv_types or ("f16", "fp8")]
    return report


def memory_rows(options: Options, kv_type: str, pool: int) -> list[dict[str, Any]]:
    """Weights + pool against the memory, for each file that is served with this cache type."""
    files: list[Weights | None] = list(options.model.weights) or [None]
    if len(files) > 1 and kv_type not in ("f16", "bf16", "f32"):
        files = [served_weights(options.model, kv_type)]
    rows = []
    for weights in files:
        known = weights is not None
        total = pool + (weights.total_bytes if weights is not None else 0)
        memory = options.memory_bytes
        fits = None if memory is None or (not known and total <= memory) else total <= memory
        rows.append({
            "weights": weights.name if weights is not None else None, "kv_type": kv_type, "needed_bytes": total,
            "needed_gib": total / GIB, "weights_counted": known, "memory_bytes": memory,
            "left_bytes": None if memory is None else memory - total, "fits": fits,
            "most_slots": most_slots(options, kv_type, weights),
        })  # fmt: skip
    return rows


def most_slots(options: Options, kv_type: str, weights: Weights | None) -> int | None:
    """How many slots of this context the memory holds beside the weights; None where that is not known."""
    if options.memory_bytes is None or weights is None:
        return None
    room = options.memory_bytes - weights.total_bytes
    one = allocated_bytes(options.model, 1, options.ctx or LAB_CONTEXT, kv_type)
    return max(0, room // one) if one else None


def model_json(model: Model) -> dict[str, Any]:
    """The model's shape."""
    return {
        "name": model.name, "source": model.source, "quant": model.quant, "layers": len(model.layers),
        "layers_with_kv_cache": sum(layer.cached for layer in model.layers),
        "kv_heads": model.uniform[0] if model.uniform else None,
        "head_dim": model.uniform[1] if model.uniform else None,
        "groups": [{"layers": count, "k_values": layer.k_values, "v_values": layer.v_values, "window": layer.window,
                    "state_bytes": layer.state_bytes} for layer, count in layer_groups(model.layers)],
        "upper_bound": model.upper_bound, "notes": list(model.notes),
    }  # fmt: skip


def weights_json(weights: Weights) -> dict[str, Any]:
    """Weights, and what of them a step reads."""
    return {
        "name": weights.name, "source": weights.source, "total_bytes": weights.total_bytes,
        "not_read_bytes": weights.not_read_bytes, "not_read": dict(weights.not_read),
        "expert_bytes": weights.expert_bytes, "experts": weights.experts or None,
        "experts_used": weights.experts_used or None, "read_per_step_bytes": weights.read_bytes(1),
    }  # fmt: skip


def vllm_json(options: Options, kv_type: str, context: int) -> dict[str, Any]:
    """vLLM's blocks in the stated pool."""
    pool, block = options.available_kv_bytes or 0, options.block_size or BLOCK_SIZE
    token_bytes = token_bytes_of_blocks(options.model, kv_type)
    blocks = vllm_blocks(pool, block, token_bytes)
    return {"kv_type": kv_type, "available_bytes": pool, "block_size": block, "bytes_per_token": token_bytes,
            "blocks": blocks, "tokens": vllm_tokens(blocks, block), "context": context,
            "max_concurrency": vllm_max_concurrency(blocks, context, block)}  # fmt: skip


def render_report(options: Options, report: Mapping[str, Any]) -> str:
    """The prediction as text, each figure beside its formula."""
    model = options.model
    lines = [f"Model: {model.name} ({model.shape}), from {plain(model.source)}"]
    groups = layer_groups(model.layers)
    if model.uniform is None:
        lines += [f"  {describe_group(layer, count)}" for layer, count in groups]
    lines += [f"  note: {note}" for note in model.notes]
    lines += render_kv(options, report)
    for weights in model.weights:
        lines += render_weights(weights)
    if not model.weights:
        lines.append(
            "Weights: not known; --gguf, --safetensors or --weights-bytes give them, and with them memory and ceilings"
        )
    lines += render_memory(options, report)
    if report["ceilings"]:
        lines += render_ceilings(options, report)
    for row in report["vllm"] or ():
        lines += render_vllm(model, row)
    return "\n".join(lines) + "\n"


def render_kv(options: Options, report: Mapping[str, Any]) -> list[str]:
    """The cache: per token, and the pool."""
    model, slots, ctx = options.model, report["slots"], report["context"]
    bound = ", an upper bound" if model.upper_bound else ""
    lines = [f"KV pool for {slots} x {ctx:,} = {slots * ctx:,} tokens{bound}"]
    if model.uniform is not None:
        how = "2 x layers x KV heads x head dim x bytes per value; pool = that x slots x context"
    else:
        how = "sum over layers of (key + value values) x bytes per value"
        lines.append("  pool = slots x (sum over layers of min(context, window) x bytes per token, and fixed states)")
    lines.insert(1, f"  bytes per token = {how}")
    for row in report["kv"]:
        kv_type, product = KV_TYPES[row["kv_type"]], ""
        if model.uniform is not None:
            product = f" = 2 x {len(model.layers)} x {model.uniform[0]} x {model.uniform[1]} x {kv_type.text}"
        pool = f"{row['pool_bytes']:,} B = {row['pool_gib']:.2f} GiB = {row['pool_mib']:.2f} MiB"
        lines.append(f"  {kv_type.name:<6} {row['bytes_per_token']:>9,} B/token{product:<30}  pool {pool}")
        if any(values % kv_type.block_values for each in model.layers for values in (each.k_values, each.v_values)):
            lines.append(
                f"    note: blocks of {kv_type.block_values} values do not divide a row; llama.cpp may refuse it"
            )
    different = [row for row in report["kv"] if row["allocated_bytes"] != row["pool_bytes"]]
    if different:
        lines.append(f"  llama-server allocates whole {LLAMA_PAD}s of tokens per slot, and on sliding layers")
        lines.append(f"  min(context, window + ubatch {LLAMA_UBATCH}) of them:")
    for row in different:
        lines.append(f"  {row['kv_type']:<6} {row['allocated_bytes']:,} B = {row['allocated_mib']:.2f} MiB")
    if model.state_bytes:
        lines.append(
            f"  of it fixed states: {model.state_bytes:,} B per sequence, whatever its length and the cache type"
        )
    return lines


def render_weights(weights: Weights) -> list[str]:
    """Weights, and the bytes that a step reads of them."""
    total = f"{weights.total_bytes:,} B = {size_text(weights.total_bytes)}"
    lines = [f"Weights: {plain(weights.name)}, {total} ({plain(weights.source)})"]
    parts = [f"{weights.total_bytes:,}", *(f"{size:,} ({why})" for why, size in weights.not_read)]
    batch = ""
    if weights.expert_bytes:
        used, experts = f"{weights.experts_used:g}", weights.experts
        lines.append(f"  experts: {weights.expert_bytes:,} B, {used} of {experts} per token; "
                     f"B sequences read 1 - (1 - {used}/{experts})^B of them")  # fmt: skip
        idle = weights.expert_bytes * (1 - weights.experts_used / weights.experts)
        parts.append(f"{idle:,.0f} (idle experts)")
        batch = " at batch 1"
    lines.append(f"  read per step{batch}: {' - '.join(parts)} = {weights.read_bytes(1):,.0f} B")
    return lines


def render_memory(options: Options, report: Mapping[str, Any]) -> list[str]:
    """Weights + pool, and whether they fit."""
    lines = ["Weights + pool, before compute buffers and graphs"]
    for row in report["memory"]:
        name = plain(row["weights"]) if row["weights_counted"] else "pool alone"
        text = f"  {name} + {row['kv_type']}" if row["weights_counted"] else f"  {name}, {row['kv_type']}"
        text += f" = {size_text(row['needed_bytes'])}"
        memory = row["memory_bytes"]
        if memory is not None:
            text += f" of {size_text(memory)}: "
            if row["fits"] is None:
                text += f"leaves {size_text(row['left_bytes'])} for the weights, which are not known"
            elif row["fits"]:
                text += f"fits, {size_text(row['left_bytes'])} left for compute buffers, graphs and all else"
            else:
                text += f"does not fit, {size_text(-row['left_bytes'])} short"
            if row["most_slots"] is not None:
                text += f"; at most {row['most_slots']} slots of {count_text(report['context'])} tokens"
        lines.append(text)
    return lines if options.model.weights or options.memory_bytes is not None else []


def render_ceilings(options: Options, report: Mapping[str, Any]) -> list[str]:
    """The bandwidth ceilings."""
    kv_type = report["ceilings"][0]["kv_type"]
    weights = served_weights(options.model, kv_type)
    name = plain(weights.name) if weights else ""
    lines = [f"Bandwidth ceiling, {name}, {kv_type} cache: aggregate tok/s (per user) at batch B"]
    lines.append("  per user = bandwidth / (weight bytes read + B x cache of one sequence); aggregate = B x per user")
    for machine in options.machines or LAB_MACHINES:
        for context in contexts_for(report["context"]):
            rows = [row for row in report["ceilings"] if row["machine"] == machine.name and row["context"] == context]
            lines.append(f"  {machine.name:<20}ctx {context:>5}: {ceiling_cells(rows)}")
    return lines


def render_vllm(model: Model, row: Mapping[str, Any]) -> list[str]:
    """vLLM's blocks, tokens and concurrency."""
    pool, block, blocks, context = row["available_bytes"], row["block_size"], row["blocks"], row["context"]
    size = f"{block} x {row['bytes_per_token']:,} B"
    most = f"{blocks:,} / ceil({context:,} / {block}) = {row['max_concurrency']:.2f}x"
    lines = [f"vLLM with {size_text(pool)} for the cache, {row['kv_type']}"]
    lines.append(f"  blocks = floor({pool:,} B / ({size})) = {blocks:,}")
    lines.append(f"  tokens = {blocks:,} x {block} = {row['tokens']:,}")
    lines.append(f"  maximum concurrency at {context:,} tokens = {most}")
    if row["kv_type"] not in ("f16", "bf16", "fp8", "f32"):
        lines.append(f"  note: {row['kv_type']} is llama.cpp's cache type; vLLM has 16-bit and fp8")
    if model.windowed or model.state_bytes or model.upper_bound:
        lines.append("  note: every layer counted in full; vLLM groups the layers of such a model and may hold more")
    return lines


def render_check(options: Options, checks: Sequence[LogCheck]) -> str:
    """A log beside its prediction."""
    model = options.model
    lines = []
    for check in checks:
        lines.append(f"{check.engine} log {plain(options.check_log)} beside {model.name} ({model.shape}, "
                     f"from {plain(model.source)})")  # fmt: skip
        width = max(len(item.what) for item in check.comparisons)
        for item in check.comparisons:
            verdict = {True: "ok", False: "DIFFERS", None: "not judged"}[item.agrees]
            figures = f"predicted {item.predicted:>14}  log {item.logged:>14}"
            lines.append(f"  {item.what:<{width}}  {figures}  {verdict}  ({item.how})")
        lines += [f"  note: {note}" for note in (*check.notes, *model.notes)]
    differ = [item.what for check in checks for item in check.comparisons if item.agrees is False]
    if differ:
        lines.append(f"differs: {', '.join(differ)}: another configuration than predicted")
    else:
        lines.append("agrees with the prediction")
    return "\n".join(lines) + "\n"


def check_json(options: Options, checks: Sequence[LogCheck]) -> dict[str, Any]:
    """The same as one object."""
    return {
        "program": PROGRAM, "tool_version": TOOL_VERSION, "mode": "check-log", "log": options.check_log,
        "model": model_json(options.model),
        "agrees": all(check.agrees for check in checks),
        "checks": [{
            "engine": check.engine, "agrees": check.agrees, "figures": dict(check.figures), "notes": list(check.notes),
            "comparisons": [{"what": item.what, "predicted": item.predicted, "log": item.logged, "agrees": item.agrees,
                             "how": item.how} for item in check.comparisons],
        } for check in checks],
    }  # fmt: skip


@dataclass(frozen=True)
class Meeting:
    """Prediction and measurement side by side."""

    measured: Measured
    weights: Weights
    weights_from: str
    kv_type: str
    kv_type_from: str
    predicted: tuple[Line, ...]
    shares: tuple[tuple[Machine, tuple[Share, ...]], ...]
    knee_code: str
    knee_sentence: str


def meet(options: Options) -> Meeting:
    """Work a label's prediction out and put it beside its levels."""
    measured = measure(options.measured or "", options.label, options.slots)
    model = options.model
    if not model.weights:
        raise UsageError(
            "--measured needs the weights: --gguf, --safetensors, or --weights-bytes with --not-read-bytes"
        )
    quant = str(measured.settings.get("quant") or "")
    weights, weights_from = model.weights[0], "as stated"
    if len(model.weights) > 1:  # the lab's two files
        weights = model.weights["AWQ" in quant.upper()]
        weights_from = f"the record's quant is {plain(quant) or 'unknown'}"
    kv_type, kv_type_from = options.kv_type, "stated"
    if kv_type is None:
        named = re.search(r"\bKV (\w+)", quant)
        kv_type = KV_ALIASES.get(named[1].lower(), named[1].lower()) if named else "f16"
        kv_type_from = "from the record's quant" if named and kv_type in KV_TYPES else "the default"
        kv_type = kv_type if kv_type in KV_TYPES else "f16"
    machines = options.machines or LAB_MACHINES
    predicted = tuple(predicted_line(measured, model, weights, kv_type, machine) for machine in machines)
    shares = tuple((machine, tuple(ceiling_shares(measured, model, weights, kv_type, machine))) for machine in machines)
    pool = None
    if options.available_kv_bytes is not None:
        block = options.block_size or BLOCK_SIZE
        pool = vllm_tokens(vllm_blocks(options.available_kv_bytes, block, token_bytes_of_blocks(model, kv_type)), block)
    only = predicted[0] if len(options.machines) == 1 else None
    code, sentence = explain_knee(measured, only, pool)
    return Meeting(measured, weights, weights_from, kv_type, kv_type_from, predicted, shares, code, sentence)


def meeting_json(options: Options, meeting: Meeting) -> dict[str, Any]:
    """The same as one object."""
    measured = meeting.measured

    return {
        "program": PROGRAM, "tool_version": TOOL_VERSION, "mode": "measured", "labbook": options.measured,
        "label": measured.label,
        "model": model_json(options.model), "weights": weights_json(meeting.weights), "kv_type": meeting.kv_type,
        "bytes_per_token": bytes_per_token(options.model, meeting.kv_type), "slots": measured.slots,
        "prompt_tokens_mean": measured.prompt_tokens, "output_tokens_mean": measured.output_tokens,
        "context": measured.context,
        "objective_tpot_s": measured.slo_tpot_s, "fit_levels": measured.fit_levels, "fit_points": measured.fit_points,
        "fitted": asdict(measured.fitted) if measured.fitted else None,
        "predicted": [asdict(line) for line in meeting.predicted],
        "levels": [{**asdict(machine), **asdict(share), "share_of_ceiling": share.share}
                   for machine, shares in meeting.shares for share in shares],
        "peak": dict(zip(("c", "output_tokens_per_s"), measured.peak)) if measured.peak else None,
        "peak_share_of_ceiling": {machine.name: peak_share(measured, shares) for machine, shares in meeting.shares},
        "knee_between": measured.knee_between, "knee_explained_by": meeting.knee_code,
        "knee_explanation": meeting.knee_sentence,
        "operating_point": measured.operating_point, "notes": [*measured.notes, *options.model.notes],
    }  # fmt: skip


def peak_share(measured: Measured, shares: Sequence[Share]) -> float | None:
    """The measured peak as a share of the bandwidth ceiling at its level."""
    return next((share.share for share in shares if measured.peak and share.c == measured.peak[0]), None)


def render_meeting(options: Options, meeting: Meeting) -> str:
    """Prediction beside measurement, as text."""
    measured, model = meeting.measured, options.model
    told = [plain(measured.settings.get(name)) for name in ("engine", "engine_version", "model", "host", "quant")
            if measured.settings.get(name) not in (None, "", "unknown")]  # fmt: skip
    lines = [f"Label {plain(measured.label)}: {', '.join(told)}; slots {measured.slots or 'not known'}",
             f"Predicted for {model.name} ({model.shape}, from {plain(model.source)})"]  # fmt: skip
    one = sequence_bytes(model, measured.context, meeting.kv_type)
    first, *rest = render_weights(meeting.weights)
    lines += [f"{first}; {meeting.weights_from}", *rest]
    lines.append(
        f"  context = mean prompt {measured.prompt_tokens:.1f} + half of mean output {measured.output_tokens:.1f}"
        f" = {measured.context:.1f} tokens"
    )
    kv_type = f"{meeting.kv_type}, {meeting.kv_type_from}"
    if model.uniform is not None:
        per_token = bytes_per_token(model, meeting.kv_type)
        lines.append(f"  cache of one sequence = {measured.context:.1f} x {per_token:,} B ({kv_type}) = {one:,.0f} B")
    else:
        lines.append(f"  cache of one sequence = {one:,.0f} B ({kv_type}; per layer, windows counted)")
    lines += render_lines(meeting)
    lines += render_shares(meeting)
    if measured.knee_between is None:
        lines.append(f"Knee measured: not reached: {meeting.knee_sentence}")
    else:
        low, high = measured.knee_between
        why = f"explained by: {meeting.knee_code}: {meeting.knee_sentence}"
        lines.append(f"Knee measured: between c={low} and c={high}; {why}")
    point = f"c={measured.operating_point}" if measured.operating_point is not None else "none"
    lines.append(f"Operating point measured (no failure, both p90s inside the objective): {point}")
    lines += [f"note: {note}" for note in (*measured.notes, *model.notes)]
    return "\n".join(lines) + "\n"


def render_lines(meeting: Meeting) -> list[str]:
    """a and b, fitted and predicted, and what follows from each."""
    measured = meeting.measured
    slo = "no objective recorded" if measured.slo_tpot_s is None else f"c at TPOT {1000 * measured.slo_tpot_s:g} ms"
    fit = f"c = {', '.join(map(str, measured.fit_levels))}" if measured.fit_levels else "no level"
    limit = f", those at or below {measured.slots} slots" if measured.slots is not None else ""
    lines = [
        f"TPOT = a + b x c, fitted by least squares to the p50 at {fit}{limit} ({measured.fit_points} points)",
        "  predicted a = weight bytes read / bandwidth, b = cache of one sequence / bandwidth",
        "  ceiling = 1/b, c at the objective = (objective - a)/b, knee of n/(a + b n) with n = min(c, slots)",
        f"  {'':<20} {'a ms':>9} {'b ms':>9} {'ceiling tok/s':>14} {slo:>22}  knee",
    ]
    if measured.fitted is None:
        lines.append("  fitted               not possible: it needs a TPOT at two different levels")
    for line in ([measured.fitted] if measured.fitted else []) + list(meeting.predicted):
        ceiling = f"{line.ceiling_tokens_per_s:.1f}" if line.ceiling_tokens_per_s is not None else "none"
        at = f"{line.concurrency_at_objective:.1f}" if line.concurrency_at_objective is not None else "-"
        where = f"between c={line.knee_between[0]} and c={line.knee_between[1]}" if line.knee_between else "not reached"
        lines.append(f"  {line.name:<20} {line.a_ms:>9.3f} {line.b_ms:>9.4f} {ceiling:>14} {at:>22}  {where}")
    if measured.fitted is not None:
        for line in meeting.predicted:
            pairs = (("a", measured.fitted.a_ms, line.a_ms), ("b", measured.fitted.b_ms, line.b_ms))
            ratios = ", ".join(f"{name} {fitted / predicted:.2f}" for name, fitted, predicted in pairs if predicted)
            lines.append(f"  fitted / predicted for {line.name}: {ratios}")
    return lines


def render_shares(meeting: Meeting) -> list[str]:
    """Each level's share of the bandwidth ceiling, and the peak's."""
    lines = []
    for machine, shares in meeting.shares:
        lines.append(
            f"Share of the ceiling at {machine.bandwidth_gb_per_s:g} GB/s = measured / (B x bandwidth / (weight bytes "
            "read + B x cache of one sequence)), B = min(c, slots)"
        )
        for share in shares:
            lines.append(
                f"  c={share.c:>3}  measured {share.measured_tokens_per_s:>8.1f} tok/s  "
                f"ceiling {share.ceiling_tokens_per_s:>8.1f}  {100 * share.share:5.1f} %"
            )
        part = peak_share(meeting.measured, shares)
        if meeting.measured.peak and part is not None:
            c, rate = meeting.measured.peak
            over = ": above the ceiling, so an input is wrong (bandwidth, weights or model)" if part > 1 else ""
            lines.append(f"  peak {rate:.1f} tok/s at c={c} is {100 * part:.1f} % of the ceiling there{over}")
    return lines


# ----------------------------------------------------------------------------------------------------- command line


class Parser(argparse.ArgumentParser):
    """argparse whose errors are one line, raised."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message}; --help lists the options")


def whole_number(text: str) -> int:
    """A whole number from 1 to 10^12."""
    if not re.fullmatch(r"[0-9]+", text) or not text.strip("0"):
        raise argparse.ArgumentTypeError(f"{text[:40]!r} is not a whole number above 0")
    return limited_number(text, MAX_COUNT)


def limited_number(digits: str, most: int) -> int:
    """The number of some digits; refused, with the limit, above it."""
    short = digits.lstrip("0") or "0"
    if len(short) > len(str(most)) or int(short) > most:
        raise argparse.ArgumentTypeError(f"{digits[:40]!r} is too large: at most {count_text(most)}")
    return int(short)


def byte_count(text: str) -> int:
    """A number of bytes, 0 allowed."""
    if not re.fullmatch(r"[0-9]+", text):
        raise argparse.ArgumentTypeError(f"{text[:40]!r} is not a number of bytes")
    return limited_number(text, MAX_BYTES)


def positive(text: str) -> float:
    """A number above 0 and at most 10^12."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not value > 0 or "_" in text or "inf" in text.lower():
        raise argparse.ArgumentTypeError(f"{text[:40]!r} is not a number above 0")
    if value > MAX_COUNT:
        raise argparse.ArgumentTypeError(f"{text[:40]!r} is too large: at most {count_text(MAX_COUNT)}")
    return value


def bandwidth_list(text: str) -> tuple[Machine, ...]:
    """GB/s, one or several."""
    return tuple(Machine(f"{value:g} GB/s", value) for value in dict.fromkeys(map(positive, text.split(","))))


def kv_type_list(text: str) -> tuple[str, ...]:
    """Cache types, one or several."""
    names = []
    for word in text.split(","):
        name = KV_ALIASES.get(word.strip().lower(), word.strip().lower())
        if name not in KV_TYPES:
            raise argparse.ArgumentTypeError(f"{word!r} is not a cache type; known: {', '.join(KV_TYPES)}, auto")
        names.append(name)
    return tuple(dict.fromkeys(names))


def build_parser() -> Parser:
    """The options."""
    parser = Parser(prog=PROGRAM, description=__doc__, add_help=False, allow_abbrev=False,
                    formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    model = parser.add_argument_group("which model")
    model.add_argument("--config", metavar="PATH", help="a Hugging Face config.json or its folder")
    model.add_argument("--gguf", metavar="FILE", help="a GGUF file; only its header is read")
    model.add_argument("--layers", type=whole_number, metavar="N", help="layers with a KV cache")
    model.add_argument("--kv-heads", type=whole_number, metavar="N", help="key/value heads of a layer")
    model.add_argument("--head-dim", type=whole_number, metavar="N", help="values per head")
    model.add_argument("--safetensors", metavar="PATH", help="weights: a file or folder; only headers are read")
    model.add_argument("--weights-bytes", type=byte_count, metavar="N", help="weights: bytes in memory")
    model.add_argument(
        "--not-read-bytes", type=byte_count, metavar="N", help="of those, bytes that a step does not read"
    )
    load = parser.add_argument_group("which service")
    load.add_argument(
        "--slots", type=whole_number, metavar="N", help=f"sequences served together (default {LAB_SLOTS})"
    )
    load.add_argument(
        "--ctx", type=whole_number, metavar="N", help=f"context of one sequence in tokens (default {LAB_CONTEXT})"
    )
    load.add_argument(
        "--kv-type",
        type=kv_type_list,
        metavar="TYPE",
        help=f"cache type: {', '.join(KV_TYPES)}, auto (the model's own 16 bits)",
    )
    load.add_argument(
        "--bandwidth", type=bandwidth_list, metavar="GB/S", help="memory bandwidth (default: the lab's four machines)"
    )
    load.add_argument("--memory", type=positive, metavar="GIB", help="does it fit this much memory?")
    load.add_argument("--available-kv", type=positive, metavar="GIB", help="vLLM's cache: blocks, tokens, concurrency")
    load.add_argument(
        "--block-size",
        type=whole_number,
        metavar="N",
        help=f"tokens per block of vLLM's cache (default {BLOCK_SIZE}; larger on a CPU)",
    )
    against = parser.add_argument_group("against what happened")
    against.add_argument(
        "--check-log", metavar="FILE", help="compare with the cache lines of a llama-server or vLLM log"
    )
    against.add_argument("--measured", metavar="LABBOOK", help="compare with the levels of a notebook")
    against.add_argument("--label", metavar="L", help="which label of the notebook")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of text")
    parser.add_argument("--version", action="store_true", help="print the version and leave")
    parser.add_argument("-h", "--help", action="store_true", help="print this and leave")
    return parser


def refuse_contradictions(args: argparse.Namespace) -> None:
    """Options that say the same thing twice, or nothing in the mode that was asked for."""
    given = {name for name, value in vars(args).items() if value not in (None, False)}

    def flags(names: Iterable[str]) -> str:
        return " and ".join("--" + name.replace("_", "-") for name in names)

    shape = [name for name in ("layers", "kv_heads", "head_dim") if name in given]
    sources = [name for name in ("config", "gguf") if name in given] + shape[:1]
    if len(sources) > 1:
        raise UsageError(f"{flags(sources)} contradict each other: each says which model; keep one")
    if 0 < len(shape) < 3:
        missing = [name for name in ("layers", "kv_heads", "head_dim") if name not in given]
        raise UsageError(f"{flags(shape)} needs {flags(missing)} too")
    weights = [name for name in ("gguf", "safetensors", "weights_bytes") if name in given]
    if len(weights) > 1:
        raise UsageError(f"{flags(weights)} contradict each other: each says which weights; keep one")
    if "not_read_bytes" in given and "weights_bytes" not in given:
        raise UsageError("--not-read-bytes needs --weights-bytes")
    if args.weights_bytes is not None and (args.weights_bytes == 0 or (args.not_read_bytes or 0) >= args.weights_bytes):
        raise UsageError(
            f"--weights-bytes {args.weights_bytes} must be above --not-read-bytes {args.not_read_bytes or 0}"
        )
    if "check_log" in given and "measured" in given:
        raise UsageError("--check-log and --measured are two questions; ask one at a time")
    if "label" in given and "measured" not in given:
        raise UsageError("--label names a label of a notebook; it needs --measured LABBOOK")
    for mode, others in (("check_log", ("bandwidth", "memory")), ("measured", ("memory", "ctx"))):
        unused = [name for name in others if name in given]
        if mode in given and unused:
            raise UsageError(f"{flags([mode])} has no use for {flags(unused)}; leave it out")
    if "block_size" in given and not given & {"available_kv", "check_log"}:
        raise UsageError("--block-size needs --available-kv or --check-log")


def stated_model(args: argparse.Namespace) -> Model:
    """The model and weights that the options name."""
    weights: tuple[Weights, ...] = ()
    if args.weights_bytes is not None:
        skipped = (("stated", args.not_read_bytes),) if args.not_read_bytes else ()
        weights = (Weights("stated weights", "--weights-bytes", args.weights_bytes, skipped),)
    elif args.safetensors is not None:
        weights = (safetensors_weights(args.safetensors, *sibling_config(args)),)
    if args.gguf is not None:
        return gguf_model(args.gguf)
    if args.layers is not None:
        return uniform_model("stated model", "the options", args.layers, args.kv_heads, args.head_dim, weights=weights)
    config = args.config
    if (
        config is None
        and args.safetensors is not None
        and os.path.exists(os.path.join(args.safetensors, "config.json"))
    ):
        config = args.safetensors
    model = config_model(config, read_weights=not weights) if config is not None else lab_model()
    if config is None and args.safetensors is not None:
        raise UsageError(
            f"no config.json in {args.safetensors}: say the shape with --config, or --layers, --kv-heads and --head-dim"
        )
    if not weights:
        return model
    return replace(model, weights=weights)


def sibling_config(args: argparse.Namespace) -> tuple[Config | None, int | None]:
    """The config that tells which of the tensors are experts or draft layers, and the layer count."""
    path = args.config if args.config is not None else args.safetensors
    file = os.path.join(path, "config.json") if os.path.isdir(path) else path
    if not file.endswith(".json") or not os.path.exists(file):
        return None, args.layers
    config = Config(file, read_json_object(file))
    return config, layer_count(config)


def parse_options(args: argparse.Namespace) -> Options:
    """Checked options. Raises UsageError."""
    refuse_contradictions(args)
    given = any(value not in (None, False) for name, value in vars(args).items() if name != "json")
    model = stated_model(args)
    return Options(
        model, args.slots, args.ctx, args.kv_type or (), args.bandwidth or (),
        round(args.memory * GIB) if args.memory is not None else None,
        round(args.available_kv * GIB) if args.available_kv is not None else None,
        args.block_size, args.json, args.check_log, args.measured, args.label, not given,
    )  # fmt: skip


def run(options: Options) -> tuple[str, int]:
    """(what to print, exit code)."""
    if options.check_log is not None:
        return run_check(options, options.check_log)
    if options.measured is not None:
        meeting = meet(options)
        return as_text(options, lambda: render_meeting(options, meeting), lambda: meeting_json(options, meeting)), 0
    if options.lab_table and not options.as_json:
        return render_lab_table(), 0
    report = build_report(options)
    return as_text(options, lambda: render_report(options, report), lambda: report), 0


def run_check(options: Options, path: str) -> tuple[str, int]:
    """Hold a log against the prediction."""
    llama, vllm = read_logs(path)
    checks = []
    if llama is not None:
        checks.append(check_llama(options.model, llama, options.slots, options.ctx, options.kv_type))
    if vllm is not None:
        kv_type = options.kv_type or "f16"
        checks.append(
            check_vllm(options.model, vllm, options.ctx, kv_type, options.block_size, options.available_kv_bytes)
        )
    if not checks:
        raise UsageError(
            f"no cache line of llama-server or vLLM in {path}; llama-server prints its sizes with --verbosity 4"
        )
    text = as_text(options, lambda: render_check(options, checks), lambda: check_json(options, checks))
    return text, 0 if all(check.agrees for check in checks) else 1


def as_text(options: Options, text: Callable[[], str], data: Callable[[], Mapping[str, Any]]) -> str:
    return json.dumps(finite(data()), allow_nan=False) + "\n" if options.as_json else text()


def finite(value: Any) -> Any:
    """A value for strict JSON: a quotient that ran out of a float's range is null.

    >>> finite({"a": [1.5, float("inf")]})
    {'a': [1.5, None]}
    """
    if isinstance(value, Mapping):
        return {key: finite(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def silence(stream: IO[str]) -> None:
    """Give a stream that cannot be written another place to write to, or the interpreter complains when it leaves."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def complain(message: str) -> None:
    """One line on standard error. Where that is closed or full, the exit code alone has to say it."""
    if sys.stderr is None:
        return
    try:
        sys.stderr.write(f"{PROGRAM}: {message}\n")
        sys.stderr.flush()
    except (OSError, ValueError):
        silence(sys.stderr)


def emit(text: str) -> int:
    """Write to standard output and return the exit code; a reader that has gone away (head) is no error."""
    if sys.stdout is None:
        complain("cannot write the output: standard output is closed")
        return 1
    reconfigure = getattr(sys.stdout, "reconfigure", None)
    if reconfigure is not None:
        reconfigure(errors="backslashreplace")
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except BrokenPipeError:
        silence(sys.stdout)
    except OSError as error:
        silence(sys.stdout)
        complain(f"cannot write the output: {error.strerror or error}")
        return 1
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program and return its exit code."""
    try:
        parser = build_parser()
        args = parser.parse_args(argv)
        if args.help:
            return emit(parser.format_help())
        if args.version:
            return emit(f"{PROGRAM} {TOOL_VERSION}\n")
        text, code = run(parse_options(args))
        return emit(text) or code
    except UsageError as error:
        complain(plain(error))
        return 2
    except OverflowError:
        complain("a number in the model's files is beyond anything that can be counted: is one of them damaged?")
        return 2
    except ResultError as error:
        complain(plain(error))
        return 1
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
