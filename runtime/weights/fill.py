"""Fill a model's parameters from a stream of tensors: at start and on a live model alike."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from torch import Tensor

from runtime.checkpoint.check import describe
from runtime.checkpoint.weights import WeightSpec, decoder_weights, is_ignored
from runtime.errors import StartupError
from runtime.models.causal_lm import CausalLM
from runtime.models.layers.parameter import Slot, WeightHolder


def load_weights(
    model: CausalLM,
    tensors: Iterable[tuple[str, Tensor]],
    *,
    partial: bool = False,
    before: Callable[[str, WeightHolder], None] | None = None,
) -> None:
    """Fill `model` from checkpoint tensors; on a live model, replace its weights.

    Each layer is packed as soon as its last tensor has come, so beside the model only the layers
    in the making take memory. Tensors are cast to the model's type and cut to its rank's part.

    Args:
        model: fresh, or loaded before.
        tensors: (checkpoint name, tensor); shapes as in `decoder_weights`, or those of this rank's
            parts, as `slots_of` has them; any device.
        partial: accept that tensors are missing and keep what the model has there; only for a
            model that was loaded before.
        before: called with each layer's name before its first tensor is written.

    Raises:
        StartupError: a tensor nobody expects, one that comes twice, of the wrong shape, or not at
            all. A live model keeps the layers that were replaced before the error.
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


def slots_of(model: CausalLM) -> dict[str, Slot]:
    """Return which part of each checkpoint tensor this rank takes, by the tensor's name."""
    holders = dict(model.holders())
    found = {}
    for spec in decoder_weights(model.config):
        holder_name, _, parameter = spec.target.rpartition(".")
        found[spec.name] = dict(holders[holder_name].parameters())[parameter].slots[spec.slot]
    return found


class _Fill:
    """Which slots of which holders are still open."""

    def __init__(self, model: CausalLM, before: Callable[[str, WeightHolder], None] | None) -> None:
        self.before = before
        self.config = model.config
        self.holders: dict[str, WeightHolder] = dict(model.holders())
        self.specs = {spec.name: spec for spec in decoder_weights(model.config)}
        self.open: dict[str, dict[tuple[str, str], WeightSpec]] = {}
        for spec in self.specs.values():
            holder_name, _, parameter = spec.target.rpartition(".")
            self.open.setdefault(holder_name, {})[parameter, spec.slot] = spec
        self.sizes = {name: len(slots) for name, slots in self.open.items()}

    def take(self, name: str, tensor: Tensor) -> None:
        spec = self.specs.get(name)
        if spec is None:
            if is_ignored(name, self.config):
                return
            raise StartupError(f"Unexpected tensor {name!r} for {self.config.architecture}")
        holder_name, _, parameter_name = spec.target.rpartition(".")
        slots = self.open[holder_name]
        holder = self.holders[holder_name]
        parameter = dict(holder.parameters())[parameter_name]
        if tuple(tensor.shape) not in (spec.shape, parameter.slots[spec.slot].local_shape):
            raise StartupError(
                f"Tensor {name!r} is {list(tensor.shape)}, expected {list(spec.shape)}"
            )
        if not tensor.is_floating_point():
            raise StartupError(f"Tensor {name!r} is {tensor.dtype}, expected a floating type")
        if self.before is not None and len(slots) == self.sizes[holder_name]:
            self.before(holder_name, holder)
        if slots.pop((parameter_name, spec.slot), None) is None:
            raise StartupError(f"Tensor {name!r} comes twice")
        parameter.fill(spec.slot, tensor)
        if not slots:
            holder.finalize([])

    def touched(self) -> list[WeightHolder]:
        """Return the holders that were filled in part."""
        return [
            self.holders[name]
            for name, slots in self.open.items()
            if 0 < len(slots) < self.sizes[name]
        ]

    def finish(self, partial: bool) -> None:
        missing = [spec.name for slots in self.open.values() for spec in slots.values()]
        if missing and not partial:
            raise StartupError(
                f"{self.config.architecture} cannot be loaded: {describe('missing', missing)}"
            )
        for name, slots in self.open.items():
            if 0 < len(slots) < self.sizes[name]:
                self.holders[name].finalize(list(slots))
