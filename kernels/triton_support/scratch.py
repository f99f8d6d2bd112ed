"""Device memory that the programs of a launch share, such as counts of those that are done.

One launch after the other may use the same memory, which is how a stream runs them; launches on two
streams may not, for they run side by side. So each stream has its own.
"""

from collections.abc import Callable

import torch
from torch import Tensor


class StreamScratch:
    """Tensors of one kernel for each device and stream, made when a stream first asks."""

    def __init__(self, make: Callable[[torch.device], tuple[Tensor, ...]]) -> None:
        """Make nothing yet.

        Args:
            make: returns the tensors on a device; what it writes there, such as zeros, is written
                on the current stream, and each launch leaves it as it was.
        """
        self._make = make
        self._made: dict[tuple[torch.device, int], tuple[Tensor, ...]] = {}

    def get(self, device: torch.device) -> tuple[Tensor, ...]:
        """Return the current stream's tensors; graphs may remember their addresses.

        While a graph is captured on a stream that has none, they are the graph's own, and made
        again each time: memory of a graph is not there before its first replay.
        """
        if device.type != "cuda":
            return self._of_stream(device, 0)
        stream = torch.cuda.current_stream(device)
        key = device, stream.cuda_stream
        if key not in self._made and torch.cuda.is_current_stream_capturing():
            return self._make(device)
        return self._of_stream(*key)

    def _of_stream(self, device: torch.device, stream: int) -> tuple[Tensor, ...]:
        key = device, stream
        if key not in self._made:
            self._made[key] = self._make(device)
        return self._made[key]
