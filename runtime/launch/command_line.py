"""The command line, generated from the configuration's fields; the only reader of the environment.

For example, a field `max_total_tokens: int | None` becomes the option `--max-total-tokens N`. Each
section of the configuration becomes a group of options in `--help`.
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

# Options that can also be set by environment variables: for each variable, the section and the
# field. Keys in variables are not visible in the machine's process list.
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

# Variables for secret options, which would be visible in the process list. With the suffix `_FILE`,
# a variable names a file that has the value.
SECRETS = (
    "HEADRACE_API_KEY",
    "HEADRACE_ADMIN_API_KEY",
    "HEADRACE_SSL_KEYFILE_PASSWORD",
    "HEADRACE_DIST_KEY",
)

# Fields that are switches: their variables are on if they are `1` or `true`.
_SWITCHES = frozenset({"allow_open_admin", "disable_docs"})

_INT = re.compile(r"([+-]?\d+(?:\.\d+)?)([kKmMgG]?)")
# Units as in vLLM and SGLang: small letters are decimal, capital letters binary.
_INT_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "K": 2**10, "M": 2**20, "G": 2**30}


@dataclass(frozen=True)
class ParsedArgs:
    """The parsed command line.

    Attributes:
        config: the options as given, with defaults for the others.
        notices: lines to log once.
    """

    config: ServerConfig
    notices: list[str]


def parse_int(text: str) -> int:
    """Return the integer that a text such as `32768`, `32k` (32,000) or `32K` (32,768) stands for.

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
        # The error is one line: the usage text of all options would hide it.
        self.exit(2, f"{self.prog}: error: {message} (see --help)\n")


def build_parser(prog: str = PROG) -> argparse.ArgumentParser:
    """Return a parser of all options, with one group for each section of the configuration."""
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
    """Add all options to `parser`; values are stored under the names of the fields."""
    for section, section_type in sections():
        title = (section_type.__doc__ or section).splitlines()[0].rstrip(".")
        group = parser.add_argument_group(title)
        hints = typing.get_type_hints(section_type)
        for field in dataclasses.fields(section_type):
            _add_option(group, field, hints[field.name])


def parse_args(
    argv: Sequence[str], environment: Mapping[str, str] | None = None, prog: str = PROG
) -> ParsedArgs:
    """Read the options from the command line and from the environment.

    If the command line is wrong, the process exits with status 2 and prints one line.

    Args:
        argv: the arguments, without the program's name.
        environment: environment variables; `None` for those of the process.
        prog: name of the program, for the error line and `--help`.
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
    """Return the environment with the secrets from files.

    A file is read if a variable with the suffix `_FILE` names it and the variable itself is unset.
    """
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
    """Yield name and dataclass of each section of the configuration.

    The names of the fields are unique over all sections.
    """
    hints = typing.get_type_hints(ServerConfig)
    for field in dataclasses.fields(ServerConfig):
        yield field.name, hints[field.name]


def option_name(field_name: str) -> str:
    """Return the name of a field's option, such as `--max-total-tokens` for `max_total_tokens`."""
    return "--" + field_name.replace("_", "-")


def _add_option(group: argparse._ArgumentGroup, field: dataclasses.Field[Any], hint: Any) -> None:
    names = [option_name(field.name), *field.metadata["aliases"]]
    # An option that is not given sets nothing, because only the dataclasses have the defaults.
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
        # A list is given by several values after one option, or by the option several times.
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
