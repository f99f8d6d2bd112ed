"""Packed linear layers: products, conversion back to the plain weight, replacement."""

from typing import get_args

import pytest
import torch

from kernels.activation import Unary, act_and_mul, reference, unary
from kernels.linear import LINEAR, pack

IMPLEMENTATIONS = [
    name for name in (*LINEAR.preferred["cpu"], "reference") if not LINEAR.unavailable(name)
]
# float32 in and out, products of bfloat16.
ROUNDED = [] if LINEAR.unavailable("cpu_bf16") else ["cpu_bf16"]
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}
SHAPES = [(1, 2), (37, 34), (64, 64), (65, 33), (130, 896), (384, 1024), (31, 6000)]


def weights(out_features, in_features, dtype):
    weight = torch.randn(out_features, in_features).to(dtype)
    return weight, torch.randn(out_features).to(dtype)


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_products(name, dtype, shape):
    weight, bias = weights(*shape, dtype)
    for with_bias in (None, bias):
        packed = pack(weight, with_bias, name)
        assert torch.equal(packed.unpack(), weight)
        for tokens in (0, 1, 2, 3, 5, 6, 7, 8, 13, 64):
            x = torch.randn(tokens, shape[1]).to(dtype)
            got = packed(x)
            assert got.dtype == dtype
            assert got.shape == (tokens, shape[0])
            want = x.double() @ weight.double().T
            # What a sum is like as a rule: one of few terms may be next to nothing.
            usual = x.double().square() @ weight.double().square().T
            if with_bias is not None:
                want += with_bias.double()
                usual += with_bias.double().square()
            if tokens:
                error = (got.double() - want).norm() / usual.sqrt().norm()
                assert error < TOLERANCE[dtype], f"{tokens} tokens: relative error {error:.2e}"


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_gated_products(name, dtype, activation):
    weight, bias = weights(2 * 35, 64, dtype)
    for with_bias in (None, bias):
        packed = pack(weight, with_bias, name)
        for tokens in (0, 1, 13):
            x = torch.randn(tokens, 64).to(dtype)
            got = packed.gated(x, activation)
            assert torch.equal(got, act_and_mul(packed(x), activation))
            product = torch.nn.functional.linear(x, weight, with_bias).double()
            want = reference.act_and_mul(product, activation)
            assert (got.double() - want).norm() <= 2 * TOLERANCE[dtype] * want.norm()


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_products_written_to_a_given_place(name):
    weight, bias = weights(37, 64, torch.bfloat16)
    for with_bias in (None, bias):
        packed = pack(weight, with_bias, name)
        for tokens in (0, 1, 13):
            x, out = torch.randn(tokens, 64).bfloat16(), torch.full((tokens, 37), 7.0).bfloat16()
            packed.write(x, out)
            assert torch.equal(out, packed(x))


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_repack(name, dtype):
    weight, bias = weights(70, 48, dtype)
    packed = pack(weight, bias, name)
    other, other_bias = weights(70, 48, dtype)
    packed.repack(other)
    x = torch.randn(4, 48).to(dtype)
    tolerance = TOLERANCE[dtype] * 20
    assert torch.allclose(packed(x), torch.nn.functional.linear(x, other, bias), atol=tolerance)
    packed.repack(other, other_bias)
    assert torch.allclose(
        packed(x), torch.nn.functional.linear(x, other, other_bias), atol=tolerance
    )
    assert torch.equal(packed.unpack(), other)
    for wrong in (torch.randn(48, 70).to(dtype), torch.randn(70, 48).double()):
        with pytest.raises(ValueError, match="does not fit"):
            packed.repack(wrong)


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_a_slice_of_a_larger_tensor_packs(name):
    whole = torch.randn(64, 100)
    part = whole[:, 10:42]
    x = torch.randn(3, 32)
    assert torch.allclose(pack(part, None, name)(x), x @ part.T, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_default_costs_no_more_memory_than_padding(dtype):
    packed = pack(torch.randn(896, 896).to(dtype))
    assert packed.size_bytes == 896 * 896 * dtype.itemsize
    assert (packed.in_features, packed.out_features) == (896, 896)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(200, 300), (131, 7000)], ids=str)
def test_cpu_row_has_the_same_bits_in_any_batch(dtype, shape):
    if "cpu" not in IMPLEMENTATIONS:
        pytest.skip("no C++ library")
    weight, bias = weights(*shape, dtype)
    packed = pack(weight, bias, "cpu")
    x = torch.randn(40, shape[1]).to(dtype)
    whole = packed(x)
    for tokens in (1, 2, 3, 5, 8, 19):
        assert torch.equal(torch.cat([packed(part) for part in x.split(tokens)]), whole)


@pytest.mark.parametrize("name", [*IMPLEMENTATIONS, *ROUNDED])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("activation", get_args(Unary))
def test_products_through_an_activation(name, dtype, activation):
    # Less than a vector past a panel: the last columns are no whole vector.
    weight, bias = weights(64 + 35, 64, dtype)
    for with_bias in (None, bias):
        packed = pack(weight, with_bias, name)
        for tokens in (0, 1, 2, 13):
            x = torch.randn(tokens, 64).to(dtype)
            got = packed.activated(x, activation)
            assert got.dtype == dtype
            want = unary(torch.nn.functional.linear(x, weight, with_bias).double(), activation)
            limit = 2 * max(TOLERANCE[dtype], 1e-2 if name in ROUNDED else 0.0)
            assert (got.double() - want).norm() <= limit * want.norm()


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_gelu_of_extremes(name):
    values = torch.tensor([0.0, -0.0, 1e-20, 3.0, -3.0, -5.0, 30.0, -30.0, 1e30, torch.nan])
    packed = pack(torch.eye(10), None, name)
    x = torch.diag(values)
    x[:, values.isnan()] = 0.0
    x[9] = torch.nan
    got = packed.activated(x, "gelu")
    assert got[9].isnan().all()
    want = unary(values[:9].double(), "gelu")
    assert torch.allclose(got.diag()[:9].double(), want, atol=1e-6, rtol=1e-6)


@pytest.mark.skipif(not ROUNDED, reason="no C++ library")
@pytest.mark.parametrize("shape", [shape for shape in SHAPES if shape[1] % 2 == 0], ids=str)
def test_rounded_products(shape):
    """Only weight and rows are rounded: given rounded ones, the sums are those of float32."""
    weight, bias = weights(*shape, torch.float32)
    for with_bias in (None, bias):
        packed = pack(weight, with_bias, "cpu_bf16")
        assert torch.equal(packed.unpack(), weight.bfloat16().float())
        assert packed.size_bytes < weight.nbytes or shape[0] < 64
        x = torch.randn(40, shape[1])
        exact = x.bfloat16().double() @ weight.bfloat16().double().T
        want = exact if with_bias is None else exact + bias.double()
        whole = packed(x)
        assert whole.dtype == torch.float32
        assert (whole.double() - want).norm() < 1e-5 * want.norm()
        for tokens in (1, 2, 3, 19):
            assert torch.equal(torch.cat([packed(part) for part in x.split(tokens)]), whole)
    packed.repack(weight * 2)
    assert torch.equal(packed.unpack(), (weight * 2).bfloat16().float())


@pytest.mark.skipif(not ROUNDED, reason="no C++ library")
def test_other_types_and_odd_widths_are_not_rounded():
    for dtype, width in ((torch.bfloat16, 34), (torch.float16, 34), (torch.float32, 33)):
        weight, _ = weights(37, width, dtype)
        assert torch.equal(pack(weight, None, "cpu_bf16").unpack(), weight)
