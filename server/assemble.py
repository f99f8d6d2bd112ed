"""From a prepared engine to its objects: client, owner of the children, the context they share.

The HTTP server and the offline engine are built by these lines.
"""

from __future__ import annotations

import asyncio
from importlib import metadata

from runtime.client.admission import EngineLimits
from runtime.client.host import EngineHost
from runtime.client.recorder import RecordingClient
from server.context import Lifecycle, ServerContext
from server.health import stuck_for
from server.prepare import PreparedEngine
from server.weight_control import WeightControl

_WATCHDOG_PERIOD_S = 1.0


def assemble(
    prepared: PreparedEngine, lifecycle: Lifecycle, *, restarts: bool = True
) -> tuple[EngineHost, ServerContext]:
    """Build everything that starts nothing yet; `host.start()` does.

    Args:
        prepared: what was checked and settled.
        lifecycle: where the server is in its life.
        restarts: whether a child that dies is started again; see `EngineHost`.
    """
    resolved, config = prepared.resolved, prepared.resolved.config
    limits = EngineLimits(
        context_len=resolved.worker.context_len,
        max_total_num_tokens=resolved.worker.context_len,
        vocab_size=prepared.model.vocab_size,
        allow_auto_truncate=config.http.allow_auto_truncate,
        hidden_size=prepared.model.hidden_size,
        gives=prepared.model.gives,
    )
    client = RecordingClient(
        limits,
        config.model.random_seed,
        dp_size=config.parallel.dp_size,
        load_balance_method=config.parallel.load_balance_method,
    )
    run_folder = prepared.folders.run
    host = EngineHost(
        resolved.worker,
        resolved.detokenizer,
        client,
        run_folder,
        grammar=resolved.grammar,
        restarts=restarts,
    )
    context = ServerContext(
        config=config,
        model=prepared.model,
        tokenizer=prepared.tokenizer,
        client=client,
        status=host.status,
        version=server_version(),
        sampling_defaults=resolved.sampling_defaults,
        lifecycle=lifecycle,
    )
    client.loaded.version = client.loaded.restart_version = config.model.weight_version
    context.weights = WeightControl(context, host)
    return host, context


async def watch(context: ServerContext, host: EngineHost) -> None:
    """End a worker or detokenizer whose loop stands still although there is work."""
    while True:
        await asyncio.sleep(_WATCHDOG_PERIOD_S)
        for replica in context.status.replicas:
            stuck_s, name = stuck_for(context, replica)
            if stuck_s > context.config.logging.watchdog_timeout:
                why = f"no turn of its loop for {stuck_s:.0f} s while requests wait"
                host.kill(replica.rank, name, why)


def server_version() -> str:
    """The installed version."""
    try:
        return metadata.version("headrace")
    except metadata.PackageNotFoundError:
        return "0.0.0+source"
