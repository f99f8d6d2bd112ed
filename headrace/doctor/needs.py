"""Computes the memory that a model needs, with the worker's own functions, without loading it.

This module imports torch, unlike the rest of the doctor.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from headrace.doctor.findings import Capacity, Kernel, Needs, Pool
from runtime.cache.manager import CacheManager
from runtime.checkpoint.model_spec import ModelSpec
from runtime.client.admission import EngineLimits
from runtime.config.options import WorkerConfig
from runtime.executor.build import build_attention, pool_of, with_images
from runtime.executor.kernel_choices import attention_reason, choose_attention, choose_kernels
from runtime.executor.kv_pool import pool_bytes_per_token
from runtime.executor.memory import (
    Budget,
    PoolSize,
    available_memory_bytes,
    cpu_budget,
    cuda_budget,
)
from runtime.executor.out_of_memory import least_weight_bytes, require_room
from runtime.models.layers.build_context import BuildContext, parse_dtype
from runtime.models.layers.stage import Stage

# The length of a typical chat, in tokens. The report gives the number of requests of this length,
# besides that of the longest possible requests.
_USUAL_TOKENS = 2048

free_memory_bytes = available_memory_bytes


class Estimate:
    """Computes the memory that a model needs, and the kernels that would run.

    Attributes:
        needs: the results so far; at first only those that follow from `config.json`.
    """

    def __init__(self, config: WorkerConfig, spec: ModelSpec) -> None:
        """Start from the worker's configuration that `runtime.launch.resolve` has made."""
        self._config = config
        self._spec = spec
        self._context = BuildContext(
            dtype=parse_dtype(config.dtype),
            device=torch.device(config.device),
            tp_size=config.tp_size,
            kv_cache_dtype=config.kv_cache_dtype,
            # The first pipeline stage has at least as many layers as the others.
            stage=Stage(0, config.pp_size),
        )
        self.needs = Needs(
            weight_bytes=least_weight_bytes(spec, self._context),
            bytes_per_token=pool_bytes_per_token(spec, self._context),
        )

    def size_pool(self) -> None:
        """Compute how much memory the weights leave for the pool, and how many requests fit.

        Raises:
            StartupError: too little memory for the weights or the pool; the message is one line.
        """
        require_room(self._spec, self._context)
        if not self.needs.bytes_per_token:
            return
        config = self._config
        budget = self._budget()
        size = pool_of(config, self._spec, self._context, budget)
        limits = EngineLimits(config.context_len, size.num_tokens, self._spec.vocab_size)
        longest = limits.max_req_len
        lengths = dict.fromkeys((longest, min(_USUAL_TOKENS, longest)))
        self.needs = replace(
            self.needs,
            pool=Pool(
                num_tokens=size.num_tokens,
                num_pages=size.num_pages,
                page_size=size.page_size,
                size_bytes=size.size_bytes,
                arithmetic=budget.arithmetic,
                is_at_most=self._context.device.type != "cpu",
            ),
            longest_request=longest,
            capacities=[Capacity(length, self._num_requests(size, length)) for length in lengths],
        )

    def _budget(self) -> Budget:
        config, weight_bytes = self._config, self.needs.weight_bytes
        share = config.mem_fraction_static
        if self._context.device.type == "cpu":
            num_ranks = config.num_local_ranks * config.dp_size
            budget = cpu_budget(share, weight_bytes, num_ranks, unloaded_bytes=weight_bytes)
        else:
            # The memory of the largest step counts as 0: only a loaded model can measure it.
            budget = cuda_budget(share, weight_bytes, 0, unloaded_bytes=weight_bytes)
        return with_images(budget, config, self._spec)

    def _num_requests(self, size: PoolSize, num_tokens: int) -> int:
        needed = CacheManager(size.num_pages, size.page_size).pages_for(num_tokens)
        return min(size.num_pages // needed, self._config.max_running_requests)

    def choose_kernels(self) -> tuple[Kernel, list[Kernel]]:
        """Return the attention back end and the implementation of each op that would be chosen.

        Raises:
            StartupError: a requested implementation is unavailable.
            RuntimeError: a requested implementation is unavailable.
            ImportError: the library of a requested implementation is not installed.
        """
        device = self._context.device.type
        name, _ = choose_attention(self._config, device)
        attention = build_attention(self._config, name, device)
        choices = choose_kernels(device, attention, self._config)
        return (
            Kernel("attention", name, attention_reason(self._config, device)),
            [Kernel(choice.op, choice.name, choice.reason) for choice in choices],
        )
