"""The parts of a traced model that our layers replace, and the tensors of each part."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from torch import nn

from runtime.checkpoint.attention_spec import AttentionSpec
from runtime.checkpoint.model_spec import WeightKind, WeightSpec
from runtime.models.transformers_impl.conversions import Conversions, read_conversions
from runtime.models.transformers_impl.forms import (
    AttentionForm,
    NormKind,
    attention_form,
    has_plain_gate,
    layer_norms,
    mlp_kind,
    norm_kind,
)
from runtime.models.transformers_impl.traced import AttentionCall, Traced, refused

# How ranks share a product. `whole`: each rank has all of it. `column`: rows of the weight.
# `heads`: whole heads. `row`: columns of the weight. `packed`: rows of each of two stacked blocks.
# `head`: rows whose results are gathered.
Style = Literal["whole", "column", "heads", "row", "packed", "head"]


@dataclass(frozen=True)
class Projection:
    """A matrix product, an `nn.Linear` of the model.

    Attributes:
        name: name of the module.
        style: how ranks share the product.
        num_heads: number of heads if the product is split by heads. Ranks may share a head.
    """

    name: str
    in_features: int
    out_features: int
    bias: bool
    style: Style = "whole"
    num_heads: int = 0


@dataclass(frozen=True)
class Fused:
    """Several products of one input that are computed as one: `qkv_proj` or `gate_up_proj`.

    Attributes:
        name: name of the module that has these products.
        target: name of the fused product.
        parts: the products by shard.
    """

    name: str
    target: str
    parts: Mapping[str, Projection]


@dataclass(frozen=True)
class StackedExperts:
    """The sizes of a layer's experts, and the names of their tensors.

    Attributes:
        name: name of the module.
        gate, up, down: names of the tensors in files. `{}` stands for the expert's number.
    """

    name: str
    num_experts: int
    hidden_size: int
    inner_size: int
    gate: str
    up: str
    down: str

    def weights(self) -> Iterator[WeightSpec]:
        """Yield the specs of the tensors of all experts."""
        tall, wide = (self.inner_size, self.hidden_size), (self.hidden_size, self.inner_size)
        for expert in range(self.num_experts):
            for shard, source in (("gate", self.gate), ("up", self.up)):
                target = f"{self.name}.gate_up"
                yield WeightSpec(source.format(expert), tall, target, f"{expert}.{shard}")
            yield WeightSpec(self.down.format(expert), wide, f"{self.name}.down", str(expert))


@dataclass(frozen=True)
class Norm:
    """A norm of the model, of a kind that Headrace also has."""

    name: str
    size: int
    eps: float
    kind: NormKind
    bias: bool


@dataclass
class Layout:
    """The parts of a model that our layers replace; all other modules run their own code.

    Attributes:
        traced: the model, on the meta device.
        attention: the attention of each layer.
        split: names of the attention modules whose heads are split among ranks.
        quick: the forms of the attention modules that have a known form, by name.
        mlps: the gated blocks whose gate and up products are computed as one, by name. The value
            says whether the checkpoint stores the two as one tensor.
        stream_norms: names of each layer's norms by their places in our layers; `None` unless all
            layers add to a residual stream as our layers do.
        embedding: name of the embedding module.
        head: name of the module that gives logits.
        is_tied: whether the embedding and the head share a matrix.
        other: names and shapes of the tensors of modules that our layers do not replace.
    """

    traced: Traced
    attention: list[AttentionSpec] = field(default_factory=list)
    split: set[str] = field(default_factory=set)
    quick: dict[str, AttentionForm] = field(default_factory=dict)
    mlps: dict[str, bool] = field(default_factory=dict)
    projections: dict[str, Projection] = field(default_factory=dict)
    fused: list[Fused] = field(default_factory=list)
    norms: dict[str, Norm] = field(default_factory=dict)
    experts: dict[str, StackedExperts] = field(default_factory=dict)
    conversions: Conversions = field(default_factory=Conversions)
    stream_norms: Mapping[str, str] | None = None
    embedding: str = ""
    head: str = ""
    is_tied: bool = False
    other: dict[str, tuple[int, ...]] = field(default_factory=dict)

    def weights(self) -> Iterator[WeightSpec]:
        """Yield the spec of every tensor of the checkpoint, in the order of the model."""
        targets: dict[str, tuple[str, str]] = {}
        for fused in self.fused:
            for shard, part in fused.parts.items():
                targets[part.name] = fused.target, shard
        model = self.traced.model
        for name, parameter in _tensors(model):
            module, _, kind = name.rpartition(".")
            if self.is_tied and module == self.head and kind == "weight":
                continue
            if module in self.experts:
                if kind == "gate_up_proj":
                    yield from self.experts[module].weights()
                continue
            target, shard = targets.get(module, (module, ""))
            shape = tuple(parameter.shape)
            yield WeightSpec(name, shape, f"{target}.{kind}", shard, self._kind(name, module, kind))

    def _kind(self, name: str, module: str, kind: str) -> WeightKind:
        if module in self.norms and kind == "weight":
            is_centered = self.norms[module].kind == "zero_centered_rms"
            return "zero_centered_norm" if is_centered else "norm"
        if kind == "bias":
            return "bias"
        if name in self.other:
            # Quantization methods skip tensors that our kernels do not multiply.
            return "norm" if "norm" in module else "other"
        return "matrix"


def lay_out(traced: Traced) -> Layout:
    """Decide which parts of a traced model our layers replace.

    Raises:
        StartupError: experts or conversions of weights are not supported.
    """
    model = traced.model
    architecture = type(model).__name__
    layout = Layout(traced, conversions=read_conversions(architecture, model))
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    names = {module: name for name, module in model.named_modules()}
    layout.embedding, layout.head = names[embedding], names[head]
    layout.is_tied = bool(
        getattr(model.config, "tie_word_embeddings", False)
        and f"{layout.head}.weight" in (getattr(model, "_tied_weights_keys", None) or ())
    )
    plan = _Plan(model)
    for call in traced.calls:
        _lay_out_attention(layout, plan, call)
    for name, module in model.named_modules():
        _lay_out_module(layout, plan, name, module)
        if hasattr(module, "_is_expert_parallel"):
            _lay_out_experts(layout, architecture, name, module)
    _lay_out_stream(layout)
    covered = {layout.embedding, layout.head, *layout.projections, *layout.norms, *layout.experts}
    for fused in layout.fused:
        covered.update(part.name for part in fused.parts.values())
    for name, tensor in _tensors(model):
        if name.rpartition(".")[0] not in covered:
            layout.other[name] = tuple(tensor.shape)
    return layout


class _Plan:
    """The model's own plan for tensor parallelism: a style per module, `*` for numbers in names."""

    def __init__(self, model: Any) -> None:
        prefix = model.base_model_prefix
        plan: Mapping[str, str] = getattr(model.config, "base_model_tp_plan", None) or {}
        self.styles = {f"{prefix}.{name}": style for name, style in plan.items()}

    def style(self, name: str) -> str:
        """Return the style of the module `name`; empty if the plan has none."""
        return self.styles.get(re.sub(r"\.\d+(?=\.|$)", ".*", name), "")


