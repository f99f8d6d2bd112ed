"""Grammars in the scheduler: loaded off the loop, advanced token by token, with bounded CPU time.

While its grammar is loading, a request is kept outside the waiting queue, so it blocks no other.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from runtime.config.options import GRAMMAR_CACHE_BYTES
from runtime.grammar.cache import ByteCache, loaded_size
from runtime.grammar.grammar_backend import (
    BackendFactory,
    GrammarBackend,
    GrammarError,
    Matcher,
    num_words,
)
from runtime.ipc.messages import FinishReason, internal_error, refusal
from runtime.scheduler.request import GrammarState, Request
from runtime.scheduler.table import RequestTable
from runtime.step.step_plan import Int32Array, Int64Array, TokenMasks

logger = logging.getLogger(__name__)

# CPU time a grammar may use before its request ends: a fixed part and a part per output token.
FREE_TIME_S = 0.5
TIME_PER_TOKEN_S = 0.002
# An output usually takes some ten microseconds a step. Beyond this, each output is measured.
SLOW_S = 0.001
WATCHED_STEPS = 64

_TOO_SLOW = "The grammar is too ambiguous to be followed at the speed of the model."
_FAILED = "The grammar of this request failed."
_STUCK = "The grammar allows no token here that the model knows."


@dataclass
class Jump:
    """Tokens that the grammar forces on an output; its matcher has already accepted them.

    Attributes:
        request: the request that the tokens belong to.
        token_ids: the forced tokens, at least one.
        end: why the request ends with the last token; `None` if it goes on.
    """

    request: Request
    token_ids: list[int] = field(default_factory=list)
    end: FinishReason | None = None


class Grammars:
    """Grammars of the live requests, and a cache of loaded grammars."""

    def __init__(
        self,
        make_backend: BackendFactory | None,
        vocab_size: int,
        eos_token_ids: list[int],
        cache_bytes: int = GRAMMAR_CACHE_BYTES,
    ) -> None:
        """Start importing the library on a thread, which blocks nothing.

        Args:
            make_backend: builds the back end; `None` if structured output is off.
            vocab_size: the logits' width.
            eos_token_ids: ids that end a text.
            cache_bytes: most bytes of loaded grammars, the same as in the front.
        """
        self._num_words = num_words(vocab_size)
        self._eos = np.zeros(self._num_words, dtype=np.int32)
        for token_id in eos_token_ids:
            self._eos.view(np.uint32)[token_id // 32] |= np.uint32(1 << token_id % 32)
        # If the model has no such id, a grammar may end with any token.
        self._eos_ids = frozenset(eos_token_ids)
        # The mask of each row's next token, and the number of tokens it allows. Valid for rows in
        # the table's `knows_mask`. Allocated with the first grammar.
        self._words: Int32Array = np.empty((0, self._num_words), dtype=np.int32)
        self._num_allowed: Int64Array = np.empty(0, dtype=np.int64)
        # Steps for which each output's time is still measured.
        self._num_watched = 0
        self._cache: ByteCache[Future[Any]] = ByteCache(cache_bytes)
        self._waiting: dict[int, Request] = {}
        self._pool: ThreadPoolExecutor | None = None
        self._backend: Future[GrammarBackend[Any]] | None = None
        if make_backend is not None:
            self._pool = ThreadPoolExecutor(1, "grammar")
            self._backend = self._pool.submit(make_backend)

    @property
    def num_waiting(self) -> int:
        """The number of requests whose grammar is loading."""
        return len(self._waiting)

    @property
    def is_watching(self) -> bool:
        """Whether each output's time is measured, because one was slow."""
        return self._num_watched > 0

    @property
    def cached_bytes(self) -> int:
        """The approximate memory of the cached grammars."""
        return self._cache.size_bytes

    def clear(self) -> None:
        """Forget the cached grammars; live requests keep theirs."""
        self._cache.clear()

    # ---- loading ----

    def take(self, request: Request, key: bytes, payload: bytes) -> None:
        """Load the grammar of a new request, which waits here until `ready` returns it.

        Raises:
            GrammarError: structured output is off, or `payload` is empty and nothing is cached.
        """
        if self._pool is None:
            raise GrammarError("Structured output is off in this server.")
        future = self._cache.get(key)
        if payload:
            future = self._pool.submit(self._load, payload)
            self._cache.put(key, future, loaded_size(payload))
        if future is None:
            raise GrammarError("The grammar was lost on its way to the worker.")
        request.grammar = request.grammar or GrammarState()
        request.grammar.compiled = future
        self._waiting[request.request_id] = request

    def _load(self, payload: bytes) -> Any:
        assert self._backend is not None
        return self._backend.result().load(payload)

    def ready(self, refuse: Callable[[Request, str], None]) -> Iterator[Request]:
        """Yield requests whose grammar is loaded; `refuse` gets those whose grammar failed."""
        for request_id, request in list(self._waiting.items()):
            state = request.grammar
            assert state is not None
            assert state.compiled is not None
            if not state.compiled.done():
                continue
            del self._waiting[request_id]
            try:
                assert self._backend is not None
                state.matcher = self._backend.result().start(state.compiled.result())
                self.replay(request)
            except Exception:
                logger.exception("A grammar could not be loaded")
                refuse(request, "The grammar could not be loaded.")
                continue
            yield request

    def drop(self, request: Request) -> bool:
        """Forget a request that waits here; return whether it did."""
        return self._waiting.pop(request.request_id, None) is not None

    # ---- following ----

    def make_masks(
        self, table: RequestTable, rows: Int64Array
    ) -> tuple[TokenMasks | None, dict[int, FinishReason]]:
        """Find which next tokens each row's grammar allows.

        Args:
            table: the running batch; every token of the constrained rows is known.
            rows: rows that get a token.

        Returns:
            The masks of the constrained rows; and, for rows that cannot go on, the reasons by row.
        """
        sample_indices = np.flatnonzero(table.is_masked[rows])
        if not len(sample_indices):
            return None, {}
        masked = rows[sample_indices]
        failed = self._make_missing(table, masked, table.num_tokens[masked])
        return TokenMasks(sample_indices, self._words[masked]), failed

    def accept(
        self, table: RequestTable, rows: Int64Array, token_ids: Int32Array
    ) -> dict[int, FinishReason]:
        """Advance each row's grammar by its token; return, by row index, why a row ends with it."""
        ends: dict[int, FinishReason] = {}
        thinks = table.thinks[rows]
        for index in np.flatnonzero(thinks).tolist():
            end = self._think(table, int(rows[index]), int(token_ids[index]))
            if end is not None:
                ends[index] = end
        indices, masked = np.flatnonzero(~thinks).tolist(), rows[~thinks]
        tokens = token_ids[~thinks].tolist()
        table.knows_mask[masked] = False
        matchers, began = table.matchers, time.thread_time()
        for index, row, token_id in zip(indices, masked.tolist(), tokens, strict=True):
            end = self._move(matchers[row], token_id)
            if end is not None:
                ends[index] = end
            if self._num_watched:
                now = time.thread_time()
                _state(table, row).spent_s += now - began
                began = now
        if not self._num_watched:
            self._watch_if_slow(time.thread_time() - began, len(tokens))
        # Most steps end no output: one check covers all rows.
        if not self._eos_ids or not self._eos_ids.isdisjoint(tokens):
            for index, row, token_id in zip(indices, masked.tolist(), tokens, strict=True):
                end = self._end(matchers[row], token_id)
                if end is not None:
                    ends.setdefault(index, end)
        return ends

    def replay(self, request: Request) -> None:
        """Bring the grammar of a resumed request to the end of the output that was sent.

        Raises:
            GrammarError: the grammar does not allow that output.
        """
        state = request.grammar
        for token_id in np.frombuffer(request.sent_ids, dtype=np.int32).tolist():
            if state is None or state.is_done:
                return
            if state.thinks:
                end = self._think_state(state, token_id)
            else:
                end = self._follow(state.matcher, token_id)
            if end is not None:
                raise GrammarError("The grammar does not go on after the output that was sent.")

    def _think(self, table: RequestTable, row: int, token_id: int) -> FinishReason | None:
        """Advance a row that may think by a token; return why the request ends, or `None`."""
        state = _state(table, row)
        end = self._think_state(state, token_id)
        table.set_grammar(row, state)
        table.knows_mask[row] = False
        return end

    def _think_state(self, state: GrammarState, token_id: int) -> FinishReason | None:
        end = None
        assert state.thinking is not None
        if self._begins_answer(state, token_id):
            state.thinking.end()
            end = self._end(state.matcher, token_id)
        elif state.thinking.accept(token_id):
            # The answer has begun without thoughts.
            end = self._follow(state.matcher, token_id)
        return end

    @staticmethod
    def _begins_answer(state: GrammarState, token_id: int) -> bool:
        """Advance the grammar if `token_id` begins the answer amid thoughts; else return false."""
        thinking, matcher = state.thinking, state.matcher
        if thinking is None or matcher is None or not thinking.may_be_ended_by(token_id):
            return False
        try:
            return matcher.accept(token_id)
        except Exception:
            logger.exception("A grammar failed where thoughts might have ended")
            return False

    def _follow(self, matcher: Matcher | None, token_id: int) -> FinishReason | None:
        return self._move(matcher, token_id) or self._end(matcher, token_id)

    @staticmethod
    def _move(matcher: Matcher | None, token_id: int) -> FinishReason | None:
        """Advance by a token; return why that failed, if it did."""
        assert matcher is not None
        try:
            if matcher.accept(token_id):
                return None
        except GrammarError as error:
            return _beyond_limit(error)
        except Exception:
            logger.exception("A grammar failed; its request ends")
            return internal_error(_FAILED)
        logger.error("A token was sampled that its grammar forbids")
        return internal_error(_FAILED)

    def _end(self, matcher: Matcher | None, token_id: int) -> FinishReason | None:
        """Return the reason if the grammar is over with its last token."""
        assert matcher is not None
        may_end = token_id in self._eos_ids or not self._eos_ids
        try:
            if may_end and matcher.is_terminated:
                return FinishReason("stop", matched=token_id)
        except Exception:
            logger.exception("A grammar failed; its request ends")
            return internal_error(_FAILED)
        return None

    def jump(self, table: RequestTable, rows: Int64Array) -> list[Jump]:
        """Advance outputs along tokens to which their grammars leave no alternative.

        Args:
            table: the running batch.
            rows: rows that may jump; all of their tokens are known.

        Returns:
            The forced tokens of each request that has any, as many as its pages and its limit
            allow.
        """
        jumps: dict[int, Jump] = {}
        rows = rows[table.is_masked[rows]]
        lengths = table.num_tokens[rows]
        most = np.minimum(table.capacity[rows], table.end_len[rows])
        while len(rows):
            failed = self._make_missing(table, rows, lengths)
            # These rows fail again when the next step is planned; that ends their requests.
            table.knows_mask[list(failed)] = False
            goes_on = (self._num_allowed[rows] == 1) & (lengths < most)
            for index in np.flatnonzero(goes_on).tolist():
                row = int(rows[index])
                if row in failed:
                    goes_on[index] = False
                    continue
                jump = jumps.setdefault(row, Jump(table.request(row)))
                token_id, matcher = _single(self._words[row]), table.matchers[row]
                jump.token_ids.append(token_id)
                table.knows_mask[row] = False
                if table.thinks[row]:
                    jump.end = self._think(table, row, token_id)
                else:
                    jump.end = self._follow(matcher, token_id)
                goes_on[index] = jump.end is None and table.is_masked[row]
            rows, lengths, most = rows[goes_on], lengths[goes_on] + 1, most[goes_on]
        return list(jumps.values())

    def _make_missing(
        self, table: RequestTable, rows: Int64Array, lengths: Int64Array
    ) -> dict[int, FinishReason]:
        """Make the missing masks of `rows`; return by row why some cannot go on.

        Args:
            table: the running batch.
            rows: rows whose next token is constrained.
            lengths: their numbers of tokens, including those that a jump has added.
        """
        failed: dict[int, FinishReason] = {}
        is_known = table.knows_mask[rows]
        if is_known.all():
            return failed
        if is_known.any():
            rows, lengths = rows[~is_known], lengths[~is_known]
        if table.thinks[rows].any():
            words = self._made_with_thoughts(table, rows, lengths, failed)
        else:
            words = self._made(table, rows, lengths, failed)
        is_early = lengths < table.min_len[rows]
        if is_early.any():
            self._ban_ends(words, np.flatnonzero(is_early))
        num_allowed = np.bitwise_count(words).sum(axis=1, dtype=np.int64)
        if not num_allowed.all():
            for index in np.flatnonzero(num_allowed == 0).tolist():
                failed.setdefault(int(rows[index]), refusal(_STUCK, 400))
                # Something must be sampled, but it is never reported.
                words[index] = -1
        if len(self._words) < table.max_rows:
            self._words = np.empty((table.max_rows, self._num_words), dtype=np.int32)
            self._num_allowed = np.empty(table.max_rows, dtype=np.int64)
        self._words[rows] = words
        self._num_allowed[rows] = num_allowed
        table.knows_mask[rows] = True
        return failed

    def _ban_ends(self, words: Int32Array, early: Int64Array) -> None:
        """Forbid end-of-sequence ids in the masks at `early`, unless nothing else is allowed."""
        longer = words[early] & ~self._eos
        can_wait = longer.any(axis=1)
        words[early[can_wait]] = longer[can_wait]

    def _made_with_thoughts(
        self,
        table: RequestTable,
        rows: Int64Array,
        lengths: Int64Array,
        failed: dict[int, FinishReason],
    ) -> Int32Array:
        """Do what `_made` does, for rows of which some may think or must stop thinking."""
        words = np.zeros((len(rows), self._num_words), dtype=np.int32)
        thoughts = [_state(table, row).thinking for row in rows.tolist()]
        answers = np.array([each is None or each.may_answer for each in thoughts])
        if answers.any():
            words[answers] = self._made(table, rows[answers], lengths[answers], failed)
        for index, thinking in enumerate(thoughts):
            for token_id in () if thinking is None else thinking.next_ids:
                words.view(np.uint32)[index, token_id // 32] |= np.uint32(1 << token_id % 32)
        return words

    def _made(
        self,
        table: RequestTable,
        rows: Int64Array,
        lengths: Int64Array,
        failed: dict[int, FinishReason],
    ) -> Int32Array:
        assert self._backend is not None
        backend = self._backend.result()
        matchers = [table.matchers[row] for row in rows.tolist()]
        words = np.empty((len(rows), self._num_words), dtype=np.int32)
        if not self._num_watched:
            began = time.thread_time()
            try:
                backend.fill(matchers, words)
            except Exception as error:
                logger.info("A grammar failed (%s); finding out which", error)
            else:
                self._watch_if_slow(time.thread_time() - began, len(rows))
                return words
        self._num_watched = max(self._num_watched - 1, 0)
        for index, row in enumerate(rows.tolist()):
            state = _state(table, row)
            began = time.thread_time()
            try:
                backend.fill(matchers[index : index + 1], words[index : index + 1])
            except GrammarError as error:
                failed[row] = _beyond_limit(error)
                words[index] = -1
            except Exception:
                logger.exception("A grammar failed; its request ends")
                failed[row] = internal_error(_FAILED)
                words[index] = -1
            state.spent_s += time.thread_time() - began
            num_outputs = int(lengths[index]) - table.request(row).num_prompt
            if state.spent_s > FREE_TIME_S + TIME_PER_TOKEN_S * num_outputs:
                failed[row] = refusal(_TOO_SLOW, 400)
        return words

    def _watch_if_slow(self, took_s: float, num_outputs: int) -> None:
        # Measuring an output costs more than advancing it, so outputs are measured only once they
        # are slow. Processor time is measured: a busy machine is not the grammar's fault.
        if took_s > SLOW_S * max(num_outputs, 1):
            self._num_watched = WATCHED_STEPS


class StepMasks:
    """One step's masks, made when the executor needs them; implements `MaskSource`.

    Attributes:
        ends: by row, why its grammar cannot go on; known once the masks are made.
    """

    def __init__(self, grammars: Grammars, table: RequestTable, rows: Int64Array) -> None:
        """Cover the rows of `table` that get a token; see `Grammars.make_masks`."""
        self._grammars = grammars
        self._table = table
        self._rows = rows
        self._masks: TokenMasks | None = None
        self._is_made = False
        self.ends: dict[int, FinishReason] = {}

    def make(self) -> TokenMasks | None:
        """Return the masks; the first call makes them."""
        if not self._is_made:
            self._masks, self.ends = self._grammars.make_masks(self._table, self._rows)
            # Set only now: if making the masks fails, the step is tried again and still needs them.
            self._is_made = True
        return self._masks


def _state(table: RequestTable, row: int) -> GrammarState:
    request = table.requests[row]
    assert request is not None
    assert request.grammar is not None
    return request.grammar


def _single(mask: Int32Array) -> int:
    (word,) = np.flatnonzero(mask).tolist()
    return 32 * word + int(mask.view(np.uint32)[word]).bit_length() - 1


def _beyond_limit(error: GrammarError) -> FinishReason:
    return refusal(f"The grammar cannot be followed any further: {error}.", 400)
