"""Prompts that an embedder was trained with, put ahead of a text. Front-safe.

sentence-transformers writes them to a file of its own beside the model.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from runtime.checkpoint.json_file import Keys, read_json_object

FILE = "config_sentence_transformers.json"


@dataclass(frozen=True)
class TextPrompts:
    """What stands ahead of a text.

    Attributes:
        by_name: the model's prompts, such as `query` and `document`; texts to be put before.
        default: name of the one that holds where a request names none; empty for no prompt.
    """

    by_name: Mapping[str, str] = field(default_factory=dict)
    default: str = ""


def read_prompts(folder: Path) -> TextPrompts:
    """Read the prompts of a model folder; there are none without the file.

    Raises:
        StartupError: a prompt that is not a text, or a default that is not among them; one line.
    """
    path = folder / FILE
    if not path.is_file():
        return TextPrompts()
    keys = Keys(str(path), read_json_object(path))
    prompts = {name: text or "" for name, text in keys.mapping("prompts").items()}
    if not all(isinstance(text, str) for text in prompts.values()):
        raise keys.error("prompts", "a text for each name")
    default = keys.values.get("default_prompt_name") or ""
    if not isinstance(default, str) or (default and default not in prompts):
        raise keys.error("default_prompt_name", f"one of {', '.join(prompts) or 'no prompts'}")
    return TextPrompts(prompts, default)
