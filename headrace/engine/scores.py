"""The result of `Engine.score`: a list of lists with the attributes that newer callers read."""

from __future__ import annotations

from runtime.service.scoring import Scored


class ScoreList(list[list[float]]):
    """One list for each item, one probability for each label.

    Attributes:
        scores: the same numbers, as a plain list.
        prompt_tokens: total over all items.
    """

    def __init__(self, scored: Scored) -> None:
        """Hold the numbers of `scored`."""
        super().__init__(scored.scores)
        self.scores = scored.scores
        self.prompt_tokens = scored.prompt_tokens
