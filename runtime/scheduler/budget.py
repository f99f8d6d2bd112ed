"""Decides how many prompt tokens a step computes, and how many of them each request gets."""

from __future__ import annotations

from dataclasses import dataclass

from runtime.requests.image_input import PreparedImage
from runtime.scheduler.image_cache import ImageCache
from runtime.scheduler.request import Request
from runtime.scheduler.step_images import TowerTime, whole_images
from runtime.step.shared_texts import SharedTexts

# Throughput that a GPU's matrix units reach in practice: an H200 in bf16. Other GPUs differ by a
# small factor.
_MATRIX_FLOPS = 600e12
# A step with prompt tokens should not delay the streams that decode for longer than this, seconds.
_SMOOTH_S = 0.15
_GRAIN = 1024
# While sequences decode, the image tower may take this fraction of a step's budget: 1 / the value.
BESIDE_STREAMS = 4


@dataclass(frozen=True)
class TokenBudget:
    """Limits on the prompt tokens of one step.

    Attributes:
        alone: the limit while no sequence decodes; `None` computes every prompt whole.
        beside_streams: the limit in a step in which sequences also decode; `None` for no limit. A
            small limit keeps streams from pausing for long, and if many requests arrive together,
            their first tokens come one after the other. Measured on an H200 with an 8B model and 64
            requests at a time: with 4096 tokens the median first token comes after 285 ms, and each
            next token after 7.9 ms. With 8192 tokens these times are 463 ms and 7.25 ms.
        shared_grain: whole prompts of one step that begin with the same tokens compute this
            beginning once. Its length is rounded down to a multiple of this number. With 0, each
            prompt computes all of its tokens.
        splits_prompts: whether a prompt may be computed in several steps (chunked prefill). If not,
            each prompt is computed in one step, even if it exceeds the limit.
    """

    alone: int | None
    beside_streams: int | None
    shared_grain: int = 0
    splits_prompts: bool = True

    def of_step(self, num_decodes: int, images: ImageCache | None) -> StepBudget:
        """Return the budget of a step in which `num_decodes` sequences decode.

        `images` knows which images' vectors are in device memory; it is `None` if the model takes
        no images.
        """
        bound = self.beside_streams if num_decodes else self.alone
        num_tokens = 1 << 60 if bound is None else bound
        # Decoding sequences use up budget too, but a quarter always remains for prompts.
        num_tokens = max(num_tokens - num_decodes, num_tokens // 4, 1)
        # Streams wait until a whole image is computed, so only few images are computed while
        # sequences decode.
        most = num_tokens // BESIDE_STREAMS if num_decodes else num_tokens
        costs = None if self.splits_prompts else TextCosts(self.shared_grain)
        tower = TowerTime(images, most, goes_ahead=num_decodes > 0)
        return StepBudget(num_tokens, tower, costs, _step_tokens(images))


class StepBudget:
    """The remaining budget of one step; decides the length of each request's next prompt chunk."""

    def __init__(
        self,
        num_tokens: int,
        tower: TowerTime,
        costs: TextCosts | None = None,
        image_tokens: int | None = None,
    ) -> None:
        """Start with the whole budget.

        Args:
            num_tokens: number of prompt tokens and image tokens that the step may compute.
            tower: the part of the budget that the image tower may use.
            costs: counts the tokens of whole prompts; `None` if prompts may be split into chunks.
            image_tokens: the most tokens of a step, if the model must compute all tokens of an
                image in one step; `None` if an image may be split over steps.
        """
        self._left = num_tokens
        self._tower = tower
        self._costs = costs
        self._image_tokens = image_tokens
        self._num_taken = 0

    @property
    def images_ahead(self) -> list[PreparedImage]:
        """Images that the tower computes in this step for a chunk of a later step."""
        return self._tower.ahead

    @property
    def is_spent(self) -> bool:
        """Whether the budget is used up."""
        return self._left <= 0

    def admits(self, request: Request) -> bool:
        """Whether the prompt of a waiting request may begin in this step.

        If prompts are not split, the whole prompt must fit into the budget. The first prompt of a
        step is always admitted.
        """
        if self._costs is None or not self._num_taken:
            return True
        return self._costs.of(request) <= self._left

    def take(self, request: Request, start: int, num_left: int) -> int:
        """Subtract a request's next prompt chunk from the budget.

        Args:
            request: the request whose prompt is computed.
            start: number of the request's tokens that are computed already.
            num_left: number of the request's tokens that remain to be computed.

        Returns:
            The length of the chunk in tokens; 0 if the request has to wait for the next step.
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
    """Counts the tokens of whole prompts that a step computes; a common beginning counts once."""

    def __init__(self, grain: int) -> None:
        """Start without prompts; `grain` is `TextEncoder.shared_grain` of the model."""
        self._texts = SharedTexts(grain) if grain else None
        self._num_saved = 0

    def of(self, request: Request) -> int:
        """Return how many more tokens the step computes if `request` joins the step."""
        num_tokens = len(request.tokens)
        if self._texts is None:
            return num_tokens
        # If the request wants output for each prompt token, the step shares no beginnings.
        if request.reports:
            return num_tokens + self._num_saved
        return num_tokens - self._texts.num_shared(request.tokens)

    def add(self, request: Request) -> int:
        """Add a request to the step; return the same cost as `of`."""
        cost = self.of(request)
        if request.reports:
            self._texts = None
        elif self._texts is not None:
            self._num_saved += self._texts.add(request.tokens)
        return cost


def smooth_tokens(num_parameters: int, most: int) -> int:
    """Return the number of tokens that a GPU computes in 150 ms.

    The number is rounded up to a multiple of 1024, and at most `most`.

    Args:
        num_parameters: number of model parameters on this rank.
        most: the configured limit of a step (`--chunked-prefill-size`).
    """
    tokens = _SMOOTH_S * _MATRIX_FLOPS / (2 * max(num_parameters, 1))
    return min(-(-int(tokens) // _GRAIN) * _GRAIN, most)
