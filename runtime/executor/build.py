"""Builds the executor of one rank: KV pool, batch rows, CUDA graphs and runner around a model."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

import torch

from kernels.linear import GATED_TOKENS
from kernels.prompt_attention.cudnn import MIN_LENGTH
from kernels.triton_support.compile_ahead import Requests, compiling_ahead
from runtime.cache.state_pool import SLOTS_PER_HOLD
from runtime.cache.window_pages import pages_of_request
from runtime.checkpoint.model_spec import ModelSpec
from runtime.config.options import WorkerConfig
from runtime.distributed.group import TensorGroup
from runtime.errors import StartupError
from runtime.executor.adapter_pool import AdapterPool
from runtime.executor.batch_rows import BatchRows
from runtime.executor.device_errors import raise_if_lost
from runtime.executor.graph_buckets import GraphLimits, graph_token_sizes
from runtime.executor.host_pool import host_pools
from runtime.executor.image_store import see_the_largest
from runtime.executor.kernel_choices import log_kernels
from runtime.executor.kv_pool import allocate_kv, pool_bytes_per_token
from runtime.executor.memory import GIB, Budget, PoolSize, cpu_budget, cuda_budget, size_pool
from runtime.executor.model_runner import ModelRunner, StepRunner
from runtime.executor.out_of_memory import memory_for
from runtime.executor.warmup_steps import (
    Prompts,
    compute_prompts,
    prompts_to_compile,
    warm_up,
    warm_up_sampling,
)
from runtime.executor.window_map import window_map
from runtime.ipc.messages import Phase
from runtime.models.attention.backend import ATTENTION_BACKENDS, AttentionBackend, StepLimits
from runtime.models.attention.forward_batch import KVCache
from runtime.models.layers.build_context import BuildContext, parse_dtype
from runtime.models.model import CausalLM, Model
from runtime.models.vision.model import SeeingDecoder

logger = logging.getLogger(__name__)

# Largest share of the KV pool's memory for recurrent states, unless the operator sets the number of
# slots.
_STATES_SHARE = 0.45
# Most slots of recurrent states for each running request; more are rarely useful.
_USEFUL_SLOTS = 16
# Number of KV pages of a temporary runner, which finds out the kernels to compile.
_FEW_PAGES = 16
# The options to change when memory runs out at start-up, for each part of the start-up.
_OF_STEPS = "--chunked-prefill-size or --max-running-requests"
_OF_POOL = "--mem-fraction-static or --max-total-tokens"
_OF_HOST = "--hicache-ratio or --max-total-tokens"
_OF_ADAPTERS = "--max-loras-per-batch or --max-lora-rank"
_OF_GRAPHS = (
    "--mem-fraction-static or --max-running-requests, or turn them off with --disable-cuda-graph"
)


class Report(Protocol):
    """A function that reports the progress of the start-up to the front process."""

    def __call__(self, phase: Phase, fraction: float = 0.0, detail: str = "") -> None:
        """Report the current phase, the fraction of it that is done, and what is being done."""
        ...


@dataclass(frozen=True, kw_only=True)
class Executor:
    """The parts with which one rank computes steps.

    Attributes:
        runner: launches the steps.
        model: this rank's part of the model.
        kv: the KV cache, one entry per layer.
        size: size of the KV pool.
        attention_backend: name of the attention back end.
        weight_bytes: memory of this rank's weights.
        allocate_kv: allocates the KV cache again after it was released.
        load_seconds: time to read the weights; set by the code that reads them.
        adapters: LoRA adapters; `None` if the server takes none.
    """

    runner: StepRunner
    model: Model
    kv: list[KVCache]
    size: PoolSize
    attention_backend: str
    weight_bytes: int
    allocate_kv: Callable[[], list[KVCache]]
    load_seconds: float = 0.0
    adapters: AdapterPool | None = None


def build_executor(
    config: WorkerConfig,
    model: CausalLM,
    group: TensorGroup | None,
    backend: str,
    report: Report,
) -> Executor:
    """Build the executor around a loaded model, and run warm-up steps.

    All ranks call this at the same time, and wait for each other where they compute together.

    Args:
        config: the worker's configuration.
        model: this rank's part of the model, loaded.
        group: the ranks that share each layer; `None` for a single rank.
        backend: attention back end, a name in `ATTENTION_BACKENDS`.
        report: receives the progress.

    Raises:
        StartupError: there is too little memory; the message is one line.
    """
    device = model.context.device
    report("allocating_cache")
    attention = build_attention(config, backend, device.type)
    log_kernels(device.type, attention, backend, config)
    weight_bytes = sum(holder.size_bytes for _, holder in model.holders())
    if group is not None:
        # The weights of the ranks may differ in size by a bias. All ranks use the smallest size, so
        # that decisions based on it are equal.
        (weight_bytes,) = group.minimum(weight_bytes)
    adapters = None
    if config.lora is not None and model.context.adapters is not None:
        with memory_for("adapters", f"lower {_OF_ADAPTERS}", device):
            adapters = AdapterPool(model, model.context.adapters, config.lora)
    parts = _Parts(config, model, attention, group, weight_bytes, adapters)
    if device.type == "cuda":
        report("warming_up")
        _compile_ahead(parts)
        report("allocating_cache")
    with memory_for("the largest step", f"lower {_OF_STEPS}", device):
        size = _size_pool(parts)
    with memory_for("the KV pool", f"lower {_OF_POOL}", device):
        kv = _allocate(parts, size)
    with memory_for("request state and warm-up steps", f"lower {_OF_STEPS}, or {_OF_POOL}", device):
        runner = _build_runner(parts, kv)
    with memory_for("the prefix cache in host memory", f"lower {_OF_HOST}", torch.device("cpu")):
        runner.host = host_pools(config, size, kv, device)
    with memory_for("request state and warm-up steps", f"lower {_OF_STEPS}, or {_OF_POOL}", device):
        report("warming_up")
        _warm_up(runner, config, model.spec.vocab_size, device)
    with memory_for("CUDA graphs", f"lower {_OF_GRAPHS}", device):
        runner.capture_graphs(lambda fraction: report("warming_up", fraction, "CUDA graphs"))
    if group is not None:
        group.minimum_of_stages(0)
    return Executor(
        runner=runner,
        model=model,
        kv=kv,
        size=size,
        attention_backend=backend,
        weight_bytes=weight_bytes,
        allocate_kv=lambda: _allocate(parts, size),
        adapters=adapters,
    )


def chunk_tokens(config: WorkerConfig) -> int | None:
    """Return the limit of prompt tokens per step; `None` if prompts are not split into chunks."""
    return config.chunked_prefill_size if config.chunked_prefill_size > 0 else None


def build_attention(config: WorkerConfig, backend: str, device_type: str) -> AttentionBackend:
    """Create an attention back end whose buffers fit the largest step that the options allow."""
    return ATTENTION_BACKENDS.load(backend)(device_type, _step_limits(config))


def with_images(budget: Budget, config: WorkerConfig, spec: ModelSpec) -> Budget:
    """Return the memory budget that remains after the vectors of images.

    Two kinds of image vectors take memory: those that stay in memory (at least those of one large
    image), and a copy of those that one step reads.
    """
    if spec.vision is None:
        return budget
    per_token = image_token_bytes(config, spec)
    kept = max(config.image_cache_mb * 2**20, spec.vision.max_tokens * per_token)
    read = (chunk_tokens(config) or config.context_len) * per_token
    return budget.without(kept + read, "vectors of images")


def image_token_bytes(config: WorkerConfig, spec: ModelSpec) -> int:
    """Return the bytes of the image tower's output for one image token."""
    outputs = 0 if spec.vision is None else spec.vision.num_outputs
    return outputs * spec.hidden_size * parse_dtype(config.dtype).itemsize


