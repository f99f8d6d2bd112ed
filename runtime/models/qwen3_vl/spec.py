"""Qwen3-VL's `config.json`: Qwen3 with a vision tower. Imports no torch.

The decoder's first layers add outputs of the tower's blocks to the residual stream.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from math import isqrt
from typing import Any

from runtime.checkpoint.json_file import Keys
from runtime.checkpoint.model_spec import WeightSpec
from runtime.models.decoder.spec import DecoderSpec, DecoderTraits, read_decoder
from runtime.models.vision.qwen_config import (
    QwenVision,
    QwenVLSpec,
    attention_weights,
    block_indices,
    patch_weight,
    read_sections,
    text_keys,
    tower_fields,
    tower_linear,
    tower_norm,
    vision_keys,
)

TRAITS = DecoderTraits(biases="keyed", qk_norm=True, head_dim=128)
# Defaults of `transformers` for absent keys.
DEFAULTS = {
    "vocab_size": 151_936,
    "hidden_size": 4096,
    "intermediate_size": 22_016,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "max_position_embeddings": 128_000,
    "rope_theta": 5e5,
}
VISION_DEFAULTS = {
    "depth": 27,
    "hidden_size": 1152,
    "hidden_act": "gelu_pytorch_tanh",
    "intermediate_size": 4304,
    "num_heads": 16,
    "patch_size": 16,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "num_position_embeddings": 2304,
    "deepstack_visual_indexes": [8, 16, 24],
}
SECTIONS = (24, 20, 20)
_MAX_POSITIONS = 2**24


@dataclass(frozen=True, kw_only=True)
class Qwen3VLVision(QwenVision):
    """The sizes and other settings of the vision tower.

    Attributes:
        grid_side: side of the square of learned positions, which is stretched over an image.
        deep_blocks: indices of the blocks whose outputs the decoder's first layers add, in order.
    """

    grid_side: int
    deep_blocks: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Qwen3VLSpec(QwenVLSpec):
    """The settings of the decoder and of its vision tower (`vision`)."""

    vision: Qwen3VLVision


def read(config: Keys, generation: Keys) -> Qwen3VLSpec:
    """Read the family's `config.json`, as `transformers` 4 or 5 writes it.

    Raises:
        StartupError: a number is missing or out of range, or a setting is not supported.
    """
    text = text_keys(config, DEFAULTS)
    decoder = read_decoder(text, generation, TRAITS)
    seeing = seeing_fields(config, text, decoder, VISION_DEFAULTS, SECTIONS)
    known = {field.name: getattr(decoder, field.name) for field in fields(decoder)}
    return Qwen3VLSpec(**{**known, **seeing})


def seeing_fields(
    config: Keys,
    text: Keys,
    decoder: DecoderSpec,
    defaults: Mapping[str, Any],
    sections: Sequence[int],
) -> dict[str, Any]:
    """Return the fields that a spec has for its vision tower, in addition to the decoder's.

    Args:
        config: keys of the whole `config.json`.
        text: the keys of the text model.
        decoder: the text model's spec.
        defaults: the family's defaults for absent keys of the tower.
        sections: the family's default for `mrope_section`.

    Raises:
        StartupError: a number is missing or out of range, or a setting is not supported.
    """
    vision_config = vision_keys(config, defaults)
    if vision_config.values["hidden_act"] != "gelu_pytorch_tanh":
        raise vision_config.error("hidden_act", "'gelu_pytorch_tanh'")
    of_tower = tower_fields(config, vision_config, decoder)
    num_positions = vision_config.integer("num_position_embeddings", _MAX_POSITIONS)
    if isqrt(num_positions) ** 2 != num_positions:
        raise vision_config.error("num_position_embeddings", "a square")
    deep = block_indices(vision_config, "deepstack_visual_indexes", of_tower["depth"])
    if len(deep) >= decoder.num_layers:
        raise vision_config.error(
            "deepstack_visual_indexes", f"fewer than the decoder's {decoder.num_layers} layers"
        )
    vision = Qwen3VLVision(
        **of_tower, num_outputs=1 + len(deep), grid_side=isqrt(num_positions), deep_blocks=deep
    )
    rotary_dim = decoder.rotary_dim or decoder.head_dim
    return {
        "raw": config.values,
        "vision": vision,
        "tower_weights": _tower_weights(vision, decoder.hidden_size),
        "rope_axes": _interleaved(read_sections(text, sections, rotary_dim)),
    }


def _interleaved(sections: tuple[int, int, int]) -> tuple[int, ...]:
    """Return the axis of each rotation angle: time, row and column take turns.

    When rows and columns have no angles left, the other angles belong to time.
    """
    axes = [0] * sum(sections)
    for axis in (1, 2):
        for index in range(axis, min(3 * sections[axis], len(axes)), 3):
            axes[index] = axis
    return tuple(axes)


def _tower_weights(vision: Qwen3VLVision, hidden_size: int) -> tuple[WeightSpec, ...]:
    width, inner, merged = vision.width, vision.intermediate_size, vision.merged_width
    patches = "visual.patch_embed.proj.bias"
    positions = "visual.pos_embed.weight"
    weights = [
        patch_weight(vision),
        WeightSpec(patches, (width,), patches, kind="bias"),
        WeightSpec(positions, (vision.grid_side**2, width), positions),
    ]
    for index in range(vision.depth):
        block = f"visual.blocks.{index}"
        weights += tower_norm(f"{block}.norm1", width, bias=True)
        weights += attention_weights(vision, block)
        weights += tower_norm(f"{block}.norm2", width, bias=True)
        weights += tower_linear(f"{block}.mlp.linear_fc1", inner, width)
        weights += tower_linear(f"{block}.mlp.linear_fc2", width, inner)
    mergers = {"visual.merger": width}
    for index in range(len(vision.deep_blocks)):
        mergers[f"visual.deepstack_merger_list.{index}"] = merged
    for name, norm_size in mergers.items():
        weights += tower_norm(f"{name}.norm", norm_size, bias=True)
        weights += tower_linear(f"{name}.linear_fc1", merged, merged)
        weights += tower_linear(f"{name}.linear_fc2", hidden_size, merged)
    return tuple(weights)
