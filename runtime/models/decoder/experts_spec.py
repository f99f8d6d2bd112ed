"""A mixture of experts as `config.json` and the checkpoint describe it. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal

from runtime.checkpoint.config_keys import MAX_LAYERS, MAX_WIDTH
from runtime.checkpoint.json_file import Keys
from runtime.checkpoint.model_spec import WeightSpec
from runtime.models.decoder.weight_map import linear_weights

if TYPE_CHECKING:
    from kernels.activation import Gate

MAX_EXPERTS = 2**12
MAX_EXPERTS_OF_MODEL = 2**16


@dataclass(frozen=True, kw_only=True)
class RouterSpec:
    """How a token's experts are chosen, and how their results are weighted.

    Attributes:
        score: the function that turns the router's logits into scores.
        sums_to_one: whether the scores of a token's chosen experts are scaled so that their sum is
            one.
        scaling: factor that multiplies the scores afterwards.
        has_bias: whether the router's matrix product has a bias.
        has_correction: whether each expert has a number that is added to its score when experts are
            chosen. It does not change the weight of the expert's result.
        num_groups: number of groups into which consecutive experts are divided.
        num_chosen_groups: number of groups, those with the best score, from which experts are
            chosen.
        group_score: score of a group: that of its best expert, or the sum of its best two.
        is_precise: whether the logits are computed in float32, whatever the model's dtype is.
    """

    score: Literal["softmax", "sigmoid"] = "softmax"
    sums_to_one: bool = False
    scaling: float = 1.0
    has_bias: bool = False
    has_correction: bool = False
    num_groups: int = 1
    num_chosen_groups: int = 1
    group_score: Literal["best", "best_two"] = "best"
    is_precise: bool = False

    @property
    def is_plain(self) -> bool:
        """Whether scores are a softmax and experts are chosen without correction or groups."""
        return self.score == "softmax" and not self.has_correction and self.num_groups == 1


@dataclass(frozen=True, kw_only=True)
class StackedForm:
    """Experts that a checkpoint stores as one tensor for each matrix product.

    Attributes:
        gate_up, down: names of the tensors within the block; names of biases end in `_bias`.
        is_transposed: whether the input's dimension comes before the output's.
        is_interleaved: whether rows of gate and up alternate; otherwise all rows of gate come
            first.
        is_optional: whether some checkpoints of the family have tensors of each expert instead; the
            files decide.
    """

    gate_up: str = "experts.gate_up_proj"
    down: str = "experts.down_proj"
    is_transposed: bool = False
    is_interleaved: bool = False
    is_optional: bool = False


@dataclass(frozen=True, kw_only=True)
class ExpertNames:
    """Names that a checkpoint gives the tensors of one layer's experts.

    Attributes:
        block: name of the mixture's block within a layer. The names below are within this block.
        router: name of the matrix that gives the router's logits.
        correction: name of the numbers that are added to scores when experts are chosen.
        gate, up, down: names of an expert's matrices.
        shared, shared_gate: names of the expert that every token passes, and of its gate.
    """

    block: str = "mlp"
    router: str = "gate"
    correction: str = "gate.e_score_correction_bias"
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    shared: str = "shared_expert"
    shared_gate: str = "shared_expert_gate"


@dataclass(frozen=True, kw_only=True)
class ExpertsSpec:
    """The experts of a decoder's layers.

    Attributes:
        num_experts: experts of each layer.
        num_chosen: experts that a token passes.
        intermediate_size: intermediate size of each expert.
        layers: indices of the layers that have experts.
        router: how a token chooses its experts.
        has_bias: whether an expert's products have biases.
        gate: how gate and up are combined; `None` for `activation(gate) * up` with the model's
            activation.
        shared_size: intermediate size of the shared expert, which every token passes; 0 if there is
            none.
        has_shared_gate: whether the shared expert's result is multiplied by a gate of its own.
        names: the tensors' names in the checkpoint.
        stacked: the form of a checkpoint that stores all experts in one tensor per matrix; `None`
            if each expert has its own tensors.
        fused_shared: whether the gate and up matrices of the shared expert are one tensor.
    """

    num_experts: int
    num_chosen: int
    intermediate_size: int
    layers: frozenset[int]
    router: RouterSpec = field(default_factory=RouterSpec)
    has_bias: bool = False
    gate: Gate | None = None
    shared_size: int = 0
    has_shared_gate: bool = True
    names: ExpertNames = field(default_factory=ExpertNames)
    stacked: StackedForm | None = None
    fused_shared: bool = False

    def weights(self, prefix: str, hidden: int) -> Iterator[WeightSpec]:
        """Yield the spec of every tensor of the mixture in one layer.

        Args:
            prefix: name of the layer, such as `model.layers.0`.
            hidden: the model's hidden size.
        """
        names, target = self.names, f"{prefix}.mlp"
        block = f"{prefix}.{names.block}"
        router, logits = f"{target}.router", (self.num_experts, hidden)
        for weight in linear_weights(
            f"{block}.{names.router}", router, logits, bias=self.router.has_bias
        ):
            yield replace(weight, is_precise=self.router.is_precise)
        if self.router.has_correction:
            name = f"{block}.{names.correction}"
            yield WeightSpec(name, logits[:1], f"{target}.router_correction.vector", kind="bias")
        yield from (
            self._each_weight(block, f"{target}.experts", hidden)
            if self.stacked is None
            else self._stacked_weights(self.stacked, block, f"{target}.experts", hidden)
        )
        if not self.shared_size:
            return
        shared, inner = f"{block}.{names.shared}", self.shared_size
        both = f"{target}.shared.gate_up_proj"
        if self.fused_shared:
            yield from linear_weights(f"{shared}.gate_up_proj", both, (2 * inner, hidden))
        for shard in () if self.fused_shared else ("gate", "up"):
            yield from linear_weights(f"{shared}.{shard}_proj", both, (inner, hidden), shard)
        down = f"{target}.shared.down_proj"
        yield from linear_weights(f"{shared}.down_proj", down, (hidden, inner))
        if self.has_shared_gate:
            gate = f"{block}.{names.shared_gate}"
            yield from linear_weights(gate, f"{target}.shared_gate", (1, hidden))

    def _each_weight(self, block: str, target: str, hidden: int) -> Iterator[WeightSpec]:
        inner, names = self.intermediate_size, self.names
        for expert in range(self.num_experts):
            for part, kind, shard, (out, width) in (
                (names.gate, "gate_up", f"{expert}.gate", (inner, hidden)),
                (names.up, "gate_up", f"{expert}.up", (inner, hidden)),
                (names.down, "down", str(expert), (hidden, inner)),
            ):
                name = f"{block}.experts.{expert}.{part}"
                yield WeightSpec(f"{name}.weight", (out, width), f"{target}.{kind}", shard)
                if self.has_bias:
                    bias = f"{target}.{kind}_bias"
                    yield WeightSpec(f"{name}.bias", (out,), bias, shard, kind="bias")

    def _stacked_weights(
        self, form: StackedForm, block: str, target: str, hidden: int
    ) -> Iterator[WeightSpec]:
        inner = self.intermediate_size
        for name, kind, (out, width) in (
            (form.gate_up, "gate_up", (2 * inner, hidden)),
            (form.down, "down", (hidden, inner)),
        ):
            sizes = (width, out) if form.is_transposed else (out, width)
            yield WeightSpec(f"{block}.{name}", (self.num_experts, *sizes), f"{target}.{kind}")
            if self.has_bias:
                bias, shape = f"{block}.{name}_bias", (self.num_experts, out)
                yield WeightSpec(bias, shape, f"{target}.{kind}_bias", kind="bias")

    def uneven_parts(self, tp_size: int, ep_size: int) -> list[str]:
        """Return the parts that ranks cannot share evenly; see `ModelSpec.uneven_parts`."""
        parts = [(self.shared_size % tp_size, f"{self.shared_size} rows of the shared expert")]
        if ep_size > 1:
            parts.append((self.num_experts % ep_size, f"{self.num_experts} experts"))
        else:
            size = self.intermediate_size
            parts.append((size % tp_size, f"{size} rows of an expert"))
        return [what for rest, what in parts if rest]

    def num_idle_parameters(self, hidden: int) -> int:
        """Return the number of expert weights, over all layers, that a token does not use."""
        idle = self.num_experts - self.num_chosen
        return len(self.layers) * idle * 3 * hidden * self.intermediate_size


def read_qwen_experts(config: Keys, *, has_shared: bool) -> ExpertsSpec:
    """Read the keys of Qwen's mixtures of experts.

    Args:
        config: keys of the model's `config.json`.
        has_shared: whether the family has a shared expert.

    Raises:
        StartupError: a number is missing or out of range; the message names the key.
    """
    num_layers = config.integer("num_hidden_layers", MAX_LAYERS)
    # transformers 5 writes `num_local_experts` for some families.
    key = "num_experts" if "num_experts" in config.values else "num_local_experts"
    num_experts = config.integer(key, MAX_EXPERTS)
    if num_layers * num_experts > MAX_EXPERTS_OF_MODEL:
        raise config.error(key, f"at most {MAX_EXPERTS_OF_MODEL} experts in all layers together")
    step = config.integer("decoder_sparse_step", MAX_LAYERS, 1)
    dense = config.values.get("mlp_only_layers") or []
    if not isinstance(dense, list):
        raise config.error("mlp_only_layers", "a list of layers")
    return ExpertsSpec(
        num_experts=num_experts,
        num_chosen=config.integer("num_experts_per_tok", num_experts),
        intermediate_size=config.integer("moe_intermediate_size", MAX_WIDTH),
        layers=frozenset(i for i in range(num_layers) if i not in dense and not (i + 1) % step),
        router=RouterSpec(sums_to_one=config.flag("norm_topk_prob", False)),
        shared_size=(
            config.integer("shared_expert_intermediate_size", MAX_WIDTH) if has_shared else 0
        ),
    )
