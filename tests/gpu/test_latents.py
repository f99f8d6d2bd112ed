"""Latent attention at the shapes of DeepSeek's models beside plain torch, and in the engine."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from benchmarks.h200.latents import OTHER_TILES, Step
from benchmarks.h200.timing import relative_error
from kernels.latent_attention.reference import latent_attention as reference
from tests.support.engine import InProcessEngine
from tests.support.gpu import DEVICE, on_gpu
from tests.support.tiny_families import tiny_family

PROMPTS = [np.random.default_rng(i).integers(3, 500, 3 + 9 * i).tolist() for i in range(6)]


@on_gpu
@pytest.mark.parametrize("heads", [4, 16, 128])
@pytest.mark.parametrize(("batch", "num_new"), [(1, 1), (64, 1), (3, 37)])
def test_real_shapes_equal_the_reference(batch: int, num_new: int, heads: int) -> None:
    step = Step(batch, 211, num_new, heads)
    assert step.error() < 1e-2


@on_gpu
@pytest.mark.parametrize("tile", OTHER_TILES[::7], ids=str)
def test_other_tiles_equal_the_reference(tile: tuple[int, ...]) -> None:
    step = Step(5, 333, 1, 16)
    rest = step.table, step.lengths, step.indptr, 5, 0.1, 512
    want = reference(step.q, step.pools[0], *rest)
    assert relative_error(step.run(0, tile), want) < 1e-2  # type: ignore[arg-type]  # a NamedTuple


def tokens(folder: Path, device: str) -> list[list[int]]:
    engine = InProcessEngine(folder, device=device, dtype="float32", chunked_prefill_size=24)
    for index, prompt in enumerate(PROMPTS):
        engine.add(index + 1, prompt, 24, ignore_eos=True)
    engine.run()
    return [engine.tokens[index + 1] for index in range(len(PROMPTS))]


@on_gpu
@pytest.mark.parametrize("name", ["gpt_oss", "deepseek_v2", "deepseek_v3"])
def test_a_gpu_gives_the_tokens_of_a_cpu(name: str) -> None:
    """In float32, with graphs: decoding, chunks and prompts beside decodes."""
    assert tokens(tiny_family(name), DEVICE) == tokens(tiny_family(name), "cpu")
