"""Operations on logits around sampling: penalties, biases, masks, log-probabilities."""

import math

import pytest
import torch

from kernels.sampling import (
    SAMPLING,
    apply_logit_bias,
    apply_penalties,
    gather_logprobs,
    mask_tokens,
    nan_rows,
)

BITMASKS = [
    name for name in (*SAMPLING.preferred["cpu"], "reference") if not SAMPLING.unavailable(name)
]


def test_penalties_match_a_loop():
    batch, vocab, length = 5, 50, 30
    logits = torch.randn(batch, vocab)
    ids = torch.randint(0, 12, (batch, length))
    lens = torch.tensor([0, 1, 7, 30, 29])
    # Padding may be anything, even no token at all.
    for row, n in zip(ids, lens.tolist(), strict=True):
        row[n:] = torch.tensor([-1, 10**6, 3, 0])[torch.randint(0, 4, (length - n,))]
    frequency = torch.tensor([0.5, 0.2, -0.3, 0.1, 0.0])
    presence = torch.tensor([1.0, 0.0, 0.4, 0.7, 0.0])
    repetition = torch.tensor([1.3, 1.2, 0.8, 1.1, 1.0])
    want = logits.clone()
    for row in range(batch):
        generated = ids[row, : lens[row]].tolist()
        for token in set(generated):
            value = want[row, token].item()
            factor = repetition[row].item()
            value = value / factor if value >= 0 else value * factor
            value -= frequency[row].item() * generated.count(token) + presence[row].item()
            want[row, token] = value
    # Rows by their index, in any order; what is left out stays.
    lines = torch.tensor([3, 0, 2])
    some = logits.clone()
    apply_penalties(
        *(some, ids[lines], lens[lines], frequency[lines], presence[lines], repetition[lines]),
        lines,
    )
    assert torch.allclose(some[lines], want[lines], atol=1e-6)
    assert torch.equal(some[[1, 4]], logits[[1, 4]])
    apply_penalties(logits, ids, lens, frequency, presence, repetition)
    assert torch.allclose(logits, want, atol=1e-6)
    assert torch.equal(logits[0], want[0])
    assert torch.equal(logits[4], want[4])


def test_penalties_with_nothing_to_do():
    logits = torch.randn(2, 5)
    want = logits.clone()
    zero, one = torch.zeros(2), torch.ones(2)
    apply_penalties(logits, torch.empty(2, 0).long(), torch.zeros(2).long(), zero, zero, one)
    apply_penalties(
        logits[:0], torch.empty(0, 4).long(), torch.zeros(0).long(), zero[:0], zero[:0], one[:0]
    )
    assert torch.equal(logits, want)


def test_penalties_leave_masked_tokens_masked():
    logits = torch.full((1, 4), -math.inf)
    apply_penalties(
        *(logits, torch.tensor([[2, 2]]), torch.tensor([2])),
        *(torch.tensor([0.5]), torch.tensor([0.5]), torch.tensor([1.2])),
    )
    assert (logits == -math.inf).all()


def test_bias_and_mask():
    logits = torch.zeros(3, 6)
    rows, ids = torch.tensor([0, 2, 2, 2]), torch.tensor([1, 5, 5, 0])
    apply_logit_bias(logits, rows, ids, torch.tensor([1.0, 2.0, 3.0, -4.0]))
    assert logits.nonzero().tolist() == [[0, 1], [2, 0], [2, 5]]
    assert logits[2, 5] == 5.0
    mask_tokens(logits, torch.tensor([1, 1]), torch.tensor([0, 3]))
    assert (logits == -math.inf).nonzero().tolist() == [[1, 0], [1, 3]]


