"""What routes and middlewares share: one object, built by `launch`, handed to each of them."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

from runtime.checkpoint.model_spec import ModelSpec
from runtime.client.recorder import RecordingClient
from runtime.client.sessions import Sessions
from runtime.client.status import EngineStatus
from runtime.config.options import ServerConfig
from runtime.text.token_pieces import TokenPieces
from runtime.text.tokenizer import Tokenizer
from server.native.tensor_request import Features

if TYPE_CHECKING:
    from server.weight_control import WeightControl


@dataclass
class Lifecycle:
    """Where the server is between its first and its last request.

    Attributes:
        warmed_up: a first token of our own was generated, or nobody asked for one.
        draining: it was told to leave; what runs may finish.
    """

    warmed_up: bool = False
    draining: bool = False
    launched_at: float = field(default_factory=time.monotonic)


@dataclass(kw_only=True)
class ServerContext:
    """The server as its routes see it.

    Attributes:
        config: resolved; what `/server_info` shows.
        sampling_defaults: from `--preferred-sampling-params`, native names, checked.
        status: the engine's and each replica's, kept current by their owner.
        weights: changes and pauses; set once the owner of the processes is there.
    """

    config: ServerConfig
    model: ModelSpec
    tokenizer: Tokenizer
    client: RecordingClient
    status: EngineStatus
    version: str
    sampling_defaults: dict[str, object] = field(default_factory=dict)
    lifecycle: Lifecycle = field(default_factory=Lifecycle)
    weights: WeightControl = field(init=False)

    @property
    def weight_version(self) -> str:
        """Label of the weights that are loaded now."""
        return self.client.loaded.version

    @cached_property
    def token_pieces(self) -> TokenPieces:
        """Text of single tokens, for log-probabilities."""
        return TokenPieces(self.tokenizer)

    @cached_property
    def sessions(self) -> Sessions:
        """Contexts that requests go on from."""
        return Sessions(self.client.is_running, self.client.abort, self.tokenizer.bos_token_id)

    @cached_property
    def features(self) -> Features:
        """What requests may ask for in this server."""
        scheduling = self.config.scheduling
        return Features(
            hidden_size=self.model.hidden_size,
            offered=frozenset({"hidden_states"} if scheduling.enable_return_hidden_states else ()),
            input_embeds=scheduling.disable_radix_cache,
        )
