"""RoPE positions for models in which an image takes fewer positions than it has tokens.

Each token has three positions: time, row and column. The three positions of a text token are equal,
and grow by one from token to token. The tokens of an image have the same time, and the row and
column of their part of the image. The text after an image continues after the image's largest
position. So after the last image of a prompt, a token's position is its index plus a constant.

Source: Qwen2-VL (arXiv 2409.12191), multimodal rotary position embedding.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from runtime.step.step_plan import Int64Array, RowImage, StepPlan

_NO_POSITIONS: Int64Array = np.zeros((3, 0), dtype=np.int64)


class RopeRows:
    """The RoPE positions of the tokens in each row of the running batch.

    Attributes:
        delta: `[num_rows]` int64 on the device. After the last image of a row, a token's position
            is its index in the sequence plus this value.
    """

    def __init__(self, num_rows: int, cell: int, device: torch.device) -> None:
        """Start with rows without images; an image token covers `cell` x `cell` pixels."""
        self._cell = cell
        self._delta: Int64Array = np.zeros(num_rows, dtype=np.int64)
        # For each row `[3, n]`: the positions of the n tokens up to the end of the last image.
        self._positions_of_rows = [_NO_POSITIONS] * num_rows
        self._ends: Int64Array = np.zeros(num_rows, dtype=np.int64)
        self.delta = torch.from_numpy(self._delta)
        if device.type != "cpu":
            self.delta = self.delta.to(device)

    def join(self, row: int, images: list[RowImage]) -> None:
        """Set the positions of a row for a prompt with the given images.

        Raises:
            ValueError: an image's size and its number of tokens do not match.
        """
        positions, delta = _positions(images, self._cell)
        self._positions_of_rows[row], self._ends[row] = positions, positions.shape[1]
        if delta != self._delta[row]:
            self._delta[row] = delta
            self.delta[row] = delta

    def shift(
        self, plan: StepPlan, positions: Int64Array, token_rows: Int64Array, indptr: NDArray[Any]
    ) -> Int64Array:
        """Return the RoPE position of each token of a step, `[num_tokens]` int64.

        For an image's tokens this is only the time position; `axes` returns all three.

        Args:
            plan: the step's plan.
            positions: `[num_tokens]`, the index of each token in its sequence.
            token_rows: `[num_tokens]`, the batch row of each token.
            indptr: `[num_seqs + 1]`, where each sequence's tokens begin and end.
        """
        shifted = positions + self._delta[token_rows]
        for tokens, part in self._before_the_end(plan, indptr):
            shifted[tokens] = part[0]
        return shifted

    def axes(self, plan: StepPlan, shifted: Int64Array, indptr: NDArray[Any]) -> Int64Array:
        """Return the three RoPE positions of each token of a step, `[3, num_tokens]` int64.

        Args:
            plan: the step's plan.
            shifted: the result of `shift`.
            indptr: `[num_seqs + 1]`, where each sequence's tokens begin and end.
        """
        axes = np.repeat(shifted[None], 3, axis=0)
        for tokens, part in self._before_the_end(plan, indptr):
            axes[:, tokens] = part
        return axes

    def _before_the_end(
        self, plan: StepPlan, indptr: NDArray[Any]
    ) -> Iterator[tuple[slice, Int64Array]]:
        """Yield the tokens up to the end of their row's last image, with their three positions."""
        for index in np.flatnonzero(plan.start_lens < self._ends[plan.rows]).tolist():
            start, length = int(plan.start_lens[index]), int(plan.query_lens[index])
            part = self._positions_of_rows[plan.rows[index]][:, start : start + length]
            first = int(indptr[index])
            yield slice(first, first + part.shape[1]), part


def _positions(images: list[RowImage], cell: int) -> tuple[Int64Array, int]:
    """Return `[3, n]` positions of the tokens up to the last image's end, and the row's `delta`."""
    if not images:
        return _NO_POSITIONS, 0
    parts: list[Int64Array] = []
    token = position = 0
    for image in images:
        text = image.start - token
        parts.append(np.repeat(np.arange(position, position + text)[None], 3, axis=0))
        position += text
        _, height, width = (side // cell for side in image.size)
        if height * width != image.num_tokens:
            raise ValueError(f"an image of {height} x {width} vectors has {image.num_tokens}")
        rows, columns = np.divmod(np.arange(image.num_tokens), width)
        parts.append(np.stack((np.zeros_like(rows), rows, columns)) + position)
        position += max(height, width)
        token = image.start + image.num_tokens
    return np.concatenate(parts, axis=1), position - token
