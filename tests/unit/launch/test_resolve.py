"""Automatic choices: which value is chosen, and that it is logged."""

import dataclasses
import json
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

import pytest

from runtime.config.options import (
    HttpArgs,
    KernelArgs,
    LoggingArgs,
    ModelArgs,
    ServerConfig,
)
from runtime.config.parallel_options import ParallelArgs
from runtime.config.scheduling_options import SchedulingArgs
from runtime.errors import StartupError
from runtime.launch.defaults import Choices, choose_kv_cache
from runtime.launch.hardware import (
    Hardware,
    cpu_has_bf16,
    detect_hardware,
    quota_cores,
    visible_gpus,
)
from runtime.launch.resolve import Folders, preferred_sampling, resolve
from runtime.models.quantization.fp8.front import Fp8Quantization
from runtime.models.registry import read_model_spec
from runtime.processes.engine_processes import config_of_replica
from tests.support.fake_checkpoint import write_config
from tests.support.fake_engine import fake_model_config

CPU = Hardware(num_gpus=0, torch_has_cuda=False, cpu_has_bf16=False, num_cores=6)
BF16_CPU = dataclasses.replace(CPU, cpu_has_bf16=True)
GPU = dataclasses.replace(CPU, num_gpus=1, torch_has_cuda=True)
FOLDERS = Folders(Path("/run"), Path("/model"), Path("/tokenizer"))


def choose(hardware=CPU, spec=None, **sections):
    return resolve(ServerConfig(**sections), spec or fake_model_config(), hardware, FOLDERS, seed=7)


@pytest.mark.parametrize(
    ("hardware", "stored", "chosen"),
    [
        (CPU, "bfloat16", "float32"),
        (CPU, "float16", "float32"),
        (CPU, "float32", "float32"),
        (BF16_CPU, "bfloat16", "bfloat16"),
        (BF16_CPU, "float16", "bfloat16"),
        (BF16_CPU, "float32", "float32"),
        (GPU, "float16", "float16"),
        (GPU, "bfloat16", "bfloat16"),
        (GPU, "float32", "bfloat16"),
    ],
)
def test_dtype_follows_checkpoint_and_device(hardware, stored, chosen):
    resolved = choose(hardware, fake_model_config(dtype=stored))
    assert resolved.worker.dtype == chosen
    assert any(line.startswith(f"dtype: {chosen} (") for line in resolved.choices)


def test_an_explicit_dtype_is_kept_and_not_explained():
    config = ServerConfig(model=ModelArgs(dtype="half"))
    resolved = resolve(config, fake_model_config(), GPU, FOLDERS, 7)
    assert resolved.worker.dtype == "float16"
    assert not any(line.startswith("dtype") for line in resolved.choices)


def test_matrices_stay_in_16_bits_where_activations_cannot():
    for stored in ("bfloat16", "float16"):
        chosen = choose(CPU, fake_model_config(dtype=stored))
        assert chosen.worker.model_overrides == {"quantization": "same"}
        assert any("matrices stay in 16 bits" in line for line in chosen.choices)
        # Who names the type gets it, also for what a trainer sends.
        named = ServerConfig(model=ModelArgs(dtype="float32"))
        worker = resolve(named, fake_model_config(dtype=stored), CPU, FOLDERS, 7).worker
        assert worker.model_overrides == {}
    for hardware, stored in ((CPU, "float32"), (BF16_CPU, "bfloat16"), (GPU, "bfloat16")):
        assert not choose(hardware, fake_model_config(dtype=stored)).worker.model_overrides


