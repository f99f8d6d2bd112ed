"""The kernels of `kernels.latent_attention.hopper`: decode steps with Hopper's matrix instructions.

The products have keys as rows: `S^T = K Q^T` and `O^T = V^T P^T`. So 16 heads are enough for
`wgmma`, which needs 64 rows, and both products read the latents in shared memory, where one copy
serves as keys and values. Scores and values stay in registers.

All blocks of keys of the step are divided evenly among the programs, whatever the lengths of the
sequences. Most sequences therefore end in another program than they start in. Their parts are
combined by a second kernel.

Triton's own pipeline puts the operands of these products into registers, or compiles them wrongly
(Triton 3.6); in Gluon, the kernel itself states where they are stored.

Source: FlashMLA (DeepSeek) for one copy of keys and values, and for the even division.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# ruff: noqa: PLR0913, PLR0915 a kernel's parameters, and one loop with all it needs

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_wait,
)

# The names of Triton 3.6 differ.
if "async_load" in async_copy.__all__:
    _copy = async_copy.async_load
else:
    _copy = async_copy.async_copy_global_to_shared
_barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier


@gluon.jit
def _add(x, y):
    return x + y


@gluon.jit
def _first_block(program, share, longer):
    """Return the first block of a program; the first `longer` programs have one block more."""
    return program * share + gl.minimum(program, longer)


@gluon.jit
def _program_of(block, share, longer):
    """Return the program that has a block; the inverse of `_first_block`."""
    in_longer = longer * (share + 1)
    return gl.where(
        block < in_longer,
        block // (share + 1),
        longer + (block - in_longer) // gl.maximum(share, 1),
    )


@gluon.jit
def _programs_used(num_blocks, num_programs, MIN_BLOCKS: gl.constexpr):
    """Return how many programs share the blocks, so that a program has at least `MIN_BLOCKS`."""
    return gl.maximum(gl.minimum(num_programs, num_blocks // MIN_BLOCKS), 1)


@gluon.jit
def _row_pointers(
    cache_ptr,
    pages,
    start,
    last,
    PAGE_SIZE: gl.constexpr,
    WIDTH: gl.constexpr,
    BLOCK_N: gl.constexpr,
    COPY: gl.constexpr,
):
    """Return pointers to the rows of a block; the last key's row stands in for those after it.

    Rows after the last key may hold NaN, and zero times NaN is not zero.
    """
    key = start + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(1, COPY))
    key = gl.minimum(key, last)
    page = gl.load(pages + key // PAGE_SIZE).to(gl.int64)
    return cache_ptr + (page * PAGE_SIZE + key % PAGE_SIZE) * WIDTH


@gluon.jit
def _copy_rows(rows, latents, keys, RANK: gl.constexpr, ROPE: gl.constexpr, COPY: gl.constexpr):
    """Start to copy a block to shared memory."""
    latent = gl.arange(0, RANK, layout=gl.SliceLayout(0, COPY))
    rope = gl.arange(0, ROPE, layout=gl.SliceLayout(0, COPY))
    _copy(latents, gl.expand_dims(rows, 1) + gl.expand_dims(latent, 0))
    _copy(keys, gl.expand_dims(rows, 1) + RANK + gl.expand_dims(rope, 0))
    async_copy.commit_group()


@gluon.jit
def latent_decode_kernel(
    q_ptr,
    cache_ptr,
    page_table_ptr,
    lens_ptr,
    out_ptr,
    partial_ptr,
    state_ptr,
    scale_log2,
    num_seqs,
    num_heads,
    max_pages,
    RANK: gl.constexpr,
    ROPE: gl.constexpr,
    PAGE_SIZE: gl.constexpr,
    BLOCK_H: gl.constexpr,
    BLOCK_N: gl.constexpr,
    SEQS: gl.constexpr,
    MIN_BLOCKS: gl.constexpr,
    WARPS: gl.constexpr,
    STAGES: gl.constexpr,
):
    """Attend from `BLOCK_H` heads of one query per sequence to this program's blocks of keys.

    The result of a sequence that lies wholly within the program's blocks is written to the output.
    At most two further sequences lie partly within them, and their partial results are written to
    the program's two rows of `partial_ptr`: the first row is for a sequence that starts before the
    blocks, the second for one that ends after them.
    """
    WIDTH: gl.constexpr = RANK + ROPE
    kind: gl.constexpr = cache_ptr.dtype.element_ty
    # 8 threads copy 128 bytes of a row, so a thread has few rows and few page numbers.
    COPY: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [WARPS, 1], [1, 0])
    SCORES: gl.constexpr = gl.NVMMADistributedLayout(
        [3, 0], [4, WARPS // 4], [16, BLOCK_H // (WARPS // 4), 16]
    )
    VALUES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, BLOCK_H, 16])
    SWIZZLED: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    LINE: gl.constexpr = gl.BlockedLayout([max(1, SEQS // 32)], [32], [WARPS], [0])

    latents = gl.allocate_shared_memory(kind, [STAGES, BLOCK_N, RANK], SWIZZLED)
    keys = gl.allocate_shared_memory(kind, [STAGES, BLOCK_N, ROPE], SWIZZLED)
    q_latents = gl.allocate_shared_memory(kind, [BLOCK_H, RANK], SWIZZLED)
    q_keys = gl.allocate_shared_memory(kind, [BLOCK_H, ROPE], SWIZZLED)
    weights = gl.allocate_shared_memory(kind, [BLOCK_H, BLOCK_N], SWIZZLED)

    program = gl.program_id(0)
    each = gl.arange(0, SEQS, layout=LINE)
    lens = gl.load(lens_ptr + each, mask=each < num_seqs, other=0)
    blocks = (lens + BLOCK_N - 1) // BLOCK_N
    upto = gl.associative_scan(blocks, 0, _add)
    num_blocks = gl.sum(blocks, 0)
    used = _programs_used(num_blocks, gl.num_programs(0), MIN_BLOCKS)
    share = num_blocks // used
    longer = num_blocks % used
    begin = _first_block(program, share, longer)
    end = gl.where(program < used, _first_block(program + 1, share, longer), begin)

    q_head = gl.program_id(1) * BLOCK_H + gl.arange(0, BLOCK_H, layout=gl.SliceLayout(1, COPY))
    q_held = gl.expand_dims(q_head < num_heads, 1)
    latent = gl.expand_dims(gl.arange(0, RANK, layout=gl.SliceLayout(0, COPY)), 0)
    rope = gl.expand_dims(gl.arange(0, ROPE, layout=gl.SliceLayout(0, COPY)), 0)
    offset = gl.expand_dims(gl.arange(0, BLOCK_N, layout=gl.SliceLayout(1, SCORES)), 1)
    state_head = gl.program_id(1) * BLOCK_H + gl.arange(
        0, BLOCK_H, layout=gl.SliceLayout(0, SCORES)
    )
    head = gl.program_id(1) * BLOCK_H + gl.arange(0, BLOCK_H, layout=gl.SliceLayout(0, VALUES))
    held = gl.expand_dims(head < num_heads, 0)
    element = gl.expand_dims(gl.arange(0, RANK, layout=gl.SliceLayout(1, VALUES)), 1)
    held = held & (element < RANK)

    block = begin
    while block < end:
        seq = gl.sum((upto <= block).to(gl.int32), 0)
        before = gl.sum(gl.where(each < seq, blocks, 0), 0)
        of_seq = gl.sum(gl.where(each == seq, blocks, 0), 0)
        seq_len = gl.sum(gl.where(each == seq, lens, 0), 0)
        count = gl.minimum(before + of_seq, end) - block
        start = (block - before) * BLOCK_N
        stop = gl.minimum(start + count * BLOCK_N, seq_len)
        last = stop - 1
        pages = page_table_ptr + seq.to(gl.int64) * max_pages
        rows = _row_pointers(cache_ptr, pages, start, last, PAGE_SIZE, WIDTH, BLOCK_N, COPY)
        # Other warps may still read the blocks of the sequence before.
        _barrier()
        _copy_rows(rows, latents.index(0), keys.index(0), RANK, ROPE, COPY)
        # The page numbers of a block are read one block ahead of its copy.
        rows = _row_pointers(
            cache_ptr, pages, start + BLOCK_N, last, PAGE_SIZE, WIDTH, BLOCK_N, COPY
        )
        q_row = q_ptr + (seq.to(gl.int64) * num_heads + q_head) * WIDTH
        q_row = gl.expand_dims(q_row, 1)
        q_latents.store(gl.load(q_row + latent, mask=q_held, other=0.0))
        q_keys.store(gl.load(q_row + RANK + rope, mask=q_held, other=0.0))

        best = gl.full([BLOCK_H], -float("inf"), gl.float32, layout=gl.SliceLayout(0, SCORES))
        total = gl.zeros([BLOCK_N, BLOCK_H], gl.float32, layout=SCORES)
        acc = gl.zeros([RANK, BLOCK_H], gl.float32, layout=VALUES)
        for index in range(count):
            async_copy.wait_group(0)
            fence_async_shared()
            # All copies of this block have arrived, and no warp reads the block before.
            _barrier()
            # With one stage this is zero, which the compiler cannot know. It would otherwise keep
            # the addresses of all operands in registers, which are too few for them.
            stage = index % STAGES if STAGES > 1 else index >> 30
            here = latents.index(stage)
            scores = gl.zeros([BLOCK_N, BLOCK_H], gl.float32, layout=SCORES)
            scores = warpgroup_mma(here, q_latents.permute((1, 0)), scores, is_async=True)
            scores = warpgroup_mma(keys.index(stage), q_keys.permute((1, 0)), scores, is_async=True)
            next_start = start + (index + 2) * BLOCK_N
            if STAGES > 1:
                if index + 1 < count:
                    then = (index + 1) % STAGES
                    _copy_rows(rows, latents.index(then), keys.index(then), RANK, ROPE, COPY)
                rows = _row_pointers(
                    cache_ptr, pages, next_start, last, PAGE_SIZE, WIDTH, BLOCK_N, COPY
                )
            scores = warpgroup_mma_wait(0, deps=[scores])
            is_seen = start + index * BLOCK_N + offset < stop
            scores = gl.where(is_seen, scores * scale_log2, -float("inf"))
            top = gl.maximum(best, gl.max(scores, 0))
            shift = gl.where(top == -float("inf"), 0.0, top)
            powers = gl.exp2(scores - gl.expand_dims(shift, 0))
            factor = gl.exp2(best - shift)
            # The rows of `total` are added up at the end.
            total = total * gl.expand_dims(factor, 0) + powers
            best = top
            weights.permute((1, 0)).store(powers.to(kind))
            fence_async_shared()
            factor = gl.convert_layout(factor, gl.SliceLayout(0, VALUES))
            acc = acc * gl.expand_dims(factor, 0)
            _barrier()
            acc = warpgroup_mma(here.permute((1, 0)), weights.permute((1, 0)), acc)
            if STAGES == 1:
                if index + 1 < count:
                    # Other warps may still read this block.
                    _barrier()
                    _copy_rows(rows, here, keys.index(stage), RANK, ROPE, COPY)
                rows = _row_pointers(
                    cache_ptr, pages, next_start, last, PAGE_SIZE, WIDTH, BLOCK_N, COPY
                )

        normalizer = gl.sum(total, 0)
        # A part whose scores are all minus infinity is zero. A NaN must reach the result.
        is_empty = normalizer == 0.0
        divisor = gl.where(is_empty, 1.0, normalizer)
        acc = acc / gl.expand_dims(gl.convert_layout(divisor, gl.SliceLayout(0, VALUES)), 0)
        if count == of_seq:
            line = gl.expand_dims(seq.to(gl.int64) * num_heads + head, 0)
            gl.store(out_ptr + line * RANK + element, acc.to(kind), mask=held)
        else:
            first_line = (2 * program + (block != begin).to(gl.int32)).to(gl.int64) * num_heads
            line = gl.expand_dims(first_line + head, 0)
            gl.store(partial_ptr + line * RANK + element, acc, mask=held)
            state = gl.where(is_empty, -float("inf"), best + gl.log2(divisor))
            gl.store(state_ptr + first_line + state_head, state, mask=state_head < num_heads)
        block = block + count


@gluon.jit
def join_parts_kernel(
    partial_ptr,
    state_ptr,
    lens_ptr,
    out_ptr,
    num_seqs,
    num_heads,
    num_programs,
    RANK: gl.constexpr,
    BLOCK_N: gl.constexpr,
    SEQS: gl.constexpr,
    MIN_BLOCKS: gl.constexpr,
    PARTS: gl.constexpr,
    WARPS: gl.constexpr,
    PDL: gl.constexpr,
):
    """Combine the parts of one head of a sequence that several programs attended to."""
    if PDL:
        tl.extra.cuda.gdc_wait()
    BLOCK: gl.constexpr = gl.BlockedLayout([1, 4], [1, 32], [1, WARPS], [1, 0])
    LINE: gl.constexpr = gl.BlockedLayout([max(1, SEQS // 32)], [32], [WARPS], [0])
    seq = gl.program_id(0)
    head = gl.program_id(1)
    each = gl.arange(0, SEQS, layout=LINE)
    lens = gl.load(lens_ptr + each, mask=each < num_seqs, other=0)
    blocks = (lens + BLOCK_N - 1) // BLOCK_N
    num_blocks = gl.sum(blocks, 0)
    used = _programs_used(num_blocks, num_programs, MIN_BLOCKS)
    share = num_blocks // used
    longer = num_blocks % used
    first_block = gl.sum(gl.where(each < seq, blocks, 0), 0)
    of_seq = gl.sum(gl.where(each == seq, blocks, 0), 0)
    first = _program_of(first_block, share, longer)
    last = _program_of(first_block + of_seq - 1, share, longer)
    is_later = (_first_block(first, share, longer) != first_block).to(gl.int32)
    if (of_seq > 0) & (first < last):
        element = gl.arange(0, RANK, layout=gl.SliceLayout(0, BLOCK))
        best = gl.to_tensor(-float("inf"))
        total = gl.to_tensor(0.0)
        acc = gl.zeros([RANK], gl.float32, layout=gl.SliceLayout(0, BLOCK))
        for start in range(first, last + 1, PARTS):
            program = start + gl.arange(0, PARTS, layout=gl.SliceLayout(1, BLOCK))
            is_part = program <= last
            place = 2 * program + gl.where(program == first, is_later, 0)
            line = place.to(gl.int64) * num_heads + head
            state = gl.load(state_ptr + line, mask=is_part, other=-float("inf"))
            top = gl.maximum(best, gl.max(state, 0))
            shift = gl.where(top == -float("inf"), 0.0, top)
            powers = gl.exp2(state - shift)
            factor = gl.exp2(best - shift)
            source = partial_ptr + gl.expand_dims(line * RANK, 1) + gl.expand_dims(element, 0)
            parts = gl.load(source, mask=gl.expand_dims(is_part, 1), other=0.0)
            acc = acc * factor + gl.sum(parts * gl.expand_dims(powers, 1), 0)
            total = total * factor + gl.sum(powers, 0)
            best = top
        acc = acc / gl.where(total == 0.0, 1.0, total)
        to = out_ptr + (seq.to(gl.int64) * num_heads + head) * RANK + element
        gl.store(to, acc.to(out_ptr.dtype.element_ty))
