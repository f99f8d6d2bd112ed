"""Writes model folders without weights, for `--load-format dummy`.

A shape is a model's architecture and sizes, under a name such as "8b". The tokenizer is synthetic:
each token id is one word. So every id decodes to text of a usual length, and a random text has
exactly as many tokens as words.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def _shape(
    architecture: str, sizes: tuple[int, int, int, int], heads: tuple[int, int], **others: Any
) -> dict[str, Any]:
    vocab_size, hidden_size, intermediate_size, num_layers = sizes
    return {
        "architectures": [f"{architecture}ForCausalLM"],
        "model_type": architecture.lower(),
        "vocab_size": vocab_size,
        "hidden_size": hidden_size,
        "intermediate_size": intermediate_size,
        "num_hidden_layers": num_layers,
        "num_attention_heads": heads[0],
        "num_key_value_heads": heads[1],
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "tie_word_embeddings": True,
        **others,
    }


# Qwen1.5-MoE-A2.7B.
_MOE = _shape(
    "Qwen2Moe",
    (151936, 2048, 5632, 24),
    (16, 16),
    model_type="qwen2_moe",
    tie_word_embeddings=False,
    num_experts=60,
    num_experts_per_tok=4,
    moe_intermediate_size=1408,
    shared_expert_intermediate_size=5632,
    decoder_sparse_step=1,
    norm_topk_prob=False,
)

# gpt-oss-20b, its experts in bf16.
_GPT_OSS = _shape(
    "GptOss",
    (201088, 2880, 2880, 24),
    (64, 8),
    model_type="gpt_oss",
    head_dim=64,
    max_position_embeddings=131072,
    rms_norm_eps=1e-5,
    rope_theta=1.5e5,
    tie_word_embeddings=False,
    num_local_experts=32,
    num_experts_per_tok=4,
    sliding_window=128,
)

# "8b" is Llama-3.1-8B, "0.5b" Qwen2.5-0.5B, "135m" SmolLM2-135M (Llama), "0.6b" Qwen3-0.6B.
# "gpt-oss-20b-mxfp4" is "gpt-oss-20b" with experts in MXFP4, as OpenAI publishes them.
# "moe-4" has four layers of "moe", "small" is for a CPU, and "tiny" and "moe-tiny" are for tests.
# The last two shapes return embeddings (`--is-embedding`). The sizes are: vocabulary, hidden size,
# intermediate size, layers. The heads are: query heads, KV heads.
SHAPES: dict[str, dict[str, Any]] = {
    "8b": _shape(
        "Llama",
        (128256, 4096, 14336, 32),
        (32, 8),
        rms_norm_eps=1e-5,
        rope_theta=5e5,
        tie_word_embeddings=False,
    ),
    "0.5b": _shape("Qwen2", (151936, 896, 4864, 24), (14, 2)),
    "0.6b": _shape("Qwen3", (151936, 1024, 3072, 28), (16, 8), head_dim=128),
    "135m": _shape("Llama", (49152, 576, 1536, 30), (9, 3), rms_norm_eps=1e-5, rope_theta=1e5),
    "moe": _MOE,
    "moe-4": {**_MOE, "num_hidden_layers": 4},
    "moe-tiny": {
        **_MOE,
        "vocab_size": 1024,
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_experts": 8,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 64,
    },
    "gpt-oss-20b": _GPT_OSS,
    "gpt-oss-20b-mxfp4": {
        **_GPT_OSS,
        "quantization_config": {
            "quant_method": "mxfp4",
            "modules_to_not_convert": [
                *("model.layers.*.self_attn", "model.layers.*.mlp.router"),
                *("model.embed_tokens", "lm_head"),
            ],
        },
    },
    "small": _shape("Qwen2", (8192, 384, 1024, 8), (6, 2)),
    "tiny": _shape(
        "Qwen2", (1024, 64, 128, 2), (4, 2), max_position_embeddings=2048, rope_theta=1e4
    ),
    "bge-m3": _shape(
        "XLMRoberta",
        (250002, 1024, 4096, 24),
        (16, 16),
        architectures=["XLMRobertaModel"],
        model_type="xlm-roberta",
        max_position_embeddings=8194,
        type_vocab_size=1,
        pad_token_id=1,
        layer_norm_eps=1e-5,
        hidden_act="gelu",
    ),
    "qwen3-embedding-0.6b": _shape("Qwen3", (151669, 1024, 3072, 28), (16, 8), head_dim=128),
}
_END = "<|end|>"
_NUM_BYTES = 256
_CHAT_TEMPLATE = (
    "{% for message in messages %} {{ message['role'] }} {{ message['content'] }}{% endfor %}"
    "{% if add_generation_prompt %} assistant{% endif %}"
)


def write_shape(shape: str, folder: Path) -> Path:
    """Create `folder`, write the `config.json` and the tokenizer of a shape into it, return it."""
    folder.mkdir(parents=True, exist_ok=True)
    vocab_size = SHAPES[shape]["vocab_size"]
    config = {
        "torch_dtype": "bfloat16",
        "hidden_act": "silu",
        "bos_token_id": None,
        "eos_token_id": vocab_size - 1,
        **SHAPES[shape],
    }
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": config["max_position_embeddings"],
        "eos_token": _END,
        "clean_up_tokenization_spaces": False,
        "chat_template": _CHAT_TEMPLATE,
    }
    for name, content in (
        ("config.json", config),
        ("tokenizer.json", _tokenizer(vocab_size)),
        ("tokenizer_config.json", tokenizer_config),
    ):
        (folder / name).write_text(json.dumps(content, ensure_ascii=False), encoding="utf-8")
    return folder


def _tokenizer(vocab_size: int) -> dict[str, Any]:
    byte_level = {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": True,
        "use_regex": True,
    }
    pieces = [*_byte_characters(), *(_word(i) for i in range(vocab_size - _NUM_BYTES - 1))]
    never = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {
        "version": "1.0",
        "added_tokens": [{"id": vocab_size - 1, "content": _END, "special": True, **never}],
        "pre_tokenizer": byte_level,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            # A whole word is looked up in the vocabulary, so the tokenizer needs no merges.
            "ignore_merges": True,
            "vocab": {piece: index for index, piece in enumerate(pieces)},
            "merges": [],
        },
    }


def _byte_characters() -> list[str]:
    # Byte-level BPE represents a byte without a visible character by a character from U+0100 on.
    visible = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    moved = iter(range(_NUM_BYTES, 2 * _NUM_BYTES))
    return [chr(byte if byte in visible else next(moved)) for byte in range(_NUM_BYTES)]


def _word(index: int) -> str:
    letters = ""
    number = index + 26
    while number >= 0:
        letters = chr(ord("a") + number % 26) + letters
        number = number // 26 - 1
    # U+0120 is the space that begins a word.
    return "\u0120" + letters


def main(argv: Sequence[str] | None = None) -> int:
    """Run `headrace bench shape`: write the folder of a shape and print its path."""
    parser = argparse.ArgumentParser(
        prog="headrace bench shape",
        description="Write a model folder without weights, for `serve --load-format dummy`.",
    )
    parser.add_argument("shape", choices=list(SHAPES))
    parser.add_argument("folder", type=Path)
    options = parser.parse_args(argv)
    print(write_shape(options.shape, options.folder))
    return 0


if __name__ == "__main__":
    sys.exit(main())
