"""Lines of the host that graphs read and write: every number of every step arrives."""

from __future__ import annotations

from collections import deque

import numpy as np
import pytest
import torch

from kernels.decode_step import decode_outputs, fetch_inputs
from runtime.executor.graph_inputs import HostLines, host_lines
from tests.support.gpu import DEVICE, captured

NUM_STEPS = 200_000 if DEVICE == "cuda" else 300
# Neither is a multiple of a cache line.
SIZE, NUM_SEQS = 333, 5


@pytest.mark.also_cpu
def test_checksums_of_many_steps() -> None:
    """Two steps are in flight, as in the engine; each returns its line's sum and first numbers."""
    device = torch.device(DEVICE)
    host, kept = HostLines(SIZE, device), host_lines(device, NUM_SEQS)
    kept_lines = list(kept.numpy())
    turn = torch.zeros(1, dtype=torch.int64, device=device)
    numbers = torch.zeros(SIZE, dtype=torch.int64, device=device)
    rows = torch.arange(NUM_SEQS, device=device)
    last_token = torch.zeros(NUM_SEQS, dtype=torch.int64, device=device)

    def work() -> None:
        fetch_inputs(host.lines, turn, numbers)
        tokens = torch.cat([numbers.sum().unsqueeze(0), numbers[: NUM_SEQS - 1]])
        decode_outputs(tokens, rows, turn, last_token, kept)

    replay = work if DEVICE == "cpu" else captured(work)[0]
    turn.fill_(host.turn)
    lines = np.random.default_rng(0).integers(0, 2**40, (1021, SIZE))
    expected = np.concatenate([lines.sum(1, keepdims=True), lines[:, : NUM_SEQS - 1]], axis=1)
    under_way: deque[tuple[int, int, torch.cuda.Event | None]] = deque()
    wrong = 0

    def read() -> int:
        step, line, event = under_way.popleft()
        if event is not None:
            event.synchronize()
        return int((kept_lines[line][:NUM_SEQS] != expected[step % len(lines)]).any())

    for step in range(NUM_STEPS):
        if len(under_way) == 2:
            wrong += read()
        line = host.following
        host.numbers[line][:SIZE] = lines[step % len(lines)]
        replay()
        host.turn = line
        event = torch.cuda.Event() if DEVICE == "cuda" else None
        if event is not None:
            event.record()
        under_way.append((step, line, event))
    while under_way:
        wrong += read()
    assert wrong == 0
