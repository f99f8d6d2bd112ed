"""The worker process: loads the model, builds all parts, then runs the scheduler's loop."""

from __future__ import annotations

import gc
import logging
import secrets
import time
from importlib import import_module
from pathlib import Path
from typing import NoReturn

import msgspec
import zmq

from runtime.checkpoint.gguf.files import forget_headers
from runtime.config.options import WorkerConfig
from runtime.errors import DeviceLost, HeadraceError
from runtime.ipc.freed_memory import return_freed_memory
from runtime.ipc.logging import configure_logging
from runtime.ipc.messages import Phase, Progress, SchedulerInbound, StartupFailed
from runtime.ipc.process import DEVICE_LOST_CODE, uncollected
from runtime.ipc.shared_state import SHARED_STATE_FILE, SharedState
from runtime.ipc.standard_error import leave_at_once
from runtime.ipc.transport import (
    Inbox,
    Outbox,
    detokenizer_address,
    front_address,
    scheduler_address,
)
from runtime.worker.nodes import with_meeting_point
from runtime.worker.ranks import Ranks

logger = logging.getLogger(__name__)

_IDLE_WAIT_S = 0.25


def main(payload: bytes) -> None:
    """Run the worker's process; `payload` is an encoded `WorkerConfig`."""
    started = time.monotonic()
    config = msgspec.msgpack.decode(payload, type=WorkerConfig)
    which = f" {config.dp_rank}" if config.dp_size > 1 else ""
    configure_logging(config.log_level, f"worker{which}", config.log_format)
    run_folder = Path(config.run_folder)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    front = Outbox(context, front_address(run_folder))

    def report(phase: Phase, fraction: float = 0.0, detail: str = "") -> None:
        front.send(Progress(phase, fraction, detail))

    ranks: Ranks | None = None
    try:
        report("importing")
        # Importing torch takes seconds, so the phase is reported before the import.
        if config.num_ranks > 1:
            config = with_meeting_point(config, secrets.randbits(62))
            ranks = Ranks(context, config, lambda why: _tell_start_failed(run_folder, why))
        with uncollected():
            import_ahead()
        from runtime.worker.build_worker import build_worker

        if ranks is not None:
            ranks.connect()
        shared = SharedState(run_folder / SHARED_STATE_FILE)
        inbox: Inbox[SchedulerInbound] = Inbox(
            context,
            scheduler_address(run_folder, config.generation),
            SchedulerInbound,
            shared.counter("rejected_by_scheduler"),
        )
        tokens = Outbox(context, detokenizer_address(run_folder, config.generation))
        scheduler, ready = build_worker(config, shared, tokens.send, front.send, report, ranks)
    except HeadraceError as error:
        _fail(context, front, error.message)
    except MemoryError as error:
        _fail(context, front, f"Out of memory while loading the model: {error}")
    except (Exception, DeviceLost) as error:
        if ranks is not None:
            ranks.wait_for_a_death()
        logger.exception("The worker could not start")
        _fail(context, front, f"The worker could not start: {type(error).__name__}: {error}")
    front.send(msgspec.structs.replace(ready, load_seconds=time.monotonic() - started))
    # Objects from the start-up live as long as the process, so the garbage collector skips them
    # from now on.
    forget_headers()
    gc.collect()
    gc.freeze()
    return_freed_memory()
    try:
        while True:
            shared.beat()
            scheduler.turn(inbox, _IDLE_WAIT_S)
    except DeviceLost as lost:
        if ranks is not None and lost.by_others:
            ranks.wait_for_a_death()
        logger.error("A step failed", exc_info=lost.__cause__)
        logger.critical("The device has failed, so the worker ends: %s", lost)
        # The process ends without clean-up, which would wait for the device.
        leave_at_once(DEVICE_LOST_CODE)


def import_ahead() -> None:
    """Import everything that takes long.

    A worker whose process starts before its configuration is known does this while it waits.
    """
    import_module("runtime.worker.build_worker")


def _fail(context: zmq.Context[zmq.Socket[bytes]], front: Outbox, message: str) -> NoReturn:
    front.send(StartupFailed(" ".join(message.split())))
    context.destroy(linger=1000)
    # The process ends without clean-up, which would wait for ranks that may have ended.
    leave_at_once(1)


def _tell_start_failed(run_folder: Path, message: str) -> None:
    # This runs on another thread, which must not use the sockets of the main thread.
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    front = Outbox(context, front_address(run_folder))
    front.send(StartupFailed(message))
    front.close(linger_ms=1000)
    context.term()
