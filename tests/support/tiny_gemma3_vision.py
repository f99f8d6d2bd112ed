"""A tiny random Gemma 3 that takes images, and the same model in `transformers`."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from runtime.requests.image_input import PreparedImage
from tests.support.tiny_models import (
    ENDOFTEXT_ID,
    IM_END_ID,
    VOCAB_SIZE,
    assert_version_is_safe,
    randomise,
    tiny_root,
    write_tokenizer,
)
from tests.support.tiny_vision import IMAGE_ID, Prompt, Reference, picture, prompt_of

# Number of vectors of a picture of 32 x 32 pixels: 2 x 2 patches are pooled into a vector.
NUM_TOKENS = 16
# Attention windows are shorter than a picture; the tower's heads have size 12.
TEXT: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "query_pre_attn_scalar": 24,
    "max_position_embeddings": 256,
    "sliding_window": 10,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    "rope_parameters": {
        "full_attention": {"rope_type": "default", "rope_theta": 1e5},
        "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
    },
    "bos_token_id": None,
    "eos_token_id": IM_END_ID,
}
TOWER = {
    "model_type": "siglip_vision_model",
    "hidden_size": 36,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 3,
    "image_size": 32,
    "patch_size": 4,
    "vision_use_head": False,
}
IDS = {"image_token_index": IMAGE_ID, "boi_token_index": 502, "eoi_token_index": 503}
PREPROCESSOR = {
    "image_processor_type": "Gemma3ImageProcessor",
    "do_pan_and_scan": None,
    "image_mean": [0.4, 0.5, 0.45],
    "image_std": [0.25, 0.3, 0.2],
    "rescale_factor": 1 / 255,
    "resample": 2,
    "size": {"height": 32, "width": 32},
}


def tiny_gemma3_vision(*, tied: bool = False) -> Path:
    """Return the model's folder, created on first use; do not write into it.

    With `tied`, the output head is the embedding matrix. Such a random model repeats its last token
    for any image.
    """
    return _made(tied)


@cache
def _made(tied: bool) -> Path:
    from transformers import Gemma3Config, Gemma3ForConditionalGeneration

    assert_version_is_safe()
    folder = tiny_root() / f"gemma3-vision-{tied}"
    text = {**TEXT, "tie_word_embeddings": tied}
    options = {"text_config": text, "vision_config": TOWER, "tie_word_embeddings": tied, **IDS}
    config = Gemma3Config(**json.loads(json.dumps(options)), mm_tokens_per_image=NUM_TOKENS)
    model = Gemma3ForConditionalGeneration(config)
    randomise(model, seed=7, norm=0.0)
    model.generation_config.update(eos_token_id=[IM_END_ID, ENDOFTEXT_ID])
    model.save_pretrained(folder)
    write_tokenizer(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps(PREPROCESSOR))
    return folder


def square(seed: int) -> PreparedImage:
    """Return a picture of noise in the tower's size."""
    return picture(4, 4, seed)


ONE, TWO, THREE = square(1), square(2), square(3)
# Prompts with one image, with two, with one at the end, without any, with the same image twice.
PROMPTS = [
    prompt_of(5, ONE, 7, seed=1),
    prompt_of(2, TWO, 1, THREE, 4, seed=2),
    prompt_of(30, TWO, seed=3),
    prompt_of(19, seed=4),
    prompt_of(ONE, ONE, 12, seed=5),
    prompt_of(3, seed=6),
]


class Gemma3Reference(Reference):
    """The same model in `transformers`, in float32."""

    def inputs(self, prompt: Prompt, ids: list[int]) -> dict[str, Tensor]:
        tokens = torch.tensor([ids])
        inputs = {"input_ids": tokens, "token_type_ids": (tokens == IMAGE_ID).long()}
        if prompt.images:
            inputs |= self.pixels([each.image for each in prompt.images])
        return inputs

    def pixels(self, images: list[PreparedImage]) -> dict[str, Tensor]:
        """Return pixels as the model's processor prepares them, without scaling at this size."""
        from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil

        processor = Gemma3ImageProcessorPil(**PREPROCESSOR)
        raw = [np.frombuffer(each.pixels, np.uint8).reshape(each.size) for each in images]
        prepared = processor(raw, input_data_format="channels_first", return_tensors="pt")
        pixels: Tensor = prepared["pixel_values"]
        return {"pixel_values": pixels}

    @torch.inference_mode()
    def features(self, images: list[PreparedImage]) -> list[Tensor]:
        """Return the vectors of each image, `[1, num_tokens, hidden_size]`."""
        found = self.model.model.get_image_features(**self.pixels(images)).pooler_output
        return list(found.unsqueeze(1))
