"""Settings of the frontend language, for the whole process; they may change while it runs."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class GlobalConfig:
    """What programs read when they start.

    Attributes:
        verbosity: from 2 on, the text of each run is printed when it is done.
        default_backend: used where no other is given; what `as_backend` takes.
        skip_special_tokens_in_output: sent with each generation.
        spaces_between_special_tokens_in_out: likewise.
        enable_precache_with_tracing: whether `run_batch` sends the common prefix first.
        enable_parallel_encoding: whether a back end may join texts by their keys and values.
    """

    verbosity: int = 0
    default_backend: object = None
    skip_special_tokens_in_output: bool = True
    spaces_between_special_tokens_in_out: bool = True
    enable_precache_with_tracing: bool = True
    enable_parallel_encoding: bool = True


global_config = GlobalConfig()
