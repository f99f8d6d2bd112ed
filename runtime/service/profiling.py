"""Starts and stops profiles of the worker's steps, as traces that Perfetto can show."""

from __future__ import annotations

import contextlib
import os
import re
import stat
import tempfile
import time
from pathlib import Path
from typing import Annotated

import msgspec

from runtime.client.client import EngineClient
from runtime.errors import InvalidRequest
from runtime.ipc.messages import ProfileSpec, Stage, StartProfile, StopProfile
from runtime.requests.bounds import one_of, within
from runtime.requests.sampling_params import INT64_MAX
from runtime.service.context import ServiceContext


def make_folder(root: str | None, wanted: str | None) -> str:
    """Return the folder for a profile; create it if it does not exist.

    Args:
        root: folder that must contain the result. Without it, the root is a folder of the server's
            user in the folder for temporary files.
        wanted: the folder, absolute or relative to `root`; if absent, the root itself.

    Raises:
        InvalidRequest: the folder is outside `root`, cannot be created or written to, or its path
            leads through a link.
    """
    shared = root is None
    base = Path(root or Path(tempfile.gettempdir()) / f"headrace-profiles-{os.getuid()}").absolute()
    parts = _parts(base, wanted or "")
    path = base
    try:
        base.mkdir(mode=0o700, parents=True, exist_ok=True)
        # A root that the operator chose may be a link. The default root lies in a folder that all
        # users may write to, so links in its path are refused.
        opened = os.open(base, os.O_RDONLY | os.O_DIRECTORY | (os.O_NOFOLLOW if shared else 0))
        try:
            if shared:
                _require_own(opened)
            for part in parts:
                path /= part
                opened = _enter(opened, part)
        finally:
            os.close(opened)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise _refused(f"cannot be made, or a link leads to it: {reason}") from None
    if not os.access(path, os.W_OK | os.X_OK):
        raise _refused("cannot be written to")
    return str(path)


def _parts(base: Path, wanted: str) -> tuple[str, ...]:
    if not wanted.isprintable():
        # The path is written to the log.
        raise _refused("has characters that cannot be printed")
    inside = Path(wanted)
    if inside.is_absolute():
        if not inside.is_relative_to(base):
            raise _refused(f"must lie in {base} (--profile-root), where it is by default")
        inside = inside.relative_to(base)
    if ".." in inside.parts:
        raise _refused("must not climb out of its folder by '..'")
    return inside.parts


def _enter(parent: int, name: str) -> int:
    """Create the folder `name` in `parent` if needed, open it without following a link.

    Closes the descriptor `parent` and returns that of the folder.
    """
    with contextlib.suppress(FileExistsError):
        os.mkdir(name, mode=0o700, dir_fd=parent)
    found = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=parent)
    os.close(parent)
    return found


def _require_own(descriptor: int) -> None:
    found = os.fstat(descriptor)
    if found.st_uid != os.getuid() or stat.S_IMODE(found.st_mode) & 0o022:
        raise _refused("is by default in a folder that others may write to: set --profile-root")


def _refused(why: str) -> InvalidRequest:
    return InvalidRequest(f"output_dir {why}.", param="output_dir")


ACTIVITIES = ("CPU", "GPU", "MEM", "CUDA_PROFILER")
STAGES: dict[str, Stage] = {"prefill": "EXTEND", "extend": "EXTEND", "decode": "DECODE"}
# The most steps of a profile: viewers cannot open longer traces, and recording takes memory.
MAX_STEPS = 2000
# Seconds. Writing the trace of many steps takes the worker some time.
WRITE_TIMEOUT_S = 300.0
_LABEL = re.compile(r"[A-Za-z0-9._-]{1,128}")


class ProfileBody(msgspec.Struct, kw_only=True):
    """The body of `/start_profile`; every key is optional."""

    output_dir: str | None = None
    start_step: Annotated[int, within(0, INT64_MAX)] | None = None
    num_steps: Annotated[int, within(1, MAX_STEPS)] | None = None
    activities: list[Annotated[str, one_of(*ACTIVITIES)]] | None = None
    with_stack: bool | None = None
    record_shapes: bool | None = None
    profile_by_stage: bool | None = None
    profile_stages: list[str] | None = None
    merge_profiles: bool | None = None
    profile_prefix: str | None = None
    profile_id: str | None = None


