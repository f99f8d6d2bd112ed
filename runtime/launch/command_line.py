"""The command line, generated from the configuration's fields; the environment is read here only.

A field `max_total_tokens: int | None` of a section becomes `--max-total-tokens N` in that section's
group of `--help`; nothing is declared twice.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import os
import re
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from runtime.config.options import ServerConfig
from runtime.launch.reference_flags import REFERENCE_FLAGS, REFERENCE_VALUES

# Keys given through the environment do not show in the machine's process list.
ENVIRONMENT: dict[str, tuple[str, str]] = {
    "HEADRACE_API_KEY": ("http", "api_key"),
    "HEADRACE_ADMIN_API_KEY": ("http", "admin_api_key"),
    "HEADRACE_SSL_KEYFILE_PASSWORD": ("http", "ssl_keyfile_password"),
    "HEADRACE_DIST_KEY": ("parallel", "dist_key"),
    "HEADRACE_ALLOW_OPEN_ADMIN": ("http", "allow_open_admin"),
    "DISABLE_OPENAPI_DOC": ("http", "disable_docs"),
    # Set by Vertex AI in the containers that it starts.
    "AIP_PREDICT_ROUTE": ("http", "vertex_route"),
    "SGLANG_TORCH_PROFILER_DIR": ("logging", "torch_profiler_dir"),
}

# Variables for options that would show in the process list. With the suffix `_FILE`, a variable
# names a file that has the value.
SECRETS = (
    "HEADRACE_API_KEY",
    "HEADRACE_ADMIN_API_KEY",
    "HEADRACE_SSL_KEYFILE_PASSWORD",
    "HEADRACE_DIST_KEY",
)

# Variables that are on or off.
_SWITCHES = frozenset({"allow_open_admin", "disable_docs"})

_INT = re.compile(r"([+-]?\d+(?:\.\d+)?)([kKmMgG]?)")
# As in vLLM and SGLang: small letters are decimal, capitals binary.
_INT_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "K": 2**10, "M": 2**20, "G": 2**30}


@dataclass(frozen=True)
class ParsedArgs:
    """The configuration as given, and lines to log once."""

    config: ServerConfig
    notices: list[str]


def parse_int(text: str) -> int:
    """Read `32768`, `32k` (32,000) or `32K` (32,768).

    Raises:
        argparse.ArgumentTypeError: the text has another form.
    """
    match = _INT.fullmatch(text.strip())
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not an integer such as 4096, 32k or 32K")
    value = float(match[1]) * _INT_UNITS[match[2]]
    if value != int(value):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number")
    return int(value) if match[2] or "." in match[1] else int(match[1])


PROG = "python -m server.launch"


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        # One line is enough to act on; a usage text of sixty options would hide it.
        self.exit(2, f"{self.prog}: error: {message} (see --help)\n")


def build_parser(prog: str = PROG) -> argparse.ArgumentParser:
    """The parser, with one group per section of the configuration."""
    parser = _Parser(
        prog=prog,
        usage="%(prog)s [options]",
        description="Serve a language model over HTTP: the native API, the OpenAI API, metrics.",
        formatter_class=lambda prog: argparse.HelpFormatter(prog, max_help_position=36, width=100),
        allow_abbrev=False,
    )
    add_options(parser)
    return parser


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add every option to `parser`; its value is stored under the field's name."""
    for section, section_type in sections():
        title = (section_type.__doc__ or section).splitlines()[0].rstrip(".")
        group = parser.add_argument_group(title)
        hints = typing.get_type_hints(section_type)
        for field in dataclasses.fields(section_type):
            _add_option(group, field, hints[field.name])


def parse_args(
    argv: Sequence[str], environment: Mapping[str, str] | None = None, prog: str = PROG
) -> ParsedArgs:
    """Read the command line and the environment.

    Exits with status 2 and one line, which begins with `prog`, when the command line is wrong.
    """
    environment = os.environ if environment is None else environment
    parser = build_parser(prog)
    arguments, notices = _strip_reference_flags(parser, list(argv))
    arguments = _strip_reference_values(parser, arguments, notices)
    namespace, unknown = parser.parse_known_args(arguments)
    if unknown:
        parser.error(_unknown_message(parser, unknown[0]))
    section_of = {
        field.name: section for section, kind in sections() for field in dataclasses.fields(kind)
    }
    given: dict[str, dict[str, Any]] = {section: {} for section, _ in sections()}
    for name, value in vars(namespace).items():
        given[section_of[name]][name] = value
    notices += _shown_secrets(given)
    environment = _with_files(parser, environment)
    for variable, (section, name) in ENVIRONMENT.items():
        if environment.get(variable) and name not in given[section]:
            value = environment[variable]
            given[section][name] = value.lower() in ("1", "true") if name in _SWITCHES else value
    made = {section: kind(**given[section]) for section, kind in sections()}
    return ParsedArgs(ServerConfig(**made), notices)


