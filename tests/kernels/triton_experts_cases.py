"""The Triton kernels of experts; run by `test_triton_interpreted.py`."""

from dataclasses import replace

import pytest
import torch

from kernels.experts import EXPERTS, ExpertBiases, pack_experts
from kernels.experts.triton import (
    FLOATS,
    INVARIANT,
    TILES,
    Tile,
    TritonExperts,
    most_blocks,
    sort_by_expert,
)

SMALL = Tile(16, 16, 16, 4, 2)
# Tokens, experts, chosen of each token, width of the model and of an expert, none of them round.
SHAPES = [(1, 5, 2, 40, 24), (7, 3, 3, 37, 18), (33, 6, 2, 20, 50), (50, 1, 1, 16, 8)]


def operands(tokens, experts, chosen, hidden, inner, dtype):
    generator = torch.Generator().manual_seed(tokens)
    gate_up = torch.empty(experts, 2 * inner, hidden).normal_(generator=generator)
    down = torch.empty(experts, hidden, inner).normal_(generator=generator)
    x = torch.empty(tokens, hidden).normal_(generator=generator).to(dtype)
    # The last one's name stands for an expert that is elsewhere.
    ids = torch.rand(tokens, experts + 1, generator=generator).argsort(dim=1)[:, :chosen]
    weights = torch.rand(tokens, chosen, generator=generator)
    return (gate_up / hidden**0.5).to(dtype), (down / inner**0.5).to(dtype), x, ids, weights


@pytest.mark.parametrize("size", [1, 16])
def test_many_rows_are_listed_like_few(size):
    torch.manual_seed(size)
    # Rows of the last number belong to no expert here; one expert has no rows.
    ids = torch.randint(0, 8, (300,))
    ids[ids == 3] = 7
    few = sort_by_expert(ids, 7, size)
    for wanted, found in zip(few, sort_by_expert(ids, 7, size, 0), strict=True):
        used = (few[1] >= 0).sum() * (size if wanted is few[0] else 1)
        assert torch.equal(wanted[:used], found[:used])
        assert wanted is few[0] or torch.equal(wanted, found)


