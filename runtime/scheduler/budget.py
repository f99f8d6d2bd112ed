"""How many prompt tokens a step computes."""

from __future__ import annotations

from dataclasses import dataclass

from runtime.executor.shared_texts import SharedTexts
from runtime.scheduler.request import Request

# What a GPU's matrix units give in practice (an H200's, in bf16; others are within a small factor).
_MATRIX_FLOPS = 600e12
# A stream that waits for a prompt chunk should not wait for longer than this.
_SMOOTH_S = 0.15
_GRAIN = 1024


@dataclass(frozen=True)
class TokenBudget:
    """Prompt tokens of one step.

    Attributes:
        alone: while nobody decodes; `None` for whole prompts.
        beside_streams: while somebody does, so that no stream stands still for long and the first
            tokens of a burst come one after the other, not in large groups. On an H200 at the 8B
            shape, 64 requests at a time: with 4096 tokens the median first token comes after 285
            ms and each next one after 7.9 ms, with 8192 after 463 and 7.25.
        shared_grain: tokens at a time of what whole texts of a step begin with alike and compute
            once; 0 where each computes its own.
    """

    alone: int | None
    beside_streams: int | None
    shared_grain: int = 0

    @classmethod
    def whole_prompts(cls) -> TokenBudget:
        """No bound."""
        return cls(None, None)

    def next(self, num_decodes: int) -> int:
        """Return the bound of a step in which `num_decodes` sequences decode."""
        bound = self.beside_streams if num_decodes else self.alone
        budget = 1 << 60 if bound is None else bound
        # Decoding rows count too, but a full batch must not keep prompts out for good.
        return max(budget - num_decodes, budget // 4, 1)


class TextCosts:
    """What whole texts take of a step's budget: what they begin with alike is computed once."""

    def __init__(self, grain: int) -> None:
        """Nothing yet; `grain` is `TextEncoder.shared_grain` of the model."""
        self._texts = SharedTexts(grain) if grain else None
        self._num_saved = 0

    def of(self, request: Request) -> int:
        """Return how many tokens more the step computes with `request`."""
        num_tokens = len(request.tokens)
        if self._texts is None:
            return num_tokens
        # What is told of its tokens is of all: then nobody shares in this step.
        if request.reports:
            return num_tokens + self._num_saved
        return num_tokens - self._texts.num_shared(request.tokens)

    def add(self, request: Request) -> int:
        """Return what `of` does, of a request that takes part from now on."""
        cost = self.of(request)
        if request.reports:
            self._texts = None
        elif self._texts is not None:
            self._num_saved += self._texts.add(request.tokens)
        return cost


def smooth_tokens(num_parameters: int, most: int) -> int:
    """Return how many tokens a GPU computes in 150 milliseconds, at most `most`.

    Args:
        num_parameters: of this rank.
        most: the bound that was set for any step.
    """
    tokens = _SMOOTH_S * _MATRIX_FLOPS / (2 * max(num_parameters, 1))
    return min(-(-int(tokens) // _GRAIN) * _GRAIN, most)
