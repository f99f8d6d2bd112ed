"""The gated delta rule: every implementation against the definition in float64."""

import pytest
import torch

from kernels.gated_delta import GATED_DELTA, DeltaShape
from kernels.state_places import StatePlaces

pytestmark = pytest.mark.pairs(each=("name",))

IMPLEMENTATIONS = [name for name in GATED_DELTA if GATED_DELTA.unavailable(name) is None]
SHAPES = [DeltaShape(2, 4, 16, 8), DeltaShape(1, 1, 5, 3), DeltaShape(1, 3, 40, 50)]
SHAPES.append(DeltaShape(1, 2, 33, 32, has_flat_gates=True))
# Triton's kernel without chunks goes from token to token, which takes its interpreter long: for it,
# many tokens are as good as five.
LENS = [[1, 1, 1], [1, 5, 2], [2, 70, 64]]


def names_and_lens(names):
    """Every implementation with the lengths of a step's sequences that it is tried with."""
    return [(name, lens) for name in names for lens in LENS[: 2 if name == "triton" else 3]]


def places_of(lens, reads, saves):
    """Places of a step: `saves` has for each sequence numbers of its tokens, and slots."""
    bounds = torch.tensor([0, *lens]).cumsum(0)
    flat = [(int(bounds[s]) + n, slot) for s, one in enumerate(saves) for n, slot in one]
    counts = torch.tensor([0, *map(len, saves)]).cumsum(0)
    return StatePlaces(
        bounds.int(),
        torch.tensor(reads),
        counts.int(),
        torch.tensor([end for end, _ in flat]),
        torch.tensor([slot for _, slot in flat]),
        set(lens) == {1},
    )


def operands(shape, num_tokens, dtype, seed=0):
    torch.manual_seed(seed)
    qkv = torch.randn(num_tokens, shape.width).to(dtype)
    gates = torch.randn(num_tokens, 2 * shape.num_value_heads + 3).to(dtype)
    gates = gates[:, : 2 * shape.num_value_heads]
    decay = -torch.rand(shape.num_value_heads) - 0.1
    dt_bias = torch.randn(shape.num_value_heads) * 4
    state = torch.randn(12, shape.num_value_heads, shape.key_dim, shape.value_dim)
    state[0] = 0
    return qkv, gates, decay, dt_bias, state


def definition(matrix, head, qkv, gates, decay, dt_bias, shape):
    """One token of one head in float64: the new matrix and the output."""
    group, place = divmod(head, shape.ratio)
    first = head if shape.has_flat_gates else group * 2 * shape.ratio + place
    apart = shape.num_value_heads if shape.has_flat_gates else shape.ratio
    keys = shape.num_key_heads * shape.key_dim
    q = qkv[group * shape.key_dim :][: shape.key_dim].double()
    k = qkv[keys + group * shape.key_dim :][: shape.key_dim].double()
    v = qkv[2 * keys + head * shape.value_dim :][: shape.value_dim].double()
    q, k = (x / (x.square().sum() + 1e-6).sqrt() for x in (q, k))
    b, a = gates[first].double(), gates[first + apart].double()
    time = torch.log1p(torch.exp(a + dt_bias[head].double()))
    matrix = matrix * torch.exp(decay[head].double() * time)
    change = torch.sigmoid(b) * (v - matrix.T @ k)
    matrix = matrix + torch.outer(k, change)
    return matrix, matrix.T @ (q * shape.key_dim**-0.5)


@pytest.mark.parametrize(("name", "lens"), names_and_lens(IMPLEMENTATIONS), ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_it_equals_the_definition(name, dtype, shape, lens):
    reads, saves = [0, 2, 3], [[(n, 4 + s)] for s, n in enumerate(lens)]
    if lens[1] > 1:
        saves[1] = [(2, 8), (4, 9), (lens[1], 10)]
    qkv, gates, decay, dt_bias, state = operands(shape, sum(lens), dtype)
    before = state.clone()
    places = places_of(lens, reads, saves)
    out = GATED_DELTA.load(name).gated_delta(qkv, gates, decay, dt_bias, state, places, shape)
    assert out.dtype is dtype
    out = out.unflatten(1, (shape.num_value_heads, shape.value_dim))
    limit = 1e-5 if dtype is torch.float32 else 1e-2
    # Chunks of bfloat16 inputs are products of operands in bfloat16.
    of_state = 3e-2 if name == "triton_chunks" and dtype is torch.bfloat16 else 1e-5
    first = 0
    for length, read, wanted in zip(lens, reads, saves, strict=True):
        for head in range(shape.num_value_heads):
            matrix, kept = before[read, head].double(), dict(wanted)
            for at in range(length):
                row = first + at
                matrix, want = definition(matrix, head, qkv[row], gates[row], decay, dt_bias, shape)
                assert (out[row, head].double() - want).abs().max() <= limit * (
                    1 + want.abs().max()
                )
                if at + 1 in kept:
                    assert torch.allclose(state[kept[at + 1], head].double(), matrix, atol=of_state)
        first += length
    written = {slot for one in saves for _, slot in one}
    others = [slot for slot in range(len(state)) if slot not in written]
    assert torch.equal(state[others], before[others]), "nothing else is written"


@pytest.mark.parametrize("name", [n for n in IMPLEMENTATIONS if GATED_DELTA.is_invariant(n)])
def test_the_cut_does_not_show(name):
    shape = SHAPES[0]
    qkv, gates, decay, dt_bias, _ = operands(shape, 9, torch.float32, 3)
    kernels = GATED_DELTA.load(name)

    def run(*lens):
        state, rows, read, first = torch.zeros(16, 4, 16, 8), [], 0, 0
        for turn, length in enumerate(lens, 1):
            places = places_of([length], [read], [[(length, turn)]])
            part = slice(first, first + length)
            given = qkv[part], gates[part], decay, dt_bias, state, places, shape
            rows.append(kernels.gated_delta(*given))
            read, first = turn, first + length
        return torch.cat(rows), state[read]

    whole, last = run(9)
    for lens in ((1,) * 9, (4, 5), (1, 2, 6)):
        cut, state = run(*lens)
        assert torch.equal(cut, whole)
        assert torch.equal(state, last)


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_alike_keys_and_no_decay(name):
    shape, num_tokens = DeltaShape(1, 1, 32, 32), 64
    qkv, gates, _, dt_bias, state = operands(shape, num_tokens, torch.float32)
    # Powers of the matrix of these keys' products exceed 1e17: an implementation that computes
    # them loses every digit.
    qkv[:, 32:64] = qkv[0, 32:64]
    gates[:, 0], decay, slot = 20.0, torch.tensor([-1e-9]), 5
    places = places_of([num_tokens], [0], [[(num_tokens, slot)]])
    GATED_DELTA.load(name).gated_delta(qkv, gates, decay, dt_bias, state, places, shape)
    matrix = torch.zeros(32, 32, dtype=torch.float64)
    for row, gate in zip(qkv, gates, strict=True):
        matrix, _ = definition(matrix, 0, row, gate, decay, dt_bias, shape)
    torch.testing.assert_close(state[slot, 0].double(), matrix, atol=1e-5, rtol=1e-5)
