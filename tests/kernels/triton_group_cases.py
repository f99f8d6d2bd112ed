"""Triton's products with codes of 4 and 8 bits against float64: in the interpreter, or on a GPU."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from kernels.group_linear import Form, encode
from kernels.group_linear.triton import (
    Tile,
    multiply_few,
    multiply_many,
    pack,
    pack_codes,
)
from tests.kernels.test_group_linear import DEVICE, numbers, shuffled

ON_GPU = DEVICE == "cuda"
# Of the 8B and 0.5B shapes and of a mixture; small ones with an incomplete last chunk.
SHAPES = (
    [(6144, 4096), (28672, 4096), (4096, 14336), (896, 4864), (9728, 896), (2816, 2048)]
    if ON_GPU
    else [(72, 192), (64, 352)]
)
TOKENS = [1, 7, 16, 17, 64, 100, 256, 2048] if ON_GPU else [1, 17, 70]
# Form, group, whether groups have a zero.
FORMS: list[tuple[Form, int, bool]] = [
    ("int4", 32, False),
    ("int4", 64, True),
    ("int4", 128, False),
    ("int4", 128, True),
    ("int4", 0, False),
    ("int8", 32, True),
    ("int8", 128, False),
    ("mxfp4", 32, False),
]


def cases() -> Iterator[tuple[tuple[int, int], Form, int, bool, torch.dtype]]:
    """Each form with each type, and the most usual form with each shape."""
    for form, group, zeros in FORMS:
        for dtype in (torch.bfloat16, torch.float16):
            yield SHAPES[0], form, group, zeros, dtype
    for shape in SHAPES[1:]:
        yield shape, "int4", 128, False, torch.bfloat16
        yield shape, "int4", 32, True, torch.bfloat16
        yield shape, "mxfp4", 32, False, torch.bfloat16


@pytest.mark.parametrize(("shape", "form", "group", "zeros", "dtype"), [*cases()])
def test_products(
    shape: tuple[int, int], form: Form, group: int, zeros: bool, dtype: torch.dtype
) -> None:
    weight = encode(numbers(*shape) * 0.02, form, group or shape[1], dtype, zeros=zeros)
    exact = weight.numbers().double()
    bias = numbers(shape[0]).to(dtype)
    linear = pack(weight, bias, dtype)
    assert linear is not None
    assert torch.equal(linear.codes(), weight.codes)
    assert torch.equal(linear.unpack().double(), exact)
    step = torch.finfo(dtype).eps
    for num_tokens in TOKENS:
        x = numbers(num_tokens, shape[1]).to(dtype)
        expected = x.double() @ exact.T + bias.double()
        # The result is rounded once; sums in float32 differ by far less.
        close = {"rtol": step, "atol": 2e-4}
        few = multiply_few(x, linear.weight, bias)
        torch.testing.assert_close(few.double(), expected, **close)
        # There is no space for the parts of larger results.
        if num_tokens <= 64 and shape[0] <= 8192:
            split = multiply_few(x, linear.weight, bias, Tile(64, 2, 4, 3))
            torch.testing.assert_close(split.double(), expected, **close)
        # Weights are rounded to 16 bits there.
        close["atol"] = step * 0.1 * shape[1] ** 0.5
        many = multiply_many(x, linear.weight, bias, slice_bytes=shape[1] * 2 * 100)
        torch.testing.assert_close(many.double(), expected, **close)
        assert torch.equal(linear(x), few) or num_tokens > 64


def test_columns_in_another_order() -> None:
    weight, exact = shuffled(64, 256, 32)
    linear = pack(weight, None, torch.bfloat16)
    assert linear is not None
    x = numbers(3, 256).bfloat16()
    expected = x.double() @ exact.T.double()
    torch.testing.assert_close(linear(x).double(), expected, rtol=2**-8, atol=1e-3)


def test_another_product_of_the_same_form_is_taken_in_place() -> None:
    one, other = (
        pack(encode(numbers(64, columns) * scale, "int4", 32, torch.float16, zeros=True), None,
             torch.bfloat16)
        for scale, columns in ((1, 128), (2, 128))
    )  # fmt: skip
    assert one is not None
    assert other is not None
    address = one.weight.codes.data_ptr()
    assert one.replace(other)
    assert torch.equal(one.unpack(), other.unpack())
    assert one.weight.codes.data_ptr() == address
    third = encode(numbers(64, 128), "int4", 64, torch.float16, zeros=True)
    assert not one.replace(pack(third, None, torch.bfloat16))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("zeros", [False, True])
def test_a_product_of_another_form_is_not_taken(zeros: bool, dtype: torch.dtype) -> None:
    """Groups of a step have a zero in the word of their scale: tensors of both are alike."""
    one, other = (
        pack(encode(numbers(64, 256), "int4", 128, of_scales, zeros=has), None, torch.bfloat16)
        for of_scales, has in ((torch.float16, False), (dtype, zeros))
    )
    assert one is not None
    assert other is not None
    before = one.unpack()
    assert one.replace(other) == (not zeros and dtype is torch.float16)
    assert torch.equal(one.unpack(), before)


def test_groups_that_the_kernels_lack() -> None:
    assert pack_codes(encode(numbers(8, 96), "int4", 16, torch.float16, zeros=False)) is None
    assert pack(encode(numbers(8, 64), "int4", 32, torch.float16, zeros=False), None,
                torch.float32) is None  # fmt: skip
    wide = encode(numbers(8, 384), "int4", 192, torch.float16, zeros=True)
    linear = pack(wide, None, torch.bfloat16)
    assert linear is not None
    assert torch.equal(linear.unpack(), wide.numbers())
