"""The settings in `--kv-events-config`: where events about the prefix cache are published."""

from __future__ import annotations

import re
from typing import Literal

import msgspec

from runtime.errors import StartupError

_ENDPOINT = re.compile(r"(tcp://.+:)(\d+)|ipc://.+")
_HOST = re.compile(r"tcp://.+:(?=\d+$)")
_EVERYWHERE = ("tcp://*:", "tcp://0.0.0.0:", "tcp://[::]:")
MAX_PORT = 65535


class KVEventsConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The JSON object of `--kv-events-config`, which has the same form in vLLM and SGLang.

    Attributes:
        publisher: `zmq`; or `null` to publish no events.
        enable_kv_cache_events: vLLM's switch; `false` publishes no events either.
        endpoint: ZMQ address where events are published. Each further replica (`--dp-size`) adds
            its index to the port.
        replay_endpoint: ZMQ address where subscribers request batches that they missed; `None` for
            no such address.
        buffer_steps: number of batches that are kept for such requests.
        hwm: most batches that wait for a slow subscriber; further ones are dropped for it.
        max_queue_size: accepted for compatibility, has no effect.
        topic: first frame of each message, by which subscribers filter.
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
    def parse(cls, text: str | None, dp_size: int = 1) -> KVEventsConfig | None:
        """Read the option's value.

        Args:
            text: the value; `None` if the option is absent.
            dp_size: number of replicas, each of which has endpoints of its own.

        Returns:
            The settings; `None` if no events are to be published.

        Raises:
            StartupError: the text is not such a JSON object, or a value is out of bounds.
        """
        if text is None:
            return None
        try:
            found = msgspec.json.decode(text.encode(), type=cls)
        except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
            raise StartupError(f"--kv-events-config: {error}.") from None
        most = MAX_PORT + 1 - dp_size
        for name in ("endpoint", "replay_endpoint"):
            value = getattr(found, name)
            match = None if value is None else _ENDPOINT.fullmatch(value)
            if value is not None and (match is None or not 0 < int(match[2] or 1) <= most):
                copies = f" with --dp-size {dp_size}" if dp_size > 1 else ""
                raise StartupError(
                    f"--kv-events-config: {name} must be tcp://HOST:PORT (* for all addresses, "
                    f"ports in [1, {most}]{copies}) or ipc://PATH, got {value!r}."
                )
        found._check_apart(dp_size)
        for name in ("buffer_steps", "hwm"):
            if not 1 <= getattr(found, name) <= 10**7:
                raise StartupError(f"--kv-events-config: {name} must be in [1, 10000000].")
        is_on = found.publisher == "zmq" and found.enable_kv_cache_events
        return found if is_on else None

    def _check_apart(self, dp_size: int) -> None:
        """Refuse settings in which an event endpoint of a replica is also a replay endpoint."""
        if self.replay_endpoint is None:
            return
        pair = (self.endpoint, self.replay_endpoint)
        if any(each.startswith(_EVERYWHERE) for each in pair):
            # An endpoint for all addresses uses the port of every address.
            pair = (_HOST.sub("tcp://*:", pair[0]), _HOST.sub("tcp://*:", pair[1]))
        copies = range(dp_size)
        events, replays = ({of_replica(each, rank) for rank in copies} for each in pair)
        if both := events & replays:
            hint = f": with --dp-size {dp_size} copy N adds N to the port" if copies[1:] else ""
            raise StartupError(
                f"--kv-events-config: endpoint and replay_endpoint share {min(both)}{hint}."
            )


def of_replica(endpoint: str, dp_rank: int) -> str:
    """Return the endpoint of one replica: its index is added to the port, or to the path's end."""
    match = _ENDPOINT.fullmatch(endpoint)
    if not dp_rank or match is None:
        return endpoint
    if match[2] is None:
        return f"{endpoint}.{dp_rank}"
    return f"{match[1]}{int(match[2]) + dp_rank}"
