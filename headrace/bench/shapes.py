"""Model folders without weights: named shapes for `--load-format dummy`.

The tokenizer is made up as well, one word an id, so that every id decodes to text of a usual length
and random text has exactly as many tokens as words.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

_LLAMA = {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
_QWEN2 = {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}

# "8b" is Llama-3.1-8B, "0.5b" Qwen2.5-0.5B; "small" is for a CPU and "tiny" for a test.
SHAPES: dict[str, dict[str, Any]] = {
    "8b": {
        **_LLAMA,
        "vocab_size": 128256,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
        "rope_theta": 5e5,
        "tie_word_embeddings": False,
    },
    "0.5b": {
        **_QWEN2,
        "vocab_size": 151936,
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "tie_word_embeddings": True,
    },
    "small": {
        **_QWEN2,
        "vocab_size": 8192,
        "hidden_size": 384,
        "intermediate_size": 1024,
        "num_hidden_layers": 8,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "tie_word_embeddings": True,
    },
    "tiny": {
        **_QWEN2,
        "vocab_size": 1024,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e4,
        "tie_word_embeddings": True,
    },
}
_END = "<|end|>"
_NUM_BYTES = 256
_CHAT_TEMPLATE = (
    "{% for message in messages %} {{ message['role'] }} {{ message['content'] }}{% endfor %}"
    "{% if add_generation_prompt %} assistant{% endif %}"
)


def write_shape(shape: str, folder: Path) -> Path:
    """Write `config.json` and a tokenizer of the shape into `folder`, which is made."""
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
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {
                "id": vocab_size - 1,
                "content": _END,
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": True,
            }
        ],
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            # A word of the vocabulary is taken whole, so no merges are needed.
            "ignore_merges": True,
            "vocab": {piece: index for index, piece in enumerate(pieces)},
            "merges": [],
        },
    }


def _byte_characters() -> list[str]:
    # The printable stand-ins of byte-level BPE: bytes that are no visible character move up.
    visible = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    moved = iter(range(_NUM_BYTES, 2 * _NUM_BYTES))
    return [chr(byte if byte in visible else next(moved)) for byte in range(_NUM_BYTES)]


def _word(index: int) -> str:
    letters = ""
    number = index + 26
    while number >= 0:
        letters = chr(ord("a") + number % 26) + letters
        number = number // 26 - 1
    # U+0120 is the stand-in of the space that begins a word.
    return "\u0120" + letters


def main(argv: Sequence[str] | None = None) -> int:
    """Write a folder; the path is printed."""
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
