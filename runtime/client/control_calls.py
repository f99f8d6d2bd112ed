"""Control messages: each goes to every replica, and the answers become one."""

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
    """Control calls that wait for their answers, by id."""

    def __init__(self, links: Sequence[ReplicaLink], ids: Iterator[int]) -> None:
        """Send calls to the replicas of `links`; `ids` numbers them."""
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
        """Forget which prompts may be cached, because the caches were dropped."""
        for link in self._links:
            link.prefixes.clear()

    async def set_options(self, values: dict[str, int]) -> ControlReply:
        """Change options of the scheduler (see `SetOptions`); a restarted one gets them again."""
        reply = await self.control(lambda call_id: SetOptions(call_id, values))
        if reply.success:
            self._options |= values
            for link in self._links:
                link.max_queued = values.get("max_queued_requests", link.max_queued)
        return reply

    def repeat_options(self, rank: int) -> None:
        """Send a replica's restarted scheduler the options changed in the previous one."""
        if self._options:
            self._links[rank].send(SetOptions(next(self._ids), self._options))

    async def control(
        self, make: Callable[[int], SchedulerInbound], timeout_s: float | None = 30.0
    ) -> ControlReply:
        """Send the message that `make` builds around a fresh `call_id` to every replica.

        Without `timeout_s` the wait for the answers ends at the latest when the workers die.

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
        """Do what `control` does, for some of the replicas, at least one.

        Returns:
            The replies, by rank.
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
        """Return how much of a prompt is cached in the replica that has the most of it.

        Args:
            input_ids: the prompt.
            namespace: the name space, as in a request; only the tenant's own prefixes are matched.
            images: the prompt's images; their pixels are not sent.

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
        """Store a replica's answer; the last one completes the call."""
        call = self._calls.get(reply.call_id)
        if call is None or rank not in call.waiting:
            return
        call.waiting.discard(rank)
        call.replies[rank] = reply
        if not call.waiting and not call.done.done():
            call.done.set_result(None)

    def fail(self, rank: int, message: str) -> None:
        """Count the missing answers of a replica that died as failures."""
        for call_id in list(self._calls):
            self.on_reply(rank, ControlReply(call_id, False, message))


def merge_replies(replies: dict[int, ControlReply]) -> ControlReply:
    """Return one reply for all replicas: success if all succeeded, else the first failure."""
    ordered = [replies[rank] for rank in sorted(replies)]
    failure = next((each for each in ordered if not each.success), None)
    if failure is None:
        # What takes time is done when the last replica reports it.
        return min(ordered, key=lambda reply: bool(reply.message))
    is_partial = any(each.success for each in ordered)
    return msgspec.structs.replace(failure, is_partial=is_partial)
