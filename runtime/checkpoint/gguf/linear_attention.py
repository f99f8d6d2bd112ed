"""Puts the rows of Gated DeltaNet's tensors in the order of Qwen3.5's checkpoints. No torch.

Files of Qwen3-Next have the two gates of the delta rule in one tensor, in which the rows of a key
head are adjacent. Files of Qwen3.5 have the value heads of linear attention in another order:
neighboring value heads belong to different key heads, so that ggml can repeat key heads without
copies.
"""

from __future__ import annotations

from dataclasses import replace

from runtime.checkpoint.gguf.header import GgufFile
from runtime.checkpoint.gguf.own_keys import architecture_of
from runtime.checkpoint.tensor_info import RowOrder, TensorInfo
from runtime.errors import StartupError

# Tensors that have rows of queries and keys before those of values.
_WITH_KEYS = frozenset({"attn_qkv", "ssm_conv1d"})
_OF_VALUES = frozenset({"attn_gate", "ssm_alpha", "ssm_beta", "ssm_a", "ssm_dt"})


def in_flat_rows(
    file: GgufFile, part: str, info: TensorInfo, *, is_tiled: bool
) -> list[TensorInfo]:
    """Return the tensors of a checkpoint that one GGUF tensor of a layer contains.

    Args:
        file: the file's header.
        part: the tensor's name within its layer in GGUF, without `.weight` or `.bias`.
        info: the tensor under its name in a checkpoint, with its rows as in the file.
        is_tiled: whether the file has value heads in the order of llama.cpp.

    Raises:
        StartupError: the numbers of heads do not fit the tensor's rows; the message has one line.
    """
    keys, values, key_dim = (
        _number(file, key) for key in ("group_count", "time_step_rank", "state_size")
    )
    if values % keys:
        raise StartupError(f"{file.path}: {values} value heads do not share {keys} key heads")
    if part == "ssm_ba" and not _has_grouped_inputs(file):
        if info.shape[0] != 2 * values:
            raise StartupError(
                f"{file.path}: {info.name} has {info.shape[0]} rows; {values} value heads have "
                f"{2 * values}"
            )
        return [
            replace(
                info,
                name=info.name.replace("_ba.", f"_{gate}."),
                shape=(values, *info.shape[1:]),
                rows=RowOrder(keys, 2, begin=index * values, end=(index + 1) * values),
            )
            for index, gate in enumerate("ba")
        ]
    if not is_tiled or keys == values:
        return [info]
    if part == "ssm_out":
        # The matrix's columns are in the order of the heads. Columns cannot be reordered within
        # quantized blocks, so the model reorders the matrix's input.
        return [replace(info, name=info.name.replace(".out_proj.", ".tiled_out_proj."))]
    if part not in _WITH_KEYS | _OF_VALUES:
        return [info]
    first = 2 * keys * key_dim if part in _WITH_KEYS else 0
    _check_rows(info, first, values)
    return [replace(info, rows=RowOrder(values // keys, keys, first))]


def _has_grouped_inputs(file: GgufFile) -> bool:
    """Whether an old converter wrote the file, with rows of q, k, v, z grouped by key head."""
    return any(tensor.name.endswith(".ssm_in.weight") for tensor in file.tensors)


def _number(file: GgufFile, key: str) -> int:
    full = f"{architecture_of(file)}.ssm.{key}"
    value = file.metadata.get(full)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise StartupError(f"{file.path}: {full!r} is not a positive number")
    return value


def _check_rows(info: TensorInfo, first: int, of_heads: int) -> None:
    rest = info.shape[0] - first
    if rest <= 0 or rest % of_heads:
        raise StartupError(f"{info.file}: {info.name!r} has {info.shape[0]} rows")
