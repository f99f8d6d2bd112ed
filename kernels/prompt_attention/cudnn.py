"""Prompt attention in cuDNN, which on Hopper takes two thirds of the time of our paged kernel.

cuDNN builds a plan for each new shape. This takes the host 41 milliseconds, during which no stream
gets tokens. Lengths are therefore rounded up, and prompts of one length are batched only by ones,
twos and fours. `prepare` builds the plans of all remaining shapes (35 for steps of 8192 tokens).
torch caches the plans for the thread that built them. Keys after a prompt's end do not affect its
own tokens, because attention is causal.

Microseconds on an H200 with 32/8 heads of 128 (`benchmarks/h200/prompt_attention.py`):

    prompt       cuDNN  our paged kernel
    2048 tokens     84               108
    4096 tokens    258               376
    8192 tokens    906              1410

cuDNN's batches of different lengths are not used: in torch 2.11 they build their plan at each call.
"""

from collections.abc import Iterator, Sequence
from itertools import groupby

import torch
from torch import Tensor

# From this length on, one prompt fills the device, and attention is a relevant part of the step's
# time.
MIN_LENGTH = 2048
# Lengths are rounded up to multiples of _GRAIN. Above twice _COARSE, they are rounded up to
# multiples of a sixteenth of the power of two below them, so that a long context also has few
# shapes.
_GRAIN = 256
_COARSE = 4096
# Numbers of prompts per call. Prompts longer than _MAX_SHARING fill the device alone.
_COUNTS = (4, 2, 1)
_MAX_SHARING = 4096
_MAX_HEAD_DIM = 128


def unavailable() -> str | None:
    """Return why cuDNN cannot be used, or None if it can."""
    if not torch.cuda.is_available():
        return "no CUDA device"
    if not torch.backends.cudnn.is_available():
        return "torch was built without cuDNN"
    if torch.cuda.get_device_capability() < (9, 0):
        return "cuDNN's attention is measured from Hopper on"
    return None


def supports(q: Tensor) -> bool:
    """Return whether cuDNN has a kernel for the dtype and head size of `q`."""
    head_dim = q.shape[2]
    return (
        q.dtype in (torch.bfloat16, torch.float16)
        and head_dim <= _MAX_HEAD_DIM
        and not head_dim % 8
    )


def prompt_attention(
    q: Tensor, k: Tensor, v: Tensor, lengths: Sequence[int], scale: float
) -> Tensor:
    """Attend within each prompt; see `PromptAttentionKernels.prompt_attention`."""
    parts = []
    for start, count, length in runs(lengths):
        part = slice(start, start + count * length)
        parts.append(_attend(q[part], k[part], v[part], count, length, scale))
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def prepare(q: Tensor, num_kv_heads: int, max_length: int, max_tokens: int, scale: float) -> None:
    """Build the plans of all shapes; see `PromptAttentionKernels.prepare`."""
    shapes = shapes_of_steps(max_length, max_tokens)
    most = max((count * length for count, length in shapes), default=0)
    _, num_heads, head_dim = q.shape
    qkv = q.new_zeros(most, num_heads + 2 * num_kv_heads, head_dim)
    query, key, value = qkv.split([num_heads, num_kv_heads, num_kv_heads], dim=1)
    for count, length in shapes:
        part = slice(0, count * length)
        _attend(query[part], key[part], value[part], count, length, scale)


def shapes_of_steps(max_length: int, max_tokens: int) -> list[tuple[int, int]]:
    """Return the shapes of all possible calls: number of prompts and their rounded length.

    Args:
        max_length: most tokens of a prompt.
        max_tokens: most tokens of a step.
    """
    longest = min(max_length, max_tokens)
    longest = rounded_up(longest) if longest >= MIN_LENGTH else 0
    shapes, length = [], rounded_up(MIN_LENGTH)
    while length <= longest:
        most = max_tokens // length if length <= min(_MAX_SHARING, max_length) else 1
        shapes += [(count, length) for count in _COUNTS if count <= max(1, most)]
        length = rounded_up(length + 1)
    return shapes


def rounded_up(length: int) -> int:
    """Return the length to which a prompt of `length` tokens is padded."""
    below = 1 << max(0, (length - 1).bit_length() - 1)
    grain = max(_GRAIN, below * _GRAIN // _COARSE)
    return -(-length // grain) * grain


def runs(lengths: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """Yield the calls for a step's prompts: first token, number of prompts, their length.

    Adjacent prompts of equal length share a call if the length needs no padding.
    """
    start = 0
    for length, same in groupby(lengths):
        left = len(list(same))
        shares = length <= _MAX_SHARING and rounded_up(length) == length
        while left:
            count = next(count for count in _COUNTS if count <= left) if shares else 1
            yield start, count, length
            start += count * length
            left -= count


def _attend(q: Tensor, k: Tensor, v: Tensor, count: int, length: int, scale: float) -> Tensor:
    """Attend in `count` prompts of `length` tokens each."""
    padded = rounded_up(length)
    if padded != length:
        q, k, v = _with_padding(q, k, v, padded)
    query, key, value = (each.unflatten(0, (count, padded)).transpose(1, 2) for each in (q, k, v))
    # `scaled_dot_product_attention` would first choose a back end, which takes the host longer than
    # this call.
    out: Tensor = torch.ops.aten._scaled_dot_product_cudnn_attention(
        query, key, value, None, False, 0.0, True, False, scale=scale
    )[0]
    return out.transpose(1, 2).reshape(count * padded, -1)[: count * length]


def _with_padding(q: Tensor, k: Tensor, v: Tensor, padded: int) -> tuple[Tensor, ...]:
    """Return copies of `q`, `k` and `v` padded with zeros, in one tensor as `qkv` is.

    cuDNN's plans depend on strides, so the layout must be that of an unpadded call.
    """
    sizes = [each.shape[1] for each in (q, k, v)]
    qkv = q.new_empty(padded, sum(sizes), q.shape[2])
    qkv[len(q) :] = 0
    copies = qkv.split(sizes, dim=1)
    for copy, each in zip(copies, (q, k, v), strict=True):
        copy[: len(q)] = each
    return copies
