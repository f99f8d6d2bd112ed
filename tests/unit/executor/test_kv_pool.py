"""Memory of the KV pool on a CPU: taken when tokens are written, not before."""

from __future__ import annotations

import pytest
import torch

from runtime.executor.kv_pool import allocate_kv, pool_bytes_per_token
from runtime.executor.memory import GIB, PoolSize
from runtime.models.layers.build_context import BuildContext
from runtime.models.registry import read_model_spec
from tests.support.fake_checkpoint import write_config
from tests.support.load_memory import anonymous_bytes

PAGE = 16


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_pool_takes_memory_when_it_is_used(tmp_path, dtype) -> None:
    spec = read_model_spec(write_config(tmp_path))
    context = BuildContext(dtype=dtype, device=torch.device("cpu"))
    per_token = pool_bytes_per_token(spec, context)
    num_pages = 4 * GIB // (per_token * PAGE)
    before = anonymous_bytes()
    kv = allocate_kv(PoolSize(num_pages, PAGE, 4 * GIB), spec, context)
    sizes = [each.nbytes for layer in kv for each in (layer.k, layer.v)]
    assert sum(sizes) >= 4 * GIB
    assert anonymous_bytes() - before < 64 * 2**20
    for layer in kv:
        keys, values = layer.k, layer.v
        assert keys.dtype is values.dtype is dtype
        assert keys.shape == values.shape == (num_pages + 1, 2, PAGE, 4)
        assert keys.data_ptr() % 64 == 0
        # Read without being written, in the middle and at the end.
        assert not keys[num_pages // 2].any()
        assert not values[-1].any()
        keys[1 : num_pages // 16] = 1.0
        assert keys[num_pages // 16 - 1].eq(1).all()
    # A sixteenth of one half was written.
    assert 2**26 < anonymous_bytes() - before < 2**28
    del kv, layer, keys, values
    assert anonymous_bytes() - before < 64 * 2**20


@pytest.mark.parametrize(
    ("form", "dtype", "row_bytes"),
    [
        ("auto", torch.float32, 16),
        ("bf16", torch.bfloat16, 8),
        ("fp8_e4m3", torch.float8_e4m3fn, 4),
        ("fp8_e5m2", torch.float8_e5m2, 4),
        # Four numbers and their scale.
        ("int8", torch.int8, 8),
    ],
)
def test_a_pool_in_fewer_bits_takes_fewer_bytes(tmp_path, form, dtype, row_bytes) -> None:
    spec = read_model_spec(write_config(tmp_path))
    context = BuildContext(dtype=torch.float32, device=torch.device("cpu"), kv_cache_dtype=form)
    num_layers = len(spec.layer_states)
    assert pool_bytes_per_token(spec, context) == num_layers * 2 * 2 * row_bytes
    for layer in allocate_kv(PoolSize(3, PAGE, 0), spec, context):
        for each in (layer.k, layer.v):
            assert each.dtype is dtype
            assert each.nbytes == 4 * PAGE * 2 * row_bytes


def test_more_than_a_process_may_map_is_reported(tmp_path) -> None:
    spec = read_model_spec(write_config(tmp_path))
    context = BuildContext(dtype=torch.float32, device=torch.device("cpu"))
    with pytest.raises(MemoryError):
        allocate_kv(PoolSize(2**50, PAGE, 0), spec, context)
