"""`Engine` runs a model for a Python program, without HTTP."""

from __future__ import annotations

import asyncio
import dataclasses
import sys
import warnings
import weakref
from collections.abc import Coroutine, Sequence
from typing import Any, Literal, NoReturn, TypeVar, overload

from headrace.engine.adapter_methods import AdapterMethods
from headrace.engine.call_arguments import build_body, build_options
from headrace.engine.chunks import AsyncChunkIterator, ChunkIterator
from headrace.engine.core import EngineCore
from headrace.engine.engine_errors import FeatureNotSupportedError, translated
from headrace.engine.generate_calls import generate_all, open_request
from headrace.engine.later import LATER
from headrace.engine.on_loop import waiting
from headrace.engine.own_images import inline_images
from headrace.engine.score_methods import ScoreMethods
from headrace.engine.server_args import ServerArgs, read_keywords
from headrace.engine.tokenizer_manager import TokenizerManager
from headrace.engine.vectors import VectorMethods
from headrace.engine.weight_methods import WeightMethods
from runtime.ipc.messages import ControlReply, FreezeGarbage
from runtime.service.context import ServiceContext
from runtime.service.describe import describe_model, describe_server
from runtime.service.expert_records import record_experts
from runtime.service.generate_request import GenerateBody
from runtime.service.live_options import change_options
from runtime.service.profiling import ProfileBody, start_profile, stop_profile

T = TypeVar("T")
Prompt = str | Sequence[str]
Ids = Sequence[int] | Sequence[Sequence[int]]
Sampling = dict[str, Any] | Sequence[dict[str, Any]]

_SCHEDULER_INFO = ("status", "max_total_num_tokens", "max_req_input_len")
_IMAGES = "image_data"
_DOCUMENT_MODULE = "headrace.test.doc_patch"


