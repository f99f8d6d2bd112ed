"""Gemma 4 for text: layers add their own token embeddings and end with a scale factor."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

import torch
from torch import Tensor

from kernels.norm import rms_norm
from kernels.rounding import Activations, Rounding
from runtime.errors import StartupError
from runtime.models.attention.backend import AttentionLayer
from runtime.models.attention.forward_batch import ForwardBatch
from runtime.models.attention.rotation import turn
from runtime.models.decoder.model import Decoder, DecoderForCausalLM, DecoderLayer, DecoderMLP
from runtime.models.decoder.spec import DecoderSpec
from runtime.models.gemma4.experts_branch import ExpertsBranch
from runtime.models.gemma4.spec import Gemma4Spec
from runtime.models.layers.build_context import BuildContext
from runtime.models.layers.embedding import Embedding
from runtime.models.layers.linear import Linear, heads
from runtime.models.layers.mixer import Mixer
from runtime.models.layers.norm import RMSNorm, add_normed
from runtime.models.layers.parameter import WeightHolder, WeightShard
from runtime.models.layers.rope import RopeTables
from runtime.models.layers.vector import Vector


class Gemma4Attention(Mixer):
    """Attention that norms the values, too.

    A layer may use its keys as values, or read the keys and values of an earlier layer.
    """

    __slots__ = ("_cos_sin", "_ones", "attention", "k_norm", "makes_values", "q_norm", "qkv_proj")

    name = "self_attn"

    def __init__(
        self, spec: DecoderSpec, context: BuildContext, layer_idx: int, ropes: RopeTables
    ) -> None:
        assert isinstance(spec, Gemma4Spec), "another family's spec"
        of_layer = spec.attention(layer_idx)
        assert of_layer.rope is not None, "its heads rotate"
        head_dim, eps = of_layer.head_dim, spec.rms_norm_eps
        query = heads("q", of_layer.num_heads, head_dim, context)
        key = heads("k", of_layer.num_kv_heads, head_dim, context)
        outputs = [query]
        self.makes_values = False
        if of_layer.keys_of is None:
            outputs.append(key)
            if spec.has_values(layer_idx):
                outputs.append(heads("v", of_layer.num_kv_heads, head_dim, context))
            else:
                self.makes_values = True
        self.qkv_proj = Linear.column_parallel(
            spec.hidden_size, outputs, spec.attention_bias, context
        )
        self.o_proj = Linear.row_parallel(query.size, spec.hidden_size, spec.output_bias, context)
        self.q_norm = RMSNorm(head_dim, eps, context)
        self.k_norm = RMSNorm(head_dim, eps, context) if of_layer.keys_of is None else None
        self._ones = torch.ones(head_dim, dtype=context.dtype, device=context.device)
        self._cos_sin = ropes.table(of_layer.rope, head_dim)
        self.attention = AttentionLayer(
            layer_idx=layer_idx,
            num_heads=query.length // head_dim,
            num_kv_heads=key.length // head_dim,
            head_dim=head_dim,
            scale=of_layer.scale,
            cos_sin=self._cos_sin,
            q_norm=self.q_norm.weight,
            k_norm=None if self.k_norm is None else self.k_norm.weight,
            eps=eps,
            window_left=of_layer.window_left,
        )

    @property
    def rounding(self) -> Rounding | None:
        """How the first product rounds its input; `None` if it takes floats."""
        return self.qkv_proj.rounding

    def attend(self, hidden: Activations, batch: ForwardBatch) -> Tensor:
        """Map `[num_tokens, hidden_size]` to the input of `o_proj`: projections and attention."""
        layer, product = self.attention, self.qkv_proj.apply(hidden)
        num_tokens, head_dim = len(product), layer.head_dim
        if self.k_norm is None:
            q = self.q_norm.forward(product.view(-1, head_dim)).view(num_tokens, -1, head_dim)
            turn(q, self._cos_sin.index_select(0, batch.positions).unsqueeze(1))
            return batch.attention.attend(layer, q, batch)
        # These columns are the values. In a layer without a projection for values, they are the
        # keys.
        columns = product[:, -layer.num_kv_heads * head_dim :]
        values = rms_norm(columns.reshape(-1, head_dim).contiguous(), self._ones, layer.eps)
        values = values.view(num_tokens, -1)
        if self.makes_values:
            product = torch.cat([product, values], dim=1)
        else:
            columns.copy_(values)
        return batch.attention.run(layer, product, batch)

    def holders(self, prefix: str) -> Iterator[tuple[str, WeightHolder]]:
        """Yield each module that owns weights, with its name under `prefix`."""
        yield f"{prefix}.qkv_proj", self.qkv_proj
        yield f"{prefix}.o_proj", self.o_proj
        yield f"{prefix}.q_norm", self.q_norm
        if self.k_norm is not None:
            yield f"{prefix}.k_norm", self.k_norm


class LayerInput:
    """Computes what a layer's own embeddings of tokens add to the residual stream.

    The residual stream itself gates the embeddings.
    """

    __slots__ = ("gate", "norm", "projection")

    def __init__(self, spec: Gemma4Spec, context: BuildContext) -> None:
        # Each rank has the whole weights, because a sum over ranks would cost more than these small
        # products.
        sizes = spec.hidden_size, spec.input_size
        self.gate = Linear.replicated(*sizes, False, context)
        self.projection = Linear.replicated(*sizes[::-1], False, context)
        self.norm = RMSNorm(spec.hidden_size, spec.rms_norm_eps, context)

    def forward(self, stream: Tensor, inputs: Tensor) -> Tensor:
        """Compute the gated embeddings, which are added to the stream later.

        Args:
            stream: `[n, hidden_size]`, the residual stream.
            inputs: `[n, input_size]`, the layer's embeddings of the same tokens.

        Returns:
            A new tensor of the shape of `stream`.
        """
        gated = self.gate.activated(stream, "gelu_tanh").mul_(inputs)
        return self.norm.forward(self.projection.apply(gated))

    def holders(self, prefix: str) -> Iterator[tuple[str, WeightHolder]]:
        """Yield each module that owns weights, with its name under the layer's `prefix`."""
        yield f"{prefix}.per_layer_input_gate", self.gate
        yield f"{prefix}.per_layer_projection", self.projection
        yield f"{prefix}.post_per_layer_input_norm", self.norm


