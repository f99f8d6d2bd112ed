"""Holds admitted requests that cannot be sent to a scheduler yet, and sends them later.

A request waits here while its grammar compiles, while the gate is closed, or while no process is
ready for it. The requests of a process that dies come back here. A new process continues such a
request after the tokens that have arrived. The output is the same as without the death, because
sampling depends only on the seed and the position.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable
from functools import partial

import msgspec

from runtime.client.generation_stream import StreamState
from runtime.client.replica_link import ReplicaLink
from runtime.client.replica_router import Router
from runtime.client.request_history import RequestHistory
from runtime.client.weight_gate import RequestGate
from runtime.errors import EngineDead, HeadraceError
from runtime.ipc.messages import FinishReason

logger = logging.getLogger(__name__)


class Outgoing:
    """Holds requests that cannot be sent now, and sends them later.

    Sends them again if their process dies.

    Attributes:
        gate: keeps requests back while weights change or generation is paused.
        streams: every stream in flight, by the id of its request; shared with the client.
        num_resumed: number of times that a request went on in another process.
        on_pause: called with the seconds that a resumed request had no process.
    """

    def __init__(
        self,
        streams: dict[int, StreamState],
        router: Router,
        new_id: Callable[[], int],
        max_resumes: int,
        history: RequestHistory,
    ) -> None:
        """Prepare to send the requests of `streams`.

        Args:
            streams: every stream in flight, by the id of its request.
            router: chooses another replica if a request's own replica takes no requests.
            new_id: returns an unused request id.
            max_resumes: how many deaths of its process a request survives; the next one ends it.
            history: records the new ids of requests that go on in another process.
        """
        self.gate = RequestGate()
        self.streams = streams
        self._router = router
        self._new_id = new_id
        self._max_resumes = max_resumes
        self._history = history
        # The ids of requests that are not sent yet, by reason: their grammar is being compiled,
        # their journal is being repeated, or no replica takes them.
        self._compiling: set[int] = set()
        self._repeating: set[int] = set()
        self._waiting: dict[int, StreamState] = {}
        self.num_resumed = 0
        self.on_pause: Callable[[float], None] = _ignore

    @property
    def num_compiling(self) -> int:
        """Number of requests that wait for their grammar."""
        return len(self._compiling)

    @property
    def num_waiting(self) -> int:
        """Number of requests that wait for a process."""
        return len(self._waiting)

    def num_compiling_for(self, link: ReplicaLink) -> int:
        """Return the number of requests for the replica `link` that wait for their grammar."""
        return sum(self.streams[each].link is link for each in self._compiling)

    def num_held_for(self, link: ReplicaLink) -> int:
        """Return the number of requests for the replica `link` that wait at the gate."""
        return sum(self.streams[each].link is link for each in self.gate.held())

    @property
    def unsent(self) -> set[int]:
        """Ids of the requests that wait here."""
        return self._compiling | self._repeating | self.gate.held() | self._waiting.keys()

    # ---- on the way ----

    def hold(self, stream: StreamState) -> None:
        """Hold a request until `go_on`, while its reader gets recorded chunks of another server."""
        self._repeating.add(stream.request_id)

    def go_on(
        self, stream: StreamState, grammar: tuple[bytes, asyncio.Future[bytes]] | None
    ) -> None:
        """Send a held request, so that its output continues after the repeated chunks.

        Args:
            stream: the request's stream, which may have ended.
            grammar: the arguments `key` and `compiled` of `compile`; `None` for free text.
        """
        self._repeating.discard(stream.request_id)
        if not stream.is_open or self.streams.get(stream.request_id) is not stream:
            return
        stream.is_resumed = True
        stream.held_since = time.monotonic()
        self.num_resumed += 1
        if grammar is not None:
            self.compile(stream, *grammar)
        else:
            self._waiting[stream.request_id] = stream
            self.send_waiting()

    def compile(self, stream: StreamState, key: bytes, compiled: asyncio.Future[bytes]) -> None:
        """Send a request once its grammar is compiled."""
        self._compiling.add(stream.request.request_id)
        stream.trace.hold("grammar")
        compiled.add_done_callback(lambda done: self._compiled(stream, key, done))

    def _compiled(self, stream: StreamState, key: bytes, done: asyncio.Future[bytes]) -> None:
        if stream.request.request_id not in self._compiling:
            # The request was aborted, or its stream was closed.
            return
        self._compiling.discard(stream.request.request_id)
        error = done.exception()
        if error is not None:
            stream.fail(
                type(error)(error.message, param=error.param)
                if isinstance(error, HeadraceError)
                else HeadraceError("The grammar could not be compiled.")
            )
            return
        stream.grammar = key, done.result()
        # Grammars must be sent in the same order in which `link` notes them, because its notes copy
        # the scheduler's cache.
        self._send(stream)

    def delay(self, stream: StreamState) -> bool:
        """Hold a request at the gate, or until a process takes it; return whether it is held.

        If the result is false, the caller can send the request now.
        """
        if self.gate.is_closed:
            stream.trace.hold(self.gate.reason)
            self.gate.hold(stream.request_id, partial(self._send, stream))
            return True
        if not stream.link.ready and not self._move(stream):
            stream.trace.hold("restart" if stream.is_resumed else "process")
            self._waiting[stream.request_id] = stream
            return True
        return False

    def _send(self, stream: StreamState) -> None:
        """Send a request that was held, or hold it again."""
        request = stream.request
        self._waiting.pop(request.request_id, None)
        if self.delay(stream):
            return
        if stream.is_resumed:
            request = msgspec.structs.replace(
                request,
                is_resumed=True,
                output_ids=bytes(stream.sent_ids),
                num_shown=stream.num_shown,
            )
        stream.trace.sent()
        if stream.grammar is None:
            stream.link.send(request)
        else:
            stream.link.send_with_grammar(request, *stream.grammar)

    def _move(self, stream: StreamState) -> bool:
        """Give a request to another replica if one is ready and the caller did not choose one."""
        spec = stream.request.spec
        if spec.dp_rank is not None or not self._router.has_ready:
            return False
        link = self._router.choose(
            stream.request.input_ids, spec.cache_namespace, images=spec.images
        )
        stream.leave_link()
        stream.link = link
        stream.join_link()
        return True

    def drop(self, request_id: int) -> None:
        """Forget a request that is over."""
        self._compiling.discard(request_id)
        self._repeating.discard(request_id)
        self._waiting.pop(request_id, None)
        self.gate.drop(request_id)

    def abort(self, request_ids: Iterable[int], message: str) -> None:
        """End requests that wait here, with `message` as the reason."""
        for request_id in request_ids:
            self.drop(request_id)
            stream = self.streams.get(request_id)
            if stream is not None:
                stream.finish_reason = FinishReason("abort", message=message)
                stream.wake.set()

    # ---- deaths ----

    def interrupt(self, link: ReplicaLink, why: str, *, may_resume: bool, counts: bool) -> None:
        """Take back the requests of a replica, because one of its processes ended.

        Each request gets a new id. Late messages of the dead process have the old id, so they are
        ignored.

        Args:
            link: the replica, which takes no requests now.
            why: a sentence for the clients of requests that end.
            may_resume: whether a new process would continue the outputs as the old one would have.
            counts: whether this end counts towards `max_resumes`, because a request may have caused
                it.
        """
        unsent = self._compiling | self._repeating | self.gate.held()
        mine = [each for each in self.streams.values() if each.link is link and each.is_open]
        for stream in mine:
            if stream.request_id in unsent and (may_resume or not stream.sent_ids):
                continue
            stream.num_deaths += counts
            was_sent = stream.request_id not in self._waiting
            is_lost = not may_resume and (was_sent or bool(stream.sent_ids))
            if is_lost or stream.num_deaths > self._max_resumes:
                self.drop(stream.request_id)
                stream.fail(EngineDead(_why_ended(why, stream.num_deaths, self._max_resumes)))
                continue
            if was_sent:
                self._rename(stream)
            self._waiting[stream.request_id] = stream
        self.send_waiting()

    def _rename(self, stream: StreamState) -> None:
        del self.streams[stream.request_id]
        stream.request = msgspec.structs.replace(stream.request, request_id=self._new_id())
        self.streams[stream.request_id] = stream
        self._history.rename(stream.trace, stream.request_id)
        stream.is_resumed = True
        stream.held_since = stream.held_since or time.monotonic()
        self.num_resumed += 1

    def send_waiting(self) -> None:
        """Send the waiting requests for which a process is ready, in the order of their arrival."""
        for stream in sorted(self._waiting.values(), key=lambda each: each.arrival):
            try:
                self._send(stream)
            except Exception:
                # An error of one request must not keep the others waiting.
                logger.exception("A held request could not be sent")
                stream.fail(HeadraceError("The request could not be sent to the worker."))

    def went_on(self, stream: StreamState) -> None:
        """Record that the first output after a resumption has arrived."""
        self.on_pause(time.monotonic() - stream.held_since)
        stream.held_since = 0.0


def _why_ended(why: str, num_deaths: int, max_resumes: int) -> str:
    if max_resumes and num_deaths > max_resumes:
        return f"{why} The request was in flight at {num_deaths} such ends, so it is not resumed."
    return f"{why} Please send the request again."


def _ignore(seconds: float) -> None:
    del seconds
