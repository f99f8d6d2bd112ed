"""The front process's side of adapters (LoRA): loads, unloads and finds them by name. No torch.

An adapter's folder is checked here; the workers then read it into host memory while their steps go
on. Tensors that a trainer sends are first written to a temporary folder, so that a restarted worker
finds them.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from runtime.checkpoint.model_spec import ModelSpec
from runtime.checkpoint.peft_adapter import CONFIG_FILE, TENSORS_FILE, AdapterSpec, read_adapter
from runtime.checkpoint.weight_roots import AdapterRoots
from runtime.client.adapter_record import DISABLED, Adapter, AdapterRecord
from runtime.client.client import EngineClient
from runtime.config.lora_options import LoraLimits
from runtime.errors import InvalidRequest, StartupError
from runtime.eventloop.offload import OffloadPool
from runtime.ipc.messages import ControlReply
from runtime.ipc.weight_messages import AdapterOp, AdapterStatus, UnloadAdapter, WeightCall
from runtime.requests.arrival import timed

logger = logging.getLogger(__name__)

MAX_NAME_CHARS = 256
# The maximum number of adapters that are registered, whether or not the workers have them.
MAX_REGISTERED = 4096
_POLL_S = 0.01
_READING = OffloadPool("reading of adapters", workers=2, max_queued=64, timeout_s=120.0)


@dataclass(frozen=True)
class AdapterOutcome:
    """The result of loading or unloading an adapter.

    Attributes:
        success: whether it succeeded.
        message: why it failed; empty on success.
        loaded: the adapters that requests may name now, a map from name to path.
    """

    success: bool
    message: str
    loaded: dict[str, str]


class AdapterControl:
    """The adapters of one engine. Calls that change them run one after the other."""

    def __init__(
        self,
        client: EngineClient,
        model: ModelSpec,
        limits: LoraLimits | None,
        folder: Path,
        *,
        max_loaded: int | None = None,
    ) -> None:
        """Control the adapters of one engine.

        Args:
            client: the engine's client.
            model: the model that it serves.
            limits: the workers' limits on adapters; `None` if adapters are off.
            folder: a private folder for tensors that are sent; its owner removes it.
            max_loaded: maximum number of adapters in the workers' memory; `None` for any number.
        """
        self._client = client
        self._record: AdapterRecord = client.adapters
        self._record.is_enabled = limits is not None
        self._model = model
        self._limits = limits
        self._folder = folder / "adapters"
        self._max_loaded = max_loaded
        self._turn = asyncio.Lock()
        self._numbers = itertools.count(1)

    @property
    def record(self) -> AdapterRecord:
        """All adapters, by name."""
        return self._record

    # ---- at the start ----

    def register(
        self, name: str, path: str, folder: Path, spec: AdapterSpec, *, pinned: bool
    ) -> None:
        """Register an adapter of the command line, which workers load before any request."""
        adapter = Adapter(self._record.next_id(), name, path, folder, spec.rank, pinned)
        adapter.is_loaded = True
        self._record.add(adapter)

    # ---- requests ----

    async def find(self, name: str, param: str = "lora_path") -> int:
        """Return the id of the adapter that a request names.

        If the workers have dropped the adapter from their memory, it is loaded again first.

        Raises:
            InvalidRequest: no adapter has that name, or it cannot be loaded again.
        """
        adapter = self._record.find(name, param)
        if not adapter.is_loaded:
            with timed("adapter"):
                async with self._turn:
                    if not adapter.is_loaded:
                        await self._load(adapter)
        return adapter.adapter_id

    async def find_each(self, names: Sequence[str | None]) -> list[int]:
        """Return the id of each named adapter, and 0 for each `None`.

        Adapters that the workers have dropped from their memory are loaded again first.
        """
        found = {name: await self.find(name) for name in dict.fromkeys(names) if name}
        return [found[name] if name else 0 for name in names]

    # ---- changes ----

    async def load(
        self, name: str, path: str, *, pinned: bool = False, roots: AdapterRoots | None = None
    ) -> AdapterOutcome:
        """Load an adapter from a folder of this machine.

        Args:
            name: name of the adapter, by which requests choose it.
            path: the folder, as PEFT writes it.
            pinned: whether the adapter stays in device memory once it was copied there.
            roots: which folders are allowed; `None` allows all.
        """

        async def run() -> None:
            self._check_new(name)
            folder = await _READING.run((roots or AdapterRoots(None)).find, path)
            await self._add(name, path, folder, pinned)

        return await self._outcome(run())

    async def load_tensors(
        self, name: str, config: dict[str, Any], tensors: bytes | Path, *, pinned: bool = False
    ) -> AdapterOutcome:
        """Load an adapter whose tensors were sent.

        Args:
            name: name of the adapter.
            config: the content of `adapter_config.json`.
            tensors: the bytes of a safetensors file, or such a file, which is copied.
            pinned: whether the workers keep the adapter in memory until it is unloaded.
        """

        async def run() -> None:
            self._check_new(name)
            folder = self._folder / str(next(self._numbers))
            try:
                await _READING.run(_write, folder, config, tensors)
                await self._add(name, "", folder, pinned)
            except BaseException:
                shutil.rmtree(folder, ignore_errors=True)
                raise

        return await self._outcome(run())

    async def unload(self, name: str) -> AdapterOutcome:
        """Unload an adapter once its requests have ended; new requests are refused at once."""

        async def run() -> None:
            adapter = self._record.find(name, "lora_name")
            adapter.is_leaving = True
            try:
                while self._client.with_adapter(adapter.adapter_id):  # noqa: ASYNC110  # rare
                    await asyncio.sleep(_POLL_S)
                async with self._turn:
                    if adapter.is_loaded:
                        await self._drop(adapter)
                    self._record.remove(adapter)
            finally:
                # If unloading failed because a worker is being started, it may be tried again.
                adapter.is_leaving = False
            if not adapter.path:
                shutil.rmtree(adapter.folder, ignore_errors=True)

        return await self._outcome(run())

    async def _outcome(self, change: Any) -> AdapterOutcome:
        success, message = True, ""
        try:
            await change
        except (StartupError, InvalidRequest) as error:
            success, message = False, error.message
        return AdapterOutcome(success, message, self._record.paths())

    def _check_new(self, name: str) -> None:
        if self._limits is None:
            raise InvalidRequest(f"{DISABLED[0].upper()}{DISABLED[1:]}.")
        check_name(name)
        if name in self._record:
            raise InvalidRequest(
                f"An adapter {name[:64]!r} is loaded already; unload it first.", param="lora_name"
            )
        if len(self._record.all()) >= MAX_REGISTERED:
            raise InvalidRequest(f"{MAX_REGISTERED} adapters are registered; unload some first.")

    async def _add(self, name: str, path: str, folder: Path, pinned: bool) -> None:
        limits = self._limits
        assert limits is not None, "checked"
        spec = await _READING.run(
            read_adapter, folder, self._model, limits.max_rank, limits.target_modules
        )
        async with self._turn:
            # The name is checked again, because two calls may have read it at the same time.
            self._check_new(name)
            pinned_ones = sum(each.pinned for each in self._record.all())
            if pinned and pinned_ones + 1 >= limits.max_per_batch:
                raise InvalidRequest(
                    f"{pinned_ones} adapters are pinned; at least one of the "
                    f"{limits.max_per_batch} of --max-loras-per-batch must stay free for others.",
                    param="pinned",
                )
            adapter = Adapter(self._record.next_id(), name, path, folder, spec.rank, pinned)
            await self._load(adapter)
            self._record.add(adapter)

    async def _load(self, adapter: Adapter) -> None:
        """Let every worker load an adapter, after making room.

        The caller holds the lock `_turn`.
        """
        while self._max_loaded is not None and len(self._record.loaded()) >= self._max_loaded:
            await self._evict()
        reply = await self._ask(replace(adapter.message, in_background=True))
        while reply.success and not reply.message:
            await asyncio.sleep(_POLL_S)
            reply = await self._ask(AdapterStatus(adapter.adapter_id, adapter.pinned))
        if not reply.success:
            # Some replicas may have loaded it, so it is unloaded everywhere.
            await self._client.calls.control(
                lambda call_id: WeightCall(call_id, UnloadAdapter(adapter.adapter_id)), None
            )
            raise InvalidRequest(f"The adapter cannot be loaded: {reply.message}")
        adapter.is_loaded = True

    async def _evict(self) -> None:
        """Let the workers drop the least recently used adapter."""
        free = [
            each
            for each in self._record.loaded()
            if not each.pinned and not self._client.with_adapter(each.adapter_id)
        ]
        if not free:
            raise InvalidRequest(
                f"All {self._max_loaded} adapters of --max-loaded-loras are pinned or in use."
            )
        oldest = min(free, key=lambda each: each.used_at)
        oldest.is_loaded = False
        await self._drop(oldest)

    async def _drop(self, adapter: Adapter) -> None:
        """Tell every worker to drop an adapter from its memory, and return when all have done so.

        A worker refuses while one of its requests uses the adapter. The command is then sent again
        every 10 ms.
        """
        op = UnloadAdapter(adapter.adapter_id)
        while not (await self._ask(op)).success:  # noqa: ASYNC110  # rare
            # A request that a stop string ended may still run in the worker for a step.
            await asyncio.sleep(_POLL_S)

    async def _ask(self, op: AdapterOp) -> ControlReply:
        return await self._client.calls.control(lambda call_id: WeightCall(call_id, op), None)


def check_name(name: str) -> None:
    """Check an adapter's name, which appears in logs, metrics and answers.

    Raises:
        InvalidRequest: the name is empty, too long, or has characters that are not printable.
    """
    if not 0 < len(name) <= MAX_NAME_CHARS or not name.isprintable():
        raise InvalidRequest(
            f"lora_name must be 1 to {MAX_NAME_CHARS} printable characters.", param="lora_name"
        )


def _write(folder: Path, config: dict[str, Any], tensors: bytes | Path) -> None:
    folder.mkdir(parents=True, mode=0o700)
    (folder / CONFIG_FILE).write_text(json.dumps(config), encoding="utf-8")
    if isinstance(tensors, Path):
        shutil.copyfile(tensors, folder / TENSORS_FILE)
    else:
        (folder / TENSORS_FILE).write_bytes(tensors)
