"""Plans a step: each running request decodes one token; the remaining budget goes to prompts."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from runtime.cache.manager import CacheManager
from runtime.ipc.time_messages import Wait
from runtime.requests.fault_domain import FaultDomains
from runtime.scheduler.adapter_places import AdapterPlaces
from runtime.scheduler.budget import StepBudget, TokenBudget
from runtime.scheduler.chunk import Chunk, add_spans, advance_windows, host_copies
from runtime.scheduler.image_cache import ImageCache
from runtime.scheduler.request import PromptReport, Request
from runtime.scheduler.step_clock import StepClock, StepNote
from runtime.scheduler.step_images import add_images
from runtime.scheduler.step_masks import StepMasks
from runtime.scheduler.table import RequestTable
from runtime.scheduler.waiting import WaitingQueue
from runtime.step.step_plan import (
    BoolArray,
    Int32Array,
    Int64Array,
    PageUpdate,
    RowImage,
    RowJoin,
    StateMoves,
    StepPlan,
)

logger = logging.getLogger(__name__)

# A prompt waits for another prompt to be computed if they share this many more tokens than cached.
SHARED_PREFIX_TOKENS = 64
_NO_TOKENS: Int32Array = np.empty(0, dtype=np.int32)


@dataclass
class PlannedStep:
    """A step's plan, and the data that the scheduler needs to process the step's result.

    Attributes:
        plan: the plan, which is sent to the executor.
        request_ids: `[num_samples]` int64, the request of each sample; its row may be reused.
        note: the clock's note, to be returned to the clock when the step has ended.
        prompts_done: requests whose whole prompt is computed after this step.
        chunks_done: requests whose prompt continues in later steps, each with the number of tokens
            computed after this step. Filled only if the model has recurrent states.
        span_owners: the request and the report of each entry of `plan.report_spans`.
        masks: grammar masks of the constrained samples; `None` if no sample is constrained.
    """

    plan: StepPlan
    request_ids: Int64Array
    note: StepNote
    prompts_done: list[Request] = field(default_factory=list)
    chunks_done: list[tuple[Request, int]] = field(default_factory=list)
    span_owners: list[tuple[Request, PromptReport]] = field(default_factory=list)
    masks: StepMasks | None = None


class Planner:
    """Chooses what the next step computes, within the token budget and the pages of the pool."""

    def __init__(
        self,
        table: RequestTable,
        waiting: WaitingQueue,
        cache: CacheManager,
        faults: FaultDomains[Request],
        *,
        token_budget: TokenBudget,
        images: ImageCache | None = None,
        adapters: AdapterPlaces | None = None,
        clock: StepClock | None = None,
    ) -> None:
        """Plan steps for the running batch `table` and the queue `waiting`.

        `images` is `None` if the model takes no images. `clock` records what the queue waits for.
        """
        self._clock = clock or StepClock()
        self._adapters = adapters or AdapterPlaces(0)
        self._images = images
        self._table = table
        self._waiting = waiting
        self._cache = cache
        self._faults = faults
        self._token_budget = token_budget
        self._joins: list[RowJoin] = []
        self._page_updates: list[PageUpdate] = []
        # Requests whose prompt is not in the prefix cache yet, by id.
        self._unshared: dict[int, Request] = {}
        # Running requests with known tokens to compute, in order of admission.
        self._computing: list[Request] = []
        # The first request of the queue, if it found too few pages, and the `_order_key` then.
        self._held_up: tuple[Request, tuple[int, int, int]] | None = None
        # `query_lens` and `samples` of a step that only decodes.
        self._ones: Int64Array = np.ones(table.max_rows, dtype=np.int64)
        self._all: BoolArray = np.ones(table.max_rows, dtype=bool)
        # Whether the step that is planned has rows that decode.
        self._decodes = False
        self.num_retractions = 0
        self.num_cached_tokens = 0

    def plan(self) -> PlannedStep | None:
        """Return the next step; `None` if there is nothing to compute."""
        retracted_before, faults_before = self.num_retractions, self._faults.num_faults
        decode_rows, new_pages = self._plan_decodes()
        self._decodes = len(decode_rows) > 0
        # After a retraction, pages are scarce. Besides, a token of the retracted request may be in
        # flight, and the request is admitted again only when that token is known.
        may_admit = self.num_retractions == retracted_before
        self._wait = Wait.STEP if may_admit else Wait.PAGES
        budget = self._token_budget.of_step(len(decode_rows), self._images)
        chunks = self._plan_chunks(budget, may_admit=may_admit)
        self._bring_adapters()
        if self._faults.num_faults != faults_before:
            # A request that failed while planning has lost its row, so it is removed from the step.
            goes_on = self._table.is_decoding[decode_rows]
            decode_rows = decode_rows[goes_on]
            new_pages = None if new_pages is None else new_pages[goes_on]
            chunks = [chunk for chunk in chunks if chunk.request.row >= 0]
        # The other chunks are tokens that a grammar forced, not parts of prompts.
        prompts = [each for each in chunks if each.request.request_id in self._unshared]
        note = self._clock.planned(
            [(each.request.times, each.start, each.length) for each in prompts], self._wait
        )
        if not len(decode_rows) and not chunks:
            return None
        table, num_decodes = self._table, len(decode_rows)
        if chunks:
            chunk_rows = np.array([chunk.request.row for chunk in chunks], dtype=np.int64)
            rows = np.concatenate([decode_rows, chunk_rows])
            query_lens, samples = np.ones(len(rows), dtype=np.int64), np.ones(len(rows), dtype=bool)
            query_lens[num_decodes:] = [chunk.length for chunk in chunks]
            samples[num_decodes:] = [chunk.samples for chunk in chunks]
        else:
            rows, query_lens, samples = (
                decode_rows,
                self._ones[:num_decodes],
                self._all[:num_decodes],
            )
        plan = StepPlan(
            rows=rows,
            num_decodes=num_decodes,
            start_lens=table.num_computed[rows],
            query_lens=query_lens,
            chunk_tokens=np.concatenate([c.tokens for c in chunks]) if chunks else _NO_TOKENS,
            samples=samples,
            joins=self._joins,
            page_updates=self._page_updates,
            new_pages=new_pages,
            adapter_copies=self._adapters.take_copies(),
            states=self._move_states(rows, query_lens, chunks),
            windows=advance_windows(self._cache.windows, table, decode_rows, chunks),
        )
        plan.host, plan.host_states = host_copies(self._cache, chunks)
        self._joins, self._page_updates = [], []
        span_owners = add_spans(plan, chunks)
        if self._images is not None:
            parts = [(chunk.request, chunk.start, chunk.length) for chunk in chunks]
            add_images(plan, parts, self._images, budget.images_ahead)
        table.num_computed[rows] = plan.start_lens + query_lens
        sampled = plan.sample_rows
        table.sampled_len[sampled] += 1
        done: list[Request] = []
        for chunk in chunks:
            if chunk.is_last:
                table.is_decoding[chunk.request.row] = True
                self._computing.remove(chunk.request)
                # Requests with forced tokens are not in `_unshared`.
                if chunk.request.request_id in self._unshared:
                    done.append(chunk.request)
        parts_done = [
            (each.request, each.start + each.length) for each in chunks if not each.is_last
        ]
        if self._cache.states is None:
            parts_done.clear()
        request_ids = table.request_ids[sampled]
        return PlannedStep(plan, request_ids, note, done, parts_done, span_owners)

    def _move_states(
        self, rows: Int64Array, query_lens: Int64Array, chunks: list[Chunk]
    ) -> StateMoves | None:
        """Return where the step reads and writes recurrent states; `None` if there are none."""
        cache, table = self._cache, self._table
        if cache.states is None:
            return None
        points = []
        for index, chunk in enumerate(chunks, len(rows) - len(chunks)):
            num_known = int(table.num_tokens[chunk.request.row])
            part = chunk.request.block_table, chunk.start, chunk.length
            points.append((index, cache.snapshot_points(*part, num_known)))
        return cache.states.advance(
            table.state_holds[rows], table.num_computed[rows], query_lens, points
        )

    def _drop_behind_windows(self) -> bool:
        """Free pages that no attention window reaches any more; return whether any were freed.

        Called only when too few pages are free: until then, the pages stay for later turns of a
        conversation.
        """
        cache, table = self._cache, self._table
        if cache.window is None:
            return False
        before = cache.num_available_pages
        for row in (table.num_computed >= table.drops_at).nonzero()[0].tolist():
            request = table.request(row)
            if cache.enable_prefix_cache and request.request_id in self._unshared:
                # All pages of a prompt are kept until they are in the prefix cache.
                continue
            with self._faults.of(request):
                behind = int(table.num_computed[row]) - cache.window
                num_pages = cache.drop_behind(request.block_table, behind)
                table.drops_at[row] = num_pages * cache.page_size + cache.window
        return cache.num_available_pages > before

    # ---- decode ----

    def _plan_decodes(self) -> tuple[Int64Array, Int32Array | None]:
        """Return the rows that decode, and the new pages for them, as `StepPlan.new_pages`."""
        table = self._table
        rows = table.rows_to_decode()
        is_full = table.num_computed[rows] >= table.capacity[rows]
        full = rows[is_full]
        if not len(full):
            return rows, None
        block_tables = [table.request(row).block_table for row in full.tolist()]
        pages = self._cache.extend_each(block_tables)
        if pages is None and self._drop_behind_windows():
            pages = self._cache.extend_each(block_tables)
        if pages is not None:
            table.capacity[full] += self._cache.page_size
            new_pages: Int32Array = np.zeros(len(rows), dtype=np.int32)
            new_pages[is_full] = pages
            return rows, new_pages
        for row in full.tolist():
            # An earlier iteration may have put this row's request back into the queue.
            if table.is_decoding[row]:
                self._grow_or_retract(row)
        return rows[table.is_decoding[rows]], None

    def _grow_or_retract(self, row: int) -> None:
        table = self._table
        request = table.request(row)
        with self._faults.of(request):
            while not self._grow(request, int(table.num_computed[row]) + 1):
                newest = table.request(table.order[-1])
                with self._faults.of(newest):
                    self.retract(newest)
                if newest is request:
                    return

    def _grow(self, request: Request, num_tokens: int) -> bool:
        block_table = request.block_table
        before = block_table.num_pages
        if not self._cache.extend(block_table, num_tokens):
            return False
        self._table.capacity[request.row] = block_table.num_pages * self._cache.page_size
        added = block_table.held()[before:].copy()
        self._page_updates.append(PageUpdate(request.row, before, added))
        return True

    def retract(self, request: Request, why: str = "the KV pool is full") -> None:
        """Put a running request back into the queue; its tokens are kept and computed again."""
        logger.info("Retracting request %d: %s", request.request_id, why)
        self.num_retractions += 1
        request.num_retractions += 1
        self.drop(request)
        self._waiting.push_retracted(request)

    def drop(self, request: Request, *, keep_cached: bool = True) -> None:
        """Remove a running request from the batch; free its pages, or keep them as cached ones."""
        row, table, cache = request.row, self._table, self._cache
        if keep_cached:
            # The key and value of the last known token may not be written: the next step does that.
            num_valid = min(int(table.num_computed[row]), int(table.num_tokens[row]) - 1)
            known = table.known_tokens(row)[: max(num_valid, 0)]
            cache.release(request.block_table, request.keys(known), request.namespace)
        else:
            cache.distrust(request.block_table, request.namespace)
        self.forget(request)

    def forget(self, request: Request) -> None:
        """Remove a request from the batch, if it runs; the caller frees its pages."""
        row = request.row
        self._unshared.pop(request.request_id, None)
        if request in self._computing:
            self._computing.remove(request)
        request.num_computed = 0
        if row < 0:
            return
        self._joins = [join for join in self._joins if join.row != row]
        self._page_updates = [update for update in self._page_updates if update.row != row]
        self._table.leave(request)
        self._adapters.leave(request)

    def catch_up(self, request: Request) -> None:
        """Let the next step compute the tokens that a grammar has appended to a decoding request.

        The request's pages have room for them.
        """
        row = request.row
        self._table.is_decoding[row] = False
        self._table.sampled_len[row] = self._table.num_tokens[row]
        # These tokens come before any prompt: they are few, and a stream waits for them.
        self._computing.insert(0, request)

    # ---- prompts ----

    def _plan_chunks(self, budget: StepBudget, *, may_admit: bool) -> list[Chunk]:
        """Return the step's prompt chunks: those of running requests, then those of waiting ones.

        Waiting requests are admitted in the order of the policy. Without `may_admit` none are.
        """
        chunks: list[Chunk] = []
        for request in tuple(self._computing):
            if budget.is_spent:
                return chunks
            with self._faults.of(request):
                self._add_chunk(request, budget, chunks)
        # The queue is ordered only if needed: this costs more than the rest of planning a step.
        if not may_admit or not len(self._waiting) or budget.is_spent:
            return chunks
        if not self._table.has_free_row:
            self._wait = Wait.ROWS
            return chunks
        for request in self._in_order():
            if budget.is_spent or not self._table.has_free_row or not budget.admits(request):
                break
            with self._faults.of(request):
                if not self._adapters.admits(request):
                    request.times.skipped(Wait.ADAPTER)
                    continue
                if self._waits_for_prefix(request):
                    request.times.skipped(Wait.SHARED)
                    continue
                if request.waits_for_files(self._cache):
                    request.times.skipped(Wait.FILES)
                    continue
                request.times.passed()
                if not self._admit(request):
                    self._wait = Wait.STATES if self._cache.lacks_states else Wait.PAGES
                    self._held_up = request, self._order_key()
                    break
                self._add_chunk(request, budget, chunks)
        return chunks

    def _bring_adapters(self) -> None:
        """Schedule the copies of waiting requests' adapters to the device."""
        if self._adapters.num_slots and len(self._waiting):
            self._adapters.bring_ahead(self._waiting)

    def _in_order(self) -> Iterator[Request]:
        """Yield the waiting requests in the order of the policy.

        If the first request found too few pages, and `_order_key` has not changed since, it stays
        first.
        """
        held_up, self._held_up = self._held_up, None
        if held_up is not None and held_up[1] == self._order_key():
            yield held_up[0]
        yield from self._waiting.in_order()

    def _order_key(self) -> tuple[int, int, int]:
        """Return a key; while it is equal, a request that found too few pages stays first."""
        return self._waiting.num_changes, self._table.num_running, len(self._unshared)

    def _add_chunk(self, request: Request, budget: StepBudget, chunks: list[Chunk]) -> None:
        start = int(self._table.num_computed[request.row])
        num_left = int(self._table.num_tokens[request.row]) - start
        # Streams do not wait for pages that come from host memory.
        waits = self._decodes and self._cache.tiers.is_loading(request.block_table)
        length = 0 if waits else budget.take(request, start, num_left)
        if length:
            chunks.append(self._chunk(request, length))

    def _chunk(self, request: Request, length: int) -> Chunk:
        table, row = self._table, request.row
        start = int(table.num_computed[row])
        is_last = start + length == int(table.num_tokens[row])
        samples = is_last and bool(table.sampled_len[row] < table.end_len[row])
        tokens = table.tokens[row]
        spans: list[tuple[PromptReport, int, Int32Array]] = []
        for report in request.reports:
            begin, end = report.plan(start, length)
            if begin < end:
                spans.append((report, begin - start, tokens[begin + 1 : end + 1].copy()))
        embeds, num_embeds = b"", 0
        if request.embeds and start < request.num_prompt:
            num_embeds = min(length, request.num_prompt - start)
            size = len(request.embeds) // request.num_prompt
            embeds = request.embeds[start * size : (start + num_embeds) * size]
        part = tokens[start : start + length]
        return Chunk(request, start, length, is_last, samples, part, spans, embeds, num_embeds)

    def _admit(self, request: Request) -> bool:
        """Give a waiting request a row, and pages for all its tokens.

        Return false if there are too few pages or slots of recurrent states.
        """
        cache, block_table = self._cache, request.block_table
        for report in request.reports:
            report.planned = report.reported
        matched = cache.allocate(
            block_table,
            request.cacheable_keys(),
            request.namespace,
            len(request.tokens),
            # Each running request may need one more page before this request has ended.
            num_reserved=self._table.num_running,
            free_more=self._drop_behind_windows,
        )
        if matched is None:
            return False
        request.num_computed = matched
        if request.cached_tokens < 0:
            request.cached_tokens = matched
            request.admitted_at = time.monotonic()
            left = cache.prefix_break(block_table, request.keys(request.tokens))
            request.times.admitted(matched, *left)
            self.num_cached_tokens += matched
        self._waiting.remove(request)
        row = self._table.join(request)
        self._adapters.take(request)
        self._joins.append(
            RowJoin(
                row=row,
                spec=request.row_spec,
                num_prompt=request.num_prompt,
                output_ids=request.tokens[request.num_prompt :],
                has_grammar=request.grammar is not None,
                images=[
                    RowImage(each.start, each.image.num_tokens, each.image.size)
                    for each in request.images
                ],
                adapter_slot=request.adapter_slot,
            )
        )
        self._page_updates.append(PageUpdate(row, 0, block_table.held().copy()))
        self._table.capacity[row] = block_table.num_pages * cache.page_size
        self._unshared[request.request_id] = request
        self._computing.append(request)
        return True

    def _waits_for_prefix(self, request: Request) -> bool:
        if not self._cache.enable_prefix_cache or not self._unshared:
            return False
        if request.first_unreported is not None:
            # The request could use only a part of the prefix that it would wait for.
            return False
        tokens = request.keys(request.tokens)
        matched = self._cache.match_length(tokens[:-1], request.namespace)
        end = matched + SHARED_PREFIX_TOKENS
        if len(tokens) <= end:
            return False
        for other in self._unshared.values():
            if other.namespace != request.namespace or self._table.num_tokens[other.row] < end:
                continue
            known = other.keys(self._table.known_tokens(other.row))
            if np.array_equal(known[:end], tokens[:end]):
                self._note_branch(other, known, tokens)
                return True
        return False

    def _note_branch(self, other: Request, known: Int32Array, tokens: Int32Array) -> None:
        """Let `other` keep states or window pages at its first difference from a waiting request.

        `known` and `tokens` are the prefix cache's keys of `other` and of the waiting request.
        """
        if self._cache.states is not None or self._cache.windows is not None:
            most = min(len(known), len(tokens) - 1)
            different = known[:most] != tokens[:most]
            same = int(different.argmax()) if different.any() else most
            other.block_table.branch_points.add(same - same % self._cache.page_size)

    def share(self, request: Request, num_tokens: int | None = None) -> None:
        """Put the computed prompt, or its first `num_tokens` tokens, into the prefix cache."""
        if num_tokens is None:
            self._unshared.pop(request.request_id, None)
            request.times.prompt_done()
        if request.row < 0:
            return
        block_table, row = request.block_table, request.row
        version = block_table.version
        num_computed = min(int(self._table.num_computed[row]), int(self._table.num_tokens[row]) - 1)
        if num_tokens is not None:
            num_computed = min(num_computed, num_tokens)
        known = request.keys(self._table.tokens[row, :num_computed])
        self._cache.share(block_table, known, request.namespace)
        if block_table.version != version:
            self._page_updates.append(
                PageUpdate(row, 0, block_table.held()[: block_table.num_shared].copy())
            )
