"""Token embeddings, and the tied head that computes logits with the same matrix."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from torch import Tensor

from kernels.embedding import embedding
from kernels.linear import PackedLinear, pack
from runtime.models.layers.build_context import BuildContext
from runtime.models.layers.matrix import Matrix
from runtime.models.layers.parameter import Parameter, Stored, WeightHolder, whole

if TYPE_CHECKING:
    from runtime.models.quantization.method import DeviceMethod


class Embedding(WeightHolder):
    """The embedding matrix, which is whole on every rank, and the tied head.

    Attributes:
        weight: `[vocab_size, hidden_size]`. It keeps its address until it is released. Empty if a
            quantization method keeps the matrix.
        matrix: the quantized matrix; `None` if the matrix is not quantized.
        head: the tied language-model head; `None` if the head is not tied. It has only this rank's
            rows if ranks split the head. The head shares the memory of `weight` unless the device's
            linear kernel needs another layout than a row lookup; then it is a copy. oneDNN needs a
            copy, because it would reorder an unpacked matrix at every step.
        head_rows: the rows of the matrix that this rank's head uses.
    """

    __slots__ = ("head", "head_rows", "implementation", "matrix", "parameter", "tied", "weight")

    def __init__(
        self, vocab_size: int, hidden_size: int, context: BuildContext, *, tied: bool
    ) -> None:
        shape = (vocab_size, hidden_size)
        self.parameter = Parameter(shape, whole(shape), context.dtype, context.device)
        # On a CPU, unwritten memory costs nothing; on a GPU, the memory is needed anyway.
        self.weight = self.parameter.allocate()
        self.matrix: Matrix | None = None
        self.tied = tied
        length = vocab_size // context.tp_size if context.splits_head(vocab_size) else vocab_size
        self.head_rows = slice(0, length)
        if length != vocab_size:
            self.head_rows = slice(context.tp_rank * length, (context.tp_rank + 1) * length)
        self.implementation = context.linear
        self.head: PackedLinear | None = None

    def forward(self, ids: Tensor) -> Tensor:
        """Return the embeddings of `ids`, `[num_tokens]` int64, as `[num_tokens, hidden_size]`."""
        if self.matrix is not None:
            return self.matrix.rows(ids)
        return embedding(ids, self.weight)

    def store(self, method: DeviceMethod, weights: Stored) -> None:
        stored = weights.get("weight", {})
        self.matrix = method.matrix(self.parameter, stored)
        if self.matrix is None:
            self.parameter = method.parameter(self.parameter, stored)
            self.parameter.tensor = self.weight
        else:
            self.parameter.tensor = None
            self.weight = self.weight.new_empty(0)

    def parameters(self) -> Iterator[tuple[str, Parameter]]:
        if self.matrix is not None:
            yield from self.matrix.parameters()
        else:
            yield "weight", self.parameter

    def finalize(self, kept: list[tuple[str, str]]) -> None:
        """Put the filled matrix into use, and pack the tied head."""
        if self.matrix is not None:
            if self.tied:
                self.matrix.pack(kept, None)
                self.head = self.matrix.head(self.head_rows)
            else:
                self.matrix.hold(kept)
            return
        # This is a new tensor only if the last one was released.
        self.weight = self.parameter.allocate()
        if not self.tied:
            return
        scored = self.weight[self.head_rows]
        if self.head is None:
            self.head = pack(scored, None, self.implementation)
        else:
            self.head.repack(scored)

    def discard(self) -> None:
        """Drop stored blocks of a quantized matrix; an unquantized one is filled in one go."""
        if self.matrix is not None:
            self.matrix.discard()

    def plain(self, name: str) -> Tensor:
        return self.weight if self.matrix is None else self.matrix.plain(name)

    def part(self, name: str, shard_name: str) -> Tensor:
        if self.matrix is None:
            return super().part(name, shard_name)
        return self.matrix.part(name, shard_name)

    def values(self, name: str, shard_name: str) -> Tensor:
        if self.matrix is None:
            return self.part(name, shard_name)
        return self.matrix.values(name, shard_name)

    def release(self) -> None:
        """Release the memory of the matrix and of the head."""
        self.parameter.tensor = self.head = None
        self.weight = self.weight.new_empty(0)
        if self.matrix is not None:
            self.matrix.release()

    @property
    def size_bytes(self) -> int:
        if self.matrix is not None:
            shares = self.head is None or self.head is self.matrix.packed
            return self.matrix.size_bytes + (0 if shares or not self.head else self.head.size_bytes)
        if self.head is None or self.head.shares_weight:
            return self.weight.nbytes
        return self.weight.nbytes + self.head.size_bytes
