"""gpt-oss: a call is a harmony message to `functions.NAME`, in the commentary channel as a rule."""

from __future__ import annotations

import re

from openai_api.parser_signs import Signs
from openai_api.tool_parsers.json_calls import JsonCalls

START = "<|start|>"
CHANNEL = "<|channel|>"
CONSTRAIN = "<|constrain|>"
MESSAGE = "<|message|>"
END = "<|end|>"
CALL = "<|call|>"
RETURN = "<|return|>"
RECIPIENT = "to="


class GptOssParser(JsonCalls):
    """The recipient stands before the channel or behind it; what tells the type is skipped."""

    markers = (START, CHANNEL, MESSAGE, CALL)
    signs = Signs(template=(f"{CHANNEL}commentary", "functions.", MESSAGE, CALL))
    opens = (START, CHANNEL)
    header = re.compile(
        rf"[^{{}}]*?\bto=functions\.(?P<name>[\w.\-]+)[^{{}}]*?{re.escape(MESSAGE)}", re.ASCII
    )
    header_end = MESSAGE
    tails = (CALL, END, RETURN)
