"""Finds the experts that a checkpoint stores in MXFP4. Imports no torch.

A tensor of all experts would be `[num_experts, in, out]` in 16 bits. In MXFP4 it is stored as two
tensors. `_blocks` is `[num_experts, out, in / 32, 16]` bytes of two codes each, the first code in
the lower bits. `_scales` is `[num_experts, out, in / 32]` bytes, each an exponent plus 127.

Source: the `mxfp4` integration of `transformers`; OCP Microscaling Formats specification 1.0.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from runtime.checkpoint.model_spec import Quantization, WeightSpec
from runtime.errors import StartupError
from runtime.models.quantization.module_lists import Modules, read_modules, stored_tensors

GROUP = 32
BYTES = ("U8",)


@dataclass(frozen=True)
class Mxfp4Quantization(Quantization):
    """A quantization whose experts are in MXFP4.

    Attributes:
        ignored: modules that stay in 16 bits.
        stored: names of all tensors; `None` if there are no weight files.
    """

    ignored: Modules = field(default_factory=Modules)
    stored: frozenset[str] | None = None
    method: str = "mxfp4"

    def is_in_codes(self, weight: WeightSpec) -> bool:
        """Whether `weight` is stored in MXFP4. Only a tensor of all experts can be."""
        if weight.kind != "matrix" or len(weight.shape) != 3 or ".experts." not in weight.target:
            return False
        if self.stored is None:
            return weight.name not in self.ignored
        return f"{weight.name}_blocks" in self.stored

    def expand(self, weight: WeightSpec) -> Sequence[WeightSpec]:
        """Return the tensors in which a weight is stored, blocks and scales; see `Quantization`.

        Raises:
            StartupError: a row is not a whole number of blocks; the message is one line.
        """
        if not self.is_in_codes(weight):
            return (weight,)
        count, columns, rows = weight.shape
        if columns % GROUP:
            raise StartupError(
                f"{weight.name} cannot be stored in mxfp4: {columns} columns in blocks of {GROUP}"
            )
        blocks, shape = f"{weight.name}_blocks", (count, rows, columns // GROUP)
        return (
            replace(weight, name=blocks, shape=(*shape, GROUP // 2), dtypes=BYTES),
            WeightSpec(
                f"{weight.name}_scales",
                shape,
                f"{weight.target}_scale",
                weight.shard,
                "scale",
                BYTES,
                of=blocks,
            ),
        )

    def kept_bytes(self, weight: WeightSpec, itemsize: int, device: str) -> int:
        """Return the bytes that a weight takes on the device; see `Quantization`.

        These are codes and scales, except on a GPU whose activations do not have 16 bits.
        """
        count = math.prod(weight.shape)
        if not self.is_in_codes(weight) or (device != "cpu" and itemsize != 2):
            return count * itemsize
        return count // 2 + count // GROUP

    def renamed(self, canonical: Callable[[str], str]) -> Mxfp4Quantization:
        """Return the same quantization with `canonical` applied to the tensors' names."""
        if self.stored is None:
            return self
        return replace(self, stored=frozenset(map(canonical, self.stored)))

    @property
    def description(self) -> str:
        """Text for logs: `experts in MXFP4, weights only`."""
        return "experts in MXFP4, weights only"


def read(path: Path, words: Mapping[str, Any]) -> Mxfp4Quantization:
    """Read the `quantization_config` of a gpt-oss checkpoint.

    Args:
        path: path of the model.
        words: the content of `quantization_config`.

    Raises:
        StartupError: `modules_to_not_convert` is not a list of modules; the message is one line.
    """
    infos = stored_tensors(path)
    return Mxfp4Quantization(
        read_modules(path, words, "modules_to_not_convert"),
        None if infos is None else frozenset(infos),
    )
