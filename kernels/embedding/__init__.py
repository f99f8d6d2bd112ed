"""Looks up rows of the embedding matrix."""

from functools import cache
from typing import Protocol

from torch import Tensor

from kernels.table import Entry, Table

__all__ = ["EMBEDDING", "EmbeddingKernels", "embedding"]


class EmbeddingKernels(Protocol):
    """The functions that each implementation of this op provides."""

    def embedding(self, ids: Tensor, weight: Tensor) -> Tensor:
        """Return the rows of `weight` at `ids`; see `kernels.embedding.embedding`."""


EMBEDDING: Table[EmbeddingKernels] = Table(
    "embedding", {"reference": Entry("kernels.embedding.reference", invariant=True)}, {}
)


@cache
def _kernels(device_type: str) -> EmbeddingKernels:
    return EMBEDDING.choose(device_type).kernels


def embedding(ids: Tensor, weight: Tensor) -> Tensor:
    """Return the rows of `weight` at `ids`.

    Args:
        ids: `[num_tokens]` int64, each in `[0, vocab_size)`.
        weight: `[vocab_size, hidden_size]`, any floating dtype.

    Returns:
        A new `[num_tokens, hidden_size]` tensor, the dtype of `weight`.

    Raises:
        IndexError: an id is out of range. This is checked on a CPU only.
    """
    return _kernels(ids.device.type).embedding(ids, weight)
