"""The front process's list of the LoRA adapters that requests may name."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from runtime.errors import InvalidRequest
from runtime.ipc.weight_messages import LoadAdapter

DISABLED = "adapters (LoRA) are off in this server; start it with --enable-lora"


@dataclass
class Adapter:
    """One adapter, until it is unloaded.

    Attributes:
        adapter_id: a number that is never used again, not even for an adapter of the same name.
        name: the name by which requests ask for the adapter.
        path: the path as it was given; empty if the tensors were sent instead.
        folder: the folder from which the workers read the adapter.
        rank: the largest rank of its matrices.
        pinned: whether the adapter stays in the workers' memory and on the device until it is
            unloaded. Other adapters may be replaced when memory is needed.
        is_loaded: whether the workers have the adapter. If not, the next request for it loads it
            again.
        is_leaving: whether the adapter is being unloaded; new requests for it are refused.
        used_at: value of a counter of all adapters' uses at the latest request for this adapter.
        num_requests: number of its requests that were admitted so far.
    """

    adapter_id: int
    name: str
    path: str
    folder: Path
    rank: int
    pinned: bool = False
    is_loaded: bool = False
    is_leaving: bool = False
    used_at: int = 0
    num_requests: int = 0

    @property
    def message(self) -> LoadAdapter:
        """The message that makes the workers load the adapter."""
        return LoadAdapter(self.adapter_id, str(self.folder), self.pinned)


class AdapterRecord:
    """All adapters, by name.

    Attributes:
        is_enabled: whether the server was started with support for adapters.
    """

    def __init__(self) -> None:
        """Start without adapters."""
        self.is_enabled = False
        self._by_name: dict[str, Adapter] = {}
        self._ids = itertools.count(1)
        self._clock = itertools.count(1)

    def next_id(self) -> int:
        """Return the id for a new adapter."""
        return next(self._ids)

    def __contains__(self, name: str) -> bool:
        return name in self._by_name

    def all(self) -> list[Adapter]:
        """Return every adapter, in the order of registration."""
        return list(self._by_name.values())

    def named(self) -> list[Adapter]:
        """Return the adapters that new requests may name."""
        return [adapter for adapter in self._by_name.values() if not adapter.is_leaving]

    def paths(self) -> dict[str, str]:
        """Return the path of each adapter that new requests may name, by name."""
        return {adapter.name: adapter.path for adapter in self.named()}

    def loaded(self) -> list[Adapter]:
        """Return the adapters that the workers have loaded."""
        return [adapter for adapter in self._by_name.values() if adapter.is_loaded]

    def add(self, adapter: Adapter) -> None:
        """Register a new adapter."""
        self._by_name[adapter.name] = adapter

    def remove(self, adapter: Adapter) -> None:
        """Remove an adapter, unless a newer one has taken its name."""
        if self._by_name.get(adapter.name) is adapter:
            del self._by_name[adapter.name]

    def find(self, name: str, param: str = "lora_path") -> Adapter:
        """Return the adapter that a request names.

        Args:
            name: the adapter's name.
            param: the request's field that has the name, for the message.

        Raises:
            InvalidRequest: no adapter has the name, or it is being unloaded; the message lists the
                existing ones.
        """
        if not self.is_enabled:
            raise InvalidRequest(f"{param}: {DISABLED}.", param=param)
        adapter = self._by_name.get(name)
        if adapter is None or adapter.is_leaving:
            known = ", ".join(each.name for each in self.named()[:16])
            raise InvalidRequest(
                f"{param}: no adapter {name[:64]!r} is loaded; there "
                f"{'are ' + known if known else 'is none'}.",
                param=param,
            )
        adapter.used_at = next(self._clock)
        return adapter

    def enter(self, adapter_id: int) -> None:
        """Count a request that is being admitted; an id of 0 means that it has no adapter.

        Raises:
            InvalidRequest: the adapter was unloaded since the request was read.
        """
        if not adapter_id:
            return
        for adapter in self._by_name.values():
            if adapter.adapter_id == adapter_id and adapter.is_loaded and not adapter.is_leaving:
                adapter.num_requests += 1
                return
        raise InvalidRequest("The request's adapter was unloaded meanwhile.", param="lora_path")

    def messages(self) -> Iterable[LoadAdapter]:
        """Return the messages that make a restarted worker load all loaded adapters."""
        return [adapter.message for adapter in self.loaded()]
