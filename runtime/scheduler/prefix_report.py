"""How much of a prompt is cached, for those who ask before, or instead of, sending it."""

from __future__ import annotations

import msgspec
import numpy as np

from runtime.cache.manager import CacheManager
from runtime.ipc.messages import ControlReply, MatchPrefix, PrefixReport
from runtime.scheduler.image_cache import cache_keys


def report_prefix(message: MatchPrefix, cache: CacheManager, generation: str) -> ControlReply:
    """Answer `message`; nothing in `cache` changes.

    Args:
        message: the prompt.
        cache: the worker's.
        generation: of the weights, which stands before every name space.
    """
    tokens = cache_keys(np.frombuffer(message.input_ids, dtype=np.int32), message.images)
    found = cache.common_prefix(tokens, generation + message.namespace)
    # The last token is computed whatever is cached.
    num_whole = max(min(found.num_tokens, len(tokens) - 1), 0) // cache.page_size
    report = PrefixReport(found.num_tokens, num_whole * cache.page_size, found.differs)
    return ControlReply(message.call_id, True, data=msgspec.msgpack.encode(report))
