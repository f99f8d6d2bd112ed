"""Triton's attention to keys and values in 8-bit floats: in the interpreter, or on a GPU."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from kernels.kv_forms import KV_FORMS, kept, numbers
from kernels.paged_attention import PAGED_ATTENTION
from kernels.rope import ROPE

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
HEADS, KV_HEADS, DIM, PAGE_SIZE = 8, 2, 64, 16
FORMS = ["fp8_e4m3", "fp8_e5m2"]
# The interpreter rounds to E5M2 wrongly.
WRITTEN = FORMS if DEVICE == "cuda" else FORMS[:1]
TYPES = [torch.bfloat16, torch.float16, torch.float32] if DEVICE == "cuda" else [torch.bfloat16]


def numbers_of(*shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(shape[0])
    return torch.randn(shape, generator=generator).to(DEVICE)


def empty_caches(name: str, num_pages: int) -> list[Tensor]:
    shape = (num_pages, KV_HEADS, PAGE_SIZE, DIM)
    made = torch.zeros(shape, dtype=torch.uint8, device=DEVICE)
    dtype = KV_FORMS[name].dtype
    assert dtype is not None
    return [made.clone().view(dtype) for _ in "kv"]


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("name", WRITTEN)
def test_what_is_written(name: str, dtype: torch.dtype) -> None:
    tokens = 20
    qkv = (numbers_of(tokens, (HEADS + 2 * KV_HEADS) * DIM) * 3).to(dtype)
    qkv[0, -1], qkv[1, -1], qkv[2, -1] = math.nan, 30000.0, -30000.0
    slots = torch.arange(tokens, device=DEVICE) + 5
    angles = numbers_of(tokens, DIM // 2)
    cos_sin = torch.cat((angles.cos(), angles.sin()), dim=1)
    at = torch.arange(tokens, device=DEVICE)
    rotated, caches = qkv.clone(), empty_caches(name, 2)
    wide = [torch.zeros(*cache.shape, dtype=dtype, device=DEVICE) for cache in caches]
    for to, rows in ((caches, qkv.clone()), (wide, rotated)):
        ROPE.load("triton").rope_kv_write(
            rows, HEADS, KV_HEADS, DIM, cos_sin, at, slots, *to, None, None, 1e-6
        )
    halves = empty_caches(name, 2)
    heads = rotated.view(tokens, -1, DIM)
    ROPE.load("triton").kv_write(
        heads[:, HEADS : HEADS + KV_HEADS], heads[:, HEADS + KV_HEADS :], slots, *halves
    )
    for plain, once, apart in zip(wide, caches, halves, strict=True):
        expected = kept(plain, once.dtype)
        same = expected.view(torch.uint8) == once.view(torch.uint8)
        assert bool((same | (expected.float().isnan() & once.float().isnan())).all())
        assert torch.equal(once.view(torch.uint8), apart.view(torch.uint8))


@pytest.mark.parametrize("implementation", ["triton", "triton_invariant"])
@pytest.mark.parametrize("queries", [(1, 1, 1), (1, 20, 33)])
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("name", FORMS)
def test_attention(
    name: str, dtype: torch.dtype, queries: tuple[int, ...], implementation: str
) -> None:
    lengths = (70, 20, 45)
    caches = [
        kept(numbers_of(16, KV_HEADS, PAGE_SIZE, DIM), c.dtype) for c in empty_caches(name, 1)
    ]
    pages = torch.randperm(16, generator=torch.Generator().manual_seed(1))[:15].view(3, 5)
    table = pages.to(DEVICE, torch.int32).contiguous()
    q = numbers_of(sum(queries), HEADS, DIM).to(dtype)
    starts = torch.tensor([0, *torch.tensor(queries).cumsum(0).tolist()], dtype=torch.int32)
    step = table, torch.tensor(lengths, dtype=torch.int32, device=DEVICE), starts.to(DEVICE)
    options = DIM**-0.5, -1, None
    found = PAGED_ATTENTION.load(implementation).paged_attention(q, *caches, *step, *options)
    wide = [numbers(cache) for cache in caches]
    reference = PAGED_ATTENTION.load("reference")
    expected = reference.paged_attention(q.float(), *wide, *step, *options)
    tolerance = 2e-3 if dtype is torch.float32 else 1e-2
    assert float((found.float() - expected).norm() / expected.norm()) < tolerance
