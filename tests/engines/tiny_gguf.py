"""Build a tiny GGUF model with random weights, for smoke tests of a real llama.cpp server on a CPU.

    python tests/engines/tiny_gguf.py tiny.gguf
    python tests/engines/tiny_gguf.py tiny.gguf --seed 7

Architecture `llama`: width 64, 2 layers, 4 heads, 2 key-value heads, head dimension 32, all weights F32, about
1.2 MB. The head dimension is set apart from the width so that every cache type can be tried: llama.cpp's
eight-bit and four-bit caches store blocks of 32 values within one head. The vocabulary is a byte-level BPE of
1,500 entries, trained on this project's own texts where they lie beside this file and on a text of its own
otherwise. The same seed and the same texts give the same file.

Such a model writes nonsense, but it writes steadily: no token that would end an answer, and none that is not
printable by itself, can win, so that an answer runs to its `max_tokens` and each token can be sent on as text.

Needs the packages of the `engines` group: gguf, numpy and tokenizers.
Prints the file's path and size. Exit: 0, or 2 for bad arguments or a file that cannot be written.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

# ---------------------------------------------------------------------------------------------------------------
# The model's shape
# ---------------------------------------------------------------------------------------------------------------

WIDTH = 64
LAYERS = 2
HEADS = 4
KV_HEADS = 2
HEAD_DIM = 32  # a multiple of 32, the block of llama.cpp's quantised caches
FEED_FORWARD = 128
VOCABULARY = 1500
CONTEXT_LENGTH = 32768  # in training, as the file claims: nothing that a smoke test asks for exceeds it
RMS_EPSILON = 1e-5
ROPE_BASE = 10000.0

# ---------------------------------------------------------------------------------------------------------------
# Vocabulary
# ---------------------------------------------------------------------------------------------------------------

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
A local inference service answers many people from one copy of the weights. Each step of its loop reads the
weights once and gives one token to every running request, so the second user costs far less than the first.
What grows with each user is the cache of keys and values: layers times heads times head dimension times two,
for each token of each conversation. The memory left after the weights, divided by that figure, tells how many
requests can run together before somebody has to wait for a slot.
Measure it rather than guess it. Start with one request in flight and look at the time to the first token and
the time for each token after it. Then five, ten and twenty. Where the throughput stops growing with the load,
the curve has its knee; where the slowest tenth of the users leaves the objective, the service has its limit.
A prompt that begins like an earlier one need not be read again, if the engine kept what it computed then. A
single changed word at the front makes all of it new. So keep what is fixed first and what varies last, and
compare with a control of the same length that shares nothing.
"""


def training_texts(project: Path) -> list[str]:
    """The texts that the vocabulary is trained on, always in the same order."""
    found = [project / name for name in TEXT_FILES if (project / name).is_file()]
    return [OWN_TEXT, *(path.read_text(encoding="utf-8", errors="replace") for path in found)]


def train_vocabulary(texts: list[str]) -> tuple[list[str], list[str]]:
    """Token strings by id and the merges in order, both in GPT-2's printable byte alphabet."""
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
    model = json.loads(tokenizer.to_str())["model"]
    ids = {str(token): int(number) for token, number in model["vocab"].items()}
    tokens = sorted(ids, key=ids.__getitem__)
    tokens += [f"<|unused {number}|>" for number in range(len(tokens), VOCABULARY)]
    # Newer versions of the package write a merge as a pair, older ones as "left right".
    merges = [pair if isinstance(pair, str) else " ".join(pair) for pair in model["merges"]]
    return tokens, merges


def is_control(token: str) -> bool:
    return token in SPECIAL_TOKENS or token.startswith("<|unused ")


def may_be_written(token: str) -> bool:
    """Whether the model may choose this token: plain ASCII with at most a blank (`Ġ`) before it. Anything else is
    part of a longer character, which a server holds back, or would end the answer."""
    letters = token[1:] if token.startswith("Ġ") else token
    return bool(letters) and letters.isascii() and letters.isalnum()


# ---------------------------------------------------------------------------------------------------------------
# Weights and file
# ---------------------------------------------------------------------------------------------------------------


