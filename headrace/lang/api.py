"""The public functions of the frontend language, from which programs are written."""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeVar, overload

from headrace.lang import ir
from headrace.lang.backend.choose import find_backend
from headrace.lang.choices import (
    ChoicesSamplingMethod,
    choices_method_named,
    token_length_normalized,
)
from headrace.lang.core_loop import core
from headrace.lang.dtypes import dtype_name, parser_of_dtype, schema_and_parser
from headrace.lang.function import SglFunction, function
from headrace.lang.global_config import global_config
from headrace.lang.sampling import SglSamplingParams, Stop
from headrace.lang.state import turn

__all__ = [
    "SglFunction",
    "assistant",
    "assistant_begin",
    "assistant_end",
    "flush_cache",
    "function",
    "gen",
    "gen_int",
    "gen_string",
    "get_server_info",
    "image",
    "select",
    "separate_reasoning",
    "set_default_backend",
    "system",
    "system_begin",
    "system_end",
    "user",
    "user_begin",
    "user_end",
    "video",
]

T = TypeVar("T")

_MAX_TEMPERATURE = 1e-5


# ---- back ends ----


def set_default_backend(backend: Any) -> None:
    """Set the back end of programs that name none; None removes this default."""
    global_config.default_backend = backend


def flush_cache(backend: Any = None) -> bool:
    """Clear the back end's prefix cache, and return whether it was cleared.

    Without a back end it returns False.

    Raises:
        BackendError: the server refuses, for example because requests run.
    """
    found = find_backend(backend)
    return False if found is None else core().call(found.async_flush_cache())


def get_server_info(backend: Any = None) -> dict[str, Any] | None:
    """Return the report of the back end's server about itself; None without a back end."""
    found = find_backend(backend)
    return None if found is None else core().call(found.async_get_server_info())


# ---- generations ----


