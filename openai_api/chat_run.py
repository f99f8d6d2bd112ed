"""Turns a checked chat request into streams of the engine, one for each choice of the answer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import msgspec

from openai_api.answer_logprobs import AnswerLogprobs
from openai_api.call_ids import AnswerIds
from openai_api.chat_choice import ChatChoice
from openai_api.chat_grammar import constrained
from openai_api.chat_prompt import ChatPrompt, build_chat_prompt
from openai_api.chat_tools import CallForms, settle_tools
from openai_api.forced_tools import forces_call
from openai_api.logprobs import chat_spec
from openai_api.openai_context import OpenAIContext
from openai_api.output_parser import OutputParser
from openai_api.reasoning_parsers.reasoning_parser import thought_texts
from openai_api.sampling import WireNames, sampling_of
from openai_api.schemas.chat import (
    ChatCompletionRequest,
    check_chat_request,
    offered_functions,
    tool_names,
)
from openai_api.schemas.common import (
    cache_namespace,
    check_rid,
    hidden_extras,
    session_of,
)
from openai_api.thinking import may_call, with_thoughts
from openai_api.thought_count import ThoughtCount
from openai_api.tool_parsers.tool_parser import Functions
from openai_api.usage import TokenCount
from runtime.client.generation_stream import GenerationInput
from runtime.client.replica_router import wanted_rank
from runtime.errors import InvalidRequest
from runtime.eventloop.heavy_work import aside
from runtime.extras.hidden_states.answer import HiddenAnswer
from runtime.requests.extra_spec import ExtraSpec
from runtime.requests.request_spec import RequestSpec, RowSpec
from runtime.requests.sampling_params import (
    SamplingParams,
    ThoughtTexts,
    check_priority,
    nth_sample,
)
from runtime.service.adapter_names import named_adapter
from runtime.service.cache_break import CacheBreak, cached_prefix, check_reported
from runtime.service.generation import Generation, generate, new_id, sample_rids
from runtime.text.decoders import TextDecoder
from runtime.text.thoughts import ThoughtScan

# Number of the prompt's last tokens that the text decoder reads before the output: the text of the
# first output tokens may depend on them.
_PROMPT_TAIL = 8


@dataclass(frozen=True)
class ChatRun:
    """The samples of one answer, which are admitted but not read yet.

    Attributes:
        id: the answer's id; aborting this id aborts all samples.
        choices: one for each sample, still empty.
        generation: the engine's output, a stream for each choice.
    """

    id: str
    choices: list[ChatChoice]
    generation: Generation


async def open_chat(
    body: ChatCompletionRequest,
    context: OpenAIContext,
    id_prefix: str = "chatcmpl",
    prompt: ChatPrompt | None = None,
    *,
    cuts_output: bool = False,
) -> ChatRun:
    """Check a request, render its prompt and admit its samples.

    Args:
        body: the decoded body.
        context: the server's context.
        id_prefix: prefix of the answer's id, if the request names no `rid`.
        prompt: a prompt to use instead of rendering the messages.
        cuts_output: whether a request for more tokens than fit after the prompt is accepted. The
            answer then ends at the context length.

    Raises:
        InvalidRequest: the first error found.
    """
    checked = await aside(body, _checked, body, context)
    adapter_id = await named_adapter(context.service, body.model, body.lora_path)
    with WireNames(checked.max_tokens_name, "top_logprobs"):
        sampling = await constrained(body, checked.sampling, context)
        if prompt is None:
            prompt = await build_chat_prompt(body, context)
        sampling = with_thoughts(sampling, body, prompt, context)
        calls_freely = may_call(body, sampling)
        thoughts = _thought_texts(body, prompt, context, calls_freely)
        if sampling.stop or sampling.stop_regex:
            sampling = msgspec.structs.replace(sampling, thought_texts=thoughts)
        session = session_of(body)
        if session is not None and prompt.images:
            raise InvalidRequest("Images cannot come with a session.", param="session_params")
        answer_id = new_id(id_prefix, body.rid)
        broken = await _cache_break(body, prompt, context)
        inputs = [
            GenerationInput(
                prompt.input_ids,
                RequestSpec(
                    row=RowSpec(
                        sampling=nth_sample(sampling, index),
                        extras=checked.extras,
                        adapter_id=adapter_id,
                    ),
                    rid=rid,
                    stream=bool(body.stream),
                    explicit_max_new_tokens=checked.has_max_tokens and not cuts_output,
                    cache_namespace=cache_namespace(body),
                    priority=check_priority(body.priority),
                    images=prompt.images,
                    dp_rank=wanted_rank(body.routed_dp_rank, body.data_parallel_rank),
                ),
            )
            for index, rid in enumerate(sample_rids(answer_id, sampling.n))
        ]
        functions = offered_functions(body)
        choices = [
            _choice(index, body, prompt, context, calls_freely, functions, thoughts)
            for index in range(sampling.n)
        ]
        for choice in choices:
            choice.count.cache_break, choice.calls = broken, checked.forms.writer()
        generation = await generate(context.service, inputs, session=session)
    return ChatRun(answer_id, choices, generation)


class _Checked(NamedTuple):
    """What follows from a request's fields, which have been checked.

    Attributes:
        forms: in which form the answer reports calls.
        extras: the requested outputs besides tokens.
        sampling: sampling parameters, still without the grammars of tools and the thoughts.
        max_tokens_name: the field that sets the output limit, for error messages.
        has_max_tokens: whether that field is set.
    """

    forms: CallForms
    extras: list[ExtraSpec]
    sampling: SamplingParams
    max_tokens_name: str
    has_max_tokens: bool


def _checked(body: ChatCompletionRequest, context: OpenAIContext) -> _Checked:
    forms = settled(body)
    check_rid(body.rid)
    logprobs = chat_spec(body.logprobs, body.top_logprobs)
    extras = [
        *([] if logprobs is None else [logprobs.extra()]),
        *hidden_extras(body, context.service.features.offered),
    ]
    name, max_tokens = _max_tokens(body)
    with WireNames(name, "top_logprobs"):
        sampling = _sampling(body, max_tokens, context)
    return _Checked(forms, extras, sampling, name, max_tokens is not None)


def settled(body: ChatCompletionRequest) -> CallForms:
    """Check a request, and return the forms in which its answer reports tool calls.

    Raises:
        InvalidRequest: the first error found.
    """
    forms = settle_tools(body)
    check_chat_request(body)
    return forms


async def _cache_break(
    body: ChatCompletionRequest, prompt: ChatPrompt, context: OpenAIContext
) -> CacheBreak | None:
    if not body.return_cache_break:
        return None
    check_reported(context.service, "return_cache_break")
    namespace = cache_namespace(body)
    found = await cached_prefix(context.service, prompt.input_ids, namespace, prompt.images)
    return found.broken


def _max_tokens(body: ChatCompletionRequest) -> tuple[str, int | None]:
    for name in ("max_completion_tokens", "max_tokens"):
        value: int | None = getattr(body, name)
        if value is None:
            continue
        if value < 1:
            raise InvalidRequest(f"{name} must be at least 1, got {value}.", param=name)
        return name, value
    return "max_tokens", None


def _sampling(
    body: ChatCompletionRequest, max_tokens: int | None, context: OpenAIContext
) -> SamplingParams:
    defaults = {**context.model_defaults, **context.service.sampling_defaults}
    # The texts of special tokens may mark calls or thoughts, so they must be in the output.
    if tool_names(body) or (_separates(body) and context.parsers.hidden_markers):
        body.skip_special_tokens = False
    return sampling_of(body, max_tokens, defaults, context.service.client.limits.vocab_size)


def _separates(body: ChatCompletionRequest) -> bool:
    return body.separate_reasoning is not False


def _thought_texts(
    body: ChatCompletionRequest, prompt: ChatPrompt, context: OpenAIContext, calls_freely: bool
) -> ThoughtTexts | None:
    """Return the texts that mark the answer's thoughts; `None` if thoughts stay in the content."""
    kind = context.parsers.splitting(
        separate_reasoning=_separates(body), forces_call=forces_call(body)
    )
    if kind is None:
        return None
    return thought_texts(kind, prompt_is_open=prompt.is_open, may_call=calls_freely)


