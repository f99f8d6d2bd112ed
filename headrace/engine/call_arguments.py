"""Converts the arguments of the engine's methods to request bodies of the native API."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

import msgspec

from runtime.errors import InvalidRequest
from runtime.eventloop.body_errors import did_you_mean, explain
from runtime.requests.sampling_params import SamplingFields
from runtime.service.generate_request import GenerateBody

S = TypeVar("S", bound=msgspec.Struct)

# Arguments of SGLang that need another argument, which this engine refuses.
_COMPANIONS = frozenset(
    {
        "external_trace_header",
        "kv_hints",
    }
)
_OWN = frozenset({"text", "input_ids", "sampling_params", "stream"})


def build_body(
    prompt: Any, sampling_params: Any, input_ids: Any, stream: bool, options: Mapping[str, Any]
) -> GenerateBody:
    """Build the request body of `Engine.generate` from its arguments, and check names and types.

    Raises:
        TypeError: an unknown option.
        InvalidRequest: a value of the wrong type, or not exactly one prompt.
    """
    known = set(GenerateBody.__struct_fields__) - _OWN
    for name in options:
        if name not in known and name not in _COMPANIONS:
            hint = did_you_mean(name, known)
            raise TypeError(f"generate() got an unexpected keyword argument {name!r}.{hint}")
    embeds = options.get("input_embeds")
    if sum(each is not None for each in (prompt, input_ids, embeds)) != 1:
        raise InvalidRequest(
            "Exactly one of prompt, input_ids and input_embeds must be given.", param="prompt"
        )
    values = {name: _plain(value) for name, value in options.items() if name in known}
    values.update(
        text=_plain(prompt),
        input_ids=_plain(input_ids),
        sampling_params=_sampling(sampling_params),
        stream=stream,
    )
    try:
        return msgspec.convert(values, GenerateBody)
    except msgspec.ValidationError as error:
        message = explain(error, GenerateBody)
        message = message.replace("`$.text", "`prompt").replace("`$.", "`")
        raise InvalidRequest(message) from None


def build_options(call: str, struct: type[S], options: Mapping[str, Any]) -> S:
    """Convert the keyword arguments of a method to the request body of its route.

    Args:
        call: the method's name, for error messages.
        struct: the type of the body.
        options: the keyword arguments.

    Raises:
        TypeError: an unknown option.
        InvalidRequest: a value of the wrong type.
    """
    known = struct.__struct_fields__
    for name in options:
        if name not in known:
            hint = did_you_mean(name, known)
            raise TypeError(f"{call}() got an unexpected keyword argument {name!r}.{hint}")
    try:
        return msgspec.convert({name: _plain(value) for name, value in options.items()}, struct)
    except msgspec.ValidationError as error:
        raise InvalidRequest(explain(error, struct).replace("`$.", "`")) from None


def _plain(value: Any) -> Any:
    # Arrays of numpy and torch have `tolist`; neither package is imported here.
    return value.tolist() if hasattr(value, "tolist") else value


def _sampling(given: Any) -> Any:
    if isinstance(given, Mapping):
        return _checked(given)
    if isinstance(given, Iterable) and not isinstance(given, str):
        return [_checked(each) if isinstance(each, Mapping) else each for each in given]
    return given


def _checked(given: Mapping[str, Any]) -> dict[str, Any]:
    known = SamplingFields.__struct_fields__
    for name in given:
        if name not in known:
            hint = did_you_mean(str(name), known)
            raise InvalidRequest(f"Unknown sampling parameter {name!r}.{hint}", param=str(name))
    values = {name: _plain(value) for name, value in given.items()}
    bias = values.get("logit_bias")
    if isinstance(bias, Mapping):
        # Python programs use numbers as keys of `logit_bias`; the body, as in JSON, has strings.
        values["logit_bias"] = {str(token_id): value for token_id, value in bias.items()}
    return values