class Engine(ScoreMethods, WeightMethods, AdapterMethods, VectorMethods):
    """A model that runs in its own processes and is called from this process.

    Its methods may be called from any thread and any event loop, including a running one. Several
    engines may exist at the same time. `with Engine(...) as engine:` shuts the engine down at the
    end of the block.

    Attributes:
        server_args: every argument of the engine with its final value.
    """

    server_args: ServerArgs

    def __init__(self, *, server_args: ServerArgs | None = None, **keywords: Any) -> None:
        """Load a model and wait until it answers.

        Args:
            server_args: all arguments as one object, instead of `keywords`.
            **keywords: the server's options with underscores: `model_path`, `dtype`,
                `max_total_tokens`, ... Two defaults differ from the server's: `log_level` is
                "error", and `incremental_streaming_output` is true.

        Raises:
            TypeError: an unknown argument.
            ValueError: a wrong value, or a feature that is not supported.
            EngineStartError: the model cannot be loaded.
        """
        if server_args is not None:
            if keywords:
                raise TypeError("Engine() takes server_args or keyword arguments, not both.")
            keywords = dataclasses.asdict(server_args)
            keywords["incremental_streaming_output"] = (
                True
                if server_args.incremental_streaming_output is None
                else server_args.incremental_streaming_output
            )
        arguments, notices = read_keywords({**_defaults(), **keywords})
        for notice in notices:
            warnings.warn(notice, stacklevel=2)
        self._core = core = EngineCore(arguments.to_config(incremental=True))
        self.server_args = ServerArgs.from_config(core.context.config)
        # The finalizer runs when the engine is garbage-collected, or before the interpreter exits.
        self._finalizer = weakref.finalize(self, core.close)

    @property
    def context(self) -> ServiceContext:
        """The service context that the server's routes use, for code that calls their functions."""
        return self._core.context

    @property
    def tokenizer_manager(self) -> TokenizerManager:
        """An object with the tokenizer, and with aborts and pauses under SGLang's names."""
        return TokenizerManager(self)

    @property
    def scheduler_info(self) -> dict[str, Any]:
        """Three values that are known since the start, under SGLang's names.

        `get_server_info` returns more.

        Returns:
            A dict with `status`, `max_total_num_tokens` (the KV pool's size in tokens) and
            `max_req_input_len` (the longest prompt in tokens).

        Raises:
            EngineDeadError: a process of the engine died, or the engine was shut down.
        """
        info = self.get_server_info()
        return {name: info[name] for name in _SCHEDULER_INFO}

    # ---- generation ----

    @overload
    def generate(
        self,
        prompt: Prompt | None = None,
        sampling_params: Sampling | None = None,
        input_ids: Ids | None = None,
        *,
        stream: Literal[True],
        **options: Any,
    ) -> ChunkIterator: ...

    @overload
    def generate(
        self,
        prompt: Prompt | None = None,
        sampling_params: Sampling | None = None,
        input_ids: Ids | None = None,
        *,
        stream: bool = False,
        progress_bar: bool | None = None,
        **options: Any,
    ) -> Any: ...

    def generate(
        self,
        prompt: Prompt | None = None,
        sampling_params: Sampling | None = None,
        input_ids: Ids | None = None,
        *,
        stream: bool = False,
        progress_bar: bool | None = None,
        **options: Any,
    ) -> Any:
        """Generate text that continues one prompt or several.

        Args:
            prompt: a text, or a list of texts.
            sampling_params: a dict for all prompts, or a list with one dict for each; keys as in
                the native API (`max_new_tokens`, `temperature`, `top_p`, `stop`, `n`, ...).
            input_ids: token ids instead of `prompt`, flat or one list for each prompt.
            stream: return an iterator of chunks at once.
            progress_bar: whether to show a progress bar; by default for large batches on a
                terminal.
            **options: other fields of the native API: `rid`, `priority`, `cache_salt`, `extra_key`,
                `return_prompt_token_ids`, `return_logprob`, `logprob_start_len`,
                `top_logprobs_num`, `token_ids_logprob`, `return_text_in_logprobs`,
                `return_hidden_states`, `return_entropy`, `return_routed_experts`,
                `routed_experts_start_len`, `input_embeds` (instead of a prompt), `session_params`,
                `image_data` (an image or a list of them, each with its placeholder in the prompt: a
                path, an address, a data URL, base64, bytes or a PIL image; for several prompts one
                image for all, or an entry for each).

        Returns:
            A dict (`text`, `output_ids`, `meta_info`) for one prompt; a list of dicts, in order,
            for a list of prompts or with `n` above 1; an iterator of such dicts with `stream`. A
            chunk's `text` and `output_ids` hold only the new output, or all output so far with
            `incremental_streaming_output=False`. The chunk's `text_delta` holds the new text in
            both cases. In a batch, the chunk's `index` says which output the chunk belongs to.

        Raises:
            ValueError: the request is invalid; the engine keeps working.
            TypeError: an unknown option.
            EngineDeadError: a process of the engine died, or the engine was shut down.
        """
        if self._is_empty(prompt, input_ids):
            return ChunkIterator(self._core, self, None) if stream else []
        self._inline_images(options)
        body = self._body(prompt, sampling_params, input_ids, stream, options)
        if stream:
            request = self._core.call(open_request(self._core, body, self._is_incremental))
            return ChunkIterator(self._core, self, request)
        return self._core.call(generate_all(self._core, body, progress_bar))

    @overload
    async def async_generate(
        self,
        prompt: Prompt | None = None,
        sampling_params: Sampling | None = None,
        input_ids: Ids | None = None,
        *,
        stream: Literal[True],
        **options: Any,
    ) -> AsyncChunkIterator: ...

    @overload
    async def async_generate(
        self,
        prompt: Prompt | None = None,
        sampling_params: Sampling | None = None,
        input_ids: Ids | None = None,
        *,
        stream: bool = False,
        progress_bar: bool | None = None,
        **options: Any,
    ) -> Any: ...

    async def async_generate(
        self,
        prompt: Prompt | None = None,
        sampling_params: Sampling | None = None,
        input_ids: Ids | None = None,
        *,
        stream: bool = False,
        progress_bar: bool | None = None,
        **options: Any,
    ) -> Any:
        """Do the same as `generate`, but as a coroutine; with `stream` return an async iterator."""
        if self._is_empty(prompt, input_ids):
            return AsyncChunkIterator(self._core, self, None) if stream else []
        if options.get(_IMAGES) is not None:
            # Inlining images may read files and fetch URLs, so it runs in a thread.
            await asyncio.to_thread(self._inline_images, options)
        body = self._body(prompt, sampling_params, input_ids, stream, options)
        core = self._core
        if stream:
            request = await core.call_async(open_request(core, body, self._is_incremental))
            return AsyncChunkIterator(core, self, request)
        return await core.call_async(generate_all(core, body, progress_bar))

    def _inline_images(self, options: dict[str, Any]) -> None:
        if _IMAGES in options:
            with translated():
                options[_IMAGES] = inline_images(options[_IMAGES], sees=self.context.features.sees)

    @property
    def _is_incremental(self) -> bool:
        return self._core.context.config.http.incremental_streaming_output

    @staticmethod
    def _is_empty(prompt: Any, input_ids: Any) -> bool:
        return input_ids is None and isinstance(prompt, list | tuple) and not prompt

    @staticmethod
    def _body(
        prompt: Any, sampling_params: Any, input_ids: Any, stream: bool, options: dict[str, Any]
    ) -> GenerateBody:
        with translated():
            return build_body(prompt, sampling_params, input_ids, stream, options)

    # ---- control and information ----

    def abort(self, rid: str = "", *, abort_all: bool = False) -> None:
        """End the request or batch with this `rid`, or all requests.

        The calls that wait for these requests return the text so far.
        """
        self._core.call(self._abort(rid, abort_all))

    async def _abort(self, rid: str, abort_all: bool) -> None:
        client = self._core.context.client
        if abort_all:
            client.abort_all()
        elif rid:
            client.abort(rid)

    @waiting
    async def flush_cache(self) -> ControlReply:
        """Drop the prefix cache; `success` is false while requests run."""
        return await self._core.context.client.calls.flush_cache()

    async def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine that uses `context` on the engine's event loop, and await its result.

        Raises:
            EngineDeadError: the engine died meanwhile, even if the coroutine handled the error.
        """
        result = await self._core.call_async(coroutine)
        with translated():
            self._core.check_alive()
        return result

    @waiting
    async def start_profile(self, /, **options: Any) -> None:
        """Record the next steps with torch's profiler; takes the fields of `/start_profile`.

        The fields include `output_dir`, `num_steps` (after which the trace is written
        automatically), `activities`, `profile_by_stage`, `with_stack`, `record_shapes`,
        `profile_prefix`, `profile_id`, ...
        """
        body = build_options("start_profile", ProfileBody, options)
        await start_profile(self._core.context, body, anywhere=True)

    @waiting
    async def stop_profile(self) -> None:
        """Write the recorded steps; the files exist when this returns."""
        await stop_profile(self._core.context.client)

    @waiting
    async def start_expert_distribution_record(self) -> None:
        """Begin to record which experts of a mixture-of-experts model are chosen.

        The engine must have been created with `expert_distribution_recorder_mode`.
        """
        await record_experts(self._core.context.client, "start")

    @waiting
    async def stop_expert_distribution_record(self) -> None:
        """Stop recording experts; the recorded counts stay until they are written or cleared."""
        await record_experts(self._core.context.client, "stop")

    @waiting
    async def dump_expert_distribution_record(self) -> None:
        """Write the recorded counts of experts to a file, then clear them."""
        await record_experts(self._core.context.client, "dump")

    @waiting
    async def set_internal_state(self, server_args: dict[str, float]) -> list[bool]:
        """Change options of the running engine: `max_queued_requests`, `decode_log_interval`.

        Returns:
            `[True]`, or `[False]` for other options of SGLang, which have no effect here.
        """
        return [await change_options(self._core.context, server_args)]

    @waiting
    async def freeze_gc(self) -> None:
        """Collect garbage in the worker and exclude what remains from later collections."""
        await self._core.context.client.calls.control(FreezeGarbage)

    @waiting
    async def open_session(
        self,
        capacity_of_str_len: int,
        session_id: str | None = None,
        streaming: bool = False,
        timeout: float | None = None,  # noqa: ASYNC109  # of the session, and SGLang's name
    ) -> str | None:
        """Open a session: a stored context that later requests continue.

        A request joins the session with `session_params={"id": ..., "rid": ...}`.

        Args:
            capacity_of_str_len: number of tokens that the session may hold.
            session_id: the session's id; random by default.
            streaming: a request without `rid` continues the latest request of the session.
            timeout: seconds without use after which the session is closed; an hour by default.

        Returns:
            The session's id, or `None` if a session with this id is already open.
        """
        sessions = self._core.context.sessions
        if session_id is not None and session_id in sessions:
            return None
        return sessions.open(
            capacity_of_str_len, session_id, streaming=streaming, timeout_s=timeout
        )

    def close_session(self, session_id: str) -> None:
        """Close a session; a session that is not open is ignored."""
        self._core.call(self._close_session(session_id))

    async def _close_session(self, session_id: str) -> None:
        self._core.context.sessions.close(session_id)

    @waiting
    async def get_server_info(self) -> dict[str, Any]:
        """Return every argument with its value, and the worker's limits and current load."""
        return describe_server(self._core.context)

    @waiting
    async def get_model_info(self) -> dict[str, Any]:
        """Return the model's path, type, weight version and a few more properties."""
        return describe_model(self._core.context)

    # ---- end ----

    def shutdown(self) -> None:
        """End the engine's processes and wait until they have exited; may be repeated."""
        self._finalizer()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()

    def __getattr__(self, name: str) -> NoReturn:
        missing = LATER.get(name)
        if missing is None:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        raise FeatureNotSupportedError(f"Engine.{name}: {missing} not supported yet.")


def _defaults() -> dict[str, Any]:
    defaults: dict[str, Any] = {"log_level": "error"}
    # If a cell of SGLang's documentation has imported this module, engines get other defaults: the
    # cells run several engines on one device.
    document = sys.modules.get(_DOCUMENT_MODULE)
    if document is not None:
        defaults.update(document.DOCUMENT_ARGUMENTS)
    return defaults
