"""Builds the objects of an engine from checked options: client, process host and service context.

Both the HTTP server and the offline engine are built here.
"""

from __future__ import annotations

import signal
from importlib import metadata

from runtime.client.admission import EngineLimits
from runtime.client.client import EngineClient
from runtime.errors import StartupError
from runtime.ipc.transport import remove_run_folder
from runtime.launch.node_options import node_link
from runtime.launch.prepare import PreparedEngine
from runtime.media.image_loader import ImageLoader
from runtime.processes.engine_processes import EngineProcesses
from runtime.processes.node_host import NodeHost
from runtime.service.changes import Changes
from runtime.service.context import ServiceContext
from runtime.weights.adapter_control import AdapterControl
from runtime.weights.weight_control import WeightControl


def assemble(
    prepared: PreparedEngine, *, restarts: bool = True
) -> tuple[EngineProcesses, ServiceContext]:
    """Build all objects of an engine without starting a process.

    Args:
        prepared: the checked options and the values chosen from them.
        restarts: whether a child process that ends is started again; see `EngineProcesses`.

    Returns:
        The process host, whose `start` starts the processes; and the service context.

    Raises:
        StartupError: `--node-rank` is above 0, which only `headrace serve` supports.
    """
    resolved, config = prepared.resolved, prepared.resolved.config
    if config.parallel.node_rank:
        raise StartupError("--node-rank above 0 is for `headrace serve`, not for an engine.")
    limits = EngineLimits(
        context_len=resolved.worker.context_len,
        max_total_num_tokens=resolved.worker.context_len,
        vocab_size=prepared.model.vocab_size,
        allow_auto_truncate=config.http.allow_auto_truncate,
        hidden_size=(
            prepared.model.hidden_size
            if prepared.model.gives == "tokens"
            else prepared.model.output_size
        ),
        token_size=prepared.model.token_size,
        gives=prepared.model.gives,
        experts_per_token=len(prepared.model.expert_layers) * prepared.model.num_experts_per_token,
        vision=prepared.model.vision,
    )
    client = EngineClient(
        limits,
        config.model.random_seed,
        dp_size=config.parallel.dp_size,
        load_balance_method=config.parallel.load_balance_method,
        max_resumes=config.scheduling.max_resumes,
    )
    client.why_no_grammars = resolved.why_no_grammars
    run_folder = prepared.folders.run
    host = EngineProcesses(
        resolved.worker,
        resolved.detokenizer,
        client,
        run_folder,
        grammar=resolved.grammar,
        restarts=restarts,
    )
    changes = Changes(config.model)
    given = prepared.adapters
    adapters = AdapterControl(
        client, prepared.model, given.limits, run_folder, max_loaded=config.lora.max_loaded_loras
    )
    for each in given.adapters:
        adapters.register(each.name, each.path, each.folder, each.spec, pinned=each.pinned)
    context = ServiceContext(
        config=config,
        model=prepared.model,
        tokenizer=prepared.tokenizer,
        client=client,
        status=host.status,
        version=server_version(),
        weights=WeightControl(host, prepared.model, config.model.load_format, changes.rename_model),
        adapters=adapters,
        changes=changes,
        sampling_defaults=resolved.sampling_defaults,
        images=ImageLoader(prepared.model.vision, prepared.media),
    )
    client.loaded.version = client.loaded.restart_version = config.model.weight_version
    return host, context


def assemble_node(prepared: PreparedEngine) -> NodeHost:
    """Build the host of a node above 0; its `run` runs the node's ranks.

    Args:
        prepared: the checked options of this node.
    """
    worker, parallel = prepared.resolved.worker, prepared.resolved.config.parallel
    assert worker.node is not None, "--node-rank is below --nnodes"
    return NodeHost(
        worker, worker.node, parallel.node_rank, lambda: node_link(parallel, patience_s=0.0)
    )


def run_node(prepared: PreparedEngine) -> int:
    """Run the ranks of a node above 0 until a signal stops it; return the exit status.

    Args:
        prepared: the checked options of this node.
    """
    try:
        host = assemble_node(prepared)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: host.stop())
        return host.run()
    finally:
        remove_run_folder(prepared.folders.run)


def server_version() -> str:
    """Return the installed version of Headrace."""
    try:
        return metadata.version("headrace")
    except metadata.PackageNotFoundError:
        return "0.0.0+source"
