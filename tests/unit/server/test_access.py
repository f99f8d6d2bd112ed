"""Every route of the application, with every form of key and every spelling of its path."""

import itertools
from pathlib import Path
from urllib.parse import unquote

import pytest
from fastapi import Depends
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Mount, WebSocketRoute

from runtime.config.options import HttpArgs, LoggingArgs, ModelArgs, ServerConfig
from runtime.errors import StartupError
from server.access import Access, AccessRouter
from server.banner import warn_if_open
from server.listener import prepare
from server.routing import RouteTable
from tests.support.fake_server import FakeServer

ROOT = Path(__file__).resolve().parents[3]
# As the documents list them; a new route is an admin's or a client's by a line here.
OPEN = {"/health", "/health_generate", "/livez", "/readyz", "/ready", "/startupz", "/metrics"}
# The page that browsers get at `/`: its files hold nothing of the server's.
PAGE = {f"/page/{file.name}" for file in (ROOT / "server" / "page").iterdir()}
ADMIN = {
    *(
        "/flush_cache",
        "/abort_request",
        "/explain_request",
        "/pause_generation",
        "/continue_generation",
    ),
    *(f"/{action}_expert_distribution_record" for action in ("start", "stop", "dump")),
    *("/start_profile", "/stop_profile", "/set_internal_state", "/slow_down", "/freeze_gc"),
    *("/configure_logging", "/release_memory_occupation", "/resume_memory_occupation"),
    "/restart_worker",
    *("/update_weights_from_disk", "/update_weights_from_tensor", "/update_weights_from_ipc"),
    *("/update_weights_from_distributed", "/begin_weight_update", "/end_weight_update"),
    *("/init_weights_update_group", "/destroy_weights_update_group", "/update_weight_version"),
    *("/weights_checker", "/get_weights_by_name", "/last_errors"),
    *("/load_lora_adapter", "/load_lora_adapter_from_tensors", "/unload_lora_adapter"),
}
CLIENTS = {
    *("/", "/docs", "/openapi.json", "/ping", "/invocations"),
    *("/model_info", "/get_model_info", "/server_info", "/get_server_info", "/get_load"),
    *("/generate", "/encode", "/classify", "/tokenize", "/detokenize", "/vertex_generate"),
    *("/pooling", "/tokenizer_info", "/explain_cache"),
    *("/separate_reasoning", "/parse_function_call", "/open_session", "/close_session"),
    *("/v1/chat/completions", "/v1/completions", "/v1/models", "/v1/models/{model_id:path}"),
    *("/v1/tokenize", "/v1/detokenize", "/v1/score", "/v1/select", "/v1/loads"),
    *("/v1/embeddings", "/v1/classify", "/v1/rerank", "/rerank", "/v2/rerank"),
    *(f"/api/{name}" for name in ("chat", "generate", "embed", "embeddings")),
    *(f"/api/{name}" for name in ("tags", "ps", "show", "version")),
    *("/v1/messages", "/v1/messages/count_tokens", "/v1/responses", "/v1/responses/input_tokens"),
    "/v1/responses/compact",
    *(
        f"/v1/responses/{{response_id:response_id}}{each}"
        for each in ("", "/cancel", "/input_items")
    ),
    *("/v1/files", "/v1/files/{file_id:file_id}", "/v1/files/{file_id:file_id}/content"),
    *("/v1/batches", "/v1/batches/{batch_id:batch_id}", "/v1/batches/{batch_id:batch_id}/cancel"),
}

