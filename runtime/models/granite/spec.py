"""The `config.json` of Granite 3 and 4: Llama with four scale factors. Imports no torch.

Models may have experts, and most layers of a hybrid have Mamba 2 in place of attention.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

from runtime.checkpoint.config_keys import MAX_HEAD_DIM, MAX_HEADS, MAX_WIDTH
from runtime.checkpoint.json_file import Keys
from runtime.checkpoint.model_spec import WeightSpec
from runtime.models.decoder.experts_spec import (
    MAX_EXPERTS,
    ExpertNames,
    ExpertsSpec,
    RouterSpec,
    StackedForm,
)
from runtime.models.decoder.recurrent_spec import Mamba2Spec, RecurrentSpec, check_time_steps
from runtime.models.decoder.spec import DecoderSpec, DecoderTraits, read_decoder
from runtime.models.decoder.weight_map import decoder_weights, renamed

TRAITS = DecoderTraits(biases="keyed", has_mlp_bias=True)
DEFAULTS = {"max_position_embeddings": 2048}
_MOST = 1e6
# Defaults of `transformers` for absent keys of a hybrid; the readers below have the others.
HYBRID_DEFAULTS = {
    **DEFAULTS,
    "vocab_size": 32_000,
    "hidden_size": 4096,
    "intermediate_size": 11_008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "shared_intermediate_size": 1024,
}
# Maps Llama's names of weights to a hybrid's names.
_HYBRID_NAMES = {
    ".block_sparse_moe.shared_expert.gate_up_proj.": ".shared_mlp.input_linear.",
    ".block_sparse_moe.shared_expert.down_proj.": ".shared_mlp.output_linear.",
    ".mlp.gate_up_proj.": ".shared_mlp.input_linear.",
    ".mlp.down_proj.": ".shared_mlp.output_linear.",
    # In GGUF files gate and up are separate.
    ".block_sparse_moe.shared_expert.": ".shared_mlp.",
    ".mlp.": ".shared_mlp.",
}
# The names of the two kinds of layers in `transformers` 4 and 5.
_MAMBA, _FULL = ("mamba", "linear_attention"), ("attention", "full_attention")


@dataclass(frozen=True, kw_only=True)
class GraniteHybridSpec(DecoderSpec):
    """The sizes and other settings of a hybrid.

    Attributes:
        mamba: the recurrence of the layers in `mamba_layers`.
        mamba_layers: indices of the layers that have a recurrence in place of attention.
    """

    mamba: Mamba2Spec
    mamba_layers: frozenset[int]

    def recurrence(self, layer_idx: int) -> RecurrentSpec | None:
        """Return the Mamba 2 recurrence of layer `layer_idx`; `None` if it has none."""
        return self.mamba if layer_idx in self.mamba_layers else None

    def _list_weights(self) -> Sequence[WeightSpec]:
        return [
            replace(weight, name=renamed(weight.name, _HYBRID_NAMES))
            for weight in decoder_weights(self)
        ]


def read(config: Keys, generation: Keys) -> DecoderSpec:
    """Return the settings of a dense Granite.

    Raises:
        StartupError: a setting in `config.json` is missing or not supported.
    """
    config = Keys(config.source, {**DEFAULTS, **config.values})
    spec = read_decoder(config, generation, TRAITS)
    return replace(
        spec,
        embedding_scale=config.number("embedding_multiplier", 0.0, _MOST, 1.0),
        residual_scale=config.number("residual_multiplier", 0.0, _MOST, 1.0),
        query_scale=config.number("attention_multiplier", 0.0, _MOST, 1.0),
        logit_scale=1.0 / config.number("logits_scaling", 1.0 / _MOST, _MOST, 1.0),
    )


def read_moe(config: Keys, generation: Keys) -> DecoderSpec:
    """Return the settings of a Granite with experts.

    Raises:
        StartupError: a setting in `config.json` is missing or not supported.
    """
    spec = replace(read(config, generation), mlp_bias=False)
    return replace(spec, experts=_read_experts(config, spec))


def read_hybrid(config: Keys, generation: Keys) -> GraniteHybridSpec:
    """Read the `config.json` of a Granite 4 with Mamba 2, dense or with experts.

    Raises:
        StartupError: a number is missing or out of range, or a setting is not supported.
    """
    config = Keys(config.source, {**HYBRID_DEFAULTS, **config.values})
    is_fused = not _is_gguf(config)
    spec = replace(read(config, generation), mlp_bias=False, fused_gate_up=is_fused)
    shared_size = config.integer("shared_intermediate_size", MAX_WIDTH)
    if config.integer("num_local_experts", MAX_EXPERTS, 8, low=0):
        experts = replace(
            _read_experts(config, spec),
            shared_size=shared_size,
            has_shared_gate=False,
            fused_shared=is_fused,
        )
        spec = replace(spec, experts=experts)
    else:
        spec = replace(spec, intermediate_size=shared_size)
    kind = config.values.get("position_embedding_type")
    if kind not in ("rope", "nope", None):
        raise config.error("position_embedding_type", "'rope' or 'nope'")
    if kind != "rope":
        spec = replace(spec, unrotated_layers=frozenset(range(spec.num_layers)))
    known = {field.name: getattr(spec, field.name) for field in fields(spec)}
    return GraniteHybridSpec(
        **known,
        mamba=_read_mamba(config, spec),
        mamba_layers=_mamba_layers(config, spec.num_layers),
    )


def _read_experts(config: Keys, spec: DecoderSpec) -> ExpertsSpec:
    stacked = StackedForm(gate_up="input_linear.weight", down="output_linear.weight")
    num_experts = config.integer("num_local_experts", MAX_EXPERTS, 8)
    return ExpertsSpec(
        num_experts=num_experts,
        num_chosen=config.integer("num_experts_per_tok", num_experts, 2),
        intermediate_size=spec.intermediate_size,
        layers=frozenset(range(spec.num_layers)),
        # A softmax over the chosen logits equals the softmax over all logits, scaled to a sum of
        # one.
        router=RouterSpec(sums_to_one=True),
        names=ExpertNames(block="block_sparse_moe", router="router.layer"),
        stacked=None if _is_gguf(config) else stacked,
    )


def _is_gguf(config: Keys) -> bool:
    # A GGUF file stores the gate and up matrices as separate tensors.
    return config.mapping("quantization_config").get("quant_method") == "gguf"


def _read_mamba(config: Keys, spec: DecoderSpec) -> Mamba2Spec:
    heads = config.integer("mamba_n_heads", MAX_HEADS, 128)
    inner = config.integer("mamba_expand", MAX_HEADS, 2) * spec.hidden_size
    found = config.values.get("mamba_d_head")
    if inner % heads or found not in (None, "auto", inner // heads):
        raise config.error("mamba_d_head", f"{inner} elements divided by {heads} heads")
    groups = config.integer("mamba_n_groups", MAX_HEADS, 1)
    if heads % groups:
        raise config.error("mamba_n_groups", f"a divisor of {heads} heads")
    check_time_steps(config)
    return Mamba2Spec(
        num_groups=groups,
        num_heads=heads,
        head_dim=inner // heads,
        state_dim=config.integer("mamba_d_state", MAX_HEAD_DIM, 256),
        width=config.integer("mamba_d_conv", 64, 4, low=2),
        eps=spec.rms_norm_eps,
        has_conv_bias=config.flag("mamba_conv_bias", True),
        has_bias=config.flag("mamba_proj_bias", False),
    )


def _mamba_layers(config: Keys, num_layers: int) -> frozenset[int]:
    kinds = config.values.get("layer_types", config.values.get("layers_block_type"))
    if kinds is None:
        return frozenset(range(num_layers))
    is_list = isinstance(kinds, list) and len(kinds) == num_layers
    if not is_list or not all(kind in (*_MAMBA, *_FULL) for kind in kinds):
        raise config.error("layer_types", f"{num_layers} entries, each mamba or attention")
    return frozenset(i for i, kind in enumerate(kinds) if kind in _MAMBA)
