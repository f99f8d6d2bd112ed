"""What a method of quantization does on the device: the half that has torch."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping

from runtime.checkpoint.model_spec import WeightSpec
from runtime.models.layers.experts import ExpertsStore
from runtime.models.layers.matrix import Matrix
from runtime.models.layers.parameter import Parameter, Stored


class DeviceMethod(ABC):
    """Makes what keeps a model's matrices; layers ask it once, before anything is filled.

    Each call gets the parameter that the layer would have for plain numbers. It says all that the
    layer knows of the matrix: its shape on this rank, which rows each checkpoint tensor fills, and
    which part of that is this rank's.
    """

    @abstractmethod
    def parameter(self, plain: Parameter, weights: Mapping[str, WeightSpec]) -> Parameter:
        """What fills a matrix that is kept in plain numbers; it may be `plain` itself.

        Args:
            plain: what the layer has for plain numbers.
            weights: by shard, the weights that fill it.
        """

    @abstractmethod
    def matrix(self, plain: Parameter, weights: Mapping[str, WeightSpec]) -> Matrix | None:
        """What keeps the matrix of a linear layer or of embeddings.

        `None` where it is kept in plain numbers, by what `parameter` returns.
        """

    @abstractmethod
    def experts(
        self, plain: Mapping[str, Parameter], weights: Stored, mine: range
    ) -> ExpertsStore | None:
        """What keeps a layer's experts; `None` where they are kept in plain numbers.

        Args:
            plain: by name, `gate_up` and `down`.
            weights: by name and shard, the weights that fill them.
            mine: the experts that are here.
        """

    def report(self) -> None:  # noqa: B027  # most have nothing to tell
        """Log what became of the matrices; called when all layers have asked."""
