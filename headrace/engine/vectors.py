"""The engine's methods for embedding models, classifiers and reward models."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from headrace.engine.core import EngineCore
from headrace.engine.on_loop import awaited, waiting
from runtime.errors import InvalidRequest
from runtime.service.text_embeddings import TextInput, TextOptions, describe, embed

Prompts = str | Sequence[str] | Sequence[Sequence[int]] | Sequence[Sequence[str]]


class VectorMethods:
    """The methods of `Engine` that return embeddings or scores of texts."""

    _core: EngineCore

    @waiting
    async def encode(
        self,
        prompt: Prompts,
        *,
        rid: str | Sequence[str] | None = None,
        dimensions: int | None = None,
        prompt_name: str | None = None,
    ) -> dict[str, Any] | list[dict[str, Any]]:
        """Return the embedding or the scores of each text.

        Args:
            prompt: a text, texts, lists of token ids, or pairs of texts.
            rid: names for the requests.
            dimensions: length to which embeddings are shortened, if the model supports it.
            prompt_name: name of a prompt of the model's folder that is put before each text.

        Returns:
            For one text an object with `embedding`, a list of floats, and `meta_info`; otherwise a
            list of such objects.

        Raises:
            ValueError: the request is invalid, or the model does not produce vectors.
            EngineDeadError: a process of the engine died, or the engine was shut down.
        """
        options = TextOptions(rid=rid, dimensions=dimensions, prompt_name=prompt_name)
        return await self._encode(prompt, options)

    async_encode = awaited(encode)

    @waiting
    async def rerank(self, prompt: Sequence[Sequence[str]]) -> list[dict[str, Any]]:
        """Return scores for pairs of a query and a document; needs a model that compares texts.

        Args:
            prompt: the pairs of query and document.

        Returns:
            For each pair an object whose `embedding` holds its scores, and `meta_info`.

        Raises:
            ValueError: the request is invalid, or the model does not compare texts.
            EngineDeadError: a process of the engine died, or the engine was shut down.
        """
        found = await self._encode([list(pair) for pair in prompt], TextOptions())
        assert isinstance(found, list), "pairs are several prompts"
        return found

    async_rerank = awaited(rerank)

    async def _encode(
        self, prompt: Prompts, options: TextOptions
    ) -> dict[str, Any] | list[dict[str, Any]]:
        given = [prompt] if isinstance(prompt, str) else prompt
        texts = [_text_input(each) for each in given]
        found = await embed(self._core.context, texts, options)
        answers = [describe(each) for each in found]
        return answers[0] if isinstance(prompt, str) else answers


def _text_input(given: str | Sequence[int] | Sequence[str]) -> TextInput:
    if isinstance(given, str):
        return given
    texts = [each for each in given if isinstance(each, str)]
    if not texts:
        return [each for each in given if not isinstance(each, str)]
    if len(texts) != len(given) or len(texts) != 2:  # a query and a document
        raise InvalidRequest("A prompt must be a text, token ids, or a pair of texts.")
    return texts[0], texts[1]
