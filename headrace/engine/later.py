"""The methods of SGLang's engine that are not supported yet, with the feature that each needs."""

from __future__ import annotations

_SOCKETS = "weights from the sockets of a checkpoint engine are"
_SAVING = "saving or sharing the loaded model is"

LATER: dict[str, str] = {
    "update_weights_from_ipc": _SOCKETS,
    "save_remote_model": _SAVING,
    "save_sharded_model": _SAVING,
    "collective_rpc": "calls into the worker are",
}
