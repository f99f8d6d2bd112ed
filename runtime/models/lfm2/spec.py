"""LFM2's `config.json`. Imports no torch.

Most layers have a short convolution in place of attention.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from runtime.checkpoint.config_keys import MAX_LAYERS, MAX_WIDTH
from runtime.checkpoint.json_file import Keys
from runtime.checkpoint.model_spec import WeightSpec
from runtime.checkpoint.rope_json import read_rope
from runtime.models.decoder.recurrent_spec import RecurrentSpec, ShortConvSpec
from runtime.models.decoder.spec import DecoderSpec, DecoderTraits, decoder_fields
from runtime.models.decoder.weight_map import decoder_weights, renamed

TRAITS = DecoderTraits(qk_norm=True)
NORMS = {"input_norm": "operator_norm", "mlp_norm": "ffn_norm"}
# Defaults of `transformers` for absent keys. The readers below hold further defaults.
DEFAULTS = {
    "vocab_size": 65_536,
    "hidden_size": 2560,
    "intermediate_size": 12_288,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 128_000,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": True,
}
# Maps Llama's names of weights to this family's names.
_NAMES = {
    ".self_attn.o_proj.": ".self_attn.out_proj.",
    ".self_attn.q_norm.": ".self_attn.q_layernorm.",
    ".self_attn.k_norm.": ".self_attn.k_layernorm.",
    ".mlp.gate_proj.": ".feed_forward.w1.",
    ".mlp.up_proj.": ".feed_forward.w3.",
    ".mlp.down_proj.": ".feed_forward.w2.",
    "model.norm.": "model.embedding_norm.",
}
_CONV, _FULL = "conv", "full_attention"


@dataclass(frozen=True, kw_only=True)
class Lfm2Spec(DecoderSpec):
    """The sizes and other settings of LFM2.

    Attributes:
        conv: the convolution of the layers in `conv_layers`.
        conv_layers: indices of the layers that have a convolution in place of attention.
    """

    conv: ShortConvSpec
    conv_layers: frozenset[int]

    def recurrence(self, layer_idx: int) -> RecurrentSpec | None:
        """Return the convolution of layer `layer_idx`; `None` if the layer has attention."""
        return self.conv if layer_idx in self.conv_layers else None

    def _list_weights(self) -> Sequence[WeightSpec]:
        return [
            replace(weight, name=renamed(weight.name, _NAMES)) for weight in decoder_weights(self)
        ]


def read(config: Keys, generation: Keys) -> Lfm2Spec:
    """Read the family's `config.json`, as `transformers` writes it.

    Raises:
        StartupError: a number is missing or out of range, or a setting is not supported.
    """
    config = Keys(config.source, {**DEFAULTS, **config.values})
    tied = "tie_embedding" if "tie_embedding" in config.values else "tie_word_embeddings"
    fields = decoder_fields(config, generation, TRAITS)
    rope, context_len = read_rope(config, theta=1e6)
    width = config.integer("conv_L_cache", 64, 3, low=2)
    fields |= {
        "intermediate_size": _intermediate_size(config),
        "rms_norm_eps": config.number("norm_eps", 0.0, 1.0, 1e-5),
        "tie_word_embeddings": config.flag(tied, True),
    }
    return Lfm2Spec(
        **fields,
        rope=rope,
        context_len=context_len,
        norms=NORMS,
        conv=ShortConvSpec(
            channels=fields["hidden_size"],
            width=width,
            has_bias=config.flag("conv_bias", False),
        ),
        conv_layers=_conv_layers(config, fields["num_layers"]),
    )


def _intermediate_size(config: Keys) -> int:
    size = config.integer("intermediate_size", MAX_WIDTH)
    if not config.flag("block_auto_adjust_ff_dim", True):
        return size
    factor = config.number("block_ffn_dim_multiplier", 1e-3, 1e3, 1.0)
    multiple = config.integer("block_multiple_of", MAX_WIDTH, 256)
    return -(-int(factor * int(2 * size / 3)) // multiple) * multiple


def _conv_layers(config: Keys, num_layers: int) -> frozenset[int]:
    kinds = config.values.get("layer_types")
    if kinds is None:
        full = config.values.get("full_attn_idxs")
        if full is None:
            full = list(range(num_layers))
        if not isinstance(full, list) or not all(isinstance(one, int) for one in full):
            raise config.error("full_attn_idxs", "a list of layers")
        return frozenset(range(num_layers)).difference(full)
    known = (_CONV, _FULL)
    is_list = isinstance(kinds, list) and len(kinds) == num_layers
    if not is_list or not all(kind in known for kind in kinds):
        raise config.error("layer_types", f"{num_layers} entries, each {_CONV} or {_FULL}")
    return frozenset(i for i, kind in enumerate(kinds[:MAX_LAYERS]) if kind == _CONV)
