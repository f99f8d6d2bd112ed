"""The short convolution: every implementation against the definition, token by token."""

import pytest
import torch

from kernels.causal_conv import CAUSAL_CONV
from runtime.models.attention.forward_batch import StateSteps

pytestmark = pytest.mark.pairs(each=("name",))

IMPLEMENTATIONS = [name for name in CAUSAL_CONV if CAUSAL_CONV.unavailable(name) is None]


def steps_of(lens, reads, saves):
    """A step's places: `saves` has for each sequence numbers of new tokens, and slots."""
    bounds = torch.tensor([0, *lens]).cumsum(0)
    flat = [(s, n, slot) for s, of_one in enumerate(saves) for n, slot in of_one]
    seqs = torch.tensor([s for s, _, _ in flat])
    counts = torch.tensor([0, *(len(of_one) for of_one in saves)])
    steps = StateSteps(
        torch.tensor(reads),
        counts.cumsum(0).int(),
        bounds[seqs] + torch.tensor([n for _, n, _ in flat]),
        seqs,
        torch.tensor([slot for _, _, slot in flat]),
        is_decode=set(lens) == {1},
    )
    return steps, bounds.int()


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("width", "channels"), [(2, 5), (3, 64), (4, 130)])
@pytest.mark.parametrize(("silu", "length"), [(False, 5), (True, 5), (True, 530)])
def test_it_equals_the_definition(name, dtype, width, channels, silu, length):
    torch.manual_seed(width)
    lens, reads = [1, length, 2, 1], [0, 2, 3, 2]
    saves = [[(1, 4)], [(1, 5), (4, 6), (length, 7)], [(2, 8)], [(1, 9)]]
    steps, bounds = steps_of(lens, reads, saves)
    x = torch.randn(sum(lens), channels + 3).to(dtype)[:, :channels]
    weight = torch.randn(channels, width).to(dtype)
    bias = torch.randn(channels).to(dtype) if width == 3 else None
    state = torch.randn(11, width - 1, channels).to(dtype)
    state[0] = 0
    before = state.clone()
    kernels = CAUSAL_CONV.load(name)
    taps = steps.taps(width, bounds, len(x))
    out = kernels.causal_conv(x, weight, bias, state, steps.reads, taps, steps.save_slots, silu)
    first = 0
    for length, read, of_one in zip(lens, reads, saves, strict=True):
        rows = torch.cat([before[read], x[first : first + length]]).double()
        for at in range(length):
            want = (rows[at : at + width] * weight.double().T).sum(0)
            want = want if bias is None else want + bias.double()
            want = want * torch.sigmoid(want) if silu else want
            error = (out[first + at].double() - want).abs().max()
            assert error <= (1e-5 if dtype is torch.float32 else 2e-2) * (1 + want.abs().max())
        for seen, slot in of_one:
            assert torch.equal(state[slot].double(), rows[seen : seen + width - 1])
        first += length
    written = {slot for of_one in saves for _, slot in of_one}
    others = [slot for slot in range(len(state)) if slot not in written]
    assert torch.equal(state[others], before[others]), "nothing else is written"


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_the_cut_does_not_show(name):
    torch.manual_seed(1)
    x, weight = torch.randn(12, 32), torch.randn(32, 4)
    kernels = CAUSAL_CONV.load(name)

    def run(*lens):
        state, rows, read = torch.zeros(16, 3, 32), [], 0
        first = 0
        for turn, length in enumerate(lens, 1):
            steps, bounds = steps_of([length], [read], [[(length, turn)]])
            part, read = x[first : first + length], turn
            taps = steps.taps(4, bounds, length)
            rows.append(
                kernels.causal_conv(part, weight, None, state, steps.reads, taps, steps.save_slots)
            )
            first += length
        return torch.cat(rows), state[read]

    whole, last = run(12)
    for lens in ((1,) * 12, (5, 7), (1, 2, 3, 6)):
        cut, state = run(*lens)
        assert torch.equal(cut, whole)
        assert torch.equal(state, last)
