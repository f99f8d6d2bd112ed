"""Keys: the table of access levels, for any form of the header."""

import sys
from types import FrameType, SimpleNamespace
from typing import Any

import pytest

from runtime.config.options import HttpArgs, LoggingArgs
from runtime.errors import StartupError
from server.access import Access
from server.entry.keys import Keys
from server.entry.tenants import read_tenants
from tests.support.fake_server import FakeServer

NORMAL = "/model_info"
ADMIN = "/flush_cache"


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


async def status(server: FakeServer, path: str, key: str | None) -> int:
    method = "POST" if path == ADMIN else "GET"
    headers = bearer(key) if key else {}
    server.context.client.ready = False  # control routes then answer 503 at once
    return (await server.client.request(method, path, headers=headers)).status_code


@pytest.mark.parametrize(
    ("api", "admin", "path", "key", "allowed"),
    [
        (None, None, NORMAL, None, True),
        (None, None, ADMIN, None, True),
        ("k", None, NORMAL, None, False),
        ("k", None, NORMAL, "k", True),
        ("k", None, NORMAL, "K", False),
        ("k", None, ADMIN, "k", True),
        ("k", None, ADMIN, None, False),
        (None, "a", NORMAL, None, True),
        (None, "a", ADMIN, None, False),
        (None, "a", ADMIN, "a", True),
        ("k", "a", NORMAL, "k", True),
        ("k", "a", NORMAL, "a", False),
        ("k", "a", ADMIN, "a", True),
        ("k", "a", ADMIN, "k", False),
    ],
)
async def test_the_table_of_levels(tmp_path, api, admin, path, key, allowed):
    server = FakeServer(tmp_path, api_key=api, admin_api_key=admin)
    assert (await status(server, path, key) not in (401, 403)) == allowed


async def test_bodies(tmp_path):
    server = FakeServer(tmp_path, api_key="k", admin_api_key="a")
    missing = await server.client.get(NORMAL)
    assert (missing.status_code, missing.json()) == (401, {"error": "Unauthorized"})
    assert missing.headers["www-authenticate"] == "Bearer"
    assert missing.headers["x-request-id"]
    wrong = await server.client.post(ADMIN, headers=bearer("k"))
    assert (wrong.status_code, wrong.json()) == (403, {"error": "Forbidden"})
    openai = await server.client.get("/v1/models")
    assert openai.status_code == openai.json()["code"] == 401
    assert openai.headers["www-authenticate"] == "Bearer"
    error = openai.json()["error"]
    assert (error["type"], error["code"]) == ("authentication_error", "invalid_api_key")
    assert "Authorization: Bearer" in error["message"]


@pytest.mark.parametrize(
    "value",
    ["", "k", "Bearer", "Bearer ", "Bearer  ", "Basic k", "Bearer k extra", "Bearer kk", "Bearerk"],
)
async def test_odd_headers_are_refused(tmp_path, value):
    server = FakeServer(tmp_path, api_key="k")
    response = await server.client.get(NORMAL, headers={"Authorization": value})
    assert response.status_code == 401


async def test_scheme_case_and_doubled_headers(tmp_path):
    server = FakeServer(tmp_path, api_key="k")
    assert (await server.client.get(NORMAL, headers={"Authorization": "bEaReR k"})).is_success
    doubled = [("Authorization", "Bearer k"), ("Authorization", "Bearer k")]
    assert (await server.client.get(NORMAL, headers=doubled)).status_code == 401


@pytest.mark.parametrize(
    "path",
    ["/healthy/../model_info", "/health/", "/health/x", "/metricsx", "//health", "/docs", "/nope"],
)
async def test_near_misses_of_open_paths_are_closed(tmp_path, path):
    server = FakeServer(tmp_path, api_key="k")
    assert (await server.client.get(path)).status_code == 401


async def test_a_route_named_by_the_operator_is_closed_whatever_its_name(tmp_path):
    server = FakeServer(tmp_path, api_key="k", vertex_route="/health")
    body = {"instances": [{"text": "a"}]}
    assert (await server.client.post("/health", json=body)).status_code == 401
    answer = await server.client.post("/health", json=body, headers=bearer("k"))
    assert len(answer.json()["predictions"]) == 1
    assert (await server.client.get("/health")).status_code == 200


async def test_get_changes_nothing_once_a_key_is_set(tmp_path):
    keyed = FakeServer(tmp_path, api_key="k")
    response = await keyed.client.get("/flush_cache", headers=bearer("k"))
    assert response.status_code == 405


async def test_keys_never_show(tmp_path):
    server = FakeServer(tmp_path, api_key="SECRET-1", admin_api_key="SECRET-2")
    for path in (
        "/server_info",
        "/get_server_info",
        "/model_info",
        "/v1/loads",
        "/",
        "/openapi.json",
    ):
        response = await server.client.get(path, headers=bearer("SECRET-1"))
        assert response.status_code == 200
        assert "SECRET" not in response.text


async def test_a_root_path_changes_nothing(tmp_path):
    server = FakeServer(tmp_path, api_key="k", fastapi_root_path="/llm")
    assert (await server.client.get("/llm/health")).status_code == 200
    assert (await server.client.get("/llm/model_info")).status_code == 401
    assert (await server.client.get("/llm/model_info", headers=bearer("k"))).status_code == 200


