"""The front process's side of weights, pauses and memory: orders the calls, keeps the version.

No torch. The trainers' routes and the offline engine call the same methods.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from runtime.checkpoint.model_spec import ModelSpec
from runtime.checkpoint.weight_roots import WeightRoots
from runtime.client.weight_gate import PAUSE, SESSION, UPDATE
from runtime.errors import InvalidRequest
from runtime.ipc.messages import ControlReply, SchedulerInbound
from runtime.ipc.weight_messages import (
    MEMORY_TAGS,
    ContinueGeneration,
    GroupStatus,
    InvalidateCache,
    JoinGroup,
    LeaveGroup,
    LoadDummy,
    LoadFolder,
    LoadReceived,
    MemoryTag,
    PauseGeneration,
    ReceiveStatus,
    ReceiveTensors,
    ReleaseMemory,
    ResumeMemory,
    WeightCall,
    WeightOp,
    WeightUpdate,
)
from runtime.processes.engine_processes import EngineProcesses
from runtime.weights.other_weights import UNTOUCHED, find_other_weights

logger = logging.getLogger(__name__)

PauseMode = Literal["abort", "retract", "in_place"]
_ABORTED = "Aborted: the weights are about to change."
_ROLLED_BACK = "\nRolled back: the original weights keep serving."
_POLL_S = 0.01
_JOIN_POLL_S = 0.05
_JOIN_GRACE_S = 3.0
# The first delay between two polls for a broadcast, seconds; it doubles up to `_JOIN_POLL_S`.
_RECEIVE_POLL_S = 0.001


@dataclass(frozen=True)
class Outcome:
    """The result of a call.

    Attributes:
        success: whether it succeeded.
        message: what was done, or why it failed.
        num_paused_requests: number of requests that waited or were frozen during the call.
    """

    success: bool
    message: str
    num_paused_requests: int = 0


class WeightControl:
    """The weights of one engine. Calls that change them run one after the other."""

    def __init__(
        self,
        host: EngineProcesses,
        model: ModelSpec,
        load_format: str,
        on_renamed: Callable[[str], None],
    ) -> None:
        """Control the weights of one engine.

        Args:
            host: the owner of the engine's processes.
            model: the model that it serves; other weights must fit it.
            load_format: how weights are loaded from disk unless a call says otherwise.
            on_renamed: called with the path or hub id of other weights once they are loaded.
        """
        self._host = host
        self._client = host.client
        self._model = model
        self._load_format = load_format
        self._on_renamed = on_renamed
        self._turn = asyncio.Lock()
        # A lock for broadcasts, which come one after the other. It is acquired before `_turn`.
        self._receiving = asyncio.Lock()
        # Names of groups whose tensors arrive in host memory, which does not disturb steps.
        self._host_groups: set[str] = set()
        self._pause: PauseMode | None = None
        self._has_session = False
        self._must_flush = False

    # ---- updates ----

    async def update_from_disk(
        self,
        model_path: str,
        *,
        load_format: str | None = None,
        weight_version: str | None = None,
        flush_cache: bool = True,
        abort_all_requests: bool = False,
        keep_pause: bool = False,
        roots: WeightRoots | None = None,
    ) -> Outcome:
        """Load all weights from a folder or a hub id; requests wait, or are aborted first.

        Args:
            model_path: a folder or a hub id; ignored for dummy weights.
            load_format: `auto`, `safetensors` or `dummy`; `None` for the engine's own format.
            weight_version: the new weights' label; `None` keeps the label.
            flush_cache: whether the prefix cache is emptied.
            abort_all_requests: whether running requests are aborted; else they end first.
            keep_pause: whether generation is paused afterwards.
            roots: which folders and hub ids are allowed; `None` allows all.
        """
        load_format = load_format or self._load_format
        if load_format not in ("auto", "safetensors", "dummy"):
            raise InvalidRequest(
                f"load_format {load_format[:64]!r} is not one of auto, safetensors, dummy.",
                param="load_format",
            )
        op: WeightOp
        folder: Path | None = None
        if load_format == "dummy":
            op = LoadDummy(self._host.random_seed)
        else:
            found = await find_other_weights(model_path, self._model, roots)
            if isinstance(found, str):
                return Outcome(False, found)
            folder = found
            op = LoadFolder(str(folder))
        async with self._exclusive(abort=abort_all_requests, reads_disk=True) as num_paused:
            outcome = await self._load(op, flush_cache, weight_version, num_paused)
            if outcome.success:
                self._renamed(model_path, folder)
                if keep_pause:
                    await self._set_pause("in_place")
        success = "Succeeded to update model weights."
        if not outcome.success:
            return outcome
        return dataclasses.replace(outcome, message=success + outcome.message)

    async def restart_workers(
        self,
        model_path: str | None = None,
        *,
        weight_version: str | None = None,
        roots: WeightRoots | None = None,
    ) -> Outcome:
        """Replace every worker by a new process, in which running requests go on; new ones wait.

        Args:
            model_path: other weights for the new processes; `None` for the present weights.
            weight_version: label of the other weights.
            roots: which folders and hub ids are allowed; `None` allows all.
        """
        folder: Path | None = None
        if model_path is not None:
            found = await find_other_weights(model_path, self._model, roots)
            if isinstance(found, str):
                return Outcome(False, found)
            folder = found
        loaded, client = self._client.loaded, self._client
        async with self._turn:
            if loaded.released:
                return Outcome(False, "A worker whose memory is released cannot be replaced.")
            if folder is None and loaded.version != loaded.restart_version:
                lost = f"A new worker would lack the weights of version {loaded.version!r}, which"
                return Outcome(False, f"{lost} did not come from disk.")
            earlier = loaded.version
            loaded.version = loaded.restart_version = weight_version or earlier
            client.holds_requests = True
            try:
                why = await self._host.renew_workers(folder)
            finally:
                client.holds_requests = False
            if why:
                loaded.version = loaded.restart_version = earlier
                return Outcome(False, f"Failed to restart the worker: {why}")
            if model_path is not None:
                self._on_renamed(model_path)
        return Outcome(True, "The worker was replaced.")

    def _renamed(self, model_path: str, folder: Path | None) -> None:
        self._on_renamed(model_path)
        if folder is not None:
            self._client.loaded.restart_version = self._client.loaded.version
            self._host.restart_with(folder)

    async def update(
        self,
        op: WeightUpdate,
        *,
        weight_version: str | None = None,
        flush_cache: bool = True,
        abort_all_requests: bool = False,
        success: str = "Success",
    ) -> Outcome:
        """Replace some weights with a trainer's; requests wait, or are aborted first."""
        self._refuse_replicas()
        async with self._exclusive(abort=abort_all_requests) as num_paused:
            outcome = await self._load(op, flush_cache, weight_version, num_paused)
        if not outcome.success:
            return outcome
        return dataclasses.replace(outcome, message=success + outcome.message)

    async def update_from_group(
        self,
        op: ReceiveTensors,
        *,
        weight_version: str | None = None,
        flush_cache: bool = True,
        abort_all_requests: bool = False,
    ) -> Outcome:
        """Replace some weights with tensors that a trainer broadcasts.

        If the tensors arrive in host memory (Gloo), requests are served until all tensors have
        arrived. With NCCL no step runs meanwhile: NCCL's kernel occupies part of the GPU while it
        waits, and could keep a kernel of the ranks' own group from running. The workers' loops
        continue in both cases.
        """
        self._refuse_replicas()
        load = LoadReceived(op.group_name)
        success = "Succeeded to update parameter online."
        async with self._receiving:
            comes_to_host = op.group_name in self._host_groups
            failed = await self._receive(op) if comes_to_host else ""
            if not failed:
                async with self._exclusive(abort=abort_all_requests) as num_paused:
                    failed = "" if comes_to_host else await self._receive(op)
                    if not failed:
                        outcome = await self._load(load, flush_cache, weight_version, num_paused)
        if failed:
            return Outcome(False, f"Failed to update weights: {failed.rstrip('.')}.{UNTOUCHED}")
        if not outcome.success:
            return outcome
        return dataclasses.replace(outcome, message=success + outcome.message)

    async def _receive(self, op: ReceiveTensors) -> str:
        """Wait until every rank has the tensors; return why a rank failed, empty on success."""
        reply = await self.ask(op)
        if not reply.success:
            return reply.message
        delay_s = _RECEIVE_POLL_S
        while True:
            reply = await self.ask(ReceiveStatus(op.group_name))
            if not reply.success:
                # The group is left, because the other ranks might wait in it for minutes.
                await self.ask(LeaveGroup(op.group_name))
                return reply.message
            if reply.message:
                return ""
            await asyncio.sleep(delay_s)
            delay_s = min(2 * delay_s, _JOIN_POLL_S)

    def _refuse_replicas(self) -> None:
        # If a replica were restarted, it would lack the weights that were sent to all others.
        if len(self._client.links) > 1:
            raise InvalidRequest(
                "With several copies of the model (--dp-size) weights come from disk only: use "
                "/update_weights_from_disk."
            )

    async def _load(
        self, op: WeightOp, flush_cache: bool, weight_version: str | None, num_paused: int
    ) -> Outcome:
        """Execute an update; on success, the message says the new version, if one is set."""
        flush_now = flush_cache and not self._has_session
        reply = await self._ask(lambda call_id: WeightCall(call_id, op, flush_now))
        if not reply.success:
            if reply.is_partial:
                self._host.restart_workers("an update of the weights reached only some of them")
            why = f"{reply.message.rstrip('.')}."
            return Outcome(False, f"Failed to update weights: {why}{_ROLLED_BACK}", num_paused)
        self._must_flush = self._must_flush or flush_cache
        if flush_now:
            self._client.calls.forget_prefixes()
        if isinstance(op, LoadFolder | LoadDummy):
            # A load of all weights allocates released ones again.
            self._client.loaded.released -= {"weights"}
        if weight_version is None:
            return Outcome(True, "", num_paused)
        self._client.loaded.version = weight_version
        return Outcome(True, f" Weight version updated to {weight_version}.", num_paused)

    async def begin(self) -> Outcome:
        """Begin several updates: running requests end first, others wait until `end`."""
        if self._has_session:
            return Outcome(False, "A weight update has begun already; /end_weight_update ends it.")
        async with self._exclusive(abort=False):
            self._has_session, self._must_flush = True, False
            self._client.gate.close(SESSION)
        return Outcome(True, "Success")

    async def end(self) -> Outcome:
        """End the updates: requests go on, with an empty prefix cache if an update wanted that."""
        if not self._has_session:
            return Outcome(False, "No weight update has begun; /begin_weight_update begins one.")
        async with self._turn:
            if self._must_flush:
                await self._ask(InvalidateCache)
                self._client.calls.forget_prefixes()
            self._has_session = False
            self._client.gate.open(SESSION)
        return Outcome(True, "Success")

    @contextlib.asynccontextmanager
    async def _exclusive(self, *, abort: bool, reads_disk: bool = False) -> AsyncIterator[int]:
        """Wait until no request runs (unless a pause froze them) and keep new ones waiting.

        Yields the number of requests that wait meanwhile.
        """
        client = self._client
        async with self._turn:
            client.gate.close(UPDATE, reads_disk=reads_disk)
            try:
                if abort:
                    client.abort_sent(_ABORTED)
                if self._pause is None:
                    await self._until_idle()
                yield client.gate.num_held + client.num_at_schedulers()
            finally:
                client.gate.open(UPDATE)

    async def _until_idle(self) -> None:
        while self._client.num_at_schedulers():  # noqa: ASYNC110  # no event for this rare wait
            await asyncio.sleep(_POLL_S)

    # ---- versions, reading, tests, groups ----

    async def set_version(self, version: str, *, abort_all_requests: bool) -> Outcome:
        """Set the label of the loaded weights."""
        async with self._turn:
            if abort_all_requests:
                self._client.abort_all(_ABORTED)
                await self._until_idle()
            self._client.loaded.version = version
        return Outcome(True, f"Weight version updated to {version}")

    async def ask(self, op: WeightOp) -> ControlReply:
        """Execute an operation that changes no weight, between two steps."""
        return await self._ask(lambda call_id: WeightCall(call_id, op))

    async def change(self, op: WeightOp) -> ControlReply:
        """Change weights for a test: no request runs meanwhile, and the prefix cache is emptied."""
        async with self._exclusive(abort=False):
            return await self._ask(lambda call_id: WeightCall(call_id, op, True))

    async def join_group(self, op: JoinGroup) -> Outcome:
        """Join a trainer's process group; requests are served meanwhile."""
        self._refuse_replicas()
        # Every rank has its own timeout. This one is for a library that ignores it.
        deadline = time.monotonic() + op.timeout_s + _JOIN_GRACE_S
        reply = await self.ask(op)
        while reply.success:
            reply = await self.ask(GroupStatus(op.group_name))
            if reply.message:
                break
            if time.monotonic() > deadline:
                await self.ask(LeaveGroup(op.group_name))
                why = f"not all members joined within {op.timeout_s:g} s"
                reply = ControlReply(0, False, f"The group {op.group_name!r}: {why}")
                break
            await asyncio.sleep(_JOIN_POLL_S)
        if not reply.success:
            return Outcome(False, f"Failed to initialize the weight update group: {reply.message}")
        self._host_groups.discard(op.group_name)
        if op.backend == "gloo":
            self._host_groups.add(op.group_name)
        return Outcome(True, "Succeeded to initialize the weight update group.")

    async def _ask(self, make: Callable[[int], SchedulerInbound]) -> ControlReply:
        """Send a message to every worker, and wait for the replies without a timeout."""
        return await self._client.calls.control(make, None)

    # ---- pauses ----

    async def pause(self, mode: PauseMode) -> None:
        """Pause generation: new requests wait. Returns when no step runs any longer."""
        async with self._turn:
            await self._set_pause(mode)

    async def _set_pause(self, mode: PauseMode) -> None:
        client = self._client
        client.gate.close(PAUSE)
        try:
            if mode == "abort":
                client.abort_sent("Aborted: generation was paused.")
                await self._until_idle()
            # The message is sent in every mode, so that the worker's state is always the same.
            await self._ask(lambda call_id: PauseGeneration(call_id, mode == "retract"))
        except BaseException:
            if self._pause is None:
                client.gate.open(PAUSE)
            raise
        self._pause = mode

    async def resume(self) -> None:
        """Continue generation after a pause.

        Raises:
            InvalidRequest: memory is released.
        """
        async with self._turn:
            refused = self._client.loaded.why_refused
            if refused is not None:
                raise InvalidRequest(refused)
            await self._ask(ContinueGeneration)
            self._pause = None
            self._client.gate.open(PAUSE)

    # ---- memory ----

    async def release_memory(self, tags: list[MemoryTag]) -> None:
        """Release device memory; requests are refused until it is allocated again.

        Raises:
            InvalidRequest: requests are running.
        """
        async with self._turn:
            reply = await self.ask(ReleaseMemory(tags))
            if not reply.success:
                raise InvalidRequest(reply.message)
            # Released graphs are not recorded: requests are served without them, though slower.
            self._client.loaded.released |= set(tags or MEMORY_TAGS) - {"cuda_graph"}

    async def resume_memory(self, tags: list[MemoryTag]) -> None:
        """Allocate the released memory again.

        Raises:
            InvalidRequest: there is too little memory, or weights cannot be read again.
        """
        async with self._turn:
            reply = await self.ask(ResumeMemory(tags))
            if not reply.success:
                raise InvalidRequest(reply.message)
            self._client.loaded.released -= set(tags or MEMORY_TAGS)
