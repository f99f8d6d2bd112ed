"""Loads the grammars of requests on a thread, and advances them with each output token.

A request whose grammar is loading is not in the waiting queue, so it does not delay other requests.
The CPU time that a grammar may use is limited.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property
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

# CPU time that a grammar may use: a fixed part, and a part for each output token.
FREE_TIME_S = 0.5
TIME_PER_TOKEN_S = 0.002
# Advancing one output usually takes about ten microseconds. If a step takes more than this for each
# output, the outputs are measured one by one for the next `WATCHED_STEPS` steps.
SLOW_S = 0.001
WATCHED_STEPS = 64

_TOO_SLOW = "The grammar is too ambiguous to be followed at the speed of the model."
_FAILED = "The grammar of this request failed."
_STUCK = "The grammar allows no token here that the model knows."


@dataclass
class Jump:
    """Tokens that a grammar forces, because it allows only one token at each of these positions.

    The tokens are not sampled. The request's `Matcher` has already accepted them.

    Attributes:
        request: the request whose output gets the tokens.
        token_ids: the forced tokens, at least one.
        end: why the request ends with the last token; `None` if it continues.
    """

    request: Request
    token_ids: list[int] = field(default_factory=list)
    end: FinishReason | None = None


class Grammars:
    """The grammars of the live requests, and a cache of loaded grammars."""

    def __init__(
        self,
        make_backend: BackendFactory | None,
        vocab_size: int,
        eos_token_ids: list[int],
        cache_bytes: int = GRAMMAR_CACHE_BYTES,
        *,
        imports_at_once: bool = True,
    ) -> None:
        """Prepare, without waiting for the library.

        Args:
            make_backend: creates the back end, on a thread; `None` if structured output is off.
            vocab_size: width of the logits.
            eos_token_ids: token ids that end an output.
            cache_bytes: most bytes of cached grammars; the front process must use the same value.
            imports_at_once: whether `make_backend` is called now, or with the first grammar.
        """
        self._num_words = num_words(vocab_size)
        self._eos = np.zeros(self._num_words, dtype=np.int32)
        for token_id in eos_token_ids:
            self._eos.view(np.uint32)[token_id // 32] |= np.uint32(1 << token_id % 32)
        # If the model has no end-of-sequence id, a grammar may end with any token.
        self._eos_ids = frozenset(eos_token_ids)
        # For each row, the mask of its next token, and how many tokens the mask allows. An entry is
        # valid while `RequestTable.knows_mask` is set. The first grammar allocates both arrays.
        self._words: Int32Array = np.empty((0, self._num_words), dtype=np.int32)
        self._num_allowed: Int64Array = np.empty(0, dtype=np.int64)
        # Number of steps in which the time of each output is still measured.
        self._num_watched = 0
        self._cache: ByteCache[Future[Any]] = ByteCache(cache_bytes)
        self._waiting: dict[int, Request] = {}
        self._pool: ThreadPoolExecutor | None = None
        self._make_backend = make_backend
        if make_backend is not None:
            self._pool = ThreadPoolExecutor(1, "grammar")
            _ = self._backend if imports_at_once else None

    @cached_property
    def _backend(self) -> Future[GrammarBackend[Any]] | None:
        # The pool has one thread, so the library is there before the first grammar is loaded.
        make = self._make_backend
        return None if self._pool is None or make is None else self._pool.submit(make)

    @property
    def num_waiting(self) -> int:
        """The number of requests whose grammar is loading."""
        return len(self._waiting)

    @property
    def is_watching(self) -> bool:
        """Whether the time of each output is measured, because a recent step was slow."""
        return self._num_watched > 0

    @property
    def cached_bytes(self) -> int:
        """Approximate memory of the cached grammars, in bytes."""
        return self._cache.size_bytes

    def clear(self) -> None:
        """Remove all grammars from the cache; live requests keep theirs."""
        self._cache.clear()

    # ---- loading ----

    def take(self, request: Request, key: bytes, payload: bytes) -> None:
        """Load the grammar of a new request; `ready` returns the request when it is loaded.

        Args:
            request: the request.
            key: key of the grammar in the cache.
            payload: the compiled grammar; empty if the front process knows that it is cached here.

        Raises:
            GrammarError: structured output is off, or `payload` is empty and nothing is cached.
        """
        if self._pool is None or self._backend is None:
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
        """Yield requests whose grammar is loaded; call `refuse` if a grammar cannot be loaded."""
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
        """Remove a request whose grammar is loading; return whether there was such a request."""
        return self._waiting.pop(request.request_id, None) is not None

    # ---- following ----

    def make_masks(
        self, table: RequestTable, rows: Int64Array
    ) -> tuple[TokenMasks | None, dict[int, FinishReason]]:
        """Compute which next tokens the grammars allow.

        Args:
            table: the running batch; every token of the constrained rows is known.
            rows: rows for which a token is sampled.

        Returns:
            The masks of the constrained rows; `None` if no row is constrained. And, for each row
            that cannot continue, the reason.
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
        """Advance the grammar of each row by the row's new token.

        Args:
            table: the running batch.
            rows: rows that have a grammar or track thoughts.
            token_ids: the new token of each row.

        Returns:
            For each row that ends with its token, its index in `rows` and the reason.
        """
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
        # In most steps no output ends, so one check of all tokens comes before the loop.
        if not self._eos_ids or not self._eos_ids.isdisjoint(tokens):
            for index, row, token_id in zip(indices, masked.tolist(), tokens, strict=True):
                end = self._end(matchers[row], token_id)
                if end is not None:
                    ends.setdefault(index, end)
        return ends

    def replay(self, request: Request) -> None:
        """Advance a resumed request's grammar by the output that an earlier process has sent.

        Raises:
            GrammarError: the grammar does not allow this output, or ends with it.
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
        """Process an output token of a request whose thoughts (reasoning) are tracked.

        `row` is the request's row of the running batch. Returns why the request ends, or `None` if
        it continues.
        """
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
        """Return whether `token_id` begins the answer after the thoughts.

        If so, the grammar is also advanced by the token.
        """
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
        """Advance a grammar by a token; return the reason if the grammar fails, else `None`."""
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
        """Return the reason if the grammar is complete after `token_id`, else `None`."""
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
        """Append tokens while the grammar of a row allows only one token (jump-ahead decoding).

        Args:
            table: the running batch.
            rows: rows whose tokens need not be sampled; all their tokens are known.

        Returns:
            The forced tokens of each request that has any, within its pages and its token limit.
        """
        jumps: dict[int, Jump] = {}
        rows = rows[table.is_masked[rows]]
        lengths = table.num_tokens[rows]
        most = np.minimum(table.capacity[rows], table.end_len[rows])
        while len(rows):
            failed = self._make_missing(table, rows, lengths)
            # A row that fails here fails again when the next step is planned, and ends then.
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
        """Compute the masks of those `rows` whose mask is not known yet.

        Args:
            table: the running batch.
            rows: rows whose next token is constrained.
            lengths: number of tokens of each row, including the tokens that a jump has added.

        Returns:
            For each row that cannot continue, the reason.
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
                # The step samples some token for this row in any case. The token is not reported.
                words[index] = -1
        if len(self._words) < table.max_rows:
            self._words = np.empty((table.max_rows, self._num_words), dtype=np.int32)
            self._num_allowed = np.empty(table.max_rows, dtype=np.int64)
        self._words[rows] = words
        self._num_allowed[rows] = num_allowed
        table.knows_mask[rows] = True
        return failed

    def _ban_ends(self, words: Int32Array, early: Int64Array) -> None:
        """Forbid end-of-sequence ids in the masks `early`, unless a mask allows nothing else."""
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
        """Return the masks as `_made` does, for rows some of which track thoughts."""
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
        # To measure an output costs more than to advance it, so single outputs are measured only
        # after a slow step. The measure is CPU time, so other processes do not count.
        if took_s > SLOW_S * max(num_outputs, 1):
            self._num_watched = WATCHED_STEPS


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
