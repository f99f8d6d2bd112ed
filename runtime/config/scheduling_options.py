"""Options about memory, batching and the prefix cache."""

from __future__ import annotations

from dataclasses import dataclass

from runtime.config.option_field import option


@dataclass(frozen=True, kw_only=True)
class SchedulingArgs:
    """Options about memory, batching and the prefix cache."""

    mem_fraction_static: float | None = option(
        None, "Share of device memory for weights and KV pool together."
    )
    max_total_tokens: int | None = option(None, "Size of the KV pool, tokens.")
    max_running_requests: int | None = option(None, "Most requests in the running batch.")
    max_queued_requests: int | None = option(
        None, "Most waiting requests; further ones get a 503. 16384 for a server when absent."
    )
    max_resumes: int = option(
        2, "How many deaths of the worker or detokenizer a request survives; the next one ends it."
    )
    chunked_prefill_size: int | None = option(
        None, "Most prompt tokens computed in one step; -1 computes prompts whole."
    )
    image_cache_mb: int = option(
        256, "MiB of image embeddings kept for later prompts, for models that take images."
    )
    max_mamba_cache_size: int | None = option(
        None,
        "Slots of recurrent states, for models that have them. A running request needs three; the "
        "others keep snapshots in the prefix cache. When absent, the memory decides.",
    )
    swa_full_tokens_ratio: float | None = option(
        None,
        "Give sliding-window layers pages of their own, for this share of the KV pool's tokens, if "
        "other layers attend to all tokens. When absent, all layers have the same pages.",
    )
    schedule_policy: str = option(
        "fcfs", "Order of waiting requests.", choices=("fcfs", "lpm", "priority")
    )
    enable_priority_scheduling: bool = option(
        False, "Run requests of higher priority first, like --schedule-policy priority."
    )
    enable_return_hidden_states: bool = option(
        False, "Let requests ask for hidden states (return_hidden_states)."
    )
    enable_return_routed_experts: bool = option(
        False, "Let requests ask which experts computed each token (return_routed_experts)."
    )
    page_size: int | None = option(None, "Tokens per page of the KV pool.")
    disable_radix_cache: bool = option(False, "Do not share prefixes between requests.")
    enable_hierarchical_cache: bool = option(
        False, "Keep pages that the prefix cache evicts in host memory, to copy them back later."
    )
    hicache_ratio: float = option(
        2.0, "Tokens in host memory for each token of the KV pool, for --enable-hierarchical-cache."
    )
    hicache_storage_backend: str | None = option(
        None,
        "Also keep pages of host memory in files, which outlive the server, for "
        "--enable-hierarchical-cache.",
        choices=("file",),
    )
    hicache_storage_backend_extra_config: str | None = option(
        None,
        "JSON object: path, the folder of the files, and max_size_gb, 100 when absent. The files "
        "show what prompts contained.",
        metavar="JSON",
    )
    kv_events_config: str | None = option(
        None,
        "JSON object that turns on events about the prefix cache, for routers: publisher (zmq), "
        "endpoint, replay_endpoint, topic, ... They show the tokens of prompts.",
        metavar="JSON",
    )
    disable_overlap_schedule: bool = option(False, "Wait for each step before planning the next.")
