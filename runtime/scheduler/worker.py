"""Builds the worker's parts from its configuration: the only place that knows them all."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch

from kernels.linear import GATED_TOKENS
from runtime.attention.backend import (
    ATTENTION_BACKENDS,
    DEFAULT_ATTENTION,
    AttentionBackend,
    StepLimits,
)
from runtime.batch_rows import BatchRows
from runtime.cache.manager import CacheManager
from runtime.checkpoint.config_json import load_model_config
from runtime.checkpoint.model_config import ModelConfig
from runtime.config import WorkerConfig
from runtime.distributed.group import TensorGroup
from runtime.errors import StartupError
from runtime.executor.device_memory import DeviceMemory
from runtime.executor.extend_graphs import graph_token_sizes
from runtime.executor.kernel_choices import log_kernels
from runtime.executor.memory import GIB, PoolSize, cpu_budget, cuda_budget, size_pool
from runtime.executor.model_runner import GraphLimits, ModelRunner
from runtime.executor.out_of_memory import TOO_LARGE, memory_for, require_room
from runtime.executor.profiler import Profiler
from runtime.forward_batch import KVCache
from runtime.grammar.backend import GRAMMAR_BACKENDS, GrammarBackend
from runtime.layers.context import BuildContext, parse_dtype
from runtime.loader.files import WeightFiles
from runtime.loader.live import LiveWeights
from runtime.loader.load import load_model, parameter_bytes
from runtime.messages import (
    ControlReply,
    FrontInbound,
    Phase,
    TokenDeltas,
    WorkerCommand,
    WorkerReady,
)
from runtime.models.causal_lm import CausalLM
from runtime.sampling.warmup import warm_up_sampling
from runtime.scheduler.budget import TokenBudget, smooth_tokens
from runtime.scheduler.commands import CommandedRunner
from runtime.scheduler.grammars import Grammars
from runtime.scheduler.invariance import (
    invariant_attention,
    invariant_linear,
    require_invariance,
)
from runtime.scheduler.rank_weights import RankWeights
from runtime.scheduler.ranks import LeadingRunner, Ranks
from runtime.scheduler.scheduler import Runner, Scheduler, SchedulerOptions
from runtime.scheduler.stats import SchedulerStats
from runtime.scheduler.warmup import Prompts, compute_prompts, prompts_to_compile, warm_up
from runtime.scheduler.weight_updates import WeightUpdates
from runtime.shared_state import SharedState

logger = logging.getLogger(__name__)

# What to do where memory does not suffice at start.
_OF_STEPS = "--chunked-prefill-size or --max-running-requests"
_OF_POOL = "--mem-fraction-static or --max-total-tokens"
_OF_GRAPHS = (
    "--mem-fraction-static or --max-running-requests, or leave them out with --disable-cuda-graph"
)


class Report(Protocol):
    """Tells the front where start-up is."""

    def __call__(self, phase: Phase, fraction: float = 0.0, detail: str = "") -> None:
        """Report `phase` and the share of it that is done."""
        ...


@dataclass(frozen=True, kw_only=True)
class Executor:
    """What a rank computes with; the same on every rank but for its slice of the weights."""

    runner: ModelRunner
    model: CausalLM
    kv: list[KVCache]
    size: PoolSize
    attention_backend: str
    weight_bytes: int


def build_worker(
    config: WorkerConfig,
    shared: SharedState,
    send_tokens: Callable[[TokenDeltas], None],
    send_front: Callable[[FrontInbound], None],
    report: Report,
    ranks: Ranks | None = None,
) -> tuple[Scheduler, WorkerReady]:
    """Load the model and put scheduler, cache and executor around it.

    Args:
        config: the worker's.
        shared: gauges.
        send_tokens: to the detokenizer.
        send_front: to the front.
        report: where start-up is.
        ranks: the processes that share each layer, already starting; needed when `tp_size > 1`.

    Raises:
        StartupError: the model or the memory does not allow it; one line.
    """
    grammars = _grammars(config)
    executor = build_executor(config, 0, report)
    commanded = command(executor, config, 0)
    runner: Runner = commanded
    obey: Callable[[WorkerCommand], ControlReply] = commanded.obey
    if ranks is not None:
        runner = LeadingRunner(commanded, ranks)
        obey = ranks.before(commanded.obey)
        ranks.started()
    size = executor.size
    scheduler = Scheduler(
        runner,
        CacheManager(
            size.num_pages, config.page_size, enable_prefix_cache=not config.disable_radix_cache
        ),
        SchedulerStats(shared, config.decode_log_interval),
        SchedulerOptions(
            max_running_requests=config.max_running_requests,
            max_queued_requests=config.max_queued_requests,
            context_len=config.context_len,
            token_budget=_token_budget(config, executor.weight_bytes),
            policy=config.schedule_policy,
            eos_token_ids=config.eos_token_ids,
            stream_interval=config.stream_interval,
            overlap=config.overlap,
        ),
        send_tokens=send_tokens,
        send_front=send_front,
        grammars=grammars,
        obey=obey,
        weights=WeightUpdates(
            build_rank_weights(executor, config, 0, shared.beat), ranks, shared.beat
        ),
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


def command(executor: Executor, config: WorkerConfig, rank: int) -> CommandedRunner:
    """Make this rank's runner one that obeys commands."""
    dp_rank = config.dp_rank if config.dp_size > 1 else None
    profiler = Profiler(config.device, rank, config.tp_size, dp_rank)
    return CommandedRunner(executor.runner, profiler)


