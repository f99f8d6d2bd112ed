"""Routes that report the server's load to routers, from memory that the processes share."""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Annotated, Any, Literal, NotRequired, TypedDict

from fastapi import Request
from starlette.responses import Response

from runtime.errors import InvalidRequest
from runtime.processes.status import ReplicaStatus
from runtime.requests.bounds import within
from runtime.service.context import ServiceContext
from runtime.service.operation import Query, json_of, operation, text
from server.access import Access, AccessRouter
from server.error_responses import json_response


class LoadMemory(TypedDict):
    """A replica's memory in GiB, and the capacity of its KV pool in tokens."""

    weight_gb: float
    kv_cache_gb: float
    graph_gb: float
    token_capacity: int


class LoadQueues(TypedDict):
    """Numbers of a replica's waiting requests, by what they wait for."""

    waiting: int
    grammar: int
    paused: int
    retracted: int


class LoadDisaggregation(TypedDict):
    """Prefill-decode disaggregation, which this server does not have, so `mode` is constant."""

    mode: str


class LoadAdapters(TypedDict):
    """A replica's slots for adapters (LoRA), and how many of them running requests use."""

    slots_used: int
    slots_total: int
    utilization: float


class Load(TypedDict):
    """The load of one replica; the query `include` selects the optional keys."""

    dp_rank: int
    timestamp: float
    num_running_reqs: int
    num_waiting_reqs: int
    num_waiting_uncached_tokens: int
    num_total_reqs: int
    num_used_tokens: int
    num_total_tokens: int
    max_total_num_tokens: int
    token_usage: float
    gen_throughput: float
    cache_hit_rate: float
    utilization: float
    max_running_requests: int
    memory: NotRequired[LoadMemory]
    queues: NotRequired[LoadQueues]
    disaggregation: NotRequired[LoadDisaggregation]
    lora: NotRequired[LoadAdapters]


class LoadAggregate(TypedDict):
    """Sums and averages over all replicas."""

    total_running_reqs: int
    total_waiting_reqs: int
    total_reqs: int
    avg_token_usage: float
    avg_throughput: float
    avg_utilization: float


class Loads(TypedDict):
    """The answer of `/v1/loads`."""

    timestamp: str
    version: str
    dp_rank_count: int
    loads: list[Load]
    aggregate: LoadAggregate


class BriefLoad(TypedDict):
    """The load of one replica in the format of the older `/get_load`."""

    dp_rank: int
    num_reqs: int
    num_waiting_reqs: int
    num_tokens: int
    ts_tic: float


_SECTIONS = frozenset({"core", "memory", "spec", "lora", "disagg", "queues", "all"})

_LOADS = operation(
    ok={**json_of(Loads), **text()},
    refuses=(400,),
    query=(
        Query("include", str, f"Comma-separated sections: {', '.join(sorted(_SECTIONS))}."),
        Query("dp_rank", Annotated[int, within(0)], "One replica only."),
        Query("format", Literal["json", "prometheus"], "Of the answer."),
    ),
)


