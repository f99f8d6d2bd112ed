"""What stands before and behind the layers of a decode step: inputs gathered, tokens chosen."""

import math
import os

import pytest
import torch

from kernels.decode_inputs import DECODE_INPUTS
from kernels.greedy import GREEDY, NAN_TOKEN

# Set by test_triton_interpreted.py: Triton's kernels then take tensors of the CPU.
NAMES = ["reference", "triton"] if os.environ.get("TRITON_INTERPRET") == "1" else ["reference"]


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
    got = DECODE_INPUTS.load(name).decode_inputs(rows, lens, last, table, page_size)
    assert got.input_ids.tolist() == [int(last[row]) for row in rows]
    assert got.positions.tolist() == [length - 1 for length in lens.tolist()]
    assert got.seq_lens.tolist() == lens.tolist()
    assert got.seq_lens.dtype == got.page_table.dtype == torch.int32
    assert torch.equal(got.page_table, table[rows])
    pages = [int(table[row, (n - 1) // page_size]) for row, n in zip(rows, lens, strict=True)]
    offsets = [(n - 1) % page_size for n in lens.tolist()]
    assert got.slots.tolist() == [p * page_size + o for p, o in zip(pages, offsets, strict=True)]


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
    got = DECODE_INPUTS.load(name).decode_inputs(none, none, torch.zeros(2).long(), table, 16)
    assert got.page_table.shape == (0, 4)
