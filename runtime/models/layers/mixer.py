"""The first half of a decoder layer: attention, or a recurrence in its place."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import ClassVar

from torch import Tensor

from kernels.rounding import Activations, Rounding
from runtime.models.attention.forward_batch import ForwardBatch
from runtime.models.layers.linear import Linear
from runtime.models.layers.parameter import WeightHolder


class Mixer(ABC):
    """The part of a decoder layer that combines the tokens of a sequence.

    Attributes:
        name: name of the mixer's weights within the layer.
        o_proj: the output product, which the layer applies to the result of `attend`.
    """

    __slots__ = ("o_proj",)

    name: ClassVar[str]
    o_proj: Linear

    @property
    @abstractmethod
    def rounding(self) -> Rounding | None:
        """How the mixer's first product rounds its input; `None` if it takes floats."""

    @property
    def cos_sin(self) -> Tensor | None:
        """The rotary table, `[max_positions, rotary_dim]`, or `None` if heads are not rotated."""
        return None

    @abstractmethod
    def attend(self, hidden: Activations, batch: ForwardBatch) -> Tensor:
        """Map `[num_tokens, hidden_size]` to the input of `o_proj`, a new tensor."""

    @abstractmethod
    def holders(self, prefix: str) -> Iterator[tuple[str, WeightHolder]]:
        """Yield each module that owns weights, with its name under `prefix`."""
