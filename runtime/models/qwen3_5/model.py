"""Qwen3.5 with its tower, which is Qwen3-VL's; the decoder reads features of the last block."""

from __future__ import annotations

from runtime.models.layers.build_context import BuildContext
from runtime.models.qwen3_5.spec import Qwen3_5VLSpec
from runtime.models.qwen3_vl.model import Qwen3VL


class Qwen3_5VL(Qwen3VL):
    """The decoder and its tower."""

    def __init__(self, spec: Qwen3_5VLSpec, context: BuildContext) -> None:
        super().__init__(spec, context)