async def test_paths_of_this_machine_never_show(tmp_path):
    hidden = {
        "ssl_certfile": "/secret/folder/a.pem",
        "ssl_keyfile": "/secret/folder/b.pem",
        "ssl_ca_certs": "~/secret/folder/c.pem",
    }
    logging = LoggingArgs(torch_profiler_dir="/secret/folder/traces")
    roots = ["/secret/folder", "/secret/folder/weights"]
    template = tmp_path / "chat.jinja"
    template.write_text("{{ messages }}")
    server = FakeServer(
        tmp_path,
        logging=logging,
        model_options={"weights_root": roots},
        chat_template=str(template),
        **hidden,
    )
    for path in ("/server_info", "/get_server_info", "/model_info"):
        answer = await server.client.get(path)
        assert "secret" not in answer.text
        assert str(tmp_path) not in answer.text
    told = (await server.client.get("/server_info")).json()
    assert told["chat_template"] == "chat.jinja"
    assert told["weights_root"] == ["folder", "weights"]
    # Clients find the tokenizer by these.
    assert told["model_path"] == told["tokenizer_path"] == "fake/model"


def keys_file(tmp_path, *keys):
    path = tmp_path / "keys"
    path.write_text("\n".join(("# name of a team", "", *keys)) + "\n")
    return str(path)


async def test_keys_of_the_file_open_what_clients_may_have(tmp_path):
    path = keys_file(tmp_path, "one", " two ")
    server = FakeServer(tmp_path, api_key="k", admin_api_key="a", api_keys_file=path)
    allowed = {key: [] for key in ("one", "two", "three", "# name of a team", "k", None)}
    for key, codes in allowed.items():
        codes += [await status(server, NORMAL, key), await status(server, ADMIN, key)]
    assert allowed["one"] == allowed["two"] == allowed["k"] == [200, 403]
    assert allowed["three"] == allowed["# name of a team"] == allowed[None] == [401, 401]
    info = (await server.client.get("/server_info", headers=bearer("one"))).json()
    assert info["api_keys_file"] == "keys"


async def test_keys_of_the_file_share_no_prefix(tmp_path):
    path = keys_file(tmp_path, "one", "two")
    server = FakeServer(tmp_path, api_key="k", admin_api_key="a", api_keys_file=path)
    bodies = {
        "/generate": {"text": "a"},
        "/v1/completions": {"model": "m", "prompt": "a"},
        "/v1/chat/completions": {"model": "m", "messages": [{"role": "user", "content": "a"}]},
    }
    for route, body in bodies.items():
        found = {}
        for key in ("one", "two", "k"):
            for salt in ({}, {"cache_salt": "s"}):
                for _ in range(2):
                    first = len(server.engine.requests)
                    answer = await server.client.post(route, json=body | salt, headers=bearer(key))
                    assert answer.status_code == 200, answer.text
                    spaces = {each.spec.cache_namespace for each in server.engine.requests[first:]}
                    assert len(spaces) == 1
                    found.setdefault((key, *salt), set()).update(spaces)
        # The same each time, and of nobody else.
        assert all(len(spaces) == 1 for spaces in found.values())
        assert len(set.union(*found.values())) == len(found)
        assert found["k",] == {""}


def test_a_key_has_its_own_name_wherever_it_stands(tmp_path):
    given = {"api_key": "k", "admin_api_key": "a"}
    before = read_tenants(HttpArgs(api_keys_file=keys_file(tmp_path, "one", "two"), **given))
    after = read_tenants(HttpArgs(api_keys_file=keys_file(tmp_path, "new", "two", "one"), **given))
    assert before.items() < after.items()
    assert len({*after.values()}) == 3
    assert not any(key in name for name in after.values() for key in ("one", "two", "new"))


@pytest.mark.parametrize(
    ("keys", "given", "word"),
    [
        (["one"], {"api_key": "k"}, "--admin-api-key"),
        (["one"], {"admin_api_key": "a"}, "--api-key"),
        ([], {}, "holds no key"),
        (["one", "one"], {}, "twice"),
        (["k"], {}, "operator's"),
        (["\udcff"], {}, "keys: "),
    ],
)
def test_files_of_keys_that_make_no_sense(tmp_path, keys, given, word):
    path = tmp_path / "keys"
    path.write_text("\n".join(keys), errors="surrogateescape")
    given = given or {"api_key": "k", "admin_api_key": "a"}
    with pytest.raises(StartupError, match=word):
        read_tenants(HttpArgs(api_keys_file=str(path), **given))


def test_what_a_wrong_key_shares_with_the_right_one_costs_no_step(tmp_path):
    """The same calls of the same functions, so that nothing can be learnt of a key by the clock."""
    right = "0123456789abcdef" * 2
    file = tmp_path / "keys"
    file.write_text("another-key\n")
    keys = Keys(HttpArgs(api_key=right, admin_api_key="admin", api_keys_file=str(file)))

    def steps_of(key: str) -> list[str]:
        route = SimpleNamespace(access=Access.KEY)
        scope = {"headers": [(b"authorization", b"Bearer " + key.encode())], "route": route}
        steps: list[str] = []

        def note(frame: FrameType, event: str, arg: Any) -> None:
            where = arg.__name__ if event.startswith("c_") else frame.f_code.co_name
            steps.append(f"{event} {where}")

        sys.setprofile(note)
        try:
            refusal = keys.refusal(scope)
        finally:
            sys.setprofile(None)
        assert refusal is not None
        return steps

    wrong = [right[:count] + "x" * (32 - count) for count in (0, 1, 16, 31)]
    found = [steps_of(key) for key in wrong]
    assert any("compare_digest" in step for step in found[0])
    assert found == [found[0]] * len(wrong)
