"""The gated product of prompts beside its two steps, in the engine's shapes and in a graph."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional

from kernels.activation import Activation, act_and_mul
from kernels.linear import GATED_TOKENS, pack
from tests.support.gpu import on_gpu

# Width and input of 8B, of 0.5B, of 0.5B on two ranks (the last block is half full), and odd ones.
SHAPES = [(14336, 4096), (4864, 896), (2432, 896), (1000, 1032)]

pytestmark = on_gpu


def operands(tokens: int, width: int, columns: int, dtype: torch.dtype) -> list[torch.Tensor]:
    torch.manual_seed(tokens)
    x = torch.randn(tokens, columns, device="cuda", dtype=dtype)
    weight = torch.randn(2 * width, columns, device="cuda", dtype=dtype) / columns**0.5
    return [x, weight, torch.randn(2 * width, device="cuda", dtype=dtype)]


def assert_near(got: torch.Tensor, two: torch.Tensor) -> None:
    """Products may round to the next number, no more; an activation hardly widens that."""
    assert got.isfinite().all()
    step = torch.finfo(got.dtype).eps
    torch.testing.assert_close(got, two, rtol=4 * step, atol=4 * step)
    assert (got.float() - two.float()).norm() < step * two.float().norm()


def in_float32(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, activation: Activation
) -> torch.Tensor:
    """The products without rounding on their way, rounded once, and the activation's reference."""
    added = None if bias is None else bias.float()
    products = functional.linear(x.float(), weight.float(), added).to(x.dtype)
    gate, up = products.float().chunk(2, dim=1)
    if activation == "silu":
        gate = functional.silu(gate)
    else:
        gate = functional.gelu(gate, approximate="tanh")
    return (gate * up).to(x.dtype)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Tokens of every call of the one kernel."""
    from kernels.linear import triton

    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("not a Hopper GPU")
    found: list[int] = []
    gated = triton.gated

    def noted(x: torch.Tensor, *rest: Any) -> torch.Tensor:
        found.append(len(x))
        return gated(x, *rest)

    monkeypatch.setattr(triton, "gated", noted)
    return found


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_as_in_float32(
    shape: tuple[int, int], dtype: torch.dtype, activation: Activation, calls: list[int]
) -> None:
    many = [GATED_TOKENS, GATED_TOKENS + 1, 3000, 8192]
    for tokens in (1, 2, 16, 17, 33, 64, 65, GATED_TOKENS - 1, *many):
        x, weight, bias = operands(tokens, *shape, dtype)
        for added in (None, bias):
            packed = pack(weight, added, "triton")
            assert_near(packed.gated(x, activation), in_float32(x, weight, added, activation))
    assert calls == [size for size in many for _ in range(2)]


def test_in_a_graph_that_sees_new_inputs_and_weights(calls: list[int]) -> None:
    x, weight, bias = operands(GATED_TOKENS + 7, 4864, 896, torch.bfloat16)
    packed = pack(weight, bias, "triton")
    down = pack(weight[:896], None, "triton")

    def work() -> tuple[torch.Tensor, torch.Tensor]:
        """A kernel of torch ahead, and behind one that may begin before this has ended."""
        got = packed.gated(x * 2, "silu")
        return got, down(got.flatten()[: 32 * 896].view(32, 896))

    work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got, after = work()
    for seed in (1, 2):
        torch.manual_seed(seed)
        x.normal_()
        packed.repack(torch.randn_like(weight) / 30)
        graph.replay()
        two = act_and_mul(packed(x * 2), "silu")
        assert_near(got, two)
        want = torch.nn.functional.linear(got.flatten()[: 32 * 896].view(32, 896), weight[:896])
        torch.testing.assert_close(after, want, rtol=2e-2, atol=2e-2)
    assert len(calls) == 2


def test_deterministic_products_keep_two_steps(calls: list[int]) -> None:
    x, weight, bias = operands(GATED_TOKENS + 100, 4864, 896, torch.bfloat16)
    packed = pack(weight, bias, "triton_invariant")
    whole = packed.gated(x, "silu")
    assert torch.equal(packed.gated(x[:100], "silu"), whole[:100])
    assert not calls
