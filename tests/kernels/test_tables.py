"""Which implementation a device gets, independent of this machine."""

import pytest

from kernels.activation import ACTIVATION
from kernels.decode_step import DECODE_STEP
from kernels.embedding import EMBEDDING
from kernels.greedy import GREEDY
from kernels.linear import LINEAR
from kernels.norm import NORM
from kernels.rope import ROPE
from kernels.sampling import SAMPLING

TABLES = [LINEAR, NORM, ROPE, ACTIVATION, EMBEDDING, SAMPLING, DECODE_STEP, GREEDY]


@pytest.mark.parametrize("table", TABLES, ids=lambda table: table.op)
@pytest.mark.parametrize("device_type", ["cpu", "cuda"])
def test_batch_invariant_kernels_are_those_of_the_device(table, device_type, monkeypatch):
    # As on a machine with a GPU and a compiler for the CPU: each could run on its own device.
    monkeypatch.setattr(table, "unavailable", lambda name: None)
    monkeypatch.setattr(table, "load", lambda name: name)
    chosen = table.choose(device_type, invariant=True).name
    assert table.is_invariant(chosen)
    other = {"cpu": "triton", "cuda": "cpu"}[device_type]
    assert not chosen.startswith(other), f"{chosen} computes on another device"
