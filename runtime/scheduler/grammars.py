"""Grammars in the scheduler: loaded off the loop, followed token by token, watched for their cost.

A request whose grammar is still being loaded stands beside the waiting queue; nobody waits for it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from runtime.config import GRAMMAR_CACHE_BYTES
from runtime.grammar.backend import BackendFactory, GrammarBackend, GrammarError, num_words
from runtime.grammar.cache import ByteCache, loaded_size
from runtime.messages import FinishReason
from runtime.request import GrammarState, Request
from runtime.scheduler.table import RequestTable
from runtime.step import BoolArray, Int32Array, Int64Array, TokenMasks

logger = logging.getLogger(__name__)

# A request may spend so much of everybody's time on following its grammar.
FREE_TIME_S = 0.5
TIME_PER_TOKEN_S = 0.002
# Some ten microseconds are usual for an output in a step. Beyond this each one is measured.
SLOW_S = 0.001
WATCHED_STEPS = 64

_TOO_SLOW = "The grammar is too ambiguous to be followed at the speed of the model."
_STUCK = "The grammar allows no token here that the model knows."


class _Output(NamedTuple):
    """A running request and how many tokens it has, prompt included."""

    request: Request
    length: int


@dataclass
class Jump:
    """Tokens that had to come, already followed.

    Attributes:
        request: whose they are.
        token_ids: at least one.
        end: why the request ends with the last of them, if it does.
    """

    request: Request
    token_ids: list[int] = field(default_factory=list)
    end: FinishReason | None = None


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
        self._num_words = num_words(vocab_size)
        self._eos = np.zeros(self._num_words, dtype=np.int32)
        for token_id in eos_token_ids:
            self._eos.view(np.uint32)[token_id // 32] |= np.uint32(1 << token_id % 32)
        # Where the model has no such id, a grammar ends by itself, whatever its last token.
        self._may_end = np.full(vocab_size, not eos_token_ids)
        self._may_end[eos_token_ids] = True
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
        self, table: RequestTable, rows: Int64Array
    ) -> tuple[TokenMasks | None, dict[int, FinishReason]]:
        """What the next token of each row may be.

        Args:
            table: the running batch; every token of the constrained rows is known.
            rows: rows that get a token.

        Returns:
            The masks of the rows that have a grammar, and why some of them cannot go on.
        """
        lines: list[int] = []
        outputs: list[_Output] = []
        for line in np.flatnonzero(table.has_grammar[rows]).tolist():
            request = table.request(int(rows[line]))
            if _state(request).is_active:
                lines.append(line)
                outputs.append(_Output(request, int(table.num_tokens[request.row])))
        if not lines:
            return None, {}
        words, failed = self._masks_of(outputs)
        return TokenMasks(np.array(lines, dtype=np.int64), words), failed

    def accept(
        self, requests: Sequence[Request], token_ids: Sequence[int]
    ) -> dict[int, FinishReason]:
        """Follow one token of each request; by place, why some of them end with theirs."""
        ends: dict[int, FinishReason] = {}
        began = time.thread_time()
        for place, (request, token_id) in enumerate(zip(requests, token_ids, strict=True)):
            end = self._accept(_state(request), token_id)
            if end is not None:
                ends[place] = end
        self._watch_if_slow(time.thread_time() - began, len(requests))
        return ends

    def _accept(self, state: GrammarState, token_id: int) -> FinishReason | None:
        if not state.is_active:
            state.is_active = token_id == state.after
            return None
        assert state.matcher is not None
        state.mask = None
        began = time.thread_time() if self._num_watched else 0.0
        try:
            is_allowed = state.matcher.accept(token_id)
            is_over = is_allowed and self._may_end[token_id] and state.matcher.is_terminated
        except Exception:
            logger.exception("A grammar failed; its request ends")
            return _internal()
        if self._num_watched:
            state.spent_s += time.thread_time() - began
        if not is_allowed:
            logger.error("A token was sampled that its grammar forbids")
            return _internal()
        return FinishReason("stop", matched=token_id) if is_over else None

    def jump(self, requests: Sequence[Request], table: RequestTable) -> list[Jump]:
        """Follow outputs along tokens without an alternative.

        Args:
            requests: running, each with a grammar and every token known.
            table: the running batch.

        Returns:
            For each request that has such tokens: as many as its pages and its limit take.
        """
        outputs = [
            _Output(request, int(table.num_tokens[request.row]))
            for request in requests
            if _state(request).is_active
        ]
        jumps: dict[int, Jump] = {}
        while outputs:
            words, failed = self._masks_of(outputs)
            for request, _ in outputs:
                if request.row in failed:
                    # It fails again when the next step is planned, and ends with it.
                    _state(request).mask = None
            going_on: list[_Output] = []
            for place in np.flatnonzero(_is_single(words)).tolist():
                request, length = outputs[place]
                row = request.row
                room = min(int(table.capacity[row]), int(table.end_len[row])) - length
                if room <= 0 or row in failed:
                    continue
                jump = jumps.setdefault(row, Jump(request))
                jump.token_ids.append(_single(words[place]))
                jump.end = self._accept(_state(request), jump.token_ids[-1])
                if jump.end is None:
                    going_on.append(_Output(request, length + 1))
            outputs = going_on
        return list(jumps.values())

    def _masks_of(self, outputs: Sequence[_Output]) -> tuple[Int32Array, dict[int, FinishReason]]:
        """`[n, words]`, made where they are missing; by row, which outputs cannot go on and why."""
        failed: dict[int, FinishReason] = {}
        missing = [output for output in outputs if _state(output.request).mask is None]
        if missing:
            words = self._made(missing, failed)
            for (request, length), mask in zip(missing, words, strict=True):
                _state(request).mask = mask
                if length - request.num_prompt < request.sampling.min_new_tokens:
                    longer = mask & ~self._eos
                    # A grammar that must end here wins.
                    mask[:] = longer if longer.any() else mask
            for place in np.flatnonzero(~words.any(axis=1)).tolist():
                failed.setdefault(missing[place].request.row, _refused(_STUCK))
                # Something must be sampled; nobody will see it.
                words[place] = -1
            if len(missing) == len(outputs):
                return words, failed
        return np.stack([_mask(output.request) for output in outputs]), failed

    def _made(self, outputs: Sequence[_Output], failed: dict[int, FinishReason]) -> Int32Array:
        assert self._backend is not None
        backend = self._backend.result()
        matchers = [_state(output.request).matcher for output in outputs]
        words = np.zeros((len(outputs), self._num_words), dtype=np.int32)
        if not self._num_watched:
            began = time.thread_time()
            try:
                backend.fill(matchers, words)
            except Exception as error:
                logger.info("A grammar failed (%s); finding out which", error)
            else:
                self._watch_if_slow(time.thread_time() - began, len(outputs))
                return words
        self._num_watched = max(self._num_watched - 1, 0)
        for place, (request, length) in enumerate(outputs):
            state = _state(request)
            began = time.thread_time()
            try:
                backend.fill(matchers[place : place + 1], words[place : place + 1])
            except GrammarError as error:
                failed[request.row] = _refused(f"The grammar cannot be followed: {error}.")
                words[place] = -1
            except Exception:
                logger.exception("A grammar failed; its request ends")
                failed[request.row] = _internal()
                words[place] = -1
            state.spent_s += time.thread_time() - began
            if state.spent_s > FREE_TIME_S + TIME_PER_TOKEN_S * (length - request.num_prompt):
                failed[request.row] = _refused(_TOO_SLOW)
        return words

    def _watch_if_slow(self, took_s: float, num_outputs: int) -> None:
        # To measure each output costs more than to follow it: only once one of them is slow. By
        # processor time, for a busy machine is not the grammar's fault.
        if took_s > SLOW_S * num_outputs:
            self._num_watched = WATCHED_STEPS


def _state(request: Request) -> GrammarState:
    assert request.grammar is not None
    return request.grammar


def _mask(request: Request) -> Int32Array:
    mask = _state(request).mask
    assert mask is not None
    return mask


def _is_single(words: Int32Array) -> BoolArray:
    """`[n]`: whether exactly one bit of the row is set."""
    used = words != 0
    only_word = used.sum(axis=1) == 1
    word = words.view(np.uint32)[np.arange(len(words)), used.argmax(axis=1)]
    return only_word & (word & (word - np.uint32(1)) == 0)


def _single(mask: Int32Array) -> int:
    (word,) = np.flatnonzero(mask).tolist()
    return 32 * word + int(mask.view(np.uint32)[word]).bit_length() - 1


def _internal() -> FinishReason:
    return FinishReason(
        "abort",
        message="The grammar of this request failed.",
        status_code=500,
        err_type="InternalServerError",
    )


def _refused(message: str) -> FinishReason:
    return FinishReason("abort", message=message, status_code=400, err_type="BadRequestError")