@pytest.mark.parametrize("name", ["q8_0", "q4_k"])
def test_blocks_of_gguf_are_for_cpus(name):
    config = ServerConfig(model=ModelArgs(quantization=name))
    resolve(config, fake_model_config(), CPU, FOLDERS, 7)
    with pytest.raises(StartupError, match=f"--quantization {name} runs on a CPU only"):
        resolve(config, fake_model_config(), GPU, FOLDERS, 7)
    config = ServerConfig(model=ModelArgs(quantization=name, dtype="half"))
    with pytest.raises(StartupError, match=f"--quantization {name} has no kernels .* float16"):
        resolve(config, fake_model_config(), CPU, FOLDERS, 7)


@pytest.mark.parametrize(
    ("asked", "stored", "kept"),
    [
        ("auto", "bfloat16", "auto"),
        ("bf16", "float32", "bf16"),
        ("bfloat16", "float32", "bf16"),
        ("bf16", "bfloat16", "auto"),
        ("fp8_e4m3", "bfloat16", "fp8_e4m3"),
        ("int8", "float32", "int8"),
    ],
)
def test_keys_and_values_are_kept_as_asked(asked, stored, kept):
    model, kernels = fake_model_config(dtype=stored), KernelArgs(kv_cache_dtype=asked)
    assert choose(BF16_CPU, model, kernels=kernels).worker.kv_cache_dtype == kept
    if kept == "auto":
        bf16 = fake_model_config(dtype="bfloat16")
        assert choose(GPU, bf16, kernels=kernels).worker.kv_cache_dtype == "auto"
        return
    half = fake_model_config(dtype="float16")
    if asked.startswith("fp8"):
        assert choose(GPU, half, kernels=kernels).worker.kv_cache_dtype == kept
        with pytest.raises(StartupError, match="does not work with --attention-backend flash"):
            choose_kv_cache(
                ServerConfig(kernels=kernels), "cuda", "bfloat16", "flashinfer", half, Choices()
            )
        return
    with pytest.raises(StartupError, match=f"--kv-cache-dtype {asked} runs on a CPU only"):
        choose(GPU, half, kernels=kernels)


def test_keys_and_values_follow_the_checkpoint():
    model = fake_model_config(quantization=Fp8Quantization((), kv_cache_dtype="fp8_e4m3"))
    for hardware in (CPU, GPU):
        assert choose(hardware, model).worker.kv_cache_dtype == "fp8_e4m3"
    asked = KernelArgs(kv_cache_dtype="bf16")
    half = dataclasses.replace(model, dtype="bfloat16")
    assert choose(GPU, half, kernels=asked).worker.kv_cache_dtype == "auto"
    # FlashInfer has no kernels for it.
    found = choose_kv_cache(ServerConfig(), "cuda", "bfloat16", "flashinfer", model, Choices())
    assert found == "auto"


@pytest.mark.parametrize("architecture", ["DeepseekV3ForCausalLM", "Qwen3NextForCausalLM"])
def test_attention_without_scales_does_not_follow_the_checkpoint(tmp_path, architecture):
    config = write_config(tmp_path, architectures=[architecture], num_hidden_layers=4)
    spec = read_model_spec(config)
    model = dataclasses.replace(spec, quantization=Fp8Quantization((), kv_cache_dtype="fp8_e4m3"))
    for hardware in (CPU, GPU):
        chosen = choose(hardware, model)
        assert chosen.worker.kv_cache_dtype == "auto"
        assert any(line.startswith("kv_cache_dtype: auto (this model") for line in chosen.choices)
    asked = KernelArgs(kv_cache_dtype="fp8_e4m3")
    assert choose(CPU, model, kernels=asked).worker.kv_cache_dtype == "fp8_e4m3"