async def start_profile(
    context: ServiceContext, body: ProfileBody, *, anywhere: bool = False
) -> str:
    """Start a profile on every rank; return a message with the folder of its files.

    Args:
        context: the engine's context.
        body: the request.
        anywhere: whether `output_dir` may be any folder. Only calls from this process may say so.

    Raises:
        InvalidRequest: a value is wrong, or a profile is running already.
    """
    spec = _plan(body)
    root, wanted = context.config.logging.torch_profiler_dir, body.output_dir
    if anywhere and wanted:
        root, wanted = wanted, None
    spec = msgspec.structs.replace(spec, folder=make_folder(root, wanted))
    reply = await context.client.calls.control(lambda call_id: StartProfile(call_id, spec))
    if not reply.success:
        raise InvalidRequest(reply.message)
    return f"Profiling; files will be in {spec.folder} and begin with {spec.name}."


async def stop_profile(client: EngineClient) -> str:
    """End the profile; its files are complete when this returns.

    Raises:
        InvalidRequest: no profile is running.
    """
    reply = await client.calls.control(StopProfile, WRITE_TIMEOUT_S)
    if not reply.success:
        raise InvalidRequest(reply.message)
    return reply.message


def _plan(body: ProfileBody) -> ProfileSpec:
    by_stage = bool(body.profile_by_stage) or body.profile_stages is not None
    if by_stage and body.num_steps is None:
        raise InvalidRequest(
            "num_steps must be given with profile_by_stage: it is what ends a stage.",
            param="num_steps",
        )
    num_steps = MAX_STEPS if body.num_steps is None else body.num_steps
    if not 1 <= num_steps <= MAX_STEPS:
        raise InvalidRequest(
            f"num_steps must be in [1, {MAX_STEPS}], got {num_steps}.", param="num_steps"
        )
    start_step = body.start_step or 0
    if not 0 <= start_step <= INT64_MAX:
        raise InvalidRequest(
            f"start_step must be at least 0 and fit in 64 bits, got {start_step}.",
            param="start_step",
        )
    activities = body.activities or ["CPU", "GPU"]
    for each in activities:
        if each not in ACTIVITIES:
            raise InvalidRequest(
                f"activities may hold {', '.join(ACTIVITIES)}, got {each[:32]!r}.",
                param="activities",
            )
    return ProfileSpec(
        folder="",
        name=_name(body),
        activities=sorted(set(activities)),
        start_step=start_step,
        num_steps=num_steps,
        stages=_stages(body.profile_stages) if by_stage else [],
        with_stack=body.with_stack is not False,
        record_shapes=bool(body.record_shapes),
        merge=bool(body.merge_profiles),
    )


def _stages(names: list[str] | None) -> list[Stage]:
    stages: list[Stage] = []
    for name in names if names is not None else ["prefill", "decode"]:
        stage = STAGES.get(name.lower())
        if stage is None:
            raise InvalidRequest(
                f"profile_stages may hold {', '.join(STAGES)}, got {name[:32]!r}.",
                param="profile_stages",
            )
        if stage not in stages:
            stages.append(stage)
    if not stages:
        raise InvalidRequest("profile_stages cannot be empty.", param="profile_stages")
    return stages


def _name(body: ProfileBody) -> str:
    for field, value in (
        ("profile_prefix", body.profile_prefix),
        ("profile_id", body.profile_id),
    ):
        if value is not None and (not _LABEL.fullmatch(value) or value.startswith(".")):
            raise InvalidRequest(
                f"{field} may have at most 128 letters, digits and any of '._-', and begins with "
                "no dot: it becomes part of a file's name.",
                param=field,
            )
    profile_id = body.profile_id or f"{time.time():.6f}"
    return f"{body.profile_prefix}-{profile_id}" if body.profile_prefix else profile_id
