"""Changes options of the scheduler while the server runs."""

from __future__ import annotations

from runtime.errors import InvalidRequest
from runtime.service.context import ServiceContext

# Options that the scheduler can change between two steps: the least and the greatest value.
BOUNDS: dict[str, tuple[int, int]] = {
    "max_queued_requests": (0, 2**31),
    "decode_log_interval": (1, 2**31),
}
# Options that SGLang can change, for features that this server does not have; they are ignored.
_OF_NO_USE = frozenset(
    {
        "pp_max_micro_batch_size",
        "speculative_accept_threshold_single",
        "speculative_accept_threshold_acc",
    }
)


async def change_options(context: ServiceContext, values: dict[str, float]) -> bool:
    """Change options of the scheduler, and the values that the server reports.

    Args:
        context: the server's context.
        values: new values by the command-line names of the options, with underscores.

    Returns:
        Whether the options were changed. If false, none was.

    Raises:
        InvalidRequest: an option cannot change, or a value is out of bounds.
    """
    for name in values:
        if name not in BOUNDS and name not in _OF_NO_USE:
            raise InvalidRequest(
                f"{name[:64]!r} cannot change while the server runs; {', '.join(BOUNDS)} can.",
                param="server_args",
            )
    changes: dict[str, int] = {}
    for name, (least, most) in BOUNDS.items():
        if name not in values:
            continue
        value = values[name]
        if not (least <= value <= most and value == int(value)):
            raise InvalidRequest(
                f"{name} must be a whole number in [{least}, {most}], got {value}.",
                param="server_args",
            )
        changes[name] = int(value)
    if len(changes) < len(values) or not changes:
        return False
    reply = await context.client.calls.set_options(changes)
    if reply.success:
        context.changes.options.update(changes)
    return reply.success
