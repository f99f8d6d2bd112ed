"""Which prompts are computed to score several continuations of one prompt, and where each is read.

A token's log-probability is known where the token before it was computed. A continuation's last
token is therefore only asked about, and a continuation whose other tokens begin another one's is
read off that one's prompt: choices of one token each need the prompt alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from runtime.extras.logprobs.positions import LogprobSpec
from runtime.service.prefills import Prefill


@dataclass(slots=True)
class _Run:
    ids: list[int]
    # Ids whose log-probability is asked for at each position; those of last tokens.
    labels: dict[int, int] = field(default_factory=dict)


class ChoicePlan:
    """The prompts to compute for `sequences`."""

    def __init__(self, sequences: Sequence[list[int]], start: int) -> None:
        """Find them.

        Args:
            sequences: token ids, prompt and continuation together.
            start: the first position whose log-probability is wanted; all sequences have the same
                tokens before it.
        """
        self._sequences = sequences
        self._start = start
        # Nothing stands before the first token of all.
        self._first = max(start - 1, 0)
        self._runs: list[_Run] = []
        self._run_of: dict[tuple[int, ...], _Run] = {}
        head = list(sequences[0][:start]) if sequences else []
        contexts = {tuple(each[start:-1]) for each in sequences if self._needs_run(each)}
        # In this order a context is followed by one that it begins, if there is any.
        longest: tuple[int, ...] | None = None
        for context in sorted(contexts, reverse=True):
            if longest is None or longest[: len(context)] != context:
                longest = context
                self._runs.append(_Run([*head, *context]))
            self._run_of[context] = self._runs[-1]
        for each in sequences:
            if self._needs_run(each):
                labels = self._run_of[tuple(each[start:-1])].labels
                labels.setdefault(each[-1], len(labels))

    def _needs_run(self, sequence: list[int]) -> bool:
        return len(sequence) > self._start and len(sequence) > 1

    def prompts(self) -> list[tuple[list[int], LogprobSpec]]:
        """What is computed: token ids, and what is asked about them."""
        asked = []
        for run in self._runs:
            has_inputs = len(run.ids) > self._first + 1
            start_len = self._first if has_inputs else -1
            asked.append((run.ids, LogprobSpec(start_len, token_ids=list(run.labels))))
        return asked

    def read(self, found: Sequence[Prefill]) -> list[list[float | None]]:
        """The log-probability of each sequence's tokens from `start` on.

        Args:
            found: for each of `prompts`, in order.

        Returns:
            A list for each sequence; `None` stands for a token that nothing precedes.
        """
        of_run = {id(run): each for run, each in zip(self._runs, found, strict=True)}
        values: list[list[float | None]] = []
        for sequence in self._sequences:
            if not self._needs_run(sequence):
                values.append([None] * (len(sequence) - self._start))
                continue
            run = self._run_of[tuple(sequence[self._start : -1])]
            prefill = of_run[id(run)]
            unknown: list[float | None] = [None] * (self._start == 0)
            last = len(sequence) - 1
            inside = prefill.inputs.chosen[: last - self._first - 1].tolist()
            at_last = (
                prefill.following.id_values(0)
                if last == len(run.ids)
                else prefill.inputs.id_values(last - self._first - 1)
            )
            values.append([*unknown, *inside, at_last[run.labels[sequence[-1]]]])
        return values
