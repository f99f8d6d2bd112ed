"""Writes the pages that are generated from code: options, metrics, errors, models, fields and more.

python -m docs.generate           rewrite them
python -m docs.generate --check   exit 1 when one is out of date
"""

from __future__ import annotations

import dataclasses
import json
import sys
import tempfile
import typing
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from docs.lang_reference import lang_reference_page
from docs.openai_fields import openai_fields_page
from docs.schema_cases import CASES
from openai_api import openai_errors
from runtime import errors
from runtime.client.adapter_record import AdapterRecord
from runtime.client.weight_gate import RequestGate
from runtime.config.options import ServerConfig
from runtime.ipc.shared_state import SharedState
from runtime.launch.command_line import option_name
from runtime.models.registry import FAMILIES
from runtime.processes.status import EngineStatus, ReplicaStatus
from runtime.service.context import ServiceContext
from server.metrics import Metrics
from tests.support.adapted_models import ADAPTED_MODELS, ONE_RANK

FOLDER = Path(__file__).resolve().parent
NOTE = "<!-- Made by `python -m docs.generate`; do not edit. -->\n\n"


def options_page() -> str:
    """Return the page with every command-line option, by section."""
    lines = ["# Options", "", "`python -m server.launch --help` shows the same in the terminal."]
    hints = typing.get_type_hints(ServerConfig)
    for section in dataclasses.fields(ServerConfig):
        kind = hints[section.name]
        lines += ["", f"## {kind.__doc__.splitlines()[0].rstrip('.')}", ""]
        lines += ["| option | default | meaning |", "|---|---|---|"]
        for option in dataclasses.fields(kind):
            names = ", ".join(
                f"`{name}`" for name in (option_name(option.name), *option.metadata["aliases"])
            )
            text = option.metadata["help"].replace("|", "\\|")
            choices = option.metadata["choices"]
            if choices:
                text += " One of " + ", ".join(f"`{choice}`" for choice in choices) + "."
            lines.append(f"| {names} | {_default(option)} | {text} |")
    return NOTE + "\n".join(lines) + "\n"


def _default(option: dataclasses.Field[Any]) -> str:
    if option.default in (None, dataclasses.MISSING, ""):
        return ""
    return "off" if option.default is False else f"`{option.default}`"


def metrics_page() -> str:
    """Return the page with every metric of `/metrics`."""
    with tempfile.TemporaryDirectory() as folder:
        shared = SharedState(Path(folder) / "state", create=True)
        config = SimpleNamespace(
            model=SimpleNamespace(served_model_name="demo"),
            scheduling=SimpleNamespace(page_size=16, disable_radix_cache=False),
            logging=SimpleNamespace(metrics_aliases=["vllm", "aibrix"]),
            lora=SimpleNamespace(max_loras_per_batch=8),
        )
        status = EngineStatus([ReplicaStatus(shared=shared)])
        adapters = AdapterRecord()
        adapters.is_enabled = True
        outgoing = SimpleNamespace(num_compiling=0, num_resumed=0, num_waiting=0)
        client = SimpleNamespace(outgoing=outgoing, gate=RequestGate(), adapters=adapters)
        context = SimpleNamespace(
            config=config, status=status, client=client, served_model_name="demo"
        )
        families = sorted(
            Metrics(cast("ServiceContext", context)).registry.collect(), key=lambda f: f.name
        )
        rows = []
        for family in families:
            name = family.name + ("_total" if family.type == "counter" else "")
            rows.append(f"| `{name}` | {family.type} | {family.documentation} |")
        shared.close()
    head = [
        "# Metrics",
        "",
        "`GET /metrics` returns these metrics in Prometheus' text format. It needs `--enable-metrics`, but no",
        "key. Gauges are read from shared memory at the moment of the scrape.",
        "",
        "- Counters and histograms of requests and their tokens exclude health probes and warm-up. The HTTP",
        "  metrics (`sglang:http_requests_total`, `http_responses_total`, `http_requests_active`) count every",
        "  HTTP request, including probes, warm-up and scrapes; the label `endpoint` distinguishes them.",
        "- The stages of a request are `prefill_waiting` (from its arrival to its first prompt step),",
        "  `prefill_forward` (from there to its first token) and `decode_loop` (from there to its last token).",
        "- Metrics whose names begin with `vllm:` need `--metrics-aliases vllm`, `sglang:num_waiting_reqs`",
        "  needs `--metrics-aliases aibrix`, and the metrics of adapters (`sglang:lora_...`) need",
        "  `--enable-lora`.",
        "- `/metrics?prefix=headrace_` shows the same metrics under names",
        "  [without a colon](observability.md#names-without-a-colon).",
        "",
        "| name | type | meaning |",
        "|---|---|---|",
    ]
    return NOTE + "\n".join([*head, *rows]) + "\n"


