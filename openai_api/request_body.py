"""Decodes a request's JSON body to typed fields."""

from __future__ import annotations

import re
from typing import TypeVar

import msgspec

from openai_api.call import Call
from runtime.eventloop.body_errors import InvalidBody
from runtime.eventloop.json_body import read_json

T = TypeVar("T")

_MISSING = re.compile(r"missing required field `(\w+)`")


async def read_body(call: Call, decoder: msgspec.json.Decoder[T]) -> T:
    """Decode the body of a request.

    Raises:
        InvalidRequest: the body is not JSON, or a field is missing or has the wrong type; the
            message names the field.
    """
    try:
        return await read_json(call.body, decoder)
    except InvalidBody as error:
        missing = _MISSING.search(error.message)
        if error.param is None and missing is not None:
            error.param = missing[1]
        raise
