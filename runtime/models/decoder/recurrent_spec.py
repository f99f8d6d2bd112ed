"""Layers of a decoder that keep a recurrent state instead of keys and values. Front-safe."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from runtime.checkpoint.model_spec import RecurrentState, StatePart, WeightSpec
from runtime.models.decoder.weight_map import linear_weights


class RecurrentSpec(ABC):
    """One layer's recurrence over all ranks; state, weights and the layer follow."""

    @property
    @abstractmethod
    def state(self) -> RecurrentState:
        """The state that the layer keeps of a sequence."""

    @abstractmethod
    def weights(self, prefix: str, hidden: int) -> Sequence[WeightSpec]:
        """Return the weights of the layer called `prefix`, besides its norms and its MLP.

        Args:
            prefix: name of the layer in the checkpoint, and of ours.
            hidden: width of the stream.
        """

    @abstractmethod
    def uneven_parts(self, tp_size: int) -> list[str]:
        """Return what cannot be split evenly among ranks; see `ModelSpec.uneven_parts`."""


@dataclass(frozen=True, kw_only=True)
class ShortConvSpec(RecurrentSpec):
    """A gated short convolution: `C * conv(B * x)`, as in LFM2.

    Attributes:
        channels: of the convolution, over all ranks.
        width: tokens that the convolution sees, including the newest.
        has_bias: whether the convolution and both products have biases.
    """

    channels: int
    width: int
    has_bias: bool = False

    @property
    def state(self) -> RecurrentState:
        """The last inputs of the convolution."""
        return RecurrentState((StatePart((self.width - 1, self.channels), split_dim=1),))

    def weights(self, prefix: str, hidden: int) -> Sequence[WeightSpec]:
        """See `RecurrentSpec`."""
        name, channels, bias = f"{prefix}.conv", self.channels, self.has_bias
        rows = 3 * channels
        return [
            *linear_weights(f"{name}.in_proj", f"{name}.in_proj", (rows, hidden), bias=bias),
            *conv_weights(f"{name}.conv", channels, self.width, bias=bias),
            *linear_weights(f"{name}.out_proj", f"{name}.o_proj", (hidden, channels), bias=bias),
        ]

    def uneven_parts(self, tp_size: int) -> list[str]:
        """See `RecurrentSpec`."""
        return [f"{self.channels} channels of a convolution"] if self.channels % tp_size else []


def conv_weights(name: str, channels: int, width: int, *, bias: bool = False) -> list[WeightSpec]:
    """Return the weights of a convolution over each channel."""
    weights = [WeightSpec(f"{name}.weight", (channels, 1, width), f"{name}.weight", kind="other")]
    if bias:
        weights.append(WeightSpec(f"{name}.bias", (channels,), f"{name}.bias", kind="bias"))
    return weights
