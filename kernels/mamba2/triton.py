"""Mamba 2's recurrence in Triton: a program keeps some columns of a head's matrix in registers."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# ruff: noqa: PLR0913 a kernel's parameters

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.mamba2 import Mamba2Shape
from kernels.state_places import StatePlaces
from kernels.triton_support.decays import softplus
from kernels.triton_support.launch import launch_options, start_next, wait_for_inputs

# Columns of a program. They are few, so that many programs read memory at a time.
_COLUMNS = 32


@triton.jit
def mamba2_kernel(
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
    PDL: tl.constexpr,
):
    """Compute the tokens of a sequence for some columns of one head's matrix."""
    INPUTS: tl.constexpr = HEADS * HEAD_DIM
    WIDTH: tl.constexpr = INPUTS + 2 * GROUPS * STATE_DIM
    item = tl.program_id(0)
    seq = item // HEADS
    head = item % HEADS
    group = head // (HEADS // GROUPS)
    rows = tl.arange(0, ROWS)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    has_row, has_column = rows < STATE_DIM, columns < HEAD_DIM
    inside = has_row[:, None] & has_column[None, :]
    cells = rows[:, None] * HEAD_DIM + columns[None, :]
    start_next(PDL)
    wait_for_inputs(PDL)
    decay = -tl.exp(tl.load(heads_ptr + head))
    bias = tl.load(heads_ptr + HEADS + head)
    skip = tl.load(heads_ptr + 2 * HEADS + head)
    token = tl.load(bounds_ptr + seq).to(tl.int64)
    read = tl.load(reads_ptr + seq)
    matrix = tl.load(
        state_ptr + (read * HEADS + head) * (STATE_DIM * HEAD_DIM) + cells, mask=inside, other=0.0
    )
    for save in range(tl.load(save_bounds_ptr + seq), tl.load(save_bounds_ptr + seq + 1)):
        end = tl.load(save_ends_ptr + save)
        while token < end:
            row = xbc_ptr + token * WIDTH
            x = tl.load(row + head * HEAD_DIM + columns, mask=has_column, other=0.0)
            of_group = row + INPUTS + group * STATE_DIM + rows
            b = tl.load(of_group, mask=has_row, other=0.0).to(tl.float32)
            c = tl.load(of_group + GROUPS * STATE_DIM, mask=has_row, other=0.0).to(tl.float32)
            x = x.to(tl.float32)
            time = softplus(tl.load(dt_ptr + token * dt_stride + head).to(tl.float32) + bias)
            matrix = matrix * tl.exp(decay * time) + b[:, None] * (x * time)[None, :]
            result = tl.sum(matrix * c[:, None], axis=0) + skip * x
            tl.store(
                out_ptr + token * INPUTS + head * HEAD_DIM + columns,
                result.to(out_ptr.dtype.element_ty),
                mask=has_column,
            )
            token += 1
        slot = tl.load(save_slots_ptr + save)
        tl.store(
            state_ptr + (slot * HEADS + head) * (STATE_DIM * HEAD_DIM) + cells, matrix, mask=inside
        )


def mamba2(
    xbc: Tensor, dt: Tensor, heads: Tensor, state: Tensor, places: StatePlaces, shape: Mamba2Shape
) -> Tensor:
    """Update each head's state in one launch; see `kernels.mamba2.mamba2`."""
    num_heads, head_dim = shape.num_heads, shape.head_dim
    out = torch.empty(len(xbc), num_heads * head_dim, dtype=xbc.dtype, device=xbc.device)
    if not len(xbc):
        return out
    columns = min(_COLUMNS, triton.next_power_of_2(head_dim))
    mamba2_kernel[(len(places.reads) * num_heads, triton.cdiv(head_dim, columns))](
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
        COLUMNS=columns,
        **launch_options(xbc.device),
    )
    return out
