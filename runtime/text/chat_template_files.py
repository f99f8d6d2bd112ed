"""Reads the chat templates in a tokenizer's folder: one, or several by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from runtime.checkpoint.json_file import read_json_object
from runtime.errors import StartupError


def read_chat_template(folder: Path, config: dict[str, Any]) -> str | dict[str, str] | None:
    """Return the chat templates of a folder, from the same files that `transformers` reads.

    Args:
        folder: folder of the tokenizer.
        config: the content of `tokenizer_config.json`.

    Returns:
        The source of one template, or several sources by name; `None` if there is none.

    Raises:
        StartupError: a file cannot be read.
    """
    jinja = folder / "chat_template.jinja"
    files = {"default": jinja} if jinja.is_file() else {}
    for path in sorted((folder / "additional_chat_templates").glob("*.jinja")):
        files[path.name.removesuffix(".jinja")] = path
    if files:
        # Template files replace all templates of the configuration, even if it has more of them.
        texts = {name: _read_template(path) for name, path in files.items()}
        return texts["default"] if list(texts) == ["default"] else texts
    for found in (
        _legacy(folder / "chat_template.json"),
        config.get("chat_template"),
    ):
        if isinstance(found, list):
            found = {entry["name"]: entry["template"] for entry in found}
        if isinstance(found, dict):
            found = {name: text for name, text in found.items() if isinstance(text, str)}
        if found and isinstance(found, str | dict):
            return found
    return None


def _read_template(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except ValueError as error:
        raise StartupError(f"{path} is not UTF-8 text: {error}") from error


def _legacy(path: Path) -> Any:
    return read_json_object(path).get("chat_template") if path.is_file() else None
