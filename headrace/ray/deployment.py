"""The application for Ray Serve: an ingress that receives HTTP requests, and replicas behind it."""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
from collections.abc import Mapping
from typing import Any, Literal

from ray import serve
from ray.exceptions import RayError
from ray.serve.config import (
    AutoscalingConfig,
    AutoscalingContext,
    AutoscalingPolicy,
    RequestRouterConfig,
)
from ray.serve.handle import DeploymentHandle
from ray.serve.schema import LoggingConfig
from starlette.types import ASGIApp, Receive, Scope, Send

from headrace.ray.engine_options import value_of
from headrace.ray.http_call import HttpCall, is_for_any_replica, prompt_of
from headrace.ray.relay import OtherAnswer, Relay, refuse
from headrace.ray.replica import Replica
from runtime.client.replica_router import MAX_SURPLUS
from runtime.config.scheduling_options import SchedulingArgs

logger = logging.getLogger(__name__)

Placement = Literal["STRICT_SPREAD", "SPREAD", "PACK", "STRICT_PACK"]
# The share of a replica's places for running requests that autoscaling tries to keep in use.
TARGET_SHARE = 0.7
# `ray.serve.llm.request_router` exports this class too, but it imports vLLM or SGLang.
PREFIX_ROUTER = (
    "ray.llm._internal.serve.routing_policies.prefix_aware.prefix_aware_router."
    "PrefixCacheAffinityRouter"
)
# By Ray's defaults, the router regards no replica as too busy, and keeps every prompt for ever.
PREFIX_ROUTER_OPTIONS = {
    # The most requests that a replica may have above the least busy one.
    "imbalanced_threshold": MAX_SURPLUS,
    "do_eviction": True,
    # Characters of prompts for each replica: more than a KV pool of 750,000 tokens holds.
    "eviction_threshold_chars": 4_000_000,
    "eviction_target_chars": 3_000_000,
}
# Most requests that Ray sends to a replica at a time. The number is large, because engines queue
# requests themselves, in the order of their policy.
_MAX_ONGOING = 4096
# The largest body that the ingress accepts; the replicas have a limit of their own, --max-body-mb.
_MAX_BODY_BYTES = 256 * 2**20


def build_app(  # noqa: PLR0913
    engine: Mapping[str, Any],
    *,
    num_replicas: int | None = None,
    min_replicas: int = 1,
    max_replicas: int = 1,
    num_cpus: float = 1,
    num_gpus: float = 0,
    num_ingresses: int = 1,
    prefix_aware: bool = True,
    placement: Placement = "STRICT_SPREAD",
) -> serve.Application:
    """Return an application that serves all of Headrace's HTTP APIs.

    Args:
        engine: the server's options by name, such as `model_path` for `--model-path`. With
            `nnodes`, each replica has a placement group with a bundle for each node.
        num_replicas: a fixed number of replicas; without it, Ray scales automatically.
        min_replicas: lower bound of autoscaling, which depends on the requests of each engine; see
            `replicas_wanted`.
        max_replicas: upper bound of autoscaling.
        num_cpus: cores for each replica, or for each of its nodes.
        num_gpus: GPUs for each replica, or for each of its nodes, which sees no others.
        num_ingresses: number of actors that receive HTTP requests; they need no GPU.
        prefix_aware: whether a prompt is sent to the replica that has seen its beginning (Ray's
            `PrefixCacheAffinityRouter`). Otherwise it is sent to the less busy of two replicas.
        placement: strategy of Ray for the nodes of a replica. With `STRICT_SPREAD` each is on
            another machine; with `PACK` as few machines as possible are used.

    Raises:
        ValueError: `engine` has options of nodes that each replica sets itself.
    """
    for name in ("node_rank", "dist_init_addr"):
        if name in engine:
            raise ValueError(f"{name}: each replica sets it for its nodes; omit it.")
    options: dict[str, Any] = {
        "max_ongoing_requests": _MAX_ONGOING,
        "ray_actor_options": {"num_cpus": num_cpus, "num_gpus": num_gpus},
        "graceful_shutdown_timeout_s": 60,
    }
    if (num_nodes := int(engine.get("nnodes", 1))) > 1:
        bundle = {"CPU": num_cpus, "GPU": num_gpus}
        bundle = {name: amount for name, amount in bundle.items() if amount}
        options["placement_group_bundles"] = [bundle] * num_nodes
        options["placement_group_strategy"] = placement
    if num_replicas is not None:
        options["num_replicas"] = num_replicas
    else:
        options["autoscaling_config"] = AutoscalingConfig(
            min_replicas=min_replicas,
            max_replicas=max_replicas,
            policy=AutoscalingPolicy(policy_function=replicas_wanted),
        )
    if prefix_aware:
        options["request_router_config"] = RequestRouterConfig(
            request_router_class=PREFIX_ROUTER, request_router_kwargs=PREFIX_ROUTER_OPTIONS
        )
    replicas = serve.deployment(Replica, name="Headrace", **options)
    ingress = serve.deployment(
        serve.ingress()(_Ingress),
        name="HeadraceIngress",
        num_replicas=num_ingresses,
        max_ongoing_requests=_MAX_ONGOING,
        ray_actor_options={"num_cpus": 0.1},
        logging_config=LoggingConfig(enable_access_log=False),
    )
    max_resumes = engine.get("max_resumes", SchedulingArgs.max_resumes)
    return ingress.bind(replicas.bind(dict(engine)), num_replicas == 1, int(max_resumes))


