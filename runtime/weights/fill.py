"""Fills a model's parameters from a stream of checkpoint tensors, at start or while it serves."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial

from torch import Tensor

from runtime.checkpoint.check import describe
from runtime.checkpoint.model_spec import WeightSpec
from runtime.errors import StartupError
from runtime.models.layers.parameter import WeightHolder
from runtime.models.model import Model


def load_weights(
    model: Model,
    tensors: Iterable[tuple[str, Tensor]],
    *,
    partial: bool = False,
    before: Callable[[str, WeightHolder], None] | None = None,
) -> None:
    """Fill `model` with checkpoint tensors; if it is loaded already, replace its weights.

    Each layer is packed as soon as its last tensor has come, so only layers that are incomplete
    take extra memory. Tensors are cast to the model's type and cut to the rank's part.

    Args:
        model: a new model, or one that is loaded already.
        tensors: pairs of checkpoint name and tensor, on any device. A tensor has the shape in
            `ModelSpec.weights`, or is already this rank's part, as the functions of `shards_of` cut
            it.
        partial: whether tensors may be missing; their parameters then keep their current values.
            Only for a model that is loaded already.
        before: called with each layer's name before its first tensor is written.

    Raises:
        StartupError: a tensor is unexpected, repeated, missing or of the wrong shape. Layers that
            were replaced before the error stay replaced.
    """
    fill = _Fill(model, before)
    try:
        for name, tensor in tensors:
            fill.take(name, tensor)
        fill.finish(partial)
    except BaseException:
        for holder in fill.touched():
            holder.discard()
        raise


def own_weights(model: Model) -> Sequence[WeightSpec]:
    """Return the checkpoint tensors that this rank's pipeline stage needs, in layer order."""
    weights = model.spec.weights
    if model.context.stage.count == 1:
        return weights
    holders = dict(model.holders())
    return [spec for spec in weights if spec.target.rpartition(".")[0] in holders]


def is_elsewhere(model: Model) -> Callable[[str], bool]:
    """Return a function that says whether only other pipeline stages need a checkpoint tensor."""
    own = {spec.name for spec in own_weights(model)}
    floats = model.spec.weights_in_floats
    known = {spec.name for spec in model.spec.weights} | set(floats)
    own |= {name for name, spec in floats.items() if spec.of in own}
    others = known - own
    return lambda name: model.spec.canonical(name) in others


def shards_of(model: Model) -> dict[str, Callable[[Tensor], Tensor]]:
    """Return, for each checkpoint tensor, the function that cuts this rank's part out of it."""
    holders = dict(model.holders())
    found: dict[str, Callable[[Tensor], Tensor]] = {}
    for spec in own_weights(model):
        holder_name, _, parameter = spec.target.rpartition(".")
        found[spec.name] = partial(
            dict(holders[holder_name].parameters())[parameter].cut, spec.shard
        )
    return found


class _Fill:
    """The state of one filling: which parts of which layers are still missing."""

    def __init__(self, model: Model, before: Callable[[str, WeightHolder], None] | None) -> None:
        self.before = before
        self.spec = model.spec
        self.holders: dict[str, WeightHolder] = dict(model.holders())
        self.specs = {spec.name: spec for spec in model.spec.weights}
        self.open: dict[str, dict[tuple[str, str], WeightSpec]] = {}
        for spec in own_weights(model):
            holder_name, _, parameter = spec.target.rpartition(".")
            self.open.setdefault(holder_name, {})[parameter, spec.shard] = spec
        self.scales: dict[str, list[WeightSpec]] = {}
        for spec in self.specs.values():
            if spec.of:
                self.scales.setdefault(spec.of, []).append(spec)
        self.is_elsewhere = is_elsewhere(model)
        self.sizes = {name: len(shards) for name, shards in self.open.items()}

    def take(self, name: str, tensor: Tensor) -> None:
        if self.is_elsewhere(name):
            return
        name = self.spec.canonical(name)
        spec = self.specs.get(name) or self.spec.weights_in_floats.get(name)
        if spec is None:
            if self.spec.is_ignored(name):
                return
            raise StartupError(f"Unexpected tensor {name!r} for {self.spec.architecture}")
        holder_name, _, parameter_name = spec.target.rpartition(".")
        shards = self.open[holder_name]
        holder = self.holders[holder_name]
        parameter = dict(holder.parameters())[parameter_name]
        problem = parameter.problem(spec, tensor)
        if problem:
            raise StartupError(f"Tensor {name!r} is {problem}")
        if self.before is not None and len(shards) == self.sizes[holder_name]:
            self.before(holder_name, holder)
        if shards.pop((parameter_name, spec.shard), None) is None:
            raise StartupError(f"Tensor {name!r} comes twice")
        if tensor.is_floating_point() and tensor.itemsize > 1:
            # If a tensor comes as floats, quantizing it makes its scales, so none are awaited.
            for scale in self.scales.get(name if name in self.specs else spec.of, ()):
                shards.pop((scale.target.rpartition(".")[2], scale.shard), None)
        parameter.fill(spec.shard, tensor)
        if not shards:
            holder.finalize([])

    def touched(self) -> list[WeightHolder]:
        """Return the layers that are only partly filled."""
        return [
            self.holders[name]
            for name, shards in self.open.items()
            if 0 < len(shards) < self.sizes[name]
        ]

    def finish(self, partial: bool) -> None:
        missing = [spec.name for shards in self.open.values() for spec in shards.values()]
        if missing and not partial:
            raise StartupError(
                f"{self.spec.architecture} cannot be loaded: {describe('missing', missing)}"
            )
        for name, shards in self.open.items():
            if 0 < len(shards) < self.sizes[name]:
                self.holders[name].finalize(list(shards))
