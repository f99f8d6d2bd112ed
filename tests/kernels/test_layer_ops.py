"""Norm, rope, activation, embedding: every implementation against float64 formulas."""

import math
import os
from typing import get_args

import pytest
import torch

from kernels.activation import ACTIVATION, Activation
from kernels.embedding import EMBEDDING, embedding
from kernels.norm import NORM, fused_add_rms_norm, rms_norm
from kernels.rope import ROPE

pytestmark = pytest.mark.pairs(each=("name",))

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}
ACTIVATIONS = get_args(Activation)

# Set by test_triton_interpreted.py: Triton's kernels then take tensors of the CPU.
INTERPRETED = ("triton",) if os.environ.get("TRITON_INTERPRET") == "1" else ()
# More rows than threads share out evenly. Interpreted, each is a program that takes milliseconds
# and knows nothing of the others.
MANY = 9 if INTERPRETED else 130
SHAPES = [(0, 64), (1, 1), (1, 384), (3, 37), (7, 896), (MANY, 640), (5, 4096)]


def names(table):
    on_cpu = dict.fromkeys((*table.preferred.get("cpu", ()), "reference", *INTERPRETED))
    return [name for name in on_cpu if name in table.entries and not table.unavailable(name)]


def close(got, want, dtype):
    assert got.dtype == dtype
    assert got.shape == want.shape
    error = (got.double() - want).norm()
    # Results near zero have fewer digits; where all are zero, so must ours be.
    limit = TOLERANCE[dtype] * want.norm()
    limit += torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps * want.count_nonzero()
    assert error <= limit, f"relative error {error / want.norm():.2e}"


def norm64(x, weight, eps, zero_centered=False):
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * (zero_centered + weight)


def activated64(gate, activation):
    if activation == "silu":
        return gate * torch.sigmoid(gate)
    return gate / 2 * (1 + torch.tanh((2 / math.pi) ** 0.5 * (gate + 0.044715 * gate**3)))


@pytest.mark.parametrize("name", names(ACTIVATION))
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("is_shared", [False, True])
def test_sigmoid_mul(name, dtype, shape, is_shared):
    x, gate = torch.randn(shape).to(dtype), torch.randn(shape[0], shape[1] + 2).to(dtype)
    gate = gate[:, : 1 if is_shared else shape[1]]
    got = ACTIVATION.load(name).sigmoid_mul(gate, x)
    close(got, torch.sigmoid(gate.double()) * x.double(), dtype)


@pytest.mark.parametrize("name", names(NORM))
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("zero_centered", [False, True])
def test_norm(name, dtype, shape, zero_centered):
    kernels = NORM.load(name)
    x, residual = torch.randn(shape).to(dtype), torch.randn(shape).to(dtype)
    weight = torch.randn(shape[1]).to(dtype)
    x_before = x.clone()
    want = norm64(x.double(), weight.double(), 1e-5, zero_centered)
    close(kernels.rms_norm(x, weight, 1e-5, zero_centered), want, dtype)
    stream = (residual + x).double()
    got = kernels.fused_add_rms_norm(x, residual, weight, 1e-5, zero_centered)
    assert torch.equal(residual.double(), stream), "the residual is the sum rounded once"
    close(got, norm64(stream, weight.double(), 1e-5, zero_centered), dtype)
    assert torch.equal(x, x_before)


