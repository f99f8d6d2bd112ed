"""A back end for a server with the native API: Headrace or SGLang."""

from __future__ import annotations

import asyncio
import contextlib
import random
import ssl
from collections import deque
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import orjson

from headrace.http_stream import HttpClient, HttpStatusError
from headrace.lang.backend.base import AsyncBackend, Generated, Meta, Prompt
from headrace.lang.backend.classic_select import classic_select
from headrace.lang.backend.presence import Presence
from headrace.lang.backend.scored_select import decide, select_payload
from headrace.lang.chat_template import (
    ChatTemplate,
    get_chat_template,
    get_chat_template_by_model_path,
)
from headrace.lang.choices import ChoicesDecision, ChoicesSamplingMethod
from headrace.lang.core_loop import core
from headrace.lang.global_config import global_config
from headrace.lang.program_errors import BackendError
from headrace.lang.role_markup import template_from_source
from headrace.lang.sampling import SglSamplingParams
from runtime.errors import HeadraceError

if TYPE_CHECKING:
    from headrace.lang.media_input import Media

T = TypeVar("T")

# More connections are useless: a process may have few file descriptors, and a server runs fewer
# requests at a time.
DEFAULT_MAX_CONNECTIONS = 512
_BUSY = frozenset({429, 503})
_NO_ROUTE = frozenset({404, 405})
_TOP_LEVEL = (
    "return_logprob",
    "logprob_start_len",
    "top_logprobs_num",
    "return_text_in_logprobs",
    "lora_path",
)


