"""Buffers of the host that graphs read and write: every number of every step arrives."""

from __future__ import annotations

from collections import deque

import numpy as np
import pytest
import torch

from kernels.decode_step import decode_outputs, fetch_inputs
from runtime.executor.graph_inputs import HostBuffers, host_buffers
from tests.support.gpu import DEVICE, captured

NUM_STEPS = 200_000 if DEVICE == "cuda" else 300
# Neither is a multiple of a cache line.
SIZE, NUM_SEQS = 333, 5


@pytest.mark.also_cpu
def test_checksums_of_many_steps() -> None:
    """Two steps are in flight, as in the engine; each returns the sum and first numbers it read."""
    device = torch.device(DEVICE)
    host, kept = HostBuffers(SIZE, device), host_buffers(device, NUM_SEQS)
    kept_buffers = list(kept.numpy())
    turn = torch.zeros(1, dtype=torch.int64, device=device)
    numbers = torch.zeros(SIZE, dtype=torch.int64, device=device)
    rows = torch.arange(NUM_SEQS, device=device)
    last_token = torch.zeros(NUM_SEQS, dtype=torch.int64, device=device)

    def work() -> None:
        fetch_inputs(host.buffers, turn, numbers)
        tokens = torch.cat([numbers.sum().unsqueeze(0), numbers[: NUM_SEQS - 1]])
        decode_outputs(tokens, rows, turn, last_token, kept)

    replay = work if DEVICE == "cpu" else captured(work)[0]
    turn.fill_(host.turn)
    buffers = np.random.default_rng(0).integers(0, 2**40, (1021, SIZE))
    expected = np.concatenate([buffers.sum(1, keepdims=True), buffers[:, : NUM_SEQS - 1]], axis=1)
    under_way: deque[tuple[int, int, torch.cuda.Event | None]] = deque()
    wrong = 0

    def read() -> int:
        step, buffer_index, event = under_way.popleft()
        if event is not None:
            event.synchronize()
        return int((kept_buffers[buffer_index][:NUM_SEQS] != expected[step % len(buffers)]).any())

    for step in range(NUM_STEPS):
        if len(under_way) == 2:
            wrong += read()
        buffer_index = host.following
        host.numbers[buffer_index][:SIZE] = buffers[step % len(buffers)]
        replay()
        host.turn = buffer_index
        event = torch.cuda.Event() if DEVICE == "cuda" else None
        if event is not None:
            event.record()
        under_way.append((step, buffer_index, event))
    while under_way:
        wrong += read()
    assert wrong == 0
