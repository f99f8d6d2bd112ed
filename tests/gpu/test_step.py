"""What only a GPU can show of the engine step: no waiting in it, and memory that runs out."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from runtime.messages import LogprobSpec
from server.bench.shapes import write_shape
from tests.support.engine import InProcessEngine

CUDA: dict[str, Any] = {
    "device": "cuda",
    "dtype": "bfloat16",
    "load_format": "dummy",
    "context_len": 16384,
    "max_total_tokens": 40_000,
    "max_running_requests": 32,
    "chunked_prefill_size": 16384,
    "overlap": True,
    "disable_radix_cache": True,
}
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "seeded": {"temperature": 1.0, "seed": 5},
    "cut": {"temperature": 0.8, "top_k": 20, "top_p": 0.9, "min_p": 0.01},
    "penalties": {"frequency_penalty": 0.5, "presence_penalty": 0.2, "repetition_penalty": 1.1},
    "bias": {"logit_bias": {7: 2.0}, "min_new_tokens": 20},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_shape("0.5b", tmp_path_factory.mktemp("shape"))


@pytest.fixture
def errors_on_sync() -> Iterator[None]:
    yield
    torch.cuda.set_sync_debug_mode("default")


def prompt(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(1, 150_000, length).tolist()


@pytest.mark.parametrize("graphs", [True, False], ids=["graphs", "eager"])
def test_a_step_waits_for_nothing(folder: Path, graphs: bool, errors_on_sync: None) -> None:
    engine = InProcessEngine(folder, **CUDA, disable_cuda_graph=not graphs)
    for round_number in range(2):
        for i, options in enumerate(KINDS.values()):
            logprobs = LogprobSpec(0, 5, [9]) if i % 2 else None
            request_id = 1 + i + 10 * round_number
            engine.add(
                request_id, prompt(40 + 700 * i, i), 30, logprobs, ignore_eos=True, **options
            )
        # The first round compiles kernels and makes plans, which may wait.
        torch.cuda.set_sync_debug_mode("error" if round_number else "default")
        for _ in range(25):
            engine.scheduler.step()
        torch.cuda.set_sync_debug_mode("default")
        engine.run()
        assert all(reason.type == "length" for reason in engine.reasons.values())


def test_memory_that_runs_out_ends_one_request(folder: Path) -> None:
    # Tokens are compared across graph and eager steps: float32 has no ties.
    engine = InProcessEngine(folder, **(CUDA | {"dtype": "float32"}))
    alone = engine.generate(prompt(100), 40, ignore_eos=True)
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    room = torch.cuda.memory_reserved() + 150 * 2**20
    torch.cuda.set_per_process_memory_fraction(room / total)
    try:
        engine.add(11, prompt(100), 40, ignore_eos=True)
        for _ in range(10):
            engine.scheduler.step()
        engine.add(12, prompt(16_000, 1), 4)
        engine.run()
        assert engine.reasons[12].type == "abort"
        assert engine.tokens[11] == alone
        torch.cuda.set_per_process_memory_fraction(1.0)
        engine.add(13, prompt(16_000, 1), 4, ignore_eos=True)
        engine.run()
        assert len(engine.tokens[13]) == 4
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