class RuntimeEndpoint(AsyncBackend):
    """A back end that runs programs on a running server with the native API.

    Attributes:
        base_url: the server's URL without a slash at its end.
        model_info: the server's report about its model.
        chat_template: the texts before and after the turns of each role; it may be assigned.
    """

    caches_prefixes = True

    def __init__(
        self,
        base_url: str,
        api_key: str | None = None,
        verify: bool | str | None = None,
        chat_template_name: str | None = None,
        *,
        timeout: float | None = None,
        max_connections: int = DEFAULT_MAX_CONNECTIONS,
        max_retries: int = 5,
    ) -> None:
        """Ask the server for its model, and choose the chat template.

        If the server dies, waiting requests fail. To detect this, the server is asked for its model
        after 2 s of silence, twice, with 4 s for each answer.

        Args:
            base_url: URL of the server, `http://HOST:PORT`.
            api_key: key that is sent as a bearer token.
            verify: False accepts any certificate; a path names a file of trusted authorities.
            chat_template_name: name of a chat template to use instead of the model's own.
            timeout: seconds that a request may take; None for no limit.
            max_connections: most requests at a time; further ones wait in this process.
            max_retries: how often a request is sent again if a busy server refused it, or if its
                connection broke before any answer.

        Raises:
            BackendError: the server does not answer, or refuses the request.
            KeyError: no chat template has this name.
        """
        super().__init__()
        self.base_url = base_url.rstrip("/")
        self.api_key = api_key
        self.verify = verify
        self._max_retries = max_retries
        headers = {"Content-Type": "application/json; charset=utf-8"}
        if api_key is not None:
            headers["Authorization"] = f"Bearer {api_key}"
        with self._told(self.base_url):
            tls = _tls(verify)
            self._client = HttpClient(
                self.base_url, headers, timeout, tls=tls, max_connections=max_connections
            )
            # The question has its own connection, because requests may be using all others.
            probe = HttpClient(self.base_url, headers, None, tls=tls)
        self._presence = Presence(lambda: probe.call("GET", "/get_model_info"))
        self._probe = probe
        self.model_info: dict[str, Any] = core().call(self._get("/get_model_info"))
        # The route `/v1/select` is assumed to exist until the server answers that it does not.
        self._scores_choices = True
        self._is_incremental: bool | None = self.model_info.get("incremental_streaming_output")
        self.chat_template = self._choose_template(chat_template_name)

    def _choose_template(self, name: str | None) -> ChatTemplate:
        if name is not None:
            return get_chat_template(name)
        path = self.get_model_name()
        return self._own_template(path) or get_chat_template_by_model_path(path)

    def _own_template(self, name: str) -> ChatTemplate | None:
        """Return the role markup of the server's own chat template; `None` if it is not shown."""
        try:
            told = core().call(self._get("/tokenizer_info"))
        except BackendError:
            # SGLang's servers lack this route, and a Headrace server may run without a tokenizer.
            return None
        if not isinstance(told, dict) or not isinstance(told.get("chat_template"), str):
            return None
        tokens = {key: value for key, value in told.items() if key.endswith("_token") and value}
        return template_from_source(told["chat_template"], tokens, name)

    def get_model_name(self) -> str:
        return str(self.model_info["model_path"])

    def shutdown(self) -> None:
        """Close the idle connections."""
        for client in (self._client, self._probe):
            core().call_soon(client.close)

    def start_profile(self) -> None:
        """Start the server's profiler."""
        core().call(self._get("/start_profile"))

    def stop_profile(self) -> None:
        """Stop the server's profiler."""
        core().call(self._get("/stop_profile"))

    # ---- coroutines ----

    async def async_generate(self, s: Prompt, sampling_params: SglSamplingParams) -> Generated:
        answer = await self.post("/generate", generate_payload(s, sampling_params))
        if isinstance(answer, list):
            return [one["text"] for one in answer], [one["meta_info"] for one in answer]
        return answer["text"], answer["meta_info"]

    async def async_generate_stream(
        self, s: Prompt, sampling_params: SglSamplingParams
    ) -> AsyncGenerator[tuple[str, Meta], None]:
        if self._is_incremental is None:
            self._is_incremental = await self._streams_deltas()
        taken = 0
        events = self._events("/generate", {**generate_payload(s, sampling_params), "stream": True})
        async with contextlib.aclosing(events):
            async for event in events:
                text = event["text"]
                if self._is_incremental:
                    yield text, event["meta_info"]
                else:
                    # The event's text is cumulative. An event without new text may report the end.
                    yield text[taken:], event["meta_info"]
                    taken = max(taken, len(text))

    async def async_select(
        self,
        s: Prompt,
        choices: list[str],
        temperature: float,  # noqa: ARG002  `select` refuses any value but 0
        choices_method: ChoicesSamplingMethod,
    ) -> ChoicesDecision:
        """Choose one of `choices`: by one request to `/v1/select` if the server has this route.

        Otherwise the choices are scored by several requests to `/generate`.
        """
        if self._scores_choices and not s.images_:
            payload = select_payload(s, choices, choices_method)
            try:
                return decide(await self.post("/v1/select", payload), choices, choices_method)
            except BackendError as error:
                if error.status not in _NO_ROUTE:
                    raise
                self._scores_choices = False
        return await classic_select(self.post, s, choices, choices_method)

    async def async_cache_prefix(self, prefix_str: str, media: Sequence[Media] = ()) -> None:
        payload = {"text": prefix_str, "sampling_params": {"max_new_tokens": 0}}
        await self.post("/generate", _with_media(payload, media))

    async def async_flush_cache(self) -> bool:
        await self._call("POST", "/flush_cache")
        return True

    async def async_get_server_info(self) -> dict[str, Any] | None:
        try:
            return await self._get("/get_server_info")
        except BackendError as error:
            if error.status != 404:
                raise
        # Newer SGLang servers use this name.
        return await self._get("/server_info")

    # ---- requests ----

    async def post(self, path: str, payload: dict[str, Any]) -> Any:
        """Send a POST request and return the JSON value of its response.

        Raises:
            BackendError: the server refuses the request, or does not answer.
        """
        return orjson.loads(await self._call("POST", path, orjson.dumps(payload)))

    async def _get(self, path: str) -> Any:
        answer = await self._call("GET", path)
        with self._told(self.base_url + path):
            try:
                return orjson.loads(answer)
            except orjson.JSONDecodeError:
                # Some routes of SGLang answer with a line of text instead of JSON.
                return answer.decode(errors="replace")

    async def _call(self, method: str, path: str, body: bytes = b"") -> bytes:
        async def once() -> bytes:
            status, answer = await self._client.call(method, path, body)
            if status != 200:
                raise HttpStatusError(status, answer)
            return answer

        return await self._retried(path, once)

    async def _retried(self, path: str, once: Callable[[], Coroutine[Any, Any, T]]) -> T:
        for attempt in range(self._max_retries):
            try:
                return await self._presence.while_there(once())
            except HttpStatusError as error:
                if error.status not in _BUSY:
                    raise self._refused(path, error) from None
            except ConnectionRefusedError as error:
                raise self._broken(path, error) from error
            except ConnectionError:
                pass
            except OSError as error:
                raise self._broken(path, error) from error
            await asyncio.sleep(2**attempt * random.uniform(0.1, 0.3))
        with self._told(self.base_url + path):
            return await self._presence.while_there(once())

    async def _events(
        self, path: str, payload: dict[str, Any]
    ) -> AsyncGenerator[dict[str, Any], None]:
        """Send a POST request and yield its server-sent events; closing the generator aborts it."""
        body = orjson.dumps(payload)
        received: deque[bytes] = deque()
        changed = asyncio.Event()

        def take(_: float, data: bytes) -> None:
            self._presence.hear()
            received.append(data)
            changed.set()

        async def once() -> None:
            try:
                await self._client.stream(path, body, take)
            except OSError as error:
                if received or is_begun:
                    # The request is not sent again, because the text so far may have been shown.
                    raise self._broken(path, error) from error
                raise

        is_begun = False
        sending = asyncio.create_task(self._retried(path, once))
        sending.add_done_callback(lambda _: changed.set())
        try:
            while True:
                while received:
                    is_begun = True
                    data = received.popleft()
                    if data.strip() == b"[DONE]":
                        return
                    event = orjson.loads(data)
                    if "error" in event:
                        raise BackendError(_message(event), url=self.base_url + path)
                    yield event
                if sending.done():
                    await sending
                    raise BackendError("The stream ended too early.", url=self.base_url + path)
                changed.clear()
                await changed.wait()
        finally:
            sending.cancel()
            with contextlib.suppress(Exception, asyncio.CancelledError):
                await sending

    async def _streams_deltas(self) -> bool:
        try:
            info = await self.async_get_server_info()
        except BackendError:
            return False
        return bool(info.get("incremental_streaming_output")) if isinstance(info, dict) else False

    # ---- errors ----

    @contextlib.contextmanager
    def _told(self, url: str) -> Any:
        path = url.removeprefix(self.base_url)
        try:
            yield
        except HttpStatusError as error:
            raise self._refused(path, error) from None
        except HeadraceError as error:
            raise BackendError(error.message, url=url) from None
        except OSError as error:
            raise self._broken(path, error) from error

    def _refused(self, path: str, error: HttpStatusError) -> BackendError:
        try:
            message = _message(orjson.loads(error.body))
        except orjson.JSONDecodeError:
            message = " ".join(error.body.decode(errors="replace").split())[:300]
        return BackendError(message, status=error.status, url=self.base_url + path)

    def _broken(self, path: str, error: OSError) -> BackendError:
        words = str(error) or "no answer in time"
        return BackendError(f"{type(error).__name__}: {words}", url=self.base_url + path)


