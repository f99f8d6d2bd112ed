"""`Engine.tokenizer_manager`: members of SGLang's tokenizer manager that frameworks use."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from runtime.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from headrace.engine.engine import Engine


class PauseRequest(Protocol):
    """An object with the name of a pause mode, such as SGLang's `PauseGenerationReqInput`."""

    @property
    def mode(self) -> str:
        """The pause mode: `abort`, `retract` or `in_place`."""
        ...


class TokenizerManager:
    """Tokenizer, aborts and pauses of an engine, under the names of SGLang's tokenizer manager.

    A reference to this object keeps the engine alive.
    """

    def __init__(self, engine: Engine) -> None:
        """Store the engine, whose methods are called."""
        self._engine = engine

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer: `encode`, `decode`, `eos_token_id`, `chat_template`, ..."""
        return self._engine.context.tokenizer

    def abort_request(self, rid: str = "", abort_all: bool = False) -> None:
        """Abort the request or batch with this `rid`, or all requests."""
        self._engine.abort(rid, abort_all=abort_all)

    async def pause_generation(self, request: str | PauseRequest = "abort") -> None:
        """Pause generation; `request` is a pause mode, or an object whose `mode` is one.

        Raises:
            ValueError: an unknown mode.
        """
        mode = request if isinstance(request, str) else request.mode
        await self._engine.async_pause_generation(mode)

    async def continue_generation(self, request: object = None) -> None:  # noqa: ARG002
        """Continue generation after a pause; `request` is for compatibility and has no effect."""
        await self._engine.async_continue_generation()
