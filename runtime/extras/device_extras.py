"""The interface of an extra output's device half, which computes values from the data of a step.

An extra output is an output besides tokens that a request may ask for, such as log-probabilities.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

# The data from which an extra output is computed. "hidden": the hidden state from which a sample's
# logits are computed. "experts": the experts chosen for a sample's token. "raw_logits": the model's
# logits. "logits": the logits that are sampled from, with penalties, masks and biases. "pooled":
# the pooled output of a whole text.
Reads = Literal["hidden", "experts", "raw_logits", "logits", "pooled"]
Send = Callable[..., list[Tensor]]
Pack = Callable[[int, list[NDArray[Any]]], bytes]


def _as_they_are(_: int, arrays: list[NDArray[Any]]) -> bytes:
    return b"".join(array.tobytes() for array in arrays)


@dataclass
class Gathered:
    """The values of an extra output for `n` positions, on the device or being copied to the host.

    Attributes:
        rows: `[n]` int64 on the host, the batch row of each position. The positions of a row are
            adjacent.
        tensors: the values, each of shape `[n, ...]`.
        pack: encodes the values of one row as bytes. Its arguments are the index in `rows` of the
            row's first position, and the row's part of each tensor. By default it concatenates
            their bytes.
    """

    rows: NDArray[np.int64]
    tensors: Sequence[Tensor]
    pack: Pack = _as_they_are

    def to_host(self, copy: Callable[[Tensor], Tensor]) -> Gathered:
        """Return the values copied with `copy`, a function that may be asynchronous."""
        return Gathered(self.rows, [copy(each) for each in self.tensors], self.pack)

    def blocks(self) -> list[tuple[int, int, bytes]]:
        """Return row, number of positions and encoded values of each row.

        The values must be on the host.
        """
        arrays = [each.numpy() for each in self.tensors]
        starts = np.flatnonzero(np.diff(self.rows, prepend=-1)).tolist()
        ends = [*starts[1:], len(self.rows)]
        return [
            (int(self.rows[begin]), end - begin, self.pack(begin, [a[begin:end] for a in arrays]))
            for begin, end in zip(starts, ends, strict=True)
        ]


@dataclass
class Samples:
    """The samples of a step whose requests want an extra output.

    Attributes:
        rows: `[n]` int64 on the host, the batch row of each sample.
        values: the data that the extra output reads; a copy that may be changed in place. The shape
            is `[n, hidden_size]`, `[n, layers with experts, chosen]` int32, or `[n, vocab_size]`
            float32.
        token_ids: `[n]` int64, a copy of the new tokens; only for the kind "logits".
        temperature: `[n]` float32 on the host; 1 for greedy rows.
        send: copies host arrays to the device, all with one copy.
    """

    rows: NDArray[np.int64]
    values: Tensor
    token_ids: Tensor | None
    temperature: NDArray[np.float32]
    send: Send


@dataclass
class PromptPart:
    """Consecutive positions of a prompt for which a request wants an extra output.

    Attributes:
        row: batch row of the request.
        hidden: `[n, hidden_size]`, the hidden states; a view that must not be changed.
        next_tokens: `[n]` int32 on the host, the token after each position.
        compute_logits: the model's output head, from hidden states to logits.
        vocab_size: width of the logits.
        send: copies host arrays to the device, all with one copy.
        expert_ids: `[n, layers with experts, chosen]` int32, a view; `None` unless a request of
            the step needs it.
    """

    row: int
    hidden: Tensor
    next_tokens: NDArray[np.int32]
    compute_logits: Callable[[Tensor], Tensor]
    vocab_size: int
    send: Send
    expert_ids: Tensor | None = None

    @property
    def rows(self) -> NDArray[np.int64]:
        """`[n]` int64, the batch row of each position."""
        return np.full(len(self.next_tokens), self.row, dtype=np.int64)


class DeviceExtra:
    """Computes one extra output on the device, for all rows of the running batch.

    The `device` module of an extra output names its class as `EXTRA`; each runner has one instance.
    The methods must not wait for the device. They are called only for rows that want the output.

    Attributes:
        reads: the kind of data from which the values are computed.
    """

    reads: ClassVar[Reads]

    def join(self, row: int, params: bytes) -> None:
        """Store the parameters of a request that takes `row`, as encoded in its `ExtraSpec`."""

    def of_samples(self, samples: Samples) -> Gathered:
        """Compute the values for new tokens."""
        raise NotImplementedError

    def of_prompt(self, part: PromptPart) -> Gathered:
        """Compute the values for a part of a prompt; needed if `ExtraSpec.prompt_start` is set."""
        raise NotImplementedError
