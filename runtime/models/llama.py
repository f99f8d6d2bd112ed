"""Llama, and the layers that its descendants share.

The residual stream is one tensor changed in place: each norm adds the previous block's output to
it on the way (`fused_add_rms_norm`). No `nn.Module`: its `__call__` and `__getattr__` cost more
than the arithmetic of a small model's decode step.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from runtime.checkpoint.model_config import ModelConfig
from runtime.models.attention.backend import AttentionLayer
from runtime.models.causal_lm import CausalLM
from runtime.models.forward_batch import ForwardBatch
from runtime.models.layers.build_context import BuildContext
from runtime.models.layers.embedding import Embedding
from runtime.models.layers.linear import Linear, column, heads
from runtime.models.layers.norm import RMSNorm
from runtime.models.layers.parameter import WeightHolder
from runtime.models.layers.rope import cos_sin_table


class LlamaAttention:
    """Self-attention of one layer: fused q/k/v product, the back end, output product."""

    __slots__ = ("attention", "k_norm", "o_proj", "q_norm", "qkv_proj")

    def __init__(
        self, config: ModelConfig, context: BuildContext, layer_idx: int, cos_sin: Tensor
    ) -> None:
        head_dim = config.head_dim
        query = heads("q", config.num_heads, head_dim, context)
        key = heads("k", config.num_kv_heads, head_dim, context)
        value = heads("v", config.num_kv_heads, head_dim, context)
        self.qkv_proj = Linear.column_parallel(
            config.hidden_size, [query, key, value], config.attention_bias, context
        )
        self.o_proj = Linear.row_parallel(
            config.num_heads * head_dim, config.hidden_size, config.output_bias, context
        )
        eps = config.rms_norm_eps
        self.q_norm = RMSNorm(head_dim, eps, context) if config.qk_norm else None
        self.k_norm = RMSNorm(head_dim, eps, context) if config.qk_norm else None
        window = config.layer_window(layer_idx)
        self.attention = AttentionLayer(
            layer_idx=layer_idx,
            num_heads=query.length // head_dim,
            num_kv_heads=key.length // head_dim,
            head_dim=head_dim,
            scale=head_dim**-0.5,
            cos_sin=cos_sin,
            q_norm=None if self.q_norm is None else self.q_norm.weight,
            k_norm=None if self.k_norm is None else self.k_norm.weight,
            eps=eps,
            # A window counts the query's own key, `window_left` does not.
            window_left=-1 if window is None else window - 1,
        )

    def attend(self, hidden: Tensor, batch: ForwardBatch) -> Tensor:
        """Map `[num_tokens, hidden_size]` to what `o_proj` takes, a new tensor."""
        return batch.attention.run(self.attention, self.qkv_proj.apply(hidden), batch)

    def holders(self, prefix: str) -> Iterator[tuple[str, WeightHolder]]:
        """Yield the owners of weights under `prefix`."""
        yield f"{prefix}.qkv_proj", self.qkv_proj
        yield f"{prefix}.o_proj", self.o_proj
        if self.q_norm is not None:
            yield f"{prefix}.q_norm", self.q_norm
        if self.k_norm is not None:
            yield f"{prefix}.k_norm", self.k_norm


class LlamaMLP:
    """Gated feed-forward block."""

    __slots__ = ("down_proj", "gate_up_proj")

    def __init__(self, config: ModelConfig, context: BuildContext) -> None:
        size = config.intermediate_size
        self.gate_up_proj = Linear.column_parallel(
            config.hidden_size,
            [column("gate", size, context), column("up", size, context)],
            config.mlp_bias,
            context,
        )
        self.down_proj = Linear.row_parallel(size, config.hidden_size, config.mlp_bias, context)

    def forward(self, hidden: Tensor) -> Tensor:
        """Map `[num_tokens, hidden_size]` to the same shape, a new tensor."""
        return self.down_proj.apply(self.gate_up_proj.silu_gated(hidden))

    def holders(self, prefix: str) -> Iterator[tuple[str, WeightHolder]]:
        """Yield the owners of weights under `prefix`."""
        yield f"{prefix}.gate_up_proj", self.gate_up_proj
        yield f"{prefix}.down_proj", self.down_proj


class LlamaDecoderLayer:
    """Attention and feed-forward block, each behind its norm."""

    __slots__ = ("input_layernorm", "mlp", "post_attention_layernorm", "self_attn")

    def __init__(
        self, config: ModelConfig, context: BuildContext, layer_idx: int, cos_sin: Tensor
    ) -> None:
        self.self_attn = LlamaAttention(config, context, layer_idx, cos_sin)
        self.mlp = LlamaMLP(config, context)
        size, eps = config.hidden_size, config.rms_norm_eps
        self.input_layernorm = RMSNorm(size, eps, context)
        self.post_attention_layernorm = RMSNorm(size, eps, context)

    def attend(self, hidden: Tensor | None, residual: Tensor, batch: ForwardBatch) -> Tensor:
        """Run the layer's first half, in which tokens see one another.

        Args:
            hidden: `[num_tokens, hidden_size]`, the previous layer's output that `residual` still
                lacks; `None` for the first layer.
            residual: the stream, `[num_tokens, hidden_size]`, changed in place.
            batch: the step.

        Returns:
            `[num_tokens, num_heads * head_dim]`, what `finish` takes.
        """
        if hidden is None:
            hidden = self.input_layernorm.forward(residual)
        else:
            hidden = self.input_layernorm.add_forward(hidden, residual)
        return self.self_attn.attend(hidden, batch)

    def finish(self, attended: Tensor, residual: Tensor) -> Tensor:
        """Run the second half, in which each token is by itself.

        Args:
            attended: `[n, num_heads * head_dim]`, rows of what `attend` returned.
            residual: these rows of the stream, `[n, hidden_size]`, changed in place.

        Returns:
            `[n, hidden_size]`, this layer's output that `residual` still lacks.
        """
        hidden = self.self_attn.o_proj.apply(attended)
        # Its memory is free for the feed-forward block: no caller holds on to it.
        del attended
        hidden = self.post_attention_layernorm.add_forward(hidden, residual)
        return self.mlp.forward(hidden)

    def holders(self, prefix: str) -> Iterator[tuple[str, WeightHolder]]:
        """Yield the owners of weights under `prefix`."""
        yield f"{prefix}.input_layernorm", self.input_layernorm
        yield from self.self_attn.holders(f"{prefix}.self_attn")
        yield f"{prefix}.post_attention_layernorm", self.post_attention_layernorm
        yield from self.mlp.holders(f"{prefix}.mlp")


class LlamaModel:
    """Embeddings, the layers, the last norm."""

    __slots__ = ("embed_tokens", "layers", "norm")

    def __init__(self, config: ModelConfig, context: BuildContext) -> None:
        cos_sin = cos_sin_table(
            config.rope,
            config.head_dim,
            context.max_positions or config.context_len,
            context.device,
        )
        self.embed_tokens = Embedding(
            config.vocab_size, config.hidden_size, context, tied=config.tie_word_embeddings
        )
        self.layers = [
            LlamaDecoderLayer(config, context, layer_idx, cos_sin)
            for layer_idx in range(config.num_layers)
        ]
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, context)

    def forward(self, batch: ForwardBatch) -> Tensor:
        """Return `[num_outputs, hidden_size]`, normed."""
        # A fresh tensor, so the stream may be changed in place.
        residual = self.embed_tokens.forward(batch.input_ids)
        batch.put_embeds(residual)
        hidden: Tensor | None = None
        wanted = batch.logits_indices
        for layer in self.layers if wanted is None else self.layers[:-1]:
            hidden = layer.finish(layer.attend(hidden, residual, batch), residual)
        if wanted is not None:
            # Nobody reads more of the other tokens than the last layer's keys and values.
            last = self.layers[-1]
            attended = last.attend(hidden, residual, batch).index_select(0, wanted)
            residual = residual.index_select(0, wanted)
            if not len(wanted):
                return residual
            hidden = last.finish(attended, residual)
        assert hidden is not None
        return self.norm.add_forward(hidden, residual)

    def holders(self, prefix: str) -> Iterator[tuple[str, WeightHolder]]:
        """Yield the owners of weights under `prefix`."""
        yield f"{prefix}.embed_tokens", self.embed_tokens
        for layer_idx, layer in enumerate(self.layers):
            yield from layer.holders(f"{prefix}.layers.{layer_idx}")
        yield f"{prefix}.norm", self.norm


class LlamaForCausalLM(CausalLM):
    """The decoder and its head."""

    def __init__(self, config: ModelConfig, context: BuildContext) -> None:
        self.config = config
        self.context = context
        self.model = LlamaModel(config, context)
        self._gather = context.gather_columns if context.splits_head(config.vocab_size) else None
        self.lm_head: Linear | None = None
        if not config.tie_word_embeddings:
            sizes = config.hidden_size, config.vocab_size
            if self._gather is None:
                self.lm_head = Linear.replicated(*sizes, False, context)
            else:
                rows = [column("", config.vocab_size, context)]
                self.lm_head = Linear.column_parallel(sizes[0], rows, False, context)

    def forward(self, batch: ForwardBatch) -> Tensor:
        return self.model.forward(batch)

    def score(self, hidden: Tensor) -> Tensor:
        head = self.model.embed_tokens.head if self.lm_head is None else self.lm_head.apply
        assert head is not None, "the weights are not loaded"
        logits = head(hidden)
        return logits if self._gather is None else self._gather(logits)

    def holders(self) -> Iterator[tuple[str, WeightHolder]]:
        yield from self.model.holders("model")
        if self.lm_head is not None:
            yield "lm_head", self.lm_head
