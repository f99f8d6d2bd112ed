"""Builds the executor of one rank for a text encoder: batch rows and runner around a model."""

from __future__ import annotations

import logging
from dataclasses import replace

from runtime.config.options import WorkerConfig
from runtime.distributed.group import TensorGroup
from runtime.executor.batch_rows import BatchRows
from runtime.executor.build import Executor, Report, build_attention, chunk_tokens
from runtime.executor.encoder_runner import EncoderRunner
from runtime.executor.memory import PoolSize
from runtime.executor.out_of_memory import memory_for
from runtime.executor.warmup_steps import Prompts, compute_prompts
from runtime.models.model import TextEncoder

logger = logging.getLogger(__name__)

_FEW_TOKENS = 8


def build_encoder(
    config: WorkerConfig,
    model: TextEncoder,
    group: TensorGroup | None,
    backend: str,
    report: Report,
) -> Executor:
    """Build the executor around a loaded text encoder, and run a first step.

    An encoder keeps nothing between steps. Its pages exist only because the scheduler limits the
    running requests by pages; they take no memory.

    Args:
        config: the worker's configuration.
        model: this rank's part of the model, loaded.
        group: the ranks that share each layer; `None` for a single rank.
        backend: attention back end of causal models, a name in `ATTENTION_BACKENDS`.
        report: receives the progress.

    Raises:
        StartupError: there is too little memory; the message is one line.
    """
    device, spec = model.context.device, model.spec
    max_pages = -(-(config.context_len + 1) // config.page_size)
    num_pages = config.max_running_requests * max_pages
    with memory_for("request state and warm-up steps", "lower --max-running-requests", device):
        rows = BatchRows(
            config.max_running_requests, max_pages, config.context_len, spec.vocab_size, device
        )
        attention = None
        if model.sees_backward_only:
            # A text is computed in one step, even if it exceeds the token budget of a step.
            budget = chunk_tokens(config)
            longest = -1 if budget is None else max(budget, config.context_len)
            whole = replace(config, chunked_prefill_size=longest)
            attention = build_attention(whole, backend, device.type)
        runner = EncoderRunner(model, rows, is_alone=group is None, attention=attention)
        report("warming_up")
        compute_prompts(runner, Prompts(min(_FEW_TOKENS, config.context_len)), spec.vocab_size)
    if group is not None:
        group.minimum(0)
    logger.info("No KV pool: this model keeps nothing between steps")
    return Executor(
        runner=runner,
        model=model,
        kv=[],
        size=PoolSize(num_pages, config.page_size, 0),
        attention_backend="none" if attention is None else backend,
        weight_bytes=sum(holder.size_bytes for _, holder in model.holders()),
        allocate_kv=list,
    )