@overload
def gen(
    name: str | None = None, max_tokens: int | None = None, *, dtype: type[T], **options: Any
) -> ir.SglGen[T]: ...
@overload
def gen(
    name: str | None = None, max_tokens: int | None = None, *, schema: type[T], **options: Any
) -> ir.SglGen[T]: ...
@overload
def gen(
    name: str | None = None,
    max_tokens: int | None = None,
    *,
    choices: Sequence[str],
    **options: Any,
) -> ir.SglSelect: ...
@overload
def gen(
    name: str | None = None,
    max_tokens: int | None = None,
    min_tokens: int | None = None,
    n: int | None = None,
    stop: Stop = None,
    stop_token_ids: Sequence[int] | None = None,
    stop_regex: Stop = None,
    temperature: float | None = None,
    top_p: float | None = None,
    top_k: int | None = None,
    min_p: float | None = None,
    frequency_penalty: float | None = None,
    presence_penalty: float | None = None,
    ignore_eos: bool | None = None,
    return_logprob: bool | None = None,
    logprob_start_len: int | None = None,
    top_logprobs_num: int | None = None,
    return_text_in_logprobs: bool | None = None,
    dtype: Literal["int", "float", "bool", "str"] | None = None,
    choices: None = None,
    choices_method: ChoicesSamplingMethod | str | None = None,
    regex: str | None = None,
    json_schema: Any = None,
    *,
    schema: None = None,
    repetition_penalty: float | None = None,
    sampling_seed: int | None = None,
    ebnf: str | None = None,
    structural_tag: str | Mapping[str, Any] | None = None,
    lora_path: str | None = None,
    logit_bias: Mapping[str, float] | None = None,
    no_stop_trim: bool | None = None,
    skip_special_tokens: bool | None = None,
) -> ir.SglGen[str]: ...
def gen(  # noqa: PLR0913  the reference's order
    name: str | None = None,
    max_tokens: int | None = None,
    min_tokens: int | None = None,
    n: int | None = None,
    stop: Stop = None,
    stop_token_ids: Sequence[int] | None = None,
    stop_regex: Stop = None,
    temperature: float | None = None,
    top_p: float | None = None,
    top_k: int | None = None,
    min_p: float | None = None,
    frequency_penalty: float | None = None,
    presence_penalty: float | None = None,
    ignore_eos: bool | None = None,
    return_logprob: bool | None = None,
    logprob_start_len: int | None = None,
    top_logprobs_num: int | None = None,
    return_text_in_logprobs: bool | None = None,
    dtype: Any = None,
    choices: Sequence[str] | None = None,
    choices_method: ChoicesSamplingMethod | str | None = None,
    regex: str | None = None,
    json_schema: Any = None,
    *,
    schema: Any = None,
    **others: Any,
) -> Any:
    """Return an expression that generates text when it is appended to a state.

    If a parameter is None, the value of the program's `run` applies.

    Args:
        name: name of the variable that gets the text; None for no variable.
        max_tokens: most tokens to generate; 0 only computes the prompt.
        min_tokens: fewest tokens before the text may end.
        n: number of answers: the variable is a list of them, and the text continues with the first.
        stop: strings that end the text, in addition to those of the chat template.
        stop_token_ids: token ids that end the text.
        stop_regex: regular expressions that end the text.
        temperature: 0 takes the most likely token.
        top_p: as in the native API (docs/sampling_params.md).
        top_k: as in the native API.
        min_p: as in the native API.
        frequency_penalty: as in the native API.
        presence_penalty: as in the native API.
        ignore_eos: as in the native API.
        return_logprob: put log-probabilities into the meta information.
        logprob_start_len: first token of the prompt whose log-probability is returned.
        top_logprobs_num: number of most likely tokens reported at each position.
        return_text_in_logprobs: add the texts of the tokens to the log-probabilities.
        dtype: int, float, bool or str; the text is constrained to this type. If `answer` is the
            returned expression, `state[answer]` and `state.value(name)` are values of the type.
            `state[name]` is always text.
        choices: append the most likely of these texts instead; all parameters except `name`,
            `temperature` and `choices_method` are then ignored.
        choices_method: how the most likely of `choices` is found from log-probabilities.
        regex: a regular expression that the text must match.
        json_schema: a schema (string, dictionary or type); the text must be JSON that follows it.
        schema: a Pydantic model or another type. The text is constrained as by `json_schema`, and
            its value has the type.
        others: `repetition_penalty`, `sampling_seed`, `ebnf`, `structural_tag`, `lora_path`,
            `logit_bias`, `no_stop_trim`, `skip_special_tokens`.

    Raises:
        ValueError: the choices are empty, the dtype is unknown, or the schema is not JSON.
        re.error: `regex` is not a regular expression.
        TypeError: an unknown parameter.
    """
    if choices is not None:
        method = token_length_normalized if choices_method is None else choices_method
        return select(name, choices, temperature or 0.0, method)
    if regex is not None:
        re.compile(regex)
    kind = None if dtype is None else dtype_name(dtype)
    parse: Any = None
    schema_text: str | None = None
    if schema is not None:
        schema_text, parse = schema_and_parser(schema)
    elif json_schema is not None:
        schema_text, _ = schema_and_parser(json_schema)
    if kind is not None:
        parse = parser_of_dtype(kind)
        if regex is not None:
            warnings.warn("Both dtype and regex are set; dtype wins.", stacklevel=2)
    tag = others.get("structural_tag")
    if isinstance(tag, Mapping):
        others["structural_tag"] = json.dumps(tag)
    params = SglSamplingParams(
        max_new_tokens=max_tokens,
        min_new_tokens=min_tokens,
        n=n,
        stop=stop,
        stop_token_ids=stop_token_ids,
        stop_regex=stop_regex,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        min_p=min_p,
        frequency_penalty=frequency_penalty,
        presence_penalty=presence_penalty,
        ignore_eos=ignore_eos,
        return_logprob=return_logprob,
        logprob_start_len=logprob_start_len,
        top_logprobs_num=top_logprobs_num,
        return_text_in_logprobs=return_text_in_logprobs,
        dtype=kind,
        regex=regex,
        json_schema=schema_text,
        **others,
    )
    return ir.SglGen(name, params, parse)


def gen_int(
    name: str | None = None, max_tokens: int | None = None, **options: Any
) -> ir.SglGen[int]:
    """Return an expression that generates an integer: `gen` with `dtype=int`."""
    return gen(name, max_tokens, dtype=int, **_without_form("gen_int", options))


def gen_string(
    name: str | None = None, max_tokens: int | None = None, **options: Any
) -> ir.SglGen[str]:
    """Return an expression that generates a text in quotes: `gen` with `dtype=str`."""
    return gen(name, max_tokens, dtype=str, **_without_form("gen_string", options))


