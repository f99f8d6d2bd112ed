"""Recurrent states on a GPU: kernels, CUDA graphs, and every way of computing a prompt."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kernels.causal_conv import CAUSAL_CONV
from kernels.gated_delta import GATED_DELTA, DeltaShape
from kernels.mamba2 import MAMBA2, Mamba2Shape
from kernels.state_places import StatePlaces
from tests.support.gpu import DEVICE, on_gpu, prompt, small_engine
from tests.support.tiny_models import TINY_HYBRIDS, tiny_model

COMMON = prompt(70, 1)
PROMPTS = [prompt(90, 2), prompt(2, 3), COMMON + prompt(30, 4), COMMON + prompt(9, 5)]
NUM_NEW = 20


def answers(name: str, **options: Any) -> list[list[int]]:
    engine = small_engine(tiny_model(name), **options)
    for first_id in (1, 11):
        for i, each in enumerate(PROMPTS):
            engine.add(first_id + i, each, NUM_NEW, ignore_eos=True)
        engine.run()
    if not options.get("disable_radix_cache"):
        assert engine.cached[13] >= 64
    return [engine.tokens[i] for first_id in (1, 11) for i in range(first_id, first_id + 4)]


@pytest.mark.also_cpu
@pytest.mark.parametrize("name", TINY_HYBRIDS)
def test_graphs_chunks_and_snapshots_do_not_show(name: str) -> None:
    plain = answers(name, disable_cuda_graph=True, overlap=False, disable_radix_cache=True)
    assert answers(name) == plain
    assert answers(name, chunked_prefill_size=7) == plain


def places_of_equals(num_seqs: int, num_tokens: int) -> StatePlaces:
    """Places of sequences of equal lengths, each of which reads a slot and writes another."""
    bounds = torch.arange(num_seqs + 1, dtype=torch.int32) * (num_tokens // num_seqs)
    return StatePlaces(
        bounds,
        torch.arange(num_seqs),
        torch.arange(num_seqs + 1, dtype=torch.int32),
        bounds[1:].long(),
        torch.arange(num_seqs) + num_seqs,
        num_tokens == num_seqs,
    )


def on_the_device(places: StatePlaces) -> StatePlaces:
    return StatePlaces(*(each.to(DEVICE) for each in places[:-1]), places.is_decode)


@on_gpu
@pytest.mark.parametrize("num_tokens", [64, 700])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", [each for each in MAMBA2 if each.startswith("triton")])
def test_mamba_2_equals_the_reference_at_the_sizes_of_a_model(
    name: str, num_tokens: int, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    shape, num_seqs = Mamba2Shape(8, 64, 64, 128), 64 if num_tokens == 64 else 2
    places = places_of_equals(num_seqs, num_tokens)
    xbc = torch.randn(num_tokens, sum(shape.spans)).to(dtype)
    dt = torch.randn(num_tokens, 64).to(dtype)
    heads = torch.stack([torch.rand(64), torch.randn(64) - 4, torch.ones(64)])
    state = torch.randn(2 * num_seqs, 64, 128, 64)
    state[0] = 0
    on_cpu = state.clone()
    want = MAMBA2.load("reference").mamba2(xbc, dt, heads, on_cpu, places, shape)
    there = state.to(DEVICE)
    given = [each.to(DEVICE) for each in (xbc, dt, heads)]
    got = MAMBA2.load(name).mamba2(*given, there, on_the_device(places), shape)
    limit = 2e-2 if dtype is torch.bfloat16 else 1e-4
    torch.testing.assert_close(got.cpu(), want, rtol=limit, atol=limit * float(want.abs().max()))
    largest = float(on_cpu.abs().max())
    torch.testing.assert_close(there.cpu(), on_cpu, rtol=1e-3, atol=1e-3 * largest)


@on_gpu
@pytest.mark.parametrize("num_tokens", [64, 700])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_kernels_equal_the_reference_at_the_sizes_of_a_model(
    num_tokens: int, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    shape, num_seqs = DeltaShape(16, 32, 128, 128), 64 if num_tokens == 64 else 2
    places = places_of_equals(num_seqs, num_tokens)
    qkv = torch.randn(num_tokens, shape.width).to(dtype)
    gates = torch.randn(num_tokens, 64).to(dtype)
    decay, dt_bias = -torch.rand(32), torch.randn(32)
    state = torch.randn(2 * num_seqs, 32, 128, 128)
    state[0] = 0
    on_cpu = state.clone()
    want = GATED_DELTA.load("reference").gated_delta(
        qkv, gates, decay, dt_bias, on_cpu, places, shape
    )

    given = [each.to(DEVICE) for each in (qkv, gates, decay, dt_bias)]
    there = state.to(DEVICE)
    moved = on_the_device(places)
    got = GATED_DELTA.load("triton").gated_delta(*given, there, moved, shape)
    limit = 2e-2 if dtype is torch.bfloat16 else 1e-4
    torch.testing.assert_close(got.cpu(), want, rtol=limit, atol=limit)
    torch.testing.assert_close(there.cpu(), on_cpu, rtol=1e-3, atol=1e-3)


@on_gpu
def test_the_convolution_equals_the_reference() -> None:
    torch.manual_seed(0)
    state, x, weight = torch.randn(9, 3, 8192), torch.randn(40, 8192), torch.randn(8192, 4)
    taps = torch.randint(0, 40 + 2 * 3, (43, 3))
    reads, saves = torch.tensor([1, 2]), torch.tensor([4, 5, 6])
    given = x, weight, None, state, reads, taps, saves
    there = [None if each is None else each.to(DEVICE) for each in given]
    got = CAUSAL_CONV.load("triton").causal_conv(*there, silu=True)
    want = CAUSAL_CONV.load("reference").causal_conv(*given, silu=True)
    torch.testing.assert_close(got.cpu(), want, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(there[3].cpu(), state)