def _lay_out_attention(layout: Layout, plan: _Plan, call: AttentionCall) -> None:
    """Decide how ranks share a layer's heads, and whether our attention replaces the module."""
    attention = layout.traced.model.get_submodule(call.module)
    linears = {
        name: module for name, module in attention.named_modules() if type(module) is nn.Linear
    }
    styles = {plan.style(f"{call.module}.{name}") for name in linears}
    is_split = styles == {"colwise", "rowwise"} and not call.sinks
    if is_split:
        layout.split.add(call.module)
    layout.attention.append(
        AttentionSpec(
            num_heads=call.num_heads,
            num_kv_heads=call.num_kv_heads,
            head_dim=call.head_dim,
            value_dim=call.value_dim,
            scale=call.scale,
            window=call.window,
            softcap=call.softcap,
            has_sinks=bool(call.sinks),
            is_whole=not is_split,
        )
    )
    form = attention_form(attention)
    if form is None or not _is_quick(form, call, attention, linears):
        return
    layout.quick[call.module] = form
    if form.is_packed:
        return
    heads = {"q": call.num_heads, "k": call.num_kv_heads, "v": call.num_kv_heads}
    parts = {
        shard: _projection(
            f"{call.module}.{shard}_proj",
            linears[f"{shard}_proj"],
            "heads" if is_split else "whole",
            count,
        )
        for shard, count in heads.items()
    }
    layout.fused.append(Fused(call.module, f"{call.module}.qkv_proj", parts))


def _is_quick(
    form: AttentionForm, call: AttentionCall, attention: Any, linears: Mapping[str, Any]
) -> bool:
    """Whether our kernels support the sizes of a block of a known form."""
    if form.rotates and (call.rotary is None or call.rotary.width != call.head_dim):
        return False
    if call.value_dim != call.head_dim or call.sinks or call.head_dim % 2:
        return False
    products = {"qkv"} if form.is_packed else set("qkv")
    if set(linears) != {f"{each}_proj" for each in (*products, "o")}:
        return False
    if len({linears[f"{each}_proj"].bias is None for each in products}) > 1:
        return False
    return not form.has_norms or _has_equal_head_norms(attention, call.head_dim)


def _has_equal_head_norms(attention: Any, head_dim: int) -> bool:
    norms = attention.q_norm, attention.k_norm
    kinds = {norm_kind(norm) for norm in norms}
    sizes = {tuple(norm.weight.shape) for norm in norms}
    return len(kinds) == 1 and "layer" not in kinds and None not in kinds and sizes == {(head_dim,)}


