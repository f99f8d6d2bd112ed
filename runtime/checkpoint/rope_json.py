"""Reads the rotary embedding in `config.json`, as transformers 4 and 5 write it. No torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from runtime.checkpoint.json_file import Keys

MAX_POSITIONS = 2**27
_MAX_FACTOR = 2.0**20
_PARTIAL = "partial_rotary_factor"


@dataclass(frozen=True, kw_only=True)
class RopeConfig:
    """Settings of a rotary position embedding (RoPE).

    Attributes:
        theta: base of the frequencies.
        scaling: how frequencies are changed for longer contexts.
        parameters: settings of the scaling, as in `config.json` (`factor`, `beta_fast`, ...).
        interleaved: whether neighboring elements rotate together. If not, an element of a head's
            first half rotates with the element at the same place of the second half.
    """

    theta: float = 10000.0
    scaling: Literal["default", "linear", "dynamic", "llama3", "yarn", "factors", "longrope"] = (
        "default"
    )
    parameters: dict[str, Any] = field(default_factory=dict)
    interleaved: bool = False


def read_rope(
    config: Keys, *, layer_type: str = "", theta_key: str = "rope_theta", theta: float = 10000.0
) -> tuple[RopeConfig, int]:
    """Return the rotary embedding and the longest sequence it allows, including scaling.

    transformers 5 writes all settings to `rope_parameters`. transformers 4 writes `rope_theta` and
    perhaps `rope_scaling`, which takes precedence if a file has both.

    Args:
        config: keys of the model.
        layer_type: the type of layer whose settings are read, if the file has settings by type;
            empty if all layers must have the same settings.
        theta_key: key of the base in version 4.
        theta: the base if the file has none.

    Raises:
        StartupError: the kind of scaling is not supported, or a number is missing or out of bounds.
    """
    max_positions = config.integer("max_position_embeddings", MAX_POSITIONS)
    key = "rope_scaling" if config.mapping("rope_scaling") else "rope_parameters"
    rope = Keys(f"{config.source}: {key}", _without_layer_types(config, key, layer_type))
    theta = rope.number("rope_theta", 1.0, 1e12, config.number(theta_key, 1.0, 1e12, theta))
    for keys in (config, rope):
        if keys.number(_PARTIAL, 0.0, 1.0, 1.0) != 1.0:
            raise keys.error(_PARTIAL, "1: partial rotation is not supported")
    # Old files have the key `type`.
    kind = rope.values.get("rope_type") or rope.values.get("type") or "default"
    if kind == "default":
        return RopeConfig(theta=theta), max_positions
    if kind == "dynamic":
        # Beyond the original context, the frequencies would depend on the sequence's length, so
        # cached keys would become wrong. Such a model is served within its original context, where
        # the scaling has no effect.
        return RopeConfig(theta=theta, scaling="dynamic"), max_positions
    if kind == "linear":
        factor = rope.number("factor", 1.0, _MAX_FACTOR)
        numbers: dict[str, Any] = {"factor": factor}
        context_len = _stretched(max_positions, factor)
        return RopeConfig(theta=theta, scaling="linear", parameters=numbers), context_len
    if kind == "llama3":
        numbers = _llama3_numbers(config, rope, max_positions)
        return RopeConfig(theta=theta, scaling="llama3", parameters=numbers), max_positions
    if kind == "yarn":
        numbers = _yarn_numbers(config, rope, max_positions)
        original = int(numbers["original_max_position_embeddings"])
        context_len = max(max_positions, _stretched(original, float(numbers["factor"])))
        return RopeConfig(theta=theta, scaling="yarn", parameters=numbers), context_len
    if kind == "factors":
        # A GGUF file has one factor for each frequency, not the rule (such as Llama 3's) behind it.
        factors = rope.values.get("factors")
        if not isinstance(factors, list) or not all(isinstance(one, float) for one in factors):
            raise rope.error("factors", "a number for each angle")
        parameters = {"factors": factors}
        return RopeConfig(theta=theta, scaling="factors", parameters=parameters), max_positions
    raise rope.error(
        "rope_type" if rope.values.get("rope_type") else "type",
        "one of default, linear, dynamic, llama3, yarn",
    )


def read_partial_rope(config: Keys, head_dim: int, share: float) -> tuple[RopeConfig, int, int]:
    """Return what `read_rope` returns, and how many elements of a head rotate: the first ones.

    Args:
        config: keys of the model.
        head_dim: elements of a head.
        share: the share of a head that rotates, if the file does not say.

    Raises:
        StartupError: for the reasons of `read_rope`, or if the share is not an even number of
            elements.
    """
    found = config.values.get(_PARTIAL)
    values = {key: value for key, value in config.values.items() if key != _PARTIAL}
    for key in ("rope_parameters", "rope_scaling"):
        numbers = dict(config.mapping(key))
        if _PARTIAL in numbers:
            inner = numbers.pop(_PARTIAL)
            found = inner if found is None else found
            values[key] = numbers
    rope, context_len = read_rope(Keys(config.source, values))
    share = Keys(config.source, {_PARTIAL: found}).number(_PARTIAL, 0.0, 1.0, share)
    rotary_dim = int(head_dim * share)
    if not rotary_dim or rotary_dim % 2:
        raise config.error(_PARTIAL, "a share of a head that is an even number of elements")
    return rope, context_len, rotary_dim


def _without_layer_types(config: Keys, key: str, layer_type: str) -> dict[str, Any]:
    """Return the settings for `layer_type`; transformers 5 may write one set per type of layer."""
    rope = config.mapping(key)
    nested = [value for value in rope.values() if isinstance(value, dict)]
    if not nested:
        return rope
    if layer_type:
        found = rope.get(layer_type)
        if not isinstance(found, dict):
            raise config.error(key, f"numbers for {layer_type}")
        return found
    if any(value != nested[0] for value in nested):
        raise config.error(key, "the same rotary embedding for every layer")
    return nested[0]


def _stretched(positions: int, factor: float) -> int:
    return min(int(positions * factor), MAX_POSITIONS)


def _original_positions(config: Keys, rope: Keys, max_positions: int) -> int:
    key = "original_max_position_embeddings"
    inner = rope.integer(key, MAX_POSITIONS, max_positions)
    return config.integer(key, MAX_POSITIONS, inner)


def _llama3_numbers(config: Keys, rope: Keys, max_positions: int) -> dict[str, Any]:
    low = rope.number("low_freq_factor", 1e-6, _MAX_FACTOR)
    high = rope.number("high_freq_factor", 1e-6, _MAX_FACTOR)
    if high <= low:
        raise rope.error("high_freq_factor", f"more than low_freq_factor, {low:g}")
    return {
        "factor": rope.number("factor", 1.0, _MAX_FACTOR),
        "low_freq_factor": low,
        "high_freq_factor": high,
        "original_max_position_embeddings": _original_positions(config, rope, max_positions),
    }


def _yarn_numbers(config: Keys, rope: Keys, max_positions: int) -> dict[str, Any]:
    original = _original_positions(config, rope, max_positions)
    numbers: dict[str, Any] = {
        "factor": rope.number("factor", 1.0, _MAX_FACTOR, max(1.0, max_positions / original)),
        "original_max_position_embeddings": original,
        "truncate": rope.flag("truncate", True),
    }
    for key in ("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim"):
        if rope.values.get(key) is not None:
            numbers[key] = rope.number(key, 0.0, _MAX_FACTOR)
    return numbers
