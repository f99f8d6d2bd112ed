"""The engine's options, as users of Ray give them: by name, in Python or on a command line."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Mapping
from typing import Any

from runtime.config.options import ServerConfig
from runtime.launch.command_line import parse_args


def read_options(keywords: Mapping[str, Any]) -> ServerConfig:
    """Make the server's configuration from options and from environment variables.

    Args:
        keywords: options such as `{"model_path": "demo-toy", "lora_paths": ["a=DIR"]}`.

    Raises:
        ValueError: an option is wrong; the message is the same as on the command line.
    """
    arguments = ["--enable-metrics"]
    for name, value in keywords.items():
        option = f"--{name.replace('_', '-')}"
        if value is True:
            arguments.append(option)
        elif isinstance(value, (list, tuple)):
            arguments += [option, *map(str, value)]
        elif value is not None and value is not False:
            arguments.append(f"{option}={value}")
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            return parse_args(arguments, prog="headrace.ray").config
    except SystemExit:
        raise ValueError(said.getvalue().strip()) from None


def value_of(text: str) -> Any:
    """Convert the text of an option to a number or a bool if possible, or else return the text."""
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text
