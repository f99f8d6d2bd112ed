"""Back ends' `write` and `attend` against `run`, and layers of several shapes in one model."""

import os

import pytest
import torch

from kernels.paged_attention import reference
from kernels.rope.reference import rope_kv_write
from runtime.models.attention.backend import ATTENTION_BACKENDS, AttentionLayer, StepLimits
from runtime.models.attention.forward_batch import ForwardBatch, KVCache

# Set by test_triton_interpreted.py: Triton's kernels then take tensors of the CPU.
NAMES = ["cpu", "torch"]
if os.environ.get("TRITON_INTERPRET") == "1":
    NAMES = ["triton", "triton_invariant"]
PAGE = 16


def layers() -> list[AttentionLayer]:
    """Two shapes of heads with one window, one with narrow values, one with a cap and sinks."""
    sinks = torch.tensor([0.5, -1.0, 2.0, 0.0])
    return [
        AttentionLayer(0, 4, 2, 32, 0.2, window_left=20),
        AttentionLayer(1, 2, 2, 64, 0.1, window_left=20),
        AttentionLayer(2, 4, 1, 32, 0.2, value_dim=16),
        AttentionLayer(3, 4, 2, 32, 0.2, softcap=1.5, sinks=sinks),
    ]


def step(backend, kv: list[KVCache], lengths: list[tuple[int, int]]) -> ForwardBatch:
    """A step of sequences with `(all keys, new tokens)`; those with one new token come first."""
    pages = [-(-keys // PAGE) for keys, _ in lengths]
    first = [1 + sum(pages[:i]) for i in range(len(pages))]
    table = torch.zeros(len(pages), max(pages), dtype=torch.int32)
    for row, (start, count) in enumerate(zip(first, pages, strict=True)):
        table[row, :count] = torch.arange(start, start + count)
    positions = torch.cat([torch.arange(keys - new, keys) for keys, new in lengths])
    starts = [torch.arange(keys - new, keys) + first[i] * PAGE
              for i, (keys, new) in enumerate(lengths)]  # fmt: skip
    counts = torch.tensor([0, *(new for _, new in lengths)])
    return ForwardBatch(
        input_ids=positions,
        positions=positions,
        slots=torch.cat(starts),
        qo_indptr=counts.cumsum(0).to(torch.int32),
        seq_lens=torch.tensor([keys for keys, _ in lengths], dtype=torch.int32),
        page_table=table,
        num_decodes=sum(new == 1 for _, new in lengths),
        logits_indices=None,
        kv=kv,
        attention=backend,
    )


@pytest.mark.parametrize("name", NAMES)
def test_written_keys_are_attended_to_in_layers_of_every_shape(name: str) -> None:
    torch.manual_seed(0)
    backend = ATTENTION_BACKENDS.load(name)("cpu", StepLimits(8, 200))
    mine = layers()
    lengths = [(70, 1), (33, 1), (60, 30), (18, 18)]
    kv = [
        KVCache(*(torch.randn(16, each.num_kv_heads, PAGE, each.head_dim) for _ in "kv"))
        for each in mine
    ]
    batch = step(backend, kv, lengths)
    num_tokens = len(batch.positions)
    backend.plan(batch)
    # Twice: work space is shared by layers of a shape, and must be left as it was.
    for layer in [*mine, *mine]:
        value_dim = layer.value_dim or layer.head_dim
        q = torch.randn(num_tokens, layer.num_heads, layer.head_dim)
        k = torch.randn(layer.num_kv_heads, num_tokens, layer.head_dim).transpose(0, 1)
        v = torch.randn(num_tokens, layer.num_kv_heads, value_dim)
        backend.write(layer, k, v, batch)
        got = backend.attend(layer, q, batch)
        cache = kv[layer.layer_idx]
        want = reference.paged_attention(
            q, cache.k, cache.v, batch.page_table, batch.seq_lens, batch.qo_indptr,
            layer.scale, layer.window_left, None, None, layer.softcap, layer.sinks,
        )  # fmt: skip
        want = want.unflatten(1, (layer.num_heads, -1))[..., :value_dim].flatten(1)
        assert got.shape == want.shape
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
        by_slot = cache.k.transpose(1, 2).flatten(0, 1)
        assert torch.equal(by_slot[batch.slots], k)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("rotates", "kv_heads"), [(True, 2), (False, 2), (False, 1)])
def test_run_is_both_halves(name: str, rotates: bool, kv_heads: int) -> None:
    torch.manual_seed(0)
    backend = ATTENTION_BACKENDS.load(name)("cpu", StepLimits(8, 200))
    heads, dim = 4, 32
    angles = torch.randn(100, dim // 2)
    table = torch.cat((angles.cos(), angles.sin()), 1)
    norms = [torch.randn(dim) for _ in "qk"]
    layer = AttentionLayer(0, heads, kv_heads, dim, 0.2, table if rotates else None, *norms)
    kv = [KVCache(*(torch.randn(16, kv_heads, PAGE, dim) for _ in "kv"))]
    batch = step(backend, kv, [(70, 1), (60, 30)])
    backend.plan(batch)
    qkv = torch.randn(len(batch.positions), (heads + 2 * kv_heads) * dim)
    made = qkv.clone()
    # Without a rotation, position 0 of a table: angles of 0.
    still = torch.cat((torch.ones(100, dim // 2), torch.zeros(100, dim // 2)), 1)
    nowhere = [torch.zeros(1, kv_heads, PAGE, dim) for _ in "kv"]
    rope_kv_write(
        made, heads, kv_heads, dim, table if rotates else still, batch.positions,
        torch.full_like(batch.slots, -1), *nowhere, *norms, 1e-6,
    )  # fmt: skip
    got = backend.run(layer, qkv, batch)
    q, k, v = made.unflatten(1, (-1, dim)).split([heads, kv_heads, kv_heads], dim=1)
    backend.write(layer, k, v, batch)
    torch.testing.assert_close(got, backend.attend(layer, q, batch), rtol=1e-4, atol=1e-5)