def _without_form(function_name: str, options: dict[str, Any]) -> dict[str, Any]:
    for name in ("min_tokens", "dtype", "choices", "regex", "json_schema", "schema"):
        if name in options:
            raise TypeError(f"{function_name} takes no {name}.")
    return options


def select(
    name: str | None = None,
    choices: Sequence[str] | None = None,
    temperature: float = 0.0,
    choices_method: ChoicesSamplingMethod | str = token_length_normalized,
) -> ir.SglSelect:
    """Return an expression that appends the most likely of `choices`.

    Args:
        name: name of the variable that gets the choice.
        choices: the texts; if several are equally likely, the first one is taken.
        temperature: must be 0.
        choices_method: how the choice is made from log-probabilities: `token_length_normalized`,
            `greedy_token_selection` or `unconditional_likelihood_normalized`, as an object or a
            name, or a function of your own.

    Raises:
        ValueError: the choices are empty, or the temperature is not 0.
        TypeError: a choice is not text.
    """
    if isinstance(choices, str) or not choices:
        raise ValueError("select needs choices: a list of at least one text.")
    if not all(isinstance(choice, str) for choice in choices):
        raise TypeError(f"The choices must be texts, not {choices!r}.")
    if temperature > _MAX_TEMPERATURE:
        raise ValueError(f"select decides by likelihood: temperature must be 0, not {temperature}.")
    return ir.SglSelect(name, choices, temperature, choices_method_named(choices_method))


def image(expr: Any) -> ir.SglImage:
    """Return an expression that appends an image.

    The image is a path, a URL, a data URL, base64, bytes, or an image object.
    """
    return ir.SglImage(expr)


def video(path: Any, num_frames: int = 16) -> ir.SglVideo:
    """Return an expression that appends frames of a video as images, at equal distances."""
    return ir.SglVideo(path, num_frames)


# ---- turns ----


def system(expr: ir.SglExpr | str | None = None) -> ir.SglExprList:
    """Return an expression that appends a whole system turn with the content `expr`."""
    return turn("system", expr)


def user(expr: ir.SglExpr | str | None = None) -> ir.SglExprList:
    """Return an expression that appends a whole user turn with the content `expr`."""
    return turn("user", expr)


def assistant(expr: ir.SglExpr | str | None = None) -> ir.SglExprList:
    """Return an expression that appends a whole assistant turn with the content `expr`."""
    return turn("assistant", expr)


def system_begin() -> ir.SglRoleBegin:
    """Return an expression that begins a system turn."""
    return ir.SglRoleBegin("system")


def system_end() -> ir.SglRoleEnd:
    """Return an expression that ends the system turn."""
    return ir.SglRoleEnd("system")


def user_begin() -> ir.SglRoleBegin:
    """Return an expression that begins a user turn."""
    return ir.SglRoleBegin("user")


def user_end() -> ir.SglRoleEnd:
    """Return an expression that ends the user turn."""
    return ir.SglRoleEnd("user")


def assistant_begin() -> ir.SglRoleBegin:
    """Return an expression that begins an assistant turn."""
    return ir.SglRoleBegin("assistant")


def assistant_end() -> ir.SglRoleEnd:
    """Return an expression that ends the assistant turn."""
    return ir.SglRoleEnd("assistant")


def separate_reasoning(expr: ir.SglExpr, model_type: str | None = None) -> ir.SglExprList:
    """Return an expression that separates the reasoning from the answer of a generation.

    If the generation's name is "a", the variable "a" holds only the answer, and
    "a_reasoning_content" holds the reasoning. The text continues without the reasoning.

    Args:
        expr: an expression that contains a generation with a name.
        model_type: name of the reasoning parser, as in `--reasoning-parser`.

    Raises:
        ValueError: `model_type` is missing or unknown, or the generation has no name.
    """
    # These are the server's parsers. The module does not import torch.
    from openai_api.reasoning_parsers.registry import REASONING_PARSERS

    if model_type is None or model_type not in REASONING_PARSERS:
        known = ", ".join(REASONING_PARSERS)
        raise ValueError(f"separate_reasoning: model_type {model_type!r} is none of {known}.")
    return ir.SglExprList([expr, ir.SglSeparateReasoning(model_type, expr)])