def build_executor(config: WorkerConfig, rank: int, report: Report) -> Executor:
    """Load this rank's slice of the model and make it ready to compute steps.

    Ranks call this at the same time: each waits for the others where they compute together.

    Raises:
        StartupError: the model or the memory does not allow it; one line.
    """
    torch.set_num_threads(config.num_threads)
    torch.set_grad_enabled(False)
    device = _device(config, rank)
    folder = Path(config.model_folder)
    model_config = load_model_config(folder)
    report("loading_weights")
    group = _join_group(config, rank, device)
    backend = config.attention_backend
    if backend == "auto":
        backend = DEFAULT_ATTENTION[device.type]
    linear = None
    if config.deterministic:
        linear = invariant_linear(device.type)
        backend = invariant_attention(backend, device.type)
    context = BuildContext(
        dtype=parse_dtype(config.dtype),
        device=device,
        max_positions=config.context_len + 1,
        linear=linear,
    )
    if group is not None:
        context = replace(
            context,
            tp_rank=rank,
            tp_size=group.size,
            all_reduce=group.sum_in_order if config.deterministic else group.all_reduce,
            sum_place=None if config.deterministic else partial(group.place, dtype=context.dtype),
            gather_columns=group.gather_columns,
        )
    started = time.perf_counter()
    with memory_for("the weights", TOO_LARGE, device):
        require_room(model_config, context)
        model = load_model(
            Path(config.weights_folder or folder),
            model_config,
            context,
            lambda fraction: report("loading_weights", fraction),
            load_format=config.load_format,
            seed=config.random_seed,
        )
    if linear is not None:
        require_invariance(model, linear, backend)
    logger.info(
        "Weights: %.2f GiB on %s in %.2f s",
        parameter_bytes(model) / GIB,
        device,
        time.perf_counter() - started,
    )
    report("allocating_cache")
    attention = ATTENTION_BACKENDS.load(backend)(device.type, _step_limits(config))
    log_kernels(device.type, attention, backend, config)
    weight_bytes = parameter_bytes(model)
    if group is not None:
        # Ranks differ by a bias; what is decided by it must not.
        (weight_bytes,) = group.minimum(weight_bytes)
    parts = _Parts(config, model, attention, group, weight_bytes)
    with memory_for("the largest step", f"lower {_OF_STEPS}", device):
        size = _size_pool(parts)
    with memory_for("the KV pool", f"lower {_OF_POOL}", device):
        kv = _allocate(parts, size)
    with memory_for("request state and warm-up steps", f"lower {_OF_STEPS}, or {_OF_POOL}", device):
        runner = _build_runner(parts, kv)
        report("warming_up")
        _warm_up(runner, config, model_config.vocab_size, device)
    with memory_for("CUDA graphs", f"lower {_OF_GRAPHS}", device):
        runner.capture_graphs(lambda fraction: report("warming_up", fraction, "CUDA graphs"))
    if group is not None:
        group.minimum(0)
    return Executor(
        runner=runner,
        model=model,
        kv=kv,
        size=size,
        attention_backend=backend,
        weight_bytes=weight_bytes,
    )


