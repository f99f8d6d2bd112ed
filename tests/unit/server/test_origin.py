"""Web pages that call the server: its own, listed ones, foreign ones with and without a key."""

import socket

import pytest

from tests.support.fake_server import FakeServer

EVIL = "http://evil.example"
NAME = socket.gethostname().lower()
PATHS = ("/generate", "/v1/completions", "/flush_cache", "/abort_request")


def page(origin, host="127.0.0.1:30000"):
    return {"Origin": origin, "Host": host}


def bearer(key):
    return {"Authorization": f"Bearer {key}"}


def make_server(folder, **options):
    server = FakeServer(folder, **options)
    server.context.client.ready = False
    return server


async def post(server, path, headers):
    # What a script may send once it has asked; what it may send without asking is no JSON.
    headers = {"content-type": "application/json", **headers}
    return await server.client.post(path, content=b'{"text": "a"}', headers=headers)


@pytest.mark.parametrize(
    ("headers", "is_own"),
    [
        ({}, True),
        (page("http://127.0.0.1:30000"), True),
        (page("https://127.0.0.1:30000"), True),
        (page("http://localhost:30000", "localhost:30000"), True),
        (page("http://[::1]:30000", "[::1]:30000"), True),
        (page("http://192.168.1.5:30000", "192.168.1.5:30000"), True),
        (page(f"http://{NAME}:30000", f"{NAME}:30000"), True),
        (page(f"https://{NAME}", NAME), True),
        (page(EVIL), False),
        (page("null"), False),
        (page("http://127.0.0.1:9999"), False),
        (page("http://localhost:30000"), False),
        # A page whose name was pointed at this machine has the right host and a wrong kind of it.
        (page("http://evil.example:30000", "evil.example:30000"), False),
        (page(f"http://{NAME}.evil.example:30000", f"{NAME}.evil.example:30000"), False),
        (page("http://127.0.0.1.evil.example", "127.0.0.1.evil.example"), False),
        (page("http://evil@localhost:30000", "localhost:30000"), False),
        (page("tauri://localhost", "localhost"), False),
        (page("vscode-webview://0c8f"), False),
        (page("http://[", "["), False),
        (page("http://[::1", "[::1"), False),
        (page("\x7f"), False),
        (page("http://127.0.0.1:30000" + "x" * 10_000), False),
    ],
)
async def test_pages_of_other_origins_cannot_post(tmp_path, headers, is_own):
    server = make_server(tmp_path)
    for path in PATHS:
        assert ((await post(server, path, headers)).status_code != 403) == is_own


async def test_two_origins_are_nobodys(tmp_path):
    server = make_server(tmp_path)
    own = ("Origin", "http://127.0.0.1:30000")
    for headers in ([own, ("Origin", EVIL)], [("Origin", EVIL), own], [own, own]):
        assert (await server.client.post("/generate", headers=headers)).status_code == 403


async def test_the_refusal_says_what_to_do(tmp_path, caplog):
    caplog.set_level("INFO", logger="server.access")
    server = make_server(tmp_path)
    native = await post(server, "/generate", page(EVIL))
    openai = await post(server, "/v1/completions", page(EVIL))
    for answer in (native, openai):
        assert answer.status_code == answer.json()["code"] == 403
        assert f"--allow-origins {EVIL}" in answer.json()["message"]
        assert "API key" in answer.json()["message"]
    assert openai.json()["error"]["type"] == "permission_error"
    lines = [each.getMessage() for each in caplog.records if each.name == "server.access"]
    assert len(lines) == 2
    assert all(EVIL in line and "another origin" in line for line in lines)


async def test_a_valid_key_is_welcome_from_anywhere(tmp_path):
    server = make_server(tmp_path, api_key="user", admin_api_key="boss")
    for origin in (EVIL, "null", "tauri://localhost", "vscode-webview://0c8f"):
        for path, key, expected in (
            *(("/generate", "user", 503), ("/v1/completions", "user", 503)),
            *(("/flush_cache", "boss", 503), ("/flush_cache", "user", 403)),
            *(("/generate", "nope", 401), ("/generate", "", 401)),
        ):
            answer = await server.client.post(
                path,
                json={"text": "a", "prompt": "a", "model": "fake"},
                headers={**page(origin), **(bearer(key) if key else {})},
            )
            assert answer.status_code == expected, (origin, path, key)
            # The page may read what its key was good for, and no more.
            allowed = answer.headers.get("access-control-allow-origin")
            assert allowed == (origin if key in ("user", "boss") else None)


