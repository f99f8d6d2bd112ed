"""The device half of a method of quantization, which uses torch."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping

import torch

from runtime.checkpoint.model_spec import WeightSpec
from runtime.models.layers.experts import ExpertsStore
from runtime.models.layers.matrix import Matrix
from runtime.models.layers.parameter import Parameter, Stored

# Implementations of experts that multiply by codes, beside those of widened numbers.
CODED = ("triton", "triton_invariant")


class DeviceMethod(ABC):
    """Makes the objects that keep a model's matrices; each layer calls it once, before any fill.

    Each call gets the parameter that the layer would have for plain numbers. It describes the
    matrix: its shape on this rank, the rows that each checkpoint tensor fills, and this rank's part
    of each tensor.

    Attributes:
        implementation: name of the linear implementation that products of widened numbers use;
            `None` for the device's best.
        experts_implementation: name of the experts implementation for widened numbers; `None` for
            the device's best.
    """

    implementation: str | None = None
    experts_implementation: str | None = None

    @abstractmethod
    def parameter(self, plain: Parameter, weights: Mapping[str, WeightSpec]) -> Parameter:
        """Return the parameter for a matrix that is kept in plain numbers; it may be `plain`.

        Args:
            plain: the layer's parameter for plain numbers.
            weights: the weights that fill it, by shard.
        """

    @abstractmethod
    def matrix(self, plain: Parameter, weights: Mapping[str, WeightSpec]) -> Matrix | None:
        """Return the object that keeps the matrix of a linear layer or of embeddings.

        `None` if it is kept in plain numbers, in what `parameter` returns.
        """

    @abstractmethod
    def experts(
        self, plain: Mapping[str, Parameter], weights: Stored, mine: range
    ) -> ExpertsStore | None:
        """Return the object that keeps a layer's experts; `None` if they are in plain numbers.

        Args:
            plain: the parameters by name, `gate_up` and `down`.
            weights: the weights that fill them, by name and shard.
            mine: the experts on this rank.
        """

    def report(self) -> None:  # noqa: B027  # most have nothing to tell
        """Log how the matrices are kept; called after all layers are stored."""


def multiplies_codes(plain: Parameter, experts: str | None) -> bool:
    """Whether a GPU's kernels multiply by the codes of experts, instead of widened numbers.

    Args:
        plain: a parameter of the experts in the context's type.
        experts: name of the implementation of experts; `None` for the device's best.
    """
    if plain.dtype not in (torch.bfloat16, torch.float16):
        return False
    return experts in CODED or (experts is None and plain.device.type == "cuda")
