"""Executes weight calls on all ranks: rank 0 sends each call, then all keep or undo the change."""

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
    """The interface of the other ranks; if one dies, this process ends."""

    def ask(self, op: WeightOp) -> None:
        """Send every other rank `op`."""
        ...

    def replies(self, beat: Callable[[], None]) -> list[RankReply]:
        """Wait for each rank's reply; `beat` is called often meanwhile."""
        ...


class WeightUpdates:
    """Executes weight operations on all ranks, so that they always agree."""

    def __init__(
        self, rank: RankWeights, others: OtherRanks | None, beat: Callable[[], None]
    ) -> None:
        """Act on `rank`, which is in this process, and on `others` if there are any."""
        self._rank = rank
        self._beat = beat
        self._others = others

    @property
    def can_compute(self) -> bool:
        """Whether the memory of weights and KV pool is allocated."""
        return self._rank.can_compute

    def handle(self, call: WeightCall) -> ControlReply:
        """Execute `call`; no step may be in flight."""
        op = call.op
        if isinstance(op, WeightUpdate):
            return self._update(call.call_id, op)
        replies = self._everywhere(op)
        failed = _failures(replies)
        if failed and isinstance(op, ReleaseMemory):
            # The caller sees a failure and will not resume what some ranks released.
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
        # An operation that takes time is done when the last rank reports it.
        return ControlReply(call.call_id, True, messages[0] if all(messages) else "")

    def _update(self, call_id: int, op: WeightUpdate) -> ControlReply:
        failed = _failures(self._everywhere(op))
        if not failed:
            self._everywhere(KeepUpdate())
            # A full load restores released weights at other addresses.
            without_graphs = self._restore_graphs()
            if without_graphs:
                logger.warning("Steps run without CUDA graphs: %s", without_graphs)
            return ControlReply(call_id, True)
        undone = _failures(self._everywhere(UndoUpdate()))
        if undone:
            # A mixture of weights must not serve: a new worker loads them from their folder.
            logger.error(
                "A weight update failed (%s) and could not be taken back (%s). The worker ends.",
                failed,
                undone,
            )
            leave_at_once(1)
        return ControlReply(call_id, False, failed)

    def _restore_graphs(self) -> str:
        """Restore the graphs on all ranks or on none; return why on none."""
        if not self.can_compute:
            return ""
        failed = _failures(self._everywhere(RestoreGraphs()))
        if failed:
            # Ranks with graphs and ranks without would not compute in step.
            self._everywhere(ReleaseMemory(["cuda_graph"]))
        return failed

    def _everywhere(self, op: WeightOp) -> list[RankReply]:
        if self._others is None:
            return [self._rank.run(op)]
        # The call is sent first, because ranks that compute or receive together wait for each
        # other.
        self._others.ask(op)
        return [self._rank.run(op), *self._others.replies(self._beat)]


def _failures(replies: list[RankReply]) -> str:
    texts = [reply.message for reply in replies if not reply.success]
    # Ranks mostly fail for the same reason.
    return " | ".join(dict.fromkeys(texts))


def join_parts(replies: list[RankReply]) -> bytes:
    """Join every rank's `WeightPart` into one."""
    # Ranks of other stages have nothing of it.
    replies = [reply for reply in replies if reply.data]
    parts = [msgspec.msgpack.decode(reply.data, type=WeightPart) for reply in replies]
    if parts[0].num_blocks > 1:
        return msgspec.msgpack.encode(_join_blocks(parts))
    if parts[0].spans:
        return msgspec.msgpack.encode(_join_spans(parts))
    if parts[0].shard_dim is None or len(parts) == 1:
        return replies[0].data
    # A rank has no rows of an expert that is on another rank.
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
    """Join parts in which every rank has the same rows of each block."""
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
    """Join parts in which every rank has an equal part of each span of rows."""
    ranks = [np.frombuffer(part.data, dtype=np.float32).reshape(part.shape) for part in parts]
    ends = np.cumsum([span // len(parts) for span in parts[0].spans])
    of_spans = zip(*(np.split(rank, ends[:-1]) for rank in ranks), strict=True)
    rows = np.concatenate([piece for pieces in of_spans for piece in pieces])[: parts[0].whole_len]
    return WeightPart(list(rows.shape), None, 0, 0, rows.tobytes())
