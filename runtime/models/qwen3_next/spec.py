"""Qwen3-Next's `config.json`. Imports no torch.

Three of four layers have linear attention. The others have attention with a gate. All have experts.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from runtime.checkpoint.attention_spec import AttentionSpec
from runtime.checkpoint.config_keys import MAX_HEAD_DIM, MAX_HEADS, MAX_LAYERS
from runtime.checkpoint.json_file import Keys
from runtime.checkpoint.rope_json import read_partial_rope
from runtime.models.decoder.experts_spec import read_qwen_experts
from runtime.models.decoder.recurrent_spec import DeltaNetSpec, RecurrentSpec
from runtime.models.decoder.spec import DecoderSpec, DecoderTraits, silu_decoder_fields

TRAITS = DecoderTraits(biases="keyed", qk_norm=True, head_dim=256)
# Defaults of `transformers` for absent keys. `TRAITS` and the readers below hold further defaults.
DEFAULTS = {
    "vocab_size": 151_936,
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_hidden_layers": 48,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32_768,
    "num_experts": 512,
    "num_experts_per_tok": 10,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "norm_topk_prob": True,
}
_LINEAR, _FULL = "linear_attention", "full_attention"


@dataclass(frozen=True, kw_only=True)
class Qwen3NextSpec(DecoderSpec):
    """The sizes and other settings of Qwen3-Next.

    Attributes:
        delta: the linear attention of the layers in `delta_layers`.
        delta_layers: indices of the layers that have linear attention.
    """

    delta: DeltaNetSpec
    delta_layers: frozenset[int]

    def recurrence(self, layer_idx: int) -> RecurrentSpec | None:
        """Return the linear attention of layer `layer_idx`.

        `None` if the layer has full attention.
        """
        return self.delta if layer_idx in self.delta_layers else None

    def attention(self, layer_idx: int) -> AttentionSpec:
        """Return the description of the attention of layer `layer_idx`, which has a gate."""
        return replace(super().attention(layer_idx), has_gate=True)

    def is_ignored(self, name: str) -> bool:
        """Whether the checkpoint's tensor `name` is not needed.

        Layers that predict further tokens are not used.
        """
        return name.startswith("mtp.") or super().is_ignored(name)


def read(config: Keys, generation: Keys) -> Qwen3NextSpec:
    """Read the family's `config.json`, as `transformers` 4 or 5 writes it.

    Raises:
        StartupError: a number is missing or out of range, or a setting is not supported.
    """
    config = Keys(config.source, {**DEFAULTS, **config.values})
    experts = read_qwen_experts(config, has_shared=True)
    return Qwen3NextSpec(**hybrid_fields(config, generation), experts=experts)


def hybrid_fields(config: Keys, generation: Keys) -> dict[str, Any]:
    """Return the fields of a `Qwen3NextSpec`, except those of its experts.

    Raises:
        StartupError: a number is missing or out of range, or a setting is not supported.
    """
    fields = silu_decoder_fields(config, generation, TRAITS)
    rope, context_len, rotary_dim = read_partial_rope(config, fields["head_dim"], 0.25)
    return {
        **fields,
        "rope": rope,
        "context_len": context_len,
        "zero_centered_norms": True,
        "delta": _read_delta(config, fields["rms_norm_eps"]),
        "delta_layers": _delta_layers(config, fields["num_layers"]),
        "rotary_dim": rotary_dim,
        "num_extra_layers": config.integer("num_nextn_predict_layers", MAX_LAYERS, 0, low=0),
    }


def _read_delta(config: Keys, eps: float) -> DeltaNetSpec:
    # The two flags at the end are written by `runtime.checkpoint.gguf` alone.
    num_keys = config.integer("linear_num_key_heads", MAX_HEADS, 16)
    num_values = config.integer("linear_num_value_heads", MAX_HEADS, 32)
    if num_values % num_keys:
        raise config.error("linear_num_value_heads", f"a multiple of {num_keys} key heads")
    return DeltaNetSpec(
        num_key_heads=num_keys,
        num_value_heads=num_values,
        key_dim=config.integer("linear_key_head_dim", MAX_HEAD_DIM, 128),
        value_dim=config.integer("linear_value_head_dim", MAX_HEAD_DIM, 128),
        width=config.integer("linear_conv_kernel_dim", 64, 4, low=2),
        eps=eps,
        has_flat_rows=config.flag("has_flat_rows", False),
        has_tiled_outputs=config.flag("has_tiled_value_heads", False) and num_values != num_keys,
    )


def _delta_layers(config: Keys, num_layers: int) -> frozenset[int]:
    kinds = config.values.get("layer_types")
    if kinds is None:
        interval = config.integer("full_attention_interval", MAX_LAYERS, 4)
        return frozenset(i for i in range(num_layers) if (i + 1) % interval)
    known = (_LINEAR, _FULL)
    is_list = isinstance(kinds, list) and len(kinds) == num_layers
    if not is_list or not all(kind in known for kind in kinds):
        raise config.error("layer_types", f"{num_layers} entries, each {_LINEAR} or {_FULL}")
    return frozenset(i for i, kind in enumerate(kinds) if kind == _LINEAR)
