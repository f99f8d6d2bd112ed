"""The detokenizer process: turns tokens into text for the front process, and finds stop strings.

A scheduler process has one detokenizer process; if the scheduler is restarted, so is this process.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import os
from pathlib import Path

import msgspec
import zmq

from runtime.checkpoint.gguf.files import forget_headers
from runtime.config.options import DetokenizerConfig
from runtime.errors import StartupError
from runtime.ipc.freed_memory import return_freed_memory
from runtime.ipc.logging import configure_logging
from runtime.ipc.messages import (
    DetokenizerInbound,
    DetokenizerReady,
    ResetStreams,
    StartupFailed,
    StopHit,
    TextDeltas,
    TokenDeltas,
)
from runtime.ipc.shared_state import SHARED_STATE_FILE, SharedState
from runtime.ipc.transport import (
    Inbox,
    Outbox,
    detokenizer_address,
    front_address,
    scheduler_address,
)
from runtime.requests.fault_domain import FaultDomains, log_failure
from runtime.text.detokenizer import ID_BYTES, Detokenizer, MalformedDeltas, portions
from runtime.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

_IDLE_WAIT_S = 1.0
_FAREWELL_MS = 2000


class DetokenizerLoop:
    """Receives messages, lets the detokenizer handle them, and sends the results."""

    def __init__(
        self,
        detokenizer: Detokenizer,
        inbox: Inbox[DetokenizerInbound],
        front: Outbox,
        scheduler: Outbox,
    ) -> None:
        """Read from `inbox`, send text to `front`, and found stop strings to `scheduler`."""
        self._detokenizer = detokenizer
        self._inbox = inbox
        self._front = front
        self._scheduler = scheduler
        self._faults = FaultDomains(self._fail)

    def turn(self, timeout_s: float) -> None:
        """Wait up to `timeout_s` seconds for messages, and handle all that have arrived."""
        if not self._inbox.wait(timeout_s):
            return
        for message in self._inbox.drain():
            self.handle(message)

    def handle(self, message: DetokenizerInbound) -> None:
        """Handle a message and send the results; a failure ends only the requests in question."""
        if isinstance(message, ResetStreams):
            self._detokenizer.reset()
            return
        try:
            deltas, stop_hit = self._detokenizer.step(message)
        except MalformedDeltas as error:
            logger.warning("Dropped a message of the scheduler: %s", error)
            return
        except Exception as error:
            self._on_failed_step(message, error)
            return
        for portion in portions(deltas):
            self._send(portion)
        if stop_hit is not None:
            self._scheduler.send(stop_hit)

    def _on_failed_step(self, message: TokenDeltas, error: Exception) -> None:
        """Handle each request's part of the message alone; end the requests that fail again."""
        named = _named(message)
        parts: list[TokenDeltas] = []
        if not self._detokenizer.is_midway and len(named) > 1:
            # No stream has changed yet, so the step can be repeated in parts.
            with contextlib.suppress(TypeError, ValueError):
                parts = [_part_of(message, request_id) for request_id in named]
        self._detokenizer.is_midway = False
        why = log_failure("A step of all requests that a message names", error)
        for part in parts:
            self.handle(part)
        if not parts:
            for request_id in named:
                self._fail(request_id, why)

    def _send(self, portion: TextDeltas) -> None:
        try:
            self._front.send(portion)
        except Exception:
            # The message cannot be encoded. Each delta is sent alone, to find the faulty one.
            for delta in portion.deltas:
                with self._faults.of(delta.request_id):
                    self._front.send(TextDeltas([delta]))

    def _fail(self, request_id: int, why: str) -> None:
        self._front.send(TextDeltas([self._detokenizer.fail(request_id, why)]))
        self._scheduler.send(StopHit([request_id]))


def _named(message: TokenDeltas) -> set[int]:
    """Return the ids of the requests that a message is about."""
    parts = (message.starts, message.ends, message.extras)
    return {part.request_id for each in parts for part in each} | set(message.request_ids)


def _part_of(message: TokenDeltas, request_id: int) -> TokenDeltas:
    """Return the part of a message that is about one request."""
    starts = [
        (start, cached)
        for start, cached in zip(message.starts, message.cached_tokens, strict=True)
        if start.request_id == request_id
    ]
    counts: list[int] = []
    data, begin = b"", 0
    for each, count in zip(message.request_ids, message.token_counts, strict=True):
        end = begin + count * ID_BYTES
        if each == request_id:
            counts.append(count)
            data += message.token_ids[begin:end]
        begin = end
    return TokenDeltas(
        [start for start, _ in starts],
        [cached for _, cached in starts],
        [request_id] * len(counts),
        counts,
        data,
        [end for end in message.ends if end.request_id == request_id],
        [block for block in message.extras if block.request_id == request_id],
    )


def main(payload: bytes) -> None:
    """Run until the parent process has ended.

    Args:
        payload: a `DetokenizerConfig`, encoded as msgpack.
    """
    config = msgspec.msgpack.decode(payload, type=DetokenizerConfig)
    configure_logging(config.log_level, "detokenizer", config.log_format)
    run_folder = Path(config.run_folder)
    context = zmq.Context()
    front = Outbox(context, front_address(run_folder))
    try:
        folder = config.tokenizer_folder
        tokenizer = (
            Tokenizer.from_folder(Path(folder), encodes=False)
            if folder
            else Tokenizer.without_vocabulary()
        )
        detokenizer = Detokenizer(tokenizer)
    except StartupError as error:
        front.send(StartupFailed(error.message))
        front.close(_FAREWELL_MS)
        context.term()
        raise SystemExit(1) from None
    forget_headers()
    return_freed_memory()
    shared = SharedState(run_folder / SHARED_STATE_FILE)
    inbox: Inbox[DetokenizerInbound] = Inbox(
        context,
        detokenizer_address(run_folder, config.generation),
        DetokenizerInbound,
        shared.counter("rejected_by_detokenizer"),
    )
    scheduler = Outbox(context, scheduler_address(run_folder, config.scheduler_generation))
    loop = DetokenizerLoop(detokenizer, inbox, front, scheduler)
    shared.beat_detokenizer()
    front.send(DetokenizerReady(os.getpid()))
    logger.debug("Ready, decoding by %s", detokenizer.decoder_kind)
    # The objects loaded so far live as long as the process, so the garbage collector need not visit
    # them again and again.
    gc.collect()
    gc.freeze()
    while True:
        shared.beat_detokenizer()
        loop.turn(_IDLE_WAIT_S)
