"""The doctor's findings as plain data; the printed table and the JSON are made from them."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Problem:
    """A problem that prevents the server from starting.

    Attributes:
        reason: one line; the server would exit with the same line.
        remedy: how to fix the problem.
    """

    reason: str
    remedy: str


@dataclass(frozen=True)
class Library:
    """A package that is required or optional.

    Attributes:
        version: the installed version; `None` when the package is not installed.
        gives: the features that the package enables.
        install: command that installs the package.
        is_required: whether the server cannot run without the package.
    """

    name: str
    version: str | None
    gives: str
    install: str
    is_required: bool


@dataclass(frozen=True)
class Machine:
    """The hardware that models run on.

    Attributes:
        num_cores: physical cores that this process may use.
        instruction_sets: instruction sets that the CPU supports and the C++ kernels have code for.
        memory_bytes: bytes that a process may allocate within its control group; `None` if unknown.
        gpus: names of NVIDIA devices, with their driver versions.
    """

    system: str
    python: str
    headrace: str
    cpu: str
    num_cores: int
    instruction_sets: list[str]
    memory_bytes: int | None
    gpus: list[str]


@dataclass(frozen=True)
class Kernel:
    """The kernel implementation that was chosen for an op, and the reason."""

    op: str
    implementation: str
    reason: str


@dataclass(frozen=True)
class Model:
    """A model's properties from its `config.json`, and the settings that the server would use.

    Attributes:
        name: the model's name for clients; `None` if only a `config.json` is examined.
        gives: the model's output: `tokens`, `vectors` or `scores`.
        layer_states: the kinds of state that layers keep of a sequence between steps, each with the
            number of its layers.
        device, dtype: the device and dtype in which the model would run.
        context_len: the longest request, in tokens.
        choices: the server's automatic choices, and their reasons.
    """

    name: str | None
    architecture: str
    impl: str
    gives: str
    num_parameters: int
    stored_dtype: str
    layer_states: dict[str, int]
    device: str
    dtype: str
    context_len: int
    max_running_requests: int
    tp_size: int
    dp_size: int
    choices: list[str]


@dataclass(frozen=True)
class Pool:
    """The KV pool of one rank.

    Attributes:
        arithmetic: the calculation of the pool's memory, in GiB, as a text.
        is_at_most: whether the size is an upper bound, because a start measures more memory in use.
    """

    num_tokens: int
    num_pages: int
    page_size: int
    size_bytes: int
    arithmetic: str
    is_at_most: bool


@dataclass(frozen=True)
class Capacity:
    """How many requests of a given length (prompt and output, in tokens) can run at a time."""

    num_tokens: int
    num_requests: int


@dataclass(frozen=True)
class Needs:
    """The memory that the model needs on each rank's device, and the requests that then fit.

    Attributes:
        weight_bytes: bytes of the weights of one rank. It is a lower bound, because some weights
            may be stored twice, in layouts for different kernels.
        bytes_per_token: bytes of one token in the pool of one rank.
        pool: the KV pool; `None` if no pool fits into memory or the model needs none.
        longest_request: the longest request that fits the pool, in tokens of prompt and output.
        capacities: how many requests of certain lengths one replica can run at a time.
    """

    weight_bytes: int
    bytes_per_token: int
    pool: Pool | None = None
    longest_request: int = 0
    capacities: list[Capacity] = field(default_factory=list)


@dataclass
class Report:
    """The whole report of the doctor; facts that are not known are `None` or empty."""

    machine: Machine
    libraries: list[Library]
    model: Model | None = None
    needs: Needs | None = None
    attention: Kernel | None = None
    kernels: list[Kernel] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        """Return the report as JSON values; `ok` is true if the server would start."""
        return {"ok": not self.problems, **dataclasses.asdict(self)}
