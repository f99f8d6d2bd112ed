"""gpt-oss: a call is a harmony message to `functions.NAME`, usually in the commentary channel."""

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
# The channel, where it comes after the recipient, and the content type.
_HEADER_END = (
    rf"( ?{re.escape(CHANNEL)}(commentary|analysis))?"
    rf"( ?{re.escape(CONSTRAIN)}(json|code)| json| code)?{re.escape(MESSAGE)}"
)


class GptOssParser(JsonCalls):
    """The recipient comes before or after the channel; the content type is skipped."""

    markers = (START, CHANNEL, MESSAGE, CALL, END, RETURN)
    signs = Signs(template=(f"{CHANNEL}commentary", "functions.", MESSAGE, CALL))
    # Headers of other messages also begin with the text before the recipient.
    call_form = CallForm(_FUNCTION, lambda name: name, "", between=_HEADER_END, stands_alone=False)
    opens = (START, CHANNEL)
    header = re.compile(
        rf"[^{{}}]*?\bto=functions\.(?P<name>[\w.\-]+)[^{{}}]*?{re.escape(MESSAGE)}", re.ASCII
    )
    header_end = MESSAGE
    tails = (CALL, END, RETURN)
