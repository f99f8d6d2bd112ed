"""Latent attention at the shapes of DeepSeek's models beside plain torch, and in the engine."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks.h200.latents import HOPPER_TILES, OTHER_TILES, Step, Tile
from benchmarks.h200.timing import relative_error
from kernels.latent_attention.reference import latent_attention as reference
from kernels.latent_attention.triton import latent_attention
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
@pytest.mark.parametrize("heads", [4, 16, 128])
@pytest.mark.parametrize("batch", [1, 7, 64, 200])
def test_sequences_of_any_length_equal_the_reference(batch: int, heads: int) -> None:
    """Programs start and end within sequences, and one sequence has many programs."""
    step = Step(batch, 3000, 1, heads, shortest=1)
    assert step.error() < 1e-2


@on_gpu
@pytest.mark.parametrize("tile", [*OTHER_TILES[::7], *HOPPER_TILES], ids=str)
def test_other_tiles_equal_the_reference(tile: Tile) -> None:
    step = Step(5, 333, 1, 20)
    rest = step.table, step.lengths, step.indptr, 5, 0.1, 512
    want = reference(step.q, step.pools[0], *rest)
    assert relative_error(step.run(0, tile), want) < 1e-2


@on_gpu
@pytest.mark.parametrize("page_size", [1, 64])
def test_other_page_sizes_equal_the_reference(page_size: int) -> None:
    step = Step(7, 700, 1, 16, shortest=1)
    tokens = step.pools[0].view(-1, 576)
    num_pages = len(tokens) // page_size
    cache = tokens[: num_pages * page_size].view(num_pages, 1, page_size, 576)
    width = 700 // page_size
    table = torch.randperm(num_pages, device=DEVICE)[: 7 * width].view(7, width).to(torch.int32)
    lengths = step.lengths.clamp(max=width * page_size)
    rest = table, lengths, step.indptr, 7, 0.1, 512
    got = latent_attention(step.q, cache, *rest)
    assert relative_error(got, reference(step.q, cache, *rest)) < 1e-2


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
