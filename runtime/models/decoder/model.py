"""Decoders: Llama and the families that `DecoderSpec` describes by settings.

The residual stream is one tensor that is changed in place. A layer's output is added to it by the
next norm, in the same kernel (`fused_add_rms_norm`). The classes are not `nn.Module`s:
`nn.Module.__call__` and `__getattr__` cost more than the arithmetic of a small model's decode step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import ClassVar

import torch
from torch import Tensor

from kernels.rounding import Activations, Rounding, act_and_mul_rounded
from runtime.checkpoint.attention_spec import LatentAttentionSpec
from runtime.models.attention.backend import AttentionLayer
from runtime.models.attention.forward_batch import ForwardBatch
from runtime.models.decoder.latent_attention import LatentAttention
from runtime.models.decoder.recurrent_spec import DeltaNetSpec, Mamba2Spec, ShortConvSpec
from runtime.models.decoder.spec import DecoderSpec
from runtime.models.layers.build_context import BuildContext
from runtime.models.layers.delta_net import DeltaNet
from runtime.models.layers.embedding import Embedding
from runtime.models.layers.gated_attention import GatedAttention
from runtime.models.layers.joint_norm import JointNorm
from runtime.models.layers.kv_scales import KvScales
from runtime.models.layers.linear import Linear, column, heads, spanned
from runtime.models.layers.mamba2 import Mamba2
from runtime.models.layers.mixer import Mixer
from runtime.models.layers.mixture import SharedExpert, SparseMLP
from runtime.models.layers.norm import LayerNorm, RMSNorm, add_normed
from runtime.models.layers.parameter import WeightHolder, WeightShard
from runtime.models.layers.rope import RopeTables
from runtime.models.layers.short_conv import ShortConv
from runtime.models.layers.ungated_mlp import UngatedBlock
from runtime.models.layers.vector import Vector
from runtime.models.model import CausalLM


class DecoderAttention(Mixer):
    """Self-attention of one layer: a fused q/k/v product, the back end and the output product."""

    __slots__ = (
        "attention",
        "joint_norm",
        "k_norm",
        "kv_scales",
        "q_norm",
        "qkv_proj",
        "query_scales",
        "sinks",
    )

    name = "self_attn"

    def __init__(
        self, spec: DecoderSpec, context: BuildContext, layer_idx: int, ropes: RopeTables
    ) -> None:
        of_layer = spec.attention(layer_idx)
        head_dim = of_layer.head_dim
        query = heads("q", of_layer.num_heads, head_dim, context)
        key = heads("k", of_layer.num_kv_heads, head_dim, context)
        value = heads("v", of_layer.num_kv_heads, head_dim, context)
        outputs, hidden, bias = [query, key, value], spec.hidden_size, spec.attention_bias
        if spec.fused_qkv:
            outputs = [spanned("", tuple(each.size for each in outputs), context)]
        self.qkv_proj = Linear.column_parallel(hidden, outputs, bias, context)
        self.o_proj = Linear.row_parallel(
            of_layer.num_heads * head_dim, spec.hidden_size, spec.output_bias, context
        )
        has_head_norms = spec.qk_norm and not spec.has_joint_qk_norm
        self.q_norm = _norm(spec, head_dim, context) if has_head_norms else None
        self.k_norm = _norm(spec, head_dim, context) if has_head_norms else None
        self.joint_norm: JointNorm | None = None
        if spec.has_joint_qk_norm:
            self.joint_norm = JointNorm(query, key, spec.rms_norm_eps, context)
        growth = of_layer.position_scale
        # A norm of each head would undo scales that are applied before it.
        assert growth is None or not has_head_norms, "queries with norms of heads do not grow"
        self.query_scales = None if growth is None else ropes.query_scales(growth)
        self.sinks: Vector | None = None
        if of_layer.has_sinks:
            first, count = query.start // head_dim, query.length // head_dim
            shard = WeightShard((of_layer.num_heads,), 0, 0, first, count)
            self.sinks = Vector(shard, context)
        self.kv_scales: KvScales | None = None
        stored = spec.quantization
        if stored is not None and stored.kv_scales(f"model.layers.{layer_idx}.self_attn"):
            sizes = query.length, key.length, value.length
            self.kv_scales = KvScales(sizes, spec.qk_norm, context)
        rope = of_layer.rope
        self.attention = AttentionLayer(
            layer_idx=layer_idx,
            num_heads=query.length // head_dim,
            num_kv_heads=key.length // head_dim,
            head_dim=head_dim,
            scale=of_layer.scale,
            cos_sin=None if rope is None else ropes.table(rope, of_layer.rotary_dim or head_dim),
            interleaved=rope is not None and rope.interleaved,
            q_norm=None if self.q_norm is None else self.q_norm.weight,
            k_norm=None if self.k_norm is None else self.k_norm.weight,
            eps=spec.rms_norm_eps,
            zero_centered=spec.zero_centered_norms,
            window_left=of_layer.window_left,
            softcap=of_layer.softcap,
            sinks=None if self.sinks is None else self.sinks.vector,
        )

    @property
    def rounding(self) -> Rounding | None:
        """How the first product rounds its input; `None` if it takes floats."""
        return self.qkv_proj.rounding

    @property
    def cos_sin(self) -> Tensor | None:
        """The rotary table, `[max_positions, rotary_dim]`, or `None` if heads are not rotated."""
        return self.attention.cos_sin

    def attend(self, hidden: Activations, batch: ForwardBatch) -> Tensor:
        """Map `[num_tokens, hidden_size]` to the input of `o_proj`, by the attention back end."""
        qkv = self.qkv_proj.apply(hidden)
        if self.joint_norm is not None:
            self.joint_norm.apply(qkv)
        if self.query_scales is not None:
            # Scaled before rotation, because back ends rotate and attend in one call; rotation
            # keeps lengths, so the order does not matter.
            scales = self.query_scales.index_select(0, batch.positions).to(qkv.dtype)
            width = self.attention.num_heads * self.attention.head_dim
            qkv[:, :width].mul_(scales.unsqueeze(1))
        if self.kv_scales is None:
            return batch.attention.run(self.attention, qkv, batch)
        scaled = self.kv_scales.scale(qkv)
        return self.kv_scales.unscale(batch.attention.run(self.attention, scaled, batch))

    def holders(self, prefix: str) -> Iterator[tuple[str, WeightHolder]]:
        """Yield each module that owns weights, with its name under `prefix`."""
        yield f"{prefix}.qkv_proj", self.qkv_proj
        yield f"{prefix}.o_proj", self.o_proj
        if self.q_norm is not None:
            yield f"{prefix}.q_norm", self.q_norm
        if self.k_norm is not None:
            yield f"{prefix}.k_norm", self.k_norm
        if self.joint_norm is not None:
            yield from self.joint_norm.holders(prefix)
        if self.sinks is not None:
            yield f"{prefix}.sinks", self.sinks
        if self.kv_scales is not None:
            yield f"{prefix}.kv_scales", self.kv_scales


class DecoderMLP:
    """A gated feed-forward block: `down(activation(gate(x)) * up(x))`."""

    __slots__ = ("activation", "down_proj", "gate_up_proj")

    def __init__(self, spec: DecoderSpec, size: int, context: BuildContext) -> None:
        self.activation = spec.activation
        hidden, bias = spec.hidden_size, spec.mlp_bias
        if spec.fused_gate_up:
            half = column("", size, context)
            self.gate_up_proj = Linear.stacked(hidden, half, 2, bias, context)
        else:
            halves = [column("gate", size, context), column("up", size, context)]
            self.gate_up_proj = Linear.column_parallel(hidden, halves, bias, context)
        self.down_proj = Linear.row_parallel(size, hidden, bias, context)

    @property
    def rounding(self) -> Rounding | None:
        """How the product with gate and up rounds its input; `None` if it takes floats."""
        return self.gate_up_proj.rounding

    def forward(self, hidden: Activations) -> Tensor:
        """Compute the block: `[num_tokens, hidden_size]` to a new tensor of the same shape."""
        rounding = self.down_proj.rounding
        if rounding is None or self.gate_up_proj.gates_in_one_kernel(len(hidden)):
            return self.down_proj.apply(self.gate_up_proj.gated(hidden, self.activation))
        both = self.gate_up_proj.apply(hidden)
        return self.down_proj.apply(act_and_mul_rounded(both, self.activation, rounding))

    def holders(self, prefix: str) -> Iterator[tuple[str, WeightHolder]]:
        """Yield each module that owns weights, with its name under `prefix`."""
        yield f"{prefix}.gate_up_proj", self.gate_up_proj
        yield f"{prefix}.down_proj", self.down_proj


class DecoderLayer:
    """One layer: attention and a feed-forward block, with the family's norms before and after each.

    The layer is computed in two halves, `attend` and `finish`. Only `attend` combines different
    tokens, so `finish` may be computed for some of the tokens only. `mixer_of` and `mlp_of` make
    the modules of the two halves.
    """

    __slots__ = (
        "attention_output_norm",
        "input_norm",
        "is_parallel",
        "mlp",
        "mlp_norm",
        "mlp_output_norm",
        "residual_scale",
        "self_attn",
    )

    def __init__(
        self, spec: DecoderSpec, context: BuildContext, layer_idx: int, ropes: RopeTables
    ) -> None:
        self.self_attn = self.mixer_of(spec, context, layer_idx, ropes)
        self.mlp = self.mlp_of(spec, context, layer_idx)
        self.residual_scale = spec.residual_scale
        self.is_parallel = spec.is_parallel

        def norm(place: str) -> RMSNorm | LayerNorm | None:
            if place not in spec.norms:
                return None
            return _stream_norm(spec, context)

        self.input_norm = norm("input_norm")
        self.attention_output_norm = norm("attention_output_norm")
        self.mlp_norm = norm("mlp_norm")
        self.mlp_output_norm = norm("mlp_output_norm")

    @staticmethod
    def mixer_of(
        spec: DecoderSpec, context: BuildContext, layer_idx: int, ropes: RopeTables
    ) -> Mixer:
        """Make the module for the first half, such as attention."""
        recurrence = spec.recurrence(layer_idx)
        if isinstance(recurrence, ShortConvSpec):
            return ShortConv(recurrence, spec.hidden_size, context, layer_idx)
        if isinstance(recurrence, DeltaNetSpec):
            return DeltaNet(recurrence, spec.hidden_size, context, layer_idx)
        if isinstance(recurrence, Mamba2Spec):
            return Mamba2(recurrence, spec.hidden_size, context, layer_idx)
        assert recurrence is None, "a recurrence without a layer"
        of_layer = spec.attention(layer_idx)
        if isinstance(of_layer, LatentAttentionSpec):
            return LatentAttention(spec, of_layer, context, layer_idx, ropes)
        if of_layer.has_gate:
            return GatedAttention(
                of_layer,
                spec.hidden_size,
                context,
                layer_idx,
                ropes,
                eps=spec.rms_norm_eps,
                bias=spec.attention_bias,
            )
        return DecoderAttention(spec, context, layer_idx, ropes)

    @staticmethod
    def mlp_of(
        spec: DecoderSpec, context: BuildContext, layer_idx: int
    ) -> DecoderMLP | UngatedBlock | SparseMLP:
        """Make the module for the second half, such as an MLP."""
        experts, hidden = spec.experts, spec.hidden_size
        if experts is None or layer_idx not in experts.layers:
            if spec.ungated_mlp is not None:
                size, activation = spec.intermediate_size, spec.ungated_mlp.activation
                return UngatedBlock(hidden, size, activation, context, bias=spec.mlp_bias)
            return DecoderMLP(spec, spec.intermediate_size, context)
        shared = None
        if experts.shared_size:
            block = DecoderMLP(spec, experts.shared_size, context)
            parts = block.forward, block.holders
            shared = SharedExpert(hidden, context, *parts, has_gate=experts.has_shared_gate)
        return SparseMLP(experts, hidden, spec.activation, context, layer_idx, shared)

    def attend(self, hidden: Tensor | None, residual: Tensor, batch: ForwardBatch) -> Tensor:
        """Run the first half: the input norm, and attention up to its output product.

        Args:
            hidden: `[num_tokens, hidden_size]`, the previous layer's output, which is not yet added
                to `residual`; `None` for the first layer.
            residual: the residual stream, `[num_tokens, hidden_size]`, changed in place.
            batch: the step.

        Returns:
            `[num_tokens, width]`, the input of `finish`.
        """
        normed = add_normed(hidden, residual, self.input_norm, self.self_attn.rounding)
        return self.self_attn.attend(normed, batch)

    def finish(self, attended: Tensor, residual: Tensor) -> Tensor:
        """Run the second half: attention's output product and the feed-forward block.

        Args:
            attended: `[n, width]`, rows of the result of `attend`.
            residual: the same rows of the residual stream, `[n, hidden_size]`, changed in place.

        Returns:
            `[n, hidden_size]`, this layer's output, which is not yet added to `residual`.
        """
        hidden = self.self_attn.o_proj.apply(attended)
        # This frees the memory of `attended` for the feed-forward block; callers keep no reference
        # to it.
        del attended
        if self.residual_scale != 1.0:
            hidden.mul_(self.residual_scale)
        if self.attention_output_norm is not None:
            hidden = self.attention_output_norm.forward(hidden)
        if self.is_parallel:
            assert not isinstance(self.mlp, SparseMLP), "a parallel layer has no experts"
            # The norm is computed again, because `attended` may hold only some of the rows that
            # `attend` normed.
            normed = add_normed(None, residual, self.input_norm, self.mlp.rounding)
            residual.add_(hidden)
            hidden = self.mlp.forward(normed)
        elif isinstance(self.mlp, SparseMLP):
            hidden = self.mlp.forward(add_normed(hidden, residual, self.mlp_norm))
        else:
            rounding = self.mlp.rounding
            hidden = self.mlp.forward(add_normed(hidden, residual, self.mlp_norm, rounding))
        if self.residual_scale != 1.0:
            hidden.mul_(self.residual_scale)
        return hidden if self.mlp_output_norm is None else self.mlp_output_norm.forward(hidden)

    def holders(self, prefix: str) -> Iterator[tuple[str, WeightHolder]]:
        """Yield each module that owns weights, with its name under `prefix`."""
        yield from self.self_attn.holders(f"{prefix}.{self.self_attn.name}")
        yield from self.mlp.holders(f"{prefix}.mlp")
        for place in ("input_norm", "attention_output_norm", "mlp_norm", "mlp_output_norm"):
            norm: RMSNorm | LayerNorm | None = getattr(self, place)
            if norm is not None:
                yield f"{prefix}.{place}", norm


def run_layers(
    layers: Sequence[DecoderLayer],
    norm: RMSNorm | LayerNorm,
    residual: Tensor,
    batch: ForwardBatch,
    hidden: Tensor | None = None,
) -> Tensor:
    """Run all layers and the last norm.

    Args:
        layers: the layers in order, at least one.
        norm: the norm of the residual stream after the last layer.
        residual: the residual stream, `[num_tokens, hidden_size]`, changed in place. Before the
            model's first layer it holds the embeddings.
        batch: the step.
        hidden: output of the layer before `layers[0]`, of the shape of `residual`, to which it is
            not yet added; `None` if there is no such layer.

    Returns:
        `[num_outputs, hidden_size]`, one row for each of `batch.logits_indices`. Only these tokens
        pass the second half of the last layer; the other tokens only need keys and values there.
    """
    wanted, deep = batch.logits_indices, batch.deep_vectors
    for index, layer in enumerate(layers if wanted is None else layers[:-1]):
        hidden = layer.finish(layer.attend(hidden, residual, batch), residual)
        if index < len(deep) and batch.images is not None:
            residual.index_add_(0, batch.images.token_indices, deep[index])
    if wanted is not None:
        last = layers[-1]
        attended = last.attend(hidden, residual, batch).index_select(0, wanted)
        residual = residual.index_select(0, wanted)
        if not len(wanted):
            return residual
        if batch.adapters is not None:
            batch.adapters.narrow(wanted)
        hidden = last.finish(attended, residual)
    return add_normed(hidden, residual, norm)


class Decoder:
    """The decoder without its head: embeddings, layers and last norm, or a pipeline stage of them.

    Attributes:
        embed_tokens: the embeddings. They are on the first stage, and on the last one if it needs
            them as its head; `None` elsewhere.
        layers: this rank's layers.
        norm: the norm after the last layer; `None` except on the last stage.
    """

    __slots__ = (
        "_dtype",
        "_first",
        "_hidden_size",
        "_stage",
        "embed_tokens",
        "embedding_scale",
        "layers",
        "norm",
    )

    layer_class: ClassVar[type[DecoderLayer]] = DecoderLayer

    def __init__(self, spec: DecoderSpec, context: BuildContext) -> None:
        ropes = RopeTables(context.max_positions or spec.context_len, context.device)
        self._stage = stage = context.stage
        scores = stage.is_last and spec.tie_word_embeddings and spec.gives == "tokens"
        self.embed_tokens: Embedding | None = None
        if stage.is_first or scores:
            self.embed_tokens = Embedding(spec.vocab_size, spec.hidden_size, context, tied=scores)
        # The scale is rounded to the model's dtype, as in `transformers`.
        self.embedding_scale = torch.tensor(spec.embedding_scale, dtype=context.dtype).item()
        layers = stage.layers(spec.num_layers)
        self._first, self._hidden_size, self._dtype = layers.start, spec.hidden_size, context.dtype
        self.layers = [self.layer_class(spec, context, index, ropes) for index in layers]
        self.norm = _stream_norm(spec, context) if stage.is_last else None

    def forward(self, batch: ForwardBatch) -> Tensor:
        """Return the normed output of the last stage, `[num_outputs, hidden_size]`.

        An earlier stage sends its output to the next stage and returns its residual stream.
        """
        hidden, residual = self._begin(batch)
        if self.norm is not None:
            return run_layers(self.layers, self.norm, residual, batch, hidden)
        for layer in self.layers:
            hidden = layer.finish(layer.attend(hidden, residual, batch), residual)
        assert hidden is not None, "a stage has layers"
        assert self._stage.send is not None, "a stage before the last has a link"
        # Both tensors are sent, because the first norm of the next stage adds them.
        self._stage.send(torch.stack([hidden, residual]))
        return residual

    def _begin(self, batch: ForwardBatch) -> tuple[Tensor | None, Tensor]:
        """Return the previous layer's output (or `None`) and the residual stream that lacks it."""
        if self._stage.is_first:
            assert self.embed_tokens is not None, "the first stage embeds"
            # The embeddings are a new tensor, so the residual stream may be changed in place.
            residual = self.embed_tokens.forward(batch.input_ids)
            if self.embedding_scale != 1.0:
                residual.mul_(self.embedding_scale)
            batch.put_embeds(residual)
            return None, residual
        assert self._stage.receive is not None, "a stage after the first has a link"
        shape = 2, len(batch.input_ids), self._hidden_size
        buffer = torch.empty(shape, dtype=self._dtype, device=batch.input_ids.device)
        hidden, residual = self._stage.receive(buffer)
        return hidden, residual

    def holders(self, prefix: str) -> Iterator[tuple[str, WeightHolder]]:
        """Yield each module that owns weights, with its name under `prefix`."""
        if self.embed_tokens is not None:
            yield f"{prefix}.embed_tokens", self.embed_tokens
        for layer_idx, layer in enumerate(self.layers, self._first):
            yield from layer.holders(f"{prefix}.layers.{layer_idx}")
        if self.norm is not None:
            yield f"{prefix}.norm", self.norm


