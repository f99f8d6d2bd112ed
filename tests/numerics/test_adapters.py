"""Adapters (LoRA) in one batch: each request's tokens are those of the merged weights."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.nn.functional import linear

from kernels.cpu.library import unavailable
from runtime.checkpoint.headers import SINGLE_FILE
from runtime.checkpoint.peft_adapter import target_modules
from runtime.config.lora_options import LoraLimits
from runtime.ipc.weight_messages import LoadAdapter, UnloadAdapter
from runtime.models.registry import read_model_spec
from tests.numerics.test_gguf import WIDE, mixed, variant
from tests.support.adapters import (
    ATTENTION,
    MLP,
    adapter_tensors,
    make_adapter,
    merged_model,
    write_adapter,
)
from tests.support.engine import InProcessEngine
from tests.support.fp8_models import LAYOUTS, is_linear, round_as, write_fp8
from tests.support.gguf_models import write_gguf
from tests.support.tiny_families import tiny_family
from tests.support.tiny_models import tiny_model

RANKS = (4, 8, 64)
NUM_TOKENS = 12
MODULES = {"qwen2_moe": (*ATTENTION, "shared_expert_gate"), "qwen3_moe": ATTENTION}


def limits(model: Path, slots: int = len(RANKS), rank: int = max(RANKS)) -> LoraLimits:
    return LoraLimits(
        max_per_batch=slots,
        max_rank=rank,
        target_modules=target_modules(read_model_spec(model), []),
    )


@pytest.fixture(scope="module")
def adapters(tmp_path_factory):
    """Folders of a model's adapters, made once: none for the base, then one of each rank."""
    made: dict[str, list[Path | None]] = {}

    def of(name: str) -> list[Path | None]:
        if name not in made:
            root = tmp_path_factory.mktemp(name)
            modules = MODULES.get(name, (*ATTENTION, *MLP))
            made[name] = [None]
            for rank in RANKS:
                folder = root / str(rank)
                some = modules if rank != 8 else modules[1:]
                made[name].append(
                    make_adapter(
                        folder,
                        tiny_model(name),
                        rank,
                        rank,
                        some,
                        use_rslora=rank == 64,
                        alpha=8.0,
                        alpha_pattern={"o_proj": 3.0} if rank == 4 else {},
                    )
                )
        return made[name]

    return of


def prompts(seed: int = 3) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randint(5, 500, (length,), generator=generator).tolist() for length in (9, 33, 17, 50)
    ]


@pytest.fixture(scope="module")
def expected(adapters):
    """The greedy tokens of `transformers`, for each adapter its own prompt."""
    made: dict[str, list[list[int]]] = {}

    def of(name: str) -> list[list[int]]:
        if name not in made:
            made[name] = []
            for folder, prompt in zip(adapters(name), prompts(), strict=True):
                model = merged_model(tiny_model(name), folder)
                ids = model.generate(
                    torch.tensor([prompt]),
                    max_new_tokens=NUM_TOKENS,
                    do_sample=False,
                    eos_token_id=-1,
                )
                made[name].append(ids[0, len(prompt) :].tolist())
        return made[name]

    return of


def engine_of(name: str, adapters, **options) -> InProcessEngine:
    folder = tiny_model(name)
    options.setdefault("lora", limits(folder))
    engine = InProcessEngine(folder, **options)
    for adapter_id, adapter in enumerate(adapters(name)):
        if adapter is not None:
            assert engine.ask(LoadAdapter(adapter_id, str(adapter))).success
    return engine


def run_all(engine: InProcessEngine, first: int = 1) -> list[list[int]]:
    for adapter_id, prompt in enumerate(prompts()):
        engine.add(first + adapter_id, prompt, NUM_TOKENS, adapter_id=adapter_id, ignore_eos=True)
    engine.run()
    return [engine.tokens[first + index] for index in range(len(prompts()))]


@pytest.mark.parametrize(
    "name", ["llama", "qwen2", "qwen3", "gemma3", "mistral_window", "qwen2_moe", "qwen3_moe"]
)
def test_one_batch_is_the_merged_models(name, adapters, expected):
    assert run_all(engine_of(name, adapters)) == expected(name)


@pytest.mark.parametrize(
    "options",
    [
        {"chunked_prefill_size": 8},
        {"chunked_prefill_size": 16, "page_size": 4},
        # Two different ones at a time, of three.
        {"slots": 2},
        {"slots": 1, "overlap": True},
        {"overlap": True},
        # Requests are retracted.
        {"max_total_tokens": 144, "page_size": 4},
    ],
    ids=str,
)
def test_however_it_is_computed(options, adapters, expected):
    if slots := options.pop("slots", 0):
        options = {**options, "lora": limits(tiny_model("llama"), slots)}
    engine = engine_of("llama", adapters, **options)
    assert run_all(engine) == expected("llama")
    if "max_total_tokens" in options:
        assert any(engine.retractions.values())
    # Again from the prefix cache, and the other way round.
    assert run_all(engine, first=11) == expected("llama")