def test_vectors_are_made_of_rounded_products_where_that_pays():
    model = dataclasses.replace(fake_model_config(dtype="float32"), gives="vectors")
    chosen = choose(BF16_CPU, model)
    assert chosen.worker.dtype == "float32"
    assert chosen.worker.rounds_products
    assert any(line.startswith("products: bfloat16, summed") for line in chosen.choices)
    narrow = dataclasses.replace(fake_model_config(dtype="bfloat16"), gives="vectors")
    scores = dataclasses.replace(model, gives="scores")
    for hardware, which in ((CPU, model), (BF16_CPU, scores), (BF16_CPU, narrow), (GPU, model)):
        exact = choose(hardware, which)
        assert not exact.worker.rounds_products
        assert not any(line.startswith("products") for line in exact.choices)
    # Who names the type wants its numbers.
    named = ServerConfig(model=ModelArgs(dtype="float32"))
    assert not resolve(named, model, BF16_CPU, FOLDERS, 7).worker.rounds_products


def test_cpu_and_gpu_differ_where_they_should():
    cpu, gpu = choose(CPU).worker, choose(GPU).worker
    assert (cpu.device, gpu.device) == ("cpu", "cuda")
    assert (cpu.chunked_prefill_size, gpu.chunked_prefill_size) == (512, 8192)
    assert (cpu.overlap, gpu.overlap) == (False, True)
    assert cpu.num_threads == 6
    assert cpu.page_size == 16
    assert cpu.random_seed == 7


def test_a_cpu_build_of_torch_does_not_choose_the_gpu():
    assert choose(dataclasses.replace(GPU, torch_has_cuda=False)).worker.device == "cpu"


def test_flashinfer_is_taken_when_asked_for_and_there(monkeypatch):
    asked = KernelArgs(attention_backend="flashinfer")
    installed = ModuleType("flashinfer")
    installed.__spec__ = ModuleSpec("flashinfer", None)
    monkeypatch.setitem(sys.modules, "flashinfer", installed)
    model = fake_model_config(head_dim=128)
    assert choose(GPU, model, kernels=asked).worker.attention_backend == "flashinfer"
    on_cpu = choose(CPU, kernels=asked)
    assert on_cpu.worker.attention_backend == on_cpu.config.kernels.attention_backend == "auto"
    assert "attention_backend: auto (flashinfer needs an NVIDIA device)" in on_cpu.choices
    triton = choose(CPU, kernels=KernelArgs(attention_backend="triton"))
    assert "attention_backend: auto (triton needs an NVIDIA device)" in triton.choices
    experts = choose(CPU, kernels=KernelArgs(moe_runner_backend="triton"))
    assert experts.worker.moe_runner_backend == "auto"
    assert "moe_runner_backend: auto (triton needs an NVIDIA device)" in experts.choices
    on_gpu = choose(GPU, kernels=KernelArgs(moe_runner_backend="triton"))
    assert on_gpu.worker.moe_runner_backend == "triton"
    fixed = KernelArgs(moe_runner_backend="torch", enable_deterministic_inference=True)
    with pytest.raises(StartupError, match="moe-runner-backend torch is not batch-invariant"):
        choose(GPU, kernels=fixed)
    config = ServerConfig(kernels=asked, model=ModelArgs(dtype="float32"))
    with pytest.raises(StartupError, match="no float32; use --dtype bfloat16"):
        resolve(config, fake_model_config(), GPU, FOLDERS, 7)
    with pytest.raises(StartupError, match=r"for heads of 96, .* only for 64, 128, 256;"):
        choose(GPU, fake_model_config(head_dim=96), kernels=asked)
    both = dataclasses.replace(asked, enable_deterministic_inference=True)
    with pytest.raises(StartupError, match="flashinfer is not batch-invariant"):
        choose(GPU, model, kernels=both)
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    with pytest.raises(StartupError, match=r"flashinfer: it is not installed; pip install"):
        choose(GPU, model, kernels=asked)


def test_whole_prefill_is_a_budget_of_one_context():
    worker = choose(scheduling=SchedulingArgs(chunked_prefill_size=-1)).worker
    assert worker.chunked_prefill_size == worker.context_len


