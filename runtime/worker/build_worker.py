"""Builds the parts of the worker from its configuration; the only module that knows all parts."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import zmq

from kernels.fp8_linear import unavailable
from kernels.triton_support.kernel_cache import use_writable_cache
from runtime.cache.kv_events import KVEventLog
from runtime.cache.manager import CacheManager
from runtime.cache.window_pages import WindowPages
from runtime.checkpoint.model_spec import ModelSpec
from runtime.config.options import WorkerConfig
from runtime.distributed.group import TensorGroup
from runtime.distributed.stage_links import StageLinks
from runtime.errors import StartupError
from runtime.executor.build import (
    Executor,
    Report,
    build_executor,
    chunk_tokens,
    image_token_bytes,
)
from runtime.executor.build_encoder import build_encoder
from runtime.executor.device_memory import DeviceMemory
from runtime.executor.expert_recorder import ExpertRecorder
from runtime.executor.host_pool import num_host_pages, num_host_slots
from runtime.executor.invariance import require_invariance
from runtime.executor.kernel_choices import choose_attention, choose_experts, rounds_products
from runtime.executor.memory import GIB
from runtime.executor.out_of_memory import TOO_LARGE, memory_for, require_room
from runtime.executor.profiler import Profiler
from runtime.grammar.grammar_backend import GrammarBackend
from runtime.grammar.libraries import open_libraries
from runtime.ipc.freed_memory import return_freed_memory
from runtime.ipc.kv_publisher import KVPublisher
from runtime.ipc.messages import (
    ControlReply,
    FrontInbound,
    TokenDeltas,
    WorkerCommand,
    WorkerReady,
)
from runtime.ipc.shared_state import SharedState
from runtime.models.layers.adapter_slots import AdapterSlots
from runtime.models.layers.build_context import BuildContext, parse_dtype
from runtime.models.layers.expert_counts import ExpertCounts
from runtime.models.layers.stage import Stage
from runtime.models.model import CausalLM, Model, TextEncoder
from runtime.models.registry import read_model_spec
from runtime.scheduler.budget import TokenBudget, smooth_tokens
from runtime.scheduler.grammars import Grammars
from runtime.scheduler.image_cache import ImageCache
from runtime.scheduler.scheduler import Scheduler
from runtime.scheduler.scheduler_options import SchedulerOptions
from runtime.scheduler.stats import SchedulerStats
from runtime.step.executor import Runner
from runtime.weights.adapter_files import RankAdapters
from runtime.weights.live_weights import LiveWeights
from runtime.weights.load_model import load_model, parameter_bytes
from runtime.weights.rank_weights import RankWeights
from runtime.weights.weight_files import WeightFiles
from runtime.weights.weight_updates import WeightUpdates
from runtime.worker.build_files import build_file_tier
from runtime.worker.commands import Commands
from runtime.worker.ranks import BroadcastRunner, Ranks
from runtime.worker.stages import StagedRunner

logger = logging.getLogger(__name__)


def build_worker(
    config: WorkerConfig,
    shared: SharedState,
    send_tokens: Callable[[TokenDeltas], None],
    send_front: Callable[[FrontInbound], None],
    report: Report,
    ranks: Ranks | None = None,
) -> tuple[Scheduler, WorkerReady]:
    """Load the model, and build the executor, the cache and the scheduler.

    Args:
        config: the worker's configuration.
        shared: shared memory for the gauges.
        send_tokens: sends a message to the detokenizer.
        send_front: sends a message to the front process.
        report: reports the progress of the start-up.
        ranks: the processes of the other ranks, which are starting; needed if `num_ranks > 1`.

    Returns:
        The scheduler, and the message which tells the front process that the worker is ready.

    Raises:
        StartupError: the model or the memory does not allow a start; the message is one line.
    """
    spec = read_spec(config)
    grammars = build_grammars(config, spec.vocab_size)
    executor = build_rank(config, spec, 0, report)
    return_freed_memory()
    return build_scheduler(config, executor, grammars, shared, send_tokens, send_front, ranks)


def build_scheduler(
    config: WorkerConfig,
    executor: Executor,
    grammars: Grammars,
    shared: SharedState,
    send_tokens: Callable[[TokenDeltas], None],
    send_front: Callable[[FrontInbound], None],
    ranks: Ranks | None = None,
) -> tuple[Scheduler, WorkerReady]:
    """Build the cache and the scheduler for an executor; see `build_worker`."""
    shared["engine_load_weights_time"] = executor.load_seconds
    runner: Runner = executor.runner
    execute: Callable[[WorkerCommand], ControlReply] = build_commands(executor, config, 0).execute
    if ranks is not None:
        is_staged = config.pp_size > 1
        runner = StagedRunner(runner, ranks) if is_staged else BroadcastRunner(runner, ranks)
        execute = ranks.before(execute)
        ranks.started()
    size, spec = executor.size, executor.model.spec
    images = _image_cache(config, spec)
    cache = CacheManager(
        size.num_pages,
        config.page_size,
        enable_prefix_cache=spec.keeps_state and not config.disable_radix_cache,
        window=spec.max_window,
        num_state_slots=size.num_state_slots,
        max_running=config.max_running_requests,
        num_host_pages=num_host_pages(config, size),
        num_host_slots=num_host_slots(config, size),
    )
    pages, states = executor.runner.host
    if cache.tiers.states is not None and states is not None:
        cache.tiers.states.slots.last_done = states.last_done
    if cache.host is not None and pages is not None:
        cache.host.last_done = pages.last_done
        types = sorted({str(part.dtype) for layer in executor.kv for part in (layer.k, layer.v)})
        cache.host.files = build_file_tier(config, pages, " ".join(types))
    if size.num_window_pages and spec.grouped_window is not None:
        cache.windows = WindowPages(
            size.num_window_pages,
            size.num_pages,
            page_size=config.page_size,
            window=spec.grouped_window,
            step_tokens=chunk_tokens(config) or config.context_len,
        )
    if config.kv_events is not None:
        publisher = KVPublisher(zmq.Context.instance(), config.kv_events, config.dp_rank)
        cache.tree.events = KVEventLog(config.page_size, config.dp_rank, publisher.publish)
    scheduler = Scheduler(
        runner,
        cache,
        SchedulerStats(shared, config.decode_log_interval, images),
        SchedulerOptions(
            max_running_requests=config.max_running_requests,
            max_queued_requests=config.max_queued_requests,
            context_len=config.context_len,
            token_budget=_token_budget(config, spec, _shared_grain(executor.model, config)),
            policy=config.schedule_policy,
            eos_token_ids=config.eos_token_ids,
            stream_interval=config.stream_interval,
            overlap=config.overlap,
            num_adapter_slots=0 if config.lora is None else config.lora.max_per_batch,
            evicts_oldest=config.lora is not None and config.lora.evicts_oldest,
            num_stages=config.pp_size,
        ),
        send_tokens=send_tokens,
        send_front=send_front,
        grammars=grammars,
        execute=execute,
        weights=WeightUpdates(
            build_rank_weights(executor, config, 0, shared.beat), ranks, shared.beat
        ),
        images=images,
    )
    ready = WorkerReady(
        max_total_num_tokens=size.num_tokens,
        max_running_requests=config.max_running_requests,
        page_size=config.page_size,
        dtype=config.dtype,
        device=config.device,
        attention_backend=executor.attention_backend,
        weight_bytes=executor.weight_bytes,
        kv_bytes=size.size_bytes,
        load_seconds=0.0,
        pid=os.getpid(),
    )
    return scheduler, ready


def _image_cache(config: WorkerConfig, spec: ModelSpec) -> ImageCache | None:
    vision = spec.vision
    if vision is None:
        return None
    return ImageCache(
        config.image_cache_mb * 2**20,
        image_token_bytes(config, spec),
        step_tokens=chunk_tokens(config) if vision.is_bidirectional else None,
    )


def build_commands(executor: Executor, config: WorkerConfig, rank: int) -> Commands:
    """Build the object that executes commands, such as profiling, on this rank."""
    dp_rank = config.dp_rank if config.dp_size > 1 else None
    profiler = Profiler(config.device, rank, config.num_ranks, dp_rank)
    counts, mode = executor.model.context.expert_counts, config.expert_recorder_mode
    if counts is not None and mode is not None:
        executor.runner.recorder = ExpertRecorder(mode, config.expert_recorder_size, rank, counts)
    return Commands(executor.runner, profiler)


def build_rank(config: WorkerConfig, spec: ModelSpec, rank: int, report: Report) -> Executor:
    """Load this rank's part of the model, and build the rank's executor.

    All ranks call this at the same time, and wait for each other where they compute together.

    Raises:
        StartupError: the model or the memory does not allow a start; the message is one line.
    """
    torch.set_num_threads(config.num_threads)
    torch.set_grad_enabled(False)
    device = _device(config, rank)
    report("loading_weights")
    group = _join_group(config, rank, device)
    backend, linear = choose_attention(config, device.type)
    context = _build_context(config, spec, rank, device, group, linear)
    started = time.perf_counter()
    with memory_for("the weights", TOO_LARGE, device):
        require_room(spec, context)
        model = load_model(
            Path(config.weights_folder or config.model_folder),
            spec,
            context,
            lambda fraction: report("loading_weights", fraction),
            load_format=config.load_format,
            seed=config.random_seed,
        )
    if config.deterministic and linear is not None:
        require_invariance(model, linear, backend)
    took_s = time.perf_counter() - started
    logger.info("Weights: %.2f GiB on %s in %.2f s", parameter_bytes(model) / GIB, device, took_s)
    if isinstance(model, TextEncoder):
        return replace(build_encoder(config, model, group, backend, report), load_seconds=took_s)
    assert isinstance(model, CausalLM), "a family gives tokens or vectors"
    return replace(build_executor(config, model, group, backend, report), load_seconds=took_s)


def _expert_counts(
    config: WorkerConfig, spec: ModelSpec, device: torch.device
) -> ExpertCounts | None:
    if config.expert_recorder_mode is None and not config.enable_return_routed_experts:
        return None
    return ExpertCounts(
        len(spec.layer_states),
        spec.num_experts,
        spec.num_experts_per_token,
        spec.expert_layers,
        most_in_graphs=config.max_running_requests,
        device=device,
    )


def _build_context(
    config: WorkerConfig,
    spec: ModelSpec,
    rank: int,
    device: torch.device,
    group: TensorGroup | None,
    linear: str | None,
) -> BuildContext:
    context = BuildContext(
        dtype=parse_dtype(config.dtype),
        device=device,
        max_positions=config.context_len + 1,
        rounds_products=rounds_products(config, device.type),
        kv_cache_dtype=_kv_cache_dtype(config, spec, device),
        linear=linear,
        experts=choose_experts(config, device.type) if spec.num_experts else None,
        expert_counts=_expert_counts(config, spec, device),
        adapters=None if config.lora is None else AdapterSlots(config.lora.max_per_batch),
        deterministic=config.deterministic,
    )
    if group is None:
        return context
    if config.pp_size > 1:
        links = StageLinks(rank, config.tp_size, config.pp_size)
        # Rank 0, which has the scheduler, belongs to the last stage. So tokens are sampled where
        # the masks and extra outputs are, and need not be sent back.
        index = (rank // config.tp_size - 1) % config.pp_size
        stage = Stage(index, config.pp_size, links.receive, links.send)
        context = replace(context, stage=stage)
    if group.size == 1:
        return context
    return replace(
        context,
        tp_rank=group.rank,
        tp_size=group.size,
        all_reduce=group.sum_in_order if config.deterministic else group.all_reduce,
        sum_place=None if config.deterministic else partial(group.place, dtype=context.dtype),
        gather_columns=group.gather_columns,
        splits_experts=config.ep_size > 1,
    )


def build_rank_weights(
    executor: Executor, config: WorkerConfig, rank: int, beat: Callable[[], None]
) -> RankWeights:
    """Build the object that changes this rank's weights and releases its memory.

    `beat` is called often during long operations, as a heartbeat.
    """
    model = executor.model
    source: WeightFiles | None = None
    if config.load_format != "dummy":
        source = WeightFiles.open(Path(config.weights_folder or config.model_folder), model.spec)
    adapters = None
    if executor.adapters is not None and config.lora is not None:
        adapters = RankAdapters(executor.adapters, model.spec, config.lora)
    return RankWeights(
        rank,
        model.context.device,
        LiveWeights(model, source, beat, Path(config.run_folder) / f"weights-{rank}"),
        DeviceMemory(executor.runner, executor.kv, executor.allocate_kv),
        beat,
        adapters,
    )


def _kv_cache_dtype(config: WorkerConfig, spec: ModelSpec, device: torch.device) -> str:
    """Return the KV cache's data type; `auto` if this GPU does not support the checkpoint's."""
    form, stored = config.kv_cache_dtype, spec.quantization
    if stored is None or form != stored.kv_cache_dtype or form != "fp8_e4m3":
        return form
    why = unavailable() if device.type == "cuda" else ""
    if why:
        logger.warning("Keys and values are kept in 16 bits, not in the checkpoint's fp8: %s", why)
    return "auto" if why else form


def _device(config: WorkerConfig, rank: int) -> torch.device:
    """Return this rank's device.

    A GPU's device has an explicit index, because in a new thread the current GPU is GPU 0.
    """
    device = torch.device(config.device)
    if device.type != "cuda":
        return device
    use_writable_cache()
    if config.num_ranks > 1:
        wanted = config.num_local_ranks
        if wanted > torch.cuda.device_count():
            where = "" if config.node is None else " on each node"
            raise StartupError(
                f"--tp-size {config.tp_size} x --pp-size {config.pp_size} needs {wanted} GPUs"
                f"{where}; "
                f"{torch.cuda.device_count()} are visible."
            )
        torch.cuda.set_device(rank % wanted)
    return torch.device("cuda", torch.cuda.current_device())


def _join_group(config: WorkerConfig, rank: int, device: torch.device) -> TensorGroup | None:
    if config.num_ranks == 1:
        return None
    file = Path(config.run_folder) / f"group-{config.generation}"
    return TensorGroup(
        *(rank, config.tp_size, device, config.node or file, config.pp_size),
        only_nccl=config.disable_custom_all_reduce,
    )


def read_spec(config: WorkerConfig) -> ModelSpec:
    """Read the description of the worker's model from its files; see `read_model_spec`."""
    folder = Path(config.model_folder)
    return read_model_spec(folder, config.model_overrides, is_embedding=config.is_embedding)


