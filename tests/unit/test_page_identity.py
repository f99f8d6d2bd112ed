"""Pages in files belong to one model: what a restart changes does not matter, all else does."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

from runtime.config.options import WorkerConfig
from runtime.worker.build_files import page_identity


def test_the_identity_is_that_of_the_model_and_its_pages(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    weights = folder / "model.safetensors"
    weights.write_bytes(b"weights")
    config = WorkerConfig(
        run_folder=str(tmp_path / "run"),
        generation=0,
        model_folder=str(folder),
        load_format="auto",
        dtype="bfloat16",
        device="cpu",
        context_len=256,
        eos_token_ids=[],
        random_seed=1,
        mem_fraction_static=None,
        max_total_tokens=None,
        max_running_requests=8,
        max_queued_requests=None,
        chunked_prefill_size=-1,
        schedule_policy="fcfs",
        page_size=16,
        disable_radix_cache=False,
        overlap=True,
        attention_backend="auto",
        num_threads=1,
        log_level="info",
        decode_log_interval=40,
        stream_interval=1,
    )
    first = page_identity(config, "torch.bfloat16")
    assert len(first) == 32
    restarted = replace(config, run_folder="/other", generation=3, random_seed=2, context_len=512)
    assert page_identity(restarted, "torch.bfloat16") == first
    others = [
        page_identity(config, "torch.int8"),
        *(
            page_identity(replace(config, **change), "torch.bfloat16")
            for change in (
                {"dtype": "float32"},
                {"page_size": 32},
                {"deterministic": True},
                {"attention_backend": "torch"},
                {"model_overrides": {"rope_theta": 1.0}},
                {"load_format": "dummy"},
                {"load_format": "dummy", "random_seed": 2},
            )
        ),
    ]
    weights.write_bytes(b"other weights")
    others.append(page_identity(config, "torch.bfloat16"))
    shutil.copytree(folder, tmp_path / "updated")
    updated = replace(config, weights_folder=str(tmp_path / "updated"))
    (tmp_path / "updated" / "model.safetensors").write_bytes(b"the newest weights")
    others.append(page_identity(updated, "torch.bfloat16"))
    assert len({first, *others}) == 1 + len(others)