class Gemma4Layer(DecoderLayer):
    """A decoder layer that may also have experts and token embeddings of its own.

    The layer's result is multiplied by a learned factor.
    """

    __slots__ = ("dense_norm", "experts", "input", "scalar")

    def __init__(
        self, spec: DecoderSpec, context: BuildContext, layer_idx: int, ropes: RopeTables
    ) -> None:
        super().__init__(spec, context, layer_idx, ropes)
        assert isinstance(spec, Gemma4Spec), "another family's spec"
        self.experts: ExpertsBranch | None = None
        self.dense_norm: RMSNorm | None = None
        if spec.experts is not None:
            self.experts = ExpertsBranch(spec, spec.experts, context, layer_idx)
            self.dense_norm = RMSNorm(spec.hidden_size, spec.rms_norm_eps, context)
        self.input = LayerInput(spec, context) if spec.input_size else None
        self.scalar = Vector(WeightShard((1,)), context)

    @staticmethod
    def mixer_of(
        spec: DecoderSpec, context: BuildContext, layer_idx: int, ropes: RopeTables
    ) -> Mixer:
        """Make the module for the first half of the layer, the attention."""
        return Gemma4Attention(spec, context, layer_idx, ropes)

    @staticmethod
    def mlp_of(spec: DecoderSpec, context: BuildContext, layer_idx: int) -> DecoderMLP:
        """Make the module for the second half of the layer, the MLP."""
        assert isinstance(spec, Gemma4Spec), "another family's spec"
        return DecoderMLP(spec, spec.mlp_size(layer_idx), context)

    def finish(self, attended: Tensor, residual: Tensor, inputs: Tensor | None = None) -> Tensor:
        """Compute the second half of the layer; see `DecoderLayer.finish`.

        Args:
            attended: `[n, width]`, rows of the result of `attend`.
            residual: `[n, hidden_size]`, the same rows of the residual stream, changed in place.
            inputs: `[n, input_size]`, the layer's embeddings of these tokens, if it has any.
        """
        if self.experts is None:
            hidden = super().finish(attended, residual)
        else:
            hidden = self._finish_beside_experts(attended, residual, self.experts)
        if self.input is not None:
            assert inputs is not None, "the layer has embeddings"
            residual.add_(hidden)
            hidden = self.input.forward(residual, inputs)
        # The factor applies to the whole stream: `residual` and `hidden`, which is added to it
        # later.
        residual.mul_(self.scalar.vector)
        return hidden.mul_(self.scalar.vector)

    def _finish_beside_experts(
        self, attended: Tensor, residual: Tensor, experts: ExpertsBranch
    ) -> Tensor:
        assert isinstance(self.mlp, DecoderMLP), "a dense block"
        norms = self.attention_output_norm, self.dense_norm, self.mlp_output_norm
        after_attention, after_dense, after_both = norms
        assert after_attention is not None, "a norm of the family"
        assert after_dense is not None, "a norm beside experts"
        assert after_both is not None, "a norm of the family"
        hidden = after_attention.forward(self.self_attn.o_proj.apply(attended))
        dense = self.mlp.forward(add_normed(hidden, residual, self.mlp_norm, self.mlp.rounding))
        return after_both.forward(after_dense.forward(dense).add_(experts.forward(residual)))

    def holders(self, prefix: str) -> Iterator[tuple[str, WeightHolder]]:
        """Yield each module that owns weights, with its name under `prefix`."""
        yield from super().holders(prefix)
        if self.experts is not None:
            yield from self.experts.holders(prefix)
        if self.dense_norm is not None:
            yield f"{prefix}.dense_norm", self.dense_norm
        if self.input is not None:
            yield from self.input.holders(prefix)
        yield f"{prefix}.layer_scalar", self.scalar


