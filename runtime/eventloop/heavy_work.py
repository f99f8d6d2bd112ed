"""Runs Python work that grows with a request: short work on the event loop, long on a thread.

A thread shares the GIL (Python's global lock) with the loop. But the loop gets the GIL back after a
switch interval, so it waits only that long, and not for the whole work.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Hashable
from functools import lru_cache
from typing import Any, ParamSpec, TypeVar, cast

import msgspec
import msgspec.inspect

from runtime.eventloop.offload import OffloadPool
from runtime.ipc.freed_memory import return_freed_memory

P = ParamSpec("P")
T = TypeVar("T")

# The most values that are handled on the event loop; that takes about two milliseconds.
_LIGHT_VALUES = 512
# So many characters of a text count as one value.
_CHARS_PER_VALUE = 4096
# So many items of a list or dict are counted or freed at a time.
_AT_ONCE = 1024
_FREED_AFTER_S = 1.0
_LEAVES = frozenset({str, int, float, bool, bytes, type(None)})
_LEAF_INFOS = (
    *(msgspec.inspect.NoneType, msgspec.inspect.BoolType, msgspec.inspect.IntType),
    *(msgspec.inspect.FloatType, msgspec.inspect.StrType, msgspec.inspect.LiteralType),
)
# The reference count of an object with one owner, as `getrefcount` reports it: the owner's
# reference, and that of the call's argument.
_OWN_REFERENCES = 2

# One pool for reading and checking requests: with more threads that want the GIL, the event loop
# waits longer for it.
PREPARING = OffloadPool("reading of the request", workers=2, max_queued=4096, timeout_s=120.0)
_freeing: set[asyncio.Task[None]] = set()
_FREEING = OffloadPool("freeing of requests", workers=1, max_queued=1 << 20, timeout_s=3600.0)


async def aside(weighed: object, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Call `work` and return its result; on a thread unless `weighed` is small.

    Args:
        weighed: the value whose size decides how long `work` takes.
        work: plain Python that reads no context variable.
        *args: arguments for `work`.
        **kwargs: keyword arguments for `work`.

    Raises:
        Overloaded: too much work of this kind is waiting.
        Exception: whatever `work` raises.
    """
    if is_light(weighed):
        return work(*args, **kwargs)
    return await PREPARING.run(work, *args, **kwargs)


def is_light(value: Any, most: int = _LIGHT_VALUES) -> bool:
    """Whether `value` consists of at most `most` values.

    Args:
        value: structs, dicts, lists and plain values; long texts count as several values.
        most: the bound, at which counting stops.
    """
    num_values = 0
    stack: list[Any] = [value]
    while stack:
        part = stack.pop()
        num_values += 1
        # `type(part)` is compared, and fields are read in one call, because this runs for every
        # chat request.
        kind = type(part)
        if kind is str or kind is bytes:
            num_values += len(part) // _CHARS_PER_VALUE
        elif kind is dict or kind is list or kind is tuple:
            if len(part) > most:
                return False
            stack += part.values() if kind is dict else part
        elif isinstance(part, msgspec.Struct):
            # Fields that are not set, most of a request, do not count.
            stack += filter(None, msgspec.structs.astuple(part))
        if num_values > most:
            return False
    return True


def free_politely(value: object, after_s: float = _FREED_AFTER_S) -> None:
    """Free a large value piece by piece on a thread, once no other object refers to it.

    Python would free all objects of a request at once when the last reference goes away. That takes
    tens of milliseconds on the event loop for 100,000 objects. This function also returns the
    memory to the system: the C library's allocator would keep hundreds of MiB for the threads that
    read such requests.

    Args:
        value: a value of a request.
        after_s: seconds between two checks of whether the value is still in use.
    """
    loop = asyncio.get_running_loop()
    held = [value]
    del value

    def look() -> None:
        # The value is in use until the request is answered, which may take minutes.
        if sys.getrefcount(held[0]) > _OWN_REFERENCES:
            loop.call_later(after_s, look)
        else:
            task = loop.create_task(_FREEING.run(_free, held))
            _freeing.add(task)
            task.add_done_callback(_freeing.discard)

    loop.call_later(after_s, look)


def _free(held: list[Any]) -> None:
    take_apart(held)
    return_freed_memory()


def take_apart(held: list[Any]) -> None:
    """Free the content of `held` piece by piece; objects with other references stay.

    Args:
        held: a list, which is empty afterwards.
    """
    while held:
        value = held.pop()
        if sys.getrefcount(value) > _OWN_REFERENCES:
            continue
        if isinstance(value, dict):
            while value:
                values = [value.popitem()[1] for _ in range(min(len(value), _AT_ONCE))]
                held += [each for each in values if type(each) not in _LEAVES]
        elif isinstance(value, list):
            while value:
                held += _nested(value[-_AT_ONCE:])
                del value[-_AT_ONCE:]
        else:
            fields = [getattr(value, name) for name in _nesting_fields(_kind(value))]
            held += [each for each in fields if type(each) not in _LEAVES]


def _nested(values: list[Any]) -> list[Any]:
    """Return those values that contain other values.

    If the first value contains none, as in a list of numbers, an empty list is returned at once.
    """
    if type(values[0]) in _LEAVES:
        return []
    return [each for each in values if type(each) not in _LEAVES and _nesting_fields(_kind(each))]


@lru_cache(maxsize=256)
def _nesting_fields(kind: Any) -> tuple[str, ...]:
    """Return the names of a struct's fields that may contain lists or objects."""
    if kind in (list, dict):
        return (kind.__name__,)
    if not issubclass(kind, msgspec.Struct):
        return ()
    return tuple(
        field.name
        for field in msgspec.structs.fields(kind)
        if not _holds_leaves_only(msgspec.inspect.type_info(field.type))
    )


def _holds_leaves_only(info: msgspec.inspect.Type) -> bool:
    if isinstance(info, msgspec.inspect.UnionType):
        return all(map(_holds_leaves_only, info.types))
    if isinstance(info, msgspec.inspect.Metadata):
        return _holds_leaves_only(info.type)
    return isinstance(info, _LEAF_INFOS)


def _kind(value: object) -> Hashable:
    return cast("Hashable", type(value))
