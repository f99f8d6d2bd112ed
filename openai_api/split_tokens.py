"""Special tokens in the texts of a chat as text: they are spelled, and end no turn.

A rendered prompt does not tell who wrote its `<|im_end|>`: the template, or somebody in a message.
So the request's texts are marked before they are rendered: behind the first character of each
special token a random number is put. The tokenizer gets the rendered text in pieces, cut at the
marks, and finds no such token in a piece but those that the template wrote.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Collection, Iterable
from typing import Any

from runtime.client.admission import EngineLimits
from runtime.client.tokenization import encode_pieces
from runtime.errors import InvalidRequest
from runtime.text.tokenizer import Tokenizer

# Whose words are not the application's: a user's, and what a tool read somewhere.
_OUTSIDERS = frozenset({"user", "tool", "function"})
# Digits, because a template may change the case; so many that nobody guesses them.
_MARK_DIGITS = 24


class SplitTokens:
    """What a model's tokenizer and template take for more than text.

    Attributes:
        tokenizer: of the model.
        of_all: finds the special tokens, which no message may hold.
        of_outsiders: finds also the other added tokens that the template writes, such as
            `<tool_response>`. What an assistant answered earlier holds them rightly.
        ids: of all these tokens but the one for unknown characters.
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
        # Any text may become the token for what is unknown.
        unknown = tokenizer.encode("\U0010fffd", add_special_tokens=False)
        self.ids = frozenset(texts[text] for text in special | tags) - {*unknown}


class Marks:
    """The marks of one request."""

    def __init__(self, tokens: SplitTokens) -> None:
        """Draw a number that nobody can have written into the request."""
        self._tokens = tokens
        self._mark = "".join(secrets.choice("0123456789") for _ in range(_MARK_DIGITS))

    def put_into_messages(self, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Messages as the template reads them, marked; their roles are the server's words."""
        marked = []
        for message in messages:
            is_outside = message["role"] in _OUTSIDERS
            finder = self._tokens.of_outsiders if is_outside else self._tokens.of_all
            marked.append({**_marked(message, finder, self._mark), "role": message["role"]})
        return marked

    def put_into(self, value: Any) -> Any:
        """A copy of tools or variables whose texts and keys are marked."""
        return _marked(value, self._tokens.of_all, self._mark)

    def taken_from(self, text: str) -> str:
        """A rendered text as it is without marks."""
        return text.replace(self._mark, "")

    async def encode(self, text: str, limits: EngineLimits) -> list[int]:
        """Token ids of a rendered text, whose marks are left out.

        Raises:
            InvalidRequest: the tokenizer finds a special token that the template did not write,
                for instance because it takes another spelling for the same.
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
    """Finds the beginnings of tokens in a text, in a time that grows with its length alone."""

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
        # What ends in the beginning of a token could become one with the text behind it.
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
    """A pattern of all words that looks at each character of a text once.

    Plain alternatives would be tried one after the other; some tokenizers have hundreds.
    """
    branches: dict[str, list[str]] = {}
    for word in words:
        branches.setdefault(word[:1], []).append(word[1:])
    ends_here = branches.pop("", None) is not None
    pattern = "|".join(
        re.escape(first) + _either(rests) for first, rests in sorted(branches.items())
    )
    return f"(?:{pattern})?" if ends_here else f"(?:{pattern})"
