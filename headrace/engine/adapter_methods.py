"""The engine's methods that load and unload LoRA adapters.

The methods do the same as the server's routes of the same names; see `docs/lora.md`.
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
    """The result of loading or unloading an adapter; a caller's mistake is returned, not raised.

    Attributes:
        error_message: the reason of a failure; `None` on success.
        loaded_adapters: the path of every adapter that is loaded now, by name.
    """

    success: bool
    error_message: str | None
    loaded_adapters: dict[str, str]


class AdapterMethods:
    """The adapter methods of `Engine`; a method `async_x` is the awaitable form of `x`."""

    _core: EngineCore

    @waiting
    async def load_lora_adapter(
        self, lora_name: str, lora_path: str, pinned: bool = False
    ) -> AdapterResult:
        """Load an adapter from a folder of this machine that PEFT has written."""
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
        """Load an adapter from its tensors.

        Args:
            lora_name: the name by which requests will select the adapter.
            tensors: the adapter's tensors under PEFT's names.
            config_dict: the content of `adapter_config.json`.
            pinned: keep the adapter in memory until it is unloaded.
        """
        adapters = self._core.context.adapters
        data = adapter_bytes(tensors)
        return _result(
            await adapters.load_tensors(lora_name, dict(config_dict), data, pinned=pinned)
        )

    async_load_lora_adapter_from_tensors = awaited(load_lora_adapter_from_tensors)

    @waiting
    async def unload_lora_adapter(self, lora_name: str) -> AdapterResult:
        """Wait until the requests that use an adapter have ended, then unload the adapter."""
        return _result(await self._core.context.adapters.unload(lora_name))

    async_unload_lora_adapter = awaited(unload_lora_adapter)


def _result(outcome: AdapterOutcome) -> AdapterResult:
    message = None if outcome.success else outcome.message
    return AdapterResult(outcome.success, message, outcome.loaded)