def pool_of(
    config: WorkerConfig, spec: ModelSpec, context: BuildContext, budget: Budget
) -> PoolSize:
    """Return the size of the model's KV pool and of its recurrent states within a memory budget.

    Raises:
        StartupError: not even one page fits, or fewer tokens than the user requested.
    """
    num_slots, budget = with_states(config, spec, context, budget)
    per_token = pool_bytes_per_token(spec, context)
    per_window_token, ratio = 0, config.swa_full_tokens_ratio
    if has_window_pages(config, spec):
        assert ratio is not None
        per_window_token = pool_bytes_per_token(spec, context, windowed_only=True)
        per_token += math.ceil(per_window_token * ratio) - per_window_token
    size = size_pool(
        per_token,
        page_size=config.page_size,
        max_total_tokens=config.max_total_tokens,
        max_running_requests=config.max_running_requests,
        context_len=config.context_len,
        budget=budget,
    )
    if per_window_token:
        size = with_window_pages(size, config, spec, per_window_token)
    return replace(size, num_state_slots=num_slots)


def has_window_pages(config: WorkerConfig, spec: ModelSpec) -> bool:
    """Whether sliding-window layers get pages of their own in the KV pool."""
    ratio = config.swa_full_tokens_ratio
    # Whole prompts would need window pages for all of their tokens.
    is_chunked = chunk_tokens(config) is not None
    return ratio is not None and ratio < 1 and is_chunked and spec.grouped_window is not None


