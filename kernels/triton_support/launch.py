"""Programmatic dependent launch: a kernel starts while the one ahead of it still runs.

From Hopper on, a kernel launched so may be resident before the stream's previous kernel has ended.
Inside CUDA graphs too, this hides most of the 1 to 2 microseconds between two small kernels.

The rule every kernel keeps that takes part: each of its programs calls `wait_for_inputs` before it
reads or writes anything but weights, also a program that has nothing to do. Then a kernel that has
ended proves that all before it have. Kernels of other libraries in between are safe: they wait for
everything, FlashInfer's as soon as they have read their plan, which copies wrote.

`start_next` lets the next kernel in before this one ends. Norms and matrix products do so, always.
Attention, rotation and activation do so in a step of one token only (`lets_next_in`): the product
behind them then is made of small programs (`kernels.linear.triton_gemv`). Larger ones hold memory
that the rest of the kernel ahead still needs: decode step of the 8B shape, batch 1, before there
was that kernel: 4.38 to 4.42 ms so, 4.76 ms when every kernel does, 4.53 ms without dependent
launch. Fetching weights into the second-level cache before the wait takes longer, by 2% for 16 KiB
a program and by 25% for 256, with `prefetch` as with bulk copies.

Source: CUDA C++ programming guide, "Programmatic Dependent Launch and Synchronization".
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from functools import cache

import torch
import triton
import triton.language as tl

from kernels.triton_support.device import interpreted


@cache
def launch_options(device: torch.device) -> dict[str, bool]:
    """Return what to pass to a kernel with a `PDL` parameter on `device`."""
    if device.type != "cuda" or interpreted():
        return {"PDL": False}
    if torch.cuda.get_device_capability(device) < (9, 0):
        return {"PDL": False}
    return {"PDL": True, "launch_pdl": True}


def lets_next_in(num_tokens: int) -> bool:
    """Return the `EARLY` of a kernel ahead of a product with so many tokens."""
    return num_tokens == 1


@triton.jit
def start_next(PDL: tl.constexpr):
    """Let the next kernel come as soon as all programs of this one have."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def wait_for_inputs(PDL: tl.constexpr):
    """Wait until all kernels before this one have ended."""
    if PDL:
        tl.extra.cuda.gdc_wait()
