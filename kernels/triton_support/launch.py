"""Programmatic dependent launch: a kernel starts while the previous one still runs.

From Hopper on, such a kernel may be resident before the stream's previous kernel has ended. This
hides most of the 1 to 2 microseconds between two small kernels, also inside CUDA graphs.

Every such kernel must follow one rule: each of its programs, even one without work, calls
`wait_for_inputs` before it reads or writes anything except weights. So when a kernel has finished,
all kernels before it have finished, too. Kernels of other libraries in between are safe, because
they wait for all earlier work. FlashInfer's kernels first read their plan, which was copied before,
and wait after that.

`start_next` lets the next kernel start before this one ends. Norms and matrix products always call
it. Attention, rotation and activation call it only in a step of one token (`lets_next_in`), because
the product after them then consists of small programs (`kernels.linear.triton_gemv`). Larger
programs would hold memory that the rest of the previous kernel still needs.

The decode step of an 8B model at batch 1 was measured before `triton_gemv` existed. It took 4.38 to
4.42 ms in this way, 4.76 ms when every kernel called `start_next`, and 4.53 ms without dependent
launch. Fetching weights into the L2 cache before the wait makes the step longer: by 2% with 16 KiB
per program and by 25% with 256 KiB, both with `prefetch` and with bulk copies.

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
    """Return the launch options for a kernel with a `PDL` parameter on `device`."""
    if device.type != "cuda" or interpreted():
        return {"PDL": False}
    if torch.cuda.get_device_capability(device) < (9, 0):
        return {"PDL": False}
    return {"PDL": True, "launch_pdl": True}


def lets_next_in(num_tokens: int) -> bool:
    """Return whether a kernel before a product of `num_tokens` tokens calls `start_next`."""
    return num_tokens == 1


@triton.jit
def start_next(PDL: tl.constexpr):
    """Let the next kernel start as soon as all programs of this one have reached this call."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def wait_for_inputs(PDL: tl.constexpr):
    """Wait until all kernels before this one have ended."""
    if PDL:
        tl.extra.cuda.gdc_wait()
