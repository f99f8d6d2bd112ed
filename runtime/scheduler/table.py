"""The running batch on the host.

Arrays have one row per request, so steps need no loop over requests.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from runtime.cache.radix_tree import Tokens
from runtime.grammar.grammar_backend import Matcher
from runtime.scheduler.request import GrammarState, Request
from runtime.step.step_plan import Int64Array

# A number larger than any row's number of tokens.
NEVER = 2**62


class RequestTable:
    """Rows of running requests.

    Attributes:
        requests: the request of each row, `None` when free.
        tokens: `[max_rows, max_len]` int32, prompt and known output.
        num_tokens: known tokens of each row.
        num_computed: tokens whose keys and values are written or in flight.
        capacity: number of tokens that the row's pages can hold.
        drops_at: computed tokens at which pages behind the row's window can be freed.
        end_len: number of tokens at which the request is complete.
        sampled_len: tokens known or in flight; at `end_len` no further step is planned.
        ends_at_eos: whether end-of-sequence ids stop the row.
        has_stop_ids: whether the request sets stop ids.
        min_len: number of tokens below which end-of-sequence ids are ignored; 0 for no minimum.
        has_grammar: rows whose output follows a grammar, or whose thoughts are tracked.
        matchers: matchers of those grammars, by row.
        thinks: rows of `has_grammar` whose thoughts are not over.
        is_masked: rows of `has_grammar` whose next token is constrained.
        knows_mask: rows of `has_grammar` whose next mask is kept in `Grammars`.
        may_jump: rows whose tokens need not be sampled where a grammar leaves no alternative: no
            penalty counts them and no extra reports about them.
        is_decoding: rows whose whole prompt is computed.
        state_holds: holds of the rows' recurrent states, if the model has any.
    """

    def __init__(self, max_rows: int, max_len: int) -> None:
        """Make `max_rows` free rows for sequences of at most `max_len` tokens."""
        self.max_rows = max_rows
        self.requests: list[Request | None] = [None] * max_rows
        self.tokens: NDArray[np.int32] = np.zeros((max_rows, max_len), dtype=np.int32)
        self.request_ids: Int64Array = np.zeros(max_rows, dtype=np.int64)
        self.num_tokens: Int64Array = np.zeros(max_rows, dtype=np.int64)
        self.num_computed: Int64Array = np.zeros(max_rows, dtype=np.int64)
        self.capacity: Int64Array = np.zeros(max_rows, dtype=np.int64)
        self.drops_at: Int64Array = np.full(max_rows, NEVER, dtype=np.int64)
        self.end_len: Int64Array = np.zeros(max_rows, dtype=np.int64)
        self.sampled_len: Int64Array = np.zeros(max_rows, dtype=np.int64)
        self.ends_at_eos = np.zeros(max_rows, dtype=bool)
        self.has_stop_ids = np.zeros(max_rows, dtype=bool)
        self.min_len: Int64Array = np.zeros(max_rows, dtype=np.int64)
        self.has_grammar = np.zeros(max_rows, dtype=bool)
        self.matchers: list[Matcher | None] = [None] * max_rows
        self.thinks = np.zeros(max_rows, dtype=bool)
        self.is_masked = np.zeros(max_rows, dtype=bool)
        self.knows_mask = np.zeros(max_rows, dtype=bool)
        self.may_jump = np.zeros(max_rows, dtype=bool)
        self.is_decoding = np.zeros(max_rows, dtype=bool)
        self.state_holds: Int64Array = np.full(max_rows, -1, dtype=np.int64)
        self._free = list(range(max_rows - 1, -1, -1))
        # Rows in order of admission: the newest is retracted first.
        self.order: list[int] = []

    @property
    def num_running(self) -> int:
        """Rows in use."""
        return len(self.order)

    @property
    def has_free_row(self) -> bool:
        """Whether another request can run."""
        return bool(self._free)

    def join(self, request: Request) -> int:
        """Give `request` a row and copy its tokens there."""
        row = self._free.pop()
        # This comes first, so that `leave` can undo a failed join.
        self.order.append(row)
        self.requests[row] = request
        request.row = row
        num_tokens = len(request.tokens)
        self.request_ids[row] = request.request_id
        self.tokens[row, :num_tokens] = request.tokens
        self.num_tokens[row] = num_tokens
        self.sampled_len[row] = num_tokens
        self.num_computed[row] = request.num_computed
        self.state_holds[row] = request.block_table.state_hold
        self.capacity[row] = 0
        self.drops_at[row] = 0
        self.end_len[row] = request.end_len
        self.ends_at_eos[row] = not request.sampling.ignore_eos
        self.has_stop_ids[row] = (
            bool(request.sampling.stop_token_ids) and not request.sampling.ignore_eos
        )
        least = request.sampling.min_new_tokens
        self.min_len[row] = request.num_prompt + least if least else 0
        grammar = request.grammar
        self.matchers[row] = None if grammar is None else grammar.matcher
        self.set_grammar(row, grammar)
        self.knows_mask[row] = False
        self.may_jump[row] = not (request.sampling.has_penalties or request.reports_outputs)
        self.is_decoding[row] = False
        return row

    def leave(self, request: Request) -> None:
        """Take the row back; the request keeps its tokens."""
        row = request.row
        request.tokens = self.known_tokens(row).copy()
        self.requests[row] = None
        self.request_ids[row] = 0
        self.drops_at[row] = NEVER
        self.is_decoding[row] = False
        self.set_grammar(row, None)
        self.matchers[row] = None
        self.order.remove(row)
        self._free.append(row)
        request.row = -1

    def set_grammar(self, row: int, grammar: GrammarState | None) -> None:
        """Update the grammar state of a row."""
        self.has_grammar[row] = grammar is not None and not grammar.is_done
        self.thinks[row] = grammar is not None and grammar.thinks
        self.is_masked[row] = grammar is not None and grammar.is_active

    def known_tokens(self, row: int) -> Tokens:
        """Return prompt and known output of a row, as a view."""
        return self.tokens[row, : self.num_tokens[row]]

    def request(self, row: int) -> Request:
        """Return the request of a row in use."""
        request = self.requests[row]
        assert request is not None, "the row is free"
        return request

    def running(self) -> list[Request]:
        """Return all running requests in order of admission."""
        return [self.request(row) for row in self.order]
