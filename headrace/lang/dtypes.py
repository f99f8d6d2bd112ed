"""Python types of generations: the constraint on the text of each type, and its parser."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

REGEX_INT = r"[-+]?[0-9]+[ \n]*"
REGEX_FLOAT = r"[-+]?[0-9]*\.?[0-9]+[ \n]*"
REGEX_BOOL = r"(True|False)"
REGEX_STR = r"\"[\w\d\s]*\""

REGEX_OF_DTYPE = {"int": REGEX_INT, "float": REGEX_FLOAT, "bool": REGEX_BOOL, "str": REGEX_STR}
# Stop strings of numbers, which end at the first character that is not part of them.
STOPS_OF_DTYPE = {"int": (" ", "\n"), "float": (" ", "\n")}

Parser = Callable[[str], Any]


def _bool(text: str) -> bool:
    word = text.strip()
    if word not in ("True", "False"):
        raise ValueError(f"{word!r} is neither True nor False")
    return word == "True"


_PARSERS: dict[str, Parser] = {
    "int": int,
    "float": float,
    "bool": _bool,
    "str": lambda text: text.strip().removeprefix('"').removesuffix('"'),
}


def dtype_name(dtype: Any) -> str:
    """Return the name of `dtype`, which is a type or a name.

    Raises:
        ValueError: `dtype` is none of int, float, bool and str.
    """
    name = dtype if isinstance(dtype, str) else getattr(dtype, "__name__", repr(dtype))
    if name not in REGEX_OF_DTYPE:
        raise ValueError(f"dtype must be one of int, float, bool, str, not {name!r}.")
    return name


def parser_of_dtype(name: str) -> Parser:
    """Return the function that turns a generation's text into its value."""
    return _PARSERS[name]


def schema_and_parser(schema: Any) -> tuple[str, Parser]:
    """Return the JSON schema of `schema` as text, and the function that parses a generation's text.

    Args:
        schema: a Pydantic model, any type that Pydantic describes (a dataclass, a `TypedDict`,
            `list[int]`), a JSON schema as a dictionary or as text.

    Raises:
        ValueError: `schema` is a text that is not JSON.
        TypeError: `schema` has another type.
    """
    if isinstance(schema, dict):
        return json.dumps(schema), json.loads
    if isinstance(schema, str):
        json.loads(schema)
        return schema, json.loads
    # Imported only here, because importing Pydantic takes a tenth of a second.
    from pydantic import TypeAdapter
    from pydantic.errors import PydanticSchemaGenerationError

    try:
        adapter: TypeAdapter[Any] = TypeAdapter(schema)
    except PydanticSchemaGenerationError as error:
        raise TypeError(f"{schema!r} has no JSON schema: {error}") from None
    return json.dumps(adapter.json_schema()), adapter.validate_json
