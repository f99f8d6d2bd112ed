"""Groups with a trainer end without a wait, and their names can be used again."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from runtime.errors import InvalidRequest
from runtime.ipc.weight_messages import JoinGroup, ReceiveTensors, TensorSpec
from runtime.weights.update_group import UpdateGroups, create_group
from tests.support.server import ROOT, free_port
from tests.support.waiting import until

NAME = "update"
TENSOR = TensorSpec("a", "float32", [4])


@pytest.fixture
def groups() -> Iterator[UpdateGroups]:
    groups = UpdateGroups(0, torch.device("cpu"))
    yield groups
    for name in list(groups._members):
        groups.leave(name)
    for thread in groups._leaving.values():
        thread.join(10)


def until_joined(groups: UpdateGroups) -> None:
    until(lambda: groups.is_joined(NAME))


def received(groups: UpdateGroups, timeout_s: float = 60.0) -> list[tuple[str, torch.Tensor]]:
    """What comes, awaited."""
    groups.receive(ReceiveTensors(NAME, [TENSOR], timeout_s=timeout_s))
    until(lambda: groups.is_received(NAME))
    return groups.take(NAME)


def alone() -> JoinGroup:
    """A group that has no other member: everybody is there at once."""
    return JoinGroup("127.0.0.1", free_port(), 0, 1, NAME, "gloo")


def test_nobody_waits_for_a_group_that_ends_slowly(
    groups: UpdateGroups, monkeypatch: pytest.MonkeyPatch
) -> None:
    # NCCL: until the trainer leaves as well.
    may_end, destroy = threading.Event(), dist.destroy_process_group

    def slowly(group: object) -> None:
        assert may_end.wait(30)
        destroy(group)

    monkeypatch.setattr(dist, "destroy_process_group", slowly)
    groups.join(alone())
    until_joined(groups)
    began = time.monotonic()
    groups.leave(NAME)
    assert time.monotonic() - began < 20
    with pytest.raises(InvalidRequest, match="There is no group"):
        groups.is_joined(NAME)
    # Another one of that name comes when the first has ended.
    groups.join(alone())
    time.sleep(0.2)
    assert not groups.is_joined(NAME)
    may_end.set()
    until_joined(groups)


def test_a_group_that_was_left_before_it_was_complete_ends_once_it_is(
    groups: UpdateGroups, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended = threading.Event()
    destroy = dist.destroy_process_group

    def note(group: object) -> None:
        destroy(group)
        ended.set()

    monkeypatch.setattr(dist, "destroy_process_group", note)
    port = free_port()
    groups.join(JoinGroup("127.0.0.1", port, 1, 2, NAME, "gloo"))
    groups.leave(NAME)
    trainer = f"""
import sys
from runtime.weights.update_group import create_group
group = create_group("127.0.0.1", {port}, 0, 2, {NAME!r}, "gloo")
sys.stdin.read()
"""
    # It stays until we have joined, too: the addresses are in its memory.
    with subprocess.Popen(
        [sys.executable, "-c", trainer], cwd=ROOT, stdin=subprocess.PIPE
    ) as process:
        assert ended.wait(60)
        process.communicate(timeout=60)
    assert process.returncode == 0
    groups.join(alone())
    until_joined(groups)


TRAINER = """
import sys
import torch
import torch.distributed as dist
from runtime.weights.update_group import create_group
from headrace.trainer import broadcast_weights

