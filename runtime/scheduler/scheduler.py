"""The scheduler: handles messages, plans and launches steps, and sends their tokens."""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable, Iterable

from runtime.cache.host_tier import WEIGHTS
from runtime.cache.manager import CacheManager
from runtime.grammar.grammar_backend import GrammarError
from runtime.ipc.messages import (
    AbortAll,
    AbortRequests,
    ControlReply,
    FinishReason,
    FlushCache,
    FrontInbound,
    GenerateRequest,
    MatchPrefix,
    Ping,
    RequestError,
    SchedulerInbound,
    SetOptions,
    StopHit,
    TokenDeltas,
    WorkerCommand,
    internal_error,
    refusal,
)
from runtime.ipc.time_messages import RequestTimes, Wait
from runtime.ipc.transport import Inbox
from runtime.ipc.weight_messages import (
    AdapterOp,
    ContinueGeneration,
    GroupStatus,
    InvalidateCache,
    PauseGeneration,
    ReceiveStatus,
    ReleaseMemory,
    WeightCall,
)
from runtime.requests.fault_domain import FaultDomains, log_failure
from runtime.scheduler.adapter_places import AdapterPlaces
from runtime.scheduler.grammars import Grammars
from runtime.scheduler.image_cache import ImageCache
from runtime.scheduler.output import OutputBuffer, OutputProcessor
from runtime.scheduler.planner import Planner
from runtime.scheduler.request import LiveRequests, Request
from runtime.scheduler.scheduler_options import SchedulerOptions
from runtime.scheduler.stats import SchedulerStats, report_prefix
from runtime.scheduler.step_clock import StepClock
from runtime.scheduler.step_images import why_not_seen
from runtime.scheduler.step_masks import StepMasks
from runtime.scheduler.steps_in_flight import StepsInFlight
from runtime.scheduler.table import RequestTable
from runtime.scheduler.waiting import WaitingQueue
from runtime.step.executor import Runner, WeightHandler, refuse_command

logger = logging.getLogger(__name__)

GRAMMAR_WAIT_S = 0.001
# Least time between two writes of the gauges while steps follow each other, seconds.
PUBLISH_INTERVAL_S = 0.005
# Messages that are handled while pipeline stages compute: they change nothing in other ranks.
_IN_MID_STEP = GenerateRequest | AbortRequests | AbortAll | StopHit | MatchPrefix | Ping


