"""Arguments that an API does not support: each back end warns once when it drops them."""

from __future__ import annotations

import warnings
from collections.abc import Collection
from typing import Any

from headrace.lang.sampling import SglSamplingParams

# These values have no effect, so they need no warning.
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
    """Warns about arguments that a back end cannot pass on."""

    def __init__(self, backend: str, honoured: Collection[str]) -> None:
        """Store the names of the back end and of its fields.

        Args:
            backend: the back end's name, for the warning.
            honoured: fields of `SglSamplingParams` that the back end can pass on, beyond the common
                ones.
        """
        self._backend = backend
        self._honoured = _COMMON | set(honoured)
        self._warned: set[str] = set()

    def check(self, params: SglSamplingParams) -> None:
        """Warn once for each name that `params` sets and the API does not have."""
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
