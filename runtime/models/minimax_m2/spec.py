"""The `config.json` of MiniMax M2. Imports no torch.

A sigmoid scores the experts. One norm covers all heads of q, and one all heads of k.
"""

from __future__ import annotations

from runtime.checkpoint.config_keys import MAX_HEAD_DIM
from runtime.checkpoint.json_file import Keys
from runtime.checkpoint.rope_json import read_partial_rope
from runtime.models.decoder.experts_spec import (
    MAX_EXPERTS,
    MAX_EXPERTS_OF_MODEL,
    ExpertNames,
    ExpertsSpec,
    RouterSpec,
)
from runtime.models.decoder.spec import DecoderSpec, DecoderTraits, silu_decoder_fields

TRAITS = DecoderTraits(qk_norm=True, head_dim=128)
NAMES = ExpertNames(
    block="block_sparse_moe",
    correction="e_score_correction_bias",
    gate="w1",
    up="w3",
    down="w2",
)
# Defaults of `transformers` for absent keys.
DEFAULTS = {
    "num_key_value_heads": 8,
    "max_position_embeddings": 196_608,
    "rope_theta": 5_000_000.0,
    "num_experts_per_tok": 8,
    "num_local_experts": 256,
    "bos_token_id": 200_034,
    "eos_token_id": 200_020,
}
# The only supported values of keys that change results; `transformers` has no others either.
_ONLY = {
    "scoring_func": "sigmoid",
    "use_routing_bias": True,
    "use_qk_norm": True,
    "qk_norm_type": "per_layer",
    "shared_intermediate_size": 0,
}
_MAX_EXTRA_LAYERS = 64


def read(config: Keys, generation: Keys) -> DecoderSpec:
    """Read the family's `config.json`, as it was published or as `transformers` 5 writes it.

    Raises:
        StartupError: a number is missing or out of range, or a setting is not supported.
    """
    config = Keys(config.source, {**DEFAULTS, **config.values})
    for key, only in _ONLY.items():
        if config.values.get(key, only) != only:
            raise config.error(key, repr(only))
    fields = silu_decoder_fields(config, generation, TRAITS)
    num_layers, head_dim = fields["num_layers"], fields["head_dim"]
    # Published files give the number of rotated elements of a head, not their share.
    rotated = config.integer("rotary_dim", MAX_HEAD_DIM, head_dim)
    rope, context_len, rotary_dim = read_partial_rope(config, head_dim, rotated / head_dim)
    num_experts = config.integer("num_local_experts", MAX_EXPERTS)
    if num_layers * num_experts > MAX_EXPERTS_OF_MODEL:
        limit = f"at most {MAX_EXPERTS_OF_MODEL} experts in all layers together"
        raise config.error("num_local_experts", limit)
    return DecoderSpec(
        **fields,
        rope=rope,
        context_len=context_len,
        rotary_dim=rotary_dim,
        has_joint_qk_norm=True,
        num_extra_layers=config.integer("num_mtp_modules", _MAX_EXTRA_LAYERS, 0, low=0),
        experts=ExpertsSpec(
            num_experts=num_experts,
            num_chosen=config.integer("num_experts_per_tok", num_experts),
            intermediate_size=fields["intermediate_size"],
            layers=frozenset(range(num_layers)),
            router=RouterSpec(
                score="sigmoid", sums_to_one=True, has_correction=True, is_precise=True
            ),
            names=NAMES,
        ),
    )
