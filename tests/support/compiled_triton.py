"""Compiles the Triton kernels for GPUs that this machine lacks; prints JSON.

    python -m tests.support.compiled_triton shared 80 90  # shared memory, by GPU and kernel, bytes
    python -m tests.support.compiled_triton ptx  # PTX for Hopper of kernels that start early

This runs in a separate process, because Triton does not compile while it is interpreted.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from typing import Any

import torch
import triton.language as tl

from kernels.activation import triton as activation
from kernels.causal_conv import triton as causal_conv
from kernels.decode_step import triton as decode_step
from kernels.experts import triton as experts
from kernels.experts import triton_coded as coded_experts
from kernels.experts.triton_kernels import choose_kernel, product_kernel, sort_kernel
from kernels.fp8_linear import triton as fp8_linear
from kernels.gated_delta import triton as gated_delta
from kernels.gated_delta import triton_chunks as gated_delta_chunks
from kernels.greedy import NAN_TOKEN
from kernels.greedy import triton as greedy
from kernels.group_linear import triton as group_linear
from kernels.group_linear import triton_codes
from kernels.linear import triton as linear
from kernels.linear import triton_gemv as gemv
from kernels.linear import triton_invariant as invariant_linear
from kernels.lora.triton_few import expand_few_kernel, shrink_few_kernel
from kernels.lora.triton_sgmv import expand_kernel, shrink_kernel
from kernels.mamba2 import triton as mamba2
from kernels.norm import triton as norm
from kernels.paged_attention import triton_invariant as invariant_attention
from kernels.paged_attention import triton_tiles as tiles
from kernels.paged_attention.triton_decode import decode_kernel
from kernels.paged_attention.triton_extend import extend_kernel
from kernels.paged_attention.triton_invariant_kernel import attention_kernel
from kernels.paged_attention.triton_prefix import prefix_kernel
from kernels.rope import triton as rope
from kernels.rounding import triton as rounding
from kernels.sampling import triton_draw, triton_rows
from kernels.triton_support.device import SharedMemory
from tests.support.compiled_latents import latents, latents_on_hopper, parts_of_latents
from tests.support.triton_compiler import compiled

# Bytes of shared memory that a thread block may have, by compute capability. From the CUDA C++
# Programming Guide, "Technical Specifications per Compute Capability", minus the kilobyte that the
# system reserves.
LIMITS = {80: 163 * 1024, 89: 99 * 1024, 90: 227 * 1024, 100: 227 * 1024, 120: 99 * 1024}
# Compute capabilities for which kernels are compiled whose variants do not depend on the amount of
# shared memory: the GPU with the least of it, and the two with special matrix instructions.
KINDS_OF_CODE = (89, 90, 100)
DTYPE = torch.bfloat16
Kernel = tuple[str, Any, dict[str, Any], int]
# Variants that are not compiled, because others need more shared memory and compiling is slow.
SMALL = {"product, one block", "product, vocabulary", "invariant 128"}


def attention(head_dim: int) -> dict[str, Any]:
    """Return the constants that all attention kernels share, with four heads per key head."""
    return {
        "NUM_KV_HEADS": 8,
        "GROUP": 4,
        "HEAD_DIM": head_dim,
        "PAGE_SIZE": 16,
        "PRECISION": "tf32",
        "BLOCK_D": head_dim,
    }


def products(shared: SharedMemory, *, pdl: bool) -> Iterator[Kernel]:
    """Yield the products for few tokens with the largest blocks, also split and gated ones."""
    shapes = {
        "split": (896, 4864, 64, None),
        "gated": (28672, 4096, 64, "silu"),
        "one block": (4096, 4096, 16, None),
        "vocabulary": (128256, 4096, 64, None),
    }
    for name, (rows, columns, tokens, gated) in shapes.items():
        tile = linear.tile_of(rows, columns, tokens)
        block_m = tile.block_m or tokens
        constants = {
            "PARTS": 2,
            "PLACES": tokens,
            # In whole steps only products without an activation have rows of adapters.
            "RANKS": 16 if gated is None else 0,
            "HAS_BIAS": True,
            "EVEN_K": True,
            "BLOCK_M": block_m,
            "BLOCK_N": tile.block_n,
            "BLOCK_K": tile.block_k,
            "SPLIT_K": tile.split_k,
            "STAGES": linear.stages_of(tile, block_m, shared),
            "ACTIVATION": gated,
            "PDL": pdl,
        }
        assert gated is None or tile.split_k == 1
        assert name != "split" or tile.split_k > 1
        yield f"product, {name}", linear.linear_kernel, constants, tile.num_warps
    large = invariant_linear._MOST_TOKENS
    constants = {
        "HAS_BIAS": True,
        "EVEN_K": True,
        "PRECISION": "tf32",
        "GROUP": 8,
        "BLOCK_N": large.rows,
        "BLOCK_M": large.tokens,
        "BLOCK_K": large.columns,
        "STAGES": invariant_linear.stages_of(large, DTYPE, shared),
        "PDL": pdl,
    }
    yield "product, invariant", invariant_linear._linear_kernel, constants, large.num_warps


# Constants for changes of attention scores; see `kernels.paged_attention.triton_scores`.
SCORES = {"CAPPED": False, "SINKS": False}


def attentions(shared: SharedMemory, *, pdl: bool) -> Iterator[Kernel]:
    """Yield attention of prompt chunks for the head sizes that need the most memory."""
    for head_dim in (128, 256, 512):
        layout = attention(head_dim)
        rows = tiles.block_rows_of(9.0, 4096.0, head_dim, shared.size, short_prompts=False)
        tile = tiles.extend_tile(DTYPE, head_dim, rows, shared.size, short_prompts=False)
        constants = {
            "WINDOWED": False,
            "SPANS": False,
            **SCORES,
            "BLOCK_M": rows,
            "BLOCK_N": tile.block_n,
            "STAGES": tile.num_stages,
            "PDL": pdl,
        }
        yield f"extend {head_dim}", extend_kernel, layout | constants, tile.num_warps
        if head_dim == 256:
            # A layer with a window, a soft cap and sinks, in a step with images.
            seeing = constants | dict.fromkeys(("WINDOWED", "SPANS", *SCORES), True)
            yield "extend 256, images", extend_kernel, layout | seeing, tile.num_warps
        cut = invariant_attention.tile_of(DTYPE, head_dim, shared.size)
        constants = {
            "GROUP_ROWS": 4,
            "WINDOWED": False,
            "SPANS": False,
            **SCORES,
            "PART": invariant_attention.PART,
            "BLOCK_M": invariant_attention.BLOCK_ROWS,
            "BLOCK_N": cut.block_n,
            "STAGES": cut.num_stages,
            "PDL": pdl,
        }
        yield f"invariant {head_dim}", attention_kernel, layout | constants, cut.num_warps


def shared_attentions(*, pdl: bool) -> Iterator[Kernel]:
    """Yield attention of decoding sequences, and of sequences with a common prefix."""
    layout = attention(128)
    tile = tiles.decode_tile(DTYPE, 128, 1.0)
    constants = {
        "BLOCK_M": 16,
        "BLOCK_N": tile.block_n,
        "GROUP_ROWS": 4,
        "PARTS": 8,
        "STAGES": tile.num_stages,
        "SHARED": False,
        **SCORES,
        "EARLY": False,
        "PDL": pdl,
    }
    yield "decode 128", decode_kernel, layout | constants, tile.num_warps
    tile = tiles.prefix_tile(DTYPE, 128, LIMITS[90])
    constants = {
        "GROUP_ROWS": 4,
        "CAPPED": False,
        "BLOCK_M": 64,
        "BLOCK_N": tile.block_n,
        "STAGES": tile.num_stages,
        "PDL": pdl,
    }
    yield "prefix 128", prefix_kernel, layout | constants, tile.num_warps


def layer_ops(*, pdl: bool) -> Iterator[Kernel]:
    """Yield the kernels of a layer besides attention and matrix products."""
    constants: dict[str, Any] = {"HAS_RESIDUAL": True, "ZERO_CENTERED": False, "BLOCK": 16384}
    yield "norm", norm._rms_norm_kernel, constants | {"PDL": pdl}, 16
    constants = {"HAS_RESIDUAL": True, "HAS_BIAS": True, "BLOCK": 16384}
    yield "layer norm", norm._layer_norm_kernel, constants | {"PDL": pdl}, 16
    constants = {
        "NAN": NAN_TOKEN,
        "HAS_WANTED": True,
        "BLOCK": greedy.BLOCK_SIZE,
        "PARTS": 64,
        "PDL": pdl,
    }
    yield "greedy", greedy._greedy_kernel, constants, 4


def fp8(shared: SharedMemory, *, pdl: bool) -> Iterator[Kernel]:
    """Yield matrix products with fp8 weights, and the kernels that round activations to fp8."""
    tile = fp8_linear.tile_of(6144, 4096, 64, has_blocks=True)
    constants: dict[str, Any] = {
        "ROUNDED": False,
        "HAS_BIAS": True,
        "BLOCKS": True,
        "EVEN_K": True,
        "BLOCK_M": 64,
        "BLOCK_N": tile.rows,
        "BLOCK_K": tile.columns,
        "SPLIT_K": tile.split,
        "STAGES": shared.stages(tile.num_stages, (tile.rows + 128) * tile.columns),
        "ACTIVATION": None,
        "PDL": pdl,
    }
    yield "fp8, few tokens", fp8_linear._few_kernel, constants, tile.num_warps
    constants = {"BLOCKS": True, "EVEN_K": True, "BLOCK_M": 128, "BLOCK_N": 64}
    constants |= {"GROUP_TOKENS": 8}
    constants |= {"STAGES": shared.stages(4, 192 * 128), "PDL": pdl}
    yield "fp8, blocks", fp8_linear._block_kernel, constants, 4
    constants = {"GROUPS": 32, "SPACE": 128, "STATIC": False, "PDL": pdl}
    yield "fp8, rounding", rounding._round_kernel, constants, 8
    constants = {"HAS_RESIDUAL": True, "ZERO_CENTERED": False, "BLOCK": 4096}
    constants |= {"GROUP": 128, "STATIC": False, "PDL": pdl}
    yield "fp8, rounding norm", rounding._norm_kernel, constants, 8
    constants = {"ACTIVATION": "silu", "BLOCK": 2048, "GROUP": 128, "STATIC": False, "PDL": pdl}
    yield "fp8, rounding gate", rounding._gate_kernel, constants, 4


def codes_in_groups(shared: SharedMemory, *, pdl: bool) -> Iterator[Kernel]:
    """Yield the matrix product with 4-bit weights that needs the most memory."""
    tile = group_linear.tile_of(4096, 112, 64, 132)
    constants: dict[str, Any] = {"FORM": "int4", "GROUP": 32, "SCALES": tl.float16, "WORDS": 3}
    constants |= {"HAS_ZERO": True, "HAS_BIAS": True, "EVEN_K": True, "BLOCK_M": 64}
    constants |= {"BLOCK_N": tile.rows, "SPLIT_K": tile.split, "ASM": True, "PDL": pdl}
    block_bytes = 128 * (tile.rows // 2 + 128) + 12 * tile.rows
    constants["STAGES"] = shared.stages(tile.num_stages, block_bytes)
    yield "codes in groups", triton_codes.few_kernel, constants, tile.num_warps


def experts_in_codes(shared: SharedMemory) -> Iterator[Kernel]:
    """Yield the product of experts with 4-bit weights that needs the most memory."""
    tile = coded_experts.TILES[-1][1]
    constants: dict[str, Any] = {"FORM": "int4", "GROUP": 32, "SCALES": tl.float16, "WORDS": 3}
    constants |= {"HAS_ZERO": True, "HAS_BIAS": True, "EVEN_K": True, "ROWS_OF_X": 4}
    constants |= {"ACTIVATION": "swigluoai"}
    constants |= {"BLOCK_M": tile.tokens, "BLOCK_N": tile.rows, "ASM": True}
    constants["STAGES"] = coded_experts.stages_of(tile, "int4", 2, 2, shared)
    yield "experts in codes", coded_experts.codes_product_kernel, constants, tile.num_warps


def adapters(*, pdl: bool) -> Iterator[Kernel]:
    """Yield the kernels of both matrices of a LoRA adapter."""
    constants: dict[str, Any] = {"PARTS": 2, "SPLIT": 4, "RANKS": 16, "BLOCK_M": 16}
    constants |= {"PRECISION": "tf32", "PDL": pdl}
    yield "adapter, shrink", shrink_kernel, constants | {"EVEN_K": True, "BLOCK_K": 128}, 4
    of_many = {"BLOCK_N": 128, "ACTIVATION": None}
    yield "adapter, expand", expand_kernel, constants | of_many, 4
    constants |= {"STAGES": 3, "STEPS": 1, "SHARES": 2}
    of_k = {"EVEN_K": True, "BLOCK_K": 256}
    yield "adapter, shrink few", shrink_few_kernel, constants | of_k, 4
    of_n = {"BLOCK_N": 128, "EVEN_N": True, "ACTIVATION": None}
    for name, ahead in (("expand few", False), ("expand few ahead", True)):
        yield f"adapter, {name}", expand_few_kernel, constants | of_n | {"AHEAD": ahead}, 4


def sampling() -> Iterator[Kernel]:
    """Yield the sampling kernels that need the most memory."""
    few = triton_rows.FEW_CANDIDATES
    constants = {"CANDIDATES": triton_rows.CANDIDATES, "WIDTH": few, "AT_LEAST": 0}
    yield "cut of candidates", triton_rows.cut_candidates_kernel, constants, 4
    yield "ranks", triton_draw.rank_kernel, {"WIDTH": 128}, 8


def mixtures(shared: SharedMemory) -> Iterator[Kernel]:
    """Yield the largest products of experts."""
    for index in (0, -1):
        _, tile = experts.TILES[index]
        constants: dict[str, Any] = {
            "ROWS_OF_X": 4,
            "ACTIVATION": "silu",
            "HAS_BIAS": True,
            "EVEN_K": True,
            "PRECISION": "tf32",
            "BLOCK_N": tile.rows,
            "BLOCK_M": tile.tokens,
            "BLOCK_K": tile.columns,
            "STAGES": experts.stages_of(tile, DTYPE, 2, shared),
        }
        yield f"experts {tile.tokens}", product_kernel, constants, tile.num_warps


def choices_of_experts() -> Iterator[Kernel]:
    """Yield the kernels that choose experts, and that sort tokens by expert."""
    constants: dict[str, Any] = {"BLOCK_M": 16, "CHUNK": 1024, "BINS": 64}
    yield "experts sorted", sort_kernel, constants, 4
    constants = {"NUM_CHOSEN": 4, "SUMS_TO_ONE": True, "PLACES": 4, "BLOCK": 64}
    yield "experts chosen", choose_kernel, constants, 1


def dependent() -> Iterator[Kernel]:
    """Yield a variant of every kernel that may start before the previous kernel has ended."""
    shared = SharedMemory.of_capability(LIMITS[90], 9)
    seen = set()
    for kernel in (
        *products(shared, pdl=True),
        *attentions(shared, pdl=True),
        *shared_attentions(pdl=True),
        *layer_ops(pdl=True),
        *fp8(shared, pdl=True),
        *codes_in_groups(shared, pdl=True),
        *adapters(pdl=True),
        *parts_of_latents(pdl=True),
    ):
        if (kind := (kernel[1], kernel[2].get("AHEAD"))) not in seen:
            seen.add(kind)
            yield kernel
    constants: dict[str, Any] = {
        "IN_FEATURES": 4096,
        "HAS_BIAS": True,
        "ROWS": 2,
        "COLUMNS": 2048,
        "PARTS": 2,
        "PDL": True,
    }
    for scales in ("none", "rows", "blocks"):
        kind = {"SCALES": scales, "HAS_X_SCALES": scales != "none"}
        kind["RANKS"] = 16 if scales == "none" else 0
        yield f"gemv, scales: {scales}", gemv.gemv_kernel, constants | kind, 4
    constants = {"WIDTH": 4, "HAS_BIAS": True, "SILU": True, "PDL": True}
    constants |= {"ROWS": 16, "BLOCK": 128}
    yield "convolution", causal_conv.conv_kernel, constants, 4
    constants = {"IS_SHARED": False, "BLOCK": 1024, "PDL": True}
    yield "sigmoid", activation.sigmoid_mul_kernel, constants, 4
    constants = {"GROUPS": 8, "HEADS": 64, "HEAD_DIM": 64, "STATE_DIM": 128, "ROWS": 128}
    constants |= {"COLUMNS": 32, "PDL": True}
    yield "mamba 2", mamba2.mamba2_kernel, constants, 4
    constants = {"KEY_DIM": 128, "VALUE_DIM": 128, "ROWS": 128, "PDL": True}
    by_heads = constants | {"KEY_HEADS": 16, "RATIO": 2, "GATE_SPAN": 2}
    yield "gated delta", gated_delta.delta_kernel, by_heads | {"COLUMNS": 32}, 4
    constants |= {"CHUNK": 64, "PRECISION": "tf32"}
    yield (
        "gated delta, prepared",
        gated_delta_chunks.prepare_kernel,
        constants | by_heads | {"ALL_COLUMNS": 128, "SAVES": 64},
        4,
    )
    constants |= {"HEADS": 32, "COLUMNS": 32, "STAGES": 2}
    yield "gated delta, chunks", gated_delta_chunks.chunks_kernel, constants, 4
    constants = {"ZERO_CENTERED": True, "ROWS": 16, "BLOCK": 128, "PDL": True}
    yield "norm of heads", norm.narrow_rms_norm_kernel, constants, 4
    constants = {"ACTIVATION": "silu", "BLOCK": 1024, "EARLY": True, "PDL": True}
    yield "activation", activation._act_and_mul_kernel, constants, 4
    constants = {
        "NUM_HEADS": 32,
        "NUM_KV_HEADS": 8,
        "HEAD_DIM": 128,
        "PAGE_SIZE": 16,
        "HAS_Q_NORM": True,
        "HAS_K_NORM": True,
        "ZERO_CENTERED": False,
        "BLOCK_HEADS": 8,
        "BLOCK_HALF": 64,
        "EARLY": True,
        "PDL": True,
    }
    yield "rope", rope._rope_kernel, constants, 2
    constants = {
        "NUM_KV_HEADS": 8,
        "HEAD_DIM": 128,
        "VALUE_DIM": 96,
        "PAGE_SIZE": 16,
        "BLOCK_HEADS": 8,
        "BLOCK_D": 128,
        "EARLY": True,
        "PDL": True,
    }
    yield "keys and values", rope._write_kernel, constants, 2
    constants = {"BLOCK": 1024, "PDL": True}
    yield "decode inputs", decode_step._decode_inputs_kernel, constants, 4
    constants = {"BLOCK": 128, "PDL": True}
    yield "decode outputs", decode_step._decode_outputs_kernel, constants, 4


def arguments(kernel: Any, constants: dict[str, Any]) -> list[str]:
    """Return the names of the compiled kernel's parameters, in order."""
    return [name for name in kernel.arg_names if name not in constants]


def main() -> None:
    """Print the JSON that the command-line arguments name."""
    if sys.argv[1] == "shared":
        for capability in map(int, sys.argv[2:]):
            limit = LIMITS[capability]
            shared = SharedMemory.of_capability(limit, capability // 10)
            pdl = capability >= 90
            kernels = [
                *products(shared, pdl=pdl),
                *attentions(shared, pdl=pdl),
                *mixtures(shared),
                *latents(shared),
                *codes_in_groups(shared, pdl=pdl),
                *experts_in_codes(shared),
            ]
            if capability == 90:
                kernels += latents_on_hopper()
            if capability in KINDS_OF_CODE:
                kernels += layer_ops(pdl=pdl)
                kernels += shared_attentions(pdl=pdl)
                kernels += sampling()
                kernels += choices_of_experts()
            for name, *kernel in kernels:
                if name in SMALL:
                    continue
                size = compiled(*kernel, capability, "llir")
                print(json.dumps([f"{capability} {name}", size]), flush=True)
        return
    for name, kernel, constants, warps in dependent():
        ptx = compiled(kernel, constants, warps, 90, "ptx")
        print(json.dumps([name, kernel.__name__, arguments(kernel, constants), ptx]), flush=True)


if __name__ == "__main__":
    main()
