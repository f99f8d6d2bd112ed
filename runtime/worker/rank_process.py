"""The process of a rank above 0: holds its part of the model, and computes what rank 0 plans."""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import msgspec
import zmq

from runtime.config.options import RankConfig
from runtime.errors import DeviceLost, HeadraceError
from runtime.ipc.array_codec import decode_array
from runtime.ipc.logging import configure_logging
from runtime.ipc.messages import Phase, WorkerCommand
from runtime.ipc.node_links import link_key, tcp_endpoint
from runtime.ipc.node_messages import RankAddress
from runtime.ipc.process import DEVICE_LOST_CODE, failure_file, uncollected
from runtime.ipc.standard_error import leave_at_once
from runtime.ipc.transport import Inbox, Outbox, rank_address, rank_replies_address
from runtime.ipc.weight_messages import RankCall, WeightOp
from runtime.step.executor import Pending, Runner
from runtime.step.step_plan import StepPlan
from runtime.worker.commands import Commands
from runtime.worker.ranks import DEATH_NOTICE_S

logger = logging.getLogger(__name__)

IDLE_WAIT_S = 10.0

RankInbound = StepPlan | WorkerCommand | RankCall


def main(payload: bytes) -> None:
    """Run the rank's process; `payload` is an encoded `RankConfig`."""
    config = msgspec.msgpack.decode(payload, type=RankConfig)
    worker = config.worker
    # Only rank 0 logs at level info.
    level = "warning" if worker.log_level == "info" else worker.log_level
    which = f" of worker {worker.dp_rank}" if worker.dp_size > 1 else ""
    configure_logging(level, f"rank {config.rank}{which}", worker.log_format)
    try:
        with uncollected():
            from runtime.worker.build_worker import (
                build_commands,
                build_rank,
                build_rank_weights,
                read_spec,
            )

        inbox, outbox = _open_links(config)
        executor = build_rank(worker, read_spec(worker), config.rank, _keep_silent)
        commands = build_commands(executor, worker, config.rank)
        weights = build_rank_weights(executor, worker, config.rank, lambda: None)
    except HeadraceError as error:
        _leave(config, error.message)
    except MemoryError as error:
        _leave(config, f"Out of memory while loading the model: {error}")
    except (Exception, DeviceLost) as error:
        # If another rank has ended, this error is only a consequence. Rank 0 then ends this process
        # during the wait.
        time.sleep(DEATH_NOTICE_S)
        logger.exception("Rank %d could not start", config.rank)
        _leave(config, f"Rank {config.rank} could not start: {type(error).__name__}: {error}")
    gc.collect()
    gc.freeze()
    try:
        _follow(inbox, executor.runner, commands, lambda op: outbox.send(weights.run(op)))
    except DeviceLost as lost:
        if lost.by_others:
            time.sleep(DEATH_NOTICE_S)
        logger.error("A step failed", exc_info=lost.__cause__)
        logger.critical("The device of rank %d has failed: %s", config.rank, lost)
        leave_at_once(DEVICE_LOST_CODE)
    except Exception:
        time.sleep(DEATH_NOTICE_S)
        logger.exception("A step failed on rank %d", config.rank)
        leave_at_once(1)


def _open_links(config: RankConfig) -> tuple[Inbox[RankInbound], Outbox]:
    """Open the socket for messages from rank 0, and the socket for replies to rank 0."""
    worker, context = config.worker, zmq.Context[zmq.Socket[bytes]]()
    link, folder = worker.node, Path(worker.run_folder)
    is_remote = link is not None and config.rank >= worker.num_local_ranks
    if link is None or not is_remote:
        address = rank_address(folder, worker.generation, config.rank)
        inbox: Inbox[RankInbound] = Inbox(context, address, RankInbound, dec_hook=decode_array)
        return inbox, Outbox(context, rank_replies_address(folder, worker.generation))
    key = link_key(link.key)
    inbox = Inbox(context, tcp_endpoint(link.host), RankInbound, dec_hook=decode_array, key=key)
    outbox = Outbox(context, tcp_endpoint(link.leader, link.port), key=key, watched=True)
    if outbox.connection is not None:
        # No more plans can come. The node's process starts the next ranks.
        outbox.connection.when_closed(lambda: leave_at_once(0))
    outbox.send(RankAddress(config.rank, inbox.endpoint, link.session))
    return inbox, outbox


def _follow(
    inbox: Inbox[RankInbound],
    runner: Runner,
    commands: Commands,
    answer: Callable[[WeightOp], None],
) -> None:
    last: Pending | None = None
    while True:
        inbox.wait(IDLE_WAIT_S)
        for message in inbox.drain():
            if isinstance(message, RankCall):
                if last is not None:
                    last.wait()
                    last = None
                answer(message.op)
                continue
            if not isinstance(message, StepPlan):
                commands.execute(message)
                continue
            pending = runner.launch(message)
            # At most two steps are in flight, as on rank 0, because steps use two buffers in turn.
            if last is not None:
                last.wait()
            last = pending
        if inbox.num_rejected:
            raise RuntimeError("a plan did not decode")


def _keep_silent(phase: Phase, fraction: float = 0.0, detail: str = "") -> None:
    """Report nothing, because rank 0 reports the progress for all ranks."""


def _leave(config: RankConfig, message: str) -> NoReturn:
    failure_file(config.worker, config.rank).write_text(" ".join(message.split()), encoding="utf-8")
    # The process ends without clean-up, which would wait for ranks that may have ended.
    leave_at_once(1)
