"""The part of a quantization method that runs on the device and uses torch."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping

import torch

from runtime.checkpoint.model_spec import WeightSpec
from runtime.models.layers.experts import ExpertsStore
from runtime.models.layers.matrix import Matrix
from runtime.models.layers.parameter import Parameter, Stored

# Implementations of experts that can multiply by codes as well as by widened matrices.
CODED = ("triton", "triton_invariant")


class DeviceMethod(ABC):
    """Makes the objects that store a model's quantized matrices.

    Each layer calls it once, before any parameter is filled. A call gets the parameter that the
    layer would have without quantization. This parameter describes the matrix: its shape on this
    rank, the rows that each checkpoint tensor fills, and this rank's part of each tensor.

    Attributes:
        implementation: name of the linear implementation for matrices that are widened to floats;
            `None` for the fastest on the device.
        experts_implementation: name of the experts implementation for widened matrices; `None` for
            the fastest on the device.
    """

    implementation: str | None = None
    experts_implementation: str | None = None

    @abstractmethod
    def parameter(self, plain: Parameter, weights: Mapping[str, WeightSpec]) -> Parameter:
        """Return the parameter of a matrix that is kept in plain numbers; it may be `plain`.

        Args:
            plain: the parameter that the layer would have without quantization.
            weights: the checkpoint tensors that fill it, by shard.
        """

    @abstractmethod
    def matrix(self, plain: Parameter, weights: Mapping[str, WeightSpec]) -> Matrix | None:
        """Return the object that stores the matrix of a linear layer or of embeddings.

        Returns `None` if the matrix is kept in plain numbers. The layer then uses the result of
        `parameter`.

        Args:
            plain: the parameter that the layer would have without quantization.
            weights: the checkpoint tensors that fill it, by shard.
        """

    @abstractmethod
    def experts(
        self, plain: Mapping[str, Parameter], weights: Stored, mine: range
    ) -> ExpertsStore | None:
        """Return the object that stores a layer's experts; `None` if they are in plain numbers.

        Args:
            plain: the parameters without quantization by name, `gate_up` and `down`.
            weights: the checkpoint tensors that fill them, by name and shard.
            mine: the experts on this rank.
        """

    def report(self) -> None:  # noqa: B027  # most have nothing to tell
        """Log how the matrices are stored; called after `store` of all layers."""


def multiplies_codes(plain: Parameter, experts: str | None) -> bool:
    """Whether a GPU's kernels multiply by the codes of experts, without widening them.

    Args:
        plain: a parameter of the experts in the context's dtype.
        experts: name of the implementation of experts; `None` for the fastest on the device.
    """
    if plain.dtype not in (torch.bfloat16, torch.float16):
        return False
    return experts in CODED or (experts is None and plain.device.type == "cuda")
