"""Settings of the frontend language, for the whole process; they may change while it runs."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class GlobalConfig:
    """Settings that programs read when they start.

    Attributes:
        verbosity: at 2 or more, the text of each run is printed when it is done.
        default_backend: used where none is given; anything that `as_backend` takes.
        skip_special_tokens_in_output: sent with each generation.
        spaces_between_special_tokens_in_out: likewise.
        enable_precache_with_tracing: whether `run_batch` sends the common prefix first.
        enable_parallel_encoding: whether a back end may join texts by concatenating KV cache.
    """

    verbosity: int = 0
    default_backend: object = None
    skip_special_tokens_in_output: bool = True
    spaces_between_special_tokens_in_out: bool = True
    enable_precache_with_tracing: bool = True
    enable_parallel_encoding: bool = True


global_config = GlobalConfig()
