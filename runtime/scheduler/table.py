"""The running batch on the host.

Each running request has a row in the arrays, so that a step needs no loop over requests.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from runtime.cache.radix_tree import Tokens
from runtime.grammar.grammar_backend import Matcher
from runtime.scheduler.request import GrammarState, Request
from runtime.step.step_plan import Int64Array

# A token count that no row reaches.
NEVER = 2**62


class RequestTable:
    """The state of all running requests, as arrays with one row for each request.

    The attributes without a stated shape are arrays or lists `[max_rows]`.

    Attributes:
        requests: the request of each row; `None` if the row is free.
        tokens: `[max_rows, max_len]` int32, token ids of the prompt and of the output so far.
        request_ids: id of each row's request, 0 if the row is free.
        num_tokens: number of known tokens, prompt and output.
        num_computed: number of tokens whose keys and values are written, or are being written by a
            step in flight.
        capacity: number of tokens that the pages of the row can hold.
        drops_at: when this many tokens are computed, pages that the attention window has moved past
            can be freed.
        window_end: number of tokens that have window pages, if windowed layers have pages of their
            own.
        end_len: number of tokens at which the request is complete.
        sampled_len: number of tokens that are known, or that steps in flight will sample. When it
            reaches `end_len`, no further step is planned for the row.
        ends_at_eos: whether an end-of-sequence id ends the request.
        has_stop_ids: whether the request sets stop ids of its own.
        min_len: number of tokens below which end-of-sequence ids are ignored; 0 for no minimum.
        has_grammar: whether a grammar constrains the output, or thoughts are tracked in it.
        matchers: the state of each row's grammar; `None` without a grammar.
        thinks: whether thoughts (reasoning before the answer) may still come.
        is_masked: whether the next token is constrained.
        knows_mask: whether `Grammars` already has the mask of the next token.
        may_jump: whether a token may be appended without being sampled, if the grammar allows only
            this token. True if the request has no penalties and no extra outputs.
        is_decoding: whether the whole prompt is computed.
        state_holds: the row's handle ("hold") for its recurrent states in the `StatePool`; -1 if
            the model has none.
        order: the rows in use, in order of admission.
    """

    def __init__(self, max_rows: int, max_len: int, num_stages: int = 1) -> None:
        """Create `max_rows` free rows for sequences of at most `max_len` tokens.

        With several pipeline stages, as many steps are in flight as there are stages, and each step
        decodes other rows.
        """
        self.max_rows = max_rows
        self._num_stages = num_stages
        self.requests: list[Request | None] = [None] * max_rows
        self.tokens: NDArray[np.int32] = np.zeros((max_rows, max_len), dtype=np.int32)
        self.request_ids: Int64Array = np.zeros(max_rows, dtype=np.int64)
        self.num_tokens: Int64Array = np.zeros(max_rows, dtype=np.int64)
        self.num_computed: Int64Array = np.zeros(max_rows, dtype=np.int64)
        self.capacity: Int64Array = np.zeros(max_rows, dtype=np.int64)
        self.drops_at: Int64Array = np.full(max_rows, NEVER, dtype=np.int64)
        self.window_end: Int64Array = np.zeros(max_rows, dtype=np.int64)
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
        # The newest request is retracted first.
        self.order: list[int] = []

    @property
    def num_running(self) -> int:
        """Number of running requests."""
        return len(self.order)

    @property
    def has_free_row(self) -> bool:
        """Whether a row is free, so that another request can run."""
        return bool(self._free)

    def join(self, request: Request) -> int:
        """Give `request` a free row, fill the row's arrays, and return the row's index."""
        row = self._free.pop()
        # The row is in `order` before anything can fail, so that `leave` can undo a failed join.
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
        self.capacity[row] = self.window_end[row] = 0
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
        """Free the row of a request; the request takes its tokens back."""
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
        """Store the state of a row's grammar; `None` for a request without one."""
        self.has_grammar[row] = grammar is not None and not grammar.is_done
        self.thinks[row] = grammar is not None and grammar.thinks
        self.is_masked[row] = grammar is not None and grammar.is_active

    def rows_to_decode(self) -> Int64Array:
        """Return the rows that the next step decodes.

        With one stage, a row may decode before its last token is known on the host, because the
        token is on the device. With several stages the last token must be sent to the first stage,
        so the row waits until it is known. Also, a step then decodes only a share of the rows, so
        that each step in flight has some. A row that one step leaves out is decoded by one of the
        next steps.
        """
        may_decode = self.is_decoding & (self.sampled_len < self.end_len)
        if self._num_stages == 1:
            return may_decode.nonzero()[0]
        share = -(-int(may_decode.sum()) // self._num_stages)
        return (may_decode & (self.num_tokens == self.sampled_len)).nonzero()[0][:share]

    def known_tokens(self, row: int) -> Tokens:
        """Return the prompt and the output so far of a row, as a view of `tokens`."""
        return self.tokens[row, : self.num_tokens[row]]

    def request(self, row: int) -> Request:
        """Return the request of a row, which must be in use."""
        request = self.requests[row]
        assert request is not None, "the row is free"
        return request

    def running(self) -> list[Request]:
        """Return all running requests in order of admission."""
        return [self.request(row) for row in self.order]
