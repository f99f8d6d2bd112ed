"""The base classes of back ends; users subclass one, with plain functions or with coroutines.

The frontend calls only the coroutines, on its own loop, one at a time for each program:

| coroutine | plain function that it calls unless overridden | for |
|---|---|---|
| `async_generate` | `generate` | a generation |
| `async_generate_stream` | `generate_stream` | a generation of a program that streams |
| `async_select` | `select` | a decision between texts |
| `async_cache_prefix` | `cache_prefix` | a text that several requests will begin with |
| `async_fill_turn` | `fill_turn` | a whole turn of constants and generations, as one call |
| `async_flush_cache` | `flush_cache` | the module function |
| `async_get_server_info` | `get_server_info` | the module function |

A plain function runs in a thread, so it may block; a coroutine may not. A subclass overrides one
form of each. Cancelling a coroutine (a program is cancelled, a stream is closed early) must abort
the request. A plain function cannot be interrupted; its result is dropped.

A back end that wraps another one (to record, to replay, to count) overrides the coroutines and
passes their arguments on. Everything that a request depends on is in `Prompt` and in the sampling
parameters; everything that it produced is in the (text, meta) that is returned. For time lines the
frontend keeps the `events` of each program: see `headrace.lang.events`.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from headrace.lang.chat_template import ChatTemplate, get_chat_template
from headrace.lang.choices import ChoicesDecision, ChoicesSamplingMethod
from headrace.lang.core_loop import core
from headrace.lang.sampling import SglSamplingParams

if TYPE_CHECKING:
    from headrace.lang.media_input import Media

Meta = dict[str, Any]
"""The meta information of a generation. `prompt_tokens`, `cached_tokens`, `completion_tokens`, `id`
and `finish_reason` mean what they mean in the native API, and are omitted where unknown."""

Generated = tuple[str | list[str], Any]
"""The text and its meta information; with n above 1, a list of each."""

Message = dict[str, Any]
"""A turn as OpenAI's API writes it: `role`, and `content` as text or as a list of parts."""


class Prompt(Protocol):
    """The part of a program that a back end reads; `StreamExecutor` implements it.

    It does not change while the back end works on a request of this program.

    Attributes:
        sid: identifies the program, or the child that `fork` made.
        text_: the whole text so far with its markup; a generation continues it.
        messages_: the turns that are closed. A back end must not change the list.
        cur_role: role of the open turn, or None.
        cur_role_begin_pos: where in `text_` the open turn's own text begins.
        images_: all images and videos, in order of appearance in `text_`.
        cur_images: the images and videos of the open turn.
        num_api_spec_tokens: the argument of the decorator `@function`, or None.
        stream: whether the program streams.
    """

    sid: str
    text_: str
    messages_: list[Message]
    cur_role: str | None
    cur_role_begin_pos: int
    images_: list[Media]
    cur_images: list[Media]
    num_api_spec_tokens: int | None
    stream: bool


class TurnPart(Protocol):
    """A part of a turn to fill: a constant with `text`, or a generation with `sampling_params`."""

    text: str | None
    sampling_params: SglSamplingParams | None


