"""Memory that programs of a launch share: one piece for each stream."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from kernels.triton_support.scratch import StreamScratch


def test_streams_share_nothing_and_graphs_keep_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[torch.device] = []

    def make(device: torch.device) -> tuple[Tensor, ...]:
        made.append(device)
        return (torch.zeros(3),)

    now = SimpleNamespace(stream=7, captures=False)
    monkeypatch.setattr(
        torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=now.stream)
    )
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: now.captures)
    scratch, device = StreamScratch(make), torch.device("cuda", 0)
    (first,) = scratch.get(device)
    assert scratch.get(device)[0] is first
    now.stream = 8
    (second,) = scratch.get(device)
    assert second is not first
    # A capture on a stream that ran before remembers what it ran with.
    now.captures = True
    assert scratch.get(device)[0] is second
    # On another one its memory is the graph's, and nobody else's.
    now.stream = 9
    assert scratch.get(device)[0] is not scratch.get(device)[0]
    now.captures = False
    (third,) = scratch.get(device)
    assert scratch.get(device)[0] is third
    assert len(made) == 5
    now.stream = 7
    assert scratch.get(torch.device("cuda", 1))[0] is not first
    assert scratch.get(device)[0] is first
