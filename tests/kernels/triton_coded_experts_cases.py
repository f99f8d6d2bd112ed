"""Triton's experts in codes against the numbers that they stand for: interpreted, or on a GPU."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from kernels.experts import ExpertBiases, pack_experts
from kernels.experts.triton_coded import INVARIANT, MANY, TILES, CodedExperts, pack
from kernels.group_linear import Form, Grouped, encode
from tests.kernels.test_group_linear import DEVICE, numbers
from tests.kernels.triton_group_cases import FORMS

ON_GPU = DEVICE == "cuda"
# Experts, chosen of each token, width of the model and of an expert.
SHAPES = [(16, 4, 1024, 704), (8, 4, 2880, 1440)] if ON_GPU else [(3, 2, 160, 96)]
# The last ones pass experts that are widened.
TOKENS = [1, 40, 900] if ON_GPU else [1, 40]


def matrices(
    form: Form, group: int, zeros: bool, shape: tuple[int, int, int, int], scale: float = 1.0
) -> tuple[Grouped, Grouped]:
    experts, _, hidden, inner = shape
    gate_up = numbers(experts * 2 * inner, hidden) * scale / hidden**0.5
    down = numbers(experts * hidden, inner) * scale / inner**0.5
    dtype = torch.float16
    return (
        encode(gate_up, form, group or hidden, dtype, zeros=zeros),
        encode(down, form, group or inner, dtype, zeros=zeros),
    )


def expected(
    x: Tensor, ids: Tensor, factors: Tensor, weights: tuple[Grouped, Grouped], num_experts: int
) -> Tensor:
    """The same numbers in float32, one expert after the other."""
    gate_up, down = (each.numbers().view(num_experts, -1, each.columns) for each in weights)
    return pack_experts(gate_up, down, implementation="reference")(x.float(), ids, factors, "silu")


def operands(num_tokens: int, shape: tuple[int, int, int, int]) -> tuple[Tensor, Tensor, Tensor]:
    experts, chosen, hidden, _ = shape
    generator = torch.Generator().manual_seed(num_tokens)
    # The last one's name stands for an expert on another rank.
    ids = torch.rand(num_tokens, experts + 1, generator=generator).argsort(dim=1)[:, :chosen]
    factors = torch.rand(num_tokens, chosen, generator=generator)
    return numbers(num_tokens, hidden), ids.to(DEVICE), factors.to(DEVICE)


def packed(
    weights: tuple[Grouped, Grouped], num_experts: int, *, is_invariant: bool = False
) -> CodedExperts:
    made = pack(*weights, num_experts, is_invariant=is_invariant)
    assert made is not None
    return made


def cases() -> Iterator[tuple[Form, int, bool, tuple[int, int, int, int]]]:
    for form, group, zeros in FORMS:
        if group <= 64:
            yield form, group, zeros, SHAPES[0]
    for shape in SHAPES[1:]:
        yield "mxfp4", 32, False, shape


@pytest.mark.parametrize(("form", "group", "zeros", "shape"), [*cases()])
@pytest.mark.parametrize("impl", ["triton"])
def test_each_form(
    impl: str, form: Form, group: int, zeros: bool, shape: tuple[int, int, int, int]
) -> None:
    weights = matrices(form, group, zeros, shape)
    for dtype in (torch.bfloat16, torch.float16) if group == 32 else (torch.bfloat16,):
        experts = packed(weights, shape[0])
        for num_tokens in TOKENS:
            x, ids, factors = operands(num_tokens, shape)
            x = x.to(dtype)
            want = expected(x, ids, factors, weights, shape[0])
            found = experts(x, ids, factors, "silu").float()
            # Activations between the products are rounded to 16 bits.
            error = (found - want).norm() / want.norm()
            assert error < 3 * torch.finfo(dtype).eps, f"{num_tokens} tokens: {error:.1e}"


@pytest.mark.parametrize("impl", ["triton"])
def test_every_tile(impl: str) -> None:
    shape = SHAPES[0]
    weights = matrices("int4", 32, False, shape)
    experts = packed(weights, shape[0])
    # Two experts at a time.
    experts.slice_bytes = 2 * 2 * shape[2] * shape[3] * 2
    x, ids, factors = operands(9, shape)
    want = expected(x.bfloat16(), ids, factors, weights, shape[0])
    for tile in (*(tile for _, tile in TILES), INVARIANT, MANY):
        found = experts.run(x.bfloat16(), ids, factors, "silu", tile)
        assert (found.float() - want).norm() / want.norm() < 2**-6


@pytest.mark.parametrize("impl", ["triton"])
@pytest.mark.parametrize("has_down", [True, False])
def test_biases_and_a_clamped_gate(impl: str, has_down: bool) -> None:
    """gpt-oss's experts."""
    shape = SHAPES[-1]
    experts, _, hidden, inner = shape
    weights = matrices("mxfp4", 32, False, shape)
    # The reference adds float32.
    gate_up, down = (numbers(experts, size).bfloat16() for size in (2 * inner, hidden))
    biases = ExpertBiases(gate_up, down if has_down else None)
    wide = ExpertBiases(gate_up.float(), down.float() if has_down else None)
    x, ids, factors = operands(9, shape)
    x = 3 * x.bfloat16()
    plain = (each.numbers().view(experts, -1, each.columns) for each in weights)
    reference = pack_experts(*plain, implementation="reference")
    want = reference(x.float(), ids, factors, "swigluoai", wide)
    found = packed(weights, experts)(x, ids, factors, "swigluoai", biases)
    assert (found.float() - want).norm() / want.norm() < 2**-6


@pytest.mark.parametrize("impl", ["triton"])
def test_codes_come_back_and_are_replaced_in_place(impl: str) -> None:
    shape = SHAPES[0]
    weights, others = (matrices("int4", 32, True, shape, scale) for scale in (1.0, 2.0))
    experts = packed(weights, shape[0])
    rows = 2 * shape[3]
    found = experts.grouped("gate_up", 1)
    assert torch.equal(found.codes, weights[0].codes[rows : 2 * rows])
    assert torch.equal(found.scales, weights[0].scales[rows : 2 * rows])
    assert experts.replace(packed(others, shape[0]))
    assert torch.equal(experts.unpack()[1].flatten(0, 1), others[1].numbers())
    assert not experts.replace(packed(matrices("mxfp4", 32, False, shape), shape[0]))
    assert experts.size_bytes < sum(each.codes.nbytes for each in weights)


@pytest.mark.parametrize("impl", ["triton_invariant"])
def test_a_row_has_the_same_bits_in_any_batch(impl: str) -> None:
    shape = SHAPES[0]
    experts = packed(matrices("int4", 32, False, shape), shape[0], is_invariant=True)
    x, ids, factors = operands(40, shape)
    x = x.bfloat16()
    together = experts(x, ids, factors, "silu")
    for part in (slice(0, 1), slice(33, 34), slice(5, 30)):
        assert torch.equal(experts(x[part], ids[part], factors[part], "silu"), together[part])
