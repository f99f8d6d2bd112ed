"""Decodes a large JSON body: counts its values first, then decodes its long lists in pieces.

The decoder holds the GIL for about fifty nanoseconds for each number. Even on another thread, a
list of eight million token ids would block the event loop for half a second. So this code runs on a
thread, and each call of the decoder gets only a piece of a list.
"""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, cast

import msgspec

from runtime.eventloop.body_errors import InvalidBody, not_json

Body = bytes | bytearray

# Bytes that the decoder gets at a time; they take up to ten milliseconds.
PIECE_BYTES = 256 * 1024
# The most numbers of a request: token ids of its prompts, or values of embeddings.
MAX_NUMBERS = 2**23
# The most strings, lists and objects of a request.
MAX_PARTS = 2**22
# The most bytes of one string, unless it is ASCII without escapes. Other strings are converted
# character by character.
MAX_TEXT_BYTES = 2**23
# The most fields of the body.
MAX_MEMBERS = 1024
# The most items of a list: of numbers or strings; and of lists or objects, which the garbage
# collector visits.
MAX_ITEMS = 2**20
MAX_NESTED_ITEMS = 2**18
# The largest size of a value that cannot be divided, because it is not in a list field. The size is
# the number of its numbers plus four for each string, list and object in it.
MAX_UNDIVIDED = 2**20
# Bytes that one call of a regular expression scans.
WINDOW = 64 * 1024

_KEY = msgspec.json.Decoder(str)
_BLANK = re.compile(rb"[ \t\r\n]*+")
_IN_STRING = re.compile(rb'(?:[^"\\]++|\\.)*+', re.DOTALL)
_STRING = rb'"(?:[^"\\]++|\\.)*+"'
_FLAT = rb'(?:[^"\[\]{}]++|' + _STRING + rb")*+"
_SMALL = rb"(?:" + _STRING + rb"|\[" + _FLAT + rb"\]|\{" + _FLAT + rb"\})"
# Matches the content of a list or an object, up to a part that is deeply nested or large.
_CONTENT = re.compile(rb'(?:[^"\[\]{}]++|' + _SMALL + rb")*+", re.DOTALL)
# Matches items of a list, each with the comma after it.
_ITEMS = re.compile(rb'(?:[^"\[\]{},]*+(?:' + _SMALL + rb'[^"\[\]{},]*+)?+,)*+', re.DOTALL)
# Matches the rest of a number or a word.
_WORD = re.compile(rb'[^"\[\]{},]*+')
_SCALAR = re.compile(rb'[ \t\r\n]*+[^"\[\]{}, \t\r\n]*+')


def split_lists(
    body: Body, struct: Any, piece_bytes: int = PIECE_BYTES, window: int = WINDOW
) -> tuple[Body, dict[str, list[Any]]]:
    """Take the long lists out of a large body, and decode them; call this on a thread.

    Args:
        body: the body of a request.
        struct: the type that the body will be decoded into.
        piece_bytes: bytes that its decoder gets at a time.
        window: bytes that one call of a regular expression scans.

    Returns:
        The body with empty lists in place of the long ones, and the decoded items of the long
        lists, by attribute of `struct`.

    Raises:
        InvalidBody: the body is not JSON, or has more numbers, strings, lists and objects than a
            request may have.
    """
    if len(body) <= piece_bytes:
        return body, {}
    decoders = _list_decoders(cast("Hashable", struct))
    scan = _Scan(body, piece_bytes, window)
    rest: list[Body] = []
    lists: dict[str, list[Any]] = {}
    copied = 0
    for value in list(scan.members()):
        field = decoders.get(value.key)
        if field is None or body[value.begin] != ord("[") or value.size <= piece_bytes // 4:
            value.check_undivided()
            continue
        rest += (body[copied : value.begin], b"[]")
        copied = value.end
        lists[field.attribute] = scan.divided(value, field)
    rest.append(body[copied:])
    return b"".join(rest), lists


@dataclass(frozen=True)
class _ListField:
    """A field of a struct whose value may be a list, with a decoder for that value."""

    attribute: str
    decoder: msgspec.json.Decoder[Any]


_ANY = _ListField("", msgspec.json.Decoder())


@lru_cache(maxsize=64)
def _list_decoders(struct: Any) -> dict[str, _ListField]:
    if not isinstance(struct, type) or not issubclass(struct, msgspec.Struct):
        return {}
    found = {}
    for field in msgspec.structs.fields(struct):
        decoder: msgspec.json.Decoder[Any] = msgspec.json.Decoder(field.type)
        try:
            is_list = isinstance(decoder.decode(b"[]"), list)
        except msgspec.ValidationError:
            continue
        if is_list:
            found[field.encode_name] = _ListField(field.name, decoder)
    return found