USER, BOSS = b"Bearer user", b"Bearer boss"
KEY_FORMS = {
    "none": [],
    "user": [USER],
    "admin": [BOSS],
    "wrong": [b"Bearer nope"],
    "empty": [b""],
    "user twice": [USER, USER],
    "admin twice": [BOSS, BOSS],
    "both": [USER, BOSS],
    "wrong scheme": [b"Basic boss"],
    "no scheme": [b"boss"],
    "scheme in odd case": [b"bEARER  boss "],
    "joined": [b"Bearer user, Bearer boss"],
}
# What each form proves; the others prove nothing.
PROVEN = {"user": "user", "admin": "boss", "scheme in odd case": "boss"}
# Bytes that decode to the route's own path: they are that route and nothing else.
SPELLINGS = {
    "plain": lambda path: path,
    "encoded letter": lambda path: f"/%{ord(path[1]):02x}{path[2:]}" if path != "/" else path,
    "encoded underline": lambda path: path.replace("_", "%5F"),
}
# Paths near a route's that are no route.
NEAR_MISSES = {
    "newline": lambda path: f"{path}%0a",
    "carriage return": lambda path: f"{path}%0d",
    "both": lambda path: f"{path}%0d%0a",
    "null": lambda path: f"{path}%00",
    "tab": lambda path: f"{path}%09",
    "next line": lambda path: f"{path}%c2%85",
    "line separator": lambda path: f"{path}%e2%80%a8",
    "newline first": lambda path: f"/%0a{path[1:]}",
    "space": lambda path: f"{path}%20",
    "slash behind": lambda path: f"{path}/",
    "encoded slash behind": lambda path: f"{path}%2f",
    "two slashes": lambda path: f"/{path}",
    "encoded slash": lambda path: f"/%2f{path[1:]}",
    "backslash": lambda path: f"/\\{path[1:]}",
    "dot": lambda path: f"/.{path}",
    "dots": lambda path: f"/health/..{path}",
    "encoded dots": lambda path: f"/health/%2e%2e{path}",
    "parameter": lambda path: f"{path};x",
    "question mark": lambda path: f"{path}%3fx",
    "encoded twice": lambda path: f"/%25{ord(path[1]):02x}{path[2:]}" if path != "/" else "/%252f",
    "prefix twice": lambda path: f"/llm/llm{path}",
    "part of the prefix": lambda path: f"/ll{path}",
    "prefix without a slash": lambda path: f"/llm{path[1:]}" if path != "/" else "/llm",
}
CONFIGS = ((None, None), ("user", None), (None, "boss"), ("user", "boss"))


def concrete(path: str) -> str:
    ids = {"model_id:path": "fake", "response_id:response_id": "resp_0"}
    ids |= {"file_id:file_id": "file-0", "batch_id:batch_id": "batch_0"}
    for name, value in ids.items():
        path = path.replace(f"{{{name}}}", value)
    return path


async def ask(server, method, target, authorization=(), **headers):
    """The status of a request whose target is `target`, decoded as uvicorn does."""
    sent = [(b"authorization", value) for value in authorization]
    sent += [(name.encode(), value.encode()) for name, value in headers.items()]
    scope = {
        "type": "http",
        "http_version": "1.1",
        "method": method,
        "scheme": "http",
        "path": unquote(target),
        "raw_path": target.encode(),
        "query_string": b"",
        "root_path": "",
        "headers": sent,
        "client": ("127.0.0.1", 1),
        "server": ("127.0.0.1", 30000),
    }
    messages = []

    async def receive():
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message):
        messages.append(message)

    await server.app(scope, receive, send)
    return messages[0]["status"]


def routes(server) -> list[tuple[str, str]]:
    found = {(each.path, method) for each in server.app.api.routes for method in each.methods}
    # What may be read may be asked for without its body; some admin routes change things by GET.
    found |= {(path, "HEAD") for path, method in found if method == "GET" and path not in ADMIN}
    return sorted(found)


def make_server(folder, api=None, admin=None, **options):
    logging = LoggingArgs(enable_metrics=True)
    server = FakeServer(folder, api_key=api, admin_api_key=admin, logging=logging, **options)
    # What needs the engine then answers at once.
    server.context.client.ready = False
    return server


def required(path, api, admin):
    """The key that opens a route, None when everybody may have it."""
    if path in OPEN | PAGE:
        return None
    return admin or api if path in ADMIN else api


def refusal(path, form, api, admin):
    """401 or 403 where the request must be refused, else None."""
    needed, proven = required(path, api, admin), PROVEN.get(form)
    if needed is None or proven == needed:
        return None
    return 403 if api is not None and proven == api else 401


def test_every_route_is_in_one_of_the_lists(tmp_path):
    listed = {path for path, _ in routes(make_server(tmp_path))}
    assert listed == OPEN | PAGE | ADMIN | CLIENTS
    assert len(OPEN) + len(PAGE) + len(ADMIN) + len(CLIENTS) == len(listed)


def test_the_page_names_every_route_that_is_no_clients():
    page = (ROOT / "docs" / "access.md").read_text()
    assert [path for path in OPEN | ADMIN if f"`{path}`" not in page.replace("GET ", "")] == []


