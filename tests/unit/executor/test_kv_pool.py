"""Memory of the KV pool on a CPU: taken when tokens are written, not before."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from runtime.errors import StartupError
from runtime.executor import build
from runtime.executor.kv_pool import allocate_kv, pool_bytes_per_token
from runtime.executor.memory import GIB, Budget, PoolSize
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


GEMMA_3_27B: dict[str, Any] = {
    "architectures": ["Gemma3ForCausalLM"],
    "model_type": "gemma3_text",
    "num_hidden_layers": 62,
    "num_attention_heads": 32,
    "num_key_value_heads": 16,
    "head_dim": 128,
    "hidden_size": 5376,
    "intermediate_size": 21504,
    "sliding_window": 1024,
    "sliding_window_pattern": 6,
    "max_position_embeddings": 131072,
    "vocab_size": 262208,
}


def test_windowed_layers_with_own_pages_leave_room_for_four_times_the_tokens(tmp_path) -> None:
    """The shape of Gemma 3 27B, 32k tokens of context, 40 GiB."""
    (tmp_path / "config.json").write_text(json.dumps(GEMMA_3_27B))
    spec = read_model_spec(tmp_path)
    context = BuildContext(dtype=torch.bfloat16, device=torch.device("cpu"))
    config: Any = SimpleNamespace(
        page_size=PAGE,
        max_total_tokens=None,
        max_running_requests=64,
        context_len=32768,
        chunked_prefill_size=8192,
        swa_full_tokens_ratio=None,
    )
    budget = Budget(40 * GIB, 40 * GIB, "40.00 free")
    before = build.pool_of(config, spec, context, budget)
    assert (before.num_tokens, before.num_window_pages) == (84_560, 0)
    config.swa_full_tokens_ratio = 0.1
    after = build.pool_of(config, spec, context, budget)
    assert after.num_tokens == 344_912
    assert after.num_window_pages == after.num_pages // 10
    # The tensors are within the memory: 10 layers with all pages, 52 with few.
    page_bytes = 2 * 16 * PAGE * 128 * 2
    assert spec.layer_states.count(spec.layer_states[0]) == 52
    taken = (10 * after.num_pages + 52 * after.num_window_pages) * page_bytes
    assert taken <= after.size_bytes <= budget.size_bytes
    # Ten requests of the whole context run at a time, with windows and a chunk of 8192 tokens.
    assert after.num_tokens >= 10 * 32768
    assert after.num_window_pages >= 10 * (1024 // PAGE + 2) + 8192 // PAGE
    config.swa_full_tokens_ratio = 0.01
    with pytest.raises(StartupError, match=r"--swa-full-tokens-ratio 0\.01 leaves"):
        build.pool_of(config, spec, context, budget)
    for whole in ({"swa_full_tokens_ratio": 1.0}, {"chunked_prefill_size": -1}):
        config = SimpleNamespace(**{**vars(config), "swa_full_tokens_ratio": 0.1, **whole})
        assert build.pool_of(config, spec, context, budget) == before
