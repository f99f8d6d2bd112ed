"""Turns texts into token ids: checks sizes first, and encodes long texts off the event loop."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

from tokenizers import Encoding
from tokenizers import Tokenizer as Backend

from runtime.errors import InvalidRequest, TooLong
from runtime.eventloop.offload import OffloadPool
from runtime.requests.arrival import timed

# The most characters of all texts of a request together: about eight million tokens.
MAX_TEXT_CHARS = 32 * 2**20
# The most characters for each token of the context: with byte-level tokenizers, a longer text
# practically never fits.
MAX_CHARS_PER_TOKEN = 128
# Characters. Encoding so many takes about a millisecond; switching to a thread takes a twentieth of
# that.
_INLINE_CHARS = 4 * 1024
_INLINE_TEXTS = 64
# Characters that are encoded at a time, so that the next request waits for about twenty ms.
_GROUP_CHARS = 64 * 1024
_GROUP_TEXTS = 1024

# The library releases the GIL, so two threads leave a core to the event loop. A request has one job
# at a time. `max_queued` is enough for the requests that wait under a heavy load.
POOL = OffloadPool("tokenization", workers=2, max_queued=16_384, timeout_s=120.0)


class LengthLimits(Protocol):
    """Bounds on the length of a prompt; `runtime.client.admission.EngineLimits` explains each."""

    @property
    def context_len(self) -> int: ...
    @property
    def max_total_num_tokens(self) -> int: ...
    @property
    def allow_auto_truncate(self) -> bool: ...
    @property
    def num_least_output(self) -> int: ...
    @property
    def longest_kept(self) -> int | None: ...


class TextEncoder:
    """The half of `runtime.text.tokenizer.Tokenizer` that turns text into token ids.

    Attributes:
        backend: the tokenizer of the `tokenizers` library.
    """

    def __init__(self, backend: Backend) -> None:
        """Encode with `backend`, to which no tokens are added later."""
        self.backend = backend
        # A special token that never merges with the text after it. A text after this token is
        # encoded as one inside a prompt.
        self._guard = next(
            (
                token.content
                for token in backend.get_added_tokens_decoder().values()
                if token.special and not (token.rstrip or token.single_word)
            ),
            None,
        )

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of `text`, by default with the BOS and EOS that the tokenizer adds.

        Raises:
            InvalidRequest: `text` has half a surrogate pair, which cannot be encoded.
        """
        return self.encode_batch([text], add_special_tokens)[0]

    def encode_batch(
        self,
        texts: Sequence[str],
        add_special_tokens: bool = True,
        check_length: Callable[[int], object] | None = None,
        most: int | None = None,
    ) -> list[list[int]]:
        """Return the token ids of each text; the library releases the GIL meanwhile.

        Args:
            texts: the texts, any number.
            add_special_tokens: whether the tokenizer adds its BOS and EOS.
            check_length: called with the number of each text's tokens; it raises to refuse the
                text. It runs before the ids become Python integers, which holds the GIL for 20 ms
                per million ids.
            most: most tokens of a text, including those that the tokenizer adds. A longer text is
                cut, but its closing tokens stay.

        Raises:
            InvalidRequest: a text has half a surrogate pair.
        """
        _refuse_surrogates(texts)
        # The `fast` variant takes a third less time, because it leaves out the characters' offsets,
        # which are not needed.
        encodings = self.backend.encode_batch_fast(
            list(texts), add_special_tokens=add_special_tokens
        )
        if check_length is not None:
            for encoding in encodings:
                check_length(len(encoding))
        if most is not None:
            return [
                encoding.ids if len(encoding) <= most else self._cut(most, text).ids
                for text, encoding in zip(texts, encodings, strict=True)
            ]
        return [encoding.ids for encoding in encodings]

    def encode_inner(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the token ids of texts that stand inside another text, one list for each.

        Some tokenizers put a space before the text at the beginning of a prompt, but not before a
        text inside it. Other tokenizers put a space after every special token, and so also before
        these texts.

        Raises:
            InvalidRequest: a text has half a surrogate pair.
        """
        guard = self._guard
        if guard is None:
            return self.encode_batch(texts, add_special_tokens=False)
        encoded = self.encode_batch([guard + text for text in texts], add_special_tokens=False)
        return [ids[1:] for ids in encoded]

    def encode_pairs(
        self,
        pairs: Sequence[tuple[str, str]],
        check_length: Callable[[int], object] | None = None,
        most: int | None = None,
    ) -> list[tuple[list[int], int]]:
        """Return the token ids of pairs of texts, joined as models of pairs are trained on.

        Args:
            pairs: the pairs of texts, any number.
            check_length: raises an error for a number of tokens that is refused. It runs before the
                ids become Python integers.
            most: most tokens of a pair, including those that the tokenizer adds. The longer text of
                a pair is cut first.

        Returns:
            For each pair, its ids, and how many of them belong to the first text: 0 if the
            tokenizer does not tell the two texts apart.

        Raises:
            InvalidRequest: a text has half a surrogate pair.
        """
        for pair in pairs:
            _refuse_surrogates(pair)
        # The `fast` variant would not mark the two texts if the tokenizer has no template for
        # pairs.
        encodings = self.backend.encode_batch(list(pairs), add_special_tokens=True)
        if check_length is not None:
            for encoding in encodings:
                check_length(len(encoding))
        if most is not None:
            encodings = [
                encoding if len(encoding) <= most else self._cut(most, *pair)
                for pair, encoding in zip(pairs, encodings, strict=True)
            ]
        return [
            (encoding.ids, types.index(1) if 1 in (types := encoding.type_ids) else 0)
            for encoding in encodings
        ]

    def _cut(self, most: int, text: str, second: str | None = None) -> Encoding:
        """Cut a text or a pair to `most` tokens, as `transformers` does: the longer text first."""
        texts = [text] if second is None else [text, second]
        parts = self.backend.encode_batch(texts, add_special_tokens=False)
        room = max(0, most - self.backend.num_special_tokens_to_add(second is not None))
        for part, kept in zip(parts, _kept(room, [len(part) for part in parts]), strict=True):
            part.truncate(kept)
        return self.backend.post_process(parts[0], parts[1] if second is not None else None)


def check_texts(texts: Sequence[str], limits: LengthLimits, *, most: int = MAX_TEXT_CHARS) -> None:
    """Refuse texts that are too long, alone or together, before they are encoded.

    Args:
        texts: the texts of one request.
        limits: the engine's limits.
        most: most characters of all texts together.

    Raises:
        InvalidRequest: the texts have more characters than a request may have.
        TooLong: a text has more characters than the context could hold.
    """
    check_num_chars(sum(map(len, texts)), most=most)
    for text in texts:
        check_text_size(text, limits)


def check_num_chars(num_chars: int, *, most: int = MAX_TEXT_CHARS) -> None:
    """Check the number of characters of all texts of a request.

    Raises:
        InvalidRequest: `num_chars` is more than `most`.
    """
    if num_chars > most:
        raise InvalidRequest(
            f"The texts of a request may have at most {most} characters together, got {num_chars}: "
            "send them in several requests."
        )


async def encode_prompts(
    tokenizer: TextEncoder,
    prompts: Sequence[str | list[int]],
    limits: LengthLimits,
    *,
    add_special_tokens: bool = True,
) -> list[list[int]]:
    """Return the token ids of one request's prompts; prompts that are ids already stay as they are.

    Raises:
        InvalidRequest: the texts are too long together, or one has half a surrogate pair.
        TooLong: a prompt is longer than the context or the KV pool.
        Overloaded: too many other requests wait for the tokenizer.
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
    tokenizer: TextEncoder,
    texts: Sequence[str],
    *,
    add_special_tokens: bool = True,
    check_length: Callable[[int], object] | None = None,
    most: int | None = None,
) -> list[list[int]]:
    """Return the token ids of texts whose sizes are checked; long texts are encoded on threads."""
    with timed("tokenize"):
        if sum(map(len, texts)) <= _INLINE_CHARS and len(texts) <= _INLINE_TEXTS:
            return tokenizer.encode_batch(texts, add_special_tokens, check_length, most)
        encoded: list[list[int]] = []
        for group in _groups(texts):
            encoded += await POOL.run(
                tokenizer.encode_batch, group, add_special_tokens, check_length, most
            )
        return encoded


