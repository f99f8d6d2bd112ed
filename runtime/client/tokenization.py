"""Encodes the texts of a request: counts characters first, then encodes off the event loop."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from runtime.client.admission import EngineLimits, check_prompt_length, check_text_size
from runtime.errors import InvalidRequest
from runtime.eventloop.offload import OffloadPool
from runtime.text.tokenizer import Tokenizer

# Most characters of all texts of a request together: about eight million tokens.
MAX_TEXT_CHARS = 32 * 2**20
# Encoding this many characters takes about a millisecond; a hop to a thread takes a twentieth of
# that.
_INLINE_CHARS = 4 * 1024
_INLINE_TEXTS = 64
# Decoding this many ids takes about as long.
_INLINE_IDS = 1024
# Characters encoded at a time: the next request waits for about twenty milliseconds.
_GROUP_CHARS = 64 * 1024
_GROUP_TEXTS = 1024

# The library releases the GIL, so two threads leave a core to the event loop. Each request waits
# for one job at a time. `max_queued` is high enough for the requests that wait under a heavy load.
_POOL = OffloadPool("tokenization", workers=2, max_queued=16_384, timeout_s=120.0)


def check_texts(texts: Sequence[str], limits: EngineLimits, *, most: int = MAX_TEXT_CHARS) -> None:
    """Refuse texts that are too long, alone or together, before spending time on them.

    Args:
        texts: texts of one request.
        limits: the engine's limits.
        most: most characters of all texts together.

    Raises:
        InvalidRequest: more characters than one request may have.
        TooLong: a text has more characters than the context could hold.
    """
    check_num_chars(sum(map(len, texts)), most=most)
    for text in texts:
        check_text_size(text, limits)


def check_num_chars(num_chars: int, *, most: int = MAX_TEXT_CHARS) -> None:
    """Refuse a request whose texts have `num_chars` characters together.

    Raises:
        InvalidRequest: more than `most`.
    """
    if num_chars > most:
        raise InvalidRequest(
            f"The texts of a request may have at most {most} characters together, got {num_chars}: "
            "send them in several requests."
        )


async def encode_prompts(
    tokenizer: Tokenizer,
    prompts: Sequence[str | list[int]],
    limits: EngineLimits,
    *,
    add_special_tokens: bool = True,
) -> list[list[int]]:
    """Return token ids of one request's prompts; prompts that are ids already are not changed.

    Raises:
        InvalidRequest: the texts are too long together, or one holds half a surrogate pair.
        TooLong: a prompt is longer than the context or the KV pool.
        Overloaded: too many other requests wait for the same.
    """
    texts = [prompt for prompt in prompts if isinstance(prompt, str)]
    if not texts:
        return [prompt for prompt in prompts if not isinstance(prompt, str)]
    check_texts(texts, limits)
    encoded = await encode_texts(
        tokenizer,
        texts,
        add_special_tokens=add_special_tokens,
        check_length=lambda num_tokens: check_prompt_length(num_tokens, limits),
        most=limits.longest_kept if add_special_tokens else None,
    )
    ids = iter(encoded)
    return [next(ids) if isinstance(prompt, str) else prompt for prompt in prompts]


async def encode_texts(
    tokenizer: Tokenizer,
    texts: Sequence[str],
    *,
    add_special_tokens: bool = True,
    check_length: Callable[[int], object] | None = None,
    most: int | None = None,
) -> list[list[int]]:
    """Return token ids of texts whose sizes are checked already; see `Tokenizer.encode_batch`."""
    if sum(map(len, texts)) <= _INLINE_CHARS and len(texts) <= _INLINE_TEXTS:
        return tokenizer.encode_batch(texts, add_special_tokens, check_length, most)
    encoded: list[list[int]] = []
    for group in _groups(texts):
        encoded += await _POOL.run(
            tokenizer.encode_batch, group, add_special_tokens, check_length, most
        )
    return encoded


async def encode_pieces(
    tokenizer: Tokenizer, pieces: Sequence[str], limits: EngineLimits
) -> list[int]:
    """Return token ids of a prompt whose tokens must not cross from one piece into the next.

    See `Tokenizer.encode_inner` for how the pieces after the first are encoded.

    Raises:
        InvalidRequest: a piece holds half a surrogate pair.
        TooLong: the prompt is longer than the context or the KV pool.
        Overloaded: too many other requests wait for the same.
    """
    check_texts(["".join(pieces)], limits)
    (ids,) = await encode_texts(tokenizer, pieces[:1], add_special_tokens=False)
    for group in _groups(pieces[1:]):
        for inner in await _POOL.run(tokenizer.encode_inner, group):
            ids += inner
    check_prompt_length(len(ids), limits)
    return ids


async def encode_pairs(
    tokenizer: Tokenizer, pairs: Sequence[tuple[str, str]], limits: EngineLimits
) -> list[tuple[list[int], int]]:
    """Return token ids of the pairs of texts of one request; see `Tokenizer.encode_pairs`.

    Raises:
        InvalidRequest: the texts are too long together, or one holds half a surrogate pair.
        TooLong: a pair is longer than the context.
        Overloaded: too many other requests wait for the same.
    """
    check_texts([text for pair in pairs for text in pair], limits)
    encoded: list[tuple[list[int], int]] = []

    def check_length(num_tokens: int) -> None:
        check_prompt_length(num_tokens, limits)

    for joined in _groups(["".join(pair) for pair in pairs]):
        group = pairs[len(encoded) : len(encoded) + len(joined)]
        encoded += await _POOL.run(tokenizer.encode_pairs, group, check_length, limits.longest_kept)
    return encoded


async def decode_texts(
    tokenizer: Tokenizer, sequences: Sequence[list[int]], *, skip_special_tokens: bool = True
) -> list[str]:
    """Return the text of each sequence of token ids; see `Tokenizer.decode_batch`."""
    if sum(map(len, sequences)) + len(sequences) <= _INLINE_IDS:
        return tokenizer.decode_batch(sequences, skip_special_tokens)
    return await _POOL.run(tokenizer.decode_batch, sequences, skip_special_tokens)


def _groups(texts: Sequence[str]) -> Iterator[list[str]]:
    group: list[str] = []
    num_chars = 0
    for text in texts:
        if (group and num_chars + len(text) > _GROUP_CHARS) or len(group) == _GROUP_TEXTS:
            yield group
            group, num_chars = [], 0
        group.append(text)
        num_chars += len(text)
    if group:
        yield group
