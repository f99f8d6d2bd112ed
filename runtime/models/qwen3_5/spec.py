"""The settings of Qwen3.5: Qwen3-Next with other projections. Imports no torch.

The models are dense or have experts, and may take images.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from runtime.checkpoint.json_file import Keys
from runtime.models.decoder.experts_spec import StackedForm, read_qwen_experts
from runtime.models.qwen3_next.spec import Qwen3NextSpec, hybrid_fields
from runtime.models.qwen3_vl import spec as qwen3_vl
from runtime.models.vision.qwen_config import text_keys

# Defaults of `transformers` for absent keys, as of Qwen3.5-9B and Qwen3.5-35B-A3B.
DEFAULTS = {
    "vocab_size": 248_320,
    "hidden_size": 4096,
    "intermediate_size": 12_288,
    "num_hidden_layers": 32,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "max_position_embeddings": 32_768,
}
MOE_DEFAULTS = {
    "vocab_size": 248_320,
    "hidden_size": 2048,
    # Files have no key for this: every layer has experts.
    "intermediate_size": 512,
    "num_hidden_layers": 40,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32_768,
    "num_experts": 256,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "norm_topk_prob": True,
}
VISION_DEFAULTS = {**qwen3_vl.VISION_DEFAULTS, "deepstack_visual_indexes": []}
SECTIONS = (11, 11, 10)
_IMAGE_TOKEN_ID = 248_056


@dataclass(frozen=True, kw_only=True)
class Qwen3_5VLSpec(Qwen3NextSpec, qwen3_vl.Qwen3VLSpec):
    """The settings of the decoder and of the tower."""


def read(config: Keys, generation: Keys) -> Qwen3NextSpec:
    """Read the `config.json` of a dense text model, as `transformers` 5 writes it.

    Raises:
        StartupError: a number is missing or out of range, or a setting is not supported.
    """
    return Qwen3NextSpec(**_text_fields(config, generation, DEFAULTS))


def read_moe(config: Keys, generation: Keys) -> Qwen3NextSpec:
    """Return the settings of a text model with experts; errors are those of `read`."""
    return Qwen3NextSpec(**_text_fields(config, generation, MOE_DEFAULTS))


def read_vision(config: Keys, generation: Keys) -> Qwen3_5VLSpec:
    """Return the settings of a dense model with a vision tower; errors are those of `read`."""
    return _read_vision(config, generation, DEFAULTS)


def read_moe_vision(config: Keys, generation: Keys) -> Qwen3_5VLSpec:
    """Return the settings of a model with experts and a tower; errors are those of `read`."""
    return _read_vision(config, generation, MOE_DEFAULTS)


def _read_vision(config: Keys, generation: Keys, defaults: Mapping[str, Any]) -> Qwen3_5VLSpec:
    config = Keys(config.source, {"image_token_id": _IMAGE_TOKEN_ID, **config.values})
    fields = _text_fields(config, generation, defaults)
    text = text_keys(config, defaults)
    seeing = qwen3_vl.seeing_fields(
        config, text, Qwen3NextSpec(**fields), VISION_DEFAULTS, SECTIONS
    )
    return Qwen3_5VLSpec(**{**fields, **seeing})


def _text_fields(config: Keys, generation: Keys, defaults: Mapping[str, Any]) -> dict[str, Any]:
    text = text_keys(config, defaults)
    fields = hybrid_fields(text, generation)
    fields["delta"] = replace(fields["delta"], has_flat_rows=True)
    if "num_experts" in defaults:
        experts = read_qwen_experts(text, has_shared=True)
        fields["experts"] = replace(experts, stacked=StackedForm(is_optional=True))
    return fields
