"""Reads recorded counts of chosen experts from a CSV file, and computes how even they are."""

from __future__ import annotations

import csv
import math
from dataclasses import dataclass
from pathlib import Path

HEADER = ["layer_id", "expert_id", "count"]
# The largest number of counts that is read; a file of the server's recorder is never larger.
MAX_NUMBERS = 1 << 22
INT64_MAX = 2**63 - 1

Counts = list[list[int]]


class UnreadableFile(Exception):
    """The given file cannot be read as counts; the message is one line."""


@dataclass(frozen=True)
class Balance:
    """How evenly the experts of one layer were used.

    Attributes:
        layer: index of the layer.
        num_choices: number of choices: tokens times experts per token.
        max_to_mean: the most used expert's count divided by the mean count.
        entropy: entropy of the experts' shares divided by the entropy of equal shares: 1.0 means
            equal use, 0.0 means that a single expert was used.
        unused: share of experts that were never chosen.
        top: the most used experts with their shares, in descending order.
    """

    layer: int
    num_choices: int
    max_to_mean: float
    entropy: float
    unused: float
    top: list[tuple[int, float]]


def counts_file(path: Path) -> Path:
    """Return the CSV file of a recording: `path` itself, or the CSV next to a `.pt` file.

    Raises:
        UnreadableFile: the CSV does not exist.
    """
    found = path.with_suffix(".csv") if path.suffix == ".pt" else path
    if not found.is_file():
        beside = "" if found == path else f" beside {path.name}"
        raise UnreadableFile(f"{found} does not exist{beside}.")
    return found


def read_counts(path: Path) -> Counts:
    """Read the counts `[num_layers, num_experts]` from a CSV file; missing entries are zero.

    Raises:
        UnreadableFile: the file is missing, or the server's recorder did not write it.
    """
    found: dict[tuple[int, int], int] = {}
    try:
        with path.open(newline="", encoding="utf-8") as file:
            lines = csv.reader(file)
            if next(lines, None) != HEADER:
                raise UnreadableFile(
                    f"{path} does not begin with {','.join(HEADER)}, as a recorder's CSV does."
                )
            for line in lines:
                layer, expert, count = map(int, line)
                if min(layer, expert, count) < 0 or count > INT64_MAX or len(found) >= MAX_NUMBERS:
                    raise ValueError
                found[layer, expert] = count
    except OSError as error:
        raise UnreadableFile(f"{path} cannot be read: {error.strerror}.") from error
    except (ValueError, csv.Error) as error:
        raise UnreadableFile(
            f"{path}, line {lines.line_num}, is not of three numbers, {', '.join(HEADER)}."
        ) from error
    if not found:
        raise UnreadableFile(f"{path} has no counts.")
    num_layers = max(layer for layer, _ in found) + 1
    num_experts = max(expert for _, expert in found) + 1
    if num_layers * num_experts > MAX_NUMBERS:
        raise UnreadableFile(f"{path} names {num_layers} layers of {num_experts} experts.")
    return [[found.get((i, j), 0) for j in range(num_experts)] for i in range(num_layers)]


def balance_of(layer: int, counts: list[int], num_top: int = 3) -> Balance:
    """Compute the measures of one layer that has at least one choice."""
    total = sum(counts)
    shares = [count / total for count in counts]
    # With a single expert the entropy is 0, and any positive divisor avoids a division by zero.
    most = math.log(len(counts)) if len(counts) > 1 else 1.0
    entropy = -sum(share * math.log(share) for share in shares if share) / most
    ranked = sorted(range(len(counts)), key=lambda expert: (-counts[expert], expert))
    return Balance(
        layer=layer,
        num_choices=total,
        max_to_mean=max(shares) * len(counts),
        entropy=entropy if len(counts) > 1 else 1.0,
        unused=counts.count(0) / len(counts),
        top=[(expert, shares[expert]) for expert in ranked[:num_top] if counts[expert]],
    )


def balances(counts: Counts) -> list[Balance]:
    """Compute the measures of every layer that has counts; dense layers have none."""
    return [balance_of(layer, row) for layer, row in enumerate(counts) if any(row)]
