"""Answers the prompts of a Ray Data dataset, with engines in Ray's actors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from headrace.engine.engine import Engine


class Answers:
    """A callable for `Dataset.map_batches`, which adds a column of answers.

        dataset.map_batches(
            Answers, fn_constructor_args=({"model_path": "demo-toy"},), concurrency=2, batch_size=64
        )

    Each actor has its own engine, which answers the rows of a batch together.
    """

    def __init__(
        self,
        engine: Mapping[str, Any],
        sampling_params: Mapping[str, Any] | None = None,
        *,
        prompt: str = "prompt",
        answer: str = "answer",
    ) -> None:
        """Start an engine.

        Args:
            engine: keyword arguments of `Engine`.
            sampling_params: sampling parameters of every prompt.
            prompt: name of the column that has the prompts' texts.
            answer: name of the column for the texts that are generated.

        Raises:
            EngineStartError: the engine cannot start.
        """
        self._engine = Engine(**engine)
        self._sampling_params = dict(sampling_params or {})
        self._prompt, self._answer = prompt, answer

    def __call__(self, batch: dict[str, Sequence[Any]]) -> dict[str, Sequence[Any]]:
        """Return a batch of rows with a new column that holds the answers."""
        prompts = [str(each) for each in batch[self._prompt]]
        outputs = self._engine.generate(prompts, self._sampling_params)
        return {**batch, self._answer: [each["text"] for each in outputs]}

    def __del__(self) -> None:
        """End the engine."""
        if hasattr(self, "_engine"):
            self._engine.shutdown()
