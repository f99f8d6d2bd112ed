"""Headrace: a small, fast LLM inference server with SGLang's native API and the OpenAI API."""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from headrace.engine.engine import Engine
    from headrace.engine.engine_errors import (
        EngineDeadError,
        EngineError,
        EngineOverloadedError,
        EngineStartError,
        FeatureNotSupportedError,
    )
    from headrace.engine.server_args import ServerArgs
    from headrace.lang.api import (
        assistant,
        assistant_begin,
        assistant_end,
        flush_cache,
        function,
        gen,
        gen_int,
        gen_string,
        get_server_info,
        image,
        select,
        separate_reasoning,
        set_default_backend,
        system,
        system_begin,
        system_end,
        user,
        user_begin,
        user_end,
        video,
    )
    from headrace.lang.backend.anthropic import Anthropic
    from headrace.lang.backend.base import AsyncBackend, BaseBackend
    from headrace.lang.backend.engine_backend import EngineBackend
    from headrace.lang.backend.litellm import LiteLLM
    from headrace.lang.backend.named_elsewhere import Crusoe, VertexAI
    from headrace.lang.backend.openai import OpenAI
    from headrace.lang.backend.recording import RecordingBackend, ReplayBackend
    from headrace.lang.backend.runtime_endpoint import RuntimeEndpoint
    from headrace.lang.choices import (
        greedy_token_selection,
        token_length_normalized,
        unconditional_likelihood_normalized,
    )
    from headrace.lang.global_config import global_config
    from headrace.lang.program_errors import (
        BackendError,
        ProgramCancelled,
        ProgramError,
        ProgramTimeout,
    )
    from headrace.lang.runtime import Runtime
    from headrace.lang.state import AsyncProgramState, ProgramState

__all__ = [
    "Anthropic",
    "AsyncBackend",
    "AsyncProgramState",
    "BackendError",
    "BaseBackend",
    "Crusoe",
    "Engine",
    "EngineBackend",
    "EngineDeadError",
    "EngineError",
    "EngineOverloadedError",
    "EngineStartError",
    "FeatureNotSupportedError",
    "LiteLLM",
    "OpenAI",
    "ProgramCancelled",
    "ProgramError",
    "ProgramState",
    "ProgramTimeout",
    "RecordingBackend",
    "ReplayBackend",
    "Runtime",
    "RuntimeEndpoint",
    "ServerArgs",
    "VertexAI",
    "__version__",
    "assistant",
    "assistant_begin",
    "assistant_end",
    "flush_cache",
    "function",
    "gen",
    "gen_int",
    "gen_string",
    "get_server_info",
    "global_config",
    "greedy_token_selection",
    "image",
    "select",
    "separate_reasoning",
    "set_default_backend",
    "system",
    "system_begin",
    "system_end",
    "token_length_normalized",
    "unconditional_likelihood_normalized",
    "user",
    "user_begin",
    "user_end",
    "video",
]

# The functions of the frontend language, which `headrace.lang.api` defines.
_WORDS = (
    *("assistant", "assistant_begin", "assistant_end", "flush_cache", "function", "gen", "gen_int"),
    *("gen_string", "get_server_info", "image", "select", "separate_reasoning"),
    *("set_default_backend", "system", "system_begin", "system_end", "user", "user_begin"),
    *("user_end", "video"),
)

# The module of each public name. A module is imported when its name is first used, so that
# `import headrace` itself imports nothing else.
_LAZY = {
    "Engine": "headrace.engine.engine",
    "EngineDeadError": "headrace.engine.engine_errors",
    "EngineError": "headrace.engine.engine_errors",
    "EngineOverloadedError": "headrace.engine.engine_errors",
    "EngineStartError": "headrace.engine.engine_errors",
    "FeatureNotSupportedError": "headrace.engine.engine_errors",
    "ServerArgs": "headrace.engine.server_args",
    **dict.fromkeys(_WORDS, "headrace.lang.api"),
    "AsyncBackend": "headrace.lang.backend.base",
    "BaseBackend": "headrace.lang.backend.base",
    "Anthropic": "headrace.lang.backend.anthropic",
    "EngineBackend": "headrace.lang.backend.engine_backend",
    "LiteLLM": "headrace.lang.backend.litellm",
    "Crusoe": "headrace.lang.backend.named_elsewhere",
    "VertexAI": "headrace.lang.backend.named_elsewhere",
    "OpenAI": "headrace.lang.backend.openai",
    "RecordingBackend": "headrace.lang.backend.recording",
    "ReplayBackend": "headrace.lang.backend.recording",
    "Runtime": "headrace.lang.runtime",
    "RuntimeEndpoint": "headrace.lang.backend.runtime_endpoint",
    "greedy_token_selection": "headrace.lang.choices",
    "token_length_normalized": "headrace.lang.choices",
    "unconditional_likelihood_normalized": "headrace.lang.choices",
    "BackendError": "headrace.lang.program_errors",
    "ProgramCancelled": "headrace.lang.program_errors",
    "ProgramTimeout": "headrace.lang.program_errors",
    "ProgramError": "headrace.lang.program_errors",
    "global_config": "headrace.lang.global_config",
    "AsyncProgramState": "headrace.lang.state",
    "ProgramState": "headrace.lang.state",
}

try:
    __version__ = version("headrace")
except PackageNotFoundError:
    # The package is a checkout on the path and is not installed.
    __version__ = "0.0.0"


def __getattr__(name: str) -> Any:
    module = _LAZY.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(module), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY})
