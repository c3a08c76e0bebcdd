"""Build a tiny Qwen3 checkpoint with random weights, for smoke tests of vLLM and mlx_lm.server on a CPU.

    python tests/engines/tiny_qwen3.py tiny-qwen3
    python tests/engines/tiny_qwen3.py tiny-qwen3 --layers 8 --seed 7

A Hugging Face folder: config.json, model.safetensors, tokenizer, chat template. Architecture `Qwen3ForCausalLM`:
width 128, 2 layers, 4 heads, 2 key-value heads, head dimension 32, untied head, bfloat16, context 8,192; about
1.3 MB. More layers make a step slower, where the engine and not its client is to be measured. The vocabulary is a
byte-level BPE of 1,200 entries, trained on this project's own texts where they lie beside this file and on a text
of its own otherwise. The same seed and the same texts give the same files.

Such a model writes nonsense, but it writes steadily: no token that would end an answer, and none that is not
printable by itself, can win a greedy choice, so that an answer runs to its `max_tokens` and each token can be sent
on as text.

Needs the packages numpy and tokenizers, which both engines bring.
Prints the folder and its size. Exit: 0, or 2 for bad arguments or a folder that cannot be written.
"""

from __future__ import annotations

import argparse
import json
import struct
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

# ---------------------------------------------------------------------------------------------------------------
# The model's shape
# ---------------------------------------------------------------------------------------------------------------

WIDTH = 128
LAYERS = 2
HEADS = 4
KV_HEADS = 2
HEAD_DIM = 32  # among those that vLLM's attention on a CPU knows
FEED_FORWARD = 256
VOCABULARY = 1200
CONTEXT_LENGTH = 8192

END_OF_TEXT, TURN_START, TURN_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
SPECIAL_TOKENS = [END_OF_TEXT, TURN_START, TURN_END]

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)

TEXT_FILES = ("README.md", "load_test.py")

OWN_TEXT = """\
You are the assistant of the team that runs a local inference service. Answer from what the tools report and say
which tool it was. Never restart a server while requests are in flight; ask for the queue first. When a figure is
missing say so, and do not put a zero in its place.
{"name": "read_metrics", "description": "Read the counters of one server", "parameters": {"type": "object",
"properties": {"server": {"type": "string"}, "since_s": {"type": "number"}}, "required": ["server"]}}
{"name": "list_slots", "description": "Show each slot, its state and the context that it holds", "parameters":
{"type": "object", "properties": {"server": {"type": "string"}}, "required": ["server"]}}
The cache of keys and values grows with each token of each running request, and the memory that the weights leave
decides how many requests can run together before one has to wait. Throughput rises with the number of requests in
flight until a step costs more for each of them than it saves by sharing the weights.
"""

# ---------------------------------------------------------------------------------------------------------------
# Tokenizer
# ---------------------------------------------------------------------------------------------------------------


def training_texts(project: Path) -> list[str]:
    """The texts that the vocabulary is trained on, always in the same order."""
    found = [project / name for name in TEXT_FILES if (project / name).is_file()]
    return [OWN_TEXT, *(path.read_text(encoding="utf-8", errors="replace") for path in found)]


def train_tokenizer(texts: list[str]) -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def may_be_written(token: str) -> bool:
    """Whether the model may choose this token: ASCII letters or digits with at most a blank (`Ġ`) before them.
    Anything else is part of a longer character, which a server holds back, or would end the answer.

    >>> may_be_written("Ġthe"), may_be_written("<|im_end|>"), may_be_written("Ã")
    (True, False, False)
    """
    letters = token[1:] if token.startswith("Ġ") else token
    return bool(letters) and letters.isascii() and letters.isalnum()


# ---------------------------------------------------------------------------------------------------------------
# Weights and folder
# ---------------------------------------------------------------------------------------------------------------


