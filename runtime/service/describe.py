"""Describes the engine in the native API's format: model, options, state.

Secrets are never included.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import PurePath
from types import MappingProxyType
from typing import Any, TypedDict, get_type_hints

import msgspec

from runtime.config.options import ServerConfig
from runtime.processes.status import ReplicaStatus
from runtime.service.context import ServiceContext

_SECRETS = frozenset({"api_key", "admin_api_key", "ssl_keyfile_password", "dist_key"})
# Options whose values are shown without their folder. Only the paths of model and tokenizer are
# shown whole, because clients need them to find the vocabulary.
_PATHS = frozenset(
    {"ssl_certfile", "ssl_keyfile", "ssl_ca_certs", "chat_template", "api_keys_file"}
    | {"torch_profiler_dir", "weights_root", "media_root"}
)
# Arguments of SGLang that routers read, and that have one fixed value here.
_FIXED_ARGS: dict[str, Any] = {
    "disaggregation_mode": "null",
    "speculative_algorithm": None,
}
# Admission keeps one token free beyond the prompt, for the first generated token.
_RESERVED_TOKENS = 1
_NOTHING: Mapping[str, object] = MappingProxyType({})


class ModelInfo(TypedDict):
    """The answer of `/get_model_info`. The keys are exactly these, because clients compare them."""

    model_path: str | None
    tokenizer_path: str | None
    is_generation: bool
    preferred_sampling_params: dict[str, Any] | None
    weight_version: str
    has_image_understanding: bool
    has_audio_understanding: bool
    model_type: str
    architectures: list[str]


class MemoryUsage(TypedDict):
    """Memory in GiB, and the capacity of the KV pool in tokens."""

    weight: float
    kvcache: float
    token_capacity: int
    graph: float


def _struct(name: str, doc: str, fields: dict[str, Any]) -> type[msgspec.Struct]:
    return msgspec.defstruct(name, list(fields.items()), namespace={"__doc__": doc})


def _types_of_args() -> dict[str, Any]:
    found: dict[str, Any] = {name: type(value) | None for name, value in _FIXED_ARGS.items()}
    for section in get_type_hints(ServerConfig).values():
        found |= get_type_hints(section)
    return found


_ARGS = _types_of_args()
ReplicaState = _struct(
    "ReplicaState",
    "Every argument as one replica has it, and what it does.",
    {
        **_ARGS,
        "last_gen_throughput": float,
        "memory_usage": MemoryUsage,
        "effective_max_running_requests_per_dp": int | None,
    },
)
ServerInfo = _struct(
    "ServerInfo",
    "Every argument with its resolved value, and the state of the engine.",
    {
        **_ARGS,
        "status": str,
        "max_total_num_tokens": int,
        "max_req_input_len": int,
        "num_restarts": int,
        "internal_states": list[ReplicaState],  # type: ignore[valid-type]  # made at run time
        "version": str,
    },
)


def describe_model(context: ServiceContext) -> dict[str, Any]:
    """Return the answer of `/get_model_info`, with the keys of `ModelInfo`."""
    preferred = context.config.http.preferred_sampling_params
    return {
        "model_path": context.changes.model_path,
        "tokenizer_path": context.config.model.tokenizer_path,
        "is_generation": context.model.gives == "tokens",
        "preferred_sampling_params": msgspec.json.decode(preferred) if preferred else None,
        "weight_version": context.weight_version,
        "has_image_understanding": context.model.vision is not None,
        "has_audio_understanding": False,
        "model_type": context.model.model_type,
        "architectures": [context.model.architecture],
    }


def describe_args(
    context: ServiceContext, settled: Mapping[str, object] = _NOTHING
) -> dict[str, Any]:
    """Return every option by its name, with its resolved value; secrets are `None`.

    Args:
        context: the server's context.
        settled: values that were resolved outside the worker, by option name.
    """
    flat = dict(_FIXED_ARGS)
    for section in dataclasses.fields(context.config):
        flat.update(dataclasses.asdict(getattr(context.config, section.name)))
    flat.update(context.changes.options)
    flat.update(settled)
    for name in _SECRETS:
        flat[name] = None
    for name in _PATHS:
        flat[name] = _last_part(flat[name])
    flat["weight_version"] = context.weight_version
    flat["is_embedding"] = context.model.gives != "tokens"
    flat["model_impl"] = context.model.impl
    worker = context.status.worker
    if worker is not None:
        flat.update(
            dtype=worker.dtype,
            device=worker.device,
            attention_backend=worker.attention_backend,
            page_size=worker.page_size,
            max_running_requests=worker.max_running_requests,
            max_total_tokens=worker.max_total_num_tokens,
        )
    return flat


def _last_part(value: Any) -> Any:
    if isinstance(value, list):
        return [_last_part(each) for each in value]
    # `chat_template` may be the text of a template.
    is_path = isinstance(value, str) and value.startswith(("/", "~")) and len(value) < 4096
    return PurePath(value).name if is_path else value


def describe_server(
    context: ServiceContext, settled: Mapping[str, object] = _NOTHING
) -> dict[str, Any]:
    """Return the answer of `/server_info`: options (`describe_args`), replicas' state, version."""
    args = describe_args(context, settled)
    worker = context.status.worker
    capacity = 0 if worker is None else worker.max_total_num_tokens
    longest = min(context.client.limits.context_len, capacity or context.client.limits.context_len)
    return {
        **args,
        "status": "ready" if context.status.is_ready else context.status.phase,
        "max_total_num_tokens": capacity,
        "max_req_input_len": longest - _RESERVED_TOKENS,
        "num_restarts": context.status.num_restarts,
        "internal_states": [_describe_replica(each, args) for each in context.status.replicas],
        "version": context.version,
    }


def _describe_replica(replica: ReplicaStatus, args: dict[str, Any]) -> dict[str, Any]:
    worker = replica.worker
    return {
        **args,
        "last_gen_throughput": round(replica.shared["gen_throughput"], 2),
        "memory_usage": {
            "weight": 0.0 if worker is None else round(worker.weight_bytes / 2**30, 3),
            "kvcache": 0.0 if worker is None else round(worker.kv_bytes / 2**30, 3),
            "token_capacity": 0 if worker is None else worker.max_total_num_tokens,
            "graph": 0.0,
        },
        "effective_max_running_requests_per_dp": args["max_running_requests"],
    }
