"""Long prompts of any length beside decoding rows do not wait for a plan or for memory."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from headrace.bench.shapes import write_shape
from runtime.ipc.messages import AbortRequests
from tests.support.engine import InProcessEngine
from tests.support.gpu import on_gpu

pytestmark = on_gpu
NUM_ROWS = 64
OPTIONS: dict[str, Any] = {
    "device": "cuda",
    "dtype": "bfloat16",
    "load_format": "dummy",
    "context_len": 16384,
    "chunked_prefill_size": 8192,
    "overlap": True,
    "disable_radix_cache": True,
}
# What a plan takes the host; a step of 8192 tokens takes the device 16 ms.
PLAN_S = 0.041


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_shape("0.5b", tmp_path_factory.mktemp("shape"))


def prompt(length: int, seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(1, 150_000, length).tolist()


def test_a_new_length_of_prompts_makes_no_gap(folder: Path) -> None:
    engine = InProcessEngine(
        folder, **OPTIONS, max_total_tokens=200_000, max_running_requests=NUM_ROWS + 8
    )
    for row in range(NUM_ROWS):
        engine.add(1 + row, prompt(8, row), 4000, ignore_eos=True)
    for _ in range(30):
        engine.scheduler.step()
    lengths = [*range(2048, 8193, 256), 2049, 3000, 5001, 8191]
    number = 1000

    def largest_gap(batch: list[int]) -> float:
        """Between two tokens of the rows that decode, while prompts of these lengths come."""
        nonlocal number
        first = number
        for length in batch:
            engine.add(number, prompt(length, number), 2, ignore_eos=True)
            number += 1
        gap, before = 0.0, time.perf_counter()
        while any(each not in engine.reasons for each in range(first, number)):
            engine.scheduler.step()
            now = time.perf_counter()
            gap, before = max(gap, now - before), now
        return gap

    # One whose length was met comes first: what any prompt needs is there then.
    largest_gap([8192])
    batches = [[length] for length in lengths] + [[2048] * 4, [2048] * 3, [2304] * 2, [4096] * 2]
    first = [largest_gap(batch) for batch in batches]
    second = [largest_gap(batch) for batch in batches]
    late = {
        str(batch): (round(once, 4), round(again, 4))
        for batch, once, again in zip(batches, first, second, strict=True)
        if once > again + PLAN_S / 2
    }
    engine.scheduler.receive([AbortRequests(list(range(1, NUM_ROWS + 1)))])
    engine.run()
    print(f"largest gap {max(first):.4f} s, when all lengths were met {max(second):.4f} s")
    # Some may have met something else, as a library's kernel that was not loaded yet.
    assert len(late) <= 2, late


def test_no_shape_of_prompts_is_new_to_the_kernel(folder: Path) -> None:
    """A call of each shape takes the host as long as its repetition."""
    from kernels.prompt_attention import cudnn

    reason = cudnn.unavailable()
    if reason:
        pytest.skip(reason)
    InProcessEngine(folder, **OPTIONS, max_total_tokens=40_000, max_running_requests=8)
    heads, kv_heads, dim = 14, 2, 64
    took: dict[str, float] = {}
    for lengths in ([2048], [2049], [2304] * 2, [2048] * 4, [4096] * 2, [5000], [7936], [8191]):
        qkv = torch.randn(
            sum(lengths), heads + 2 * kv_heads, dim, device="cuda", dtype=torch.bfloat16
        )
        q, k, v = qkv.split([heads, kv_heads, kv_heads], dim=1)
        torch.cuda.synchronize()
        started = time.perf_counter()
        cudnn.prompt_attention(q, k, v, lengths, dim**-0.5)
        took[str(lengths)] = time.perf_counter() - started
    late = {name: each for name, each in took.items() if each > PLAN_S / 2}
    assert len(late) <= 1, took


def test_the_longest_prompts_fit_where_pages_take_all_the_rest(folder: Path) -> None:
    """What a step needs was measured with the copies that a length which is not round needs."""
    options = OPTIONS | {"context_len": 65536}
    engine = InProcessEngine(
        folder,
        **options,
        mem_fraction_static=0.99,
        max_total_tokens=None,
        max_running_requests=256,
    )
    for number, length in enumerate((8191, 8192, 8191, 8190), 1):
        engine.add(number, prompt(length, number), 3, ignore_eos=True)
        engine.run()
        assert engine.reasons[number].type == "length", engine.reasons[number]
    free, _ = torch.cuda.mem_get_info()
    print(f"{free / 2**20:.0f} MiB stay free")
