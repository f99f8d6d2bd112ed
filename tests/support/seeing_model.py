"""A small random Qwen2.5-VL with a real tokenizer and chat template.

The tokenizer is that of the bundled demo model. Sizes and template are those of the vision recipe.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

from recipes.demo_vision.shape import (
    TEMPLATE_PATH,
    TINY,
    config_json,
    generation_json,
    preprocessor_json,
    tokenizer_json,
    vision_tokenizer,
)
from tests.support.tiny_models import assert_version_is_safe, randomise, tiny_root

PLACEHOLDER = "<|vision_start|><|image_pad|><|vision_end|>"
QUESTION = "What is in the image?"


@cache
def seeing_model() -> Path:
    """Return the model's folder, created on first use; do not write into it.

    A picture of 112 x 112 pixels takes 16 tokens, one of 224 x 224 takes 64.
    """
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

    assert_version_is_safe()
    folder = tiny_root() / "seeing"
    tokenizer = vision_tokenizer()
    # With an output head of its own, the model does not just repeat the last token.
    options = {**config_json(TINY, tokenizer), "tie_word_embeddings": False}
    model = Qwen2_5_VLForConditionalGeneration(Qwen2_5_VLConfig(**options))
    randomise(model, seed=7, norm=1.0)
    model.float().save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    files = {
        "config.json": {**config, "dtype": "float32"},
        "generation_config.json": generation_json(tokenizer),
        "preprocessor_config.json": preprocessor_json(),
        "tokenizer_config.json": tokenizer_json(
            TEMPLATE_PATH.read_text(), TINY.max_position_embeddings
        ),
    }
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content))
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def prompt_with(num_images: int, question: str = QUESTION) -> str:
    """Return a prompt with images, as the chat template writes it."""
    return (
        "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n"
        f"<|im_start|>user\n{PLACEHOLDER * num_images}{question}<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
