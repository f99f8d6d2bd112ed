"""Operations before and after the layers of a decode step: gathering inputs, choosing tokens."""

import math
import os

import pytest
import torch

from kernels.decode_step import DECODE_STEP
from kernels.greedy import GREEDY, NAN_TOKEN

# Set by test_triton_interpreted.py: Triton's kernels then take tensors of the CPU.
NAMES = ["reference", "triton"] if os.environ.get("TRITON_INTERPRET") == "1" else ["reference"]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("count", [1, 5, 1024, 2500, 9000])
def test_lines_are_fetched_in_a_circle(name, count):
    buffers = torch.arange(3 * 9100).view(3, 9100)
    turn, inputs = torch.tensor([1]), torch.full((9100,), -7)
    for buffer in (2, 0, 1, 2):
        DECODE_STEP.load(name).fetch_inputs(buffers, turn, inputs[:count])
        assert turn.tolist() == [buffer]
        assert torch.equal(inputs[:count], buffers[buffer, :count])
        assert (inputs[count:] == -7).all()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("max_pages", [3, 1500])
def test_inputs_are_those_of_the_rows(name, max_pages):
    generator = torch.Generator().manual_seed(0)
    page_size, num_rows = 16, 9
    table = torch.randint(1, 5000, (num_rows, max_pages), generator=generator, dtype=torch.int32)
    last = torch.randint(0, 900, (num_rows,), generator=generator)
    # Twice the same row: padding.
    rows = torch.tensor([4, 0, 8, 8])
    lens = torch.tensor([1, 16, 17, max_pages * page_size])
    none = torch.zeros(4, dtype=torch.int64)
    before = table.clone()
    latest = torch.full((num_rows,), -7)
    got = DECODE_STEP.load(name).decode_inputs(rows, lens, none, last, latest, table, page_size)
    assert torch.equal(latest[rows], last[rows])
    assert latest.tolist().count(-7) == num_rows - 3
    assert torch.equal(table, before)
    assert got.input_ids.tolist() == [int(last[row]) for row in rows]
    assert got.positions.tolist() == [length - 1 for length in lens.tolist()]
    assert got.seq_lens.tolist() == lens.tolist()
    assert got.seq_lens.dtype == got.page_table.dtype == torch.int32
    assert torch.equal(got.page_table, table[rows])
    pages = [int(table[row, (n - 1) // page_size]) for row, n in zip(rows, lens, strict=True)]
    offsets = [(n - 1) % page_size for n in lens.tolist()]
    assert got.slots.tolist() == [p * page_size + o for p, o in zip(pages, offsets, strict=True)]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("max_pages", [3, 1500])
def test_a_new_page_is_used_and_noted(name, max_pages):
    page_size = 16
    generator = torch.Generator().manual_seed(0)
    table = torch.randint(1, 5000, (6, max_pages), generator=generator, dtype=torch.int32)
    rows = torch.tensor([4, 0, 1, 5, 5])
    # The first three begin a page, the last of the table among them; one row does not.
    lens = torch.tensor([1, 33, (max_pages - 1) * page_size + 1, 1, 1])
    pages = torch.tensor([7001, 7002, 7003, 0, 0])
    expected = table.clone()
    expected[4, 0], expected[0, 2], expected[1, max_pages - 1] = 7001, 7002, 7003
    last = torch.zeros(6, dtype=torch.int64)
    got = DECODE_STEP.load(name).decode_inputs(
        rows, lens, pages, last, last.clone(), table, page_size
    )
    assert torch.equal(table, expected)
    assert torch.equal(got.page_table, expected[rows])
    old = int(expected[5, 0])
    assert got.slots.tolist() == [page * page_size for page in (7001, 7002, 7003, old, old)]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("num_seqs", [1, 5, 300])
def test_tokens_are_kept_for_rows_and_host(name, num_seqs):
    tokens = torch.arange(num_seqs) + 100
    tokens[num_seqs // 2] = NAN_TOKEN
    rows = torch.arange(num_seqs).flip(0)
    last = torch.full((num_seqs + 2,), 9)
    kept = torch.full((4, 310), 8)
    DECODE_STEP.load(name).decode_outputs(tokens, rows, torch.tensor([2]), last, kept)
    assert last[rows].tolist() == tokens.clamp(min=0).tolist()
    assert last[num_seqs:].tolist() == [9, 9]
    assert torch.equal(kept[2, :num_seqs], tokens)
    assert (kept[2, num_seqs:] == 8).all()
    assert (kept[[0, 1, 3]] == 8).all()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("vocab_size", [1, 300, 4096, 9001])
def test_the_first_of_the_largest_is_chosen(name, dtype, vocab_size):
    generator = torch.Generator().manual_seed(0)
    # Few different values, so that many are equal.
    logits = torch.randint(-4, 4, (7, vocab_size), generator=generator).to(dtype)
    logits[1] = -math.inf
    logits[2, -1] = math.inf
    wide = torch.full((7, vocab_size), 99.0)
    got = GREEDY.load(name).greedy_tokens(logits, wide)
    want = [row.index(max(row)) for row in logits.tolist()]
    assert got.dtype == torch.int64
    assert got.tolist() == want
    assert torch.equal(wide, logits.float())
    assert torch.equal(GREEDY.load(name).greedy_tokens(wide, wide), got)
    assert torch.equal(wide, logits.float())
    for wanted in (0, 1):
        wide = torch.full((7, vocab_size), 99.0)
        again = GREEDY.load(name).greedy_tokens(logits, wide, torch.tensor([wanted]))
        assert torch.equal(again, got)
    assert torch.equal(wide, logits.float())


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("place", [0, 5000, 8999])
def test_a_row_with_nan_has_no_token(name, place):
    logits = torch.zeros(3, 9000)
    logits[:, 70] = 1
    logits[1, place] = math.nan
    for _ in range(2):
        got = GREEDY.load(name).greedy_tokens(logits, torch.empty(3, 9000))
        assert got.tolist() == [70, NAN_TOKEN, 70]


@pytest.mark.parametrize("name", NAMES)
def test_no_rows(name):
    assert GREEDY.load(name).greedy_tokens(torch.empty(0, 5), torch.empty(0, 5)).shape == (0,)
    none = torch.empty(0, dtype=torch.int64)
    table = torch.zeros(2, 4, dtype=torch.int32)
    last = torch.zeros(2).long()
    got = DECODE_STEP.load(name).decode_inputs(none, none, none, last, last, table, 16)
    assert got.page_table.shape == (0, 4)
    kept = torch.zeros(4, 2, dtype=torch.int64)
    DECODE_STEP.load(name).decode_outputs(none, none, torch.tensor([0]), last, kept)
