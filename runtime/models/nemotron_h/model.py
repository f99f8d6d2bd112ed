"""Nemotron-H: each layer has one norm and one block, either a mixer or a feed-forward block."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from runtime.models.attention.forward_batch import ForwardBatch
from runtime.models.decoder.model import Decoder, DecoderForCausalLM, DecoderLayer
from runtime.models.decoder.spec import DecoderSpec
from runtime.models.layers.build_context import BuildContext
from runtime.models.layers.mixture import SparseMLP
from runtime.models.layers.norm import RMSNorm, add_normed
from runtime.models.layers.parameter import WeightHolder
from runtime.models.layers.rope import RopeTables
from runtime.models.nemotron_h.spec import MLP, NemotronHSpec


class NemotronLayer(DecoderLayer):
    """A layer that has only one of the two halves of a `DecoderLayer`, after a norm."""

    __slots__ = ("has_mixer", "norm")

    def __init__(
        self, spec: DecoderSpec, context: BuildContext, layer_idx: int, ropes: RopeTables
    ) -> None:
        assert isinstance(spec, NemotronHSpec), "another family's spec"
        self.norm = RMSNorm(spec.hidden_size, spec.rms_norm_eps, context)
        self.has_mixer = spec.kinds[layer_idx] != MLP
        if self.has_mixer:
            self.self_attn = self.mixer_of(spec, context, layer_idx, ropes)
        else:
            self.mlp = self.mlp_of(spec, context, layer_idx)

    def attend(self, hidden: Tensor | None, residual: Tensor, batch: ForwardBatch) -> Tensor:
        """Compute the mixer up to its output product; see `DecoderLayer.attend`.

        A layer with a feed-forward block returns `hidden` unchanged, and `finish` computes the
        block.
        """
        if not self.has_mixer:
            assert hidden is not None, "the first layer mixes tokens"
            return hidden
        normed = add_normed(hidden, residual, self.norm, self.self_attn.rounding)
        return self.self_attn.attend(normed, batch)

    def finish(self, attended: Tensor, residual: Tensor) -> Tensor:
        """Compute the mixer's output product or the feed-forward block.

        Arguments and result are those of `DecoderLayer.finish`.
        """
        if self.has_mixer:
            return self.self_attn.o_proj.apply(attended)
        if isinstance(self.mlp, SparseMLP):
            return self.mlp.forward(add_normed(attended, residual, self.norm))
        return self.mlp.forward(add_normed(attended, residual, self.norm, self.mlp.rounding))

    def holders(self, prefix: str) -> Iterator[tuple[str, WeightHolder]]:
        """Yield each module that owns weights, with its name under `prefix`."""
        if self.has_mixer:
            yield from self.self_attn.holders(f"{prefix}.{self.self_attn.name}")
        else:
            yield from self.mlp.holders(f"{prefix}.mlp")
        yield f"{prefix}.norm", self.norm


class NemotronDecoder(Decoder):
    """A decoder whose layers have one block each."""

    layer_class = NemotronLayer


class NemotronHForCausalLM(DecoderForCausalLM):
    """The decoder and its head."""

    decoder_class = NemotronDecoder
