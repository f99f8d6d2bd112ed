"""The quantization methods, each with a part for the front process and one for the device.

`METHODS` has one line for each `quant_method` of `config.json`. The modules are imported on use, so
that the front process (the HTTP server) never imports torch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from runtime.checkpoint.json_file import Keys, read_json_object
from runtime.checkpoint.model_spec import ModelSpec, Quantization
from runtime.config.registry import load_object
from runtime.errors import StartupError

if TYPE_CHECKING:
    from runtime.models.quantization.method import DeviceMethod


@dataclass(frozen=True)
class Method:
    """Import paths of the two parts of a method.

    Attributes:
        front: function `(path of the model, quantization_config) -> Quantization`, without torch.
        device: class of the part for the device, made from the `Quantization`; needs torch.
    """

    front: str
    device: str


def _method(folder: str) -> Method:
    package = f"runtime.models.quantization.{folder}"
    return Method(f"{package}.front:read", f"{package}.device:Device")


# The method that keeps weights in 16 bits although activations are in float32. It is chosen at
# start, not by a user.
SAME = "same"
# The key that is added to the keys of `config.json`: the method by which floats are quantized while
# they load.
_WANTED = "quantization"
# The file that holds ModelOpt's keys in older model folders.
_MODELOPT = "hf_quant_config.json"

METHODS: dict[str, Method] = {
    "gguf": _method("gguf"),
    "fp8": _method("fp8"),
    "gptq": _method("groups"),
    "awq": _method("groups"),
    "compressed-tensors": Method(
        "runtime.models.quantization.compressed_tensors:read", "never: `read` is another method's"
    ),
    "modelopt": _method("fp8"),
    "mxfp4": _method("mxfp4"),
    # The value of `Quantization.method` for GPTQ, AWQ and compressed-tensors in groups.
    "groups": _method("groups"),
}

# The methods by which floats are quantized while they load, by name: the path of a function `(path
# of the model, spec) -> Quantization`.
WHILE_LOADING: dict[str, str] = {
    "fp8": "runtime.models.quantization.fp8.front:while_loading",
    "q8_0": "runtime.models.quantization.gguf.while_loading:q8_0",
    "q4_k": "runtime.models.quantization.gguf.while_loading:q4_k",
    SAME: "runtime.models.quantization.gguf.while_loading:same",
}
# The methods for which only a CPU has kernels.
ON_CPU = ("q8_0", "q4_k")


def as_override(name: str | None) -> dict[str, str]:
    """Return the keys that the option `--quantization` adds to `config.json`."""
    return {_WANTED: name} if name not in (None, "none") else {}


def read_quantization(path: Path, config: Keys, spec: ModelSpec) -> Quantization | None:
    """Return how the matrices of a model are stored; `None` for plain numbers.

    Args:
        path: path of the model.
        config: keys of `config.json`. A vision model may have `quantization_config` in
            `text_config`.
        spec: the spec that the family read from `config.json`.

    Raises:
        StartupError: the method is unknown, or refuses the model; the message is one line.
    """
    inner = config.mapping("text_config").get("quantization_config")
    words: dict[str, Any] = config.mapping("quantization_config") or (
        inner if isinstance(inner, dict) else {}
    )
    wanted = config.values.get(_WANTED)
    if not words and (path / _MODELOPT).is_file():
        words = {"quant_method": "modelopt", **read_json_object(path / _MODELOPT)}
    if not words:
        return _while_loading(wanted, path, spec)
    name = words.get("quant_method", "unknown")
    method = METHODS.get(name) if isinstance(name, str) else None
    if method is None:
        raise StartupError(
            f"{config.source}: weights quantized with {name!r} are not supported;"
            " use a bfloat16, float16 or float32 checkpoint, one in fp8, GPTQ, AWQ, MXFP4 or"
            " compressed-tensors, or a GGUF file"
        )
    read = cast("Callable[[Path, dict[str, Any]], Quantization]", load_object(method.front))
    found = read(path, words)
    if wanted in WHILE_LOADING and wanted != SAME and (wanted != "fp8" or found.method != "fp8"):
        raise StartupError(
            f"--quantization {wanted}: {config.source} is quantized with {name!r} already"
        )
    return found


def _while_loading(wanted: object, path: Path, spec: ModelSpec) -> Quantization | None:
    if not isinstance(wanted, str) or wanted not in WHILE_LOADING:
        return None
    make = cast("Callable[[Path, ModelSpec], Quantization]", load_object(WHILE_LOADING[wanted]))
    return make(path, spec)


def device_method(quantization: Quantization) -> DeviceMethod:
    """Return the device part of the method that read `quantization`."""
    make = cast(
        "Callable[[Quantization], DeviceMethod]", load_object(METHODS[quantization.method].device)
    )
    return make(quantization)
