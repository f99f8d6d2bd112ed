"""Tiny random models that take images, prompts with images, and the results of `transformers`."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from functools import cache
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from runtime.checkpoint.vision_spec import VisionSpec
from runtime.models.registry import read_model_spec
from runtime.requests.image_input import ImageInput, PreparedImage
from tests.support.tiny_models import (
    ENDOFTEXT_ID,
    IM_END_ID,
    VOCAB_SIZE,
    assert_version_is_safe,
    randomise,
    tiny_root,
    write_tokenizer,
)

IMAGE_ID = 500
_TEXT = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": None,
    "eos_token_id": IM_END_ID,
}
_IDS = {
    "image_token_id": IMAGE_ID,
    "video_token_id": 501,
    "vision_start_token_id": 502,
    "vision_end_token_id": 503,
}
# The tower's windows have 2 x 2 vectors, and most pictures are not multiples of them. Heads have
# the sizes 16 and 12.
TINY_VISION: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "qwen2_5_vl": (
        "Qwen2_5_VLForConditionalGeneration",
        {
            **_TEXT,
            "rope_parameters": {
                "rope_type": "default", "rope_theta": 1000.0, "mrope_section": [2, 3, 3],
            },
        },
        {
            "depth": 3, "hidden_size": 32, "intermediate_size": 40, "num_heads": 2,
            "out_hidden_size": 64, "patch_size": 4, "window_size": 16,
            "fullatt_block_indexes": [1],
        },
    ),
    "qwen3_vl": (
        "Qwen3VLForConditionalGeneration",
        {
            **_TEXT,
            "head_dim": 32,
            "rope_parameters": {
                "rope_type": "default", "rope_theta": 1000.0, "mrope_section": [6, 5, 5],
            },
        },
        {
            "depth": 4, "hidden_size": 24, "intermediate_size": 40, "num_heads": 2,
            "out_hidden_size": 64, "patch_size": 4, "num_position_embeddings": 25,
            "deepstack_visual_indexes": [0, 2],
        },
    ),
    # RoPE rotates a quarter of each head; the first layer keeps a recurrent state.
    "qwen3_5": (
        "Qwen3_5ForConditionalGeneration",
        {
            **_TEXT,
            "num_hidden_layers": 4,
            "layer_types": [
                *("linear_attention", "full_attention", "linear_attention", "full_attention"),
            ],
            "head_dim": 64,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 16,
            "linear_value_head_dim": 24,
            "rope_parameters": {
                "rope_type": "default", "rope_theta": 1000.0, "mrope_section": [4, 2, 2],
                "partial_rotary_factor": 0.25,
            },
        },
        {
            "depth": 3, "hidden_size": 24, "intermediate_size": 40, "num_heads": 2,
            "out_hidden_size": 64, "patch_size": 4, "num_position_embeddings": 25,
        },
    ),
}  # fmt: skip
PREPROCESSOR = {
    "patch_size": 4, "merge_size": 2, "temporal_patch_size": 2, "min_pixels": 64,
    "max_pixels": 4096, "image_mean": [0.4, 0.5, 0.45], "image_std": [0.25, 0.3, 0.2],
    "rescale_factor": 1 / 255, "resample": 3, "image_processor_type": "Qwen2VLImageProcessor",
}  # fmt: skip


@cache
def tiny_vision(name: str, dtype: str = "float32") -> Path:
    """Return the folder of the variant `name`, created on first use; do not write into it."""
    import transformers

    assert_version_is_safe()
    folder = tiny_root() / f"{name}-{dtype}"
    architecture, text, vision = TINY_VISION[name]
    model_class = getattr(transformers, architecture)
    options = {"text_config": text, "vision_config": vision, "tie_word_embeddings": False, **_IDS}
    config = model_class.config_class(**json.loads(json.dumps(options)))
    model = model_class(config)
    randomise(model, seed=sum(name.encode()), norm=0.0 if name == "qwen3_5" else 1.0)
    model = model.to(getattr(torch, dtype))
    model.generation_config.update(eos_token_id=[IM_END_ID, ENDOFTEXT_ID])
    model.save_pretrained(folder)
    write_tokenizer(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps(PREPROCESSOR))
    return folder


def copy_of(name: str, target: Path) -> Path:
    """Copy the variant `name` to `target`, for tests that change or break it."""
    shutil.copytree(tiny_vision(name), target)
    return target


def pixels(image: PreparedImage) -> Tensor:
    """Return an image's pixels as a tower reads them, `[3, height, width]` uint8."""
    return torch.from_numpy(np.frombuffer(image.pixels, np.uint8).reshape(image.size).copy())


@dataclass(frozen=True)
class Prompt:
    """Token ids of a prompt, and the images that some of them stand for."""

    ids: list[int]
    images: list[ImageInput]


