"""Kernels whose programs share memory, on two streams at once, and kernels that begin early."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from kernels.greedy import greedy_tokens
from kernels.norm import NORM
from tests.support.gpu import captured, on_gpu

pytestmark = on_gpu
NUM_CALLS = 300
# So long all launches wait for one another's streams to be full of them: 50 ms.
DELAY_CYCLES = 100_000_000


def side_by_side(calls: list[Callable[[], Tensor]]) -> list[list[Tensor]]:
    """What each call gives, again and again on a stream of its own while the others run."""
    streams = [torch.cuda.Stream() for _ in calls]
    found: list[list[Tensor]] = [[] for _ in calls]
    for stream, call in zip(streams, calls, strict=True):
        with torch.cuda.stream(stream):
            call()
    torch.cuda.synchronize()
    for stream in streams:
        with torch.cuda.stream(stream):
            torch.cuda._sleep(DELAY_CYCLES)
    for _ in range(NUM_CALLS):
        for stream, call, results in zip(streams, calls, found, strict=True):
            with torch.cuda.stream(stream):
                results.append(call())
    torch.cuda.synchronize()
    return found


@pytest.mark.parametrize("num_tokens", [7, 16, 32, 64])
def test_split_products_on_two_streams(num_tokens: int) -> None:
    from kernels.linear import triton as linear

    torch.manual_seed(num_tokens)
    # As the 0.5B shape's down projection, whose columns several programs share.
    weights = [
        torch.randn(896, 4864, device="cuda", dtype=torch.bfloat16) / 4864**0.5 for _ in "ab"
    ]
    inputs = [torch.randn(num_tokens, 4864, device="cuda", dtype=torch.bfloat16) for _ in "ab"]
    tile = linear.tile_of(896, 4864, linear.token_block(num_tokens))
    assert tile.split_k > 1
    layers = [linear.pack(weight, None) for weight in weights]
    alone = [layer(x) for layer, x in zip(layers, inputs, strict=True)]
    for got, x, weight in zip(alone, inputs, weights, strict=True):
        want = functional.linear(x.float(), weight.float())
        torch.testing.assert_close(got.float(), want, rtol=2e-2, atol=2e-2)
    found = side_by_side(
        [lambda layer=layer, x=x: layer(x) for layer, x in zip(layers, inputs, strict=True)]
    )
    for results, want in zip(found, alone, strict=True):
        # Parts are added in one order, so the same bits come every time.
        assert sum(not torch.equal(got, want) for got in results) == 0


def test_greedy_tokens_on_two_streams() -> None:
    torch.manual_seed(0)
    logits = [torch.randn(64, 128_256, device="cuda", dtype=torch.bfloat16) for _ in "ab"]
    wide = [torch.empty(64, 128_256, device="cuda") for _ in "ab"]
    found = side_by_side(
        [lambda x=x, w=w: greedy_tokens(x, w) for x, w in zip(logits, wide, strict=True)]
    )
    for results, x in zip(found, logits, strict=True):
        best = x.float().max(dim=1).values
        for got in results:
            assert torch.equal(x.float().gather(1, got.unsqueeze(1)).squeeze(1), best)


def test_a_capture_on_a_stream_that_ran_nothing_is_right() -> None:
    """Its graph has scratch memory of its own, which every replay finds empty."""
    from kernels.linear import triton as linear

    torch.manual_seed(3)
    weight = torch.randn(896, 4864, device="cuda", dtype=torch.bfloat16) / 4864**0.5
    x = torch.randn(16, 4864, device="cuda", dtype=torch.bfloat16)
    layer = linear.pack(weight, None)
    want = layer(x)
    torch.cuda.synchronize()
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with torch.cuda.graph(graph, stream=stream):
        found = [layer(x), layer(x)]
    for _ in range(3):
        for each in found:
            each.zero_()
        graph.replay()
        assert all(torch.equal(each, want) for each in found)
        # Eager products between replays have other counts.
        assert torch.equal(layer(x), want)


def test_a_norm_sees_the_weight_that_was_written_right_before_it() -> None:
    """It fetches its weight ahead of its wait for what is before it in the stream."""
    torch.manual_seed(5)
    norms = NORM.load("triton")
    x = torch.randn(1, 4096, device="cuda", dtype=torch.bfloat16)
    sources = [torch.randn(4096, device="cuda", dtype=torch.bfloat16) for _ in range(64)]
    weight = torch.empty_like(sources[0])
    expected = [norms.rms_norm(x, source, 1e-5) for source in sources]

    def work() -> list[Tensor]:
        found = []
        for source in sources:
            weight.copy_(source)
            found.append(norms.rms_norm(x, weight, 1e-5))
        return found

    replay, found = captured(work)
    for _ in range(50):
        replay()
        torch.cuda.synchronize()
        wrong = sum(not torch.equal(got, want) for got, want in zip(found, expected, strict=True))
        assert wrong == 0