def build_grammars(config: WorkerConfig, vocab_size: int) -> Grammars:
    """Create `Grammars` with the configured library.

    Beside a GPU, the library is imported while the weights load. On a CPU, this would delay the
    start and take memory, so the first grammar waits for it instead.
    """
    if config.grammar_backend == "none":
        return Grammars(None, vocab_size, config.eos_token_ids)

    def make() -> GrammarBackend[Any]:
        libraries = open_libraries(
            config.grammar_backend,
            Path(config.tokenizer_folder),
            vocab_size,
            config.eos_token_ids,
        )
        return_freed_memory()
        return libraries

    return Grammars(make, vocab_size, config.eos_token_ids, imports_at_once=config.device != "cpu")


def _shared_grain(model: Model, config: WorkerConfig) -> int:
    """Return `TokenBudget.shared_grain` for the model.

    It is 0 if expert choices may be recorded, because a record must cover all tokens.
    """
    if config.expert_recorder_mode or config.enable_return_routed_experts:
        return 0
    return model.shared_grain if isinstance(model, TextEncoder) else 0


def _token_budget(config: WorkerConfig, spec: ModelSpec, shared_grain: int) -> TokenBudget:
    alone = chunk_tokens(config)
    if alone is None or config.device == "cpu":
        smooth = alone
    else:
        smooth = smooth_tokens(spec.num_active_parameters // config.num_ranks, alone)
    return TokenBudget(alone, smooth, shared_grain, splits_prompts=spec.keeps_state)
