"""What `Engine.score` gives: a list of lists, which also carries what newer callers read."""

from __future__ import annotations

from runtime.service.scoring import Scored


class ScoreList(list[list[float]]):
    """One list for each item, one probability for each label.

    Attributes:
        scores: the same numbers, as a plain list.
        prompt_tokens: of all items together.
    """

    def __init__(self, scored: Scored) -> None:
        """Hold the numbers of `scored`."""
        super().__init__(scored.scores)
        self.scores = scored.scores
        self.prompt_tokens = scored.prompt_tokens