@pytest.mark.parametrize("name", names(NORM))
@pytest.mark.parametrize("zero_centered", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_norm_rounds_like_transformers(name, dtype, zero_centered):
    from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    theirs = (Gemma3RMSNorm if zero_centered else LlamaRMSNorm)(512, eps=1e-6).to(dtype)
    theirs.weight.data.normal_()
    tokens = 16 if INTERPRETED else 64
    x = torch.randn(tokens, 512).to(dtype)
    want = theirs(x)
    # The order of the sum may move a value across a rounding edge now and then.
    got = NORM.load(name).rms_norm(x, theirs.weight.data, 1e-6, zero_centered)
    assert (got == want).float().mean() > 0.998
    # One head a token, at position 0, where the rotation changes nothing.
    slots = torch.full((tokens,), -1)
    caches = (torch.zeros(1, 1, 1, 512, dtype=dtype) for _ in "kv")
    angles, weights = torch.cat((torch.ones(1, 256), torch.zeros(1, 256)), 1), (theirs.weight.data,)
    qkv = torch.cat((x, x, x), 1)
    shape = (1, 1, 512, angles, torch.zeros_like(slots), slots, *caches, *weights * 2, 1e-6)
    ROPE.load(name).rope_kv_write(qkv, *shape, zero_centered)
    for part in qkv.chunk(3, 1)[:2]:
        assert (part == want).float().mean() > 0.998


@pytest.mark.parametrize("name", names(NORM))
def test_norm_keeps_nan_and_survives_extremes(name):
    kernels = NORM.load(name)
    x = torch.randn(3, 100)
    x[1, 5] = math.nan
    got = kernels.rms_norm(x, torch.ones(100), 1e-6)
    assert got[1].isnan().all()
    assert got[[0, 2]].isfinite().all()
    assert kernels.rms_norm(torch.zeros(2, 100), torch.ones(100), 1e-6).eq(0).all()


@pytest.mark.parametrize("name", names(NORM))
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
# Of one number nothing is left but what the rounding of its mean leaves.
@pytest.mark.parametrize("shape", [shape for shape in SHAPES if shape[1] > 1], ids=str)
@pytest.mark.parametrize("has_bias", [False, True])
def test_layer_norm(name, dtype, shape, has_bias):
    kernels = NORM.load(name)
    x, residual = (torch.randn(shape).to(dtype) + 3 for _ in range(2))
    weight, bias = (torch.randn(shape[1]).to(dtype) for _ in range(2))
    given = bias if has_bias else None

    def want(rows):
        wide = None if given is None else given.double()
        return torch.nn.functional.layer_norm(rows, rows.shape[1:], weight.double(), wide, 1e-5)

    x_before = x.clone()
    close(kernels.layer_norm(x, weight, given, 1e-5), want(x.double()), dtype)
    stream = (residual + x).double()
    got = kernels.fused_add_layer_norm(x, residual, weight, given, 1e-5)
    assert torch.equal(residual.double(), stream), "the residual is the sum rounded once"
    close(got, want(stream), dtype)
    assert torch.equal(x, x_before)


@pytest.mark.parametrize("name", names(NORM))
def test_layer_norm_keeps_nan_and_large_means(name):
    kernels = NORM.load(name)
    x, ones = torch.randn(3, 100), torch.ones(100)
    x[1, 5] = math.nan
    got = kernels.layer_norm(x, ones, None, 1e-6)
    assert got[1].isnan().all()
    assert got[[0, 2]].isfinite().all()
    # The squares are of what is left without the mean.
    far = torch.randn(2, 100) + 1e4
    want = torch.nn.functional.layer_norm(far.double(), (100,))
    assert torch.allclose(kernels.layer_norm(far, ones, None, 1e-5).double(), want, atol=2e-3)


@pytest.mark.parametrize("name", names(ACTIVATION))
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_act_and_mul(name, dtype, shape, activation):
    x = (torch.randn(shape[0], 2 * shape[1]) * 4).to(dtype)
    gate, up = x.double().chunk(2, -1)
    got = ACTIVATION.load(name).act_and_mul(x, activation)
    close(got, activated64(gate, activation) * up, dtype)


@pytest.mark.parametrize("name", names(ACTIVATION))
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activations_of_extremes(name, activation):
    gate = torch.tensor([-1e4, -100.0, -88.0, 0.0, 88.0, 1e4, math.nan] + [1.0] * 30)
    x = torch.cat((gate, torch.ones(37))).unsqueeze(0)
    got = ACTIVATION.load(name).act_and_mul(x, activation)[0]
    want = activated64(gate.double(), activation).float()
    assert torch.allclose(got, want, rtol=1e-5, atol=1e-6, equal_nan=True)


def rope64(x, angles):
    half = x.shape[-1] // 2
    first, second = x[..., :half], x[..., half:]
    cos, sin = angles.cos().unsqueeze(1), angles.sin().unsqueeze(1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)


@pytest.mark.parametrize("name", names(ROPE))
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("head_norm", [None, "plain", "zero_centered"])
@pytest.mark.parametrize(
    ("tokens", "heads", "kv_heads", "dim", "page_size"),
    [
        (0, 4, 2, 64, 16),
        (1, 6, 2, 64, 16),
        (9, 7, 1, 80, 1),
        (40, 2, 2, 96, 32),
        (5, 8, 1, 6, 4),
        (7, 4, 1, 256, 16),
    ],
)
def test_rope_kv_write(name, dtype, head_norm, tokens, heads, kv_heads, dim, page_size):
    qkv = torch.randn(tokens, (heads + 2 * kv_heads) * dim).to(dtype)
    frequencies = 10000.0 ** (-torch.arange(0, dim, 2).double() / dim)
    angles = torch.arange(100).double().unsqueeze(1) * frequencies
    cos_sin = torch.cat((angles.cos(), angles.sin()), -1).float()
    positions = torch.randint(0, 100, (tokens,))
    num_pages = tokens // page_size + 3
    slots = torch.randperm(num_pages * page_size)[:tokens]
    slots[::4] = -1
    weights = [torch.randn(dim).to(dtype) if head_norm else None for _ in "qk"]
    caches = [
        torch.full((num_pages, kv_heads, page_size, dim), math.nan, dtype=dtype) for _ in "kv"
    ]

    parts = (
        qkv.double().view(tokens, heads + 2 * kv_heads, dim).split([heads, kv_heads, kv_heads], 1)
    )
    zero_centered = head_norm == "zero_centered"
    query, key = (
        part if weight is None else norm64(part, weight.double(), 1e-6, zero_centered)
        for part, weight in zip(parts, weights, strict=False)
    )
    query, key = (rope64(part, angles[positions]) for part in (query, key))
    value = parts[2]

    shape = (
        heads,
        kv_heads,
        dim,
        cos_sin,
        positions,
        slots,
        *caches,
        *weights,
        1e-6,
        zero_centered,
    )
    ROPE.load(name).rope_kv_write(qkv, *shape)
    after = qkv.view(tokens, heads + 2 * kv_heads, dim).split([heads, kv_heads, kv_heads], 1)
    close(after[0], query, dtype)
    close(after[1], key, dtype)
    assert torch.equal(after[2].double(), value)
    stored = slots >= 0
    for cache, rows in zip(caches, after[1:], strict=True):
        by_slot = cache.transpose(1, 2).reshape(-1, kv_heads, dim)
        assert torch.equal(by_slot[slots[stored]], rows[stored])
        by_slot[slots[stored]] = math.nan
        assert by_slot.isnan().all(), "a slot that was not named was written"


@pytest.mark.parametrize("name", names(ROPE))
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("tokens", "heads", "dim", "value_dim", "page_size"),
    [(0, 2, 64, 64, 16), (1, 3, 80, 80, 1), (9, 2, 48, 32, 16), (5, 1, 6, 2, 4)],
)
@pytest.mark.parametrize("layout", ["by token", "by head"])
def test_kv_write(name, dtype, tokens, heads, dim, value_dim, page_size, layout):
    key, value = (torch.randn(tokens, heads, size).to(dtype) for size in (dim, value_dim))
    if layout == "by head":
        # As a transposed product comes, with strides that no contiguous tensor has.
        key, value = (each.transpose(0, 1).contiguous().transpose(0, 1) for each in (key, value))
    num_pages = tokens // page_size + 3
    slots = torch.randperm(num_pages * page_size)[:tokens]
    slots[::4] = -1
    shape = (num_pages, heads, page_size, dim)
    caches = [torch.full(shape, math.nan, dtype=dtype) for _ in "kv"]
    ROPE.load(name).kv_write(key, value, slots, *caches)
    stored = slots >= 0
    padded = torch.nn.functional.pad(value, (0, dim - value_dim))
    for cache, rows in zip(caches, (key, padded), strict=True):
        by_slot = cache.transpose(1, 2).reshape(-1, heads, dim)
        assert torch.equal(by_slot[slots[stored]], rows[stored])
        by_slot[slots[stored]] = math.nan
        assert by_slot.isnan().all(), "a slot that was not named was written"


def test_embedding():
    weight = torch.randn(50, 12).bfloat16()
    ids = torch.tensor([3, 0, 49, 3])
    for name in names(EMBEDDING):
        assert torch.equal(EMBEDDING.load(name).embedding(ids, weight), weight[ids])
    assert embedding(ids[:0], weight).shape == (0, 12)


def test_public_functions_reach_an_implementation():
    x = torch.randn(2, 8)
    weight = torch.ones(8)
    want = norm64(x.double(), 1.0, 1e-6)
    close(rms_norm(x, weight, 1e-6), want, torch.float32)
    close(fused_add_rms_norm(x, torch.zeros_like(x), weight, 1e-6), want, torch.float32)


def test_tables_speak_plainly():
    with pytest.raises(
        ValueError, match=r"Unknown implementation of norm 'nope'\. Known: cpu, ref"
    ):
        NORM.load("nope")
    assert NORM.choose("cpu", "reference").reason == "asked for"
    assert NORM.choose("meta").name == "reference"