class Scheduler:
    """Runs requests with continuous batching: they join and leave the batch at every step.

    With `overlap`, a step is launched before the tokens of the previous step are read. So a request
    that ends has one token too many in flight, which is dropped.
    """

    def __init__(  # noqa: PLR0913  # its parts and its ways out
        self,
        runner: Runner,
        cache: CacheManager,
        stats: SchedulerStats,
        options: SchedulerOptions,
        *,
        send_tokens: Callable[[TokenDeltas], None],
        send_front: Callable[[FrontInbound], None],
        grammars: Grammars | None = None,
        execute: Callable[[WorkerCommand], ControlReply] | None = None,
        weights: WeightHandler | None = None,
        images: ImageCache | None = None,
    ) -> None:
        """Create a scheduler without requests.

        `grammars` is needed for structured output, and `images` for prompts with images. `execute`
        handles commands that concern neither requests nor the cache, such as a profile.
        """
        self._images = images
        self._runner = runner
        self._weights = weights
        # Prefix of every cache namespace. It changes with the weights, so that requests never find
        # keys and values that earlier weights computed.
        self._generation = ""
        self._generations = itertools.count(1)
        self._is_paused = False
        self._cache = cache
        self._stats = stats
        self._send_tokens = send_tokens
        self._send_front = send_front
        self._obey = execute or refuse_command
        self._max_queued = options.max_queued_requests
        self._max_req_len = min(options.context_len, cache.pool.num_pages * cache.page_size)
        self._clock = StepClock()
        self._requests = LiveRequests(self._clock)
        # An error while one request is handled ends only that request.
        self._faults = FaultDomains(self._end_failed)
        # One token more than the context: with overlap one more token is written, then dropped.
        max_len = options.context_len + 1
        self._table = RequestTable(options.max_running_requests, max_len, options.num_stages)
        self._waiting = WaitingQueue(options.policy, cache, self._clock)
        self._adapters = AdapterPlaces(options.num_adapter_slots, options.evicts_oldest)
        self._planner = Planner(
            self._table,
            self._waiting,
            cache,
            self._faults,
            token_budget=options.token_budget,
            images=images,
            adapters=self._adapters,
            clock=self._clock,
        )
        self._grammars = grammars or Grammars(None, 0, [])
        self._buffer = OutputBuffer(options.stream_interval)
        self._output = OutputProcessor(
            self._table,
            self._planner,
            self._waiting,
            self._buffer,
            self._requests,
            options.eos_token_ids,
            self._grammars,
            self._faults,
            # With overlap, a row with forced tokens would keep the batch from using its CUDA graph.
            jump_ahead=not options.overlap,
        )
        self._in_flight = StepsInFlight(overlap=options.overlap, num_stages=options.num_stages)
        self._was_idle = self._is_checked = True
        self._published_at = 0.0

    @property
    def has_work(self) -> bool:
        """Whether there is a live request or a step in flight."""
        return bool(self._requests) or bool(self._in_flight)

    @property
    def can_compute(self) -> bool:
        """Whether the memory of weights and KV pool is allocated, so that steps are possible."""
        return self._weights is None or self._weights.can_compute

    @property
    def can_step(self) -> bool:
        """Whether there is work, generation is not paused, and the memory is allocated."""
        return self.has_work and not self._is_paused and self.can_compute

    # ---- messages ----

    def receive(self, messages: Iterable[SchedulerInbound]) -> None:
        """Handle `messages` in order; an error ends only the request that its message concerns."""
        for message in messages:
            try:
                if self._in_flight.is_staged and not isinstance(message, _IN_MID_STEP):
                    # All ranks must handle it between the same two steps.
                    self._drain()
                self._dispatch(message)
            except Exception as error:
                why = log_failure(f"A message of kind {type(message).__name__}", error)
                if isinstance(message, GenerateRequest):
                    self._send_front(RequestError([message.request_id], why))
                elif (call_id := getattr(message, "call_id", None)) is not None:
                    # The caller waits for a reply.
                    self._send_front(ControlReply(call_id, False, why))

    def _dispatch(self, message: SchedulerInbound) -> None:
        match message:
            case GenerateRequest():
                self._add(message)
            case AbortRequests():
                for request_id in message.request_ids:
                    self._abort(request_id)
            case AbortAll():
                for request_id in list(self._requests):
                    self._abort(request_id, message.message)
            case StopHit():
                for request_id in message.request_ids:
                    self._remove(request_id)
            case FlushCache() | MatchPrefix():
                self._answer(self._ask_cache(message))
            case SetOptions():
                self._set_options(message.values)
                self._answer(ControlReply(message.call_id, True))
            case WeightCall():
                self._answer(self._change_weights(message))
            case Ping() | PauseGeneration() | ContinueGeneration() | InvalidateCache():
                self._control(message)
                self._answer(ControlReply(message.call_id, True))
            case _:
                self._answer(self._obey(message))

    def _answer(self, reply: ControlReply) -> None:
        # Gauges are written first, so they are up to date when the reply arrives.
        self._publish(may_wait=False)
        self._send_front(reply)

    def _add(self, message: GenerateRequest) -> None:
        request = Request(message)
        request.namespace = self._generation + request.namespace
        self._requests[request.request_id] = request
        with self._faults.of(request):
            self._queue(request, message)

    def _queue(self, request: Request, message: GenerateRequest) -> None:
        needed = request.num_prompt + request.max_new_tokens
        if needed > self._max_req_len or not request.num_prompt:
            self._refuse(
                request,
                f"The request needs {needed} tokens, more than the {self._max_req_len} that "
                "context and KV pool hold.",
                400,
            )
        elif not self._adapters.has(request.adapter_id):
            self._refuse(request, "The request's adapter is not loaded.", 400)
        elif (wrong := why_not_seen(request, self._images)) is not None:
            self._refuse(request, wrong, 400)
        elif self._waiting.is_full(self._max_queued) and not request.is_resumed:
            self._refuse(request, "The request queue is full.", 503)
        else:
            self._stats.num_prompt_tokens += request.num_prompt
            if not message.grammar_key:
                self._grammars.replay(request)
                self._waiting.push(request)
                return
            try:
                self._grammars.take(request, message.grammar_key, message.grammar)
            except GrammarError as error:
                self._end_internally(request, str(error))

    def _refuse(self, request: Request, message: str, status_code: int) -> None:
        self._end_early(request, refusal(message, status_code))

    def _end_early(self, request: Request, reason: FinishReason) -> None:
        self._buffer.end(request, reason)
        del self._requests[request.request_id]

    def _end_internally(self, request: Request, why: str) -> None:
        self._end_early(request, internal_error(why))

    def _abort(self, request_id: int, why: str = "Aborted") -> None:
        request = self._requests.get(request_id)
        if request is None:
            return
        with self._faults.of(request):
            if request.row >= 0:
                self._output.finish(request, FinishReason("abort", message=why))
                return
            if why == "Aborted" and not request.num_retractions:
                why = "Abort in waiting queue"
            self._buffer.end(request, FinishReason("abort", message=why))
            self._remove(request_id)

    def _remove(self, request_id: int) -> None:
        request = self._requests.get(request_id)
        if request is None:
            return
        with self._faults.of(request):
            if request.row >= 0:
                self._output.remove(request)
                return
            if not self._grammars.drop(request):
                self._waiting.remove(request)
            del self._requests[request_id]

    def _end_failed(self, request: Request, why: str) -> None:
        """Remove a request in any state, because handling it raised; called by `_faults`."""
        self._requests.discard(request.request_id)
        self._grammars.drop(request)
        if request in self._waiting:
            self._waiting.remove(request)
        self._planner.forget(request)
        self._cache.recover([request.block_table for request in self._requests.values()])
        if not self._buffer.fail(request, internal_error(why)):
            # The detokenizer does not know this request: the front process gets the error directly.
            self._send_front(RequestError([request.request_id], why))

    def _ask_cache(self, message: FlushCache | MatchPrefix) -> ControlReply:
        if isinstance(message, FlushCache):
            return self._flush(message.call_id)
        return report_prefix(message, self._cache, self._generation)

    def _set_options(self, values: dict[str, int]) -> None:
        self._max_queued = values.get("max_queued_requests", self._max_queued)
        self._stats.log_interval = values.get("decode_log_interval", self._stats.log_interval)

    def _flush(self, call_id: int) -> ControlReply:
        # The front process clears its record of cached grammars at this place in the message order.
        self._grammars.clear()
        running, waiting = self._table.num_running, len(self._waiting)
        # While generation is paused, waiting requests hold no pages.
        if running or self._in_flight or (waiting and not self._is_paused):
            return ControlReply(
                call_id,
                False,
                f"Cache not flushed: {running} requests are running and {waiting} are waiting.",
            )
        self._cache.flush()
        return ControlReply(call_id, True, "Cache flushed.")

    # ---- weights and pauses ----

    def _change_weights(self, call: WeightCall) -> ControlReply:
        if isinstance(call.op, AdapterOp) and self._weights is not None:
            return self._adapters.change(call, self._weights, self._requests.values())
        if not isinstance(call.op, GroupStatus | ReceiveStatus):
            self._drain()
            self._cache.tiers.stop_files()
            if self._images is not None:
                self._images.clear()
        if isinstance(call.op, ReleaseMemory):
            running, waiting = self._table.num_running, len(self._waiting)
            if running or (waiting and not self._is_paused):
                return ControlReply(
                    call.call_id,
                    False,
                    f"Memory is released while nothing runs: {running} requests are running and "
                    f"{waiting} are waiting.",
                )
            self._invalidate_cache()
        if self._weights is None:
            return ControlReply(call.call_id, False, "This worker cannot change its weights.")
        reply = self._weights.handle(call)
        if reply.success and call.flush_cache:
            self._invalidate_cache()
        return reply

    def _control(
        self, message: Ping | PauseGeneration | ContinueGeneration | InvalidateCache
    ) -> None:
        match message:
            case PauseGeneration():
                self._pause(retract=message.retract)
            case ContinueGeneration():
                self._is_paused = False
            case InvalidateCache():
                self._invalidate_cache()

    def _pause(self, *, retract: bool) -> None:
        self._drain()
        self._is_paused = True
        self._clock.wait_for(Wait.PAUSE)
        if retract:
            for request in self._table.running():
                with self._faults.of(request):
                    self._planner.retract(request, "generation is paused")

    def _drain(self) -> None:
        """Wait for all steps in flight and process them. No step is in flight afterwards."""
        try:
            self._finish_all_but(0)
        except Exception as error:
            self._fail_running(error)

    def _invalidate_cache(self) -> None:
        """Empty the prefix cache, and hide the pages of running requests from later requests."""
        self._cache.flush()
        before, self._generation = self._generation, f"{WEIGHTS}{next(self._generations)}:"
        for request in self._requests.values():
            if request.row < 0:
                request.namespace = self._generation + request.namespace[len(before) :]

    # ---- steps ----

    def step(self) -> None:
        """Compute one step, if there is anything to compute, and send its tokens and ends."""
        self._is_checked = False
        try:
            self._step()
        except Exception as error:
            self._fail_running(error)
        self._report(is_stepping=True)

    def _step(self) -> None:
        if self._grammars.num_waiting:
            for request in self._grammars.ready(self._end_internally):
                self._waiting.push(request)
        is_launched = self._launch()
        self._finish_all_but(self._in_flight.num_kept(self._planner.num_retractions, is_launched))

    def _launch(self) -> bool:
        """Launch the next step; return false if there is none."""
        planned = self._planner.plan()
        if planned is None:
            if (self._grammars.num_waiting or self._cache.tiers.is_reading) and not self._in_flight:
                # The pause leaves the interpreter lock to the threads that load grammars or files.
                time.sleep(GRAMMAR_WAIT_S)
            return False
        rows = planned.plan.sample_rows
        if self._table.has_grammar[rows].any():
            planned.masks = StepMasks(self._grammars, self._table, rows)
        self._stats.count_step(planned.plan)
        self._in_flight.add(planned, self._runner.launch(planned.plan, planned.masks))
        return True

    def _finish_all_but(self, num_left: int) -> None:
        """Wait for the oldest steps and process their results, until `num_left` are in flight."""
        while len(self._in_flight) > num_left:
            planned, result = self._in_flight.finish()
            self._clock.stepped(planned.note, has_images=bool(planned.plan.image_loads))
            if result.was_retried and self._images is not None:
                self._images.forget_failed(planned.plan.image_loads)
            self._output.process(planned, result)

    def _fail_running(self, error: Exception) -> None:
        """End every running request after a step failed for an unknown cause."""
        self._in_flight.discard()
        if self._images is not None:
            self._images.clear()
        reason = internal_error(log_failure("A step of all running requests", error))
        running = self._table.running()
        for request in running:
            with self._faults.of(request):
                self._output.finish(request, reason, keep_cached=False)
        if not running:
            # A waiting request must have caused the failure, but it is unknown which one.
            for request in list(self._waiting):
                with self._faults.of(request):
                    self._buffer.end(request, reason)
                    self._remove(request.request_id)
        self._adapters.distrust()
        # The failure may have left pages that are neither free, nor cached, nor held by a request.
        self._cache.recover([request.block_table for request in self._requests.values()])
        self.check_invariants()

    def turn(self, inbox: Inbox[SchedulerInbound], idle_wait_s: float) -> None:
        """Do one iteration of the worker's loop: handle messages, then compute a step or wait."""
        self.receive(inbox.drain())
        if self.can_step:
            self.step()
            return
        self.rest()
        if not inbox.wait(idle_wait_s):
            self.check_when_idle()

    def rest(self) -> None:
        """In an iteration without a step, send the ends of requests that were ended by messages."""
        self._report()

    def check_when_idle(self) -> None:
        """Assert that no page of the KV pool is lost, once after each busy period.

        The check takes milliseconds with half a million pages, so it runs only when idle.

        Raises:
            AssertionError: a page is lost or owned twice.
        """
        if not self.has_work and not self._is_checked:
            self.check_invariants()
            self._is_checked = True

    def _report(self, *, is_stepping: bool = False) -> None:
        self._cache.tiers.move_files()
        message = self._buffer.take()
        idle = not self.has_work
        was_idle, self._was_idle = self._was_idle, idle
        may_wait = is_stepping and not idle and not was_idle
        # The gauges are written before the message, as they are before any reply.
        self._publish(may_wait=may_wait and not (message is not None and message.ends))
        if ended := self._clock.take_ended():
            self._send_front(RequestTimes(ended))
        if message is not None:
            self._send_tokens(message)

    def _publish(self, *, may_wait: bool) -> None:
        now = time.monotonic()
        if may_wait and now - self._published_at < PUBLISH_INTERVAL_S:
            return
        self._published_at = now
        self._stats.publish(
            now=now,
            has_work=self.has_work,
            table=self._table,
            cache=self._cache,
            num_waiting=len(self._waiting) + self._grammars.num_waiting,
            num_retracted=self._waiting.num_retracted,
            num_generated=self._output.num_generated,
            num_retractions=self._planner.num_retractions,
            num_nan=self._output.num_nan,
            num_prefix_hits=self._planner.num_cached_tokens,
            adapters=self._adapters,
        )

    def check_invariants(self) -> None:
        """Assert that no page of the KV pool is lost or owned twice; call between two steps."""
        self._cache.check_invariants([request.block_table for request in self._table.running()])