def with_window_pages(
    size: PoolSize, config: WorkerConfig, spec: ModelSpec, bytes_per_token: int
) -> PoolSize:
    """Return `size` with pages for the sliding-window layers.

    Their number is a share of the pool's tokens, `--swa-full-tokens-ratio`.

    Args:
        size: size of the pool for the other layers; its bytes include the window pages.
        config: the worker's configuration, which has the share.
        spec: a model for which `has_window_pages` is true.
        bytes_per_token: bytes that a token takes in the sliding-window layers.

    Raises:
        StartupError: there are too few window pages for one request.
    """
    window, chunk, ratio = spec.grouped_window, chunk_tokens(config), config.swa_full_tokens_ratio
    assert window is not None
    assert chunk is not None
    assert ratio is not None
    page_size = size.page_size
    num_pages = int(size.num_pages * ratio)
    least = pages_of_request(window, page_size) + -(-chunk // page_size)
    if num_pages < least:
        raise StartupError(
            f"--swa-full-tokens-ratio {ratio:g} leaves {num_pages * page_size} tokens for layers "
            f"with a window, of {least * page_size} that one request needs; raise it, or lower "
            "--chunked-prefill-size."
        )
    logger.info(
        "Windowed layers: %d tokens = %d pages of %d, %.2f GiB of the KV pool; at most %d requests",
        num_pages * page_size,
        num_pages,
        page_size,
        num_pages * page_size * bytes_per_token / GIB,
        1 + (num_pages - least) // pages_of_request(window, page_size),
    )
    return replace(size, num_window_pages=num_pages)


def with_states(
    config: WorkerConfig, spec: ModelSpec, context: BuildContext, budget: Budget
) -> tuple[int, Budget]:
    """Return the number of slots for recurrent states, and the memory budget that remains.

    The number is 0 if the model has no recurrent states.

    Raises:
        StartupError: there are too few slots for one request.
    """
    slot = spec.state_slot_bytes(context.tp_size, context.dtype.itemsize)
    if not slot:
        return 0, budget
    num_slots = config.max_mamba_cache_size
    if num_slots is None:
        fits = int(budget.size_bytes * _STATES_SHARE) // slot
        num_slots = min(fits, config.max_running_requests * _USEFUL_SLOTS)
    if num_slots < SLOTS_PER_HOLD:
        raise StartupError(
            f"No memory is left for recurrent states, {slot * SLOTS_PER_HOLD} bytes a request; "
            "raise --mem-fraction-static or --max-mamba-cache-size, or free memory."
        )
    taken = num_slots * slot
    left = budget.without(taken, f"{num_slots} slots of recurrent states")
    # If the user set the pool's size, the pool may exceed the budget, but not use this memory.
    return num_slots, replace(left, available_bytes=max(left.available_bytes - taken, 0))


@dataclass(frozen=True)
class _Parts:
    """The parts from which a runner is built, besides the KV pool."""

    config: WorkerConfig
    model: CausalLM
    attention: AttentionBackend
    group: TensorGroup | None
    weight_bytes: int
    adapters: AdapterPool | None


def _warm_up(
    runner: ModelRunner, config: WorkerConfig, vocab_size: int, device: torch.device
) -> None:
    warm_up(runner, vocab_size, config.page_size, config.context_len)
    if device.type != "cuda":
        return
    for step in _steps_to_compile(config):
        compute_prompts(runner, step, vocab_size)
    runner.warm_up_images()
    warm_up_sampling(vocab_size, device)


def _compile_ahead(parts: _Parts) -> None:
    """Compile kernels on several threads, before steps need them one after the other.

    If this fails, they are compiled one after the other. With several ranks this is always so,
    because their steps wait for each other.
    """
    if parts.group is not None or not parts.attention.is_graph_safe:
        return
    began = time.monotonic()
    try:
        with compiling_ahead() as requests:
            if requests is not None:
                _request_kernels(parts, requests)
    except Exception as error:
        raise_if_lost(error)
        logger.info("The other kernels are compiled one after the other: %s", error)
    else:
        if requests is not None and requests.compiled:
            seconds = time.monotonic() - began
            logger.info("Compiled %d kernels ahead in %.1f s", requests.compiled, seconds)
    torch.cuda.empty_cache()


def _request_kernels(parts: _Parts, requests: Requests) -> None:
    config, model = parts.config, parts.model
    vocab_size = model.spec.vocab_size
    runner = _build_runner(parts, _allocate(parts, PoolSize(_FEW_PAGES, config.page_size, 0)))
    warm_up(runner, vocab_size, config.page_size, config.context_len)
    if requests.are_in_folder():
        return
    for step in _steps_to_compile(config):
        compute_prompts(runner, step, vocab_size)
    warm_up_sampling(vocab_size, model.context.device)
    runner.request_kernels_of_graphs()


def _steps_to_compile(config: WorkerConfig) -> list[Prompts]:
    max_tokens = chunk_tokens(config) or config.context_len - 1
    return prompts_to_compile(max_tokens, config.context_len, config.max_running_requests)


def _step_limits(config: WorkerConfig) -> StepLimits:
    """Return the limits of the largest step: all requests decode, prompts use the full budget."""
    budget = chunk_tokens(config) or config.context_len * config.max_running_requests
    return StepLimits(
        max_seqs=config.max_running_requests + 1,
        max_tokens=budget + config.max_running_requests,
        max_prompt_tokens=budget,
    )


def _size_pool(parts: _Parts) -> PoolSize:
    config, model, group = parts.config, parts.model, parts.group
    if model.context.device.type == "cpu":
        budget = cpu_budget(
            config.mem_fraction_static, parts.weight_bytes, config.num_local_ranks * config.dp_size
        )
        if parts.adapters is not None:
            # The adapters are allocated, but the operating system counts memory only once it is
            # written.
            budget = budget.without(parts.adapters.size_bytes, "adapters")
    else:
        budget = cuda_budget(
            config.mem_fraction_static, parts.weight_bytes, _activation_bytes(parts)
        )
    budget = with_images(budget, config, model.spec)
    if group is not None:
        budget = budget.limited(*group.minimum(budget.size_bytes, budget.available_bytes))
    size = pool_of(config, model.spec, model.context, budget)
    if group is None:
        return size
    # Each pipeline stage has room for another number of tokens, so the smallest is used.
    (num_pages,) = group.minimum_of_stages(size.num_pages)
    return replace(
        size, num_pages=num_pages, size_bytes=size.size_bytes // size.num_pages * num_pages
    )


def _activation_bytes(parts: _Parts) -> int:
    """Measure how much GPU memory the largest prompt step needs besides weights and KV pool."""
    config, model = parts.config, parts.model
    most = chunk_tokens(config) or config.context_len - 1
    length = min(config.context_len - 1, most)
    num_seqs = max(1, min(config.max_running_requests, most // max(1, length)))
    num_pages = -(-length // config.page_size) + 1
    size = PoolSize(num_pages, config.page_size, 0)
    runner = _build_runner(parts, _allocate(parts, size), graphs=False)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    # From some length on, a kernel that needs less memory is used. So a step just below this length
    # may need the most.
    steps = [Prompts(min(length, GATED_TOKENS - 1)), Prompts(length, num_seqs)]
    if length > MIN_LENGTH:
        # Attention copies prompts to round up their length. A step of such prompts needs more
        # memory.
        steps.append(Prompts(length - 1, num_seqs))
    for step in dict.fromkeys(steps):
        compute_prompts(runner, step, model.spec.vocab_size, num_pages)
    if isinstance(model, SeeingDecoder):
        see_the_largest(model)
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() - before
    del runner
    torch.cuda.empty_cache()
    # Add the logits of a full batch, twice: as computed and in float32.
    return peak + config.max_running_requests * model.spec.vocab_size * 8


def _allocate(parts: _Parts, size: PoolSize) -> list[KVCache]:
    return allocate_kv(size, parts.model.spec, parts.model.context)


def _build_runner(parts: _Parts, kv: list[KVCache], *, graphs: bool = True) -> ModelRunner:
    config, model = parts.config, parts.model
    # One token more than the context: with overlap one more token is written, then dropped.
    max_pages = -(-(config.context_len + 1) // config.page_size)
    rows = BatchRows(
        config.max_running_requests,
        max_pages,
        config.context_len,
        model.spec.vocab_size,
        model.context.device,
        image_cell=model.spec.image_cell,
        eos_token_ids=config.eos_token_ids,
        adapters=model.context.adapters,
    )
    rows.windows = window_map(kv, config.page_size, model.context.device)
    runner = ModelRunner(
        model,
        parts.attention,
        kv,
        rows,
        config.page_size,
        share=None if parts.group is None or parts.group.size == 1 else parts.group.share,
        sees_alone=config.deterministic,
        adapters=parts.adapters,
    )
    limits = _graph_limits(parts) if graphs else None
    if limits is not None:
        runner.add_graphs(limits)
    return runner


def _graph_limits(parts: _Parts) -> GraphLimits | None:
    config, context = parts.config, parts.model.context
    if context.device.type != "cuda" or config.disable_cuda_graph:
        return None
    if context.stage.count > 1:
        logger.info("No CUDA graphs: the layers are cut into stages")
        return None
    if not parts.attention.is_graph_safe:
        logger.info("No CUDA graphs: this attention back end cannot be captured")
        return None
    spec = parts.model.spec
    num_parameters = spec.num_active_parameters // context.tp_size
    most = _step_limits(config).max_tokens
    return GraphLimits(
        config.max_running_requests,
        # Graphs with prompts cannot save snapshots of recurrent states.
        [] if spec.is_recurrent else graph_token_sizes(num_parameters, most),
        keep_hidden=config.enable_return_hidden_states,
        shares_prefixes=spec.max_window is None,
    )
