"""`best_of`: generates more samples than requested, and returns the most probable ones."""

from __future__ import annotations

from collections.abc import Sequence

from runtime.client.generation_stream import GenerationChunk
from runtime.extras.logprobs.positions import outputs_of


class SampleScores:
    """The mean log-probability of each sample's tokens."""

    def __init__(self, num_samples: int) -> None:
        """Begin with empty samples."""
        self._sums = [0.0] * num_samples
        self._counts = [0] * num_samples

    def add(self, index: int, chunk: GenerationChunk) -> None:
        """Add the next chunk of a sample."""
        chosen = outputs_of(chunk).chosen[: len(chunk.token_ids)]
        self._sums[index] += sum(chosen)
        self._counts[index] += len(chosen)

    def best(self, samples: Sequence[int], num: int) -> list[int]:
        """Return the `num` best of `samples`, the best first; equal ones keep their order."""
        return sorted(samples, key=lambda at: -self._sums[at] / max(self._counts[at], 1))[:num]
