"""Routes for trainers: change weights and their version, pause generation, release memory."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Annotated, Any, Literal, TypedDict, TypeVar

import msgspec
from fastapi import Request
from starlette.responses import Response

from runtime.checkpoint.weight_roots import WeightRoots, own_names
from runtime.errors import InvalidRequest
from runtime.eventloop.body_errors import InvalidBody
from runtime.eventloop.json_body import read_json
from runtime.ipc.weight_messages import CheckWeights, LeaveGroup, ReadWeight
from runtime.requests.bounds import within
from runtime.service.context import ServiceContext
from runtime.service.operation import Content, Query, json_of, operation
from runtime.weights.weight_control import Outcome
from runtime.weights.weight_requests import (
    ByNameBody,
    CheckBody,
    ContinueBody,
    DestroyGroupBody,
    DiskBody,
    DistributedBody,
    InitGroupBody,
    MemoryBody,
    PauseBody,
    RestartBody,
    SessionBody,
    TensorBody,
    VersionBody,
    check_disk,
    read_weight,
    rows_to_read,
    to_join,
    to_receive,
    to_tensors,
)
from server.access import Access, AccessRouter
from server.error_responses import json_response

B = TypeVar("B", bound=msgspec.Struct)


class WeightOutcome(TypedDict):
    """Whether the operation succeeded, and a message."""

    success: bool
    message: str


class DiskOutcome(WeightOutcome):
    """The outcome of an update from files, with the number of requests that waited for it."""

    num_paused_requests: int


class VersionOutcome(WeightOutcome):
    """The outcome of setting a version label, with the new label."""

    new_version: str


class PauseAnswer(TypedDict):
    """The confirmation that generation was paused or continued."""

    message: str
    status: Literal["ok"]


_OUTCOME = json_of(WeightOutcome)
_DISK_OUTCOME = json_of(DiskOutcome)
_PAUSED = json_of(PauseAnswer)
_DONE = json_of(None)
_BY_NAME = [
    Query("name", str, "Of the weight.", required=True),
    Query("truncate_size", Annotated[int, within(1)], "Most rows of the answer."),
]


def create_router(context: ServiceContext) -> AccessRouter:
    """Create the router of the routes for weights, pauses and memory."""
    router = AccessRouter(Access.ADMIN, tags=["weights"])
    _add_updates(router, context)
    _add_groups(router, context)
    _add_checks(router, context)
    _add_pauses(router, context)
    return router


def _route(
    router: AccessRouter,
    path: str,
    body_type: type[B],
    act: Callable[[B], Awaitable[Response]],
    ok: Content,
    *,
    body_may_be_absent: bool = False,
) -> None:
    """Register POST on `path`: decode the body, and answer what `act` returns for it.

    Args:
        router: the router to add the route to.
        path: the route's path.
        body_type: the struct of the body.
        act: handles the body.
        ok: the content of a successful answer, for the API's description.
        body_may_be_absent: whether an absent body means `{}`.
    """
    decoder = msgspec.json.Decoder(body_type)

    async def handler(request: Request) -> Response:
        payload = await request.body()
        if not payload and body_may_be_absent:
            payload = b"{}"
        return await act(await read_json(payload, decoder))

    handler.__doc__ = act.__doc__
    handler.__name__ = path.strip("/")
    # If an update fails, trainers expect the same body, with status 400.
    others = {400: ok} if ok in (_OUTCOME, _DISK_OUTCOME) else {}
    documented = operation(body_type, ok=ok, others=others, body_may_be_absent=body_may_be_absent)
    router.add_api_route(path, handler, methods=["POST"], openapi_extra=documented)


async def _tell(outcome: Awaitable[Outcome], *, with_paused: bool = False) -> Response:
    """Return the outcome as a response, which has `success` and `message` even if it is refused."""
    try:
        result = await outcome
    except InvalidBody:
        raise
    except InvalidRequest as error:
        result = Outcome(False, error.message)
    answer: dict[str, object] = {"success": result.success, "message": result.message}
    if with_paused:
        answer["num_paused_requests"] = result.num_paused_requests
    return json_response(answer, 200 if result.success else 400)


def _add_updates(router: AccessRouter, context: ServiceContext) -> None:
    model = context.config.model
    own = own_names(model.model_path or "")
    roots = WeightRoots(tuple(model.weights_root), model.allow_weights_download, own)

    async def from_disk(body: DiskBody) -> Response:
        """Load all weights from a folder or a hub id; if that fails, the old weights stay."""

        async def update() -> Outcome:
            check_disk(body)
            return await context.weights.update_from_disk(
                body.model_path,
                load_format=body.load_format,
                weight_version=body.weight_version,
                flush_cache=body.flush_cache is not False,
                abort_all_requests=bool(body.abort_all_requests),
                keep_pause=bool(body.keep_pause),
                roots=roots,
            )

        return await _tell(update(), with_paused=True)

    async def from_tensor(body: TensorBody) -> Response:
        """Replace some weights by tensors from safetensors bytes, shared memory or CUDA handles."""

        async def update() -> Outcome:
            return await context.weights.update(
                to_tensors(body, context.config.parallel.num_ranks),
                weight_version=body.weight_version,
                flush_cache=body.flush_cache is not False,
                abort_all_requests=bool(body.abort_all_requests),
            )

        return await _tell(update())

    async def from_distributed(body: DistributedBody) -> Response:
        """Replace some weights by tensors that rank 0 of a joined group broadcasts."""

        async def update() -> Outcome:
            return await context.weights.update_from_group(
                to_receive(body, context.model),
                weight_version=body.weight_version,
                flush_cache=body.flush_cache is not False,
                abort_all_requests=bool(body.abort_all_requests),
            )

        return await _tell(update())

    async def begin(body: SessionBody) -> Response:  # noqa: ARG001  # the body is only checked
        """Begin several updates; requests wait until `/end_weight_update`."""
        return await _tell(context.weights.begin())

    async def end(body: SessionBody) -> Response:  # noqa: ARG001
        """End the updates; the waiting requests continue."""
        return await _tell(context.weights.end())

    async def restart(body: RestartBody) -> Response:
        """Replace the worker, perhaps with other weights; running requests go on in the new one."""
        return await _tell(
            context.weights.restart_workers(
                body.model_path, weight_version=body.weight_version, roots=roots
            )
        )

    async def from_ipc() -> Response:
        """Refuse the request: a checkpoint engine sends pickles, which are not read here."""
        message = (
            "update_weights_from_ipc is not supported: its sockets carry pickles. Use "
            "/update_weights_from_tensor with shared_memory or cuda_ipc."
        )
        return json_response({"success": False, "message": message}, 400)

    refused = operation(ok=None, others={400: _OUTCOME})
    router.add_api_route(
        "/update_weights_from_ipc", from_ipc, methods=["POST"], openapi_extra=refused
    )
    _route(router, "/update_weights_from_disk", DiskBody, from_disk, _DISK_OUTCOME)
    _route(router, "/update_weights_from_tensor", TensorBody, from_tensor, _OUTCOME)
    _route(router, "/update_weights_from_distributed", DistributedBody, from_distributed, _OUTCOME)
    _route(router, "/restart_worker", RestartBody, restart, _OUTCOME, body_may_be_absent=True)
    _route(router, "/begin_weight_update", SessionBody, begin, _OUTCOME, body_may_be_absent=True)
    _route(router, "/end_weight_update", SessionBody, end, _OUTCOME, body_may_be_absent=True)


def _add_groups(router: AccessRouter, context: ServiceContext) -> None:
    async def init(body: InitGroupBody) -> Response:
        """Join a trainer's process group; the answer comes when every rank has joined."""

        async def join() -> Outcome:
            op = to_join(body, context.config.parallel.num_ranks)
            return await context.weights.join_group(op)

        return await _tell(join())

    async def destroy(body: DestroyGroupBody) -> Response:
        """Leave a trainer's process group."""

        async def leave() -> Outcome:
            reply = await context.weights.ask(LeaveGroup(body.group_name))
            return Outcome(reply.success, reply.message or "Succeeded to destroy the group.")

        return await _tell(leave())

    _route(router, "/init_weights_update_group", InitGroupBody, init, _OUTCOME)
    _route(router, "/destroy_weights_update_group", DestroyGroupBody, destroy, _OUTCOME)