@pytest.mark.parametrize(
    ("http", "starts"),
    [
        ({"host": "0.0.0.0"}, False),
        ({"host": ""}, False),
        ({"host": "::"}, False),
        ({"host": "192.0.2.7"}, False),
        ({"host": "0.0.0.0", "allow_open_admin": True}, True),
        ({"host": "0.0.0.0", "api_key": "k"}, True),
        ({"host": "0.0.0.0", "admin_api_key": "k"}, True),
        ({"host": "127.0.0.1"}, True),
        ({"host": "127.8.0.1"}, True),
        ({"host": "::1"}, True),
        ({"host": "localhost"}, True),
    ],
)
def test_admin_routes_are_not_opened_to_the_network_by_oversight(http, starts):
    # What is looked at next is a folder that does not exist.
    model = ModelArgs(model_path="/no/such/folder")
    with pytest.raises(StartupError) as caught:
        prepare(ServerConfig(model=model, http=HttpArgs(port=0, **http)))
    is_refused = "--allow-open-admin" in caught.value.message
    assert is_refused != starts, caught.value.message
    assert not is_refused or "HEADRACE_ADMIN_API_KEY" in caught.value.message


@pytest.mark.parametrize(
    ("api", "admin", "is_said"),
    [("k", None, True), ("k", "a", False), (None, "a", False), (None, None, False)],
)
def test_a_key_that_does_everything_is_told_at_start(caplog, api, admin, is_said):
    warn_if_open(HttpArgs(api_key=api, admin_api_key=admin))
    assert ("--admin-api-key" in caplog.text) == is_said


@pytest.mark.parametrize(("api", "admin"), CONFIGS)
@pytest.mark.parametrize("prefix", ["", "/llm"])
async def test_a_route_opens_for_its_key_alone(tmp_path, api, admin, prefix):
    server = make_server(tmp_path, api, admin, fastapi_root_path="/llm")
    for path, method in routes(server):
        for (form, values), spell in itertools.product(KEY_FORMS.items(), SPELLINGS.values()):
            status = await ask(server, method, prefix + spell(concrete(path)), values)
            expected = refusal(path, form, api, admin)
            if expected is None:
                assert status not in (401, 403, 405), (method, path, form)
                # One that runs is not one that was missed.
                assert status != 404 or "{" in path, (method, path, form)
            else:
                assert status == expected, (method, path, form)


@pytest.mark.parametrize(("api", "admin"), CONFIGS)
async def test_what_is_nearly_a_route_runs_nothing(tmp_path, api, admin):
    server = make_server(tmp_path, api, admin, fastapi_root_path="/llm")
    paths = {(path, method) for path, method in routes(server) if "{" not in path}
    for (path, method), (name, spell) in itertools.product(paths, NEAR_MISSES.items()):
        target = spell(path)
        if unquote(target) in OPEN | ADMIN | CLIENTS:
            continue
        for form in ("none", "user", "admin"):
            status = await ask(server, method, target, KEY_FORMS[form])
            # Nothing has this path, so a client's key is what it takes to be told so.
            expected = refusal("", form, api, admin) or 404
            assert status == expected, (method, target, name, form)


@pytest.mark.parametrize("control", ["%0a", "%0d", "%00", "%0d%0a", "x%0a", "%e2%80%a8", "%c2%85"])
async def test_no_pattern_takes_a_control_character(tmp_path, control):
    server = make_server(tmp_path)
    assert await ask(server, "GET", "/v1/models/fake") == 200
    assert await ask(server, "GET", f"/v1/models/fake{control}") == 404
    assert await ask(server, "GET", f"/v1/models/{control}fake") == 404


async def test_upper_case_is_another_path(tmp_path):
    server = make_server(tmp_path, "user", "boss")
    for path, method in routes(server):
        if path.upper() != path and "{" not in path:
            assert await ask(server, method, path.upper(), [USER]) == 404
            assert await ask(server, method, path.upper()) == 401


@pytest.mark.parametrize(("api", "admin"), CONFIGS)
async def test_other_methods_run_nothing(tmp_path, api, admin):
    server = make_server(tmp_path, api, admin)
    known = routes(server)
    methods = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "TRACE", "CONNECT", "get", "X")
    for path, method in itertools.product({path for path, _ in known}, methods):
        if (path, method) in known:
            continue
        for form in ("none", "user", "admin"):
            status = await ask(server, method, concrete(path), KEY_FORMS[form])
            # To be told so takes the key of the path's own routes, or a client's.
            level = path if path in ADMIN else ""
            assert status == (refusal(level, form, api, admin) or 405), (method, path, form)


