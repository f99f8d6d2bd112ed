"""The engine's methods that change weights, pause it, or give its memory back.

Their answers are those of the server's routes of the same names, see `docs/rl.md`: what a trainer
may have got wrong comes back as `(False, message)`.
"""

from __future__ import annotations

from collections.abc import Coroutine, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import msgspec

from headrace.engine.core import EngineCore
from headrace.engine.engine_errors import translated
from headrace.trainer import CudaTensors, SharedTensors
from runtime.client.expected import explain
from runtime.errors import InvalidRequest
from runtime.ipc.weight_messages import CheckWeights, LeaveGroup, ReadWeight
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
    """What `Engine` can do about weights; each `async_` method is the one of its name, awaited."""

    _core: EngineCore

    # ---- updates ----

    def update_weights_from_disk(
        self, model_path: str, load_format: str | None = None, **options: Any
    ) -> tuple[bool, str, int]:
        """Load all weights from a folder or a hub id; on failure the old ones serve on.

        Args:
            model_path: same architecture and shapes as the model that runs.
            load_format: `auto`, `safetensors` or `dummy`.
            **options: `weight_version`, `flush_cache`, `abort_all_requests`, `keep_pause`.

        Returns:
            Success, message, and how many requests waited meanwhile.
        """
        return self._core.call(self._from_disk(model_path, load_format, options))

    async def async_update_weights_from_disk(
        self, model_path: str, load_format: str | None = None, **options: Any
    ) -> tuple[bool, str, int]:
        """See `update_weights_from_disk`."""
        return await self._core.call_async(self._from_disk(model_path, load_format, options))

    async def _from_disk(
        self, model_path: str, load_format: str | None, options: dict[str, Any]
    ) -> tuple[bool, str, int]:
        update = self._weights.update_from_disk(model_path, load_format=load_format, **options)
        outcome = await self._outcome(update)
        return outcome.success, outcome.message, outcome.num_paused_requests

    def update_weights_from_tensor(
        self,
        named_tensors: NamedTensors,
        load_format: str | None = None,
        flush_cache: bool = True,
        **options: Any,
    ) -> tuple[bool, str]:
        """Replace some weights: pairs of checkpoint name and whole tensor, on the host or a GPU.

        Args:
            named_tensors: the tensors.
            load_format: nothing to choose; for callers that name one.
            flush_cache: drop the prefix cache.
            **options: `weight_version`, `abort_all_requests`.
        """
        with ExitStack() as stack:
            update = self._from_tensor(named_tensors, load_format, flush_cache, options, stack)
            return self._core.call(update)

    async def async_update_weights_from_tensor(
        self,
        named_tensors: NamedTensors,
        load_format: str | None = None,
        flush_cache: bool = True,
        **options: Any,
    ) -> tuple[bool, str]:
        """See `update_weights_from_tensor`."""
        with ExitStack() as stack:
            update = self._from_tensor(named_tensors, load_format, flush_cache, options, stack)
            return await self._core.call_async(update)

    def _from_tensor(
        self,
        named_tensors: NamedTensors,
        load_format: str | None,
        flush_cache: bool,
        options: dict[str, Any],
        stack: ExitStack,
    ) -> Coroutine[Any, Any, tuple[bool, str]]:
        pairs = list(named_tensors.items() if hasattr(named_tensors, "items") else named_tensors)
        is_cuda = bool(pairs) and all(tensor.is_cuda for _, tensor in pairs)
        if is_cuda and self._context.config.model.device == "cuda":
            # Each rank reads there, at its own time.
            body = stack.enter_context(CudaTensors(pairs)).body
        else:
            body = stack.enter_context(SharedTensors(pairs)).body
        fields = msgspec.convert({**body, "load_format": load_format}, TensorBody)

        async def update() -> Outcome:
            op = to_tensors(fields, self._context.config.parallel.tp_size)
            return await self._weights.update(op, flush_cache=flush_cache, **options)

        return self._pair(update())

    def update_weights_from_distributed(
        self,
        names: Sequence[str],
        dtypes: Sequence[str],
        shapes: Sequence[Sequence[int]],
        group_name: str = DEFAULT_GROUP,
        flush_cache: bool = True,
        load_format: str | None = None,
        **options: Any,
    ) -> tuple[bool, str]:
        """Replace some weights by what rank 0 of a group broadcasts, in this order.

        `options` are `weight_version`, `abort_all_requests` and `timeout`, in seconds, for each
        broadcast.
        """
        update = self._from_distributed(
            names, dtypes, shapes, group_name, flush_cache, load_format, options
        )
        return self._core.call(self._pair(update))

    async def async_update_weights_from_distributed(
        self,
        names: Sequence[str],
        dtypes: Sequence[str],
        shapes: Sequence[Sequence[int]],
        group_name: str = DEFAULT_GROUP,
        flush_cache: bool = True,
        load_format: str | None = None,
        **options: Any,
    ) -> tuple[bool, str]:
        """See `update_weights_from_distributed`."""
        update = self._from_distributed(
            names, dtypes, shapes, group_name, flush_cache, load_format, options
        )
        return await self._core.call_async(self._pair(update))

    async def _from_distributed(
        self,
        names: Sequence[str],
        dtypes: Sequence[str],
        shapes: Sequence[Sequence[int]],
        group_name: str,
        flush_cache: bool,
        load_format: str | None,
        options: dict[str, Any],
    ) -> Outcome:
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

    def init_weights_update_group(
        self,
        master_address: str,
        master_port: int,
        rank_offset: int,
        world_size: int,
        group_name: str = DEFAULT_GROUP,
        backend: str = "nccl",
    ) -> tuple[bool, str]:
        """Meet a trainer, rank 0 of the group; returns when everybody is there."""
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
                to_join(body, self._context.config.parallel.tp_size)
            )

        return self._core.call(self._pair(join()))

    def destroy_weights_update_group(self, group_name: str = DEFAULT_GROUP) -> tuple[bool, str]:
        """Leave the group."""

        async def leave() -> Outcome:
            reply = await self._weights.ask(LeaveGroup(group_name))
            return Outcome(reply.success, reply.message)

        return self._core.call(self._pair(leave()))

    def begin_weight_update(self, selector: str = "all") -> tuple[bool, str]:  # noqa: ARG002  # one model
        """Hold requests back over several updates, until `end_weight_update`."""
        return self._core.call(self._pair(self._weights.begin()))

    def end_weight_update(self) -> tuple[bool, str]:
        """Let them go on."""
        return self._core.call(self._pair(self._weights.end()))

    # ---- reading and tests ----

    def get_weights_by_name(self, name: str, truncate_size: int = 100) -> Any:
        """The first rows of one weight as nested lists of floats.

        Raises:
            ValueError: no such weight.
        """

        async def read() -> Any:
            reply = await self._weights.ask(ReadWeight(name, max(truncate_size, 1)))
            if not reply.success:
                raise InvalidRequest(reply.message)
            return read_weight(reply.data)

        return self._core.call(self._translated(read()))

    def update_weight_version(
        self, new_version: str, abort_all_requests: bool = True
    ) -> tuple[bool, str]:
        """Relabel the loaded weights; aborts every request unless told not to."""
        update = self._weights.set_version(new_version, abort_all_requests=abort_all_requests)
        return self._core.call(self._pair(update))

    def check_weights(self, action: str) -> tuple[bool, str]:
        """`snapshot`, `reset_tensors`, `compare` or `checksum`, for tests of a trainer."""

        async def check() -> Outcome:
            op = CheckWeights(_converted({"action": action}, CheckBody).action)
            changes = action == "reset_tensors"
            reply = await (self._weights.change(op) if changes else self._weights.ask(op))
            return Outcome(reply.success, reply.message)

        return self._core.call(self._pair(check()))

    # ---- pauses and memory ----

    def pause_generation(self, mode: str = "abort") -> None:
        """Stop generating: `abort` what runs, `retract` it to wait, or freeze it `in_place`.

        Requests that come meanwhile wait for `continue_generation`.
        """
        self._core.call(self._translated(self._paused(mode)))

    async def async_pause_generation(self, mode: str = "abort") -> None:
        """See `pause_generation`."""
        await self._core.call_async(self._translated(self._paused(mode)))

    async def _paused(self, mode: str) -> None:
        await self._weights.pause(_converted({"mode": mode}, PauseBody).mode)

    def continue_generation(self) -> None:
        """Go on with what was frozen or put back, and with what came meanwhile."""
        self._core.call(self._translated(self._weights.resume()))

    async def async_continue_generation(self) -> None:
        """See `continue_generation`."""
        await self._core.call_async(self._translated(self._weights.resume()))

    def release_memory_occupation(self, tags: Sequence[str] | None = None) -> None:
        """Give memory back while nothing runs: `kv_cache`, `weights`, `cuda_graph`; all by default.

        Raises:
            ValueError: requests are running.
        """
        self._core.call(self._translated(self._memory(tags, release=True)))

    def resume_memory_occupation(self, tags: Sequence[str] | None = None) -> None:
        """Take it again; weights come back as they were.

        Raises:
            ValueError: there is too little memory now.
        """
        self._core.call(self._translated(self._memory(tags, release=False)))

    async def _memory(self, tags: Sequence[str] | None, *, release: bool) -> None:
        # A text is a sequence of texts too: its letters would be called unknown tags.
        given = tags if tags is None or isinstance(tags, str) else list(tags)
        wanted = _converted({"tags": given}, MemoryBody).tags or []
        if release:
            await self._weights.release_memory(wanted)
        else:
            await self._weights.resume_memory(wanted)

    # ---- shared ----

    @property
    def _context(self) -> ServiceContext:
        return self._core.context

    @property
    def _weights(self) -> WeightControl:
        return self._core.context.weights

    async def _outcome(self, outcome: Coroutine[Any, Any, Outcome]) -> Outcome:
        try:
            return await self._translated(outcome)
        except ValueError as error:
            return Outcome(False, str(error))

    async def _pair(self, outcome: Coroutine[Any, Any, Outcome]) -> tuple[bool, str]:
        found = await self._outcome(outcome)
        return found.success, found.message

    async def _translated(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        with translated():
            try:
                self._core.check_alive()
            except BaseException:
                coroutine.close()
                raise
            return await coroutine


def _converted(values: dict[str, Any], struct: Any) -> Any:
    try:
        return msgspec.convert(values, struct)
    except msgspec.ValidationError as error:
        raise InvalidRequest(explain(error, struct).replace("`$.", "`")) from None
