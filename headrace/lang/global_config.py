"""Settings of the frontend language for the whole process; they may be changed at any time."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class GlobalConfig:
    """Settings that programs read when they start.

    Attributes:
        verbosity: at 2 or more, the text of each run is printed when the run is done.
        default_backend: the back end of programs that name none; any argument of `as_backend`.
        skip_special_tokens_in_output: value of `skip_special_tokens` in each request.
        spaces_between_special_tokens_in_out: value of `spaces_between_special_tokens` in each
            request.
        enable_precache_with_tracing: whether `run_batch` first sends the prefix that its programs
            share.
        enable_parallel_encoding: whether a back end may join texts by concatenating their KV cache.
    """

    verbosity: int = 0
    default_backend: object = None
    skip_special_tokens_in_output: bool = True
    spaces_between_special_tokens_in_out: bool = True
    enable_precache_with_tracing: bool = True
    enable_parallel_encoding: bool = True


global_config = GlobalConfig()
