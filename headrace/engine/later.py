"""Methods of the reference's engine that this one does not have yet, and what each would need."""

from __future__ import annotations

_EMBEDDINGS = "embedding, reward and rerank models are"
_EXPERTS = "records of expert use are"
_UPDATES = "weight updates are"
_ADAPTERS = "LoRA adapters are"
_RELEASE = "releasing memory between steps is"
_SAVING = "saving or sharing the loaded model is"

LATER: dict[str, str] = {
    "encode": _EMBEDDINGS,
    "async_encode": _EMBEDDINGS,
    "rerank": _EMBEDDINGS,
    "async_rerank": _EMBEDDINGS,
    "start_expert_distribution_record": _EXPERTS,
    "stop_expert_distribution_record": _EXPERTS,
    "dump_expert_distribution_record": _EXPERTS,
    "init_weights_update_group": _UPDATES,
    "destroy_weights_update_group": _UPDATES,
    "update_weights_from_distributed": _UPDATES,
    "update_weights_from_tensor": _UPDATES,
    "update_weights_from_disk": _UPDATES,
    "update_weights_from_ipc": _UPDATES,
    "begin_weight_update": _UPDATES,
    "end_weight_update": _UPDATES,
    "get_weights_by_name": _UPDATES,
    "load_lora_adapter": _ADAPTERS,
    "unload_lora_adapter": _ADAPTERS,
    "load_lora_adapter_from_tensors": _ADAPTERS,
    "async_load_lora_adapter": _ADAPTERS,
    "async_unload_lora_adapter": _ADAPTERS,
    "release_memory_occupation": _RELEASE,
    "resume_memory_occupation": _RELEASE,
    "save_remote_model": _SAVING,
    "save_sharded_model": _SAVING,
    "collective_rpc": "calls into the worker are",
}