@pytest.mark.parametrize("impl", ["triton"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_experts_are_those_of_the_reference(impl, shape, dtype):
    gate_up, down, x, ids, weights = operands(*shape, dtype)
    want = pack_experts(gate_up, down, implementation="reference")(x, ids, weights, "silu")
    experts = TritonExperts(gate_up, down, is_invariant=False)
    tolerance = 1e-5 if dtype is torch.float32 else 2e-2
    for tile in (SMALL, replace(SMALL, tokens=32, columns=32)):
        got = experts.run(x, ids, weights, "silu", tile)
        torch.testing.assert_close(got, want, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("impl", ["triton"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_biases_and_the_clamped_gate(impl, dtype):
    gate_up, down, x, ids, weights = operands(*SHAPES[2], dtype)
    biases = ExpertBiases(gate_up[:, :, 0] * 3, down[:, :, 0] * 3)
    reference = pack_experts(gate_up * 6, down, implementation="reference")
    experts = TritonExperts(gate_up * 6, down, is_invariant=False)
    tolerance = 1e-5 if dtype is torch.float32 else 3e-2
    for each in (biases, ExpertBiases(biases.gate_up, None), None):
        want = reference(x, ids, weights, "swigluoai", each)
        got = experts.run(x, ids, weights, "swigluoai", SMALL, each)
        scale = want.abs().max()
        torch.testing.assert_close(got / scale, want / scale, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("impl", ["triton"])
def test_every_tile_of_the_table(impl):
    gate_up, down, x, ids, weights = operands(9, 4, 2, 72, 40, torch.bfloat16)
    want = pack_experts(gate_up, down, implementation="reference")(x, ids, weights, "gelu_tanh")
    experts = TritonExperts(gate_up, down, is_invariant=False)
    for tile in (*(tile for _, tile in TILES), INVARIANT, FLOATS):
        got = experts.run(x, ids, weights, "gelu_tanh", tile)
        torch.testing.assert_close(got, want, atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("impl", ["triton"])
def test_all_tokens_choose_one_expert_or_none_that_is_here(impl):
    gate_up, down, x, ids, weights = operands(40, 4, 2, 24, 16, torch.float32)
    experts = TritonExperts(gate_up, down, is_invariant=False)
    reference = pack_experts(gate_up, down, implementation="reference")
    for only in (0, 3):
        chosen = torch.full_like(ids, 4)
        chosen[:, 1] = only
        got = experts.run(x, chosen, weights, "silu", SMALL)
        torch.testing.assert_close(got, reference(x, chosen, weights, "silu"))
    nowhere = experts.run(x, torch.full_like(ids, 4), weights, "silu", SMALL)
    assert torch.equal(nowhere, torch.zeros_like(x))
    assert experts(x[:0], ids[:0], weights[:0], "silu").shape == (0, 24)


@pytest.mark.parametrize("impl", ["triton_invariant"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_row_has_the_same_bits_in_any_batch(impl, dtype):
    assert EXPERTS.is_invariant(impl)
    gate_up, down, x, ids, weights = operands(70, 3, 2, 48, 24, dtype)
    experts = pack_experts(gate_up, down, implementation=impl)
    together = experts(x, ids, weights, "silu")
    for part in (slice(0, 1), slice(33, 34), slice(5, 30)):
        assert torch.equal(experts(x[part], ids[part], weights[part], "silu"), together[part])


@pytest.mark.parametrize("impl", ["triton"])
@pytest.mark.parametrize("sums_to_one", [True, False])
@pytest.mark.parametrize(("experts", "chosen"), [(60, 4), (8, 2), (5, 5), (128, 8)])
def test_the_choice(impl, experts, chosen, sums_to_one):
    generator = torch.Generator().manual_seed(experts)
    logits = torch.empty(9, experts).normal_(generator=generator).bfloat16().float()
    reference = pack_experts(
        torch.ones(1, 2, 2), torch.ones(1, 2, 1), implementation="reference"
    ).choose
    triton = TritonExperts(torch.ones(1, 2, 2), torch.ones(1, 2, 1), is_invariant=False).choose
    ids, weights = triton(logits, chosen, sums_to_one=sums_to_one)
    _, expected = reference(logits, chosen, sums_to_one=sums_to_one)
    # Equals may stand in another order.
    shares = logits.softmax(-1).gather(1, ids)
    assert ids.dtype == torch.int64
    assert all(len(set(row)) == chosen for row in ids.tolist())
    torch.testing.assert_close(weights, expected, atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(
        shares / shares.sum(-1, keepdim=True) if sums_to_one else shares, weights
    )


@pytest.mark.parametrize("impl", ["triton"])
def test_what_is_no_number_chooses_experts_that_there_are(impl):
    logits = torch.tensor([[0.0, float("nan"), 1.0], [1.0, 2.0, 0.5]])
    choose = TritonExperts(torch.ones(1, 2, 2), torch.ones(1, 2, 1), is_invariant=False).choose
    ids, weights = choose(logits, 2, sums_to_one=False)
    assert ids.min() >= 0
    assert ids.max() < 3
    assert weights[0].isnan().all()
    assert ids[1].tolist() == [1, 0]


@pytest.mark.parametrize("impl", ["triton"])
@pytest.mark.parametrize(("rows", "experts", "tokens"), [(1, 60, 16), (240, 60, 16), (999, 8, 64)])
def test_no_choice_needs_more_blocks(impl, rows, experts, tokens):
    most = most_blocks(rows, experts, tokens)
    # One row each, as far as they go, and the rest with one.
    spread = min(rows, experts)
    assert (spread - 1) + -(-(rows - spread + 1) // tokens) <= most
    assert -(-rows // tokens) <= most
