"""The kernels of latent attention (MLA), for `compiled_triton` to compile."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from kernels.latent_attention import hopper
from kernels.latent_attention import triton as latent
from kernels.latent_attention.gluon_decode import join_parts_kernel, latent_decode_kernel
from kernels.latent_attention.triton_latent import latent_kernel
from kernels.triton_support.device import SharedMemory


def latents(shared: SharedMemory) -> Iterator[tuple[str, Any, dict[str, Any], int]]:
    """Yield the latent attention kernel with its largest block."""
    tile = latent.tile_of(torch.bfloat16, shared, are_single=False, invariant=False)
    constants: dict[str, Any] = {
        "RANK": 512,
        "ROPE": 64,
        "PAGE_SIZE": 16,
        "TOKENS": tile.tokens,
        "BLOCK_H": 16,
        "BLOCK_N": tile.keys,
        "BLOCK_RANK": 512,
        "BLOCK_ROPE": 64,
        "SEQS": 64,
        "SPLITS": 2,
        "PRECISION": "tf32",
        "STAGES": tile.num_stages,
    }
    yield f"latents {tile.tokens}", latent_kernel, constants, tile.num_warps


# Of both kernels for decode steps on Hopper.
_SIZES = {"RANK": 512, "BLOCK_N": hopper.KEYS, "SEQS": 64, "MIN_BLOCKS": hopper.MIN_BLOCKS}


def latents_on_hopper() -> Iterator[tuple[str, Any, dict[str, Any], int]]:
    """Yield the kernel that attends in decode steps on Hopper, with its largest block."""
    tile = hopper.TILES[-1]
    constants = {"ROPE": 64, "PAGE_SIZE": 16, "BLOCK_H": tile.heads, "WARPS": tile.num_warps}
    constants |= {"STAGES": tile.num_stages}
    yield "latents, decode", latent_decode_kernel, _SIZES | constants, tile.num_warps


def parts_of_latents(*, pdl: bool) -> Iterator[tuple[str, Any, dict[str, Any], int]]:
    """Yield the kernel that combines what the programs of the other computed."""
    constants = {"PARTS": hopper.PARTS, "WARPS": 4, "PDL": pdl}
    yield "latents, parts", join_parts_kernel, _SIZES | constants, 4
