"""The context of the OpenAI routes: the service, and objects that only these routes need."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

from openai_api.batches.batch_service import BatchService
from openai_api.call_ids import IdForm
from openai_api.chat_template import ChatTemplate, load_chat_template
from openai_api.infill import Infill
from openai_api.parser_choice import ParserNames, choose_parsers, id_form_of
from openai_api.parsers import ParserSet
from openai_api.responses.background_responses import BackgroundResponses
from openai_api.responses.response_store import ResponseStore, open_store
from openai_api.sampling import model_sampling_defaults
from openai_api.split_tokens import SplitTokens
from runtime.service.context import ServiceContext

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class OpenAIContext:
    """The service, and what the OpenAI routes need besides it.

    Attributes:
        service: the context that all APIs share.
        chat_template: the model's chat template; `None` if the model has none. Then chat requests
            are refused.
        model_defaults: sampling defaults from the model's files, used for chat only. Defaults of
            the operator take precedence.
        parser_names: the chosen parsers for reasoning and for tool calls.
        parsers: makes the parsers of an answer.
        created: Unix time that is reported as the model's creation time.
        responses: stored responses, which later requests continue; None if they are not stored.
        background_responses: responses that run in the background.
        batch_service: files and batches; None if they are not stored.
    """

    service: ServiceContext
    chat_template: ChatTemplate | None = None
    model_defaults: Mapping[str, object] = field(default_factory=dict)
    parser_names: ParserNames = field(default_factory=lambda: ParserNames(None, None))
    parsers: ParserSet = field(default_factory=ParserSet)
    created: int = field(default_factory=lambda: int(time.time()))
    responses: ResponseStore | None = None
    background_responses: BackgroundResponses = field(default_factory=BackgroundResponses)
    batch_service: BatchService | None = None

    @property
    def sees(self) -> bool:
        """Whether the model takes images."""
        return self.service.model.vision is not None

    @cached_property
    def id_form(self) -> IdForm | None:
        """The form of call ids that the model needs; None if it accepts any id."""
        return id_form_of(self.parsers.tools, self.chat_template)

    @cached_property
    def split_tokens(self) -> SplitTokens:
        """Encodes text without special tokens, for `split_special_tokens`; made on first use."""
        written = "" if self.chat_template is None else self.chat_template.written_by_all
        return SplitTokens(self.service.tokenizer, written)

    @cached_property
    def infill(self) -> Infill | None:
        """The prompt format for `suffix`; None if the model cannot fill in the middle."""
        return Infill.of(self.service.tokenizer)


def make_context(service: ServiceContext) -> OpenAIContext:
    """Make the context from the server's options, with the compiled chat template.

    Raises:
        StartupError: the template cannot be parsed, or a parser's name is unknown.
    """
    http, tokenizer = service.config.http, service.tokenizer
    use_model_defaults = http.sampling_defaults == "model"
    template = load_chat_template(
        http.chat_template, tokenizer.chat_template, tokenizer.named_tokens
    )
    if template is not None and not tokenizer.is_missing:
        logger.info("Chat content: %s, as the chat template reads it", template.describe_content())
    names = choose_parsers(
        http.reasoning_parser,
        http.tool_call_parser,
        None if tokenizer.is_missing else template,
        tokenizer.response_template,
    )
    return OpenAIContext(
        service=service,
        chat_template=template,
        model_defaults=(
            model_sampling_defaults(service.model.generation_defaults) if use_model_defaults else {}
        ),
        parser_names=names,
        parsers=ParserSet.choose(names.reasoning, names.tools, tokenizer, names.described),
        responses=open_store(http.response_store, http.response_store_mb),
    )
