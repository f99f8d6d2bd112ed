"""Products with codes of 4 and 8 bits in groups, against numbers that the test computes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kernels.group_linear import Form, Grouped, encode, pack
from kernels.group_linear.cpu import BlocksLinear
from kernels.group_linear.reference import CodesLinear

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
E2M1 = [0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6]


def numbers(*shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(shape[0])
    return torch.randn(shape, generator=generator).to(DEVICE)


def meant(weight: Grouped) -> Tensor:
    """Number by number."""
    found = torch.empty(weight.codes.shape, dtype=torch.float64)
    for row in range(weight.rows):
        for column in range(weight.columns):
            code, at = int(weight.codes[row, column]), column // weight.group
            scale = weight.scales[row, at].item()
            if weight.form == "mxfp4":
                value = E2M1[code] * 2.0 ** (scale - 127)
            else:
                zero = {"int4": 8, "int8": 128}[weight.form]
                if weight.zeros is not None:
                    zero = int(weight.zeros[row, at])
                value = (code - zero) * scale
            to = column if weight.order is None else int(weight.order[column])
            found[row, to] = value
    return found


def shuffled(rows: int, columns: int, group: int) -> tuple[Grouped, Tensor]:
    """Codes whose columns are in another order than the matrix's, and the matrix."""
    weight = encode(numbers(rows, columns), "int4", group, torch.float16, zeros=True)
    order = torch.randperm(columns, generator=torch.Generator().manual_seed(3)).to(DEVICE)
    weight = Grouped("int4", weight.codes, weight.scales, weight.zeros, group, order)
    return weight, meant(weight).to(DEVICE)


@pytest.mark.parametrize(
    ("form", "zeros", "most"),
    [("int4", False, 0.51), ("int4", True, 0.51), ("int8", True, 0.51), ("mxfp4", False, 1.01)],
)
@pytest.mark.parametrize("group", [32, 96])
def test_codes_are_the_nearest(form: Form, zeros: bool, most: float, group: int) -> None:
    """Within half the distance of two codes; of E2M1 the largest distance is 2."""
    matrix = numbers(5, 96) * 3
    weight = encode(matrix, form, group, torch.float32, zeros=zeros)
    exact = meant(weight)
    assert torch.allclose(weight.numbers().cpu().double(), exact, rtol=1e-6)
    distance = weight.factors().cpu().repeat_interleave(group, 1)
    off = (exact - matrix.cpu()).abs() / distance
    # What is beyond the largest code is cut: 7 of 7.5, and 6 of 8.
    at_end = (weight.codes == (255 if form == "int8" else 15)).cpu() | (
        (weight.codes % 8 == 7).cpu() if form == "mxfp4" else torch.tensor(False)
    )
    assert bool((off[~at_end] <= most).all())
    assert bool((off[at_end] <= 2.0).all())


@pytest.mark.skipif(DEVICE == "cuda", reason="a CPU's products")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("form", "group", "zeros", "kind"),
    [
        ("int4", 32, False, BlocksLinear),
        ("int4", 128, True, BlocksLinear),
        ("int4", 256, True, BlocksLinear),
        ("int8", 64, False, BlocksLinear),
        ("mxfp4", 32, False, BlocksLinear),
        # No stored block has 8 bits and a zero, or ends inside of 32 columns.
        ("int8", 64, True, CodesLinear),
        ("int4", 16, True, CodesLinear),
    ],
)
def test_products_on_a_cpu(
    form: Form, group: int, zeros: bool, kind: type, dtype: torch.dtype
) -> None:
    weight = encode(numbers(48, 256), form, group, torch.float16, zeros=zeros)
    exact, bias = meant(weight), numbers(48).to(dtype)
    linear = pack(weight, bias, dtype)
    assert type(linear) is kind
    assert torch.equal(linear.codes(), weight.codes)
    # The least number of a block is rounded to float16.
    torch.testing.assert_close(linear.unpack().double(), exact, rtol=1e-6, atol=5e-3 * zeros)
    x = numbers(7, 256).to(dtype)
    expected = x.double() @ exact.T + bias.double()
    error = (linear(x).double() - expected).norm() / expected.norm()
    assert error < (0.01 if kind is BlocksLinear else 0.004)


@pytest.mark.skipif(DEVICE == "cuda", reason="a CPU's products")
def test_columns_in_another_order() -> None:
    weight, exact = shuffled(48, 256, 32)
    x = numbers(7, 256)
    expected = x.double() @ exact.T
    for linear in (pack(weight, None, torch.float32), CodesLinear(weight, None)):
        assert linear is not None
        torch.testing.assert_close(linear.unpack().double(), exact, rtol=1e-6, atol=5e-3)
        assert torch.equal(linear.codes(), weight.codes)
        assert (linear(x).double() - expected).norm() / expected.norm() < 0.01
