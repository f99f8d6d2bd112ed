"""Keys and values in fewer bits: what is written, and attention to it."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from kernels.kv_forms import KV_FORMS, kept, numbers
from kernels.paged_attention import PAGED_ATTENTION
from kernels.rope import ROPE

SMALL = [name for name in KV_FORMS if name != "auto"]
LIBRARY = pytest.mark.skipif(
    PAGED_ATTENTION.unavailable("cpu") is not None, reason="no C++ library here"
)
HEADS, KV_HEADS, DIM, PAGE_SIZE = 6, 2, 32, 4


def written(name: str, implementation: str, qkv: Tensor) -> list[Tensor]:
    """The caches after a step of one sequence, on pages in descending order."""
    form = KV_FORMS[name]
    tokens = len(qkv)
    num_pages = -(-tokens // PAGE_SIZE)
    shape = (num_pages + 1, KV_HEADS, PAGE_SIZE, form.row_elements(DIM))
    caches = [torch.zeros(shape, dtype=form.dtype or qkv.dtype) for _ in "kv"]
    at = torch.arange(tokens)
    slots = (num_pages - at // PAGE_SIZE) * PAGE_SIZE + at % PAGE_SIZE
    angles = torch.rand(tokens, DIM // 2, generator=torch.Generator().manual_seed(1))
    cos_sin = torch.cat((angles.cos(), angles.sin()), dim=1)
    ROPE.load(implementation).rope_kv_write(
        qkv, HEADS, KV_HEADS, DIM, cos_sin, at, slots, *caches, None, None, 1e-6
    )
    return caches


def attended(implementation: str, qkv: Tensor, caches: list[Tensor]) -> Tensor:
    tokens, num_pages = len(qkv), len(caches[0]) - 1
    pages = torch.arange(num_pages, 0, -1, dtype=torch.int32)[None].contiguous()
    lengths = torch.tensor([tokens], dtype=torch.int32)
    return PAGED_ATTENTION.load(implementation).paged_attention(
        qkv.view(tokens, -1, DIM)[:, :HEADS],
        *caches,
        pages,
        lengths,
        torch.tensor([0, tokens], dtype=torch.int32),
        DIM**-0.5,
        -1,
        None,
    )


def rows(tokens: int, dtype: torch.dtype) -> Tensor:
    made = torch.randn(
        tokens, (HEADS + 2 * KV_HEADS) * DIM, generator=torch.Generator().manual_seed(tokens)
    )
    return made.to(dtype)


@LIBRARY
@pytest.mark.parametrize("name", ["fp8_e4m3", "fp8_e5m2"])
def test_every_number_is_rounded_as_torch_does(name: str) -> None:
    dtype = KV_FORMS[name].dtype
    assert dtype is not None
    codes = torch.arange(256, dtype=torch.uint8).view(dtype).float()
    finite = codes[codes.isfinite()].unique()
    between = (finite[1:] + finite[:-1]) / 2
    nearby = [between * (1 + step) for step in (-1e-6, 1e-6)]
    beyond = torch.tensor([1e-30, -1e-30, 1e5, -1e5, math.inf, -math.inf, math.nan, 0.0, -0.0])
    values = torch.cat((finite, between, *nearby, beyond))
    values = torch.cat((values, values.new_zeros(-len(values) % (2 * KV_HEADS * DIM))))
    values = values.view(-1, 2 * KV_HEADS * DIM)
    qkv = torch.cat((torch.zeros(len(values), HEADS * DIM), values), dim=1)
    # Values are not rotated.
    _, found = written(name, "cpu", qkv.clone())
    most = torch.finfo(dtype).max
    for token, row in enumerate(values[:, KV_HEADS * DIM :]):
        page = len(found) - 1 - token // PAGE_SIZE
        stored = found[page, :, token % PAGE_SIZE].flatten()
        expected = row.clamp(-most, most).to(dtype)
        both_nan = stored.float().isnan() & expected.float().isnan()
        assert bool((both_nan | (stored.view(torch.uint8) == expected.view(torch.uint8))).all())


@LIBRARY
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", KV_FORMS)
def test_the_library_writes_what_plain_torch_writes(name: str, dtype: torch.dtype) -> None:
    qkv = rows(21, dtype)
    ours, theirs = written(name, "cpu", qkv.clone()), written(name, "reference", qkv.clone())
    assert torch.equal(ours[1].view(torch.uint8), theirs[1].view(torch.uint8))
    # Keys are rotated; the last bit may differ before they are rounded, and then the code.
    gap = (numbers(ours[0]) - numbers(theirs[0])).abs()
    assert float(gap.max()) <= (0.51 if "fp8" in name else 0.05)
    assert float(gap.mean()) < 1e-3


@LIBRARY
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tokens", [1, 21, 300])
@pytest.mark.parametrize("name", KV_FORMS)
def test_attention_to_what_is_kept(name: str, tokens: int, dtype: torch.dtype) -> None:
    qkv = rows(tokens, dtype)
    caches = written(name, "cpu", qkv)
    # The same numbers in float32, by plain torch.
    wide = [numbers(cache.view(torch.uint8).view(cache.dtype)) for cache in caches]
    expected = attended("reference", qkv.float(), wide)
    tolerance = 2e-5 if dtype is torch.float32 else 2e-2
    for implementation in ("cpu", "reference"):
        found = attended(implementation, qkv, caches).float()
        assert float((found - expected).abs().max()) < tolerance


# Largest error of attention, beside full precision: what the documentation says of the forms.
ERRORS = {"auto": 0.0, "bf16": 0.006, "int8": 0.012, "fp8_e4m3": 0.06, "fp8_e5m2": 0.12}


@pytest.mark.parametrize("name", KV_FORMS)
def test_what_a_form_costs(name: str) -> None:
    qkv = rows(64, torch.float32)
    exact, found = (
        attended("reference", rotated, written(each, "reference", rotated))
        for each, rotated in (("auto", qkv.clone()), (name, qkv.clone()))
    )
    error = (found - exact).norm() / exact.norm()
    assert ERRORS[name] / 4 <= float(error) <= ERRORS[name]


@LIBRARY
@pytest.mark.parametrize("implementation", ["cpu", "reference"])
@pytest.mark.parametrize("name", KV_FORMS)
def test_a_nan_stays_one(name: str, implementation: str) -> None:
    qkv = rows(8, torch.float32)
    qkv[3, -1] = math.nan
    caches = written(name, implementation, qkv)
    out = attended(implementation, qkv, caches).view(8, HEADS, DIM)
    # Of the last head's values, from the fourth token on.
    assert bool(out[3:, HEADS // KV_HEADS :].isnan()[..., -1].all())
    assert not bool(out[:, : HEADS // KV_HEADS].isnan().any())


def test_rows_of_int8_come_back() -> None:
    made = rows(5, torch.float32).view(5, -1, DIM)
    found = numbers(kept(made, torch.int8))
    assert float((found - made).abs().max()) <= float(made.abs().max()) / 127 / 2 * 1.01