def errors_page() -> str:
    """Return the page with every error that a client or an operator may see."""
    head = [
        "# Errors",
        "",
        "The table below maps exceptions to HTTP answers. The form of an error's body depends on the route:",
        "",
        "- `/v1/` and `/invocations`: OpenAI's nested `error` object, and the flat keys `object`, `message`,",
        "  `type`, `param`, `code`.",
        '- Native routes: `{"error": {"message": ...}}` for a refused value. A key without access gets',
        '  `{"error": "Unauthorized"}` or `{"error": "Forbidden"}`, as from SGLang. Other errors have the flat keys.',
        '- An unknown path or a wrong method: the flat keys, and `"detail"` (`Not Found`, `Method Not Allowed`).',
        "",
        "A 503 has a `Retry-After` header. A client's mistake never gets a 5xx, 408 or 429, because routers retry",
        "requests after these.",
        "",
        "| exception | status | meaning |",
        "|---|---|---|",
    ]
    rows = []
    for name, kind in vars(errors).items():
        if isinstance(kind, type) and issubclass(kind, errors.HeadraceError):
            status = "exit code 1" if kind is errors.StartupError else str(kind.status_code)
            rows.append(f"| `{name}` | {status} | {(kind.__doc__ or '').splitlines()[0]} |")
    table = ["", "| status | OpenAI's type | flat type |", "|---|---|---|"]
    for status, kind in openai_errors.KINDS.items():
        table.append(f"| {status} | `{kind.nested}` | `{kind.flat}` |")
    tail = [
        "",
        "An error that is found after a stream has begun arrives as an event with an `error` object,",
        "followed by `data: [DONE]`.",
    ]
    return NOTE + "\n".join([*head, *rows, *table, *tail]) + "\n"


_GIVES = {
    "text": "text",
    "": "text; embeddings with `--is-embedding`",
    "images": "text, from text and images",
    "vectors": "embeddings",
    "scores": "scores",
}


def models_page() -> str:
    """Return the page with every supported architecture."""
    head = [
        "# Models",
        "",
        "The table lists the architectures that Headrace's own model families implement. `architectures` in the",
        "`config.json` of a model's folder names its architecture. Weights are safetensors in float32, bfloat16 or",
        "float16. Code in a model's folder is never run. [texts.md](texts.md) explains embeddings and scores.",
        "",
        "| architecture | family | output | `--tp-size` | `--ep-size` |",
        "|---|---|---|---|---|",
    ]
    rows = []
    for name, family in sorted(FAMILIES.items()):
        folder = family.spec.split(".")[2]
        gives = "images" if family.images else "" if family.texts else "vectors"
        if family.model.endswith("ForCausalLM") and not family.texts:
            gives = "text"
        if family.head and not family.head.endswith(":vectors"):
            gives = "scores"
        ranks = "1" if folder in _ONE_RANK else "1 and more"
        experts = "as `--tp-size`" if folder in _WITH_EXPERTS else ""
        rows.append(f"| `{name}` | {folder} | {_GIVES[gives]} | {ranks} | {experts} |")
    return NOTE + "\n".join([*head, *rows, *_ADAPTER, *_adapted_rows()]) + "\n"


