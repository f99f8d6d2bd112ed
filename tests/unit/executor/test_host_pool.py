"""Host memory of the prefix cache: its size, and copies between it and the pool."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from runtime.errors import DeviceLost, StartupError
from runtime.executor.host_pool import HostPool, host_pools, num_host_pages, num_host_slots
from runtime.executor.memory import PoolSize
from runtime.models.attention.forward_batch import KVCache
from runtime.step.step_plan import HostCopies

CPU = torch.device("cpu")


def copies(*triples: tuple[int, int, bool]) -> HostCopies:
    pages, host_pages, to_host = np.array(triples).T
    return HostCopies(
        1, 0, pages.astype(np.int32), host_pages.astype(np.int32), to_host.astype(bool)
    )


def test_copies_have_the_effect_of_their_order() -> None:
    k, latent = torch.randn(5, 2, 4, 8), torch.randn(5, 1, 4, 3)
    # A layer that shares another one's pages, one of latents and one without pages.
    kv = [KVCache(k, k + 1), KVCache(latent, latent), KVCache(torch.empty(0), torch.empty(0))]
    kv.append(kv[0])
    pool = HostPool(3, kv, CPU)
    before = k.clone(), latent.clone()
    pool.copy(copies((1, 2, True), (2, 3, True)))
    k.zero_()
    # Page 4 gets what page 1 was, and host page 2 what page 3 is now.
    pool.copy(copies((4, 2, False), (3, 2, True), (3, 3, False)))
    assert torch.equal(k[3], before[0][2])
    assert torch.equal(k[4], before[0][1])
    assert torch.equal(latent[4], before[1][1])
    pool.copy(copies((1, 2, False)))
    assert torch.equal(latent[1], before[1][3])
    assert not k[1].any()


def test_a_failed_copy_ends_the_worker() -> None:
    pool = HostPool(3, [KVCache(torch.zeros(5, 2), torch.zeros(5, 2))], CPU)
    with pytest.raises(DeviceLost, match="pages and host memory failed: index 9"):
        pool.copy(copies((9, 1, True)))


def test_it_is_a_multiple_of_the_pool_and_must_fit() -> None:
    config: Any = SimpleNamespace(host_pool_ratio=0.0, num_local_ranks=2, dp_size=1)
    size = PoolSize(10, 4, 10 * 4 * 64)
    kv = [KVCache(torch.zeros(11, 1, 4, 8), torch.zeros(11, 1, 4, 8))]
    assert host_pools(config, size, kv, CPU) == (None, None)
    config.host_pool_ratio = 2.5
    assert num_host_pages(config, size) == 25
    pages, states = host_pools(config, size, kv, CPU)
    assert pages is not None
    assert states is None
    config.host_pool_ratio = 1e12
    with pytest.raises(StartupError, match=r"--hicache-ratio 1e\+12 needs .* GiB are free; lower"):
        host_pools(config, size, kv, CPU)


def test_slots_of_states_have_memory_of_their_own() -> None:
    config: Any = SimpleNamespace(host_pool_ratio=2.0, num_local_ranks=1, dp_size=1)
    size = PoolSize(10, 4, 10 * 4 * 64, num_state_slots=3)
    conv, matrix = torch.randn(5, 3, 7), torch.randn(5, 2, 2)
    kv = [KVCache(torch.empty(0), torch.empty(0), (conv, matrix))]
    kv.append(KVCache(torch.zeros(11, 1, 4, 8), torch.zeros(11, 1, 4, 8)))
    assert num_host_slots(config, size) == 6
    _, states = host_pools(config, size, kv, CPU)
    assert states is not None
    before = conv[2].clone(), matrix[2].clone()
    states.copy(copies((2, 6, True)))
    conv.zero_()
    matrix.zero_()
    states.copy(copies((3, 6, False)))
    assert torch.equal(conv[3], before[0])
    assert torch.equal(matrix[3], before[1])
    assert not conv[2].any()
