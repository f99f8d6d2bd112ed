"""Compiles a Triton kernel for a GPU that this machine lacks: its shared memory, or its PTX.

The types of parameters follow from their names, which mean the same in all kernels.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import triton
from triton._C.libtriton import nvidia
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import CUDABackend
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource

HALVES = {
    *("x_ptr", "weight_ptr", "bias_ptr", "q_ptr", "k_ptr", "v_ptr", "out_ptr", "cache_ptr"),
    *("residual_ptr", "memory_ptr", "product_ptr", "further_ptr", "qkv_ptr", "k_cache_ptr"),
    *("v_cache_ptr", "q_norm_ptr", "k_norm_ptr", "logits_ptr", "gates_ptr", "xbc_ptr", "dt_ptr"),
    *("gate_ptr", "targets_ptr", "readers_ptr", "queries_ptr", "keys_ptr", "alike_ptr"),
    "shrunk_ptr",
}
FLOATS = {
    *("partial_ptr", "state_ptr", "lse_ptr", "cos_sin_ptr", "wide_ptr", "values_ptr"),
    *("row_max_ptr", "normaliser_ptr", "top_p_ptr", "min_p_ptr", "temperature_ptr"),
    *("block_max_ptr", "weights_ptr", "scale_ptr", "x_scale_ptr", "static_ptr"),
    *("made_ptr", "decay_ptr", "dt_bias_ptr", "fades_ptr", "heads_ptr"),
}
CODES = {"code_ptr", "x_code_ptr"}
SHORTS = {"plane_ptr"}
LONGS = {
    *("positions_ptr", "slots_ptr", "token_ids_ptr", "rows_ptr", "seq_lens_ptr", "new_pages_ptr"),
    *("last_token_ptr", "latest_input_ptr", "input_ids_ptr", "turn_ptr", "kept_ptr", "wanted_ptr"),
    *("cut_ties_ptr", "ranked_ptr", "ids_ptr"),
}
NUMBERS = {"scale_log2": "fp32", "eps": "fp32", "scale": "fp32"}
EVEN = {
    *("q_stride", "in_features", "out_features", "width", "max_pages", "stride", "half"),
    *("slot_stride", "rank_stride"),
}


class _FoundError(Exception):
    """Ends a compilation with the result, before the assembler runs, which is slow."""


@contextmanager
def _stopping(stage: str) -> Iterator[None]:
    """End a compilation with `_FoundError` in a stage of Triton's compiler.

    In "llir" this is when the shared memory is laid out, early in the stage. In "ptx" it is at the
    end of the stage.
    """
    add_stages = CUDABackend.add_stages
    passes = nvidia.passes.ttnvgpuir
    allocate = passes.add_allocate_tensor_memory
    lowered: list[Any] = []

    def allocate_and_stop(manager: Any) -> None:
        allocate(manager)
        manager.run(lowered[-1], "make_llir")
        raise _FoundError(lowered[-1].get_int_attr("ttg.shared"))

    def add_and_stop(self: Any, stages: dict[str, Any], *rest: Any) -> None:
        add_stages(self, stages, *rest)
        make = stages[stage]

        def last(code: Any, metadata: dict[str, Any]) -> None:
            lowered.append(code)
            raise _FoundError(make(code, metadata))

        stages[stage] = last

    with mock.patch.object(CUDABackend, "add_stages", add_and_stop), ExitStack() as stack:
        if stage == "llir":
            stack.enter_context(
                mock.patch.object(passes, "add_allocate_tensor_memory", allocate_and_stop)
            )
        yield


def compiled(
    kernel: Any, constants: dict[str, Any], warps: int, capability: int, stage: str
) -> Any:
    """Return a kernel's shared memory in bytes if `stage` is "llir", its code if it is "ptx"."""
    types: dict[str, str] = {}
    # Only a product of E4M3 matrices has scales for its input.
    codes = CODES | ({"x_ptr", "weight_ptr"} if constants.get("HAS_X_SCALES") else set())
    for name in kernel.arg_names:
        if name in constants:
            types[name] = "constexpr"
        elif name.endswith("_ptr"):
            halves, floats = name in HALVES, name in FLOATS
            kind = "bf16" if halves else "fp32" if floats else "i64" if name in LONGS else "i32"
            kind = "fp8e4nv" if name in codes else "i16" if name in SHORTS else kind
            types[name] = f"*{kind}"
        else:
            types[name] = NUMBERS.get(name, "i32")
    aligned = {
        (at,): [["tt.divisibility", 16]]
        for at, name in enumerate(types)
        if name.endswith("_ptr") or name in EVEN
    }
    values = {(at,): constants[name] for at, name in enumerate(types) if name in constants}
    kind_of_source = GluonASTSource if kernel.is_gluon() else ASTSource
    source = kind_of_source(fn=kernel, signature=types, constexprs=values, attrs=aligned)
    options = {"num_warps": warps, "launch_pdl": bool(constants.get("PDL"))}
    try:
        # Triton's cache is bypassed; otherwise an earlier result would be loaded from disk.
        with triton.knobs.compilation.scope(), _stopping(stage):
            triton.knobs.compilation.always_compile = True
            triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    except _FoundError as found:
        return found.args[0]
    raise AssertionError("nothing was compiled")
