"""The doctor's findings as plain data, from which the table and the JSON are made."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Problem:
    """Something that prevents a start.

    Attributes:
        reason: one line, the same that the server would exit with.
        remedy: how to fix it.
    """

    reason: str
    remedy: str


@dataclass(frozen=True)
class Library:
    """A package that is required or optional.

    Attributes:
        version: the installed version; `None` when the package is not installed.
        gives: what the package enables.
        install: command that installs it.
        is_required: whether nothing works without it.
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
        memory_bytes: how much a process may allocate within its control group; `None` if unknown.
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
    """The implementation chosen for an op, and why."""

    op: str
    implementation: str
    reason: str


@dataclass(frozen=True)
class Model:
    """A model's settings, from its `config.json`, and how the options apply to the model.

    Attributes:
        name: the model's name as clients would see it; `None` for a `config.json` alone.
        gives: what the model gives: `tokens`, `vectors` or `scores`.
        layer_states: what layers keep of a sequence between steps, with the number of layers.
        device, dtype: the device and dtype in which the model would run.
        context_len: longest request, tokens.
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
        arithmetic: how the pool's memory is computed, GiB.
        is_at_most: whether the pool is an upper bound, because a start measures further use.
    """

    num_tokens: int
    num_pages: int
    page_size: int
    size_bytes: int
    arithmetic: str
    is_at_most: bool


@dataclass(frozen=True)
class Capacity:
    """`num_requests` requests of `num_tokens` tokens, prompt and output, fit at a time."""

    num_tokens: int
    num_requests: int


@dataclass(frozen=True)
class Needs:
    """What the model needs from a device, for each rank, and what remains for serving.

    Attributes:
        weight_bytes: bytes of the weights of one rank; a lower bound, because kernels' layouts may
            hold copies.
        bytes_per_token: bytes of one token in the pool of one rank.
        pool: the KV pool; `None` if no pool fits or the model needs none.
        longest_request: tokens of prompt and output together.
        capacities: the capacities of one replica.
    """

    weight_bytes: int
    bytes_per_token: int
    pool: Pool | None = None
    longest_request: int = 0
    capacities: list[Capacity] = field(default_factory=list)


@dataclass
class Report:
    """The whole report; unknown facts are `None` or empty."""

    machine: Machine
    libraries: list[Library]
    model: Model | None = None
    needs: Needs | None = None
    attention: Kernel | None = None
    kernels: list[Kernel] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        """The report as JSON values; `ok` means that nothing prevents a start."""
        return {"ok": not self.problems, **dataclasses.asdict(self)}
