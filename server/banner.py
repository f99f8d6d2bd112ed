"""Writes the banner, the few lines that the terminal shows once the server is ready."""

from __future__ import annotations

import logging
import time

from runtime.checkpoint.model_spec import ModelSpec
from runtime.config.options import HttpArgs
from runtime.ipc.messages import WorkerReady
from runtime.service.context import ServiceContext
from server.listener import is_loopback

logger = logging.getLogger(__name__)

_GIB = 2**30

# Scripts wait for exactly this line in the log.
READY_LINE = "The server is fired up and ready to roll!"
_EXAMPLE_IDS = '{"input_ids": [1, 2, 3], "sampling_params": {"max_new_tokens": 8}}'
_EXAMPLE_INPUT = '{"input": "Paris is the capital of France."}'
_EXAMPLE_BODY = '{"messages": [{"role": "user", "content": "What is the capital of Japan?"}]}'


def warn_if_open(http: HttpArgs) -> None:
    """Warn if everyone on the network, or every client with a key, may change this server."""
    if not is_loopback(http.host) and http.api_key is None and http.admin_api_key is None:
        logger.warning(
            "OPEN TO THE NETWORK: anyone who reaches %s may use and control this server; "
            "set HEADRACE_API_KEY and HEADRACE_ADMIN_API_KEY.",
            http.host,
        )
    if http.api_key is not None and http.admin_api_key is None:
        logger.warning(
            "The API key also opens the routes that change the server, such as weight updates: "
            "set --admin-api-key to keep clients from them."
        )


def banner(context: ServiceContext, port: int, speed: float | None, resident: int) -> str:
    """Return the banner: model, device, KV pool, address, expected speed, and an example request.

    Args:
        context: the service context of a server that is ready.
        port: the port on which the server listens.
        speed: tokens per second of a single answer, measured by the warm-up; None if not measured.
        resident: resident memory of all processes now, bytes.
    """
    config, worker = context.config, context.status.worker
    assert worker is not None, "the banner comes after ready"
    host = {"0.0.0.0": "127.0.0.1", "::": "127.0.0.1", "": "127.0.0.1"}.get(
        config.http.host, config.http.host
    )
    scheme = "http" if config.http.ssl_certfile is None else "https"
    url = f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"
    key = ' -H "Authorization: Bearer $HEADRACE_API_KEY"' if config.http.api_key else ""
    copies = f", {config.parallel.dp_size} copies" if config.parallel.dp_size > 1 else ""
    is_alone = config.parallel.dp_size == config.parallel.num_ranks == 1
    path, body = "/v1/chat/completions", _EXAMPLE_BODY
    if context.model.gives != "tokens":
        path, body = _path_for_texts(context.model), _EXAMPLE_INPUT
    elif context.tokenizer.is_missing:
        path, body = "/generate", _EXAMPLE_IDS
    seconds = time.monotonic() - context.lifecycle.launched_at
    return "\n".join(
        (
            "",
            f"  Headrace {context.version}, ready in {seconds:.1f} s",
            f"  model    {config.model.served_model_name} ({context.model.architecture})",
            f"  runs on  {worker.device}, {worker.dtype}, {worker.attention_backend} attention"
            f"{copies}",
            f"  {_pool(worker)}context {_context_len(context):,}",
            *(expected(worker, speed, resident) if is_alone else ()),
            f"  listens  {url}",
            "",
            f'  curl {url}{path}{key} -H "Content-Type: application/json" \\',
            f"    -d '{body}'",
            "",
        )
    )


def _pool(worker: WorkerReady) -> str:
    if not worker.kv_bytes:
        return ""
    return f"KV pool  {worker.max_total_num_tokens:,} tokens, "


def expected(worker: WorkerReady, speed: float | None, resident: int) -> list[str]:
    """Return one line with the speed of an answer and the server's memory; no line on a GPU."""
    if speed is None or worker.device != "cpu":
        return []
    digits = 0 if speed >= 10 else 1
    return [
        f"  expect   about {speed:.{digits}f} tokens/s in one answer (measured just now); memory "
        f"{resident / _GIB:.1f} GiB, up to {(resident + worker.kv_bytes) / _GIB:.1f} GiB as the KV "
        "pool fills"
    ]


def _context_len(context: ServiceContext) -> int:
    return context.client.limits.context_len


def _path_for_texts(model: ModelSpec) -> str:
    if model.gives == "scores":
        return "/v1/classify"
    return "/pooling" if model.pooling.per_token else "/v1/embeddings"
