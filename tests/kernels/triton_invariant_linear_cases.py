"""The batch-invariant Triton product; run by `test_triton_interpreted.py`."""

import pytest
import torch

from kernels.linear import triton_invariant as ours


def weights(shape, dtype):
    return torch.randn(shape).to(dtype), torch.randn(shape[0]).to(dtype)


@pytest.mark.parametrize("impl", ["triton"])
@pytest.mark.parametrize("shape", [(40, 300), (70, 128)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_products(impl, shape, dtype):
    weight, bias = weights(shape, dtype)
    for tokens in (0, 1, 17, 70, 130):
        x = torch.randn(tokens, shape[1]).to(dtype)
        for added in (None, bias):
            got = ours.pack(weight, added)(x)
            want = x.double() @ weight.double().T + (0 if added is None else added.double())
            assert got.dtype == dtype
            assert got.shape == want.shape
            limit = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}[dtype]
            assert (got.double() - want).norm() <= limit * want.norm()


@pytest.mark.parametrize("impl", ["triton"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_every_cut_gives_the_same_bits(impl, dtype):
    weight, bias = weights((70, 200), dtype)
    x = torch.randn(140, 200).to(dtype)
    wanted = ours.run(x, weight, bias, ours.tiles(dtype)[0])
    for tile in ours.tiles(dtype):
        assert torch.equal(ours.run(x, weight, bias, tile), wanted), tile
    packed = ours.pack(weight, bias)
    for tokens in (1, 2, 7, 16, 33, 64, 100):
        assert torch.equal(packed(x[5 : 5 + tokens]), wanted[5 : 5 + tokens]), tokens


@pytest.mark.parametrize("impl", ["triton"])
def test_many_tokens_take_large_blocks(impl):
    sizes = [ours.tile_of(torch.bfloat16, tokens, 4096).tokens for tokens in (1, 16, 17, 64, 65)]
    assert sizes == [16, 16, 32, 64, 128]
    assert ours.tile_of(torch.bfloat16, 8192, 4096).tokens == 256
    assert ours.tile_of(torch.bfloat16, 256, 4096).tokens == 128
    assert ours.tile_of(torch.float32, 8192, 4096) in ours.tiles(torch.float32)
