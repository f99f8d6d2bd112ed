"""`ServiceContext`, the object that routes, application and offline engine share."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property, partial

from runtime.checkpoint.model_spec import ModelSpec
from runtime.client.client import EngineClient
from runtime.client.generation_stream import GenerationInput, GenerationStream
from runtime.client.session_store import SessionParams, Sessions
from runtime.config.options import ServerConfig
from runtime.media.image_loader import ImageLoader
from runtime.media.media_policy import MediaPolicy
from runtime.processes.status import EngineStatus
from runtime.service.changes import Changes
from runtime.service.input_embeds import Features
from runtime.text.token_pieces import TokenPieces
from runtime.text.tokenizer import Tokenizer
from runtime.weights.adapter_control import AdapterControl
from runtime.weights.weight_control import WeightControl


@dataclass
class Lifecycle:
    """State of the server between its first and its last request.

    Attributes:
        warmed_up: the server's warm-up has generated a token, or warm-up is off.
        draining: the server is shutting down; running requests may finish.
        launched_at: `time.monotonic()` at launch, seconds.
    """

    warmed_up: bool = False
    draining: bool = False
    launched_at: float = field(default_factory=time.monotonic)


@dataclass(frozen=True, kw_only=True)
class ServiceContext:
    """The parts of the server that its routes use.

    Attributes:
        config: resolved options, never written. For changed options see `changes`.
        client: sends requests to the workers and returns their streams.
        status: status of the engine and of each replica, updated by the supervisor.
        weights: executes weight updates, and pauses generation.
        adapters: loads and unloads adapters (LoRA), and finds them by name.
        changes: values of options that changed since the start.
        sampling_defaults: checked values of `--preferred-sampling-params`, by native names.
        images: fetches, decodes and scales the images of prompts.
    """

    config: ServerConfig
    model: ModelSpec
    tokenizer: Tokenizer
    client: EngineClient
    status: EngineStatus
    version: str
    weights: WeightControl
    adapters: AdapterControl
    changes: Changes
    sampling_defaults: dict[str, object] = field(default_factory=dict)
    images: ImageLoader = field(default_factory=lambda: ImageLoader(None, MediaPolicy()))
    lifecycle: Lifecycle = field(default_factory=Lifecycle)

    @property
    def weight_version(self) -> str:
        """Label of the weights that are loaded now."""
        return self.client.loaded.version

    @property
    def served_model_name(self) -> str:
        """The name that `/v1/models` lists; it may change with the weights."""
        return self.changes.served_model_name

    @property
    def max_queued_requests(self) -> int | None:
        """Maximum number of waiting requests, without the running ones; `None` for no bound."""
        found = self.changes.options.get(
            "max_queued_requests", self.config.scheduling.max_queued_requests
        )
        return found if isinstance(found, int) else None

    @cached_property
    def token_pieces(self) -> TokenPieces:
        """The text of each token id, for log-probabilities."""
        return TokenPieces(self.tokenizer)

    @cached_property
    def sessions(self) -> Sessions:
        """The sessions of all clients: contexts that later requests may continue."""
        return Sessions(
            self.client.is_running,
            self.client.abort,
            self.tokenizer.bos_token_id,
            has_tenants=self.config.http.api_keys_file is not None,
        )

    def generator(
        self, session: SessionParams | None, *, is_recorded: bool = True
    ) -> Callable[[GenerationInput], GenerationStream]:
        """Return the function that admits a request and returns its stream.

        Args:
            session: the session that the request continues, if any.
            is_recorded: whether metrics and the request log count the request.
        """
        generate = self.client.generate
        if not is_recorded:
            generate = partial(generate, is_recorded=False)
        if session is None:
            return generate
        return lambda item: self.sessions.generate(session, item, generate)

    @cached_property
    def features(self) -> Features:
        """The optional features of `/generate` that this server offers."""
        scheduling = self.config.scheduling
        offered = {
            "hidden_states": scheduling.enable_return_hidden_states,
            "routed_experts": scheduling.enable_return_routed_experts,
        }
        return Features(
            hidden_size=self.model.hidden_size,
            offered=frozenset(name for name, is_offered in offered.items() if is_offered),
            input_embeds=scheduling.disable_radix_cache,
            sees=self.model.vision is not None,
        )