def create_router(context: ServiceContext) -> AccessRouter:
    """Create the router of `/v1/loads` and of the older `/get_load`."""
    router = AccessRouter(Access.KEY, tags=["native"])

    @router.get("/v1/loads", openapi_extra=_LOADS)
    async def loads(request: Request) -> Response:
        """Report running and waiting requests, tokens in use and throughput of each replica."""
        query = request.query_params
        include = {part for part in query.get("include", "all").split(",") if part}
        unknown = sorted(include - _SECTIONS)
        if unknown:
            known = ", ".join(sorted(_SECTIONS))
            raise InvalidRequest(
                f"include: {unknown[0][:32]!r} is none of {known}.", param="include"
            )
        replicas = _chosen(context, query.get("dp_rank", ""))
        loads = [describe_load(context, replica, include) for replica in replicas]
        output_format = query.get("format", "json")
        if output_format == "prometheus":
            return Response(_as_prometheus(loads), media_type="text/plain; version=0.0.4")
        if output_format != "json":
            raise InvalidRequest("format must be json or prometheus.", param="format")
        return json_response(
            {
                "timestamp": datetime.now(UTC).isoformat(),
                "version": context.version,
                "dp_rank_count": len(context.status.replicas),
                "loads": loads,
                "aggregate": {
                    "total_running_reqs": _sum(loads, "num_running_reqs"),
                    "total_waiting_reqs": _sum(loads, "num_waiting_reqs"),
                    "total_reqs": _sum(loads, "num_total_reqs"),
                    "avg_token_usage": _sum(loads, "token_usage") / len(loads),
                    "avg_throughput": _sum(loads, "gen_throughput") / len(loads),
                    "avg_utilization": _sum(loads, "utilization") / len(loads),
                },
            }
        )

    @router.get("/get_load", openapi_extra=operation(ok=json_of(list[BriefLoad])))
    async def get_load() -> Response:
        """Report the load of each replica in the older format."""
        return json_response([_describe_briefly(each) for each in context.status.replicas])

    return router


def _chosen(context: ServiceContext, dp_rank: str) -> Sequence[ReplicaStatus]:
    replicas = context.status.replicas
    if not dp_rank:
        return replicas
    if not dp_rank.isdecimal() or int(dp_rank) >= len(replicas):
        raise InvalidRequest(
            f"dp_rank must be in [0, {len(replicas)}), got {dp_rank[:32]!r}.", param="dp_rank"
        )
    return [replicas[int(dp_rank)]]


def _sum(loads: list[dict[str, Any]], name: str) -> float:
    return sum(load[name] for load in loads)


def _describe_briefly(replica: ReplicaStatus) -> BriefLoad:
    shared = replica.shared
    running, waiting = int(shared["num_running_reqs"]), int(shared["num_queue_reqs"])
    return {
        "dp_rank": replica.rank,
        "num_reqs": running + waiting,
        "num_waiting_reqs": waiting,
        "num_tokens": int(shared["num_used_tokens"]),
        "ts_tic": time.monotonic(),
    }


def describe_load(
    context: ServiceContext, replica: ReplicaStatus, include: set[str]
) -> dict[str, Any]:
    """Return the load of one replica.

    All numbers are integers or floats, as routers expect.

    Args:
        context: the server's context.
        replica: the replica.
        include: the optional parts to add.
    """
    shared, worker = replica.shared, replica.worker
    running, waiting = int(shared["num_running_reqs"]), int(shared["num_queue_reqs"])
    used, capacity = int(shared["num_used_tokens"]), int(shared["max_total_num_tokens"])
    most_running = 0 if worker is None else worker.max_running_requests
    prompt_tokens = shared["prompt_tokens_total"]
    load: dict[str, Any] = {
        "dp_rank": replica.rank,
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
        link, outgoing = context.client.links[replica.rank], context.client.outgoing
        load["queues"] = {
            "waiting": waiting,
            "grammar": outgoing.num_compiling_for(link),
            "paused": outgoing.num_held_for(link),
            "retracted": 0,
        }
    slots = int(shared["lora_pool_slots_total"])
    if slots and include & {"lora", "all"}:
        in_use = int(shared["lora_pool_slots_used"])
        load["lora"] = {
            "slots_used": in_use,
            "slots_total": slots,
            "utilization": in_use / slots,
        }
    if include & {"disagg", "all"}:
        load["disaggregation"] = {"mode": "null"}
    return load


def _as_prometheus(loads: list[dict[str, Any]]) -> str:
    lines = []
    for name, value in loads[0].items():
        if name not in ("dp_rank", "timestamp") and isinstance(value, int | float):
            lines.append(f"# TYPE sglang_{name} gauge")
            lines += [
                f'sglang_{name}{{dp_rank="{load["dp_rank"]}"}} {load[name]}' for load in loads
            ]
    return "\n".join(lines) + "\n"
