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
  Options are the prediction; slots, context and llama.cpp's cache type that you leave out are taken from the log, and
  it says so. Fewer layers on the GPU than the model has differ too, unless --cpu-expected says that they may.
  Two logs of vLLM, started with two memory fractions, also show how far the fraction should have moved the cache.
Against a notebook:  python3 serving_arithmetic.py --measured labbook.md --label llama-baseline --bandwidth 273
  summarise_load.py, in the same folder, reads the notebook. The weights are those of the record's quant.

Units: GiB and MiB are 2^30 and 2^20 bytes; bandwidth in GB/s is 10^9 bytes per second. --kv-type, --bandwidth: one
value or several with commas. Each figure stands beside its formula and inputs, so that it can be worked out again.

Output: text, or with --json one JSON object. Exit codes: 0; 1 when a log or a result does not agree with the
prediction, or the notebook has no such label, or the output cannot be written; 2 for a wrong or contradictory option
or a file that cannot be read; 130 after Ctrl-C.
"""

from __future__ import annotations

import signal

if __name__ == "__main__" and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # no traceback on Ctrl-C, not even during the imports below

import argparse
import contextlib
import json
import math
import os
import re
import stat
import struct
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import IO, TYPE_CHECKING, Any, BinaryIO, NamedTuple, NoReturn

if TYPE_CHECKING:
    from types import ModuleType

    from typing_extensions import TypeGuard

PROGRAM = "serving_arithmetic.py"
TOOL_VERSION = "2.0.0"  # the same in all three programs


class UsageError(Exception):
    """A wrong option, or a file that cannot be used: exit code 2."""


class ResultError(Exception):
    """What was measured does not answer the question: exit code 1."""


# ----------------------------------------------------------------------------------------------------------- units

MIB = 2**20
GIB = 2**30
GB = 10**9  # memory bandwidth is quoted in decimal gigabytes per second

MAX_COUNT = 10**15  # no count, size or context that makes sense is larger
MAX_HEADER_BYTES = 100 * MIB  # of a safetensors file: the format's own limit
MAX_LINE_BYTES = 16 * MIB  # of a log; a longer line is cut into pieces of this size


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


def padded(tokens: int, step: int) -> int:
    """`tokens` rounded up to a multiple of `step`.

    >>> padded(4096, 256), padded(1000, 256)
    (4096, 1024)
    """
    return -(-tokens // step) * step


@contextlib.contextmanager
def open_file(path: str) -> Iterator[BinaryIO]:
    """A file, open for reading. Raises UsageError where it cannot be read, or is a folder, a pipe or a device: those
    may never end, and a pipe that nobody writes to cannot even be opened."""
    try:
        mode = os.stat(path).st_mode
        if not stat.S_ISREG(mode):
            kind = "a folder" if stat.S_ISDIR(mode) else "a pipe" if stat.S_ISFIFO(mode) else "a device or a socket"
            raise UsageError(f"cannot read {path}: it is {kind}, not a file; name another file")
        with open(path, "rb") as file:
            yield file
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror or error}") from None


def names_in(folder: str, ending: str) -> list[str]:
    """The sorted names in a folder with that ending. Raises UsageError where the folder cannot be listed."""
    try:
        return sorted(name for name in os.listdir(folder) if name.endswith(ending))
    except OSError as error:
        raise UsageError(f"cannot list the folder {folder}: {error.strerror or error}; name the file in it") from None


# ------------------------------------------------------------------------------------------------------ model facts


# How cached values are stored: (values, bytes) of one block. Plain types: IEEE and bfloat16 sizes. The others are
# llama.cpp's cache types (ggml's block_q8_0 and so on: 32 values with one scale, and one offset in the _1 types). fp8
# is vLLM's; llama.cpp has none.
KV_TYPES = {
    "f16": (1, 2), "q8_0": (32, 34), "fp8": (1, 1), "q4_0": (32, 18), "bf16": (1, 2), "f32": (1, 4), "q4_1": (32, 20),
    "q5_0": (32, 22), "q5_1": (32, 24), "iq4_nl": (32, 18),
}  # fmt: skip
# vLLM's names; `auto` is the model's own 16 bits.
KV_ALIASES = {"auto": "f16", "fp8_e4m3": "fp8", "fp8_e5m2": "fp8", "float16": "f16", "bfloat16": "bf16"}
VLLM_TYPES = ("f16", "bf16", "fp8", "f32")

BLOCK_SIZE = 16  # tokens per block of vLLM's paged cache on a GPU; on a CPU it is larger (the log's engine line says)
LLAMA_PAD = 256  # llama.cpp rounds a sequence's context, and a sliding-window cache, up to a multiple of this
LLAMA_UBATCH = 512  # llama.cpp's default --ubatch-size: a sliding-window cache keeps that many tokens more

LAB_SOURCE = "the lab's constants"
LAB_SLOTS, LAB_CONTEXT = 20, 4096
LAB_CONTEXTS = (100, 1500)
LAB_BATCHES = (1, 5, 10, 20)
SHORT_CONTEXT = LAB_CONTEXTS[0]  # the lab's sweeps: a short question and half of 128 tokens


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


@dataclass(frozen=True)
class Layer:
    """What one layer keeps of a sequence: `k_values` and `v_values` per token, of all tokens or of the last `window`
    ones, and `state_bytes` once per sequence (the recurrent state of a linear-attention or state-space layer)."""

    k_values: int
    v_values: int
    window: int | None = None
    state_bytes: int = 0

    @property
    def cached(self) -> bool:
        return self.k_values + self.v_values > 0


@dataclass(frozen=True)
class Weights:
    """Bytes of the weights in memory, and what a decoding step leaves out of them."""

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
    def blocks_exact(self) -> bool:
        """Whether vLLM's blocks hold every layer alike, so that their number can be predicted."""
        return not (self.windowed or self.state_bytes or self.upper_bound)

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


