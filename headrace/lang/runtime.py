"""`Runtime` starts a server in its own process, on which programs of this process run."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import shlex
import sys
import warnings
import weakref
from collections.abc import AsyncGenerator, Mapping
from typing import TYPE_CHECKING, Any

from headrace.engine.server_args import ServerArgs, read_keywords
from headrace.http_calls import http_request
from headrace.lang.backend.json_http import JsonHttp, message_of
from headrace.lang.backend.runtime_endpoint import RuntimeEndpoint
from headrace.lang.program_errors import BackendError
from headrace.server_process import (
    launch_server_cmd,
    release_port,
    reserve_port,
    terminate_process,
    wait_for_http_ready,
)
from runtime.launch.command_line import ENVIRONMENT, SECRETS, option_name

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_LAST_PORT = 40000
# Options that are passed as environment variables, so that the process list does not show them.
_SECRETS = {ENVIRONMENT[variable][1]: variable for variable in SECRETS}


class _OwnEndpoint(RuntimeEndpoint):
    """A `RuntimeEndpoint` that keeps its server running as long as the endpoint exists."""

    runtime: Runtime


class Runtime:
    """A server that this object starts in its own process.

    The server ends with this process, or when this object and its endpoint are garbage-collected. A
    `Runtime` can be passed as a back end; its `endpoint` is then used.

    Attributes:
        server_args: the server's arguments as they were given.
        url: URL of the server.
        generate_url: URL of the server's route `/generate`.
        pid: id of the server's process.
        endpoint: the back end that sends requests to the server.
    """

    def __init__(
        self,
        log_level: str = "error",
        launch_timeout: float = 300.0,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        """Start the server and wait until it answers.

        The calling script does not need `if __name__ == "__main__":`.

        Args:
            log_level: log level of the server.
            launch_timeout: seconds to wait until the server is ready.
            *args: must be empty; part of the signature for compatibility.
            **kwargs: the server's options with underscores: `model_path`, `port` (the first port
                to try; if it is in use, another one up to 40000 is taken), `api_key`, ...

        Raises:
            TypeError: an argument is unknown.
            ValueError: a value is wrong, or a feature is not supported.
            RuntimeError: the server ended; the message holds its last lines of output.
            TimeoutError: the server was not ready in time.
        """
        if args:
            raise TypeError("Runtime takes the server's arguments by their names.")
        if kwargs.get("tokenizer_path") is None:
            kwargs.pop("tokenizer_path", None)
        arguments, notices = read_keywords({**kwargs, "log_level": log_level})
        for notice in notices:
            warnings.warn(notice, stacklevel=2)
        port = _free_port(arguments.host, arguments.port)
        self.server_args = dataclasses.replace(arguments, port=port)
        process, _ = launch_server_cmd(_command(self.server_args), arguments.host, port)
        # The finalizer runs when this object is garbage-collected, or before the interpreter exits.
        self._finalizer = weakref.finalize(self, terminate_process, process)
        scheme = "https" if arguments.ssl_certfile else "http"
        host = "127.0.0.1" if arguments.host in ("0.0.0.0", "localhost") else arguments.host
        self.url = f"{scheme}://{host}:{port}"
        self.generate_url = f"{self.url}/generate"
        self.pid = process.pid
        try:
            wait_for_http_ready(f"{self.url}/health", launch_timeout, process, self._headers)
            self.endpoint = _OwnEndpoint(self.url, api_key=arguments.api_key)
            self.endpoint.runtime = self
        except BaseException:
            self.shutdown()
            raise

    @property
    def _headers(self) -> dict[str, str]:
        key = self.server_args.api_key
        return {"Authorization": f"Bearer {key}"} if key else {}

    # ---- generation ----

    def generate(
        self,
        prompt: str | list[str],
        sampling_params: Mapping[str, Any] | None = None,
        return_logprob: bool = False,
        logprob_start_len: int | None = None,
        top_logprobs_num: int | None = None,
        lora_path: str | None = None,
        session_id: str | None = None,
    ) -> str:
        """Call the server's `/generate` and return its answer as JSON text.

        Args:
            prompt: one text or several.
            sampling_params: keys as in the native API.
            return_logprob: whether log-probabilities are returned.
            logprob_start_len: first token of the prompt whose log-probability is returned.
            top_logprobs_num: number of most likely tokens that are reported at each position.
            lora_path: name of the adapter to use.
            session_id: id of an open session.

        Raises:
            BackendError: the server refused the request.
        """
        body: dict[str, Any] = {
            "text": prompt,
            "sampling_params": dict(sampling_params or {}),
            "return_logprob": return_logprob,
            "logprob_start_len": logprob_start_len,
            "top_logprobs_num": top_logprobs_num,
            "lora_path": lora_path,
        }
        if session_id is not None:
            body["session_params"] = {"id": session_id}
        return self._post("/generate", _without_none(body))

    def encode(self, prompt: str | list[str]) -> str:
        """Call the server's `/encode` and return its answer as JSON text.

        Raises:
            BackendError: the server refused the request.
        """
        return self._post("/encode", {"text": prompt})

    def _post(self, path: str, body: dict[str, Any]) -> str:
        url = f"{self.url}{path}"
        answer = http_request(url, json=body, api_key=self.server_args.api_key)
        if answer.status_code != 200:
            raise BackendError(message_of(answer.text), status=answer.status_code, url=url)
        return answer.text

    async def async_generate(
        self,
        prompt: Any,
        sampling_params: Mapping[str, Any] | None = None,
        session_id: str | None = None,
    ) -> AsyncGenerator[Any, None]:
        """Yield the answer to `prompt` in pieces of new text; use it with `async for`.

        With `skip_tokenizer_init` the prompt is token ids, and the server's events are yielded.

        Raises:
            BackendError: the server refused the request, or failed while generating.
        """
        skips = self.server_args.skip_tokenizer_init
        body: dict[str, Any] = {
            "input_ids" if skips else "text": prompt,
            "sampling_params": dict(sampling_params or {}),
            "stream": True,
        }
        if session_id is not None:
            body["session_params"] = {"id": session_id}
        http = JsonHttp(self.url, self._headers, timeout_s=600.0, max_retries=0)
        taken = 0
        try:
            async with contextlib.aclosing(http.events("/generate", body)) as events:
                async for event in events:
                    if "error" in event:
                        raise BackendError(message_of(json.dumps(event)), url=self.generate_url)
                    if skips:
                        yield event
                        continue
                    start = 0 if self.server_args.incremental_streaming_output else taken
                    piece = event["text"][start:]
                    taken += len(piece)
                    if piece:
                        yield piece
        finally:
            await http.close()

    add_request = async_generate

    # ---- the server ----

    def get_tokenizer(self) -> PreTrainedTokenizerBase:
        """Load the model's tokenizer with `transformers` in this process, and return it."""
        from transformers import AutoTokenizer

        arguments = self.server_args
        return AutoTokenizer.from_pretrained(arguments.tokenizer_path or arguments.model_path)

    def cache_prefix(self, prefix: str) -> None:
        """Let the server cache `prefix`, with which later requests begin."""
        self.endpoint.cache_prefix(prefix)

    def start_profile(self) -> None:
        """Start the server's profiler."""
        self.endpoint.start_profile()

    def stop_profile(self) -> None:
        """Stop the server's profiler."""
        self.endpoint.stop_profile()

    async def get_server_info(self) -> dict[str, Any]:
        """Return the server's report about itself."""
        from headrace.lang.core_loop import core

        return await core().call_async(self.endpoint.async_get_server_info()) or {}

    def shutdown(self) -> None:
        """End the server and wait until it has exited; repeated calls do nothing."""
        self._finalizer()

    def __enter__(self) -> Runtime:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()


def _free_port(host: str, first: int) -> int:
    for last in (first + 1, _LAST_PORT):
        with contextlib.suppress(RuntimeError):
            port, reserved = reserve_port(host, first, last)
            release_port(reserved)
            return port
    raise RuntimeError(f"No free port in [{first}, {_LAST_PORT}) on {host}.")


def _command(arguments: ServerArgs) -> str:
    """Return the server's command line without its port.

    API keys are written before the command, as environment variables.
    """
    before: list[str] = []
    words = [sys.executable, "-m", "server.launch"]
    for field in dataclasses.fields(arguments):
        value = getattr(arguments, field.name)
        if value == field.default or field.name == "port":
            continue
        if field.name in _SECRETS:
            before.append(f"{_SECRETS[field.name]}={value}")
        elif value is True:
            words.append(option_name(field.name))
        elif isinstance(value, list):
            words += [option_name(field.name), *map(str, value)] if value else []
        elif value is not None and value is not False:
            words.append(f"{option_name(field.name)}={value}")
    return shlex.join([*before, *words])


def _without_none(body: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in body.items() if value is not None}
