"""The keys of SigLIP's vision tower in `vision_config`. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from runtime.checkpoint.config_keys import MAX_HEADS, MAX_LAYERS, MAX_WIDTH
from runtime.checkpoint.json_file import Keys
from runtime.checkpoint.model_spec import WeightSpec
from runtime.checkpoint.preprocessor_config import MAX_SIDE
from runtime.checkpoint.vision_spec import VisionSpec
from runtime.models.decoder.weight_map import linear_weights
from runtime.models.vision.qwen_config import tower_linear, tower_norm

# Defaults of `transformers` for absent keys.
DEFAULTS = {
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "image_size": 224,
    "patch_size": 16,
}
_ACTIVATION = "gelu_pytorch_tanh"


@dataclass(frozen=True, kw_only=True)
class SiglipVision(VisionSpec):
    """The sizes and other settings of a vision tower.

    Attributes:
        depth: number of blocks.
        width: elements of a patch's vector.
        num_heads: heads of a block's attention.
        intermediate_size: intermediate size of a block's feed-forward part.
        layer_norm_eps: epsilon of every norm.
    """

    depth: int
    width: int
    num_heads: int
    intermediate_size: int
    layer_norm_eps: float

    @property
    def patches_per_side(self) -> int:
        """Number of patches in a row of the image."""
        return self.side // self.patch_size


def siglip_fields(vision: Keys) -> dict[str, Any]:
    """Return the fields of a `SiglipVision` that `vision_config` sets.

    Args:
        vision: keys of `vision_config`, with the defaults for absent keys.

    Raises:
        StartupError: a number is missing or out of range, or a setting is not supported.
    """
    width = vision.integer("hidden_size", MAX_WIDTH)
    num_heads = vision.integer("num_attention_heads", MAX_HEADS)
    if width % num_heads:
        raise vision.error("hidden_size", f"a multiple of {num_heads} attention heads")
    if vision.values.get("hidden_act", _ACTIVATION) != _ACTIVATION:
        raise vision.error("hidden_act", repr(_ACTIVATION))
    if vision.integer("num_channels", 2**10, 3) != 3:
        raise vision.error("num_channels", "3")
    patch_size = vision.integer("patch_size", MAX_SIDE)
    side = vision.integer("image_size", MAX_SIDE)
    if side % patch_size:
        raise vision.error("image_size", f"a multiple of the patch size {patch_size}")
    return {
        "depth": vision.integer("num_hidden_layers", MAX_LAYERS),
        "width": width,
        "num_heads": num_heads,
        "intermediate_size": vision.integer("intermediate_size", MAX_WIDTH),
        "layer_norm_eps": vision.number("layer_norm_eps", 0.0, 1.0, 1e-6),
        "resizing": "square",
        "patch_size": patch_size,
        "side": side,
    }


def siglip_weights(vision: SiglipVision, tower: str) -> list[WeightSpec]:
    """Return the spec of every tensor of a tower; `tower` is the beginning of their names."""
    width, inner, side = vision.width, vision.intermediate_size, vision.patch_size
    patches = f"{tower}.embeddings.patch_embedding"
    positions = f"{tower}.embeddings.position_embedding.weight"
    weights = [
        WeightSpec(f"{patches}.weight", (width, 3, side, side), f"{patches}.weight"),
        WeightSpec(f"{patches}.bias", (width,), f"{patches}.bias", kind="bias"),
        WeightSpec(positions, (vision.patches_per_side**2, width), positions),
    ]
    for index in range(vision.depth):
        block = f"{tower}.encoder.layers.{index}"
        weights += tower_norm(f"{block}.layer_norm1", width, bias=True)
        for shard in "qkv":
            name, target = f"{block}.self_attn.{shard}_proj", f"{block}.self_attn.qkv_proj"
            weights += linear_weights(name, target, (width, width), shard, bias=True)
        weights += tower_linear(f"{block}.self_attn.out_proj", width, width)
        weights += tower_norm(f"{block}.layer_norm2", width, bias=True)
        weights += tower_linear(f"{block}.mlp.fc1", inner, width)
        weights += tower_linear(f"{block}.mlp.fc2", width, inner)
    return weights + tower_norm(f"{tower}.post_layernorm", width, bias=True)
