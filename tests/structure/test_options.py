"""The command line is a promise: a change of options or defaults must be explicit here."""

import dataclasses

from runtime.launch.command_line import option_name, sections

OPTIONS = """
[model]
--model-path --model = None
--tokenizer-path = None
--skip-tokenizer-init = False
--is-embedding = False
--load-format = auto
--model-impl = auto
--dtype = auto
--quantization = None
--context-length = None
--served-model-name = None
--weight-version = default
--revision = None
--weights-root = []
--allow-weights-download = False
--json-model-override-args = {}
--trust-remote-code = False
--device = auto
--random-seed = None
[http]
--host = 127.0.0.1
--port = 30000
--api-key = None
--admin-api-key = None
--api-keys-file = None
--allow-open-admin = False
--max-connections = None
--ssl-certfile = None
--ssl-keyfile = None
--ssl-keyfile-password = None
--ssl-ca-certs = None
--chat-template = None
--split-special-tokens = False
--reasoning-parser = auto
--tool-call-parser = auto
--enable-cache-report = False
--sampling-defaults = model
--preferred-sampling-params = None
--stream-interval = 1
--incremental-streaming-output = False
--skip-server-warmup = False
--allow-auto-truncate = False
--drain-timeout = 60.0
--max-body-mb = 64.0
--response-store = None
--response-store-mb = 128.0
--file-store = None
--file-store-mb = 1024.0
--allow-origins = []
--fastapi-root-path =
--disable-docs = False
--vertex-route = /vertex_generate
[media]
--allow-media-domains = []
--allow-media-urls = False
--media-root = []
--limit-mm-data-per-request = None
[scheduling]
--mem-fraction-static = None
--max-total-tokens = None
--max-running-requests = None
--max-queued-requests = None
--max-resumes = 2
--chunked-prefill-size = None
--image-cache-mb = 256
--max-mamba-cache-size = None
--swa-full-tokens-ratio = None
--schedule-policy = fcfs
--enable-priority-scheduling = False
--enable-return-hidden-states = False
--enable-return-routed-experts = False
--page-size = None
--disable-radix-cache = False
--enable-hierarchical-cache = False
--hicache-ratio = 2.0
--hicache-storage-backend = None
--hicache-storage-backend-extra-config = None
--kv-events-config = None
--disable-overlap-schedule = False
[lora]
--enable-lora = False
--lora-paths = []
--max-loras-per-batch = 8
--max-loaded-loras = None
--max-lora-rank = None
--lora-target-modules = []
--lora-eviction-policy = lru
[parallel]
--tp-size --tensor-parallel-size --tp = 1
--pp-size --pipeline-parallel-size --pp = 1
--dp-size --data-parallel-size --dp = 1
--ep-size --expert-parallel-size --ep = 1
--load-balance-method = auto
--nnodes = 1
--node-rank = 0
--dist-init-addr = None
--dist-key = None
[kernels]
--attention-backend = auto
--kv-cache-dtype = auto
--moe-runner-backend = auto
--grammar-backend = auto
--disable-cuda-graph = False
--disable-custom-all-reduce = False
--enable-deterministic-inference = False
--num-threads = None
[logging]
--log-level = info
--log-format --log-requests-format = text
--expert-distribution-recorder-mode = None
--expert-distribution-recorder-buffer-size = 1000
--log-level-http = None
--log-requests = False
--log-requests-level = 0
--torch-profiler-dir --profile-root = None
--otlp-traces-endpoint = None
--enable-metrics = False
--metrics-aliases = []
--decode-log-interval = 40
--watchdog-timeout = 300.0
"""


def test_options_and_defaults_are_the_listed_ones() -> None:
    lines = []
    for section, kind in sections():
        lines.append(f"[{section}]")
        for field in dataclasses.fields(kind):
            made = field.default_factory
            default = field.default if made is dataclasses.MISSING else made()
            names = " ".join((option_name(field.name), *field.metadata["aliases"]))
            lines.append(f"{names} = {default}".rstrip())
    assert lines == OPTIONS.strip().splitlines()


def test_the_command_line_stays_readable() -> None:
    assert sum(len(dataclasses.fields(kind)) for _, kind in sections()) <= 112
