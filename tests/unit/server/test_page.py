"""`/` answers browsers with a page and programs with JSON."""

import pytest

from tests.support.fake_server import FakeServer

CHROME = "text/html,application/xhtml+xml,application/xml;q=0.9,image/webp,*/*;q=0.8"


@pytest.mark.parametrize(
    ("accept", "is_page"),
    [
        (CHROME, True),
        ("text/html", True),
        ("TEXT/HTML, application/json;q=0.5", True),
        ("*/*", False),
        ("", False),
        ("application/json", False),
        ("application/json, text/html;q=0.9", False),
        ("text/html;q=0.2, */*;q=0.8", False),
        ("text/html, */*", False),
        ("text/html;q=0", False),
        ("text/html;q=nan2", False),
        ("text/plain, text/htmlx", False),
    ],
)
async def test_accept_decides(tmp_path, accept, is_page):
    answer = await FakeServer(tmp_path).client.get("/", headers={"accept": accept})
    assert answer.status_code == 200
    assert answer.headers["content-type"].startswith("text/html") == is_page
    assert answer.headers["vary"] == "accept"
    if not is_page:
        assert answer.json()["name"] == "headrace"


async def test_the_page_needs_no_key_and_the_json_does(tmp_path):
    server = FakeServer(tmp_path, api_key="SECRET", fastapi_root_path="/llm")
    for path in ("/", "/llm/"):
        page = await server.client.get(path, headers={"accept": CHROME})
        assert page.status_code == 200
        assert 'data-key="needed"' in page.text
        assert "SECRET" not in page.text
        assert (await server.client.get(path)).status_code == 401
        posted = await server.client.post(path, headers={"accept": CHROME})
        assert posted.status_code == 401
    open_server = FakeServer(tmp_path)
    page = await open_server.client.get("/", headers={"accept": CHROME})
    assert "data-key" not in page.text


async def test_files_are_kept_by_browsers_until_they_change(tmp_path):
    client = FakeServer(tmp_path).client
    first = await client.get("/page/main.js")
    assert first.headers["content-type"].startswith("text/javascript")
    assert first.headers["x-content-type-options"] == "nosniff"
    again = await client.get("/page/main.js", headers={"if-none-match": first.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")


@pytest.mark.parametrize("name", ["", "main.py", "../app.py", "..%2fapp.py", "%2e%2e/app.py"])
async def test_nothing_beside_the_files_is_served(tmp_path, name):
    assert (await FakeServer(tmp_path).client.get(f"/page/{name}")).status_code == 404


async def test_the_policy_allows_this_server_alone(tmp_path):
    answer = await FakeServer(tmp_path).client.get("/page/index.html")
    policy = dict(
        part.split(maxsplit=1) for part in answer.headers["content-security-policy"].split("; ")
    )
    assert policy.pop("default-src") == "'none'"
    assert policy.pop("require-trusted-types-for") == "'script'"
    assert policy.pop("img-src") == "'self' data:"
    assert set(policy.values()) == {"'self'", "'none'"}
    # Everything in it is a file of its own: inline parts would be refused.
    for inline in ("style=", "onclick", "<style", "://"):
        assert inline not in answer.text
