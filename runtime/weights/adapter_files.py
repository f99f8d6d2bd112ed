"""Reads adapters (LoRA) from their folders on one rank, while the rank's steps go on."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import assert_never

from runtime.checkpoint.model_spec import ModelSpec
from runtime.checkpoint.peft_adapter import read_adapter
from runtime.config.lora_options import LoraLimits
from runtime.executor.adapter_pool import AdapterPool
from runtime.ipc.weight_messages import AdapterOp, AdapterStatus, LoadAdapter, UnloadAdapter

LOADED = "loaded"


class RankAdapters:
    """Executes the front process's operations on adapters, on one rank."""

    def __init__(self, pool: AdapterPool, model: ModelSpec, limits: LoraLimits) -> None:
        """Prepare to load adapters into `pool`, if they fit `model` and `limits`."""
        self._pool = pool
        self._model = model
        self._limits = limits
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="adapters")
        self._loading: dict[int, Future[None]] = {}

    def change(self, op: AdapterOp) -> str:
        """Execute an operation; return `LOADED` if its adapter is loaded now, otherwise "".

        Raises:
            InvalidRequest, StartupError: an adapter cannot be read.
        """
        match op:
            case LoadAdapter(in_background=True):
                self._loading[op.adapter_id] = self._thread.submit(self._load, op)
                return ""
            case LoadAdapter():
                self._load(op)
                return LOADED
            case AdapterStatus():
                future = self._loading.get(op.adapter_id)
                if future is not None and not future.done():
                    return ""
                self._loading.pop(op.adapter_id, None)
                if future is not None:
                    future.result()
                return LOADED
            case UnloadAdapter():
                future = self._loading.pop(op.adapter_id, None)
                if future is not None:
                    # Wait for the loading to end: it must not finish after the unloading.
                    future.exception()
                self._pool.unload(op.adapter_id)
                return ""
            case _:
                assert_never(op)

    def _load(self, op: LoadAdapter) -> None:
        # The front has checked the folder; reading it again here gives the list of its tensors.
        limits = self._limits
        spec = read_adapter(Path(op.folder), self._model, limits.max_rank, limits.target_modules)
        self._pool.load(op.adapter_id, spec)
