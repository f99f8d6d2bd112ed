"""Returns the experts that were chosen for the tokens of a step."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from numpy.typing import NDArray

from runtime.extras.device_extras import DeviceExtra, Gathered, PromptPart, Reads, Samples


class RoutedExperts(DeviceExtra):
    """Returns the experts chosen at each position, `[layers with experts, chosen]` int32.

    The encoded values begin with a header of four bytes: the number of bytes per position. All
    numbers are little-endian.
    """

    reads: ClassVar[Reads] = "experts"

    def of_samples(self, samples: Samples) -> Gathered:
        """Return the experts at the positions from which new tokens were sampled."""
        return Gathered(samples.rows, [samples.values], _pack)

    def of_prompt(self, part: PromptPart) -> Gathered:
        """Return the experts of the prompt's tokens."""
        assert part.expert_ids is not None
        return Gathered(part.rows, [part.expert_ids.to(torch.int32, copy=True)], _pack)


def _pack(_: int, arrays: list[NDArray[Any]]) -> bytes:
    data = arrays[0].astype("<i4").tobytes()
    return (len(data) // len(arrays[0])).to_bytes(4, "little") + data


EXTRA = RoutedExperts
