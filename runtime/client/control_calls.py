"""Control messages: each goes to every replica, and the answers become one."""

from __future__ import annotations

import array
import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

from runtime.client.replica_link import ReplicaLink
from runtime.errors import EngineNotReady
from runtime.ipc.messages import ControlReply, MatchPrefix, PrefixReport, SchedulerInbound
from runtime.requests.image_input import ImageInput

_REPORT = msgspec.msgpack.Decoder(PrefixReport)


@dataclass
class _Call:
    waiting: set[int]
    done: asyncio.Future[None]
    replies: dict[int, ControlReply] = field(default_factory=dict)


class ControlCalls:
    """Control calls that wait for their answers, by id."""

    def __init__(self, links: Sequence[ReplicaLink]) -> None:
        """Send calls to the replicas of `links`."""
        self._links = links
        self._calls: dict[int, _Call] = {}

    async def call(
        self, call_id: int, message: SchedulerInbound, timeout_s: float | None
    ) -> ControlReply:
        """Send `message`, which carries `call_id`, to every replica and wait for all answers.

        With `timeout_s=None` the call waits for as long as the replicas live.

        Returns:
            One reply for all; see `merge_replies`.

        Raises:
            EngineNotReady: a replica is loading. Then the message is sent to no replica, so that
                all keep the same state.
        """
        if not all(link.ready for link in self._links):
            raise EngineNotReady("The model is still loading; see /startupz for progress.")
        return merge_replies(await self.call_each(call_id, message, self._links, timeout_s))

    async def call_each(
        self,
        call_id: int,
        message: SchedulerInbound,
        links: Sequence[ReplicaLink],
        timeout_s: float | None,
    ) -> dict[int, ControlReply]:
        """Do what `call` does, for some of the replicas, at least one.

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
        self, call_id: int, input_ids: list[int], namespace: str, images: Sequence[ImageInput]
    ) -> PrefixReport:
        """Ask the replicas that take requests how much of a prompt they have cached.

        Args:
            call_id: id of this call.
            input_ids: the prompt.
            namespace: namespace of the prefix cache, which includes the tenant's part.
            images: the prompt's images; their pixels are not sent.

        Returns:
            The answer of the replica that has the most of the prompt.

        Raises:
            EngineNotReady: no worker takes requests, or none answers.
        """
        data = array.array("i", input_ids).tobytes()
        named = [
            msgspec.structs.replace(each, image=msgspec.structs.replace(each.image, pixels=b""))
            for each in images
        ]
        message = MatchPrefix(call_id, data, namespace, named)
        links = [link for link in self._links if link.ready]
        replies = await self.call_each(call_id, message, links, 30.0) if links else {}
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
