"""How busy the server is, for routers; read from shared memory, so the engine is not asked."""

from __future__ import annotations

import time
from datetime import UTC, datetime
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from runtime.errors import InvalidRequest
from server.context import ServerContext
from server.errors import json_response

_SECTIONS = frozenset({"core", "memory", "spec", "lora", "disagg", "queues", "all"})


def create_router(context: ServerContext) -> APIRouter:
    """`/v1/loads` and its older spelling."""
    router = APIRouter(tags=["native"])

    @router.get("/v1/loads")
    async def loads(request: Request) -> Response:
        """Running and waiting requests, tokens in use, throughput."""
        query = request.query_params
        include = {part for part in query.get("include", "all").split(",") if part}
        unknown = sorted(include - _SECTIONS)
        if unknown:
            known = ", ".join(sorted(_SECTIONS))
            raise InvalidRequest(
                f"include: {unknown[0][:32]!r} is none of {known}.", param="include"
            )
        if query.get("dp_rank", "0") not in ("", "0"):
            raise InvalidRequest("dp_rank must be 0: there is one worker.", param="dp_rank")
        load = describe_load(context, include)
        output_format = query.get("format", "json")
        if output_format == "prometheus":
            return Response(_as_prometheus(load), media_type="text/plain; version=0.0.4")
        if output_format != "json":
            raise InvalidRequest("format must be json or prometheus.", param="format")
        aggregate = {
            "total_running_reqs": load["num_running_reqs"],
            "total_waiting_reqs": load["num_waiting_reqs"],
            "total_reqs": load["num_total_reqs"],
            "avg_token_usage": load["token_usage"],
            "avg_throughput": load["gen_throughput"],
            "avg_utilization": load["utilization"],
        }
        return json_response(
            {
                "timestamp": datetime.now(UTC).isoformat(),
                "version": context.version,
                "dp_rank_count": 1,
                "loads": [load],
                "aggregate": aggregate,
            }
        )

    @router.get("/get_load")
    async def get_load() -> Response:
        """The older form: one list entry per replica."""
        shared = context.shared
        running, waiting = int(shared["num_running_reqs"]), int(shared["num_queue_reqs"])
        return json_response(
            [
                {
                    "dp_rank": 0,
                    "num_reqs": running + waiting,
                    "num_waiting_reqs": waiting,
                    "num_tokens": int(shared["num_used_tokens"]),
                    "ts_tic": time.monotonic(),
                }
            ]
        )

    return router


def describe_load(context: ServerContext, include: set[str]) -> dict[str, Any]:
    """One replica's load; integers and floats only, as routers parse them strictly."""
    shared, worker = context.shared, context.status.worker
    running, waiting = int(shared["num_running_reqs"]), int(shared["num_queue_reqs"])
    used, capacity = int(shared["num_used_tokens"]), int(shared["max_total_num_tokens"])
    most_running = 0 if worker is None else worker.max_running_requests
    prompt_tokens = shared["prompt_tokens_total"]
    load: dict[str, Any] = {
        "dp_rank": 0,
        "timestamp": time.time(),
        "num_running_reqs": running,
        "num_waiting_reqs": waiting,
        "num_waiting_uncached_tokens": 0,
        "num_total_reqs": running + waiting,
        "num_used_tokens": used,
        "num_total_tokens": used,
        "max_total_num_tokens": capacity,
        "token_usage": used / capacity if capacity else 0.0,
        "gen_throughput": float(shared["gen_throughput"]),
        "cache_hit_rate": shared["cached_tokens_total"] / prompt_tokens if prompt_tokens else 0.0,
        "utilization": running / most_running if most_running else 0.0,
        "max_running_requests": most_running,
    }
    if worker is not None and include & {"memory", "all"}:
        load["memory"] = {
            "weight_gb": worker.weight_bytes / 2**30,
            "kv_cache_gb": worker.kv_bytes / 2**30,
            "graph_gb": 0.0,
            "token_capacity": capacity,
        }
    if include & {"queues", "all"}:
        load["queues"] = {
            "waiting": waiting,
            "grammar": context.client.num_compiling,
            "paused": 0,
            "retracted": 0,
        }
    if include & {"disagg", "all"}:
        load["disaggregation"] = {"mode": "null"}
    return load


def _as_prometheus(load: dict[str, Any]) -> str:
    lines = []
    for name, value in load.items():
        if name not in ("dp_rank", "timestamp") and isinstance(value, int | float):
            lines.append(f"# TYPE sglang_{name} gauge")
            lines.append(f'sglang_{name}{{dp_rank="0"}} {value}')
    return "\n".join(lines) + "\n"
