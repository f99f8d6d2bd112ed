"""A second stream, for work at the same time as a kernel that leaves much of the GPU idle.

The allocator reuses memory for later work of the stream on which it was allocated. So memory for
the second stream must be allocated on the current stream before the fork, or be kept until the
join. In a CUDA graph a fork and a join are edges between kernels.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import torch


@cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


@contextmanager
def forked(device: torch.device) -> Iterator[None]:
    """Launch the block's kernels on the second stream, after all present work of the current one.

    Without a GPU, the block runs as usual.
    """
    if device.type != "cuda":
        yield
        return
    side = _stream(device)
    side.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(side):
        yield


def join(device: torch.device) -> None:
    """Let the current stream wait for the second one."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).wait_stream(_stream(device))
