"""Checks the compiled code of kernels for five kinds of GPUs, without a GPU.

The device limits a program's shared memory. A kernel may read only weights before it waits for
earlier kernels (`kernels.triton_support.launch`).
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import pkgutil
import re

import pytest

import kernels
from kernels.triton_support.device import SharedMemory
from tests.support.uninterpreted import run_uninterpreted

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="no triton")


def lines_of(*what: str) -> list[list[object]]:
    printed = run_uninterpreted("-m", "tests.support.compiled_triton", *what, timeout=880)
    return [json.loads(line) for line in printed.splitlines()]


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "kinds",
    [
        # The least shared memory, and as much as there is with each kind of matrix instruction.
        (89, 90, 100),
        # As much as 89, and an amount in between.
        pytest.param((80, 120), marks=pytest.mark.long),
    ],
    ids=str,
)
def test_every_kernel_fits_into_the_shared_memory_of_its_device(kinds: tuple[int, ...]) -> None:
    from tests.support.compiled_triton import KINDS_OF_CODE, LIMITS

    lines = lines_of("shared", *map(str, kinds))
    found = {str(name): int(str(size)) for name, size in lines}
    too_large = {name: size for name, size in found.items() if size > LIMITS[int(name.split()[0])]}
    assert not too_large
    # For every GPU three products, six cuts of attention, three of experts, latents, and codes in
    # groups; for Hopper latents of decode steps; for the kinds of code two norms, the greedy
    # choice, attention of decoding and of prefixes, two of sampling and two of experts' choice.
    num_of_code = sum(kind in KINDS_OF_CODE for kind in kinds)
    assert len(found) == 14 * len(kinds) + (90 in kinds) + 9 * num_of_code
    # As large as measured where there is room: what fits a small device is not for the others.
    if 90 in kinds:
        assert found["90 product, split"] == 196_608
        assert found["90 extend 256"] > LIMITS[89]


@pytest.mark.parametrize(
    ("size", "major", "stages"), [(227, 9, 4), (227, 10, 4), (163, 8, 4), (99, 8, 3), (99, 12, 3)]
)
def test_as_many_blocks_are_in_flight_as_there_is_room_for(
    size: int, major: int, stages: int
) -> None:
    shared = SharedMemory.of_capability(size * 1024, major)
    assert shared.stages(4, 49_152) == stages
    assert shared.stages(2, 1024) == 2
    assert shared.stages(4, 2**30) == 1


class Before:
    """The instructions of a kernel ahead of its wait, and which parameters registers come from."""

    def __init__(self, ptx: str, arguments: list[str]) -> None:
        self._arguments = arguments
        self._from: dict[str, set[str]] = {}
        self.reads: set[str] = set()
        self.others: list[str] = []
        ahead, *behind = ptx.split("griddepcontrol.wait")
        assert len(behind) == 1, "one wait, which is no loop's"
        for line in ahead.splitlines():
            self._note(line.partition("//")[0].strip())

    def _note(self, line: str) -> None:
        match = re.fullmatch(r"(?:@!?%p\d+ +)?([a-z][\w.:]*)\s+(.*);", line)
        if match is None or line.startswith("."):
            return
        name, operands = match.groups()
        registers = re.findall(r"%[a-z]+\d+", operands)
        parameter = re.search(r"_param_(\d+)\]", operands)
        if name.startswith("ld.param") and parameter is not None:
            place = int(parameter[1])
            known = place < len(self._arguments)
            self._from[registers[0]] = {self._arguments[place] if known else "scratch"}
        elif name.startswith("ld.global"):
            self.reads |= set().union(*(self._from.get(each, set()) for each in registers[-1:]))
        elif re.match(r"(ld|st|atom|red|cp|bra|ret|call|wgmma|mbarrier|tensormap)\b", name):
            self.others.append(line)
        elif registers:
            sources = (self._from.get(each, set()) for each in registers[1:])
            self._from[registers[0]] = set().union(*sources)


# What no kernel ahead writes may be fetched meanwhile: weights, an adapter's list of tiles.
MAY_BE_READ = {
    "_rms_norm_kernel": {"weight_ptr"},
    "_layer_norm_kernel": {"weight_ptr"},
    "_norm_kernel": {"weight_ptr"},
    "narrow_rms_norm_kernel": {"weight_ptr"},
    "expand_kernel": {"tiles_ptr"},
    "expand_few_kernel": {"tiles_ptr"},
}
# The kernel before this one waits for the list of adapters, and then lets this one start.
AHEAD = {"tiles_ptr", "list_ptr", "memory_ptr"}
# Numbers in the addresses of these reads.
SIZES = {"num_places", "slot_stride", "rank_stride"}


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_nothing_but_weights_is_touched_before_the_wait() -> None:
    checked = set()
    for name, kernel, arguments, ptx in lines_of("ptx"):
        assert isinstance(arguments, list)
        before = Before(str(ptx), arguments)
        allowed = AHEAD if str(name).endswith("ahead") else MAY_BE_READ.get(str(kernel), set())
        assert before.reads - SIZES == allowed, f"{name} reads {before.reads}"
        assert not before.others, name
        checked.add(str(kernel))
    assert checked >= set(MAY_BE_READ)
    assert {name for name, _ in dependent_kernels()} == checked


def dependent_kernels() -> list[tuple[str, str]]:
    """Name and module of every kernel that has a form for dependent launch."""
    from triton.runtime.jit import JITFunction

    found = []
    for info in pkgutil.walk_packages(kernels.__path__, "kernels."):
        if ".cpu" in info.name or "cudnn" in info.name or "mkldnn" in info.name:
            continue
        module = importlib.import_module(info.name)
        for name, value in vars(module).items():
            is_own = isinstance(value, JITFunction) and value.fn.__module__ == info.name
            if is_own and name.endswith("kernel") and "PDL" in value.arg_names:
                found.append((name, info.name))
    return found


@pytest.mark.parametrize(
    ("code", "reads", "others"),
    [
        ("ld.param.b64 %rd1, [k_param_0];\nld.global.b32 %r1, [ %rd1 + 0 ];", {"x_ptr"}, 0),
        (
            "ld.param.b64 %rd1, [k_param_1];\nadd.s64 %rd2, %rd1, %rd9;\n"
            "@%p1 ld.global.v4.b32 { %r1, %r2, %r3, %r4 }, [ %rd2 + 0 ];",
            {"weight_ptr"},
            0,
        ),
        ("@%p1 cp.async.cg.shared.global [ %r1 + 0 ], [ %rd1 + 0 ], 0x10;", set(), 1),
        ("@%p2 st.global.b32 [ %rd1 + 0 ], { %r1 };", set(), 1),
        ("@%p1 bra \t$L__BB0_2;", set(), 1),
    ],
    ids=["input", "weight", "async", "store", "branch"],
)  # fmt: skip
def test_what_comes_ahead_of_a_wait_is_seen(code: str, reads: set[str], others: int) -> None:
    before = Before(code + "\ngriddepcontrol.wait;", ["x_ptr", "weight_ptr"])
    assert before.reads == reads
    assert len(before.others) == others