def random_weights(tokens: list[str], seed: int) -> dict[str, Any]:
    """Tensor name -> float32 array, shaped (outputs, inputs) as the file format wants them."""
    import numpy

    generator = numpy.random.default_rng(seed)

    def matrix(outputs: int, inputs: int) -> Any:
        values = generator.standard_normal((outputs, inputs), dtype=numpy.float32)
        return values / numpy.float32(inputs**0.5)

    ones = numpy.ones(WIDTH, dtype=numpy.float32)
    weights = {"token_embd.weight": matrix(VOCABULARY, WIDTH)}
    for layer in range(LAYERS):
        weights.update(
            {
                f"blk.{layer}.attn_norm.weight": ones,
                f"blk.{layer}.attn_q.weight": matrix(HEADS * HEAD_DIM, WIDTH),
                f"blk.{layer}.attn_k.weight": matrix(KV_HEADS * HEAD_DIM, WIDTH),
                f"blk.{layer}.attn_v.weight": matrix(KV_HEADS * HEAD_DIM, WIDTH),
                f"blk.{layer}.attn_output.weight": matrix(WIDTH, HEADS * HEAD_DIM),
                f"blk.{layer}.ffn_norm.weight": ones,
                f"blk.{layer}.ffn_gate.weight": matrix(FEED_FORWARD, WIDTH),
                f"blk.{layer}.ffn_up.weight": matrix(FEED_FORWARD, WIDTH),
                f"blk.{layer}.ffn_down.weight": matrix(WIDTH, FEED_FORWARD),
            }
        )
    output = matrix(VOCABULARY, WIDTH)
    # A row of zeros scores 0, and the best of some thousand random scores is always above that.
    output[[not may_be_written(token) for token in tokens]] = 0.0
    weights["output_norm.weight"] = ones
    weights["output.weight"] = output
    return weights


def write_model(path: Path, texts: list[str], seed: int) -> None:
    """Write the GGUF file at `path`, complete or not at all."""
    import gguf

    tokens, merges = train_vocabulary(texts)
    unfinished = path.with_name(f"{path.name}.{os.getpid()}.part")
    writer = gguf.GGUFWriter(unfinished, "llama")
    writer.add_name("load lab tiny random model")
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)
    writer.add_context_length(CONTEXT_LENGTH)
    writer.add_embedding_length(WIDTH)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(FEED_FORWARD)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_key_length(HEAD_DIM)
    writer.add_value_length(HEAD_DIM)
    writer.add_rope_dimension_count(HEAD_DIM)
    writer.add_rope_freq_base(ROPE_BASE)
    writer.add_layer_norm_rms_eps(RMS_EPSILON)
    writer.add_vocab_size(VOCABULARY)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([gguf.TokenType.CONTROL if is_control(t) else gguf.TokenType.NORMAL for t in tokens])
    writer.add_token_merges(merges)
    writer.add_bos_token_id(tokens.index(END_OF_TEXT))
    writer.add_eos_token_id(tokens.index(TURN_END))
    writer.add_add_bos_token(False)
    writer.add_chat_template(CHAT_TEMPLATE)
    for name, values in random_weights(tokens, seed).items():
        writer.add_tensor(name, values)
    try:
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        os.replace(unfinished, path)
    finally:
        unfinished.unlink(missing_ok=True)


# ---------------------------------------------------------------------------------------------------------------
# Command line
# ---------------------------------------------------------------------------------------------------------------


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("out", metavar="OUT.gguf", type=Path, help="the file to write")
    parser.add_argument("--seed", type=int, default=1, help="of the random weights (default 1)")
    args = parser.parse_args(argv)
    project = Path(__file__).resolve().parent.parent.parent
    try:
        write_model(args.out, training_texts(project), args.seed)
    except ImportError as error:
        parser.exit(2, f"tiny_gguf: {error}: install the packages gguf, numpy and tokenizers\n")
    except OSError as error:
        parser.exit(2, f"tiny_gguf: cannot write {args.out}: {error.strerror or error}\n")
    print(f"{args.out}: {args.out.stat().st_size} bytes")
    return 0


if __name__ == "__main__":
    sys.exit(main())
