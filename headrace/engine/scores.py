"""The result of `Engine.score`: a list of lists, with attributes that newer SGLang callers read."""

from __future__ import annotations

from runtime.service.scoring import Scored


class ScoreList(list[list[float]]):
    """For each item a list with one probability for each label.

    Attributes:
        scores: the same numbers as a plain list of lists.
        prompt_tokens: number of prompt tokens of all items together.
    """

    def __init__(self, scored: Scored) -> None:
        """Copy the numbers of `scored`."""
        super().__init__(scored.scores)
        self.scores = scored.scores
        self.prompt_tokens = scored.prompt_tokens