# Qwen3-8B has 8,190,735,360 parameters, 622,329,856 of them (151,936 x 4,096) in the token embedding. The GGUF's bytes
# are its tensor table's, the AWQ checkpoint's its headers'; AWQ keeps the embedding in 16 bits. MLX stores everything
# but the 308,224 norm parameters in groups of 64: 4 bits each, a 16-bit scale and a 16-bit offset, so 4.5 bits each.
LAB_FILE, TENSOR_TABLE, STATED_BYTES = "the lab's file", "tensor table", "--weights-bytes"  # where weights come from
LAB_WEIGHTS = {
    quant: Weights(name, LAB_FILE, total, (("token embedding", embedding),))
    for quant, name, total, embedding in (
        ("q4_k_m", "Q4_K_M GGUF", 5_021_827_072, 350_060_544),
        ("awq", "AWQ safetensors", 6_098_581_864, 1_244_659_712),
        ("bf16", "bf16 safetensors", 2 * 8_190_735_360, 1_244_659_712),
        ("mlx 4-bit", "MLX 4-bit safetensors", 8_190_427_136 * 9 // 16 + 2 * 308_224, 350_060_544),
    )
}


def lab_model() -> Model:
    """Qwen3-8B and the two files of the lab's table: llama-server's and vLLM's."""
    weights = (LAB_WEIGHTS["q4_k_m"], LAB_WEIGHTS["awq"])
    return uniform_model("Qwen3-8B", LAB_SOURCE, 36, 8, 128, weights=weights)


def served_weights(model: Model, kv_type: str) -> Weights | None:
    """The file that goes with a cache type: of the lab's two, llama.cpp's GGUF or vLLM's AWQ."""
    if not model.weights:
        return None
    return model.weights[-1 if kv_type == "fp8" else 0]


def layers_alike(layers: Sequence[Layer]) -> bool:
    """Whether all layers cache as many keys as values, of the whole context, and nothing else."""
    first = layers[0]
    return len(set(layers)) == 1 and first == Layer(first.k_values, first.k_values) and first.cached


def layer_groups(layers: Iterable[Layer]) -> list[tuple[Layer, int]]:
    """Equal layers counted together, in the order of their first one.

    >>> [(layer.window, count) for layer, count in layer_groups([Layer(4, 4), Layer(4, 4, 8), Layer(4, 4)])]
    [(None, 2), (8, 1)]
    """
    groups: dict[Layer, int] = {}
    for layer in layers:
        groups[layer] = groups.get(layer, 0) + 1
    return list(groups.items())


# ---------------------------------------------------------------------------------------------- one function a formula


def kv_row_bytes(values: int, kv_type: str) -> int:
    """Bytes that `values` cached values of one token take in one layer; quantised types store whole blocks.

    >>> kv_row_bytes(1024, "f16"), kv_row_bytes(1024, "q8_0"), kv_row_bytes(1024, "q4_0"), kv_row_bytes(1024, "fp8")
    (2048, 1088, 576, 1024)
    """
    block_values, block_bytes = KV_TYPES[kv_type]
    return -(-values // block_values) * block_bytes


def cache_bytes(model: Model, context: float, kv_type: str) -> float:
    """Bytes of keys and values that one sequence of `context` tokens keeps: per layer min(context, window) tokens.

    >>> two = Model("toy", "here", (Layer(8, 8), Layer(8, 8, window=10), Layer(0, 0, state_bytes=7)))
    >>> cache_bytes(two, 5, "f16"), cache_bytes(two, 100, "f16")
    (320, 3520)
    """
    kept: float = 0
    for layer in model.layers:
        tokens = context if layer.window is None else min(context, layer.window)
        kept += tokens * (kv_row_bytes(layer.k_values, kv_type) + kv_row_bytes(layer.v_values, kv_type))
    return kept


def bytes_per_token(model: Model, kv_type: str) -> int:
    """Bytes that one token takes while every layer keeps it (inside every window). Where all layers are alike, 2 x
    layers x KV heads x head dim x bytes per value.

    Qwen3-8B, then Qwen2.5-0.5B, Llama-3.2-3B and Llama-2-7B:

    >>> [bytes_per_token(lab_model(), kv_type) for kv_type in ("f16", "q8_0", "fp8", "q4_0")]
    [147456, 78336, 73728, 41472]
    >>> shapes = ((24, 2, 64), (28, 8, 128), (32, 32, 128))
    >>> [bytes_per_token(uniform_model("toy", "here", *shape), "f16") // 1024 for shape in shapes]
    [12, 112, 512]
    """
    return int(cache_bytes(model, 1, kv_type))


def pool_bytes(model: Model, slots: int, context: int, kv_type: str) -> int:
    """Bytes that `slots` full sequences keep, recurrent state included. Without windows and state: bytes per token x
    slots x context.

    >>> pool_bytes(lab_model(), 20, 4096, "f16"), pool_bytes(lab_model(), 20, 4096, "f16") / GIB
    (12079595520, 11.25)
    """
    return slots * (int(cache_bytes(model, context, kv_type)) + model.state_bytes)


def window_cells(context: int, window: int, sequences: int = 1, ubatch: int = LLAMA_UBATCH) -> int:
    """Cells that llama.cpp gives a sliding-window layer in one stream: min(context, window x sequences + ubatch), in
    whole 256s (llama_kv_cache_iswa). A stream holds one sequence, or all of them with --kv-unified.

    >>> window_cells(131072, 128), window_cells(8192, 1024, sequences=4), window_cells(512, 1024)
    (768, 4608, 512)
    """
    return padded(min(context, window * sequences + ubatch), LLAMA_PAD)


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
    def stream_context(self) -> int:
        """Cells of one stream: the context rounded up to a multiple of 256."""
        return padded(self.slots * self.context if self.unified else self.context, LLAMA_PAD)


def llama_cache_bytes(model: Model, cache: LlamaCache) -> tuple[int, int, int]:
    """(keys, values, recurrent state) in bytes as llama-server allocates them: layers x row x cells x streams.

    >>> keys, values, states = llama_cache_bytes(lab_model(), LlamaCache(20, 4096, "f16", "f16"))
    >>> keys / MIB, values / MIB, states
    (5760.0, 5760.0, 0)
    """
    keys = values = 0
    streams = 1 if cache.unified else cache.slots
    for layer in model.layers:
        cells = cache.stream_context
        if layer.window is not None and not cache.full_window:
            cells = window_cells(cells, layer.window, cache.slots if cache.unified else 1, cache.ubatch)
        keys += kv_row_bytes(layer.k_values, cache.k_type) * cells * streams
        values += kv_row_bytes(layer.v_values, cache.v_type) * cells * streams
    return keys, values, model.state_bytes * cache.slots


def allocated_bytes(model: Model, slots: int, context: int, kv_type: str) -> int:
    """What a server sets aside for `slots` sequences: vLLM's fp8 what they keep, llama.cpp's types what it allocates.

    >>> allocated_bytes(lab_model(), 20, 4096, "q8_0")
    6417285120
    """
    if kv_type == "fp8":
        return pool_bytes(model, slots, context, kv_type)
    return sum(llama_cache_bytes(model, LlamaCache(slots, context, kv_type, kv_type)))


def experts_touched_share(experts: int, used: float, tokens: int) -> float:
    """Share of a layer's routed experts that a step of `tokens` sequences reads, 1 - (1 - used/experts)^tokens: each
    sequence picks `used` of them, taken as independent and even. For one sequence that is the active share.

    >>> experts_touched_share(128, 8, 1), round(experts_touched_share(128, 8, 20), 3)
    (0.0625, 0.725)
    """
    return 1.0 - (1.0 - used / experts) ** tokens


class StepBytes(NamedTuple):
    """Bytes that one decoding step moves, by what they are."""

    weights: float
    cache: float
    state: float

    @property
    def total(self) -> float:
        return self.weights + self.cache + self.state


def step_bytes(model: Model, weights: Weights, sequences: int, context: float, kv_type: str) -> StepBytes:
    """Bytes that a decoding step of `sequences` sequences of `context` tokens moves: once the weights that so many
    tokens touch (all but those not read; of routed experts the share that is picked), every sequence's keys and
    values, and every sequence's recurrent state, read and written.

    >>> step_bytes(lab_model(), lab_model().weights[0], 20, 1500, "f16").total
    9095446528
    >>> moe = Weights("toy", "here", 1000, (("token embedding", 100),), 800, 8, 2)
    >>> [step_bytes(lab_model(), moe, n, 0, "f16").weights for n in (1, 2)]
    [300.0, 450.0]
    """
    read: float = weights.total_bytes - weights.not_read_bytes - weights.expert_bytes
    if weights.expert_bytes:
        read += weights.expert_bytes * experts_touched_share(weights.experts, weights.experts_used, sequences)
    cache = sequences * cache_bytes(model, context, kv_type)
    return StepBytes(read, cache, sequences * 2 * model.state_bytes)


def per_user_ceiling_tokens_per_s(bandwidth_gb_per_s: float, read_bytes: float) -> float:
    """Steps per second, and so tokens per second of one sequence: bandwidth / bytes moved per step. All sequences
    of the step together make as many times that.

    >>> round(per_user_ceiling_tokens_per_s(273, 9_095_446_528), 1)
    30.0
    """
    return bandwidth_gb_per_s * GB / read_bytes


def step_ms(bandwidth_gb_per_s: float, read_bytes: float) -> float:
    """Milliseconds that moving so many bytes takes.

    >>> round(step_ms(273, 9_095_446_528), 3)
    33.317
    """
    return 1000.0 * read_bytes / (bandwidth_gb_per_s * GB)


def token_bytes_of_blocks(model: Model, kv_type: str) -> int:
    """Bytes per token, to divide by. Raises UsageError for a model that caches nothing."""
    size = bytes_per_token(model, kv_type)
    if not size:
        raise UsageError(f"{model.name} has no KV cache, so no blocks either")
    return size


def vllm_blocks(pool: int, block_size: int, token_bytes: int) -> int:
    """Whole blocks in a pool: floor(pool bytes / (block size x bytes per token)). Each holds `block_size` tokens.

    >>> vllm_blocks(7 * GIB, 16, 147_456), 3185 * 16
    (3185, 50960)
    """
    return pool // (block_size * token_bytes)


def vllm_max_concurrency(blocks: int, context: int, block_size: int) -> float:
    """Sequences of `context` tokens that the blocks hold: blocks / ceil(context / block size).

    >>> round(vllm_max_concurrency(3185, 4096, 16), 2), vllm_max_concurrency(5120, 4096, 16)
    (12.44, 20.0)
    """
    return blocks / -(-context // block_size)


def fraction_shift_bytes(first: float, second: float, memory_bytes: float) -> float:
    """How much more vLLM's cache gets with the second memory fraction than with the first: weights and buffers stay,
    so it is the difference of the fractions x the device's memory.

    >>> round(fraction_shift_bytes(0.30, 0.40, 119.7 * GIB) / GIB, 2)
    11.97
    """
    return (second - first) * memory_bytes


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
    "experts": ("num_experts", "num_local_experts", "n_routed_experts"),
    "experts_used": ("num_experts_per_tok", "num_experts_per_token", "moe_topk"),
}
FULL, SLIDING, STATE, NOTHING = "full", "sliding", "state", "nothing"
LAYER_WORDS = {
    "full_attention": FULL, "attention": FULL, "global_attention": FULL, "global": FULL, "*": FULL,
    "sliding_attention": SLIDING, "chunked_attention": SLIDING, "local_attention": SLIDING, "local": SLIDING,
    "linear_attention": STATE, "mamba": STATE, "mamba2": STATE, "recurrent": STATE, "m": STATE,
    "mlp": NOTHING, "moe": NOTHING, "-": NOTHING, "e": NOTHING,
}  # fmt: skip
# Signs of layers without a KV cache; where the file does not say which they are, every layer is counted in full.
HYBRID_SIGNS = ("mamba_d_state", "ssm_state_size", "linear_attn_config", "attn_type_list", "block_types", "lru_width",
                "conv_L_cache")  # fmt: skip


EXPERTS_UNKNOWN = "the experts' bytes are not known: weights count as read whole in every step, an upper bound"


class Config:
    """A config.json: the language model's part first (`text_config` and its like), then the whole file."""

    def __init__(self, path: str) -> None:
        """`path`: the file, or the folder that holds it."""
        self.path = os.path.join(path, "config.json") if os.path.isdir(path) else path
        if self.path.lower().endswith((".gguf", ".safetensors")):
            raise UsageError(f"--config wants a config.json; for {path} use --{path.rpartition('.')[2].lower()}")
        if os.path.isdir(path) and not os.path.exists(self.path):
            raise UsageError(f"no config.json in {path}")
        data = read_json_object(self.path)
        text: Mapping[str, Any] = data
        for name in ("thinker_config", "text_config", "llm_config", "language_config"):
            inner = text.get(name)
            text = inner if isinstance(inner, Mapping) else text
        self.parts = (text, data)
        self.model_type = str(text.get("model_type") or data.get("model_type") or "")
        self.notes: list[str] = []
        self.upper_bound = False

    def get(self, *names: str) -> Any:
        """The first value that is there and not null."""
        return next((part[name] for part in self.parts for name in names if part.get(name) is not None), None)

    def count(self, *names: str) -> int | None:
        """The first whole number above 0 among these names; refuses anything else that is not null."""
        value = self.get(*names)
        if value is not None and (not is_whole(value) or not 0 < value <= MAX_COUNT):
            raise UsageError(f"{self.path}: {names[0]} is {plain(repr(value)[:40])}; expected a whole number above 0")
        number: int | None = value
        return number

    def known(self, what: str) -> int | None:
        """A field of the shape, or the class's default where the file leaves it out; None where neither tells."""
        value = self.count(*CONFIG_NAMES[what])
        return CLASS_DEFAULTS.get(self.model_type, {}).get(what) if value is None else value

    def needed(self, what: str) -> int:
        """The same; raises UsageError where neither tells."""
        value = self.known(what)
        if value is None:
            raise UsageError(f"{self.path}: no {' or '.join(CONFIG_NAMES[what][:2])} in it; is this the model's "
                             "config.json? --layers, --kv-heads and --head-dim say it by hand")  # fmt: skip
        if self.count(*CONFIG_NAMES[what]) is None:
            self.note(f"{CONFIG_NAMES[what][0]} is not in the file: {value}, the default of {self.model_type}")
        return value

    def note(self, text: str, upper_bound: bool = False) -> None:
        """Say once what was assumed; `upper_bound`: it makes the figures one."""
        self.upper_bound |= upper_bound
        if text not in self.notes:
            self.notes.append(text)


def is_whole(value: object) -> TypeGuard[int]:
    """Whether a value from a file is a whole number (true is none)."""
    return isinstance(value, int) and not isinstance(value, bool)


def read_json_object(path: str) -> Mapping[str, Any]:
    """The JSON object in a file. Raises UsageError with the reason."""
    with open_file(path) as file:
        raw = file.read(MAX_HEADER_BYTES + 1)
    if len(raw) > MAX_HEADER_BYTES:
        raise UsageError(f"{path} is larger than {MAX_HEADER_BYTES // MIB} MiB: not a config.json")
    try:
        data = json.loads(raw.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{path} is not JSON: {plain(error)}") from None
    if not isinstance(data, Mapping):
        raise UsageError(f"{path} holds {type(data).__name__}, not a JSON object")
    return data


def config_model(path: str, weights: tuple[Weights, ...] = ()) -> Model:
    """The model that a config.json describes (the file, or the folder that holds it), with these weights or those
    beside it."""
    config = Config(path)
    if config.get("is_encoder_decoder") is True:
        raise UsageError(f"{config.path}: an encoder-decoder model; this arithmetic is for decoders")
    count = layer_count(config)
    layers = tuple(config_layer(config, index, kind) for index, kind in enumerate(layer_kinds(config, count)))
    shared = config.get("num_kv_shared_layers")  # Gemma 3n and 4: the last ones reuse an earlier layer's cache
    if is_whole(shared) and 0 < shared < count:
        config.note(f"the last {shared} layers share an earlier layer's cache")
        layers = layers[:-shared] + (Layer(0, 0),) * shared
    folder = os.path.dirname(config.path) or "."
    if not weights and names_in(folder, ".safetensors"):
        weights = (safetensors_weights(folder, config),)
    elif weights and expert_counts(config)[0] and not weights[0].expert_bytes:
        config.note(EXPERTS_UNKNOWN)
    heads = (kv_heads(config, 0), head_dim(config)) if layers_alike(layers) else None
    name = str(config.get("_name_or_path") or os.path.basename(os.path.abspath(folder)) or "model")
    return Model(plain(name), config.path, layers, weights, heads, tuple(config.notes), config.upper_bound)


def expert_counts(config: Config) -> tuple[int, int]:
    """(routed experts of a layer, those that a token uses); (0, 0) of a dense model."""
    count, used = config.get(*CONFIG_NAMES["experts"]), config.get(*CONFIG_NAMES["experts_used"])
    return (count, used) if is_whole(count) and is_whole(used) and 0 < used <= count else (0, 0)


def layer_count(config: Config) -> int:
    """Number of layers; a hybrid pattern's own length where it counts MLP blocks too."""
    pattern = config.get("hybrid_override_pattern")
    types = config.get("layer_types", "layers_block_type")
    if isinstance(pattern, str) and pattern:
        return len(pattern)
    if isinstance(types, list) and types and config.count(*CONFIG_NAMES["layers"]) is None:
        return len(types)
    return config.needed("layers")


def window_of(config: Config) -> int | None:
    """The sliding window in tokens, or None where the model uses none (`use_sliding_window` false, null, 0)."""
    if config.get("use_sliding_window") is False:
        return None
    names = ("sliding_window", "attention_window_size", "attention_chunk_size", "sliding_window_size")
    return next((value for name in names if is_whole(value := config.get(name)) and value > 0), None)


def layer_kinds(config: Config, count: int) -> list[str]:
    """What each layer keeps. The file says it in one of several ways; the first that it uses counts."""
    for way in (kinds_by_list, kinds_by_rule, kinds_by_window):
        kinds = way(config, count)
        if kinds is not None:
            return kinds
    if config.get(*HYBRID_SIGNS) is not None:
        config.note("which layers keep a KV cache is not known here: every layer counted, an upper bound", True)
    return [FULL] * count


def kinds_by_list(config: Config, count: int) -> list[str] | None:
    """Kinds from a field with one entry per layer, or a cycle of letters."""
    words = config.get("layer_types", "layers_block_type", "hybrid_override_pattern")
    pattern = config.get("sliding_window_pattern")
    if not words and isinstance(pattern, str) and pattern and window_of(config):  # such as LLLG, a cycle
        words = ["local" if pattern[index % len(pattern)].upper() == "L" else "global" for index in range(count)]
    if not words or not isinstance(words, (list, str)):
        return None
    if len(words) != count:
        raise UsageError(f"{config.path}: {count} layers, but the list of their types has {len(words)} entries")
    kinds = []
    for word in words:
        kind = LAYER_WORDS.get(str(word).lower())
        if kind is None:
            config.note(f"layer type {plain(repr(word))} is not known here: counted as full attention, an upper bound",
                        True)  # fmt: skip
        kinds.append(kind or FULL)
    if SLIDING in kinds and window_of(config) is None:
        config.note("sliding layers without a window in the file: counted in full, an upper bound", True)
    return kinds


def kinds_by_rule(config: Config, count: int) -> list[str] | None:
    """Kinds from the model type, or from an interval."""
    if config.model_type in ("mamba", "mamba2"):
        return [STATE] * count
    period, offset = config.count("attn_layer_period"), config.get("attn_layer_offset")
    if period is not None and is_whole(offset):  # Jamba
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
    if is_whole(first) and config.get("use_sliding_window") is True:  # Qwen2, Qwen3
        return [SLIDING if index >= first else FULL for index in range(count)]
    period = config.get("sliding_window_pattern", "_sliding_window_pattern")
    if not is_whole(period):
        period = CONFIG_SWA_PERIODS.get(config.model_type)
        if period:
            config.note(f"no layer pattern in the file: every {period}th layer full, as {config.model_type} has it")
    return [SLIDING if not period or (index + 1) % period else FULL for index in range(count)]


def kv_heads(config: Config, index: int) -> int:
    """KV heads of one layer."""
    value = config.get(*CONFIG_NAMES["kv_heads"])
    if isinstance(value, list):  # one entry per layer
        if index >= len(value) or not is_whole(value[index]):
            raise UsageError(f"{config.path}: the KV heads have no whole number for layer {index}")
        return int(value[index])
    if config.get("multi_query") is True and not config.get("new_decoder_architecture"):  # Falcon
        return 1
    return config.known("kv_heads") or config.needed("heads")


def head_dim(config: Config) -> int:
    """Head dimension: the field, else hidden size / attention heads."""
    value = config.known("head_dim")
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
    if kind == STATE:
        return Layer(0, 0, None, state_size(config))
    window = window_of(config) if kind == SLIDING else None
    latent, rotary = config.count("kv_lora_rank"), config.count("qk_rope_head_dim")
    if latent is not None and rotary is not None:
        config.note(
            f"latent attention (MLA): {latent} + {rotary} key values per token and layer, no separate values; "
            "an engine that does not absorb it caches more"
        )
        return Layer(latent + rotary, 0, window)
    width = kv_heads(config, index) * head_dim(config)
    return Layer(width, width, window)


def state_size(config: Config) -> int:
    """Bytes that a linear-attention or state-space layer keeps per sequence, in 32-bit floats as llama.cpp keeps them:
    the convolution's last inputs and the state matrix. 0, and a note, where the fields are not known."""
    kernel = config.count("linear_conv_kernel_dim", "mamba_d_conv", "conv_kernel", "conv_kernel_size") or 4
    heads_v, heads_k = config.count("linear_num_value_heads"), config.count("linear_num_key_heads")
    dim_v, dim_k = config.count("linear_value_head_dim"), config.count("linear_key_head_dim")
    if heads_v and heads_k and dim_v and dim_k:  # gated delta net
        return 4 * ((kernel - 1) * (2 * heads_k * dim_k + heads_v * dim_v) + heads_v * dim_v * dim_k)
    heads, dim = config.count("mamba_n_heads", "mamba_num_heads"), config.count("mamba_d_head", "mamba_head_dim")
    state = config.count("mamba_d_state", "ssm_state_size", "state_size")
    if state is None:
        config.note("recurrent state: its fields are not known here, so it is not counted")
        return 0
    inner = heads * dim if heads and dim else (config.count("mamba_expand", "expand") or 2) * config.needed("hidden")
    groups = (config.count("mamba_n_groups", "n_groups") or 0) if heads else 0
    return 4 * ((kernel - 1) * (inner + 2 * groups * state) + inner * state)


# ------------------------------------------------------------------------------ weights from names and sizes of tensors

# What a decoding step does not read, by a tensor's name in a checkpoint or a GGUF; the first that matches counts.
NOT_READ = (
    ("other modalities", r"(?:^|\.)(?:vision|visual|audio|multi_modal_projector|mm_projector|image_|vit\.)"),
    ("draft layers", r"(?:^|\.)mtp\."),
    ("token embedding", r"(?:embed_tokens_per_layer|per_layer_token_embd|position_embd)\.weight$"),
    ("token embedding", r"(?:^|\.)(?:wpe|position_embeddings|embed_positions)\.weight$"),
)
EMBEDDINGS = r"(?:^|\.)(?:embed_tokens|token_embd|wte|word_embeddings|tok_embeddings|embed_in|embeddings)\.\w+$"
OUTPUT_HEADS = r"(?:^|\.)(?:lm_head|output|embed_out|output_layer)\.(?:weight|qweight|weight_packed)$"
EXPERTS = re.compile(r"\.(?:experts?|switch_mlp)\.|_exps\.|\.ffn_(?:gate|up|down)\.\d+\.")
LAYER_INDEX = re.compile(r"(?:^|\.)(?:layers|blk)\.(\d+)\.")


def tensor_weights(name: str, source: str, sizes: Mapping[str, int], layers: int | None, experts: tuple[int, float],
                   notes: list[str]) -> Weights:  # fmt: skip
    """Weights by what a decoding step reads: look-up tables by the row, layers from `layers` on (draft layers) not, of
    the routed experts (their number, those of a token) a part. What had to be assumed is added to `notes`."""
    embedded = any(re.search(EMBEDDINGS, tensor) for tensor in sizes)
    tied = embedded and not any(re.search(OUTPUT_HEADS, tensor) for tensor in sizes)
    if tied:
        notes.append("tied embedding: the output layer reads the same matrix whole, every step")
    reasons: dict[str, int] = {}
    expert_bytes = 0
    for tensor, size in sizes.items():
        index = LAYER_INDEX.search(tensor)
        why = next((why for why, pattern in NOT_READ if re.search(pattern, tensor)), None)
        if why is None and layers is not None and index is not None and int(index[1]) >= layers:
            why = "draft layers"
        if why is None and re.search(EMBEDDINGS, tensor) and not tied:
            why = "token embedding"
        if why is not None:
            reasons[why] = reasons.get(why, 0) + size
        elif EXPERTS.search(tensor):
            expert_bytes += size
    if bool(expert_bytes) != bool(experts[0]):
        notes.append(EXPERTS_UNKNOWN)
        expert_bytes, experts = 0, (0, 0)
    return Weights(name, source, sum(sizes.values()), tuple(reasons.items()), expert_bytes, *experts)


def safetensors_weights(path: str, config: Config | None = None) -> Weights:
    """Weights of a safetensors file or folder, from the headers alone. `config` tells the experts of a token, and from
    which layer on there are only draft layers; without one a mixture of experts is refused."""
    files = safetensors_files(path)
    sizes: dict[str, int] = {}
    for file in files:
        sizes.update(safetensors_sizes(file))
    source = f"{len(files)} safetensors header{'s' if len(files) > 1 else ''} in {path}"
    if config is not None:
        return tensor_weights("safetensors", source, sizes, layer_count(config), expert_counts(config), config.notes)
    if any(EXPERTS.search(name) for name in sizes):
        raise UsageError(f"{path} holds a mixture of experts: --config tells how many of them a token uses")
    return tensor_weights("safetensors", source, sizes, None, (0, 0), [])


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
    with open_file(path) as file:
        start = file.read(8)
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else MAX_HEADER_BYTES + 1
        raw = file.read(length) if length <= MAX_HEADER_BYTES else b""
        end = file.seek(0, os.SEEK_END)
    if length > MAX_HEADER_BYTES or len(raw) < length:
        hint = "; it is a Git LFS pointer, not the file" if start == b"version " else ""
        raise UsageError(f"{path} is not a safetensors file, or was cut short ({end:,} bytes){hint}")
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

# Architectures in which llama.cpp uses a sliding window: every n-th layer is full where the file has no pattern; 0:
# every layer slides.
GGUF_SWA_PERIODS = {"cohere2": 4, "exaone4": 4, "gemma2": 2, "gemma3": 6, "gemma3n": 5, "gemma4": 0, "gpt-oss": 2,
                    "llama4": 4, "olmo2": 4, "plamo3": 8}  # fmt: skip
GGUF_WINDOWS = {"gemma2": 4096, "llama4": 8192}  # where the file names none
GGUF_INTERVALS = {"qwen3next": 4, "qwen35": 4, "qwen35moe": 4}  # every n-th layer has attention, the others a state


class Gguf:
    """A GGUF file's header: metadata and tensor sizes. Reads no tensor data, and never more than the file holds."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.notes: list[str] = []
        self.upper_bound = False
        self.meta: dict[str, Any] = {}
        self.tensors: dict[str, int] = {}
        self.short = False  # the file ends before its last tensor does
        with open_file(path) as file:
            self.file = file
            self.size = os.fstat(file.fileno()).st_size
            self.read_header()
        self.arch = str(self.meta.get("general.architecture") or "")

    def within(self, count: int) -> int:
        """`count`, if so many bytes are left in the file."""
        if count > self.size - self.file.tell():
            raise UsageError(f"{self.path} ends inside its header ({self.size:,} bytes): cut short?")
        return count

    def number(self, code: str) -> Any:
        size = struct.calcsize("<" + code)
        return struct.unpack("<" + code, self.file.read(self.within(size)))[0]

    def string(self) -> str:
        return self.file.read(self.within(self.number("Q"))).decode("utf-8", "replace")

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
            self.file.seek(self.within(count * struct.calcsize("<" + GGUF_SCALARS[inner])), os.SEEK_CUR)
        elif inner == 8:
            for _ in range(count):
                self.file.seek(self.within(self.number("Q")), os.SEEK_CUR)
        else:
            raise UsageError(f"{self.path}: a long array of arrays in the metadata; a damaged file")
        return None

    def read_header(self) -> None:
        magic = self.file.read(4)
        if magic != b"GGUF":
            hint = "; it is a Git LFS pointer, not the file" if magic == b"vers" else ""
            raise UsageError(f"{self.path} is not a GGUF file: it starts with {magic!r}{hint}")
        version = self.number("I")
        if version not in (2, 3):
            raise UsageError(f"{self.path}: GGUF version {version}; versions 2 and 3 are read")
        tensor_count, pairs = self.number("Q"), self.number("Q")
        for _ in range(pairs):
            key = self.string()
            self.meta[key] = self.value(self.number("I"))
        self.read_tensors(tensor_count)

    def read_tensors(self, count: int) -> None:
        """Bytes of each tensor. A type newer than this program is measured by the distance to the next tensor."""
        places: list[tuple[int, str, int | None]] = []  # (offset, name, size where the type is known)
        for _ in range(count):
            name = self.string()
            rank = self.number("I")
            if rank > GGUF_MAX_DIMENSIONS:
                raise UsageError(f"{self.path}: a tensor of {rank} dimensions in its header: damaged")
            values = math.prod(self.number("Q") for _ in range(rank))
            block, size = GGML_TYPES.get(self.number("I"), (0, 0))
            places.append((self.number("Q"), name, -(-values // block) * size if block else None))
        step = self.meta.get("general.alignment")
        start = padded(self.file.tell(), step if is_whole(step) and 0 < step <= MIB else 32)
        places.sort(key=lambda place: place[0])
        ends = [offset for offset, _, _ in places[1:]] + [self.size - start]
        for (offset, name, known), end in zip(places, ends):
            self.tensors[name] = max(0, end - offset) if known is None else known
            self.short |= start + offset + self.tensors[name] > self.size

    def get(self, name: str) -> Any:
        return self.meta.get(f"{self.arch}.{name}")

    def count(self, name: str, default: int | None = None) -> int:
        value = self.get(name)
        if value is None and default is not None:
            return default
        if not is_whole(value) or not 0 <= value <= MAX_COUNT:
            raise UsageError(f"{self.path}: {self.arch}.{name} is {plain(repr(value)[:40])}; expected a whole number")
        number: int = value
        return number

    def per_layer(self, name: str, layers: int, default: Sequence[int]) -> list[int]:
        """A number for each layer: the file has one for all, or a list."""
        value = self.get(name)
        if value is None:
            return list(default)
        if isinstance(value, list):
            if len(value) < layers or not all(is_whole(item) and 0 <= item <= MAX_COUNT for item in value):
                raise UsageError(f"{self.path}: {self.arch}.{name} has {len(value)} entries for {layers} layers")
            return [int(item) for item in value[:layers]]
        return [self.count(name)] * layers


def gguf_model(path: str) -> Model:
    """Shape and weights of a GGUF file (all parts of a split one)."""
    if os.path.isdir(path):
        found = names_in(path, ".gguf")
        raise UsageError(f"--gguf wants a file; {path} is a folder" + (f" that holds {found[0]}" if found else ""))
    gguf = Gguf(path)
    if not gguf.arch or gguf.get("block_count") is None:
        what = f"no {gguf.arch or 'architecture'}.block_count in it"
        raise UsageError(f"{path}: {what}: not a language model's first part?")
    for other in split_parts(path, gguf):
        gguf.tensors.update(other.tensors)
        gguf.short |= other.short
    if gguf.short:
        gguf.notes.append("the file is shorter than its tensor table says: cut short, or a header alone")
    all_blocks = gguf.count("block_count")
    blocks = all_blocks - min(gguf.count("nextn_predict_layers", 0), max(all_blocks - 1, 0))
    if not 0 < blocks <= 100_000:
        raise UsageError(f"{path}: {gguf.arch}.block_count is {all_blocks}")
    layers = gguf_layers(gguf, blocks)
    used = gguf.per_layer("expert_used_count", blocks, [0] * blocks)
    mean_used = sum(used) / max(1, sum(1 for many in used if many))
    count = gguf.count("expert_count", 0)
    experts = (count, mean_used) if 0 < mean_used <= count else (0, 0)
    weights = tensor_weights(os.path.basename(path), TENSOR_TABLE, gguf.tensors, blocks, experts, gguf.notes)
    uniform = None
    if layers_alike(layers):
        heads = gguf.per_layer("attention.head_count_kv", blocks, [gguf.count("attention.head_count", 1)] * blocks)[0]
        uniform = (heads, layers[0].k_values // heads)
    name = plain(gguf.meta.get("general.name") or os.path.basename(path))
    stored = gguf.meta.get("general.file_type")
    quant = GGUF_FILE_TYPES.get(stored) if is_whole(stored) else None
    known = (weights,) if weights.total_bytes else ()
    return Model(name, path, tuple(layers), known, uniform, tuple(gguf.notes), gguf.upper_bound, quant)


def split_parts(path: str, first: Gguf) -> list[Gguf]:
    """The other files of a split GGUF (name-00001-of-00003.gguf)."""
    count = first.meta.get("split.count")
    if not is_whole(count) or count < 2:
        return []
    match = re.match(r"(.*)-(\d{5})-of-(\d{5})\.gguf$", path)
    if match is None or int(match[3]) != count:
        raise UsageError(f"{path} says it is one of {count} parts, but is not named NAME-00001-of-{count:05d}.gguf")
    names = [f"{match[1]}-{part:05d}-of-{count:05d}.gguf" for part in range(1, count + 1) if part != int(match[2])]
    missing = [name for name in names if not os.path.exists(name)]
    if missing:
        raise UsageError(f"{path} is one of {count} parts; {missing[0]} is not there")
    return [Gguf(name) for name in names]


def gguf_layers(gguf: Gguf, blocks: int) -> list[Layer]:
    """What each layer caches, by llama.cpp's rules (llama_hparams and the architectures' own)."""
    heads = gguf.per_layer("attention.head_count", blocks, [0] * blocks)
    kv_heads_of = gguf.per_layer("attention.head_count_kv", blocks, heads)
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
    state = gguf_state_bytes(gguf) if any(recurrent) else 0
    own = blocks - gguf.count("attention.shared_kv_layers", 0)
    if own < blocks:
        gguf.notes.append(f"layers {own} to {blocks - 1} share an earlier layer's cache")
    layers = []
    for index in range(blocks):
        many = kv_heads_of[index] if index < own and not recurrent[index] else 0
        slides = windows[index] is not None
        k_values = many * (key_swa if slides else key)
        v_values = 0 if latent else many * (value_swa if slides else value)
        layers.append(Layer(k_values, v_values, windows[index] if many else None, state if recurrent[index] else 0))
    return layers


def gguf_windows(gguf: Gguf, blocks: int) -> list[int | None]:
    """Each layer's sliding window, or None for the whole context."""
    window = gguf.get("attention.sliding_window")
    window = GGUF_WINDOWS.get(gguf.arch) if window is None else window
    if not is_whole(window) or window <= 0:
        return [None] * blocks
    pattern = gguf.get("attention.sliding_window_pattern")
    if isinstance(pattern, list):
        if len(pattern) < blocks:
            raise UsageError(f"{gguf.path}: the sliding-window pattern has {len(pattern)} entries for {blocks} layers")
        return [window if slides else None for slides in pattern[:blocks]]
    period = pattern if is_whole(pattern) else GGUF_SWA_PERIODS.get(gguf.arch)
    if period is None:
        gguf.upper_bound = True
        gguf.notes.append(f"the file names a window of {window}, and no pattern of {gguf.arch}'s layers is known here: "
                          "every layer counted with the whole context, an upper bound")  # fmt: skip
        return [None] * blocks
    return [window if period == 0 or (index + 1) % period else None for index in range(blocks)]


def gguf_recurrent(gguf: Gguf, blocks: int, kv_heads_of: Sequence[int]) -> list[bool]:
    """Which layers keep a recurrent state (linear attention, state space, short convolution)."""
    interval = gguf.count("full_attention_interval", GGUF_INTERVALS.get(gguf.arch, 0))
    if interval and gguf.arch in GGUF_INTERVALS:
        return [(index + 1) % interval != 0 for index in range(blocks)]
    feed_forward = [0] * blocks
    if isinstance(gguf.get("feed_forward_length"), list):  # of Nemotron-H: its MLP blocks have neither heads nor state
        feed_forward = gguf.per_layer("feed_forward_length", blocks, feed_forward)
    has_state = any(gguf.get(name) for name in ("ssm.state_size", "shortconv.l_cache", "kda.head_dim"))
    return [has_state and heads == 0 and ff == 0 for heads, ff in zip(kv_heads_of, feed_forward)]


def gguf_state_bytes(gguf: Gguf) -> int:
    """Bytes per sequence of one recurrent layer, 32-bit floats (llama_hparams::n_embd_r and n_embd_s)."""
    if gguf.get("shortconv.l_cache"):
        return 4 * gguf.count("embedding_length", 0) * (gguf.count("shortconv.l_cache") - 1)
    inner, state = gguf.count("ssm.inner_size", 0), gguf.count("ssm.state_size", 0)
    if not (inner and state):
        gguf.notes.append("recurrent state: its fields are not known here, so it is not counted")
    conv = max(gguf.count("ssm.conv_kernel", 0) - 1, 0)
    return 4 * (conv * (inner + 2 * gguf.count("ssm.group_count", 0) * state) + state * inner)


# ------------------------------------------------------------------------------------------------------ log reading

LLAMA_FLOAT = 2.0**-23  # llama.cpp prints MiB through a 32-bit float: a relative error on top of the printed digits


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
        raise UsageError(f"implausible size {text[:20]}... in the log: is the file damaged?")
    return Printed(float(text), 0.5 * 10.0**-decimals)


def logged_count(text: str) -> int:
    """A whole number as a log printed it, with or without commas.

    >>> logged_count("50,960")
    50960
    """
    digits = text.replace(",", "")
    if len(digits) > len(str(MAX_COUNT)):
        raise UsageError(f"implausible number {digits[:20]}... in the log: is the file damaged?")
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
    """What a llama-server log says of the served model's memory (its last start, its main context)."""

    lines: list[KvLine] = field(default_factory=list)
    buffers: dict[str, list[tuple[str, Printed]]] = field(default_factory=dict)  # model, KV, compute: (device, MiB)
    states: list[Printed] = field(default_factory=list)
    file_size: Printed | None = None  # of the model's tensors, in `file_unit` bytes
    file_unit: int = GIB
    offloaded: tuple[int, int] | None = None  # (layers on a GPU, layers)
    slots: int | None = None
    slot_context: int | None = None
    sequence_context: int | None = None
    unified: bool | None = None
    ubatch: int | None = None
    full_window: bool = False
    notes: list[str] = field(default_factory=list)

    @property
    def cached(self) -> bool:
        return bool(self.lines or self.buffers.get("KV"))

    @property
    def cpu_only(self) -> bool:
        """Whether the log names where its buffers are, and none is on a GPU: a CPU build prints no offload line."""
        devices = [device for kind in ("model", "KV") for device, _ in self.buffers.get(kind, [])]
        return bool(devices) and all(device.startswith(("CPU", "AMX")) for device in devices)


@dataclass
class VllmLog:
    """What a vLLM log says about its memory (its last start); GiB."""

    available: Printed | None = None
    source: str = ""  # the words of the line that said so
    tokens: int | None = None
    context: int | None = None
    concurrency: Printed | None = None
    block_size: int | None = None
    loading: Printed | None = None
    device: Printed | None = None
    fraction: float | None = None


NUMBER = r"([0-9]+(?:\.[0-9]+)?)"
LLAMA_BEGINS = ("llama_model_loader: loaded meta data", "loading model tensors", "constructing llama_context")
LLAMA_KV = re.compile(
    rf"llama_\w+:\s+(?:KV self )?size\s*=\s*{NUMBER} MiB(.*?), K \((\w+)\):\s*{NUMBER} MiB, V \((\w+)\):\s*{NUMBER} MiB"
)
LLAMA_CELLS = re.compile(r"\(\s*(\d+) cells,\s*(\d+) layers,\s*(\d+)(?:/\s*(\d+))? seqs")
LLAMA_STATE = re.compile(rf"llama_\w+: size\s*=\s*{NUMBER} MiB .*, R \(\w+\):")
LLAMA_BUFFER = re.compile(rf"\w+:\s+(\S+) (?:(model|KV|compute) )?buffer size\s*=\s*{NUMBER} MiB")
LLAMA_FILE = re.compile(rf"print_info: file size\s*=\s*{NUMBER} (GiB|MiB)")
LLAMA_OFFLOADED = re.compile(r"offloaded (\d+)/(\d+) layers to GPU")
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
VLLM_LOADING = re.compile(rf"Model loading took {NUMBER} Gi?B")
VLLM_DEVICE = re.compile(rf"Free memory on device (?:\S+ )?\([0-9.]+/{NUMBER} GiB\)")
VLLM_FRACTION = re.compile(rf"'gpu_memory_utilization': {NUMBER}|Desired GPU memory utilization is \({NUMBER},")


def log_lines(path: str) -> Iterator[str]:
    """A log's lines, whatever its bytes are; colour codes removed."""
    with open_file(path) as file:
        if file.read(2) in (b"\xff\xfe", b"\xfe\xff"):
            raise UsageError(f"{path} is UTF-16; save it as UTF-8")
        file.seek(0)
        for raw in iter(lambda: file.readline(MAX_LINE_BYTES), b""):
            yield re.sub(r"\x1b\[[0-9;]*m", "", raw.decode("utf-8", "replace")).rstrip("\r\n")


def read_log(path: str) -> LlamaLog | VllmLog:
    """What a llama-server or vLLM log says. Raises UsageError for one that names no cache of either."""
    llama, vllm = LlamaLogReader(), VllmLog()
    for line in log_lines(path):
        llama.feed(line)
        feed_vllm(vllm, line)
    log = llama.finish()
    if log.cached:
        return log
    if vllm.available or vllm.tokens:
        return vllm
    raise UsageError(f"no cache line of llama-server or vLLM in {path}; llama-server prints its sizes with "
                     "--verbosity 4")  # fmt: skip


class LlamaLogReader:
    """Gathers llama-server's lines. What loads a model or makes a cache after a slots line begins the next start; what
    an earlier start said is dropped. Within a start, loading a model or constructing a context begins a section once
    the one before has its cache: the first is the served model's, later ones are a draft model's, or equal to it
    where --fit tried the allocation out loud."""

    def __init__(self) -> None:
        self.earlier = 0
        self.begin()

    def begin(self) -> None:
        self.sections = [LlamaLog()]
        self.slots: int | None = None
        self.slot_context: int | None = None
        self.unified: bool | None = None

    def feed(self, line: str) -> None:
        if LLAMA_DEBUG.match(line):
            return
        begins = any(words in line for words in LLAMA_BEGINS)
        if self.slots is not None and (begins or LLAMA_KV.search(line) or " KV buffer size" in line):
            self.begin()
            self.earlier += 1
        if begins and self.sections[-1].cached:
            self.sections.append(LlamaLog())
        self.feed_section(self.sections[-1], line)
        slots, context = LLAMA_SLOTS.search(line), LLAMA_SLOT_CONTEXT.search(line)
        if slots:
            self.slots = logged_count(slots[1])
            unified = re.search(r"kv_unified = '(\w+)'", line)
            self.unified = unified[1] == "true" if unified else None
        if context and self.slot_context is None:
            self.slot_context = logged_count(context[1] or context[2])

    def feed_section(self, section: LlamaLog, line: str) -> None:
        if match := LLAMA_KV.search(line):
            cells = LLAMA_CELLS.search(match[2])
            counts = [logged_count(count) if count else None for count in cells.groups()] if cells else [None] * 4
            section.lines.append(KvLine(printed(match[1]), match[3].lower(), printed(match[4]), match[5].lower(),
                                        printed(match[6]), *counts))  # fmt: skip
        elif match := LLAMA_STATE.search(line):
            section.states.append(printed(match[1]))
        elif match := LLAMA_BUFFER.search(line):
            kind = match[2] or ("model" if "load_tensors" in line else "other")
            section.buffers.setdefault(kind, []).append((match[1], printed(match[3])))
        elif match := LLAMA_FILE.search(line):
            section.file_size, section.file_unit = printed(match[1]), GIB if match[2] == "GiB" else MIB
        elif match := LLAMA_OFFLOADED.search(line):
            section.offloaded = logged_count(match[1]), logged_count(match[2])
        elif "using full-size SWA cache" in line:
            section.full_window = True
        for name, value in LLAMA_FIELD.findall(line) if "llama_" in line else ():
            if name == "kv_unified":
                section.unified = value == "true"
            elif value.isdigit() and name == "n_ubatch":
                section.ubatch = logged_count(value)
            elif value.isdigit() and section.sequence_context is None:
                section.sequence_context = logged_count(value)

    def finish(self) -> LlamaLog:
        found = [section for section in self.sections if section.cached]
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
    if match := VLLM_BLOCK.search(line):
        log.block_size = logged_count(next(group for group in match.groups() if group))
    if match := VLLM_FRACTION.search(line):
        log.fraction = float(match[1] or match[2])
    if match := VLLM_DEVICE.search(line):
        log.device = printed(match[1], decimals=2)
    if match := VLLM_LOADING.search(line):
        log.loading = printed(match[1])
    if match := VLLM_AVAILABLE.search(line):
        which = next(index for index, group in enumerate(match.groups()) if group)
        available = printed(match[which + 1], decimals=2)
        if log.tokens is not None or log.available is None or available.value < log.available.value:
            log.available, log.source = available, VLLM_WORDS[which]  # of several workers the smallest counts
        log.tokens = log.context = log.concurrency = None
    if match := VLLM_TOKENS.search(line):
        log.tokens = logged_count(match[1])
    if match := VLLM_CONCURRENCY.search(line):
        log.context, log.concurrency = logged_count(match[1]), printed(match[2])


# -------------------------------------------------------------------------------------------------------- documents

Document = dict[str, Any]  # what --json prints and the text views show; the only place where figures are derived


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
    fractions: tuple[float, float] | None
    as_json: bool
    logs: tuple[str, ...]
    cpu_expected: bool
    measured: str | None
    label: str | None
    lab_table: bool

    @property
    def kv_type(self) -> str | None:
        """The one cache type that was stated, or None. Raises UsageError where there are several."""
        if len(self.kv_types) > 1:
            raise UsageError(f"--kv-type: one type here, not {len(self.kv_types)}")
        return self.kv_types[0] if self.kv_types else None


def document_of(mode: str, model: Model, **more: Any) -> Document:
    """What every document begins with."""
    return {"program": PROGRAM, "tool_version": TOOL_VERSION, "mode": mode, "model": model_facts(model), **more}


def model_facts(model: Model) -> Document:
    """The model's shape."""
    return {
        "name": model.name, "source": model.source, "shape": model.shape, "quant": model.quant,
        "layers": len(model.layers), "layers_with_kv_cache": sum(layer.cached for layer in model.layers),
        "kv_heads": model.uniform[0] if model.uniform else None,
        "head_dim": model.uniform[1] if model.uniform else None,
        "groups": [{"layers": count, "k_values": layer.k_values, "v_values": layer.v_values, "window": layer.window,
                    "state_bytes": layer.state_bytes} for layer, count in layer_groups(model.layers)],
        "state_bytes": model.state_bytes, "upper_bound": model.upper_bound, "blocks_exact": model.blocks_exact,
        "notes": list(model.notes),
    }  # fmt: skip


def weights_facts(model: Model, weights: Weights) -> Document:
    """Weights, and what of them a step of one sequence reads."""
    return {
        "name": weights.name, "source": weights.source, "total_bytes": weights.total_bytes,
        "not_read_bytes": weights.not_read_bytes, "not_read": dict(weights.not_read),
        "expert_bytes": weights.expert_bytes, "experts": weights.experts or None,
        "experts_used": weights.experts_used or None,
        "read_per_step_bytes": step_bytes(model, weights, 1, 0, "f16").weights,
    }  # fmt: skip


# predicted


def predicted_document(options: Options) -> Document:
    """Every figure of the prediction."""
    model = options.model
    slots, ctx = options.slots or LAB_SLOTS, options.ctx or LAB_CONTEXT
    kv_types = options.kv_types or ("f16", "q8_0", "fp8", "q4_0")
    weights = served_weights(model, kv_types[0])
    rows: list[Document] = []
    if weights is not None and weights.total_bytes > weights.not_read_bytes:
        batches = sorted({batch for batch in LAB_BATCHES if batch <= slots} | {slots})
        for machine in options.machines or LAB_MACHINES:
            for context in sorted({context for context in LAB_CONTEXTS if context <= ctx} | {ctx}):
                rows += ceilings(model, weights, machine, context, batches, kv_types[0])
    document = document_of(
        "prediction", model, slots=slots, context=ctx, tokens=slots * ctx,
        weights=[weights_facts(model, each) for each in model.weights], kv=[], memory=[], ceilings=rows,
        ceiling_weights=weights.name if weights is not None else None, vllm=None, fractions=None,
    )  # fmt: skip
    for kv_type in kv_types:
        pool, allocated = pool_bytes(model, slots, ctx, kv_type), allocated_bytes(model, slots, ctx, kv_type)
        block, size = KV_TYPES[kv_type]
        document["kv"].append({
            "kv_type": kv_type, "bytes_per_value": f"{size}/{block}" if block > 1 else str(size),
            "bytes_per_token": bytes_per_token(model, kv_type), "pool_bytes": pool, "pool_mib": pool / MIB,
            "pool_gib": pool / GIB, "allocated_bytes": allocated, "allocated_mib": allocated / MIB,
        })  # fmt: skip
        document["memory"] += memory_rows(options, kv_type, allocated)
    for_vllm = options.kv_types or ("f16", "fp8")
    if options.available_kv_bytes is not None:
        document["vllm"] = [vllm_row(options, kv_type, ctx) for kv_type in for_vllm]
    if options.fractions is not None and options.memory_bytes is not None:
        shift = fraction_shift_bytes(*options.fractions, options.memory_bytes)
        document["fractions"] = {
            "fractions": list(options.fractions), "memory_bytes": options.memory_bytes, "shift_bytes": shift,
            "shift_tokens": {kv_type: shift / token_bytes_of_blocks(model, kv_type) for kv_type in for_vllm},
        }  # fmt: skip
    return document


def ceilings(model: Model, weights: Weights, machine: Machine, context: int, batches: Sequence[int],
             kv_type: str) -> list[Document]:  # fmt: skip
    """Bandwidth ceilings at one context, a row for each batch."""
    rows = []
    for batch in batches:
        moved = step_bytes(model, weights, batch, context, kv_type).total
        per_user = per_user_ceiling_tokens_per_s(machine.bandwidth_gb_per_s, moved)
        rows.append({
            "machine": machine.name, "bandwidth_gb_per_s": machine.bandwidth_gb_per_s, "context": context,
            "batch": batch, "kv_type": kv_type, "read_per_step_bytes": moved, "per_user_tokens_per_s": per_user,
            "aggregate_tokens_per_s": batch * per_user,
        })  # fmt: skip
    return rows


def memory_rows(options: Options, kv_type: str, pool: int) -> Iterator[Document]:
    """Weights + cache against the memory, for each file that is served with this cache type."""
    model, memory = options.model, options.memory_bytes
    files: list[Weights | None] = list(model.weights) or [None]
    if len(files) > 1 and kv_type not in ("f16", "bf16", "f32"):
        files = [served_weights(model, kv_type)]
    for weights in files:
        known = weights.total_bytes if weights is not None else 0
        needed = pool + known
        one = allocated_bytes(model, 1, options.ctx or LAB_CONTEXT, kv_type)
        fits = None if memory is None or (weights is None and needed <= memory) else needed <= memory
        yield {
            "weights": weights.name if weights is not None else None, "kv_type": kv_type, "needed_bytes": needed,
            "needed_gib": needed / GIB, "weights_counted": weights is not None, "memory_bytes": memory,
            "left_bytes": None if memory is None else memory - needed, "fits": fits,
            "most_slots": None if memory is None or weights is None or not one else max(0, (memory - known) // one),
        }  # fmt: skip


def vllm_row(options: Options, kv_type: str, context: int) -> Document:
    """vLLM's blocks in the stated pool."""
    pool, block = options.available_kv_bytes or 0, options.block_size or BLOCK_SIZE
    token_bytes = token_bytes_of_blocks(options.model, kv_type)
    blocks = vllm_blocks(pool, block, token_bytes)
    return {"kv_type": kv_type, "available_bytes": pool, "block_size": block, "bytes_per_token": token_bytes,
            "blocks": blocks, "tokens": blocks * block, "context": context,
            "max_concurrency": vllm_max_concurrency(blocks, context, block)}  # fmt: skip


# checked against a log


OFFLOAD = "layers on a GPU"


@dataclass(frozen=True)
class Row:
    """One figure predicted and logged. `agrees` is None where it is shown but not judged."""

    what: str
    predicted: str
    logged: str
    agrees: bool | None
    how: str


def checked_document(options: Options) -> Document:
    """Each log beside its prediction; of two vLLM logs also what the change of the memory fraction did."""
    logs = [(path, read_log(path)) for path in options.logs]
    checks = []
    for path, log in logs:
        engine = "llama-server" if isinstance(log, LlamaLog) else "vLLM"
        rows, notes = check_llama(options, log) if isinstance(log, LlamaLog) else check_vllm(options, log)
        if options.model.source == LAB_SOURCE and any(row.agrees is False and row.what != OFFLOAD for row in rows):
            notes.append("the model is the lab's, as none is stated: --gguf, --config or --layers name another")
        checks.append({
            "engine": engine, "log": path, "agrees": all(row.agrees is not False for row in rows), "notes": notes,
            "comparisons": [{"what": row.what, "predicted": row.predicted, "log": row.logged, "agrees": row.agrees,
                             "how": row.how} for row in rows],
        })  # fmt: skip
    vllm = [log for _, log in logs if isinstance(log, VllmLog)]
    fractions = fraction_facts(options, *vllm) if len(vllm) == len(logs) == 2 else None
    agrees = all(check["agrees"] for check in checks)
    return document_of("check-log", options.model, agrees=agrees, checks=checks, fractions=fractions)


def option_or_log(value: int | None, logged: int | None, default: int) -> tuple[int, str]:
    """The value to predict with and where it comes from: the option, else the log, else the lab's default."""
    if value is not None:
        return value, "stated"
    return (logged, "from the log") if logged else (default, "the lab's")


def check_llama(options: Options, log: LlamaLog) -> tuple[list[Row], list[str]]:
    """(rows, notes): predicted sizes beside llama-server's. Slots, context and type that are not stated are
    the log's own."""
    model, kv_type = options.model, options.kv_type
    first = log.lines[0] if log.lines else None
    by_streams = first is not None and first.streams == 1 < (first.sequences or 1)
    unified = by_streams if log.unified is None else log.unified
    logged_slots = log.slots if log.slots is not None else first.sequences if first else None
    slots, slots_from = option_or_log(options.slots, logged_slots, LAB_SLOTS)
    logged_context = log.sequence_context or log.slot_context or (first.cells if first else None)
    if unified and logged_context:  # the log tells what all slots share
        logged_context = -(-logged_context // slots)
    context, context_from = option_or_log(options.ctx, logged_context, LAB_CONTEXT)
    k_type, v_type = kv_type or (first.k_type if first else "f16"), kv_type or (first.v_type if first else "f16")
    for name in (k_type, v_type):
        if name not in KV_TYPES:
            raise UsageError(f"the log's cache type {plain(repr(name))} is not known here; state --kv-type")
    cache = LlamaCache(slots, context, k_type, v_type, unified, log.ubatch or LLAMA_UBATCH, log.full_window)
    keys, values, states = llama_cache_bytes(model, cache)
    rows = [*offload_rows(options, log), *stated_rows(options, log, first, logged_slots, cache),
            *cache_rows(model, log, keys, values, states), *buffer_rows(model, log)]  # fmt: skip
    type_from = "stated" if kv_type else "from the log" if first else "the default"
    notes = list(log.notes)
    notes.append(f"predicted for {slots} slots ({slots_from}) of {context:,} tokens ({context_from}), keys {k_type}, "
                 f"values {v_type} ({type_from})")  # fmt: skip
    if unified:
        notes.append(f"one unified cache: the slots share {cache.stream_context:,} cells")
    if options.ctx is not None and cache.stream_context != (slots * context if unified else context):
        notes.append(f"llama.cpp rounds the context up to a multiple of {LLAMA_PAD}: {cache.stream_context:,}")
    if model.windowed and not log.full_window:
        ubatch = f"{cache.ubatch} ({'from the log' if log.ubatch else 'the default'})"
        notes.append(f"sliding-window layers: min(context, window + ubatch {ubatch}) cells, in whole {LLAMA_PAD}s")
    return rows, notes


def offload_rows(options: Options, log: LlamaLog) -> Iterator[Row]:
    """All layers belong on a GPU, or everything that follows measures the CPU."""
    if log.offloaded is not None:
        on_gpu, layers = log.offloaded
        logged, how, complete = f"{on_gpu}/{layers}", "offloaded ... layers to GPU", on_gpu == layers
    elif log.cpu_only:
        logged, how, complete = "none", "every buffer is the CPU's", False
    else:
        return
    expected = options.cpu_expected and not complete
    yield Row(OFFLOAD, "any" if expected else "all", logged, None if expected else complete,
              "--cpu-expected: not judged" if expected else how)  # fmt: skip


def stated_rows(options: Options, log: LlamaLog, first: KvLine | None, logged_slots: int | None,
                cache: LlamaCache) -> Iterator[Row]:  # fmt: skip
    """Rows for what was stated and the log tells too."""
    if options.slots is not None and logged_slots is not None:
        yield Row("slots", str(options.slots), str(logged_slots), options.slots == logged_slots, "n_slots")
    if options.ctx is not None and log.slot_context is not None:
        agrees = log.slot_context == cache.stream_context
        yield Row("context per slot", f"{cache.stream_context:,}", f"{log.slot_context:,}", agrees, "n_ctx_slot")
    if options.kv_type is not None and first is not None:
        logged = first.k_type if first.k_type == first.v_type else f"{first.k_type}/{first.v_type}"
        yield Row("cache type", options.kv_type, logged, logged == options.kv_type, "K and V of the size line")


def cache_rows(model: Model, log: LlamaLog, keys: int, values: int, states: int) -> Iterator[Row]:
    """Rows for the cache: the sum of the lines, keys, values, layers, recurrent state."""

    def row(what: str, predicted: int, sizes: Sequence[Printed], how: str) -> Row:
        logged = math.fsum(size.value for size in sizes)
        allowed = math.fsum(size.half for size in sizes) + logged * LLAMA_FLOAT + 1e-9
        agrees: bool | None = abs(predicted / MIB - logged) <= allowed
        if model.upper_bound and logged < predicted / MIB:
            agrees = None
        return Row(what, f"{predicted / MIB:.2f} MiB", f"{logged:.2f} MiB", agrees, f"{how}, within {allowed:.3f} MiB")

    if log.lines:
        count = len(log.lines)
        how = f"sum of {count} size lines" if count > 1 else "size line"
        yield row("KV cache", keys + values, [line.size for line in log.lines], how)
        yield row("keys", keys, [line.k_size for line in log.lines], "K")
        yield row("values", values, [line.v_size for line in log.lines], "V")
        logged_layers = [line.layers for line in log.lines if line.layers is not None]
        if logged_layers:
            cached = sum(layer.cached for layer in model.layers)
            agrees = None if model.upper_bound else cached == sum(logged_layers)
            yield Row("layers with a cache", str(cached), str(sum(logged_layers)), agrees, how)
    else:
        buffers = [size for _, size in log.buffers["KV"]]
        yield row("KV cache", keys + values, buffers, f"sum of {len(buffers)} KV buffers")
    if states and log.states:
        yield row("recurrent state", states, log.states, "R and S")


def buffer_rows(model: Model, log: LlamaLog) -> Iterator[Row]:
    """Rows for the weights (judged by the tensors' size, where a GGUF or the size was stated) and for the buffers,
    which are shown: a mapped file, a repacked or a tied matrix changes what they hold."""
    weights = model.weights[0] if model.weights else None
    if log.file_size is not None:
        predicted, agrees = "not stated", None
        if weights is not None and weights.source in (TENSOR_TABLE, STATED_BYTES, LAB_FILE):
            within = abs(weights.total_bytes / log.file_unit - log.file_size.value) <= log.file_size.half + 1e-9
            if within or weights.source != LAB_FILE:  # the lab's file is a default: another one is no difference
                predicted, agrees = size_text(weights.total_bytes), within
        yield Row("weights", predicted, size_text(log.file_size.value * log.file_unit), agrees, "file size")
    for kind in ("model", "KV", "compute"):
        found = log.buffers.get(kind, [])
        if found:
            devices = ", ".join(f"{plain(device)} {size.value:.2f}" for device, size in found)
            total = math.fsum(size.value for _, size in found)
            yield Row(f"{kind} buffers", "", f"{total:.2f} MiB", None, devices)


def check_vllm(options: Options, log: VllmLog) -> tuple[list[Row], list[str]]:
    """(rows, notes): predicted blocks, tokens and concurrency beside vLLM's. The pool is the stated one,
    else what the log's two decimals stand for; nothing else is the log's own but block size and context."""
    model, kv_type, available = options.model, options.kv_type or "f16", options.available_kv_bytes
    block, _ = option_or_log(options.block_size, log.block_size, BLOCK_SIZE)
    context, context_from = option_or_log(options.ctx, log.context, LAB_CONTEXT)
    token_bytes = token_bytes_of_blocks(model, kv_type)
    if log.tokens is None and log.concurrency is None:
        raise UsageError("the log names memory for the cache but no tokens: vLLM had not finished its start")
    rows: list[Row] = []
    if log.loading is not None:
        weights = model.weights[-1] if model.weights else None
        predicted = "not stated" if weights is None or weights.source == LAB_FILE else size_text(weights.total_bytes)
        rows.append(Row("model loading", predicted, f"{log.loading.value:.2f} GiB", None,
                        "Model loading took; vLLM may repack the weights"))  # fmt: skip
    if log.context is not None and options.ctx is not None:
        rows.append(Row("context", f"{context:,}", f"{log.context:,}", context == log.context, "tokens per request"))
    if available is not None:
        low = high = available
        pool_text = f"{size_text(available)} (stated)"
        if log.available is not None:
            agrees = abs(available / GIB - log.available.value) <= log.available.half + 1e-9
            rows.append(Row("pool", f"{available / GIB:.2f} GiB", f"{log.available.value:.2f} GiB", agrees, log.source))
    elif log.available is not None:
        value, half = log.available.value, log.available.half
        low, high = max(math.ceil((value - half) * GIB), 0), math.floor((value + half) * GIB)
        pool_text = f"{low / GIB:.3f} to {high / GIB:.3f} GiB (the log's two decimals)"
    else:
        raise UsageError("the log names tokens but no memory for them; state it with --available-kv GIB")
    blocks = (vllm_blocks(low, block, token_bytes), vllm_blocks(high, block, token_bytes))
    rows += block_rows(log, blocks, block, context, model.blocks_exact)
    type_from = "stated" if options.kv_type else "the default: state --kv-type"
    block_from = "stated" if options.block_size else "from the log" if log.block_size else "the default on a GPU"
    counted = f"{blocks[0]:,}" if blocks[0] == blocks[1] else f"{blocks[0]:,} to {blocks[1]:,}"
    described = (
        f"{token_bytes:,} B per token; blocks of {block} tokens ({block_from}); context {context:,} ({context_from})"
    )
    notes = [f"cache type {kv_type} ({type_from}): {described}",
             f"pool {pool_text}; blocks = floor(pool / ({block} x {token_bytes:,} B)) = {counted}"]  # fmt: skip
    if not model.blocks_exact:
        notes.append("vLLM groups the layers of such a model its own way: every layer is counted in full here, and "
                     "not judged")  # fmt: skip
    return rows, notes


def block_rows(log: VllmLog, blocks: tuple[int, int], block: int, context: int, exact: bool) -> Iterator[Row]:
    """Rows for tokens and concurrency. Since 0.20 or so vLLM prints concurrency x context for the tokens."""

    def between(low: str, high: str) -> str:
        return low if low == high else f"{low} to {high}"

    per_request = -(-context // block)
    if log.tokens is not None:
        low, high = (count * block for count in blocks)
        rescaled = [count * context // per_request for count in blocks]
        holds = low <= log.tokens <= high or rescaled[0] <= log.tokens <= rescaled[1]
        yield Row("tokens", between(f"{low:,}", f"{high:,}"), f"{log.tokens:,}", holds if exact else None,
                  "blocks x block size")  # fmt: skip
    if log.concurrency is not None:
        least, most = (vllm_max_concurrency(count, context, block) for count in blocks)
        half = log.concurrency.half + 1e-9
        holds = least - half <= log.concurrency.value <= most + half
        yield Row("maximum concurrency", between(f"{least:.2f}x", f"{most:.2f}x"), f"{log.concurrency.value:.2f}x",
                  holds if exact else None, f"blocks / ceil({context:,} / {block})")  # fmt: skip


def fraction_facts(options: Options, first: VllmLog, second: VllmLog) -> Document:
    """The predicted shift of the cache beside the two logged readings, GiB. Fractions and the device's memory are the
    stated ones, else the logs'; None where neither tells, or the cache's size was set in bytes."""
    fractions = options.fractions or (first.fraction, second.fraction)
    memory = options.memory_bytes
    if memory is None and second.device is not None:
        memory = round(second.device.value * GIB)
    shift = None
    if memory is not None and fractions[0] is not None and fractions[1] is not None:
        shift = fraction_shift_bytes(fractions[0], fractions[1], memory) / GIB
    readings = [log.available.value if log.available and "Available" in log.source else None for log in (first, second)]
    logged = readings[1] - readings[0] if readings[0] is not None and readings[1] is not None else None
    return {"fractions": list(fractions), "memory_bytes": memory, "predicted_shift_gib": shift,
            "available_gib": readings, "logged_shift_gib": logged}  # fmt: skip


# met with a curve


FLAT = 0.05  # growth below this share of the lowest level's TPOT says nothing: runs of one setup often differ by 5 %
MOST = 0.5  # bytes that account for at least this share of a growth are called its reason
FEW = 0.75  # of n in flight on average: below it the steps of n sequences are not what was measured
ABOVE = 1.02  # a bandwidth utilisation above this is not a percentile's noise: an input is wrong


def analyser() -> ModuleType:
    """summarise_load, from the folder of this file: it decides what a notebook holds, which runs count, and what a
    knee, a fit and an operating point are. Raises UsageError where it is missing or of another version."""
    folder = os.path.dirname(os.path.abspath(__file__))
    if folder not in sys.path:
        sys.path.insert(0, folder)
    try:
        import summarise_load
    except ModuleNotFoundError:
        raise UsageError(f"--measured reads the notebook with summarise_load.py, which is not in {folder}; put it "
                         f"beside {PROGRAM}") from None  # fmt: skip
    if summarise_load.TOOL_VERSION != TOOL_VERSION:
        raise UsageError(f"summarise_load.py is version {summarise_load.TOOL_VERSION}, {PROGRAM} {TOOL_VERSION}: take "
                         "both from one release")  # fmt: skip
    return summarise_load


def measured_document(options: Options) -> Document:
    """A label's levels beside what moving the bytes of each step takes, for each machine."""
    summary, model, path, label = analyser(), options.model, options.measured or "", options.label or ""
    try:
        notebook = summary.read_notebook(path)
        curve = summary.find_curve(notebook, label)
    except summary.UserError as error:
        raise UsageError(str(error)) from None
    except summary.ResultError as error:
        raise ResultError(str(error)) from None
    left_out = [f"c={level.c} left out: {level.left_out}" for level in curve.levels if level.left_out]
    if not curve.usable:
        raise ResultError(f"label {label!r} in {path} has no level to compare: {', '.join(left_out)}")
    quant = str(curve.settings.get("quant") or "unknown")
    weights, weights_from = measured_weights(model, quant)
    kv_type, kv_type_from = measured_kv_type(options, quant)
    remarks = sorted([*notebook.damaged, *notebook.unknown])
    notes = [f"line {remark.line} left out: {remark.text}" for remark in remarks] + [*curve.remarks, *left_out]
    named = str(curve.settings.get("model") or "unknown")
    if model.source == LAB_SOURCE and named != "local-chat" and model.name.lower() not in named.lower():
        notes.append(f"the record's model is {named}; predicted for the lab's {model.name}, as none is stated")
    if model.quant and quant.partition(",")[0].strip().upper() != model.quant:
        notes.append(f"the GGUF's weights are {model.quant}, the record's quant is {plain(quant)}")
    levels = [level_facts(model, weights, kv_type, level) for level in curve.usable]
    counted = [level["c"] for level in levels if not level["prompt_tokens_mean"]]
    if counted:
        notes.append(f"no prompt tokens recorded at c = {', '.join(map(str, counted))}: counted as 0, so the predicted "
                     "step is a lower bound")  # fmt: skip
    if any(level["n"] == level["c"] and level["slots"] is None for level in levels):
        notes.append(
            "slots are not recorded: n = c is assumed, so with fewer slots the predicted step is an upper bound"
        )
    few = [level["c"] for level in levels if level["mean_in_flight"] and level["mean_in_flight"] < FEW * level["n"]]
    if few:
        notes.append(f"fewer than n were in flight on average at c = {', '.join(map(str, few))}: the predicted step is "
                     "an upper bound there")  # fmt: skip
    knee, fit, *_, operating_point = summary.derived_lines(summary.curve_document(curve))
    names = ("engine", "engine_version", "model", "host", "quant")
    return document_of(
        "measured", model, notebook=path, label=curve.label, slots=curve.slots,
        settings={name: curve.settings.get(name) for name in names},
        weights={**weights_facts(model, weights), "chosen": weights_from}, kv_type=kv_type, kv_type_from=kv_type_from,
        bytes_per_token=bytes_per_token(model, kv_type), knee_between=list(curve.knee) if curve.knee else None,
        operating_point=curve.operating_point, fitted=line_facts(curve.fit), derived=[fit, knee, operating_point],
        notes=notes,
        machines=[machine_facts(summary, curve, machine, levels) for machine in options.machines or LAB_MACHINES],
        bandwidth_stated=len(options.machines) == 1,
    )  # fmt: skip


def measured_weights(model: Model, quant: str) -> tuple[Weights, str]:
    """(weights, why these): the stated ones, else the lab's file for the record's quant, whatever cache type stands
    behind it. Raises UsageError for any other quant or model: no weight is assumed.

    >>> measured_weights(lab_model(), "bf16, KV fp8")[0].total_bytes
    16381470720
    """
    if len(model.weights) == 1:
        return model.weights[0], "as stated"
    needed = "name them: --gguf, --safetensors, or --weights-bytes with --not-read-bytes"
    if model.source != LAB_SOURCE:
        raise UsageError(f"--measured needs the weights; {needed}")
    weights = LAB_WEIGHTS.get(re.sub(r", KV \w+$", "", quant).strip().lower())
    if weights is None:
        raise UsageError(f"the record's quant is {plain(repr(quant))}, and the lab's weights are known for Q4_K_M, "
                         f"AWQ, bf16 and MLX 4-bit only; {needed}")  # fmt: skip
    return weights, f"for the record's quant {plain(quant)}"


def measured_kv_type(options: Options, quant: str) -> tuple[str, str]:
    """(cache type, where it comes from): stated, or named by the record's quant ("Q4_K_M, KV q8_0"), or assumed."""
    if options.kv_type is not None:
        return options.kv_type, "stated"
    named = re.search(r"\bKV (\w+)", quant)
    if named is None:
        return "f16", "assumed: the record names none, --kv-type does"
    kv_type = KV_ALIASES.get(named[1].lower(), named[1].lower())
    if kv_type not in KV_TYPES:
        raise UsageError(f"the record's quant names the cache type {plain(named[1])}, not known here; state --kv-type")
    return kv_type, "from the record's quant"


def level_facts(model: Model, weights: Weights, kv_type: str, level: Any) -> Document:
    """One level as measured, and the bytes of its step: n = min(c, slots) sequences decode together, each with the
    mean prompt and half of the mean output in its cache."""
    slots = level.setting("server_slots")
    n = level.c if slots is None else min(level.c, slots)
    completed, prompt = level.median("completed"), level.median("prompt_tokens_mean") or 0.0
    output = (level.median("output_tokens") or 0.0) / completed if completed else 0.0
    tpot_s = level.median("tpot_s.p50")
    context = prompt + output / 2
    moved = step_bytes(model, weights, n, context, kv_type)
    if not moved.total > 0:
        raise UsageError(f"a step of {model.name} would read nothing: the weights hold only tables; name others")
    return {
        "c": level.c, "slots": slots, "n": n, "mean_in_flight": level.median("mean_in_flight"),
        "prompt_tokens_mean": prompt, "output_tokens_mean": output, "context": context,
        "step_bytes": {"weights": moved.weights, "cache": moved.cache, "state": moved.state, "total": moved.total},
        "short_step_bytes": step_bytes(model, weights, n, SHORT_CONTEXT, kv_type).total,
        "tpot_ms": 1000.0 * tpot_s if tpot_s is not None else None,
        "output_tokens_per_s": level.median("output_tokens_per_s"),
    }  # fmt: skip


def line_facts(fit: Any) -> Document | None:
    """A fitted line of summarise_load as a and b, None where there is none."""
    if fit is None:
        return None
    return {"a_ms": fit.a_ms, "b_ms": fit.b_ms, "levels": list(fit.levels), "largest_residual": fit.largest_residual}


def machine_facts(summary: ModuleType, curve: Any, machine: Machine, levels: Sequence[Document]) -> Document:
    """Each level beside the bandwidth limit of one machine, the line and the knee of that limit, and the growth."""
    rows = []
    for level in levels:
        predicted = step_ms(machine.bandwidth_gb_per_s, level["step_bytes"]["total"])
        ceiling = level["n"] * 1000.0 / predicted
        short = level["n"] * 1000.0 / step_ms(machine.bandwidth_gb_per_s, level["short_step_bytes"])
        rate, tpot = level["output_tokens_per_s"], level["tpot_ms"]
        rows.append({
            **level, "predicted_tpot_ms": predicted, "mbu": predicted / tpot if tpot else None,
            "ceiling_tokens_per_s": ceiling, "share_of_ceiling": rate / ceiling if rate is not None else None,
            "ceiling_at_context_100_tokens_per_s": short,
            "share_at_context_100": rate / short if rate is not None else None,
        })  # fmt: skip
    fitted = curve.fit.levels if curve.fit else [row["c"] for row in rows if row["c"] == row["n"]]
    points = [(row["c"], row["predicted_tpot_ms"]) for row in rows if row["c"] in fitted]
    line = summary.fit_line(points)
    knee = summary.find_knee([(row["c"], row["ceiling_tokens_per_s"]) for row in rows])
    above = [
        row["c"] for row in rows if (row["mbu"] or 0) > ABOVE
    ]  # the share counts first tokens too, which prefill made
    return {
        "machine": machine.name, "bandwidth_gb_per_s": machine.bandwidth_gb_per_s, "levels": rows,
        "predicted": line_facts(line), "predicted_knee_between": list(knee) if knee else None,
        "above_limit": above, "growth": None if above else growth_facts(machine, rows),
    }  # fmt: skip


def growth_facts(machine: Machine, rows: Sequence[Document]) -> Document | None:
    """What TPOT p50 grew by between the lowest level and the lowest at which the most sequences decode together, and
    how much of it moving the additional bytes takes; None where no two levels can be compared.

    `reason`: flat (no growth worth a sentence), the kind of bytes that most of it is (weights, cache, state), or beyond
    (most of it is time beyond the bytes)."""
    timed = [row for row in rows if row["tpot_ms"]]
    if not timed:
        return None
    low, high = timed[0], max(timed, key=lambda row: (row["n"], -row["c"]))
    if high["n"] == low["n"]:
        return None
    grown = high["tpot_ms"] - low["tpot_ms"]
    parts = {kind: step_ms(machine.bandwidth_gb_per_s, high["step_bytes"][kind] - low["step_bytes"][kind])
             for kind in ("weights", "cache", "state")}  # fmt: skip
    by_bytes = sum(parts.values())
    share = by_bytes / grown if grown > 0 else None
    reason = "beyond" if share is None or share < MOST else max(parts, key=lambda kind: parts[kind])
    if grown < FLAT * low["tpot_ms"]:
        reason = "flat"
    return {
        "from_c": low["c"], "to_c": high["c"], "grown_ms": grown, "bytes_ms": by_bytes, "bytes_ms_by_kind": parts,
        "share": share, "share_at_reached_bandwidth": share / low["mbu"] if share is not None else None,
        "reached_mbu": low["mbu"], "reason": reason,
    }  # fmt: skip


# ------------------------------------------------------------------------------------------------------------ views


def lab_table() -> str:
    """The lab's table. Its bytes are part of the lab: other people compare with them."""
    model = lab_model()
    gguf, awq = model.weights
    lines = [f"KV pool for {LAB_SLOTS} x {LAB_CONTEXT:,} = {LAB_SLOTS * LAB_CONTEXT:,} tokens"]
    for kv_type in ("f16", "q8_0", "fp8"):
        pool = pool_bytes(model, LAB_SLOTS, LAB_CONTEXT, kv_type)
        per_token = bytes_per_token(model, kv_type)
        lines.append(f"  {kv_type:<5} {per_token:>7,} B/token  {pool:>14,} B = {pool / GIB:5.2f} GiB")
    lines.append("Weights + pool, before compute buffers and graphs (GiB)")
    pairs = (("llama-server", gguf, "f16"), ("llama-server", gguf, "q8_0"), ("vLLM", awq, "f16"), ("vLLM", awq, "fp8"))
    for server, weights, kv_type in pairs:
        total = weights.total_bytes + pool_bytes(model, LAB_SLOTS, LAB_CONTEXT, kv_type)
        lines.append(f"  {server + ', ' + weights.name:<26} + {kv_type:<5} = {total / GIB:5.2f}")
    lines.append("Bandwidth ceiling, Q4_K_M, f16 cache: aggregate tok/s (per user) at batch B")
    for machine in LAB_MACHINES:
        for context in LAB_CONTEXTS:
            lines += ceiling_lines(ceilings(model, gguf, machine, context, LAB_BATCHES, "f16"))
    return "\n".join(lines) + "\n"


def ceiling_lines(rows: Sequence[Document]) -> Iterator[str]:
    """A line for each machine and context."""
    grouped: dict[str, list[str]] = {}
    for row in rows:
        cell = f"B={row['batch']:<2} {row['aggregate_tokens_per_s']:>5.0f} ({row['per_user_tokens_per_s']:5.1f})"
        grouped.setdefault(f"  {row['machine']:<20}ctx {row['context']:>5}: ", []).append(cell)
    return (head + "  ".join(cells) for head, cells in grouped.items())


def model_lines(model: Document, prefix: str) -> list[str]:
    """The model, its groups of layers where they differ, and what was assumed."""
    lines = [f"{prefix}{model['name']} ({model['shape']}), from {plain(model['source'])}"]
    for group in model["groups"] if model["kv_heads"] is None else ():
        count, k_values, v_values = group["layers"], group["k_values"], group["v_values"]
        parts = []
        if k_values or v_values:
            window = group["window"]
            kept = "the whole context" if window is None else f"the last {window:,} tokens"
            parts.append(f"{k_values} + {v_values} values per token (keys + values), of {kept}")
        if group["state_bytes"]:
            parts.append(f"a recurrent state of {group['state_bytes']:,} B per sequence")
        lines.append(f"  {count} layer{'s' * (count > 1)}: {'; '.join(parts) or 'no cache of their own'}")
    return lines + [f"  note: {note}" for note in model["notes"]]


def weights_lines(weights: Document) -> list[str]:
    """Weights, and the bytes that a step of one sequence reads of them."""
    total, source = f"{weights['total_bytes']:,} B = {size_text(weights['total_bytes'])}", plain(weights["source"])
    lines = [f"Weights: {plain(weights['name'])}, {total} ({source})"]
    parts = [f"{weights['total_bytes']:,}", *(f"{size:,} ({why})" for why, size in weights["not_read"].items())]
    batch = ""
    if weights["expert_bytes"]:
        used, experts = weights["experts_used"], weights["experts"]
        lines.append(f"  experts: {weights['expert_bytes']:,} B, {used:g} of {experts} per token; B sequences read "
                     f"1 - (1 - {used:g}/{experts})^B of them")  # fmt: skip
        parts.append(f"{weights['expert_bytes'] * (1 - used / experts):,.0f} (idle experts)")
        batch = " at batch 1"
    lines.append(f"  read per step{batch}: {' - '.join(parts)} = {weights['read_per_step_bytes']:,.0f} B")
    return lines


def predicted_text(document: Document) -> str:
    """The prediction as text, each figure beside its formula."""
    lines = model_lines(document["model"], "Model: ") + cache_lines(document)
    for weights in document["weights"]:
        lines += weights_lines(weights)
    if not document["weights"]:
        lines.append(
            "Weights: not known; --gguf, --safetensors or --weights-bytes give them, and with them memory and ceilings"
        )
    lines += memory_lines(document)
    if document["ceilings"]:
        name, kv_type = plain(document["ceiling_weights"]), document["ceilings"][0]["kv_type"]
        what = "weight bytes read + B x cache of one sequence"
        if document["model"]["state_bytes"]:
            what += " + B x 2 x recurrent state"
        lines.append(f"Bandwidth ceiling, {name}, {kv_type} cache: aggregate tok/s (per user) at batch B")
        lines.append(f"  per user = bandwidth / ({what}); aggregate = B x per user")
        lines += ceiling_lines(document["ceilings"])
    lines += vllm_lines(document)
    return "\n".join(lines) + "\n"


def cache_lines(document: Document) -> list[str]:
    """The cache: per token, and for all slots."""
    model, slots, ctx = document["model"], document["slots"], document["context"]
    bound = ", an upper bound" if model["upper_bound"] else ""
    lines = [f"KV cache for {slots} x {ctx:,} = {slots * ctx:,} tokens{bound}"]
    if model["kv_heads"] is not None:
        lines.append("  bytes per token = 2 x layers x KV heads x head dim x bytes per value; "
                     "cache = that x slots x context")  # fmt: skip
    else:
        lines.append("  bytes per token = sum over layers of (key + value values) x bytes per value")
        lines.append("  cache = slots x (sum over layers of min(context, window) x bytes per token, and state)")
    for row in document["kv"]:
        product = ""
        if model["kv_heads"] is not None:
            shape = f"{model['layers']} x {model['kv_heads']} x {model['head_dim']}"
            product = f" = 2 x {shape} x {row['bytes_per_value']}"
        sizes = f"{row['pool_bytes']:,} B = {row['pool_gib']:.2f} GiB = {row['pool_mib']:.2f} MiB"
        lines.append(f"  {row['kv_type']:<6} {row['bytes_per_token']:>9,} B/token{product:<30}  cache {sizes}")
    different = [row for row in document["kv"] if row["allocated_bytes"] != row["pool_bytes"]]
    if different:
        lines.append(f"  llama-server allocates whole {LLAMA_PAD}s of tokens per slot, and on sliding layers")
        lines.append(f"  min(context, window + ubatch {LLAMA_UBATCH}) of them:")
    for row in different:
        lines.append(f"  {row['kv_type']:<6} {row['allocated_bytes']:,} B = {row['allocated_mib']:.2f} MiB")
    if model["state_bytes"]:
        lines.append(f"  of it recurrent state: {model['state_bytes']:,} B per sequence, whatever its length and the "
                     "cache type")  # fmt: skip
    return lines


def memory_lines(document: Document) -> list[str]:
    """Weights + cache, and whether they fit."""
    lines = ["Weights + KV cache, before compute buffers and graphs"]
    for row in document["memory"]:
        name, memory = row["weights"], row["memory_bytes"]
        text = f"  {plain(name)} + {row['kv_type']}" if name is not None else f"  cache alone, {row['kv_type']}"
        text += f" = {size_text(row['needed_bytes'])}"
        if memory is not None:
            text += f" of {size_text(memory)}: "
            if row["fits"] is None:
                text += f"leaves {size_text(row['left_bytes'])} for the weights, which are not known"
            elif row["fits"]:
                text += f"fits, {size_text(row['left_bytes'])} left for compute buffers, graphs and all else"
            else:
                text += f"does not fit, {size_text(-row['left_bytes'])} short"
            if row["most_slots"] is not None:
                text += f"; at most {row['most_slots']} slots of {document['context']:,} tokens"
        lines.append(text)
    shown = document["weights"] or any(row["memory_bytes"] is not None for row in document["memory"])
    return lines if shown else []


def vllm_lines(document: Document) -> list[str]:
    """vLLM's blocks, tokens and concurrency; the shift between two memory fractions."""
    lines = []
    for row in document["vllm"] or ():
        pool, block, blocks, context = row["available_bytes"], row["block_size"], row["blocks"], row["context"]
        most = f"{blocks:,} / ceil({context:,} / {block}) = {row['max_concurrency']:.2f}x"
        lines.append(f"vLLM with {size_text(pool)} for the cache, {row['kv_type']}")
        lines.append(f"  blocks = floor({pool:,} B / ({block} x {row['bytes_per_token']:,} B)) = {blocks:,}")
        lines.append(f"  tokens = {blocks:,} x {block} = {row['tokens']:,}")
        lines.append(f"  maximum concurrency at {context:,} tokens = {most}")
        if row["kv_type"] not in VLLM_TYPES:
            lines.append(f"  note: {row['kv_type']} is llama.cpp's cache type; vLLM has 16-bit and fp8")
        if not document["model"]["blocks_exact"]:
            lines.append(
                "  note: every layer counted in full; vLLM groups the layers of such a model and may hold more"
            )
    if document["fractions"]:
        facts = document["fractions"]
        first, second = facts["fractions"]
        tokens = ", ".join(f"{count:+,.0f} tokens of {kv_type}" for kv_type, count in facts["shift_tokens"].items())
        shift = f"{size_text(facts['memory_bytes'])} = {facts['shift_bytes'] / GIB:+.2f} GiB ({tokens})"
        lines.append(
            f"vLLM's memory fraction {first:g} -> {second:g}: the cache changes by ({second:g} - {first:g}) x {shift}"
        )
    return lines


def checked_text(document: Document) -> str:
    """Each log beside its prediction; the verdict last."""
    model = document["model"]
    lines = []
    for check in document["checks"]:
        lines.append(f"{check['engine']} log {plain(check['log'])} beside {model['name']} ({model['shape']}, "
                     f"from {plain(model['source'])})")  # fmt: skip
        width = max(len(row["what"]) for row in check["comparisons"])
        for row in check["comparisons"]:
            verdict = {True: "ok", False: "DIFFERS", None: "not judged"}[row["agrees"]]
            figures = f"predicted {row['predicted'] or '-':>14}  log {row['log']:>14}"
            lines.append(f"  {row['what']:<{width}}  {figures}  {verdict}  ({row['how']})")
        lines += [f"  note: {note}" for note in (*check["notes"], *model["notes"])]
    if document["fractions"]:
        lines.append(fractions_line(document["fractions"]))
    differ = {row["what"]: None for check in document["checks"] for row in check["comparisons"]
              if row["agrees"] is False}  # fmt: skip
    if differ:
        advice = ["does not match the prediction: check slots, context, cache type and model"] * bool(
            differ.keys() - {OFFLOAD}
        )
        if OFFLOAD in differ:
            advice.append("the CPU would be measured; use a build with GPU support and -ngl all, or say --cpu-expected")
        lines.append(f"differs: {', '.join(differ)}: {'; '.join(advice)}")
    else:
        judged = any(row["agrees"] for check in document["checks"] for row in check["comparisons"])
        lines.append("agrees with the prediction" if judged else "nothing in the log could be judged")
    return "\n".join(lines) + "\n"


def fractions_line(facts: Document) -> str:
    """The predicted shift beside the two readings."""
    readings, logged = facts["available_gib"], facts["logged_shift_gib"]
    if logged is None:
        return "memory fractions: the logs do not both say 'Available KV cache memory', so there is no shift to compare"
    seen = f"logged {readings[0]:.2f} -> {readings[1]:.2f} GiB = {logged:+.2f} GiB"
    if facts["predicted_shift_gib"] is None:
        return f"memory fractions: {seen}; predicted with --fractions A,B and --memory GIB, the device's memory"
    first, second = facts["fractions"]
    return (f"memory fractions {first:g} -> {second:g}: predicted ({second:g} - {first:g}) x "
            f"{size_text(facts['memory_bytes'])} = {facts['predicted_shift_gib']:+.2f} GiB, {seen} (not judged: each "
            "start measures its own buffers)")  # fmt: skip


def measured_text(document: Document) -> str:
    """Prediction beside measurement."""
    weights, kv_type = document["weights"], document["kv_type"]
    named = [plain(value) for value in document["settings"].values() if value not in (None, "", "unknown")]
    lines = [f"Label {plain(document['label'])}: {', '.join(named)}; slots {document['slots'] or 'not known'}"]
    lines += model_lines(document["model"], "Predicted for ")
    first, *rest = weights_lines(weights)
    lines += [f"{first}; {weights['chosen']}", *rest]
    cache = f"{document['bytes_per_token']:,} B per token" + (
        "" if document["model"]["kv_heads"] else ", windows counted"
    )
    lines.append(f"KV cache {kv_type} ({document['kv_type_from']}): {cache}")
    lines.append("  n = min(c, slots) sequences decode together; context = mean prompt + half of the mean output")
    lines.append("  step = weight bytes that n tokens touch + n x cache of one context (+ n x 2 x recurrent state); "
                 "TPOT = step / bandwidth")  # fmt: skip
    lines.append(
        "  MBU = predicted / measured TPOT p50; tok/s = n / TPOT, the limit if every request were always decoding"
    )
    lines.append(
        "  (prefill and waiting lower the measured one), ctx 100 = that limit at context 100; share = measured / limit"
    )
    fit, knee, operating_point = document["derived"]
    lines.append(f"Fitted: {fit}")
    for machine in document["machines"]:
        lines += machine_lines(machine, document["fitted"], document["bandwidth_stated"])
    lines += [knee, operating_point]
    lines += [f"note: {plain(note)}" for note in document["notes"]]
    return "\n".join(lines) + "\n"


def line_text(line: Document) -> str:
    """A fitted line, and by how much of a level's TPOT it misses it at most.

    >>> line_text({"a_ms": 20, "b_ms": -0.5, "largest_residual": 0.031})
    'TPOT p50 ~ 20.00 ms - 0.500 ms x c (largest residual 3.1 %)'
    """
    sign, residual = "-" if line["b_ms"] < 0 else "+", percent(line["largest_residual"])
    return f"TPOT p50 ~ {line['a_ms']:.2f} ms {sign} {abs(line['b_ms']):.3f} ms x c (largest residual {residual})"


def machine_lines(machine: Document, fitted: Document | None, stated: bool) -> list[str]:
    """Each level beside the limit of one bandwidth, and what the growth is made of."""
    lines = [f"At {machine['bandwidth_gb_per_s']:g} GB/s" + ("" if stated else f" ({machine['machine']})")]
    predicted = machine["predicted"]
    if predicted is not None and fitted is not None:
        pairs = [(name, fitted[name], predicted[name]) for name in ("a_ms", "b_ms")]
        ratios = ", ".join(f"{name[0]} {of / by:.2f}" for name, of, by in pairs if by)
        lines.append(f"  predicted {line_text(predicted)}; fitted / predicted: {ratios}")
    head = ("c", "n", "context", "GB/step", "TPOT ms", "measured", "MBU", "tok/s", "measured", "share", "ctx 100",
            "share")  # fmt: skip
    table = [head]
    for row in machine["levels"]:
        table.append((
            str(row["c"]), str(row["n"]), f"{row['context']:.1f}", f"{row['step_bytes']['total'] / GB:.3f}",
            f"{row['predicted_tpot_ms']:.2f}", figure(row["tpot_ms"], 2), percent(row["mbu"]),
            f"{row['ceiling_tokens_per_s']:.1f}", figure(row["output_tokens_per_s"], 1),
            percent(row["share_of_ceiling"]),
            f"{row['ceiling_at_context_100_tokens_per_s']:.1f}", percent(row["share_at_context_100"]),
        ))  # fmt: skip
    widths = [max(len(cells[column]) for cells in table) for column in range(len(head))]
    lines += ["  " + "  ".join(cell.rjust(width) for cell, width in zip(cells, widths)) for cells in table]
    if machine["above_limit"]:
        above = ", ".join(f"c={c}" for c in machine["above_limit"])
        lines.append(f"  above the bandwidth limit at {above}: an input is wrong (bandwidth, weights, cache "
                     "type, model), or a step yields more than one token or shares a cached prefix")  # fmt: skip
    elif stated:
        lines += growth_lines(machine["growth"], machine["bandwidth_gb_per_s"])
    if len(machine["levels"]) > 1:
        knee = machine["predicted_knee_between"]
        lines.append(f"  knee of the limit alone: {f'between c={knee[0]} and c={knee[1]}' if knee else 'not reached'}")
    return lines


def growth_lines(growth: Document | None, bandwidth: float) -> list[str]:
    """What the growth of TPOT is made of."""
    if growth is None:
        return ["  growth: needs a TPOT at two levels with different n"]
    parts, share = growth["bytes_ms_by_kind"], growth["share"]
    names = {"weights": "weights", "cache": "KV cache", "state": "recurrent state"}
    kinds = ", ".join(f"{names[kind]} {parts[kind]:.2f}" for kind in names if parts[kind] or kind == "cache")
    text = (f"  growth from c={growth['from_c']} to c={growth['to_c']}: TPOT p50 {growth['grown_ms']:+.2f} ms; the "
            f"additional bytes take {growth['bytes_ms']:.2f} ms at {bandwidth:g} GB/s ({kinds})")  # fmt: skip
    if growth["reason"] == "flat":
        return [
            text,
            f"  nothing to explain: it did not grow by {100 * FLAT:.0f} % of the step at c={growth['from_c']}",
        ]
    if growth["reason"] != "beyond":
        of_it = f"mostly bytes read, {100 * share:.0f} % of it" if share <= 1 + FLAT else (
            f"bytes read, more than all of it ({100 * share:.0f} %): the time beyond them shrank"
        )  # fmt: skip
        return [text, f"  {of_it}; the largest part: {names[growth['reason']]}"]
    beyond = (
        "arithmetic, other requests' prefills, kernel launches, sampling or a bandwidth that is not reached; one curve "
        "cannot tell which"
    )
    lines = [text, f"  mostly time beyond the bytes: {beyond}"]
    if share is not None and growth["reached_mbu"] < 1:
        lines.append(f"  at the bandwidth that c={growth['from_c']} reached, the bytes would be "
                     f"{100 * growth['share_at_reached_bandwidth']:.0f} % of it")  # fmt: skip
    return lines


def figure(value: float | None, decimals: int) -> str:
    return "-" if value is None else f"{value:.{decimals}f}"


def percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.1f} %"


# ----------------------------------------------------------------------------------------------------- command line


class Parser(argparse.ArgumentParser):
    """argparse whose errors are one line, raised."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message}; --help lists the options")


def whole_number(text: str, least: int = 1) -> int:
    """A whole number in digits alone, from `least` to 10^15."""
    digits = text.lstrip("0") or "0"
    if not re.fullmatch(r"[0-9]+", text) or len(digits) > 16 or not least <= int(digits) <= MAX_COUNT:
        raise argparse.ArgumentTypeError(f"{text[:40]!r} is not a whole number from {least} to {MAX_COUNT:,}")
    return int(digits)


def byte_count(text: str) -> int:
    return whole_number(text, least=0)


def positive(text: str) -> float:
    """A number above 0 and at most 10^15."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value <= MAX_COUNT or "_" in text:
        raise argparse.ArgumentTypeError(f"{text[:40]!r} is not a number above 0 and up to {MAX_COUNT:,}")
    return value


def bandwidth_list(text: str) -> tuple[Machine, ...]:
    """GB/s, one or several."""
    return tuple(Machine(f"{value:g} GB/s", value) for value in dict.fromkeys(map(positive, text.split(","))))


def two_fractions(text: str) -> tuple[float, float]:
    """vLLM's gpu_memory_utilization of a first and a second start."""
    values = [positive(part) for part in text.split(",")]
    if len(values) != 2 or max(values) > 1:
        raise argparse.ArgumentTypeError(f"{text[:40]!r} is not two fractions of at most 1, such as 0.30,0.40")
    return values[0], values[1]


def kv_type_list(text: str) -> tuple[str, ...]:
    """Cache types, one or several."""
    names = []
    for word in text.split(","):
        name = KV_ALIASES.get(word.strip().lower(), word.strip().lower())
        if name not in KV_TYPES:
            raise argparse.ArgumentTypeError(f"{word!r} is not a cache type; known: {', '.join(KV_TYPES)}, auto")
        names.append(name)
    return tuple(dict.fromkeys(names))


# (group, option, metavar, type, help); a type of bool is a flag, of list one or more values.
ARGUMENTS: tuple[tuple[str, str, str, Any, str], ...] = (
    ("which model", "--config", "PATH", str, "a Hugging Face config.json or its folder"),
    ("which model", "--gguf", "FILE", str, "a GGUF file; only its header is read"),
    ("which model", "--layers", "N", whole_number, "layers with a KV cache"),
    ("which model", "--kv-heads", "N", whole_number, "key/value heads of a layer"),
    ("which model", "--head-dim", "N", whole_number, "values per head"),
    ("which model", "--safetensors", "PATH", str, "weights: a file or folder; only headers are read"),
    ("which model", "--weights-bytes", "N", byte_count, "weights: bytes in memory"),
    ("which model", "--not-read-bytes", "N", byte_count, "of those, bytes that a step does not read"),
    ("which service", "--slots", "N", whole_number, f"sequences served together (default {LAB_SLOTS})"),
    ("which service", "--ctx", "N", whole_number, f"context of one sequence in tokens (default {LAB_CONTEXT})"),
    ("which service", "--kv-type", "TYPE", kv_type_list,
     f"cache type: {', '.join(KV_TYPES)}, auto (the model's own 16 bits)"),
    ("which service", "--bandwidth", "GB/S", bandwidth_list, "memory bandwidth (default: the lab's four machines)"),
    ("which service", "--memory", "GIB", positive, "does it fit this much memory? With --fractions: the device's"),
    ("which service", "--available-kv", "GIB", positive, "vLLM's cache: blocks, tokens, concurrency"),
    ("which service", "--block-size", "N", whole_number,
     f"tokens per block of vLLM's cache (default {BLOCK_SIZE}; larger on a CPU)"),
    ("which service", "--fractions", "A,B", two_fractions, "two memory fractions of vLLM: the shift of its cache"),
    ("against what happened", "--check-log", "FILE", list,
     "compare with a llama-server or vLLM log; two of vLLM also show the fractions' shift"),
    ("against what happened", "--cpu-expected", "", bool, "layers that are not on a GPU are meant to be there"),
    ("against what happened", "--measured", "NOTEBOOK", str, "compare with the levels of a notebook"),
    ("against what happened", "--label", "L", str, "which label of the notebook"),
    ("output", "--json", "", bool, "one JSON object instead of text"),
    ("output", "--version", "", bool, "print the version and leave"),
)  # fmt: skip


def build_parser() -> Parser:
    """The options."""
    parser = Parser(prog=PROGRAM, description=__doc__, add_help=False, allow_abbrev=False,
                    formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    groups = {title: parser.add_argument_group(title) for title in dict.fromkeys(row[0] for row in ARGUMENTS)}
    for title, option, metavar, kind, text in ARGUMENTS:
        if kind is bool:
            groups[title].add_argument(option, action="store_true", help=text)
        elif kind is list:
            groups[title].add_argument(option, nargs="+", metavar=metavar, help=text)
        else:
            groups[title].add_argument(option, type=kind, metavar=metavar, help=text)
    groups["output"].add_argument("-h", "--help", action="store_true", help="print this and leave")
    return parser


# Options that have no use for others: what the first asks is answered without them.
NO_USE = (
    ("check_log", ("bandwidth",)),
    ("measured", ("memory", "ctx", "slots", "available_kv", "block_size", "fractions", "cpu_expected")),
)


def refuse_contradictions(args: argparse.Namespace) -> None:
    """Options that say the same thing twice, or nothing in the mode that was asked for."""
    given = {name for name, value in vars(args).items() if value not in (None, False)}

    def flags(names: Iterable[str]) -> str:
        return " and ".join("--" + name.replace("_", "-") for name in names)

    def of(*names: str) -> list[str]:
        return [name for name in names if name in given]

    shape = of("layers", "kv_heads", "head_dim")
    for which, rivals in (("model", of("config", "gguf") + shape[:1]),
                          ("weights", of("gguf", "safetensors", "weights_bytes"))):  # fmt: skip
        if len(rivals) > 1:
            raise UsageError(f"{flags(rivals)} contradict each other: each says which {which}; keep one")
    if 0 < len(shape) < 3:
        missing = [name for name in ("layers", "kv_heads", "head_dim") if name not in given]
        raise UsageError(f"{flags(shape)} needs {flags(missing)} too")
    if "not_read_bytes" in given and "weights_bytes" not in given:
        raise UsageError("--not-read-bytes needs --weights-bytes")
    if args.weights_bytes is not None and args.weights_bytes <= (args.not_read_bytes or 0):
        raise UsageError(
            f"--weights-bytes {args.weights_bytes} must be above --not-read-bytes {args.not_read_bytes or 0}"
        )
    if len(of("check_log", "measured")) > 1:
        raise UsageError("--check-log and --measured are mutually exclusive")
    if len(of("label", "measured")) == 1:
        raise UsageError("--measured NOTEBOOK and --label L need each other; summarise_load.py --list shows the labels")
    for mode, others in NO_USE:
        if mode in given and of(*others):
            raise UsageError(f"{flags(of(*others)[:1])} cannot be combined with {flags([mode])}")
    if "cpu_expected" in given and "check_log" not in given:
        raise UsageError("--cpu-expected needs --check-log")
    if "block_size" in given and not of("available_kv", "check_log"):
        raise UsageError("--block-size needs --available-kv or --check-log")
    two_logs = len(args.check_log or ()) == 2
    if "check_log" in given and of("memory", "fractions") and not two_logs:
        raise UsageError(f"{flags(of('memory', 'fractions'))} with --check-log needs two logs, one for each fraction")
    if "fractions" in given and "memory" not in given and not two_logs:
        raise UsageError("--fractions needs --memory GIB, the device's memory")


def stated_model(args: argparse.Namespace) -> Model:
    """The model and weights that the options name."""
    if args.gguf is not None:
        return gguf_model(args.gguf)
    folder, config = args.safetensors, args.config
    if config is None and folder is not None and os.path.exists(os.path.join(folder, "config.json")):
        config = folder
    weights: tuple[Weights, ...] = ()
    if args.weights_bytes is not None:
        skipped = (("stated", args.not_read_bytes),) if args.not_read_bytes else ()
        weights = (Weights("stated weights", STATED_BYTES, args.weights_bytes, skipped),)
    elif folder is not None:
        weights = (safetensors_weights(folder, Config(config) if config is not None else None),)
    if args.layers is not None:
        return uniform_model("stated model", "the options", args.layers, args.kv_heads, args.head_dim, weights=weights)
    if config is not None:
        return config_model(config, weights)
    if folder is not None:
        raise UsageError(
            f"no config.json in {folder}: say the shape with --config, or --layers, --kv-heads and --head-dim"
        )
    return replace(lab_model(), weights=weights) if weights else lab_model()


def parse_options(args: argparse.Namespace) -> Options:
    """Checked options. Raises UsageError."""
    refuse_contradictions(args)
    given = any(value not in (None, False) for value in vars(args).values())
    return Options(
        stated_model(args), args.slots, args.ctx, args.kv_type or (), args.bandwidth or (),
        round(args.memory * GIB) if args.memory is not None else None,
        round(args.available_kv * GIB) if args.available_kv is not None else None,
        args.block_size, args.fractions, args.json, tuple(args.check_log or ()), args.cpu_expected, args.measured,
        args.label, not given,
    )  # fmt: skip


def run(options: Options) -> tuple[str, int]:
    """(what to print, exit code)."""
    if options.lab_table:
        return lab_table(), 0
    if options.logs:
        document, view = checked_document(options), checked_text
    elif options.measured is not None:
        document, view = measured_document(options), measured_text
    else:
        document, view = predicted_document(options), predicted_text
    text = json.dumps(null_if_not_finite(document), allow_nan=False) + "\n" if options.as_json else view(document)
    return text, 0 if document.get("agrees", True) else 1


def null_if_not_finite(value: Any) -> Any:
    """A value for strict JSON: a quotient that ran out of a float's range is null.

    >>> null_if_not_finite({"a": [1.5, float("inf")]})
    {'a': [1.5, None]}
    """
    if isinstance(value, Mapping):
        return {key: null_if_not_finite(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [null_if_not_finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def to_devnull(stream: IO[str]) -> None:
    """Give a stream that cannot be written another place to write to, or the interpreter complains when it leaves."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def warn(message: str) -> None:
    """One line on standard error. Where that is closed or full, the exit code alone has to say it."""
    if sys.stderr is None:
        return
    try:
        sys.stderr.write(f"{PROGRAM}: {plain(message)}\n")
        sys.stderr.flush()
    except (OSError, ValueError):
        to_devnull(sys.stderr)


def emit(text: str) -> int:
    """Write to standard output and return the exit code; a reader that has gone away (head) is no error."""
    if sys.stdout is None:
        warn("cannot write the output: standard output is closed")
        return 1
    reconfigure = getattr(sys.stdout, "reconfigure", None)
    if reconfigure is not None:
        reconfigure(errors="backslashreplace")
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except BrokenPipeError:
        to_devnull(sys.stdout)
    except OSError as error:
        to_devnull(sys.stdout)
        warn(f"cannot write the output: {error.strerror or error}")
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
        warn(str(error))
        return 2
    except OverflowError:
        warn("a number in the model's files is implausibly large: is one of them damaged?")
        return 2
    except ResultError as error:
        warn(str(error))
        return 1
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
