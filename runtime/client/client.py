"""`EngineClient`: sends requests to the workers, and gives each caller a stream of its output.

The HTTP server and the offline engine use it, each on its own event loop.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from functools import partial

import msgspec

from runtime.client.adapter_record import AdapterRecord
from runtime.client.admission import Admitted, EngineLimits, check_images, pack_token_ids
from runtime.client.answer_journal import JOURNAL, AnswerJournal, Repeated
from runtime.client.answer_size import check_answer_size
from runtime.client.control_calls import ControlCalls
from runtime.client.front_extras import check_extras, check_kind
from runtime.client.generation_stream import GenerationInput, GenerationStream, StreamState
from runtime.client.grammar_client import GrammarCompiler
from runtime.client.outgoing import Outgoing
from runtime.client.recorder import Recording, RecordSink
from runtime.client.replica_link import ReplicaLink
from runtime.client.replica_router import Router
from runtime.client.request_history import RequestHistory, RequestTrace
from runtime.client.tenant import TENANT, tenants_namespace
from runtime.client.weight_gate import WeightState
from runtime.errors import (
    EngineDead,
    EngineNotReady,
    HeadraceError,
    InvalidRequest,
    MemoryReleased,
    Overloaded,
    TooLong,
)
from runtime.ipc.messages import (
    AbortAll,
    AbortRequests,
    GenerateRequest,
    RequestError,
    SchedulerInbound,
    TextDelta,
    TextDeltas,
)
from runtime.ipc.weight_messages import WeightCall
from runtime.requests.extra_spec import add_block
from runtime.requests.random_hex import seed_source
from runtime.requests.request_spec import RequestSpec
from runtime.requests.sampling_params import GrammarSpec
from runtime.text.encoding import check_prompt_length


class EngineClient:
    """Takes requests and returns streams of their output; independent of HTTP.

    Attributes:
        limits: bounds that every worker can meet; final once the workers are ready.
        accepting: false while the server is draining.
        holds_requests: whether requests wait while no replica is ready because of a planned
            replacement. If not, they are refused.
        links: the replicas, in the order of their numbers.
        calls: sends control messages to every replica and waits for their answers.
        grammars: compiles constraints; `None` if structured output is off.
        why_no_grammars: why structured output is off; empty if it is on.
        outgoing: requests that are admitted and cannot be sent to a scheduler yet.
        gate: keeps new requests waiting while weights change or generation is paused.
        loaded: which weights the replicas have.
        sinks: receivers of a record of every request that ended; may be empty.
        keeps_text: whether records contain the generated text.
        max_pixel_bytes: most bytes of images of all requests in flight; `None` for no bound.
        adapters: the adapters (LoRA) that requests may name.
        history: times of the last requests, by which `/explain_request` answers.
    """

    def __init__(
        self,
        limits: EngineLimits,
        random_seed: int | None = None,
        *,
        dp_size: int = 1,
        load_balance_method: str = "cache_aware",
        max_resumes: int = 0,
    ) -> None:
        """Start with provisional `limits` and `dp_size` links that are not connected yet.

        Args:
            limits: used until the workers report theirs.
            random_seed: makes the sampling seeds of requests without a seed reproducible.
            dp_size: number of replicas.
            load_balance_method: how requests are distributed over the replicas; see `Router`.
            max_resumes: how many deaths of its process a request survives.
        """
        self.limits = limits
        self.accepting = True
        self.holds_requests = False
        self.links = tuple(ReplicaLink(rank) for rank in range(dp_size))
        self._router = Router(self.links, load_balance_method)
        self.loaded = WeightState()
        self.adapters = AdapterRecord()
        self.grammars: GrammarCompiler | None = None
        self.why_no_grammars = ""
        self._streams: dict[int, StreamState] = {}
        self._rids: dict[tuple[str, str], StreamState] = {}  # The key is tenant and `rid`.
        self._ids = itertools.count(1)
        self.history = RequestHistory()
        self.outgoing = Outgoing(
            self._streams, self._router, self._ids.__next__, max_resumes, self.history
        )
        self.gate = self.outgoing.gate
        self.calls = ControlCalls(self.links, self._ids)
        self._seed_source = seed_source(random_seed)
        self.sinks: list[RecordSink] = []
        self.keeps_text = False
        self.max_pixel_bytes: int | None = None
        self._pixel_bytes = 0

    @property
    def ready(self) -> bool:
        """Whether any replica takes requests; assigning a value sets it for all replicas."""
        return self.links[0].ready or any(link.ready for link in self.links)

    @ready.setter
    def ready(self, value: bool) -> None:
        for link in self.links:
            link.ready = value

    @property
    def num_in_flight(self) -> int:
        """Number of requests whose final chunk has not been read yet."""
        return len(self._streams)

    def generate(self, item: GenerationInput, *, is_recorded: bool = True) -> GenerationStream:
        """Admit one request and open its stream.

        Args:
            item: the request.
            is_recorded: false for health probes, which must not appear in metrics and logs.

        Raises:
            InvalidRequest: the request cannot fit, its `rid` is in flight already, or it names a
                replica that does not exist.
            EngineNotReady: the worker is loading.
            MemoryReleased: the weights or the KV pool are released now.
            Overloaded: the server is draining, or the images of all requests take too much memory.
        """
        if not self.accepting:
            raise Overloaded("The server is shutting down and takes no new requests.")
        if not self.ready and not self.holds_requests:
            raise EngineNotReady("The model is still loading; see /startupz for progress.")
        refused = self.loaded.why_refused
        if refused is not None and not self.gate.is_closed:
            raise MemoryReleased(refused)
        spec = item.spec
        if spec.dp_rank is not None:
            self._check_rank(spec.dp_rank)
        name = (TENANT.get(), spec.rid)
        if name in self._rids:
            raise InvalidRequest(
                f"A request with rid {spec.rid[:64]!r} is already in flight.", param="rid"
            )
        check_kind(spec.extras, self.limits)
        sampling = spec.sampling
        input_ids, data, max_new_tokens = self.admit(item.input_ids, spec)
        check_images(item.input_ids, spec, self.limits)
        num_pixel_bytes = spec.num_pixel_bytes
        self._check_pixels(num_pixel_bytes)
        if spec.extras:
            check_extras(spec.extras, len(input_ids))
            check_answer_size([item], self.limits)
        grammar = self._compile(sampling.grammar)
        self.adapters.enter(spec.row.adapter_id)
        namespace = tenants_namespace(spec.cache_namespace)
        link = self._router.choose(data, namespace, spec.dp_rank, spec.images)
        arrival = time.monotonic()
        # An answer that is not streamed is computed again from its prompt.
        journal = JOURNAL.get() if spec.stream else None
        is_held = journal is not None and journal.is_repeating
        request = GenerateRequest(
            request_id=next(self._ids),
            input_ids=data,
            spec=msgspec.structs.replace(
                spec,
                row=msgspec.structs.replace(
                    spec.row,
                    sampling=msgspec.structs.replace(
                        sampling,
                        max_new_tokens=max_new_tokens,
                        seed=self._new_seed() if sampling.seed is None else sampling.seed,
                        # The scheduler gets the compiled grammar, by its key, not the text.
                        grammar=None,
                    ),
                ),
                cache_namespace=namespace,
                # The prompt may have been cut, so its embeddings are cut to the same length.
                input_embeds=spec.input_embeds[: len(input_ids) * self.limits.hidden_size * 4],
            ),
            arrival=arrival,
        )
        trace = RequestTrace(request, name, len(input_ids))
        stream = StreamState(request, name, len(input_ids), arrival, link, trace, num_pixel_bytes)
        if grammar is None and not is_held and not self.outgoing.delay(stream):
            trace.sent()
            stream.link.send(request)
        # The request is registered only after it was sent: one that could not be sent would stay in
        # flight forever.
        self._streams[request.request_id] = stream
        if is_recorded:
            self.history.begin(trace)
        self._rids[name] = stream
        stream.join_link()
        self._pixel_bytes += num_pixel_bytes
        if is_held:
            self.outgoing.hold(stream)
        elif grammar is not None:
            self.outgoing.compile(stream, *grammar)
        opened = self._open(stream, grammar, journal)
        if self.sinks and is_recorded:
            opened.recording = Recording(
                item, stream.arrival, self.sinks, keeps_text=self.keeps_text
            )
        return opened

    def _open(
        self,
        stream: StreamState,
        grammar: tuple[bytes, asyncio.Future[bytes]] | None,
        journal: AnswerJournal | None,
    ) -> GenerationStream:
        opened = GenerationStream(self, stream)
        if journal is not None:
            go_on = partial(self.outgoing.go_on, stream, grammar)
            opened.journal = journal.open(Repeated(partial(self._repeat, stream), go_on))
        return opened

    def _check_pixels(self, num_bytes: int) -> None:
        most = self.max_pixel_bytes
        if most is not None and self._pixel_bytes + num_bytes > most:
            raise Overloaded("The images of other requests that run or wait take too much memory.")

    def _new_seed(self) -> int:
        journal = JOURNAL.get()
        return self._seed_source() if journal is None else journal.seed(self._seed_source)

    def admit(self, input_ids: list[int], spec: RequestSpec) -> Admitted:
        """Fit a request into the context length and the KV pool.

        Args:
            input_ids: the prompt.
            spec: the checked parameters. A `max_new_tokens` of `None` means as many as fit. A
                number that the client set and that does not fit is refused, not reduced.

        Raises:
            TooLong: the request can never fit.
            InvalidRequest: a token id is unknown, or `min_new_tokens` cannot fit.
        """
        limits, sampling = self.limits, spec.sampling
        # The length is checked before the ids, because checking the ids of a list that is far too
        # long is slow.
        check_prompt_length(len(input_ids), limits)
        input_ids = input_ids[: limits.max_req_len - limits.num_least_output]
        packed = pack_token_ids(input_ids, limits)
        num_prompt = len(input_ids)
        room = limits.max_req_len - num_prompt
        wanted = sampling.max_new_tokens
        if wanted is None:
            fitting = room
        elif wanted > room and spec.explicit_max_new_tokens and not limits.allow_auto_truncate:
            which = (
                "model's maximum context length"
                if limits.context_len <= limits.max_total_num_tokens
                else "KV pool's capacity"
            )
            raise TooLong(
                f"Requested token count exceeds the {which} of {limits.max_req_len} tokens: "
                f"{num_prompt} tokens of input and max_new_tokens {wanted}."
            )
        else:
            fitting = min(wanted, room)
        if sampling.min_new_tokens > fitting:
            raise InvalidRequest(
                f"min_new_tokens must be in [0, {fitting}], the tokens that still fit, got "
                f"{sampling.min_new_tokens}.",
                param="min_new_tokens",
            )
        return Admitted(input_ids, packed, fitting)

    def _check_rank(self, rank: int) -> None:
        if not 0 <= rank < len(self.links):
            raise InvalidRequest(
                f"data_parallel_rank must be in [0, {len(self.links)}), the server's replicas, "
                f"got {rank}.",
                param="data_parallel_rank",
            )
        if not self.links[rank].ready and not self.holds_requests:
            raise EngineNotReady(f"Replica {rank} is being started; another one may be free.")

    def _compile(self, spec: GrammarSpec | None) -> tuple[bytes, asyncio.Future[bytes]] | None:
        if spec is None:
            return None
        return self.require_grammars(spec.kind, spec.kind).compile(spec)

    def require_grammars(self, what: str, param: str) -> GrammarCompiler:
        """Return the compiler of constraints, for a feature that needs it.

        Args:
            what: the feature's name in the error.
            param: the request field that uses the feature.

        Raises:
            InvalidRequest: structured output is off; the message says why and how to turn it on.
        """
        if self.grammars is None:
            raise InvalidRequest(
                f"{what} needs structured output, which is off in this server: "
                f"{self.why_no_grammars}.",
                param=param,
            )
        return self.grammars

    def with_adapter(self, adapter_id: int) -> list[StreamState]:
        """Return the requests that use an adapter and have not ended."""
        return [s for s in self._streams.values() if s.adapter_id == adapter_id and s.is_open]

    def num_at_schedulers(self) -> int:
        """Return the number of requests that were sent to a scheduler and have not ended."""
        unsent = self.outgoing.unsent
        return sum(each.is_open for key, each in self._streams.items() if key not in unsent)

    def is_running(self, rid: str) -> bool:
        """Whether a request of the current tenant named `rid` has not ended yet."""
        return (TENANT.get(), rid) in self._rids

    def abort(self, rid: str, *, of_all_tenants: bool = False) -> int:
        """Abort the request `rid`, or the batch `rid_0`, `rid_1`, ...; return how many matched.

        Only requests of the current tenant match, unless `of_all_tenants` is set.
        """
        tenants = {each for each, _ in self._rids} if of_all_tenants else {TENANT.get()}
        ids = [
            stream.request_id
            for (tenant, name), stream in self._rids.items()
            if tenant in tenants and (name == rid or _is_batch_member(name, rid))
        ]
        self.abort_ids(ids)
        return len(ids)

    def abort_all(self, message: str = "Aborted") -> None:
        """Abort every request in flight; each one reports `message`."""
        self.outgoing.abort(self.outgoing.unsent, message)
        self.abort_sent(message)

    def abort_sent(self, message: str = "Aborted") -> None:
        """Abort the requests that were sent to schedulers; requests held back by the gate stay."""
        if self._streams:
            self._broadcast(AbortAll(message))

    def abort_ids(self, request_ids: list[int]) -> None:
        """Abort requests by their internal ids; ids of requests that have ended are ignored."""
        unsent = self.outgoing.unsent.intersection(request_ids)
        self.outgoing.abort(unsent, "Abort in waiting queue")
        by_link: dict[ReplicaLink, list[int]] = {}
        for request_id in request_ids:
            stream = self._streams.get(request_id)
            if stream is not None and request_id not in unsent:
                by_link.setdefault(stream.link, []).append(request_id)
        for link, ids in by_link.items():
            link.send(AbortRequests(ids))

    def _broadcast(self, message: SchedulerInbound) -> None:
        """Send every replica a message that needs no answer."""
        for link in self.links:
            link.send(message)

    def repeat_options(self, rank: int) -> None:
        """Send a replica's restarted scheduler the changed options and the loaded adapters."""
        self.calls.repeat_options(rank)
        for load in self.adapters.messages():
            self.links[rank].send(WeightCall(next(self._ids), load))

    def forget(self, request_id: int) -> None:
        """Drop the stream of a request that has ended, or that is no longer read."""
        self.outgoing.drop(request_id)
        stream = self._streams.pop(request_id, None)
        if stream is None:
            return
        stream.leave_link()
        self.history.end(stream.trace, stream.sent_ids)
        self._pixel_bytes -= stream.num_pixel_bytes
        if self._rids.get(stream.name) is stream:
            del self._rids[stream.name]

    # ---- called by the owner of the sockets ----

    def on_deltas(self, message: TextDeltas) -> None:
        """Add each delta of a detokenizer's message to its request's stream."""
        streams, version = self._streams, self.loaded.version
        for delta in message.deltas:
            stream = streams.get(delta.request_id)
            if stream is not None:
                stream.weight_version = version
                self._extend(stream, delta)

    def _extend(self, stream: StreamState, delta: TextDelta) -> None:
        if delta.text:
            stream.text.append(delta.text)
            stream.num_shown += len(delta.text)
        if delta.token_ids:
            stream.token_ids.extend(memoryview(delta.token_ids).cast("i"))
            stream.sent_ids += delta.token_ids
        if stream.held_since:
            self.outgoing.went_on(stream)
        if delta.extras is not None:
            for block in delta.extras:
                add_block(stream.extras, block)
        if delta.cached_tokens >= 0:
            stream.cached_tokens = delta.cached_tokens
        if delta.times is not None:
            stream.times = delta.times
            stream.trace.began(delta.times)
        if delta.reason is not None:
            stream.trace.finished_at = time.monotonic()
        stream.finish_reason = delta.reason
        stream.num_retractions = delta.num_retractions
        stream.wake.set()

    def _repeat(self, stream: StreamState, delta: TextDelta) -> bool:
        """Pass a recorded chunk of another server to a stream.

        Return false if the stream has ended.
        """
        if not stream.is_open or self._streams.get(stream.request_id) is not stream:
            return False
        stream.weight_version = self.loaded.version
        self._extend(stream, delta)
        return True

    def on_request_error(self, message: RequestError) -> None:
        """Fail the requests that the message names, and no others."""
        for request_id in message.request_ids:
            stream = self._streams.get(request_id)
            if stream is not None:
                stream.fail(HeadraceError(message.message))

    def stop_orphans(self, rank: int) -> None:
        """Abort everything that a replica runs, because no stream reads its output any longer."""
        self.links[rank].send(AbortAll())

    def interrupt(self, rank: int, why: str, *, keeps_weights: bool, counts: bool = True) -> None:
        """Handle the end of one of a replica's processes: its requests wait, or fail.

        Waiting requests go on when a process takes them; see `Outgoing.interrupt`.

        Args:
            rank: number of the replica, which is not ready now.
            why: a sentence for the clients of requests that fail.
            keeps_weights: whether the new process will have the weights that are loaded now.
            counts: whether this end counts towards `max_resumes`, because a request may have caused
                it.
        """
        self.outgoing.interrupt(self.links[rank], why, may_resume=keeps_weights, counts=counts)
        self.calls.fail(rank, why)

    def resume(self) -> None:
        """Send the waiting requests, because a replica is ready."""
        self.outgoing.send_waiting()

    def fail_all(self, message: str) -> None:
        """End every request in flight with an error, because the engine stops."""
        for stream in self._streams.values():
            self.outgoing.drop(stream.request_id)
            stream.fail(EngineDead(message))
        for link in self.links:
            self.calls.fail(link.rank, message)


def _is_batch_member(name: str, rid: str) -> bool:
    prefix, _, index = name.rpartition("_")
    return prefix == rid and index.isdigit()
