"""Options about LoRA adapters, and the limits that the worker gets from them."""

from __future__ import annotations

from dataclasses import dataclass

from runtime.config.option_field import option


@dataclass(frozen=True, kw_only=True)
class LoraArgs:
    """Options about adapters (LoRA)."""

    enable_lora: bool = option(
        False, "Take adapters (LoRA) while serving; --lora-paths implies it."
    )
    lora_paths: list[str] = option(
        [],
        "Adapters to load at the start: NAME=DIR, DIR (named as the folder is), or JSON with "
        "lora_name, lora_path and pinned.",
        metavar="ADAPTER",
    )
    max_loras_per_batch: int = option(
        8, "Most different adapters of one step; the device has memory for as many."
    )
    max_loaded_loras: int | None = option(
        None, "Most adapters in host memory; the least recently used makes room for a new one."
    )
    max_lora_rank: int | None = option(
        None, "Largest rank of an adapter; the largest of --lora-paths, or 64, when absent."
    )
    lora_target_modules: list[str] = option(
        [],
        "Modules that adapters may change, such as q_proj; all linear layers when absent.",
        metavar="MODULE",
    )
    lora_eviction_policy: str = option(
        "lru",
        "Which adapter is replaced on the device: the least recently used (lru), or the one that "
        "was copied there first (fifo).",
        choices=("lru", "fifo"),
    )


@dataclass(frozen=True, kw_only=True)
class LoraLimits:
    """Limits on LoRA adapters.

    Attributes:
        max_per_batch: most different adapters of one step, which is also the number of slots for
            adapters on the device.
        max_rank: largest rank of an adapter.
        target_modules: kinds of modules that adapters may change, such as `q_proj`.
        evicts_oldest: on the device, replace the adapter that was copied there first, instead of
            the least recently used one.
    """

    max_per_batch: int
    max_rank: int
    target_modules: list[str]
    evicts_oldest: bool = False
