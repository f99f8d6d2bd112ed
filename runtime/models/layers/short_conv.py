"""The gated short convolution of LFM2, a layer in place of attention."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from kernels.causal_conv import causal_conv
from kernels.rounding import Activations, Rounding
from runtime.models.attention.forward_batch import ForwardBatch
from runtime.models.decoder.recurrent_spec import ShortConvSpec
from runtime.models.layers.build_context import BuildContext
from runtime.models.layers.channel_weights import conv_holder
from runtime.models.layers.linear import Linear, column
from runtime.models.layers.mixer import Mixer
from runtime.models.layers.parameter import WeightHolder


class ShortConv(Mixer):
    """A gated short convolution: `o_proj(C * conv(B * x))`.

    One fused product of the layer's input gives the two gates, B and C, and x.
    """

    __slots__ = ("_bias", "_layer_idx", "_weight", "_width", "conv", "in_proj")

    name = "conv"

    def __init__(
        self, spec: ShortConvSpec, hidden: int, context: BuildContext, layer_idx: int
    ) -> None:
        self._layer_idx = layer_idx
        self._width = spec.width
        channels = column("", spec.channels, context)
        self.in_proj = Linear.stacked(hidden, channels, 3, spec.has_bias, context)
        self.conv = conv_holder([spec.channels], spec.width, context, bias=spec.has_bias)
        self._weight = self.conv.tensor("weight")
        self._bias = self.conv.tensor("bias") if spec.has_bias else None
        self.o_proj = Linear.row_parallel(spec.channels, hidden, spec.has_bias, context)

    @property
    def rounding(self) -> Rounding | None:
        """How the first product rounds its input; `None` if it takes floats."""
        return self.in_proj.rounding

    def attend(self, hidden: Activations, batch: ForwardBatch) -> Tensor:
        """Map `[num_tokens, hidden_size]` to `C * conv(B * x)`, the input of `o_proj`."""
        steps = batch.states
        assert steps is not None, "the pool has slots for this model"
        gate_in, gate_out, x = self.in_proj.apply(hidden).chunk(3, dim=-1)
        taps = steps.taps(self._width, batch.qo_indptr, len(x))
        (state,) = batch.kv[self._layer_idx].states
        return gate_out * causal_conv(
            gate_in * x, self._weight, self._bias, state, steps.reads, taps, steps.save_slots
        )

    def holders(self, prefix: str) -> Iterator[tuple[str, WeightHolder]]:
        """Yield each module that owns weights, with its name under `prefix`."""
        yield f"{prefix}.in_proj", self.in_proj
        yield f"{prefix}.conv", self.conv
        yield f"{prefix}.o_proj", self.o_proj
