"""The supported values of `format` in JSON schemas. Others are ignored, as JSON Schema allows.

Most are defined by patterns here, so that all grammar libraries agree. The others are defined by
the libraries themselves.
"""

from __future__ import annotations

from typing import NamedTuple


class StringFormat(NamedTuple):
    """The definition of a string format.

    Attributes:
        pattern: a regular expression that matches each whole text of the format; empty if the
            libraries define the format.
        shortest: length of the shortest text, in characters.
        longest: length of the longest text; `None` for no limit.
    """

    pattern: str
    shortest: int
    longest: int | None


# The year 0000 is excluded, because common parsers of dates refuse it.
_YEAR = r"(?:[1-9][0-9]{3}|0[1-9][0-9]{2}|00[1-9][0-9]|000[1-9])"
_LEAP = r"(?:(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26]))|(?:(?:0[48]|[2468][048]|[13579][26])00))"
_DATE = (
    rf"(?:{_YEAR}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])"
    r"|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)|02-(?:0[1-9]|1[0-9]|2[0-8]))"
    rf"|{_LEAP}-02-29)"
)
_TIME = (
    r"(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\.[0-9]+)?"
    r"(?:Z|[+\-](?:[01][0-9]|2[0-3]):[0-5][0-9])"
)
_LABEL = r"[a-zA-Z0-9](?:[a-zA-Z0-9\-]{0,61}[a-zA-Z0-9])?"
_HOST = rf"{_LABEL}(?:\.{_LABEL})*"
_ATOM = r"[a-zA-Z0-9!#$%&'*+/=?\^_`{|}~\-]+"
_BYTE = r"(?:25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9]?[0-9])"
# Quotes and backslashes are excluded, because one library does not support them in patterns.
_POINTER = "(?:/(?:[ !#-.0-\\[\\]-}\u0080-\ud7fb\ue000-\U0010ffff]|~[01])*)*"

FORMATS = {
    "date": StringFormat(_DATE, 10, 10),
    "date-time": StringFormat(f"{_DATE}T{_TIME}", 20, None),
    "duration": StringFormat("", 3, None),
    "email": StringFormat(rf"{_ATOM}(?:\.{_ATOM})*@{_HOST}", 3, None),
    "hostname": StringFormat(_HOST, 1, None),
    "ipv4": StringFormat(rf"{_BYTE}(?:\.{_BYTE}){{3}}", 7, 15),
    "ipv6": StringFormat("", 2, 45),
    "json-pointer": StringFormat(_POINTER, 0, None),
    "relative-json-pointer": StringFormat(rf"(?:0|[1-9][0-9]*)(?:#|{_POINTER})", 1, None),
    "time": StringFormat(_TIME, 9, None),
    "uri": StringFormat("", 2, None),
    "uuid": StringFormat(
        r"[0-9a-fA-F]{8}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{12}", 36, 36
    ),
}
