"""A mixture of experts in `config.json` and in a checkpoint. Front-safe: no torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from runtime.checkpoint.config_keys import MAX_LAYERS, MAX_WIDTH
from runtime.checkpoint.json_file import Keys
from runtime.checkpoint.model_spec import WeightSpec
from runtime.models.decoder.weight_map import linear_weights

MAX_EXPERTS = 2**12
MAX_EXPERTS_OF_MODEL = 2**16
# Names of an expert's gate, up and down products.
_NAMES = {
    "qwen": ("gate_proj", "up_proj", "down_proj"),
    "mixtral": ("w1", "w3", "w2"),
}


@dataclass(frozen=True, kw_only=True)
class ExpertsSpec:
    """The experts of a decoder's layers.

    Attributes:
        num_experts: experts of each layer.
        num_chosen: experts that a token passes.
        intermediate_size: intermediate size of each.
        layers: indices of the layers that have them.
        sums_to_one: whether the chosen experts' weights are scaled to add up to one.
        shared_size: intermediate size of a block that every token passes; 0 for none.
        block: name of the block within a layer in a checkpoint.
        naming: how the checkpoint names an expert's products.
    """

    num_experts: int
    num_chosen: int
    intermediate_size: int
    layers: frozenset[int]
    sums_to_one: bool
    shared_size: int = 0
    block: str = "mlp"
    naming: Literal["qwen", "mixtral"] = "qwen"

    def weights(self, prefix: str, hidden: int) -> Iterator[WeightSpec]:
        """Return every tensor of the block in the layer called `prefix`."""
        inner, block, target = self.intermediate_size, f"{prefix}.{self.block}", f"{prefix}.mlp"
        yield from linear_weights(f"{block}.gate", f"{target}.router", (self.num_experts, hidden))
        gate, up, down = _NAMES[self.naming]
        for expert in range(self.num_experts):
            name, experts = f"{block}.experts.{expert}", f"{target}.experts"
            for shard, part in (("gate", gate), ("up", up)):
                yield WeightSpec(
                    f"{name}.{part}.weight",
                    (inner, hidden),
                    f"{experts}.gate_up",
                    f"{expert}.{shard}",
                )
            yield WeightSpec(
                f"{name}.{down}.weight", (hidden, inner), f"{experts}.down", str(expert)
            )
        if self.shared_size:
            shared = f"{block}.shared_expert"
            for shard in ("gate", "up"):
                yield from linear_weights(
                    f"{shared}.{shard}_proj",
                    f"{target}.shared.gate_up_proj",
                    (self.shared_size, hidden),
                    shard,
                )
            yield from linear_weights(
                f"{shared}.down_proj", f"{target}.shared.down_proj", (hidden, self.shared_size)
            )
            yield from linear_weights(
                f"{block}.shared_expert_gate", f"{target}.shared_gate", (1, hidden)
            )

    def uneven_parts(self, tp_size: int, ep_size: int) -> list[str]:
        """Return what cannot be split evenly among ranks; see `ModelSpec`."""
        parts = [(self.shared_size % tp_size, f"{self.shared_size} rows of the shared expert")]
        if ep_size > 1:
            parts.append((self.num_experts % ep_size, f"{self.num_experts} experts"))
        else:
            size = self.intermediate_size
            parts.append((size % tp_size, f"{size} rows of an expert"))
        return [what for rest, what in parts if rest]

    def num_idle_parameters(self, hidden: int) -> int:
        """Return how many numbers one token does not read, over all layers."""
        idle = self.num_experts - self.num_chosen
        return len(self.layers) * idle * 3 * hidden * self.intermediate_size


def read_qwen_experts(config: Keys, *, has_shared: bool) -> ExpertsSpec:
    """Read the keys of Qwen's mixtures.

    Raises:
        StartupError: a number that is missing or absurd; one line.
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
        sums_to_one=config.flag("norm_topk_prob", False),
        shared_size=(
            config.integer("shared_expert_intermediate_size", MAX_WIDTH) if has_shared else 0
        ),
    )
