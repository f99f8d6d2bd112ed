"""Settings of the frontend language, for the whole process; they may change while it runs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from headrace.lang.backend.base import BaseBackend


@dataclass
class GlobalConfig:
    """What programs read when they start.

    Attributes:
        verbosity: from 2 on, the text of each run is printed when it is done.
        default_backend: used where no other is given.
        skip_special_tokens_in_output: sent with each generation.
        spaces_between_special_tokens_in_out: likewise.
        enable_precache_with_tracing: whether `run_batch` sends the common prefix first.
        enable_parallel_encoding: whether a back end may join texts by their keys and values.
    """

    verbosity: int = 0
    default_backend: BaseBackend | None = None
    skip_special_tokens_in_output: bool = True
    spaces_between_special_tokens_in_out: bool = True
    enable_precache_with_tracing: bool = True
    enable_parallel_encoding: bool = True

    def backend(self, given: Any = None) -> BaseBackend:
        """The back end to use; a `Runtime` stands for its endpoint.

        Raises:
            RuntimeError: none was given and there is no default.
        """
        found = self.find_backend(given)
        if found is None:
            raise RuntimeError(
                "No back end: call set_default_backend(RuntimeEndpoint('http://HOST:PORT')), or "
                "pass backend=."
            )
        return found

    def find_backend(self, given: Any = None) -> BaseBackend | None:
        """Like `backend`, but None where there is none."""
        # Late: this module is imported by the back ends' base.
        from headrace.lang.backend.base import as_backend

        chosen = self.default_backend if given is None else given
        return None if chosen is None else as_backend(chosen)


global_config = GlobalConfig()
