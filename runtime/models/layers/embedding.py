"""Token embeddings, and the head that scores the vocabulary with the same matrix."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from kernels.embedding import embedding
from kernels.linear import PackedLinear, pack
from runtime.models.layers.build_context import BuildContext
from runtime.models.layers.parameter import Parameter, WeightHolder, whole


class Embedding(WeightHolder):
    """The embedding matrix, whole on every rank.

    Attributes:
        weight: `[vocab_size, hidden_size]`; keeps its address until it is released.
        head: the tied language-model head, of this rank's rows where ranks split it; `None` when
            the model brings its own. Packing copies the matrix where the device's linear wants
            another layout than a row lookup needs (oneDNN: an unpacked product would reorder it at
            every step); elsewhere both share it.
        head_rows: the rows that this rank's head scores.
    """

    __slots__ = ("head", "head_rows", "implementation", "parameter", "tied", "weight")

    def __init__(
        self, vocab_size: int, hidden_size: int, context: BuildContext, *, tied: bool
    ) -> None:
        shape = (vocab_size, hidden_size)
        self.parameter = Parameter(shape, whole(shape), context.dtype, context.device)
        self.weight = self.parameter.allocate()
        self.tied = tied
        length = vocab_size // context.tp_size if context.splits_head(vocab_size) else vocab_size
        self.head_rows = slice(0, length)
        if length != vocab_size:
            self.head_rows = slice(context.tp_rank * length, (context.tp_rank + 1) * length)
        self.implementation = context.linear
        self.head: PackedLinear | None = None

    def forward(self, ids: Tensor) -> Tensor:
        """Return the rows of `ids`, `[num_tokens]` int64, as a new `[num_tokens, hidden_size]`."""
        return embedding(ids, self.weight)

    def parameters(self) -> Iterator[tuple[str, Parameter]]:
        yield "weight", self.parameter

    def finalize(self, kept: list[tuple[str, str]]) -> None:  # noqa: ARG002 filled in one go
        """Pack the head, if it is ours."""
        # Another one only where the last was released.
        self.weight = self.parameter.allocate()
        if not self.tied:
            return
        scored = self.weight[self.head_rows]
        if self.head is None:
            self.head = pack(scored, None, self.implementation)
        else:
            self.head.repack(scored)

    def discard(self) -> None:
        """Nothing to do: the matrix is filled in one go."""

    def plain(self, name: str) -> Tensor:  # noqa: ARG002  # there is one
        return self.weight

    def release(self) -> None:
        """Drop the matrix and the head."""
        self.parameter.tensor = self.head = None
        self.weight = self.weight.new_empty(0)

    @property
    def size_bytes(self) -> int:
        if self.head is None or self.head.shares_weight:
            return self.weight.nbytes
        return self.weight.nbytes + self.head.size_bytes
