"""Turns options into the processes' configurations, and makes the automatic choices."""

from __future__ import annotations

import dataclasses
import json
import os
import re
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import cast

import msgspec

from runtime.checkpoint.model_spec import ModelSpec
from runtime.checkpoint.weight_roots import default_root
from runtime.config.kv_events_config import KVEventsConfig
from runtime.config.options import (
    AUTO_PARSER,
    NO_PARSER,
    DetokenizerConfig,
    GrammarConfig,
    RecorderMode,
    ServerConfig,
    WorkerConfig,
)
from runtime.config.scheduling_options import SchedulingArgs
from runtime.errors import InvalidRequest, StartupError
from runtime.launch.adapters import GivenAdapters
from runtime.launch.defaults import (
    Choices,
    check_experts,
    check_quantization,
    choose_context_len,
    choose_dtype,
    choose_experts_backend,
    choose_grammars,
    choose_kv_cache,
    keeps_16_bits,
    rounds_products,
)
from runtime.launch.hardware import Hardware
from runtime.launch.node_options import MAX_NODES, check_nodes, check_ranks, node_link
from runtime.launch.stage_options import check_stages
from runtime.launch.tier_options import host_pool_ratio, page_files
from runtime.models.quantization.registry import SAME, as_override
from runtime.requests.sampling_params import SamplingFields, resolve_sampling

DEFAULT_PAGE_SIZE = 16
MAX_PORT = 65535
# More GPUs than a machine has: a typing error must not start a thousand processes.
MAX_REPLICAS = 64
# The seed if none is given, as in the reference server.
DETERMINISTIC_SEED = 42
# The head sizes that FlashInfer's FlashAttention-2 and FlashAttention-3 kernels both support.
_FLASHINFER_HEAD_DIMS = (64, 128, 256)
# Braces are not allowed, because the web framework would read them as a path parameter.
_ROUTE = re.compile(r"/[A-Za-z0-9._:/@-]+")
# Attention back ends that run on one kind of device only.
ATTENTION_DEVICES = {"cpu": "cpu", "triton": "cuda"}
# Attention back ends with a batch-invariant form.
INVARIANT_BACKENDS = ("cpu", "triton")
# Memory for this many requests is allocated at the start.
MAX_RUNNING_REQUESTS = 65536
# Memory for this many slots of recurrent states is allocated at the start.
MAX_STATE_SLOTS = 2**20


@dataclass(frozen=True)
class Folders:
    """The folders of an engine: for its sockets (`run`), its model and its tokenizer."""

    run: Path
    model: Path
    tokenizer: Path


@dataclass(frozen=True)
class Resolved:
    """The configuration of every process, with all automatic choices made.

    Attributes:
        config: the options with every choice filled in; shown at `/server_info`.
        worker: configuration of the worker process.
        detokenizer: configuration of the detokenizer process.
        grammar: configuration of the grammar compiler; `None` if structured output is off.
        why_no_grammars: why structured output is off and how to turn it on; empty if it is on.
        sampling_defaults: checked sampling parameters for requests that omit them, by native name.
        choices: lines of the form "name: value (reason)", for the log.
    """

    config: ServerConfig
    worker: WorkerConfig
    detokenizer: DetokenizerConfig
    grammar: GrammarConfig | None
    why_no_grammars: str
    sampling_defaults: dict[str, object]
    choices: list[str]


