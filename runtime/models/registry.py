"""Architectures: where each one's `config.json` is read, and which class runs it. Front-safe.

One line an architecture; the modules are imported on use, so that the front never imports torch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from runtime.checkpoint.config_keys import read_architecture, read_config
from runtime.checkpoint.json_file import Keys
from runtime.checkpoint.model_spec import ModelSpec
from runtime.checkpoint.pooling_config import read_pooling
from runtime.config.registry import load_object
from runtime.errors import StartupError

if TYPE_CHECKING:
    from runtime.models.model import Model

_DECODER = "runtime.models.decoder.model:DecoderForCausalLM"


@dataclass(frozen=True)
class Family:
    """String paths of what an architecture is made of.

    Attributes:
        spec: `(config, generation) -> ModelSpec`; front-safe.
        model: class, made from a spec and a `BuildContext`; needs torch.
    """

    spec: str
    model: str


FAMILIES: dict[str, Family] = {
    "Gemma3ForCausalLM": Family("runtime.models.gemma3.spec:read", _DECODER),
    "LlamaForCausalLM": Family("runtime.models.llama.spec:read", _DECODER),
    "MistralForCausalLM": Family("runtime.models.mistral.spec:read", _DECODER),
    "BertModel": Family("runtime.models.bert.spec:read", "runtime.models.bert.model:BertModel"),
    "Qwen2ForCausalLM": Family("runtime.models.qwen2.spec:read", _DECODER),
    "Qwen3ForCausalLM": Family("runtime.models.qwen3.spec:read", _DECODER),
}


def read_model_spec(folder: Path, overrides: dict[str, Any] | None = None) -> ModelSpec:
    """Read what a model folder says about its model.

    Args:
        folder: local, with `config.json` and perhaps `generation_config.json`; or the file that
            stands for the first, the second beside it.
        overrides: top-level keys that replace those of `config.json`.

    Raises:
        StartupError: no such file, an unsupported architecture or feature, a number that is
            missing or absurd; one line that names the key.
    """
    config, generation = read_config(folder, overrides)
    family = _find(read_architecture(config), brings_code="auto_map" in config.values)
    read = cast("Callable[[Keys, Keys], ModelSpec]", load_object(family.spec))
    spec = read(config, generation)
    if spec.gives == "vectors":
        return replace(spec, pooling=read_pooling(folder, spec.pooling.mode))
    return spec


def model_class(spec: ModelSpec) -> type[Model]:
    """The class that runs the model that `spec` describes."""
    return cast("type[Model]", load_object(FAMILIES[spec.architecture].model))


def _find(architecture: str, *, brings_code: bool) -> Family:
    if architecture in FAMILIES:
        return FAMILIES[architecture]
    near = get_close_matches(architecture, FAMILIES, n=1)
    hint = f" Did you mean {near[0]}?" if near else ""
    code = " Code that comes with a model is never run." if brings_code else ""
    raise StartupError(
        f"Architecture {architecture!r} is not supported.{hint}{code}"
        f" Supported: {', '.join(FAMILIES)}."
    )