async def encode_pieces(
    tokenizer: TextEncoder, pieces: Sequence[str], limits: LengthLimits
) -> list[int]:
    """Return the token ids of a prompt in pieces; no token may cross from one piece into the next.

    The pieces after the first are encoded by `TextEncoder.encode_inner`.

    Raises:
        InvalidRequest: a piece has half a surrogate pair.
        TooLong: the prompt is longer than the context or the KV pool.
        Overloaded: too many other requests wait for the tokenizer.
    """
    check_texts(["".join(pieces)], limits)
    (ids,) = await encode_texts(tokenizer, pieces[:1], add_special_tokens=False)
    for group in _groups(pieces[1:]):
        for inner in await POOL.run(tokenizer.encode_inner, group):
            ids += inner
    check_prompt_length(len(ids), limits)
    return ids


async def encode_pairs(
    tokenizer: TextEncoder, pairs: Sequence[tuple[str, str]], limits: LengthLimits
) -> list[tuple[list[int], int]]:
    """Return the token ids of a request's pairs of texts, as `TextEncoder.encode_pairs` does.

    Raises:
        InvalidRequest: the texts are too long together, or one has half a surrogate pair.
        TooLong: a pair is longer than the context.
        Overloaded: too many other requests wait for the tokenizer.
    """
    check_texts([text for pair in pairs for text in pair], limits)
    encoded: list[tuple[list[int], int]] = []

    def check_length(num_tokens: int) -> None:
        check_prompt_length(num_tokens, limits)

    for joined in _groups(["".join(pair) for pair in pairs]):
        group = pairs[len(encoded) : len(encoded) + len(joined)]
        encoded += await POOL.run(tokenizer.encode_pairs, group, check_length, limits.longest_kept)
    return encoded


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


