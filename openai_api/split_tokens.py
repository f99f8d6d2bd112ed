"""Keeps special tokens in a chat's messages as plain text, so that a message cannot end its turn.

A rendered prompt does not show whether the template or a message wrote an `<|im_end|>`. So the
request's texts are marked before rendering: a random number is inserted after the first character
of each special token. The rendered text is cut at these numbers, and the tokenizer encodes the
pieces one by one. So it finds only the special tokens that the template wrote.
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

# Roles whose texts come from outside the application: users, and results of tools.
_OUTSIDERS = frozenset({"user", "tool", "function"})
# Digits of the random number. It consists of digits because a template may change the case of
# letters. It is too long to be guessed.
_MARK_DIGITS = 24


class SplitTokens:
    """The tokens that messages must not contain, for one model.

    Attributes:
        tokenizer: the model's tokenizer.
        of_all: finds the special tokens.
        of_outsiders: also finds the other added tokens that the template writes, such as
            `<tool_response>`. Earlier answers of an assistant may contain these.
        ids: the ids of all these tokens, except the one for unknown characters.
    """

    def __init__(self, tokenizer: Tokenizer, written: str) -> None:
        """Find these tokens; `written` has all text constants of the chat template."""
        added = tokenizer.backend.get_added_tokens_decoder()
        # A token of a single character is left out, because it cannot be split.
        texts = {token.content: i for i, token in added.items() if len(token.content) > 1}
        special = {text for text, token_id in texts.items() if added[token_id].special}
        tags = {text for text in texts if text in written and text.strip()}
        self.tokenizer = tokenizer
        self.of_all = _TokenFinder(special)
        self.of_outsiders = _TokenFinder(special | tags)
        # The id for unknown characters may come from any text, so it is not counted.
        unknown = tokenizer.encode("\U0010fffd", add_special_tokens=False)
        self.ids = frozenset(texts[text] for text in special | tags) - {*unknown}


class Marks:
    """Marks the texts of one request with a random number, and removes it again."""

    def __init__(self, tokens: SplitTokens) -> None:
        """Draw the random number, which the request cannot contain."""
        self._tokens = tokens
        self._mark = "".join(secrets.choice("0123456789") for _ in range(_MARK_DIGITS))

    def put_into_messages(self, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return a template's messages with all texts marked, except roles, which are checked."""
        marked = []
        for message in messages:
            is_outside = message["role"] in _OUTSIDERS
            finder = self._tokens.of_outsiders if is_outside else self._tokens.of_all
            marked.append({**_marked(message, finder, self._mark), "role": message["role"]})
        return marked

    def put_into(self, value: Any) -> Any:
        """Return a copy of tools or variables with all texts and keys marked."""
        return _marked(value, self._tokens.of_all, self._mark)

    def taken_from(self, text: str) -> str:
        """Return a rendered text without the random numbers."""
        return text.replace(self._mark, "")

    async def encode(self, text: str, limits: EngineLimits) -> list[int]:
        """Encode a rendered text, cut at the random numbers.

        Raises:
            InvalidRequest: the tokenizer found a special token that the template did not write,
                for instance because it also accepts another spelling.
            TooLong: there are more tokens than the context or the KV pool holds.
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
        # With a look-ahead, tokens that overlap are found too.
        self._pattern = re.compile(f"(?={_either(tokens)})(.)", re.DOTALL) if tokens else None

    def count(self, text: str) -> int:
        return sum(1 for _ in self._pattern.finditer(text)) if self._pattern else 0

    def mark(self, text: str, mark: str) -> str:
        if self._pattern is None:
            return text
        # A text may end with the beginning of a token, which the text after it could complete.
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
    """Return a regex that matches any of `words` and reads each character of a text once.

    A plain list of alternatives would try one word after the other, and some tokenizers have
    hundreds.
    """
    branches: dict[str, list[str]] = {}
    for word in words:
        branches.setdefault(word[:1], []).append(word[1:])
    ends_here = branches.pop("", None) is not None
    pattern = "|".join(
        re.escape(first) + _either(rests) for first, rests in sorted(branches.items())
    )
    return f"(?:{pattern})?" if ends_here else f"(?:{pattern})"
