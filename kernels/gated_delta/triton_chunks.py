"""The gated delta rule in Triton for prompts: tensor cores compute 64 tokens of a head at a time.

Within a chunk of tokens, let `G_i` be the sum of the logarithms of the decays up to token `i`. The
change `u_i` that token `i` makes to the matrix `S` depends on the changes before it:

    u_i = b_i (v_i - exp(G_i) S^T k_i - sum over j < i of exp(G_i - G_j) (k_i . k_j) u_j)

The changes of a chunk therefore solve a triangular system of equations, whose matrix `M` depends on
keys and gates alone. They are `inverse(M) (b v) - inverse(M) (b exp(G) k) S`. `prepare_kernel`
computes both products and everything else that does not depend on `S`, for all chunks at once.
`chunks_kernel` then processes the chunks of a sequence in order, with four matrix products for
each.

Sources: Yang, Wang, Zhang, Shen and Kim, "Parallelizing Linear Transformers with the Delta Rule
over Sequence Length", 2024; for the decay, Yang, Kautz and Hatamizadeh, "Gated Delta Networks",
2024.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# ruff: noqa: PLR0913 a kernel's parameters

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.gated_delta import DeltaShape
from kernels.gated_delta import triton as by_token
from kernels.state_places import StatePlaces
from kernels.triton_support.decays import softplus
from kernels.triton_support.launch import launch_options, start_next, wait_for_inputs


class Prepared(NamedTuple):
    """The results of `prepare_kernel` for each token and value head.

    All tensors except `fades` are bfloat16 for inputs in bfloat16, and float32 otherwise.

    Attributes:
        targets: `[num_tokens, num_heads, value_dim]`, the changes if the matrix were zero.
        readers: `[num_tokens, num_heads, key_dim]`. Their product with the matrix before the chunk
            is subtracted from `targets`.
        queries: `[num_tokens, num_heads, key_dim]`, queries times the decay since the start of the
            chunk.
        keys: `[num_tokens, num_heads, key_dim]`, keys times the decay until the end of the chunk.
        alike: `[num_tokens, num_heads, CHUNK]`, products of a query with the chunk's keys up to its
            own, each times the decay between the two tokens.
        fades: `[num_tokens, num_heads]` float32, the decay of the whole chunk, at the chunk's first
            token.
    """

    targets: Tensor
    readers: Tensor
    queries: Tensor
    keys: Tensor
    alike: Tensor
    fades: Tensor


# Number of tokens of a chunk. `_inverse` doubles the size of blocks until it reaches this number.
CHUNK = 64
# Columns of a head's matrix that a program of `chunks_kernel` computes.
_COLUMNS = 32
# Smaller heads are computed token by token. On an H200 with Triton 3.6, the kernels for keys of 16
# elements in bfloat16 made illegal memory accesses. Heads of 40 to 128 elements were correct.
_SMALLEST_HEAD = 32
# A chunk takes as long as a few single tokens. If the sequences of a step are shorter than this on
# average, they are computed token by token.
_SHORTEST = 8


@triton.jit
def _unit_rows(part, scale):
    part = part.to(tl.float32)
    return part * (scale * tl.rsqrt(tl.sum(part * part, axis=1) + 1e-6))[:, None]


@triton.jit
def _gates(gates_ptr, tokens, gate_stride, has_token, decay, dt_bias, GATE_SPAN: tl.constexpr):
    """Return `b_i` (the rate) of each token, and the logarithm of the token's decay.

    Both are 0 for a token that does not exist, because the sequence ends before it.

    Args:
        gates_ptr: gates of the head: the input of the rate's sigmoid, and `GATE_SPAN` elements
            later the input of the decay's softplus.
        tokens: indices of the tokens.
        gate_stride: elements from one token's gates to the next one's.
        has_token: whether each of `tokens` exists.
        decay: factor of the softplus, which is negative.
        dt_bias: number that is added to the input of the softplus.
        GATE_SPAN: elements between the two gates of a token.
    """
    gate = gates_ptr + tokens * gate_stride
    strength = tl.sigmoid(tl.load(gate, mask=has_token, other=0.0).to(tl.float32))
    time = tl.load(gate + GATE_SPAN, mask=has_token, other=0.0).to(tl.float32) + dt_bias
    return tl.where(has_token, strength, 0.0), tl.where(has_token, decay * softplus(time), 0.0)


@triton.jit
def _between(change, CHUNK: tl.constexpr):
    """Sum `change` over the tokens after `j` up to `i`: `[CHUNK, CHUNK]`, 0 where `j >= i`.

    The difference of two sums from the start of the chunk would lose precision after a strong
    decay.
    """
    rows = tl.arange(0, CHUNK)
    after = tl.where(rows[:, None] > rows[None, :], change[:, None], 0.0)
    return tl.cumsum(after, axis=0)


@triton.jit
def _inverse(below, CHUNK: tl.constexpr, PRECISION: tl.constexpr):
    """Invert the identity plus `below`, which is zero on the diagonal and above it.

    The inverses of two neighboring blocks on the diagonal, and the block below them, give the
    inverse of a block of twice the size. Powers of `below` are not used, because they grow without
    bound if keys are similar.
    """
    rows = tl.arange(0, CHUNK)[:, None]
    columns = tl.arange(0, CHUNK)[None, :]
    inverse = tl.where(rows == columns, 1.0, 0.0)
    for level in tl.static_range(6):
        block_row, block_column = rows >> level, columns >> level
        is_between = (block_row == block_column + 1) & (block_column % 2 == 0)
        between = tl.where(is_between, below, 0.0)
        if level == 0:
            inverse -= between
        else:
            product = tl.dot(inverse, between, input_precision=PRECISION)
            inverse -= tl.dot(product, inverse, input_precision=PRECISION)
    return inverse


@triton.jit
def prepare_kernel(
    qkv_ptr,
    gates_ptr,
    decay_ptr,
    dt_bias_ptr,
    ends_ptr,
    targets_ptr,
    readers_ptr,
    queries_ptr,
    keys_ptr,
    alike_ptr,
    fades_ptr,
    num_saves,
    gate_stride,
    scale,
    KEY_HEADS: tl.constexpr,
    RATIO: tl.constexpr,
    GATE_SPAN: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    ROWS: tl.constexpr,
    ALL_COLUMNS: tl.constexpr,
    SAVES: tl.constexpr,
    CHUNK: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):
    """Compute the fields of `Prepared` for one chunk of one head."""
    HEADS: tl.constexpr = KEY_HEADS * RATIO
    KEYS: tl.constexpr = KEY_HEADS * KEY_DIM
    WIDTH: tl.constexpr = 2 * KEYS + HEADS * VALUE_DIM
    item = tl.program_id(0)
    head = tl.program_id(1)
    group = head // RATIO
    start_next(PDL)
    wait_for_inputs(PDL)
    # The tokens between two saves are divided into chunks. `item` counts the chunks of all saves.
    saves = tl.arange(0, SAVES)
    ends = tl.load(ends_ptr + saves, mask=saves < num_saves, other=0)
    starts = tl.load(ends_ptr + saves - 1, mask=(saves < num_saves) & (saves > 0), other=0)
    chunks = (ends - starts + (CHUNK - 1)) // CHUNK
    is_earlier = tl.cumsum(chunks, axis=0) <= item
    own = tl.sum(is_earlier.to(tl.int32), axis=0)
    place = item - tl.sum(tl.where(is_earlier, chunks, 0), axis=0)
    first = tl.sum(tl.where(saves == own, starts, 0), axis=0) + place * CHUNK
    end = tl.sum(tl.where(saves == own, ends, 0), axis=0)
    if (own < num_saves) & (first < end):
        rows = tl.arange(0, CHUNK)
        tokens = (first + rows).to(tl.int64)
        has_token = tokens < end
        dims, columns = tl.arange(0, ROWS), tl.arange(0, ALL_COLUMNS)
        of_keys = has_token[:, None] & (dims < KEY_DIM)[None, :]
        of_values = has_token[:, None] & (columns < VALUE_DIM)[None, :]
        row = qkv_ptr + tokens[:, None] * WIDTH
        at = row + group * KEY_DIM + dims[None, :]
        key = _unit_rows(tl.load(at + KEYS, mask=of_keys, other=0.0), 1.0)
        query = _unit_rows(tl.load(at, mask=of_keys, other=0.0), scale)
        at = row + 2 * KEYS + head * VALUE_DIM + columns[None, :]
        value = tl.load(at, mask=of_values, other=0.0).to(tl.float32)
        strength, change = _gates(
            gates_ptr + head // GATE_SPAN * (2 * GATE_SPAN) + head % GATE_SPAN,
            tokens,
            gate_stride,
            has_token,
            tl.load(decay_ptr + head),
            tl.load(dt_bias_ptr + head),
            GATE_SPAN,
        )
        kept = tl.exp(_between(change, CHUNK))
        form = targets_ptr.dtype.element_ty
        rounded = key.to(form)
        is_seen = rows[:, None] >= rows[None, :]
        alike = tl.dot(query.to(form), tl.trans(rounded), input_precision=PRECISION)
        alike = tl.where(is_seen, alike * kept, 0.0)
        is_below = rows[:, None] > rows[None, :]
        below = tl.dot(rounded, tl.trans(rounded), input_precision=PRECISION)
        below = tl.where(is_below, below * kept * strength[:, None], 0.0)
        inverse = _inverse(below, CHUNK, PRECISION).to(form)
        faded = tl.exp(tl.cumsum(change, axis=0))
        right = (value * strength[:, None]).to(form)
        targets = tl.dot(inverse, right, input_precision=PRECISION)
        right = (key * (strength * faded)[:, None]).to(form)
        readers = tl.dot(inverse, right, input_precision=PRECISION)
        to_end = tl.sum(tl.where(rows[:, None] == CHUNK - 1, kept, 0.0), axis=0)
        places = (tokens * HEADS + head)[:, None]
        at = places * VALUE_DIM + columns[None, :]
        tl.store(targets_ptr + at, targets.to(form), mask=of_values)
        at = places * KEY_DIM + dims[None, :]
        tl.store(readers_ptr + at, readers.to(form), mask=of_keys)
        tl.store(queries_ptr + at, (query * faded[:, None]).to(form), mask=of_keys)
        tl.store(keys_ptr + at, (key * to_end[:, None]).to(form), mask=of_keys)
        at = places * CHUNK + rows[None, :]
        tl.store(alike_ptr + at, alike.to(form), mask=has_token[:, None])
        tl.store(fades_ptr + first * HEADS + head, tl.exp(tl.sum(change, axis=0)))


@triton.jit
def chunks_kernel(
    targets_ptr,
    readers_ptr,
    queries_ptr,
    keys_ptr,
    alike_ptr,
    fades_ptr,
    state_ptr,
    bounds_ptr,
    reads_ptr,
    save_bounds_ptr,
    save_ends_ptr,
    save_slots_ptr,
    out_ptr,
    HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    CHUNK: tl.constexpr,
    STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):
    """Compute a sequence's outputs and its last `S`, for some columns of one head's `S`."""
    item = tl.program_id(0)
    seq = item // HEADS
    head = item % HEADS
    rows = tl.arange(0, CHUNK)
    dims = tl.arange(0, ROWS)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    has_dim, has_column = dims < KEY_DIM, columns < VALUE_DIM
    cells = dims[:, None] * VALUE_DIM + columns[None, :]
    inside = has_dim[:, None] & has_column[None, :]
    start_next(PDL)
    wait_for_inputs(PDL)
    begin = tl.load(bounds_ptr + seq).to(tl.int64)
    read = tl.load(reads_ptr + seq)
    matrix = tl.load(
        state_ptr + (read * HEADS + head) * (KEY_DIM * VALUE_DIM) + cells, mask=inside, other=0.0
    )
    form = targets_ptr.dtype.element_ty
    for save in range(tl.load(save_bounds_ptr + seq), tl.load(save_bounds_ptr + seq + 1)):
        end = tl.load(save_ends_ptr + save).to(tl.int64)
        for chunk in tl.range(0, (end - begin + CHUNK - 1) // CHUNK, num_stages=STAGES):
            first = begin + chunk * CHUNK
            tokens = first + rows
            has_token = (tokens < end)[:, None]
            place = (tokens * HEADS + head)[:, None]
            at = place * KEY_DIM + dims[None, :]
            of_keys = has_token & has_dim[None, :]
            readers = tl.load(readers_ptr + at, mask=of_keys, other=0.0)
            queries = tl.load(queries_ptr + at, mask=of_keys, other=0.0)
            keys = tl.load(keys_ptr + at, mask=of_keys, other=0.0)
            alike = tl.load(alike_ptr + place * CHUNK + rows[None, :], mask=has_token, other=0.0)
            of_values = has_token & has_column[None, :]
            at = place * VALUE_DIM + columns[None, :]
            targets = tl.load(targets_ptr + at, mask=of_values, other=0.0)
            rounded = matrix.to(form)
            changes = targets.to(tl.float32) - tl.dot(readers, rounded, input_precision=PRECISION)
            changes = changes.to(form)
            result = tl.dot(queries, rounded, input_precision=PRECISION)
            result = tl.dot(alike, changes, acc=result, input_precision=PRECISION)
            tl.store(out_ptr + at, result.to(out_ptr.dtype.element_ty), mask=of_values)
            matrix *= tl.load(fades_ptr + first * HEADS + head)
            matrix = tl.dot(tl.trans(keys), changes, acc=matrix, input_precision=PRECISION)
        begin = end
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
    """Update each head's state and return outputs; see `kernels.gated_delta.gated_delta`.

    The last bits of the result depend on where chunks begin. For inputs in bfloat16, the operands
    of a chunk's products are rounded to bfloat16, but the state is not.
    """
    num_tokens, num_saves = len(qkv), len(places.save_slots)
    is_small = min(shape.key_dim, shape.value_dim) < _SMALLEST_HEAD
    if is_small or num_tokens < _SHORTEST * num_saves:
        return by_token.gated_delta(qkv, gates, decay, dt_bias, state, places, shape)
    num_heads, key_dim, value_dim = shape.num_value_heads, shape.key_dim, shape.value_dim
    form = torch.bfloat16 if qkv.dtype is torch.bfloat16 else torch.float32

    def space(*sizes: int) -> Tensor:
        return torch.empty(num_tokens, num_heads, *sizes, dtype=form, device=qkv.device)

    readers, queries, keys = space(key_dim), space(key_dim), space(key_dim)
    fades = torch.empty(num_tokens, num_heads, dtype=torch.float32, device=qkv.device)
    prepared = Prepared(space(value_dim), readers, queries, keys, space(CHUNK), fades)
    options = {
        "KEY_DIM": key_dim,
        "VALUE_DIM": value_dim,
        "ROWS": triton.next_power_of_2(key_dim),
        "CHUNK": CHUNK,
        # The precision of products of float32 operands. A fraction of 10 bits suffices for 16-bit
        # inputs.
        "PRECISION": "tf32x3" if qkv.dtype is torch.float32 else "tf32",
        **launch_options(qkv.device),
    }
    all_columns = triton.next_power_of_2(value_dim)
    prepare_kernel[(num_tokens // CHUNK + num_saves, num_heads)](
        qkv,
        gates,
        decay,
        dt_bias,
        places.save_ends,
        *prepared,
        num_saves,
        gates.stride(0),
        key_dim**-0.5,
        KEY_HEADS=shape.num_key_heads,
        RATIO=shape.ratio,
        GATE_SPAN=shape.gate_span,
        ALL_COLUMNS=all_columns,
        SAVES=triton.next_power_of_2(num_saves),
        num_warps=4,
        **options,
    )
    out = torch.empty(num_tokens, num_heads * value_dim, dtype=qkv.dtype, device=qkv.device)
    chunks_kernel[(len(places.reads) * num_heads, triton.cdiv(value_dim, _COLUMNS))](
        *prepared,
        state,
        places.qo_indptr,
        places.reads,
        places.save_indptr,
        places.save_ends,
        places.save_slots,
        out,
        HEADS=num_heads,
        COLUMNS=_COLUMNS,
        # With another number, operands in bfloat16 also caused illegal memory accesses.
        STAGES=2 if form is torch.bfloat16 else 1,
        num_warps=4,
        **options,
    )
    return out