def _shown_secrets(given: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    for variable in SECRETS:
        section, name = ENVIRONMENT[variable]
        if name in given[section]:
            yield (
                f"{option_name(name)} shows in this machine's process list. Give it by {variable}, "
                f"or in a file that {variable}_FILE names."
            )


def _with_files(
    parser: argparse.ArgumentParser, environment: Mapping[str, str]
) -> Mapping[str, str]:
    """Return the environment with the content of secrets' files, unless a variable is set."""
    found = dict(environment)
    for variable in SECRETS:
        path = environment.get(f"{variable}_FILE")
        if not path or environment.get(variable):
            continue
        try:
            value = Path(path).read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            parser.error(f"{variable}_FILE {path}: {error}")
        if not value or not value.isprintable():
            parser.error(f"{variable}_FILE {path} must hold the value in one line")
        found[variable] = value
    return found


def sections() -> Iterator[tuple[str, type[Any]]]:
    """Name and dataclass of each section of the configuration; no two share a field's name."""
    hints = typing.get_type_hints(ServerConfig)
    for field in dataclasses.fields(ServerConfig):
        yield field.name, hints[field.name]


def option_name(field_name: str) -> str:
    """`max_total_tokens` -> `--max-total-tokens`."""
    return "--" + field_name.replace("_", "-")


def _add_option(group: argparse._ArgumentGroup, field: dataclasses.Field[Any], hint: Any) -> None:
    names = [option_name(field.name), *field.metadata["aliases"]]
    # Absent options stay absent: only the dataclasses hold defaults.
    common: dict[str, Any] = {"dest": field.name, "default": argparse.SUPPRESS}
    kind, is_list = _value_type(hint)
    text = field.metadata["help"].replace("%", "%%")
    if kind is bool:
        group.add_argument(*names, action="store_true", help=text, **common)
        return
    if field.default not in (None, "", dataclasses.MISSING):
        text += f" Default: {field.default}."
    choices = field.metadata["choices"]
    group.add_argument(
        *names,
        type=parse_int if kind is int else kind,
        nargs="+" if is_list else None,
        # Several values after one option, or the option several times.
        action="extend" if is_list else "store",
        choices=choices,
        metavar=field.metadata["metavar"]
        or ("{" + ",".join(choices) + "}" if choices else _METAVARS[kind]),
        help=text,
        **common,
    )


_METAVARS: dict[Any, str] = {int: "N", float: "X", str: "TEXT"}


def _value_type(hint: Any) -> tuple[Any, bool]:
    if isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union:
        (hint,) = (part for part in typing.get_args(hint) if part is not types.NoneType)
    if typing.get_origin(hint) is list:
        return typing.get_args(hint)[0], True
    return hint, False


def _strip_reference_flags(
    parser: argparse.ArgumentParser, argv: list[str]
) -> tuple[list[str], list[str]]:
    kept: list[str] = []
    ignored: list[str] = []
    index = 0
    while index < len(argv):
        name, has_equals, value = argv[index].partition("=")
        index += 1
        flag = REFERENCE_FLAGS.get(name)
        if flag is None or name in parser._option_string_actions:
            kept.append(argv[index - 1])
            continue
        values = [value] if has_equals else []
        while flag.takes_value and not has_equals and index < len(argv):
            if argv[index].startswith("--"):
                break
            values.append(argv[index])
            index += 1
        if values and all(each.lower() in flag.neutral for each in values):
            continue
        if flag.refusal is not None:
            parser.error(f"{' '.join([name, *values])}: {flag.refusal}")
        ignored.append(name)
    if not ignored:
        return kept, []
    verb = "has" if len(ignored) == 1 else "have"
    return kept, [f"{', '.join(ignored)} {verb} no effect in this server."]


def _strip_reference_values(
    parser: argparse.ArgumentParser, argv: list[str], notices: list[str]
) -> list[str]:
    kept: list[str] = []
    index = 0
    while index < len(argv):
        name, has_equals, value = argv[index].partition("=")
        size = 1 if has_equals else 2
        action = parser._option_string_actions.get(name)
        known_elsewhere = REFERENCE_VALUES.get(name, ())
        if not has_equals and index + 1 < len(argv):
            value = argv[index + 1]
        if action is not None and value in known_elsewhere and value not in (action.choices or ()):
            notices.append(f"{name} {value} is not available here; the automatic choice is used.")
            index += size
            continue
        kept.append(argv[index])
        index += 1
    return kept


def _unknown_message(parser: argparse.ArgumentParser, argument: str) -> str:
    name = argument.partition("=")[0]
    if not name.startswith("-"):
        return f"unexpected argument {argument!r}"
    known = [option for option in parser._option_string_actions if option.startswith("--")]
    near = difflib.get_close_matches(name.replace("_", "-"), known, n=1, cutoff=0.6)
    hint = f"; did you mean {near[0]}?" if near else ""
    return f"unknown option {name}{hint}"
