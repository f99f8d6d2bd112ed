"""The types in which a GGUF file stores its matrices. Imports no torch."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from runtime.checkpoint.gguf.files import is_gguf
from runtime.checkpoint.gguf.tensors import gguf_tensor_infos
from runtime.checkpoint.gguf.types import BLOCK_TYPES
from runtime.checkpoint.model_spec import FLOATS, Quantization, WeightSpec
from runtime.errors import StartupError

_FLOAT_BYTES = {"F16": 2, "BF16": 2}


class StoredForms(Quantization):
    """A quantization whose matrices are in forms that GGUF has: blocks, or floats of 16 bits."""

    method = "gguf"

    @abstractmethod
    def form(self, weight: WeightSpec) -> str:
        """Return ggml's name of a weight's type; `F32` for plain numbers of the model's dtype."""

    def expand(self, weight: WeightSpec) -> Sequence[WeightSpec]:
        """Return the tensor in which a matrix is stored, always one; see `Quantization`.

        A matrix that is stored in blocks may be filled with these blocks, or with floats, which are
        then encoded as blocks.
        """
        stored = self.form(weight)
        if stored not in BLOCK_TYPES:
            return (weight,)
        return (replace(weight, dtypes=(stored, *FLOATS)),)

    def kept_bytes(self, weight: WeightSpec, itemsize: int, device: str) -> int:
        """Return the bytes that a matrix takes on the device; see `Quantization`.

        A CPU keeps stored blocks. A GPU keeps plain numbers.
        """
        count = math.prod(weight.shape)
        stored = self.form(weight)
        if stored == "F32" or device != "cpu" or len(weight.shape) != 2:
            return count * itemsize
        if stored in BLOCK_TYPES:
            return weight.shape[0] * BLOCK_TYPES[stored].row_bytes(weight.shape[1])
        return count * min(itemsize, _FLOAT_BYTES[stored])


@dataclass(frozen=True)
class GgufQuantization(StoredForms):
    """The types in which one GGUF file stores its matrices.

    Attributes:
        types: ggml's type of each matrix that is stored in blocks or 16-bit floats, by its name.
    """

    types: Mapping[str, str]

    def form(self, weight: WeightSpec) -> str:
        """Return the type of a weight in the file; see `StoredForms`."""
        return self.types.get(weight.name, "F32")

    @property
    def description(self) -> str:
        """Text for logs, such as `GGUF: 24 matrices in Q4_K`."""
        counts = Counter(self.types.values()).most_common()
        return "GGUF: " + ", ".join(f"{count} matrices in {name}" for name, count in counts)


def read(path: Path, words: Mapping[str, Any]) -> GgufQuantization:  # noqa: ARG001  # the file says all
    """Read the types of the matrices from the file's header.

    Args:
        path: path of the model.
        words: the content of `quantization_config`; not used, as the header holds everything.

    Raises:
        StartupError: the file is not a GGUF file; the message is one line.
    """
    if not is_gguf(path):
        raise StartupError(f"{path}: quant_method 'gguf' is for GGUF files; name the file")
    return GgufQuantization(
        {
            name: info.dtype
            for name, info in gguf_tensor_infos(path).items()
            if len(info.shape) == 2 and (info.dtype in BLOCK_TYPES or info.dtype in _FLOAT_BYTES)
        }
    )
