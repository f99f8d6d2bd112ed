"""Turns special tokens in a chat's messages into plain text, so that they cannot end a turn.

A rendered prompt does not show whether the template or a message wrote an `<|im_end|>`. So the
request's texts are marked before they are rendered: a random number is inserted after the first
character of each special token. The rendered text is then cut at the marks, and the tokenizer gets
the pieces. These pieces hold only special tokens that the template wrote.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Collection, Iterable
from typing import Any

from runtime.client.admission import EngineLimits
from runtime.errors import InvalidRequest
from runtime.text.encoding import encode_pieces
from runtime.text.tokenizer import Tokenizer

# The roles whose text comes from outside the application: users and results of tools.
_OUTSIDERS = frozenset({"user", "tool", "function"})
# A mark consists of digits, because a template may change the case of letters. It has too many
# digits to be guessed.
_MARK_DIGITS = 24


class SplitTokens:
    """The tokens that a model's tokenizer and template treat as more than text.

    Attributes:
        tokenizer: the model's tokenizer.
        of_all: finds the special tokens, which messages may not contain.
        of_outsiders: also finds the other added tokens that the template writes, such as
            `<tool_response>`. Earlier answers of an assistant may contain these.
        ids: the ids of all these tokens, except the one for unknown characters.
    """

    def __init__(self, tokenizer: Tokenizer, written: str) -> None:
        """Find the tokens; `written` holds the template's own text constants."""
        added = tokenizer.backend.get_added_tokens_decoder()
        # A single character cannot be split.
        texts = {token.content: i for i, token in added.items() if len(token.content) > 1}
        special = {text for text, token_id in texts.items() if added[token_id].special}
        tags = {text for text in texts if text in written and text.strip()}
        self.tokenizer = tokenizer
        self.of_all = _TokenFinder(special)
        self.of_outsiders = _TokenFinder(special | tags)
        # Any text may become the token for unknown characters.
        unknown = tokenizer.encode("\U0010fffd", add_special_tokens=False)
        self.ids = frozenset(texts[text] for text in special | tags) - {*unknown}


class Marks:
    """The marks of one request."""

    def __init__(self, tokens: SplitTokens) -> None:
        """Draw a random number, which the request cannot contain."""
        self._tokens = tokens
        self._mark = "".join(secrets.choice("0123456789") for _ in range(_MARK_DIGITS))

    def put_into_messages(self, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Mark all texts in a template's messages except roles, which the server sets."""
        marked = []
        for message in messages:
            is_outside = message["role"] in _OUTSIDERS
            finder = self._tokens.of_outsiders if is_outside else self._tokens.of_all
            marked.append({**_marked(message, finder, self._mark), "role": message["role"]})
        return marked

    def put_into(self, value: Any) -> Any:
        """Return a copy of tools or variables whose texts and keys are marked."""
        return _marked(value, self._tokens.of_all, self._mark)

    def taken_from(self, text: str) -> str:
        """Return a rendered text without its marks."""
        return text.replace(self._mark, "")

    async def encode(self, text: str, limits: EngineLimits) -> list[int]:
        """Encode a rendered text without its marks.

        Raises:
            InvalidRequest: the tokenizer finds a special token that the template did not write,
                for instance because it also accepts another spelling.
            TooLong: more tokens than the context or the KV pool holds.
        """
        tokens = self._tokens
        ids = await encode_pieces(tokens.tokenizer, text.split(self._mark), limits)
        if sum(map(tokens.ids.__contains__, ids)) > tokens.of_outsiders.count(text):
            raise InvalidRequest(
                "The messages hold text that this model's tokenizer reads as a special token, "
                "which split_special_tokens does not allow.",
                param="messages",
            )
        return ids


class _TokenFinder:
    """Finds the beginnings of tokens in a text, in time proportional to its length."""

    def __init__(self, tokens: Collection[str]) -> None:
        self._prefixes = {token[:length] for token in tokens for length in range(1, len(token))}
        self._longest = max(map(len, tokens), default=0)
        # The look-ahead finds tokens that overlap, too.
        self._pattern = re.compile(f"(?={_either(tokens)})(.)", re.DOTALL) if tokens else None

    def count(self, text: str) -> int:
        return sum(1 for _ in self._pattern.finditer(text)) if self._pattern else 0

    def mark(self, text: str, mark: str) -> str:
        if self._pattern is None:
            return text
        # A text that ends with the beginning of a token could become one with the text after it.
        tail = max(len(text) - self._longest + 1, 0)
        ends = [at for at in range(tail, len(text)) if text[at:] in self._prefixes]
        for at in reversed(ends):
            text = f"{text[: at + 1]}{mark}{text[at + 1 :]}"
        return self._pattern.sub(rf"\g<1>{mark}", text)


def _marked(value: Any, finder: _TokenFinder, mark: str) -> Any:
    if isinstance(value, str):
        return finder.mark(value, mark)
    if isinstance(value, list):
        return [_marked(each, finder, mark) for each in value]
    if isinstance(value, dict):
        return {finder.mark(key, mark): _marked(each, finder, mark) for key, each in value.items()}
    return value


def _either(words: Iterable[str]) -> str:
    """Return a pattern of all words that reads each character of a text once.

    Plain alternatives would be tried one after another; some tokenizers have hundreds.
    """
    branches: dict[str, list[str]] = {}
    for word in words:
        branches.setdefault(word[:1], []).append(word[1:])
    ends_here = branches.pop("", None) is not None
    pattern = "|".join(
        re.escape(first) + _either(rests) for first, rests in sorted(branches.items())
    )
    return f"(?:{pattern})?" if ends_here else f"(?:{pattern})"