def _add_checks(router: AccessRouter, context: ServiceContext) -> None:
    async def update_version(body: VersionBody) -> Response:
        """Set the label of the loaded weights; abort all requests unless the body says not to."""
        outcome = await context.weights.set_version(
            body.new_version, abort_all_requests=body.abort_all_requests
        )
        return json_response(
            {"success": True, "message": outcome.message, "new_version": body.new_version}
        )

    async def check(body: CheckBody) -> Response:
        """Run one check of the weights, by which a trainer tests that its updates arrive.

        `snapshot` stores a copy of all weights, `reset_tensors` fills the weights with noise,
        `compare` compares them with the copy, and `checksum` returns a checksum.
        """

        async def act() -> Outcome:
            op = CheckWeights(body.action)
            weights = context.weights
            changes = body.action == "reset_tensors"
            reply = await (weights.change(op) if changes else weights.ask(op))
            return Outcome(reply.success, reply.message)

        return await _tell(act())

    decoder = msgspec.json.Decoder(ByNameBody)

    async def by_name(request: Request) -> Response:
        """Return the first rows of one weight, as nested lists of numbers."""
        payload = await request.body()
        if not payload:
            payload = msgspec.json.encode(_query(request))
        body = await read_json(payload, decoder)
        num_rows = rows_to_read(body, context.model)
        reply = await context.weights.ask(ReadWeight(body.name, num_rows))
        if not reply.success:
            raise InvalidRequest(reply.message, param="name")
        return json_response(read_weight(reply.data))

    _route(router, "/update_weight_version", VersionBody, update_version, json_of(VersionOutcome))
    _route(router, "/weights_checker", CheckBody, check, _OUTCOME)
    rows = json_of(list[Any])
    for method, documented in (
        ("POST", operation(ByNameBody, ok=rows)),
        ("GET", operation(ok=rows, refuses=(400, 503), query=_BY_NAME)),
    ):
        router.add_api_route(
            "/get_weights_by_name", by_name, methods=[method], openapi_extra=documented
        )


