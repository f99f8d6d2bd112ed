"""What the doctor found, as plain data: the table and the JSON are made of it."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Problem:
    """Something that prevents a start.

    Attributes:
        reason: one line, the one that the server would end with.
        remedy: what to do about it.
    """

    reason: str
    remedy: str


@dataclass(frozen=True)
class Library:
    """A package that is needed or gives more.

    Attributes:
        version: `None` when it is not installed.
        gives: what there is with it, and not without.
        install: command that installs it.
        is_required: whether nothing runs without it.
    """

    name: str
    version: str | None
    gives: str
    install: str
    is_required: bool


@dataclass(frozen=True)
class Machine:
    """What models run on.

    Attributes:
        num_cores: physical ones that this process may use.
        instruction_sets: of those that the C++ kernels are written for, what the CPU has.
        memory_bytes: what a process may still take, by its control group too; `None` unknown.
        gpus: names of NVIDIA devices, with their drivers.
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
    """The implementation that computes an op, and why."""

    op: str
    implementation: str
    reason: str


@dataclass(frozen=True)
class Model:
    """A model's own numbers, from its `config.json`, and what the options make of them.

    Attributes:
        gives: `tokens`, `vectors` or `scores`.
        layer_states: what layers keep of a sequence between steps, with the number of layers.
        device, dtype: where and in what type it would run.
        context_len: longest request, tokens.
        choices: what was left to the server, and why it takes what it takes.
    """

    architecture: str
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
        arithmetic: how its memory comes about, GiB.
        is_at_most: whether a start measures something more that takes a part of it.
    """

    num_tokens: int
    num_pages: int
    page_size: int
    size_bytes: int
    arithmetic: str
    is_at_most: bool


@dataclass(frozen=True)
class Capacity:
    """So many requests of `num_tokens` tokens, prompt and output, fit at a time."""

    num_tokens: int
    num_requests: int


@dataclass(frozen=True)
class Needs:
    """What the model takes of a device, for each rank, and what is left to serve with.

    Attributes:
        weight_bytes: of one rank, at least: layouts for kernels may hold copies.
        bytes_per_token: that one token takes in the pool of one rank.
        pool: `None` when there is no memory for one, or nothing to keep in it.
        longest_request: tokens, prompt and output.
        capacities: of one replica.
    """

    weight_bytes: int
    bytes_per_token: int
    pool: Pool | None = None
    longest_request: int = 0
    capacities: list[Capacity] = field(default_factory=list)


@dataclass
class Report:
    """Everything; what could not be found out is `None` or empty."""

    machine: Machine
    libraries: list[Library]
    model: Model | None = None
    needs: Needs | None = None
    attention: Kernel | None = None
    kernels: list[Kernel] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        """The report as JSON can hold it; `ok` when nothing prevents a start."""
        return {"ok": not self.problems, **dataclasses.asdict(self)}
