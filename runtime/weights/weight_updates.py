"""Executes operations on weights on all ranks, which then all keep or all undo a change."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Protocol

import msgspec
import numpy as np

from runtime.ipc.messages import ControlReply
from runtime.ipc.standard_error import leave_at_once
from runtime.ipc.weight_messages import (
    CheckWeights,
    KeepUpdate,
    RankReply,
    ReadWeight,
    ReleaseMemory,
    RestoreGraphs,
    ResumeMemory,
    UndoUpdate,
    WeightCall,
    WeightOp,
    WeightPart,
    WeightUpdate,
)
from runtime.weights.rank_weights import RankWeights

logger = logging.getLogger(__name__)


class OtherRanks(Protocol):
    """Sends operations to the other ranks. If one of them dies, this process ends."""

    def ask(self, op: WeightOp) -> None:
        """Send an operation to every other rank."""
        ...

    def replies(self, beat: Callable[[], None]) -> list[RankReply]:
        """Wait for the replies of all other ranks; `beat` is called often meanwhile."""
        ...


class WeightUpdates:
    """Executes operations on weights on all ranks, so that all have the same weights."""

    def __init__(
        self, rank: RankWeights, others: OtherRanks | None, beat: Callable[[], None]
    ) -> None:
        """Prepare to send operations.

        Args:
            rank: executes operations on the rank of this process.
            others: the other ranks; `None` if there are none.
            beat: called often while replies are awaited, to show that the process is alive.
        """
        self._rank = rank
        self._beat = beat
        self._others = others

    @property
    def can_compute(self) -> bool:
        """Whether the memory of weights and KV pool is allocated, so that steps can run."""
        return self._rank.can_compute

    def handle(self, call: WeightCall) -> ControlReply:
        """Execute an operation on all ranks; no step may be running."""
        op = call.op
        if isinstance(op, WeightUpdate):
            return self._update(call.call_id, op)
        replies = self._everywhere(op)
        failed = _failures(replies)
        if failed and isinstance(op, ReleaseMemory):
            # Some ranks may have released memory, which the caller, seeing a failure, would not
            # allocate again.
            self._everywhere(ResumeMemory(op.tags))
            self._restore_graphs()
        if not failed and isinstance(op, ResumeMemory):
            failed = self._restore_graphs()
        if failed:
            return ControlReply(call.call_id, False, failed)
        if isinstance(op, ReadWeight):
            return ControlReply(call.call_id, True, data=join_parts(replies))
        messages = [reply.message for reply in replies]
        if isinstance(op, CheckWeights) and op.action == "checksum" and len(messages) > 1:
            return ControlReply(call.call_id, True, " ".join(messages))
        # An empty message means that a rank still works on the operation, so the whole operation is
        # not finished either.
        return ControlReply(call.call_id, True, messages[0] if all(messages) else "")

    def _update(self, call_id: int, op: WeightUpdate) -> ControlReply:
        failed = _failures(self._everywhere(op))
        if not failed:
            self._everywhere(KeepUpdate())
            # Graphs are captured again, because a full load may allocate weights at new addresses.
            without_graphs = self._restore_graphs()
            if without_graphs:
                logger.warning("Steps run without CUDA graphs: %s", without_graphs)
            return ControlReply(call_id, True)
        undone = _failures(self._everywhere(UndoUpdate()))
        if undone:
            # A mixture of old and new weights must not serve. The process ends, and a new worker
            # loads the weights from their folder.
            logger.error(
                "A weight update failed (%s) and could not be taken back (%s). The worker ends.",
                failed,
                undone,
            )
            leave_at_once(1)
        return ControlReply(call_id, False, failed)

    def _restore_graphs(self) -> str:
        """Restore CUDA graphs on all ranks; on failure drop them on all, and return the reason."""
        if not self.can_compute:
            return ""
        failed = _failures(self._everywhere(RestoreGraphs()))
        if failed:
            # With graphs on some ranks only, the ranks' collective operations would not match.
            self._everywhere(ReleaseMemory(["cuda_graph"]))
        return failed

    def _everywhere(self, op: WeightOp) -> list[RankReply]:
        if self._others is None:
            return [self._rank.run(op)]
        # The operation is sent before this rank executes it, because ranks that compute or receive
        # together wait for each other.
        self._others.ask(op)
        return [self._rank.run(op), *self._others.replies(self._beat)]


def _failures(replies: list[RankReply]) -> str:
    texts = [reply.message for reply in replies if not reply.success]
    # Ranks usually fail for the same reason, which is then reported once.
    return " | ".join(dict.fromkeys(texts))


def join_parts(replies: list[RankReply]) -> bytes:
    """Join all ranks' parts of a weight to one encoded `WeightPart`."""
    # Ranks of other pipeline stages have no part of the weight.
    replies = [reply for reply in replies if reply.data]
    parts = [msgspec.msgpack.decode(reply.data, type=WeightPart) for reply in replies]
    if parts[0].num_blocks > 1:
        return msgspec.msgpack.encode(_join_blocks(parts))
    if parts[0].spans:
        return msgspec.msgpack.encode(_join_spans(parts))
    if parts[0].shard_dim is None or len(parts) == 1:
        return replies[0].data
    # A rank has no rows if the weight belongs to an expert on another rank.
    parts = [part for part in parts if part.data] or parts[:1]
    first = parts[0]
    if first.shard_dim is None:
        return msgspec.msgpack.encode(first)
    shape = list(first.shape)
    shape[first.shard_dim] = first.whole_len
    whole = np.zeros(shape, dtype=np.float32)
    for part in parts:
        place = [slice(None)] * len(shape)
        place[first.shard_dim] = slice(part.start, part.start + part.shape[first.shard_dim])
        whole[tuple(place)] = np.frombuffer(part.data, dtype=np.float32).reshape(part.shape)
    return msgspec.msgpack.encode(WeightPart(shape, None, 0, 0, whole.tobytes()))


def _join_blocks(parts: list[WeightPart]) -> WeightPart:
    """Join parts where every rank has an equal part of each block of rows."""
    dim = parts[0].shard_dim or 0
    before, after = parts[0].shape[:dim], parts[0].shape[dim + 1 :]
    blocks = [
        np.frombuffer(part.data, dtype=np.float32).reshape(*before, parts[0].num_blocks, -1, *after)
        for part in parts
    ]
    rows = np.concatenate(blocks, axis=dim + 1).reshape(*before, -1, *after)
    if not dim:
        rows = rows[: parts[0].whole_len]
    return WeightPart(list(rows.shape), None, 0, 0, rows.tobytes())


def _join_spans(parts: list[WeightPart]) -> WeightPart:
    """Join parts where every rank has a part of each span of rows."""
    ranks = [np.frombuffer(part.data, dtype=np.float32).reshape(part.shape) for part in parts]
    counts = parts[0].num_parts
    ends = np.cumsum([span // n for span, n in zip(parts[0].spans, counts, strict=True)])
    of_spans = zip(*(np.split(rank, ends[:-1]) for rank in ranks), strict=True)
    # Of ranks with copies of a part, the first one is taken.
    pieces = [
        piece
        for of_span, n in zip(of_spans, counts, strict=True)
        for piece in of_span[:: len(parts) // n]
    ]
    rows = np.concatenate(pieces)[: parts[0].whole_len]
    return WeightPart(list(rows.shape), None, 0, 0, rows.tobytes())
