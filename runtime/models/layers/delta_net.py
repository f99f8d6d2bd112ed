"""Gated DeltaNet, a layer in place of attention: a short convolution and the gated delta rule."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from kernels.activation import act_and_mul
from kernels.causal_conv import causal_conv
from kernels.gated_delta import DeltaShape, gated_delta
from kernels.rounding import Activations, Rounding
from runtime.models.attention.forward_batch import ForwardBatch
from runtime.models.decoder.recurrent_spec import DeltaNetSpec
from runtime.models.layers.build_context import BuildContext
from runtime.models.layers.channel_weights import conv_holder
from runtime.models.layers.linear import Linear, column, heads, spanned
from runtime.models.layers.mixer import Mixer
from runtime.models.layers.norm import RMSNorm
from runtime.models.layers.parameter import WeightHolder, WeightShard
from runtime.models.layers.vector import Vector


class DeltaNet(Mixer):
    """A Gated DeltaNet layer.

    One or two products compute the queries, the keys, the values, the output's gate, and the two
    gates of the delta rule.

    Attributes:
        in_proj: the product that computes all of these, or all except the gates of the delta rule.
        gate_proj: the product for the gates of the delta rule, or None if `in_proj` computes them.
            Quantized checkpoints of Qwen3.5 keep these gates in 16 bits.
    """

    __slots__ = (
        *("_a_log", "_conv", "_dt_bias", "_has_tiled_outputs", "_invariant", "_layer_idx"),
        *("_norm", "_shape", "_sizes", "_width"),
        "gate_proj",
        "in_proj",
    )

    name = "linear_attn"

    def __init__(
        self, spec: DeltaNetSpec, hidden: int, context: BuildContext, layer_idx: int
    ) -> None:
        self._layer_idx = layer_idx
        self._invariant = context.deterministic
        self._width = spec.width
        groups = spec.num_key_heads // context.tp_size
        ratio = spec.num_value_heads // spec.num_key_heads
        sizes = groups, groups * ratio, spec.key_dim, spec.value_dim
        self._shape = DeltaShape(*sizes, has_flat_gates=spec.has_flat_rows)
        self._has_tiled_outputs = spec.has_tiled_outputs
        self.gate_proj: Linear | None = None
        if spec.has_flat_rows:
            outputs = [
                spanned("qkv", spec.spans, context),
                column("z", spec.spans[2], context),
            ]
            gates = [column(shard, spec.num_value_heads, context) for shard in ("b", "a")]
            self.gate_proj = Linear.column_parallel(hidden, gates, False, context)
        else:
            qkvz, ba = spec.group_rows
            outputs = [
                heads("qkvz", spec.num_key_heads, qkvz, context),
                heads("ba", spec.num_key_heads, ba, context),
            ]
        # Widths of q, k, v and z for one key head.
        values = ratio * spec.value_dim
        self._sizes = [spec.key_dim, spec.key_dim, values, values]
        self.in_proj = Linear.column_parallel(hidden, outputs, False, context)
        self._conv = conv_holder(spec.spans, spec.width, context)
        length = self._shape.num_value_heads
        shard = WeightShard((spec.num_value_heads,), 0, 0, context.tp_rank * length, length)
        self._a_log, self._dt_bias = Vector(shard, context), Vector(shard, context)
        self._norm = RMSNorm(spec.value_dim, spec.eps, context)
        self.o_proj = Linear.row_parallel(spec.spans[2], hidden, False, context)

    @property
    def rounding(self) -> Rounding | None:
        """How the first product rounds its input; `None` if it takes floats."""
        # The two products may need different inputs: the gates' weight may be in 16 bits while the
        # other is in 8-bit codes.
        return self.in_proj.rounding if self.gate_proj is None else None

    def attend(self, hidden: Activations, batch: ForwardBatch) -> Tensor:
        """Map `[num_tokens, hidden_size]` to the input of `o_proj`, a new tensor.

        Convolve, apply the gated delta rule, norm and gate.
        """
        steps, shape = batch.states, self._shape
        assert steps is not None, "the pool has slots for this model"
        channels, gate, gates = self._project(hidden)
        conv_state, state = batch.kv[self._layer_idx].states
        taps = steps.taps(self._width, batch.qo_indptr, len(channels))
        mixed = causal_conv(
            channels,
            self._conv.tensor("weight"),
            None,
            conv_state,
            steps.reads,
            taps,
            steps.save_slots,
            silu=True,
        )
        places = steps.places(batch.qo_indptr)
        decay = -torch.exp(self._a_log.vector)
        out = gated_delta(
            mixed,
            gates,
            decay,
            self._dt_bias.vector,
            state,
            places,
            shape,
            invariant=self._invariant,
        )
        normed = self._norm.forward(out.view(-1, shape.value_dim)).view(out.shape)
        out = act_and_mul(torch.cat((gate, normed), dim=1), "silu")
        if not self._has_tiled_outputs:
            return out
        groups = out.unflatten(1, (shape.num_key_heads, -1, shape.value_dim))
        return groups.transpose(1, 2).flatten(1)

    def _project(self, hidden: Activations) -> tuple[Tensor, Tensor, Tensor]:
        """Return the channels of the convolution, the output gate and the gates of the delta rule.

        Their shapes are `[num_tokens, shape.width]`, `[num_tokens, num_value_heads * value_dim]`
        and `[num_tokens, 2 * num_value_heads]`, as `gated_delta` takes them.
        """
        shape, product = self._shape, self.in_proj.apply(hidden)
        if self.gate_proj is not None:
            return (
                product[:, : shape.width],
                product[:, shape.width :],
                self.gate_proj.apply(hidden),
            )
        split = shape.num_key_heads * sum(self._sizes)
        groups = product[:, :split].unflatten(1, (shape.num_key_heads, -1))
        *qkv, gate = groups.split(self._sizes, dim=2)
        channels = product.new_empty(len(product), shape.width)
        widths = [part.shape[1] * part.shape[2] for part in qkv]
        # This makes one copy; `flatten` and `torch.cat` would make one each.
        for to, part in zip(channels.split(widths, dim=1), qkv, strict=True):
            to.unflatten(1, part.shape[1:]).copy_(part)
        return channels, gate.flatten(1), product[:, split:]

    def holders(self, prefix: str) -> Iterator[tuple[str, WeightHolder]]:
        """Yield each module that owns weights, with its name under `prefix`."""
        yield f"{prefix}.in_proj", self.in_proj
        if self.gate_proj is not None:
            yield f"{prefix}.gate_proj", self.gate_proj
        yield f"{prefix}.conv1d", self._conv
        yield f"{prefix}.A_log", self._a_log
        yield f"{prefix}.dt_bias", self._dt_bias
        yield f"{prefix}.norm", self._norm
        yield f"{prefix}.o_proj", self.o_proj
