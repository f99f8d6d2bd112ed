"""Experts against products written out one by one."""

import pytest
import torch
from torch import Tensor

from kernels.experts import EXPERTS, ExpertBiases, pack_experts

NUM_EXPERTS, HIDDEN, INNER = 5, 64, 32
HERE = [name for name in EXPERTS if EXPERTS.unavailable(name) is None]


def weights(dtype: torch.dtype, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    gate_up = torch.empty(NUM_EXPERTS, 2 * INNER, HIDDEN).normal_(generator=generator)
    down = torch.empty(NUM_EXPERTS, HIDDEN, INNER).normal_(generator=generator)
    return (gate_up / HIDDEN**0.5).to(dtype), (down / INNER**0.5).to(dtype)


def expected(x: Tensor, ids: Tensor, factors: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    out = torch.zeros(x.shape, dtype=torch.float64)
    for token, chosen in enumerate(ids.tolist()):
        for place, expert in enumerate(chosen):
            if expert == NUM_EXPERTS:
                continue
            gate, up = (gate_up[expert].double() @ x[token].double()).chunk(2)
            made = down[expert].double() @ (torch.nn.functional.silu(gate) * up)
            out[token] += factors[token, place].double() * made
    return out


@pytest.mark.parametrize("num_tokens", [1, 2, 17])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", HERE)
def test_each_token_passes_its_experts(name: str, dtype: torch.dtype, num_tokens: int) -> None:
    gate_up, down = weights(dtype)
    packed = pack_experts(gate_up.clone(), down.clone(), implementation=name)
    generator = torch.Generator().manual_seed(num_tokens)
    x = torch.empty(num_tokens, HIDDEN).normal_(generator=generator).to(dtype)
    order = torch.rand(num_tokens, NUM_EXPERTS + 1, generator=generator).argsort(dim=1)
    # Some of them are elsewhere.
    ids, factors = order[:, :3], torch.rand(num_tokens, 3, generator=generator)
    found = packed(x, ids, factors, "silu")
    assert found.dtype == dtype
    tolerance = 1e-5 if dtype == torch.float32 else 3e-2
    wanted = expected(x, ids, factors, gate_up, down)
    torch.testing.assert_close(found.double(), wanted, atol=tolerance, rtol=tolerance)
    elsewhere = packed(x, torch.full_like(ids, NUM_EXPERTS), factors, "silu")
    assert torch.equal(elsewhere, torch.zeros_like(x))


@pytest.mark.parametrize("name", HERE)
def test_weights_come_back_and_are_replaced(name: str) -> None:
    gate_up, down = weights(torch.float32)
    packed = pack_experts(gate_up.clone(), down.clone(), implementation=name)
    for found, given in zip(packed.unpack(), (gate_up, down), strict=True):
        assert torch.equal(found, given)
    other_up, other_down = weights(torch.float32, seed=1)
    packed.repack(other_up, other_down)
    assert torch.equal(packed.unpack()[0], other_up)
    assert torch.equal(packed.unpack()[1], other_down)
    assert packed.size_bytes >= gate_up.nbytes + down.nbytes


def test_a_row_has_the_same_bits_in_any_batch() -> None:
    gate_up, down = weights(torch.float32)
    packed = pack_experts(gate_up, down, implementation="reference")
    x, ids = torch.randn(9, HIDDEN), torch.rand(9, NUM_EXPERTS).argsort(dim=1)[:, :2]
    factors = torch.rand(9, 2)
    together = packed(x, ids, factors, "silu")
    for row in range(9):
        part = slice(row, row + 1)
        assert torch.equal(packed(x[part], ids[part], factors[part], "silu"), together[part])


@pytest.mark.parametrize("has_down", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", HERE)
def test_biases_and_the_clamped_gate(name: str, dtype: torch.dtype, has_down: bool) -> None:
    gate_up, down = weights(dtype)
    # Some results are beyond the limits of the gate.
    packed = pack_experts(gate_up * 6, down, implementation=name)
    generator = torch.Generator().manual_seed(3)
    both, last = torch.randn(NUM_EXPERTS, 2 * INNER), torch.randn(NUM_EXPERTS, HIDDEN)
    biases = ExpertBiases(both.to(dtype), last.to(dtype) if has_down else None)
    x = torch.empty(9, HIDDEN).normal_(generator=generator).to(dtype)
    ids = torch.rand(9, NUM_EXPERTS + 1, generator=generator).argsort(dim=1)[:, :3]
    factors = torch.rand(9, 3, generator=generator)
    found = packed(x, ids, factors, "swigluoai", biases)
    wanted = torch.zeros(9, HIDDEN, dtype=torch.float64)
    for token, chosen in enumerate(ids.tolist()):
        for place, expert in enumerate(chosen):
            if expert == NUM_EXPERTS:
                continue
            inner = (gate_up[expert] * 6).double() @ x[token].double()
            gate, up = (inner + biases.gate_up[expert].double()).chunk(2)
            gate, up = gate.clamp(max=7.0), up.clamp(-7.0, 7.0)
            made = down[expert].double() @ (gate * torch.sigmoid(1.702 * gate) * (up + 1))
            made += biases.down[expert].double() if biases.down is not None else 0.0
            wanted[token] += factors[token, place].double() * made
    tolerance = 1e-5 if dtype == torch.float32 else 3e-2
    scale = float(wanted.abs().max())
    torch.testing.assert_close(found.double() / scale, wanted / scale, atol=tolerance, rtol=0.0)
