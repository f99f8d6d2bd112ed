"""In what numbers a model is computed: their type, and whether products of float32 are rounded."""

from __future__ import annotations

from runtime.checkpoint.model_spec import ModelSpec
from runtime.config.options import ServerConfig
from runtime.launch.automatic import Choices
from runtime.launch.hardware import Hardware

_DTYPES = {"half": "float16", "float": "float32"}


def choose_dtype(
    config: ServerConfig, model: ModelSpec, device: str, hardware: Hardware, choices: Choices
) -> str:
    """The type of weights and activations."""
    asked = config.model.dtype
    if asked != "auto":
        return _DTYPES.get(asked, asked)
    stored = model.dtype
    if device == "cpu":
        if stored == "float32":
            return str(choices.pick("dtype", "float32", "the checkpoint's"))
        if hardware.cpu_has_bf16:
            why = "the checkpoint's" if stored == "bfloat16" else f"for {stored} on this CPU"
            return str(choices.pick("dtype", "bfloat16", f"{why}; it has bfloat16 instructions"))
        return str(choices.pick("dtype", "float32", f"this CPU has no fast {stored}"))
    if stored == "float32":
        return str(choices.pick("dtype", "bfloat16", "GPUs are slow at the checkpoint's float32"))
    return str(choices.pick("dtype", stored, "the checkpoint's"))


def rounds_products(
    config: ServerConfig,
    model: ModelSpec,
    device: str,
    dtype: str,
    hardware: Hardware,
    choices: Choices,
) -> bool:
    """Whether float32 is multiplied as bfloat16; never where the type was asked for by name."""
    wide = device == "cpu" and dtype == "float32" and config.model.dtype == "auto"
    if not wide or model.gives != "vectors" or not hardware.cpu_has_bf16:
        return False
    why = "vectors keep their direction to 1e-4, at twice the speed; not with --dtype float32"
    choices.pick("products", "bfloat16, summed in float32", why)
    return True