@pytest.mark.skipif(unavailable() is not None, reason="no C++ library")
def test_a_recorded_step_follows_the_adapter(adapters, expected):
    engine = engine_of("llama", adapters, disable_radix_cache=True)
    for adapter_id, prompt in enumerate(prompts()):
        before = engine.runner.steps.num_repeats
        engine.add(adapter_id + 1, prompt, NUM_TOKENS, adapter_id=adapter_id, ignore_eos=True)
        engine.run()
        assert engine.tokens[adapter_id + 1] == expected("llama")[adapter_id]
        # All adapters share one recording; the first of them and the base model make theirs.
        num_made = 1 if adapter_id < 2 else 0
        assert engine.runner.steps.num_repeats - before == NUM_TOKENS - 1 - num_made


def test_prefixes_are_not_shared_between_adapters(adapters):
    engine = engine_of("llama", adapters)
    prompt = prompts()[3] * 2
    cold = {}
    for adapter_id in range(4):
        engine.add(adapter_id + 1, prompt, 4, adapter_id=adapter_id)
        engine.run()
        assert engine.cached[adapter_id + 1] == 0
        cold[adapter_id] = engine.tokens[adapter_id + 1]
    for adapter_id in range(4):
        engine.add(adapter_id + 11, prompt, 4, adapter_id=adapter_id)
        engine.run()
        assert engine.cached[adapter_id + 11] >= len(prompt) - 16
        assert engine.tokens[adapter_id + 11] == cold[adapter_id]


def test_another_adapter_of_the_same_slot_starts_afresh(adapters, expected):
    """An id is never used again, so a slot, a name and the cache may be."""
    engine = engine_of("llama", adapters, lora=limits(tiny_model("llama"), 1))
    small, large = adapters("llama")[1], adapters("llama")[3]
    for round_, (adapter_id, folder, want) in enumerate(
        [(11, large, 3), (12, small, 1), (13, large, 3), (14, small, 1)]
    ):
        assert engine.ask(LoadAdapter(adapter_id, str(folder))).success
        engine.add(round_ + 1, prompts()[want], NUM_TOKENS, adapter_id=adapter_id, ignore_eos=True)
        refused = engine.ask(UnloadAdapter(adapter_id))
        assert not refused.success
        assert "1 requests" in refused.message
        engine.run()
        assert engine.tokens[round_ + 1] == expected("llama")[want]
        assert engine.ask(UnloadAdapter(adapter_id)).success
        engine.add(100 + round_, prompts()[0], 4, adapter_id=adapter_id)
        engine.run()
        assert "not loaded" in engine.reasons[100 + round_].message


@pytest.mark.parametrize(
    ("name", "modules"),
    [
        # Gate and up are one matrix in the files, and one module of the adapter.
        ("glm4", ("q_proj", "v_proj", "o_proj", "gate_up_proj", "down_proj")),
        # Attention and the MLP read one norm.
        ("cohere2", (*ATTENTION, *MLP)),
        # The norms of q and k follow the adapted products.
        ("olmo2", (*ATTENTION, *MLP)),
        # q, k and v are one matrix, too.
        ("phi3", ("qkv_proj", "o_proj", "gate_up_proj", "down_proj")),
        # The MLP has two products and no gate.
        ("starcoder2_tied", (*ATTENTION, "c_fc", "c_proj")),
        # Queries grow behind the adapted products; the router takes floats.
        ("ministral3", (*ATTENTION, *MLP)),
        ("minimax_m2", ATTENTION),
        # Some layers have no k and v, and all have two products more.
        (
            "gemma4_inputs",
            (*ATTENTION, *MLP, "per_layer_input_gate", "per_layer_projection"),
        ),
    ],
)
def test_families_with_other_layers(tmp_path, name, modules):
    folder, tokens = tiny_family(name), prompts()[3]
    adapter = make_adapter(tmp_path / "adapter", folder, 4, 1, modules)
    engine = InProcessEngine(folder, lora=limits(folder))
    assert engine.ask(LoadAdapter(1, str(adapter))).success
    with torch.inference_mode():
        base, merged = (
            merged_model(folder, each).model(torch.tensor([tokens])).last_hidden_state[0, -1]
            for each in (None, adapter)
        )
    for found, states in zip(last_states(engine, tokens), (base, merged), strict=True):
        assert torch.dist(found, states) < 1e-4 * torch.dist(base, merged)


