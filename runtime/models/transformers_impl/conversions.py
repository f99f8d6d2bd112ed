"""Reads how `transformers` renames and stacks a checkpoint's tensors, so that we do the same."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from runtime.models.transformers_impl.traced import refused


@dataclass(frozen=True)
class Conversions:
    """The changes that turn the tensors of a checkpoint into the tensors of a model.

    Attributes:
        renames: pairs of a pattern of names in files and its replacement.
        experts: for the ending of a stacked tensor's name, the endings of the names in files: one,
            or two for gate and up. `{}` stands for the expert's number.
    """

    renames: list[tuple[str, str]] = field(default_factory=list)
    experts: dict[str, list[str]] = field(default_factory=dict)

    def sources(self, name: str) -> list[str]:
        """Return the names of the file tensors that are stacked to `name`.

        Empty if files hold the stack.
        """
        for target, sources in self.experts.items():
            if name.endswith(target):
                stem = name.removesuffix(target)
                return [stem + source for source in sources]
        return []


def read_conversions(architecture: str, model: Any) -> Conversions:
    """Return the changes that `transformers` makes to the checkpoint tensors of a model.

    Raises:
        StartupError: `transformers` does more than rename tensors and stack experts.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming

    names = [name for name, _ in model.named_parameters()]
    found = Conversions()
    for change in get_model_conversion_mapping(model, add_legacy=False):
        targets = [_plain(each) for each in change.target_patterns]
        if type(change) is WeightRenaming:
            found.renames.extend(zip(change.source_patterns, change.target_patterns, strict=True))
            continue
        if not any(name.endswith(tuple(targets)) for name in names):
            continue
        steps = [type(step).__name__ for step in getattr(change, "operations", ())]
        stacks = steps in (["MergeModulelist"], ["MergeModulelist", "Concatenate"])
        if type(change) is not WeightConverter or not stacks or len(targets) != 1:
            raise refused(architecture, "its weights are converted while they load")
        found.experts[targets[0]] = [
            _plain(source).replace("*", "{}", 1) for source in change.source_patterns
        ]
    return found


def _plain(pattern: str) -> str:
    return pattern.removeprefix("^").replace("\\.", ".")