def app(arguments: Mapping[str, str]) -> serve.Application:
    """Build the application from the words of `serve run headrace.ray:app NAME=VALUE ...`.

    `num_replicas`, `min_replicas`, `max_replicas`, `num_cpus`, `num_gpus`, `num_ingresses` and
    `placement` are those of `build_app`; every other name is an option of the engine.
    """
    engine = dict(arguments)
    counts: dict[str, Any] = {}
    if "placement" in engine:
        counts["placement"] = engine.pop("placement")
    for name in ("num_replicas", "min_replicas", "max_replicas", "num_ingresses"):
        if name in engine:
            counts[name] = int(engine.pop(name))
    for name in ("num_cpus", "num_gpus"):
        if name in engine:
            counts[name] = float(engine.pop(name))
    return build_app({name: value_of(value) for name, value in engine.items()}, **counts)


def replicas_wanted(context: AutoscalingContext) -> tuple[int, dict[str, Any]]:
    """Return how many replicas are needed for the current requests; Ray's autoscaler calls it.

    A replica counts as full if its running and waiting requests are `TARGET_SHARE` of its places
    for running requests. Ray applies its bounds and delays to the result.
    """
    metrics = context.raw_metrics
    requests = _newest(metrics.get("num_requests", {}))
    rows = _newest(metrics.get("max_running_requests", {}))
    if not requests or not any(rows):
        return context.target_num_replicas, {}
    per_replica = TARGET_SHARE * sum(rows) / len(rows)
    return max(1, math.ceil(sum(requests) / per_replica)), {}


def _newest(series: Mapping[Any, Any]) -> list[float]:
    """Return the newest value of a metric for each replica."""
    return [values[-1].value for values in series.values() if values]


class _Ingress:
    """The Ray deployment that receives HTTP requests and passes them to the replicas."""

    def __init__(self, replicas: DeploymentHandle, has_one_replica: bool, max_resumes: int) -> None:
        replicas = replicas.options(stream=True, method_name="answer")
        self._http = Http(replicas, has_one_replica, max_resumes)

    def __serve_build_asgi_app__(self) -> ASGIApp:
        return self._http


class Http:
    """The ASGI application of the ingress.

    It is a class of its own, because uvicorn does not accept a bound method as an application.
    """

    def __init__(self, replicas: DeploymentHandle, has_one_replica: bool, max_resumes: int) -> None:
        """Store the handle through which requests are sent to replicas.

        Args:
            replicas: a handle of `Replica.answer`, whose results are streamed.
            has_one_replica: whether there is only one replica, at all times.
            max_resumes: after how many deaths of its replica a request is still continued.
        """
        self._replicas = replicas
        self._has_one_replica = has_one_replica
        self._max_resumes = max_resumes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one HTTP request, or ASGI's lifespan events."""
        if scope["type"] == "lifespan":
            await _live(receive, send)
            return
        call = await _read(scope, receive)
        if call is None:
            await refuse(send, 413, f"The body is larger than {_MAX_BODY_BYTES} bytes.")
            return
        if not (self._has_one_replica or is_for_any_replica(call.method, call.path)):
            await refuse(send, 404, _ONE_OF_SEVERAL)
            return
        relay = Relay(call, send, may_resume=self._max_resumes > 0)
        for num_deaths in itertools.count(1):
            pieces = self._replicas.remote(relay.call)
            try:
                await relay.run(pieces)
                return
            except (RayError, OtherAnswer) as error:
                logger.warning("A replica ended beneath a request: %s", error)
                if num_deaths > self._max_resumes or not relay.may_try:
                    await relay.fail(error)
                    return
                if isinstance(error, OtherAnswer):
                    # The worker of the replica may be restarting, so the request is sent again
                    # later.
                    await asyncio.sleep(1)
            finally:
                # If the answer is incomplete, the client has disconnected; the request is
                # cancelled.
                pieces.cancel()


async def _live(receive: Receive, send: Send) -> None:
    """Answer ASGI's lifespan events (start and end), for whose answers Ray waits."""
    while (message := await receive())["type"] != "lifespan.shutdown":
        await send({"type": f"{message['type']}.complete"})
    await send({"type": "lifespan.shutdown.complete"})


async def _read(scope: Scope, receive: Receive) -> HttpCall | None:
    """Read the body of an HTTP request and return the request; `None` if the body is too large."""
    body = bytearray()
    while True:
        message = await receive()
        body += message.get("body", b"")
        if len(body) > _MAX_BODY_BYTES:
            return None
        if not message.get("more_body"):
            break
    path = scope["path"].removeprefix(scope.get("root_path", "")) or "/"
    return HttpCall(
        scope["method"],
        path,
        scope["query_string"],
        list(scope["headers"]),
        bytes(body),
        prompt_of(path, bytes(body)),
    )


_ONE_OF_SEVERAL = (
    "This route changes or reads one replica, and there may be several. Use num_replicas=1, or "
    "deploy again with other options."
)
