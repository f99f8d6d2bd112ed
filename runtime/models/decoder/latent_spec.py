"""The `config.json` of decoders with attention over latents (MLA). Imports no torch."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

from runtime.checkpoint.attention_spec import AttentionSpec, LatentAttentionSpec
from runtime.checkpoint.config_keys import MAX_HEAD_DIM, MAX_HEADS, MAX_WIDTH
from runtime.checkpoint.json_file import Keys
from runtime.checkpoint.rope_json import RopeConfig
from runtime.errors import StartupError
from runtime.models.decoder.experts_spec import MAX_EXPERTS, ExpertNames, ExpertsSpec, RouterSpec
from runtime.models.decoder.spec import DecoderSpec, DecoderTraits, read_decoder

TRAITS = DecoderTraits(biases="keyed")
# The kernels over pages support heads of at most 512 latent and 64 rotated elements.
_MAX_RANK = 512
_MAX_ROPE_DIM = 64


@dataclass(frozen=True, kw_only=True)
class LatentDecoderSpec(DecoderSpec):
    """A decoder whose layers keep one latent per token in the KV cache, for all heads.

    Attributes:
        query_rank: size of the latent of queries; 0 if queries are computed from the hidden state.
            The fields after `latent_dim` have the meaning that they have in `LatentAttentionSpec`.
        latent_dim: size of the latent of keys and values.
    """

    query_rank: int
    latent_dim: int
    nope_dim: int
    rope_dim: int
    output_dim: int
    has_split_up: bool = False

    def attention(self, layer_idx: int) -> AttentionSpec:  # noqa: ARG002  # all are alike
        """Return the description of the attention of layer `layer_idx`; all layers are alike."""
        scale = (self.nope_dim + self.rope_dim) ** -0.5
        return LatentAttentionSpec(
            num_heads=self.num_heads,
            num_kv_heads=1,
            head_dim=self.latent_dim + self.rope_dim,
            value_dim=self.latent_dim,
            scale=scale * _stretch(self.rope) ** 2,
            rope=self.rope,
            query_rank=self.query_rank,
            nope_dim=self.nope_dim,
            rope_dim=self.rope_dim,
            output_dim=self.output_dim,
            has_split_up=self.has_split_up,
        )

    def check(self, tp_size: int, *, deterministic: bool) -> None:
        """Refuse options that the model cannot be served with.

        Deterministic inference is refused, because products by heads are not batch-invariant.
        """
        super().check(tp_size, deterministic=deterministic)
        if deterministic:
            raise StartupError(
                f"--enable-deterministic-inference: {self.architecture} has attention over latents "
                "(MLA), whose products by heads are not batch-invariant."
            )


def _stretch(rope: RopeConfig) -> float:
    """Return the factor on queries and keys that YaRN's key `mscale_all_dim` sets."""
    mscale = float(rope.parameters.get("mscale_all_dim", 0.0))
    factor = float(rope.parameters.get("factor", 1.0))
    if rope.scaling != "yarn" or not mscale or factor <= 1:
        return 1.0
    return 0.1 * mscale * math.log(factor) + 1.0


def read_latent_decoder(
    config: Keys, generation: Keys, defaults: dict[str, Any]
) -> LatentDecoderSpec:
    """Read the keys that DeepSeek's families share, except those of the experts.

    Args:
        config: keys of the model's `config.json`.
        generation: keys of `generation_config.json`.
        defaults: values of keys that `config` lacks.

    Raises:
        StartupError: a number is missing or out of range, or a setting is not supported; the
            message names the key.
    """
    values = {**defaults, **config.values}
    config = Keys(config.source, values)
    rope_dim = config.integer("qk_rope_head_dim", _MAX_ROPE_DIM, 64, low=2)
    heads = config.integer("num_attention_heads", MAX_HEADS)
    # `config.json` gives as many key heads as query heads, which is true of expanded keys only.
    read = {**values, "num_key_value_heads": heads, "head_dim": rope_dim}
    spec = read_decoder(Keys(config.source, read), generation, TRAITS)
    query_rank = 0
    if values.get("q_lora_rank") is not None:
        query_rank = config.integer("q_lora_rank", MAX_WIDTH)
    if spec.attention_bias and not query_rank:
        raise config.error("attention_bias", "false where q_lora_rank is null")
    fields = {name: getattr(spec, name) for name in spec.__dataclass_fields__}
    fields["rope"] = replace(spec.rope, interleaved=config.flag("rope_interleave", True))
    extra = config.integer("num_nextn_predict_layers", 64, 0, low=0)
    return LatentDecoderSpec(
        **{**fields, "num_extra_layers": extra},
        query_rank=query_rank,
        latent_dim=config.integer("kv_lora_rank", _MAX_RANK),
        nope_dim=config.integer("qk_nope_head_dim", MAX_HEAD_DIM),
        rope_dim=rope_dim,
        output_dim=config.integer("v_head_dim", MAX_HEAD_DIM),
        # Only GGUF's configuration has this key.
        has_split_up=config.flag("has_split_kv_b_proj", False),
    )


def read_shared_experts(config: Keys, router: RouterSpec, num_layers: int) -> ExpertsSpec | None:
    """Read the settings of the experts of DeepSeek and GLM, whose first layers have none.

    Args:
        config: keys of the model's `config.json`.
        router: the family's fixed settings of the router. The scaling and the groups are read from
            `config` and replace those of `router`.
        num_layers: layers of the model.

    Returns:
        The spec of the experts, or `None` if the model has no experts.

    Raises:
        StartupError: a number is missing or out of range; the message names the key.
    """
    if config.values.get("n_routed_experts") is None:
        return None
    num_experts = config.integer("n_routed_experts", MAX_EXPERTS)
    inner = config.integer("moe_intermediate_size", MAX_WIDTH)
    first = config.integer("first_k_dense_replace", num_layers, 0, low=0)
    if config.values.get("moe_layer_freq", 1) not in (1, [0] * first + [1] * (num_layers - first)):
        raise config.error("moe_layer_freq", "1: experts in every layer after the dense ones")
    groups = config.integer("n_group", num_experts, 1) if config.values.get("n_group") else 1
    chosen_groups = config.integer("topk_group", groups, 1) if groups > 1 else 1
    if num_experts % groups:
        raise config.error("n_group", f"a divisor of {num_experts} experts")
    if groups > 1 and router.group_score == "best_two" and num_experts < 2 * groups:
        raise config.error("n_group", f"at most {num_experts // 2}: two experts in each group")
    router = replace(
        router,
        scaling=config.number("routed_scaling_factor", 0.0, 1e6, 1.0),
        num_groups=groups,
        num_chosen_groups=chosen_groups,
    )
    most = num_experts // groups * chosen_groups
    num_shared = (
        config.integer("n_shared_experts", 64, 0, low=0)
        if (config.values.get("n_shared_experts") is not None)
        else 0
    )
    return ExpertsSpec(
        num_experts=num_experts,
        num_chosen=config.integer("num_experts_per_tok", most),
        intermediate_size=inner,
        layers=frozenset(range(first, num_layers)),
        router=router,
        shared_size=inner * num_shared,
        has_shared_gate=False,
        names=ExpertNames(shared="shared_experts"),
    )
