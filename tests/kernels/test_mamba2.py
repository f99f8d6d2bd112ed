"""Mamba 2's recurrence: every implementation against the definition in float64."""

import pytest
import torch

from kernels.mamba2 import MAMBA2, Mamba2Shape
from tests.kernels.test_gated_delta import names_and_lens, places_of

pytestmark = pytest.mark.pairs(each=("name",))

IMPLEMENTATIONS = [name for name in MAMBA2 if MAMBA2.unavailable(name) is None]
SHAPES = [Mamba2Shape(2, 4, 8, 16), Mamba2Shape(1, 1, 3, 5), Mamba2Shape(1, 3, 50, 40)]


def operands(shape, num_tokens, dtype, seed=0):
    torch.manual_seed(seed)
    xbc = torch.randn(num_tokens, sum(shape.spans)).to(dtype)
    dt = torch.randn(num_tokens, shape.num_heads + 3).to(dtype)[:, : shape.num_heads]
    heads = torch.randn(3, shape.num_heads)
    heads[1] *= 4
    state = torch.randn(12, shape.num_heads, shape.state_dim, shape.head_dim)
    state[0] = 0
    return xbc, dt, heads, state


def definition(matrix, head, xbc, dt, heads, shape):
    """One token of one head in float64: the new matrix and the output."""
    inputs, b, c = xbc.double().split(shape.spans)
    x = inputs.view(-1, shape.head_dim)[head]
    b, c = (each.view(-1, shape.state_dim)[head // shape.ratio] for each in (b, c))
    log_decay, bias, skip = heads[:, head].double()
    time = torch.log1p(torch.exp(dt[head].double() + bias))
    matrix = matrix * torch.exp(-torch.exp(log_decay) * time) + torch.outer(b, x * time)
    return matrix, matrix.T @ c + skip * x


@pytest.mark.parametrize(("name", "lens"), names_and_lens(IMPLEMENTATIONS), ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_it_equals_the_definition(name, dtype, shape, lens):
    reads, saves = [0, 2, 3], [[(n, 4 + s)] for s, n in enumerate(lens)]
    if lens[1] > 1:
        saves[1] = [(2, 8), (4, 9), (lens[1], 10)]
    xbc, dt, heads, state = operands(shape, sum(lens), dtype)
    before = state.clone()
    places = places_of(lens, reads, saves)
    out = MAMBA2.load(name).mamba2(xbc, dt, heads, state, places, shape)
    assert out.dtype is dtype
    out = out.unflatten(1, (shape.num_heads, shape.head_dim))
    limit = 1e-5 if dtype is torch.float32 else 1e-2
    first = 0
    for length, read, wanted in zip(lens, reads, saves, strict=True):
        for head in range(shape.num_heads):
            matrix, kept = before[read, head].double(), dict(wanted)
            for at in range(length):
                row = first + at
                matrix, want = definition(matrix, head, xbc[row], dt[row], heads, shape)
                error = (out[row, head].double() - want).abs().max()
                assert error <= limit * (1 + want.abs().max())
                if at + 1 in kept:
                    error = (state[kept[at + 1], head].double() - matrix).abs().max()
                    assert error <= 1e-5 * (1 + matrix.abs().max())
        first += length
    written = {slot for one in saves for _, slot in one}
    others = [slot for slot in range(len(state)) if slot not in written]
    assert torch.equal(state[others], before[others]), "nothing else is written"


@pytest.mark.parametrize("name", [n for n in IMPLEMENTATIONS if MAMBA2.is_invariant(n)])
def test_the_cut_does_not_show(name):
    shape = SHAPES[0]
    xbc, dt, heads, _ = operands(shape, 9, torch.float32, 3)
    kernels = MAMBA2.load(name)

    def run(*lens):
        state, rows, read, first = torch.zeros(16, 4, 16, 8), [], 0, 0
        for turn, length in enumerate(lens, 1):
            places = places_of([length], [read], [[(length, turn)]])
            part = slice(first, first + length)
            rows.append(kernels.mamba2(xbc[part], dt[part], heads, state, places, shape))
            read, first = turn, first + length
        return torch.cat(rows), state[read]

    whole, last = run(9)
    for lens in ((1,) * 9, (4, 5), (1, 2, 6)):
        cut, state = run(*lens)
        assert torch.equal(cut, whole)
        assert torch.equal(state, last)
