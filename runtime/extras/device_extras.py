"""The device half of an extra: it reads data of a step and makes reports."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

# What an extra may read. For each sample: the hidden state of its logits; the experts chosen for
# its token; the model's raw logits; the logits that are sampled from, with penalties, masks and
# biases. For a whole text: its pooled output.
Reads = Literal["hidden", "experts", "raw_logits", "logits", "pooled"]
Send = Callable[..., list[Tensor]]
Pack = Callable[[int, list[NDArray[Any]]], bytes]


def _as_they_are(_: int, arrays: list[NDArray[Any]]) -> bytes:
    return b"".join(array.tobytes() for array in arrays)


@dataclass
class Gathered:
    """Values of `n` positions, on the device or on their way to the host.

    Attributes:
        rows: `[n]` int64 on the host, the row of each position; positions of a row are adjacent.
        tensors: the values, tensors of shape `[n, ...]`.
        pack: makes a row's block. It takes the index in `rows` of the row's first position, and the
            row's part of each tensor; by default it concatenates their bytes.
    """

    rows: NDArray[np.int64]
    tensors: Sequence[Tensor]
    pack: Pack = _as_they_are

    def to_host(self, copy: Callable[[Tensor], Tensor]) -> Gathered:
        """Return a copy in which `copy` has copied every tensor; `copy` may be asynchronous."""
        return Gathered(self.rows, [copy(each) for each in self.tensors], self.pack)

    def blocks(self) -> list[tuple[int, int, bytes]]:
        """Yield row, number of positions and block of each row; on the host only."""
        arrays = [each.numpy() for each in self.tensors]
        starts = np.flatnonzero(np.diff(self.rows, prepend=-1)).tolist()
        ends = [*starts[1:], len(self.rows)]
        return [
            (int(self.rows[begin]), end - begin, self.pack(begin, [a[begin:end] for a in arrays]))
            for begin, end in zip(starts, ends, strict=True)
        ]


@dataclass
class Samples:
    """The samples of a step whose rows request an extra.

    Attributes:
        rows: `[n]` int64 on the host.
        values: the data that the extra reads of each sample, `[n, hidden_size]`, `[n, layers with
            experts, chosen]` int32, or `[n, vocab_size]` float32; a copy that the extra may change
            in place.
        token_ids: `[n]` int64, the new tokens, also a copy; set for extras that read the sampled
            logits.
        temperature: `[n]` float32 on the host; 1 for greedy rows.
        send: sends host arrays to the device, in one copy.
    """

    rows: NDArray[np.int64]
    values: Tensor
    token_ids: Tensor | None
    temperature: NDArray[np.float32]
    send: Send


@dataclass
class PromptPart:
    """Consecutive positions of a prompt about which an extra reports.

    Attributes:
        row: the prompt's row.
        hidden: `[n, hidden_size]`, a view.
        next_tokens: `[n]` int32 on the host, the token after each position.
        compute_logits: the model's head.
        vocab_size: the logits' width.
        send: sends host arrays to the device, in one copy.
        expert_ids: `[n, layers with experts, chosen]` int32, a view; set if a row of the step
            requests it.
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
        """`[n]`, the row of each position."""
        return np.full(len(self.next_tokens), self.row, dtype=np.int64)


class DeviceExtra:
    """Gathers one extra; `EXTRA` of its `device` module is the class. Each runner has one instance.

    No method waits for the device, and rows without the extra cost no time.

    Attributes:
        reads: the data that the extra reads of each sample.
    """

    reads: ClassVar[Reads]

    def join(self, row: int, params: bytes) -> None:
        """Store `params`, from the `ExtraSpec` of a request that takes a row."""

    def of_samples(self, samples: Samples) -> Gathered:
        """Gather the report on new tokens."""
        raise NotImplementedError

    def of_prompt(self, part: PromptPart) -> Gathered:
        """Gather the report on a prompt; required if an `ExtraSpec.prompt_start` is set."""
        raise NotImplementedError
