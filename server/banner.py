"""What a person at the terminal sees while the server starts: a few lines, each worth reading."""

from __future__ import annotations

import logging
import time

from runtime.client.host import EngineStatus
from runtime.config import HttpArgs
from server.context import ServerContext

logger = logging.getLogger(__name__)

# Scripts wait for this line, to the letter.
READY_LINE = "The server is fired up and ready to roll!"
_EVERY_S = 5.0
_LOOPBACK = frozenset({"127.0.0.1", "localhost", "::1"})
_EXAMPLE_BODY = '{"messages": [{"role": "user", "content": "What is the capital of France?"}]}'
_PHASES = {
    "importing": "Starting the worker",
    "loading_weights": "Loading weights",
    "allocating_cache": "Allocating the KV pool",
    "warming_up": "Warming up",
}


class ProgressLog:
    """Turns the engine's phases into log lines: one per phase, and one every few seconds."""

    def __init__(self) -> None:
        """Start before the first phase."""
        self._phase = ""
        self._said_at = 0.0

    def __call__(self, status: EngineStatus) -> None:
        """Called on every change of the status."""
        text = _PHASES.get(status.phase)
        now = time.monotonic()
        is_new = status.phase != self._phase
        self._phase = status.phase
        if text is None or not (is_new or now - self._said_at > _EVERY_S):
            return
        self._said_at = now
        share = f" {100 * status.fraction:.0f}%" if status.fraction else ""
        detail = f" ({status.detail})" if status.detail else ""
        logger.info("%s%s%s", text, share, detail)


def warn_if_open(http: HttpArgs) -> None:
    """Say it loudly when everybody on the network may use, and change, this server."""
    if http.host not in _LOOPBACK and http.api_key is None and http.admin_api_key is None:
        logger.warning(
            "OPEN TO THE NETWORK: anyone who reaches %s may use and control this server; "
            "set --api-key and --admin-api-key.",
            http.host,
        )


def banner(context: ServerContext, port: int) -> str:
    """Model, device, pool, address, and a request to paste."""
    config, worker = context.config, context.status.worker
    assert worker is not None, "the banner comes after ready"
    host = {"0.0.0.0": "127.0.0.1", "::": "127.0.0.1", "": "127.0.0.1"}.get(
        config.http.host, config.http.host
    )
    url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
    key = ' -H "Authorization: Bearer $HEADRACE_API_KEY"' if config.http.api_key else ""
    seconds = time.monotonic() - context.lifecycle.launched_at
    return "\n".join(
        (
            "",
            f"  Headrace {context.version}, ready in {seconds:.1f} s",
            f"  model    {config.model.served_model_name} ({context.model.architecture})",
            f"  runs on  {worker.device}, {worker.dtype}, {worker.attention_backend} attention",
            f"  KV pool  {worker.max_total_num_tokens:,} tokens, context {_context_len(context):,}",
            f"  listens  {url}",
            "",
            f'  curl {url}/v1/chat/completions{key} -H "Content-Type: application/json" \\',
            f"    -d '{_EXAMPLE_BODY}'",
            "",
        )
    )


def _context_len(context: ServerContext) -> int:
    return context.client.limits.context_len