class ModelInputs:
    """Computes each layer's embeddings of tokens, from a table and from the model's embeddings."""

    __slots__ = ("_scale", "_size", "norm", "projection", "table")

    def __init__(self, spec: Gemma4Spec, context: BuildContext) -> None:
        self._size = spec.input_size
        width = spec.num_layers * spec.input_size
        self.table = Embedding(spec.input_vocab_size, width, context, tied=False)
        # The scale is rounded to the model's dtype, as in `transformers`.
        self._scale = torch.tensor(spec.input_size**0.5, dtype=context.dtype).item()
        self.projection = Linear.replicated(spec.hidden_size, width, False, context)
        self.norm = RMSNorm(spec.input_size, spec.rms_norm_eps, context)

    def forward(self, ids: Tensor, stream: Tensor) -> list[Tensor]:
        """Return one tensor per layer: the embeddings of the tokens, `[num_tokens, input_size]`.

        Args:
            ids: `[num_tokens]` int64.
            stream: `[num_tokens, hidden_size]`, the model's embeddings.
        """
        product = self.projection.apply(stream).mul_(stream.shape[1] ** -0.5)
        made = self.norm.forward(product.view(-1, self._size)).view(product.shape)
        made.add_(self.table.forward(ids).mul_(self._scale)).mul_(2.0**-0.5)
        return list(made.split(self._size, dim=1))

    def holders(self, prefix: str) -> Iterator[tuple[str, WeightHolder]]:
        """Yield each module that owns weights, with its name under the decoder's `prefix`."""
        yield f"{prefix}.embed_tokens_per_layer", self.table
        yield f"{prefix}.per_layer_model_projection", self.projection
        yield f"{prefix}.per_layer_projection_norm", self.norm


class Gemma4Decoder(Decoder):
    """The decoder, which may compute embeddings of the tokens for each layer."""

    __slots__ = ("inputs",)

    layer_class = Gemma4Layer

    def __init__(self, spec: DecoderSpec, context: BuildContext) -> None:
        super().__init__(spec, context)
        assert isinstance(spec, Gemma4Spec), "another family's spec"
        if spec.input_size and context.stage.count > 1:
            raise StartupError(
                f"--pp-size {context.stage.count}: layers with embeddings of their own cannot "
                "be divided into stages."
            )
        self.inputs = ModelInputs(spec, context) if spec.input_size else None

    def forward(self, batch: ForwardBatch) -> Tensor:
        """Run this stage's layers; return the last norm's output, `[num_outputs, hidden_size]`."""
        if self.inputs is None:
            return super().forward(batch)
        assert self.norm is not None, "all layers are here"
        hidden, stream = self._begin(batch)
        wanted = batch.logits_indices
        of_layers = self.inputs.forward(batch.input_ids, stream)
        for layer, inputs in zip(self.layers, of_layers, strict=True):
            assert isinstance(layer, Gemma4Layer)
            attended = layer.attend(hidden, stream, batch)
            if wanted is not None and layer is self.layers[-1]:
                attended, stream, inputs = (
                    each.index_select(0, wanted) for each in (attended, stream, inputs)
                )
                if not len(wanted):
                    return stream
                if batch.adapters is not None:
                    batch.adapters.narrow(wanted)
            hidden = layer.finish(attended, stream, inputs)
        return add_normed(hidden, stream, self.norm)

    def holders(self, prefix: str) -> Iterator[tuple[str, WeightHolder]]:
        """Yield each module that owns weights, with its name under `prefix`."""
        yield from super().holders(prefix)
        if self.inputs is not None:
            yield from self.inputs.holders(prefix)


class Gemma4ForCausalLM(DecoderForCausalLM):
    """The decoder and its head."""

    decoder_class: ClassVar[type[Decoder]] = Gemma4Decoder