async def test_routes_that_need_no_key_are_closed_to_foreign_pages_without_one(tmp_path):
    server = make_server(tmp_path, admin_api_key="boss")
    assert (await post(server, "/generate", page(EVIL))).status_code == 403
    assert (await post(server, "/generate", {**page(EVIL), **bearer("nope")})).status_code == 403
    assert (await post(server, "/generate", {**page(EVIL), **bearer("boss")})).status_code == 503
    assert (await post(server, "/flush_cache", page(EVIL))).status_code == 401


async def test_reading_is_left_to_the_browser(tmp_path):
    server = make_server(tmp_path)
    for method in ("GET", "HEAD"):
        answer = await server.client.request(method, "/", headers=page(EVIL))
        assert answer.status_code == 200
        assert "access-control-allow-origin" not in answer.headers


@pytest.mark.parametrize(
    ("headers", "is_own"),
    [
        ({"Sec-Fetch-Site": "cross-site"}, False),
        ({"Sec-Fetch-Site": "same-site"}, False),
        ({"Sec-Fetch-Site": "same-origin", "Host": "evil.example:30000"}, False),
        ({"Sec-Fetch-Site": "cross-site", **page(EVIL)}, False),
        (page(EVIL), False),
        # A link of our own page, or one that another program opens, is nobody's wish either.
        ({"Sec-Fetch-Site": "same-origin"}, False),
        ({"Sec-Fetch-Site": "none"}, False),
        ({"User-Agent": "Mozilla/5.0 (X11; Linux x86_64)"}, False),
        ({"Referer": "http://127.0.0.1:30000/docs"}, False),
        ({"User-Agent": "curl/8.14"}, True),
        ({}, True),
    ],
)
async def test_an_image_tag_cannot_flush(tmp_path, headers, is_own):
    server = make_server(tmp_path)
    response = await server.client.get("/flush_cache", headers=headers)
    assert (response.status_code != 403) == is_own


def preflight(origin, headers="content-type", method="POST"):
    return {
        **page(origin),
        "Access-Control-Request-Method": method,
        "Access-Control-Request-Headers": headers,
    }


@pytest.mark.parametrize("path", ["/generate", "/v1/chat/completions", "/flush_cache", "/nope"])
async def test_a_refused_preflight_says_why(tmp_path, caplog, path):
    caplog.set_level("INFO", logger="server.access")
    for options in ({}, {"api_key": "user"}):
        server = make_server(tmp_path, **options)
        answer = await server.client.options(path, headers=preflight(EVIL))
        assert answer.status_code == 403
        assert f"--allow-origins {EVIL}" in answer.json()["message"]
        assert "access-control-allow-origin" not in answer.headers
    assert all("another origin" in each.getMessage() for each in caplog.records)


@pytest.mark.parametrize("header", ["authorization", "content-type, Authorization", "x-api-key"])
async def test_a_preflight_that_announces_a_key_is_let_through(tmp_path, header):
    server = make_server(tmp_path, api_key="user")
    answer = await server.client.options("/generate", headers=preflight(EVIL, header))
    assert answer.status_code == 200
    assert answer.headers["access-control-allow-origin"] == EVIL
    assert "POST" in answer.headers["access-control-allow-methods"]
    assert answer.headers["access-control-allow-headers"] == header
    # No key could be valid here.
    open_server = make_server(tmp_path)
    answer = await open_server.client.options("/generate", headers=preflight(EVIL, header))
    assert answer.status_code == 403


async def test_listed_origins_are_welcome(tmp_path):
    good = "http://good.example"
    server = make_server(tmp_path, allow_origins=[good], api_key="user")
    answer = await server.client.options("/generate", headers=preflight(good))
    assert answer.status_code == 200
    assert answer.headers["access-control-allow-origin"] == good
    # It may read why it was refused, too.
    for path, key, expected in (("/generate", "user", 503), ("/generate", "nope", 401)):
        answer = await post(server, path, {**page(good), **bearer(key)})
        assert answer.status_code == expected
        assert answer.headers["access-control-allow-origin"] == good
    for other in (EVIL, "http://good.example.evil.example", "https://good.example"):
        refused = await server.client.options("/generate", headers=preflight(other))
        assert refused.status_code == 403
        read = await server.client.get("/model_info", headers={**page(other), **bearer("nope")})
        assert "access-control-allow-origin" not in read.headers
    plain = await server.client.get("/model_info", headers=bearer("user"))
    assert "access-control-allow-origin" not in plain.headers


async def test_any_origin_may_be_listed(tmp_path):
    server = make_server(tmp_path, allow_origins=["*"])
    assert (await post(server, "/generate", page(EVIL))).status_code == 503
    answer = await server.client.options("/generate", headers=preflight(EVIL))
    assert answer.headers["access-control-allow-origin"] == "*"
