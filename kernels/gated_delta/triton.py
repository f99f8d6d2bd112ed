"""The gated delta rule in Triton: a program keeps some columns of a head's matrix in registers."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# ruff: noqa: PLR0913 a kernel's parameters

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.gated_delta import DeltaShape
from kernels.state_places import StatePlaces
from kernels.triton_support.decays import softplus
from kernels.triton_support.launch import launch_options, start_next, wait_for_inputs

# Columns of a program. They are few, so that many programs read memory at a time.
_COLUMNS = 32


@triton.jit
def _unit(part, scale):
    return part * (scale * tl.rsqrt(tl.sum(part * part, axis=0) + 1e-6))


@triton.jit
def delta_kernel(
    qkv_ptr,
    gates_ptr,
    decay_ptr,
    dt_bias_ptr,
    state_ptr,
    bounds_ptr,
    reads_ptr,
    save_bounds_ptr,
    save_ends_ptr,
    save_slots_ptr,
    out_ptr,
    gate_stride,
    scale,
    KEY_HEADS: tl.constexpr,
    RATIO: tl.constexpr,
    GATE_SPAN: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Compute the tokens of a sequence for some columns of one head's matrix."""
    HEADS: tl.constexpr = KEY_HEADS * RATIO
    KEYS: tl.constexpr = KEY_HEADS * KEY_DIM
    WIDTH: tl.constexpr = 2 * KEYS + HEADS * VALUE_DIM
    item = tl.program_id(0)
    seq = item // HEADS
    head = item % HEADS
    group = head // RATIO
    rows = tl.arange(0, ROWS)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    has_row, has_column = rows < KEY_DIM, columns < VALUE_DIM
    inside = has_row[:, None] & has_column[None, :]
    cells = rows[:, None] * VALUE_DIM + columns[None, :]
    start_next(PDL)
    wait_for_inputs(PDL)
    decay = tl.load(decay_ptr + head)
    dt_bias = tl.load(dt_bias_ptr + head)
    token = tl.load(bounds_ptr + seq).to(tl.int64)
    read = tl.load(reads_ptr + seq)
    matrix = tl.load(
        state_ptr + (read * HEADS + head) * (KEY_DIM * VALUE_DIM) + cells, mask=inside, other=0.0
    )
    for save in range(tl.load(save_bounds_ptr + seq), tl.load(save_bounds_ptr + seq + 1)):
        end = tl.load(save_ends_ptr + save)
        while token < end:
            row = qkv_ptr + token * WIDTH
            query = tl.load(row + group * KEY_DIM + rows, mask=has_row, other=0.0)
            key = tl.load(row + KEYS + group * KEY_DIM + rows, mask=has_row, other=0.0)
            value = tl.load(row + 2 * KEYS + head * VALUE_DIM + columns, mask=has_column, other=0.0)
            gate = gates_ptr + token * gate_stride
            gate += head // GATE_SPAN * (2 * GATE_SPAN) + head % GATE_SPAN
            strength = tl.sigmoid(tl.load(gate).to(tl.float32))
            time = tl.load(gate + GATE_SPAN).to(tl.float32) + dt_bias
            query = _unit(query.to(tl.float32), scale)
            key = _unit(key.to(tl.float32), 1.0)
            matrix *= tl.exp(decay * softplus(time))
            seen = tl.sum(matrix * key[:, None], axis=0)
            change = (value.to(tl.float32) - seen) * strength
            matrix += key[:, None] * change[None, :]
            result = tl.sum(matrix * query[:, None], axis=0)
            tl.store(
                out_ptr + (token * HEADS + head) * VALUE_DIM + columns,
                result.to(out_ptr.dtype.element_ty),
                mask=has_column,
            )
            token += 1
        slot = tl.load(save_slots_ptr + save)
        tl.store(
            state_ptr + (slot * HEADS + head) * (KEY_DIM * VALUE_DIM) + cells, matrix, mask=inside
        )


def gated_delta(
    qkv: Tensor,
    gates: Tensor,
    decay: Tensor,
    dt_bias: Tensor,
    state: Tensor,
    places: StatePlaces,
    shape: DeltaShape,
) -> Tensor:
    """Update each head's state in one launch; see `kernels.gated_delta.gated_delta`."""
    num_heads, value_dim = shape.num_value_heads, shape.value_dim
    out = torch.empty(len(qkv), num_heads * value_dim, dtype=qkv.dtype, device=qkv.device)
    if not len(qkv):
        return out
    columns = min(_COLUMNS, triton.next_power_of_2(value_dim))
    delta_kernel[(len(places.reads) * num_heads, triton.cdiv(value_dim, columns))](
        qkv,
        gates,
        decay,
        dt_bias,
        state,
        places.qo_indptr,
        places.reads,
        places.save_indptr,
        places.save_ends,
        places.save_slots,
        out,
        gates.stride(0),
        shape.key_dim**-0.5,
        KEY_HEADS=shape.num_key_heads,
        RATIO=shape.ratio,
        GATE_SPAN=shape.gate_span,
        KEY_DIM=shape.key_dim,
        VALUE_DIM=value_dim,
        ROWS=triton.next_power_of_2(shape.key_dim),
        COLUMNS=columns,
        **launch_options(qkv.device),
    )
    return out