def test_a_router_in_float32_is_not_adapted(tmp_path):
    """The rest of such a model is adapted in 16 bits."""
    folder = tiny_family("deepseek_v3")
    modules = ("q_a_proj", "kv_a_proj_with_mqa", "o_proj", "gate_proj")
    tensors = {
        name: each
        for name, each in adapter_tensors(folder, modules, 4, 1).items()
        if ".experts." not in name
    }
    adapter = write_adapter(tmp_path / "adapter", tensors, 4, modules)
    engine = InProcessEngine(folder, lora=limits(folder), dtype="bfloat16")
    assert "gate" not in limits(folder).target_modules
    assert engine.ask(LoadAdapter(1, str(adapter))).success
    found = last_states(engine, prompts()[3])
    with torch.inference_mode():
        tokens = torch.tensor([prompts()[3]])
        base, merged = (
            merged_model(folder, each).model(tokens).last_hidden_state[0, -1]
            for each in (None, adapter)
        )
    # Rounding to 16 bits is 1% of what the adapter changes.
    assert torch.dist(found[1], merged) < 0.2 * torch.dist(base, merged)
    assert torch.dist(found[0], base) < 0.2 * torch.dist(base, merged)

    wrong = make_adapter(tmp_path / "router", folder, 4, 1, ["gate"])
    refused = engine.ask(LoadAdapter(2, str(wrong)))
    assert not refused.success
    assert "routers in float32" in refused.message


@pytest.mark.parametrize(
    ("side", "value", "dtype"),
    [
        ("lora_A", float("nan"), "float32"),
        ("lora_B", float("-inf"), "float32"),
        # Finite in the file, but not once it is scaled and cast.
        ("lora_B", 3e4, "float16"),
    ],
)
def test_numbers_that_are_not_finite_are_refused(side, value, dtype, tmp_path):
    folder = tiny_model("llama")
    tensors = adapter_tensors(folder, ATTENTION, 4, 1)
    next(each for name, each in tensors.items() if side in name)[0, 0] = value
    adapter = write_adapter(tmp_path / "adapter", tensors, 4, ATTENTION)
    engine = InProcessEngine(folder, lora=limits(folder), dtype=dtype)
    refused = engine.ask(LoadAdapter(1, str(adapter)))
    assert not refused.success
    assert f"NaN or infinite in {dtype}" in refused.message


def test_a_quantized_base(adapters, tmp_path):
    """GGUF blocks: what the adapter adds stays in floats, in fused and in mixed products."""
    folder = variant("llama", WIDE)
    path, plain = tmp_path / "model.gguf", tmp_path / "plain"
    weights = write_gguf(folder, path, mixed)
    plain.mkdir()
    shutil.copy(folder / "config.json", plain)
    save_file({name: each.contiguous() for name, each in weights.items()}, plain / SINGLE_FILE)
    adapter = make_adapter(tmp_path / "adapter", plain, 8, 1)
    engine = InProcessEngine(path, lora=limits(path))
    assert engine.ask(LoadAdapter(1, str(adapter))).success
    tokens = prompts()[3]
    found = last_states(engine, tokens)
    model = merged_model(plain, adapter).model
    with torch.inference_mode():
        want = model(torch.tensor([tokens])).last_hidden_state[0, -1]
    assert torch.dist(found[1], want) < 0.05 * want.norm()
    assert torch.dist(found[0], want) > 0.5 * want.norm()


def last_states(engine: InProcessEngine, tokens: list[int]) -> list[torch.Tensor]:
    """The last hidden state of the base and of the first adapter, of one batch."""
    for adapter_id in (0, 1):
        engine.add(adapter_id + 1, tokens, 1, adapter_id=adapter_id, hidden_states="last")
    engine.run()
    return [torch.tensor(engine.hidden_outputs[number][-1]) for number in (1, 2)]


@pytest.mark.parametrize("layout", ["compressed_tensor_static", "compressed_channel_dynamic"])
def test_a_base_in_fp8(layout, tmp_path):
    """The base rounds its input; the adapter takes it as it was."""
    from transformers import AutoModelForCausalLM

    source, form = variant("llama", WIDE), LAYOUTS[layout]
    values = write_fp8(source, tmp_path / "m", form)
    adapter = make_adapter(tmp_path / "adapter", source, 8, 1, alpha=8.0)
    engine = InProcessEngine(tmp_path / "m", lora=limits(tmp_path / "m"))
    assert engine.ask(LoadAdapter(1, str(adapter))).success
    tokens = prompts()[3]
    found = last_states(engine, tokens)
    plain = tmp_path / "plain"
    plain.mkdir()
    shutil.copy(source / "config.json", plain)
    save_file({name: each.contiguous() for name, each in values.items()}, plain / SINGLE_FILE)
    factors = load_file(adapter / "adapter_model.safetensors")
    for state, scale in zip(found, (0.0, 1.0), strict=True):
        model = AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32).eval()
        for name, module in model.named_modules():
            if not isinstance(module, nn.Linear) or not is_linear(f"{name}.weight", (1, 1)):
                continue
            a, b = (factors[f"base_model.model.{name}.lora_{half}.weight"] for half in "AB")
            module.forward = lambda x, name=name, weight=module.weight, a=a, b=b, scale=scale: (
                linear(round_as(form, name, x), weight) + scale * linear(linear(x, a), b)
            )
        with torch.inference_mode():
            want = model.model(torch.tensor([tokens])).last_hidden_state[0, -1]
        # A sum in another order may take an activation over the middle between two codes, which
        # is 2% here. An adapter of rounded input would be 7% off.
        assert torch.dist(state, want) < 0.03 * want.norm()
    assert torch.dist(*found) > 0.5 * want.norm()
