"""The request bodies of the routes for adapters (LoRA), and their checks. Imports no torch."""

from __future__ import annotations

from typing import Any

import msgspec

from runtime.errors import InvalidRequest
from runtime.weights.weight_requests import check_safetensors

TENSORS_FIELD = "serialized_tensors"


class LoadAdapterBody(msgspec.Struct, kw_only=True):
    """The body of `/load_lora_adapter`: the adapter's new name and its folder."""

    lora_name: str
    lora_path: str
    pinned: bool | None = None


class UnloadAdapterBody(msgspec.Struct, kw_only=True):
    """The body of `/unload_lora_adapter`: the adapter's name."""

    lora_name: str


class AdapterTensorsBody(msgspec.Struct, kw_only=True):
    """The body of `/load_lora_adapter_from_tensors`.

    `serialized_tensors` has the bytes of a safetensors file, in base64; it may be a list of one.
    """

    lora_name: str
    config_dict: dict[str, Any]
    serialized_tensors: bytes | list[bytes] | None = None
    pinned: bool | None = None
    load_format: str | None = None
    added_tokens_config: dict[str, Any] | None = None


def tensors_of(body: AdapterTensorsBody) -> bytes:
    """Return the bytes of the safetensors file in a body.

    Raises:
        InvalidRequest: the bytes are something else, or the adapter adds tokens.
    """
    if body.load_format not in (None, "auto", "safetensors"):
        raise InvalidRequest(
            f"load_format {body.load_format[:64]!r} is not supported; omit it, and send "
            f"{TENSORS_FIELD} as base64 of the bytes of a safetensors file.",
            param="load_format",
        )
    if body.added_tokens_config:
        raise InvalidRequest(
            "added_tokens_config is not supported: adapters add no tokens.",
            param="added_tokens_config",
        )
    data = body.serialized_tensors
    if isinstance(data, list):
        if len(data) != 1:
            raise InvalidRequest(
                f"{TENSORS_FIELD} must be whole tensors in one entry; it has {len(data)}.",
                param=TENSORS_FIELD,
            )
        (data,) = data
    if not data:
        raise InvalidRequest(f"{TENSORS_FIELD} is missing.", param=TENSORS_FIELD)
    check_safetensors(TENSORS_FIELD, data, TENSORS_FIELD)
    return data