class BaseBackend:
    """Runs the generations of programs. The base class runs none, which is enough for tracing.

    Attributes:
        support_concate_and_append: whether texts can be joined by concatenating their KV cache.
        support_api_speculation: whether `async_fill_turn` works: with `num_api_spec_tokens` the
            parts of a turn are collected and filled when the turn ends.
        caches_prefixes: whether `async_cache_prefix` makes later requests cheaper; if not, the
            frontend does not call it.
        chat_template: the markup of turns.
    """

    support_concate_and_append = False
    support_api_speculation = False
    caches_prefixes = False

    def __init__(self) -> None:
        """Start with the generic template, which has no markup of a certain model."""
        self.chat_template: ChatTemplate = get_chat_template("default")

    # ---- what it is ----

    def get_model_name(self) -> str:
        """The model's name or path.

        Raises:
            NotImplementedError: this back end does not know its model.
        """
        raise NotImplementedError(f"{type(self).__name__} does not name its model.")

    def get_chat_template(self) -> ChatTemplate:
        """The markup of turns; called once by each program."""
        return self.chat_template

    def shutdown(self) -> None:
        """Release the back end's resources."""

    # ---- plain functions: override these, or the coroutines below ----

    def generate(self, s: Prompt, sampling_params: SglSamplingParams) -> Generated:
        """Continue `s.text_` (or answer `s.messages_`).

        Args:
            s: the program.
            sampling_params: all parameters, the program's defaults included; `stop` already
                contains the chat template's stop strings.

        Returns:
            The text and its `Meta`; with `n` above 1 a list of texts, of which the first continues
            the program.
        """
        raise NotImplementedError(self._cannot("generate"))

    def generate_stream(
        self, s: Prompt, sampling_params: SglSamplingParams
    ) -> Iterator[tuple[str, Meta]]:
        """Generate as `generate` does, but yield pieces: new text, and meta information so far."""
        raise NotImplementedError(self._cannot("stream"))

    def select(
        self,
        s: Prompt,
        choices: list[str],
        temperature: float,
        choices_method: ChoicesSamplingMethod,
    ) -> ChoicesDecision:
        """Decide which of `choices` continues `s.text_`."""
        raise NotImplementedError(self._cannot("select"))

    def fill_turn(self, s: Prompt, parts: Sequence[TurnPart]) -> list[Generated]:
        """Fill a turn's generations by one call.

        `parts` follow `s.text_[s.cur_role_begin_pos:]`, which is empty.

        Returns:
            One `Generated` for each part that is a generation, in order.
        """
        raise NotImplementedError(self._cannot("fill a turn with one call"))

    def cache_prefix(self, prefix_str: str) -> None:
        """Make requests that begin with `prefix_str` cheaper."""

    def flush_cache(self) -> bool:
        """Clear the cache; returns whether it was cleared."""
        return False

    def get_server_info(self) -> dict[str, Any] | None:
        """What the server reports about itself."""
        return None

    # ---- steps of a program, for back ends with state of their own ----

    def begin_program(self, s: Prompt) -> None:
        """Called when a program begins. Must not block."""

    def end_program(self, s: Prompt) -> None:
        """Called when a program's body has returned and its steps are done. Must not block."""

    def fork_program(
        self, src: Prompt, dst: Prompt, position_ids_offset: list[int] | None = None
    ) -> None:
        """`dst` begins as a copy of `src`; must not block."""

    def uncache_prefix(self, rid: str) -> None:
        """Do nothing; kept for programs that call it."""

    def end_request(self, rid: str | list[str]) -> None:
        """Do nothing; kept for programs that call it."""

    def commit_lazy_operations(self, s: Prompt) -> None:
        """Cache the program's text so far."""
        self.cache_prefix(s.text_)

    def fill_image(self, s: Prompt) -> None:
        """Cache the program's text and images so far."""
        self.commit_lazy_operations(s)

    def concatenate_and_append(self, src_rids: list[str], dst_rid: str) -> None:
        """Join texts by concatenating their KV cache."""
        raise NotImplementedError(self._cannot("join texts by their keys and values"))

    # ---- coroutines: what the frontend calls ----

    async def async_generate(self, s: Prompt, sampling_params: SglSamplingParams) -> Generated:
        """See `generate`."""
        return await core().threads.call(lambda: self.generate(s, sampling_params))

    async def async_generate_stream(
        self, s: Prompt, sampling_params: SglSamplingParams
    ) -> AsyncGenerator[tuple[str, Meta], None]:
        """See `generate_stream`; closing it early must abort the request."""
        threads = core().threads
        pieces = iter(self.generate_stream(s, sampling_params))
        try:
            while (piece := await threads.call(lambda: next(pieces, None))) is not None:
                yield piece
        finally:
            close = getattr(pieces, "close", None)
            if close is not None:
                threads.start(close)

    async def async_select(
        self,
        s: Prompt,
        choices: list[str],
        temperature: float,
        choices_method: ChoicesSamplingMethod,
    ) -> ChoicesDecision:
        """See `select`."""
        return await core().threads.call(
            lambda: self.select(s, choices, temperature, choices_method)
        )

    async def async_fill_turn(self, s: Prompt, parts: Sequence[TurnPart]) -> list[Generated]:
        """See `fill_turn`."""
        return await core().threads.call(lambda: self.fill_turn(s, parts))

    async def async_cache_prefix(
        self,
        prefix_str: str,
        media: Sequence[Media] = (),  # noqa: ARG002  plain functions take text only
    ) -> None:
        """See `cache_prefix`; `media` are the images whose tokens the text contains."""
        await core().threads.call(lambda: self.cache_prefix(prefix_str))

    async def async_flush_cache(self) -> bool:
        """See `flush_cache`."""
        return await core().threads.call(self.flush_cache)

    async def async_get_server_info(self) -> dict[str, Any] | None:
        """See `get_server_info`."""
        return await core().threads.call(self.get_server_info)

    def _cannot(self, what: str) -> str:
        return f"The back end {type(self).__name__} cannot {what}."


