"""Qwen3.5 with images: the tower is Qwen3-VL's, without outputs for the decoder's first layers."""

from __future__ import annotations

from runtime.models.layers.build_context import BuildContext
from runtime.models.qwen3_5.spec import Qwen3_5VLSpec
from runtime.models.qwen3_vl.model import Qwen3VL


class Qwen3_5VL(Qwen3VL):
    """The decoder and its vision tower."""

    def __init__(self, spec: Qwen3_5VLSpec, context: BuildContext) -> None:
        super().__init__(spec, context)
