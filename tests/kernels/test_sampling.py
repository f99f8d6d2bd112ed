"""Sampling against a slow literal numpy version, row by row."""

import math

import numpy as np
import pytest
import torch

from kernels.sampling import SamplingRows, sample
from kernels.sampling.candidates import top_candidates
from kernels.sampling.draw import draw, uniform

MASK = (1 << 64) - 1


def make_rows(temperature, top_k, top_p, min_p, seed=None, position=None) -> SamplingRows:
    batch, vocab = len(temperature), 1 << 20
    used = [k for k, t in zip(top_k, temperature, strict=True) if 0 < k < vocab and t > 0]
    return SamplingRows(
        temperature=torch.tensor(temperature, dtype=torch.float32),
        top_k=torch.tensor(top_k, dtype=torch.int32),
        top_p=torch.tensor(top_p, dtype=torch.float32),
        min_p=torch.tensor(min_p, dtype=torch.float32),
        seed=torch.arange(batch) if seed is None else seed,
        position=torch.full((batch,), 7) if position is None else position,
        all_greedy=not any(temperature),
        any_top_k=bool(used),
        any_top_p=any(p < 1 for p in top_p),
        max_top_k=max(used, default=0),
    )


def literal_survivors(logits, temperature, top_k, top_p, min_p) -> np.ndarray:
    """Return the probabilities of the surviving tokens, as the docstring of `sample` tells it."""
    scaled = (logits.numpy() / np.float32(temperature)).astype(np.float32)
    p = torch.softmax(torch.from_numpy(scaled), -1).double().numpy()
    order = np.argsort(-scaled, kind="stable")
    k = top_k if 0 < top_k < len(p) else len(p)

    def prefix(of: np.ndarray) -> set[int]:
        kept, mass = {int(order[0])}, 0.0
        for token in order:
            if top_p >= 1 or np.float32(mass) < np.float32(top_p):
                kept.add(int(token))
            mass += of[token]
        return kept

    top = {int(t) for t in order[:k]}
    if min_p == 0:
        kept = top & prefix(p)
        return np.array([x if i in kept else 0.0 for i, x in enumerate(p)])
    p = np.array([x if i in top else 0.0 for i, x in enumerate(p)])
    p /= p.sum()
    kept = prefix(p)
    p = np.array([x if i in kept else 0.0 for i, x in enumerate(p)])
    p /= p.sum()
    return np.where(p < np.float32(min_p) * p.max(), 0.0, p)


def literal_uniform(seed: int, position: int) -> float:
    def mix(x):
        x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
        x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
        return x ^ (x >> 31)

    golden = 0x9E3779B97F4A7C15
    x = mix((mix((seed + golden) & MASK) + (position + 1) * golden) & MASK)
    return (x >> 40) * 2.0**-24


def literal_draw(p: np.ndarray, u: float) -> int:
    running = np.cumsum(p)
    return int(np.searchsorted(running, u * running[-1], side="right"))


def test_uniform_is_splitmix_of_seed_and_position():
    seed = torch.tensor([0, 1, -1, 2**62, -(2**63), 123456789])
    position = torch.tensor([0, 1, 5, 100000, 2**31, 3])
    want = [
        literal_uniform(s & MASK, p) for s, p in zip(seed.tolist(), position.tolist(), strict=True)
    ]
    assert uniform(seed, position).tolist() == want


def test_uniform_is_uniform():
    n = 200_000
    by_position = uniform(torch.full((n,), 3), torch.arange(n)).double()
    by_seed = uniform(torch.arange(n), torch.full((n,), 3)).double()
    for values in (by_position, by_seed):
        counts = torch.histc(values, 100, 0, 1)
        chi_square = ((counts - n / 100).square() / (n / 100)).sum()
        assert chi_square < 160  # 99 degrees of freedom: 1 in 10,000
    for a, b in ((by_position[1:], by_position[:-1]), (by_seed[1:], by_seed[:-1])):
        assert abs(torch.corrcoef(torch.stack((a, b)))[0, 1]) < 0.01
    # The next seed's stream is not this one's moved by one place.
    later = uniform(torch.full((n,), 4), torch.arange(n)).double()
    for shift in range(3):
        assert not (by_position[shift:] == later[: n - shift]).double().mean() > 0.001


def test_draw_edges():
    weights = torch.tensor([[0.0, 1, 0, 3, 0]])
    for u, want in ((0.0, 1), (0.24, 1), (0.25, 3), (1 - 2**-24, 3)):
        assert draw(weights, torch.tensor([u])).item() == want
    tiny = torch.tensor([[0.0, 1e-30, 0.0]])
    assert draw(tiny, torch.tensor([1 - 2**-24])).item() == 1


@pytest.mark.parametrize("levels", [3, 40, 10**9])
@pytest.mark.parametrize("count", [1, 5, 20, 99, 100])
def test_top_candidates_rank_equal_values_by_id(levels, count):
    logits = (torch.rand(30, 100) * levels).floor()
    values, ids = top_candidates(logits, count)
    want_values, want_ids = torch.sort(logits, dim=-1, descending=True, stable=True)
    assert torch.equal(values, want_values[:, :count])
    assert torch.equal(ids, want_ids[:, :count])


