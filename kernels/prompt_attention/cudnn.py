"""Prompt attention through cuDNN: on Hopper two thirds of the time of our paged kernel.

cuDNN makes a plan for each shape it meets, which takes 40 milliseconds; lengths are rounded up, so
that a process meets few. Keys behind a prompt's end change nothing for its own tokens: they come
later. Measured on an H200 by `benchmarks/h200/prompt_attention.py`: 32/8 heads of 128, prompts of
2048, 4096 and 8192 tokens in 84, 258 and 906 microseconds, our kernel on pages in 108, 376 and
1410. (cuDNN's own ragged batches make their plan at each call in torch 2.11.)
"""

from collections.abc import Iterator, Sequence
from itertools import groupby

import torch
from torch import Tensor
from torch.nn import functional

# From here on a prompt alone fills the device, and attention is a share of the step worth having.
MIN_LENGTH = 2048
_GRAIN = 256
_MAX_HEAD_DIM = 128


def unavailable() -> str | None:
    """Return why cuDNN cannot be used, or None when it can."""
    if not torch.cuda.is_available():
        return "no CUDA device"
    if not torch.backends.cudnn.is_available():
        return "torch was built without cuDNN"
    if torch.cuda.get_device_capability() < (9, 0):
        return "cuDNN's attention is measured from Hopper on"
    return None


def supports(q: Tensor) -> bool:
    """Return whether cuDNN has a kernel for this type and head size."""
    head_dim = q.shape[2]
    return (
        q.dtype in (torch.bfloat16, torch.float16)
        and head_dim <= _MAX_HEAD_DIM
        and not head_dim % 8
    )


def prompt_attention(
    q: Tensor, k: Tensor, v: Tensor, lengths: Sequence[int], scale: float
) -> Tensor:
    """See `kernels.prompt_attention.PromptAttentionKernels.prompt_attention`."""
    parts = []
    for start, count, length in runs(lengths):
        part = slice(start, start + count * length)
        parts.append(_attend(q[part], k[part], v[part], count, length, scale))
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def runs(lengths: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """Yield first token, number of prompts and their length, neighbours of a round one together."""
    start = 0
    for length, same in groupby(lengths):
        count = len(list(same))
        each = count if length % _GRAIN == 0 else 1
        for _ in range(count // each):
            yield start, each, length
            start += each * length


def _attend(q: Tensor, k: Tensor, v: Tensor, count: int, length: int, scale: float) -> Tensor:
    """Attend in `count` prompts of `length` tokens each."""
    missing = -length % _GRAIN
    if missing:
        q, k, v = (functional.pad(each, (0, 0, 0, 0, 0, missing)) for each in (q, k, v))
    query, key, value = (
        each.unflatten(0, (count, length + missing)).transpose(1, 2) for each in (q, k, v)
    )
    # Not through `scaled_dot_product_attention`: choosing a back end costs the host more than this.
    out: Tensor = torch.ops.aten._scaled_dot_product_cudnn_attention(
        query, key, value, None, False, 0.0, True, False, scale=scale
    )[0]
    return out.transpose(1, 2).reshape(count * (length + missing), -1)[: count * length]
