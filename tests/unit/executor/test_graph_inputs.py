"""Which graphs prompts have, and from which host buffers they read their inputs."""

from __future__ import annotations

import pytest
import torch

from runtime.executor.graph_buckets import prompt_buckets
from runtime.executor.graph_inputs import NUM_BUFFERS, HostBuffers, host_buffers


@pytest.mark.parametrize("num_steps", range(9))
def test_no_step_in_flight_reads_a_free_buffer(num_steps: int) -> None:
    host = HostBuffers(16, torch.device("cpu"))
    read = []
    for _ in range(num_steps):
        host.turn = host.following
        read.append(host.turn)
    host.buffers.zero_()
    for buffer in host.free():
        buffer[:] = 1
    free = {turn for turn, buffer in enumerate(host.buffers.tolist()) if all(buffer)}
    assert len(free) == 2
    assert not set(read[-2:]) & free
    assert host.following in free


@pytest.mark.parametrize("size", [1, 5, 16, 17, 300])
def test_no_two_buffers_share_a_cache_line(size: int) -> None:
    """Neither buffers that the host writes nor buffers that the device writes."""
    for buffers in (
        host_buffers(torch.device("cpu"), size),
        HostBuffers(size, torch.device("cpu")).buffers,
    ):
        assert buffers.shape[0] == NUM_BUFFERS
        assert size <= buffers.shape[1] < size + 16
        assert buffers.stride(0) * buffers.element_size() % 128 == 0


@pytest.mark.parametrize(
    ("max_seqs", "few", "mixed"),
    [
        (1, 1, []),
        (3, 3, [3]),
        (96, 4, [96]),
        (110, 4, [110]),
        (128, 4, [96, 128]),
        (256, 4, [96, 256]),
        (4000, 4, [96, 256]),
    ],
)
def test_the_largest_batch_has_a_graph(max_seqs: int, few: int, mixed: list[int]) -> None:
    buckets = prompt_buckets([2, 64, 512], max_seqs)
    assert {bucket.num_seqs for bucket in buckets if bucket.kind == "prompts"} == {few}
    assert sorted({bucket.num_seqs for bucket in buckets if bucket.kind == "mixed"}) == mixed
    assert all(bucket.num_seqs <= bucket.num_tokens for bucket in buckets)
    # The first graph that fits a step is the smallest one that does.
    order = ["prompts", "mixed"]
    assert buckets == sorted(buckets, key=lambda b: (order.index(b.kind), b.num_seqs, b.num_tokens))
