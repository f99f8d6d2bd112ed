"""The server's options as one flat dataclass, and as keyword arguments of `Engine`.

Names, types, defaults and help texts come from `runtime.config.options`.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from runtime.config.lora_options import LoraArgs
from runtime.config.media_options import MediaArgs
from runtime.config.options import (
    HttpArgs,
    KernelArgs,
    LoggingArgs,
    ModelArgs,
    ServerConfig,
)
from runtime.config.parallel_options import ParallelArgs
from runtime.config.scheduling_options import SchedulingArgs
from runtime.eventloop.body_errors import did_you_mean
from runtime.launch.command_line import add_options, option_name, sections
from runtime.launch.reference_flags import REFERENCE_FLAGS, REFERENCE_VALUES

# On a command line the values of these options are JSON text. Here objects are accepted too.
_JSON = frozenset({"preferred_sampling_params", "limit_mm_data_per_request"})


@dataclass(frozen=True, kw_only=True)
class ServerArgs(
    ModelArgs, HttpArgs, MediaArgs, SchedulingArgs, LoraArgs, ParallelArgs, KernelArgs, LoggingArgs
):
    """Every option of the server, as one field each, without sections."""

    # With None, an HTTP server streams the whole text so far, and an engine only new text.
    incremental_streaming_output: bool | None = None  # type: ignore[assignment]  # see above

    @staticmethod
    def add_cli_args(parser: argparse.ArgumentParser) -> None:
        """Add the server's options to `parser`."""
        add_options(parser)

    @classmethod
    def from_cli_args(cls, arguments: argparse.Namespace) -> ServerArgs:
        """Make the arguments from the namespace of a parser with the options of `add_cli_args`."""
        names = {field.name for field in dataclasses.fields(cls)}
        return cls(**{name: value for name, value in vars(arguments).items() if name in names})

    @classmethod
    def from_config(cls, config: ServerConfig) -> ServerArgs:
        """Make the arguments from a server configuration, which has sections."""
        flat: dict[str, Any] = {}
        for name, _ in sections():
            flat.update(dataclasses.asdict(getattr(config, name)))
        return cls(**flat)

    def to_config(self, *, incremental: bool) -> ServerConfig:
        """Convert the arguments to a server configuration with sections.

        `incremental` is the value of `incremental_streaming_output` if it is not set.
        """
        values = dataclasses.asdict(self)
        if values["incremental_streaming_output"] is None:
            values["incremental_streaming_output"] = incremental
        return ServerConfig(
            **{
                section: kind(**{field.name: values[field.name] for field in _fields(kind)})
                for section, kind in sections()
            }
        )


def _fields(kind: type[Any]) -> tuple[dataclasses.Field[Any], ...]:
    return dataclasses.fields(kind)


def read_keywords(keywords: Mapping[str, Any]) -> tuple[ServerArgs, list[str]]:
    """Check the keyword arguments of an engine and convert them to `ServerArgs`.

    Returns:
        The arguments, and notices about arguments of SGLang that have no effect here.

    Raises:
        TypeError: an unknown name.
        ValueError: a value of the wrong type or range, or an unsupported feature.
    """
    fields = {field.name: field for _, kind in sections() for field in _fields(kind)}
    names = {name: name for name in fields}
    for name, field in fields.items():
        names.update((_keyword(alias), name) for alias in field.metadata["aliases"])
    hints = typing.get_type_hints(ServerArgs)
    given: dict[str, Any] = {}
    ignored: list[str] = []
    for keyword, value in keywords.items():
        field_name = names.get(keyword)
        if field_name is None:
            _read_reference(keyword, value, list(names), ignored)
        elif isinstance(value, str) and _is_reference_value(fields[field_name], value):
            ignored.append(f"{keyword}={value!r}")
        else:
            given[field_name] = _read_value(fields[field_name], hints[field_name], value)
    verb = "has" if len(ignored) == 1 else "have"
    notices = [f"{', '.join(ignored)} {verb} no effect in this engine."] if ignored else []
    return ServerArgs(**given), notices


def _keyword(option: str) -> str:
    return option.removeprefix("--").replace("-", "_")


def _read_reference(keyword: str, value: Any, known: list[str], ignored: list[str]) -> None:
    flag = REFERENCE_FLAGS.get(option_name(keyword))
    if flag is None:
        hint = did_you_mean(keyword, known)
        raise TypeError(f"Engine() got an unexpected keyword argument {keyword!r}.{hint}")
    # These values request no feature; a program that passes all of SGLang's defaults contains them.
    if value is None or value is False or value in ("", [], {}):
        return
    if flag.takes_value and str(value).lower() in flag.neutral:
        return
    if flag.refusal is not None:
        raise ValueError(f"{keyword}={value!r}: {flag.refusal}.")
    ignored.append(keyword)


def _is_reference_value(field: dataclasses.Field[Any], value: str) -> bool:
    elsewhere = REFERENCE_VALUES.get(option_name(field.name), ())
    return value in elsewhere and value not in (field.metadata["choices"] or ())


def _read_value(field: dataclasses.Field[Any], hint: Any, value: Any) -> Any:
    if isinstance(value, os.PathLike):
        value = os.fspath(value)
    if field.name in _JSON and isinstance(value, dict):
        value = json.dumps(value)
    if field.name == "lora_paths":
        value = _adapters(value)
    try:
        checked = msgspec.convert(value, hint)
    except msgspec.ValidationError as error:
        raise ValueError(f"{field.name}: {error}") from None
    choices = field.metadata["choices"]
    named = checked if isinstance(checked, list) else [checked]
    if choices and checked is not None and not set(named) <= set(choices):
        raise ValueError(f"{field.name} must be one of {', '.join(choices)}, got {value!r}.")
    return checked


def _adapters(value: Any) -> Any:
    """Return `lora_paths` as on the command line; a dict from name to path becomes `name=path`s."""
    if isinstance(value, dict):
        return [f"{name}={os.fspath(path)}" for name, path in value.items()]
    if not isinstance(value, list | tuple):
        return value
    return [
        json.dumps(each) if isinstance(each, dict) else os.fspath(each)
        for each in value
        if isinstance(each, str | dict | os.PathLike)
    ]
