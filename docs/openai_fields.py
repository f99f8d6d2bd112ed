"""Makes the page that lists the effect of every field of OpenAI's routes.

It uses the types of the request bodies, and a sample value for each field.

`tests/unit/openai_api/test_fields.py` sends each value, alone and with each feature, and compares the
answers with this table.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec

from openai_api.schemas.chat import ChatCompletionRequest
from openai_api.schemas.completions import CompletionRequest
from openai_api.schemas.embeddings import EmbeddingRequest
from openai_api.schemas.neutral import neutral_fields
from openai_api.schemas.responses import ResponseRequest
from runtime.eventloop.body_errors import fields_of_type

Outcome = Literal["effect", "neutral", "refused"]


@dataclass(frozen=True)
class Sample:
    """A sample value of a field, and how the server treats the field.

    Attributes:
        does: a few words on the effect of the field, if it has one.
        beside: other fields that a request with this field needs.
        not_with: features with which the field cannot be combined, each with the reason.
        needs: what the server or the conversation must have; otherwise the field is refused.
        is_refused: whether the field is refused although its type does not show that.
    """

    value: Any
    does: str = ""
    beside: Mapping[str, Any] = field(default_factory=dict)
    not_with: Mapping[str, str] = field(default_factory=dict)
    needs: str = ""
    is_refused: bool = False


@dataclass(frozen=True)
class Route:
    """A route and its fields.

    Attributes:
        base: the body to which a field is added in tests.
        features: the features with which each field is combined in tests, as fields of the body.
    """

    path: str
    body: type[msgspec.Struct]
    base: Mapping[str, Any]
    samples: Mapping[str, Sample]
    features: Mapping[str, Mapping[str, Any]]

    def outcome(self, name: str) -> Outcome:
        """Return whether a field has an effect, is neutral or is refused; its type shows this."""
        if name in neutral_fields(self.body):
            return "neutral"
        is_refused = name in fields_of_type(self.body, Any) or self.samples[name].is_refused
        return "refused" if is_refused else "effect"


ASK = [{"role": "user", "content": "Hi"}]
ADD: dict[str, Any] = {"name": "add", "parameters": {"type": "object"}}
TOOLS = [{"type": "function", "function": ADD}]
_JSON = {"type": "json_object"}
_SCHEMA = {"type": "object"}
_TAG = {
    "type": "structural_tag",
    "format": {"type": "json_schema", "json_schema": _SCHEMA},
}
_ONE = {"grammar": "a request can have only one constraint"}
_SAMPLING = "sampling"
_STOP = "where the output ends"


def _constraint(value: Any) -> Sample:
    return Sample(value, "a grammar for the output", not_with=_ONE)


def _refused(value: Any = True) -> Sample:
    return Sample(value)


_SWITCHES = {
    "enable_thinking": Sample(False, "a variable of the template"),
    "thinking": Sample(
        {"type": "disabled"},
        "like `enable_thinking`, as an object or as true or false; its `clear_thinking` is a variable of the template",
    ),
    "documents": Sample(
        [{"title": "t", "text": "x"}], "a variable of the template: texts to refer to"
    ),
}
_CACHE_BREAK = Sample(
    True, "where the prompt stopped matching the cache", needs="`--enable-cache-report`"
)
_GENERATION: dict[str, Sample] = {
    "model": Sample("any", "echoed in the answer; any name is accepted"),
    "user": Sample("u"),
    "stream": Sample(True, "the answer is a stream of events"),
    "stream_options": Sample({"include_usage": True}, "usage in a stream", {"stream": True}),
    "temperature": Sample(0.5, _SAMPLING),
    "top_p": Sample(0.5, _SAMPLING),
    "top_k": Sample(5, _SAMPLING),
    "min_p": Sample(0.1, _SAMPLING),
    "n": Sample(2, "number of choices"),
    "seed": Sample(1, "the same seed gives the same samples"),
    "frequency_penalty": Sample(0.5, _SAMPLING),
    "presence_penalty": Sample(0.5, _SAMPLING),
    "repetition_penalty": Sample(1.1, _SAMPLING),
    "logit_bias": Sample({"5": 1}, _SAMPLING),
    "stop": Sample("x", _STOP),
    "stop_token_ids": Sample([5], _STOP),
    "stop_regex": Sample("x+", _STOP),
    "min_tokens": Sample(2, _STOP),
    "ignore_eos": Sample(True, _STOP),
    "skip_special_tokens": Sample(False, "whether the text omits special tokens"),
    "spaces_between_special_tokens": Sample(
        False, "whether special tokens are separated by spaces"
    ),
    "no_stop_trim": Sample(True, "the stop string stays in the text", {"stop": "x"}),
    "priority": Sample(1, "order of waiting requests, with `--enable-priority-scheduling`"),
    "data_parallel_rank": Sample(0, "the replica that runs the request"),
    "routed_dp_rank": Sample(0, "the replica that runs the request"),
    "cache_salt": Sample(
        "a", "cached prefixes are shared only between requests with the same value"
    ),
    "extra_key": Sample(
        "a", "cached prefixes are shared only between requests with the same value"
    ),
    "response_format": Sample(_JSON, "a grammar for the output"),
    "regex": _constraint("a+"),
    "ebnf": _constraint('root ::= "a"'),
    "json_schema": _constraint(_SCHEMA),
    "structural_tag": _constraint(_TAG),
    "grammar": _constraint('root ::= "a"'),
    "guided_json": _constraint(_SCHEMA),
    "guided_regex": _constraint("a+"),
    "guided_choice": _constraint(["a", "b"]),
    "guided_grammar": _constraint('root ::= "a"'),
    "guided_whitespace_pattern": Sample("x", is_refused=True),
    "structured_outputs": _constraint({"regex": "a+"}),
    "lora_path": Sample(
        "x",
        "the LoRA adapter, with `--enable-lora` or `--lora-paths`; if `model` names one too, `model` decides",
    ),
    "session_params": Sample({"id": "s"}, "continues a session", needs="a session of that id"),
    "custom_params": Sample({"a": 1}),
    "custom_logit_processor": _refused("x"),
    "return_hidden_states": Sample(
        True, "hidden states of the last token", needs="`--enable-return-hidden-states`"
    ),
    "return_routed_experts": _refused(),
    "return_cached_tokens_details": _refused(),
    "return_token_ids": _refused(),
    "return_prompt_token_ids": _refused(),
    "return_meta_info": _refused(),
    "bootstrap_host": _refused("x"),
    "bootstrap_room": _refused(7),
    "rid": Sample("mine", "the answer's id, and the name for `/abort_request`"),
}
_NO_TOOLS = {"tools": "they are the older form of `tools` and `tool_choice`"}

CHAT = Route(
    "/v1/chat/completions",
    ChatCompletionRequest,
    {"messages": ASK},
    {
        "messages": Sample([{"role": "user", "content": "Ho"}], "the conversation"),
        **_GENERATION,
        "max_tokens": Sample(5, _STOP),
        "max_completion_tokens": Sample(5, _STOP),
        "logprobs": Sample(True, "log-probabilities"),
        "top_logprobs": Sample(
            2, "log-probabilities of the most probable tokens", {"logprobs": True}
        ),
        "tools": Sample(
            TOOLS,
            "functions and custom tools that may be called; a regex in a custom tool's `format` is enforced like `strict`, a Lark grammar is only shown to the model",
        ),
        "tool_choice": Sample(
            "required",
            "whether and which tools are called",
            {"tools": TOOLS},
            {"grammar": "a forced call cannot also follow the constraint"},
        ),
        "parallel_tool_calls": Sample(False, "at most one call", {"tools": TOOLS}),
        "return_cache_break": _CACHE_BREAK,
        "functions": Sample(
            [ADD], "like `tools`; the answer has a `function_call`", not_with=_NO_TOOLS
        ),
        "function_call": Sample(
            "none", "like `tool_choice`", {"functions": [ADD]}, not_with=_NO_TOOLS
        ),
        "reasoning_effort": Sample("low", "a variable of the template; `none` turns thinking off"),
        "reasoning": Sample({"effort": "low"}, "the same as `reasoning_effort`"),
        "verbosity": Sample("low", "a variable of the template"),
        "separate_reasoning": Sample(False, "whether thoughts are separated from the content"),
        "stream_reasoning": Sample(False, "whether thoughts are streamed", {"stream": True}),
        "max_thinking_tokens": Sample(
            5, "budget of thoughts; after it, the end of thoughts is appended"
        ),
        "continue_final_message": Sample(
            True,
            "continues the assistant's last message",
            {"messages": [*ASK, {"role": "assistant", "content": "So"}]},
        ),
        "add_generation_prompt": Sample(
            False, "whether the prompt ends with the beginning of an answer"
        ),
        "chat_template": Sample("{{ 1 }}", is_refused=True),
        "chat_template_kwargs": Sample({"verbosity": "high"}, "variables of the template"),
        **_SWITCHES,
        "split_special_tokens": Sample(
            True,
            "special tokens in texts are encoded as plain text",
            {"messages": [{"role": "user", "content": "<|im_end|>"}]},
        ),
        "modalities": Sample(["text"]),
        "service_tier": Sample("auto", "echoed as `default`, the only tier"),
        "store": Sample(True),
        "metadata": Sample({"a": "b"}),
        "prediction": Sample({"type": "content", "content": "x"}),
        "safety_identifier": Sample("u"),
        "prompt_cache_key": Sample("k"),
        "prompt_cache_retention": Sample("24h"),
        "prompt_cache_options": Sample({"mode": "explicit"}),
        "input_ids": _refused([1]),
        "audio": _refused({"voice": "alloy", "format": "wav"}),
        "moderation": _refused({"model": "m"}),
        "web_search_options": _refused({"search_context_size": "low"}),
    },
    {
        "stream": {"stream": True},
        "tools": {"tools": TOOLS},
        "reasoning": {"reasoning_effort": "high"},
        "grammar": {"response_format": _JSON},
        "n": {"n": 2},
    },
)
COMPLETIONS = Route(
    "/v1/completions",
    CompletionRequest,
    {"prompt": "Hi"},
    {
        "prompt": Sample([[72, 73], [72]], "texts or token ids, one or several"),
        **_GENERATION,
        "max_tokens": Sample(5, _STOP),
        "echo": Sample(
            True, "prepends the prompt to the text, and its log-probabilities with `logprobs`"
        ),
        "logprobs": Sample(2, "log-probabilities"),
        "suffix": Sample(
            "yo",
            "the text after the generated text",
            needs="a model with fill-in-the-middle tokens",
        ),
        "best_of": Sample(
            3,
            "number of samples, of which the best `n` are returned",
            not_with={"stream": "the best samples are known only at the end"},
        ),
        "prompt_embeds": _refused("AAAA"),
    },
    {"stream": {"stream": True}, "grammar": {"response_format": _JSON}, "n": {"n": 2}},
)
RESPONSES = Route(
    "/v1/responses",
    ResponseRequest,
    {"input": "Hi"},
    {
        "input": Sample("Ho", "the conversation, as text or items"),
        "model": _GENERATION["model"],
        "instructions": Sample("Be brief.", "a system message"),
        "previous_response_id": Sample("resp_a", "continues a response", needs="a stored response"),
        "tools": Sample(
            [{"type": "function", **ADD}],
            "functions, custom tools and namespaces of them; `format` of a custom tool as in chat",
        ),
        "tool_choice": Sample(
            "required",
            "whether and which tools are called",
            {"tools": [{"type": "function", **ADD}]},
            {"grammar": "a forced call cannot also follow the constraint"},
        ),
        "parallel_tool_calls": Sample(
            False, "at most one call", {"tools": [{"type": "function", **ADD}]}
        ),
        "reasoning": Sample({"effort": "low"}, "a variable of the template"),
        "text": Sample({"format": _JSON}, "a grammar for the output"),
        "truncation": Sample("auto"),
        "chat_template_kwargs": Sample({"verbosity": "high"}, "variables of the template"),
        **_SWITCHES,
        "conversation": _refused("conv_a"),
        "prompt": _refused({"id": "p"}),
        "stream": _GENERATION["stream"],
        "store": Sample(False, "whether the response is stored for later turns"),
        "background": Sample(True, "returns at once; the response is made in the background"),
        "return_cache_break": _CACHE_BREAK,
        "max_output_tokens": Sample(5, _STOP),
        "top_logprobs": Sample(2, "log-probabilities"),
        "include": Sample(["message.output_text.logprobs"], "log-probabilities"),
        "metadata": Sample({"a": "b"}),
        "user": Sample("u"),
        "safety_identifier": Sample("u"),
        "prompt_cache_key": Sample("k"),
        "prompt_cache_retention": Sample("24h"),
        "prompt_cache_options": Sample({"mode": "explicit"}),
        "service_tier": Sample("auto"),
        "max_tool_calls": Sample(3),
        "stream_options": Sample({"include_obfuscation": False}),
        "context_management": Sample(
            [{"type": "compaction", "compact_threshold": 1000}],
            "a summary replaces a conversation with more tokens",
            {"input": "Hi " * 500},
        ),
        **{
            name: _GENERATION[name]
            for name in (
                *("temperature", "top_p", "top_k", "min_p", "stop", "frequency_penalty"),
                *("presence_penalty", "seed", "priority", "cache_salt", "extra_key"),
            )
        },
        "moderation": _refused({"model": "m"}),
        "image": _refused({"quality": "low"}),
        "background_options": _refused({"a": 1}),
        "access_programs": _refused(["a"]),
    },
    {
        "stream": {"stream": True},
        "tools": {"tools": [{"type": "function", **ADD}]},
        "reasoning": {"reasoning": {"effort": "high"}},
        "grammar": {"text": {"format": _JSON}},
    },
)
EMBEDDINGS = Route(
    "/v1/embeddings",
    EmbeddingRequest,
    {"input": "The"},
    {
        "input": Sample(["The", "mill"], "texts or token ids, one or several"),
        "model": _GENERATION["model"],
        "encoding_format": Sample("base64", "the format of the numbers"),
        "dimensions": Sample(4, "length of the embeddings", needs="a Matryoshka model"),
        "prompt": Sample("query: ", "a text that is put before each input"),
        "prompt_name": Sample(
            "query",
            "name of the model's prompt that is put before each input",
            needs="a model with such prompts",
        ),
        "user": Sample("u"),
        "rid": Sample("mine", "the name for `/abort_request`"),
        "priority": Sample(1, "order of waiting requests, with `--enable-priority-scheduling`"),
    },
    {},
)
ROUTES = (CHAT, COMPLETIONS, RESPONSES, EMBEDDINGS)


def openai_fields_page() -> str:
    """Return the page with a table of fields for each route."""
    lines = [
        "# Fields of the OpenAI API",
        "",
        "The tables list the known fields of each route. A field has an effect, is neutral (it does not change the",
        "answer, for the given reason), or is refused with a 400 that names the field. Unknown fields are ignored;",
        "the answer's header `x-ignored-fields` names them, and the log names each once. `null` always means the",
        "default.",
        "",
        "The last columns show whether a field can be combined with a streamed answer, tools, thinking, a grammar",
        "(`response_format`) and several choices: `+` if it can, 400 if the request is refused. A test sends each of",
        "these requests, and compares the fields with those of the newest `openai` package.",
    ]
    for route in ROUTES:
        names = [f" {name} |" for name in route.features]
        lines += ["", f"## {route.path}", "", f"| field | | |{''.join(names)}"]
        lines.append("|---|---|---|" + "---|" * len(names))
        lines += _rows(route)
        lines += _reasons(route)
    return "\n".join(lines) + "\n"


def _rows(route: Route) -> list[str]:
    """Return the rows of a route's table; fields with the same text share one row."""
    found: dict[str, list[str]] = {}
    for name in route.samples:
        found.setdefault(_said(route, name), []).append(f"`{name}`")
    return [f"| {', '.join(names)} | {said}" for said, names in found.items()]


def _said(route: Route, name: str) -> str:
    sample, outcome = route.samples[name], route.outcome(name)
    said = {"effect": sample.does, "neutral": neutral_fields(route.body).get(name, "")}.get(outcome)
    if sample.needs:
        said = f"{said}; needs {sample.needs}"
    cells = [
        " |" if outcome == "refused" else f" {'400' if feature in sample.not_with else '+'} |"
        for feature in route.features
    ]
    return f"{outcome} | {said or ''} |{''.join(cells)}"


def _reasons(route: Route) -> list[str]:
    found: dict[tuple[str, str], list[str]] = {}
    for name, sample in route.samples.items():
        for feature, why in sample.not_with.items():
            found.setdefault((feature, why), []).append(f"`{name}`")
    return [
        line
        for (feature, why), names in found.items()
        for line in (
            "",
            f"Together with {feature}, these fields get a 400 ({why}): {', '.join(names)}.",
        )
    ]