def check_text_size(text: str, limits: LengthLimits) -> None:
    """Refuse a text that is too long, before it is encoded.

    Raises:
        TooLong: the text has more characters than the context could hold.
    """
    most = limits.context_len * MAX_CHARS_PER_TOKEN
    if len(text) > most and not limits.allow_auto_truncate:
        raise TooLong(
            f"The prompt has {len(text)} characters, which is longer than the model's context "
            f"length ({limits.context_len} tokens)."
        )


def check_prompt_length(num_prompt: int, limits: LengthLimits) -> None:
    """Refuse a prompt that leaves no room for output, unless such prompts are cut.

    Raises:
        TooLong: the prompt has more tokens than the context or the KV pool holds.
    """
    if limits.allow_auto_truncate:
        return
    least = limits.num_least_output
    if num_prompt + least > limits.context_len:
        raise TooLong(
            f"The input ({num_prompt} tokens) is longer than the model's context length "
            f"({limits.context_len} tokens)"
            + (", of which the output needs one." if least else ".")
        )
    if num_prompt + least > limits.max_total_num_tokens:
        raise TooLong(
            f"The input ({num_prompt} tokens) is longer than the KV pool holds "
            f"({limits.max_total_num_tokens} tokens), of which the output needs one."
        )


def _kept(room: int, lengths: Sequence[int]) -> Sequence[int]:
    """Return how many tokens of one text, or of each of two, are kept; the longer is cut first."""
    if len(lengths) == 1:
        return [room]
    shorter = min(*lengths, room // 2)
    kept = shorter, room - shorter
    return kept if lengths[0] <= lengths[1] else kept[::-1]


def _refuse_surrogates(texts: Sequence[str]) -> None:
    for text in texts:
        if text.isascii():
            continue
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise InvalidRequest(
                f"The text is not valid Unicode: half a surrogate pair at character {error.start}."
            ) from error
