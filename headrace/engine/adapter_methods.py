"""The engine's methods that load and unload adapters (LoRA).

The methods answer as the server's routes of the same names do; see `docs/lora.md`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from headrace.engine.core import EngineCore
from headrace.engine.on_loop import awaited, waiting
from headrace.trainer import adapter_bytes
from runtime.weights.adapter_control import AdapterOutcome

if TYPE_CHECKING:
    from collections.abc import Mapping

    from headrace.trainer import NamedTensors


@dataclass(frozen=True)
class AdapterResult:
    """The result of a call; an error that a caller can cause is returned, not raised.

    Attributes:
        error_message: why the call failed; `None` on success.
        loaded_adapters: name and path of every adapter that there is now.
    """

    success: bool
    error_message: str | None
    loaded_adapters: dict[str, str]


class AdapterMethods:
    """The adapter methods of `Engine`; each `async_` method is the awaitable form of its name."""

    _core: EngineCore

    @waiting
    async def load_lora_adapter(
        self, lora_name: str, lora_path: str, pinned: bool = False
    ) -> AdapterResult:
        """Load an adapter from a folder of this machine, as PEFT writes it."""
        adapters = self._core.context.adapters
        return _result(await adapters.load(lora_name, str(lora_path), pinned=pinned))

    async_load_lora_adapter = awaited(load_lora_adapter)

    @waiting
    async def load_lora_adapter_from_tensors(
        self,
        lora_name: str,
        tensors: NamedTensors,
        config_dict: Mapping[str, Any],
        pinned: bool = False,
    ) -> AdapterResult:
        """Load an adapter from tensors with PEFT's names and the content of its configuration."""
        adapters = self._core.context.adapters
        data = adapter_bytes(tensors)
        return _result(
            await adapters.load_tensors(lora_name, dict(config_dict), data, pinned=pinned)
        )

    async_load_lora_adapter_from_tensors = awaited(load_lora_adapter_from_tensors)

    @waiting
    async def unload_lora_adapter(self, lora_name: str) -> AdapterResult:
        """Forget an adapter once the requests that use it have ended."""
        return _result(await self._core.context.adapters.unload(lora_name))

    async_unload_lora_adapter = awaited(unload_lora_adapter)


def _result(outcome: AdapterOutcome) -> AdapterResult:
    message = None if outcome.success else outcome.message
    return AdapterResult(outcome.success, message, outcome.loaded)
