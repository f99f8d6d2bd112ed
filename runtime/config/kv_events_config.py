"""The options in `--kv-events-config`: where changes of the prefix cache are published."""

from __future__ import annotations

import re
from typing import Literal

import msgspec

from runtime.errors import StartupError

_ENDPOINT = re.compile(r"(tcp://.+:)(\d+)|ipc://.+")
MAX_PORT = 65535


class KVEventsConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What vLLM's and SGLang's option of the same name holds.

    Attributes:
        publisher: `zmq`, or `null` for no events.
        enable_kv_cache_events: vLLM's switch; `false` means no events, too.
        endpoint: where events are published. Another copy of the model (`--dp-size`) adds its
            number to the port.
        replay_endpoint: where subscribers ask for batches that they missed; none when absent.
        buffer_steps: batches kept for them.
        hwm: most batches that wait for a slow subscriber; further ones are dropped for it.
        max_queue_size: accepted for compatibility.
        topic: first frame of each message.
    """

    publisher: Literal["zmq", "null"] = "zmq"
    enable_kv_cache_events: bool = True
    endpoint: str = "tcp://127.0.0.1:5557"
    replay_endpoint: str | None = None
    buffer_steps: int = 10_000
    hwm: int = 100_000
    max_queue_size: int = 100_000
    topic: str = ""

    @classmethod
    def parse(cls, text: str | None) -> KVEventsConfig | None:
        """Read the option's value; `None` if no events are wanted.

        Raises:
            StartupError: it is not such a JSON object, or a value is out of bounds.
        """
        if text is None:
            return None
        try:
            found = msgspec.json.decode(text.encode(), type=cls)
        except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
            raise StartupError(f"--kv-events-config: {error}.") from None
        for name in ("endpoint", "replay_endpoint"):
            value = getattr(found, name)
            match = None if value is None else _ENDPOINT.fullmatch(value)
            if value is not None and (match is None or int(match[2] or 1) > MAX_PORT):
                raise StartupError(
                    f"--kv-events-config: {name} must be tcp://HOST:PORT (* for all addresses) or "
                    f"ipc://PATH, got {value!r}."
                )
        for name in ("buffer_steps", "hwm"):
            if not 1 <= getattr(found, name) <= 10**7:
                raise StartupError(f"--kv-events-config: {name} must be in [1, 10000000].")
        is_on = found.publisher == "zmq" and found.enable_kv_cache_events
        return found if is_on else None


def of_replica(endpoint: str, dp_rank: int) -> str:
    """Return the endpoint of one copy of the model: the port plus its number, or a longer path."""
    match = _ENDPOINT.fullmatch(endpoint)
    if not dp_rank or match is None:
        return endpoint
    if match[2] is None:
        return f"{endpoint}.{dp_rank}"
    return f"{match[1]}{int(match[2]) + dp_rank}"
