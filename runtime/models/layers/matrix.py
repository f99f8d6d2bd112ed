"""The matrix of a linear layer or an embedding: how it is loaded, stored and multiplied."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator

from torch import Tensor

from kernels.linear import PackedLinear, pack
from runtime.models.layers.parameter import Parameter


class Matrix(ABC):
    """A matrix in the form in which a quantization method stores it.

    Attributes:
        packed: the matrix as a product for the kernels; `None` before the first `pack` and after
            `release`.
    """

    packed: PackedLinear | None = None

    @abstractmethod
    def parameters(self) -> Iterator[tuple[str, Parameter]]:
        """Yield the parameters that a checkpoint fills, with the names that the weight map uses."""

    @abstractmethod
    def pack(self, kept: list[tuple[str, str]], bias: Tensor | None) -> PackedLinear:
        """Pack the filled tensors and return `packed`.

        Args:
            kept: (parameter, shard) pairs that were not filled and keep their present value.
            bias: `[out_features]` in the context's dtype, which every product adds; `None` for no
                bias.
        """

    def hold(self, kept: list[tuple[str, str]]) -> None:
        """Put the filled tensors into use like `pack`; afterwards only `rows` may be called."""
        self.pack(kept, None)

    @abstractmethod
    def discard(self) -> None:
        """Drop tensors that were filled after the last `pack`."""

    @abstractmethod
    def plain(self, name: str) -> Tensor:
        """Return the value of a parameter in the form that `Parameter.restore` takes.

        Do not write to it.
        """

    def part(self, name: str, shard_name: str) -> Tensor:
        """Return the part of a parameter that one checkpoint tensor filled, in its stored form.

        Do not write to it.
        """
        shard = dict(self.parameters())[name].shards[shard_name]
        part = self.plain(name).narrow(0, shard.offset, shard.num_rows)
        return part.reshape(shard.local_shape)

    def values(self, name: str, shard_name: str) -> Tensor:
        """Return what `part` returns, but as floats instead of in its stored form."""
        return self.part(name, shard_name)

    def rows(self, ids: Tensor) -> Tensor:
        """Return the rows `ids` of an embedding matrix in the context's dtype.

        Args:
            ids: `[num_ids]` int64.

        Raises:
            NotImplementedError: this kind of matrix cannot hold embeddings.
        """
        raise NotImplementedError("this kind of matrix cannot hold embeddings")

    def head(self, rows: slice) -> PackedLinear:
        """Return a product whose matrix is `rows` of the packed embedding matrix.

        Raises:
            NotImplementedError: this kind of matrix cannot hold embeddings.
        """
        raise NotImplementedError("this kind of matrix cannot hold embeddings")

    @abstractmethod
    def release(self) -> None:
        """Release the memory. The matrix must be filled and packed before its next use."""

    @property
    def size_bytes(self) -> int:
        """Bytes of the matrix in memory."""
        return 0 if self.packed is None else self.packed.size_bytes


class PlainMatrix(Matrix):
    """A matrix of the context's dtype, not quantized, packed by `kernels.linear`."""

    def __init__(self, weight: Parameter, implementation: str | None) -> None:
        self.weight = weight
        self._implementation = implementation

    def filled_by(self, weight: Parameter) -> PlainMatrix:
        """Return a matrix like this one that the parameter `weight` fills."""
        return PlainMatrix(weight, self._implementation)

    def parameters(self) -> Iterator[tuple[str, Parameter]]:
        yield "weight", self.weight

    def pack(self, kept: list[tuple[str, str]], bias: Tensor | None) -> PackedLinear:
        old = self.packed
        if old is not None:
            for parameter, shard_name in kept:
                if parameter == "weight":
                    shard = self.weight.shards[shard_name]
                    present = old.unpack().narrow(0, shard.offset, shard.num_rows)
                    self.weight.rows(shard_name).copy_(present)
        weight, self.weight.tensor = self.weight.allocate(), None
        if old is not None:
            old.repack(weight, bias)
            return old
        self.packed = pack(weight, bias, self._implementation)
        return self.packed

    def discard(self) -> None:
        self.weight.tensor = None

    def plain(self, name: str) -> Tensor:  # noqa: ARG002  # there is one
        assert self.packed is not None, "the weight is not loaded"
        return self.packed.unpack()

    def release(self) -> None:
        self.weight.tensor = self.packed = None
