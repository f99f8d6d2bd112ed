"""A model of `transformers` in which our layers replace the modules that we recognise."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn

from runtime.checkpoint.attention_spec import AttentionSpec
from runtime.errors import StartupError
from runtime.models.attention.backend import AttentionLayer
from runtime.models.attention.forward_batch import ForwardBatch
from runtime.models.decoder.experts_spec import ExpertsSpec
from runtime.models.layers.build_context import BuildContext
from runtime.models.layers.embedding import Embedding
from runtime.models.layers.experts import Experts
from runtime.models.layers.linear import Linear, Output, column, heads
from runtime.models.layers.norm import LayerNorm, RMSNorm
from runtime.models.layers.parameter import Parameter, WeightHolder, whole
from runtime.models.model import CausalLM
from runtime.models.transformers_impl.forms import gate_activation, has_plain_head
from runtime.models.transformers_impl.layout import (
    Fused,
    Layout,
    Norm,
    Projection,
    StackedExperts,
    lay_out,
)
from runtime.models.transformers_impl.modules import (
    CalledAttention,
    ChosenExperts,
    GatedMlp,
    Given,
    Head,
    Lookup,
    Normed,
    NoRotation,
    Product,
    QuickAttention,
    ScaledLookup,
    Step,
    StreamLayer,
    StreamLayers,
    StreamNorm,
    Tensors,
    is_on_meta,
)
from runtime.models.transformers_impl.spec import AdaptedSpec
from runtime.models.transformers_impl.traced import AttentionCall, Rotary, trace

logger = logging.getLogger(__name__)


class AdaptedForCausalLM(CausalLM):
    """A decoder that runs the code of `transformers`, with our layers in place of known modules."""

    spec: AdaptedSpec

    def __init__(self, spec: AdaptedSpec, context: BuildContext) -> None:
        self.spec, self.context = spec, context
        with _default_dtype(context.dtype):
            layout = lay_out(trace(spec.architecture, dict(spec.values)))
            self._step = Step()
            self._holders: dict[str, WeightHolder] = {}
            _Assembly(self, layout, context, self._step, self._holders).run()
        self.is_recordable = not layout.experts
        model: Any = layout.traced.model
        self._base: Any = model.get_decoder()
        (base,) = (name for name, each in model.named_modules() if each is self._base)
        self._head = cast("Head", model.get_submodule(layout.head))
        self._is_plain_head = has_plain_head(model)
        self._selects_tokens = layout.stream_norms is not None
        # The model's own class computes logits from vectors that this module passes to it.
        model.set_submodule(base, Given())
        self._model = model
        if context.tp_rank == 0:
            _report(spec)

    def forward(self, batch: ForwardBatch) -> Tensor:
        step = self._step
        step.batch, step.pending = batch, None
        ids = batch.input_ids.unsqueeze(0)
        given: dict[str, Tensor] = {"input_ids": ids}
        if batch.embeds is not None:
            embedded = self._base.get_input_embeddings()(ids)
            batch.put_embeds(embedded[0])
            given = {"inputs_embeds": embedded}
        positions = batch.positions.unsqueeze(0)
        output = self._base(**given, position_ids=positions, use_cache=False)
        hidden: Tensor = output.last_hidden_state[0]
        if batch.logits_indices is not None and not self._selects_tokens:
            hidden = hidden.index_select(0, batch.logits_indices)
        return hidden

    def model_logits(self, hidden: Tensor) -> Tensor:
        if self._is_plain_head:
            return self._head.score(hidden)
        logits: Tensor = self._model(inputs_embeds=hidden.unsqueeze(0), use_cache=False).logits[0]
        return logits.to(hidden.dtype).contiguous()

    def holders(self) -> Iterator[tuple[str, WeightHolder]]:
        yield from self._holders.items()


class _Assembly:
    """Replaces a model's modules by our layers, and allocates memory for the other modules."""

    def __init__(
        self,
        owner: AdaptedForCausalLM,
        layout: Layout,
        context: BuildContext,
        step: Step,
        holders: dict[str, WeightHolder],
    ) -> None:
        self.owner, self.layout, self.context, self.step = owner, layout, context, step
        self.model: Any = layout.traced.model
        self.holders = holders

    def run(self) -> None:
        layout = self.layout
        self._materialize_buffers()
        tables = self._rotary_tables()
        for norm in layout.norms.values():
            self._place(norm.name, Normed(self._norm(norm)))
        for product in layout.projections.values():
            self._place(product.name, Product(self._linear(product)))
        for fused in layout.fused:
            self.holders[fused.target] = self._fused(fused)
        for experts in layout.experts.values():
            self._place_experts(experts)
        self._place_ends()
        self._own_the_rest()
        self._place_mlps()
        for index, call in enumerate(layout.traced.calls):
            self._place_attention(index, call, layout.attention[index], tables)
        if layout.stream_norms is not None:
            self._place_stream()
        if len(layout.quick) == len(layout.attention):
            for name in {each.module for each in tables}:
                self._place(name, NoRotation())
        left = [name for name, tensor in self._tensors() if is_on_meta(tensor)]
        assert not left, f"{left[:3]} have no memory"

    def _tensors(self) -> Iterator[tuple[str, Tensor]]:
        yield from self.model.named_parameters()
        yield from self.model.named_buffers()

    def _place(self, name: str, module: nn.Module) -> None:
        parent, _, child = name.rpartition(".")
        setattr(self.model.get_submodule(parent), child, module)

    def _norm(self, norm: Norm) -> RMSNorm | LayerNorm:
        made: RMSNorm | LayerNorm
        if norm.kind == "layer":
            made = LayerNorm(norm.size, norm.eps, self.context, has_bias=norm.bias)
        else:
            is_centered = norm.kind == "zero_centered_rms"
            made = RMSNorm(norm.size, norm.eps, self.context, zero_centered=is_centered)
        self.holders[norm.name] = made
        return made

    def _linear(self, product: Projection) -> Linear:
        context = self.context
        sizes = product.in_features, product.out_features
        match product.style:
            case "row":
                made = Linear.row_parallel(*sizes, product.bias, context)
            case "packed":
                block = column("", product.out_features // 2, context)
                made = Linear.stacked(product.in_features, block, 2, product.bias, context)
            case "column" | "heads":
                rows = [self._rows(product, "")]
                made = Linear.column_parallel(sizes[0], rows, product.bias, context)
            case _:
                made = Linear.replicated(*sizes, product.bias, context)
        self.holders[product.name] = made
        return made

    def _rows(self, product: Projection, shard: str) -> Output:
        size = product.out_features
        if product.style == "heads":
            return heads(shard, product.num_heads, size // product.num_heads, self.context)
        if product.style == "column":
            return column(shard, size, self.context)
        return Output(shard, size, 0, size)

    def _fused(self, fused: Fused) -> Linear:
        parts = list(fused.parts.items())
        rows = [self._rows(product, shard) for shard, product in parts]
        first = parts[0][1]
        return Linear.column_parallel(first.in_features, rows, first.bias, self.context)

    def _place_experts(self, experts: StackedExperts) -> None:
        activation = gate_activation(self.model.get_submodule(experts.name))
        assert activation is not None
        spec = ExpertsSpec(
            num_experts=experts.num_experts,
            num_chosen=1,
            intermediate_size=experts.inner_size,
            layers=frozenset(),
        )
        made = Experts(spec, experts.hidden_size, self.context)
        self.holders[experts.name] = made
        reduce = self.context.all_reduce if self.context.tp_size > 1 else None
        self._place(experts.name, ChosenExperts(made, activation, reduce))

    def _place_ends(self) -> None:
        """Replace the embedding and the head."""
        layout, context, model = self.layout, self.context, self.model
        lookup, head = model.get_submodule(layout.embedding), model.get_submodule(layout.head)
        vocab_size, hidden_size = lookup.weight.shape
        embedding = Embedding(vocab_size, hidden_size, context, tied=layout.is_tied)
        self.holders[layout.embedding] = embedding
        is_plain = type(lookup) is nn.Embedding
        self._place(
            layout.embedding,
            Lookup(embedding) if is_plain else ScaledLookup(embedding, lookup),
        )
        splits = context.splits_head(head.weight.shape[0])
        gather = context.gather_columns if splits else None
        if layout.is_tied:
            if head.bias is not None:
                raise StartupError(f"{self.owner.spec.architecture}: its tied head has a bias")

            def product() -> Any:
                assert embedding.head is not None, "the weights are not loaded"
                return embedding.head

            self._place(layout.head, Head(product, gather))
            return
        rows, width = head.weight.shape
        if splits:
            cut = [column("", rows, context)]
            linear = Linear.column_parallel(width, cut, head.bias is not None, context)
        else:
            linear = Linear.replicated(width, rows, head.bias is not None, context)
        self.holders[layout.head] = linear
        self._place(layout.head, Head(lambda: linear.apply, gather))

    def _own_the_rest(self) -> None:
        by_module: dict[str, dict[str, Parameter]] = {}
        for name, shape in self.layout.other.items():
            module, _, tensor = name.rpartition(".")
            parameter = Parameter(shape, whole(shape), self.context.dtype, self.context.device)
            by_module.setdefault(module, {})[tensor] = parameter
        for module, parameters in by_module.items():
            self.holders[module] = Tensors(self.model.get_submodule(module), parameters)

    def _place_mlps(self) -> None:
        for name in self.layout.mlps:
            activation = gate_activation(self.model.get_submodule(name))
            assert activation is not None
            gate_up = self._held(f"{name}.gate_up_proj")
            self._place(name, GatedMlp(gate_up, self._held(f"{name}.down_proj"), activation))

    def _held(self, name: str) -> Linear:
        return cast("Linear", self.holders[name])

    def _place_attention(
        self, index: int, call: AttentionCall, spec: AttentionSpec, tables: dict[Rotary, Tensor]
    ) -> None:
        ranks = 1 if spec.is_whole else self.context.tp_size
        is_quick = call.module in self.layout.quick
        layer = AttentionLayer(
            layer_idx=index,
            num_heads=spec.num_heads // ranks,
            num_kv_heads=max(1, spec.num_kv_heads // ranks),
            head_dim=spec.head_dim,
            scale=spec.scale,
            window_left=spec.window_left,
            value_dim=spec.value_dim,
            softcap=spec.softcap,
        )
        module = self.model.get_submodule(call.module)
        if not is_quick:
            sinks = _sinks_of(module, call.sinks)
            module.headrace_attend = CalledAttention(layer, self.step, sinks)
            return
        form = self.layout.quick[call.module]
        if form.rotates:
            assert call.rotary is not None
            layer.cos_sin = tables[call.rotary]
        if form.has_norms:
            query, key = (
                cast("RMSNorm", self.holders[f"{call.module}.{each}_norm"]) for each in "qk"
            )
            layer.q_norm, layer.k_norm = query.weight, key.weight
            layer.eps, layer.zero_centered = query.eps, query.zero_centered
        qkv, output = self._held(f"{call.module}.qkv_proj"), self._held(f"{call.module}.o_proj")
        self._place(call.module, QuickAttention(qkv, output, layer, self.step))

    def _place_stream(self) -> None:
        traced, places = self.layout.traced, self.layout.stream_norms
        assert places is not None
        layers = []
        for name in traced.layers:
            layer = self.model.get_submodule(name)
            norms = {
                place: cast("RMSNorm", self.holders[f"{name}.{norm}"])
                for place, norm in places.items()
            }
            is_last = name == traced.layers[-1]
            layers.append(
                StreamLayer(layer.self_attn, layer.mlp, norms, self.step, is_last=is_last)
            )
        if traced.can_be_one and len(self.layout.quick) == len(layers):
            # One module for all layers, so that the model's own loop makes one call.
            among = traced.layers[0].rpartition(".")[0]
            self._place(among, nn.ModuleList([StreamLayers(layers)]))
        else:
            for name, each in zip(traced.layers, layers, strict=True):
                self._place(name, StreamLayers([each]))
        last = cast("RMSNorm", self.holders[traced.norm])
        self._place(traced.norm, StreamNorm(last, self.step))

    def _materialize_buffers(self) -> None:
        """Compute the buffers that checkpoints omit, with the model's own `_init_weights`.

        Raises:
            StartupError: the model's code does not compute a buffer.
        """
        model, device = self.model, self.context.device
        for parameter in model.parameters():
            parameter._is_hf_initialized = True
        for name, module in model.named_modules():
            missing = [
                each
                for each, buffer in module.named_buffers(recurse=False)
                if each in module._non_persistent_buffers_set and is_on_meta(buffer)
            ]
            if not missing:
                continue
            for each in missing:
                buffer = module._buffers[each]
                made = torch.empty(buffer.shape, dtype=buffer.dtype, device="cpu")
                module._buffers[each] = made.fill_(math.nan) if made.is_floating_point() else made
            model._init_weights(module)
            for each in missing:
                buffer = module._buffers[each]
                if buffer.is_floating_point() and buffer.isnan().any():
                    raise StartupError(
                        f"{self.owner.spec.architecture} does not say how {name}.{each} is computed"
                    )
            self._fix_rotation(module)
            module.to(device) if not list(module.parameters()) else None
            for each in missing:
                module._buffers[each] = module._buffers[each].to(device)

    def _fix_rotation(self, module: Any) -> None:
        """Choose LongRoPE's factors by the longest sequence that is served.

        `transformers` chooses them by the longest sequence of a step, which would invalidate cached
        keys.
        """
        if getattr(module, "rope_type", None) != "longrope":
            return
        from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

        longest = self.context.max_positions or self.owner.spec.context_len
        frequencies, module.attention_scaling = ROPE_INIT_FUNCTIONS["longrope"](
            module.config, torch.device("cpu"), seq_len=longest
        )
        module.inv_freq = frequencies

    def _rotary_tables(self) -> dict[Rotary, Tensor]:
        """Return the table of cosines and sines of each rotary module, as our kernels read it."""
        context = self.context
        count = context.max_positions or self.owner.spec.context_len
        positions = torch.arange(count, device=context.device).unsqueeze(0)
        # Only the dtype of this tensor is used: tables are float32 for models of any dtype.
        like = torch.zeros(1, dtype=torch.float32, device=context.device)
        tables: dict[Rotary, Tensor] = {}
        for call in self.layout.traced.calls:
            rotary = call.rotary
            form = self.layout.quick.get(call.module)
            if form is None or not form.rotates or rotary is None or rotary in tables:
                continue
            module = self.model.get_submodule(rotary.module)
            cos, sin = module(like, positions, **dict(rotary.options))
            half = cos.shape[-1] // 2
            tables[rotary] = torch.cat((cos[0, :, :half], sin[0, :, :half]), dim=1).contiguous()
        return tables


def _sinks_of(module: nn.Module, name: str) -> Any:
    if not name:
        return lambda: None
    return lambda: module.get_parameter(name).float()


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def _report(spec: AdaptedSpec) -> None:
    slow = ", ".join(spec.described.as_they_are)
    logger.info(
        "%s runs by its own code in transformers %s (--model-impl): %s",
        spec.architecture,
        spec.described.version,
        f"attention and products are ours; slower than a family of ours is {slow}"
        if slow
        else "all of its layers are ours",
    )
