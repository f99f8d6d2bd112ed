"""What samples is compiled when the engine starts: no stream waits for a compiler later."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from runtime.sampling.warmup import warm_up_sampling
from tests.support.gpu import on_gpu
from tests.support.sampling_steps import sample_in_steps


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
