"""How a matrix is stored in E4M3, and how its activations are rounded. Front-safe: no torch."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Fp8Scheme:
    """The stored form of a group of matrices.

    Attributes:
        block: rows and columns that share a scale; 0 for all of them.
        rounds: whether products round their activations to E4M3.
        group: columns of a token that share a scale; 0 for all of them.
        is_static: whether the checkpoint has the scale of the activations, one for all tokens.
        scale: last part of the names of the matrices' scales.
    """

    block: tuple[int, int]
    rounds: bool = True
    group: int = 0
    is_static: bool = False
    scale: str = "weight_scale"

    def scale_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of a matrix's scales; dimensions of 1 may be omitted."""
        if self.block == (0, 0):
            return (1,)
        rows, columns = (
            -(-size // (block or size)) for size, block in zip(shape, self.block, strict=True)
        )
        return rows, columns

    @property
    def description(self) -> str:
        """Text for logs: `channel scales, activations rounded by token`."""
        weights = {(0, 0): "tensor", (1, 0): "channel"}.get(self.block)
        weights = weights or "x".join(map(str, self.block))
        if not self.rounds:
            return f"{weights} scales, activations not rounded"
        by = "a static scale" if self.is_static else f"{self.group}" if self.group else "token"
        return f"{weights} scales, activations rounded by {by}"


@dataclass(frozen=True)
class Fp8Group:
    """Matrices with a scheme.

    Attributes:
        targets: module names, `re:` expressions of them, or classes of modules, such as `Linear`.
    """

    scheme: Fp8Scheme
    targets: tuple[str, ...] = ("Linear",)


@dataclass(frozen=True)
class Modules:
    """A list of modules, in the notation of any tool.

    Attributes:
        names: full names, last parts of names, `re:` expressions, or shell patterns with `*`.
    """

    names: tuple[str, ...] = ()
    _expressions: tuple[re.Pattern[str], ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_expressions", tuple(map(_expression, self.names)))

    def __contains__(self, module: str) -> bool:
        return any(expression.match(module) for expression in self._expressions)


def _expression(name: str) -> re.Pattern[str]:
    if name.startswith("re:"):
        return re.compile(name[3:])
    if "*" in name:
        return re.compile(re.escape(name).replace(r"\*", ".*") + r"\Z")
    # A name covers a module and all modules in it. `transformers` also lists last parts of names.
    return re.compile(rf"(.*\.)?{re.escape(name)}(\..*)?\Z")


def find_group(groups: Sequence[Fp8Group], module: str) -> Fp8Scheme | None:
    """Return the scheme of a linear module; `None` if no group names it."""
    named = [group for group in groups if module in Modules(group.targets)]
    of_all = [group for group in groups if "Linear" in group.targets]
    found = [*named, *of_all]
    return found[0].scheme if found else None