def picture(rows: int, columns: int, seed: int, cell: int = 8) -> PreparedImage:
    """Return a picture of noise with `rows` x `columns` vectors."""
    size = (3, rows * cell, columns * cell)
    pixels = np.random.default_rng(seed).integers(0, 256, size, dtype=np.uint8)
    digest = blake2b(pixels.tobytes() + repr(size).encode(), digest_size=16).digest()
    return PreparedImage(digest, size, rows * columns, pixels.tobytes())


def prompt_of(*parts: int | PreparedImage, seed: int = 0) -> Prompt:
    """Return a prompt of random text tokens and pictures; a number stands for so many tokens."""
    rng = np.random.default_rng(seed)
    ids: list[int] = []
    images: list[ImageInput] = []
    for part in parts:
        if isinstance(part, int):
            ids += rng.integers(3, IMAGE_ID, part).tolist()
            continue
        ids.append(_IDS["vision_start_token_id"])
        images.append(ImageInput(len(ids), part))
        ids += [IMAGE_ID] * part.num_tokens
        ids.append(_IDS["vision_end_token_id"])
    return Prompt(ids, images)


NUM_NEW = 24
WIDE, DOT, TALL, SQUARE = picture(3, 5, 1), picture(1, 1, 2), picture(4, 2, 3), picture(4, 4, 4)
# Prompts with one picture, with several of other sizes, with adjacent ones, and without any.
PROMPTS = [
    prompt_of(5, WIDE, 7, seed=1),
    prompt_of(2, TALL, 1, DOT, 4, WIDE, 3, seed=2),
    prompt_of(SQUARE, DOT, 6, seed=3),
    prompt_of(19, seed=4),
    prompt_of(30, TALL, 12, seed=5),
    prompt_of(3, seed=6),
]


class Reference:
    """The same model in `transformers`, in float32.

    Attributes:
        image_id: the token id that stands for images.
    """

    def __init__(self, folder: Path) -> None:
        from transformers import AutoModelForImageTextToText

        self.model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()
        vision = read_model_spec(folder).vision
        assert vision is not None
        self._vision: VisionSpec = vision
        self.image_id = vision.image_token_id

    def inputs(self, prompt: Prompt, ids: list[int]) -> dict[str, Tensor]:
        """Return the inputs of `forward`, with pixels prepared as by the model's processor."""
        tokens = torch.tensor([ids])
        inputs = {"input_ids": tokens, "mm_token_type_ids": (tokens == self.image_id).int()}
        if prompt.images:
            inputs |= self.pixels([each.image for each in prompt.images])
        return inputs

    def pixels(self, images: list[PreparedImage]) -> dict[str, Tensor]:
        """Return patches in the processor's order, and the sizes of the pictures in patches."""
        from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import (
            Qwen2VLImageProcessorPil,
        )

        vision = self._vision
        processor = Qwen2VLImageProcessorPil()
        mean, std = np.array(vision.mean, np.float32), np.array(vision.std, np.float32)
        patches, grids = [], []
        for image in images:
            raw = np.frombuffer(image.pixels, np.uint8).reshape(image.size).astype(np.float32)
            scaled = (raw * np.float32(vision.rescale_factor) - mean[:, None, None]) / std[
                :, None, None
            ]
            flat, rows, columns = processor.patchify(
                scaled, vision.patch_size, vision.merge_size, 2
            )
            patches.append(torch.from_numpy(np.ascontiguousarray(flat)))
            grids.append([1, rows, columns])
        return {"pixel_values": torch.cat(patches), "image_grid_thw": torch.tensor(grids)}

    @torch.inference_mode()
    def logits(self, prompt: Prompt, ids: list[int] | None = None) -> Tensor:
        """Return the logits of all positions; `ids` may be longer than the prompt."""
        inputs = self.inputs(prompt, ids or prompt.ids)
        logits: Tensor = self.model(**inputs, use_cache=False).logits[0]
        return logits

    @torch.inference_mode()
    def greedy(self, prompt: Prompt, count: int) -> list[int]:
        """Return the `count` tokens that the model generates after a prompt."""
        made = self.model.generate(
            **self.inputs(prompt, prompt.ids),
            attention_mask=torch.ones(1, len(prompt.ids), dtype=torch.int64),
            max_new_tokens=count,
            min_new_tokens=count,
            do_sample=False,
            pad_token_id=0,
            eos_token_id=None,
        )
        tokens: list[int] = made[0, len(prompt.ids) :].tolist()
        return tokens

    @torch.inference_mode()
    def features(self, images: list[PreparedImage]) -> list[Tensor]:
        """Return the vectors of each image, `[num_outputs, num_tokens, hidden_size]`."""
        found = self.model.model.get_image_features(**self.pixels(images))
        deep = getattr(found, "deepstack_features", None) or []
        return [
            torch.stack([each, *(level[index] for level in deep)])
            for index, each in enumerate(found.pooler_output)
        ]