def generate_payload(s: Prompt, sampling_params: SglSamplingParams) -> dict[str, Any]:
    """Build the body of the native `/generate` that continues `s.text_`."""
    sampling = {
        "skip_special_tokens": (
            global_config.skip_special_tokens_in_output
            if sampling_params.skip_special_tokens is None
            else sampling_params.skip_special_tokens
        ),
        "spaces_between_special_tokens": global_config.spaces_between_special_tokens_in_out,
        **sampling_params.to_srt_kwargs(),
    }
    payload: dict[str, Any] = {"text": s.text_, "sampling_params": sampling}
    for name in _TOP_LEVEL:
        value = getattr(sampling_params, name)
        if value is not None:
            payload[name] = value
    return _with_media(payload, s.images_)


def _with_media(payload: dict[str, Any], media: Sequence[Media]) -> dict[str, Any]:
    if media:
        wires = [one.data for one in media]
        payload["image_data"] = wires[0] if len(wires) == 1 else wires
    return payload


def _message(body: Any) -> str:
    """Return the message in the body of an error response; servers use several formats."""
    if isinstance(body, dict):
        error = body.get("error", body)
        if isinstance(error, dict):
            error = error.get("message", error)
        return str(error)
    return str(body)


def _tls(verify: bool | str | None) -> ssl.SSLContext | None:
    if verify is None or verify is True:
        return None
    if isinstance(verify, str):
        return ssl.create_default_context(cafile=verify)
    context = ssl.create_default_context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context
