"""torch's own operations between a tower's products, on a CPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def one_thread(device: torch.device) -> Iterator[None]:
    """Let torch's operations run on this thread; kernels of ours belong outside.

    They move numbers, which one core does in well under a millisecond. torch would share each of
    them with a thread that, where cores are busy, has its turn only when the system gives it one:
    there a tower took 275 ms for three pictures of 64 tokens, most of it so.
    """
    if device.type != "cpu":
        yield
        return
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