def resolve(
    config: ServerConfig,
    model: ModelSpec,
    hardware: Hardware,
    folders: Folders,
    seed: int,
    adapters: GivenAdapters = GivenAdapters(None),
) -> Resolved:
    """Make all automatic choices, and return the processes' configurations.

    Args:
        config: the options as parsed.
        model: the model's numbers from its `config.json`.
        hardware: the facts about this machine.
        folders: the folders of the model, the tokenizer and the sockets.
        seed: the random seed if the options set none.
        adapters: the checked options about LoRA adapters.

    Raises:
        StartupError: an option cannot be satisfied; the message says what to do instead.
    """
    check_options(config)
    choices = Choices()
    device = _device(config, hardware, choices)
    dtype = choose_dtype(config, model, device, hardware, choices)
    check_quantization(config, device, dtype)
    overrides = dict(model.overrides)
    if keeps_16_bits(config, model, device, dtype):
        overrides |= as_override(SAME)
    context_len = choose_context_len(config, model, choices)
    scheduling = config.scheduling
    chunk = _prefill_chunk(scheduling, model, device, choices)
    max_running = scheduling.max_running_requests
    if max_running is None:
        size = 64 if device == "cpu" else 256
        max_running = choices.pick("max_running_requests", size, f"default for {device}")
    is_rounded = rounds_products(config, model, device, dtype, hardware, choices)
    page_size = scheduling.page_size or choices.pick("page_size", DEFAULT_PAGE_SIZE, "default")
    policy = _schedule_policy(scheduling)
    attention = _attention_backend(config, device, dtype, model.head_dims, choices)
    experts = choose_experts_backend(config, device, choices)
    _check_fit(config, device, page_size, attention)
    _check_deterministic(config, device, dtype)
    tp_size, dp_size = config.parallel.tp_size, config.parallel.dp_size
    model.check(tp_size, deterministic=config.kernels.enable_deterministic_inference)
    check_ranks(config.parallel, model, device, hardware)
    check_stages(config, model)
    threads = config.kernels.num_threads
    if threads is None:
        num_ranks = config.parallel.num_ranks * dp_size // config.parallel.nnodes
        reason = "physical cores this process may use"
        if num_ranks > 1:
            reason += f", shared by {num_ranks} processes"
        threads = choices.pick("num_threads", max(1, hardware.num_cores // num_ranks), reason)
    balance = config.parallel.load_balance_method
    if balance == "auto":
        balance = "total_requests" if scheduling.disable_radix_cache else "cache_aware"
        if dp_size > 1:
            reason = "no prefix cache to route by" if balance != "cache_aware" else "default"
            choices.pick("load_balance_method", balance, reason)
    overlap = not scheduling.disable_overlap_schedule
    if overlap and device == "cpu":
        overlap = choices.pick("overlap_schedule", False, "the CPU has nothing to overlap with")
    if overlap and config.parallel.pp_size > 1:
        overlap = choices.pick("overlap_schedule", False, "stages overlap steps")
    grammars = choose_grammars(config, model)
    choices.pick("grammar_backend", grammars.backend, grammars.reason)
    deterministic = config.kernels.enable_deterministic_inference
    random_seed = _random_seed(config, seed, choices)
    resolved = dataclasses.replace(
        config,
        model=dataclasses.replace(
            config.model,
            device=device,
            dtype=dtype,
            context_length=context_len,
            tokenizer_path=config.model.tokenizer_path or config.model.model_path,
            served_model_name=config.model.served_model_name or config.model.model_path,
            random_seed=random_seed,
            weights_root=config.model.weights_root or [str(default_root(folders.model))],
        ),
        scheduling=dataclasses.replace(
            scheduling,
            chunked_prefill_size=chunk,
            max_running_requests=max_running,
            schedule_policy=policy,
            enable_priority_scheduling=policy == "priority",
            page_size=page_size,
            disable_overlap_schedule=not overlap,
        ),
        lora=adapters.settle(config, device, choices),
        parallel=dataclasses.replace(config.parallel, load_balance_method=balance),
        kernels=dataclasses.replace(
            config.kernels,
            num_threads=threads,
            attention_backend=attention,
            moe_runner_backend=experts,
            grammar_backend=grammars.backend,
        ),
    )
    recorder = config.logging.expert_distribution_recorder_mode
    check_experts(config, model)
    worker = WorkerConfig(
        run_folder=str(folders.run),
        generation=0,
        model_folder=str(folders.model),
        load_format=config.model.load_format,
        dtype=dtype,
        device=device,
        context_len=context_len,
        eos_token_ids=list(model.eos_token_ids),
        random_seed=random_seed,
        mem_fraction_static=scheduling.mem_fraction_static,
        max_total_tokens=scheduling.max_total_tokens,
        max_running_requests=max_running,
        max_queued_requests=scheduling.max_queued_requests,
        # The scheduler has only a limit per step; a limit of the whole context splits no prompt.
        chunked_prefill_size=context_len if chunk == -1 else chunk,
        schedule_policy=policy,
        page_size=page_size,
        disable_radix_cache=scheduling.disable_radix_cache,
        overlap=overlap,
        attention_backend=attention,
        kv_cache_dtype=choose_kv_cache(config, device, dtype, attention, model, choices),
        moe_runner_backend=experts,
        disable_cuda_graph=config.kernels.disable_cuda_graph,
        disable_custom_all_reduce=config.kernels.disable_custom_all_reduce,
        deterministic=deterministic,
        rounds_products=is_rounded,
        num_threads=threads,
        tp_size=tp_size,
        dp_size=dp_size,
        node=node_link(config.parallel),
        gpu_ids=list(hardware.gpu_ids) if device == "cuda" and dp_size > 1 else [],
        log_level=config.logging.log_level,
        log_format=config.logging.log_format,
        decode_log_interval=config.logging.decode_log_interval,
        enable_return_hidden_states=scheduling.enable_return_hidden_states,
        enable_return_routed_experts=scheduling.enable_return_routed_experts,
        stream_interval=config.http.stream_interval,
        tokenizer_folder=str(folders.tokenizer),
        grammar_backend=grammars.backend,
        is_embedding=config.model.is_embedding,
        model_overrides=overrides,
        ep_size=config.parallel.ep_size,
        expert_recorder_mode=cast("RecorderMode | None", recorder),
        expert_recorder_size=config.logging.expert_distribution_recorder_buffer_size,
        image_cache_mb=scheduling.image_cache_mb,
        lora=adapters.limits,
        kv_events=KVEventsConfig.parse(scheduling.kv_events_config),
        max_mamba_cache_size=scheduling.max_mamba_cache_size,
        pp_size=config.parallel.pp_size,
        swa_full_tokens_ratio=scheduling.swa_full_tokens_ratio,
        host_pool_ratio=host_pool_ratio(config, model),
        page_files=page_files(config, model),
    )
    detokenizer = DetokenizerConfig(
        run_folder=str(folders.run),
        generation=0,
        scheduler_generation=0,
        tokenizer_folder="" if config.model.skip_tokenizer_init else str(folders.tokenizer),
        log_level=config.logging.log_level,
        log_format=config.logging.log_format,
    )
    grammar = None
    if grammars.backend != "none":
        grammar = GrammarConfig(
            run_folder=str(folders.run),
            generation=0,
            backend=grammars.backend,
            tokenizer_folder=str(folders.tokenizer),
            vocab_size=model.vocab_size,
            eos_token_ids=list(model.eos_token_ids),
            log_level=config.logging.log_level,
            log_format=config.logging.log_format,
            starts_at_once=device != "cpu",
        )
    defaults = preferred_sampling(config.http.preferred_sampling_params, model.vocab_size)
    if deterministic:
        # A seed drawn when a request arrives would depend on the earlier requests.
        defaults.setdefault("seed", random_seed)
    return Resolved(
        resolved,
        worker,
        detokenizer,
        grammar,
        grammars.why_none,
        defaults,
        choices.lines,
    )


def _schedule_policy(scheduling: SchedulingArgs) -> str:
    # Two options set the policy. Requests of equal priority run in the order of arrival.
    return "priority" if scheduling.enable_priority_scheduling else scheduling.schedule_policy


def _attention_backend(
    config: ServerConfig, device: str, dtype: str, head_dims: frozenset[int], choices: Choices
) -> str:
    asked = config.kernels.attention_backend
    if asked in ("flashinfer", "triton") and device != "cuda":
        # Command lines that were written for a GPU also work on a CPU.
        return str(choices.pick("attention_backend", "auto", f"{asked} needs an NVIDIA device"))
    if asked != "flashinfer":
        return asked
    if dtype == "float32":
        raise StartupError("--attention-backend flashinfer has no float32; use --dtype bfloat16.")
    for head_dim in sorted(head_dims.difference(_FLASHINFER_HEAD_DIMS)):
        known = ", ".join(map(str, _FLASHINFER_HEAD_DIMS))
        raise StartupError(
            f"--attention-backend flashinfer has no kernels for heads of {head_dim}, as this model "
            f"has, only for {known}; omit the option."
        )
    if find_spec("flashinfer") is None:
        raise StartupError(
            "--attention-backend flashinfer: it is not installed; pip install 'headrace[cuda]', "
            "or omit the option."
        )
    return asked


def _prefill_chunk(
    scheduling: SchedulingArgs, model: ModelSpec, device: str, choices: Choices
) -> int:
    """Return the most prompt tokens of a step; -1 for whole prompts."""
    name, chunk = "chunked_prefill_size", scheduling.chunked_prefill_size
    if chunk is None:
        if device == "cpu":
            chunk = choices.pick(name, 512, "keeps CPU steps short and streams smooth")
        else:
            chunk = choices.pick(name, 8192, "fills the GPU, keeps streams smooth")
    if model.vision is not None and model.vision.is_bidirectional:
        least = model.vision.max_tokens
        if 0 < chunk < least:
            chunk = choices.pick(name, least, "an image's tokens are computed in one step")
    return chunk


def check_options(config: ServerConfig) -> None:
    """Refuse invalid values of options before anything is loaded.

    Raises:
        StartupError: the first such option; the message is one line.
    """
    _check_bounds(config)
    check_nodes(config.parallel, config.lora)
    KVEventsConfig.parse(config.scheduling.kv_events_config, config.parallel.dp_size)
    http, scheduling = config.http, config.scheduling
    parsers = {http.reasoning_parser, http.tool_call_parser}
    if config.model.skip_tokenizer_init and not parsers <= {None, AUTO_PARSER, NO_PARSER}:
        raise StartupError("--reasoning-parser and --tool-call-parser need a tokenizer.")
    chunk = scheduling.chunked_prefill_size
    if chunk is not None and chunk != -1 and chunk < 1:
        raise StartupError(f"--chunked-prefill-size must be -1 or at least 1, got {chunk}.")
    if scheduling.enable_priority_scheduling and scheduling.schedule_policy == "lpm":
        raise StartupError(
            "--enable-priority-scheduling and --schedule-policy lpm are two orders of waiting "
            "requests; give one of them."
        )
    share = scheduling.mem_fraction_static
    if share is not None and not 0.0 < share < 1.0:
        raise StartupError(f"--mem-fraction-static must be between 0 and 1, got {share}.")
    ratio = scheduling.swa_full_tokens_ratio
    if ratio is not None and not 0.0 < ratio <= 1.0:
        raise StartupError(f"--swa-full-tokens-ratio must be above 0 and at most 1, got {ratio}.")
    for name, seconds in (
        ("--drain-timeout", http.drain_timeout),
        ("--max-body-mb", http.max_body_mb),
        ("--watchdog-timeout", config.logging.watchdog_timeout),
    ):
        if not seconds > 0:
            raise StartupError(f"{name} must be above 0, got {seconds}.")
    if config.logging.metrics_aliases and not config.logging.enable_metrics:
        raise StartupError("--metrics-aliases needs --enable-metrics.")
    if not _ROUTE.fullmatch(http.vertex_route):
        raise StartupError(
            f"--vertex-route must be a path such as /predict, got {http.vertex_route!r}."
        )
    for name, key in (("--api-key", http.api_key), ("--admin-api-key", http.admin_api_key)):
        if key is not None and not key.strip():
            # An environment variable is most likely unset. The server would accept all clients.
            raise StartupError(f"{name} is empty; omit it for a server without a key.")


def _check_bounds(config: ServerConfig) -> None:
    http, scheduling, model = config.http, config.scheduling, config.model
    num_cpus = os.cpu_count() or 1
    bounds: dict[str, tuple[int | None, int, int | None]] = {
        "--port": (http.port, 0, MAX_PORT),
        "--max-connections": (http.max_connections, 1, None),
        "--stream-interval": (http.stream_interval, 1, None),
        "--max-total-tokens": (scheduling.max_total_tokens, 1, None),
        "--max-running-requests": (scheduling.max_running_requests, 1, MAX_RUNNING_REQUESTS),
        "--max-queued-requests": (scheduling.max_queued_requests, 0, None),
        "--max-resumes": (scheduling.max_resumes, 0, None),
        "--image-cache-mb": (scheduling.image_cache_mb, 0, None),
        "--page-size": (scheduling.page_size, 1, None),
        "--max-mamba-cache-size": (scheduling.max_mamba_cache_size, 3, MAX_STATE_SLOTS),
        "--context-length": (model.context_length, 1, None),
        "--tp-size": (config.parallel.tp_size, 1, None),
        "--pp-size": (config.parallel.pp_size, 1, None),
        "--dp-size": (config.parallel.dp_size, 1, MAX_REPLICAS),
        "--nnodes": (config.parallel.nnodes, 1, MAX_NODES),
        "--node-rank": (config.parallel.node_rank, 0, config.parallel.nnodes - 1),
        "--random-seed": (model.random_seed, -(2**63), 2**63 - 1),
        # More threads than CPUs would compete for the same cores.
        "--num-threads": (config.kernels.num_threads, 1, num_cpus),
        "--decode-log-interval": (config.logging.decode_log_interval, 1, None),
        "--log-requests-level": (config.logging.log_requests_level, 0, 3),
    }
    for name, (value, least, most) in bounds.items():
        if value is None or (value >= least and (most is None or value <= most)):
            continue
        wanted = f"at least {least}" if most is None else f"in [{least}, {most}]"
        raise StartupError(f"{name} must be {wanted}, got {value}.")


def _check_fit(config: ServerConfig, device: str, page_size: int, backend: str) -> None:
    """Refuse options with which the worker could not start, before the worker imports torch."""
    pool = config.scheduling.max_total_tokens
    if pool is not None and pool < page_size:
        raise StartupError(
            f"--max-total-tokens {pool} is less than one page of {page_size} tokens."
        )
    runs_on = ATTENTION_DEVICES.get(backend, device)
    if runs_on != device:
        raise StartupError(
            f"--attention-backend {backend} runs on {runs_on}, the model on {device}; "
            "omit the option for the automatic choice."
        )


def _check_deterministic(config: ServerConfig, device: str, dtype: str) -> None:
    """Refuse options that have no batch-invariant kernels, if these are required."""
    if not config.kernels.enable_deterministic_inference:
        return
    option = "--enable-deterministic-inference"
    backend = config.kernels.attention_backend
    if backend not in ("auto", *INVARIANT_BACKENDS):
        raise StartupError(
            f"{option}: --attention-backend {backend} is not batch-invariant; omit that option "
            f"or use one of {', '.join(INVARIANT_BACKENDS)}."
        )
    if config.kernels.moe_runner_backend == "torch" and device == "cuda":
        raise StartupError(f"{option}: --moe-runner-backend torch is not batch-invariant.")
    if device == "cpu" and dtype == "float16":
        raise StartupError(
            f"{option}: float16 is not batch-invariant on the CPU; use --dtype bfloat16 or float32."
        )


def preferred_sampling(text: str | None, vocab_size: int) -> dict[str, object]:
    """Return the checked sampling parameters of `--preferred-sampling-params`, by native name.

    `text` is a JSON object with the keys of `sampling_params`; `None` for no parameters.

    Raises:
        StartupError: the text is not such an object, or a value is out of bounds.
    """
    if not text:
        return {}
    try:
        fields = msgspec.json.decode(text.encode(), type=SamplingFields)
        params = resolve_sampling(fields, {}, vocab_size)
    except (msgspec.DecodeError, InvalidRequest) as error:
        raise StartupError(f"--preferred-sampling-params: {error}") from None
    if params.grammar is not None:
        raise StartupError(
            f"--preferred-sampling-params: {params.grammar.kind} can only come with a request."
        )
    named = set(json.loads(text))
    renamed = {"sampling_seed": "seed"}
    keys = (renamed.get(name, name) for name in named)
    return {key: getattr(params, key) for key in keys if key in params.__struct_fields__}


def _device(config: ServerConfig, hardware: Hardware, choices: Choices) -> str:
    asked = config.model.device
    if asked == "cuda" and not hardware.num_gpus:
        raise StartupError("--device cuda: this machine shows no NVIDIA device.")
    if asked == "cuda" and not hardware.torch_has_cuda:
        raise StartupError("--device cuda: the installed torch is a build without CUDA.")
    if asked != "auto":
        return asked
    if not hardware.num_gpus:
        return str(choices.pick("device", "cpu", "no NVIDIA device found"))
    if not hardware.torch_has_cuda:
        return str(choices.pick("device", "cpu", "the installed torch is a build without CUDA"))
    return str(choices.pick("device", "cuda", f"{hardware.num_gpus} NVIDIA device(s) found"))


def _random_seed(config: ServerConfig, drawn: int, choices: Choices) -> int:
    asked = config.model.random_seed
    if asked is not None:
        return asked
    if config.kernels.enable_deterministic_inference:
        return int(choices.pick("random_seed", DETERMINISTIC_SEED, "deterministic inference"))
    return int(choices.pick("random_seed", drawn, "drawn at launch"))