_ADAPTER = """
## Decoders without a family

Other text decoders run with the code of the installed `transformers`, in which Headrace replaces attention, linear
layers, norms and embeddings. `--model-impl auto` does this for architectures without a family, `--model-impl headrace`
refuses them, and `--model-impl transformers` does this for every decoder. At the start the model is built without
memory for its weights and one step is traced through it, so the model's own code defines its layers. One line in the
log names the modules that are not replaced; they make the model slower than a family. `/server_info` shows
`model_impl`, and `headrace doctor` shows it before a start.

The server refuses a decoder without a family with one line and exit code 1 if:

- its attention cannot be replaced (Bloom, MPT and Falcon, which add position biases to attention scores);
- it has recurrent states or chunked attention, or is an encoder;
- its experts have biases or are stored as one tensor per layer;
- `transformers` converts its weights in some other way while it loads them.

Deterministic inference and `--is-embedding` need a family. `--tp-size` above 1 needs the tensor-parallel plan of the
model in `transformers`; `--dp-size` does not ([why so](decisions/0053-models-of-transformers.md)).

CI compares the architectures in the table below with `transformers` on the same random weights. It compares the logits
of whole prompts, of prompts in chunks and after a cached prefix; greedy tokens in batches in which one sequence is
recomputed; weights that are read back from the running model; and the output of two ranks.

| architecture | `--tp-size` |
|---|---|""".splitlines()


def _adapted_rows() -> list[str]:
    ranks = {
        variant.architecture: "1" if name in ONE_RANK else "1 and more"
        for name, variant in ADAPTED_MODELS.items()
        if variant.architecture not in FAMILIES
    }
    return [f"| `{name}` | {size} |" for name, size in sorted(ranks.items())]


# Families whose layers cannot be split over ranks.
_ONE_RANK: set[str] = set()
_WITH_EXPERTS = {
    "deepseek",
    "gemma4",
    "glm4_moe",
    "gpt_oss",
    "granite",
    "minimax_m2",
    "mixtral",
    "qwen2_moe",
    "qwen3_moe",
    "qwen3_5",
    "qwen3_next",
}

_SCHEMAS_BEGIN = (
    "<!-- Made by `python -m docs.generate` from docs/schema_cases.jsonl; do not edit. -->\n"
)
_SCHEMAS_END = "<!-- Written by hand again. -->\n"
_NUM_EXAMPLES = 2


def structured_output_page() -> str:
    """Return the page `structured_output.md`, in which only the table of schemas is replaced."""
    text = (FOLDER / "structured_output.md").read_text(encoding="utf-8")
    before, rest = text.split(_SCHEMAS_BEGIN)
    _, after = rest.split(_SCHEMAS_END)
    found: dict[tuple[str, tuple[str, ...]], list[str]] = {}
    for case in CASES:
        schema = json.dumps(case.schema, ensure_ascii=False).replace("|", "\\|")
        found.setdefault((case.keyword, tuple(case.by)), []).append(schema)
    lines = ["", "| keyword | followed by | for example |", "|---|---|---|"]
    for (keyword, by), schemas in found.items():
        shown = " ".join(f"`{each}`" for each in sorted(schemas, key=len)[:_NUM_EXAMPLES])
        who = "both" if len(by) > 1 else by[0] if by else "none: 400"
        lines.append(f"| {keyword} | {who} | {shown} |")
    table = "\n".join(lines) + "\n\n"
    return before + _SCHEMAS_BEGIN + table + _SCHEMAS_END + after


PAGES = {
    "structured_output.md": structured_output_page,
    "models.md": models_page,
    "options.md": options_page,
    "metrics.md": metrics_page,
    "errors.md": errors_page,
    "openai_fields.md": lambda: NOTE + openai_fields_page(),
    "lang_reference.md": lambda: NOTE + lang_reference_page(),
}


def main() -> int:
    """Write the pages, or with `--check` return how many of them are out of date."""
    stale = []
    for name, render in PAGES.items():
        path = FOLDER / name
        text = render()
        if "--check" not in sys.argv:
            path.write_text(text, encoding="utf-8")
        elif not path.exists() or path.read_text(encoding="utf-8") != text:
            stale.append(name)
    if stale:
        sys.stderr.write(f"Out of date: {', '.join(stale)}; run `make docs`.\n")
    return len(stale)


if __name__ == "__main__":
    sys.exit(main())
