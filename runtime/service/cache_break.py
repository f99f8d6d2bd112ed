"""Where the prefix cache breaks: the first token of a prompt that no cached prompt goes on with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypedDict

from runtime.errors import InvalidRequest
from runtime.requests.image_input import ImageInput
from runtime.service.context import ServiceContext

# Tokens of the prompt that are shown on either side.
_SHOWN = 16


class CacheBreak(TypedDict):
    """The first token of a prompt that no cached prompt goes on with.

    The texts are the prompt's own: what the other prompt says there is nobody's business. `kind` is
    `differs` where the other one goes on in another way, `new` where it ends, or was evicted.
    """

    index: int
    kind: Literal["differs", "new"]
    before: str
    after: str


@dataclass(frozen=True)
class CachedPrefix:
    """How much of a prompt is cached.

    Attributes:
        num_cached: tokens that a request would take from the cache.
        broken: where the cache breaks; None where all of the prompt is there.
    """

    num_cached: int
    broken: CacheBreak | None


def check_reported(context: ServiceContext, param: str) -> None:
    """Refuse to tell of the cache where the operator has not said that it may be told of.

    Raises:
        InvalidRequest: the server was started without `--enable-cache-report`.
    """
    if not context.config.http.enable_cache_report:
        raise InvalidRequest(
            f"{param} needs a server that reports its cache: --enable-cache-report.", param=param
        )


async def cached_prefix(
    context: ServiceContext,
    input_ids: Sequence[int],
    namespace: str,
    images: Sequence[ImageInput] = (),
) -> CachedPrefix:
    """Compare a prompt with what is cached just now, in the caller's own name space.

    Raises:
        EngineNotReady: a worker is loading.
    """
    ids = list(input_ids)
    report = await context.client.match_prefix(ids, namespace, images)
    at = report.num_tokens
    if at >= len(ids):
        return CachedPrefix(report.num_cached, None)
    decode = context.tokenizer.decode
    before = decode(ids[max(at - _SHOWN, 0) : at], skip_special_tokens=False)
    after = decode(ids[at : at + _SHOWN], skip_special_tokens=False)
    kind: Literal["differs", "new"] = "differs" if report.differs else "new"
    broken: CacheBreak = {"index": at, "kind": kind, "before": before, "after": after}
    return CachedPrefix(report.num_cached, broken)
