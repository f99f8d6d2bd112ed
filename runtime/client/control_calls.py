"""Control messages: each is sent to every replica, and the replies are merged to one."""

from __future__ import annotations

import array
import asyncio
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import msgspec

from runtime.client.replica_link import ReplicaLink
from runtime.client.tenant import tenants_namespace
from runtime.errors import EngineNotReady
from runtime.ipc.messages import (
    ControlReply,
    FlushCache,
    MatchPrefix,
    PrefixReport,
    SchedulerInbound,
    SetOptions,
)
from runtime.requests.image_input import ImageInput

_REPORT = msgspec.msgpack.Decoder(PrefixReport)


@dataclass
class _Call:
    waiting: set[int]
    done: asyncio.Future[None]
    replies: dict[int, ControlReply] = field(default_factory=dict)


class ControlCalls:
    """Sends control messages and waits for their replies, which are matched by call id."""

    def __init__(self, links: Sequence[ReplicaLink], ids: Iterator[int]) -> None:
        """Prepare for calls to the replicas of `links`; `ids` gives the call ids."""
        self._links = links
        self._ids = ids
        self._options: dict[str, int] = {}
        self._calls: dict[int, _Call] = {}

    async def flush_cache(self, timeout_s: float = 30.0) -> ControlReply:
        """Drop the prefix cache; refused (`success` false) while requests are in flight."""
        for link in self._links:
            link.forget_grammars()
        reply = await self.control(FlushCache, timeout_s)
        if reply.success:
            self.forget_prefixes()
        return reply

    def forget_prefixes(self) -> None:
        """Forget which prompts may be cached in the replicas, because their caches were dropped."""
        for link in self._links:
            link.prefixes.clear()

    async def set_options(self, values: dict[str, int]) -> ControlReply:
        """Change options of every replica's scheduler; `values` maps their names to numbers.

        They are stored, so that a restarted scheduler gets them again (`repeat_options`).
        """
        reply = await self.control(lambda call_id: SetOptions(call_id, values))
        if reply.success:
            self._options |= values
            for link in self._links:
                link.max_queued = values.get("max_queued_requests", link.max_queued)
        return reply

    def repeat_options(self, rank: int) -> None:
        """Send a replica's restarted scheduler the options that were changed since the start."""
        if self._options:
            self._links[rank].send(SetOptions(next(self._ids), self._options))

    async def control(
        self, make: Callable[[int], SchedulerInbound], timeout_s: float | None = 30.0
    ) -> ControlReply:
        """Send one control message to every replica and wait for all replies.

        Args:
            make: makes the message from its call id.
            timeout_s: seconds to wait; `None` to wait until all reply or a worker dies.

        Returns:
            One reply for all; see `merge_replies`.

        Raises:
            EngineNotReady: a replica is loading. Then the message is sent to no replica, so that
                all keep the same state.
        """
        if not all(link.ready for link in self._links):
            raise EngineNotReady("The model is still loading; see /startupz for progress.")
        call_id = next(self._ids)
        return merge_replies(await self._call_each(call_id, make(call_id), self._links, timeout_s))

    async def _call_each(
        self,
        call_id: int,
        message: SchedulerInbound,
        links: Sequence[ReplicaLink],
        timeout_s: float | None,
    ) -> dict[int, ControlReply]:
        """Send `message` to the replicas of `links`, at least one; wait as `control` does.

        Returns:
            Each replica's reply, by the replica's number.
        """
        done = asyncio.get_running_loop().create_future()
        call = _Call({link.rank for link in links}, done)
        self._calls[call_id] = call
        try:
            for link in links:
                link.send(message)
            async with asyncio.timeout(timeout_s):
                await done
        except TimeoutError:
            for rank in call.waiting:
                text = "The worker did not answer in time."
                call.replies[rank] = ControlReply(call_id, False, text)
        finally:
            self._calls.pop(call_id, None)
        return call.replies

    async def match_prefix(
        self, input_ids: list[int], namespace: str, images: Sequence[ImageInput] = ()
    ) -> PrefixReport:
        """Return how much of a prompt is cached, at the replica that has the longest part of it.

        Args:
            input_ids: the prompt.
            namespace: namespace of the prefix cache, as in a request. Only the tenant's own
                prefixes are matched.
            images: the prompt's images, matched by their digests.

        Raises:
            EngineNotReady: no worker takes requests, or none answers.
        """
        call_id, namespace = next(self._ids), tenants_namespace(namespace)
        data = array.array("i", input_ids).tobytes()
        named = [
            msgspec.structs.replace(each, image=msgspec.structs.replace(each.image, pixels=b""))
            for each in images
        ]
        message = MatchPrefix(call_id, data, namespace, named)
        links = [link for link in self._links if link.ready]
        replies = await self._call_each(call_id, message, links, 30.0) if links else {}
        found = [_REPORT.decode(reply.data) for reply in replies.values() if reply.success]
        if not found:
            raise EngineNotReady("The worker did not answer.")
        return max(found, key=lambda report: report.num_tokens)

    def on_reply(self, rank: int, reply: ControlReply) -> None:
        """Store a replica's reply; the last one completes the call."""
        call = self._calls.get(reply.call_id)
        if call is None or rank not in call.waiting:
            return
        call.waiting.discard(rank)
        call.replies[rank] = reply
        if not call.waiting and not call.done.done():
            call.done.set_result(None)

    def fail(self, rank: int, message: str) -> None:
        """Complete the calls that wait for a dead replica, with a failure for its reply."""
        for call_id in list(self._calls):
            self.on_reply(rank, ControlReply(call_id, False, message))


def merge_replies(replies: dict[int, ControlReply]) -> ControlReply:
    """Return one reply for all replicas: success if all succeeded, else the first failure."""
    ordered = [replies[rank] for rank in sorted(replies)]
    failure = next((each for each in ordered if not each.success), None)
    if failure is None:
        # An empty message means that a replica still works on the command. One such reply is
        # returned first: the command is finished only when all replicas are.
        return min(ordered, key=lambda reply: bool(reply.message))
    is_partial = any(each.success for each in ordered)
    return msgspec.structs.replace(failure, is_partial=is_partial)
