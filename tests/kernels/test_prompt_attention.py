"""Attention of whole prompts on plain keys, against attention on pages."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional

from kernels.paged_attention import reference as paged
from kernels.prompt_attention import PROMPT_ATTENTION, cudnn

HEADS, KV_HEADS, DIM = 6, 2, 32


@pytest.mark.parametrize("impl", [n for n in PROMPT_ATTENTION if n != "cudnn"])
@pytest.mark.parametrize("lengths", [[5], [3, 3, 9, 1], []], ids=str)
def test_equal_to_pages(impl, lengths):
    qkv = torch.randn(sum(lengths), HEADS + 2 * KV_HEADS, DIM)
    q, k, v = qkv.split([HEADS, KV_HEADS, KV_HEADS], dim=1)
    got = PROMPT_ATTENTION.load(impl).prompt_attention(q, k, v, lengths, DIM**-0.5)
    # One page holds a whole prompt.
    caches = [torch.zeros(len(lengths), KV_HEADS, 16, DIM) for _ in "kv"]
    start = 0
    for page, length in enumerate(lengths):
        for cache, rows in zip(caches, (k, v), strict=True):
            cache[page, :, :length] = rows[start : start + length].transpose(0, 1)
        start += length
    table = torch.arange(len(lengths), dtype=torch.int32).unsqueeze(1)
    lens = torch.tensor(lengths, dtype=torch.int32)
    indptr = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    want = paged.paged_attention(q, *caches, table, lens, indptr, DIM**-0.5, -1, None)
    assert got.shape == (sum(lengths), HEADS * DIM)
    torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)


def test_neighbours_of_a_round_length_share_a_call():
    runs = list(cudnn.runs([4096, 4096, 3000, 3000, 2048]))
    assert runs == [
        (0, 2, 4096),
        (8192, 1, 3000),
        (11192, 1, 3000),
        (14192, 1, 2048),
    ]


def test_no_more_than_four_share_a_call_and_no_long_ones() -> None:
    runs = [(count, length) for _, count, length in cudnn.runs([2048] * 7 + [4352] * 2)]
    assert runs == [(4, 2048), (2, 2048), (1, 2048), (1, 4352), (1, 4352)]


def test_a_step_of_the_usual_size_has_so_many_shapes() -> None:
    assert len(cudnn.shapes_of_steps(131_072, 8192)) == 35
    assert not cudnn.shapes_of_steps(2000, 8192)


def test_a_length_grows_by_little() -> None:
    for length in range(1, 70_000):
        padded = cudnn.rounded_up(length)
        assert length <= padded < length + max(256, length / 16)
        assert cudnn.rounded_up(padded) == padded


@settings(max_examples=300)
@given(st.data(), st.sampled_from([2048, 2300, 4096, 8192, 16384, 20_000]), st.booleans())
def test_every_call_of_a_step_has_a_plan(data: st.DataObject, most: int, is_short: bool) -> None:
    """Whatever prompts a step has, their shapes are among those that are made ready."""
    longest = min(most, 3000) if is_short else most
    ready = cudnn.shapes_of_steps(longest, most)
    lengths, left = [], most
    while left >= cudnn.MIN_LENGTH:
        length = data.draw(st.integers(cudnn.MIN_LENGTH, min(left, longest)))
        times = data.draw(st.integers(1, left // length))
        lengths += [length] * times
        left -= times * length
    for _, count, length in cudnn.runs(lengths):
        assert (count, cudnn.rounded_up(length)) in ready
    assert len(ready) == len(set(ready)) <= 70


def test_prompts_with_padding_look_to_cudnn_as_round_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sizes and strides are what a plan is made for."""
    seen = []

    def attend(*tensors: torch.Tensor, **_: float) -> tuple[torch.Tensor]:
        seen.append([(each.shape, each.stride()) for each in tensors])
        query, key, value = (each.float() for each in tensors)
        return (
            functional.scaled_dot_product_attention(
                query, key, value, is_causal=True, enable_gqa=True
            ),
        )

    def call(query, key, value, *_: object, scale: float) -> tuple[torch.Tensor]:
        return attend(query, key, value, scale=scale)

    monkeypatch.setattr(torch.ops.aten, "_scaled_dot_product_cudnn_attention", call, raising=False)
    for length in (256, 200):
        qkv = torch.randn(length, HEADS + 2 * KV_HEADS, DIM)
        q, k, v = qkv.split([HEADS, KV_HEADS, KV_HEADS], dim=1)
        got = cudnn.prompt_attention(q, k, v, [length], DIM**-0.5)
        want = PROMPT_ATTENTION.load("reference").prompt_attention(q, k, v, [length], DIM**-0.5)
        torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)
    cudnn.prepare(q, KV_HEADS, 2048, 2048, DIM**-0.5)
    assert seen[0] == seen[1]
    assert [shape[2] for (shape, _), *_ in seen[2:]] == [2048]
    # But for the length.
    assert seen[2][0][1][1:] == seen[0][0][1][1:]
