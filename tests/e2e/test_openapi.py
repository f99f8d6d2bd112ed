"""Every route of a real server, asked as its description says, answers as its description says."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save

from tests.support.grammar_backends import BACKENDS
from tests.support.openapi_document import OpenAPIDocument, beyond, bounded
from tests.support.server import ServerProcess
from tests.support.tiny_models import tiny_bert, tiny_model
from tests.support.tiny_text_models import text_model
from tests.support.waiting import until

SHORT = {"max_new_tokens": 4, "temperature": 0}
LOGPROBS = {"return_logprob": True, "top_logprobs_num": 2, "token_ids_logprob": [7], "text": "The"}
ASK = {"messages": [{"role": "user", "content": "What is the weather in Paris?"}]}
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Paris", "Rome"]}},
            "required": ["city"],
        },
    },
}
STREAMED = {
    "stream": True,
    "stream_options": {"include_usage": True, "continuous_usage_stats": True},
}
OVER = ("completed", "failed")
PAGE = {"limit": 3}
WEIGHT = "model.norm.weight"
# A group of which nobody else is part.
GROUP = {"master_address": "127.0.0.1", "master_port": 9, "rank_offset": 2, "world_size": 2}


@dataclass(frozen=True)
class Ask:
    """A request, and the status that it is answered with."""

    method: str
    path: str
    body: Any = None
    status: int = 200
    query: dict[str, Any] = field(default_factory=dict)
    parts: dict[str, str] = field(default_factory=dict)


def get(path: str, status: int = 200, **query: Any) -> Ask:
    return Ask("GET", path, status=status, query=query)


def post(path: str, status: int = 200, **body: Any) -> Ask:
    return Ask("POST", path, body, status)


def put(path: str, **body: Any) -> Ask:
    return Ask("PUT", path, body)


def chats(path: str) -> list[Ask]:
    asks = [
        post(path, **ASK, max_tokens=4, logprobs=True, top_logprobs=2, return_hidden_states=True),
        post(path, **ASK, max_tokens=4, logprobs=True, return_hidden_states=True, **STREAMED, n=2),
        post(path, 400, **ASK, max_tokens=0),
    ]
    if BACKENDS:
        forced = {**ASK, "tools": [WEATHER], "tool_choice": "required", "max_tokens": 64}
        asks += [post(path, **forced), post(path, **forced, **STREAMED)]
        custom = {"type": "custom", "custom": {"name": "note"}}
        named = {"type": "custom", "custom": {"name": "note"}}
        old = {"functions": [WEATHER["function"]], "function_call": {"name": "weather"}}
        for tools in ({"tools": [custom], "tool_choice": named}, old):
            forced = {**ASK, **tools, "max_tokens": 64, "service_tier": "auto"}
            asks += [post(path, **forced), post(path, **forced, **STREAMED)]
    return asks


def messages() -> list[Ask]:
    path, body = "/v1/messages", {"model": "m", **ASK}
    schema = {"type": "object", "properties": {"city": {"type": "string"}}}
    tool = {"name": "weather", "input_schema": schema}
    asks = [
        post(path, **body, max_tokens=4),
        post(path, **body, max_tokens=4, stream=True),
        post(path, 400, **body, max_tokens=0),
        post(f"{path}/count_tokens", **body, tools=[tool]),
    ]
    if BACKENDS:
        forced = {**body, "tools": [tool], "tool_choice": {"type": "any"}, "max_tokens": 64}
        asks += [post(path, **forced), post(path, **forced, stream=True)]
    return asks


def responses() -> list[Ask]:
    path = "/v1/responses"
    said: dict[str, Any] = {"input": "What is the weather in Paris?", "max_output_tokens": 16}
    logprobs = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
    kept = {"response_id": "resp_unknown"}
    return [
        post(path, **said, **logprobs),
        post(path, **said, **logprobs, stream=True),
        post(path, 400, **said, previous_response_id="resp_unknown"),
        post(f"{path}/input_tokens", **said),
        post(f"{path}/compact", input="Where?", model="m"),
        *(
            Ask("GET", f"{path}/{{response_id}}{each}", parts=kept, status=status)
            for each, status in (("", 404), ("/input_items", 404))
        ),
        Ask("DELETE", f"{path}/{{response_id}}", parts=kept, status=404),
        Ask("POST", f"{path}/{{response_id}}/cancel", {}, parts=kept, status=404),
    ]


def files_and_batches() -> list[Ask]:
    """The flow is below; these are what is refused."""
    file, batch = {"file_id": "file-unknown"}, {"batch_id": "batch_unknown"}
    asked = {"input_file_id": "file-unknown", "endpoint": "/v1/completions"}
    return [
        *(get(path, **query) for path in ("/v1/files", "/v1/batches") for query in ({}, PAGE)),
        *(get(path, 400, limit=0) for path in ("/v1/files", "/v1/batches")),
        Ask("POST", "/v1/files", status=400),
        *(
            Ask("GET", f"/v1/files/{{file_id}}{each}", parts=file, status=404)
            for each in ("", "/content")
        ),
        Ask("DELETE", "/v1/files/{file_id}", parts=file, status=404),
        post("/v1/batches", 404, **asked, completion_window="24h"),
        post("/v1/batches", 400, **asked, completion_window="1h"),
        Ask("GET", "/v1/batches/{batch_id}", parts=batch, status=404),
        Ask("POST", "/v1/batches/{batch_id}/cancel", parts=batch, status=404),
    ]


def ollama() -> list[Ask]:
    said: dict[str, Any] = {"model": "m", "options": {"num_predict": 4}}
    return [
        *(post("/api/chat", **said, **ASK, stream=stream) for stream in (False, True)),
        *(post("/api/generate", **said, prompt="The", stream=stream) for stream in (False, True)),
        post("/api/chat", 400, **said, **ASK, format="xml"),
        *(get(f"/api/{name}") for name in ("tags", "ps", "version")),
        post("/api/show", model="MODEL"),
        post("/api/show", 400),
        post("/api/embed", 400, model="m", input="The"),
        post("/api/embeddings", 400, model="m", prompt="The"),
    ]


def asks(folder: Path) -> list[Ask]:
    """In their order; the first group leaves the server as it was."""
    norm = load_file(folder / "model.safetensors")[WEIGHT]
    tensor = base64.b64encode(save({WEIGHT: norm})).decode()
    distributed = {"names": [WEIGHT], "dtypes": ["float32"], "shapes": [[*norm.shape]]}
    return [
        *(
            get(f"/{name}")
            for name in ("", "health", "livez", "readyz", "ready", "startupz", "ping")
        ),
        *(get(f"/{name}") for name in ("health_generate", "metrics", "tokenizer_info")),
        *(get(f"/{prefix}{name}_info") for prefix in ("", "get_") for name in ("model", "server")),
        *(get("/v1/loads", include=each) for each in ("core", "all", "memory,queues")),
        *(get("/v1/loads", format="prometheus"), get("/v1/loads", 400, include="weather")),
        get("/get_load"),
        get("/v1/models"),
        Ask("GET", "/v1/models/{model_id}", parts={"model_id": "MODEL"}),
        Ask("GET", "/v1/models/{model_id}", status=404, parts={"model_id": "other"}),
        *chats("/v1/chat/completions"),
        *chats("/invocations"),
        post("/v1/completions", prompt=["The", "A"], max_tokens=4, logprobs=2, echo=True),
        post("/v1/completions", prompt="The", max_tokens=4, return_hidden_states=True, **STREAMED),
        post("/v1/completions", 400, prompt=[]),
        *messages(),
        *responses(),
        *files_and_batches(),
        *ollama(),
        post("/v1/embeddings", 400, input="The"),
        post("/encode", 400, text="The"),
        Ask("PUT", "/encode", {"text": "The"}, 400),
        *(Ask(method, "/classify", {"text": "The"}, 400) for method in ("POST", "PUT")),
        post("/v1/classify", 400, input="The"),
        post("/pooling", 400, input="The"),
        post("/v1/rerank", 400, query="The", documents=["A"]),
        Ask("PUT", "/v1/rerank", {"query": "The", "documents": ["A"]}, 400),
        *(post(path, 400, query="The", documents=["A"]) for path in ("/rerank", "/v2/rerank")),
        post("/generate", text="The", sampling_params=SHORT, return_prompt_token_ids=True),
        post("/generate", text=["The", "A"], sampling_params=SHORT, return_entropy=True),
        post(
            "/generate", text="The", sampling_params=SHORT, return_hidden_states=True, stream=True
        ),
        post("/generate", text="The", sampling_params=SHORT, return_hidden_states="last"),
        post("/generate", **LOGPROBS, logprob_start_len=0, sampling_params=SHORT),
        post("/generate", **LOGPROBS, stream=True, sampling_params={**SHORT, "n": 2}),
        post("/generate", input_ids=[5] * 100_000, sampling_params=SHORT, stream=True),
        post("/generate", 400, text="The", sampling_params={"temperature": -1}),
        put("/generate", text="The", sampling_params=SHORT),
        post(
            "/vertex_generate", instances=[{"text": "The"}], parameters={"sampling_params": SHORT}
        ),
        post("/v1/score", query="The", items=[" wheel", " mill"], label_token_ids=[5, 6]),
        post("/v1/select", text="The", choices=[" wheel", [5, 6]], unconditional=True),
        post("/v1/select", 400, text="The", choices=[]),
        *(
            post(f"{v}/tokenize", prompt=each)
            for v in ("", "/v1")
            for each in ("The", ["The", "A"])
        ),
        *(post(f"{v}/detokenize", tokens=ids) for v in ("", "/v1") for ids in ([5, 6], [[5], [6]])),
        post("/separate_reasoning", text="<think>a</think>b", reasoning_parser="qwen3"),
        post(
            "/parse_function_call",
            text='<tool_call>{"name": "weather", "arguments": {"city": "Rome"}}</tool_call>',
            tools=[WEATHER],
            tool_call_parser="hermes",
        ),
        post("/open_session", capacity_of_str_len=1000, session_id="mine"),
        post("/open_session", 400, capacity_of_str_len=0),
        post("/close_session", session_id="mine"),
        post("/v1/chat/completions", **ASK, max_tokens=4, return_cache_break=True),
        post("/explain_cache", body=ASK),
        post("/explain_cache", body={"input": "Where?"}, route="/v1/responses"),
        post("/explain_cache", 400, body={}),
        post("/generate", text="A", sampling_params={"max_new_tokens": 2}, rid="explained"),
        post("/explain_request", id="explained"),
        post("/explain_request", 404, id="nothing"),
        # What changes the server.
        Ask("POST", "/flush_cache", query={"timeout": 10}),
        Ask("POST", "/flush_cache", status=400, query={"timeout": -1}),
        get("/flush_cache"),
        post("/abort_request", rid="nothing"),
        Ask("POST", "/abort_request"),
        post("/set_internal_state", server_args={"max_queued_requests": 100}),
        put("/set_internal_state", server_args={"max_queued_requests": 100}),
        post("/slow_down", forward_sleep_time=0),
        Ask("POST", "/freeze_gc"),
        post("/configure_logging", log_requests=False),
        *(Ask("POST", f"/{name}_profile") for name in ("start", "stop")),
        *(get(f"/{name}_profile") for name in ("start", "stop")),
        Ask("POST", "/stop_profile", status=400),
        # A dense model has none.
        *(
            Ask("POST", f"/{action}_expert_distribution_record", status=400)
            for action in ("start", "stop", "dump")
        ),
        post("/get_weights_by_name", name=WEIGHT, truncate_size=2),
        get("/get_weights_by_name", name=WEIGHT, truncate_size=2),
        get("/get_weights_by_name", 400, name="no.weight"),
        *(post("/weights_checker", action=each) for each in ("snapshot", "compare", "checksum")),
        post("/update_weight_version", new_version="one"),
        post("/begin_weight_update"),
        post("/end_weight_update"),
        post("/update_weights_from_disk", model_path=str(folder)),
        post("/update_weights_from_disk", 400, model_path="no/such-model"),
        post("/update_weights_from_tensor", serialized_named_tensors=[tensor]),
        post("/update_weights_from_tensor", 400, serialized_named_tensors=["AAAA"]),
        # These need a trainer, which `test_weights_from_trainer.py` has.
        post("/init_weights_update_group", 400, **GROUP),
        post("/update_weights_from_distributed", 400, **distributed),
        post("/destroy_weights_update_group", 400, group_name="none"),
        Ask("POST", "/update_weights_from_ipc", status=400),
        post("/pause_generation", mode="in_place"),
        post("/continue_generation"),
        post("/release_memory_occupation", tags=["kv_cache"]),
        post("/generate", 503, text="The"),
        post("/resume_memory_occupation", tags=["kv_cache"]),
        Ask("POST", "/last_errors"),
        # These need an adapter, which `test_adapters.py` has.
        post("/load_lora_adapter", 400, lora_name="a", lora_path="no/such-folder"),
        post("/load_lora_adapter_from_tensors", 400, lora_name="a", config_dict={}),
        post("/unload_lora_adapter", 400, lora_name="a"),
        post("/restart_worker", 400, model_path="no/such-model"),
        post("/restart_worker"),
    ]


@pytest.fixture(scope="module")
def folder() -> Path:
    return tiny_model("qwen3")


@pytest.fixture(scope="module")
def server(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    traces = str(tmp_path_factory.mktemp("traces"))
    reports = ("--enable-metrics", "--enable-cache-report")
    options = ("--enable-return-hidden-states", "--served-model-name", "MODEL")
    parsers = ("--tool-call-parser", "hermes", "--reasoning-parser", "qwen3")
    with ServerProcess(
        *("--model-path", str(folder), *reports, *options, *parsers),
        HF_HUB_OFFLINE="1",
        SGLANG_TORCH_PROFILER_DIR=traces,
    ) as process:
        yield process.wait_ready()


@pytest.fixture(scope="module")
def document(server: ServerProcess) -> OpenAPIDocument:
    return OpenAPIDocument(server.client.get("/openapi.json").json())


def check(server: ServerProcess, document: OpenAPIDocument, ask: Ask) -> None:
    if ask.body is not None and ask.status == 200:
        document.check_body(ask.method, ask.path, ask.body)
    answer = server.client.request(
        ask.method, ask.path.format(**ask.parts), json=ask.body, params=ask.query
    )
    assert answer.status_code == ask.status, (ask, answer.text)
    document.check(ask.method, ask.path, answer)


def test_every_route_answers_as_described(server, document, folder):
    wanted = asks(folder)
    described = {(method, path) for method, path, _ in document.operations()}
    assert {(ask.method, ask.path) for ask in wanted} == described
    for ask in wanted:
        check(server, document, ask)


def test_files_and_batches_answer_as_described(server, document):
    def asked(method: str, path: str, *given: str, **body: Any) -> Any:
        answer = server.client.request(method, path.format(*given), **body)
        name = "file_id" if path.startswith("/v1/files") else "batch_id"
        document.check(method, path.replace("{}", f"{{{name}}}"), answer)
        return answer.json() if answer.headers["content-type"] == "application/json" else answer

    line = {"custom_id": "a", "method": "POST", "url": "/v1/completions"}
    wrong = {**line, "custom_id": "b", "body": {"prompt": ""}}
    content = b"".join(
        json.dumps(each).encode() + b"\n" for each in ({**line, "body": {"prompt": "The"}}, wrong)
    )
    form: dict[str, Any] = {"files": {"file": ("a", content)}, "data": {"purpose": "batch"}}
    batches = []
    for sent in (form, {**form, "files": {"file": ("b", b"?")}}):
        file = asked("POST", "/v1/files", **sent)
        batch = {"input_file_id": file["id"], "endpoint": line["url"], "completion_window": "24h"}
        batches.append(asked("POST", "/v1/batches", json=batch)["id"])
    for batch_id in batches:
        until(lambda each=batch_id: asked("GET", "/v1/batches/{}", each)["status"] in OVER)
        asked("POST", "/v1/batches/{}/cancel", batch_id)
    done, failed = (asked("GET", "/v1/batches/{}", each) for each in batches)
    assert (done["status"], failed["status"]) == OVER
    assert len(asked("GET", "/v1/batches", params={"limit": 1})["data"]) == 1
    for file_id in (done["output_file_id"], done["error_file_id"]):
        assert asked("GET", "/v1/files/{}", file_id)["purpose"] == "batch_output"
        assert asked("GET", "/v1/files/{}/content", file_id).text.count("\n") == 1
    assert len(asked("GET", "/v1/files")["data"]) == 4
    assert asked("DELETE", "/v1/files/{}", done["output_file_id"])["deleted"]


def test_bounds_of_the_weight_routes(server, document, folder):
    norm = load_file(folder / "model.safetensors")[WEIGHT]
    needed = {
        "/get_weights_by_name": {"name": WEIGHT},
        "/init_weights_update_group": {**GROUP, "rank_offset": 1},
        "/update_weights_from_distributed": {
            "names": [WEIGHT],
            "dtypes": ["float32"],
            "shapes": [[*norm.shape]],
        },
    }
    names = set()
    for path, _, name, schema in bounded(document, {"weights"}):
        names.add(name)
        for value in beyond(schema):
            answer = server.client.post(path, json={**needed[path], name: value})
            assert answer.status_code == 400, (path, name, value, answer.text)
            assert name in answer.text or "Ranks " in answer.text, (path, value, answer.text)
    assert names == {"master_port", "rank_offset", "world_size", "timeout", "truncate_size"}


VECTORS = (
    post("/encode", text="The"),
    put("/encode", text=["The", "A"]),
    post("/v1/embeddings", input=["The", "A"]),
    post("/v1/embeddings", input="The", encoding_format="base64"),
    post("/pooling", input=["The", "A"]),
    post("/pooling", input=["The", "A"], task="token_embed"),
    post("/pooling", input="The", task="token_embed", encoding_format="base64"),
    post("/pooling", 400, input="The", task="classify"),
    post("/encode", 400, text="The", priority=2**63),
    post("/v1/embeddings", 400, input="The", priority=-(2**63) - 1),
    post("/generate", 400, text="The"),
    post("/api/embed", model="m", input=["The", "A"]),
    post("/api/embeddings", model="m", prompt="The"),
    get("/health_generate"),
    get("/model_info"),
    get("/server_info"),
)
CLASSES = (
    post("/classify", text="The"),
    put("/classify", text=["The", "A"]),
    post("/v1/classify", input=["The", "A"]),
    post("/v1/classify", 400, input="The", priority=2**63),
    post("/pooling", input=["The", "A"]),
    post("/v1/score", query="", items=["The"], label_token_ids=[1]),
)
RANKS = (
    post("/v1/rerank", query="The", documents=["A", "B"]),
    post("/v1/rerank", query="The", documents=["A", "B"], top_n=1, return_documents=False),
    post("/v1/rerank", 400, query="The", documents=["A"], top_n=0),
    post("/rerank", query="The", documents=["A", {"text": "B"}]),
    post("/v2/rerank", query="The", documents=["A", "B"], top_n=1, return_documents=True),
    post("/v2/rerank", 400, query="The", documents=[{}]),
)


@pytest.mark.parametrize(
    ("model", "wanted"),
    [("bert", VECTORS), ("bert_scores", CLASSES), ("xlm_roberta_scores", RANKS)],
)
def test_a_model_of_another_kind_answers_as_described(model, wanted):
    folder = tiny_bert(model) if model == "bert" else text_model(model)
    with ServerProcess("--model-path", str(folder)) as server:
        server.wait_ready()
        document = OpenAPIDocument(server.client.get("/openapi.json").json())
        for ask in wanted:
            check(server, document, ask)