async def test_asking_for_the_methods_takes_no_key(tmp_path):
    server = make_server(tmp_path, "user", "boss")
    for path in OPEN | ADMIN | CLIENTS:
        assert await ask(server, "OPTIONS", concrete(path)) == 405
    assert await ask(server, "OPTIONS", "/flush_cache%0a") == 404
    assert await ask(server, "OPTIONS", "*") == 404


HOSTS = ("x/health?", "x/health#", "127.0.0.1/health", "x/v1/?", "", "[", "a b", "x@y", "\x7f")


@pytest.mark.parametrize("host", HOSTS)
async def test_a_host_header_decides_nothing(tmp_path, host):
    server = make_server(tmp_path, "user", "boss")
    for path, method in routes(server):
        for form in ("none", "user"):
            status = await ask(server, method, concrete(path), KEY_FORMS[form], host=host)
            expected = refusal(path, form, "user", "boss")
            assert (status in (401, 403)) == (expected is not None)


async def test_an_x_api_key_is_a_key(tmp_path):
    server = make_server(tmp_path, "user", "boss")
    for key, path, method, expected in (
        ("user", "/model_info", "GET", 200),
        ("nope", "/model_info", "GET", 401),
        ("user", "/flush_cache", "POST", 403),
        ("boss", "/flush_cache", "POST", 503),
    ):
        assert await ask(server, method, path, **{"x-api-key": key}) == expected
    assert await ask(server, "GET", "/model_info", [b"Bearer nope"], **{"x-api-key": "user"}) == 401


@pytest.mark.parametrize("path", ["/flush_cache", "/generate", "/health", "/v1/models/fake"])
async def test_an_operators_route_takes_no_other_routes_place(tmp_path, path):
    taken = make_server(tmp_path, "user", "boss", vertex_route=path)
    plain = make_server(tmp_path, "user", "boss")
    for method, key in itertools.product(("GET", "POST"), ([], [USER], [BOSS])):
        expected = await ask(plain, method, path, key)
        if expected == 405 and method == "POST":
            # It was free: now the route is there, for clients.
            expected = 400
        assert await ask(taken, method, path, key) == expected


async def answer(request: Request) -> Response:
    return PlainTextResponse(request.scope["path"])


def table_of(access: Access, *routes, **options) -> RouteTable:
    table = RouteTable(**options)
    for route in routes:
        table.add(route, access)
    return table


def test_a_route_without_a_level_is_not_taken(tmp_path):
    with pytest.raises(TypeError):
        AccessRouter()  # type: ignore[call-arg]
    server = make_server(tmp_path)
    # Declared past the routers, it is described and cannot be called.
    server.app.api.get("/late")(answer)
    scope = {"type": "http", "method": "GET", "path": "/late", "headers": []}
    assert server.app.routes.resolve(scope).path is None


def test_what_would_not_be_kept_to_is_not_taken():
    async def forbid() -> None:
        raise AssertionError

    async def parsed(size: int) -> Response:
        return Response(str(size))

    async def untyped(request):
        return request

    declared = AccessRouter(Access.KEY)
    declared.add_api_route("/guarded", answer, dependencies=[Depends(forbid)])
    declared.add_api_route("/parsed", parsed)
    declared.add_api_route("/untyped", untyped)
    declared.add_api_route("/line\n", answer)
    others = [WebSocketRoute("/socket", answer)]
    for route in (*declared.routes, *others):
        with pytest.raises(TypeError):
            table_of(Access.KEY, route)
    declared = AccessRouter(Access.OPEN)
    declared.add_api_route("/written", answer, methods=["POST"])
    with pytest.raises(TypeError, match="may only answer GET and HEAD"):
        table_of(Access.OPEN, declared.routes[0])


async def test_a_mounted_application_has_the_level_of_its_mount():
    inner = Starlette()
    inner.add_route("/file", answer)
    table = table_of(Access.ADMIN, Mount("/static", inner), root_path="/llm")
    for path, is_found in (
        *(("/static/file", True), ("/llm/static/file", True), ("/static/other", True)),
        *(("/static", False), ("/static/file\n", False), ("//static/file", False)),
    ):
        scope = {"type": "http", "method": "GET", "path": path, "headers": []}
        match = table.resolve(scope)
        assert match.access is (Access.ADMIN if is_found else Access.KEY)
        assert (match.path == "/static") == is_found
