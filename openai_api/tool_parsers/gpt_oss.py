"""Parser of gpt-oss's tool calls: messages to `functions.NAME`, usually in channel commentary."""

from __future__ import annotations

import re

from openai_api.parser_signs import Signs
from openai_api.tool_parsers.json_calls import JsonCalls
from openai_api.tool_parsers.tool_parser import CallForm

START = "<|start|>"
CHANNEL = "<|channel|>"
CONSTRAIN = "<|constrain|>"
MESSAGE = "<|message|>"
END = "<|end|>"
CALL = "<|call|>"
RETURN = "<|return|>"
RECIPIENT = "to="
_FUNCTION = f"{RECIPIENT}functions."
# The rest of a header: the channel, if it comes after the recipient, and the content type.
_HEADER_END = (
    rf"( ?{re.escape(CHANNEL)}(commentary|analysis))?"
    rf"( ?{re.escape(CONSTRAIN)}(json|code)| json| code)?{re.escape(MESSAGE)}"
)


class GptOssParser(JsonCalls):
    """Reads headers with the recipient before or after the channel; ignores the content type."""

    markers = (START, CHANNEL, MESSAGE, CALL, END, RETURN)
    signs = Signs(template=(f"{CHANNEL}commentary", "functions.", MESSAGE, CALL))
    # A call cannot stand alone, because headers of other messages also begin like that of a call.
    call_form = CallForm(_FUNCTION, lambda name: name, "", between=_HEADER_END, stands_alone=False)
    opens = (START, CHANNEL)
    header = re.compile(
        rf"[^{{}}]*?\bto=functions\.(?P<name>[\w.\-]+)[^{{}}]*?{re.escape(MESSAGE)}", re.ASCII
    )
    header_end = MESSAGE
    tails = (CALL, END, RETURN)
