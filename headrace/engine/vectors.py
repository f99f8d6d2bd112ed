"""Vectors of texts, from a model that gives them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from headrace.engine.core import EngineCore
from headrace.engine.on_loop import awaited, waiting
from runtime.service.text_embeddings import describe, embed


class VectorMethods:
    """The part of the engine for models that give vectors."""

    _core: EngineCore

    @waiting
    async def encode(
        self,
        prompt: str | Sequence[str] | Sequence[Sequence[int]],
        *,
        rid: str | Sequence[str] | None = None,
        dimensions: int | None = None,
    ) -> dict[str, Any] | list[dict[str, Any]]:
        """The vector of each prompt.

        Args:
            prompt: a text, texts, or lists of token ids.
            rid: names for the requests.
            dimensions: the length of the vectors; only the model's own.

        Returns:
            For a text an object with `embedding`, a list of floats, and `meta_info`; else a list of
            them.

        Raises:
            ValueError: something in the request is wrong, or the model gives no vectors.
            EngineDeadError: a process of the engine died, or the engine was shut down.
        """
        given = [prompt] if isinstance(prompt, str) else prompt
        found = await embed(
            self._core.context,
            [each if isinstance(each, str) else list(each) for each in given],
            rid=rid,
            dimensions=dimensions,
        )
        answers = [describe(each) for each in found]
        return answers[0] if isinstance(prompt, str) else answers

    async_encode = awaited(encode)
