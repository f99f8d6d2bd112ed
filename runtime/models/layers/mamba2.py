"""Mamba 2, a layer in place of attention: a short convolution, a recurrence and a gated norm."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from kernels.activation import act_and_mul
from kernels.causal_conv import causal_conv
from kernels.mamba2 import Mamba2Shape, mamba2
from kernels.rounding import Activations, Rounding
from runtime.models.attention.forward_batch import ForwardBatch
from runtime.models.decoder.recurrent_spec import Mamba2Spec
from runtime.models.layers.build_context import BuildContext
from runtime.models.layers.channel_weights import conv_holder
from runtime.models.layers.group_norm import GroupRMSNorm
from runtime.models.layers.linear import Linear, spanned
from runtime.models.layers.mixer import Mixer
from runtime.models.layers.parameter import WeightHolder, WeightShard
from runtime.models.layers.vector import Vector


class Mamba2(Mixer):
    """A Mamba 2 layer.

    One product computes the gate, the channels of the convolution, and the time steps.
    """

    __slots__ = (
        *("_bias", "_conv", "_heads", "_layer_idx", "_norm", "_shape", "_sizes", "_width"),
        "in_proj",
    )

    name = "mamba"

    def __init__(
        self, spec: Mamba2Spec, hidden: int, context: BuildContext, layer_idx: int
    ) -> None:
        self._layer_idx = layer_idx
        self._width = spec.width
        ranks, heads = context.tp_size, spec.num_heads
        length = heads // ranks
        # With fewer groups than ranks, a rank has one group, and several ranks have the same group.
        groups = max(1, spec.num_groups // ranks)
        self._shape = Mamba2Shape(groups, length, spec.head_dim, spec.state_dim)
        self._sizes = [length * spec.head_dim, sum(self._shape.spans), length]
        spans = (spec.inner, *spec.conv_spans, heads)
        parts = (heads, *spec.conv_parts, heads)
        rows = [spanned("", spans, context, parts)]
        self.in_proj = Linear.column_parallel(hidden, rows, spec.has_bias, context)
        self._conv = conv_holder(
            spec.conv_spans,
            spec.width,
            context,
            bias=spec.has_conv_bias,
            num_parts=spec.conv_parts,
        )
        self._bias = self._conv.tensor("bias") if spec.has_conv_bias else None
        first = context.tp_rank * length
        vectors = enumerate(("A_log", "dt_bias", "D"))
        self._heads = Vector(
            {name: WeightShard((heads,), i * length, 0, first, length) for i, name in vectors},
            context,
        )
        self._norm = GroupRMSNorm(spec.inner, spec.num_groups, spec.eps, context)
        self.o_proj = Linear.row_parallel(spec.inner, hidden, spec.has_bias, context)

    @property
    def rounding(self) -> Rounding | None:
        """How the first product rounds its input; `None` if it takes floats."""
        return self.in_proj.rounding

    def attend(self, hidden: Activations, batch: ForwardBatch) -> Tensor:
        """Map `[num_tokens, hidden_size]` to the input of `o_proj`, a new tensor.

        Convolve, run the recurrence, and apply the gate and the norm.
        """
        steps = batch.states
        assert steps is not None, "the pool has slots for this model"
        gate, channels, times = self.in_proj.apply(hidden).split(self._sizes, dim=1)
        conv_state, state = batch.kv[self._layer_idx].states
        mixed = causal_conv(
            channels,
            self._conv.tensor("weight"),
            self._bias,
            conv_state,
            steps.reads,
            steps.taps(self._width, batch.qo_indptr, len(channels)),
            steps.save_slots,
            silu=True,
        )
        places = steps.places(batch.qo_indptr)
        out = mamba2(mixed, times, self._heads.vector.view(3, -1), state, places, self._shape)
        return self._norm.forward(act_and_mul(torch.cat((gate, out), dim=1), "silu"))

    def holders(self, prefix: str) -> Iterator[tuple[str, WeightHolder]]:
        """Yield each module that owns weights, with its name under `prefix`."""
        yield f"{prefix}.in_proj", self.in_proj
        yield f"{prefix}.conv1d", self._conv
        yield f"{prefix}.heads", self._heads
        yield f"{prefix}.norm", self._norm.norm
        yield f"{prefix}.o_proj", self.o_proj
