"""All kernels of a step are compiled at start, so streams never wait for a compiler."""

from __future__ import annotations

import importlib
import pkgutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from runtime.executor.warmup_steps import warm_up_sampling
from tests.support.engine import InProcessEngine
from tests.support.fake_checkpoint import write_config
from tests.support.gpu import on_gpu
from tests.support.sampling_steps import sample_in_steps


def own_kernels() -> list[Any]:
    """Every kernel of ours."""
    from triton.runtime.jit import JITFunction

    import kernels

    found = {}
    for info in pkgutil.walk_packages(kernels.__path__, "kernels."):
        if info.name.endswith(("triton", "device")) or ".triton_" in info.name:
            for value in vars(importlib.import_module(info.name)).values():
                if isinstance(value, JITFunction) and value.__name__.endswith("kernel"):
                    found[id(value)] = value
    return list(found.values())


@on_gpu
# With 64 MiB of counts penalties are for 130, 110 and 333 rows at once.
@pytest.mark.parametrize(
    ("vocab_size", "most"), [(128_256, 137), (151_936, 137), (50_257, 337)], ids=str
)
def test_no_step_compiles_a_sampling_kernel(
    vocab_size: int, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from triton.runtime.jit import JITFunction

    used: set[Any] = set()
    run = JITFunction.run

    def note(kernel: Any, *args: Any, **options: Any) -> Any:
        used.add(kernel)
        return run(kernel, *args, **options)

    monkeypatch.setattr(JITFunction, "run", note)
    device = torch.device("cuda", torch.cuda.current_device())

    def counts() -> dict[str, int]:
        """Compiled variants of each kernel, this process's."""
        return {kernel.__name__: len(kernel.device_caches[device.index][0]) for kernel in used}

    warm_up_sampling(vocab_size, device)
    # What other tests compiled would hide what this one does.
    for kernel in used:
        del kernel.device_caches[device.index]
    warm_up_sampling(vocab_size, device)
    warmed = counts()
    assert len(warmed) >= 14
    assert all(warmed.values())
    for batch in (1, 2, 3, 16, most):
        sample_in_steps(batch, vocab_size, device)
    assert counts() == warmed


@on_gpu
@pytest.mark.parametrize("deterministic", [False, True], ids=["usual", "deterministic"])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_no_step_compiles_a_kernel(tmp_path: Path, head_dim: int, deterministic: bool) -> None:
    device = torch.cuda.current_device()
    kernels = own_kernels()
    for kernel in kernels:
        # What other tests compiled would hide what this one does.
        kernel.device_caches.pop(device, None)
    sizes = {"hidden_size": 1024, "intermediate_size": 256, "vocab_size": 4096}
    heads = {"num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": head_dim}
    engine = InProcessEngine(
        write_config(tmp_path, **sizes, **heads, max_position_embeddings=8192),
        device="cuda",
        dtype="bfloat16",
        load_format="dummy",
        context_len=4096,
        max_total_tokens=60_000,
        max_running_requests=64,
        chunked_prefill_size=4096,
        overlap=True,
        deterministic=deterministic,
    )

    def counts() -> dict[str, int]:
        return {
            f"{kernel.__module__}.{kernel.__name__}": len(kernel.device_caches[device][0])
            for kernel in kernels
        }

    started = counts()
    attention = {"attention_kernel"} if deterministic else {"decode_kernel", "extend_kernel"}
    linear = "_linear_kernel" if deterministic else "linear_kernel"
    used = {name.rpartition(".")[2] for name, count in started.items() if count}
    assert used >= attention | {"_rms_norm_kernel", "_rope_kernel", linear}
    rng = np.random.default_rng(0)
    number = 0
    shared = rng.integers(3, 4000, 1500).tolist()
    for lengths in ([1], [9], [70], [300], [1800], [3000], [200] * 40, range(1, 1000, 60)):
        for prefix in ([], shared):
            for length in lengths:
                number += 1
                prompt = prefix + rng.integers(3, 4000, length).tolist()
                engine.add(number, prompt[:4000], 4, ignore_eos=True)
            engine.run()
    later = counts()
    assert {
        name: (started[name], later[name]) for name in later if later[name] != started[name]
    } == {}
