"""The kernels of `kernels.experts.triton`: choose, sort by expert, multiply twice, sum.

In a matrix instruction, one side is always 64 rows high and gets rows of the weight. The other side
may be as small as 16 and gets tokens, because an expert often has few. Each element is one chain of
additions over the columns of the weight, in order.

Source: the lists of blocks, padded per expert, are those of `fused_moe` in vLLM and SGLang. Here
one program per expert writes them without atomic additions, so the order is always the same.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# ruff: noqa: PLR0913 a kernel's parameters

import triton
import triton.language as tl

from kernels.activation.triton import gated


@triton.jit
def choose_kernel(
    logits_ptr,
    ids_ptr,
    weights_ptr,
    num_experts,
    NUM_CHOSEN: tl.constexpr,
    SUMS_TO_ONE: tl.constexpr,
    PLACES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Choose the experts of one token by the softmax of its logits, in float32."""
    token = tl.program_id(0).to(tl.int64)
    expert = tl.arange(0, BLOCK)
    is_one = expert < num_experts
    logits = tl.load(logits_ptr + token * num_experts + expert, mask=is_one, other=-float("inf"))
    logits = logits.to(tl.float32)
    powers = tl.exp(logits - tl.max(logits, 0))
    shares = powers / tl.sum(powers, 0)
    # If a logit is NaN, all shares are NaN, and the first experts are chosen.
    left = tl.where(is_one, tl.where(shares == shares, shares, 2.0), -1.0)
    place = tl.arange(0, PLACES)
    found = tl.zeros([PLACES], tl.float32)
    chosen = tl.zeros([PLACES], tl.int64)
    for k in tl.static_range(NUM_CHOSEN):
        # Among equal values, the first is taken.
        which = tl.min(tl.where(left == tl.max(left, 0), expert, BLOCK), 0)
        share = tl.sum(tl.where(expert == which, shares, 0.0), 0)
        found = tl.where(place == k, share, found)
        chosen = tl.where(place == k, which.to(tl.int64), chosen)
        left = tl.where(expert == which, -2.0, left)
    if SUMS_TO_ONE:
        found = found / tl.sum(found, 0)
    inside = place < NUM_CHOSEN
    tl.store(ids_ptr + token * NUM_CHOSEN + place, chosen, mask=inside)
    tl.store(weights_ptr + token * NUM_CHOSEN + place, found, mask=inside)


