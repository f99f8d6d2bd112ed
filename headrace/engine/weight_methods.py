"""The engine's methods that change weights, pause generation, or release memory.

The methods do the same as the server's routes of the same names; see `docs/rl.md`. A caller's
mistake does not raise an exception: the method returns `(False, message)`.
"""

from __future__ import annotations

from collections.abc import Coroutine, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import msgspec

from headrace.engine.core import EngineCore
from headrace.engine.engine_errors import translated
from headrace.engine.on_loop import awaited, waiting
from headrace.trainer import CudaTensors, SharedTensors
from runtime.errors import InvalidRequest
from runtime.eventloop.body_errors import explain
from runtime.ipc.weight_messages import CheckWeights, LeaveGroup, MemoryTag, ReadWeight
from runtime.service.context import ServiceContext
from runtime.weights.weight_control import Outcome, WeightControl
from runtime.weights.weight_requests import (
    DEFAULT_GROUP,
    CheckBody,
    DistributedBody,
    InitGroupBody,
    MemoryBody,
    PauseBody,
    TensorBody,
    read_weight,
    to_join,
    to_receive,
    to_tensors,
)

if TYPE_CHECKING:
    from headrace.trainer import NamedTensors


class WeightMethods:
    """The weight methods of `Engine`; a method `async_x` is the awaitable form of `x`.

    A result `tuple[bool, str]` says whether the call succeeded, with a message.
    """

    _core: EngineCore

    # ---- updates ----

    @waiting
    async def update_weights_from_disk(
        self, /, model_path: str, load_format: str | None = None, **options: Any
    ) -> tuple[bool, str, int]:
        """Load all weights from a folder or a hub id; on failure the old weights stay in use.

        Args:
            model_path: folder or hub id of a model with the running model's architecture and
                shapes.
            load_format: how the weights are read: `auto`, `safetensors` or `dummy`.
            **options: further fields of the route: `weight_version`, `flush_cache`,
                `abort_all_requests`, `keep_pause`.

        Returns:
            Whether the update succeeded, a message, and the number of requests that waited.
        """
        update = self._weights.update_from_disk(model_path, load_format=load_format, **options)
        outcome = await _outcome(update)
        return outcome.success, outcome.message, outcome.num_paused_requests

    async_update_weights_from_disk = awaited(update_weights_from_disk)

    def update_weights_from_tensor(
        self,
        named_tensors: NamedTensors,
        load_format: str | None = None,
        flush_cache: bool = True,
        **options: Any,
    ) -> tuple[bool, str]:
        """Replace some weights by tensors of this process.

        Args:
            named_tensors: pairs of a checkpoint name and a whole tensor, on the host or on a GPU.
            load_format: accepted for compatibility and unused.
            flush_cache: whether to drop the prefix cache.
            **options: further fields of the route: `weight_version`, `abort_all_requests`.
        """
        with ExitStack() as stack:
            fields = self._lend(named_tensors, load_format, stack)
            return self._from_tensor(fields, flush_cache, options)

    async def async_update_weights_from_tensor(
        self,
        named_tensors: NamedTensors,
        load_format: str | None = None,
        flush_cache: bool = True,
        **options: Any,
    ) -> tuple[bool, str]:
        """Do the same as `update_weights_from_tensor`, but as a coroutine."""
        with ExitStack() as stack:
            fields = self._lend(named_tensors, load_format, stack)
            return await self._async_from_tensor(fields, flush_cache, options)

    def _lend(
        self, named_tensors: NamedTensors, load_format: str | None, stack: ExitStack
    ) -> TensorBody:
        """Copy the tensors to memory that workers can read until `stack` is closed.

        Return the request body that names this memory.
        """
        pairs = list(named_tensors.items() if hasattr(named_tensors, "items") else named_tensors)
        is_cuda = bool(pairs) and all(tensor.is_cuda for _, tensor in pairs)
        if is_cuda and self._context.config.model.device == "cuda":
            # Ranks read the tensors at different times, so the copies stay until all have read
            # them.
            body = stack.enter_context(CudaTensors(pairs)).body
        else:
            body = stack.enter_context(SharedTensors(pairs)).body
        return msgspec.convert({**body, "load_format": load_format}, TensorBody)

    @waiting
    async def _from_tensor(
        self, fields: TensorBody, flush_cache: bool, options: dict[str, Any]
    ) -> tuple[bool, str]:
        async def update() -> Outcome:
            op = to_tensors(fields, self._context.config.parallel.num_ranks)
            return await self._weights.update(op, flush_cache=flush_cache, **options)

        return await _pair(update())

    _async_from_tensor = awaited(_from_tensor)

    @waiting
    async def update_weights_from_distributed(
        self,
        /,
        names: Sequence[str],
        dtypes: Sequence[str],
        shapes: Sequence[Sequence[int]],
        group_name: str = DEFAULT_GROUP,
        flush_cache: bool = True,
        load_format: str | None = None,
        **options: Any,
    ) -> tuple[bool, str]:
        """Replace some weights by tensors that a trainer broadcasts as rank 0 of a process group.

        `names`, `dtypes` and `shapes` describe the tensors in the order of the broadcasts.
        `options` are `weight_version`, `abort_all_requests`, and `timeout` in seconds for each
        broadcast.
        """

        async def update() -> Outcome:
            body = DistributedBody(
                names=list(names),
                dtypes=[str(dtype) for dtype in dtypes],
                shapes=[list(shape) for shape in shapes],
                group_name=group_name,
                load_format=load_format,
                timeout=options.pop("timeout", None),
            )
            return await self._weights.update_from_group(
                to_receive(body, self._context.model), flush_cache=flush_cache, **options
            )

        return await _pair(update())

    async_update_weights_from_distributed = awaited(update_weights_from_distributed)

    @waiting
    async def init_weights_update_group(
        self,
        master_address: str,
        master_port: int,
        rank_offset: int,
        world_size: int,
        group_name: str = DEFAULT_GROUP,
        backend: str = "nccl",
    ) -> tuple[bool, str]:
        """Join the process group of a trainer, which is rank 0; return when all have joined."""
        body = InitGroupBody(
            master_address=master_address,
            master_port=master_port,
            rank_offset=rank_offset,
            world_size=world_size,
            group_name=group_name,
            backend=backend,
        )

        async def join() -> Outcome:
            return await self._weights.join_group(
                to_join(body, self._context.config.parallel.num_ranks)
            )

        return await _pair(join())

    @waiting
    async def destroy_weights_update_group(
        self, group_name: str = DEFAULT_GROUP
    ) -> tuple[bool, str]:
        """Leave the process group of the trainer and destroy it."""

        async def leave() -> Outcome:
            reply = await self._weights.ask(LeaveGroup(group_name))
            return Outcome(reply.success, reply.message)

        return await _pair(leave())

    @waiting
    async def begin_weight_update(self, selector: str = "all") -> tuple[bool, str]:  # noqa: ARG002  # one model
        """Let new requests wait during several updates, until `end_weight_update`."""
        return await _pair(self._weights.begin())

    @waiting
    async def end_weight_update(self) -> tuple[bool, str]:
        """Let the requests run that have waited since `begin_weight_update`."""
        return await _pair(self._weights.end())

    # ---- reading and tests ----

    @waiting
    async def get_weights_by_name(self, name: str, truncate_size: int = 100) -> Any:
        """Return the first rows of one weight as nested lists of floats.

        Raises:
            ValueError: the model has no weight of this name.
        """
        reply = await self._weights.ask(ReadWeight(name, max(truncate_size, 1)))
        if not reply.success:
            raise InvalidRequest(reply.message)
        return read_weight(reply.data)

    @waiting
    async def update_weight_version(
        self, new_version: str, abort_all_requests: bool = True
    ) -> tuple[bool, str]:
        """Change only the label of the loaded weights; by default this aborts every request."""
        update = self._weights.set_version(new_version, abort_all_requests=abort_all_requests)
        return await _pair(update)

    @waiting
    async def check_weights(self, action: str) -> tuple[bool, str]:
        """Test weight updates: copy, overwrite, compare or sum up the weights.

        Args:
            action: `snapshot` copies all weights, `reset_tensors` fills them with noise, `compare`
                compares them with the copy, and `checksum` returns a checksum.
        """

        async def check() -> Outcome:
            op = CheckWeights(_converted({"action": action}, CheckBody).action)
            changes = action == "reset_tensors"
            reply = await (self._weights.change(op) if changes else self._weights.ask(op))
            return Outcome(reply.success, reply.message)

        return await _pair(check())

    # ---- pauses and memory ----

    @waiting
    async def pause_generation(self, mode: str = "abort") -> None:
        """Stop generating: `abort` running requests, `retract` them, or freeze them `in_place`.

        Requests that arrive meanwhile wait for `continue_generation`.
        """
        await self._weights.pause(_converted({"mode": mode}, PauseBody).mode)

    async_pause_generation = awaited(pause_generation)

    @waiting
    async def continue_generation(self) -> None:
        """Resume paused requests, and start the requests that have arrived since the pause."""
        await self._weights.resume()

    async_continue_generation = awaited(continue_generation)

    @waiting
    async def release_memory_occupation(self, tags: Sequence[str] | None = None) -> None:
        """Release memory while no request runs.

        `tags` names the kinds of memory: `kv_cache`, `weights` and `cuda_graph`; all by default.

        Raises:
            ValueError: requests are running.
        """
        await self._weights.release_memory(_tags(tags))

    @waiting
    async def resume_memory_occupation(self, tags: Sequence[str] | None = None) -> None:
        """Allocate released memory again, and restore the weights.

        Raises:
            ValueError: too little memory is free.
        """
        await self._weights.resume_memory(_tags(tags))

    # ---- shared ----

    @property
    def _context(self) -> ServiceContext:
        return self._core.context

    @property
    def _weights(self) -> WeightControl:
        return self._core.context.weights


async def _outcome(outcome: Coroutine[Any, Any, Outcome]) -> Outcome:
    try:
        with translated():
            return await outcome
    except ValueError as error:
        return Outcome(False, str(error))


async def _pair(outcome: Coroutine[Any, Any, Outcome]) -> tuple[bool, str]:
    found = await _outcome(outcome)
    return found.success, found.message


def _tags(given: Sequence[str] | None) -> list[MemoryTag]:
    # A string is not converted to a list, because its letters would be reported as unknown tags.
    tags = given if given is None or isinstance(given, str) else list(given)
    wanted: MemoryBody = _converted({"tags": tags}, MemoryBody)
    return wanted.tags or []


def _converted(values: dict[str, Any], struct: Any) -> Any:
    try:
        return msgspec.convert(values, struct)
    except msgspec.ValidationError as error:
        raise InvalidRequest(explain(error, struct).replace("`$.", "`")) from None
