"""Recognises modules of `transformers` whose code equals that of a known module.

The models of `transformers` copy one another's code, so most decoders have the blocks of Llama,
Qwen 3 or Gemma word for word, under names of their own. A block whose code differs in any way is
not recognised, and runs the code of `transformers`.
"""

from __future__ import annotations

import ast
import inspect
import sys
import textwrap
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from importlib import import_module
from typing import Any, Literal

from torch import nn

from kernels.activation import Activation

NormKind = Literal["rms", "zero_centered_rms", "layer"]
MlpKind = Literal["gated", "packed"]

_NORMS: Mapping[str, NormKind] = {
    "llama:LlamaRMSNorm": "rms",
    # This norm rounds once, after the multiplication by the weight.
    "olmo2:Olmo2RMSNorm": "rms",
    "gemma3:Gemma3RMSNorm": "zero_centered_rms",
}
_MLPS: Mapping[str, MlpKind] = {"llama:LlamaMLP": "gated", "phi3:Phi3MLP": "packed"}


@dataclass(frozen=True)
class AttentionForm:
    """The form of an attention block of `transformers` that our layers can replace.

    Attributes:
        has_norms: whether heads of queries and keys have norms.
        is_packed: whether the checkpoint stores the products for q, k and v as one tensor.
        rotates: whether this layer rotates heads.
    """

    has_norms: bool = False
    is_packed: bool = False
    rotates: bool = True


# The known blocks, each with a function that says whether a layer of this kind rotates heads.
_ATTENTIONS: Mapping[str, tuple[AttentionForm, Callable[[Any], bool]]] = {
    "llama:LlamaAttention": (AttentionForm(), lambda _: True),
    "qwen3:Qwen3Attention": (AttentionForm(has_norms=True), lambda _: True),
    "gemma3:Gemma3Attention": (AttentionForm(has_norms=True), lambda _: True),
    "phi3:Phi3Attention": (AttentionForm(is_packed=True), lambda _: True),
    "seed_oss:SeedOssAttention": (AttentionForm(), lambda _: True),
    "smollm3:SmolLM3Attention": (AttentionForm(), lambda block: bool(block.use_rope)),
    "exaone4:Exaone4Attention": (
        AttentionForm(has_norms=True),
        lambda block: block.sliding_window is None or bool(block.is_sliding),
    ),
}
# The known layers, each with its norms by their place in our layers.
_LAYERS: Mapping[str, Mapping[str, str]] = {
    "llama:LlamaDecoderLayer": {
        "input_norm": "input_layernorm",
        "mlp_norm": "post_attention_layernorm",
    },
    "olmo2:Olmo2DecoderLayer": {
        "attention_output_norm": "post_attention_layernorm",
        "mlp_output_norm": "post_feedforward_layernorm",
    },
    "gemma2:Gemma2DecoderLayer": {
        "input_norm": "input_layernorm",
        "attention_output_norm": "post_attention_layernorm",
        "mlp_norm": "pre_feedforward_layernorm",
        "mlp_output_norm": "post_feedforward_layernorm",
    },
}
# The arguments of these calls are not compared, because a traced step shows them.
_CALLS_OF_ATTENTION = {"attention_interface", "self_attn"}
# Names of the functions that an attention block calls in its module's file.
_ROTATION = ("apply_rotary_pos_emb", "rotate_half")


def norm_kind(module: nn.Module) -> NormKind | None:
    """Return the kind of norm that `module` computes.

    `None` if Headrace does not have this norm.
    """
    if type(module) is nn.LayerNorm:
        return "layer" if module.elementwise_affine else None
    return _found(module, _NORMS)


def mlp_kind(module: nn.Module) -> MlpKind | None:
    """Return the kind of gated feed-forward block that `module` is; `None` for another module."""
    return None if gate_activation(module) is None else _found(module, _MLPS)


def gate_activation(module: nn.Module) -> Activation | None:
    """Return the activation of a block's gate; `None` if there is no kernel for it."""
    from transformers.activations import ACT2FN

    act: Any = getattr(module, "act_fn", getattr(module, "activation_fn", None))
    known: dict[str, Activation] = {"silu": "silu", "gelu_pytorch_tanh": "gelu_tanh"}
    for name, ours in known.items():
        if type(act) is type(ACT2FN[name]):
            return ours
    return None


def has_plain_gate(experts: Any) -> bool:
    """Whether experts compute `activation(gate) * up` and nothing else between their products."""
    from transformers.integrations.moe import _default_apply_gate

    return type(experts)._apply_gate is _default_apply_gate and gate_activation(experts) is not None


def attention_form(attention: nn.Module) -> AttentionForm | None:
    """Return the form of an attention block that rotates heads as Llama does.

    Returns `None` for any other block.
    """
    found = _found(attention, _ATTENTIONS)
    if found is None:
        return None
    form, rotates = found
    mine, llama = sys.modules[type(attention).__module__], _module("llama")
    for name in _ROTATION:
        if _body(getattr(mine, name)) != _body(getattr(llama, name)):
            return None
    return replace(form, rotates=rotates(attention))


def layer_norms(layer: nn.Module) -> Mapping[str, str] | None:
    """Return a layer's norms by their places in our layers; `None` if the layer differs from ours.

    Our layers add the results of attention and MLP to a residual stream.
    """
    return _found(layer, _LAYERS)


def has_plain_head(model: nn.Module) -> bool:
    """Whether logits are the head's product alone, without a further step such as a cap."""
    return _same(_class_of(model), "llama:LlamaForCausalLM")


def _found(module: nn.Module, known: Mapping[str, Any]) -> Any:
    for name, meaning in known.items():
        if _same(_class_of(module), name):
            return meaning
    return None


def _class_of(module: nn.Module) -> Any:
    return type(module)


@cache
def _same(kind: Any, known: str) -> bool:
    family, _, name = known.partition(":")
    return _forward(kind) == _forward(getattr(_module(family), name))


def _module(family: str) -> Any:
    return import_module(f"transformers.models.{family}.modeling_{family}")


@cache
def _forward(kind: Any) -> str:
    """Return the code of a module class's `forward`, and of its helper `_norm` if it has one."""
    helper = getattr(kind, "_norm", None)
    return _body(kind.forward) + ("" if helper is None else _body(helper))


@cache
def _body(function: Callable[..., Any]) -> str:
    """Return a function's code without its docstring, and without types and their names."""
    source = textwrap.dedent(inspect.getsource(inspect.unwrap(function)))
    (definition,) = ast.parse(source).body
    assert isinstance(definition, ast.FunctionDef)
    body = definition.body
    first = body[0]
    if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
        body = body[1:]
    return "\n".join(ast.dump(_Plain().visit(each)) for each in body)


class _Plain(ast.NodeTransformer):
    """Removes those parts of code that do not matter when two functions are compared."""

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST:
        """Remove the annotation of an assignment."""
        assert node.value is not None
        return ast.Assign(targets=[node.target], value=self.visit(node.value))

    def visit_Call(self, node: ast.Call) -> ast.AST:
        """Remove the arguments of calls of attention."""
        self.generic_visit(node)
        function = node.func
        name = getattr(function, "attr", getattr(function, "id", ""))
        if name in _CALLS_OF_ATTENTION:
            return ast.Call(func=function, args=[], keywords=[])
        return node