@triton.jit(do_not_specialize=["num_rows", "num_blocks"])
def sort_kernel(
    ids_ptr,
    order_ptr,
    block_expert_ptr,
    num_rows,
    num_blocks,
    num_experts,
    BLOCK_M: tl.constexpr,
    CHUNK: tl.constexpr,
    BINS: tl.constexpr,
):
    """Write the rows of one expert after those of the experts before it, padded with `num_rows`.

    The padding fills whole blocks. The last expert's program also marks the unused blocks.
    """
    expert = tl.program_id(0)
    within = tl.arange(0, CHUNK)
    bins = tl.arange(0, BINS)
    counts = tl.zeros([BINS], tl.int32)
    for start in range(0, num_rows, CHUNK):
        row = start + within
        ids = tl.load(ids_ptr + row, mask=row < num_rows, other=num_experts).to(tl.int32)
        counts += tl.histogram(ids, BINS)
    blocks = tl.where(bins < num_experts, (counts + BLOCK_M - 1) // BLOCK_M, 0)
    first = tl.sum(tl.where(bins < expert, blocks, 0), 0)
    own = tl.sum(tl.where(bins == expert, blocks, 0), 0)
    seen = tl.sum(tl.where(bins == expert, counts, 0), 0)
    for start in range(seen, own * BLOCK_M, CHUNK):
        place = start + within
        inside = place < own * BLOCK_M
        tl.store(order_ptr + first * BLOCK_M + place, num_rows, mask=inside)
    for start in range(0, own, CHUNK):
        place = start + within
        tl.store(block_expert_ptr + first + place, expert, mask=place < own)
    if expert == num_experts - 1:
        for start in range(first + own, num_blocks, CHUNK):
            place = start + within
            tl.store(block_expert_ptr + place, -1, mask=place < num_blocks)
    listed = 0
    for start in range(0, num_rows, CHUNK):
        row = start + within
        ids = tl.load(ids_ptr + row, mask=row < num_rows, other=num_experts).to(tl.int32)
        is_own = ids == expert
        place = listed + tl.cumsum(is_own.to(tl.int32), 0) - 1
        tl.store(order_ptr + first * BLOCK_M + place, row, mask=is_own)
        listed += tl.sum(is_own.to(tl.int32), 0)


@triton.jit(do_not_specialize=["num_rows", "first_expert", "num_experts"])
def product_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    out_ptr,
    order_ptr,
    block_expert_ptr,
    num_rows,
    width,
    in_features,
    first_expert,
    num_experts,
    ROWS_OF_X: tl.constexpr,
    ACTIVATION: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    EVEN_K: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Multiply `BLOCK_M` tokens of one expert by `BLOCK_N` rows of its weight.

    `order_ptr`, `block_expert_ptr`, `num_rows` and `width` belong to `SortedProduct`. `ROWS_OF_X`
    rows of the result come from one row of `x`. With an activation the weight has two halves, gate
    and up, and one block of each is multiplied. The result's rows are in the order of the chosen
    experts, so they need not be reordered. `weight_ptr` has the weights of `num_experts` experts
    from `first_expert` on; rows of other experts are not written.
    """
    program = tl.program_id(0)
    features = tl.cdiv(width, BLOCK_N)
    block = program // features
    # The result is also negative in an unused block.
    expert = tl.load(block_expert_ptr + block) - first_expert
    if (expert >= 0) & (expert < num_experts):
        row = tl.load(order_ptr + block * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
        feature = (program % features) * BLOCK_N + tl.arange(0, BLOCK_N)
        # Indices past an end repeat the last row, so that loads need no mask.
        x_row = tl.minimum(row, num_rows - 1) // ROWS_OF_X
        weight_row = tl.minimum(feature, width - 1).to(tl.int64)
        halves: tl.constexpr = 1 if ACTIVATION is None else 2
        base = weight_ptr + expert.to(tl.int64) * halves * width * in_features
        weight_ptrs = base + weight_row[:, None] * in_features
        up_ptrs = weight_ptrs + width.to(tl.int64) * in_features
        x_ptrs = x_ptr + x_row[:, None] * in_features
        acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
        acc_up = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
        for start in tl.range(0, in_features, BLOCK_K, num_stages=STAGES):
            k = start + tl.arange(0, BLOCK_K)
            inside = (k < in_features)[None, :]
            if EVEN_K:
                x = tl.load(x_ptrs + k[None, :])
                weight = tl.load(weight_ptrs + k[None, :])
            else:
                x = tl.load(x_ptrs + k[None, :], mask=inside, other=0.0)
                weight = tl.load(weight_ptrs + k[None, :], mask=inside, other=0.0)
            acc = tl.dot(weight, tl.trans(x), acc=acc, input_precision=PRECISION)
            if ACTIVATION is not None:
                if EVEN_K:
                    up = tl.load(up_ptrs + k[None, :])
                else:
                    up = tl.load(up_ptrs + k[None, :], mask=inside, other=0.0)
                acc_up = tl.dot(up, tl.trans(x), acc=acc_up, input_precision=PRECISION)
        kind = out_ptr.dtype.element_ty
        if HAS_BIAS:
            bias_ptrs = bias_ptr + expert.to(tl.int64) * halves * width + weight_row
            acc += tl.load(bias_ptrs).to(tl.float32)[:, None]
            if ACTIVATION is not None:
                acc_up += tl.load(bias_ptrs + width).to(tl.float32)[:, None]
        if ACTIVATION is not None:
            # The products are rounded, as two separate kernels would round them.
            gate, up = acc.to(kind).to(tl.float32), acc_up.to(kind).to(tl.float32)
            acc = gated(gate, up, ACTIVATION)
        tl.store(
            out_ptr + row[None, :] * width + feature[:, None],
            acc.to(kind),
            mask=(feature < width)[:, None] & (row < num_rows)[None, :],
        )


@triton.jit
def sum_kernel(
    made_ptr,
    ids_ptr,
    weights_ptr,
    out_ptr,
    width,
    num_experts,
    NUM_CHOSEN: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Sum the outputs of this rank's experts for one token, in the order of the choice."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    total = tl.zeros([BLOCK], tl.float32)
    for k in tl.static_range(NUM_CHOSEN):
        row = token * NUM_CHOSEN + k
        # The rows of experts on other ranks were never written.
        is_here = tl.load(ids_ptr + row) < num_experts
        made = tl.load(made_ptr + row * width + column, mask=inside & is_here, other=0.0)
        total += made.to(tl.float32) * tl.load(weights_ptr + row)
    tl.store(out_ptr + token * width + column, total.to(out_ptr.dtype.element_ty), mask=inside)
