"""Mamba 2's recurrence in Triton for prompts: tensor cores compute 64 tokens of a head at a time.

Within a chunk of tokens, let `G_i` be the sum of the logarithms of the decays up to token `i`, and
`S` the matrix before the chunk. Then

    out_i = exp(G_i) S^T C_i + sum over j <= i of exp(G_i - G_j) (C_i . B_j) t_j x_j + skip x_i
    S after the chunk = exp(G_last) S + sum over j of exp(G_last - G_j) B_j (t_j x_j)^T

so a chunk takes four matrix products. A program goes through the chunks of a sequence for some
columns of one head's matrix, which stays in registers.

Source: Dao and Gu, "Transformers are SSMs", 2024, section 6.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# ruff: noqa: PLR0913 a kernel's parameters

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.mamba2 import Mamba2Shape
from kernels.mamba2 import triton as by_token
from kernels.state_places import StatePlaces
from kernels.triton_support.decays import softplus, sums_between
from kernels.triton_support.launch import launch_options, start_next, wait_for_inputs

# Number of tokens of a chunk.
CHUNK = 64
# Columns of a head's matrix that a program computes.
_COLUMNS = 32
# Smaller heads are computed token by token, as those of the gated delta rule.
_SMALLEST_HEAD = 32
# A chunk takes as long as a few single tokens. If the sequences of a step are shorter than this on
# average, they are computed token by token.
_SHORTEST = 8


@triton.jit
def chunks_kernel(
    xbc_ptr,
    dt_ptr,
    heads_ptr,
    state_ptr,
    bounds_ptr,
    reads_ptr,
    save_bounds_ptr,
    save_ends_ptr,
    save_slots_ptr,
    out_ptr,
    dt_stride,
    GROUPS: tl.constexpr,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    STATE_DIM: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    CHUNK: tl.constexpr,
    STAGES: tl.constexpr,
    IS_ROUNDED: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):
    """Compute the chunks of a sequence for some columns of one head's matrix.

    With `IS_ROUNDED` the operands of products are rounded to bfloat16.
    """
    INPUTS: tl.constexpr = HEADS * HEAD_DIM
    WIDTH: tl.constexpr = INPUTS + 2 * GROUPS * STATE_DIM
    form = tl.bfloat16 if IS_ROUNDED else tl.float32
    item = tl.program_id(0)
    seq = item // HEADS
    head = item % HEADS
    group = head // (HEADS // GROUPS)
    rows = tl.arange(0, CHUNK)
    dims = tl.arange(0, ROWS)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    has_dim, has_column = dims < STATE_DIM, columns < HEAD_DIM
    cells = dims[:, None] * HEAD_DIM + columns[None, :]
    inside = has_dim[:, None] & has_column[None, :]
    start_next(PDL)
    wait_for_inputs(PDL)
    decay = -tl.exp(tl.load(heads_ptr + head))
    bias = tl.load(heads_ptr + HEADS + head)
    skip = tl.load(heads_ptr + 2 * HEADS + head)
    begin = tl.load(bounds_ptr + seq).to(tl.int64)
    read = tl.load(reads_ptr + seq)
    matrix = tl.load(
        state_ptr + (read * HEADS + head) * (STATE_DIM * HEAD_DIM) + cells, mask=inside, other=0.0
    )
    is_seen = rows[:, None] >= rows[None, :]
    for save in range(tl.load(save_bounds_ptr + seq), tl.load(save_bounds_ptr + seq + 1)):
        end = tl.load(save_ends_ptr + save).to(tl.int64)
        for chunk in tl.range(0, (end - begin + CHUNK - 1) // CHUNK, num_stages=STAGES):
            tokens = begin + chunk * CHUNK + rows
            has_token = tokens < end
            row = xbc_ptr + tokens[:, None] * WIDTH
            of_inputs = has_token[:, None] & has_column[None, :]
            x = tl.load(row + head * HEAD_DIM + columns[None, :], mask=of_inputs, other=0.0)
            of_groups = has_token[:, None] & has_dim[None, :]
            at = row + INPUTS + group * STATE_DIM + dims[None, :]
            b = tl.load(at, mask=of_groups, other=0.0)
            c = tl.load(at + GROUPS * STATE_DIM, mask=of_groups, other=0.0).to(form)
            time = tl.load(dt_ptr + tokens * dt_stride + head, mask=has_token, other=0.0)
            # An absent token neither decays nor adds anything.
            time = tl.where(has_token, softplus(time.to(tl.float32) + bias), 0.0)
            change = decay * time
            kept = tl.exp(sums_between(change, CHUNK))
            alike = tl.dot(c, tl.trans(b.to(form)), input_precision=PRECISION)
            alike = tl.where(is_seen, alike * kept * time[None, :], 0.0).to(form)
            result = tl.dot(c, matrix.to(form), input_precision=PRECISION)
            result *= tl.exp(tl.cumsum(change, axis=0))[:, None]
            result = tl.dot(alike, x.to(form), acc=result, input_precision=PRECISION)
            result += skip * x.to(tl.float32)
            tl.store(
                out_ptr + tokens[:, None] * INPUTS + head * HEAD_DIM + columns[None, :],
                result.to(out_ptr.dtype.element_ty),
                mask=of_inputs,
            )
            to_end = tl.sum(tl.where(rows[:, None] == CHUNK - 1, kept, 0.0), axis=0)
            added = (b.to(tl.float32) * (to_end * time)[:, None]).to(form)
            matrix *= tl.exp(tl.sum(change, axis=0))
            matrix = tl.dot(tl.trans(added), x.to(form), acc=matrix, input_precision=PRECISION)
        begin = end
        slot = tl.load(save_slots_ptr + save)
        tl.store(
            state_ptr + (slot * HEADS + head) * (STATE_DIM * HEAD_DIM) + cells, matrix, mask=inside
        )


def mamba2(
    xbc: Tensor, dt: Tensor, heads: Tensor, state: Tensor, places: StatePlaces, shape: Mamba2Shape
) -> Tensor:
    """Update and read each head's matrix; see `kernels.mamba2.mamba2`.

    The last bits of the result depend on where chunks begin. For inputs in bfloat16, the operands
    of a chunk's products are rounded to bfloat16, but the state is not.
    """
    num_tokens, num_saves = len(xbc), len(places.save_slots)
    is_small = min(shape.head_dim, shape.state_dim) < _SMALLEST_HEAD
    if is_small or num_tokens < _SHORTEST * num_saves:
        return by_token.mamba2(xbc, dt, heads, state, places, shape)
    num_heads, head_dim = shape.num_heads, shape.head_dim
    is_rounded = xbc.dtype is torch.bfloat16
    out = torch.empty(num_tokens, num_heads * head_dim, dtype=xbc.dtype, device=xbc.device)
    chunks_kernel[(len(places.reads) * num_heads, triton.cdiv(head_dim, _COLUMNS))](
        xbc,
        dt,
        heads,
        state,
        places.qo_indptr,
        places.reads,
        places.save_indptr,
        places.save_ends,
        places.save_slots,
        out,
        dt.stride(0),
        GROUPS=shape.num_groups,
        HEADS=num_heads,
        HEAD_DIM=head_dim,
        STATE_DIM=shape.state_dim,
        ROWS=triton.next_power_of_2(shape.state_dim),
        COLUMNS=_COLUMNS,
        CHUNK=CHUNK,
        # The gated delta rule made illegal memory accesses with other numbers of stages.
        STAGES=2 if is_rounded else 1,
        IS_ROUNDED=is_rounded,
        # The precision of products of float32 operands. A fraction of 10 bits suffices for 16-bit
        # inputs.
        PRECISION="tf32x3" if xbc.dtype is torch.float32 else "tf32",
        num_warps=4,
        **launch_options(xbc.device),
    )
    return out
