"""In what numbers a model is computed: their type, and how float32 is multiplied."""

from __future__ import annotations

from runtime.checkpoint.model_spec import ModelSpec
from runtime.config.options import ServerConfig
from runtime.launch.choices import Choices
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


def choose_matmul_precision(
    config: ServerConfig,
    model: ModelSpec,
    device: str,
    dtype: str,
    hardware: Hardware,
    choices: Choices,
) -> str:
    """How float32 is multiplied: `highest` or `medium`."""
    asked = config.kernels.float32_matmul_precision
    if device != "cpu" or dtype != "float32":
        reason = "medium is for float32 on a CPU" if asked == "medium" else ""
        return str(choices.pick("float32_matmul_precision", "highest", reason))
    if asked != "auto":
        return asked
    if model.gives != "vectors" or config.model.dtype != "auto" or not hardware.cpu_has_bf16:
        return "highest"
    why = "vectors keep their direction to 1e-4, at twice the speed"
    return str(choices.pick("float32_matmul_precision", "medium", why))
