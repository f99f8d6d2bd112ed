"""Warns once for each sampling parameter that a back end's API does not support."""

from __future__ import annotations

import warnings
from collections.abc import Collection
from typing import Any

from headrace.lang.sampling import SglSamplingParams

# Values of parameters that have no effect, so dropping them needs no warning.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "min_new_tokens": (0,),
    "n": (1,),
    "top_k": (-1,),
    "min_p": (0.0,),
    "frequency_penalty": (0.0,),
    "presence_penalty": (0.0,),
    "repetition_penalty": (1.0,),
    "ignore_eos": (False,),
    "return_logprob": (False,),
    "top_logprobs_num": (0,),
    "return_text_in_logprobs": (False,),
    "no_stop_trim": (False,),
    "skip_special_tokens": (True,),
}
_COMMON = frozenset({"max_new_tokens", "stop", "temperature", "top_p"})


class UnsupportedArguments:
    """Warns about sampling parameters that a back end cannot send to its API."""

    def __init__(self, backend: str, honoured: Collection[str]) -> None:
        """Store the names of the back end and of the parameters that its API supports.

        Args:
            backend: the back end's name, for the warning.
            honoured: fields of `SglSamplingParams` that the API supports, in addition to those that
                all APIs support.
        """
        self._backend = backend
        self._honoured = _COMMON | set(honoured)
        self._warned: set[str] = set()

    def check(self, params: SglSamplingParams) -> None:
        """Warn about parameters that are set and not supported; name each of them only once."""
        asked = [
            name
            for name, value in params.set_fields().items()
            if name not in self._honoured
            and value not in _NEUTRAL.get(name, ())
            and not (isinstance(value, list | tuple | dict) and not value)
        ]
        fresh = [name for name in asked if name not in self._warned]
        if fresh:
            self._warned.update(fresh)
            warnings.warn(
                f"{self._backend} does not support {', '.join(fresh)}; the request omits it.",
                stacklevel=2,
            )
