"""Finds where the prefix cache breaks: the first token of a prompt that is not cached."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypedDict

from runtime.errors import InvalidRequest
from runtime.requests.image_input import ImageInput
from runtime.service.context import ServiceContext

# Number of prompt tokens that are shown on either side of the break.
_SHOWN = 16


class CacheBreak(TypedDict):
    """The first token of a prompt that is not in the prefix cache.

    `index` is the token's position in the prompt. `before` and `after` are the prompt's own text on
    either side of it; the text of other, cached prompts is never shown. `kind` is `differs` if a
    cached prompt continues with another token at this position. It is `new` if the cached prompt
    ends here, or if its pages from here on were evicted.
    """

    index: int
    kind: Literal["differs", "new"]
    before: str
    after: str


@dataclass(frozen=True)
class CachedPrefix:
    """The cached part of a prompt, and where the cache breaks.

    Attributes:
        num_cached: number of tokens whose keys and values a request would take from the cache.
        broken: where the cache breaks; `None` if the whole prompt is cached.
    """

    num_cached: int
    broken: CacheBreak | None


def check_reported(context: ServiceContext, param: str) -> None:
    """Refuse to report on the cache unless the operator has allowed it.

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
    """Find how much of a prompt the prefix cache holds now, within the caller's own namespace.

    Raises:
        EngineNotReady: a worker is still loading the model.
    """
    ids = list(input_ids)
    report = await context.client.calls.match_prefix(ids, namespace, images)
    at = report.num_tokens
    if at >= len(ids):
        return CachedPrefix(report.num_cached, None)
    decode = context.tokenizer.decode
    before = decode(ids[max(at - _SHOWN, 0) : at], skip_special_tokens=False)
    after = decode(ids[at : at + _SHOWN], skip_special_tokens=False)
    kind: Literal["differs", "new"] = "differs" if report.differs else "new"
    broken: CacheBreak = {"index": at, "kind": kind, "before": before, "after": after}
    return CachedPrefix(report.num_cached, broken)
