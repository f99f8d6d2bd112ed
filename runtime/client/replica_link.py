"""The client's view of one replica: how to send to it, and how many requests are in flight."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from runtime.client.prefix_index import PrefixIndex
from runtime.config.options import GRAMMAR_CACHE_BYTES
from runtime.grammar.cache import ByteCache, loaded_size
from runtime.ipc.messages import GenerateRequest, SchedulerInbound


def _drop(message: SchedulerInbound) -> None:
    del message


class ReplicaLink:
    """The client's link to one replica.

    Attributes:
        rank: the replica's number, from 0.
        ready: whether the replica takes requests.
        num_in_flight: number of requests sent there whose final chunk has not been read.
        num_prompt_tokens: number of prompt tokens of those requests together.
        prefixes: estimate of the prefixes that the replica has cached.
        num_rows: number of requests that the replica runs at a time.
        max_queued: number of requests that may wait there; `None` for any number.
        send: sends a message to the replica's scheduler. Before the first `connect`, it drops the
            message.
    """

    def __init__(self, rank: int) -> None:
        """Start without a connection."""
        self.rank = rank
        self.ready = False
        self.num_in_flight = 0
        self.num_prompt_tokens = 0
        self.prefixes = PrefixIndex()
        self.num_rows = 1
        self.max_queued: int | None = None
        # The keys that the scheduler's grammar cache has. Both are updated in the same order.
        self._grammars: ByteCache[bool] = ByteCache(GRAMMAR_CACHE_BYTES)
        self.send: Callable[[SchedulerInbound], None] = _drop

    @property
    def has_room(self) -> bool:
        """Whether the replica would accept one more request."""
        return self.max_queued is None or self.num_in_flight < self.num_rows + self.max_queued

    def connect(self, send: Callable[[SchedulerInbound], None]) -> None:
        """Use `send` from now on, because the replica has a new scheduler."""
        self.send = send
        self._grammars.clear()
        self.prefixes.clear()

    def send_with_grammar(self, request: GenerateRequest, key: bytes, payload: bytes) -> None:
        """Send a request with a grammar.

        Omit the compiled grammar if the scheduler has it already.
        """
        is_there = self._grammars.get(key) is not None
        if not is_there:
            self._grammars.put(key, True, loaded_size(payload))
        grammar = b"" if is_there else payload
        self.send(msgspec.structs.replace(request, grammar_key=key, grammar=grammar))

    def forget_grammars(self) -> None:
        """Forget which grammars the scheduler has, because its cache may have been dropped."""
        self._grammars.clear()
