"""Flags of the reference server (SGLang) that this server lacks: some are ignored, some refused.

A flag that only chooses a kernel, a speed-up or a log detail is ignored with one warning line, so
existing command lines work. A flag that changes behaviour is refused with a reason, unless its
value is the one that this server has anyway.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ReferenceFlag:
    """A flag of the reference server.

    Attributes:
        name: the flag, with its dashes.
        takes_value: whether the flag has a value; if not, it is a switch.
        refusal: why the flag is refused; `None` if it is ignored.
        neutral: values that ask for nothing. With such a value the flag is ignored silently.
    """

    name: str
    takes_value: bool
    refusal: str | None = None
    neutral: tuple[str, ...] = ()


_IGNORED_SWITCHES = """
    --enable-lora-overlap-loading
    --delete-ckpt-after-loading --enable-mixed-chunk --enable-p2p-check
    --disable-cuda-graph-padding --enable-torch-compile --sleep-on-idle
    --enable-nccl-nvls --enable-symm-mem --disable-flashinfer-cutlass-moe-fp4-allgather
    --enable-flashinfer-allreduce-fusion --triton-attention-reduce-in-fp32 --show-time-cost
    --disable-outlines-disk-cache --enable-metrics-for-all-schedulers --disable-fast-image-processor
    --enable-profile-cuda-graph --enable-cudagraph-gc --collect-tokens-histogram
    --flashinfer-mla-disable-ragged --disable-chunked-prefix-cache --enable-tokenizer-batch-encode
    --disable-shared-experts-fusion --enable-single-batch-overlap --enable-two-batch-overlap
    --enable-memory-saver --enable-weights-cpu-backup --enable-ssl-refresh --enable-multimodal
    --enable-trace
"""

_IGNORED_VALUES = """
    --tokenizer-mode --model-loader-extra-config --download-dir --warmups
    --max-prefill-tokens --schedule-conservativeness --radix-eviction-policy
    --num-continuous-decode-steps --dist-timeout --nccl-port
    --prefill-attention-backend --decode-attention-backend --mm-attention-backend
    --sampling-backend --cuda-graph-max-bs --cuda-graph-bs
    --cuda-graph-max-bs-decode --cuda-graph-bs-decode --torch-compile-max-bs
    --moe-a2a-backend --deepep-mode --fp8-gemm-backend
    --soft-watchdog-timeout --crash-dump-folder --log-requests-target
    --bucket-time-to-first-token --bucket-inter-token-latency
    --bucket-e2e-request-latency --prompt-tokens-buckets --generation-tokens-buckets
    --triton-attention-num-kv-splits --mm-max-concurrent-calls --tokenizer-worker-num
    --speculative-algorithm --speculative-draft-model-path --speculative-num-steps
    --speculative-eagle-topk --speculative-num-draft-tokens --speculative-token-map
    --gc-warning-threshold-secs --lora-backend --max-lora-chunk-size
    --eplb-rebalance-num-iterations
    --constrained-json-whitespace-pattern
"""

_REFUSED_SWITCHES = {
    "--checkpoint-engine-wait-weights-before-ready": "weights come from the model folder only",
    "--enable-custom-logit-processor": "code sent by clients never runs here",
    "--enable-response-store": "stored responses are not supported yet",
    "--trust-request-chat-template": "templates sent by clients never run here",
    "--stream-output": "use --incremental-streaming-output, which makes text and ids deltas",
    "--enable-dp-attention": "attention is not split from the other layers",
    "--enable-eplb": "experts stay where they are loaded",
}

_REFUSED_VALUES: dict[str, tuple[str, tuple[str, ...]]] = {
    "--torchao-config": ("use --quantization", ("",)),
    "--hf-chat-template-name": ("use --chat-template", ()),
    "--completion-template": ("/v1/completions applies no template", ()),
    "--tool-server": ("tools run at the client", ()),
    "--cpu-offload-gb": ("weights stay on one device", ("0",)),
    "--hicache-size": ("use --hicache-ratio", ("0",)),
    "--hicache-write-policy": ("evicted pages are written to host memory", ("write_back",)),
    "--base-gpu-id": ("choose the GPU with CUDA_VISIBLE_DEVICES", ("0",)),
    "--gpu-id-step": ("choose the GPU with CUDA_VISIBLE_DEVICES", ("1",)),
    "--disaggregation-mode": ("prefill and decode run in one server", ("null",)),
    "--disaggregation-transfer-backend": ("prefill and decode run in one server", ("mooncake",)),
    "--disaggregation-bootstrap-port": ("prefill and decode run in one server", ("8998",)),
    "--disaggregation-ib-device": ("prefill and decode run in one server", ()),
    "--ep-num-redundant-experts": ("experts stay where they are loaded", ("0",)),
    "--init-expert-location": ("experts stay where they are loaded", ("trivial",)),
}

REFERENCE_FLAGS: dict[str, ReferenceFlag] = {
    flag.name: flag
    for flag in (
        *(ReferenceFlag(name, takes_value=False) for name in _IGNORED_SWITCHES.split()),
        *(ReferenceFlag(name, takes_value=True) for name in _IGNORED_VALUES.split()),
        *(ReferenceFlag(name, False, why) for name, why in _REFUSED_SWITCHES.items()),
        *(
            ReferenceFlag(name, True, why, neutral)
            for name, (why, neutral) in _REFUSED_VALUES.items()
        ),
    )
}

# Values of this server's own flags that name kernels it lacks. They stand for the automatic choice.
REFERENCE_VALUES: dict[str, tuple[str, ...]] = {
    "--attention-backend": (
        *("torch_native", "fa3", "fa4", "flex_attention", "flashmla"),
        *("cutlass_mla", "trtllm_mla", "trtllm_mha", "dual_chunk_flash_attn", "aiter", "wave"),
        *("intel_amx", "ascend"),
    ),
    "--moe-runner-backend": (
        *("deep_gemm", "triton_kernel", "flashinfer_trtllm", "flashinfer_cutlass", "cutlass"),
        *("flashinfer_mxfp4", "flashinfer_cutedsl"),
    ),
}
