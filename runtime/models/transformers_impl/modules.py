"""Our layers that replace modules of `transformers`, which calls them with a batch of one.

Their tensors are `[1, num_tokens, ...]`: the step's tokens of all sequences, concatenated.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from kernels.activation import Activation
from runtime.models.attention.backend import AttentionLayer
from runtime.models.attention.forward_batch import ForwardBatch
from runtime.models.layers.embedding import Embedding
from runtime.models.layers.experts import Experts
from runtime.models.layers.linear import Linear
from runtime.models.layers.norm import LayerNorm, RMSNorm, add_normed
from runtime.models.layers.parameter import Parameter, WeightHolder


class Step:
    """The state of the current step, which the model's modules share.

    Attributes:
        batch: the step.
        pending: `[num_tokens, hidden_size]`, a layer's output that is not yet added to the residual
            stream; see `add_normed`.
    """

    __slots__ = ("batch", "pending")

    def __init__(self) -> None:
        self.batch: ForwardBatch
        self.pending: Tensor | None = None


class Tensors(WeightHolder):
    """The tensors of a module that is not replaced."""

    def __init__(self, module: nn.Module, parameters: Mapping[str, Parameter]) -> None:
        """Allocate `parameters` and set them as the module's tensors of the same names."""
        self._parameters = dict(parameters)
        for name, parameter in self._parameters.items():
            tensor = parameter.allocate()
            if name in module._parameters:
                module._parameters[name] = nn.Parameter(tensor, requires_grad=False)
            else:
                module._buffers[name] = tensor

    def parameters(self) -> Iterator[tuple[str, Parameter]]:
        yield from self._parameters.items()

    def finalize(self, kept: list[tuple[str, str]]) -> None:
        """Do nothing: the module reads the tensors in the memory that the loader filled."""

    def discard(self) -> None:
        """Do nothing: the loader fills each tensor in one go and leaves no partial state."""

    def plain(self, name: str) -> Tensor:
        return self._parameters[name].allocate()

    def release(self) -> None:
        """Do nothing: the module keeps its tensors."""

    @property
    def size_bytes(self) -> int:
        return sum(each.allocate().nbytes for each in self._parameters.values())


class Product(nn.Module):
    """Replaces an `nn.Linear` by our linear layer."""

    def __init__(self, linear: Linear) -> None:
        super().__init__()
        self.linear = linear

    def forward(self, x: Tensor) -> Tensor:
        flat = self.linear.apply(_flat(x))
        return flat.view(*x.shape[:-1], flat.shape[-1])


class Lookup(nn.Module):
    """Replaces an `nn.Embedding` by our embedding."""

    def __init__(self, embedding: Embedding) -> None:
        super().__init__()
        self.embedding = embedding

    def forward(self, ids: Tensor) -> Tensor:
        return self.embedding.forward(ids.flatten()).view(*ids.shape, -1)


class ScaledLookup(nn.Module):
    """An embedding module that does more than look up rows, such as scaling.

    It reads our matrix.
    """

    def __init__(self, embedding: Embedding, module: nn.Module) -> None:
        super().__init__()
        self.embedding, self.module = embedding, module
        self._share()

    def _share(self) -> None:
        self.module._parameters["weight"] = nn.Parameter(self.embedding.weight, requires_grad=False)

    def forward(self, ids: Tensor) -> Tensor:
        shared: Any = self.module.weight
        if shared.data_ptr() != self.embedding.weight.data_ptr():
            self._share()
        result: Tensor = self.module(ids)
        return result


class Head(nn.Module):
    """Replaces the head that gives logits.

    If each rank has only some rows of the head, the logits are gathered.
    """

    def __init__(
        self, product: Callable[[], Callable[[Tensor], Tensor]], gather: Callable[..., Any] | None
    ) -> None:
        super().__init__()
        self._product, self._gather = product, gather

    def forward(self, hidden: Tensor) -> Tensor:
        return self.score(_flat(hidden)).view(*hidden.shape[:-1], -1)

    def score(self, hidden: Tensor) -> Tensor:
        """Return the logits, `[n, vocab_size]`, for hidden states `[n, hidden_size]`."""
        logits = self._product()(hidden)
        gathered: Tensor = logits if self._gather is None else self._gather(logits)
        return gathered