def test_a_step_holds_an_image_whose_tokens_see_one_another(tmp_path: Path) -> None:
    values = {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "text_config": {"num_hidden_layers": 2},
        "vision_config": {"image_size": 896, "patch_size": 14},
    }
    (tmp_path / "config.json").write_text(json.dumps(values))
    model = read_model_spec(tmp_path)
    for asked, given in ((1, 256), (256, 256), (300, 300), (-1, 2048)):
        kept = ModelArgs(context_length=2048)
        chosen = choose(
            CPU, model, model=kept, scheduling=SchedulingArgs(chunked_prefill_size=asked)
        )
        assert chosen.worker.chunked_prefill_size == given
        assert any("computed in one step" in line for line in chosen.choices) == (asked == 1)


def test_priority_scheduling_is_a_policy_with_two_names():
    for asked in (
        SchedulingArgs(enable_priority_scheduling=True),
        SchedulingArgs(schedule_policy="priority"),
    ):
        chosen = choose(scheduling=asked)
        assert chosen.worker.schedule_policy == "priority"
        # What is shown agrees with itself, and may be given again.
        shown = chosen.config.scheduling
        assert (shown.schedule_policy, shown.enable_priority_scheduling) == ("priority", True)
        assert choose(scheduling=shown).config.scheduling == shown
    unasked = choose()
    assert unasked.worker.schedule_policy == "fcfs"
    assert not unasked.config.scheduling.enable_priority_scheduling


def test_the_names_default_to_the_path_as_typed():
    config = resolve(
        ServerConfig(model=ModelArgs(model_path="qwen/x")), fake_model_config(), CPU, FOLDERS, 7
    ).config
    assert config.model.tokenizer_path == "qwen/x"
    assert config.model.served_model_name == "qwen/x"


@pytest.mark.parametrize(
    ("limit", "asked", "chosen"),
    [(None, None, 4096), (256, None, 256), (256, 512, 512), (8192, None, 4096)],
)
def test_texts_are_as_long_as_their_folder_says(limit, asked, chosen):
    model = dataclasses.replace(fake_model_config(), text_limit=limit)
    config = ServerConfig(model=ModelArgs(context_length=asked))
    resolved = resolve(config, model, CPU, FOLDERS, seed=7)
    assert resolved.worker.context_len == chosen


def test_deterministic_inference_fixes_the_seed_of_requests_without_one():
    kernels = KernelArgs(enable_deterministic_inference=True)
    resolved = choose(kernels=kernels)
    assert resolved.worker.deterministic
    assert resolved.worker.random_seed == 42
    assert resolved.sampling_defaults["seed"] == 42
    preferred = HttpArgs(preferred_sampling_params='{"sampling_seed": 5}')
    assert choose(kernels=kernels, http=preferred).sampling_defaults["seed"] == 5
    config = ServerConfig(kernels=kernels, model=ModelArgs(random_seed=6))
    chosen = resolve(config, fake_model_config(), CPU, FOLDERS, seed=7)
    assert chosen.sampling_defaults["seed"] == chosen.worker.random_seed == 6
    assert not choose().worker.deterministic
    assert "seed" not in choose().sampling_defaults


