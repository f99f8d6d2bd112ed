"""Cases that compare Triton's E4M3 products with float64, in the interpreter or on a GPU."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kernels import activation, norm
from kernels.fp8_linear import Blocks, encode
from kernels.fp8_linear.triton import Fp8Linear, Tile, multiply_few
from kernels.rounding import (
    CODES,
    RoundedTokens,
    Rounding,
    round_activations,
    round_to_codes,
)
from kernels.rounding.triton import act_and_mul_rounded, rms_norm_rounded, round_tokens
from tests.kernels.test_fp8_linear import DEVICE, numbers, spread

pytestmark = pytest.mark.pairs

ON_GPU = DEVICE == "cuda"
SHAPES = [(6144, 4096), (4096, 14336), (896, 4864)] if ON_GPU else [(48, 64), (208, 320)]
TOKENS = [1, 7, 17, 64, 200, 2048] if ON_GPU else [1, 17, 64, 80]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(
    "form", ["rows", "blocks", "plain_rows", "plain_blocks", "int8", "plain_int8"]
)
@pytest.mark.parametrize("num_tokens", TOKENS)
def test_products(shape: tuple[int, int], form: str, num_tokens: int) -> None:
    has_blocks = form.endswith("blocks")
    blocks = Blocks(1, 128 if has_blocks else 0)
    dtype = torch.int8 if form.endswith("int8") else CODES
    codes, scales = encode(numbers(*shape) * 0.02, blocks, dtype)
    bias = numbers(shape[0]).bfloat16()
    x = numbers(num_tokens, shape[1]).bfloat16()
    rounding = None if form.startswith("plain") else Rounding(128 if has_blocks else 0, None, dtype)
    linear = Fp8Linear(codes, scales, rounding, bias)
    weight = (codes.float() * spread(scales, blocks, codes.shape)).double()
    torch.testing.assert_close(linear.unpack().double(), weight)
    if num_tokens > 64 and form == "rows" and not ON_GPU:
        pytest.skip("the product of many tokens is the library's")
    seen = x.float() if rounding is None else round_activations(x, rounding)
    expected = seen.double() @ weight.T + bias.double()
    # A quotient in the middle between two codes may go to either.
    close = {"rtol": 2**-7, "atol": (2e-4 if rounding is None else 2e-3) * shape[1] ** 0.5}
    torch.testing.assert_close(linear(x).double(), expected, **close)
    if num_tokens <= 64:
        x_scales = None
        if rounding is not None:
            rounded = round_tokens(x, rounding)
            assert torch.equal(linear(rounded), linear(x))
            x, x_scales = rounded.codes, rounded.scales
        split = multiply_few(x, x_scales, codes, linear.scales, bias, Tile(64, 128, 2, 4, 3))
        torch.testing.assert_close(split.double(), expected, **close)


@pytest.mark.parametrize("form", ["rows", "blocks", "plain_rows", "int8"])
@pytest.mark.parametrize("num_tokens", [2, 40, 64])
def test_gated_products(form: str, num_tokens: int) -> None:
    rows, columns = SHAPES[0]
    group, dtype = 128 if form == "blocks" else 0, torch.int8 if form == "int8" else CODES
    codes, scales = encode(numbers(2 * rows, columns) * 0.1, Blocks(1, group), dtype)
    rounding = None if form.startswith("plain") else Rounding(group, None, dtype)
    linear = Fp8Linear(codes, scales, rounding, numbers(2 * rows).bfloat16())
    assert linear.gates_in_one_kernel(num_tokens)
    x = numbers(num_tokens, columns).bfloat16()
    expected = activation.act_and_mul(linear(x), "silu")
    # The same sums, perhaps in another order, which the gate may round to the next number.
    found, wanted = linear.gated(x, "silu").double(), expected.double()
    assert (found - wanted).norm() / wanted.norm() < 2**-7
    assert not linear.gates_in_one_kernel(1)


@pytest.mark.parametrize(("group", "codes"), [(0, CODES), (128, CODES), (0, torch.int8)])
@pytest.mark.parametrize("is_static", [False, True])
def test_rounding(group: int, codes: torch.dtype, is_static: bool) -> None:
    scale = torch.tensor(0.01, device=DEVICE) if is_static else None
    rounding = Rounding(group, scale, codes)
    x = numbers(5, 320).bfloat16()
    assert_rounded(round_tokens(x, rounding), x, rounding)
    # The same at the end of the kernel that computes them.
    wide, weight = numbers(5, 640).bfloat16(), numbers(320).bfloat16()
    gated = act_and_mul_rounded(wide, "silu", rounding)
    assert_rounded(gated, activation.act_and_mul(wide, "silu"), rounding)
    for residual in (None, numbers(6, 320)[1:].bfloat16()):
        before = None if residual is None else residual.clone()
        normed = rms_norm_rounded(x, residual, weight, 1e-6, is_static, rounding)
        if before is None or residual is None:
            expected = norm.rms_norm(x, weight, 1e-6, is_static)
        else:
            expected = norm.fused_add_rms_norm(x, before, weight, 1e-6, is_static)
            assert torch.equal(residual, before)
        assert_rounded(normed, expected, rounding)


def assert_rounded(found: RoundedTokens, x: Tensor, rounding: Rounding) -> None:
    """Check codes and scales against the definition, with room for the order of a sum."""
    expected, scales = round_to_codes(x, rounding)
    torch.testing.assert_close(found.scales, scales, rtol=2**-7, atol=0)
    # A quotient in the middle between two codes may go to either.
    same = (found.codes.view(torch.uint8) == expected.view(torch.uint8)).float().mean()
    assert float(same) > 0.97
