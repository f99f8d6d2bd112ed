"""Functions that the back ends of APIs share, for messages, choices and whole turns."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from headrace.lang.backend.base import Message, Prompt, TurnPart

_CHOICE = "choice"
_SPACE = r"\s*"


def open_text(s: Prompt, backend: str) -> str:
    """Return the text of the open assistant turn so far.

    Raises:
        RuntimeError: no assistant turn is open; a chat model can generate only in such a turn.
    """
    if s.cur_role != "assistant":
        raise RuntimeError(
            f"{backend} answers messages: a generation must be in a turn of the assistant, as in "
            "s += assistant(gen('answer'))."
        )
    return s.text_[s.cur_role_begin_pos :]


def check_nothing_before(s: Prompt, backend: str) -> None:
    """Check that a generation is at the beginning of an assistant turn.

    Raises:
        RuntimeError: the turn has text before the generation.
    """
    if open_text(s, backend).strip():
        raise RuntimeError(
            f"{backend} cannot continue an answer: a generation must come right after the turn of "
            "the assistant begins. With @function(num_api_spec_tokens=...) a turn may mix text and "
            "generations that have a stop."
        )


def choice_schema(choices: Sequence[str]) -> dict[str, Any]:
    """Return the JSON schema of an object whose only value is one of `choices`."""
    # Duplicates are removed, because some APIs refuse them.
    options = list(dict.fromkeys(choices))
    return {
        "type": "object",
        "properties": {_CHOICE: {"type": "string", "enum": options}},
        "required": [_CHOICE],
        "additionalProperties": False,
    }


def choice_messages(s: Prompt, choices: Sequence[str], backend: str) -> list[Message]:
    """Return the program's messages, and a user message that asks which of `choices` comes next."""
    text = open_text(s, backend)
    begun = f"Your answer begins with {json.dumps(text, ensure_ascii=False)}. " if text else ""
    listed = json.dumps(list(dict.fromkeys(choices)), ensure_ascii=False)
    question = f"{begun}Which one of these texts comes next? {listed}"
    return with_question(s.messages_, question)


def with_question(messages: Sequence[Message], question: str) -> list[Message]:
    """Return `messages` with `question` at the end, as a user message.

    If the last message is the user's, the question is added to this message.
    """
    copied = list(messages)
    if copied and copied[-1]["role"] == "user" and isinstance(copied[-1]["content"], str):
        last = copied.pop()
        question = f"{last['content']}\n\n{question}"
    return [*copied, {"role": "user", "content": question}]


def chosen(answer: str, choices: Sequence[str]) -> str:
    """Return the choice in an answer that follows `choice_schema`.

    Raises:
        ValueError: the answer contains none of the choices.
    """
    try:
        found = json.loads(answer)[_CHOICE]
    except (ValueError, LookupError, TypeError):
        found = None
    if found not in choices:
        raise ValueError(f"The model chose none of {list(choices)}: {answer[:200]!r}.")
    return str(found)


def is_closed_object(schema: Any) -> bool:
    """Whether a schema refuses keys that it does not name, as the strict modes of APIs require."""
    return isinstance(schema, dict) and schema.get("additionalProperties") is False


def split_turn(text: str, parts: Sequence[TurnPart]) -> list[str] | None:
    """Find the texts of a turn's generations in one text of the whole turn.

    Each generation ends where the constant after it begins, or at one of its stop strings.

    Returns:
        The generated texts in order, or `None` if the text does not contain all constants of the
        turn in order.
    """
    pattern = _SPACE
    for part, following in zip(parts, [*parts[1:], None], strict=True):
        if part.sampling_params is None:
            constant = part.text or ""
            # The model's white space at the start of the turn may differ from the constant's.
            pattern += re.escape(constant.lstrip() if pattern == _SPACE else constant)
            continue
        stops = [re.escape(stop) for stop in part.sampling_params.stops]
        if following is None:
            pattern += f"(.*?)(?:{'|'.join([*stops, r'$'])})" if stops else "(.*)"
        else:
            # The next constant may begin with the stop string itself.
            pattern += f"(.*?)(?={'|'.join(stops)})" if stops else "(.*?)"
    found = re.match(pattern, text, re.DOTALL)
    return None if found is None else list(found.groups())