FILTERS = [  # temperature, top_k, top_p, min_p
    (1.0, -1, 1.0, 0.0),
    (0.7, 0, 1.0, 0.0),
    (1.0, 1, 1.0, 0.0),
    (1.0, 20, 1.0, 0.0),
    (1.5, 3000, 1.0, 0.0),
    (1.0, -1, 0.9, 0.0),
    (0.3, -1, 0.5, 0.0),
    (3.0, -1, 0.97, 0.0),
    (1.0, -1, 0.0, 0.0),
    (1.0, 50, 0.8, 0.0),
    (1.0, -1, 1.0, 0.1),
    (1.0, 30, 1.0, 0.05),
    (1.0, 30, 0.7, 0.02),
    (2.0, -1, 0.9, 0.3),
    (1.0, 100000, 0.9, 1.0),
]


@pytest.mark.parametrize("coarse", [False, True], ids=["fine", "bfloat16"])
@pytest.mark.parametrize("setting", FILTERS, ids=str)
def test_matches_the_literal_version(setting, coarse):
    batch, vocab = 24, 3000
    logits = torch.randn(batch, vocab) * 3
    if coarse:
        logits = logits.bfloat16().float()
    seed = torch.randint(-(2**62), 2**62, (batch,))
    columns = [[x] * batch for x in setting]
    before = logits.clone()
    got = sample(logits, make_rows(*columns, seed=seed)).tolist()
    assert torch.equal(logits, before)
    differ = 0
    for i in range(batch):
        p = literal_survivors(logits[i], *setting)
        assert p[got[i]] > 0, "a token that was filtered out was drawn"
        differ += got[i] != literal_draw(p, literal_uniform(int(seed[i]) & MASK, 7))
    # The literal sums are float64: a draw that falls on a rounding edge may go next door.
    assert differ <= 1


@pytest.mark.parametrize("peaked", [True, False])
def test_a_row_gets_the_same_alone_and_in_any_batch(peaked):
    vocab = 5000
    settings = [*FILTERS, (0.0, -1, 1.0, 0.0), (0.0, 5, 0.5, 0.1)] * 2
    logits = (torch.randn(len(settings), vocab) * (4 if peaked else 0.3)).bfloat16().float()
    seed = torch.randint(-(2**62), 2**62, (len(settings),))
    position = torch.randint(0, 10**6, (len(settings),))
    together = sample(
        logits, make_rows(*map(list, zip(*settings, strict=True)), seed=seed, position=position)
    )
    for i, setting in enumerate(settings):
        rows = make_rows(
            *[[x] for x in setting], seed=seed[i : i + 1], position=position[i : i + 1]
        )
        assert sample(logits[i : i + 1], rows).item() == together[i]
        if setting[0] == 0 or setting[1] == 1:
            assert together[i] == logits[i].argmax()


def test_hints_may_say_more_than_is_true():
    logits = torch.randn(4, 2000)
    tight = make_rows([1.0] * 4, [-1] * 4, [1.0] * 4, [0.0] * 4)
    from dataclasses import replace

    loose = replace(tight, any_top_k=True, any_top_p=True, max_top_k=700)
    assert torch.equal(sample(logits, tight), sample(logits, loose))


@pytest.mark.parametrize("setting", [(1.0, -1, 1.0, 0.0), (1.0, 6, 0.9, 0.0), (0.8, 8, 0.9, 0.1)])
def test_draws_follow_the_distribution(setting):
    n, vocab = 20000, 40
    one = torch.randn(vocab) * 2
    columns = [[x] * n for x in setting]
    rows = make_rows(*columns, seed=torch.full((n,), 11), position=torch.arange(n))
    got = sample(one.expand(n, vocab), rows)
    p = literal_survivors(one, *setting)
    p = p / p.sum()
    counts = np.bincount(got.numpy(), minlength=vocab)
    assert counts[p == 0].sum() == 0
    expected = p[p > 0] * n
    chi_square = ((counts[p > 0] - expected) ** 2 / expected).sum()
    freedom = (p > 0).sum() - 1
    assert chi_square < freedom + 5 * math.sqrt(2 * freedom) + 5


def test_odd_rows():
    vocab = 100
    logits = torch.randn(4, vocab)
    logits[0] = -math.inf
    logits[0, 17] = 0.0  # one token is left
    logits[1] = math.nan
    logits[2] = -math.inf
    rows = make_rows([1.0] * 4, [5, 5, -1, -1], [0.9, 0.9, 1.0, 0.5], [0.0] * 4)
    got = sample(logits, rows)
    assert got[0] == 17
    assert ((got >= 0) & (got < vocab)).all()
    assert sample(logits[:0], make_rows([], [], [], [])).shape == (0,)
    assert sample(torch.zeros(1, 1), make_rows([1.0], [1], [0.5], [0.5])).tolist() == [0]


def test_greedy_takes_the_lowest_id_of_equals():
    logits = torch.zeros(2, 300)
    logits[1, [40, 200, 299]] = 1.0
    rows = make_rows([0.0, 0.0], [-1, -1], [1.0, 1.0], [0.0, 0.0])
    assert sample(logits, rows).tolist() == [0, 40]
