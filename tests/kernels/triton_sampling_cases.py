"""Triton sampling against the reference; run by `test_triton_interpreted.py`."""

import functools
import math

import pytest
import torch

import kernels.sampling
from kernels.sampling import SamplingRows, reference, triton, triton_edit, triton_rows
from runtime.executor.warmup_steps import warm_up_sampling

SETTINGS = [  # temperature, top_k, top_p, min_p
    (0.0, -1, 1.0, 0.0),
    (1.0, -1, 1.0, 0.0),
    (0.7, 0, 1.0, 0.2),
    (1.0, 1, 1.0, 0.0),
    (1.0, 20, 1.0, 0.0),
    (1.5, 300, 0.9, 0.0),
    (1.0, -1, 0.9, 0.0),
    (3.0, -1, 0.97, 0.0),
    (1.0, -1, 0.0, 0.0),
    (1.0, 30, 0.7, 0.02),
    (1.0, 5000, 0.99, 1e-4),
    (1.0, 10**6, 0.9, 1.0),
]


def make_rows(settings) -> SamplingRows:
    temperature, top_k, top_p, min_p = (list(x) for x in zip(*settings, strict=True))
    batch = len(settings)
    return SamplingRows(
        temperature=torch.tensor(temperature),
        top_k=torch.tensor(top_k, dtype=torch.int32),
        top_p=torch.tensor(top_p),
        min_p=torch.tensor(min_p),
        seed=torch.randint(-(2**62), 2**62, (batch,)),
        position=torch.randint(0, 10**6, (batch,)),
        all_greedy=not any(temperature),
        any_top_k=True,
        any_top_p=True,
        max_top_k=5000,
    )


@pytest.mark.parametrize("impl", ["triton"])
@pytest.mark.parametrize("spread", [0.2, 1.0, 5.0])
@pytest.mark.parametrize("coarse", [False, True])
def test_draws_as_the_reference(impl, spread, coarse):
    vocab = 9001
    logits = torch.randn(len(SETTINGS), vocab) * spread
    logits[:, ::7] = -math.inf
    if coarse:
        logits = logits.bfloat16().float()
    rows = make_rows(SETTINGS)
    before = logits.clone()
    # The last bit of a sum may move a draw to the next token.
    assert (triton.sample(logits, rows) != reference.sample(logits, rows)).sum() <= 1
    assert torch.equal(logits, before)


@pytest.mark.parametrize("impl", ["triton"])
def test_rows_with_nothing_to_draw_give_valid_ids(impl):
    vocab = 5000
    logits = torch.randn(4, vocab)
    logits[0] = -math.inf
    logits[0, 17] = 0.0
    logits[1] = math.nan
    logits[2] = -math.inf
    rows = make_rows([(1.0, 5, 0.9, 0.0), (1.0, 5, 0.9, 0.0), (1.0, -1, 0.5, 0.0), (0, 1, 1, 0)])
    ids = triton.sample(logits, rows)
    assert ids[0] == 17
    assert ids[3] == logits[3].argmax()
    assert ((ids >= 0) & (ids < vocab)).all()


@pytest.mark.parametrize("impl", ["triton"])
@pytest.mark.parametrize(("vocab", "top_k"), [(5000, 0), (5000, 1), (9000, 40), (30, 500)])
def test_logprobs(impl, vocab, top_k):
    logits = torch.randn(3, vocab)
    logits[1, 10:] = -math.inf
    logits[2] = 1.0
    ids = torch.tensor([[3, 1], [vocab - 1, 3], [7, 0]])
    for got, want in zip(
        triton.gather_logprobs(logits, ids, top_k),
        reference.gather_logprobs(logits, ids, top_k),
        strict=True,
    ):
        assert got.dtype == want.dtype
        if got.dtype is torch.int64:
            assert torch.equal(got, want)
        else:
            assert torch.allclose(got, want, atol=2e-6)


