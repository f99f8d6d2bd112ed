"""Triton's experts in E4M3 and int8 against the numbers that they stand for."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kernels.experts import ExpertBiases
from kernels.experts.triton_eight_bits import MANY, TILES, EightBitExperts, EightBitMatrix
from kernels.fp8_linear import Blocks, encode
from kernels.rounding import CODES, Rounding, round_activations
from tests.kernels.test_fp8_linear import DEVICE, numbers
from tests.kernels.triton_coded_experts_cases import operands

ON_GPU = DEVICE == "cuda"
# Experts, chosen of each token, width of the model and of an expert.
SHAPE = (16, 4, 1024, 704) if ON_GPU else (3, 2, 160, 144)
FORMS = ["rows", "blocks", "plain_rows", "plain_blocks", "int8", "plain_int8"]
TOKENS = [1, 40, 900] if ON_GPU else [1, 40]


def experts_of(form: str, scale: float = 0.05) -> EightBitExperts:
    count, _, hidden, inner = SHAPE
    codes = torch.int8 if form.endswith("int8") else CODES
    group = 128 if form.endswith("blocks") else 0
    rounding = None if form.startswith("plain") else Rounding(group, None, codes)
    made = [
        EightBitMatrix(*encode(numbers(rows, columns) * scale, Blocks(1, group), codes), rounding)
        for rows, columns in ((count * 2 * inner, hidden), (count * hidden, inner))
    ]
    return EightBitExperts(*made, count)


def expected(
    x: Tensor,
    ids: Tensor,
    factors: Tensor,
    experts: EightBitExperts,
    biases: ExpertBiases | None = None,
) -> Tensor:
    """The same in float64, one expert after the other, with the same roundings."""

    def rounded(which: str, tokens: Tensor) -> Tensor:
        rounding = experts.matrices[which].rounding
        return (tokens if rounding is None else round_activations(tokens, rounding)).double()

    total = torch.zeros(len(x), x.shape[1], dtype=torch.float64, device=x.device)
    for expert in range(experts.num_experts):
        gate_up, down = (each.double() for each in experts.unpack_one(expert))
        token, place = (ids == expert).nonzero(as_tuple=True)
        if not len(token):
            continue
        made = rounded("gate_up", x[token]) @ gate_up.t()
        if biases is not None:
            made += biases.gate_up[expert].double()
        gate, up = made.bfloat16().double().chunk(2, 1)
        inner = (torch.nn.functional.silu(gate) * up).bfloat16()
        result = rounded("down", inner) @ down.t()
        if biases is not None and biases.down is not None:
            result += biases.down[expert].double()
        total.index_add_(0, token, result * factors[token, place].double()[:, None])
    return total


def assert_near(found: Tensor, want: Tensor, form: str) -> None:
    # If a number between the products differs by its last bit, its code may be the next one, which
    # for E4M3 is up to an eighth away.
    error = (found.double() - want).norm() / want.norm()
    assert error < (2**-5 if form in ("rows", "blocks") else 2**-7), f"relative error {error:.1e}"


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("impl", ["triton"])
def test_each_form(impl: str, form: str) -> None:
    experts = experts_of(form)
    for num_tokens in TOKENS:
        x, ids, factors = operands(num_tokens, SHAPE)
        x = x.bfloat16()
        want = expected(x, ids, factors, experts)
        assert_near(experts(x, ids, factors, "silu"), want, form)


@pytest.mark.parametrize("form", ["rows", "blocks", "plain_rows", "int8"])
@pytest.mark.parametrize("impl", ["triton"])
def test_every_tile_and_biases(impl: str, form: str) -> None:
    experts = experts_of(form)
    count, _, hidden, inner = SHAPE
    biases = ExpertBiases(numbers(count, 2 * inner).bfloat16(), numbers(count, hidden).bfloat16())
    x, ids, factors = operands(9, SHAPE)
    x = x.bfloat16()
    want = expected(x, ids, factors, experts, biases)
    for tile in (*(tile for _, tile in TILES), MANY):
        assert_near(experts.run(x, ids, factors, "silu", tile, biases), want, form)


@pytest.mark.parametrize("impl", ["triton"])
def test_codes_are_replaced_in_place(impl: str) -> None:
    experts, others = experts_of("blocks"), experts_of("blocks", 0.1)
    assert experts.replace(others)
    assert torch.equal(experts.unpack()[0], others.unpack()[0])
    assert torch.equal(experts.unpack()[1], others.unpack()[1])
    assert not experts.replace(experts_of("plain_blocks"))
    assert not experts.replace(experts_of("rows"))
    assert experts.size_bytes < 1.1 * sum(each.numel() for each in experts.unpack())