def _choice(
    index: int,
    body: ChatCompletionRequest,
    prompt: ChatPrompt,
    context: OpenAIContext,
    calls_freely: bool,
    functions: Functions,
    thoughts: ThoughtTexts | None,
) -> ChatChoice:
    ids = None
    if context.id_form is not None:
        num_calls = sum(len(message.tool_calls or ()) for message in body.messages)
        ids = AnswerIds(context.id_form, num_calls)
    parser: OutputParser = context.parsers.make(
        prompt_is_open=prompt.is_open,
        separate_reasoning=_separates(body),
        stream_reasoning=body.stream_reasoning is not False,
        functions=functions,
        max_calls=1 if body.parallel_tool_calls is False else None,
        forces_call=forces_call(body),
        may_call=calls_freely,
        ids=ids,
    )
    thinking = context.parsers.thinking if _separates(body) else None
    if thinking is not None:
        thinking = thinking.where(may_call=calls_freely)
    pieces = context.service.token_pieces

    def decoder() -> TextDecoder:
        return pieces.decoder(
            skip_special_tokens=body.skip_special_tokens is not False,
            prompt_tail=prompt.input_ids[-_PROMPT_TAIL:],
        )

    by_text = logprobs = None
    if thoughts is not None and thinking is None:
        by_text = ThoughtCount(ThoughtScan(thoughts), decoder())
    if body.logprobs:
        kept_in = thoughts if parser.splits_thoughts else None
        scan = None if kept_in is None else ThoughtScan(kept_in)
        logprobs = AnswerLogprobs(pieces, decoder(), scan)
    num_image_tokens = sum(each.image.num_tokens for each in prompt.images)
    count = TokenCount(thinking, by_text=by_text, images=num_image_tokens)
    hidden = None
    if body.return_hidden_states:
        hidden = HiddenAnswer(context.service.model.hidden_size, only_last=True)
    return ChatChoice(index, parser, count, logprobs=logprobs, hidden=hidden)
