"""Thoughts that an output begins with: where they end, and how they are ended."""

from __future__ import annotations

from collections.abc import Sequence

from runtime.requests.sampling_params import ThinkingSpec

# Tokens that may come before thoughts begin: some models write a line break there.
MAX_BEFORE = 4


class Thinking:
    """Follows the thoughts of one output.

    Attributes:
        open_id: the token that may begin them here and now; `None` where none may.
        is_over: there are no more.
        forced: tokens that must come next, in their order.
        cut_ids: tokens of the answer that may end them.
    """

    def __init__(self, spec: ThinkingSpec, *, has_grammar: bool) -> None:
        """Begin an output; with `has_grammar` the answer follows one."""
        self._spec = spec
        self._has_grammar = has_grammar
        self._num_tokens = 0
        # As many of the last tokens as one of the sequences is long.
        self._last: list[int] = []
        self.open_id = spec.open_id
        self.is_over = False
        self.forced: list[int] = []
        self.cut_ids = frozenset(spec.cut_ids)
        if self.open_id is None:
            self._check_budget()

    @property
    def may_be_cut(self) -> bool:
        """Whether the answer may begin in the middle of them."""
        return bool(self.cut_ids) and not self.forced and self.open_id is None

    def cut(self) -> None:
        """The answer has begun without an end of thoughts."""
        self.is_over = True

    def accept(self, token_id: int) -> None:
        """Go on by a token."""
        if self.forced:
            self.forced.pop(0)
            self.is_over = not self.forced
        elif self.open_id is not None:
            self._wait(token_id)
        else:
            self._num_tokens += 1
            longest = max(len(self._spec.end_ids), len(self._spec.forced_ids))
            self._last = [*self._last, token_id][-longest:]
            if _ends_with(self._last, self._spec.end_ids):
                self.forced = list(self._spec.bridge_ids) if self._has_grammar else []
                self.is_over = not self.forced
            else:
                self._check_budget()

    def _wait(self, token_id: int) -> None:
        self._num_tokens += 1
        if token_id == self.open_id:
            self.open_id, self._num_tokens = None, 0
            self._check_budget()
        elif self._has_grammar or self._num_tokens == MAX_BEFORE:
            # The answer has begun.
            self.open_id, self.is_over = None, True

    def _check_budget(self) -> None:
        budget = self._spec.budget
        if budget is not None and self._num_tokens >= budget:
            # What the model has begun by itself is not written twice.
            end = self._spec.forced_ids
            begun = next(n for n in range(len(end) - 1, -1, -1) if _ends_with(self._last, end[:n]))
            self.forced = end[begun:]


def _ends_with(tokens: Sequence[int], wanted: Sequence[int]) -> bool:
    return list(tokens[len(tokens) - len(wanted) :]) == list(wanted)
