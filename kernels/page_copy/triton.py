"""Copies pages between the KV cache and host memory in one launch.

The number of pages and layers does not matter. The kernel addresses page-locked host memory
directly. The device's copy engines would need a call for each page and layer, and these calls would
take longer than the copies.

Source: the kernels of SGLang's HiCache (`transfer_kv`) address host memory in the same way.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

# The number of programs. It keeps enough bytes in flight for the bus, and leaves the other
# multiprocessors to the step.
_NUM_PROGRAMS = 16
_BLOCK = 2048


@triton.jit
def copy_kernel(
    parts,
    pages,
    host_pages,
    num_parts,
    num_copies,
    TO_HOST: tl.constexpr,
    WORD: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Copy each page of each part.

    Args:
        parts: `[num_parts, 4]` int64: address of the part, words of a page, address of the part's
            page in host page 0, and words of a whole host page.
        pages: `[n]` int64.
        host_pages: `[n]` int64.
        num_parts: number of parts.
        num_copies: `n * num_parts`.
        TO_HOST: whether pages are copied to host memory.
        WORD: the dtype in which words are copied.
        BLOCK: words that a program has in flight.
    """
    for index in range(tl.program_id(0), num_copies, tl.num_programs(0)):
        part = parts + index % num_parts * 4
        num_words = tl.load(part + 1)
        page = tl.load(pages + index // num_parts)
        host_page = tl.load(host_pages + index // num_parts)
        here = tl.load(part).to(tl.pointer_type(WORD)) + page * num_words
        there = tl.load(part + 2).to(tl.pointer_type(WORD)) + host_page * tl.load(part + 3)
        for first in range(0, num_words, BLOCK):
            words = first + tl.arange(0, BLOCK)
            exists = words < num_words
            if TO_HOST:
                tl.store(there + words, tl.load(here + words, mask=exists), mask=exists)
            else:
                tl.store(here + words, tl.load(there + words, mask=exists), mask=exists)


def copy_pages(
    parts: Sequence[Tensor], pages: Tensor, host: Tensor, host_pages: Tensor, *, to_host: bool
) -> None:
    """Copy pages with one kernel; see `kernels.page_copy.copy_pages`."""
    sizes = [part[0].nbytes for part in parts]
    word = 8 if not any(size % 8 for size in sizes) else 1
    rows, first = [], host.data_ptr()
    for part, size in zip(parts, sizes, strict=True):
        rows.append((part.data_ptr(), size // word, first, host.shape[1] // word))
        first += size
    table = torch.tensor(rows, dtype=torch.int64, pin_memory=pages.is_cuda)
    num_copies = len(pages) * len(parts)
    copy_kernel[(min(num_copies, _NUM_PROGRAMS),)](
        table.to(pages.device, non_blocking=True),
        pages,
        host_pages,
        len(parts),
        num_copies,
        TO_HOST=to_host,
        WORD=tl.int64 if word == 8 else tl.int8,
        BLOCK=_BLOCK,
        num_warps=8,
    )
