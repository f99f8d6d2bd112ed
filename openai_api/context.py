"""What the OpenAI routes know of the server: one object, built by `server` for the router."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property

from openai_api.chat_template import ChatTemplate, load_chat_template
from openai_api.parsers import ParserSet
from openai_api.sampling import model_sampling_defaults
from runtime.checkpoint.model_spec import ModelSpec
from runtime.client.client import EngineClient
from runtime.client.generation import GenerationInput, GenerationStream
from runtime.client.sessions import SessionParams, Sessions
from runtime.config.options import ServerConfig
from runtime.text.token_pieces import TokenPieces
from runtime.text.tokenizer import Tokenizer


@dataclass(frozen=True, kw_only=True)
class OpenAIContext:
    """The server as the OpenAI routes see it.

    Attributes:
        client: where requests go; it also records them for metrics and the request log.
        served_model_name: the one name that `/v1/models` lists; other weights may bring another.
        weight_version: label of the weights that are loaded now.
        chat_template: `None` when the model has none: chat is then refused with advice.
        sampling_defaults: the model's own, native names, for chat only.
        preferred_sampling_params: the operator's, native names and checked, over the model's.
        enable_cache_report: whether `usage` tells cached prompt tokens.
        sessions: contexts that requests go on from.
        hidden_states: whether requests may ask for them.
        created: Unix time shown as the model's age.
    """

    client: EngineClient
    tokenizer: Tokenizer
    model_config: ModelSpec
    served_model_name: Callable[[], str]
    sessions: Sessions
    hidden_states: bool = False
    weight_version: Callable[[], str] = lambda: "default"
    chat_template: ChatTemplate | None = None
    sampling_defaults: Mapping[str, object] = field(default_factory=dict)
    preferred_sampling_params: Mapping[str, object] = field(default_factory=dict)
    enable_cache_report: bool = False
    parsers: ParserSet = field(default_factory=ParserSet)
    created: int = field(default_factory=lambda: int(time.time()))

    def generator(
        self, session: SessionParams | None
    ) -> Callable[[GenerationInput], GenerationStream]:
        """What admits a request, as part of a session where one is given."""
        generate = self.client.generate
        if session is None:
            return generate
        return lambda item: self.sessions.generate(session, item, generate)

    @cached_property
    def token_pieces(self) -> TokenPieces:
        """Text of single tokens, for log-probabilities."""
        return TokenPieces(self.tokenizer)


def make_context(
    config: ServerConfig,
    *,
    client: EngineClient,
    tokenizer: Tokenizer,
    model_config: ModelSpec,
    served_model_name: Callable[[], str],
    sessions: Sessions,
    weight_version: Callable[[], str],
    preferred_sampling_params: Mapping[str, object],
) -> OpenAIContext:
    """Build the context from the server's options; compiles the chat template.

    Raises:
        StartupError: the template does not parse, or a parser's name is unknown.
    """
    http = config.http
    use_model_defaults = http.sampling_defaults == "model"
    return OpenAIContext(
        client=client,
        tokenizer=tokenizer,
        model_config=model_config,
        served_model_name=served_model_name,
        sessions=sessions,
        hidden_states=config.scheduling.enable_return_hidden_states,
        weight_version=weight_version,
        chat_template=load_chat_template(
            http.chat_template, tokenizer.chat_template, tokenizer.named_tokens
        ),
        sampling_defaults=(
            model_sampling_defaults(model_config.generation_defaults) if use_model_defaults else {}
        ),
        preferred_sampling_params=preferred_sampling_params,
        enable_cache_report=http.enable_cache_report,
        parsers=ParserSet.choose(http.reasoning_parser, http.tool_call_parser, tokenizer),
    )