def _warm_up(
    runner: ModelRunner, config: WorkerConfig, vocab_size: int, device: torch.device
) -> None:
    warm_up(runner, vocab_size, config.page_size, config.context_len)
    if device.type != "cuda":
        return
    max_tokens = _chunk_tokens(config) or config.context_len - 1
    for step in prompts_to_compile(max_tokens, config.context_len, config.max_running_requests):
        compute_prompts(runner, step, vocab_size)
    warm_up_sampling(vocab_size, device)


def build_rank_weights(
    executor: Executor, config: WorkerConfig, rank: int, beat: Callable[[], None]
) -> RankWeights:
    """What this rank does about weights and memory; `beat` is called often while it does."""
    model = executor.model
    source: WeightFiles | None = None
    if config.load_format != "dummy":
        source = WeightFiles.open(Path(config.weights_folder or config.model_folder), model.config)
    kv, size = executor.kv, executor.size
    heads = _num_kv_heads(model)
    return RankWeights(
        rank,
        model.context.device,
        LiveWeights(model, source, beat, Path(config.run_folder) / f"weights-{rank}"),
        DeviceMemory(
            executor.runner,
            kv,
            lambda: allocate_kv(
                size, model.config, heads, model.context.dtype, model.context.device
            ),
        ),
        beat,
    )


@dataclass(frozen=True)
class _Parts:
    """What a runner is made of, besides its pool."""

    config: WorkerConfig
    model: CausalLM
    attention: AttentionBackend
    group: TensorGroup | None
    weight_bytes: int