class Normed(nn.Module):
    """Replaces a norm module by our norm over the last dimension."""

    def __init__(self, norm: RMSNorm | LayerNorm) -> None:
        super().__init__()
        self.norm = norm

    def forward(self, x: Tensor) -> Tensor:
        return self.norm.forward(_flat(x)).view(x.shape)


class GatedMlp(nn.Module):
    """Replaces a gated feed-forward block; the gate and up products are computed as one."""

    def __init__(self, gate_up: Linear, down: Linear, activation: Activation) -> None:
        super().__init__()
        self.gate_up, self.down, self.activation = gate_up, down, activation

    def run(self, x: Tensor) -> Tensor:
        """Compute the block: `[num_tokens, hidden_size]` to a new tensor of the same shape."""
        return self.down.apply(self.gate_up.gated(x, self.activation))

    def forward(self, x: Tensor) -> Tensor:
        return self.run(_flat(x)).view(x.shape)


class ChosenExperts(nn.Module):
    """Replaces the experts of a layer.

    The model's own router chooses them and passes its choice.
    """

    def __init__(
        self, experts: Experts, activation: Activation, reduce: Callable[[Tensor], Tensor] | None
    ) -> None:
        super().__init__()
        self.experts, self.activation, self._reduce = experts, activation, reduce

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        ids, weights = top_k_index.long(), top_k_weights.float()
        out = self.experts.apply(_flat(hidden_states), ids, weights, self.activation)
        return (out if self._reduce is None else self._reduce(out)).view(hidden_states.shape)


class QuickAttention(nn.Module):
    """Replaces an attention block: fused q/k/v product, our rotation, the attention back end."""

    def __init__(self, qkv: Linear, output: Linear, layer: AttentionLayer, step: Step) -> None:
        super().__init__()
        self.qkv, self.output, self.layer, self.step = qkv, output, layer, step

    def attend(self, x: Tensor) -> Tensor:
        """Map `[num_tokens, hidden_size]` to the input of the output product."""
        batch = self.step.batch
        return batch.attention.run(self.layer, self.qkv.apply(x), batch)

    def forward(self, hidden_states: Tensor, **_others: Any) -> tuple[Tensor, None]:
        flat = _flat(hidden_states)
        return self.output.apply(self.attend(flat)).view(hidden_states.shape), None


class CalledAttention:
    """Our function for one layer in the attention interface of `transformers`.

    The layer's own code computes the query, key and value heads and calls the function.
    """

    def __init__(
        self, layer: AttentionLayer, step: Step, sinks: Callable[[], Tensor | None]
    ) -> None:
        self.layer, self.step, self._sinks = layer, step, sinks

    def __call__(
        self, _module: nn.Module, q: Tensor, k: Tensor, v: Tensor, *_options: Any
    ) -> tuple[Tensor, None]:
        """Write keys and values to the pages, and attend.

        Args:
            q: `[1, num_heads, num_tokens, head_dim]`.
            k: `[1, num_kv_heads, num_tokens, head_dim]`.
            v: `[1, num_kv_heads, num_tokens, value_dim]`.

        Returns:
            `[1, num_tokens, num_heads, value_dim]`, and `None` in place of attention weights.
        """
        layer, batch = self.layer, self.step.batch
        by_token = [_rows(each[0].transpose(0, 1)) for each in (k, v)]
        batch.attention.write(layer, by_token[0], by_token[1], batch)
        layer.sinks = self._sinks()
        q = q[0].transpose(0, 1)
        if q.stride(1) != q.shape[2] or q.stride(2) != 1:
            q = q.contiguous()
        out = batch.attention.attend(layer, q, batch)
        return out.view(1, len(out), layer.num_heads, -1), None


