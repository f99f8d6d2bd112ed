"""Detects this machine's hardware without torch, which would take seconds to import."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

_BF16_FLAGS = frozenset({"avx512_bf16", "amx_bf16"})


@dataclass(frozen=True)
class Hardware:
    """The facts about this machine on which automatic choices depend.

    Attributes:
        num_gpus: number of NVIDIA devices that `CUDA_VISIBLE_DEVICES` allows.
        torch_has_cuda: whether the installed torch is a CUDA build.
        cpu_has_bf16: whether the CPU multiplies bfloat16 in hardware.
        num_cores: number of physical cores that this process may use, according to its CPU affinity
            and its cgroup's quota.
        gpu_ids: the devices' names, as used in `CUDA_VISIBLE_DEVICES`.
        cpu_flags: the CPU's instruction sets, by Linux's names; empty except on x86.
    """

    num_gpus: int
    torch_has_cuda: bool
    cpu_has_bf16: bool
    num_cores: int
    gpu_ids: tuple[str, ...] = ()
    cpu_flags: frozenset[str] = frozenset()


def detect_hardware() -> Hardware:
    """Detect the hardware from device nodes, `/proc/cpuinfo`, CPU affinity and cgroups."""
    gpu_ids = visible_gpus(_count_gpus(), os.environ.get("CUDA_VISIBLE_DEVICES"))
    cpuinfo = _read("/proc/cpuinfo")
    return Hardware(
        num_gpus=len(gpu_ids),
        gpu_ids=gpu_ids,
        torch_has_cuda=_torch_has_cuda(),
        cpu_has_bf16=cpu_has_bf16(cpuinfo),
        cpu_flags=cpu_flags(cpuinfo),
        num_cores=_count_cores(),
    )


def cpu_flags(cpuinfo: str) -> frozenset[str]:
    """Return the instruction sets in the text of `/proc/cpuinfo`; empty except on x86."""
    for line in cpuinfo.splitlines():
        name, _, value = line.partition(":")
        if name.strip() == "flags":
            return frozenset(value.split())
    return frozenset()


def cpu_has_bf16(cpuinfo: str) -> bool:
    """Whether the text of `/proc/cpuinfo` contains a bfloat16 instruction set."""
    return not _BF16_FLAGS.isdisjoint(cpu_flags(cpuinfo))


def visible_gpus(num_nodes: int, visible: str | None) -> tuple[str, ...]:
    """Return the names of the devices that CUDA will see.

    Args:
        num_nodes: number of NVIDIA device nodes.
        visible: value of `CUDA_VISIBLE_DEVICES`; `None` if it is unset.
    """
    if visible is None or not num_nodes:
        return tuple(str(index) for index in range(num_nodes))
    names = [name.strip() for name in visible.split(",")]
    # The driver ignores the names after the first invalid one.
    wrong = (at for at, name in enumerate(names) if not name or name.startswith("-"))
    return tuple(names[: next(wrong, len(names))])


def quota_cores(cpu_max: str) -> float | None:
    """Return the number of cores that a cgroup's `cpu.max` grants; `None` for no limit."""
    quota, _, period = cpu_max.strip().partition(" ")
    if not quota.isdigit() or not period.isdigit() or int(period) == 0:
        return None
    return int(quota) / int(period)


def _count_gpus() -> int:
    nodes = [path for path in Path("/dev").glob("nvidia*") if path.name[6:].isdigit()]
    # In WSL the GPU is /dev/dxg.
    return len(nodes) or int(Path("/dev/dxg").exists())


def _torch_has_cuda() -> bool:
    try:
        version = metadata.version("torch")
    except metadata.PackageNotFoundError:
        return False
    return "+cpu" not in version and "+rocm" not in version and "+xpu" not in version


def _count_cores() -> int:
    allowed = os.sched_getaffinity(0)
    siblings = {
        _read(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list").strip() or str(cpu)
        for cpu in allowed
    }
    cores = len(siblings)
    quota = _cgroup_quota()
    if quota is not None:
        cores = min(cores, math.ceil(quota))
    return max(1, cores)


def _cgroup_quota() -> float | None:
    limits: list[float | None] = []
    for line in _read("/proc/self/cgroup").splitlines():
        hierarchy, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if hierarchy == "0":
            # Any ancestor may have a limit. Inside a container, the root is this process's cgroup.
            folder = Path("/sys/fs/cgroup") / path.lstrip("/")
            folders = (folder, *folder.parents[: len(folder.parents) - 3])
            limits.extend(quota_cores(_read(each / "cpu.max")) for each in folders)
        elif "cpu" in controllers.split(","):
            folder = Path("/sys/fs/cgroup/cpu")
            quota, period = _read(folder / "cpu.cfs_quota_us"), _read(folder / "cpu.cfs_period_us")
            limits.append(quota_cores(f"{quota.strip()} {period.strip()}"))
    known = [limit for limit in limits if limit is not None]
    return min(known) if known else None


def _read(path: str | Path) -> str:
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
