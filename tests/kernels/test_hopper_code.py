"""Checks the compiled code of kernels for a Hopper GPU, without a GPU.

Batch-invariant kernels rely on one kind of matrix instruction for every number of tokens. The gated
product's speed relies on an instruction that multiplies gate and up together, on TMA, and on shared
memory for the blocks in flight. Decoding's speed with 8-bit keys and values relies on their loads
from shared memory.
"""

import importlib.util
import re

import pytest

from tests.support.uninterpreted import run_uninterpreted

SCRIPT = """
import torch, triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from kernels.linear import triton_gated
from kernels.linear import triton_invariant as linear
from kernels.paged_attention import triton_invariant as attention
from kernels.paged_attention.triton_decode import decode_kernel
from kernels.paged_attention.triton_invariant_kernel import attention_kernel
from kernels.paged_attention.triton_tiles import decode_tile

HALVES = ("x_ptr", "weight_ptr", "bias_ptr", "q_ptr", "k_ptr", "v_ptr", "out_ptr")
FLOATS = ("partial_ptr", "state_ptr")

def compiled(kernel, constants, types=(), **options):
    given, types = dict(types), {}
    for name in kernel.arg_names:
        if name in constants:
            types[name] = "constexpr"
        elif name in given:
            types[name] = given[name]
        elif name.endswith("_ptr"):
            types[name] = "*bf16" if name in HALVES else "*fp32" if name in FLOATS else "*i32"
        else:
            types[name] = "fp32" if name == "scale_log2" else "i32"
    even = ("q_stride", "in_features", "out_features", "width")
    aligned = {
        (at,): [["tt.divisibility", 16]]
        for at, name in enumerate(types) if name.endswith("_ptr") or name in even
    }
    values = {(at,): constants[name] for at, name in enumerate(types) if name in constants}
    source = ASTSource(fn=kernel, signature=types, constexprs=values, attrs=aligned)
    options["launch_pdl"] = "PDL" in constants
    made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    return f"// shared {made.metadata.shared}\\n" + made.asm["ptx"]

for tile in linear.tiles(torch.bfloat16):
    constants = dict(
        HAS_BIAS=True, EVEN_K=True, PRECISION="tf32", GROUP=8, BLOCK_N=tile.rows,
        BLOCK_M=tile.tokens, BLOCK_K=tile.columns, STAGES=tile.num_stages, PDL=True,
    )
    print("LINEAR", tile.tokens)
    print(compiled(linear._linear_kernel, constants, num_warps=tile.num_warps))
tile = attention.tile_of(torch.bfloat16, 128, 227 * 1024)
constants = dict(
    NUM_KV_HEADS=8, GROUP=4, GROUP_ROWS=4, HEAD_DIM=128, PAGE_SIZE=16, PRECISION="tf32",
    WINDOWED=False, SPANS=False, CAPPED=False, SINKS=False, PART=attention.PART,
    BLOCK_M=attention.BLOCK_ROWS, BLOCK_N=tile.block_n, BLOCK_D=128, STAGES=tile.num_stages,
    PDL=True,
)
print("ATTENTION")
print(compiled(attention_kernel, constants, num_warps=tile.num_warps, enable_fp_fusion=False))
cut = triton_gated.CUT
constants = dict(
    HAS_BIAS=True, ACTIVATION="silu", BLOCK_M=cut.block_m, BLOCK_N=cut.block_n, BLOCK_K=cut.block_k,
    STAGES=cut.num_stages, GROUP=cut.group,
)
blocks = dict(
    x=[cut.block_m, cut.block_k], weight=[2, cut.block_n, cut.block_k],
    out=[cut.block_m, cut.block_n],
)
types = {name: f"tensordesc<bf16{block}>".replace(" ", "") for name, block in blocks.items()}
print("GATED")
print(compiled(triton_gated._gated_kernel, constants, types, num_warps=cut.num_warps))
tile = decode_tile(torch.bfloat16, 128, 3.9, 1)
constants = dict(
    NUM_KV_HEADS=8, GROUP=4, GROUP_ROWS=4, HEAD_DIM=128, PAGE_SIZE=16, PRECISION="tf32",
    BLOCK_M=16, BLOCK_N=tile.block_n, BLOCK_D=128, PARTS=8, STAGES=tile.num_stages,
    SHARED=False, CAPPED=False, SINKS=False, EARLY=False, PDL=True,
)
types = {"k_ptr": "*fp8e4nv", "v_ptr": "*fp8e4nv", "lse_ptr": "*fp32", "cap_log2": "fp32"}
print("DECODE")
print(compiled(decode_kernel, constants, types, num_warps=tile.num_warps))
types |= {"k_ptr": "*fp8e5", "v_ptr": "*fp8e5"}
print("E5M2")
print(compiled(decode_kernel, constants, types, num_warps=tile.num_warps))
"""


@pytest.fixture(scope="module")
def code() -> dict[str, str]:
    """PTX by kernel: `LINEAR 16` and so on by tokens of a block, `ATTENTION` and so on."""
    printed = run_uninterpreted("-c", SCRIPT, timeout=240)
    parts = re.split(r"^(LINEAR \d+|ATTENTION|GATED|DECODE|E5M2)$", printed, flags=re.MULTILINE)[1:]
    return dict(zip(parts[::2], parts[1::2], strict=True))


pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="no triton")
WGMMA = re.compile(r"wgmma\.mma_async\.sync\.aligned\.m64n(\d+)k(\d+)\.f32\.bf16\.bf16")


def test_every_cut_of_the_product_is_made_of_one_instruction(code: dict[str, str]) -> None:
    blocks = {name: ptx for name, ptx in code.items() if name.startswith("LINEAR")}
    assert len(blocks) == 5
    for name, ptx in blocks.items():
        shapes = set(WGMMA.findall(ptx))
        assert shapes == {(name.split()[1], "16")}, name
        assert "mma.sync" not in ptx


def test_attention_is_made_of_one_instruction_and_fuses_nothing(code: dict[str, str]) -> None:
    ptx = code["ATTENTION"]
    assert {k for _, k in WGMMA.findall(ptx)} == {"16"}
    assert "mma.sync" not in ptx
    assert not re.search(r"\bfma\.rn\.f32", ptx)


def test_the_gated_product_multiplies_both_halves_at_once(code: dict[str, str]) -> None:
    ptx = code["GATED"]
    assert set(WGMMA.findall(ptx)) == {("256", "16")}
    assert "cp.async.bulk.tensor" in ptx
    # Operands never pass through registers.
    assert not re.search(r"mma\.sync|ldmatrix|ld\.shared\.b16", ptx)
    shared = re.search(r"^// shared (\d+)$", ptx, re.MULTILINE)
    assert shared is not None
    assert int(shared[1]) <= 227 * 1024


def test_decoding_reads_8_bit_keys_and_values_as_16_bits(code: dict[str, str]) -> None:
    ptx = code["DECODE"]
    assert "ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16" in ptx
    assert not re.search(r"ld\.shared\.[bu]8", ptx)


def test_e5m2_needs_no_instruction_that_older_gpus_lack(code: dict[str, str]) -> None:
    """An A100, which has no conversion of 8-bit floats, keeps keys and values in E5M2."""
    assert "ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16" in code["E5M2"]
    assert "e5m2" not in code["E5M2"]
