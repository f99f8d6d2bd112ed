"""Builds the worker's parts from its configuration: the only place that knows them all."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import torch

from runtime.attention.backend import ATTENTION_BACKENDS
from runtime.cache.manager import CacheManager
from runtime.checkpoint.config_json import load_model_config
from runtime.config import WorkerConfig
from runtime.executor.memory import PoolSize, size_pool
from runtime.executor.model_runner import ModelRunner
from runtime.batch_rows import BatchRows
from runtime.forward_batch import KVCache
from runtime.layers.context import BuildContext, parse_dtype
from runtime.loader.load import load_model, parameter_bytes
from runtime.messages import FrontInbound, Phase, TokenDeltas, WorkerReady
from runtime.scheduler.scheduler import Scheduler
from runtime.scheduler.stats import SchedulerStats
from runtime.scheduler.warmup import warm_up
from runtime.shared_state import SharedState

logger = logging.getLogger(__name__)


class Report(Protocol):
    """Tells the front where start-up is."""

    def __call__(self, phase: Phase, fraction: float = 0.0, detail: str = "") -> None:
        """Report `phase` and the share of it that is done."""
        ...


def build_worker(
    config: WorkerConfig,
    shared: SharedState,
    send_tokens: Callable[[TokenDeltas], None],
    send_front: Callable[[FrontInbound], None],
    report: Report,
) -> tuple[Scheduler, WorkerReady]:
    """Load the model and put scheduler, cache and executor around it.

    Raises:
        StartupError: the model or the memory does not allow it; one line.
    """
    torch.set_num_threads(config.num_threads)
    torch.set_grad_enabled(False)
    device = torch.device(config.device)
    dtype = parse_dtype(config.dtype)
    folder = Path(config.model_folder)
    model_config = load_model_config(folder)
    report("loading_weights")
    model = load_model(
        folder,
        model_config,
        BuildContext(dtype=dtype, device=device, max_positions=config.context_len + 1),
        lambda fraction: report("loading_weights", fraction),
        load_format=config.load_format,
        seed=config.random_seed,
    )
    weight_bytes = parameter_bytes(model)
    report("allocating_cache")
    size = size_pool(
        model_config,
        dtype_bytes=dtype.itemsize,
        page_size=config.page_size,
        max_total_tokens=config.max_total_tokens,
        max_running_requests=config.max_running_requests,
        context_len=config.context_len,
        fraction=config.mem_fraction_static,
        weight_bytes=weight_bytes,
    )
    kv = allocate_kv(
        size, model_config.num_layers, model_config.num_kv_heads, model_config.head_dim, dtype
    )
    backend = "cpu" if config.attention_backend == "auto" else config.attention_backend
    attention = ATTENTION_BACKENDS.load(backend)()
    max_pages = -(-(config.context_len + 1) // config.page_size)
    rows = BatchRows(
        config.max_running_requests, max_pages, config.context_len, model_config.vocab_size
    )
    runner = ModelRunner(model, attention, kv, rows, config.page_size)
    report("warming_up")
    warm_up(runner, model_config.vocab_size, config)
    token_budget = config.chunked_prefill_size if config.chunked_prefill_size > 0 else None
    scheduler = Scheduler(
        runner,
        CacheManager(
            size.num_pages, config.page_size, enable_prefix_cache=not config.disable_radix_cache
        ),
        SchedulerStats(shared, config.decode_log_interval),
        send_tokens=send_tokens,
        send_front=send_front,
        max_running_requests=config.max_running_requests,
        max_queued_requests=config.max_queued_requests,
        context_len=config.context_len,
        token_budget=token_budget,
        policy=config.schedule_policy,
        eos_token_ids=config.eos_token_ids,
        stream_interval=config.stream_interval,
        overlap=config.overlap,
    )
    ready = WorkerReady(
        max_total_num_tokens=size.num_tokens,
        max_running_requests=config.max_running_requests,
        page_size=config.page_size,
        dtype=config.dtype,
        device=config.device,
        attention_backend=backend,
        weight_bytes=weight_bytes,
        kv_bytes=size.size_bytes,
        load_seconds=0.0,
    )
    return scheduler, ready


def allocate_kv(
    size: PoolSize, num_layers: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype
) -> list[KVCache]:
    """One pair of page arrays per layer; page 0 is for padding."""
    # Zeroed memory is mapped when first touched, so a large pool costs nothing until it is used.
    shape = (size.num_pages + 1, num_kv_heads, size.page_size, head_dim)
    return [
        KVCache(torch.zeros(shape, dtype=dtype), torch.zeros(shape, dtype=dtype))
        for _ in range(num_layers)
    ]