class AsyncBackend(BaseBackend):
    """A back end that is written as coroutines. Its plain functions wait for the coroutines."""

    def generate(self, s: Prompt, sampling_params: SglSamplingParams) -> Generated:
        return core().call(self.async_generate(s, sampling_params))

    def generate_stream(
        self, s: Prompt, sampling_params: SglSamplingParams
    ) -> Iterator[tuple[str, Meta]]:
        pieces = self.async_generate_stream(s, sampling_params)
        try:
            while (piece := core().call(_next(pieces))) is not None:
                yield piece
        finally:
            core().call(pieces.aclose())

    def select(
        self,
        s: Prompt,
        choices: list[str],
        temperature: float,
        choices_method: ChoicesSamplingMethod,
    ) -> ChoicesDecision:
        return core().call(self.async_select(s, choices, temperature, choices_method))

    def fill_turn(self, s: Prompt, parts: Sequence[TurnPart]) -> list[Generated]:
        return core().call(self.async_fill_turn(s, parts))

    def cache_prefix(self, prefix_str: str) -> None:
        core().call(self.async_cache_prefix(prefix_str))

    def flush_cache(self) -> bool:
        return core().call(self.async_flush_cache())

    def get_server_info(self) -> dict[str, Any] | None:
        return core().call(self.async_get_server_info())

    async def async_generate(self, s: Prompt, sampling_params: SglSamplingParams) -> Generated:
        raise NotImplementedError(self._cannot("generate"))

    async def async_generate_stream(
        self, s: Prompt, sampling_params: SglSamplingParams
    ) -> AsyncGenerator[tuple[str, Meta], None]:
        """Yield one piece from `async_generate`; a subclass may override this."""
        text, meta = await self.async_generate(s, sampling_params)
        yield (text if isinstance(text, str) else text[0]), meta

    async def async_select(
        self,
        s: Prompt,
        choices: list[str],
        temperature: float,
        choices_method: ChoicesSamplingMethod,
    ) -> ChoicesDecision:
        raise NotImplementedError(self._cannot("select"))

    async def async_fill_turn(self, s: Prompt, parts: Sequence[TurnPart]) -> list[Generated]:
        raise NotImplementedError(self._cannot("fill a turn with one call"))

    async def async_cache_prefix(self, prefix_str: str, media: Sequence[Media] = ()) -> None:
        """Do nothing unless overridden."""

    async def async_flush_cache(self) -> bool:
        return False

    async def async_get_server_info(self) -> dict[str, Any] | None:
        return None


async def _next(pieces: AsyncGenerator[tuple[str, Meta], None]) -> tuple[str, Meta] | None:
    return await anext(pieces, None)
