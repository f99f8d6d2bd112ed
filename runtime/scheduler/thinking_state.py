"""Follows the thoughts (reasoning) that begin an output; ends them when their budget is used up."""

from __future__ import annotations

from collections.abc import Sequence

from runtime.requests.sampling_params import ThinkingSpec

# Most tokens before the thoughts of an output begin: some models write a line break first.
MAX_BEFORE = 4


class Thinking:
    """Follows the thoughts of one output, token by token.

    Thoughts are the reasoning that a model writes before its answer, usually between two markers.

    Attributes:
        is_over: whether the thoughts have ended, or the output has none.
    """

    def __init__(self, spec: ThinkingSpec, *, has_grammar: bool) -> None:
        """Start before the first token; `has_grammar` says whether the answer has a grammar."""
        self._spec = spec
        self._has_grammar = has_grammar
        self._num_tokens = 0
        # The latest tokens, as many as are needed to recognize the longest ending of thoughts.
        self._last: list[int] = []
        # The token sequences with which the output may begin, and the part of one of them that was
        # generated so far. Both lists are empty once thoughts have begun.
        self._openings = [each for each in (spec.open_ids, spec.lead_ids) if each]
        self._begun: list[int] = []
        self._forced: list[int] = []
        own = frozenset(spec.implied_ids)
        # Tokens that imply the end of thoughts. `_implied` are those that lead to the answer,
        # `_answers` those with which an answer under a grammar begins.
        self._implied = own & frozenset(spec.bridge_ids) if has_grammar else own
        self._answers = own - self._implied
        self.is_over = False
        if not self._openings:
            self._check_budget()

    @property
    def next_ids(self) -> list[int]:
        """Token ids, one of which must come next; empty if any token may come."""
        if self._forced:
            return self._forced[:1]
        if not self._has_grammar:
            return []
        num_begun = len(self._begun)
        return [each[num_begun] for each in self._openings if each[:num_begun] == self._begun]

    @property
    def may_answer(self) -> bool:
        """Whether an answer under a grammar may begin now, instead of one of `next_ids`."""
        if self.is_over:
            return True
        waits = bool(self._openings) and not self._begun
        return waits and self._has_grammar and not self._spec.lead_ids

    def may_be_ended_by(self, token_id: int) -> bool:
        """Whether `token_id`, generated within thoughts, may be the first of the answer."""
        return token_id in self._answers and not self._forced and not self._openings

    def end(self) -> None:
        """End the thoughts: the answer has begun."""
        self._openings, self.is_over = [], True

    def accept(self, token_id: int) -> bool:
        """Advance by one token of the output.

        Returns:
            Whether the token shows that the output has no thoughts: it is the first of the answer.
        """
        if self._forced:
            self._forced.pop(0)
            self.is_over = not self._forced
        elif self._openings:
            return self._wait(token_id)
        else:
            self._think(token_id)
        return False

    def _think(self, token_id: int) -> None:
        spec = self._spec
        self._num_tokens += 1
        longest = max(len(spec.end_ids), len(spec.forced_ids))
        self._last = [*self._last, token_id][-longest:]
        is_implied = token_id in self._implied
        if not is_implied and not _ends_with(self._last, spec.end_ids):
            self._check_budget()
            return
        if self._has_grammar:
            # If the token is itself a part of the bridge to the answer, the bridge continues after
            # it.
            begun = spec.bridge_ids.index(token_id) + 1 if is_implied else 0
            self._forced = spec.bridge_ids[begun:]
        self.is_over = not self._forced

    def _wait(self, token_id: int) -> bool:
        self._begun = [*self._begun, token_id]
        if self._begun == self._spec.open_ids:
            self._openings = []
            self._num_tokens = 0
            self._check_budget()
        elif self._begun == self._spec.lead_ids:
            self.end()
        elif not any(each[: len(self._begun)] == self._begun for each in self._openings):
            self._num_tokens += len(self._begun)
            self._begun = []
            if self._has_grammar or self._num_tokens >= MAX_BEFORE:
                self.end()
                return self._has_grammar
        return False

    def _check_budget(self) -> None:
        budget = self._spec.budget
        if budget is not None and self._num_tokens >= budget:
            # The model may have written the first tokens of the ending already.
            end = self._spec.forced_ids
            begun = next(n for n in range(len(end) - 1, -1, -1) if _ends_with(self._last, end[:n]))
            self._forced = end[begun:]


def _ends_with(tokens: Sequence[int], wanted: Sequence[int]) -> bool:
    return list(tokens[len(tokens) - len(wanted) :]) == list(wanted)
