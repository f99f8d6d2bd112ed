"""The gated Triton products; run by `test_triton_interpreted.py`."""

import itertools

import pytest
import torch

from kernels.activation import act_and_mul, reference
from kernels.linear import GATED_TOKENS, triton, triton_invariant
from kernels.linear.triton_gated import Cut, gated, supports

CUTS = [Cut(32, 32, 16), Cut(16, 64, 32, group=2), Cut(64, 16, 64)]
KINDS = [(torch.bfloat16, "silu"), (torch.float16, "silu"), (torch.bfloat16, "gelu_tanh")]
# With all of them the last blocks of features and of columns are cut off in one case or another.
SHAPES = [(40, 72), (8, 128), (64, 40), (72, 64)]


def once_each(blocks):
    """Every cut into blocks, which is a matter of places, and every kind, one of arithmetic."""
    return [(each, *KINDS[0]) for each in blocks] + [(blocks[1], *kind) for kind in KINDS[1:]]


def operands(tokens, width, columns, dtype):
    x = torch.randn(tokens, columns).to(dtype)
    weight = torch.randn(2 * width, columns) / columns**0.5
    return x, weight.to(dtype), torch.randn(2 * width).to(dtype)


def two_steps(x, weight, bias, activation):
    """As two kernels round it."""
    product = torch.nn.functional.linear(
        x.float(), weight.float(), None if bias is None else bias.float()
    )
    return reference.act_and_mul(product.to(x.dtype).float(), activation)


@pytest.mark.parametrize("impl", ["triton"])
@pytest.mark.parametrize(("cut", "dtype", "activation"), once_each(CUTS), ids=str)
def test_products(impl, cut, dtype, activation):
    for tokens, (width, columns) in itertools.product((0, 1, 33, 130), SHAPES):
        x, weight, bias = operands(tokens, width, columns, dtype)
        assert supports(weight)
        for added in (None, bias):
            got = gated(x, weight, added, activation, cut)
            want = two_steps(x, weight, added, activation)
            assert got.dtype == dtype
            assert got.shape == (tokens, width)
            limit = {torch.bfloat16: 4e-3, torch.float16: 5e-4}[dtype]
            assert (got.float() - want).norm() <= limit * want.norm(), (tokens, width, columns)


TILES = [triton.Tile(32, 32, 4, 2), triton.Tile(64, 64, 4, 3), triton.Tile(16, 32, 2, 2, 1, 16)]


@pytest.mark.parametrize("impl", ["triton"])
@pytest.mark.parametrize(("tile", "dtype", "activation"), once_each(TILES), ids=str)
def test_products_with_few_tokens(impl, tile, dtype, activation):
    # Neither as many features nor as many columns as blocks hold; widths of odd size, too.
    for tokens, (width, columns) in itertools.product((2, 17, 64), [*SHAPES, (37, 50)]):
        x, weight, bias = operands(tokens, width, columns, dtype)
        for added in (None, bias):
            got = triton.run(x, weight, added, tile, gated=activation)
            want = two_steps(x, weight, added, activation)
            assert got.shape == (tokens, width)
            limit = {torch.bfloat16: 4e-3, torch.float16: 5e-4}[dtype]
            assert (got.float() - want).norm() <= limit * want.norm(), (tokens, width, columns)


@pytest.mark.parametrize("impl", ["triton"])
def test_few_tokens_take_one_kernel_where_their_columns_are_not_shared_out(impl, monkeypatch):
    run, gated_runs = triton.run, []

    def noted(*args, **options):
        gated_runs.append(options.get("gated") == "gelu_tanh")
        return run(*args, **options)

    monkeypatch.setattr(triton, "run", noted)
    for rows, shared_out in ((96, []), (2048, [20])):
        x, weight, bias = operands(20, rows // 2, 64, torch.bfloat16)
        packed = triton.pack(weight, bias)
        assert (triton.tile_of(rows, 64, 32).split_k > 1) == (20 in shared_out)
        for tokens in (1, 2, 20):
            gated_runs.clear()
            got = packed.gated(x[:tokens], "gelu_tanh")
            assert gated_runs == ([] if tokens == 1 else [tokens not in shared_out])
            two = act_and_mul(packed(x[:tokens]), "gelu_tanh")
            torch.testing.assert_close(got, two, rtol=2e-2, atol=2e-3)


@pytest.mark.parametrize("impl", ["triton"])
def test_nothing_is_written_beside_the_result(impl):
    x, weight, _ = operands(33, 40, 64, torch.bfloat16)
    room = torch.full((4, 33, 40), 7.0, dtype=torch.bfloat16)

    class Placed(torch.Tensor):
        def new_empty(self, *size, **options):
            return room[1] if len(size) == 2 else super().new_empty(*size, **options)

    for cut in CUTS:
        gated(x.as_subclass(Placed), weight, None, "silu", cut)
        assert (room[[0, 2, 3]] == 7).all()
        assert not (room[1] == 7).any()


@pytest.mark.parametrize("impl", ["triton"])
def test_weights_that_tma_cannot_read_take_two_steps(impl):
    for rows, columns in ((80, 76), (72, 80), (81, 80)):
        assert not supports(torch.empty(rows, columns, dtype=torch.bfloat16))
    assert not supports(torch.empty(80, 80))
    assert not supports(torch.empty(80, 160, dtype=torch.bfloat16)[:, :80])
    assert not supports(torch.empty(81 * 80, dtype=torch.bfloat16)[1:6401].view(80, 80))


@pytest.mark.parametrize("impl", ["triton"])
@pytest.mark.parametrize("with_bias", [False, True])
def test_many_tokens_take_one_kernel(impl, with_bias, monkeypatch):
    calls = []

    def noted(*args):
        calls.append(len(args[0]))
        return gated(*args)

    monkeypatch.setattr(triton, "gated", noted)
    x, weight, bias = operands(101, 72, 64, torch.bfloat16)
    packed = triton.TritonLinear(weight, bias if with_bias else None, min_gated=100)
    for tokens in (99, 100, 101):
        two = act_and_mul(packed(x[:tokens]), "gelu_tanh")
        torch.testing.assert_close(packed.gated(x[:tokens], "gelu_tanh"), two, rtol=2e-2, atol=2e-3)
    assert calls == [100, 101]
    _, other, other_bias = operands(1, 72, 64, torch.bfloat16)
    packed.repack(other, other_bias)
    two = act_and_mul(packed(x), "silu")
    torch.testing.assert_close(packed.gated(x, "silu"), two, rtol=2e-2, atol=2e-3)
    calls.clear()
    wide = triton.TritonLinear(weight.float(), None, min_gated=100)
    assert torch.equal(wide.gated(x.float(), "silu"), act_and_mul(wide(x.float()), "silu"))
    assert not calls


class NotedLinear(triton_invariant.InvariantLinear):
    """Notes of how many tokens it made a product; here one kernel's bits would be the same."""

    def __init__(self, weight, bias):
        super().__init__(weight, bias)
        self.calls = []

    def __call__(self, x):
        self.calls.append(len(x))
        return super().__call__(x)


@pytest.mark.parametrize("impl", ["triton"])
@pytest.mark.parametrize("tokens", [2, GATED_TOKENS])
def test_batch_invariant_products_keep_two_steps(impl, tokens):
    x, weight, bias = operands(tokens, 72, 64, torch.bfloat16)
    packed = NotedLinear(weight, bias)
    got = packed.gated(x, "silu")
    assert packed.calls == [tokens]
    assert torch.equal(got, act_and_mul(packed(x), "silu"))
