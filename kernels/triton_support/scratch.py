"""Device memory that the programs of a launch share, such as counts of finished programs.

Successive launches on a stream may use the same memory. Launches on two streams run concurrently
and may not, so each stream has its own memory.
"""

from collections.abc import Callable

import torch
from torch import Tensor


class StreamScratch:
    """Tensors of one kernel for each device and stream, created at the stream's first request."""

    def __init__(self, make: Callable[[torch.device], tuple[Tensor, ...]]) -> None:
        """Keep `make`; create no tensors yet.

        Args:
            make: returns the tensors on a device. Its writes, such as zeros, run on the current
                stream, and each launch must restore them.
        """
        self._make = make
        self._made: dict[tuple[torch.device, int], tuple[Tensor, ...]] = {}

    def get(self, device: torch.device) -> tuple[Tensor, ...]:
        """Return the current stream's tensors, whose addresses CUDA graphs may hold.

        A graph that is captured on a stream without tensors gets tensors of its own, new ones at
        each call. They are not kept, because a graph's memory exists only from its first replay on.
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