def random_weights(writable: list[bool], layers: int, seed: int) -> dict[str, Any]:
    """Tensor name -> float32 array, shaped (outputs, inputs); `writable` says for each token whether it may win."""
    import numpy

    generator = numpy.random.default_rng(seed)

    def matrix(outputs: int, inputs: int) -> Any:
        values = generator.standard_normal((outputs, inputs), dtype=numpy.float32)
        return values / numpy.float32(inputs**0.5)

    def ones(size: int) -> Any:
        return numpy.ones(size, dtype=numpy.float32)

    weights = {"model.embed_tokens.weight": matrix(VOCABULARY, WIDTH)}
    for layer in range(layers):
        prefix = f"model.layers.{layer}"
        weights.update(
            {
                f"{prefix}.input_layernorm.weight": ones(WIDTH),
                f"{prefix}.self_attn.q_proj.weight": matrix(HEADS * HEAD_DIM, WIDTH),
                f"{prefix}.self_attn.k_proj.weight": matrix(KV_HEADS * HEAD_DIM, WIDTH),
                f"{prefix}.self_attn.v_proj.weight": matrix(KV_HEADS * HEAD_DIM, WIDTH),
                f"{prefix}.self_attn.o_proj.weight": matrix(WIDTH, HEADS * HEAD_DIM),
                f"{prefix}.self_attn.q_norm.weight": ones(HEAD_DIM),
                f"{prefix}.self_attn.k_norm.weight": ones(HEAD_DIM),
                f"{prefix}.post_attention_layernorm.weight": ones(WIDTH),
                f"{prefix}.mlp.gate_proj.weight": matrix(FEED_FORWARD, WIDTH),
                f"{prefix}.mlp.up_proj.weight": matrix(FEED_FORWARD, WIDTH),
                f"{prefix}.mlp.down_proj.weight": matrix(WIDTH, FEED_FORWARD),
            }
        )
    weights["model.norm.weight"] = ones(WIDTH)
    head = matrix(VOCABULARY, WIDTH)
    # A row of zeros scores 0, and the best of a thousand random scores is always above that.
    head[[not may_win for may_win in writable]] = 0.0
    weights["lm_head.weight"] = head
    return weights


def safetensors_bytes(weights: dict[str, Any]) -> bytes:
    """The weights as a safetensors file in bfloat16: header length, JSON header, the values one after another."""
    import numpy

    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    parts = []
    start = 0
    for name, values in weights.items():
        bits = values.view(numpy.uint32)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16  # to nearest, ties to even
        part = rounded.astype("<u2").tobytes()
        header[name] = {"dtype": "BF16", "shape": list(values.shape), "data_offsets": [start, start + len(part)]}
        parts.append(part)
        start += len(part)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text + b"".join(parts)


def model_config(tokenizer: Any, layers: int) -> dict[str, Any]:
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": VOCABULARY,
        "hidden_size": WIDTH,
        "intermediate_size": FEED_FORWARD,
        "num_hidden_layers": layers,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "max_position_embeddings": CONTEXT_LENGTH,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "rope_scaling": None,
        "hidden_act": "silu",
        "attention_bias": False,
        "tie_word_embeddings": False,
        "use_sliding_window": False,
        "torch_dtype": "bfloat16",
        "eos_token_id": tokenizer.token_to_id(TURN_END),
        "pad_token_id": tokenizer.token_to_id(END_OF_TEXT),
    }


def write_checkpoint(folder: Path, texts: list[str], layers: int, seed: int) -> None:
    tokenizer = train_tokenizer(texts)
    written = [may_be_written(tokenizer.id_to_token(number) or END_OF_TEXT) for number in range(VOCABULARY)]
    (folder / "model.safetensors").write_bytes(safetensors_bytes(random_weights(written, layers, seed)))
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": TURN_END,
        "pad_token": END_OF_TEXT,
        "model_max_length": CONTEXT_LENGTH,
        "chat_template": CHAT_TEMPLATE,
    }
    for name, content in (("config.json", model_config(tokenizer, layers)), ("tokenizer_config.json", settings)):
        (folder / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


# ---------------------------------------------------------------------------------------------------------------
# Command line
# ---------------------------------------------------------------------------------------------------------------


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("out", metavar="FOLDER", type=Path, help="the folder to write")
    parser.add_argument("--layers", type=int, default=LAYERS, help="number of layers (default %(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="of the random weights (default 1)")
    args = parser.parse_args(argv)
    if args.layers < 1:
        parser.error(f"--layers must be at least 1, not {args.layers}")
    project = Path(__file__).resolve().parent.parent.parent
    try:
        args.out.mkdir(parents=True, exist_ok=True)
        write_checkpoint(args.out, training_texts(project), args.layers, args.seed)
    except ImportError as error:
        parser.exit(2, f"tiny_qwen3: {error}: install the packages numpy and tokenizers\n")
    except OSError as error:
        parser.exit(2, f"tiny_qwen3: cannot write {args.out}: {error.strerror or error}\n")
    size = sum(path.stat().st_size for path in args.out.iterdir() if path.is_file())
    print(f"{args.out}: {size} bytes")
    return 0


if __name__ == "__main__":
    sys.exit(main())
