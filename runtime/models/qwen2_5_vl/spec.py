"""Qwen2.5-VL's `config.json`: Qwen2 with a vision tower. Imports no torch.

Tokens have rotary positions on three axes: time, row and column.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from runtime.checkpoint.config_keys import MAX_WIDTH
from runtime.checkpoint.json_file import Keys
from runtime.checkpoint.model_spec import WeightSpec
from runtime.models.decoder.spec import DecoderTraits, read_decoder
from runtime.models.decoder.weight_map import linear_weights
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

TRAITS = DecoderTraits(biases="qkv", window="switched", default_window=4096)
# Defaults of `transformers` for absent keys.
DEFAULTS = {
    "vocab_size": 152_064,
    "hidden_size": 8192,
    "intermediate_size": 29_568,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "max_position_embeddings": 32_768,
    "max_window_layers": 80,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e6,
}
VISION_DEFAULTS = {
    "depth": 32,
    "hidden_size": 3584,
    "intermediate_size": 3420,
    "num_heads": 16,
    "patch_size": 14,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "window_size": 112,
    "fullatt_block_indexes": [7, 15, 23, 31],
}
SECTIONS = (16, 24, 24)


@dataclass(frozen=True, kw_only=True)
class Qwen2_5_VLVision(QwenVision):  # the family's name
    """The sizes and other settings of the vision tower.

    Attributes:
        window: side, in vectors, of the squares within which most blocks attend.
        full_blocks: indices of the blocks that attend over the whole image.
    """

    window: int
    full_blocks: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Qwen2_5_VLSpec(QwenVLSpec):  # the family's name
    """The settings of the decoder and of its vision tower (`vision`)."""

    vision: Qwen2_5_VLVision


def read(config: Keys, generation: Keys) -> Qwen2_5_VLSpec:
    """Read the family's `config.json`, as `transformers` 4 or 5 writes it.

    Raises:
        StartupError: a number is missing or out of range, or a setting is not supported.
    """
    text = text_keys(config, DEFAULTS)
    decoder = read_decoder(text, generation, TRAITS)
    vision_config = vision_keys(config, VISION_DEFAULTS)
    if vision_config.values.get("hidden_act", "silu") != "silu":
        raise vision_config.error("hidden_act", "'silu'")
    of_tower = tower_fields(config, vision_config, decoder)
    cell = of_tower["patch_size"] * of_tower["merge_size"]
    window = vision_config.integer("window_size", MAX_WIDTH)
    if window < cell:
        raise vision_config.error("window_size", f"at least {cell}, the pixels of one vector")
    vision = Qwen2_5_VLVision(
        **of_tower,
        window=window // cell,
        full_blocks=block_indices(vision_config, "fullatt_block_indexes", of_tower["depth"]),
    )
    known = {field.name: getattr(decoder, field.name) for field in fields(decoder)}
    sections = read_sections(text, SECTIONS, decoder.head_dim)
    return Qwen2_5_VLSpec(
        **{
            **known,
            "raw": config.values,
            "vision": vision,
            "tower_weights": _tower_weights(vision, decoder.hidden_size),
            "rope_axes": tuple(axis for axis, count in enumerate(sections) for _ in range(count)),
        }
    )


def _tower_weights(vision: Qwen2_5_VLVision, hidden_size: int) -> tuple[WeightSpec, ...]:
    width, inner, merged = vision.width, vision.intermediate_size, vision.merged_width
    weights = [patch_weight(vision)]
    for index in range(vision.depth):
        block = f"visual.blocks.{index}"
        weights += tower_norm(f"{block}.norm1", width, bias=False)
        weights += attention_weights(vision, block)
        weights += tower_norm(f"{block}.norm2", width, bias=False)
        for shard in ("gate", "up"):
            name, target = f"{block}.mlp.{shard}_proj", f"{block}.mlp.gate_up_proj"
            weights += linear_weights(name, target, (inner, width), shard, bias=True)
        weights += tower_linear(f"{block}.mlp.down_proj", width, inner)
    weights += tower_norm("visual.merger.ln_q", width, bias=False)
    weights += tower_linear("visual.merger.mlp.0", merged, merged)
    weights += tower_linear("visual.merger.mlp.2", hidden_size, merged)
    return tuple(weights)
