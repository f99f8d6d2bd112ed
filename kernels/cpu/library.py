"""The ctypes binding of the C++ library, which is loaded once per process on first use.

Calls release the GIL. Every function takes raw addresses and 64-bit sizes; the calling modules
check shapes and dtypes first.
"""

import ctypes
import logging
from functools import cache
from pathlib import Path

import torch

from kernels.cpu.build import BuildError, build, insist
from kernels.kv_forms import KV_FORMS

logger = logging.getLogger(__name__)

DTYPES = (torch.bfloat16, torch.float32)
# Values of `Kept` in kernels/cpu/kept.h, by the dtype of a KV cache.
_KEPT = {form.dtype: number for number, form in enumerate(KV_FORMS.values())}
# Keys and values in a form other than the model's dtype are converted in vectors of this length.
_VECTOR = 16

_POINTER = ctypes.c_void_p
_SIZE = ctypes.c_int64
_REAL = ctypes.c_double

SIGNATURES: dict[str, tuple[type, ...]] = {
    "hr_rms_norm": (_SIZE, *[_POINTER] * 4, _SIZE, _SIZE, _REAL, _SIZE, _SIZE),
    "hr_layer_norm": (_SIZE, *[_POINTER] * 5, _SIZE, _SIZE, _REAL, _SIZE),
    "hr_act_and_mul": (_SIZE, _SIZE, _POINTER, _POINTER, _SIZE, _SIZE, _SIZE),
    "hr_sigmoid_mul": (_SIZE, _POINTER, _SIZE, _SIZE, _POINTER, _POINTER, *[_SIZE] * 3),
    "hr_causal_conv": (*(_SIZE, _POINTER, _SIZE, *[_POINTER] * 7, *[_SIZE] * 6),),
    "hr_rope_kv_write": (
        *(_SIZE, _SIZE, _POINTER, *[_SIZE] * 4, *[_POINTER] * 5),
        *(_SIZE, _POINTER, _POINTER, _REAL, _SIZE, _SIZE),
    ),
    "hr_kv_write": (_POINTER, *[_SIZE] * 3, _POINTER, _SIZE, _POINTER, *[_SIZE] * 4),
    "hr_paged_attention": (
        *(_SIZE, _SIZE, _POINTER, _SIZE, *[_POINTER] * 3, _SIZE, _POINTER, _POINTER),
        *(*[_SIZE] * 5, _REAL, _SIZE, _POINTER, _REAL, _POINTER, _POINTER, _SIZE),
    ),
    "hr_encoder_attention": (
        *(_SIZE, _POINTER, _POINTER, *[_SIZE] * 4, _REAL, _SIZE, _POINTER, _SIZE),
    ),
    "hr_linear_pack": (_SIZE, _POINTER, _POINTER, _SIZE, _SIZE, _SIZE),
    "hr_linear_unpack": (_SIZE, _POINTER, _POINTER, _SIZE, _SIZE, _SIZE),
    "hr_linear": (_SIZE, *[_POINTER] * 4, *[_SIZE] * 5),
    "hr_stored_pack": (_SIZE, _POINTER, _POINTER, _SIZE, _SIZE, _SIZE),
    "hr_stored_unpack": (_SIZE, _POINTER, _POINTER, _SIZE, _SIZE, _SIZE),
    "hr_stored_look_up": (_SIZE, _POINTER, _SIZE, _POINTER, _POINTER, *[_SIZE] * 3),
    "hr_stored_rows": (_SIZE, _POINTER, _SIZE, _SIZE, _POINTER, _POINTER, *[_SIZE] * 3),
    "hr_stored_linear": (_SIZE, _POINTER, _POINTER, _SIZE, _POINTER, _POINTER, *[_SIZE] * 4),
    "hr_lora_add": (
        *(_SIZE, _POINTER, _POINTER, _POINTER, _SIZE, _SIZE, _POINTER, _POINTER, _POINTER),
        *[_SIZE] * 6,
    ),
    "hr_mamba2": (*(_SIZE, _POINTER, _POINTER, _SIZE, *[_POINTER] * 8, *[_SIZE] * 7),),
    "hr_gated_delta": (*(_SIZE, _POINTER, _POINTER, _SIZE, *[_POINTER] * 9, *[_SIZE] * 8),),
    "hr_token_bitmask": (*[_POINTER] * 3, *[_SIZE] * 5),
    "hr_best_tokens": (*[_POINTER] * 4, *[_SIZE] * 6),
    "hr_repeat_calls": (_POINTER, _SIZE),
}

# The functions whose calls `kernels.cpu.recording` can record: those with an `HR_RECORDABLE` line.
RECORDABLE = (
    "hr_rms_norm",
    "hr_layer_norm",
    "hr_act_and_mul",
    "hr_sigmoid_mul",
    "hr_rope_kv_write",
    "hr_kv_write",
    "hr_paged_attention",
    "hr_linear",
    "hr_stored_rows",
    "hr_stored_look_up",
    "hr_stored_linear",
    "hr_lora_add",
)

# Functions with a result: the type of the result, then the types of the arguments.
_RESULTS: dict[str, tuple[type, ...]] = {
    "hr_panel_columns": (_SIZE,),
    "hr_stored_panel_bytes": (_SIZE, _SIZE, _SIZE),
    "hr_dots_name": (ctypes.c_char_p,),
}


def kept_number(cache: torch.dtype, dtype: torch.dtype, head_dim: int) -> int | None:
    """Return the library's number for the form in which a KV cache stores keys and values.

    Args:
        cache: dtype of the KV cache.
        dtype: dtype of the model.
        head_dim: elements of a key or value head.

    Returns:
        A value of `Kept` in kernels/cpu/kept.h; `None` if the library does not support this form or
        this `head_dim`.
    """
    if cache is dtype:
        return 0
    return None if head_dim % _VECTOR else _KEPT.get(cache)


@cache
def _load() -> ctypes.CDLL | str:
    """Return the library, or the reason why it is missing, which is logged once."""
    try:
        library = insist(lambda: _bind(build()))
    except (BuildError, OSError) as error:
        logger.warning(
            "No C++ kernels: %s. Plain torch runs instead; expect a fraction of the speed on CPU.",
            error,
        )
        return str(error)
    return library


def _bind(path: Path) -> ctypes.CDLL:
    library = ctypes.CDLL(str(path))
    for name, argtypes in SIGNATURES.items():
        function = getattr(library, name)
        function.argtypes = argtypes
        function.restype = None
    for name, types in _RESULTS.items():
        function = getattr(library, name)
        function.restype, *function.argtypes = types
    return library


def unavailable() -> str | None:
    """Return why the C++ library cannot be used here, or `None`; builds it on first use."""
    loaded = _load()
    return loaded if isinstance(loaded, str) else None


def library() -> ctypes.CDLL:
    """Return the loaded library.

    Raises:
        RuntimeError: the library cannot be built or loaded here.
    """
    loaded = _load()
    if isinstance(loaded, str):
        raise RuntimeError(loaded)
    return loaded