def _query(request: Request) -> dict[str, object]:
    query: dict[str, object] = dict(request.query_params)
    size = query.get("truncate_size")
    if isinstance(size, str) and size.isdigit():
        query["truncate_size"] = int(size)
    return query


def _add_pauses(router: AccessRouter, context: ServiceContext) -> None:
    async def pause(body: PauseBody) -> Response:
        """Pause generation: abort running requests, put them back in the queue, or freeze them."""
        await context.weights.pause(body.mode)
        return json_response({"message": "Generation paused successfully.", "status": "ok"})

    async def resume(body: ContinueBody) -> Response:  # noqa: ARG001  # the body is only checked
        """Continue generation, with frozen requests, those in the queue and new ones."""
        await context.weights.resume()
        return json_response({"message": "Generation continued successfully.", "status": "ok"})

    async def release(body: MemoryBody) -> Response:
        """Release the memory of weights, KV pool or CUDA graphs; no request may be running."""
        await context.weights.release_memory(body.tags or [])
        return json_response(None)

    async def take_back(body: MemoryBody) -> Response:
        """Allocate released memory again; weights are restored, and the prefix cache is empty."""
        await context.weights.resume_memory(body.tags or [])
        return json_response(None)

    _route(router, "/pause_generation", PauseBody, pause, _PAUSED, body_may_be_absent=True)
    _route(router, "/continue_generation", ContinueBody, resume, _PAUSED, body_may_be_absent=True)
    _route(router, "/release_memory_occupation", MemoryBody, release, _DONE)
    _route(router, "/resume_memory_occupation", MemoryBody, take_back, _DONE)