class StreamLayer:
    """A layer that adds to a residual stream; each norm also does the addition before it.

    Between layers, the last block's output is in `Step.pending` and not yet in the stream. The
    class is not an `nn.Module`: `__call__` and `__getattr__` of modules cost more than the
    arithmetic of a small model's decode step.
    """

    __slots__ = (
        "attention",
        "attention_output_norm",
        "input_norm",
        "is_last",
        "mlp",
        "mlp_norm",
        "mlp_output_norm",
        "quick",
        "step",
    )

    def __init__(
        self,
        attention: nn.Module,
        mlp: nn.Module,
        norms: Mapping[str, RMSNorm | LayerNorm],
        step: Step,
        *,
        is_last: bool,
    ) -> None:
        self.attention, self.step, self.is_last = attention, step, is_last
        self.quick = attention if isinstance(attention, QuickAttention) else None
        self.mlp = mlp.run if isinstance(mlp, GatedMlp) else partial(_without_batch, mlp)
        self.input_norm = norms.get("input_norm")
        self.attention_output_norm = norms.get("attention_output_norm")
        self.mlp_norm = norms.get("mlp_norm")
        self.mlp_output_norm = norms.get("mlp_output_norm")

    def run(self, residual: Tensor, options: Mapping[str, Any]) -> Tensor:
        """Compute the layer.

        Args:
            residual: the residual stream, `[num_tokens, hidden_size]`, changed in place.
            options: further arguments of the model's own attention.

        Returns:
            The residual stream. After the last layer it has only the rows of tokens whose output is
            read.
        """
        step, quick = self.step, self.quick
        normed = add_normed(step.pending, residual, self.input_norm)
        # The last layer computes only keys and values for tokens whose output is not read.
        wanted = step.batch.logits_indices if self.is_last else None
        if quick is not None:
            attended = quick.attend(normed)
            if wanted is not None:
                attended = attended.index_select(0, wanted)
            hidden = quick.output.apply(attended)
        else:
            hidden = self.attention(hidden_states=normed.unsqueeze(0), **options)[0][0]
            if wanted is not None:
                hidden = hidden.index_select(0, wanted)
        if wanted is not None:
            residual = residual.index_select(0, wanted)
            if not len(wanted):
                return residual
        if self.attention_output_norm is not None:
            hidden = self.attention_output_norm.forward(hidden)
        hidden = self.mlp(add_normed(hidden, residual, self.mlp_norm))
        if self.mlp_output_norm is not None:
            hidden = self.mlp_output_norm.forward(hidden)
        step.pending = hidden
        return residual


class StreamLayers(nn.Module):
    """One or more layers that add to the residual stream, in place of one module."""

    def __init__(self, layers: Sequence[StreamLayer]) -> None:
        super().__init__()
        self.layers = tuple(layers)

    def forward(self, hidden_states: Tensor, *_args: Any, **options: Any) -> Tensor:
        residual = hidden_states[0]
        for layer in self.layers:
            residual = layer.run(residual, options)
        return residual.unsqueeze(0)


class StreamNorm(nn.Module):
    """Replaces the norm after the last layer; it also adds the last layer's output."""

    def __init__(self, norm: RMSNorm | LayerNorm, step: Step) -> None:
        super().__init__()
        self.norm, self.step = norm, step

    def forward(self, hidden_states: Tensor) -> Tensor:
        residual, hidden = hidden_states[0], self.step.pending
        self.step.pending = None
        if not len(residual):
            return hidden_states
        return add_normed(hidden, residual, self.norm).unsqueeze(0)


class NoRotation(nn.Module):
    """Replaces a rotary module whose result no layer uses."""

    def forward(self, *_args: Any, **_kwargs: Any) -> tuple[None, None]:
        return None, None


class _Vectors:
    """The output of a model without its head; attributes other than the vectors are `None`."""

    def __init__(self, last_hidden_state: Tensor) -> None:
        self.last_hidden_state = last_hidden_state

    def __getattr__(self, _name: str) -> None:
        return None

    def __getitem__(self, index: int) -> Tensor:
        return (self.last_hidden_state,)[index]


class Given(nn.Module):
    """Replaces the model without its head, and returns its argument `inputs_embeds`."""

    def forward(self, *_args: Any, inputs_embeds: Tensor, **_others: Any) -> _Vectors:
        return _Vectors(inputs_embeds)


def _without_batch(module: nn.Module, x: Tensor) -> Tensor:
    result: Tensor = module(x.unsqueeze(0))
    return result[0]


def _flat(x: Tensor) -> Tensor:
    """Reshape `[..., size]` to `[num_tokens, size]`, contiguous as our kernels need it."""
    return x.reshape(-1, x.shape[-1]).contiguous()


def _rows(heads: Tensor) -> Tensor:
    return heads if heads.stride(-1) == 1 else heads.contiguous()


def is_on_meta(tensor: Tensor) -> bool:
    """Whether a tensor is on the meta device, where tensors have no memory."""
    return tensor.device == torch.device("meta")