@pytest.mark.parametrize("name", BITMASKS)
def test_bitmask(name: str) -> None:
    apply_token_bitmask = SAMPLING.load(name).apply_token_bitmask
    for vocab in (1, 31, 32, 33, 100, 4096):
        words = -(-vocab // 32)
        allowed = torch.rand(3, words * 32) < 0.5
        allowed[1] = True
        weights = 2 ** torch.arange(32, dtype=torch.int64)
        bitmask = (allowed.view(3, words, 32) * weights).sum(-1)
        bitmask = torch.where(bitmask >= 2**31, bitmask - 2**32, bitmask).to(torch.int32)
        assert (bitmask[1] == -1).all()
        logits = torch.randn(3, vocab)
        want = logits.masked_fill(~allowed[:, :vocab], -math.inf)
        got = logits.clone()
        apply_token_bitmask(got, bitmask)
        assert torch.equal(got, want)
        # Rows of a wider tensor, some of them, in another order.
        wide = torch.randn(5, vocab + 3)
        want = wide.clone()
        want[4, :vocab].masked_fill_(~allowed[0, :vocab], -math.inf)
        want[1, :vocab].masked_fill_(~allowed[2, :vocab], -math.inf)
        apply_token_bitmask(wide[:, :vocab], bitmask[[0, 2]], torch.tensor([4, 1]))
        assert torch.equal(wide, want)


@pytest.mark.parametrize("name", BITMASKS)
@pytest.mark.parametrize("vocab", [1, 31, 32, 33, 100, 4096])
def test_best_tokens(name: str, vocab: int) -> None:
    best_tokens = SAMPLING.load(name).best_tokens
    words = -(-vocab // 32)
    for case in range(20):
        logits = torch.randn(6, vocab)
        if case % 2:
            # Full of equal values: the lowest id wins.
            logits = (2 * logits).round()
        bitmask = torch.randint(-(2**31), 2**31, (6, words)).to(torch.int32)
        bitmask[1], bitmask[2] = -1, 0
        bitmask[:, (case * 7) % words] |= 1
        bits = (bitmask.unsqueeze(-1) >> torch.arange(32)) & 1
        allowed = bits.view(6, words * 32)[:, :vocab].bool()
        logits[4, :] = logits[4].masked_fill(~allowed[4], math.nan)
        want = [
            max(row[ok.nonzero()[:, 0]].tolist()) for row, ok in zip(logits, allowed, strict=True)
        ]
        want_ids = [
            next(i for i in ok.nonzero()[:, 0].tolist() if row[i] == value)
            for row, ok, value in zip(logits, allowed, want, strict=True)
        ]
        assert best_tokens(logits.clone(), bitmask).tolist() == want_ids
        free = [int(row.argmax()) for row in logits]
        free[4] = -1 if logits[4].isnan().any() else free[4]
        assert best_tokens(logits.clone()).tolist() == free
        # Some rows, in another order, of a wider tensor; a NaN that counts.
        wide = torch.cat([logits, torch.full((6, 3), 1e9)], dim=1)
        wide[0, want_ids[0]] = math.nan
        got = best_tokens(wide[:, :vocab], bitmask[[5, 0]], torch.tensor([5, 0])).tolist()
        assert got == [-1, *free[1:5], want_ids[5]]


def test_logprobs():
    logits = torch.randn(4, 200)
    logits[1, 50:] = -math.inf
    logits[2] = 0.0
    ids = torch.tensor([[3, 7], [60, 3], [5, 5], [199, 0]])
    for top_k in (0, 1, 5, 500):
        chosen, values, top_ids = gather_logprobs(logits, ids, top_k)
        want = torch.log_softmax(logits.double(), -1)
        assert torch.allclose(chosen.double(), want.gather(1, ids).clamp(min=-1e9))
        assert chosen[1, 0] == -1e9
        assert values.shape == top_ids.shape == (4, min(top_k, 200))
        assert values.isfinite().all()
        assert (values.diff(dim=-1) <= 0).all()
        assert torch.equal(values, torch.log_softmax(logits, -1).clamp(min=-1e9).gather(1, top_ids))
        assert top_ids[2].tolist() == list(range(min(top_k, 200)))


def test_nan_rows():
    logits = torch.randn(4, 10)
    logits[1, 9] = math.nan
    logits[2] = -math.inf
    logits[3, 0] = math.inf
    assert nan_rows(logits).tolist() == [False, True, False, False]
    assert nan_rows(logits[:0]).shape == (0,)
