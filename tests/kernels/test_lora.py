"""Adapters of linear layers: every implementation against plain torch in float64."""

import itertools

import pytest
import torch

from kernels.activation import act_and_mul
from kernels.linear import pack
from kernels.lora import LORA, LoraPart, TokenSlots, bank_width, make_bank

# Tokens, columns, rows of each part, slots, ranks; a row between parts belongs to none.
SHAPES = [
    (1, 64, (64,), 1, 4),
    (1, 300, (64, 80), 3, 17),
    (7, 37, (20, 70, 3), 3, 9),
    (40, 96, (130,), 4, 16),
    (70, 300, (64, 80), 6, 33),
]
IMPLEMENTATIONS = [name for name in LORA if LORA.unavailable(name) is None]


def operands(shape, dtype, seed=0):
    num_tokens, in_features, rows, num_slots, max_rank = shape
    generator = torch.Generator().manual_seed(seed)
    parts, first = [], 0
    for num_rows in rows:
        parts.append(LoraPart(first, num_rows))
        first += num_rows + 1
    width = bank_width(in_features, parts)
    memory = torch.empty(num_slots, max_rank, width + 5).normal_(generator=generator)
    memory = (memory / in_features**0.5).to(dtype)[:, :, :width]
    ranks = torch.randint(0, max_rank + 1, (num_slots,), generator=generator, dtype=torch.int32)
    ranks[0] = max_rank
    slots = torch.randint(-1, num_slots, (num_tokens,), generator=generator, dtype=torch.int32)
    slots[0] = 0
    x = torch.empty(num_tokens, in_features).normal_(generator=generator).to(dtype)
    out = torch.empty(num_tokens, first).normal_(generator=generator).to(dtype)
    return memory, ranks, in_features, parts, slots, x, out