first, second = map(int, sys.argv[1:])
group = create_group("127.0.0.1", first, 0, 2, "update", "gloo")
sys.stdin.readline()
dist.destroy_process_group(group)
# Connections close with the object.
del group
group = create_group("127.0.0.1", second, 0, 2, "update", "gloo")
broadcast_weights({"a": torch.arange(4.0)}, group)
sys.stdin.read()
"""


def test_after_a_trainer_that_left_another_is_met_by_the_same_name(groups: UpdateGroups) -> None:
    ports = [free_port(), free_port()]
    trainer = subprocess.Popen(
        [sys.executable, "-c", TRAINER, *map(str, ports)], cwd=ROOT, stdin=subprocess.PIPE
    )
    with trainer:
        groups.join(JoinGroup("127.0.0.1", ports[0], 1, 2, NAME, "gloo"))
        until_joined(groups)
        assert trainer.stdin is not None
        trainer.stdin.write(b"on\n")
        trainer.stdin.flush()
        with pytest.raises(InvalidRequest, match="failed, and the group with it"):
            received(groups)
        groups.join(JoinGroup("127.0.0.1", ports[1], 1, 2, NAME, "gloo"))
        until_joined(groups)
        ((name, tensor),) = received(groups)
        assert name == "a"
        assert tensor.tolist() == [0, 1, 2, 3]
        trainer.communicate(timeout=60)
    assert trainer.returncode == 0


SILENT_TRAINER = """
import sys
import torch.distributed as dist
from runtime.weights.update_group import create_group

for port in sys.argv[1:]:
    group = create_group("127.0.0.1", int(port), 0, 2, "update", "gloo")
    sys.stdin.readline()
    dist.destroy_process_group(group)
"""


@pytest.mark.slow
def test_a_broadcast_that_never_comes(groups: UpdateGroups) -> None:
    ports = [free_port() for _ in range(3)]
    trainer = subprocess.Popen(
        [sys.executable, "-c", SILENT_TRAINER, *map(str, ports)], cwd=ROOT, stdin=subprocess.PIPE
    )
    with trainer:
        groups.join(JoinGroup("127.0.0.1", ports[0], 1, 2, NAME, "gloo"))
        until_joined(groups)
        for ask in (groups.is_received, groups.take):
            with pytest.raises(InvalidRequest, match="awaits no broadcast"):
                ask(NAME)
        began = time.monotonic()
        with pytest.raises(InvalidRequest, match="group with it: nothing came for 1 s"):
            received(groups, timeout_s=1.0)
        assert time.monotonic() - began < 60
        with pytest.raises(InvalidRequest, match="There is no group"):
            groups.is_received(NAME)
        # The name is free again soon, and a group that waits can be destroyed.
        assert trainer.stdin is not None
        for port in ports[1:]:
            trainer.stdin.write(b"on\n")
            trainer.stdin.flush()
            began = time.monotonic()
            groups.join(JoinGroup("127.0.0.1", port, 1, 2, NAME, "gloo"))
            until_joined(groups)
            assert time.monotonic() - began < 60
            groups.receive(ReceiveTensors(NAME, [TENSOR], timeout_s=20.0))
            with pytest.raises(InvalidRequest, match="still waits for another"):
                groups.receive(ReceiveTensors(NAME, [TENSOR]))
            assert not groups.is_received(NAME)
            with pytest.raises(InvalidRequest, match="Not everything"):
                groups.take(NAME)
            groups.leave(NAME)
        trainer.communicate(b"on\n", timeout=60)
    assert trainer.returncode == 0


def test_a_group_is_no_part_of_the_ranks_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Theirs belongs to a GPU: torch would split its communicator, and wait for all its members."""
    make, bound = distributed_c10d._new_process_group_helper, []

    def look(*args: Any, **options: Any) -> Any:
        bound.append(dist.group.WORLD.bound_device_id)  # type: ignore[union-attr]
        return make(*args, **options)

    if dist.is_initialized():
        # Another test's, which nobody uses any more.
        dist.destroy_process_group()
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        default = dist.group.WORLD
        assert default is not None
        default.bound_device_id = torch.device("cuda", 0)
        monkeypatch.setattr(distributed_c10d, "_new_process_group_helper", look)
        group = create_group("127.0.0.1", free_port(), 0, 1, NAME, "gloo")
        assert bound == [None]
        assert default.bound_device_id == torch.device("cuda", 0)
        tensor = torch.ones(3)
        dist.broadcast(tensor, group_src=0, group=group)
    finally:
        dist.destroy_process_group()