@dataclass
class _Value:
    """A member of the body's object: its key, its position, and how many values it has."""

    key: str
    begin: int
    end: int = 0
    num_numbers: int = 0
    num_parts: int = 0

    @property
    def size(self) -> int:
        return self.end - self.begin

    def check_undivided(self) -> None:
        if self.num_numbers + 4 * self.num_parts > MAX_UNDIVIDED:
            raise InvalidBody(
                f"{self.key[:64]} is too large: {self.num_numbers} values and {self.num_parts} "
                "strings, lists and objects.",
                param=self.key,
            )


class _Scan:
    """Scans JSON without decoding it. The decoder checks later what the scan does not."""

    def __init__(self, body: Body, piece_bytes: int, window: int) -> None:
        self._body = body
        self._piece_bytes = piece_bytes
        self._window = window
        self._num_numbers = 0
        self._num_parts = 0

    def members(self, begin: int = 0) -> Iterator[_Value]:
        """Yield the members of the object at `begin`, each with the counts of its values."""
        at = self._expect(self._blank(begin), b"{")
        if self._peek(self._blank(at)) == b"}":
            return
        seen: set[str] = set()
        while True:
            at = self._blank(at)
            end = self._string(at)
            try:
                key = _KEY.decode(self._body[at:end])
            except UnicodeDecodeError:
                raise InvalidBody("The JSON body is not valid UTF-8.") from None
            except msgspec.DecodeError:
                raise _not_json(at) from None
            if key in seen:
                raise InvalidBody(f"The key {key[:64]!r} appears twice in one JSON object.")
            seen.add(key)
            if len(seen) > MAX_MEMBERS:
                raise InvalidBody(f"The body may have at most {MAX_MEMBERS} fields.")
            value = _Value(key, self._blank(self._expect(self._blank(end), b":")))
            before = self._num_numbers, self._num_parts
            value.end = self._value(value.begin)
            value.num_numbers = self._num_numbers - before[0]
            value.num_parts = self._num_parts - before[1]
            yield value
            at = self._blank(value.end)
            if self._peek(at) == b"}":
                return
            at = self._expect(at, b",")

    def divided(self, value: _Value, field: _ListField, depth: int = 1) -> list[Any]:
        """Return the items of a list, decoded in pieces.

        Args:
            value: the list; of a nested list only `begin` and `key` are used.
            field: the field that has the list, whose decoder is used.
            depth: 1 for the field's own list, 2 for a list inside it.
        """
        body = self._body
        items: list[Any] = []
        # `begin`: where the part begins that is not decoded yet. `behind_comma`: after the last
        # whole item of that part. `at`: where the scan has come to.
        begin = behind_comma = at = value.begin + 1
        while True:
            after = self._match(_ITEMS, at)
            if after > at:
                behind_comma = at = after
            if behind_comma - begin > self._piece_bytes // 2:
                items += self._decode(value, field, body[begin : behind_comma - 1], depth)
                begin = behind_comma
                _check_num_items(value.key, items)
            end = self._match(_WORD, at)
            sign = self._peek(end)
            if sign == b"]":
                rest = body[begin:end]
                if begin > value.begin + 1 and not rest.strip():
                    # The list ends with a comma, which is not JSON.
                    raise _not_json(end)
                items += self._decode(value, field, rest, depth)
                return items
            if sign == b",":
                behind_comma = at = end + 1
                continue
            item = self._item(value.key, end)
            at = self._blank(item.end)
            if sign in (b"[", b"{") and item.size > self._piece_bytes:
                items += self._decode(value, field, self._without_comma(begin, end), depth)
                divide = self.divided if sign == b"[" else self._divided_object
                items.append(divide(item, field, depth + 1))
                if self._peek(at) == b"]":
                    return items
                begin = behind_comma = at = self._expect(at, b",")
            elif item.size > self._piece_bytes:
                item.check_undivided()

    def _divided_object(self, item: _Value, field: _ListField, depth: int) -> Any:
        """Return an object that is in a list; its own long lists are decoded in pieces."""
        body = self._body
        self._num_numbers = self._num_parts = 0
        long = [
            value
            for value in self.members(item.begin)
            if body[value.begin] == ord("[") and value.size > self._piece_bytes // 4
        ]
        rest: list[Body] = []
        copied = item.begin
        for value in long:
            rest += (body[copied : value.begin], b"[]")
            copied = value.end
        rest.append(body[copied : item.end])
        item.num_numbers -= sum(value.num_numbers for value in long)
        item.num_parts -= sum(value.num_parts for value in long)
        item.check_undivided()
        (decoded,) = self._decode(item, field, b"".join(rest), depth - 1)
        if isinstance(decoded, dict):
            if long and not self._takes_anything(field, depth - 1):
                # The object is decoded whole, because the type of its lists' items is known only
                # to the decoder of the whole type.
                return self._decode(item, field, body[item.begin : item.end], depth - 1)[0]
            decoded |= {value.key: self.divided(value, _ANY) for value in long}
            return decoded
        decoders = _list_decoders(cast("Hashable", type(decoded)))
        for value in long:
            inner = decoders.get(value.key)
            items = self.divided(value, inner or _ANY)
            # The items of an unknown field are dropped; they were decoded to check the JSON.
            if inner is not None:
                msgspec.structs.force_setattr(decoded, inner.attribute, items)
        return decoded

    @staticmethod
    def _takes_anything(field: _ListField, depth: int) -> bool:
        """Whether the objects in the field's list may contain lists of any type."""
        try:
            field.decoder.decode(b"[" * depth + b'{"":[null,{},"",0.5]}' + b"]" * depth)
        except msgspec.ValidationError:
            return False
        return True

    def _item(self, key: str, begin: int) -> _Value:
        self._num_numbers = self._num_parts = 0
        end = self._value(begin)
        return _Value(key, begin, end, self._num_numbers, self._num_parts)

    def _without_comma(self, begin: int, end: int) -> Body:
        before = self._body[begin:end].rstrip()
        if before and (not before.endswith(b",") or not before[:-1].strip()):
            raise _not_json(end)
        return before[:-1]

    def _decode(self, value: _Value, field: _ListField, text: Body, depth: int) -> list[Any]:
        try:
            items = field.decoder.decode(b"[" * depth + text + b"]" * depth)
        except msgspec.ValidationError as error:
            # The position in the message is left out, because it counts from this piece.
            reason = str(error).rpartition(" - at `")[0] or str(error)
            raise InvalidBody(f"{reason} - at `$.{value.key}[...]`", param=value.key) from None
        except UnicodeDecodeError:
            raise InvalidBody("The JSON body is not valid UTF-8.") from None
        except RecursionError:
            raise InvalidBody("The JSON body is nested too deeply.") from None
        except (msgspec.DecodeError, ValueError) as error:
            raise not_json(str(error)) from None
        for _ in range(depth - 1):
            (items,) = items
        return list(items)

    # ---- scanning ----

    def _value(self, begin: int) -> int:
        """Return the end of the value that begins at `begin`; count the values in it."""
        body = self._body
        if self._peek(begin) not in (b'"', b"[", b"{"):
            end = self._match(_SCALAR, begin)
            if end == begin or end - begin >= self._window:
                raise _not_json(begin)
            self._count(1, 0)
            return end
        at, depth = begin, 0
        while True:
            end = self._match(_CONTENT, at) if depth else at
            # Commas inside strings are counted too, so the number is an upper bound.
            self._count(body.count(b",", at, end), _num_parts(body, at, end))
            sign = self._peek(end)
            if sign == b'"':
                at = self._string(end)
            elif sign in (b"[", b"{"):
                self._count(1, 1)
                depth += 1
                at = end + 1
            elif sign in (b"]", b"}") and depth:
                depth -= 1
                at = end + 1
            elif end > at:
                # The window ended inside the value; the next one begins here.
                at = end
                continue
            else:
                raise _not_json(end)
            if not depth:
                return at

    def _string(self, begin: int) -> int:
        at = self._expect(begin, b'"')
        self._count(0, 1)
        is_plain = True
        while True:
            end = self._match(_IN_STRING, at)
            text = self._body[at:end]
            is_plain = is_plain and text.isascii() and b"\\" not in text
            if end - begin > MAX_TEXT_BYTES and not is_plain:
                raise InvalidBody(
                    f"A text may have at most {MAX_TEXT_BYTES} bytes in the request's JSON."
                )
            if self._peek(end) == b'"':
                return end + 1
            if end == at:
                raise _not_json(at)
            at = end

    def _match(self, pattern: re.Pattern[bytes], begin: int) -> int:
        match = pattern.match(self._body, begin, begin + self._window)
        return match.end() if match else begin

    def _blank(self, at: int) -> int:
        return self._match(_BLANK, at)

    def _peek(self, at: int) -> Body:
        return self._body[at : at + 1]

    def _expect(self, at: int, sign: bytes) -> int:
        if self._peek(at) != sign:
            raise _not_json(at)
        return at + 1

    def _count(self, num_numbers: int, num_parts: int) -> None:
        self._num_numbers += num_numbers
        self._num_parts += num_parts
        if self._num_numbers > MAX_NUMBERS or self._num_parts > MAX_PARTS:
            raise InvalidBody(
                f"A request may hold at most {MAX_NUMBERS} numbers and {MAX_PARTS} strings, lists "
                "and objects: send several requests."
            )


def _check_num_items(key: str, items: list[Any]) -> None:
    most = MAX_NESTED_ITEMS if isinstance(items[-1], list | dict) else MAX_ITEMS
    if len(items) > most:
        raise InvalidBody(f"A list of {key} may have at most {most} items.", param=key)


def _num_parts(body: Body, begin: int, end: int) -> int:
    """Return the number of strings, lists and objects between two positions."""
    count = body.count
    return count(b'"', begin, end) // 2 + count(b"[", begin, end) + count(b"{", begin, end)


def _not_json(at: int) -> InvalidBody:
    return not_json(f"malformed at byte {at}")