def expected(memory, ranks, in_features, parts, slots, x, out):
    """The definition, token by token."""
    want = out.double()
    for token, slot in enumerate(slots.tolist()):
        if slot < 0:
            continue
        rows, start = memory[slot, : ranks[slot]].double(), len(parts) * in_features
        for index, part in enumerate(parts):
            a = rows[:, index * in_features : (index + 1) * in_features]
            b = rows[:, start : start + part.num_rows]
            start += part.num_rows
            added = (a @ x[token].double()) @ b
            want[token, part.first : part.first + part.num_rows] += added
    return want


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_each_token_gets_its_adapter(impl, shape, dtype):
    memory, ranks, in_features, parts, slots, x, out = operands(shape, dtype)
    want = expected(memory, ranks, in_features, parts, slots, x, out)
    bank = make_bank(memory, ranks, in_features, parts, impl)
    bank.add(out, x, TokenSlots(slots, len(ranks)))
    tolerance = 1e-5 if dtype is torch.float32 else 3e-2
    torch.testing.assert_close(out.double(), want, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_tokens_without_an_adapter_keep_their_bits(impl):
    memory, ranks, in_features, parts, slots, x, out = operands(SHAPES[3], torch.bfloat16)
    bank, before = make_bank(memory, ranks, in_features, parts, impl), out.clone()
    bank.add(out, x, TokenSlots(torch.full_like(slots, -1), len(ranks)))
    assert torch.equal(out, before)
    bank.add(out, x, TokenSlots(slots, len(ranks)))
    assert torch.equal(out[slots < 0], before[slots < 0])
    assert not torch.equal(out, before)


@pytest.mark.parametrize("impl", [name for name in IMPLEMENTATIONS if LORA.is_invariant(name)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_row_has_the_same_bits_in_any_batch(impl, dtype):
    memory, ranks, in_features, parts, slots, x, out = operands(SHAPES[4], dtype)
    bank, alone = make_bank(memory, ranks, in_features, parts, impl), out.clone()
    bank.add(out, x, TokenSlots(slots, len(ranks)))
    for token in range(len(x)):
        one = slice(token, token + 1)
        row = alone[one].clone()
        bank.add(row, x[one].clone(), TokenSlots(slots[one].clone(), len(ranks)))
        assert torch.equal(row, out[one])


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.parametrize("num_tokens", [1, 23, 70])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_gated_product_is_the_activation_of_the_product(impl, num_tokens, dtype):
    memory, ranks, in_features, _, slots, x, _ = operands((num_tokens, 96, (70, 70), 5, 16), dtype)
    parts = [LoraPart(0, 70), LoraPart(70, 70)]
    weight = torch.empty(140, in_features).normal_(std=0.1).to(dtype)
    # In bfloat16 the adapter's first half may be computed by the base's kernel.
    of = "triton" if impl == "triton" and dtype is torch.bfloat16 else "reference"
    base, tokens = pack(weight, None, of), TokenSlots(slots, len(ranks))
    slots[num_tokens // 2 :] = -1 if num_tokens > 1 else 0
    # What ranks that are not in use held before must not matter.
    for slot, rank in enumerate(ranks.tolist()):
        memory[slot, rank:] = torch.nan
    bank = make_bank(memory, ranks, in_features, parts, impl)
    want = expected(memory, ranks, in_features, parts, slots, x, x.double() @ weight.double().T)
    got, gated = bank.product(base, x, tokens), bank.gated(base, x, "silu", tokens)
    tolerance = 1e-5 if dtype is torch.float32 else 3e-2
    close = {"atol": tolerance, "rtol": tolerance}
    torch.testing.assert_close(got.double(), want, **close)
    torch.testing.assert_close(gated.float(), act_and_mul(want.float(), "silu"), **close)


@pytest.mark.skipif("triton" not in IMPLEMENTATIONS, reason="no triton here")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_every_cut_of_triton_is_right(dtype):
    from kernels.lora.triton import Cut

    memory, ranks, in_features, parts, slots, x, out = operands((40, 300, (64, 80), 9, 16), dtype)
    want = expected(memory, ranks, in_features, parts, slots, x, out)
    base = pack(torch.zeros(out.shape[1], in_features, dtype=dtype), out[0].clone(), "reference")
    want += (out[0] - out).double()
    bank, tokens = make_bank(memory, ranks, in_features, parts, "triton"), TokenSlots(slots, 9)
    tolerance = 1e-5 if dtype is torch.float32 else 3e-2
    for cut in (
        Cut(order="last"),
        Cut(order="beside", shares=2, num_stages=1),
        Cut(64, 2, 32, 3),
        Cut(128, 4, 64, 16, order="within"),
    ):
        bank.cut = cut
        got = bank.product(base, x, tokens).double()
        torch.testing.assert_close(got, want, atol=tolerance, rtol=tolerance)


@pytest.mark.skipif("triton" not in IMPLEMENTATIONS, reason="no triton here")
@pytest.mark.parametrize(
    ("num_tokens", "split_k", "block_m"),
    [
        *((num_tokens, split_k, 0) for num_tokens in (2, 23, 64) for split_k in (1, 2)),
        *((2, 3, 16), (23, 3, 16)),
        # Four blocks of tokens, where 23 make two.
        pytest.param(64, 3, 16, marks=pytest.mark.long),
    ],
)
def test_triton_shrinks_tokens_in_the_kernel_of_the_base_product(num_tokens, split_k, block_m):
    from kernels.linear.triton import TOKEN_BLOCKS, Tile, TritonLinear

    splits = []

    class Linear(TritonLinear):
        """A product with other tiles, which always multiplies rows of adapters."""

        def __init__(self, weight, bias):
            super().__init__(weight, bias)
            self._tiles = dict.fromkeys(TOKEN_BLOCKS, Tile(32, 32, 4, 2, split_k, block_m))

        def split_with_adapters(self, *_):
            return split_k

        def with_adapters(self, x, adapters):
            splits.append(len(adapters.made))
            product = super().with_adapters(x, adapters)
            assert torch.equal(product, self(x))
            return product

    operand = operands((num_tokens, 300, (64, 80), 9, 17), torch.bfloat16)
    memory, ranks, in_features, parts, slots, x, out = operand
    for slot, rank in enumerate(ranks.tolist()):
        memory[slot, rank:] = torch.nan
    weight, bias = torch.randn(out.shape[1], in_features).mul_(0.05).bfloat16(), out[0].clone()
    base, bank = Linear(weight, bias), make_bank(memory, ranks, in_features, parts, "triton")
    want = x.double() @ weight.double().T + bias.double()
    want = expected(memory, ranks, in_features, parts, slots, x, want)
    for _ in range(2):
        got = bank.product(base, x, TokenSlots(slots, 9))
        torch.testing.assert_close(got.double(), want, atol=3e-2, rtol=3e-2)
    none = bank.product(base, x, TokenSlots(torch.full_like(slots, -1), 9))
    assert torch.equal(none, base(x))
    assert splits == [split_k] * 3


@pytest.mark.skipif("triton" not in IMPLEMENTATIONS, reason="no triton here")
def test_triton_shrinks_in_a_product_whose_programs_take_no_more_turns():
    from kernels.linear import triton

    for rows, columns, parts, least in (
        (6144, 4096, 3, 1),
        (4096, 4096, 1, 2),
        (28_672, 4096, 2, 1),
        (4096, 14_336, 1, 2),
    ):
        weight = torch.empty(rows, columns, dtype=torch.bfloat16, device="meta")
        base = triton.TritonLinear(weight, None)
        assert base.split_with_adapters(64, weight.dtype, 8 * 16 * parts, 132) == least
        assert base.split_with_adapters(64, torch.float32, 8 * 16 * parts, 132) == 0
        assert base.split_with_adapters(1, weight.dtype, 16 * parts, 132) == 0
        many = least if rows == 28_672 else 0
        assert base.split_with_adapters(64, weight.dtype, 64 * 16 * parts, 132) == many


@pytest.mark.skipif("triton" not in IMPLEMENTATIONS, reason="no triton here")
@pytest.mark.parametrize("slot", [-1, 3, 2**30, -(2**31)])
def test_triton_lists_a_token_alone_with_a_slot_that_exists(slot):
    """While a graph is captured, no token has an adapter, or memory holds anything."""
    from kernels.lora.triton import few_listed

    tokens = TokenSlots(torch.tensor([slot], dtype=torch.int32), 3)
    made = few_listed(tokens, torch.tensor([7, 5, 6], dtype=torch.int32)).list
    assert made.tolist() == [0, -1, 0, 0, 0]


@pytest.mark.skipif("triton" not in IMPLEMENTATIONS, reason="no triton here")
def test_triton_lists_many_tokens():
    from kernels.lora.triton import few_listed

    slots, ranks = torch.randint(-1, 6, (39,), dtype=torch.int32), torch.arange(3, 9)
    few = few_listed(TokenSlots(slots, 5), ranks.int())
    order, index, of_block, of_ranks = few.list[: 4 * few.num_places].view(4, -1)
    assert sorted(order.tolist()) == list(range(64))
    seen = [slot if 0 <= slot < 5 else 9 for slot in slots[order[:39]].tolist()]
    assert seen == sorted(seen)
    for place, slot in enumerate(seen):
        at = place // 16 * 16 + index[place]
        assert (index[place] == -1) if slot == 9 else (of_block[at] == slot)
        assert slot == 9 or of_ranks[at] == ranks[slot]
    counts = few.list[4 * few.num_places :][:4].tolist()
    assert counts == [len({*seen[first : first + 16]} - {9}) for first in (0, 16, 32, 48)]
    place, index, of_step, of_ranks = few.step[:-1].view(4, -1)
    count = few.step[-1]
    used = sorted({*seen} - {9})
    assert of_step[:count].tolist() == used
    assert of_ranks[:count].tolist() == [slot + 3 for slot in used]
    assert torch.equal(order[place.long()], torch.arange(64, dtype=torch.int32))
    wanted = [used.index(slot) if 0 <= slot < 5 else -1 for slot in slots.tolist()]
    assert index.tolist() == wanted + [-1] * 25


@pytest.mark.parametrize("size_kib", [99, 163, 227])
@pytest.mark.parametrize("ranks", [16, 64, 256, 512])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_cuts_of_triton_fit_the_shared_memory(size_kib, ranks, dtype):
    triton = pytest.importorskip("kernels.lora.triton")
    room = triton.SharedMemory(size_kib * 1024, is_operand=True)
    sizes = itertools.product((64, 896, 4096, 14_336), (8, 64), (False, True))
    for in_features, num_slots, gates in sizes:
        wanted = triton.cut_of(in_features, 16, num_slots, gates=gates)
        cut = triton.fitted(wanted, ranks, 16, dtype, room)
        blocks = [(ranks + 16) * cut.columns, ranks * cut.width]
        assert all(cut.num_stages * block * dtype.itemsize < room.size for block in blocks)
        assert cut.num_stages == wanted.num_stages or cut.columns == 32 or cut.width == 32
        assert cut.columns * cut.steps == wanted.columns * wanted.steps
        if ranks == 16 and dtype is torch.bfloat16 and size_kib == 227:
            assert cut == wanted