@pytest.mark.parametrize(
    "sections",
    [
        {"model": ModelArgs(context_length=4097)},
        {"model": ModelArgs(context_length=0)},
        {"model": ModelArgs(device="cuda")},
        {"http": HttpArgs(port=70000)},
        {"http": HttpArgs(drain_timeout=float("nan"))},
        {"http": HttpArgs(vertex_route="predict")},
        {"http": HttpArgs(vertex_route="/{anything:path}")},
        {"http": HttpArgs(preferred_sampling_params="[]")},
        {"http": HttpArgs(preferred_sampling_params='{"temperature": -1}')},
        {"logging": LoggingArgs(metrics_aliases=["vllm"])},
        {"scheduling": SchedulingArgs(mem_fraction_static=1.5)},
        {"scheduling": SchedulingArgs(chunked_prefill_size=0)},
        {"scheduling": SchedulingArgs(max_queued_requests=-1)},
        {"scheduling": SchedulingArgs(enable_priority_scheduling=True, schedule_policy="lpm")},
        # What the worker would find out after the import of torch, or not survive.
        {"scheduling": SchedulingArgs(max_total_tokens=5)},
        {"scheduling": SchedulingArgs(max_running_requests=10**6)},
        {"kernels": KernelArgs(num_threads=10**4)},
        {"kernels": KernelArgs(enable_deterministic_inference=True, attention_backend="torch")},
        {
            "kernels": KernelArgs(enable_deterministic_inference=True),
            "model": ModelArgs(dtype="half", device="cpu"),
        },
        {"model": ModelArgs(random_seed=2**70)},
        {"http": HttpArgs(api_key="")},
        {"http": HttpArgs(admin_api_key=" ")},
    ],
)
def test_impossible_options_are_refused(sections):
    with pytest.raises(StartupError):
        resolve(ServerConfig(**sections), fake_model_config(), CPU, FOLDERS, 7)


def test_sums_by_nccl_alone_reach_the_worker():
    kernels = KernelArgs(disable_custom_all_reduce=True)
    assert choose(kernels=kernels).worker.disable_custom_all_reduce
    assert not choose().worker.disable_custom_all_reduce


def test_preferred_sampling_keeps_only_what_was_named():
    text = '{"temperature": 0.5, "sampling_seed": 3, "stop": "x"}'
    assert preferred_sampling(text, 100) == {"temperature": 0.5, "seed": 3, "stop": ["x"]}


def test_cpuinfo_flags():
    assert cpu_has_bf16("processor: 0\nflags\t\t: fpu avx512_bf16 sse\n")
    assert cpu_has_bf16("flags : amx_bf16\n")
    assert not cpu_has_bf16("flags : avx512f\nbugs : avx512_bf16\n")
    assert not cpu_has_bf16("")


@pytest.mark.parametrize(
    ("text", "cores"), [("max 100000", None), ("150000 100000", 1.5), ("", None), ("1 0", None)]
)
def test_cgroup_quota(text, cores):
    assert quota_cores(text) == cores


def test_this_machine_has_a_core():
    assert detect_hardware().num_cores >= 1


def test_ranks_share_the_cores():
    model = fake_model_config(num_heads=2, num_kv_heads=2)
    worker = choose(CPU, model, parallel=ParallelArgs(tp_size=2)).worker
    assert (worker.tp_size, worker.num_threads) == (2, 3)


@pytest.mark.parametrize(
    ("hardware", "parallel", "message"),
    [
        (CPU, {"tp_size": 0}, "--tp-size must be at least 1"),
        (CPU, {"tp_size": 3}, "attention heads cannot be shared evenly"),
        (GPU, {"tp_size": 2}, "--tp-size 2 needs 2 GPUs; this machine shows 1"),
        (GPU, {"pp_size": 2}, "--pp-size 2 needs 2 GPUs; this machine shows 1"),
        (CPU, {"dp_size": 0}, r"--dp-size must be in \[1, 64\], got 0"),
        (CPU, {"dp_size": 65}, r"--dp-size must be in \[1, 64\], got 65"),
        (GPU, {"dp_size": 2}, "^--dp-size 2 needs 2 GPUs; this machine shows 1"),
        (
            dataclasses.replace(GPU, num_gpus=3),
            {"tp_size": 1, "dp_size": 4},
            "^--dp-size 4 needs 4 GPUs; this machine shows 3",
        ),
    ],
)
def test_impossible_numbers_of_devices(hardware, parallel, message):
    with pytest.raises(StartupError, match=message):
        choose(hardware, parallel=ParallelArgs(**parallel))


