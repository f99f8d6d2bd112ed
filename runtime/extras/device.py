"""The device half of an extra: what it reads of a step, and what it gives."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

# Of each sample: what its logits are made of; the experts that its token passed; the logits as the
# model gives them; those that are sampled from, with penalties, masks and biases. Of a text: the
# numbers of all of it.
Reads = Literal["hidden", "experts", "raw_logits", "logits", "pooled"]
Send = Callable[..., list[Tensor]]
Pack = Callable[[int, list[NDArray[Any]]], bytes]


def _as_they_are(_: int, arrays: list[NDArray[Any]]) -> bytes:
    return b"".join(array.tobytes() for array in arrays)


@dataclass
class Gathered:
    """Numbers of `n` positions, on the device or on their way to the host.

    Attributes:
        rows: `[n]` int64 on the host, whose each position is; those of a row follow one another.
        tensors: `[n, ...]` each.
        pack: gives a row's block: takes the place of the row's first position in `rows`, and what
            each of `tensors` holds for the row; by default their bytes one after the other.
    """

    rows: NDArray[np.int64]
    tensors: Sequence[Tensor]
    pack: Pack = _as_they_are

    def to_host(self, copy: Callable[[Tensor], Tensor]) -> Gathered:
        """The same with every tensor copied by `copy`, which need not wait."""
        return Gathered(self.rows, [copy(each) for each in self.tensors], self.pack)

    def blocks(self) -> list[tuple[int, int, bytes]]:
        """Row, number of positions and block of each row; on the host only."""
        arrays = [each.numpy() for each in self.tensors]
        starts = np.flatnonzero(np.diff(self.rows, prepend=-1)).tolist()
        ends = [*starts[1:], len(self.rows)]
        return [
            (int(self.rows[begin]), end - begin, self.pack(begin, [a[begin:end] for a in arrays]))
            for begin, end in zip(starts, ends, strict=True)
        ]


@dataclass
class Samples:
    """The samples of a step whose rows ask for an extra.

    Attributes:
        rows: `[n]` int64 on the host.
        values: what the extra reads of each, `[n, hidden_size]`, `[n, layers with experts, chosen]`
            int32, or `[n, vocab_size]` float32; the extra's own, to be changed in place.
        token_ids: `[n]` int64, the new tokens, its own too, where the sampled logits are read.
        temperature: `[n]` float32 on the host; 1 for greedy rows.
        send: brings arrays of the host to the device, in one copy.
    """

    rows: NDArray[np.int64]
    values: Tensor
    token_ids: Tensor | None
    temperature: NDArray[np.float32]
    send: Send


@dataclass
class PromptPart:
    """Consecutive positions of a prompt that an extra reports.

    Attributes:
        row: whose they are.
        hidden: `[n, hidden_size]`, a view.
        next_tokens: `[n]` int32 on the host, the token behind each position.
        compute_logits: the model's head.
        vocab_size: the logits' width.
        send: brings arrays of the host to the device, in one copy.
        expert_ids: `[n, layers with experts, chosen]` int32, a view; where a row of the step asks.
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
        """`[n]`, the row for each position."""
        return np.full(len(self.next_tokens), self.row, dtype=np.int64)


class DeviceExtra:
    """Gathers one extra; `EXTRA` of its `device` module is the class, one is made for each runner.

    Nothing here waits for the device, and only rows that asked are touched.

    Attributes:
        reads: what it takes of each sample.
    """

    reads: ClassVar[Reads]

    def join(self, row: int, params: bytes) -> None:
        """A request that asks for it takes a row; `params` are those of its `ExtraSpec`."""

    def of_samples(self, samples: Samples) -> Gathered:
        """Gather what is reported of new tokens."""
        raise NotImplementedError

    def of_prompt(self, part: PromptPart) -> Gathered:
        """Gather what is reported of a prompt; needed where an `ExtraSpec.prompt_start` is set."""
        raise NotImplementedError
