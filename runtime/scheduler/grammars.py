"""Grammars in the scheduler: loaded off the loop, followed token by token, watched for their cost.

A request whose grammar is still being loaded stands beside the waiting queue; nobody waits for it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np

from runtime.config import GRAMMAR_CACHE_BYTES
from runtime.grammar.backend import BackendFactory, GrammarBackend, GrammarError, num_words
from runtime.grammar.cache import ByteCache, loaded_size
from runtime.messages import FinishReason
from runtime.request import GrammarState, Request
from runtime.scheduler.table import RequestTable
from runtime.step import Int32Array, Int64Array, TokenMasks

logger = logging.getLogger(__name__)

# A request may spend so much of everybody's time on following its grammar.
FREE_TIME_S = 0.5
TIME_PER_TOKEN_S = 0.002

_TOO_SLOW = "The grammar is too ambiguous to be followed at the speed of the model."
_STUCK = "The grammar allows no token here that the model knows."


class Grammars:
    """Grammars of the live requests, and a cache of those that came before."""

    def __init__(
        self,
        make_backend: BackendFactory | None,
        vocab_size: int,
        eos_token_ids: list[int],
        cache_bytes: int = GRAMMAR_CACHE_BYTES,
    ) -> None:
        """Import the library on a thread at once: it takes a second that nobody waits for.

        Args:
            make_backend: builds the back end; `None` where structured output is off.
            vocab_size: the logits' width.
            eos_token_ids: ids that end a text.
            cache_bytes: bound of the loaded grammars, the same as in the front.
        """
        self._vocab_size = vocab_size
        self._num_words = num_words(vocab_size)
        self._eos = np.zeros(self._num_words, dtype=np.int32)
        for token_id in eos_token_ids:
            self._eos.view(np.uint32)[token_id // 32] |= np.uint32(1 << token_id % 32)
        self._cache: ByteCache[Future[Any]] = ByteCache(cache_bytes)
        self._waiting: dict[int, Request] = {}
        self._pool: ThreadPoolExecutor | None = None
        self._backend: Future[GrammarBackend] | None = None
        if make_backend is not None:
            self._pool = ThreadPoolExecutor(1, "grammar")
            self._backend = self._pool.submit(make_backend)

    @property
    def num_waiting(self) -> int:
        """Requests whose grammar is being loaded."""
        return len(self._waiting)

    @property
    def cached_bytes(self) -> int:
        """About the memory that the cached grammars take."""
        return self._cache.size_bytes

    def clear(self) -> None:
        """Forget the cached grammars; live requests keep theirs."""
        self._cache.clear()

    # ---- loading ----

    def take(self, request: Request, key: bytes, payload: bytes) -> None:
        """Load the grammar of a new request, which waits here until `ready` gives it back.

        Raises:
            GrammarError: there is no back end, or neither payload nor cached grammar.
        """
        if self._pool is None:
            raise GrammarError("Structured output is off in this server.")
        future = self._cache.get(key)
        if payload:
            future = self._pool.submit(self._load, payload)
            self._cache.put(key, future, loaded_size(payload))
        if future is None:
            raise GrammarError("The grammar got lost on its way.")
        request.grammar = GrammarState(future, request.sampling.grammar_after)
        self._waiting[request.request_id] = request

    def _load(self, payload: bytes) -> Any:
        assert self._backend is not None
        return self._backend.result().load(payload)

    def ready(self, refuse: Callable[[Request, str], None]) -> Iterator[Request]:
        """Requests whose grammar is there now; `refuse` gets those whose grammar is not."""
        for request_id, request in list(self._waiting.items()):
            state = request.grammar
            assert state is not None
            if not state.compiled.done():
                continue
            del self._waiting[request_id]
            try:
                assert self._backend is not None
                state.matcher = self._backend.result().start(state.compiled.result())
            except Exception:
                logger.exception("A grammar could not be loaded")
                refuse(request, "The grammar could not be loaded.")
                continue
            yield request

    def drop(self, request: Request) -> bool:
        """Forget a request that waits here; whether it did."""
        return self._waiting.pop(request.request_id, None) is not None

    # ---- following ----

    def masks(
        self, table: RequestTable, rows: Int64Array, lengths: Int64Array
    ) -> tuple[TokenMasks | None, dict[int, FinishReason]]:
        """What the next token of each row may be.

        Args:
            table: the running batch.
            rows: rows that get a token.
            lengths: tokens that each of them has.

        Returns:
            The masks of the rows that have a grammar, and why some of them cannot go on.
        """
        constrained = np.flatnonzero(table.has_grammar[rows])
        lines: list[int] = []
        filled: list[Int32Array] = []
        failed: dict[int, FinishReason] = {}
        for line in constrained.tolist():
            row = int(rows[line])
            request = table.request(row)
            state = request.grammar
            assert state is not None
            if not state.is_active:
                continue
            mask = np.zeros(self._num_words, dtype=np.int32)
            started = time.perf_counter()
            try:
                assert state.matcher is not None
                state.matcher.fill(mask)
            except Exception:
                logger.exception("A grammar failed; its request ends")
                failed[row] = _internal()
                mask[:] = -1
            state.spent_s += time.perf_counter() - started
            num_output = int(lengths[line]) - request.num_prompt
            if num_output < request.sampling.min_new_tokens:
                longer = mask & ~self._eos
                # A grammar that must end here wins.
                mask = longer if longer.any() else mask
            if not mask.any():
                failed[row] = _refused(_STUCK)
                mask[:] = -1
            elif state.spent_s > FREE_TIME_S + TIME_PER_TOKEN_S * num_output:
                failed[row] = _refused(_TOO_SLOW)
            lines.append(line)
            filled.append(mask)
        if not lines:
            return None, failed
        return TokenMasks(np.array(lines, dtype=np.int64), np.stack(filled)), failed

    def accept(self, request: Request, token_id: int) -> FinishReason | None:
        """Follow one token; why the request ends with it, if it does."""
        state = request.grammar
        assert state is not None
        if not state.is_active:
            state.is_active = token_id == state.after
            return None
        assert state.matcher is not None
        started = time.perf_counter()
        try:
            accepted = state.matcher.accept(token_id)
        except Exception:
            logger.exception("A grammar failed; its request ends")
            return _internal()
        state.spent_s += time.perf_counter() - started
        if not accepted:
            logger.error("A token was sampled that its grammar forbids")
            return _internal()
        return FinishReason("stop", matched=token_id) if state.matcher.is_terminated else None


def _internal() -> FinishReason:
    return FinishReason(
        "abort",
        message="The grammar of this request failed.",
        status_code=500,
        err_type="InternalServerError",
    )


def _refused(message: str) -> FinishReason:
    return FinishReason("abort", message=message, status_code=400, err_type="BadRequestError")
