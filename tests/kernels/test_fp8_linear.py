"""Products in E4M3 against float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kernels.fp8_linear import Blocks, IntegerLinear, RoundedLinear, encode
from kernels.rounding import Rounding, round_activations

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def numbers(*shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(shape[0])
    return torch.randn(shape, generator=generator).to(DEVICE)


def spread(scales: Tensor, blocks: Blocks, shape: torch.Size) -> Tensor:
    high, wide = blocks.rows or shape[0], blocks.columns or shape[1]
    tall = scales.repeat_interleave(high, 0)[: shape[0]]
    return tall.repeat_interleave(wide, 1)[:, : shape[1]]


@pytest.mark.parametrize("blocks", [Blocks(0, 0), Blocks(1, 0), Blocks(128, 128)])
def test_codes_are_within_a_sixteenth(blocks: Blocks) -> None:
    matrix = numbers(200, 300) * 3
    codes, scales = encode(matrix, blocks)
    values = codes.float() * spread(scales, blocks, matrix.shape)
    least = spread(scales, blocks, matrix.shape) * 2**-9
    assert bool(((values - matrix).abs() <= matrix.abs() / 16 + least).all())


@pytest.mark.parametrize("blocks", [Blocks(1, 0), Blocks(128, 128)])
def test_the_best_of_several_scales(blocks: Blocks) -> None:
    matrix = numbers(200, 300)
    errors = []
    for count in (1, 8):
        codes, scales = encode(matrix, blocks, num_scales=count)
        factors = spread(scales, blocks, matrix.shape)
        assert float((codes.float() * factors).abs().max()) <= float(matrix.abs().max()) * 17 / 16
        errors.append(float((codes.float() * factors - matrix).square().sum()))
    assert errors[1] < 0.98 * errors[0]
    # Codes and scale of each block belong together.
    least = encode(matrix, blocks)[1]
    assert bool(((scales >= least) & (scales < 2 * least)).all())
    again = (matrix / factors).to(torch.float8_e4m3fn)
    assert torch.equal(again.float(), codes.float())


def test_whole_numbers_are_within_half_a_step() -> None:
    matrix = numbers(200, 300) * 3
    codes, scales = encode(matrix, Blocks(1, 0), torch.int8)
    assert codes.dtype is torch.int8
    assert float(codes.abs().max()) == 127
    assert bool(((codes.float() * scales - matrix).abs() <= scales * 0.5001).all())


def test_products_of_whole_numbers() -> None:
    """The scheme's definition in float64, and of projections that round differently."""
    x = numbers(3, 320).cpu()
    static = Rounding(0, torch.tensor(0.02), torch.int8)
    by_token = Rounding(codes=torch.int8)
    parts = [
        (*encode(numbers(rows, 320).cpu(), Blocks(1, 0), torch.int8), rounding)
        for rows, rounding in ((16, static), (40, by_token))
    ]
    bias = numbers(56).cpu()
    linear = IntegerLinear(parts, bias)
    weights = [codes.double() * scales for codes, scales, _ in parts]
    expected = [
        round_activations(x, rounding).double() @ weight.T
        for weight, (_, _, rounding) in zip(weights, parts, strict=True)
    ]
    wanted = torch.cat(expected, 1) + bias
    torch.testing.assert_close(linear(x).double(), wanted, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(linear.unpack().double(), torch.cat(weights))
    for row in range(3):
        assert torch.equal(linear(x[row : row + 1])[0], linear(x)[row])


@pytest.mark.parametrize("rounding", [Rounding(), Rounding(128), Rounding(0, torch.tensor(0.05))])
def test_rows_do_not_depend_on_their_neighbours(rounding: Rounding) -> None:
    x = numbers(5, 300).cpu()
    whole = round_activations(x, rounding)
    for row in range(5):
        assert torch.equal(round_activations(x[row : row + 1], rounding)[0], whole[row])
    assert float((whole - x).abs().max()) <= 0.06 * float(x.abs().max())


def test_parts_have_roundings_of_their_own() -> None:
    x, first, second = (numbers(*shape).cpu() for shape in ((3, 64), (16, 64), (32, 64)))
    static = Rounding(0, torch.tensor(0.02))
    bias = numbers(48).cpu()
    linear = RoundedLinear([(first, static), (second, None)], bias)
    expected = torch.cat([round_activations(x, static) @ first.T, x @ second.T], 1) + bias
    torch.testing.assert_close(linear(x), expected, rtol=1e-5, atol=1e-4)
    assert torch.equal(linear.unpack(), torch.cat([first, second]))
