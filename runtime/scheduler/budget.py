"""Decides how many prompt tokens a step computes, and how long a request's next chunk is."""

from __future__ import annotations

from dataclasses import dataclass

from runtime.requests.image_input import PreparedImage
from runtime.scheduler.image_cache import ImageCache
from runtime.scheduler.request import Request
from runtime.scheduler.step_images import TowerTime, whole_images
from runtime.step.shared_texts import SharedTexts

# What a GPU's matrix units give in practice (an H200's, in bf16; others are within a small factor).
_MATRIX_FLOPS = 600e12
# A stream that waits for a prompt chunk should not wait for longer than this.
_SMOOTH_S = 0.15
_GRAIN = 1024
# While streams decode, the tower may take the budget of a step divided by this.
BESIDE_STREAMS = 4


@dataclass(frozen=True)
class TokenBudget:
    """Bounds on the prompt tokens of one step.

    Attributes:
        alone: the bound while no sequence decodes; `None` for whole prompts.
        beside_streams: the bound while sequences decode. It keeps streams from standing still for
            long, and the requests of a burst get their first tokens one after the other, not in
            large groups. On an H200 at the 8B shape, with 64 requests at a time: with 4096 tokens
            the median first token comes after 285 ms and each next token after 7.9 ms; with 8192
            tokens these times are 463 ms and 7.25 ms.
        shared_grain: whole prompts of a step that share a prefix compute it once, in multiples of
            this many tokens; 0 if each prompt computes all of its tokens.
        splits_prompts: whether a prompt may be computed in several steps. If not, each is computed
            in one step, even if it exceeds the budget.
    """

    alone: int | None
    beside_streams: int | None
    shared_grain: int = 0
    splits_prompts: bool = True

    def of_step(self, num_decodes: int, images: ImageCache | None) -> StepBudget:
        """Return the prompt budget of a step in which `num_decodes` sequences decode."""
        bound = self.beside_streams if num_decodes else self.alone
        num_tokens = 1 << 60 if bound is None else bound
        # Decoding rows count too, but a full batch must not keep prompts out for good.
        num_tokens = max(num_tokens - num_decodes, num_tokens // 4, 1)
        # Streams wait until a whole image is computed, so few images are computed beside them.
        most = num_tokens // BESIDE_STREAMS if num_decodes else num_tokens
        costs = None if self.splits_prompts else TextCosts(self.shared_grain)
        tower = TowerTime(images, most, goes_ahead=num_decodes > 0)
        return StepBudget(num_tokens, tower, costs, _step_tokens(images))


class StepBudget:
    """The prompt tokens that a step has left; decides the length of each request's next chunk."""

    def __init__(
        self,
        num_tokens: int,
        tower: TowerTime,
        costs: TextCosts | None = None,
        image_tokens: int | None = None,
    ) -> None:
        """Begin a step.

        Args:
            num_tokens: prompt tokens and image tokens of the step.
            tower: most image tokens among these that the step may compute.
            costs: costs of whole prompts; `None` if prompts are split.
            image_tokens: number of tokens that fit into the step's memory; `None` if an image may
                be split over steps.
        """
        self._left = num_tokens
        self._tower = tower
        self._costs = costs
        self._image_tokens = image_tokens
        self._num_taken = 0

    @property
    def images_ahead(self) -> list[PreparedImage]:
        """Images that this step computes for a later one."""
        return self._tower.ahead

    @property
    def is_spent(self) -> bool:
        """Whether nothing is left."""
        return self._left <= 0

    def admits(self, request: Request) -> bool:
        """Whether a request may begin in this step: a whole prompt must fit or be the first."""
        if self._costs is None or not self._num_taken:
            return True
        return self._costs.of(request) <= self._left

    def take(self, request: Request, start: int, num_left: int) -> int:
        """Take a request's next chunk out of the budget.

        Args:
            request: the request; it joins the step.
            start: number of the request's computed tokens.
            num_left: number of the request's known tokens that are not computed.

        Returns:
            The chunk's length; 0 if it has to wait for the next step.
        """
        length = num_left
        if self._costs is None:
            length = min(num_left, self._left)
            if self._image_tokens is not None:
                room = self._image_tokens - self._num_taken
                length = whole_images(request, start, length, room)
        length, spent = self._tower.fit(request, start, length, self._left)
        self._left -= spent
        if length:
            self._left -= length if self._costs is None else self._costs.add(request)
            self._num_taken += length
        return length


def _step_tokens(images: ImageCache | None) -> int | None:
    return None if images is None else images.step_tokens


class TextCosts:
    """Counts the tokens of whole texts in a step's budget. A shared prefix counts once."""

    def __init__(self, grain: int) -> None:
        """Start without texts; `grain` is `TextEncoder.shared_grain` of the model."""
        self._texts = SharedTexts(grain) if grain else None
        self._num_saved = 0

    def of(self, request: Request) -> int:
        """Return how many more tokens the step computes if `request` joins it."""
        num_tokens = len(request.tokens)
        if self._texts is None:
            return num_tokens
        # Reports cover every token, so nothing is shared in this step.
        if request.reports:
            return num_tokens + self._num_saved
        return num_tokens - self._texts.num_shared(request.tokens)

    def add(self, request: Request) -> int:
        """Add a request to the step and return its cost, as `of` does."""
        cost = self.of(request)
        if request.reports:
            self._texts = None
        elif self._texts is not None:
            self._num_saved += self._texts.add(request.tokens)
        return cost


def smooth_tokens(num_parameters: int, most: int) -> int:
    """Return how many tokens a GPU computes in 150 milliseconds, at most `most`.

    Args:
        num_parameters: parameters of this rank.
        most: the bound that was set for any step.
    """
    tokens = _SMOOTH_S * _MATRIX_FLOPS / (2 * max(num_parameters, 1))
    return min(-(-int(tokens) // _GRAIN) * _GRAIN, most)