def _num_kv_heads(model: CausalLM) -> int:
    # With fewer heads than ranks each rank holds one, some the same.
    return max(1, model.config.num_kv_heads // model.context.tp_size)


def _device(config: WorkerConfig, rank: int) -> torch.device:
    """This rank's device, a GPU by its number: a new thread's own begins with 0."""
    device = torch.device(config.device)
    if device.type != "cuda":
        return device
    if config.tp_size > 1:
        if config.tp_size > torch.cuda.device_count():
            raise StartupError(
                f"--tp-size {config.tp_size} needs as many GPUs; {torch.cuda.device_count()} are "
                "visible."
            )
        torch.cuda.set_device(rank)
    return torch.device("cuda", torch.cuda.current_device())


def _join_group(config: WorkerConfig, rank: int, device: torch.device) -> TensorGroup | None:
    if config.tp_size == 1:
        return None
    store = Path(config.run_folder) / f"group-{config.generation}"
    return TensorGroup(rank, config.tp_size, device, store)


def _grammars(config: WorkerConfig) -> Grammars:
    model = load_model_config(Path(config.model_folder))
    if config.grammar_backend == "none":
        return Grammars(None, model.vocab_size, config.eos_token_ids)

    def make() -> GrammarBackend[Any]:
        # Imported on a thread while weights load.
        return GRAMMAR_BACKENDS.load(config.grammar_backend)(
            Path(config.tokenizer_folder), model.vocab_size, config.eos_token_ids
        )

    return Grammars(make, model.vocab_size, config.eos_token_ids)


def _step_limits(config: WorkerConfig) -> StepLimits:
    """A full batch that decodes beside a full budget of prompt tokens."""
    budget = _chunk_tokens(config) or config.context_len * config.max_running_requests
    return StepLimits(
        max_seqs=config.max_running_requests + 1,
        max_tokens=budget + config.max_running_requests,
    )


def _token_budget(config: WorkerConfig, weight_bytes: int) -> TokenBudget:
    alone = _chunk_tokens(config)
    if alone is None or config.device == "cpu":
        return TokenBudget(alone, alone)
    dtype: torch.dtype = getattr(torch, config.dtype)
    return TokenBudget(alone, smooth_tokens(weight_bytes // dtype.itemsize, alone))


def _chunk_tokens(config: WorkerConfig) -> int | None:
    return config.chunked_prefill_size if config.chunked_prefill_size > 0 else None


def _size_pool(parts: _Parts) -> PoolSize:
    config, model, group = parts.config, parts.model, parts.group
    if model.context.device.type == "cpu":
        budget = cpu_budget(
            config.mem_fraction_static, parts.weight_bytes, config.tp_size * config.dp_size
        )
    else:
        budget = cuda_budget(
            config.mem_fraction_static, parts.weight_bytes, _activation_bytes(parts)
        )
    if group is not None:
        budget = budget.limited(*group.minimum(budget.size_bytes, budget.available_bytes))
    shape = model.config
    numbers = 2 * shape.num_layers * _num_kv_heads(model) * shape.head_dim
    return size_pool(
        numbers * model.context.dtype.itemsize,
        page_size=config.page_size,
        max_total_tokens=config.max_total_tokens,
        max_running_requests=config.max_running_requests,
        context_len=config.context_len,
        budget=budget,
    )


def _activation_bytes(parts: _Parts) -> int:
    """Measure what the largest step of prompts needs besides weights and pool, on a GPU."""
    config, model = parts.config, parts.model
    most = _chunk_tokens(config) or config.context_len - 1
    length = min(config.context_len - 1, most)
    num_seqs = max(1, min(config.max_running_requests, most // max(1, length)))
    num_pages = -(-length // config.page_size) + 1
    size = PoolSize(num_pages, config.page_size, 0)
    runner = _build_runner(parts, _allocate(parts, size), graphs=False)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    # One token fewer than takes a kernel that needs less memory may need the most.
    steps = Prompts(min(length, GATED_TOKENS - 1)), Prompts(length, num_seqs)
    for step in dict.fromkeys(steps):
        compute_prompts(runner, step, model.config.vocab_size, num_pages)
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() - before
    del runner
    torch.cuda.empty_cache()
    # Logits of a full batch, twice: as computed and in float32.
    return peak + config.max_running_requests * model.config.vocab_size * 8


def _allocate(parts: _Parts, size: PoolSize) -> list[KVCache]:
    model = parts.model
    return allocate_kv(
        size, model.config, _num_kv_heads(model), model.context.dtype, model.context.device
    )


def _build_runner(parts: _Parts, kv: list[KVCache], *, graphs: bool = True) -> ModelRunner:
    config, model = parts.config, parts.model
    device, shape = model.context.device, model.config
    # One more than the context: with overlap a last, dropped token is still written.
    max_pages = -(-(config.context_len + 1) // config.page_size)
    rows = BatchRows(
        config.max_running_requests, max_pages, config.context_len, shape.vocab_size, device
    )
    return ModelRunner(
        model,
        parts.attention,
        kv,
        rows,
        config.page_size,
        graphs=_graph_limits(parts) if graphs else None,
        share=None if parts.group is None else parts.group.share,
    )


def _graph_limits(parts: _Parts) -> GraphLimits | None:
    config, context = parts.config, parts.model.context
    if context.device.type != "cuda" or config.disable_cuda_graph:
        return None
    if not parts.attention.is_graph_safe:
        logger.info("No CUDA graphs: this attention back end cannot be captured")
        return None
    num_parameters = parts.weight_bytes // context.dtype.itemsize
    return GraphLimits(
        config.max_running_requests,
        graph_token_sizes(num_parameters, _step_limits(config).max_tokens),
        keep_hidden=config.enable_return_hidden_states,
        shares_prefixes=parts.model.config.has_full_attention,
    )


def allocate_kv(
    size: PoolSize,
    config: ModelConfig,
    num_kv_heads: int,
    dtype: torch.dtype,
    device: torch.device,
) -> list[KVCache]:
    """One pair of page arrays per layer; page 0 is for padding."""
    # Zeroed memory is mapped when first touched, so a large pool on the CPU costs nothing at first.
    shape = (size.num_pages + 1, num_kv_heads, size.page_size, config.head_dim)
    return [
        KVCache(
            torch.zeros(shape, dtype=dtype, device=device),
            torch.zeros(shape, dtype=dtype, device=device),
        )
        for _ in range(config.num_layers)
    ]
