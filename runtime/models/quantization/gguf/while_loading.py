"""Encodes floats in GGUF's forms while they load. Imports no torch.

`--quantization` requests this with `q8_0` or `q4_k`. `q4_k` mixes types as llama.cpp's Q4_K_M does:
the head, and the value and down projections of half of the layers, get 6 bits, because their errors
matter most.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from runtime.checkpoint.gguf.types import BLOCK_TYPES
from runtime.checkpoint.headers import read_tensor_infos
from runtime.checkpoint.model_spec import ModelSpec, WeightSpec
from runtime.errors import StartupError
from runtime.models.quantization.gguf.front import StoredForms

# Targets of the matrices that become blocks: those of a decoder's layers, the embeddings and the
# head. Vision towers and the heads of embedders and classifiers stay in floats.
_LAYER = re.compile(r"model\.layers\.(\d+)\.")
_OF_TOKENS = (
    "model.embed_tokens.weight",
    "model.embed_tokens_per_layer.weight",
    "lm_head.weight",
)
# Matrices that route tokens to experts stay in floats: they are small and their errors matter.
_CHOOSES = re.compile(r"\.(router|shared_gate)\.\w+$")
# The type that replaces another if a row does not fill whole blocks, as in llama.cpp.
_NARROWER = {"Q4_K": "Q5_0", "Q6_K": "Q8_0", "Q5_0": "F32", "Q8_0": "F32"}


@dataclass(frozen=True)
class BlocksWhileLoading(StoredForms):
    """A quantization that encodes matrices of floats as blocks while they load.

    Attributes:
        name: `q8_0` or `q4_k`.
        num_layers: layers of the decoder.
    """

    name: str
    num_layers: int

    def form(self, weight: WeightSpec) -> str:
        """Return the type that a weight gets; see `StoredForms`."""
        if weight.kind != "matrix" or len(weight.shape) != 2 or _CHOOSES.search(weight.target):
            return "F32"
        wanted = self._wanted(weight)
        while wanted in BLOCK_TYPES and weight.shape[1] % BLOCK_TYPES[wanted].block:
            wanted = _NARROWER[wanted]
        return wanted

    def _wanted(self, weight: WeightSpec) -> str:
        layer = _LAYER.match(weight.target)
        if layer is None and weight.target not in _OF_TOKENS:
            return "F32"
        if self.name == "q8_0":
            return "Q8_0"
        if layer is None or (_is_sensitive(weight) and self._gets_more(int(layer[1]))):
            return "Q6_K"
        return "Q4_K"

    def _gets_more(self, layer_idx: int) -> bool:
        """Whether a layer's sensitive matrices get 6 bits, as in `use_more_bits` of llama.cpp."""
        eighth = self.num_layers // 8
        is_end = layer_idx < eighth or layer_idx >= 7 * self.num_layers // 8
        return is_end or (layer_idx - eighth) % 3 == 2

    @property
    def description(self) -> str:
        """Text for logs, such as `floats, Q8_0 once loaded`."""
        mixed = ", some of it in Q6_K" if self.name == "q4_k" else ""
        return f"floats, {self.name.upper()} once loaded{mixed}"


def _is_sensitive(weight: WeightSpec) -> bool:
    return weight.shard == "v" or re.search(r"(\.|_)down(_proj)?\b", weight.target) is not None


@dataclass(frozen=True)
class SameWhileLoaded(StoredForms):
    """A quantization that keeps matrices in 16 bits although activations are in float32.

    Products of 16-bit weights with float32 activations are exact in float32, so this changes only
    memory and speed.

    Attributes:
        stored: types of the files' tensors by name; empty if there are no files.
        others: type of the matrices that `stored` does not name.
    """

    stored: Mapping[str, str]
    others: str

    def form(self, weight: WeightSpec) -> str:
        """Return the stored type of a matrix; see `StoredForms`."""
        # Encoders read embeddings as plain tensors, not as the matrix of a product.
        is_product = "embeddings." not in weight.target
        if weight.kind != "matrix" or len(weight.shape) != 2 or not is_product:
            return "F32"
        found = self.stored.get(weight.name, self.others)
        return found if found in ("F16", "BF16") else "F32"

    def renamed(self, canonical: Callable[[str], str]) -> SameWhileLoaded:
        """Return the same quantization with `canonical` applied to the tensors' names."""
        return replace(self, stored={canonical(name): kind for name, kind in self.stored.items()})

    @property
    def description(self) -> str:
        """Text for logs, such as `bf16`."""
        return self.others.lower()


def q8_0(path: Path, spec: ModelSpec) -> BlocksWhileLoading:  # noqa: ARG001  # of any files
    """Return the quantization of `--quantization q8_0`, which encodes floats while they load."""
    return BlocksWhileLoading("q8_0", len(spec.layer_states))


def q4_k(path: Path, spec: ModelSpec) -> BlocksWhileLoading:  # noqa: ARG001  # of any files
    """Return the quantization of `--quantization q4_k`, which encodes floats while they load."""
    return BlocksWhileLoading("q4_k", len(spec.layer_states))


def same(path: Path, spec: ModelSpec) -> SameWhileLoaded:
    """Return the quantization that keeps the files' dtypes; without files, the spec's dtype."""
    try:
        infos = read_tensor_infos(path if path.is_dir() else path.parent)
    except (StartupError, OSError):
        infos = {}
    others = {"bfloat16": "BF16", "float16": "F16"}.get(spec.dtype, "F32")
    return SameWhileLoaded({name: info.dtype for name, info in infos.items()}, others)
