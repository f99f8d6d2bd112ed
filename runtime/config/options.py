"""The server's options and its processes' configurations: frozen dataclasses, created once.

The command line is generated from the fields of the options (`runtime.launch.command_line`). A
field's name is the option's name. `option(...)` has the help text and the allowed values.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from runtime.config.kv_events_config import KVEventsConfig
from runtime.config.lora_options import LoraArgs, LoraLimits
from runtime.config.media_options import MediaArgs
from runtime.config.option_field import option
from runtime.config.page_files_config import PageFilesConfig
from runtime.config.parallel_options import NodeLink, ParallelArgs
from runtime.config.scheduling_options import SchedulingArgs

# Values of the options that choose a parser of chat outputs.
AUTO_PARSER, NO_PARSER = "auto", "none"

_LOG_LEVELS = ("debug", "info", "warning", "error", "critical")


RecorderMode = Literal["stat", "stat_approx", "per_pass", "per_token"]


@dataclass(frozen=True, kw_only=True)
class ModelArgs:
    """Options about the model and its weights."""

    model_path: str | None = option(
        None,
        "Folder, GGUF file or hub id of the model, or `demo`, which is the default: a small model "
        "that `make install` fetches. `demo-toy` and `demo-vision` are bundled.",
        aliases=("--model",),
    )
    tokenizer_path: str | None = option(None, "Folder of the tokenizer; the model's when absent.")
    skip_tokenizer_init: bool = option(
        False, "Load no tokenizer: prompts and outputs are token ids, without text."
    )
    is_embedding: bool = option(
        False,
        "Return embeddings from a model that generates text. Embedding and scoring models need no "
        "flag.",
    )
    load_format: str = option(
        "auto",
        "Where weights come from: safetensors files (also auto) or random values (dummy).",
        choices=("auto", "safetensors", "dummy"),
    )
    model_impl: str = option(
        "auto",
        "What computes the model: headrace is one of Headrace's model families; transformers is "
        "the model's own code in transformers, with Headrace's layers; auto is the family if "
        "there is one.",
        choices=("auto", "headrace", "transformers"),
    )
    dtype: str = option(
        "auto",
        "Type of weights and activations; auto is the checkpoint's type if fast on the device.",
        choices=("auto", "half", "float16", "bfloat16", "float", "float32"),
    )
    quantization: str | None = option(
        None,
        "Quantize weights while they load: to fp8 (E4M3), or on a CPU to q8_0 or q4_k (GGUF's "
        "blocks). A checkpoint that is already quantized needs no option.",
        choices=("none", "fp8", "q8_0", "q4_k"),
    )
    context_length: int | None = option(
        None, "Most tokens of prompt and output together; the model's limit when absent."
    )
    served_model_name: str | None = option(
        None, "Name shown at /v1/models; the model path when absent."
    )
    weight_version: str = option("default", "Label of the weights, returned with every answer.")
    revision: str | None = option(None, "Branch, tag or commit on the hub.")
    weights_root: list[str] = option(
        [],
        "Folders whose models may be loaded while serving (/update_weights_from_disk); the parent "
        "of the model's own folder when absent.",
        metavar="DIR",
    )
    allow_weights_download: bool = option(
        False,
        "Let /update_weights_from_disk name hub ids, and download those that this machine lacks.",
    )
    json_model_override_args: str = option(
        "{}",
        "JSON object of keys that replace those of the model's config.json, such as "
        "'{\"is_matryoshka\": true}'.",
        metavar="JSON",
    )
    trust_remote_code: bool = option(
        False, "Accepted for compatibility; code from a model folder never runs."
    )
    device: str = option("auto", "Where the model runs.", choices=("auto", "cpu", "cuda"))
    random_seed: int | None = option(None, "Seed of dummy weights and of requests without a seed.")


@dataclass(frozen=True, kw_only=True)
class HttpArgs:
    """Options about the HTTP server and its APIs."""

    host: str = option("127.0.0.1", "Address to listen on.")
    port: int = option(30000, "Port to listen on.")
    api_key: str | None = option(
        None,
        "Key that clients must send as a bearer token. The process list shows it, so rather set "
        "the variable HEADRACE_API_KEY, or HEADRACE_API_KEY_FILE to the path of a file with it.",
    )
    admin_api_key: str | None = option(
        None,
        "Key for the routes that change the server. When absent, the API key is valid for them. "
        "Rather set HEADRACE_ADMIN_API_KEY, or HEADRACE_ADMIN_API_KEY_FILE (see --api-key).",
    )
    api_keys_file: str | None = option(
        None,
        "File with further keys, one per line. The clients of such a key share no session, stored "
        "object or cached prefix with others. "
        "Needs --api-key and --admin-api-key.",
    )
    allow_open_admin: bool = option(
        False,
        "Start without a key on an address that other machines reach. These machines may then "
        "change the server.",
    )
    max_connections: int | None = option(
        None, "Most open connections; when absent, what the limit on open files allows."
    )
    ssl_certfile: str | None = option(
        None, "Certificate, with those of its chain, for HTTPS; read again when it changes."
    )
    ssl_keyfile: str | None = option(
        None, "Private key of the certificate; in --ssl-certfile when absent."
    )
    ssl_keyfile_password: str | None = option(
        None,
        "Password of the private key. Rather set HEADRACE_SSL_KEYFILE_PASSWORD, or "
        "HEADRACE_SSL_KEYFILE_PASSWORD_FILE (see --api-key).",
    )
    ssl_ca_certs: str | None = option(
        None, "Certificates that complete the chain of --ssl-certfile; clients send none."
    )
    chat_template: str | None = option(
        None,
        "Chat template: a file, the text, or a name (chatml, llama-3, gemma, qwen3-reranker).",
    )
    split_special_tokens: bool = option(
        False,
        "Tokenize special tokens in chat messages as plain text, so that no message ends a turn. A "
        "request's split_special_tokens overrides this.",
    )
    reasoning_parser: str = option(
        AUTO_PARSER,
        "How reasoning is split from the answer in chat: qwen3, gpt-oss, ...; none; auto "
        "recognises it from the model's templates.",
    )
    tool_call_parser: str = option(
        AUTO_PARSER,
        "How tool calls are read from the answer in chat: hermes, llama3, ...; none; auto "
        "recognises it from the model's templates.",
    )
    enable_cache_report: bool = option(False, "Report cached prompt tokens in `usage`.")
    sampling_defaults: str = option(
        "model",
        "Sampling defaults of chats: the model's generation_config.json, or OpenAI's.",
        choices=("model", "openai"),
    )
    preferred_sampling_params: str | None = option(
        None, "JSON object of sampling parameters for requests that omit them."
    )
    stream_interval: int = option(1, "Tokens between two events of a stream.")
    incremental_streaming_output: bool = option(
        False, "/generate streams disjoint deltas instead of the text so far."
    )
    skip_server_warmup: bool = option(False, "Become ready without a warm-up request.")
    allow_auto_truncate: bool = option(
        False, "Shorten a prompt that is too long instead of refusing it."
    )
    drain_timeout: float = option(60.0, "Seconds that requests may go on after SIGTERM.")
    max_body_mb: float = option(64.0, "Largest request body, MiB.")
    response_store: str | None = option(
        None, "SQLite file that keeps responses of /v1/responses; in memory when absent."
    )
    response_store_mb: float = option(
        128.0, "Most MiB of stored responses, each kept for a day; 0 stores none."
    )
    file_store: str | None = option(
        None,
        "Folder that keeps files and batches (/v1/files, /v1/batches) for the next start; when "
        "absent, they are deleted when the server ends.",
        metavar="DIR",
    )
    file_store_mb: float = option(1024.0, "Most MiB of files and batch answers; 0 turns both off.")
    allow_origins: list[str] = option(
        [], "Web origins that may call this server (CORS).", metavar="ORIGIN"
    )
    fastapi_root_path: str = option("", "Path prefix when behind a proxy.")
    disable_docs: bool = option(False, "Do not serve /docs and /openapi.json.")
    vertex_route: str = option("/vertex_generate", "Path of the route for Vertex AI.")


@dataclass(frozen=True, kw_only=True)
class KernelArgs:
    """Options about kernel implementations."""

    attention_backend: str = option(
        "auto",
        "Attention implementation. flashinfer uses FlashInfer's kernels, compiled at first use, "
        "for prompts and for decode steps without CUDA graphs; auto never selects it.",
        choices=("auto", "cpu", "torch", "triton", "flashinfer"),
    )
    kv_cache_dtype: str = option(
        "auto",
        "Data type of the KV cache; auto is the model's type, or fp8_e4m3 if the checkpoint was "
        "made for it. fp8_e4m3 and fp8_e5m2 take 8 bits. int8 does so on a CPU only; it has a "
        "scale for each head of a token and is the most accurate.",
        choices=("auto", "bf16", "bfloat16", "fp8_e4m3", "fp8_e5m2", "int8"),
    )
    moe_runner_backend: str = option(
        "auto",
        "How experts are computed on a GPU: torch sorts tokens and uses torch's grouped products, "
        "triton uses this project's kernels; auto is triton.",
        choices=("auto", "torch", "triton"),
    )
    grammar_backend: str = option(
        "auto",
        "Library for structured output: auto is xgrammar, or llguidance where xgrammar is not "
        "installed; none refuses such requests.",
        choices=("auto", "xgrammar", "llguidance", "none"),
    )
    disable_cuda_graph: bool = option(False, "Run decode steps without CUDA graphs.")
    disable_custom_all_reduce: bool = option(
        False,
        "Sum the ranks' parts with NCCL alone, also where GPUs of one host can read each other's "
        "memory.",
    )
    enable_deterministic_inference: bool = option(
        False, "Use batch-invariant kernels: a result does not depend on other requests."
    )
    num_threads: int | None = option(
        None, "CPU threads of the model's worker; the physical cores when absent."
    )


@dataclass(frozen=True, kw_only=True)
class LoggingArgs:
    """Options about logs and metrics."""

    log_level: str = option("info", "Lowest level that is logged.", choices=_LOG_LEVELS)
    log_format: str = option(
        "text",
        "Format of the log: text, or one JSON object per line.",
        choices=("text", "json"),
        aliases=("--log-requests-format",),
    )
    expert_distribution_recorder_mode: str | None = option(
        None,
        "What /start_expert_distribution_record keeps of each step; without it that route is off.",
        choices=("stat", "stat_approx", "per_pass", "per_token"),
    )
    expert_distribution_recorder_buffer_size: int = option(
        1000, "How many of the newest steps the record keeps; -1 for all."
    )
    log_level_http: str | None = option(
        None, "Log level of HTTP requests; that of other logs when absent.", choices=_LOG_LEVELS
    )
    log_requests: bool = option(False, "Log one line per finished request.")
    log_requests_level: int = option(
        0,
        "Content of the line of --log-requests: 0 numbers; 1 also sampling parameters; 2 also the "
        "beginning of prompt and output; 3 all of both.",
    )
    torch_profiler_dir: str | None = option(
        None,
        "Folder for profiles; a request's output_dir lies inside it. When absent, this user's "
        "folder among the temporary files.",
        aliases=("--profile-root",),
    )
    otlp_traces_endpoint: str | None = option(
        None,
        "URL or host:port of an OpenTelemetry collector that gets a trace of each request, as OTLP "
        "over HTTP. Needs the extra otel.",
        metavar="URL",
    )
    enable_metrics: bool = option(False, "Serve Prometheus metrics at /metrics.")
    metrics_aliases: list[str] = option(
        [],
        "Also show load and KV usage under the names that other routers read: vllm (llm-d, "
        "production-stack), aibrix.",
        choices=("vllm", "aibrix"),
    )
    decode_log_interval: int = option(
        40, "Decode steps between two throughput lines; they are at least 5 seconds of work apart."
    )
    watchdog_timeout: float = option(
        300.0,
        "Seconds after which a worker or detokenizer that makes no progress while requests wait is "
        "replaced.",
    )


@dataclass(frozen=True, kw_only=True)
class ServerConfig:
    """All options of the server, by section; `resolve` replaces each `auto` that it can decide."""

    model: ModelArgs = field(default_factory=ModelArgs)
    http: HttpArgs = field(default_factory=HttpArgs)
    media: MediaArgs = field(default_factory=MediaArgs)
    scheduling: SchedulingArgs = field(default_factory=SchedulingArgs)
    lora: LoraArgs = field(default_factory=LoraArgs)
    parallel: ParallelArgs = field(default_factory=ParallelArgs)
    kernels: KernelArgs = field(default_factory=KernelArgs)
    logging: LoggingArgs = field(default_factory=LoggingArgs)


@dataclass(frozen=True, kw_only=True)
class WorkerConfig:
    """The configuration of the worker process, which reads it from its stdin.

    Fields that are not listed have the meaning of the option with the same name.

    Attributes:
        model_folder: local folder with `config.json` and the weights.
        dtype: `float32`, `float16` or `bfloat16`.
        context_len: most tokens of a request, prompt and output together.
        weights_folder: folder of the weights, if it is not `model_folder`.
        model_overrides: keys that replace those of `config.json`.
        generation: number of workers that this front process has started before.
        deterministic: use batch-invariant kernels only.
        rounds_products: multiply float32 matrices in bfloat16 if such kernels exist.
        tp_size: number of ranks (processes) that share each layer; this one is rank 0.
        ep_size: 1; or `tp_size` if each rank holds whole experts.
        dp_size: number of replicas on this machine.
        dp_rank: index of this replica.
        gpu_ids: the visible GPUs, as in `CUDA_VISIBLE_DEVICES`; empty for all.
        node: addresses of this node and of node 0; `None` if the worker is on one node.
        lora: limits on LoRA adapters; `None` if there are none.
        kv_events: where events about the prefix cache are published; `None` for nowhere.
        pp_size: number of pipeline stages, each of `tp_size` ranks.
        host_pool_ratio: number of pages in host memory for each page of the pool; 0 for none.
        page_files: files as the third tier of the prefix cache; `None` for none.
    """

    run_folder: str
    generation: int
    model_folder: str
    load_format: str
    dtype: str
    device: str
    context_len: int
    eos_token_ids: list[int]
    random_seed: int
    mem_fraction_static: float | None
    max_total_tokens: int | None
    max_running_requests: int
    max_queued_requests: int | None
    chunked_prefill_size: int
    schedule_policy: str
    page_size: int
    disable_radix_cache: bool
    overlap: bool
    attention_backend: str
    kv_cache_dtype: str = "auto"
    moe_runner_backend: str = "auto"
    num_threads: int
    disable_cuda_graph: bool = False
    disable_custom_all_reduce: bool = False
    deterministic: bool = False
    rounds_products: bool = False
    enable_return_hidden_states: bool = False
    enable_return_routed_experts: bool = False
    tp_size: int = 1
    dp_size: int = 1
    dp_rank: int = 0
    gpu_ids: list[str] = field(default_factory=list)
    node: NodeLink | None = None
    weights_folder: str | None = None
    model_overrides: dict[str, Any] = field(default_factory=dict)
    log_level: str
    log_format: str = "text"
    decode_log_interval: int
    stream_interval: int
    is_embedding: bool = False
    ep_size: int = 1
    expert_recorder_mode: RecorderMode | None = None
    expert_recorder_size: int = 1000
    tokenizer_folder: str = ""
    grammar_backend: str = "none"
    image_cache_mb: int = 256
    lora: LoraLimits | None = None
    kv_events: KVEventsConfig | None = None
    max_mamba_cache_size: int | None = None
    pp_size: int = 1
    swa_full_tokens_ratio: float | None = None
    host_pool_ratio: float = 0.0
    page_files: PageFilesConfig | None = None

    @property
    def num_ranks(self) -> int:
        """Number of ranks of this worker on all nodes."""
        return self.tp_size * self.pp_size

    @property
    def num_local_ranks(self) -> int:
        """Number of ranks of this worker on each node."""
        return self.num_ranks // (1 if self.node is None else self.node.num_nodes)


@dataclass(frozen=True, kw_only=True)
class RankConfig:
    """The configuration of a rank above 0, which the rank's process reads from its stdin."""

    worker: WorkerConfig
    rank: int


@dataclass(frozen=True, kw_only=True)
class DetokenizerConfig:
    """The configuration of the detokenizer process, which reads it from its stdin."""

    run_folder: str
    generation: int
    scheduler_generation: int
    tokenizer_folder: str
    log_level: str
    log_format: str = "text"


# Most bytes of compiled grammars in the caches of the front process and of the worker.
GRAMMAR_CACHE_BYTES = 64 * 2**20


@dataclass(frozen=True, kw_only=True)
class GrammarConfig:
    """The configuration of the grammar compiler's process, which reads it from its stdin.

    Attributes:
        vocab_size: width of the logits.
        starts_at_once: whether the process starts with the server, or with the first grammar.
        compile_timeout_s: a grammar whose compilation takes longer is refused, seconds.
        max_parallel: most grammars that are compiled at a time.
        cache_bytes: most bytes of compiled grammars that the front process keeps.
    """

    run_folder: str
    generation: int
    backend: str
    tokenizer_folder: str
    vocab_size: int
    eos_token_ids: list[int]
    log_level: str
    log_format: str = "text"
    starts_at_once: bool = True
    compile_timeout_s: float = 1.8
    max_parallel: int = 4
    cache_bytes: int = GRAMMAR_CACHE_BYTES
