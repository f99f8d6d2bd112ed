"""The Triton product with few tokens; run by `test_triton_interpreted.py`."""

import pytest
import torch

from kernels.linear import triton


@pytest.mark.parametrize("impl", ["triton"])
@pytest.mark.parametrize("tokens", [0, 1, 5, 16, 30, 64, 65])
@pytest.mark.parametrize("shape", [(40, 300), (71, 256), (20, 2100), (3, 2048)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_products(impl, tokens, shape, dtype):
    x, weight = torch.randn(tokens, shape[1]).to(dtype), torch.randn(shape).to(dtype)
    bias = torch.randn(shape[0]).to(dtype) if shape[0] == 40 else None
    got = triton.pack(weight, bias)(x)
    want = torch.nn.functional.linear(
        x.double(), weight.double(), None if bias is None else bias.double()
    )
    assert got.dtype == dtype
    limit = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}[dtype]
    assert (got.double() - want).norm() <= limit * want.norm()


@pytest.mark.parametrize("tokens", [0, 1, 5, 64, 65])
@pytest.mark.parametrize("with_bias", [False, True])
def test_products_written_to_a_given_place(tokens, with_bias):
    x, weight = torch.randn(tokens, 300).bfloat16(), torch.randn(40, 300).bfloat16()
    packed = triton.pack(weight, torch.randn(40).bfloat16() if with_bias else None)
    out = torch.full((tokens, 40), 7.0).bfloat16()
    packed.write(x, out)
    assert torch.equal(out, packed(x))


def test_rows_too_wide_to_stream_are_multiplied_too(monkeypatch):
    x, weight = torch.randn(1, 300).to(torch.bfloat16), torch.randn(40, 300).to(torch.bfloat16)
    packed = triton.TritonLinear(weight, None, max_streamed=256)
    monkeypatch.setattr(triton, "gemv", None)
    want = torch.nn.functional.linear(x.double(), weight.double())
    assert (packed(x).double() - want).norm() <= 1e-2 * want.norm()