@pytest.mark.parametrize("impl", ["triton"])
@pytest.mark.parametrize("vocab", [1, 31, 33, 3000])
def test_edits(impl, vocab):
    logits = torch.randn(3, vocab)
    rows, ids = torch.randint(0, 3, (200,)), torch.randint(0, vocab, (200,))
    bitmask = torch.randint(-(2**31), 2**31, (3, -(-vocab // 32))).to(torch.int32)
    bitmask[:, 0] |= 1
    for given in ((), (bitmask,), (bitmask[:2], torch.tensor([2, 0]))):
        noisy = logits.index_fill(0, torch.tensor([1]), math.nan)
        got = triton.best_tokens(noisy.clone(), *given)
        assert torch.equal(got, reference.best_tokens(noisy.clone(), *given))
    for name, arguments in (
        ("apply_logit_bias", (rows, ids, torch.randn(200))),
        ("mask_tokens", (rows[:20], ids[:20])),
        ("apply_token_bitmask", (bitmask,)),
        ("apply_token_bitmask", (bitmask[:2], torch.tensor([2, 0]))),
    ):
        got, want = logits.clone(), logits.clone()
        getattr(triton, name)(got, *arguments)
        getattr(reference, name)(want, *arguments)
        assert torch.allclose(got, want, atol=1e-4), name


@pytest.mark.parametrize("impl", ["triton"])
@pytest.mark.parametrize("at_once", [1, 6, 100])
@pytest.mark.parametrize("indexed", [False, True])
def test_penalties(impl, at_once, indexed):
    vocab, length = 70, 2100
    penalise = functools.partial(triton.apply_penalties, count_bytes=4 * vocab * at_once)
    logits = torch.randn(7, vocab)
    logits[2, ::3] = -math.inf
    lines = torch.tensor([4, 0, 6, 2, 3]) if indexed else None
    num_rows = 5 if indexed else 7
    ids = torch.randint(0, vocab, (num_rows, length + 50))[:, :length]
    lens = torch.tensor([0, 1, 2100, 1024, 1500, 3, 40])[:num_rows]
    for row, count in zip(ids, lens.tolist(), strict=True):
        row[count:] = 10**9
    arguments = (ids, lens, *(torch.randn(num_rows) for _ in "fp"), torch.rand(num_rows) + 0.5)
    got, want = logits.clone(), logits.clone()
    penalise(got, *arguments, lines)
    reference.apply_penalties(want, *arguments, lines)
    assert torch.allclose(got, want, atol=1e-5)
    left_alone = [1, 5] if indexed else [0]
    assert torch.equal(got[left_alone], logits[left_alone])
    # A row's result does not depend on the others.
    if not indexed:
        alone = logits[3:4].clone()
        penalise(alone, *(each[3:4] for each in arguments))
        assert torch.equal(alone[0], got[3])
    penalise(got, ids[:, :0], lens * 0, *arguments[2:], lines)
    penalise(got[:0], *(each[:0] for each in arguments))
    assert torch.allclose(got, want, atol=1e-5)


@pytest.mark.parametrize("impl", ["triton"])
def test_the_warm_up_launches_every_kernel(impl, monkeypatch):
    """In which variants: `test_sampling_variants.py`."""
    launched = set()

    class Noted:
        def __init__(self, name, kernel):
            self.name, self.kernel = name, kernel

        def __getitem__(self, grid):
            launched.add(self.name)
            return self.kernel[grid]

    named = set()
    for module in (triton, triton_edit):
        for name, value in list(vars(module).items()):
            if name.endswith("_kernel"):
                named.add(name)
                monkeypatch.setattr(module, name, Noted(name, value))
    monkeypatch.setattr(kernels.sampling, "_kernels", lambda device_type: triton)
    warm_up_sampling(3 * triton_rows.BLOCK + 5, torch.device("cpu"))
    assert len(named) >= 12
    assert launched == named


@pytest.mark.parametrize("impl", ["triton"])
@pytest.mark.parametrize(("vocab", "top_k", "top_p"), [(9001, 200, 0.3), (300, 29, 0.7)])
def test_with_min_p_top_p_is_judged_on_what_top_k_left(impl, vocab, top_k, top_p):
    """Also where the best few already hold `top_p` of everything: top-k must see them all."""
    logits = torch.randn(vocab) - 4
    logits[torch.randperm(vocab)[:8]] = 4 - torch.arange(8) * 0.4
    # Of the draws of a row an eighth would differ, or a third with the wide one.
    num_rows = 12 if vocab > 1000 else 24
    batch = logits.repeat(num_rows, 1)
    rows = make_rows([(1.0, top_k, top_p, 1e-3)] * num_rows)
    assert (triton.sample(batch, rows) != reference.sample(batch, rows)).sum() <= 1