def _norm(spec: DecoderSpec, size: int, context: BuildContext) -> RMSNorm:
    return RMSNorm(size, spec.rms_norm_eps, context, zero_centered=spec.zero_centered_norms)


def _stream_norm(spec: DecoderSpec, context: BuildContext) -> RMSNorm | LayerNorm:
    if spec.has_layer_norms:
        bias = spec.has_norm_biases
        return LayerNorm(spec.hidden_size, spec.rms_norm_eps, context, has_bias=bias)
    return _norm(spec, spec.hidden_size, context)


class DecoderForCausalLM(CausalLM):
    """A decoder and its head, which gives logits."""

    decoder_class: ClassVar[type[Decoder]] = Decoder

    def __init__(self, spec: DecoderSpec, context: BuildContext) -> None:
        self.spec, self.context = spec, context
        self.model = self.decoder_class(spec, context)
        self.is_recordable = spec.experts is None
        self._logit_scale, self._logit_softcap = spec.logit_scale, spec.logit_softcap
        self._gather = context.gather_columns if context.splits_head(spec.vocab_size) else None
        self.lm_head: Linear | None = None
        if context.stage.is_last and not spec.tie_word_embeddings:
            sizes = spec.hidden_size, spec.vocab_size
            if self._gather is None:
                self.lm_head = Linear.replicated(*sizes, False, context)
            else:
                rows = [column("", spec.vocab_size, context)]
                self.lm_head = Linear.column_parallel(sizes[0], rows, False, context)

    def forward(self, batch: ForwardBatch) -> Tensor:
        return self.model.forward(batch)

    def model_logits(self, hidden: Tensor) -> Tensor:
        embedding = self.model.embed_tokens
        if self.lm_head is not None:
            head: Callable[[Tensor], Tensor] | None = self.lm_head.apply
        else:
            head = None if embedding is None else embedding.head
        assert head is not None, "the weights are not loaded"
        logits = head(hidden)
        if self._gather is not None:
            logits = self._gather(logits)
        if self._logit_scale != 1.0:
            logits = logits.mul_(self._logit_scale)
        cap = self._logit_softcap
        return logits.div_(cap).tanh_().mul_(cap) if cap else logits

    def holders(self) -> Iterator[tuple[str, WeightHolder]]:
        yield from self.model.holders("model")
        if self.lm_head is not None:
            yield "lm_head", self.lm_head