def test_ranks_may_hold_copies_of_a_key_value_head():
    model = fake_model_config(num_heads=8, num_kv_heads=2, intermediate_size=64)
    assert choose(CPU, model, parallel=ParallelArgs(tp_size=4)).worker.tp_size == 4
    odd = fake_model_config(num_heads=12, num_kv_heads=3, intermediate_size=64)
    with pytest.raises(StartupError, match="3 key/value heads"):
        choose(CPU, odd, parallel=ParallelArgs(tp_size=4))


def test_replicas_share_the_cores():
    worker = choose(parallel=ParallelArgs(dp_size=3)).worker
    assert (worker.num_threads, worker.dp_size, worker.gpu_ids) == (2, 3, [])
    assert choose(parallel=ParallelArgs(dp_size=50)).worker.num_threads == 1


def test_replicas_share_out_the_gpus_that_are_visible():
    gpus = dataclasses.replace(GPU, num_gpus=3, gpu_ids=("4", "GPU-a", "7"))
    assert choose(gpus, parallel=ParallelArgs(dp_size=3)).worker.gpu_ids == ["4", "GPU-a", "7"]
    # One replica sees what its parent sees.
    assert choose(gpus).worker.gpu_ids == []
    four = dataclasses.replace(GPU, num_gpus=4, gpu_ids=("4", "GPU-a", "7", "0"))
    model = fake_model_config(num_heads=4, num_kv_heads=2, intermediate_size=64)
    worker = choose(four, model, parallel=ParallelArgs(dp_size=2, tp_size=2)).worker
    each = [config_of_replica(worker, rank, Path(f"/run/{rank}")) for rank in range(2)]
    assert [config.gpu_ids for config in each] == [["4", "GPU-a"], ["7", "0"]]
    assert [(config.dp_rank, config.run_folder) for config in each] == [
        (0, "/run/0"),
        (1, "/run/1"),
    ]


@pytest.mark.parametrize(
    ("num_nodes", "visible", "ids"),
    [
        (2, None, ("0", "1")),
        (8, "3, 1", ("3", "1")),
        (8, "GPU-8932f937", ("GPU-8932f937",)),
        (8, "0,-1,2", ("0",)),
        (8, "", ()),
        (0, "0,1", ()),
    ],
)
def test_gpus_are_those_that_the_driver_would_show(num_nodes, visible, ids):
    assert visible_gpus(num_nodes, visible) == ids


@pytest.mark.parametrize(
    ("scheduling", "asked", "chosen"),
    [
        (SchedulingArgs(), "auto", "cache_aware"),
        (SchedulingArgs(disable_radix_cache=True), "auto", "total_requests"),
        (SchedulingArgs(disable_radix_cache=True), "round_robin", "round_robin"),
    ],
)
def test_the_automatic_balance_needs_a_cache(scheduling, asked, chosen):
    parallel = ParallelArgs(dp_size=2, load_balance_method=asked)
    resolved = choose(scheduling=scheduling, parallel=parallel)
    assert resolved.config.parallel.load_balance_method == chosen


def test_where_structured_output_is_off_it_is_said_what_mends_it(monkeypatch):
    assert choose().why_no_grammars == ""
    asked = choose(kernels=KernelArgs(grammar_backend="none"))
    assert asked.why_no_grammars == "it was started with --grammar-backend none"
    # Nothing is started for a model that gives vectors.
    assert choose(spec=fake_model_config(gives="vectors")).grammar is None
    # The command that brings one, in the answer, in the log and where one was asked for.
    for name in ("xgrammar", "llguidance"):
        monkeypatch.setitem(sys.modules, name, None)
    missing = choose()
    assert missing.grammar is None
    assert "pip install llguidance" in missing.why_no_grammars
    assert any("none (" in line and "pip install llguidance" in line for line in missing.choices)
    for name, command in (("llguidance", "llguidance"), ("xgrammar", r"'headrace\[grammar\]'")):
        with pytest.raises(
            StartupError, match=f"{name}: it is not installed; pip install {command}"
        ):
            choose(kernels=KernelArgs(grammar_backend=name))