def _lay_out_module(layout: Layout, plan: _Plan, name: str, module: nn.Module) -> None:
    kind = norm_kind(module)
    if kind is not None:
        weight: Any = module.weight
        bias = getattr(module, "bias", None) is not None
        layout.norms[name] = Norm(name, weight.shape[0], _eps(module), kind, bias)
        return
    mlp = mlp_kind(module)
    if mlp is not None:
        _lay_out_mlp(layout, plan, name, module, mlp == "packed")
    if type(module) is not nn.Linear or name == layout.head or name in layout.projections:
        return
    if any(name == part.name for fused in layout.fused for part in fused.parts.values()):
        return
    owner = next((call for call in layout.traced.calls if name.startswith(f"{call.module}.")), None)
    style, num_heads = _style(layout, plan, name, owner)
    if owner is not None and style == "heads":
        num_heads = owner.num_kv_heads
    layout.projections[name] = _projection(name, module, style, num_heads)


def _style(
    layout: Layout, plan: _Plan, name: str, owner: AttentionCall | None
) -> tuple[Style, int]:
    """Return how ranks share a product that is not fused, and its number of heads.

    The number of heads is only used if the product is split by heads.
    """
    style = plan.style(name)
    if owner is not None and owner.module not in layout.split:
        return "whole", 0
    if style == "colwise":
        is_of_keys = owner is not None and name.endswith((".k_proj", ".v_proj"))
        return ("heads", 0) if is_of_keys else ("column", 0)
    return ("row", 0) if style == "rowwise" else ("whole", 0)


def _lay_out_mlp(layout: Layout, plan: _Plan, name: str, module: Any, packed: bool) -> None:
    if any(linear.bias is not None for linear in module.children() if hasattr(linear, "bias")):
        return
    down = f"{name}.down_proj"
    if packed:
        if plan.style(f"{name}.gate_up_proj"):
            both: tuple[Style, Style] = ("packed", "row")
        else:
            both = ("whole", "whole")
        target = f"{name}.gate_up_proj"
        layout.projections[target] = _projection(target, module.gate_up_proj, both[0])
    else:
        styles = [plan.style(f"{name}.{each}_proj") for each in ("gate", "up", "down")]
        is_split = styles == ["colwise", "colwise", "rowwise"]
        both = ("column", "row") if is_split else ("whole", "whole")
        parts = {
            each: _projection(f"{name}.{each}_proj", getattr(module, f"{each}_proj"), both[0])
            for each in ("gate", "up")
        }
        layout.fused.append(Fused(name, f"{name}.gate_up_proj", parts))
    layout.projections[down] = _projection(down, module.down_proj, both[1])
    layout.mlps[name] = packed


def _lay_out_experts(layout: Layout, architecture: str, name: str, module: Any) -> None:
    """Let our layers compute a layer's experts.

    Raises:
        StartupError: our kernels do not support the experts.
    """
    is_plain = (
        module.has_gate
        and module.is_concatenated
        and not (module.has_bias or module.is_transposed or module.has_post_expert_norm)
        and has_plain_gate(module)
    )
    both = layout.conversions.sources(f"{name}.gate_up_proj")
    down = layout.conversions.sources(f"{name}.down_proj")
    if not is_plain or len(both) != 2 or len(down) != 1:
        raise refused(architecture, "its experts have a form that is not supported")
    num_experts, hidden_size, inner_size = module.down_proj.shape
    layout.experts[name] = StackedExperts(
        name, num_experts, hidden_size, inner_size, both[0], both[1], down[0]
    )


def _lay_out_stream(layout: Layout) -> None:
    """Set `layout.stream_norms` if all layers add to one residual stream.

    Our norms can then update this stream.
    """
    traced = layout.traced
    places = [layer_norms(traced.model.get_submodule(name)) for name in traced.layers]
    first = places[0]
    if first is None or any(each != first for each in places) or not traced.is_chain:
        return
    norms = [f"{layer}.{name}" for layer in traced.layers for name in first.values()]
    if all(name in layout.norms for name in (*norms, traced.norm)):
        layout.stream_norms = first


def _projection(name: str, linear: Any, style: Style, num_heads: int = 0) -> Projection:
    out, width = linear.weight.shape
    return Projection(name, width, out, linear.bias is not None, style, num_heads)


def _tensors(model: Any) -> Iterator[tuple[str, Any]]:
    """Yield the tensors that a checkpoint holds: parameters, and buffers that are not computed."""
    yield from model.named_parameters(remove_duplicate=False)
    for prefix, module in model.named_modules():
        for name, buffer in module.named_buffers(recurse=False):
            if name not in module._non_persistent_buffers_set:
                yield f"{prefix}.{name}" if prefix else name, buffer


def _eps(norm: Any) -> float:
    for name in ("variance_epsilon", "eps"):
        if hasattr(norm, name):
            return float(getattr(norm, name))
    raise AttributeError(f"{type(norm).__name__} has no epsilon")
